/* SPDX-License-Identifier: MIT
 *
 * check.c - what all argument checks are made of: ranges, pointers, tensors and their strides.
 */
#include "check.h"

#include <string.h>

msa_status check_struct(const char *name, const void *from, void *to, size_t expected)
{
    if (!from)
        return INVALID("%s = NULL: must point to its struct", name);
    size_t size;
    memcpy(&size, from, sizeof size);
    if (size < expected)
        return INVALID("%s.size = %zu: must be at least %zu (use the INIT macro)", name, size, expected);
    if (size > expected) {
        /* A newer caller: fine as long as it does not use what this library does not know. */
        if (size > 65536)
            return INVALID("%s.size = %zu: must be the size of the struct (use the INIT macro)", name, size);
        const unsigned char *bytes = from;
        for (size_t i = expected; i < size; i++)
            if (bytes[i])
                return INVALID("%s.size = %zu: a field past the %zu bytes this library knows is not zero", name, size,
                               expected);
    }
    memcpy(to, from, expected);
    return MSA_SUCCESS;
}

msa_status check_range(const char *name, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
        return INVALID("%s = %lld: must be %lld..%lld", name, (long long)value, (long long)low, (long long)high);
    return MSA_SUCCESS;
}

msa_status check_pointer(const char *name, const void *pointer, size_t alignment)
{
    if (!pointer)
        return INVALID("%s = NULL: must be given", name);
    if ((uintptr_t)pointer % alignment)
        return INVALID("%s = %p: must be aligned to %zu bytes", name, pointer, alignment);
    return MSA_SUCCESS;
}

/* A tensor whose dense inner axis is row_bytes long; axes outermost first. Absent or empty: strides become 0. */
msa_status check_tensor(const char *name, const void *data, size_t alignment, size_t row_bytes, const struct axis *axes,
                        int num_axes, int flags)
{
    bool empty = row_bytes == 0 || (!data && flags & OPTIONAL);
    for (int i = 0; i < num_axes; i++)
        empty |= axes[i].extent == 0;
    if (empty) {
        for (int i = 0; i < num_axes; i++)
            *axes[i].stride = 0;
        return MSA_SUCCESS;
    }
    TRY(check_pointer(name, data, alignment));
    int64_t span = (int64_t)row_bytes; /* bytes from the first to past the last element of the axes seen so far */
    int64_t dense = (int64_t)row_bytes;
    for (int i = num_axes - 1; i >= 0; i--) {
        int64_t *stride = axes[i].stride;
        if (axes[i].extent == 1) {
            *stride = 0;
            continue;
        }
        if (*stride == MSA_DENSE)
            *stride = dense;
        if (*stride < 0)
            return INVALID("%s = %lld: must not be negative", axes[i].stride_name, (long long)*stride);
        if (*stride % (int64_t)alignment)
            return INVALID("%s = %lld: must be a multiple of %zu bytes", axes[i].stride_name, (long long)*stride,
                           alignment);
        int64_t reach;
        if (__builtin_mul_overflow(*stride, axes[i].extent - 1, &reach) || __builtin_add_overflow(span, reach, &span) ||
            __builtin_mul_overflow(*stride, axes[i].extent, &dense))
            return INVALID("%s = %lld: the tensor passes 2^63 bytes with %lld elements on this axis",
                           axes[i].stride_name, (long long)*stride, (long long)axes[i].extent);
    }
    if ((uintptr_t)data + (uint64_t)span < (uintptr_t)data)
        return INVALID("%s = %p: %lld bytes from there pass the end of the address space", name, data, (long long)span);
    if (flags & OUTPUT) {
        /* No two elements may share a byte: in order of their strides, each axis steps over all that lies inside it. */
        int64_t covered = (int64_t)row_bytes;
        bool done[4] = {false};
        for (int round = 0; round < num_axes; round++) {
            int smallest = -1;
            for (int i = 0; i < num_axes; i++)
                if (!done[i] &&
                    (smallest < 0 || *axes[i].stride <= *axes[smallest].stride)) /* of equals the inner one */
                    smallest = i;
            done[smallest] = true;
            if (axes[smallest].extent == 1)
                continue;
            if (*axes[smallest].stride < covered)
                return INVALID("%s = %lld: must be at least %lld bytes, or rows of the output %s overlap",
                               axes[smallest].stride_name, (long long)*axes[smallest].stride, (long long)covered, name);
            covered += *axes[smallest].stride * (axes[smallest].extent - 1);
        }
    }
    return MSA_SUCCESS;
}

/* Optional FP32 factor: [1] (stride 0, the default) or one a KV head. */
msa_status check_factor(const char *name, const char *stride_name, const float *factor, int64_t *stride,
                        int32_t num_kv_heads)
{
    if (*stride == MSA_DENSE)
        *stride = 0;
    return check_tensor(name, factor, 4, 4, (const struct axis[]){{stride_name, stride, num_kv_heads}}, 1,
                        INPUT | OPTIONAL);
}

msa_status check_absent(const char *name, const void *pointer, const char *rule)
{
    return pointer ? INVALID("%s = %p: must be NULL, %s", name, pointer, rule) : MSA_SUCCESS;
}

msa_status check_forced(int32_t init_pages, int32_t local_pages, int32_t topk, const char *order_name, int32_t order)
{
    if (init_pages < 0)
        return INVALID("init_pages = %d: must be >= 0", (int)init_pages);
    if (local_pages < 1)
        return INVALID("local_pages = %d: must be >= 1, a query's own page is always listed", (int)local_pages);
    if ((int64_t)init_pages + local_pages > topk)
        return INVALID("init_pages + local_pages = %lld: must be at most k = %d", (long long)init_pages + local_pages,
                       (int)topk);
    return check_range(order_name, order, MSA_TOPK_ORDER_PAGE, MSA_TOPK_ORDER_SCORE);
}

msa_status check_dtype(const char *name, msa_dtype dtype)
{
    if (dtype == MSA_E5M2)
        return UNSUPPORTED("%s = E5M2: not supported; of the FP8 types only E4M3 is", name);
    return check_range(name, (int32_t)dtype, MSA_DTYPE_DEFAULT, MSA_E5M2);
}
