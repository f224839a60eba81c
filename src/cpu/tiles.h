/* SPDX-License-Identifier: MIT
 *
 * tiles.h - AMX's tile registers: 16 rows of 64 bytes each, eight of them.
 *
 * multiply(c, a, b): c += a*b with a = [16 rows][16 pairs] and b = [16 pairs][16 columns] of BF16 pairs, c = [16][16]
 * FP32. What Intel's manual says of it, and what was seen in 512,000 random sums on Sapphire Rapids to be all:
 *
 *     even = odd = 0
 *     for pair in 0..15:  even = a[row][pair].even*b[pair][column].even + even      fused, rounded to nearest
 *                         odd  = a[row][pair].odd *b[pair][column].odd  + odd
 *     c[row][column] += even + odd                                                   both rounded
 *
 * Subnormals, in and out, count as 0; MXCSR is neither read nor written.
 *
 * One every 16 cycles; the next may add to the same c. A load takes 8 cycles from L1. The instructions are written
 * out, because gcc's intrinsics do not say that they read memory.
 */
#ifndef MSA_TILES_H
#define MSA_TILES_H

#include <stdint.h>

#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : : : "memory")
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

/* The multiplier falls asleep after some 800 cycles without work, and waking takes 650. (Xeon family 6 model 207: 32
 * multiplications and 8 stores take 640 cycles, and 1290 after 1500 cycles of anything else.) One multiplication that
 * nobody reads, between longer stretches of vector work, keeps it awake. */
#define TILE_STAY_AWAKE() TILE_MULTIPLY(7, 4, 5)

#endif
