/* SPDX-License-Identifier: MIT
 *
 * inputs.h - makes whole problems of attention and of the indexer, in guarded memory, as trials.
 *
 * Every byte that no row may see is poison: cache slots, pages and heads that no list names, table entries past a
 * length (INT_MAX), padding rows, list entries of padding rows (INT_MIN). Buffers end where their last needed byte
 * does.
 */
#ifndef MSA_TESTS_INPUTS_H
#define MSA_TESTS_INPUTS_H

#include "harness.h"

/* -------------------------------------------------------------------------------------------------------- requests */

typedef enum page_order { PAGES_SHUFFLED, PAGES_IN_ORDER, PAGES_REVERSED, PAGES_ONE } page_order;

typedef struct batch_spec {
    int32_t batch;
    const int32_t *q_lens, *kv_lens; /* kv lengths include the new tokens */
    int32_t padding_rows;            /* rows of the tensors past the last request */
    bool by_offsets;                 /* gives cu_seqlens_k in place of kv_lens */
    bool share_pages;                /* whole pages lie once for all requests, where request 0 has them */
    int32_t pool;                    /* not 0: whole pages lie anywhere in so many physical ones, again and again */
    page_order order;                /* physical pages by (request, page); PAGES_ONE: all are physical page 1 */
    int32_t spare_pages;             /* physical pages that nobody uses; 0: 2 */
    int32_t table_gap;               /* entries between two rows of the page table */
    int32_t max_batch;               /* capacities of the plan; 0: what the step needs */
    int64_t max_total_q, max_kv_len;
} batch_spec;

/* Lengths in place: LENGTHS(1, 2, 3). */
#define LENGTHS(...)  \
    (const int32_t[]) \
    {                 \
        __VA_ARGS__   \
    }

static inline batch_spec batch_of(int32_t batch, const int32_t *q_lens, const int32_t *kv_lens)
{
    return (batch_spec){.batch = batch, .q_lens = q_lens, .kv_lens = kv_lens};
}

/* More requests than a GPU's block cleans at once, some without a new token; up to 1 + longest keys. */
enum { MANY_REQUESTS = 1100 };
void many_lengths(int32_t longest, int32_t q_lens[MANY_REQUESTS], int32_t kv_lens[MANY_REQUESTS]);

/* What the builder made of it. */
typedef struct batch_inputs {
    int64_t total_q, max_kv_len, max_pages, num_pages;
    int32_t *row_request; /* [total_q], -1: padding */
    int64_t *row_position;
    int32_t *cu_seqlens_q, *kv_lens, *cu_seqlens_k, *page_table; /* inside the inputs: unseal to change */
    int64_t table_pitch;                                         /* entries */
} batch_inputs;

static inline int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

typedef enum row_layout {
    ROWS_DENSE,
    ROWS_HEAD_MAJOR,
    ROWS_GAPS,
    ROWS_REPEATED
} row_layout; /* [T,H,..], [H,T,..], [T,H,..] with gaps; inputs only: [T,..], the same for all heads */
typedef enum cache_layout {
    CACHE_DENSE,       /* K and V apart */
    CACHE_GAPS,        /* the same with unused bytes after each token, head and page */
    CACHE_PACKED,      /* [pages, Hkv, 128, 2*128] */
    CACHE_TOKEN_MAJOR, /* [pages, 2, 128, Hkv, 128] */
    CACHE_SLOTS,       /* NVFP4 [pages, 2*Hkv, 128, 72] */
    CACHE_REPEATED     /* K and V apart, the same rows for all heads: no tensor of Hopper's copies */
} cache_layout;

/* Where a coded value goes. */
typedef struct place {
    int32_t request, head;
    int64_t page, token; /* logical page, token inside it; for queries: page = -1, token = the row */
    int d;
} place;
typedef double value_fn(const place *where, const void *data);
/* Fills the k ids of one list; position may be negative. */
typedef void list_fn(int32_t *ids, int32_t k, int32_t list, int64_t row, int64_t position, const void *data);

/* Lists for list_fn: every page that the row sees, as far as they fit, ascending. */
list_fn list_all_pages;

/* Fills `b` and the step's lengths and page table. */
void batch_new(trial *t, batch_inputs *b, msa_step *step, const batch_spec *spec, random_stream *random);
void batch_free(batch_inputs *b);

/* Bytes of a [T, H, element] tensor, and its strides. */
int64_t row_strides(row_layout layout, int64_t rows, int64_t heads, int64_t element, int64_t gap, int64_t *row_stride,
                    int64_t *head_stride);

/* One of K, V, index-K. */
typedef struct cache_tensor {
    msa_dtype dtype;
    bool quad;
    int32_t heads;
    uint8_t *data, *scale;
    int64_t page, head, token, scale_page, scale_head, scale_token; /* strides */
} cache_tensor;

/* K and V (or K alone, v = NULL), all poison. */
void cache_new(trial *t, msa_dtype dtype, cache_layout layout, bool quad, int32_t heads, int64_t pages, uint8_t poison,
               cache_tensor *k, cache_tensor *v);
/* Writes the tokens that are visible: visible[physical*heads + head] of each page. A page that several requests share
 * takes the values of the first. fn NULL: random with the given deviation. */
void cache_fill(const cache_tensor *cache, const batch_inputs *b, int32_t num_requests, const uint8_t *visible,
                value_fn *fn, const void *data, double deviation, random_stream *random);
/* Writes the rows that belong to requests. */
void rows_fill(uint8_t *base, msa_dtype dtype, const batch_inputs *b, int32_t heads, int64_t row_stride,
               int64_t head_stride, value_fn *fn, const void *data, double deviation, random_stream *random);

/* ------------------------------------------------------------------------------------------------------------ rows */

/* Encodes 128 values. NVFP4 blocks whose values are all E2M1 values get scale 1, so that coded values stay exact. */
void encode_row(msa_dtype dtype, const double x[MSA_HEAD_DIM], uint8_t *row, uint8_t *scale, int64_t scale_step);
const char *format_name(msa_dtype dtype);

/* ------------------------------------------------------------------------------------------------------- attention */

/* The pairs of formats of the contract. */
enum { NUM_ATTENTION_PAIRS = 8, NUM_INDEX_PAIRS = 3 };
typedef struct format_pair {
    msa_dtype q, kv;
} format_pair;
extern const format_pair attention_pairs[NUM_ATTENTION_PAIRS], index_pairs[NUM_INDEX_PAIRS];

typedef struct attention_spec {
    batch_spec requests;
    msa_dtype q_dtype, kv_dtype, out_dtype;
    bool decode, partials, without_lse, quad, scaled; /* scaled: with all descales or global scales of the formats */
    int32_t q_heads, kv_heads, lists, topk;
    float sm_scale; /* 0: the default */
    msa_precision precision;
    msa_strategy strategy;
    row_layout q_layout, out_layout, list_layout;
    cache_layout cache_layout;
    int poison;          /* byte of dead memory; 0: 0xFF (NaN in every format), 0x100: zeros */
    value_fn *q, *k, *v; /* NULL: random */
    list_fn *list;       /* NULL: random, with holes, repeated and invisible ids, in any order */
    const void *data;
    int32_t samples; /* (row, head) pairs that the oracle checks; 0: 24 */
} attention_spec;

typedef struct attention_case {
    trial t;
    attention_spec spec;
    batch_inputs b;
    msa_attention_desc desc;
    msa_step step;
    msa_attention_args args;
    uint8_t *list_counts;        /* [lists][total_q] distinct visible pages */
    int32_t *lists;              /* inside the inputs */
    int64_t list_row, list_head; /* entries */
    output *out, *lse, *counts;  /* with partials: out and lse are the partial ones */
    int64_t out_split, out_row, out_head, lse_split, lse_row, lse_head; /* bytes */
    random_stream random;
    bool merges_pages; /* the plan may round results of pages before it merges them */
} attention_case;

/* Whether the harness' device has this strategy for these formats. */
bool prefill_has(const harness *h, msa_dtype q, msa_dtype kv, msa_strategy strategy);
attention_case *attention_new(const harness *h, const attention_spec *spec);
void attention_free(attention_case *c);
/* Makes, runs in all variants, frees. */
void attention_test(harness *h, const attention_spec *spec);
/* Results of the last run. */
double attention_out(const attention_case *c, int64_t row, int32_t head, int d);
float attention_lse(const attention_case *c, int64_t row, int32_t head);

/* ----------------------------------------------------------------------------------------------------------- index */

typedef struct index_spec {
    batch_spec requests;
    msa_dtype q_dtype, k_dtype;
    bool decode, without_counts, slots;                    /* slots: NVFP4 [pages, 128, 72] */
    int32_t heads, topk, init_pages, local_pages, outputs; /* 0: 1 head, 16, 0, 1, both outputs */
    msa_topk_order order;
    msa_precision precision;
    row_layout q_layout, scores_layout, list_layout;
    bool gaps; /* in the cache */
    int poison;
    value_fn *q, *k;
    const void *data;
    int32_t samples;
} index_spec;

typedef struct index_case {
    trial t;
    index_spec spec;
    batch_inputs b;
    msa_index_desc desc;
    msa_step step;
    msa_index_args args;
    output *scores, *topk, *counts;
    int64_t scores_row, scores_head, topk_row, topk_head; /* bytes */
    random_stream random;
} index_case;

index_case *index_new(const harness *h, const index_spec *spec);
void index_free(index_case *c);
void index_test(harness *h, const index_spec *spec);
const float *index_scores(const index_case *c, int64_t row, int32_t head);
const int32_t *index_topk(const index_case *c, int64_t row, int32_t head);

#endif /* MSA_TESTS_INPUTS_H */
