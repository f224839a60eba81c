/* SPDX-License-Identifier: MIT
 *
 * prefill_lists_sm90.cu - the lists of page-major prefill, for `prepare`, once tiles have chosen their strategy and the
 * entries of places are counted (prefill_cut_sm90.cuh); prefill_pages_sm90.cuh says what places, entries and items are.
 * This is the rest of a counting sort of (row, page) by place:
 *
 *   sum_places     a block a list sums the counters up to first entries and items
 *   write_entries  a block counts its pages in shared memory, while the launch ahead sums; then it takes room in each
 *                  place for all of its entries at once, and sorts them in shared memory, so that entries of a place
 *                  leave together. Blocks behind these write the items
 *
 * Which entry of a place comes first follows from no order, and changes no result. Both end at once where no tile is
 * page-major.
 * Floor: for each page of each row 8 bytes read and 4 written, which lie in the L2: 1M pages take 2 us. Measured there
 * on an H200, 2026-11-30, by leaving launches out: 5 and 8 us.
 */
#include "prefill_cut_sm90.cuh"
#include "step.cuh"

enum {
    THREADS = 512,
    FEW = 2,
    MANY = 8,        /* pages of a thread */
    PLACES_EACH = 4, /* of a thread, in sums */
    AT_ONCE = 4,     /* additions of a thread that wait together */
    PLACE_LANES = 8, /* for items */
    MAX_BINS = MSA_MAX_KV_LEN / MSA_PAGE_SIZE
};
constexpr uint32_t NO_PLACE = ~0u;

/* What `write_entries` keeps of a page: its bin and, from BIN_BITS on, how many of the block's entries there come before
 * it; or a place past the bins; or NO_PLACE. */
enum { BIN_BITS = 13 };
constexpr uint32_t PAST_BINS = 1u << 31;
static_assert(MAX_BINS <= 1 << BIN_BITS);

/* Places from its lowest one on that a block counts in its own memory: those of a request, and some of another request
 * or chunk behind it. The few past them are counted one by one. */
static __host__ __device__ __forceinline__ int num_bins(const cuda_attention &job)
{
    int bins = (2 * pages_of(job.desc.max_kv_len) + THREADS - 1) / THREADS * THREADS;
    return bins < MAX_BINS ? bins : MAX_BINS;
}

/* Past the last one. */
static __device__ __forceinline__ uint32_t end_of_places(const pages_job &job, int32_t chunks)
{
    return find_place(job, job.own.first_page[job.step.batch], (uint32_t)chunks);
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
    int32_t page[EACH];   /* -1: none */
    uint32_t place[EACH]; /* NO_PLACE: none */
    uint32_t entry[EACH];
    uint32_t first_row, row, rank; /* of the block; of the thread's first page, the row from the block's first one */

    __device__ own_pages(const pages_job &job, uint32_t block, uint32_t list)
    {
        uint32_t topk = (uint32_t)job.step.topk, first = block * (THREADS * EACH), id = first + threadIdx.x,
                 ids = (uint32_t)job.step.total_q * topk;
        const cuda_page *pages = job.step.pages + (size_t)list * ids + id;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            page[i] = id + i * THREADS < ids ? __ldcg(&pages[i * THREADS].logical) : -1;
        first_row = first / topk;
        row = id / topk;
        rank = id - row * topk;
        row -= first_row;
    }

    /* From those of the rows. */
    __device__ __forceinline__ void find_places(uint32_t topk, const row_place *rows)
    {
        uint32_t at_row = row, at_rank = rank, rows_on = THREADS / topk, ranks_on = THREADS - rows_on * topk;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            row_place of = rows[at_row];
            place[i] = page[i] >= 0 && of.place != NO_PLACE ? of.place + (uint32_t)page[i] : NO_PLACE;
            entry[i] = of.in_chunk | at_rank << ENTRY_ROW_BITS;
            at_rank += ranks_on;
            at_row += rows_on + (at_rank >= topk ? 1 : 0);
            at_rank -= at_rank >= topk ? topk : 0;
        }
    }
};

/* Places of the block's rows; returns the lowest, 0 without any. `lowest` is in shared memory and was NO_PLACE. */
static __device__ __forceinline__ uint32_t find_rows(const pages_job &job, int64_t list, uint32_t first_row, int count,
                                                     row_place *rows, uint32_t *lowest)
{
    uint32_t least = NO_PLACE, chunk_rows = (uint32_t)job.pages.chunk_rows;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) {
        uint32_t row = first_row + (uint32_t)i;
        row_place found = {NO_PLACE, row % chunk_rows};
        if (row < (uint32_t)job.step.total_q) {
            int32_t request = __ldcg(&job.step.rows[row].request);
            if (__ldcg(&job.pages.counts[(int64_t)row * job.desc.num_kv_heads + list * job.list_heads]) >= 0 &&
                request >= 0)
                found.place = find_place(job, job.own.first_page[request], row / chunk_rows);
        }
        rows[i] = found;
        least = min(least, found.place);
    }
    least = __reduce_min_sync(~0u, least);
    if (threadIdx.x % CUDA_WARP == 0)
        atomicMin(lowest, least);
    __syncthreads();
    return *lowest == NO_PLACE ? 0 : *lowest;
}

static __device__ __forceinline__ void clear_bins(uint32_t *bins, int count, uint32_t *lowest)
{
    for (int b = threadIdx.x; b < count; b += THREADS)
        bins[b] = 0;
    if (threadIdx.x == 0)
        *lowest = NO_PLACE;
    __syncthreads();
}

/* ------------------------------------------------------------------------------------------------ sums */

/* Where the entries of each place of a list begin, and its items; the first item of each chunk. A block a list. */
static __global__ void __launch_bounds__(THREADS) sum_places(const __grid_constant__ pages_job job)
{
    int64_t list = blockIdx.x;
    grid_wait();
    grid_release(); /* so that the choice is there when the next launch starts */
    if (!*job.pages.page_major)
        return;
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

/* ------------------------------------------------------------------------------------------------ writing */

/* Items of a list's places, and what images they need; PLACE_LANES lanes a place. */
static __device__ __forceinline__ void write_items(const pages_job &job, int64_t list, uint32_t thread,
                                                   uint32_t threads)
{
    uint32_t places = end_of_places(job, num_chunks(job)), lane = thread % PLACE_LANES,
             step_entries = (uint32_t)(GROUP_WARPS * job.width);
    for (uint32_t p = thread / PLACE_LANES; p < places; p += threads / PLACE_LANES) {
        page_place place = job.pages.places[list * job.pages.num_places + p];
        if (!place.count)
            continue;
        uint32_t row = place.some / (uint32_t)job.step.topk, rows = (uint32_t)job.pages.chunk_rows;
        cuda_row where = job.step.rows[row];
        cuda_page page = job.step.pages[(int64_t)list * job.step.total_q * job.step.topk + place.some];
        cuda_request request = job.step.requests[where.request];
        int32_t first_key = page.logical * MSA_PAGE_SIZE;
        page_item own = {page.physical,
                         job.own.first_page[where.request] + page.logical,
                         0,
                         0,
                         where.position - (int32_t)(row % rows) + 1 - first_key,
                         min(request.kv_len - first_key, MSA_PAGE_SIZE),
                         page.logical < whole_pages(request),
                         0};
        if (lane == 0)
            job.own.sources[list * job.desc.max_batch * pages_of(job.desc.max_kv_len) + own.page] =
                image_source{page.physical < 0 ? INT32_MAX : page.physical, (int16_t)own.keys, (int16_t)own.whole};
        uint32_t count = (uint32_t)place.count, steps = (count + step_entries - 1) / step_entries,
                 items = (steps + ITEM_STEPS - 1) / ITEM_STEPS;
        /* Below 2^32: a chunk's rows are few enough by MAX_PARTIAL_BYTES. */
        auto upto = [&](uint32_t n) { return steps * n / items * step_entries; };
        page_item *to = job.pages.items + list * job.pages.most_items + place.item;
        for (uint32_t i = lane; i < items; i += PLACE_LANES) {
            uint32_t begin = upto(i);
            own.first = place.entry + begin;
            own.count = (int32_t)(min(upto(i + 1), count) - begin);
            to[i] = own;
        }
    }
}

/* The first `sorting` blocks of each list write entries, the others items. What is needed of the choice is there when
 * the launch starts, so a block counts while the launch ahead adds up. */
template <int EACH>
static __global__ void __launch_bounds__(THREADS, 3)
    write_entries(const __grid_constant__ pages_job job, uint32_t sorting)
{
    extern __shared__ uint32_t bins[]; /* entries of a place, then those of the block's lower places */
    __shared__ uint32_t lowest;
    int count = num_bins(job), topk = job.step.topk;
    uint32_t *target = bins + count;           /* of a place's first entry of the block's */
    uint2 *sorted = (uint2 *)(target + count); /* targets and entries */
    row_place *rows = (row_place *)(sorted + THREADS * EACH);
    uint32_t lists = (uint32_t)job.step.lists, block = blockIdx.x / lists, list = blockIdx.x - block * lists;
    grid_release();
    if (!__ldcg(job.pages.page_major) || block >= sorting) {
        grid_wait();
        if (block >= sorting && *job.pages.page_major)
            write_items(job, list, (block - sorting) * THREADS + threadIdx.x, (gridDim.x / lists - sorting) * THREADS);
        return;
    }
    own_pages<EACH> own(job, block, list);
    clear_bins(bins, count, &lowest); /* meanwhile */
    uint32_t base = find_rows(job, list, own.first_row, block_rows(job, EACH), rows, &lowest);
    own.find_places((uint32_t)topk, rows);
    uint32_t among[EACH]; /* the block's entries of a place */
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        uint32_t bin = own.place[i] - base;
        among[i] = bin < (uint32_t)count ? atomicAdd(&bins[bin], 1) : 0;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        uint32_t bin = own.place[i] - base;
        among[i] = bin < (uint32_t)count      ? bin | among[i] << BIN_BITS
                   : own.place[i] == NO_PLACE ? NO_PLACE
                                              : own.place[i] | PAST_BINS;
    }
    __syncthreads();
    grid_wait();
    uint32_t *counters = job.pages.counters + (int64_t)list * job.pages.num_places;
    uint32_t *entries = job.pages.entries + (int64_t)list * job.step.total_q * topk;
    int bins_each = count / THREADS, first = threadIdx.x * bins_each;
    uint32_t in_thread = 0, all;
    for (int b = first; b < first + bins_each; b += AT_ONCE) {
        uint32_t at[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t own_entries = b + i < first + bins_each ? bins[b + i] : 0;
            at[i] = own_entries ? atomicAdd(&counters[base + (uint32_t)(b + i)], own_entries) : 0;
            in_thread += own_entries;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (b + i < first + bins_each)
                target[b + i] = at[i];
    }
    uint32_t before = block_scan<sum, THREADS>(in_thread, &all);
    for (int b = first; b < first + bins_each; b++) {
        uint32_t own_entries = bins[b];
        bins[b] = before;
        before += own_entries;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        uint32_t bin = among[i] % (1u << BIN_BITS), before = among[i] >> BIN_BITS;
        if (!(among[i] & PAST_BINS))
            sorted[bins[bin] + before] = make_uint2(target[bin] + before, own.entry[i]);
        else if (among[i] != NO_PLACE)
            entries[atomicAdd(&counters[among[i] - PAST_BINS], 1)] = own.entry[i];
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < all; i += THREADS)
        entries[sorted[i].x] = sorted[i].y;
}

/* ------------------------------------------------------------------------------------------------ launchers */

template <int EACH> static cudaError_t list_by(const pages_job &job, cudaStream_t stream)
{
    unsigned sorting = grid_blocks((int64_t)job.step.total_q * job.step.topk, THREADS * EACH),
             lists = (unsigned)job.step.lists, most = grid_blocks(job.num_sms, (int)lists),
             listing = grid_blocks(job.pages.num_places, THREADS / PLACE_LANES);
    int bin_bytes = num_bins(job) * 4, row_bytes = block_rows(job, EACH) * (int)sizeof(row_place),
        sorting_bytes = 2 * bin_bytes + THREADS * EACH * (int)sizeof(uint2) + row_bytes;
    listing = listing < most ? listing : most;
    constexpr int MOST_ROW_BYTES = (THREADS * EACH + 2) * (int)sizeof(row_place); /* topk 1 */
    /* The same for all plans: it is the kernel's, and other threads launch it for plans of theirs. */
    cudaError_t error = cudaFuncSetAttribute(write_entries<EACH>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             2 * MAX_BINS * 4 + THREADS * EACH * (int)sizeof(uint2) + MOST_ROW_BYTES);
    if (!error)
        error = launch_between(sum_places, lists, THREADS, 0, job.dependent_launch, stream, job);
    if (!error)
        error = launch_between(write_entries<EACH>, (sorting + listing) * lists, THREADS, sorting_bytes,
                               job.dependent_launch, stream, job, sorting);
    return error;
}

cudaError_t list_pages(const pages_job &job, cudaStream_t stream)
{
    int64_t ids = (int64_t)job.step.total_q * job.step.topk * job.step.lists;
    return ids > (int64_t)job.num_sms * (THREADS * FEW) * 2 ? list_by<MANY>(job, stream) : list_by<FEW>(job, stream);
}
