/* Counts the memory of attachments until it is freed. A client, or a process that received the
 * memfd from it, can keep the memfd open or mapped, and thus its pages allocated, long
 * after the attachment has ended. Until the memory is released it counts toward local_bytes;
 * otherwise a client that attaches repeatedly could use any amount. The kernel reports through
 * inotify when the last reference to a memfd is released; local_free releases the worker's own
 * reference.
 *
 * If inotify has no room (fs.inotify.max_user_instances, max_user_watches), memory counts only
 * while the attachment exists; this is logged once. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "server/reactor.h"

struct mqd_local_memory {
    int watch;
    uint64_t size_bytes;
};

static bool ensure_watching(struct mqd_reactor *r)
{
    if (r->local_watch_fd > 0)
        return true;
    int fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (fd < 0)
        return false;
    if (fd == 0 || mqd_poll_add(r->poll, fd, mqd_token(MQD_TOKEN_LOCAL_MEMORY, 0)) < 0) {
        close(fd);
        return false;
    }
    r->local_watch_fd = fd;
    return true;
}

static bool ensure_room(struct mqd_reactor *r)
{
    if (r->local_memory_count < r->local_memory_capacity)
        return true;
    uint32_t capacity = r->local_memory_capacity ? 2 * r->local_memory_capacity : 16;
    struct mqd_local_memory *larger = realloc(r->local_memories, capacity * sizeof *larger);
    if (!larger)
        return false;
    r->local_memories = larger;
    r->local_memory_capacity = capacity;
    return true;
}

bool mqd_local_memory_watch(struct mqd_reactor *r, int memory_fd, uint64_t size_bytes)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", memory_fd);
    int watch = ensure_watching(r) && ensure_room(r) ? inotify_add_watch(r->local_watch_fd, path, IN_DELETE_SELF) : -1;
    if (watch < 0) {
        if (!r->local_watch_failed)
            mqd_log(r, 4, 0, UINT32_MAX,
                    "the memory of local clients cannot be watched (%s): memory that a client keeps "
                    "open after it has disconnected does not count toward local.memory.max.bytes; raise "
                    "fs.inotify.max_user_instances and max_user_watches",
                    strerror(errno));
        r->local_watch_failed = true;
        return false;
    }
    r->local_memories[r->local_memory_count++] = (struct mqd_local_memory){watch, size_bytes};
    return true;
}

static void on_memory_freed(struct mqd_reactor *r, int watch)
{
    for (uint32_t i = 0; i < r->local_memory_count; i++) {
        if (r->local_memories[i].watch != watch)
            continue;
        uint64_t size_bytes = r->local_memories[i].size_bytes;
        r->local_memories[i] = r->local_memories[--r->local_memory_count];
        mqd_local_return_bytes(r, size_bytes);
        return;
    }
}

void mqd_local_memory_on_event(struct mqd_reactor *r)
{
    char events[4096] __attribute__((aligned(8)));
    ssize_t size;
    while ((size = read(r->local_watch_fd, events, sizeof events)) > 0) /* edge-triggered: read until empty */
        for (ssize_t at = 0; at < size;) {
            const struct inotify_event *event = (const struct inotify_event *)(events + at);
            if (event->mask & IN_DELETE_SELF)
                on_memory_freed(r, event->wd);
            at += (ssize_t)sizeof *event + event->len;
        }
}

void mqd_local_memory_destroy(struct mqd_reactor *r)
{
    if (r->local_watch_fd > 0)
        close(r->local_watch_fd);
    free(r->local_memories);
}
