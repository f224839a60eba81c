/* SPDX-License-Identifier: MIT
 *
 * casefile.h - a small reader of trusted case files (safetensors), so that test programs need no library for it.
 */
#ifndef MSA_TESTS_CASEFILE_H
#define MSA_TESTS_CASEFILE_H

#include <stdint.h>

#include "msa.h"

typedef struct case_tensor {
    msa_dtype dtype; /* I32 and I64 tensors: MSA_DTYPE_DEFAULT; U8: MSA_NVFP4 */
    int rank;
    int64_t shape[4];
    const void *data; /* aligned to 256 bytes */
} case_tensor;

typedef struct casefile casefile;

casefile *casefile_open(const char *path);                               /* NULL: not readable */
const case_tensor *casefile_tensor(const casefile *f, const char *name); /* NULL: not there */
const char *casefile_text(const casefile *f, const char *key);           /* of the metadata; NULL: not there */
void casefile_close(casefile *f);                                        /* NULL is fine */

#endif /* MSA_TESTS_CASEFILE_H */
