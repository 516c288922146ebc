/* For test_poll*.c: a file layer that counts, polls of both implementations, bounded waits: a
 * lost event is a failure, not a hang. */
#ifndef MQD_POLL_TEST_H
#define MQD_POLL_TEST_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"
#include "base/file.h"
#include "io/poll_internal.h"
#include "mqd_test.h"

#define LONG_NS 20000000000ll

/* ---- the file layer that the poll uses: counts calls, replaces results on request ---- */

static uint32_t sync_calls, syncfs_calls, begin_calls, synced_calls;
static int32_t fault; /* errno that flushes end with */
static char syncfs_root[4096];
static pthread_mutex_t syncfs_mutex = PTHREAD_MUTEX_INITIALIZER;

int mqd_file_sync(int fd, bool directory)
{
    mqd_fetch_add(&sync_calls, 1);
    if (mqd_load_relaxed(&fault)) {
        errno = mqd_load_relaxed(&fault);
        return -1;
    }
    return directory ? fsync(fd) : fdatasync(fd);
}

int mqd_file_syncfs(int fd, const char *root)
{
    mqd_fetch_add(&syncfs_calls, 1);
    pthread_mutex_lock(&syncfs_mutex);
    snprintf(syncfs_root, sizeof syncfs_root, "%s", root);
    pthread_mutex_unlock(&syncfs_mutex);
    return fcntl(fd, F_GETFD) < 0 ? -1 : 0; /* do not flush this machine's whole disk */
}

bool mqd_file_sync_can_be_delayed(void)
{
    return false;
}

void mqd_file_sync_begin(int fd)
{
    (void)fd;
    mqd_fetch_add(&begin_calls, 1);
}

int mqd_file_sync_end(int fd, bool directory, int result)
{
    (void)fd, (void)directory;
    mqd_fetch_add(&synced_calls, 1);
    return mqd_load_relaxed(&fault) ? -(int)mqd_load_relaxed(&fault) : result;
}

/* ---- helpers ---- */

static struct mqd_poll *poll_open(int backend)
{
    struct mqd_poll *poll = NULL;
    if (mqd_poll_create(&poll, backend, 16) != 0) {
        if (backend == MQD_BACKEND_IO_URING)
            test_message("left out: %s", mqd_error_message());
        else
            TEST_FAIL("%s", mqd_error_message());
        return NULL;
    }
    return poll;
}

#define BOTH(name)                                                                                                     \
    static void name(struct mqd_poll *poll);                                                                           \
    static void name##_on(int backend)                                                                                 \
    {                                                                                                                  \
        struct mqd_poll *poll = poll_open(backend);                                                                    \
        if (poll) {                                                                                                    \
            name(poll);                                                                                                \
            mqd_poll_destroy(poll);                                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    TEST(epoll_##name)                                                                                                 \
    {                                                                                                                  \
        name##_on(MQD_BACKEND_EPOLL);                                                                                  \
    }                                                                                                                  \
    TEST(uring_##name)                                                                                                 \
    {                                                                                                                  \
        name##_on(MQD_BACKEND_IO_URING);                                                                               \
    }                                                                                                                  \
    static void name(struct mqd_poll *poll)

static void pair_make(int pair[2])
{
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0)
        abort();
}

/* Collects events until `flags` of `token` were all seen or the limit has passed; returns the
 * flags seen of that token. */
static uint32_t wait_flags(struct mqd_poll *poll, uint64_t token, uint32_t flags)
{
    uint32_t seen = 0;
    int64_t limit = test_now_ns() + LONG_NS;
    while ((seen & flags) != flags && test_now_ns() < limit) {
        struct mqd_poll_event events[8];
        int count = mqd_poll_wait(poll, events, 8, LONG_NS);
        for (int i = 0; i < count; i++)
            if (events[i].token == token)
                seen |= events[i].flags;
    }
    return seen;
}

static bool quiet(struct mqd_poll *poll)
{
    struct mqd_poll_event events[8];
    return mqd_poll_wait(poll, events, 8, 5000000) == 0;
}

/* Waits for the DONE event of token. */
static bool wait_done(struct mqd_poll *poll, uint64_t token, int32_t *result)
{
    struct mqd_poll_event event;
    for (;;) {
        int count = mqd_poll_wait(poll, &event, 1, LONG_NS);
        if (count != 1)
            return false;
        if (event.token == token && (event.flags & MQD_POLL_DONE)) {
            *result = event.result;
            return true;
        }
    }
}

static int file_make(size_t size)
{
    char name[] = "/tmp/mqd-test-poll-XXXXXX";
    int fd = mkostemp(name, O_CLOEXEC);
    unlink(name);
    char block[4096] = {1};
    for (size_t at = 0; at < size; at += sizeof block)
        if (pwrite(fd, block, size - at < sizeof block ? size - at : sizeof block, (off_t)at) < 0)
            abort();
    return fd;
}

#endif
