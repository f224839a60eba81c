/* SPDX-License-Identifier: MIT
 *
 * oracle_numbers.c - the number formats of oracle.h. They are decoded and rounded with ldexp and nearest-value
 * searches, never with the bit tricks of the kernels, so that one mistake cannot hide in both.
 */
#include "oracle.h"

#include <math.h>
#include <string.h>
#include <threads.h>

static const double e2m1_values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
static double e4m3_table[256], bf16_table[65536], fp16_table[65536];
static double product_table[256][16], rounded_product_table[256][16]; /* [scale][code] */

/* Value of a code with `mant` fraction bits and `expo` exponent bits whose top exponent means Inf and NaN. */
static double decode_ieee(uint32_t code, int mant, int expo)
{
    int bias = (1 << (expo - 1)) - 1;
    int exponent = (int)(code >> mant) & ((1 << expo) - 1);
    double fraction = ldexp((double)(code & ((1u << mant) - 1)), -mant);
    double magnitude;
    if (exponent == (1 << expo) - 1)
        magnitude = fraction > 0 ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        magnitude = ldexp(fraction, 1 - bias);
    else
        magnitude = ldexp(1 + fraction, exponent - bias);
    return code >> (mant + expo) & 1 ? -magnitude : magnitude;
}

static uint32_t encode_ieee(double x, int mant, int expo)
{
    int bias = (1 << (expo - 1)) - 1;
    uint32_t infinity = ((1u << expo) - 1) << mant;
    uint32_t sign = signbit(x) ? 1u << (mant + expo) : 0;
    if (isnan(x))
        return infinity | 1u << (mant - 1);
    if (isinf(x))
        return sign | infinity;
    int exponent;
    frexp(x, &exponent); /* |x| in [2^(exponent-1), 2^exponent) */
    exponent -= 1;
    if (x == 0 || exponent < 1 - bias)
        exponent = 1 - bias;
    double ulps = nearbyint(ldexp(fabs(x), mant - exponent)); /* ties to even; counts the hidden one too */
    double code = ulps + ldexp(exponent + bias - 1, mant);
    return sign | (code < infinity ? (uint32_t)code : infinity);
}

/* Index of the entry of an ascending table that lies nearest to x >= 0; ties to the even index, saturating. */
static unsigned nearest(const double *table, unsigned last, double x)
{
    unsigned low = 0, high = last;
    if (x >= table[last])
        return last;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (table[middle] <= x)
            low = middle;
        else
            high = middle;
    }
    double below = x - table[low], above = table[high] - x;
    return below < above || (below == above && low % 2 == 0) ? low : high;
}

static uint8_t encode_e4m3(double x)
{
    if (isnan(x))
        return 0x7F;
    return (uint8_t)(nearest(e4m3_table, 0x7E, fabs(x)) | (signbit(x) ? 0x80 : 0));
}

static void fill_tables(void)
{
    for (unsigned code = 0; code < 65536; code++) {
        bf16_table[code] = decode_ieee(code, 7, 8);
        fp16_table[code] = decode_ieee(code, 10, 5);
    }
    for (unsigned code = 0; code < 256; code++) { /* as IEEE, but the top exponent is finite, except its last code */
        double magnitude = (code & 0x78) == 0x78 ? ldexp(8 + (code & 7), 5) : decode_ieee(code & 0x7F, 3, 4);
        if ((code & 0x7F) == 0x7F)
            magnitude = (double)NAN;
        e4m3_table[code] = code & 0x80 ? -magnitude : magnitude;
    }
    for (unsigned scale = 0; scale < 256; scale++)
        for (unsigned code = 0; code < 16; code++) {
            double product = (code & 8 ? -e2m1_values[code & 7] : e2m1_values[code & 7]) * e4m3_table[scale];
            product_table[scale][code] = product;
            rounded_product_table[scale][code] = e4m3_table[encode_e4m3(product)];
        }
}

static void need_tables(void)
{
    static once_flag once = ONCE_FLAG_INIT;
    call_once(&once, fill_tables);
}

double oracle_e2m1_value(unsigned code)
{
    return code & 8 ? -e2m1_values[code & 7] : e2m1_values[code & 7];
}

double oracle_value(msa_dtype dtype, const void *element)
{
    need_tables();
    uint16_t half;
    float single;
    switch (dtype) {
    case MSA_F32:
        memcpy(&single, element, 4);
        return single;
    case MSA_BF16:
        memcpy(&half, element, 2);
        return bf16_table[half];
    case MSA_FP16:
        memcpy(&half, element, 2);
        return fp16_table[half];
    default:
        return e4m3_table[*(const uint8_t *)element];
    }
}

uint32_t oracle_encode(msa_dtype dtype, double x)
{
    need_tables();
    switch (dtype) {
    case MSA_F32:
        return encode_ieee(x, 23, 8);
    case MSA_BF16:
        return encode_ieee(x, 7, 8);
    case MSA_FP16:
        return encode_ieee(x, 10, 5);
    case MSA_NVFP4:
        return nearest(e2m1_values, 7, fabs(x)) | (signbit(x) ? 8 : 0);
    default:
        return encode_e4m3(x);
    }
}

double oracle_round(msa_dtype dtype, double x)
{
    uint32_t code = oracle_encode(dtype, x);
    uint16_t half = (uint16_t)code;
    uint8_t byte = (uint8_t)code;
    if (dtype == MSA_NVFP4)
        return oracle_e2m1_value(code);
    return oracle_value(dtype, dtype == MSA_F32 ? (void *)&code : dtype == MSA_E4M3 ? (void *)&byte : (void *)&half);
}

double oracle_element(msa_dtype dtype, const void *row, const uint8_t *scale, int64_t scale_step, bool as_e4m3,
                      int64_t i)
{
    const uint8_t *bytes = row;
    if (dtype != MSA_NVFP4)
        return oracle_value(dtype, bytes + oracle_row_bytes(dtype, i));
    need_tables();
    unsigned code = i % 2 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15;
    return (as_e4m3 ? rounded_product_table : product_table)[scale[i / 16 * scale_step]][code];
}

int64_t oracle_row_bytes(msa_dtype dtype, int64_t n)
{
    switch (dtype) {
    case MSA_F32:
        return 4 * n;
    case MSA_BF16:
    case MSA_FP16:
        return 2 * n;
    case MSA_NVFP4:
        return n / 2;
    default:
        return n;
    }
}
