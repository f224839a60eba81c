/* SPDX-License-Identifier: MIT
 *
 * quantise_smxx.cu - rows of F32, BF16 or FP16 to E4M3 or NVFP4, bit-equal to cpu/quantise_c.c. A thread takes 16
 * elements. Floor: bytes read and written at the copy rate.
 */
#include "block.cuh"

enum { THREADS = 256 };

struct quantise_job {
    msa_quantise_args args;
    bool src_aligned, dst_aligned;
};

static __global__ void __launch_bounds__(THREADS) quantise_rows(const quantise_job job)
{
    const msa_quantise_args &args = job.args;
    int64_t blocks = args.cols / BLOCK, index = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float factor = args.descale ? *args.descale : 1.0f;
    int src_bytes = args.src_dtype == MSA_F32 ? 4 * BLOCK : 2 * BLOCK;
    for (; index < args.rows * blocks; index += (int64_t)gridDim.x * THREADS) {
        int64_t row = index / blocks, block = index % blocks;
        float x[BLOCK];
        load_block((const char *)args.src + row * args.src_row_stride + block * src_bytes, args.src_dtype,
                   job.src_aligned, x);
        char *dst = (char *)args.dst + row * args.dst_row_stride;
        if (args.dst_dtype == MSA_E4M3)
            store_e4m3_block(x, factor, dst + block * BLOCK, job.dst_aligned);
        else
            ((uint8_t *)args.scale)[row * args.scale_row_stride + block] =
                store_nvfp4_block(x, factor, dst + block * (BLOCK / 2), job.dst_aligned);
    }
}

cudaError_t quantise_smxx(const msa_quantise_args *args, cudaStream_t stream)
{
    quantise_job job = {*args, rows_aligned(args->src, args->src_row_stride, 16),
                        rows_aligned(args->dst, args->dst_row_stride, args->dst_dtype == MSA_E4M3 ? 16 : 8)};
    return launch(quantise_rows, grid_blocks(args->rows * (args->cols / BLOCK), THREADS), THREADS, 0, false, stream,
                  job);
}
