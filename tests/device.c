/* SPDX-License-Identifier: MIT
 *
 * device.c - see device.h.
 */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>

static bool in_use;

bool device_in_use(void)
{
    return in_use;
}

#ifdef MSA_WITH_CUDA
#include <cuda_runtime_api.h>

static void must(const char *what, cudaError_t error)
{
    if (!error)
        return;
    fprintf(stderr, "test program: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

void device_use(int32_t ordinal)
{
    must("CUDA device", cudaSetDevice(ordinal));
    in_use = true;
}

void device_share(void *data, size_t bytes)
{
    if (in_use)
        must("cudaHostRegister", cudaHostRegister(data, bytes, cudaHostRegisterDefault));
}

void device_unshare(void *data)
{
    if (in_use)
        must("cudaHostUnregister", cudaHostUnregister(data));
}

const char *device_wait(void)
{
    cudaError_t error = in_use ? cudaDeviceSynchronize() : cudaSuccess;
    return error ? cudaGetErrorString(error) : NULL;
}
#else
void device_use(int32_t ordinal)
{
    fprintf(stderr, "test program: CUDA device %d: this build has no CUDA backend\n", (int)ordinal);
    exit(2);
}

void device_share(void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
}

void device_unshare(void *data)
{
    (void)data;
}

const char *device_wait(void)
{
    return NULL;
}
#endif
