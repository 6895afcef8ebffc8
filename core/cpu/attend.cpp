// The fast attention: cuts a call into items that threads take one by one, walks each item's keys visit by visit
// with the kernels of kernels.h, and merges the parts of long sequences.
//
//   item    one row of the batch, one KV head, up to eight query rows, one split of the sequence
//   split   16 pages or, of long sequences, 32; the sink window belongs to the first, tail and fresh tokens to the
//           last. Splits depend on the length alone and are merged in their order, so results do not depend on batch,
//           threads or page numbers
//   visit   up to 128 tokens whose keys and whose values each stand in one place, seen alike by all query rows
#include "cpu/attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "cpu/attend_walk.h"
#include "cpu/dequantize.h"
#include "cpu/reference_attend.h"
#include "format/hadamard.h"

namespace kivi::cpu {
namespace {

constexpr int kMaxVisits = 40;   // planned together, for the prefetcher: a long split, its windows and borders
constexpr int kVisitsAhead = 2;  // of the next item, prefetched during the last ones of an item
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.69314718f;

// A cap beyond 2^+-60 works like one at that border, while its inverse and its product with log2(e) stay finite.
float soft_cap(const AttendCall& call) {
    return call.soft_cap > 0 ? std::min(std::max(call.soft_cap, 0x1p-60f), 0x1p60f) : 0;
}

// x <- H x; a row of a dim that the kernels do not take goes the plain way.
void rotate(float* x, int dim, const Kernels& kernels) {
    if (dim % kLanes == 0) {
        kernels.hadamard(x, dim);
    } else {
        hadamard(x, dim);
    }
}

// ---- workspace ----

// Carves arrays from a block of memory; with null it only adds up.
class Carver {
  public:
    explicit Carver(void* memory) : base_(static_cast<uint8_t*>(memory)) {}

    template <class T>
    T* take(int64_t count) {
        T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return at;
    }
    size_t used() const { return used_; }

  private:
    uint8_t* base_;
    size_t used_ = 0;
};

// Working memory of one thread.
struct Scratch {
    float* q;        // [kBlockRows][key_dim] in the stored basis, scaled
    float* q_plain;  // likewise as given, for fresh keys
    float* scores;   // [kBlockRows][kPageTokens]
    float* acc;      // [kBlockRows][acc_size]
    float* tile;     // [kTileTokens][dim] decoded rows
    PackedScratch packed;

    Scratch(const Plan& plan, Carver& carver) {
        q = carver.take<float>(kBlockRows * plan.key_dim);
        q_plain = carver.take<float>(kBlockRows * plan.key_dim);
        scores = carver.take<float>(kBlockRows * kPageTokens);
        acc = carver.take<float>(static_cast<int64_t>(kBlockRows) * plan.acc_size);
        tile = carver.take<float>(static_cast<int64_t>(kTileTokens) * std::max(plan.key_dim, plan.value_dim));
        packed.operand = carver.take<int32_t>(kOperandPairs);
        packed.values = carver.take<float>(kBlockRows * kMaxDim);
    }
};

// What a row of the batch brings: items [split][KV head][block], where the last split comes first, because it holds the
// tail and takes longest; and, if it is split, parts [KV head][query row][split].
struct RowWork {
    int64_t first_item, first_part;  // in the call
    int64_t blocks, splits;
};

// The workspace of one call.
struct Workspace {
    RowWork* rows;
    uint8_t* scratch;  // [threads][scratch_bytes]
    size_t scratch_bytes;
    std::atomic<int32_t>* arrived;  // [row][KV head][most_split_blocks]: splits that are there
    float* parts;

    Workspace(const Plan& plan, int threads, int32_t row_count, int64_t part_count, Carver& carver) {
        Carver one(nullptr);
        Scratch(plan, one);
        scratch_bytes = one.used();
        rows = carver.take<RowWork>(row_count);
        scratch = carver.take<uint8_t>(static_cast<int64_t>(threads * scratch_bytes));
        arrived = carver.take<std::atomic<int32_t>>(row_count * plan.layer.shape.kv_heads * plan.most_split_blocks());
        parts = carver.take<float>(part_count * plan.part_floats);
    }

    Scratch of_thread(const Plan& plan, int thread) const {
        Carver carver(scratch + thread * scratch_bytes);
        return Scratch(plan, carver);
    }
};

// ---- items ----

// One item: its query rows and what they see.
class Item {
  public:
    Item(const Plan& plan, const AttendCall& call, const Row& row, const Walk& walk, const Scratch& scratch)
        : plan_(plan), call_(call), row_(row), walk_(walk), scratch_(scratch), rows_(walk.rows()) {
        for (int r = 0; r < rows_; ++r) {
            acc_[r] = scratch.acc + static_cast<int64_t>(r) * plan.acc_size;
            max_[r] = -kInfinity;
            sum_[r] = 0;
            last_[r] = walk.last(r);
            from_[r] = walk.from(r);
        }
        std::memset(scratch.acc, 0, sizeof(float) * rows_ * plan.acc_size);
    }

    // `prefetch_next(ranges)` is called near the end: it says what the thread will read after this item, up to
    // 2 * kVisitsAhead ranges, and returns their number.
    template <class Next>
    void run(Walk::Positions positions, const Next& prefetch_next) {
        if (positions.begin >= positions.end) return;
        load_queries();
        Visit visits[kMaxVisits];
        while (positions.begin < positions.end) {
            int ranges = 0;
            const int count = walk_.visits(positions, kMaxVisits, visits, ranges_, ranges);
            positions.begin = visits[count - 1].end;
            const int late = positions.begin < positions.end ? count : std::max(0, count - kVisitsAhead);
            ahead_.start(ranges_, ranges);
            for (int i = 0; i < count; ++i) {
                if (i == late) ahead_.extend(prefetch_next(ranges_ + ranges));
                visit(visits[i]);
            }
        }
    }

    // Sums in the stored basis, mins included, and those of fresh values, if any, as one part (Plan::part_floats).
    void store_part(int r, float* part) const {
        part[0] = max_[r];
        part[1] = sum_[r];
        float* sums = part + kLanes;
        const float* acc = acc_[r];
        std::memcpy(sums, acc, sizeof(float) * plan_.value_dim);
        for (int g = 0; g < plan_.values.groups; ++g) {
            float lanes[kLanes];
            std::memcpy(lanes, acc + plan_.mins + g * kLanes, sizeof lanes);
            for (int half = kLanes / 2; half > 0; half /= 2) {
                for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
            }
            const int stop = std::min(plan_.value_dim, (g + 1) * plan_.values.group);
            for (int c = g * plan_.values.group; c < stop; ++c) sums[c] += lanes[0];
        }
        std::memcpy(sums + plan_.value_dim, acc + plan_.fresh, sizeof(float) * (plan_.acc_size - plan_.fresh));
    }

    int rows() const { return rows_; }

  private:
    void load_queries() {
        const TensorStore& keys = plan_.layer.key;
        const float cap = soft_cap(call_);
        const float scale = call_.scale * (cap > 0 ? 1 / cap : kLog2E);
        for (int r = 0; r < rows_; ++r) {
            const int64_t at = origin(call_.q, row_) + walk_.token(r) * call_.q.token_stride +
                               walk_.head(r) * call_.q.head_stride;
            const uint8_t* from =
                static_cast<const uint8_t*>(call_.q.data) + at * static_cast<int64_t>(dtype_bytes(call_.q.dtype));
            float* q = scratch_.q_plain + r * plan_.key_dim;
            plan_.kernels.load_row(from, call_.q.dtype, keys.dim, scale, q);
            for (int c = keys.dim; c < plan_.key_dim; ++c) q[c] = 0;
            float* turned = scratch_.q + r * plan_.key_dim;
            std::memcpy(turned, q, sizeof(float) * plan_.key_dim);
            if (keys.rotated()) rotate(turned, keys.dim, plan_.kernels);
        }
    }

    // Query rows that see the same positions of the visit go through the kernels together.
    void visit(const Visit& visit) {
        for (int r = 0; r < rows_;) {
            const int64_t begin = std::max(visit.begin, from_[r]), end = std::min(visit.end, last_[r] + 1);
            int next = r + 1;
            while (next < rows_ && std::max(visit.begin, from_[next]) == begin &&
                   std::min(visit.end, last_[next] + 1) == end) {
                ++next;
            }
            if (begin < end) {
                visit_rows(visit, static_cast<int>(begin - visit.begin), static_cast<int>(end - begin), r, next - r);
            }
            r = next;
        }
    }

    void visit_rows(const Visit& visit, int skip, int count, int r, int rows) {
        // Scores stand where the token stands in its page, if either tensor is packed.
        const bool paged = visit.key.reader == Reader::packed || visit.value.reader == Reader::packed;
        const int at = paged ? std::max(visit.key.token, visit.value.token) + skip : 0;
        float* s = scratch_.scores + r * kPageTokens;
        score(visit.key, skip, count, at, r, rows, s);
        const float cap = soft_cap(call_) * kLog2E;
        plan_.kernels.softmax(s, at, at + count, rows, cap, plan_.acc_size, {acc_ + r, max_ + r, sum_ + r});
        mix(visit.value, skip, count, at, r, rows, s);
    }

    void score(const Place& place, int skip, int count, int at, int r, int rows, float* s) {
        const float* q = (place.fresh ? scratch_.q_plain : scratch_.q) + r * plan_.key_dim;
        if (place.reader == Reader::packed) {
            PackedPart part = plan_.keys;
            part.data = place.part;
            plan_.kernels.score_packed[plan_.layer.key.spec.bits - 2](part, at, at + count, q, plan_.key_dim, rows, s,
                                                                     scratch_.packed, ahead_);
            return;
        }
        const RowRun run = rows_of(plan_.layer.key, plan_.key_dim, place, skip, count);
        plan_.kernels.score_rows(run, count, q, plan_.key_dim, rows, s + at, ahead_);
    }

    void mix(const Place& place, int skip, int count, int at, int r, int rows, const float* p) {
        if (place.reader == Reader::packed) {
            PackedPart part = plan_.values;
            part.data = place.part;
            plan_.kernels.mix_packed[plan_.layer.value.spec.bits - 2](part, at, at + count, p, rows, acc_ + r,
                                                                     plan_.mins, scratch_.packed, ahead_);
            return;
        }
        const RowRun run = rows_of(plan_.layer.value, plan_.value_dim, place, skip, count);
        float* to[kBlockRows];
        for (int i = 0; i < rows; ++i) to[i] = acc_[r + i] + (place.fresh ? plan_.fresh : 0);
        plan_.kernels.mix_rows(run, count, p + at, rows, to, ahead_);
    }

    // The rows of a place from its token `skip` on; decoded ones go through the tile, padded with zeros.
    RowRun rows_of(const TensorStore& store, int dim, const Place& place, int skip, int count) {
        RowRun run = place.run;
        if (place.reader == Reader::rows) {
            run.data += skip * run.stride;
            return run;
        }
        for (int t = 0; t < count; ++t) {
            float* to = scratch_.tile + static_cast<int64_t>(t) * dim;
            if (place.part != nullptr) {
                unpack_rows(store, place.part, place.token + skip + t, 1, to);
            } else {
                plan_.kernels.load_row(run.data + (skip + t) * run.stride, run.dtype, store.dim, 1.0f, to);
            }
            for (int c = store.dim; c < dim; ++c) to[c] = 0;
        }
        run.data = reinterpret_cast<const uint8_t*>(scratch_.tile);
        run.stride = dim * static_cast<int64_t>(sizeof(float));
        run.dtype = KIVI_F32;
        run.dim = dim;
        return run;
    }

    const Plan& plan_;
    const AttendCall& call_;
    const Row& row_;
    const Walk& walk_;
    const Scratch& scratch_;
    const int rows_;
    float* acc_[kBlockRows];
    float max_[kBlockRows], sum_[kBlockRows];
    int64_t from_[kBlockRows], last_[kBlockRows];  // positions that a row sees
    Ahead::Range ranges_[2 * (kMaxVisits + kVisitsAhead)];
    Ahead ahead_;
};

// ---- results ----

// parts[0] += the later ones, in their order.
void merge_splits(float* parts, int64_t count, int64_t stride) {
    float max = -kInfinity;
    for (int64_t i = 0; i < count; ++i) max = std::max(max, parts[i * stride]);
    if (max == -kInfinity) return;
    const float first = std::exp2(parts[0] - max);
    parts[1] *= first;
    for (int64_t c = kLanes; c < stride; ++c) parts[c] *= first;
    for (int64_t i = 1; i < count; ++i) {
        const float* part = parts + i * stride;
        if (part[0] == -kInfinity) continue;
        const float weight = std::exp2(part[0] - max);
        parts[1] += weight * part[1];
        for (int64_t c = kLanes; c < stride; ++c) parts[c] += weight * part[c];
    }
    parts[0] = max;
}

uint8_t* element(const View& view, const Row& row, int64_t token, int head) {
    const int64_t at = origin(view, row) + token * view.token_stride + head * view.head_stride;
    return static_cast<uint8_t*>(view.data) + at * static_cast<int64_t>(dtype_bytes(view.dtype));
}

// Writes query row `query` of a KV head from its complete part.
void finish(const Plan& plan, const AttendCall& call, const Row& row, int kv_head, int64_t query, float* part) {
    const TensorStore& values = plan.layer.value;
    const int64_t token = query / plan.ratio;
    const int head = kv_head * plan.ratio + static_cast<int>(query % plan.ratio);
    const float max = part[0], sum = part[1];
    const bool empty = max == -kInfinity;
    if (call.lse) {
        store_element(element(call.lse, row, token, head), call.lse.dtype, 0,
                      empty ? -kInfinity : (max + std::log2(sum)) * kLn2);
    }
    float weight = empty ? 0 : 1 / sum;
    if (call.learned_sinks != nullptr && !empty) {
        const float sink = call.learned_sinks[head] * kLog2E;
        weight = sink > max ? std::exp2(max - sink) / (sum * std::exp2(max - sink) + 1) : 1 / (sum + std::exp2(sink - max));
    }
    float* out = part + kLanes;
    const float* fresh = out + plan.value_dim;
    for (int c = 0; c < values.dim; ++c) out[c] *= weight;
    if (values.rotated()) rotate(out, values.dim, plan.kernels);
    if (call.v) {
        for (int c = 0; c < values.dim; ++c) out[c] += weight * fresh[c];
    }
    plan.kernels.store_row(out, values.dim, call.out.dtype, element(call.out, row, token, head));
}

// Which part of the call an item is.
struct ItemAt {
    int32_t row;
    int head;  // KV head
    int64_t block, split;
};

int32_t row_of_item(const RowWork* rows, int32_t count, int64_t item) {
    const auto before = [](int64_t number, const RowWork& row) { return number < row.first_item; };
    return static_cast<int32_t>(std::upper_bound(rows, rows + count, item, before) - rows) - 1;
}

}  // namespace

size_t attend_workspace(const LayerStore& layer, int64_t max_tokens, int threads, int32_t rows, int32_t max_count) {
    const Kernels* table = kernels();
    if (table == nullptr) return 0;
    const Plan plan(layer, *table, true);
    const int64_t splits = std::max(ceil_div(std::min(max_tokens, kLongTokens), kSplitTokens),
                                    ceil_div(max_tokens, kLongSplitTokens));
    const int64_t queries = static_cast<int64_t>(std::min(max_count, kSplitQueries)) * layer.shape.q_heads;
    Carver carver(nullptr);
    Workspace(plan, threads, rows, splits > 1 ? rows * queries * splits : 0, carver);
    return carver.used();
}

void fast_attend(const LayerStore& layer, const AttendCall& call, ThreadPool& pool) {
    const Kernels* table = kernels();
    if (table == nullptr) return reference_attend(layer, call, pool);
    const Plan plan(layer, *table, static_cast<bool>(call.v));
    const int heads = layer.shape.kv_heads;
    const int32_t rows = call.rows.size;
    Carver carver(call.workspace);
    Workspace workspace(plan, pool.threads(), rows, 0, carver);
    int64_t items = 0, parts = 0;
    for (int32_t r = 0; r < rows; ++r) {
        const Row& row = call.rows.data[r];
        const RowWork work{items, parts, plan.blocks(row), plan.splits(row)};
        workspace.rows[r] = work;
        items += heads * work.blocks * work.splits;
        if (work.splits == 1) continue;
        parts += row.count * layer.shape.q_heads * work.splits;
        std::atomic<int32_t>* arrived = workspace.arrived + r * heads * plan.most_split_blocks();
        for (int64_t i = 0; i < heads * plan.most_split_blocks(); ++i) new (arrived + i) std::atomic<int32_t>(0);
    }

    const auto locate = [&](int64_t number) {
        const int32_t r = row_of_item(workspace.rows, rows, number);
        const RowWork& work = workspace.rows[r];
        const int64_t in_row = number - work.first_item;
        const int64_t a_split = heads * work.blocks;
        return ItemAt{r, static_cast<int>(in_row % a_split / work.blocks), in_row % work.blocks,
                      work.splits - 1 - in_row / a_split};
    };
    pool.parallel(items, [&](int64_t number, int thread, const std::atomic<int64_t>& next) {
        const ItemAt here = locate(number);
        const Row& row = call.rows.data[here.row];
        const RowWork& work = workspace.rows[here.row];
        const int head = here.head;
        const int64_t first = here.block * kBlockRows;
        const Scratch scratch = workspace.of_thread(plan, thread);
        const Walk walk(plan, call, row, head, first);
        Item item(plan, call, row, walk, scratch);
        item.run(walk.positions(here.split, work.splits), [&](Ahead::Range* ranges) {
            const int64_t guess = next.load(std::memory_order_relaxed);  // another thread may be the first to claim it
            if (guess >= items) return 0;
            const ItemAt there = locate(guess);
            const Walk other(plan, call, call.rows.data[there.row], there.head, there.block * kBlockRows);
            Visit visits[kVisitsAhead];
            int count = 0;
            other.visits(other.positions(there.split, workspace.rows[there.row].splits), kVisitsAhead, visits, ranges,
                         count);
            return count;
        });
        if (work.splits == 1) {
            float* part = scratch.tile;  // free again, and large enough for one part
            for (int i = 0; i < item.rows(); ++i) {
                item.store_part(i, part);
                finish(plan, call, row, head, first + i, part);
            }
            return;
        }
        const auto parts_of = [&](int i) {
            const int64_t query = head * row.count * plan.ratio + first + i;
            return workspace.parts + (work.first_part + query * work.splits) * plan.part_floats;
        };
        for (int i = 0; i < item.rows(); ++i) item.store_part(i, parts_of(i) + here.split * plan.part_floats);
        // Whoever brings the last split merges them all.
        auto& arrived = workspace.arrived[(here.row * heads + head) * plan.most_split_blocks() + here.block];
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < work.splits) return;
        for (int i = 0; i < item.rows(); ++i) {
            merge_splits(parts_of(i), work.splits, plan.part_floats);
            finish(plan, call, row, head, first + i, parts_of(i));
        }
    });
}

PathInfo attend_path(const kivi_layer& layer) {
    PathInfo info;
    info.attend_path = KIVI_PATH_FAST;
    if (kernels() == nullptr) {
        info.attend_path = KIVI_PATH_REFERENCE;
        info.reason = "the processor has neither SSE4.2 nor NEON";
        return info;
    }
    for (Part part : {Part::key, Part::value}) {
        const kivi_spec& spec = spec_of(layer, part);
        const int dim = dim_of(layer, part);
        if (reader_of(spec, dim, part) != Reader::decoded) continue;
        info.attend_path = KIVI_PATH_GENERAL;
        const char* const name = part == Part::key ? "keys" : "values";
        if (dim % kLanes != 0) {
            info.reason = std::string("fast attention needs a head dim that is a multiple of 16 (") + name + ")";
        } else if (spec.bits == 8 || spec.param_dtype == KIVI_F32) {
            info.reason = std::string("fast attention reads 2, 3 and 4 bits with fp16 parameters (") + name + ")";
        } else {
            info.reason = part == Part::key ? "fast attention needs keys grouped by channel"
                                            : "fast attention needs values grouped by token";
        }
        return info;
    }
    return info;
}

}  // namespace kivi::cpu
