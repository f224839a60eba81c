# SPDX-License-Identifier: MIT
# OpenMP, when there is one: libgomp with gcc, libomp with clang.
# The runtime is linked by its own name and not by -fopenmp, so that the installed static library works with any compiler.

if(MSA_OPENMP)
    find_package(OpenMP COMPONENTS C)
endif()
if(OpenMP_C_FOUND)
    separate_arguments(openmp_flags UNIX_COMMAND "${OpenMP_C_FLAGS}")
    target_compile_options(msa_objects PRIVATE ${openmp_flags})
    if(CMAKE_C_COMPILER_ID STREQUAL GNU)
        list(APPEND MSA_LIBS gomp)
    else()
        list(APPEND MSA_LIBS ${OpenMP_omp_LIBRARY})
    endif()
    message(STATUS "OpenMP: ${OpenMP_C_LIB_NAMES}")
else()
    message(STATUS "OpenMP: none; contexts without lent threads use one thread")
endif()
