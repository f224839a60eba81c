/* SPDX-License-Identifier: MIT
 *
 * combine_smxx.cu - merges S states of each (row, head) by log-sum-exp; combine, merge, and the splits of attention
 * plans.
 *
 * combine.cuh has the arithmetic.
 *
 * 16 lanes take one (row, head): lane i holds the LSEs of the states i and i+16, and 8 of the 128 output elements. A
 * block takes 16 consecutive heads of the flat (row, head) list, so that it uses whole sectors of every LSE slab. The
 * states are streamed: UNROLL loads of 16 bytes a lane are in flight before the first is used, 32 KB a block.
 * Floor: S reads of 260 bytes and one write a head (16 x 16384 x 64: 4.36 GB read, 930 us at 4.69 TB/s).
 * Measured on an H200, 2026-11-29: 1136 us, 4.08 TB/s read and written.
 */
#include "combine.cuh"

enum { LANES = 16, THREADS = 256, HEADS = THREADS / LANES, UNROLL = 8, ELEMENTS = MSA_HEAD_DIM / LANES };

/* ------------------------------------------------------------------------------------------------ elements */

/* A lane's 8 elements of a state. F32 rows take two loads. */
template <msa_dtype DTYPE> struct state_part {
    uint4 data[DTYPE == MSA_F32 ? 2 : 1];
};

template <msa_dtype DTYPE> static __device__ inline state_part<DTYPE> load_part(const char *row, int lane)
{
    constexpr int CHUNKS = DTYPE == MSA_F32 ? 2 : 1;
    state_part<DTYPE> part;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        part.data[i] = __ldcs((const uint4 *)row + lane * CHUNKS + i);
    return part;
}

template <msa_dtype DTYPE>
static __device__ inline void add_part(const state_part<DTYPE> &part, float weight, float (&out)[ELEMENTS])
{
    const uint32_t *word = (const uint32_t *)part.data;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++)
        out[i] = fmaf(weight, state_element<DTYPE>(word, i), out[i]);
}

static __device__ inline void store_row(const float (&out)[ELEMENTS], msa_dtype dtype, char *row, int lane)
{
    if (dtype == MSA_F32) {
        __stcs((float4 *)row + 2 * lane, make_float4(out[0], out[1], out[2], out[3]));
        __stcs((float4 *)row + 2 * lane + 1, make_float4(out[4], out[5], out[6], out[7]));
    } else if (dtype == MSA_BF16) {
        __stcs((uint4 *)row + lane, pack_8<OPERAND_BF16>(out));
    } else {
        __stcs((uint4 *)row + lane, pack_8<OPERAND_F16>(out));
    }
}

/* ------------------------------------------------------------------------------------------------ one (row, head) */

/* The weights of the states: lane i's are those of states i and i+16, already divided by their sum. Negative: empty. */
struct weights {
    float of[2], lse;
};

static __device__ inline float team_max(float x)
{
    for (int d = 1; d < LANES; d *= 2)
        x = lse_max(x, __shfl_xor_sync(~0u, x, d));
    return x;
}

static __device__ inline float team_sum(float x)
{
    for (int d = 1; d < LANES; d *= 2)
        x += __shfl_xor_sync(~0u, x, d);
    return x;
}

static __device__ inline weights find_weights(const cuda_merge &merge, int64_t row, int32_t head, int lane, int count)
{
    const merge_job &job = merge.job;
    float lse[2], scale[2] = {1, 1}, max = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int s = lane + i * LANES;
        lse[i] = -INFINITY;
        if (s < count) {
            const msa_merge_state &state = job.states[s];
            const char *from = (const char *)state.lse + row * state.lse_row_stride + head * state.lse_head_stride;
            lse[i] = __ldcs((const float *)from);
            if (merge.sum_offset)
                scale[i] = __ldcs((const float *)(from + merge.sum_offset));
        }
        if (!isinf(lse[i]))
            max = lse_max(max, lse[i]);
    }
    max = team_max(max);
    weights w;
#pragma unroll
    for (int i = 0; i < 2; i++)
        w.of[i] = state_weight(lse[i], scale[i], max, merge.sum_offset);
    float sum = team_sum(w.of[0] + w.of[1]);
    w.lse = merged_lse(merge, max, sum, merge.sum_offset);
#pragma unroll
    for (int i = 0; i < 2; i++)
        w.of[i] = state_share(merge, lse[i], w.of[i], max, sum);
    return w;
}

/* States [first, first + UNROLL) of the lane's head. The team's lanes agree on everything but their elements. */
template <msa_dtype DTYPE>
static __device__ inline void add_states(const cuda_merge &merge, const weights &w, int64_t row, int32_t head,
                                         int first, int lane, float (&out)[ELEMENTS])
{
    const merge_job &job = merge.job;
    state_part<DTYPE> part[UNROLL];
    float weight[UNROLL];
    bool blocked = DTYPE == MSA_BF16 && merge.blocked;
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        int s = first + i;
        weight[i] = __shfl_sync(~0u, s < LANES ? w.of[0] : w.of[1], s % LANES, LANES);
        if (!(weight[i] < 0)) { /* NaN is used */
            const msa_merge_state &state = job.states[s];
            const char *from = (const char *)state.out + row * state.out_row_stride + head * state.out_head_stride;
            if (blocked) {
                constexpr int BLOCK = PARTIAL_BLOCK, ROW = 2 * MSA_HEAD_DIM;
                int64_t index = row * job.num_q_heads + head;
                from = (const char *)state.out + index / BLOCK * (BLOCK * ROW) + index % BLOCK * (ROW / 4) +
                       lane / 4 * (BLOCK * ROW / 4);
            }
            part[i] = load_part<DTYPE>(from, blocked ? lane % 4 : lane);
        }
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++)
        if (!(weight[i] < 0))
            add_part<DTYPE>(part[i], weight[i], out);
}

/* Merge states have a type each; then one state at a time. */
static __device__ inline void add_state(const merge_job &job, float weight, int64_t row, int32_t head, int s, int lane,
                                        float (&out)[ELEMENTS])
{
    const msa_merge_state &state = job.states[s];
    const char *from = (const char *)state.out + row * state.out_row_stride + head * state.out_head_stride;
    if (weight < 0)
        return;
    if (state.out_dtype == MSA_F32)
        add_part<MSA_F32>(load_part<MSA_F32>(from, lane), weight, out);
    else if (state.out_dtype == MSA_BF16)
        add_part<MSA_BF16>(load_part<MSA_BF16>(from, lane), weight, out);
    else
        add_part<MSA_FP16>(load_part<MSA_FP16>(from, lane), weight, out);
}

template <msa_dtype DTYPE>
static __global__ void __launch_bounds__(THREADS) merge_states(const __grid_constant__ cuda_merge merge)
{
    grid_wait();
    if (merge.work && *merge.work == 0)
        return;
    const merge_job &job = merge.job;
    int lane = threadIdx.x % LANES;
    int64_t heads = job.rows * job.num_q_heads;
    for (int64_t block = blockIdx.x; block * HEADS < heads; block += gridDim.x) {
        int64_t index = block * HEADS + threadIdx.x / LANES, row = index / job.num_q_heads;
        int32_t head = (int32_t)(index % job.num_q_heads);
        int count = index < heads ? states_of(merge, row, head) : -1;
        bool live = count >= 0; /* other lanes of the warp go on */
        weights w = find_weights(merge, row, head, lane, count);
        float out[ELEMENTS] = {};
        if (DTYPE == MSA_DTYPE_DEFAULT)
            for (int s = 0; s < job.num_states; s++)
                add_state(job, __shfl_sync(~0u, s < LANES ? w.of[0] : w.of[1], s % LANES, LANES), row, head, s, lane,
                          out);
        else
            for (int first = 0; first < job.num_states; first += UNROLL)
                add_states<DTYPE>(merge, w, row, head, first, lane, out);
        if (live) {
            finish_merged<ELEMENTS>(merge, head, out);
            char *to = (char *)job.out + row * job.out_row_stride + head * job.out_head_stride;
            if (DTYPE == MSA_BF16 && merge.turned)
                store_turned(to + lane / 4 * 64,
                             job.out_dtype == MSA_BF16 ? pack_8<OPERAND_BF16>(out) : pack_8<OPERAND_F16>(out), lane,
                             0xFu << threadIdx.x % CUDA_WARP / 4 * 4);
            else
                store_row(out, job.out_dtype, to, lane);
            if (job.lse && lane == 0)
                *(float *)((char *)job.lse + row * job.lse_row_stride + head * job.lse_head_stride) = w.lse;
        }
    }
}

cudaError_t combine_smxx(const struct cuda_merge *merge, cudaStream_t stream)
{
    const struct merge_job *job = &merge->job;
    msa_dtype dtype = job->states[0].out_dtype;
    for (int s = 1; s < job->num_states; s++)
        if (job->states[s].out_dtype != dtype)
            dtype = MSA_DTYPE_DEFAULT;
    auto kernel = dtype == MSA_F32    ? merge_states<MSA_F32>
                  : dtype == MSA_BF16 ? merge_states<MSA_BF16>
                  : dtype == MSA_FP16 ? merge_states<MSA_FP16>
                                      : merge_states<MSA_DTYPE_DEFAULT>;
    return launch(kernel, grid_blocks(job->rows * job->num_q_heads, HEADS), THREADS, 0, merge->after_kernel, stream,
                  *merge);
}
