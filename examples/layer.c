/* SPDX-License-Identifier: MIT
 *
 * One sparse layer as an engine runs it: a prompt of 3000 tokens enters an empty FP8 cache, the index selects 16 pages
 * for each query, and attention reads those. 16 query heads share one KV head; there is one index head.
 */
#include <msa.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 3000, HEADS = 16, PAGES = (TOKENS + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE, K = 16 };

static void check(msa_status status)
{
    if (status != MSA_SUCCESS) {
        fprintf(stderr, "%s: %s\n", msa_status_string(status), msa_last_error());
        exit(1);
    }
}

/* Zeroed memory, aligned for everything that msa.h asks. */
static void *zeros(size_t bytes)
{
    bytes = (bytes + 255) / 256 * 256;
    unsigned char *data = aligned_alloc(256, bytes);
    if (!data)
        exit(1);
    for (size_t i = 0; i < bytes; i++)
        data[i] = 0;
    return data;
}

/* Stands for a model's projections: numbers between -1 and 1. */
static void fill(float *data, size_t n)
{
    static uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        data[i] = (float)(state >> 8) / (1 << 23) - 1.0f;
    }
}

int main(void)
{
    const size_t row = MSA_HEAD_DIM, page = MSA_PAGE_SIZE * row;
    float *new_k = zeros(TOKENS * row * 4), *new_v = zeros(TOKENS * row * 4), *new_index_k = zeros(TOKENS * row * 4);
    float *new_q = zeros(TOKENS * HEADS * row * 4), *new_index_q = zeros(TOKENS * row * 4);
    uint8_t *k = zeros(PAGES * page), *v = zeros(PAGES * page), *index_k = zeros(PAGES * page);
    uint8_t *q = zeros(TOKENS * HEADS * row), *index_q = zeros(TOKENS * row);
    uint16_t *out = zeros(TOKENS * HEADS * row * 2);
    float *lse = zeros(TOKENS * HEADS * 4);
    int32_t *topk = zeros(TOKENS * K * 4), *page_table = zeros(PAGES * 4);
    int64_t *slots = zeros(TOKENS * 8);
    const int32_t cu_seqlens_q[] = {0, TOKENS}, kv_lens[] = {TOKENS};

    fill(new_k, TOKENS * row), fill(new_v, TOKENS * row), fill(new_index_k, TOKENS * row);
    fill(new_q, TOKENS * HEADS * row), fill(new_index_q, TOKENS * row);
    for (int p = 0; p < PAGES; p++)
        page_table[p] = PAGES - 1 - p; /* any order will do */
    for (int t = 0; t < TOKENS; t++)
        slots[t] = (int64_t)page_table[t / MSA_PAGE_SIZE] * MSA_PAGE_SIZE + t % MSA_PAGE_SIZE;

    msa_context *context;
    check(msa_context_create(NULL, &context));

    /* Plans: once per kind of step, with its largest sizes. */
    msa_index_desc index_desc = MSA_INDEX_DESC_INIT;
    index_desc.outputs = MSA_INDEX_SELECTION;
    index_desc.max_total_q = index_desc.max_kv_len = TOKENS;
    msa_attention_desc desc = MSA_ATTENTION_DESC_INIT;
    desc.num_q_heads = HEADS;
    desc.num_kv_heads = 1;
    desc.max_total_q = desc.max_kv_len = TOKENS;
    msa_plan *index_plan, *plan;
    check(msa_index_prefill_plan(context, &index_desc, &index_plan));
    check(msa_prefill_plan(context, &desc, &plan));
    size_t index_bytes = msa_plan_workspace(index_plan), bytes = msa_plan_workspace(plan);
    msa_workspace *workspace; /* the plans run one after the other and share it */
    check(msa_workspace_create(context, index_bytes > bytes ? index_bytes : bytes, &workspace));

    /* New tokens into the cache, and the queries to FP8. */
    msa_cache_write_args write = MSA_CACHE_WRITE_ARGS_INIT;
    write.tokens = TOKENS, write.slot_mapping = slots, write.num_pages = PAGES;
    write.src_dtype = MSA_F32, write.k_new = new_k, write.v_new = new_v, write.index_k_new = new_index_k;
    write.kv_dtype = write.index_k_dtype = MSA_E4M3, write.k = k, write.v = v, write.index_k = index_k;
    check(msa_cache_write(context, &write, NULL));
    msa_quantise_args quantise = MSA_QUANTISE_ARGS_INIT;
    quantise.src_dtype = MSA_F32, quantise.cols = MSA_HEAD_DIM;
    quantise.rows = TOKENS * HEADS, quantise.src = new_q, quantise.dst = q;
    check(msa_quantise(context, &quantise, NULL));
    quantise.rows = TOKENS, quantise.src = new_index_q, quantise.dst = index_q;
    check(msa_quantise(context, &quantise, NULL));

    /* Index and selection. */
    msa_step step = MSA_STEP_INIT;
    step.batch = 1, step.total_q = TOKENS, step.cu_seqlens_q = cu_seqlens_q, step.kv_lens = kv_lens;
    step.page_table = page_table;
    step.workspace = msa_workspace_data(workspace), step.workspace_bytes = msa_workspace_bytes(workspace);
    msa_index_args index = MSA_INDEX_ARGS_INIT;
    index.index_q = index_q, index.index_k = index_k, index.num_pages = PAGES, index.topk = topk;
    check(msa_index_prefill_prepare(index_plan, &step, NULL));
    check(msa_index_prefill_run(index_plan, &index, NULL));

    /* Attention over the selected pages. */
    step.topk = topk;
    msa_attention_args args = MSA_ATTENTION_ARGS_INIT;
    args.q = q, args.k = k, args.v = v, args.num_pages = PAGES, args.out = out, args.lse = lse;
    check(msa_prefill_prepare(plan, &step, NULL));
    check(msa_prefill_run(plan, &args, NULL));
    uint32_t bad;
    check(msa_plan_error(plan, &bad, NULL));

    printf("pages of the last query:");
    for (int i = 0; i < K; i++)
        printf(" %d", topk[(TOKENS - 1) * K + i]);
    printf("\nits LSE, head 0: %.4f; error word: %u\n", lse[(size_t)(TOKENS - 1) * HEADS], bad);

    msa_workspace_destroy(workspace);
    msa_plan_destroy(plan);
    msa_plan_destroy(index_plan);
    msa_context_destroy(context);
    void *const buffers[] = {new_k, new_v,   new_index_k, new_q, new_index_q, k,          v,    index_k,
                             q,     index_q, out,         lse,   topk,        page_table, slots};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        free(buffers[i]);
    return 0;
}
