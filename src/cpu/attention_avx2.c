/* SPDX-License-Identifier: MIT
 *
 * attention_avx2.c - attention with FP32 operands on AVX2 and FMA (attention_lanes.h), and the normalisation.
 * attention_c.c defines both; bit-equal.
 *
 * Layout   cpu.h, OPERAND_F32; a unit's 16 lanes are two vectors.
 * Floor    a visit of a unit to a whole page: 2 * 128*128 FMAs of 16 lanes, at two vectors a cycle 32768 cycles.
 *          Measured (2026-11-30, Xeon family 6 model 207, one thread, gcc 12, E4M3 pages): 85 % of the FMA rate beside
 *          it with 8 units a page, 66 % with one.
 */
#include "lanes_avx2.h"

#include "attention_lanes.h"
#include "transpose_ymm.h"

void attention_avx2(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits, int num_visits)
{
    attend(tile, page, visits, num_visits);
}

static __m128i round_half(__m256 x, msa_dtype dtype)
{
    if (dtype == MSA_FP16)
        return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(v_round_bf16(x)), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/* Scales with lanes across, then turns eight dimensions at a time so that each head's lie together. */
void finish_avx2(const float *acc, const float *factor, int num_lanes, msa_dtype out_dtype, void *const *out)
{
    for (int first = 0; first < num_lanes; first += 8) {
        __m256 scale = _mm256_loadu_ps(factor + first);
        for (int d = 0; d < 128; d += 8) {
            __m256 rows[8];
            for (int i = 0; i < 8; i++) {
                __m256 a = _mm256_loadu_ps(acc + (d + i) * UNIT_LANES + first), x = _mm256_mul_ps(a, scale);
                __m256 zero = _mm256_sub_ps(a, a), number = _mm256_cmp_ps(zero, x, _CMP_ORD_Q);
                rows[i] = _mm256_blendv_ps(_mm256_set1_ps(NAN), x, number);
            }
            transpose_8x8(rows);
            for (int i = 0; i < 8 && first + i < num_lanes; i++)
                if (out[first + i])
                    _mm_storeu_si128((__m128i *)(void *)((uint16_t *)out[first + i] + d),
                                     round_half(rows[i], out_dtype));
        }
    }
}
