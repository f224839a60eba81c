/* SPDX-License-Identifier: MIT
 *
 * casefile.c - see casefile.h. The header of a safetensors file is JSON of two levels: {"__metadata__": {key: text,
 * ...}, tensor: {"dtype": text, "shape": [...], "data_offsets": [begin, end]}, ...}. Case files escape quotes in texts
 * only.
 */
#include "casefile.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ENTRIES = 64 };

struct casefile {
    char *header;
    int num_tensors, num_texts;
    char *tensor_names[MAX_ENTRIES];
    case_tensor tensors[MAX_ENTRIES];
    void *copies[MAX_ENTRIES];
    char *keys[MAX_ENTRIES], *texts[MAX_ENTRIES];
};

static void skip(char **p)
{
    while (isspace((unsigned char)**p) || **p == ',' || **p == ':')
        ++*p;
}

/* A quoted string, ended with a zero in place of its quote. */
static char *string(char **p)
{
    skip(p);
    char *begin = ++*p;
    while (**p && **p != '"')
        *p += **p == '\\' ? 2 : 1;
    *(*p)++ = 0;
    return begin;
}

static int numbers(char **p, int64_t *values, int room)
{
    int count = 0;
    skip(p);
    for (++*p; **p && **p != ']';) {
        int64_t value = strtoll(*p, p, 10);
        if (count < room)
            values[count++] = value;
        skip(p);
    }
    ++*p;
    return count;
}

static msa_dtype parse_dtype(const char *name)
{
    static const struct {
        const char *name;
        msa_dtype dtype;
    } dtypes[] = {{"F32", MSA_F32}, {"BF16", MSA_BF16}, {"F16", MSA_FP16}, {"F8_E4M3", MSA_E4M3}, {"U8", MSA_NVFP4}};
    for (int i = 0; i < 5; i++)
        if (!strcmp(name, dtypes[i].name))
            return dtypes[i].dtype;
    return MSA_DTYPE_DEFAULT;
}

static void parse_texts(casefile *f, char **p)
{
    skip(p);
    for (++*p; skip(p), **p == '"';) {
        f->keys[f->num_texts] = string(p);
        f->texts[f->num_texts++] = string(p);
    }
    ++*p;
}

static bool parse_tensor(casefile *f, char **p, const char *data, size_t data_bytes)
{
    case_tensor *t = &f->tensors[f->num_tensors];
    int64_t offsets[2] = {0, 0};
    skip(p);
    for (++*p; skip(p), **p == '"';) {
        const char *field = string(p);
        if (!strcmp(field, "dtype"))
            t->dtype = parse_dtype(string(p));
        else if (!strcmp(field, "shape"))
            t->rank = numbers(p, t->shape, 4);
        else
            numbers(p, offsets, 2);
    }
    ++*p;
    if (offsets[0] < 0 || offsets[1] < offsets[0] || (size_t)offsets[1] > data_bytes)
        return false;
    size_t bytes = (size_t)(offsets[1] - offsets[0]);
    void *copy = aligned_alloc(256, (bytes + 256) / 256 * 256);
    if (!copy)
        return false;
    t->data = memcpy(copy, data + offsets[0], bytes);
    f->copies[f->num_tensors++] = copy;
    return true;
}

static bool parse(casefile *f, const char *data, size_t data_bytes)
{
    char *p = f->header;
    skip(&p);
    for (++p; skip(&p), *p == '"';) {
        char *name = string(&p);
        if (f->num_tensors == MAX_ENTRIES || f->num_texts > MAX_ENTRIES / 2)
            return false;
        if (!strcmp(name, "__metadata__")) {
            parse_texts(f, &p);
            continue;
        }
        f->tensor_names[f->num_tensors] = name;
        if (!parse_tensor(f, &p, data, data_bytes))
            return false;
    }
    return *p == '}';
}

static char *read_file(const char *path, size_t *bytes)
{
    FILE *stream = fopen(path, "rb");
    if (!stream)
        return NULL;
    fseek(stream, 0, SEEK_END);
    *bytes = (size_t)ftell(stream);
    rewind(stream);
    char *contents = malloc(*bytes + 1);
    if (contents && fread(contents, 1, *bytes, stream) != *bytes) {
        free(contents);
        contents = NULL;
    }
    fclose(stream);
    return contents;
}

casefile *casefile_open(const char *path)
{
    size_t bytes;
    uint64_t header_bytes;
    char *contents = read_file(path, &bytes);
    casefile *f = calloc(1, sizeof *f);
    bool good = contents && f && bytes > sizeof header_bytes;
    if (good) {
        memcpy(&header_bytes, contents, sizeof header_bytes);
        good = header_bytes <= bytes - sizeof header_bytes && (f->header = malloc(header_bytes + 1));
    }
    if (good) {
        memcpy(f->header, contents + sizeof header_bytes, header_bytes);
        f->header[header_bytes] = 0;
        good = parse(f, contents + sizeof header_bytes + header_bytes, bytes - sizeof header_bytes - header_bytes);
    }
    free(contents);
    if (good)
        return f;
    casefile_close(f);
    return NULL;
}

const case_tensor *casefile_tensor(const casefile *f, const char *name)
{
    for (int i = 0; i < f->num_tensors; i++)
        if (!strcmp(f->tensor_names[i], name))
            return &f->tensors[i];
    return NULL;
}

const char *casefile_text(const casefile *f, const char *key)
{
    for (int i = 0; i < f->num_texts; i++)
        if (!strcmp(f->keys[i], key))
            return f->texts[i];
    return NULL;
}

void casefile_close(casefile *f)
{
    if (!f)
        return;
    for (int i = 0; i < f->num_tensors; i++)
        free(f->copies[i]);
    free(f->header);
    free(f);
}
