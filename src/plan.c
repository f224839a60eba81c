/* SPDX-License-Identifier: MIT
 *
 * plan.c - plans: what does not depend on the device. The backend picks kernels and sizes.
 */
#include "internal.h"

const char *plan_operation_name(enum plan_operation operation)
{
    static const char *const names[] = {"index_prefill", "index_decode", "prefill", "decode"};
    return names[operation];
}

msa_status plan_create(msa_context *context, enum plan_operation operation, const msa_index_desc *index,
                       const msa_attention_desc *attention, msa_plan **plan)
{
    msa_plan *made = context_alloc(context, sizeof *made);
    if (!made)
        return fail(MSA_ERROR_OUT_OF_MEMORY, "plan: %zu bytes could not be allocated", sizeof *made);
    made->context = context;
    made->operation = operation;
    if (index) {
        made->index = *index;
        made->max_batch = index->max_batch;
        made->max_total_q = index->max_total_q;
        made->max_kv_len = index->max_kv_len;
    } else {
        made->attention = *attention;
        made->max_batch = attention->max_batch;
        made->max_total_q = attention->max_total_q;
        made->max_kv_len = attention->max_kv_len;
    }
    made->max_pages = (int32_t)((made->max_kv_len + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE);
    atomic_init(&made->error, 0);
    made->num_splits = 1;
    atomic_fetch_add_explicit(&context->references, 1, memory_order_relaxed);
    msa_status status = context->backend->plan(made);
    if (status) {
        msa_plan_destroy(made);
        return status;
    }
    if (context->log) {
        char line[384];
        snprintf(line, sizeof line, "%s plan: kernels %s, strategy %s, %d splits, workspace %zu bytes",
                 plan_operation_name(operation), made->kernels, made->strategy, (int)made->num_splits,
                 made->workspace_bytes);
        context->log(context->log_data, line);
    }
    *plan = made;
    return MSA_SUCCESS;
}

void msa_plan_destroy(msa_plan *plan)
{
    if (!plan)
        return;
    msa_context *context = plan->context;
    context->backend->plan_destroy(plan);
    context_free(context, plan);
    context_release(context);
}

size_t msa_plan_workspace(const msa_plan *plan)
{
    return plan ? plan->workspace_bytes : 0;
}

msa_status msa_plan_get_info(const msa_plan *plan, msa_plan_info *info)
{
    if (!plan)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "plan = NULL: must be a plan");
    msa_plan_info filled;
    msa_status status = check_struct("info", info, &filled, sizeof filled);
    if (status)
        return status;
    info->operation = plan_operation_name(plan->operation);
    info->kernel = plan->kernel;
    info->kernels = plan->kernels;
    info->strategy = plan->strategy;
    info->precision = plan->precision;
    info->num_splits = plan->num_splits;
    info->query_tile = plan->query_tile;
    info->max_pages = plan->max_pages;
    info->workspace_bytes = plan->workspace_bytes;
    return MSA_SUCCESS;
}

msa_status msa_plan_error(msa_plan *plan, uint32_t *bits, msa_stream stream)
{
    if (!plan)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "plan = NULL: must be a plan");
    if (!bits)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "bits = NULL: must point to where the error word goes");
    return plan->context->backend->plan_error(plan, bits, stream);
}
