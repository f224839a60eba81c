/* SPDX-License-Identifier: MIT
 *
 * axes.h - the axes of benchmarks and made cases: their names, values, defaults, and the product of those given.
 */
#ifndef MSA_AXES_H
#define MSA_AXES_H

#include "cli.h"

#include <stdio.h>

enum bench_op { BENCH_PREFILL, BENCH_DECODE, BENCH_INDEX, BENCH_LAYER, BENCH_TOPK, BENCH_COMBINE, BENCH_QUANTISE };
extern const char *const bench_op_names[]; /* indexed by bench_op, NULL at the end */

/* The inputs come first: points that agree up to AXIS_INPUTS compute on the same inputs. */
enum axis {
    AXIS_FORMAT,
    AXIS_INDEX_FORMAT,
    AXIS_Q_HEADS,
    AXIS_KV_HEADS,
    AXIS_INDEX_HEADS,
    AXIS_BATCH,
    AXIS_QUERIES,
    AXIS_PREFIX,
    AXIS_CONTEXT,
    AXIS_NEW,
    AXIS_DECODE,
    AXIS_ROWS,
    AXIS_PAGES,
    AXIS_K,
    AXIS_SCORES,
    AXIS_SPLITS,
    AXIS_CACHE,
    AXIS_PATTERN,
    AXIS_SEED,
    AXIS_INPUTS,
    AXIS_SCORES_ONLY = AXIS_INPUTS,
    AXIS_PRECISION,
    AXIS_STRATEGY,
    AXIS_ISA,
    AXIS_THREADS,
    AXIS_COUNT
};

enum pattern { PATTERN_EVEN, PATTERN_CLUSTERED, PATTERN_SCATTERED, PATTERN_SHARED };
enum topk_scores { SCORES_RANDOM, SCORES_ASCENDING, SCORES_EQUAL };
extern const char *const pattern_names[]; /* indexed by pattern, NULL at the end */
extern const char *const isa_names[];     /* the caps in ascending order, "best" (no cap) first, NULL at the end */

/* Values of AXIS_FORMAT and AXIS_INDEX_FORMAT index this. */
struct format {
    const char *name;
    msa_dtype q, kv; /* index: of index_q, index_k; quantise: kv is the destination */
    int ops;         /* which operations take it, as bits of axes.c */
};
extern const struct format formats[];

/* One combination. Axes that the operation does not use hold 0. A case of a suite brings its own lengths. */
struct point {
    enum bench_op op;
    int64_t at[AXIS_COUNT];
    const char *suite, *case_id; /* NULL: no suite; no case chosen */
};

enum { AXIS_MAX_VALUES = 256 };
struct axes {
    enum bench_op op;
    const char *suite;
    int count[AXIS_COUNT]; /* 0: not an axis of this operation */
    int64_t values[AXIS_COUNT][AXIS_MAX_VALUES];
};

/* Whether the point's operation uses the axis. */
bool axis_applies(const struct point *point, enum axis axis);
const char *axis_name(enum axis axis);
bool axis_is_number(enum axis axis);
bool axis_is_flag(enum axis axis);
/* Text of a value, as the option takes it. Flags have none: they are there or not. */
const char *axis_text(enum axis axis, int64_t value, char buffer[24]);

/* What a case does not say: how it is run. */
bool axis_is_of_runs(enum axis axis);

/* Options of all axes, to include in a popt table. of_cases: help leaves out those that no case has. */
struct poptOption *axes_options(bool of_cases);
/* The axes that the parsed options give for an operation, on a suite or not (NULL), the rest at their defaults. An axis
 * that none of `num_ops` operations uses is refused. CLI_OK or CLI_BAD. */
int axes_read(struct axes *axes, enum bench_op op, const char *suite, const enum bench_op *ops, int num_ops);
/* Refuses all axes but one that were given. CLI_OK or CLI_BAD. */
int axes_refuse_others(enum axis axis, const char *operation);
/* The points of the product, the last axis fastest. axes_next returns false past the end. */
void axes_first(const struct axes *axes, struct point *point, int position[AXIS_COUNT]);
bool axes_next(const struct axes *axes, struct point *point, int position[AXIS_COUNT]);

/* "prefill --format q8kv4 ...": what is computed, without what computes it (isa, threads); or with it. */
void point_print(FILE *stream, const struct point *point, bool machine);
bool point_same_inputs(const struct point *a, const struct point *b);

#endif
