# KIVI_SANITIZE puts the same sanitizers on everything that is built: library, tests and examples.
if(KIVI_SANITIZE)
    string(REPLACE ";" "," kivi_sanitizers "${KIVI_SANITIZE}")
    add_compile_options(-fsanitize=${kivi_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    # -O1 beside the address sanitizer, and its checks as calls: inlined into the vector kernels they would take
    # the compiler many minutes a file. -O2 beside the thread sanitizer, which costs little, and GCC 12 crashes
    # in its scalar replacement of aggregates at -O1.
    if(kivi_sanitizers MATCHES "address")
        add_compile_options(-O1)
        if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
            add_compile_options("SHELL:--param asan-instrumentation-with-call-threshold=0")
        endif()
    else()
        add_compile_options(-O2)
    endif()
    add_link_options(-fsanitize=${kivi_sanitizers})
endif()
