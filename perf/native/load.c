/* The load generator's command line. Arguments are NAME=VALUE; one JSON object is printed. Those in
 * brackets have defaults.
 *
 *   load produce port topic batch milliseconds
 *       [partitions connections depth burst records acks shift count spin]
 *
 *   load fetch port topic bytes milliseconds [partitions connections count spin]
 *       From the first record, again and again.
 *
 *   load parked port topic [connections]
 *       Caught-up consumers. Prints `ready`; exits when its standard input ends.
 *
 *   load latency port topic batch count [acks cpu path]
 *       One record at a time, interleaved with an echo server (on cpu) and fdatasync (of path).
 *
 *   load paced port topic batch rate milliseconds
 *       [warm_milliseconds partitions connections records acks surge]
 *       The rate, in requests/s, is kept whatever the broker does.
 *
 *   load end_to_end port topic batch count [acks records bytes_min wait_ms pause_us]
 *       Times a record from its produce on one connection until a parked fetch on another has it.
 *
 *   load sync path count [batch]
 *       The disk alone.
 *
 *   load files path files batch count [merge]
 *       The file system alone: CPU time of writing to many files in turn.
 *
 *   load warm megabytes milliseconds
 *       Touches memory and gives it back. The host of a virtual machine provides a page at its first
 *       touch, which costs several times what the page cache costs later.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "load.h"

const char *argument_text(const struct arguments *arguments, const char *name, const char *otherwise)
{
    size_t size = strlen(name);
    for (int i = 0; i < arguments->count; i++)
        if (!strncmp(arguments->word[i], name, size) && arguments->word[i][size] == '=')
            return arguments->word[i] + size + 1;
    if (!otherwise)
        fail("%s= is missing", name);
    return otherwise;
}

int64_t argument_number(const struct arguments *arguments, const char *name, int64_t otherwise)
{
    const char *text = argument_text(arguments, name, otherwise == INT64_MIN ? NULL : "");
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (!*text)
        return otherwise;
    if (*end || errno)
        fail("%s=%s is not a number", name, text);
    return number;
}

#define WARM_STEP_BYTES (64ll << 20)

static int warm_main(const struct arguments *arguments)
{
    int64_t end_ns = now_ns() + argument_number(arguments, "milliseconds", INT64_MIN) * 1000000,
            bytes = argument_number(arguments, "megabytes", INT64_MIN) << 20;
    char *memory =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        die("mmap");
    int64_t done = 0;
    for (; done < bytes && now_ns() < end_ns; done += WARM_STEP_BYTES)
        for (int64_t at = done; at < done + WARM_STEP_BYTES && at < bytes; at += 4096)
            memory[at] = 1;
    printf("{\"what\": \"warm\", \"bytes\": %lld}\n", (long long)(done < bytes ? done : bytes));
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(const struct arguments *);
    } ways[] = {
        {"produce", produce_main}, {"fetch", fetch_main}, {"parked", parked_main},
        {"latency", latency_main}, {"paced", paced_main}, {"end_to_end", end_to_end_main},
        {"sync", sync_main},       {"files", files_main}, {"warm", warm_main},
    };
    signal(SIGPIPE, SIG_IGN);
    struct arguments arguments = {argc - 2, argv + 2};
    for (size_t i = 0; argc > 1 && i < sizeof ways / sizeof *ways; i++)
        if (!strcmp(argv[1], ways[i].name))
            return ways[i].run(&arguments);
    fprintf(stderr, "usage: load produce|fetch|parked|latency|paced|end_to_end|sync|files|warm NAME=VALUE... (see "
                    "perf/native/load.c)\n");
    return 2;
}
