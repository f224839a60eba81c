# SPDX-License-Identifier: MIT
# How everything of this project is compiled (target msa_build), and whether CUDA is on (MSA_CUDA_ENABLED).

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_C_FLAGS_RELEASE "-O2 -g")
set(CMAKE_C_FLAGS_DEBUG "-O0 -g")

# The same bits from every compiler: a product and a sum are fused only where a kernel says so.
add_library(msa_build INTERFACE)
target_compile_options(msa_build INTERFACE -ffp-contract=off -fno-math-errno -Wall -Wextra -Wshadow -Wstrict-prototypes
                       -Wmissing-prototypes)

if(MSA_SANITIZE)
    list(JOIN MSA_SANITIZE "," sanitizers)
    set(sanitize -fsanitize=${sanitizers})
    if("undefined" IN_LIST MSA_SANITIZE)
        list(APPEND sanitize -fno-sanitize-recover=undefined)
    endif()
    target_compile_options(msa_build INTERFACE ${sanitize} -fno-omit-frame-pointer)
    target_link_options(msa_build INTERFACE ${sanitize})
endif()
if(MSA_COVERAGE)
    # Counters that threads share may lose counts, never a line; atomic ones would take an hour.
    target_compile_options(msa_build INTERFACE --coverage -O1 -fprofile-update=single)
    target_link_options(msa_build INTERFACE --coverage)
endif()
if(MSA_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID STREQUAL Clang)
        message(FATAL_ERROR "MSA_FUZZ needs clang (the compiler is ${CMAKE_C_COMPILER_ID})")
    endif()
    target_compile_options(msa_build INTERFACE -fsanitize=fuzzer-no-link)
endif()

if(NOT MSA_CUDA MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "MSA_CUDA is \"${MSA_CUDA}\": must be AUTO, ON or OFF")
endif()
set(MSA_CUDA_ENABLED OFF)
if(NOT MSA_CUDA STREQUAL OFF)
    find_program(MSA_NVCC nvcc HINTS ENV CUDA_PATH PATHS /usr/local/cuda/bin)
    if(MSA_NVCC AND EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/cmake/cuda.cmake)
        set(MSA_CUDA_ENABLED ON)
    elseif(MSA_CUDA STREQUAL ON)
        message(FATAL_ERROR "MSA_CUDA is ON, but nvcc was not found (set MSA_NVCC or CUDA_PATH)")
    else()
        message(STATUS "CUDA backend: skipped (no nvcc)")
    endif()
endif()
