/* SPDX-License-Identifier: MIT
 *
 * prepare_smxx.cu - a step's lengths and lists into the records of struct cuda_step. cuda.h says what they hold,
 * cpu/requests.c is the definition of how bad lengths are masked.
 *
 *   requests  one block       cleans the requests. A request owns the rows that no earlier one has: its first row is the
 *                             maximum of its begin and all earlier ends, which is a running maximum (a scan), not a loop
 *   rows      a thread a row  finds the row's request, writes the row and the tile that starts with it
 *   pages     a lane an id    attention plans: the sorted visible pages of a row's list
 *   steps     one block       index plans: adds up the tiles' history pages
 * For a small step, as decode's are, the first block does the rows and steps, too. Each launch but the first is on its way
 * while the one ahead of it runs, and waits on the device: 1 us less a launch.
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

/* By a block. Errors go to the step's word, which this also clears. */
static __device__ void clean_requests(const cuda_step &step)
{
    int32_t taken = 0, tiles = 0; /* by the requests of earlier rounds */
    uint32_t error = 0;
    if (threadIdx.x == 0 && (step.cu_seqlens_q[0] != 0 || (step.cu_seqlens_k && step.cu_seqlens_k[0] != 0)))
        error = MSA_ERROR_BIT_LENGTHS;
    for (int64_t round = 0; round < step.batch; round += SCAN_THREADS) {
        int64_t b = round + threadIdx.x;
        bool valid = b < step.batch;
        lengths l = valid ? read_lengths(step, (int)b) : lengths{0, 0, 0};
        int32_t stop =
            (int32_t)(l.end < step.total_q ? l.end : step.total_q); /* negative is fine: taken is at least 0 */
        int32_t all, before = block_scan<maximum>(stop, &all);
        before = before > taken ? before : taken; /* rows taken before this request */
        int64_t first = l.begin > before ? l.begin : before;
        int32_t rows = stop > first ? (int32_t)(stop - first) : 0;
        int32_t own_tiles = step.query_tile ? (rows + step.query_tile - 1) / step.query_tile : 0;
        int32_t all_tiles, tiles_before = block_scan<sum>(own_tiles, &all_tiles);
        if (valid) {
            error |= length_errors(step, l, before);
            int64_t most_keys = (int64_t)step.max_pages * MSA_PAGE_SIZE;
            int64_t kv_len = l.kv_len < 0 ? 0 : l.kv_len < most_keys ? l.kv_len : most_keys;
            step.requests[b] = cuda_request{l.kv_len - (l.end - l.begin) + (first - l.begin), (int32_t)first, rows,
                                            (int32_t)kv_len, 0};
            step.row_end[b] = before > stop ? before : stop;
            if (step.query_tile)
                step.first_tile[b + 1] = tiles + tiles_before + own_tiles;
        }
        taken = taken > all ? taken : all;
        tiles += all_tiles;
    }
    if (step.query_tile && threadIdx.x == 0)
        step.first_tile[0] = 0;
    error = __reduce_or_sync(~0u, error);
    __shared__ uint32_t all_errors;
    if (threadIdx.x == 0)
        all_errors = 0;
    __syncthreads();
    if (threadIdx.x % CUDA_WARP == 0 && error)
        atomicOr(&all_errors, error);
    __syncthreads();
    if (threadIdx.x == 0)
        *step.error = all_errors;
}

/* ------------------------------------------------------------------------------------------------ rows */

/* The first request whose rows, with those before it, end past this row. -1: none. */
static __device__ int32_t find_request(const cuda_step &step, int32_t row)
{
    int32_t low = 0, high = step.batch;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (step.row_end[middle] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low < step.batch && step.requests[low].first_row <= row ? low : -1;
}

static __device__ int32_t cut_position(int64_t position, int32_t low)
{
    return (int32_t)(position < low ? low : position < MAX_POSITION ? position : MAX_POSITION);
}

static __device__ void write_row(const cuda_step &step, int32_t row)
{
    int32_t b = find_request(step, row);
    /* Slots past the last tile are empty. There are no more slots than rows. */
    if (step.query_tile && row < step.num_tiles && row >= step.first_tile[step.batch])
        step.tiles[row] = cuda_tile{-1, 0, 0, 0};
    if (b < 0) {
        step.rows[row] = cuda_row{-1, -1};
        return;
    }
    cuda_request request = step.requests[b];
    int32_t i = row - request.first_row;
    int64_t position = request.first_position + i;
    step.rows[row] = cuda_row{b, cut_position(position, -1)};
    if (step.query_tile && i % step.query_tile == 0) {
        int32_t left = request.num_rows - i;
        step.tiles[step.first_tile[b] + i / step.query_tile] =
            cuda_tile{b, row, left < step.query_tile ? left : step.query_tile, cut_position(position, -MAX_POSITION)};
    }
}

/* ------------------------------------------------------------------------------------------------ lists */

/* LANES lanes a list of a row, a lane an id: a warp or, for short lists, half of one. An id's place is the number of
 * smaller ones, which are the lanes before it where a list ascends; of equal ones the first lane's stays. EACH lists
 * follow each other, so that their loads, of which each needs the one before, wait together. */
template <int LANES, int EACH> static __global__ void __launch_bounds__(ROW_THREADS) write_pages(const cuda_step step)
{
    constexpr int AT_ONCE = ROW_THREADS / LANES;
    int lane = threadIdx.x % LANES, part = threadIdx.x % CUDA_WARP / LANES; /* of the warp */
    int64_t first = (int64_t)blockIdx.x * (AT_ONCE * EACH) + threadIdx.x / LANES, list = blockIdx.y;
    grid_release();
    grid_wait();
    cuda_row where[EACH];
    int32_t id[EACH], kv_len[EACH], physical[EACH], place[EACH], count[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int64_t row = first + e * AT_ONCE;
        where[e] = row < step.total_q ? step.rows[row] : cuda_row{-1, -1};
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int64_t row = first + e * AT_ONCE;
        bool valid = where[e].request >= 0;
        id[e] = valid && lane < step.topk ? ((const int32_t *)((const char *)step.list + list * step.list_head_stride +
                                                               row * step.list_row_stride))[lane]
                                          : -1;
        kv_len[e] = valid ? step.requests[where[e].request].kv_len : 0;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        if (__any_sync(~0u, id[e] < -1 || id[e] >= step.max_pages)) {
            if (threadIdx.x % CUDA_WARP == 0)
                atomicOr(step.error, MSA_ERROR_BIT_LIST_ID);
            id[e] = id[e] < -1 || id[e] >= step.max_pages ? -1 : id[e];
        }
        int32_t first_key = id[e] * MSA_PAGE_SIZE; /* below 2^20 */
        bool visible = id[e] >= 0 && first_key <= where[e].position && first_key < kv_len[e];
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
}

template <int LANES, int EACH> static cudaError_t launch_pages(const struct cuda_step &step, cudaStream_t stream)
{
    return launch(write_pages<LANES, EACH>,
                  dim3(grid_blocks(step.total_q, ROW_THREADS / LANES * EACH), (unsigned)step.lists), ROW_THREADS, 0,
                  step.dependent_launch, stream, step);
}

/* ------------------------------------------------------------------------------------------------ steps */

/* By a block. */
static __device__ void add_steps(const cuda_step &step)
{
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

/* ------------------------------------------------------------------------------------------------ kernels */

/* SMALL: the step's rows and, of index plans, its steps as well. */
template <bool SMALL> static __global__ void __launch_bounds__(SCAN_THREADS) prepare_requests(const cuda_step step)
{
    grid_release();
    clean_requests(step);
    if (!SMALL)
        return;
    __syncthreads();
    if ((int32_t)threadIdx.x < step.total_q)
        write_row(step, (int32_t)threadIdx.x);
    if (!step.first_step)
        return;
    __syncthreads();
    add_steps(step);
}

static __global__ void __launch_bounds__(ROW_THREADS) prepare_rows(const cuda_step step)
{
    int64_t row = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    grid_release();
    grid_wait();
    if (row < step.total_q)
        write_row(step, (int32_t)row);
}

static __global__ void __launch_bounds__(SCAN_THREADS) prepare_steps(const cuda_step step)
{
    grid_release();
    grid_wait();
    add_steps(step);
}

cudaError_t prepare_smxx(const struct cuda_step *step, cudaStream_t stream)
{
    bool small = step->total_q <= SCAN_THREADS;
    cudaError_t error =
        launch(small ? prepare_requests<true> : prepare_requests<false>, 1, SCAN_THREADS, 0, false, stream, *step);
    if (!error && !small)
        error = launch(prepare_rows, grid_blocks(step->total_q, ROW_THREADS), ROW_THREADS, 0, step->dependent_launch,
                       stream, *step);
    constexpr int HALF = CUDA_WARP / 2, MANY = 8192; /* lists; fewer do not fill a GPU four at a time */
    bool many = (int64_t)step->total_q * step->lists >= MANY;
    if (!error && step->lists && step->topk <= HALF)
        error = many ? launch_pages<HALF, 4>(*step, stream) : launch_pages<HALF, 1>(*step, stream);
    else if (!error && step->lists)
        error = many ? launch_pages<CUDA_WARP, 4>(*step, stream) : launch_pages<CUDA_WARP, 1>(*step, stream);
    if (!error && !small && step->first_step)
        error = launch(prepare_steps, 1, SCAN_THREADS, 0, step->dependent_launch, stream, *step);
    return error;
}

cudaError_t image_version_smxx(int *version)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, prepare_requests<true>);
    *version = error ? 0 : attributes.binaryVersion;
    return error;
}
