/* SPDX-License-Identifier: MIT
 *
 * cuda.h - the CUDA backend: what the driver (C) and the kernels' files (.cu) share.
 *
 * A call goes: api.c -> driver.c (enter the device, carve the workspace) -> a launcher, found in the table of kernels
 * -> __global__. A launcher is a host function of a .cu file; its name is the kernel's printed name and the file's
 * name. It enqueues on a stream and returns the launch's own error; it never allocates, waits or reads device memory.
 *
 * A step's lengths live on the device, so every grid is sized from host numbers (capacities, batch, total_q) and
 * surplus blocks find nothing to do. `prepare` turns the lengths into records in the workspace (struct cuda_step,
 * below):
 *   requests   [batch]            rows, length and position of each request, cleaned of bad values
 *   rows       [total_q]          request and position of each row; request -1: padding, not to be read or written
 *   tiles      [num_tiles]        query_tile consecutive rows of one request each; num_rows 0: an unused slot
 *   first_step [num_tiles + 1]    (tile, history page) pairs before each tile, for index kernels that do not cut the
 *                                 tiles themselves, or
 *   parts      [num_parts]        these pairs in equal parts
 *   pages      [lists][total_q][k] attention plans: the distinct visible pages of each list, ascending, then -1
 * Everything in them is a function of the step alone: no order of arrival decides anything.
 *
 * How to add an attention kernel: a file src/cuda/<name>.cu that defines `const struct cuda_attention_kernel <name>`,
 * and its lines in kernels.inc. Its `plan` sees capacities and says how it wants the step cut; `prepare` may add
 * launches behind the common ones, `run` gets the same job with the tensors filled in. Device memory of its own is at
 * job->memory, as many bytes as its plan asked for.
 */
#ifndef MSA_CUDA_H
#define MSA_CUDA_H

#include "../merge_job.h"

#include <cuda.h> /* types of the driver API; nothing is linked */
#include <cuda_runtime_api.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Instruction sets, weakest first. SMXX runs on every GPU from sm_80 on; the others on exactly the one they name. */
enum cuda_level { LEVEL_SMXX, LEVEL_SM90, NUM_LEVELS };

enum { CUDA_WARP = 32 };

/* ------------------------------------------------------------------------------------------------ prepared steps */

struct cuda_request {
    int64_t first_position;      /* of first_row; can be negative */
    int32_t first_row, num_rows; /* of the query tensors */
    int32_t kv_len;              /* clamped to 0..max_pages*128 */
    int32_t reserved;            /* records are loaded as a whole, so all their bytes are defined */
};

struct cuda_row {
    int32_t request;  /* -1: padding */
    int32_t position; /* cut to -1 .. MAX_POSITION */
};

struct cuda_tile {
    int32_t request, first_row, num_rows;
    int32_t first_position; /* of first_row, cut to +-MAX_POSITION: no row of the tile sees anything else for it */
};
enum { MAX_POSITION = 1 << 30 }; /* far above MSA_MAX_KV_LEN */

/* A part of the list of all tiles' history pages: `pages` of them from `first_page` of tile number `index` on, and so
 * on in the tiles behind it. ids: its first physical pages, as far as they are that tile's, then -1, so that copies
 * start before the page table is seen. */
struct cuda_extent {
    struct cuda_tile tile;
    int32_t index, first_page, pages, reserved;
};
enum { CUDA_PART_IDS = 8 };
struct cuda_part {
    struct cuda_extent all;
    int32_t ids[CUDA_PART_IDS];
};

/* Of a plan's error: each block of prepare's first launch writes its own, so that none must be cleared before. Launches
 * behind it add bits to the first, by atomicOr; all together are the error. */
enum { CUDA_ERROR_WORDS = 128 };

/* A page that a row sees. The physical page is what the table says; `run` knows the cache's size and checks it. */
struct cuda_page {
    int32_t logical, physical; /* -1, -1: none */
};

/* A prepared step, passed to kernels by value. */
struct cuda_step {
    /* Host numbers. */
    int32_t batch, total_q, max_pages, max_kv_len;
    int32_t query_tile;    /* queries of a tile; 0: no tiles are made */
    int32_t num_tiles;     /* slots: total_q/query_tile + batch, as each request can end in a partial tile */
    int32_t lists, topk;   /* attention; 0 lists: index */
    int32_t num_parts;     /* of equal length, that the history pages are cut into; 0: they are not */
    bool dependent_launch; /* the device can start a launch before the one ahead of it has ended (sm_90 and later) */
    bool long_first;       /* tiles with more rows come earlier, if the step is a small one */
    /* The caller's arrays. */
    const int32_t *cu_seqlens_q, *kv_lens, *cu_seqlens_k, *page_table, *list;
    int64_t page_table_stride, list_head_stride, list_row_stride; /* bytes */
    /* Prepared, in the workspace. */
    struct cuda_request *requests;
    int32_t *row_end; /* [batch] the first row past the requests 0..b: ascending, so a row's request is found in it */
    struct cuda_row *rows;
    int32_t *first_tile; /* [batch + 1] tiles before each request */
    struct cuda_tile *tiles;
    int64_t *first_step;
    struct cuda_part *parts;
    int64_t *before; /* [num_tiles] with parts: history pages before each tile */
    struct cuda_page *pages;
    uint32_t *error; /* [CUDA_ERROR_WORDS] */
};

/* cuTensorMapEncodeTiled, which describes a tensor to Hopper's copies; a host function that needs no device. */
typedef CUresult cuda_encode_tensor_fn(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *tensor,
                                       const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill);

typedef cudaError_t cuda_prepare_fn(const struct cuda_step *step, cudaStream_t stream);

/* ------------------------------------------------------------------------------------------------ attention */

/* Format families: rows and columns of the kernel table. Every pair of msa.h has a slot. */
enum cuda_query { QUERY_E4M3, QUERY_BF16, QUERY_FP16, NUM_QUERIES };
enum cuda_kv { KV_HALF, KV_E4M3, KV_NVFP4, NUM_KVS }; /* KV_HALF: the query's own 16-bit type */

/* Where results go. Splits are parts of a row's pages; an unsplit run has one. */
struct cuda_result {
    msa_dtype dtype; /* BF16, FP16; F32 inside the library */
    void *out;
    int64_t out_split_stride, out_row_stride, out_head_stride;
    float *lse; /* or NULL */
    int64_t lse_split_stride, lse_row_stride, lse_head_stride;
    int64_t sum_offset; /* 0, or: maxima and sums in place of LSEs, as in struct cuda_merge */
    int32_t
        *counts; /* [total_q, kv_heads] splits in use, or NULL. Splits past it are not written; without counts an empty
                        row gets out 0 and lse -inf */
    int64_t counts_row_stride, counts_head_stride;
};

/* A merge of the caller's states, or of a kernel's own splits.
 * rows          leaves out padding rows, or NULL
 * sum_offset    0, or: where a state's lse would be lies its maximum, in log2 units, and this many bytes behind it the
 *               sum relative to that (for huge logits an LSE cannot hold both). A NaN sum comes with a NaN maximum
 * divides       with sum_offset: a state's out is not yet divided by its sum, and
 * log2_one      sums count a term of 1 as 2^log2_one, as exp2_approx has it,
 * factor        NULL, or: what results are multiplied with, one a KV head, factor_stride bytes apart; and
 * global_factor NULL, or: [1] the same for all
 * blocked       states' outs lie in blocks of PARTIAL_BLOCK heads of the flat list (the last one is there in full): 64
 *               bytes of each head, then the next 64 of each
 * turned        with blocked: of 64 bytes, word 4t + j is what belongs at word 4j + t (words of two elements)
 * requests      NULL, or [2] on the device: only the rows of requests from the first to before the second; with it go
 *               counts that are negative, which leave a row and KV head as they are, and
 * work          [1] on the device: 0: no row is to be merged; written before the launch ahead began
 * after_kernel  the launch ahead on the stream wrote the states and lets its dependents start early; wait on the
 *               device */
enum { PARTIAL_BLOCK = 16 };
struct cuda_merge {
    struct merge_job job;
    const struct cuda_row *rows;
    int64_t sum_offset;
    bool divides, blocked, turned;
    float log2_one;
    const float *factor, *global_factor;
    int64_t factor_stride;
    const int32_t *requests;
    const uint32_t *work;
    bool after_kernel;
};
typedef cudaError_t cuda_merge_fn(const struct cuda_merge *merge, cudaStream_t stream);

/* One prefill or decode plan with its step and tensors, passed to kernels by value. */
struct cuda_attention {
    struct cuda_step step;
    msa_attention_desc desc; /* out_dtype and num_lists resolved */
    msa_attention_args args; /* `run` only; strides resolved. Results go where `result` says */
    struct cuda_result result;
    int32_t ratio; /* query heads a KV head */
    int32_t num_sms;
    bool decode;
    bool dependent_launch; /* the device can start a launch before the one ahead of it has ended (sm_90 and later) */
    cuda_merge_fn *merge;  /* for kernels that merge their own splits */
    cuda_encode_tensor_fn *encode_tensor;
    /* What the kernel's plan chooses; before it: itself, one split, query-major, exact; query_tile 0 in the step. */
    const struct cuda_attention_kernel *kernel; /* that prepares and runs, if it is not the one that planned */
    int32_t num_splits, pages_per_split;
    size_t memory_bytes;
    const char *strategy; /* for msa_plan_info */
    msa_precision precision;
    bool merges_itself; /* the splits, without `merge` */
    void *memory;       /* device */
};

struct cuda_attention_kernel {
    /* Fills step.query_tile and the choices above from desc, capacities (max_*) and the device. False where desc forces
     * a strategy that the kernel lacks. Plans with desc.partials hold one page a split and write to job->result. */
    bool (*plan)(struct cuda_attention *job);
    cudaError_t (*prepare)(const struct cuda_attention *job,
                           cudaStream_t stream); /* NULL: the common prepare is enough */
    cudaError_t (*run)(const struct cuda_attention *job, cudaStream_t stream);
};

/* ------------------------------------------------------------------------------------------------ index, top-k */

enum cuda_index_format { INDEX_BF16, INDEX_E4M3, INDEX_NVFP4, NUM_INDEX_FORMATS };

struct cuda_index {
    struct cuda_step step;
    msa_index_desc desc;
    msa_index_args args; /* strides resolved; scores are never NULL: the caller's, or the workspace's */
    int32_t num_sms;
    cuda_encode_tensor_fn *encode_tensor;
    size_t memory_bytes; /* the kernel's own memory, as its plan chose */
    void *memory;        /* device */
};
typedef cudaError_t cuda_index_fn(const struct cuda_index *job, cudaStream_t stream);

struct cuda_index_kernel {
    void (*plan)(struct cuda_index *job);  /* fills step.query_tile (queries, all heads each), step.num_parts and
                                              memory_bytes */
    void (*begin)(struct cuda_index *job); /* NULL, or: sets step.query_tile anew by a step's host numbers, at least
                                              the plan's */
    bool fast;                             /* has a `fast` precision for FP8 and NVFP4 keys */
    cuda_index_fn *prepare;                /* cuts the tiles into work; NULL: by step.first_step or step.parts */
    cuda_index_fn *run;                    /* writes scores, nothing else */
};

/* Selection from scores. Pages of a row come from `rows` (planned) or from args.valid_pages (stateless). */
struct cuda_topk {
    msa_topk_args args;          /* strides resolved */
    const struct cuda_row *rows; /* or NULL */
    int32_t *num_valid_pages;    /* or NULL */
    bool after_kernel;           /* as in struct cuda_merge */
};
typedef cudaError_t cuda_topk_fn(const struct cuda_topk *job, cudaStream_t stream);

/* ------------------------------------------------------------------------------------------------ rows */

typedef cudaError_t cuda_quantise_fn(const msa_quantise_args *args, cudaStream_t stream);
typedef cudaError_t cuda_convert_fn(const msa_convert_args *args, cudaStream_t stream);
typedef cudaError_t cuda_cache_write_fn(const msa_cache_write_args *args, cudaStream_t stream);

/* ------------------------------------------------------------------------------------------------ the table */

/* The architecture that the loaded image of the SMXX kernels was compiled for (90 for sm_90a), without a launch. */
cudaError_t image_version_smxx(int *version);

struct cuda_kernels {
    cuda_prepare_fn *prepare;
    const struct cuda_attention_kernel *prefill[NUM_QUERIES][NUM_KVS], *decode[NUM_QUERIES][NUM_KVS];
    const struct cuda_index_kernel *index_prefill[NUM_INDEX_FORMATS], *index_decode[NUM_INDEX_FORMATS];
    cuda_topk_fn *topk;
    cuda_merge_fn *merge;
    cuda_quantise_fn *quantise;
    cuda_convert_fn *convert;
    cuda_cache_write_fn *cache_write;
};

/* Some kernels serve several slots, so a declaration can repeat. */
#define MSA_CUDA_KERNEL(level, type, slot, symbol, operation, formats) extern type symbol;
#include "../kernels.inc"

#ifdef __cplusplus
}
#endif
#endif
