/* SPDX-License-Identifier: MIT
 *
 * topk_smxx.cu - exact top-k of page scores, by the selection rules of msa.h; for plans and for msa_topk.
 *
 * A team of warps takes a row and keeps its scores in registers, as 32-bit keys whose unsigned order is the rules'
 * order: -inf (no candidate) 0, NaN 1, numbers above. The wanted-th largest of the 32 lanes' largest keys bounds the
 * wanted-th largest key from below, and few keys reach it (21 on average of 1024, for 15): one a lane, in page order,
 * they lose their smallest until the wanted number is left. Warps that share a row hand their few to the first, which
 * does the same again. Where more than 32 reach the bound, mostly equal scores, the wanted-th key is found by bisection
 * from there on; larger keys are listed and the lowest pages of equal ones fill up. Lists in score order then rank
 * their at most 32 entries.
 *
 * Teams: 1 warp for up to 128, 256 or 1024 pages, 8 warps for up to 8192; 4, 8, 32 and 32 keys a lane; short rows of
 * the third take the second's way. Floor: one read of the scores, 4 bytes a page (8192 rows x 1024 pages: 34 MB, 7 us
 * at 4.7 TB/s). Measured on an H200, 2026-11-29, 8192 rows: 1024 pages 19 us (equal scores 28), 8192 pages 136 us.
 */
#include "ptx.cuh"

#include <math.h>

enum { BLOCK_WARPS = 8, FEW_KEYS = 4, SHORT_KEYS = 8, LONG_KEYS = 32 }; /* keys a lane */

/* ------------------------------------------------------------------------------------------------ teams */

/* What a row's warps share. */
template <int WARPS> struct team_memory {
    uint32_t part[2][WARPS];
    uint64_t chosen[MSA_MAX_TOPK]; /* key, complement of the candidate: larger is better */
    int32_t few[WARPS][CUDA_WARP]; /* a warp's candidates that reach the bound, and their keys */
    uint32_t few_keys[WARPS][CUDA_WARP];
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

/* The n-th largest of the lanes' keys: a bitonic sort, falling. */
static __device__ inline uint32_t nth_largest(uint32_t key, int n)
{
    int lane = threadIdx.x % CUDA_WARP;
#pragma unroll
    for (int size = 2; size <= CUDA_WARP; size *= 2)
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2) {
            uint32_t other = __shfl_xor_sync(~0u, key, step);
            bool larger = ((lane & step) == 0) == ((lane & size) == 0);
            key = (key < other) == larger ? other : key;
        }
    return __shfl_sync(~0u, key, n - 1);
}

/* Lists a warp's candidates that reach the bound, in page order, if they are at most 32; returns their number. */
template <int KEYS>
static __device__ inline int list_few(const uint32_t (&key)[KEYS], uint32_t bound, int warp, int32_t *few)
{
    int lane = threadIdx.x % CUDA_WARP;
    uint32_t lanes = 0; /* in lane j: the lanes whose key j reaches the bound */
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        uint32_t reach = __ballot_sync(~0u, key[j] >= bound);
        lanes = lane == j ? reach : lanes;
    }
    int count = __popc(lanes), end = count;
#pragma unroll
    for (int d = 1; d < KEYS; d *= 2) {
        int before = __shfl_up_sync(~0u, end, d);
        end += lane >= d ? before : 0;
    }
    int all = __shfl_sync(~0u, end, KEYS - 1);
    if (all <= CUDA_WARP)
        for (int place = end - count; lanes; lanes &= lanes - 1)
            few[place++] = (warp * KEYS + lane) * CUDA_WARP + __ffs((int)lanes) - 1;
    __syncwarp();
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

/* Chooses `want` of the candidates that a warp holds, into memory.chosen; returns their number. reload(i) is candidate
 * i's key again. */
template <int KEYS, typename RELOAD>
static __device__ int choose_by_warp(const uint32_t (&key)[KEYS], uint32_t want, team_memory<1> &memory, RELOAD reload)
{
    int lane = threadIdx.x % CUDA_WARP, turn = 0;
    uint32_t bound = nth_largest(largest_key(key), (int)want);
    bound = bound ? bound : 1;
    int n = list_few<KEYS>(key, bound, 0, memory.few[0]);
    if (n <= CUDA_WARP) {
        int32_t candidate = lane < n ? memory.few[0][lane] : 0;
        return choose_few(candidate, lane < n ? reload(candidate) : 0, n, want, memory.chosen);
    }
    return gather<KEYS, 1>(key, find_bound<KEYS, 1>(key, bound, want, memory, turn), want, memory, turn);
}

/* The same for a team. The warps' few are candidates for the first warp, which translates its choice. */
template <int KEYS, int WARPS, typename RELOAD>
static __device__ int choose_by_team(const uint32_t (&key)[KEYS], uint32_t want, team_memory<WARPS> &memory,
                                     team_memory<1> &first_warp, RELOAD reload)
{
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, turn = 0;
    uint32_t bound = nth_largest(largest_key(key), (int)want);
    bound = team_max<WARPS>(memory, turn, bound ? bound : 1);
    int n = list_few<KEYS>(key, bound, warp, memory.few[warp]);
    if (n <= CUDA_WARP)
        memory.few_keys[warp][lane] = lane < n ? reload(memory.few[warp][lane]) : 0;
    if (__syncthreads_or(n > CUDA_WARP))
        return gather<KEYS, WARPS>(key, find_bound<KEYS, WARPS>(key, bound, want, memory, turn), want, memory, turn);
    if (warp > 0)
        return 0;
    uint32_t few[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        few[w] = memory.few_keys[w][lane];
    int chosen = choose_by_warp<WARPS>(few, want, first_warp,
                                       [&](int i) { return memory.few_keys[i / CUDA_WARP][i % CUDA_WARP]; });
    if (lane < chosen) {
        uint64_t mine = first_warp.chosen[lane];
        uint32_t i = ~(uint32_t)mine;
        memory.chosen[lane] = (mine >> 32 << 32) | (uint32_t)~memory.few[i / CUDA_WARP][i % CUDA_WARP];
    }
    __syncwarp();
    return chosen;
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
    cuda_row where = job.rows[row];
    if (where.request < 0)
        return -1;
    int32_t n = where.position < 0 ? 0 : where.position / MSA_PAGE_SIZE + 1;
    return n < job.args.columns ? n : job.args.columns;
}

/* What a block's teams share. */
template <int WARPS> struct block_memory {
    team_memory<WARPS> team[BLOCK_WARPS / WARPS];
    team_memory<1> first_warp[WARPS > 1 ? 1 : 0]; /* the first warp's, while it chooses among the team's few */
};

template <int KEYS, int WARPS>
static __device__ void select_row(const cuda_topk &job, int64_t row, int n, int64_t head, block_memory<WARPS> &block)
{
    const msa_topk_args &args = job.args;
    team_memory<WARPS> &memory = block.team[threadIdx.x / CUDA_WARP / WARPS];
    int warp = WARPS > 1 ? threadIdx.x / CUDA_WARP : 0;
    int first = args.init_pages < n ? args.init_pages : n;
    int last = n - args.local_pages > first ? n - args.local_pages : first;
    int want = args.k - (n - (last - first)), chosen = 0;
    if (want && last > first) {
        const float *scores =
            (const float *)((const char *)args.scores + head * args.scores_head_stride + row * args.scores_row_stride) +
            first;
        float score[KEYS];
        uint32_t key[KEYS];
#pragma unroll
        for (int j = 0; j < KEYS; j++) { /* without a condition, so that all loads are under way together */
            int i = candidate<KEYS>(warp, j);
            score[j] = scores[i < last - first ? i : last - first - 1];
        }
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            key[j] = candidate<KEYS>(warp, j) < last - first ? key_of(score[j]) : 0;
        auto reload = [&](int i) { return key_of(scores[i]); };
        if constexpr (WARPS == 1)
            chosen = choose_by_warp<KEYS>(key, (uint32_t)want, memory, reload);
        else
            chosen = choose_by_team<KEYS, WARPS>(key, (uint32_t)want, memory, block.first_warp[0], reload);
    }
    if (warp == 0) {
        write_list(args, memory.chosen, chosen, first, last, n,
                   (int32_t *)((char *)args.topk + head * args.topk_head_stride + row * args.topk_row_stride));
        if (job.num_valid_pages && head == 0 && threadIdx.x % CUDA_WARP == 0)
            job.num_valid_pages[row] = n;
    }
}

/* One row a team, all heads a row of the grid. */
template <int KEYS, int WARPS>
static __global__ void __launch_bounds__(BLOCK_WARPS *CUDA_WARP, KEYS == LONG_KEYS ? 2 : 4) select_rows(const cuda_topk job)
{
    __shared__ block_memory<WARPS> memory;
    int64_t row = (int64_t)blockIdx.x * (BLOCK_WARPS / WARPS) + threadIdx.x / CUDA_WARP / WARPS;
    int n = row < job.args.rows ? row_pages(job, row) : -1;
    if (n < 0)
        return;
    if (WARPS == 1 && KEYS > SHORT_KEYS && n <= SHORT_KEYS * CUDA_WARP)
        select_row<SHORT_KEYS, WARPS>(job, row, n, blockIdx.y, memory);
    else
        select_row<KEYS, WARPS>(job, row, n, blockIdx.y, memory);
}

cudaError_t topk_smxx(const struct cuda_topk *job, cudaStream_t stream)
{
    int32_t columns = job->args.columns, warps = columns <= 1024 ? 1 : 8;
    dim3 grid(grid_blocks(job->args.rows, BLOCK_WARPS / warps), (unsigned)job->args.num_heads);
    auto kernel = columns <= 128    ? select_rows<FEW_KEYS, 1>
                  : columns <= 256  ? select_rows<SHORT_KEYS, 1>
                  : columns <= 1024 ? select_rows<LONG_KEYS, 1>
                                    : select_rows<LONG_KEYS, BLOCK_WARPS>;
    return launch(kernel, grid, BLOCK_WARPS * CUDA_WARP, 0, false, stream, *job);
}
