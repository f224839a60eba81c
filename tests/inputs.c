/* SPDX-License-Identifier: MIT
 *
 * inputs.c - requests, page tables, rows and caches of test problems; see inputs.h.
 */
#include "inputs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

const format_pair attention_pairs[NUM_ATTENTION_PAIRS] = {
    {MSA_E4M3, MSA_E4M3},  {MSA_E4M3, MSA_NVFP4}, {MSA_BF16, MSA_BF16}, {MSA_BF16, MSA_E4M3},
    {MSA_BF16, MSA_NVFP4}, {MSA_FP16, MSA_FP16},  {MSA_FP16, MSA_E4M3}, {MSA_FP16, MSA_NVFP4}};
const format_pair index_pairs[NUM_INDEX_PAIRS] = {{MSA_E4M3, MSA_E4M3}, {MSA_E4M3, MSA_NVFP4}, {MSA_BF16, MSA_BF16}};

/* ------------------------------------------------------------------------------------------------------------ rows */

const char *format_name(msa_dtype dtype)
{
    static const char *const names[] = {"default", "f32", "bf16", "fp16", "e4m3", "nvfp4", "e5m2"};
    return names[dtype];
}

static void put(msa_dtype dtype, uint8_t *row, int64_t i, uint32_t code)
{
    if (dtype == MSA_NVFP4)
        row[i / 2] = (uint8_t)(i % 2 ? (row[i / 2] & 0x0F) | code << 4 : (row[i / 2] & 0xF0) | code);
    else
        memcpy(row + oracle_row_bytes(dtype, i), &code, (size_t)oracle_row_bytes(dtype, 1)); /* little-endian */
}

void encode_row(msa_dtype dtype, const double x[D], uint8_t *row, uint8_t *scale, int64_t scale_step)
{
    for (int64_t i = 0; i < D; i += 16) {
        double largest = 0, block_scale = 1;
        bool coded = true;
        for (int64_t j = i; j < i + 16 && dtype == MSA_NVFP4; j++) {
            largest = fmax(largest, fabs(x[j]));
            coded &= x[j] == oracle_round(MSA_NVFP4, x[j]);
        }
        if (dtype == MSA_NVFP4) {
            uint8_t code = (uint8_t)oracle_encode(MSA_E4M3, coded ? 1 : fmax(largest / 6, 0x1p-9));
            block_scale = oracle_value(MSA_E4M3, &code);
            scale[i / 16 * scale_step] = code;
        }
        for (int64_t j = i; j < i + 16; j++)
            put(dtype, row, j, oracle_encode(dtype, x[j] / block_scale));
    }
}

void many_lengths(int32_t longest, int32_t q_lens[MANY_REQUESTS], int32_t kv_lens[MANY_REQUESTS])
{
    for (int32_t r = 0; r < MANY_REQUESTS; r++) {
        q_lens[r] = r % 7 == 3 ? 0 : r % 11 == 5 ? 2 : 1;
        kv_lens[r] = 2 + r * 37 % longest;
    }
}

int64_t row_strides(row_layout layout, int64_t rows, int64_t heads, int64_t element, int64_t gap, int64_t *row_stride,
                    int64_t *head_stride)
{
    if (layout == ROWS_HEAD_MAJOR) {
        *row_stride = element;
        *head_stride = rows * element;
    } else if (layout == ROWS_GAPS) {
        *head_stride = element + gap;
        *row_stride = heads * *head_stride + 3 * gap;
    } else if (layout == ROWS_REPEATED) {
        *head_stride = 0;
        *row_stride = element;
    } else {
        *head_stride = element;
        *row_stride = heads * element;
    }
    return rows && heads ? (rows - 1) * *row_stride + (heads - 1) * *head_stride + element : 0;
}

static void values(double x[D], value_fn *fn, place where, const void *data, double deviation, random_stream *random)
{
    for (where.d = 0; where.d < D; where.d++)
        x[where.d] = fn ? fn(&where, data) : deviation * random_normal(random);
}

void rows_fill(uint8_t *base, msa_dtype dtype, const batch_inputs *b, int32_t heads, int64_t row_stride,
               int64_t head_stride, value_fn *fn, const void *data, double deviation, random_stream *random)
{
    double x[D];
    for (int64_t row = 0; row < b->total_q; row++)
        for (int32_t head = 0; head < heads && b->row_request[row] >= 0; head++) {
            values(x, fn, (place){b->row_request[row], head, -1, row, 0}, data, deviation, random);
            encode_row(dtype, x, base + row * row_stride + head * head_stride, NULL, 0);
        }
}

/* -------------------------------------------------------------------------------------------------------- requests */

static int32_t *int_input(trial *t, int64_t count)
{
    return (int32_t *)(void *)arena_region(&t->inputs, (size_t)count * 4, 4)->data;
}

static void make_rows(trial *t, batch_inputs *b, const batch_spec *spec)
{
    b->cu_seqlens_q = int_input(t, spec->batch + 1);
    for (int32_t r = 0; r < spec->batch; r++)
        b->cu_seqlens_q[r + 1] = b->cu_seqlens_q[r] + spec->q_lens[r];
    b->total_q = b->cu_seqlens_q[spec->batch] + spec->padding_rows;
    b->row_request = xmalloc((size_t)b->total_q * sizeof *b->row_request);
    b->row_position = xmalloc((size_t)b->total_q * sizeof *b->row_position);
    for (int64_t row = 0; row < b->total_q; row++)
        b->row_request[row] = -1;
    for (int32_t r = 0; r < spec->batch; r++)
        for (int64_t row = b->cu_seqlens_q[r]; row < b->cu_seqlens_q[r + 1]; row++) {
            b->row_request[row] = r;
            b->row_position[row] = spec->kv_lens[r] - b->cu_seqlens_q[r + 1] + row;
        }
}

static void shuffle(int32_t *items, int32_t count, random_stream *random)
{
    for (int32_t i = count - 1; i > 0; i--) {
        int32_t j = random_below(random, i + 1), swap = items[i];
        items[i] = items[j];
        items[j] = swap;
    }
}

/* Physical pages in the order in which (request, page) takes them. */
static int32_t *page_sequence(const batch_inputs *b, const batch_spec *spec, random_stream *random)
{
    int32_t pages = (int32_t)b->num_pages, *sequence = xmalloc((size_t)pages * sizeof *sequence);
    for (int32_t i = 0; i < pages; i++)
        sequence[i] = spec->order == PAGES_REVERSED ? pages - 1 - i : i;
    if (spec->order == PAGES_SHUFFLED)
        shuffle(sequence, pages, random);
    return sequence;
}

static void make_table(trial *t, batch_inputs *b, const batch_spec *spec, random_stream *random)
{
    int64_t needed = 0, longest = 1, last_pages = 1;
    for (int32_t r = 0; r < spec->batch; r++)
        longest = spec->kv_lens[r] > longest ? spec->kv_lens[r] : longest;
    b->max_kv_len = spec->max_kv_len ? spec->max_kv_len : longest;
    b->max_pages = (b->max_kv_len + PAGE - 1) / PAGE;
    for (int32_t r = 0; r < spec->batch; r++) {
        last_pages = min_i64((spec->kv_lens[r] + PAGE - 1) / PAGE, b->max_pages);
        needed += last_pages;
    }
    if (spec->pool)
        needed = spec->pool + spec->batch;
    b->num_pages = (spec->order == PAGES_ONE ? 0 : needed) + (spec->spare_pages ? spec->spare_pages : 2);
    b->table_pitch = b->max_pages + spec->table_gap;
    int32_t *sequence = page_sequence(b, spec, random), next = 0;

    /* The last row ends where its request's pages do. */
    int64_t entries = (spec->batch - 1) * b->table_pitch + last_pages;
    b->page_table = int_input(t, entries > 1 ? entries : 1);
    for (int64_t i = 0; i < entries; i++)
        b->page_table[i] = INT32_MAX;
    for (int32_t r = 0; r < spec->batch; r++)
        for (int64_t page = 0; page < b->max_pages && page * PAGE < spec->kv_lens[r]; page++) {
            bool shared =
                spec->share_pages && r > 0 && (page + 1) * PAGE <= min_i64(spec->kv_lens[0], spec->kv_lens[r]);
            int32_t *entry = &b->page_table[r * b->table_pitch + page];
            if (spec->pool) /* a request's last, partial page is its own */
                *entry =
                    sequence[(page + 1) * PAGE <= spec->kv_lens[r] ? random_below(random, spec->pool) : spec->pool + r];
            else
                *entry = spec->order == PAGES_ONE ? 1 : shared ? b->page_table[page] : sequence[next++];
        }
    free(sequence);
}

void batch_new(trial *t, batch_inputs *b, msa_step *step, const batch_spec *spec, random_stream *random)
{
    make_rows(t, b, spec);
    make_table(t, b, spec, random);
    b->kv_lens = int_input(t, spec->batch);
    b->cu_seqlens_k = int_input(t, spec->batch + 1);
    for (int32_t r = 0; r < spec->batch; r++) {
        b->kv_lens[r] = spec->kv_lens[r];
        b->cu_seqlens_k[r + 1] = b->cu_seqlens_k[r] + spec->kv_lens[r];
    }
    *step = (msa_step)MSA_STEP_INIT;
    step->batch = spec->batch;
    step->total_q = b->total_q;
    step->cu_seqlens_q = b->cu_seqlens_q;
    step->kv_lens = spec->by_offsets ? NULL : b->kv_lens;
    step->cu_seqlens_k = spec->by_offsets ? b->cu_seqlens_k : NULL;
    step->page_table = b->page_table;
    if (spec->table_gap)
        step->page_table_stride = 4 * b->table_pitch;
}

void batch_free(batch_inputs *b)
{
    free(b->row_request);
    free(b->row_position);
}

/* ---------------------------------------------------------------------------------------------------------- caches */

/* Strides of [pages, heads, 128] rows of `row` bytes; bytes of the whole. */
static int64_t apart(bool gaps, int64_t row, int32_t heads, int64_t pages, int64_t *page, int64_t *head, int64_t *token)
{
    *token = row + (gaps ? 16 : 0);
    *head = *token * PAGE + (gaps ? 32 : 0);
    *page = *head * heads + (gaps ? 48 : 0);
    return pages ? (pages - 1) * *page + (heads - 1) * *head + (PAGE - 1) * *token + row : 0;
}

static uint8_t *bytes_input(trial *t, int64_t bytes, uint8_t poison)
{
    region *r = arena_region(&t->inputs, (size_t)bytes, 16);
    region_fill(r, poison);
    return r->data;
}

static uint8_t *rows_apart(trial *t, const cache_tensor *c, bool gaps, int64_t pages, uint8_t poison,
                           cache_tensor *strides)
{
    *strides = *c;
    return bytes_input(
        t, apart(gaps, oracle_row_bytes(c->dtype, D), c->heads, pages, &strides->page, &strides->head, &strides->token),
        poison);
}

/* Scales in quad order are 1024 dense bytes a (page, head). */
static uint8_t *scales_apart(trial *t, cache_tensor *c, bool gaps, int64_t pages, uint8_t poison)
{
    if (!c->quad)
        return bytes_input(t, apart(gaps, D / 16, c->heads, pages, &c->scale_page, &c->scale_head, &c->scale_token),
                           poison);
    c->scale_head = 1024 + (gaps ? 32 : 0);
    c->scale_page = c->scale_head * c->heads + (gaps ? 48 : 0);
    return bytes_input(t, pages ? (pages - 1) * c->scale_page + (c->heads - 1) * c->scale_head + 1024 : 0, poison);
}

/* K and V inside each other, [pages, Hkv, 128, 2*row] or [pages, 2, 128, Hkv, row]. */
static void interleave(uint8_t *base, cache_layout layout, int64_t row, int32_t heads, uint8_t **k, uint8_t **v,
                       int64_t *page, int64_t *head, int64_t *token)
{
    bool packed = layout == CACHE_PACKED;
    *token = packed ? 2 * row : heads * row;
    *head = packed ? 2 * row * PAGE : row;
    *page = 2 * row * PAGE * heads;
    *k = base;
    *v = base + (packed ? row : row * PAGE * heads);
}

void cache_new(trial *t, msa_dtype dtype, cache_layout layout, bool quad, int32_t heads, int64_t pages, uint8_t poison,
               cache_tensor *k, cache_tensor *v)
{
    enum { SLOT_CODES = PAGE * D / 2, SLOT = SLOT_CODES + PAGE * D / 16 };
    int64_t row = oracle_row_bytes(dtype, D);
    bool gaps = layout == CACHE_GAPS, together = layout == CACHE_PACKED || layout == CACHE_TOKEN_MAJOR;
    cache_tensor none, *other = v ? v : &none;
    *k = (cache_tensor){.dtype = dtype, .heads = heads};
    *other = (cache_tensor){.dtype = dtype, .heads = heads, .quad = quad};
    if (layout == CACHE_SLOTS) {
        int64_t slots = v ? 2 : 1;
        k->data = bytes_input(t, pages * heads * slots * SLOT, poison);
        other->data = k->data + SLOT;
        for (int i = 0; i < slots; i++) {
            cache_tensor *c = i ? other : k;
            c->scale = c->data + SLOT_CODES;
            c->token = row;
            c->scale_token = D / 16;
            c->head = c->scale_head = slots * SLOT;
            c->page = c->scale_page = slots * SLOT * heads;
        }
        return;
    }
    if (together) {
        uint8_t *base = bytes_input(t, 2 * row * PAGE * heads * pages, poison);
        interleave(base, layout, row, heads, &k->data, &other->data, &k->page, &k->head, &k->token);
        interleave(base, layout, row, heads, &k->data, &other->data, &other->page, &other->head, &other->token);
    } else {
        k->data = rows_apart(t, k, gaps, pages, poison, k);
        if (v)
            v->data = rows_apart(t, v, gaps, pages, poison, v);
        if (layout == CACHE_REPEATED)
            k->head = other->head = 0;
    }
    if (dtype == MSA_NVFP4 && together && !quad) {
        uint8_t *base = bytes_input(t, 2 * D / 16 * PAGE * heads * pages, poison);
        interleave(base, layout, D / 16, heads, &k->scale, &other->scale, &k->scale_page, &k->scale_head,
                   &k->scale_token);
        other->scale_page = k->scale_page;
        other->scale_head = k->scale_head;
        other->scale_token = k->scale_token;
    } else if (dtype == MSA_NVFP4) {
        k->scale = scales_apart(t, k, gaps, pages, poison);
        if (v)
            v->scale = scales_apart(t, v, gaps, pages, poison);
    }
}

void cache_fill(const cache_tensor *cache, const batch_inputs *b, int32_t num_requests, const uint8_t *visible,
                value_fn *fn, const void *data, double deviation, random_stream *random)
{
    double x[D];
    bool *done = xcalloc((size_t)b->num_pages, sizeof *done);
    for (int32_t r = 0; r < num_requests; r++)
        for (int64_t page = 0; page < b->max_pages && page * PAGE < b->kv_lens[r]; page++) {
            int64_t physical = b->page_table[r * b->table_pitch + page];
            if (done[physical])
                continue;
            done[physical] = true;
            for (int32_t head = 0; head < cache->heads; head++)
                for (int64_t token = 0; token < visible[physical * cache->heads + head]; token++) {
                    values(x, fn, (place){r, head, page, token, 0}, data, deviation, random);
                    uint8_t *scale = NULL;
                    if (cache->dtype == MSA_NVFP4)
                        scale = cache->scale + physical * cache->scale_page + head * cache->scale_head +
                                (cache->quad ? token / 4 * 32 + token % 4 : token * cache->scale_token);
                    encode_row(cache->dtype, x,
                               cache->data + physical * cache->page + head * cache->head + token * cache->token, scale,
                               cache->quad ? 4 : 1);
                }
        }
    free(done);
}
