# Every build option, its default, and why one would change it.
option(KIVI_BUILD_TESTS "Build the test suites" ${PROJECT_IS_TOP_LEVEL})
option(KIVI_BUILD_EXAMPLES "Build the C and C++ examples" ${PROJECT_IS_TOP_LEVEL})
option(KIVI_BUILD_BENCH "Build the benchmarks" OFF)
set(KIVI_CUDA OFF CACHE STRING "CUDA backend: ON, OFF, or AUTO (if a compiler is found); exported names are the same")
set_property(CACHE KIVI_CUDA PROPERTY STRINGS OFF AUTO ON)
set(KIVI_SANITIZE "" CACHE STRING "Sanitizers of the whole build: address,undefined or thread; empty: none")
set_property(CACHE KIVI_SANITIZE PROPERTY STRINGS "" "address,undefined" "thread")

# Speed is the point of the library, so a build that asks for nothing is optimised.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_C_STANDARD 99)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_C_FLAGS_RELEASE "-O3 -DNDEBUG")

# A code must not depend on whether the compiler fuses a multiplication with an addition: where one
# rounding is meant, the sources say fma.
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-ffp-contract=off>")
