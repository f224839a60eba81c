/* SPDX-License-Identifier: MIT
 *
 * ahead_zmm.h - fetching the page that comes next while this one is multiplied.
 */
#ifndef MSA_AHEAD_ZMM_H
#define MSA_AHEAD_ZMM_H

#include "cpu.h"
#include "unroll.h"

#include <immintrin.h>

/* The next rows of the page that comes next, towards L2. */
INLINE void fetch_ahead(struct cpu_ahead *ahead)
{
    if (ahead->rows == 0)
        return;
    ahead->rows--;
    for (int i = 0; i < ahead->places; i++) {
        for (int line = 0; line < ahead->lines; line++)
            _mm_prefetch((const char *)ahead->data[i] + 64 * line, _MM_HINT_T1);
        ahead->data[i] += ahead->stride[i];
    }
}

#endif
