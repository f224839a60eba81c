/* SPDX-License-Identifier: MIT
 *
 * internal.h - what the parts of the library share: contexts, plans, the backend table, status helpers, argument
 * checks.
 *
 * A public call goes: api.c (check the arguments) -> context->backend (cpu/driver_*.c or cuda/driver*) -> kernel.
 */
#ifndef MSA_INTERNAL_H
#define MSA_INTERNAL_H

#include "merge_job.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>

/* ------------------------------------------------------------------------------------------------ status.c */

/* Sets the thread's message and returns the status: `return fail(MSA_ERROR_..., "topk = %d: ...", topk)`. */
msa_status fail(msa_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ------------------------------------------------------------------------------------------------ backends */

/* One table a device type. Arguments arrive checked, with every stride resolved (no MSA_DENSE left; strides of axes of
 * extent <= 1 are 0). The backend fills plan->{kernel, kernels, num_splits, query_tile, strategy, workspace_bytes}. */
struct backend {
    msa_status (*plan)(msa_plan *plan);
    void (*plan_destroy)(msa_plan *plan);
    msa_status (*prepare)(msa_plan *plan, msa_stream stream); /* plan->step */
    msa_status (*index_run)(msa_plan *plan, const msa_index_args *args, msa_stream stream);
    msa_status (*attention_run)(msa_plan *plan, const msa_attention_args *args, msa_stream stream);
    msa_status (*plan_error)(msa_plan *plan, uint32_t *bits, msa_stream stream);
    msa_status (*topk)(msa_context *context, const msa_topk_args *args, msa_stream stream);
    msa_status (*merge)(msa_context *context, const struct merge_job *job, msa_stream stream);
    msa_status (*quantise)(msa_context *context, const msa_quantise_args *args, msa_stream stream);
    msa_status (*convert)(msa_context *context, const msa_convert_args *args, msa_stream stream);
    msa_status (*cache_write)(msa_context *context, const msa_cache_write_args *args, msa_stream stream);
    void *(*device_alloc)(msa_context *context, size_t bytes); /* 256-byte aligned, or NULL */
    void (*device_free)(msa_context *context, void *pointer);
    void (*context_destroy)(msa_context *context);
};

/* Fill context->{backend, backend_data, isa_name, device_name, num_threads, compute_capability}. */
msa_status cpu_context_init(msa_context *context, const msa_context_options *options);
#ifdef MSA_WITH_CUDA
msa_status cuda_context_init(msa_context *context, const msa_context_options *options);
#endif
/* Return the number of kernels of the device type; fill all but info->size if index is less than that. */
size_t cpu_kernel_get(const msa_context *context, size_t index, msa_kernel_info *info);
#ifdef MSA_WITH_CUDA
size_t cuda_kernel_get(const msa_context *context, size_t index, msa_kernel_info *info);
#endif

/* ------------------------------------------------------------------------------------------------ contexts, plans */

enum { MAX_THREADS = 1024 }; /* of a context */

struct msa_context {
    atomic_int references; /* itself, its plans and workspaces */
    const struct backend *backend;
    void *backend_data;
    int32_t device, num_threads, compute_capability;
    const char *isa_name;
    char device_name[96];
    msa_parallel_for_fn *parallel_for;
    void *parallel_for_data;
    msa_alloc_fn *alloc;
    msa_free_fn *free;
    void *alloc_data;
    msa_log_fn *log;
    void *log_data;
};

void context_release(msa_context *context);
void *context_alloc(msa_context *context, size_t bytes); /* zeroed; NULL: out of memory */
void context_free(msa_context *context, void *pointer);

enum plan_operation { PLAN_INDEX_PREFILL, PLAN_INDEX_DECODE, PLAN_PREFILL, PLAN_DECODE };

struct msa_plan {
    msa_context *context;
    enum plan_operation operation;
    msa_index_desc index;         /* of index plans */
    msa_attention_desc attention; /* of attention plans; out_dtype and num_lists resolved */
    int32_t max_batch, max_pages;
    int64_t max_total_q, max_kv_len;
    msa_step step; /* of the last prepare, strides resolved */
    bool prepared;
    atomic_uint error;
    /* Filled by the backend. */
    void *backend_data;
    const char *kernel, *strategy, *precision;
    char kernels[256];
    int32_t num_splits, query_tile;
    size_t workspace_bytes;
};

static inline bool plan_is_index(const msa_plan *plan)
{
    return plan->operation == PLAN_INDEX_PREFILL || plan->operation == PLAN_INDEX_DECODE;
}

const char *plan_operation_name(enum plan_operation operation);
/* Takes a checked description; index or attention is NULL. */
msa_status plan_create(msa_context *context, enum plan_operation operation, const msa_index_desc *index,
                       const msa_attention_desc *attention, msa_plan **plan);

/* ------------------------------------------------------------------------------------------------ check_*.c */

/* Each returns MSA_SUCCESS or a failure with a message; resolved structs are copies with all strides filled in. */
msa_status check_index_desc(const msa_index_desc *desc, msa_index_desc *resolved);
msa_status check_attention_desc(const msa_attention_desc *desc, msa_attention_desc *resolved);
msa_status check_step(const msa_plan *plan, const msa_step *step, msa_step *resolved);
msa_status check_index_args(const msa_plan *plan, const msa_index_args *args, msa_index_args *resolved);
msa_status check_attention_args(const msa_plan *plan, const msa_attention_args *args, msa_attention_args *resolved);
msa_status check_topk_args(const msa_topk_args *args, msa_topk_args *resolved);
msa_status check_combine_args(const msa_combine_args *args, struct merge_job *job);
msa_status check_merge_args(const msa_merge_args *args, struct merge_job *job);
msa_status check_quantise_args(const msa_quantise_args *args, msa_quantise_args *resolved);
msa_status check_convert_args(const msa_convert_args *args, msa_convert_args *resolved);
msa_status check_cache_write_args(const msa_cache_write_args *args, msa_cache_write_args *resolved);
/* Copies the first `expected` bytes of a caller's struct, whose first field is its size. Smaller ones are refused, and
 * larger ones with anything but zeros past those bytes. */
msa_status check_struct(const char *name, const void *from, void *to, size_t expected);

const char *dtype_name(msa_dtype dtype);
size_t dtype_row_bytes(msa_dtype dtype, int64_t elements); /* NVFP4: codes */

#endif
