/* SPDX-License-Identifier: MIT
 *
 * prefill_sm90.cuh - what the launches of prefill_sm90.cu share: the cut of a step into tiles, windows and images, and
 * where these lie in the plan's memory.
 *
 *   tile      the queries of a block: 3 warpgroups of 4 warps of as many whole queries as 16 rows hold
 *   union     the pages that a tile's queries selected, each once, with a bit for every query
 *   image     one page of one KV head as the products' operands: K in F16 (E4M3 for `fast`), then V in E4M3, turned;
 *             with 16-bit queries both as they are, swizzled. Keys past the request's length are zeros. Only pages
 *             that some query selected are made, of 16 bits only those that some query of the request sees in part:
 *             the others come straight from the cache by boxes of a tensor map, where its strides fit into one
 *   window    the requests and KV heads whose images are there at once. A step's windows follow each other
 *
 * Memory: at most 768 MB of images (48 KB; 32 KB for `fast`, 64 KB with 16-bit queries), whatever the capacities: a
 * window has window_heads heads and requests that begin within window_pages pages; the last one may reach max_pages
 * further.
 */
#ifndef MSA_CUDA_PREFILL_SM90_CUH
#define MSA_CUDA_PREFILL_SM90_CUH

#include "attention.cuh"
#include "attention_sm90.cuh"
#include "page.cuh"
#include "ptx_bulk_sm90.cuh"

enum { GROUPS = 3, GROUP_WARPS = 4, IMAGE_MEMORY = 768 << 20 };

/* A page of a union. */
struct union_page {
    uint64_t mask[GROUPS]; /* of a warpgroup: 16 bits a warp, a bit a query */
    int32_t logical, physical;
};

/* A tile with its union: all that a block must know, in one load. */
struct alignas(16) union_tile {
    int32_t first_row, num_rows, first_position; /* as in struct cuda_tile */
    int32_t kv_len;                              /* of the request */
    int32_t first_page;                          /* of the request, among all requests' pages */
    int32_t size;                                /* of the union */
    int32_t whole;                               /* of the request, see whole_pages */
    int32_t reserved;
};

/* A page of a request, in order of requests and pages. */
struct alignas(8) image_source {
    int32_t physical; /* -1: nobody selected it */
    int16_t keys;     /* of the request, the rest are zeros */
    int16_t whole;    /* see whole_pages */
};

struct prefill_memory {
    uint8_t *images;
    union_page *unions;     /* [lists][total_q * topk], a tile's from first_row * topk on */
    union_tile *tiles;      /* [lists][num_tiles] */
    int32_t *first_page;    /* [batch + 1] pages before each request; then the most that one has */
    int32_t *first_request; /* [windows + 1] of a window */
    uint32_t *taken;        /* tasks of a window that blocks have asked for */
    uint32_t *finished;     /* warps that have written all their results of a window */
    uint32_t *made;         /* blocks that have made all their images of a window, see await_images */
    image_source *sources;  /* [lists][max_batch * max_pages] */
    float *states;          /* of splits: results, maxima, sums */
    uint8_t *unsafe;        /* [images] some value that a query of the request sees is not finite */
    size_t bytes;
};

static __host__ __device__ __forceinline__ int32_t image_bytes(const cuda_attention &job)
{
    return job.desc.q_dtype != MSA_E4M3          ? bf16_types::IMAGE_BYTES
           : job.precision == MSA_PRECISION_FAST ? fast_types::IMAGE_BYTES
                                                 : exact_types::IMAGE_BYTES;
}

static __host__ __device__ __forceinline__ int32_t most_images(const cuda_attention &job)
{
    return IMAGE_MEMORY / image_bytes(job);
}

static __host__ __device__ __forceinline__ int32_t warp_queries(const cuda_attention &job)
{
    return WARP_ROWS / job.ratio;
}

static __host__ __device__ __forceinline__ int32_t tile_queries(const cuda_attention &job)
{
    return GROUPS * GROUP_WARPS * warp_queries(job);
}

static __host__ __device__ __forceinline__ int32_t pages_of(int64_t keys)
{
    return (int32_t)((keys + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE);
}

/* KV heads, and pages in which requests begin, of a window. */
struct window_size {
    int32_t heads, pages;
};

static __host__ __device__ __forceinline__ window_size size_of_window(const cuda_attention &job)
{
    int32_t max_pages = pages_of(job.desc.max_kv_len), most = most_images(job),
            heads = max_pages ? most / (2 * max_pages) : most;
    heads = heads < 1 ? 1 : heads < job.desc.num_kv_heads ? heads : job.desc.num_kv_heads;
    return window_size{heads, most / heads - max_pages};
}

/* Windows of so many requests, for each group of heads. */
static __host__ __device__ __forceinline__ int32_t num_windows(const cuda_attention &job, int64_t batch)
{
    int64_t size = size_of_window(job).pages, max_pages = pages_of(job.desc.max_kv_len), pages = batch * max_pages;
    return pages > size + max_pages ? (int32_t)((pages + size - 1) / size) : 1;
}

static __host__ __device__ __forceinline__ int64_t num_sources(const cuda_attention &job)
{
    return (int64_t)job.step.lists * job.desc.max_batch * pages_of(job.desc.max_kv_len);
}

/* Tasks of a full step. */
static __host__ __device__ __forceinline__ int64_t most_tasks(const cuda_attention &job)
{
    int64_t tiles = job.desc.max_total_q / tile_queries(job) + job.desc.max_batch;
    return (tiles < job.desc.max_total_q ? tiles : job.desc.max_total_q) * job.desc.num_kv_heads;
}

static __host__ __device__ __forceinline__ prefill_memory own_memory(const cuda_attention &job)
{
    const msa_attention_desc &desc = job.desc;
    int64_t batch = desc.max_batch, rows = desc.max_total_q, lists = desc.num_lists,
            max_pages = pages_of(desc.max_kv_len);
    int64_t tiles = rows / tile_queries(job) + batch, pages = batch * max_pages;
    int64_t images = pages * desc.num_kv_heads < most_images(job) ? pages * desc.num_kv_heads : most_images(job);
    /* A plan that splits has fewer than 2 * num_sms tasks. The size is that bound, so that it grows with every
     * capacity. */
    int64_t states = rows * desc.num_q_heads * MSA_MAX_SPLITS, most = 2ll * job.num_sms * GROUPS * GROUP_ROWS;
    states = states < most ? states : most;
    char *at = (char *)job.memory;
    auto take = [&](int64_t bytes) {
        char *taken = at;
        at += (bytes + 255) & ~(int64_t)255;
        return taken;
    };
    prefill_memory m;
    m.images = (uint8_t *)take(images * image_bytes(job));
    m.unsafe = (uint8_t *)take(images);
    m.unions = (union_page *)take(lists * rows * desc.topk * (int64_t)sizeof(union_page));
    m.tiles = (union_tile *)take(lists * tiles * (int64_t)sizeof(union_tile));
    m.sources = (image_source *)take(num_sources(job) * (int64_t)sizeof(image_source));
    m.first_page = (int32_t *)take((batch + 2) * 4);
    m.first_request = (int32_t *)take((num_windows(job, batch) + 1) * 4);
    m.taken = (uint32_t *)take(12);
    m.finished = m.taken + 1;
    m.made = m.taken + 2;
    m.states = (float *)take(states * (MSA_HEAD_DIM + 2) * 4);
    m.bytes = (size_t)(at - (char *)job.memory);
    return m;
}

/* The part of a step that is worked on at once. */
struct prefill_window {
    uint32_t index, first_head, heads;
};

/* What the kernels get. */
struct prefill_job : cuda_attention {
    prefill_memory own;
    prefill_window window;
    const int32_t *requests;              /* the window's first, and the first past it */
    bool whole;                           /* the window has all requests */
    const uint32_t *some_tiles;           /* [2] are query-major, are page-major; NULL: all are query-major */
    uint32_t blocks;                      /* of `attend`; 0: it is not launched */
    uint32_t image_blocks;                /* of write_images; 0: what is launched now finds its images */
    int32_t width;                        /* whole queries of a warp */
    uint32_t width_inverse, topk_inverse; /* 2^16 by these, rounded up: for quotients of small numbers */
    uint32_t list_heads;                  /* KV heads that share a list */
    float log2_one; /* of a term of 1: a constant that the compiler must not know, see write_results */
    float scale;    /* of logits in log2 units, but for the tensors' own factors */
    bool straight;  /* pages that are whole for all who meet them come from the cache, see cache_maps */
};

/* A cache of 16 bits to the copies' tensors: a parameter of its own, which other kernels do without. */
template <bool NONE> struct cache_maps {
    CUtensorMap k, v;
};
template <> struct cache_maps<true> {
};

static inline prefill_job make_job(const cuda_attention &job, const prefill_window &window)
{
    prefill_job made = {};
    (cuda_attention &)made = job;
    made.own = own_memory(job);
    made.window = window;
    made.requests = made.own.first_request + window.index;
    made.whole = num_windows(job, job.step.batch) == 1;
    made.width = warp_queries(job);
    made.width_inverse = 65536u / (uint32_t)made.width + 1;
    made.topk_inverse = 65536u / (uint32_t)job.step.topk + 1;
    made.log2_one = job.desc.q_dtype == MSA_E4M3 ? LOG2_448 : 0;
    made.list_heads = (uint32_t)(job.desc.num_kv_heads / job.step.lists);
    made.scale = finite_scale((double)job.desc.sm_scale * 1.44269504088896340736);
    return made;
}

/* Where the window begins and ends, of what `before` counts before each request. Without a look at the requests, if it
 * is the only one: each load that waits for another one delays the start. */
static __device__ __forceinline__ int32_t window_begin(const prefill_job &job, const int32_t *before)
{
    return job.whole ? 0 : before[job.requests[0]];
}

static __device__ __forceinline__ int32_t window_end(const prefill_job &job, const int32_t *before)
{
    return before[job.whole ? job.step.batch : job.requests[1]];
}

/* Whether some tile of the step is. As words, so that nothing waits for the loads until these are looked at. */
struct tile_kinds {
    uint32_t query_major, page_major;
};

static __device__ __forceinline__ tile_kinds kinds_of_tiles(const prefill_job &job)
{
    return job.some_tiles ? tile_kinds{job.some_tiles[0], job.some_tiles[1]} : tile_kinds{1, 0};
}

static __device__ __forceinline__ bool all_page_major(const tile_kinds &kinds)
{
    return !kinds.query_major && kinds.page_major;
}

/* Pages of a request that all its queries see to their ends: as many from the first on. */
static __device__ __forceinline__ int32_t whole_pages(const cuda_request &request)
{
    int64_t keys = min(request.first_position + 1, (int64_t)request.kv_len);
    return keys > 0 ? (int32_t)(keys / MSA_PAGE_SIZE) : 0;
}

/* The K (part 0) or the V of a page as it lies in an image, from the cache; page -1: it has an image. By a thread.
 * Returns whether it comes. */
static __device__ __forceinline__ bool copy_straight(const cache_maps<false> &maps, int part, uint32_t to, int32_t head,
                                                     int32_t page, uint32_t barrier)
{
    const CUtensorMap *map = part ? &maps.v : &maps.k;
    if (page < 0)
        return false;
    copy_box(to, map, 0, 0, head, page, barrier);
    copy_box(to + TILE_HALF, map, 128, 0, head, page, barrier);
    return true;
}

static __device__ __forceinline__ bool copy_straight(const cache_maps<true> &, int, uint32_t, int32_t, int32_t,
                                                     uint32_t)
{
    return false;
}

/* Fetches the maps themselves. By a thread. */
static __device__ __forceinline__ void prefetch_maps(const cache_maps<false> &maps)
{
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
}

static __device__ __forceinline__ void prefetch_maps(const cache_maps<true> &)
{
}

/* Zeros in place of values of keys from `keys` on. By a warp. */
template <bool TRANSPOSED> static __device__ void blank_values(uint8_t *v, int keys)
{
    int lane = (int)thread_now() % CUDA_WARP, chunk = lane % 8;
    if constexpr (!TRANSPOSED) {
        for (int i = max(keys, 0) * 8 + lane; i < MSA_PAGE_SIZE * 8; i += CUDA_WARP)
            ((uint4 *)v)[i] = ((uint4 *)(v + TILE_HALF))[i] = make_uint4(0, 0, 0, 0);
    } else {
        uint32_t keep[4];
        for (int t = 0; t < 4; t++) {
            keep[t] = 0;
            for (int e = 0; e < 4; e++)
                keep[t] |= chunk * 16 + e / 2 * 8 + 2 * t + e % 2 < keys ? 0xFFu << 8 * e : 0;
        }
        for (int row = lane / 8; row < MSA_HEAD_DIM; row += CUDA_WARP / 8) {
            uint4 *at = (uint4 *)(v + swizzled(row, chunk)), x = *at;
            *at = make_uint4(x.x & keep[0], x.y & keep[1], x.z & keep[2], x.w & keep[3]);
        }
    }
    fence_async_reads();
    __syncwarp();
}

#endif
