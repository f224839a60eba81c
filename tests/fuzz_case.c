/* SPDX-License-Identifier: MIT
 *
 * libFuzzer target for the reader of case files: safetensors.c, case.c, and what runs a case that was accepted.
 *
 * An input that begins with '{' is a header: tensors in it that have no data_offsets get the next free place, its
 * length is put in front, and what follows its first NUL, repeated, is the data. So a change of one shape still makes a
 * file that hangs together. All else is a file as it stands.
 *
 * Whatever the bytes: a refused file gives status 2 and one line on stderr; an accepted one runs, and gives the same
 * bits when everything that no visible key names is overwritten.
 */
#include <jansson.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case.h"
#include "problem.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

/* Larger files and longer runs cost time and reach no other code. */
enum { MAX_DATA = 1 << 20, MAX_WORK = 256 };

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stdout, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);      \
            abort();                                                                           \
        }                                                                                      \
    } while (0)

static char *messages; /* what has been printed on stderr since the stream was rewound */
static size_t message_bytes;
static struct device device;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    struct run_options options = RUN_OPTIONS_INIT;

    (void)argc;
    (void)argv;
    options.threads = 1;
    CHECK(device_open(&device, &options) == CLI_OK);
    /* OpenMP's start may load a tool written in C++, whose streams keep the stderr that they find for good. */
    omp_get_max_threads();
    return 0;
}

/* Bytes of the tensor that a header entry describes; MAX_DATA + 1 if that is unclear or too much. */
static size_t entry_bytes(const json_t *entry)
{
    const json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape");
    int64_t extents[TENSOR_MAX_RANK];
    const size_t rank = json_array_size(shape);
    size_t bytes = 0;
    int type = 0;

    while (type < NUM_TENSOR_DTYPES &&
           !(json_is_string(dtype) && !strcmp(json_string_value(dtype), tensor_dtype_name(type))))
        type++;
    if (type == NUM_TENSOR_DTYPES || rank > TENSOR_MAX_RANK)
        return MAX_DATA + 1;
    for (size_t i = 0; i < rank; i++)
        extents[i] = json_integer_value(json_array_get(shape, i));
    return tensor_shape_bytes(type, (int)rank, extents, &bytes) && bytes <= MAX_DATA ? bytes : MAX_DATA + 1;
}

/* Gives a place to each tensor that has none; NULL if that changes nothing. *data_bytes grows to what is needed. */
static char *place_tensors(const uint8_t *text, size_t size, size_t *data_bytes)
{
    json_t *header = json_loadb((const char *)text, size, 0, NULL), *entry;
    const char *name;
    char *placed = NULL;
    bool changed = false;

    json_object_foreach(header, name, entry) {
        const size_t bytes = entry_bytes(entry);

        if (!json_is_object(entry) || json_object_get(entry, "data_offsets") || bytes > MAX_DATA - *data_bytes)
            continue;
        json_object_set_new(entry, "data_offsets",
                            json_pack("[I, I]", (json_int_t)*data_bytes, (json_int_t)(*data_bytes + bytes)));
        *data_bytes += bytes;
        changed = true;
    }
    if (changed)
        placed = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    return placed;
}

/* The file that an input stands for; free() it. */
static uint8_t *make_file(const uint8_t *input, size_t size, size_t *file_size)
{
    if (!size || input[0] != '{') {
        uint8_t *file = malloc(size + 1);

        CHECK(file);
        *file_size = size;
        return memcpy(file, input, size);
    }
    const uint8_t *end = memchr(input, 0, size);
    const size_t text_bytes = end ? (size_t)(end - input) : size, pattern = size - text_bytes;
    size_t data_bytes = 0;
    char *placed = place_tensors(input, text_bytes, &data_bytes);
    const size_t header_bytes = placed ? strlen(placed) : text_bytes;
    uint8_t *file = malloc(8 + header_bytes + data_bytes);

    CHECK(file);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)((uint64_t)header_bytes >> (8 * i));
    memcpy(file + 8, placed ? (const void *)placed : input, header_bytes);
    for (size_t i = 0; i < data_bytes; i++)
        file[8 + header_bytes + i] = pattern > 1 ? end[1 + i % (pattern - 1)] : 0;
    *file_size = 8 + header_bytes + data_bytes;
    free(placed);
    return file;
}

static bool small(const struct problem *problem)
{
    const int64_t pages = problem->max_pages < 4 ? problem->max_pages + 1 : 5;
    int64_t rows = 0;

    if (op_has_attention(problem->op))
        rows += problem->num_q_heads;
    if (op_has_index(problem->op))
        rows += problem->num_index_heads;
    return problem->total_q <= MAX_WORK && problem->total_q * rows * pages <= MAX_WORK;
}

static int run(struct problem *problem, int poison, uint64_t *hash)
{
    struct run_options options = RUN_OPTIONS_INIT;
    struct results results = RESULTS_INIT;
    char line[1024] = "";

    options.poison = poison;
    int status = problem_run(problem, &device, &options, &results);

    CHECK(status != CLI_DIFFERS);
    if (status != CLI_OK)
        return status;
    *hash = results_hash(&results);
    status = results_compare(&results, problem, line, sizeof(line));
    CHECK(status == CLI_OK || status == CLI_DIFFERS || status == CLI_BAD);
    CHECK(status == CLI_BAD || strlen(line) > 0);
    tensor_file_free(&results.file);
    return status;
}

static int try_file(struct tensor_file *file)
{
    struct problem problem;
    uint64_t hash = 0, poisoned_hash = 0;
    int status = problem_from_file(&problem, file, "input");

    if (status != CLI_OK || !small(&problem))
        return status;
    status = run(&problem, -1, &hash);
    if (status == CLI_BAD)
        return status;
    CHECK(run(&problem, 0x7F, &poisoned_hash) == status);
    CHECK(hash == poisoned_hash);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    size_t file_size;
    uint8_t *bytes = make_file(input, size, &file_size);
    FILE *stream = fmemopen(bytes, file_size, "rb"), *terminal = stderr;
    struct tensor_file file;

    CHECK(stream);
    stderr = open_memstream(&messages, &message_bytes);
    CHECK(stderr);
    int status = tensor_file_read_stream(&file, stream, "input");

    CHECK(status == CLI_OK || (status == CLI_BAD && file.num_tensors == 0));
    if (status == CLI_OK)
        status = try_file(&file);
    tensor_file_free(&file);
    fclose(stderr);
    stderr = terminal;
    if (status == CLI_BAD) {
        CHECK(strncmp(messages, "msa: ", 5) == 0);
        CHECK(strchr(messages, '\n') == messages + message_bytes - 1);
    } else {
        CHECK(message_bytes == 0);
    }
    free(messages);
    fclose(stream);
    free(bytes);
    return 0;
}
