/* SPDX-License-Identifier: MIT
 *
 * image_sm90.cuh - the launches that come before prefill's attention: unions and windows (prepare), images (run).
 * prefill_sm90.cuh says what they are.
 *
 *   find_windows   one block          pages before each request, where windows begin; other blocks clear the sources
 *   join_few       a warp a tile      a bitmap, whose bits before a page number it; then the pages' order
 *   join_many      a block a tile     the same for tiles of many queries, in ascending order
 *   write_images   persistent blocks  a page of a KV head at a time, through shared memory, out by one bulk copy
 * Bytes of write_images: 18 KB (NVFP4), 32 or 64 KB read and 48 KB (32 KB for `fast`, 64 KB of 16 bit) written an
 * image.
 */
#ifndef MSA_CUDA_IMAGE_SM90_CUH
#define MSA_CUDA_IMAGE_SM90_CUH

#include "prefill_sm90.cuh"
#include "ptx_bulk_sm90.cuh"
#include "step.cuh"

/* ------------------------------------------------------------------------------------------------ windows */

static __global__ void __launch_bounds__(SCAN_THREADS) find_windows(const __grid_constant__ prefill_job job)
{
    grid_release();
    grid_wait();
    if (blockIdx.x > 0) {
        int64_t i = (int64_t)(blockIdx.x - 1) * SCAN_THREADS + threadIdx.x;
        if (i < num_sources(job))
            job.own.sources[i] = image_source{-1, 0};
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

/* ------------------------------------------------------------------------------------------------ unions */

enum {
    JOIN_THREADS = 128,
    JOIN_WARPS = JOIN_THREADS / CUDA_WARP,
    JOIN_BLOCKS = 11, /* an SM */
    PAGE_WORDS = MSA_MAX_KV_LEN / MSA_PAGE_SIZE / 32,
    MOST_ORDERED = 64,
    KINDS = 1 << GROUPS
};
static_assert(JOIN_WARPS * KINDS == CUDA_WARP);

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

/* Where pages of a union go. The warpgroups of a block walk it together, a few stages apart at most, and pass what none
 * of their queries selected; so it is ordered to keep all of them busy: the next page is always of the kind (which
 * warpgroups need it) after which the warpgroups' shares of what they need are nearest to each other. By a warp, KINDS
 * lanes a union. left: pages of kind lane % KINDS; places: of these. */
static __device__ void order_pages(int count, int left, uint8_t *places)
{
    int lane = threadIdx.x % CUDA_WARP, kind = lane % KINDS, longest = (int)__reduce_max_sync(~0u, (uint32_t)count),
        used = 0, needed[GROUPS], ahead[GROUPS] = {};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        needed[g] = kind >> g & 1 ? left : 0;
        for (int d = 1; d < KINDS; d *= 2)
            needed[g] += __shfl_xor_sync(~0u, needed[g], d);
    }
    for (int i = 0; i < longest;
         i++) { /* ahead: count times what a warpgroup has of the pages so far, less its share */
        int cost = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            ahead[g] -= needed[g];
            int then = ahead[g] + (kind >> g & 1 ? count : 0);
            cost += then * then;
        }
        uint32_t best = left > 0 ? (uint32_t)(cost * KINDS + kind) : ~0u;
#pragma unroll
        for (int d = 1; d < KINDS; d *= 2)
            best = min(best, __shfl_xor_sync(~0u, best, d));
        int next = (int)(best % KINDS);
        if (kind == next && left > 0) {
            places[used++] = (uint8_t)i;
            left--;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            ahead[g] += next >> g & 1 ? count : 0;
    }
}

/* Of a tile's request, for all its pages. */
struct tile_request {
    int32_t kv_len;
    image_source *sources;
};

/* Writes the tile's record but for its size. */
static __device__ __forceinline__ tile_request begin_tile(const prefill_job &job, const cuda_tile &tile, int64_t list,
                                                          int64_t place, bool writes)
{
    int32_t kv_len = job.step.requests[tile.request].kv_len, first_page = job.own.first_page[tile.request];
    if (writes)
        job.own.tiles[list * job.step.num_tiles + place] =
            union_tile{tile.first_row, tile.num_rows, tile.first_position, kv_len, first_page, 0, {0, 0}};
    return tile_request{kv_len,
                        job.own.sources + list * job.desc.max_batch * pages_of(job.desc.max_kv_len) + first_page};
}

static __device__ __forceinline__ void write_source(const prefill_job &job, const tile_request &request,
                                                    int32_t logical, int32_t physical)
{
    request.sources[logical] =
        image_source{physical < 0 ? INT32_MAX : physical, min(request.kv_len - logical * MSA_PAGE_SIZE, MSA_PAGE_SIZE)};
}

/* Exclusive sums of the words' bits, by a warp; returns the sum of all. */
static __device__ int count_bits(const uint32_t *bits, int words, uint16_t *before)
{
    int lane = threadIdx.x % CUDA_WARP, all = 0;
    for (int first = 0; first < words; first += CUDA_WARP) {
        int own = first + lane < words ? __popc(bits[first + lane]) : 0, upto = own;
        for (int d = 1; d < CUDA_WARP; d *= 2) {
            int x = __shfl_up_sync(~0u, upto, d);
            upto += lane >= d ? x : 0;
        }
        before[first + lane] = (uint16_t)(all + upto - own);
        all += __shfl_sync(~0u, upto, CUDA_WARP - 1);
    }
    return all;
}

/* Words of a bitmap of all pages of a request, rounded up to whole rounds of a warp. */
static __host__ __device__ __forceinline__ int join_words(const cuda_attention &job)
{
    return (pages_of(job.desc.max_kv_len) + CUDA_WARP * 32 - 1) / (CUDA_WARP * 32) * CUDA_WARP;
}

static __host__ __device__ __forceinline__ int join_bytes(const cuda_attention &job)
{
    return JOIN_WARPS * join_words(job) * (int)(sizeof(uint32_t) + sizeof(uint16_t));
}

/* Tiles of at most a warp's queries: a warp a tile. chosen: tiles whose size is negative are left out. */
static __global__ void __launch_bounds__(JOIN_THREADS, JOIN_BLOCKS)
    join_few(const __grid_constant__ prefill_job job, bool chosen)
{
    extern __shared__ uint32_t all_bits[];
    __shared__ uint32_t all_pages[JOIN_WARPS][MOST_ORDERED][8];
    __shared__ union_page *unions[JOIN_WARPS];
    __shared__ uint8_t all_kinds[JOIN_WARPS][MOST_ORDERED], all_ranks[JOIN_WARPS][MOST_ORDERED],
        places[JOIN_WARPS][KINDS][MOST_ORDERED], all_left[JOIN_WARPS][KINDS], all_counts[JOIN_WARPS];
    const cuda_step &step = job.step;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, words = join_words(job), count = 0;
    uint32_t *bits = all_bits + warp * words;
    uint16_t *before = (uint16_t *)(all_bits + JOIN_WARPS * words) + warp * words;
    int index = (int)blockIdx.x * JOIN_WARPS + warp, list = (int)blockIdx.y;
    cuda_tile tile = {};
    grid_wait();
    if (index < step.num_tiles)
        tile = step.tiles[index];
    if (chosen && tile.num_rows > 0 && job.own.tiles[(int64_t)list * step.num_tiles + index].size < 0)
        tile.num_rows = 0;
    if (tile.num_rows > 0) {
        int64_t first = ((int64_t)list * step.total_q + tile.first_row) * step.topk;
        tile_request request = begin_tile(job, tile, list, index, lane == 0);
        int ids = tile.num_rows * step.topk;
        words = (pages_of(request.kv_len) + 31) / 32;
        for (int i = lane; i < words; i += CUDA_WARP)
            bits[i] = 0;
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < ids; i += CUDA_WARP) {
            int32_t logical = step.pages[first + i].logical;
            if (logical >= 0)
                atomicOr(&bits[logical / 32], 1u << logical % 32);
        }
        __syncwarp();
        count = count_bits(bits, words, before);
        if (lane == 0)
            job.own.tiles[(int64_t)list * step.num_tiles + index].size = count;
        uint32_t(*pages)[8] =
            count <= MOST_ORDERED ? all_pages[warp] : (uint32_t(*)[8])(job.own.unions + first); /* not ordered */
#pragma unroll 1
        for (int i = lane; i < count * 2; i += CUDA_WARP)
            ((uint4 *)pages)[i] = make_uint4(0, 0, 0, 0);
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < ids; i += CUDA_WARP) {
            cuda_page own = step.pages[first + i];
            if (own.logical < 0)
                continue;
            int query = (int)((uint32_t)i * job.topk_inverse >> 16),
                in_warp = (int)((uint32_t)query * job.width_inverse >> 16),
                bit = in_warp * WARP_ROWS + query - in_warp * job.width;
            uint32_t *to =
                pages[before[own.logical / 32] + __popc(bits[own.logical / 32] & ((1u << own.logical % 32) - 1))];
            atomicOr(&to[bit / 32], 1u << bit % 32);
            *(uint2 *)(to + 6) = make_uint2((uint32_t)own.logical, (uint32_t)own.physical); /* the same for all */
        }
        __syncwarp();
        int left = 0; /* lane k: pages of kind k so far */
        for (int begin = 0; begin < count; begin += CUDA_WARP) {
            int i = begin + lane, kind = 0;
            if (i < count) {
                const uint32_t *own = pages[i];
                kind = (own[0] | own[1] ? 1 : 0) | (own[2] | own[3] ? 2 : 0) | (own[4] | own[5] ? 4 : 0);
                write_source(job, request, (int32_t)own[6], (int32_t)own[7]);
            }
            uint32_t same = 0, own_same = 0;
#pragma unroll
            for (int k = 1; k < KINDS; k++) {
                uint32_t of_kind = __ballot_sync(~0u, kind == k);
                same = kind == k ? of_kind : same;
                own_same = lane == k ? of_kind : own_same;
            }
            int rank = __shfl_sync(~0u, left, kind) + __popc(same & ((1u << lane) - 1));
            left += __popc(own_same);
            if (count <= MOST_ORDERED && i < count) {
                all_kinds[warp][i] = (uint8_t)kind;
                all_ranks[warp][i] = (uint8_t)rank;
            }
        }
        count = count <= MOST_ORDERED ? count : 0;
        if (lane < KINDS)
            all_left[warp][lane] = (uint8_t)left;
        if (lane == 0)
            unions[warp] = job.own.unions + first;
    }
    if (lane == 0)
        all_counts[warp] = (uint8_t)count;
    __syncthreads();
    if (warp == 0) {
        int of = lane / KINDS;
        order_pages(all_counts[of], all_counts[of] ? all_left[of][lane % KINDS] : 0, places[of][lane % KINDS]);
    }
    __syncthreads();
    for (int i = lane; i < all_counts[warp] * 2; i += CUDA_WARP) {
        int place = places[warp][all_kinds[warp][i / 2]][all_ranks[warp][i / 2]];
        ((uint4 *)(unions[warp] + place))[i % 2] = ((uint4 *)all_pages[warp][i / 2])[i % 2];
    }
}

/* Any tiles: a block a tile. Pages stay in ascending order. */
static __global__ void __launch_bounds__(JOIN_THREADS) join_many(const __grid_constant__ prefill_job job, bool chosen)
{
    __shared__ uint32_t bits[PAGE_WORDS];
    __shared__ int before[PAGE_WORDS];
    const cuda_step &step = job.step;
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
    tile_request request = begin_tile(job, tile, list, blockIdx.x, threadIdx.x == 0);
    if (threadIdx.x == 0)
        job.own.tiles[list * step.num_tiles + blockIdx.x].size = count;
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
        write_source(job, request, page.logical, page.physical);
    }
}

/* ------------------------------------------------------------------------------------------------ images */

enum { IMAGE_THREADS = 256 };

/* Blocks an SM; registers for a thread's part of 16-bit K and V are not there for three. */
static constexpr int image_blocks(storage kv)
{
    return kv == STORAGE_HALF ? 2 : 3;
}

/* Run `run` of a row of K: the elements 16 run .. 16 run + 15, as F16 or E4M3, in the order of
 * attention_sm90.cuh. */
template <int WORDS>
static __device__ __forceinline__ void place_run(uint8_t *image, int key, int run, const uint32_t (&word)[WORDS])
{
    constexpr bool F16 = WORDS == 8;
    uint32_t to =
        shared_address(image) + (F16 ? run / 4 * TILE_HALF : 0) + run % 4 * 4 + swizzled(key, F16 ? 0 : run / 4 * 4);
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        store_shared_32(to ^ 16 * i, word[i]);
}

/* K as rows of 16-bit elements in two halves, or of E4M3. */
template <storage STORAGE, bool FAST>
static __device__ __forceinline__ void place_keys(const page_part<STORAGE, IMAGE_THREADS> &part, uint8_t *image)
{
    using C = chunk<STORAGE>;
#pragma unroll
    for (int i = 0; i < part.CHUNKS; i++) {
        int key = (i * IMAGE_THREADS + (int)threadIdx.x) / C::IN_ROW,
            c = (i * IMAGE_THREADS + (int)threadIdx.x) % C::IN_ROW;
        const uint4 &data = part.data[i];
        auto place = [&](int run, uint4 x, uint4 y) {
            uint32_t word[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
            place_run(image, key, run, word);
        };
        auto place_codes = [&](int run, uint2 x, uint2 y) {
            uint32_t word[4] = {x.x, x.y, y.x, y.y};
            place_run(image, key, run, word);
        };
        if constexpr (STORAGE == STORAGE_HALF) {
            *(uint4 *)(image + c / 8 * TILE_HALF + swizzled(key, c % 8)) = data;
        } else if constexpr (STORAGE == STORAGE_E4M3 && FAST) {
            place_codes(c, make_uint2(data.x, data.y), make_uint2(data.z, data.w));
        } else if constexpr (STORAGE == STORAGE_E4M3) {
            place(c, widen_e4m3_8<OPERAND_F16>(data.x, data.y), widen_e4m3_8<OPERAND_F16>(data.z, data.w));
        } else if constexpr (FAST) {
            block_table first = make_table(part.scale[i][0]), second = make_table(part.scale[i][1]);
            place_codes(2 * c, widen_codes(data.x, first), widen_codes(data.y, first));
            place_codes(2 * c + 1, widen_codes(data.z, second), widen_codes(data.w, second));
        } else {
            place(2 * c, widen_nvfp4_8<OPERAND_F16, true>(data.x, part.scale[i][0]),
                  widen_nvfp4_8<OPERAND_F16, true>(data.y, part.scale[i][0]));
            place(2 * c + 1, widen_nvfp4_8<OPERAND_F16, true>(data.z, part.scale[i][1]),
                  widen_nvfp4_8<OPERAND_F16, true>(data.w, part.scale[i][1]));
        }
    }
}

/* A thread's part of V: of E4M3, 16 elements of d of the four keys whose bytes are neighbours in an image. */
template <storage STORAGE> struct value_part {
    uint4 data[4]; /* NVFP4: the first half */
    uint8_t scale[4];
};

static __device__ __forceinline__ int value_key(int e)
{
    return threadIdx.x % CUDA_WARP / 4 * 16 + e / 2 * 8 + threadIdx.x % 4 * 2 + e % 2;
}

template <storage STORAGE>
static __device__ __forceinline__ void load_values(const page_rows &rows, int keys, value_part<STORAGE> &part)
{
    int block = threadIdx.x / CUDA_WARP;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int key = value_key(e);
        part.data[e] = make_uint4(0, 0, 0, 0);
        part.scale[e] = 0;
        if (key >= keys)
            continue;
        if (STORAGE == STORAGE_E4M3) {
            part.data[e] = *(const uint4 *)(rows.data + key * rows.token_stride + block * 16);
        } else {
            uint2 codes = *(const uint2 *)(rows.data + key * rows.token_stride + block * 8);
            part.data[e].x = codes.x;
            part.data[e].y = codes.y;
            part.scale[e] = rows.scale_quad ? rows.scale[key / 4 * 32 + block * 4 + key % 4]
                                            : rows.scale[key * rows.scale_token_stride + block];
        }
    }
}

/* The bytes i of four words, in order. */
static __device__ __forceinline__ void turn_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4])
{
    uint32_t low_ab = __byte_perm(a, b, 0x5140), high_ab = __byte_perm(a, b, 0x7362);
    uint32_t low_cd = __byte_perm(c, d, 0x5140), high_cd = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(low_ab, low_cd, 0x5410);
    out[1] = __byte_perm(low_ab, low_cd, 0x7632);
    out[2] = __byte_perm(high_ab, high_cd, 0x5410);
    out[3] = __byte_perm(high_ab, high_cd, 0x7632);
}

template <> struct value_part<STORAGE_HALF> : page_part<STORAGE_HALF, IMAGE_THREADS> {
};

static __device__ __forceinline__ void load_values(const page_rows &rows, int keys, value_part<STORAGE_HALF> &part)
{
    load_page<STORAGE_HALF, IMAGE_THREADS>(rows, keys, part);
}

/* 16-bit V: pairs of elements go where value_element wants them. Returns whether a value is not finite. */
template <typename T>
static __device__ __forceinline__ bool place_values(const value_part<STORAGE_HALF> &part, uint8_t *image)
{
    constexpr uint32_t EXPONENT = T::PV == WGMMA_BF16 ? 0x7F807F80 : 0x7C007C00;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < part.CHUNKS; i++) {
        int key = (i * IMAGE_THREADS + (int)threadIdx.x) / 16, c = (int)threadIdx.x % 16; /* d = 8c.. = 32 (c/4) + .. */
        uint32_t pair[4] = {part.data[i].x, part.data[i].y, part.data[i].z, part.data[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bad |= __vcmpeq2(pair[j] & EXPONENT, EXPONENT) != 0;
            *(uint32_t *)(image + c / 8 * TILE_HALF + swizzled(key, c / 4 % 2 * 4 + j) + c % 4 * 4) = pair[j];
        }
    }
    return bad;
}

/* V transposed. Returns whether a code is NaN. */
template <typename T, storage STORAGE>
static __device__ __forceinline__ bool place_values(const value_part<STORAGE> &part, uint8_t *image)
{
    uint32_t codes[4][4];
    bool bad = false;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        uint4 x = part.data[e];
        if (STORAGE != STORAGE_E4M3) {
            block_table table = make_table(part.scale[e]);
            uint2 low = widen_codes(x.x, table), high = widen_codes(x.y, table);
            x = make_uint4(low.x, low.y, high.x, high.y);
        }
        codes[e][0] = x.x;
        codes[e][1] = x.y;
        codes[e][2] = x.z;
        codes[e][3] = x.w;
#pragma unroll
        for (int i = 0; i < 4; i++)
            bad |= (((codes[e][i] & 0x7F7F7F7F) + 0x01010101) & 0x80808080) != 0;
    }
    int block = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t turned[4];
        turn_bytes(codes[0][i], codes[1][i], codes[2][i], codes[3][i], turned);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int d = block * 16 + 4 * i + j, row = d / 32 * 32 + d / 2 % 4 * 8 + d / 8 % 4 * 2 + d % 2;
            *(uint32_t *)(image + swizzled(row, lane / 4) + lane % 4 * 4) = turned[j];
        }
    }
    return bad;
}

template <storage STORAGE, typename T>
static __global__ void __launch_bounds__(IMAGE_THREADS, image_blocks(STORAGE))
    write_images(const __grid_constant__ prefill_job job)
{
    extern __shared__ __align__(128) uint8_t image[];
    const msa_attention_args &a = job.args;
    grid_release();
    int32_t first = job.own.first_page[job.requests[0]], last = job.own.first_page[job.requests[1]];
    int64_t pages = (int64_t)(last - first) * job.window.heads;
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *job.own.taken = 0; /* for the launch that follows */
    for (int64_t to = blockIdx.x; to < pages; to += gridDim.x) {
        int32_t head = job.window.first_head + (int32_t)(to % job.window.heads);
        int64_t list = head / job.list_heads,
                page = first + to / job.window.heads + list * job.desc.max_batch * pages_of(job.desc.max_kv_len);
        image_source source = job.own.sources[page];
        if (source.physical < 0)
            continue;
        if (source.physical >= a.num_pages) {
            if (threadIdx.x == 0)
                atomicOr(job.step.error, MSA_ERROR_BIT_PAGE_ID);
            continue;
        }
        int64_t at = source.physical;
        page_part<STORAGE, IMAGE_THREADS> keys;
        value_part<STORAGE> values;
        load_page<STORAGE, IMAGE_THREADS>(
            page_rows{(const uint8_t *)a.k + at * a.k_page_stride + head * a.k_head_stride, a.k_token_stride,
                      (const uint8_t *)a.k_scale + at * a.k_scale_page_stride + head * a.k_scale_head_stride,
                      a.k_scale_token_stride, false},
            source.keys, keys);
        load_values(page_rows{(const uint8_t *)a.v + at * a.v_page_stride + head * a.v_head_stride, a.v_token_stride,
                              (const uint8_t *)a.v_scale + at * a.v_scale_page_stride + head * a.v_scale_head_stride,
                              a.v_scale_token_stride, job.desc.v_scale_order == MSA_SCALE_QUAD},
                    source.keys, values);
        if (threadIdx.x == 0)
            copy_bulk_wait();
        __syncthreads();
        place_keys<STORAGE, T::QK == WGMMA_E4M3>(keys, image);
        bool bad = place_values<T>(values, image + T::K_BYTES);
        fence_async_reads();
        bad = __syncthreads_or(bad);
        if (threadIdx.x == 0) {
            job.own.unsafe[to] = bad;
            copy_bulk_out(job.own.images + to * T::IMAGE_BYTES, shared_address(image), T::IMAGE_BYTES);
        }
    }
    if (threadIdx.x == 0)
        copy_bulk_wait(); /* the memory is the block's until it ends */
}

#endif
