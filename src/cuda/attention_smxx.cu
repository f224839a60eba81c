/* SPDX-License-Identifier: MIT
 *
 * attention_smxx.cu - sparse attention, prefill and decode, for every pair of formats and every GPU from sm_80 on.
 *
 * A block takes one row, one KV head and one split of the row's pages; its 4 warps share the (up to 16) query heads.
 * Per page: S = Q K^T (a warp takes 32 keys), the page's maximum, P = 2^((S - max) * scale) rounded, O = P V (a warp
 * takes 32 elements of d), merged into FP32 registers by the running maximum. cpu/attention_c.c is the definition.
 *
 * Arithmetic: operands widen exactly to 16 bits (F16 for E4M3 and FP16 queries, BF16 for BF16), FP32 accumulation by
 * mma.sync. P is relative to the page's own maximum on every path: with E4M3 queries 448 * p rounds to E4M3, else p
 * rounds to the queries' type; the row sum adds the unrounded p.
 *
 * Plans of few rows split a row's pages by rank, a number that follows from capacities alone; the splits' FP32 results
 * are merged by combine_smxx. Plans with partials are split page by page, straight into the caller's tensors.
 *
 * Shared memory: K and V widened, 34 KB each, and P, 4 KB. Floor: none claimed; this kernel converts each page anew for
 * every row and head. Measured on an H200, 2026-11-29, 64/4 heads, Q8KV4: 4096 queries after 31360 4100 us; decode,
 * batch 128 at 32K 188 us.
 */
#include "attention.cuh"
#include "page.cuh"
#include "splits.cuh"

#include <math.h>

enum { WARPS = 4, THREADS = WARPS * CUDA_WARP, TILES = 4 /* of 8 keys, or elements, a warp */ };

struct memory {
    uint16_t k[MSA_PAGE_SIZE * PAGE_ROW], v[MSA_PAGE_SIZE * PAGE_ROW], p[MSA_MAX_GQA_RATIO * PAGE_ROW];
    float part[WARPS][16];
    cuda_page pages[MSA_MAX_TOPK];
};

/* What a block works on. */
struct work {
    int64_t row;
    int32_t kv_head, split, position, kv_len;
    float scale; /* logit in log2 units = scale * dot */
};

/* A lane's part of 16 rows: rows lane/4 and that + 8. */
struct state {
    float out[TILES][4], max[2],
        sum[2]; /* max: largest dot product; out, sum: relative to it, sum over the lane's keys */
};

/* ------------------------------------------------------------------------------------------------ pages */

/* The row's visible pages that the cache holds, in order, to memory; returns their number. Every warp calls it. */
static __device__ int collect_pages(const cuda_attention &job, const work &w, memory &m)
{
    const cuda_step &step = job.step;
    int lane = threadIdx.x % CUDA_WARP;
    int64_t list = w.kv_head / (job.desc.num_kv_heads / step.lists);
    cuda_page page = {-1, -1};
    if (lane < step.topk)
        page = step.pages[(list * step.total_q + w.row) * step.topk + lane];
    bool there = page.logical >= 0 && page.physical >= 0 && page.physical < job.args.num_pages;
    uint32_t mask = __ballot_sync(~0u, there);
    if (page.logical >= 0 && !there)
        atomicOr(step.error, MSA_ERROR_BIT_PAGE_ID);
    if (there && threadIdx.x < CUDA_WARP)
        m.pages[__popc(mask & ((1u << lane) - 1))] = page;
    __syncthreads();
    return __popc(mask);
}

static __device__ page_rows k_rows(const cuda_attention &job, int64_t page, int64_t head)
{
    const msa_attention_args &a = job.args;
    return page_rows{(const uint8_t *)a.k + page * a.k_page_stride + head * a.k_head_stride, a.k_token_stride,
                     (const uint8_t *)a.k_scale + page * a.k_scale_page_stride + head * a.k_scale_head_stride,
                     a.k_scale_token_stride, false};
}

static __device__ page_rows v_rows(const cuda_attention &job, int64_t page, int64_t head)
{
    const msa_attention_args &a = job.args;
    return page_rows{(const uint8_t *)a.v + page * a.v_page_stride + head * a.v_head_stride, a.v_token_stride,
                     (const uint8_t *)a.v_scale + page * a.v_scale_page_stride + head * a.v_scale_head_stride,
                     a.v_scale_token_stride, job.desc.v_scale_order == MSA_SCALE_QUAD};
}

/* ------------------------------------------------------------------------------------------------ softmax */

/* The page's maximum of each of the lane's rows: over the lane's keys, its quad's, the other warps'. */
static __device__ inline void page_maximum(const float (&s)[TILES][4], int first_key, int keys, memory &m,
                                           float (&max)[2])
{
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    max[0] = max[1] = -INFINITY;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first_key + 8 * n + i % 2 < keys)
                max[i / 2] = fmaxf(max[i / 2], s[n][i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 1));
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 2));
        if (lane % 4 == 0)
            m.part[warp][lane / 4 + 8 * r] = max[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++)
        for (int other = 0; other < WARPS; other++)
            max[r] = fmaxf(max[r], m.part[other][lane / 4 + 8 * r]);
}

/* A score of -inf cannot come from finite operands: the row must not look right. */
static __device__ inline float probability(float s, float max, float scale)
{
    return s == -INFINITY ? NAN : exp2_approx((s - max) * scale);
}

/* P of the lane's keys, rounded, to memory; the unrounded sum of each row. */
template <operand TYPE, bool E4M3>
static __device__ inline void page_probabilities(const float (&s)[TILES][4], int first_key, int keys,
                                                 const float (&max)[2], float scale, memory &m, float (&sum)[2])
{
    int lane = threadIdx.x % CUDA_WARP;
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int key = first_key + 8 * n;
            float p[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                p[i] = key + i < keys ? probability(s[n][2 * r + i], max[r], scale) * (E4M3 ? 448.0f : 1.0f) : 0.0f;
                sum[r] += p[i];
            }
            uint32_t pair = E4M3 ? e4m3_pair_to_f16(f32_pair_to_e4m3(p[0], p[1])) : pack_pair<TYPE>(p[0], p[1]);
            *(uint32_t *)(m.p + (lane / 4 + 8 * r) * PAGE_ROW + key) = pair;
        }
}

/* ------------------------------------------------------------------------------------------------ one page */

/* 16 rows of P times 32 elements of V, over the first `keys` keys. */
template <operand TYPE>
static __device__ inline void weigh_values(const memory &m, int first_d, int keys, float (&out)[TILES][4])
{
    int lane = threadIdx.x % CUDA_WARP;
#pragma unroll
    for (int n = 0; n < TILES; n++)
        out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
    for (int k = 0; k < keys; k += 16) {
        uint32_t p[4];
        load_matrices(p, shared_address(m.p + lane % 16 * PAGE_ROW + k + lane / 16 * 8));
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            uint32_t v[4]; /* keys k, k+8 of d; keys k, k+8 of d+8 */
            load_matrices_transposed(
                v, shared_address(m.v + (k + lane % 16) * PAGE_ROW + first_d + 8 * n + lane / 16 * 8));
            mma_16x8x16<TYPE>(out[n], p, v[0], v[1]);
            mma_16x8x16<TYPE>(out[n + 1], p, v[2], v[3]);
        }
    }
}

static __device__ inline void merge_page(state &o, const float (&out)[TILES][4], const float (&max)[2],
                                         const float (&sum)[2], float scale)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float new_max = max[r] > o.max[r] ? max[r] : o.max[r];
        float old_weight = exp2_approx((o.max[r] - new_max) * scale),
              page_weight = exp2_approx((max[r] - new_max) * scale);
        o.max[r] = new_max;
        o.sum[r] = fmaf(o.sum[r], old_weight, sum[r] * page_weight);
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++)
                o.out[n][i] = fmaf(o.out[n][i], old_weight, out[n][i] * page_weight);
    }
}

template <storage STORAGE, operand TYPE, bool E4M3>
static __device__ void attend_page(const cuda_attention &job, const work &w, const cuda_page &page,
                                   const uint32_t (&q)[8][4], memory &m, state &o)
{
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    int32_t end = w.position + 1 < w.kv_len ? w.position + 1 : w.kv_len, left = end - page.logical * MSA_PAGE_SIZE;
    int keys = left < MSA_PAGE_SIZE ? left : MSA_PAGE_SIZE;
    page_part<STORAGE, THREADS> part;
    load_page(k_rows(job, page.physical, w.kv_head), keys, part);
    store_page<STORAGE, TYPE>(part, m.k); /* K was last read before the previous page's maximum */
    __syncthreads();                      /* also: all are done with the previous page's V and P */
    load_page(v_rows(job, page.physical, w.kv_head), keys, part);
    float s[TILES][4], max[2], sum[2], out[TILES][4];
    dot_keys<TYPE, TILES>(m.k, 32 * warp, q, s);
    store_page<STORAGE, TYPE>(part, m.v);
    int first_key = 32 * warp + 2 * (lane % 4);
    page_maximum(s, first_key, keys, m, max);
    page_probabilities<TYPE, E4M3>(s, first_key, keys, max, w.scale, m, sum);
    __syncthreads();
    weigh_values<TYPE>(m, 32 * warp, keys, out);
    merge_page(o, out, max, sum, w.scale);
}

/* ------------------------------------------------------------------------------------------------ results */

/* Adds up the rows' sums over the lanes of a quad and the warps. */
static __device__ inline void finish_sums(state &o, memory &m)
{
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    __syncthreads(); /* m.part held maxima */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        o.sum[r] += __shfl_xor_sync(~0u, o.sum[r], 1);
        o.sum[r] += __shfl_xor_sync(~0u, o.sum[r], 2);
        if (lane % 4 == 0)
            m.part[warp][lane / 4 + 8 * r] = o.sum[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        o.sum[r] = 0;
        for (int other = 0; other < WARPS; other++)
            o.sum[r] += m.part[other][lane / 4 + 8 * r];
    }
}

static __device__ inline void store_pair(void *out, msa_dtype dtype, int d, float low, float high)
{
    if (dtype == MSA_F32)
        *(float2 *)((float *)out + d) = make_float2(low, high);
    else
        *(uint32_t *)((uint16_t *)out + d) =
            dtype == MSA_BF16 ? pack_pair<OPERAND_BF16>(low, high) : pack_pair<OPERAND_F16>(low, high);
}

/* max in log2 units, sum relative to it. */
static __device__ inline void write_lse(const cuda_result &result, char *to, bool empty, float max, float sum)
{
    if (!result.sum_offset) {
        *(float *)to = empty ? -INFINITY : max * 0.693147181f + logf(sum);
        return;
    }
    *(float *)to = isnan(sum) ? NAN : max;
    *(float *)(to + result.sum_offset) = sum;
}

template <bool E4M3>
static __device__ void write_result(const cuda_attention &job, const work &w, const state &o, bool empty,
                                    float v_factor)
{
    const cuda_result &result = job.result;
    int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int h = lane / 4 + 8 * r;
        if (h >= job.ratio)
            continue;
        int64_t head = (int64_t)w.kv_head * job.ratio + h;
        char *out = (char *)result.out + w.split * result.out_split_stride + w.row * result.out_row_stride +
                    head * result.out_head_stride;
        float factor = empty ? 0.0f : v_factor / o.sum[r];
#pragma unroll
        for (int n = 0; n < TILES; n++)
            store_pair(out, result.dtype, 32 * warp + 8 * n + 2 * (lane % 4), finish(o.out[n][2 * r], factor),
                       finish(o.out[n][2 * r + 1], factor));
        if (result.lse && threadIdx.x % 4 == 0 && warp == 0)
            write_lse(result,
                      (char *)result.lse + w.split * result.lse_split_stride + w.row * result.lse_row_stride +
                          head * result.lse_head_stride,
                      empty, o.max[r] * w.scale, o.sum[r] / (E4M3 ? 448.0f : 1.0f));
    }
}

/* ------------------------------------------------------------------------------------------------ the kernel */

template <bool E4M3>
static __device__ inline void load_heads(const cuda_attention &job, const work &w, uint32_t (&q)[8][4])
{
    const char *rows[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int h = threadIdx.x % CUDA_WARP / 4 + 8 * r;
        rows[r] = h < job.ratio ? (const char *)job.args.q + w.row * job.args.q_row_stride +
                                      ((int64_t)w.kv_head * job.ratio + h) * job.args.q_head_stride
                                : nullptr;
    }
    load_queries<E4M3>({rows[0], rows[1]}, q);
}

template <storage STORAGE, operand TYPE, bool E4M3>
static __global__ void __launch_bounds__(THREADS, E4M3 || STORAGE == STORAGE_E4M3 ? 3 : 2)
    attend(const __grid_constant__ cuda_attention job)
{
    extern __shared__ __align__(16) char shared[];
    memory &m = *(memory *)shared;
    grid_release();
    work w;
    w.row = blockIdx.x;
    w.kv_head = (int32_t)blockIdx.y / job.num_splits;
    w.split = (int32_t)blockIdx.y % job.num_splits;
    cuda_row where = job.step.rows[w.row];
    if (where.request < 0)
        return;
    w.position = where.position;
    w.kv_len = job.step.requests[where.request].kv_len;
    w.scale = logit_scale(job, w.kv_head);
    int count = collect_pages(job, w, m), begin = w.split * job.pages_per_split;
    int end = begin + job.pages_per_split < count ? begin + job.pages_per_split : count;
    if (job.result.counts) {
        if (w.split == 0 && threadIdx.x == 0)
            *(int32_t *)((char *)job.result.counts + w.row * job.result.counts_row_stride +
                         w.kv_head * job.result.counts_head_stride) =
                (count + job.pages_per_split - 1) / job.pages_per_split;
        if (begin >= count)
            return;
    }
    uint32_t q[8][4];
    load_heads<E4M3>(job, w, q);
    state o = {};
    o.max[0] = o.max[1] = -INFINITY;
    for (int i = begin; i < end; i++)
        attend_page<STORAGE, TYPE, E4M3>(job, w, m.pages[i], q, m, o);
    finish_sums(o, m);
    write_result<E4M3>(job, w, o, begin >= count, output_scale(job, w.kv_head));
}

/* ------------------------------------------------------------------------------------------------ launchers */

static bool plan_attention(struct cuda_attention *job)
{
    const msa_attention_desc *desc = &job->desc;
    if (desc->strategy == MSA_STRATEGY_PAGE_MAJOR)
        return false;
    int64_t blocks = desc->max_total_q * desc->num_kv_heads, wanted = 2 * job->num_sms;
    if (desc->partials) {
        job->pages_per_split = 1;
    } else if (blocks < wanted) {
        int64_t splits = (wanted + blocks - 1) / blocks;
        job->pages_per_split = (int32_t)(splits < desc->topk ? (desc->topk + splits - 1) / splits : 1);
    }
    job->num_splits = (desc->topk + job->pages_per_split - 1) / job->pages_per_split;
    /* out, maximum and sum of each split, and the counts. A split plan has fewer than 2 * wanted blocks. The size is
     * that bound, also for plans that do not split, so that it grows with every capacity. */
    int64_t states = desc->max_total_q * desc->num_q_heads * desc->topk, most = 2 * wanted * MSA_MAX_GQA_RATIO;
    states = states < most ? states : most;
    blocks = blocks < wanted ? blocks : wanted;
    job->memory_bytes = desc->partials ? 0 : (size_t)(states * (MSA_HEAD_DIM + 2) + blocks) * 4;
    return true;
}

/* The splits' own results, in job->memory, and how many of them each row has. */
static cuda_result counted_results(const struct cuda_attention *job)
{
    cuda_result result = split_results(job, job->memory);
    result.counts = (int32_t *)((char *)result.lse + 2 * result.sum_offset);
    result.counts_head_stride = 4;
    result.counts_row_stride = job->desc.num_kv_heads * 4;
    return result;
}

template <storage STORAGE, operand TYPE, bool E4M3>
static cudaError_t launch_attend(const struct cuda_attention &job, cudaStream_t stream)
{
    auto kernel = attend<STORAGE, TYPE, E4M3>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(memory));
    dim3 grid((unsigned)job.step.total_q, (unsigned)(job.desc.num_kv_heads * job.num_splits));
    return error ? error : launch(kernel, grid, THREADS, sizeof(memory), false, stream, job);
}

static cudaError_t launch_pair(const struct cuda_attention &job, cudaStream_t stream)
{
    msa_dtype q = job.desc.q_dtype, kv = job.desc.kv_dtype;
    if (q == MSA_E4M3)
        return kv == MSA_E4M3 ? launch_attend<STORAGE_E4M3, OPERAND_F16, true>(job, stream)
                              : launch_attend<STORAGE_NVFP4_E4M3, OPERAND_F16, true>(job, stream);
    if (q == MSA_BF16)
        return kv == MSA_BF16   ? launch_attend<STORAGE_HALF, OPERAND_BF16, false>(job, stream)
               : kv == MSA_E4M3 ? launch_attend<STORAGE_E4M3, OPERAND_BF16, false>(job, stream)
                                : launch_attend<STORAGE_NVFP4_EXACT, OPERAND_BF16, false>(job, stream);
    return kv == MSA_FP16   ? launch_attend<STORAGE_HALF, OPERAND_F16, false>(job, stream)
           : kv == MSA_E4M3 ? launch_attend<STORAGE_E4M3, OPERAND_F16, false>(job, stream)
                            : launch_attend<STORAGE_NVFP4_EXACT, OPERAND_F16, false>(job, stream);
}

static cudaError_t run_attention(const struct cuda_attention *job, cudaStream_t stream)
{
    if (job->num_splits == 1 || job->desc.partials)
        return launch_pair(*job, stream);
    cuda_attention split = *job;
    split.result = counted_results(job);
    cudaError_t error = launch_pair(split, stream);
    return error ? error : merge_splits(job, split.result, job->dependent_launch, stream);
}

const struct cuda_attention_kernel attention_smxx = {plan_attention, nullptr, run_attention};
