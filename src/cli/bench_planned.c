/* SPDX-License-Identifier: MIT
 *
 * bench_planned.c - prefill, decode, index and layer as subjects of a timing.
 *
 * Rotations exchange page tables and lists between calls; preparing with the next ones is part of a call, but not of
 * the time of `run`.
 */
#include "bench.h"
#include "parallel.h"
#include "problem.h"

#include <stdlib.h>
#include <string.h>

struct planned {
    struct execution execution;
    struct device *device;
    int rotations;
    void **tables, **lists; /* [rotations] on the device; lists NULL where the operation is given none */
};

/* One part of a call; its time is added to *seconds. */
static int timed(struct planned *planned, int (*part)(struct execution *x), double *seconds)
{
    double elapsed = 0;
    int status = device_begin(planned->device);
    if (status == CLI_OK)
        status = part(&planned->execution);
    int ended = device_end(planned->device, &elapsed);
    *seconds += elapsed;
    return status != CLI_OK ? status : ended;
}

static int planned_call(struct subject *subject, int rotation, double *run, double *total)
{
    struct planned *planned = subject->self;
    struct execution *x = &planned->execution;
    x->index_step.page_table = x->attention_step.page_table = planned->tables[rotation];
    if (planned->lists)
        x->attention_step.topk = planned->lists[rotation];
    int status = CLI_OK;
    double prepare = 0;
    *run = 0;
    if (x->index_plan) {
        status = timed(planned, execution_index_prepare, &prepare);
        if (status == CLI_OK)
            status = timed(planned, execution_index_run, run);
    }
    if (x->attention_plan && status == CLI_OK) {
        status = timed(planned, execution_attention_prepare, &prepare);
        if (status == CLI_OK)
            status = timed(planned, execution_attention_run, run);
    }
    *total = prepare + *run;
    return status;
}

static int planned_finish(struct subject *subject)
{
    return execution_check_errors(&((struct planned *)subject->self)->execution);
}

static void free_buffers(const struct planned *planned, void **buffers)
{
    for (int r = 0; buffers && r < planned->rotations; r++)
        device_free(planned->device, buffers[r]);
    free(buffers);
}

static void planned_close(struct subject *subject)
{
    struct planned *planned = subject->self;
    execution_close(&planned->execution);
    free_buffers(planned, planned->tables);
    free_buffers(planned, planned->lists);
    free(planned);
}

/* A copy on the device of what `fill` makes for each rotation, in the size of `tensor`. */
static void **make_rotations(const struct planned *planned, const struct workload *workload,
                             const struct tensor *tensor,
                             void (*fill)(const struct workload *workload, int rotation, int32_t *data))
{
    void **buffers = calloc((size_t)planned->rotations, sizeof(*buffers)), *host = malloc(tensor->bytes);
    int status = buffers && host ? CLI_OK : cli_error("out of memory");
    for (int r = 0; status == CLI_OK && r < planned->rotations; r++) {
        fill(workload, r, host);
        buffers[r] = device_alloc(planned->device, tensor->bytes);
        status = buffers[r] ? device_copy_in(planned->device, buffers[r], host, tensor->bytes) : CLI_BAD;
    }
    free(host);
    if (status == CLI_OK)
        return buffers;
    free_buffers(planned, buffers);
    return NULL;
}

/* QK of E4M3 queries is FP8 in `fast` only, PV always; an index has no PV. */
static double fp8_part(const struct problem *problem, bool fast)
{
    if (op_has_attention(problem->op))
        return problem->q_dtype != MSA_E4M3 ? 0 : fast ? 1 : 0.5;
    return problem->index_q_dtype == MSA_E4M3 && fast ? 1 : 0;
}

int planned_open(struct subject *subject, const struct workload *workload, struct device *device,
                 const struct run_options *options)
{
    struct planned *planned = calloc(1, sizeof(*planned));
    if (!planned)
        return cli_error("out of memory");
    planned->device = device;
    planned->rotations = workload->rotations;
    const struct problem *problem = &workload->problem;
    *subject = (struct subject){.name = problem->name,
                                .strategy = "",
                                .precision = "",
                                .flops = workload->flops,
                                .bytes = workload->bytes,
                                .device = device,
                                .rotations = workload->rotations,
                                .call = planned_call,
                                .finish = planned_finish,
                                .close = planned_close,
                                .self = planned};
    struct execution *x = &planned->execution;
    int status = execution_open(x, problem, device, options);
    if (status == CLI_OK && !(planned->tables = make_rotations(planned, workload, problem->page_table, workload_table)))
        status = CLI_BAD;
    if (status == CLI_OK && problem->list &&
        !(planned->lists = make_rotations(planned, workload, problem->list, workload_lists)))
        status = CLI_BAD;
    if (status != CLI_OK) {
        planned_close(subject);
        return status;
    }
    if (x->attention_plan) {
        subject->strategy = x->attention_info.strategy;
        subject->precision = x->attention_info.precision;
    } else {
        subject->precision = x->index_info.precision;
    }
    subject->fp8 = fp8_part(problem, strcmp(subject->precision, "fast") == 0);
    snprintf(subject->kernel, sizeof(subject->kernel), "%s%s%s", x->attention_plan ? x->attention_info.kernel : "",
             x->attention_plan && x->index_plan ? ", " : "", x->index_plan ? x->index_info.kernel : "");
    subject->memory_bound = x->index_plan && !x->attention_plan && x->decode;
    return CLI_OK;
}
