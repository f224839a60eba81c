/* SPDX-License-Identifier: MIT
 *
 * prefill_load_sm90.cuh - the loading half of prefill_sm90.cu: the ring of stages, a block's tasks, and the warpgroup
 * that brings queries and pages.
 *
 *   load_images    a warp          pages: one bulk copy of an image into a stage, or two boxes of the cache
 *   load_queries   three warps     queries of a consumer warpgroup each, when those before are done with. E4M3: copied
 *                                  a tile ahead, then widened; there is no room for so many of 16 bits
 *
 * The launch ahead makes the images. It waits before it lets this one start, so that all else is older and need not be
 * waited for: only what concerns images or counts that it clears does.
 */
#ifndef MSA_CUDA_PREFILL_LOAD_SM90_CUH
#define MSA_CUDA_PREFILL_LOAD_SM90_CUH

#include "image_sm90.cuh"
#include "ring_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ shared memory */

/* Where a task's results go. */
struct task_results {
    int64_t out, lse; /* bytes, of its first row and head */
    int32_t num_rows;
    float value_scale;
};

/* A tile, or the queries of one or two of its warpgroups, a KV head and a part of the union. */
struct task {
    union_tile tile; /* its rows: the task's */
    int32_t head;
    int32_t begin, end;          /* of the union */
    const union_page *pages;     /* of the union */
    float scale;                 /* logit in log2 units = scale * dot */
    int32_t flags;               /* of its stages: STAGE_ODD, STAGE_ALONE */
    int32_t first_group, groups; /* of the tile: the block's first warpgroups work for these */
    task_results results;
};

/* A window's tasks: heads, in each its tiles, in each its splits. Blocks take them from the last on, as later queries
 * of a request see more pages, each as it is done with one before: which block has a task changes nothing in it.
 * Where tiles do not come out even with the blocks, those left over are cut, if there are blocks enough for all their
 * pieces at once: queries meet the same pages in the same order wherever they are, so that this changes no bit. Pieces
 * of one warpgroup's queries are a block's last tasks. */
struct task_list {
    uint32_t first_tile, tiles, count;
    uint32_t cut, pieces; /* the first `cut` tiles, of all heads, are in so many pieces */
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
    int32_t first_keys, keys; /* of the page: that the task's first query sees; that the request has */
    task_results results;
};
enum {
    STAGE_FIRST = 1, /* of a task */
    STAGE_LAST = 2,
    STAGE_PARTIAL = 4, /* see page_view */
    STAGE_NONE = 8,    /* no query of the group sees the page */
    STAGE_END = 16,
    STAGE_ODD = 32,   /* the task's number in the block is */
    STAGE_FULL = 64,  /* all queries that the group has room for see all of the page */
    STAGE_ALONE = 128 /* the task has one warpgroup's queries, E4M3: all three work for them; so do all later tasks */
};
enum { INFO_WORDS = sizeof(stage_info) / 4, GROUP_WORDS = 4 * GROUPS };
enum { LOGICAL_WORD = offsetof(union_page, logical) / 4, PHYSICAL_WORD = offsetof(union_page, physical) / 4 };

/* A stage is a page's K and V, or where V is not E4M3 one of the two: then they follow each other, and K's is free
 * while V is used. */
template <typename T> struct shape {
    static constexpr int PARTS = T::E4M3 ? 1 : 2; /* stages of a page */
    static constexpr int STAGE_BYTES = T::IMAGE_BYTES / PARTS;
    static constexpr int STAGES = STAGE_BYTES == 3 * TILE_HALF ? 3 : 5;
    static constexpr int THREADS = (1 + GROUPS) * WARPGROUP;
    static constexpr int LOAD_REGISTERS = 32, REGISTERS = 160;
};

template <typename T> struct memory {
    uint8_t stage[shape<T>::STAGES][shape<T>::STAGE_BYTES];
    uint8_t q[GROUPS][T::Q_BYTES];
    uint8_t raw[T::E4M3 ? GROUPS : 0][GROUP_ROWS * 128]; /* the next tile's, before conversion */
    uint64_t q_full[GROUPS], q_empty[GROUPS];
    stage_info info[shape<T>::STAGES];
    uint64_t full[shape<T>::STAGES], empty[shape<T>::STAGES];
    uint64_t landed;                /* a copy that the loader works on before its stage is full */
    uint32_t landings;              /* the image loader's, as are pages of the union to come */
    uint64_t p_full[2], p_empty[2]; /* of P of the second and third warpgroup, see STAGE_ALONE */
    alignas(16) uint32_t words[2][CUDA_WARP];
    uint8_t query[WARP_ROWS]; /* of each row of a warp */
    task_list list;
    task task[2]; /* the loading warpgroup's, and the next one */
};

template <typename T> using turn = ring_place<shape<T>::STAGES>;

static __device__ __forceinline__ task_list find_tasks(const prefill_job &job)
{
    task_list list;
    list.first_tile = window_begin(job, job.step.first_tile);
    list.tiles = window_end(job, job.step.first_tile) - list.first_tile;
    uint32_t tasks = list.tiles * job.window.heads, left = tasks % gridDim.x;
    list.pieces = job.num_splits > 1 || 2 * left > gridDim.x ? 1 : 3 * left > gridDim.x ? 2 : 3;
    list.cut = list.pieces > 1 ? left : 0;
    list.count = (tasks + list.cut * (list.pieces - 1)) * job.num_splits;
    if (job.some_tiles && !*job.some_tiles)
        list.count = 0;
    list.first_page = window_begin(job, job.own.first_page);
    return list;
}

static __device__ __forceinline__ void get_task(const prefill_job &job, const task_list &list, uint32_t index, task &t)
{
    const msa_attention_args &a = job.args;
    const cuda_result &result = job.result;
    t.first_group = 0;
    t.groups = GROUPS;
    if (index >= list.cut * list.pieces) {
        index -= list.cut * (list.pieces - 1);
    } else { /* the larger pieces, two warpgroups' queries, are taken first */
        uint32_t piece = index / list.cut;
        index -= piece * list.cut;
        t.groups = list.pieces == 2 && piece == 1 ? 2 : 1;
        t.first_group = list.pieces == 3 ? piece : piece == 0 ? 2 : 0;
    }
    uint32_t splits = job.num_splits, place = index / splits, split = index - place * splits, head = place / list.tiles;
    index = list.first_tile + place - head * list.tiles;
    head += job.window.first_head;
    t.head = head;
    t.scale = job.scale * factor_at(a.q_descale, a.q_descale_stride, head) *
              factor_at(a.k_descale, a.k_descale_stride, head) * factor_at(a.k_global_scale, 0, 0);
    uint32_t in_list = head / job.list_heads;
    t.tile = job.own.tiles[in_list * (uint32_t)job.step.num_tiles + index];
    t.tile.first_page -= list.first_page;
    t.begin = t.tile.size * (int32_t)split / (int32_t)splits;
    t.end = t.tile.size * ((int32_t)split + 1) / (int32_t)splits;
    t.pages = job.own.unions + ((int64_t)in_list * job.step.total_q + t.tile.first_row) * job.step.topk;
    int32_t group_queries = GROUP_WARPS * job.width, skipped = t.first_group * group_queries;
    t.tile.first_row += skipped;
    t.tile.first_position += skipped;
    t.tile.num_rows = min(t.tile.num_rows - skipped, t.groups * group_queries);
    int64_t row = t.tile.first_row, first_head = (int64_t)head * job.ratio;
    t.results = task_results{
        split * result.out_split_stride + row * result.out_row_stride + first_head * result.out_head_stride,
        split * result.lse_split_stride + row * result.lse_row_stride + first_head * result.lse_head_stride,
        t.tile.num_rows, output_scale(job, head)};
}

enum { LOADERS = 1 /* named barrier */ };

/* The block's next task, to m.task[place], as the loading warpgroup has no registers for it. By a thread, ahead. */
template <typename T>
static __device__ __forceinline__ void find_task(const prefill_job &job, memory<T> &m, uint32_t place, bool first)
{
    task &t = m.task[place];
    do { /* tiles that are page-major are passed over, and pieces without a query */
        uint32_t index = blockIdx.x;
        if (!first) {
            grid_wait();
            index = job.blocks + atomicAdd(job.own.taken, 1);
        }
        t.head = -1;
        if (index < m.list.count)
            get_task(job, m.list, m.list.count - 1 - index, t);
        first = false;
    } while (t.head >= 0 && (t.tile.num_rows <= 0 || t.tile.size < 0));
    t.flags = (place ? STAGE_ODD : 0) | (T::E4M3 && t.groups == 1 ? STAGE_ALONE : 0);
}

/* By all loading warps: they are done with the task before. False: there is none. */
static __device__ __forceinline__ bool begin_task(const task &t)
{
    barrier_meet_apart(LOADERS, WARPGROUP);
    return t.head >= 0;
}

/* Row `row` of a warp of a warpgroup's queries. */
struct query_row {
    const char *at;
    int left; /* rows of the task from its query on; none: the row is left over */
};

template <typename T>
static __device__ __forceinline__ query_row find_row(const prefill_job &job, const memory<T> &m, const task &t,
                                                     int warp_of_tile, int row)
{
    int in_warp = m.query[row], query = warp_of_tile * job.width + in_warp;
    return query_row{(const char *)job.args.q + (int64_t)(t.tile.first_row + query) * job.args.q_row_stride +
                         (int64_t)((t.head - in_warp) * job.ratio + row) * job.args.q_head_stride,
                     in_warp < job.width ? t.tile.num_rows - query : 0};
}

/* A warpgroup's rows on their way to the L2. */
template <typename T>
static __device__ __forceinline__ void fetch_rows(const prefill_job &job, const memory<T> &m, const task &t, int group)
{
#pragma unroll 1
    for (int i = (int)thread_now() % CUDA_WARP; i < GROUP_ROWS; i += CUDA_WARP) {
        query_row row = find_row(job, m, t, group * GROUP_WARPS + i / WARP_ROWS, i % WARP_ROWS);
        for (int half = 0; half < 2 && row.left > 0; half++)
            prefetch_l2(row.at + half * 128);
    }
}

/* Copies a warpgroup's rows, zeros for those left over. place: 16 bytes of a row. A row's address is looked up once for
 * all four warps. */
template <typename T, typename PLACE>
static __device__ __forceinline__ void copy_rows(const prefill_job &job, const memory<T> &m, const task &t, int group,
                                                 PLACE place)
{
    constexpr int CHUNKS = T::E4M3 ? 8 : 16; /* of a row */
    int lane = (int)thread_now() % CUDA_WARP, chunk = lane % CHUNKS;
#pragma unroll 1
    for (int row = lane / CHUNKS; row < WARP_ROWS; row += CUDA_WARP / CHUNKS) {
        query_row from = find_row(job, m, t, group * GROUP_WARPS, row);
        from.at += chunk * 16;
#pragma unroll
        for (int warp = 0; warp < GROUP_WARPS; warp++) {
            copy_async_16(shared_address(place(warp * WARP_ROWS + row, chunk)),
                          from.left > 0 ? from.at : (const char *)job.args.q, from.left > 0);
            from.left -= job.width;
            from.at += job.width * job.args.q_row_stride;
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}

/* ------------------------------------------------------------------------------------------------ loading images */

/* A lane's word of a stage's info. mask: of the first lanes, two for each warpgroup, a word of the union's mask; 0 of
 * the others. By the first warp. */
static __device__ __forceinline__ uint32_t info_word(const task &t, int width, uint32_t mask, int32_t logical,
                                                     int32_t flags)
{
    uint32_t lane = thread_now(), part = lane % 4;
    int32_t first_keys = t.tile.first_position + 1 - logical * MSA_PAGE_SIZE,
            keys = t.tile.kv_len - logical * MSA_PAGE_SIZE;
    flags |= t.flags | (min(first_keys, keys) < MSA_PAGE_SIZE ? STAGE_PARTIAL : 0);
    uint32_t low = __shfl_sync(~0u, mask, lane / 4 * 2), high = __shfl_sync(~0u, mask, lane / 4 * 2 + 1);
    uint32_t some = ((1u << width) - 1) * 0x10001u;
    flags |= low | high ? 0 : STAGE_NONE;
    flags |= !(flags & STAGE_PARTIAL) && (low & high) == some ? STAGE_FULL : 0;
    uint32_t word =
        ((const uint32_t *)&t)[offsetof(task, results) / 4 + min(max(lane, GROUP_WORDS + 2u), INFO_WORDS - 1u) -
                               (GROUP_WORDS + 2)]; /* no branches: lanes would take turns */
    word = lane == GROUP_WORDS ? (uint32_t)first_keys : lane == GROUP_WORDS + 1 ? (uint32_t)keys : word;
    uint32_t of_group = part == 0 ? low : part == 1 ? high : part == 2 ? (uint32_t)flags : __float_as_uint(t.scale);
    return lane < GROUP_WORDS ? of_group : word;
}

/* No more stages. */
template <typename T> static __device__ __forceinline__ void write_end(memory<T> &m, turn<T> at)
{
    if (threadIdx.x % CUDA_WARP < GROUPS)
        m.info[at.stage()].group[threadIdx.x % CUDA_WARP].flags = STAGE_END;
    __syncwarp();
}

template <typename T> static __device__ __forceinline__ void write_info(memory<T> &m, turn<T> at, uint32_t word)
{
    uint32_t lane = thread_now();
    if (lane < INFO_WORDS)
        ((uint32_t *)&m.info[at.stage()])[lane] = word;
    __syncwarp();
}

/* Whether pages that all queries of the request see to their ends come from the cache: these have no images. Others
 * have, and come from there even for tasks that see all of them: one bulk copy takes less time than boxes. */
template <typename T> static __device__ __forceinline__ bool comes_straight(const prefill_job &job)
{
    return !T::E4M3 && job.straight;
}

/* A page's stages, by a warp: their info is written, what is still to come arrives on `full`. When a value that not all
 * queries of the tile see is not finite, each query gets stages of its own, without what it does not see, as 0 * NaN
 * would reach its result. */
template <typename T>
static __device__ __forceinline__ void
load_image(const prefill_job &job, const cache_maps<T::E4M3> &maps, memory<T> &m, const task &t, turn<T> &at,
           const uint32_t *words /* of a union_page */, bool last, int32_t &first)
{
    /* Read anew where they are needed: registers are short. */
    auto logical = [&] { return (int32_t)words[LOGICAL_WORD]; };
    auto mask = [&] { /* a lane's word of those that the task is for */
                      int32_t physical = (int32_t)words[PHYSICAL_WORD], lane = (int32_t)thread_now();
                      return physical >= 0 && physical < job.args.num_pages && lane < 2 * t.groups
                                 ? words[2 * t.first_group + lane]
                                 : 0;
    };
    auto find_slot = [&] {
        return (t.tile.first_page + logical()) * (int32_t)job.window.heads + t.head - (int32_t)job.window.first_head;
    };
    auto bring = [&](uint32_t word, bool any, int32_t slot /* -1: straight from the cache */, int part, bool change) {
        wait_empty(m, at);
        uint32_t arrival = shared_address(change ? &m.landed : &m.full[at.stage()]);
        if (elected() && any) {
            uint32_t to = shared_address(m.stage[at.stage()]);
            if (!copy_straight(maps, part, to, t.head, slot < 0 ? (int32_t)words[PHYSICAL_WORD] : -1, arrival))
                copy_bulk(to, job.own.images + (int64_t)slot * T::IMAGE_BYTES + part * shape<T>::STAGE_BYTES,
                          shape<T>::STAGE_BYTES, arrival);
        }
        write_info(m, at, word);
        if (elected() && any)
            barrier_expect(arrival, shape<T>::STAGE_BYTES); /* the copy may be there before */
        return arrival;
    };
    uint32_t own = mask();
    bool some = __any_sync(~0u, own);
    if (!last && !some) /* the last one is needed to say so */
        return;
    int32_t slot = comes_straight<T>(job) && logical() < t.tile.whole ? -1 : find_slot();
    if (!(some && t.tile.first_position + 1 - logical() * MSA_PAGE_SIZE < MSA_PAGE_SIZE && job.own.unsafe[slot])) {
        uint32_t word = info_word(t, job.width, own, logical(), first | (last ? STAGE_LAST : 0));
        first = 0;
#pragma unroll 1
        for (int part = 0; part < shape<T>::PARTS; part++) {
            bring(word, some, slot, part, false);
            if (elected() && !some)
                give_full(m, at);
            at.advance();
        }
        return;
    }
#pragma unroll 1
    for (int query = 0; query < t.tile.num_rows; query++) {
        int warp = query / job.width, bit = warp * WARP_ROWS + query - warp * job.width; /* of the union's mask */
        own = (int)thread_now() == bit / 32 ? mask() & 1u << bit % 32 : 0;
        bool any = __any_sync(~0u, own);
        uint32_t word =
            info_word(t, job.width, own, logical(), first | (last && query == t.tile.num_rows - 1 ? STAGE_LAST : 0));
        first = 0;
#pragma unroll 1
        for (int part = 0; part < shape<T>::PARTS; part++) {
            bool change = any && part == shape<T>::PARTS - 1;
            uint32_t arrival = bring(word, any, find_slot(), part, change);
            if (change) {
                barrier_wait(arrival, m.landings & 1);
                __syncwarp();
                if (elected())
                    m.landings++;
                blank_values<T::E4M3>(m.stage[at.stage()] + shape<T>::STAGE_BYTES - T::V_BYTES,
                                      t.tile.first_position + query + 1 - logical() * MSA_PAGE_SIZE);
            }
            if (elected() && (change || !any))
                give_full(m, at);
            at.advance();
        }
    }
}

/* By the first warp of the loading warpgroup; the others bring the queries meanwhile, a tile ahead. */
template <typename T>
static __device__ __forceinline__ void load_images(const prefill_job &job, const cache_maps<T::E4M3> &maps,
                                                   memory<T> &m)
{
    constexpr uint32_t TOGETHER = sizeof m.words[0] / sizeof(union_page); /* the next ones are fetched meanwhile */
    turn<T> at = {0};
    uint32_t n = 0;
    bool awaited = false;
#pragma unroll 1
    do {
        const task &t = m.task[n];
#pragma unroll 1
        for (int part = t.begin == t.end ? 0 : shape<T>::PARTS; part < shape<T>::PARTS; part++) {
            uint32_t word = info_word(t, job.width, 0, 0, STAGE_FIRST | STAGE_LAST);
            wait_empty(m, at);
            write_info(m, at, word);
            if (elected())
                give_full(m, at);
            at.advance();
        }
        auto fetch = [&](int32_t i, uint32_t buffer) {
            uint32_t thread = thread_now();
            if (thread < sizeof m.words[0] / 16)
                copy_async_16(shared_address(&m.words[buffer][4 * thread]), (const char *)(t.pages + i) + 16 * thread,
                              i + (int32_t)(thread / 2) < t.end);
            copy_async_commit();
        };
        int32_t first = STAGE_FIRST;
        copy_async_wait<0>(); /* of the task before, past its end */
        fetch(t.begin, 0);
#pragma unroll 1
        for (int32_t i = t.begin; i < t.end; i++) {
            uint32_t of = (uint32_t)(i - t.begin) % (2 * TOGETHER);
            if (of % TOGETHER == 0) {
                copy_async_wait<0>();
                __syncwarp();
                fetch(i + (int32_t)TOGETHER, 1 - of / TOGETHER);
            }
            const uint32_t *words = m.words[0] + of * (sizeof(union_page) / 4);
            /* Two pages from the cache fill the ring: then nothing is lost. */
            if (!awaited && (!comes_straight<T>(job) || (int32_t)words[LOGICAL_WORD] >= t.tile.whole ||
                             i == t.begin + 2 || i == t.end - 1)) {
                grid_wait(); /* for the images */
                grid_release();
                awaited = true;
            }
            load_image(job, maps, m, t, at, words, i == t.end - 1, first);
        }
        n ^= 1;
    } while (begin_task(m.task[n]));
    wait_empty(m, at);
    write_end(m, at);
    if (elected())
        give_full(m, at);
}

/* A warpgroup's E4M3 rows from where they were copied to the operand's places. */
template <typename T> static __device__ __forceinline__ void widen_rows(memory<T> &m, int group, int lane)
{
    int chunk = lane % 8;
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
            place(2 * chunk + 1, make_uint4(e4m3_pair_to_f16(x[0] >> 16), e4m3_pair_to_f16(x[1] >> 16),
                                            e4m3_pair_to_f16(x[2] >> 16), e4m3_pair_to_f16(x[3] >> 16)));
        } else {
            place(chunk, make_uint4(x[0], x[1], x[2], x[3]));
        }
    }
}

/* E4M3 queries of a warpgroup, by a warp: copied a tile ahead, and converted when the tile before needs its own no
 * more, while the warpgroup is still busy with that tile's last page. 16-bit ones are only fetched to the L2 ahead. */
template <typename T> static __device__ __forceinline__ void load_queries(const prefill_job &job, memory<T> &m)
{
    uint32_t n = 0;
#pragma unroll 1
    do {
        const task &t = m.task[n];
        int thread = (int)thread_now(), group = thread / CUDA_WARP - 1;
        bool needed = group == 0 || !(t.flags & STAGE_ALONE); /* else their places have P */
        if (needed) {
            if constexpr (T::E4M3)
                copy_rows(job, m, t, group, [&](int row, int chunk) { return m.raw[group] + row * 128 + chunk * 16; });
            else
                fetch_rows(job, m, t, group);
        }
        __syncwarp();
        /* The first ones find the place empty. */
        barrier_wait(shared_address(&m.q_empty[group]), t.flags & STAGE_ODD ? 0 : 1);
        if (needed) {
            if constexpr (T::E4M3)
                widen_rows(m, group, thread % CUDA_WARP);
            else
                copy_rows(job, m, t, group, [&](int row, int chunk) {
                    return m.q[group] + chunk / 8 * (GROUP_ROWS * 128) + swizzled(row, chunk % 8);
                });
        }
        fence_async_reads();
        barrier_arrive(shared_address(&m.q_full[group]));
        n ^= 1;
        if (threadIdx.x == CUDA_WARP)
            find_task(job, m, n, false);
        __syncwarp();
    } while (begin_task(m.task[n]));
}

#endif
