/* SPDX-License-Identifier: MIT
 *
 * device.c - contexts and memory.
 */
#include "device.h"
#include "parallel.h"

#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef MSA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

int host_threads(void)
{
#ifdef _OPENMP
    int most = omp_get_max_threads();
    return most < CLI_MAX_THREADS ? most : CLI_MAX_THREADS;
#else
    return 1;
#endif
}

#ifdef MSA_WITH_CUDA
static int cuda_result(const char *what, cudaError_t error)
{
    return error ? cli_error("%s: %s", what, cudaGetErrorString(error)) : CLI_OK;
}

static int open_cuda(struct device *device)
{
    cudaError_t error = cudaSetDevice(device->ordinal);
    error = error ? error : cudaStreamCreate(&device->stream);
    for (int i = 0; i < 2 && !error; i++)
        error = cudaEventCreate((cudaEvent_t *)&device->mark[i]);
    return cuda_result("the device cannot be used", error);
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
        progress_threads = options->threads ? options->threads : host_threads();
        context_options.num_threads = progress_threads > 1 ? progress_threads : 2; /* one would not call parallel_for */
        context_options.parallel_for = progress_parallel_for;
        context_options.parallel_for_data = &progress_threads;
    }
    *device = (struct device){.ordinal = options->device};
    if (msa_context_create(&context_options, &device->context) != MSA_SUCCESS)
        return cli_library_error("the device cannot be used");
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device) && open_cuda(device) != CLI_OK) {
        device_close(device);
        return CLI_BAD;
    }
#endif
    return CLI_OK;
}

void device_close(struct device *device)
{
#ifdef MSA_WITH_CUDA
    if (device->stream)
        cudaStreamDestroy(device->stream);
    for (int i = 0; i < 2 && device->mark[i]; i++)
        cudaEventDestroy(device->mark[i]);
#endif
    msa_context_destroy(device->context);
    device->context = NULL;
}

size_t device_cache_bytes(int32_t ordinal)
{
    int bytes = 0;
#ifdef MSA_WITH_CUDA
    if (cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, ordinal))
        bytes = 0;
#else
    (void)ordinal;
#endif
    return (size_t)bytes;
}

bool device_is_host(const struct device *device)
{
    return device->ordinal == MSA_DEVICE_CPU;
}

void *device_alloc(const struct device *device, size_t bytes)
{
    (void)device; /* without CUDA there is one kind */
    void *pointer = NULL;
    int result;
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device))
        result = cudaMalloc(&pointer, bytes ? bytes : 1);
    else
#endif
        result = !(pointer = memory_alloc(bytes));
    if (result != 0) {
        cli_error("no memory for a buffer of %zu bytes", bytes);
        return NULL;
    }
    return pointer;
}

void device_free(const struct device *device, void *pointer)
{
    (void)device; /* without CUDA there is one kind */
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
    (void)device; /* without CUDA there is one kind */
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device))
        return cuda_result("copy to the device", cudaMemcpy(destination, host, bytes, cudaMemcpyHostToDevice));
#endif
    memcpy(destination, host, bytes);
    return CLI_OK;
}

int device_copy_out(const struct device *device, void *host, const void *source, size_t bytes)
{
    (void)device; /* without CUDA there is one kind */
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device))
        return cuda_result("copy from the device", cudaMemcpy(host, source, bytes, cudaMemcpyDeviceToHost));
#endif
    memcpy(host, source, bytes);
    return CLI_OK;
}

int device_fill(const struct device *device, void *destination, int byte, size_t bytes)
{
    (void)device; /* without CUDA there is one kind */
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device)) {
        cudaError_t error = cudaMemset(destination, byte, bytes);
        return cuda_result("fill on the device", error ? error : cudaDeviceSynchronize());
    }
#endif
    memset(destination, byte, bytes);
    return CLI_OK;
}

int device_begin(struct device *device)
{
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device)) {
        cudaError_t error = cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal);
        error = error ? error : cudaEventRecordWithFlags(device->mark[0], device->stream, cudaEventRecordExternal);
        return cuda_result("capture", error);
    }
#endif
    device->started = seconds_now();
    return CLI_OK;
}

#ifdef MSA_WITH_CUDA
static int replay(const struct device *device, cudaGraph_t graph, double *seconds)
{
    cudaGraphExec_t executable = NULL;
    float milliseconds = 0;
    cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
    for (int i = 0; i < 2; i++) /* the first replay brings the graph to the device; the marks are the second's */
        error = error ? error : cudaGraphLaunch(executable, device->stream);
    error = error ? error : cudaStreamSynchronize(device->stream);
    error = error ? error : cudaEventElapsedTime(&milliseconds, device->mark[0], device->mark[1]);
    if (executable)
        cudaGraphExecDestroy(executable);
    *seconds = 1e-3 * (double)milliseconds;
    return cuda_result("replay", error);
}
#endif

int device_end(struct device *device, double *seconds)
{
#ifdef MSA_WITH_CUDA
    if (!device_is_host(device)) {
        cudaGraph_t graph = NULL;
        cudaError_t error = cudaEventRecordWithFlags(device->mark[1], device->stream, cudaEventRecordExternal);
        cudaError_t ended = cudaStreamEndCapture(device->stream, &graph);
        int status = cuda_result("capture", error ? error : ended);
        if (status == CLI_OK)
            status = replay(device, graph, seconds);
        if (graph)
            cudaGraphDestroy(graph);
        return status;
    }
#endif
    *seconds = seconds_now() - device->started;
    return CLI_OK;
}
