/* SPDX-License-Identifier: MIT
 *
 * exp2.h - factor * 2^(x*scale) for x <= 0, the one exponential of the softmax: within 1 ulp of the double value. Every
 * instruction set evaluates this sequence of FP32 operations, so that probabilities are bit-equal everywhere.
 *
 * scale comes as the sum of two floats, for a scale rounded to FP32 would move 2^(x*scale) by up to |x*scale|/3 ulp.
 * n = x*scale rounded to an integer (by adding and subtracting 1.5*2^23 + 126, which leaves n + 126 in the low mantissa
 * bits), f = x*scale - n in [-1/2, 1/2], both by fused multiply-add; 2*2^f by a polynomial with constant term 2
 * (exactly factor at x = 0) whose weighted minimax error is 2e-9 relative; times 2^(n-1), made by shifting n + 126 into
 * the exponent. At x*scale <= -126 that is 0, and otherwise a normal number: subnormals, which some instructions flush,
 * never appear. NaN stays NaN. The factor, 1 or 448, goes into the coefficients, which costs nothing where they are
 * kept in registers.
 */
#ifndef MSA_EXP2_H
#define MSA_EXP2_H

#include "../number.h"

#include <float.h>

#define EXP2_ROUND 12583038.0f /* 1.5*2^23 + 126 */
#define EXP2_C0 2.0f
#define EXP2_C1 0x1.62e430p-0f
#define EXP2_C2 0x1.ebfbdcp-2f
#define EXP2_C3 0x1.c6aee8p-4f
#define EXP2_C4 0x1.3b2d4cp-6f
#define EXP2_C5 0x1.5f3e54p-9f
#define EXP2_C6 0x1.41fbbcp-12f

struct exp2_scale {
    float high, low;
    float lowest; /* x below it counts as it: the result is 0 there, or x is at FP32's end */
};

/* Finite scales past FP32's largest number count as that: differences above 2^-121 vanish with either. */
static inline struct exp2_scale exp2_scale(double scale)
{
    if (scale > FLT_MAX && !isinf(scale))
        scale = FLT_MAX;
    float high = (float)scale, lowest = -126 / high;
    return (struct exp2_scale){high, (float)(scale - high), lowest < -FLT_MAX ? -FLT_MAX : lowest};
}

static inline float exp2_nonpositive(float x, struct exp2_scale scale, float factor)
{
    x = scale.lowest > x ? scale.lowest : x; /* NaN passes */
    float shifted = fmaf(x, scale.high, EXP2_ROUND);
    float f = fmaf(x, scale.low, fmaf(x, scale.high, -(shifted - EXP2_ROUND)));
    float p = EXP2_C6 * factor;
    p = fmaf(p, f, EXP2_C5 * factor);
    p = fmaf(p, f, EXP2_C4 * factor);
    p = fmaf(p, f, EXP2_C3 * factor);
    p = fmaf(p, f, EXP2_C2 * factor);
    p = fmaf(p, f, EXP2_C1 * factor);
    p = fmaf(p, f, EXP2_C0 * factor);
    return p * f32_from_bits(f32_bits(shifted) << 23);
}

#endif
