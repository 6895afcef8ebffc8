# KIVI_SANITIZE puts the same sanitizers on everything that is built: library, tests and examples.
if(KIVI_SANITIZE)
    string(REPLACE ";" "," kivi_sanitizers "${KIVI_SANITIZE}")
    add_compile_options(-fsanitize=${kivi_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
    add_link_options(-fsanitize=${kivi_sanitizers})
endif()
