/* SPDX-License-Identifier: MIT
 *
 * attention_avx512.c - attention with FP32 operands (attention_c.c defines it; bit-equal), and the normalisation.
 *
 * Layout    cpu.h, OPERAND_F32. A step is one element of the head dimension (QK) or one key (PV).
 * Floor     a visit of a unit to a whole page: 2 * 128*128 FMAs of 16 lanes, at 2 a cycle 16384 cycles.
 * Measured  2026-11-30, Xeon family 6 model 207, share of the FMA rate measured beside it, conversion of the page
 *           included, pages in L2 or L3, the core's other hyperthread idle: 32 units a page 88 %, 8 units 85 %, 5 units
 *           83 %, 3 units 80 %, 2 units 77 %, 1 unit 68 % (E4M3), 70 % (BF16) or 72 % (NVFP4); out of cache, in huge
 *           pages, 67, 67 and 69 %. With the other hyperthread busy: 8 units 62 %, 1 unit 50 %.
 * Bound by  the floor, and for each visit some 1400 cycles of softmax and 3 % (three units) to 7 % (one unit: 17 loads
 *           for 16 FMAs) more than the floor in the products; 3500 (BF16) to 4800 (E4M3) cycles of conversion, more
 *           with the fetching from L2, are shared by a page's visits.
 */
#include "operands_avx512.h"

#include "attention_zmm.h"
#include "transpose_zmm.h"

void attention_avx512(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits,
                      int num_visits)
{
    attend(tile, page, visits, num_visits);
}

static __m256i round_half(__m512 x, msa_dtype dtype)
{
    if (dtype == MSA_FP16)
        return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

/* Scales with lanes across, then turns 16 dimensions at a time so that each head's lie together. */
void finish_avx512(const float *acc, const float *factor, int num_lanes, msa_dtype out_dtype, void *const *out)
{
    __m512 scale = _mm512_loadu_ps(factor);
    for (int d = 0; d < 128; d += 16) {
        __m512i rows[16];
        for (int i = 0; i < 16; i++) {
            __m512 a = _mm512_load_ps(acc + (d + i) * UNIT_LANES), x = _mm512_mul_ps(a, scale),
                   zero = _mm512_sub_ps(a, a);
            __mmask16 number = _mm512_cmp_ps_mask(zero, zero, _CMP_ORD_Q) & _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
            rows[i] = _mm512_castps_si512(_mm512_mask_mov_ps(_mm512_set1_ps(NAN), number, x));
        }
        transpose_16x16(rows);
        for (int lane = 0; lane < num_lanes; lane++)
            if (out[lane])
                _mm256_storeu_si256((__m256i *)((uint16_t *)out[lane] + d),
                                    round_half(_mm512_castsi512_ps(rows[lane]), out_dtype));
    }
}
