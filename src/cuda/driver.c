/* SPDX-License-Identifier: MIT
 *
 * driver.c - the CUDA backend: contexts, and the one call into the kernels' launchers for each operation. driver_plan.c
 * has the planned operations.
 *
 * The device is entered by pushing its primary context and left by popping it, so that the caller's current device (or
 * the lack of one) is what it was. The driver's functions are found at run time: the library loads where there is none.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------ kernels */

struct kernel_entry {
    enum cuda_level level;
    const char *name, *operation, *formats;
    const void *symbol;
};

static const struct kernel_entry kernel_list[] = {
#define MSA_CUDA_KERNEL(level, type, slot, symbol, operation, formats) \
    {level, #symbol, operation, formats, (const void *)&symbol},
#include "../kernels.inc"
};
enum { NUM_KERNELS = sizeof kernel_list / sizeof *kernel_list };

const char *cuda_kernel_name(const void *symbol)
{
    for (int i = 0; i < NUM_KERNELS; i++)
        if (kernel_list[i].symbol == symbol)
            return kernel_list[i].name;
    return "none";
}

/* Images of exactly one architecture exist if it was built and serve if the device is that one. */
static bool has_level(const msa_context *context, enum cuda_level level)
{
    return level == LEVEL_SMXX ||
           (level == LEVEL_SM90 && context->compute_capability == 90 && strstr(MSA_CUDA_ARCHS, "90a"));
}

size_t cuda_kernel_get(const msa_context *context, size_t index, msa_kernel_info *info)
{
    static const char *const level_names[NUM_LEVELS] = {"smxx", "sm_90a"};
    if (index < NUM_KERNELS) {
        const struct kernel_entry *entry = &kernel_list[index];
        info->name = entry->name;
        info->operation = entry->operation;
        info->formats = entry->formats;
        info->isa = level_names[entry->level];
        info->available = context && context->device != MSA_DEVICE_CPU && has_level(context, entry->level);
    }
    return NUM_KERNELS;
}

/* ------------------------------------------------------------------------------------------------ entering, leaving */

msa_status cuda_enter(const msa_context *context)
{
    const struct cuda_device *device = cuda_device_of(context);
    CUresult result = device->push(device->primary);
    return result ? fail(MSA_ERROR_CUDA, "device = %d: its context could not be entered (CUDA driver error %d)",
                         (int)context->device, (int)result)
                  : MSA_SUCCESS;
}

msa_status cuda_leave(const msa_context *context, const char *what, cudaError_t error)
{
    if (error)
        cudaGetLastError(); /* it is returned, so it must not come up again in the caller's own checks */
    CUcontext popped;
    cuda_device_of(context)->pop(&popped);
    if (!error)
        return MSA_SUCCESS;
    msa_status status = error == cudaErrorMemoryAllocation         ? MSA_ERROR_OUT_OF_MEMORY
                        : error == cudaErrorNoKernelImageForDevice ? MSA_ERROR_NO_KERNEL_IMAGE
                                                                   : MSA_ERROR_CUDA;
    return fail(status, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

/* ------------------------------------------------------------------------------------------------ stateless calls */

static msa_status cuda_topk(msa_context *context, const msa_topk_args *args, msa_stream stream)
{
    struct cuda_topk job = {.args = *args};
    msa_status status = args->rows ? cuda_enter(context) : MSA_SUCCESS;
    return status || !args->rows ? status
                                 : cuda_leave(context, "top-k", cuda_device_of(context)->kernels.topk(&job, stream));
}

static msa_status cuda_merge(msa_context *context, const struct merge_job *job, msa_stream stream)
{
    struct cuda_merge merge = {.job = *job};
    msa_status status = job->rows ? cuda_enter(context) : MSA_SUCCESS;
    return status || !job->rows ? status
                                : cuda_leave(context, "merge", cuda_device_of(context)->kernels.merge(&merge, stream));
}

static msa_status cuda_quantise(msa_context *context, const msa_quantise_args *args, msa_stream stream)
{
    msa_status status = args->rows ? cuda_enter(context) : MSA_SUCCESS;
    return status || !args->rows
               ? status
               : cuda_leave(context, "quantise", cuda_device_of(context)->kernels.quantise(args, stream));
}

static msa_status cuda_convert(msa_context *context, const msa_convert_args *args, msa_stream stream)
{
    msa_status status = args->rows ? cuda_enter(context) : MSA_SUCCESS;
    return status || !args->rows
               ? status
               : cuda_leave(context, "convert", cuda_device_of(context)->kernels.convert(args, stream));
}

static msa_status cuda_cache_write(msa_context *context, const msa_cache_write_args *args, msa_stream stream)
{
    msa_status status = args->tokens ? cuda_enter(context) : MSA_SUCCESS;
    return status || !args->tokens
               ? status
               : cuda_leave(context, "cache write", cuda_device_of(context)->kernels.cache_write(args, stream));
}

/* ------------------------------------------------------------------------------------------------ memory */

static void *cuda_device_alloc(msa_context *context, size_t bytes)
{
    void *pointer = NULL;
    if (cuda_enter(context))
        return NULL;
    return cuda_leave(context, "workspace", cudaMalloc(&pointer, bytes)) ? NULL : pointer; /* aligned to 256 */
}

static void cuda_device_free(msa_context *context, void *pointer)
{
    if (pointer && !cuda_enter(context))
        cuda_leave(context, "workspace", cudaFree(pointer));
}

/* ------------------------------------------------------------------------------------------------ contexts */

static void cuda_context_destroy(msa_context *context)
{
    struct cuda_device *device = context->backend_data;
    device->release(device->handle);
    context_free(context, device);
}

static const struct backend cuda_backend = {
    .plan = cuda_plan_init,
    .plan_destroy = cuda_plan_destroy,
    .prepare = cuda_prepare,
    .index_run = cuda_index_run,
    .attention_run = cuda_attention_run,
    .plan_error = cuda_plan_error,
    .topk = cuda_topk,
    .merge = cuda_merge,
    .quantise = cuda_quantise,
    .convert = cuda_convert,
    .cache_write = cuda_cache_write,
    .device_alloc = cuda_device_alloc,
    .device_free = cuda_device_free,
    .context_destroy = cuda_context_destroy,
};

static msa_status check_ordinal(int ordinal)
{
    int driver = 0, runtime = 0, count = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (!driver)
        return fail(MSA_ERROR_NO_DEVICE, "device = %d: no CUDA driver is installed", ordinal);
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver)
        return fail(MSA_ERROR_NO_DEVICE, "device = %d: the NVIDIA driver serves CUDA %d.%d, this library needs %d.%d",
                    ordinal, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (error && error != cudaErrorNoDevice)
        return fail(MSA_ERROR_NO_DEVICE, "device = %d: CUDA cannot be used: %s", ordinal, cudaGetErrorString(error));
    if (ordinal >= count)
        return fail(MSA_ERROR_NO_DEVICE, "device = %d: must be less than %d, the number of CUDA devices here", ordinal,
                    count);
    return MSA_SUCCESS;
}

static bool find_driver_function(const char *name, void *function)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    return cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &found) == cudaSuccess &&
           found == cudaDriverEntryPointSuccess;
}

static msa_status open_device(struct cuda_device *device, int ordinal)
{
    CUresult (*get)(CUdevice *, int);
    CUresult (*retain)(CUcontext *, CUdevice);
    if (!find_driver_function("cuDeviceGet", &get) || !find_driver_function("cuDevicePrimaryCtxRetain", &retain) ||
        !find_driver_function("cuDevicePrimaryCtxRelease", &device->release) ||
        !find_driver_function("cuCtxPushCurrent", &device->push) ||
        !find_driver_function("cuCtxPopCurrent", &device->pop) ||
        !find_driver_function("cuTensorMapEncodeTiled", &device->encode_tensor)) {
        cudaGetLastError();
        return fail(MSA_ERROR_NO_DEVICE, "device = %d: the NVIDIA driver lacks a function", ordinal);
    }
    CUresult result = get(&device->handle, ordinal);
    if (!result)
        result = retain(&device->primary, device->handle);
    return result ? fail(MSA_ERROR_NO_DEVICE, "device = %d: it cannot be opened (CUDA driver error %d)", ordinal,
                         (int)result)
                  : MSA_SUCCESS;
}

/* The name of the image: "sm_90a" for version 90 where 90a was built. */
static void name_image(char *name, size_t size, int version)
{
    for (const char *arch = MSA_CUDA_ARCHS; *arch; arch += strcspn(arch, ","), arch += *arch == ',')
        if (atoi(arch) == version)
            snprintf(name, size, "sm_%.*s", (int)strcspn(arch, ","), arch);
}

/* Fills in what the device is; finds out whether this library holds code for it, without launching any. */
static msa_status describe_device(msa_context *context, struct cuda_device *device)
{
    int ordinal = context->device, major = 0, minor = 0, version = 0;
    struct cudaDeviceProp properties;
    msa_status status = cuda_enter(context);
    if (status)
        return status;
    cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
    if (!error) {
        major = properties.major;
        minor = properties.minor;
        device->num_sms = properties.multiProcessorCount;
        context->compute_capability = 10 * major + minor;
        snprintf(context->device_name, sizeof context->device_name, "%.90s", properties.name);
        error = image_version_smxx(&version);
    }
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        cuda_leave(context, "device", error);
        return fail(MSA_ERROR_NO_KERNEL_IMAGE, "device = %d: %s is sm_%d%d, and this library was built for sm_%s",
                    ordinal, context->device_name, major, minor, MSA_CUDA_ARCHS);
    }
    name_image(device->image, sizeof device->image, version);
    return cuda_leave(context, "device", error);
}

msa_status cuda_context_init(msa_context *context, const msa_context_options *options)
{
    msa_status status = check_ordinal(options->device);
    if (status)
        return status;
    struct cuda_device *device = context_alloc(context, sizeof *device);
    if (!device)
        return fail(MSA_ERROR_OUT_OF_MEMORY, "context: %zu bytes could not be allocated", sizeof *device);
    context->backend = &cuda_backend;
    context->backend_data = device;
    status = open_device(device, options->device);
    if (status) {
        context_free(context, device);
        return status;
    }
    status = describe_device(context, device);
    if (status) {
        cuda_context_destroy(context);
        return status;
    }
#define MSA_CUDA_KERNEL(level, type, slot, symbol, operation, formats) \
    if (has_level(context, level))                                     \
        device->kernels.slot = &symbol;
#include "../kernels.inc"
    context->isa_name = device->image;
    return MSA_SUCCESS;
}
