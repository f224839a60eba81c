/* SPDX-License-Identifier: MIT
 *
 * prefill_pages_load_sm90.cuh - the loading half of prefill_pages_sm90.cu: shared memory, and the warpgroup that finds
 * out what a block works on and brings it.
 *
 *   take_items     a warp      which entries of which page are next: known to all others some items ahead
 *   load_images    a warp      an image of each: one bulk copy into a stage, or four boxes of the cache
 *   load_queries   two warps   queries of steps, half of each, as boxes of a tensor (the heads of a query that share
 *                              the KV head), and what state each row is
 */
#ifndef MSA_CUDA_PREFILL_PAGES_LOAD_SM90_CUH
#define MSA_CUDA_PREFILL_PAGES_LOAD_SM90_CUH

#include "prefill_pages_sm90.cuh"
#include "ptx_bulk_sm90.cuh"
#include "ring_sm90.cuh"

enum { QUERY_LOADERS = 2 /* warps */ };

template <typename T> struct shape {
    static constexpr int TEAMS = 4; /* consuming warpgroups */
    static constexpr int THREADS = (TEAMS + 1) * WARPGROUP;
    static constexpr int LOAD_REGISTERS = 32, REGISTERS = 112;
    static constexpr int STAGES = T::IMAGE_BYTES == 2 * TILE_HALF ? 3 : 2; /* images */
    static constexpr int ITEMS = 2 * STAGES;                               /* that are known at once */
    static constexpr int QUERY_BYTES = MSA_HEAD_DIM * (T::E4M3 ? 1 : 2);   /* of a head */
    /* Queries of steps: a slot is always the same warpgroup's, so that none is a round ahead at a barrier. */
    static constexpr int SLOTS = T::E4M3 ? 2 * TEAMS : TEAMS;
    static constexpr bool STAGED = T::E4M3; /* results go through shared memory, where there is room for them */
};

struct item_info {
    int32_t count, steps;     /* of entries, and of 64 query rows; 0: no more items */
    int32_t first_keys, keys; /* as in struct page_item */
    int32_t safe;             /* keys whose values may be used; all: MSA_PAGE_SIZE */
    uint32_t first_head;      /* of the KV head, among the window's query heads */
    int32_t image;            /* of the window; negative: ~ of the page that comes straight from the cache */
    float scale;              /* logit in log2 units = scale * dot; there with the image */
    const uint32_t *entries;
};

/* The rows of a step. */
struct step_rows {
    uint32_t state[GROUP_ROWS]; /* NO_STATE: it is not in use */
    uint8_t keys[GROUP_ROWS];   /* that it sees */
};
constexpr uint32_t NO_STATE = ~0u;

template <typename T> struct memory {
    uint8_t stage[shape<T>::STAGES][T::IMAGE_BYTES];
    uint8_t q[shape<T>::SLOTS][GROUP_ROWS * shape<T>::QUERY_BYTES];
    uint8_t out[shape<T>::STAGED ? shape<T>::TEAMS * GROUP_WARPS : 0][WARP_ROWS * PARTIAL_BYTES];
    step_rows rows[shape<T>::SLOTS];
    item_info item[shape<T>::ITEMS];
    uint64_t known[shape<T>::ITEMS];
    uint64_t full[shape<T>::STAGES], empty[shape<T>::STAGES]; /* images */
    uint64_t q_full[shape<T>::SLOTS], q_empty[shape<T>::SLOTS];
    uint64_t landed;   /* an image that is changed before its stage is full */
    bool images_there; /* or the warp that takes items must await them */
};
static_assert(sizeof(memory<exact_types>) <= 232448 && sizeof(memory<fast_types>) <= 232448 &&
              sizeof(memory<bf16_types>) <= 232448);

template <typename T> using item_place = ring_place<shape<T>::ITEMS>;
template <typename T> using slot_place = ring_place<shape<T>::SLOTS>;

/* The stage of an item's image: of those known at once each has two, one after the other. */
template <typename T> static __device__ __forceinline__ ring_place<shape<T>::STAGES> image_of(item_place<T> item)
{
    constexpr uint32_t STAGES = shape<T>::STAGES;
    return {item.stage() < STAGES ? 2 * item.stage() : 2 * (item.stage() - STAGES) + 1};
}

/* An entry's row of the chunk, and the rank. */
static __device__ __forceinline__ uint32_t rank_of(uint32_t entry)
{
    return entry >> ENTRY_ROW_BITS;
}

static __device__ __forceinline__ uint32_t row_of(uint32_t entry)
{
    return entry & ((1u << ENTRY_ROW_BITS) - 1);
}

static __device__ __forceinline__ uint32_t state_of(const pages_job &job, uint32_t entry, uint32_t first_head)
{
    return rank_of(entry) * job.slab + row_of(entry) * job.heads + first_head;
}

static __device__ __forceinline__ void write_state(const pages_job &job, uint32_t state, float max, float sum)
{
    job.pages.states[state] = make_float2(isnan(sum) ? NAN : max, sum);
}

/* ------------------------------------------------------------------------------------------------ items */

/* A page that the cache does not hold: empty states. By a warp. */
static __device__ __forceinline__ void write_empty(const pages_job &job, const uint32_t *entries, int32_t count,
                                                   int32_t head)
{
    uint32_t first_head = (head - job.window.first_head) * job.ratio;
    for (int i = threadIdx.x % CUDA_WARP; i < count * job.ratio; i += CUDA_WARP)
        write_state(job, state_of(job, entries[i / job.ratio], first_head) + i % job.ratio, -INFINITY, 0);
}

/* Where all tiles are page-major `attend` ends at once, and the window's first launch of this kernel begins while images
 * are made, whose blocks count themselves in `made`: waits for all of them. That cannot lock, as they are at work, or
 * nothing behind them would have begun. The last block of this launch to have waited sets `made` to 0 again, so that
 * making images waits for nothing. Later launches find them made, and so do all where a tile is query-major, as
 * `attend` then waits for them before it lets others start. */
static __device__ __forceinline__ void await_images(const pages_job &job)
{
    while (load_acquire(job.own.made) < job.image_blocks)
        __nanosleep(50);
    fence_async_global();
}

/* Items that a block has made known. */
template <typename T> struct item_list {
    item_place<T> next;
    uint32_t count;
};

/* Waits until the next item's place is free: its last user is done once another image has come to where that one's
 * was. */
template <typename T> static __device__ __forceinline__ void wait_place(memory<T> &m, const item_list<T> &list)
{
    item_place<T> middle = list.next;
    middle.advance(shape<T>::STAGES);
    if (list.count >= shape<T>::STAGES)
        wait_full(m, image_of<T>(middle));
}

/* Makes known `count` entries from an item on, which are one page's. A page with values that are not finite and that
 * some row may not see is an item for each of them, without what its row does not see: 0 * NaN would reach the
 * result. */
template <typename T>
static __device__ __forceinline__ void give_entries(const pages_job &job, memory<T> &m, item_list<T> &list,
                                                    const page_item &item, const uint32_t *entries, int32_t count,
                                                    int32_t head, uint32_t image)
{
    if (item.physical < 0 || item.physical >= job.args.num_pages) {
        write_empty(job, entries, count, head);
        return;
    }
    bool straight = !T::E4M3 && job.straight && item.whole;
    if (!straight && !m.images_there) {
        await_images(job);
        __syncwarp(); /* all have looked */
        m.images_there = true;
    }
    bool unsafe = !straight && item.first_keys < MSA_PAGE_SIZE && job.own.unsafe[image];
    int each = unsafe ? 1 : count, all = GROUP_WARPS * job.width;
#pragma unroll 1
    for (; count > 0; count -= each, entries += each) {
        wait_place(m, list);
        if (threadIdx.x % CUDA_WARP == 0) {
            item_info &info = m.item[list.next.stage()];
            info.count = each;
            info.steps = (each + all - 1) / all;
            info.first_keys = item.first_keys;
            info.keys = item.keys;
            info.safe = unsafe ? min(item.first_keys + (int)row_of(*entries), MSA_PAGE_SIZE) : MSA_PAGE_SIZE;
            info.first_head = (head - job.window.first_head) * job.ratio;
            info.image = straight ? ~item.physical : (int32_t)image;
            info.entries = entries;
            barrier_arrive(shared_address(&m.known[list.next.stage()]));
        }
        __syncwarp();
        list.next.advance();
        list.count++;
    }
}

/* Blocks take items as they get free, fewer at a time as fewer are left; those of one page become one. Where all blocks
 * begin at once and no head waits for another, most are dealt out beforehand, so that a block meets few pages. Which
 * block has an item changes nothing in it. By a warp. */
template <typename T> static __device__ __forceinline__ void take_items(const pages_job &job, memory<T> &m)
{
    int lane = threadIdx.x % CUDA_WARP;
    auto items_of = [&](int32_t head, int32_t &begin) {
        const int32_t *first = job.pages.first_item + head / job.list_heads * (job.pages.num_chunks + 1) + job.chunk;
        begin = first[0];
        return (uint32_t)(first[1] - begin);
    };
    int32_t head = job.window.first_head - 1, begin = 0; /* of the head's items */
    uint32_t total = 0, before = 0, items = 0;
    for (uint32_t i = lane; i < job.window.heads; i += CUDA_WARP)
        total += items_of(job.window.first_head + i, begin);
    total = __reduce_add_sync(~0u, total);
    auto share_of = [&](uint32_t left) { return min(max(left / (4 * gridDim.x), 1), MOST_TAKEN); };
    bool deal = job.window.heads == 1 && !*job.pages.query_major;
    uint32_t most = max(deal ? total / 5 * 4 / gridDim.x : 0, share_of(total)), taken = blockIdx.x * most,
             end = min(taken + most, total), dealt = min(gridDim.x * most, total);
    item_list<T> list = {};
#pragma unroll 1
    while (taken < total) {
#pragma unroll 1
        while (taken < end) {
            while (taken - before >= items) {
                before += items;
                items = items_of(++head, begin);
            }
            int64_t of = head / job.list_heads;
            const page_item *item = job.pages.items + of * job.pages.most_items + begin + (taken - before);
            uint32_t upto = min(end, before + items);
            int32_t page = item->page, count = item->count;
            for (int n = 1; ++taken < upto && item[n].page == page; n++)
                count += item[n].count;
            int32_t first_page = window_begin(job, job.own.first_page); /* read anew: registers are short */
            if (job.whole || (page >= first_page && page < window_end(job, job.own.first_page)))
                give_entries(job, m, list, *item,
                             job.pages.entries + of * job.step.total_q * job.step.topk + item->first, count, head,
                             (uint32_t)(page - first_page) * job.window.heads + head - job.window.first_head);
        }
        most = share_of(total - max(end, dealt));
        taken = dealt + __shfl_sync(~0u, lane == 0 ? atomicAdd(job.pages.taken, most) : 0, 0);
        end = min(taken + most, total);
    }
    wait_place(m, list);
    if (lane == 0) {
        m.item[list.next.stage()].count = m.item[list.next.stage()].steps = 0;
        barrier_arrive(shared_address(&m.known[list.next.stage()]));
        if (!m.images_there)
            await_images(job); /* what comes after this launch may believe that all before it has ended */
        if (atomicAdd(job.pages.taken + 1, 1) == gridDim.x - 1) /* nobody takes any more, or waits for images */
            job.pages.taken[0] = job.pages.taken[1] = *job.own.made = 0;
    }
}

/* ------------------------------------------------------------------------------------------------ images */

/* By a warp. */
template <typename T>
static __device__ __forceinline__ void load_images(const pages_job &job, const cache_maps<T::E4M3> &maps, memory<T> &m)
{
    const msa_attention_args &a = job.args;
    uint32_t landings = 0;
    item_place<T> item = {0};
#pragma unroll 1
    for (;; item.advance()) {
        barrier_wait(shared_address(&m.known[item.stage()]), item.parity());
        item_info &info = m.item[item.stage()];
        if (info.count == 0)
            return;
        int32_t head = (int32_t)(job.window.first_head + info.first_head / job.ratio);
        float scale = job.scale * factor_at(a.q_descale, a.q_descale_stride, head) *
                      factor_at(a.k_descale, a.k_descale_stride, head) * factor_at(a.k_global_scale, 0, 0);
        auto at = image_of<T>(item);
        bool change = info.safe < MSA_PAGE_SIZE;
        uint32_t full = shared_address(&m.full[at.stage()]), landed = change ? shared_address(&m.landed) : full;
        wait_empty(m, at);
        if (threadIdx.x % CUDA_WARP == 0) {
            info.scale = scale;
            barrier_expect(landed, T::IMAGE_BYTES);
            uint32_t to = shared_address(m.stage[at.stage()]);
            int32_t page = info.image < 0 ? ~info.image : -1;
            if (copy_straight(maps, 0, to, head, page, landed))
                copy_straight(maps, 1, to + T::K_BYTES, head, page, landed);
            else
                copy_bulk(to, job.own.images + (size_t)info.image * T::IMAGE_BYTES, T::IMAGE_BYTES, landed);
        }
        if (change) {
            barrier_wait(landed, landings++ & 1);
            blank_values<T::E4M3>(m.stage[at.stage()] + T::K_BYTES, info.safe);
            if (threadIdx.x % CUDA_WARP == 0)
                barrier_arrive(full);
        }
        __syncwarp();
    }
}

/* ------------------------------------------------------------------------------------------------ queries */

enum { COPY_THREADS = 256 };

/* The chunk's queries, dense, where the caller's strides are none that the copies take. */
template <typename T>
static __global__ void __launch_bounds__(COPY_THREADS) copy_queries(const __grid_constant__ pages_job job)
{
    constexpr uint32_t PIECES = shape<T>::QUERY_BYTES / 16;
    const msa_attention_args &a = job.args;
    if (!job.pages.chosen[job.chunk])
        return;
    int64_t first = (int64_t)job.chunk * job.pages.chunk_rows, left = job.step.total_q - first;
    uint32_t rows = (uint32_t)(left < job.pages.chunk_rows ? left : job.pages.chunk_rows);
    const char *q =
        (const char *)a.q + first * a.q_row_stride + (int64_t)job.window.first_head * job.ratio * a.q_head_stride;
    for (uint32_t i = blockIdx.x * COPY_THREADS + threadIdx.x; i < rows * job.heads * PIECES;
         i += gridDim.x * COPY_THREADS) {
        uint32_t place = i / PIECES, row = place / job.heads;
        ((uint4 *)job.pages.queries)[i] =
            __ldg((const uint4 *)(q + row * a.q_row_stride + (place - row * job.heads) * a.q_head_stride) + i % PIECES);
    }
}

/* By a warp: its share of the items' steps' queries, in order. share: whole warps' rows, which hold whole queries, box
 * after box. An item's place is not given back here: nobody is done with it before all its queries have come. */
template <typename T>
static __device__ __forceinline__ void load_queries(const pages_job &job, const CUtensorMap &queries, memory<T> &m,
                                                    int share)
{
    constexpr int WARPS = GROUP_WARPS / QUERY_LOADERS;
    static_assert(WARPS * WARP_ROWS == CUDA_WARP);
    int lane = threadIdx.x % CUDA_WARP, own = WARPS * job.width, all = GROUP_WARPS * job.width;
    int in_warp = lane % WARP_ROWS / job.ratio; /* of the share's row `lane`: the query of its warp, and the head */
    int query_of_lane = lane / WARP_ROWS * job.width + in_warp;
    int head_of_lane = in_warp < job.width ? lane % WARP_ROWS - in_warp * job.ratio : -1;
    int warp = (int)((uint32_t)lane * job.width_inverse >> 16); /* of the share's query `lane` */
    uint32_t place = (share * WARPS + warp) * (WARP_ROWS * 128) + (lane - warp * job.width) * job.ratio * 128;
    /* Entries are loaded for as many steps at once as a warp has lanes for; the share's begin at lane `before`. */
    int together = all <= CUDA_WARP ? CUDA_WARP / all * all : all, skipped = all <= CUDA_WARP ? 0 : share * own,
        before = share * own - skipped;
    item_place<T> item = {0};
    slot_place<T> slot = {0};
#pragma unroll 1
    for (;; item.advance()) {
        barrier_wait(shared_address(&m.known[item.stage()]), item.parity());
        const item_info &info = m.item[item.stage()];
        int count = info.count;
        if (count == 0)
            return;
        const uint32_t *entries = info.entries + skipped + lane;
        uint32_t next = skipped + lane < count ? entries[0] : 0, loaded = 0;
#pragma unroll 1
        for (int first = 0, in_load = together; first < count; first += all, in_load += all) {
            if (in_load == together) {
                in_load = 0;
                loaded = next;
                next = first + together + skipped + lane < count ? entries[first + together] : 0;
            }
            uint32_t full = shared_address(&m.q_full[slot.stage()]);
            int used = max(min(own, count - first - share * own), 0);
            barrier_wait(shared_address(&m.q_empty[slot.stage()]), slot.parity() ^ 1);
            uint32_t entry = __shfl_sync(~0u, loaded, (in_load + before + query_of_lane) % CUDA_WARP);
            int row = (int)row_of(__shfl_sync(~0u, loaded, (in_load + before + lane) % CUDA_WARP));
            bool in_use = query_of_lane < used && head_of_lane >= 0;
            int keys = min(min(info.keys, info.first_keys + (int)row_of(entry)), MSA_PAGE_SIZE);
            m.rows[slot.stage()].state[share * CUDA_WARP + lane] =
                in_use ? state_of(job, entry, info.first_head) + head_of_lane : NO_STATE;
            m.rows[slot.stage()].keys[share * CUDA_WARP + lane] = (uint8_t)(in_use ? max(keys, 0) : MSA_PAGE_SIZE);
            __syncwarp();
            if (lane == 0)
                barrier_expect(full, used * job.ratio * shape<T>::QUERY_BYTES);
            if (lane < used) /* a query each */
#pragma unroll
                for (int half = 0; half < shape<T>::QUERY_BYTES / 128; half++)
                    copy_box(shared_address(m.q[slot.stage()]) + place + half * (GROUP_ROWS * 128), queries, half * 128,
                             (int)info.first_head, row, full);
            slot.advance();
        }
    }
}

#endif
