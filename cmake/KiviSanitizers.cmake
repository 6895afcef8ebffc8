# KIVI_SANITIZE puts the same sanitizers on everything that is built: library, tests and examples.
if(KIVI_SANITIZE)
    string(REPLACE ";" "," kivi_sanitizers "${KIVI_SANITIZE}")
    add_compile_options(-fsanitize=${kivi_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    # -O1, and the checks of addresses as calls: inlined into the vector kernels they would take the compiler
    # many minutes a file.
    add_compile_options(-O1)
    if(kivi_sanitizers MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
        add_compile_options("SHELL:--param asan-instrumentation-with-call-threshold=0")
    endif()
    add_link_options(-fsanitize=${kivi_sanitizers})
endif()
