/* SPDX-License-Identifier: MIT
 *
 * random.c - sequences of draws, and tensors of normal values in every format.
 *
 * A gigabyte of cache has to be filled in seconds, so a value is one table look-up by 16 random bits: the quantiles of
 * the normal distribution, already in the wanted format. NVFP4 rounds blocks, so it looks up floats and quantises them.
 */
#include "random.h"

#include "number.h"
#include "parallel.h"

#include <Random123/philox.h>
#include <stdlib.h>

enum { QUANTILES = 65536, BLOCK = 16 };

static void philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t words[4])
{
    philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    philox4x32_ctr_t counter = {{c0, c1, c2, c3}};
    philox4x32_ctr_t result = philox4x32(counter, key);
    memcpy(words, result.v, sizeof result.v);
}

void draws_begin(struct draws *draws, uint64_t seed, enum stream stream, uint32_t a, uint32_t b)
{
    *draws = (struct draws){.seed = seed, .stream = stream, .a = a, .b = b};
}

uint32_t draw(struct draws *draws)
{
    if (draws->left == 0) {
        philox(draws->seed, draws->block++, draws->a, draws->b, draws->stream, draws->words);
        draws->left = 4;
    }
    return draws->words[4 - draws->left--];
}

uint32_t draw_below(struct draws *draws, uint32_t n)
{
    return (uint32_t)((uint64_t)draw(draws) * n >> 32);
}

int32_t *random_permutation(int64_t n, uint64_t seed)
{
    int32_t *order = malloc((size_t)n * sizeof(*order));
    struct draws draws;
    draws_begin(&draws, seed, STREAM_PAGES, 0, 0);
    for (int64_t i = 0; order && i < n; i++) { /* inside-out: entry i changes places with a random one up to i */
        int64_t j = draw_below(&draws, (uint32_t)i + 1);
        order[i] = order[j];
        order[j] = (int32_t)i;
    }
    return order;
}

/* Newton's method on the distribution function, from the quantile before. The grid hides what two math libraries may
 * disagree about. */
static const float *normal_quantiles(void)
{
    static float table[QUANTILES];
    if (table[QUANTILES - 1] > 0)
        return table;
    double x = 0;
    for (int j = QUANTILES / 2; j < QUANTILES; j++) {
        double p = (j + 0.5) / QUANTILES, step;
        do {
            step = (p - 0.5 * erfc(-x * M_SQRT1_2)) / (exp(-0.5 * x * x) * M_SQRT1_2 * 0.5 * M_2_SQRTPI);
            x += step;
        } while (fabs(step) > 1e-12);
        table[j] = (float)(nearbyint(x * 4096) / 4096);
        table[QUANTILES - 1 - j] = 0.0f - table[j]; /* never -0 */
    }
    return table;
}

struct fill {
    msa_dtype dtype;
    void *data;
    uint8_t *scales;
    int64_t first, blocks;
    uint64_t seed;
    enum stream stream;
    const float *quantiles;
    union {
        uint16_t wide[QUANTILES];
        uint8_t narrow[QUANTILES];
    } codes; /* the quantiles in dtype; not for NVFP4 and F32 */
};

/* f32_to_e2m1 of number.h without branches, a block at a time: random values would mispredict most of them. The
 * largest of 16 draws is far from 0, and so is the scale. */
static void quantise_block(const float x[BLOCK], uint8_t *codes, uint8_t *scale)
{
    float amax = 0;
    for (int i = 0; i < BLOCK; i++)
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    *scale = f32_to_e4m3(amax / 6);
    float s = e4m3_to_f32(*scale);
    int code[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        float a = fabsf(x[i] / s);
        code[i] = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f) +
                  8 * (x[i] < 0);
    }
    for (int i = 0; i < BLOCK; i += 2)
        codes[i / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
}

static void fill_part(void *arg, int thread, int threads)
{
    const struct fill *fill = arg;
    int64_t begin = fill->blocks * thread / threads, end = fill->blocks * (thread + 1) / threads;
    for (int64_t b = begin; b < end; b++) {
        uint16_t which[BLOCK];
        uint32_t words[8];
        uint64_t at = 2 * ((uint64_t)fill->first / BLOCK + (uint64_t)b);
        philox(fill->seed, (uint32_t)at, (uint32_t)(at >> 32), 0, (uint32_t)fill->stream, words);
        philox(fill->seed, (uint32_t)at + 1, (uint32_t)(at >> 32), 0, (uint32_t)fill->stream, words + 4);
        for (int i = 0; i < BLOCK; i++)
            which[i] = (uint16_t)(words[i / 2] >> i % 2 * 16);
        float x[BLOCK];
        switch (fill->dtype) {
        case MSA_E4M3:
            for (int i = 0; i < BLOCK; i++)
                ((uint8_t *)fill->data)[b * BLOCK + i] = fill->codes.narrow[which[i]];
            break;
        case MSA_BF16:
        case MSA_FP16:
            for (int i = 0; i < BLOCK; i++)
                ((uint16_t *)fill->data)[b * BLOCK + i] = fill->codes.wide[which[i]];
            break;
        default:
            for (int i = 0; i < BLOCK; i++)
                x[i] = fill->quantiles[which[i]];
            if (fill->dtype == MSA_NVFP4)
                quantise_block(x, (uint8_t *)fill->data + b * BLOCK / 2, fill->scales + b);
            else
                memcpy((float *)fill->data + b * BLOCK, x, sizeof x);
        }
    }
}

void fill_normal(msa_dtype dtype, void *data, void *scales, int64_t first, int64_t count, uint64_t seed,
                 enum stream stream, int threads)
{
    struct fill fill = {.dtype = dtype,
                        .data = data,
                        .scales = scales,
                        .first = first,
                        .blocks = count / BLOCK,
                        .seed = seed,
                        .stream = stream,
                        .quantiles = normal_quantiles()};
    for (int j = 0; j < QUANTILES; j++) {
        if (dtype == MSA_E4M3)
            fill.codes.narrow[j] = f32_to_e4m3(fill.quantiles[j]);
        else if (dtype == MSA_BF16)
            fill.codes.wide[j] = f32_to_bf16(fill.quantiles[j]);
        else if (dtype == MSA_FP16)
            fill.codes.wide[j] = f32_to_fp16(fill.quantiles[j]);
    }
    parallel_run(threads, fill_part, &fill);
}
