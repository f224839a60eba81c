/* SPDX-License-Identifier: MIT
 *
 * compare.c - compares results with the expected ones, and hashes them.
 *
 * An element x is right for an expected e if |x-e| <= atol + rtol*|e|, or both are the same infinity, or (scores only)
 * both are NaN; tolerances that the metadata leaves out are 0. Lists are right if their sets are equal and the -1 at
 * their ends are as many; counts if they are equal.
 */
#include "number.h"
#include "problem.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- hash */

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * 0x100000001B3;
    return hash;
}

uint64_t results_hash(const struct results *results)
{
    uint64_t hash = 0xCBF29CE484222325;
    for (size_t i = 0; i < results->file.num_tensors; i++) {
        const struct tensor *tensor = results->file.tensors[i];
        hash = hash_bytes(hash, tensor->name, strlen(tensor->name));
        hash = hash_bytes(hash, tensor->shape, (size_t)tensor->rank * sizeof(tensor->shape[0]));
        hash = hash_bytes(hash, tensor->data, tensor->bytes);
    }
    return hash;
}

/* ---- comparison */

/* What is said about each tensor: "out 1.20e-04 (0.35)" is the largest error, and the largest share of its tolerance
 * that an element uses up; "topk 3 of 40 wrong, first [0, 7]". */
struct report {
    char *line;
    size_t size;
    bool first;
};

__attribute__((format(printf, 2, 3))) static void say(struct report *report, const char *format, ...)
{
    size_t used = strlen(report->line);
    va_list args;
    va_start(args, format);
    vsnprintf(report->line + used, report->size - used, format, args);
    va_end(args);
}

static void say_place(struct report *report, const struct tensor *tensor, int rank, int64_t element)
{
    int64_t place[TENSOR_MAX_RANK];
    for (int axis = rank - 1; axis >= 0; axis--) {
        place[axis] = element % tensor->shape[axis];
        element /= tensor->shape[axis];
    }
    say(report, ", first [");
    for (int axis = 0; axis < rank; axis++)
        say(report, "%s%lld", axis ? ", " : "", (long long)place[axis]);
    say(report, "]");
}

static void say_name(struct report *report, const char *name)
{
    say(report, "%s%s ", report->first ? "" : ", ", name);
    report->first = false;
}

static double element(const struct tensor *tensor, int64_t i)
{
    switch (tensor->dtype) {
    case TENSOR_BF16:
        return bf16_to_f32(((const uint16_t *)tensor->data)[i]);
    case TENSOR_F16:
        return fp16_to_f32(((const uint16_t *)tensor->data)[i]);
    default:
        return ((const float *)tensor->data)[i];
    }
}

static double limit(double expected, const struct tolerance *tolerance)
{
    return tolerance->atol + tolerance->rtol * fabs(expected);
}

static bool is_right(double x, double expected, const struct tolerance *tolerance, bool nan_is_fine)
{
    if (isnan(x) || isnan(expected))
        return nan_is_fine && isnan(x) && isnan(expected);
    if (isinf(x) || isinf(expected))
        return x == expected;
    return fabs(x - expected) <= limit(expected, tolerance);
}

static int compare_floats(struct report *report, const struct tensor *got, const struct tensor *expected,
                          const struct tolerance *tolerance, bool nan_is_fine)
{
    int64_t wrong = 0, first_wrong = 0, count = tensor_elements(got);
    double worst = 0, share = 0;
    for (int64_t i = 0; i < count; i++) {
        double x = element(got, i), e = element(expected, i);
        if (isfinite(x) && isfinite(e) && x != e) {
            worst = fmax(worst, fabs(x - e));
            share = fmax(share, fabs(x - e) / limit(e, tolerance));
        }
        if (!is_right(x, e, tolerance, nan_is_fine) && wrong++ == 0)
            first_wrong = i;
    }
    say_name(report, got->name);
    say(report, "%.2e (%.2f)", worst, share);
    if (!wrong)
        return CLI_OK;
    say(report, " %lld of %lld wrong", (long long)wrong, (long long)count);
    say_place(report, got, got->rank, first_wrong);
    say(report, ": %.9g, expected %.9g", element(got, first_wrong), element(expected, first_wrong));
    return CLI_DIFFERS;
}

static int compare_int32(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static int64_t count_tail(const int32_t *list, int64_t k)
{
    int64_t tail = 0;
    while (tail < k && list[k - 1 - tail] == -1)
        tail++;
    return tail;
}

static bool lists_are_equal(const int32_t *got, const int32_t *expected, int64_t k, int32_t *scratch)
{
    if (count_tail(got, k) != count_tail(expected, k))
        return false;
    memcpy(scratch, got, (size_t)k * sizeof(*got));
    memcpy(scratch + k, expected, (size_t)k * sizeof(*got));
    qsort(scratch, (size_t)k, sizeof(*scratch), compare_int32);
    qsort(scratch + k, (size_t)k, sizeof(*scratch), compare_int32);
    return memcmp(scratch, scratch + k, (size_t)k * sizeof(*scratch)) == 0;
}

/* Rows of k ids; with k = 1 these are plain numbers. */
static int compare_lists(struct report *report, const struct tensor *got, const struct tensor *expected, int64_t k)
{
    enum { MAX_K = MSA_MAX_TOPK };
    int32_t scratch[2 * MAX_K];
    int64_t wrong = 0, first_wrong = 0, rows = tensor_elements(got) / k;
    for (int64_t i = 0; i < rows; i++) {
        const int32_t *a = (const int32_t *)got->data + i * k, *b = (const int32_t *)expected->data + i * k;
        if (!lists_are_equal(a, b, k, scratch) && wrong++ == 0)
            first_wrong = i;
    }
    say_name(report, got->name);
    if (!wrong) {
        say(report, "equal");
        return CLI_OK;
    }
    say(report, "%lld of %lld wrong", (long long)wrong, (long long)rows);
    say_place(report, got, got->rank - (k > 1), first_wrong);
    return CLI_DIFFERS;
}

int results_compare(const struct results *results, const struct problem *problem, char *line, size_t line_size)
{
    struct report report = {line, line_size, true};
    int status = CLI_OK;
    for (size_t i = 0; i < results->file.num_tensors; i++) {
        const struct tensor *got = results->file.tensors[i];
        char name[32];
        snprintf(name, sizeof(name), "expected.%s", got->name);
        const struct tensor *expected = tensor_file_find(problem->file, name);
        if (!expected)
            continue;
        int one;
        if (strcmp(got->name, "out") == 0)
            one = compare_floats(&report, got, expected, &problem->out_tolerance, false);
        else if (strcmp(got->name, "lse") == 0)
            one = compare_floats(&report, got, expected, &problem->lse_tolerance, false);
        else if (strcmp(got->name, "scores") == 0)
            one = compare_floats(&report, got, expected, &problem->scores_tolerance, true);
        else
            one = compare_lists(&report, got, expected, strcmp(got->name, "topk") == 0 ? problem->topk : 1);
        if (one > status)
            status = one;
    }
    return report.first ? cli_error("%s: there is no expected tensor of what op %s computes", problem->name,
                                    op_names[problem->op])
                        : status;
}
