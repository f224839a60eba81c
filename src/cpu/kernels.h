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

#endif
