/* The file system alone: the cost of a broker's writes without the broker. Batches of `batch` bytes go
 * to `files` files in turn, `merge` of them in each pwritev, from one thread, into fresh preallocated
 * files; prints CPU time, not wall time.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

#define MERGE_MAX 64

static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void name_of(char *name, size_t size, const char *directory, int64_t index)
{
    snprintf(name, size, "%s/load-%lld", directory, (long long)index);
}

int files_main(const struct arguments *arguments)
{
    int64_t files = argument_number(arguments, "files", INT64_MIN), merge = argument_number(arguments, "merge", 1),
            count = argument_number(arguments, "count", INT64_MIN);
    size_t size = (size_t)argument_number(arguments, "batch", INT64_MIN);
    const char *directory = argument_text(arguments, "path", NULL);
    if (files < 1 || merge < 1 || merge > MERGE_MAX)
        fail("files must be at least 1, and merge 1 to %d", MERGE_MAX);
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    uint8_t *bytes = allocate(size);
    struct iovec iov[MERGE_MAX];
    for (int i = 0; i < MERGE_MAX; i++)
        iov[i] = (struct iovec){bytes, size};
    int *fd = allocate(sizeof *fd * (size_t)files);
    int64_t *end = allocate(sizeof *end * (size_t)files);
    char name[4096];
    for (int64_t i = 0; i < files; i++) {
        name_of(name, sizeof name, directory, i);
        fd[i] = open(name, O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
        if (fd[i] < 0 || fallocate(fd[i], FALLOC_FL_KEEP_SIZE, 0, ((int64_t)size * count / files + 65536) * 2))
            die(name);
    }
    int64_t spent = 0;
    for (int half = 0; half < 2; half++) { /* the first half only warms up: the files are not new afterwards */
        spent = cpu_ns();
        for (int64_t i = 0; i < count; i += merge) {
            int64_t file = i / merge % files;
            if (pwritev(fd[file], iov, (int)merge, end[file]) != (ssize_t)(size * (size_t)merge))
                die("write");
            end[file] += (int64_t)size * merge;
        }
        spent = cpu_ns() - spent;
    }
    for (int64_t i = 0; i < files; i++) {
        close(fd[i]);
        name_of(name, sizeof name, directory, i);
        unlink(name);
    }
    printf("{\"what\": \"files\", \"count\": %lld, \"cpu_us_each\": %.3f}\n", (long long)count,
           (double)spent / 1e3 / (double)count);
    return 0;
}
