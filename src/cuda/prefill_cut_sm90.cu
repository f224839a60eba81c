/* SPDX-License-Identifier: MIT
 *
 * prefill_cut_sm90.cu - what `prepare` of prefill_sm90 cuts a step into, after the rows' pages are known: windows,
 * unions (prefill_join_sm90.cu), which tiles go page-major, and their lists, as prefill_sm90.cuh and
 * prefill_pages_sm90.cuh say.
 *
 *   find_windows    one block                pages before each request, where windows begin; others clear sources and
 *                                            counts
 *   join_few, ...   a warp a tile and list   unions of tiles, the choice, and counts
 *   choose_tiles    a warp a tile and list   the choice for tiles of many queries, and where it is forced
 *   cut_items       a block a list           sums up places to first entries and items
 *   write_entries   four entries a thread    with the items, a counting sort of (row, page) by page, as a count before
 *                                            it is raised is an entry's position
 * Integers alone are added up in no fixed order, and which entry of a place comes first changes no result. Each launch
 * is on its way while the one ahead of it runs; the last two end at once where no tile is page-major.
 *
 * Measured on an H200, 2026-11-30, lists of 16384 rows and 4 KV heads (1M ids), with the launches before these, us:
 * requests and rows 6, pages 7, windows 4, join_few 22, cut_items 2, write_entries 3 where tiles stay query-major
 * (clustered), 39, 6 and 22 for the last three where all go page-major (scattered).
 */
#include "prefill_cut_sm90.cuh"
#include "step.cuh"

enum {
    CHOOSE_THREADS = 128,
    WRITE_THREADS = 256,
    WRITE_EACH = 4 /* entries of a thread, whose loads wait together */
};

/* ------------------------------------------------------------------------------------------------ windows */

static __global__ void __launch_bounds__(SCAN_THREADS)
    find_windows(const __grid_constant__ pages_job job, int64_t counter_words)
{
    grid_release();
    grid_wait();
    if (blockIdx.x > 0) {
        int64_t i = (int64_t)(blockIdx.x - 1) * SCAN_THREADS + threadIdx.x;
        if (i < num_sources(job))
            job.own.sources[i] = image_source{-1, 0};
        if (i < counter_words)
            job.pages.counters[i] = 0;
        return;
    }
    int32_t before = 0, most = 0;
    for (int64_t round = 0; round < job.step.batch; round += SCAN_THREADS) {
        int64_t b = round + threadIdx.x;
        int32_t pages = b < job.step.batch ? pages_of(job.step.requests[b].kv_len) : 0, all, largest;
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
    }
    __syncthreads();
    int32_t windows = num_windows(job, job.step.batch), size = size_of_window(job).pages;
    for (int32_t w = threadIdx.x; w <= windows; w += SCAN_THREADS) {
        int32_t low = 0, high = job.step.batch; /* the first request that begins at or past the window */
        while (low < high && w < windows) {
            int32_t middle = low + (high - low) / 2;
            if (job.own.first_page[middle] >= (int64_t)w * size)
                high = middle;
            else
                low = middle + 1;
        }
        job.own.first_request[w] = high;
    }
}

/* ------------------------------------------------------------------------------------------------ choosing */

static __global__ void __launch_bounds__(CHOOSE_THREADS) choose_tiles(const __grid_constant__ pages_job job)
{
    __shared__ uint32_t all_bits[CHOOSE_THREADS / CUDA_WARP][PAGE_WORDS];
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, topk = job.step.topk;
    int64_t index = (int64_t)blockIdx.x * (CHOOSE_THREADS / CUDA_WARP) + warp, list = blockIdx.y;
    uint32_t *bits = all_bits[warp];
    cuda_tile tile = {};
    grid_release();
    grid_wait();
    if (index < job.step.num_tiles)
        tile = job.step.tiles[index];
    if (tile.num_rows == 0)
        return;
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
        count_entries(job, tile, list, index);
        return;
    }
    leave_query_major(job, tile, list);
    if (lane == 0)
        job.own.tiles[list * job.step.num_tiles + index].size = 0;
}

/* ------------------------------------------------------------------------------------------------ items */

static __global__ void __launch_bounds__(SCAN_THREADS) cut_items(const __grid_constant__ pages_job job)
{
    int64_t list = blockIdx.x, before = 0;
    int32_t chunks = (job.step.total_q + job.pages.chunk_rows - 1) / job.pages.chunk_rows;
    grid_release();
    grid_wait();
    bool any = false;
    for (int32_t chunk = threadIdx.x; chunk < chunks; chunk += SCAN_THREADS)
        any |= job.pages.chosen[chunk] != 0;
    if (!__syncthreads_or(any))
        return;
    int64_t places = find_place(job, job.own.first_page[job.step.batch], chunks, 0);
    uint32_t *of_chunk = job.pages.counters + job.step.lists * job.pages.num_places + list * job.pages.num_chunks;
    int step_entries = GROUP_WARPS * job.width;
    for (int64_t round = 0; round < places; round += SCAN_THREADS) {
        int64_t place = round + threadIdx.x, at = list * job.pages.num_places + place;
        int count = place < places ? (int)job.pages.counters[at] : 0, steps = (count + step_entries - 1) / step_entries,
            items = (steps + ITEM_STEPS - 1) / ITEM_STEPS;
        int64_t all, upto = block_scan<sum>((int64_t)items << 32 | count, &all) + before;
        int32_t chunk = count ? job.pages.chunks[at] : -1, last = __reduce_max_sync(~0u, chunk);
        if (count)
            job.pages.places[at] = page_place{(uint32_t)upto, (uint32_t)(upto >> 32), count, chunk};
        bool one = __all_sync(~0u, chunk < 0 || chunk == last); /* a warp's places are mostly of one chunk */
        int in_warp = __reduce_add_sync(~0u, items);
        if (one ? threadIdx.x % CUDA_WARP == 0 && last >= 0 : chunk >= 0)
            atomicAdd(&of_chunk[one ? last : chunk], one ? in_warp : items);
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
        items = (steps + ITEM_STEPS - 1) / ITEM_STEPS, step = (int)position / step_entries,
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
    const cuda_step &step = job.step;
    int64_t list = blockIdx.y, ids = (int64_t)step.total_q * step.topk, first = list * ids;
    /* total_q times topk fits 32 bits: entries are numbered so */
    uint32_t begin = blockIdx.x * (WRITE_THREADS * WRITE_EACH) + threadIdx.x, topk = (uint32_t)step.topk;
    page_position at[WRITE_EACH];
    page_place place[WRITE_EACH];
    grid_release();
    grid_wait();
    constexpr uint32_t IN_BLOCK = WRITE_THREADS * WRITE_EACH;
    uint32_t last_row = (uint32_t)step.total_q - 1, chunk = blockIdx.x * IN_BLOCK / topk / job.pages.chunk_rows,
             last_chunk = min((blockIdx.x + 1) * IN_BLOCK / topk, last_row) / job.pages.chunk_rows;
    while (!job.pages.chosen[chunk]) /* nothing to do for any row of the block */
        if (++chunk > last_chunk)
            return;
#pragma unroll
    for (int i = 0; i < WRITE_EACH; i++) {
        uint32_t id = begin + i * WRITE_THREADS;
        uint32_t row = min(id / topk, last_row);
        bool used = job.pages.chosen[row / job.pages.chunk_rows] != 0, held = step.rows[row].request >= 0,
             here = job.pages.counts[(int64_t)row * job.desc.num_kv_heads + list * job.list_heads] >= 0;
        at[i] = job.pages.positions[first + min(id, (uint32_t)ids - 1)];
        if (!(used && held && here && id < ids))
            at[i].place = NO_PLACE;
    }
#pragma unroll
    for (int i = 0; i < WRITE_EACH; i++)
        if (at[i].place != NO_PLACE)
            place[i] = job.pages.places[list * job.pages.num_places + at[i].place];
#pragma unroll
    for (int i = 0; i < WRITE_EACH; i++) {
        if (at[i].place == NO_PLACE)
            continue;
        uint32_t id = begin + i * WRITE_THREADS, rank = id % topk;
        int32_t row = (int32_t)(id / topk);
        uint32_t *to = job.pages.entries + first + place[i].entry,
                 own_row = (uint32_t)(row - place[i].chunk * job.pages.chunk_rows);
        to[at[i].position] = own_row | rank << ENTRY_ROW_BITS;
        if (at[i].position % (uint32_t)(GROUP_WARPS * job.width) == 0)
            write_item(job, list, place[i], at[i].position, row, step.pages[first + id]);
    }
}

/* ------------------------------------------------------------------------------------------------ launchers */

cudaError_t cut_step(const prefill_job &whole, cudaStream_t stream)
{
    pages_job job = make_pages_job(whole);
    bool lists_pages = has_page_lists(job), dependent = job.dependent_launch,
         forced = job.desc.strategy == MSA_STRATEGY_PAGE_MAJOR;
    unsigned tiles = (unsigned)job.step.num_tiles, lists = (unsigned)job.step.lists;
    int64_t counters = lists_pages ? (int64_t)(job.pages.counter_bytes / 4) : 0, sources = num_sources(job);
    cudaError_t error = launch(find_windows, 1 + grid_blocks(sources > counters ? sources : counters, SCAN_THREADS),
                               SCAN_THREADS, 0, dependent, stream, job, counters);
    if (!error && lists_pages && (forced || !joins_few(job)))
        error = launch(choose_tiles, dim3(grid_blocks(tiles, CHOOSE_THREADS / CUDA_WARP), lists), CHOOSE_THREADS, 0,
                       dependent, stream, job);
    if (!error && !forced)
        error = join_tiles(job, stream);
    if (!error && lists_pages)
        error = launch(cut_items, lists, SCAN_THREADS, 0, dependent, stream, job);
    if (!error && lists_pages)
        error = launch(write_entries,
                       dim3(grid_blocks((int64_t)job.step.total_q * job.step.topk, WRITE_THREADS * WRITE_EACH), lists),
                       WRITE_THREADS, 0, dependent, stream, job);
    return error;
}
