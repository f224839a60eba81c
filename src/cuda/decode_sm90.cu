/* SPDX-License-Identifier: MIT
 *
 * decode_sm90.cu - decode attention for Hopper: E4M3 queries with E4M3 or NVFP4 K/V, 16-bit queries with K/V of their
 * type, FP16 queries with E4M3.
 *
 * A row's pages are dealt out by rank, round and round, to the groups of a cluster: `clusters` blocks of GROUPS groups
 * of four warps. A group walks its pages, the warps share a page's keys:
 *   S = Q K^T   16 query heads, mma.sync; the page's maximum over the warps; P = 2^((S - max) * scale) rounded;
 *   O = O * 2^((old - max) * scale) + P V
 * P is relative to the page's own maximum, as on every path, and so are O and the row sum: a page that lies far below
 * the largest maximum (REFERENCE_RANGE) leaves the reference where it is and counts nothing. BF16 has the range of
 * FP32, so P may stay relative to the largest maximum so far, and O cannot overflow.
 * Operands go from the tile to the products without a shuffle (decode_sm90.cuh). At the end the warps' and the groups'
 * O meet in shared memory, the blocks' by stores into the shared memory of the block that owns the head. Everything is
 * added in a fixed order, and the number of parts follows from capacities: a row's bits depend on nothing but the row.
 *
 * Floor: the bytes of the visible pages at 4.69 TB/s; with NVFP4 also 13 ALU operations for 8 elements of K and 28 for
 * 16 of V, a turn of two cycles each: 900 of the 1560 cycles that a page takes an SM.
 * Measured on an H200, 2026-11-30, us a call in a chain of calls in one graph, cold inputs, context 32K, 16 pages, 64/4
 * heads: batch 128 NVFP4 62.5, E4M3 71.6, BF16 136 (52, 80, 84 % of the floor's rate); batch 32 21.5, 22.3, 38.2;
 * batch 8 10.7, 10.2, 14.6; batch 1 with 16/1 heads 5.0, 4.4, 5.4. There a third of the time is code that runs once a
 * launch and waits for its instructions: loops that were unrolled took 1 us more.
 * A launch may start while the one ahead of it drains; it waits for that before it reads or writes anything.
 */
#include "decode_each_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ the kernel */

/* One warp, a lane a chunk: a row over the blocks of a cluster, whose weights a lane each finds. */
template <storage STORAGE, int GROUPS>
static __device__ inline merged merge_blocks(const memory<STORAGE, GROUPS> &m, int blocks, int row, float scale)
{
    int lane = threadIdx.x % CUDA_WARP, rows = ROWS / blocks; /* of each block, one behind the other */
    float2 state = lane < blocks ? m.state[lane * rows + row] : make_float2(-INFINITY, 0);
    merged x = {make_float4(0, 0, 0, 0), state.x, 0};
#pragma unroll
    for (int with = 1; with < MOST_BLOCKS; with *= 2)
        x.reference = fmaxf(x.reference, __shfl_xor_sync(~0u, x.reference, with));
    x.reference = __shfl_sync(~0u, x.reference, 0); /* the lanes behind the blocks have none */
    float weight = move_reference(state.x, x.reference, scale);
#pragma unroll 4
    for (int b = 0; b < blocks; b++)
        add_weighted(x, __shfl_sync(~0u, weight, b), m.out[b * rows + row][lane], __shfl_sync(~0u, state.y, b));
    return x;
}

template <storage STORAGE, operand TYPE, bool E4M3, int GROUPS>
static __global__ void __launch_bounds__(GROUPS *GROUP, 4 / GROUPS) attend(const __grid_constant__ decode_job d)
{
    extern __shared__ __align__(1024) char shared[];
    using T = tile<STORAGE>;
    memory<STORAGE, GROUPS> &m = *(memory<STORAGE, GROUPS> *)shared;
    int warp = uniform(threadIdx.x / CUDA_WARP), lane = threadIdx.x % CUDA_WARP;
    work w = find_work(d);
    if (threadIdx.x == 0) {
        for (int g = 0; g < GROUPS; g++) {
            for (int i = 0; i < m.group[g].SLOTS; i++)
                barrier_init(shared_address(m.group[g].full + i), d.bulk ? 1 : GROUP);
            barrier_init(shared_address(&m.group[g].given), GROUP_WARPS);
        }
        if (d.clusters > 1) {
            barrier_init(shared_address(&m.merged), 1);
            barrier_expect(shared_address(&m.merged), ROWS * (MSA_HEAD_DIM * 4 + sizeof(float2)));
        }
        fence_barriers();
        if (!T::NVFP4 && d.bulk) {
            prefetch_map(&d.k_map);
            prefetch_map(&d.v_map);
        }
    }
    __syncwarp();
    if (d.clusters > 1)
        cluster_arrive(); /* for peers: the barrier for their states is there */
    if (T::NVFP4 && warp > 0)
        for (int i = threadIdx.x - CUDA_WARP; i < 256; i += GROUPS * GROUP - CUDA_WARP)
            m.table[i] = scaled_magnitudes((uint32_t)i);
    if (threadIdx.x == GROUP - 1) /* brings the parameters while the launch ahead ends */
        m.touched = (uint32_t)((uintptr_t)d.q ^ (uintptr_t)d.k.data ^ (uintptr_t)d.v.data ^ (uintptr_t)d.factor[0] ^
                               (uintptr_t)d.out);
    if (warp == 0 && lane < d.topk)
        prefetch_l2(page_of_list(d, w));
    else if (warp == 1 && lane == 0)
        prefetch_l2(d.rows + w.row);
    grid_wait(); /* what this launch reads and writes, the one ahead of it may still write and read */
    cuda_row where = d.rows[w.row];
    cuda_page page = {-1, -1};
    if (warp == 0 && lane < d.topk) /* on its way together with the row */
        page = *page_of_list(d, w);
    else if (warp == GROUP_WARPS - 1)
        load_factors(d, w.kv_head, m.scale, m.out_scale);
    if (where.request < 0) {
        if (d.clusters > 1)
            cluster_wait();
        return;
    }
    if (warp == 0)
        list_pages<STORAGE, GROUPS>(d, w, page, where.position, m);
    else if (warp <= 2)
        stage_queries<STORAGE, E4M3>(d, w.row, w.kv_head, warp - 1, m.q);
    grid_release();
    for (int i = threadIdx.x; i < GROUPS * GROUP_WARPS * ROWS; i += GROUPS * GROUP)
        m.group[i / (GROUP_WARPS * ROWS)].largest[0][i % (GROUP_WARPS * ROWS)] = -INFINITY;
    __syncthreads();
    state o = {};
    o.reference[0] = o.reference[1] = -INFINITY;
    int group = group_of<GROUPS>(), parts = d.clusters * GROUPS, rest = m.count - (group * d.clusters + w.rank);
    attend_pages<STORAGE, TYPE, E4M3, GROUPS>(
        d, m.group[group], rest > 0 ? (rest - 1) / parts + 1 : 0,
        [&] { return shared_address(&m.q[0][threadIdx.x % CUDA_WARP]); }, shared_address(m.table), m.scale,
        [] { return threadIdx.x; }, o);

    w = find_work(d);
    sync_group<GROUPS>(); /* all have read their last tiles */
    give_state(o, m.group[group_of<GROUPS>()]);
    if (d.clusters > 1)
        cluster_wait(); /* all blocks have started */
    __syncthreads();
    /* Loops stay loops: what runs once a launch waits for its instructions more than for anything else. */
    constexpr int WARPS = GROUPS * GROUP_WARPS;
    if (d.clusters == 1) {
#pragma unroll 1
        for (int row = warp; row < d.ratio; row += WARPS)
            write_result<E4M3>(d, w.row, w.kv_head, row, 4 * chunk_at(row, lane),
                               merge_groups(m.group, GROUPS, row, m.scale), m.scale, m.out_scale);
        return;
    }
    int rows = ROWS / d.clusters; /* that a block owns */
#pragma unroll 1
    for (int row = warp; row < ROWS; row += WARPS) {
        merged x = merge_groups(m.group, GROUPS, row, m.scale);
        int owner = row / rows, place = w.rank * rows + row % rows;
        uint32_t barrier = cluster_address(shared_address(&m.merged), owner);
        store_async(cluster_address(shared_address(&m.out[place][chunk_at(row, lane)]), owner), x.out, barrier);
        if (lane == 0)
            store_async(cluster_address(shared_address(&m.state[place]), owner), make_float2(x.reference, x.sum),
                        barrier);
    }
    barrier_wait(shared_address(&m.merged), 0);
#pragma unroll 1
    for (int row = warp; row < rows; row += WARPS)
        write_result<E4M3>(d, w.row, w.kv_head, w.rank * rows + row, 4 * lane,
                           merge_blocks(m, d.clusters, row, m.scale), m.scale, m.out_scale);
}

/* ------------------------------------------------------------------------------------------------ the plan */

/* By capacities alone. `items`: rows times KV heads. Chosen by measuring the shapes for 1, 4, 32, 64, 128, 256
 * and 512 items on an H200 (132 SMs). Of 512 blocks in clusters of 16, or 128 blocks of four groups in clusters of 4,
 * not all run at once, because a cluster must fit into a GPC; they took twice as long. NVFP4, which is bound by its
 * conversions, likes more warps on fewer pages than the others, which wait for memory. */
struct shape {
    int32_t clusters, groups;
};

static shape choose_shape(const struct cuda_attention *job)
{
    int64_t items = job->desc.max_total_q * job->desc.num_kv_heads, sms = job->num_sms;
    bool nvfp4 = job->desc.kv_dtype == MSA_NVFP4;
    shape s = items * 16 <= sms           ? shape{16, 1}
              : items * 8 <= sms          ? shape{8, 2}
              : items * 8 <= 2 * sms      ? shape{8, 1}
              : items * 2 <= sms          ? shape{2, nvfp4 ? 4 : 2}
              : items <= sms              ? shape{1, 4}
              : items <= 2 * sms && nvfp4 ? shape{1, 2}
                                          : shape{1, 1};
    while (s.groups > 1 && s.clusters * s.groups >= 2 * job->desc.topk) /* no page for some */
        s.groups /= 2;
    while (s.clusters > 1 && s.clusters >= 2 * job->desc.topk)
        s.clusters /= 2;
    return s;
}

static bool plan_decode(struct cuda_attention *job)
{
    if (job->desc.partials || job->desc.strategy == MSA_STRATEGY_PAGE_MAJOR)
        return attention_smxx.plan(job);
    if (shares_pages(job)) {
        job->kernel = &decode_shared_sm90;
        return decode_shared_sm90.plan(job);
    }
    shape s = choose_shape(job);
    job->num_splits = s.clusters * s.groups;
    job->pages_per_split = (job->desc.topk + job->num_splits - 1) / job->num_splits;
    job->merges_itself = true;
    return true;
}

/* ------------------------------------------------------------------------------------------------ launchers */

template <storage STORAGE, operand TYPE, bool E4M3, int GROUPS>
static cudaError_t launch_attend(const struct cuda_attention *job, const decode_job &d, cudaStream_t stream)
{
    auto kernel = attend<STORAGE, TYPE, E4M3, GROUPS>;
    using M = memory<STORAGE, GROUPS>;
    size_t bytes = d.clusters > 1 ? sizeof(M) : offsetof(M, state);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(M));
    if (!error && d.clusters > 8)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error)
        return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)d.clusters, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(d.total_q * d.clusters), (unsigned)job->desc.num_kv_heads);
    config.blockDim = dim3(GROUPS * GROUP);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = d.clusters > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, d);
}

template <storage STORAGE, operand TYPE, bool E4M3>
static cudaError_t launch_shape(const struct cuda_attention *job, cudaStream_t stream)
{
    shape s = choose_shape(job);
    decode_job d = make_job(job, s.clusters);
    if constexpr (tile<STORAGE>::NVFP4)
        if (s.clusters == 1 && s.groups == 1 && fits_each(job))
            return launch_each<STORAGE, TYPE, E4M3>(job, d, stream);
    return s.groups == 4   ? launch_attend<STORAGE, TYPE, E4M3, 4>(job, d, stream)
           : s.groups == 2 ? launch_attend<STORAGE, TYPE, E4M3, 2>(job, d, stream)
                           : launch_attend<STORAGE, TYPE, E4M3, 1>(job, d, stream);
}

static cudaError_t run_decode(const struct cuda_attention *job, cudaStream_t stream)
{
    if (job->desc.partials)
        return attention_smxx.run(job, stream);
    msa_dtype q = job->desc.q_dtype, kv = job->desc.kv_dtype;
    if (q == MSA_E4M3)
        return kv == MSA_E4M3 ? launch_shape<STORAGE_E4M3, OPERAND_F16, true>(job, stream)
                              : launch_shape<STORAGE_NVFP4_E4M3, OPERAND_F16, true>(job, stream);
    if (q == MSA_BF16)
        return launch_shape<STORAGE_HALF, OPERAND_BF16, false>(job, stream);
    return kv == MSA_FP16 ? launch_shape<STORAGE_HALF, OPERAND_F16, false>(job, stream)
                          : launch_shape<STORAGE_E4M3, OPERAND_F16, false>(job, stream);
}

const struct cuda_attention_kernel decode_sm90 = {plan_decode, nullptr, run_decode};
