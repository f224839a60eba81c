/* SPDX-License-Identifier: MIT
 *
 * axes.c - the table of axes, and what is done with it: options, parsing, defaults, product, text.
 */
#include "axes.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

const char *const bench_op_names[] = {"prefill", "decode", "index", "layer", "topk", "combine", "quantise", NULL};
const char *const pattern_names[] = {"even", "clustered", "scattered", "shared", NULL};
const char *const isa_names[] = {"best", "c", "avx2", "avx512", "avx512bf16", "amx", "neon", NULL};
static const char *const scores_names[] = {"random", "ascending", "equal", NULL};

/* Operations as bits. The two ways to shape the index, by queries after a prefix and by new tokens of a batch of
 * contexts, are two bits. */
enum {
    PREFILL = 1 << BENCH_PREFILL,
    DECODE = 1 << BENCH_DECODE,
    INDEX = 1 << BENCH_INDEX,
    LAYER = 1 << BENCH_LAYER,
    TOPK = 1 << BENCH_TOPK,
    COMBINE = 1 << BENCH_COMBINE,
    QUANTISE = 1 << BENCH_QUANTISE,
    INDEX_DECODE = QUANTISE << 1,
    ATTENTION = PREFILL | DECODE | LAYER,
    ANY_INDEX = INDEX | INDEX_DECODE,
    ALL = ATTENTION | ANY_INDEX | TOPK | COMBINE | QUANTISE,
};

const struct format formats[] = {
    {"bf16", MSA_BF16, MSA_BF16, ALL & ~TOPK},         {"fp16", MSA_FP16, MSA_FP16, ATTENTION | COMBINE | QUANTISE},
    {"q8kv8", MSA_E4M3, MSA_E4M3, ATTENTION},          {"q8kv4", MSA_E4M3, MSA_NVFP4, ATTENTION},
    {"bf16kv8", MSA_BF16, MSA_E4M3, ATTENTION},        {"bf16kv4", MSA_BF16, MSA_NVFP4, ATTENTION},
    {"fp16kv8", MSA_FP16, MSA_E4M3, ATTENTION},        {"fp16kv4", MSA_FP16, MSA_NVFP4, ATTENTION},
    {"fp8", MSA_E4M3, MSA_E4M3, ANY_INDEX | QUANTISE}, {"nvfp4", MSA_E4M3, MSA_NVFP4, ANY_INDEX | QUANTISE},
};
enum { NUM_FORMATS = sizeof(formats) / sizeof(*formats) };

enum kind { NUMBER, CHOICE, FORMAT, FLAG };

static const struct axis_info {
    const char *name;
    int ops;
    enum kind kind;
    int64_t low, high;          /* NUMBER */
    const char *const *choices; /* CHOICE */
    const char *help, *values;
} infos[AXIS_COUNT] = {
    [AXIS_FORMAT] =
        {"format", ALL & ~TOPK, FORMAT, 0, 0, NULL,
         "number formats; attention: bf16 fp16 q8kv8 q8kv4 and bf16kv8 bf16kv4 fp16kv8 fp16kv4; index: bf16 "
         "fp8 nvfp4; combine: bf16 fp16; quantise: fp8 nvfp4, with --cache also bf16 fp16",
         "NAME"},
    [AXIS_INDEX_FORMAT] = {"index-format", LAYER, FORMAT, 0, 0, NULL, "layer: formats of the index", "bf16|fp8|nvfp4"},
    [AXIS_Q_HEADS] = {"q-heads", ATTENTION | COMBINE, NUMBER, 1, 1024, NULL, "query heads (default 64)", "N"},
    [AXIS_KV_HEADS] = {"kv-heads", ATTENTION | QUANTISE, NUMBER, 1, 1024, NULL, "KV heads (default 4)", "N"},
    [AXIS_INDEX_HEADS] = {"index-heads", LAYER | ANY_INDEX, NUMBER, 1, 64, NULL, "index heads (default 4)", "N"},
    [AXIS_BATCH] = {"batch", ATTENTION | ANY_INDEX, NUMBER, 1, 65536, NULL,
                    "requests (default 1; decode, and with --decode, 64)", "N"},
    [AXIS_QUERIES] = {"queries", PREFILL | INDEX | LAYER | COMBINE, NUMBER, 1, MSA_MAX_KV_LEN, NULL,
                      "prefill, index, layer: new tokens a request; combine: tokens (default 2048)", "N"},
    [AXIS_PREFIX] = {"prefix", PREFILL | INDEX | LAYER, NUMBER, 0, MSA_MAX_KV_LEN, NULL,
                     "prefill, index, layer: tokens before the new ones (default 30720)", "N"},
    [AXIS_CONTEXT] = {"context", DECODE | INDEX_DECODE, NUMBER, 0, MSA_MAX_KV_LEN, NULL,
                      "decode, index --decode: final length, new tokens included (default 32768)", "N"},
    [AXIS_NEW] = {"new", DECODE | INDEX_DECODE, NUMBER, 1, 65536, NULL,
                  "decode, index --decode: new tokens a request (default 1)", "N"},
    [AXIS_DECODE] =
        {"decode", ANY_INDEX | LAYER, FLAG, 0, 1, NULL,
         "decode plans, of index and layer (make: of index); of an index, --batch, --context and --new give "
         "the shape",
         NULL},
    [AXIS_ROWS] = {"rows", TOPK | QUANTISE, NUMBER, 1, INT32_MAX, NULL,
                   "topk: rows of scores (default 256); quantise: tokens (default 32768)", "N"},
    [AXIS_PAGES] = {"pages", TOPK, NUMBER, 1, MSA_MAX_KV_LEN / MSA_PAGE_SIZE, NULL,
                    "topk: pages a row, the own one included (default 8192)", "N"},
    [AXIS_K] = {"k", ATTENTION | ANY_INDEX | TOPK, NUMBER, 1, MSA_MAX_TOPK, NULL,
                "pages a query attends to (default 16)", "N"},
    [AXIS_SCORES] = {"scores", TOPK, CHOICE, 0, 0, scores_names, "topk: kind of scores (default random)",
                     "random|ascending|equal"},
    [AXIS_SPLITS] = {"splits", COMBINE, NUMBER, 1, MSA_MAX_SPLITS, NULL, "combine: partial results (default 16)", "N"},
    [AXIS_CACHE] = {"cache", QUANTISE, FLAG, 0, 1, NULL, "quantise: write K and V into pages, by slot", NULL},
    [AXIS_PATTERN] = {"pattern", PREFILL | DECODE, CHOICE, 0, 0, pattern_names,
                      "which pages are selected (default: prefill even, decode shared)",
                      "even|clustered|scattered|shared"},
    [AXIS_SEED] = {"seed", ALL, NUMBER, 0, INT64_MAX, NULL, "of all random numbers (default 0)", "N"},
    [AXIS_SCORES_ONLY] = {"scores-only", ANY_INDEX, FLAG, 0, 1, NULL, "index: scores without selection", NULL},
    [AXIS_PRECISION] = {"precision", ATTENTION | ANY_INDEX, CHOICE, 0, 0, precision_names, "default exact",
                        "exact|fast"},
    [AXIS_STRATEGY] = {"strategy", ATTENTION, CHOICE, 0, 0, strategy_names, "default auto",
                       "auto|query-major|page-major"},
    [AXIS_ISA] = {"isa", ALL, CHOICE, 0, 0, isa_names, "cap on the CPU instruction set (default best)",
                  "best|c|avx2|avx512|avx512bf16|amx|neon"},
    [AXIS_THREADS] = {"threads", ALL, NUMBER, 0, 1024, NULL, "CPU threads (default 0: all)", "N"},
};

static char *texts[AXIS_COUNT]; /* as given; FLAG: not used */
static int flags[AXIS_COUNT];

bool axis_is_of_runs(enum axis axis)
{
    return axis == AXIS_SCORES_ONLY || axis == AXIS_PRECISION || axis == AXIS_STRATEGY || axis == AXIS_ISA;
}

struct poptOption *axes_options(bool of_cases)
{
    static struct poptOption table[AXIS_COUNT + 1]; /* a zeroed entry ends it */
    for (int a = 0; a < AXIS_COUNT; a++) {
        bool flag = infos[a].kind == FLAG;
        table[a].longName = infos[a].name;
        bool hidden = of_cases && (!(infos[a].ops & (ATTENTION | ANY_INDEX)) || axis_is_of_runs((enum axis)a));
        table[a].argInfo = (flag ? POPT_ARG_NONE : POPT_ARG_STRING) | (hidden ? POPT_ARGFLAG_DOC_HIDDEN : 0);
        table[a].arg = flag ? (void *)&flags[a] : (void *)&texts[a];
        table[a].descrip = infos[a].help;
        table[a].argDescrip = infos[a].values;
    }
    return table;
}

static int op_bit(enum bench_op op, bool decode)
{
    return op == BENCH_INDEX && decode ? INDEX_DECODE : 1 << op;
}

static bool applies(enum axis axis, enum bench_op op, bool decode, const char *suite)
{
    bool length = axis == AXIS_BATCH || axis == AXIS_QUERIES || axis == AXIS_PREFIX;
    return (infos[axis].ops & op_bit(op, decode)) && !(suite && length);
}

bool axis_applies(const struct point *point, enum axis axis)
{
    return applies(axis, point->op, point->at[AXIS_DECODE], point->suite);
}

const char *axis_name(enum axis axis)
{
    return infos[axis].name;
}

bool axis_is_number(enum axis axis)
{
    return infos[axis].kind == NUMBER;
}

bool axis_is_flag(enum axis axis)
{
    return infos[axis].kind == FLAG;
}

const char *axis_text(enum axis axis, int64_t value, char buffer[24])
{
    if (infos[axis].kind == FORMAT)
        return formats[value].name;
    if (infos[axis].kind == CHOICE)
        return infos[axis].choices[value];
    snprintf(buffer, 24, "%lld", (long long)value);
    return buffer;
}

static int format_find(const char *name)
{
    for (int f = 0; f < NUM_FORMATS; f++) {
        if (strcmp(formats[f].name, name) == 0)
            return f;
    }
    return -1;
}

static int64_t axis_default(enum axis axis, enum bench_op op, const struct axes *axes)
{
    switch (axis) {
    case AXIS_FORMAT:
        return format_find(op == BENCH_INDEX || op == BENCH_QUANTISE ? "fp8" : op == BENCH_COMBINE ? "bf16" : "q8kv4");
    case AXIS_INDEX_FORMAT:
        return format_find(formats[axes->values[AXIS_FORMAT][0]].q == MSA_E4M3 ? "fp8" : "bf16");
    case AXIS_Q_HEADS:
        return 64;
    case AXIS_KV_HEADS:
    case AXIS_INDEX_HEADS:
        return 4;
    case AXIS_BATCH:
        return op == BENCH_DECODE || flags[AXIS_DECODE] ? 64 : 1;
    case AXIS_QUERIES:
        return op == BENCH_LAYER && flags[AXIS_DECODE] ? 1 : 2048;
    case AXIS_PREFIX:
        return 30720;
    case AXIS_CONTEXT:
        return 32768;
    case AXIS_NEW:
        return 1;
    case AXIS_ROWS:
        return op == BENCH_TOPK ? 256 : 32768;
    case AXIS_PAGES:
        return 8192;
    case AXIS_K:
    case AXIS_SPLITS:
        return 16;
    case AXIS_PATTERN:
        return op == BENCH_DECODE ? PATTERN_SHARED : PATTERN_EVEN;
    default: /* the first choice, no flag, all threads, seed 0 */
        return 0;
    }
}

/* A whole number, with K or M for 1024 or 1048576 times it. */
static int parse_size(const char *option, const char *text, int64_t low, int64_t high, int64_t *value)
{
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : 0;
    if (!shift || end == text || end[1] || isspace((unsigned char)text[0]))
        return parse_int(option, text, low, high, value);
    if (errno || number < 0 || number > high >> shift || number << shift < low)
        return cli_error("%s: %s is outside %lld..%lld", option, text, (long long)low, (long long)high);
    *value = number << shift;
    return CLI_OK;
}

static int append(struct axes *axes, enum axis axis, const char *option, int64_t value)
{
    if (axes->count[axis] == AXIS_MAX_VALUES)
        return cli_error("%s: more than %d values", option, AXIS_MAX_VALUES);
    axes->values[axis][axes->count[axis]++] = value;
    return CLI_OK;
}

/* One item between commas: a number, or first:last, first:last:step, first:last:xFACTOR. */
static int parse_numbers(struct axes *axes, enum axis axis, const char *option, char *item)
{
    int64_t low = infos[axis].low, high = infos[axis].high, first, last, step = 1;
    char whole[81];
    snprintf(whole, sizeof(whole), "%s", item);
    char *first_text = strsep(&item, ":"), *last_text = strsep(&item, ":"), *step_text = strsep(&item, ":");
    bool multiply = step_text && step_text[0] == 'x';
    char factor[128];
    snprintf(factor, sizeof(factor), "%s: factor of '%s'", option, whole);
    if (item)
        return cli_error("%s: '%s' is none of: N, FIRST:LAST, FIRST:LAST:STEP, FIRST:LAST:xFACTOR", option, whole);
    if (parse_size(option, first_text, low, high, &first) != CLI_OK)
        return CLI_BAD;
    last = first;
    if ((last_text && parse_size(option, last_text, low, high, &last) != CLI_OK) ||
        (step_text && parse_size(multiply ? factor : option, step_text + multiply, multiply ? 2 : 1, MSA_MAX_KV_LEN,
                                 &step) != CLI_OK))
        return CLI_BAD;
    if (last < first || (multiply && first == 0))
        return cli_error("%s: the range %s:%s is empty or starts at 0 with a factor", option, first_text, last_text);
    for (int64_t value = first; value <= last; value = multiply ? value * step : value + step) {
        if (append(axes, axis, option, value) != CLI_OK)
            return CLI_BAD;
        if (value > INT64_MAX / 2 / step)
            break;
    }
    return CLI_OK;
}

static int parse_format(struct axes *axes, enum axis axis, const char *option, const char *item)
{
    int bit = axis == AXIS_INDEX_FORMAT ? INDEX : op_bit(axes->op, false), choice;
    const char *choices[NUM_FORMATS + 1];
    int count = 0;
    for (int f = 0; f < NUM_FORMATS; f++) {
        if (formats[f].ops & bit)
            choices[count++] = formats[f].name;
    }
    choices[count] = NULL;
    return parse_choice(option, item, choices, &choice) == CLI_OK
               ? append(axes, axis, option, format_find(choices[choice]))
               : CLI_BAD;
}

static int parse_axis(struct axes *axes, enum axis axis)
{
    char option[32], *list = strdup(texts[axis]), *rest = list;
    int status = list ? CLI_OK : cli_error("out of memory");
    snprintf(option, sizeof(option), "--%s", infos[axis].name);
    while (status == CLI_OK && rest) {
        char *item = strsep(&rest, ",");
        int choice;
        if (!*item)
            status = cli_error("%s: '%s' has an empty value", option, texts[axis]);
        else if (infos[axis].kind == NUMBER)
            status = parse_numbers(axes, axis, option, item);
        else if (infos[axis].kind == FORMAT)
            status = parse_format(axes, axis, option, item);
        else if ((status = parse_choice(option, item, infos[axis].choices, &choice)) == CLI_OK)
            status = append(axes, axis, option, choice);
    }
    free(list);
    return status;
}

int axes_read(struct axes *axes, enum bench_op op, const char *suite, const enum bench_op *ops, int num_ops)
{
    bool decode = flags[AXIS_DECODE];
    axes->op = op;
    axes->suite = suite;
    memset(axes->count, 0, sizeof(axes->count));
    for (int a = 0; a < AXIS_COUNT; a++) {
        bool used = false;
        for (int i = 0; i < num_ops; i++)
            used |= applies((enum axis)a, ops[i], decode, suite);
        if (!used && (texts[a] || flags[a]))
            return cli_error("--%s: not an axis of %s%s%s", infos[a].name, bench_op_names[op],
                             op == BENCH_INDEX && decode ? " --decode" : "", suite ? " --suite" : "");
        if (!applies((enum axis)a, op, decode, suite))
            continue;
        if (infos[a].kind != FLAG && texts[a]) {
            if (parse_axis(axes, (enum axis)a) != CLI_OK)
                return CLI_BAD;
        } else {
            axes->count[a] = 1;
            axes->values[a][0] = infos[a].kind == FLAG ? flags[a] : axis_default((enum axis)a, op, axes);
        }
    }
    return CLI_OK;
}

int axes_refuse_others(enum axis axis, const char *operation)
{
    for (int a = 0; a < AXIS_COUNT; a++) {
        if (a != (int)axis && (texts[a] || flags[a]))
            return cli_error("--%s: not an option of %s", infos[a].name, operation);
    }
    return CLI_OK;
}

static void set_point(const struct axes *axes, const int position[AXIS_COUNT], struct point *point)
{
    *point = (struct point){.op = axes->op, .suite = axes->suite};
    for (int a = 0; a < AXIS_COUNT; a++)
        point->at[a] = axes->count[a] ? axes->values[a][position[a]] : 0;
}

void axes_first(const struct axes *axes, struct point *point, int position[AXIS_COUNT])
{
    memset(position, 0, AXIS_COUNT * sizeof(*position));
    set_point(axes, position, point);
}

bool axes_next(const struct axes *axes, struct point *point, int position[AXIS_COUNT])
{
    int a = AXIS_COUNT - 1;
    while (a >= 0 && position[a] + 1 >= axes->count[a])
        position[a--] = 0;
    if (a < 0)
        return false;
    position[a]++;
    set_point(axes, position, point);
    return true;
}

/* A word of a command as the shell takes it: in single quotes where it has other characters than names usually have. */
static void print_word(FILE *stream, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:+@%";
    const char *quote = word[strspn(word, plain)] ? "'" : "";
    fputs(quote, stream);
    for (; *word; word++) {
        if (*word == '\'')
            fputs("'\\''", stream);
        else
            fputc(*word, stream);
    }
    fputs(quote, stream);
}

void point_print(FILE *stream, const struct point *point, bool machine)
{
    const char *const names[2][2] = {{"suite", point->suite}, {"case", point->case_id}};
    fputs(bench_op_names[point->op], stream);
    for (int i = 0; i < 2; i++) {
        if (names[i][1]) {
            fprintf(stream, " --%s ", names[i][0]);
            print_word(stream, names[i][1]);
        }
    }
    for (int a = 0; a < (machine ? AXIS_COUNT : AXIS_ISA); a++) {
        char buffer[24];
        if (!axis_applies(point, (enum axis)a) || (infos[a].kind == FLAG && !point->at[a]))
            continue;
        fprintf(stream, " --%s", infos[a].name);
        if (infos[a].kind != FLAG)
            fprintf(stream, " %s", axis_text((enum axis)a, point->at[a], buffer));
    }
}

bool point_same_inputs(const struct point *a, const struct point *b)
{
    return a->op == b->op && a->case_id == b->case_id && memcmp(a->at, b->at, AXIS_INPUTS * sizeof(*a->at)) == 0;
}
