/* SPDX-License-Identifier: MIT
 *
 * The number formats, exhaustively: src/number.h, msa_convert and msa_quantise against definitions written here in
 * double precision straight from the formats' bit fields.
 */
#include "number.h"

#include "msa.h"

#include <float.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

/* ------------------------------------------------------------------------------------------------ definitions */

/* A sign bit, `exponent_bits` and `mantissa_bits`. Finite magnitudes are the codes 0..top; rounding past them gives
 * `top` if the format saturates, else top + 1, which is infinity and stands where the next value would be. */
struct format {
    const char *name;
    int exponent_bits, mantissa_bits;
    uint32_t top;
    int saturates;
};
static const struct format e2m1 = {"E2M1", 2, 1, 0x7, 1};
static const struct format e4m3 = {"E4M3", 4, 3, 0x7E, 1};
static const struct format fp16 = {"FP16", 5, 10, 0x7BFF, 0};
static const struct format bf16 = {"BF16", 8, 7, 0x7F7F, 0};

static uint32_t sign_mask(const struct format *f)
{
    return 1u << (f->exponent_bits + f->mantissa_bits);
}

/* Value of a magnitude code as if the format went on past its top. */
static double magnitude(const struct format *f, uint32_t code)
{
    const int bias = (1 << (f->exponent_bits - 1)) - 1, exponent = (int)(code >> f->mantissa_bits);
    const double fraction = ldexp(code & ((1u << f->mantissa_bits) - 1), -f->mantissa_bits);

    return exponent ? ldexp(1 + fraction, exponent - bias) : ldexp(fraction, 1 - bias);
}

/* Any code; E4M3's only NaN is the all-ones magnitude, IEEE formats have infinity and NaNs above it. */
static double value(const struct format *f, uint32_t code)
{
    const uint32_t m = code & (sign_mask(f) - 1);
    double x = m <= f->top ? magnitude(f, m) : m == f->top + 1 && !f->saturates ? INFINITY : NAN;

    return code & sign_mask(f) ? -x : x;
}

/* Code nearest to x, which is not a NaN; ties to the even code. */
static uint32_t nearest(const struct format *f, double x)
{
    const double a = fabs(x);
    uint32_t low = 0, high = f->top + 1;

    while (high - low > 1) { /* magnitude(low) <= a */
        const uint32_t middle = (low + high) / 2;

        if (magnitude(f, middle) <= a)
            low = middle;
        else
            high = middle;
    }
    const double midpoint = (magnitude(f, low) + magnitude(f, low + 1)) / 2;
    if (a > midpoint || (a == midpoint && low % 2 == 1))
        low++;
    if (f->saturates && low > f->top)
        low = f->top;
    return low | (signbit(x) ? sign_mask(f) : 0);
}

static void assert_same(const char *what, uint32_t code, float got, double expected)
{
    if (isnan(expected) ? !isnan(got) : !((double)got == expected && !signbit(got) == !signbit(expected)))
        fail_msg("%s code 0x%X is %.9g, must be %.9g", what, code, (double)got, expected);
}

/* ------------------------------------------------------------------------------------------------ decoding */

static void decode_every_code(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 16; code++)
        assert_same("E2M1", code, e2m1_to_f32((uint8_t)code), value(&e2m1, code));
    for (uint32_t code = 0; code < 256; code++)
        assert_same("E4M3", code, e4m3_to_f32((uint8_t)code), value(&e4m3, code));
    for (uint32_t code = 0; code < 65536; code++) {
        assert_same("BF16", code, bf16_to_f32((uint16_t)code), value(&bf16, code));
        assert_same("FP16", code, fp16_to_f32((uint16_t)code), value(&fp16, code));
    }
}

/* The definitions above, against values that the formats' specifications print. */
static void definitions_match_specifications(void **state)
{
    const double e2m1_values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

    (void)state;
    for (uint32_t code = 0; code < 8; code++)
        assert_true(value(&e2m1, code) == e2m1_values[code] && value(&e2m1, code | 8) == -e2m1_values[code]);
    assert_true(value(&e4m3, 0x7E) == 448 && value(&e4m3, 0x08) == 0x1p-6 && value(&e4m3, 0x01) == 0x1p-9);
    assert_true(isnan(value(&e4m3, 0x7F)) && isnan(value(&e4m3, 0xFF)) && value(&e4m3, 0x78) == 256);
    assert_true(value(&fp16, 0x7BFF) == 65504 && value(&fp16, 0x0001) == 0x1p-24 && isinf(value(&fp16, 0xFC00)));
    assert_true(value(&bf16, 0x7F7F) == 0x1.FEp127 && value(&bf16, 0x3F80) == 1 && isnan(value(&bf16, 0x7FC0)));
}

static void nvfp4_products(void **state)
{
    (void)state;
    for (uint32_t scale = 0; scale < 256; scale++) {
        for (uint32_t code = 0; code < 16; code++) {
            const double expected = value(&e2m1, code) * value(&e4m3, scale);
            const float got = nvfp4_to_f32((uint8_t)code, (uint8_t)scale);

            assert_same("NVFP4", scale << 8 | code, got, expected);
            if (isnan(expected)) {
                assert_int_equal(f32_to_e4m3(got), 0x7F);
                continue;
            }
            assert_same("NVFP4 in BF16", code, bf16_to_f32(f32_to_bf16(got)), expected);
            assert_same("NVFP4 in FP16", code, fp16_to_f32(f32_to_fp16(got)), expected);
            assert_int_equal(f32_to_e4m3(got), nearest(&e4m3, expected));
        }
    }
}

/* ------------------------------------------------------------------------------------------------ encoding */

typedef uint32_t encode_fn(float x);
static uint32_t encode_e2m1(float x)
{
    return f32_to_e2m1(x);
}
static uint32_t encode_e4m3(float x)
{
    return f32_to_e4m3(x);
}
static uint32_t encode_fp16(float x)
{
    return f32_to_fp16(x);
}
static uint32_t encode_bf16(float x)
{
    return f32_to_bf16(x);
}

static void check_encode(const struct format *f, encode_fn *encode, float x)
{
    if (encode(x) != nearest(f, (double)x))
        fail_msg("%s of %.9g (%a) is 0x%X, must be 0x%X", f->name, (double)x, (double)x, encode(x),
                 nearest(f, (double)x));
}

static void check_around(const struct format *f, encode_fn *encode, double x)
{
    const float centre = (float)x, around[3] = {nextafterf(centre, 0), centre, nextafterf(centre, INFINITY)};

    for (int i = 0; i < 3; i++) {
        check_encode(f, encode, around[i]);
        check_encode(f, encode, -around[i]);
    }
}

static void check_format(const struct format *f, encode_fn *encode)
{
    static const uint16_t tails[] = {0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF};

    /* Every value, and every midpoint with the FP32 numbers beside it. The midpoint past the top is where infinity or
     * saturation starts; those of BF16's subnormals are FP32 subnormals, exact too. */
    for (uint32_t code = 0; code <= f->top; code++) {
        check_around(f, encode, magnitude(f, code));
        check_around(f, encode, (magnitude(f, code) + magnitude(f, code + 1)) / 2);
    }
    /* All FP32 signs, exponents and leading mantissa bits with tails that decide roundings. */
    for (uint32_t head = 0; head < 65536; head++) {
        for (size_t i = 0; i < sizeof(tails) / sizeof(tails[0]); i++) {
            const float x = f32_from_bits(head << 16 | tails[i]);

            if (!isnan(x))
                check_encode(f, encode, x);
        }
    }
    check_around(f, encode, FLT_MAX);
    check_encode(f, encode, INFINITY);
    check_encode(f, encode, -INFINITY);
}

static void encode_e4m3_rounds_and_saturates(void **state)
{
    (void)state;
    check_format(&e4m3, encode_e4m3);
    assert_int_equal(f32_to_e4m3(464.0f), 0x7E); /* the midpoint to 480, which does not exist */
    assert_int_equal(f32_to_e4m3(480.0f), 0x7E);
    assert_int_equal(f32_to_e4m3(INFINITY), 0x7E);
    assert_int_equal(f32_to_e4m3(-INFINITY), 0xFE);
    assert_int_equal(f32_to_e4m3(-0.0f), 0x80);
    assert_int_equal(f32_to_e4m3(NAN), 0x7F);
    assert_int_equal(f32_to_e4m3(f32_from_bits(0xFF800001)), 0x7F);
}

static void encode_e2m1_rounds_and_saturates(void **state)
{
    (void)state;
    check_format(&e2m1, encode_e2m1);
    assert_int_equal(f32_to_e2m1(2.5f), 4);
    assert_int_equal(f32_to_e2m1(3.5f), 6);
    assert_int_equal(f32_to_e2m1(-1e30f), 15);
    assert_int_equal(f32_to_e2m1(-0.0f), 8);
    assert_int_equal(f32_to_e2m1(NAN), 7);
}

static void encode_16_bits(void **state)
{
    (void)state;
    check_format(&fp16, encode_fp16);
    check_format(&bf16, encode_bf16);
    assert_int_equal(f32_to_fp16(65519.996f), 0x7BFF);
    assert_int_equal(f32_to_fp16(65520.0f), 0x7C00);
    for (uint32_t head = 0; head < 65536; head++) {
        const float x = f32_from_bits(head << 16 | 1);

        if (!isnan(x)) /* the lowest bit alone makes a NaN of the infinities: it must not be lost */
            continue;
        assert_true(isnan(fp16_to_f32(f32_to_fp16(x))));
        assert_true(isnan(bf16_to_f32(f32_to_bf16(x))));
    }
}

/* ------------------------------------------------------------------------------------------------ msa_convert */

static msa_context *context;

static int open_context(void **state)
{
    (void)state;
    return msa_context_create(NULL, &context);
}

static int close_context(void **state)
{
    (void)state;
    msa_context_destroy(context);
    return 0;
}

static const struct format *format_of(msa_dtype dtype)
{
    return dtype == MSA_E4M3 ? &e4m3 : dtype == MSA_FP16 ? &fp16 : &bf16;
}

static size_t bytes_of(msa_dtype dtype)
{
    return dtype == MSA_E4M3 ? 1 : dtype == MSA_F32 ? 4 : 2;
}

static double element(msa_dtype dtype, const void *row, size_t i)
{
    if (dtype == MSA_F32)
        return (double)((const float *)row)[i];
    return value(format_of(dtype), dtype == MSA_E4M3 ? ((const uint8_t *)row)[i] : ((const uint16_t *)row)[i]);
}

/* Rows lie further apart than they need; the bytes between them must keep their pattern. */
enum { GAP = 32, PATTERN = 0xA5 };

struct rows {
    size_t count, bytes, pitch;
    uint8_t *data;
};

static struct rows make_rows(size_t count, size_t bytes)
{
    struct rows rows = {count, bytes, (bytes + 7) / 8 * 8 + GAP, NULL};

    rows.data = test_malloc(count * rows.pitch);
    memset(rows.data, PATTERN, count * rows.pitch);
    return rows;
}

static uint8_t *row_of(const struct rows *rows, size_t row)
{
    return rows->data + row * rows->pitch;
}

static void check_gaps(const struct rows *rows)
{
    for (size_t row = 0; row < rows->count; row++) {
        for (size_t i = rows->bytes; i < rows->pitch; i++)
            assert_int_equal(row_of(rows, row)[i], PATTERN);
    }
}

static void convert_codes(msa_dtype src_dtype, msa_dtype dst_dtype)
{
    const size_t cols = 256, count = src_dtype == MSA_E4M3 ? 1 : 256;
    const struct rows src = make_rows(count, cols * bytes_of(src_dtype)),
                      dst = make_rows(count, cols * bytes_of(dst_dtype));
    msa_convert_args args = MSA_CONVERT_ARGS_INIT;

    for (size_t i = 0; i < count * cols; i++) {
        if (src_dtype == MSA_E4M3)
            row_of(&src, i / cols)[i % cols] = (uint8_t)i;
        else
            memcpy(row_of(&src, i / cols) + i % cols * 2, &(uint16_t){(uint16_t)i}, 2);
    }
    args.rows = (int64_t)count;
    args.cols = (int64_t)cols;
    args.src_dtype = src_dtype;
    args.src = src.data;
    args.src_row_stride = (int64_t)src.pitch;
    args.dst_dtype = dst_dtype;
    args.dst = dst.data;
    args.dst_row_stride = (int64_t)dst.pitch;
    assert_int_equal(msa_convert(context, &args, NULL), MSA_SUCCESS);
    for (size_t i = 0; i < count * cols; i++)
        assert_same("converted", (uint32_t)i, (float)element(dst_dtype, row_of(&dst, i / cols), i % cols),
                    value(format_of(src_dtype), (uint32_t)i));
    check_gaps(&dst);
    test_free(src.data);
    test_free(dst.data);
}

static void convert_every_code(void **state)
{
    (void)state;
    convert_codes(MSA_E4M3, MSA_E4M3);
    convert_codes(MSA_E4M3, MSA_BF16);
    convert_codes(MSA_E4M3, MSA_FP16);
    convert_codes(MSA_E4M3, MSA_F32);
    convert_codes(MSA_BF16, MSA_BF16);
    convert_codes(MSA_BF16, MSA_F32);
    convert_codes(MSA_FP16, MSA_FP16);
    convert_codes(MSA_FP16, MSA_F32);
}

/* Row r has block scale r, and the codes 0..15 in order: even elements sit in low nibbles. */
static void convert_nvfp4(msa_dtype dst_dtype)
{
    const struct rows codes = make_rows(256, 8), scales = make_rows(256, 1),
                      dst = make_rows(256, 16 * bytes_of(dst_dtype));
    msa_convert_args args = MSA_CONVERT_ARGS_INIT;

    for (size_t row = 0; row < 256; row++) {
        for (size_t i = 0; i < 8; i++)
            row_of(&codes, row)[i] = (uint8_t)(2 * i | (2 * i + 1) << 4);
        *row_of(&scales, row) = (uint8_t)row;
    }
    args.rows = 256;
    args.cols = 16;
    args.src = codes.data;
    args.src_row_stride = (int64_t)codes.pitch;
    args.scale = scales.data;
    args.scale_row_stride = (int64_t)scales.pitch;
    args.dst_dtype = dst_dtype;
    args.dst = dst.data;
    args.dst_row_stride = (int64_t)dst.pitch;
    assert_int_equal(msa_convert(context, &args, NULL), MSA_SUCCESS);
    for (size_t row = 0; row < 256; row++) {
        for (size_t i = 0; i < 16; i++) {
            double expected = value(&e2m1, (uint32_t)i) * value(&e4m3, (uint32_t)row);

            if (dst_dtype == MSA_E4M3 && !isnan(expected))
                expected = value(&e4m3, nearest(&e4m3, expected));
            assert_same("NVFP4", (uint32_t)(row << 8 | i), (float)element(dst_dtype, row_of(&dst, row), i), expected);
            if (dst_dtype == MSA_E4M3 && isnan(expected))
                assert_int_equal(row_of(&dst, row)[i], 0x7F);
        }
    }
    check_gaps(&dst);
    test_free(codes.data);
    test_free(scales.data);
    test_free(dst.data);
}

static void convert_every_nvfp4_pair(void **state)
{
    (void)state;
    convert_nvfp4(MSA_E4M3);
    convert_nvfp4(MSA_BF16);
    convert_nvfp4(MSA_FP16);
    convert_nvfp4(MSA_F32);
}

/* ------------------------------------------------------------------------------------------------ msa_quantise */

/* Checks one block of 16 elements, x, of the result. */
static void check_block(const float *x, float g, msa_dtype dtype, const uint8_t *codes, uint32_t scale)
{
    float amax = 0;
    int finite = 1;

    for (int i = 0; i < 16; i++) {
        finite = finite && isfinite(x[i]);
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }
    if (dtype == MSA_NVFP4)
        assert_int_equal(scale, finite ? nearest(&e4m3, (double)(amax / g / 6.0f)) : 0x7F);
    for (int i = 0; i < 16; i++) {
        uint32_t expected = 0;
        const uint32_t got = dtype == MSA_E4M3 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;

        if (dtype == MSA_E4M3)
            expected = isnan(x[i]) ? 0x7F : nearest(&e4m3, (double)(x[i] / g));
        else if (finite && scale != 0)
            expected = nearest(&e2m1, (double)(x[i] / g / (float)value(&e4m3, scale)));
        if (got != expected)
            fail_msg("%.9g of a block with maximum %.9g gives 0x%X, must be 0x%X", (double)x[i], (double)amax, got,
                     expected);
    }
}

/* Quantises `count` rows of `cols` numbers from src_dtype, to which they are rounded first, and checks all bits. */
static void check_quantise(msa_dtype src_dtype, msa_dtype dst_dtype, const float *numbers, size_t count, size_t cols,
                           const float *descale)
{
    const struct rows src = make_rows(count, cols * bytes_of(src_dtype));
    const struct rows dst = make_rows(count, dst_dtype == MSA_E4M3 ? cols : cols / 2);
    const struct rows scales = make_rows(count, dst_dtype == MSA_E4M3 ? 0 : cols / 16);
    msa_quantise_args args = MSA_QUANTISE_ARGS_INIT;

    for (size_t i = 0; i < count * cols; i++) {
        uint8_t *place = row_of(&src, i / cols) + i % cols * bytes_of(src_dtype);

        if (src_dtype == MSA_F32)
            memcpy(place, &numbers[i], 4);
        else
            memcpy(place, &(uint16_t){src_dtype == MSA_BF16 ? f32_to_bf16(numbers[i]) : f32_to_fp16(numbers[i])}, 2);
    }
    args.rows = (int64_t)count;
    args.cols = (int64_t)cols;
    args.src_dtype = src_dtype;
    args.src = src.data;
    args.src_row_stride = (int64_t)src.pitch;
    args.dst_dtype = dst_dtype;
    args.dst = dst.data;
    args.dst_row_stride = (int64_t)dst.pitch;
    if (dst_dtype == MSA_NVFP4) {
        args.scale = scales.data;
        args.scale_row_stride = (int64_t)scales.pitch;
    }
    args.descale = descale;
    assert_int_equal(msa_quantise(context, &args, NULL), MSA_SUCCESS);
    for (size_t row = 0; row < count; row++) {
        for (size_t block = 0; block < cols / 16; block++) {
            float x[16];

            for (size_t i = 0; i < 16; i++)
                x[i] = (float)element(src_dtype, row_of(&src, row), block * 16 + i);
            check_block(x, descale ? *descale : 1.0f, dst_dtype, row_of(&dst, row) + block * (dst.bytes / (cols / 16)),
                        row_of(&scales, row)[block]);
        }
    }
    check_gaps(&dst);
    check_gaps(&scales);
    test_free(src.data);
    test_free(dst.data);
    test_free(scales.data);
}

/* Blocks of one maximum each; the other elements reach from 0 to it, with both signs. */
static void fill_block(float *block, float amax)
{
    for (int i = 0; i < 16; i++)
        block[i] = amax * (float)(i - 8) / 8.0f;
}

static void quantise_edges(void **state)
{
    /* All of one sign, one huge or tiny element, NaN and infinities at both ends, and the saturation of the scale. */
    const float maxima[] = {0,       1e-30f, 0x1p-149f, 0.005f, 0x1p-10f * 6, 0x1.8p-10f * 6, 1,        6,
                            2687.9f, 2688,   2784,      3000,   1e6f,         FLT_MAX,        INFINITY, NAN};
    const size_t rows = sizeof(maxima) / sizeof(maxima[0]);
    const float descales[] = {0.5f, 3.0f, 1e-3f, 1e30f};
    const msa_dtype sources[] = {MSA_F32, MSA_BF16, MSA_FP16};
    float numbers[16 * 48];

    (void)state;
    for (size_t row = 0; row < rows; row++) {
        fill_block(numbers + row * 48, maxima[row]);
        for (int i = 0; i < 16; i++) {
            numbers[row * 48 + 16 + (size_t)i] = i == 15 ? maxima[row] : 1.0f; /* one outlier, last */
            numbers[row * 48 + 32 + (size_t)i] = i == 0 ? -maxima[row] : -0.0f; /* one outlier, first */
        }
    }
    for (size_t source = 0; source < 3; source++) {
        check_quantise(sources[source], MSA_NVFP4, numbers, rows, 48, NULL);
        check_quantise(sources[source], MSA_E4M3, numbers, rows, 48, NULL);
        for (size_t i = 0; i < 4; i++) {
            check_quantise(sources[source], MSA_NVFP4, numbers, rows, 48, &descales[i]);
            check_quantise(sources[source], MSA_E4M3, numbers, rows, 48, &descales[i]);
        }
    }
}

/* Known answers, so that the rule itself is checked and not only two programs of it. */
static void quantise_known_answers(void **state)
{
    float src[16] = {6, -6, 3, 0.5f, 1.25f, -0.25f, 0, 5};
    uint8_t codes[8];
    _Alignas(8) uint8_t scale = 0;
    const uint8_t expected[8] = {0x7 | 0xF << 4, 0x5 | 0x1 << 4, 0x2 | 0x8 << 4, 0x0 | 0x6 << 4};
    msa_quantise_args args = MSA_QUANTISE_ARGS_INIT;

    (void)state;
    args.rows = 1;
    args.cols = 16;
    args.src_dtype = MSA_F32;
    args.src = src;
    args.dst_dtype = MSA_NVFP4;
    args.dst = codes;
    args.scale = &scale;
    assert_int_equal(msa_quantise(context, &args, NULL), MSA_SUCCESS);
    assert_int_equal(scale, 0x38); /* 1.0 */
    assert_memory_equal(codes, expected, 8);

    fill_block(src, 1e-30f);
    assert_int_equal(msa_quantise(context, &args, NULL), MSA_SUCCESS);
    assert_int_equal(scale, 0);
    assert_memory_equal(codes, ((const uint8_t[8]){0}), 8);

    fill_block(src, 2688); /* 6 * 448: the largest block without clipping */
    assert_int_equal(msa_quantise(context, &args, NULL), MSA_SUCCESS);
    assert_int_equal(scale, 0x7E);
    assert_int_equal(codes[0] & 15, 15);

    fill_block(src, 1e6f);
    assert_int_equal(msa_quantise(context, &args, NULL), MSA_SUCCESS);
    assert_int_equal(scale, 0x7E);
    assert_int_equal(codes[0] & 15, 15);

    src[9] = -INFINITY;
    assert_int_equal(msa_quantise(context, &args, NULL), MSA_SUCCESS);
    assert_int_equal(scale, 0x7F);
    assert_memory_equal(codes, ((const uint8_t[8]){0}), 8);
}

static void quantise_random_blocks(void **state)
{
    enum { ROWS = 512, COLS = 64 };
    float *numbers = test_malloc(ROWS * COLS * sizeof(float));
    const float g = 0.37f;
    uint32_t noise = 7;

    (void)state;
    for (size_t i = 0; i < ROWS * COLS; i++) { /* magnitudes from 2^-16 to 2^12, one exponent a row, uniform within */
        noise = noise * 1664525 + 1013904223;
        numbers[i] = ldexpf((float)(int32_t)noise, -31 + (int)(i / COLS % 29) - 16);
    }
    check_quantise(MSA_F32, MSA_NVFP4, numbers, ROWS, COLS, NULL);
    check_quantise(MSA_F32, MSA_NVFP4, numbers, ROWS, COLS, &g);
    check_quantise(MSA_BF16, MSA_NVFP4, numbers, ROWS, COLS, &g);
    check_quantise(MSA_FP16, MSA_NVFP4, numbers, ROWS, COLS, &g);
    check_quantise(MSA_F32, MSA_E4M3, numbers, ROWS, COLS, &g);
    check_quantise(MSA_BF16, MSA_E4M3, numbers, ROWS, COLS, NULL);
    test_free(numbers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(definitions_match_specifications),
        cmocka_unit_test(decode_every_code),
        cmocka_unit_test(nvfp4_products),
        cmocka_unit_test(encode_e4m3_rounds_and_saturates),
        cmocka_unit_test(encode_e2m1_rounds_and_saturates),
        cmocka_unit_test(encode_16_bits),
        cmocka_unit_test(convert_every_code),
        cmocka_unit_test(convert_every_nvfp4_pair),
        cmocka_unit_test(quantise_edges),
        cmocka_unit_test(quantise_known_answers),
        cmocka_unit_test(quantise_random_blocks),
    };
    return cmocka_run_group_tests(tests, open_context, close_context);
}
