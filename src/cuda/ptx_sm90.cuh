/* SPDX-License-Identifier: MIT
 *
 * ptx_sm90.cuh - Hopper's own instructions (sm_90a), one a function: warpgroup matrix products, mbarriers, asynchronous
 * copies, registers moved between warps.
 */
#ifndef MSA_CUDA_PTX_SM90_CUH
#define MSA_CUDA_PTX_SM90_CUH

#include "ptx.cuh"

#include <cuda.h> /* CUtensorMap */

enum { WARPGROUP = 128 }; /* threads */

/* The same value in all lanes, in a way that the compiler knows: branches on it are uniform. */
static __device__ inline int uniform(int x)
{
    return __shfl_sync(~0u, x, 0);
}

/* The thread's number, read anew each time: what follows from it would else take registers across loops. */
static __device__ __forceinline__ uint32_t thread_now(void)
{
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* Picks a lane of a warp, always the same one: cheaper than to read its number. All lanes call it. */
static __device__ __forceinline__ bool elected(void)
{
    uint32_t picked;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "elect.sync _|p, 0xFFFFFFFF;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(picked));
    return picked;
}

/* ------------------------------------------------------------------------------------------------ mbarriers */

static __device__ inline void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* Its memory may then be another barrier's. */
static __device__ inline void barrier_end(uint32_t barrier)
{
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Makes barriers that this thread set up known to copies that count on them. */
static __device__ inline void fence_barriers(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ inline void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and makes the phase wait for `bytes` of bulk copies as well. */
static __device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Waits for the end of the phase of this parity. */
static __device__ inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity), "r"(10000000) /* ns to sleep at most between two looks */
                 : "memory");
}

/* ------------------------------------------------------------------------------------------------ copies */

static __device__ inline void copy_async_16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ inline void copy_async_4(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/* Ends a group of this thread's copies; all but the last PENDING groups have arrived after copy_async_wait. */
static __device__ inline void copy_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> static __device__ inline void copy_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* The same, but zeros where `there` is false; nothing is read then. */
static __device__ inline void copy_async_16(uint32_t to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* One thread copies `bytes` (of 16) to shared memory; they count on the barrier. */
static __device__ inline void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Of lines that are used once: the L2 may drop them before all others. */
static __device__ inline uint64_t used_once(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* copy_bulk of what nobody else reads. */
static __device__ inline void copy_bulk_once(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(used_once())
                 : "memory");
}

/* One thread copies `bytes` of shared memory out. The memory may be written again after copy_bulk_wait. */
static __device__ inline void copy_bulk_out(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

/* The same of what will be read once, and late. */
static __device__ inline void copy_bulk_out_once(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes), "l"(used_once())
                 : "memory");
}

static __device__ inline void copy_bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Waits until the thread's copies have been written, too. */
static __device__ inline void copy_bulk_finish(void)
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Copies a box of the tensor from the place x, y, z on, by one thread; its bytes arrive at the barrier. */
static __device__ inline void copy_box(uint32_t to, const CUtensorMap &tensor, int x, int y, int z, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4}], [%5];" ::"r"(to),
                 "l"(&tensor), "r"(x), "r"(y), "r"(z), "r"(barrier)
                 : "memory");
}

/* Makes writes to shared memory that this thread knows of visible to its warpgroup's products. It waits for the
 * thread's own cp.async copies, so that a thread which has some under way had better leave it to the reader. */
static __device__ inline void fence_async_reads(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Makes what this thread knows of in global memory visible to the bulk copies that follow. */
static __device__ inline void fence_async_global(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* Waits for the `threads` that share the barrier `id` (1..15). */
static __device__ inline void barrier_meet(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The same for warps that come from different places of the code: bar.sync promises that all execute one
 * instruction. */
static __device__ inline void barrier_meet_apart(int id, int threads)
{
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* As barrier_meet; whether any of them passed true. */
static __device__ inline bool barrier_any(int id, int threads, bool x)
{
    int any;
    asm volatile("{\n"
                 ".reg .pred p, q;\n"
                 "setp.ne.b32 p, %3, 0;\n"
                 "bar.red.or.pred q, %1, %2, p;\n"
                 "selp.b32 %0, 1, 0, q;\n"
                 "}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((int)x)
                 : "memory");
    return any;
}

/* ------------------------------------------------------------------------------------------------ registers */

/* All warps of a warpgroup call these together. What `more` takes, other warpgroups must have given back. */
template <int REGISTERS> static __device__ inline void fewer_registers(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> static __device__ inline void more_registers(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* ------------------------------------------------------------------------------------------------ products */

/* Where chunk `chunk` of 16 bytes of row `row` lies, in rows of 128 bytes with 128-byte swizzle. */
static __device__ __forceinline__ uint32_t swizzled(int row, int chunk)
{
    return (uint32_t)(row * 128 + ((chunk ^ row) % 8) * 16);
}

/* Descriptor of a matrix in shared memory, K-major with 128-byte swizzle: rows of 128 bytes, 8 of them a group of 1024.
 * Bit fields: address / 16; leading offset (not used: 1); distance of groups / 16 (64); swizzle mode (1). The low half
 * has what differs, so that arithmetic on it can stay in uniform registers. */
static __device__ inline uint32_t matrix_low(uint32_t address)
{
    return address >> 4 | 1 << 16;
}

static __device__ inline uint64_t matrix_of_low(uint32_t low)
{
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(1u << 30 | 64));
    return descriptor;
}

static __device__ inline uint64_t matrix_descriptor(uint32_t address)
{
    return matrix_of_low(matrix_low(address));
}

static __device__ inline void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ inline void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits for all products; the accumulator is not read before. */
template <int N> static __device__ inline void wgmma_wait(float (&sum)[N])
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(sum[i])::"memory");
}

/* sum[0..3] = a * b, or += if `add`: 64 rows of E4M3 in registers by 8 columns in shared memory, 32 elements each, as
 * wgmma_64x128 has them. */
static __device__ inline void wgmma_64x8(float *sum, const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, "
                 "1;\n"
                 "}"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#define SUM_8(i)                                                                                            \
    "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), \
        "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define WGMMA_64X128(shape_and_types, flags)                                                                      \
    asm volatile(                                                                                                 \
        "{\n"                                                                                                     \
        ".reg .pred p;\n"                                                                                         \
        "setp.ne.b32 p, %69, 0;\n"                                                                                \
        "wgmma.mma_async.sync.aligned." shape_and_types " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "    \
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "    \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "    \
        "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, " flags ";\n" \
        "}"                                                                                                       \
        : SUM_8(0), SUM_8(8), SUM_8(16), SUM_8(24), SUM_8(32), SUM_8(40), SUM_8(48), SUM_8(56)                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

/* Elements of matrix products. */
enum wgmma_type { WGMMA_E4M3, WGMMA_F16, WGMMA_BF16 };

/* sum = a * b, or sum += a * b if `add`; FP32. 64 rows (16 a warp) by 128 columns, 32 bytes of the inner dimension.
 * With g = lane/4, t = lane%4, a holds of the rows g, g+8: bytes 4t..4t+3 (a[0], a[1]) and 16+4t..16+4t+3 (a[2], a[3]);
 * sum[4n + i] is row g + 8*(i/2), column 8n + 2t + i%2. */
template <wgmma_type TYPE>
static __device__ inline void wgmma_64x128(float (&sum)[64], const uint32_t *a, uint64_t b, int add)
{
    if (TYPE == WGMMA_E4M3)
        WGMMA_64X128("m64n128k32.f32.e4m3.e4m3", "1, 1");
    else if (TYPE == WGMMA_F16)
        WGMMA_64X128("m64n128k16.f32.f16.f16", "1, 1, 0");
    else
        WGMMA_64X128("m64n128k16.f32.bf16.bf16", "1, 1, 0");
}
#undef WGMMA_64X128

#define WGMMA_64X128(shape_and_types, flags)                                                                   \
    asm volatile(                                                                                              \
        "{\n"                                                                                                  \
        ".reg .pred p;\n"                                                                                      \
        "setp.ne.b32 p, %66, 0;\n"                                                                             \
        "wgmma.mma_async.sync.aligned." shape_and_types " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, " \
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
        "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, " flags ";\n"               \
        "}"                                                                                                    \
        : SUM_8(0), SUM_8(8), SUM_8(16), SUM_8(24), SUM_8(32), SUM_8(40), SUM_8(48), SUM_8(56)                 \
        : "l"(a), "l"(b), "r"(add))

/* The same with a in shared memory as well, K-major. */
template <wgmma_type TYPE> static __device__ inline void wgmma_64x128(float (&sum)[64], uint64_t a, uint64_t b, int add)
{
    if (TYPE == WGMMA_E4M3)
        WGMMA_64X128("m64n128k32.f32.e4m3.e4m3", "1, 1");
    else if (TYPE == WGMMA_F16)
        WGMMA_64X128("m64n128k16.f32.f16.f16", "1, 1, 0, 0");
    else
        WGMMA_64X128("m64n128k16.f32.bf16.bf16", "1, 1, 0, 0");
}
#undef WGMMA_64X128

#define WGMMA_64X64_TURNED(types)                                                                                  \
    asm volatile("{\n"                                                                                             \
                 ".reg .pred p;\n"                                                                                 \
                 "setp.ne.b32 p, %37, 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n64k16." types " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, " \
                 "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
                 "%30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"                                             \
                 "}"                                                                                               \
                 : SUM_8(0), SUM_8(8), SUM_8(16), SUM_8(24)                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

/* The same for 64 columns and 16-bit elements, a in registers, b with its columns innermost: 16 rows of 128 bytes,
 * swizzled. */
template <wgmma_type TYPE>
static __device__ inline void wgmma_64x64_turned(float (&sum)[32], const uint32_t *a, uint64_t b, int add)
{
    if (TYPE == WGMMA_F16)
        WGMMA_64X64_TURNED("f32.f16.f16");
    else
        WGMMA_64X64_TURNED("f32.bf16.bf16");
}
#undef WGMMA_64X64_TURNED
#undef SUM_8

#endif
