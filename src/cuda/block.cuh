/* SPDX-License-Identifier: MIT
 *
 * block.cuh - 16 consecutive elements of a row, a thread's share in quantise, convert and cache write. The arithmetic
 * is that of ../number.h, so the bits are the CPU's.
 */
#ifndef MSA_CUDA_BLOCK_CUH
#define MSA_CUDA_BLOCK_CUH

#include "number.cuh"

enum { BLOCK = 16 }; /* elements that share an NVFP4 scale */

/* Copies BYTES, by 16 where both ends allow it. */
template <int BYTES> static __device__ inline void copy_bytes(void *to, const void *from, bool aligned)
{
    if (aligned && BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++)
            ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    } else if (aligned && BYTES == 8) {
        *(uint2 *)to = *(const uint2 *)from;
    } else {
        for (int i = 0; i < BYTES; i++)
            ((uint8_t *)to)[i] = ((const uint8_t *)from)[i];
    }
}

/* F32, BF16 or FP16 elements as floats. aligned: to 16 bytes. */
static __device__ inline void load_block(const void *from, msa_dtype dtype, bool aligned, float (&x)[BLOCK])
{
    if (dtype == MSA_F32) {
        alignas(16) float raw[BLOCK];
        copy_bytes<4 * BLOCK>(raw, from, aligned);
#pragma unroll
        for (int i = 0; i < BLOCK; i++)
            x[i] = raw[i];
        return;
    }
    alignas(16) uint16_t raw[BLOCK];
    copy_bytes<2 * BLOCK>(raw, from, aligned);
#pragma unroll
    for (int i = 0; i < BLOCK; i++)
        x[i] = dtype == MSA_BF16 ? bf16_to_f32(raw[i]) : fp16_to_f32(raw[i]);
}

static __device__ inline void store_half_block(const float (&x)[BLOCK], msa_dtype dtype, void *to, bool aligned)
{
    alignas(16) uint16_t raw[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++)
        raw[i] = dtype == MSA_BF16 ? f32_to_bf16(x[i]) : f32_to_fp16(x[i]);
    copy_bytes<2 * BLOCK>(to, raw, aligned);
}

static __device__ inline void store_e4m3_block(const float (&x)[BLOCK], float descale, void *to, bool aligned)
{
    alignas(16) uint8_t raw[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i += 2) {
        uint32_t codes = f32_pair_to_e4m3(x[i] / descale, x[i + 1] / descale);
        raw[i] = (uint8_t)codes;
        raw[i + 1] = (uint8_t)(codes >> 8);
    }
    copy_bytes<BLOCK>(to, raw, aligned);
}

/* Writes the codes; returns the scale. */
static __device__ inline uint8_t store_nvfp4_block(const float (&x)[BLOCK], float global_scale, void *to, bool aligned)
{
    float amax = 0;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        finite &= (bool)isfinite(x[i]);
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }
    uint8_t scale_code = finite ? f32_to_e4m3(amax / global_scale / 6) : 0x7F;
    float scale = e4m3_to_f32(scale_code);
    alignas(8) uint8_t raw[BLOCK / 2];
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i++)
        raw[i] = scale > 0 ? f32_to_e2m1(x[2 * i] / global_scale / scale) |
                                 f32_to_e2m1(x[2 * i + 1] / global_scale / scale) << 4
                           : 0;
    copy_bytes<BLOCK / 2>(to, raw, aligned);
    return scale_code;
}

/* Whether row starts and blocks of `bytes` lie on multiples of 16 (8 where blocks are that small). */
static inline bool rows_aligned(const void *base, int64_t row_stride, int bytes)
{
    uintptr_t unit = bytes < 16 ? 8 : 16;
    return ((uintptr_t)base | (uintptr_t)row_stride) % unit == 0;
}

#endif
