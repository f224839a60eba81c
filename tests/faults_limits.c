/* SPDX-License-Identifier: MIT
 *
 * faults_limits.c - offsets past 2^31 and 2^32 on every axis of every tensor, page ids whose byte offset passes them,
 * and very large batches. Memory is mapped and hardly touched.
 */
#include "faults.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

#define FAR INT64_C(0x60000000)      /* a stride whose third multiple passes 2^32 */
#define FAR_TOKEN INT64_C(0x2800000) /* one whose 128th multiple does */

/* --------------------------------------------------------------------------------------------------- sparse memory */

enum { MAX_MAPS = 16 };

typedef struct maps {
    void *data[MAX_MAPS];
    size_t bytes[MAX_MAPS];
    int count;
    bool failed;
} maps;

static uint8_t *map_sparse(maps *m, int64_t bytes)
{
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || m->count == MAX_MAPS) {
        m->failed = true;
        return NULL;
    }
    m->data[m->count] = p;
    m->bytes[m->count++] = (size_t)bytes;
    return p;
}

static void unmap_all(maps *m)
{
    for (int i = 0; i < m->count; i++)
        munmap(m->data[i], m->bytes[i]);
    m->count = 0;
}

/* Up to three axes and a dense row of `row` bytes. */
typedef struct view {
    uint8_t *data;
    int64_t extent[3], stride[3], row;
} view;

/* The same shape with a far stride on one axis, and the others dense. Empty where memory cannot be mapped. */
static view far_view(maps *m, const view *from, int axis)
{
    view far = *from;
    int64_t dense = from->row, end = from->row;
    for (int i = 2; i >= 0; i--)
        if (i != axis) {
            far.stride[i] = dense;
            dense *= from->extent[i];
        }
    far.stride[axis] = from->extent[axis] >= PAGE ? FAR_TOKEN : FAR;
    for (int i = 0; i < 3; i++)
        end += (from->extent[i] - 1) * far.stride[i];
    far.data = map_sparse(m, end);
    return far;
}

static void copy_view(const view *from, const view *to)
{
    for (int64_t i = 0; i < from->extent[0]; i++)
        for (int64_t j = 0; j < from->extent[1]; j++)
            for (int64_t k = 0; k < from->extent[2]; k++)
                memcpy(to->data + i * to->stride[0] + j * to->stride[1] + k * to->stride[2],
                       from->data + i * from->stride[0] + j * from->stride[1] + k * from->stride[2], (size_t)from->row);
}

static bool equal_views(const view *a, const view *b)
{
    for (int64_t i = 0; i < a->extent[0]; i++)
        for (int64_t j = 0; j < a->extent[1]; j++)
            for (int64_t k = 0; k < a->extent[2]; k++)
                if (memcmp(b->data + i * b->stride[0] + j * b->stride[1] + k * b->stride[2],
                           a->data + i * a->stride[0] + j * a->stride[1] + k * a->stride[2], (size_t)a->row))
                    return false;
    return true;
}

static view dense_view(const void *data, int64_t a, int64_t b, int64_t c, int64_t row)
{
    return (view){(uint8_t *)data, {a, b, c}, {b * c * row, c * row, row}, row};
}

static view move_far(maps *m, const view *from, int axis)
{
    view far = far_view(m, from, axis);
    if (far.data)
        copy_view(from, &far);
    return far;
}

/* ------------------------------------------------------------------------------------------------------- attention */

enum { HEADS = 4, ROWS = 4, SPLITS = 4 };

/* Moves all tensors so that axis `axis` (of rows, heads; of pages, heads, tokens; of splits, rows, heads) is far. */
static void far_attention(harness *h, msa_context *context, const attention_spec *spec, int axis, bool partials)
{
    attention_spec s = *spec;
    s.kv_heads = s.q_heads = HEADS;
    s.topk = SPLITS;
    s.partials = partials;
    s.requests = batch_of(4, LENGTHS(1, 1, 1, 1), LENGTHS(130, 200, 300, 5 * PAGE)); /* four rows of the page table */
    s.list = list_all_pages;
    attention_case *c = attention_new(h, &s);
    msa_attention_args *a = &c->args;
    int64_t kv_row = oracle_row_bytes(s.kv_dtype, D), pages = c->b.num_pages, splits = partials ? SPLITS : 1;
    maps m = {0};
    trial_run_once(h, &c->t, context);
    bool nvfp4 = s.kv_dtype == MSA_NVFP4;
    int row_axis = axis == 1 ? 2 : 1; /* of [1, rows, heads] */
    view q = dense_view(a->q, 1, ROWS, HEADS, oracle_row_bytes(s.q_dtype, D)),
         k = dense_view(a->k, pages, HEADS, PAGE, kv_row);
    view v = dense_view(a->v, pages, HEADS, PAGE, kv_row), lists = dense_view(c->lists, 1, HEADS, ROWS, 4 * SPLITS);
    view table = dense_view(c->b.page_table, 1, 1, ROWS, 4 * 5);
    view out = dense_view(c->out->region->data, splits, ROWS, HEADS, 2 * D);
    view lse = dense_view(c->lse->region->data, splits, ROWS, HEADS, 4);
    view far_q = move_far(&m, &q, row_axis), far_k = move_far(&m, &k, axis), far_v = move_far(&m, &v, axis);
    view far_lists = move_far(&m, &lists, row_axis), far_table = move_far(&m, &table, 2);
    view far_out = far_view(&m, &out, partials ? axis : row_axis),
         far_lse = far_view(&m, &lse, partials ? axis : row_axis);
    view far_k_scale = {0}, far_v_scale = {0};
    if (nvfp4) {
        view k_scale = dense_view(a->k_scale, pages, HEADS, PAGE, D / 16),
             v_scale = dense_view(a->v_scale, pages, HEADS, PAGE, D / 16);
        far_k_scale = move_far(&m, &k_scale, axis);
        far_v_scale = move_far(&m, &v_scale, axis);
    }
    if (m.failed) {
        test_skip(h, "no room for sparse mappings");
        unmap_all(&m);
        attention_free(c);
        return;
    }
    a->q = far_q.data;
    a->q_row_stride = far_q.stride[1];
    a->q_head_stride = far_q.stride[2];
    a->k = far_k.data;
    a->k_page_stride = far_k.stride[0];
    a->k_head_stride = far_k.stride[1];
    a->k_token_stride = far_k.stride[2];
    a->v = far_v.data;
    a->v_page_stride = far_v.stride[0];
    a->v_head_stride = far_v.stride[1];
    a->v_token_stride = far_v.stride[2];
    a->k_scale = far_k_scale.data;
    a->k_scale_page_stride = far_k_scale.stride[0];
    a->k_scale_head_stride = far_k_scale.stride[1];
    a->k_scale_token_stride = far_k_scale.stride[2];
    a->v_scale = far_v_scale.data;
    a->v_scale_page_stride = far_v_scale.stride[0];
    a->v_scale_head_stride = far_v_scale.stride[1];
    a->v_scale_token_stride = far_v_scale.stride[2];
    if (partials) {
        a->o_partial = far_out.data;
        a->lse_partial = (float *)(void *)far_lse.data;
    } else {
        a->out = far_out.data;
        a->lse = (float *)(void *)far_lse.data;
    }
    a->o_partial_split_stride = far_out.stride[0];
    a->out_row_stride = a->o_partial_row_stride = far_out.stride[1];
    a->out_head_stride = a->o_partial_head_stride = far_out.stride[2];
    a->lse_partial_split_stride = far_lse.stride[0];
    a->lse_row_stride = a->lse_partial_row_stride = far_lse.stride[1];
    a->lse_head_stride = a->lse_partial_head_stride = far_lse.stride[2];
    c->step.topk = (int32_t *)(void *)far_lists.data;
    c->step.topk_head_stride = far_lists.stride[1];
    c->step.topk_row_stride = far_lists.stride[2];
    c->step.page_table = (int32_t *)(void *)far_table.data;
    c->step.page_table_stride = far_table.stride[2];

    /* The answers stay in `out` and `lse`; the guarded buffers take no part in these runs. */
    uint8_t *kept_out = xmalloc(c->out->region->bytes), *kept_lse = xmalloc(c->lse->region->bytes);
    memcpy(kept_out, out.data, c->out->region->bytes);
    memcpy(kept_lse, lse.data, c->lse->region->bytes);
    out.data = kept_out;
    lse.data = kept_lse;
    for (int row = 0; row < ROWS && partials; row++) /* splits that a row lacks are not written */
        for (int split = (int)((c->b.row_position[row] + PAGE) / PAGE); split < SPLITS; split++) {
            memset(kept_out + (split * ROWS + row) * out.stride[1], 0, (size_t)out.stride[1]);
            memset(kept_lse + (split * ROWS + row) * lse.stride[1], 0, (size_t)lse.stride[1]);
        }
    trial_run_once(h, &c->t, context);
    CHECK(h, equal_views(&out, &far_out));
    CHECK(h, equal_views(&lse, &far_lse));
    free(kept_out);
    free(kept_lse);
    unmap_all(&m);
    attention_free(c);
}

static void far_strides(harness *h, const attention_spec *spec)
{
    for (int i = 0; i < h->num_levels; i++)
        for (int axis = 0; axis < 3; axis++) {
            far_attention(h, h->levels[i].one, spec, axis, false);
            far_attention(h, h->levels[i].one, spec, axis, true);
        }
}

/* Byte offsets of page ids just before and after 2^31, in the codes and in the scales. */
static void far_pages(harness *h, const attention_spec *spec)
{
    int64_t kv_page = oracle_row_bytes(spec->kv_dtype, D) * PAGE * HEADS, scale_page = D / 16 * PAGE * HEADS;
    bool nvfp4 = spec->kv_dtype == MSA_NVFP4;
    for (int i = 0; i < (nvfp4 ? 2 : 1); i++) {
        attention_spec s = *spec;
        s.kv_heads = s.q_heads = HEADS;
        s.requests = batch_of(2, LENGTHS(1, 1), LENGTHS(256, 200));
        s.requests.order = PAGES_IN_ORDER;
        s.list = list_all_pages;
        attention_case *c = attention_new(h, &s), *far = attention_new(h, &s);
        int64_t edge = (INT64_C(1) << 31) / (i ? scale_page : kv_page);
        const int64_t ids[] = {edge - 1, edge, edge + 1, 0};
        maps m = {0};
        uint8_t *k = map_sparse(&m, (edge + 2) * kv_page), *v = map_sparse(&m, (edge + 2) * kv_page);
        uint8_t *k_scale = nvfp4 ? map_sparse(&m, (edge + 2) * scale_page) : NULL;
        uint8_t *v_scale = nvfp4 ? map_sparse(&m, (edge + 2) * scale_page) : NULL;
        if (m.failed) {
            test_skip(h, "no room for sparse mappings");
        } else {
            for (int page = 0; page < 4; page++) {
                memcpy(k + ids[page] * kv_page, (const uint8_t *)c->args.k + page * kv_page, (size_t)kv_page);
                memcpy(v + ids[page] * kv_page, (const uint8_t *)c->args.v + page * kv_page, (size_t)kv_page);
                if (nvfp4) {
                    memcpy(k_scale + ids[page] * scale_page, (const uint8_t *)c->args.k_scale + page * scale_page,
                           (size_t)scale_page);
                    memcpy(v_scale + ids[page] * scale_page, (const uint8_t *)c->args.v_scale + page * scale_page,
                           (size_t)scale_page);
                }
                far->b.page_table[page] = (int32_t)ids[page];
            }
            far->args.k = k;
            far->args.v = v;
            far->args.k_scale = k_scale;
            far->args.v_scale = v_scale;
            far->args.num_pages = edge + 2;
            same_bits(h, &c->t, &far->t, "page ids past 2^31 bytes");
        }
        unmap_all(&m);
        attention_free(c);
        attention_free(far);
    }
}

/* ----------------------------------------------------------------------------------------------------------- index */

static void far_index_strides(harness *h, msa_context *context, const index_spec *spec)
{
    for (int axis = 0; axis < 2; axis++) {
        index_spec s = *spec;
        s.heads = HEADS;
        s.requests = batch_of(1, LENGTHS(ROWS), LENGTHS(4 * PAGE));
        index_case *c = index_new(h, &s);
        msa_index_args *a = &c->args;
        int64_t pages = c->b.num_pages, k_row = oracle_row_bytes(s.k_dtype, D), columns = c->b.max_pages;
        maps m = {0};
        trial_run_once(h, &c->t, context);
        view q = dense_view(a->index_q, 1, ROWS, HEADS, oracle_row_bytes(s.q_dtype, D)),
             k = dense_view(a->index_k, pages, 1, PAGE, k_row);
        view scores = dense_view(c->scores->region->data, 1, HEADS, ROWS, 4 * (columns - 1)),
             topk = dense_view(c->topk->region->data, 1, HEADS, ROWS, 64);
        scores.stride[1] = 4 * columns * ROWS;
        scores.stride[2] = 4 * columns;
        view far_q = move_far(&m, &q, 1 + axis), far_k = move_far(&m, &k, 2 * axis), far_k_scale = {0};
        view wide = scores;
        wide.row = 4 * columns;
        view far_scores = far_view(&m, &wide, 1 + axis), far_topk = far_view(&m, &topk, 1 + axis);
        if (s.k_dtype == MSA_NVFP4) {
            view k_scale = dense_view(a->index_k_scale, pages, 1, PAGE, D / 16);
            far_k_scale = move_far(&m, &k_scale, 2 * axis);
        }
        if (m.failed) {
            test_skip(h, "no room for sparse mappings");
            unmap_all(&m);
            index_free(c);
            return;
        }
        a->index_q = far_q.data;
        a->index_q_row_stride = far_q.stride[1];
        a->index_q_head_stride = far_q.stride[2];
        a->index_k = far_k.data;
        a->index_k_page_stride = far_k.stride[0];
        a->index_k_token_stride = far_k.stride[2];
        a->index_k_scale = far_k_scale.data;
        a->index_k_scale_page_stride = far_k_scale.stride[0];
        a->index_k_scale_token_stride = far_k_scale.stride[2];
        a->scores = (float *)(void *)far_scores.data;
        a->scores_head_stride = far_scores.stride[1];
        a->scores_row_stride = far_scores.stride[2];
        a->topk = (int32_t *)(void *)far_topk.data;
        a->topk_head_stride = far_topk.stride[1];
        a->topk_row_stride = far_topk.stride[2];
        uint8_t *kept_scores = xmalloc(c->scores->region->bytes), *kept_topk = xmalloc(c->topk->region->bytes);
        scores.data = memcpy(kept_scores, scores.data, c->scores->region->bytes);
        topk.data = memcpy(kept_topk, topk.data, c->topk->region->bytes);
        trial_run_once(h, &c->t, context);
        CHECK(h, equal_views(&scores, &far_scores));
        CHECK(h, equal_views(&topk, &far_topk));
        free(kept_scores);
        free(kept_topk);
        unmap_all(&m);
        index_free(c);
    }
}

static void far_index(harness *h, const index_spec *spec)
{
    for (int i = 0; i < h->num_levels; i++)
        far_index_strides(h, h->levels[i].one, spec);
}

static void far_index_pages(harness *h, const index_spec *spec)
{
    int64_t page_bytes = oracle_row_bytes(spec->k_dtype, D) * PAGE, edge = (INT64_C(1) << 31) / page_bytes;
    const int64_t ids[] = {edge - 1, edge, edge + 1};
    bool nvfp4 = spec->k_dtype == MSA_NVFP4;
    index_spec s = *spec;
    s.requests = batch_of(1, LENGTHS(1), LENGTHS(3 * PAGE + 1));
    s.requests.order = PAGES_IN_ORDER;
    index_case *c = index_new(h, &s), *far = index_new(h, &s);
    maps m = {0};
    uint8_t *k = map_sparse(&m, (edge + 2) * page_bytes),
            *scale = nvfp4 ? map_sparse(&m, (edge + 2) * PAGE * (D / 16)) : NULL;
    if (m.failed) {
        test_skip(h, "no room for sparse mappings");
    } else {
        for (int page = 0; page < 3; page++) {
            memcpy(k + ids[page] * page_bytes, (const uint8_t *)c->args.index_k + page * page_bytes,
                   (size_t)page_bytes);
            if (nvfp4)
                memcpy(scale + ids[page] * 1024, (const uint8_t *)c->args.index_k_scale + page * 1024, 1024);
            far->b.page_table[page] = (int32_t)ids[page];
        }
        far->args.index_k = k;
        far->args.index_k_scale = scale;
        far->args.num_pages = edge + 2;
        same_bits(h, &c->t, &far->t, "page ids past 2^31 bytes");
    }
    unmap_all(&m);
    index_free(c);
    index_free(far);
}

/* ------------------------------------------------------------------------------------------------- stateless calls */

static void fill_normal(float *numbers, size_t count, random_stream *r)
{
    for (size_t i = 0; i < count; i++)
        numbers[i] = (float)random_normal(r);
}

/* Appends one token far out in a cache, and compares the bytes with those of the same token in page 0. */
static void far_slots(harness *h)
{
    static const msa_dtype formats[] = {MSA_BF16, MSA_FP16, MSA_E4M3, MSA_NVFP4};
    static _Alignas(16) float rows[HEADS][D];
    random_stream r = test_random(h);
    fill_normal(&rows[0][0], sizeof rows / sizeof(float), &r);
    for (int f = 0; f < 4; f++) {
        int64_t row = oracle_row_bytes(formats[f], D), page_bytes = row * PAGE * HEADS,
                edge = (INT64_C(1) << 31) / page_bytes;
        bool nvfp4 = formats[f] == MSA_NVFP4;
        const int64_t slots[] = {3, (edge + 1) * PAGE + 3};
        maps m = {0};
        uint8_t *k = map_sparse(&m, (edge + 2) * page_bytes),
                *scale = nvfp4 ? map_sparse(&m, (edge + 2) * 1024 * HEADS) : NULL;
        if (m.failed) {
            test_skip(h, "no room for sparse mappings");
            return;
        }
        msa_cache_write_args a = MSA_CACHE_WRITE_ARGS_INIT;
        a.tokens = 2;
        a.slot_mapping = slots;
        a.num_pages = edge + 2;
        a.num_kv_heads = HEADS;
        a.src_dtype = MSA_F32;
        a.k_new = rows;
        a.k_new_row_stride = 0;
        a.kv_dtype = formats[f];
        a.k = k;
        a.k_scale = scale;
        for (int i = 0; i < h->num_levels; i++) {
            memset(k + (edge + 1) * page_bytes, 0, (size_t)page_bytes);
            CHECK_OK(h, msa_cache_write(h->levels[i].one, &a, NULL));
            CHECK(h, !memcmp(k, k + (edge + 1) * page_bytes, (size_t)page_bytes));
            CHECK(h, k[3 * row] || k[3 * row + 1]);
            CHECK(h, !nvfp4 || !memcmp(scale, scale + (edge + 1) * 1024 * HEADS, 1024 * HEADS));
        }
        unmap_all(&m);
    }
}

/* Row, head and split strides of combine, topk and quantise. */
static void far_rows(harness *h)
{
    static _Alignas(16) uint16_t partial[SPLITS][ROWS][HEADS][D], out[ROWS][HEADS][D];
    static float lse[SPLITS][ROWS][HEADS], scores[HEADS][ROWS][64];
    static int32_t topk[HEADS][ROWS][16];
    static const int32_t valid[ROWS] = {64, 30, 64, 2};
    random_stream r = test_random(h);
    fill_normal(&lse[0][0][0], sizeof lse / sizeof(float), &r);
    fill_normal(&scores[0][0][0], sizeof scores / sizeof(float), &r);
    for (uint16_t *p = &partial[0][0][0][0], *end = p + sizeof partial / sizeof *p; p < end; p++)
        *p = (uint16_t)oracle_encode(MSA_BF16, random_normal(&r));
    for (int axis = 0; axis < 3; axis++) {
        maps m = {0};
        view from = dense_view(partial, SPLITS, ROWS, HEADS, 2 * D), weights = dense_view(lse, SPLITS, ROWS, HEADS, 4);
        view to = dense_view(out, 1, ROWS, HEADS, 2 * D), numbers = dense_view(scores, 1, HEADS, ROWS, 256),
             ids = dense_view(topk, 1, HEADS, ROWS, 64);
        int row_axis = axis == 2 ? 2 : 1;
        view far_from = move_far(&m, &from, axis), far_weights = move_far(&m, &weights, axis),
             far_to = far_view(&m, &to, row_axis);
        view far_numbers = move_far(&m, &numbers, row_axis), far_ids = far_view(&m, &ids, row_axis);
        if (m.failed) {
            test_skip(h, "no room for sparse mappings");
            unmap_all(&m);
            return;
        }
        for (int i = 0; i < h->num_levels; i++) {
            msa_combine_args c = MSA_COMBINE_ARGS_INIT;
            c.num_splits = SPLITS;
            c.rows = ROWS;
            c.num_q_heads = HEADS;
            c.o_partial = partial;
            c.lse_partial = lse[0][0];
            c.out = out;
            CHECK_OK(h, msa_combine(h->levels[i].one, &c, NULL));
            c.o_partial = far_from.data;
            c.o_partial_split_stride = far_from.stride[0];
            c.o_partial_row_stride = far_from.stride[1];
            c.o_partial_head_stride = far_from.stride[2];
            c.lse_partial = (float *)(void *)far_weights.data;
            c.lse_partial_split_stride = far_weights.stride[0];
            c.lse_partial_row_stride = far_weights.stride[1];
            c.lse_partial_head_stride = far_weights.stride[2];
            c.out = far_to.data;
            c.out_row_stride = far_to.stride[1];
            c.out_head_stride = far_to.stride[2];
            CHECK_OK(h, msa_combine(h->levels[i].one, &c, NULL));
            CHECK(h, equal_views(&to, &far_to));

            msa_topk_args t = MSA_TOPK_ARGS_INIT;
            t.scores = scores[0][0];
            t.num_heads = HEADS;
            t.rows = ROWS;
            t.columns = 64;
            t.valid_pages = valid;
            t.topk = topk[0][0];
            CHECK_OK(h, msa_topk(h->levels[i].one, &t, NULL));
            t.scores = (float *)(void *)far_numbers.data;
            t.scores_head_stride = far_numbers.stride[1];
            t.scores_row_stride = far_numbers.stride[2];
            t.topk = (int32_t *)(void *)far_ids.data;
            t.topk_head_stride = far_ids.stride[1];
            t.topk_row_stride = far_ids.stride[2];
            CHECK_OK(h, msa_topk(h->levels[i].one, &t, NULL));
            CHECK(h, equal_views(&ids, &far_ids));
        }
        unmap_all(&m);
    }
}

static void far_matrix(harness *h)
{
    static _Alignas(16) float numbers[ROWS][D];
    random_stream r = test_random(h);
    fill_normal(&numbers[0][0], sizeof numbers / sizeof(float), &r);
    maps m = {0};
    uint8_t *far_numbers = map_sparse(&m, 3 * FAR + 4 * D), *codes = map_sparse(&m, 3 * FAR + D),
            *back = map_sparse(&m, 3 * FAR + 4 * D);
    if (m.failed) {
        test_skip(h, "no room for sparse mappings");
        unmap_all(&m);
        return;
    }
    for (int row = 0; row < ROWS; row++)
        memcpy(far_numbers + row * FAR, numbers[row], sizeof numbers[row]);
    msa_quantise_args q = MSA_QUANTISE_ARGS_INIT;
    q.rows = ROWS;
    q.cols = D;
    q.src_dtype = MSA_F32;
    q.src = far_numbers;
    q.dst = codes;
    q.src_row_stride = q.dst_row_stride = FAR;
    msa_convert_args c = MSA_CONVERT_ARGS_INIT;
    c.rows = ROWS;
    c.cols = D;
    c.src_dtype = MSA_E4M3;
    c.src = codes;
    c.dst_dtype = MSA_F32;
    c.dst = back;
    c.src_row_stride = c.dst_row_stride = FAR;
    for (int i = 0; i < h->num_levels; i++) {
        CHECK_OK(h, msa_quantise(h->levels[i].one, &q, NULL));
        CHECK_OK(h, msa_convert(h->levels[i].one, &c, NULL));
        for (int row = 0; row < ROWS; row++)
            for (int d = 0; d < D; d++)
                CHECK(h, oracle_value(MSA_F32, back + row * FAR + 4 * d) ==
                             oracle_round(MSA_E4M3, (double)numbers[row][d]));
    }
    unmap_all(&m);
}

/* --------------------------------------------------------------------------------------------------- large batches */

/* More requests times heads, and more rows, than 65,535. */
static void many_requests(harness *h)
{
    enum { REQUESTS = 16385 };
    static int32_t ones[REQUESTS];
    for (int i = 0; i < REQUESTS; i++)
        ones[i] = 1;
    attention_spec s = {.q_dtype = MSA_E4M3,
                        .kv_dtype = MSA_E4M3,
                        .decode = true,
                        .q_heads = 4,
                        .kv_heads = 4,
                        .topk = 1,
                        .samples = 200};
    s.requests = batch_of(REQUESTS, ones, ones);
    s.requests.order = PAGES_ONE;
    attention_case *c = attention_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &c->t, h->levels[i].two ? h->levels[i].two : h->levels[i].one);
        c->t.check(h, &c->t);
        for (int64_t row = 0; row < REQUESTS; row++) /* no NaN of the poison is left */
            for (int32_t head = 0; head < 4; head++)
                CHECK(h, !isnan(attention_lse(c, row, head)));
    }
    attention_free(c);
}

static void many_rows(harness *h)
{
    attention_spec s = {
        .q_dtype = MSA_E4M3, .kv_dtype = MSA_NVFP4, .q_heads = 1, .kv_heads = 1, .topk = 1, .samples = 100};
    s.requests = batch_of(2, LENGTHS(65530, 7), LENGTHS(40, 3)); /* most rows are at negative positions */
    attention_case *c = attention_new(h, &s);
    for (int i = 0; i < h->num_levels; i++) {
        trial_run_once(h, &c->t, h->levels[i].one);
        c->t.check(h, &c->t);
        CHECK(h, !isnan(attention_out(c, 65536, 0, 0))); /* no NaN of the poison is left */
    }
    attention_free(c);
}

static void far_memory(harness *h)
{
    test_skip(h, "a CUDA device does not reach sparse host memory (checkkernel has device/far-pages)");
}

void faults_limits(harness *h)
{
    if (device_in_use()) {
        plain_test(h, "all", "far-strides", far_memory);
    } else {
        each_attention(h, "far-strides", far_strides);
        each_attention(h, "far-pages", far_pages);
        each_index(h, "far-strides", far_index);
        each_index(h, "far-pages", far_index_pages);
        plain_test(h, "cache_write", "far-slots", far_slots);
        plain_test(h, "combine", "far-strides", far_rows);
        plain_test(h, "quantise", "far-strides", far_matrix);
    }
    plain_test(h, "decode", "many-requests", many_requests);
    plain_test(h, "prefill", "many-rows", many_rows);
}
