/* SPDX-License-Identifier: MIT
 *
 * workload.h - makes the tensors of a prefill, decode, index or layer from a point of the axes, in the form of a case
 * file in memory, and counts the useful work in it.
 *
 * q, k, v, index_q and index_k are standard normal. Physical pages are a random permutation of the pool. A benchmark
 * can ask for a footprint: further page tables and lists that lead repeated calls over that many bytes before they
 * meet again.
 */
#ifndef MSA_WORKLOAD_H
#define MSA_WORKLOAD_H

#include "axes.h"
#include "case.h"

#define MAX_ROTATIONS 4096 /* of inputs: tiny ones would take minutes to cover a footprint */

/* Lengths of the requests. */
struct shape {
    int32_t batch;
    int32_t *query_lens, *kv_lens; /* [batch]; kv_lens include the new tokens */
    int64_t total_q, max_kv_len, total_pages;
};
/* All requests alike, as the axes say. CLI_OK or CLI_BAD; shape_free in any case. */
int shape_from_point(struct shape *shape, const struct point *point);
/* From lengths; the totals are filled in. */
int shape_set(struct shape *shape, int32_t batch, const int64_t *query_lens, const int64_t *prefix_lens);
void shape_free(struct shape *shape);

/* Lists [num_lists, total_q, k] of one of the patterns, ascending, -1 at the end; the same for the same seed and
 * rotation. */
void select_pages(int32_t *lists, const struct shape *shape, int32_t num_lists, int32_t k, enum pattern pattern,
                  uint64_t seed, int rotation);

struct workload {
    struct point point;
    struct shape shape;
    struct tensor_file file;
    struct problem problem; /* views into file */
    int32_t *pages;         /* permutation of the pool */
    int regions;            /* parts of the pool, each enough for all requests */
    int rotations;          /* different inputs before they repeat */
    double flops, bytes;    /* useful: every key that a row needs; every input and output byte once */
};

/* Takes over `shape`. footprint: bytes that the rotations should touch together; 0: one rotation. CLI_OK, or CLI_BAD
 * after a message and with nothing left to free. */
int workload_open(struct workload *workload, const struct point *point, struct shape *shape, size_t footprint,
                  int threads);
void workload_close(struct workload *workload);

/* Page table [batch, max_pages] and lists [num_kv_heads, total_q, k] of one rotation; those of 0 are in the file. */
void workload_table(const struct workload *workload, int rotation, int32_t *table);
void workload_lists(const struct workload *workload, int rotation, int32_t *lists);

/* Refuses what would not fit the machine, before any of it is allocated: memory that is promised but not there would
 * end the process when it is touched. CLI_OK or CLI_BAD. */
int memory_check(const char *what, double bytes);
/* Bytes of one page of one head. */
int64_t page_bytes(msa_dtype dtype);

#endif
