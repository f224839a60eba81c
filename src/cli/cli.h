/* SPDX-License-Identifier: MIT
 *
 * cli.h - what every file of the command-line tool uses: subcommands, messages, option parsing, progress.
 *
 *   safetensors.h  tensors in memory, read from and written to a file
 *   case.h         a file's tensors and metadata, checked and turned into a problem
 *   device.h       a context and memory where it computes
 *   problem.h      runs a problem through the public API and compares the results
 */
#ifndef MSA_CLI_H
#define MSA_CLI_H

#include "msa.h"

#include <popt.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* Exit statuses, and what every function here that can fail returns. */
enum {
    CLI_OK = 0,
    CLI_DIFFERS = 1, /* a comparison failed */
    CLI_BAD = 2,     /* bad usage, bad input, error bits, no memory: one line on stderr has said what */
};

enum { CLI_MAX_THREADS = 1024 }; /* as many as a context takes */

/* Subcommands: argv[0] is "msa NAME". */
int cmd_run(int argc, const char **argv);
int cmd_check(int argc, const char **argv);
int cmd_make(int argc, const char **argv);
int cmd_bench(int argc, const char **argv);
int cmd_info(int argc, const char **argv);

/* Prints "msa: " and the text as one line on stderr (control characters, which may come from a file, become '?').
 * Returns CLI_BAD. */
int cli_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Prints a name that may hold anything, such as that of a file, on one line: control characters become \xHH. */
void print_name(FILE *stream, const char *name);
/* The same as cli_error with the message of the library call that just failed: "msa: WHAT: message". */
int cli_library_error(const char *what);

/* ---- options */

/* Parses argv by a popt table (end it with POPT_AUTOHELP POPT_TABLEEND); `arguments` stands in the usage line after the
 * options, e.g. "CASE...". On CLI_OK, *context gives the arguments by poptGetArg; free it with poptFreeContext. popt
 * allocates the strings it stores: bind them to static variables. */
int options_parse(int argc, const char **argv, const struct poptOption *table, const char *arguments,
                  poptContext *context);

/* The file of -o, which messages call `kind`, from the list that popt makes of its values (POPT_ARG_ARGV): there must be
 * one that can be written, and neither is empty nor "-". CLI_OK or CLI_BAD. */
int output_read(const char *command, const char *kind, char **values, const char **path);

/* Values as text, the whole of it. `name` is the option or metadata key that the message names. */
int parse_int(const char *name, const char *text, int64_t low, int64_t high, int64_t *value);
int parse_double(const char *name, const char *text, double *value); /* finite, decimal */
/* Index of the text in a NULL-terminated list. */
int parse_choice(const char *name, const char *text, const char *const *choices, int *index);
int parse_device(const char *name, const char *text, int32_t *device); /* cpu | cuda | cuda:N */

extern const char *const precision_names[]; /* indexed by msa_precision */
extern const char *const strategy_names[];  /* indexed by msa_strategy */

enum plan_kind {
    PLAN_BY_OP = 0, /* decode plans for op decode, prefill plans for all else */
    PLAN_PREFILL,
    PLAN_DECODE,
};

struct run_options {
    int32_t device;  /* MSA_DEVICE_CPU or a CUDA ordinal */
    int32_t threads; /* 0: all */
    const char *isa; /* cap, or NULL */
    msa_precision precision;
    msa_strategy strategy;
    enum plan_kind plan;
    int poison;    /* 0..255: byte for all memory that the problem does not make visible; outputs too. -1: leave it */
    bool progress; /* show progress on a terminal */
};
#define RUN_OPTIONS_INIT                                                                       \
    {                                                                                          \
        MSA_DEVICE_CPU, 0, NULL, MSA_PRECISION_EXACT, MSA_STRATEGY_AUTO, PLAN_BY_OP, -1, false \
    }

/* The options of run and check as a table to include (POPT_ARG_INCLUDE_TABLE), and their values once parsed. */
extern struct poptOption run_option_table[];
int run_options_read(struct run_options *options);

/* ---- memory */

/* 256-byte aligned, at least one byte, for free(); NULL: none. What is large lies in huge pages where the system has them, as
 * the memory of measured peaks does: the walks of a page table can take as long as the work. */
void *memory_alloc(size_t bytes);

/* ---- progress: a line on stderr, rewritten in place, if that is a terminal and the work takes over a second */

void progress_begin(const char *what);
void progress_update(double fraction); /* 0..1; cheap to call often, from one thread */
void progress_end(void);
/* An msa_parallel_for_fn that reports progress; data is an int, the number of threads. */
int progress_parallel_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg);

#endif
