/* SPDX-License-Identifier: MIT
 *
 * prefill_lists_sm90.cu - the lists of page-major prefill, for `prepare`, once tiles have chosen their strategy;
 * prefill_pages_sm90.cuh says what places, entries and items are. A counting sort of (row, page) by place:
 *
 *   count_entries  counts a block's pages in shared memory and adds what it found to the places' counters, as single
 *                  additions would wait for each other at the few places there are. The last block of a list to be
 *                  done then sums the counters up to first entries and items
 *   write_entries  counts them again, takes room in each place for all of the block's entries at once, and sorts them
 *                  in shared memory, so that entries of a place leave together. Blocks behind these write the items
 *
 * Which entry of a place comes first follows from no order, and changes no result. Both end at once where no tile is
 * page-major.
 * Floor: for each page of each row twice 8 bytes read and 4 written, which lie in the L2: 1M pages take 4 us. Measured
 * there on an H200, 2026-11-30: 11 and 14 us.
 */
#include "prefill_cut_sm90.cuh"
#include "step.cuh"

enum {
    THREADS = 512,
    FEW = 2,
    MANY = 8,        /* pages of a thread */
    PLACES_EACH = 4, /* of a thread, in sums */
    PLACES = 8,      /* of a warp, for items */
    MAX_BINS = MSA_MAX_KV_LEN / MSA_PAGE_SIZE
};
constexpr uint32_t NO_PLACE = ~0u;

/* Places from its lowest one on that a block counts in its own memory: those of a request, and some of another request
 * or chunk behind it. The few past them are counted one by one. */
static __host__ __device__ __forceinline__ int num_bins(const cuda_attention &job)
{
    int bins = (2 * pages_of(job.desc.max_kv_len) + THREADS - 1) / THREADS * THREADS;
    return bins < MAX_BINS ? bins : MAX_BINS;
}

/* Where a page of a request is counted. */
static __device__ __forceinline__ uint32_t find_place(const pages_job &job, int32_t first_page, int32_t chunk,
                                                      int32_t page)
{
    return (uint32_t)(first_page + (int64_t)chunk * job.own.first_page[job.step.batch + 1] + page);
}

/* Past the last one. */
static __device__ __forceinline__ uint32_t end_of_places(const pages_job &job, int32_t chunks)
{
    return find_place(job, job.own.first_page[job.step.batch], chunks, 0);
}

static __device__ __forceinline__ int32_t num_chunks(const pages_job &job)
{
    return (job.step.total_q + job.pages.chunk_rows - 1) / job.pages.chunk_rows;
}

/* ------------------------------------------------------------------------------------------------ pages of rows */

/* A row, in shared memory: the place of its request's page 0, NO_PLACE where it is not page-major. */
struct row_place {
    uint32_t place, in_chunk;
};

/* The most rows that a block's pages are of. */
static __host__ __device__ __forceinline__ int block_rows(const pages_job &job, int each)
{
    return THREADS * each / job.step.topk + 2;
}

/* Thread t of a block has pages t, THREADS + t, ... of it: the pages of rows, numbered row * topk + rank. */
template <int EACH> struct own_pages {
    int32_t page[EACH];            /* -1: none */
    uint32_t first_row, row, rank; /* of the block; of the thread's first page, the row from the block's first one */
    uint32_t rows_on, ranks_on;    /* from one page to the next */

    __device__ own_pages(const pages_job &job, int64_t list)
    {
        uint32_t topk = (uint32_t)job.step.topk, first = blockIdx.x * (THREADS * EACH), id = first + threadIdx.x,
                 ids = (uint32_t)job.step.total_q * topk;
        const cuda_page *pages = job.step.pages + (size_t)list * ids + id;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            page[i] = id + i * THREADS < ids ? pages[i * THREADS].logical : -1;
        first_row = first / topk;
        row = id / topk;
        rank = id - row * topk;
        row -= first_row;
        rows_on = THREADS / topk;
        ranks_on = THREADS - rows_on * topk;
    }

    /* with(i, row from the block's first one, rank, page) for each page that there is. */
    template <typename WITH> __device__ __forceinline__ void for_each(int topk, WITH with) const
    {
        uint32_t at_row = row, at_rank = rank;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (page[i] >= 0)
                with(i, at_row, at_rank, (uint32_t)page[i]);
            at_rank += ranks_on;
            at_row += rows_on + (at_rank >= (uint32_t)topk ? 1 : 0);
            at_rank -= at_rank >= (uint32_t)topk ? (uint32_t)topk : 0;
        }
    }
};

/* Places of the block's rows; returns the lowest. `lowest` is in shared memory and was NO_PLACE. */
static __device__ __forceinline__ uint32_t find_rows(const pages_job &job, int64_t list, uint32_t first_row, int count,
                                                     row_place *rows, uint32_t *lowest)
{
    uint32_t least = NO_PLACE, chunk_rows = (uint32_t)job.pages.chunk_rows;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        uint32_t row = first_row + (uint32_t)i;
        row_place found = {NO_PLACE, row % chunk_rows};
        if (row < (uint32_t)job.step.total_q) {
            int32_t request = job.step.rows[row].request;
            if (job.pages.counts[(int64_t)row * job.desc.num_kv_heads + list * job.list_heads] >= 0 && request >= 0)
                found.place = find_place(job, job.own.first_page[request], (int32_t)(row / chunk_rows), 0);
        }
        rows[i] = found;
        least = min(least, found.place);
    }
    least = __reduce_min_sync(~0u, least);
    if (threadIdx.x % CUDA_WARP == 0)
        atomicMin(lowest, least);
    __syncthreads();
    return *lowest;
}

static __device__ __forceinline__ void clear_bins(uint32_t *bins, int count, uint32_t *lowest)
{
    for (int b = threadIdx.x; b < count; b += THREADS)
        bins[b] = 0;
    if (threadIdx.x == 0)
        *lowest = NO_PLACE;
    __syncthreads();
}

/* ------------------------------------------------------------------------------------------------ counting */

/* Of a list whose entries are all counted: where each place's begin, and its items; the first item of each chunk. */
static __device__ __forceinline__ void sum_places(const pages_job &job, int64_t list)
{
    int32_t chunks = num_chunks(job), step_entries = GROUP_WARPS * job.width;
    uint32_t places = end_of_places(job, chunks), *of_chunk = job.pages.chunk_items + list * job.pages.num_chunks;
    int64_t before = 0;
    for (uint32_t round = 0; round < places; round += THREADS * PLACES_EACH) {
        uint32_t first = round + threadIdx.x * PLACES_EACH;
        int64_t at = list * job.pages.num_places + first, own = 0, all;
        int32_t count[PLACES_EACH], items[PLACES_EACH];
        uint32_t some[PLACES_EACH];
#pragma unroll
        for (int i = 0; i < PLACES_EACH; i++) {
            count[i] = first + i < places ? (int32_t)__ldcg(&job.pages.counters[at + i]) : 0;
            some[i] = first + i < places ? __ldcg(&job.pages.places[at + i].some) : 0;
        }
#pragma unroll
        for (int i = 0; i < PLACES_EACH; i++) {
            int32_t steps = (count[i] + step_entries - 1) / step_entries;
            items[i] = (steps + ITEM_STEPS - 1) / ITEM_STEPS;
            own += (int64_t)items[i] << 32 | count[i];
        }
        int64_t upto = before + block_scan<sum, THREADS>(own, &all);
        before += all;
#pragma unroll
        for (int i = 0; i < PLACES_EACH; i++) {
            if (first + i < places) {
                job.pages.places[at + i] = page_place{(uint32_t)upto, (uint32_t)(upto >> 32), count[i], some[i]};
                job.pages.counters[at + i] = (uint32_t)upto;
            }
            upto += (int64_t)items[i] << 32 | count[i];
            uint32_t chunk = some[i] / (uint32_t)job.step.topk / (uint32_t)job.pages.chunk_rows;
            int32_t own_chunk = count[i] ? (int32_t)chunk : -1, last = __reduce_max_sync(~0u, own_chunk);
            bool one =
                __all_sync(~0u, own_chunk < 0 || own_chunk == last); /* a warp's places are mostly of one chunk */
            int32_t in_warp = __reduce_add_sync(~0u, items[i]);
            if (one ? threadIdx.x % CUDA_WARP == 0 && last >= 0 : own_chunk >= 0)
                atomicAdd(&of_chunk[one ? last : own_chunk], one ? in_warp : items[i]);
        }
    }
    __syncthreads();
    int32_t *first_item = job.pages.first_item + list * (job.pages.num_chunks + 1), item = 0;
    for (int32_t round = 0; round <= chunks; round += THREADS) {
        int32_t c = round + threadIdx.x, all;
        int32_t in_round = block_scan<sum, THREADS>(c < chunks ? (int32_t)__ldcg(&of_chunk[c]) : 0, &all);
        if (c <= chunks)
            first_item[c] = item + in_round;
        item += all;
    }
}

template <int EACH>
static __global__ void __launch_bounds__(THREADS, 2) count_entries(const __grid_constant__ pages_job job)
{
    constexpr int ID_BITS = 16; /* a bin has its count and, above it, which of the block's pages was the first */
    static_assert(THREADS * EACH < 1 << ID_BITS);
    extern __shared__ uint32_t bins[];
    __shared__ uint32_t lowest, blocks_before;
    int count = num_bins(job);
    int64_t list = blockIdx.y;
    uint32_t *counters = job.pages.counters + list * job.pages.num_places;
    page_place *places = job.pages.places + list * job.pages.num_places;
    grid_release();
    grid_wait();
    if (!*job.pages.page_major)
        return;
    own_pages<EACH> own(job, list);
    clear_bins(bins, count, &lowest); /* meanwhile */
    row_place *rows = (row_place *)(bins + count);
    uint32_t base = find_rows(job, list, own.first_row, block_rows(job, EACH), rows, &lowest);
    own.for_each(job.step.topk, [&](int i, uint32_t row, uint32_t, uint32_t page) {
        if (rows[row].place == NO_PLACE)
            return;
        uint32_t place = rows[row].place + page, bin = place - base, id = (uint32_t)(i * THREADS + threadIdx.x);
        if (bin >= (uint32_t)count) {
            if (atomicAdd(&counters[place], 1) == 0)
                places[place].some = blockIdx.x * (THREADS * EACH) + id;
        } else if ((atomicAdd(&bins[bin], 1) & ((1u << ID_BITS) - 1)) == 0) {
            atomicAdd(&bins[bin], id << ID_BITS);
        }
    });
    __syncthreads();
#pragma unroll 4
    for (int b = threadIdx.x; b < count; b += THREADS)
        if (bins[b] && atomicAdd(&counters[base + (uint32_t)b], bins[b] & ((1u << ID_BITS) - 1)) == 0)
            places[base + (uint32_t)b].some = blockIdx.x * (THREADS * EACH) + (bins[b] >> ID_BITS);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        blocks_before = atomicAdd(&job.pages.counted[list], 1);
    }
    __syncthreads();
    if (blocks_before < gridDim.x - 1)
        return;
    __threadfence();
    sum_places(job, list);
}

/* ------------------------------------------------------------------------------------------------ writing */

/* Items of a list's places, and what images they need; a warp takes PLACES places at a time. */
static __device__ __forceinline__ void write_items(const pages_job &job, int64_t list, uint32_t warp, uint32_t warps)
{
    uint32_t places = end_of_places(job, num_chunks(job)), first = warp * PLACES;
    int lane = threadIdx.x % CUDA_WARP;
    int32_t step_entries = GROUP_WARPS * job.width;
    for (; first < places; first += warps * PLACES) {
        page_place place = {};
        page_item common = {}; /* to all of a place's items, by a lane each */
        if (lane < PLACES && first + lane < places)
            place = job.pages.places[list * job.pages.num_places + first + lane];
        if (place.count) {
            uint32_t row = place.some / (uint32_t)job.step.topk, rows = (uint32_t)job.pages.chunk_rows;
            cuda_row where = job.step.rows[row];
            cuda_request request = job.step.requests[where.request];
            cuda_page page = job.step.pages[list * job.step.total_q * job.step.topk + place.some];
            int32_t first_key = page.logical * MSA_PAGE_SIZE;
            common.physical = page.physical;
            common.page = job.own.first_page[where.request] + page.logical;
            common.first_keys = where.position - (int32_t)(row % rows) + 1 - first_key;
            common.keys = min(request.kv_len - first_key, MSA_PAGE_SIZE);
            common.whole = page.logical < whole_pages(request);
            job.own.sources[list * job.desc.max_batch * pages_of(job.desc.max_kv_len) + common.page] = image_source{
                page.physical < 0 ? INT32_MAX : page.physical, (int16_t)common.keys, (int16_t)common.whole};
        }
        for (int p = 0; p < PLACES; p++) {
            int32_t count = __shfl_sync(~0u, place.count, p), steps = (count + step_entries - 1) / step_entries,
                    items = (steps + ITEM_STEPS - 1) / ITEM_STEPS;
            uint32_t entry = __shfl_sync(~0u, place.entry, p), item = __shfl_sync(~0u, place.item, p);
            page_item own = {__shfl_sync(~0u, common.physical, p),
                             __shfl_sync(~0u, common.page, p),
                             0,
                             0,
                             __shfl_sync(~0u, common.first_keys, p),
                             __shfl_sync(~0u, common.keys, p),
                             __shfl_sync(~0u, common.whole, p),
                             0};
            for (int32_t i = lane; i < items; i += CUDA_WARP) {
                auto upto = [&](int32_t n) { return (int32_t)((int64_t)steps * n / items) * step_entries; };
                int32_t begin = upto(i);
                own.first = entry + (uint32_t)begin;
                own.count = min(upto(i + 1), count) - begin;
                job.pages.items[list * job.pages.most_items + item + i] = own;
            }
        }
    }
}

/* The first `sorting` blocks of a list write entries, the others items. */
template <int EACH>
static __global__ void __launch_bounds__(THREADS, 2)
    write_entries(const __grid_constant__ pages_job job, uint32_t sorting)
{
    extern __shared__ uint32_t bins[]; /* entries of a place, then those of the block's lower places */
    __shared__ uint32_t lowest;
    int count = num_bins(job);
    uint32_t *target = bins + count;           /* of a place's first entry of the block's */
    uint2 *sorted = (uint2 *)(target + count); /* targets and entries */
    row_place *rows = (row_place *)(sorted + THREADS * EACH);
    int64_t list = blockIdx.y;
    grid_release();
    grid_wait();
    if (!*job.pages.page_major)
        return;
    if (blockIdx.x >= sorting) {
        write_items(job, list, (blockIdx.x - sorting) * (THREADS / CUDA_WARP) + threadIdx.x / CUDA_WARP,
                    (gridDim.x - sorting) * (THREADS / CUDA_WARP));
        return;
    }
    own_pages<EACH> own(job, list);
    clear_bins(bins, count, &lowest); /* meanwhile */
    uint32_t among[EACH];             /* the block's entries of a place */
    uint32_t base = find_rows(job, list, own.first_row, block_rows(job, EACH), rows, &lowest),
             *counters = job.pages.counters + list * job.pages.num_places;
    uint32_t *entries = job.pages.entries + list * job.step.total_q * job.step.topk;
    own.for_each(job.step.topk, [&](int i, uint32_t row, uint32_t rank, uint32_t page) {
        if (rows[row].place == NO_PLACE)
            return;
        uint32_t place = rows[row].place + page;
        if (place - base < (uint32_t)count)
            among[i] = atomicAdd(&bins[place - base], 1);
        else
            entries[atomicAdd(&counters[place], 1)] = rows[row].in_chunk | rank << ENTRY_ROW_BITS;
    });
    __syncthreads();
    int bins_each = count / THREADS, first = threadIdx.x * bins_each;
    uint32_t in_thread = 0, all;
#pragma unroll 4
    for (int b = first; b < first + bins_each; b++) {
        in_thread += bins[b];
        target[b] = bins[b] ? atomicAdd(&counters[base + (uint32_t)b], bins[b]) : 0;
    }
    uint32_t before = block_scan<sum, THREADS>(in_thread, &all);
    for (int b = first; b < first + bins_each; b++) {
        uint32_t own_entries = bins[b];
        bins[b] = before;
        before += own_entries;
    }
    __syncthreads();
    own.for_each(job.step.topk, [&](int i, uint32_t row, uint32_t rank, uint32_t page) {
        uint32_t bin = rows[row].place + page - base;
        if (rows[row].place != NO_PLACE && bin < (uint32_t)count)
            sorted[bins[bin] + among[i]] =
                make_uint2(target[bin] + among[i], rows[row].in_chunk | rank << ENTRY_ROW_BITS);
    });
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < all; i += THREADS)
        entries[sorted[i].x] = sorted[i].y;
}

/* ------------------------------------------------------------------------------------------------ launchers */

template <int EACH> static cudaError_t list_by(const pages_job &job, cudaStream_t stream)
{
    unsigned sorting = grid_blocks((int64_t)job.step.total_q * job.step.topk, THREADS * EACH),
             lists = (unsigned)job.step.lists, most = grid_blocks(job.num_sms, (int)lists),
             listing = grid_blocks(job.pages.num_places, THREADS / CUDA_WARP * PLACES);
    int bin_bytes = num_bins(job) * 4, row_bytes = block_rows(job, EACH) * (int)sizeof(row_place),
        counting_bytes = bin_bytes + row_bytes,
        sorting_bytes = 2 * bin_bytes + THREADS * EACH * (int)sizeof(uint2) + row_bytes;
    listing = listing < most ? listing : most;
    constexpr int MOST_ROW_BYTES = (THREADS * EACH + 2) * (int)sizeof(row_place); /* topk 1 */
    /* The same for all plans: it is the kernel's, and other threads launch it for plans of theirs. */
    cudaError_t error = cudaFuncSetAttribute(count_entries<EACH>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             MAX_BINS * 4 + MOST_ROW_BYTES);
    if (!error)
        error = cudaFuncSetAttribute(write_entries<EACH>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     2 * MAX_BINS * 4 + THREADS * EACH * (int)sizeof(uint2) + MOST_ROW_BYTES);
    if (!error)
        error = launch_between(count_entries<EACH>, dim3(sorting, lists), THREADS, counting_bytes, job.dependent_launch,
                               stream, job);
    if (!error)
        error = launch_between(write_entries<EACH>, dim3(sorting + listing, lists), THREADS, sorting_bytes,
                               job.dependent_launch, stream, job, sorting);
    return error;
}

cudaError_t list_pages(const pages_job &job, cudaStream_t stream)
{
    int64_t ids = (int64_t)job.step.total_q * job.step.topk * job.step.lists;
    return ids > (int64_t)job.num_sms * (THREADS * FEW) * 2 ? list_by<MANY>(job, stream) : list_by<FEW>(job, stream);
}
