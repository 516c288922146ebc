/* Waiting by epoll, edge-triggered; file operations run on the pool. For kernels and containers
 * without io_uring. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "io/poll_internal.h"

#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441
#endif
#define EVENT_COUNT_MAX 256
#define WAKE_TOKEN (1ull << 63)

struct epoll_poll {
    int fd;
    bool lacks_pwait2; /* kernels before 5.11 */
};

static void destroy(struct mqd_poll *poll)
{
    struct epoll_poll *epoll = poll->backend_state;
    close(epoll->fd);
    free(epoll);
}

static int watch(struct epoll_poll *epoll, int fd, uint32_t events, uint64_t token)
{
    struct epoll_event event = {.events = events | EPOLLET, .data.u64 = token};
    if (epoll_ctl(epoll->fd, EPOLL_CTL_ADD, fd, &event) == 0)
        return 0;
    return mqd_error_system(errno, "cannot watch file descriptor %d", fd);
}

static int add(struct mqd_poll *poll, int fd, uint64_t token)
{
    return watch(poll->backend_state, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP, token);
}

/* epoll_wait returns events directly to the caller, so none arrive after this. */
static int remove_fd(struct mqd_poll *poll, int fd)
{
    struct epoll_poll *epoll = poll->backend_state;
    struct epoll_event unused = {0};
    if (epoll_ctl(epoll->fd, EPOLL_CTL_DEL, fd, &unused) == 0)
        return 0;
    return mqd_error_system(errno, "file descriptor %d is not watched", fd);
}

static int sync_fd(struct mqd_poll *poll, int fd, bool is_directory, uint64_t token)
{
    return mqd_pool_submit(
        poll->pool,
        &(struct mqd_pool_request){.kind = MQD_POOL_SYNC, .fd = fd, .is_directory = is_directory, .token = token});
}

static int read_ahead(struct mqd_poll *poll, int fd, uint64_t offset, uint32_t size_bytes, uint64_t token)
{
    return mqd_pool_submit(
        poll->pool,
        &(struct mqd_pool_request){
            .kind = MQD_POOL_READ_AHEAD, .fd = fd, .offset = offset, .size_bytes = size_bytes, .token = token});
}

static int wait_epoll(struct epoll_poll *epoll, struct epoll_event *events, int count_max, int64_t timeout_ns)
{
    if (!epoll->lacks_pwait2 && timeout_ns > 0) {
        /* __kernel_timespec */
        struct {
            int64_t seconds, nanoseconds;
        } timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
        int count = (int)syscall(SYS_epoll_pwait2, epoll->fd, events, count_max, &timeout, NULL, _NSIG / 8);
        if (count >= 0 || (errno != ENOSYS && errno != EPERM)) /* some seccomp profiles return EPERM */
            return count;
        epoll->lacks_pwait2 = true;
    }
    int64_t timeout_ms = timeout_ns > 0 ? (timeout_ns + 999999) / 1000000 : timeout_ns;
    return epoll_wait(epoll->fd, events, count_max,
                      timeout_ms < 0           ? -1
                      : timeout_ms > INT32_MAX ? INT32_MAX
                                               : (int)timeout_ms);
}

static uint32_t flags_of(uint32_t events)
{
    uint32_t flags = 0;
    if (events & (EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP)) /* a read reports what has happened */
        flags |= MQD_POLL_READABLE;
    if (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))
        flags |= MQD_POLL_WRITABLE;
    if (events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP))
        flags |= MQD_POLL_HANGUP;
    if (events & (EPOLLERR | EPOLLHUP))
        flags |= MQD_POLL_BROKEN;
    return flags;
}

static int wait_events(struct mqd_poll *poll, struct mqd_poll_event *out, int count_max, int64_t timeout_ns)
{
    struct epoll_event events[EVENT_COUNT_MAX];
    int event_count =
        wait_epoll(poll->backend_state, events, count_max < EVENT_COUNT_MAX ? count_max : EVENT_COUNT_MAX, timeout_ns);
    if (event_count < 0)
        return errno == EINTR ? 0 : mqd_error_system(errno, "epoll_wait failed");
    int count = 0;
    for (int i = 0; i < event_count; i++)
        if (events[i].data.u64 != WAKE_TOKEN)
            out[count++] = (struct mqd_poll_event){.token = events[i].data.u64, .flags = flags_of(events[i].events)};
    return count;
}

static const struct mqd_poll_calls calls = {.backend = MQD_BACKEND_EPOLL,
                                            .destroy = destroy,
                                            .add = add,
                                            .remove = remove_fd,
                                            .sync = sync_fd,
                                            .read_ahead = read_ahead,
                                            .wait = wait_events};

int mqd_poll_epoll_create(struct mqd_poll *poll)
{
    struct epoll_poll *epoll = calloc(1, sizeof *epoll);
    if (!epoll)
        return mqd_error_system(ENOMEM, "out of memory for epoll");
    epoll->fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll->fd < 0) {
        mqd_error_system(errno, "cannot create an epoll instance");
        free(epoll);
        return -1;
    }
    if (watch(epoll, poll->wake_fd, EPOLLIN, WAKE_TOKEN) != 0) {
        close(epoll->fd);
        free(epoll);
        return -1;
    }
    poll->backend_state = epoll;
    poll->calls = &calls;
    return 0;
}
