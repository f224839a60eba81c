/* SPDX-License-Identifier: MIT
 *
 * visible.c - which rows and keys a problem makes visible, and the poisoning of all other memory.
 */
#include "case.h"
#include "cli.h"

#include <stdlib.h>
#include <string.h>

/* Rows first..first+count-1 belong to request b, whose keys number `keys`. False if its lengths make no sense. */
struct request {
    int64_t first, count, keys;
};

static bool get_request(const struct problem *problem, int32_t b, struct request *request)
{
    const int32_t *rows = problem->cu_seqlens_q->data;
    request->first = rows[b];
    request->count = (int64_t)rows[b + 1] - rows[b];
    if (problem->kv_lens) {
        request->keys = ((const int32_t *)problem->kv_lens->data)[b];
    } else {
        const int32_t *ends = problem->cu_seqlens_k->data;
        request->keys = (int64_t)ends[b + 1] - ends[b];
    }
    return request->first >= 0 && request->count >= 0 && rows[b + 1] <= problem->total_q && request->keys >= 0;
}

static int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int64_t *problem_positions(const struct problem *problem)
{
    int64_t *positions = malloc((size_t)problem->total_q * sizeof(*positions) + 1);
    if (!positions) {
        cli_error("no memory for the positions of %lld rows", (long long)problem->total_q);
        return NULL;
    }
    for (int64_t row = 0; row < problem->total_q; row++)
        positions[row] = POSITION_PADDING;
    struct request request;
    for (int32_t b = 0; b < problem->batch; b++) {
        if (!get_request(problem, b, &request))
            continue;
        for (int64_t i = 0; i < request.count; i++)
            positions[request.first + i] = request.keys - request.count + i;
    }
    return positions;
}

/* ---- poison */

/* For each (page, head) of a cache: how many of its tokens, from the first, some row sees. */
struct visibility {
    unsigned char *tokens;
    int64_t num_pages, num_heads;
};

/* Logical page `page` of request b is seen up to (not including) key `end`. */
static void see(struct visibility *seen, const struct problem *problem, int32_t b, int64_t page, int64_t head,
                int64_t end)
{
    const int32_t *table = problem->page_table->data;
    int64_t physical = page < problem->max_pages ? table[b * problem->max_pages + page] : -1;
    if (physical < 0 || physical >= seen->num_pages)
        return;
    unsigned char *tokens = &seen->tokens[physical * seen->num_heads + head];
    int64_t count = min(end - page * 128, 128);
    if (count > *tokens)
        *tokens = (unsigned char)count;
}

/* Keys 0..end-1 of request b, for all heads. */
static void see_keys(struct visibility *seen, const struct problem *problem, int32_t b, int64_t end)
{
    int64_t pages = min((end + 127) / 128, problem->max_pages);
    for (int64_t page = 0; page < pages; page++) {
        for (int64_t head = 0; head < seen->num_heads; head++)
            see(seen, problem, b, page, head, end);
    }
}

/* What the lists of request b name. */
static void see_lists(struct visibility *seen, const struct problem *problem, int32_t b, const struct request *request)
{
    const int32_t *lists = problem->list->data;
    for (int64_t head = 0; head < seen->num_heads; head++) {
        for (int64_t i = 0; i < request->count; i++) {
            const int32_t *list = lists + (head * problem->total_q + request->first + i) * problem->topk;
            int64_t end = request->keys - request->count + i + 1;
            for (int32_t slot = 0; slot < problem->topk; slot++) {
                if (list[slot] >= 0 && (int64_t)list[slot] * 128 < end)
                    see(seen, problem, b, list[slot], head, end);
            }
        }
    }
}

static void poison_rows(struct view *view, int64_t row_bytes, const struct visibility *seen, int byte)
{
    if (!view->tensor)
        return;
    for (int64_t page = 0; page < seen->num_pages; page++) {
        for (int64_t head = 0; head < seen->num_heads; head++) {
            char *base =
                (char *)view->tensor->data + view->offset + page * view->page_stride + head * view->head_stride;
            for (int64_t token = seen->tokens[page * seen->num_heads + head]; token < 128; token++)
                memset(base + token * view->token_stride, byte, (size_t)row_bytes);
        }
    }
}

/* Scales in quad order: token t's lie at (t/4)*32 + g*4 + t%4. */
static void poison_quads(struct view *view, const struct visibility *seen, int byte)
{
    for (int64_t page = 0; page < seen->num_pages; page++) {
        for (int64_t head = 0; head < seen->num_heads; head++) {
            char *base =
                (char *)view->tensor->data + view->offset + page * view->page_stride + head * view->head_stride;
            for (int64_t token = seen->tokens[page * seen->num_heads + head]; token < 128; token++) {
                for (int64_t group = 0; group < 8; group++)
                    base[token / 4 * 32 + group * 4 + token % 4] = (char)byte;
            }
        }
    }
}

static int64_t row_bytes(msa_dtype dtype)
{
    return dtype == MSA_NVFP4 ? 64 : dtype == MSA_E4M3 ? 128 : 256;
}

static void poison_cache(struct problem *problem, const struct visibility *seen, int byte)
{
    poison_rows(&problem->k, row_bytes(problem->kv_dtype), seen, byte);
    poison_rows(&problem->v, row_bytes(problem->kv_dtype), seen, byte);
    poison_rows(&problem->k_scale, 8, seen, byte);
    if (problem->v_scale.tensor && problem->v_scale_order == MSA_SCALE_QUAD)
        poison_quads(&problem->v_scale, seen, byte);
    else
        poison_rows(&problem->v_scale, 8, seen, byte);
}

static void poison_index_cache(struct problem *problem, const struct visibility *seen, int byte)
{
    poison_rows(&problem->index_k, row_bytes(problem->index_k_dtype), seen, byte);
    poison_rows(&problem->index_k_scale, 8, seen, byte);
}

static void poison_table(struct problem *problem, int32_t b, int64_t used_pages, int byte)
{
    int32_t *slots = (int32_t *)problem->page_table->data + b * problem->max_pages;
    if (used_pages < problem->max_pages)
        memset(slots + used_pages, byte, (size_t)(problem->max_pages - used_pages) * sizeof(*slots));
}

/* Rows of [outer, total_q, ...] that no request owns. */
static void poison_padding(struct tensor *tensor, int64_t outer, int64_t total_q, const int64_t *positions, int byte)
{
    if (!tensor || !tensor->bytes)
        return;
    size_t bytes = tensor->bytes / (size_t)(outer * total_q);
    for (int64_t i = 0; i < outer * total_q; i++) {
        if (positions[i % total_q] == POSITION_PADDING)
            memset((char *)tensor->data + (size_t)i * bytes, byte, bytes);
    }
}

static int make_visibility(struct visibility *seen, int64_t num_pages, int64_t num_heads)
{
    *seen = (struct visibility){calloc((size_t)(num_pages * num_heads) + 1, 1), num_pages, num_heads};
    return seen->tokens ? CLI_OK : cli_error("no memory for a map of %lld pages", (long long)num_pages);
}

static void poison_all(struct problem *problem, struct visibility *cache, struct visibility *index_cache,
                       const int64_t *positions, int byte)
{
    struct request request;
    for (int32_t b = 0; b < problem->batch; b++) {
        if (!get_request(problem, b, &request))
            continue;
        bool idle = request.count == 0 || request.keys == 0;
        if (op_has_index(problem->op) && !idle)
            see_keys(index_cache, problem, b,
                     (request.keys - 1) / 128 * 128); /* only pages before the last row's own */
        if (problem->list)
            see_lists(cache, problem, b, &request);
        else if (problem->op == OP_LAYER && !idle)
            see_keys(cache, problem, b, request.keys);
    }
    if (op_has_attention(problem->op))
        poison_cache(problem, cache, byte);
    if (op_has_index(problem->op))
        poison_index_cache(problem, index_cache, byte);
    for (int32_t b = 0; b < problem->batch; b++) {
        if (get_request(problem, b, &request))
            poison_table(problem, b, request.count ? (request.keys + 127) / 128 : 0, byte);
    }
    poison_padding(problem->q, 1, problem->total_q, positions, byte);
    poison_padding(problem->index_q, 1, problem->total_q, positions, byte);
    poison_padding(problem->list, problem->num_kv_heads, problem->total_q, positions, byte);
}

int problem_poison(struct problem *problem, int byte)
{
    struct visibility cache = {NULL, 0, 0}, index_cache = {NULL, 0, 0};
    int64_t *positions = problem_positions(problem);
    int status = CLI_BAD;
    if (positions && make_visibility(&cache, problem->num_pages, problem->num_kv_heads) == CLI_OK &&
        make_visibility(&index_cache, problem->num_index_pages, 1) == CLI_OK) {
        poison_all(problem, &cache, &index_cache, positions, byte);
        status = CLI_OK;
    }
    free(cache.tokens);
    free(index_cache.tokens);
    free(positions);
    return status;
}
