/* SPDX-License-Identifier: MIT
 *
 * driver_attention.c - sparse attention on the CPU: tiles of consecutive queries of one request walk the union of their
 * pages in ascending order. A page is converted once for all queries of the tile that selected it, and its result is
 * merged into FP32 accumulators that stay in the cache: no partial result is written to memory.
 *
 * A tile holds TILE_UNITS units of 16/ratio queries. Work items are (tile, KV head, split). Splits exist only in plans
 * whose capacity could not fill a machine with tiles (small decode batches): split s takes the row's visible pages of
 * ranks s*pages_per_split and up, its state goes to the workspace, and a second pass merges the splits in order. The
 * number of splits depends on the plan alone, so that a row's bits depend on neither batch nor threads.
 *
 * Workspace, per thread: Q 256 KiB, accumulators 256 KiB, K and V 64 KiB each, visits, and the kernel's scratch; plus
 * the states of split plans, at most SPLIT_ITEMS of them. None of it grows with total_q or context.
 */
#include "../number.h"
#include "cpu.h"

#include <string.h>

enum {
    SPLIT_ITEMS = 64, /* plans with fewer (row, KV head) pairs than this are split */
    MAX_SPLITS = 4,
    MAX_TILE_ROWS = TILE_UNITS * UNIT_LANES,
    MAX_ENTRIES = MAX_TILE_ROWS * MSA_MAX_TOPK,
};

#define LOG2_E 1.44269504088896340736

/* One split's result for one unit. */
struct unit_state {
    float acc[128 * UNIT_LANES], max[UNIT_LANES], sum[UNIT_LANES];
};

/* A thread's part of the workspace. */
struct thread_memory {
    _Alignas(64) uint8_t q[TILE_UNITS * 128 * UNIT_LANES * 4];
    float acc[TILE_UNITS * 128 * UNIT_LANES];
    float max[TILE_UNITS * UNIT_LANES], sum[TILE_UNITS * UNIT_LANES];
    uint8_t k[128 * 128 * 4], v[128 * 128 * 4];
    uint8_t scratch[4 * 2 * 128 * UNIT_LANES * 4]; /* scores and probabilities of four units */
    uint32_t entries[2][MAX_ENTRIES];              /* page << 9 | row; the second half is for sorting */
    struct cpu_visit visits[MAX_TILE_ROWS];
    int32_t visible[MAX_TILE_ROWS]; /* pages the row sees */
    int32_t rank[MAX_TILE_ROWS];    /* of those, walked so far */
};

struct attention_run {
    msa_plan *plan;
    const msa_attention_args *args;
    const struct cpu_kernels *kernels;
    enum cpu_operand operand;
    enum cpu_format q_format, kv_format;
    float kv_factor; /* value of a K or V operand's 1 */
    enum cpu_rounding rounding;
    int ratio, rows_per_unit;
    size_t items;        /* (tile, KV head, split) */
    int pages_per_split; /* ranks a split takes */
    struct thread_memory *threads;
    struct unit_state *states; /* [tile][kv head][split][units of the tile's rows], split plans only */
};

/* What one work item is about. */
struct tile {
    const struct cpu_request *request;
    int64_t begin, end; /* rows inside the request */
    int kv_head, rows, units;
    double logit_scale; /* logit = logit_scale * dot(q, k) */
    float v_factor;
};

static enum cpu_format storage_format(msa_dtype kv, msa_dtype q, enum cpu_operand operand)
{
    switch (kv) {
    case MSA_BF16:
        return FORMAT_BF16;
    case MSA_FP16:
        return FORMAT_FP16;
    case MSA_NVFP4:
        return q == MSA_E4M3 ? FORMAT_NVFP4_E4M3 : FORMAT_NVFP4_EXACT;
    default:
        return q == MSA_E4M3 && operand == OPERAND_F32 ? FORMAT_E4M3_SMALL : FORMAT_E4M3;
    }
}

static enum cpu_format query_format(msa_dtype q)
{
    return q == MSA_BF16 ? FORMAT_BF16 : q == MSA_FP16 ? FORMAT_FP16 : FORMAT_E4M3;
}

static size_t align_up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

msa_status cpu_attention_plan(msa_plan *plan)
{
    const msa_attention_desc *desc = &plan->attention;
    const struct cpu_kernels *kernels = cpu_kernels_of(plan->context);
    if (desc->strategy == MSA_STRATEGY_PAGE_MAJOR)
        return fail(MSA_ERROR_UNSUPPORTED, "strategy = page-major: a CPU walks pages query-major");
    enum cpu_operand operand =
        cpu_choose_operand(desc->q_dtype, kernels->attend[OPERAND_TILE], kernels->attend[OPERAND_BF16]);
    enum cpu_format q_format = query_format(desc->q_dtype),
                    kv_format = storage_format(desc->kv_dtype, desc->q_dtype, operand);
    plan->kernel = cpu_kernel_name((void (*)(void))kernels->attend[operand]);
    snprintf(plan->kernels, sizeof plan->kernels, "%s, %s, %s, %s, %s", plan->kernel,
             cpu_kernel_name((void (*)(void))kernels->convert_k[operand][kv_format]),
             cpu_kernel_name((void (*)(void))kernels->convert_v[operand][kv_format]),
             cpu_kernel_name((void (*)(void))kernels->pack[operand][q_format]),
             cpu_kernel_name((void (*)(void))kernels->finish));
    plan->strategy = "query-major";
    plan->precision = "exact";
    int rows_per_unit = UNIT_LANES / (desc->num_q_heads / desc->num_kv_heads);
    plan->query_tile = TILE_UNITS * rows_per_unit;
    plan->workspace_bytes = align_up(sizeof(struct thread_memory)) * (size_t)plan->context->num_threads;
    if (plan->operation == PLAN_DECODE && !desc->partials && desc->topk > 1) {
        int64_t items = plan->max_total_q * desc->num_kv_heads,
                splits = desc->topk < MAX_SPLITS ? desc->topk : MAX_SPLITS;
        if (items < SPLIT_ITEMS)
            plan->num_splits = (int32_t)splits;
        else
            items = SPLIT_ITEMS - 1; /* not split, but a larger plan must never need less workspace */
        /* A tile of r rows has at most r units, so all tiles together have at most max_total_q. */
        plan->workspace_bytes += align_up(sizeof(struct unit_state)) * (size_t)(items * splits);
    }
    return MSA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------------ lists */

/* Sorts by page, keeping rows ascending within a page: two stable passes over the page's 13 bits. */
static void sort_entries(uint32_t (*entries)[MAX_ENTRIES], int n)
{
    for (int pass = 0; pass < 2; pass++) {
        int shift = 9 + 7 * pass, start[129] = {0};
        for (int i = 0; i < n; i++)
            start[(entries[pass][i] >> shift & 127) + 1]++;
        for (int i = 0; i < 128; i++)
            start[i + 1] += start[i];
        for (int i = 0; i < n; i++)
            entries[!pass][start[entries[pass][i] >> shift & 127]++] = entries[pass][i];
    }
}

static const int32_t *row_list(const struct attention_run *run, const struct tile *tile, int r)
{
    const msa_plan *plan = run->plan;
    int64_t list = tile->kv_head / (plan->attention.num_kv_heads / plan->attention.num_lists);
    int64_t row = tile->request->first_row + tile->begin + r;
    return (const int32_t *)((const char *)plan->step.topk + list * plan->step.topk_head_stride +
                             row * plan->step.topk_row_stride);
}

/* Collects what the tile's rows see, sorted and without repetitions; counts it per row. Returns how many. */
static int collect_entries(const struct attention_run *run, const struct tile *tile, struct thread_memory *memory)
{
    const msa_plan *plan = run->plan;
    const msa_attention_desc *desc = &plan->attention;
    int n = 0;
    uint32_t error = 0;
    for (int r = 0; r < tile->rows; r++) {
        int64_t position = tile->request->first_position + tile->begin + r;
        const int32_t *ids = row_list(run, tile, r);
        for (int j = 0; j < desc->topk; j++) {
            int64_t page = ids[j];
            if (page < -1 || page >= plan->max_pages)
                error |= MSA_ERROR_BIT_LIST_ID;
            else if (page >= 0 && page * MSA_PAGE_SIZE <= position && page * MSA_PAGE_SIZE < tile->request->kv_len)
                memory->entries[0][n++] = (uint32_t)page << 9 | (uint32_t)r;
        }
    }
    sort_entries(memory->entries, n);
    memset(memory->visible, 0, sizeof *memory->visible * (size_t)tile->rows);
    memset(memory->rank, 0, sizeof *memory->rank * (size_t)tile->rows);
    int kept = 0;
    for (int i = 0; i < n; i++) {
        uint32_t entry = memory->entries[0][i];
        if (kept && memory->entries[0][kept - 1] == entry)
            continue;
        uint32_t page = entry >> 9;
        if (tile->request->pages[page] < 0 || tile->request->pages[page] >= run->args->num_pages) {
            error |= MSA_ERROR_BIT_PAGE_ID;
            continue;
        }
        memory->entries[0][kept++] = entry;
        memory->visible[entry & (MAX_TILE_ROWS - 1)]++;
    }
    if (error)
        atomic_fetch_or_explicit(&run->plan->error, error, memory_order_relaxed);
    return kept;
}

/* ------------------------------------------------------------------------------------------------ one tile */

static void reset_unit(struct cpu_tile *state, int unit)
{
    memset(state->acc + unit * 128 * UNIT_LANES, 0, 128 * UNIT_LANES * sizeof(float));
    memset(state->sum + unit * UNIT_LANES, 0, UNIT_LANES * sizeof(float));
    for (int lane = 0; lane < UNIT_LANES; lane++)
        state->max[unit * UNIT_LANES + lane] = -INFINITY;
}

static void load_queries(const struct attention_run *run, const struct tile *tile, struct cpu_tile *state)
{
    const msa_attention_args *args = run->args;
    size_t unit_bytes = cpu_unit_bytes(run->operand);
    for (int unit = 0; unit < tile->units; unit++) {
        const void *lanes[UNIT_LANES];
        int num_lanes = 0;
        for (int r = unit * run->rows_per_unit; r < (unit + 1) * run->rows_per_unit && r < tile->rows; r++)
            for (int h = 0; h < run->ratio; h++)
                lanes[num_lanes++] = (const char *)args->q +
                                     (tile->request->first_row + tile->begin + r) * args->q_row_stride +
                                     (tile->kv_head * run->ratio + h) * args->q_head_stride;
        run->kernels->pack[run->operand][run->q_format](lanes, num_lanes,
                                                        (uint8_t *)state->q + (size_t)unit * unit_bytes);
        reset_unit(state, unit);
    }
}

static const uint8_t *cache_head(const void *base, int64_t page_stride, int64_t head_stride, int64_t page, int64_t head)
{
    return base ? (const uint8_t *)base + page * page_stride + head * head_stride : NULL;
}

/* The page's rows, and room for their conversion. */
static struct cpu_page page_at(const struct attention_run *run, const struct tile *tile, int32_t logical,
                               struct thread_memory *memory)
{
    const msa_attention_args *args = run->args;
    int64_t live = tile->request->kv_len - (int64_t)logical * MSA_PAGE_SIZE;
    int64_t page = tile->request->pages[logical], head = tile->kv_head;
    return (struct cpu_page){
        .k = {.data = cache_head(args->k, args->k_page_stride, args->k_head_stride, page, head),
              .token_stride = args->k_token_stride,
              .scale = cache_head(args->k_scale, args->k_scale_page_stride, args->k_scale_head_stride, page, head),
              .scale_token_stride = args->k_scale_token_stride},
        .v = {.data = cache_head(args->v, args->v_page_stride, args->v_head_stride, page, head),
              .token_stride = args->v_token_stride,
              .scale = cache_head(args->v_scale, args->v_scale_page_stride, args->v_scale_head_stride, page, head),
              .scale_token_stride = args->v_scale_token_stride,
              .scale_quad = run->plan->attention.v_scale_order == MSA_SCALE_QUAD},
        .keys = live < MSA_PAGE_SIZE ? (int)live : MSA_PAGE_SIZE,
        .convert_k = run->kernels->convert_k[run->operand][run->kv_format],
        .convert_v = run->kernels->convert_v[run->operand][run->kv_format],
        .k_operand = memory->k,
        .v_operand = memory->v,
    };
}

/* What a page will read. Its scales are fetched at once. */
static struct cpu_ahead ahead_of(const struct attention_run *run, const struct cpu_page *page)
{
    size_t row_bytes = dtype_row_bytes(run->plan->attention.kv_dtype, 128);
    for (int i = 0; page->k.scale && i < 16; i++) {
        __builtin_prefetch(page->k.scale + i * 8 * page->k.scale_token_stride);
        __builtin_prefetch(page->v.scale + i * 8 * (page->v.scale_quad ? 8 : page->v.scale_token_stride));
    }
    int64_t half = page->keys / 2;
    return (struct cpu_ahead){
        .data = {page->k.data, page->v.data, page->k.data + half * page->k.token_stride,
                 page->v.data + half * page->v.token_stride},
        .stride = {page->k.token_stride, page->v.token_stride, page->k.token_stride, page->v.token_stride},
        .places = 4,
        .lines = (int)((row_bytes + 63) / 64),
        .rows = (int)half};
}

/* The same for the first page that the tile will walk: the smallest of its lists. */
static struct cpu_ahead ahead_of_tile(const struct attention_run *run, const struct tile *tile,
                                      struct thread_memory *memory)
{
    int64_t position = tile->request->first_position + tile->end - 1;
    int32_t first = INT32_MAX;
    for (int r = 0; r < tile->rows; r++) {
        const int32_t *ids = row_list(run, tile, r);
        for (int j = 0; j < run->plan->attention.topk; j++)
            first = ids[j] >= 0 && ids[j] < first ? ids[j] : first;
    }
    int64_t start = (int64_t)first * MSA_PAGE_SIZE;
    if (first >= run->plan->max_pages || start > position || start >= tile->request->kv_len ||
        tile->request->pages[first] < 0 || tile->request->pages[first] >= run->args->num_pages)
        return (struct cpu_ahead){0};
    struct cpu_page page = page_at(run, tile, first, memory);
    return ahead_of(run, &page);
}

/* The visits to one page, from the entries of that page. Rows of a unit that see the whole page share a visit; a row
 * on its own partial page has one to itself, because a key that only its neighbour sees may hold NaN. */
static int page_visits(const struct attention_run *run, const struct tile *tile, const uint32_t *entries, int n,
                       int split, struct thread_memory *memory)
{
    int num_visits = 0, last_full = -1;
    for (int i = 0; i < n; i++) {
        int r = entries[i] & (MAX_TILE_ROWS - 1);
        int rank = memory->rank[r]++;
        if (run->plan->num_splits > 1 && rank / run->pages_per_split != split)
            continue;
        int64_t page_start = (int64_t)(entries[i] >> 9) * MSA_PAGE_SIZE;
        int64_t position = tile->request->first_position + tile->begin + r;
        int64_t seen =
            position + 1 < tile->request->kv_len ? position + 1 - page_start : tile->request->kv_len - page_start;
        int unit = r / run->rows_per_unit, first_lane = r % run->rows_per_unit * run->ratio;
        uint16_t lanes = (uint16_t)(((1u << run->ratio) - 1) << first_lane);
        if (seen >= MSA_PAGE_SIZE && last_full >= 0 && memory->visits[last_full].unit == unit) {
            memory->visits[last_full].lanes |= lanes;
            continue;
        }
        if (seen >= MSA_PAGE_SIZE)
            last_full = num_visits;
        memory->visits[num_visits++] = (struct cpu_visit){
            .unit = (uint16_t)unit, .lanes = lanes, .keys = seen < MSA_PAGE_SIZE ? (int32_t)seen : MSA_PAGE_SIZE};
    }
    return num_visits;
}

/* ------------------------------------------------------------------------------------------------ results */

/* Where the lanes of a unit go; NULL: not wanted. */
struct unit_rows {
    void *out[UNIT_LANES];
    float *lse[UNIT_LANES];
};

static void write_unit(const struct attention_run *run, const struct tile *tile, const struct cpu_tile *state, int unit,
                       const struct unit_rows *rows)
{
    const float *max = state->max + unit * UNIT_LANES, *sum = state->sum + unit * UNIT_LANES;
    double p_factor = run->rounding == ROUND_E4M3 ? 448.0 : 1.0;
    float factor[UNIT_LANES];
    for (int lane = 0; lane < UNIT_LANES; lane++) {
        factor[lane] = tile->v_factor / sum[lane];
        if (!rows->lse[lane])
            continue;
        float lse = (float)(max[lane] * tile->logit_scale + log(sum[lane] / p_factor));
        *rows->lse[lane] = isnan(lse) ? NAN : lse; /* the same NaN on every machine */
    }
    run->kernels->finish(state->acc + unit * 128 * UNIT_LANES, factor, run->rows_per_unit * run->ratio,
                         run->plan->attention.out_dtype, rows->out);
}

static void write_tile(const struct attention_run *run, const struct tile *tile, const struct cpu_tile *state,
                       const struct thread_memory *memory)
{
    const msa_attention_args *args = run->args;
    for (int unit = 0; unit < tile->units; unit++) {
        struct unit_rows rows = {0};
        for (int lane = 0; lane < run->rows_per_unit * run->ratio; lane++) {
            int r = unit * run->rows_per_unit + lane / run->ratio;
            if (r >= tile->rows)
                break;
            int64_t row = tile->request->first_row + tile->begin + r,
                    head = tile->kv_head * run->ratio + lane % run->ratio;
            char *out = (char *)args->out + row * args->out_row_stride + head * args->out_head_stride;
            float *lse = args->lse
                             ? (float *)((char *)args->lse + row * args->lse_row_stride + head * args->lse_head_stride)
                             : NULL;
            if (memory->visible[r]) {
                rows.out[lane] = out;
                rows.lse[lane] = lse;
            } else {
                memset(out, 0, 256);
                if (lse)
                    *lse = -INFINITY;
            }
        }
        write_unit(run, tile, state, unit, &rows);
    }
}

/* Plans with partials: the visited lanes are one split each; write them and start afresh. */
static void write_partials(const struct attention_run *run, const struct tile *tile, struct cpu_tile *state,
                           int num_visits, const struct thread_memory *memory)
{
    const msa_attention_args *args = run->args;
    for (int i = 0; i < num_visits; i++) {
        int unit = memory->visits[i].unit;
        struct unit_rows rows = {0};
        for (int lane = 0; lane < UNIT_LANES; lane++) {
            if (!(memory->visits[i].lanes >> lane & 1))
                continue;
            int r = unit * run->rows_per_unit + lane / run->ratio;
            int64_t row = tile->request->first_row + tile->begin + r,
                    head = tile->kv_head * run->ratio + lane % run->ratio;
            int64_t split = memory->rank[r] - 1;
            rows.out[lane] = (char *)args->o_partial + split * args->o_partial_split_stride +
                             row * args->o_partial_row_stride + head * args->o_partial_head_stride;
            rows.lse[lane] = (float *)((char *)args->lse_partial + split * args->lse_partial_split_stride +
                                       row * args->lse_partial_row_stride + head * args->lse_partial_head_stride);
        }
        write_unit(run, tile, state, unit, &rows);
        for (int lane = 0; lane < UNIT_LANES; lane++)
            if (rows.out[lane]) {
                state->max[unit * UNIT_LANES + lane] = -INFINITY;
                state->sum[unit * UNIT_LANES + lane] = 0;
                for (int d = 0; d < 128; d++)
                    state->acc[(unit * 128 + d) * UNIT_LANES + lane] = 0;
            }
    }
}

static void write_counts(const struct attention_run *run, const struct tile *tile, const struct thread_memory *memory)
{
    for (int r = 0; r < tile->rows; r++) {
        int64_t row = tile->request->first_row + tile->begin + r;
        *(int32_t *)((char *)run->args->split_counts + row * run->args->split_counts_row_stride +
                     tile->kv_head * run->args->split_counts_head_stride) = memory->visible[r];
    }
}

/* ------------------------------------------------------------------------------------------------ tasks */

static float factor_at(const float *factor, int64_t stride, int64_t head)
{
    return factor ? *(const float *)((const char *)factor + head * stride) : 1.0f;
}

static double logit_scale(const struct attention_run *run, int kv_head)
{
    const msa_attention_args *args = run->args;
    double scale = run->plan->attention.sm_scale * (double)run->kv_factor;
    scale *= factor_at(args->q_descale, args->q_descale_stride, kv_head);
    scale *= factor_at(args->k_descale, args->k_descale_stride, kv_head);
    return scale * factor_at(args->k_global_scale, 0, 0);
}

static struct tile tile_at(const struct attention_run *run, int64_t index)
{
    const msa_attention_desc *desc = &run->plan->attention;
    struct tile tile = {.kv_head = (int)(index % desc->num_kv_heads)};
    tile.request = cpu_step_tile(run->plan, index / desc->num_kv_heads, &tile.begin, &tile.end);
    tile.rows = (int)(tile.end - tile.begin);
    tile.units = (tile.rows + run->rows_per_unit - 1) / run->rows_per_unit;
    tile.logit_scale = logit_scale(run, tile.kv_head);
    tile.v_factor = factor_at(run->args->v_descale, run->args->v_descale_stride, tile.kv_head) *
                    factor_at(run->args->v_global_scale, 0, 0);
    return tile;
}

/* Where a split plan keeps the states of a tile: its rows' share of the array. */
static struct unit_state *tile_states(const struct attention_run *run, const struct tile *tile, int split)
{
    int64_t row = tile->request->first_row + tile->begin;
    int64_t heads = run->plan->attention.num_kv_heads, splits = run->plan->num_splits;
    return run->states + row * heads * splits + ((int64_t)tile->kv_head * splits + split) * tile->rows;
}

static void attend_task(void *arg, size_t index, size_t thread)
{
    const struct attention_run *run = arg;
    struct thread_memory *memory = (struct thread_memory *)((char *)run->threads + thread * align_up(sizeof *memory));
    int splits = run->plan->num_splits, split = (int)(index % (size_t)splits);
    bool bf16 = run->plan->attention.q_dtype == MSA_BF16;
    struct tile tile = tile_at(run, (int64_t)(index / (size_t)splits));
    size_t next_item = index + (size_t)run->plan->context->num_threads; /* likely this thread's */
    struct cpu_tile state = {.q = memory->q,
                             .acc = memory->acc,
                             .max = memory->max,
                             .sum = memory->sum,
                             .scratch = memory->scratch,
                             .scale = exp2_scale(tile.logit_scale * LOG2_E),
                             .rounding = run->rounding,
                             .v_unit = run->kv_factor};
    load_queries(run, &tile, &state);
    int n = collect_entries(run, &tile, memory);
    if (run->operand == OPERAND_TILE)
        run->kernels->begin_tiles();
    const uint32_t *entries = memory->entries[0];
    for (int i = 0, next; i < n; i = next) {
        uint32_t page = entries[i] >> 9;
        for (next = i + 1; next < n && entries[next] >> 9 == page; next++)
            ;
        int num_visits = page_visits(run, &tile, entries + i, next - i, split, memory);
        if (!num_visits)
            continue;
        struct cpu_page here = page_at(run, &tile, (int32_t)page, memory);
        if (next < n) {
            struct cpu_page there = page_at(run, &tile, (int32_t)(entries[next] >> 9), memory);
            here.ahead = ahead_of(run, &there);
        } else if (splits == 1 && next_item < run->items) {
            struct tile there = tile_at(run, (int64_t)next_item);
            here.ahead = ahead_of_tile(run, &there, memory);
        }
        uint32_t mode = bf16 ? cpu_begin_flush() : 0;
        run->kernels->attend[run->operand](&state, &here, memory->visits, num_visits);
        if (bf16)
            cpu_end_flush(mode);
        if (run->plan->attention.partials)
            write_partials(run, &tile, &state, num_visits, memory);
    }
    if (run->operand == OPERAND_TILE)
        run->kernels->end_tiles();
    if (run->plan->attention.partials) {
        write_counts(run, &tile, memory);
    } else if (splits == 1) {
        write_tile(run, &tile, &state, memory);
    } else {
        struct unit_state *to = tile_states(run, &tile, split);
        for (int unit = 0; unit < tile.units; unit++) {
            memcpy(to[unit].acc, state.acc + unit * 128 * UNIT_LANES, sizeof to->acc);
            memcpy(to[unit].max, state.max + unit * UNIT_LANES, sizeof to->max);
            memcpy(to[unit].sum, state.sum + unit * UNIT_LANES, sizeof to->sum);
        }
    }
}

typedef float lanes __attribute__((vector_size(UNIT_LANES * sizeof(float)), aligned(4), may_alias));

/* Merges the splits of a unit, of which the first is at `parts` and others every `stride`, in order, in FP32.
 * Multiplied and added, not fused: what stands here is compiled for any processor, and a call of fmaf for each number
 * took a fifth of a small decode. Returns the lanes that saw something. */
static uint32_t merge_unit(const struct cpu_tile *state, int unit, const struct unit_state *parts, int64_t stride,
                           int splits, double logit_scale)
{
    uint32_t seen = 0;
    float weight[MAX_SPLITS][UNIT_LANES];
    float *acc = state->acc + unit * 128 * UNIT_LANES;
    for (int lane = 0; lane < UNIT_LANES; lane++) {
        float top = -INFINITY, sum = 0;
        for (int split = 0; split < splits; split++)
            top = parts[split * stride].max[lane] > top ? parts[split * stride].max[lane] : top;
        for (int split = 0; split < splits; split++) {
            const struct unit_state *part = &parts[split * stride];
            weight[split][lane] = 0;
            if (part->sum[lane] == 0)
                continue;
            seen |= 1u << lane; /* a NaN sum is something seen */
            weight[split][lane] = (float)exp(((double)part->max[lane] - top) * logit_scale);
            sum += part->sum[lane] * weight[split][lane];
        }
        state->max[unit * UNIT_LANES + lane] = top;
        state->sum[unit * UNIT_LANES + lane] = sum;
    }
    for (int d = 0; d < 128; d++) {
        lanes sum = {0};
        for (int split = 0; split < splits; split++)
            sum += ((const lanes *)parts[split * stride].acc)[d] * ((const lanes *)weight)[split];
        ((lanes *)acc)[d] = sum;
    }
    return seen;
}

/* Merges a tile's splits and writes the rows. */
static void merge_task(void *arg, size_t index, size_t thread)
{
    const struct attention_run *run = arg;
    struct thread_memory *memory = (struct thread_memory *)((char *)run->threads + thread * align_up(sizeof *memory));
    struct tile tile = tile_at(run, (int64_t)index);
    struct cpu_tile state = {.acc = memory->acc, .max = memory->max, .sum = memory->sum};
    memset(memory->visible, 0, sizeof *memory->visible * (size_t)tile.rows);
    for (int unit = 0; unit < tile.units; unit++) {
        uint32_t seen = merge_unit(&state, unit, tile_states(run, &tile, 0) + unit, tile.rows, run->plan->num_splits,
                                   tile.logit_scale);
        for (int i = 0; i < run->rows_per_unit; i++) {
            int r = unit * run->rows_per_unit + i;
            if (r < tile.rows && seen >> i * run->ratio & ((1u << run->ratio) - 1))
                memory->visible[r] = 1;
        }
    }
    write_tile(run, &tile, &state, memory);
}

msa_status cpu_attention_run(msa_plan *plan, const msa_attention_args *args, msa_stream stream)
{
    (void)stream;
    const msa_attention_desc *desc = &plan->attention;
    const struct cpu_kernels *kernels = cpu_kernels_of(plan->context);
    struct attention_run run = {
        .plan = plan,
        .args = args,
        .kernels = kernels,
        .operand = cpu_choose_operand(desc->q_dtype, kernels->attend[OPERAND_TILE], kernels->attend[OPERAND_BF16]),
        .q_format = query_format(desc->q_dtype),
        .rounding = desc->q_dtype == MSA_E4M3   ? ROUND_E4M3
                    : desc->q_dtype == MSA_BF16 ? ROUND_BF16
                                                : ROUND_FP16,
        .ratio = desc->num_q_heads / desc->num_kv_heads,
        .rows_per_unit = UNIT_LANES / (desc->num_q_heads / desc->num_kv_heads),
        .pages_per_split = (desc->topk + plan->num_splits - 1) / plan->num_splits,
        .threads = plan->step.workspace,
        .states = (struct unit_state *)((char *)plan->step.workspace +
                                        align_up(sizeof(struct thread_memory)) * (size_t)plan->context->num_threads),
    };
    run.kv_format = storage_format(desc->kv_dtype, desc->q_dtype, run.operand);
    run.kv_factor = run.kv_format == FORMAT_E4M3_SMALL ? 1 / E4M3_SMALL : 1;
    size_t tiles = (size_t)cpu_step_tiles(plan) * (size_t)desc->num_kv_heads;
    run.items = tiles * (size_t)plan->num_splits;
    msa_status status = cpu_parallel(plan->context, run.items, attend_task, &run);
    if (!status && plan->num_splits > 1)
        status = cpu_parallel(plan->context, tiles, merge_task, &run);
    return status;
}
