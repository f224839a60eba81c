/* SPDX-License-Identifier: MIT
 *
 * prefill_cut_sm90.cu - what `prepare` of prefill_sm90 cuts a step into, after the rows' pages are known: windows,
 * unions (prefill_join_sm90.cu), which tiles go page-major, and their lists (prefill_lists_sm90.cu), as
 * prefill_sm90.cuh and prefill_pages_sm90.cuh say.
 *
 *   find_windows    one block                pages before each request, where windows begin; others clear sources and
 *                                            counters. Beside the launch ahead, once requests are there
 *   join_few, ...   a warp a tile and list   unions of tiles, and the choice; entries of page-major tiles are counted
 *   choose_tiles    a warp a tile and list   the same without unions, for tiles of many queries, and where page-major
 *                                            is forced
 *   sum_places      a block a list           what lies before each page
 *   write_entries   1024 or 4096 pages a     entries in the pages' order; items
 *                   block and list
 *
 * Integers alone are added up in no fixed order, and which entry of a place comes first changes no result. Each launch
 * is on its way while the one ahead of it runs; the last two end at once where no tile is page-major.
 *
 * Measured on an H200, 2026-11-30, lists of 16384 rows and 4 KV heads (1M pages), graphs of `prepare` alone, by leaving
 * launches out from the last one on, us: requests, rows and pages 9.0, windows 1.6, then where all tiles go page-major
 * (scattered) join_few 11.3, sum_places 5.1, write_entries 7.9: 34.9 together; where none does (even) 15.7, 0.8, 2.1:
 * 29.2.
 */
#include "prefill_cut_sm90.cuh"
#include "step.cuh"

enum { CHOOSE_THREADS = 128, CHOOSE_WARPS = CHOOSE_THREADS / CUDA_WARP };

/* ------------------------------------------------------------------------------------------------ windows */

/* By one block. */
static __device__ __forceinline__ void cut_windows(const pages_job &job)
{
    int32_t before = 0, most = 0;
    for (int64_t round = 0; round < job.step.batch; round += SCAN_THREADS) {
        int64_t b = round + threadIdx.x;
        int32_t pages = b < job.step.batch ? pages_of(__ldcg(&job.step.requests[b].kv_len)) : 0, all, largest;
        int32_t in_round = block_scan<sum>(pages, &all);
        block_scan<maximum>(pages, &largest);
        most = largest > most ? largest : most;
        if (b < job.step.batch)
            job.own.first_page[b] = before + in_round;
        before += all;
    }
    if (threadIdx.x == 0) {
        job.own.first_page[job.step.batch] = before;
        job.own.first_page[job.step.batch + 1] = most;
        *job.own.made = 0;
    }
    __syncthreads();
    int32_t windows = num_windows(job, job.step.batch), size = size_of_window(job).pages;
    for (int32_t w = threadIdx.x; w <= windows; w += SCAN_THREADS) {
        /* The first request that begins at or past the window. */
        int32_t batch = job.step.batch, first = first_above(job.own.first_page, batch, (int64_t)w * size - 1);
        job.own.first_request[w] = w < windows ? first : batch;
    }
}

/* early: requests are there, and nothing before this step is at work, so all is done beside the launch ahead. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    find_windows(const __grid_constant__ pages_job job, int64_t counter_words, bool early)
{
    grid_release();
    if (!early)
        grid_wait();
    if (blockIdx.x == 0) {
        cut_windows(job);
    } else {
        int64_t i = (int64_t)(blockIdx.x - 1) * SCAN_THREADS + threadIdx.x;
        if (i < num_sources(job))
            job.own.sources[i] = image_source{-1, 0, 0};
        if (i < counter_words)
            job.pages.counters[i] = 0;
    }
    if (early)
        grid_wait();
}

/* ------------------------------------------------------------------------------------------------ choosing */

static __global__ void __launch_bounds__(CHOOSE_THREADS) choose_tiles(const __grid_constant__ pages_job job)
{
    extern __shared__ uint32_t bins[];
    __shared__ uint32_t all_bits[CHOOSE_WARPS][PAGE_WORDS];
    __shared__ block_counts<CHOOSE_WARPS> counts;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, topk = job.step.topk;
    int64_t index = (int64_t)blockIdx.x * CHOOSE_WARPS + warp, list = blockIdx.y;
    uint32_t *bits = all_bits[warp];
    cuda_tile tile = {};
    clear_counts(job, counts, bins);
    grid_release();
    grid_wait();
    if (index < job.step.num_tiles)
        tile = job.step.tiles[index];
    if (tile.num_rows == 0) {
        end_tile(job, counts, bins, list, false);
        return;
    }
    int end_row = job.desc.strategy == MSA_STRATEGY_PAGE_MAJOR ? 0 : tile.num_rows; /* forced: nothing to look at */
    for (int i = lane; i < PAGE_WORDS; i += CUDA_WARP)
        bits[i] = 0;
    __syncwarp();
    const cuda_page *pages = job.step.pages + (list * job.step.total_q + tile.first_row) * topk;
    int group = GROUP_WARPS * job.width, joined = 0, named = 0;
    for (int row = 0; row < end_row; row += group) {
        int end = min(row + group, end_row) * topk;
        for (int first = row * topk; first < end; first += CUDA_WARP) {
            int32_t page = first + lane < end ? pages[first + lane].logical : -1;
            uint32_t bit = 1u << page % 32;
            bool fresh = page >= 0 && !(atomicOr(&bits[page / 32], bit) & bit);
            joined += __popc(__ballot_sync(~0u, fresh));
            named += __popc(__ballot_sync(~0u, page >= 0));
        }
        __syncwarp();
        for (int i = row * topk + lane; i < end; i += CUDA_WARP)
            if (pages[i].logical >= 0)
                bits[pages[i].logical / 32] = 0;
        __syncwarp();
    }
    if (end_row == 0 || is_scattered(job, job.step.requests[tile.request], joined, named)) {
        make_page_major(job, tile, list, index, [&](int row) {
            int32_t low = 0, high = topk; /* a row's pages come first */
            while (low < high) {
                int32_t middle = (low + high) / 2;
                if (pages[row * topk + middle].logical < 0)
                    high = middle;
                else
                    low = middle + 1;
            }
            return low;
        });
        count_tile(job, counts, bins, tile, list);
        end_tile(job, counts, bins, list, true);
        return;
    }
    end_tile(job, counts, bins, list, false);
    leave_query_major(job, tile, list);
    if (lane == 0)
        job.own.tiles[list * job.step.num_tiles + index].size = 0;
}

/* ------------------------------------------------------------------------------------------------ launchers */

cudaError_t cut_step(const prefill_job &whole, cudaStream_t stream)
{
    pages_job job = make_pages_job(whole);
    bool lists_pages = has_page_lists(job), dependent = job.dependent_launch,
         forced = job.desc.strategy == MSA_STRATEGY_PAGE_MAJOR;
    unsigned tiles = (unsigned)job.step.num_tiles, lists = (unsigned)job.step.lists;
    int64_t counters = lists_pages ? (int64_t)(job.pages.counter_bytes / 4) : 0, sources = num_sources(job);
    cudaError_t error =
        launch_between(find_windows, 1 + grid_blocks(sources > counters ? sources : counters, SCAN_THREADS),
                       SCAN_THREADS, 0, dependent, stream, job, counters, dependent && requests_come_first(job.step));
    if (!error && lists_pages && (forced || !joins_few(job)))
        error = launch_between(choose_tiles, dim3(grid_blocks(tiles, CHOOSE_WARPS), lists), CHOOSE_THREADS,
                               count_bins(job) * 4, dependent, stream, job);
    if (!error && !forced)
        error = join_tiles(job, stream);
    if (!error && lists_pages)
        error = list_pages(job, stream);
    return error;
}
