/* SPDX-License-Identifier: MIT
 *
 * Contexts, workspaces, what can be asked of contexts, plans and kernels, messages, callbacks and the environment.
 */
#include "api_fixture.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* An instruction set that this machine certainly lacks. */
#if defined(__x86_64__)
#define FOREIGN_ISA "neon"
#else
#define FOREIGN_ISA "avx512"
#endif

static struct fixture fixture;

static int open_fixture(void **state)
{
    *state = &fixture;
    fixture_open(&fixture);
    return 0;
}

static int open_prefill(void **state)
{
    open_fixture(state);
    fixture_attention(&fixture, MSA_E4M3, MSA_E4M3, 0, msa_prefill_plan, msa_prefill_prepare);
    return 0;
}

static int close_fixture(void **state)
{
    fixture_close(*state);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ tables */

static msa_status call_create(struct fixture *f)
{
    msa_context *context = (msa_context *)f;
    const msa_status status = msa_context_create(&f->options, &context);

    assert_true(status ? context == NULL : context != NULL);
    msa_context_destroy(context);
    return status;
}

static msa_status call_context_info(struct fixture *f)
{
    return msa_context_get_info(f->context, f->no_args ? NULL : &f->context_info);
}

static msa_status call_kernel(struct fixture *f)
{
    return msa_kernel_get(f->context, f->kernel_index, f->no_args ? NULL : &f->kernel_info);
}

static msa_status call_plan_info(struct fixture *f)
{
    return msa_plan_get_info(f->plan, f->no_args ? NULL : &f->plan_info);
}

static msa_status call_plan_error(struct fixture *f)
{
    return msa_plan_error(f->plan, f->bits_out, NULL);
}

/* clang-format off */
static const struct row options_rows[] = {
    SIZE_FIELD(options, msa_context_options),
    I32(options, device, -2, "a CUDA ordinal >= 0"), I32(options, device, INT32_MIN, "a CUDA ordinal >= 0"),
    ROW(options, device, SET_I32, 1000, 0, MSA_ERROR_NO_DEVICE, "1000", "CUDA"),
    I32(options, num_threads, -1, "1..1024"), I32(options, num_threads, 1025, "1..1024"),
    I32(options, num_threads, INT32_MAX, "1..1024"), I32(options, num_threads, 0, "must be given with parallel_for"),
};
static const struct row context_info_rows[] = {
    NUL_ARG(context, "context"), NO_ARGS("info"), SIZE_FIELD(context_info, msa_context_info),
};
static const struct row kernel_rows[] = {
    NO_ARGS("info"),
    SIZE_FIELD(kernel_info, msa_kernel_info),
    {offsetof(struct fixture, kernel_index), SET_I64, 100000, 0, MSA_ERROR_INVALID_ARGUMENT, "index", NULL,
     "less than"},
    {offsetof(struct fixture, kernel_index), SET_I64, INT64_MAX, 0, MSA_ERROR_INVALID_ARGUMENT, "index", NULL,
     "less than"},
};
static const struct row plan_info_rows[] = {
    NUL_ARG(plan, "plan"), NO_ARGS("info"), SIZE_FIELD(plan_info, msa_plan_info),
};
/* clang-format on */
static const struct row plan_error_rows[] = {NUL_ARG(plan, "plan"), NUL_ARG(bits_out, "bits")};

static void tables(void **state)
{
    struct fixture *f = *state;
    uint32_t bits;

    f->bits_out = &bits;
    CHECK_ROWS(f, call_create, options_rows);
    CHECK_ROWS(f, call_context_info, context_info_rows);
    CHECK_ROWS(f, call_kernel, kernel_rows);
    CHECK_ROWS(f, call_plan_info, plan_info_rows);
    CHECK_ROWS(f, call_plan_error, plan_error_rows);
}

/* ------------------------------------------------------------------------------------------------ contexts */

static void *some_alloc(void *data, size_t bytes)
{
    (void)data;
    return malloc(bytes);
}

static void some_free(void *data, void *pointer)
{
    (void)data;
    free(pointer);
}

static void create_refusals(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(msa_context_create(&f->options, NULL), MSA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(msa_last_error(), "context = NULL"));
    f->options.alloc = some_alloc;
    assert_int_equal(call_create(f), MSA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(msa_last_error(), "free = NULL"));
    f->options.alloc = NULL;
    f->options.free = some_free;
    assert_int_equal(call_create(f), MSA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(msa_last_error(), "alloc = NULL"));
    f->options.free = NULL;
    f->options.isa = "sse9";
    assert_int_equal(call_create(f), MSA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(msa_last_error(), "isa = \"sse9\": must be c, avx2"));
    f->options.isa = FOREIGN_ISA;
    assert_int_equal(call_create(f), MSA_ERROR_UNSUPPORTED);
    assert_non_null(strstr(msa_last_error(), "isa = \"" FOREIGN_ISA "\""));
    f->options.isa = "c";
    assert_int_equal(call_create(f), MSA_SUCCESS);
}

/* Device 0: a machine with a GPU that this build serves makes a context, every other one says clearly why not. */
static void cuda_device(void **state)
{
    struct fixture *f = *state;
    msa_status status;

    f->options.device = 0;
    status = call_create(f);
    if (status == MSA_SUCCESS)
        return;
    assert_true(status == MSA_ERROR_NO_DEVICE || status == MSA_ERROR_NO_KERNEL_IMAGE);
    assert_non_null(strstr(msa_last_error(), "device = 0: "));
    assert_non_null(strstr(msa_last_error(), "CUDA"));
}

static void context_info(void **state)
{
    struct fixture *f = *state;
    msa_context *context;

    assert_int_equal(call_context_info(f), MSA_SUCCESS);
    assert_int_equal(f->context_info.device, MSA_DEVICE_CPU);
    assert_int_equal(f->context_info.num_threads, 2);
    assert_int_equal(f->context_info.compute_capability, 0);
    assert_true(strlen(f->context_info.device_name) > 0);

    assert_int_equal(msa_context_create(NULL, &context), MSA_SUCCESS);
    assert_int_equal(msa_context_get_info(context, &f->context_info), MSA_SUCCESS);
    assert_true(f->context_info.num_threads >= 1);
    msa_context_destroy(context);
}

/* MSA_ISA counts when a context is made, and never afterwards; options.isa goes before it. */
static void environment(void **state)
{
    struct fixture *f = *state;
    msa_plan *plan;

    setenv("MSA_ISA", "c", 1);
    msa_context_destroy(f->context);
    assert_int_equal(msa_context_create(&f->options, &f->context), MSA_SUCCESS);
    assert_int_equal(call_context_info(f), MSA_SUCCESS);
    assert_string_equal(f->context_info.isa, "c");

    setenv("MSA_ISA", "sse9", 1);
    assert_int_equal(call_create(f), MSA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(msa_last_error(), "MSA_ISA = \"sse9\""));
    f->options.isa = "c";
    assert_int_equal(call_create(f), MSA_SUCCESS);
    assert_int_equal(msa_prefill_plan(f->context, &(msa_attention_desc)MSA_ATTENTION_DESC_INIT, &plan), MSA_SUCCESS);
    assert_int_equal(msa_plan_get_info(plan, &f->plan_info), MSA_SUCCESS);
    assert_string_equal(f->plan_info.kernel, "attention_c");
    msa_plan_destroy(plan);
    unsetenv("MSA_ISA");
}

static void null_handles(void **state)
{
    (void)state;
    msa_context_destroy(NULL);
    msa_plan_destroy(NULL);
    msa_workspace_destroy(NULL);
    assert_int_equal(msa_plan_workspace(NULL), 0);
    assert_int_equal(msa_workspace_bytes(NULL), 0);
    assert_null(msa_workspace_data(NULL));
}

/* Plans and workspaces keep what they need of a context that is gone. */
static void context_goes_first(void **state)
{
    struct fixture *f = *state;
    msa_workspace *workspace;

    assert_int_equal(msa_workspace_create(f->context, msa_plan_workspace(f->plan), &workspace), MSA_SUCCESS);
    msa_context_destroy(f->context);
    f->context = NULL;
    f->step.workspace = msa_workspace_data(workspace);
    assert_int_equal(msa_prefill_prepare(f->plan, &f->step, NULL), MSA_SUCCESS);
    assert_int_equal(msa_prefill_run(f->plan, &f->attend, NULL), MSA_SUCCESS);
    msa_plan_destroy(f->plan);
    f->plan = NULL;
    assert_int_equal(msa_workspace_reserve(workspace, 1 << 20), MSA_SUCCESS);
    memset(msa_workspace_data(workspace), 1, 1 << 20);
    msa_workspace_destroy(workspace);
}

/* ------------------------------------------------------------------------------------------------ workspaces */

static void workspaces(void **state)
{
    struct fixture *f = *state;
    msa_workspace *workspace;

    assert_int_equal(msa_workspace_create(f->context, 0, NULL), MSA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(msa_last_error(), "workspace = NULL"));
    assert_int_equal(msa_workspace_create(NULL, 0, &workspace), MSA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(msa_last_error(), "context = NULL"));
    assert_null(workspace);
    assert_int_equal(msa_workspace_reserve(NULL, 1), MSA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(msa_last_error(), "workspace = NULL"));

    assert_int_equal(msa_workspace_create(f->context, 0, &workspace), MSA_SUCCESS);
    assert_null(msa_workspace_data(workspace));
    assert_int_equal(msa_workspace_bytes(workspace), 0);
    for (size_t bytes = 1; bytes < 5000; bytes = bytes * 3 + 1) {
        assert_int_equal(msa_workspace_reserve(workspace, bytes), MSA_SUCCESS);
        assert_int_equal((uintptr_t)msa_workspace_data(workspace) % 256, 0);
        assert_true(msa_workspace_bytes(workspace) >= bytes);
        memset(msa_workspace_data(workspace), 0x5A, bytes);
    }
    const size_t before = msa_workspace_bytes(workspace);
    const uint8_t *data = msa_workspace_data(workspace);

    assert_int_equal(msa_workspace_reserve(workspace, 10), MSA_SUCCESS);
    assert_int_equal(msa_workspace_bytes(workspace), before);
    assert_ptr_equal(msa_workspace_data(workspace), data);
    msa_workspace_destroy(workspace);
}

static void *refusing_alloc(void *data, size_t bytes)
{
    return bytes > 1 << 20 ? NULL : some_alloc(data, bytes);
}

/* Sizes near the top of size_t must not wrap into small allocations; what was there stays. */
static void workspace_out_of_memory(void **state)
{
    struct fixture *f = *state;
    msa_workspace *workspace;

    msa_context_destroy(f->context);
    f->options.alloc = refusing_alloc;
    f->options.free = some_free;
    assert_int_equal(msa_context_create(&f->options, &f->context), MSA_SUCCESS);
    for (size_t less = 0; less < 1024; less++) {
        assert_int_equal(msa_workspace_create(f->context, SIZE_MAX - less, &workspace), MSA_ERROR_OUT_OF_MEMORY);
        assert_null(workspace);
    }
    assert_int_equal(msa_workspace_create(f->context, 100, &workspace), MSA_SUCCESS);
    memset(msa_workspace_data(workspace), 0x5A, 100);
    assert_int_equal(msa_workspace_reserve(workspace, SIZE_MAX / 2), MSA_ERROR_OUT_OF_MEMORY);
    assert_non_null(strstr(msa_last_error(), "bytes = "));
    assert_int_equal(((uint8_t *)msa_workspace_data(workspace))[99], 0x5A);
    msa_workspace_destroy(workspace);
}

/* ------------------------------------------------------------------------------------------------ kernels, plans */

static void kernel_list(void **state)
{
    struct fixture *f = *state;
    size_t count = 0, available = 0;

    f->options.isa = "c";
    msa_context_destroy(f->context);
    assert_int_equal(msa_context_create(&f->options, &f->context), MSA_SUCCESS);
    for (;; count++) {
        msa_kernel_info info = MSA_KERNEL_INFO_INIT;

        if (msa_kernel_get(f->context, count, &info))
            break;
        assert_true(strlen(info.name) > 0 && strlen(info.operation) > 0 && strlen(info.formats) > 0 &&
                    strlen(info.isa) > 0);
        assert_int_equal(info.available, !strcmp(info.isa, "c"));
        available += (size_t)info.available;
        assert_int_equal(msa_kernel_get(NULL, count, &info), MSA_SUCCESS);
        assert_int_equal(info.available, 0);
    }
    assert_true(available > 0);
}

static void check_plan_info(struct fixture *f, const char *operation, int32_t max_pages)
{
    const msa_plan_info *info = &f->plan_info;

    assert_int_equal(call_plan_info(f), MSA_SUCCESS);
    assert_string_equal(info->operation, operation);
    assert_true(strlen(info->kernel) > 0);
    assert_int_equal(strncmp(info->kernels, info->kernel, strlen(info->kernel)), 0);
    assert_string_equal(info->strategy, "query-major");
    assert_string_equal(info->precision, "exact");
    assert_true(info->num_splits >= 1);
    assert_true(info->query_tile >= 1);
    assert_int_equal(info->max_pages, max_pages);
    assert_int_equal(info->workspace_bytes, msa_plan_workspace(f->plan));
    msa_plan_destroy(f->plan);
    f->plan = NULL;
}

static void plan_info(void **state)
{
    struct fixture *f = *state;
    msa_attention_desc attention = MSA_ATTENTION_DESC_INIT;
    msa_index_desc index = MSA_INDEX_DESC_INIT;

    attention.precision = index.precision = MSA_PRECISION_FAST; /* a CPU computes `exact` and says so */
    attention.max_kv_len = 128;
    assert_int_equal(msa_prefill_plan(f->context, &attention, &f->plan), MSA_SUCCESS);
    check_plan_info(f, "prefill", 1);
    attention.max_kv_len = 129;
    assert_int_equal(msa_decode_plan(f->context, &attention, &f->plan), MSA_SUCCESS);
    check_plan_info(f, "decode", 2);
    index.max_kv_len = MSA_MAX_KV_LEN;
    assert_int_equal(msa_index_prefill_plan(f->context, &index, &f->plan), MSA_SUCCESS);
    check_plan_info(f, "index_prefill", 8192);
    index.max_kv_len = 1;
    assert_int_equal(msa_index_decode_plan(f->context, &index, &f->plan), MSA_SUCCESS);
    check_plan_info(f, "index_decode", 1);
}

static void keep_line(void *data, const char *line)
{
    char *kept = data;

    assert_true(strlen(line) < 400 && !strchr(line, '\n'));
    assert_int_equal(kept[0], '\0'); /* one line a plan */
    strcpy(kept, line);
}

static void log_line(void **state)
{
    struct fixture *f = *state;
    char line[400] = "";

    msa_context_destroy(f->context);
    f->options.isa = "c";
    f->options.log = keep_line;
    f->options.log_data = line;
    assert_int_equal(msa_context_create(&f->options, &f->context), MSA_SUCCESS);
    assert_int_equal(msa_decode_plan(f->context, &(msa_attention_desc)MSA_ATTENTION_DESC_INIT, &f->plan), MSA_SUCCESS);
    assert_non_null(strstr(line, "decode"));
    assert_non_null(strstr(line, "attention_c"));
}

/* ------------------------------------------------------------------------------------------------ messages */

static void status_strings(void **state)
{
    (void)state;
#define CHECK_TEXT(name, value, text)   \
    assert_int_equal((int)name, value); \
    assert_string_equal(msa_status_string(name), text);
    MSA_STATUS_LIST(CHECK_TEXT)
    assert_string_equal(msa_status_string((msa_status)999), "unknown status");
    assert_string_equal(msa_status_string((msa_status)-1), "unknown status");
    assert_string_equal(msa_version(), "0.1.0");
}

static void *fresh_thread(void *data)
{
    const char **seen = data;

    seen[0] = strcmp(msa_last_error(), "") ? "another thread's message" : "";
    msa_topk(NULL, NULL, NULL);
    seen[1] = strstr(msa_last_error(), "context") ? "" : "no message";
    return NULL;
}

/* Each thread has its own message, and a call that succeeds leaves it. */
static void last_error_is_thread_local(void **state)
{
    struct fixture *f = *state;
    const char *seen[2] = {NULL, NULL};
    pthread_t thread;

    assert_int_equal(msa_workspace_reserve(NULL, 1), MSA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(pthread_create(&thread, NULL, fresh_thread, seen), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_string_equal(seen[0], "");
    assert_string_equal(seen[1], "");
    assert_int_equal(call_context_info(f), MSA_SUCCESS);
    assert_non_null(strstr(msa_last_error(), "workspace"));
}

/* ------------------------------------------------------------------------------------------------ lent threads */

struct lent {
    int result, calls;
};

static int reversed_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg)
{
    struct lent *lent = data;

    lent->calls++;
    for (size_t i = n; i-- > 0;)
        task(arg, i, i % 2);
    return lent->result;
}

/* Order and owner of the tasks change no bit; a callback that fails is reported. */
static void parallel_for(void **state)
{
    struct fixture *f = *state;
    const size_t out_bytes = FIX_ROWS * FIX_Q_HEADS * 256;
    struct lent lent = {0, 0};
    uint8_t *first = test_malloc(out_bytes);
    msa_context *context;
    msa_plan *plan;
    msa_workspace *workspace;

    assert_int_equal(msa_prefill_run(f->plan, &f->attend, NULL), MSA_SUCCESS);
    memcpy(first, f->attend.out, out_bytes);

    f->options.parallel_for = reversed_for;
    f->options.parallel_for_data = &lent;
    assert_int_equal(msa_context_create(&f->options, &context), MSA_SUCCESS);
    assert_int_equal(msa_prefill_plan(context, &f->attention, &plan), MSA_SUCCESS);
    assert_int_equal(msa_prefill_prepare(plan, &f->step, NULL), MSA_SUCCESS);
    memset(f->attend.out, 0xFF, out_bytes);
    assert_int_equal(msa_prefill_run(plan, &f->attend, NULL), MSA_SUCCESS);
    assert_true(lent.calls > 0);
    assert_memory_equal(f->attend.out, first, out_bytes);

    lent.result = -7;
    assert_int_equal(msa_prefill_run(plan, &f->attend, NULL), MSA_ERROR_CALLBACK);
    assert_non_null(strstr(msa_last_error(), "parallel_for"));
    assert_non_null(strstr(msa_last_error(), "-7"));
    lent.result = 0;
    assert_int_equal(msa_prefill_run(plan, &f->attend, NULL), MSA_SUCCESS);
    msa_plan_destroy(plan);
    msa_context_destroy(context);

    for (int threads = 0; threads <= 3; threads++) { /* OpenMP */
        msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;

        options.num_threads = threads;
        assert_int_equal(msa_context_create(&options, &context), MSA_SUCCESS);
        assert_int_equal(msa_prefill_plan(context, &f->attention, &plan), MSA_SUCCESS);
        assert_int_equal(msa_workspace_create(context, msa_plan_workspace(plan), &workspace), MSA_SUCCESS);
        f->step.workspace_bytes = msa_workspace_bytes(workspace);
        f->step.workspace = msa_workspace_data(workspace);
        assert_int_equal(msa_prefill_prepare(plan, &f->step, NULL), MSA_SUCCESS);
        memset(f->attend.out, 0xFF, out_bytes);
        assert_int_equal(msa_prefill_run(plan, &f->attend, NULL), MSA_SUCCESS);
        assert_memory_equal(f->attend.out, first, out_bytes);
        msa_workspace_destroy(workspace);
        msa_plan_destroy(plan);
        msa_context_destroy(context);
    }
    test_free(first);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
#define PREFILL_TEST(name) cmocka_unit_test_setup_teardown(name, open_prefill, close_fixture)

int main(void)
{
    const struct CMUnitTest tests[] = {
        PREFILL_TEST(tables),
        TEST(create_refusals),
        TEST(cuda_device),
        TEST(context_info),
        TEST(environment),
        cmocka_unit_test(null_handles),
        PREFILL_TEST(context_goes_first),
        TEST(workspaces),
        TEST(workspace_out_of_memory),
        TEST(kernel_list),
        TEST(plan_info),
        TEST(log_line),
        cmocka_unit_test(status_strings),
        TEST(last_error_is_thread_local),
        PREFILL_TEST(parallel_for),
    };
    unsetenv("MSA_ISA");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
