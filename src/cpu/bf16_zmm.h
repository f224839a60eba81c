/* SPDX-License-Identifier: MIT
 *
 * bf16_zmm.h - E4M3 and NVFP4 codes to BF16, on 512-bit vectors with VBMI.
 */
#ifndef MSA_BF16_ZMM_H
#define MSA_BF16_ZMM_H

#include "convert_table.h"
#include "unroll.h"

#include <immintrin.h>

/* The low and the high bytes of 64 BF16 values. The permutation ignores the codes' sign bit, the index's eighth. */
struct planes {
    __m512i low, high;
};

INLINE struct planes planes_from_e4m3(__m512i codes)
{
    const struct convert_table *t = &convert_table;
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(t->e4m3_low), codes, _mm512_load_si512(t->e4m3_low + 64));
    __m512i high =
        _mm512_permutex2var_epi8(_mm512_load_si512(t->e4m3_high), codes, _mm512_load_si512(t->e4m3_high + 64));
    return (struct planes){
        low, _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xF8)}; /* high | codes & 0x80 */
}

/* Products of 32 codes: 64-bit element j of `codes` holds those of words 4j to 4j + 3 at the bit offsets that `pick`
 * names; words of `second` look in the second row. */
INLINE __m512i products(__m512i codes, __m512i pick, __m512i second, const uint16_t *first_row,
                        const uint16_t *second_row)
{
    __m512i index = _mm512_multishift_epi64_epi8(pick, codes);
    index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(15), second, 0xEA); /* index & 15 | second */
    __m512i rows = _mm512_castsi256_si512(_mm256_load_si256((const void *)first_row));
    return _mm512_permutexvar_epi16(index, _mm512_inserti64x4(rows, _mm256_load_si256((const void *)second_row), 1));
}

/* Two blocks of one token, side by side. */
INLINE __m512i two_blocks(const uint8_t *codes, const uint16_t *first_row, const uint16_t *second_row)
{
    const __m512i pick =
        _mm512_setr_epi64(0x000C000800040000, 0x001C001800140010, 0x002C002800240020, 0x003C003800340030,
                          0x000C000800040000, 0x001C001800140010, 0x002C002800240020, 0x003C003800340030);
    const __m512i second = _mm512_maskz_set1_epi16(0xFFFF0000, 16);
    __m512i both = _mm512_broadcastq_epi64(_mm_loadl_epi64((const void *)codes));
    both = _mm512_mask_broadcastq_epi64(both, 0xF0, _mm_loadl_epi64((const void *)(codes + 8)));
    return products(both, pick, second, first_row, second_row);
}

#endif
