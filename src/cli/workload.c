/* SPDX-License-Identifier: MIT
 *
 * workload.c - lengths, tensors and useful work of a made problem.
 */
#include "workload.h"

#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- lengths */

int shape_set(struct shape *shape, int32_t batch, const int64_t *query_lens, const int64_t *prefix_lens)
{
    *shape = (struct shape){.batch = batch};
    shape->query_lens = malloc((size_t)batch * sizeof(*shape->query_lens));
    shape->kv_lens = malloc((size_t)batch * sizeof(*shape->kv_lens));
    if (!shape->query_lens || !shape->kv_lens)
        return cli_error("out of memory");
    for (int32_t b = 0; b < batch; b++) {
        int64_t kv_len = prefix_lens[b] + query_lens[b];
        if (query_lens[b] < 0)
            return cli_error("request %d has %lld queries", b, (long long)query_lens[b]);
        if (kv_len < 0 || kv_len > MSA_MAX_KV_LEN)
            return cli_error("request %d has %lld keys: must be 0..%d", b, (long long)kv_len, MSA_MAX_KV_LEN);
        shape->query_lens[b] = (int32_t)query_lens[b];
        shape->kv_lens[b] = (int32_t)kv_len;
        shape->total_q += query_lens[b];
        shape->total_pages += (kv_len + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE;
        shape->max_kv_len = kv_len > shape->max_kv_len ? kv_len : shape->max_kv_len;
    }
    if (shape->total_q > INT32_MAX || shape->total_pages > INT32_MAX)
        return cli_error("%lld queries and %lld pages: at most 2^31-1 of each", (long long)shape->total_q,
                         (long long)shape->total_pages);
    return CLI_OK;
}

int shape_from_point(struct shape *shape, const struct point *point)
{
    bool decode = axis_applies(point, AXIS_NEW);
    int64_t queries = point->at[decode ? AXIS_NEW : AXIS_QUERIES];
    int64_t prefix = decode ? point->at[AXIS_CONTEXT] - queries : point->at[AXIS_PREFIX];
    int32_t batch = (int32_t)point->at[AXIS_BATCH];
    int64_t *lens = malloc((size_t)batch * 2 * sizeof(*lens));
    *shape = (struct shape){0};
    if (!lens)
        return cli_error("out of memory");
    for (int32_t b = 0; b < batch; b++) {
        lens[b] = queries;
        lens[batch + b] = prefix;
    }
    int status = shape_set(shape, batch, lens, lens + batch);
    free(lens);
    return status;
}

void shape_free(struct shape *shape)
{
    free(shape->query_lens);
    free(shape->kv_lens);
    *shape = (struct shape){0};
}

/* ---- useful work */

static int64_t row_bytes(msa_dtype dtype)
{
    switch (dtype) {
    case MSA_NVFP4:
        return MSA_HEAD_DIM / 2 + MSA_HEAD_DIM / 16;
    case MSA_E4M3:
        return MSA_HEAD_DIM;
    default:
        return 2 * MSA_HEAD_DIM;
    }
}

int64_t page_bytes(msa_dtype dtype)
{
    return MSA_PAGE_SIZE * row_bytes(dtype);
}

/* Distinct pages that the rows of one request and list name. */
static int64_t distinct_pages(const int32_t *rows, int64_t ids, unsigned char *seen, int64_t max_pages)
{
    int64_t count = 0;
    memset(seen, 0, (size_t)max_pages);
    for (int64_t i = 0; i < ids; i++) {
        if (rows[i] >= 0 && !seen[rows[i]])
            seen[rows[i]] = 1, count++;
    }
    return count;
}

/* The index reads a request's history pages once, and each row's scores are written; a list is written or read by
 * each. */
static void count_index(struct workload *workload)
{
    const struct problem *problem = &workload->problem;
    int64_t heads = problem->num_index_heads, pages = 0, scores = 0;
    for (int32_t b = 0; b < workload->shape.batch; b++) {
        int64_t kv_len = workload->shape.kv_lens[b], queries = workload->shape.query_lens[b];
        pages += queries && kv_len ? (kv_len - 1) / MSA_PAGE_SIZE : 0;
        for (int64_t position = kv_len < queries ? 0 : kv_len - queries; position < kv_len; position++)
            scores += position / MSA_PAGE_SIZE;
    }
    bool selects = problem->index_outputs & MSA_INDEX_SELECTION;
    workload->flops += 2.0 * MSA_PAGE_SIZE * MSA_HEAD_DIM * (double)(heads * scores);
    workload->bytes += (double)(pages * page_bytes(problem->index_k_dtype) + heads * scores * 4 +
                                workload->shape.total_q * heads * row_bytes(problem->index_q_dtype) +
                                (selects ? workload->shape.total_q * heads * problem->topk * 4 : 0));
}

/* Attention reads each page that a request's rows name once a KV head; a layer, whose lists are not known before it
 * runs, as many as its rows can name. */
static int count_attention(struct workload *workload)
{
    const struct problem *problem = &workload->problem;
    const struct shape *shape = &workload->shape;
    int64_t k = problem->topk, keys = 0, pages = 0, first = 0;
    unsigned char *seen = malloc((size_t)problem->max_pages + 1);
    if (!seen)
        return cli_error("out of memory");
    for (int32_t b = 0; b < shape->batch; b++) {
        int64_t kv_len = shape->kv_lens[b], queries = shape->query_lens[b];
        int64_t request_pages = (kv_len + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE;
        for (int64_t position = kv_len < queries ? 0 : kv_len - queries; position < kv_len; position++) {
            int64_t own = position / MSA_PAGE_SIZE;
            keys += ((k < own + 1 ? k : own + 1) - 1) * MSA_PAGE_SIZE + position % MSA_PAGE_SIZE + 1;
        }
        for (int32_t head = 0; head < problem->num_kv_heads; head++) {
            if (problem->list)
                pages += distinct_pages((const int32_t *)problem->list->data + (head * shape->total_q + first) * k,
                                        queries * k, seen, problem->max_pages);
            else
                pages += queries * k < request_pages ? queries * k : request_pages;
        }
        first += queries;
    }
    free(seen);
    workload->flops += 4.0 * MSA_HEAD_DIM * problem->num_q_heads * (double)keys;
    workload->bytes +=
        (double)(2 * pages * page_bytes(problem->kv_dtype) +
                 shape->total_q * problem->num_q_heads * (row_bytes(problem->q_dtype) + row_bytes(MSA_BF16)) +
                 shape->total_q * problem->num_kv_heads * k * 4);
    return CLI_OK;
}

/* ---- tensors */

/* Where a tensor of normal values belongs, and its extents above the 128 elements of a row. */
static int add_normal(struct workload *workload, const char *name, msa_dtype dtype, enum stream stream, int rank,
                      const int64_t *outer, int threads)
{
    static const enum tensor_dtype dtypes[] = {
        [MSA_BF16] = TENSOR_BF16, [MSA_FP16] = TENSOR_F16, [MSA_E4M3] = TENSOR_F8_E4M3, [MSA_NVFP4] = TENSOR_U8};
    int64_t shape[TENSOR_MAX_RANK], count = MSA_HEAD_DIM;
    for (int i = 0; i < rank; i++)
        count *= shape[i] = outer[i];
    shape[rank] = dtype == MSA_NVFP4 ? MSA_HEAD_DIM / 2 : MSA_HEAD_DIM;
    struct tensor *data = tensor_file_add(&workload->file, name, dtypes[dtype], rank + 1, shape), *scale = NULL;
    if (!data)
        return CLI_BAD;
    if (dtype == MSA_NVFP4) {
        char scale_name[32];
        snprintf(scale_name, sizeof(scale_name), "%s_scale", name);
        shape[rank] = MSA_HEAD_DIM / 16;
        if (!(scale = tensor_file_add(&workload->file, scale_name, TENSOR_F8_E4M3, rank + 1, shape)))
            return CLI_BAD;
    }
    fill_normal(dtype, data->data, scale ? scale->data : NULL, 0, count, (uint64_t)workload->point.at[AXIS_SEED],
                stream, threads);
    return CLI_OK;
}

static struct tensor *add_ints(struct workload *workload, const char *name, int rank, const int64_t *shape)
{
    return tensor_file_add(&workload->file, name, TENSOR_I32, rank, shape);
}

static int add_lengths(struct workload *workload)
{
    const struct shape *shape = &workload->shape;
    struct tensor *starts = add_ints(workload, "cu_seqlens_q", 1, (int64_t[]){shape->batch + 1});
    struct tensor *kv_lens = add_ints(workload, "kv_lens", 1, (int64_t[]){shape->batch});
    if (!starts || !kv_lens)
        return CLI_BAD;
    int32_t *start = starts->data;
    for (int32_t b = 0; b < shape->batch; b++) {
        start[b + 1] = start[b] + shape->query_lens[b];
        ((int32_t *)kv_lens->data)[b] = shape->kv_lens[b];
    }
    return CLI_OK;
}

static int64_t max_pages(const struct shape *shape)
{
    return shape->max_kv_len ? (shape->max_kv_len + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE : 1;
}

/* Each region of the pool takes the next total_pages of the physical pages in random order. */
void workload_table(const struct workload *workload, int rotation, int32_t *table)
{
    int64_t width = max_pages(&workload->shape), total = workload->shape.total_pages;
    const int32_t *next = workload->pages + rotation % workload->regions * total;
    for (int32_t b = 0; b < workload->shape.batch; b++) {
        int64_t pages = ((int64_t)workload->shape.kv_lens[b] + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE;
        for (int64_t p = 0; p < width; p++)
            table[b * width + p] = p < pages ? *next++ : -1;
    }
}

void workload_lists(const struct workload *workload, int rotation, int32_t *lists)
{
    const int64_t *at = workload->point.at;
    select_pages(lists, &workload->shape, (int32_t)at[AXIS_KV_HEADS], (int32_t)at[AXIS_K],
                 (enum pattern)at[AXIS_PATTERN], (uint64_t)at[AXIS_SEED], rotation);
}

/* Tolerances for FP32 arithmetic: an output rounds to 16 bits, and with FP8 a probability that lies next to a rounding
 * midpoint may round either way. */
static int add_metadata(struct workload *workload, msa_dtype q_dtype)
{
    struct tensor_file *file = &workload->file;
    enum bench_op op = workload->point.op;
    char k[16];
    snprintf(k, sizeof(k), "%lld", (long long)workload->point.at[AXIS_K]);
    char *note = NULL;
    size_t size;
    FILE *stream = open_memstream(&note, &size);
    if (!stream)
        return cli_error("out of memory");
    fputs("made by msa make ", stream);
    point_print(stream, &workload->point, false);
    if (fclose(stream) != 0) {
        free(note);
        return cli_error("out of memory");
    }
    int status = tensor_file_set_metadata(file, "op", bench_op_names[op]) ||
                         tensor_file_set_metadata(file, "topk", k) || tensor_file_set_metadata(file, "note", note) ||
                         tensor_file_set_metadata(file, "scores_atol", "2e-4") ||
                         tensor_file_set_metadata(file, "scores_rtol", "2e-4") ||
                         tensor_file_set_metadata(file, "lse_atol", "2e-5") ||
                         tensor_file_set_metadata(file, "lse_rtol", "2e-5") ||
                         tensor_file_set_metadata(file, "out_atol", "2e-3") ||
                         tensor_file_set_metadata(file, "out_rtol", q_dtype == MSA_E4M3 ? "2e-2" : "1e-2")
                     ? CLI_BAD
                     : CLI_OK;
    free(note);
    return status;
}

int memory_check(const char *what, double bytes)
{
    double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    return bytes < 0.9 * memory ? CLI_OK
                                : cli_error("%s: these axes need %.1f GB of memory, the machine has %.1f", what,
                                            bytes * 1e-9, memory * 1e-9);
}

/* Bytes of everything that a run holds. */
static double memory_needed(const struct workload *workload, const struct format *format,
                            const struct format *index_format, int64_t pool)
{
    const int64_t *at = workload->point.at;
    double queries = (double)workload->shape.total_q, pages = (double)pool, bytes = 0;
    if (format)
        bytes += queries * (double)at[AXIS_Q_HEADS] * (double)(row_bytes(format->q) + row_bytes(MSA_BF16) + 4) +
                 queries * (double)(at[AXIS_KV_HEADS] * at[AXIS_K] * 4) +
                 pages * (double)(2 * at[AXIS_KV_HEADS] * page_bytes(format->kv));
    if (index_format)
        bytes += queries * (double)at[AXIS_INDEX_HEADS] *
                     (double)(row_bytes(index_format->q) + 4 * max_pages(&workload->shape) + 4 * at[AXIS_K]) +
                 pages * (double)page_bytes(index_format->kv);
    return bytes;
}

/* How many times `bytes` fit the footprint, rounded up. */
static int rotations_over(size_t footprint, double bytes)
{
    double rotations = bytes > 0 ? ceil((double)footprint / bytes) : 1;
    return rotations < 1 ? 1 : rotations > MAX_ROTATIONS ? MAX_ROTATIONS : (int)rotations;
}

static int make(struct workload *workload, size_t footprint, int threads)
{
    const struct point *point = &workload->point;
    const struct shape *shape = &workload->shape;
    bool attention = point->op != BENCH_INDEX, index = point->op == BENCH_INDEX || point->op == BENCH_LAYER;
    const struct format *format = attention ? &formats[point->at[AXIS_FORMAT]] : NULL;
    const struct format *index_format =
        index ? &formats[point->at[point->op == BENCH_LAYER ? AXIS_INDEX_FORMAT : AXIS_FORMAT]] : NULL;
    if (attention && index && point->at[AXIS_KV_HEADS] % point->at[AXIS_INDEX_HEADS] != 0)
        return cli_error("--kv-heads: %lld is not a multiple of the %lld index heads",
                         (long long)point->at[AXIS_KV_HEADS], (long long)point->at[AXIS_INDEX_HEADS]);
    int64_t queries = shape->total_q, q_heads = point->at[AXIS_Q_HEADS], kv_heads = point->at[AXIS_KV_HEADS];
    if (attention && (q_heads % kv_heads != 0 || q_heads / kv_heads > MSA_MAX_GQA_RATIO))
        return cli_error("--q-heads: %lld is not 1 to %d times the %lld KV heads", (long long)q_heads,
                         MSA_MAX_GQA_RATIO, (long long)kv_heads);

    double region = (double)shape->total_pages * (double)((format ? 2 * kv_heads * page_bytes(format->kv) : 0) +
                                                          (index_format ? page_bytes(index_format->kv) : 0));
    workload->regions = rotations_over(footprint, region);
    int64_t pool = shape->total_pages * workload->regions;
    if (memory_check(bench_op_names[point->op], memory_needed(workload, format, index_format, pool)) ||
        add_lengths(workload))
        return CLI_BAD;
    if (!(workload->pages = random_permutation(pool, (uint64_t)point->at[AXIS_SEED])))
        return cli_error("out of memory");
    struct tensor *table = add_ints(workload, "page_table", 2, (int64_t[]){shape->batch, max_pages(shape)});
    if (!table)
        return CLI_BAD;
    workload_table(workload, 0, table->data);

    if (format) {
        const int64_t cache[] = {pool, kv_heads, MSA_PAGE_SIZE};
        if (add_normal(workload, "q", format->q, STREAM_Q, 2, (int64_t[]){queries, q_heads}, threads) ||
            add_normal(workload, "k", format->kv, STREAM_K, 3, cache, threads) ||
            add_normal(workload, "v", format->kv, STREAM_V, 3, cache, threads))
            return CLI_BAD;
    }
    if (format && !index) {
        struct tensor *lists = add_ints(workload, "topk", 3, (int64_t[]){kv_heads, queries, point->at[AXIS_K]});
        if (!lists)
            return CLI_BAD;
        workload_lists(workload, 0, lists->data);
    }
    if (index_format && (add_normal(workload, "index_q", index_format->q, STREAM_INDEX_Q, 2,
                                    (int64_t[]){queries, point->at[AXIS_INDEX_HEADS]}, threads) ||
                         add_normal(workload, "index_k", index_format->kv, STREAM_INDEX_K, 2,
                                    (int64_t[]){pool, MSA_PAGE_SIZE}, threads)))
        return CLI_BAD;
    if (add_metadata(workload, format ? format->q : index_format->q) ||
        problem_from_file(&workload->problem, &workload->file, bench_op_names[point->op]))
        return CLI_BAD;
    if (point->at[AXIS_SCORES_ONLY])
        workload->problem.index_outputs = MSA_INDEX_SCORES;

    if (index)
        count_index(workload);
    if (attention && count_attention(workload))
        return CLI_BAD;
    workload->rotations = rotations_over(footprint, workload->bytes);
    return CLI_OK;
}

int workload_open(struct workload *workload, const struct point *point, struct shape *shape, size_t footprint,
                  int threads)
{
    *workload = (struct workload){.point = *point, .shape = *shape};
    *shape = (struct shape){0};
    int status = make(workload, footprint, threads);
    if (status != CLI_OK)
        workload_close(workload);
    return status;
}

void workload_close(struct workload *workload)
{
    tensor_file_free(&workload->file);
    free(workload->pages);
    shape_free(&workload->shape);
    *workload = (struct workload){0};
}
