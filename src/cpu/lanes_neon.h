/* SPDX-License-Identifier: MIT
 *
 * lanes_neon.h - the vector of lanes.h on NEON: 4 lanes.
 */
#include <arm_neon.h>

typedef float32x4_t vector;
enum { PARTS = 4 };

static inline vector v_load(const float *from)
{
    return vld1q_f32(from);
}

static inline void v_store(float *to, vector a)
{
    vst1q_f32(to, a);
}

static inline vector v_set(float a)
{
    return vdupq_n_f32(a);
}

static inline vector v_add(vector a, vector b)
{
    return vaddq_f32(a, b);
}

static inline vector v_sub(vector a, vector b)
{
    return vsubq_f32(a, b);
}

static inline vector v_mul(vector a, vector b)
{
    return vmulq_f32(a, b);
}

static inline vector v_fma(vector a, vector b, vector c)
{
    return vfmaq_f32(c, a, b);
}

static inline vector v_select(vector mask, vector a, vector b)
{
    return vbslq_f32(vreinterpretq_u32_f32(mask), a, b);
}

/* vmaxq_f32 would make NaN of a NaN. */
static inline vector v_max(vector a, vector b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

static inline vector v_min(vector a, vector b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}

static inline vector v_power(vector a)
{
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x7F800000)));
}

static inline vector v_exponent(vector a)
{
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), 23));
}

static inline vector v_add_bits(vector a, int bits)
{
    return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32((uint32_t)bits)));
}

/* A NaN stays one: it comes from 16-bit formats or from the machine, so its lower half is 0. */
static inline vector v_round_bf16(vector a)
{
    uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    bits = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    return vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xFFFF0000)));
}

static inline vector v_round_fp16(vector a)
{
    return vcvt_f32_f16(vcvt_f16_f32(a));
}

static inline vector v_if_equal(vector x, vector y, vector a, vector b)
{
    return vbslq_f32(vceqq_f32(x, y), a, b);
}

static inline vector v_lanes(unsigned mask)
{
    static const uint32_t bits[4] = {1, 2, 4, 8};
    return vreinterpretq_f32_u32(vtstq_u32(vdupq_n_u32(mask), vld1q_u32(bits)));
}
