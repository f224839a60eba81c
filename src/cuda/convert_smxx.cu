/* SPDX-License-Identifier: MIT
 *
 * convert_smxx.cu - rows of E4M3, NVFP4, BF16 or FP16 to a wider format or their own, bit-equal to the CPU's
 * msa_convert (NaN payloads too, which the GPU's own conversions and products lose). A thread takes 16 elements. Floor:
 * bytes read and written at the copy rate.
 */
#include "block.cuh"

enum { THREADS = 256 };

struct convert_job {
    msa_convert_args args;
    bool src_aligned, dst_aligned;
};

static __device__ inline int block_bytes(msa_dtype dtype)
{
    return dtype == MSA_NVFP4 ? BLOCK / 2 : dtype == MSA_E4M3 ? BLOCK : dtype == MSA_F32 ? 4 * BLOCK : 2 * BLOCK;
}

/* The product of a CPU keeps the scale's NaN. */
static __device__ inline float nvfp4_value(uint8_t code, uint8_t scale)
{
    return (scale & 0x7F) == 0x7F ? e4m3_to_f32(scale) : nvfp4_to_f32(code, scale);
}

static __device__ inline void load_any_block(const char *from, uint8_t scale, msa_dtype dtype, bool aligned,
                                             float (&x)[BLOCK])
{
    if (dtype == MSA_NVFP4) {
        alignas(8) uint8_t raw[BLOCK / 2];
        copy_bytes<BLOCK / 2>(raw, from, aligned);
#pragma unroll
        for (int i = 0; i < BLOCK; i++)
            x[i] = nvfp4_value(raw[i / 2] >> 4 * (i & 1) & 15, scale);
    } else if (dtype == MSA_E4M3) {
        alignas(16) uint8_t raw[BLOCK];
        copy_bytes<BLOCK>(raw, from, aligned);
#pragma unroll
        for (int i = 0; i < BLOCK; i++)
            x[i] = e4m3_to_f32(raw[i]);
    } else {
        load_block(from, dtype, aligned, x);
    }
}

static __device__ inline void store_any_block(const float (&x)[BLOCK], msa_dtype dtype, char *to, bool aligned)
{
    if (dtype == MSA_F32) {
        alignas(16) float raw[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; i++)
            raw[i] = x[i];
        copy_bytes<4 * BLOCK>(to, raw, aligned);
    } else if (dtype == MSA_E4M3) {
        store_e4m3_block(x, 1.0f, to, aligned);
    } else {
        store_half_block(x, dtype, to, aligned);
    }
}

static __global__ void __launch_bounds__(THREADS) convert_rows(const convert_job job)
{
    const msa_convert_args &args = job.args;
    int64_t blocks = args.cols / BLOCK, index = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (; index < args.rows * blocks; index += (int64_t)gridDim.x * THREADS) {
        int64_t row = index / blocks, block = index % blocks;
        const char *src = (const char *)args.src + row * args.src_row_stride + block * block_bytes(args.src_dtype);
        char *dst = (char *)args.dst + row * args.dst_row_stride + block * block_bytes(args.dst_dtype);
        bool aligned = job.src_aligned && job.dst_aligned;
        if (args.src_dtype == args.dst_dtype) {
            if (args.src_dtype == MSA_E4M3)
                copy_bytes<BLOCK>(dst, src, aligned);
            else
                copy_bytes<2 * BLOCK>(dst, src, aligned);
            continue;
        }
        float x[BLOCK];
        uint8_t scale = args.scale ? ((const uint8_t *)args.scale)[row * args.scale_row_stride + block] : 0;
        load_any_block(src, scale, args.src_dtype, job.src_aligned, x);
        store_any_block(x, args.dst_dtype, dst, job.dst_aligned);
    }
}

cudaError_t convert_smxx(const msa_convert_args *args, cudaStream_t stream)
{
    convert_job job = {*args, rows_aligned(args->src, args->src_row_stride, args->src_dtype == MSA_NVFP4 ? 8 : 16),
                       rows_aligned(args->dst, args->dst_row_stride, 16)};
    return launch(convert_rows, grid_blocks(args->rows * (args->cols / BLOCK), THREADS), THREADS, 0, false, stream,
                  job);
}
