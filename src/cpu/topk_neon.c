/* SPDX-License-Identifier: MIT
 *
 * topk_neon.c - the best pages of a row, by topk_block.h with 4 scores a vector.
 */
#include "topk_block.h"

#include <arm_neon.h>

/* One bit for each of 16 comparisons. */
static inline uint64_t bits_of(const uint32x4_t compared[4])
{
    static const uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint16x8_t low = vcombine_u16(vmovn_u32(compared[0]), vmovn_u32(compared[1]));
    uint16x8_t high = vcombine_u16(vmovn_u32(compared[2]), vmovn_u32(compared[3]));
    uint8x16_t bits = vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), vld1q_u8(weights));
    return vaddv_u8(vget_low_u8(bits)) | (uint64_t)vaddv_u8(vget_high_u8(bits)) << 8;
}

static inline uint64_t block_above(const float *scores, float bound)
{
    uint64_t mask = 0;
    for (int i = 0; i < 64; i += 16) {
        uint32x4_t compared[4];
        for (int j = 0; j < 4; j++)
            compared[j] = vcgtq_f32(vld1q_f32(scores + i + 4 * j), vdupq_n_f32(bound));
        mask |= bits_of(compared) << i;
    }
    return mask;
}

static inline uint64_t block_not_below(const float *scores, float bound)
{
    uint64_t mask = 0;
    for (int i = 0; i < 64; i += 16) {
        uint32x4_t compared[4];
        for (int j = 0; j < 4; j++)
            compared[j] = vmvnq_u32(vcltq_f32(vld1q_f32(scores + i + 4 * j), vdupq_n_f32(bound)));
        mask |= bits_of(compared) << i;
    }
    return mask;
}

static inline void group_maxima(const float *scores, int32_t n, float maxima[GROUPS])
{
    float32x4_t max[GROUPS / 4];
    for (int i = 0; i < GROUPS / 4; i++)
        max[i] = vdupq_n_f32(-INFINITY);
    for (int32_t first = 0; first < n; first += 16)
        for (int i = 0; i < GROUPS / 4; i++) {
            const float *from = scores + i / 4 * n + first + i % 4 * 4;
            __builtin_prefetch(from + PREFETCH);
            float32x4_t x = vld1q_f32(from);
            max[i] = vbslq_f32(vcgtq_f32(x, max[i]), x, max[i]);
        }
    for (int i = 0; i < GROUPS / 4; i++)
        vst1q_f32(maxima + 4 * i, max[i]);
}

static inline void sort_keys(const uint64_t *key, int32_t count, uint64_t *sorted)
{
    for (int32_t first = 0; first < count; first += 2) {
        uint64x2_t own = vld1q_u64(key + first), rank = vdupq_n_u64(0);
        for (int32_t i = 0; i < count; i++)
            rank = vsubq_u64(rank, vcgtq_u64(vdupq_n_u64(key[i]), own));
        sorted[vgetq_lane_u64(rank, 0)] = key[first];
        sorted[vgetq_lane_u64(rank, 1)] = key[first + 1];
    }
}

void topk_neon(struct cpu_best *best, const float *scores, int32_t first_page, int32_t num_pages)
{
    select_best(best, scores, first_page, num_pages);
}
