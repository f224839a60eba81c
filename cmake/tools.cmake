# SPDX-License-Identifier: MIT
# The command line tool. All but main() is a library of its own, for the tests and fuzz targets of its parts.

find_package(PkgConfig REQUIRED)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(POPT REQUIRED IMPORTED_TARGET popt)

file(GLOB cli_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cli/*.c) # until all are there
list(REMOVE_ITEM cli_sources ${CMAKE_CURRENT_SOURCE_DIR}/src/cli/msa.c)
if(cli_sources)
    add_library(msa_cli STATIC ${cli_sources})
    target_include_directories(msa_cli PUBLIC src src/cli)
    target_compile_options(msa_cli PRIVATE ${openmp_flags})
    target_link_libraries(msa_cli PUBLIC msa_static msa_build PkgConfig::JANSSON PkgConfig::POPT)
endif()
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/src/cli/msa.c)
    add_executable(msa src/cli/msa.c)
    target_link_libraries(msa PRIVATE msa_cli)
endif()
