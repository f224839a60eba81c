/* SPDX-License-Identifier: MIT
 *
 * check.h - what argument checks are made of. Each check returns MSA_SUCCESS or a failure with a message that names the
 * argument, its value and the rule.
 */
#ifndef MSA_CHECK_H
#define MSA_CHECK_H

#include "internal.h"

#define TRY(call)                 \
    do {                          \
        msa_status try_ = (call); \
        if (try_)                 \
            return try_;          \
    } while (0)

#define INVALID(...) fail(MSA_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
#define UNSUPPORTED(...) fail(MSA_ERROR_UNSUPPORTED, __VA_ARGS__)

msa_status check_range(const char *name, int64_t value, int64_t low, int64_t high);
msa_status check_pointer(const char *name, const void *pointer, size_t alignment);
msa_status check_absent(const char *name, const void *pointer, const char *rule);
msa_status check_dtype(const char *name, msa_dtype dtype);
/* Forced pages of a selection. */
msa_status check_forced(int32_t init_pages, int32_t local_pages, int32_t topk, const char *order_name, int32_t order);

struct axis {
    const char *stride_name;
    int64_t *stride;
    int64_t extent;
};

enum { INPUT = 0, OUTPUT = 1, OPTIONAL = 2 };

/* A tensor whose dense inner axis is row_bytes long; axes outermost first. Absent or empty: strides become 0. */
msa_status check_tensor(const char *name, const void *data, size_t alignment, size_t row_bytes, const struct axis *axes,
                        int num_axes, int flags);

/* check_tensor for a field `name` of the struct pointed to by s, with axes given as (axis name, extent) pairs. */
#define AXIS(s, name, axis, extent)                                       \
    {                                                                     \
#name "_" #axis "_stride", &(s)->name##_##axis##_stride, (extent) \
    }
#define TENSOR(s, name, alignment, row_bytes, flags, ...)                                        \
    check_tensor(#name, (s)->name, (alignment), (row_bytes), (const struct axis[]){__VA_ARGS__}, \
                 (int)(sizeof((const struct axis[]){__VA_ARGS__}) / sizeof(struct axis)), (flags))

/* Optional FP32 factor: [1] (stride 0, the default) or one a KV head. */
msa_status check_factor(const char *name, const char *stride_name, const float *factor, int64_t *stride,
                        int32_t num_kv_heads);

static inline size_t element_alignment(msa_dtype dtype)
{
    return dtype == MSA_F32 ? 4 : dtype == MSA_BF16 || dtype == MSA_FP16 ? 2 : 1;
}

#endif
