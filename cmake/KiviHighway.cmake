# kivi_highway: the headers of Google Highway. Only its header-only part is used, so nothing of it is
# linked; a copy on the machine is taken if there is one, else a pinned release is fetched.
find_path(KIVI_HIGHWAY_INCLUDE_DIR hwy/highway.h DOC "Folder that holds hwy/highway.h")
if(NOT KIVI_HIGHWAY_INCLUDE_DIR)
    message(STATUS "hwy/highway.h is not installed (Debian: libhwy-dev): fetching it")
    include(FetchContent)
    FetchContent_Declare(highway
        URL https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
        SOURCE_SUBDIR no-build) # headers only: its own CMake project is not added
    FetchContent_MakeAvailable(highway)
    set(KIVI_HIGHWAY_INCLUDE_DIR "${highway_SOURCE_DIR}" CACHE PATH "Folder that holds hwy/highway.h" FORCE)
endif()
add_library(kivi_highway INTERFACE)
target_include_directories(kivi_highway SYSTEM INTERFACE "${KIVI_HIGHWAY_INCLUDE_DIR}")
