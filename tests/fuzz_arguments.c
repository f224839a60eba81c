/* SPDX-License-Identifier: MIT
 *
 * libFuzzer target: arbitrary argument structs. A valid call has up to four of its fields replaced: any value for choices,
 * NULL or any misalignment for pointers, negative, misaligned, overlapping, zero and overflowing strides, counts that are
 * negative, smaller or past their limit. What could only be memory that is not there (a count within its limits, but larger
 * than the buffers) is left out: no library can notice that.
 *
 * Each call gives a status and, if that is no success, a message, and has then written nothing.
 */
#include <string.h>

#include "hostile.h"

enum {
    ROWS = 5,
    KV_HEADS = 2,
    Q_HEADS = 4,
    PAGES = 3,
    TABLE = 2,
    TOPK = 3,
    BUFFER = 200 << 10, /* holds every tensor in any format, dense or with strides up to MAX_STRIDE */
    MAX_STRIDE = 256,
    NUM_BUFFERS = 18,
};

static msa_context *context;
static uint8_t *memory, *snapshot; /* NUM_BUFFERS buffers */
static int used_buffers;

/* ------------------------------------------------------------------------------------------------ fields */

enum kind { SIZE, CHOICE, NUMBER, COUNT32, COUNT64, POINTER, STRIDE };

struct field {
    enum kind kind;
    size_t offset;
    int64_t right, limit; /* COUNT: the valid call's, and the largest that the header allows */
};

#define F_SIZE(type) {SIZE, offsetof(type, size), 0, 0}
#define F(type, kind, field) {kind, offsetof(type, field), 0, 0}
#define F_COUNT(type, kind, field, right, limit) {kind, offsetof(type, field), right, limit}

static int64_t take_i64(struct input *in)
{
    const uint64_t high = (uint32_t)take_i32(in);

    return (int64_t)(high << 32 | (uint32_t)take_i32(in));
}

static int32_t take_choice(struct input *in)
{
    static const int32_t known[] = {INT32_MIN, INT32_MAX, 33, 64, 127, 128, 129, 1024, 1 << 20, 1048577};

    switch (take(in, 3)) {
    case 0:
        return take(in, 12) - 2;
    case 1:
        return known[take(in, 10)];
    default:
        return take_i32(in);
    }
}

static int64_t take_count(struct input *in, const struct field *field)
{
    switch (take(in, 3)) {
    case 0:
        return take(in, (int)field->right + 1);
    case 1:
        return -1 - (int64_t)((uint64_t)take_i64(in) >> (1 + take(in, 63)));
    default:
        return field->limit + 1 + (int64_t)((uint64_t)(INT64_MAX - field->limit - 1) >> take(in, 63));
    }
}

static int64_t take_stride(struct input *in)
{
    switch (take(in, 4)) {
    case 0:
        return take(in, MAX_STRIDE / 16 + 1) * 16;
    case 1:
        return take(in, 256);
    case 2:
        return -1 - (int64_t)((uint64_t)take_i64(in) >> (1 + take(in, 63)));
    default:
        return INT64_MAX - take(in, 16); /* any two rows pass the address space */
    }
}

static void replace(struct input *in, void *args, const struct field *field, size_t size)
{
    uint8_t *place = (uint8_t *)args + field->offset;
    float number = take(in, 2) ? -0.0f : 1e-40f;
    uint8_t *pointer;

    switch (field->kind) {
    case SIZE:
        memcpy(place, &(size_t){take(in, 2) ? (size_t)take(in, 256) : take(in, 2) ? size + (size_t)take(in, 256) : SIZE_MAX},
               sizeof(size_t));
        break;
    case CHOICE:
        memcpy(place, &(int32_t){take_choice(in)}, 4);
        break;
    case NUMBER:
        if (take(in, 2))
            memcpy(&number, &(int32_t){take_i32(in)}, 4);
        memcpy(place, &number, 4);
        break;
    case COUNT32: {
        const int64_t count = take_count(in, field);

        memcpy(place, &(int32_t){count > INT32_MAX ? INT32_MAX : count < INT32_MIN ? INT32_MIN : (int32_t)count}, 4);
        break;
    }
    case COUNT64:
        memcpy(place, &(int64_t){take_count(in, field)}, 8);
        break;
    case POINTER:
        memcpy(&pointer, place, sizeof(pointer));
        if (!pointer) /* one that must be absent, or may: some memory will do */
            pointer = memory + take(in, 64);
        else
            pointer = take(in, 4) ? pointer + take(in, 64) : NULL;
        memcpy(place, &pointer, sizeof(pointer));
        break;
    case STRIDE:
        memcpy(place, &(int64_t){take_stride(in)}, 8);
        break;
    }
}

/* The struct with some fields replaced, in front of enough zeros for any size it may claim to have. */
static void *hostile_copy(struct input *in, const void *args, size_t size, const struct field *fields, int num_fields)
{
    uint8_t *copy = calloc(1, size + 256);

    CHECK(copy);
    memcpy(copy, args, size);
    for (int i = take(in, 5); i-- > 0;)
        replace(in, copy, &fields[take(in, num_fields)], size);
    return copy;
}

static void check_status(msa_status status)
{
    const size_t bytes = (size_t)used_buffers * BUFFER;

    CHECK(status >= MSA_SUCCESS && status <= MSA_ERROR_CALLBACK);
    if (status) {
        CHECK(strlen(msa_last_error()) > 10);
        CHECK(memcmp(memory, snapshot, bytes) == 0);
    }
    memcpy(memory, snapshot, bytes);
}

/* ------------------------------------------------------------------------------------------------ memory */

static void *buffer(void)
{
    CHECK(used_buffers < NUM_BUFFERS);
    return memory + (size_t)used_buffers++ * BUFFER;
}

/* A buffer full of 32-bit or 64-bit numbers in [low, low + n): whatever part of it is read, the values are good. */
static void *buffer_i32(int32_t low, int32_t n)
{
    int32_t *values = buffer();

    for (int32_t i = 0; i < BUFFER / 4; i++)
        values[i] = low + i % n;
    return values;
}

static void *buffer_i64(int64_t low, int64_t n)
{
    int64_t *values = buffer();

    for (int64_t i = 0; i < BUFFER / 8; i++)
        values[i] = low + i % n;
    return values;
}

/* Planning needs no buffers, but must not take what a huge capacity asks for. */
static void *limited_alloc(void *data, size_t bytes)
{
    (void)data;
    return bytes > 16 << 20 ? NULL : malloc(bytes);
}

static void limited_free(void *data, void *pointer)
{
    (void)data;
    free(pointer);
}

static int serial_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg)
{
    (void)data;
    for (size_t i = 0; i < n; i++)
        task(arg, i, i % 2);
    return 0;
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;

    (void)argc;
    (void)argv;
    options.num_threads = 2;
    options.parallel_for = serial_for;
    options.alloc = limited_alloc;
    options.free = limited_free;
    CHECK(msa_context_create(&options, &context) == MSA_SUCCESS);
    CHECK(posix_memalign((void **)&memory, 4096, (size_t)NUM_BUFFERS * BUFFER) == 0);
    snapshot = malloc((size_t)NUM_BUFFERS * BUFFER);
    CHECK(snapshot);
    for (size_t i = 0; i < (size_t)NUM_BUFFERS * BUFFER; i++)
        memory[i] = (uint8_t)(i * 37 >> 3);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ planned operations */

typedef msa_attention_desc AD;
static const struct field attention_desc_fields[] = {
    F_SIZE(AD), F(AD, CHOICE, q_dtype), F(AD, CHOICE, kv_dtype), F(AD, CHOICE, out_dtype), F(AD, CHOICE, num_q_heads),
    F(AD, CHOICE, num_kv_heads), F(AD, CHOICE, num_lists), F(AD, CHOICE, head_dim), F(AD, CHOICE, page_size),
    F(AD, CHOICE, causal), F(AD, CHOICE, topk), F(AD, NUMBER, sm_scale), F(AD, CHOICE, precision), F(AD, CHOICE, strategy),
    F(AD, CHOICE, v_scale_order), F(AD, CHOICE, partials), F(AD, CHOICE, max_batch), F(AD, STRIDE, max_total_q),
    F(AD, STRIDE, max_kv_len),
};

typedef msa_index_desc ID;
static const struct field index_desc_fields[] = {
    F_SIZE(ID), F(ID, CHOICE, q_dtype), F(ID, CHOICE, k_dtype), F(ID, CHOICE, num_index_heads), F(ID, CHOICE, head_dim),
    F(ID, CHOICE, page_size), F(ID, CHOICE, causal), F(ID, CHOICE, topk), F(ID, CHOICE, init_pages),
    F(ID, CHOICE, local_pages), F(ID, CHOICE, topk_order), F(ID, CHOICE, precision), F(ID, CHOICE, outputs),
    F(ID, CHOICE, max_batch), F(ID, STRIDE, max_total_q), F(ID, STRIDE, max_kv_len),
};

typedef msa_step ST;
static const struct field step_fields[] = {
    F_SIZE(ST), F_COUNT(ST, COUNT32, batch, 2, 2), F_COUNT(ST, COUNT64, total_q, ROWS, ROWS), F(ST, POINTER, cu_seqlens_q),
    F(ST, POINTER, kv_lens), F(ST, POINTER, cu_seqlens_k), F(ST, POINTER, page_table), F(ST, STRIDE, page_table_stride),
    F(ST, POINTER, topk), F(ST, STRIDE, topk_head_stride), F(ST, STRIDE, topk_row_stride), F(ST, POINTER, workspace),
};

typedef msa_attention_args AA;
static const struct field attention_fields[] = {
    F_SIZE(AA), F(AA, POINTER, q), F(AA, STRIDE, q_row_stride), F(AA, STRIDE, q_head_stride), F(AA, POINTER, k),
    F(AA, STRIDE, k_page_stride), F(AA, STRIDE, k_head_stride), F(AA, STRIDE, k_token_stride), F(AA, POINTER, v),
    F(AA, STRIDE, v_page_stride), F(AA, STRIDE, v_head_stride), F(AA, STRIDE, v_token_stride), F(AA, POINTER, k_scale),
    F(AA, STRIDE, k_scale_page_stride), F(AA, STRIDE, k_scale_head_stride), F(AA, STRIDE, k_scale_token_stride),
    F(AA, POINTER, v_scale), F(AA, STRIDE, v_scale_page_stride), F(AA, STRIDE, v_scale_head_stride),
    F(AA, STRIDE, v_scale_token_stride), F_COUNT(AA, COUNT64, num_pages, PAGES, INT32_MAX), F(AA, POINTER, q_descale),
    F(AA, STRIDE, q_descale_stride), F(AA, POINTER, k_descale), F(AA, STRIDE, k_descale_stride), F(AA, POINTER, v_descale),
    F(AA, STRIDE, v_descale_stride), F(AA, POINTER, k_global_scale), F(AA, POINTER, v_global_scale), F(AA, POINTER, out),
    F(AA, STRIDE, out_row_stride), F(AA, STRIDE, out_head_stride), F(AA, POINTER, lse), F(AA, STRIDE, lse_row_stride),
    F(AA, STRIDE, lse_head_stride), F(AA, POINTER, o_partial), F(AA, STRIDE, o_partial_split_stride),
    F(AA, STRIDE, o_partial_row_stride), F(AA, STRIDE, o_partial_head_stride), F(AA, POINTER, lse_partial),
    F(AA, STRIDE, lse_partial_split_stride), F(AA, STRIDE, lse_partial_row_stride), F(AA, STRIDE, lse_partial_head_stride),
    F(AA, POINTER, split_counts), F(AA, STRIDE, split_counts_row_stride), F(AA, STRIDE, split_counts_head_stride),
};

typedef msa_index_args IA;
static const struct field index_fields[] = {
    F_SIZE(IA), F(IA, POINTER, index_q), F(IA, STRIDE, index_q_row_stride), F(IA, STRIDE, index_q_head_stride),
    F(IA, POINTER, index_k), F(IA, STRIDE, index_k_page_stride), F(IA, STRIDE, index_k_token_stride),
    F(IA, POINTER, index_k_scale), F(IA, STRIDE, index_k_scale_page_stride), F(IA, STRIDE, index_k_scale_token_stride),
    F_COUNT(IA, COUNT64, num_pages, PAGES, INT32_MAX), F(IA, POINTER, scores), F(IA, STRIDE, scores_head_stride),
    F(IA, STRIDE, scores_row_stride), F(IA, POINTER, topk), F(IA, STRIDE, topk_head_stride), F(IA, STRIDE, topk_row_stride),
    F(IA, POINTER, num_valid_pages),
};

#define HOSTILE(in, args, fields) hostile_copy(in, &(args), sizeof(args), fields, sizeof(fields) / sizeof((fields)[0]))

/* The valid step; its workspace does not count as memory that a refused call might write. */
static msa_step make_step(const msa_plan *plan, bool lists)
{
    msa_step step = MSA_STEP_INIT;

    step.batch = 2;
    step.total_q = ROWS;
    step.cu_seqlens_q = memcpy(buffer(), (int32_t[]){0, 2, ROWS}, 12);
    step.kv_lens = memcpy(buffer(), (int32_t[]){5, 132}, 8);
    step.page_table = buffer_i32(0, PAGES);
    step.topk = lists ? buffer_i32(-1, TABLE + 1) : NULL;
    step_workspace(&step, plan, 0xFF);
    return step;
}

static void prepare_and_run(struct input *in, msa_plan *plan, const msa_step *step, void *args,
                            msa_status (*prepare)(msa_plan *, const msa_step *, msa_stream),
                            msa_status (*run)(msa_plan *, const void *, msa_stream))
{
    msa_step *hostile = HOSTILE(in, *step, step_fields);

    memcpy(snapshot, memory, (size_t)used_buffers * BUFFER);
    check_status(prepare(plan, hostile, NULL));
    /* Usually a good step goes before the run: the hostile one may leave nothing to do. */
    if (take(in, 4))
        CHECK(prepare(plan, step, NULL) == MSA_SUCCESS);
    check_status(run(plan, args, NULL));
    free(hostile);
    free(args);
    free(step->workspace);
    msa_plan_destroy(plan);
}

static msa_status run_prefill(msa_plan *plan, const void *args, msa_stream stream)
{
    return msa_prefill_run(plan, args, stream);
}

static msa_status run_index(msa_plan *plan, const void *args, msa_stream stream)
{
    return msa_index_prefill_run(plan, args, stream);
}

static void fuzz_attention(struct input *in)
{
    static const msa_dtype formats[3][2] = {{MSA_E4M3, MSA_NVFP4}, {MSA_E4M3, MSA_E4M3}, {MSA_BF16, MSA_BF16}};
    const msa_dtype *format = formats[take(in, 3)];
    msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
    msa_attention_args args = MSA_ATTENTION_ARGS_INIT;
    msa_plan *plan = NULL;

    desc.q_dtype = format[0];
    desc.kv_dtype = format[1];
    desc.num_q_heads = Q_HEADS;
    desc.num_kv_heads = KV_HEADS;
    desc.topk = TOPK;
    desc.partials = take(in, 2);
    desc.max_batch = 2;
    desc.max_total_q = ROWS;
    desc.max_kv_len = 128 * TABLE;
    msa_attention_desc *hostile = HOSTILE(in, desc, attention_desc_fields);

    check_status(msa_prefill_plan(context, hostile, &plan));
    msa_plan_destroy(plan);
    free(hostile);

    CHECK(msa_prefill_plan(context, &desc, &plan) == MSA_SUCCESS);
    const msa_step step = make_step(plan, true);

    args.q = buffer();
    args.k = buffer();
    args.v = buffer();
    args.num_pages = PAGES;
    if (desc.kv_dtype == MSA_NVFP4) {
        args.k_scale = buffer();
        args.v_scale = buffer();
        args.k_global_scale = args.v_global_scale = buffer();
    } else if (desc.kv_dtype == MSA_E4M3) {
        args.k_descale = args.v_descale = buffer();
    }
    args.q_descale = desc.q_dtype == MSA_E4M3 ? buffer() : NULL;
    if (desc.partials) {
        args.o_partial = buffer();
        args.lse_partial = buffer();
        args.split_counts = buffer();
    } else {
        args.out = buffer();
        args.lse = buffer();
    }
    prepare_and_run(in, plan, &step, HOSTILE(in, args, attention_fields), msa_prefill_prepare, run_prefill);
}

static void fuzz_index(struct input *in)
{
    msa_index_desc desc = MSA_INDEX_DESC_INIT;
    msa_index_args args = MSA_INDEX_ARGS_INIT;
    msa_plan *plan = NULL;

    desc.k_dtype = take(in, 2) ? MSA_NVFP4 : MSA_E4M3;
    desc.num_index_heads = KV_HEADS;
    desc.topk = TOPK;
    desc.outputs = 1 + take(in, 3);
    desc.max_batch = 2;
    desc.max_total_q = ROWS;
    desc.max_kv_len = 128 * TABLE;
    msa_index_desc *hostile = HOSTILE(in, desc, index_desc_fields);

    check_status(msa_index_prefill_plan(context, hostile, &plan));
    msa_plan_destroy(plan);
    free(hostile);

    CHECK(msa_index_prefill_plan(context, &desc, &plan) == MSA_SUCCESS);
    const msa_step step = make_step(plan, false);

    args.index_q = buffer();
    args.index_k = buffer();
    args.index_k_scale = desc.k_dtype == MSA_NVFP4 ? buffer() : NULL;
    args.num_pages = PAGES;
    args.scores = desc.outputs & MSA_INDEX_SCORES ? buffer() : NULL;
    args.topk = desc.outputs & MSA_INDEX_SELECTION ? buffer() : NULL;
    args.num_valid_pages = desc.outputs & MSA_INDEX_SELECTION ? buffer() : NULL;
    prepare_and_run(in, plan, &step, HOSTILE(in, args, index_fields), msa_index_prefill_prepare, run_index);
}

/* ------------------------------------------------------------------------------------------------ stateless calls */

typedef msa_topk_args TA;
static const struct field topk_fields[] = {
    F_SIZE(TA), F(TA, POINTER, scores), F(TA, STRIDE, scores_head_stride), F(TA, STRIDE, scores_row_stride),
    F_COUNT(TA, COUNT32, num_heads, KV_HEADS, 1024), F_COUNT(TA, COUNT64, rows, ROWS, INT32_MAX),
    F_COUNT(TA, COUNT32, columns, 16, 8192), F(TA, POINTER, valid_pages), F(TA, CHOICE, k), F(TA, CHOICE, init_pages),
    F(TA, CHOICE, local_pages), F(TA, CHOICE, order), F(TA, POINTER, topk), F(TA, STRIDE, topk_head_stride),
    F(TA, STRIDE, topk_row_stride),
};

static void fuzz_topk(struct input *in)
{
    msa_topk_args args = MSA_TOPK_ARGS_INIT, *hostile;

    args.scores = buffer();
    args.num_heads = KV_HEADS;
    args.rows = ROWS;
    args.columns = 16;
    args.valid_pages = buffer();
    args.topk = buffer();
    memcpy(snapshot, memory, (size_t)used_buffers * BUFFER);
    hostile = HOSTILE(in, args, topk_fields);
    check_status(msa_topk(context, hostile, NULL));
    free(hostile);
}

typedef msa_combine_args CA;
static const struct field combine_fields[] = {
    F_SIZE(CA), F_COUNT(CA, COUNT32, num_splits, TOPK, 32), F_COUNT(CA, COUNT64, rows, ROWS, INT32_MAX),
    F_COUNT(CA, COUNT32, num_q_heads, Q_HEADS, 1024), F_COUNT(CA, COUNT32, num_kv_heads, KV_HEADS, 1024),
    F(CA, CHOICE, o_partial_dtype), F(CA, POINTER, o_partial), F(CA, STRIDE, o_partial_split_stride),
    F(CA, STRIDE, o_partial_row_stride), F(CA, STRIDE, o_partial_head_stride), F(CA, POINTER, lse_partial),
    F(CA, STRIDE, lse_partial_split_stride), F(CA, STRIDE, lse_partial_row_stride), F(CA, STRIDE, lse_partial_head_stride),
    F(CA, POINTER, split_counts), F(CA, STRIDE, split_counts_row_stride), F(CA, STRIDE, split_counts_head_stride),
    F(CA, CHOICE, out_dtype), F(CA, POINTER, out), F(CA, STRIDE, out_row_stride), F(CA, STRIDE, out_head_stride),
    F(CA, POINTER, lse), F(CA, STRIDE, lse_row_stride), F(CA, STRIDE, lse_head_stride),
};

static void fuzz_combine(struct input *in)
{
    msa_combine_args args = MSA_COMBINE_ARGS_INIT, *hostile;

    args.num_splits = TOPK;
    args.rows = ROWS;
    args.num_q_heads = Q_HEADS;
    args.num_kv_heads = KV_HEADS;
    args.o_partial = buffer();
    args.lse_partial = buffer();
    args.split_counts = buffer();
    args.out = buffer();
    args.lse = buffer();
    memcpy(snapshot, memory, (size_t)used_buffers * BUFFER);
    hostile = HOSTILE(in, args, combine_fields);
    check_status(msa_combine(context, hostile, NULL));
    free(hostile);
}

typedef msa_merge_args MA;
static const struct field merge_fields[] = {
    F_SIZE(MA), F_COUNT(MA, COUNT32, num_states, 2, 32), F(MA, POINTER, states), F_COUNT(MA, COUNT64, rows, ROWS, INT32_MAX),
    F_COUNT(MA, COUNT32, num_q_heads, Q_HEADS, 1024), F(MA, CHOICE, out_dtype), F(MA, POINTER, out),
    F(MA, STRIDE, out_row_stride), F(MA, STRIDE, out_head_stride), F(MA, POINTER, lse), F(MA, STRIDE, lse_row_stride),
    F(MA, STRIDE, lse_head_stride),
};

typedef msa_merge_state MS;
static const struct field state_fields[] = {
    F(MS, POINTER, out), F(MS, STRIDE, out_row_stride), F(MS, STRIDE, out_head_stride), F(MS, CHOICE, out_dtype),
    F(MS, POINTER, lse), F(MS, STRIDE, lse_row_stride), F(MS, STRIDE, lse_head_stride),
};

static void fuzz_merge(struct input *in)
{
    msa_merge_args args = MSA_MERGE_ARGS_INIT, *hostile;
    msa_merge_state state = MSA_MERGE_STATE_INIT, *hostile_states[2], *states = buffer();

    state.out = buffer();
    state.lse = buffer();
    for (int i = 0; i < 2; i++) {
        hostile_states[i] = HOSTILE(in, state, state_fields);
        states[i] = *hostile_states[i];
        free(hostile_states[i]);
    }
    args.num_states = 2;
    args.states = states;
    args.rows = ROWS;
    args.num_q_heads = Q_HEADS;
    args.out = buffer();
    args.lse = buffer();
    memcpy(snapshot, memory, (size_t)used_buffers * BUFFER);
    hostile = HOSTILE(in, args, merge_fields);
    if (hostile->states == states || (uintptr_t)hostile->states % 8) /* another array of states is not there */
        check_status(msa_merge(context, hostile, NULL));
    free(hostile);
}

typedef msa_quantise_args QA;
static const struct field quantise_fields[] = {
    F_SIZE(QA), F_COUNT(QA, COUNT64, rows, ROWS, INT32_MAX), F_COUNT(QA, COUNT64, cols, 128, 1 << 20),
    F(QA, CHOICE, src_dtype), F(QA, POINTER, src), F(QA, STRIDE, src_row_stride), F(QA, CHOICE, dst_dtype),
    F(QA, POINTER, dst), F(QA, STRIDE, dst_row_stride), F(QA, POINTER, scale), F(QA, STRIDE, scale_row_stride),
    F(QA, POINTER, descale),
};

static void fuzz_quantise(struct input *in)
{
    msa_quantise_args args = MSA_QUANTISE_ARGS_INIT, *hostile;

    args.rows = ROWS;
    args.cols = 128;
    args.src = buffer();
    args.dst = buffer();
    if (take(in, 2)) {
        args.dst_dtype = MSA_NVFP4;
        args.scale = buffer();
    }
    args.descale = buffer();
    memcpy(snapshot, memory, (size_t)used_buffers * BUFFER);
    hostile = HOSTILE(in, args, quantise_fields);
    check_status(msa_quantise(context, hostile, NULL));
    free(hostile);
}

typedef msa_convert_args VA;
static const struct field convert_fields[] = {
    F_SIZE(VA), F_COUNT(VA, COUNT64, rows, ROWS, INT32_MAX), F_COUNT(VA, COUNT64, cols, 128, 1 << 20),
    F(VA, CHOICE, src_dtype), F(VA, POINTER, src), F(VA, STRIDE, src_row_stride), F(VA, POINTER, scale),
    F(VA, STRIDE, scale_row_stride), F(VA, CHOICE, dst_dtype), F(VA, POINTER, dst), F(VA, STRIDE, dst_row_stride),
};

static void fuzz_convert(struct input *in)
{
    msa_convert_args args = MSA_CONVERT_ARGS_INIT, *hostile;

    args.rows = ROWS;
    args.cols = 128;
    args.src = buffer();
    args.dst = buffer();
    if (take(in, 2))
        args.scale = buffer();
    else
        args.src_dtype = MSA_E4M3;
    memcpy(snapshot, memory, (size_t)used_buffers * BUFFER);
    hostile = HOSTILE(in, args, convert_fields);
    check_status(msa_convert(context, hostile, NULL));
    free(hostile);
}

typedef msa_cache_write_args WA;
static const struct field write_fields[] = {
    F_SIZE(WA), F_COUNT(WA, COUNT64, tokens, ROWS, INT32_MAX), F(WA, POINTER, slot_mapping),
    F_COUNT(WA, COUNT64, num_pages, PAGES, INT32_MAX), F_COUNT(WA, COUNT32, num_kv_heads, KV_HEADS, 1024),
    F(WA, CHOICE, src_dtype), F(WA, POINTER, k_new), F(WA, STRIDE, k_new_row_stride), F(WA, STRIDE, k_new_head_stride),
    F(WA, POINTER, v_new), F(WA, STRIDE, v_new_row_stride), F(WA, STRIDE, v_new_head_stride), F(WA, POINTER, index_k_new),
    F(WA, STRIDE, index_k_new_row_stride), F(WA, CHOICE, kv_dtype), F(WA, POINTER, k), F(WA, STRIDE, k_page_stride),
    F(WA, STRIDE, k_head_stride), F(WA, STRIDE, k_token_stride), F(WA, POINTER, v), F(WA, STRIDE, v_page_stride),
    F(WA, STRIDE, v_head_stride), F(WA, STRIDE, v_token_stride), F(WA, POINTER, k_scale), F(WA, STRIDE, k_scale_page_stride),
    F(WA, STRIDE, k_scale_head_stride), F(WA, STRIDE, k_scale_token_stride), F(WA, POINTER, v_scale),
    F(WA, STRIDE, v_scale_page_stride), F(WA, STRIDE, v_scale_head_stride), F(WA, STRIDE, v_scale_token_stride),
    F(WA, CHOICE, v_scale_order), F(WA, POINTER, k_descale), F(WA, STRIDE, k_descale_stride), F(WA, POINTER, v_descale),
    F(WA, STRIDE, v_descale_stride), F(WA, CHOICE, index_k_dtype), F(WA, POINTER, index_k), F(WA, STRIDE, index_k_page_stride),
    F(WA, STRIDE, index_k_token_stride), F(WA, POINTER, index_k_scale), F(WA, STRIDE, index_k_scale_page_stride),
    F(WA, STRIDE, index_k_scale_token_stride),
};

static void fuzz_write(struct input *in)
{
    const bool nvfp4 = take(in, 2);
    msa_cache_write_args args = MSA_CACHE_WRITE_ARGS_INIT, *hostile;

    args.tokens = ROWS;
    args.slot_mapping = buffer_i64(-1, PAGES * 128 + 2);
    args.num_pages = PAGES;
    args.num_kv_heads = KV_HEADS;
    args.k_new = buffer();
    args.v_new = buffer();
    args.index_k_new = buffer();
    args.k = buffer();
    args.v = buffer();
    args.index_k = buffer();
    if (nvfp4) {
        args.kv_dtype = args.index_k_dtype = MSA_NVFP4;
        args.k_scale = buffer();
        args.v_scale = buffer();
        args.index_k_scale = buffer();
        args.k_descale = args.v_descale = buffer();
    }
    memcpy(snapshot, memory, (size_t)used_buffers * BUFFER);
    hostile = HOSTILE(in, args, write_fields);
    check_status(msa_cache_write(context, hostile, NULL));
    free(hostile);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static void (*const calls[])(struct input *) = {fuzz_attention, fuzz_index,    fuzz_topk,    fuzz_combine,
                                                    fuzz_merge,     fuzz_quantise, fuzz_convert, fuzz_write};
    struct input in = input_open(bytes, size);

    used_buffers = 0;
    calls[take(&in, 8)](&in);
    return 0;
}
