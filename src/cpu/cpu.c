/* SPDX-License-Identifier: MIT
 *
 * cpu.c - the CPU backend: instruction-set detection, the kernel table, threads, and the backend's function table.
 */
#include "convert_table.h"
#include "kernels.h"

#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

/* ------------------------------------------------------------------------------------------------ instruction sets */

static const char *const isa_names[NUM_ISAS] = {"c", "avx2", "avx512", "avx512bf16", "amx", "neon"};

#if defined(__x86_64__)
/* The processor's AMX with BF16, the system's care for its registers (XCR0), and the process's permission to use them,
 * which Linux gives to who asks. (It refuses when an alternative signal stack is too small for them.) */
static bool amx_supported(void)
{
    enum { TILE_DATA = 18, ARCH_REQ_XCOMP_PERM = 0x1023 };
    unsigned a, b, c, d, xcr0, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return false;
    unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24, tiles = 3u << 17;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    return d & amx_bf16 && d & amx_tile && (xcr0 & tiles) == tiles &&
           !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA);
}
#endif

static bool isa_supported(enum cpu_isa isa)
{
    switch (isa) {
    case ISA_C:
        return true;
#if defined(__x86_64__)
    /* These ask the operating system's XCR0 too. */
    case ISA_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case ISA_AVX512:
        return isa_supported(ISA_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case ISA_AVX512BF16:
        return isa_supported(ISA_AVX512) && __builtin_cpu_supports("avx512bf16") &&
               __builtin_cpu_supports("avx512vbmi");
    case ISA_AMX:
        return isa_supported(ISA_AVX512BF16) && __builtin_cpu_supports("gfni") && amx_supported();
#elif defined(__aarch64__)
    case ISA_NEON:
        return true;
#endif
    default:
        return false;
    }
}

/* Whether the avx512bf16 level is the faster one where it exists; the bits are the same. vdpbf16ps does twice the work
 * of FMA on AMD's Zen 4, and half of it on Intel's Sapphire Rapids, which starts one in two cycles. */
static bool bf16_pays(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

/* The processor's own name for itself where it has one. */
static void read_name(char *name, size_t bytes)
{
    snprintf(name, bytes, "cpu");
#if defined(__x86_64__)
    unsigned words[12];
    for (unsigned i = 0; i < 3; i++)
        if (!__get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]))
            return;
    char text[sizeof words + 1] = "";
    memcpy(text, words, sizeof words);
    const char *first = text + strspn(text, " ");
    if (*first)
        snprintf(name, bytes, "%s", first);
#endif
}

/* NEON is above C and beside the x86 levels. */
static bool isa_within(enum cpu_isa isa, enum cpu_isa cap)
{
    return isa == ISA_C || (isa <= cap && (isa == ISA_NEON) == (cap == ISA_NEON));
}

struct kernel_entry {
    enum cpu_isa isa;
    const char *name, *operation, *formats;
    void (*function)(void);
};

static const struct kernel_entry kernel_list[] = {
#define MSA_CPU_KERNEL(isa, type, slot, function, operation, formats) \
    {isa, #function, operation, formats, (void (*)(void))function},
#include "../kernels.inc"
};

const char *cpu_kernel_name(void (*function)(void))
{
    for (size_t i = 0; i < sizeof kernel_list / sizeof *kernel_list; i++)
        if (kernel_list[i].function == function)
            return kernel_list[i].name;
    return "none";
}

size_t cpu_kernel_get(const msa_context *context, size_t index, msa_kernel_info *info)
{
    size_t count = sizeof kernel_list / sizeof *kernel_list;
    if (index < count) {
        const struct kernel_entry *entry = &kernel_list[index];
        info->name = entry->name;
        info->operation = entry->operation;
        info->formats = entry->formats;
        info->isa = isa_names[entry->isa];
        const struct cpu_device *device = context && context->device == MSA_DEVICE_CPU ? context->backend_data : NULL;
        /* Capped first: to ask for AMX changes the process. */
        info->available =
            device && (!device->capped || isa_within(entry->isa, device->isa)) && isa_supported(entry->isa);
    }
    return count;
}

/* ------------------------------------------------------------------------------------------------ small results */

uint32_t cpu_begin_flush(void)
{
#if defined(__x86_64__)
    uint32_t mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON);
    return mode;
#else
    return 0;
#endif
}

void cpu_end_flush(uint32_t mode)
{
#if defined(__x86_64__)
    _mm_setcsr(mode);
#else
    (void)mode;
#endif
}

/* ------------------------------------------------------------------------------------------------ threads */

struct parallel_call {
    void (*task)(void *arg, size_t i, size_t thread);
    void *arg;
};

msa_status cpu_parallel(const msa_context *context, size_t n, void (*task)(void *arg, size_t i, size_t thread),
                        void *arg)
{
    if (context->num_threads == 1 || n <= 1) {
        for (size_t i = 0; i < n; i++)
            task(arg, i, 0);
        return MSA_SUCCESS;
    }
    if (context->parallel_for) {
        int result = context->parallel_for(context->parallel_for_data, n, task, arg);
        return result ? fail(MSA_ERROR_CALLBACK, "parallel_for: returned %d, must return 0", result) : MSA_SUCCESS;
    }
#ifdef _OPENMP
    int threads = n < (size_t)context->num_threads ? (int)n : context->num_threads;
#pragma omp parallel num_threads(threads)
    {
        size_t thread = (size_t)omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < n; i++)
            task(arg, i, thread);
    }
#else
    for (size_t i = 0; i < n; i++)
        task(arg, i, 0);
#endif
    return MSA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------------ backend table */

static msa_status cpu_plan(msa_plan *plan)
{
    msa_status status = cpu_step_create(plan);
    if (!status)
        status = plan_is_index(plan) ? cpu_index_plan(plan) : cpu_attention_plan(plan);
    return status;
}

static msa_status cpu_prepare(msa_plan *plan, msa_stream stream)
{
    (void)stream;
    cpu_step_prepare(plan);
    return MSA_SUCCESS;
}

static msa_status cpu_plan_error(msa_plan *plan, uint32_t *bits, msa_stream stream)
{
    (void)stream;
    *bits = atomic_load_explicit(&plan->error, memory_order_relaxed);
    return MSA_SUCCESS;
}

/* Aligned by hand, so that the caller's allocator serves: the block's own address stands just before the data. */
static void *cpu_device_alloc(msa_context *context, size_t bytes)
{
    if (bytes > SIZE_MAX - 512)
        return NULL;
    char *block = context->alloc(context->alloc_data, bytes + 256 + sizeof(void *));
    if (!block)
        return NULL;
    char *data = (char *)(((uintptr_t)block + sizeof(void *) + 255) & ~(uintptr_t)255);
    memcpy(data - sizeof(void *), &block, sizeof block);
    return data;
}

static void cpu_device_free(msa_context *context, void *pointer)
{
    void *block = NULL;
    if (pointer)
        memcpy(&block, (char *)pointer - sizeof(void *), sizeof block);
    context_free(context, block);
}

static void cpu_context_destroy(msa_context *context)
{
    context_free(context, context->backend_data);
}

static const struct backend cpu_backend = {
    .plan = cpu_plan,
    .plan_destroy = cpu_step_destroy,
    .prepare = cpu_prepare,
    .index_run = cpu_index_run,
    .attention_run = cpu_attention_run,
    .plan_error = cpu_plan_error,
    .topk = cpu_topk,
    .merge = cpu_merge,
    .quantise = cpu_quantise,
    .convert = cpu_convert,
    .cache_write = cpu_cache_write,
    .device_alloc = cpu_device_alloc,
    .device_free = cpu_device_free,
    .context_destroy = cpu_context_destroy,
};

/* `from`: who gave the name. */
static msa_status choose_isa(const char *from, const char *name, enum cpu_isa *isa)
{
    *isa = ISA_C;
    for (int candidate = 0; candidate < NUM_ISAS; candidate++) {
        if (name && !strcmp(name, isa_names[candidate])) {
            *isa = (enum cpu_isa)candidate;
            return isa_supported(*isa) ? MSA_SUCCESS
                                       : fail(MSA_ERROR_UNSUPPORTED, "%s = \"%s\": this machine lacks it", from, name);
        }
        if (!name && isa_supported((enum cpu_isa)candidate) && (candidate != ISA_AVX512BF16 || bf16_pays()))
            *isa = (enum cpu_isa)candidate;
    }
    return name ? fail(MSA_ERROR_INVALID_ARGUMENT, "%s = \"%s\": must be c, avx2, avx512, avx512bf16, amx or neon",
                       from, name)
                : MSA_SUCCESS;
}

msa_status cpu_context_init(msa_context *context, const msa_context_options *options)
{
    const char *from = options->isa ? "isa" : "MSA_ISA", *name = options->isa;
    if (!name && (name = getenv("MSA_ISA")) && !*name)
        name = NULL;
    enum cpu_isa isa;
    msa_status status = choose_isa(from, name, &isa);
    if (status)
        return status;
    struct cpu_device *device = context_alloc(context, sizeof *device);
    if (!device)
        return fail(MSA_ERROR_OUT_OF_MEMORY, "context: %zu bytes could not be allocated", sizeof *device);
    device->isa = isa;
    device->capped = name != NULL;
    convert_table_init();
#define MSA_CPU_KERNEL(level, type, slot, function, operation, formats) \
    if (isa_within(level, isa) && isa_supported(level))                 \
        device->kernels.slot = function;
#include "../kernels.inc"
#if defined(__x86_64__)
    device->kernels.begin_tiles = begin_tiles_amx; /* called around kernels that only ISA_AMX has */
    device->kernels.end_tiles = end_tiles_amx;
#endif
    context->backend = &cpu_backend;
    context->backend_data = device;
    context->isa_name = isa_names[isa];
    read_name(context->device_name, sizeof context->device_name);
    context->num_threads = options->num_threads;
    if (!context->num_threads) {
#ifdef _OPENMP
        int most = omp_get_max_threads();
        context->num_threads = most < MAX_THREADS ? most : MAX_THREADS;
#else
        context->num_threads = 1;
#endif
    }
    return MSA_SUCCESS;
}
