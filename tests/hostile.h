/* SPDX-License-Identifier: MIT
 *
 * hostile.h - what the fuzz targets build problems with: decisions from an input's bytes; tensors in memory that ends
 * where they end, with any nesting and gaps of strides, which know which of their bytes a call may use; and the lengths
 * and page tables of a step, good and bad.
 */
#ifndef MSA_TESTS_HOSTILE_H
#define MSA_TESTS_HOSTILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "msa.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

#define CHECK(condition)                                                                                    \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            fprintf(stderr, "%s:%d: %s does not hold; last message: %s\n", __FILE__, __LINE__, #condition,  \
                    msa_last_error());                                                                      \
            abort();                                                                                        \
        }                                                                                                   \
    } while (0)

/* One context of a single thread, and one of three lent threads that take tasks from the last to the first. */
void contexts_open(msa_context **serial, msa_context **reversed);

/* ------------------------------------------------------------------------------------------------ decisions */

struct input {
    const uint8_t *at, *end;
    uint64_t noise; /* for contents */
};

struct input input_open(const uint8_t *bytes, size_t size);
/* A number in [0, n), n <= 256; 0 when the input is used up. */
int take(struct input *in, int n);
/* True in about one of n cases, and never when the input is used up. */
bool rarely(struct input *in, int n);
int32_t take_i32(struct input *in);
/* A number in [0, n) that depends on all of the input: for contents, of which there are many. */
int pick(struct input *in, int n);

/* ------------------------------------------------------------------------------------------------ tensors */

enum { MAX_AXES = 3, PATTERN = 0xC3 };
enum tensor_kind { INPUT, OUTPUT };

struct tensor {
    uint8_t *data; /* NULL if it is empty */
    uint8_t *used; /* per byte: an input's may be read, an output's must be written */
    size_t bytes, row_bytes;
    bool tame; /* every number of every format is finite and below 2 */
    int axes;
    int64_t extent[MAX_AXES], stride[MAX_AXES]; /* outermost first */
    int64_t given[MAX_AXES]; /* the strides to pass: MSA_DENSE, or garbage where it must not matter */
};

/* Contents: noise for inputs (mostly tame), PATTERN for outputs. `align` is that of base and strides. */
struct tensor tensor_make(struct input *in, enum tensor_kind kind, size_t align, size_t row_bytes, int axes,
                          const int64_t *extents);
void tensor_free(struct tensor *t);
/* The row at an index of each axis; NULL for an empty tensor. */
uint8_t *tensor_row(const struct tensor *t, int64_t i, int64_t j, int64_t k);
/* Marks a part of a row, a whole row, or everything as used. */
void tensor_use(struct tensor *t, int64_t i, int64_t j, int64_t k, size_t first, size_t bytes);
void tensor_use_row(struct tensor *t, int64_t i, int64_t j, int64_t k);
void tensor_use_all(struct tensor *t);
/* Puts another value in all bytes of an input that the call may not use. */
void tensor_poison(struct tensor *t, uint8_t byte);
/* Checks that an output's other bytes hold the pattern still. */
void tensor_check_gaps(const struct tensor *t);
/* Takes an output's contents away and leaves the pattern; free() them. */
uint8_t *tensor_take(struct tensor *t);

/* ------------------------------------------------------------------------------------------------ requests */

enum { MAX_BATCH = 3, MAX_ROWS = 4, MAX_PAGES = 3 };

struct requests {
    int batch, rows; /* rows of the tensors: padding may follow the last request's */
    int64_t max_kv_len;
    int max_pages, pool; /* pool: physical pages */
    int owners; /* requests whose rows are known: the batch, or 0 if lengths are bad or there is nothing to do */
    bool good;           /* the lengths make sense */
    int32_t cu[MAX_BATCH + 1], kv[MAX_BATCH];
    struct tensor cu_q, kv_lens, table;
    uint32_t bits; /* of the error word */
};

void requests_make(struct input *in, struct requests *r);
void requests_free(struct requests *r);
int64_t requests_position(const struct requests *r, int b, int64_t row);
/* Physical page of a logical one, or -1 and the error bit. The table's entry counts as used. */
int64_t requests_look_up(struct requests *r, int b, int page);
/* All but selection and workspace; of the whole batch, or of request b alone (b >= 0). */
msa_step requests_step(const struct requests *r, int b, int32_t alone[2]);
/* A workspace of exactly the plan's size, with garbage in it; free(step->workspace). */
void step_workspace(msa_step *step, const msa_plan *plan, int fill);
void requests_check_bits(const struct requests *r, msa_plan *plan);

#endif
