/* SPDX-License-Identifier: MIT
 *
 * peak.h - what this machine can do at most: arithmetic and memory rates, measured in the run that uses them. */
#ifndef MSA_CLI_PEAK_H
#define MSA_CLI_PEAK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum peak {
    PEAK_FMA_128, /* FP32 multiply-add, by register width in bits */
    PEAK_FMA_256,
    PEAK_FMA_512,
    PEAK_BF16_DOT, /* pairs of BF16 into FP32 (vdpbf16ps, 512 bits) */
    PEAK_AMX,      /* the same by tiles (tdpbf16ps) */
    PEAK_READ,     /* DRAM read */
    PEAK_COPY,     /* DRAM copy, bytes read + bytes written */
    NUM_PEAKS
};
extern const char *const peak_names[NUM_PEAKS];

/* A peak measured beside something else, window by window, each some two milliseconds; `threads` threads together. */
struct peak_probe {
    enum peak peak;
    int threads;
    double (*arithmetic)(int64_t steps); /* returns the floating-point operations it did; NULL: memory */
    int64_t steps;
    unsigned char *buffer;
    size_t bytes, chunk, offset;
};
/* False where the machine lacks the instructions, or memory for it. Close it in any case. */
bool peak_open(struct peak_probe *probe, enum peak peak, int threads);
double peak_window(struct peak_probe *probe); /* in GFLOP/s or GB/s */
void peak_close(struct peak_probe *probe);

/* The best of several windows, or 0. Measured at the first call, then remembered. */
double peak_rate(enum peak peak, int threads);

/* The arithmetic peak that a kernel is measured against, by the instruction set its name ends in: avx512bf16
 * multiplies in vdpbf16ps, every other one in FP32 at its own register width. Portable C is measured against the widest
 * registers of the machine, so that its fraction tells what it leaves on the table. */
enum peak peak_of_kernel(const char *kernel);

/* The largest cache that one core can reach, in bytes. */
size_t cache_bytes(void);

/* Of a GPU: dense products of tensor cores, and device memory; GFLOP/s and GB/s. */
enum cuda_peak { CUDA_PEAK_F16, CUDA_PEAK_FP8, CUDA_PEAK_READ, CUDA_PEAK_COPY, NUM_CUDA_PEAKS };
extern const char *const cuda_peak_names[NUM_CUDA_PEAKS];

/* Measured at the first call, then remembered; all 0 if the device cannot be used or this tool has no CUDA. */
const double *cuda_peaks(int ordinal);
/* The measurement: peak_cuda.cu. A cudaError_t. */
int cuda_peaks_measure(int ordinal, double rates[NUM_CUDA_PEAKS]);

#ifdef __cplusplus
}
#endif

#endif
