/* LD_PRELOAD: the wall clock (CLOCK_REALTIME) of a host is as many nanoseconds off as the file
 * $CHAOS_WALL_CLOCK says, an int64 that may change at any time. All other clocks are the machine's.
 * It cannot be namespaced, and all hosts of the tests are on one machine. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000ll

static const volatile int64_t *offset_ns;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CHAOS_WALL_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *memory = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (memory != MAP_FAILED)
        offset_ns = memory;
}

int clock_gettime(clockid_t clock, struct timespec *out)
{
    if (!real_clock_gettime)
        real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_clock_gettime(clock, out);
    if (result || !offset_ns || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return result;
    int64_t now_ns = out->tv_sec * SECOND_NS + out->tv_nsec + *offset_ns;
    out->tv_sec = now_ns / SECOND_NS;
    out->tv_nsec = now_ns % SECOND_NS;
    return 0;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *out = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
