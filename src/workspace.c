/* SPDX-License-Identifier: MIT
 *
 * workspace.c - msa_workspace: device memory that the library allocates for callers who do not bring their own.
 */
#include "internal.h"

struct msa_workspace {
    msa_context *context;
    void *data;
    size_t bytes;
};

msa_status msa_workspace_create(msa_context *context, size_t bytes, msa_workspace **workspace)
{
    if (!workspace)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "workspace = NULL: must point to where the workspace goes");
    *workspace = NULL;
    if (!context)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "context = NULL: must be a context");
    msa_workspace *made = context_alloc(context, sizeof *made);
    if (!made)
        return fail(MSA_ERROR_OUT_OF_MEMORY, "workspace: %zu bytes could not be allocated", sizeof *made);
    made->context = context;
    atomic_fetch_add_explicit(&context->references, 1, memory_order_relaxed);
    msa_status status = msa_workspace_reserve(made, bytes);
    if (status) {
        msa_workspace_destroy(made);
        return status;
    }
    *workspace = made;
    return MSA_SUCCESS;
}

msa_status msa_workspace_reserve(msa_workspace *workspace, size_t bytes)
{
    if (!workspace)
        return fail(MSA_ERROR_INVALID_ARGUMENT, "workspace = NULL: must be a workspace");
    if (bytes <= workspace->bytes)
        return MSA_SUCCESS;
    const struct backend *backend = workspace->context->backend;
    void *data = backend->device_alloc(workspace->context, bytes);
    if (!data)
        return fail(MSA_ERROR_OUT_OF_MEMORY, "bytes = %zu: a workspace of this size could not be allocated", bytes);
    backend->device_free(workspace->context, workspace->data);
    workspace->data = data;
    workspace->bytes = bytes;
    return MSA_SUCCESS;
}

void *msa_workspace_data(const msa_workspace *workspace)
{
    return workspace ? workspace->data : NULL;
}

size_t msa_workspace_bytes(const msa_workspace *workspace)
{
    return workspace ? workspace->bytes : 0;
}

void msa_workspace_destroy(msa_workspace *workspace)
{
    if (!workspace)
        return;
    msa_context *context = workspace->context;
    context->backend->device_free(context, workspace->data);
    context_free(context, workspace);
    context_release(context);
}
