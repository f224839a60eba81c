/* SPDX-License-Identifier: MIT
 *
 * tensor_map.cuh - host side of Hopper's copy engine: whether it can fetch the pages of a cache, and the map that it
 * needs.
 */
#ifndef MSA_CUDA_TENSOR_MAP_CUH
#define MSA_CUDA_TENSOR_MAP_CUH

#include "cuda.h"

/* A tensor of the cache; strides in bytes, those of axes with one element are not looked at. */
struct tensor_layout {
    const void *data;
    int64_t token_stride, head_stride, page_stride, heads, pages;
};

/* Whether one bulk copy takes what a page and head hold: tokens of `row_bytes` without gaps, on multiples of 16. */
static inline bool is_dense(const tensor_layout &t, int64_t row_bytes)
{
    uint64_t bits =
        (uintptr_t)t.data | (uint64_t)(t.pages > 1 ? t.page_stride : 0) | (uint64_t)(t.heads > 1 ? t.head_stride : 0);
    return t.token_stride == row_bytes && bits % 16 == 0;
}

/* A map with the axes byte, token, head, page; boxes of 128 bytes and `keys` tokens, swizzled by 128 bytes. False: the
 * layout does not fit. */
static inline bool map_tensor(cuda_encode_tensor_fn *encode, CUtensorMap *map, const tensor_layout &t, int row_bytes,
                              int keys)
{
    const int64_t most = INT64_C(1) << 40;
    int64_t token = t.token_stride, head = t.heads > 1 ? t.head_stride : token,
            page = t.pages > 1 ? t.page_stride : head;
    if (token <= 0 || head <= 0 || page <= 0 || token >= most || head >= most || page >= most)
        return false;
    cuuint64_t sizes[4] = {(cuuint64_t)row_bytes, MSA_PAGE_SIZE, (cuuint64_t)t.heads,
                           (cuuint64_t)(t.pages > 0 ? t.pages : 1)};
    cuuint64_t strides[3] = {(cuuint64_t)token, (cuuint64_t)head, (cuuint64_t)page};
    cuuint32_t box[4] = {128, (cuuint32_t)keys, 1, 1}, steps[4] = {1, 1, 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, (void *)t.data, sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

#endif
