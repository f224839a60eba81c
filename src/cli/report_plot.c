/* SPDX-License-Identifier: MIT
 *
 * report_plot.c - curves of results, drawn by gnuplot.
 */
#include "bench.h"
#include "output.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int plot_check(const char *path)
{
    size_t length = strlen(path);
    for (const char *c = path; *c; c++) {
        if ((unsigned char)*c < ' ')
            return cli_error("--plot: the name has control characters");
    }
    if (length <= 4 || (strcmp(path + length - 4, ".png") != 0 && strcmp(path + length - 4, ".svg") != 0))
        return cli_error("--plot: '%s' ends in neither .png nor .svg", path);
    if (output_check("--plot", path) != CLI_OK)
        return CLI_BAD;
    return system("command -v gnuplot >/dev/null 2>&1") == 0 ? CLI_OK : cli_error("--plot: gnuplot is not installed");
}

/* The horizontal axis: an axis of numbers, or the length of the context whichever axis gave it (AXIS_COUNT). */
static bool is_length(int axis)
{
    return axis == AXIS_PREFIX || axis == AXIS_CONTEXT;
}

static int64_t x_value(const struct result *result, int axis)
{
    return axis == AXIS_COUNT ? result->kv_len : result->point.at[axis];
}

static int distinct_values(const struct result *results, int count, int axis)
{
    int distinct = 0;
    for (int i = 0; i < count; i++) {
        int before = 0;
        while (before < i && x_value(&results[before], axis) != x_value(&results[i], axis))
            before++;
        distinct += before == i;
    }
    return distinct;
}

static int choose_axis(const struct result *results, int count)
{
    int chosen = AXIS_COUNT, most = distinct_values(results, count, AXIS_COUNT);
    for (int a = 0; a < AXIS_COUNT; a++) {
        int distinct = axis_is_number((enum axis)a) && !is_length(a) ? distinct_values(results, count, a) : 0;
        if (distinct > most) {
            chosen = a;
            most = distinct;
        }
    }
    return chosen;
}

/* A curve's name: the operation, and the axes in which the results of that operation differ. */
static void curve_name(const struct result *results, int count, const struct result *result, int x_axis, char *text,
                       size_t size)
{
    size_t used = (size_t)snprintf(text, size, "%s", bench_op_names[result->point.op]);
    for (int a = 0; a < AXIS_COUNT && used < size; a++) {
        bool differs = false;
        for (int i = 0; i < count; i++)
            differs |= results[i].point.op == result->point.op && results[i].point.at[a] != result->point.at[a];
        char buffer[24];
        if (differs && a != x_axis && !(x_axis == AXIS_COUNT && is_length(a)))
            used += (size_t)snprintf(text + used, size - used, ", %s %s", axis_name((enum axis)a),
                                     axis_is_flag((enum axis)a) ? (result->point.at[a] ? "yes" : "no")
                                                                : axis_text((enum axis)a, result->point.at[a], buffer));
    }
}

/* In single quotes, where gnuplot knows one escape. */
static void print_quoted(FILE *stream, const char *text)
{
    fputc('\'', stream);
    for (; *text; text++)
        fputs(*text == '\'' ? "''" : (char[2]){*text, '\0'}, stream);
    fputc('\'', stream);
}

/* Times are on a logarithmic scale, and so are the values of the axis if none is 0. Where all are the same, gnuplot
 * would choose a range and warn. */
static void print_scales(FILE *gnuplot, const struct result *results, int count, int axis)
{
    double low = INFINITY, high = 0, fastest = INFINITY, slowest = 0;
    for (int i = 0; i < count; i++) {
        low = fmin(low, (double)x_value(&results[i], axis));
        high = fmax(high, (double)x_value(&results[i], axis));
        fastest = fmin(fastest, results[i].p10_us);
        slowest = fmax(slowest, results[i].p90_us);
    }
    fprintf(gnuplot, "set logscale %s\n", low > 0 ? "xy" : "y");
    if (low == high)
        fprintf(gnuplot, "set xrange [%g:%g]\n", low > 0 ? low / 2 : -1, low > 0 ? high * 2 : 1);
    if (fastest == slowest)
        fprintf(gnuplot, "set yrange [%g:%g]\n", fastest / 2, slowest * 2);
}

/* gnuplot takes a name that begins with | for a command and ~ for a home: a relative one gets a folder before it. */
static void print_script(FILE *gnuplot, const char *path, bool png, const struct result *results, int count)
{
    enum { NAME = 256 };
    int axis = choose_axis(results, count);
    char *file = malloc(strlen(path) + 3);
    if (!file)
        return; /* an empty script draws nothing, which is noticed */
    sprintf(file, "%s%s", *path == '/' ? "" : "./", path);
    fprintf(gnuplot, "set terminal %s size 900,600\nset output ", png ? "pngcairo" : "svg");
    print_quoted(gnuplot, file);
    free(file);
    fprintf(gnuplot,
            "\nset grid\nset key top left noenhanced\nset ylabel 'median time, us'\n"
            "set format y '%%g'\nset xlabel '%s'\nset title ",
            axis == AXIS_COUNT ? "context, tokens" : axis_name((enum axis)axis));
    print_quoted(gnuplot, results[0].device);
    fprintf(gnuplot, " noenhanced\n");
    print_scales(gnuplot, results, count, axis);
    for (int pass = 0; pass < 2; pass++) { /* the plot command, then the data of each curve in the same order */
        if (pass == 0)
            fprintf(gnuplot, "plot ");
        for (int i = 0, curves = 0; i < count; i++) {
            char name[NAME], other[NAME];
            curve_name(results, count, &results[i], axis, name, sizeof(name));
            int first = 0;
            while (curve_name(results, count, &results[first], axis, other, sizeof(other)), strcmp(name, other) != 0)
                first++;
            if (first != i)
                continue;
            if (pass == 0) {
                fprintf(gnuplot, "%s'-' using 1:2:3:4 with yerrorlines title ", curves++ ? ", " : "");
                print_quoted(gnuplot, name);
                continue;
            }
            for (int j = i; j < count; j++) {
                curve_name(results, count, &results[j], axis, other, sizeof(other));
                if (strcmp(name, other) == 0)
                    fprintf(gnuplot, "%lld %.6g %.6g %.6g\n", (long long)x_value(&results[j], axis),
                            results[j].median_us, results[j].p10_us, results[j].p90_us);
            }
            fprintf(gnuplot, "e\n");
        }
        fputc('\n', gnuplot);
    }
}

/* Whether a picture came to its end: gnuplot may say nothing of a full disk. Pipes and devices cannot be looked at. */
static bool is_complete(const char *path, bool png)
{
    enum { TAIL = 16 };
    char tail[TAIL + 1] = "";
    struct stat info;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode))
        return true;
    FILE *file = fopen(path, "rb");
    bool read = file && fseeko(file, info.st_size - TAIL, SEEK_SET) == 0 && fread(tail, 1, TAIL, file) == TAIL;
    if (file)
        fclose(file);
    return read && (png ? memcmp(tail + TAIL - 8, "IEND", 4) == 0 : strstr(tail, "</svg>") != NULL);
}

int plot_write(const char *path, const struct result *results, int count)
{
    bool png = strcmp(path + strlen(path) - 4, ".png") == 0;
    struct output output;
    if (output_open(&output, "--plot", path) != CLI_OK)
        return CLI_BAD;
    signal(SIGPIPE, SIG_IGN); /* a gnuplot that is not there shows in pclose */
    FILE *gnuplot = popen("gnuplot", "w");
    if (!gnuplot)
        return output_close(&output, false);
    print_script(gnuplot, output_name(&output), png, results, count);
    bool good = pclose(gnuplot) == 0;
    return output_close(&output, good && is_complete(output_name(&output), png));
}
