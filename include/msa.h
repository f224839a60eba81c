/* SPDX-License-Identifier: MIT
 *
 * msa.h - MiniMax Sparse Attention (MSA): the one public header.
 *
 * The job, per layer of a model:
 *   1. index      score[h][i][p] = max over the 128 tokens of page p of dot(index_q[i][h], index_k[token])
 *   2. selection  per query, its own page and the best history pages, k in all (top-k)
 *   3. attention  exact softmax attention over the visible keys of the selected pages (prefill, decode)
 *   4. combine    merge of partial results by log-sum-exp
 *
 * Call order of a planned operation (index_prefill, index_decode, prefill, decode):
 *   msa_<op>_plan     host work: checks the description, picks kernels, fixes sizes. All that can be refused about
 *                     shapes and formats is refused here.
 *   msa_<op>_prepare  this step's lengths, page table and selection.
 *   msa_<op>_run      the tensors.
 * `prepare` and `run` never allocate, never wait for the device, never read device data on the host and never read the
 * environment. On a CUDA context both are asynchronous and can be captured in a CUDA graph, once; the graph is then
 * replayed with lengths, tables, lists and tensors changed in place. On a CPU context they return when the work is
 * done.
 *
 * Conventions of this header
 * - Shapes are written outermost axis first. The innermost axis is always dense; every other axis has a stride field,
 *   in BYTES. MSA_DENSE (what the INIT macros put there) means dense: the next inner axis' extent times its stride. A
 *   stride whose axis has extent <= 1 is not looked at. Negative strides are refused; 0 is allowed for inputs
 *   (broadcast).
 * - Alignment: base and used strides of q, k, v, index_q, index_k, o_partial and out (merge's states' too) are
 *   multiples of 16 bytes; block scales of caches of 8; the workspace of 256; everything else of its element size.
 * - Memory is the caller's: no pointer is kept after the work that used it has finished. Buffers named in a step are
 *   read by `prepare` and again by the runs that follow it. Outputs overlap nothing: strides that make an output
 *   overlap itself are refused; overlap between different buffers is the caller's duty and is not looked for. On a CUDA
 *   context every tensor pointer is a device pointer unless its comment says "host"; on a CPU context every pointer is
 *   a host pointer.
 * - Any physical page may serve any number of table slots and requests.
 * - Sums are FP32. One that overflows counts as an infinity, finite inputs or not: outputs and LSEs it enters are NaN.
 * - Every function that returns msa_status leaves a message for MSA_SUCCESS-unequal results in msa_last_error(), which
 *   names the argument, its value and the rule. Nothing is written before all arguments have passed.
 * - VALUES INSIDE TENSORS never give a status: bad lengths, list ids or physical pages are masked and reported as a bit
 *   of the plan's error word (msa_plan_error).
 * - Determinism: the bits of a row depend only on its own request (queries, lists, lengths, pages), the plan and the
 *   build; not on other requests, the batch slot, the thread count or the replay.
 * - Threads: a context may be used from several threads at once; a plan by one thread at a time. Two plans share no
 *   state.
 * - The library never prints, exits, aborts, or changes the caller's current CUDA device.
 * - Structs grow at their end. `size` tells which version the caller was compiled with; use the INIT macros. A newer
 *   caller's struct is taken as long as the fields this library does not know are zero.
 * - A refused call changes nothing: after a refused `prepare` the last successful one stays in force; what a create or
 *   plan call would have made is NULL.
 * - The stream is the last argument: a cudaStream_t (NULL: the legacy default stream). A CPU context ignores it.
 */
#ifndef MSA_H
#define MSA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) && !defined(MSA_API)
#define MSA_API __attribute__((visibility("default")))
#elif !defined(MSA_API)
#define MSA_API
#endif

#define MSA_VERSION_MAJOR 0
#define MSA_VERSION_MINOR 1
#define MSA_VERSION_PATCH 0

#define MSA_PAGE_SIZE 128          /* keys a page */
#define MSA_HEAD_DIM 128           /* elements a head, for q, k, v, index_q and index_k */
#define MSA_MAX_TOPK 32            /* most pages a query may attend to; 16 is the tuned case */
#define MSA_MAX_GQA_RATIO 16       /* most query heads that share one KV head */
#define MSA_MAX_SPLITS 32          /* most partial results that combine and merge take */
#define MSA_MAX_KV_LEN 1048576     /* most keys of a request (8192 pages) */
#define MSA_DENSE INT64_MIN        /* stride value: the next inner axis' extent times its stride */
#define MSA_DEFAULT_SM_SCALE 0.08838834764831845f /* 1/sqrt(128) */

/* -------------------------------------------------------------------------------------------- statuses and messages */

/* X(name, value, text): the one list of statuses. */
#define MSA_STATUS_LIST(X)                                                                          \
    X(MSA_SUCCESS, 0, "success")                                                                    \
    X(MSA_ERROR_INVALID_ARGUMENT, 1, "an argument breaks a rule of msa.h")                          \
    X(MSA_ERROR_UNSUPPORTED, 2, "no kernel for this combination on this device")                    \
    X(MSA_ERROR_OUT_OF_MEMORY, 3, "out of memory")                                                  \
    X(MSA_ERROR_NOT_PREPARED, 4, "run was called before a successful prepare")                      \
    X(MSA_ERROR_NO_DEVICE, 5, "the CUDA device, its driver or the CUDA backend is not there")       \
    X(MSA_ERROR_NO_KERNEL_IMAGE, 6, "the library holds no kernel image for this GPU architecture")  \
    X(MSA_ERROR_CUDA, 7, "a CUDA call failed")                                                      \
    X(MSA_ERROR_CALLBACK, 8, "a callback of the caller returned an error")

typedef enum msa_status {
#define MSA_STATUS_ENUM(name, value, text) name = value,
    MSA_STATUS_LIST(MSA_STATUS_ENUM)
#undef MSA_STATUS_ENUM
} msa_status;

/* Fixed text of a status; "unknown status" for any other number. Never NULL. */
MSA_API const char *msa_status_string(msa_status status);
/* The calling thread's message of its last call that did not return MSA_SUCCESS; "" before the first. Valid until the
 * thread's next such call. Never NULL. */
MSA_API const char *msa_last_error(void);
/* "0.1.0": the version of the library that is loaded (the macros above: of the header compiled against). */
MSA_API const char *msa_version(void);

/* ------------------------------------------------------------------------------------------------ types */

typedef enum msa_dtype {
    MSA_DTYPE_DEFAULT = 0, /* only for out_dtype: BF16, or FP16 when q is FP16 */
    MSA_F32 = 1,
    MSA_BF16 = 2,
    MSA_FP16 = 3,
    MSA_E4M3 = 4,  /* FP8 E4M3 (finite, "fn"): 0x7F and 0xFF are NaN, largest value 448 */
    MSA_NVFP4 = 5, /* E2M1 codes, two a byte, even element in the low nibble, with one E4M3 scale per 16 elements */
    MSA_E5M2 = 6,  /* named so that it can be refused by name; nothing takes it */
} msa_dtype;

typedef enum msa_precision {
    MSA_PRECISION_EXACT = 0, /* QK products exact, FP32 accumulation */
    MSA_PRECISION_FAST = 1,  /* a CUDA device may accumulate QK in FP8 tensor cores, which drop what lies below 2^-13 of
                                a sum's largest term. Attention: LSE within 1e-2, outputs within 3e-2 + 3e-2|x|. Index
                                scores: meant to be within 1e-3 + 1e-3|x|; Hopper's sums miss that for some data (1.6
                                times it on N(0,1) with NVFP4 keys, 9 times where most products are negative), and
                                always keep within 2^-9 * sum|q*k|. msa_plan_get_info tells what is computed; a CPU
                                computes `exact`, and so does index_decode */
} msa_precision;

typedef enum msa_strategy {
    MSA_STRATEGY_AUTO = 0,
    MSA_STRATEGY_QUERY_MAJOR = 1, /* walk the union of a query tile's pages, accumulators on chip */
    MSA_STRATEGY_PAGE_MAJOR = 2,  /* walk pages, write partials in BF16, combine; CUDA, prefill only. AUTO takes it for
                                     tiles whose queries share few pages; msa_plan_get_info tells whether a plan has the
                                     choice */
} msa_strategy;

/* Order of the 1024 block scales of one (page, head) of V in NVFP4. */
typedef enum msa_scale_order {
    MSA_SCALE_LINEAR = 0, /* token*8 + g                    (g: which 16 head-dim elements) */
    MSA_SCALE_QUAD = 1,   /* (token/4)*32 + g*4 + token%4 */
} msa_scale_order;

/* Order of the ids in a row of `topk`. Unused slots are -1, at the end, in both. */
typedef enum msa_topk_order {
    MSA_TOPK_ORDER_PAGE = 0,  /* ascending page ids */
    MSA_TOPK_ORDER_SCORE = 1, /* forced first pages ascending, chosen pages by falling score, forced last pages
                                 ascending */
} msa_topk_order;

/* Bits of a plan's error word. */
enum {
    MSA_ERROR_BIT_LIST_ID = 1,  /* a list id outside [-1, max_pages) */
    MSA_ERROR_BIT_PAGE_ID = 2,  /* a physical page outside [0, num_pages) was named for a visible page */
    MSA_ERROR_BIT_LENGTHS = 4,  /* lengths negative, falling, past total_q, or not from 0 (cu_seqlens_*) */
    MSA_ERROR_BIT_CAPACITY = 8, /* a kv length above the plan's max_kv_len */
};

typedef struct CUstream_st *msa_stream; /* = cudaStream_t, without CUDA headers */
typedef struct msa_context msa_context;
typedef struct msa_plan msa_plan;
typedef struct msa_workspace msa_workspace;

/* ------------------------------------------------------------------------------------------------ contexts */

#define MSA_DEVICE_CPU (-1)

/* Caller-lent threads: call task(arg, i, thread) once for every i in [0, n), in any order, concurrently if liked, with
 * thread in [0, num_threads) never the same for two calls in flight; return when all are done. 0: done; anything else
 * is reported as MSA_ERROR_CALLBACK. */
typedef int msa_parallel_for_fn(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg);
/* Host allocator for contexts, plans and CPU workspaces: malloc/free semantics; alignment as malloc. */
typedef void *msa_alloc_fn(void *data, size_t bytes);
typedef void msa_free_fn(void *data, void *pointer);
/* One line of text, without newline, about a decision (the kernels of a new plan). Called in the thread of the call. */
typedef void msa_log_fn(void *data, const char *line);

typedef struct msa_context_options {
    size_t size;
    int32_t device;      /* MSA_DEVICE_CPU, or a CUDA ordinal >= 0 */
    int32_t num_threads; /* CPU: threads to use, 1..1024; 0: what OpenMP would (with parallel_for: must be given) */
    const char *isa;     /* CPU: cap on the instruction set: "c", "avx2", "avx512", "avx512bf16", "amx", "neon"; NULL:
                            the environment variable MSA_ISA, and without it (or empty) the fastest level of this
                            machine, which is amx where the system permits it; else, on Intel, avx512 even where
                            avx512bf16 exists. amx adds in another order: its bits differ from the others'. To take it
                            asks Linux for the process's permission to use tile registers, after which signal stacks
                            (sigaltstack) of less than getauxval(AT_MINSIGSTKSZ) bytes, about 11 KB, are refused;
                            where such a stack exists, the level is not taken. Any other cap asks for nothing */
    msa_parallel_for_fn *parallel_for; /* NULL: OpenMP */
    void *parallel_for_data;
    msa_alloc_fn *alloc; /* both NULL: malloc and free */
    msa_free_fn *free;
    void *alloc_data;
    msa_log_fn *log; /* NULL: none */
    void *log_data;
} msa_context_options;
#define MSA_CONTEXT_OPTIONS_INIT \
    {sizeof(msa_context_options), MSA_DEVICE_CPU, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/* Makes a context. options NULL: all defaults (CPU). *context is NULL on failure. The environment is read here and
 * nowhere else. MSA_ERROR_NO_DEVICE, MSA_ERROR_NO_KERNEL_IMAGE for CUDA ordinals that cannot serve;
 * MSA_ERROR_UNSUPPORTED for an instruction set this machine lacks. */
MSA_API msa_status msa_context_create(const msa_context_options *options, msa_context **context);
/* NULL is fine. Plans and workspaces made from the context stay usable: the memory goes with the last of them. */
MSA_API void msa_context_destroy(msa_context *context);

typedef struct msa_context_info {
    size_t size;
    int32_t device;
    int32_t num_threads;
    int32_t compute_capability; /* CUDA: 90 for 9.0; CPU: 0 */
    const char *isa;            /* CPU: the level in use; CUDA: the image in use ("sm_90a"); lives as long as the
                                   context */
    const char *device_name;    /* lives as long as the context */
} msa_context_info;
#define MSA_CONTEXT_INFO_INIT {sizeof(msa_context_info), 0, 0, 0, NULL, NULL}
MSA_API msa_status msa_context_get_info(const msa_context *context, msa_context_info *info);

/* The list of kernels that this build holds (for tools and the support matrix). */
typedef struct msa_kernel_info {
    size_t size;
    const char *name;      /* the function: one file of src/ defines it */
    const char *operation; /* "attention", "index", "topk", ... */
    const char *formats;   /* what it takes, e.g. "q8kv4" */
    const char *isa;       /* "c", "avx2", ..., "sm_90a" */
    int32_t available;     /* 1: the context's device can run it (and the cap allows it) */
} msa_kernel_info;
#define MSA_KERNEL_INFO_INIT {sizeof(msa_kernel_info), NULL, NULL, NULL, NULL, 0}
/* Entry `index` of the list; context NULL: `available` is 0 throughout. MSA_ERROR_INVALID_ARGUMENT past the end. */
MSA_API msa_status msa_kernel_get(const msa_context *context, size_t index, msa_kernel_info *info);

/* ------------------------------------------------------------------------------------------------ workspaces */

/* A workspace is plain memory of the caller on the context's device, 256-byte aligned; its contents before a call do
 * not matter. This object is a convenience that allocates one. Plans may share a workspace if each finishes prepare and
 * its runs before the next one's prepare. */
MSA_API msa_status msa_workspace_create(msa_context *context, size_t bytes, msa_workspace **workspace);
/* Grows it to at least `bytes` (contents are lost, and the address may change); never shrinks. */
MSA_API msa_status msa_workspace_reserve(msa_workspace *workspace, size_t bytes);
MSA_API void *msa_workspace_data(const msa_workspace *workspace);  /* 256-byte aligned; NULL if its size is 0 */
MSA_API size_t msa_workspace_bytes(const msa_workspace *workspace); /* 0 for NULL */
MSA_API void msa_workspace_destroy(msa_workspace *workspace);       /* NULL is fine */

/* ------------------------------------------------------------------------------------------------ plans */

typedef struct msa_plan_info {
    size_t size;
    const char *operation; /* "index_prefill", "index_decode", "prefill", "decode" */
    const char *kernel;    /* the main kernel, e.g. "attention_avx512bf16" */
    const char *kernels;   /* all kernels, main one first, separated by ", " */
    const char *strategy;  /* "query-major", "page-major", "auto" (chosen on the device, per tile) */
    const char *precision; /* "exact" or "fast": what is computed */
    int32_t num_splits;    /* parts a row is split into to fill the device; fixed by the plan's capacity */
    int32_t query_tile;    /* queries that share one pass over their pages */
    int32_t max_pages;     /* ceil(max_kv_len/128): columns that tables and scores must have */
    size_t workspace_bytes;
} msa_plan_info;
#define MSA_PLAN_INFO_INIT {sizeof(msa_plan_info), NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0}
/* The strings live as long as the plan. */
MSA_API msa_status msa_plan_get_info(const msa_plan *plan, msa_plan_info *info);
/* Bytes of workspace that every step within the plan's capacity needs (0 is possible). 0 for NULL. Grows with every
 * capacity, and with topk but in prefill on a GPU; on a CPU the size for prefill depends on threads and tile only, not
 * on max_total_q or max_kv_len. On a GPU an index plan whose outputs lack MSA_INDEX_SCORES keeps the scores of a whole
 * step there: 4*H*max_total_q*max_pages bytes (8192 queries over 1M tokens, 4 heads: 1 GiB). Where that is too much,
 * plan for fewer rows and run a step in parts. A prefill plan on a GPU has up to 768 MiB for converted pages and, if it
 * may go page-major, up to 1.03 GiB for partials and 1/topk GiB for queries (E4M3: half of that); plans with
 * MSA_STRATEGY_QUERY_MAJOR need neither. */
MSA_API size_t msa_plan_workspace(const msa_plan *plan);
/* Waits for the stream's work and reads the error word (MSA_ERROR_BIT_*). `prepare` clears it, it and `run` set it. A
 * step with batch = 0 or total_q = 0 reads no lengths, so it sets no bit. */
MSA_API msa_status msa_plan_error(msa_plan *plan, uint32_t *bits, msa_stream stream);
/* NULL is fine. CUDA: the plan's work must have finished. */
MSA_API void msa_plan_destroy(msa_plan *plan);

/* This step's requests. B = batch, T = total_q, P = the plan's max_pages.
 * Request b owns the query rows cu_seqlens_q[b] .. cu_seqlens_q[b+1]-1 (L of them) and n = kv_lens[b] keys, INCLUDING
 * the new ones. Its i-th query sits at position n - L + i and sees the positions <= its own (causal, bottom-right). A
 * row at a negative position sees nothing: out 0, lse -inf, list -1, scores untouched. Rows at or past cu_seqlens_q[B]
 * are padding: neither read nor written. Pad a batch with requests of L = 0 or n = 0. */
typedef struct msa_step {
    size_t size;
    int32_t batch;                /* B, host number, 0..the plan's max_batch */
    int64_t total_q;              /* T, rows of the query and output tensors, 0..the plan's max_total_q */
    const int32_t *cu_seqlens_q;  /* [B+1], first element 0 */
    const int32_t *kv_lens;       /* [B]; or NULL and cu_seqlens_k */
    const int32_t *cu_seqlens_k;  /* [B+1], differences are the kv lengths; not together with kv_lens */
    const int32_t *page_table;    /* [B, P], logical -> physical page; entries past a request's pages are never read */
    int64_t page_table_stride;    /* between requests; at least 4*P, or 0: one table for all */
    const int32_t *topk;          /* attention only: [lists, T, k] logical page ids, -1 = none; holes, any order and
                                     repeated ids are legal (a repeated page counts once); ids of pages that the row
                                     cannot see contribute nothing. KV head j uses list j/(num_kv_heads/lists) */
    int64_t topk_head_stride;     /* between lists ([T, lists, k] layout by strides) */
    int64_t topk_row_stride;      /* between rows */
    void *workspace;              /* msa_plan_workspace() bytes on the plan's device, used until the last run of this
                                     step */
    size_t workspace_bytes;
} msa_step;
#define MSA_STEP_INIT {sizeof(msa_step), 0, 0, NULL, NULL, NULL, NULL, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, NULL, 0}

/* ---------------------------------------------------------------------------------------- index (scores, selection) */

enum {
    MSA_INDEX_SCORES = 1,    /* write scores */
    MSA_INDEX_SELECTION = 2, /* write topk (and num_valid_pages where given) */
};

typedef struct msa_index_desc {
    size_t size;
    msa_dtype q_dtype;       /* MSA_E4M3 with E4M3 or NVFP4 keys; MSA_BF16 with BF16 keys */
    msa_dtype k_dtype;
    int32_t num_index_heads; /* H, 1..64; all heads share one index-K head */
    int32_t head_dim;        /* 128 */
    int32_t page_size;       /* 128 */
    int32_t causal;          /* 1 */
    int32_t topk;            /* k, 1..32 */
    int32_t init_pages;      /* forced first pages, >= 0 */
    int32_t local_pages;     /* forced last pages, >= 1 (the query's own page is one); init_pages + local_pages <= k */
    msa_topk_order topk_order;
    msa_precision precision;
    int32_t outputs;         /* MSA_INDEX_SCORES | MSA_INDEX_SELECTION */
    int32_t max_batch;       /* capacities of a step; 1..2^31-2. A CPU plan allocates 48 bytes for each request (CUDA
                                has them in the workspace), which take memory once steps use them */
    int64_t max_total_q;     /* 1..2^31-1 */
    int64_t max_kv_len;      /* 1..MSA_MAX_KV_LEN */
} msa_index_desc;
#define MSA_INDEX_DESC_INIT                                                                                        \
    {sizeof(msa_index_desc), MSA_E4M3, MSA_E4M3, 1, MSA_HEAD_DIM, MSA_PAGE_SIZE, 1, 16, 0, 1, MSA_TOPK_ORDER_PAGE, \
     MSA_PRECISION_EXACT, MSA_INDEX_SCORES | MSA_INDEX_SELECTION, 1, 1, 1}

/* Selection rules. A row at position pos has n = pos/128 + 1 candidate pages, at most max_pages: its own page n-1 and
 * the history pages before it. Larger score first, +0 equals -0, ties to the lower page id, NaN below every number. A
 * history page whose score is -inf is listed only if forced; one that lies outside the cache scores -inf. All
 * candidates are listed when they fit. Forced pages are listed whatever their score, each once, as many as exist. */
typedef struct msa_index_args {
    size_t size;
    const void *index_q;           /* [T, H, 128] */
    int64_t index_q_row_stride, index_q_head_stride;
    const void *index_k;           /* [num_pages, 128, 128]; NVFP4 codes [num_pages, 128, 64] */
    int64_t index_k_page_stride, index_k_token_stride;
    const void *index_k_scale;     /* NVFP4 only: E4M3 [num_pages, 128, 8] */
    int64_t index_k_scale_page_stride, index_k_scale_token_stride;
    int64_t num_pages;             /* physical pages of index_k, 0..2^31-1 */
    float *scores;                 /* FP32 [H, T, P], if planned, else NULL. Element (h,i,p) is written for exactly the
                                      history pages p < pos/128; everything else keeps its bits */
    int64_t scores_head_stride, scores_row_stride; /* any nesting, e.g. [T, H, P]; pitch >= 4*P */
    int32_t *topk;                 /* [H, T, k], if planned, else NULL */
    int64_t topk_head_stride, topk_row_stride;
    int32_t *num_valid_pages;      /* [T], optional, NULL unless topk is planned: n of each row; 0 at a negative
                                      position */
} msa_index_args;
#define MSA_INDEX_ARGS_INIT                                                                                         \
    {sizeof(msa_index_args), NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, 0, \
     NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, NULL}

/* index_prefill is for many queries per request, index_decode for few; both take any lengths, and in `exact` give the
 * same bits. */
MSA_API msa_status msa_index_prefill_plan(msa_context *context, const msa_index_desc *desc, msa_plan **plan);
MSA_API msa_status msa_index_prefill_prepare(msa_plan *plan, const msa_step *step, msa_stream stream);
MSA_API msa_status msa_index_prefill_run(msa_plan *plan, const msa_index_args *args, msa_stream stream);
MSA_API msa_status msa_index_decode_plan(msa_context *context, const msa_index_desc *desc, msa_plan **plan);
MSA_API msa_status msa_index_decode_prepare(msa_plan *plan, const msa_step *step, msa_stream stream);
MSA_API msa_status msa_index_decode_run(msa_plan *plan, const msa_index_args *args, msa_stream stream);

/* -------------------------------------------------------------------------------------- attention (prefill, decode) */

typedef struct msa_attention_desc {
    size_t size;
    msa_dtype q_dtype;         /* E4M3 with E4M3 or NVFP4 K/V; BF16 with BF16, E4M3, NVFP4;
                                  FP16 with FP16, E4M3, NVFP4 */
    msa_dtype kv_dtype;
    msa_dtype out_dtype;       /* BF16, FP16 or MSA_DTYPE_DEFAULT */
    int32_t num_q_heads;       /* Hq, a multiple of num_kv_heads, at most 16 times it; query head h uses KV head
                                  h/(Hq/Hkv) */
    int32_t num_kv_heads;      /* Hkv, 1..1024 */
    int32_t num_lists;         /* lists a row of `topk`: a divisor of num_kv_heads (the index heads); 0: num_kv_heads */
    int32_t head_dim;          /* 128 */
    int32_t page_size;         /* 128 */
    int32_t causal;            /* 1 */
    int32_t topk;              /* k, 1..32: ids a list */
    float sm_scale;            /* logits = sm_scale * q_descale * k_descale (or k_global_scale) * dot(q, k);
                                  finite, > 0 */
    msa_precision precision;
    msa_strategy strategy;
    msa_scale_order v_scale_order; /* NVFP4 only */
    int32_t partials;          /* 0: run writes out and lse. 1: run writes o_partial, lse_partial and split_counts */
    int32_t max_batch;         /* capacities of a step; 1..2^31-2; see msa_index_desc */
    int64_t max_total_q;       /* 1..2^31-1 */
    int64_t max_kv_len;        /* 1..MSA_MAX_KV_LEN */
} msa_attention_desc;
#define MSA_ATTENTION_DESC_INIT                                                                                      \
    {sizeof(msa_attention_desc), MSA_E4M3, MSA_E4M3, MSA_DTYPE_DEFAULT, 64, 4, 0, MSA_HEAD_DIM, MSA_PAGE_SIZE, 1, 16, \
     MSA_DEFAULT_SM_SCALE, MSA_PRECISION_EXACT, MSA_STRATEGY_AUTO, MSA_SCALE_LINEAR, 0, 1, 1, 1}

/* K and V. A cache where both lie in one allocation is reached by strides: [pages, Hkv, 128, 2*128] (token stride of
 * two rows, v = k + one row), [pages, 2, 128, Hkv, 128] (token stride Hkv rows, head stride one row), or NVFP4 slots
 * [pages, 2*Hkv, 128, 72] (slot 2h is K of head h, 2h+1 its V; each slot 8192 bytes of codes, then 1024 of scales). */
typedef struct msa_attention_args {
    size_t size;
    const void *q;             /* [T, Hq, 128] */
    int64_t q_row_stride, q_head_stride;
    const void *k;             /* [num_pages, Hkv, 128, 128]; NVFP4 codes [num_pages, Hkv, 128, 64] */
    int64_t k_page_stride, k_head_stride, k_token_stride;
    const void *v;             /* as k */
    int64_t v_page_stride, v_head_stride, v_token_stride;
    const void *k_scale;       /* NVFP4 only: E4M3 [num_pages, Hkv, 128, 8] */
    int64_t k_scale_page_stride, k_scale_head_stride, k_scale_token_stride;
    const void *v_scale;       /* NVFP4 only: as k_scale; in quad order its 1024 bytes a (page, head) are dense and
                                  v_scale_token_stride is not looked at */
    int64_t v_scale_page_stride, v_scale_head_stride, v_scale_token_stride;
    int64_t num_pages;         /* physical pages of the cache, 0..2^31-1 */
    const float *q_descale;    /* q E4M3 only, optional: [1] with stride 0 (dense default), or one a KV head */
    int64_t q_descale_stride;
    const float *k_descale;    /* K/V E4M3 only, optional; multiplies logits */
    int64_t k_descale_stride;
    const float *v_descale;    /* K/V E4M3 only, optional; multiplies outputs */
    int64_t v_descale_stride;
    const float *k_global_scale; /* NVFP4 only, optional: [1]; multiplies logits */
    const float *v_global_scale; /* NVFP4 only, optional: [1]; multiplies outputs */
    void *out;                 /* [T, Hq, 128] of out_dtype (plans without partials) */
    int64_t out_row_stride, out_head_stride;
    float *lse;                /* optional: FP32 [T, Hq], natural log of the sum over visible keys of exp(logit) */
    int64_t lse_row_stride, lse_head_stride;
    /* Plans with partials: split s of a row holds its s-th visible page (ascending ids), normalised by itself. */
    void *o_partial;           /* [topk, T, Hq, 128] of out_dtype */
    int64_t o_partial_split_stride, o_partial_row_stride, o_partial_head_stride;
    float *lse_partial;        /* FP32 [topk, T, Hq] */
    int64_t lse_partial_split_stride, lse_partial_row_stride, lse_partial_head_stride;
    int32_t *split_counts;     /* [T, Hkv]: visible pages of the row; splits past it are not written */
    int64_t split_counts_row_stride, split_counts_head_stride;
} msa_attention_args;
#define MSA_ATTENTION_ARGS_INIT                                                                          \
    {sizeof(msa_attention_args), NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE,       \
     NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE,                        \
     NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE, 0, NULL, MSA_DENSE, NULL, MSA_DENSE, NULL, MSA_DENSE,         \
     NULL, NULL, NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE,      \
     MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE}

/* prefill is for many queries per request, decode for few (1..16 new tokens); both take any lengths, and agree within
 * tolerance. The arithmetic: docs/kernels.md. */
MSA_API msa_status msa_prefill_plan(msa_context *context, const msa_attention_desc *desc, msa_plan **plan);
MSA_API msa_status msa_prefill_prepare(msa_plan *plan, const msa_step *step, msa_stream stream);
MSA_API msa_status msa_prefill_run(msa_plan *plan, const msa_attention_args *args, msa_stream stream);
MSA_API msa_status msa_decode_plan(msa_context *context, const msa_attention_desc *desc, msa_plan **plan);
MSA_API msa_status msa_decode_prepare(msa_plan *plan, const msa_step *step, msa_stream stream);
MSA_API msa_status msa_decode_run(msa_plan *plan, const msa_attention_args *args, msa_stream stream);

/* ------------------------------------------------------------------------------------------------ stateless calls */

/* Top-k over given scores, by the selection rules above. H = num_heads, R = rows, C = columns. */
typedef struct msa_topk_args {
    size_t size;
    const float *scores;         /* FP32 [H, R, C] */
    int64_t scores_head_stride, scores_row_stride;
    int32_t num_heads;           /* H, 1..1024 */
    int64_t rows;                /* R, 0..2^31-1 */
    int32_t columns;             /* C, 0..8192 */
    const int32_t *valid_pages;  /* [R]: n of each row, clamped to 0..C; page n-1 is the row's own; columns from n on
                                    are not read */
    int32_t k;                   /* 1..32 */
    int32_t init_pages;          /* >= 0 */
    int32_t local_pages;         /* >= 1; init_pages + local_pages <= k */
    msa_topk_order order;
    int32_t *topk;               /* [H, R, k] */
    int64_t topk_head_stride, topk_row_stride;
} msa_topk_args;
#define MSA_TOPK_ARGS_INIT \
    {sizeof(msa_topk_args), NULL, MSA_DENSE, MSA_DENSE, 1, 0, 0, NULL, 16, 0, 1, MSA_TOPK_ORDER_PAGE, NULL, \
     MSA_DENSE, MSA_DENSE}
MSA_API msa_status msa_topk(msa_context *context, const msa_topk_args *args, msa_stream stream);

/* Merges the splits of each row: lse = log(sum exp(lse_s)), out = sum exp(lse_s - lse) * o_s.
 * A split at or past its count, or with lse_s -inf or +inf, is empty: its o is never used, even if NaN. An lse_s of NaN
 * gives NaN. All empty: out 0, lse -inf. */
typedef struct msa_combine_args {
    size_t size;
    int32_t num_splits;        /* S, 1..32 */
    int64_t rows;              /* T, 0..2^31-1 */
    int32_t num_q_heads;       /* Hq, 1..16384 */
    int32_t num_kv_heads;      /* Hkv, a divisor of Hq (looked at for split_counts only) */
    msa_dtype o_partial_dtype; /* BF16 or FP16 */
    const void *o_partial;     /* [S, T, Hq, 128] */
    int64_t o_partial_split_stride, o_partial_row_stride, o_partial_head_stride;
    const float *lse_partial;  /* FP32 [S, T, Hq] */
    int64_t lse_partial_split_stride, lse_partial_row_stride, lse_partial_head_stride;
    const int32_t *split_counts; /* optional [T, Hkv]: splits in use; outside 0..S: clamped */
    int64_t split_counts_row_stride, split_counts_head_stride;
    msa_dtype out_dtype;       /* BF16, FP16, or MSA_DTYPE_DEFAULT: o_partial_dtype */
    void *out;                 /* [T, Hq, 128] */
    int64_t out_row_stride, out_head_stride;
    float *lse;                /* optional: FP32 [T, Hq] */
    int64_t lse_row_stride, lse_head_stride;
} msa_combine_args;
#define MSA_COMBINE_ARGS_INIT                                                                             \
    {sizeof(msa_combine_args), 1, 0, 1, 1, MSA_BF16, NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, \
     MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, MSA_DTYPE_DEFAULT, NULL, MSA_DENSE, MSA_DENSE, NULL,  \
     MSA_DENSE, MSA_DENSE}
MSA_API msa_status msa_combine(msa_context *context, const msa_combine_args *args, msa_stream stream);

/* The same for states that lie anywhere (of other ranks, or of attention over other keys). */
typedef struct msa_merge_state {
    const void *out;           /* [T, Hq, 128] */
    int64_t out_row_stride, out_head_stride;
    msa_dtype out_dtype;       /* BF16, FP16 or F32 */
    const float *lse;          /* FP32 [T, Hq] */
    int64_t lse_row_stride, lse_head_stride;
} msa_merge_state;
#define MSA_MERGE_STATE_INIT {NULL, MSA_DENSE, MSA_DENSE, MSA_BF16, NULL, MSA_DENSE, MSA_DENSE}
typedef struct msa_merge_args {
    size_t size;
    int32_t num_states;            /* 2..32 */
    const msa_merge_state *states; /* HOST array, copied by the call */
    int64_t rows;                  /* T, 0..2^31-1 */
    int32_t num_q_heads;           /* Hq, 1..16384 */
    msa_dtype out_dtype;           /* BF16, FP16 or F32; MSA_DTYPE_DEFAULT: that of states[0] */
    void *out;                     /* [T, Hq, 128]; overlaps no state */
    int64_t out_row_stride, out_head_stride;
    float *lse;                    /* optional: FP32 [T, Hq] */
    int64_t lse_row_stride, lse_head_stride;
} msa_merge_args;
#define MSA_MERGE_ARGS_INIT \
    {sizeof(msa_merge_args), 0, NULL, 0, 1, MSA_DTYPE_DEFAULT, NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE}
MSA_API msa_status msa_merge(msa_context *context, const msa_merge_args *args, msa_stream stream);

/* Number formats, row by row. R = rows, C = cols (a multiple of 16, >= 16, <= 2^20). NVFP4 rows are C/2 bytes of codes
 * and C/16 bytes of scales.
 *
 * quantise, from F32, BF16 or FP16 (all arithmetic in FP32 with IEEE division):
 *   E4M3   code = e4m3_rn_satfinite(x / descale)
 *   NVFP4  per 16 elements: s = e4m3_rn_satfinite((amax / g) / 6), code = e2m1_rn_satfinite((x / g) / s), g = global
 *          scale
 *          or 1. s = 0 gives codes 0; a NaN or Inf in the block gives scale 0x7F and codes 0.
 * convert, from E4M3 or NVFP4 to E4M3, BF16, FP16 or F32, and from BF16 or FP16 to itself or F32:
 *   NVFP4 -> E4M3         e4m3_rn_satfinite(code * scale); a NaN scale gives NaN (0x7F)
 *   everything else       exact (NVFP4 -> 16 bit: code * scale, which those hold exactly). Scales of whole tensors
 *                         are not applied.
 */
typedef struct msa_quantise_args {
    size_t size;
    int64_t rows, cols;
    msa_dtype src_dtype; /* F32, BF16, FP16 */
    const void *src;
    int64_t src_row_stride;
    msa_dtype dst_dtype; /* E4M3 or NVFP4 */
    void *dst;           /* [R, C] E4M3, or codes [R, C/2] */
    int64_t dst_row_stride;
    void *scale;         /* NVFP4: E4M3 [R, C/16] */
    int64_t scale_row_stride;
    const float *descale; /* E4M3: descale, NVFP4: global scale; [1], optional (1) */
} msa_quantise_args;
#define MSA_QUANTISE_ARGS_INIT \
    {sizeof(msa_quantise_args), 0, 0, MSA_BF16, NULL, MSA_DENSE, MSA_E4M3, NULL, MSA_DENSE, NULL, MSA_DENSE, NULL}
MSA_API msa_status msa_quantise(msa_context *context, const msa_quantise_args *args, msa_stream stream);

typedef struct msa_convert_args {
    size_t size;
    int64_t rows, cols;
    msa_dtype src_dtype;
    const void *src;
    int64_t src_row_stride;
    const void *scale; /* NVFP4: E4M3 [R, C/16] */
    int64_t scale_row_stride;
    msa_dtype dst_dtype;
    void *dst;
    int64_t dst_row_stride;
} msa_convert_args;
#define MSA_CONVERT_ARGS_INIT \
    {sizeof(msa_convert_args), 0, 0, MSA_NVFP4, NULL, MSA_DENSE, NULL, MSA_DENSE, MSA_E4M3, NULL, MSA_DENSE}
MSA_API msa_status msa_convert(msa_context *context, const msa_convert_args *args, msa_stream stream);

/* Appends new tokens' K, V and index-K to caches, by slot. N = tokens. Any of the three may be left out (source and
 * cache both NULL). A slot is physical page*128 + offset; negative, or at or past num_pages*128: that token is skipped.
 * A slot that is given twice holds the later token's value on a CPU; on a GPU each of its bytes is one of those
 * tokens', not the same in every run, and not of one token alone. Other slots are not touched by that.
 * Source dtypes F32, BF16, FP16 go to any cache dtype: to BF16 and FP16 by round-to-nearest-even, to E4M3 and NVFP4 as
 * by msa_quantise (one block = 16 head-dim elements of one token). A source that has the cache's own dtype E4M3 is
 * copied byte for byte, whatever the descales. */
typedef struct msa_cache_write_args {
    size_t size;
    int64_t tokens;              /* N, 0..2^31-1 */
    const int64_t *slot_mapping; /* [N] */
    int64_t num_pages;           /* of the K/V cache and of the index-K cache, 0..2^31-1 */
    int32_t num_kv_heads;        /* Hkv, 1..1024 */
    msa_dtype src_dtype;         /* of k_new, v_new and index_k_new */
    const void *k_new;           /* [N, Hkv, 128] */
    int64_t k_new_row_stride, k_new_head_stride;
    const void *v_new;           /* [N, Hkv, 128] */
    int64_t v_new_row_stride, v_new_head_stride;
    const void *index_k_new;     /* [N, 128] */
    int64_t index_k_new_row_stride;
    msa_dtype kv_dtype;          /* BF16, FP16, E4M3, NVFP4 */
    void *k;                     /* the cache, as in msa_attention_args */
    int64_t k_page_stride, k_head_stride, k_token_stride;
    void *v;
    int64_t v_page_stride, v_head_stride, v_token_stride;
    void *k_scale;               /* NVFP4 */
    int64_t k_scale_page_stride, k_scale_head_stride, k_scale_token_stride;
    void *v_scale;               /* NVFP4 */
    int64_t v_scale_page_stride, v_scale_head_stride, v_scale_token_stride;
    msa_scale_order v_scale_order; /* NVFP4 only */
    const float *k_descale;      /* optional; E4M3: [1] with stride 0 (default) or one a KV head; NVFP4: [1], the global
                                    scale. With src_dtype E4M3 it is taken but has no effect: what is copied was divided
                                    by it before. v_descale alike */
    int64_t k_descale_stride;
    const float *v_descale;
    int64_t v_descale_stride;
    msa_dtype index_k_dtype;     /* BF16, E4M3, NVFP4 */
    void *index_k;               /* the cache, as in msa_index_args */
    int64_t index_k_page_stride, index_k_token_stride;
    void *index_k_scale;         /* NVFP4 */
    int64_t index_k_scale_page_stride, index_k_scale_token_stride;
} msa_cache_write_args;
#define MSA_CACHE_WRITE_ARGS_INIT                                                                                \
    {sizeof(msa_cache_write_args), 0, NULL, 0, 1, MSA_BF16, NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, \
     NULL, MSA_DENSE, MSA_BF16, NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE, NULL,  \
     MSA_DENSE, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE, MSA_DENSE, MSA_SCALE_LINEAR, NULL, MSA_DENSE,      \
     NULL, MSA_DENSE, MSA_BF16, NULL, MSA_DENSE, MSA_DENSE, NULL, MSA_DENSE, MSA_DENSE}
MSA_API msa_status msa_cache_write(msa_context *context, const msa_cache_write_args *args, msa_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* MSA_H */
