/* Divides the time of a turn, which is one iteration of the event loop: the thread runs, waits for a
 * CPU, or is blocked. The kernel counts the first two. Blocked time in parts of the turn that use a
 * disk is attributed to these parts. Other blocked time is attributed to page faults if one of them
 * read from a disk, otherwise to other causes: mostly locks of the kernel (address space, sockets)
 * and of the process, but readers also open, read and close files of the log.
 */
#include "server/slow/turn.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define SPENT_NS_MIN 1000 /* less than this is the cost of the measurement itself */

int64_t mqd_turn_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Time in which this thread was ready to run and had no CPU. Returns 0 if the kernel does not count
 * it (CONFIG_SCHED_INFO), or the file cannot be read; the time is then counted as blocked. */
static int64_t waited_ns(const struct mqd_reactor *r)
{
    char text[96];
    ssize_t size = r->turn.schedstat_fd > 0 ? pread(r->turn.schedstat_fd, text, sizeof text - 1, 0) : 0;
    if (size <= 0)
        return 0;
    text[size] = 0;
    const char *second_field = strchr(text, ' ');
    return second_field ? strtoll(second_field, NULL, 10) : 0;
}

static struct mqd_turn_clock read_clock(const struct mqd_reactor *r)
{
    struct timespec ran;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
    return (struct mqd_turn_clock){mqd_turn_now_ns(), (int64_t)ran.tv_sec * 1000000000 + ran.tv_nsec, waited_ns(r)};
}

static int64_t blocked_ns(struct mqd_turn_clock from, struct mqd_turn_clock to)
{
    return to.now_ns - from.now_ns - (to.ran_ns - from.ran_ns) - (to.waited_ns - from.waited_ns);
}

static long disk_faults(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_majflt : 0;
}

void mqd_turn_open(struct mqd_reactor *r)
{
    if (!mqd_turn_measured(r))
        return;
    r->turn.schedstat_fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (r->turn.schedstat_fd < 0)
        mqd_log(r, 4, 0, UINT32_MAX,
                "worker.loop.profile: /proc/thread-self/schedstat cannot be read; time spent waiting for a CPU is "
                "counted as \"other\"");
    r->turn.disk_faults = disk_faults();
    r->turn.waited_ns = waited_ns(r);
}

void mqd_turn_close(struct mqd_reactor *r)
{
    if (r->turn.schedstat_fd > 0)
        close(r->turn.schedstat_fd);
    r->turn.schedstat_fd = 0;
}

void mqd_turn_begin(struct mqd_reactor *r)
{
    if (!mqd_turn_measured(r))
        return;
    memset(r->turn.spent_ns, 0, sizeof r->turn.spent_ns);
    r->turn.blocked_in_parts_ns = 0;
    r->turn.start = read_clock(r);
}

void mqd_turn_part_begin(struct mqd_reactor *r)
{
    if (mqd_turn_measured(r))
        r->turn.part_start = read_clock(r);
}

void mqd_turn_part_end(struct mqd_reactor *r)
{
    if (mqd_turn_measured(r))
        r->turn.blocked_in_parts_ns += blocked_ns(r->turn.part_start, read_clock(r));
}

void mqd_turn_add_time(struct mqd_reactor *r, enum mqd_histogram cause, int64_t since_ns)
{
    if (mqd_turn_measured(r))
        r->turn.spent_ns[cause] += mqd_turn_now_ns() - since_ns;
}

void mqd_turn_end(struct mqd_reactor *r)
{
    if (!mqd_turn_measured(r))
        return;
    struct mqd_turn_clock end = read_clock(r);
    long faults = disk_faults();
    int64_t *spent_ns = r->turn.spent_ns;
    spent_ns[MQD_TIME_LOOP_SCHEDULING] = end.waited_ns - r->turn.waited_ns; /* includes the wait after the wake-up */
    spent_ns[faults > r->turn.disk_faults ? MQD_TIME_LOOP_FAULT : MQD_TIME_LOOP_OTHER] =
        blocked_ns(r->turn.start, end) - r->turn.blocked_in_parts_ns;
    r->turn.disk_faults = faults;
    r->turn.waited_ns = end.waited_ns;
    for (enum mqd_histogram cause = MQD_TIME_LOOP_WRITE; cause <= MQD_TIME_LOOP_SCHEDULING; cause++)
        if (spent_ns[cause] >= SPENT_NS_MIN)
            mqd_observe_time(r, cause, spent_ns[cause]);
}
