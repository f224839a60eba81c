/* SPDX-License-Identifier: MIT
 *
 * cli.c - messages, and values given as text.
 */
#include "cli.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int cli_error(const char *format, ...)
{
    char line[8192];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    for (char *c = line; *c; c++) {
        if (iscntrl((unsigned char)*c))
            *c = '?';
    }
    fprintf(stderr, "msa: %s\n", line);
    return CLI_BAD;
}

void print_name(FILE *stream, const char *name)
{
    for (; *name; name++)
        fprintf(stream, iscntrl((unsigned char)*name) ? "\\x%02x" : "%c", (unsigned char)*name);
}

int cli_library_error(const char *what)
{
    return cli_error("%s: %s", what, msa_last_error());
}

int parse_int(const char *name, const char *text, int64_t low, int64_t high, int64_t *value)
{
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (isspace((unsigned char)text[0]) || end == text || *end)
        return cli_error("%s: '%.80s' is not a whole number", name, text);
    if (errno || number < low || number > high)
        return cli_error("%s: %s is outside %lld..%lld", name, text, (long long)low, (long long)high);
    *value = number;
    return CLI_OK;
}

int parse_double(const char *name, const char *text, double *value)
{
    /* strtod alone would also take leading spaces, hexadecimal, "nan" and "inf". The tool never calls setlocale, so the
     * decimal point is a point. */
    char *end = NULL;
    if (text[strspn(text, "+-.0123456789eE")] == '\0')
        *value = strtod(text, &end);
    if (!end || end == text || *end || !isfinite(*value))
        return cli_error("%s: '%.80s' is not a finite decimal number", name, text);
    return CLI_OK;
}

int parse_choice(const char *name, const char *text, const char *const *choices, int *index)
{
    char list[512] = "";
    for (int i = 0; choices[i]; i++) {
        if (strcmp(text, choices[i]) == 0) {
            *index = i;
            return CLI_OK;
        }
        size_t used = strlen(list);
        snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "", choices[i]);
    }
    return cli_error("%s: '%.80s' is none of: %s", name, text, list);
}

int parse_device(const char *name, const char *text, int32_t *device)
{
    if (strcmp(text, "cpu") == 0) {
        *device = MSA_DEVICE_CPU;
        return CLI_OK;
    }
    int64_t ordinal = 0;
    if (strncmp(text, "cuda:", 5) == 0) {
        int status = parse_int(name, text + 5, 0, INT32_MAX, &ordinal);
        if (status != CLI_OK)
            return status;
    } else if (strcmp(text, "cuda") != 0) {
        return cli_error("%s: '%.80s' is none of: cpu, cuda, cuda:N", name, text);
    }
    *device = (int32_t)ordinal;
    return CLI_OK;
}

/* ---- memory */

void *memory_alloc(size_t bytes)
{
    const size_t huge = (size_t)2 << 20;
    void *memory = NULL;
    if (posix_memalign(&memory, bytes < huge ? 256 : huge, bytes ? bytes : 1))
        return NULL;
    if (bytes >= huge)
        madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}
