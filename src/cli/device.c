/* SPDX-License-Identifier: MIT
 *
 * device.c - contexts and memory.
 */
#include "device.h"

#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef MSA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

static int default_threads(void)
{
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

#ifdef MSA_WITH_CUDA
static int cuda_result(const char *what, cudaError_t error)
{
    return error ? cli_error("%s: %s", what, cudaGetErrorString(error)) : CLI_OK;
}
#endif

int device_open(struct device *device, const struct run_options *options)
{
    static int progress_threads;
    msa_context_options context_options = MSA_CONTEXT_OPTIONS_INIT;
    context_options.device = options->device;
    context_options.num_threads = options->threads;
    context_options.isa = options->isa;
    if (options->progress && options->device == MSA_DEVICE_CPU) {
        progress_threads = options->threads ? options->threads : default_threads();
        context_options.num_threads = progress_threads > 1 ? progress_threads : 2; /* one would not call parallel_for */
        context_options.parallel_for = progress_parallel_for;
        context_options.parallel_for_data = &progress_threads;
    }
    device->ordinal = options->device;
    if (msa_context_create(&context_options, &device->context) != MSA_SUCCESS)
        return cli_library_error("the device cannot be used");
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device) && cuda_result("the device cannot be used", cudaSetDevice(device->ordinal)) != CLI_OK) {
        device_close(device);
        return CLI_BAD;
    }
#endif
    return CLI_OK;
}

void device_close(struct device *device)
{
    msa_context_destroy(device->context);
    device->context = NULL;
}

bool device_is_host(const struct device *device)
{
    return device->ordinal == MSA_DEVICE_CPU;
}

void *device_alloc(const struct device *device, size_t bytes)
{
    void *pointer = NULL;
    int result;
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device))
        result = cudaMalloc(&pointer, bytes ? bytes : 1);
    else
#endif
        result = posix_memalign(&pointer, 256, bytes ? bytes : 1);
    if (result != 0) {
        cli_error("no memory for a buffer of %zu bytes", bytes);
        return NULL;
    }
    return pointer;
}

void device_free(const struct device *device, void *pointer)
{
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device)) {
        cudaFree(pointer);
        return;
    }
#endif
    free(pointer);
}

int device_copy_in(const struct device *device, void *destination, const void *host, size_t bytes)
{
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device))
        return cuda_result("copy to the device", cudaMemcpy(destination, host, bytes, cudaMemcpyHostToDevice));
#endif
    memcpy(destination, host, bytes);
    return CLI_OK;
}

int device_copy_out(const struct device *device, void *host, const void *source, size_t bytes)
{
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device))
        return cuda_result("copy from the device", cudaMemcpy(host, source, bytes, cudaMemcpyDeviceToHost));
#endif
    memcpy(host, source, bytes);
    return CLI_OK;
}

int device_fill(const struct device *device, void *destination, int byte, size_t bytes)
{
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device)) {
        cudaError_t error = cudaMemset(destination, byte, bytes);
        return cuda_result("fill on the device", error ? error : cudaDeviceSynchronize());
    }
#endif
    memset(destination, byte, bytes);
    return CLI_OK;
}
