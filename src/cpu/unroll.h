/* SPDX-License-Identifier: MIT
 *
 * unroll.h - how kernels make sure that an array of vectors lives in registers: the functions around it are inlined,
 * so that its bounds are constants, and its loops are unrolled completely. (gcc unrolls up to a count. clang takes a
 * count other than the loop's own as a reason to leave the array in memory, at a seventh of the speed.)
 */
#ifndef MSA_UNROLL_H
#define MSA_UNROLL_H

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

#endif
