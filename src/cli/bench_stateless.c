/* SPDX-License-Identifier: MIT
 *
 * bench_stateless.c - topk, combine, quantise and cache write as subjects of a timing.
 *
 * Inputs and outputs of all rotations lie one after the other in each buffer. A call of a few microseconds is repeated
 * until the clock costs nothing; the repeats go through the rotations too.
 */
#include "bench.h"
#include "parallel.h"
#include "random.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_BUFFERS = 6 };
static const double MIN_SAMPLE_SECONDS = 50e-6;

struct stateless {
    msa_context *context;
    struct device *device;
    int rotations, next, repeats;
    msa_status (*run)(struct stateless *stateless, int rotation);
    struct {
        char *data;
        size_t bytes; /* of one rotation */
    } buffers[MAX_BUFFERS];
    int num_buffers;
    bool failed; /* a buffer could not be made */
    union {
        msa_topk_args topk;
        msa_combine_args combine;
        msa_quantise_args quantise;
        msa_cache_write_args cache;
    } args; /* of rotation 0 */
};

static int stateless_call(struct subject *subject, int rotation, double *run, double *total)
{
    (void)rotation; /* a call goes through several */
    struct stateless *stateless = subject->self;
    double elapsed = 0;
    int status = device_begin(stateless->device);
    for (int i = 0; i < stateless->repeats && status == CLI_OK; i++) {
        if (stateless->run(stateless, stateless->next) != MSA_SUCCESS)
            status = cli_library_error(subject->name);
        stateless->next = (stateless->next + 1) % stateless->rotations;
    }
    int ended = device_end(stateless->device, &elapsed);
    if (status != CLI_OK || ended != CLI_OK)
        return CLI_BAD;
    *run = *total = elapsed / stateless->repeats;
    if (elapsed < MIN_SAMPLE_SECONDS)
        stateless->repeats *= 2;
    return CLI_OK;
}

static int stateless_finish(struct subject *subject)
{
    (void)subject; /* these calls have no error word */
    return CLI_OK;
}

static void stateless_close(struct subject *subject)
{
    struct stateless *stateless = subject->self;
    for (int i = 0; i < stateless->num_buffers; i++)
        device_free(stateless->device, stateless->buffers[i].data);
    free(stateless);
}

/* The strongest kernel that this context can run (the list is in ascending order); takes NULL: any formats. None for
 * what the drivers do themselves: the copy of 16-bit rows into pages. */
static void find_kernel(struct subject *subject, const char *operation, const char *takes)
{
    const struct stateless *stateless = subject->self;
    msa_kernel_info info = MSA_KERNEL_INFO_INIT;
    for (size_t i = 0; msa_kernel_get(stateless->context, i, &info) == MSA_SUCCESS; i++) {
        if (info.available && strcmp(info.operation, operation) == 0 && (!takes || strcmp(info.formats, takes) == 0))
            snprintf(subject->kernel, sizeof(subject->kernel), "%s", info.name);
    }
}

/* Rotations that make `bytes` a call cover the footprint. CLI_BAD if all of it is more than the machine has. */
static int stateless_open(struct subject *subject, const char *name, struct device *device, double bytes,
                          size_t footprint, msa_status (*run)(struct stateless *stateless, int rotation))
{
    double rotations = bytes > 0 ? (double)footprint / bytes : 0;
    int count = rotations > MAX_ROTATIONS ? MAX_ROTATIONS : (int)rotations + 1;
    if (memory_check(name, bytes * count) != CLI_OK)
        return CLI_BAD;
    struct stateless *stateless = calloc(1, sizeof(*stateless));
    if (!stateless)
        return cli_error("out of memory");
    stateless->context = device->context;
    stateless->device = device;
    stateless->rotations = count;
    stateless->repeats = 1;
    stateless->run = run;
    *subject = (struct subject){.name = name,
                                .strategy = "",
                                .precision = "exact",
                                .bytes = bytes,
                                .device = device,
                                .rotations = count,
                                .call = stateless_call,
                                .finish = stateless_finish,
                                .close = stateless_close,
                                .self = stateless};
    return CLI_OK;
}

/* A buffer of `bytes` a rotation; the address is that of rotation 0. After a failure only NULL, so that one message is
 * printed. */
static void *add_buffer(struct stateless *stateless, size_t bytes)
{
    bytes = (bytes + 255) / 256 * 256;
    void *data = stateless->failed ? NULL : device_alloc(stateless->device, bytes * (size_t)stateless->rotations);
    stateless->failed = !data;
    if (data) {
        stateless->buffers[stateless->num_buffers].data = data;
        stateless->buffers[stateless->num_buffers++].bytes = bytes;
    }
    return data;
}

/* The address of another rotation, by an address within a buffer's rotation 0. */
static void *rotated(const struct stateless *stateless, const void *pointer, int rotation)
{
    for (int i = 0; i < stateless->num_buffers; i++) {
        char *data = stateless->buffers[i].data;
        if ((const char *)pointer >= data && (const char *)pointer < data + stateless->buffers[i].bytes)
            return (char *)pointer + (size_t)rotation * stateless->buffers[i].bytes;
    }
    return (void *)pointer;
}

/* Moves host data in, or fills with normal values, all rotations alike but for the position in the stream. */
static int fill(struct stateless *stateless, void *pointer, msa_dtype dtype, size_t bytes, enum stream stream,
                const struct point *point, int threads)
{
    int64_t count = (int64_t)bytes / (dtype == MSA_F32 ? 4 : 2);
    void *host = malloc(bytes);
    int status = host ? CLI_OK : cli_error("out of memory");
    for (int r = 0; status == CLI_OK && r < stateless->rotations; r++) {
        fill_normal(dtype, host, NULL, r * count, count, (uint64_t)point->at[AXIS_SEED], stream, threads);
        status = device_copy_in(stateless->device, rotated(stateless, pointer, r), host, bytes);
    }
    free(host);
    return status;
}

/* ---- topk */

static msa_status run_topk(struct stateless *stateless, int rotation)
{
    msa_topk_args args = stateless->args.topk;
    args.scores = rotated(stateless, args.scores, rotation);
    args.topk = rotated(stateless, args.topk, rotation);
    return msa_topk(stateless->context, &args, stateless->device->stream);
}

/* Uniform over [0, 1), rising with the page, or all 1. */
static int fill_scores(struct stateless *stateless, const struct point *point, const float *scores, int32_t *valid)
{
    int64_t rows = point->at[AXIS_ROWS], pages = point->at[AXIS_PAGES];
    float *row = malloc((size_t)pages * sizeof(*row));
    int32_t n = (int32_t)pages;
    int status = row ? CLI_OK : cli_error("out of memory");
    for (int64_t r = 0; status == CLI_OK && r < rows * stateless->rotations; r++) {
        struct draws draws;
        draws_begin(&draws, (uint64_t)point->at[AXIS_SEED], STREAM_SCORES, (uint32_t)r, (uint32_t)(r >> 32));
        for (int64_t p = 0; p < pages; p++)
            row[p] = point->at[AXIS_SCORES] == SCORES_RANDOM      ? (float)(draw(&draws) >> 8) * 0x1p-24f
                     : point->at[AXIS_SCORES] == SCORES_ASCENDING ? (float)p
                                                                  : 1.0f;
        const float *first = rotated(stateless, scores, (int)(r / rows));
        status =
            device_copy_in(stateless->device, (float *)first + r % rows * pages, row, (size_t)pages * sizeof(*row));
        if (status == CLI_OK && r < rows)
            status = device_copy_in(stateless->device, valid + r, &n, sizeof(n));
    }
    free(row);
    return status;
}

int topk_open(struct subject *subject, const struct point *point, struct device *device, size_t footprint, int threads)
{
    (void)threads;
    size_t rows = (size_t)point->at[AXIS_ROWS], pages = (size_t)point->at[AXIS_PAGES], k = (size_t)point->at[AXIS_K];
    if (stateless_open(subject, "topk", device, (double)rows * (double)(4 * pages + 4 * k + 4), footprint, run_topk))
        return CLI_BAD;
    struct stateless *stateless = subject->self;
    msa_topk_args *args = &stateless->args.topk;
    *args = (msa_topk_args)MSA_TOPK_ARGS_INIT;
    float *scores = add_buffer(stateless, rows * pages * sizeof(*scores));
    int32_t *valid = add_buffer(stateless, rows * sizeof(*valid));
    args->scores = scores;
    args->valid_pages = valid;
    args->topk = add_buffer(stateless, rows * k * sizeof(*args->topk));
    args->rows = (int64_t)rows;
    args->columns = (int32_t)pages;
    args->k = (int32_t)k;
    if (!scores || !valid || !args->topk || fill_scores(stateless, point, scores, valid) != CLI_OK) {
        stateless_close(subject);
        return CLI_BAD;
    }
    find_kernel(subject, "top-k", NULL);
    return CLI_OK;
}

/* ---- combine */

static msa_status run_combine(struct stateless *stateless, int rotation)
{
    msa_combine_args args = stateless->args.combine;
    args.o_partial = rotated(stateless, args.o_partial, rotation);
    args.lse_partial = rotated(stateless, args.lse_partial, rotation);
    args.out = rotated(stateless, args.out, rotation);
    args.lse = rotated(stateless, args.lse, rotation);
    return msa_combine(stateless->context, &args, stateless->device->stream);
}

int combine_open(struct subject *subject, const struct point *point, struct device *device, size_t footprint,
                 int threads)
{
    size_t states = (size_t)(point->at[AXIS_QUERIES] * point->at[AXIS_Q_HEADS]);
    size_t splits = (size_t)point->at[AXIS_SPLITS];
    size_t state_bytes = 2 * MSA_HEAD_DIM + sizeof(float);
    if (stateless_open(subject, "combine", device, (double)states * (double)((splits + 1) * state_bytes), footprint,
                       run_combine))
        return CLI_BAD;
    struct stateless *stateless = subject->self;
    msa_dtype dtype = formats[point->at[AXIS_FORMAT]].q;
    msa_combine_args *args = &stateless->args.combine;
    *args = (msa_combine_args)MSA_COMBINE_ARGS_INIT;
    args->num_splits = (int32_t)splits;
    args->rows = point->at[AXIS_QUERIES];
    args->num_q_heads = (int32_t)point->at[AXIS_Q_HEADS];
    args->o_partial_dtype = dtype;
    size_t out_bytes = splits * states * MSA_HEAD_DIM * 2, lse_bytes = (splits * states * sizeof(float) + 63) / 64 * 64;
    void *o_partial = add_buffer(stateless, out_bytes), *lse_partial = add_buffer(stateless, lse_bytes);
    args->o_partial = o_partial;
    args->lse_partial = lse_partial;
    args->out = add_buffer(stateless, states * MSA_HEAD_DIM * 2);
    args->lse = add_buffer(stateless, states * sizeof(float));
    if (!o_partial || !lse_partial || !args->out || !args->lse ||
        fill(stateless, o_partial, dtype, out_bytes, STREAM_PARTIALS, point, threads) ||
        fill(stateless, lse_partial, MSA_F32, lse_bytes, STREAM_LSE, point, threads)) {
        stateless_close(subject);
        return CLI_BAD;
    }
    find_kernel(subject, "combine, merge", NULL);
    return CLI_OK;
}

/* ---- quantise, cache write: BF16 rows to another format */

static msa_status run_quantise(struct stateless *stateless, int rotation)
{
    msa_quantise_args args = stateless->args.quantise;
    args.src = rotated(stateless, args.src, rotation);
    args.dst = rotated(stateless, args.dst, rotation);
    args.scale = rotated(stateless, args.scale, rotation);
    return msa_quantise(stateless->context, &args, stateless->device->stream);
}

static msa_status run_cache_write(struct stateless *stateless, int rotation)
{
    msa_cache_write_args args = stateless->args.cache;
    args.k_new = rotated(stateless, args.k_new, rotation);
    args.v_new = rotated(stateless, args.v_new, rotation);
    args.k = rotated(stateless, args.k, rotation);
    args.v = rotated(stateless, args.v, rotation);
    args.k_scale = rotated(stateless, args.k_scale, rotation);
    args.v_scale = rotated(stateless, args.v_scale, rotation);
    return msa_cache_write(stateless->context, &args, stateless->device->stream);
}

/* Slots of consecutive tokens: whole pages, in random order. */
static int fill_slots(const struct stateless *stateless, const struct point *point, int64_t *slots, int64_t tokens,
                      int64_t pages)
{
    int32_t *order = random_permutation(pages, (uint64_t)point->at[AXIS_SEED]);
    int64_t *host = malloc((size_t)tokens * sizeof(*host));
    int status = host && order ? CLI_OK : cli_error("out of memory");
    for (int64_t i = 0; status == CLI_OK && i < tokens; i++)
        host[i] = (int64_t)order[i / MSA_PAGE_SIZE] * MSA_PAGE_SIZE + i % MSA_PAGE_SIZE;
    if (status == CLI_OK)
        status = device_copy_in(stateless->device, slots, host, (size_t)tokens * sizeof(*host));
    free(host);
    free(order);
    return status;
}

static int cache_write_open(struct subject *subject, const struct point *point, struct device *device, size_t footprint,
                            int threads)
{
    size_t tokens = (size_t)point->at[AXIS_ROWS], heads = (size_t)point->at[AXIS_KV_HEADS];
    size_t pages = (tokens + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE, new_bytes = tokens * heads * MSA_HEAD_DIM * 2;
    msa_dtype dtype = formats[point->at[AXIS_FORMAT]].kv;
    size_t token_bytes = (size_t)page_bytes(dtype) / MSA_PAGE_SIZE;
    if (stateless_open(subject, "quantise --cache", device,
                       2.0 * (double)(new_bytes + tokens * heads * token_bytes) + 8.0 * (double)tokens, footprint,
                       run_cache_write))
        return CLI_BAD;
    struct stateless *stateless = subject->self;
    msa_cache_write_args *args = &stateless->args.cache;
    *args = (msa_cache_write_args)MSA_CACHE_WRITE_ARGS_INIT;
    args->tokens = (int64_t)tokens;
    args->num_pages = (int64_t)pages;
    args->num_kv_heads = (int32_t)heads;
    args->kv_dtype = dtype;
    int64_t *slots = add_buffer(stateless, tokens * sizeof(*slots));
    size_t scale_bytes = dtype == MSA_NVFP4 ? MSA_HEAD_DIM / 16 : 0, rows = pages * MSA_PAGE_SIZE * heads;
    char *new_rows = add_buffer(stateless, 2 * new_bytes);
    char *codes = add_buffer(stateless, 2 * rows * (token_bytes - scale_bytes));
    char *scales = add_buffer(stateless, 2 * rows * scale_bytes + 1);
    if (!slots || !new_rows || !codes || !scales ||
        fill(stateless, new_rows, MSA_BF16, 2 * new_bytes, STREAM_SOURCE, point, threads) ||
        fill_slots(stateless, point, slots, (int64_t)tokens, (int64_t)pages)) {
        stateless_close(subject);
        return CLI_BAD;
    }
    args->slot_mapping = slots;
    args->k_new = new_rows;
    args->v_new = new_rows + new_bytes;
    args->k = codes;
    args->v = codes + rows * (token_bytes - scale_bytes);
    if (scale_bytes) {
        args->k_scale = scales;
        args->v_scale = scales + rows * scale_bytes;
    }
    subject->copies = true;
    const char *takes = dtype == MSA_E4M3 ? "bf16 to e4m3" : dtype == MSA_NVFP4 ? "bf16 to nvfp4" : "nothing";
    find_kernel(subject, "quantise", takes);
    return CLI_OK;
}

int quantise_open(struct subject *subject, const struct point *point, struct device *device, size_t footprint,
                  int threads)
{
    if (point->at[AXIS_CACHE])
        return cache_write_open(subject, point, device, footprint, threads);
    msa_dtype dtype = formats[point->at[AXIS_FORMAT]].kv;
    if (dtype != MSA_E4M3 && dtype != MSA_NVFP4)
        return cli_error("--format: %s needs --cache, rows are quantised to fp8 or nvfp4",
                         formats[point->at[AXIS_FORMAT]].name);
    size_t rows = (size_t)point->at[AXIS_ROWS], cols = (size_t)point->at[AXIS_KV_HEADS] * MSA_HEAD_DIM;
    size_t out_bytes = rows * cols / (dtype == MSA_NVFP4 ? 2 : 1);
    size_t scale_bytes = dtype == MSA_NVFP4 ? rows * cols / 16 : 0;
    if (stateless_open(subject, "quantise", device, (double)(rows * cols * 2 + out_bytes + scale_bytes), footprint,
                       run_quantise))
        return CLI_BAD;
    struct stateless *stateless = subject->self;
    msa_quantise_args *args = &stateless->args.quantise;
    *args = (msa_quantise_args)MSA_QUANTISE_ARGS_INIT;
    args->rows = (int64_t)rows;
    args->cols = (int64_t)cols;
    void *src = add_buffer(stateless, rows * cols * 2);
    args->src = src;
    args->dst_dtype = dtype;
    args->dst = add_buffer(stateless, out_bytes);
    args->scale = scale_bytes ? add_buffer(stateless, scale_bytes) : NULL;
    if (!src || !args->dst || (scale_bytes && !args->scale) ||
        fill(stateless, src, MSA_BF16, rows * cols * 2, STREAM_SOURCE, point, threads)) {
        stateless_close(subject);
        return CLI_BAD;
    }
    subject->copies = true;
    find_kernel(subject, "quantise", dtype == MSA_NVFP4 ? "bf16 to nvfp4" : "bf16 to e4m3");
    return CLI_OK;
}
