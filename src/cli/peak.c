/* SPDX-License-Identifier: MIT
 *
 * peak.c - measured peaks, in windows of about two milliseconds: shorter than the time that a busy machine lets a
 * thread run.
 *
 * Arithmetic: loops of nothing but one instruction, with more independent accumulators than latency times throughput of
 * any known core (4 cycles x 2 a cycle for FMA, 8 x 2 for vdpbf16ps). Memory: single passes over what the caches do not
 * hold. Several streams with prefetch: a Xeon core (family 6, model 207) reads 19 GB/s from 8 of them, 10 GB/s
 * from one, and copies 26 GB/s by 4 of them, 22 GB/s by one.
 */
#include "peak.h"

#include "cli.h"
#include "parallel.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define WINDOWS 25
#define WINDOW_SECONDS 0.002
#define READ_STREAMS 8
#define COPY_STREAMS 4
#define PREFETCH 512 /* bytes */

size_t cache_bytes(void)
{
    long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (bytes <= 0)
        bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return bytes > 0 ? (size_t)bytes : (size_t)32 << 20;
}

/* ---- arithmetic */

/* Each runs `steps` steps and returns the floating-point operations it did. */
typedef double arithmetic_fn(int64_t steps);

/* What was computed goes where the compiler must assume that somebody reads it. */
static void consume(const void *result)
{
    __asm__ volatile("" : : "r"(result) : "memory");
}

/* The accumulators of one step as an unrolled loop over an array that lives in registers. */
#define ARITHMETIC(name, attributes, vector, count, flops, zero, step) \
    attributes static double name(int64_t steps)                       \
    {                                                                  \
        vector acc[count];                                             \
        for (int i = 0; i < (count); i++) {                            \
            acc[i] = zero;                                             \
        }                                                              \
        for (int64_t s = 0; s < steps; s++) {                          \
            _Pragma("GCC unroll 24") for (int i = 0; i < (count); i++) \
            {                                                          \
                acc[i] = step;                                         \
            }                                                          \
        }                                                              \
        consume(acc);                                                  \
        return (double)steps * (count) * (flops);                      \
    }

#if defined(__x86_64__)
ARITHMETIC(fma_128, __attribute__((target("fma"))), __m128, 12, 8, _mm_setzero_ps(),
           _mm_fmadd_ps(_mm_set1_ps(1.0f), _mm_set1_ps(0.5f), acc[i]))
ARITHMETIC(fma_256, __attribute__((target("avx2,fma"))), __m256, 12, 16, _mm256_setzero_ps(),
           _mm256_fmadd_ps(_mm256_set1_ps(1.0f), _mm256_set1_ps(0.5f), acc[i]))
ARITHMETIC(fma_512, __attribute__((target("avx512f"))), __m512, 24, 32, _mm512_setzero_ps(),
           _mm512_fmadd_ps(_mm512_set1_ps(1.0f), _mm512_set1_ps(0.5f), acc[i]))
ARITHMETIC(bf16_dot, __attribute__((target("avx512f,avx512bf16"))), __m512, 24, 64, _mm512_setzero_ps(),
           _mm512_dpbf16_ps(acc[i], (__m512bh)_mm512_set1_epi16(0x3F80), (__m512bh)_mm512_set1_epi16(0x3F00)))

/* Four tiles of sums, 16x16 times 32 products each. Who asks has a context with kernels on AMX, and with it
 * permission. */
static double amx(int64_t steps)
{
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16}};
    __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm4\n\ttilezero %%tmm5" : : "m"(config));
    for (int64_t s = 0; s < steps; s++)
        __asm__ volatile("tdpbf16ps %%tmm5, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm5, %%tmm4, %%tmm1\n\t"
                         "tdpbf16ps %%tmm5, %%tmm4, %%tmm2\n\ttdpbf16ps %%tmm5, %%tmm4, %%tmm3"
                         : : : "memory");
    __asm__ volatile("tilerelease");
    return (double)steps * 4 * 2 * 16 * 16 * 32;
}
#elif defined(__aarch64__)
ARITHMETIC(fma_128, , float32x4_t, 24, 8, vdupq_n_f32(0.0f), vfmaq_n_f32(acc[i], vdupq_n_f32(1.0f), 0.5f))
#endif

struct arithmetic_job {
    arithmetic_fn *fn;
    int64_t steps;
    double *flops; /* by thread */
};

static void run_arithmetic(void *arg, int thread, int threads)
{
    (void)threads;
    const struct arithmetic_job *job = arg;
    job->flops[thread] = job->fn(job->steps);
}

/* Steps that fill a window. The shortest of three runs counts: one that another job interrupts looks long enough. */
static int64_t find_steps(arithmetic_fn *fn)
{
    for (int64_t steps = 1000;; steps *= 2) {
        double shortest = WINDOW_SECONDS;
        for (int i = 0; i < 3; i++) {
            double start = seconds_now();
            fn(steps);
            double elapsed = seconds_now() - start;
            shortest = elapsed < shortest ? elapsed : shortest;
        }
        if (shortest >= WINDOW_SECONDS)
            return steps;
    }
}

static double arithmetic_window(arithmetic_fn *fn, int64_t steps, int threads)
{
    double flops[CLI_MAX_THREADS], sum = 0;
    struct arithmetic_job job = {fn, steps, flops};
    double start = seconds_now();
    parallel_run(threads, run_arithmetic, &job);
    double elapsed = seconds_now() - start;
    for (int t = 0; t < threads; t++)
        sum += flops[t];
    return sum / elapsed * 1e-9;
}

/* ---- memory */

typedef uint64_t vec __attribute__((vector_size(32), aligned(32)));

enum memory_work { TOUCH, READ, COPY };

/* A chunk of memory in slices: each thread works on its own, which it touched first. */
struct memory_job {
    unsigned char *chunk;
    size_t slice; /* bytes */
    enum memory_work work;
};

static void read_slice(const unsigned char *slice, size_t bytes)
{
    vec sum[8] = {0};
    size_t stream = bytes / READ_STREAMS;
    for (size_t offset = 0; offset < stream; offset += sizeof(sum)) {
        for (size_t at = offset; at < bytes; at += stream) {
            for (size_t line = 0; line < sizeof(sum); line += 64)
                __builtin_prefetch(slice + at + line + PREFETCH);
            for (int i = 0; i < 8; i++)
                sum[i] += ((const vec *)(slice + at))[i];
        }
    }
    consume(sum);
}

/* Stores that pass by the caches where there are any: a plain store reads the line first. */
static void copy_slice(unsigned char *to, const unsigned char *from, size_t bytes)
{
#if defined(__x86_64__)
    size_t stream = bytes / COPY_STREAMS;
    for (size_t offset = 0; offset < stream; offset += 64) {
        for (size_t at = offset; at < bytes; at += stream) {
            __builtin_prefetch(from + at + PREFETCH);
            for (size_t i = at; i < at + 64; i += 16)
                _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(from + i)));
        }
    }
    _mm_sfence();
#else
    memcpy(to, from, bytes);
#endif
    consume(to);
}

static void run_memory(void *arg, int thread, int threads)
{
    (void)threads;
    const struct memory_job *job = arg;
    unsigned char *slice = job->chunk + job->slice * (size_t)thread;
    if (job->work == TOUCH)
        memset(slice, 1, job->slice);
    else if (job->work == READ)
        read_slice(slice, job->slice);
    else
        copy_slice(slice + job->slice / 2, slice, job->slice / 2);
}

static double run_chunk(unsigned char *chunk, size_t bytes, enum memory_work work, int threads)
{
    struct memory_job job = {chunk, bytes / (size_t)threads / 4096 * 4096, work};
    double start = seconds_now();
    parallel_run(threads, run_memory, &job);
    return (double)job.slice * threads / (seconds_now() - start);
}

/* Twice what the caches hold, in whole chunks, all touched: a chunk is no longer in the caches when its turn comes
 * again. */
static bool memory_open(struct peak_probe *probe)
{
    size_t huge = (size_t)2 << 20, ram = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    size_t half = cache_bytes() < 64 * huge ? 64 * huge : cache_bytes();
    half = (half < ram / 8 ? half : ram / 8) / (8 * huge) * (8 * huge);
    size_t chunk = 4 * huge * (size_t)probe->threads;
    chunk = chunk > half / 8 ? half / 8 : chunk < 8 * huge ? 8 * huge : chunk;
    if (!chunk)
        return false; /* hardly any memory */
    probe->chunk = chunk;
    probe->bytes = 2 * half / chunk * chunk;
    probe->buffer = aligned_alloc(huge, 2 * half);
    if (!probe->buffer)
        return false;
    madvise(probe->buffer, 2 * half, MADV_HUGEPAGE);
    for (size_t offset = 0; offset < probe->bytes; offset += chunk)
        run_chunk(probe->buffer + offset, chunk, TOUCH, probe->threads);
    return true;
}

static double memory_window(struct peak_probe *probe)
{
    enum memory_work work = probe->peak == PEAK_COPY ? COPY : READ;
    double rate = run_chunk(probe->buffer + probe->offset, probe->chunk, work, probe->threads);
    probe->offset = (probe->offset + probe->chunk) % probe->bytes;
    return rate * 1e-9;
}

/* ---- what others call */

const char *const peak_names[NUM_PEAKS] = {"fma 128", "fma 256", "fma 512", "bf16 dot", "amx", "read", "copy"};

#if defined(__x86_64__)
static bool amx_available(void)
{
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;
    options.isa = "amx";
    msa_context *context;
    bool available = msa_context_create(&options, &context) == MSA_SUCCESS;
    msa_context_destroy(context);
    return available;
}
#endif

/* NULL where the machine lacks the instructions. */
static arithmetic_fn *arithmetic_of(enum peak peak)
{
    switch (peak) {
#if defined(__x86_64__)
    case PEAK_FMA_128:
        return __builtin_cpu_supports("fma") ? fma_128 : NULL;
    case PEAK_FMA_256:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? fma_256 : NULL;
    case PEAK_FMA_512:
        return __builtin_cpu_supports("avx512f") ? fma_512 : NULL;
    case PEAK_BF16_DOT:
        return __builtin_cpu_supports("avx512bf16") ? bf16_dot : NULL;
    case PEAK_AMX:
        return amx_available() ? amx : NULL;
#elif defined(__aarch64__)
    case PEAK_FMA_128:
        return fma_128;
#endif
    default:
        return NULL;
    }
}

bool peak_open(struct peak_probe *probe, enum peak peak, int threads)
{
    *probe = (struct peak_probe){.peak = peak, .threads = threads};
    if (peak == PEAK_READ || peak == PEAK_COPY)
        return memory_open(probe);
    probe->arithmetic = arithmetic_of(peak);
    probe->steps = probe->arithmetic ? find_steps(probe->arithmetic) : 0;
    return probe->arithmetic;
}

double peak_window(struct peak_probe *probe)
{
    return probe->arithmetic ? arithmetic_window(probe->arithmetic, probe->steps, probe->threads)
                             : memory_window(probe);
}

void peak_close(struct peak_probe *probe)
{
    free(probe->buffer);
}

double peak_rate(enum peak peak, int threads)
{
    static double known[NUM_PEAKS][CLI_MAX_THREADS + 1];
    static bool measured[NUM_PEAKS][CLI_MAX_THREADS + 1];
    if (measured[peak][threads])
        return known[peak][threads];
    measured[peak][threads] = true;
    struct peak_probe probe;
    double best = 0;
    bool open = peak_open(&probe, peak, threads);
    for (int window = 0; open && window < WINDOWS; window++) {
        double rate = peak_window(&probe);
        best = rate > best ? rate : best;
    }
    peak_close(&probe);
    return known[peak][threads] = best;
}

enum peak peak_of_kernel(const char *kernel)
{
    static const struct {
        const char *isa;
        enum peak peak;
    } peaks[] = {{"amx", PEAK_AMX},
                 {"avx512bf16", PEAK_BF16_DOT},
                 {"avx512", PEAK_FMA_512},
                 {"avx2", PEAK_FMA_256},
                 {"neon", PEAK_FMA_128}};
    const char *underscore = strrchr(kernel, '_'), *isa = underscore ? underscore + 1 : "";
    for (size_t i = 0; i < sizeof(peaks) / sizeof(*peaks); i++) {
        if (strcmp(isa, peaks[i].isa) == 0)
            return peaks[i].peak;
    }
    enum peak widest = PEAK_FMA_512;
    while (widest > PEAK_FMA_128 && !arithmetic_of(widest))
        widest--;
    return widest;
}

const char *const cuda_peak_names[NUM_CUDA_PEAKS] = {"f16", "fp8", "read", "copy"};

const double *cuda_peaks(int ordinal)
{
    static double known[NUM_CUDA_PEAKS];
    static int measured = -1;
    if (measured != ordinal) {
        for (int p = 0; p < NUM_CUDA_PEAKS; p++)
            known[p] = 0;
#ifdef MSA_WITH_CUDA
        if (cuda_peaks_measure(ordinal, known))
            cli_error("the peaks of the device cannot be measured");
#endif
        measured = ordinal;
    }
    return known;
}
