// Arguments of kivi_probe -> ProbeCall.
#pragma once
#include "cache/probe.h"
#include "kivi/kivi.h"

namespace kivi {

ProbeCall check_probe(const kivi_probe_params& params);

}  // namespace kivi
