/* SPDX-License-Identifier: MIT
 *
 * quantise_c.c - to E4M3 and NVFP4 by the rules of msa.h, FP32 IEEE arithmetic. Portable C, the definition.
 */
#include "../number.h"
#include "kernels.h"

static float load(const void *src, enum cpu_source source, int64_t i)
{
    return source == SOURCE_F32    ? ((const float *)src)[i]
           : source == SOURCE_BF16 ? bf16_to_f32(((const uint16_t *)src)[i])
                                   : fp16_to_f32(((const uint16_t *)src)[i]);
}

static void quantise_e4m3(const void *src, enum cpu_source source, int64_t n, float descale, uint8_t *codes)
{
    for (int64_t i = 0; i < n; i++)
        codes[i] = f32_to_e4m3(load(src, source, i) / descale);
}

static void quantise_nvfp4(const void *src, enum cpu_source source, int64_t n, float global_scale, uint8_t *codes,
                           uint8_t *scales)
{
    for (int64_t block = 0; block < n / 16; block++) {
        float x[16], amax = 0;
        bool finite = true;
        for (int i = 0; i < 16; i++) {
            x[i] = load(src, source, block * 16 + i);
            finite &= (bool)isfinite(x[i]);
            amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        }
        uint8_t scale_code = finite ? f32_to_e4m3(amax / global_scale / 6) : 0x7F;
        float scale = e4m3_to_f32(scale_code);
        scales[block] = scale_code;
        for (int i = 0; i < 8; i++) {
            uint8_t pair = 0;
            if (scale > 0) /* not 0, not NaN */
                pair = (uint8_t)(f32_to_e2m1(x[2 * i] / global_scale / scale) |
                                 f32_to_e2m1(x[2 * i + 1] / global_scale / scale) << 4);
            codes[block * 8 + i] = pair;
        }
    }
}

#define QUANTISERS(source, SOURCE)                                                                              \
    void quantise_e4m3_##source##_c(const void *src, int64_t n, float factor, uint8_t *codes, uint8_t *scales)  \
    {                                                                                                           \
        (void)scales;                                                                                           \
        quantise_e4m3(src, SOURCE, n, factor, codes);                                                           \
    }                                                                                                           \
    void quantise_nvfp4_##source##_c(const void *src, int64_t n, float factor, uint8_t *codes, uint8_t *scales) \
    {                                                                                                           \
        quantise_nvfp4(src, SOURCE, n, factor, codes, scales);                                                  \
    }

QUANTISERS(f32, SOURCE_F32)
QUANTISERS(bf16, SOURCE_BF16)
QUANTISERS(fp16, SOURCE_FP16)
