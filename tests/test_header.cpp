/* SPDX-License-Identifier: MIT
 *
 * The public header in C++17: the same checks, compiled as C++.
 */
#include "msa.h"

#include <csetjmp>
#include <cstdarg>

extern "C" {
#include <cmocka.h>
}

#include "test_header.c"
