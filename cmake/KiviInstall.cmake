# Install rules: library, headers, CMake package (kivi::kivi) and kivi.pc, all relocatable.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS kivi EXPORT kivi_targets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT kivi NAMELINK_COMPONENT kivi
    INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(DIRECTORY include/kivi DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT kivi
    FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

set(kivi_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kivi")
install(EXPORT kivi_targets NAMESPACE kivi:: FILE kiviTargets.cmake
    DESTINATION "${kivi_package_dir}" COMPONENT kivi)
configure_package_config_file(cmake/kiviConfig.cmake.in "${PROJECT_BINARY_DIR}/kiviConfig.cmake"
    INSTALL_DESTINATION "${kivi_package_dir}")
# Before 1.0 a minor version may change the ABI, as the soname says.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/kiviConfigVersion.cmake"
    VERSION ${KIVI_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/kiviConfig.cmake" "${PROJECT_BINARY_DIR}/kiviConfigVersion.cmake"
    DESTINATION "${kivi_package_dir}" COMPONENT kivi)

# The .pc finds its prefix from its own place, so a moved prefix keeps working.
set(kivi_pc_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
file(RELATIVE_PATH KIVI_PC_PREFIX "/p/${kivi_pc_dir}" "/p")
configure_file(cmake/kivi.pc.in "${PROJECT_BINARY_DIR}/kivi.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/kivi.pc" DESTINATION "${kivi_pc_dir}" COMPONENT kivi)
