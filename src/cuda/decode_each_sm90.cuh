/* SPDX-License-Identifier: MIT
 *
 * decode_each_sm90.cuh - decode_sm90.cu where each group of a block of four has a row and KV head of its own, and all
 * of its pages. The bits are those of blocks of one group, of which four fit a multiprocessor as well; but these take
 * longer with NVFP4 (H200, 2026-11-30, 64/4 heads, us: batch 68 58 and 49, 96 62 and 50, 128 67 and 62.5). With other
 * formats, which wait for memory, it makes no difference; and where not all blocks of four fit the device at once, the
 * last ones run alone (batch 160 86 and 121).
 */
#ifndef MSA_CUDA_DECODE_EACH_SM90_CUH
#define MSA_CUDA_DECODE_EACH_SM90_CUH

#include "decode_merge_sm90.cuh"

enum { EACH = 4 /* groups of a block, which fill the shared memory */ };

template <storage STORAGE> struct each_memory {
    group_memory<STORAGE> group[EACH];
    uint2 table[256];
    uint4 q[EACH][8][CUDA_WARP];
    int32_t pages[EACH];
    float scale[EACH], out_scale[EACH];
};

struct each_job {
    decode_job decode;
    int32_t heads, groups; /* of K and V; of a block that have work, so that all multiprocessors have some */
};

template <storage STORAGE, operand TYPE, bool E4M3>
static __global__ void __launch_bounds__(EACH *GROUP, 1) attend_each(const __grid_constant__ each_job job)
{
    extern __shared__ __align__(1024) char shared[];
    each_memory<STORAGE> &m = *(each_memory<STORAGE> *)shared;
    const decode_job &d = job.decode;
    int group = uniform(threadIdx.x / GROUP), warp = uniform(threadIdx.x / CUDA_WARP % GROUP_WARPS);
    int lane = threadIdx.x % CUDA_WARP;
    group_memory<STORAGE> &own = m.group[group];
    if (threadIdx.x % GROUP == 0) {
        for (int i = 0; i < own.SLOTS; i++)
            barrier_init(shared_address(own.full + i), d.bulk ? 1 : GROUP);
        barrier_init(shared_address(&own.given), GROUP_WARPS);
        fence_barriers();
    }
    if (threadIdx.x < 256)
        m.table[threadIdx.x] = scaled_magnitudes(threadIdx.x);
    int64_t item = (int64_t)blockIdx.x * job.groups + group;
    work w = {item / job.heads, (int32_t)(item % job.heads), 0};
    bool there = group < job.groups && w.row < d.total_q;
    if (there && warp == 0 && lane < d.topk)
        prefetch_l2(page_of_list(d, w));
    else if (there && warp == 1 && lane == 0)
        prefetch_l2(d.rows + w.row);
    __syncthreads();
    grid_wait(); /* what this launch reads and writes, the one ahead of it may still write and read */
    cuda_row where = {-1, -1};
    cuda_page page = {-1, -1};
    if (there)
        where = d.rows[w.row];
    if (there && warp == 0 && lane < d.topk) /* on its way together with the row */
        page = *page_of_list(d, w);
    grid_release();
    if (where.request < 0)
        return;
    if (warp == 0) {
        uint32_t mask = held_pages(d, page);
        if (lane == 0)
            m.pages[group] = __popc(mask);
        if (mask >> lane & 1)
            list_page(d, w.kv_head, page.physical, visible_keys(page, where.position),
                      __popc(mask & ((1u << lane) - 1)), own);
    } else if (warp <= 2) {
        stage_queries<STORAGE, E4M3>(d, w.row, w.kv_head, warp - 1, m.q[group]);
    } else {
        load_factors(d, w.kv_head, m.scale[group], m.out_scale[group]);
    }
    if (threadIdx.x % GROUP < GROUP_WARPS * ROWS)
        own.largest[0][threadIdx.x % GROUP] = -INFINITY;
    barrier_meet(1 + group, GROUP);
    state o = {};
    o.reference[0] = o.reference[1] = -INFINITY;
    attend_pages<STORAGE, TYPE, E4M3, 1>(
        d, own, m.pages[group], [&] { return shared_address(&m.q[threadIdx.x / GROUP][0][threadIdx.x % CUDA_WARP]); },
        shared_address(m.table), m.scale[group], [] { return threadIdx.x; }, o);
    barrier_meet(1 + group, GROUP); /* all have read their last tiles */
    give_state(o, own);
    barrier_meet(1 + group, GROUP);
#pragma unroll 1
    for (int row = warp; row < d.ratio; row += GROUP_WARPS)
        write_result<E4M3>(d, w.row, w.kv_head, row, 4 * chunk_at(row, lane),
                           merge_groups(&own, 1, row, m.scale[group]), m.scale[group], m.out_scale[group]);
}

static inline int64_t count_items(const struct cuda_attention *job)
{
    return (int64_t)job->step.total_q * job->desc.num_kv_heads;
}

/* All blocks at once. */
static inline bool fits_each(const struct cuda_attention *job)
{
    return count_items(job) <= (int64_t)EACH * job->num_sms;
}

template <storage STORAGE, operand TYPE, bool E4M3>
static cudaError_t launch_each(const struct cuda_attention *job, const decode_job &d, cudaStream_t stream)
{
    auto kernel = attend_each<STORAGE, TYPE, E4M3>;
    constexpr int bytes = sizeof(each_memory<STORAGE>);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    int64_t items = count_items(job);
    each_job each = {d, job->desc.num_kv_heads, (int32_t)((items + job->num_sms - 1) / job->num_sms)};
    return error ? error : launch(kernel, grid_blocks(items, each.groups), EACH * GROUP, bytes, true, stream, each);
}

#endif
