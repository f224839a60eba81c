/* SPDX-License-Identifier: MIT
 *
 * check_oracle.c - the oracle itself against case files, whose answers come from other programs. The
 * library is compared with the same files by `msa check`; here it takes no part.
 */
#include "casefile.h"
#include "checkkernel.h"

#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = MSA_HEAD_DIM, PAGE = MSA_PAGE_SIZE };

typedef struct recorded {
    const casefile *file;
    msa_step step;
    int32_t max_pages;
    msa_index_desc index_desc;
    msa_index_args index;
    msa_attention_desc desc;
    msa_attention_args attention;
} recorded;

static int64_t extent(const casefile *f, const char *name, int axis)
{
    const case_tensor *t = casefile_tensor(f, name);
    return t ? t->shape[axis] : 0;
}

static const void *data(const casefile *f, const char *name)
{
    const case_tensor *t = casefile_tensor(f, name);
    return t ? t->data : NULL;
}

static msa_dtype dtype(const casefile *f, const char *name)
{
    const case_tensor *t = casefile_tensor(f, name);
    return t ? t->dtype : MSA_DTYPE_DEFAULT;
}

static int32_t option(const casefile *f, const char *key, int32_t fallback)
{
    const char *text = casefile_text(f, key);
    return text ? atoi(text) : fallback;
}

static double tolerance(const casefile *f, const char *key)
{
    const char *text = casefile_text(f, key);
    return text ? strtod(text, NULL) : 0;
}

static bool is_option(const casefile *f, const char *key, const char *value)
{
    const char *text = casefile_text(f, key);
    return text && !strcmp(text, value);
}

static void read_index(recorded *r)
{
    const casefile *f = r->file;
    r->index_desc = (msa_index_desc)MSA_INDEX_DESC_INIT;
    r->index_desc.q_dtype = dtype(f, "index_q");
    r->index_desc.k_dtype = dtype(f, "index_k");
    r->index_desc.num_index_heads = (int32_t)extent(f, "index_q", 1);
    r->index_desc.topk = option(f, "topk", 16);
    r->index_desc.init_pages = option(f, "init_pages", 0);
    r->index_desc.local_pages = option(f, "local_pages", 1);
    r->index_desc.topk_order = is_option(f, "topk_order", "score") ? MSA_TOPK_ORDER_SCORE : MSA_TOPK_ORDER_PAGE;
    r->index_desc.max_kv_len = (int64_t)r->max_pages * PAGE;
    r->index = (msa_index_args)MSA_INDEX_ARGS_INIT;
    r->index.index_q = data(f, "index_q");
    r->index.index_k = data(f, "index_k");
    r->index.index_k_scale = data(f, "index_k_scale");
    r->index.num_pages = extent(f, "index_k", 0);
}

/* K and V in one tensor: BF16 or E4M3 [pages, Hkv, 128, 256], or NVFP4 slots [pages, 2*Hkv, 128, 72]. */
static void read_joined_cache(recorded *r)
{
    const casefile *f = r->file;
    msa_attention_args *a = &r->attention;
    bool slots = casefile_tensor(f, "kv_slots");
    const char *name = slots ? "kv_slots" : "kv";
    a->k = data(f, name);
    a->num_pages = extent(f, name, 0);
    r->desc.kv_dtype = slots ? MSA_NVFP4 : dtype(f, name);
    r->desc.num_kv_heads = (int32_t)extent(f, name, 1) / (slots ? 2 : 1);
    int64_t row = oracle_row_bytes(r->desc.kv_dtype, D), slot = PAGE * 72;
    a->k_token_stride = slots ? row : 2 * row;
    a->k_head_stride = slots ? 2 * slot : 2 * row * PAGE;
    a->k_page_stride = a->k_head_stride * r->desc.num_kv_heads;
    a->v = (const char *)a->k + (slots ? slot : row);
    a->v_token_stride = a->k_token_stride;
    a->v_head_stride = a->k_head_stride;
    a->v_page_stride = a->k_page_stride;
    if (!slots)
        return;
    a->k_scale = (const char *)a->k + PAGE * row;
    a->v_scale = (const char *)a->v + PAGE * row;
    a->k_scale_token_stride = a->v_scale_token_stride = D / 16;
    a->k_scale_head_stride = a->v_scale_head_stride = 2 * slot;
    a->k_scale_page_stride = a->v_scale_page_stride = a->k_page_stride;
}

static void read_attention(recorded *r)
{
    const casefile *f = r->file;
    msa_attention_args *a = &r->attention;
    r->desc = (msa_attention_desc)MSA_ATTENTION_DESC_INIT;
    *a = (msa_attention_args)MSA_ATTENTION_ARGS_INIT;
    if (casefile_tensor(f, "k")) {
        a->k = data(f, "k");
        a->v = data(f, "v");
        a->k_scale = data(f, "k_scale");
        a->v_scale = data(f, "v_scale");
        a->num_pages = extent(f, "k", 0);
        r->desc.kv_dtype = dtype(f, "k");
        r->desc.num_kv_heads = (int32_t)extent(f, "k", 1);
    } else {
        read_joined_cache(r);
    }
    a->q = data(f, "q");
    a->q_descale = data(f, "q_descale");
    a->k_descale = data(f, "k_descale");
    a->v_descale = data(f, "v_descale");
    a->q_descale_stride = extent(f, "q_descale", 0) > 1 ? 4 : 0;
    a->k_descale_stride = extent(f, "k_descale", 0) > 1 ? 4 : 0;
    a->v_descale_stride = extent(f, "v_descale", 0) > 1 ? 4 : 0;
    a->k_global_scale = data(f, "k_global_scale");
    a->v_global_scale = data(f, "v_global_scale");
    r->desc.q_dtype = dtype(f, "q");
    r->desc.num_q_heads = (int32_t)extent(f, "q", 1);
    r->desc.topk = option(f, "topk", 16);
    r->desc.num_lists = (int32_t)extent(f, casefile_tensor(f, "topk") ? "topk" : "expected.topk", 0);
    r->desc.v_scale_order = is_option(f, "v_scale_order", "quad") ? MSA_SCALE_QUAD : MSA_SCALE_LINEAR;
    r->desc.max_kv_len = (int64_t)r->max_pages * PAGE;
    if (casefile_text(f, "sm_scale"))
        r->desc.sm_scale = strtof(casefile_text(f, "sm_scale"), NULL);
    r->step.topk = data(f, casefile_tensor(f, "topk") ? "topk" : "expected.topk");
}

static recorded read_case(const casefile *f)
{
    recorded r = {.file = f, .step = MSA_STEP_INIT};
    r.step.batch = (int32_t)extent(f, "cu_seqlens_q", 0) - 1;
    r.step.cu_seqlens_q = data(f, "cu_seqlens_q");
    r.step.kv_lens = data(f, "kv_lens");
    r.step.cu_seqlens_k = data(f, "cu_seqlens_k");
    r.step.page_table = data(f, "page_table");
    r.max_pages = (int32_t)extent(f, "page_table", 1);
    r.step.total_q = extent(f, casefile_tensor(f, "q") ? "q" : "index_q", 0);
    return r;
}

static bool is_right(double x, double e, double atol, double rtol)
{
    return fabs(x - e) <= atol + rtol * fabs(e) || x == e || (isnan(x) && isnan(e));
}

static void compare_attention(harness *h, const recorded *r, int64_t row, int32_t head)
{
    const casefile *f = r->file;
    const float *out = data(f, "expected.out"), *lse = data(f, "expected.lse");
    int64_t at = row * r->desc.num_q_heads + head;
    oracle_state state;
    if (!oracle_attention_row(&r->desc, &r->step, &r->attention, row, head, &state))
        return;
    for (int d = 0; d < D; d++)
        if (!is_right(state.out[d], (double)out[at * D + d], tolerance(f, "out_atol"), tolerance(f, "out_rtol")))
            test_fail(h, "out[row %lld, head %d, %d]: oracle %.9g, file %.9g", (long long)row, head, d, state.out[d],
                      (double)out[at * D + d]);
    if (!is_right(state.lse, (double)lse[at], tolerance(f, "lse_atol"), tolerance(f, "lse_rtol")))
        test_fail(h, "lse[row %lld, head %d]: oracle %.9g, file %.9g", (long long)row, head, state.lse,
                  (double)lse[at]);
}

static void compare_index(harness *h, const recorded *r, int64_t row, int32_t head)
{
    const casefile *f = r->file;
    const float *expected = data(f, "expected.scores");
    const int32_t *lists = data(f, "expected.topk"), *counts = data(f, "expected.num_valid_pages");
    int32_t k = r->index_desc.topk, ids[MSA_MAX_TOPK];
    int64_t at = head * r->step.total_q + row;
    double *scores = xmalloc((size_t)r->max_pages * sizeof *scores);
    float *rounded = xmalloc((size_t)r->max_pages * sizeof *rounded);
    int32_t pages = oracle_index_row(&r->index_desc, &r->step, &r->index, row, head, scores, NULL);
    for (int32_t page = 0; page < pages - 1; page++) {
        double e = (double)expected[at * r->max_pages + page];
        rounded[page] = (float)scores[page];
        if (!is_right(scores[page], e, tolerance(f, "scores_atol"), tolerance(f, "scores_rtol")))
            test_fail(h, "scores[head %d, row %lld, page %d]: oracle %.9g, file %.9g", head, (long long)row, page,
                      scores[page], e);
    }
    for (int32_t page = pages > 0 ? pages - 1 : 0; page < r->max_pages; page++)
        if (!isnan(expected[at * r->max_pages + page]))
            test_fail(h, "scores[head %d, row %lld, page %d]: the file has a score, the oracle none", head,
                      (long long)row, page);
    oracle_select_row(rounded, pages, k, r->index_desc.init_pages, r->index_desc.local_pages, r->index_desc.topk_order,
                      ids);
    for (int32_t i = 0; i < k; i++)
        if (ids[i] != lists[at * k + i])
            test_fail(h, "topk[head %d, row %lld, %d]: oracle %d, file %d", head, (long long)row, i, ids[i],
                      lists[at * k + i]);
    if (pages != counts[row])
        test_fail(h, "num_valid_pages[%lld]: oracle %d, file %d", (long long)row, pages, counts[row]);
    free(scores);
    free(rounded);
}

static void compare_case(harness *h, const casefile *f)
{
    recorded r = read_case(f);
    random_stream random = test_random(h);
    bool attends = !is_option(f, "op", "index"), indexes = is_option(f, "op", "index") || is_option(f, "op", "layer");
    if (indexes)
        read_index(&r);
    for (int64_t row = 0; indexes && row < r.step.total_q; row++)
        compare_index(h, &r, row, random_below(&random, r.index_desc.num_index_heads));
    if (attends)
        read_attention(&r);
    for (int64_t row = 0; attends && row < r.step.total_q; row += h->options.quick ? 16 : 1)
        compare_attention(h, &r, row, random_below(&random, r.desc.num_q_heads));
}

static void check_folder(harness *h, const char *folder)
{
    char pattern[1024];
    snprintf(pattern, sizeof pattern, "%s/*.safetensors", folder);
    glob_t found;
    if (glob(pattern, 0, NULL, &found)) {
        if (test_begin(h, "oracle", "%s", folder)) {
            test_skip(h, "no case files in this folder");
            test_end(h);
        }
        return;
    }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        const char *slash = strrchr(found.gl_pathv[i], '/');
        if (!test_begin(h, "oracle", "%s", slash + 1))
            continue;
        casefile *f = casefile_open(found.gl_pathv[i]);
        if (f)
            compare_case(h, f);
        else
            test_fail(h, "cannot be read");
        casefile_close(f);
        test_end(h);
    }
    globfree(&found);
}

/* Every number of the formats that is decoded by table must survive encoding. */
static void check_numbers(harness *h)
{
    static const struct {
        msa_dtype dtype;
        uint32_t codes;
    } formats[] = {{MSA_E4M3, 256}, {MSA_BF16, 65536}, {MSA_FP16, 65536}};
    if (!test_begin(h, "oracle", "numbers"))
        return;
    for (int i = 0; i < 3; i++)
        for (uint32_t code = 0; code < formats[i].codes; code++) {
            uint16_t half = (uint16_t)code; /* little-endian */
            double x = oracle_value(formats[i].dtype, &half);
            CHECK(h, isnan(x) || oracle_encode(formats[i].dtype, x) == code);
        }
    static const struct { /* dtype, number, encoding: hand-made */
        msa_dtype dtype;
        double x;
        uint32_t code;
    } known[] = {{MSA_E4M3, 1, 0x38},         {MSA_E4M3, 448, 0x7E},        {MSA_E4M3, 1e9, 0x7E},
                 {MSA_E4M3, 0x1p-9, 0x01},    {MSA_E4M3, 0x1p-10, 0x00},    {MSA_E4M3, 0x3p-10, 0x02},
                 {MSA_E4M3, -1.0625, 0xB8},   {MSA_E4M3, 1.1875, 0x3A},     {MSA_BF16, 1, 0x3F80},
                 {MSA_BF16, -2, 0xC000},      {MSA_BF16, 0x1.01p0, 0x3F80}, {MSA_BF16, 0x1.03p0, 0x3F82},
                 {MSA_FP16, 1, 0x3C00},       {MSA_FP16, 65504, 0x7BFF},    {MSA_FP16, 65520, 0x7C00},
                 {MSA_FP16, 0x1p-24, 0x0001}, {MSA_NVFP4, 5, 0x6},          {MSA_NVFP4, -0.25, 0x8},
                 {MSA_NVFP4, 100, 0x7},       {MSA_NVFP4, 1.75, 0x4}};
    for (int i = 0; i < (int)(sizeof known / sizeof known[0]); i++)
        CHECK(h, oracle_encode(known[i].dtype, known[i].x) == known[i].code);
    test_end(h);
}

void check_oracle(harness *h)
{
    check_numbers(h);
    char *folders = xmalloc(strlen(h->options.cases) + 1);
    strcpy(folders, h->options.cases);
    char *rest = NULL;
    for (char *folder = strtok_r(folders, ":", &rest); folder; folder = strtok_r(NULL, ":", &rest))
        check_folder(h, folder);
    free(folders);
}
