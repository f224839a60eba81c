/* SPDX-License-Identifier: MIT
 *
 * prefill_load_sm90.cuh - the loading half of prefill_sm90.cu: the ring of stages, a block's tasks, and the warpgroup
 * that brings queries and pages.
 *
 *   load_images    a warp          E4M3 queries: a page's image, one bulk copy into a stage
 *   load_queries   three warps     E4M3 queries of a consumer warpgroup each: copied a tile ahead, widened when those
 *                                  before are done with
 *   load_pages     a warpgroup     16-bit queries: pages as the cache has them, by copies of 16 bytes. Consumers bring
 *                                  their queries themselves; there is no room for the next tile's
 */
#ifndef MSA_CUDA_PREFILL_LOAD_SM90_CUH
#define MSA_CUDA_PREFILL_LOAD_SM90_CUH

#include "image_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ shared memory */

/* A tile, a KV head and a part of the union. */
struct task {
    union_tile tile;
    int32_t head, split;
    int32_t begin, end;      /* of the union */
    const union_page *pages; /* of the union */
    float scale;             /* logit in log2 units = scale * dot */
    float value_scale;       /* of results */
    int32_t odd;             /* flag of the stages */
};

/* A window's tasks: heads, in each its tiles, in each its splits. */
struct task_list {
    uint32_t first_tile, tiles, count;
    int32_t first_page;
};

/* What consumers must know of a stage. */
struct alignas(16) group_info {
    uint32_t mask[2]; /* the queries that see the page: 16 bits a warp */
    int32_t flags;
    float scale; /* logit in log2 units = scale * dot */
};
struct stage_info {
    group_info group[GROUPS];
    int32_t first_keys, keys; /* of the page: that the tile's first query sees; that the request has */
    int32_t first_row, num_rows, head, split;
    float value_scale;
};
enum {
    STAGE_FIRST = 1, /* of a task */
    STAGE_LAST = 2,
    STAGE_PARTIAL = 4, /* see page_view */
    STAGE_NONE = 8,    /* no query of the group sees the page */
    STAGE_END = 16,
    STAGE_ODD = 32 /* the task's number in the block is */
};
enum { INFO_WORDS = sizeof(stage_info) / 4, GROUP_WORDS = 4 * GROUPS, MASK_WORDS = 2 * GROUPS };

/* A stage is a page's K and V, or where V is not E4M3 one of the two: then they follow each other, and K's is free
 * while V is used. */
template <typename T> struct shape {
    static constexpr bool IMAGES = T::E4M3; /* the loader is one thread's bulk copies; else a warpgroup's small ones */
    static constexpr int STAGE_BYTES = T::K_BYTES + (IMAGES ? T::V_BYTES : 0);
    static constexpr int STAGES = !IMAGES ? 5 : T::QK == WGMMA_E4M3 ? 5 : 3;
    static constexpr int THREADS = (1 + GROUPS) * WARPGROUP;
    static constexpr int FULL = IMAGES ? 1 : WARPGROUP; /* arrivals */
    static constexpr int BEHIND = 2;                    /* stages whose small copies are on their way */
    static constexpr int LOAD_REGISTERS = 32, REGISTERS = 160;
};

template <typename T> struct memory {
    uint8_t stage[shape<T>::STAGES][shape<T>::STAGE_BYTES];
    uint8_t q[GROUPS][T::Q_BYTES];
    uint8_t raw[T::E4M3 ? GROUPS : 0][GROUP_ROWS * 128]; /* the next tile's, before conversion */
    uint64_t q_full[GROUPS], q_empty[GROUPS];            /* E4M3 queries */
    stage_info info[shape<T>::STAGES];
    uint64_t full[shape<T>::STAGES], empty[shape<T>::STAGES];
    uint64_t landed; /* a copy that the loader works on before its stage is full */
    uint32_t landings, tasks;
    uint8_t query[WARP_ROWS]; /* of each row of a warp */
    task_list list;
    task now; /* of a loading warpgroup, which has no registers for it */
};

/* A stage, and the parity of the round in which it is used: one register, as consumers have none to spare. */
struct turn {
    uint32_t value; /* 2 * stage + parity */
};

static __device__ __forceinline__ uint32_t stage_of(const turn &t)
{
    return t.value >> 1;
}

template <typename T> static __device__ __forceinline__ void advance(turn &t)
{
    t.value += 2;
    if (t.value >= 2 * shape<T>::STAGES)
        t.value = (t.value - 2 * shape<T>::STAGES) ^ 1;
}

template <typename T> static __device__ __forceinline__ void wait_full(memory<T> &m, const turn &t)
{
    barrier_wait(shared_address(&m.full[stage_of(t)]), t.value & 1);
}

template <typename T> static __device__ __forceinline__ void wait_empty(memory<T> &m, const turn &t)
{
    barrier_wait(shared_address(&m.empty[stage_of(t)]), ~t.value & 1); /* the first round finds them empty */
}

template <typename T> static __device__ __forceinline__ void give_full(memory<T> &m, const turn &t)
{
    barrier_arrive(shared_address(&m.full[stage_of(t)]));
}

static __device__ __forceinline__ task_list find_tasks(const prefill_job &job)
{
    task_list list;
    list.first_tile = job.step.first_tile[job.requests[0]];
    list.tiles = job.step.first_tile[job.requests[1]] - list.first_tile;
    list.count = list.tiles * job.window.heads * job.num_splits;
    list.first_page = job.own.first_page[job.requests[0]];
    return list;
}

static __device__ __forceinline__ void get_task(const prefill_job &job, const task_list &list, uint32_t index, task &t)
{
    const msa_attention_args &a = job.args;
    uint32_t splits = job.num_splits, place = index / splits, head = place / list.tiles;
    t.split = index - place * splits;
    index = list.first_tile + place - head * list.tiles;
    head += job.window.first_head;
    t.head = head;
    t.scale = job.scale * factor_at(a.q_descale, a.q_descale_stride, head) *
              factor_at(a.k_descale, a.k_descale_stride, head) * factor_at(a.k_global_scale, 0, 0);
    t.value_scale = output_scale(job, head);
    uint32_t in_list = head / job.list_heads;
    t.tile = job.own.tiles[in_list * (uint32_t)job.step.num_tiles + index];
    t.tile.first_page -= list.first_page;
    t.begin = t.tile.size * t.split / (int32_t)splits;
    t.end = t.tile.size * (t.split + 1) / (int32_t)splits;
    t.pages = job.own.unions + ((int64_t)in_list * job.step.total_q + t.tile.first_row) * job.step.topk;
}

/* threadIdx.x, in a way that keeps what follows from it out of registers across a loop. */
static __device__ __forceinline__ uint32_t fresh_thread(void)
{
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

enum { LOADERS = 4 /* named barrier of the loading warpgroup; the consumers' are 1..3 */ };

/* The loading warpgroup's next task, to shared memory, as it has no registers for it. False: no more. LEADS: the
 * caller's warp finds it. */
template <typename T, bool LEADS> static __device__ __forceinline__ bool next_task(const prefill_job &job, memory<T> &m)
{
    barrier_meet(LOADERS, WARPGROUP); /* all are done with the last one */
    if (LEADS && threadIdx.x == 0) {
        uint32_t index = blockIdx.x + m.tasks * job.blocks;
        m.now.head = -1;
        if (index < m.list.count)
            get_task(job, m.list, index, m.now);
        m.now.odd = m.tasks++ % 2 ? STAGE_ODD : 0;
    }
    barrier_meet(LOADERS, WARPGROUP);
    return m.now.head >= 0;
}

/* Where 16 bytes of row `row` of a warpgroup's queries are; NULL: a row left over. */
template <typename T>
static __device__ __forceinline__ const char *query_chunk(const prefill_job &job, const memory<T> &m, int32_t first_row,
                                                          int32_t num_rows, int32_t kv_head, int group, int row,
                                                          int chunk)
{
    int in_warp = m.query[row % WARP_ROWS], query = (group * GROUP_WARPS + row / WARP_ROWS) * job.width + in_warp;
    if (in_warp >= job.width || query >= num_rows)
        return nullptr;
    return (const char *)job.args.q + (int64_t)(first_row + query) * job.args.q_row_stride +
           (int64_t)((kv_head - in_warp) * job.ratio + row % WARP_ROWS) * job.args.q_head_stride + chunk * 16;
}

/* ------------------------------------------------------------------------------------------------ loading images */

/* A lane's word of a stage's info. mask: of lanes below MASK_WORDS, a word of the union's mask. */
static __device__ __forceinline__ uint32_t info_word(const task &t, uint32_t mask, int32_t logical, int32_t flags)
{
    int lane = (int)fresh_thread() % CUDA_WARP, part = lane % 4;
    int32_t first_keys = t.tile.first_position + 1 - logical * MSA_PAGE_SIZE,
            keys = t.tile.kv_len - logical * MSA_PAGE_SIZE;
    if (first_keys < MSA_PAGE_SIZE || keys < MSA_PAGE_SIZE)
        flags |= STAGE_PARTIAL;
    uint32_t low = __shfl_sync(~0u, mask, lane / 4 * 2), high = __shfl_sync(~0u, mask, lane / 4 * 2 + 1);
    flags |= t.odd | (low | high ? 0 : STAGE_NONE);
    if (lane < GROUP_WORDS)
        return part == 0 ? low : part == 1 ? high : part == 2 ? (uint32_t)flags : __float_as_uint(t.scale);
    int32_t word = __float_as_int(t.value_scale);
    word = lane == GROUP_WORDS ? first_keys : word;
    word = lane == GROUP_WORDS + 1 ? keys : word;
    word = lane == GROUP_WORDS + 2 ? t.tile.first_row : word;
    word = lane == GROUP_WORDS + 3 ? t.tile.num_rows : word;
    word = lane == GROUP_WORDS + 4 ? t.head : word;
    word = lane == GROUP_WORDS + 5 ? t.split : word;
    return (uint32_t)word;
}

/* No more stages. */
template <typename T> static __device__ __forceinline__ void write_end(memory<T> &m, const turn &at)
{
    if (threadIdx.x % CUDA_WARP < GROUPS)
        m.info[stage_of(at)].group[threadIdx.x % CUDA_WARP].flags = STAGE_END;
    __syncwarp();
}

template <typename T> static __device__ __forceinline__ void write_info(memory<T> &m, const turn &at, uint32_t word)
{
    int lane = threadIdx.x % CUDA_WARP;
    if (lane < INFO_WORDS)
        ((uint32_t *)&m.info[stage_of(at)])[lane] = word;
    __syncwarp();
}

/* Zeros in place of values of keys from `keys` on, in a transposed V. By a warp. */
static __device__ void blank_values(uint8_t *v, int keys)
{
    int lane = threadIdx.x % CUDA_WARP, chunk = lane % 8;
    uint32_t keep[4];
    for (int t = 0; t < 4; t++) {
        keep[t] = 0;
        for (int e = 0; e < 4; e++)
            keep[t] |= chunk * 16 + e / 2 * 8 + 2 * t + e % 2 < keys ? 0xFFu << 8 * e : 0;
    }
    for (int row = lane / 8; row < MSA_HEAD_DIM; row += CUDA_WARP / 8) {
        uint4 *at = (uint4 *)(v + swizzled(row, chunk)), x = *at;
        *at = make_uint4(x.x & keep[0], x.y & keep[1], x.z & keep[2], x.w & keep[3]);
    }
    fence_async_reads();
    __syncwarp();
}

/* The stage of a page that only some queries of the tile see in full, when a value that not all see is not finite: a
 * stage for each query, without what that query does not see, as 0 * NaN would reach its result. */
template <typename T>
static __device__ void load_unsafe_page(memory<T> &m, turn &at, int width, uint32_t mask, int32_t logical,
                                        int32_t flags, const uint8_t *image)
{
    const task &t = m.now;
    int lane = threadIdx.x % CUDA_WARP;
    uint32_t landed = shared_address(&m.landed);
    for (int query = 0, bit = 0; query < t.tile.num_rows; query++, bit++) {
        bit += bit % WARP_ROWS == width ? WARP_ROWS - width : 0; /* of the union's mask */
        uint32_t own = lane == bit / 32 ? mask & 1u << bit % 32 : 0;
        int32_t now = flags & ~(query ? STAGE_FIRST : 0) & ~(query < t.tile.num_rows - 1 ? STAGE_LAST : 0);
        wait_empty(m, at);
        write_info(m, at, info_word(t, own, logical, now));
        if (__any_sync(~0u, own)) {
            if (lane == 0) {
                barrier_expect(landed, shape<T>::STAGE_BYTES);
                copy_bulk(shared_address(m.stage[stage_of(at)]), image, shape<T>::STAGE_BYTES, landed);
            }
            barrier_wait(landed, m.landings & 1);
            __syncwarp();
            if (lane == 0)
                m.landings++;
            blank_values(m.stage[stage_of(at)] + T::K_BYTES,
                         t.tile.first_position + query + 1 - logical * MSA_PAGE_SIZE);
        }
        if (lane == 0)
            give_full(m, at);
        advance<T>(at);
    }
}

/* Starts a stage, by a warp. Its info is written; what is still to come arrives on `full`. */
template <typename T>
static __device__ __forceinline__ void load_image(const prefill_job &job, memory<T> &m, turn &at, int32_t i)
{
    const task &t = m.now;
    int lane = threadIdx.x % CUDA_WARP;
    uint32_t mask = lane < 8 ? ((const uint32_t *)(t.pages + i))[lane] : 0;
    int32_t logical = __shfl_sync(~0u, (int32_t)mask, 6), physical = __shfl_sync(~0u, (int32_t)mask, 7);
    bool there = physical >= 0 && physical < job.args.num_pages;
    mask = there && lane < MASK_WORDS ? mask : 0;
    int32_t flags = (i == t.begin ? STAGE_FIRST : 0) | (i == t.end - 1 ? STAGE_LAST : 0);
    int64_t slot = (int64_t)(m.now.tile.first_page + logical) * job.window.heads + t.head - job.window.first_head;
    const uint8_t *image = job.own.images + slot * shape<T>::STAGE_BYTES;
    bool partial = t.tile.first_position + 1 - logical * MSA_PAGE_SIZE < MSA_PAGE_SIZE;
    if (partial && there && job.own.unsafe[slot]) {
        load_unsafe_page(m, at, job.width, mask, logical, flags, image);
        return;
    }
    wait_empty(m, at);
    write_info(m, at, info_word(t, mask, logical, flags));
    if (lane == 0 && there) {
        uint32_t full = shared_address(&m.full[stage_of(at)]);
        barrier_expect(full, shape<T>::STAGE_BYTES);
        copy_bulk(shared_address(m.stage[stage_of(at)]), image, shape<T>::STAGE_BYTES, full);
    } else if (lane == 0) {
        give_full(m, at);
    }
    advance<T>(at);
}

/* By the first warp of the loading warpgroup; the others bring the queries meanwhile, a tile ahead. */
template <typename T> static __device__ __forceinline__ void load_images(const prefill_job &job, memory<T> &m)
{
    int lane = threadIdx.x % CUDA_WARP;
    turn at = {0};
#pragma unroll 1
    while (next_task<T, true>(job, m)) {
        if (m.now.begin == m.now.end) {
            wait_empty(m, at);
            write_info(m, at, info_word(m.now, 0, 0, STAGE_FIRST | STAGE_LAST));
            if (lane == 0)
                give_full(m, at);
            advance<T>(at);
        }
#pragma unroll 1
        for (int32_t i = m.now.begin; i < m.now.end; i++)
            load_image(job, m, at, i);
    }
    wait_empty(m, at);
    write_end(m, at);
    if (lane == 0)
        give_full(m, at);
}

/* E4M3 queries of a warpgroup, by a warp: copied a tile ahead, and converted when the tile before needs its own no
 * more, while the warpgroup is still busy with that tile's last page. */
template <typename T>
static __device__ __forceinline__ void load_queries(const prefill_job &job, memory<T> &m, int group)
{
    int lane = threadIdx.x % CUDA_WARP, chunk = lane % 8;
#pragma unroll 1
    while (next_task<T, false>(job, m)) {
#pragma unroll 1
        for (int row = lane / 8; row < GROUP_ROWS; row += CUDA_WARP / 8) {
            const char *from =
                query_chunk(job, m, m.now.tile.first_row, m.now.tile.num_rows, m.now.head, group, row, chunk);
            copy_async_16(shared_address(m.raw[group]) + row * 128 + chunk * 16, from ? from : (const char *)job.args.q,
                          from != nullptr);
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncwarp();
        barrier_wait(shared_address(&m.q_empty[group]), !m.now.odd); /* the first ones find the place empty */
#pragma unroll 2
        for (int row = lane / 8; row < GROUP_ROWS; row += CUDA_WARP / 8) {
            uint32_t x[4]; /* they lie next to each other there, see attention_sm90.cuh */
#pragma unroll
            for (int t = 0; t < 4; t++)
                x[t] = *(const uint32_t *)(m.raw[group] + row * 128 + chunk / 4 * 64 + t * 16 + chunk % 4 * 4);
            auto place = [&](int piece, uint4 y) {
                *(uint4 *)(m.q[group] + piece / 8 * (GROUP_ROWS * 128) + swizzled(row, piece % 8)) = y;
            };
            if constexpr (T::QK == WGMMA_F16) {
                place(2 * chunk, make_uint4(e4m3_pair_to_f16(x[0]), e4m3_pair_to_f16(x[1]), e4m3_pair_to_f16(x[2]),
                                            e4m3_pair_to_f16(x[3])));
                place(2 * chunk + 1,
                      make_uint4(e4m3_pair_to_f16(x[0] >> 16), e4m3_pair_to_f16(x[1] >> 16),
                                 e4m3_pair_to_f16(x[2] >> 16), e4m3_pair_to_f16(x[3] >> 16)));
            } else {
                place(chunk, make_uint4(x[0], x[1], x[2], x[3]));
            }
        }
        fence_async_reads();
        barrier_arrive(shared_address(&m.q_full[group]));
    }
}

/* ------------------------------------------------------------------------------------------------ loading pages */

/* K or V of a page to a stage; zeros from `keys` on. By the warpgroup. */
static __device__ __forceinline__ void copy_rows(const uint8_t *from, int64_t stride, int keys, uint32_t to)
{
    int thread = (int)fresh_thread(), chunk = thread % 16, row = thread / 16;
    from += row * stride + chunk * 16;
    to += chunk / 8 * TILE_HALF + swizzled(row, chunk % 8);
    keys -= row;
#pragma unroll 2
    for (int i = 0; i < 16; i++) {
        copy_async_16(to, from, keys > 0);
        from += 8 * stride;
        to += 8 * 128; /* eight rows further the swizzle is the same */
        keys -= 8;
    }
}

/* Whether some of the values that the tile's last query sees, but not its first, is not finite. */
static __device__ __forceinline__ bool has_unsafe_values(const prefill_job &job, const task &t, int32_t logical,
                                                         int32_t physical)
{
    int keys = t.tile.kv_len - logical * MSA_PAGE_SIZE, first = t.tile.first_position + 1 - logical * MSA_PAGE_SIZE;
    int last = min(min(first + t.tile.num_rows - 1, MSA_PAGE_SIZE), keys);
    uint32_t exponent = job.desc.kv_dtype == MSA_BF16 ? 0x7F807F80 : 0x7C007C00;
    const uint8_t *v =
        (const uint8_t *)job.args.v + physical * job.args.v_page_stride + t.head * job.args.v_head_stride;
    bool bad = false;
#pragma unroll 1
    for (int i = max(first, 0) * 16 + (int)fresh_thread(); i < last * 16; i += WARPGROUP) {
        uint4 x = *(const uint4 *)(v + i / 16 * job.args.v_token_stride + i % 16 * 16);
        uint32_t same = __vcmpeq2(x.x & exponent, exponent) | __vcmpeq2(x.y & exponent, exponent) |
                        __vcmpeq2(x.z & exponent, exponent) | __vcmpeq2(x.w & exponent, exponent);
        bad |= same != 0;
    }
    return barrier_any(LOADERS, WARPGROUP, bad);
}

/* Where the loading warpgroup is: the next stage to fill, and how many before it are not given yet. */
struct fill {
    turn next;
    int behind;
};

/* Gives stages whose copies have arrived, all but the last PENDING. */
template <int PENDING, typename T> static __device__ __forceinline__ void give_arrived(memory<T> &m, fill &f)
{
    copy_async_wait<PENDING>();
    fence_async_reads();
#pragma unroll 1
    for (; f.behind > PENDING; f.behind--) {
        int stage = (int)stage_of(f.next) - f.behind;
        barrier_arrive(shared_address(&m.full[stage < 0 ? stage + shape<T>::STAGES : stage]));
    }
}

/* By the warpgroup. mode: flags of the stage, and 256 times: 0, or 1 + a query of the tile, for this one alone, without
 * what it does not see; its high half is not for this function. */
template <typename T>
static __device__ __forceinline__ void load_page(const prefill_job &job, memory<T> &m, fill &f, uint32_t mask,
                                                 int32_t logical, int32_t physical, uint32_t mode)
{
#pragma unroll 1
    for (int v = 0; v < 2; v++) {
        wait_empty(m, f.next);
        int lane = (int)fresh_thread() % CUDA_WARP, query = (int)(mode / 256 % 256) - 1;
        int32_t flags = mode % 256;
        uint32_t own = mask;
        if (query >= 0) {
            int warp = query / job.width, bit = warp * WARP_ROWS + query - warp * job.width; /* of the union's mask */
            own = lane == bit / 32 ? mask & 1u << bit % 32 : 0;
            flags &= ~(query ? STAGE_FIRST : 0) & ~(query < m.now.tile.num_rows - 1 ? STAGE_LAST : 0);
        }
        if (threadIdx.x < CUDA_WARP)
            write_info(m, f.next, info_word(m.now, own, logical, flags));
        if (__any_sync(~0u, own)) {
            const prefill_cache &cache = job.cache[v];
            int keys = m.now.tile.kv_len - logical * MSA_PAGE_SIZE;
            if (v && query >= 0)
                keys = min(keys, m.now.tile.first_position + query + 1 - logical * MSA_PAGE_SIZE);
            copy_rows(cache.data + physical * cache.page_stride + m.now.head * cache.head_stride, cache.token_stride,
                      keys, shared_address(m.stage[stage_of(f.next)]));
        }
        copy_async_commit();
        advance<T>(f.next);
        f.behind++;
        give_arrived<shape<T>::BEHIND>(m, f);
    }
}

/* The loop's variables are one register: the number of the page, the query and the flags. */
template <typename T> static __device__ __forceinline__ void load_pages(const prefill_job &job, memory<T> &m)
{
    fill f = {};
#pragma unroll 1
    while (next_task<T, true>(job, m)) {
        uint32_t mode = m.now.begin << 16 | STAGE_FIRST;
        do {
            int lane = (int)fresh_thread() % CUDA_WARP;
            const uint32_t *page = (const uint32_t *)(m.now.pages + (mode >> 16));
            bool any = (int)(mode >> 16) < m.now.end; /* no task is without a stage */
            uint32_t mask = any && lane < 8 ? page[lane] : 0;
            int32_t logical = __shfl_sync(~0u, (int32_t)mask, 6), physical = __shfl_sync(~0u, (int32_t)mask, 7);
            bool there = any && physical >= 0 && physical < job.args.num_pages;
            if (any && !there && threadIdx.x == 0)
                atomicOr(job.step.error, MSA_ERROR_BIT_PAGE_ID);
            mask = there && lane < MASK_WORDS ? mask : 0;
            if ((int)(mode >> 16) >= m.now.end - 1)
                mode |= STAGE_LAST;
            if (there && m.now.tile.first_position + 1 - logical * MSA_PAGE_SIZE < MSA_PAGE_SIZE &&
                has_unsafe_values(job, m.now, logical, physical))
                mode += 256;
            uint32_t last = mode / 256 % 256 ? (uint32_t)m.now.tile.num_rows : 0;
#pragma unroll 1
            for (; mode / 256 % 256 <= last; mode += 256)
                load_page(job, m, f, mask, logical, physical, mode);
            mode = ((mode >> 16) + 1) << 16;
        } while ((int)(mode >> 16) < m.now.end);
        give_arrived<0>(m, f);
    }
    wait_empty(m, f.next);
    if (threadIdx.x < CUDA_WARP)
        write_end(m, f.next);
    give_full(m, f.next);
}

#endif
