# The version has one home, the macros of include/kivi/kivi.h: sets KIVI_VERSION and KIVI_SOVERSION.
set(kivi_header "${CMAKE_CURRENT_LIST_DIR}/../include/kivi/kivi.h")
file(STRINGS "${kivi_header}" kivi_version_lines REGEX "^#define KIVI_VERSION_(MAJOR|MINOR|PATCH) ")
foreach(part MAJOR MINOR PATCH)
    string(REGEX MATCH "KIVI_VERSION_${part} ([0-9]+)" _ "${kivi_version_lines}")
    set(KIVI_VERSION_${part} "${CMAKE_MATCH_1}")
endforeach()
set(KIVI_VERSION "${KIVI_VERSION_MAJOR}.${KIVI_VERSION_MINOR}.${KIVI_VERSION_PATCH}")

# Before 1.0 the ABI may move with each minor version; from 1.0 on it moves with the major version.
if(KIVI_VERSION_MAJOR EQUAL 0)
    set(KIVI_SOVERSION "0.${KIVI_VERSION_MINOR}")
else()
    set(KIVI_SOVERSION "${KIVI_VERSION_MAJOR}")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${kivi_header}")
