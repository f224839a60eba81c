/* SPDX-License-Identifier: MIT
 *
 * safetensors.c - reads and writes the file format.
 */
#include "safetensors.h"
#include "cli.h"
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_HEADER_BYTES = 100000000 }; /* the format's own limit */

/* ---- reading */

/* A tensor as the header describes it; begin and end count from the start of the data. */
struct entry {
    const char *name;
    enum tensor_dtype dtype;
    int rank;
    int64_t shape[TENSOR_MAX_RANK];
    uint64_t begin, end;
};

static int parse_dtype(struct entry *entry, const json_t *dtype, const char *path)
{
    if (!json_is_string(dtype))
        return cli_error("%s: tensor '%.80s': dtype is missing or no text", path, entry->name);
    for (int i = 0; i < NUM_TENSOR_DTYPES; i++) {
        if (strcmp(json_string_value(dtype), tensor_dtype_name((enum tensor_dtype)i)) == 0) {
            entry->dtype = (enum tensor_dtype)i;
            return CLI_OK;
        }
    }
    return cli_error("%s: tensor '%.80s': dtype '%.80s' is unknown", path, entry->name, json_string_value(dtype));
}

static int parse_shape(struct entry *entry, const json_t *shape, const char *path)
{
    if (!json_is_array(shape))
        return cli_error("%s: tensor '%.80s': shape is missing or no list", path, entry->name);
    if (json_array_size(shape) > TENSOR_MAX_RANK)
        return cli_error("%s: tensor '%.80s': rank %zu is above %d", path, entry->name, json_array_size(shape),
                         TENSOR_MAX_RANK);
    entry->rank = (int)json_array_size(shape);
    for (int i = 0; i < entry->rank; i++) {
        const json_t *extent = json_array_get(shape, (size_t)i);
        if (!json_is_integer(extent) || json_integer_value(extent) < 0)
            return cli_error("%s: tensor '%.80s': shape[%d] is no whole number >= 0", path, entry->name, i);
        entry->shape[i] = json_integer_value(extent);
    }
    return CLI_OK;
}

static int parse_offsets(struct entry *entry, const json_t *offsets, uint64_t data_bytes, const char *path)
{
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        json_integer_value(begin) < 0 || json_integer_value(end) < json_integer_value(begin))
        return cli_error("%s: tensor '%.80s': data_offsets must be [begin, end] with 0 <= begin <= end", path,
                         entry->name);
    entry->begin = (uint64_t)json_integer_value(begin);
    entry->end = (uint64_t)json_integer_value(end);
    if (entry->end > data_bytes)
        return cli_error("%s: tensor '%.80s': data_offsets end at %" PRIu64 ", but the file holds %" PRIu64
                         " bytes of data",
                         path, entry->name, entry->end, data_bytes);
    size_t bytes;
    if (!tensor_shape_bytes(entry->dtype, entry->rank, entry->shape, &bytes))
        return cli_error("%s: tensor '%.80s': the size of its shape overflows", path, entry->name);
    if (bytes != entry->end - entry->begin)
        return cli_error("%s: tensor '%.80s': shape and dtype make %zu bytes, data_offsets %" PRIu64, path, entry->name,
                         bytes, entry->end - entry->begin);
    return CLI_OK;
}

static int compare_entries(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Sorts the entries by place and requires that they cover the data without gap or overlap. */
static int check_coverage(struct entry *entries, size_t num_entries, uint64_t data_bytes, const char *path)
{
    qsort(entries, num_entries, sizeof(*entries), compare_entries);
    uint64_t covered = 0;
    for (size_t i = 0; i < num_entries; i++) {
        if (entries[i].begin < covered)
            return cli_error("%s: tensors '%.80s' and '%.80s' overlap", path, entries[i - 1].name, entries[i].name);
        if (entries[i].begin > covered)
            return cli_error("%s: %" PRIu64 " bytes before tensor '%.80s' belong to no tensor", path,
                             entries[i].begin - covered, entries[i].name);
        covered = entries[i].end;
    }
    if (covered != data_bytes)
        return cli_error("%s: %" PRIu64 " bytes at the end belong to no tensor", path, data_bytes - covered);
    return CLI_OK;
}

static int read_metadata(struct tensor_file *file, json_t *metadata, const char *path)
{
    if (!json_is_object(metadata))
        return cli_error("%s: __metadata__ is no object", path);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return cli_error("%s: metadata '%.80s' is no text", path, key);
        if (tensor_file_set_metadata(file, key, json_string_value(value)) != CLI_OK)
            return CLI_BAD;
    }
    return CLI_OK;
}

/* Fills entries (room for every member of the header) and the file's metadata. */
static int read_entries(struct tensor_file *file, json_t *header, struct entry *entries, size_t *num_entries,
                        uint64_t data_bytes, const char *path)
{
    const char *name;
    json_t *value;
    *num_entries = 0;
    json_object_foreach(header, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) {
            if (read_metadata(file, value, path) != CLI_OK)
                return CLI_BAD;
            continue;
        }
        struct entry *entry = &entries[(*num_entries)++];
        entry->name = name;
        if (!json_is_object(value))
            return cli_error("%s: tensor '%.80s': its description is no object", path, name);
        if (parse_dtype(entry, json_object_get(value, "dtype"), path) != CLI_OK ||
            parse_shape(entry, json_object_get(value, "shape"), path) != CLI_OK ||
            parse_offsets(entry, json_object_get(value, "data_offsets"), data_bytes, path) != CLI_OK)
            return CLI_BAD;
    }
    return check_coverage(entries, *num_entries, data_bytes, path);
}

/* The stream stands at the start of the data. */
static int read_tensors(struct tensor_file *file, json_t *header, uint64_t data_bytes, FILE *stream, const char *path)
{
    struct entry *entries = calloc(json_object_size(header) + 1, sizeof(*entries));
    if (!entries)
        return cli_error("%s: no memory for %zu tensors", path, json_object_size(header));
    size_t num_entries;
    int status = read_entries(file, header, entries, &num_entries, data_bytes, path);
    for (size_t i = 0; status == CLI_OK && i < num_entries; i++) {
        const struct entry *e = &entries[i];
        struct tensor *tensor = tensor_file_add(file, e->name, e->dtype, e->rank, e->shape);
        if (!tensor)
            status = CLI_BAD;
        else if (fread(tensor->data, 1, tensor->bytes, stream) != tensor->bytes)
            status = cli_error("%s: tensor '%.80s' cannot be read: %s", path, e->name, strerror(errno));
    }
    free(entries);
    return status;
}

/* Reads and parses the header; leaves the stream at the start of the data. NULL after a message. */
static json_t *read_header(FILE *stream, uint64_t *data_bytes, const char *path)
{
    if (fseeko(stream, 0, SEEK_END) != 0) {
        cli_error("%s: cannot be read: %s", path, strerror(errno));
        return NULL;
    }
    uint64_t file_bytes = (uint64_t)ftello(stream);
    rewind(stream);

    unsigned char prefix[8];
    if (fread(prefix, 1, sizeof(prefix), stream) != sizeof(prefix)) {
        cli_error("%s: %" PRIu64 " bytes are too short for a safetensors file", path, file_bytes);
        return NULL;
    }
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--)
        length = length << 8 | prefix[i];
    if (length > file_bytes - sizeof(prefix) || length > MAX_HEADER_BYTES) {
        cli_error("%s: header length %" PRIu64 " is above %s", path, length,
                  length > MAX_HEADER_BYTES ? "the limit of 100000000 bytes" : "what the file holds");
        return NULL;
    }
    *data_bytes = file_bytes - sizeof(prefix) - length;

    char *text = malloc(length + 1);
    if (!text || fread(text, 1, length, stream) != length) {
        cli_error("%s: the header cannot be read: %s", path, strerror(errno));
        free(text);
        return NULL;
    }
    json_error_t error;
    json_t *header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    free(text);
    if (!header) {
        cli_error("%s: the header is no valid JSON: %s (byte %d)", path, error.text, error.position);
    } else if (!json_is_object(header)) {
        cli_error("%s: the header is no JSON object", path);
        json_decref(header);
        header = NULL;
    }
    return header;
}

int tensor_file_read_stream(struct tensor_file *file, FILE *stream, const char *path)
{
    *file = (struct tensor_file)TENSOR_FILE_INIT;
    uint64_t data_bytes;
    json_t *header = read_header(stream, &data_bytes, path);
    if (!header)
        return CLI_BAD;
    int status = read_tensors(file, header, data_bytes, stream, path);
    json_decref(header);
    if (status != CLI_OK)
        tensor_file_free(file);
    return status;
}

int tensor_file_read(struct tensor_file *file, const char *path)
{
    *file = (struct tensor_file)TENSOR_FILE_INIT;
    int descriptor = open(path, O_RDONLY | O_NONBLOCK); /* opening a FIFO must not wait for a writer */
    FILE *stream = descriptor >= 0 ? fdopen(descriptor, "rb") : NULL;
    if (!stream) {
        int status = cli_error("%s: cannot be opened: %s", path, strerror(errno));
        if (descriptor >= 0)
            close(descriptor);
        return status;
    }
    struct stat info;
    int status;
    if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode))
        status = cli_error("%s: is no regular file", path);
    else
        status = tensor_file_read_stream(file, stream, path);
    fclose(stream);
    return status;
}

/* ---- writing */

/* The header as text, padded with spaces so that the data starts at a multiple of 8. NULL if there is no memory. */
static char *make_header(const struct tensor_file *file)
{
    json_t *header = json_object();
    int failed = !header;
    if (file->num_pairs) {
        json_t *metadata = json_object();
        for (size_t i = 0; i < file->num_pairs; i++)
            failed |= json_object_set_new(metadata, file->metadata[2 * i], json_string(file->metadata[2 * i + 1]));
        failed |= json_object_set_new(header, "__metadata__", metadata);
    }
    uint64_t offset = 0;
    for (size_t i = 0; i < file->num_tensors; i++) {
        const struct tensor *tensor = file->tensors[i];
        json_t *shape = json_array();
        for (int axis = 0; axis < tensor->rank; axis++)
            failed |= json_array_append_new(shape, json_integer(tensor->shape[axis]));
        json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor_dtype_name(tensor->dtype), "shape", shape,
                                  "data_offsets", (json_int_t)offset, (json_int_t)(offset + tensor->bytes));
        failed |= json_object_set_new(header, tensor->name, entry);
        offset += tensor->bytes;
    }
    char *text = failed ? NULL : json_dumps(header, JSON_COMPACT);
    json_decref(header);
    if (!text)
        return NULL;
    size_t length = strlen(text), padded_length = (length + 7) / 8 * 8;
    char *padded = realloc(text, padded_length + 1);
    if (!padded) {
        free(text);
        return NULL;
    }
    memset(padded + length, ' ', padded_length - length);
    padded[padded_length] = '\0';
    return padded;
}

static bool write_stream(const struct tensor_file *file, const char *header, FILE *stream)
{
    uint64_t length = strlen(header);
    unsigned char prefix[8];
    for (int i = 0; i < 8; i++)
        prefix[i] = (unsigned char)(length >> (8 * i));
    bool good =
        fwrite(prefix, 1, sizeof(prefix), stream) == sizeof(prefix) && fwrite(header, 1, length, stream) == length;
    for (size_t i = 0; good && i < file->num_tensors; i++)
        good = fwrite(file->tensors[i]->data, 1, file->tensors[i]->bytes, stream) == file->tensors[i]->bytes;
    return good;
}

int tensor_file_write(const struct tensor_file *file, const char *path)
{
    char *header = make_header(file);
    if (!header)
        return cli_error("%s: no memory to write it", path);
    struct output output;
    int status = output_open(&output, "-o", path);
    if (status == CLI_OK)
        status = output_close(&output, write_stream(file, header, output.stream));
    free(header);
    return status;
}
