/* SPDX-License-Identifier: MIT
 *
 * prefill_pages_sm90.cu - sparse prefill attention for Hopper, page-major: a block takes a page of a KV head and the
 * rows that selected it, 64 query rows a step, and leaves each row's result of that page as a partial result.
 * prefill_pages_sm90.cuh has the lists and says what a partial result is; the merge kernel merges them.
 *
 * Arithmetic: that of attention_sm90.cuh for the page, whose fresh accumulator is the whole result here.
 *
 * Of the loading warpgroup one warp finds out what is next, one copies images into a ring, two bring the queries of
 * steps (prefill_pages_load_sm90.cuh). Four warpgroups take steps in turn, each by itself. Nothing is carried from step
 * to step but results on their way out.
 *
 *   S = Q K^T   E4M3: Q from shared memory through registers, where it is widened. 16 bit: both in shared memory
 *   O = P V     in the registers of S; 16 bit in halves of d, as P takes twice the registers there
 *
 * Results leave in blocks of 16 heads (struct cuda_merge): where a warp's rows are one query its 4 KB go through shared
 * memory and out by one bulk copy, which the next step does not wait for; 16-bit K/V leave no room for that, there the
 * lanes store whole lines, of the first half of d beside the products of the second, of that beside the next step's
 * Q K. What results are multiplied with is left to the merge, and so is making NaN of infinities.
 *
 *            images    queries  results  shared memory   registers: loaders, consumers (launch)
 *   exact    2 x 48K   8 x 8K   64K      227 K           32, 4 x 112 (96)
 *   fast     3 x 32K   8 x 8K   64K      227 K           the same
 *   16 bit   2 x 64K   4 x 16K           193 K           the same
 *
 * The launch works beside the last blocks of query-major attention, where that comes before it, as it needs nothing of
 * it, or, where all tiles are page-major, beside the launch that makes images: only what needs one waits for them.
 *
 * Floor of 16384 queries after 31360, 64/4 heads, 16 pages each: 4.3 GB of partial results take 915 us at the 4.7 TB/s
 * that the link between the halves of the L2 lets pass of writes, the products 900 us at 1.75 GHz, the merge 1080 us.
 * Measured there on an H200, 2026-11-30, Q8KV4, scattered: 2946 us in all, of which images take 34 and merges 1120;
 * 8192 after 120K, 16/1 heads: Q8KV4 395, of which this kernel takes 222, BF16 438, of which it takes 269.
 * docs/measurements.md says what bounds it.
 */
#include "prefill_pages_load_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ steps */

/* S = Q K^T, E4M3. q: address of the lane's part; k: low half of a matrix descriptor. */
template <typename T> static __device__ __forceinline__ void multiply_queries(float (&s)[64], uint32_t q, uint32_t k)
{
    constexpr int COUNT = T::QK == WGMMA_F16 ? 8 : 4, BATCH = 5; /* whose operands are in registers at once */
    const uint4 part[2][2] = {{load_shared_128(q), load_shared_128(q ^ 64)},
                              {load_shared_128(q + 1024), load_shared_128((q + 1024) ^ 64)}};
    const uint32_t word[2][8] = {{part[0][0].x, part[0][0].y, part[0][0].z, part[0][0].w, part[0][1].x, part[0][1].y,
                                  part[0][1].z, part[0][1].w},
                                 {part[1][0].x, part[1][0].y, part[1][0].z, part[1][0].w, part[1][1].x, part[1][1].y,
                                  part[1][1].z, part[1][1].w}};
#pragma unroll
    for (int first = 0; first < COUNT; first += BATCH) {
        uint32_t a[BATCH][4];
#pragma unroll
        for (int i = first; i < COUNT && i < first + BATCH; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) /* row j % 2, and of its elements the j / 2-th part */
                if constexpr (T::QK == WGMMA_F16)
                    a[i - first][j] = e4m3_pair_to_f16(word[j % 2][i] >> j / 2 * 16);
                else
                    a[i - first][j] = word[j % 2][2 * i + j / 2];
        wgmma_fence();
#pragma unroll
        for (int i = first; i < COUNT && i < first + BATCH; i++)
            wgmma_64x128<T::QK>(s, a[i - first], matrix_of_low(k + i / 4 * (TILE_HALF / 16) + i % 4 * 2), i);
        wgmma_commit();
        wgmma_wait(s); /* nothing may come in between: ptxas would reuse the operand's registers under way */
    }
}

/* S to the unrounded terms of P, in place: 2^((s - max) * scale), E4M3 448 times that. max: log2 units. */
template <typename T>
static __device__ __forceinline__ void find_terms(float (&s)[64], float scale, float (&max)[2], float (&sum)[2])
{
    make_page_terms<T>(s, scale, max, sum);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] *= scale;
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        sum[r] += sum[r] - sum[r]; /* an infinite one comes from an infinite score */
    }
}

/* Row r of a product in BF16: the lane's 16 bytes of each 32 elements. */
template <int COUNT>
static __device__ __forceinline__ void pack_partial(const float (&o)[COUNT], int r, uint4 (&to)[COUNT / 16])
{
#pragma unroll
    for (int b = 0; b < COUNT / 16; b++) {
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            pair[i] = pack_pair<OPERAND_BF16>(o[16 * b + 4 * i + 2 * r], o[16 * b + 4 * i + 2 * r + 1]);
        to[b] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}

constexpr int PART_BYTES = PARTIAL_BLOCK * PARTIAL_BYTES / 4; /* 32 elements of a block's heads */

/* To memory from the lanes, in blocks as struct cuda_merge says, from the row's elements 32 * first on. */
template <int PARTS>
static __device__ __forceinline__ void store_partial(const pages_job &job, const uint4 (&x)[PARTS], uint32_t state,
                                                     int first)
{
    if (state == NO_STATE)
        return;
    uint8_t *to = job.pages.partials + (size_t)(state / PARTIAL_BLOCK) * (PARTIAL_BLOCK * PARTIAL_BYTES) +
                  state % PARTIAL_BLOCK * (PARTIAL_BYTES / 4) + threadIdx.x % 4 * 16 + first * PART_BYTES;
#pragma unroll
    for (int i = 0; i < PARTS; i++)
        __stcs((uint4 *)(to + i * PART_BYTES), x[i]);
}

/* A warp's rows, which are one query and so a block, to memory by one copy. state: of a lane's first row. */
static __device__ __forceinline__ void send_partials(const pages_job &job, const float (&o)[64], uint32_t state,
                                                     uint32_t out)
{
    int lane = threadIdx.x % CUDA_WARP;
    if (state == NO_STATE) /* for all lanes */
        return;
    copy_bulk_wait(); /* that of the step before, by the lane that sent it */
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint4 x[4];
        pack_partial(o, r, x);
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_shared_128(out + lane * 16 + r * (8 * PARTIAL_BYTES / 4) + i * PART_BYTES, x[i]);
    }
    fence_async_reads();
    __syncwarp();
    if (lane == 0)
        copy_bulk_out_once(job.pages.partials + (size_t)state * PARTIAL_BYTES, out, WARP_ROWS * PARTIAL_BYTES);
}

/* Half of a step's results, of 16-bit queries, which leaves while later products are under way. */
struct late_results {
    uint4 part[2][2]; /* of the lane's rows */
    uint32_t state[2];
};

static __device__ __forceinline__ void store_late(const pages_job &job, const late_results &late, int first)
{
#pragma unroll
    for (int r = 0; r < 2; r++)
        store_partial(job, late.part[r], late.state[r], first);
}

/* P V and what becomes of it; states: the lane's two. v: low half of a matrix descriptor. 16 bit: half of d at a time,
 * as P takes twice the registers; the second one's results are left in `late`. */
template <typename T>
static __device__ __forceinline__ void write_products(const pages_job &job, memory<T> &m, float (&s)[64],
                                                      const uint32_t (&p)[T::P_WORDS], uint32_t v,
                                                      const uint32_t (&state)[2], late_results &late)
{
    if constexpr (T::E4M3) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
            wgmma_64x128<WGMMA_E4M3>(s, p + 4 * i, matrix_of_low(v + i * 2), i);
        wgmma_commit();
        wgmma_wait(s); /* also keeps ptxas from reusing p under way */
        if (shape<T>::STAGED && job.ratio == WARP_ROWS)
            send_partials(job, s, state[0], shared_address(m.out[threadIdx.x / CUDA_WARP]));
        else
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4 x[4];
                pack_partial(s, r, x);
                store_partial(job, x, state[r], 0);
            }
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float part[32];
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; i++) /* 16 keys, each a row of 128 bytes */
                wgmma_64x64_turned<T::PV>(part, p + 4 * i, matrix_of_low(v + half * (TILE_HALF / 16) + i * 128), i);
            wgmma_commit();
            if (half)
                store_late(job, late, 0);
            wgmma_wait(part);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                pack_partial(part, r, late.part[r]);
                late.state[r] = state[r];
            }
        }
    }
}

/* One step of a warpgroup. */
template <typename T>
static __device__ __forceinline__ void attend_step(const pages_job &job, memory<T> &m, item_place<T> item,
                                                   slot_place<T> slot, late_results &late)
{
    uint32_t k = (uint32_t)uniform((int)matrix_low(shared_address(m.stage[image_of<T>(item).stage()]))),
             q = shared_address(m.q[slot.stage()]), p[T::P_WORDS];
    int lane = threadIdx.x % CUDA_WARP, first_row = threadIdx.x / CUDA_WARP % GROUP_WARPS * WARP_ROWS + lane / 4,
        keys[2];
    uint32_t state[2];
    float s[64], max[2], sum[2];
    auto look_at_rows = [&] {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            state[r] = m.rows[slot.stage()].state[first_row + 8 * r];
            keys[r] = m.rows[slot.stage()].keys[first_row + 8 * r];
        }
    };
    barrier_wait(shared_address(&m.q_full[slot.stage()]), slot.parity());
    if constexpr (T::E4M3) {
        multiply_queries<T>(s, q + first_row * 128 + (lane % 4 ^ lane / 4) * 16, k);
        look_at_rows();
    } else {
        multiply_keys<T>(s, matrix_low(q), k);
        store_late(job, late, 2);
        look_at_rows();
        wgmma_wait(s);
    }
    __syncwarp();
    if (lane == 0)
        barrier_arrive(shared_address(&m.q_empty[slot.stage()]));
    if constexpr (!T::E4M3)
        find_infinities(s);
    if (__any_sync(~0u, min(keys[0], keys[1]) < MSA_PAGE_SIZE))
        hide_keys(s, keys);
    find_terms<T>(s, m.item[item.stage()].scale, max, sum);
    uint32_t own = lane % 2 ? state[1] : state[0];
    if (lane % 4 < 2 && own != NO_STATE)
        write_state(job, own, lane % 2 ? max[1] : max[0], lane % 2 ? sum[1] : sum[0]);
    pack_probabilities<T>(s, p);
    write_products<T>(job, m, s, p, k + T::K_BYTES / 16, state, late);
}

template <typename T> static __device__ __forceinline__ void attend_items(const pages_job &job, memory<T> &m)
{
    int step = uniform(threadIdx.x / WARPGROUP);
    item_place<T> item = {0};
    slot_place<T> slot = {0};
    slot.advance(step);
    late_results late = {{}, {NO_STATE, NO_STATE}};
#pragma unroll 1
    for (;; item.advance()) {
        barrier_wait(shared_address(&m.known[item.stage()]), item.parity());
        int steps = uniform(m.item[item.stage()].steps);
        if (steps == 0)
            break;
        wait_full(m, image_of<T>(item)); /* without a step, too: no warp gives back a stage before others have it */
#pragma unroll 1
        for (; step < steps; step += shape<T>::TEAMS) {
            attend_step(job, m, item, slot, late);
            slot.advance(shape<T>::TEAMS);
        }
        step -= steps;
        __syncwarp();
        give_empty(m, image_of<T>(item));
    }
    if (!T::E4M3)
        store_late(job, late, 2);
    copy_bulk_wait(); /* the memory is the block's until it ends */
}

/* ------------------------------------------------------------------------------------------------ the kernel */

/* A step without a page-major tile does not wait for the launch ahead: its empty launches run while the last blocks of
 * `attend` do, as SMs get free. What follows them on the stream knows of the last of them alone, which therefore waits
 * here until `attend` has written everything. That cannot lock: all blocks of `attend` are at work, or this launch
 * would not have begun. */
static __device__ __noinline__ void await_attend(const pages_job &job)
{
    while (atomicAdd(job.own.finished, 0) < job.blocks * GROUPS * GROUP_WARPS)
        __nanosleep(100);
    __threadfence();
}

template <typename T>
static __global__ void __launch_bounds__(shape<T>::THREADS, 1)
    attend_pages(const __grid_constant__ pages_job job, const __grid_constant__ CUtensorMap queries,
                 const __grid_constant__ cache_maps<T::E4M3> maps)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    memory<T> &m = *(memory<T> *)shared;
    grid_release();
    tile_kinds kinds = {*job.pages.query_major, *job.pages.page_major};
    uint32_t chosen = job.pages.chosen[job.chunk];
    asm volatile("" ::: "memory"); /* or the compiler would make one load wait for another */
    if (job.blocks && !kinds.page_major) {
        if (blockIdx.x == 0 && threadIdx.x == 0 && (int64_t)(job.chunk + 1) * job.pages.chunk_rows >= job.step.total_q)
            await_attend(job);
        return;
    }
    bool images_there = !job.image_blocks || !all_page_major(kinds), idle = !chosen && images_there;
    if (!job.beside || idle)
        grid_wait();
    if (idle)
        return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < shape<T>::STAGES; i++) {
            barrier_init(shared_address(&m.full[i]), 1);
            barrier_init(shared_address(&m.empty[i]), shape<T>::TEAMS * GROUP_WARPS);
        }
        for (int i = 0; i < shape<T>::ITEMS; i++)
            barrier_init(shared_address(&m.known[i]), 1);
        for (int i = 0; i < shape<T>::SLOTS; i++) {
            barrier_init(shared_address(&m.q_full[i]), QUERY_LOADERS);
            barrier_init(shared_address(&m.q_empty[i]), GROUP_WARPS);
        }
        barrier_init(shared_address(&m.landed), 1);
        m.images_there = images_there;
        fence_barriers();
    }
    if (threadIdx.x == CUDA_WARP) {
        prefetch_map(&queries);
        if (job.straight)
            prefetch_maps(maps);
    }
    __syncthreads();
    int loader = uniform(threadIdx.x / CUDA_WARP) - shape<T>::TEAMS * GROUP_WARPS;
    if (loader >= 0) {
        fewer_registers<shape<T>::LOAD_REGISTERS>();
        if (loader == 0)
            load_images(job, maps, m);
        else if (loader <= QUERY_LOADERS)
            load_queries(job, queries, m, loader - 1);
        else
            take_items(job, m);
    } else {
        more_registers<shape<T>::REGISTERS>();
        attend_items<T>(job, m);
    }
    if (threadIdx.x == 0)
        grid_wait(); /* what comes after this launch may believe that all before it has ended */
}

/* Where a launch failed, in place of those that would have waited for `attend` and images: what follows on the stream
 * knows of this one alone. An ordinary launch: all blocks of those ahead are at work, or have ended. */
static __global__ void __launch_bounds__(1) end_chain(const __grid_constant__ pages_job job)
{
    if (all_page_major(kinds_of_tiles(job)))
        await_images(job);
    else
        await_attend(job);
    *job.own.made = 0;
}

/* ------------------------------------------------------------------------------------------------ launchers */

/* The chunk's queries of the window to the copies' tensor: 128 bytes of a query's heads at once, swizzled. */
static bool map_queries(const pages_job &job, const void *q, int64_t row_stride, int64_t head_stride, int row_bytes,
                        CUtensorMap *map)
{
    int64_t left = job.step.total_q - (int64_t)job.chunk * job.pages.chunk_rows,
            rows = left < job.pages.chunk_rows ? left : job.pages.chunk_rows;
    cuuint64_t extents[3] = {(cuuint64_t)row_bytes, job.heads, (cuuint64_t)rows};
    cuuint64_t strides[2] = {(cuuint64_t)(job.heads > 1 ? head_stride : row_bytes),
                             (cuuint64_t)(rows > 1 ? row_stride : row_bytes)};
    cuuint32_t box[3] = {128, (cuuint32_t)job.ratio, 1}, steps[3] = {1, 1, 1};
    return strides[0] && strides[1] &&
           !job.encode_tensor(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, (void *)q, extents, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <typename T>
static cudaError_t launch_pages(pages_job job, const cache_maps<T::E4M3> &maps, cudaStream_t stream)
{
    constexpr int ROW_BYTES = shape<T>::QUERY_BYTES;
    const msa_attention_args &a = job.args;
    auto kernel = attend_pages<T>;
    CUtensorMap map;
    job.beside = job.chunk == 0 && job.dependent_launch;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(memory<T>));
    const char *q = (const char *)a.q + (int64_t)job.chunk * job.pages.chunk_rows * a.q_row_stride +
                    (int64_t)job.window.first_head * job.ratio * a.q_head_stride;
    if (!map_queries(job, q, a.q_row_stride, a.q_head_stride, ROW_BYTES, &map)) {
        if (!map_queries(job, job.pages.queries, (int64_t)job.heads * ROW_BYTES, ROW_BYTES, ROW_BYTES, &map))
            return cudaErrorInvalidValue;
        if (!error)
            error = launch(copy_queries<T>, (unsigned)job.num_sms * 8, COPY_THREADS, 0, false, stream, job);
        job.beside = false;
    }
    return error ? error
                 : launch(kernel, (unsigned)job.num_sms, shape<T>::THREADS, sizeof(memory<T>), job.dependent_launch,
                          stream, job, map, maps);
}

/* The merge of the chunk's rows of the window. */
static cuda_merge make_merge(const pages_job &job)
{
    const msa_attention_desc &desc = job.desc;
    int64_t first = (int64_t)job.chunk * job.pages.chunk_rows, left = job.step.total_q - first, heads = job.heads;
    cuda_merge merge = {};
    merge.rows = job.step.rows + first;
    merge.requests = job.requests;
    merge.work = job.pages.chosen + job.chunk;
    merge.sum_offset = 4;
    merge.divides = true;
    merge.blocked = true;
    merge.turned = desc.q_dtype != MSA_E4M3;
    merge.factor =
        job.args.v_descale
            ? (const float *)((const char *)job.args.v_descale + job.window.first_head * job.args.v_descale_stride)
            : nullptr;
    merge.factor_stride = job.args.v_descale_stride;
    merge.global_factor = job.args.v_global_scale;
    merge.log2_one = job.log2_one;
    merge.after_kernel = true;
    merge.job.num_states = desc.topk;
    for (int s = 0; s < desc.topk; s++) {
        int64_t index = (int64_t)s * job.slab;
        merge.job.states[s] = msa_merge_state{
            job.pages.partials + index * PARTIAL_BYTES, heads * PARTIAL_BYTES,           PARTIAL_BYTES, MSA_BF16,
            (const float *)(job.pages.states + index),  heads * (int64_t)sizeof(float2), sizeof(float2)};
    }
    merge.job.rows = left < job.pages.chunk_rows ? left : job.pages.chunk_rows;
    merge.job.num_q_heads = (int32_t)heads;
    merge.job.num_kv_heads = (int32_t)job.window.heads;
    merge.job.split_counts = job.pages.counts + first * desc.num_kv_heads + job.window.first_head;
    merge.job.split_counts_row_stride = desc.num_kv_heads * 4;
    merge.job.split_counts_head_stride = 4;
    merge.job.out_dtype = job.result.dtype;
    int64_t first_head = (int64_t)job.window.first_head * job.ratio;
    merge.job.out =
        (char *)job.result.out + first * job.result.out_row_stride + first_head * job.result.out_head_stride;
    merge.job.out_row_stride = job.result.out_row_stride;
    merge.job.out_head_stride = job.result.out_head_stride;
    merge.job.lse = job.result.lse;
    if (job.result.lse)
        merge.job.lse = (float *)((char *)job.result.lse + first * job.result.lse_row_stride +
                                  first_head * job.result.lse_head_stride);
    merge.job.lse_row_stride = job.result.lse_row_stride;
    merge.job.lse_head_stride = job.result.lse_head_stride;
    return merge;
}

template <typename T>
static cudaError_t attend_chunks(const prefill_job &window, const cache_maps<T::E4M3> &maps, cudaError_t error,
                                 cudaStream_t stream)
{
    pages_job job = make_pages_job(window);
    for (; !error && (int64_t)job.chunk * job.pages.chunk_rows < job.step.total_q; job.chunk++) {
        error = launch_pages<T>(job, maps, stream);
        if (error)
            break;
        job.image_blocks = 0; /* the first of these launches waits for all */
        cuda_merge merge = make_merge(job);
        error = job.merge(&merge, stream);
    }
    if (error)
        launch(end_chain, 1, 1, 0, false, stream, job); /* if that fails, too, nothing more can be done */
    return error;
}

cudaError_t attend_page_lists(const prefill_job &window, const cache_maps<true> &maps, cudaError_t failed,
                              cudaStream_t stream)
{
    return window.precision == MSA_PRECISION_FAST ? attend_chunks<fast_types>(window, maps, failed, stream)
                                                  : attend_chunks<exact_types>(window, maps, failed, stream);
}

cudaError_t attend_page_lists(const prefill_job &window, const cache_maps<false> &maps, cudaError_t failed,
                              cudaStream_t stream)
{
    return window.desc.q_dtype == MSA_BF16 ? attend_chunks<bf16_types>(window, maps, failed, stream)
                                           : attend_chunks<fp16_types>(window, maps, failed, stream);
}
