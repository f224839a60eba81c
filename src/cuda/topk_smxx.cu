/* SPDX-License-Identifier: MIT
 *
 * topk_smxx.cu - exact top-k of page scores, by the selection rules of msa.h; for plans and for msa_topk.
 *
 * A team of warps takes a row and keeps its scores in registers, as 32-bit keys whose unsigned order is the rules'
 * order: -inf (no candidate) 0, NaN 1, numbers above. The wanted-th largest key is found by bisection on its value,
 * with one count a step, so that time hardly depends on the data; it ends early when a bound splits off exactly the
 * wanted number. Pages with larger keys are listed, and of equal ones the lowest fill up: they are found in page order,
 * by ballots. Lists in score order then rank their at most 32 entries.
 *
 * Teams: 1 warp for up to 256 or 1024 pages, 8 warps for up to 8192; 8, 32 and 32 keys a lane.
 * Floor: one read of the scores, 4 bytes a page (8192 rows x 1024 pages: 34 MB, 7 us at 4.7 TB/s).
 * Measured on an H200, 2026-11-29, 8192 rows: 1024 pages 49 us (ascending 47, equal 61), 8192 pages 395 us.
 */
#include "ptx.cuh"

#include <math.h>

enum { BLOCK_WARPS = 8 };

/* ------------------------------------------------------------------------------------------------ teams */

/* What a row's warps share. */
struct team_memory {
    uint32_t part[2][BLOCK_WARPS];
    uint64_t chosen[MSA_MAX_TOPK]; /* key, complement of the page: larger is better */
};

template <int WARPS> static __device__ inline void team_sync(void)
{
    if (WARPS > 1)
        __syncthreads();
    else
        __syncwarp();
}

/* The sum, or maximum, over the team. `turn` alternates between calls, so that one barrier is enough. */
template <int WARPS> static __device__ inline uint32_t team_sum(team_memory &memory, int &turn, uint32_t x)
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

template <int WARPS> static __device__ inline uint32_t team_max(team_memory &memory, int &turn, uint32_t x)
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

/* The key from which `want` candidates, or all if there are fewer, are counted: bisection between a key that at least
 * `want` reach and one that fewer do. Stops where exactly `want` reach it. */
template <int KEYS, int WARPS>
static __device__ uint32_t find_bound(const uint32_t (&key)[KEYS], uint32_t want, team_memory &memory, int &turn)
{
    uint32_t lane_max = 0;
#pragma unroll
    for (int j = 0; j < KEYS; j++)
        lane_max = lane_max > key[j] ? lane_max : key[j];
    uint32_t low = 1, high = team_max<WARPS>(memory, turn, lane_max); /* the bound is in [low, high] */
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
static __device__ int gather(const uint32_t (&key)[KEYS], uint32_t bound, uint32_t want, int first, team_memory &memory,
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
            memory.chosen[used + __popc(takens & lower)] =
                (uint64_t)key[j] << 32 | (uint32_t) ~(first + candidate<KEYS>(warp, j));
        used += __popc(takens);
        equal_before += __popc(equals);
    }
    team_sync<WARPS>();
    return (int)(all_above + left);
}

/* Writes a row's list. The chosen pages lie between `first` forced ones and those from `last` on. One warp calls it. */
static __device__ void write_list(const msa_topk_args &args, const team_memory &memory, int chosen, int first, int last,
                                  int n, int32_t *list)
{
    int lane = threadIdx.x % CUDA_WARP;
    int place = lane;
    uint64_t mine = lane < chosen ? memory.chosen[lane] : 0;
    if (args.order == MSA_TOPK_ORDER_SCORE) {
        place = 0;
        for (int i = 0; i < chosen; i++)
            place += memory.chosen[i] > mine;
    }
    if (lane < chosen)
        list[first + place] = (int32_t) ~(uint32_t)mine;
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
    cuda_row where = job.rows[row];
    if (where.request < 0)
        return -1;
    int32_t n = where.position < 0 ? 0 : where.position / MSA_PAGE_SIZE + 1;
    return n < job.args.columns ? n : job.args.columns;
}

template <int KEYS, int WARPS>
static __device__ void select_row(const cuda_topk &job, int64_t row, int64_t head, team_memory &memory)
{
    const msa_topk_args &args = job.args;
    int n = row_pages(job, row), warp = WARPS > 1 ? threadIdx.x / CUDA_WARP : 0, turn = 0;
    if (n < 0)
        return;
    int first = args.init_pages < n ? args.init_pages : n;
    int last = n - args.local_pages > first ? n - args.local_pages : first;
    const float *scores =
        (const float *)((const char *)args.scores + head * args.scores_head_stride + row * args.scores_row_stride) +
        first;
    uint32_t key[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        int i = candidate<KEYS>(warp, j);
        key[j] = i < last - first ? key_of(scores[i]) : 0;
    }
    uint32_t want = (uint32_t)(args.k - (n - (last - first)));
    int chosen = 0;
    if (want && last > first) {
        uint32_t bound = find_bound<KEYS, WARPS>(key, want, memory, turn);
        chosen = gather<KEYS, WARPS>(key, bound, want, first, memory, turn);
    }
    if (warp == 0) {
        write_list(args, memory, chosen, first, last, n,
                   (int32_t *)((char *)args.topk + head * args.topk_head_stride + row * args.topk_row_stride));
        if (job.num_valid_pages && head == 0 && threadIdx.x % CUDA_WARP == 0)
            job.num_valid_pages[row] = n;
    }
}

/* One row a team, all heads a row of the grid. */
template <int KEYS, int WARPS>
static __global__ void __launch_bounds__(BLOCK_WARPS *CUDA_WARP) select_rows(const cuda_topk job)
{
    constexpr int TEAMS = BLOCK_WARPS / WARPS;
    __shared__ team_memory memory[TEAMS];
    int team = threadIdx.x / CUDA_WARP / WARPS;
    int64_t row = (int64_t)blockIdx.x * TEAMS + team;
    if (row < job.args.rows)
        select_row<KEYS, WARPS>(job, row, blockIdx.y, memory[team]);
}

cudaError_t topk_smxx(const struct cuda_topk *job, cudaStream_t stream)
{
    int32_t columns = job->args.columns, warps = columns <= 1024 ? 1 : 8;
    dim3 grid(grid_blocks(job->args.rows, BLOCK_WARPS / warps), (unsigned)job->args.num_heads);
    auto kernel = columns <= 256 ? select_rows<8, 1> : columns <= 1024 ? select_rows<32, 1> : select_rows<32, 8>;
    return launch(kernel, grid, BLOCK_WARPS * CUDA_WARP, 0, false, stream, *job);
}
