// The table of presets. A name never changes its meaning: a better setting gets a new name.
#include "cache/presets.h"

#include <cstring>

namespace kivi {
namespace {

constexpr kivi_spec key_channel(int bits, int group) {
    return {bits,
            KIVI_AXIS_CHANNEL,
            group,
            KIVI_RANGE_MINMAX,
            0,
            KIVI_F16,
            KIVI_TRANSFORM_NONE,
            KIVI_ROUND_NEAREST,
            {}};
}
constexpr kivi_spec value_token(int bits, int group, int transform) {
    return {bits, KIVI_AXIS_TOKEN, group, KIVI_RANGE_MINMAX, 0, KIVI_F16, transform, KIVI_ROUND_NEAREST, {}};
}
constexpr kivi_spec full_precision() { return {16, 0, 0, 0, 0, 0, 0, 0, {}}; }

constexpr int kNone = KIVI_TRANSFORM_NONE, kHadamard = KIVI_TRANSFORM_HADAMARD;
constexpr int kRolling = KIVI_SCHEDULE_ROLLING, kPublished = KIVI_SCHEDULE_PUBLISHED;

// name, what, keys, values, sink, recent, flush, schedule
constexpr kivi_preset kPresets[] = {
    {0, "k3v2", "3.0 bits: keys 3 bits by channel, values 2 bits by token after a Hadamard, groups of 64",
     key_channel(3, 64), value_token(2, 64, kHadamard), 64, 64, 64, kRolling},
    {0, "kivi2-sink", "3.0 bits: KIVI's 2 bits in groups of 32, with a sink window", key_channel(2, 32),
     value_token(2, 32, kNone), 32, 96, 32, kRolling},
    {0, "k4v2", "3.5 bits: keys 4 bits by channel, values 2 bits by token after a Hadamard, groups of 64",
     key_channel(4, 64), value_token(2, 64, kHadamard), 64, 64, 64, kRolling},
    {0, "kivi4", "5.0 bits, the safe one: 4 bits in groups of 32, keys by channel, values by token",
     key_channel(4, 32), value_token(4, 32, kNone), 32, 96, 32, kRolling},
    {0, "kivi2-paper", "3.0 bits: KIVI as published, residual length 128", key_channel(2, 32),
     value_token(2, 32, kNone), 0, 128, 128, kPublished},
    {0, "f16", "16 bits: the window type throughout, nothing is quantised", full_precision(),
     full_precision(), 0, 0, 1, kRolling},
};

}  // namespace

int preset_count() { return static_cast<int>(sizeof kPresets / sizeof kPresets[0]); }

const kivi_preset& preset_at(int index) { return kPresets[index]; }

const kivi_preset* find_preset(const char* name) {
    for (const kivi_preset& preset : kPresets) {
        if (std::strcmp(preset.name, name) == 0) return &preset;
    }
    return nullptr;
}

std::string preset_names() {
    std::string names;
    for (int i = 0; i < preset_count(); i++) {
        if (i > 0) names += i + 1 < preset_count() ? ", " : " and ";
        names += kPresets[i].name;
    }
    return names;
}

}  // namespace kivi
