// The words that Python uses for the numbers of kivi.h, one table an enum.
#pragma once
#include <string>

#include "errors.h"

namespace kivi_python {

struct Name {
    const char* word;
    int32_t number;
};

inline constexpr Name kDevices[] = {{"cpu", KIVI_CPU}, {"cuda", KIVI_CUDA}};
inline constexpr Name kDtypes[] = {{"float32", KIVI_F32}, {"float16", KIVI_F16}, {"bfloat16", KIVI_BF16}};
inline constexpr Name kAxes[] = {{"channel", KIVI_AXIS_CHANNEL}, {"token", KIVI_AXIS_TOKEN}};
inline constexpr Name kRanges[] = {{"minmax", KIVI_RANGE_MINMAX}, {"ratio", KIVI_RANGE_RATIO}};
inline constexpr Name kTransforms[] = {{"none", KIVI_TRANSFORM_NONE}, {"hadamard", KIVI_TRANSFORM_HADAMARD}};
inline constexpr Name kRoundings[] = {{"nearest", KIVI_ROUND_NEAREST},
                                      {"query_aware", KIVI_ROUND_QUERY_AWARE}};
inline constexpr Name kSchedules[] = {{"rolling", KIVI_SCHEDULE_ROLLING},
                                      {"published", KIVI_SCHEDULE_PUBLISHED}};
inline constexpr Name kPaths[] = {{"none", KIVI_PATH_NONE},
                                  {"reference", KIVI_PATH_REFERENCE},
                                  {"general", KIVI_PATH_GENERAL},
                                  {"fast", KIVI_PATH_FAST}};
inline constexpr Name kMomentStates[] = {{"none", 0}, {"accumulated", 1}, {"committed", 2}};

// The number of a word; raises InvalidArgumentError that names the argument and the words it takes.
template <size_t N>
int32_t number_of(const Name (&table)[N], const char* argument, py::handle word) {
    std::string known;
    const std::string given = py::str(word);
    for (const Name& name : table) {
        if (given == name.word) {
            return name.number;
        }
        known += std::string(known.empty() ? "" : ", ") + name.word;
    }
    raise(KIVI_ERROR_INVALID_ARGUMENT, std::string(argument) + ": '" + given + "' is none of " + known);
}

// The word of a number; None for a number that has none.
template <size_t N>
py::object word_of(const Name (&table)[N], int32_t number) {
    for (const Name& name : table) {
        if (name.number == number) {
            return py::str(name.word);
        }
    }
    return py::none();
}

}  // namespace kivi_python
