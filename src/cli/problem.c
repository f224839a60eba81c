/* SPDX-License-Identifier: MIT
 *
 * problem.c - runs a problem through the public API.
 */
#include "problem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)             \
    do {                      \
        if ((call) != CLI_OK) \
            return CLI_BAD;   \
    } while (0)

/* ---- buffers */

static void *add_buffer(struct execution *x, const struct tensor *source, size_t bytes)
{
    void *data = device_alloc(x->device, bytes);
    if (data) {
        x->buffers[x->num_buffers].source = source;
        x->buffers[x->num_buffers++].data = data;
    }
    return data;
}

static void *find_copy(const struct execution *x, const struct tensor *tensor)
{
    for (int i = 0; i < x->num_buffers; i++) {
        if (x->buffers[i].source == tensor)
            return x->buffers[i].data;
    }
    bool shared = x->inputs && tensor != x->problem->q && tensor != x->problem->index_q;
    return shared ? find_copy(x->inputs, tensor) : NULL;
}

/* Where the device finds an input: the tensor's own memory, or one copy of it. NULL tensors give NULL. */
static int bind_input(struct execution *x, const struct tensor *tensor, const void **data)
{
    *data = NULL;
    if (!tensor)
        return CLI_OK;
    if (device_is_host(x->device)) {
        *data = tensor->data;
        return CLI_OK;
    }
    if ((*data = find_copy(x, tensor)))
        return CLI_OK;
    void *copy = add_buffer(x, tensor, tensor->bytes);
    if (!copy)
        return CLI_BAD;
    *data = copy;
    return device_copy_in(x->device, copy, tensor->data, tensor->bytes);
}

static int bind_view(struct execution *x, const struct view *view, const void **data, int64_t *page_stride,
                     int64_t *head_stride, int64_t *token_stride)
{
    TRY(bind_input(x, view->tensor, data));
    if (*data) {
        *data = (const char *)*data + view->offset;
        *page_stride = view->page_stride;
        if (head_stride)
            *head_stride = view->head_stride;
        *token_stride = view->token_stride;
    }
    return CLI_OK;
}

static int bind_factor(struct execution *x, const struct tensor *tensor, const float **data, int64_t *stride)
{
    const void *pointer;
    TRY(bind_input(x, tensor, &pointer));
    *data = pointer;
    if (stride && tensor)
        *stride = tensor->shape[0] == 1 ? 0 : 4;
    return CLI_OK;
}

static void *add_output(struct execution *x, size_t bytes)
{
    void *data = add_buffer(x, NULL, bytes);
    return data && device_fill(x->device, data, x->output_byte, bytes) == CLI_OK ? data : NULL;
}

/* ---- plans */

static int64_t at_least_1(int64_t capacity)
{
    return capacity > 1 ? capacity : 1;
}

static int plan_index(struct execution *x, const struct run_options *options)
{
    const struct problem *problem = x->problem;
    msa_index_desc desc = MSA_INDEX_DESC_INIT;
    desc.q_dtype = problem->index_q_dtype;
    desc.k_dtype = problem->index_k_dtype;
    desc.num_index_heads = problem->num_index_heads;
    desc.topk = problem->topk;
    desc.init_pages = problem->init_pages;
    desc.local_pages = problem->local_pages;
    desc.topk_order = problem->topk_order;
    desc.precision = options->precision;
    desc.outputs = problem->index_outputs;
    desc.max_batch = (int32_t)at_least_1(problem->batch);
    desc.max_total_q = at_least_1(problem->total_q);
    desc.max_kv_len = x->table_width * MSA_PAGE_SIZE;
    msa_context *context = x->device->context;
    if ((x->decode ? msa_index_decode_plan(context, &desc, &x->index_plan)
                   : msa_index_prefill_plan(context, &desc, &x->index_plan)) != MSA_SUCCESS ||
        msa_plan_get_info(x->index_plan, &x->index_info) != MSA_SUCCESS)
        return cli_error("%s: index: %s", problem->name, msa_last_error()); /* whose q and k: a layer has two */
    return CLI_OK;
}

static int plan_attention(struct execution *x, const struct run_options *options)
{
    const struct problem *problem = x->problem;
    msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
    desc.q_dtype = problem->q_dtype;
    desc.kv_dtype = problem->kv_dtype;
    desc.out_dtype = problem->out_dtype;
    desc.num_q_heads = problem->num_q_heads;
    desc.num_kv_heads = problem->num_kv_heads;
    desc.num_lists = problem->op == OP_LAYER ? problem->num_index_heads : problem->num_kv_heads;
    desc.topk = problem->topk;
    desc.sm_scale = problem->sm_scale;
    desc.precision = options->precision;
    desc.strategy = options->strategy;
    desc.v_scale_order = problem->v_scale_order;
    desc.max_batch = (int32_t)at_least_1(problem->batch);
    desc.max_total_q = at_least_1(problem->total_q);
    desc.max_kv_len = x->table_width * MSA_PAGE_SIZE;
    msa_context *context = x->device->context;
    if ((x->decode ? msa_decode_plan(context, &desc, &x->attention_plan)
                   : msa_prefill_plan(context, &desc, &x->attention_plan)) != MSA_SUCCESS ||
        msa_plan_get_info(x->attention_plan, &x->attention_info) != MSA_SUCCESS)
        return cli_library_error(problem->name);
    return CLI_OK;
}

/* ---- arguments */

static int bind_step(struct execution *x, const msa_plan *plan, msa_step *step)
{
    const struct problem *problem = x->problem;
    const void *rows, *keys, *ends, *table;
    TRY(bind_input(x, problem->cu_seqlens_q, &rows));
    TRY(bind_input(x, problem->kv_lens, &keys));
    TRY(bind_input(x, problem->cu_seqlens_k, &ends));
    TRY(bind_input(x, problem->page_table, &table));
    if (problem->max_pages == 0) { /* plans hold a page at least: give each request one that is in no cache */
        size_t bytes = (size_t)problem->batch * sizeof(int32_t);
        void *nowhere = add_buffer(x, NULL, bytes);
        TRY(nowhere ? device_fill(x->device, nowhere, 0xFF, bytes) : CLI_BAD);
        table = nowhere;
    }
    size_t workspace_bytes = msa_plan_workspace(plan);
    void *workspace = add_buffer(x, NULL, workspace_bytes);
    if (!workspace)
        return CLI_BAD;
    *step = (msa_step)MSA_STEP_INIT;
    step->batch = problem->batch;
    step->total_q = problem->total_q;
    step->cu_seqlens_q = rows;
    step->kv_lens = keys;
    step->cu_seqlens_k = ends;
    step->page_table = table;
    step->workspace = workspace;
    step->workspace_bytes = workspace_bytes;
    return CLI_OK;
}

static int bind_index(struct execution *x)
{
    const struct problem *problem = x->problem;
    msa_index_args *args = &x->index_args;
    size_t rows = (size_t)problem->num_index_heads * (size_t)problem->total_q;
    *args = (msa_index_args)MSA_INDEX_ARGS_INIT;
    TRY(bind_step(x, x->index_plan, &x->index_step));
    TRY(bind_input(x, problem->index_q, &args->index_q));
    TRY(bind_view(x, &problem->index_k, &args->index_k, &args->index_k_page_stride, NULL, &args->index_k_token_stride));
    TRY(bind_view(x, &problem->index_k_scale, &args->index_k_scale, &args->index_k_scale_page_stride, NULL,
                  &args->index_k_scale_token_stride));
    args->num_pages = problem->num_index_pages;
    if (problem->index_outputs & MSA_INDEX_SCORES) {
        args->scores = add_output(x, rows * (size_t)x->table_width * sizeof(float));
        if (!args->scores)
            return CLI_BAD;
    }
    if (problem->index_outputs & MSA_INDEX_SELECTION) {
        args->topk = add_output(x, rows * (size_t)problem->topk * sizeof(int32_t));
        args->num_valid_pages = add_output(x, (size_t)problem->total_q * sizeof(int32_t));
        if (!args->topk || !args->num_valid_pages)
            return CLI_BAD;
    }
    return CLI_OK;
}

static int bind_attention(struct execution *x)
{
    const struct problem *problem = x->problem;
    msa_attention_args *args = &x->attention_args;
    size_t rows = (size_t)problem->total_q * (size_t)problem->num_q_heads;
    const void *list;
    *args = (msa_attention_args)MSA_ATTENTION_ARGS_INIT;
    TRY(bind_step(x, x->attention_plan, &x->attention_step));
    TRY(bind_input(x, problem->list, &list));
    x->attention_step.topk = problem->op == OP_LAYER ? x->index_args.topk : list;
    TRY(bind_input(x, problem->q, &args->q));
    TRY(bind_view(x, &problem->k, &args->k, &args->k_page_stride, &args->k_head_stride, &args->k_token_stride));
    TRY(bind_view(x, &problem->v, &args->v, &args->v_page_stride, &args->v_head_stride, &args->v_token_stride));
    TRY(bind_view(x, &problem->k_scale, &args->k_scale, &args->k_scale_page_stride, &args->k_scale_head_stride,
                  &args->k_scale_token_stride));
    TRY(bind_view(x, &problem->v_scale, &args->v_scale, &args->v_scale_page_stride, &args->v_scale_head_stride,
                  &args->v_scale_token_stride));
    args->num_pages = problem->num_pages;
    TRY(bind_factor(x, problem->q_descale, &args->q_descale, &args->q_descale_stride));
    TRY(bind_factor(x, problem->k_descale, &args->k_descale, &args->k_descale_stride));
    TRY(bind_factor(x, problem->v_descale, &args->v_descale, &args->v_descale_stride));
    TRY(bind_factor(x, problem->k_global_scale, &args->k_global_scale, NULL));
    TRY(bind_factor(x, problem->v_global_scale, &args->v_global_scale, NULL));
    args->out = add_output(x, rows * MSA_HEAD_DIM * 2);
    args->lse = add_output(x, rows * sizeof(float));
    return args->out && args->lse ? CLI_OK : CLI_BAD;
}

/* ---- execution */

static int open_execution(struct execution *x, const struct problem *problem, const struct device *device,
                          const struct run_options *options, const struct execution *inputs)
{
    *x = (struct execution){
        .problem = problem,
        .device = device,
        .decode = options->plan == PLAN_BY_OP ? problem->op == OP_DECODE : options->plan == PLAN_DECODE,
        .table_width = at_least_1(problem->max_pages),
        .output_byte = options->poison < 0 ? 0xFF : options->poison,
        .index_info = MSA_PLAN_INFO_INIT,
        .attention_info = MSA_PLAN_INFO_INIT,
        .inputs = inputs,
    };
    int status = CLI_OK;
    /* All plans come first: they refuse shapes before memory is taken for them. */
    if (op_has_index(problem->op))
        status = plan_index(x, options);
    if (status == CLI_OK && op_has_attention(problem->op))
        status = plan_attention(x, options);
    if (status == CLI_OK && x->index_plan)
        status = bind_index(x);
    if (status == CLI_OK && x->attention_plan)
        status = bind_attention(x);
    if (status != CLI_OK)
        execution_close(x);
    return status;
}

int execution_open(struct execution *x, const struct problem *problem, const struct device *device,
                   const struct run_options *options)
{
    return open_execution(x, problem, device, options, NULL);
}

int execution_open_beside(struct execution *x, const struct execution *first, const struct run_options *options)
{
    return open_execution(x, first->problem, first->device, options, first);
}

void execution_close(struct execution *x)
{
    msa_plan_destroy(x->index_plan);
    msa_plan_destroy(x->attention_plan);
    for (int i = 0; i < x->num_buffers; i++)
        device_free(x->device, x->buffers[i].data);
    *x = (struct execution){0};
}

static int library_status(const struct execution *x, msa_status status)
{
    return status == MSA_SUCCESS ? CLI_OK : cli_library_error(x->problem->name);
}

int execution_index_prepare(struct execution *x)
{
    return library_status(x, x->decode ? msa_index_decode_prepare(x->index_plan, &x->index_step, x->device->stream)
                                       : msa_index_prefill_prepare(x->index_plan, &x->index_step, x->device->stream));
}

int execution_index_run(struct execution *x)
{
    return library_status(x, x->decode ? msa_index_decode_run(x->index_plan, &x->index_args, x->device->stream)
                                       : msa_index_prefill_run(x->index_plan, &x->index_args, x->device->stream));
}

int execution_attention_prepare(struct execution *x)
{
    return library_status(x, x->decode ? msa_decode_prepare(x->attention_plan, &x->attention_step, x->device->stream)
                                       : msa_prefill_prepare(x->attention_plan, &x->attention_step, x->device->stream));
}

int execution_attention_run(struct execution *x)
{
    return library_status(x, x->decode ? msa_decode_run(x->attention_plan, &x->attention_args, x->device->stream)
                                       : msa_prefill_run(x->attention_plan, &x->attention_args, x->device->stream));
}

int execution_check_errors(struct execution *x)
{
    static const struct {
        uint32_t bit;
        const char *meaning;
    } meanings[] = {
        {MSA_ERROR_BIT_LIST_ID, "topk holds an id outside [-1, max_pages)"},
        {MSA_ERROR_BIT_PAGE_ID, "page_table names a page outside the cache"},
        {MSA_ERROR_BIT_LENGTHS,
         "cu_seqlens_q, kv_lens or cu_seqlens_k is negative, not ascending or past the rows of q, or does not start at "
         "0"},
        {MSA_ERROR_BIT_CAPACITY, "a kv length is above 128 * the width of page_table"},
    };
    uint32_t index_bits = 0, attention_bits = 0;
    if (x->index_plan)
        TRY(library_status(x, msa_plan_error(x->index_plan, &index_bits, x->device->stream)));
    if (x->attention_plan)
        TRY(library_status(x, msa_plan_error(x->attention_plan, &attention_bits, x->device->stream)));
    uint32_t bits = index_bits | attention_bits;
    if (!bits)
        return CLI_OK;
    char text[512] = "";
    for (size_t i = 0; i < sizeof(meanings) / sizeof(meanings[0]); i++) {
        size_t used = strlen(text);
        if (bits & meanings[i].bit)
            snprintf(text + used, sizeof(text) - used, "%s%s (error bit %u)", used ? "; " : "", meanings[i].meaning,
                     meanings[i].bit);
    }
    return cli_error("%s: %s", x->problem->name, text);
}
