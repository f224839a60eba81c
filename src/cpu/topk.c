/* SPDX-License-Identifier: MIT
 *
 * topk.c - the selection rules around the top-k kernels: forced pages, how many places are left, and the order of a
 * list.
 */
#include "cpu.h"

static int32_t page_of(uint64_t key)
{
    return (int32_t)~(uint32_t)key;
}

void cpu_best_init(struct cpu_best *best, const struct cpu_selection *selection, int32_t n)
{
    int32_t forced = n - (cpu_last_candidate(selection, n) - cpu_first_candidate(selection, n));
    best->want = selection->k - forced;
    best->count = 0;
}

void cpu_best_merge(struct cpu_best *best, const struct cpu_best *other)
{
    for (int32_t i = 0; i < other->count; i++) {
        uint64_t key = other->key[i];
        if (best->want == 0 || (best->count == best->want && key <= best->key[best->want - 1]))
            return; /* the rest is worse still */
        int32_t slot = best->count < best->want ? best->count++ : best->want - 1;
        for (; slot > 0 && best->key[slot - 1] < key; slot--)
            best->key[slot] = best->key[slot - 1];
        best->key[slot] = key;
    }
}

void cpu_best_write(const struct cpu_best *best, const struct cpu_selection *selection, int32_t n, int32_t *topk)
{
    int32_t used = 0, first = cpu_first_candidate(selection, n), last = cpu_last_candidate(selection, n);
    for (int32_t page = 0; page < first; page++)
        topk[used++] = page;
    int32_t chosen = used;
    for (int32_t i = 0; i < best->count; i++) {
        int32_t slot = used++;
        if (selection->order == MSA_TOPK_ORDER_PAGE)
            for (; slot > chosen && topk[slot - 1] > page_of(best->key[i]); slot--)
                topk[slot] = topk[slot - 1];
        topk[slot] = page_of(best->key[i]);
    }
    for (int32_t page = last; page < n; page++)
        topk[used++] = page;
    while (used < selection->k)
        topk[used++] = -1;
}
