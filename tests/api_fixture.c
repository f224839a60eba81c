/* SPDX-License-Identifier: MIT
 *
 * See api_fixture.h.
 */
#include "api_fixture.h"

#include <ctype.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ARENA_BYTES = 4 << 20, GAP = 256 };

int serial_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg)
{
    (void)data;
    for (size_t i = 0; i < n; i++)
        task(arg, i, 0);
    return 0;
}

void *fixture_place(struct fixture *f, size_t bytes)
{
    uint8_t *place = f->arena + f->used;

    f->used += (bytes + GAP + 255) / 256 * 256;
    assert_true(f->used <= ARENA_BYTES);
    return place;
}

void fixture_remember(struct fixture *f)
{
    f->remembered = f->used;
    memcpy(f->snapshot, f->arena, f->remembered);
}

bool fixture_untouched(const struct fixture *f)
{
    return memcmp(f->snapshot, f->arena, f->remembered) == 0;
}

void fixture_restore(struct fixture *f)
{
    memcpy(f->arena, f->snapshot, f->remembered);
}

static void *place_i32(struct fixture *f, const int32_t *values, size_t count)
{
    return memcpy(fixture_place(f, count * 4), values, count * 4);
}

static float *place_f32(struct fixture *f, size_t count)
{
    float *values = fixture_place(f, count * 4);

    for (size_t i = 0; i < count; i++)
        values[i] = 0.5f + (float)i;
    return values;
}

static void open_topk(struct fixture *f)
{
    f->topk = (msa_topk_args)MSA_TOPK_ARGS_INIT;
    f->topk.num_heads = FIX_KV_HEADS;
    f->topk.rows = FIX_ROWS;
    f->topk.columns = 8;
    f->topk.k = FIX_TOPK;
    f->topk.scores = place_f32(f, FIX_KV_HEADS * FIX_ROWS * 8);
    f->topk.valid_pages = place_i32(f, (int32_t[FIX_ROWS]){1, 2, 4, 7, 8}, FIX_ROWS);
    f->topk.topk = fixture_place(f, FIX_KV_HEADS * FIX_ROWS * FIX_TOPK * 4);
}

static void open_combine(struct fixture *f)
{
    f->combine = (msa_combine_args)MSA_COMBINE_ARGS_INIT;
    f->combine.num_splits = FIX_TOPK;
    f->combine.rows = FIX_ROWS;
    f->combine.num_q_heads = FIX_Q_HEADS;
    f->combine.num_kv_heads = FIX_KV_HEADS;
    f->combine.o_partial = fixture_place(f, FIX_TOPK * FIX_ROWS * FIX_Q_HEADS * 256);
    f->combine.lse_partial = place_f32(f, FIX_TOPK * FIX_ROWS * FIX_Q_HEADS);
    f->combine.split_counts = place_i32(f, (int32_t[FIX_ROWS * FIX_KV_HEADS]){3, 2, 1, 0, 3, 3, 2, 2, 1, 1},
                                        FIX_ROWS * FIX_KV_HEADS);
    f->combine.out = fixture_place(f, FIX_ROWS * FIX_Q_HEADS * 256);
    f->combine.lse = place_f32(f, FIX_ROWS * FIX_Q_HEADS);
}

static void open_merge(struct fixture *f)
{
    for (int i = 0; i < FIX_STATES; i++) {
        f->states[i] = (msa_merge_state)MSA_MERGE_STATE_INIT;
        f->states[i].out = fixture_place(f, FIX_ROWS * FIX_Q_HEADS * 256);
        f->states[i].lse = place_f32(f, FIX_ROWS * FIX_Q_HEADS);
    }
    f->merge = (msa_merge_args)MSA_MERGE_ARGS_INIT;
    f->merge.num_states = FIX_STATES;
    f->merge.states = f->states;
    f->merge.rows = FIX_ROWS;
    f->merge.num_q_heads = FIX_Q_HEADS;
    f->merge.out = fixture_place(f, FIX_ROWS * FIX_Q_HEADS * 256);
    f->merge.lse = place_f32(f, FIX_ROWS * FIX_Q_HEADS);
}

static void open_numbers(struct fixture *f)
{
    f->quantise = (msa_quantise_args)MSA_QUANTISE_ARGS_INIT;
    f->quantise.rows = FIX_ROWS;
    f->quantise.cols = 128;
    f->quantise.src = fixture_place(f, FIX_ROWS * 128 * 2);
    f->quantise.dst_dtype = MSA_NVFP4;
    f->quantise.dst = fixture_place(f, FIX_ROWS * 64);
    f->quantise.scale = fixture_place(f, FIX_ROWS * 8);
    f->quantise.descale = place_f32(f, 1);

    f->convert = (msa_convert_args)MSA_CONVERT_ARGS_INIT;
    f->convert.rows = FIX_ROWS;
    f->convert.cols = 128;
    f->convert.src = fixture_place(f, FIX_ROWS * 64);
    f->convert.scale = fixture_place(f, FIX_ROWS * 8);
    f->convert.dst_dtype = MSA_FP16;
    f->convert.dst = fixture_place(f, FIX_ROWS * 128 * 2);
}

/* NVFP4 K and V, and NVFP4 index-K, from BF16. */
static void open_write(struct fixture *f)
{
    const int64_t slots[FIX_ROWS] = {0, 127, -1, 128, 383};

    f->write = (msa_cache_write_args)MSA_CACHE_WRITE_ARGS_INIT;
    f->write.tokens = FIX_ROWS;
    f->write.slot_mapping = memcpy(fixture_place(f, sizeof(slots)), slots, sizeof(slots));
    f->write.num_pages = FIX_PAGES;
    f->write.num_kv_heads = FIX_KV_HEADS;
    f->write.k_new = fixture_place(f, FIX_ROWS * FIX_KV_HEADS * 256);
    f->write.v_new = fixture_place(f, FIX_ROWS * FIX_KV_HEADS * 256);
    f->write.index_k_new = fixture_place(f, FIX_ROWS * 256);
    f->write.kv_dtype = MSA_NVFP4;
    f->write.k = fixture_place(f, FIX_PAGES * FIX_KV_HEADS * 128 * 64);
    f->write.v = fixture_place(f, FIX_PAGES * FIX_KV_HEADS * 128 * 64);
    f->write.k_scale = fixture_place(f, FIX_PAGES * FIX_KV_HEADS * 128 * 8);
    f->write.v_scale = fixture_place(f, FIX_PAGES * FIX_KV_HEADS * 128 * 8);
    f->write.k_descale = place_f32(f, 1);
    f->write.v_descale = place_f32(f, 1);
    f->write.index_k_dtype = MSA_NVFP4;
    f->write.index_k = fixture_place(f, FIX_PAGES * 128 * 64);
    f->write.index_k_scale = fixture_place(f, FIX_PAGES * 128 * 8);
}

void fixture_open(struct fixture *f)
{
    uint32_t noise = 1;

    memset(f, 0, sizeof(*f));
    f->arena = aligned_alloc(256, ARENA_BYTES);
    f->snapshot = malloc(ARENA_BYTES);
    assert_non_null(f->arena);
    assert_non_null(f->snapshot);
    for (size_t i = 0; i < ARENA_BYTES; i++) {
        noise = noise * 1664525 + 1013904223;
        f->arena[i] = (uint8_t)(noise >> 24 & 0xBF); /* in every format a finite number below 2 */
    }
    f->options = (msa_context_options)MSA_CONTEXT_OPTIONS_INIT;
    f->options.num_threads = 2;
    f->options.parallel_for = serial_for;
    f->context_info = (msa_context_info)MSA_CONTEXT_INFO_INIT;
    f->kernel_info = (msa_kernel_info)MSA_KERNEL_INFO_INIT;
    f->plan_info = (msa_plan_info)MSA_PLAN_INFO_INIT;
    assert_int_equal(msa_context_create(&f->options, &f->context), MSA_SUCCESS);
    open_topk(f);
    open_combine(f);
    open_merge(f);
    open_numbers(f);
    open_write(f);
}

void fixture_close(struct fixture *f)
{
    msa_plan_destroy(f->plan);
    msa_plan_destroy(f->other_plan);
    msa_context_destroy(f->context);
    free(f->arena);
    free(f->snapshot);
}

static void open_step(struct fixture *f)
{
    f->step = (msa_step)MSA_STEP_INIT;
    f->step.batch = FIX_BATCH;
    f->step.total_q = FIX_ROWS;
    f->step.cu_seqlens_q = place_i32(f, (int32_t[FIX_BATCH + 1]){0, 2, FIX_ROWS}, FIX_BATCH + 1);
    /* The second request ends just past its first page: one row sees all of that page, two rows see more. */
    f->step.kv_lens = place_i32(f, (int32_t[FIX_BATCH]){3, 130}, FIX_BATCH);
    f->step.page_table = place_i32(f, (int32_t[FIX_BATCH * FIX_TABLE]){2, 0, 1, 2}, FIX_BATCH * FIX_TABLE);
}

static void plan_ready(struct fixture *f, prepare_fn *prepare)
{
    f->step.workspace_bytes = msa_plan_workspace(f->plan);
    f->step.workspace = fixture_place(f, f->step.workspace_bytes);
    if (f->step.workspace_bytes == 0)
        f->step.workspace = NULL;
    assert_int_equal(prepare(f->plan, &f->step, NULL), MSA_SUCCESS);
}

static size_t row_bytes(msa_dtype dtype)
{
    return dtype == MSA_NVFP4 ? 64 : dtype == MSA_E4M3 ? 128 : 256;
}

void fixture_attention(struct fixture *f, msa_dtype q, msa_dtype kv, int partials, plan_attention_fn *plan,
                       prepare_fn *prepare)
{
    const size_t pool = FIX_PAGES * FIX_KV_HEADS * 128, rows = FIX_ROWS * FIX_Q_HEADS;

    f->attention = (msa_attention_desc)MSA_ATTENTION_DESC_INIT;
    f->attention.q_dtype = q;
    f->attention.kv_dtype = kv;
    f->attention.num_q_heads = FIX_Q_HEADS;
    f->attention.num_kv_heads = FIX_KV_HEADS;
    f->attention.topk = FIX_TOPK;
    f->attention.partials = partials;
    f->attention.max_batch = FIX_BATCH;
    f->attention.max_total_q = FIX_ROWS;
    f->attention.max_kv_len = FIX_KV_LEN;

    open_step(f);
    f->step.topk = place_i32(f, (int32_t[FIX_KV_HEADS * FIX_ROWS * FIX_TOPK]){0, 1, -1, 1, 0, -1, 0, -1, 1, 1},
                             FIX_KV_HEADS * FIX_ROWS * FIX_TOPK);

    f->attend = (msa_attention_args)MSA_ATTENTION_ARGS_INIT;
    f->attend.q = fixture_place(f, rows * row_bytes(q));
    f->attend.k = fixture_place(f, pool * row_bytes(kv));
    f->attend.v = fixture_place(f, pool * row_bytes(kv));
    f->attend.num_pages = FIX_PAGES;
    if (q == MSA_E4M3)
        f->attend.q_descale = place_f32(f, FIX_KV_HEADS), f->attend.q_descale_stride = 4;
    if (kv == MSA_E4M3) {
        f->attend.k_descale = place_f32(f, FIX_KV_HEADS), f->attend.k_descale_stride = 4;
        f->attend.v_descale = place_f32(f, FIX_KV_HEADS), f->attend.v_descale_stride = 4;
    } else if (kv == MSA_NVFP4) {
        f->attend.k_scale = fixture_place(f, pool * 8);
        f->attend.v_scale = fixture_place(f, pool * 8);
        f->attend.k_global_scale = place_f32(f, 1);
        f->attend.v_global_scale = place_f32(f, 1);
    }
    if (partials) {
        f->attend.o_partial = fixture_place(f, FIX_TOPK * rows * 256);
        f->attend.lse_partial = fixture_place(f, FIX_TOPK * rows * 4);
        f->attend.split_counts = fixture_place(f, FIX_ROWS * FIX_KV_HEADS * 4);
    } else {
        f->attend.out = fixture_place(f, rows * 256);
        f->attend.lse = fixture_place(f, rows * 4);
    }
    assert_int_equal(plan(f->context, &f->attention, &f->plan), MSA_SUCCESS);
    plan_ready(f, prepare);
}

void fixture_index(struct fixture *f, msa_dtype q, msa_dtype k, int outputs, plan_index_fn *plan, prepare_fn *prepare)
{
    f->index = (msa_index_desc)MSA_INDEX_DESC_INIT;
    f->index.q_dtype = q;
    f->index.k_dtype = k;
    f->index.num_index_heads = FIX_KV_HEADS;
    f->index.topk = FIX_TOPK;
    f->index.outputs = outputs;
    f->index.max_batch = FIX_BATCH;
    f->index.max_total_q = FIX_ROWS;
    f->index.max_kv_len = FIX_KV_LEN;

    open_step(f);

    f->score = (msa_index_args)MSA_INDEX_ARGS_INIT;
    f->score.index_q = fixture_place(f, FIX_ROWS * FIX_KV_HEADS * row_bytes(q));
    f->score.index_k = fixture_place(f, FIX_PAGES * 128 * row_bytes(k));
    if (k == MSA_NVFP4)
        f->score.index_k_scale = fixture_place(f, FIX_PAGES * 128 * 8);
    f->score.num_pages = FIX_PAGES;
    if (outputs & MSA_INDEX_SCORES)
        f->score.scores = fixture_place(f, FIX_KV_HEADS * FIX_ROWS * FIX_TABLE * 4);
    if (outputs & MSA_INDEX_SELECTION) {
        f->score.topk = fixture_place(f, FIX_KV_HEADS * FIX_ROWS * FIX_TOPK * 4);
        f->score.num_valid_pages = fixture_place(f, FIX_ROWS * 4);
    }
    assert_int_equal(plan(f->context, &f->index, &f->plan), MSA_SUCCESS);
    plan_ready(f, prepare);
}

static void break_field(struct fixture *f, const struct row *row)
{
    char *field = (char *)f + row->offset;

    switch (row->how) {
    case SET_I32:
        memcpy(field, &(int32_t){(int32_t)row->value}, sizeof(int32_t));
        break;
    case SET_I64:
        memcpy(field, &row->value, sizeof(int64_t));
        break;
    case SET_F32:
        memcpy(field, &row->number, sizeof(float));
        break;
    case SET_NULL:
        if (row->offset == offsetof(struct fixture, no_args))
            f->no_args = true;
        else
            memset(field, 0, sizeof(void *));
        break;
    case SET_SHIFT:
        *(char **)(void *)field += row->value;
        break;
    case SET_ALIAS:
        memcpy(field, (char *)f + row->value, sizeof(void *));
        break;
    }
}

/* Whether `word` stands in `text` with no letter, digit or underscore beside it. */
static bool has_word(const char *text, const char *word)
{
    const size_t length = strlen(word);

    for (const char *at = strstr(text, word); at; at = strstr(at + 1, word)) {
        const bool starts = at == text || !(isalnum((unsigned char)at[-1]) || at[-1] == '_');

        if (starts && !(isalnum((unsigned char)at[length]) || at[length] == '_'))
            return true;
    }
    return false;
}

static void check_row(struct fixture *f, call_fn *call, const struct row *row)
{
    struct fixture broken = *f;
    char number[32];
    const char *text = row->text ? row->text : number;
    msa_status status;

    snprintf(number, sizeof(number), "%" PRId64, row->value);
    broken.merge.states = broken.states;
    break_field(&broken, row);
    status = call(&broken);
    if (status != row->status)
        fail_msg("%s = %s: status \"%s\" (%s), must be \"%s\"", row->name, text, msa_status_string(status),
                 status ? msa_last_error() : "", msa_status_string(row->status));
    if (!has_word(msa_last_error(), row->name) || !strstr(msa_last_error(), text) ||
        !strstr(msa_last_error(), row->rule))
        fail_msg("message \"%s\" lacks \"%s\", \"%s\" or \"%s\"", msa_last_error(), row->name, text, row->rule);
    if (!fixture_untouched(f))
        fail_msg("%s = %s: refused, but memory was written", row->name, text);
}

void check_rows(struct fixture *f, call_fn *call, const struct row *rows, size_t num_rows)
{
    fixture_remember(f);
    for (size_t i = 0; i < num_rows; i++) {
        msa_status status;

        check_row(f, call, &rows[i]);
        status = call(f);
        if (status != MSA_SUCCESS)
            fail_msg("after a refused %s the valid call fails: %s", rows[i].name, msa_last_error());
        fixture_restore(f);
    }
}
