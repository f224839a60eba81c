/* SPDX-License-Identifier: MIT
 *
 * check_cuda.c - what only a CUDA device has: captured graphs whose inputs change in place, streams, and the state of
 * the device that a caller finds after a call. Empty unless checkkernel runs on a CUDA device.
 */
#include "checkkernel.h"

#include <stdlib.h>
#include <string.h>

#ifdef MSA_WITH_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

static bool cuda_ok(harness *h, const char *what, cudaError_t error)
{
    if (error)
        test_fail(h, "%s: %s", what, cudaGetErrorString(error));
    return !error;
}

/* ------------------------------------------------------------------------------------------------------- problems */

/* A problem whose contents can be exchanged; exactly one of the two cases is there. */
typedef struct problem {
    attention_case *attention;
    index_case *index;
} problem;

static trial *trial_of(const problem *p)
{
    return p->attention ? &p->attention->t : &p->index->t;
}

static batch_inputs *batch_of_problem(const problem *p)
{
    return p->attention ? &p->attention->b : &p->index->b;
}

static problem problem_new(harness *h, bool index, bool decode, msa_dtype q, msa_dtype kv, int32_t outputs,
                           msa_strategy strategy)
{
    batch_spec requests = batch_of(5, LENGTHS(3, 4, 0, 6, 1), LENGTHS(700, 300, 20, 1500, 129));
    requests.padding_rows = 3;
    problem p = {NULL, NULL};
    if (index) {
        index_spec s = {.requests = requests,
                        .q_dtype = q,
                        .k_dtype = kv,
                        .decode = decode,
                        .heads = 2,
                        .topk = 4,
                        .outputs = outputs};
        p.index = index_new(h, &s);
    } else {
        attention_spec s = {.requests = requests,
                            .q_dtype = q,
                            .kv_dtype = kv,
                            .decode = decode,
                            .q_heads = 8,
                            .kv_heads = 2,
                            .topk = 6,
                            .strategy = strategy,
                            .scaled = true};
        p.attention = attention_new(h, &s);
    }
    return p;
}

static void problem_free(problem *p)
{
    if (p->attention)
        attention_free(p->attention);
    else
        index_free(p->index);
}

/* prepare and run, on any plan and workspace. */
static msa_status enqueue(const problem *p, msa_plan *plan, const region *workspace, msa_stream stream)
{
    msa_step step = p->attention ? p->attention->step : p->index->step;
    step.workspace = workspace->data;
    step.workspace_bytes = workspace->bytes;
    msa_status status;
    if (p->attention && p->attention->spec.decode) {
        status = msa_decode_prepare(plan, &step, stream);
        return status ? status : msa_decode_run(plan, &p->attention->args, stream);
    }
    if (p->attention) {
        status = msa_prefill_prepare(plan, &step, stream);
        return status ? status : msa_prefill_run(plan, &p->attention->args, stream);
    }
    if (p->index->spec.decode) {
        status = msa_index_decode_prepare(plan, &step, stream);
        return status ? status : msa_index_decode_run(plan, &p->index->args, stream);
    }
    status = msa_index_prefill_prepare(plan, &step, stream);
    return status ? status : msa_index_prefill_run(plan, &p->index->args, stream);
}

static void randomise(const trial *t, const void *data, random_stream *r)
{
    for (int i = 0; data && i < t->inputs.count; i++)
        if (t->inputs.regions[i]->data == data)
            region_randomise(t->inputs.regions[i], r);
}

/* Other lengths (up to those that the table was made for), pages, lists and tensors, at the same addresses. */
static void change_inputs(const problem *p, random_stream *r)
{
    batch_inputs *b = batch_of_problem(p);
    const trial *t = trial_of(p);
    static const int32_t longest[] = {700, 300, 20, 1500, 129};
    for (int i = 0; i < 5; i++) {
        int32_t left = (int32_t)b->total_q - b->cu_seqlens_q[i];
        b->cu_seqlens_q[i + 1] = b->cu_seqlens_q[i] + random_below(r, (left < 8 ? left : 8) + 1);
        b->kv_lens[i] = random_below(r, longest[i] + 1);
        for (int32_t page = 0; page * MSA_PAGE_SIZE < longest[i]; page++)
            b->page_table[i * b->table_pitch + page] = random_below(r, (int32_t)b->num_pages);
    }
    if (p->attention) {
        attention_case *c = p->attention;
        for (int64_t i = 0; i < c->list_head * c->spec.lists; i++)
            c->lists[i] = random_below(r, (int32_t)b->max_pages + 1) - 1;
        randomise(t, c->args.q, r);
        randomise(t, c->args.k, r);
        randomise(t, c->args.v, r);
        randomise(t, c->args.k_scale, r);
        randomise(t, c->args.v_scale, r);
    } else {
        randomise(t, p->index->args.index_q, r);
        randomise(t, p->index->args.index_k, r);
        randomise(t, p->index->args.index_k_scale, r);
    }
}

/* All outputs of a problem; free() the copy. */
static uint8_t *outputs_copy(const trial *t)
{
    size_t bytes = 0;
    for (int i = 0; i < t->num_outputs; i++)
        bytes += t->outputs[i].region->map_bytes;
    uint8_t *copy = xmalloc(bytes), *to = copy;
    for (int i = 0; i < t->num_outputs; i++) {
        const region *r = t->outputs[i].region;
        memcpy(to, r->map, r->map_bytes); /* with the canaries */
        to += r->map_bytes;
    }
    return copy;
}

static void compare_outputs(harness *h, const trial *t, const uint8_t *expected, const char *what)
{
    for (int i = 0; i < t->num_outputs; i++) {
        const region *r = t->outputs[i].region;
        if (memcmp(r->map, expected, r->map_bytes))
            test_fail(h, "%s: other bits in %s", what, t->outputs[i].name);
        expected += r->map_bytes;
    }
}

static void poison(const trial *t, region *workspace, random_stream *r)
{
    for (int i = 0; i < t->num_outputs; i++)
        region_fill(t->outputs[i].region, 0xA5);
    region_fill(workspace, random_chance(r, 0.5) ? 0xFF : 0);
    if (random_chance(r, 0.05)) /* slow: images of pages make workspaces large */
        region_randomise(workspace, r);
}

/* ------------------------------------------------------------------------------------------------------- graphs */

static bool capture(harness *h, const problem *p, msa_plan *plan, const region *workspace, cudaStream_t stream,
                    cudaGraphExec_t *graph)
{
    cudaGraph_t captured;
    if (!cuda_ok(h, "begin capture", cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)))
        return false;
    msa_status status = enqueue(p, plan, workspace, stream);
    if (!cuda_ok(h, "end capture", cudaStreamEndCapture(stream, &captured)))
        return false;
    if (status)
        test_fail(h, "capture: %s", msa_last_error());
    bool ok = !status && cuda_ok(h, "instantiate", cudaGraphInstantiate(graph, captured, 0));
    cudaGraphDestroy(captured);
    return ok;
}

/* One replay with changed inputs against a direct call of another plan. */
static void replay(harness *h, const problem *p, msa_plan *const plans[2], region *workspace, cudaStream_t stream,
                   cudaGraphExec_t graph, random_stream *r)
{
    trial *t = trial_of(p);
    uint32_t bits[2];
    change_inputs(p, r);
    poison(t, workspace, r);
    CHECK_OK(h, enqueue(p, plans[1], workspace, stream));
    CHECK_OK(h, msa_plan_error(plans[1], &bits[1], stream));
    uint8_t *expected = outputs_copy(t);
    poison(t, workspace, r);
    cuda_ok(h, "replay", cudaGraphLaunch(graph, stream));
    CHECK_OK(h, msa_plan_error(plans[0], &bits[0], stream));
    compare_outputs(h, t, expected, "replay");
    if (bits[0] != bits[1])
        test_fail(h, "error word 0x%x, direct call 0x%x", bits[0], bits[1]);
    free(expected);
}

static void graph_test(harness *h, problem p, int replays)
{
    trial *t = trial_of(&p);
    random_stream r = test_random(h);
    cudaStream_t stream = NULL;
    cudaGraphExec_t graph = NULL;
    msa_plan *plans[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        CHECK_OK(h, t->open(t, h->levels[0].one));
        plans[i] = t->plan;
    }
    t->plan = NULL;
    region *workspace = arena_region(&t->scratch, msa_plan_workspace(plans[0]), 256);
    if (cuda_ok(h, "stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) &&
        capture(h, &p, plans[0], workspace, stream, &graph))
        for (int i = 0; i < replays && !h->test_failed; i++)
            replay(h, &p, plans, workspace, stream, graph, &r);
    if (graph)
        cudaGraphExecDestroy(graph);
    cudaStreamDestroy(stream);
    msa_plan_destroy(plans[0]);
    msa_plan_destroy(plans[1]);
    problem_free(&p);
}

static void check_graphs(harness *h)
{
    int replays = h->options.quick ? 20 : 300;
    for (int pair = 0; pair < NUM_ATTENTION_PAIRS; pair++)
        for (int decode = 0; decode < 2; decode++) {
            const format_pair *f = &attention_pairs[pair];
            if (test_begin(h, "graph", "%s/%s-%s", decode ? "decode" : "prefill", format_name(f->q),
                           format_name(f->kv))) {
                graph_test(h, problem_new(h, false, decode, f->q, f->kv, 0, MSA_STRATEGY_AUTO),
                           pair == 1 && !h->options.quick ? 1000 : replays);
                test_end(h);
            }
            /* Room for several new tokens a request: kernels that choose anew for each tile of them. */
            if (decode && f->q == MSA_E4M3 &&
                test_begin(h, "graph", "several-new/%s-%s", format_name(f->q), format_name(f->kv))) {
                problem p = problem_new(h, false, true, f->q, f->kv, 0, MSA_STRATEGY_AUTO);
                p.attention->desc.max_total_q = 700;
                graph_test(h, p, replays);
                test_end(h);
            }
            if (decode || !prefill_has(h, f->q, f->kv, MSA_STRATEGY_PAGE_MAJOR) ||
                !test_begin(h, "graph", "page-major/%s-%s", format_name(f->q), format_name(f->kv)))
                continue;
            graph_test(h, problem_new(h, false, false, f->q, f->kv, 0, MSA_STRATEGY_PAGE_MAJOR), replays);
            test_end(h);
        }
    for (int pair = 0; pair < NUM_INDEX_PAIRS; pair++)
        for (int outputs = 1; outputs < 4; outputs++) {
            const format_pair *f = &index_pairs[pair];
            if (!test_begin(h, "graph", "index/%s-%s/%d", format_name(f->q), format_name(f->kv), outputs))
                continue;
            graph_test(h, problem_new(h, true, outputs % 2, f->q, f->kv, outputs, MSA_STRATEGY_AUTO), replays);
            test_end(h);
        }
}

/* ------------------------------------------------------------------------------------------------------- streams */

/* Two plans on two streams, many calls in flight, give what each gives alone. */
static void check_streams(harness *h)
{
    if (!test_begin(h, "stream", "two-plans"))
        return;
    problem p[2] = {problem_new(h, false, false, MSA_E4M3, MSA_NVFP4, 0, MSA_STRATEGY_AUTO),
                    problem_new(h, false, true, MSA_BF16, MSA_BF16, 0, MSA_STRATEGY_AUTO)};
    uint8_t *expected[2];
    cudaStream_t streams[2];
    random_stream r = test_random(h);
    for (int i = 0; i < 2; i++) {
        trial *t = trial_of(&p[i]);
        CHECK_OK(h, t->open(t, h->levels[0].one));
        t->workspace = arena_region(&t->scratch, msa_plan_workspace(t->plan), 256);
        cuda_ok(h, "stream", cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        poison(t, t->workspace, &r);
        CHECK_OK(h, enqueue(&p[i], t->plan, t->workspace, streams[i]));
        expected[i] = outputs_copy(t);
        poison(t, t->workspace, &r);
    }
    for (int n = 0; n < 50; n++)
        for (int i = 0; i < 2; i++)
            if (enqueue(&p[i], trial_of(&p[i])->plan, trial_of(&p[i])->workspace, streams[i]))
                test_fail(h, "%s", msa_last_error());
    cuda_ok(h, "wait", cudaDeviceSynchronize());
    for (int i = 0; i < 2; i++) {
        trial *t = trial_of(&p[i]);
        compare_outputs(h, t, expected[i], i ? "second stream" : "first stream");
        free(expected[i]);
        cudaStreamDestroy(streams[i]);
        msa_plan_destroy(t->plan);
        problem_free(&p[i]);
    }
    test_end(h);
}

/* ------------------------------------------------------------------------------------------------------- the device */

struct device_state {
    harness *h;
    const problem *p;
    CUcontext before, after;
};

/* In a thread that never used CUDA, no context is current; that must hold after a call, too. */
static void *call_in_thread(void *data)
{
    struct device_state *state = data;
    CUresult (*current)(CUcontext *);
    enum cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", (void **)&current, 12000, cudaEnableDefault, &found);
    trial *t = trial_of(state->p);
    current(&state->before);
    if (t->open(t, state->h->levels[0].one) || enqueue(state->p, t->plan, t->workspace, NULL))
        test_fail(state->h, "%s", msa_last_error());
    msa_plan_destroy(t->plan);
    current(&state->after);
    return NULL;
}

static void check_device(harness *h)
{
    if (!test_begin(h, "device", "current-context"))
        return;
    problem p = problem_new(h, false, true, MSA_E4M3, MSA_E4M3, 0, MSA_STRATEGY_AUTO);
    trial *t = trial_of(&p);
    CHECK_OK(h, t->open(t, h->levels[0].one));
    t->workspace = arena_region(&t->scratch, msa_plan_workspace(t->plan), 256);
    msa_plan_destroy(t->plan);
    struct device_state state = {.h = h, .p = &p};
    pthread_t thread;
    CHECK(h, !pthread_create(&thread, NULL, call_in_thread, &state));
    pthread_join(thread, NULL);
    CHECK(h, state.before == NULL && state.after == NULL);
    CHECK(h, device_wait() == NULL);
    CHECK(h, cudaPeekAtLastError() == cudaSuccess);
    problem_free(&p);
    test_end(h);
}

/* Device memory after many plans is what it was after a few. */
static void check_memory(harness *h)
{
    if (!test_begin(h, "device", "memory"))
        return;
    problem p = problem_new(h, false, true, MSA_E4M3, MSA_NVFP4, 0, MSA_STRATEGY_AUTO);
    trial *t = trial_of(&p);
    size_t before = 0, after = 0, total;
    for (int i = 0; i < 2000; i++) {
        CHECK_OK(h, t->open(t, h->levels[0].one));
        msa_plan_destroy(t->plan);
        if (i == 10)
            cuda_ok(h, "memory", cudaMemGetInfo(&before, &total));
    }
    cuda_ok(h, "memory", cudaMemGetInfo(&after, &total));
    CHECK(h, before == after);
    problem_free(&p);
    test_end(h);
}

/* ------------------------------------------------------------------------------------------------------- far pages */

/* Pages of `bytes` in device memory, `stride` apart; NULL: there is not that much. */
static void *far_pages(const void *data, int64_t pages, int64_t bytes, int64_t stride)
{
    char *far = NULL;
    if (cudaMalloc((void **)&far, (size_t)((pages - 1) * stride + bytes))) {
        cudaGetLastError();
        return NULL;
    }
    for (int64_t i = 0; i < pages; i++)
        cudaMemcpy(far + i * stride, (const char *)data + i * bytes, (size_t)bytes, cudaMemcpyHostToDevice);
    return far;
}

/* The same pages 1.5 GiB apart give the same bits: no offset is cut to 32 bits. */
static void check_far_attention(harness *h)
{
    if (!test_begin(h, "device", "far-pages/attention"))
        return;
    const int64_t stride = INT64_C(0x60000000);
    attention_spec s = {.requests = batch_of(1, LENGTHS(3), LENGTHS(300)),
                        .q_dtype = MSA_E4M3,
                        .kv_dtype = MSA_E4M3,
                        .q_heads = 4,
                        .kv_heads = 2,
                        .topk = 3,
                        .list = list_all_pages};
    attention_case *c = attention_new(h, &s);
    int64_t bytes = 2 * MSA_PAGE_SIZE * MSA_HEAD_DIM;
    void *k = far_pages(c->args.k, c->b.num_pages, bytes, stride),
         *v = far_pages(c->args.v, c->b.num_pages, bytes, stride);
    if (k && v) {
        trial_run_once(h, &c->t, h->levels[0].one);
        uint8_t *expected = outputs_copy(&c->t);
        c->args.k = k;
        c->args.v = v;
        c->args.k_page_stride = c->args.v_page_stride = stride;
        trial_run_once(h, &c->t, h->levels[0].one);
        compare_outputs(h, &c->t, expected, "far pages");
        free(expected);
    } else {
        test_skip(h, "the device has too little memory");
    }
    cudaFree(k);
    cudaFree(v);
    attention_free(c);
    test_end(h);
}

static void check_far_index(harness *h)
{
    if (!test_begin(h, "device", "far-pages/index"))
        return;
    const int64_t stride = INT64_C(0x60000000);
    index_spec s = {.requests = batch_of(1, LENGTHS(3), LENGTHS(400)), .q_dtype = MSA_E4M3, .k_dtype = MSA_E4M3};
    index_case *c = index_new(h, &s);
    void *k = far_pages(c->args.index_k, c->b.num_pages, MSA_PAGE_SIZE * MSA_HEAD_DIM, stride);
    if (k) {
        trial_run_once(h, &c->t, h->levels[0].one);
        uint8_t *expected = outputs_copy(&c->t);
        c->args.index_k = k;
        c->args.index_k_page_stride = stride;
        trial_run_once(h, &c->t, h->levels[0].one);
        compare_outputs(h, &c->t, expected, "far pages");
        free(expected);
    } else {
        test_skip(h, "the device has too little memory");
    }
    cudaFree(k);
    index_free(c);
    test_end(h);
}

void check_cuda(harness *h)
{
    if (h->options.device == MSA_DEVICE_CPU)
        return;
    check_graphs(h);
    check_streams(h);
    check_device(h);
    check_memory(h);
    check_far_attention(h);
    check_far_index(h);
}
#else
void check_cuda(harness *h)
{
    (void)h;
}
#endif
