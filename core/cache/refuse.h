// Refusals: a status and a sentence put together from its parts. The parts are only joined on failure.
#pragma once
#include <locale>
#include <sstream>

#include "format/error.h"

namespace kivi {

template <class... Parts>
[[noreturn]] void refuse(kivi_status status, const Parts&... parts) {
    std::ostringstream sentence;
    sentence.imbue(std::locale::classic());
    (sentence << ... << parts);
    throw Error(status, sentence.str());
}

template <class... Parts>
[[noreturn]] void refuse_argument(const Parts&... parts) {
    refuse(KIVI_ERROR_INVALID_ARGUMENT, parts...);
}

}  // namespace kivi
