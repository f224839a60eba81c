/* SPDX-License-Identifier: MIT
 *
 * requests.c - a step's lengths, cleaned: which rows belong to which request, and how they fall into tiles.
 *
 * Tiles never span requests. Bad lengths are masked, never fatal: rows are cut to [0, total_q) and to what earlier
 * requests left, kv lengths to the pages of the plan's capacity.
 */
#include "cpu.h"

msa_status cpu_step_create(msa_plan *plan)
{
    size_t batch = (size_t)plan->max_batch;
    _Static_assert(sizeof(struct cpu_request) + sizeof(int64_t) == 48, "msa.h, of max_batch, says 48 bytes");
    size_t bytes = sizeof(struct cpu_step) + batch * sizeof(struct cpu_request) + (batch + 1) * sizeof(int64_t);
    /* Not cleared: prepare writes what is read later, and a capacity that no step uses then takes no memory. */
    struct cpu_step *prepared = plan->context->alloc(plan->context->alloc_data, bytes);
    if (!prepared)
        return fail(MSA_ERROR_OUT_OF_MEMORY, "max_batch = %d: %zu bytes for the plan could not be allocated",
                    (int)plan->max_batch, bytes);
    prepared->requests = (struct cpu_request *)(prepared + 1);
    prepared->first_tile = (int64_t *)(prepared->requests + batch);
    plan->backend_data = prepared;
    return MSA_SUCCESS;
}

void cpu_step_destroy(msa_plan *plan)
{
    context_free(plan->context, plan->backend_data);
}

void cpu_step_prepare(msa_plan *plan)
{
    struct cpu_step *prepared = plan->backend_data;
    const msa_step *step = &plan->step;
    uint32_t error = 0;
    if (step->batch && (step->cu_seqlens_q[0] != 0 || (step->cu_seqlens_k && step->cu_seqlens_k[0] != 0)))
        error |= MSA_ERROR_BIT_LENGTHS;
    const int64_t most_keys = (int64_t)plan->max_pages * MSA_PAGE_SIZE;
    int64_t taken = 0; /* rows that earlier requests own */
    prepared->first_tile[0] = 0;
    for (int64_t b = 0; b < step->batch; b++) {
        int64_t begin = step->cu_seqlens_q[b], end = step->cu_seqlens_q[b + 1];
        int64_t kv_len = step->kv_lens ? step->kv_lens[b] : (int64_t)step->cu_seqlens_k[b + 1] - step->cu_seqlens_k[b];
        if (begin < taken || end < begin || end > step->total_q || kv_len < 0)
            error |= MSA_ERROR_BIT_LENGTHS;
        if (kv_len > plan->max_kv_len)
            error |= MSA_ERROR_BIT_CAPACITY;
        int64_t first = begin > taken ? begin : taken;
        int64_t stop = end < step->total_q ? end : step->total_q;
        prepared->requests[b] = (struct cpu_request){
            .first_row = first,
            .num_rows = stop > first ? stop - first : 0,
            .kv_len = kv_len < 0           ? 0
                      : kv_len < most_keys ? kv_len
                                           : most_keys,
            .first_position = kv_len - (end - begin) + (first - begin),
            .pages = (const int32_t *)((const char *)step->page_table + b * step->page_table_stride),
        };
        taken = stop > taken ? stop : taken;
        prepared->first_tile[b + 1] =
            prepared->first_tile[b] + (prepared->requests[b].num_rows + plan->query_tile - 1) / plan->query_tile;
    }
    atomic_store_explicit(&plan->error, error, memory_order_relaxed);
}

int64_t cpu_step_tiles(const msa_plan *plan)
{
    return ((const struct cpu_step *)plan->backend_data)->first_tile[plan->step.batch];
}

const struct cpu_request *cpu_step_tile(const msa_plan *plan, int64_t tile, int64_t *begin, int64_t *end)
{
    const struct cpu_step *prepared = plan->backend_data;
    int64_t low = 0, high = plan->step.batch; /* first_tile[low] <= tile < first_tile[high] */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (prepared->first_tile[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    const struct cpu_request *request = &prepared->requests[low];
    *begin = (tile - prepared->first_tile[low]) * plan->query_tile;
    *end = *begin + plan->query_tile < request->num_rows ? *begin + plan->query_tile : request->num_rows;
    return request;
}
