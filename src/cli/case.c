/* SPDX-License-Identifier: MIT
 *
 * case.c - checks a case file's names, dtypes, shapes and metadata, and reduces every cache layout to views.
 */
#include "case.h"
#include "cli.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const op_names[] = {"prefill", "decode", "index", "layer", NULL};
const char *const topk_order_names[] = {"page", "score", NULL};
const char *const scale_order_names[] = {"linear", "quad", NULL};

#define TRY(call)             \
    do {                      \
        if ((call) != CLI_OK) \
            return CLI_BAD;   \
    } while (0)

/* The sizes that shapes speak of. The first tensor that mentions one sets it, the others must agree. */
enum { MAX_SIZES = 16, MAX_SIZE_NAME = 16 };
struct reader {
    const char *path;
    const struct tensor_file *file;
    struct size {
        char name[MAX_SIZE_NAME];
        int64_t value;
    } sizes[MAX_SIZES];
    int num_sizes;
};

static bool is_number(const char *name, int64_t *value)
{
    char *end;
    *value = strtoll(name, &end, 10);
    return *end == '\0';
}

/* A size by its name or, for a number, itself. False if no tensor has set it yet. */
static bool find_size(const struct reader *reader, const char *name, int64_t *value)
{
    for (int i = 0; i < reader->num_sizes; i++) {
        if (strcmp(reader->sizes[i].name, name) == 0) {
            *value = reader->sizes[i].value;
            return true;
        }
    }
    return is_number(name, value);
}

static void set_size(struct reader *reader, const char *name, int64_t value)
{
    struct size *size = &reader->sizes[reader->num_sizes++];
    snprintf(size->name, sizeof(size->name), "%s", name);
    size->value = value;
}

static int32_t get_size(const struct reader *reader, const char *name)
{
    int64_t value = 0;
    find_size(reader, name, &value);
    return (int32_t)value;
}

/* ---- tensors */

__attribute__((format(printf, 3, 4))) static void append(char *text, size_t size, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, size - used, format, args);
    va_end(args);
}

static int shape_error(const struct reader *reader, const struct tensor *tensor, const char *shape)
{
    char has[256] = "", expected[256] = "", name[MAX_SIZE_NAME];
    int64_t value;
    for (int i = 0; i < tensor->rank; i++)
        append(has, sizeof(has), "%s%lld", i ? ", " : "", (long long)tensor->shape[i]);
    for (int length; sscanf(shape, " %15s%n", name, &length) == 1; shape += length) {
        append(expected, sizeof(expected), "%s%s", *expected ? ", " : "", name);
        if (!is_number(name, &value) && find_size(reader, name, &value))
            append(expected, sizeof(expected), "=%lld", (long long)value);
    }
    return cli_error("%s: %s has shape [%s], expected [%s]", reader->path, tensor->name, has, expected);
}

/* `shape` is a list of names of sizes and of numbers, separated by spaces. */
static int check_shape(struct reader *reader, const struct tensor *tensor, const char *shape)
{
    char name[MAX_SIZE_NAME];
    const char *rest = shape;
    int axis = 0;
    for (int length; sscanf(rest, " %15s%n", name, &length) == 1; rest += length, axis++) {
        if (axis >= tensor->rank)
            return shape_error(reader, tensor, shape);
        int64_t value, extent = tensor->shape[axis];
        if (extent > INT32_MAX)
            return cli_error("%s: %s has an extent of %lld, above 2^31-1", reader->path, tensor->name,
                             (long long)extent);
        if (!find_size(reader, name, &value))
            set_size(reader, name, extent);
        else if (value != extent)
            return shape_error(reader, tensor, shape);
    }
    return axis == tensor->rank ? CLI_OK : shape_error(reader, tensor, shape);
}

#define BIT(dtype) (1u << (dtype))
enum {
    BF16 = BIT(TENSOR_BF16),
    FLOATS_16 = BF16 | BIT(TENSOR_F16),
    E4M3 = BIT(TENSOR_F8_E4M3),
    CODES = BIT(TENSOR_U8),
    F32 = BIT(TENSOR_F32),
    I32 = BIT(TENSOR_I32),
};

static int check_dtype(const struct reader *reader, const struct tensor *tensor, unsigned dtypes)
{
    if (dtypes & BIT(tensor->dtype))
        return CLI_OK;
    char list[128] = "";
    for (int i = 0; i < NUM_TENSOR_DTYPES; i++) {
        if (dtypes & BIT(i))
            append(list, sizeof(list), "%s%s", *list ? " or " : "", tensor_dtype_name((enum tensor_dtype)i));
    }
    return cli_error("%s: %s has dtype %s, expected %s", reader->path, tensor->name, tensor_dtype_name(tensor->dtype),
                     list);
}

/* Finds and checks a tensor; *tensor is NULL if the file has none of that name. */
enum presence { REQUIRED, OPTIONAL };
static int read_tensor(struct reader *reader, const char *name, enum presence presence, unsigned dtypes,
                       const char *shape, struct tensor **tensor)
{
    *tensor = tensor_file_find(reader->file, name);
    if (!*tensor)
        return presence == OPTIONAL ? CLI_OK : cli_error("%s: tensor %s is missing", reader->path, name);
    TRY(check_dtype(reader, *tensor, dtypes));
    return check_shape(reader, *tensor, shape);
}

/* ---- metadata */

/* The text of a key (NULL: not there) and how messages name it. */
enum { LABEL_SIZE = 512 };
static const char *find_metadata(const struct reader *reader, const char *key, char label[LABEL_SIZE])
{
    snprintf(label, LABEL_SIZE, "%s: metadata %s", reader->path, key);
    return tensor_file_get_metadata(reader->file, key);
}

/* These leave the value as it is if the key is not there. */
static int read_int(const struct reader *reader, const char *key, int64_t low, int64_t high, int32_t *value)
{
    char label[LABEL_SIZE];
    const char *text = find_metadata(reader, key, label);
    int64_t number = *value;
    if (text)
        TRY(parse_int(label, text, low, high, &number));
    *value = (int32_t)number;
    return CLI_OK;
}

static int read_choice(const struct reader *reader, const char *key, const char *const *choices, int *index)
{
    char label[LABEL_SIZE];
    const char *text = find_metadata(reader, key, label);
    return text ? parse_choice(label, text, choices, index) : CLI_OK;
}

static int read_double(const struct reader *reader, const char *key, double *value)
{
    char label[LABEL_SIZE];
    const char *text = find_metadata(reader, key, label);
    return text ? parse_double(label, text, value) : CLI_OK;
}

static int read_tolerance(const struct reader *reader, const char *absolute, const char *relative,
                          struct tolerance *tolerance)
{
    TRY(read_double(reader, absolute, &tolerance->atol));
    TRY(read_double(reader, relative, &tolerance->rtol));
    if (tolerance->atol < 0 || tolerance->rtol < 0)
        return cli_error("%s: metadata %s and %s must be >= 0", reader->path, absolute, relative);
    return CLI_OK;
}

static int read_metadata(const struct reader *reader, struct problem *problem)
{
    static const char *const out_dtype_names[] = {"bf16", "fp16", "BF16", "FP16", NULL};
    if (!tensor_file_get_metadata(reader->file, "op"))
        return cli_error("%s: metadata op is missing", reader->path);
    int op = 0, scale_order = MSA_SCALE_LINEAR, topk_order = MSA_TOPK_ORDER_PAGE, out_dtype = -1;
    double sm_scale = MSA_DEFAULT_SM_SCALE;
    TRY(read_choice(reader, "op", op_names, &op));
    TRY(read_choice(reader, "v_scale_order", scale_order_names, &scale_order));
    TRY(read_choice(reader, "topk_order", topk_order_names, &topk_order));
    TRY(read_choice(reader, "out_dtype", out_dtype_names, &out_dtype));
    TRY(read_int(reader, "topk", 1, MSA_MAX_TOPK, &problem->topk));
    TRY(read_int(reader, "init_pages", 0, INT32_MAX, &problem->init_pages));
    TRY(read_int(reader, "local_pages", 0, INT32_MAX, &problem->local_pages));
    TRY(read_double(reader, "sm_scale", &sm_scale));
    TRY(read_tolerance(reader, "out_atol", "out_rtol", &problem->out_tolerance));
    TRY(read_tolerance(reader, "lse_atol", "lse_rtol", &problem->lse_tolerance));
    TRY(read_tolerance(reader, "scores_atol", "scores_rtol", &problem->scores_tolerance));
    problem->op = (enum problem_op)op;
    problem->v_scale_order = (msa_scale_order)scale_order;
    problem->topk_order = (msa_topk_order)topk_order;
    problem->out_dtype = out_dtype < 0 ? MSA_DTYPE_DEFAULT : out_dtype % 2 ? MSA_FP16 : MSA_BF16;
    problem->sm_scale = (float)sm_scale;
    if (!(problem->sm_scale > 0) || !isfinite(problem->sm_scale))
        return cli_error("%s: metadata sm_scale is %g, must be > 0 and finite in FP32", reader->path, sm_scale);
    return CLI_OK;
}

/* ---- parts of a problem */

static int check_names(const struct reader *reader)
{
    /* clang-format off */
    static const char *const known[] = {
        "q", "k", "v", "kv", "kv_slots", "k_scale", "v_scale", "q_descale", "k_descale", "v_descale", "k_global_scale",
        "v_global_scale", "page_table", "cu_seqlens_q", "kv_lens", "cu_seqlens_k", "topk", "index_q", "index_k",
        "index_k_scale", "expected.out", "expected.lse", "expected.scores", "expected.topk", "expected.num_valid_pages",
    };
    /* clang-format on */
    for (size_t i = 0; i < reader->file->num_tensors; i++) {
        const char *name = reader->file->tensors[i]->name;
        size_t j = 0;
        while (j < sizeof(known) / sizeof(known[0]) && strcmp(name, known[j]) != 0)
            j++;
        if (j == sizeof(known) / sizeof(known[0]))
            return cli_error("%s: tensor '%.80s' is unknown", reader->path, name);
    }
    return CLI_OK;
}

static int read_requests(struct reader *reader, struct problem *problem)
{
    TRY(read_tensor(reader, "cu_seqlens_q", REQUIRED, I32, "B+1", &problem->cu_seqlens_q));
    if (get_size(reader, "B+1") < 1)
        return cli_error("%s: cu_seqlens_q is empty; it has one element more than there are requests", reader->path);
    problem->batch = get_size(reader, "B+1") - 1;
    set_size(reader, "B", problem->batch);
    TRY(read_tensor(reader, "kv_lens", OPTIONAL, I32, "B", &problem->kv_lens));
    TRY(read_tensor(reader, "cu_seqlens_k", OPTIONAL, I32, "B+1", &problem->cu_seqlens_k));
    if (!problem->kv_lens == !problem->cu_seqlens_k)
        return cli_error("%s: exactly one of kv_lens and cu_seqlens_k is needed, the file has %s", reader->path,
                         problem->kv_lens ? "both" : "neither");
    TRY(read_tensor(reader, "page_table", REQUIRED, I32, "B max_pages", &problem->page_table));
    problem->max_pages = get_size(reader, "max_pages");
    return CLI_OK;
}

static msa_dtype library_dtype(const struct tensor *tensor)
{
    switch (tensor->dtype) {
    case TENSOR_BF16:
        return MSA_BF16;
    case TENSOR_F16:
        return MSA_FP16;
    case TENSOR_F8_E4M3:
        return MSA_E4M3;
    default:
        return MSA_NVFP4; /* U8: all that check_dtype lets through besides */
    }
}

/* Dense [pages, heads, 128, row]. */
static struct view dense_view(struct tensor *tensor, int64_t row_bytes, int64_t heads)
{
    return (struct view){tensor, 0, heads * 128 * row_bytes, 128 * row_bytes, row_bytes};
}

static int read_separate_cache(struct reader *reader, struct problem *problem)
{
    struct tensor *k, *v, *k_scale, *v_scale;
    TRY(read_tensor(reader, "k", REQUIRED, FLOATS_16 | E4M3 | CODES, "pages Hkv 128 D", &k));
    TRY(read_tensor(reader, "v", REQUIRED, BIT(k->dtype), "pages Hkv 128 D", &v));
    bool nvfp4 = k->dtype == TENSOR_U8;
    TRY(check_shape(reader, k, nvfp4 ? "pages Hkv 128 64" : "pages Hkv 128 128"));
    int64_t heads = get_size(reader, "Hkv"), row_bytes = nvfp4 ? 64 : 128 * (int64_t)tensor_dtype_bytes(k->dtype);
    problem->k = dense_view(k, row_bytes, heads);
    problem->v = dense_view(v, row_bytes, heads);

    enum presence presence = nvfp4 ? REQUIRED : OPTIONAL; /* scales beside other formats are refused further down */
    TRY(read_tensor(reader, "k_scale", presence, E4M3, "pages Hkv 128 8", &k_scale));
    TRY(read_tensor(reader, "v_scale", presence, E4M3, "pages Hkv 128 8", &v_scale));
    problem->k_scale = dense_view(k_scale, 8, heads);
    problem->v_scale = dense_view(v_scale, 8, heads);
    return CLI_OK;
}

/* K and V of a token in one row. */
static int read_joint_cache(struct reader *reader, struct problem *problem)
{
    struct tensor *kv;
    TRY(read_tensor(reader, "kv", REQUIRED, FLOATS_16 | E4M3, "pages Hkv 128 256", &kv));
    int64_t row_bytes = 256 * (int64_t)tensor_dtype_bytes(kv->dtype);
    problem->k = problem->v = dense_view(kv, row_bytes, get_size(reader, "Hkv"));
    problem->v.offset = row_bytes / 2;
    return CLI_OK;
}

/* Slots of 9216 bytes, K of head h in slot 2h, its V in the next one; a slot is 8192 bytes of codes, then 1024 of
 * scales. */
static int read_slot_cache(struct reader *reader, struct problem *problem)
{
    enum { SLOT = 128 * 72, CODE_BYTES = 128 * 64 };
    struct tensor *slots;
    TRY(read_tensor(reader, "kv_slots", REQUIRED, CODES, "pages 2*Hkv 128 72", &slots));
    int64_t num_slots = get_size(reader, "2*Hkv");
    if (num_slots % 2)
        return cli_error("%s: kv_slots has %lld slots a page, expected two a KV head", reader->path,
                         (long long)num_slots);
    set_size(reader, "Hkv", num_slots / 2);
    problem->k = (struct view){slots, 0, num_slots * SLOT, 2 * SLOT, 64};
    problem->v = (struct view){slots, SLOT, num_slots * SLOT, 2 * SLOT, 64};
    problem->k_scale = (struct view){slots, CODE_BYTES, num_slots * SLOT, 2 * SLOT, 8};
    problem->v_scale = (struct view){slots, SLOT + CODE_BYTES, num_slots * SLOT, 2 * SLOT, 8};
    return CLI_OK;
}

static int read_cache(struct reader *reader, struct problem *problem)
{
    bool separate = tensor_file_find(reader->file, "k") || tensor_file_find(reader->file, "v");
    bool joint = tensor_file_find(reader->file, "kv"), slots = tensor_file_find(reader->file, "kv_slots");
    if (separate + joint + slots != 1)
        return cli_error("%s: exactly one of k with v, kv, and kv_slots is needed, the file has %s", reader->path,
                         separate || joint || slots ? "more" : "none");
    if (slots && (tensor_file_find(reader->file, "k_scale") || tensor_file_find(reader->file, "v_scale")))
        return cli_error("%s: kv_slots holds its scales, k_scale and v_scale must not be given", reader->path);
    TRY(separate ? read_separate_cache(reader, problem)
        : joint  ? read_joint_cache(reader, problem)
                 : read_slot_cache(reader, problem));
    problem->kv_dtype = library_dtype(problem->k.tensor);
    problem->num_kv_heads = get_size(reader, "Hkv");
    problem->num_pages = get_size(reader, "pages");
    return CLI_OK;
}

/* A scale of a tensor stands only beside dtypes that have it. */
static int check_scale(const struct reader *reader, const char *name, const struct tensor *whose, unsigned dtypes)
{
    if (!tensor_file_find(reader->file, name) || (dtypes & BIT(whose->dtype)))
        return CLI_OK;
    return cli_error("%s: %s must not be given: %s has dtype %s, only %s has it", reader->path, name, whose->name,
                     tensor_dtype_name(whose->dtype), dtypes == CODES ? "U8 (NVFP4)" : "F8_E4M3");
}

/* One factor for all heads, or one a KV head. */
static int read_descale(struct reader *reader, const char *name, struct tensor **descale)
{
    const struct tensor *found = tensor_file_find(reader->file, name);
    bool single = found && found->rank == 1 && found->shape[0] == 1;
    return read_tensor(reader, name, OPTIONAL, F32, single ? "1" : "Hkv", descale);
}

static int read_attention(struct reader *reader, struct problem *problem)
{
    TRY(read_tensor(reader, "q", REQUIRED, FLOATS_16 | E4M3, "total_q Hq 128", &problem->q));
    TRY(read_cache(reader, problem));
    TRY(read_descale(reader, "q_descale", &problem->q_descale));
    TRY(read_descale(reader, "k_descale", &problem->k_descale));
    TRY(read_descale(reader, "v_descale", &problem->v_descale));
    TRY(read_tensor(reader, "k_global_scale", OPTIONAL, F32, "1", &problem->k_global_scale));
    TRY(read_tensor(reader, "v_global_scale", OPTIONAL, F32, "1", &problem->v_global_scale));
    if (problem->op != OP_LAYER)
        TRY(read_tensor(reader, "topk", REQUIRED, I32, "Hkv total_q k", &problem->list));
    problem->q_dtype = library_dtype(problem->q);
    problem->num_q_heads = get_size(reader, "Hq");
    if (problem->num_q_heads < 1 || problem->num_kv_heads < 1)
        return cli_error("%s: there are %d query and %d KV heads, expected at least one of each", reader->path,
                         problem->num_q_heads, problem->num_kv_heads);
    int ratio = problem->num_q_heads / problem->num_kv_heads;
    if (problem->num_q_heads % problem->num_kv_heads || ratio > MSA_MAX_GQA_RATIO)
        return cli_error("%s: q has %d heads, expected 1 to %d times the %d KV heads", reader->path,
                         problem->num_q_heads, MSA_MAX_GQA_RATIO, problem->num_kv_heads);
    const struct tensor *k = problem->k.tensor;
    TRY(check_scale(reader, "k_scale", k, CODES));
    TRY(check_scale(reader, "v_scale", k, CODES));
    TRY(check_scale(reader, "k_global_scale", k, CODES));
    TRY(check_scale(reader, "v_global_scale", k, CODES));
    TRY(check_scale(reader, "k_descale", k, E4M3));
    TRY(check_scale(reader, "v_descale", k, E4M3));
    return check_scale(reader, "q_descale", problem->q, E4M3);
}

static int read_index(struct reader *reader, struct problem *problem)
{
    struct tensor *index_k, *scale;
    TRY(read_tensor(reader, "index_q", REQUIRED, BF16 | E4M3, "total_q H 128", &problem->index_q));
    TRY(read_tensor(reader, "index_k", REQUIRED, BF16 | E4M3 | CODES, "index_pages 128 index_D", &index_k));
    bool nvfp4 = index_k->dtype == TENSOR_U8;
    TRY(check_shape(reader, index_k, nvfp4 ? "index_pages 128 64" : "index_pages 128 128"));
    TRY(read_tensor(reader, "index_k_scale", nvfp4 ? REQUIRED : OPTIONAL, E4M3, "index_pages 128 8", &scale));
    problem->index_k = dense_view(index_k, nvfp4 ? 64 : 128 * (int64_t)tensor_dtype_bytes(index_k->dtype), 1);
    problem->index_k_scale = dense_view(scale, 8, 1);
    problem->index_q_dtype = library_dtype(problem->index_q);
    problem->index_k_dtype = library_dtype(index_k);
    problem->num_index_heads = get_size(reader, "H");
    problem->num_index_pages = get_size(reader, "index_pages");
    if (problem->num_index_heads < 1)
        return cli_error("%s: index_q has no heads", reader->path);
    if (problem->op == OP_LAYER && problem->num_kv_heads % problem->num_index_heads)
        return cli_error("%s: index_q has %d heads, expected a divisor of the %d KV heads", reader->path,
                         problem->num_index_heads, problem->num_kv_heads);
    return check_scale(reader, "index_k_scale", index_k, CODES);
}

/* Answers of what the operation computes, so that a comparison finds them in the results' shapes. */
static int read_expected(struct reader *reader, const struct problem *problem)
{
    struct tensor *tensor;
    if (op_has_attention(problem->op)) {
        TRY(read_tensor(reader, "expected.out", OPTIONAL, F32 | FLOATS_16, "total_q Hq 128", &tensor));
        TRY(read_tensor(reader, "expected.lse", OPTIONAL, F32, "total_q Hq", &tensor));
    }
    if (op_has_index(problem->op)) {
        TRY(read_tensor(reader, "expected.scores", OPTIONAL, F32, "H total_q max_pages", &tensor));
        TRY(read_tensor(reader, "expected.topk", OPTIONAL, I32, "H total_q k", &tensor));
        TRY(read_tensor(reader, "expected.num_valid_pages", OPTIONAL, I32, "total_q", &tensor));
    }
    return CLI_OK;
}

int problem_from_file(struct problem *problem, struct tensor_file *file, const char *name)
{
    *problem = (struct problem){
        .name = name,
        .topk = 16,
        .local_pages = 1,
        .index_outputs = MSA_INDEX_SCORES | MSA_INDEX_SELECTION,
        .file = file,
    };
    struct reader reader = {.path = name, .file = file};
    TRY(check_names(&reader));
    TRY(read_metadata(&reader, problem));
    set_size(&reader, "k", problem->topk);
    TRY(read_requests(&reader, problem));
    if (op_has_attention(problem->op))
        TRY(read_attention(&reader, problem));
    if (op_has_index(problem->op))
        TRY(read_index(&reader, problem));
    problem->total_q = get_size(&reader, "total_q");
    return read_expected(&reader, problem);
}
