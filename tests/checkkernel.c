/* SPDX-License-Identifier: MIT
 *
 * checkkernel - checks every operation on every kernel that this machine has against the oracle and, bit for bit,
 * against the portable C kernels; with --bench it then times those that passed.
 */
#include "checkkernel.h"

int main(int argc, char **argv)
{
    harness h = harness_start(
        argc, argv,
        "Checks all kernels of this machine against a double-precision oracle and against the portable C\n"
        "code. Operations: oracle convert quantise cache_write topk combine merge index prefill decode\n"
        "probability shapes, and on a CUDA device: graph stream device.");
    check_oracle(&h);
    check_formats(&h);
    check_cache_write(&h);
    check_topk(&h);
    check_combine(&h);
    check_index(&h);
    check_attention(&h);
    check_probability(&h);
    check_shapes(&h);
    check_cuda(&h);
    return harness_finish(&h);
}
