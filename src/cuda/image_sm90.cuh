/* SPDX-License-Identifier: MIT
 *
 * image_sm90.cuh - the launches that come before prefill's attention: unions and windows (prepare), images (run).
 * prefill_sm90.cuh says what they are.
 *
 *   find_windows   one block          pages before each request, where windows begin
 *   join_few       a warp a tile      merges the queries' sorted lists, then puts the pages into their order
 *   join_many      a block a tile     the same for tiles of many queries: a bitmap, whose bits before a page number it
 *   write_images   persistent blocks  a page of a KV head at a time, through shared memory, out by one bulk copy
 * Bytes of write_images: 18 KB (NVFP4) or 32 KB read and 48 KB (32 KB for `fast`) written an image.
 */
#ifndef MSA_CUDA_IMAGE_SM90_CUH
#define MSA_CUDA_IMAGE_SM90_CUH

#include "prefill_sm90.cuh"
#include "ptx_bulk_sm90.cuh"
#include "step.cuh"

/* ------------------------------------------------------------------------------------------------ windows */

static __global__ void __launch_bounds__(SCAN_THREADS) find_windows(const __grid_constant__ prefill_job job)
{
    int32_t before = 0;
    for (int64_t round = 0; round < job.step.batch; round += SCAN_THREADS) {
        int64_t b = round + threadIdx.x;
        int32_t pages = b < job.step.batch ? pages_of(job.step.requests[b].kv_len) : 0, all;
        int32_t in_round = block_scan<sum>(pages, &all);
        if (b < job.step.batch)
            job.own.first_page[b] = before + in_round;
        before += all;
    }
    if (threadIdx.x == 0)
        job.own.first_page[job.step.batch] = before;
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

enum { JOIN_THREADS = 128, PAGE_WORDS = MSA_MAX_KV_LEN / MSA_PAGE_SIZE / 32, MOST_ORDERED = 96 };

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

/* Where a page of the union goes. The warpgroups of a block walk it together, a few stages apart at most, and pass what
 * none of their queries selected; so it is ordered to keep all of them busy: the next page is always of the kind (which
 * warpgroups need it) after which the warpgroups' shares of what they need are nearest to each other. By a warp. */
static __device__ void order_pages(const uint8_t *kinds, int count, uint8_t *places,
                                   uint8_t (&place_of)[1 << GROUPS][MOST_ORDERED] /* of each kind's pages */)
{
    int lane = threadIdx.x % CUDA_WARP, left = 0, used = 0, needed[GROUPS] = {}, done[GROUPS] = {};
    for (int first = 0; first < count; first += CUDA_WARP) {
        int kind = first + lane < count ? kinds[first + lane] : 0;
        for (int k = 1; k < 1 << GROUPS; k++) {
            int same = __popc(__ballot_sync(~0u, kind == k));
            left += lane == k ? same : 0;
            for (int g = 0; g < GROUPS; g++)
                needed[g] += k >> g & 1 ? same : 0;
        }
    }
    for (int i = 0; i < count; i++) {
        int cost = 0;
        for (int g = 0; g < GROUPS; g++) {
            int ahead = count * (done[g] + (lane >> g & 1)) - needed[g] * (i + 1);
            cost += ahead * ahead;
        }
        int next = (int)(__reduce_min_sync(~0u, left > 0 ? (uint32_t)cost * CUDA_WARP + lane : ~0u) % CUDA_WARP);
        if (lane == next) {
            place_of[lane][used++] = (uint8_t)i;
            left--;
        }
        for (int g = 0; g < GROUPS; g++)
            done[g] += next >> g & 1;
    }
    __syncwarp();
    used = 0; /* lane k: pages of kind k so far */
    for (int first = 0; first < count; first += CUDA_WARP) {
        int kind = first + lane < count ? kinds[first + lane] : 0;
        uint32_t same = __match_any_sync(~0u, kind);
        int rank = __shfl_sync(~0u, used, kind) + __popc(same & ((1u << lane) - 1));
        if (kind)
            places[first + lane] = place_of[kind][rank];
        for (int k = 1; k < 1 << GROUPS; k++) {
            int more = __popc(__ballot_sync(~0u, kind == k));
            used += lane == k ? more : 0;
        }
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
    if (has_images(job))
        request.sources[logical] = image_source{physical < 0 ? INT32_MAX : physical,
                                                min(request.kv_len - logical * MSA_PAGE_SIZE, MSA_PAGE_SIZE)};
}

/* Tiles of at most a warp's queries: a warp a tile, a lane a query's list, which is sorted. The smallest page that the
 * lanes have next is the union's next. */
static __global__ void __launch_bounds__(JOIN_THREADS) join_few(const __grid_constant__ prefill_job job)
{
    constexpr int WARPS = JOIN_THREADS / CUDA_WARP;
    __shared__ uint32_t page[WARPS][MOST_ORDERED][8];
    __shared__ uint8_t kind[WARPS][MOST_ORDERED], place[WARPS][MOST_ORDERED], room[WARPS][1 << GROUPS][MOST_ORDERED];
    const cuda_step &step = job.step;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP, count = 0;
    int64_t index = (int64_t)blockIdx.x * WARPS + warp, list = blockIdx.y;
    cuda_tile tile = {};
    if (index < step.num_tiles)
        tile = step.tiles[index];
    if (tile.num_rows == 0)
        return;
    int64_t first = (list * step.total_q + tile.first_row) * step.topk;
    union_page *to = job.own.unions + first;
    tile_request request = begin_tile(job, tile, list, index, lane == 0);
    extern __shared__ cuda_page lists[]; /* a warp's are tile_queries lists */
    cuda_page *own_lists = lists + warp * step.query_tile * step.topk, *next = own_lists + lane * step.topk,
              *end = next + step.topk;
    for (int i = lane; i < tile.num_rows * step.topk; i += CUDA_WARP)
        own_lists[i] = step.pages[first + i];
    __syncwarp();
    if (lane >= tile.num_rows)
        next = end;
    for (;;) {
        cuda_page own = next < end ? *next : cuda_page{-1, -1};
        int32_t logical = (int32_t)__reduce_min_sync(~0u, (uint32_t)own.logical); /* -1 is the largest */
        if (logical < 0)
            break;
        uint32_t queries = __ballot_sync(~0u, own.logical == logical);
        int32_t physical = __shfl_sync(~0u, own.physical, __ffs((int)queries) - 1);
        next += own.logical == logical;
        uint32_t some = (1u << job.width) - 1, low = queries >> 2 * lane * job.width & some,
                 high = queries >> (2 * lane + 1) * job.width & some, word = low | high << 16;
        word = lane == 6 ? (uint32_t)logical : lane == 7 ? (uint32_t)physical : word;
        if (lane < 8)
            (count < MOST_ORDERED ? page[warp][count] : (uint32_t *)(to + count))[lane] = word;
        if (lane == 8)
            write_source(job, request, logical, physical);
        uint32_t words = __ballot_sync(~0u, lane < 2 * GROUPS && word);
        if (lane == 9 && count < MOST_ORDERED)
            kind[warp][count] = (uint8_t)((words & 3 ? 1 : 0) | (words & 12 ? 2 : 0) | (words & 48 ? 4 : 0));
        count++;
    }
    if (lane == 0)
        job.own.tiles[list * step.num_tiles + index].size = count;
    __syncwarp();
    if (count <= MOST_ORDERED)
        order_pages(kind[warp], count, place[warp], room[warp]);
    __syncwarp();
    for (int i = lane; i < min(count, MOST_ORDERED) * 8; i += CUDA_WARP)
        ((uint32_t *)(to + (count <= MOST_ORDERED ? place[warp][i / 8] : i / 8)))[i % 8] = page[warp][i / 8][i % 8];
}

/* Any tiles: a block a tile. Pages stay in ascending order. */
static __global__ void __launch_bounds__(JOIN_THREADS) join_many(const __grid_constant__ prefill_job job)
{
    __shared__ uint32_t bits[PAGE_WORDS];
    __shared__ int before[PAGE_WORDS];
    const cuda_step &step = job.step;
    cuda_tile tile = step.tiles[blockIdx.x];
    int64_t list = blockIdx.y, first = (list * step.total_q + tile.first_row) * step.topk;
    if (tile.num_rows == 0)
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

enum { IMAGE_THREADS = 256, IMAGE_BLOCKS = 3 /* an SM */ };

/* Where 16 bytes of a row of 128 lie. */
static __device__ __forceinline__ uint32_t swizzled(int row, int chunk)
{
    return (uint32_t)(row * 128 + ((chunk ^ row) % 8) * 16);
}

/* Run `run` of a row of K: the elements 16 run .. 16 run + 15, as F16 or E4M3, in the order of
 * attention_sm90.cuh. */
template <int WORDS>
static __device__ __forceinline__ void place_run(uint8_t *image, int key, int run, const uint32_t (&word)[WORDS])
{
    constexpr bool F16 = WORDS == 8;
    uint32_t to = shared_address(image) + (F16 ? run / 4 * TILE_HALF : 0) + run % 4 * 4 +
                  swizzled(key, F16 ? 0 : run / 4 * 4);
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        store_shared_32(to ^ 16 * i, word[i]);
}

/* K as rows of F16 in two halves, or of E4M3. */
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
        if constexpr (STORAGE == STORAGE_E4M3 && FAST) {
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

/* A thread's part of V: 16 elements of d of the four keys whose bytes are neighbours in an image. */
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

/* V transposed. Returns whether a code is NaN. */
template <storage STORAGE>
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

template <storage STORAGE, bool FAST>
static __global__ void __launch_bounds__(IMAGE_THREADS, IMAGE_BLOCKS)
    write_images(const __grid_constant__ prefill_job job)
{
    extern __shared__ __align__(128) uint8_t image[];
    const msa_attention_args &a = job.args;
    int32_t first = job.own.first_page[job.requests[0]], last = job.own.first_page[job.requests[1]],
            bytes = image_bytes(job);
    int64_t pages = (int64_t)(last - first) * job.window.heads;
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
        load_values<STORAGE>(
            page_rows{(const uint8_t *)a.v + at * a.v_page_stride + head * a.v_head_stride, a.v_token_stride,
                      (const uint8_t *)a.v_scale + at * a.v_scale_page_stride + head * a.v_scale_head_stride,
                      a.v_scale_token_stride, job.desc.v_scale_order == MSA_SCALE_QUAD},
            source.keys, values);
        if (threadIdx.x == 0)
            copy_bulk_wait();
        __syncthreads();
        place_keys<STORAGE, FAST>(keys, image);
        bool bad = place_values<STORAGE>(values, image + (FAST ? fast_types::K_BYTES : exact_types::K_BYTES));
        fence_async_reads();
        bad = __syncthreads_or(bad);
        if (threadIdx.x == 0) {
            job.own.unsafe[to] = bad;
            copy_bulk_out(job.own.images + to * bytes, shared_address(image), (uint32_t)bytes);
        }
    }
    if (threadIdx.x == 0)
        copy_bulk_wait(); /* the memory is the block's until it ends */
}

#endif
