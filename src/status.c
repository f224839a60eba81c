/* SPDX-License-Identifier: MIT
 *
 * status.c - status texts and the thread's last message.
 */
#include "internal.h"

#include <stdarg.h>

static _Thread_local char last_error[512];

msa_status fail(msa_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *msa_last_error(void)
{
    return last_error;
}

const char *msa_status_string(msa_status status)
{
    switch (status) {
#define STATUS_CASE(name, value, text) \
    case name:                         \
        return text;
        MSA_STATUS_LIST(STATUS_CASE)
#undef STATUS_CASE
    }
    return "unknown status";
}

#define STRING_(x) #x
#define STRING(x) STRING_(x)

const char *msa_version(void)
{
    return STRING(MSA_VERSION_MAJOR) "." STRING(MSA_VERSION_MINOR) "." STRING(MSA_VERSION_PATCH);
}

const char *dtype_name(msa_dtype dtype)
{
    switch (dtype) {
    case MSA_DTYPE_DEFAULT:
        return "default";
    case MSA_F32:
        return "F32";
    case MSA_BF16:
        return "BF16";
    case MSA_FP16:
        return "FP16";
    case MSA_E4M3:
        return "E4M3";
    case MSA_NVFP4:
        return "NVFP4";
    case MSA_E5M2:
        return "E5M2";
    }
    return "unknown";
}

size_t dtype_row_bytes(msa_dtype dtype, int64_t elements)
{
    switch (dtype) {
    case MSA_F32:
        return (size_t)elements * 4;
    case MSA_BF16:
    case MSA_FP16:
        return (size_t)elements * 2;
    case MSA_NVFP4:
        return (size_t)elements / 2;
    default:
        return (size_t)elements;
    }
}
