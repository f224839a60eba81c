# SPDX-License-Identifier: MIT
# What `cmake --install` puts where: header, both libraries, pkg-config and CMake files, the tool and the man page.

include(CMakePackageConfigHelpers)
set(MSA_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/msa)

install(FILES include/msa.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS msa_shared msa_static EXPORT msa-targets)
install(EXPORT msa-targets NAMESPACE msa:: DESTINATION ${MSA_CMAKE_DIR} FILE msaTargets.cmake)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/msaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/msaConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/msaConfigVersion.cmake DESTINATION ${MSA_CMAKE_DIR})

# A full path or an option stays as it is; a plain name becomes -lname.
set(MSA_PC_LIBS "")
foreach(library IN LISTS MSA_LIBS)
    if(library MATCHES "^[/-]")
        string(APPEND MSA_PC_LIBS " ${library}")
    else()
        string(APPEND MSA_PC_LIBS " -l${library}")
    endif()
endforeach()
# Relative to the file itself, so that an installed tree can be moved.
file(RELATIVE_PATH MSA_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" MSA_PC_PREFIX ${MSA_PC_PREFIX})
configure_file(cmake/msa.pc.in msa.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/msa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(MSA_TOOLS)
    install(TARGETS msa)
    install(FILES docs/msa.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
endif()
