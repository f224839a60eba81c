# SPDX-License-Identifier: MIT
# The command line tool. All but main() is a library of its own, for the tests and fuzz targets of its parts.

find_package(PkgConfig REQUIRED)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(POPT REQUIRED IMPORTED_TARGET popt)

set(cli_cuda_objects)
if(MSA_CUDA_ENABLED)
    msa_cuda_objects(cli_cuda_objects src/cli/peak_cuda.cu)
endif()

# tests/oracle*.c: the right answers that `msa make --with-expected` writes.
add_library(msa_cli STATIC
    src/cli/axes.c
    src/cli/bench_planned.c
    src/cli/bench_stateless.c
    src/cli/bench_time.c
    src/cli/case.c
    src/cli/cli.c
    src/cli/cmd_bench.c
    src/cli/cmd_check.c
    src/cli/cmd_info.c
    src/cli/cmd_make.c
    src/cli/cmd_run.c
    src/cli/compare.c
    src/cli/device.c
    src/cli/expected.c
    src/cli/options.c
    src/cli/output.c
    src/cli/peak.c
    src/cli/problem.c
    src/cli/progress.c
    src/cli/random.c
    src/cli/report.c
    src/cli/report_json.c
    src/cli/report_plot.c
    src/cli/results.c
    src/cli/safetensors.c
    src/cli/select.c
    src/cli/suite.c
    src/cli/tensor.c
    src/cli/visible.c
    src/cli/workload.c
    tests/oracle.c
    tests/oracle_numbers.c
    ${cli_cuda_objects})
target_include_directories(msa_cli PUBLIC src src/cli PRIVATE tests)
target_compile_options(msa_cli PRIVATE ${openmp_flags})
target_link_libraries(msa_cli PUBLIC msa_static msa_build PkgConfig::JANSSON PkgConfig::POPT)
# The formal suite's table is part of the tool (suite.c).
set(suite ${CMAKE_CURRENT_SOURCE_DIR}/bench/prefill_cases_128.csv)
target_compile_definitions(msa_cli PRIVATE MSA_SUITE_CSV="${suite}")
set_property(SOURCE src/cli/suite.c APPEND PROPERTY OBJECT_DEPENDS ${suite})

add_executable(msa src/cli/msa.c)
target_link_libraries(msa PRIVATE msa_cli)
