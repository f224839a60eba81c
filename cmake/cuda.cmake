# SPDX-License-Identifier: MIT
# The CUDA backend. nvcc compiles each .cu for every architecture of MSA_CUDA_ARCHS to an object that needs no C++ runtime;
# the C compiler links them with the static CUDA runtime, so that the library depends on nothing of CUDA at run time.

set(MSA_CUDA_SOURCES
    src/cuda/attention_smxx.cu
    src/cuda/cache_smxx.cu
    src/cuda/combine_sm90.cu
    src/cuda/combine_smxx.cu
    src/cuda/convert_smxx.cu
    src/cuda/decode_shared_sm90.cu
    src/cuda/decode_sm90.cu
    src/cuda/index_smxx.cu
    src/cuda/prefill_cut_sm90.cu
    src/cuda/prefill_join_sm90.cu
    src/cuda/prefill_lists_sm90.cu
    src/cuda/prefill_pages_sm90.cu
    src/cuda/prefill_sm90.cu
    src/cuda/prepare_smxx.cu
    src/cuda/quantise_smxx.cu
    src/cuda/score_decode_sm90.cu
    src/cuda/score_sm90.cu
    src/cuda/topk_smxx.cu)

# All that this nvcc can build, if none are named. 90a, not 90: only that has Hopper's own instructions.
if(MSA_CUDA_ARCHS)
    set(cuda_archs ${MSA_CUDA_ARCHS})
else()
    execute_process(COMMAND ${MSA_NVCC} --list-gpu-code OUTPUT_VARIABLE cuda_known OUTPUT_STRIP_TRAILING_WHITESPACE)
    string(REGEX MATCHALL "sm_[0-9]+" cuda_known "${cuda_known}")
    set(cuda_archs)
    foreach(arch 80 86 89 90a 100 103 120)
        string(REGEX REPLACE "a$" "" number ${arch})
        if("sm_${number}" IN_LIST cuda_known)
            list(APPEND cuda_archs ${arch})
        endif()
    endforeach()
endif()

get_filename_component(cuda_root ${MSA_NVCC} REALPATH)
get_filename_component(cuda_root ${cuda_root} DIRECTORY)
get_filename_component(cuda_root ${cuda_root} DIRECTORY)
find_path(MSA_CUDA_INCLUDE cuda_runtime_api.h HINTS ${cuda_root}/include REQUIRED)
find_library(MSA_CUDART cudart_static HINTS ${cuda_root}/lib64 ${cuda_root}/lib REQUIRED)
message(STATUS "CUDA backend: ${MSA_NVCC}, for ${cuda_archs}")

# No -fmad: a product and a sum are fused only where a kernel says so. A spill or a serialised wgmma makes a tuned kernel slow
# without a sound, so ptxas' warnings are errors for those; the generic ones show them.
set(cuda_flags -std=c++17 -O3 -fmad=false -I${CMAKE_CURRENT_SOURCE_DIR}/include -Xptxas=-warn-spills)
list(APPEND cuda_flags -Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics
     -Xcompiler=-fno-asynchronous-unwind-tables,-Wall)
set(cuda_targets)
foreach(arch IN LISTS cuda_archs)
    list(APPEND cuda_targets -gencode=arch=compute_${arch},code=sm_${arch})
endforeach()
set(cuda_targets_sm90 -gencode=arch=compute_90a,code=sm_90a) # <name>_sm90.cu; not used if 90a is not in the list

# msa_cuda_objects(VARIABLE SOURCE...): rules for the objects, and their names.
function(msa_cuda_objects variable)
    set(objects)
    foreach(source IN LISTS ARGN)
        get_filename_component(name ${source} NAME)
        set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o)
        set(targets ${cuda_targets})
        if(name MATCHES "_sm90\\.cu$")
            set(targets ${cuda_targets_sm90} -Xptxas=-Werror)
        endif()
        add_custom_command(OUTPUT ${object} DEPFILE ${object}.d MAIN_DEPENDENCY ${CMAKE_CURRENT_SOURCE_DIR}/${source} VERBATIM
                           COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cuda
                           COMMAND ${MSA_NVCC} ${cuda_flags} ${targets} -MD -MF ${object}.d -MT ${object} -o ${object}
                                   -c ${CMAKE_CURRENT_SOURCE_DIR}/${source})
        list(APPEND objects ${object})
    endforeach()
    set(${variable} ${objects} PARENT_SCOPE)
endfunction()

msa_cuda_objects(MSA_CUDA_OBJECTS ${MSA_CUDA_SOURCES})
add_custom_target(msa_cuda DEPENDS ${MSA_CUDA_OBJECTS}) # one rule for both libraries to wait for

list(JOIN cuda_archs "," cuda_archs)
target_sources(msa_objects PRIVATE src/cuda/driver.c src/cuda/driver_plan.c)
target_compile_definitions(msa_objects PRIVATE MSA_CUDA_ARCHS="${cuda_archs}")
# The tool and the tests move data to and from devices.
target_compile_definitions(msa_build INTERFACE MSA_WITH_CUDA)
target_include_directories(msa_build SYSTEM INTERFACE ${MSA_CUDA_INCLUDE})
list(APPEND MSA_LIBS ${MSA_CUDART} pthread dl rt)
