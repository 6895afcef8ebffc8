# KIVI_CUDA: where the CUDA compiler comes from, and what the CUDA sources are compiled with. Sets
# KIVI_WITH_CUDA; then target kivi_cuda holds the static runtime.
#
# A compiler is taken from CUDACXX or CMAKE_CUDA_COMPILER, from the PATH or CUDA_HOME, or at last from build/cuda,
# where script/bootstrap --cuda puts one.
set(KIVI_WITH_CUDA FALSE)
if(NOT KIVI_CUDA)
    return()
endif()
if(KIVI_SANITIZE)
    message(FATAL_ERROR "KIVI_CUDA is ${KIVI_CUDA} and KIVI_SANITIZE is ${KIVI_SANITIZE}; sanitizers watch builds "
        "without CUDA only")
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(KIVI_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin
        "${PROJECT_SOURCE_DIR}/build/cuda/bin" DOC "CUDA compiler")
    if(KIVI_NVCC)
        set(CMAKE_CUDA_COMPILER "${KIVI_NVCC}")
    elseif(KIVI_CUDA STREQUAL "AUTO")
        message(STATUS "libkivi: no CUDA compiler found; building without CUDA")
        return()
    else()
        message(FATAL_ERROR "KIVI_CUDA is ${KIVI_CUDA}, but no nvcc was found (CUDACXX, PATH, CUDA_HOME); "
            "script/bootstrap --cuda installs one")
    endif()
endif()

# Real code for each architecture, and for the newest one also PTX, which later GPUs compile at start.
set(KIVI_CUDA_ARCHITECTURES "80-real;86-real;89-real;90-real;100-real;120" CACHE STRING
    "GPU architectures; development builds name one, like 90-real")
set(CMAKE_CUDA_ARCHITECTURES "${KIVI_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

string(REPLACE "-real" "" KIVI_CUDA_ARCHITECTURE_TEXT "${KIVI_CUDA_ARCHITECTURES}")
string(REPLACE ";" " sm_" KIVI_CUDA_ARCHITECTURE_TEXT "sm_${KIVI_CUDA_ARCHITECTURE_TEXT}")
add_library(kivi_cuda INTERFACE)
target_link_libraries(kivi_cuda INTERFACE CUDA::cudart_static)
# Compressed, as drivers of every age unpack it: kernels in many instances shrink to a tenth.
target_compile_options(kivi_cuda INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--extended-lambda;-Xcompiler=-Wall;-Xfatbin=-compress-all>")
set(KIVI_WITH_CUDA TRUE)
message(STATUS "libkivi: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${KIVI_CUDA_ARCHITECTURE_TEXT}")
