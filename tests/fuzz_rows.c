/* SPDX-License-Identifier: MIT
 *
 * libFuzzer target: bytes become one call of top-k, combine, merge, quantise, convert or cache write, with any shapes,
 * strides and values. Every call succeeds, writes all that it must and nothing else, and gives the same bits with
 * another order of tasks over several threads and other values in all bytes it may not use. Top-k, quantise, convert
 * and cache write agree with the oracle.
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

enum { MAX_TENSORS = 16 };

/* The tensors of one call; outputs come after inputs. */
struct call {
    struct tensor tensor[MAX_TENSORS];
    int inputs, outputs;
    msa_status (*run)(msa_context *context, const void *args);
    const void *args;
};

/* A tensor of the call; all of an output is written unless the caller says otherwise (used = false). */
static struct tensor *add(struct call *c, struct input *in, enum tensor_kind kind, size_t align, size_t row_bytes,
                          int axes, const int64_t *extents)
{
    struct tensor *t = &c->tensor[c->inputs + c->outputs];

    *t = tensor_make(in, kind, align, row_bytes, axes, extents);
    if (kind == INPUT)
        c->inputs++;
    else
        c->outputs++;
    return t;
}

static void use_rows(struct tensor *t)
{
    int64_t extent[MAX_AXES] = {1, 1, 1};

    memcpy(extent, t->extent, sizeof(int64_t) * (size_t)t->axes);
    for (int64_t i = 0; t->data && i < extent[0] * extent[1] * extent[2]; i++)
        tensor_use_row(t, i / extent[2] / extent[1], i / extent[2] % extent[1], i % extent[2]);
}

/* Both runs. Outputs hold what the second one, on poisoned inputs, wrote. */
static void run_twice(struct call *c)
{
    uint8_t *first[MAX_TENSORS];

    CHECK(c->run(serial, c->args) == MSA_SUCCESS);
    for (int i = 0; i < c->outputs; i++) {
        tensor_check_gaps(&c->tensor[c->inputs + i]);
        first[i] = tensor_take(&c->tensor[c->inputs + i]);
    }
    for (int i = 0; i < c->inputs; i++)
        tensor_poison(&c->tensor[i], 0x7F);
    CHECK(c->run(reversed, c->args) == MSA_SUCCESS);
    for (int i = 0; i < c->outputs; i++) {
        const struct tensor *t = &c->tensor[c->inputs + i];

        CHECK(t->bytes == 0 || memcmp(t->data, first[i], t->bytes) == 0);
        free(first[i]);
    }
}

static msa_dtype take_float(struct input *in, int n)
{
    return (msa_dtype[]){MSA_BF16, MSA_FP16, MSA_F32}[take(in, n)];
}

/* ------------------------------------------------------------------------------------------------ top-k */

static msa_status run_topk(msa_context *context, const void *args)
{
    return msa_topk(context, args, NULL);
}

/* Scores: few values, so that ties and NaN meet. */
static void fill_scores(struct input *in, struct tensor *scores, int64_t columns)
{
    static const float values[8] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 0.5f};

    for (int64_t i = 0; i < scores->extent[0] * scores->extent[1] * columns; i++)
        memcpy(tensor_row(scores, i / columns / scores->extent[1], i / columns % scores->extent[1], 0) +
                   i % columns * 4,
               &values[pick(in, 8)], 4);
}

static void fuzz_topk(struct input *in, struct call *c)
{
    const int64_t heads = 1 + take(in, 3), rows = take(in, 4), columns = take(in, rarely(in, 4) ? 200 : 24);
    msa_topk_args args = MSA_TOPK_ARGS_INIT;

    args.num_heads = (int32_t)heads;
    args.rows = rows;
    args.columns = (int32_t)columns;
    args.k = 1 + take(in, rarely(in, 4) ? 32 : 6);
    args.local_pages = 1 + take(in, args.k);
    args.init_pages = take(in, args.k - args.local_pages + 1);
    args.order = take(in, 2) ? MSA_TOPK_ORDER_SCORE : MSA_TOPK_ORDER_PAGE;

    struct tensor *valid = add(c, in, INPUT, 4, (size_t)rows * 4, 1, &(int64_t){1});
    struct tensor *scores = add(c, in, INPUT, 4, (size_t)columns * 4, 2, (int64_t[]){heads, rows});
    struct tensor *lists = add(c, in, OUTPUT, 4, (size_t)args.k * 4, 2, (int64_t[]){heads, rows});

    if (scores->data)
        fill_scores(in, scores, columns);
    use_rows(valid);
    use_rows(lists);
    for (int64_t row = 0; row < rows; row++) {
        int32_t n = rarely(in, 8) ? take_i32(in) : take(in, (int)columns + 1);

        memcpy(valid->data + 4 * row, &n, 4);
        n = n < 0 ? 0 : n < columns ? n : (int32_t)columns;
        for (int64_t head = 0; n > 0 && head < heads; head++)
            tensor_use(scores, head, row, 0, 0, 4 * (size_t)n);
    }
    args.valid_pages = (const int32_t *)valid->data;
    args.scores = (const float *)scores->data;
    args.scores_head_stride = scores->given[0], args.scores_row_stride = scores->given[1];
    args.topk = (int32_t *)lists->data;
    args.topk_head_stride = lists->given[0], args.topk_row_stride = lists->given[1];
    c->run = run_topk;
    c->args = &args;
    run_twice(c);
    for (int64_t i = 0; i < heads * rows; i++) {
        float row_scores[256] = {0};
        int32_t expected[MSA_MAX_TOPK], n;

        memcpy(&n, valid->data + 4 * (i % rows), 4);
        n = n < 0 ? 0 : n < columns ? n : (int32_t)columns;
        if (n)
            memcpy(row_scores, tensor_row(scores, i / rows, i % rows, 0), 4 * (size_t)n);
        oracle_select_row(row_scores, n, args.k, args.init_pages, args.local_pages, args.order, expected);
        CHECK(memcmp(tensor_row(lists, i / rows, i % rows, 0), expected, 4 * (size_t)args.k) == 0);
    }
}

/* ------------------------------------------------------------------------------------------------ combine, merge */

static msa_status run_combine(msa_context *context, const void *args)
{
    return msa_combine(context, args, NULL);
}

static msa_status run_merge(msa_context *context, const void *args)
{
    return msa_merge(context, args, NULL);
}

/* LSE of a state: few values, so that empty, equal and NaN ones meet. States past the row's count are not used. */
static void fill_state(struct input *in, struct tensor *lse, struct tensor *out, int64_t i, int64_t j, int64_t k,
                       bool counted)
{
    static const float values[8] = {-INFINITY, INFINITY, 0.0f, 1.0f, 1000.0f, -1000.0f, NAN, 0.25f};

    memcpy(tensor_row(lse, i, j, k), &values[pick(in, 8)], 4);
    if (!counted)
        return;
    tensor_use_row(lse, i, j, k);
    tensor_use_row(out, i, j, k);
}

static void fuzz_combine(struct input *in, struct call *c)
{
    const int64_t splits = 1 + take(in, 4), rows = take(in, 4), kv_heads = 1 + take(in, 2), ratio = 1 + take(in, 3);
    const int64_t heads = kv_heads * ratio, extents[3] = {splits, rows, heads};
    msa_combine_args args = MSA_COMBINE_ARGS_INIT;

    args.num_splits = (int32_t)splits;
    args.rows = rows;
    args.num_q_heads = (int32_t)heads;
    args.num_kv_heads = (int32_t)kv_heads;
    args.o_partial_dtype = take_float(in, 2);
    args.out_dtype = take_float(in, 2);

    struct tensor *partial = add(c, in, INPUT, 16, 256, 3, extents), *lse_partial = add(c, in, INPUT, 4, 4, 3, extents);
    struct tensor *counts = add(c, in, INPUT, 4, 4, 2, (int64_t[]){rows, kv_heads});
    struct tensor *out = add(c, in, OUTPUT, 16, 256, 2, extents + 1), *lse = add(c, in, OUTPUT, 4, 4, 2, extents + 1);

    for (int64_t i = 0; i < rows * kv_heads; i++)
        memcpy(tensor_row(counts, i / kv_heads, i % kv_heads, 0),
               &(int32_t){rarely(in, 8) ? take_i32(in) : take(in, 6)}, 4);
    for (int64_t i = 0; i < splits * rows * heads; i++) {
        const int64_t split = i / heads / rows, row = i / heads % rows, head = i % heads;
        int32_t count;

        memcpy(&count, tensor_row(counts, row, head / ratio, 0), 4);
        fill_state(in, lse_partial, partial, split, row, head, split < count);
    }
    use_rows(counts);
    use_rows(out);
    use_rows(lse);
    args.o_partial = partial->data;
    args.o_partial_split_stride = partial->given[0], args.o_partial_row_stride = partial->given[1];
    args.o_partial_head_stride = partial->given[2];
    args.lse_partial = (const float *)lse_partial->data;
    args.lse_partial_split_stride = lse_partial->given[0], args.lse_partial_row_stride = lse_partial->given[1];
    args.lse_partial_head_stride = lse_partial->given[2];
    args.split_counts = (const int32_t *)counts->data;
    args.split_counts_row_stride = counts->given[0], args.split_counts_head_stride = counts->given[1];
    args.out = out->data;
    args.out_row_stride = out->given[0], args.out_head_stride = out->given[1];
    args.lse = (float *)lse->data;
    args.lse_row_stride = lse->given[0], args.lse_head_stride = lse->given[1];
    c->run = run_combine;
    c->args = &args;
    run_twice(c);
}

static void fuzz_merge(struct input *in, struct call *c)
{
    const int64_t rows = take(in, 4), heads = 1 + take(in, 4), extents[2] = {rows, heads};
    msa_merge_state states[4];
    msa_merge_args args = MSA_MERGE_ARGS_INIT;

    args.num_states = 2 + take(in, 3);
    args.states = states;
    args.rows = rows;
    args.num_q_heads = (int32_t)heads;
    args.out_dtype = take_float(in, 3);
    for (int s = 0; s < args.num_states; s++) {
        const msa_dtype dtype = take_float(in, 3);
        struct tensor *out = add(c, in, INPUT, 16, dtype == MSA_F32 ? 512 : 256, 2, extents);
        struct tensor *lse = add(c, in, INPUT, 4, 4, 2, extents);

        for (int64_t i = 0; i < rows * heads; i++)
            fill_state(in, lse, out, i / heads, i % heads, 0, true);
        states[s] = (msa_merge_state){out->data,     out->given[0], out->given[1], dtype, (const float *)lse->data,
                                      lse->given[0], lse->given[1]};
    }

    struct tensor *out = add(c, in, OUTPUT, 16, args.out_dtype == MSA_F32 ? 512 : 256, 2, extents);
    struct tensor *lse = add(c, in, OUTPUT, 4, 4, 2, extents);

    use_rows(out);
    use_rows(lse);
    args.out = out->data;
    args.out_row_stride = out->given[0], args.out_head_stride = out->given[1];
    args.lse = (float *)lse->data;
    args.lse_row_stride = lse->given[0], args.lse_head_stride = lse->given[1];
    c->run = run_merge;
    c->args = &args;
    run_twice(c);
}

/* ------------------------------------------------------------------------------------------------ formats */

static msa_status run_quantise(msa_context *context, const void *args)
{
    return msa_quantise(context, args, NULL);
}

static msa_status run_convert(msa_context *context, const void *args)
{
    return msa_convert(context, args, NULL);
}

static void fuzz_quantise(struct input *in, struct call *c)
{
    const int64_t rows = take(in, 4), cols = 16 * (1 + take(in, 5));
    msa_quantise_args args = MSA_QUANTISE_ARGS_INIT;

    args.rows = rows;
    args.cols = cols;
    args.src_dtype = take_float(in, 3);
    args.dst_dtype = take(in, 2) ? MSA_NVFP4 : MSA_E4M3;

    const size_t element = args.src_dtype == MSA_F32 ? 4 : 2;
    const bool nvfp4 = args.dst_dtype == MSA_NVFP4;
    const float factor = (float[]){1.0f, 0.3f, 1e-6f, 1e6f}[take(in, 4)];
    struct tensor *src = add(c, in, INPUT, element, element * (size_t)cols, 1, &rows);
    struct tensor *dst = add(c, in, OUTPUT, 1, (size_t)cols / (nvfp4 ? 2 : 1), 1, &rows);
    struct tensor *scale = add(c, in, OUTPUT, 1, nvfp4 ? (size_t)cols / 16 : 0, 1, &rows);

    use_rows(src);
    use_rows(dst);
    use_rows(scale);
    args.src = src->data;
    args.src_row_stride = src->given[0];
    args.dst = dst->data;
    args.dst_row_stride = dst->given[0];
    args.scale = scale->data;
    args.scale_row_stride = scale->given[0];
    args.descale = take(in, 2) ? &factor : NULL;
    c->run = run_quantise;
    c->args = &args;
    run_twice(c);
    args.src_row_stride = src->stride[0];
    for (int64_t row = 0; row < rows; row++) {
        uint8_t codes[80], scales[5];

        oracle_quantise_row(&args, row, codes, scales);
        CHECK(memcmp(tensor_row(dst, row, 0, 0), codes, dst->row_bytes) == 0);
        CHECK(!nvfp4 || memcmp(tensor_row(scale, row, 0, 0), scales, scale->row_bytes) == 0);
    }
}

static void fuzz_convert(struct input *in, struct call *c)
{
    static const msa_dtype pairs[12][2] = {{MSA_NVFP4, MSA_E4M3}, {MSA_NVFP4, MSA_BF16}, {MSA_NVFP4, MSA_FP16},
                                           {MSA_NVFP4, MSA_F32},  {MSA_E4M3, MSA_E4M3},  {MSA_E4M3, MSA_BF16},
                                           {MSA_E4M3, MSA_FP16},  {MSA_E4M3, MSA_F32},   {MSA_BF16, MSA_BF16},
                                           {MSA_BF16, MSA_F32},   {MSA_FP16, MSA_FP16},  {MSA_FP16, MSA_F32}};
    const msa_dtype *pair = pairs[take(in, 12)];
    const int64_t rows = take(in, 4), cols = 16 * (1 + take(in, 5));
    const size_t element = pair[1] == MSA_F32 ? 4 : pair[1] == MSA_E4M3 ? 1 : 2;
    msa_convert_args args = MSA_CONVERT_ARGS_INIT;
    struct tensor *src = add(c, in, INPUT, pair[0] == MSA_BF16 || pair[0] == MSA_FP16 ? 2 : 1,
                             (size_t)oracle_row_bytes(pair[0], cols), 1, &rows);
    struct tensor *scale = add(c, in, INPUT, 1, pair[0] == MSA_NVFP4 ? (size_t)cols / 16 : 0, 1, &rows);
    struct tensor *dst = add(c, in, OUTPUT, element, element * (size_t)cols, 1, &rows);

    use_rows(src);
    use_rows(scale);
    use_rows(dst);
    args.rows = rows;
    args.cols = cols;
    args.src_dtype = pair[0];
    args.src = src->data;
    args.src_row_stride = src->given[0];
    args.scale = scale->data;
    args.scale_row_stride = scale->given[0];
    args.dst_dtype = pair[1];
    args.dst = dst->data;
    args.dst_row_stride = dst->given[0];
    c->run = run_convert;
    c->args = &args;
    run_twice(c);
    args.src_row_stride = src->stride[0];
    args.scale_row_stride = scale->stride[0];
    for (int64_t row = 0; row < rows; row++) {
        double expected[80];

        oracle_convert_row(&args, row, expected);
        for (int64_t i = 0; i < cols; i++) {
            const double got = oracle_value(pair[1], tensor_row(dst, row, 0, 0) + (size_t)i * element);

            CHECK(got == expected[i] || (isnan(got) && isnan(expected[i])));
        }
    }
}

/* ------------------------------------------------------------------------------------------------ cache write */

static msa_status run_write(msa_context *context, const void *args)
{
    return msa_cache_write(context, args, NULL);
}

/* One cache with its new rows: K, V or index-K (which has no axis of heads). */
struct part {
    struct tensor *source, *cache, *scale;
    uint8_t *written, *written_scale;
};

static size_t cache_row_bytes(msa_dtype dtype)
{
    return (size_t)oracle_row_bytes(dtype, 128);
}

static void add_caches(struct call *c, struct input *in, struct part *part, msa_dtype dtype, bool quad, int64_t pages,
                       int64_t heads)
{
    const int64_t kv[3] = {pages, heads, 128}, index[2] = {pages, 128};
    const int axes = heads ? 3 : 2;

    part->cache = add(c, in, OUTPUT, 16, cache_row_bytes(dtype), axes, heads ? kv : index);
    if (dtype == MSA_NVFP4)
        part->scale = add(c, in, OUTPUT, 8, quad ? 1024 : 8, quad ? axes - 1 : axes, heads ? kv : index);
}

static void use_slot(const struct part *part, int64_t slot, int64_t heads, bool quad)
{
    const int64_t page = slot / 128, t = slot % 128;

    for (int64_t h = 0; h < (heads ? heads : 1); h++) {
        const int64_t middle = heads ? h : t, last = heads ? t : 0;

        tensor_use_row(part->cache, page, middle, last);
        if (part->scale && !quad)
            tensor_use_row(part->scale, page, middle, last);
        for (int64_t g = 0; part->scale && quad && g < 8; g++)
            tensor_use(part->scale, page, h, 0, (size_t)(t / 4 * 32 + g * 4 + t % 4), 1);
    }
}

static int64_t take_slot(struct input *in, int64_t pages)
{
    if (rarely(in, 8))
        return (int64_t)((uint64_t)take_i32(in) << 32 | (uint32_t)take_i32(in));
    return (take(in, 4) * 128 + take(in, 128)) % (pages * 128 + 2) - 1;
}

static void set_write_args(msa_cache_write_args *args, const struct part part[3])
{
    if (part[0].cache) {
        const struct tensor *k_new = part[0].source, *k = part[0].cache, *s = part[0].scale;

        args->k_new = k_new->data;
        args->k_new_row_stride = k_new->given[0], args->k_new_head_stride = k_new->given[1];
        args->k = k->data;
        args->k_page_stride = k->given[0], args->k_head_stride = k->given[1], args->k_token_stride = k->given[2];
        if (s) {
            args->k_scale = s->data;
            args->k_scale_page_stride = s->given[0], args->k_scale_head_stride = s->given[1];
            args->k_scale_token_stride = s->given[2];
        }
    }
    if (part[1].cache) {
        const struct tensor *v_new = part[1].source, *v = part[1].cache, *s = part[1].scale;

        args->v_new = v_new->data;
        args->v_new_row_stride = v_new->given[0], args->v_new_head_stride = v_new->given[1];
        args->v = v->data;
        args->v_page_stride = v->given[0], args->v_head_stride = v->given[1], args->v_token_stride = v->given[2];
        if (s) {
            args->v_scale = s->data;
            args->v_scale_page_stride = s->given[0], args->v_scale_head_stride = s->given[1];
            args->v_scale_token_stride = s->axes == 3 ? s->given[2] : -1; /* quad order: not looked at */
        }
    }
    if (part[2].cache) {
        const struct tensor *k_new = part[2].source, *k = part[2].cache, *s = part[2].scale;

        args->index_k_new = k_new->data;
        args->index_k_new_row_stride = k_new->given[0];
        args->index_k = k->data;
        args->index_k_page_stride = k->given[0], args->index_k_token_stride = k->given[1];
        if (s) {
            args->index_k_scale = s->data;
            args->index_k_scale_page_stride = s->given[0], args->index_k_scale_token_stride = s->given[1];
        }
    }
}

/* The same bits, but any NaN is as good as another in the formats that have several. Frees the other contents. */
static void check_same(msa_dtype dtype, const struct tensor *t, uint8_t *other)
{
    const size_t element = dtype == MSA_BF16 || dtype == MSA_FP16 ? 2 : 1;

    for (size_t i = 0; i < t->bytes; i += element) {
        CHECK(memcmp(t->data + i, other + i, element) == 0 ||
              (dtype != MSA_NVFP4 && isnan(oracle_value(dtype, t->data + i)) && isnan(oracle_value(dtype, other + i))));
    }
    free(other);
}

static void fuzz_write(struct input *in, struct call *c)
{
    static const msa_dtype sources[4] = {MSA_BF16, MSA_FP16, MSA_F32, MSA_E4M3};
    static const msa_dtype caches[4] = {MSA_E4M3, MSA_NVFP4, MSA_BF16, MSA_FP16};
    const int64_t tokens = 1 + take(in, 6), pages = 1 + take(in, 3), heads = 1 + take(in, 3);
    const msa_dtype src = sources[take(in, 4)];
    const size_t element = src == MSA_F32 ? 4 : src == MSA_E4M3 ? 1 : 2;
    const int parts = take(in, 8);
    struct part part[3] = {{.source = NULL}};
    msa_cache_write_args args = MSA_CACHE_WRITE_ARGS_INIT;

    args.tokens = tokens;
    args.num_pages = pages;
    args.num_kv_heads = (int32_t)heads;
    args.src_dtype = src;
    args.kv_dtype = caches[src == MSA_E4M3 ? 0 : take(in, 4)];
    args.index_k_dtype = caches[src == MSA_E4M3 ? 0 : take(in, 3)];
    args.v_scale_order = take(in, 2) && args.kv_dtype == MSA_NVFP4 ? MSA_SCALE_QUAD : MSA_SCALE_LINEAR;

    struct tensor *slots = add(c, in, INPUT, 8, (size_t)tokens * 8, 1, &(int64_t){1});
    struct tensor *factor = add(c, in, INPUT, 4, 4, 1, &heads);
    const bool scaled = (args.kv_dtype == MSA_E4M3 || args.kv_dtype == MSA_NVFP4) && src != MSA_E4M3 && take(in, 2);

    for (int i = 0; i < 3; i++) {
        if (parts >> i & 1)
            part[i].source =
                add(c, in, INPUT, element, cache_row_bytes(src), i < 2 ? 2 : 1, (int64_t[]){tokens, heads});
    }
    for (int i = 0; i < 3; i++) {
        if (parts >> i & 1)
            add_caches(c, in, &part[i], i < 2 ? args.kv_dtype : args.index_k_dtype,
                       i == 1 && args.v_scale_order == MSA_SCALE_QUAD, pages, i < 2 ? heads : 0);
    }
    for (int64_t h = 0; h < heads; h++)
        memcpy(tensor_row(factor, h, 0, 0), &(float){0.5f + (float)h}, 4);
    use_rows(slots);
    use_rows(factor);
    for (int64_t n = 0; n < tokens; n++) {
        const int64_t slot = take_slot(in, pages);

        memcpy(slots->data + 8 * n, &slot, 8);
        for (int i = 0; i < 3 && slot >= 0 && slot < pages * 128; i++) {
            if (!part[i].cache)
                continue;
            use_slot(&part[i], slot, i < 2 ? heads : 0, i == 1 && args.v_scale_order == MSA_SCALE_QUAD);
            for (int64_t h = 0; h < (i < 2 ? heads : 1); h++)
                tensor_use_row(part[i].source, n, h, 0);
        }
    }
    args.slot_mapping = (const int64_t *)slots->data;
    args.k_descale = args.v_descale = scaled ? (const float *)factor->data : NULL;
    args.k_descale_stride = args.v_descale_stride = args.kv_dtype == MSA_E4M3 ? factor->stride[0] : 0;
    set_write_args(&args, part);
    c->run = run_write;
    c->args = &args;
    run_twice(c);

    for (int i = 0; i < 3; i++) {
        part[i].written = part[i].cache ? tensor_take(part[i].cache) : NULL;
        part[i].written_scale = part[i].scale ? tensor_take(part[i].scale) : NULL;
    }
    oracle_cache_write(&args);
    for (int i = 0; i < 3; i++) {
        if (part[i].cache)
            check_same(i < 2 ? args.kv_dtype : args.index_k_dtype, part[i].cache, part[i].written);
        if (part[i].scale)
            check_same(MSA_NVFP4, part[i].scale, part[i].written_scale);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static void (*const operations[])(struct input *, struct call *) = {fuzz_topk,     fuzz_combine, fuzz_merge,
                                                                        fuzz_quantise, fuzz_convert, fuzz_write};
    struct input in = input_open(bytes, size);
    struct call call = {.inputs = 0};

    operations[take(&in, 6)](&in, &call);
    for (int i = 0; i < call.inputs + call.outputs; i++)
        tensor_free(&call.tensor[i]);
    return 0;
}
