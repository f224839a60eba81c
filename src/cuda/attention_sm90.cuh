/* SPDX-License-Identifier: MIT
 *
 * attention_sm90.cuh - the core of sparse attention on Hopper: 64 query rows of one KV head, a warpgroup's, against one
 * page of 128 keys in shared memory. The kernels around it decide which rows meet which pages.
 *
 * A warp has 16 of the rows: whole queries, ratio rows each (the heads that share the KV head), as many as fit. A lane
 * holds, as wgmma's accumulators do, parts of the rows g = lane/4 and g + 8 of them.
 *
 *   S = Q K^T    Q and K in shared memory, K-major, 128-byte swizzle: F16 or BF16 in two halves of 64 elements of d, one
 *                after the other, or E4M3. FP32 accumulation
 *   P            with E4M3 queries e4m3(448 * 2^(s - max)) against the page's own maximum, as the contract wants; else
 *                the queries' type, against the same. The row sum adds the unrounded values
 *   O += P V     a fresh accumulator a page, so that FP8 products never sum more than 128 keys, merged in FP32
 *
 * Results are kept relative to `reference`, the running maximum rounded up to a multiple of 16 in log2 units: the merge
 * is one fma an element, and rows are rescaled almost never. The page's terms are 2^(s * scale + bias) with a bias that
 * is rounded once and then exact for terms and merge alike, so logits of any size keep their meaning.
 *
 * E4M3 V lies transposed: 128 rows of d, 128 bytes of keys each, swizzled. Within 32 keys, byte 16h + 4t + e is key
 * 16h + 8*(e/2) + 2t + e%2: then the four P that a lane has of 16h.. are its four bytes of the product's operand and no
 * value moves between lanes. Row n is element d = value_element(n), so that a lane's results are runs of 8 elements.
 * 16-bit V lies as the cache has it, two halves of 64 elements of d, keys as rows of 128 bytes, swizzled.
 */
#ifndef MSA_CUDA_ATTENTION_SM90_CUH
#define MSA_CUDA_ATTENTION_SM90_CUH

#include "maxima_sm90.cuh"
#include "number.cuh"

enum { GROUP_ROWS = 64, WARP_ROWS = 16 };
enum { TILE_HALF = MSA_PAGE_SIZE * 128 }; /* bytes: 128 rows of 128 */

/* What the pair of formats and the precision make of the products. */
template <wgmma_type KEYS, wgmma_type VALUES> struct attention_types {
    static constexpr wgmma_type QK = KEYS, PV = VALUES;
    static constexpr bool E4M3 = VALUES == WGMMA_E4M3;
    static constexpr int Q_BYTES = GROUP_ROWS * MSA_HEAD_DIM * (KEYS == WGMMA_E4M3 ? 1 : 2); /* of a warpgroup */
    static constexpr int K_BYTES = TILE_HALF * (KEYS == WGMMA_E4M3 ? 1 : 2), V_BYTES = TILE_HALF * (E4M3 ? 1 : 2);
};
using exact_types = attention_types<WGMMA_F16, WGMMA_E4M3>; /* E4M3 queries */
using fast_types = attention_types<WGMMA_E4M3, WGMMA_E4M3>;
using bf16_types = attention_types<WGMMA_BF16, WGMMA_BF16>;
using fp16_types = attention_types<WGMMA_F16, WGMMA_F16>;

/* The element of d that is row n of a transposed V: n = 8j + 2t + e, d = 32*(j/4) + 8t + 2*(j%4) + e. */
static __host__ __device__ constexpr int value_element(int n)
{
    return n / 32 * 32 + n / 2 % 4 * 8 + n / 8 % 4 * 2 + n % 2;
}

/* A lane's part of two rows. Before the first page: no reference. */
struct row_state {
    float out[64];
    float reference[2], sum[2]; /* log2 units; sum over the lane's keys */
};

static __device__ __forceinline__ void clear(row_state &o)
{
#pragma unroll
    for (int i = 0; i < 64; i++)
        o.out[i] = 0;
    o.reference[0] = o.reference[1] = -INFINITY;
    o.sum[0] = o.sum[1] = 0;
}

/* Which of a lane's rows see the page, and how many of its keys. */
struct page_view {
    bool any;         /* some row of the warp does */
    bool selected[2]; /* this row does */
    bool partial;     /* some row of the block may see less than all keys; if not, `keys` is not read */
    int keys[2];
};

/* ------------------------------------------------------------------------------------------------ products */

/* q, k: low halves of matrix descriptors. */
template <typename T> static __device__ __forceinline__ void multiply_keys(float (&s)[64], uint32_t q, uint32_t k)
{
    constexpr int HALVES = T::QK == WGMMA_E4M3 ? 1 : 2;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * HALVES; i++)
        wgmma_64x128<T::QK>(s, matrix_of_low(q + i / 4 * (T::Q_BYTES / HALVES / 16) + i % 4 * 2),
                            matrix_of_low(k + i / 4 * (TILE_HALF / 16) + i % 4 * 2), i);
    wgmma_commit();
    wgmma_wait(s);
}

/* Four E4M3 codes of floats, the first in the low byte. */
static __device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d)
{
    uint32_t codes;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
}

/* P as operands of products with 32 bytes of keys each. */
template <typename T>
static __device__ __forceinline__ void pack_probabilities(const float (&s)[64], uint32_t (&p)[T::E4M3 ? 16 : 32])
{
    if constexpr (T::E4M3) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float *from = s + i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
            p[i] = pack_e4m3(from[0], from[1], from[4], from[5]);
        }
    } else {
        constexpr operand TYPE = T::PV == WGMMA_F16 ? OPERAND_F16 : OPERAND_BF16;
#pragma unroll
        for (int i = 0; i < 32; i++)
            p[i] = pack_pair<TYPE>(s[2 * i], s[2 * i + 1]);
    }
}

/* ------------------------------------------------------------------------------------------------ softmax */

constexpr float LOG2_448 = 8.80735492f;

/* Scores of -inf cannot come from finite operands: the row must not look right. E4M3 has no infinities. */
static __device__ __forceinline__ void find_infinities(float (&s)[64])
{
    uint32_t most = 0; /* as unsigned numbers, -inf is above all other floats but NaN */
#pragma unroll
    for (int i = 0; i < 64; i += 2)
        most = __vimax3_u32(most, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
    if (__any_sync(~0u, most >= 0xFF800000)) {
#pragma unroll
        for (int i = 0; i < 64; i++)
            s[i] = s[i] == -INFINITY ? NAN : s[i];
    }
}

static __device__ __forceinline__ void hide_keys(float (&s)[64], const int (&keys)[2])
{
    int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (i / 4 * 8 + i % 2 + column >= keys[i / 2 % 2])
            s[i] = -INFINITY;
}

/* S to the unrounded terms of P, in place; the page enters the rows' sums. weight: of the page's products. */
template <typename T>
static __device__ __forceinline__ void page_softmax(float (&s)[64], float scale, const page_view &view, row_state &o,
                                                    float (&weight)[2])
{
    if constexpr (!T::E4M3)
        find_infinities(s);
    if (view.partial)
        hide_keys(s, view.keys);
    float max[2], bias[2], next[2];
    lane_maxima(s, max);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 1));
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 2));
        bias[r] = fmaf(-max[r], scale, T::E4M3 ? LOG2_448 : 0.0f);
        next[r] = view.selected[r] ? fmaxf(o.reference[r], ceilf(-bias[r] * 0.0625f) * 16.0f) : o.reference[r];
    }
    if (__any_sync(~0u, next[0] != o.reference[0] || next[1] != o.reference[1])) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float factor = next[r] == o.reference[r] ? 1.0f : exp2_approx(o.reference[r] - next[r]);
            o.reference[r] = next[r];
            o.sum[r] *= factor;
#pragma unroll
            for (int i = 0; i < 32; i++)
                o.out[i / 2 * 4 + 2 * r + i % 2] *= factor;
        }
    }
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale, bias[i / 2 % 2]));
        sum[i % 4] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        weight[r] = exp2_approx(-bias[r] - o.reference[r]);
        if (view.selected[r])
            o.sum[r] = fmaf(sum[2 * r] + sum[2 * r + 1], weight[r], o.sum[r]);
    }
}

/* ------------------------------------------------------------------------------------------------ one page */

/* Rows that do not see the page are left alone, whatever its values are. `sum` has the columns from first on. */
template <int N>
static __device__ __forceinline__ void merge_products(const float (&sum)[N], int first, const page_view &view,
                                                      const float (&weight)[2], row_state &o)
{
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (view.selected[r]) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                int at = i / 2 * 4 + 2 * r + i % 2;
                o.out[first + at] = fmaf(sum[at], weight[r], o.out[first + at]);
            }
        }
}

/* The warpgroup's rows meet a page. All its warps call it, also those without a row that sees the page: products are
 * the whole warpgroup's. q, k, v: low halves of matrix descriptors. */
template <typename T>
static __device__ __forceinline__ void attend_page(row_state &o, uint32_t q, uint32_t k, uint32_t v, float scale,
                                                   const page_view &view)
{
    float s[64], weight[2] = {};
    uint32_t p[T::E4M3 ? 16 : 32];
    multiply_keys<T>(s, q, k);
    if (view.any) {
        page_softmax<T>(s, scale, view, o, weight);
        pack_probabilities<T>(s, p);
    } else {
#pragma unroll
        for (int i = 0; i < (T::E4M3 ? 16 : 32); i++)
            p[i] = 0;
    }
    if constexpr (T::E4M3) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
            wgmma_64x128<WGMMA_E4M3>(s, p + 4 * i, matrix_of_low(v + i * 2), i);
        wgmma_commit();
        wgmma_wait(s); /* also keeps ptxas from reusing p under way */
        merge_products(s, 0, view, weight, o);
    } else {
        float sum[32]; /* half of d at a time: registers for all of it are not there */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; i++)
                wgmma_64x64_turned<T::PV>(sum, p + 4 * i, matrix_of_low(v + (half * TILE_HALF + i * 2048) / 16), i);
            wgmma_commit();
            wgmma_wait(sum);
            merge_products(sum, 32 * half, view, weight, o);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ results */

/* After the last page: sums over all keys. */
static __device__ __forceinline__ void finish_sums(row_state &o)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        o.sum[r] += __shfl_xor_sync(~0u, o.sum[r], 1);
        o.sum[r] += __shfl_xor_sync(~0u, o.sum[r], 2);
    }
}

/* Results of 16-bit V to where those of transposed V are: out[16b + 4i + ..] of lane t to [16b + 4t + ..] of lane i. */
static __device__ __forceinline__ void turn_results(row_state &o)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 64; i++)
            if (!(i / 4 & bit)) {
                float low = o.out[i], high = o.out[i + 4 * bit];
                float other = __shfl_xor_sync(~0u, t & bit ? low : high, bit);
                o.out[i] = t & bit ? other : low;
                o.out[i + 4 * bit] = t & bit ? high : other;
            }
}

/* Row r's 128 elements, times factor. A lane writes the elements 32b + 8t + 0..7, b = 0..3. An infinite value that the
 * row sees gives NaN, as every other non-finite input does. */
static __device__ __forceinline__ void store_elements(const row_state &o, int r, float factor, void *to,
                                                      msa_dtype dtype)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int b = 0; b < 4; b++) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float sum = o.out[16 * b + i / 2 * 4 + 2 * r + i % 2];
            x[i] = (sum + (sum - sum)) * factor;
        }
        if (dtype == MSA_F32) {
            float4 *at = (float4 *)to + 8 * b + 2 * t;
            at[0] = make_float4(x[0], x[1], x[2], x[3]);
            at[1] = make_float4(x[4], x[5], x[6], x[7]);
        } else if (dtype == MSA_BF16) {
            ((uint4 *)to)[4 * b + t] =
                make_uint4(pack_pair<OPERAND_BF16>(x[0], x[1]), pack_pair<OPERAND_BF16>(x[2], x[3]),
                           pack_pair<OPERAND_BF16>(x[4], x[5]), pack_pair<OPERAND_BF16>(x[6], x[7]));
        } else {
            ((uint4 *)to)[4 * b + t] =
                make_uint4(pack_pair<OPERAND_F16>(x[0], x[1]), pack_pair<OPERAND_F16>(x[2], x[3]),
                           pack_pair<OPERAND_F16>(x[4], x[5]), pack_pair<OPERAND_F16>(x[6], x[7]));
        }
    }
}

#endif
