/* SPDX-License-Identifier: MIT
 *
 * util.h - what all test programs share: reproducible random numbers, memory between guard pages, lent threads.
 */
#ifndef MSA_TESTS_UTIL_H
#define MSA_TESTS_UTIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "msa.h"

/* -------------------------------------------------------------------------------------------------- random numbers */

/* Philox4x32-10 as a stream: the same numbers on every machine for (seed, stream). */
typedef struct random_stream {
    uint32_t key[2], counter[4], word[4];
    int used;
} random_stream;

random_stream random_new(uint32_t seed, uint32_t stream);
uint32_t random_u32(random_stream *r);
/* Uniform in [0, n). */
int32_t random_below(random_stream *r, int32_t n);
/* Uniform in [low, high]. */
int32_t random_between(random_stream *r, int32_t low, int32_t high);
bool random_chance(random_stream *r, double probability);
/* Bell-shaped (a sum of four uniform bytes), mean 0, variance 1, |x| < 3.5. */
double random_normal(random_stream *r);

/* ---------------------------------------------------------------------------------------------------------- memory */

/* A block of memory that ends at an unreadable page (up to its alignment) and begins behind one. */
typedef struct region {
    uint8_t *data;
    size_t bytes;
    uint8_t *map; /* readable bytes begin here; canaries lie in [map, data) and [data + bytes, map + map_bytes) */
    size_t map_bytes;
} region;

/* All memory of one test; freed at once. */
typedef struct arena {
    region **regions;
    int count, room;
} arena;

/* `alignment` is a power of two. Contents: 0. Ends the program when memory is short. */
region *arena_region(arena *a, size_t bytes, size_t alignment);
/* A block that holds a copy of `data`. */
void *arena_copy(arena *a, const void *data, size_t bytes, size_t alignment);
void arena_free(arena *a);
/* Moves the regions from number `first` on to another arena. */
void arena_move(arena *from, int first, arena *to);

/* Fills the block and its canaries. */
void region_fill(region *r, uint8_t byte);
/* Fills the block alone with random bytes. */
void region_randomise(region *r, random_stream *random);
/* Whether the canaries still hold `byte`. */
bool region_intact(const region *r, uint8_t byte);
/* Makes any write to the arena's blocks fault, or allows writes again. */
void arena_seal(const arena *a, bool sealed);

/* malloc and calloc that end the program when memory is short. */
void *xmalloc(size_t bytes);
void *xcalloc(size_t count, size_t bytes);

/* --------------------------------------------------------------------------------------------------------- threads */

/* An msa_parallel_for_fn over `*(int *)data` threads that takes the items from the last to the first. */
int lent_parallel_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg);

#endif /* MSA_TESTS_UTIL_H */
