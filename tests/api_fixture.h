/* SPDX-License-Identifier: MIT
 *
 * A tiny valid problem for every function of msa.h, and the engine of the table tests: break exactly one argument of a
 * valid call, look at the status and the message, and see that nothing was written and that the valid call still works.
 */
#ifndef API_FIXTURE_H
#define API_FIXTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "msa.h"

/* Extents of the problem; every one is above 1 so that every stride counts. */
enum {
    FIX_BATCH = 2,
    FIX_ROWS = 5,
    FIX_Q_HEADS = 4,
    FIX_KV_HEADS = 2,
    FIX_TOPK = 3,
    FIX_KV_LEN = 256,
    FIX_TABLE = 2, /* pages a request */
    FIX_PAGES = 3,
    FIX_STATES = 2,
};

struct fixture {
    msa_context *context;
    msa_plan *plan;       /* prepared, for prepare and run */
    msa_plan *other_plan; /* of another operation */
    msa_plan **plan_out;
    uint32_t *bits_out;
    bool no_args; /* pass NULL for the struct of arguments */

    /* One struct an argument of the API; the tests break fields of these. */
    msa_context_options options;
    msa_context_info context_info;
    msa_kernel_info kernel_info;
    msa_plan_info plan_info;
    msa_attention_desc attention;
    msa_index_desc index;
    msa_step step;
    msa_attention_args attend;
    msa_index_args score;
    msa_topk_args topk;
    msa_combine_args combine;
    msa_merge_state states[FIX_STATES];
    msa_merge_args merge;
    msa_quantise_args quantise;
    msa_convert_args convert;
    msa_cache_write_args write;
    size_t kernel_index;

    /* All tensors and the workspace lie in one arena, with gaps between them, so that one comparison sees any write. */
    uint8_t *arena, *snapshot;
    size_t used, remembered;
};

/* A context with two lent threads (serial_for), the arena and the valid stateless calls. */
void fixture_open(struct fixture *f);
void fixture_close(struct fixture *f);

typedef msa_status plan_attention_fn(msa_context *, const msa_attention_desc *, msa_plan **);
typedef msa_status plan_index_fn(msa_context *, const msa_index_desc *, msa_plan **);
typedef msa_status prepare_fn(msa_plan *, const msa_step *, msa_stream);

/* Sets attention, step and attend for the formats, then plans and prepares with the functions given. */
void fixture_attention(struct fixture *f, msa_dtype q, msa_dtype kv, int partials, plan_attention_fn *plan,
                       prepare_fn *prepare);
/* The same for index, step and score. */
void fixture_index(struct fixture *f, msa_dtype q, msa_dtype k, int outputs, plan_index_fn *plan, prepare_fn *prepare);

/* Bytes from the arena, filled with noise, 256-byte aligned, at least 64 bytes from their neighbours. */
void *fixture_place(struct fixture *f, size_t bytes);
/* Remembers what is placed; says whether a byte of it, or of the gaps, has changed since; puts it back. */
void fixture_remember(struct fixture *f);
bool fixture_untouched(const struct fixture *f);
void fixture_restore(struct fixture *f);

/* A parallel_for that runs everything in the calling thread, in rising order. */
int serial_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg);

/* How a row of a table breaks a field of the fixture. */
enum breakage { SET_I32, SET_I64, SET_F32, SET_NULL, SET_SHIFT, SET_ALIAS };
struct row {
    size_t offset; /* of the field in struct fixture */
    enum breakage how;
    int64_t value; /* new value; bytes to shift a pointer by; offset of the pointer to take */
    float number;  /* SET_F32 */
    msa_status status;
    const char *name, *text, *rule; /* the message has all three; text NULL: the number that was set */
};

#define ROW(s, field, how, value, number, status, text, rule) \
    {offsetof(struct fixture, s.field), how, value, number, status, #field, text, rule}
#define I32(s, field, value, rule) ROW(s, field, SET_I32, value, 0, MSA_ERROR_INVALID_ARGUMENT, NULL, rule)
#define I64(s, field, value, rule) ROW(s, field, SET_I64, value, 0, MSA_ERROR_INVALID_ARGUMENT, NULL, rule)
#define F32(s, field, value, text, rule) ROW(s, field, SET_F32, 0, value, MSA_ERROR_INVALID_ARGUMENT, text, rule)
#define NUL(s, field) ROW(s, field, SET_NULL, 0, 0, MSA_ERROR_INVALID_ARGUMENT, "NULL", "must be given")
#define SHIFT(s, field, bytes, rule) ROW(s, field, SET_SHIFT, bytes, 0, MSA_ERROR_INVALID_ARGUMENT, "0x", rule)
#define ALIAS(s, field, other, rule) \
    ROW(s, field, SET_ALIAS, offsetof(struct fixture, other), 0, MSA_ERROR_INVALID_ARGUMENT, "0x", rule)
/* What this library, or this device, has no code for. */
#define NO_CODE(s, field, value, rule) ROW(s, field, SET_I32, value, 0, MSA_ERROR_UNSUPPORTED, NULL, rule)
/* A format: the message shows its name. */
#define DTYPE(s, field, dtype, rule) ROW(s, field, SET_I32, MSA_##dtype, 0, MSA_ERROR_UNSUPPORTED, #dtype, rule)
#define DTYPE_RANGE(s, field) \
    I32(s, field, -1, "must be 0..6"), I32(s, field, 7, "must be 0..6"), I32(s, field, INT32_MAX, "must be 0..6")
/* Arguments that are not fields of a struct. */
#define NUL_ARG(member, name) \
    {offsetof(struct fixture, member), SET_NULL, 0, 0, MSA_ERROR_INVALID_ARGUMENT, name, "NULL", "must"}
#define NO_ARGS(name) \
    {offsetof(struct fixture, no_args), SET_NULL, 0, 0, MSA_ERROR_INVALID_ARGUMENT, name, "NULL", "struct"}
#define OTHER_PLAN                                                                                                \
    {offsetof(struct fixture, plan), SET_ALIAS, offsetof(struct fixture, other_plan), 0, MSA_ERROR_INVALID_ARGUMENT, \
     "plan", "a plan of", "must be a plan of"}
#define SIZE_FIELD(s, type)                                                                              \
    I64(s, size, 0, "INIT macro"), I64(s, size, 4, "INIT macro"), I64(s, size, INT64_MAX, "INIT macro"), \
        I64(s, size, (int64_t)sizeof(type) - 8, "INIT macro")

/* Strides in a struct `s`: negative, misaligned, past the address space; for outputs also overlapping ones. */
#define STRIDE(s, field, align)                                                                            \
    I64(s, field, -(align), "must not be negative"), I64(s, field, INT64_MIN + 1, "must not be negative"), \
        I64(s, field, (align) / 2, "must be a multiple of " #align),                                       \
        I64(s, field, INT64_MAX, "must be a multiple of "), I64(s, field, INT64_MAX / 16 * 16, "2^63 bytes")
#define OVERLAP(s, field, align) I64(s, field, 0, "overlap"), I64(s, field, align, "overlap")

typedef msa_status call_fn(struct fixture *f);
/* Every row: the broken call fails as told and touches nothing; then the valid one succeeds. */
void check_rows(struct fixture *f, call_fn *call, const struct row *rows, size_t num_rows);
#define CHECK_ROWS(f, call, rows) check_rows(f, call, rows, sizeof(rows) / sizeof((rows)[0]))

#endif
