/* SPDX-License-Identifier: MIT
 *
 * prefill_cut_sm90.cu - which tiles go page-major, and their lists, as prefill_pages_sm90.cuh says: a counting sort of
 * (row, page) by page.
 *
 *   choose_tiles    a warp a tile and list   decides, and counts the entries of places; a count before it is raised is
 *                                            an entry's position
 *   cut_items       a block a list           sums up places to first entries and items
 *   write_entries   a thread an entry
 * Integers alone are added up in no fixed order, and which entry of a place comes first changes no result.
 *
 * Query-major computes every page of the union of a warpgroup's queries for all of them; page-major the rows that
 * selected it, but pays for partial results, and for pages that few rows selected. A tile's choice follows from its
 * lists and its request's lengths.
 */
#include "prefill_pages_sm90.cuh"
#include "step.cuh"

enum {
    CHOOSE_THREADS = 128,
    WRITE_THREADS = 256,
    PAGE_WORDS = MSA_MAX_KV_LEN / MSA_PAGE_SIZE / 32,
    PAGE_MAJOR_COST = 30, /* of a page-major step in 1/16 of a query-major one, results and merge included */
    LEAST_SHARE = 8       /* entries that a page should have */
};

/* Where a page of a request is counted. */
static __device__ __forceinline__ int64_t find_place(const pages_job &job, int32_t first_page, int32_t chunk,
                                                     int32_t page)
{
    return first_page + (int64_t)chunk * job.own.first_page[job.step.batch + 1] + page;
}

/* ------------------------------------------------------------------------------------------------ choosing */

/* Whether the tile's rows share too few pages for query-major. bits: zeros, and left so. By a warp. */
static __device__ bool is_scattered(const pages_job &job, const cuda_tile &tile, const cuda_page *pages, uint32_t *bits)
{
    if (job.desc.strategy == MSA_STRATEGY_PAGE_MAJOR)
        return true;
    cuda_request request = job.step.requests[tile.request];
    if ((int64_t)request.num_rows * job.step.topk < (int64_t)LEAST_SHARE * pages_of(request.kv_len))
        return false;
    int group = GROUP_WARPS * job.width, lane = threadIdx.x % CUDA_WARP, joined = 0, named = 0;
    for (int row = 0; row < tile.num_rows; row += group) {
        int end = min(row + group, tile.num_rows) * job.step.topk;
        for (int first = row * job.step.topk; first < end; first += CUDA_WARP) {
            int32_t page = first + lane < end ? pages[first + lane].logical : -1;
            uint32_t bit = 1u << page % 32;
            bool fresh = page >= 0 && !(atomicOr(&bits[page / 32], bit) & bit);
            joined += __popc(__ballot_sync(~0u, fresh));
            named += __popc(__ballot_sync(~0u, page >= 0));
        }
        __syncwarp();
        for (int i = row * job.step.topk + lane; i < end; i += CUDA_WARP)
            if (pages[i].logical >= 0)
                bits[pages[i].logical / 32] = 0;
        __syncwarp();
    }
    return (int64_t)joined * group * 16 > (int64_t)named * PAGE_MAJOR_COST;
}

static __global__ void __launch_bounds__(CHOOSE_THREADS) choose_tiles(const __grid_constant__ pages_job job)
{
    constexpr int WARPS = CHOOSE_THREADS / CUDA_WARP;
    __shared__ uint32_t all_bits[WARPS][PAGE_WORDS];
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, topk = job.step.topk;
    int64_t index = (int64_t)blockIdx.x * WARPS + warp, list = blockIdx.y;
    cuda_tile tile = {};
    if (index < job.step.num_tiles)
        tile = job.step.tiles[index];
    if (tile.num_rows == 0)
        return;
    for (int i = lane; i < PAGE_WORDS; i += CUDA_WARP)
        all_bits[warp][i] = 0;
    __syncwarp();
    int64_t id = (list * job.step.total_q + tile.first_row) * topk;
    const cuda_page *pages = job.step.pages + id;
    bool chosen = is_scattered(job, tile, pages, all_bits[warp]);
    if (lane == 0)
        job.own.tiles[list * job.step.num_tiles + index].size = chosen ? PAGE_MAJOR_TILE : 0;
    int32_t first_page = job.own.first_page[tile.request];
    auto set_count = [&](int row, int32_t count) {
        int32_t *to =
            job.pages.counts + (int64_t)(tile.first_row + row) * job.desc.num_kv_heads + list * job.list_heads;
        for (uint32_t i = 0; i < job.list_heads; i++)
            to[i] = count;
    };
    if (!chosen) {
        if (lane == 0)
            *job.pages.query_major = 1;
        for (int row = lane; row < tile.num_rows; row += CUDA_WARP)
            set_count(row, -1);
        for (int i = lane; i < tile.num_rows * topk; i += CUDA_WARP)
            job.pages.positions[id + i].place = NO_PLACE;
        return;
    }
    if (lane == 0) {
        job.pages.chosen[tile.first_row / job.pages.chunk_rows] = 1;
        job.pages.chosen[(tile.first_row + tile.num_rows - 1) / job.pages.chunk_rows] = 1;
    }
    constexpr int AHEAD = 6; /* loads, then counts, under way */
    int ids = tile.num_rows * topk;
    for (int begin = lane; begin < ids; begin += AHEAD * CUDA_WARP) {
        int32_t page[AHEAD], next[AHEAD];
        page_position at[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int own = begin + i * CUDA_WARP;
            page[i] = own < ids ? pages[own].logical : -1;
            next[i] = own + 1 < ids ? pages[own + 1].logical : -1;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            at[i] = page_position{NO_PLACE, 0};
            if (page[i] < 0)
                continue;
            int32_t row = tile.first_row + (begin + i * CUDA_WARP) / topk;
            at[i].place = (uint32_t)find_place(job, first_page, row / job.pages.chunk_rows, page[i]);
            at[i].position = atomicAdd(&job.pages.counters[list * job.pages.num_places + at[i].place], 1);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int own = begin + i * CUDA_WARP, row = own / topk, rank = own - row * topk;
            if (own >= ids)
                continue;
            job.pages.positions[id + own] = at[i];
            if (page[i] < 0 ? rank == 0 : rank == topk - 1 || next[i] < 0)
                set_count(row, page[i] < 0 ? 0 : rank + 1);
            if (page[i] >= 0 && at[i].position == 0) /* the same by whoever is first */
                job.pages.chunks[list * job.pages.num_places + at[i].place] =
                    (tile.first_row + row) / job.pages.chunk_rows;
        }
    }
}

/* ------------------------------------------------------------------------------------------------ items */

static __global__ void __launch_bounds__(SCAN_THREADS) cut_items(const __grid_constant__ pages_job job)
{
    int64_t list = blockIdx.x, before = 0;
    int32_t chunks = (job.step.total_q + job.pages.chunk_rows - 1) / job.pages.chunk_rows;
    int64_t places = find_place(job, job.own.first_page[job.step.batch], chunks, 0);
    uint32_t *of_chunk = job.pages.counters + job.step.lists * job.pages.num_places + list * job.pages.num_chunks;
    int step_entries = GROUP_WARPS * job.width;
    for (int64_t round = 0; round < places; round += SCAN_THREADS) {
        int64_t place = round + threadIdx.x, at = list * job.pages.num_places + place;
        int count = place < places ? (int)job.pages.counters[at] : 0, steps = (count + step_entries - 1) / step_entries,
            items = (steps + PAGE_STEPS - 1) / PAGE_STEPS;
        int64_t all, upto = block_scan<sum>((int64_t)items << 32 | steps * step_entries, &all) + before;
        if (count) {
            job.pages.places[at] = page_place{(uint32_t)upto, (uint32_t)(upto >> 32), count, job.pages.chunks[at]};
            atomicAdd(&of_chunk[job.pages.chunks[at]], items);
        }
        before += all;
    }
    __syncthreads();
    int32_t *first_item = job.pages.first_item + list * (job.pages.num_chunks + 1), item = 0;
    if (threadIdx.x == 0)
        for (int32_t chunk = 0; chunk <= chunks; chunk++) {
            first_item[chunk] = item;
            item += chunk < chunks ? (int32_t)__ldcg(&of_chunk[chunk]) : 0;
        }
}

/* The item that begins with the entry at `position` of its place, if one does, and what image it needs. */
static __device__ __forceinline__ void write_item(const pages_job &job, int64_t list, const page_place &place,
                                                  uint32_t position, int32_t row, const cuda_page &page)
{
    int step_entries = GROUP_WARPS * job.width, steps = (place.count + step_entries - 1) / step_entries,
        items = (steps + PAGE_STEPS - 1) / PAGE_STEPS, step = (int)position / step_entries,
        i = (step * items + steps - 1) / steps;
    if (position % step_entries || steps * i / items != step)
        return;
    int32_t request_of = job.step.rows[row].request;
    cuda_request request = job.step.requests[request_of];
    int64_t image = job.own.first_page[request_of] + page.logical, first_key = page.logical * MSA_PAGE_SIZE,
            first_row = (int64_t)place.chunk * job.pages.chunk_rows;
    int32_t keys = min(request.kv_len - (int32_t)first_key, MSA_PAGE_SIZE);
    job.pages.items[list * job.pages.most_items + place.item + i] =
        page_item{page.physical,
                  (int32_t)image,
                  place.entry + position,
                  min(steps * (i + 1) / items * step_entries, place.count) - (int)position,
                  (int32_t)(request.first_position - request.first_row + first_row + 1 - first_key),
                  keys,
                  {0, 0}};
    if (position == 0)
        job.own.sources[list * job.desc.max_batch * pages_of(job.desc.max_kv_len) + image] =
            image_source{page.physical < 0 ? INT32_MAX : page.physical, keys};
}

static __global__ void __launch_bounds__(WRITE_THREADS) write_entries(const __grid_constant__ pages_job job)
{
    int64_t id = (int64_t)blockIdx.x * WRITE_THREADS + threadIdx.x, list = blockIdx.y;
    if (id >= (int64_t)job.step.total_q * job.step.topk)
        return;
    int32_t row = (int32_t)(id / job.step.topk), rank = (int32_t)(id - (int64_t)row * job.step.topk);
    if (!job.pages.chosen[row / job.pages.chunk_rows] || job.step.rows[row].request < 0)
        return;
    id += list * job.step.total_q * job.step.topk;
    page_position at = job.pages.positions[id];
    if (at.place == NO_PLACE)
        return;
    page_place place = job.pages.places[list * job.pages.num_places + at.place];
    uint32_t *to = job.pages.entries + list * job.pages.most_entries + place.entry,
             own_row = (uint32_t)(row - place.chunk * job.pages.chunk_rows);
    to[at.position] = own_row | (uint32_t)rank << ENTRY_ROW_BITS;
    if (at.position == 0)
        for (int i = place.count; i % (GROUP_WARPS * job.width); i++)
            to[i] = own_row | NO_RANK << ENTRY_ROW_BITS;
    write_item(job, list, place, at.position, row, job.step.pages[id]);
}

cudaError_t cut_page_lists(const prefill_job &step, cudaStream_t stream)
{
    pages_job job = make_pages_job(step);
    unsigned tiles = (unsigned)job.step.num_tiles, lists = (unsigned)job.step.lists;
    cudaError_t error = cudaMemsetAsync(job.pages.counters, 0, job.pages.counter_bytes, stream);
    if (!error)
        error = launch(choose_tiles, dim3(grid_blocks(tiles, CHOOSE_THREADS / CUDA_WARP), lists), CHOOSE_THREADS, 0,
                       false, stream, job);
    if (!error)
        error = launch(cut_items, lists, SCAN_THREADS, 0, false, stream, job);
    if (!error)
        error =
            launch(write_entries, dim3(grid_blocks((int64_t)job.step.total_q * job.step.topk, WRITE_THREADS), lists),
                   WRITE_THREADS, 0, false, stream, job);
    return error;
}
