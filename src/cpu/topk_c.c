/* SPDX-License-Identifier: MIT
 *
 * topk_c.c - keeps the best pages of a row by insertion. Portable C, the definition.
 *
 * A page's 64-bit key is its score's bits, mapped so that unsigned order is numeric order with -0 as +0 and NaN lowest,
 * above the complement of its id, so that a larger key is the better page and equal scores prefer the lower page. A
 * score of -inf is no candidate.
 */
#include "../number.h"
#include "kernels.h"

static uint64_t page_key(float score, int32_t page)
{
    uint32_t bits = f32_bits(score + 0.0f); /* -0 + 0 is +0 */
    bits = isnan(score) ? 0 : bits >> 31 ? ~bits : bits | 0x80000000;
    return (uint64_t)bits << 32 | (uint32_t)~page;
}

void topk_c(struct cpu_best *best, const float *scores, int32_t first_page, int32_t num_pages)
{
    for (int32_t i = 0; i < num_pages; i++) {
        uint64_t key = page_key(scores[i], first_page + i);
        if (scores[i] == -INFINITY || best->want == 0 ||
            (best->count == best->want && key <= best->key[best->want - 1]))
            continue;
        int32_t slot = best->count < best->want ? best->count++ : best->want - 1;
        for (; slot > 0 && best->key[slot - 1] < key; slot--)
            best->key[slot] = best->key[slot - 1];
        best->key[slot] = key;
    }
}
