// Append and flush of one tensor of one head and one sequence.
//
//   before   S ... packed ... | tail (ring) ........... | new tokens ..................
//   after    S ... packed ............................................ | tail (ring)
//                             |-- 1: packed from ring and new rows ----|-- 2: stored --|
//
// The ring's slots are reused by 2, so 1 comes first. A new row is taken (converted, transformed, rounded)
// exactly once: either on its way to the packer or on its way to a window.
#include "cpu/append.h"

#include <algorithm>

#include "cpu/pack.h"
#include "cpu/rows.h"

namespace kivi::cpu {
namespace {

constexpr int64_t kMaxRowBytes = 512 * 4;

class HeadAppend {
  public:
    HeadAppend(const TensorStore& store, const Feedback* feedback, const Row& row, int head, const View& input,
               const AppendScratch& scratch)
        : store_(store),
          feedback_(feedback),
          row_(row),
          head_(head),
          input_(input),
          input_begin_(input ? origin(input, row) + head * input.head_stride : 0),
          scratch_(scratch) {}

    int64_t run() {
        const Windows& windows = store_.windows;
        const int64_t pack_begin = tail_begin(windows, row_.before, store_.part);
        const int64_t pack_end = tail_begin(windows, row_.after, store_.part);
        pack(pack_begin, pack_end);
        const int64_t begin = row_.before.length, end = row_.after.length;
        store_rows(begin, std::min(end, windows.sink));
        store_rows(std::max({begin, windows.sink, pack_end}), end);
        return saturated_;
    }

  private:
    void take(int64_t position, uint8_t* to) {
        const int64_t at = input_begin_ + (position - row_.before.length) * input_.token_stride;
        saturated_ += take_row_plain(input_.data, input_.dtype, at, store_.dim, store_.spec.transform,
                                     store_.window_dtype, to);
    }

    // The stored row of a position that is to be packed.
    const uint8_t* stored(int64_t position) {
        if (position < row_.before.length) {
            return store_.tail_row(row_.sequence, head_, store_.tail_slot(position));
        }
        take(position, taken_);
        return taken_;
    }

    void pack(int64_t begin, int64_t end) {
        const int step = pack_step(store_);
        for (int64_t position = begin; position < end;) {
            const int64_t slot = position - store_.windows.sink;
            const int first = static_cast<int>(slot % kPageTokens);
            const int count = static_cast<int>(std::min<int64_t>(step - first % step, end - position));
            for (int t = 0; t < count; ++t) {
                load_row_plain(stored(position + t), store_.window_dtype, store_.dim,
                               scratch_.rows + static_cast<int64_t>(t) * store_.dim);
            }
            uint8_t* part = store_.page(row_.blocks[slot / kPageTokens], head_);
            pack_rows_plain(store_, feedback_, scratch_.rows, first, count, part);
            position += count;
        }
    }

    void store_rows(int64_t begin, int64_t end) {
        for (int64_t position = begin; position < end; ++position) {
            take(position, position < store_.windows.sink
                               ? store_.sink_row(row_.sequence, head_, position)
                               : store_.tail_row(row_.sequence, head_, store_.tail_slot(position)));
        }
    }

    const TensorStore& store_;
    const Feedback* feedback_;
    const Row& row_;
    const int head_;
    const View& input_;
    const int64_t input_begin_;
    const AppendScratch& scratch_;
    alignas(64) uint8_t taken_[kMaxRowBytes];
    int64_t saturated_ = 0;
};

}  // namespace

int64_t append_scratch_floats(const kivi_layer& layer) {
    return static_cast<int64_t>(kPageTokens) * std::max(layer.key_dim, layer.value_dim);
}

int64_t append_head(const TensorStore& store, const Feedback* feedback, const Row& row, int head, const View& input,
                    const AppendScratch& scratch) {
    return HeadAppend(store, feedback, row, head, input, scratch).run();
}

}  // namespace kivi::cpu
