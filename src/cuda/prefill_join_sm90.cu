/* SPDX-License-Identifier: MIT
 *
 * prefill_join_sm90.cu - unions of the tiles of prefill_sm90, for `prepare`; prefill_sm90.cuh says what they are.
 *
 *   join_few    a warp a tile and list    tiles of up to a warp's queries: a bitmap for each warpgroup; then the
 *                                         choice of a strategy. Entries of page-major tiles are counted there and then;
 *                                         of the others the bits before a page number it: masks, pages' order
 *   join_many   a block a tile and list   others, in ascending order
 * Bytes: 8 read a page of a row, 32 written a page of a union.
 */
#include "prefill_cut_sm90.cuh"
#include "ptx_bulk_sm90.cuh"
#include "step.cuh"

enum {
    JOIN_THREADS = 256,
    JOIN_WARPS = JOIN_THREADS / CUDA_WARP,
    JOIN_BLOCKS = 6,   /* an SM */
    MOST_ORDERED = 96, /* pages of a union: the choice lets few pass that have more */
    KINDS = 1 << GROUPS,
    AHEAD = 6, /* loads of a lane under way */
    AGAIN = 3  /* of what is in the L1 */
};

/* Of a query-major tile. */
static __device__ __forceinline__ void write_tile(const pages_job &job, const cuda_tile &tile, int64_t list,
                                                  int64_t index, int32_t kv_len, int32_t whole, int32_t first_page,
                                                  int32_t size)
{
    job.own.tiles[list * job.step.num_tiles + index] =
        union_tile{tile.first_row, tile.num_rows, tile.first_position, kv_len, first_page, size, whole, 0};
}

/* Words of a bitmap of all pages of a request, rounded up to whole rounds of a warp. */
static __host__ __device__ __forceinline__ int join_words(const cuda_attention &job)
{
    return (pages_of(job.desc.max_kv_len) + CUDA_WARP * 32 - 1) / (CUDA_WARP * 32) * CUDA_WARP;
}

/* A warp's: a bitmap for each warpgroup, and for each word of it the pages before. */
enum { JOIN_WORD_BYTES = GROUPS * sizeof(uint32_t) + sizeof(uint16_t) };

static __host__ __device__ __forceinline__ int join_bytes(const cuda_attention &job)
{
    return join_words(job) * JOIN_WORD_BYTES;
}

/* Which warpgroups need a page, or those of a word of bitmaps that exactly these need. */
static __device__ __forceinline__ int kind_of(const uint32_t (&bits)[GROUPS], int bit)
{
    int kind = 0;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        kind |= (int)(bits[g] >> bit & 1) << g;
    return kind;
}

static __device__ __forceinline__ uint32_t of_kind(const uint32_t (&bits)[GROUPS], int kind)
{
    uint32_t pages = ~0u;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        pages &= kind >> g & 1 ? bits[g] : ~bits[g];
    return pages;
}

/* Where a page of a union goes. The warpgroups of a block walk it together, a few stages apart at most, and pass what
 * none of their queries selected; so the pages of each kind (which warpgroups need it) are spread evenly over the
 * union, the n-th of N at (2n + 1)/2N of it, and all warpgroups are busy. totals: pages of each kind. Numbers are small
 * enough to be exact. */
static __device__ __forceinline__ int find_order(int kind, int n, const float *totals)
{
    float own = totals[kind], place = (float)n, before = (float)(2 * n + 1), inverse = __fdividef(0.5f, own);
#pragma unroll
    for (int k = 1; k < KINDS; k++) { /* those i of kind k come before with (2i + 1) * own < or <= (2n + 1) * total */
        float x = fmaf(before, totals[k], own + (k < kind ? 0.5f : -0.5f)), count = fmaf(x, inverse, -0.5f);
        constexpr float ROUND = 12582912;
        place += k == kind ? 0.0f : __fsub_rn(__fadd_rn(count, ROUND), ROUND);
    }
    return (int)place;
}

/* Tiles of at most a warp's queries: a warp a tile. chooses: tiles may go page-major. */
static __global__ void __launch_bounds__(JOIN_THREADS, JOIN_BLOCKS)
    join_few(const __grid_constant__ pages_job job, bool chooses)
{
    constexpr int WORDS = sizeof(union_page) / 4, LOGICAL = WORDS - 2, PHYSICAL = WORDS - 1;
    extern __shared__ uint32_t all_bits[];
    __shared__ uint32_t all_pages[JOIN_WARPS][WORDS][MOST_ORDERED]; /* so that lanes use banks of their own */
    __shared__ int32_t all_lengths[JOIN_WARPS][3]; /* of the request: kv_len, whole_pages, first_page */
    __shared__ block_counts<JOIN_WARPS> counts;
    __shared__ uint32_t all_named[JOIN_WARPS][MSA_MAX_TOPK]; /* a bit for each (row, rank): it has a page */
    const cuda_step &step = job.step;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, words = join_words(job);
    uint32_t *bits = all_bits + warp * (join_bytes(job) / 4);
    uint16_t *before = (uint16_t *)(bits + GROUPS * words);
    uint32_t *is_named = all_named[warp], *bins = all_bits + JOIN_WARPS * (join_bytes(job) / 4); /* if it chooses */
    int index = (int)blockIdx.x * JOIN_WARPS + warp, list = (int)blockIdx.y;
    cuda_tile tile = {};
    for (int i = lane; i < GROUPS * words; i += CUDA_WARP)
        bits[i] = 0;
    if (chooses)
        clear_counts(job, counts, bins);
    grid_release();
    grid_wait();
    if (index < step.num_tiles)
        tile = step.tiles[index];
    if (tile.num_rows == 0) {
        if (chooses)
            end_tile(job, counts, bins, list, false);
        return;
    }
    __syncwarp();
    int64_t first = ((int64_t)list * step.total_q + tile.first_row) * step.topk;
    const cuda_page *own_pages = step.pages + first;
    int32_t *lengths = all_lengths[warp];
    if (lane == 0) {
        lengths[0] = step.requests[tile.request].kv_len;
        lengths[1] = whole_pages(step.requests[tile.request]);
        lengths[2] = job.own.first_page[tile.request];
    }
    int ids = tile.num_rows * step.topk;
    auto warp_of = [&](int id, uint32_t &bit) { /* of the tile, whose row has the id; the row's bit in its masks */
                                                uint32_t query = (uint32_t)id * job.topk_inverse >> 16,
                                                         of = query * job.width_inverse >> 16;
                                                bit = of * WARP_ROWS + query - of * (uint32_t)job.width;
                                                return of;
    };
    for (int begin = 0; begin < ids; begin += AHEAD * CUDA_WARP) {
        int32_t logical[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int id = begin + i * CUDA_WARP + lane;
            logical[i] = id < ids ? own_pages[id].logical : -1;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint32_t bit, group = warp_of(begin + i * CUDA_WARP + lane, bit) / GROUP_WARPS,
                          lanes = __ballot_sync(~0u, logical[i] >= 0);
            if (logical[i] >= 0)
                atomicOr(&bits[group * words + logical[i] / 32], 1u << logical[i] % 32);
            if (lane == 0 && begin + i * CUDA_WARP < ids)
                is_named[begin / CUDA_WARP + i] = lanes;
        }
    }
    __syncwarp();
    if (chooses) {
        int joined = 0, named = lane < (ids + CUDA_WARP - 1) / CUDA_WARP ? __popc(is_named[lane]) : 0;
        for (int word = lane; word < GROUPS * words; word += CUDA_WARP)
            joined += __popc(bits[word]);
        joined = (int)__reduce_add_sync(~0u, (uint32_t)joined);
        named = (int)__reduce_add_sync(~0u, (uint32_t)named);
        if (is_scattered(job, step.requests[tile.request], joined, named)) {
            make_page_major(job, tile, list, index, [&](int row) {
                int id = row * step.topk, last = (id + step.topk - 1) / CUDA_WARP;
                uint32_t of_row = __funnelshift_r(is_named[id / CUDA_WARP], is_named[last], (uint32_t)id);
                return __popc(of_row & ~0u >> (CUDA_WARP - step.topk));
            });
            count_tile(job, counts, bins, tile, list);
            end_tile(job, counts, bins, list, true);
            return;
        }
        leave_query_major(job, tile, list);
        end_tile(job, counts, bins, list, false);
    }
    int count = 0, of_kinds[KINDS] = {};
#pragma unroll 1
    for (int word = lane; word < words; word += CUDA_WARP) {
        uint32_t of[GROUPS] = {bits[word], bits[words + word], bits[2 * words + word]};
        int own = __popc(of[0] | of[1] | of[2]), upto = own;
#pragma unroll
        for (int k = 1; k < KINDS; k++)
            of_kinds[k] += __popc(of_kind(of, k));
        for (int d = 1; d < CUDA_WARP; d *= 2) {
            int x = __shfl_up_sync(~0u, upto, d);
            upto += lane >= d ? x : 0;
        }
        before[word] = (uint16_t)(count + upto - own);
        count += __shfl_sync(~0u, upto, CUDA_WARP - 1);
    }
    float *totals = (float *)is_named; /* of the kinds; ids are no longer asked for */
#pragma unroll
    for (int k = 1; k < KINDS; k++) {
        int all = (int)__reduce_add_sync(~0u, (uint32_t)of_kinds[k]);
        if (lane == k)
            totals[k] = (float)all;
    }
    if (lane == 0)
        write_tile(job, tile, list, index, lengths[0], lengths[1], lengths[2], count);
    bool ordered = count <= MOST_ORDERED;
    union_page *result = job.own.unions + first;
    /* Word i of the page at `place` of the union. */
    uint32_t words_at = shared_address(all_pages[warp]);
    auto here = [&](int place, int i) { return words_at + (uint32_t)(i * MOST_ORDERED + place) * 4; };
    auto there = [&](int place, int i) { return (uint32_t *)(result + place) + i; };
    for (int place = lane; place < count; place += CUDA_WARP)
#pragma unroll
        for (int i = 0; i < LOGICAL; i++)
            if (ordered)
                store_shared_32(here(place, i), 0);
            else
                *there(place, i) = 0;
    __syncwarp();
    for (int begin = lane; begin < ids; begin += AGAIN * CUDA_WARP) {
        cuda_page own[AGAIN];
#pragma unroll
        for (int i = 0; i < AGAIN; i++)
            own[i] = begin + i * CUDA_WARP < ids ? own_pages[begin + i * CUDA_WARP] : cuda_page{-1, -1};
#pragma unroll
        for (int i = 0; i < AGAIN; i++) {
            uint32_t page = (uint32_t)own[i].logical, word = page / 32, bit;
            warp_of(begin + i * CUDA_WARP, bit);
            if (own[i].logical < 0)
                continue;
            uint32_t below = (bits[word] | bits[words + word] | bits[2 * words + word]) & ((1u << page % 32) - 1);
            int place = before[word] + __popc(below);
            if (ordered) {
                set_shared_32(here(place, (int)(bit / 32)), 1u << bit % 32);
                store_shared_32(here(place, LOGICAL), page); /* the same for all */
                store_shared_32(here(place, PHYSICAL), (uint32_t)own[i].physical);
            } else {
                atomicOr(there(place, (int)(bit / 32)), 1u << bit % 32);
                *(uint2 *)there(place, LOGICAL) = make_uint2(page, (uint32_t)own[i].physical);
            }
        }
    }
    __syncwarp();
    int left = 0; /* lane k: pages of kind k so far */
    for (int begin = 0; begin < count; begin += CUDA_WARP) {
        int place = begin + lane, kind = 0;
        uint32_t page = 0, physical = 0;
        if (place < count) {
            page = ordered ? load_shared_32(here(place, LOGICAL)) : *there(place, LOGICAL);
            physical = ordered ? load_shared_32(here(place, PHYSICAL)) : *there(place, PHYSICAL);
            uint32_t word = page / 32, of[GROUPS] = {bits[word], bits[words + word], bits[2 * words + word]};
            kind = kind_of(of, (int)(page % 32));
            write_source(job, list, lengths[0], lengths[1], lengths[2], (int32_t)page, (int32_t)physical);
        }
        uint32_t same = 0, own_same = 0;
#pragma unroll
        for (int k = 1; k < KINDS; k++) {
            uint32_t lanes = __ballot_sync(~0u, kind == k);
            same = kind == k ? lanes : same;
            own_same = lane == k ? lanes : own_same;
        }
        int rank = __shfl_sync(~0u, left, kind) + __popc(same & ((1u << lane) - 1));
        left += __popc(own_same);
        if (!ordered || place >= count)
            continue;
        auto word = [&](int i) { return load_shared_32(here(place, i)); };
        uint4 *to = (uint4 *)(result + find_order(kind, rank, totals));
        to[0] = make_uint4(word(0), word(1), word(2), word(3));
        to[1] = make_uint4(word(4), word(5), page, physical);
    }
}

/* Exclusive sums of the words' bits; returns the sum of all. */
static __device__ int count_bits(const uint32_t (&bits)[PAGE_WORDS], int (&before)[PAGE_WORDS])
{
    __shared__ int warp_total[JOIN_THREADS / CUDA_WARP];
    constexpr int EACH = PAGE_WORDS / JOIN_THREADS;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, own = 0, all = 0;
    for (int i = 0; i < EACH; i++)
        own += __popc(bits[threadIdx.x * EACH + i]);
    int upto = own;
    for (int d = 1; d < CUDA_WARP; d *= 2) {
        int x = __shfl_up_sync(~0u, upto, d);
        upto += lane >= d ? x : 0;
    }
    if (lane == CUDA_WARP - 1)
        warp_total[warp] = upto;
    __syncthreads();
    int first = upto - own;
    for (int w = 0; w < JOIN_THREADS / CUDA_WARP; w++) {
        first += w < warp ? warp_total[w] : 0;
        all += warp_total[w];
    }
    for (int i = 0; i < EACH; i++) {
        before[threadIdx.x * EACH + i] = first;
        first += __popc(bits[threadIdx.x * EACH + i]);
    }
    return all;
}

/* Any tiles: a block a tile. Pages stay in ascending order. */
static __global__ void __launch_bounds__(JOIN_THREADS) join_many(const __grid_constant__ pages_job job, bool chosen)
{
    __shared__ uint32_t bits[PAGE_WORDS];
    __shared__ int before[PAGE_WORDS];
    const cuda_step &step = job.step;
    grid_release();
    grid_wait();
    cuda_tile tile = step.tiles[blockIdx.x];
    int64_t list = blockIdx.y, first = (list * step.total_q + tile.first_row) * step.topk;
    if (tile.num_rows == 0 || (chosen && job.own.tiles[list * step.num_tiles + blockIdx.x].size < 0))
        return;
    for (int i = threadIdx.x; i < PAGE_WORDS; i += JOIN_THREADS)
        bits[i] = 0;
    __syncthreads();
    int ids = tile.num_rows * step.topk;
    for (int i = threadIdx.x; i < ids; i += JOIN_THREADS) {
        int32_t page = step.pages[first + i].logical;
        if (page >= 0)
            atomicOr(&bits[page / 32], 1u << page % 32);
    }
    __syncthreads();
    int count = count_bits(bits, before), width = job.width;
    union_page *pages = job.own.unions + first;
    int32_t kv_len = step.requests[tile.request].kv_len, whole = whole_pages(step.requests[tile.request]),
            first_page = job.own.first_page[tile.request];
    if (threadIdx.x == 0)
        write_tile(job, tile, list, blockIdx.x, kv_len, whole, first_page, count);
    for (int i = threadIdx.x; i < count * 2 * GROUPS; i += JOIN_THREADS)
        ((uint32_t *)pages[i / (2 * GROUPS)].mask)[i % (2 * GROUPS)] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < ids; i += JOIN_THREADS) {
        cuda_page page = step.pages[first + i];
        if (page.logical < 0)
            continue;
        int query = i / step.topk, warp = query / width, bit = warp * WARP_ROWS + query % width;
        int place = before[page.logical / 32] + __popc(bits[page.logical / 32] & ((1u << page.logical % 32) - 1));
        if (atomicOr((uint32_t *)pages[place].mask + bit / 32, 1u << bit % 32))
            continue; /* what follows is the same for every query */
        pages[place].logical = page.logical;
        pages[place].physical = page.physical;
        write_source(job, list, kv_len, whole, first_page, page.logical, page.physical);
    }
}

cudaError_t join_tiles(const pages_job &job, cudaStream_t stream)
{
    unsigned tiles = (unsigned)job.step.num_tiles, lists = (unsigned)job.step.lists;
    bool chooses = has_page_lists(job);
    if (joins_few(job)) {
        constexpr int MOST_BYTES = JOIN_WARPS * PAGE_WORDS * JOIN_WORD_BYTES + MOST_BINS * 4;
        int bytes = JOIN_WARPS * join_bytes(job) + (chooses ? count_bins(job) * 4 : 0);
        cudaError_t error = cudaFuncSetAttribute(join_few, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_BYTES);
        return error ? error
                     : launch_between(join_few, dim3(grid_blocks(tiles, JOIN_WARPS), lists), JOIN_THREADS, bytes,
                                      job.dependent_launch, stream, job, chooses);
    }
    return launch_between(join_many, dim3(tiles, lists), JOIN_THREADS, 0, job.dependent_launch, stream, job, chooses);
}
