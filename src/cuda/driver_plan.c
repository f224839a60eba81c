/* SPDX-License-Identifier: MIT
 *
 * driver_plan.c - the planned operations on CUDA: kernels and sizes of a plan, the workspace, prepare and run.
 *
 * A plan owns a few words of device memory, its error; everything else lies in the caller's workspace. The workspace
 * is cut by capacities, not by a step's sizes, so that a replayed graph finds everything where it was captured.
 */
#include "driver.h"

#include <string.h>

struct cuda_plan {
    uint32_t *error; /* device, CUDA_ERROR_WORDS */
    bool has_error;  /* a prepare was enqueued, so the words have values */
    union {
        struct {
            const struct cuda_index_kernel *kernel;
            struct cuda_index job;
            float *scores; /* the workspace's; NULL: the caller gives them */
        } index;
        struct {
            const struct cuda_attention_kernel *kernel;
            struct cuda_attention job;
        } attention;
    };
};

static struct cuda_step *step_of(const msa_plan *plan)
{
    struct cuda_plan *own = plan->backend_data;
    return plan_is_index(plan) ? &own->index.job.step : &own->attention.job.step;
}

/* ------------------------------------------------------------------------------------------------ workspace */

/* The next `bytes` of a workspace. With base NULL it only counts. */
static void *take(char *base, size_t *used, size_t bytes)
{
    void *taken = base ? base + *used : NULL;
    *used += (bytes + 255) & ~(size_t)255;
    return taken;
}

/* Cuts the workspace at base into the plan's arrays; returns its size. */
static size_t cut_workspace(const msa_plan *plan, char *base)
{
    struct cuda_plan *own = plan->backend_data;
    struct cuda_step *step = step_of(plan);
    size_t used = 0, rows = (size_t)plan->max_total_q, batch = (size_t)plan->max_batch;
    step->requests = take(base, &used, batch * sizeof *step->requests);
    step->row_end = take(base, &used, batch * sizeof *step->row_end);
    step->rows = take(base, &used, rows * sizeof *step->rows);
    if (step->query_tile) {
        size_t tiles = rows / (size_t)step->query_tile + batch;
        step->first_tile = take(base, &used, (batch + 1) * sizeof *step->first_tile);
        step->tiles = take(base, &used, tiles * sizeof *step->tiles);
        if (step->num_parts) {
            step->parts = take(base, &used, (size_t)step->num_parts * sizeof *step->parts);
            step->before = take(base, &used, tiles * sizeof *step->before);
        } else if (plan_is_index(plan) && !own->index.kernel->prepare)
            step->first_step = take(base, &used, (tiles + 1) * sizeof *step->first_step);
    }
    if (!plan_is_index(plan)) {
        step->pages = take(base, &used, (size_t)step->lists * rows * (size_t)step->topk * sizeof *step->pages);
        own->attention.job.memory = take(base, &used, own->attention.job.memory_bytes);
    } else {
        own->index.job.memory = take(base, &used, own->index.job.memory_bytes);
        if (!(plan->index.outputs & MSA_INDEX_SCORES))
            own->index.scores =
                take(base, &used, (size_t)plan->index.num_index_heads * rows * (size_t)plan->max_pages * sizeof(float));
    }
    return used;
}

/* ------------------------------------------------------------------------------------------------ plans */

static void plan_index(msa_plan *plan, const struct cuda_device *device)
{
    struct cuda_plan *own = plan->backend_data;
    const msa_index_desc *desc = &plan->index;
    enum cuda_index_format format = desc->k_dtype == MSA_BF16   ? INDEX_BF16
                                    : desc->k_dtype == MSA_E4M3 ? INDEX_E4M3
                                                                : INDEX_NVFP4;
    own->index.job =
        (struct cuda_index){.desc = *desc, .num_sms = device->num_sms, .encode_tensor = device->encode_tensor};
    bool decode = plan->operation == PLAN_INDEX_DECODE;
    const struct cuda_index_kernel *kernel =
        (decode ? device->kernels.index_decode : device->kernels.index_prefill)[format];
    kernel->plan(&own->index.job);
    own->index.kernel = kernel;
    plan->kernel = cuda_kernel_name(kernel);
    snprintf(plan->kernels, sizeof plan->kernels, "%s, %s%s%s", plan->kernel, cuda_kernel_name(device->kernels.prepare),
             desc->outputs & MSA_INDEX_SELECTION ? ", " : "",
             desc->outputs & MSA_INDEX_SELECTION ? cuda_kernel_name(device->kernels.topk) : "");
    plan->strategy = "query-major";
    bool fast = kernel->fast && desc->k_dtype != MSA_BF16 && desc->precision == MSA_PRECISION_FAST;
    plan->precision = fast ? "fast" : "exact";
}

static msa_status plan_attention(msa_plan *plan, const struct cuda_device *device)
{
    struct cuda_plan *own = plan->backend_data;
    const msa_attention_desc *desc = &plan->attention;
    bool decode = plan->operation == PLAN_DECODE;
    enum cuda_query query = desc->q_dtype == MSA_E4M3   ? QUERY_E4M3
                            : desc->q_dtype == MSA_BF16 ? QUERY_BF16
                                                        : QUERY_FP16;
    enum cuda_kv kv = desc->kv_dtype == MSA_E4M3 ? KV_E4M3 : desc->kv_dtype == MSA_NVFP4 ? KV_NVFP4 : KV_HALF;
    const struct cuda_attention_kernel *kernel = (decode ? device->kernels.decode : device->kernels.prefill)[query][kv];
    struct cuda_attention *job = &own->attention.job;
    *job = (struct cuda_attention){.desc = *desc,
                                   .ratio = desc->num_q_heads / desc->num_kv_heads,
                                   .num_sms = device->num_sms,
                                   .decode = decode,
                                   .dependent_launch = plan->context->compute_capability >= 90,
                                   .kernel = kernel,
                                   .num_splits = 1,
                                   .pages_per_split = desc->topk,
                                   .strategy = "query-major",
                                   .precision = MSA_PRECISION_EXACT,
                                   .merge = device->kernels.merge,
                                   .encode_tensor = device->encode_tensor};
    job->step.lists = desc->num_lists;
    job->step.topk = desc->topk;
    if (!kernel->plan(job))
        return fail(MSA_ERROR_UNSUPPORTED, "strategy = %s: %s has another one only",
                    desc->strategy == MSA_STRATEGY_PAGE_MAJOR ? "page-major" : "query-major", cuda_kernel_name(kernel));
    own->attention.kernel = job->kernel;
    plan->kernel = cuda_kernel_name(job->kernel);
    bool merges =
        (job->num_splits > 1 || strcmp(job->strategy, "query-major") != 0) && !desc->partials && !job->merges_itself;
    snprintf(plan->kernels, sizeof plan->kernels, "%s, %s%s%s", plan->kernel, cuda_kernel_name(device->kernels.prepare),
             merges ? ", " : "", merges ? cuda_kernel_name(device->kernels.merge) : "");
    plan->strategy = job->strategy;
    plan->precision = job->precision == MSA_PRECISION_FAST ? "fast" : "exact";
    plan->num_splits = job->num_splits;
    return MSA_SUCCESS;
}

msa_status cuda_plan_init(msa_plan *plan)
{
    const struct cuda_device *device = cuda_device_of(plan->context);
    struct cuda_plan *own = context_alloc(plan->context, sizeof *own);
    if (!own)
        return fail(MSA_ERROR_OUT_OF_MEMORY, "plan: %zu bytes could not be allocated", sizeof *own);
    plan->backend_data = own;
    msa_status status = MSA_SUCCESS;
    if (plan_is_index(plan))
        plan_index(plan, device);
    else
        status = plan_attention(plan, device);
    if (status)
        return status;
    struct cuda_step *step = step_of(plan);
    step->dependent_launch = plan->context->compute_capability >= 90;
    step->max_pages = plan->max_pages;
    step->max_kv_len = (int32_t)plan->max_kv_len;
    plan->query_tile = step->query_tile ? step->query_tile : 1;
    plan->workspace_bytes = cut_workspace(plan, NULL);
    status = cuda_enter(plan->context);
    return status ? status
                  : cuda_leave(plan->context, "plan",
                               cudaMalloc((void **)&own->error, CUDA_ERROR_WORDS * sizeof *own->error));
}

void cuda_plan_destroy(msa_plan *plan)
{
    struct cuda_plan *own = plan->backend_data;
    if (own && own->error && !cuda_enter(plan->context))
        cuda_leave(plan->context, "plan", cudaFree(own->error));
    context_free(plan->context, own);
}

msa_status cuda_plan_error(msa_plan *plan, uint32_t *bits, msa_stream stream)
{
    const struct cuda_plan *own = plan->backend_data;
    *bits = 0;
    msa_status status = cuda_enter(plan->context);
    if (status)
        return status;
    uint32_t words[CUDA_ERROR_WORDS] = {0};
    cudaError_t error = cudaSuccess;
    if (own->has_error)
        error = cudaMemcpyAsync(words, own->error, sizeof words, cudaMemcpyDeviceToHost, stream);
    if (!error)
        error = cudaStreamSynchronize(stream);
    for (int i = 0; i < CUDA_ERROR_WORDS; i++)
        *bits |= words[i];
    return cuda_leave(plan->context, "plan error word", error);
}

/* ------------------------------------------------------------------------------------------------ prepare, run */

msa_status cuda_prepare(msa_plan *plan, msa_stream stream)
{
    struct cuda_plan *own = plan->backend_data;
    struct cuda_step *step = step_of(plan);
    const msa_step *given = &plan->step;
    step->batch = given->batch;
    step->total_q = (int32_t)given->total_q;
    if (plan_is_index(plan) && own->index.kernel->begin)
        own->index.kernel->begin(&own->index.job);
    cut_workspace(plan, given->workspace);
    step->cu_seqlens_q = given->cu_seqlens_q;
    step->kv_lens = given->kv_lens;
    step->cu_seqlens_k = given->cu_seqlens_k;
    step->page_table = given->page_table;
    step->page_table_stride = given->page_table_stride;
    step->list = given->topk;
    step->list_head_stride = given->topk_head_stride;
    step->list_row_stride = given->topk_row_stride;
    step->error = own->error;
    if (step->query_tile) { /* a tile has at least one row */
        int64_t tiles = given->total_q / step->query_tile + given->batch;
        step->num_tiles = (int32_t)(tiles < given->total_q ? tiles : given->total_q);
    }
    msa_status status = cuda_enter(plan->context);
    if (status)
        return status;
    cudaError_t error;
    if (step->total_q == 0) {
        error = cudaMemsetAsync(own->error, 0, CUDA_ERROR_WORDS * sizeof *own->error, stream);
    } else {
        error = cuda_device_of(plan->context)->kernels.prepare(step, stream);
        if (!error && plan_is_index(plan) && own->index.kernel->prepare)
            error = own->index.kernel->prepare(&own->index.job, stream);
        if (!error && !plan_is_index(plan) && own->attention.kernel->prepare)
            error = own->attention.kernel->prepare(&own->attention.job, stream);
    }
    own->has_error |= !error;
    return cuda_leave(plan->context, "prepare", error);
}

/* Ranks the scores of the run before it on the stream. */
static cudaError_t select_pages(const msa_plan *plan, const struct cuda_index *job, msa_stream stream)
{
    const msa_index_desc *desc = &plan->index;
    struct cuda_topk topk = {
        .args = {.scores = job->args.scores,
                 .scores_head_stride = job->args.scores_head_stride,
                 .scores_row_stride = job->args.scores_row_stride,
                 .num_heads = desc->num_index_heads,
                 .rows = job->step.total_q,
                 .columns = plan->max_pages,
                 .k = desc->topk,
                 .init_pages = desc->init_pages,
                 .local_pages = desc->local_pages,
                 .order = desc->topk_order,
                 .topk = job->args.topk,
                 .topk_head_stride = job->args.topk_head_stride,
                 .topk_row_stride = job->args.topk_row_stride},
        .rows = job->step.rows,
        .num_valid_pages = job->args.num_valid_pages,
        .after_kernel = job->step.dependent_launch,
    };
    return cuda_device_of(plan->context)->kernels.topk(&topk, stream);
}

msa_status cuda_index_run(msa_plan *plan, const msa_index_args *args, msa_stream stream)
{
    struct cuda_plan *own = plan->backend_data;
    struct cuda_index *job = &own->index.job;
    if (job->step.total_q == 0)
        return MSA_SUCCESS;
    job->args = *args;
    if (own->index.scores) {
        job->args.scores = own->index.scores;
        job->args.scores_row_stride = (int64_t)plan->max_pages * 4;
        job->args.scores_head_stride = job->args.scores_row_stride * plan->max_total_q;
    }
    msa_status status = cuda_enter(plan->context);
    if (status)
        return status;
    cudaError_t error = own->index.kernel->run(job, stream);
    if (!error && plan->index.outputs & MSA_INDEX_SELECTION)
        error = select_pages(plan, job, stream);
    return cuda_leave(plan->context, plan->kernel, error);
}

msa_status cuda_attention_run(msa_plan *plan, const msa_attention_args *args, msa_stream stream)
{
    struct cuda_plan *own = plan->backend_data;
    struct cuda_attention *job = &own->attention.job;
    if (job->step.total_q == 0)
        return MSA_SUCCESS;
    job->args = *args;
    if (plan->attention.partials)
        job->result = (struct cuda_result){.dtype = plan->attention.out_dtype,
                                           .out = args->o_partial,
                                           .out_split_stride = args->o_partial_split_stride,
                                           .out_row_stride = args->o_partial_row_stride,
                                           .out_head_stride = args->o_partial_head_stride,
                                           .lse = args->lse_partial,
                                           .lse_split_stride = args->lse_partial_split_stride,
                                           .lse_row_stride = args->lse_partial_row_stride,
                                           .lse_head_stride = args->lse_partial_head_stride,
                                           .counts = args->split_counts,
                                           .counts_row_stride = args->split_counts_row_stride,
                                           .counts_head_stride = args->split_counts_head_stride};
    else
        job->result = (struct cuda_result){.dtype = plan->attention.out_dtype,
                                           .out = args->out,
                                           .out_row_stride = args->out_row_stride,
                                           .out_head_stride = args->out_head_stride,
                                           .lse = args->lse,
                                           .lse_row_stride = args->lse_row_stride,
                                           .lse_head_stride = args->lse_head_stride};
    msa_status status = cuda_enter(plan->context);
    return status ? status : cuda_leave(plan->context, plan->kernel, own->attention.kernel->run(job, stream));
}
