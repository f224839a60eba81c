/* SPDX-License-Identifier: MIT
 *
 * cpu.h - the CPU backend: kernel types, the kernel table, and how memory is laid out between kernels.
 *
 * Lane = query head. The 16 (or fewer) query heads that share a KV head are the 16 lanes of one vector: max, sum and
 * scaling are vertical, and every output element is one sequential chain of multiply-adds in a fixed order. So results do
 * not depend on vector width, tile size, thread count or instruction set. A "unit" is one such vector's worth of rows:
 * 16/ratio consecutive queries of one request, ratio lanes each (for the indexer: 16 rows of (query, head)).
 *
 * Kernels work on operands in one of three families; the format conversions stand before them, so that formats add to
 * kernels and never multiply them:
 *   OPERAND_F32    K [128 keys][128] float, V [8][128 keys][16 d] float, Q [128 d][16 lanes] float
 *   OPERAND_BF16   K [128 keys][64 pairs] of BF16 pairs, V [8][64 key pairs][16 d] of pairs (even key, odd key),
 *                  Q [64 pairs][16 lanes] of pairs (even d, odd d)
 *   OPERAND_TILE   for AMX: K and Q as OPERAND_BF16, V [4][8] tiles of 32 keys by 16 d: [16 d][16 pairs (even key, odd key)]
 * Eight slices of 16 keys make a K page, eight of 16 dimensions a V page: the kernels that multiply convert slice by slice,
 * and multiply while it is in the L1 cache. (To write a whole FP32 page to L2 takes a fifth of the time of its products.)
 * A V slice of OPERAND_TILE is 32 keys by 64 dimensions: four tiles.
 *
 * The order of every dot product, over d (QK) and over keys (PV): pairs ascending, in a pair the odd element first, then
 * the even one: acc = fma(a[2i+1], b[2i+1], acc); acc = fma(a[2i], b[2i], acc). That is what x86's vdpbf16ps does. All
 * products of FP16, E4M3 and NVFP4 operands are exact in FP32, and so are those of BF16 inside FP32's normal range: there
 * a separate multiply and add gives the same bits.
 * AMX alone has another order: tiles.h.
 */
#ifndef MSA_CPU_H
#define MSA_CPU_H

#include "../internal.h"
#include "exp2.h"

enum cpu_isa { ISA_C, ISA_AVX2, ISA_AVX512, ISA_AVX512BF16, ISA_AMX, ISA_NEON, NUM_ISAS };
enum cpu_operand { OPERAND_F32, OPERAND_BF16, OPERAND_TILE, NUM_OPERANDS };

/* Storage formats as the conversions see them. NVFP4 has two meanings: with E4M3 queries its product rounds to E4M3, with
 * 16-bit queries it is taken exactly. E4M3 as an FP32 operand of attention with E4M3 queries is small, 2^-8 of its value, which
 * spares vector code a multiplication an element: a page's results are off by powers of two until they are merged into a state,
 * and far from FP32's ends until then. (With 16-bit queries sums could leave FP32's range.) */
enum cpu_format {
    FORMAT_BF16,
    FORMAT_FP16,
    FORMAT_E4M3,
    FORMAT_E4M3_SMALL,
    FORMAT_NVFP4_E4M3,
    FORMAT_NVFP4_EXACT,
    NUM_FORMATS
};
#define E4M3_SMALL 0x1p-8f

enum { UNIT_LANES = 16, TILE_UNITS = 32 };

/* One page of one head in the cache. */
struct cpu_rows {
    const uint8_t *data;
    int64_t token_stride;
    const uint8_t *scale; /* NVFP4 */
    int64_t scale_token_stride;
    bool scale_quad;
};

/* One slice to operand layout: of K the keys [16*slice, 16*slice + 16) below `keys`, of V the dimensions [16*slice,
 * 16*slice + 16) of all keys below `keys`. convert_v of the BF16 family writes zeros for the odd key of a half-used pair,
 * that of the tile family for all keys of its slice past `keys`; nothing else past `keys` is read or written. */
typedef void cpu_convert_fn(const struct cpu_rows *rows, int slice, int keys, void *operand);
enum { NUM_SLICES = 8, SLICE = 16 };

/* What the page that comes next will read: `rows` rows of `lines` cache lines from each of some places. Kernels may prefetch it
 * while they multiply. Several places are several streams, which memory can run ahead of. */
enum { AHEAD_PLACES = 4 };
struct cpu_ahead {
    const uint8_t *data[AHEAD_PLACES];
    int64_t stride[AHEAD_PLACES];
    int places, lines, rows;
};

/* A page as the multiplying kernels get it, with room for it in operand layout, 64 KiB each. */
struct cpu_page {
    struct cpu_rows k, v;
    int keys; /* no later one is read */
    cpu_convert_fn *convert_k, *convert_v;
    void *k_operand, *v_operand;
    struct cpu_ahead ahead;
};

/* `lanes` rows of 128 elements (row_bytes as the dtype) into Q layout; missing lanes are zero. */
typedef void cpu_pack_fn(const void *const *lanes, int num_lanes, void *unit);

/* How P, the operand of PV, is rounded. */
enum cpu_rounding { ROUND_E4M3, ROUND_BF16, ROUND_FP16 };

/* The state of a tile of units during the walk over its pages. Per unit: Q, and relative to the running maximum (a score,
 * unscaled) the unnormalised output and the sum of probabilities. Sums and outputs carry the factor 448 with ROUND_E4M3. */
struct cpu_tile {
    void *q;      /* [units][Q layout] */
    float *acc;   /* [units][128 d][16] */
    float *max;   /* [units][16], starts at -inf */
    float *sum;   /* [units][16], starts at 0 */
    void *scratch; /* attend_scratch bytes */
    struct exp2_scale scale; /* logit in log2 units = scale * dot */
    enum cpu_rounding rounding;
    float v_unit; /* value of a V operand's 1: a page's weight is times that, so that acc holds values themselves */
};

/* One visit of a unit to a page: the lanes of the mask see the page's first `keys` keys; other lanes keep their state. */
struct cpu_visit {
    uint16_t unit, lanes;
    int32_t keys; /* 1..128 */
};
typedef void cpu_attend_fn(struct cpu_tile *tile, const struct cpu_page *page, const struct cpu_visit *visits, int num_visits);

/* Configures the calling thread's tile registers, or gives them back, so that no caller's thread keeps tile state. */
typedef void cpu_tiles_fn(void);

/* Scores of one whole page (its K): scores[r * row_stride] for the rows r < num_rows of the units at q, row_stride in floats. */
typedef void cpu_index_fn(const struct cpu_page *page, const void *q, int num_rows, float *scores, int64_t row_stride);

/* The lanes of a unit, normalised: out[lane][d] = acc[d][lane] * factor[lane], as BF16 or FP16; out[lane] NULL: not wanted. A
 * non-finite acc gives NaN, and every NaN is 0x7FC0 or 0x7E00. */
typedef void cpu_finish_fn(const float *acc, const float *factor, int num_lanes, msa_dtype out_dtype, void *const *out);

/* The best `want` pages of a row so far, best first. A key orders by (score, lower page): see topk_c.c. */
struct cpu_best {
    int32_t want, count;
    uint64_t key[MSA_MAX_TOPK];
};
/* Takes pages [first_page, first_page + num_pages) into account. Calls for one row take pages in ascending order. */
typedef void cpu_select_fn(struct cpu_best *best, const float *scores, int32_t first_page, int32_t num_pages);

/* Row `row` of a merge job, all heads. */
typedef void cpu_merge_fn(const struct merge_job *job, int64_t row);

/* n (a multiple of 16) elements; factor is the descale or global scale. scales: one byte per 16 (NVFP4). */
typedef void cpu_quantise_fn(const void *src, int64_t n, float factor, uint8_t *codes, uint8_t *scales);
enum cpu_source { SOURCE_F32, SOURCE_BF16, SOURCE_FP16, NUM_SOURCES };
static inline enum cpu_source cpu_source_of(msa_dtype dtype)
{
    return dtype == MSA_F32 ? SOURCE_F32 : dtype == MSA_BF16 ? SOURCE_BF16 : SOURCE_FP16;
}

enum { INDEX_FEW = 4 };

/* The table of a context: filled from kernels.inc, weakest instruction set first, stronger ones overwriting. */
struct cpu_kernels {
    cpu_convert_fn *convert_k[NUM_OPERANDS][NUM_FORMATS];
    cpu_convert_fn *convert_v[NUM_OPERANDS][NUM_FORMATS];
    cpu_pack_fn *pack[NUM_OPERANDS][NUM_FORMATS]; /* BF16, FP16, E4M3 */
    cpu_attend_fn *attend[NUM_OPERANDS];
    cpu_index_fn *index[NUM_OPERANDS];
    /* For at most INDEX_FEW rows, which would leave most lanes idle: 16 keys are the lanes. Or NULL. The page's convert_k is
     * then convert_turned, which writes K slices as [128 d][16 keys] or [64 pairs][16 keys]. */
    cpu_index_fn *index_few[NUM_OPERANDS];
    cpu_convert_fn *convert_turned[NUM_OPERANDS][NUM_FORMATS];
    cpu_index_fn *index_few_e4m3; /* the same from E4M3 keys, which it converts itself, and Q of OPERAND_F32; or NULL */
    cpu_tiles_fn *begin_tiles, *end_tiles; /* around the kernels of OPERAND_TILE */
    cpu_finish_fn *finish;
    cpu_select_fn *select;
    cpu_merge_fn *merge;
    cpu_quantise_fn *quantise_e4m3[NUM_SOURCES];
    cpu_quantise_fn *quantise_nvfp4[NUM_SOURCES];
};

struct cpu_device {
    enum cpu_isa isa; /* the level in use */
    bool capped;      /* by its name; if not, the machine can have more than the fastest level */
    struct cpu_kernels kernels;
};
/* The name that kernels.inc gives the function in a slot ("attention_c"). */
const char *cpu_kernel_name(void (*function)(void));

static inline const struct cpu_kernels *cpu_kernels_of(const msa_context *context)
{
    return &((const struct cpu_device *)context->backend_data)->kernels;
}

/* The operand family for a query type, by which of the BF16 families have a kernel. FP16 does not fit them. */
static inline enum cpu_operand cpu_choose_operand(msa_dtype q, bool tile_kernel, bool bf16_kernel)
{
    if (q == MSA_FP16)
        return OPERAND_F32;
    return tile_kernel ? OPERAND_TILE : bf16_kernel ? OPERAND_BF16 : OPERAND_F32;
}

/* Bytes of a unit's Q. */
static inline size_t cpu_unit_bytes(enum cpu_operand family)
{
    return 128 * UNIT_LANES * (family == OPERAND_F32 ? 4 : 2);
}

/* Runs task(arg, i, thread) for i in [0, n) on the context's threads. */
msa_status cpu_parallel(const msa_context *context, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg);

/* Around kernels for BF16 queries: on x86 an FP32 result below 2^-126 becomes 0 in between, as it does in vdpbf16ps
 * whatever the thread's mode is, so that all levels give the same bits. begin returns the thread's mode, which end
 * restores. */
uint32_t cpu_begin_flush(void);
void cpu_end_flush(uint32_t mode);

/* ------------------------------------------------------------------------------------------------ requests.c */

/* The rows of a request, cleaned of bad lengths. */
struct cpu_request {
    int64_t first_row, num_rows; /* of the query tensors */
    int64_t kv_len;              /* clamped to the pages of the plan's capacity */
    int64_t first_position;      /* of first_row; can be negative */
    const int32_t *pages;        /* its page table row */
};
/* What prepare leaves in plan->backend_data: the requests, and the tiles before each. */
struct cpu_step {
    struct cpu_request *requests; /* [max_batch] */
    int64_t *first_tile;          /* [max_batch + 1] */
};
msa_status cpu_step_create(msa_plan *plan);
void cpu_step_destroy(msa_plan *plan);
void cpu_step_prepare(msa_plan *plan);
int64_t cpu_step_tiles(const msa_plan *plan);
/* The request of a tile of plan->query_tile queries, and the tile's rows [*begin, *end) counted inside the request. */
const struct cpu_request *cpu_step_tile(const msa_plan *plan, int64_t tile, int64_t *begin, int64_t *end);

/* ------------------------------------------------------------------------------------------------ drivers */

msa_status cpu_attention_plan(msa_plan *plan);
msa_status cpu_attention_run(msa_plan *plan, const msa_attention_args *args, msa_stream stream);
msa_status cpu_index_plan(msa_plan *plan);
msa_status cpu_index_run(msa_plan *plan, const msa_index_args *args, msa_stream stream);
msa_status cpu_topk(msa_context *context, const msa_topk_args *args, msa_stream stream);
msa_status cpu_merge(msa_context *context, const struct merge_job *job, msa_stream stream);
msa_status cpu_quantise(msa_context *context, const msa_quantise_args *args, msa_stream stream);
msa_status cpu_convert(msa_context *context, const msa_convert_args *args, msa_stream stream);
msa_status cpu_cache_write(msa_context *context, const msa_cache_write_args *args, msa_stream stream);

/* Selection of a row with n pages: forced pages, and the best of the pages in between. topk.c */
struct cpu_selection {
    int32_t k, init_pages, local_pages;
    msa_topk_order order;
};
void cpu_best_init(struct cpu_best *best, const struct cpu_selection *selection, int32_t n);
/* The pages that compete: [first, last). */
static inline int32_t cpu_first_candidate(const struct cpu_selection *selection, int32_t n)
{
    return selection->init_pages < n ? selection->init_pages : n;
}
static inline int32_t cpu_last_candidate(const struct cpu_selection *selection, int32_t n)
{
    int32_t first = cpu_first_candidate(selection, n), last = n - selection->local_pages;
    return last > first ? last : first;
}
void cpu_best_merge(struct cpu_best *best, const struct cpu_best *other);
void cpu_best_write(const struct cpu_best *best, const struct cpu_selection *selection, int32_t n, int32_t *topk);

#endif
