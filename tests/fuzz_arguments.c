/* SPDX-License-Identifier: MIT
 *
 * libFuzzer target: arbitrary argument structs. A valid call has up to four of its fields replaced: any value for
 * choices, NULL or any misalignment for pointers, negative, misaligned, overlapping, zero and overflowing strides,
 * counts that are negative, smaller or past their limit. What could only be memory that is not there (a count within
 * its limits, but larger than the buffers) is left out: no library can notice that.
 *
 * Each call gives a status and, if that is no success, a message, and has then written nothing.
 */
#include <string.h>

#include "fuzz_fields.h"
#include "hostile.h"

enum {
    BUFFER = 200 << 10, /* holds every tensor in any format, dense or with strides up to MAX_STRIDE */
    MAX_STRIDE = 256,
    NUM_BUFFERS = 18,
};

static msa_context *context;
static uint8_t *memory, *snapshot; /* NUM_BUFFERS buffers */
static int used_buffers;

/* ------------------------------------------------------------------------------------------------ fields */

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
        size = rarely(in, 4) ? SIZE_MAX : take(in, 2) ? (size_t)take(in, 256) : size + (size_t)take(in, 256);
        memcpy(place, &size, sizeof(size));
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
        memory[i] = (uint8_t)(i * 2654435761u >> 24 | 1); /* no byte is 0: a cleared one shows */
    return 0;
}

/* ----------------------------------------------------------------------------------------------- planned operations */

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
