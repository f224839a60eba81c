/* SPDX-License-Identifier: MIT
 *
 * ring_sm90.cuh - a ring of stages in shared memory, between warps that fill and warps that empty them. A block's memory
 * has barriers `full` and `empty`, one of each a stage.
 */
#ifndef MSA_CUDA_RING_SM90_CUH
#define MSA_CUDA_RING_SM90_CUH

#include "ptx_sm90.cuh"

/* A stage, and the parity of the round in which it is used: one register, as consumers have none to spare. */
template <int STAGES> struct ring_place {
    uint32_t value; /* 2 * stage + parity */

    __device__ __forceinline__ uint32_t stage(void) const
    {
        return value >> 1;
    }

    __device__ __forceinline__ uint32_t parity(void) const
    {
        return value & 1;
    }

    __device__ __forceinline__ void advance(uint32_t stages = 1)
    {
        value += 2 * stages;
        if (value >= 2 * STAGES)
            value = (value - 2 * STAGES) ^ 1;
    }
};

template <typename M, int STAGES> static __device__ __forceinline__ void wait_full(M &m, ring_place<STAGES> at)
{
    barrier_wait(shared_address(&m.full[at.stage()]), at.parity());
}

template <typename M, int STAGES> static __device__ __forceinline__ void wait_empty(M &m, ring_place<STAGES> at)
{
    barrier_wait(shared_address(&m.empty[at.stage()]), at.parity() ^ 1); /* the first round finds them empty */
}

/* One arrival. How many a stage's barrier awaits is the kernel's affair. */
template <typename M, int STAGES> static __device__ __forceinline__ void give_full(M &m, ring_place<STAGES> at)
{
    barrier_arrive(shared_address(&m.full[at.stage()]));
}

/* One arrival of each warp that calls. */
template <typename M, int STAGES> static __device__ __forceinline__ void give_empty(M &m, ring_place<STAGES> at)
{
    if (threadIdx.x % CUDA_WARP == 0)
        barrier_arrive(shared_address(&m.empty[at.stage()]));
}

#endif
