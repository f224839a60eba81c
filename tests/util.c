/* SPDX-License-Identifier: MIT
 *
 * util.c - see util.h.
 */
#include "util.h"
#include "device.h"

#include <pthread.h>
#include <Random123/philox.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* -------------------------------------------------------------------------------------------------- random numbers */

random_stream random_new(uint32_t seed, uint32_t stream)
{
    return (random_stream){.key = {seed, stream}, .used = 4};
}

uint32_t random_u32(random_stream *r)
{
    if (r->used == 4) {
        philox4x32_ctr_t counter = {{r->counter[0], r->counter[1], 0, 0}};
        philox4x32_key_t key = {{r->key[0], r->key[1]}};
        philox4x32_ctr_t words = philox4x32(counter, key);
        memcpy(r->word, words.v, sizeof r->word);
        if (++r->counter[0] == 0)
            r->counter[1]++;
        r->used = 0;
    }
    return r->word[r->used++];
}

int32_t random_below(random_stream *r, int32_t n)
{
    return (int32_t)((uint64_t)random_u32(r) * (uint32_t)n >> 32);
}

int32_t random_between(random_stream *r, int32_t low, int32_t high)
{
    return low + random_below(r, high - low + 1);
}

bool random_chance(random_stream *r, double probability)
{
    return random_u32(r) < probability * 0x1p32;
}

double random_normal(random_stream *r)
{
    uint32_t u = random_u32(r);
    return ((double)((u & 255) + (u >> 8 & 255) + (u >> 16 & 255) + (u >> 24)) - 510) / 147.8;
}

/* ---------------------------------------------------------------------------------------------------------- memory */

void *xmalloc(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "test program: out of memory (%zu bytes)\n", bytes);
        exit(1);
    }
    return p;
}

void *xcalloc(size_t count, size_t bytes)
{
    void *p = xmalloc(count * bytes);
    memset(p, 0, count * bytes);
    return p;
}

static void add_region(arena *a, region *r)
{
    if (a->count == a->room) {
        a->room = 2 * a->room + 16;
        a->regions = realloc(a->regions, (size_t)a->room * sizeof *a->regions);
    }
    a->regions[a->count++] = r;
}

region *arena_region(arena *a, size_t bytes, size_t alignment)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t usable = (bytes + alignment + page - 1) / page * page;
    uint8_t *map = mmap(NULL, usable + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED || mprotect(map + page, usable, PROT_READ | PROT_WRITE)) {
        fprintf(stderr, "test program: cannot map %zu bytes\n", bytes);
        exit(1);
    }
    device_share(map + page, usable);
    region *r = xmalloc(sizeof *r);
    size_t start = (usable - bytes) / alignment * alignment;
    *r = (region){map + page + start, bytes, map + page, usable};
    add_region(a, r);
    return r;
}

void *arena_copy(arena *a, const void *data, size_t bytes, size_t alignment)
{
    return memcpy(arena_region(a, bytes, alignment)->data, data, bytes);
}

void arena_move(arena *from, int first, arena *to)
{
    for (int i = first; i < from->count; i++)
        add_region(to, from->regions[i]);
    from->count = first;
}

void arena_free(arena *a)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < a->count; i++) {
        device_unshare(a->regions[i]->map);
        munmap(a->regions[i]->map - page, a->regions[i]->map_bytes + 2 * page);
        free(a->regions[i]);
    }
    free(a->regions);
    *a = (arena){0};
}

void region_fill(region *r, uint8_t byte)
{
    memset(r->map, byte, r->map_bytes);
}

void region_randomise(region *r, random_stream *random)
{
    for (size_t i = 0; i < r->bytes; i++)
        r->data[i] = (uint8_t)random_u32(random);
}

bool region_intact(const region *r, uint8_t byte)
{
    for (const uint8_t *p = r->map; p < r->map + r->map_bytes; p++)
        if ((p < r->data || p >= r->data + r->bytes) && *p != byte)
            return false;
    return true;
}

void arena_seal(const arena *a, bool sealed)
{
    for (int i = 0; i < a->count; i++) {
        region *r = a->regions[i];
        if (mprotect(r->map, r->map_bytes, sealed ? PROT_READ : PROT_READ | PROT_WRITE)) {
            fprintf(stderr, "test program: mprotect failed\n");
            exit(1);
        }
    }
}

/* --------------------------------------------------------------------------------------------------------- threads */

typedef struct loop {
    void (*task)(void *arg, size_t i, size_t thread);
    void *arg;
    atomic_size_t left, next_thread;
} loop;

static void *work(void *data)
{
    loop *l = data;
    size_t thread = atomic_fetch_add(&l->next_thread, 1);
    for (;;) {
        size_t left = atomic_load(&l->left);
        while (left > 0 && !atomic_compare_exchange_weak(&l->left, &left, left - 1))
            continue;
        if (left == 0)
            return NULL;
        l->task(l->arg, left - 1, thread);
    }
}

int lent_parallel_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg)
{
    enum { MAX_THREADS = 16 };
    loop l = {task, arg, n, 0};
    pthread_t threads[MAX_THREADS];
    int count = *(const int *)data - 1;
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, work, &l))
            return 1;
    work(&l);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
