/* SPDX-License-Identifier: MIT
 *
 * api.c - the exported operations: check the arguments, then one call into the backend. msa.h documents each.
 */
#include "internal.h"

/* ------------------------------------------------------------------------------------------------ plans */

static msa_status plan_target(msa_context *context, msa_plan **plan)
{
    if (!plan)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "plan = NULL: must point to where the plan goes");
    *plan = NULL;
    if (!context)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "context = NULL: must be a context");
    return MSA_SUCCESS;
}

static msa_status plan_index(msa_context *context, enum plan_operation operation, const msa_index_desc *desc,
                             msa_plan **plan)
{
    msa_index_desc resolved;
    msa_status status = plan_target(context, plan);
    if (!status)
        status = check_index_desc(desc, &resolved);
    return status ? status : plan_create(context, operation, &resolved, NULL, plan);
}

static msa_status plan_attention(msa_context *context, enum plan_operation operation, const msa_attention_desc *desc,
                                 msa_plan **plan)
{
    msa_attention_desc resolved;
    msa_status status = plan_target(context, plan);
    if (!status)
        status = check_attention_desc(desc, &resolved);
    return status ? status : plan_create(context, operation, NULL, &resolved, plan);
}

static msa_status plan_is(const msa_plan *plan, enum plan_operation operation)
{
    if (!plan)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "plan = NULL: must be a plan of %s", plan_operation_name(operation));
    if (plan->operation != operation)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "plan = a plan of %s: must be a plan of %s",
                    plan_operation_name(plan->operation), plan_operation_name(operation));
    return MSA_SUCCESS;
}

static msa_status prepare(msa_plan *plan, enum plan_operation operation, const msa_step *step, msa_stream stream)
{
    msa_step resolved;
    msa_status status = plan_is(plan, operation);
    if (!status)
        status = check_step(plan, step, &resolved);
    if (status)
        return status;
    plan->step = resolved;
    status = plan->context->backend->prepare(plan, stream);
    plan->prepared = !status;
    return status;
}

static msa_status run_ready(const msa_plan *plan, enum plan_operation operation)
{
    msa_status status = plan_is(plan, operation);
    if (!status && !plan->prepared)
        status = fail(MSA_ERROR_NOT_PREPARED, "plan = not prepared: %s_prepare must succeed before %s_run",
                      plan_operation_name(operation), plan_operation_name(operation));
    return status;
}

static msa_status run_index(msa_plan *plan, enum plan_operation operation, const msa_index_args *args,
                            msa_stream stream)
{
    msa_index_args resolved;
    msa_status status = run_ready(plan, operation);
    if (!status)
        status = check_index_args(plan, args, &resolved);
    if (status || plan->step.total_q == 0) /* nothing to do, and perhaps no workspace to do it in */
        return status;
    return plan->context->backend->index_run(plan, &resolved, stream);
}

static msa_status run_attention(msa_plan *plan, enum plan_operation operation, const msa_attention_args *args,
                                msa_stream stream)
{
    msa_attention_args resolved;
    msa_status status = run_ready(plan, operation);
    if (!status)
        status = check_attention_args(plan, args, &resolved);
    if (status || plan->step.total_q == 0) /* nothing to do, and perhaps no workspace to do it in */
        return status;
    return plan->context->backend->attention_run(plan, &resolved, stream);
}

#define PLANNED_OPERATION(op, OP, kind)                                                              \
    msa_status msa_##op##_plan(msa_context *context, const msa_##kind##_desc *desc, msa_plan **plan) \
    {                                                                                                \
        return plan_##kind(context, OP, desc, plan);                                                 \
    }                                                                                                \
    msa_status msa_##op##_prepare(msa_plan *plan, const msa_step *step, msa_stream stream)           \
    {                                                                                                \
        return prepare(plan, OP, step, stream);                                                      \
    }                                                                                                \
    msa_status msa_##op##_run(msa_plan *plan, const msa_##kind##_args *args, msa_stream stream)      \
    {                                                                                                \
        return run_##kind(plan, OP, args, stream);                                                   \
    }

PLANNED_OPERATION(index_prefill, PLAN_INDEX_PREFILL, index)
PLANNED_OPERATION(index_decode, PLAN_INDEX_DECODE, index)
PLANNED_OPERATION(prefill, PLAN_PREFILL, attention)
PLANNED_OPERATION(decode, PLAN_DECODE, attention)

/* ------------------------------------------------------------------------------------------------ stateless calls */

#define STATELESS_OPERATION(op, resolved_type, method)                                        \
    msa_status msa_##op(msa_context *context, const msa_##op##_args *args, msa_stream stream) \
    {                                                                                         \
        resolved_type resolved;                                                               \
        if (!context)                                                                         \
            return fail(MSA_ERROR_INVALID_ARGUMENT, "context = NULL: must be a context");     \
        msa_status status = check_##op##_args(args, &resolved);                               \
        return status ? status : context->backend->method(context, &resolved, stream);        \
    }

STATELESS_OPERATION(topk, msa_topk_args, topk)
STATELESS_OPERATION(combine, struct merge_job, merge)
STATELESS_OPERATION(merge, struct merge_job, merge)
STATELESS_OPERATION(quantise, msa_quantise_args, quantise)
STATELESS_OPERATION(convert, msa_convert_args, convert)
STATELESS_OPERATION(cache_write, msa_cache_write_args, cache_write)
