/* SPDX-License-Identifier: MIT
 *
 * step.cuh - what kernels that cut a step into work share: how they are launched, running sums and maxima over a
 * block's threads, the search in them, and the pages of a tile.
 */
#ifndef MSA_CUDA_STEP_CUH
#define MSA_CUDA_STEP_CUH

#include "ptx.cuh"

/* Of kernels between others that take all of an SM's shared memory. An SM is divided into that and its L1 anew only
 * once nothing runs on it, and then no launch can be on its way while the one ahead of it runs; so all ask for the
 * same. */
template <typename... Params, typename... Args>
static cudaError_t launch_between(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
                                  bool dependent, cudaStream_t stream, const Args &...args)
{
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    return error ? error : launch(kernel, grid, threads, shared_bytes, dependent, stream, args...);
}

enum { SCAN_THREADS = CUDA_WARP * CUDA_WARP }; /* of the block */

/* Steps as decode has them: `prepare` takes one launch for all of it, by a thread a request and a tile. */
static inline bool fits_small(const cuda_step &step, int threads)
{
    return step.batch <= threads && step.num_tiles <= threads;
}

static inline bool is_small(const cuda_step &step)
{
    constexpr int64_t MOST = 4096; /* lists of rows, or rows */
    int64_t lists = step.lists ? step.lists : 1;
    return fits_small(step, SCAN_THREADS) && step.total_q * lists <= MOST;
}

/* Attention: whether the launch behind the common ones finds the requests prepared when it starts, before it waits: the
 * launch ahead of it lets it start once it has waited for them itself. */
static inline bool requests_come_first(const cuda_step &step)
{
    return !is_small(step);
}

struct maximum {
    static __device__ int32_t of(int32_t a, int32_t b)
    {
        return a > b ? a : b;
    }
};
struct sum {
    template <typename T> static __device__ T of(T a, T b)
    {
        return a + b;
    }
};

/* Pages with a score for the last row of a tile, and so at most for any. */
static __device__ inline int32_t history_pages(int32_t max_pages, const cuda_tile &tile)
{
    int64_t last = (int64_t)tile.first_position + tile.num_rows - 1;
    int64_t pages = tile.num_rows == 0 || last < 0 ? 0 : last / MSA_PAGE_SIZE;
    return (int32_t)(pages < max_pages ? pages : max_pages);
}

static __device__ inline int32_t history_pages(const cuda_step &step, const cuda_tile &tile)
{
    return history_pages(step.max_pages, tile);
}

/* The first of `count` ascending numbers that is above x; count: none. */
template <typename T, typename X> static __device__ inline int32_t first_above(const T *ascending, int32_t count, X x)
{
    int32_t low = 0, high = count;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (ascending[middle] > x)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Exclusive scan over the block's threads, starting from 0; *total is that of all. Every thread calls it. */
template <typename OP, int THREADS = SCAN_THREADS, typename T> static __device__ T block_scan(T x, T *total)
{
    constexpr int WARPS = THREADS / CUDA_WARP;
    __shared__ T warp_total[WARPS];
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    for (int d = 1; d < CUDA_WARP; d *= 2) {
        T y = __shfl_up_sync(~0u, x, d);
        x = lane >= d ? OP::of(x, y) : x;
    }
    __syncthreads(); /* of the call before this one, all have read */
    if (lane == CUDA_WARP - 1)
        warp_total[warp] = x;
    T before = __shfl_up_sync(~0u, x, 1);
    before = lane ? before : 0;
    __syncthreads();
    x = warp_total[lane < WARPS ? lane : WARPS - 1]; /* those past the last warp's are not looked at */
    for (int d = 1; d < WARPS; d *= 2) {
        T y = __shfl_up_sync(~0u, x, d);
        x = lane >= d ? OP::of(x, y) : x;
    }
    T earlier = __shfl_sync(~0u, x, warp ? warp - 1 : 0);
    *total = OP::of((T)0, __shfl_sync(~0u, x, WARPS - 1));
    return OP::of((T)0, warp ? OP::of(earlier, before) : before);
}

#endif
