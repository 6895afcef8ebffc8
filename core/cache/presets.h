// The presets: named, versioned pairs of specs with windows.
#pragma once
#include <string>

#include "kivi/kivi.h"

namespace kivi {

int preset_count();
// struct_size is not filled in.
const kivi_preset& preset_at(int index);
// NULL: no preset of that name.
const kivi_preset* find_preset(const char* name);
// "k3v2, kivi2-sink, ... and f16", for sentences.
std::string preset_names();

}  // namespace kivi
