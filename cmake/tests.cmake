# SPDX-License-Identifier: MIT
# The tests, each a ctest entry. Labels say what scripts/test does with them:
#   small    also run under AddressSanitizer and UndefinedBehaviorSanitizer
#   threads  also run under ThreadSanitizer
#   fuzz     a short run of a libFuzzer target
# A test prints its own count, as cmocka does or as a line "N passed, N failed, N skipped"; one that prints none counts as
# one test.

enable_testing()
include(CheckLanguage)
find_package(PkgConfig REQUIRED)
pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
find_program(MSA_VALGRIND valgrind)

# What several test programs share. checkkernel links it without cmocka: it also runs where nothing can be installed.
file(GLOB support_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/*.c)
list(FILTER support_sources EXCLUDE REGEX "/(test|fuzz)_|/check(kernel|sample)\\.c$")
add_library(msa_test_support STATIC ${support_sources})
target_link_libraries(msa_test_support PUBLIC msa_static msa_build m)
target_include_directories(msa_test_support PUBLIC src tests)

# msa_add_test(NAME LABELS COMMAND...): tests run in the source tree; MSA_CASES may name a folder with more case files.
function(msa_add_test name labels)
    add_test(NAME ${name} COMMAND ${ARGN} WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 600)
    if(TEST_ENVIRONMENT)
        set_tests_properties(${name} PROPERTIES ENVIRONMENT "${TEST_ENVIRONMENT}")
    endif()
endfunction()

# clang's OpenMP tells ThreadSanitizer about its synchronisation through the Archer library beside it.
if("thread" IN_LIST MSA_SANITIZE AND OpenMP_omp_LIBRARY)
    get_filename_component(openmp_dir ${OpenMP_omp_LIBRARY} DIRECTORY)
    set(TEST_ENVIRONMENT OMP_TOOL_LIBRARIES=${openmp_dir}/libarcher.so TSAN_OPTIONS=ignore_noninstrumented_modules=1)
endif()

# msa_unit_test(NAME LABELS): tests/NAME.c with cmocka.
function(msa_unit_test name labels)
    add_executable(${name} tests/${name}.c)
    target_link_libraries(${name} PRIVATE msa_test_support PkgConfig::CMOCKA)
    msa_add_test(${name} "${labels}" ${name})
    if("valgrind" IN_LIST labels AND MSA_VALGRIND AND NOT MSA_SANITIZE)
        msa_add_test(valgrind_${name} "" ${MSA_VALGRIND} -q --error-exitcode=1 --leak-check=full $<TARGET_FILE:${name}>)
    endif()
endfunction()

file(GLOB test_sources RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/test_*.c)
foreach(source IN LISTS test_sources)
    get_filename_component(name ${source} NAME_WE)
    msa_unit_test(${name} "small;valgrind")
endforeach()

check_language(CXX)
if(CMAKE_CXX_COMPILER)
    enable_language(CXX)
    set(CMAKE_CXX_STANDARD 17)
    add_executable(test_header_cxx tests/test_header.cpp)
    target_include_directories(test_header_cxx PRIVATE include)
    target_link_libraries(test_header_cxx PRIVATE PkgConfig::CMOCKA)
    msa_add_test(test_header_cxx "" test_header_cxx)
else()
    message(STATUS "header as C++: skipped (no C++ compiler)")
endif()

if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/tests/checkkernel.c)
    add_executable(checkkernel tests/checkkernel.c)
    target_link_libraries(checkkernel PRIVATE msa_test_support)
    msa_add_test(checkkernel "" checkkernel)
endif()

if(TARGET msa)
    add_executable(checksample tests/checksample.c)
    target_link_libraries(checksample PRIVATE msa_cli msa_test_support)
endif()

if(MSA_FUZZ)
    file(GLOB fuzz_sources RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz_*.c)
    foreach(source IN LISTS fuzz_sources)
        get_filename_component(name ${source} NAME_WE)
        add_executable(${name} tests/${name}.c)
        target_link_libraries(${name} PRIVATE msa_cli msa_test_support)
        target_link_options(${name} PRIVATE -fsanitize=fuzzer)
        msa_add_test(${name} fuzz ${name} -max_total_time=${MSA_FUZZ_SECONDS} -timeout=20 -rss_limit_mb=2048)
    endforeach()
endif()
