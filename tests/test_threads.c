/* SPDX-License-Identifier: MIT
 *
 * Real threads, lent by the caller (so that ThreadSanitizer sees all synchronisation): several of them inside one run,
 * and several runs of different plans of one context at once. Every bit must be that of a single thread.
 */
#include "api_fixture.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LENT_THREADS = 3, USERS = 4, ROUNDS = 5 };

/* ------------------------------------------------------------------------------------------------ lent threads */

struct lent_call {
    atomic_size_t next;
    size_t n;
    void (*task)(void *arg, size_t i, size_t thread);
    void *arg;
    atomic_int inside[LENT_THREADS]; /* calls in flight by thread number: never two */
};

struct lent_thread {
    struct lent_call *call;
    size_t number;
};

static void *lent_main(void *data)
{
    struct lent_thread *self = data;
    struct lent_call *call = self->call;

    for (size_t i; (i = atomic_fetch_add_explicit(&call->next, 1, memory_order_relaxed)) < call->n;) {
        atomic_fetch_add_explicit(&call->inside[self->number], 1, memory_order_relaxed);
        call->task(call->arg, i, self->number);
        atomic_fetch_sub_explicit(&call->inside[self->number], 1, memory_order_relaxed);
    }
    return NULL;
}

/* Whichever thread is free takes the next task. */
static int lent_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg)
{
    struct lent_call call = {.n = n, .task = task, .arg = arg};
    struct lent_thread threads[LENT_THREADS];
    pthread_t handles[LENT_THREADS];

    (void)data;
    for (size_t i = 0; i < LENT_THREADS; i++) {
        threads[i] = (struct lent_thread){&call, i};
        if (pthread_create(&handles[i], NULL, lent_main, &threads[i]))
            abort();
    }
    for (size_t i = 0; i < LENT_THREADS; i++) {
        if (pthread_join(handles[i], NULL))
            abort();
    }
    return 0;
}

static msa_context *lent_context(void)
{
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;
    msa_context *context;

    options.num_threads = LENT_THREADS;
    options.parallel_for = lent_for;
    assert_int_equal(msa_context_create(&options, &context), MSA_SUCCESS);
    return context;
}

/* ------------------------------------------------------------------------------------------------ users */

/* One user thread's problem. Each has tensors, a plan and a workspace of its own, and the context is everyone's. */
struct user {
    struct fixture f;
    bool index;
    uint8_t *expected; /* the arena after the work of a single thread */
    const char *failure;
};

static msa_status work(struct user *user)
{
    struct fixture *f = &user->f;
    msa_status status;

    if (user->index) {
        status = msa_index_prefill_prepare(f->plan, &f->step, NULL);
        if (!status)
            status = msa_index_prefill_run(f->plan, &f->score, NULL);
    } else {
        status = msa_prefill_prepare(f->plan, &f->step, NULL);
        if (!status)
            status = msa_prefill_run(f->plan, &f->attend, NULL);
    }
    if (!status)
        status = msa_cache_write(f->context, &f->write, NULL);
    if (!status)
        status = msa_topk(f->context, &f->topk, NULL);
    if (!status)
        status = msa_combine(f->context, &f->combine, NULL);
    memset(f->step.workspace, 0, f->step.workspace_bytes);
    return status;
}

/* cmocka's checks may not fail in other threads: failures are kept for the main one. */
static void *user_main(void *data)
{
    struct user *user = data;

    for (int round = 0; round < ROUNDS && !user->failure; round++) {
        uint32_t bits = 1;

        fixture_restore(&user->f);
        if (work(user))
            user->failure = msa_last_error();
        else if (memcmp(user->f.arena, user->expected, user->f.used))
            user->failure = "other bits than a single thread's";
        else if (msa_plan_error(user->f.plan, &bits, NULL) || bits)
            user->failure = "error bits";
        else if (msa_topk(user->f.context, NULL, NULL) != MSA_ERROR_INVALID_ARGUMENT ||
                 !strstr(msa_last_error(), "args"))
            user->failure = "another thread's message";
    }
    return NULL;
}

static void open_user(struct user *user, msa_context *shared, bool index)
{
    struct fixture *f = &user->f;

    *user = (struct user){.index = index};
    fixture_open(f);
    if (shared) {
        msa_context_destroy(f->context);
        f->context = shared;
    }
    if (index)
        fixture_index(f, MSA_E4M3, MSA_NVFP4, MSA_INDEX_SCORES | MSA_INDEX_SELECTION, msa_index_prefill_plan,
                      msa_index_prefill_prepare);
    else
        fixture_attention(f, MSA_E4M3, MSA_NVFP4, 0, msa_prefill_plan, msa_prefill_prepare);
    fixture_remember(f);
}

static void close_user(struct user *user, bool shared)
{
    if (shared)
        user->f.context = NULL;
    fixture_close(&user->f);
    free(user->expected);
}

/* The arena as a context of two serial threads leaves it. Its workspace lies elsewhere and has another size, so only
 * what comes before it is compared. */
static uint8_t *expected_of(bool index)
{
    struct user alone;
    uint8_t *expected;

    open_user(&alone, NULL, index);
    assert_int_equal(work(&alone), MSA_SUCCESS);
    alone.f.used = (size_t)((uint8_t *)alone.f.step.workspace - alone.f.arena);
    expected = malloc(alone.f.used);
    assert_non_null(expected);
    memcpy(expected, alone.f.arena, alone.f.used);
    close_user(&alone, false);
    return expected;
}

static void plans_at_once(void **state)
{
    msa_context *shared = lent_context();
    struct user users[USERS];
    pthread_t threads[USERS];

    (void)state;
    for (int i = 0; i < USERS; i++) {
        open_user(&users[i], shared, i % 2);
        users[i].f.used = (size_t)((uint8_t *)users[i].f.step.workspace - users[i].f.arena);
        users[i].expected = expected_of(i % 2);
    }
    for (int i = 0; i < USERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, user_main, &users[i]), 0);
    for (int i = 0; i < USERS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < USERS; i++) {
        if (users[i].failure)
            fail_msg("user %d: %s", i, users[i].failure);
        close_user(&users[i], true);
    }
    msa_context_destroy(shared);
}

/* Plans are made and destroyed in several threads at once; the last one outlives the context. */
static void *plan_main(void *data)
{
    msa_context *context = data;
    msa_plan *plans[8] = {NULL};
    void *result = NULL;

    for (int i = 0; i < 8; i++) {
        if (msa_prefill_plan(context, &(msa_attention_desc)MSA_ATTENTION_DESC_INIT, &plans[i]))
            result = context;
    }
    for (int i = 0; i < 8; i++)
        msa_plan_destroy(plans[i]);
    return result;
}

static void plans_come_and_go(void **state)
{
    msa_context *context = lent_context();
    msa_plan *last;
    pthread_t threads[USERS];

    (void)state;
    assert_int_equal(msa_decode_plan(context, &(msa_attention_desc)MSA_ATTENTION_DESC_INIT, &last), MSA_SUCCESS);
    for (int i = 0; i < USERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, plan_main, context), 0);
    for (int i = 0; i < USERS; i++) {
        void *result;

        assert_int_equal(pthread_join(threads[i], &result), 0);
        assert_null(result);
    }
    msa_context_destroy(context);
    msa_plan_destroy(last);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_at_once),
        cmocka_unit_test(plans_come_and_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
