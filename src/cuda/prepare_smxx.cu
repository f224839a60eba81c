/* SPDX-License-Identifier: MIT
 *
 * prepare_smxx.cu - a step's lengths and lists into the records of struct cuda_step. cuda.h says what they hold,
 * cpu/requests.c is the definition of how bad lengths are masked.
 *
 *   requests  one block     cleans the requests. A request owns the rows that no earlier one has: its first row is the
 *                           maximum of its begin and all earlier ends, which is a running maximum (a scan), not a loop
 *   rows      one thread a row finds the row's request, writes the row and the tile that starts with it
 *   pages     half a warp or one a list of a row sorts its visible pages
 *   steps     one block     some index plans: adds up the tiles' history pages
 *   parts     one block     others: cuts them into equal parts
 * Each launch but the first is on its way while the one ahead of it runs, and waits on the device: 1 us less a launch.
 * Steps as decode has them (is_small) take one launch for all of it, in blocks each of which cleans all requests for
 * itself; what bounds that is how many loads wait for each other, so blocks are small and many, lists are read while
 * requests are cleaned, and tiles are made beside them.
 * Bytes: reads the lists (4k a row and list), writes 8k; a few us of launches for small steps.
 */
#include "step.cuh"

enum { ROW_THREADS = 128 };

/* ------------------------------------------------------------------------------------------------ requests */

/* A request as given. */
struct lengths {
    int64_t begin, end, kv_len;
};

static __device__ lengths read_lengths(const cuda_step &step, int b)
{
    lengths l = {step.cu_seqlens_q[b], step.cu_seqlens_q[b + 1], 0};
    l.kv_len = step.kv_lens ? step.kv_lens[b] : (int64_t)step.cu_seqlens_k[b + 1] - step.cu_seqlens_k[b];
    return l;
}

static __device__ uint32_t length_errors(const cuda_step &step, const lengths &l, int64_t taken)
{
    uint32_t error =
        l.begin < taken || l.end < l.begin || l.end > step.total_q || l.kv_len < 0 ? MSA_ERROR_BIT_LENGTHS : 0;
    return error | (l.kv_len > step.max_kv_len ? MSA_ERROR_BIT_CAPACITY : 0);
}

/* A cleaned request; tiles: where its last one ends. */
struct cleaned {
    cuda_request request;
    int32_t row_end, tiles;
};

/* One request a thread of the block, `b`, which may be past the last. taken, tiles: by the requests of earlier rounds,
 * brought up to date. */
template <int THREADS>
static __device__ cleaned clean_request(const cuda_step &step, int64_t b, int32_t &taken, int32_t &tiles,
                                        uint32_t &error)
{
    bool valid = b < step.batch;
    lengths l = valid ? read_lengths(step, (int)b) : lengths{0, 0, 0};
    int32_t stop = (int32_t)(l.end < step.total_q ? l.end : step.total_q); /* negative is fine: taken is at least 0 */
    int32_t all, before = block_scan<maximum, THREADS>(stop, &all);
    before = before > taken ? before : taken; /* rows taken before this request */
    int64_t first = l.begin > before ? l.begin : before;
    int32_t rows = stop > first ? (int32_t)(stop - first) : 0;
    int32_t own_tiles = step.query_tile ? (rows + step.query_tile - 1) / step.query_tile : 0;
    int32_t all_tiles, tiles_before = block_scan<sum, THREADS>(own_tiles, &all_tiles);
    error |= valid ? length_errors(step, l, before) : 0;
    int64_t most_keys = (int64_t)step.max_pages * MSA_PAGE_SIZE;
    int64_t kv_len = l.kv_len < 0 ? 0 : l.kv_len < most_keys ? l.kv_len : most_keys;
    cleaned c = {{l.kv_len - (l.end - l.begin) + (first - l.begin), (int32_t)first, rows, (int32_t)kv_len, 0},
                 before > stop ? before : stop,
                 tiles + tiles_before + own_tiles};
    taken = taken > all ? taken : all;
    tiles += all_tiles;
    return c;
}

static __device__ uint32_t first_errors(const cuda_step &step)
{
    return step.cu_seqlens_q[0] != 0 || (step.cu_seqlens_k && step.cu_seqlens_k[0] != 0) ? MSA_ERROR_BIT_LENGTHS : 0;
}

/* The bits of all the block's threads. */
static __device__ uint32_t join_errors(uint32_t error)
{
    __shared__ uint32_t all;
    if (threadIdx.x == 0)
        all = 0;
    __syncthreads();
    error = __reduce_or_sync(~0u, error);
    if (threadIdx.x % CUDA_WARP == 0 && error)
        atomicOr(&all, error);
    __syncthreads();
    return all;
}

/* One block's word, which no other has; block 0 clears those of blocks that there are not. */
static __device__ void write_errors(const cuda_step &step, uint32_t error)
{
    if (threadIdx.x == 0)
        step.error[blockIdx.x] = error;
    for (unsigned i = gridDim.x + threadIdx.x; blockIdx.x == 0 && i < CUDA_ERROR_WORDS; i += blockDim.x)
        step.error[i] = 0;
}

static __global__ void __launch_bounds__(SCAN_THREADS) clean_requests(const cuda_step step)
{
    grid_release();
    int32_t taken = 0, tiles = 0;
    uint32_t error = threadIdx.x == 0 ? first_errors(step) : 0;
    for (int64_t round = 0; round < step.batch; round += SCAN_THREADS) {
        int64_t b = round + threadIdx.x;
        cleaned c = clean_request<SCAN_THREADS>(step, b, taken, tiles, error);
        if (b < step.batch) {
            step.requests[b] = c.request;
            step.row_end[b] = c.row_end;
            if (step.query_tile)
                step.first_tile[b + 1] = c.tiles;
        }
    }
    if (step.query_tile && threadIdx.x == 0)
        step.first_tile[0] = 0;
    write_errors(step, join_errors(error));
}

/* ------------------------------------------------------------------------------------------------ rows */

/* The first request whose rows, with those before it, end past this row. -1: none. */
static __device__ int32_t find_request(const cuda_request *requests, const int32_t *row_end, int32_t batch, int32_t row)
{
    int32_t b = first_above(row_end, batch, row);
    return b < batch && requests[b].first_row <= row ? b : -1;
}

static __device__ int32_t cut_position(int64_t position, int32_t low)
{
    return (int32_t)(position < low ? low : position < MAX_POSITION ? position : MAX_POSITION);
}

static __device__ cuda_row make_row(const cuda_request &request, int32_t b, int32_t row)
{
    return cuda_row{b, cut_position(request.first_position + (row - request.first_row), -1)};
}

/* Tile `i` of a request. */
static __device__ cuda_tile make_tile(const cuda_step &step, const cuda_request &request, int32_t b, int32_t i)
{
    int32_t first = i * step.query_tile, left = request.num_rows - first;
    return cuda_tile{b, request.first_row + first, left < step.query_tile ? left : step.query_tile,
                     cut_position(request.first_position + first, -MAX_POSITION)};
}

static __global__ void __launch_bounds__(ROW_THREADS) write_rows(const cuda_step step)
{
    int64_t row = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    grid_release();
    grid_wait();
    if (row >= step.total_q)
        return;
    int32_t b = find_request(step.requests, step.row_end, step.batch, (int32_t)row);
    /* Slots past the last tile are empty. There are no more slots than rows. */
    if (step.query_tile && row < step.num_tiles && row >= step.first_tile[step.batch])
        step.tiles[row] = cuda_tile{-1, 0, 0, 0};
    if (b < 0) {
        step.rows[row] = cuda_row{-1, -1};
        return;
    }
    cuda_request request = step.requests[b];
    step.rows[row] = make_row(request, b, (int32_t)row);
    int32_t i = (int32_t)row - request.first_row;
    if (step.query_tile && i % step.query_tile == 0)
        step.tiles[step.first_tile[b] + i / step.query_tile] = make_tile(step, request, b, i / step.query_tile);
}

/* ------------------------------------------------------------------------------------------------ lists */

/* What a row sees: keys of a request; -1: none. */
struct row_view {
    int32_t request, keys;
};

/* A lane's id of a row's list; -1: none, or the row is not `there`. */
template <int LANES>
static __device__ __forceinline__ int32_t read_id(const cuda_step &step, int64_t list, int64_t row, bool there)
{
    int lane = threadIdx.x % LANES;
    const char *ids = (const char *)step.list + list * step.list_head_stride + row * step.list_row_stride;
    return there && lane < step.topk ? ((const int32_t *)ids)[lane] : -1;
}

/* Past the last row that is not padding, if lengths are as they should be. Lists are read up to it before it is known
 * whose the rows are; where a request owns rows past it, theirs are read then. */
static __device__ __forceinline__ int32_t end_of_rows(const cuda_step &step)
{
    return min(step.cu_seqlens_q[step.batch], step.total_q);
}

/* LANES lanes a list of a row, a lane an id: a warp or, for short lists, half of one. An id's place is the number of
 * smaller ones, which are the lanes before it where a list ascends; of equal ones the first lane's stays. A lane works
 * on EACH lists, rows AT_ONCE apart, so that their loads, of which each needs the one before, wait together. Returns
 * whether an id of the warp's lists is out of range. */
template <int LANES, int EACH, int AT_ONCE>
static __device__ __forceinline__ bool write_lists(const cuda_step &step, int64_t list, int64_t first,
                                                   const row_view (&where)[EACH], int32_t (&id)[EACH])
{
    int lane = threadIdx.x % LANES, part = threadIdx.x % CUDA_WARP / LANES; /* of the warp */
    int32_t physical[EACH], place[EACH], count[EACH];
    bool wrong = false;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        id[e] = where[e].request >= 0 ? id[e] : -1;
        bool outside = id[e] < -1 || id[e] >= step.max_pages;
        wrong |= outside;
        id[e] = outside ? -1 : id[e];
        int32_t first_key = id[e] * MSA_PAGE_SIZE; /* below 2^20 */
        bool visible = id[e] >= 0 && first_key < where[e].keys;
        physical[e] =
            visible
                ? ((const int32_t *)((const char *)step.page_table + where[e].request * step.page_table_stride))[id[e]]
                : -1;
        int32_t previous = __shfl_up_sync(~0u, id[e], 1, LANES);
        int smaller = -1; /* visible ones; -1: to be counted in a list that ascends */
        if (!__all_sync(~0u, lane == 0 || id[e] < 0 || (previous >= 0 && previous < id[e]))) {
            uint32_t same = __match_any_sync(~0u, (visible ? id[e] : -1) * (CUDA_WARP / LANES) + part);
            visible &= __ffs((int)same) - 1 == (int)threadIdx.x % CUDA_WARP;
            smaller = 0;
#pragma unroll
            for (int other = 0; other < LANES; other++) /* lanes past the list have nothing visible */
                smaller += __shfl_sync(~0u, visible ? id[e] : INT32_MAX, other, LANES) < id[e];
        }
        uint32_t all = __ballot_sync(~0u, visible) >> part * LANES & (uint32_t)(~0ull >> (64 - LANES));
        place[e] = !visible ? -1 : smaller >= 0 ? smaller : __popc(all & ((1u << lane) - 1));
        count[e] = __popc(all);
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        if (where[e].request < 0)
            continue;
        cuda_page *pages = step.pages + (list * step.total_q + first + e * AT_ONCE) * step.topk;
        if (place[e] >= 0)
            pages[place[e]] = cuda_page{id[e], physical[e]};
        if (lane >= count[e] && lane < step.topk)
            pages[lane] = cuda_page{-1, -1};
    }
    return __any_sync(~0u, wrong);
}

/* Blocks an SM, so that those of 64K lists are at work at once. Compiled for other devices registers would spill. */
#if __CUDA_ARCH__ == 900
enum { HALF_WARP_BLOCKS = 16, WARP_BLOCKS = 12 };
#else
enum { HALF_WARP_BLOCKS = 1, WARP_BLOCKS = 1 };
#endif

/* Ids are the caller's, so they come while the launch ahead is at work. What that one needed is there when the next
 * launch starts (step.cuh: requests_come_first). */
template <int LANES, int EACH>
static __global__ void __launch_bounds__(ROW_THREADS, LANES < CUDA_WARP ? HALF_WARP_BLOCKS : WARP_BLOCKS)
    write_pages(const cuda_step step)
{
    constexpr int AT_ONCE = ROW_THREADS / LANES;
    int64_t first = (int64_t)blockIdx.x * (AT_ONCE * EACH) + threadIdx.x / LANES;
    int32_t end = end_of_rows(step), id[EACH];
    row_view where[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++)
        id[e] = read_id<LANES>(step, blockIdx.y, first + e * AT_ONCE, first + e * AT_ONCE < end);
    grid_wait();
    grid_release();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int64_t row = first + e * AT_ONCE;
        where[e] = row_view{-1, 0};
        if (row < step.total_q)
            where[e] = row_view{step.rows[row].request, step.rows[row].position + 1};
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int64_t row = first + e * AT_ONCE;
        if (where[e].request >= 0)
            where[e].keys = min(where[e].keys, step.requests[where[e].request].kv_len);
        if (row >= end)
            id[e] = read_id<LANES>(step, blockIdx.y, row, where[e].request >= 0);
    }
    if (write_lists<LANES, EACH, AT_ONCE>(step, blockIdx.y, first, where, id) && threadIdx.x % CUDA_WARP == 0)
        atomicOr(step.error, MSA_ERROR_BIT_LIST_ID);
}

template <int LANES, int EACH> static cudaError_t launch_pages(const struct cuda_step &step, cudaStream_t stream)
{
    return launch_between(write_pages<LANES, EACH>,
                          dim3(grid_blocks(step.total_q, ROW_THREADS / LANES * EACH), (unsigned)step.lists),
                          ROW_THREADS, 0, step.dependent_launch, stream, step);
}

/* ------------------------------------------------------------------------------------------------ steps */

static __global__ void __launch_bounds__(SCAN_THREADS) add_steps(const cuda_step step)
{
    grid_release();
    grid_wait();
    int64_t before = 0;
    for (int64_t round = 0; round < step.num_tiles; round += SCAN_THREADS) {
        int64_t i = round + threadIdx.x, pages = i < step.num_tiles ? history_pages(step, step.tiles[i]) : 0;
        int64_t all, in_round = block_scan<sum>(pages, &all);
        if (i < step.num_tiles)
            step.first_step[i + 1] = before + in_round + pages;
        before += all;
    }
    if (threadIdx.x == 0)
        step.first_step[0] = 0;
}

/* ------------------------------------------------------------------------------------------------ parts */

/* Part p: which tile `before`, the pages before each, has it begin in; pages: of it. */
template <typename COUNT> struct part_place {
    int32_t tile, first_page, pages;

    __device__ part_place(const COUNT *before, int32_t num_tiles, int64_t total, int32_t p, int32_t num_parts)
    {
        int64_t first = total * p / num_parts, end = total * (p + 1) / num_parts;
        tile = first_above(before, num_tiles, first) - 1;
        first_page = total ? (int32_t)(first - before[tile]) : 0;
        pages = (int32_t)(end - first);
    }
};

static __device__ void write_part(const cuda_step &step, int32_t p, const cuda_tile &tile, int32_t index,
                                  int32_t first_page, int32_t pages)
{
    cuda_part own = {{tile, index, first_page, pages, 0}, {}};
    const int32_t *table = (const int32_t *)((const char *)step.page_table + tile.request * step.page_table_stride);
    int32_t end = pages ? min(history_pages(step, tile), first_page + pages) : 0;
#pragma unroll
    for (int i = 0; i < CUDA_PART_IDS; i++)
        own.ids[i] = first_page + i < end ? table[first_page + i] : -1;
    step.parts[p] = own;
}

/* One block. */
static __global__ void __launch_bounds__(SCAN_THREADS) cut_parts(const cuda_step step)
{
    grid_release();
    grid_wait();
    int64_t total = 0;
    for (int64_t base = 0; base < step.num_tiles; base += SCAN_THREADS) {
        int64_t i = base + threadIdx.x, all, pages = i < step.num_tiles ? history_pages(step, step.tiles[i]) : 0;
        int64_t first = total + block_scan<sum>(pages, &all);
        if (i < step.num_tiles)
            step.before[i] = first;
        total += all;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < step.num_parts; p += SCAN_THREADS) {
        part_place<int64_t> place(step.before, step.num_tiles, total, p, step.num_parts);
        write_part(step, p, step.tiles[place.tile], place.tile, place.first_page, place.pages);
    }
}

/* ------------------------------------------------------------------------------------------------ by each block */

/* A block's own copy of the requests. */
template <int THREADS> struct own_requests {
    cuda_request requests[THREADS];
    int32_t row_end[THREADS], first_tile[THREADS + 1];
};

/* Cleans all requests; block 0 writes them as well. Returns the thread's error. */
template <int THREADS>
static __device__ __forceinline__ uint32_t clean_all(const cuda_step &step, own_requests<THREADS> &own)
{
    int32_t taken = 0, tiles = 0, b = threadIdx.x;
    uint32_t error = b == 0 ? first_errors(step) : 0;
    cleaned c = clean_request<THREADS>(step, b, taken, tiles, error);
    if (b == 0)
        own.first_tile[0] = 0;
    if (b < step.batch) {
        own.requests[b] = c.request;
        own.row_end[b] = c.row_end;
        own.first_tile[b + 1] = c.tiles;
    }
    __syncthreads();
    if (blockIdx.x > 0)
        return error;
    if (b < step.batch) {
        step.requests[b] = c.request;
        step.row_end[b] = c.row_end;
    }
    for (int32_t i = b; step.query_tile && i <= step.batch; i += THREADS)
        step.first_tile[i] = own.first_tile[i];
    return error;
}

/* ------------------------------------------------------------------------------------------------ small steps */

enum { FEW_THREADS = 256 /* of a block, where a thread each is enough for requests and tiles */ };

/* What is known of the tiles. */
template <int THREADS> struct small_tiles {
    int32_t before[THREADS];
    uint16_t request[THREADS];
};

/* Where a tile goes, a thread a tile: those of more rows first, by quarters of the most, else as they were. */
template <int THREADS>
static __device__ int32_t place_by_length(const cuda_step &step, const cuda_tile &tile, bool there, int32_t i)
{
    int quarter = there ? 3 - (4 * tile.num_rows - 1) / step.query_tile : 0;
    int64_t all, before = block_scan<sum, THREADS>(there ? (int64_t)1 << 16 * quarter : 0, &all); /* a count each */
    int32_t place = (int32_t)(before >> 16 * quarter & 0xFFFF);
    for (int q = 0; q < quarter; q++)
        place += (int32_t)(all >> 16 * q & 0xFFFF);
    return there ? place : i;
}

/* A thread a tile, by the first block; then the block's share of the parts. */
template <int THREADS>
static __device__ void write_small_tiles(const cuda_step &step, const own_requests<THREADS> &own,
                                         small_tiles<THREADS> &m)
{
    int32_t i = threadIdx.x, request = first_above(own.first_tile + 1, step.batch, i);
    bool there = i < own.first_tile[step.batch], writes = blockIdx.x == 0 && i < step.num_tiles;
    cuda_tile tile = {-1, 0, 0, 0};
    if (there)
        tile = make_tile(step, own.requests[request], request, i - own.first_tile[request]);
    int32_t place = step.long_first ? place_by_length<THREADS>(step, tile, there, i) : i;
    if (writes)
        step.tiles[place] = tile;
    if (!step.first_step && step.num_parts == 0)
        return;
    int32_t total, pages = history_pages(step, tile), before = block_scan<sum, THREADS>(pages, &total);
    if (step.first_step && writes)
        step.first_step[i + 1] = before + pages;
    if (step.first_step && writes && i == 0)
        step.first_step[0] = 0;
    m.before[i] = before;
    m.request[i] = (uint16_t)request;
    __syncthreads();
    for (int p = (int)blockIdx.x * THREADS + i; p < step.num_parts; p += (int)gridDim.x * THREADS) {
        part_place<int32_t> from(m.before, step.num_tiles, total, p, step.num_parts);
        int32_t b = m.request[from.tile];
        tile = cuda_tile{};
        if (total)
            tile = make_tile(step, own.requests[b], b, from.tile - own.first_tile[b]);
        write_part(step, p, tile, from.tile, from.first_page, from.pages);
    }
}

/* All of a small step at once. Block 0 writes the tiles, the others lists, and all of them rows and parts. LANES: of a
 * list. */
template <int LANES, int THREADS> static __global__ void __launch_bounds__(THREADS) prepare_small(const cuda_step step)
{
    constexpr int AT_ONCE = THREADS / LANES, A_WARP = CUDA_WARP / LANES;
    __shared__ own_requests<THREADS> own;
    __shared__ small_tiles<THREADS> m;
    int32_t items = step.total_q * step.lists, each = (int32_t)(gridDim.x - 1) * AT_ONCE,
            item = blockIdx.x ? (int32_t)((blockIdx.x - 1) * AT_ONCE + threadIdx.x / LANES) : items + CUDA_WARP;
    grid_release();
    grid_wait();
    int32_t end = end_of_rows(step);
    auto read = [&](int32_t i, bool there) { return read_id<LANES>(step, i % step.lists, i / step.lists, there); };
    auto read_early = [&](int32_t i) { return i < items ? read(i, i / step.lists < end) : -1; };
    int32_t id[1] = {read_early(item)}; /* comes while requests are cleaned */
    uint32_t error = clean_all<THREADS>(step, own);
    if (step.query_tile && (blockIdx.x == 0 || step.num_parts))
        write_small_tiles<THREADS>(step, own, m);
    for (int32_t row = (int32_t)(blockIdx.x * THREADS + threadIdx.x); row < step.total_q;
         row += (int32_t)(gridDim.x * THREADS)) {
        int32_t request = find_request(own.requests, own.row_end, step.batch, row);
        step.rows[row] = request < 0 ? cuda_row{-1, -1} : make_row(own.requests[request], request, row);
    }
    while (item / A_WARP * A_WARP < items) { /* whole warps go round together */
        int32_t row = item / step.lists;
        int32_t request = item < items ? find_request(own.requests, own.row_end, step.batch, row) : -1;
        row_view where[1] = {{-1, 0}};
        if (request >= 0)
            where[0] = row_view{
                request, min(make_row(own.requests[request], request, row).position + 1, own.requests[request].kv_len)};
        if (row >= end)
            id[0] = read(item, request >= 0);
        if (write_lists<LANES, 1, 1>(step, item % step.lists, row, where, id))
            error |= MSA_ERROR_BIT_LIST_ID;
        item += each;
        id[0] = read_early(item);
    }
    write_errors(step, join_errors(error));
}

template <int LANES, int THREADS> static cudaError_t launch_small_by(const cuda_step &step, cudaStream_t stream)
{
    int64_t blocks = step.lists ? 1 + grid_blocks((int64_t)step.total_q * step.lists, THREADS / LANES)
                                : grid_blocks(step.num_parts > step.total_q ? step.num_parts : step.total_q, THREADS);
    unsigned grid = (unsigned)(blocks < 1 ? 1 : blocks < CUDA_ERROR_WORDS ? blocks : CUDA_ERROR_WORDS);
    return launch_between(prepare_small<LANES, THREADS>, grid, THREADS, 0, step.dependent_launch, stream, step);
}

static cudaError_t launch_small(const cuda_step &step, cudaStream_t stream)
{
    constexpr int HALF = CUDA_WARP / 2;
    bool half = step.topk <= HALF;
    if (fits_small(step, FEW_THREADS))
        return half ? launch_small_by<HALF, FEW_THREADS>(step, stream)
                    : launch_small_by<CUDA_WARP, FEW_THREADS>(step, stream);
    return half ? launch_small_by<HALF, SCAN_THREADS>(step, stream)
                : launch_small_by<CUDA_WARP, SCAN_THREADS>(step, stream);
}

/* ------------------------------------------------------------------------------------------------ launchers */

static cudaError_t launch_large(const cuda_step &step, cudaStream_t stream)
{
    cudaError_t error = launch_between(clean_requests, 1, SCAN_THREADS, 0, false, stream, step);
    if (!error)
        error = launch_between(write_rows, grid_blocks(step.total_q, ROW_THREADS), ROW_THREADS, 0,
                               step.dependent_launch, stream, step);
    constexpr int HALF = CUDA_WARP / 2, MANY = 8192; /* lists; fewer do not fill a GPU four at a time */
    bool many = (int64_t)step.total_q * step.lists >= MANY;
    if (!error && step.lists && step.topk <= HALF)
        error = many ? launch_pages<HALF, 4>(step, stream) : launch_pages<HALF, 1>(step, stream);
    else if (!error && step.lists)
        error = many ? launch_pages<CUDA_WARP, 4>(step, stream) : launch_pages<CUDA_WARP, 1>(step, stream);
    if (!error && step.first_step)
        error = launch_between(add_steps, 1, SCAN_THREADS, 0, step.dependent_launch, stream, step);
    if (!error && step.num_parts)
        error = launch_between(cut_parts, 1, SCAN_THREADS, 0, step.dependent_launch, stream, step);
    return error;
}

cudaError_t prepare_smxx(const struct cuda_step *step, cudaStream_t stream)
{
    return is_small(*step) ? launch_small(*step, stream) : launch_large(*step, stream);
}

cudaError_t image_version_smxx(int *version)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, clean_requests);
    *version = error ? 0 : attributes.binaryVersion;
    return error;
}
