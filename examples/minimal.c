/* SPDX-License-Identifier: MIT. Which 4 of 10 pages does a query attend to? Its own (the last) and the 3 best. */
#include <msa.h>
#include <stdio.h>

int main(void)
{
    const float scores[10] = {0.5f, -1.0f, 7.0f, 0.25f, 3.0f, 3.0f, -2.0f, 1.0f, 0.0f, 0.0f};
    const int32_t valid_pages[1] = {10};
    int32_t pages[4];
    msa_context *context;
    msa_topk_args args = MSA_TOPK_ARGS_INIT;
    args.scores = scores, args.rows = 1, args.columns = 10, args.valid_pages = valid_pages;
    args.k = 4, args.topk = pages;
    if (msa_context_create(NULL, &context) || msa_topk(context, &args, NULL)) {
        fprintf(stderr, "%s\n", msa_last_error());
        return 1;
    }
    printf("pages %d %d %d %d\n", pages[0], pages[1], pages[2], pages[3]); /* pages 2 4 5 9 */
    msa_context_destroy(context);
    return 0;
}
