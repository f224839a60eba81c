/* SPDX-License-Identifier: MIT
 *
 * attention_sm90.cuh - the core of sparse attention on Hopper: 64 query rows of one KV head, a warpgroup's, against one
 * page of 128 keys in shared memory. The kernels around it decide which rows meet which pages.
 *
 * A warp has 16 of the rows: whole queries, ratio rows each (the heads that share the KV head), as many as fit. A lane
 * holds, as wgmma's accumulators do, parts of the rows g = lane/4 and g + 8 of them.
 *
 *   S = Q K^T    Q and K in shared memory, K-major, 128-byte swizzle: F16 or BF16 in two halves of 64 elements of d,
 *                one after the other, or E4M3. FP32 accumulation
 *   P            against the page's own maximum, as the contract wants: e4m3(448 * 2^(s - max)) with E4M3 queries, else
 *                2^(s - max) in the queries' type. The row sum adds the unrounded values
 *   O += P V     a fresh accumulator a page, merged in FP32, so that FP8 products never sum more than 128 keys. 16 bit:
 *                half of d at a time, as P takes twice the registers
 *
 * Results are kept relative to 2^(reference * scale). The reference is a dot product, the row's largest when it was
 * set; it moves only when a dot product exceeds it by a margin, which is almost never. Terms are 2^(s * scale + bias),
 * one fma and one exponential each; where the bias is so large that its rounding would show, the differences of dot
 * products are formed first.
 *
 * For E4M3 queries the elements of d of Q and K stand in another order: where a lane t of the operand Q has words of E
 * elements (2 of F16, 4 of E4M3), at 4E * n + E * t, these are, n ascending, the elements 16t.. and 64 + 16t.. of the
 * query, two runs of 16 bytes: page-major work loads them as its operand.
 *
 * E4M3 V lies transposed: 128 rows of d, 128 bytes of keys each, swizzled. Within 32 keys, byte 16h + 4t + e is key
 * 16h + 8*(e/2) + 2t + e%2: then the four P that a lane has of 16h.. are its four bytes of the product's operand and no
 * value moves between lanes. Row n is element d = value_element(n), so that a lane's results are runs of 8 elements.
 * 16-bit V lies as it does in memory, so that copies can bring it from there: two halves of 64 elements of d, keys as
 * rows of 128 bytes, swizzled. A lane's results are pairs of elements there, 8 apart, which store_turned brings to
 * their places.
 */
#ifndef MSA_CUDA_ATTENTION_SM90_CUH
#define MSA_CUDA_ATTENTION_SM90_CUH

#include "maxima_sm90.cuh"
#include "number.cuh"

#include <float.h>

enum { GROUP_ROWS = 64, WARP_ROWS = 16 };
enum { TILE_HALF = MSA_PAGE_SIZE * 128 }; /* bytes: 128 rows of 128 */

/* What the pair of formats and the precision make of the products. */
template <wgmma_type KEYS, wgmma_type VALUES> struct attention_types {
    static constexpr wgmma_type QK = KEYS, PV = VALUES;
    static constexpr bool E4M3 = VALUES == WGMMA_E4M3;
    static constexpr int Q_BYTES = GROUP_ROWS * MSA_HEAD_DIM * (KEYS == WGMMA_E4M3 ? 1 : 2); /* of a warpgroup */
    static constexpr int P_WORDS = E4M3 ? 16 : 32;                                           /* of a lane */
    static constexpr int K_BYTES = TILE_HALF * (KEYS == WGMMA_E4M3 ? 1 : 2), V_BYTES = TILE_HALF * (E4M3 ? 1 : 2),
                         IMAGE_BYTES = K_BYTES + V_BYTES;
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
    float reference[2], sum[2]; /* a dot product; sum over the lane's keys */
};

static __device__ __forceinline__ void clear(row_state &o)
{
#pragma unroll
    for (int i = 0; i < 64; i++)
        o.out[i] = 0;
    o.reference[0] = o.reference[1] = -INFINITY;
    o.sum[0] = o.sum[1] = 0;
}

/* Which of a warp's rows see the page, and how many of its keys. */
struct page_view {
    bool any, all;    /* some row, every row; of rows that hold a query */
    bool selected[2]; /* a lane's rows */
    bool partial;     /* some row of the block may see less than all keys; if not, `keys` is not read */
    int keys[2];
};

/* ------------------------------------------------------------------------------------------------ products */

/* Starts S = Q K^T. q, k: low halves of matrix descriptors. */
template <typename T> static __device__ __forceinline__ void multiply_keys(float (&s)[64], uint32_t q, uint32_t k)
{
    constexpr int HALVES = T::QK == WGMMA_E4M3 ? 1 : 2;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * HALVES; i++)
        wgmma_64x128<T::QK>(s, matrix_of_low(q + i / 4 * (T::Q_BYTES / HALVES / 16) + i % 4 * 2),
                            matrix_of_low(k + i / 4 * (TILE_HALF / 16) + i % 4 * 2), i);
    wgmma_commit();
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
static __device__ __forceinline__ void pack_probabilities(const float (&s)[64], uint32_t (&p)[T::P_WORDS])
{
    constexpr operand TYPE = T::PV == WGMMA_F16 ? OPERAND_F16 : OPERAND_BF16;
#pragma unroll
    for (int i = 0; i < T::P_WORDS; i++) {
        if constexpr (T::E4M3) {
            const float *from = s + i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
            p[i] = pack_e4m3(from[0], from[1], from[4], from[5]);
        } else {
            p[i] = pack_pair<TYPE>(s[2 * i], s[2 * i + 1]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ softmax */

constexpr float LOG2_448 = 8.80735492f, LARGE_BIAS = 4096;
constexpr float MARGIN = 16; /* how far, in log2 units, a row's largest dot product may exceed its reference */

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
    int column = 2 * (threadIdx.x % 4), own[2] = {keys[0] - column, keys[1] - column};
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (i / 4 * 8 + i % 2 >= own[i / 2 % 2])
            s[i] = -INFINITY;
}

/* Raises the reference of rows that see the page, if it must be, and brings their results to it. */
static __device__ __forceinline__ void raise_reference(const float (&max)[2], float scale, const page_view &view,
                                                       row_state &o)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!((max[r] - o.reference[r]) * scale > MARGIN) || !view.selected[r])
            continue;
        float next = fminf(max[r], FLT_MAX), factor = exp2_approx((o.reference[r] - next) * scale);
        o.reference[r] = next;
        o.sum[r] *= factor;
#pragma unroll
        for (int i = 0; i < 32; i++)
            o.out[i / 2 * 4 + 2 * r + i % 2] *= factor;
    }
}

/* A row's dot products relative to their maximum. */
static __device__ __forceinline__ void subtract_maximum(float (&s)[64], int r, float max)
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        s[i / 2 * 4 + 2 * r + i % 2] -= max;
}

/* Makes ready for terms: hides keys, finds the rows' maxima and their biases. weight: of the page's products. */
template <typename T>
static __device__ __forceinline__ void find_biases(float (&s)[64], float scale, const page_view &view, row_state &o,
                                                   float (&bias)[2], float (&weight)[2])
{
    if constexpr (!T::E4M3)
        find_infinities(s);
    if (view.partial)
        hide_keys(s, view.keys);
    float max[2];
    lane_maxima(s, max);
    bool plain = true; /* no reference rises and no bias is large */
    float above[2];    /* of the page's maximum over the reference, log2 units */
    constexpr float LOG2_ONE = T::E4M3 ? LOG2_448 : 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 1));
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 2));
        above[r] = (max[r] - o.reference[r]) * scale;
        bias[r] = fmaf(-max[r], scale, LOG2_ONE);
        plain = plain && above[r] <= MARGIN && fabsf(bias[r]) <= LARGE_BIAS;
    }
    if (!__all_sync(~0u, plain)) {
        raise_reference(max, scale, view, o);
#pragma unroll
        for (int r = 0; r < 2; r++) { /* each row by itself: none depends on its neighbours */
            above[r] = (max[r] - o.reference[r]) * scale;
            if (fabsf(bias[r]) <= LARGE_BIAS)
                continue;
            bias[r] = LOG2_ONE;
            subtract_maximum(s, r, max[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        weight[r] = exp2_approx(above[r]);
}

/* The scores to the unrounded terms of P, in place, and the lane's sums of them. */
static __device__ __forceinline__ void exponentials(float (&s)[64], float scale, const float (&bias)[2],
                                                    float (&row_sum)[2])
{
    float sum[4];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale, bias[i / 2 % 2]));
        sum[i % 4] = i < 4 ? s[i] : sum[i % 4] + s[i];
    }
    row_sum[0] = sum[0] + sum[1];
    row_sum[1] = sum[2] + sum[3];
}

/* The same; the sums enter the rows'. */
static __device__ __forceinline__ void make_terms(float (&s)[64], float scale, const page_view &view,
                                                  const float (&bias)[2], const float (&weight)[2], row_state &o)
{
    float sum[2];
    exponentials(s, scale, bias, sum);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float all = fmaf(sum[r], weight[r], o.sum[r]);
        asm volatile(
            ""
            : "+f"(all)); /* or the compiler adds up behind a branch, after the exponentials, not beside them */
        o.sum[r] = view.selected[r] ? all : o.sum[r];
    }
}

/* A page by itself: its rows' maxima, then terms in place and the lane's sums of them, relative to the maximum. */
template <typename T>
static __device__ __forceinline__ void make_page_terms(float (&s)[64], float scale, float (&max)[2], float (&sum)[2])
{
    constexpr float LOG2_ONE = T::E4M3 ? LOG2_448 : 0;
    float bias[2];
    lane_maxima(s, max);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 1));
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 2));
        bias[r] = fmaf(-max[r], scale, LOG2_ONE);
    }
    if (__any_sync(~0u, !(fabsf(bias[0]) <= LARGE_BIAS && fabsf(bias[1]) <= LARGE_BIAS))) {
#pragma unroll
        for (int r = 0; r < 2; r++) { /* each row by itself: none depends on its neighbours */
            if (fabsf(bias[r]) <= LARGE_BIAS)
                continue;
            bias[r] = LOG2_ONE;
            subtract_maximum(s, r, max[r]);
        }
    }
    exponentials(s, scale, bias, sum);
}

/* ------------------------------------------------------------------------------------------------ one page */

/* The results from `first` on. Rows that do not see the page are left alone, whatever its values are. */
template <int COUNT>
static __device__ __forceinline__ void merge_products(const float (&sum)[COUNT], int first, const page_view &view,
                                                      const float (&weight)[2], row_state &o)
{
    if (view.all) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            o.out[first + i] = fmaf(sum[i], weight[i / 2 % 2], o.out[first + i]);
    } else if (view.any) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (view.selected[i / 2 % 2])
                o.out[first + i] = fmaf(sum[i], weight[i / 2 % 2], o.out[first + i]);
    }
}

/* The warpgroup's rows meet a page. All its warps call it, also those without a row that sees the page: products are
 * the whole warpgroup's. q, k, and what `values` returns: low halves of matrix descriptors. `look` returns the view,
 * and is called where it is needed so that it takes no registers in between; `queries_used` is called when Q has been,
 * `values` when K has been used and V is needed, `meanwhile` while products are under way. */
template <typename T, typename LOOK, typename USED, typename VALUES, typename MEANWHILE>
static __device__ __forceinline__ void attend_page(row_state &o, uint32_t q, uint32_t k, float scale, LOOK look,
                                                   USED queries_used, VALUES values, MEANWHILE meanwhile)
{
    float s[64], bias[2] = {}, weight[2] = {};
    uint32_t p[T::P_WORDS];
    multiply_keys<T>(s, q, k);
    page_view view = look();
    wgmma_wait(s);
    queries_used();
    if (view.any) {
        find_biases<T>(s, scale, view, o, bias, weight);
        make_terms(s, scale, view, bias, weight, o);
        if (T::E4M3)
            pack_probabilities<T>(s, p);
    } else if (T::E4M3) {
#pragma unroll
        for (int i = 0; i < T::P_WORDS; i++)
            p[i] = 0;
    }
    if (!T::E4M3) /* here, as P only finds room where the scores were if no paths with and without it meet */
        pack_probabilities<T>(s, p);
    uint32_t v = values();
    if constexpr (T::E4M3) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
            wgmma_64x128<WGMMA_E4M3>(s, p + 4 * i, matrix_of_low(v + i * 2), i);
        wgmma_commit();
        meanwhile();
        view = look();
        wgmma_wait(s); /* also keeps ptxas from reusing p under way */
        merge_products(s, 0, view, weight, o);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float part[32];
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; i++) /* 16 keys, each a row of 128 bytes */
                wgmma_64x64_turned<T::PV>(part, p + 4 * i, matrix_of_low(v + half * (TILE_HALF / 16) + i * 128), i);
            wgmma_commit();
            if (half == 0)
                meanwhile();
            view = look();
            wgmma_wait(part);
            merge_products(part, 32 * half, view, weight, o);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ results */

/* After the last page: sums over all keys. An infinite one comes from an infinite score. */
static __device__ __forceinline__ void finish_sums(row_state &o)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        o.sum[r] += __shfl_xor_sync(~0u, o.sum[r], 1);
        o.sum[r] += __shfl_xor_sync(~0u, o.sum[r], 2);
        o.sum[r] += o.sum[r] - o.sum[r];
    }
}

/* Row r's 128 elements, times factor: a lane writes the elements 32b + 8t + 0..7, b = 0..3. An infinite value that the
 * row sees gives NaN, as every other non-finite input does. 16 bit: by all lanes, and `to` is NULL where the row is
 * left over. */
template <typename T, msa_dtype TO>
static __device__ __forceinline__ void store_elements(const row_state &o, int r, float factor, void *to)
{
    constexpr operand TYPE = TO == MSA_BF16 ? OPERAND_BF16 : OPERAND_F16;
    int t = threadIdx.x % 4;
#pragma unroll
    for (int b = 0; b < 4; b++) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float sum = o.out[16 * b + i / 2 * 4 + 2 * r + i % 2];
            x[i] = (T::E4M3 ? sum : sum + (sum - sum)) * factor;
        }
        if constexpr (TO == MSA_F32 && !T::E4M3) { /* 32 bytes of the four lanes lie together */
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (to)
                    __stcs((float2 *)to + 16 * b + 4 * j + t, make_float2(x[2 * j], x[2 * j + 1]));
        } else if constexpr (TO == MSA_F32) {
            float4 *at = (float4 *)to + 8 * b + 2 * t;
            __stcs(at, make_float4(x[0], x[1], x[2], x[3]));
            __stcs(at + 1, make_float4(x[4], x[5], x[6], x[7]));
        } else {
            uint4 pairs = make_uint4(pack_pair<TYPE>(x[0], x[1]), pack_pair<TYPE>(x[2], x[3]),
                                     pack_pair<TYPE>(x[4], x[5]), pack_pair<TYPE>(x[6], x[7]));
            if (T::E4M3)
                __stcs((uint4 *)to + 4 * b + t, pairs);
            else
                store_turned(to ? (uint4 *)to + 4 * b : nullptr, pairs, thread_now(), ~0u);
        }
    }
}

template <typename T>
static __device__ __forceinline__ void store_elements(const row_state &o, int r, float factor, void *to,
                                                      msa_dtype dtype)
{
    if (dtype == MSA_BF16)
        store_elements<T, MSA_BF16>(o, r, factor, to);
    else if (dtype == MSA_FP16)
        store_elements<T, MSA_FP16>(o, r, factor, to);
    else
        store_elements<T, MSA_F32>(o, r, factor, to);
}

#endif
