/* SPDX-License-Identifier: MIT
 *
 * prefill_cut_sm90.cuh - what the launches of prefill's `prepare` share: the choice of a tile's strategy, and what
 * follows from it at once.
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

/* Of a page-major tile. By a warp. */
static __device__ __forceinline__ void make_page_major(const pages_job &job, const cuda_tile &tile, int64_t list,
                                                       int64_t index)
{
    int lane = threadIdx.x % CUDA_WARP, topk = job.step.topk, chunk = tile.first_row / job.pages.chunk_rows,
        last_chunk =
            (tile.first_row + tile.num_rows - 1) / job.pages.chunk_rows; /* the next at most, as chunks are long */
    if (lane == 0) {
        job.own.tiles[list * job.step.num_tiles + index].size = PAGE_MAJOR_TILE;
        if (!__ldcg(job.pages.chosen + chunk)) /* or all tiles write there */
            *job.pages.page_major = job.pages.chosen[chunk] = 1;
        if (last_chunk > chunk)
            job.pages.chosen[last_chunk] = 1;
    }
    for (int row = lane; row < tile.num_rows; row += CUDA_WARP) {
        const cuda_page *pages = job.step.pages + (list * job.step.total_q + tile.first_row + row) * topk;
        int32_t low = 0, high = topk; /* a row's pages come first */
        while (low < high) {
            int32_t middle = (low + high) / 2;
            if (pages[middle].logical < 0)
                high = middle;
            else
                low = middle + 1;
        }
        set_count(job, list, tile.first_row + row, low);
    }
}

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
