/* SPDX-License-Identifier: MIT
 *
 * ptx.cuh - one PTX instruction a function, and the launch of a kernel.
 */
#ifndef MSA_CUDA_PTX_CUH
#define MSA_CUDA_PTX_CUH

#include "cuda.h"

enum operand { OPERAND_F16, OPERAND_BF16 }; /* element type of the 16-bit tensor-core operands */

/* ------------------------------------------------------------------------------------------------ launches */

/* dependent: this launch may start before the one ahead of it has ended; its blocks call grid_wait() before they touch
 * what launches ahead may still be at work on. A launch behind it knows of this one alone, which therefore ends no
 * earlier than all that are ahead (or one behind it sees to that: await_attend and await_images of page-major prefill).
 */
template <typename... Params, typename... Args>
static cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, bool dependent,
                          cudaStream_t stream, const Args &...args)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

/* Blocks for n items, at most as many as a grid's x axis takes: kernels stride over the grid where n can be larger. */
static inline unsigned grid_blocks(int64_t n, int items_per_block)
{
    int64_t blocks = (n + items_per_block - 1) / items_per_block;
    return (unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX);
}

/* Lets a launch that is marked as dependent start. */
static __device__ inline void grid_release(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Brings a line to the L2: no read, so that it need not wait for the launch ahead. */
static __device__ inline void prefetch_l2(const void *address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/* Waits until the launch ahead has ended and its writes are visible. Nothing to wait for in an ordinary launch. */
static __device__ inline void grid_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* A word that others store or add to once what it stands for has been written. */
static __device__ inline uint32_t load_acquire(const uint32_t *address)
{
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
    return x;
}

/* ------------------------------------------------------------------------------------------------ arithmetic */

static __device__ inline float exp2_approx(float x) /* 2^x within 2 ulp; subnormal results are 0 */
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two floats to a pair of 16-bit elements, the first in the low half. */
template <operand TYPE> static __device__ inline uint32_t pack_pair(float low, float high)
{
    uint32_t pair;
    if (TYPE == OPERAND_F16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* ------------------------------------------------------------------------------------------------ four lanes */

/* Of two lanes: an even one gets the first words of both, an odd one the second. lanes: those that call it together. */
static __device__ inline void pair_words(uint32_t &first, uint32_t &second, uint32_t lane, uint32_t lanes)
{
    bool odd = lane % 2;
    uint32_t other = __shfl_xor_sync(lanes, odd ? first : second, 1);
    first = odd ? other : first;
    second = odd ? second : other;
}

/* Four lanes' 64 bytes to memory: word 4i + j of these is word i of lane j. lanes: those that call it together, of
 * fours all or none; to: NULL if nothing is to be written. */
static __device__ inline void store_turned(void *to, uint4 x, uint32_t lane, uint32_t lanes)
{
    pair_words(x.x, x.y, lane, lanes);
    pair_words(x.z, x.w, lane, lanes);
    if (to) {
        uint2 *at = (uint2 *)to + lane % 2 * 2 + lane / 2 % 2;
        __stcs(at, make_uint2(x.x, x.y));
        __stcs(at + 4, make_uint2(x.z, x.w));
    }
}

/* ------------------------------------------------------------------------------------------------ tensor cores */

static __device__ inline uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8. Register i of a lane holds
 * the elements 2*(lane%4) and the next of row lane/4 of matrix i. */
static __device__ inline void load_matrices(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

/* The same with every matrix transposed. */
static __device__ inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

/* c += a * b: 16x8 += 16x16 * 16x8, FP32 accumulation. With g = lane/4, t = lane%4:
 *   a  rows g, g+8 at columns 2t, 2t+1 (a[0], a[1]) and 2t+8, 2t+9 (a[2], a[3])
 *   b  column g at rows 2t, 2t+1 (b0) and 2t+8, 2t+9 (b1)
 *   c  row g at columns 2t, 2t+1 (c[0], c[1]), row g+8 (c[2], c[3]) */
template <operand TYPE>
static __device__ inline void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if (TYPE == OPERAND_F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
