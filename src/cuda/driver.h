/* SPDX-License-Identifier: MIT
 *
 * driver.h - what driver.c and driver_plan.c share.
 */
#ifndef MSA_CUDA_DRIVER_H
#define MSA_CUDA_DRIVER_H

#include "../internal.h"
#include "cuda.h"

struct cuda_device {
    CUdevice handle;
    CUcontext primary;
    CUresult (*push)(CUcontext), (*pop)(CUcontext *), (*release)(CUdevice);
    cuda_encode_tensor_fn *encode_tensor;
    int num_sms;
    char image[16];
    struct cuda_kernels kernels;
};

static inline const struct cuda_device *cuda_device_of(const msa_context *context)
{
    return context->backend_data;
}

const char *cuda_kernel_name(const void *symbol);

/* Every use of the device stands between these two. cuda_leave turns an error of the CUDA runtime into a status. */
msa_status cuda_enter(const msa_context *context);
msa_status cuda_leave(const msa_context *context, const char *what, cudaError_t error);

msa_status cuda_plan_init(msa_plan *plan);
void cuda_plan_destroy(msa_plan *plan);
msa_status cuda_prepare(msa_plan *plan, msa_stream stream);
msa_status cuda_index_run(msa_plan *plan, const msa_index_args *args, msa_stream stream);
msa_status cuda_attention_run(msa_plan *plan, const msa_attention_args *args, msa_stream stream);
msa_status cuda_plan_error(msa_plan *plan, uint32_t *bits, msa_stream stream);

#endif
