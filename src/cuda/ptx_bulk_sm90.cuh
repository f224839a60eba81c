/* SPDX-License-Identifier: MIT
 *
 * ptx_bulk_sm90.cuh - Hopper's bulk copies and clusters, one instruction a function; addresses in shared memory are
 * 32-bit.
 */
#ifndef MSA_CUDA_PTX_BULK_SM90_CUH
#define MSA_CUDA_PTX_BULK_SM90_CUH

#include "ptx_sm90.cuh"

/* ------------------------------------------------------------------------------------------------ bulk copies */

/* A box of a tensor with four axes; the map is a __grid_constant__ parameter. */
static __device__ inline void copy_box(uint32_t to, const CUtensorMap *map, int x, int y, int z, int w,
                                       uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4, %5}], [%6];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
                 : "memory");
}

/* Fetches the map itself. */
static __device__ inline void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* ------------------------------------------------------------------------------------------------ clusters */

/* Orders nothing but what fence_barriers orders. */
static __device__ inline void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ inline void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The address in the shared memory of the cluster's block `rank` that corresponds to one in this block's. */
static __device__ inline uint32_t cluster_address(uint32_t address, int rank)
{
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

/* Stores to another block of the cluster; the barrier there counts the bytes. */
static __device__ inline void store_async(uint32_t to, float4 x, uint32_t barrier)
{
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}

static __device__ inline void store_async(uint32_t to, float2 x, uint32_t barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "f"(x.x), "f"(x.y), "r"(barrier)
                 : "memory");
}

/* ------------------------------------------------------------------------------------------------ shared memory */

static __device__ inline uint32_t load_shared_8(uint32_t address)
{
    uint32_t x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

static __device__ inline uint2 load_shared_64(uint32_t address)
{
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
    return x;
}

static __device__ inline uint4 load_shared_128(uint32_t address)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address));
    return x;
}

static __device__ inline void store_shared_8(uint32_t address, uint32_t x)
{
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

static __device__ inline uint32_t load_shared_32(uint32_t address)
{
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

/* *address |= x, atomically. */
static __device__ inline void set_shared_32(uint32_t address, uint32_t x)
{
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

static __device__ inline void store_shared_32(uint32_t address, uint32_t x)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

static __device__ inline void store_shared_128(uint32_t address, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

/* Arrives when all of this thread's cp.async copies so far have. */
static __device__ inline void copy_async_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

static __device__ inline void copy_async_8(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

/* ------------------------------------------------------------------------------------------------ bytes */

/* Byte i of the result is byte s of {high, low}, s the i-th nibble of `selector` (only the low 16 bits count); from
 * s = 8 on, eight times the sign bit of byte s - 8. */
static __device__ inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector)
{
    uint32_t x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(selector));
    return x;
}

#endif
