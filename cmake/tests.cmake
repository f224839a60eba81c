# SPDX-License-Identifier: MIT
# The tests, each a ctest entry. Labels say what scripts/test does with them:
#   small    also run under AddressSanitizer and UndefinedBehaviorSanitizer
#   threads  also run under ThreadSanitizer
#   fuzz     a short run of a libFuzzer target
#   valgrind a unit test, or the small case files, once more under valgrind
# A test prints its own count, as cmocka does or as a line "N passed, N failed, N skipped"; one that prints none counts as
# one test.

enable_testing()
include(CheckLanguage)
find_package(PkgConfig REQUIRED)
if(CMAKE_CROSSCOMPILING)
    message(STATUS "unit tests: skipped (cmocka is not there for ${CMAKE_SYSTEM_PROCESSOR})")
else()
    pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_program(MSA_VALGRIND valgrind)
if(NOT MSA_VALGRIND)
    message(STATUS "valgrind tests: skipped (no valgrind)")
endif()

# msa_add_test(NAME LABELS COMMAND...): tests run in the source tree; MSA_CASES may name a folder with more case files.
function(msa_add_test name labels)
    add_test(NAME ${name} COMMAND ${ARGN} WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT 1800)
    if(TEST_ENVIRONMENT)
        set_tests_properties(${name} PROPERTIES ENVIRONMENT "${TEST_ENVIRONMENT}")
    endif()
endfunction()

# clang's OpenMP tells ThreadSanitizer about its synchronisation through the Archer library beside it.
if("thread" IN_LIST MSA_SANITIZE AND OpenMP_omp_LIBRARY)
    get_filename_component(openmp_dir ${OpenMP_omp_LIBRARY} DIRECTORY)
    set(TEST_ENVIRONMENT OMP_TOOL_LIBRARIES=${openmp_dir}/libarcher.so TSAN_OPTIONS=ignore_noninstrumented_modules=1)
elseif("address" IN_LIST MSA_SANITIZE)
    # It brings libstdc++, whose thread-local storage, taken at exit, LeakSanitizer of clang 14 may misread and fault on.
    set(TEST_ENVIRONMENT OMP_TOOL=disabled)
endif()

# What several test programs share. Without cmocka: some also run where nothing can be installed.
add_library(msa_test_support STATIC
    tests/attention_case.c
    tests/casefile.c
    tests/device.c
    tests/harness.c
    tests/hostile.c
    tests/index_case.c
    tests/inputs.c
    tests/oracle.c
    tests/oracle_numbers.c
    tests/util.c)
target_link_libraries(msa_test_support PUBLIC msa_static msa_build m)
target_include_directories(msa_test_support PUBLIC src tests)

# ---------------------------------------------------------------------------------------------------- units

# msa_valgrind_test(NAME COMMAND...)
function(msa_valgrind_test name)
    if(MSA_VALGRIND AND NOT MSA_SANITIZE AND NOT MSA_COVERAGE)
        msa_add_test(valgrind_${name} valgrind ${MSA_VALGRIND} -q --error-exitcode=1 --leak-check=full
                     --show-leak-kinds=definite --errors-for-leak-kinds=definite ${ARGN})
    endif()
endfunction()

# msa_unit_test(NAME LABEL...): tests/NAME.c with cmocka.
function(msa_unit_test name)
    add_executable(${name} tests/${name}.c tests/api_fixture.c)
    target_link_libraries(${name} PRIVATE msa_test_support PkgConfig::CMOCKA)
    msa_add_test(${name} "${ARGN}" ${name})
    msa_valgrind_test(${name} $<TARGET_FILE:${name}>)
endfunction()

if(CMOCKA_FOUND)
    msa_unit_test(test_alloc small)
    msa_unit_test(test_api_attention small)
    msa_unit_test(test_api_context small threads)
    msa_unit_test(test_api_edges small)
    msa_unit_test(test_api_index small)
    msa_unit_test(test_api_stateless small)
    msa_unit_test(test_header small)
    msa_unit_test(test_number small)
    msa_unit_test(test_threads small threads)

    check_language(CXX)
    if(CMAKE_CXX_COMPILER)
        enable_language(CXX)
        add_executable(test_header_cxx tests/test_header.cpp)
        set_property(TARGET test_header_cxx PROPERTY CXX_STANDARD 17)
        target_include_directories(test_header_cxx PRIVATE include)
        target_link_libraries(test_header_cxx PRIVATE PkgConfig::CMOCKA)
        msa_add_test(test_header_cxx "" test_header_cxx)
    else()
        message(STATUS "header as C++: skipped (no C++ compiler)")
    endif()
endif()

# ---------------------------------------------------------------------------------------------------- kernels

add_executable(checkkernel
    tests/check_attention.c
    tests/check_cache.c
    tests/check_combine.c
    tests/check_cuda.c
    tests/check_formats.c
    tests/check_index.c
    tests/check_oracle.c
    tests/check_probability.c
    tests/check_shapes.c
    tests/check_topk.c
    tests/checkkernel.c)
target_link_libraries(checkkernel PRIVATE msa_test_support)
add_executable(test_faults
    tests/faults_calls.c
    tests/faults_limits.c
    tests/faults_masks.c
    tests/faults_numbers.c
    tests/faults_pages.c
    tests/faults_plans.c
    tests/faults_selection.c
    tests/test_faults.c)
target_link_libraries(test_faults PRIVATE msa_test_support)
if(MSA_SANITIZE)
    msa_add_test(checkkernel_random "small;threads" checkkernel --quick --filter random)
endif()
if(MSA_SANITIZE OR MSA_COVERAGE)
    msa_add_test(checkkernel "small" checkkernel --quick)
    msa_add_test(test_faults "small" test_faults --quick)
else()
    msa_add_test(checkkernel "" checkkernel)
    msa_add_test(test_faults "" test_faults)
endif()

# The NEON kernels of any other machine, cross-compiled and emulated.
if(NOT CMAKE_CROSSCOMPILING AND NOT MSA_SANITIZE AND NOT MSA_COVERAGE)
    msa_add_test(test_neon "" scripts/test-neon ${CMAKE_CURRENT_BINARY_DIR}/neon)
endif()

# ---------------------------------------------------------------------------------------------------- the tool

if(MSA_TOOLS)
    add_executable(checksample tests/checksample.c)
    target_link_libraries(checksample PRIVATE msa_cli msa_test_support)
    msa_add_test(checksample "" checksample tests/cases/hf_layer_q8kv8.safetensors)
    file(GLOB small_cases CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/cases/*.safetensors)
    list(FILTER small_cases EXCLUDE REGEX "/hf_layer_") # 4 MB
    msa_valgrind_test(cases $<TARGET_FILE:msa> check --threads 1 ${small_cases}) # one count: valgrind's word
    msa_add_test(test_cli small ${Python3_EXECUTABLE} tests/test_cli.py $<TARGET_FILE:msa>)
    msa_add_test(test_bad_files small ${Python3_EXECUTABLE} tests/test_bad_files.py $<TARGET_FILE:msa>)
    msa_add_test(test_make small ${Python3_EXECUTABLE} tests/test_make.py $<TARGET_FILE:msa>)
    msa_add_test(test_bench small ${Python3_EXECUTABLE} tests/test_bench.py $<TARGET_FILE:msa>)
endif()
if(NOT MSA_SANITIZE AND NOT MSA_COVERAGE AND NOT CMAKE_CROSSCOMPILING)
    msa_add_test(test_symbols "" tests/test_symbols.sh $<TARGET_FILE:msa_shared>
                 $<TARGET_FILE:msa_static> include/msa.h)
    msa_add_test(test_install "" tests/test_install.sh ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_BINARY_DIR}
                 ${CMAKE_C_COMPILER})
endif()

# ---------------------------------------------------------------------------------------------------- fuzz targets

# Every build replays the corpus; a libFuzzer build also searches from there for MSA_FUZZ_SECONDS.
function(msa_fuzz_target name)
    file(GLOB corpus CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/${name}/*)
    add_executable(replay_${name} tests/fuzz_${name}.c tests/fuzz/replay.c)
    target_link_libraries(replay_${name} PRIVATE ${ARGN} msa_test_support)
    msa_add_test(replay_${name} small replay_${name} ${corpus})
    if(MSA_FUZZ)
        add_executable(fuzz_${name} tests/fuzz_${name}.c)
        target_link_libraries(fuzz_${name} PRIVATE ${ARGN} msa_test_support)
        target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
        set(found ${CMAKE_CURRENT_BINARY_DIR}/fuzz_${name}.found)
        file(MAKE_DIRECTORY ${found})
        msa_add_test(fuzz_${name} fuzz fuzz_${name} -max_total_time=${MSA_FUZZ_SECONDS} -timeout=60 -rss_limit_mb=2048
                     -artifact_prefix=${found}/ ${found} tests/fuzz/${name})
    endif()
endfunction()

msa_fuzz_target(arguments)
msa_fuzz_target(attention)
msa_fuzz_target(index)
msa_fuzz_target(rows)
if(MSA_TOOLS)
    msa_fuzz_target(case msa_cli)
endif()
