// The order of tensor core operands: every code has a place of its own, parameters too, and a page part is exactly
// as long as the canonical one.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "cuda/page_order.h"

using namespace kivi;
using namespace kivi::cuda;

namespace {

struct Case {
    int bits, axis, group, dim;
};

int code_of(const Case& spec, int token, int channel) {
    return (token * 7 + channel * 5 + token * channel / 3) % (1 << spec.bits);
}

}  // namespace

TEST_CASE("fragment order: a permutation of the canonical bytes") {
    std::vector<Case> cases;
    for (int dim : {64, 128, 256}) {
        for (int bits : {2, 3, 4}) {
            for (int group : {32, 64, 128}) {
                cases.push_back({bits, KIVI_AXIS_CHANNEL, group, dim});
                if (bits != 3 && group <= dim) cases.push_back({bits, KIVI_AXIS_TOKEN, group, dim});
            }
            if (bits != 3) cases.push_back({bits, KIVI_AXIS_TOKEN, KIVI_GROUP_HEAD, dim});
        }
    }
    for (const Case& spec : cases) {
        CAPTURE(spec.bits);
        CAPTURE(spec.axis);
        CAPTURE(spec.group);
        CAPTURE(spec.dim);
        PageOrder order;
        order.order = Order::fragment;
        order.dim = spec.dim;
        order.spec.bits = spec.bits;
        order.spec.axis = spec.axis;
        order.spec.group = spec.group;
        order.spec.param_dtype = KIVI_F16;
        const int64_t groups = group_shape(order.spec, spec.dim).groups;
        const int64_t bytes = canonical_code_bytes(order.spec, spec.dim) + 2 * 2 * groups;

        // Bytes of codes end as 0xFF where every code is the largest, and parameters stand in the others.
        std::vector<uint8_t> part(bytes, 0), mask(bytes, 0);
        for (int first = 0; first < kPageTokens; first += kSlabTokens) {
            const int pieces = FragmentOrder::pieces(order, kSlabTokens);
            for (int i = 0; i < pieces; ++i) {
                with_bits(spec.bits, [&](auto bits) {
                    constexpr int kBits = decltype(bits)::value;
                    FragmentOrder::write<kBits>(order, part.data(), first, kSlabTokens, i,
                                                [&](int t, int c) { return code_of(spec, first + t, c); });
                    FragmentOrder::write<kBits>(order, mask.data(), first, kSlabTokens, i,
                                                [&](int, int) { return (1 << kBits) - 1; });
                });
            }
        }
        int wrong = 0;
        for (int t = 0; t < kPageTokens; ++t) {
            for (int c = 0; c < spec.dim; ++c) {
                if (FragmentOrder::code(order, part.data(), t, c) != code_of(spec, t, c)) ++wrong;
                for (int64_t at : {FragmentOrder::scale(order, t, c), FragmentOrder::min(order, t, c)}) {
                    REQUIRE(at >= 0);
                    REQUIRE(at + 2 <= bytes);
                    REQUIRE(mask[at] != 0xFF);
                    mask[at] = mask[at + 1] = 0x55;
                }
            }
        }
        // Values written a few tokens at a time, whatever stood there, are the same bytes when a block is full.
        if (spec.axis == KIVI_AXIS_TOKEN) {
            std::vector<uint8_t> filled(bytes, 0xA5);
            for (int first = 0, next; first < kPageTokens; first = next) {
                next = std::min(first + 1 + first % 5, (first / kSlabTokens + 1) * kSlabTokens);
                for (int i = 0; i < FragmentOrder::pieces(order, next - first); ++i) {
                    with_bits(spec.bits, [&](auto bits) {
                        FragmentOrder::write<decltype(bits)::value>(order, filled.data(), first, next - first, i,
                                                                    [&](int t, int c) {
                                                                        wrong += t >= next - first;
                                                                        return code_of(spec, first + t, c);
                                                                    });
                    });
                }
                for (int t = 0; t < next; ++t) {
                    for (int c = 0; c < spec.dim; ++c) {
                        if (FragmentOrder::code(order, filled.data(), t, c) != code_of(spec, t, c)) ++wrong;
                    }
                }
            }
            const int64_t block = FragmentSizes(order.spec, spec.dim).group_bytes();
            for (int64_t at = 0; at < bytes; ++at) {
                if (at % block < FragmentSizes(order.spec, spec.dim).code_bytes && filled[at] != part[at]) ++wrong;
            }
        }
        // Read word by word, each element comes once.
        std::vector<int> seen(kPageTokens * spec.dim, 0);
        for (int first = 0; first < kPageTokens; first += kSlabTokens) {
            for (int i = 0; i < FragmentOrder::pieces(order, kSlabTokens); ++i) {
                with_bits(spec.bits, [&](auto bits) {
                    FragmentOrder::read<decltype(bits)::value>(order, part.data(), first, i, [&](int t, int c, int code) {
                        if (code != code_of(spec, first + t, c)) ++wrong;
                        ++seen[(first + t) * spec.dim + c];
                    });
                });
            }
        }
        for (int times : seen) wrong += times != 1;
        CHECK(wrong == 0);
        int64_t codes = 0, params = 0;
        for (uint8_t byte : mask) {
            codes += byte == 0xFF;
            params += byte == 0x55;
        }
        CHECK(codes == canonical_code_bytes(order.spec, spec.dim));
        CHECK(params == 2 * 2 * groups);
    }
}
