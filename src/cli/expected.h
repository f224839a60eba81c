/* SPDX-License-Identifier: MIT
 *
 * expected.h - right answers for a made case, from the double-precision oracle of the tests.
 */
#ifndef MSA_EXPECTED_H
#define MSA_EXPECTED_H

#include "workload.h"

/* Adds expected.* to the workload's file. An index_q row whose selection hangs on the rounding of two scores is drawn
 * again until it does not, so that any right kernel gives the same lists. CLI_OK or CLI_BAD. */
int expected_add(struct workload *workload, int threads);

#endif
