/* SPDX-License-Identifier: MIT
 *
 * number.cuh - fast conversions of the number formats on a GPU. ../number.h is their definition, usable in kernels too.
 *
 * E4M3 and NVFP4 values are exact in FP16. sm_89 and later convert E4M3 in hardware. Before, an E4M3 code's bits
 * shifted to FP16's places are the value divided by 2^8 (exponent biases 7 and 15), subnormals included; an E2M1 code's
 * are the value divided by 2^14, on every architecture.
 */
#ifndef MSA_CUDA_NUMBER_CUH
#define MSA_CUDA_NUMBER_CUH

#include "../number.h"
#include "ptx.cuh"

#include <cuda_fp16.h>

/* ------------------------------------------------------------------------------------------------ pairs of FP16 */

static __device__ inline uint32_t bits_of(__half2 x)
{
    return *(const uint32_t *)&x;
}

static __device__ inline __half2 pair_of(uint32_t bits)
{
    return *(const __half2 *)&bits;
}

/* Two E4M3 codes, the first in the low byte. */
static __device__ inline uint32_t e4m3_pair_to_f16(uint32_t codes)
{
#if __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16_t)codes));
    return pair;
#else
    uint32_t spread = (codes & 0xFF) | (codes & 0xFF00) << 8;
    uint32_t bits = bits_of(
        __hmul2(pair_of((spread & 0x00800080) << 8 | (spread & 0x007F007F) << 7), pair_of(0x5C005C00))); /* 2^8 */
    uint32_t nan = __vcmpeq2(spread & 0x007F007F, 0x007F007F); /* all bits of a half */
    return bits | nan;
#endif
}

/* To E4M3 codes: rn, satfinite. */
static __device__ inline uint32_t f16_pair_to_e4m3(uint32_t pair)
{
#if __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(pair));
    return codes;
#else
    float2 x = __half22float2(pair_of(pair));
    return f32_to_e4m3(x.x) | (uint32_t)f32_to_e4m3(x.y) << 8;
#endif
}

/* And back. */
static __device__ inline uint32_t round_f16_pair_to_e4m3(uint32_t pair)
{
    return e4m3_pair_to_f16(f16_pair_to_e4m3(pair));
}

/* Two floats to E4M3 codes: rn, satfinite. */
static __device__ inline uint32_t f32_pair_to_e4m3(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return f32_to_e4m3(low) | (uint32_t)f32_to_e4m3(high) << 8;
#endif
}

template <operand TYPE> static __device__ inline uint32_t f16_pair_to(uint32_t pair)
{
    if (TYPE == OPERAND_F16)
        return pair;
    float2 x = __half22float2(pair_of(pair));
    return pack_pair<OPERAND_BF16>(x.x, x.y);
}

/* ------------------------------------------------------------------------------------------------ eight elements */

template <operand TYPE> static __device__ inline uint4 widen_e4m3_8(uint32_t low, uint32_t high)
{
    return make_uint4(f16_pair_to<TYPE>(e4m3_pair_to_f16(low & 0xFFFF)), f16_pair_to<TYPE>(e4m3_pair_to_f16(low >> 16)),
                      f16_pair_to<TYPE>(e4m3_pair_to_f16(high & 0xFFFF)),
                      f16_pair_to<TYPE>(e4m3_pair_to_f16(high >> 16)));
}

/* The byte of two E2M1 codes, low nibble first, times a scale (in both halves). */
template <operand TYPE, bool ROUNDED> static __device__ inline uint32_t widen_nvfp4_2(uint32_t byte, __half2 scale)
{
    uint32_t spread = (byte & 0xF) | (byte & 0xF0) << 12;
    __half2 value =
        __hmul2(pair_of((spread & 0x00080008) << 12 | (spread & 0x00070007) << 9), pair_of(0x74007400)); /* 2^14 */
    uint32_t product = bits_of(__hmul2(value, scale));
    return f16_pair_to<TYPE>(ROUNDED ? round_f16_pair_to_e4m3(product) : product);
}

/* Eight codes of one block. */
template <operand TYPE, bool ROUNDED> static __device__ inline uint4 widen_nvfp4_8(uint32_t codes, uint8_t scale_code)
{
    __half2 scale = pair_of(e4m3_pair_to_f16(scale_code * 0x101u));
    return make_uint4(
        widen_nvfp4_2<TYPE, ROUNDED>(codes & 0xFF, scale), widen_nvfp4_2<TYPE, ROUNDED>(codes >> 8 & 0xFF, scale),
        widen_nvfp4_2<TYPE, ROUNDED>(codes >> 16 & 0xFF, scale), widen_nvfp4_2<TYPE, ROUNDED>(codes >> 24, scale));
}

/* ------------------------------------------------------------------------------------------------ codes by table */

/* Eight E2M1 codes times a block scale, as E4M3. The eight magnitudes that a scale allows are a table in two registers.
 */
struct block_table {
    uint32_t low, high;
};

static __device__ __forceinline__ block_table make_table(uint32_t scale_code)
{
    uint32_t scale = e4m3_pair_to_f16(scale_code * 0x101u);
    auto pair = [&](uint32_t magnitudes) -> uint32_t {
        return f16_pair_to_e4m3(bits_of(__hmul2(pair_of(magnitudes), pair_of(scale))));
    };
    return block_table{pair(0x38000000) | pair(0x3E003C00) << 16,
                       pair(0x42004000) | pair(0x46004400) << 16}; /* 0 .5 1 1.5 2 3 4 6 */
}

static __device__ __forceinline__ uint2 widen_codes(uint32_t codes, const block_table &table)
{
    uint32_t magnitude = codes & 0x77777777,
             negative = codes >> 3 & 0x11111111; /* selectors of __byte_perm, a nibble a byte */
    return make_uint2(__byte_perm(table.low, table.high, magnitude) ^ __byte_perm(0x8000, 0, negative),
                      __byte_perm(table.low, table.high, magnitude >> 16) ^ __byte_perm(0x8000, 0, negative >> 16));
}

#endif
