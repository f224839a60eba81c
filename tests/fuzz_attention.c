/* SPDX-License-Identifier: MIT
 *
 * libFuzzer target: bytes become a whole small problem of prefill or decode: formats, heads, strides, lengths, tables,
 * lists and values, good and bad ones. Whatever they are:
 * - every call succeeds, and the error word has exactly the bits that the values ask for;
 * - what must be written is written, and no other byte of an output;
 * - rows that see nothing are 0 and -inf, and one head of one row lies within the oracle's bounds;
 * - the same bits come back with another order of tasks over several threads, another workspace content, and other
 * values in every byte that no visible key, row or table entry names;
 * - a request gives the same bits alone.
 */
#include <math.h>
#include <string.h>

#include "hostile.h"
#include "oracle.h"

static msa_context *serial, *reversed;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    contexts_open(&serial, &reversed);
    return 0;
}

enum { LIST, Q, K, V, K_SCALE, V_SCALE, FACTOR, OUT, LSE, COUNTS, NUM_TENSORS };

struct problem {
    bool decode;
    msa_attention_desc desc;
    struct requests requests;
    struct tensor tensor[NUM_TENSORS]; /* OUT and LSE are the partials of plans with partials */
};

/* ------------------------------------------------------------------------------------------------ making one */

static size_t row_bytes(msa_dtype dtype)
{
    return dtype == MSA_NVFP4 ? 64 : dtype == MSA_E4M3 ? 128 : 256;
}

static void make_desc(struct input *in, struct problem *p)
{
    static const msa_dtype pairs[8][2] = {{MSA_E4M3, MSA_E4M3}, {MSA_E4M3, MSA_NVFP4}, {MSA_BF16, MSA_BF16},
                                          {MSA_BF16, MSA_E4M3}, {MSA_BF16, MSA_NVFP4}, {MSA_FP16, MSA_FP16},
                                          {MSA_FP16, MSA_E4M3}, {MSA_FP16, MSA_NVFP4}};
    static const msa_dtype outs[3] = {MSA_DTYPE_DEFAULT, MSA_BF16, MSA_FP16};
    static const float scales[4] = {MSA_DEFAULT_SM_SCALE, 1.0f, 1e-30f, 1e30f};
    const msa_dtype *pair = pairs[take(in, 8)];
    msa_attention_desc *d = &p->desc;

    *d = (msa_attention_desc)MSA_ATTENTION_DESC_INIT;
    p->decode = take(in, 2);
    d->q_dtype = pair[0];
    d->kv_dtype = pair[1];
    d->out_dtype = outs[take(in, 3)];
    d->num_kv_heads = 1 + take(in, 2);
    d->num_q_heads = d->num_kv_heads * (1 + take(in, 16));
    d->num_lists = take(in, 2) ? 1 : d->num_kv_heads;
    d->topk = 1 + take(in, rarely(in, 4) ? 32 : 4);
    d->sm_scale = scales[take(in, 4)];
    d->v_scale_order = d->kv_dtype == MSA_NVFP4 && take(in, 2) ? MSA_SCALE_QUAD : MSA_SCALE_LINEAR;
    d->partials = rarely(in, 4);
    d->max_batch = p->requests.batch + 1;
    d->max_total_q = p->requests.rows + 1;
    d->max_kv_len = p->requests.max_kv_len;
}

static void make_lists(struct input *in, struct problem *p)
{
    const int64_t rows = p->requests.rows, k = p->desc.topk;

    p->tensor[LIST] = tensor_make(in, INPUT, 4, (size_t)k * 4, 2, (int64_t[]){p->desc.num_lists, rows});
    for (int64_t i = 0; i < p->desc.num_lists * rows * k; i++) {
        const int32_t id = rarely(in, 32) ? take_i32(in) : take(in, p->requests.max_pages + 1) - 1;

        memcpy(tensor_row(&p->tensor[LIST], i / k / rows, i / k % rows, 0) + i % k * 4, &id, 4);
    }
}

static void make_problem(struct input *in, struct problem *p)
{
    memset(p, 0, sizeof(*p));
    requests_make(in, &p->requests);
    make_desc(in, p);
    make_lists(in, p);

    const msa_attention_desc *d = &p->desc;
    const int64_t rows = p->requests.rows, heads = d->num_kv_heads, kv[3] = {p->requests.pool, heads, 128};
    const int64_t out[3] = {d->topk, rows, d->num_q_heads};
    const int skip = d->partials ? 0 : 1; /* no axis of splits */

    p->tensor[Q] = tensor_make(in, INPUT, 16, row_bytes(d->q_dtype), 2, out + 1);
    p->tensor[K] = tensor_make(in, INPUT, 16, row_bytes(d->kv_dtype), 3, kv);
    p->tensor[V] = tensor_make(in, INPUT, 16, row_bytes(d->kv_dtype), 3, kv);
    if (d->kv_dtype == MSA_NVFP4) {
        const bool quad = d->v_scale_order == MSA_SCALE_QUAD;

        p->tensor[K_SCALE] = tensor_make(in, INPUT, 8, 8, 3, kv);
        p->tensor[V_SCALE] = tensor_make(in, INPUT, 8, quad ? 1024 : 8, quad ? 2 : 3, kv);
    }
    p->tensor[FACTOR] = tensor_make(in, INPUT, 4, 4, 1, &heads);
    for (int64_t head = 0; head < heads; head++) {
        memcpy(tensor_row(&p->tensor[FACTOR], head, 0, 0), &(float){0.5f + (float)head}, 4);
        tensor_use_row(&p->tensor[FACTOR], head, 0, 0);
    }
    p->tensor[OUT] = tensor_make(in, OUTPUT, 16, 256, 3 - skip, out + skip);
    p->tensor[LSE] = tensor_make(in, OUTPUT, 4, 4, 3 - skip, out + skip);
    p->tensor[COUNTS] = tensor_make(in, OUTPUT, 4, 4, 2, (int64_t[]){rows, heads});
}

static void free_problem(struct problem *p)
{
    for (int i = 0; i < NUM_TENSORS; i++)
        tensor_free(&p->tensor[i]);
    requests_free(&p->requests);
}

/* ------------------------------------------------------------------------------------------------ what it uses */

/* Keys of one page for one KV head. */
static void use_keys(struct problem *p, int64_t page, int64_t head, int64_t keys)
{
    for (int64_t t = 0; t < keys; t++) {
        tensor_use_row(&p->tensor[K], page, head, t);
        tensor_use_row(&p->tensor[V], page, head, t);
        if (p->desc.kv_dtype != MSA_NVFP4)
            continue;
        tensor_use_row(&p->tensor[K_SCALE], page, head, t);
        if (p->desc.v_scale_order == MSA_SCALE_LINEAR)
            tensor_use_row(&p->tensor[V_SCALE], page, head, t);
        for (int64_t g = 0; p->desc.v_scale_order == MSA_SCALE_QUAD && g < 8; g++)
            tensor_use(&p->tensor[V_SCALE], page, head, 0, (size_t)(t / 4 * 32 + g * 4 + t % 4), 1);
    }
}

/* What one row of one KV head sees; returns the number of its visible pages. */
static int use_list(struct problem *p, int b, int64_t row, int64_t head)
{
    struct requests *r = &p->requests;
    const int64_t list = head / (p->desc.num_kv_heads / p->desc.num_lists), position = requests_position(r, b, row);
    const int64_t keys = position + 1 < 128 * r->max_pages ? position + 1 : 128 * r->max_pages;
    bool seen[MAX_PAGES + 1] = {false};
    int visible = 0;

    tensor_use_row(&p->tensor[LIST], list, row, 0);
    for (int64_t j = 0; j < p->desc.topk; j++) {
        int32_t id;

        memcpy(&id, tensor_row(&p->tensor[LIST], list, row, 0) + j * 4, 4);
        if (id < -1 || id >= r->max_pages)
            r->bits |= MSA_ERROR_BIT_LIST_ID;
        else if (id >= 0 && 128 * id < keys && !seen[id]) {
            const int64_t page = requests_look_up(r, b, id), rest = keys - 128 * id;

            seen[id] = true;
            if (page >= 0)
                use_keys(p, page, head, rest < 128 ? rest : 128), visible++;
        }
    }
    return visible;
}

static void use_row(struct problem *p, int b, int64_t row)
{
    const int ratio = p->desc.num_q_heads / p->desc.num_kv_heads;

    for (int64_t h = 0; h < p->desc.num_q_heads; h++) {
        const int visible = use_list(p, b, row, h / ratio);

        tensor_use_row(&p->tensor[Q], row, h, 0);
        if (!p->desc.partials) {
            tensor_use_row(&p->tensor[OUT], row, h, 0);
            tensor_use_row(&p->tensor[LSE], row, h, 0);
            continue;
        }
        tensor_use_row(&p->tensor[COUNTS], row, h / ratio, 0);
        for (int split = 0; split < visible; split++) {
            tensor_use_row(&p->tensor[OUT], split, row, h);
            tensor_use_row(&p->tensor[LSE], split, row, h);
        }
    }
}

static void use_problem(struct problem *p)
{
    const struct requests *r = &p->requests;

    for (int b = 0; b < r->owners; b++) {
        for (int64_t row = r->cu[b]; row < r->cu[b + 1]; row++)
            use_row(p, b, row);
    }
    for (int i = 0; i < NUM_TENSORS && !r->good; i++) /* who owns which row is not for this target to say */
        tensor_use_all(&p->tensor[i]);
    if (!r->good)
        tensor_use_all(&p->requests.table);
}

/* ------------------------------------------------------------------------------------------------ running it */

static void set_cache(const struct problem *p, msa_attention_args *args)
{
    const struct tensor *k = &p->tensor[K], *v = &p->tensor[V], *k_scale = &p->tensor[K_SCALE],
                        *v_scale = &p->tensor[V_SCALE];
    const struct tensor *factor = &p->tensor[FACTOR];
    const float *factors = (const float *)factor->data;

    args->num_pages = p->requests.pool;
    args->k = k->data;
    args->k_page_stride = k->given[0], args->k_head_stride = k->given[1], args->k_token_stride = k->given[2];
    args->v = v->data;
    args->v_page_stride = v->given[0], args->v_head_stride = v->given[1], args->v_token_stride = v->given[2];
    if (p->desc.kv_dtype == MSA_NVFP4) {
        args->k_scale = k_scale->data;
        args->k_scale_page_stride = k_scale->given[0], args->k_scale_head_stride = k_scale->given[1];
        args->k_scale_token_stride = k_scale->given[2];
        args->v_scale = v_scale->data;
        args->v_scale_page_stride = v_scale->given[0], args->v_scale_head_stride = v_scale->given[1];
        args->v_scale_token_stride = v_scale->axes == 3 ? v_scale->given[2] : -1;
        args->k_global_scale = args->v_global_scale = factors;
    } else if (p->desc.kv_dtype == MSA_E4M3) {
        args->k_descale = args->v_descale = factors;
        args->k_descale_stride = args->v_descale_stride = factor->stride[0];
    }
    if (p->desc.q_dtype == MSA_E4M3)
        args->q_descale = factors;
}

/* The arguments, from row `first` on. */
static msa_attention_args make_args(const struct problem *p, int64_t first)
{
    const struct tensor *q = &p->tensor[Q], *out = &p->tensor[OUT], *lse = &p->tensor[LSE],
                        *counts = &p->tensor[COUNTS];
    msa_attention_args args = MSA_ATTENTION_ARGS_INIT;

    set_cache(p, &args);
    args.q = tensor_row(q, first, 0, 0);
    args.q_row_stride = q->given[0], args.q_head_stride = q->given[1];
    if (!p->desc.partials) {
        args.out = tensor_row(out, first, 0, 0);
        args.out_row_stride = out->given[0], args.out_head_stride = out->given[1];
        args.lse = (float *)tensor_row(lse, first, 0, 0);
        args.lse_row_stride = lse->given[0], args.lse_head_stride = lse->given[1];
        return args;
    }
    args.o_partial = tensor_row(out, 0, first, 0);
    args.o_partial_split_stride = out->stride[0]; /* the dense default would follow the rows of the call */
    args.o_partial_row_stride = out->given[1], args.o_partial_head_stride = out->given[2];
    args.lse_partial = (float *)tensor_row(lse, 0, first, 0);
    args.lse_partial_split_stride = lse->stride[0];
    args.lse_partial_row_stride = lse->given[1], args.lse_partial_head_stride = lse->given[2];
    args.split_counts = (int32_t *)tensor_row(counts, first, 0, 0);
    args.split_counts_row_stride = counts->given[0], args.split_counts_head_stride = counts->given[1];
    return args;
}

/* Plans, prepares and runs the whole problem (b = -1) or one request; checks what it may write, and the error word. */
static void run(const struct problem *p, msa_context *context, int b, int fill)
{
    const struct requests *r = &p->requests;
    const int64_t first = b >= 0 ? r->cu[b] : 0;
    const msa_attention_args args = make_args(p, first);
    int32_t alone[2];
    msa_step step = requests_step(r, b, alone);
    msa_plan *plan;

    CHECK((p->decode ? msa_decode_plan : msa_prefill_plan)(context, &p->desc, &plan) == MSA_SUCCESS);
    step.topk = (const int32_t *)tensor_row(&p->tensor[LIST], 0, first, 0);
    step.topk_head_stride = p->tensor[LIST].stride[0];
    step.topk_row_stride = p->tensor[LIST].given[1];
    step_workspace(&step, plan, fill);
    CHECK((p->decode ? msa_decode_prepare : msa_prefill_prepare)(plan, &step, NULL) == MSA_SUCCESS);
    CHECK((p->decode ? msa_decode_run : msa_prefill_run)(plan, &args, NULL) == MSA_SUCCESS);
    if (b < 0)
        requests_check_bits(r, plan);
    for (int i = OUT; i <= COUNTS; i++)
        tensor_check_gaps(&p->tensor[i]);
    msa_plan_destroy(plan);
    free(step.workspace);
}

/* Rows that see nothing; and the counts of partials, which say which splits are written. */
static void check_rows(struct problem *p)
{
    static const uint8_t zeros[256];
    const uint32_t empty = 0xFF800000;

    for (int b = 0; b < p->requests.owners; b++) {
        for (int64_t row = p->requests.cu[b]; row < p->requests.cu[b + 1]; row++) {
            for (int64_t h = 0; h < p->desc.num_q_heads; h++) {
                const int64_t head = h / (p->desc.num_q_heads / p->desc.num_kv_heads);
                const int32_t visible = use_list(p, b, row, head);

                if (p->desc.partials)
                    CHECK(memcmp(tensor_row(&p->tensor[COUNTS], row, head, 0), &visible, 4) == 0);
                else if (visible == 0)
                    CHECK(memcmp(tensor_row(&p->tensor[OUT], row, h, 0), zeros, 256) == 0 &&
                          memcmp(tensor_row(&p->tensor[LSE], row, h, 0), &empty, 4) == 0);
            }
        }
    }
}

/* One head of one row against double precision. The rounding of the output comes on top of the oracle's bound. */
static void check_oracle(struct input *in, const struct problem *p)
{
    const struct requests *r = &p->requests;
    const msa_attention_args args = make_args(p, 0);
    msa_step step = requests_step(r, -1, NULL);
    const bool fp16 = p->desc.out_dtype == MSA_FP16 || (!p->desc.out_dtype && p->desc.q_dtype == MSA_FP16);
    bool tame = p->desc.sm_scale <= 1.0f; /* wild numbers overflow in FP32, and not in double */
    oracle_state expected;
    float lse;

    for (int i = Q; i <= V_SCALE; i++)
        tame = tame && (p->tensor[i].tame || !p->tensor[i].data);
    if (!tame || !r->owners || !r->cu[r->owners] || p->desc.partials)
        return;
    const int64_t row = pick(in, r->cu[r->owners]), head = pick(in, p->desc.num_q_heads);

    step.topk = (const int32_t *)p->tensor[LIST].data;
    step.topk_head_stride = p->tensor[LIST].stride[0];
    step.topk_row_stride = p->tensor[LIST].stride[1];
    CHECK(oracle_attention_row(&p->desc, &step, &args, row, (int32_t)head, &expected));
    memcpy(&lse, tensor_row(&p->tensor[LSE], row, head, 0), 4);
    if (expected.lse == -INFINITY)
        return; /* check_rows has seen it */
    CHECK(fabs((double)lse - expected.lse) <= expected.lse_bound + 1e-6 * fabs(expected.lse));
    for (int d = 0; d < 128; d++) {
        const double got = oracle_value(fp16 ? MSA_FP16 : MSA_BF16, tensor_row(&p->tensor[OUT], row, head, 0) + 2 * d);
        const double e = expected.out[d];

        CHECK(fabs(got - e) <= expected.out_bound[d] + fabs(e) / 256 + 0x1p-24);
    }
}

static void check_alone(struct problem *p, int b, const uint8_t *const expected[NUM_TENSORS])
{
    const struct requests *r = &p->requests;
    const int64_t splits = p->desc.partials ? p->desc.topk : 1;

    run(p, serial, b, 0);
    for (int64_t i = 0; i < splits * (r->cu[b + 1] - r->cu[b]) * p->desc.num_q_heads; i++) {
        const int64_t h = i % p->desc.num_q_heads, split = i / p->desc.num_q_heads % splits;
        const int64_t row = r->cu[b] + i / p->desc.num_q_heads / splits;

        for (int t = OUT; t <= LSE; t++) {
            const struct tensor *tensor = &p->tensor[t];
            const uint8_t *got = p->desc.partials ? tensor_row(tensor, split, row, h) : tensor_row(tensor, row, h, 0);

            CHECK(memcmp(got, expected[t] + (got - tensor->data), tensor->row_bytes) == 0);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct input in = input_open(bytes, size);
    struct problem p;
    uint8_t *first[NUM_TENSORS] = {NULL};

    make_problem(&in, &p);
    use_problem(&p);
    run(&p, serial, -1, 0xFF);
    check_rows(&p);
    check_oracle(&in, &p);
    for (int i = OUT; i <= COUNTS; i++)
        first[i] = tensor_take(&p.tensor[i]);

    for (int i = LIST; i <= FACTOR; i++)
        tensor_poison(&p.tensor[i], 0x7F);
    tensor_poison(&p.requests.table, 0x7F);
    run(&p, reversed, -1, 0x7F);
    for (int i = OUT; i <= COUNTS; i++) {
        CHECK(p.tensor[i].bytes == 0 || memcmp(p.tensor[i].data, first[i], p.tensor[i].bytes) == 0);
        free(tensor_take(&p.tensor[i]));
    }
    if (p.requests.owners)
        check_alone(&p, take(&in, p.requests.owners), (const uint8_t *const *)first);
    for (int i = OUT; i <= COUNTS; i++)
        free(first[i]);
    free_problem(&p);
    return 0;
}
