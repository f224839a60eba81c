/* SPDX-License-Identifier: MIT
 *
 * prefill_sm90.cu - sparse prefill attention for Hopper, query-major: E4M3 queries with E4M3 or NVFP4 K/V, BF16 and
 * FP16 with their own type.
 *
 * A block takes a tile of neighbouring queries of one request and one KV head, and walks the union of the pages that
 * they selected; results stay in registers. Three consumer warpgroups have 64 rows each (4 queries of 16 heads; with
 * fewer heads more queries, whole ones a warp), a fourth brings pages and queries. A warpgroup passes pages that none
 * of its queries selected, a warp leaves out the softmax of a page that none of its own did. attention_sm90.cuh has
 * the products and the softmax, prefill_sm90.cuh what a step is cut into, prefill_load_sm90.cuh the loaders.
 *
 * Tiles whose queries share few pages go page-major instead: prefill_cut_sm90.cu chooses, prefill_pages_sm90.cu has the
 * kernel.
 *
 * Plans of few rows are left to decode_sm90. Those of fewer tasks than SMs split each tile's union into equal parts, a
 * number that follows from capacities; the FP32 results are merged by the combine kernel. Where tiles do not come out
 * even with the SMs, those left over are cut into pieces of one or two warpgroups' queries. For one warpgroup's E4M3
 * queries all three work, see make_terms_alone: some 1670 clocks a page, where one alone takes 2350 (H200, 2026-11-30).
 * A row's bits depend on its tile, so on its request, and on the plan; blocks take tasks as they get free, which
 * changes none, and in a piece queries meet the same pages in the same order.
 *
 * Launches: images, this kernel, then page-major work and its merge for each chunk of rows. Each starts while the one
 * ahead of it ends. write_images waits for all that was before it and only then lets this kernel start, which therefore
 * finds its tasks, their unions, queries, and pages that come straight from the cache while images are still made.
 * Where no tile is page-major the launches behind it find nothing to do while its last tiles are at work; the last two
 * of them end no earlier than it, see await_attend. Where all are, its blocks end at once, beside the last images, for
 * which page-major work waits by itself, see await_images.
 *
 *                 stages          shared memory   registers: loaders, consumers (launch)
 *   E4M3 exact    3 x 48K         217 K           32, 160 (128)
 *   E4M3 fast     5 x 32K         209 K           32, 160 (128)
 *   16 bit        5 x 32K         209 K           32, 160 (128)
 *
 * Arithmetic of a (query head, key) pair: 512 FLOP and one exponential. Floor of 16384 queries after 31360, 64/4 heads:
 * 940 us at the measured rates of F16 (861) and FP8 (1658 TFLOP/s) products, 640 us for `fast`; the exponentials take
 * 550 us. Measured there on an H200, 2026-11-30, Q8KV4, conversion included: even 1452 us, `fast` 1269, clustered 1940
 * under long load, 1347, 1186 and 1862 with pauses, as the power limit sets the clock; 16384 fresh, 16/1 heads, even:
 * Q8KV4 332, BF16 449; 8192 after 120K, clustered: BF16 371; 2048 after 30K, clustered: Q8KV4 89.
 */
#include "attention_alone_sm90.cuh"
#include "prefill_load_sm90.cuh"
#include "prefill_pages_sm90.cuh"
#include "splits.cuh"
#include "tensor_map.cuh"

/* ------------------------------------------------------------------------------------------------ consumers */

/* The query, of its warp, whose head is row `row` of the warp; one that no mask has for rows that are left over. */
static __device__ __forceinline__ int query_of_row(const prefill_job &job, int row)
{
    int query = row / job.ratio;
    return query < job.width ? query : WARP_ROWS - 1;
}

/* The lane's rows to where the task's results go. */
template <typename T>
static __device__ __forceinline__ void write_results(const prefill_job &job, const memory<T> &m, row_state &o,
                                                     const task_results &results, float scale, int group)
{
    const cuda_result &result = job.result;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP % GROUP_WARPS;
    finish_sums(o);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = lane / 4 + 8 * r, in_warp = m.query[row], query = (group * GROUP_WARPS + warp) * job.width + in_warp,
            head = row - in_warp * job.ratio;
        bool live = in_warp < job.width && query < results.num_rows, empty = o.sum[r] == 0;
        if (T::E4M3 && !live)
            continue;
        char *out = (char *)result.out + results.out + query * result.out_row_stride + head * result.out_head_stride;
        store_elements<T>(o, r, empty ? 0.0f : results.value_scale / o.sum[r], live ? out : nullptr, result.dtype);
        if (!live || !result.lse || lane % 4)
            continue;
        char *lse = (char *)result.lse + results.lse + query * result.lse_row_stride + head * result.lse_head_stride;
        float one = exp2_approx(job.log2_one); /* as the hardware has it, so that a lone key gives its logit exactly */
        float max = o.reference[r] * scale;    /* in log2 units */
        if (result.sum_offset) {
            *(float *)lse = isnan(o.sum[r]) ? NAN : max;
            *(float *)(lse + result.sum_offset) = o.sum[r] / one;
        } else {
            *(float *)lse = empty ? -INFINITY : max * 0.693147181f + logf(o.sum[r] / one);
        }
    }
}

/* The warp is done with the stage. */
template <typename T> static __device__ __forceinline__ void pass_stage(memory<T> &m, turn<T> &at)
{
    __syncwarp();
    if (elected())
        barrier_arrive(shared_address(&m.empty[at.stage()]));
    at.advance();
}

/* Which of the lane's rows see the page of a stage. */
template <typename T>
static __device__ __forceinline__ page_view look_at(const prefill_job &job, const memory<T> &m, uint32_t stage,
                                                    int group)
{
    uint32_t thread = thread_now(), warp = thread / CUDA_WARP % GROUP_WARPS;
    const stage_info &info = m.info[stage];
    uint32_t mask = ((const uint16_t *)info.group[group].mask)[warp];
    page_view view;
    view.any = mask != 0;
    view.all = mask == (1u << job.width) - 1;
    view.partial = info.group[group].flags & STAGE_PARTIAL;
    view.selected[0] = view.selected[1] = view.all;
    view.keys[0] = view.keys[1] = 0;
    if (!view.all || view.partial) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int query = m.query[thread % CUDA_WARP / 4 + 8 * r];
            view.selected[r] = mask >> query & 1;
            view.keys[r] = min(info.keys, info.first_keys + (group * GROUP_WARPS + (int)warp) * job.width + query);
        }
    }
    return view;
}

/* Waits for a stage. Returns the warpgroup's flags. */
template <typename T> static __device__ __forceinline__ int32_t wait_flags(memory<T> &m, turn<T> at, int group)
{
    wait_full(m, at);
    return uniform(m.info[at.stage()].group[group].flags);
}

/* So many warps of consumers have written all that they will. The launch ahead clears the count. */
static __device__ __forceinline__ void count_finished(const prefill_job &job, uint32_t warps)
{
    grid_wait();
    __threadfence();
    atomicAdd(job.own.finished, warps);
}

/* The block's last tasks, if they are of one warpgroup's queries, from stage `at` on. A warpgroup alone would wait for
 * each of a page's steps; so the second and the third one make P of pages in turns, where their own queries would be,
 * and the first one multiplies by V and has the results. */
template <typename T>
static __device__ __forceinline__ void make_terms_alone(const prefill_job &job, memory<T> &m, turn<T> at, int group)
{
    int pair = group - 1;
    uint32_t q = matrix_low(shared_address(m.q[0])), pages = 0;
#pragma unroll 1
    for (int32_t flags; !((flags = wait_flags(m, at, 0)) & STAGE_END);) {
        if (flags & STAGE_FIRST)
            barrier_wait(shared_address(&m.q_full[group]), flags & STAGE_ODD ? 1 : 0);
        if (!(flags & STAGE_NONE) && (pages++ & 1) == (uint32_t)pair) {
            /* Only by who has a page: the next queries may be there before others look. */
            barrier_wait(shared_address(&m.q_full[0]), flags & STAGE_ODD ? 1 : 0);
            float s[64];
            multiply_keys<T>(s, q, matrix_low(shared_address(m.stage[at.stage()])));
            page_view view = look_at(job, m, at.stage(), 0);
            wgmma_wait(s);
            uint32_t p[16] = {};
            page_sums page = {};
            if (view.any) {
                if (view.partial)
                    hide_keys(s, view.keys);
                make_page_terms<T>(s, m.info[at.stage()].group[0].scale, page.max, page.sum);
                pack_probabilities<T>(s, p);
            }
            barrier_wait(shared_address(&m.p_empty[pair]), ((pages - 1) / 2 & 1) ^ 1);
            store_probabilities(p, shared_address(m.q[group]), thread_now() / CUDA_WARP % GROUP_WARPS);
            ((page_sums *)m.raw[group])[thread_now() % WARPGROUP] = page;
            fence_async_reads();
            __syncwarp();
            if (elected())
                barrier_arrive(shared_address(&m.p_full[pair]));
        }
        if (flags & STAGE_LAST && elected())
            barrier_arrive(shared_address(&m.q_empty[group]));
        pass_stage(m, at);
    }
}

template <typename T>
static __device__ __forceinline__ void merge_alone(const prefill_job &job, memory<T> &m, turn<T> at)
{
    row_state o;
    clear(o);
    uint32_t pages = 0;
#pragma unroll 1
    for (int32_t flags; !((flags = wait_flags(m, at, 0)) & STAGE_END);) {
        const group_info &info = m.info[at.stage()].group[0];
        if (flags & STAGE_FIRST) {
            /* Where no query sees a page nothing else keeps these from being given back before they have come; the
             * loader, which then waits for the ones before, would find a round more and wait for ever. */
            barrier_wait(shared_address(&m.q_full[0]), flags & STAGE_ODD ? 1 : 0);
            clear(o);
        }
        if (!(flags & STAGE_NONE)) {
            uint32_t pair = pages & 1, p = matrix_low(shared_address(m.q[1 + pair])),
                     v = matrix_low(shared_address(m.stage[at.stage()])) + T::K_BYTES / 16;
            barrier_wait(shared_address(&m.p_full[pair]), pages / 2 & 1);
            float s[64], weight[2] = {};
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma_64x128<WGMMA_E4M3>(s, matrix_of_low(p + i * 2), matrix_of_low(v + i * 2), i);
            wgmma_commit();
            page_view view = look_at(job, m, at.stage(), 0);
            if (view.any)
                weigh_page(((const page_sums *)m.raw[1 + pair])[thread_now() % WARPGROUP], info.scale, view, o, weight);
            wgmma_wait(s);
            __syncwarp();
            if (elected())
                barrier_arrive(shared_address(&m.p_empty[pair]));
            merge_products(s, 0, view, weight, o);
            pages++;
        }
        if (flags & STAGE_LAST) {
            if (elected()) /* P of all pages is there: nobody needs the queries */
                barrier_arrive(shared_address(&m.q_empty[0]));
            write_results(job, m, o, m.info[at.stage()].results, info.scale, 0);
        }
        pass_stage(m, at);
    }
}

template <typename T> static __device__ __forceinline__ void attend_tiles(const prefill_job &job, memory<T> &m)
{
    int group = uniform(threadIdx.x / WARPGROUP) - 1;
    uint32_t q = matrix_low(shared_address(m.q[group]));
    row_state o;
    clear(o);
    turn<T> at = {0};
    int32_t flags = wait_flags(m, at, group), next_flags;
#pragma unroll 1
    for (; !(flags & (STAGE_END | STAGE_ALONE)); flags = next_flags) {
        if (flags & STAGE_FIRST) {
            barrier_wait(shared_address(&m.q_full[group]), flags & STAGE_ODD ? 1 : 0);
            clear(o);
        }
        auto queries_used = [&] {
            if (flags & STAGE_LAST && elected())
                barrier_arrive(shared_address(&m.q_empty[group]));
        };
        auto look = [&] { return look_at(job, m, at.stage(), group); };
        auto values = [&]() -> uint32_t {
            if constexpr (shape<T>::PARTS == 2) {
                pass_stage(m, at);
                wait_full(m, at);
            }
            return matrix_low(shared_address(m.stage[at.stage()])) + (shape<T>::STAGE_BYTES - T::V_BYTES) / 16;
        };
        auto meanwhile = [&] { /* in the shade of the products */
                               turn<T> next = at;
                               next.advance();
                               next_flags = wait_flags(m, next, group);
        };
        uint32_t k = matrix_low(shared_address(m.stage[at.stage()]));
        float scale = m.info[at.stage()].group[group].scale;
        if (flags & STAGE_FULL) { /* most pages, without what only others need */
            auto full = [] {
                int any = 1;
                if (!T::E4M3) /* unknown to the compiler, so that 16-bit P comes after a branch, see attend_page */
                    asm volatile("mov.b32 %0, 1;" : "=r"(any));
                return page_view{any != 0, true, {true, true}, false, {0, 0}};
            };
            attend_page<T>(o, q, k, scale, full, queries_used, values, meanwhile);
        } else if (!(flags & STAGE_NONE)) {
            attend_page<T>(o, q, k, scale, look, queries_used, values, meanwhile);
        } else {
            queries_used();
            values();
            meanwhile();
        }
        if (flags & STAGE_LAST)
            write_results(job, m, o, m.info[at.stage()].results, m.info[at.stage()].group[group].scale, group);
        pass_stage(m, at);
    }
    if constexpr (T::E4M3) {
        group = uniform(thread_now() / WARPGROUP) - 1; /* anew, as `at`: or the loop before would need registers more */
        at.value = (uint32_t)uniform((int)at.value);
        if (flags & STAGE_ALONE && group == 0)
            merge_alone(job, m, at);
        else if (flags & STAGE_ALONE)
            make_terms_alone(job, m, at, group);
    }
    if (threadIdx.x % CUDA_WARP == 0)
        count_finished(job, 1);
}

/* ------------------------------------------------------------------------------------------------ the kernel */

template <typename T>
static __global__ void __launch_bounds__(shape<T>::THREADS, 1)
    attend(const __grid_constant__ prefill_job job, const __grid_constant__ cache_maps<T::E4M3> maps)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    memory<T> &m = *(memory<T> *)shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < shape<T>::STAGES; i++) {
            barrier_init(shared_address(&m.full[i]), 1);
            barrier_init(shared_address(&m.empty[i]), GROUPS * GROUP_WARPS);
        }
        for (int g = 0; g < GROUPS; g++) {
            barrier_init(shared_address(&m.q_full[g]), CUDA_WARP);
            barrier_init(shared_address(&m.q_empty[g]), GROUP_WARPS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(shared_address(&m.p_full[i]), GROUP_WARPS);
            barrier_init(shared_address(&m.p_empty[i]), GROUP_WARPS);
        }
        barrier_init(shared_address(&m.landed), 1);
        m.landings = 0;
        fence_barriers();
    }
    if (comes_straight<T>(job) && threadIdx.x == 2 * CUDA_WARP)
        prefetch_maps(maps);
    if (threadIdx.x == CUDA_WARP) {
        m.list = find_tasks(job);
        find_task(job, m, 0, true);
    }
    if (threadIdx.x >= WARPGROUP && threadIdx.x < WARPGROUP + WARP_ROWS)
        m.query[threadIdx.x - WARPGROUP] = (uint8_t)query_of_row(job, threadIdx.x - WARPGROUP);
    __syncthreads();
    if (m.task[0].head < 0) {                                         /* none */
        if (threadIdx.x == 0 && !all_page_major(kinds_of_tiles(job))) /* or nobody asks */
            count_finished(job, GROUPS * GROUP_WARPS);
        return;
    }
    if (uniform(threadIdx.x / WARPGROUP) == 0) {
        fewer_registers<shape<T>::LOAD_REGISTERS>();
        if (threadIdx.x < CUDA_WARP)
            load_images(job, maps, m);
        else
            load_queries(job, m);
    } else {
        more_registers<shape<T>::REGISTERS>();
        attend_tiles(job, m);
    }
}

/* ------------------------------------------------------------------------------------------------ launchers */

/* Plans for other kernels: partials, and rows so few that they do not pay for what they share. */
static const struct cuda_attention_kernel *other_kernel(const struct cuda_attention *job)
{
    const msa_attention_desc *desc = &job->desc;
    int few = desc->q_dtype == MSA_E4M3 ? job->num_sms : job->num_sms / 2;
    if (desc->partials)
        return &attention_smxx;
    bool pages = desc->strategy == MSA_STRATEGY_PAGE_MAJOR;
    return !pages && desc->max_total_q * desc->num_kv_heads <= few ? &decode_sm90 : nullptr;
}

static bool plan(struct cuda_attention *job)
{
    const msa_attention_desc *desc = &job->desc;
    if (other_kernel(job))
        return other_kernel(job)->plan(job);
    bool forced = desc->strategy == MSA_STRATEGY_PAGE_MAJOR;
    job->step.query_tile = tile_queries(*job);
    if (desc->q_dtype == MSA_E4M3)
        job->precision = desc->precision;
    int64_t tasks = most_tasks(*job);
    if (tasks < job->num_sms && tasks && !forced)
        job->num_splits = (int32_t)(job->num_sms / tasks < MSA_MAX_SPLITS ? job->num_sms / tasks : MSA_MAX_SPLITS);
    job->memory_bytes = own_memory(*job).bytes;
    if (!has_page_lists(*job))
        return !forced;
    job->memory_bytes += page_memory_at(*job, nullptr).bytes;
    job->strategy = forced ? "page-major" : "auto";
    return true;
}

static cudaError_t prepare(const struct cuda_attention *job, cudaStream_t stream)
{
    if (other_kernel(job) || job->step.num_tiles == 0)
        return cudaSuccess;
    return cut_step(make_job(*job, {0, 0, (uint32_t)job->desc.num_kv_heads}), stream);
}

static uint32_t attend_blocks(const prefill_job &job)
{
    int64_t tasks = (int64_t)job.step.num_tiles * job.window.heads * job.num_splits;
    return (uint32_t)(GROUPS * tasks < job.num_sms ? GROUPS * tasks : job.num_sms); /* tiles may be cut */
}

template <typename T>
static cudaError_t launch_attend(const prefill_job &job, const cache_maps<T::E4M3> &maps, cudaStream_t stream)
{
    cudaError_t error = cudaFuncSetAttribute(attend<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(memory<T>));
    return error ? error
                 : launch(attend<T>, job.blocks, shape<T>::THREADS, sizeof(memory<T>), job.dependent_launch, stream,
                          job, maps);
}

/* False: pages do not come straight from the cache. */
static bool map_cache(const prefill_job &job, cache_maps<false> *maps)
{
    const msa_attention_args &a = job.args;
    int64_t heads = job.desc.num_kv_heads;
    constexpr int ROW_BYTES = 2 * MSA_HEAD_DIM;
    return map_tensor(job.encode_tensor, &maps->k,
                      {a.k, a.k_token_stride, a.k_head_stride, a.k_page_stride, heads, a.num_pages}, ROW_BYTES,
                      MSA_PAGE_SIZE) &&
           map_tensor(job.encode_tensor, &maps->v,
                      {a.v, a.v_token_stride, a.v_head_stride, a.v_page_stride, heads, a.num_pages}, ROW_BYTES,
                      MSA_PAGE_SIZE);
}

static bool map_cache(const prefill_job &, cache_maps<true> *)
{
    return false;
}

template <storage STORAGE, typename T>
static cudaError_t convert_and_attend(const struct cuda_attention *job, cudaStream_t stream)
{
    window_size size = size_of_window(*job);
    cudaError_t error =
        cudaFuncSetAttribute(write_images<STORAGE, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::IMAGE_BYTES);
    for (int32_t head = 0; !error && head < job->desc.num_kv_heads; head += size.heads)
        for (int32_t i = 0; !error && i < num_windows(*job, job->step.batch); i++) {
            int32_t left = job->desc.num_kv_heads - head;
            uint32_t heads = (uint32_t)(left < size.heads ? left : size.heads);
            prefill_job part = make_job(*job, {(uint32_t)i, (uint32_t)head, heads});
            cache_maps<T::E4M3> maps = {};
            part.straight = map_cache(part, &maps);
            part.image_blocks = (uint32_t)(job->num_sms * image_blocks(STORAGE));
            if (has_page_lists(*job))
                part.some_tiles = make_pages_job(part).pages.query_major;
            error = launch(write_images<STORAGE, T>, part.image_blocks, IMAGE_THREADS, T::IMAGE_BYTES,
                           job->dependent_launch, stream, part);
            if (error)
                break;
            part.blocks = job->desc.strategy == MSA_STRATEGY_PAGE_MAJOR ? 0 : attend_blocks(part);
            if (part.blocks)
                error = launch_attend<T>(part, maps, stream);
            if (error)
                part.blocks = 0;
            if (has_page_lists(*job))
                error = attend_page_lists(part, maps, error, stream);
        }
    return error;
}

static cudaError_t attend_all(const struct cuda_attention *job, cudaStream_t stream)
{
    bool fast = job->precision == MSA_PRECISION_FAST;
    switch (job->desc.kv_dtype) {
    case MSA_BF16:
        return convert_and_attend<STORAGE_HALF, bf16_types>(job, stream);
    case MSA_FP16:
        return convert_and_attend<STORAGE_HALF, fp16_types>(job, stream);
    case MSA_E4M3:
        return fast ? convert_and_attend<STORAGE_E4M3, fast_types>(job, stream)
                    : convert_and_attend<STORAGE_E4M3, exact_types>(job, stream);
    default:
        return fast ? convert_and_attend<STORAGE_NVFP4_E4M3, fast_types>(job, stream)
                    : convert_and_attend<STORAGE_NVFP4_E4M3, exact_types>(job, stream);
    }
}

static cudaError_t run(const struct cuda_attention *job, cudaStream_t stream)
{
    if (other_kernel(job))
        return other_kernel(job)->run(job, stream);
    if (job->step.num_tiles == 0)
        return cudaSuccess;
    if (job->num_splits == 1)
        return attend_all(job, stream);
    cuda_attention split = *job;
    split.result =
        split_results(job, own_memory(*job).states); /* a split without a page of a row's is an empty state */
    cudaError_t error = attend_all(&split, stream);
    return error ? error : merge_splits(job, split.result, job->dependent_launch, stream);
}

const struct cuda_attention_kernel prefill_sm90 = {plan, prepare, run};
