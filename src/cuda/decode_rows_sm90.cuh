/* SPDX-License-Identifier: MIT
 *
 * decode_rows_sm90.cuh - a tile of decode_shared_sm90.cu whose queries share too little: rows one by one, as
 * decode_sm90.cu has them, whose products and merging these are. A team of 4, 2 or 1 of the block's four groups takes a
 * row, its pages dealt out by rank; the fewer rows the tile has, the larger the teams.
 */
#ifndef MSA_CUDA_DECODE_ROWS_SM90_CUH
#define MSA_CUDA_DECODE_ROWS_SM90_CUH

#include "decode_shared_sm90.cuh"

/* Who a thread works with. Found anew each time: nothing of it takes registers across pages. */
struct team {
    int group, number, first, log2_groups; /* the thread's group; its team's number, first group and groups */

    __device__ __forceinline__ void meet(void) const
    {
        barrier_meet(1 + ROW_GROUPS + number, GROUP << log2_groups);
    }
};

static __device__ __forceinline__ team find_team(int num_rows)
{
    team t;
    t.group = (int)(thread_now() / GROUP);
    t.log2_groups = num_rows == 1 ? LOG2_GROUPS : num_rows == 2 ? LOG2_GROUPS - 1 : 0;
    t.number = t.group >> t.log2_groups;
    t.first = t.number << t.log2_groups;
    return t;
}

/* A group's first warp: its pages of a row, and its barriers anew. */
template <storage STORAGE>
static __device__ inline void list_row(const decode_job &d, const team &t, int query, int head,
                                       shared_memory<STORAGE> &m)
{
    int lane = thread_now() % CUDA_WARP, rank = t.group - t.first;
    group_memory<STORAGE> &own = m.rows.group[t.group];
    if (lane == 0) {
        for (int i = 0; i < own.SLOTS + 1; i++) { /* `given` lies behind `full` */
            if (query != t.number)
                barrier_end(shared_address(own.full + i));
            barrier_init(shared_address(own.full + i), i == own.SLOTS ? GROUP_WARPS : d.bulk ? 1 : GROUP);
        }
        fence_barriers();
    }
    __syncwarp();
    cuda_page page = lane < d.topk ? m.lists[query][lane] : cuda_page{-1, -1};
    uint32_t mask = held_pages(d, page);
    int part = __popc(mask & ((1u << lane) - 1)), rest = __popc(mask) - rank;
    if (lane == 0)
        m.rows.query[t.group] = query;
    if (lane == 0)
        m.rows.pages[t.group] = rest > 0 ? ((rest - 1) >> t.log2_groups) + 1 : 0;
    if (mask >> lane & 1 && (part & ((1 << t.log2_groups) - 1)) == rank)
        list_page(d, head, page.physical, visible_keys(page, m.tile.first_position + query), part >> t.log2_groups,
                  own);
}

template <storage STORAGE>
static __device__ __forceinline__ void begin_row(const decode_job &d, int query, shared_memory<STORAGE> &m)
{
    team t = find_team(m.tile.num_rows);
    uint32_t thread = thread_now(), warp = thread / CUDA_WARP % GROUP_WARPS;
    int head = m.head;
    if (warp == 0)
        list_row(d, t, query, head, m);
    else if (warp <= 2)
        stage_queries<STORAGE, true>(d, m.tile.first_row + query, head, warp - 1, m.rows.q[t.group]);
    if (thread % GROUP < GROUP_WARPS * ROWS)
        m.rows.group[t.group].largest[0][thread % GROUP] = -INFINITY;
    t.meet();
}

/* Returns the team's next row. */
template <storage STORAGE>
static __device__ __forceinline__ int end_row(const decode_job &d, const state &o, shared_memory<STORAGE> &m)
{
    team t = find_team(m.tile.num_rows);
    int head = m.head, lane = thread_now() % CUDA_WARP, warps = GROUP_WARPS << t.log2_groups;
    int query = m.rows.query[t.group];
    barrier_meet(1 + t.group, GROUP); /* all have read their last tiles */
    give_state(o, m.rows.group[t.group]);
    t.meet();
#pragma unroll 1
    for (int row = (int)(thread_now() / CUDA_WARP) & (warps - 1); row < d.ratio; row += warps)
        write_result<true>(d, m.tile.first_row + query, head, row, 4 * chunk_at(row, lane),
                           merge_groups(m.rows.group + t.first, 1 << t.log2_groups, row, m.scale), m.scale,
                           m.out_scale);
    fence_async_reads(); /* the copy engine writes here again */
    t.meet();
    return query + (ROW_GROUPS >> t.log2_groups);
}

template <storage STORAGE>
static __device__ __forceinline__ void attend_rows(const decode_job &d, shared_memory<STORAGE> &m)
{
    int query = find_team(m.tile.num_rows).number;
#pragma unroll 1
    while (query < m.tile.num_rows) {
        begin_row(d, query, m);
        int group = uniform((int)(thread_now() / GROUP));
        state o = {};
        o.reference[0] = o.reference[1] = -INFINITY;
        attend_pages<STORAGE, OPERAND_F16, true, ROW_GROUPS>(
            d, m.rows.group[group], uniform(m.rows.pages[group]),
            [&] {
                uint32_t thread = thread_now();
                return shared_address(&m.rows.q[thread / GROUP][0][thread % CUDA_WARP]);
            },
            shared_address(m.table), m.scale, thread_now, o);
        query = end_row(d, o, m);
    }
}

#endif
