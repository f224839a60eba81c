/* SPDX-License-Identifier: MIT
 *
 * select.c - selection patterns: which pages the queries of a made problem attend to.
 *
 * A row at page `own` lists all its pages if there are at most k of them, else its own page and k-1 history pages:
 *   even       history page s*own/(k-1), rounded down, in slot s
 *   clustered  a request's first query draws its pages; each next one keeps each of the previous query's with
 *              probability 0.9 and fills up with fresh draws
 *   scattered  fresh draws for every query
 *   shared     k-2 pages (the own one is among them) are common to a request's queries, two are drawn for each query
 * Draws are uniform over the history and distinct; every list head has its own.
 */
#include "random.h"
#include "workload.h"

#include <string.h>

static bool contains(const int32_t *ids, int count, int32_t id)
{
    for (int i = 0; i < count; i++) {
        if (ids[i] == id)
            return true;
    }
    return false;
}

/* Draws distinct pages below `own` until there are `wanted`. */
static void fill_up(struct draws *draws, int32_t *ids, int count, int wanted, int32_t own)
{
    while (count < wanted) {
        int32_t id = (int32_t)draw_below(draws, (uint32_t)own);
        if (!contains(ids, count, id))
            ids[count++] = id;
    }
}

static void sort(int32_t *ids, int count)
{
    for (int i = 1; i < count; i++) {
        int32_t id = ids[i];
        int at = i;
        for (; at > 0 && ids[at - 1] > id; at--)
            ids[at] = ids[at - 1];
        ids[at] = id;
    }
}

/* History of the rows of one request and list, in order. */
struct chooser {
    enum pattern pattern;
    int wanted; /* k-1 */
    struct draws draws;
    int count; /* of `ids`: what the next query may keep (clustered) or all have in common (shared) */
    int32_t ids[MSA_MAX_TOPK];
};

static void choose_history(struct chooser *chooser, int32_t own, int32_t history[MSA_MAX_TOPK])
{
    int wanted = chooser->wanted, kept = 0;
    switch (chooser->pattern) {
    case PATTERN_EVEN:
        for (int s = 0; s < wanted; s++)
            history[s] = (int32_t)((int64_t)s * own / wanted);
        return;
    case PATTERN_CLUSTERED:
        for (int i = 0; i < chooser->count; i++) {
            if (draw_below(&chooser->draws, 10) < 9)
                history[kept++] = chooser->ids[i];
        }
        break;
    case PATTERN_SHARED:
        if (chooser->count == 0 && wanted > 2) {
            chooser->count = wanted - 2;
            fill_up(&chooser->draws, chooser->ids, 0, chooser->count, own);
        }
        kept = chooser->count;
        memcpy(history, chooser->ids, (size_t)kept * sizeof(*history));
        break;
    case PATTERN_SCATTERED:
        break;
    }
    fill_up(&chooser->draws, history, kept, wanted, own);
    sort(history, wanted);
    if (chooser->pattern == PATTERN_CLUSTERED) {
        chooser->count = wanted;
        memcpy(chooser->ids, history, (size_t)wanted * sizeof(*history));
    }
}

void select_pages(int32_t *lists, const struct shape *shape, int32_t num_lists, int32_t k, enum pattern pattern,
                  uint64_t seed, int rotation)
{
    for (int32_t list = 0; list < num_lists; list++) {
        int32_t *row = lists + list * shape->total_q * k;
        for (int32_t b = 0; b < shape->batch; b++) {
            struct chooser chooser = {.pattern = pattern, .wanted = k - 1};
            draws_begin(&chooser.draws, seed, STREAM_LISTS, (uint32_t)b, (uint32_t)(rotation * num_lists + list));
            for (int32_t i = 0; i < shape->query_lens[b]; i++, row += k) {
                int64_t position = (int64_t)shape->kv_lens[b] - shape->query_lens[b] + i;
                int32_t own = (int32_t)(position / MSA_PAGE_SIZE), count = 0;
                if (position >= 0 && own < k) {
                    for (; count < own; count++)
                        row[count] = count;
                    /* What a clustered query may keep once there is a choice. */
                    chooser.count = pattern == PATTERN_CLUSTERED ? count : 0;
                    if (chooser.count)
                        memcpy(chooser.ids, row, (size_t)count * sizeof(*row));
                } else if (position >= 0) {
                    choose_history(&chooser, own, row);
                    count = k - 1;
                }
                if (position >= 0)
                    row[count++] = own;
                while (count < k)
                    row[count++] = -1;
            }
        }
    }
}
