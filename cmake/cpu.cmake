# SPDX-License-Identifier: MIT
# Instruction sets: src/cpu/<what>_<isa>.c is compiled, with the flags given here, where the processor has such an instruction
# set and the compiler knows it. MSA_HAVE_<ISA> then lets the list of kernels name its functions; whether the machine can run
# them is asked when a context is made.

# In unrolled vector code clang's undefined-behaviour checks and fuzzing counters take minutes to compile; AddressSanitizer stays.
set(isa_sanitize)
if(MSA_SANITIZE AND CMAKE_C_COMPILER_ID MATCHES Clang)
    set(isa_sanitize -fno-sanitize=undefined -fno-sanitize-coverage=inline-8bit-counters,indirect-calls,trace-cmp,pc-table)
endif()

# msa_isa(NAME PROCESSORS FLAG...)
function(msa_isa isa processors)
    set(sources ${MSA_SOURCES})
    list(FILTER sources INCLUDE REGEX "_${isa}\\.c$")
    list(JOIN ARGN " " flags)
    string(TOUPPER ${isa} upper)
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(${processors})$")
        check_c_compiler_flag("${flags}" MSA_COMPILER_HAS_${upper})
    endif()
    if(MSA_COMPILER_HAS_${upper} AND sources)
        set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${ARGN};${isa_sanitize}")
        target_compile_definitions(msa_objects PUBLIC MSA_HAVE_${upper}=1)
    else()
        set_source_files_properties(${sources} PROPERTIES HEADER_FILE_ONLY ON)
        message(STATUS "${isa} kernels: not built (${CMAKE_SYSTEM_PROCESSOR}, ${CMAKE_C_COMPILER_ID})")
    endif()
endfunction()

set(avx2 -mavx2 -mfma -mf16c -mbmi2)
set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
msa_isa(avx2 "x86_64|AMD64" ${avx2})
msa_isa(avx512 "x86_64|AMD64" ${avx512})
set(avx512bf16 ${avx512} -mavx512vbmi -mavx512bf16)
msa_isa(avx512bf16 "x86_64|AMD64" ${avx512bf16})
msa_isa(amx "x86_64|AMD64" ${avx512bf16} -mgfni -mamx-tile -mamx-bf16)
msa_isa(neon "aarch64|arm64" -march=armv8-a)
