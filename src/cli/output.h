/* SPDX-License-Identifier: MIT
 *
 * output.h - files that the tool writes: whole, or as they were before.
 */
#ifndef MSA_OUTPUT_H
#define MSA_OUTPUT_H

#include <stdbool.h>
#include <stdio.h>

struct output {
    FILE *stream;
    const char *option, *path; /* as messages name them */
    char *temporary;           /* the name until output_close; NULL: written under its own */
};

/* Whether the file of an option can be written, before the work begins; leaves what is there. CLI_OK or CLI_BAD. */
int output_check(const char *option, const char *path);
/* An existing file's mode and, where the system allows it, owner stay. CLI_OK, or CLI_BAD after a message and with nothing
 * to close. */
int output_open(struct output *output, const char *option, const char *path);
/* Under which name others may write what the stream would. */
const char *output_name(const struct output *output);
/* Puts the file in its place; one that is not good, or cannot be, leaves an earlier file as it was. CLI_OK or CLI_BAD. */
int output_close(struct output *output, bool good);

#endif
