/* SPDX-License-Identifier: MIT
 *
 * combine_sm90.cu - combine and merge for Hopper where the states stream: all of one 16-bit type, their rows and heads
 * dense (the flat list of (row, head), 256 bytes each; states may lie anywhere), LSEs, counts and outputs of any
 * stride. combine_smxx takes the rest, and small jobs. combine.cuh has the arithmetic; sums are taken in combine_smxx's
 * order, so that the bits are the same.
 *
 * A tile is 64 consecutive heads of the flat list: of each state 16 KB that lie together. A warp that only copies keeps
 * SLOTS such pieces in a ring ahead of the 256 threads that add them up in FP32. Four threads take a head: thread q of
 * them holds the LSEs of states 4q..4q+3 (and 16 more), and every fourth 16-byte chunk of the output. The next tile's
 * LSEs are loaded before this tile's states are waited for. States with maxima and sums apart come in blocks of 16
 * heads (struct cuda_merge), of which a tile has four.
 *
 * Shared memory: a block, alone on its SM, has two such rings, each with its own threads: 224 KB under way.
 * Registers: 96.
 * Floor: S reads of 260 bytes and one write a head (16 x 16384 x 64: 4.36 GB read, 930 us at 4.69 TB/s).
 * Measured there on an H200, 2026-11-30: 1067 us, 4.34 TB/s read and written (1113 with states marked `evict_first`,
 * which therefore only the kernels' own are). 2026-11-29: 4096 rows 278 us, 256 rows 27 us.
 */
#include "combine.cuh"
#include "ptx_sm90.cuh"

enum {
    HEADS = 64, /* of a tile */
    TEAM = 4,   /* threads a head */
    CHUNKS = 4, /* of 8 elements, a thread */
    ADDERS = HEADS * TEAM,
    ROW_BYTES = 2 * MSA_HEAD_DIM,
    SLOT_BYTES = HEADS * ROW_BYTES,
    MIN_TILES = 256 /* fewer are left to combine_smxx, whose blocks are smaller */
};
enum { SLOTS = 7, RINGS = 2 /* of a block */, RING_THREADS = ADDERS + CUDA_WARP };

struct ring {
    uint8_t slot[SLOTS][SLOT_BYTES];
    uint64_t full[SLOTS], empty[SLOTS];
};

/* A place in the ring: slots follow each other, round after round. */
struct turn {
    int slot;
    uint32_t parity;
};

static __device__ inline void advance(turn &at)
{
    if (++at.slot == SLOTS) {
        at.slot = 0;
        at.parity ^= 1;
    }
}

/* A head of the flat list. A block steps from tile to tile without a division each. */
struct place {
    uint32_t row;
    int32_t head;
};

static __device__ inline place find_place(const merge_job &job, int64_t index)
{
    return place{(uint32_t)(index / job.num_q_heads), (int32_t)(index % job.num_q_heads)};
}

static __device__ inline void advance(const merge_job &job, const place &step, place &at)
{
    at.row += step.row;
    at.head += step.head;
    if (at.head >= job.num_q_heads) {
        at.head -= job.num_q_heads;
        at.row++;
    }
}

/* ------------------------------------------------------------------------------------------------ copies */

/* The most states that a head of a tile has, as far as the lane looks: two of the heads. */
static __device__ inline int look_at_counts(const cuda_merge &merge, int64_t first, int64_t heads)
{
    const merge_job &job = merge.job;
    int most = -1;
    if (!job.split_counts)
        return job.num_states;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t index = first + 2 * (threadIdx.x % CUDA_WARP) + i;
        if (index < heads) {
            place at = find_place(job, index);
            int count = states_of(merge, at.row, at.head);
            most = count > most ? count : most;
        }
    }
    return most;
}

/* By a warp. */
static __device__ inline void copy_states(const cuda_merge &merge, int64_t first, int64_t step, int64_t heads, ring &m)
{
    const merge_job &job = merge.job;
    turn at = {0, 1};
    int next = look_at_counts(merge, first, heads);
    for (; first < heads; first += step) {
        uint32_t bytes = ROW_BYTES * (uint32_t)(heads - first < HEADS ? heads - first : HEADS);
        if (merge.blocked)
            bytes = (bytes + PARTIAL_BLOCK * ROW_BYTES - 1) / (PARTIAL_BLOCK * ROW_BYTES) * (PARTIAL_BLOCK * ROW_BYTES);
        int states = __reduce_max_sync(~0u, next);
        next = look_at_counts(merge, first + step, heads);
        for (int s = 0; s < states; s++) {
            if (threadIdx.x % CUDA_WARP == 0) {
                uint32_t full = shared_address(&m.full[at.slot]), slot = shared_address(m.slot[at.slot]);
                const char *from = (const char *)job.states[s].out + first * ROW_BYTES;
                barrier_wait(shared_address(&m.empty[at.slot]), at.parity);
                barrier_expect(full, bytes);
                if (merge.blocked) /* the kernel's own; the caller's may be read again */
                    copy_bulk_once(slot, from, bytes, full);
                else
                    copy_bulk(slot, from, bytes, full);
            }
            advance(at);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ weights */

/* A thread's LSEs of one head: states 4q + i and 16 + 4q + i; or maxima, with sums. `count` of them are in use; -1: the
 * row is not merged. `most`: what the lane knows of the tile's largest count. */
template <int GROUPS, bool SUMS> struct lses {
    float of[GROUPS][4], sum[SUMS ? GROUPS : 1][4];
    int count, most;
};

template <int GROUPS, bool SUMS>
static __device__ inline void load_lses(const cuda_merge &merge, const place &at, int64_t first, int64_t heads,
                                        lses<GROUPS, SUMS> &l)
{
    const merge_job &job = merge.job;
    bool inside = at.row < job.rows;
    l.count = inside ? states_of(merge, at.row, at.head) : -1;
    l.most = look_at_counts(merge, first, heads);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int s = 16 * g + 4 * (threadIdx.x % TEAM) + i;
            l.of[g][i] = -INFINITY;
            if (inside && s < job.num_states) { /* does not wait for the count */
                const msa_merge_state &state = job.states[s];
                const char *from =
                    (const char *)state.lse + at.row * state.lse_row_stride + at.head * state.lse_head_stride;
                l.of[g][i] = __ldcs((const float *)from);
                if (SUMS)
                    l.sum[g][i] = __ldcs((const float *)(from + merge.sum_offset));
            }
        }
}

/* LSEs to weights, in place; negative: empty. Returns the merged LSE. */
template <int GROUPS, bool SUMS>
static __device__ inline float find_weights(const cuda_merge &merge, lses<GROUPS, SUMS> &l)
{
    float max = -INFINITY, sum[4] = {}, weight[GROUPS][4];
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (16 * g + 4 * (int)(threadIdx.x % TEAM) + i >= l.count)
                l.of[g][i] = -INFINITY;
            if (!isinf(l.of[g][i]))
                max = lse_max(max, l.of[g][i]);
        }
    max = lse_max(max, __shfl_xor_sync(~0u, max, 1));
    max = lse_max(max, __shfl_xor_sync(~0u, max, 2));
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            weight[g][i] = state_weight(l.of[g][i], SUMS ? l.sum[g][i] : 1.0f, max, SUMS);
            sum[i] += weight[g][i];
        }
    float all = sum[0] + sum[1] + (sum[2] + sum[3]);
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            l.of[g][i] = state_share(merge, l.of[g][i], weight[g][i], max, all);
    return merged_lse(merge, max, all, SUMS);
}

/* ------------------------------------------------------------------------------------------------ sums */

/* Where chunk c of a thread's lies in its row. Eight threads read 128 bytes at once: those of odd heads start in the
 * other half, and so in other banks. */
static __device__ inline int chunk_offset(int c)
{
    return 16 * ((threadIdx.x % TEAM + TEAM * c) ^ (threadIdx.x / TEAM % 2 * TEAM));
}

/* head: of the tile. */
template <msa_dtype DTYPE, bool BLOCKED>
static __device__ inline void add_state(const uint8_t *slot, int head, float weight, float (&out)[CHUNKS][8])
{
    const uint8_t *from = BLOCKED ? slot + head / PARTIAL_BLOCK * (PARTIAL_BLOCK * ROW_BYTES) +
                                        head % PARTIAL_BLOCK * (ROW_BYTES / CHUNKS) + threadIdx.x % TEAM * 16
                                  : slot + head * ROW_BYTES;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        uint4 data = *(const uint4 *)(from + (BLOCKED ? c * (PARTIAL_BLOCK * ROW_BYTES / CHUNKS) : chunk_offset(c)));
#pragma unroll
        for (int i = 0; i < 8; i++)
            out[c][i] = fmaf(weight, state_element<DTYPE>((const uint32_t *)&data, i), out[c][i]);
    }
}

template <msa_dtype DTYPE, int GROUPS, bool SUMS>
static __device__ inline void add_states(int states, const lses<GROUPS, SUMS> &weights, ring &m, turn &at,
                                         float (&out)[CHUNKS][8])
{
    int lane = threadIdx.x % CUDA_WARP;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll 1
        for (int q = 0; q < TEAM; q++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (16 * g + 4 * q + i >= states)
                    break;
                float weight = __shfl_sync(~0u, weights.of[g][i], q, TEAM);
                barrier_wait(shared_address(&m.full[at.slot]), at.parity);
                if (!(weight < 0)) /* NaN is used */
                    add_state<DTYPE, SUMS>(m.slot[at.slot], threadIdx.x % RING_THREADS / TEAM, weight, out);
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(shared_address(&m.empty[at.slot]));
                advance(at);
            }
}

template <bool BLOCKED>
static __device__ inline void store_head(const cuda_merge &merge, const place &at, float (&out)[CHUNKS][8], float lse)
{
    const merge_job &job = merge.job;
    finish_merged<CHUNKS * 8>(merge, at.head, out[0]);
    char *row = (char *)job.out + at.row * job.out_row_stride + at.head * job.out_head_stride;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        uint4 x = job.out_dtype == MSA_BF16 ? pack_8<OPERAND_BF16>(out[c]) : pack_8<OPERAND_F16>(out[c]);
        if (BLOCKED && merge.turned)
            store_turned(row + 16 * TEAM * c, x, threadIdx.x, 0xFu << (threadIdx.x & 28));
        else
            __stcs((uint4 *)(row + (BLOCKED ? 16 * (threadIdx.x % TEAM + TEAM * c) : chunk_offset(c))), x);
    }
    if (job.lse && threadIdx.x % TEAM == 0)
        *(float *)((char *)job.lse + at.row * job.lse_row_stride + at.head * job.lse_head_stride) = lse;
}

/* ------------------------------------------------------------------------------------------------ the kernel */

template <msa_dtype DTYPE, int GROUPS, bool SUMS>
static __global__ void __launch_bounds__(RINGS *RING_THREADS, 1) stream_states(const __grid_constant__ cuda_merge merge)
{
    extern __shared__ __align__(128) uint8_t shared[];
    int own = threadIdx.x / RING_THREADS, thread = threadIdx.x - own * RING_THREADS;
    ring &m = ((ring *)shared)[own];
    const merge_job &job = merge.job;
    int64_t heads = job.rows * job.num_q_heads, first = ((int64_t)blockIdx.x * RINGS + own) * HEADS,
            tiles_on = (int64_t)gridDim.x * RINGS * HEADS;
    if (thread == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(shared_address(&m.full[i]), 1);
            barrier_init(shared_address(&m.empty[i]), ADDERS / CUDA_WARP);
        }
        fence_barriers();
    }
    __syncthreads();
    grid_release();
    bool idle = merge.work && *merge.work == 0; /* known before the launch ahead began */
    grid_wait();
    if (idle)
        return;
    if (thread >= ADDERS) {
        copy_states(merge, first, tiles_on, heads, m);
        return;
    }
    place next = find_place(job, first + thread / TEAM);
    const place step = find_place(job, tiles_on);
    turn at = {0, 0};
    lses<GROUPS, SUMS> ahead;
    load_lses(merge, next, first, heads, ahead);
    for (; first < heads; first += tiles_on) {
        lses<GROUPS, SUMS> weights = ahead;
        float lse = find_weights(merge, weights), out[CHUNKS][8] = {};
        int states = __reduce_max_sync(~0u, weights.most);
        place own = next;
        advance(job, step, next);
        load_lses(merge, next, first + tiles_on, heads, ahead);
        add_states<DTYPE>(states, weights, m, at, out);
        if (weights.count >= 0)
            store_head<SUMS>(merge, own, out, lse);
    }
}

/* ------------------------------------------------------------------------------------------------ launchers */

template <msa_dtype DTYPE, int GROUPS, bool SUMS>
static cudaError_t launch_stream(const struct cuda_merge *merge, int64_t tiles, cudaStream_t stream)
{
    auto kernel = stream_states<DTYPE, GROUPS, SUMS>;
    int device = 0, num_sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (!error)
        error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (!error)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, RINGS * sizeof(ring));
    int64_t blocks = (tiles + RINGS - 1) / RINGS;
    return error ? error
                 : launch(kernel, (unsigned)(blocks < num_sms ? blocks : num_sms), RINGS * RING_THREADS,
                          RINGS * sizeof(ring), merge->after_kernel, stream, *merge);
}

static bool streams(const struct cuda_merge *merge)
{
    const struct merge_job *job = &merge->job;
    msa_dtype dtype = job->states[0].out_dtype;
    bool ok = (merge->sum_offset != 0) == merge->blocked && dtype != MSA_F32 && job->out_dtype != MSA_F32 &&
              (!merge->sum_offset || dtype == MSA_BF16);
    for (int s = 0; s < job->num_states; s++) {
        const msa_merge_state *state = &job->states[s];
        ok = ok && state->out_dtype == dtype && (job->num_q_heads == 1 || state->out_head_stride == ROW_BYTES) &&
             (job->rows == 1 || state->out_row_stride == (int64_t)job->num_q_heads * ROW_BYTES);
    }
    return ok;
}

cudaError_t combine_sm90(const struct cuda_merge *merge, cudaStream_t stream)
{
    const struct merge_job *job = &merge->job;
    int64_t tiles = (job->rows * job->num_q_heads + HEADS - 1) / HEADS;
    if (tiles < MIN_TILES || !streams(merge))
        return combine_smxx(merge, stream);
    bool few = job->num_states <= 16;
    if (merge->sum_offset)
        return few ? launch_stream<MSA_BF16, 1, true>(merge, tiles, stream)
                   : launch_stream<MSA_BF16, 2, true>(merge, tiles, stream);
    if (job->states[0].out_dtype == MSA_BF16)
        return few ? launch_stream<MSA_BF16, 1, false>(merge, tiles, stream)
                   : launch_stream<MSA_BF16, 2, false>(merge, tiles, stream);
    return few ? launch_stream<MSA_FP16, 1, false>(merge, tiles, stream)
               : launch_stream<MSA_FP16, 2, false>(merge, tiles, stream);
}
