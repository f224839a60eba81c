/* SPDX-License-Identifier: MIT
 *
 * main() for a fuzz target without libFuzzer: runs it once on each file, so that every compiler replays the corpus.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

static int replay(const char *path)
{
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = malloc(1 << 20);
    size_t size = 0;

    if (!file || !bytes) {
        perror(path);
        return 1;
    }
    size = fread(bytes, 1, 1 << 20, file);
    fclose(file);
    printf("%s\n", path);
    fflush(stdout);
    uint8_t *exact = realloc(bytes, size ? size : 1); /* a read past the end is one past the block */

    LLVMFuzzerTestOneInput(exact ? exact : bytes, size);
    free(exact ? exact : bytes);
    return 0;
}

int main(int argc, char **argv)
{
    int failed = 0;

    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++)
        failed += replay(argv[i]);
    printf("%d passed, %d failed, 0 skipped\n", argc - 1 - failed, failed);
    return failed || argc < 2;
}
