// Append and flush of one tensor and one sequence, some heads at a time.
//
//   before   S ... packed ... | tail (ring) ........... | new tokens ..................
//   after    S ... packed ............................................ | tail (ring)
//                             |-- 1: packed from ring and new rows ----|-- 2: stored --|
//
// The ring's slots are reused by 2, so 1 comes first. A new row is taken (converted, transformed, rounded)
// exactly once: either on its way to the packer or on its way to a window. Packing goes page by page and head
// by head inside, near the order in which the caller's tokens lie in memory.
#include "cpu/append.h"

#include <algorithm>
#include <cstring>

#include "cpu/pack.h"
#include "cpu/rows.h"
#include "cpu/write_kernels.h"

namespace kivi::cpu {
namespace {

constexpr int64_t kMaxRowBytes = kMaxDim * 4;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kRowsAtOnce = 32;  // on their way to a window, at most kPageTokens

class Append {
  public:
    Append(const TensorStore& store, const Feedback* feedback, const Row& row, const View& input,
           const AppendMeans& means)
        : store_(store), feedback_(feedback), row_(row), input_(input), rows_(means.scratch) {
        if (means.plain || !suits_write_kernels(store.dim)) return;
        row_kernels_ = row_kernels();
        pack_kernels_ = pack_kernels();
    }

    int64_t run(int head_begin, int head_end) {
        head_begin_ = head_begin;
        head_end_ = head_end;
        const Windows& windows = store_.windows;
        const int64_t pack_begin = tail_begin(windows, row_.before, store_.part);
        const int64_t pack_end = tail_begin(windows, row_.after, store_.part);
        for (int64_t position = pack_begin; position < pack_end;) {
            const int64_t page_end = position - (position - windows.sink) % kPageTokens + kPageTokens;
            const int64_t end = std::min(page_end, pack_end);
            for (int head = head_begin; head < head_end; ++head) {
                enter(head);
                pack(position, end);
            }
            position = end;
        }
        const int64_t begin = row_.before.length, end = row_.after.length;
        for (int head = head_begin; head < head_end; ++head) {
            enter(head);
            store_windows(begin, std::min(end, windows.sink));
            store_windows(std::max({begin, windows.sink, pack_end}), end);
        }
        return saturated_;
    }

  private:
    void enter(int head) {
        head_ = head;
        input_begin_ = input_ ? origin(input_, row_) + head * input_.head_stride : 0;
    }

    const uint8_t* tail_row(int64_t position) const {
        return store_.tail_row(row_.sequence, head_, store_.tail_slot(position));
    }

    int64_t input_at(int64_t position) const {
        return input_begin_ + (position - row_.before.length) * input_.token_stride;
    }

    // While the rows of a page are worked on head by head, those of the next page are fetched in the order in
    // which they lie in memory: as many rows as are worked on meanwhile, all heads of a token together. The
    // caller's rows of one head are too far apart for hardware prefetchers, and for the first-level cache: at a
    // power of two between them they fall into few of its sets.
    //
    //          head 0   1   2   3                       head 0   1   2   3
    //   token 0   |                               token 0   ------------->
    //         1   |         packed, this page           1   ------------->   fetched, next page
    //         2   v
    RowsAhead ahead(int64_t position, int count) const {
        const int heads = head_end_ - head_begin_;
        const int64_t in_page = (position - store_.windows.sink) % kPageTokens;
        const int64_t token =
            position - in_page + kPageTokens + ((head_ - head_begin_) * kPageTokens + in_page) / heads;
        if (in_page < 0 || token + (count + heads - 1) / heads > row_.after.length) return {};
        const int64_t bytes = dtype_bytes(input_.dtype);
        const int64_t at = input_at(token) - (head_ - head_begin_) * input_.head_stride;
        return {static_cast<const uint8_t*>(input_.data) + at * bytes,
                input_.token_stride * bytes,
                input_.head_stride * bytes,
                heads,
                store_.dim * bytes,
                count};
    }

    int lines_a_row() const { return static_cast<int>(store_.dim * dtype_bytes(input_.dtype) / kCacheLine); }

    bool take_fast(int64_t position, int count, float* x, RowsAhead& ahead, int lines_a_row) const {
        if (row_kernels_ == nullptr) return false;
        const InputRows rows{input_.data, input_.dtype, input_at(position), input_.token_stride};
        return row_kernels_->take(rows, count, store_.dim, store_.spec.transform, store_.window_dtype, x,
                                  ahead, lines_a_row);
    }

    // New rows to memory in the window dtype, each to its place(position).
    template <class Place>
    void take(int64_t begin, int64_t end, Place place) {
        for (int64_t position = begin; position < end;) {
            const int count = static_cast<int>(std::min(kRowsAtOnce, end - position));
            RowsAhead next = ahead(position, count);
            const bool fast = take_fast(position, count, rows_, next, lines_a_row());
            for (int i = 0; i < count; ++i, ++position) {
                if (fast) {
                    row_kernels_->store(rows_ + static_cast<int64_t>(i) * store_.dim, store_.window_dtype,
                                        store_.dim, place(position));
                } else {
                    saturated_ += take_row_plain(input_.data, input_.dtype, input_at(position), store_.dim,
                                                 store_.spec.transform, store_.window_dtype, place(position));
                }
            }
        }
    }

    // Rows of the tail, or new ones, to fp32. False: the packer kernels are not for them.
    bool fetch_tail(int64_t begin, int64_t end, float* x) const {
        bool fast = row_kernels_ != nullptr;
        for (int64_t position = begin; position < end; ++position, x += store_.dim) {
            if (row_kernels_ != nullptr) {
                fast &= row_kernels_->load(tail_row(position), store_.window_dtype, store_.dim, x);
            } else {
                load_row_plain(tail_row(position), store_.window_dtype, store_.dim, x);
            }
        }
        return fast;
    }

    bool fetch_new(int64_t begin, int64_t end, float* x, RowsAhead& ahead) {
        if (take_fast(begin, static_cast<int>(end - begin), x, ahead, lines_a_row() / 2)) return true;
        alignas(64) uint8_t taken[kMaxRowBytes];
        for (int64_t position = begin; position < end; ++position, x += store_.dim) {
            saturated_ += take_row_plain(input_.data, input_.dtype, input_at(position), store_.dim,
                                         store_.spec.transform, store_.window_dtype, taken);
            load_row_plain(taken, store_.window_dtype, store_.dim, x);
        }
        return false;
    }

    bool fetch(int64_t begin, int64_t end, RowsAhead& ahead) {
        const int64_t border = std::max(begin, std::min(end, row_.before.length));
        const bool tail = border == begin || fetch_tail(begin, border, rows_);
        const bool fresh =
            border == end || fetch_new(border, end, rows_ + (border - begin) * store_.dim, ahead);
        return tail && fresh;
    }

    // Room of the codes of tokens first .. first + count - 1, about to be written. Inlined by force, because
    // compilers take a function that only prefetches for one without effect.
    __attribute__((always_inline)) void prefetch_codes(int first, int count, const uint8_t* part) const {
        const int64_t token_bytes = static_cast<int64_t>(store_.dim) * store_.spec.bits / 8;
        for (int64_t i = first * token_bytes; i < (first + count) * token_bytes; i += kCacheLine) {
            __builtin_prefetch(part + i, 1);
        }
    }

    // Positions of one page.
    void pack(int64_t begin, int64_t end) {
        const int64_t slot = begin - store_.windows.sink;
        uint8_t* part = store_.page(row_.blocks[slot / kPageTokens], head_);
        if (store_.spec.bits == 16) {
            return copy_rows(begin, end, part + slot % kPageTokens * store_.row_bytes());
        }
        const int step = pack_step(store_);
        int first = static_cast<int>(slot % kPageTokens);
        for (int64_t position = begin; position < end;) {
            const int count = static_cast<int>(std::min<int64_t>(step - first % step, end - position));
            prefetch_codes(first, count, part);
            RowsAhead next = ahead(position, count);
            const bool fast = fetch(position, position + count, next) && pack_kernels_ != nullptr;
            pack_rows(fast, first, count, part, next);
            next.fetch_rest();
            position += count;
            first += count;
        }
    }

    void pack_rows(bool fast, int first, int count, uint8_t* part, RowsAhead& ahead) {
        if (fast && feedback_ == nullptr) {
            pack_kernels_->nearest(store_, rows_, first, count, part, ahead);
        } else if (fast && pack_kernels_->query_aware != nullptr) {
            pack_kernels_->query_aware(store_, feedback_[head_], rows_, first, count, part, ahead);
        } else {
            pack_rows_plain(store_, feedback_ != nullptr ? feedback_ + head_ : nullptr, rows_, first, count,
                            part);
        }
    }

    // 16 bits: a page holds rows as the windows do.
    void copy_rows(int64_t begin, int64_t end, uint8_t* to) {
        const auto place = [&](int64_t position) { return to + (position - begin) * store_.row_bytes(); };
        const int64_t border = std::max(begin, std::min(end, row_.before.length));
        for (int64_t position = begin; position < border; ++position) {
            std::memcpy(place(position), tail_row(position), static_cast<size_t>(store_.row_bytes()));
        }
        take(border, end, place);
    }

    void store_windows(int64_t begin, int64_t end) {
        take(begin, end, [&](int64_t position) {
            return position < store_.windows.sink
                       ? store_.sink_row(row_.sequence, head_, position)
                       : store_.tail_row(row_.sequence, head_, store_.tail_slot(position));
        });
    }

    const TensorStore& store_;
    const Feedback* feedback_;  // of head 0, or NULL
    const Row& row_;
    const View& input_;
    int head_begin_ = 0, head_end_ = 0, head_ = 0;
    int64_t input_begin_ = 0;  // first element of the head's new rows
    float* const rows_;        // of the chunk on its way to a packer
    const RowKernels* row_kernels_ = nullptr;
    const PackKernels* pack_kernels_ = nullptr;
    int64_t saturated_ = 0;
};

}  // namespace

int64_t append_scratch_floats(const kivi_layer& layer) {
    return static_cast<int64_t>(kPageTokens) * std::max(layer.key_dim, layer.value_dim);
}

int64_t append_heads(const TensorStore& store, const Feedback* feedback, const Row& row, int head_begin,
                     int head_end, const View& input, const AppendMeans& means) {
    return Append(store, feedback, row, input, means).run(head_begin, head_end);
}

}  // namespace kivi::cpu
