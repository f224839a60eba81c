/* SPDX-License-Identifier: MIT
 *
 * peak_cuda.cu - measured peaks of a GPU, each the best of windows of about two milliseconds.
 *
 * Tensor cores: loops of nothing but products of normally distributed numbers, as zeros or constants would let the
 * clock rise above what real data allows. Hopper's image uses wgmma with one operand in registers, the others mma.sync,
 * which on GPUs later than Hopper is below what their own instructions reach. Memory: passes over what the L2 does not
 * hold; the copy is the driver's.
 */
#include "peak.h"

#include "../cuda/ptx_sm90.cuh"

#include <cuda_fp8.h>

enum {
    WINDOWS = 12,
    THREADS = 4 * WARPGROUP,
    STEPS = 3000, /* of a window; each 16 products of 64 rows and 128 columns a block */
    STAGES = 8,
    STAGE_BYTES = 128 * 128,
    READ_THREADS = 512,
    READS = 8 /* of 16 bytes, that a thread has under way */
};
static const size_t BUFFER_BYTES = (size_t)1 << 30;

static __device__ inline float normal(uint32_t seed)
{
    uint32_t x = seed * 2654435761u + 12345;
    float sum = -2;
    for (int i = 0; i < 4; i++) { /* four uniform numbers */
        x = (x ^ x >> 15) * 2246822519u;
        sum += (float)(x >> 8) * 0x1p-24f;
    }
    return sum * 1.7320508f;
}

/* Four bytes of normally distributed operands. */
template <wgmma_type TYPE> static __device__ inline uint32_t operands(uint32_t seed)
{
    if (TYPE != WGMMA_E4M3)
        return pack_pair<OPERAND_F16>(normal(2 * seed), normal(2 * seed + 1));
    uint32_t bytes = 0;
    for (int i = 0; i < 4; i++)
        bytes |= (uint32_t)__nv_cvt_float_to_fp8(normal(4 * seed + i), __NV_SATFINITE, __NV_E4M3) << 8 * i;
    return bytes;
}

template <wgmma_type TYPE>
static __device__ inline void mma_sync(float (&c)[4], const uint32_t *a, uint32_t b0, uint32_t b1)
{
#if __CUDA_ARCH__ >= 890
    if (TYPE == WGMMA_E4M3) {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        return;
    }
#endif
    const uint32_t copy[4] = {a[0], a[1], a[2], a[3]};
    mma_16x8x16<OPERAND_F16>(c, copy, b0, b1);
}

template <wgmma_type TYPE> static __global__ void __launch_bounds__(THREADS, 1) multiply(int steps, float *out)
{
    extern __shared__ __align__(1024) uint8_t stages[];
    for (int i = threadIdx.x; i < STAGES * STAGE_BYTES / 4; i += THREADS)
        ((uint32_t *)stages)[i] = operands<TYPE>((uint32_t)i);
    uint32_t a[16];
    for (int i = 0; i < 16; i++)
        a[i] = operands<TYPE>((uint32_t)(i * THREADS + threadIdx.x + 1000003));
    float total = 0;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    float sum[64] = {};
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    for (int step = 0; step < steps; step++) {
        uint32_t stage = shared_address(stages) + step % STAGES * STAGE_BYTES;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_64x128<TYPE>(sum, a + 4 * k, matrix_descriptor(stage + k * 32), 1);
        wgmma_commit();
        wgmma_wait(sum);
    }
    for (int i = 0; i < 64; i++)
        total += sum[i];
#else
    float sum[8][4] = {};
    __syncthreads();
    for (int step = 0; step < steps; step++) {
        const uint32_t *stage = (const uint32_t *)(stages + step % STAGES * STAGE_BYTES) + threadIdx.x % 32;
#pragma unroll 1
        for (int k = 0; k < 8; k++) {
            uint32_t b0 = stage[64 * k], b1 = stage[64 * k + 32];
#pragma unroll
            for (int i = 0; i < 8; i++)
                mma_sync<TYPE>(sum[i], a + i / 2 * 4, b0, b1);
        }
    }
    for (int i = 0; i < 8; i++)
        total += sum[i][0] + sum[i][1] + sum[i][2] + sum[i][3];
#endif
    out[blockIdx.x * THREADS + threadIdx.x] = total;
}

static __global__ void __launch_bounds__(READ_THREADS) read_all(const uint4 *from, size_t count, uint32_t *out)
{
    uint32_t all = 0;
    size_t step = (size_t)gridDim.x * READ_THREADS;
    for (size_t i = (size_t)blockIdx.x * READ_THREADS + threadIdx.x; i < count; i += READS * step) {
        uint4 x[READS];
#pragma unroll
        for (int j = 0; j < READS; j++)
            x[j] = i + j * step < count ? from[i + j * step] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < READS; j++)
            all |= x[j].x | x[j].y | x[j].z | x[j].w;
    }
    if (all == 0x12345678) /* never: the buffer is filled with another byte */
        *out = all;
}

/* ------------------------------------------------------------------------------------------------ windows */

struct bench {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    int num_sms;
    char *buffer; /* [2 * BUFFER_BYTES] */
};

static cudaError_t launch_once(const bench &b, cuda_peak peak)
{
    if (peak == CUDA_PEAK_READ)
        return launch(read_all, (unsigned)b.num_sms * 4, READ_THREADS, 0, false, b.stream, (const uint4 *)b.buffer,
                      BUFFER_BYTES / 16, (uint32_t *)(b.buffer + BUFFER_BYTES));
    if (peak == CUDA_PEAK_COPY)
        return cudaMemcpyAsync(b.buffer + BUFFER_BYTES, b.buffer, BUFFER_BYTES, cudaMemcpyDeviceToDevice, b.stream);
    auto kernel = peak == CUDA_PEAK_FP8 ? multiply<WGMMA_E4M3> : multiply<WGMMA_F16>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * STAGE_BYTES);
    return error ? error
                 : launch(kernel, (unsigned)b.num_sms, THREADS, STAGES * STAGE_BYTES, false, b.stream, (int)STEPS,
                          (float *)b.buffer);
}

/* What launch_once does, in FLOP or bytes. */
static double work(const bench &b, cuda_peak peak)
{
    return peak == CUDA_PEAK_READ   ? (double)BUFFER_BYTES
           : peak == CUDA_PEAK_COPY ? 2.0 * (double)BUFFER_BYTES
                                    : 2.0 * 64 * 128 * (peak == CUDA_PEAK_FP8 ? 32 : 16) * 16 * STEPS * b.num_sms;
}

static cudaError_t measure(const bench &b, double rates[NUM_CUDA_PEAKS])
{
    cudaError_t error = cudaMemsetAsync(b.buffer, 1, 2 * BUFFER_BYTES, b.stream);
    for (int p = 0; p < NUM_CUDA_PEAKS && !error; p++)
        for (int window = 0; window <= WINDOWS && !error; window++) { /* the first one warms up */
            float milliseconds = 0;
            error = cudaEventRecord(b.begin, b.stream);
            error = error ? error : launch_once(b, (cuda_peak)p);
            error = error ? error : cudaEventRecord(b.end, b.stream);
            error = error ? error : cudaEventSynchronize(b.end);
            error = error ? error : cudaEventElapsedTime(&milliseconds, b.begin, b.end);
            double rate = work(b, (cuda_peak)p) / milliseconds * 1e-6;
            if (!error && window && rate > rates[p])
                rates[p] = rate;
        }
    return error;
}

int cuda_peaks_measure(int ordinal, double rates[NUM_CUDA_PEAKS])
{
    bench b = {};
    cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
    b.num_sms = error ? 0 : properties.multiProcessorCount;
    error = error ? error : cudaStreamCreate(&b.stream);
    error = error ? error : cudaEventCreate(&b.begin);
    error = error ? error : cudaEventCreate(&b.end);
    error = error ? error : cudaMalloc(&b.buffer, 2 * BUFFER_BYTES);
    for (int p = 0; p < NUM_CUDA_PEAKS; p++)
        rates[p] = 0;
    error = error ? error : measure(b, rates);
    if (!error && properties.major == 8 && properties.minor < 9)
        rates[CUDA_PEAK_FP8] = rates[CUDA_PEAK_F16]; /* these have no FP8 products */
    cudaFree(b.buffer);
    if (b.end)
        cudaEventDestroy(b.end);
    if (b.begin)
        cudaEventDestroy(b.begin);
    if (b.stream)
        cudaStreamDestroy(b.stream);
    return error;
}
