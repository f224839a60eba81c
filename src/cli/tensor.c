/* SPDX-License-Identifier: MIT
 *
 * tensor.c - named tensors in memory.
 */
#include "cli.h"
#include "safetensors.h"

#include <stdlib.h>
#include <string.h>

const char *tensor_dtype_name(enum tensor_dtype dtype)
{
    static const char *const names[] = {
#define X(id, name, bytes) name,
        TENSOR_DTYPES(X)
#undef X
    };
    return names[dtype];
}

size_t tensor_dtype_bytes(enum tensor_dtype dtype)
{
    static const unsigned char sizes[] = {
#define X(id, name, bytes) bytes,
        TENSOR_DTYPES(X)
#undef X
    };
    return sizes[dtype];
}

int64_t tensor_elements(const struct tensor *tensor)
{
    return (int64_t)(tensor->bytes / tensor_dtype_bytes(tensor->dtype));
}

bool tensor_shape_bytes(enum tensor_dtype dtype, int rank, const int64_t *shape, size_t *bytes)
{
    *bytes = tensor_dtype_bytes(dtype);
    for (int i = 0; i < rank; i++) {
        if (shape[i] < 0 || __builtin_mul_overflow(*bytes, (size_t)shape[i], bytes))
            return false;
    }
    return *bytes <= PTRDIFF_MAX;
}

static void free_tensor(struct tensor *tensor)
{
    free(tensor->data);
    free(tensor->name);
    free(tensor);
}

struct tensor *tensor_file_add(struct tensor_file *file, const char *name, enum tensor_dtype dtype, int rank,
                               const int64_t *shape)
{
    size_t bytes;
    if (!tensor_shape_bytes(dtype, rank, shape, &bytes)) {
        cli_error("tensor '%.80s' is larger than the address space", name);
        return NULL;
    }
    struct tensor **grown = realloc(file->tensors, (file->num_tensors + 1) * sizeof(*grown));
    struct tensor *tensor = calloc(1, sizeof(*tensor));
    if (grown)
        file->tensors = grown;
    if (!grown || !tensor || !(tensor->name = strdup(name)) || !(tensor->data = memory_alloc(bytes))) {
        cli_error("no memory for tensor '%.80s' (%zu bytes)", name, bytes);
        if (tensor)
            free_tensor(tensor);
        return NULL;
    }
    tensor->dtype = dtype;
    tensor->rank = rank;
    memcpy(tensor->shape, shape, (size_t)rank * sizeof(*shape));
    tensor->bytes = bytes;
    memset(tensor->data, 0, bytes);
    file->tensors[file->num_tensors++] = tensor;
    return tensor;
}

struct tensor *tensor_file_find(const struct tensor_file *file, const char *name)
{
    for (size_t i = 0; i < file->num_tensors; i++) {
        if (strcmp(file->tensors[i]->name, name) == 0)
            return file->tensors[i];
    }
    return NULL;
}

const char *tensor_file_get_metadata(const struct tensor_file *file, const char *key)
{
    for (size_t i = 0; i < file->num_pairs; i++) {
        if (strcmp(file->metadata[2 * i], key) == 0)
            return file->metadata[2 * i + 1];
    }
    return NULL;
}

int tensor_file_set_metadata(struct tensor_file *file, const char *key, const char *value)
{
    char **grown = realloc(file->metadata, 2 * (file->num_pairs + 1) * sizeof(*grown));
    if (grown)
        file->metadata = grown;
    char *key_copy = strdup(key), *value_copy = strdup(value);
    if (!grown || !key_copy || !value_copy) {
        free(key_copy);
        free(value_copy);
        return cli_error("no memory for metadata '%.80s'", key);
    }
    file->metadata[2 * file->num_pairs] = key_copy;
    file->metadata[2 * file->num_pairs + 1] = value_copy;
    file->num_pairs++;
    return CLI_OK;
}

void tensor_file_free(struct tensor_file *file)
{
    for (size_t i = 0; i < file->num_tensors; i++)
        free_tensor(file->tensors[i]);
    for (size_t i = 0; i < 2 * file->num_pairs; i++)
        free(file->metadata[i]);
    free(file->tensors);
    free(file->metadata);
    *file = (struct tensor_file)TENSOR_FILE_INIT;
}
