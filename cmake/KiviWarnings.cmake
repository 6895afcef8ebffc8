# Warnings of our own targets; errors when libkivi itself is what is being built.
add_library(kivi_warnings INTERFACE)
target_compile_options(kivi_warnings INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra>")
if(PROJECT_IS_TOP_LEVEL)
    target_compile_options(kivi_warnings INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:-Werror>")
endif()
