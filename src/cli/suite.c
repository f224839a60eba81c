/* SPDX-License-Identifier: MIT
 *
 * suite.c - the formal prefill suite: 128 shapes of production calls, with weights. Its table is part of the tool.
 *
 * Columns: case_id, batch, total_q, max_final_kv, representative_weight, tags (joined by +), call_count, query_lens,
 * prefix_lens (separated by spaces), shape_exact. A case without exact lengths spreads its queries and keys evenly,
 * with the largest final length in the last request.
 */
#include "bench.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* MSA_SUITE_CSV is the path of the table when the tool is built. */
extern const char suite_table[], suite_table_end[];
__asm__(".pushsection .rodata\n"
        ".global suite_table, suite_table_end\n"
        "suite_table: .incbin \"" MSA_SUITE_CSV "\"\n"
        "suite_table_end: .byte 0\n"
        ".popsection\n");

enum column { ID, BATCH, TOTAL_Q, MAX_FINAL_KV, WEIGHT, TAGS, CALLS, QUERY_LENS, PREFIX_LENS, EXACT, NUM_COLUMNS };
static const char header[] = "case_id,batch,total_q,max_final_kv,representative_weight,tags,call_count,query_lens,"
                             "prefix_lens,shape_exact";

/* Whether `word` is one of the parts of `list` between separators. */
static bool has_word(const char *list, char separator, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = list; at; at = strchr(at, separator) ? strchr(at, separator) + 1 : NULL) {
        if (strncmp(at, word, length) == 0 && (at[length] == separator || at[length] == '\0'))
            return true;
    }
    return false;
}

/* Text for reports, which a JSON string and a line of a table can hold. */
static bool is_plain(const char *text)
{
    json_t *string = json_string(text);
    bool plain = string != NULL;
    json_decref(string);
    for (; *text; text++)
        plain &= !iscntrl((unsigned char)*text);
    return plain;
}

/* Lengths may come out negative where the columns fit no such case: check_lengths refuses that. */
static void spread_lengths(struct suite_case *c, int64_t total_q, int64_t max_final_kv)
{
    int64_t batch = c->batch, *q = c->query_lens;
    for (int64_t i = 0; i < batch; i++)
        q[i] = total_q * (i + 1) / batch - total_q * i / batch;
    int64_t excess = ((q[batch - 1] - max_final_kv) % MSA_PAGE_SIZE + MSA_PAGE_SIZE) % MSA_PAGE_SIZE;
    q[batch - 1] -= excess;
    q[0] += excess;
    int64_t prefix = max_final_kv - q[batch - 1];
    for (int64_t i = 0; i < batch; i++)
        c->prefix_lens[i] = MSA_PAGE_SIZE * (prefix * (i + 1) / batch / MSA_PAGE_SIZE);
}

/* `count` numbers separated by spaces. */
static bool read_lengths(const char *text, int64_t *lengths, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        char *end;
        lengths[i] = strtoll(text, &end, 10);
        if (end == text || lengths[i] < 0 || lengths[i] > MSA_MAX_KV_LEN)
            return false;
        text = end;
    }
    return *text == '\0';
}

/* A number of a line; messages name the line and the column. */
static int read_number(const char *line, const char *column, const char *text, int64_t low, int64_t high,
                       int64_t *value)
{
    char label[512];
    snprintf(label, sizeof(label), "%s: %s", line, column);
    return parse_int(label, text, low, high, value);
}

/* Lengths that make another case than the other columns say are a mistake in either. */
static int check_lengths(const struct suite_case *c, const char *line, int64_t total_q, int64_t max_final_kv)
{
    int64_t queries = 0, longest = 0;
    for (int32_t b = 0; b < c->batch; b++) {
        int64_t final_kv = c->query_lens[b] + c->prefix_lens[b];
        if (c->query_lens[b] < 0 || c->prefix_lens[b] < 0)
            return cli_error("%s: case %s: request %d would have %lld queries after %lld keys", line, c->id, b,
                             (long long)c->query_lens[b], (long long)c->prefix_lens[b]);
        queries += c->query_lens[b];
        longest = final_kv > longest ? final_kv : longest;
    }
    if (queries == total_q && longest == max_final_kv)
        return CLI_OK;
    return cli_error("%s: case %s: the lengths make total_q %lld and max_final_kv %lld, not %lld and %lld", line, c->id,
                     (long long)queries, (long long)longest, (long long)total_q, (long long)max_final_kv);
}

static int read_case(struct suite_case *c, char *const fields[NUM_COLUMNS], const char *line)
{
    int64_t batch, total_q, max_final_kv, weight, exact;
    if (!is_plain(fields[ID]))
        return cli_error("%s: case_id has control characters or is not UTF-8", line);
    if (read_number(line, "batch", fields[BATCH], 1, 65536, &batch) ||
        read_number(line, "total_q", fields[TOTAL_Q], batch, INT32_MAX, &total_q) ||
        read_number(line, "max_final_kv", fields[MAX_FINAL_KV], 0, MSA_MAX_KV_LEN, &max_final_kv) ||
        read_number(line, "representative_weight", fields[WEIGHT], 0, INT32_MAX, &weight) ||
        read_number(line, "shape_exact", fields[EXACT], 0, 1, &exact))
        return CLI_BAD;
    c->id = strdup(fields[ID]);
    c->batch = (int32_t)batch;
    c->weight = has_word(fields[TAGS], '+', "rep") ? (double)weight : 0;
    c->query_lens = malloc((size_t)batch * sizeof(*c->query_lens));
    c->prefix_lens = malloc((size_t)batch * sizeof(*c->prefix_lens));
    if (!c->id || !c->query_lens || !c->prefix_lens)
        return cli_error("out of memory");
    if (!exact)
        spread_lengths(c, total_q, max_final_kv);
    else if (!read_lengths(fields[QUERY_LENS], c->query_lens, c->batch) ||
             !read_lengths(fields[PREFIX_LENS], c->prefix_lens, c->batch))
        return cli_error("%s: query_lens, prefix_lens: not %d lengths of 0..1048576 each", line, c->batch);
    return check_lengths(c, line, total_q, max_final_kv);
}

/* Cuts a line at its commas; the number of fields. */
static int split(char *line, char *fields[NUM_COLUMNS])
{
    int count = 0;
    for (char *at = line; at; count++) {
        if (count < NUM_COLUMNS)
            fields[count] = at;
        at = strchr(at, ',');
        if (at)
            *at++ = '\0';
    }
    return count;
}

/* Text of a file, or of the built-in table; NULL after a message. */
static char *read_text(const char *path)
{
    if (!path)
        return strdup(suite_table);
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    size_t room = 0;
    ssize_t length = file ? getdelim(&text, &room, '\0', file) : 0;
    if (!file || (length < 0 && !feof(file))) {
        cli_error("--suite: '%s' is neither formal, nor smoke, nor a file that can be read", path);
    } else if (length > 0 && strlen(text) < (size_t)length) {
        cli_error("--suite: '%s' is no text: it has a byte of 0", path);
    } else {
        fclose(file);
        return length > 0 ? text : (free(text), strdup(""));
    }
    if (file)
        fclose(file);
    free(text);
    return NULL;
}

/* Cuts a line, or NULL after the last, from the rest of a text. */
static char *next_line(char **rest)
{
    char *line = strsep(rest, "\n");
    size_t length = line ? strlen(line) : 0;
    if (length && line[length - 1] == '\r')
        line[length - 1] = '\0';
    return line;
}

/* Every one of the ids must be that of a case. */
static int check_ids(const struct suite *suite, const char *name, const char *ids)
{
    char *list = strdup(ids), *rest = list;
    int status = list ? CLI_OK : cli_error("out of memory");
    while (status == CLI_OK && rest) {
        const char *id = strsep(&rest, ",");
        int i = 0;
        while (i < suite->num_cases && strcmp(suite->cases[i].id, id) != 0)
            i++;
        if (i == suite->num_cases)
            status = cli_error("--case: '%s' names no case of the suite %s", id, name);
    }
    free(list);
    return status;
}

int suite_open(struct suite *suite, const char *name, const char *ids)
{
    *suite = (struct suite){0};
    bool smoke = strcmp(name, "smoke") == 0, built_in = smoke || strcmp(name, "formal") == 0;
    if (!is_plain(name))
        return cli_error("--suite: the name '%s' has control characters or is not UTF-8", name);
    char *text = read_text(built_in ? NULL : name), *rest = text;
    if (!text)
        return CLI_BAD;
    const char *first = next_line(&rest);
    int status = strcmp(first, header) == 0 ? CLI_OK : cli_error("%s: the first line is not '%s'", name, header);
    char *line;
    for (int number = 2; status == CLI_OK && (line = next_line(&rest)); number++) {
        char *fields[NUM_COLUMNS];
        if (!*line)
            continue;
        if (split(line, fields) != NUM_COLUMNS) {
            status = cli_error("%s: line %d has not %d fields", name, number, NUM_COLUMNS);
        } else if ((!smoke || has_word(fields[TAGS], '+', "anchor")) && (!ids || has_word(ids, ',', fields[ID]))) {
            struct suite_case *grown = realloc(suite->cases, (size_t)(suite->num_cases + 1) * sizeof(*grown));
            if (!grown) {
                status = cli_error("out of memory");
                break;
            }
            suite->cases = grown;
            grown[suite->num_cases] = (struct suite_case){0};
            char place[256];
            snprintf(place, sizeof(place), "%.200s: line %d", name, number);
            status = read_case(&grown[suite->num_cases++], fields, place);
        }
    }
    free(text);
    if (status == CLI_OK && ids)
        status = check_ids(suite, name, ids);
    if (status == CLI_OK && suite->num_cases == 0)
        status = cli_error("--suite: %s has no cases", name);
    return status;
}

void suite_close(struct suite *suite)
{
    for (int i = 0; i < suite->num_cases; i++) {
        free(suite->cases[i].id);
        free(suite->cases[i].query_lens);
        free(suite->cases[i].prefix_lens);
    }
    free(suite->cases);
    *suite = (struct suite){0};
}

/* ---- summary */

/* Median latency of the cases whose number of queries lies in [low, high). */
static void print_median(FILE *stream, const struct result *results, int count, int64_t low, int64_t high,
                         const char *label)
{
    double *times = malloc((size_t)count * sizeof(*times));
    int found = 0;
    for (int i = 0; times && i < count; i++) {
        if (results[i].total_q >= low && results[i].total_q < high)
            times[found++] = results[i].median_us;
    }
    if (found) {
        sort_samples(times, found);
        fprintf(stream, "median of the %d cases of %s queries: %.2f us\n", found, label, quantile(times, found, 0.5));
    }
    free(times);
}

void suite_summary(FILE *stream, const struct result *results, int count)
{
    double weights = 0, time = 0, prepared = 0, flops = 0;
    int noisy = 0;
    for (int i = 0; i < count; i++) {
        weights += results[i].weight;
        time += results[i].weight * results[i].median_us;
        prepared += results[i].weight * results[i].prepare_run_us;
        flops += results[i].weight * results[i].flops;
        noisy += results[i].spread > SUITE_SPREAD;
    }
    if (weights > 0)
        fprintf(stream, "weighted mean: %.2f us (prepare and run: %.2f us), %.4f TFLOP, %.4f TFLOP/s\n", time / weights,
                prepared / weights, flops / weights * 1e-12, flops / time * 1e-6);
    if (count && results[0].point.op == BENCH_INDEX) {
        print_median(stream, results, count, 0, 512, "fewer than 512");
        print_median(stream, results, count, 512, 4096, "512 to 4095");
        print_median(stream, results, count, 4096, INT64_MAX, "4096 and more");
    }
    fprintf(stream, "%d cases, %d of them with a spread above %.0f %% (*: measured again)\n", count, noisy,
            100 * SUITE_SPREAD);
}
