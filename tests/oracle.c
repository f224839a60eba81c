/* SPDX-License-Identifier: MIT
 *
 * oracle.c - the operations of oracle.h.
 */
#include "oracle.h"

#include <math.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE, MAX_TERMS = 32 };

/* Relative error that FP32 may make: in a chain of 128 sums (worst real case, not the proof's bound), in an
 * exponential or a logarithm, and in a product of a few factors. */
#define CHAIN_ERROR 0x1p-20
#define FUNCTION_ERROR 0x1p-21
/* The same for sums of FP8 tensor cores, which drop what lies below 2^-13 of the largest of 33 terms; seen: 0x1p-10. */
#define FP8_SUM_ERROR 0x1p-9
#define PRODUCT_ERROR 0x1p-22
/* Exponentials this small may become 0, in FP32 or in an implementation's exp. */
#define TINY 0x1p-125

/* ------------------------------------------------------------------------------------------------------- addresses */

static int64_t or_dense(int64_t stride, int64_t dense)
{
    return stride == MSA_DENSE ? dense : stride;
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static const void *at(const void *base, int64_t offset)
{
    return (const char *)base + offset;
}

/* A cache of 128-element rows: K, V or index-K. */
typedef struct cache {
    msa_dtype dtype;
    bool as_e4m3, quad;
    const void *data;
    int64_t page_stride, head_stride, token_stride;
    const void *scale;
    int64_t scale_page_stride, scale_head_stride, scale_token_stride;
} cache;

/* Replaces MSA_DENSE by the strides of [pages, heads, 128, 128]. */
static cache dense_cache(cache c, int32_t heads)
{
    c.token_stride = or_dense(c.token_stride, oracle_row_bytes(c.dtype, D));
    c.head_stride = or_dense(c.head_stride, oracle_row_bytes(c.dtype, D) * PAGE);
    c.page_stride = or_dense(c.page_stride, oracle_row_bytes(c.dtype, D) * PAGE * heads);
    c.scale_token_stride = or_dense(c.scale_token_stride, D / 16);
    c.scale_head_stride = or_dense(c.scale_head_stride, D / 16 * PAGE);
    c.scale_page_stride = or_dense(c.scale_page_stride, D / 16 * PAGE * heads);
    return c;
}

static int64_t token_offset(const cache *c, int64_t page, int32_t head, int64_t token)
{
    return page * c->page_stride + head * c->head_stride + token * c->token_stride;
}

static int64_t scale_offset(const cache *c, int64_t page, int32_t head, int64_t token)
{
    int64_t block = page * c->scale_page_stride + head * c->scale_head_stride;
    return block + (c->quad ? token / 4 * 32 + token % 4 : token * c->scale_token_stride);
}

static void read_token(const cache *c, int64_t page, int32_t head, int64_t token, double x[D])
{
    const void *row = at(c->data, token_offset(c, page, head, token));
    const uint8_t *scale = NULL;
    if (c->dtype == MSA_NVFP4)
        scale = at(c->scale, scale_offset(c, page, head, token));
    for (int64_t d = 0; d < D; d++)
        x[d] = oracle_element(c->dtype, row, scale, c->quad ? 4 : 1, c->as_e4m3, d);
}

static void read_row(msa_dtype dtype, const void *row, double x[D])
{
    for (int64_t d = 0; d < D; d++)
        x[d] = oracle_element(dtype, row, NULL, 0, false, d);
}

/* Dot product, and the sum of the magnitudes of its terms. */
static double dot(const double a[D], const double b[D], double *magnitude)
{
    double sum = 0;
    *magnitude = 0;
    for (int d = 0; d < D; d++) {
        sum += a[d] * b[d];
        *magnitude += fabs(a[d] * b[d]);
    }
    return sum;
}

/* ----------------------------------------------------------------------------------------------------------- steps */

oracle_place oracle_find_row(const msa_step *step, int64_t row)
{
    oracle_place place = {-1, 0, 0};
    for (int32_t b = 0; b < step->batch; b++) {
        int64_t first = step->cu_seqlens_q[b], end = step->cu_seqlens_q[b + 1];
        if (row < first || row >= end)
            continue;
        place.request = b;
        place.num_keys = step->kv_lens ? step->kv_lens[b] : (int64_t)step->cu_seqlens_k[b + 1] - step->cu_seqlens_k[b];
        place.position = place.num_keys - (end - first) + (row - first);
    }
    return place;
}

static int32_t physical_page(const msa_step *step, int64_t max_pages, int32_t request, int64_t page)
{
    int64_t stride = or_dense(step->page_table_stride, 4 * max_pages);
    return *(const int32_t *)at(step->page_table, request * stride + 4 * page);
}

/* ------------------------------------------------------------------------------------------------------- attention */

bool oracle_fp8_sums;

/* Softmax over the visible keys of one page, not yet divided by its sum. */
typedef struct page_state {
    double max, max_error;   /* largest logit */
    double sum, sum_error;   /* sum of exp(logit - max) */
    double acc[D], error[D]; /* sum of rounded exp(logit - max) * v */
    double squared_error[D]; /* of independent roundings */
} page_state;

typedef struct problem {
    const msa_attention_desc *desc;
    cache k, v;
    double logit_scale, out_scale;
    double qk_error, pv_error; /* relative, of sums over d and over a page's keys */
} problem;

static double scalar(const float *values, int64_t stride, int32_t index)
{
    return values ? (double)*(const float *)at(values, or_dense(stride, 0) * index) : 1;
}

static problem make_problem(const msa_attention_desc *desc, const msa_attention_args *args, int32_t kv_head)
{
    bool q8 = desc->q_dtype == MSA_E4M3;
    problem p = {.desc = desc};
    p.k = dense_cache((cache){desc->kv_dtype, q8, false, args->k, args->k_page_stride, args->k_head_stride,
                              args->k_token_stride, args->k_scale, args->k_scale_page_stride, args->k_scale_head_stride,
                              args->k_scale_token_stride},
                      desc->num_kv_heads);
    p.v = dense_cache((cache){desc->kv_dtype, q8, desc->v_scale_order == MSA_SCALE_QUAD, args->v, args->v_page_stride,
                              args->v_head_stride, args->v_token_stride, args->v_scale, args->v_scale_page_stride,
                              args->v_scale_head_stride, args->v_scale_token_stride},
                      desc->num_kv_heads);
    p.logit_scale = (double)desc->sm_scale * scalar(args->q_descale, args->q_descale_stride, kv_head) *
                    scalar(args->k_descale, args->k_descale_stride, kv_head) * scalar(args->k_global_scale, 0, 0);
    bool fp8 = q8 && oracle_fp8_sums;
    p.pv_error = fp8 ? FP8_SUM_ERROR : CHAIN_ERROR;
    p.qk_error = fp8 && desc->precision == MSA_PRECISION_FAST ? FP8_SUM_ERROR : CHAIN_ERROR;
    p.out_scale = scalar(args->v_descale, args->v_descale_stride, kv_head) * scalar(args->v_global_scale, 0, 0);
    return p;
}

static void attend_page(const problem *p, const double q[D], int64_t page, int32_t head, int64_t num_keys,
                        page_state *state)
{
    double logit[PAGE], logit_error[PAGE], x[D], magnitude;
    memset(state, 0, sizeof *state);
    state->max = -(double)INFINITY;
    for (int64_t t = 0; t < num_keys; t++) {
        read_token(&p->k, page, head, t, x);
        logit[t] = p->logit_scale * dot(q, x, &magnitude);
        if (isinf(logit[t])) /* NaN and Inf anywhere in q or K make the row NaN */
            logit[t] = (double)NAN;
        logit_error[t] = p->logit_scale * magnitude * p->qk_error + fabs(logit[t]) * PRODUCT_ERROR;
        if (!(logit[t] <= state->max)) { /* so that NaN stays */
            state->max = logit[t];
            state->max_error = logit_error[t];
        }
    }
    /* P = round(factor * p) / factor. E4M3 uses the page's own maximum on every path; the 16-bit types may use a larger
     * one, so each of their roundings may fall another way: errors of half an ulp that add up like noise. */
    msa_dtype p_dtype = p->desc->q_dtype;
    double factor = p_dtype == MSA_E4M3 ? 448 : 1;
    double half_ulp = p_dtype == MSA_BF16 ? 0x1p-8 : 0x1p-11;
    for (int64_t t = 0; t < num_keys; t++) {
        double unrounded = exp(logit[t] - state->max);
        double relative =
            logit_error[t] + state->max_error + fabs(logit[t] - state->max) * PRODUCT_ERROR + FUNCTION_ERROR;
        double rounded = oracle_round(p_dtype, factor * unrounded) / factor;
        double spread = 0, noise = 0;
        if (p_dtype == MSA_E4M3)
            spread = (oracle_round(p_dtype, factor * unrounded * (1 + relative)) -
                      oracle_round(p_dtype, factor * unrounded * (1 - relative))) /
                     factor;
        else
            noise = half_ulp * unrounded + (p_dtype == MSA_FP16 ? 0x1p-24 : TINY);
        state->sum += unrounded;
        state->sum_error += unrounded * relative;
        read_token(&p->v, page, head, t, x);
        for (int d = 0; d < D; d++) {
            state->acc[d] += isinf(x[d]) ? (double)NAN : rounded * x[d];
            state->error[d] += (spread + rounded * p->pv_error) * fabs(x[d]);
            state->squared_error[d] += noise * x[d] * noise * x[d];
        }
    }
}

/* Joins page states, in any number, to the answer. rounding: relative error of each page's own result. */
static void finish(const problem *p, const page_state *pages, int count, double rounding, oracle_state *state)
{
    double max = -(double)INFINITY, max_error = 0, sum = 0, sum_error = 0, weight[MSA_MAX_TOPK],
           weight_error[MSA_MAX_TOPK];
    for (int i = 0; i < count; i++)
        if (!(pages[i].max <= max)) {
            max = pages[i].max;
            max_error = pages[i].max_error;
        }
    for (int i = 0; i < count; i++) {
        weight[i] = exp(pages[i].max - max);
        weight_error[i] = weight[i] * (max_error + pages[i].max_error + fabs(pages[i].max - max) * PRODUCT_ERROR +
                                       FUNCTION_ERROR + CHAIN_ERROR) +
                          TINY;
        sum += weight[i] * pages[i].sum;
        sum_error += weight[i] * pages[i].sum_error + weight_error[i] * pages[i].sum;
    }
    for (int d = 0; d < D; d++) {
        double acc = 0, error = 0, squared_error = 0;
        for (int i = 0; i < count; i++) {
            acc += weight[i] * pages[i].acc[d];
            error += weight[i] * pages[i].error[d] + (weight_error[i] + weight[i] * rounding) * fabs(pages[i].acc[d]);
            squared_error += weight[i] * weight[i] * pages[i].squared_error[d];
        }
        state->out[d] = count ? p->out_scale * acc / sum : 0;
        state->out_bound[d] = count ? p->out_scale * (error + 6 * sqrt(squared_error)) / sum +
                                          fabs(state->out[d]) * (sum_error / sum + FUNCTION_ERROR)
                                    : 0;
    }
    state->lse = count ? max + log(sum) : -(double)INFINITY;
    state->lse_bound = count ? max_error + sum_error / sum + fabs(state->lse) * PRODUCT_ERROR + FUNCTION_ERROR : 0;
}

/* Computes the visible pages of a row one by one, ascending; returns their number, or -1 for a padding row. */
static int attend_row(const msa_attention_desc *desc, const msa_step *step, const msa_attention_args *args, int64_t row,
                      int32_t q_head, problem *p, page_state pages[MSA_MAX_TOPK])
{
    oracle_place place = oracle_find_row(step, row);
    if (place.request < 0)
        return -1;
    int32_t kv_head = q_head / (desc->num_q_heads / desc->num_kv_heads);
    int32_t lists = desc->num_lists ? desc->num_lists : desc->num_kv_heads;
    int64_t max_pages = (desc->max_kv_len + PAGE - 1) / PAGE;
    *p = make_problem(desc, args, kv_head);

    int64_t q_head_stride = or_dense(args->q_head_stride, oracle_row_bytes(desc->q_dtype, D));
    int64_t q_row_stride = or_dense(args->q_row_stride, oracle_row_bytes(desc->q_dtype, D) * desc->num_q_heads);
    double q[D];
    read_row(desc->q_dtype, at(args->q, row * q_row_stride + q_head * q_head_stride), q);

    int64_t list_row = or_dense(step->topk_row_stride, 4 * (int64_t)desc->topk);
    int64_t list_head = or_dense(step->topk_head_stride, 4 * desc->topk * step->total_q);
    const int32_t *list = at(step->topk, kv_head / (desc->num_kv_heads / lists) * list_head + row * list_row);
    int count = 0;
    for (int64_t page = 0; page < max_pages && page * PAGE <= place.position; page++) {
        bool listed = false;
        for (int32_t i = 0; i < desc->topk; i++)
            listed |= list[i] == page;
        if (!listed)
            continue;
        int32_t physical = physical_page(step, max_pages, place.request, page);
        if (physical < 0 || physical >= args->num_pages)
            continue;
        attend_page(p, q, physical, kv_head, min_i64(place.position - page * PAGE + 1, PAGE), &pages[count++]);
    }
    return count;
}

static bool answer_row(const msa_attention_desc *desc, const msa_step *step, const msa_attention_args *args, int64_t row,
                       int32_t q_head, double rounding, oracle_state *state)
{
    problem p;
    page_state pages[MSA_MAX_TOPK];
    int count = attend_row(desc, step, args, row, q_head, &p, pages);
    if (count >= 0)
        finish(&p, pages, count, rounding, state);
    return count >= 0;
}

bool oracle_attention_row(const msa_attention_desc *desc, const msa_step *step, const msa_attention_args *args,
                          int64_t row, int32_t q_head, oracle_state *state)
{
    return answer_row(desc, step, args, row, q_head, 0, state);
}

bool oracle_attention_merged(const msa_attention_desc *desc, const msa_step *step, const msa_attention_args *args,
                             int64_t row, int32_t q_head, oracle_state *state)
{
    return answer_row(desc, step, args, row, q_head, 0x1p-8, state); /* half a unit of BF16 */
}

int oracle_attention_partials(const msa_attention_desc *desc, const msa_step *step, const msa_attention_args *args,
                              int64_t row, int32_t q_head, oracle_state states[MSA_MAX_TOPK])
{
    problem p;
    page_state pages[MSA_MAX_TOPK];
    int count = attend_row(desc, step, args, row, q_head, &p, pages);
    for (int i = 0; i < count; i++)
        finish(&p, &pages[i], 1, 0, &states[i]);
    return count;
}

/* --------------------------------------------------------------------------------------------- index and selection */

int32_t oracle_index_row(const msa_index_desc *desc, const msa_step *step, const msa_index_args *args, int64_t row,
                         int32_t head, double *scores, double *bounds)
{
    oracle_place place = oracle_find_row(step, row);
    if (place.request < 0)
        return -1;
    if (place.position < 0)
        return 0;
    int64_t max_pages = (desc->max_kv_len + PAGE - 1) / PAGE;
    int64_t history = min_i64(place.position / PAGE, max_pages), pages = min_i64(place.position / PAGE + 1, max_pages);
    cache keys = dense_cache((cache){desc->k_dtype, true, false, args->index_k, args->index_k_page_stride, 0,
                                     args->index_k_token_stride, args->index_k_scale, args->index_k_scale_page_stride,
                                     0, args->index_k_scale_token_stride},
                             1);
    int64_t head_stride = or_dense(args->index_q_head_stride, oracle_row_bytes(desc->q_dtype, D));
    int64_t row_stride = or_dense(args->index_q_row_stride, oracle_row_bytes(desc->q_dtype, D) * desc->num_index_heads);
    double q[D], x[D], magnitude, sum_error = CHAIN_ERROR;
    if (oracle_fp8_sums && desc->q_dtype == MSA_E4M3 && desc->precision == MSA_PRECISION_FAST)
        sum_error = FP8_SUM_ERROR;
    read_row(desc->q_dtype, at(args->index_q, row * row_stride + head * head_stride), q);
    for (int64_t page = 0; page < history; page++) {
        int32_t physical = physical_page(step, max_pages, place.request, page);
        double best = -(double)INFINITY, bound = 0;
        for (int64_t t = 0; t < PAGE && physical >= 0 && physical < args->num_pages; t++) {
            read_token(&keys, physical, 0, t, x);
            double score = dot(q, x, &magnitude);
            if (isnan(score) || score > best)
                best = score;
            if (isnan(best))
                break;
            bound = fmax(bound, magnitude * sum_error);
        }
        scores[page] = best;
        if (bounds)
            bounds[page] = bound;
    }
    return (int32_t)pages;
}

/* Whether history page a is chosen before b. */
static bool better(const float *scores, int32_t a, int32_t b)
{
    if (isnan(scores[a]) || isnan(scores[b]))
        return isnan(scores[a]) == isnan(scores[b]) ? a < b : isnan(scores[b]);
    return scores[a] == scores[b] ? a < b : scores[a] > scores[b];
}

void oracle_select_row(const float *scores, int32_t n, int32_t k, int32_t init_pages, int32_t local_pages,
                       msa_topk_order order, int32_t *ids)
{
    int32_t first_end = init_pages < n ? init_pages : n;
    int32_t last_begin = n - local_pages > first_end ? n - local_pages : first_end;
    int32_t count = 0, places = k - (first_end + n - last_begin);
    for (int32_t page = 0; page < first_end; page++)
        ids[count++] = page;
    for (int32_t previous = -1; places > 0; places--) { /* the best page that comes after the previous choice */
        int32_t best = -1;
        for (int32_t page = first_end; page < last_begin; page++) {
            bool candidate = !(isinf(scores[page]) && scores[page] < 0);
            if (candidate && (previous < 0 || better(scores, previous, page)) &&
                (best < 0 || better(scores, page, best)))
                best = page;
        }
        if (best < 0)
            break;
        ids[count++] = previous = best;
    }
    for (int32_t page = last_begin; page < n; page++)
        ids[count++] = page;
    for (int32_t i = 1; order == MSA_TOPK_ORDER_PAGE && i < count; i++)
        for (int32_t j = i; j > 0 && ids[j] < ids[j - 1]; j--) {
            int32_t swap = ids[j];
            ids[j] = ids[j - 1];
            ids[j - 1] = swap;
        }
    for (; count < k; count++)
        ids[count] = -1;
}

/* ----------------------------------------------------------------------------------------------- combine and merge */

typedef struct term {
    double lse;
    msa_dtype dtype;
    const void *out;
} term;

static void join(const term *terms, int count, oracle_state *state)
{
    double max = -(double)INFINITY, sum = 0, relative[MAX_TERMS], weight[MAX_TERMS], x[D];
    for (int i = 0; i < count; i++)
        if (!isinf(terms[i].lse) && !(terms[i].lse <= max))
            max = terms[i].lse;
    memset(state, 0, sizeof *state);
    double error = 0;
    for (int i = 0; i < count; i++) {
        if (isinf(terms[i].lse))
            continue;
        weight[i] = exp(terms[i].lse - max);
        relative[i] = fabs(terms[i].lse - max) * PRODUCT_ERROR + FUNCTION_ERROR;
        sum += weight[i];
        error += weight[i] * relative[i];
    }
    state->lse = -(double)INFINITY;
    if (sum == 0) /* all are empty */
        return;
    for (int i = 0; i < count; i++) {
        if (isinf(terms[i].lse))
            continue;
        read_row(terms[i].dtype, terms[i].out, x);
        for (int d = 0; d < D; d++) {
            state->out[d] += weight[i] / sum * x[d];
            state->out_bound[d] += (weight[i] / sum * (relative[i] + error / sum + CHAIN_ERROR) + TINY) * fabs(x[d]);
        }
    }
    state->lse = max + log(sum);
    state->lse_bound = error / sum + fabs(state->lse) * PRODUCT_ERROR + FUNCTION_ERROR;
}

void oracle_combine_row(const msa_combine_args *args, int64_t row, int32_t q_head, oracle_state *state)
{
    int64_t heads = args->num_q_heads, row_bytes = oracle_row_bytes(args->o_partial_dtype, D);
    int64_t o_head = or_dense(args->o_partial_head_stride, row_bytes);
    int64_t o_row = or_dense(args->o_partial_row_stride, row_bytes * heads);
    int64_t o_split = or_dense(args->o_partial_split_stride, row_bytes * heads * args->rows);
    int64_t lse_head = or_dense(args->lse_partial_head_stride, 4);
    int64_t lse_row = or_dense(args->lse_partial_row_stride, 4 * heads);
    int64_t lse_split = or_dense(args->lse_partial_split_stride, 4 * heads * args->rows);
    int32_t count = args->num_splits;
    if (args->split_counts) {
        int64_t count_head = or_dense(args->split_counts_head_stride, 4);
        int64_t count_row = or_dense(args->split_counts_row_stride, 4 * (int64_t)args->num_kv_heads);
        int32_t kv_head = q_head / (args->num_q_heads / args->num_kv_heads);
        int32_t given = *(const int32_t *)at(args->split_counts, row * count_row + kv_head * count_head);
        count = given < 0 ? 0 : given < count ? given : count;
    }
    term terms[MAX_TERMS];
    for (int32_t s = 0; s < count; s++) {
        terms[s].lse = *(const float *)at(args->lse_partial, s * lse_split + row * lse_row + q_head * lse_head);
        terms[s].dtype = args->o_partial_dtype;
        terms[s].out = at(args->o_partial, s * o_split + row * o_row + q_head * o_head);
    }
    join(terms, count, state);
}

void oracle_merge_row(const msa_merge_args *args, int64_t row, int32_t q_head, oracle_state *state)
{
    term terms[MAX_TERMS];
    for (int32_t i = 0; i < args->num_states; i++) {
        const msa_merge_state *s = &args->states[i];
        int64_t row_bytes = oracle_row_bytes(s->out_dtype, D);
        int64_t out_row = or_dense(s->out_row_stride, row_bytes * args->num_q_heads);
        int64_t lse_row = or_dense(s->lse_row_stride, 4 * (int64_t)args->num_q_heads);
        terms[i].lse = *(const float *)at(s->lse, row * lse_row + q_head * or_dense(s->lse_head_stride, 4));
        terms[i].dtype = s->out_dtype;
        terms[i].out = at(s->out, row * out_row + q_head * or_dense(s->out_head_stride, row_bytes));
    }
    join(terms, args->num_states, state);
}

/* -------------------------------------------------------------------------------------------- quantise and convert */

static void quantise_block(const float x[16], float global_scale, uint8_t codes[8], uint8_t *scale)
{
    float largest = 0;
    bool finite = true;
    for (int i = 0; i < 16; i++) {
        finite &= isfinite(x[i]);
        largest = fmaxf(largest, fabsf(x[i]));
    }
    memset(codes, 0, 8);
    *scale = finite ? (uint8_t)oracle_encode(MSA_E4M3, largest / global_scale / 6.0f) : 0x7F;
    float s = (float)oracle_value(MSA_E4M3, scale);
    for (int i = 0; i < 16 && finite && s > 0; i++)
        codes[i / 2] |= (uint8_t)(oracle_encode(MSA_NVFP4, x[i] / global_scale / s) << (i % 2 * 4));
}

/* `cols` values of src_dtype become dst_dtype, with the scales of NVFP4 `scale_step` bytes apart. */
static void quantise(msa_dtype src_dtype, const void *src, msa_dtype dst_dtype, float descale, int64_t cols,
                     uint8_t *codes, uint8_t *scales, int64_t scale_step)
{
    for (int64_t i = 0; i < cols; i++) {
        float block[16];
        for (int64_t j = 0; j < 16 && dst_dtype == MSA_NVFP4 && i % 16 == 0; j++)
            block[j] = (float)oracle_element(src_dtype, src, NULL, 0, false, i + j);
        float x = (float)oracle_element(src_dtype, src, NULL, 0, false, i);
        if (dst_dtype == MSA_NVFP4 && i % 16 == 0)
            quantise_block(block, descale, codes + i / 2, scales + i / 16 * scale_step);
        if (dst_dtype == MSA_E4M3)
            codes[i] = (uint8_t)oracle_encode(MSA_E4M3, x / descale);
        if (dst_dtype == MSA_BF16 || dst_dtype == MSA_FP16) {
            uint16_t half = (uint16_t)oracle_encode(dst_dtype, x);
            memcpy(codes + 2 * i, &half, 2);
        }
    }
}

void oracle_quantise_row(const msa_quantise_args *args, int64_t row, uint8_t *codes, uint8_t *scales)
{
    int64_t stride = or_dense(args->src_row_stride, oracle_row_bytes(args->src_dtype, args->cols));
    quantise(args->src_dtype, at(args->src, row * stride), args->dst_dtype, args->descale ? *args->descale : 1.0f,
             args->cols, codes, scales, 1);
}

void oracle_convert_row(const msa_convert_args *args, int64_t row, double *values)
{
    const void *src =
        at(args->src, row * or_dense(args->src_row_stride, oracle_row_bytes(args->src_dtype, args->cols)));
    const uint8_t *scale = NULL;
    if (args->src_dtype == MSA_NVFP4)
        scale = at(args->scale, row * or_dense(args->scale_row_stride, args->cols / 16));
    for (int64_t i = 0; i < args->cols; i++)
        values[i] = oracle_element(args->src_dtype, src, scale, 1, args->dst_dtype == MSA_E4M3, i);
}

static void write_token(const cache *c, int32_t head, int64_t slot, msa_dtype src_dtype, const void *src, float descale)
{
    uint8_t *codes = (uint8_t *)at(c->data, token_offset(c, slot / PAGE, head, slot % PAGE));
    uint8_t *scales = NULL;
    if (c->dtype == MSA_NVFP4)
        scales = (uint8_t *)at(c->scale, scale_offset(c, slot / PAGE, head, slot % PAGE));
    if (src_dtype == c->dtype)
        memcpy(codes, src, (size_t)oracle_row_bytes(src_dtype, D));
    else
        quantise(src_dtype, src, c->dtype, descale, D, codes, scales, c->quad ? 4 : 1);
}

void oracle_cache_write(const msa_cache_write_args *args)
{
    int32_t heads = args->num_kv_heads;
    int64_t row_bytes = oracle_row_bytes(args->src_dtype, D);
    cache k = dense_cache((cache){args->kv_dtype, false, false, args->k, args->k_page_stride, args->k_head_stride,
                                  args->k_token_stride, args->k_scale, args->k_scale_page_stride,
                                  args->k_scale_head_stride, args->k_scale_token_stride},
                          heads);
    cache v = dense_cache((cache){args->kv_dtype, false, args->v_scale_order == MSA_SCALE_QUAD, args->v,
                                  args->v_page_stride, args->v_head_stride, args->v_token_stride, args->v_scale,
                                  args->v_scale_page_stride, args->v_scale_head_stride, args->v_scale_token_stride},
                          heads);
    cache index_k = dense_cache((cache){args->index_k_dtype, false, false, args->index_k, args->index_k_page_stride, 0,
                                        args->index_k_token_stride, args->index_k_scale,
                                        args->index_k_scale_page_stride, 0, args->index_k_scale_token_stride},
                                1);
    int64_t k_head = or_dense(args->k_new_head_stride, row_bytes),
            v_head = or_dense(args->v_new_head_stride, row_bytes);
    int64_t k_row = or_dense(args->k_new_row_stride, row_bytes * heads);
    int64_t v_row = or_dense(args->v_new_row_stride, row_bytes * heads);
    int64_t index_k_row = or_dense(args->index_k_new_row_stride, row_bytes);
    for (int64_t i = 0; i < args->tokens; i++) {
        int64_t slot = args->slot_mapping[i];
        if (slot < 0 || slot / PAGE >= args->num_pages)
            continue;
        for (int32_t h = 0; h < heads; h++) {
            if (args->k)
                write_token(&k, h, slot, args->src_dtype, at(args->k_new, i * k_row + h * k_head),
                            (float)scalar(args->k_descale, args->k_descale_stride, h));
            if (args->v)
                write_token(&v, h, slot, args->src_dtype, at(args->v_new, i * v_row + h * v_head),
                            (float)scalar(args->v_descale, args->v_descale_stride, h));
        }
        if (args->index_k)
            write_token(&index_k, 0, slot, args->src_dtype, at(args->index_k_new, i * index_k_row), 1.0f);
    }
}
