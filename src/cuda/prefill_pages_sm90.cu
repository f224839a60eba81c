/* SPDX-License-Identifier: MIT
 *
 * prefill_pages_sm90.cu - sparse prefill attention for Hopper, page-major: a block takes a page of a KV head and the
 * rows that selected it, 64 query rows a step, and leaves each row's result of that page as a partial result.
 * prefill_pages_sm90.cuh has the lists and says what a partial result is; the merge kernel merges them.
 *
 * Arithmetic: that of attention_sm90.cuh for the page, whose fresh accumulator is the whole result here.
 *
 * A warp copies the images of a block's items, one after the other, into a ring; warpgroups take steps in turn, each by
 * itself. A warp's 16 rows are whole queries, whose elements go from global memory into the registers of the products'
 * operand: those of the next step arrive while this one is worked on. S, then O, have the same 64 registers, and
 * nothing is carried from step to step.
 *
 *                            ring      shared memory   registers: loader, consumers (launch)
 *   exact, 16 heads a KV head 4 x 48K  201 K           32, 4 x 112 (96)
 *   exact, fewer              4 x 48K  201 K           32, 3 x 160 (128)
 *   fast                      6 x 32K  205 K           as exact
 *
 * Floor of 16384 queries after 31360, 64/4 heads, 16 pages each: 4.3 GB of partial results take 980 us to write at 4.39
 * TB/s, the products 900 us at 1.75 GHz, the merge 1080 us. Measured there on an H200, 2026-11-29, Q8KV4, scattered:
 * 3064 us in all, of which images take 34, this kernel about 1890 and the merges 1120. By the profiler, of a step's
 * 1650 clocks (768 of products) stores cost 12 %, loads of queries 10 %, images 4 %; the rest are latencies of one warp's
 * softmax that four warps a scheduler do not hide.
 */
#include "attention.cuh"
#include "prefill_pages_sm90.cuh"

enum {
    LOAD_REGISTERS = 32,
    ITEM_ENTRIES = PAGE_STEPS * GROUP_WARPS * WARP_ROWS /* at most */
};

/* WHOLE: a warp's 16 rows are one query, which takes fewer registers. */
template <bool WHOLE> struct shape {
    static constexpr int TEAMS = WHOLE ? 4 : 3;         /* consuming warpgroups */
    static constexpr int REGISTERS = WHOLE ? 112 : 160; /* of their threads */
    static constexpr int BATCH = WHOLE ? 4 : 8;         /* of products, whose operands are there at once */
    static constexpr int THREADS = (TEAMS + 1) * WARPGROUP;
};

/* An entry's row of the chunk, and the rank. Entries of rank NO_RANK fill up steps; their row is a real one. */
static __device__ __forceinline__ uint32_t rank_of(uint32_t entry)
{
    return entry >> ENTRY_ROW_BITS;
}

struct item_info {
    int32_t steps, there;     /* steps 0: no more items. there: the cache has the page */
    int32_t first_keys, keys; /* as in struct page_item */
    float scale;              /* logit in log2 units = scale * dot */
    float value_scale;        /* of results */
    const char *q;            /* of the chunk's first row, the first head */
    uint32_t first_head;      /* of the KV head, among the window's query heads */
};

static __device__ __forceinline__ uint32_t row_of(uint32_t entry)
{
    return entry & ((1u << ENTRY_ROW_BITS) - 1);
}

template <typename T> struct memory {
    static constexpr int STAGE_BYTES = T::K_BYTES + T::V_BYTES, STAGES = T::QK == WGMMA_F16 ? 4 : 6;
    uint8_t stage[STAGES][STAGE_BYTES];
    uint32_t entry[STAGES][ITEM_ENTRIES];
    item_info info[STAGES];
    uint64_t known[STAGES], full[STAGES], empty[STAGES]; /* info and entries; image */
    uint64_t landed;                                     /* an image that is changed before its stage is full */
};

/* A stage, and the parity of the round in which it is used. */
template <typename T> struct turn {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == memory<T>::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* ------------------------------------------------------------------------------------------------ loading */

/* Fills a stage with an item's entries; a page with values that are not finite and that some row may not see is loaded
 * anew for each of them, without what its row does not see: 0 * NaN would reach the result. By a warp. */
template <typename T>
static __device__ __forceinline__ void load_stages(memory<T> &m, turn<T> &at, item_info info, const uint32_t *entries,
                                                   int count, int step_entries, const uint8_t *image, bool unsafe,
                                                   uint32_t &landings)
{
    int lane = threadIdx.x % CUDA_WARP, rounds = unsafe ? count : 1;
    info.steps = unsafe ? 1 : (count + step_entries - 1) / step_entries;
#pragma unroll 1
    for (int i = 0; i < rounds; i++) {
        uint32_t known = shared_address(&m.known[at.stage]), full = shared_address(&m.full[at.stage]),
                 landed = unsafe ? shared_address(&m.landed) : full, bytes = info.steps * step_entries * 4;
        barrier_wait(shared_address(&m.empty[at.stage]), at.parity ^ 1); /* the first round finds them empty */
        if (unsafe) {
            for (int j = lane; j < step_entries; j += CUDA_WARP)
                m.entry[at.stage][j] = entries[i] | (j ? NO_RANK << ENTRY_ROW_BITS : 0);
            __syncwarp();
        }
        if (lane == 0) {
            m.info[at.stage] = info;
            if (unsafe) {
                barrier_arrive(known);
            } else {
                barrier_expect(known, bytes);
                copy_bulk(shared_address(m.entry[at.stage]), entries, bytes, known);
            }
            if (info.there) {
                barrier_expect(landed, memory<T>::STAGE_BYTES);
                copy_bulk(shared_address(m.stage[at.stage]), image, memory<T>::STAGE_BYTES, landed);
            } else {
                barrier_arrive(full);
            }
        }
        if (unsafe) {
            barrier_wait(landed, landings++ & 1);
            blank_values<true>(m.stage[at.stage] + T::K_BYTES, info.first_keys + (int)row_of(entries[i]));
            if (lane == 0)
                barrier_arrive(full);
        }
        __syncwarp();
        at.advance();
    }
}

template <typename T> static __device__ __forceinline__ void load_items(const pages_job &job, memory<T> &m)
{
    const msa_attention_args &a = job.args;
    int32_t first_page = job.own.first_page[job.requests[0]], last_page = job.own.first_page[job.requests[1]];
    int32_t head = job.window.first_head - 1, items = 0, begin = 0; /* of the head's list */
    uint32_t before = 0, landings = 0;
    int64_t list = 0;
    turn<T> at;
#pragma unroll 1
    for (uint32_t work = blockIdx.x;; work += gridDim.x) {
        while (work - before >= (uint32_t)items && head < (int32_t)(job.window.first_head + job.window.heads)) {
            before += items;
            head++;
            list = head / job.list_heads;
            const int32_t *first_item = job.pages.first_item + list * (job.pages.num_chunks + 1) + job.chunk;
            begin = first_item[0];
            items = head < (int32_t)(job.window.first_head + job.window.heads) ? first_item[1] - begin : 0;
        }
        if (head >= (int32_t)(job.window.first_head + job.window.heads))
            break;
        page_item item = job.pages.items[list * job.pages.most_items + begin + (work - before)];
        if (item.page < first_page || item.page >= last_page)
            continue;
        int64_t slot = (int64_t)(item.page - first_page) * job.window.heads + head - job.window.first_head;
        item_info info;
        info.first_keys = item.first_keys;
        info.keys = item.keys;
        info.q = (const char *)a.q + (int64_t)job.chunk * job.pages.chunk_rows * a.q_row_stride +
                 (int64_t)head * job.ratio * a.q_head_stride;
        info.first_head = (head - job.window.first_head) * job.ratio;
        info.there = item.physical >= 0 && item.physical < a.num_pages;
        info.scale = job.scale * factor_at(a.q_descale, a.q_descale_stride, head) *
                     factor_at(a.k_descale, a.k_descale_stride, head) * factor_at(a.k_global_scale, 0, 0);
        info.value_scale = output_scale(job, head);
        bool unsafe = info.there && item.first_keys < MSA_PAGE_SIZE && job.own.unsafe[slot];
        load_stages(m, at, info, job.pages.entries + list * job.pages.most_entries + item.first, item.count,
                    GROUP_WARPS * job.width, job.own.images + slot * memory<T>::STAGE_BYTES, unsafe, landings);
    }
    barrier_wait(shared_address(&m.empty[at.stage]), at.parity ^ 1);
    if (threadIdx.x % CUDA_WARP == 0) {
        m.info[at.stage].steps = 0;
        barrier_arrive(shared_address(&m.known[at.stage]));
    }
}

/* ------------------------------------------------------------------------------------------------ steps */

/* A lane's two rows of a warp. WHOLE: a warp's rows are one query, so that what differs are the heads, which are 8
 * apart. */
template <bool WHOLE> struct lane_rows {
    static constexpr int COUNT = WHOLE ? 1 : 2;
    int64_t q[COUNT];      /* bytes from an entry's first head to what the lane loads */
    uint32_t head[COUNT];  /* of those that share the KV head */
    uint32_t query[COUNT]; /* of the warp's entries, from the stage's first on */
    bool leftover[COUNT];  /* no query's: the entry is not used */
};

/* Of a lane's rows of a step: the entries' states, NO_STATE if there is none, keys that they see, and the elements
 * 16t.. and 64 + 16t.. of the queries. */
template <bool WHOLE> struct step_rows {
    uint32_t state[WHOLE ? 1 : 2];
    int keys[WHOLE ? 1 : 2];
    uint4 part[2][2];
};
constexpr uint32_t NO_STATE = ~0u;

template <bool WHOLE> static __device__ __forceinline__ lane_rows<WHOLE> find_rows(const pages_job &job)
{
    lane_rows<WHOLE> rows;
    uint32_t warp = threadIdx.x / CUDA_WARP % GROUP_WARPS, ratio = job.ratio;
#pragma unroll
    for (int r = 0; r < rows.COUNT; r++) {
        uint32_t row = threadIdx.x % CUDA_WARP / 4 + 8 * r, query = WHOLE ? 0 : row / ratio;
        rows.leftover[r] = query >= (uint32_t)job.width;
        query = rows.leftover[r] ? 0 : query;
        rows.head[r] = rows.leftover[r] ? 0 : row - query * ratio;
        rows.query[r] = warp * job.width + query;
        rows.q[r] = rows.head[r] * job.args.q_head_stride + threadIdx.x % 4 * 16;
    }
    return rows;
}

template <typename T, bool WHOLE>
static __device__ __forceinline__ void fetch_rows(const pages_job &job, const memory<T> &m, uint32_t stage, int step,
                                                  const lane_rows<WHOLE> &rows, step_rows<WHOLE> &to)
{
    const item_info &info = m.info[stage];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = WHOLE ? 0 : r;
        uint32_t entry = m.entry[stage][step * GROUP_WARPS * job.width + rows.query[i]], row = row_of(entry);
        const uint4 *from = (const uint4 *)(info.q + row * job.args.q_row_stride + rows.q[i] +
                                            (WHOLE && r ? 8 * job.args.q_head_stride : 0));
        to.part[r][0] = __ldg(from);
        to.part[r][1] = __ldg(from + 4);
        if (WHOLE && r)
            continue;
        to.keys[i] = min(info.keys, info.first_keys + (int)row);
        to.state[i] =
            (rank_of(entry) * (uint32_t)job.pages.chunk_rows + row) * job.heads + info.first_head + rows.head[i];
        if (rank_of(entry) == NO_RANK || rows.leftover[i])
            to.state[i] = NO_STATE;
    }
}

/* S = Q K^T. k: low half of a matrix descriptor. `used` is called when q is. */
template <typename T, int BATCH, typename USED>
static __device__ __forceinline__ void multiply_queries(const uint4 (&q)[2][2], uint32_t k, float (&s)[64], USED used)
{
    constexpr int COUNT = T::QK == WGMMA_F16 ? 8 : 4;
    const uint32_t word[2][8] = {
        {q[0][0].x, q[0][0].y, q[0][0].z, q[0][0].w, q[0][1].x, q[0][1].y, q[0][1].z, q[0][1].w},
        {q[1][0].x, q[1][0].y, q[1][0].z, q[1][0].w, q[1][1].x, q[1][1].y, q[1][1].z, q[1][1].w}};
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
        if (first + BATCH >= COUNT)
            used();
        wgmma_fence();
#pragma unroll
        for (int i = first; i < COUNT && i < first + BATCH; i++)
            wgmma_64x128<T::QK>(s, a[i - first], matrix_of_low(k + i / 4 * (TILE_HALF / 16) + i % 4 * 2), i);
        wgmma_commit();
        wgmma_wait(s); /* nothing may come in between: ptxas would reuse the operand's registers under way */
    }
}

/* S to the unrounded terms of P, in place: 448 * 2^((s - max) * scale). max: log2 units. */
static __device__ __forceinline__ void find_terms(float (&s)[64], float scale, float (&max)[2], float (&sum)[2])
{
    float bias[2], part[4] = {};
    lane_maxima(s, max);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 1));
        max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 2));
        bias[r] = fmaf(-max[r], scale, LOG2_448);
    }
    if (__any_sync(~0u, !(fabsf(bias[0]) <= LARGE_BIAS && fabsf(bias[1]) <= LARGE_BIAS))) {
#pragma unroll
        for (int r = 0; r < 2; r++) { /* each row by itself: none depends on its neighbours */
            if (fabsf(bias[r]) <= LARGE_BIAS)
                continue;
            bias[r] = LOG2_448;
#pragma unroll
            for (int i = 0; i < 32; i++)
                s[i / 2 * 4 + 2 * r + i % 2] -= max[r];
        }
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale, bias[i / 2 % 2]));
        part[i % 4] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] *= scale;
        sum[r] = part[2 * r] + part[2 * r + 1];
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        sum[r] += sum[r] - sum[r]; /* an infinite one comes from an infinite score */
    }
}

static __device__ __forceinline__ void write_state(const pages_job &job, uint32_t state, float max, float sum)
{
    job.pages.states[state] = make_float2(isnan(sum) ? NAN : max, sum);
}

/* Row r's elements 32b + 8t + 0..7, b = 0..3. */
static __device__ __forceinline__ void write_partial(const float (&o)[64], int r, uint8_t *to)
{
#pragma unroll
    for (int b = 0; b < 4; b++) {
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            pair[i] = pack_pair<OPERAND_BF16>(o[16 * b + 4 * i + 2 * r], o[16 * b + 4 * i + 2 * r + 1]);
        ((uint4 *)to)[4 * b + threadIdx.x % 4] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}

/* One step of a warpgroup. `prefetch` is called when `rows` is used. */
template <typename T, bool WHOLE, typename PREFETCH>
static __device__ __forceinline__ void attend_step(const pages_job &job, const memory<T> &m, uint32_t stage,
                                                   const step_rows<WHOLE> &rows, PREFETCH prefetch)
{
    const item_info &info = m.info[stage];
    uint32_t k = matrix_low(shared_address(m.stage[stage])), p[T::P_WORDS];
    float s[64], max[2], sum[2];
    int keys[2] = {rows.keys[0], rows.keys[WHOLE ? 0 : 1]};
    uint32_t state[2] = {rows.state[0], rows.state[WHOLE ? 0 : 1]};
    multiply_queries<T, shape<WHOLE>::BATCH>(rows.part, k, s, prefetch);
    if (__any_sync(~0u, min(keys[0], keys[1]) < MSA_PAGE_SIZE))
        hide_keys(s, keys);
    find_terms(s, info.scale, max, sum);
    int t = threadIdx.x % 4;
    if (WHOLE) {
        if (t < 2 && state[0] != NO_STATE)
            write_state(job, state[0] + 8 * t, t ? max[1] : max[0], t ? sum[1] : sum[0]);
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (t == 0 && state[r] != NO_STATE)
                write_state(job, state[r], max[r], sum[r]);
    }
    pack_probabilities<T>(s, p);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
        wgmma_64x128<WGMMA_E4M3>(s, p + 4 * i, matrix_of_low(k + T::K_BYTES / 16 + i * 2), i);
    wgmma_commit();
    wgmma_wait(s);
    if (info.value_scale != 1) {
#pragma unroll
        for (int i = 0; i < 64; i++)
            s[i] *= info.value_scale;
    }
    if (WHOLE) {
        uint8_t *to = job.pages.partials + (size_t)state[0] * PARTIAL_BYTES;
        if (state[0] != NO_STATE) {
            write_partial(s, 0, to);
            write_partial(s, 1, to + 8 * PARTIAL_BYTES);
        }
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (state[r] != NO_STATE)
                write_partial(s, r, job.pages.partials + (size_t)state[r] * PARTIAL_BYTES);
    }
}

/* A page that the cache does not hold: empty states. By a warpgroup. */
template <typename T>
static __device__ __forceinline__ void write_empty(const pages_job &job, const memory<T> &m, uint32_t stage)
{
    const item_info &info = m.info[stage];
    for (int i = threadIdx.x % WARPGROUP; i < info.steps * GROUP_WARPS * job.width * job.ratio; i += WARPGROUP) {
        uint32_t entry = m.entry[stage][i / job.ratio], rank = rank_of(entry);
        if (rank != NO_RANK)
            write_state(job,
                        (rank * (uint32_t)job.pages.chunk_rows + row_of(entry)) * job.heads + info.first_head +
                            i % job.ratio,
                        -INFINITY, 0);
    }
}

template <typename T, bool WHOLE>
static __device__ __forceinline__ void attend_items(const pages_job &job, memory<T> &m)
{
    int team = uniform(threadIdx.x / WARPGROUP);
    const lane_rows<WHOLE> rows = find_rows<WHOLE>(job);
    turn<T> at;
    step_rows<WHOLE> now;
    bool fetched = false;
    int step = team;
#pragma unroll 1
    for (;; at.advance()) {
        barrier_wait(shared_address(&m.known[at.stage]), at.parity);
        int steps = uniform(m.info[at.stage].steps);
        if (steps == 0)
            return;
        bool there = uniform(m.info[at.stage].there);
        if (!there && step == 0)
            write_empty(job, m, at.stage);
        if (step < steps)
            barrier_wait(shared_address(&m.full[at.stage]), at.parity);
#pragma unroll 1
        for (; step < steps; step += shape<WHOLE>::TEAMS) {
            if (!fetched)
                fetch_rows(job, m, at.stage, step, rows, now);
            fetched = false;
            if (!there)
                continue;
            attend_step(job, m, at.stage, now, [&] {
                turn<T> next = at;
                int next_step = step + shape<WHOLE>::TEAMS;
                if (next_step >= steps) { /* no more than one item ahead: the ones after that may wait for this stage */
                    next_step -= steps;
                    next.advance();
                    barrier_wait(shared_address(&m.known[next.stage]), next.parity);
                }
                fetched = next_step < m.info[next.stage].steps;
                if (fetched)
                    fetch_rows(job, m, next.stage, next_step, rows, now);
            });
        }
        step -= steps;
        __syncwarp();
        if (threadIdx.x % CUDA_WARP == 0)
            barrier_arrive(shared_address(&m.empty[at.stage]));
    }
}

/* ------------------------------------------------------------------------------------------------ the kernel */

template <typename T, bool WHOLE>
static __global__ void __launch_bounds__(shape<WHOLE>::THREADS, 1) attend_pages(const __grid_constant__ pages_job job)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    memory<T> &m = *(memory<T> *)shared;
    grid_release();
    if (!job.pages.chosen[job.chunk])
        return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < memory<T>::STAGES; i++) {
            barrier_init(shared_address(&m.known[i]), 1);
            barrier_init(shared_address(&m.full[i]), 1);
            barrier_init(shared_address(&m.empty[i]), shape<WHOLE>::TEAMS * GROUP_WARPS);
        }
        barrier_init(shared_address(&m.landed), 1);
        fence_barriers();
    }
    __syncthreads();
    if (uniform(threadIdx.x / WARPGROUP) == shape<WHOLE>::TEAMS) {
        fewer_registers<LOAD_REGISTERS>();
        if (threadIdx.x < shape<WHOLE>::TEAMS * WARPGROUP + CUDA_WARP)
            load_items(job, m);
    } else {
        more_registers<shape<WHOLE>::REGISTERS>();
        attend_items<T, WHOLE>(job, m);
    }
}

/* ------------------------------------------------------------------------------------------------ launchers */

template <typename T, bool WHOLE> static cudaError_t launch_pages(const pages_job &job, cudaStream_t stream)
{
    auto kernel = attend_pages<T, WHOLE>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(memory<T>));
    return error ? error
                 : launch(kernel, (unsigned)job.num_sms, shape<WHOLE>::THREADS, sizeof(memory<T>), false, stream, job);
}

template <typename T> static cudaError_t launch_shape(const pages_job &job, cudaStream_t stream)
{
    return job.ratio == WARP_ROWS ? launch_pages<T, true>(job, stream) : launch_pages<T, false>(job, stream);
}

/* Merges the chunk's rows of the window. */
static cudaError_t merge_chunk(const pages_job &job, cudaStream_t stream)
{
    const msa_attention_desc &desc = job.desc;
    int64_t first = (int64_t)job.chunk * job.pages.chunk_rows, left = job.step.total_q - first, heads = job.heads;
    cuda_merge merge = {};
    merge.rows = job.step.rows + first;
    merge.requests = job.requests;
    merge.work = job.pages.chosen + job.chunk;
    merge.sum_offset = 4;
    merge.divides = true;
    merge.log2_one = job.log2_one;
    merge.after_kernel = true;
    merge.job.num_states = desc.topk;
    for (int s = 0; s < desc.topk; s++) {
        int64_t index = (int64_t)s * job.pages.chunk_rows * heads;
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
    return job.merge(&merge, stream);
}

cudaError_t attend_page_lists(const prefill_job &window, cudaStream_t stream)
{
    pages_job job = make_pages_job(window);
    cudaError_t error = cudaSuccess;
    for (job.chunk = 0; !error && (int64_t)job.chunk * job.pages.chunk_rows < job.step.total_q; job.chunk++) {
        error = job.precision == MSA_PRECISION_FAST ? launch_shape<fast_types>(job, stream)
                                                    : launch_shape<exact_types>(job, stream);
        if (!error)
            error = merge_chunk(job, stream);
    }
    return error;
}
