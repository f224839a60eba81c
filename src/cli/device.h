/* SPDX-License-Identifier: MIT
 *
 * device.h - a context, and memory where it computes. All buffers and copies of the tool go through here.
 */
#ifndef MSA_CLI_DEVICE_H
#define MSA_CLI_DEVICE_H

#include "cli.h"

struct device {
    msa_context *context;
    int32_t ordinal;   /* MSA_DEVICE_CPU or a CUDA ordinal */
    msa_stream stream; /* of all calls; copies wait for it */
    void *mark[2];     /* CUDA: events at the begin and end of what is timed */
    double started;    /* CPU */
};

/* Threads of this machine for the tool's own work. */
int host_threads(void);
/* CLI_OK, or CLI_BAD after a message. */
int device_open(struct device *device, const struct run_options *options);
void device_close(struct device *device);

/* The last cache of a CUDA device, 0 if it cannot be asked. */
size_t device_cache_bytes(int32_t ordinal);

/* Whether the device computes on host memory, so that host tensors need no copy. */
bool device_is_host(const struct device *device);
/* 256-byte aligned, at least one byte; NULL after a message if there is no memory. */
void *device_alloc(const struct device *device, size_t bytes);
void device_free(const struct device *device, void *pointer); /* NULL is fine */
/* These wait until they are done. CLI_OK or CLI_BAD. */
int device_copy_in(const struct device *device, void *destination, const void *host, size_t bytes);
int device_copy_out(const struct device *device, void *host, const void *source, size_t bytes);
int device_fill(const struct device *device, void *destination, int byte, size_t bytes);

/* Time what the calls in between do: on a CPU by the clock; on a CUDA device they are captured into a graph, which
 * device_end replays twice; the device times the second. CLI_OK or CLI_BAD. */
int device_begin(struct device *device);
int device_end(struct device *device, double *seconds);

#endif
