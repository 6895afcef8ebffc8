// Borders by brute force: every length, against the rules restated and against a simulated queue.
#include <doctest/doctest.h>

#include <algorithm>

#include "format/policy.h"

using namespace kivi;

namespace {

Windows rolling(int64_t sink, int64_t recent, int64_t flush, int64_t unit) {
    return {sink, recent, flush, unit, KIVI_SCHEDULE_ROLLING};
}

const Windows kRolling[] = {rolling(0, 0, 1, 1),        rolling(0, 0, 32, 32),   rolling(32, 96, 32, 32),
                            rolling(64, 64, 64, 64),    rolling(64, 0, 64, 32),  rolling(0, 7, 3, 1),
                            rolling(5, 0, 1, 1),        rolling(32, 48, 64, 32), rolling(96, 1, 64, 32),
                            rolling(128, 500, 256, 128)};

Windows published(int64_t recent, int64_t unit) { return {0, recent, 1, unit, KIVI_SCHEDULE_PUBLISHED}; }

int64_t tail_rows(const Windows& windows, const Span& span, Part part) {
    return std::max<int64_t>(span.length - tail_begin(windows, span, part), 0);
}

bool same(const Span& a, const Span& b) {
    return a.length == b.length && a.key_border == b.key_border && a.value_border == b.value_border;
}

}  // namespace

TEST_CASE("floor_div floors for negative numerators") {
    CHECK(floor_div(7, 3) == 2);
    CHECK(floor_div(-1, 3) == -1);
    CHECK(floor_div(-3, 3) == -1);
    CHECK(floor_div(-4, 3) == -2);
    CHECK(floor_div(0, 5) == 0);
}

TEST_CASE("rolling: a queue that packs F of its oldest when more than R + F - 1 wait, aligned to F") {
    for (const Windows& w : kRolling) {
        CAPTURE(w.sink);
        CAPTURE(w.recent);
        CAPTURE(w.flush);
        Span span;
        int64_t packed_to = w.sink;  // simulated: groups of tokens up to each multiple of F
        for (int64_t n = 0; n <= 1200; ++n) {
            span = after_append(w, span, n);
            for (int64_t edge = packed_to / w.flush * w.flush + w.flush; n - edge >= w.recent;
                 edge += w.flush) {
                if (edge > w.sink) packed_to = edge;
            }
            const int64_t border = packed_to > w.sink ? packed_to : 0;
            CHECK(span.key_border == border);
            CHECK(span.value_border == border);
            CHECK(same(after_append(w, Span{}, n), span));  // one append
            CHECK(same(after_append(w, span, n), span));    // an append of nothing
            CHECK((border == 0 || (border > w.sink && border <= n && (border - w.sink) % w.unit == 0)));
            const int64_t tail = tail_rows(w, span, Part::key);
            CHECK(tail <= w.recent + w.flush - 1);
            CHECK(tail < tail_capacity(w, Part::key));
            if (border > 0) CHECK(tail >= w.recent);
            CHECK(blocks_of(w, span) == (border > 0 ? (border - w.sink + 127) / 128 : 0));
        }
    }
}

TEST_CASE("any chunking gives the same borders") {
    for (const Windows& w : kRolling) {
        for (int64_t chunk : {1, 7, 32, 33, 128, 1000}) {
            Span span;
            for (int64_t n = 0; n < 1000;) {
                n = std::min<int64_t>(n + chunk, 1000);
                const Span next = after_append(w, span, n);
                CHECK(next.key_border >= span.key_border);
                span = next;
            }
            CHECK(same(span, after_append(w, Span{}, 1000)));
        }
    }
}

TEST_CASE("flush packs to the last multiple of the unit, twice equals once, and appends go on from there") {
    for (const Windows& w : kRolling) {
        for (int64_t n = 0; n <= 700; ++n) {
            const Span before = after_append(w, Span{}, n);
            const Span flushed = after_flush(w, before);
            const int64_t multiple = n / w.unit * w.unit;
            CHECK(flushed.length == n);
            CHECK(flushed.key_border == (multiple > w.sink ? multiple : 0));
            CHECK(flushed.value_border == flushed.key_border);
            CHECK(same(after_flush(w, flushed), flushed));
            CHECK(same(after_append(w, flushed, n), flushed));
            for (int64_t more : {1, 2, 31, 32, 33, 64, 200}) {
                const Span later = after_append(w, flushed, n + more);
                CHECK(later.key_border ==
                      std::max(flushed.key_border, after_append(w, Span{}, n + more).key_border));
                CHECK(tail_rows(w, later, Part::value) < tail_capacity(w, Part::value));
            }
        }
    }
}

TEST_CASE("kivi-reference TEST 33: flush of 40 keys with groups of 32") {
    const Windows w = rolling(0, 96, 32, 32);
    const Span span = after_flush(w, after_append(w, Span{}, 40));
    CHECK(span.key_border == 32);
    CHECK(tail_rows(w, span, Part::key) == 8);
}

TEST_CASE("published: equals the published queue, which packs after each step") {
    for (int64_t R : {32, 64, 128}) {
        const Windows w = published(R, 32);
        for (int64_t prefill : {0, 1, 31, 32, 127, 128, 129, 255, 256, 257}) {
            // The published prefill, then token by token: attend, flush keys at R, pop values above R.
            int64_t key_packed = prefill - prefill % R, value_packed = std::max<int64_t>(prefill - R, 0);
            Span span = after_append(w, Span{}, prefill);
            for (int64_t n = prefill + 1; n < prefill + 400; ++n) {
                span = after_append(w, span, n);
                CHECK(span.key_border == key_packed);
                CHECK(span.value_border == value_packed);
                CHECK(tail_rows(w, span, Part::key) < tail_capacity(w, Part::key));
                CHECK(tail_rows(w, span, Part::value) < tail_capacity(w, Part::value));
                CHECK(same(after_append(w, Span{}, n), span));
                if (n - key_packed == R) key_packed += R;
                if (n - value_packed > R) ++value_packed;
            }
        }
    }
}

TEST_CASE("kivi-reference TEST 11: published, 100 tokens, then 60 in one append") {
    const Windows w = published(128, 32);
    const Span span = after_append(w, after_append(w, Span{}, 100), 160);
    CHECK(span.key_border == 128);
    CHECK(after_append(w, span, 161).value_border == 32);
    CHECK(span.value_border == 31);
}

TEST_CASE("rings hold at least one row") {
    CHECK(tail_capacity(rolling(0, 0, 1, 1), Part::key) >= 1);
    CHECK(tail_capacity(published(1, 1), Part::key) >= 1);
}
