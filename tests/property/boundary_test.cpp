// Lengths and chunkings around every boundary: T in {0, 1, G-1, G, G+1, W-1, W, W+1, W+G-1, W+G, W+G+1,
// 10G+7}, in one call, token by token, 7 at a time and a group at a time.

#include "property/random_case.h"
#include "support/oracle.h"

using namespace kivi_test;

TEST_CASE(
    "every boundary length in every chunking: the same bytes, those of the format, and the right attention") {
    struct Setting {
        kivi_config config;
        int64_t group;
    };
    std::vector<Setting> settings;
    for (const int64_t group : {int64_t(32), int64_t(64)}) {
        const kivi_spec k = channel(2, int(group)), v = token(2, int(group));
        settings.push_back({config(k, v, {1, 2, 64, 64}, {0, 2 * group, group}), group});
        settings.push_back(
            {config(channel(3, int(group)), rotated(v), {1, 2, 64, 64}, {group, 45, group}), group});
        settings.push_back({config(k, v, {1, 2, 64, 64}, {group, 0, 2 * group}), group});
        settings.push_back({published(k, v, {1, 2, 64, 64}, int(2 * group)), group});
    }
    settings.push_back({config(token(4, 32), channel(4, 32), {1, 2, 64, 64}, {32, 17, 32}), 32});
    for (const Setting& setting : settings) {
        const kivi_config& with = setting.config;
        const int64_t g = setting.group, w = with.recent;
        for (int64_t length : {int64_t(0), int64_t(1), g - 1, g, g + 1, w - 1, w, w + 1, w + g - 1, w + g,
                               w + g + 1, 10 * g + 7}) {
            if (length < 0) continue;
            INFO("windows ", with.sink, "/", with.recent, "/", with.flush, " schedule ", with.schedule,
                 " group ", g, " length ", length);
            Random random{uint64_t(length)};
            const Cache whole(with);
            const Tokens tokens = random_tokens(random, whole.layer(), length);
            whole.append(0, tokens, 0, length);
            const Bytes blob = whole.blob();
            const kivi_length at = whole.length();
            CHECK(payload_in(blob, 0) == payload(with, whole.layer(), tokens, length,
                                                 at.key_border > at.sink ? at.key_border : 0,
                                                 at.value_border > at.sink ? at.value_border : 0));
            for (int64_t chunk : {int64_t(1), int64_t(7), g}) {
                const Cache chunked(with);
                chunked.append(0, tokens, 0, length, chunk);
                CHECK(chunked.blob() == blob);
            }
            check_attend(whole, {{0, 2}}, random.normals(2 * 2 * 64));
        }
    }
}
