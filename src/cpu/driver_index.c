/* SPDX-License-Identifier: MIT
 *
 * driver_index.c - the indexer on the CPU: tiles of consecutive queries of one request, all index heads, walk the
 * history pages; each page is converted once per tile. Scores of PAGE_CHUNK pages at a time are ranked and, where
 * asked for, copied out: no score matrix is needed for a selection.
 *
 * Rows of a tile are (query, head) pairs, the head innermost; 16 of them are a unit. Work items are (tile, segment of
 * the pages): plans of few tiles cut the pages into segments so that a long context fills the machine. Selection is
 * exact and its order total, so the cut changes no bit, though the number of threads has a say in it.
 *
 * Workspace, per thread: packed queries, one converted page, and PAGE_CHUNK scores a row. Segmented plans add their
 * best pages per row and segment.
 */
#include "cpu.h"

#include <math.h>
#include <string.h>

enum {
    TILE_ROWS = 768, /* (query, head) rows of a tile: units in threes, and conversion costs 1 % of the products */
    PAGE_CHUNK = 64,
    THREAD_ITEMS = 4,  /* plans of fewer tiles are segmented until each of several threads has about this many items */
    MOST_ITEMS = 32,   /* or there are this many; a segment selects from nothing, so more of them cost more */
};

struct thread_memory {
    _Alignas(64) uint8_t q[TILE_ROWS * 128 * 4];
    uint8_t k[128 * 128 * 4];
    float scores[TILE_ROWS][PAGE_CHUNK];
    struct cpu_best best[TILE_ROWS];
};

struct index_run {
    msa_plan *plan;
    const msa_index_args *args;
    const struct cpu_kernels *kernels;
    enum cpu_format q_format, k_format;
    struct cpu_selection selection;
    struct thread_memory *threads;
    struct cpu_best *segments; /* [row][segment], row = query * heads + head; segmented plans only */
};

/* The kernel for a tile, and what prepares its operands. Few rows: BF16 operands always, since half as many are to be
 * turned. OPERAND_TILE sums in an order of its own, so there one kernel serves all. */
struct index_kernel {
    cpu_index_fn *function;
    enum cpu_operand operand;
    cpu_convert_fn *convert; /* NULL: the kernel does it */
};

static struct index_kernel choose_kernel(const msa_context *context, enum cpu_format k_format, bool few)
{
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    enum cpu_operand operand = cpu_choose_operand(MSA_BF16, kernels->index[OPERAND_TILE], kernels->index[OPERAND_BF16]);
    enum cpu_operand few_operand = kernels->index_few[OPERAND_BF16] ? OPERAND_BF16 : OPERAND_F32;
    few &= operand != OPERAND_TILE;
    if (few && few_operand == OPERAND_F32 && k_format == FORMAT_E4M3 && kernels->index_few_e4m3)
        return (struct index_kernel){kernels->index_few_e4m3, OPERAND_F32, NULL};
    if (few && kernels->index_few[few_operand])
        return (struct index_kernel){kernels->index_few[few_operand], few_operand,
                                     kernels->convert_turned[few_operand][k_format]};
    return (struct index_kernel){kernels->index[operand], operand, kernels->convert_k[operand][k_format]};
}

static enum cpu_format storage_format(msa_dtype dtype)
{
    return dtype == MSA_BF16 ? FORMAT_BF16 : dtype == MSA_NVFP4 ? FORMAT_NVFP4_E4M3 : FORMAT_E4M3;
}

static size_t align_up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

static void add_name(msa_plan *plan, void (*function)(void))
{
    size_t used = strlen(plan->kernels);
    snprintf(plan->kernels + used, sizeof plan->kernels - used, "%s%s", used ? ", " : "", cpu_kernel_name(function));
}

/* The main kernel first: that of few rows for decode. Either can meet a tile of the other's size. */
static void name_kernels(msa_plan *plan)
{
    const msa_index_desc *desc = &plan->index;
    const struct cpu_kernels *kernels = cpu_kernels_of(plan->context);
    bool can_be_few = desc->num_index_heads <= INDEX_FEW, decode = plan->operation == PLAN_INDEX_DECODE;
    enum cpu_format k_format = storage_format(desc->k_dtype);
    const struct index_kernel main_kernel = choose_kernel(plan->context, k_format, can_be_few && decode),
                              other = choose_kernel(plan->context, k_format, can_be_few && !decode);
    plan->kernel = cpu_kernel_name((void (*)(void))main_kernel.function);
    add_name(plan, (void (*)(void))main_kernel.function);
    if (main_kernel.convert)
        add_name(plan, (void (*)(void))main_kernel.convert);
    add_name(plan, (void (*)(void))kernels->pack[main_kernel.operand][storage_format(desc->q_dtype)]);
    if (other.function != main_kernel.function) {
        add_name(plan, (void (*)(void))other.function);
        if (other.convert)
            add_name(plan, (void (*)(void))other.convert);
    }
    if (desc->outputs & MSA_INDEX_SELECTION)
        add_name(plan, (void (*)(void))kernels->select);
}

static int64_t wanted_items(const msa_plan *plan)
{
    int64_t threads = plan->context->num_threads;
    return threads == 1 ? 1 : threads * THREAD_ITEMS < MOST_ITEMS ? threads * THREAD_ITEMS : MOST_ITEMS;
}

msa_status cpu_index_plan(msa_plan *plan)
{
    const msa_index_desc *desc = &plan->index;
    int64_t wanted = wanted_items(plan);
    name_kernels(plan);
    plan->strategy = "query-major";
    plan->precision = "exact";
    plan->query_tile = TILE_ROWS / desc->num_index_heads;
    plan->workspace_bytes = align_up(sizeof(struct thread_memory)) * (size_t)plan->context->num_threads;
    int64_t most_tiles =
        plan->max_total_q / plan->query_tile + plan->max_batch; /* each request can end in a partial tile */
    int64_t segments = (wanted + most_tiles - 1) / most_tiles,
            chunks = (plan->max_pages + PAGE_CHUNK - 1) / PAGE_CHUNK;
    plan->num_splits = (int32_t)(segments < chunks ? segments : chunks);
    if (chunks > 1 && wanted > 1 && desc->outputs & MSA_INDEX_SELECTION) {
        /* Fewer tiles make more segments, but a larger plan must never need less: this bounds rows*num_splits and
         * grows. A plan is segmented if it has fewer than `wanted` tiles; then rows*num_splits < 2*wanted*TILE_ROWS. */
        int64_t most = (chunks < wanted ? chunks : wanted) * plan->max_total_q * desc->num_index_heads;
        int64_t bound = 2 * wanted * TILE_ROWS;
        plan->workspace_bytes += align_up(sizeof(struct cpu_best) * (size_t)(most < bound ? most : bound));
    }
    return MSA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------------ one tile */

struct tile {
    const struct cpu_request *request;
    int64_t begin, end; /* rows inside the request */
    int heads, rows;    /* index heads; (query, head) rows */
    struct index_kernel kernel;
};

static struct tile tile_at(const struct index_run *run, int64_t index)
{
    struct tile tile = {.heads = run->plan->index.num_index_heads};
    tile.request = cpu_step_tile(run->plan, index, &tile.begin, &tile.end);
    tile.rows = (int)(tile.end - tile.begin) * tile.heads;
    tile.kernel = choose_kernel(run->plan->context, run->k_format, tile.rows <= INDEX_FEW);
    return tile;
}

/* Pages of the query that owns row r: n, its own one included, 0 at a negative position. History pages are n - 1. */
static int32_t row_pages(const struct index_run *run, const struct tile *tile, int r)
{
    int64_t position = tile->request->first_position + tile->begin + r / tile->heads;
    if (position < 0)
        return 0;
    int64_t n = position / MSA_PAGE_SIZE + 1;
    return (int32_t)(n < run->plan->max_pages ? n : run->plan->max_pages);
}

/* History pages with a score. Beyond the plan's capacity the last visible page is history, too. */
static int32_t row_history(const struct index_run *run, const struct tile *tile, int r)
{
    int64_t position = tile->request->first_position + tile->begin + r / tile->heads;
    int64_t history = position < 0 ? 0 : position / MSA_PAGE_SIZE;
    return (int32_t)(history < run->plan->max_pages ? history : run->plan->max_pages);
}

static int64_t query_row(const struct tile *tile, int r)
{
    return tile->request->first_row + tile->begin + r / tile->heads;
}

static void load_queries(const struct index_run *run, const struct tile *tile, struct thread_memory *memory)
{
    const msa_index_args *args = run->args;
    size_t unit_bytes = cpu_unit_bytes(tile->kernel.operand);
    for (int first = 0; first < tile->rows; first += UNIT_LANES) {
        const void *lanes[UNIT_LANES];
        int num_lanes = 0;
        for (int r = first; r < tile->rows && num_lanes < UNIT_LANES; r++)
            lanes[num_lanes++] = (const char *)args->index_q + query_row(tile, r) * args->index_q_row_stride +
                                 r % tile->heads * args->index_q_head_stride;
        run->kernels->pack[tile->kernel.operand][run->q_format](lanes, num_lanes,
                                                                memory->q + (size_t)(first / UNIT_LANES) * unit_bytes);
    }
}

static struct cpu_rows rows_at(const struct index_run *run, int64_t physical)
{
    const msa_index_args *args = run->args;
    return (struct cpu_rows){.data = (const uint8_t *)args->index_k + physical * args->index_k_page_stride,
                             .token_stride = args->index_k_token_stride,
                             .scale = args->index_k_scale ? (const uint8_t *)args->index_k_scale +
                                                                physical * args->index_k_scale_page_stride
                                                          : NULL,
                             .scale_token_stride = args->index_k_scale_token_stride};
}

/* The quarters of a page, side by side. */
static struct cpu_ahead ahead_of(const struct index_run *run, int64_t physical)
{
    if (physical < 0 || physical >= run->args->num_pages)
        return (struct cpu_ahead){0};
    struct cpu_rows k = rows_at(run, physical);
    struct cpu_ahead ahead = {.places = AHEAD_PLACES,
                              .lines = (int)((dtype_row_bytes(run->plan->index.k_dtype, 128) + 63) / 64),
                              .rows = MSA_PAGE_SIZE / AHEAD_PLACES};
    for (int i = 0; i < AHEAD_PLACES; i++) {
        ahead.data[i] = k.data + i * ahead.rows * k.token_stride;
        ahead.stride[i] = k.token_stride;
    }
    return ahead;
}

/* Scores of logical pages [first, last) for all rows. A page outside the cache scores -inf: no candidate. */
static void score_pages(const struct index_run *run, const struct tile *tile, int32_t first, int32_t last,
                        struct thread_memory *memory)
{
    for (int32_t page = first; page < last; page++) {
        int64_t physical = tile->request->pages[page];
        if (physical < 0 || physical >= run->args->num_pages) {
            atomic_fetch_or_explicit(&run->plan->error, MSA_ERROR_BIT_PAGE_ID, memory_order_relaxed);
            for (int r = 0; r < tile->rows; r++)
                memory->scores[r][page - first] = -INFINITY;
            continue;
        }
        struct cpu_page rows = {.k = rows_at(run, physical),
                                .keys = MSA_PAGE_SIZE,
                                .convert_k = tile->kernel.convert,
                                .k_operand = memory->k};
        if (page + 1 < last)
            rows.ahead = ahead_of(run, tile->request->pages[page + 1]);
        tile->kernel.function(&rows, memory->q, tile->rows, &memory->scores[0][page - first], PAGE_CHUNK);
    }
}

/* Ranks and copies out what each row may see of the scored pages [first, last). */
static void use_scores(const struct index_run *run, const struct tile *tile, int32_t first, int32_t last,
                       struct thread_memory *memory)
{
    const msa_index_args *args = run->args;
    for (int r = 0; r < tile->rows; r++) {
        int32_t n = row_pages(run, tile, r), history = row_history(run, tile, r);
        int32_t end = history < last ? history : last;
        for (int32_t i = 0; run->q_format == FORMAT_BF16 && args->scores && i < end - first; i++)
            memory->scores[r][i] += 0.0f; /* a flushed score's sign depends on the order of keys: -0 becomes 0 */
        if (args->scores && end > first)
            memcpy((char *)args->scores + r % tile->heads * args->scores_head_stride +
                       query_row(tile, r) * args->scores_row_stride + (int64_t)first * 4,
                   memory->scores[r], (size_t)(end - first) * 4);
        if (!args->topk)
            continue;
        int32_t from = cpu_first_candidate(&run->selection, n), to = cpu_last_candidate(&run->selection, n);
        from = from > first ? from : first;
        to = to < last ? to : last;
        if (to > from)
            run->kernels->select(&memory->best[r], memory->scores[r] + (from - first), from, to - from);
    }
}

static void write_row(const struct index_run *run, const struct tile *tile, int r, const struct cpu_best *best)
{
    const msa_index_args *args = run->args;
    int32_t n = row_pages(run, tile, r);
    cpu_best_write(best, &run->selection, n,
                   (int32_t *)((char *)args->topk + r % tile->heads * args->topk_head_stride +
                               query_row(tile, r) * args->topk_row_stride));
    if (args->num_valid_pages && r % tile->heads == 0)
        args->num_valid_pages[query_row(tile, r)] = n;
}

/* ------------------------------------------------------------------------------------------------ tasks */

static void score_task(void *arg, size_t index, size_t thread)
{
    const struct index_run *run = arg;
    struct thread_memory *memory = (struct thread_memory *)((char *)run->threads + thread * align_up(sizeof *memory));
    int splits = run->plan->num_splits, segment = (int)(index % (size_t)splits);
    struct tile tile = tile_at(run, (int64_t)(index / (size_t)splits));
    load_queries(run, &tile, memory);
    for (int r = 0; r < tile.rows; r++)
        cpu_best_init(&memory->best[r], &run->selection, row_pages(run, &tile, r));
    /* Segments are whole chunks of what the tile's last row sees, so that all of them have work. */
    int32_t pages = row_history(run, &tile, tile.rows - 1), chunks = (pages + PAGE_CHUNK - 1) / PAGE_CHUNK;
    int32_t first = (int32_t)((int64_t)chunks * segment / splits) * PAGE_CHUNK;
    int32_t stop = (int32_t)((int64_t)chunks * (segment + 1) / splits) * PAGE_CHUNK;
    stop = stop < pages ? stop : pages;
    bool tiles = tile.kernel.operand == OPERAND_TILE, bf16 = run->q_format == FORMAT_BF16;
    uint32_t mode = bf16 ? cpu_begin_flush() : 0;
    if (tiles)
        run->kernels->begin_tiles();
    for (; first < stop; first += PAGE_CHUNK) {
        int32_t last = first + PAGE_CHUNK < stop ? first + PAGE_CHUNK : stop;
        score_pages(run, &tile, first, last, memory);
        use_scores(run, &tile, first, last, memory);
    }
    if (tiles)
        run->kernels->end_tiles();
    if (bf16)
        cpu_end_flush(mode);
    if (!run->args->topk)
        return;
    for (int r = 0; r < tile.rows; r++)
        if (splits == 1)
            write_row(run, &tile, r, &memory->best[r]);
        else
            run->segments[(query_row(&tile, r) * tile.heads + r % tile.heads) * splits + segment] = memory->best[r];
}

static void merge_task(void *arg, size_t index, size_t thread)
{
    (void)thread;
    const struct index_run *run = arg;
    struct tile tile = tile_at(run, (int64_t)index);
    for (int r = 0; r < tile.rows; r++) {
        const struct cpu_best *segments =
            run->segments + (query_row(&tile, r) * tile.heads + r % tile.heads) * run->plan->num_splits;
        struct cpu_best best = segments[0];
        for (int segment = 1; segment < run->plan->num_splits; segment++)
            cpu_best_merge(&best, &segments[segment]);
        write_row(run, &tile, r, &best);
    }
}

msa_status cpu_index_run(msa_plan *plan, const msa_index_args *args, msa_stream stream)
{
    (void)stream;
    const msa_index_desc *desc = &plan->index;
    const struct cpu_kernels *kernels = cpu_kernels_of(plan->context);
    struct index_run run = {
        .plan = plan,
        .args = args,
        .kernels = kernels,
        .q_format = storage_format(desc->q_dtype),
        .k_format = storage_format(desc->k_dtype),
        .selection = {.k = desc->topk,
                      .init_pages = desc->init_pages,
                      .local_pages = desc->local_pages,
                      .order = desc->topk_order},
        .threads = plan->step.workspace,
        .segments = (struct cpu_best *)((char *)plan->step.workspace +
                                        align_up(sizeof(struct thread_memory)) * (size_t)plan->context->num_threads),
    };
    size_t tiles = (size_t)cpu_step_tiles(plan);
    msa_status status = cpu_parallel(plan->context, tiles * (size_t)plan->num_splits, score_task, &run);
    if (!status && plan->num_splits > 1 && args->topk)
        status = cpu_parallel(plan->context, tiles, merge_task, &run);
    return status;
}
