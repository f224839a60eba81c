/* SPDX-License-Identifier: MIT
 *
 * context.c - contexts: device, threads, allocator; and the memory helpers of everything that hangs on one.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static void *default_alloc(void *data, size_t bytes)
{
    (void)data;
    return malloc(bytes);
}

static void default_free(void *data, void *pointer)
{
    (void)data;
    free(pointer);
}

void *context_alloc(msa_context *context, size_t bytes)
{
    void *pointer = context->alloc(context->alloc_data, bytes);
    return pointer ? memset(pointer, 0, bytes) : NULL;
}

void context_free(msa_context *context, void *pointer)
{
    if (pointer)
        context->free(context->alloc_data, pointer);
}

void context_release(msa_context *context)
{
    if (atomic_fetch_sub_explicit(&context->references, 1, memory_order_acq_rel) != 1)
        return;
    context->backend->context_destroy(context);
    context_free(context, context);
}

msa_status msa_context_create(const msa_context_options *caller_options, msa_context **context)
{
    if (!context)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "context = NULL: must point to where the context goes");
    *context = NULL;
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;
    if (caller_options) {
        msa_status status = check_struct("options", caller_options, &options, sizeof options);
        if (status)
            return status;
    }
    if (options.device < MSA_DEVICE_CPU)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "device = %d: must be -1 (CPU) or a CUDA ordinal >= 0",
                    (int)options.device);
    if (options.num_threads < 0 || options.num_threads > MAX_THREADS)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "num_threads = %d: must be 0 (default) or 1..%d",
                    (int)options.num_threads, MAX_THREADS);
    if (options.parallel_for && !options.num_threads)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "num_threads = 0: must be given with parallel_for");
    if (!options.alloc != !options.free)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "%s = NULL: alloc and free must be given together",
                    options.alloc ? "free" : "alloc");

    msa_alloc_fn *alloc = options.alloc ? options.alloc : default_alloc;
    msa_context *made = alloc(options.alloc_data, sizeof *made);
    if (!made)
        return fail(MSA_ERROR_OUT_OF_MEMORY, "context: %zu bytes could not be allocated", sizeof *made);
    memset(made, 0, sizeof *made);
    atomic_init(&made->references, 1);
    made->device = options.device;
    made->parallel_for = options.parallel_for;
    made->parallel_for_data = options.parallel_for_data;
    made->alloc = alloc;
    made->free = options.free ? options.free : default_free;
    made->alloc_data = options.alloc_data;
    made->log = options.log;
    made->log_data = options.log_data;

    msa_status status;
    if (options.device == MSA_DEVICE_CPU)
        status = cpu_context_init(made, &options);
    else
#ifdef MSA_WITH_CUDA
        status = cuda_context_init(made, &options);
#else
        status =
            fail(MSA_ERROR_NO_DEVICE, "device = %d: this build of libmsa has no CUDA backend", (int)options.device);
#endif
    if (status) {
        context_free(made, made);
        return status;
    }
    *context = made;
    return MSA_SUCCESS;
}

void msa_context_destroy(msa_context *context)
{
    if (context)
        context_release(context);
}

msa_status msa_context_get_info(const msa_context *context, msa_context_info *info)
{
    if (!context)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "context = NULL: must be a context");
    msa_context_info filled;
    msa_status status = check_struct("info", info, &filled, sizeof filled);
    if (status)
        return status;
    info->device = context->device;
    info->num_threads = context->num_threads;
    info->compute_capability = context->compute_capability;
    info->isa = context->isa_name;
    info->device_name = context->device_name;
    return MSA_SUCCESS;
}

msa_status msa_kernel_get(const msa_context *context, size_t index, msa_kernel_info *info)
{
    msa_kernel_info filled;
    msa_status status = check_struct("info", info, &filled, sizeof filled);
    if (status)
        return status;
    size_t count = cpu_kernel_get(context, index, info);
#ifdef MSA_WITH_CUDA
    count += cuda_kernel_get(context, index - count, info); /* wraps, and so fills nothing, for a kernel of the CPU */
#endif
    return index < count ? MSA_SUCCESS
                         : fail(MSA_ERROR_INVALID_ARGUMENT, "index = %zu: must be less than %zu, the number of kernels",
                                index, count);
}
