/* SPDX-License-Identifier: MIT
 *
 * prefill_cut_sm90.cuh - what the launches of prefill's `prepare` share: the choice of a tile's strategy, and what
 * follows from it at once: of page-major tiles, how many entries places have.
 *
 * Query-major computes every page of the union of a warpgroup's queries for all of them; page-major the rows that
 * selected it, but pays for partial results, and for pages that few rows selected. A tile's choice follows from its
 * lists and its request's lengths.
 */
#ifndef MSA_CUDA_PREFILL_CUT_SM90_CUH
#define MSA_CUDA_PREFILL_CUT_SM90_CUH

#include "prefill_pages_sm90.cuh"

enum { PAGE_WORDS = MSA_MAX_KV_LEN / MSA_PAGE_SIZE / 32 /* of a bitmap of all pages of a request */ };

/* Of plans whose tiles have at most a warp's queries; their unions come with the choice. */
static __host__ __device__ __forceinline__ bool joins_few(const cuda_attention &job)
{
    return tile_queries(job) <= CUDA_WARP;
}

/* Of a page-major step in 1/16 of a query-major one, results and merge included: from where both take the same, by
 * docs/measurements.md (2026-11-30, "Where the border lies"). */
static __device__ __forceinline__ int page_major_cost(const pages_job &job)
{
    return job.desc.q_dtype != MSA_E4M3 ? 25 : job.precision == MSA_PRECISION_FAST ? 32 : 28;
}

/* Whether a tile's rows share too few pages for query-major. joined: pages that each warpgroup's queries selected, of
 * all warpgroups; named: pages that each query did. The last step of a page's entries is half empty on average, which
 * counts where the request has few entries a page. */
static __device__ __forceinline__ bool is_scattered(const pages_job &job, const cuda_request &request, int joined,
                                                    int named)
{
    int step_entries = GROUP_WARPS * job.width, entries = 2 * min(request.num_rows, MSA_MAX_KV_LEN) * job.step.topk,
        filled_up = entries + (step_entries - 1) * pages_of(request.kv_len);
    return (int64_t)(joined * step_entries * 16) * entries > (int64_t)(named * page_major_cost(job)) * filled_up;
}

/* Pages of a row, for all heads that share the list; -1: the row is query-major. */
static __device__ __forceinline__ void set_count(const pages_job &job, int64_t list, int row, int32_t count)
{
    int32_t *to = job.pages.counts + (int64_t)row * job.desc.num_kv_heads + list * job.list_heads;
#pragma unroll 1
    for (uint32_t i = 0; i < job.list_heads; i++)
        to[i] = count;
}

/* Of a query-major tile. By a warp. */
static __device__ __forceinline__ void leave_query_major(const pages_job &job, const cuda_tile &tile, int64_t list)
{
    int lane = threadIdx.x % CUDA_WARP;
    if (lane == 0 && !__ldcg(job.pages.query_major)) /* or all tiles write there */
        *job.pages.query_major = 1;
    for (int row = lane; row < tile.num_rows; row += CUDA_WARP)
        set_count(job, list, tile.first_row + row, -1);
}

/* Of a page-major tile. By a warp. pages_of_row: of a row of the tile. */
template <typename COUNT>
static __device__ __forceinline__ void make_page_major(const pages_job &job, const cuda_tile &tile, int64_t list,
                                                       int64_t index, COUNT pages_of_row)
{
    int lane = threadIdx.x % CUDA_WARP, chunk = tile.first_row / job.pages.chunk_rows,
        last_chunk =
            (tile.first_row + tile.num_rows - 1) / job.pages.chunk_rows; /* the next at most, as chunks are long */
    if (lane == 0) {
        job.own.tiles[list * job.step.num_tiles + index].size = PAGE_MAJOR_TILE;
        if (!__ldcg(job.pages.chosen + chunk)) /* or all tiles write there */
            *job.pages.page_major = job.pages.chosen[chunk] = 1;
        if (last_chunk > chunk)
            job.pages.chosen[last_chunk] = 1;
    }
    for (int row = lane; row < tile.num_rows; row += CUDA_WARP)
        set_count(job, list, tile.first_row + row, pages_of_row(row));
}

/* ------------------------------------------------------------------------------------------------ counting */

/* Where page 0 of a request is counted. */
static __device__ __forceinline__ uint32_t find_place(const pages_job &job, int32_t first_page, uint32_t chunk)
{
    return (uint32_t)(first_page + (int64_t)chunk * job.own.first_page[job.step.batch + 1]);
}

/* Entries of the page-major tiles of a block's warps: counted in shared memory, as single additions to the places'
 * counters would wait for each other, so few are they. A bin has the number of its entries and, from BIN_ENTRIES bits
 * on, which was the first: the warp and, TILE_IDS bits, (row, rank) of its tile. Bins are the pages of the request and
 * chunk that the block begins with; entries elsewhere are counted one by one. */
template <int WARPS> struct block_counts {
    uint32_t done;         /* warps, from bit DONE_BITS on those whose tile is page-major */
    uint32_t base;         /* the place of bin 0 */
    uint32_t first[WARPS]; /* (row, rank) of a tile, numbered row * topk + rank */
};
enum { BIN_ENTRIES = 15, TILE_IDS = 13, DONE_BITS = 16, MOST_BINS = 2048 };

/* Where a request has more pages, blocks rarely find one twice. */
static __host__ __device__ __forceinline__ int count_bins(const cuda_attention &job)
{
    int pages = pages_of(job.desc.max_kv_len);
    return pages < MOST_BINS ? pages : MOST_BINS;
}

/* By all of the block. */
template <int WARPS>
static __device__ __forceinline__ void clear_counts(const pages_job &job, block_counts<WARPS> &own, uint32_t *bins)
{
    int count = count_bins(job);
    for (int b = threadIdx.x; b < count; b += WARPS * CUDA_WARP)
        bins[b] = 0;
    if (threadIdx.x == 0)
        own.done = 0;
    __syncthreads();
}

static __device__ __forceinline__ void count_one(const pages_job &job, int64_t list, uint32_t place, uint32_t id)
{
    int64_t at = list * job.pages.num_places + place;
    if (atomicAdd(&job.pages.counters[at], 1) == 0)
        job.pages.places[at].some = id;
}

/* Adds the entries of a page-major tile to the block's. By a warp. */
template <int WARPS>
static __device__ __forceinline__ void count_tile(const pages_job &job, block_counts<WARPS> &own, uint32_t *bins,
                                                  const cuda_tile &tile, int64_t list)
{
    constexpr int AHEAD = 6;                                       /* loads of a lane under way */
    constexpr int MOST_QUERIES = GROUPS * GROUP_WARPS * WARP_ROWS; /* of a tile */
    constexpr uint32_t ENTRIES = (1u << BIN_ENTRIES) - 1;
    static_assert(WARPS << TILE_IDS <= 1 << (32 - BIN_ENTRIES) && MOST_QUERIES * MSA_MAX_TOPK <= 1 << TILE_IDS &&
                  WARPS * MOST_QUERIES < 1 << BIN_ENTRIES);
    uint32_t lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, topk = (uint32_t)job.step.topk,
             chunk_rows = (uint32_t)job.pages.chunk_rows, first_row = (uint32_t)tile.first_row,
             chunk = first_row / chunk_rows, ids = (uint32_t)tile.num_rows * topk,
             in_chunk = ((chunk + 1) * chunk_rows - first_row) * topk, count = (uint32_t)count_bins(job);
    const cuda_tile &first = job.step.tiles[blockIdx.x * WARPS];
    uint32_t base = find_place(job, job.own.first_page[first.request], (uint32_t)first.first_row / chunk_rows),
             place = find_place(job, job.own.first_page[tile.request], chunk),
             next_place = find_place(job, job.own.first_page[tile.request], chunk + 1);
    const cuda_page *pages = job.step.pages + (list * job.step.total_q + first_row) * topk;
    if (lane == 0) {
        own.base = base; /* all warps find the same */
        own.first[warp] = first_row * topk;
    }
    for (uint32_t begin = lane; begin < ids; begin += AHEAD * CUDA_WARP) {
        int32_t page[AHEAD];
        uint32_t before[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            page[i] = begin + i * CUDA_WARP < ids ? pages[begin + i * CUDA_WARP].logical : -1;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint32_t id = begin + i * CUDA_WARP, at = (id < in_chunk ? place : next_place) + (uint32_t)page[i];
            before[i] = 1;
            if (page[i] >= 0 && at - base < count)
                before[i] = atomicAdd(&bins[at - base], 1);
            else if (page[i] >= 0)
                count_one(job, list, at, first_row * topk + id);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint32_t id = begin + i * CUDA_WARP, at = (id < in_chunk ? place : next_place) + (uint32_t)page[i];
            if ((before[i] & ENTRIES) == 0)
                atomicAdd(&bins[at - base], (warp << TILE_IDS | id) << BIN_ENTRIES);
        }
    }
}

/* Each warp of a block calls it, once it has counted its tile or knows that there is nothing to count: the last of them
 * brings what the block has counted to the places. */
template <int WARPS>
static __device__ __forceinline__ void end_tile(const pages_job &job, block_counts<WARPS> &own, const uint32_t *bins,
                                                int64_t list, bool page_major)
{
    constexpr int AT_ONCE = 4; /* additions that wait together */
    uint32_t lane = threadIdx.x % CUDA_WARP, count = (uint32_t)count_bins(job), done = 0;
    __threadfence_block();
    __syncwarp();
    if (lane == 0)
        done = atomicAdd(&own.done, 1 + ((uint32_t)page_major << DONE_BITS)) + 1 + ((uint32_t)page_major << DONE_BITS);
    done = __shfl_sync(~0u, done, 0);
    if (done % (1u << DONE_BITS) < WARPS || !(done >> DONE_BITS))
        return;
    __threadfence_block();
    for (uint32_t begin = lane; begin < count; begin += AT_ONCE * CUDA_WARP) {
        uint32_t bin[AT_ONCE], before[AT_ONCE];
        uint32_t *counters = job.pages.counters + list * job.pages.num_places + own.base;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t b = begin + i * CUDA_WARP;
            bin[i] = b < count ? bins[b] : 0;
            before[i] = bin[i] ? atomicAdd(&counters[b], bin[i] % (1u << BIN_ENTRIES)) : 1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t id = bin[i] >> BIN_ENTRIES;
            if (before[i] == 0)
                job.pages.places[list * job.pages.num_places + own.base + begin + i * CUDA_WARP].some =
                    own.first[id >> TILE_IDS] + id % (1u << TILE_IDS);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ launches */

/* An image that is needed. kv_len, whole, first_page: of the request. */
static __device__ __forceinline__ void write_source(const pages_job &job, int64_t list, int32_t kv_len, int32_t whole,
                                                    int32_t first_page, int32_t logical, int32_t physical)
{
    job.own.sources[list * job.desc.max_batch * pages_of(job.desc.max_kv_len) + first_page + logical] =
        image_source{physical < 0 ? INT32_MAX : physical, (int16_t)min(kv_len - logical * MSA_PAGE_SIZE, MSA_PAGE_SIZE),
                     logical < whole};
}

/* Unions of the tiles that are not page-major; of few queries: the choice, too. */
cudaError_t join_tiles(const pages_job &job, cudaStream_t stream);

/* Entries and items of those that are. */
cudaError_t list_pages(const pages_job &job, cudaStream_t stream);

#endif
