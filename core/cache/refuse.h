// Refusals: a status and a sentence put together from its parts, which are only joined on failure; and the two
// checks that several layers make.
#pragma once
#include <cstdint>
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

// The reserved fields of the struct `name` must be zero ([GROW-3] of kivi.h).
template <class Name, class Reserved>
void check_reserved(const Name& name, const Reserved& fields) {
    for (const auto& field : fields) {
        if (field != 0) refuse_argument(name, ".reserved must be zero");
    }
}

inline uint64_t checked_flags(uint64_t flags, uint64_t known) {
    if ((flags & ~known) != 0) refuse_argument("flags is ", flags, "; known bits are ", known);
    return flags;
}

}  // namespace kivi
