/* SPDX-License-Identifier: MIT
 *
 * Host memory: the caller's allocator serves everything, a failure at every N-th allocation is reported and leaks
 * nothing, and neither prepare nor run nor a stateless call allocates.
 */
#include "api_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Counts, and fails the allocation with number `fail_at` (from 1; 0: none). Blocks are filled with garbage. */
struct counter {
    size_t calls, live, fail_at;
};

static void *counting_alloc(void *data, size_t bytes)
{
    struct counter *counter = data;
    void *block;

    if (++counter->calls == counter->fail_at)
        return NULL;
    block = malloc(bytes);
    assert_non_null(block);
    counter->live++;
    return memset(block, 0xDB, bytes);
}

static void counting_free(void *data, void *pointer)
{
    struct counter *counter = data;

    assert_non_null(pointer);
    counter->live--;
    free(pointer);
}

/* What a user makes: a context, a plan of each operation, a workspace that grows. After a failure it holds what came
 * before. */
struct session {
    msa_context *context;
    msa_plan *plans[4];
    msa_workspace *workspace;
};

static msa_status session_open(struct session *s, const msa_context_options *options)
{
    const msa_attention_desc attention = MSA_ATTENTION_DESC_INIT;
    const msa_index_desc index = MSA_INDEX_DESC_INIT;
    msa_status status;

    memset(s, 0, sizeof(*s));
    status = msa_context_create(options, &s->context);
    if (!status)
        status = msa_prefill_plan(s->context, &attention, &s->plans[0]);
    if (!status)
        status = msa_decode_plan(s->context, &attention, &s->plans[1]);
    if (!status)
        status = msa_index_prefill_plan(s->context, &index, &s->plans[2]);
    if (!status)
        status = msa_index_decode_plan(s->context, &index, &s->plans[3]);
    if (!status)
        status = msa_workspace_create(s->context, 1000, &s->workspace);
    if (!status)
        status = msa_workspace_reserve(s->workspace, 100000);
    return status;
}

static void session_close(struct session *s)
{
    for (int i = 0; i < 4; i++)
        msa_plan_destroy(s->plans[i]);
    msa_context_destroy(s->context);
    msa_workspace_destroy(s->workspace);
}

static msa_context_options options_of(struct counter *counter)
{
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;

    options.num_threads = 2;
    options.parallel_for = serial_for;
    options.alloc = counting_alloc;
    options.free = counting_free;
    options.alloc_data = counter;
    return options;
}

static void every_allocation_can_fail(void **state)
{
    struct counter counter = {0, 0, 0};
    const msa_context_options options = options_of(&counter);
    struct session session;
    size_t total;

    (void)state;
    assert_int_equal(session_open(&session, &options), MSA_SUCCESS);
    session_close(&session);
    assert_int_equal(counter.live, 0);
    total = counter.calls;
    assert_true(total >= 7); /* a context, four plans, a workspace and its growth at least */

    for (size_t n = 1; n <= total; n++) {
        counter = (struct counter){0, 0, n};
        assert_int_equal(session_open(&session, &options), MSA_ERROR_OUT_OF_MEMORY);
        assert_non_null(strstr(msa_last_error(), "bytes"));
        assert_int_equal(counter.calls, n); /* nothing goes on after a failure */
        session_close(&session);
        assert_int_equal(counter.live, 0);
    }
    counter = (struct counter){0, 0, 0};
    assert_int_equal(session_open(&session, &options), MSA_SUCCESS);
    session_close(&session);
    assert_int_equal(counter.live, 0);
    assert_int_equal(counter.calls, total);
}

/* Failing targets are NULL, so that destroying them is safe. */
static void failed_objects_are_null(void **state)
{
    struct counter counter = {0, 0, 1};
    const msa_context_options options = options_of(&counter);
    msa_context *context = (msa_context *)&counter;
    msa_plan *plan = (msa_plan *)&counter;
    msa_workspace *workspace = (msa_workspace *)&counter;

    (void)state;
    assert_int_equal(msa_context_create(&options, &context), MSA_ERROR_OUT_OF_MEMORY);
    assert_null(context);
    assert_int_equal(msa_context_create(&options, &context), MSA_SUCCESS);
    counter.fail_at = counter.calls + 1;
    assert_int_equal(msa_prefill_plan(context, &(msa_attention_desc)MSA_ATTENTION_DESC_INIT, &plan),
                     MSA_ERROR_OUT_OF_MEMORY);
    assert_null(plan);
    counter.fail_at = counter.calls + 1;
    assert_int_equal(msa_workspace_create(context, 8, &workspace), MSA_ERROR_OUT_OF_MEMORY);
    assert_null(workspace);
    msa_context_destroy(context);
    assert_int_equal(counter.live, 0);
}

/* A plan of the largest capacity on a small machine: refused, not promised. */
static void *small_alloc(void *data, size_t bytes)
{
    return bytes > 1 << 24 ? NULL : counting_alloc(data, bytes);
}

static void huge_plans(void **state)
{
    struct counter counter = {0, 0, 0};
    msa_context_options options = options_of(&counter);
    msa_attention_desc attention = MSA_ATTENTION_DESC_INIT;
    msa_index_desc index = MSA_INDEX_DESC_INIT;
    msa_context *context;
    msa_plan *plan;

    (void)state;
    options.alloc = small_alloc;
    assert_int_equal(msa_context_create(&options, &context), MSA_SUCCESS);
    attention.max_kv_len = index.max_kv_len = MSA_MAX_KV_LEN;
    attention.max_total_q = index.max_total_q = INT32_MAX;
    assert_int_equal(msa_prefill_plan(context, &attention, &plan), MSA_SUCCESS);
    msa_plan_destroy(plan);
    assert_int_equal(msa_index_decode_plan(context, &index, &plan), MSA_SUCCESS);
    msa_plan_destroy(plan);
    attention.max_batch = index.max_batch = INT32_MAX - 1;
    assert_int_equal(msa_prefill_plan(context, &attention, &plan), MSA_ERROR_OUT_OF_MEMORY);
    assert_non_null(strstr(msa_last_error(), "2147483646"));
    assert_int_equal(msa_index_decode_plan(context, &index, &plan), MSA_ERROR_OUT_OF_MEMORY);
    msa_context_destroy(context);
    assert_int_equal(counter.live, 0);
}

static void no_allocation_at_work(void **state)
{
    struct counter counter = {0, 0, 0};
    const msa_context_options options = options_of(&counter);
    struct fixture f;
    size_t before;

    (void)state;
    fixture_open(&f);
    msa_context_destroy(f.context);
    assert_int_equal(msa_context_create(&options, &f.context), MSA_SUCCESS);
    fixture_attention(&f, MSA_E4M3, MSA_NVFP4, 0, msa_decode_plan, msa_decode_prepare);
    before = counter.calls;
    counter.fail_at = before + 1;
    assert_int_equal(msa_decode_prepare(f.plan, &f.step, NULL), MSA_SUCCESS);
    assert_int_equal(msa_decode_run(f.plan, &f.attend, NULL), MSA_SUCCESS);
    assert_int_equal(msa_topk(f.context, &f.topk, NULL), MSA_SUCCESS);
    assert_int_equal(msa_combine(f.context, &f.combine, NULL), MSA_SUCCESS);
    assert_int_equal(msa_merge(f.context, &f.merge, NULL), MSA_SUCCESS);
    assert_int_equal(msa_quantise(f.context, &f.quantise, NULL), MSA_SUCCESS);
    assert_int_equal(msa_convert(f.context, &f.convert, NULL), MSA_SUCCESS);
    assert_int_equal(msa_cache_write(f.context, &f.write, NULL), MSA_SUCCESS);
    assert_int_equal(counter.calls, before);
    msa_plan_destroy(f.plan);
    counter.fail_at = 0;
    fixture_index(&f, MSA_E4M3, MSA_NVFP4, MSA_INDEX_SELECTION, msa_index_prefill_plan, msa_index_prefill_prepare);
    before = counter.calls;
    counter.fail_at = before + 1;
    assert_int_equal(msa_index_prefill_prepare(f.plan, &f.step, NULL), MSA_SUCCESS);
    assert_int_equal(msa_index_prefill_run(f.plan, &f.score, NULL), MSA_SUCCESS);
    assert_int_equal(counter.calls, before);
    fixture_close(&f);
    assert_int_equal(counter.live, 0);
}

/* Many sessions in a row, refused calls among them, leave nothing behind. */
static void no_growth(void **state)
{
    struct counter counter = {0, 0, 0};
    const msa_context_options options = options_of(&counter);
    msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
    msa_context *context;
    msa_plan *plan;

    (void)state;
    assert_int_equal(msa_context_create(&options, &context), MSA_SUCCESS);
    const size_t base = counter.live;

    for (int i = 0; i < 2000; i++) {
        desc.head_dim = i % 3 ? 128 : 64;
        desc.strategy = i % 5 ? MSA_STRATEGY_AUTO : MSA_STRATEGY_PAGE_MAJOR;
        if (msa_prefill_plan(context, &desc, &plan) == MSA_SUCCESS)
            msa_plan_destroy(plan);
        assert_int_equal(counter.live, base);
    }
    msa_context_destroy(context);
    assert_int_equal(counter.live, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation_can_fail),
        cmocka_unit_test(failed_objects_are_null),
        cmocka_unit_test(huge_plans),
        cmocka_unit_test(no_allocation_at_work),
        cmocka_unit_test(no_growth),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
