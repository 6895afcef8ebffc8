// How many processors the calling thread may run on.
#pragma once
#include <algorithm>

#include <sched.h>
#include <unistd.h>

namespace kivi {

inline int processors() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));  // more than a cpu_set_t holds
}

}  // namespace kivi
