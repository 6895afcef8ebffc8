# Fails unless the dynamic symbols that the library defines are the lines of symbols.txt.
# cmake -DNM=... -DLIBRARY=... -DSYMBOLS=... -P exports.cmake
execute_process(COMMAND "${NM}" --dynamic --defined-only --format=posix "${LIBRARY}" OUTPUT_VARIABLE table
    COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" lines "${table}")
set(exported "")
foreach(line IN LISTS lines)
    string(REGEX REPLACE " .*" "" name "${line}")
    list(APPEND exported "${name}")
endforeach()
file(STRINGS "${SYMBOLS}" expected)
set(missing ${expected})
list(REMOVE_ITEM missing ${exported})
set(surplus ${exported})
list(REMOVE_ITEM surplus ${expected})
if(missing OR surplus)
    message(FATAL_ERROR "not exported: ${missing}; exported without being listed: ${surplus}")
endif()
