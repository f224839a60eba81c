/* SPDX-License-Identifier: MIT
 *
 * exp2.h - 2^t for t <= 0, the one exponential of the softmax. Every instruction set evaluates this sequence of FP32
 * operations, so that probabilities are bit-equal everywhere.
 *
 * n = t rounded to an integer (by adding and subtracting 1.5*2^23 + 127, which leaves n + 127 in the low mantissa bits),
 * f = t - n in [-1/2, 1/2]; 2^f by a polynomial with constant term 1 (exactly 1 at t = 0) whose weighted minimax error is
 * 9.2e-8 relative; times 2^n, made by shifting n + 127 into the exponent. At t <= -127 that factor is 0. NaN stays NaN.
 */
#ifndef MSA_EXP2_H
#define MSA_EXP2_H

#include "../number.h"

#define EXP2_MIN (-127.0f)
#define EXP2_ROUND 12583039.0f /* 1.5*2^23 + 127 */
#define EXP2_C1 0x1.62e42ap-1f
#define EXP2_C2 0x1.ebf9bcp-3f
#define EXP2_C3 0x1.c6b752p-5f
#define EXP2_C4 0x1.3cea88p-7f
#define EXP2_C5 0x1.5bba14p-10f

static inline float exp2_nonpositive(float t)
{
    t = EXP2_MIN > t ? EXP2_MIN : t; /* NaN passes */
    float shifted = t + EXP2_ROUND;
    float f = t - (shifted - EXP2_ROUND);
    float p = EXP2_C5;
    p = fmaf(p, f, EXP2_C4);
    p = fmaf(p, f, EXP2_C3);
    p = fmaf(p, f, EXP2_C2);
    p = fmaf(p, f, EXP2_C1);
    p = fmaf(p, f, 1.0f);
    return p * f32_from_bits(f32_bits(shifted) << 23);
}

#endif
