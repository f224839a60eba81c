/* SPDX-License-Identifier: MIT
 *
 * image_sm90.cuh - write_images, the launch that comes before prefill's attention; prefill_sm90.cuh says what images
 * are.
 *
 * Persistent blocks take a page of a KV head at a time, through shared memory, out by one bulk copy. What comes
 * straight from the cache is passed over, but for its number, which is checked here.
 * Bytes: 18 KB (NVFP4), 32 or 64 KB read and 48 KB (32 KB for `fast`, 64 KB of 16 bit) written an image. Floor of 1492
 * images of NVFP4 pages: 22 us at 4.4 TB/s; measured on an H200, 2026-11-30, by ncu: 30 us; 1024 of BF16: 36 us where
 * none came straight, 9 where all but 65 did.
 */
#ifndef MSA_CUDA_IMAGE_SM90_CUH
#define MSA_CUDA_IMAGE_SM90_CUH

#include "prefill_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ images */

enum { IMAGE_THREADS = 256 };

/* Blocks an SM; registers for a thread's part of 16-bit K and V are not there for three. */
static constexpr int image_blocks(storage kv)
{
    return kv == STORAGE_HALF ? 2 : 3;
}

/* Words that follow each other in a run. */
template <int WORDS> struct run_words {
    uint32_t of[WORDS];
};
using wide_run = run_words<8>;   /* of F16 */
using narrow_run = run_words<4>; /* of E4M3 */

static __device__ __forceinline__ wide_run widen_run(uint2 low, uint2 high)
{
    uint4 x = widen_e4m3_8<OPERAND_F16>(low.x, low.y), y = widen_e4m3_8<OPERAND_F16>(high.x, high.y);
    return wide_run{{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}};
}

/* Run `run` of a row of K: the elements 16 run .. 16 run + 15, as F16 or E4M3, in the order of attention_sm90.cuh.
 * Word i is what is number i ^ turned of the run. */
template <int WORDS>
static __device__ __forceinline__ void place_run(uint8_t *image, int key, int run, int turned,
                                                 const run_words<WORDS> &word)
{
    constexpr bool F16 = WORDS == 8;
    uint32_t to = shared_address(image) + (F16 ? run / 4 * TILE_HALF : 0) + run % 4 * 4 +
                  (swizzled(key, F16 ? 0 : run / 4 * 4) ^ 16 * turned);
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        store_shared_32(to ^ 16 * i, word.of[i]);
}

/* K as rows of 16-bit elements in two halves, or of E4M3. Lanes whose words would share banks, as their elements lie in
 * other halves, take the two parts of their 16 bytes in turned order. */
template <storage STORAGE, bool FAST>
static __device__ __forceinline__ void place_keys(const page_part<STORAGE, IMAGE_THREADS> &part, uint8_t *image)
{
    using C = chunk<STORAGE>;
#pragma unroll
    for (int i = 0; i < part.CHUNKS; i++) {
        int key = (i * IMAGE_THREADS + (int)threadIdx.x) / C::IN_ROW, c = (int)threadIdx.x % C::IN_ROW;
        const uint4 &data = part.data[i];
        bool turned = c >= C::IN_ROW / 2;
        uint2 first = turned ? make_uint2(data.z, data.w) : make_uint2(data.x, data.y),
              second = turned ? make_uint2(data.x, data.y) : make_uint2(data.z, data.w);
        if constexpr (STORAGE == STORAGE_HALF) {
            *(uint4 *)(image + c / 8 * TILE_HALF + swizzled(key, c % 8)) = data;
        } else if constexpr (STORAGE == STORAGE_E4M3 && FAST) {
            place_run(image, key, c, 0, narrow_run{{data.x, data.y, data.z, data.w}});
        } else if constexpr (STORAGE == STORAGE_E4M3) {
            place_run(image, key, c, turned ? 4 : 0, widen_run(first, second));
        } else {
            auto place = [&](int run, uint2 codes, uint32_t scale) {
                block_table table = make_table(scale);
                uint2 low = widen_codes(codes.x, table), high = widen_codes(codes.y, table);
                if constexpr (FAST)
                    place_run(image, key, run, 0, narrow_run{{low.x, low.y, high.x, high.y}});
                else
                    place_run(image, key, run, 0, widen_run(low, high));
            };
            uint32_t scale[2] = {part.scale[i][0], part.scale[i][1]};
            place(2 * c + turned, first, turned ? scale[1] : scale[0]);
            place(2 * c + !turned, second, turned ? scale[0] : scale[1]);
        }
    }
}

/* A thread's part of V: of E4M3, 16 elements of d of the four keys whose bytes are neighbours in an image. */
template <storage STORAGE> struct value_part {
    uint4 data[4]; /* NVFP4: the first half */
    uint8_t scale[4];
};

/* Key e of the thread's four is first_key + value_step(e). */
static __device__ __forceinline__ int value_step(int e)
{
    return e / 2 * 8 + e % 2;
}

template <storage STORAGE>
static __device__ __forceinline__ void load_values(const page_rows &rows, int keys, value_part<STORAGE> &part)
{
    constexpr int BYTES = STORAGE == STORAGE_E4M3 ? 16 : 8; /* of a thread's part of a row */
    int block = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP, first_key = lane / 4 * 16 + lane % 4 * 2;
    const uint8_t *row = rows.data + first_key * rows.token_stride + block * BYTES, *scale = rows.scale;
    if (rows.scale_quad) /* step 1 goes to the next byte, 8 to two quads on */
        scale += first_key / 4 * 32 + first_key % 4 + block * 4;
    else
        scale += first_key * rows.scale_token_stride + block;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        part.data[e] = make_uint4(0, 0, 0, 0);
        part.scale[e] = 0;
        if (first_key + value_step(e) >= keys)
            continue;
        if (STORAGE == STORAGE_E4M3) {
            part.data[e] = *(const uint4 *)(row + value_step(e) * rows.token_stride);
        } else {
            uint2 codes = *(const uint2 *)(row + value_step(e) * rows.token_stride);
            part.data[e].x = codes.x;
            part.data[e].y = codes.y;
            part.scale[e] = scale[rows.scale_quad ? e / 2 * 64 + e % 2 : value_step(e) * rows.scale_token_stride];
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

/* 16-bit V. Returns whether a value is not finite. */
template <typename T>
static __device__ __forceinline__ bool place_values(const value_part<STORAGE_HALF> &part, uint8_t *image)
{
    constexpr uint32_t EXPONENT = T::PV == WGMMA_BF16 ? 0x7F807F80 : 0x7C007C00;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < part.CHUNKS; i++) {
        int key = (i * IMAGE_THREADS + (int)threadIdx.x) / 16, c = (int)threadIdx.x % 16;
        uint32_t pair[4] = {part.data[i].x, part.data[i].y, part.data[i].z, part.data[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            bad |= __vcmpeq2(pair[j] & EXPONENT, EXPONENT) != 0;
        *(uint4 *)(image + c / 8 * TILE_HALF + swizzled(key, c % 8)) = part.data[i];
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
            bad |= (part.scale[e] & 0x7F) == 0x7F; /* the only way to a NaN */
        }
        codes[e][0] = x.x;
        codes[e][1] = x.y;
        codes[e][2] = x.z;
        codes[e][3] = x.w;
#pragma unroll
        for (int i = 0; i < 4 && STORAGE == STORAGE_E4M3; i++)
            bad |= (((codes[e][i] & 0x7F7F7F7F) + 0x01010101) & 0x80808080) != 0;
    }
    /* d = 16 block + 4 i + j is row 32 (d / 32) + 8 (d / 2 % 4) + 2 (d / 8 % 4) + d % 2. */
    int block = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    uint32_t to = shared_address(image) + swizzled(block / 2 * 32 + block % 2 * 4, lane / 4) + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t turned[4];
        turn_bytes(codes[0][i], codes[1][i], codes[2][i], codes[3][i], turned);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            constexpr int ROW = 128;
            int low = i / 2 * 2 + j % 2, high = (2 * i + j / 2) % 4 * 8; /* of the row's number */
            store_shared_32((to ^ 16 * low) + (low + high) * ROW, turned[j]);
        }
    }
    return bad;
}

/* A page's rows of K and V, and their scales, on their way to the L2. */
template <storage STORAGE>
static __device__ __forceinline__ void fetch_page(const prefill_job &job, int64_t at, int32_t head)
{
    const msa_attention_args &a = job.args;
    int key = (int)threadIdx.x % MSA_PAGE_SIZE;
    bool values = threadIdx.x >= MSA_PAGE_SIZE; /* by half of the threads each */
    const char *row = values
                          ? (const char *)a.v + at * a.v_page_stride + head * a.v_head_stride + key * a.v_token_stride
                          : (const char *)a.k + at * a.k_page_stride + head * a.k_head_stride + key * a.k_token_stride;
    prefetch_l2(row);
    if (STORAGE == STORAGE_HALF)
        prefetch_l2(row + 128);
    if (STORAGE != STORAGE_NVFP4_E4M3)
        return;
    prefetch_l2(values ? (const char *)a.v_scale + at * a.v_scale_page_stride + head * a.v_scale_head_stride +
                             (job.desc.v_scale_order == MSA_SCALE_QUAD ? key * 8 : key * a.v_scale_token_stride)
                       : (const char *)a.k_scale + at * a.k_scale_page_stride + head * a.k_scale_head_stride +
                             key * a.k_scale_token_stride);
}

/* For page-major work that begins beside this launch. By the thread that has sent the block's images. */
static __device__ __forceinline__ void count_made(const prefill_job &job)
{
    copy_bulk_finish();
    __threadfence();
    atomicAdd(job.own.made, 1);
}

template <storage STORAGE, typename T>
static __global__ void __launch_bounds__(IMAGE_THREADS, image_blocks(STORAGE))
    write_images(const __grid_constant__ prefill_job job)
{
    extern __shared__ __align__(128) uint8_t image[];
    const msa_attention_args &a = job.args;
    grid_wait();
    grid_release(); /* so that what `prepare` wrote is there when the next launch starts */
    tile_kinds kinds = kinds_of_tiles(job);
    uint32_t heads = job.window.heads, first = (uint32_t)window_begin(job, job.own.first_page),
             images = ((uint32_t)window_end(job, job.own.first_page) - first) * heads;
    /* Of a list; behind the step's pages they say that there is nothing. */
    int64_t list_sources = (int64_t)job.desc.max_batch * pages_of(job.desc.max_kv_len);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *job.own.taken = *job.own.finished = 0; /* for the launches that follow */
    auto head_of = [&](uint32_t to) { return (int32_t)(job.window.first_head + to % heads); };
    auto source_of = [&](uint32_t to) {
        int64_t page = (int64_t)first + to / heads, list = (uint32_t)head_of(to) / job.list_heads;
        return page < list_sources ? job.own.sources[page + list * list_sources] : image_source{-1, 0, 0};
    };
    auto is_made = [&](image_source source) {
        return source.physical >= 0 && source.physical < a.num_pages &&
               !(STORAGE == STORAGE_HALF && job.straight && source.whole);
    };
    image_source source, next = source_of(blockIdx.x);
    for (uint32_t to = blockIdx.x; to < images; to += gridDim.x) {
        int32_t head = head_of(to);
        source = next;
        next = source_of(to + gridDim.x);
        if (source.physical < 0)
            continue;
        if (source.physical >= a.num_pages) {
            if (threadIdx.x == 0)
                atomicOr(job.step.error, MSA_ERROR_BIT_PAGE_ID);
            continue;
        }
        if (!is_made(source))
            continue;
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
        if (is_made(next))
            fetch_page<STORAGE>(job, next.physical, head_of(to + gridDim.x));
        bool bad = place_values<T>(values, image + T::K_BYTES);
        fence_async_reads();
        bad = __syncthreads_or(bad);
        if (threadIdx.x == 0) {
            job.own.unsafe[to] = bad;
            copy_bulk_out(job.own.images + (int64_t)to * T::IMAGE_BYTES, shared_address(image), T::IMAGE_BYTES);
        }
    }
    if (threadIdx.x == 0) {
        copy_bulk_wait(); /* the memory is the block's until it ends */
        if (all_page_major(kinds))
            count_made(job);
    }
}

#endif
