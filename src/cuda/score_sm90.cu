/* SPDX-License-Identifier: MIT
 *
 * score_sm90.cu - prefill indexer scores for Hopper: score[h][i][p] = max over the page's 128 tokens of
 * dot(index_q[i][h], index_k[token]), for exactly the history pages p of each row.
 *
 * Arithmetic. BF16 keys: BF16 wgmma. `exact` with FP8 or NVFP4 keys: both operands widen exactly to F16 (NVFP4 through
 * its E4M3 rounding). FP32 accumulation, d ascending by 16. `fast`: FP8 wgmma, d ascending by 32, which drops what lies
 * below 2^-13 of a step's largest term. A NaN product never becomes the maximum. Every score is made by the same
 * instructions whatever the tile, so the bits of a row depend on nothing but the row, and those of `exact` are
 * index_smxx's, but for NVFP4, whose steps of 16 are score_decode_sm90's.
 *
 * Rows of a tile are (query, head) pairs, the head innermost; a block of `GROUPS` consumer warpgroups holds 64 rows
 * each as operands in registers, and walks whole pages. prepare cuts the list of (tile, page) pairs into one part of
 * equal cost a block (and SM): few queries over a long context fill the chip, many over a short one are hardly split.
 * Roles:
 *   copy_pages      1 warp         pages that lie in memory as operands do: tensor copies into a ring of swizzled stages
 *   convert_pages   2 warpgroups   other pages: cp.async to the thread's own corner, converted into the ring
 *   score_task      3, 4 groups    products of 64 rows and 128 keys, the maxima, their stores
 *   write_image     a launch       all pages of the step once, for many rows
 *   cut_tiles       a launch       of prepare
 *
 *                        rows   stages     shared memory   registers: loaders, consumers (launch)
 *   E4M3, image of E4M3  256    13 x 16K   208 K           32, 112 (96)
 *   BF16, image of F16   192    6 x 32K    192 K           56, 152 (128)
 *   FP8 to F16           192    4 x 32K    192 K           48, 128 (96)
 *   NVFP4 to F16         192    4 x 32K    208 K           48, 128 (96)
 *   NVFP4 to E4M3        192    8 x 16K    208 K           48, 128 (96)
 *
 * Floor: 2*128*128 FLOP a row and page; measured rates of the tensor cores in long runs are 1658 TFLOP/s (FP8) and 861
 * (16 bit). 8192 queries after 120K, 1 head: 161 us and 309 us. Measured there on 2026-11-29, H200 SXM: FP8 fast 169 us;
 * with the top-k (16 us) FP8 fast 183, FP8 exact 332, BF16 333, NVFP4 fast 200.
 */
#include "maxima_sm90.cuh"
#include "score_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ scores */

/* A lane's two rows of a warp's 16: lane/4 and that + 8. */
struct rows {
    float *scores[2];
    int32_t end[2]; /* of the pages that are written: the causal limit, or the task's last */
};

/* Finds a lane's rows of the tile, the first of which is `row`, and loads their queries as the products' a operand. */
template <typename S>
static __device__ __forceinline__ void load_rows(const cuda_index &job, const task &t, int row, rows &r,
                                                 uint32_t (&q)[8][4])
{
    const msa_index_args &args = job.args;
    int heads = job.desc.num_index_heads;
    const char *from[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int query = (row + 8 * i) / heads, head = (row + 8 * i) % heads;
        int64_t index = t.tile.first_row + query;
        int32_t position = t.tile.first_position + query;
        bool valid = query < t.tile.num_rows;
        from[i] = valid ? (const char *)args.index_q + index * args.index_q_row_stride + head * args.index_q_head_stride
                        : nullptr;
        r.scores[i] = (float *)((char *)args.scores + index * args.scores_row_stride + head * args.scores_head_stride);
        r.end[i] = valid && position > 0 ? min(position / MSA_PAGE_SIZE, t.last) : 0;
    }
    if (S::TYPE == WGMMA_F16 && job.desc.k_dtype == MSA_NVFP4) {
        int t = threadIdx.x % 4; /* of the step's four quarters t/2 and that + 2 */
#pragma unroll
        for (int k = 0; k < 8; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                q[k][i] = load_query_pair<true>(from[i % 2], 32 * (t / 2 + i / 2 * 2) + 4 * k + t % 2 * 2);
    } else if constexpr (S::TYPE != WGMMA_E4M3) {
        load_queries<S::TYPE == WGMMA_F16>(from, q);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                q[k][i] =
                    from[i % 2] ? *(const uint32_t *)(from[i % 2] + 32 * k + 16 * (i / 2) + 4 * (threadIdx.x % 4)) : 0;
    }
}

/* A warpgroup's 64 rows times the 128 keys of a stage. */
template <typename S>
static __device__ __forceinline__ void multiply(float (&sum)[64], const uint32_t (&q)[8][4], uint32_t stage)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4 * S::HALVES; k++)
        wgmma_64x128<S::TYPE>(sum, q[k], matrix_descriptor(stage + k / 4 * S::HALF_BYTES + k % 4 * 32), k);
    wgmma_commit();
}

/* Halves what a quad shares: lanes whose bit is set keep the second page's maximum, the others the first's. */
static __device__ __forceinline__ float keep_half(float first, float second, int bit)
{
    bool set = threadIdx.x & bit;
    return fmaxf(set ? second : first, __shfl_xor_sync(~0u, set ? first : second, bit));
}

/* Of a task: which rows a warpgroup has, and which pages. Warpgroups that the rows leave over share them, each taking
 * every stride-th page from `phase` on. */
struct share {
    int first_row, phase, stride;
    bool none;
};

template <typename S> static __device__ __forceinline__ share make_share(int num_rows, int pages, int group)
{
    int blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS, stride = S::GROUPS / blocks, phase = group / blocks;
    return share{group % blocks * BLOCK_ROWS, phase, stride, phase >= stride || phase >= pages};
}

/* Lets pages of other warpgroups pass. They are waited for all the same, or an arrival could count for an earlier
 * round. */
template <typename S> static __device__ __forceinline__ void pass_pages(memory<S> &m, turn<S> &at, int pages)
{
#pragma unroll 1
    for (; pages > 0; pages--) {
        wait_full(m, at);
        give_empty(m, at);
        at.advance();
    }
}

/* A consumer warpgroup's part of one task. Four pages' maxima are shared out over the quad, so that its lane t ends
 * with page t of both rows; those shuffles, and the stores, hide behind the next page's products. */
template <typename S>
static __device__ __forceinline__ void score_task(const cuda_index &job, const task &t, memory<S> &m, turn<S> &at)
{
    int group = uniform(threadIdx.x / WARPGROUP) - S::LOADERS, left = uniform(t.last - t.page),
        lane = threadIdx.x % CUDA_WARP;
    share own = make_share<S>(uniform(t.tile.num_rows) * job.desc.num_index_heads, left, group);
    if (own.none) {
        pass_pages(m, at, left);
        return;
    }
    rows r;
    uint32_t q[8][4];
    load_rows<S>(job, t, own.first_row + threadIdx.x % WARPGROUP / CUDA_WARP * 16 + lane / 4, r, q);
    int page = t.page + own.phase + lane % 4 * own.stride; /* that the lane writes next */
    float a[2] = {}, b[2] = {}, pair[2];                   /* maxima of two pages; of two more, shared out */
    auto share_two = [&] {
        pair[0] = keep_half(a[0], b[0], 1);
        pair[1] = keep_half(a[1], b[1], 1);
    };
    auto write_four = [&] {
        float first = keep_half(pair[0], keep_half(a[0], b[0], 1), 2),
              second = keep_half(pair[1], keep_half(a[1], b[1], 1), 2);
        if (page < r.end[0])
            r.scores[0][page] = first * S::SCALE;
        if (page < r.end[1])
            r.scores[1][page] = second * S::SCALE;
        page += 4 * own.stride;
    };
    /* The warpgroup's next page, and those of others up to the one after it. False: it was the last one. */
    auto score_page = [&](float(&best)[2], auto meanwhile) -> bool {
        float sum[64];
        wait_full(m, at);
        if (S::CONVERTS)
            fence_async_reads();
        multiply<S>(sum, q, shared_address(m.page[at.stage()]));
        meanwhile();
        wgmma_wait(sum);
        give_empty(m, at);
        at.advance();
        lane_maxima(sum, best);
        if (own.stride > 1) {
            pass_pages(m, at, min(own.stride, left) - 1);
            left -= own.stride - 1;
        }
        return --left > 0;
    };
    pass_pages(m, at, own.phase);
    left -= own.phase;
    bool paired = false;
    for (bool again = false;; again = true) {
        paired = false;
        if (!score_page(a,
                        [&] {
                            if (again)
                                write_four();
                        }) ||
            !score_page(b, [] {}))
            break;
        paired = true;
        if (!score_page(a, share_two) || !score_page(b, [] {}))
            break;
    }
    if (!paired)
        share_two();
    write_four();
}

/* ------------------------------------------------------------------------------------------------ the kernel */

template <storage STORAGE, wgmma_type TYPE, int GROUPS>
static __global__ void __launch_bounds__(shape<STORAGE, TYPE, GROUPS>::THREADS, 1)
    score_pages(const __grid_constant__ cuda_index job, const __grid_constant__ CUtensorMap keys)
{
    using S = shape<STORAGE, TYPE, GROUPS>;
    extern __shared__ __align__(1024) uint8_t shared[];
    memory<S> &m = *(memory<S> *)shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(shared_address(&m.full[i]), S::CONVERTS ? WARPGROUP : 1);
            barrier_init(shared_address(&m.empty[i]), S::GROUPS * WARPGROUP / CUDA_WARP);
        }
        fence_barriers();
        const place *places = own_memory(job).places + blockIdx.x;
        m.begin = places[0];
        m.end = places[1];
        m.tiles = m.end.tile + (m.end.page > 0);
    }
    __syncthreads();
    if (uniform(threadIdx.x / WARPGROUP) < S::LOADERS) {
        fewer_registers<S::LOAD_REGISTERS>();
        if constexpr (S::CONVERTS)
            convert_pages<STORAGE>(job, m);
        else
            copy_pages(job, keys, m);
    } else {
        more_registers<S::REGISTERS>();
        turn<S> at = {0};
        for (int tile = uniform(m.begin.tile), end = uniform(m.tiles); tile < end; tile++) {
            task t; /* uniform bounds: then the ring's state is, and descriptors of products need no moves */
            if (uniform(find_task(job, m, tile, t)))
                score_task(job, t, m, at);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ the image */

enum { IMAGE_THREADS = 256 };

/* One page, by the block: bytes in order, so that reads and writes are dense where the cache is. */
template <storage STORAGE, wgmma_type TYPE>
static __device__ __forceinline__ void convert_to_image(const msa_index_args &args, int32_t physical, uint8_t *image)
{
    page_part<STORAGE, IMAGE_THREADS> part;
    page_rows rows = {(const uint8_t *)args.index_k + physical * args.index_k_page_stride, args.index_k_token_stride,
                      (const uint8_t *)args.index_k_scale + physical * args.index_k_scale_page_stride,
                      args.index_k_scale_token_stride, false};
    load_page<STORAGE, IMAGE_THREADS>(rows, MSA_PAGE_SIZE, part);
#pragma unroll
    for (int i = 0; i < part.CHUNKS; i++) {
        uint4 data = part.data[i], *to = (uint4 *)image + (i * IMAGE_THREADS + threadIdx.x) *
                                                              (TYPE == WGMMA_F16 ? chunk<STORAGE>::ELEMENTS / 8 : 2);
        if constexpr (STORAGE == STORAGE_E4M3) {
            to[0] = widen_e4m3_8<OPERAND_F16>(data.x, data.y);
            to[1] = widen_e4m3_8<OPERAND_F16>(data.z, data.w);
        } else if constexpr (TYPE == WGMMA_F16) {
            int c = threadIdx.x % chunk<STORAGE>::IN_ROW;
            uint2 *row = (uint2 *)(to - 4 * c);
#pragma unroll
            for (int word = 0; word < 4; word++) {
                uint4 x = widen_nvfp4_8<OPERAND_F16, true>(word == 0   ? data.x
                                                           : word == 1 ? data.y
                                                           : word == 2 ? data.z
                                                                       : data.w,
                                                           part.scale[i][word / 2]);
                row[4 * (2 * word) + c] = make_uint2(x.x, x.y); /* step 2 * word, as in convert_page */
                row[4 * (2 * word + 1) + c] = make_uint2(x.z, x.w);
            }
        } else {
            block_table first = make_table(part.scale[i][0]), second = make_table(part.scale[i][1]);
            uint2 x = widen_codes(data.x, first), y = widen_codes(data.y, first), z = widen_codes(data.z, second),
                  w = widen_codes(data.w, second);
            to[0] = make_uint4(x.x, x.y, y.x, y.y);
            to[1] = make_uint4(z.x, z.y, w.x, w.y);
        }
    }
}

/* All history pages of the step's requests. */
template <storage STORAGE, wgmma_type TYPE>
static __global__ void __launch_bounds__(IMAGE_THREADS) write_image(const __grid_constant__ cuda_index job)
{
    own_parts own = own_memory(job);
    for (int b = 0, first = blockIdx.x; b < job.step.batch; b++) { /* first: this block's first page of the request */
        cuda_request request = job.step.requests[b];
        int64_t last = request.first_position + request.num_rows - 1,
                pages = request.num_rows && last > 0 ? last / MSA_PAGE_SIZE : 0;
        pages = pages < job.step.max_pages ? pages : job.step.max_pages;
        const int32_t *table = (const int32_t *)((const char *)job.step.page_table + b * job.step.page_table_stride);
        for (; first < pages; first += gridDim.x) {
            int64_t to = (int64_t)b * job.step.max_pages + first;
            int32_t physical = table[first];
            bool there = physical >= 0 && physical < job.args.num_pages;
            if (there)
                convert_to_image<STORAGE, TYPE>(
                    job.args, physical, own.image + to * MSA_PAGE_SIZE * MSA_HEAD_DIM * (TYPE == WGMMA_F16 ? 2 : 1));
            if (threadIdx.x == 0)
                own.table[to] = there ? (int32_t)to : -1;
        }
        first -= (int)pages; /* requests follow each other like the pages of one */
    }
}

/* ------------------------------------------------------------------------------------------------ the plan of a step
 */

/* Tiles differ in pages and rows, so they are cut by cost: of a page by its blocks of 64 rows, and of a task's start.
 * Places of equal cost from each other bound the blocks' parts. The unit is a 16th of what a page costs four groups, 1100
 * clocks; one block's page costs more than a quarter of that, as it has to be copied all the same. */
static __device__ int32_t page_cost(const cuda_index &job, const cuda_tile &tile)
{
    int blocks = (tile.num_rows * job.desc.num_index_heads + BLOCK_ROWS - 1) / BLOCK_ROWS;
    if (!is_fast(job)) /* 16 bit: 800, 1050, 1575 */
        return blocks == 1 ? 12 : blocks == 2 ? 15 : 23;
    return blocks == 1 ? 7 : blocks == 2 ? 9 : blocks == 3 ? 12 : 16;
}
enum { TASK_COST = 36 }; /* 2500 clocks */

static __device__ place find_place(const cuda_index &job, const int64_t *cost, int64_t wanted)
{
    int32_t end = job.step.num_tiles;
    if (wanted >= cost[end])
        return place{end, 0, {-1, 0, 0, 0}};
    int32_t low = first_above(cost, end, wanted) - 1;
    cuda_tile tile = job.step.tiles[low];
    int64_t a_page = page_cost(job, tile), pages = (wanted - cost[low] - TASK_COST + a_page / 2) / a_page,
            history = history_pages(job.step, tile);
    return place{low, (int32_t)(pages < 0 ? 0 : pages < history ? pages : history), tile};
}

static __global__ void __launch_bounds__(SCAN_THREADS) cut_tiles(const cuda_index job)
{
    grid_release();
    grid_wait();
    place *places = own_memory(job).places;
    int64_t *cost = own_memory(job).costs, before = 0;
    for (int64_t round = 0; round < job.step.num_tiles; round += SCAN_THREADS) {
        int64_t i = round + threadIdx.x, own = 0, all;
        if (i < job.step.num_tiles) {
            cuda_tile tile = job.step.tiles[i];
            int64_t pages = history_pages(job.step, tile);
            own = pages ? TASK_COST + pages * page_cost(job, tile) : 0;
        }
        int64_t in_round = block_scan<sum>(own, &all);
        if (i < job.step.num_tiles)
            cost[i + 1] = before + in_round + own;
        before += all;
    }
    if (threadIdx.x == 0)
        cost[0] = 0;
    __syncthreads();
    for (int b = threadIdx.x; b <= job.num_sms; b += SCAN_THREADS)
        places[b] = find_place(job, cost, before * b / job.num_sms);
}

/* ------------------------------------------------------------------------------------------------ launchers */

/* Whether a step's pages are converted ahead. */
static bool uses_image(const struct cuda_index *job)
{
    return (int64_t)job->step.batch * job->step.max_pages <= MAX_IMAGE_PAGES &&
           (int64_t)job->step.total_q * job->desc.num_index_heads >= MIN_IMAGE_ROWS;
}

/* Consumer warpgroups: FP8 pages that need no conversion on the way leave registers for a fourth. */
static void set_tile(struct cuda_index *job, bool image)
{
    int groups = is_fast(*job) && (image || job->desc.k_dtype == MSA_E4M3) ? 4 : 3;
    job->step.query_tile = groups * BLOCK_ROWS / job->desc.num_index_heads;
}

static void plan(struct cuda_index *job)
{
    set_tile(job, false);
    job->memory_bytes = own_memory(*job).bytes;
}

static void begin(struct cuda_index *job)
{
    set_tile(job, uses_image(job));
}

static cudaError_t prepare(const struct cuda_index *job, cudaStream_t stream)
{
    return launch(cut_tiles, 1, SCAN_THREADS, 0, job->step.dependent_launch, stream, *job);
}

/* The keys as the copies' tensor: 128 bytes of a key at once, swizzled, all keys of a page. */
static cudaError_t describe_keys(const struct cuda_index *job, int halves, CUtensorMap *keys)
{
    const msa_index_args *args = &job->args;
    cuuint64_t extents[3] = {(cuuint64_t)(128 * halves), MSA_PAGE_SIZE,
                             (cuuint64_t)(args->num_pages ? args->num_pages : 1)};
    cuuint64_t strides[2] = {(cuuint64_t)args->index_k_token_stride,
                             (cuuint64_t)(args->num_pages > 1 ? args->index_k_page_stride : 16)};
    cuuint32_t box[3] = {128, MSA_PAGE_SIZE, 1}, steps[3] = {1, 1, 1};
    return job->encode_tensor(keys, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3,
                              args->num_pages ? (void *)args->index_k : job->memory, extents, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
               ? cudaErrorInvalidValue
               : cudaSuccess;
}

template <storage STORAGE, wgmma_type TYPE, int GROUPS = 3>
static cudaError_t launch_scores(const struct cuda_index *job, cudaStream_t stream)
{
    auto kernel = score_pages<STORAGE, TYPE, GROUPS>;
    using S = shape<STORAGE, TYPE, GROUPS>;
    int bytes = (int)sizeof(memory<S>);
    CUtensorMap keys = {};
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (!error && !S::CONVERTS)
        error = describe_keys(job, S::HALVES, &keys);
    return error ? error : launch(kernel, (unsigned)job->num_sms, S::THREADS, bytes, false, stream, *job, keys);
}

/* Through the image, whose pages lie as `STORED` ones do. */
template <storage STORAGE, wgmma_type TYPE>
static cudaError_t convert_and_score(const struct cuda_index *job, cudaStream_t stream)
{
    constexpr storage STORED = TYPE == WGMMA_F16 ? STORAGE_HALF : STORAGE_E4M3;
    constexpr int ROW_BYTES = MSA_HEAD_DIM * (TYPE == WGMMA_F16 ? 2 : 1), GROUPS = TYPE == WGMMA_F16 ? 3 : 4;
    int64_t pages = (int64_t)job->step.batch * job->step.max_pages;
    if (!uses_image(job))
        return launch_scores<STORAGE, TYPE>(job, stream);
    cudaError_t error =
        launch(write_image<STORAGE, TYPE>, (unsigned)(job->num_sms * 8), IMAGE_THREADS, 0, false, stream, *job);
    struct cuda_index from_image = *job;
    own_parts own = own_memory(*job);
    from_image.args.index_k = own.image;
    from_image.args.index_k_token_stride = ROW_BYTES;
    from_image.args.index_k_page_stride = ROW_BYTES * MSA_PAGE_SIZE;
    from_image.args.num_pages = pages;
    from_image.step.page_table = own.table;
    from_image.step.page_table_stride = (int64_t)job->step.max_pages * 4;
    return error ? error : launch_scores<STORED, TYPE, GROUPS>(&from_image, stream);
}

static cudaError_t run(const struct cuda_index *job, cudaStream_t stream)
{
    if (job->desc.k_dtype == MSA_BF16)
        return launch_scores<STORAGE_HALF, WGMMA_BF16>(job, stream);
    if (job->desc.k_dtype == MSA_E4M3)
        return is_fast(*job) ? launch_scores<STORAGE_E4M3, WGMMA_E4M3, 4>(job, stream)
                             : convert_and_score<STORAGE_E4M3, WGMMA_F16>(job, stream);
    return is_fast(*job) ? convert_and_score<STORAGE_NVFP4_E4M3, WGMMA_E4M3>(job, stream)
                         : convert_and_score<STORAGE_NVFP4_E4M3, WGMMA_F16>(job, stream);
}

const struct cuda_index_kernel score_sm90 = {plan, begin, true, prepare, run};
