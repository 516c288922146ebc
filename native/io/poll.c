/* Implements io/poll.h: chooses the backend and merges its events with the pool's. */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"
#include "io/poll_internal.h"

static int create_backend_state(struct mqd_poll *poll, int backend, uint32_t fd_count_max)
{
    switch (backend) {
    case MQD_BACKEND_EPOLL:
        return mqd_poll_epoll_create(poll);
    case MQD_BACKEND_IO_URING:
        return mqd_poll_uring_create(poll, fd_count_max);
    case MQD_BACKEND_AUTO:
        return mqd_poll_uring_create(poll, fd_count_max) == 0 ? 0 : mqd_poll_epoll_create(poll);
    default:
        return mqd_error_set(MQD_E_INVALID, "there is no I/O backend %d", backend);
    }
}

int mqd_poll_create(struct mqd_poll **out, int backend, uint32_t fd_count_max)
{
    struct mqd_poll *poll = calloc(1, sizeof *poll);
    if (!poll)
        return mqd_error_system(ENOMEM, "out of memory for the I/O backend");
    poll->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (poll->wake_fd < 0) {
        mqd_error_system(errno, "cannot create an eventfd for the I/O backend");
        free(poll);
        return -1;
    }
    poll->pool = mqd_pool_create(poll->wake_fd);
    if (poll->pool && create_backend_state(poll, backend, fd_count_max) == 0) {
        *out = poll;
        return 0;
    }
    mqd_pool_destroy(poll->pool);
    close(poll->wake_fd);
    free(poll);
    return -1;
}

void mqd_poll_destroy(struct mqd_poll *poll)
{
    if (!poll)
        return;
    mqd_pool_destroy(poll->pool);
    poll->calls->destroy(poll);
    close(poll->wake_fd);
    free(poll);
}

int mqd_poll_backend(const struct mqd_poll *poll)
{
    return poll->calls->backend;
}

int mqd_poll_add(struct mqd_poll *poll, int fd, uint64_t token)
{
    if (fd < 0 || token >> 63)
        return mqd_error_set(MQD_E_INVALID, "cannot watch file descriptor %d with token %016llx", fd,
                             (unsigned long long)token);
    return poll->calls->add(poll, fd, token);
}

int mqd_poll_remove(struct mqd_poll *poll, int fd, uint64_t token)
{
    (void)token; /* the backends identify the entry by fd */
    return poll->calls->remove(poll, fd);
}

int mqd_poll_sync(struct mqd_poll *poll, int fd, bool is_directory, uint64_t token)
{
    return poll->calls->sync(poll, fd, is_directory, token);
}

int mqd_poll_syncfs(struct mqd_poll *poll, int fd, uint64_t token)
{
    return mqd_pool_submit(poll->pool, &(struct mqd_pool_request){.kind = MQD_POOL_SYNCFS, .fd = fd, .token = token});
}

int mqd_poll_read_ahead(struct mqd_poll *poll, int fd, uint64_t offset, uint32_t size_bytes, uint64_t token)
{
    return poll->calls->read_ahead(poll, fd, offset, size_bytes, token);
}

int mqd_poll_run(struct mqd_poll *poll, int fd, int (*function)(void *argument), void *argument, uint64_t token)
{
    return mqd_pool_submit(
        poll->pool, &(struct mqd_pool_request){
                        .kind = MQD_POOL_RUN, .fd = fd, .function = function, .argument = argument, .token = token});
}

/* Sets the flag first: a wait that sees the descriptor's edge must also see the flag. */
void mqd_poll_interrupt(struct mqd_poll *poll)
{
    const uint64_t one = 1;
    mqd_store_seq_cst(&poll->interrupted, 1);
    ssize_t written;
    do
        written = write(poll->wake_fd, &one, sizeof one);
    while (written < 0 && errno == EINTR);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* The pool's completions get at most half of the room, so that neither source starves the other. */
static int collect_events(struct mqd_poll *poll, struct mqd_poll_event *events, int count_max, int64_t timeout_ns)
{
    int count = mqd_pool_collect(poll->pool, events, count_max > 1 ? count_max / 2 : 1);
    if (count == count_max)
        return count;
    int new_count = poll->calls->wait(poll, events + count, count_max - count, count ? 0 : timeout_ns);
    if (new_count < 0)
        return count ? count : -1;
    return count + new_count;
}

int mqd_poll_wait(struct mqd_poll *poll, struct mqd_poll_event *events, int count_max, int64_t timeout_ns)
{
    if (count_max < 1)
        return mqd_error_set(MQD_E_INVALID, "no room for events");
    int64_t deadline_ns = timeout_ns > 0 ? now_ns() + timeout_ns : 0;
    for (;;) {
        if (mqd_load_relaxed(&poll->interrupted) && mqd_exchange(&poll->interrupted, 0))
            return collect_events(poll, events, count_max, 0);
        int count = collect_events(poll, events, count_max, timeout_ns);
        if (count != 0 || timeout_ns == 0)
            return count;
        if (timeout_ns < 0)
            continue; /* woken by the pool, an interrupt or a signal: the start of the loop handles all three */
        timeout_ns = deadline_ns - now_ns();
        if (timeout_ns <= 0)
            timeout_ns = 0; /* one last check */
    }
}
