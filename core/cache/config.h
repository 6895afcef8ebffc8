// From what the caller asks for to what the library builds: every rule of kivi_config, each with the sentence
// of its refusal.
#pragma once
#include <string>
#include <vector>

#include "format/model.h"
#include "kivi/kivi.h"

namespace kivi {

// The validated model, every default filled in. Throws Error for whatever is not supported.
Model make_model(const kivi_config& config);

// Rules of one layer; `name` stands in the sentences. An absent one becomes all zero.
kivi_layer checked_layer(const std::string& name, const kivi_layer& layer);

// Rules of one tensor's spec; `name` stands in the sentences. Returns it with defaults filled in.
kivi_spec checked_spec(const std::string& name, const kivi_spec& spec, Part part, int dim);

// Rules of the windows, for the specs of the layers given. Returns them with the unit filled in.
Windows checked_windows(int64_t sink, int64_t recent, int64_t flush, int32_t schedule,
                        const std::vector<kivi_layer>& layers);

int32_t checked_window_dtype(int32_t dtype);

}  // namespace kivi
