// Where the keys and values that a block of query rows sees stand, visit by visit.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/attend_plan.h"

namespace kivi::cpu {

constexpr int kTileTokens = 32;   // rows decoded at a time on the general path

// Where the rows of one tensor stand during a visit.
struct Place {
    Reader reader = Reader::rows;
    bool fresh = false;
    RowRun run{};                   // rows
    const uint8_t* part = nullptr;  // packed, decoded: part of the page
    int token = 0;                  // in the page
};

struct Visit {
    int64_t begin = 0, end = 0;  // positions
    Place key, value;
};

// Query rows first .. first + rows() - 1 of one KV head in one row of the batch. Rows count (token, head of the group).
class Walk {
  public:
    Walk(const Plan& plan, const AttendCall& call, const Row& row, int head, int64_t first)
        : plan_(plan), call_(call), row_(row), head_(head), first_(first) {}

    int rows() const { return static_cast<int>(std::min<int64_t>(kBlockRows, row_.count * plan_.ratio - first_)); }
    int64_t token(int r) const { return (first_ + r) / plan_.ratio; }
    int head(int r) const { return head_ * plan_.ratio + static_cast<int>((first_ + r) % plan_.ratio); }

    // First and last position that a row sees. Both grow with the row.
    int64_t from(int r) const { return call_.window_left < 0 ? 0 : std::max<int64_t>(0, last(r) - call_.window_left); }
    int64_t last(int r) const {
        return (call_.k ? row_.before.length : row_.before.length - row_.count) + token(r);
    }

    struct Positions {
        int64_t begin, end;  // none if begin >= end
    };
    // Those of split `split` of `splits` that any of the rows sees.
    Positions positions(int64_t split, int64_t splits) const {
        const int64_t sink = plan_.layer.key.windows.sink, step = split_tokens(plan_.packed_tokens(row_));
        const int64_t begin = split == 0 ? 0 : sink + split * step;
        const int64_t end = split + 1 == splits ? std::numeric_limits<int64_t>::max() : sink + (split + 1) * step;
        return {std::max(begin, from(0)), std::min(end, last(rows() - 1) + 1)};
    }

    // At most `most` visits; returns their number. What they read of the cache is added to ranges, two a visit.
    int visits(Positions positions, int most, Visit* visits, Ahead::Range* ranges, int& range_count) const {
        int count = 0;
        while (positions.begin < positions.end && count < most) {
            Visit& visit = visits[count++];
            visit.begin = positions.begin;
            visit.end = visit_end(positions.begin, positions.end);
            const int64_t tokens = visit.end - visit.begin;
            place(plan_.layer.key, call_.k, plan_.read_keys, visit.begin, tokens, visit.key, ranges, range_count);
            place(plan_.layer.value, call_.v, plan_.read_values, visit.begin, tokens, visit.value, ranges, range_count);
            positions.begin = visit.end;
        }
        return count;
    }

  private:
    // A visit ends where the place of its keys or of its values does.
    int64_t visit_end(int64_t begin, int64_t end) const {
        const Windows& windows = plan_.layer.key.windows;
        const bool decoded = plan_.read_keys == Reader::decoded || plan_.read_values == Reader::decoded;
        end = std::min(end, begin + (decoded ? kTileTokens : kPageTokens));
        const auto stop_at = [&](int64_t position) {
            if (position > begin) end = std::min(end, position);
        };
        stop_at(windows.sink);
        stop_at(row_.before.length);
        const int64_t border = std::max(row_.before.key_border, row_.before.value_border);
        if (begin >= windows.sink && begin < border) {
            stop_at(begin + kPageTokens - (begin - windows.sink) % kPageTokens);
        }
        for (const TensorStore* store : {&plan_.layer.key, &plan_.layer.value}) {
            const int64_t tail = tail_begin(windows, row_.before, store->part);
            stop_at(tail);
            if (begin >= tail && begin < row_.before.length) {
                stop_at(begin + store->tail_rows - store->tail_slot(begin));
            }
        }
        return end;
    }

    // Written where it is kept: a copy would wait for its own stores.
    void place(const TensorStore& store, const View& fresh, Reader packed, int64_t position, int64_t tokens,
               Place& place, Ahead::Range* ranges, int& range_count) const {
        place.fresh = position >= row_.before.length;
        place.part = nullptr;
        const int64_t slot = position - store.windows.sink;
        if (!place.fresh && slot >= 0 && position < tail_begin(store.windows, row_.before, store.part)) {
            const uint8_t* part = store.page(row_.blocks[slot / kPageTokens], head_);
            place.token = static_cast<int>(slot % kPageTokens);
            place.reader = packed;
            if (packed != Reader::rows) {
                place.part = part;
                const int64_t bytes = store.part == Part::key ? plan_.layer.value.part_offset
                                                              : store.page_bytes - store.part_offset;
                ranges[range_count++] = {part, bytes * tokens / kPageTokens};
                return;
            }
            place.run = {part + place.token * store.row_bytes(), store.row_bytes(), store.window_dtype, store.dim};
        } else {
            place.token = 0;
            place.reader = store.dim % kLanes == 0 ? Reader::rows : Reader::decoded;
            if (place.fresh) {
                const int64_t element = static_cast<int64_t>(dtype_bytes(fresh.dtype));
                const int64_t first = origin(fresh, row_) + head_ * fresh.head_stride;
                const int64_t token = position - row_.before.length;
                place.run = {static_cast<const uint8_t*>(fresh.data) + (first + token * fresh.token_stride) * element,
                             fresh.token_stride * element, fresh.dtype, store.dim};
                return;
            }
            const uint8_t* row = slot < 0 ? store.sink_row(row_.sequence, head_, position)
                                          : store.tail_row(row_.sequence, head_, store.tail_slot(position));
            place.run = {row, store.row_bytes(), store.window_dtype, store.dim};
        }
        ranges[range_count++] = {place.run.data, tokens * place.run.stride};
    }

    const Plan& plan_;
    const AttendCall& call_;
    const Row& row_;
    const int head_;
    const int64_t first_;
};

}  // namespace kivi::cpu
