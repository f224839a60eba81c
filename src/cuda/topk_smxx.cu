/* SPDX-License-Identifier: MIT
 *
 * topk_smxx.cu - exact top-k of page scores, by the selection rules of msa.h; for plans and for msa_topk.
 *
 * A team of warps takes a row and keeps its scores in registers. The wanted-th largest of the 32 lanes' largest scores
 * (a lane of all warps together) bounds the wanted-th largest score from below, and few scores reach it (21 on average
 * of 1024, for 15): one a lane, in page order, they lose their smallest until the wanted number is left. NaN counts as
 * reaching it, so that it fills places that numbers leave. Where more than 32 reach the bound, mostly equal scores, the
 * scores become 32-bit keys whose unsigned order is the rules' order, -inf (no candidate) 0, NaN 1, numbers above: the
 * wanted-th key is found by bisection from the bound on, larger keys are listed and the lowest pages of equal ones fill
 * up. Lists in score order then rank their at most 32 entries.
 *
 * Teams: one warp for up to 2048 pages, 4, 8, 32 or 64 scores a lane, but for up to 256 rows of more than 128 pages a
 * block of 8 warps, which is done sooner; beyond that a block of 8 warps for rows that are longer than 1024 pages, and
 * one warp for each of the others: a plan's capacity is often far above a row's length.
 * Floor: one read of the scores, 4 bytes a page (8192 rows x 1024 pages: 34 MB, 7 us at 4.7 TB/s). Measured on an H200,
 * 2026-11-29, 8192 rows: 1024 pages 16 us (equal scores 26), 8192 pages 80 us (3.3 TB/s).
 */
#include "ptx.cuh"

#include <math.h>

enum { BLOCK_WARPS = 8, FEW_KEYS = 4, SHORT_KEYS = 8, LONG_KEYS = 32, LONGEST_KEYS = 64 }; /* scores a lane */
enum { FEW_ROWS = 256 };                                                                   /* of all heads */

/* Blocks an SM, as many as registers allow without spills; code for sm_100 and later takes more of them. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
enum { BLOCKS = 4, LONG_BLOCKS = 3, LONGEST_BLOCKS = 1, TEAM_BLOCKS = 2 };
#else
enum { BLOCKS = 4, LONG_BLOCKS = 4, LONGEST_BLOCKS = 2, TEAM_BLOCKS = 3 };
#endif

/* ------------------------------------------------------------------------------------------------ teams */

/* What a row's warps share. */
template <int WARPS> struct team_memory {
    uint32_t part[2][WARPS];
    uint64_t chosen[MSA_MAX_TOPK]; /* key, complement of the candidate: larger is better */
    float best[WARPS][CUDA_WARP];  /* the lanes' largest scores */
    int32_t few[WARPS][CUDA_WARP]; /* a warp's candidates that reach the bound, */
    int32_t num_few[WARPS];        /* and their number; those of more than 32 are not listed */
};

template <int WARPS> static __device__ inline void team_sync(void)
{
    if (WARPS > 1)
        __syncthreads();
    else
        __syncwarp();
}

/* The sum, or maximum, over the team. `turn` alternates between calls, so that one barrier is enough. */
template <int WARPS> static __device__ inline uint32_t team_sum(team_memory<WARPS> &memory, int &turn, uint32_t x)
{
    x = __reduce_add_sync(~0u, x);
    if (WARPS == 1)
        return x;
    if (threadIdx.x % CUDA_WARP == 0)
        memory.part[turn][threadIdx.x / CUDA_WARP] = x;
    __syncthreads();
    uint32_t all = 0;
    for (int w = 0; w < WARPS; w++)
        all += memory.part[turn][w];
    turn ^= 1;
    return all;
}

template <int WARPS> static __device__ inline uint32_t team_max(team_memory<WARPS> &memory, int &turn, uint32_t x)
{
    x = __reduce_max_sync(~0u, x);
    if (WARPS == 1)
        return x;
    if (threadIdx.x % CUDA_WARP == 0)
        memory.part[turn][threadIdx.x / CUDA_WARP] = x;
    __syncthreads();
    uint32_t all = 0;
    for (int w = 0; w < WARPS; w++)
        all = all > memory.part[turn][w] ? all : memory.part[turn][w];
    turn ^= 1;
    return all;
}

/* ------------------------------------------------------------------------------------------------ one row */

static __device__ inline uint32_t key_of(float score)
{
    uint32_t bits = __float_as_uint(score + 0.0f); /* -0 + 0 is +0 */
    bits = bits >> 31 ? ~bits : bits | 0x80000000;
    return score == -INFINITY ? 0 : isnan(score) ? 1 : bits;
}

/* Key j of a lane is that of candidate (warp * KEYS + j) * 32 + lane, so a warp's candidates are consecutive. */
template <int KEYS> static __device__ inline int candidate(int warp, int j)
{
    return (warp * KEYS + j) * CUDA_WARP + (int)threadIdx.x % CUDA_WARP;
}

template <int KEYS> static __device__ inline uint32_t largest_key(const uint32_t (&key)[KEYS])
{
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < KEYS; j++)
        largest = largest > key[j] ? largest : key[j];
    return largest;
}

/* A warp's part of a row's candidates; -inf past the last. Written out, as the compiler would make a branch of each
 * condition and wait for each load; these are all under way together. */
template <int KEYS>
static __device__ inline void load_scores(const float *scores, int count, int warp, float (&score)[KEYS])
{
    int mine = candidate<KEYS>(warp, 0), left = count - mine;
    const float *from = (const float *)__cvta_generic_to_global(scores + mine);
#pragma unroll
    for (int j = 0; j < KEYS; j++)
        asm volatile("{\n"
                     ".reg .pred there;\n"
                     "setp.gt.s32 there, %1, %3;\n"
                     "mov.b32 %0, 0xFF800000;\n"
                     "@there ld.global.f32 %0, [%2];\n"
                     "}"
                     : "=f"(score[j])
                     : "r"(left), "l"(from + j * CUDA_WARP), "r"(j * CUDA_WARP));
}

/* The largest score of a lane, over all warps of the team. NaN is left out. */
template <int KEYS, int WARPS>
static __device__ inline float largest_score(const float (&score)[KEYS], team_memory<WARPS> &memory)
{
    float best = -INFINITY;
#pragma unroll
    for (int j = 0; j < KEYS; j++)
        best = fmaxf(best, score[j]);
    if (WARPS > 1) {
        int lane = threadIdx.x % CUDA_WARP;
        memory.best[threadIdx.x / CUDA_WARP][lane] = best;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            best = fmaxf(best, memory.best[w][lane]);
    }
    return best;
}

/* A step of a bitonic sort: compares lanes `step` apart; runs of `size` lanes fall and rise in turn. */
static __device__ inline float sort_step(float x, int size, int step)
{
    int lane = threadIdx.x % CUDA_WARP;
    float other = __shfl_xor_sync(~0u, x, step);
    return ((lane & step) == 0) == ((lane & size) == 0) ? fmaxf(x, other) : fminf(x, other);
}

/* The n-th largest of the lanes' numbers; of n <= 16 the 16th, as that many can be told from the others without
 * sorting them: of two sorted halves, one falling and one rising, the larger of each pair. */
static __device__ inline float nth_largest(float x, int n)
{
#pragma unroll
    for (int size = 2; size < CUDA_WARP; size *= 2)
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2)
            x = sort_step(x, size, step);
    if (n <= CUDA_WARP / 2) {
        int bits = __float_as_int(fmaxf(x, __shfl_xor_sync(~0u, x, CUDA_WARP / 2)));
        int least = __reduce_min_sync(~0u, bits ^ (bits >> 31 & INT32_MAX)); /* integers in the numbers' order */
        return __int_as_float(least ^ (least >> 31 & INT32_MAX));
    }
#pragma unroll
    for (int step = CUDA_WARP / 2; step > 0; step /= 2)
        x = sort_step(x, CUDA_WARP, step);
    return __shfl_sync(~0u, x, n - 1);
}

/* The next number below; -inf for itself. */
static __device__ inline float next_below(float x)
{
    uint32_t bits = __float_as_uint(x);
    if (x == 0)
        return __uint_as_float(0x80000001);
    return x == -INFINITY ? x : __uint_as_float(bits >> 31 ? bits + 1 : bits - 1);
}

/* Lists a warp's candidates above `below`, and NaN, in page order, if they are at most 32; returns their number. */
template <int KEYS>
static __device__ inline int list_few(const float (&score)[KEYS], float below, int warp, int32_t *few)
{
    int lane = threadIdx.x % CUDA_WARP, all = 0;
    if constexpr (KEYS <= SHORT_KEYS) {
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            bool reach = !(score[j] <= below);
            uint32_t lanes = __ballot_sync(~0u, reach);
            int place = all + __popc(lanes & ((1u << lane) - 1));
            if (reach && place < CUDA_WARP)
                few[place] = candidate<KEYS>(warp, j);
            all += __popc(lanes);
        }
    } else {
#pragma unroll
        for (int part = 0; part < KEYS; part += CUDA_WARP) {
            uint32_t lanes = 0; /* in lane j: the lanes whose score `part + j` reaches the bound */
#pragma unroll
            for (int j = 0; j < CUDA_WARP; j++) {
                uint32_t reach = __ballot_sync(~0u, !(score[part + j] <= below));
                lanes = lane == j ? reach : lanes;
            }
            int count = __popc(lanes), end = count;
#pragma unroll
            for (int d = 1; d < CUDA_WARP; d *= 2) {
                int before = __shfl_up_sync(~0u, end, d);
                end += lane >= d ? before : 0;
            }
            int place = all + end - count;
            all += __shfl_sync(~0u, end, CUDA_WARP - 1);
            if (all <= CUDA_WARP)
                for (; lanes; lanes &= lanes - 1)
                    few[place++] = (warp * KEYS + part + lane) * CUDA_WARP + __ffs((int)lanes) - 1;
        }
    }
    __syncwarp();
    return all;
}

/* Lane i's of all that the team's warps listed, in page order; returns their number. */
template <int WARPS> static __device__ inline int collect_few(team_memory<WARPS> &memory, int n, int32_t *mine)
{
    int lane = threadIdx.x % CUDA_WARP, all = 0;
    if (WARPS > 1) {
        if (lane == 0)
            memory.num_few[threadIdx.x / CUDA_WARP] = n;
        __syncthreads();
    }
    *mine = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        int of_warp = WARPS > 1 ? memory.num_few[w] : n, place = lane - all;
        if (place >= 0 && place < of_warp)
            *mine = memory.few[w][place];
        all += of_warp;
    }
    return all;
}

/* Chooses `want` of n <= 32 candidates, one a lane in page order: drops the smallest, of equal ones the last. */
static __device__ inline int choose_few(int32_t candidate, uint32_t key, int n, uint32_t want, uint64_t *chosen)
{
    int lane = threadIdx.x % CUDA_WARP;
    uint32_t lower = (1u << lane) - 1, value = lane < n ? key : ~0u; /* no key is ~0 */
    for (int excess = n - (int)want; excess > 0;) {
        uint32_t least = __reduce_min_sync(~0u, value), equals = __ballot_sync(~0u, value == least);
        int count = __popc(equals), dropped = count < excess ? count : excess;
        if (value == least && __popc(equals & lower) >= count - dropped)
            value = ~0u;
        excess -= dropped;
    }
    uint32_t left = __ballot_sync(~0u, value != ~0u);
    if (value != ~0u)
        chosen[__popc(left & lower)] = (uint64_t)key << 32 | (uint32_t)~candidate;
    __syncwarp();
    return __popc(left);
}

/* The key from which `want` candidates, or all if there are fewer, are counted: bisection between a key that at least
 * `want` reach (or 1) and one that fewer do. Stops where exactly `want` reach it. */
template <int KEYS, int WARPS>
static __device__ uint32_t find_bound(const uint32_t (&key)[KEYS], uint32_t low, uint32_t want,
                                      team_memory<WARPS> &memory, int &turn)
{
    uint32_t high = team_max<WARPS>(memory, turn, largest_key(key)); /* the bound is in [low, high] */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2 + 1, count = 0;
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            count += key[j] >= middle;
        count = team_sum<WARPS>(memory, turn, count);
        if (count >= want)
            low = middle;
        else
            high = middle - 1;
        if (count == want)
            break;
    }
    return low;
}

/* Puts the chosen candidates into memory.chosen in page order; returns their number. */
template <int KEYS, int WARPS>
static __device__ int gather(const uint32_t (&key)[KEYS], uint32_t bound, uint32_t want, team_memory<WARPS> &memory,
                             int &turn)
{
    int lane = threadIdx.x % CUDA_WARP, warp = WARPS > 1 ? threadIdx.x / CUDA_WARP : 0;
    uint32_t above = 0, equal = 0;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        above += key[j] > bound;
        equal += key[j] == bound;
    }
    uint32_t all_above = team_sum<WARPS>(memory, turn, above), all_equal = team_sum<WARPS>(memory, turn, equal);
    uint32_t left = want - all_above; /* places for equal ones */
    left = left < all_equal ? left : all_equal;
    /* What the team's earlier warps hold. */
    uint32_t used = 0, equal_before = 0;
    if (WARPS > 1) {
        uint32_t warp_above = __reduce_add_sync(~0u, above), warp_equal = __reduce_add_sync(~0u, equal);
        __syncthreads();
        if (lane == 0) {
            memory.part[0][warp] = warp_above;
            memory.part[1][warp] = warp_equal;
        }
        __syncthreads();
        for (int w = 0; w < warp; w++) {
            used += memory.part[0][w];
            equal_before += memory.part[1][w];
        }
        used += equal_before < left ? equal_before : left;
    }
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        uint32_t lower = (1u << lane) - 1, equals = __ballot_sync(~0u, key[j] == bound);
        bool taken = key[j] > bound || (key[j] == bound && equal_before + __popc(equals & lower) < left);
        uint32_t takens = __ballot_sync(~0u, taken);
        if (taken)
            memory.chosen[used + __popc(takens & lower)] = (uint64_t)key[j] << 32 | (uint32_t)~candidate<KEYS>(warp, j);
        used += __popc(takens);
        equal_before += __popc(equals);
    }
    team_sync<WARPS>();
    return (int)(all_above + left);
}

/* Chooses `want` of the row's candidates, into memory.chosen; returns their number to the first warp. reload(i) is
 * candidate i's score again. */
template <int KEYS, int WARPS, typename RELOAD>
static __device__ int choose(const float (&score)[KEYS], uint32_t want, team_memory<WARPS> &memory, RELOAD reload)
{
    int lane = threadIdx.x % CUDA_WARP, warp = WARPS > 1 ? threadIdx.x / CUDA_WARP : 0, turn = 0;
    float bound = nth_largest(largest_score(score, memory), (int)want);
    int32_t mine;
    int n = collect_few(memory, list_few<KEYS>(score, next_below(bound), warp, memory.few[warp]), &mine);
    if (n > CUDA_WARP) {
        uint32_t key[KEYS], low = key_of(bound);
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            key[j] = key_of(score[j]);
        low = find_bound<KEYS, WARPS>(key, low ? low : 1, want, memory, turn);
        return gather<KEYS, WARPS>(key, low, want, memory, turn);
    }
    return warp > 0 ? 0 : choose_few(mine, lane < n ? key_of(reload(mine)) : 0, n, want, memory.chosen);
}

/* Writes a row's list: the chosen candidates, pages from `first` on, lie between `first` forced pages and those from
 * `last` on. One warp calls it. */
static __device__ void write_list(const msa_topk_args &args, const uint64_t *choice, int chosen, int first, int last,
                                  int n, int32_t *list)
{
    int lane = threadIdx.x % CUDA_WARP;
    int place = lane;
    uint64_t mine = lane < chosen ? choice[lane] : 0;
    if (args.order == MSA_TOPK_ORDER_SCORE) {
        place = 0;
        for (int i = 0; i < chosen; i++)
            place += choice[i] > mine;
    }
    if (lane < chosen)
        list[first + place] = first + (int32_t) ~(uint32_t)mine;
    if (lane < first)
        list[lane] = lane;
    if (lane < n - last)
        list[first + chosen + lane] = last + lane;
    if (lane >= first + chosen + (n - last) && lane < args.k)
        list[lane] = -1;
}

/* The pages of a row, its own one included. -1: a padding row. */
static __device__ inline int row_pages(const cuda_topk &job, int64_t row)
{
    if (!job.rows) {
        int32_t n = job.args.valid_pages[row];
        return n < 0 ? 0 : n < job.args.columns ? n : job.args.columns;
    }
    int2 where = ((const int2 *)job.rows)[row]; /* request and position, by one load */
    if (where.x < 0)
        return -1;
    int32_t n = where.y < 0 ? 0 : where.y / MSA_PAGE_SIZE + 1;
    return n < job.args.columns ? n : job.args.columns;
}

template <int KEYS, int WARPS>
static __device__ void select_row(const cuda_topk &job, int64_t row, int n, int64_t head, team_memory<WARPS> &memory)
{
    const msa_topk_args &args = job.args;
    int warp = WARPS > 1 ? threadIdx.x / CUDA_WARP : 0;
    int first = args.init_pages < n ? args.init_pages : n;
    int last = n - args.local_pages > first ? n - args.local_pages : first;
    int want = args.k - (n - (last - first)), chosen = 0;
    if (want && last > first) {
        const float *scores =
            (const float *)((const char *)args.scores + head * args.scores_head_stride + row * args.scores_row_stride) +
            first;
        float score[KEYS];
        load_scores<KEYS>(scores, last - first, warp, score);
        chosen = choose<KEYS, WARPS>(score, (uint32_t)want, memory, [&](int i) { return scores[i]; });
    }
    if (warp == 0) {
        write_list(args, memory.chosen, chosen, first, last, n,
                   (int32_t *)((char *)args.topk + head * args.topk_head_stride + row * args.topk_row_stride));
        if (job.num_valid_pages && head == 0 && threadIdx.x % CUDA_WARP == 0)
            job.num_valid_pages[row] = n;
    }
}

/* A row by one warp, of at most KEYS scores a lane. */
template <int KEYS>
static __device__ void select_short_row(const cuda_topk &job, int64_t row, int n, int64_t head, team_memory<1> &memory)
{
    if (KEYS > SHORT_KEYS && n <= SHORT_KEYS * CUDA_WARP)
        select_row<SHORT_KEYS, 1>(job, row, n, head, memory);
    else if (KEYS > LONG_KEYS && n <= LONG_KEYS * CUDA_WARP)
        select_row<LONG_KEYS, 1>(job, row, n, head, memory);
    else
        select_row<KEYS, 1>(job, row, n, head, memory);
}

/* A row a warp, all heads a row of the grid. */
template <int KEYS>
static __global__ void __launch_bounds__(BLOCK_WARPS *CUDA_WARP, KEYS > LONG_KEYS    ? LONGEST_BLOCKS
                                                                 : KEYS > SHORT_KEYS ? LONG_BLOCKS
                                                                                     : BLOCKS)
    select_short_rows(const cuda_topk job)
{
    __shared__ team_memory<1> memory[BLOCK_WARPS];
    grid_release();
    grid_wait();
    int warp = threadIdx.x / CUDA_WARP;
    int64_t row = (int64_t)blockIdx.x * BLOCK_WARPS + warp;
    int n = row < job.args.rows ? row_pages(job, row) : -1;
    if (n >= 0)
        select_short_row<KEYS>(job, row, n, blockIdx.y, memory[warp]);
}

/* Rows of any length, for each head BLOCK_WARPS + 1 rows of the grid: of 8 matrix rows the longer ones have a block
 * each, and the last block has the others. */
static __global__ void __launch_bounds__(BLOCK_WARPS *CUDA_WARP, TEAM_BLOCKS) select_rows(const cuda_topk job)
{
    __shared__ union {
        team_memory<1> warp[BLOCK_WARPS];
        team_memory<BLOCK_WARPS> team;
    } memory;
    grid_release();
    grid_wait();
    int warp = threadIdx.x / CUDA_WARP, part = blockIdx.y % (BLOCK_WARPS + 1), head = blockIdx.y / (BLOCK_WARPS + 1);
    int64_t row = (int64_t)blockIdx.x * BLOCK_WARPS + (part < BLOCK_WARPS ? part : warp);
    int n = row < job.args.rows ? row_pages(job, row) : -1;
    bool is_long = n > LONG_KEYS * CUDA_WARP;
    if (n < 0 || is_long != (part < BLOCK_WARPS))
        return;
    if (!is_long)
        select_short_row<LONG_KEYS>(job, row, n, head, memory.warp[warp]);
    else if (n <= SHORT_KEYS * BLOCK_WARPS * CUDA_WARP)
        select_row<SHORT_KEYS, BLOCK_WARPS>(job, row, n, head, memory.team);
    else
        select_row<LONG_KEYS, BLOCK_WARPS>(job, row, n, head, memory.team);
}

/* A row a block: where rows leave most of the device idle, a warp alone would take longer. */
template <int KEYS>
static __global__ void __launch_bounds__(BLOCK_WARPS *CUDA_WARP, TEAM_BLOCKS) select_few_rows(const cuda_topk job)
{
    __shared__ team_memory<BLOCK_WARPS> memory;
    grid_release();
    if (job.rows && threadIdx.x == 0)
        prefetch_l2(job.rows + blockIdx.x);
    grid_wait();
    int n = row_pages(job, blockIdx.x);
    if (n >= 0)
        select_row<KEYS, BLOCK_WARPS>(job, blockIdx.x, n, blockIdx.y, memory);
}

cudaError_t topk_smxx(const struct cuda_topk *job, cudaStream_t stream)
{
    int32_t columns = job->args.columns;
    if (job->args.rows * job->args.num_heads <= FEW_ROWS && columns > FEW_KEYS * CUDA_WARP &&
        columns <= SHORT_KEYS * BLOCK_WARPS * CUDA_WARP)
        return launch(columns <= FEW_KEYS * BLOCK_WARPS * CUDA_WARP ? select_few_rows<FEW_KEYS>
                                                                    : select_few_rows<SHORT_KEYS>,
                      dim3((unsigned)job->args.rows, (unsigned)job->args.num_heads), BLOCK_WARPS * CUDA_WARP, 0,
                      job->after_kernel, stream, *job);
    bool any = columns > LONGEST_KEYS * CUDA_WARP;
    auto kernel = columns <= FEW_KEYS * CUDA_WARP     ? select_short_rows<FEW_KEYS>
                  : columns <= SHORT_KEYS * CUDA_WARP ? select_short_rows<SHORT_KEYS>
                  : columns <= LONG_KEYS * CUDA_WARP  ? select_short_rows<LONG_KEYS>
                  : any                               ? select_rows
                                                      : select_short_rows<LONGEST_KEYS>;
    dim3 grid(grid_blocks(job->args.rows, BLOCK_WARPS), (unsigned)job->args.num_heads * (any ? BLOCK_WARPS + 1 : 1));
    return launch(kernel, grid, BLOCK_WARPS * CUDA_WARP, 0, job->after_kernel, stream, *job);
}
