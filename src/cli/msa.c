/* SPDX-License-Identifier: MIT
 *
 * msa.c - the command-line tool: finds the subcommand.
 */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command {
    const char *name, *title; /* title is what messages and usage call it */
    int (*run)(int argc, const char **argv);
    const char *summary;
} commands[] = {
    {"run", "msa run", cmd_run, "run a case file and write the results"},
    {"check", "msa check", cmd_check, "run case files and compare with their expected results"},
    {"make", "msa make", cmd_make, "make a case file"},
    {"bench", "msa bench", cmd_bench, "time kernels and suites"},
    {"info", "msa info", cmd_info, "show devices, instruction sets and kernels"},
};
enum { NUM_COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void print_usage(void)
{
    printf("Usage: msa COMMAND [OPTION...]\n\nMiniMax Sparse Attention from the command line.\n\n");
    for (int i = 0; i < NUM_COMMANDS; i++)
        printf("  msa %-6s  %s\n", commands[i].name, commands[i].summary);
    printf("\n  msa COMMAND --help   options of a command\n  msa --version\n\n"
           "Exit status: 0 fine; 1 a comparison failed; 2 bad usage, bad input or error bits set.\n");
}

static int dispatch(int argc, const char **argv)
{
    if (argc < 2)
        return cli_error("a command is missing; see msa --help");
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_usage();
        return CLI_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("msa %s\n", msa_version());
        return CLI_OK;
    }
    for (int i = 0; i < NUM_COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            argv[1] = commands[i].title;
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    return cli_error("'%s' is no command; see msa --help", argv[1]);
}

/* At exit, as popt ends the program itself after --help. */
static void finish_output(void)
{
    if (fflush(stdout) != 0 || ferror(stdout))
        _exit(cli_error("the output cannot be written"));
}

int main(int argc, char **argv)
{
    atexit(finish_output);
    return dispatch(argc, (const char **)argv);
}
