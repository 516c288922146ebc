#define _GNU_SOURCE
#include "common.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

void fail(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    exit(1);
}

void *allocate(size_t size)
{
    void *at = calloc(1, size);
    if (!at)
        fail("out of memory: %zu bytes", size);
    return at;
}

static const char *find(const struct arguments *arguments, const char *name)
{
    size_t size = strlen(name);
    for (int index = 0; index < arguments->count; index++)
        if (!strncmp(arguments->word[index], name, size) && arguments->word[index][size] == '=')
            return arguments->word[index] + size + 1;
    return NULL;
}

const char *argument_text(const struct arguments *arguments, const char *name, const char *otherwise)
{
    const char *found = find(arguments, name);
    if (!found && !otherwise)
        fail("%s= is missing", name);
    return found ? found : otherwise;
}

int64_t argument_number(const struct arguments *arguments, const char *name, int64_t otherwise)
{
    const char *found = find(arguments, name);
    if (!found) {
        if (otherwise == INT64_MIN)
            fail("%s= is missing", name);
        return otherwise;
    }
    char *end;
    errno = 0;
    long long value = strtoll(found, &end, 10);
    if (errno || end == found || *end)
        fail("%s=%s is no number", name, found);
    return value;
}

int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

double client_cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

void pool_make(struct pool *pool)
{
    pool->bytes = allocate(POOL_BYTES);
    pool->at = 0;
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (size_t at = 0; at + 8 <= POOL_BYTES; at += 8) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        for (int byte = 0; byte < 8; byte++)
            pool->bytes[at + (size_t)byte] = (uint8_t)('A' + ((state >> (8 * byte)) & 0xff) * 26 / 256);
    }
}

uint8_t *pool_next(struct pool *pool, size_t size)
{
    if (pool->at + size > POOL_BYTES)
        pool->at = 0;
    uint8_t *record = pool->bytes + pool->at;
    pool->at += size;
    return record;
}

void stamp_write(uint8_t *record, int64_t due_ns)
{
    memcpy(record, &due_ns, sizeof due_ns);
}

int64_t stamp_read(const uint8_t *record)
{
    int64_t due_ns;
    memcpy(&due_ns, record, sizeof due_ns);
    return due_ns;
}

void samples_make(struct samples *samples, size_t capacity)
{
    samples->ns = allocate((capacity ? capacity : 1) * sizeof *samples->ns);
    samples->count = 0;
    samples->capacity = capacity;
}

void samples_add(struct samples *samples, int64_t ns)
{
    if (samples->count < samples->capacity)
        samples->ns[samples->count++] = ns;
}

static int compare(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* Nearest rank: the smallest value that is not below this share of all values. */
static double percentile_us(const struct samples *samples, double share)
{
    if (!samples->count)
        return 0;
    double rank = share * (double)samples->count;
    size_t index = (size_t)rank;
    if ((double)index < rank)
        index++;
    return (double)samples->ns[index ? index - 1 : 0] / 1e3;
}

void samples_print(const char *name, struct samples *samples, const char *after)
{
    qsort(samples->ns, samples->count, sizeof *samples->ns, compare);
    printf("\"%s\": {\"count\": %zu, \"p50_us\": %.1f, \"p90_us\": %.1f, \"p99_us\": %.1f, \"p999_us\": %.1f, "
           "\"max_us\": %.1f}%s",
           name, samples->count, percentile_us(samples, 0.5), percentile_us(samples, 0.9), percentile_us(samples, 0.99),
           percentile_us(samples, 0.999), percentile_us(samples, 1.0), after);
}

void sleep_until_ns(int64_t when)
{
    struct timespec at = {.tv_sec = when / 1000000000, .tv_nsec = when % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
        ;
}
