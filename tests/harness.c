/* SPDX-License-Identifier: MIT
 *
 * harness.c - see harness.h.
 */
#include "harness.h"

#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static harness *running; /* for the handler of memory faults */

/* ------------------------------------------------------------------------------------------------ start and finish */

static void print_counts(const harness *h)
{
    printf("%d passed, %d failed, %d skipped\n", h->passed, h->failed, h->skipped);
    fflush(stdout);
}

/* A touched guard page, a write to an input, or a trap ends the run; the test's name is what matters. */
static void on_fault(int signal_number)
{
    test_fail(running, "signal %d (%s)", signal_number, strsignal(signal_number));
    running->failed++;
    print_counts(running);
    _exit(1);
}

static void usage(const char *program, const char *about, FILE *stream)
{
    fprintf(stream,
            "usage: %s [options]\n%s\n"
            "  --op NAME       only tests of this operation\n"
            "  --isa NAME      only this instruction set (and \"c\", the reference)\n"
            "  --device D      cpu (default) or cuda:N\n"
            "  --filter TEXT   only tests whose name contains TEXT\n"
            "  --list          print the tests' names\n"
            "  --seed N        other random inputs\n"
            "  --quick         fewer tests and variants (for sanitizers and valgrind)\n"
            "  --bench         time the kernels whose tests passed\n"
            "  --cases DIRS    folders of case files, separated by ':' (default: tests/cases and $MSA_CASES)\n",
            program, about);
}

static msa_context *make_context(harness *h, int32_t device, const char *isa, int32_t threads, bool lent)
{
    static int lent_threads = 3;
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;
    options.device = device;
    options.isa = isa;
    options.num_threads = lent ? lent_threads : threads;
    options.parallel_for = lent ? lent_parallel_for : NULL;
    options.parallel_for_data = &lent_threads;
    msa_context *context;
    msa_status status = msa_context_create(&options, &context);
    if (status) {
        fprintf(stderr, "%s: %s: %s\n", h->options.program, msa_status_string(status), msa_last_error());
        exit(2);
    }
    return context;
}

static void add_level(harness *h, const char *isa)
{
    for (int i = 0; i < h->num_levels; i++)
        if (!strcmp(h->levels[i].isa, isa))
            return;
    isa_level *l = &h->levels[h->num_levels++];
    l->isa = isa;
    if (h->options.device != MSA_DEVICE_CPU) {
        l->one = make_context(h, h->options.device, NULL, 0, false);
        return;
    }
    l->one = make_context(h, MSA_DEVICE_CPU, isa, 1, false);
    l->two = make_context(h, MSA_DEVICE_CPU, isa, 2, false);
    l->lent = make_context(h, MSA_DEVICE_CPU, isa, 0, true);
}

/* The reference is the portable C code; then follows every other instruction set that has a kernel and runs here. */
static void make_levels(harness *h)
{
    if (h->options.device != MSA_DEVICE_CPU) {
        add_level(h, "cuda");
        h->portable = make_context(h, MSA_DEVICE_CPU, "c", 1, false);
        device_use(h->options.device);
        return;
    }
    add_level(h, "c");
    if (h->options.isa) {
        add_level(h, h->options.isa);
        return;
    }
    msa_context *all = make_context(h, MSA_DEVICE_CPU, NULL, 1, false);
    msa_kernel_info info = MSA_KERNEL_INFO_INIT;
    for (size_t i = 0; !msa_kernel_get(all, i, &info); i++) {
        bool cpu = strncmp(info.isa, "sm", 2) != 0;
        if (cpu && info.available)
            add_level(h, info.isa);
        else if (cpu && !h->options.list) {
            h->skipped++;
            printf("SKIP kernel %s: this machine has no %s\n", info.name, info.isa);
        }
    }
    msa_context_destroy(all);
}

static int32_t parse_device(const char *text)
{
    if (!strcmp(text, "cpu"))
        return MSA_DEVICE_CPU;
    int ordinal = 0;
    if (!strcmp(text, "cuda") || sscanf(text, "cuda:%d", &ordinal) == 1)
        return ordinal;
    fprintf(stderr, "--device %s: must be cpu, cuda or cuda:N\n", text);
    exit(2);
}

harness harness_start(int argc, char **argv, const char *about)
{
    static const struct option options[] = {{"op", required_argument, NULL, 'o'},
                                            {"isa", required_argument, NULL, 'i'},
                                            {"device", required_argument, NULL, 'd'},
                                            {"list", no_argument, NULL, 'l'},
                                            {"filter", required_argument, NULL, 'f'},
                                            {"seed", required_argument, NULL, 's'},
                                            {"quick", no_argument, NULL, 'q'},
                                            {"bench", no_argument, NULL, 'b'},
                                            {"cases", required_argument, NULL, 'c'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    harness h = {.options = {.program = argv[0], .device = MSA_DEVICE_CPU, .seed = 1}, .variant = ""};
    for (int c; (c = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (c) {
        case 'o':
            h.options.op = optarg;
            break;
        case 'i':
            h.options.isa = optarg;
            break;
        case 'd':
            h.options.device = parse_device(optarg);
            break;
        case 'f':
            h.options.filter = optarg;
            break;
        case 's':
            h.options.seed = (uint32_t)strtoul(optarg, NULL, 0);
            break;
        case 'l':
            h.options.list = true;
            break;
        case 'q':
            h.options.quick = true;
            break;
        case 'b':
            h.options.bench = true;
            break;
        case 'c':
            h.options.cases = optarg;
            break;
        case 'h':
            usage(argv[0], about, stdout);
            exit(0);
        default:
            usage(argv[0], about, stderr);
            exit(2);
        }
    }
    if (optind < argc) {
        fprintf(stderr, "%s: \"%s\" is not an option\n", argv[0], argv[optind]);
        exit(2);
    }
    if (!h.options.cases) {
        static char folders[2048];
        const char *more = getenv("MSA_CASES");
        snprintf(folders, sizeof folders, "tests/cases:%s", more ? more : "");
        h.options.cases = folders;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    make_levels(&h);
    return h;
}

int harness_finish(harness *h)
{
    for (int i = 0; i < h->num_levels; i++) {
        msa_context_destroy(h->levels[i].one);
        msa_context_destroy(h->levels[i].two);
        msa_context_destroy(h->levels[i].lent);
    }
    msa_context_destroy(h->portable);
    if (!h->options.list)
        print_counts(h);
    return h->failed > 0;
}

/* ----------------------------------------------------------------------------------------------------------- tests */

bool test_begin(harness *h, const char *op, const char *format, ...)
{
    int length = snprintf(h->name, sizeof h->name, "%s/", op);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(h->name + length, sizeof h->name - (size_t)length, format, arguments);
    va_end(arguments);
    if ((h->options.op && strcmp(h->options.op, op)) || (h->options.filter && !strstr(h->name, h->options.filter)))
        return false;
    if (h->options.list) {
        puts(h->name);
        return false;
    }
    running = h;
#if !defined(__SANITIZE_ADDRESS__)
    signal(SIGSEGV, on_fault);
    signal(SIGBUS, on_fault);
    signal(SIGFPE, on_fault);
#endif
    h->test_failed = h->test_skipped = h->test_void = false;
    h->variant = "";
    return true;
}

void test_fail(harness *h, const char *format, ...)
{
    if (h->test_failed)
        return;
    h->test_failed = true;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("FAIL %s%s%s%s: %s   (%s --seed %u --filter %s)\n", h->name, *h->variant ? " [" : "", h->variant,
           *h->variant ? "]" : "", text, h->options.program, h->options.seed, h->name);
}

void test_end(harness *h)
{
    if (h->test_failed)
        h->failed++;
    else if (h->test_skipped)
        h->skipped++;
    else if (!h->test_void)
        h->passed++;
}

void test_leave_out(harness *h)
{
    h->test_void = true;
}

void test_skip(harness *h, const char *reason)
{
    printf("SKIP %s: %s\n", h->name, reason);
    h->test_skipped = true;
}

random_stream test_random(const harness *h)
{
    uint32_t hash = 2166136261u; /* FNV-1a of the name, so that a test's inputs do not depend on which others ran */
    for (const char *c = h->name; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 16777619u;
    return random_new(h->options.seed, hash);
}

/* ---------------------------------------------------------------------------------------------------------- trials */

output *trial_output(trial *t, const char *name, size_t bytes, size_t alignment)
{
    output *o = &t->outputs[t->num_outputs++];
    *o = (output){name, arena_region(&t->results, bytes, alignment), xcalloc(bytes, 1)};
    return o;
}

void trial_inputs_to_outputs(trial *t, int first, const char *name)
{
    for (int i = first; i < t->inputs.count; i++) {
        region *r = t->inputs.regions[i];
        t->outputs[t->num_outputs++] = (output){name, r, xcalloc(r->bytes, 1)};
    }
    arena_move(&t->inputs, first, &t->results);
}

void trial_free(trial *t)
{
    for (int i = 0; i < t->num_outputs; i++)
        free(t->outputs[i].written);
    arena_free(&t->inputs);
    arena_free(&t->results);
    arena_free(&t->scratch);
}

enum workspace_fill { FILL_ONES, FILL_ZEROS, FILL_RANDOM };

typedef struct variant {
    const char *label;
    uint8_t poison;
    enum workspace_fill fill;
} variant;

static void fill_workspace(region *workspace, enum workspace_fill fill, random_stream *random)
{
    region_fill(workspace, fill == FILL_ONES ? 0xFF : 0);
    if (fill == FILL_RANDOM)
        region_randomise(workspace, random);
}

/* Runs once on a plan that is open; checks everything that needs no reference. */
static void run_open(harness *h, trial *t, msa_context *context, variant v)
{
    random_stream random = test_random(h);
    for (int i = 0; i < t->num_outputs; i++)
        region_fill(t->outputs[i].region, v.poison);
    if (t->workspace)
        fill_workspace(t->workspace, v.fill, &random);
    CHECK_OK(h, t->run(t, context));
    if (t->error_bits != t->expected_error_bits)
        test_fail(h, "error word 0x%x, expected 0x%x", t->error_bits, t->expected_error_bits);
    if (t->workspace && !region_intact(t->workspace, v.fill == FILL_ONES ? 0xFF : 0))
        test_fail(h, "wrote outside the workspace");
    for (int i = 0; i < t->num_outputs; i++) {
        const output *o = &t->outputs[i];
        if (!region_intact(o->region, v.poison))
            test_fail(h, "wrote before or after %s", o->name);
        for (size_t j = 0; j < o->region->bytes; j++)
            if (!o->written[j] && o->region->data[j] != v.poison) {
                test_fail(h, "%s: wrote byte %zu, which is not an element of the result", o->name, j);
                break;
            }
    }
}

/* Lives as long as the plan. */
static const char *plan_kernel(harness *h, const trial *t)
{
    msa_plan_info info = MSA_PLAN_INFO_INIT;
    CHECK_OK(h, msa_plan_get_info(t->plan, &info));
    return info.kernel;
}

static bool open_trial(harness *h, trial *t, msa_context *context)
{
    if (!t->open)
        return true;
    CHECK_OK(h, t->open(t, context));
    if (!t->plan)
        return false;
    if (msa_plan_workspace(t->plan))
        t->workspace = arena_region(&t->scratch, msa_plan_workspace(t->plan), 256);
    const char *kernel = plan_kernel(h, t);
    oracle_fp8_sums = !strcmp(kernel, "prefill_sm90") || !strcmp(kernel, "decode_shared_sm90") ||
                      !strcmp(kernel, "score_sm90") || !strcmp(kernel, "score_decode_sm90");
    return true;
}

static void close_trial(trial *t)
{
    msa_plan_destroy(t->plan);
    t->plan = NULL;
    t->workspace = NULL;
    arena_free(&t->scratch);
}

void trial_run_once(harness *h, trial *t, msa_context *context)
{
    if (open_trial(h, t, context))
        run_open(h, t, context, (variant){"", 0xFF, FILL_ONES});
    close_trial(t);
}

static void compare_with_reference(harness *h, const trial *t, uint8_t *const reference[])
{
    for (int i = 0; i < t->num_outputs; i++) {
        const output *o = &t->outputs[i];
        for (size_t j = 0; j < o->region->bytes; j++)
            if (o->written[j] && o->region->data[j] != reference[i][j]) {
                test_fail(h, "%s: byte %zu differs from the first run of the reference (0x%02x, 0x%02x)", o->name, j,
                          o->region->data[j], reference[i][j]);
                return;
            }
    }
}

static void run_variant(harness *h, trial *t, msa_context *context, const char *isa, variant v,
                        uint8_t *const reference[])
{
    char label[64];
    snprintf(label, sizeof label, "%s, %s", isa, v.label);
    h->variant = label;
    if (context && open_trial(h, t, context)) {
        run_open(h, t, context, v);
        compare_with_reference(h, t, reference);
        v.poison = (uint8_t)~v.poison; /* again, with the plan used before */
        run_open(h, t, context, v);
        compare_with_reference(h, t, reference);
    }
    close_trial(t);
    h->variant = "";
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of up to 21 runs in about half a second; prepare is part of a run. */
static void time_trial(harness *h, trial *t, const isa_level *l)
{
    enum { MOST = 21 };
    double times[MOST], begin = seconds();
    int count = 0;
    if (!open_trial(h, t, l->one))
        return;
    msa_plan_info info = MSA_PLAN_INFO_INIT;
    if (t->plan)
        CHECK_OK(h, msa_plan_get_info(t->plan, &info));
    while (count < MOST && (count < 3 || seconds() - begin < 0.5)) {
        double start = seconds();
        CHECK_OK(h, t->run(t, l->one));
        times[count++] = seconds() - start;
    }
    qsort(times, (size_t)count, sizeof times[0], compare_doubles);
    printf("TIME %s %s %s: median %.1f us of %d runs, 1 thread\n", h->name, l->isa, info.kernel ? info.kernel : "",
           1e6 * times[count / 2], count);
    close_trial(t);
}

/* Runs a level for the first time, checks the results with the oracle, and keeps them. */
static void make_reference(harness *h, trial *t, const isa_level *l, uint8_t **reference)
{
    char label[64];
    snprintf(label, sizeof label, "%s, 1 thread", l->isa);
    h->variant = label;
    t->checked = l->one;
    trial_run_once(h, t, l->one);
    if (!h->test_failed && t->check)
        t->check(h, t);
    for (int i = 0; i < t->num_outputs; i++) {
        reference[i] = xmalloc(t->outputs[i].region->bytes);
        memcpy(reference[i], t->outputs[i].region->data, t->outputs[i].region->bytes);
    }
    h->variant = "";
}

static void free_reference(const trial *t, uint8_t **reference)
{
    for (int i = 0; i < t->num_outputs; i++)
        free(reference[i]);
}

static bool adds_in_own_order(harness *h, trial *t, const isa_level *l)
{
    bool own = false;
    if (open_trial(h, t, l->one) && t->plan) {
        const char *isa = strrchr(plan_kernel(h, t), '_');
        own = isa && !strcmp(isa, "_amx");
    }
    close_trial(t);
    return own;
}

static void run_level(harness *h, trial *t, const isa_level *l, uint8_t *const *reference)
{
    if (!h->options.quick || l != h->levels)
        run_variant(h, t, l->one, l->isa, (variant){"1 thread", 0x5A, FILL_ZEROS}, reference);
    if (!h->options.quick)
        run_variant(h, t, l->two, l->isa, (variant){"2 threads", 0xFF, FILL_ONES}, reference);
    run_variant(h, t, l->lent, l->isa, (variant){"lent threads", 0x5A, FILL_RANDOM}, reference);
}

void trial_run(harness *h, trial *t)
{
    uint8_t *reference[MAX_OUTPUTS], *own[MAX_OUTPUTS];
    arena_seal(&t->inputs, true);
    make_reference(h, t, &h->levels[0], reference);
    if (h->portable && t->same_bits)
        run_variant(h, t, h->portable, "portable C", (variant){"1 thread", 0xFF, FILL_ONES}, reference);
    for (int i = 0; i < h->num_levels && !h->test_failed; i++) {
        const isa_level *l = &h->levels[i];
        if (!t->exact && adds_in_own_order(h, t, l)) {
            make_reference(h, t, l, own);
            run_level(h, t, l, own);
            free_reference(t, own);
        } else {
            run_level(h, t, l, reference);
        }
        if (h->options.bench && t->timed && !h->test_failed && !device_in_use()) /* msa bench times devices */
            time_trial(h, t, l);
    }
    free_reference(t, reference);
    arena_seal(&t->inputs, false);
}

/* ------------------------------------------------------------------------------------------------------- comparing */

bool is_near(msa_dtype dtype, double actual, double expected, double bound)
{
    if (isnan(expected))
        return isnan(actual);
    return actual >= oracle_round(dtype, expected - bound) && actual <= oracle_round(dtype, expected + bound);
}
