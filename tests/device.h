/* SPDX-License-Identifier: MIT
 *
 * device.h - host memory that kernels of a CUDA device read and write in place, under its own address, so that tests
 * give the same buffers, with their guard pages and canaries, to every device.
 */
#ifndef MSA_TESTS_DEVICE_H
#define MSA_TESTS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* From here on device_share and device_wait are for this CUDA device. Ends the program if there is none. */
void device_use(int32_t ordinal);
/* Whether device_use was called. */
bool device_in_use(void);
/* Whole pages. Nothing if no device is in use. */
void device_share(void *data, size_t bytes);
void device_unshare(void *data);
/* Waits for all work of the device; NULL, or what went wrong. */
const char *device_wait(void);

#endif /* MSA_TESTS_DEVICE_H */
