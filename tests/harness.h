/* SPDX-License-Identifier: MIT
 *
 * harness.h - how checkkernel and test_faults run a test: names, options, counts, and trials.
 *
 * A trial is one call (or plan, prepare, run) with its inputs and outputs in guarded memory. It runs once on the
 * portable C kernels, where its own check compares it with the oracle, and then on every instruction set, with one,
 * two and lent threads, twice in a row, with other bytes in the outputs and in the workspace before the call. All must
 * give the same bits, write every byte they must write and no other, and read inputs only.
 *
 * The exception: kernels on AMX's tiles (a plan whose kernel is named *_amx) add in an order of their own. They stand
 * for themselves: their first run is checked with the oracle as portable C's is, so the two lie within the sum of the
 * oracle's bounds for them, and every other run must repeat the first one's bits. Where all sums are exact, they must
 * repeat portable C's.
 */
#ifndef MSA_TESTS_HARNESS_H
#define MSA_TESTS_HARNESS_H

#include "device.h"
#include "oracle.h"
#include "util.h"

/* --------------------------------------------------------------------------------------------------------- harness */

typedef struct harness_options {
    const char *program;
    const char *op, *isa, *filter; /* NULL: all */
    int32_t device;
    uint32_t seed;
    bool list, quick, bench;
    const char *cases; /* folders of case files, separated by ':' */
} harness_options;

enum { MAX_LEVELS = 8 };

/* One instruction set (or CUDA device) under test. */
typedef struct isa_level {
    const char *isa;
    msa_context *one, *two, *lent; /* by threads; a CUDA device has `one` only */
} isa_level;

typedef struct harness {
    harness_options options;
    isa_level levels[MAX_LEVELS]; /* the first is the reference */
    msa_context *portable; /* CUDA: the portable C kernels, for trials whose bits are the same everywhere; else NULL */
    int num_levels;
    int passed, failed, skipped;
    char name[200];
    const char *variant; /* what of the test is running, for messages */
    bool test_failed, test_skipped, test_void;
} harness;

/* Reads the command line, makes the contexts; ends the program on bad usage and after --help. */
harness harness_start(int argc, char **argv, const char *about);
/* Prints the counts; returns the exit status. */
int harness_finish(harness *h);

/* Begins the test `op`/`name`. False: not asked for. */
bool test_begin(harness *h, const char *op, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Notes a failure and prints one line, the first time in a test. */
void test_fail(harness *h, const char *format, ...) __attribute__((format(printf, 2, 3)));
void test_end(harness *h);
/* In place of a test's body, before test_end. */
void test_skip(harness *h, const char *reason);
/* The same where there is nothing to test, with these formats or on this device: the test is not counted. */
void test_leave_out(harness *h);
/* test_fail with the condition's text. Returns whether it holds. */
#define CHECK(h, condition) \
    ((condition) ? true : (test_fail(h, "%s:%d: not %s", __FILE__, __LINE__, #condition), false))
/* Also waits for a CUDA device, so that results can be looked at. */
#define CHECK_OK(h, call)                                                                                    \
    do {                                                                                                     \
        msa_status status_ = (call);                                                                         \
        const char *fault_ = device_wait();                                                                  \
        if (status_)                                                                                         \
            test_fail(h, "%s:%d: %s: %s", __FILE__, __LINE__, msa_status_string(status_), msa_last_error()); \
        else if (fault_)                                                                                     \
            test_fail(h, "%s:%d: %s", __FILE__, __LINE__, fault_);                                           \
    } while (0)

/* The random numbers of the test that is running. */
random_stream test_random(const harness *h);

/* ---------------------------------------------------------------------------------------------------------- trials */

typedef struct output {
    const char *name;
    region *region;
    uint8_t *written; /* a byte for each byte of the region: 1 where the call must write */
} output;

enum { MAX_OUTPUTS = 6 };

typedef struct trial trial;
struct trial {
    arena inputs, results, scratch;
    output outputs[MAX_OUTPUTS];
    int num_outputs;
    msa_plan *plan;    /* NULL for stateless calls */
    region *workspace; /* NULL where none is needed */
    uint32_t error_bits, expected_error_bits;
    bool timed;                                         /* --bench times it */
    bool same_bits;                                     /* on every device */
    bool exact;                                         /* whatever the order of its sums: no sum is rounded */
    msa_context *checked;                               /* whose results check() looks at */
    msa_status (*open)(trial *t, msa_context *context); /* makes the plan; NULL for stateless calls */
    msa_status (*run)(trial *t, msa_context *context);  /* fills error_bits */
    void (*check)(harness *h, trial *t);                /* the outputs against the oracle; NULL: levels with each other */
};

/* Adds an output; the caller marks what is written. */
output *trial_output(trial *t, const char *name, size_t bytes, size_t alignment);
/* Makes the inputs from number `first` on outputs, all with one name. */
void trial_inputs_to_outputs(trial *t, int first, const char *name);
/* Runs a trial in all variants of every level. */
void trial_run(harness *h, trial *t);
/* Runs it once, on the given context; the results stay in the outputs. */
void trial_run_once(harness *h, trial *t, msa_context *context);
void trial_free(trial *t);

/* ------------------------------------------------------------------------------------------------------- comparing */

/* Whether an output element of type `dtype` is a rounding of something within bound of expected, or both are NaN. */
bool is_near(msa_dtype dtype, double actual, double expected, double bound);

#endif /* MSA_TESTS_HARNESS_H */
