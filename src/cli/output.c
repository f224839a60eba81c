/* SPDX-License-Identifier: MIT
 *
 * output.c - files that the tool writes.
 *
 * A regular file appears whole or not at all: it is written under another name in its folder and renamed. All else
 * (devices, pipes, symbolic links, which may lead to them: /dev/stdout) is opened under its own name and written
 * through, as a rename would replace it.
 */
#include "output.h"
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int output_check(const char *option, const char *path)
{
    struct stat info, target;
    bool there = lstat(path, &info) == 0, leads = stat(path, &target) == 0;
    if (leads && S_ISDIR(target.st_mode))
        return cli_error("%s: '%s' cannot be written: %s", option, path, strerror(EISDIR));
    if (leads && !S_ISREG(target.st_mode)) { /* to open a pipe would wait for its reader, and end its input */
        if (access(path, W_OK) != 0)
            return cli_error("%s: '%s' cannot be written: %s", option, path, strerror(errno));
        return CLI_OK;
    }
    if (there && !leads) /* a link to nothing yet */
        return CLI_OK;
    FILE *file = fopen(path, "a"); /* leaves what is there */
    if (!file)
        return cli_error("%s: '%s' cannot be written: %s", option, path, strerror(errno));
    fclose(file);
    if (!there)
        remove(path);
    return CLI_OK;
}

/* ".msa-PID" in the folder of the path: short, as the name itself may be as long as names can be. */
static char *temporary_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash + 1 - path) : 0;
    char *name = malloc((size_t)folder + 32);
    if (name)
        sprintf(name, "%.*s.msa-%ld", folder, path, (long)getpid());
    return name;
}

int output_open(struct output *output, const char *option, const char *path)
{
    struct stat info;
    bool there = lstat(path, &info) == 0;
    *output = (struct output){.option = option, .path = path};
    if (!there || S_ISREG(info.st_mode)) {
        if (!(output->temporary = temporary_name(path)))
            return cli_error("%s: out of memory", option);
        output->stream = fopen(output->temporary, "wbx");
        if (output->stream && there) { /* the owner first: that may clear bits of the mode */
            if (fchown(fileno(output->stream), info.st_uid, info.st_gid) != 0)
                errno = 0; /* only root may give files away */
            fchmod(fileno(output->stream), info.st_mode & 07777);
        }
    }
    /* A folder that takes no new names may still hold a file that can be written. */
    if (!output->stream && there && (!output->temporary || errno == EACCES)) {
        free(output->temporary);
        output->temporary = NULL;
        output->stream = fopen(path, "wb");
    }
    if (output->stream)
        return CLI_OK;
    cli_error("%s: '%s' cannot be written: %s", option, path, strerror(errno));
    free(output->temporary);
    return CLI_BAD;
}

const char *output_name(const struct output *output)
{
    return output->temporary ? output->temporary : output->path;
}

int output_close(struct output *output, bool good)
{
    errno = 0;
    good &= fflush(output->stream) == 0 && !ferror(output->stream);
    int reason = errno;
    if (fclose(output->stream) != 0 && good) {
        good = false;
        reason = errno;
    }
    if (good && output->temporary && rename(output->temporary, output->path) != 0) {
        good = false;
        reason = errno;
    }
    if (!good && output->temporary)
        remove(output->temporary);
    free(output->temporary);
    if (good)
        return CLI_OK;
    return cli_error("%s: '%s' cannot be written%s%s", output->option, output->path, reason ? ": " : "",
                     reason ? strerror(reason) : "");
}
