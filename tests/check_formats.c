/* SPDX-License-Identifier: MIT
 *
 * check_formats.c - convert and quantise through the public calls, bit for bit: all codes, all products of NVFP4, ties
 * and corners of the quantisers, and rows with gaps.
 */
#include "checkkernel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct format_case {
    trial t;
    bool quantise;
    msa_quantise_args q;
    msa_convert_args c;
    int64_t dst_row, scale_row;
} format_case;

static msa_status run(trial *t, msa_context *context)
{
    format_case *f = (format_case *)t;
    return f->quantise ? msa_quantise(context, &f->q, NULL) : msa_convert(context, &f->c, NULL);
}

static void check_quantised(harness *h, format_case *f)
{
    int64_t cols = f->q.cols, bytes = oracle_row_bytes(f->q.dst_dtype, cols);
    uint8_t *codes = xmalloc((size_t)(cols + cols / 16)), *scales = codes + cols;
    for (int64_t row = 0; row < f->q.rows; row++) {
        oracle_quantise_row(&f->q, row, codes, scales);
        const uint8_t *given = f->t.outputs[0].region->data + row * f->dst_row;
        for (int64_t i = 0; i < bytes; i++)
            if (given[i] != codes[i])
                test_fail(h, "dst[row %lld, byte %lld] = 0x%02x, expected 0x%02x", (long long)row, (long long)i,
                          given[i], codes[i]);
        for (int64_t i = 0; i < cols / 16 && f->q.dst_dtype == MSA_NVFP4; i++) {
            uint8_t scale = f->t.outputs[1].region->data[row * f->scale_row + i];
            if (scale != scales[i])
                test_fail(h, "scale[row %lld, %lld] = 0x%02x, expected 0x%02x", (long long)row, (long long)i, scale,
                          scales[i]);
        }
    }
    free(codes);
}

static void check_converted(harness *h, format_case *f)
{
    double *values = xmalloc((size_t)f->c.cols * sizeof *values);
    for (int64_t row = 0; row < f->c.rows; row++) {
        oracle_convert_row(&f->c, row, values);
        const uint8_t *given = f->t.outputs[0].region->data + row * f->dst_row;
        for (int64_t i = 0; i < f->c.cols; i++) {
            double x = oracle_value(f->c.dst_dtype, given + oracle_row_bytes(f->c.dst_dtype, i));
            bool same = isnan(values[i]) ? isnan(x) : x == values[i] && signbit(x) == signbit(values[i]);
            if (f->c.src_dtype == MSA_NVFP4 && f->c.dst_dtype == MSA_E4M3 && isnan(values[i]))
                same = given[i] == 0x7F;
            if (!same)
                test_fail(h, "dst[row %lld, %lld] = %g, expected %g", (long long)row, (long long)i, x, values[i]);
        }
    }
    free(values);
}

static void check(harness *h, trial *t)
{
    format_case *f = (format_case *)t;
    if (f->quantise)
        check_quantised(h, f);
    else
        check_converted(h, f);
}

static void *make_output(format_case *f, const char *name, int64_t rows, int64_t bytes, int64_t stride,
                         size_t alignment)
{
    output *o = trial_output(&f->t, name, (size_t)(rows ? (rows - 1) * stride + bytes : 0), alignment);
    for (int64_t row = 0; row < rows; row++)
        memset(o->written + row * stride, 1, (size_t)bytes);
    return o->region->data;
}

/* --------------------------------------------------------------------------------------------------------- convert */

/* Every code of the source; for NVFP4 every code with every scale. 512 columns hold 32 blocks with their own scales. */
static void convert_test(harness *h, msa_dtype src, msa_dtype dst, bool gaps)
{
    enum { COLS = 512 };
    int64_t rows = oracle_row_bytes(src, 2) == 4 ? 65536 / COLS : src == MSA_NVFP4 ? 256 * 16 / COLS : 1;
    int64_t src_row = oracle_row_bytes(src, COLS) + (gaps ? 6 : 0), scale_row = COLS / 16 + (gaps ? 3 : 0);
    format_case f = {.t = {.run = run, .check = check, .same_bits = true}, .c = MSA_CONVERT_ARGS_INIT};
    f.dst_row = oracle_row_bytes(dst, COLS) + (gaps ? 12 : 0);
    uint8_t *data = arena_region(&f.t.inputs, (size_t)(rows * src_row), 2)->data;
    uint8_t *scale = arena_region(&f.t.inputs, (size_t)(rows * scale_row), 1)->data;
    for (int64_t i = 0; i < rows * COLS; i++) {
        uint8_t *row = data + i / COLS * src_row;
        int64_t column = i % COLS;
        if (src == MSA_NVFP4) {
            scale[i / COLS * scale_row + column / 16] = (uint8_t)(i / 16);
            row[column / 2] |= (uint8_t)((i & 15) << (column % 2 * 4));
        } else {
            memcpy(row + oracle_row_bytes(src, column), &i, (size_t)oracle_row_bytes(src, 1)); /* little-endian */
        }
    }
    f.c.rows = rows;
    f.c.cols = COLS;
    f.c.src_dtype = src;
    f.c.src = data;
    f.c.src_row_stride = gaps ? src_row : MSA_DENSE;
    f.c.scale = src == MSA_NVFP4 ? scale : NULL;
    f.c.scale_row_stride = gaps ? scale_row : MSA_DENSE;
    f.c.dst_dtype = dst;
    f.c.dst = make_output(&f, "dst", rows, oracle_row_bytes(dst, COLS), f.dst_row, 4);
    f.c.dst_row_stride = gaps ? f.dst_row : MSA_DENSE;
    trial_run(h, &f.t);
    trial_free(&f.t);
}

static void check_convert(harness *h)
{
    static const msa_dtype conversions[][2] = {{MSA_NVFP4, MSA_E4M3}, {MSA_NVFP4, MSA_BF16}, {MSA_NVFP4, MSA_FP16},
                                               {MSA_NVFP4, MSA_F32},  {MSA_E4M3, MSA_E4M3},  {MSA_E4M3, MSA_BF16},
                                               {MSA_E4M3, MSA_FP16},  {MSA_E4M3, MSA_F32},   {MSA_BF16, MSA_BF16},
                                               {MSA_BF16, MSA_F32},   {MSA_FP16, MSA_FP16},  {MSA_FP16, MSA_F32}};
    for (int i = 0; i < (int)(sizeof conversions / sizeof conversions[0]); i++)
        for (int gaps = 0; gaps < 2; gaps++) {
            if (!test_begin(h, "convert", "%s-%s/%s", format_name(conversions[i][0]), format_name(conversions[i][1]),
                            gaps ? "gaps" : "dense"))
                continue;
            convert_test(h, conversions[i][0], conversions[i][1], gaps);
            test_end(h);
        }
}

/* -------------------------------------------------------------------------------------------------------- quantise */

enum block_kind { RANDOM, TIES, ALL_ZERO, TINY, LARGE, HUGE_VALUES, ONE_NAN, ONE_INF, NUM_BLOCK_KINDS };

/* Element i of a block of some kind. TIES are midpoints of E2M1 and E4M3 (and their neighbours) under a scale of 1. */
static double block_value(enum block_kind kind, int i, double factor, random_stream *r)
{
    static const double midpoints[] = {6,      0.25,   0.75,    1.25,    1.75, 2.5, 3.5, 5,
                                       1.0625, 1.1875, 0x1p-10, 0x3p-10, 448,  464, 480};
    switch (kind) {
    case TIES:
        return (random_chance(r, 0.5) ? 1 : -1) * midpoints[i == 0 ? 0 : random_below(r, 15)] *
               (random_chance(r, 0.3) ? 1 + 0x1p-7 * (random_below(r, 3) - 1) : 1);
    case ALL_ZERO:
        return random_chance(r, 0.5) ? 0.0 : -0.0;
    case TINY:
        return 1e-30 * random_normal(r);
    case LARGE:
        return i == 3 ? 2688 : 2000 * random_normal(r);
    case HUGE_VALUES:
        return 60000 * random_normal(r);
    case ONE_NAN:
        return i == 5 ? (double)NAN : random_normal(r);
    case ONE_INF:
        return i == 9 ? -(double)INFINITY : random_normal(r);
    default:
        return factor * random_normal(r);
    }
}

static void quantise_test(harness *h, msa_dtype src, msa_dtype dst, bool gaps, bool scaled)
{
    enum { ROWS = 7, COLS = 624 }; /* 39 blocks: rows of scales begin anywhere */
    random_stream r = test_random(h);
    int64_t element = oracle_row_bytes(src, 1), src_row = element * (COLS + (gaps ? 3 : 0)), scale_bytes = COLS / 16;
    format_case f = {
        .t = {.run = run, .check = check, .same_bits = true}, .quantise = true, .q = MSA_QUANTISE_ARGS_INIT};
    f.dst_row = oracle_row_bytes(dst, COLS) + (gaps ? 5 : 0);
    f.scale_row = scale_bytes + (gaps ? 5 : 0);
    uint8_t *data = arena_region(&f.t.inputs, ROWS * (size_t)src_row, (size_t)element)->data;
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t i = 0; i < COLS; i += 16) {
            double factor = ldexp(1, random_between(&r, -12, 9));
            for (int64_t j = i; j < i + 16; j++) {
                uint32_t code = oracle_encode(
                    src, block_value((enum block_kind)(i / 16 % NUM_BLOCK_KINDS), (int)(j - i), factor, &r));
                memcpy(data + row * src_row + j * element, &code, (size_t)element);
            }
        }
    if (scaled) {
        float *descale = (float *)(void *)arena_region(&f.t.inputs, 4, 4)->data;
        *descale = 0.3f;
        f.q.descale = descale;
    }
    f.q.rows = ROWS;
    f.q.cols = COLS;
    f.q.src_dtype = src;
    f.q.src = data;
    f.q.src_row_stride = gaps ? src_row : MSA_DENSE;
    f.q.dst_dtype = dst;
    f.q.dst = make_output(&f, "dst", ROWS, oracle_row_bytes(dst, COLS), f.dst_row, 1);
    f.q.dst_row_stride = gaps ? f.dst_row : MSA_DENSE;
    if (dst == MSA_NVFP4) {
        f.q.scale = make_output(&f, "scale", ROWS, scale_bytes, f.scale_row, 1);
        f.q.scale_row_stride = gaps ? f.scale_row : MSA_DENSE;
    }
    trial_run(h, &f.t);
    trial_free(&f.t);
}

/* Every BF16 or FP16 number to E4M3, divided by 2^exponent. */
static void quantise_all(harness *h, msa_dtype src, int exponent)
{
    enum { ROWS = 16, COLS = 4096 };
    format_case f = {.t = {.run = run, .check = check, .timed = true, .same_bits = true},
                     .quantise = true,
                     .q = MSA_QUANTISE_ARGS_INIT};
    uint16_t *data = (uint16_t *)(void *)arena_region(&f.t.inputs, 2 * ROWS * COLS, 2)->data;
    for (int i = 0; i < ROWS * COLS; i++)
        data[i] = (uint16_t)i;
    float *descale = (float *)(void *)arena_region(&f.t.inputs, 4, 4)->data;
    *descale = ldexpf(1, exponent);
    f.q.descale = descale;
    f.dst_row = COLS;
    f.q.rows = ROWS;
    f.q.cols = COLS;
    f.q.src_dtype = src;
    f.q.src = data;
    f.q.dst = make_output(&f, "dst", ROWS, COLS, COLS, 1);
    trial_run(h, &f.t);
    trial_free(&f.t);
}

static void check_quantise(harness *h)
{
    static const msa_dtype sources[] = {MSA_F32, MSA_BF16, MSA_FP16}, destinations[] = {MSA_E4M3, MSA_NVFP4};
    static const int exponents[] = {0, -3, 5, -63, 63, -64, 64, -126, 127}; /* vector code has limits among them */
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 2; j++)
            for (int k = 0; k < 4; k++) {
                if (!test_begin(h, "quantise", "%s-%s/%s-%s", format_name(sources[i]), format_name(destinations[j]),
                                k % 2 ? "gaps" : "dense", k / 2 ? "scaled" : "unscaled"))
                    continue;
                quantise_test(h, sources[i], destinations[j], k % 2, k / 2);
                test_end(h);
            }
        for (size_t e = 0; e < sizeof exponents / sizeof *exponents && sources[i] != MSA_F32; e++) {
            if (!test_begin(h, "quantise", "%s-e4m3/every-number/%d", format_name(sources[i]), exponents[e]))
                continue;
            quantise_all(h, sources[i], exponents[e]);
            test_end(h);
        }
    }
}

void check_formats(harness *h)
{
    check_convert(h);
    check_quantise(h);
}
