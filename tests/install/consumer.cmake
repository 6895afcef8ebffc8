# Builds one consumer against the moved prefix and runs it.
# cmake -DKIND=c_cmake|cpp_cmake|c_pkgconfig|other_version ... -P consumer.cmake (see CMakeLists.txt)
file(REMOVE_RECURSE "${WORK}")
file(MAKE_DIRECTORY "${WORK}")

function(run_program)
    execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
    message("${output}")
    if(NOT output MATCHES "bytes per token")
        message(FATAL_ERROR "the program ran but did not print its result")
    endif()
endfunction()

# configure(RESULT FOLDER VERSION): configures a CMake consumer that asks for that version of kivi.
function(configure result folder version)
    execute_process(COMMAND "${CMAKE_COMMAND}" -G "${GENERATOR}" -S "${SOURCE}/${folder}" -B "${WORK}/build"
        "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DCMAKE_C_COMPILER=${CC}" "-DCMAKE_CXX_COMPILER=${CXX}"
        "-DEXAMPLES=${EXAMPLES}" "-DWANTED=${version}" RESULT_VARIABLE status)
    set(${result} ${status} PARENT_SCOPE)
endfunction()

if(KIND STREQUAL "c_pkgconfig")
    if(NOT PKG_CONFIG)
        message("SKIP: pkg-config is not installed")
        return()
    endif()
    set(ENV{PKG_CONFIG_PATH} "${PREFIX}/${LIBDIR}/pkgconfig")
    execute_process(COMMAND "${PKG_CONFIG}" --modversion kivi OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE
        COMMAND_ERROR_IS_FATAL ANY)
    if(NOT found VERSION_EQUAL VERSION)
        message(FATAL_ERROR "kivi.pc says version ${found}, the header ${VERSION}")
    endif()
    execute_process(COMMAND "${PKG_CONFIG}" --cflags --libs kivi OUTPUT_VARIABLE flags
        OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    execute_process(COMMAND "${CC}" -std=c99 -pedantic -Wall -Werror "${EXAMPLES}/decode_loop.c" -o "${WORK}/loop" ${flags}
        COMMAND_ERROR_IS_FATAL ANY)
    set(ENV{LD_LIBRARY_PATH} "${PREFIX}/${LIBDIR}")
    run_program("${WORK}/loop")
elseif(KIND STREQUAL "other_version")
    configure(status c_cmake 99.0)
    if(status EQUAL 0)
        message(FATAL_ERROR "find_package(kivi 99.0) was satisfied by version ${VERSION}")
    endif()
else()
    configure(status ${KIND} ${VERSION})
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "the consumer does not configure")
    endif()
    execute_process(COMMAND "${CMAKE_COMMAND}" --build "${WORK}/build" COMMAND_ERROR_IS_FATAL ANY)
    run_program("${WORK}/build/loop")
endif()
