/* SPDX-License-Identifier: MIT
 *
 * decode_shared_sm90.cuh - the loading half of decode_shared_sm90.cu: which pages a tile's queries see, and pages from
 * the cache into stages of shared memory as operands of products (attention_sm90.cuh).
 *
 * A stage is K in F16, 128 rows of 128 elements, and V in E4M3, transposed. All loaders take each page together,
 * through registers: as soon as its keys are converted, those of the next page are on their way, and so with values.
 * NVFP4 keys have their elements in widen_key's order within each eight, and so have the queries.
 */
#ifndef MSA_CUDA_DECODE_SHARED_SM90_CUH
#define MSA_CUDA_DECODE_SHARED_SM90_CUH

#include "attention_sm90.cuh"
#include "decode_merge_sm90.cuh"

using types = exact_types;

enum {
    CONSUMERS = 2,                  /* warpgroups of 64 rows, the first of the block */
    LOADERS = 2 * WARPGROUP,        /* threads behind them */
    LOADER_BARRIER = 1 + CONSUMERS, /* named; the consumers' are 1 and 2 */
    STAGES = 3,
    STAGE_BYTES = types::K_BYTES + types::V_BYTES,
    TILE_WARPS = CONSUMERS * GROUP_WARPS,
    LEAST_RATIO = 4,
    LOG2_GROUPS = 2,
    ROW_GROUPS = 1 << LOG2_GROUPS, /* of four warps, where rows are taken one by one */
    SEEN_BITS = 4096,
    MOST_QUERIES = TILE_WARPS * (int)WARP_ROWS / LEAST_RATIO /* of a tile: a lane each */
};
static_assert((int)MOST_QUERIES <= (int)CUDA_WARP);

/* What consumers must know of a stage. */
struct stage_info {
    uint32_t queries;   /* that see the page, a bit each; 0: there are no more pages */
    int32_t first_keys; /* of the page that the tile's first query sees; each next one sees one more */
};

/* A page of the union of the lists. */
struct shared_page {
    uint32_t queries; /* of the tile, that selected it; 0: there are no more */
    int32_t logical, physical;
};

/* Of a tile whose rows are taken one by one. */
template <storage STORAGE> struct rows_memory {
    group_memory<STORAGE> group[ROW_GROUPS];
    uint4 q[ROW_GROUPS][8][CUDA_WARP];            /* a operands of a group's row: each group has a copy of its own */
    int32_t query[ROW_GROUPS], pages[ROW_GROUPS]; /* a group's row, and how many of its pages are the group's */
};

template <storage STORAGE> struct shared_memory {
    union {
        struct {
            uint8_t stage[STAGES][STAGE_BYTES];
            uint8_t q[CONSUMERS][types::Q_BYTES];
        };
        rows_memory<STORAGE> rows;
    };
    uint2 table[tile<STORAGE>::NVFP4 ? 256 : 1];
    cuda_page lists[MOST_QUERIES][MSA_MAX_TOPK];
    cuda_tile tile;
    int32_t head;
    stage_info info[STAGES];
    uint64_t full[STAGES], empty[STAGES];
    uint32_t seen[SEEN_BITS / 32]; /* pages of the lists, a bit each */
    uint8_t query[WARP_ROWS];      /* of a row of a warp; WARP_ROWS - 1: none */
    float scale, out_scale;
};

struct shared_job {
    decode_job decode;
    const cuda_tile *tiles;
    int32_t heads;  /* of K and V */
    float log2_one; /* of a term of 1: a constant that the compiler must not know, see write_results */
};

/* ------------------------------------------------------------------------------------------------ the union */

/* Walks the tile's lists, which ascend: lane l has query l's. Every loading warp walks for itself. */
template <storage STORAGE> struct union_walk {
    uint32_t next, end; /* shared memory */
    cuda_page own;      /* the lane's next page */

    __device__ __forceinline__ void look(void)
    {
        uint2 page = make_uint2(~0u, ~0u);
        if (next < end)
            page = load_shared_64(next);
        own = cuda_page{(int32_t)page.x, (int32_t)page.y};
    }

    __device__ __forceinline__ union_walk(const shared_memory<STORAGE> &m, const decode_job &d, int num_rows)
    {
        int lane = threadIdx.x % CUDA_WARP;
        next = shared_address(m.lists[lane % MOST_QUERIES]);
        end = next + (lane < num_rows ? d.topk * (int)sizeof(cuda_page) : 0);
        look();
    }

    /* The smallest page that a query has next. Those that the cache does not hold are passed over. */
    __device__ __forceinline__ shared_page step(const decode_job &d)
    {
        for (;;) {
            int32_t logical = (int32_t)__reduce_min_sync(~0u, (uint32_t)own.logical); /* -1 is the largest */
            if (logical < 0)
                return shared_page{0, -1, -1};
            bool has = own.logical == logical;
            uint32_t queries = __ballot_sync(~0u, has);
            int32_t physical = __shfl_sync(~0u, own.physical, __ffs((int)queries) - 1);
            next += has ? (uint32_t)sizeof(cuda_page) : 0;
            look();
            if (physical >= 0 && physical < d.num_pages)
                return shared_page{queries, logical, physical};
            if (threadIdx.x % LOADERS == 0)
                atomicOr(d.error, MSA_ERROR_BIT_PAGE_ID);
        }
    }
};

/* ------------------------------------------------------------------------------------------------ from the cache */

/* A loading thread's part of a page: of K 16-byte chunks, of V what is in one block of 16 elements of four keys whose
 * bytes are neighbours in the transposed V. Keys from `keys` on are zeros, whatever the cache has there. */
template <storage STORAGE> struct raw_page {
    static constexpr int IN_ROW = chunk<STORAGE>::IN_ROW, CHUNKS = MSA_PAGE_SIZE * IN_ROW / LOADERS;
    uint4 k[CHUNKS], v[4]; /* NVFP4: v.x, v.y */
    uint16_t k_scale[tile<STORAGE>::NVFP4 ? CHUNKS : 1];
    uint8_t v_scale[tile<STORAGE>::NVFP4 ? 4 : 1];
};

static __device__ __forceinline__ int loading_thread(void)
{
    return (int)(thread_now() % LOADERS);
}

/* The order in which stores of a warp meet no bank twice, or only twice, comes from these: which half of what it has a
 * thread takes first. */
static __device__ __forceinline__ bool swaps_keys(int c, int in_row)
{
    return c >= in_row / 2;
}

static __device__ __forceinline__ bool swaps_values(int block)
{
    return block & 2;
}

static __device__ __forceinline__ int value_key(int thread, int e)
{
    int group = thread / CUDA_WARP * 4 + thread % CUDA_WARP / 8; /* of four keys */
    return group / 4 * 16 + e / 2 * 8 + group % 4 * 2 + e % 2;
}

template <storage STORAGE>
static __device__ __forceinline__ void load_keys(const decode_job &d, int head, const shared_page &page, int keys,
                                                 raw_page<STORAGE> &raw)
{
    constexpr bool NVFP4 = tile<STORAGE>::NVFP4;
    constexpr int STEP = LOADERS / raw.IN_ROW; /* keys between two chunks */
    int thread = loading_thread(), c = thread % raw.IN_ROW, key = thread / raw.IN_ROW;
    const uint8_t *k =
        d.k.data + page.physical * d.k.page_stride + head * d.k.head_stride + key * d.k.token_stride + c * 16;
    const uint8_t *scale = d.k.scale + page.physical * d.k.scale_page_stride + head * d.k.scale_head_stride +
                           key * d.k.scale_token_stride + 2 * c;
#pragma unroll
    for (int i = 0; i < raw.CHUNKS; i++) {
        raw.k[i] = make_uint4(0, 0, 0, 0);
        if (NVFP4)
            raw.k_scale[i] = 0;
        if (key + i * STEP < keys) {
            raw.k[i] = *(const uint4 *)(k + i * STEP * d.k.token_stride);
            if (NVFP4)
                raw.k_scale[i] = *(const uint16_t *)(scale + i * STEP * d.k.scale_token_stride);
        }
    }
}

template <storage STORAGE>
static __device__ __forceinline__ void load_values(const decode_job &d, int head, const shared_page &page, int keys,
                                                   raw_page<STORAGE> &raw)
{
    constexpr bool NVFP4 = tile<STORAGE>::NVFP4;
    int thread = loading_thread(), block = thread % 8, first = value_key(thread, 0); /* even */
    const uint8_t *v = d.v.data + page.physical * d.v.page_stride + head * d.v.head_stride + first * d.v.token_stride +
                       block * (NVFP4 ? 8 : 16);
    const uint8_t *scale = d.v.scale + page.physical * d.v.scale_page_stride + head * d.v.scale_head_stride;
    int64_t next = d.v.scale_token_stride, eighth = 8 * next; /* to the scales of the keys first + 1 and first + 8 */
    if (d.quad) {
        scale += first / 4 * 32 + block * 4 + first % 4;
        next = 1;
        eighth = 64;
    } else {
        scale += first * next + block;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        raw.v[e] = make_uint4(0, 0, 0, 0);
        if (NVFP4)
            raw.v_scale[e] = 0;
        if (value_key(thread, e) >= keys)
            continue;
        const uint8_t *from = v + (e % 2 + e / 2 * 8) * d.v.token_stride;
        if (NVFP4) {
            uint2 codes = *(const uint2 *)from;
            raw.v[e].x = codes.x;
            raw.v[e].y = codes.y;
            raw.v_scale[e] = scale[e % 2 * next + e / 2 * eighth];
        } else {
            raw.v[e] = *(const uint4 *)from;
        }
    }
}

/* ------------------------------------------------------------------------------------------------ to a stage */

/* A row is 128 elements: 16 pieces of 16 bytes, 8 in each half. The thread's keys are equal modulo 8, so that its
 * pieces of one key tell where those of the others lie. */
template <storage STORAGE>
static __device__ __forceinline__ void place_keys(const raw_page<STORAGE> &raw, uint32_t table, uint32_t one,
                                                  uint32_t stage)
{
    constexpr bool NVFP4 = tile<STORAGE>::NVFP4;
    constexpr int PIECES = NVFP4 ? 4 : 2, IN_HALF = 8 / PIECES; /* of a chunk; chunks of half a row */
    int thread = loading_thread(), c = thread % raw.IN_ROW, key = thread / raw.IN_ROW;
    bool swap = swaps_keys(c, raw.IN_ROW);
    uint32_t first =
        stage + c / IN_HALF * TILE_HALF + swizzled(key, c % IN_HALF * PIECES) ^ (swap ? PIECES / 2 << 4 : 0);
    uint2 entry[raw.CHUNKS][2]; /* all at once: loads and stores keep their order */
    if (NVFP4)
#pragma unroll
        for (int i = 0; i < raw.CHUNKS; i++)
#pragma unroll
            for (int block = 0; block < 2; block++)
                entry[i][block] =
                    load_shared_64(table + (raw.k_scale[i] >> (swap ? 8 - 8 * block : 8 * block) & 0xFF) * 8);
#pragma unroll
    for (int i = 0; i < raw.CHUNKS; i++) {
        uint4 x = raw.k[i];
        if (swap)
            x = make_uint4(x.z, x.w, x.x, x.y);
#pragma unroll
        for (int w = 0; w < PIECES; w++) {
            uint32_t pair[4];
            if constexpr (NVFP4) {
                widen_key(w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w, entry[i][w / 2], one, pair);
            } else {
                widen_4(w ? x.z : x.x, pair[0], pair[1]);
                widen_4(w ? x.w : x.y, pair[2], pair[3]);
            }
            store_shared_128((first ^ w << 4) + i * (LOADERS / raw.IN_ROW) * 128,
                             make_uint4(pair[0], pair[1], pair[2], pair[3]));
        }
    }
}

/* Bytes i of four words, in order. */
static __device__ __forceinline__ void turn_bytes(const uint32_t (&x)[4], uint32_t (&out)[4])
{
    uint32_t low_ab = permute(x[0], x[1], 0x5140), high_ab = permute(x[0], x[1], 0x7362);
    uint32_t low_cd = permute(x[2], x[3], 0x5140), high_cd = permute(x[2], x[3], 0x7362);
    out[0] = permute(low_ab, low_cd, 0x5410);
    out[1] = permute(low_ab, low_cd, 0x7632);
    out[2] = permute(high_ab, high_cd, 0x5410);
    out[3] = permute(high_ab, high_cd, 0x7632);
}

/* V's 16 elements of each of the thread's keys as E4M3, four a word, its second half first if the thread swaps. */
template <storage STORAGE>
static __device__ __forceinline__ void widen_block(const raw_page<STORAGE> &raw, uint32_t table, uint32_t one,
                                                   uint32_t (&codes)[4][4])
{
    bool swap = swaps_values(loading_thread() % 8);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        uint4 x = raw.v[e];
        if constexpr (tile<STORAGE>::NVFP4) {
            uint2 entry = load_shared_64(table + raw.v_scale[e] * 8);
            uint2 first = widen_in_order(swap ? x.y : x.x, entry, one),
                  second = widen_in_order(swap ? x.x : x.y, entry, one);
            x = make_uint4(first.x, first.y, second.x, second.y);
        } else if (swap) {
            x = make_uint4(x.z, x.w, x.x, x.y);
        }
        codes[e][0] = x.x, codes[e][1] = x.y, codes[e][2] = x.z, codes[e][3] = x.w;
    }
}

/* V transposed. If `check`: returns whether a code is NaN. */
template <storage STORAGE>
static __device__ __forceinline__ bool place_values(const raw_page<STORAGE> &raw, uint32_t table, uint32_t one,
                                                    bool check, uint32_t stage)
{
    uint32_t codes[4][4], bad = 0;
    widen_block(raw, table, one, codes);
    if (check)
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                bad |= (codes[e][i] & 0x7F7F7F7F) + 0x01010101;
    /* Of element 4i + j of the block (see value_element): row 8 * (2 * (i % 2) + j / 2) + 2 * (i / 2) + j % 2 of those
     * from the block's first on. */
    int thread = loading_thread(), block = thread % 8, warp = thread / CUDA_WARP;
    uint32_t first =
        stage + types::K_BYTES + swizzled(block / 2 * 32 + block % 2 * 4, warp) + thread % CUDA_WARP / 8 * 4;
    first ^= swaps_values(block) ? 2 << 4 | 2 << 7 : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t x[4] = {codes[0][i], codes[1][i], codes[2][i], codes[3][i]}, turned[4];
        turn_bytes(x, turned);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t row = 2 * (i / 2) + j % 2;
            asm volatile(
                "st.shared.b32 [%0], %1;" ::"r"((first ^ (row << 4 | row << 7)) + (2 * (i % 2) + j / 2) * 1024),
                "r"(turned[j])
                : "memory");
        }
    }
    return bad & 0x80808080;
}

/* ------------------------------------------------------------------------------------------------ the loaders */

/* The loading threads of a tile. */
template <storage STORAGE> struct page_loader {
    const decode_job &d;
    const cuda_tile &t;
    int head;
    shared_memory<STORAGE> &m;
    uint32_t one;
    ring_place<STAGES> at;
    raw_page<STORAGE> raw;

    /* Keys that the tile's first query sees, and the last one. */
    __device__ __forceinline__ int first_keys(const shared_page &page) const
    {
        return t.first_position + 1 - page.logical * MSA_PAGE_SIZE;
    }

    __device__ __forceinline__ int last_keys(const shared_page &page) const
    {
        return min(first_keys(page) + t.num_rows - 1, MSA_PAGE_SIZE);
    }

    __device__ __forceinline__ void begin_stage(uint32_t queries, int first_keys)
    {
        wait_empty(m, at);
        if (threadIdx.x % LOADERS == 0)
            m.info[at.stage()] = stage_info{queries, first_keys};
    }

    __device__ __forceinline__ void give_stage()
    {
        fence_async_reads();
        give_full(m, at);
        at.advance();
    }

    /* A page with values that are not finite, which not all queries see that see the page: each gets a stage of its own
     * without them, as 0 * NaN would reach its result. */
    __device__ __forceinline__ void give_one_by_one(const shared_page &page)
    {
        uint32_t table = shared_address(m.table);
#pragma unroll 1
        for (uint32_t left = page.queries; left; left &= left - 1) {
            int keys = min(first_keys(page) + __ffs((int)left) - 1, MSA_PAGE_SIZE);
            begin_stage(left & -left, first_keys(page));
            load_keys(d, head, page, keys, raw);
            place_keys(raw, table, one, shared_address(m.stage[at.stage()]));
            load_values(d, head, page, keys, raw);
            place_values(raw, table, one, false, shared_address(m.stage[at.stage()]));
            give_stage();
        }
    }

    __device__ __forceinline__ void load(const shared_page &page)
    {
        if (page.queries) {
            load_keys(d, head, page, last_keys(page), raw);
            load_values(d, head, page, last_keys(page), raw);
        }
    }

    __device__ __forceinline__ void run()
    {
        uint32_t table = shared_address(m.table);
        union_walk<STORAGE> walk(m, d, t.num_rows);
        shared_page page = walk.step(d);
        load(page);
#pragma unroll 1
        while (page.queries) {
            shared_page next = walk.step(d);
            bool check = first_keys(page) < MSA_PAGE_SIZE;
            begin_stage(page.queries, first_keys(page));
            uint32_t stage = shared_address(m.stage[at.stage()]);
            place_keys(raw, table, one, stage);
            if (next.queries)
                load_keys(d, head, next, last_keys(next), raw);
            bool bad = place_values(raw, table, one, check, stage);
            if (next.queries)
                load_values(d, head, next, last_keys(next), raw);
            if (check && barrier_any(LOADER_BARRIER, LOADERS, bad)) {
                give_one_by_one(page);
                load(next);
            } else {
                give_stage();
            }
            page = next;
        }
        begin_stage(0, 0);
        give_stage();
    }
};

template <storage STORAGE>
static __device__ __forceinline__ void load_pages(const decode_job &d, const cuda_tile &t, int head,
                                                  shared_memory<STORAGE> &m)
{
    uint32_t one;
    asm("mov.b32 %0, 0x3C003C00;" : "=r"(one)); /* 1, 1: opaque, so that upper_half stays a product */
    page_loader<STORAGE> loader = {d, t, head, m, one, {0}, {}};
    loader.run();
}

#endif
