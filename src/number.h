/* SPDX-License-Identifier: MIT
 *
 * number.h - the number formats: BF16, FP16, E4M3, E2M1, and the NVFP4 product. Portable C, exact; every optimised
 * conversion must give these bits.
 *
 *   E4M3  sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7F and 0xFF are NaN, no infinity, largest 448,
 *         smallest normal 2^-6, smallest subnormal 2^-9 (OCP 8-bit floating point specification)
 *   E2M1  sign, 2 exponent bits (bias 1), 1 mantissa bit: 0 .5 1 1.5 2 3 4 6 (OCP microscaling formats)
 * "rn" rounds to nearest, ties to even; "satfinite" turns what lies beyond the largest value into the largest value.
 */
#ifndef MSA_NUMBER_H
#define MSA_NUMBER_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__ /* GPU kernels use these very functions, so that their bits agree */
#define NUMBER_FN static inline __host__ __device__
#else
#define NUMBER_FN static inline
#endif

NUMBER_FN uint32_t f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

NUMBER_FN float f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

NUMBER_FN float bf16_to_f32(uint16_t h)
{
    return f32_from_bits((uint32_t)h << 16);
}

NUMBER_FN uint16_t f32_to_bf16(float x)
{
    uint32_t u = f32_bits(x);
    if (isnan(x))
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

NUMBER_FN float fp16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    if (magnitude >= 0x7C00)
        return f32_from_bits(sign | 0x7F800000 | magnitude << 13);
    if (magnitude < 0x0400) /* subnormal: none of FP32 on the way, so that the caller's flush modes do not matter */
        return f32_from_bits(sign | f32_bits((float)magnitude * 0x1p-24f));
    return f32_from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

NUMBER_FN uint16_t f32_to_fp16(float x)
{
    uint32_t u = f32_bits(x), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFF;
    if (a > 0x7F800000)
        return (uint16_t)(sign | 0x7E00);
    if (a >= 0x477FF000) /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7C00);
    if (a < 0x38800000) { /* below 2^-14: adding 0.5 leaves the subnormal's integer in the low bits */
        return (uint16_t)(sign | (f32_bits(f32_from_bits(a) + 0.5f) - f32_bits(0.5f)));
    }
    return (uint16_t)(sign | (((a + 0xFFF + (a >> 13 & 1)) >> 13) - (112 << 10)));
}

NUMBER_FN float e4m3_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80) << 24, magnitude = code & 0x7F;
    if (magnitude == 0x7F)
        return f32_from_bits(sign | 0x7FC00000);
    if (magnitude < 8)
        return f32_from_bits(sign | f32_bits((float)magnitude * 0x1p-9f));
    return f32_from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

NUMBER_FN uint8_t f32_to_e4m3(float x) /* rn, satfinite; NaN gives 0x7F */
{
    uint32_t u = f32_bits(x), sign = u >> 24 & 0x80, a = u & 0x7FFFFFFF;
    if (a > 0x7F800000)
        return 0x7F;
    if (a >= 0x43E00000) /* 448 */
        return (uint8_t)(sign | 0x7E);
    if (a < 0x3C800000) /* below 2^-6: one step is 2^-9, as in FP32 just above 2^14 */
        return (uint8_t)(sign | (f32_bits(f32_from_bits(a) + 0x1p14f) - f32_bits(0x1p14f)));
    return (uint8_t)(sign | (((a + 0x7FFFF + (a >> 20 & 1)) >> 20) - (120 << 3)));
}

NUMBER_FN float e2m1_to_f32(uint8_t code)
{
    static const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8 ? -magnitude[code & 7] : magnitude[code & 7];
}

NUMBER_FN uint8_t f32_to_e2m1(float x) /* rn, satfinite; NaN gives 6 */
{
    float a = fabsf(x);
    uint8_t sign = signbit(x) && !isnan(x) ? 8 : 0;
    /* The bounds are the midpoints; a midpoint goes to the even code. */
    uint8_t code = a <= 0.25f   ? 0
                   : a < 0.75f  ? 1
                   : a <= 1.25f ? 2
                   : a < 1.75f  ? 3
                   : a <= 2.5f  ? 4
                   : a < 3.5f   ? 5
                   : a <= 5.0f  ? 6
                                : 7;
    return sign | code;
}

/* The exact product of an NVFP4 code and its block scale: at most six significant bits, which BF16, FP16, FP32 hold. */
NUMBER_FN float nvfp4_to_f32(uint8_t code, uint8_t scale)
{
    return e2m1_to_f32(code) * e4m3_to_f32(scale);
}

#endif
