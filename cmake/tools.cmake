# SPDX-License-Identifier: MIT
# The command line tool. All but main() is a library of its own, for the tests and fuzz targets of its parts.

find_package(PkgConfig REQUIRED)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(POPT REQUIRED IMPORTED_TARGET popt)

file(GLOB cli_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cli/*.c) # until all are there
list(REMOVE_ITEM cli_sources ${CMAKE_CURRENT_SOURCE_DIR}/src/cli/msa.c)
if(cli_sources)
    # tests/oracle*.c: the right answers that `msa make --with-expected` writes
    add_library(msa_cli STATIC ${cli_sources} tests/oracle.c tests/oracle_numbers.c)
    target_include_directories(msa_cli PUBLIC src src/cli PRIVATE tests)
    # The formal suite's table is part of the tool (suite.c).
    set(suite ${CMAKE_CURRENT_SOURCE_DIR}/bench/prefill_cases_128.csv)
    target_compile_definitions(msa_cli PRIVATE MSA_SUITE_CSV="${suite}")
    set_property(SOURCE src/cli/suite.c APPEND PROPERTY OBJECT_DEPENDS ${suite})
    target_compile_options(msa_cli PRIVATE ${openmp_flags})
    target_link_libraries(msa_cli PUBLIC msa_static msa_build PkgConfig::JANSSON PkgConfig::POPT)
endif()
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/src/cli/msa.c)
    add_executable(msa src/cli/msa.c)
    target_link_libraries(msa PRIVATE msa_cli)
endif()
