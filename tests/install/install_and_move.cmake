# Installs a build and moves the prefix, so that nothing may lean on where it was installed.
# cmake -DBUILD=... -DMOVED=... -P install_and_move.cmake
file(REMOVE_RECURSE "${MOVED}" "${MOVED}.first")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${MOVED}.first"
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(RENAME "${MOVED}.first" "${MOVED}")
