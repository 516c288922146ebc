/* Waits for sockets and does slow file work, with io_uring, or with epoll and a small thread pool:
 * one interface, two backends.
 *
 * Sockets are edge-triggered: an event means "changed since you last drained it"; the caller keeps
 * its own list of ready sockets. File operations run off the calling thread (io_uring: async;
 * epoll: at most MQD_POOL_THREAD_COUNT_MAX threads) and complete as events. Preallocation, snapshot
 * writing and other jobs that run a caller's function use the pool with both backends.
 *
 * Any thread may call mqd_poll_interrupt. All other calls belong to one thread: once a thread
 * has waited, only that thread may add, remove and wait. Another thread may create and add
 * before the first wait, and destroy after the waiting thread has ended.
 *
 * Invariants
 *   W1  every change of a socket after the last event about it causes another event; when kernel
 *       queues overflow, that event is only delayed.
 *   W2  every accepted file operation causes exactly one DONE event; its entry is freed only then,
 *       so completions never overflow.
 *   W3  a stalled device leaves pool threads for other devices (see io/pool.c).
 */
#ifndef MQD_POLL_H
#define MQD_POLL_H

#include "native.h"

/* HANGUP: the peer sends no more, but may still read. BROKEN, with HANGUP: both directions are
 * closed. */
enum { MQD_POLL_READABLE = 1, MQD_POLL_WRITABLE = 2, MQD_POLL_HANGUP = 4, MQD_POLL_DONE = 8, MQD_POLL_BROKEN = 16 };

struct mqd_poll_event {
    uint64_t token;
    uint32_t flags;
    int32_t result; /* DONE: bytes or 0; negative errno on failure */
};

struct mqd_poll;
/* AUTO: io_uring when the kernel offers and permits everything needed (probed), otherwise epoll. -1
 * with the reason when io_uring was requested and is unavailable. */
int mqd_poll_create(struct mqd_poll **out, int backend, uint32_t fd_count_max);
void mqd_poll_destroy(struct mqd_poll *poll); /* waits for running file operations; their events are lost */
int mqd_poll_backend(const struct mqd_poll *poll);
/* Watches for reading, writing and hang-up, edge-triggered. token must not have the top bit set. */
int mqd_poll_add(struct mqd_poll *poll, int fd, uint64_t token);
/* No event with this fd's token is delivered after return. Call before close(fd). */
int mqd_poll_remove(struct mqd_poll *poll, int fd, uint64_t token);
/* Starts an fdatasync (or fsync of a directory). This call and the next three cause a DONE event
 * with `token`, or return -1 MQD_E_FULL: too many operations are running (the limit is at least
 * 256). */
int mqd_poll_sync(struct mqd_poll *poll, int fd, bool is_directory, uint64_t token);
/* syncfs on the file system of fd; always on the pool. */
int mqd_poll_syncfs(struct mqd_poll *poll, int fd, uint64_t token);
/* Reads the range into the page cache and discards the bytes. */
int mqd_poll_read_ahead(struct mqd_poll *poll, int fd, uint64_t offset, uint32_t size_bytes, uint64_t token);
/* Runs function(argument) on the pool; its return value is the event's result. fd: any file on the
 * device that the job uses, needed only during this call; -1 = the job uses no device. */
int mqd_poll_run(struct mqd_poll *poll, int fd, int (*function)(void *argument), void *argument, uint64_t token);
/* Makes the current wait, or the next one, return immediately (with the events that have occurred).
 * Any thread; async-signal-safe. */
void mqd_poll_interrupt(struct mqd_poll *poll);
/* timeout_ns < 0: no limit; 0: do not block. Returns the number of events, 0 on timeout or
 * interrupt, -1 on error. Submits everything queued. */
int mqd_poll_wait(struct mqd_poll *poll, struct mqd_poll_event *events, int count_max, int64_t timeout_ns);

#endif
