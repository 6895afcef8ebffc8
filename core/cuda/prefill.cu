// Chooses the instance of the kernel for many query rows, cuts its work into blocks and launches it.
#include "cuda/prefill.h"

#include <algorithm>
#include <type_traits>

#include "cuda/device.h"
#include "cuda/prefill_kernel.cuh"
#include "cuda/prefill_pages.h"

namespace kivi::cuda {
namespace {

constexpr int32_t kFewRows = 64;                  // up to so many, blocks of few rows
constexpr int64_t kMaxTokens = int64_t{1} << 30;  // positions are 32-bit
constexpr int64_t kLeastPieces = 4;               // of a part

// Instances: bf16, dim, warps beside each other in rows, row tiles of a warp, warps beside each other in tokens,
// blocks on a multiprocessor, stages; published schedule.
// Two row tiles of 128 channels leave no registers for a middle.
template <bool BF16, int DIM, bool PUBLISHED>
using Many = std::conditional_t<(DIM > 128 || (DIM == 128 && PUBLISHED)),
                                prompt::Config<BF16, DIM, 8, 1, 1, 1, 1, PUBLISHED>,
                                prompt::Config<BF16, DIM, 4, 2, 1, 2, 1, PUBLISHED>>;
template <bool BF16, int DIM, bool PUBLISHED>
using Few = std::conditional_t<(DIM > 128), prompt::Config<BF16, DIM, 4, 1, 2, 1, 1, PUBLISHED>,
                               prompt::Config<BF16, DIM, 2, 1, 2, 3, 1, PUBLISHED>>;

template <bool BF16, int DIM, bool PUBLISHED, class Visit>
void with_rows(bool few, const Visit& visit) {
    few ? visit(Few<BF16, DIM, PUBLISHED>{}) : visit(Many<BF16, DIM, PUBLISHED>{});
}
template <bool BF16, int DIM, class Visit>
void with_schedule(const TensorStore& key, bool few, const Visit& visit) {
    key.windows.schedule == KIVI_SCHEDULE_PUBLISHED ? with_rows<BF16, DIM, true>(few, visit)
                                                    : with_rows<BF16, DIM, false>(few, visit);
}
template <bool BF16, class Visit>
void with_dim(const TensorStore& key, bool few, const Visit& visit) {
    if (key.dim == 64) with_schedule<BF16, 64>(key, few, visit);
    if (key.dim == 128) with_schedule<BF16, 128>(key, few, visit);
    if (key.dim == 256) with_schedule<BF16, 256>(key, few, visit);
}
// visit(Config) for the layer's instance, if there is one.
template <class Visit>
void with_config(const TensorStore& key, bool few, const Visit& visit) {
    key.window_dtype == KIVI_BF16 ? with_dim<true>(key, few, visit) : with_dim<false>(key, few, visit);
}

bool few_rows(const Layer& layer, int32_t max_count) { return max_count <= prefill_few_count(layer); }

// How the query rows of a call are cut into blocks.
template <class C>
struct Cut {
    int64_t tiles, items;  // of the rows of a sequence and KV head; of all
    int64_t room, most;    // blocks beside each other on the GPU; parts that a sequence can have
    Cut(const Layer& layer, int32_t rows, int32_t max_count, const Gpu& gpu)
        : tiles((static_cast<int64_t>(max_count) * ratio(layer) + C::kRows - 1) / C::kRows),
          items(tiles * rows * layer.key.heads),
          room(int64_t{gpu.multiprocessors} * C::kBlocks),
          most((layer.max_tokens + max_count) / (C::kTokens * kLeastPieces)) {}
    // Where blocks do not fill the GPU, they share: as many parts as fit.
    int32_t parts() const { return static_cast<int32_t>(std::max(int64_t{1}, std::min(room / items, most))); }
    // An upper bound of the blocks that share, for fewer rows too.
    int64_t sharing() const { return most > 1 ? std::min(room, items * most) : 0; }
};

// The same of the kernel of prefill_pages.cuh, which leaves results of all its blocks: so that these stay few, the
// tiles of a long prompt are done in several launches.
template <class C>
struct PageCut {
    static constexpr int kRounds = 4;  // of blocks on a multiprocessor, in a launch
    int64_t room, most;
    int64_t tiles, items, all;  // of a launch; items of all launches
    PageCut(const Cut<C>& cut, const Layer& layer, int32_t rows, const Gpu& gpu)
        : room(gpu.multiprocessors),
          most(std::max(int64_t{1}, cut.most)),
          tiles(std::min(cut.tiles, std::max(int64_t{1}, kRounds * room / (int64_t{rows} * layer.key.heads)))),
          items(tiles * rows * layer.key.heads),
          all(cut.items) {}
    int32_t parts() const { return static_cast<int32_t>(std::min(std::max(int64_t{1}, room / items), most)); }
    // An upper bound of the blocks of a launch, for fewer rows too.
    int64_t blocks() const { return std::max(items, std::min(kRounds * room, all * most)); }
};

}  // namespace

bool prefill_reads(const AttendArgs& args) {
    const Layer& layer = args.layer;
    const int32_t dtype = layer.key.window_dtype;
    bool served = false;
    with_config(layer.key, true, [&](auto) { served = true; });
    if (!served || args.q.dtype != dtype || !aligned(args.q)) return false;
    return !args.k || (args.k.dtype == dtype && args.v.dtype == dtype && aligned(args.k) && aligned(args.v));
}

bool prefill_takes(const AttendArgs& args) {
    const Layer& layer = args.layer;
    return prefill_reads(args) && (layer.max_tokens + args.batch.max_count) * int64_t{ratio(layer)} < kMaxTokens;
}

int32_t prefill_few_count(const Layer& layer) { return kFewRows / ratio(layer); }

void prepare_prefill(const TensorStore& key, const Gpu& gpu) {
    for (const bool few : {false, true}) {
        with_config(key, few, [](auto config) {
            using C = decltype(config);
            prepare_kernel(prompt::prefill_kernel<C>, sizeof(prompt::SharedStorage<C>));
            prepare_kernel(prompt::add_parts_kernel<C>, 0);
        });
    }
    if (prompt::serves_pages(key, gpu.capability)) prompt::prepare_pages(key);
}

size_t prefill_workspace(const Layer& layer, int32_t rows, int32_t max_count, const Gpu& gpu) {
    int64_t floats = 0;
    for (const bool few : {true, false}) {
        if (!few && few_rows(layer, max_count)) break;
        with_config(layer.key, few, [&](auto config) {
            using C = decltype(config);
            const Cut<C> cut(layer, rows, max_count, gpu);
            int64_t blocks = cut.sharing();
            if (C::kRows == prompt::kPageRows && prompt::serves_pages(layer.key, gpu.capability)) {
                blocks += PageCut<C>(cut, layer, rows, gpu).blocks();
            }
            floats = std::max(floats, prompt::PartialsOf<C>::floats(blocks));
        });
    }
    return floats * sizeof(float);
}

void prefill(const AttendArgs& args, const Gpu& gpu, Stream stream) {
    const Layer& layer = args.layer;
    with_config(layer.key, few_rows(layer, args.batch.max_count), [&](auto config) {
        using C = decltype(config);
        const unsigned heads = layer.key.heads, rows = args.batch.size;
        const Cut<C> cut(layer, args.batch.size, args.batch.max_count, gpu);
        const int32_t tiles = static_cast<int32_t>(cut.tiles);
        // How many parts fit depends on the batch.
        prompt::Args p{args, 0, tiles, args.invariant ? 1 : cut.parts(),
                       prompt::PackedPiece(FragmentSizes(layer.key.spec(), layer.key.dim),
                                           FragmentSizes(layer.value.spec(), layer.value.dim)),
                       0, nullptr};
        if (C::kRows == prompt::kPageRows && args.soft_cap == 0 && args.window_left < 0 &&
            prompt::serves_pages(layer.key, gpu.capability)) {
            const PageCut<C> pages(cut, layer, args.batch.size, gpu);
            p.tiles = static_cast<int32_t>(pages.tiles);
            p.page_parts = args.invariant ? 1 : pages.parts();
            p.page_workspace = args.workspace + prompt::PartialsOf<C>::floats(p.parts > 1 ? cut.items * p.parts : 0);
        }
        const int32_t at_once = p.tiles;
        for (; p.first_tile < tiles; p.first_tile += at_once) {
            p.tiles = std::min(at_once, tiles - p.first_tile);
            if (p.page_parts > 0) prompt::attend_pages(p, stream);
            prompt::prefill_kernel<C><<<dim3(p.tiles * p.parts, heads, rows), C::kThreads,
                                        sizeof(prompt::SharedStorage<C>), stream>>>(p);
        }
        if (p.parts == 1) return;  // more of them have room in one launch
        p.first_tile = 0;
        constexpr int kWarps = prompt::kAddThreads / kWarp;
        const unsigned query_rows = args.batch.max_count * ratio(layer);
        prompt::add_parts_kernel<C><<<dim3((query_rows + kWarps - 1) / kWarps, heads, rows), prompt::kAddThreads, 0,
                                      stream>>>(p);
    });
}

}  // namespace kivi::cuda
