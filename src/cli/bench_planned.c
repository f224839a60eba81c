/* SPDX-License-Identifier: MIT
 *
 * bench_planned.c - prefill, decode, index and layer as subjects of a timing.
 *
 * On a CPU a call takes the next rotation's page table and lists; preparing with them is part of a call, but not of the
 * time of `run`. On a CUDA device every rotation has plans, workspaces, queries and outputs of its own, and a call is one
 * replay each of graphs that hold all rotations' work, one after the other: of `prepare`, of `run`, and of both. Its
 * times are those of a rotation, as in a step of a model, whose graph holds many such calls.
 */
#include "bench.h"
#include "parallel.h"
#include "problem.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_SETS = 512 };
#define MAX_SET_BYTES ((size_t)16 << 30) /* workspaces of all sets */
#define MIN_GRAPH_SECONDS 0.5e-3         /* beside which the events at its ends cost nothing */

struct planned {
    struct device *device;
    struct execution *sets;
    int num_sets; /* CUDA: the rotations; CPU: 1 */
    int repeats;  /* of all sets, in a graph */
    int rotations;
    void **tables, **lists; /* [rotations] on the device; lists NULL where the operation is given none */
};

/* A part of the work of all sets; its time, a set, is added to *seconds. */
static int timed(struct planned *planned, int (*part)(struct execution *x), double *seconds)
{
    double elapsed = 0;
    int count = planned->repeats * planned->num_sets, status = device_begin(planned->device);
    for (int i = 0; i < count && status == CLI_OK; i++)
        status = part(&planned->sets[i % planned->num_sets]);
    int ended = device_end(planned->device, &elapsed);
    *seconds += elapsed / count;
    if (!device_is_host(planned->device) && elapsed < MIN_GRAPH_SECONDS)
        planned->repeats *= 2; /* from the next graph on */
    return status != CLI_OK ? status : ended;
}

static int all_parts(struct execution *x)
{
    int status = CLI_OK;
    if (x->index_plan) {
        status = execution_index_prepare(x);
        status = status == CLI_OK ? execution_index_run(x) : status;
    }
    if (x->attention_plan && status == CLI_OK) {
        status = execution_attention_prepare(x);
        status = status == CLI_OK ? execution_attention_run(x) : status;
    }
    return status;
}

static void rotate(const struct planned *planned, struct execution *x, int rotation)
{
    x->index_step.page_table = x->attention_step.page_table = planned->tables[rotation];
    if (planned->lists)
        x->attention_step.topk = planned->lists[rotation];
}

static int planned_call(struct subject *subject, int rotation, double *run, double *total)
{
    struct planned *planned = subject->self;
    bool host = device_is_host(planned->device);
    if (host)
        rotate(planned, &planned->sets[0], rotation);
    const struct execution *x = &planned->sets[0];
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
    *total = host ? prepare + *run : 0;
    return host || status != CLI_OK ? status : timed(planned, all_parts, total);
}

static int planned_finish(struct subject *subject)
{
    struct planned *planned = subject->self;
    int status = CLI_OK;
    for (int s = 0; s < planned->num_sets && status == CLI_OK; s++)
        status = execution_check_errors(&planned->sets[s]);
    return status;
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
    for (int s = planned->num_sets - 1; s >= 0; s--)
        execution_close(&planned->sets[s]);
    free(planned->sets);
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

/* CUDA: a set a rotation, as far as memory goes. */
static int open_sets(struct planned *planned, const struct problem *problem, const struct run_options *options)
{
    planned->sets = calloc(MAX_SETS, sizeof(*planned->sets));
    if (!planned->sets)
        return cli_error("out of memory");
    if (execution_open(&planned->sets[0], problem, planned->device, options) != CLI_OK)
        return CLI_BAD;
    planned->num_sets = 1;
    if (device_is_host(planned->device))
        return CLI_OK;
    const struct execution *first = &planned->sets[0];
    size_t bytes = first->index_step.workspace_bytes + first->attention_step.workspace_bytes;
    int most = bytes > MAX_SET_BYTES / MAX_SETS ? (int)(MAX_SET_BYTES / bytes) : MAX_SETS;
    planned->rotations = planned->rotations < most ? planned->rotations : most > 1 ? most : 1;
    for (; planned->num_sets < planned->rotations; planned->num_sets++) {
        if (execution_open_beside(&planned->sets[planned->num_sets], first, options) != CLI_OK)
            return CLI_BAD;
    }
    return CLI_OK;
}

int planned_open(struct subject *subject, const struct workload *workload, struct device *device,
                 const struct run_options *options)
{
    struct planned *planned = calloc(1, sizeof(*planned));
    if (!planned)
        return cli_error("out of memory");
    planned->device = device;
    planned->rotations = workload->rotations;
    planned->repeats = 1;
    const struct problem *problem = &workload->problem;
    *subject = (struct subject){.name = problem->name,
                                .strategy = "",
                                .precision = "",
                                .flops = workload->flops,
                                .bytes = workload->bytes,
                                .device = device,
                                .call = planned_call,
                                .finish = planned_finish,
                                .close = planned_close,
                                .self = planned};
    int status = open_sets(planned, problem, options);
    if (status == CLI_OK && !(planned->tables = make_rotations(planned, workload, problem->page_table, workload_table)))
        status = CLI_BAD;
    if (status == CLI_OK && problem->list &&
        !(planned->lists = make_rotations(planned, workload, problem->list, workload_lists)))
        status = CLI_BAD;
    if (status != CLI_OK) {
        planned_close(subject);
        return status;
    }
    bool host = device_is_host(device);
    for (int s = 0; s < planned->num_sets && !host; s++)
        rotate(planned, &planned->sets[s], s);
    subject->rotations = host ? planned->rotations : 1;
    const struct execution *x = &planned->sets[0];
    if (x->attention_plan) {
        subject->strategy = x->attention_info.strategy;
        subject->precision = x->attention_info.precision;
    } else {
        subject->precision = x->index_info.precision;
    }
    subject->fp8 = fp8_part(problem, strcmp(subject->precision, "fast") == 0);
    snprintf(subject->kernel, sizeof(subject->kernel), "%s%s%s", x->attention_plan ? x->attention_info.kernel : "",
             x->attention_plan && x->index_plan ? ", " : "", x->index_plan ? x->index_info.kernel : "");
    return CLI_OK;
}
