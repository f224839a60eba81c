/* SPDX-License-Identifier: MIT
 *
 * safetensors.h - named tensors in memory, and the safetensors file format.
 *
 * A file is: header length (8 bytes, little endian), header (JSON: name -> dtype, shape, data_offsets; text pairs under
 * "__metadata__"), data. The reader trusts nothing: every tensor is checked against the file before memory is taken for
 * it.
 */
#ifndef MSA_SAFETENSORS_H
#define MSA_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* X(enumerator, name in the file, bytes an element) */
#define TENSOR_DTYPES(X)            \
    X(TENSOR_F32, "F32", 4)         \
    X(TENSOR_BF16, "BF16", 2)       \
    X(TENSOR_F16, "F16", 2)         \
    X(TENSOR_F8_E4M3, "F8_E4M3", 1) \
    X(TENSOR_F8_E5M2, "F8_E5M2", 1) \
    X(TENSOR_U8, "U8", 1)           \
    X(TENSOR_I32, "I32", 4)         \
    X(TENSOR_F64, "F64", 8)         \
    X(TENSOR_I64, "I64", 8)         \
    X(TENSOR_U64, "U64", 8)         \
    X(TENSOR_U32, "U32", 4)         \
    X(TENSOR_I16, "I16", 2)         \
    X(TENSOR_U16, "U16", 2)         \
    X(TENSOR_I8, "I8", 1)           \
    X(TENSOR_BOOL, "BOOL", 1)

enum tensor_dtype {
#define X(id, name, bytes) id,
    TENSOR_DTYPES(X) NUM_TENSOR_DTYPES
#undef X
};

enum { TENSOR_MAX_RANK = 8 };

struct tensor {
    char *name;
    enum tensor_dtype dtype;
    int rank;
    int64_t shape[TENSOR_MAX_RANK];
    size_t bytes;
    void *data; /* dense, 256-byte aligned; not NULL even if empty */
};

struct tensor_file {
    struct tensor **tensors; /* each its own allocation: addresses last as long as the file */
    size_t num_tensors;
    char **metadata; /* key, value, key, value, ... */
    size_t num_pairs;
};
#define TENSOR_FILE_INIT \
    {                    \
        NULL, 0, NULL, 0 \
    }

const char *tensor_dtype_name(enum tensor_dtype dtype);
size_t tensor_dtype_bytes(enum tensor_dtype dtype);
int64_t tensor_elements(const struct tensor *tensor);
/* Bytes of a dense tensor; false if negative or beyond the address space. */
bool tensor_shape_bytes(enum tensor_dtype dtype, int rank, const int64_t *shape, size_t *bytes);

/* Both return 0, or 2 after a message that starts with `path`; *file is then empty. */
int tensor_file_read(struct tensor_file *file, const char *path);
int tensor_file_read_stream(struct tensor_file *file, FILE *stream, const char *path);
/* The file of -o, as output.h writes files: whole. 0 or 2. */
int tensor_file_write(const struct tensor_file *file, const char *path);
void tensor_file_free(struct tensor_file *file);

/* A new zeroed tensor; NULL after a message if there is no memory. */
struct tensor *tensor_file_add(struct tensor_file *file, const char *name, enum tensor_dtype dtype, int rank,
                               const int64_t *shape);
struct tensor *tensor_file_find(const struct tensor_file *file, const char *name);     /* NULL: none */
const char *tensor_file_get_metadata(const struct tensor_file *file, const char *key); /* NULL: none */
/* The key must be new. 0, or 2 after a message. */
int tensor_file_set_metadata(struct tensor_file *file, const char *key, const char *value);

#endif
