// cpu/page_order: every bit of a page part belongs to exactly one code or parameter, in both orders.
#include "cpu/page_order.h"

#include <set>
#include <vector>

#include <doctest/doctest.h>

using namespace kivi;
using namespace kivi::cpu;

TEST_CASE("codes and parameters fill a part without overlap") {
    for (int bits : {2, 3, 4, 8}) {
        for (kivi_axis axis : {KIVI_AXIS_CHANNEL, KIVI_AXIS_TOKEN}) {
            for (int group : {32, 64, 128, static_cast<int>(KIVI_GROUP_HEAD)}) {
                for (int dim : {24, 64, 80, 128}) {
                    if (axis == KIVI_AXIS_CHANNEL && group == KIVI_GROUP_HEAD) continue;
                    if (axis == KIVI_AXIS_TOKEN && group > dim) continue;
                    kivi_spec spec{};
                    spec.bits = bits;
                    spec.axis = axis;
                    spec.group = group;
                    spec.param_dtype = KIVI_F16;
                    const PageOrder order = page_order(spec, dim);
                    CHECK((order.order == Order::lanes) == (bits <= 4 && dim % 16 == 0));
                    const int64_t bytes = page_part_bytes(spec, dim, KIVI_F16);
                    std::vector<uint8_t> part(bytes, 0), ones(bytes, 0);
                    std::set<int64_t> params;
                    const int top = (1 << bits) - 1;
                    for (int token = 0; token < kPageTokens; ++token) {
                        for (int channel = 0; channel < dim; ++channel) {
                            REQUIRE(code_get(order, ones.data(), token, channel) == 0);  // nobody set a bit of it
                            code_put(order, ones.data(), token, channel, top);
                            code_put(order, part.data(), token, channel, (token * 7 + channel * 3) & top);
                            params.insert(scale_offset(order, token, channel));
                            params.insert(min_offset(order, token, channel));
                        }
                    }
                    const GroupShape shape = group_shape(spec, dim);
                    CHECK(static_cast<int64_t>(params.size()) == 2 * shape.groups);
                    CHECK(*params.rbegin() + 2 <= bytes);
                    for (int64_t at : params) {
                        REQUIRE(at + 2 <= bytes);
                        REQUIRE(ones[at] == 0);
                        REQUIRE(ones[at + 1] == 0);
                    }
                    for (int token = 0; token < kPageTokens; ++token) {
                        for (int channel = 0; channel < dim; ++channel) {
                            REQUIRE(code_get(order, part.data(), token, channel) == ((token * 7 + channel * 3) & top));
                        }
                    }
                }
            }
        }
    }
}
