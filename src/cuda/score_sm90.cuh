/* SPDX-License-Identifier: MIT
 *
 * score_sm90.cuh - the loading half of score_sm90.cu: tile shapes, the ring of stages, a block's tasks, and the
 * loaders, which bring keys into the ring as operands of products.
 */
#ifndef MSA_CUDA_SCORE_SM90_CUH
#define MSA_CUDA_SCORE_SM90_CUH

#include "page.cuh"
#include "ring_sm90.cuh"
#include "step.cuh"

enum { BLOCK_ROWS = 64 }; /* rows of a consumer warpgroup */

/* How keys become operands of products, and the tile and rings that follow from it. */
template <storage STORAGE, wgmma_type OPERAND, int WARPGROUPS> struct shape {
    static constexpr wgmma_type TYPE = OPERAND;
    static constexpr bool FAST = TYPE == WGMMA_E4M3, NVFP4 = STORAGE == STORAGE_NVFP4_E4M3;
    static constexpr bool CONVERTS = STORAGE != STORAGE_HALF && !(STORAGE == STORAGE_E4M3 && FAST);
    static constexpr int GROUPS = WARPGROUPS;        /* consumer warpgroups */
    static constexpr int LOADERS = CONVERTS ? 2 : 1; /* loader warpgroups; two take turns */
    static constexpr int THREADS = (LOADERS + GROUPS) * WARPGROUP;
    static constexpr int LOAD_REGISTERS = CONVERTS ? 48 : GROUPS == 4 ? 32 : 56;
    static constexpr int REGISTERS = CONVERTS ? 128 : GROUPS == 4 ? 112 : 152;
    static constexpr int ROWS = GROUPS * BLOCK_ROWS;
    static constexpr int HALVES = FAST ? 1 : 2,
                         HALF_BYTES = MSA_PAGE_SIZE * 128; /* a stage: 128 bytes a key, once or twice */
    static constexpr int STAGES = CONVERTS ? (FAST ? 8 : 4) : FAST ? 13 : 6;
    static constexpr int BEHIND = NVFP4 ? 3 : 1; /* pages of a converting loader on their way from global memory */
    static constexpr int CHUNKS =
        MSA_PAGE_SIZE * chunk<STORAGE>::IN_ROW / WARPGROUP;     /* 16 bytes each, of a page and thread */
    static constexpr float SCALE = CONVERTS && !FAST ? 256 : 1; /* of scores: keys are divided by it */
};

/* A place in the list of (tile, page) pairs, and the tile, so that a block need not wait for that too. */
struct place {
    int32_t tile, page;
    cuda_tile record;
};

template <typename S> struct memory {
    uint8_t page[S::STAGES][S::HALVES * S::HALF_BYTES]; /* rows of 128 bytes, 128-byte swizzle; 1024-byte aligned */
    /* A loader thread's own chunks, before conversion. */
    uint4 raw[S::CONVERTS ? S::BEHIND + 1 : 0][S::CHUNKS][S::LOADERS * WARPGROUP];
    uint32_t scale[S::NVFP4 ? S::BEHIND + 1 : 0][S::CHUNKS][S::LOADERS * WARPGROUP];
    /* All threads of a loader that converts arrive; of one that copies, one and its bytes; of consumers a lane a warp. */
    uint64_t full[S::STAGES], empty[S::STAGES];
    place begin, end; /* the block's part of the step */
    int32_t tiles;    /* end of the tiles in which it lies */
};

template <typename S> using turn = ring_place<S::STAGES>;

/* ------------------------------------------------------------------------------------------------ the kernel's memory
 */

enum { MAX_IMAGE_PAGES = 8192, MIN_IMAGE_ROWS = 1024 };

/* Converting a page for every tile costs more than its products, as integer instructions run at half speed beside busy
 * tensor cores. So pages are converted once a run into an image in the plan's memory, max_pages pages a request, and
 * scored from there. Where rows are too few to pay for it, or pages too many for it, the scoring blocks convert. The
 * bits are the same. */
struct own_parts {
    uint8_t *image; /* [image pages][128][128] F16 or E4M3 */
    int32_t *table; /* [image pages] the page table of the image: the page itself, or -1 */
    place *places;  /* [num_sms + 1] where the blocks' parts begin */
    int64_t *costs; /* [tiles + 1] before each tile */
    size_t bytes;
};

static __host__ __device__ __forceinline__ bool is_fast(const cuda_index &job)
{
    return job.desc.k_dtype != MSA_BF16 && job.desc.precision == MSA_PRECISION_FAST;
}

static __host__ __device__ __forceinline__ own_parts own_memory(const cuda_index &job)
{
    bool converts = job.desc.k_dtype == MSA_NVFP4 || (job.desc.k_dtype == MSA_E4M3 && !is_fast(job));
    int64_t pages = (job.desc.max_kv_len + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE * job.desc.max_batch;
    pages = !converts ? 0 : pages < MAX_IMAGE_PAGES ? pages : MAX_IMAGE_PAGES;
    own_parts own;
    own.image = (uint8_t *)job.memory;
    own.costs = (int64_t *)(own.image + pages * MSA_PAGE_SIZE * MSA_HEAD_DIM * (is_fast(job) ? 1 : 2));
    own.places = (place *)(own.costs + job.desc.max_total_q / job.step.query_tile + job.desc.max_batch + 1);
    own.table = (int32_t *)(own.places + job.num_sms + 1);
    own.bytes = (size_t)((uint8_t *)(own.table + pages) - own.image);
    return own;
}

/* ------------------------------------------------------------------------------------------------ tasks */

/* Consecutive pages of a tile, for one block. */
struct task {
    cuda_tile tile;
    int32_t page, last; /* exclusive */
};

/* The block's task in tile `index`, if it has one there. */
template <typename S>
static __device__ __forceinline__ bool find_task(const cuda_index &job, const memory<S> &m, int32_t index, task &t)
{
    t.tile = index == m.begin.tile ? m.begin.record : index == m.end.tile ? m.end.record : job.step.tiles[index];
    t.page = index == m.begin.tile ? m.begin.page : 0;
    t.last = index == m.end.tile ? m.end.page : history_pages(job.step, t.tile);
    return t.page < t.last;
}

/* The block's next task from tile `index` on, which then is the one after it. False: no more. */
template <typename S>
static __device__ __forceinline__ bool next_task(const cuda_index &job, const memory<S> &m, int32_t &index, task &t)
{
    while (index < m.tiles)
        if (find_task(job, m, index++, t))
            return true;
    return false;
}

/* ------------------------------------------------------------------------------------------------ loading */

/* The block's pages, one after the other. */
struct feed {
    int32_t tile;         /* to look at next */
    int32_t page, last;   /* of the task: the next one, the end */
    int32_t slot;         /* of the next page, among the 32 table slots that the warp holds */
    int32_t ids;          /* a lane each: their physical pages */
    const int32_t *table; /* of the request */
};

/* False: no more. physical -1: the table names none. Never reads a slot past the task's. */
template <typename S>
static __device__ __forceinline__ bool next_page(const cuda_index &job, const memory<S> &m, feed &f, int32_t &physical)
{
    if (f.page == f.last) {
        task t;
        if (!next_task(job, m, f.tile, t))
            return false;
        f.table = (const int32_t *)((const char *)job.step.page_table + t.tile.request * job.step.page_table_stride);
        f.page = t.page;
        f.last = t.last;
        f.slot = CUDA_WARP;
    }
    if (f.slot == CUDA_WARP) {
        int32_t mine = f.page + (int)threadIdx.x % CUDA_WARP;
        f.slot = 0;
        f.ids = mine < f.last ? f.table[mine] : 0;
        if (f.ids < 0 || f.ids >= job.args.num_pages) {
            if (mine < f.last)
                atomicOr(job.step.error, MSA_ERROR_BIT_PAGE_ID);
            f.ids = -1;
        }
    }
    physical = __shfl_sync(~0u, f.ids, f.slot++);
    f.page++;
    return true;
}

/* Where 16 operand bytes of a token lie in a stage. */
template <typename S> static __device__ __forceinline__ uint32_t chunk_place(int token, int c)
{
    return (uint32_t)(c / 8 * S::HALF_BYTES + token * 128 + ((c ^ token) % 8) * 16);
}

static __device__ __forceinline__ void store_shared(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

static __device__ __forceinline__ void store_shared(uint32_t to, uint2 x)
{
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x.x), "r"(x.y) : "memory");
}

/* A page that the table does not name is all ones, in every format a NaN, so that its score is -inf. `threads` of them
 * call this. */
template <typename S> static __device__ __forceinline__ void blank_page(memory<S> &m, int stage, int threads)
{
    for (int i = threadIdx.x % threads * 16; i < S::HALVES * S::HALF_BYTES; i += threads * 16)
        store_shared(shared_address(m.page[stage]) + i, make_uint4(~0u, ~0u, ~0u, ~0u));
}

/* Starts copying this thread's part of a page, to be converted, into raw slot `slot`. */
template <storage STORAGE, typename S>
static __device__ __forceinline__ void copy_page(const msa_index_args &args, int32_t physical, memory<S> &m, int slot)
{
    constexpr int IN_ROW = chunk<STORAGE>::IN_ROW, TOKENS = WARPGROUP / IN_ROW; /* that a warpgroup takes at once */
    int c = threadIdx.x % IN_ROW, token = threadIdx.x % WARPGROUP / IN_ROW;
    const uint8_t *from = (const uint8_t *)args.index_k + physical * args.index_k_page_stride +
                          token * args.index_k_token_stride + c * 16;
    const uint8_t *scale = (const uint8_t *)args.index_k_scale + physical * args.index_k_scale_page_stride +
                           token * args.index_k_scale_token_stride + c / 2 * 4;
#pragma unroll
    for (int i = 0; i < S::CHUNKS; i++) {
        copy_async_16(shared_address(&m.raw[slot][i][threadIdx.x]), from);
        from += TOKENS * args.index_k_token_stride;
        if (S::NVFP4) {
            copy_async_4(shared_address(&m.scale[slot][i][threadIdx.x]), scale);
            scale += TOKENS * args.index_k_scale_token_stride;
        }
    }
}

/* Eight E4M3 codes as F16, divided by 2^8: their bits shifted to F16's places, which takes no conversion unit. A NaN
 * becomes a number; pages with NaN keys have no specified score. */
static __device__ __forceinline__ uint4 shift_codes(uint32_t first, uint32_t second)
{
    auto high = [](uint32_t codes) { return (codes >> 1 & 0x3F3F3F3F) | (codes & 0x80808080); };
    auto low = [](uint32_t codes) { return codes << 7 & 0x80808080; };
    return make_uint4(__byte_perm(low(first), high(first), 0x5140), __byte_perm(low(first), high(first), 0x7362),
                      __byte_perm(low(second), high(second), 0x5140), __byte_perm(low(second), high(second), 0x7362));
}

/* Converts this thread's raw chunks into a stage. NVFP4 to F16: as the decode kernel finds elements in a lane's 16 bytes
 * of codes, step i of a dot product in `exact` is over the elements 32c + 4i .. 4i+3, c = 0..3. Threads of the second
 * half of a row take their chunks' halves in the other order, so that eight threads that store together hit all banks.
 */
template <storage STORAGE, typename S>
static __device__ __forceinline__ void convert_page(const memory<S> &m, int slot, uint32_t stage)
{
    constexpr int IN_ROW = chunk<STORAGE>::IN_ROW, TOKENS = WARPGROUP / IN_ROW;
    constexpr int OUT = 8 * S::HALVES / IN_ROW; /* operand chunks of a raw one */
    constexpr int TOGETHER = 2;                 /* chunks that are converted side by side, to hide latencies */
    int c = threadIdx.x % IN_ROW;
    bool swap = OUT * S::HALVES > 2 && c >= IN_ROW / 2;
    auto store = [&](int token, int o, uint4 x) { store_shared(stage + chunk_place<S>(token, c * OUT + o), x); };
#pragma unroll
    for (int i = 0; i < S::CHUNKS; i += TOGETHER) {
        uint4 raw[TOGETHER];
        uint32_t scales[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            raw[j] = m.raw[slot][i + j][threadIdx.x];
            if (swap)
                raw[j] = make_uint4(raw[j].z, raw[j].w, raw[j].x, raw[j].y);
            if (S::NVFP4)
                scales[j] = m.scale[slot][i + j][threadIdx.x] >> c % 2 * 16;
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            int token = threadIdx.x % WARPGROUP / IN_ROW + (i + j) * TOKENS;
            if constexpr (!S::NVFP4) {
                store(token, swap, shift_codes(raw[j].x, raw[j].y));
                store(token, !swap, shift_codes(raw[j].z, raw[j].w));
            } else {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    block_table table = make_table(scales[j] >> (half ^ swap) * 8 & 0xFF);
                    uint2 first = widen_codes(half ? raw[j].z : raw[j].x, table),
                          second = widen_codes(half ? raw[j].w : raw[j].y, table);
                    if constexpr (S::TYPE == WGMMA_E4M3) {
                        store(token, half, make_uint4(first.x, first.y, second.x, second.y));
                    } else {
                        /* Step 4 * (half ^ swap) and the three behind it, 32 bytes each, within 128 bytes. */
                        uint32_t to =
                            stage + (half ^ swap) * S::HALF_BYTES + token * 128 + (c / 2 ^ token % 8) * 16 + c % 2 * 8;
                        uint4 x = shift_codes(first.x, first.y);
                        store_shared(to, make_uint2(x.x, x.y));
                        store_shared(to ^ 32, make_uint2(x.z, x.w));
                        x = shift_codes(second.x, second.y);
                        store_shared(to ^ 64, make_uint2(x.x, x.y));
                        store_shared(to ^ 96, make_uint2(x.z, x.w));
                    }
                }
            }
        }
    }
}

/* The loader of pages that are operands as they lie in memory: a warp, of which one thread orders the copies. */
template <typename S>
static __device__ __forceinline__ void copy_pages(const cuda_index &job, const CUtensorMap &keys, memory<S> &m)
{
    if (threadIdx.x >= CUDA_WARP)
        return;
    feed f = {m.begin.tile, 0, 0, 0, 0, nullptr};
    turn<S> at = {0};
    for (int32_t physical; next_page(job, m, f, physical); at.advance()) {
        uint32_t stage = shared_address(m.page[at.stage()]), full = shared_address(&m.full[at.stage()]);
        wait_empty(m, at);
        if (physical < 0) {
            blank_page(m, at.stage(), CUDA_WARP);
            fence_async_reads();
            __syncwarp();
        }
        if (threadIdx.x > 0)
            continue;
        if (physical < 0) {
            give_full(m, at);
        } else {
            barrier_expect(full, S::HALVES * S::HALF_BYTES);
            for (int half = 0; half < S::HALVES; half++)
                copy_box(stage + half * S::HALF_BYTES, keys, half * 128, 0, physical, full);
        }
    }
}

/* A loader that converts; two take the pages in turn. A page is converted BEHIND turns after its copy began, when it
 * has surely arrived. Groups of copies and turns count alike; groups after the last page are empty. */
template <storage STORAGE, typename S>
static __device__ __forceinline__ void convert_pages(const cuda_index &job, memory<S> &m)
{
    int loader = uniform(threadIdx.x / WARPGROUP);
    feed f = {m.begin.tile, 0, 0, 0, 0, nullptr};
    turn<S> at = {2u * loader};
    uint32_t missing = 0; /* a bit a turn, the last one's lowest */
    int under_way = 0, slot = 0;
    int32_t physical;
    bool more = loader == 0 || next_page(job, m, f, physical);
    for (int i = 0; more || under_way; i++) {
        more = more && next_page(job, m, f, physical);
        missing = missing << 1 | (more && physical < 0);
        if (more) {
            if (physical >= 0)
                copy_page<STORAGE>(job.args, physical, m, slot);
            under_way++;
            more = next_page(job, m, f, physical); /* the other one's */
        }
        copy_async_commit();
        slot = slot == S::BEHIND ? 0 : slot + 1; /* now that of the page to convert */
        if (i < S::BEHIND || !under_way)
            continue;
        copy_async_wait<S::BEHIND>();
        wait_empty(m, at);
        if (missing >> S::BEHIND & 1)
            blank_page(m, at.stage(), WARPGROUP);
        else
            convert_page<STORAGE>(m, slot, shared_address(m.page[at.stage()]));
        give_full(m, at);
        at.advance(S::LOADERS);
        under_way--;
    }
}

#endif
