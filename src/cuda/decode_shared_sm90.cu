/* SPDX-License-Identifier: MIT
 *
 * decode_shared_sm90.cu - decode attention for Hopper where requests have several new tokens: E4M3 queries with E4M3 or
 * NVFP4 K/V. Neighbouring queries of a request select mostly the same pages, and share their loads and conversions.
 *
 * A block takes a tile, up to 8 queries of 16 heads (more of fewer heads) of one request and KV head, and walks the
 * union of the pages that they selected, in ascending order. Two consumer warpgroups have 64 rows each, two loading
 * ones convert a page ahead (decode_shared_sm90.cuh). A warpgroup passes pages that none of its queries selected, a
 * warp leaves out their softmax. attention_sm90.cuh has the products and the softmax. Rows that do not see a page are
 * left alone by it.
 *
 * A tile with one query, or whose queries share too little, takes its rows one by one as decode_sm90.cu does
 * (decode_rows_sm90.cuh). Its lists decide that (load_lists), so that room for many tokens costs a step of few little,
 * and a row's bits depend on its request alone. Blocks start in the order of their tiles' rows, the most first
 * (prepare_smxx.cu, small steps), so that the last ones to end are short.
 *
 *   shared memory   3 stages of 48 KB and 32 KB of queries, or 4 groups' tiles and queries; lists: 216 KB (NVFP4),
 *                   226 KB
 *   registers       consumers 160, loaders 96 (launch 128, and so rows one by one)
 *
 * Floor: of a page and warpgroup 768 cycles of products; of a page 700 cycles of conversions, beside them.
 * Measured on an H200, 2026-11-30, as decode_sm90.cu, 64/4 heads, NVFP4 and E4M3: 32 requests with 8 new tokens each,
 * 14 of 16 pages in common, 62.2 and 57.2 us (decode_sm90 for such plans: 121); no page but the last in common, 125 and
 * 136 (shared: 197, 172); a step of one token each in a plan for 8: 23.3, 23.8 (in a plan for one: 21.5, 22.3); 1 to 16
 * tokens, mixed, 94 and 89 (tiles as requests come: 109, 100), no page but the last in common, NVFP4 156 (205). A page
 * takes the loaders 2700 cycles and a warpgroup that sees it 2800, each waiting for its own results most of the time.
 */
#include "decode_rows_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ queries */

/* Of a warp's row: its query, of the warp; -1: a row left over. */
static __device__ __forceinline__ int query_of_row(int ratio, int row)
{
    int query = row / ratio;
    return query < WARP_ROWS / ratio ? query : -1;
}

/* The tile's query of row `row` of a warpgroup; -1: none. */
static __device__ __forceinline__ int tile_query(int ratio, int group, int row)
{
    int query = query_of_row(ratio, row % WARP_ROWS);
    return query < 0 ? -1 : (group * GROUP_WARPS + row / WARP_ROWS) * (WARP_ROWS / ratio) + query;
}

/* A warpgroup's 64 rows as its operand, by its threads: 16 elements at a time. */
template <storage STORAGE>
static __device__ __forceinline__ void stage_queries(const decode_job &d, const cuda_tile &t, int64_t head, int group,
                                                     shared_memory<STORAGE> &m)
{
    int c = threadIdx.x % 8;
    uint32_t to = shared_address(m.q[group]) + c / 4 * (types::Q_BYTES / 2);
#pragma unroll
    for (int i = 0; i < GROUP_ROWS * 8 / WARPGROUP; i++) {
        int row = i * (WARPGROUP / 8) + (int)threadIdx.x % WARPGROUP / 8, query = tile_query(d.ratio, group, row);
        uint4 x = make_uint4(0, 0, 0, 0), low, high;
        if (query >= 0 && query < t.num_rows)
            x = *(const uint4 *)(d.q + (t.first_row + query) * d.q_row_stride +
                                 (head * d.ratio + row % WARP_ROWS % d.ratio) * d.q_head_stride + 16 * c);
        if (tile<STORAGE>::NVFP4) /* widen_key's order */
            x = make_uint4(permute(x.x, x.y, 0x6420), permute(x.x, x.y, 0x7531), permute(x.z, x.w, 0x6420),
                           permute(x.z, x.w, 0x7531));
        widen_4(x.x, low.x, low.y);
        widen_4(x.y, low.z, low.w);
        widen_4(x.z, high.x, high.y);
        widen_4(x.w, high.z, high.w);
        store_shared_128(to + swizzled(row, c % 4 * 2), low);
        store_shared_128(to + swizzled(row, c % 4 * 2 + 1), high);
    }
    fence_async_reads();
    barrier_meet(1 + group, WARPGROUP);
}

/* ------------------------------------------------------------------------------------------------ results */

/* The lane's rows to where the job's results go. */
static __device__ __forceinline__ void write_results(const shared_job &job, const cuda_tile &t, int64_t kv_head,
                                                     int group, float scale, float out_scale, row_state &o)
{
    const decode_job &d = job.decode;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP % GROUP_WARPS;
    finish_sums(o);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = lane / 4 + 8 * r, query = tile_query(d.ratio, group, warp * WARP_ROWS + row);
        if (query < 0 || query >= t.num_rows)
            continue;
        int64_t index = t.first_row + query, head = kv_head * d.ratio + row % d.ratio;
        bool empty = o.sum[r] == 0;
        store_elements<types>(o, r, empty ? 0.0f : out_scale / o.sum[r],
                              d.out + index * d.out_row_stride + head * d.out_head_stride,
                              d.bf16_out ? MSA_BF16 : MSA_FP16);
        if (d.lse && lane % 4 == 0) {
            float one = exp2_approx(job.log2_one); /* as the hardware has it: a lone key gives its logit exactly */
            *(float *)(d.lse + index * d.lse_row_stride + head * d.lse_head_stride) =
                empty ? -INFINITY : o.reference[r] * scale * 0.693147181f + logf(o.sum[r] / one);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ consumers */

/* Which of the lane's rows see the page of a stage. The thread's number is read anew, so that nothing that follows from
 * it takes a register across products. */
template <storage STORAGE>
static __device__ __forceinline__ page_view look_at(const shared_memory<STORAGE> &m, int stage, int width)
{
    uint32_t thread = thread_now();
    int first = (int)(thread / CUDA_WARP) * width; /* the warp's */
    uint32_t all = (1u << width) - 1, mask = m.info[stage].queries >> first & all;
    int first_keys = m.info[stage].first_keys;
    page_view view;
    view.any = mask != 0;
    view.all = mask == all;
    view.partial = first_keys < MSA_PAGE_SIZE;
    view.selected[0] = view.selected[1] = view.all;
    view.keys[0] = view.keys[1] = 0;
    if (!view.all || view.partial) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int query = m.query[thread % CUDA_WARP / 4 + 8 * r];
            view.selected[r] = mask >> query & 1;
            view.keys[r] = first_keys + first + query;
        }
    }
    return view;
}

template <storage STORAGE>
static __device__ __forceinline__ void attend_pages(const shared_job &job, const cuda_tile &t,
                                                    shared_memory<STORAGE> &m)
{
    const decode_job &d = job.decode;
    int group = uniform(threadIdx.x / WARPGROUP), width = WARP_ROWS / d.ratio, queries = GROUP_WARPS * width;
    stage_queries(d, t, m.head, group, m);
    uint32_t own = ((1u << queries) - 1) << group * queries; /* at most 16 */
    uint32_t q = matrix_low(shared_address(m.q[group]));
    row_state o;
    clear(o);
    ring_place<STAGES> at = {0};
#pragma unroll 1
    for (;;) {
        wait_full(m, at);
        uint32_t selected = (uint32_t)uniform((int)m.info[at.stage()].queries);
        if (!selected)
            break;
        if (selected & own) {
            uint32_t stage = matrix_low(shared_address(m.stage[at.stage()]));
            attend_page<types>(
                o, q, stage, m.scale, [&] { return look_at(m, (int)at.stage(), width); }, [] {},
                [&] { return stage + types::K_BYTES / 16; }, [] {});
        }
        __syncwarp();
        if (thread_now() % CUDA_WARP == 0)
            barrier_arrive(shared_address(&m.empty[at.stage()]));
        at.advance();
    }
    write_results(job, m.tile, m.head, thread_now() / WARPGROUP, m.scale, m.out_scale, o);
}

/* ------------------------------------------------------------------------------------------------ the kernel */

/* The tile's lists to shared memory. Whether its queries share enough: rows that are taken one by one cost by their
 * lists, shared ones by the union, a page of which costs as much as 1.9 (NVFP4) or 2.4 pages of rows. Pages are counted
 * modulo SEEN_BITS. The lists of the tile decide, and nothing else. */
template <storage STORAGE>
static __device__ __forceinline__ bool load_lists(const decode_job &d, const cuda_tile &t, int head,
                                                  shared_memory<STORAGE> &m)
{
    const cuda_page *lists = d.pages + ((int64_t)(head / d.kv_heads_a_list) * d.total_q + t.first_row) * d.topk;
    int entries = t.num_rows * d.topk, selected = 0, pages = 0;
    for (int base = 0; base < entries; base += CONSUMERS * WARPGROUP + LOADERS) {
        int i = base + (int)threadIdx.x;
        cuda_page page = {-1, -1};
        if (i < entries) {
            page = lists[i];
            m.lists[i / d.topk][i % d.topk] = page;
        }
        bool listed = page.logical >= 0, first = false;
        if (listed) {
            uint32_t bit = 1u << page.logical % 32;
            first = !(atomicOr(&m.seen[page.logical / 32 % (SEEN_BITS / 32)], bit) & bit);
        }
        selected += __syncthreads_count(listed);
        pages += __syncthreads_count(first);
    }
    return 10 * selected > (tile<STORAGE>::NVFP4 ? 19 : 24) * pages;
}

template <storage STORAGE>
static __global__ void __launch_bounds__(CONSUMERS *WARPGROUP + LOADERS, 1)
    attend_shared(const __grid_constant__ shared_job job)
{
    extern __shared__ __align__(1024) char shared[];
    shared_memory<STORAGE> &m = *(shared_memory<STORAGE> *)shared;
    const decode_job &d = job.decode;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&m.full[i]), LOADERS);
            barrier_init(shared_address(&m.empty[i]), CONSUMERS * GROUP_WARPS);
        }
        fence_barriers();
    }
    if (tile<STORAGE>::NVFP4)
        for (int i = threadIdx.x; i < 256; i += blockDim.x)
            m.table[i] = scaled_magnitudes((uint32_t)i);
    if (threadIdx.x < SEEN_BITS / 32)
        m.seen[threadIdx.x] = 0;
    int tile = (int)(blockIdx.x / (unsigned)job.heads), head = (int)(blockIdx.x % (unsigned)job.heads);
    if (threadIdx.x == 0)
        prefetch_l2(job.tiles + tile);
    __syncthreads();
    grid_wait(); /* what this launch reads and writes, the one ahead of it may still write and read */
    cuda_tile t = job.tiles[tile];
    grid_release();
    if (t.num_rows == 0)
        return;
    if (threadIdx.x < WARP_ROWS) {
        int query = query_of_row(d.ratio, threadIdx.x);
        m.query[threadIdx.x] = (uint8_t)(query < 0 ? WARP_ROWS - 1 : query);
    }
    if (threadIdx.x < CUDA_WARP)
        load_factors(d, head, m.scale, m.out_scale);
    if (threadIdx.x == 0) {
        m.tile = t;
        m.head = head;
    }
    if (!load_lists(d, t, head, m)) {
        attend_rows(d, m);
    } else if (uniform(threadIdx.x / WARPGROUP) < CONSUMERS) {
        more_registers<160>();
        attend_pages(job, t, m);
    } else {
        fewer_registers<96>();
        load_pages(d, t, head, m);
    }
}

/* ------------------------------------------------------------------------------------------------ launchers */

template <storage STORAGE>
static cudaError_t launch_shared(const struct cuda_attention *job, const shared_job &d, cudaStream_t stream)
{
    auto kernel = attend_shared<STORAGE>;
    constexpr int bytes = sizeof(shared_memory<STORAGE>);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    unsigned grid = (unsigned)job->step.num_tiles * (unsigned)job->desc.num_kv_heads;
    return error || job->step.num_tiles == 0
               ? error
               : launch(kernel, grid, CONSUMERS * WARPGROUP + LOADERS, bytes, true, stream, d);
}

/* By capacities alone: requests have several new tokens on average, and their rows are more than the device takes at
 * once. */
bool shares_pages(const struct cuda_attention *job)
{
    const msa_attention_desc *desc = &job->desc;
    return desc->q_dtype == MSA_E4M3 && job->ratio >= LEAST_RATIO &&
           desc->max_total_q >= 2 * (int64_t)desc->max_batch &&
           desc->max_total_q * desc->num_kv_heads >= 3 * job->num_sms;
}

static bool plan(struct cuda_attention *job)
{
    job->step.query_tile = TILE_WARPS * (WARP_ROWS / job->ratio);
    job->step.long_first = true;
    job->merges_itself = true;
    return true;
}

static cudaError_t run(const struct cuda_attention *job, cudaStream_t stream)
{
    shared_job shared = {make_job(job, 1), job->step.tiles, job->desc.num_kv_heads, LOG2_448};
    return job->desc.kv_dtype == MSA_E4M3 ? launch_shared<STORAGE_E4M3>(job, shared, stream)
                                          : launch_shared<STORAGE_NVFP4_E4M3>(job, shared, stream);
}

const struct cuda_attention_kernel decode_shared_sm90 = {plan, nullptr, run};
