/* SPDX-License-Identifier: MIT
 *
 * decode_page_sm90.cuh - a block of decode_sm90.cu up to its results: what it gets, its memory, the list of its pages
 * and its queries, and the pages one after the other.
 */
#ifndef MSA_CUDA_DECODE_PAGE_SM90_CUH
#define MSA_CUDA_DECODE_PAGE_SM90_CUH

#include "attention.cuh"
#include "decode_sm90.cuh"
#include "ring_sm90.cuh"
#include "tensor_map.cuh"

#include <math.h>

enum { MOST_BLOCKS = 16 /* of a cluster */, ROWS = MSA_MAX_GQA_RATIO, PART_BYTES = ROWS * MSA_HEAD_DIM * 4 };

/* log2 of what O may be too large by: FP32 holds 448 * 448 * 128 * 32 times that. */
#define REFERENCE_RANGE 96.0f

enum { NUM_FACTORS = 5 };

/* What the kernel needs of a job, in the order in which it does: a launch's first look at a line of 64 bytes of its
 * parameters takes as long as one at memory. */
struct decode_job {
    const cuda_row *rows;
    const cuda_page *pages;
    int32_t total_q, topk, num_pages, kv_heads_a_list;
    int32_t ratio, clusters;   /* clusters: blocks of one, 1, 2, 4, 8 or 16 */
    bool bulk, quad, bf16_out; /* tiles are copied by the copy engine; V's scales; results */
    uint32_t *error;
    const char *q;
    int64_t q_row_stride, q_head_stride;
    tile_source k, v;
    CUtensorMap k_map, v_map;         /* E4M3, 16-bit: if boxes fit */
    const float *factor[NUM_FACTORS]; /* or NULL: descale of q, of k, global scale of k; descale of v, global of v */
    int64_t factor_stride[NUM_FACTORS];
    float sm_scale;
    char *out, *lse; /* lse: or NULL */
    int64_t out_row_stride, out_head_stride, lse_row_stride, lse_head_stride;
};

/* Whether a plan is better left to decode_shared_sm90 (which see). */
bool shares_pages(const struct cuda_attention *job);

struct listed_page {
    int32_t physical, keys;
};

/* Of a group. One address finds all of it. */
template <storage STORAGE> struct alignas(1024) group_memory {
    static constexpr int SLOTS = tile<STORAGE>::NVFP4 ? 5 : 3;
    uint8_t ring[SLOTS][tile<STORAGE>::BYTES]; /* in the end, O of each warp */
    float max[2][ROWS][GROUP_WARPS],
        largest[GROUP_WARPS][ROWS]; /* of pages; each warp's own copy of the largest so far */
    float sum[GROUP_WARPS][ROWS], reference[ROWS];
    listed_page pages[MSA_MAX_TOPK];
    int32_t head;                /* if there are pages */
    uint64_t full[SLOTS], given; /* barriers: of tiles; of the warps' maxima */
};

/* 4 blocks, or groups, fit an SM. */
template <storage STORAGE, int GROUPS> struct memory {
    group_memory<STORAGE> group[GROUPS];
    uint2 table[tile<STORAGE>::NVFP4 ? 256 : 1];
    uint4 q[8][CUDA_WARP];  /* a operands, of a product each */
    int32_t count;          /* of the row */
    uint32_t touched;       /* see attend */
    float scale, out_scale; /* logit in log2 units = scale * dot; not kept in registers */
    uint64_t merged;
    /* Of clusters only, and so last. The states of the heads that this block owns, of all blocks. */
    float2 state[MOST_BLOCKS];
    float4 out[ROWS][MSA_HEAD_DIM / 4];
};

/* What a block works on. */
struct work {
    int64_t row;
    int32_t kv_head, rank;
};

/* The registers are read anew each time: what a block works on need not be kept through its pages. */
static __device__ inline work find_work(const decode_job &d)
{
    uint32_t x, y;
    asm volatile("mov.u32 %0, %%ctaid.x;\n"
                 "mov.u32 %1, %%ctaid.y;"
                 : "=r"(x), "=r"(y));
    return work{(int64_t)(x / (uint32_t)d.clusters), (int32_t)y, (int32_t)(x % (uint32_t)d.clusters)};
}

/* A lane's part of 16 rows: lane/4 and that + 8; elements 32t + n and 32t + 16 + n of out[n]. Relative to `reference`,
 * a dot product; the sum is over the lane's keys. */
struct state {
    float out[16][4], reference[2], sum[2];
};

template <int GROUPS> static __device__ inline int group_of(void)
{
    return GROUPS == 1 ? 0 : threadIdx.x / GROUP;
}

template <int GROUPS> static __device__ inline void sync_group(void)
{
    if (GROUPS == 1)
        __syncthreads();
    else
        barrier_meet(1 + group_of<GROUPS>(), GROUP);
}

/* ------------------------------------------------------------------------------------------------ the host's part */

/* Whether the copy engine can fetch tiles; makes the maps that it needs for it. */
static inline bool plan_copies(const struct cuda_attention *job, decode_job *d)
{
    int64_t heads = job->desc.num_kv_heads, pages = job->args.num_pages;
    auto data = [&](const tile_source &t) {
        return tensor_layout{t.data, t.token_stride, t.head_stride, t.page_stride, heads, pages};
    };
    auto scales = [&](const tile_source &t) {
        return tensor_layout{t.scale, t.scale_token_stride, t.scale_head_stride, t.scale_page_stride, heads, pages};
    };
    if (job->desc.kv_dtype == MSA_NVFP4)
        return is_dense(data(d->k), 64) && is_dense(data(d->v), 64) && is_dense(scales(d->k), 8) &&
               is_dense(scales(d->v), 8);
    bool e4m3 = job->desc.kv_dtype == MSA_E4M3;
    int row_bytes = e4m3 ? 128 : 256, keys = e4m3 ? 128 : 64;
    return map_tensor(job->encode_tensor, &d->k_map, data(d->k), row_bytes, keys) &&
           map_tensor(job->encode_tensor, &d->v_map, data(d->v), row_bytes, keys);
}

static inline decode_job make_job(const struct cuda_attention *job, int32_t clusters)
{
    const msa_attention_args &a = job->args;
    const cuda_result &result = job->result;
    decode_job d = {};
    d.rows = job->step.rows;
    d.pages = job->step.pages;
    d.total_q = job->step.total_q;
    d.topk = job->step.topk;
    d.num_pages = (int32_t)(a.num_pages < INT32_MAX ? a.num_pages : INT32_MAX); /* ids are 32-bit */
    d.kv_heads_a_list = job->desc.num_kv_heads / job->step.lists;
    d.ratio = job->ratio;
    d.clusters = clusters;
    d.quad = job->desc.v_scale_order == MSA_SCALE_QUAD;
    d.bf16_out = result.dtype == MSA_BF16;
    d.error = job->step.error;
    d.q = (const char *)a.q;
    d.q_row_stride = a.q_row_stride;
    d.q_head_stride = a.q_head_stride;
    d.k = tile_source{(const uint8_t *)a.k,  (const uint8_t *)a.k_scale, a.k_page_stride,  a.k_head_stride,
                      a.k_scale_page_stride, a.k_scale_head_stride,      a.k_token_stride, a.k_scale_token_stride};
    d.v = tile_source{
        (const uint8_t *)a.v,  (const uint8_t *)a.v_scale, a.v_page_stride,  a.v_head_stride,
        a.v_scale_page_stride, a.v_scale_head_stride,      a.v_token_stride, d.quad ? 8 : a.v_scale_token_stride};
    const float *factors[NUM_FACTORS] = {a.q_descale, a.k_descale, a.k_global_scale, a.v_descale, a.v_global_scale};
    int64_t strides[NUM_FACTORS] = {a.q_descale_stride, a.k_descale_stride, 0, a.v_descale_stride, 0};
    for (int i = 0; i < NUM_FACTORS; i++) {
        d.factor[i] = factors[i];
        d.factor_stride[i] = strides[i];
    }
    d.sm_scale = job->desc.sm_scale;
    d.out = (char *)result.out;
    d.lse = (char *)result.lse;
    d.out_row_stride = result.out_row_stride;
    d.out_head_stride = result.out_head_stride;
    d.lse_row_stride = result.lse_row_stride;
    d.lse_head_stride = result.lse_head_stride;
    d.bulk = plan_copies(job, &d);
    return d;
}

/* ------------------------------------------------------------------------------------------------ the start */

/* A lane's page of the row's list, of lanes below topk; anything if it is a padding row. */
static __device__ inline const cuda_page *page_of_list(const decode_job &d, const work &w)
{
    int64_t list = w.kv_head / d.kv_heads_a_list;
    return d.pages + (list * d.total_q + w.row) * d.topk + threadIdx.x % CUDA_WARP;
}

/* One warp: all optional factors at once, and their products. */
static __device__ inline void load_factors(const decode_job &d, int kv_head, float &scale, float &out_scale)
{
    int lane = threadIdx.x % CUDA_WARP;
    float mine = 1;
    if (lane < NUM_FACTORS && d.factor[lane])
        mine = *(const float *)((const char *)d.factor[lane] + kv_head * d.factor_stride[lane]);
    auto factor = [&](int i) { return __shfl_sync(~0u, mine, i); };
    double logit = (double)d.sm_scale * 1.44269504088896340736 * factor(0) * factor(1) * factor(2);
    float out = factor(3) * factor(4);
    if (lane == 0) {
        scale = finite_scale(logit);
        out_scale = out;
    }
}

/* One thread: page i of a group; its tiles are on their way if the ring has a place for them. */
template <storage STORAGE>
static __device__ inline void list_page(const decode_job &d, int kv_head, int physical, int keys, int i,
                                        group_memory<STORAGE> &own)
{
    using T = tile<STORAGE>;
    if (d.bulk)
#pragma unroll
        for (int half = 0; half < T::PER_PAGE; half++) {
            int n = 2 * (T::PER_PAGE * i + half);
            uint32_t to = shared_address(own.ring) + n * T::BYTES, full = shared_address(own.full) + n * 8;
            if (half * T::KEYS < keys && n < own.SLOTS)
                copy_tile<STORAGE>(to, d.k, &d.k_map, kv_head, physical, half, full);
            if (half * T::KEYS < keys && n + 1 < own.SLOTS)
                copy_tile<STORAGE>(to + T::BYTES, d.v, &d.v_map, kv_head, physical, half, full + 8);
        }
    own.pages[i] = listed_page{physical, keys};
    if (i == 0)
        own.head = kv_head;
}

/* One warp, a lane a page of a row's list: those that there are and that the cache holds, a bit each. */
static __device__ inline uint32_t held_pages(const decode_job &d, const cuda_page &page)
{
    bool there = page.logical >= 0 && page.physical >= 0 && page.physical < d.num_pages;
    if (page.logical >= 0 && !there)
        atomicOr(d.error, MSA_ERROR_BIT_PAGE_ID);
    return __ballot_sync(~0u, there);
}

static __device__ inline int visible_keys(const cuda_page &page, int position)
{
    return min(position + 1 - page.logical * MSA_PAGE_SIZE, MSA_PAGE_SIZE);
}

/* One warp: the row's visible pages that the cache holds; each lane keeps its own if it is one of this block's. */
template <storage STORAGE, int GROUPS>
static __device__ inline void list_pages(const decode_job &d, const work &w, const cuda_page &page, int position,
                                         memory<STORAGE, GROUPS> &m)
{
    int lane = threadIdx.x % CUDA_WARP;
    uint32_t mask = held_pages(d, page);
    if (lane == 0)
        m.count = __popc(mask);
    int part = __popc(mask & ((1u << lane) - 1)), block = part % d.clusters;
    part /= d.clusters;
    int group = part % GROUPS, i = part / GROUPS;
    if (mask >> lane & 1 && block == w.rank)
        list_page(d, w.kv_head, page.physical, visible_keys(page, position), i, m.group[group]);
}

/* One warp: the queries as operands. */
template <storage STORAGE, bool E4M3>
static __device__ inline void stage_queries(const decode_job &d, int64_t row, int kv_head, int half,
                                            uint4 (*q)[CUDA_WARP])
{
    int lane = thread_now() % CUDA_WARP;
    uint32_t pair[2][8];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int h = lane / 4 + 8 * r;
        const char *head = d.q + row * d.q_row_stride + ((int64_t)kv_head * d.ratio + h) * d.q_head_stride;
        load_query_half<STORAGE, E4M3>(h < d.ratio ? head : nullptr, half, pair[r]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        q[4 * half + i][lane] = make_uint4(pair[0][2 * i], pair[1][2 * i], pair[0][2 * i + 1], pair[1][2 * i + 1]);
}

/* ------------------------------------------------------------------------------------------------ one page */

/* S of the warp's keys. Keys past the visible ones: -inf; a visible key's -inf, which only an infinite input or
 * overflow can make: NaN. */
template <storage STORAGE, operand TYPE, int BLOCKS>
static __device__ inline void score_keys(uint32_t k_tile, uint32_t place, uint32_t one, uint32_t q, uint32_t table,
                                         int keys, uint32_t thread, float (&s)[BLOCKS][4])
{
    using T = tile<STORAGE>;
    int lane = thread % CUDA_WARP, first = thread / CUDA_WARP % GROUP_WARPS * T::WARP_KEYS;
    uint32_t at = k_tile + place, scale_at = k_tile + SCALES + place / 8;
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 x = load_shared_128(q + (4 * half + i) * CUDA_WARP * 16);
            a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
        }
#pragma unroll
        for (int n = 0; n < BLOCKS; n++) {
            uint32_t b[8];
            load_keys<STORAGE>(at, scale_at, table, one, n, half, b);
#pragma unroll
            for (int i = 0; i < 4; i++)
                mma_16x8x16<TYPE>(s[n], a[i], b[2 * i], b[2 * i + 1]);
        }
    }
    if (T::HALF)
#pragma unroll
        for (int n = 0; n < BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[n][i] = s[n][i] == -INFINITY ? NAN : s[n][i];
    if (keys < first + T::WARP_KEYS)
#pragma unroll
        for (int n = 0; n < BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (first + 8 * n + T::key(lane % 4, i % 2) >= keys)
                    s[n][i] = -INFINITY;
}

/* The maximum of each of the lane's rows over the warp's keys, for the other warps. */
template <int BLOCKS>
static __device__ inline void give_maximum(const float (&s)[BLOCKS][4], float (*part)[GROUP_WARPS], uint32_t given,
                                           uint32_t thread)
{
    int lane = thread % CUDA_WARP, warp = thread / CUDA_WARP % GROUP_WARPS;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float max = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < BLOCKS; n++)
            max = fmaxf(max, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
        if (lane % 4 == 0)
            part[lane / 4 + 8 * r][warp] = max;
    }
    __syncwarp();
    if (lane == 0)
        barrier_arrive(given);
}

/* The page's maximum. Afterwards all warps have read the page's K, and the V of the page before. */
static __device__ inline void take_maximum(const float (*part)[GROUP_WARPS], uint32_t given, int turn, uint32_t thread,
                                           float (&max)[2])
{
    barrier_wait(given, (uint32_t)turn);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float4 all = *(const float4 *)part[thread % CUDA_WARP / 4 + 8 * r];
        max[r] = fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w));
    }
}

/* Moves the state to the page's reference; P of the page, rounded, as the a operands of PV. */
template <operand TYPE, bool E4M3, int BLOCKS>
static __device__ inline void page_probabilities(const float (&s)[BLOCKS][4], const float (&max)[2], float scale,
                                                 float *largest, uint32_t thread, state &o,
                                                 uint32_t (&p)[BLOCKS / 2][4])
{
    int lane = thread % CUDA_WARP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        constexpr float RANGE = TYPE == OPERAND_BF16 ? 0.0f : REFERENCE_RANGE;
        float before = largest[lane / 4 + 8 * r];
        float reference = (max[r] - before) * scale >= -RANGE ? max[r] : o.reference[r];
        float weight = exp2_approx((o.reference[r] - reference) * scale), sum = 0;
        if (lane % 4 == 0 && max[r] > before) /* another lane of the row that already sees it decides the same */
            largest[lane / 4 + 8 * r] = max[r];
        o.reference[r] = reference;
#pragma unroll
        for (int n = 0; n < BLOCKS; n++) {
            float x[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[i] = exp2_approx((s[n][2 * r + i] - reference) * scale) * (E4M3 ? 448.0f : 1.0f);
                sum += x[i];
            }
            p[n / 2][n % 2 * 2 + r] =
                E4M3 ? e4m3_pair_to_f16(f32_pair_to_e4m3(x[0], x[1])) : pack_pair<TYPE>(x[0], x[1]);
        }
        o.sum[r] = fmaf(o.sum[r], weight, sum);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            o.out[n][2 * r] *= weight;
            o.out[n][2 * r + 1] *= weight;
        }
    }
}

/* Fetches tile n of a group, into this slot. By all threads of the group, or its first. What the address needs is found
 * each time: there are no registers to keep it in. */
template <storage STORAGE, bool V>
static __device__ inline void fetch(const decode_job &d, group_memory<STORAGE> &m, int n, int slot, uint32_t thread)
{
    using T = tile<STORAGE>;
    int head = m.head, page = m.pages[n / 2 / T::PER_PAGE].physical, half = n / 2 % T::PER_PAGE;
    uint32_t to = shared_address(m.ring) + slot * T::BYTES, full = shared_address(m.full) + slot * 8;
    if (!d.bulk)
        copy_tile_together<STORAGE>(to, V ? d.v : d.k, head, page, half, full, thread);
    else if (thread % GROUP == 0)
        copy_tile<STORAGE>(to, V ? d.v : d.k, V ? &d.v_map : &d.k_map, head, page, half, full);
}

/* The `pages` first pages of a group, whose tiles are on their way from the ring's first place on. table: shared
 * memory. thread and queries, which returns where the lane's first operand is, are functions: callers choose whether
 * what follows from them may stay in registers. */
template <storage STORAGE, operand TYPE, bool E4M3, int GROUPS, typename THREAD, typename QUERIES>
static __device__ inline void attend_pages(const decode_job &d, group_memory<STORAGE> &own, int pages, QUERIES queries,
                                           uint32_t table, const float &scale, THREAD thread, state &o)
{
    using T = tile<STORAGE>;
    constexpr int SLOTS = group_memory<STORAGE>::SLOTS;
    int steps = pages * T::PER_PAGE;
    if (T::HALF && pages && own.pages[pages - 1].keys <= T::KEYS)
        steps--;
    if (!d.bulk)
        for (int n = 0; n < SLOTS && n < 2 * steps; n++)
            if (n % 2)
                fetch<STORAGE, true>(d, own, n, n, thread());
            else
                fetch<STORAGE, false>(d, own, n, n, thread());
    uint32_t ring = shared_address(own.ring), full = shared_address(own.full);
    uint32_t one;
    asm("mov.b32 %0, 0x3C003C00;" : "=r"(one)); /* 1, 1: opaque, so that it stays a product */
    uint32_t given = shared_address(&own.given);
    ring_place<SLOTS> place = {0};
    auto next_tile = [&]() {
        uint32_t at = ring + place.stage() * T::BYTES;
        barrier_wait(full + place.stage() * 8, place.parity());
        place.advance();
        return at;
    };
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        int keys = own.pages[i / T::PER_PAGE].keys - i % T::PER_PAGE * T::KEYS;
        float s[T::BLOCKS][4], max[2];
        uint32_t p[T::BLOCKS / 2][4];
        score_keys<STORAGE, TYPE>(next_tile(), place_of_keys<STORAGE>(thread()), one, queries(), table, keys, thread(),
                                  s);
        give_maximum(s, own.max[i % 2], given, thread());
        /* While the other warps' maxima are on their way: the first values. */
        uint32_t v_tile = next_tile();
        if (keys < T::KEYS)
            clear_dead_values<STORAGE>(v_tile, keys, d.quad, thread());
        raw_values<STORAGE> raw;
        value_places places = places_of_values<STORAGE>(d.quad, thread());
        constexpr bool EARLY = T::HALF || (T::NVFP4 && GROUPS == 1); /* the others have no registers left */
        if (EARLY)
            load_values(v_tile + places.data, v_tile + places.scale, table, 0, 0, raw);
        take_maximum(own.max[i % 2], given, i % 2, thread(), max);
        page_probabilities<TYPE, E4M3>(s, max, scale, own.largest[thread() / CUDA_WARP % GROUP_WARPS], thread(), o, p);
        /* The slots of this K and the V before are free. They get the next tiles in order: as SLOTS is odd, a K
         * first. */
        static_assert(SLOTS % 2);
        int slot = (int)place.stage();
        if (i > 0 && 2 * i - 1 + SLOTS < 2 * steps)
            fetch<STORAGE, false>(d, own, 2 * i - 1 + SLOTS, slot < 3 ? slot - 3 + SLOTS : slot - 3, thread());
        if (2 * i + SLOTS < 2 * steps)
            fetch<STORAGE, true>(d, own, 2 * i + SLOTS, slot < 2 ? slot - 2 + SLOTS : slot - 2, thread());
        constexpr int PARTS = 16 / T::PART, LOADS = T::HALF ? PARTS : 1; /* of 16 keys */
#pragma unroll
        for (int n = 0; n < T::BLOCKS / 2 * PARTS; n++) {
            int block = n / PARTS, part = n % PARTS;
            uint32_t low[T::PART], high[T::PART];
            if ((n > 0 || !EARLY) && part < LOADS)
                load_values(v_tile + places.data, v_tile + places.scale, table, block, part, raw);
            widen_part(raw, one, part, low, high);
#pragma unroll
            for (int e = 0; e < T::PART; e++)
                mma_16x8x16<TYPE>(o.out[part * T::PART + e], p[block], low[e], high[e]);
        }
    }
}

#endif
