/* SPDX-License-Identifier: MIT
 *
 * kernels.h - prototypes of the kernels, from the one list.
 */
#ifndef MSA_CPU_KERNELS_H
#define MSA_CPU_KERNELS_H

#include "cpu.h"

/* Some functions serve two slots, so a prototype can repeat. */
#define MSA_CPU_KERNEL(isa, type, slot, function, operation, formats) type function;
#include "../kernels.inc"

cpu_tiles_fn begin_tiles_amx, end_tiles_amx; /* x86; no kernels, so not in the list */

#endif
