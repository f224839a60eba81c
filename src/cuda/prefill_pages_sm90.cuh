/* SPDX-License-Identifier: MIT
 *
 * prefill_pages_sm90.cuh - page-major prefill: which tiles of queries go that way, and the lists that its kernel works
 * through. prefill_sm90.cuh says what tiles, images and windows are.
 *
 *   chunk   chunk_rows rows of the step, whose partial results are there at once. Chunks follow each other
 *   entry   a row of a chunk and the rank of a page among the pages of that row
 *   place   a page of a request that rows of a chunk see: places ascend by chunk, request and page
 *   item    up to ITEM_STEPS steps of 64 query rows from a place's entries. Their order is not defined: no row's
 *           result depends on those beside it
 *
 * A partial result is the sum over a page's keys of 2^(logit - max) * value, with E4M3 queries 448 times that, in BF16,
 * beside the maximum (log2 units) and the sum without values. With 16-bit queries its elements are in the order in
 * which the lanes have them, which the merge undoes once for all pages of a row (struct cuda_merge: turned). The ranks
 * of a row are its states, which combine_sm90 merges.
 *
 * Memory: partial results of a chunk, at most MAX_PARTIAL_BYTES, 8 bytes of state for each 256 of them; the chunk's
 * queries; of each list 4 to 6 bytes for each page of each row, and up to 52 for each page of each request (and once
 * more of one request for each chunk).
 */
#ifndef MSA_CUDA_PREFILL_PAGES_SM90_CUH
#define MSA_CUDA_PREFILL_PAGES_SM90_CUH

#include "prefill_sm90.cuh"

enum {
    ITEM_STEPS = 4,
    MOST_TAKEN = 4,  /* items that a block takes at once */
    MIN_CHUNK = 512, /* rows; plans whose rows are so large that a chunk would hold fewer are query-major */
    ENTRY_ROW_BITS = 26,
    PARTIAL_BYTES = 2 * MSA_HEAD_DIM
};
constexpr int64_t MAX_PARTIAL_BYTES = INT64_C(1) << 30;

/* Of a tile's union, once the tile is page-major. */
enum { PAGE_MAJOR_TILE = -1 };

struct alignas(16) page_place {
    uint32_t entry, item; /* the first */
    int32_t count;        /* of entries */
    uint32_t some;        /* of the list's (row, page), numbered row * topk + rank: one of the place's */
};

struct alignas(16) page_item {
    int32_t physical;
    int32_t page;             /* among all requests' pages */
    uint32_t first;           /* of the list's entries */
    int32_t count;            /* of entries */
    int32_t first_keys, keys; /* of the page: that the chunk's first row would see; that the request has */
    int32_t whole;            /* see whole_pages */
    int32_t reserved;
};

struct page_memory {
    uint32_t *counters;    /* [lists][places] entries of a place; once all are counted, where its next one goes */
    uint32_t *chunk_items; /* [lists][chunks] items of a chunk */
    uint32_t *chosen;      /* [chunks] some row is page-major */
    uint32_t *query_major; /* [1] some tile is query-major */
    uint32_t *page_major;  /* [1] some tile is page-major; behind query_major */
    uint32_t *taken;       /* [2] items that blocks have taken, blocks that found none left; 0 between launches */
    page_place *places;    /* [lists][places] */
    uint32_t *entries;     /* [lists][rows * topk] row, from ENTRY_ROW_BITS on the rank */
    page_item *items;      /* [lists][most_items] */
    int32_t *first_item;   /* [lists][chunks + 1] */
    int32_t *counts;       /* [rows][kv_heads] pages of a row; -1: it is query-major */
    uint8_t *partials;     /* [topk][slab][128], a slab [chunk_rows][heads of the window] in whole blocks */
    float2 *states;        /* [topk][slab] maximum and sum */
    uint8_t *queries;      /* [chunk_rows][heads of the window][128], if it must be copied */
    int64_t num_places, most_items;
    int32_t chunk_rows, num_chunks;
    size_t counter_bytes, bytes;
};

/* Rows of a chunk. For all heads, though a window may have fewer: sizes grow with every capacity. */
static __host__ __device__ __forceinline__ int64_t most_chunk_rows(const cuda_attention &job)
{
    return MAX_PARTIAL_BYTES / ((int64_t)job.desc.num_q_heads * job.desc.topk * PARTIAL_BYTES);
}

/* Whether tiles of the plan may go page-major. */
static __host__ __device__ __forceinline__ bool has_page_lists(const cuda_attention &job)
{
    return job.num_splits == 1 && job.desc.strategy != MSA_STRATEGY_QUERY_MAJOR && most_chunk_rows(job) >= MIN_CHUNK;
}

static __host__ __device__ __forceinline__ page_memory page_memory_at(const cuda_attention &job, char *at)
{
    const msa_attention_desc &desc = job.desc;
    char *begin = at;
    auto take = [&](int64_t bytes) {
        char *taken = at;
        at += (bytes + 255) & ~(int64_t)255;
        return taken;
    };
    page_memory m = {};
    int64_t rows = desc.max_total_q, lists = desc.num_lists, ids = rows * desc.topk,
            max_pages = pages_of(desc.max_kv_len), most_rows = most_chunk_rows(job);
    m.chunk_rows = (int32_t)(rows < most_rows ? rows : most_rows);
    m.num_chunks = (int32_t)((rows + m.chunk_rows - 1) / m.chunk_rows);
    m.num_places = (desc.max_batch + m.num_chunks) * max_pages;
    int64_t used = m.num_places < ids ? m.num_places : ids; /* places with an entry */
    int64_t step = GROUP_WARPS * warp_queries(job);
    m.most_items = ids / (ITEM_STEPS * step) + used;
    m.counter_bytes = (size_t)((lists * (m.num_places + m.num_chunks) + m.num_chunks + 4) * 4);
    m.counters = (uint32_t *)take((int64_t)m.counter_bytes);
    m.chunk_items = m.counters + lists * m.num_places;
    m.chosen = m.chunk_items + lists * m.num_chunks;
    m.query_major = m.chosen + m.num_chunks;
    m.page_major = m.query_major + 1;
    m.taken = m.page_major + 1;
    m.places = (page_place *)take(lists * m.num_places * (int64_t)sizeof(page_place));
    m.entries = (uint32_t *)take(lists * ids * 4);
    m.items = (page_item *)take(lists * m.most_items * (int64_t)sizeof(page_item));
    m.first_item = (int32_t *)take(lists * (m.num_chunks + 1) * 4);
    m.counts = (int32_t *)take(rows * desc.num_kv_heads * 4);
    int64_t heads = (int64_t)m.chunk_rows * desc.num_q_heads, partials = (heads + PARTIAL_BLOCK - 1) * desc.topk;
    m.queries = (uint8_t *)take(heads * MSA_HEAD_DIM * (desc.q_dtype == MSA_E4M3 ? 1 : 2));
    m.states = (float2 *)take(partials * (int64_t)sizeof(float2));
    m.partials = (uint8_t *)take(partials * PARTIAL_BYTES);
    m.bytes = (size_t)(at - begin);
    return m;
}

/* What the kernels get. */
struct pages_job : prefill_job {
    page_memory pages;
    int32_t chunk;  /* of `run` */
    bool beside;    /* the launches ahead leave nothing that this one needs, but for images, see await_images */
    uint32_t heads; /* query heads of the window */
    uint32_t slab;  /* of rows and heads, from one rank to the next; whole blocks */
};

static inline pages_job make_pages_job(const prefill_job &window)
{
    pages_job made = {};
    (prefill_job &)made = window;
    made.pages = page_memory_at(window, (char *)window.memory + window.own.bytes);
    made.heads = window.window.heads * window.ratio;
    made.slab = (made.pages.chunk_rows * made.heads + PARTIAL_BLOCK - 1) / PARTIAL_BLOCK * PARTIAL_BLOCK;
    return made;
}

/* Of prepare, after the rows' pages are known; of run, after the images of the window and `attend`. failed: that was
 * not launched; all that is done is to wait for the images. */
cudaError_t cut_step(const prefill_job &whole, cudaStream_t stream);
cudaError_t attend_page_lists(const prefill_job &window, const cache_maps<true> &maps, cudaError_t failed,
                              cudaStream_t stream);
cudaError_t attend_page_lists(const prefill_job &window, const cache_maps<false> &maps, cudaError_t failed,
                              cudaStream_t stream);

#endif
