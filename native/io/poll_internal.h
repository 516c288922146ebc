/* Shared by the two backends of io/poll.h: the thread pool, the wake-up descriptor, the function
 * table. */
#ifndef MQD_POLL_INTERNAL_H
#define MQD_POLL_INTERNAL_H

#include "io/poll.h"

#define MQD_POOL_THREAD_COUNT_MAX 8
#define MQD_POOL_THREADS_PER_GROUP_MAX 4
#define MQD_POOL_JOB_COUNT_MAX 1024
#define MQD_READ_AHEAD_STEP_BYTES 65536

/* ---- thread pool: file operations and other slow jobs; io/pool.c ---- */

enum mqd_pool_kind { MQD_POOL_SYNC, MQD_POOL_SYNCFS, MQD_POOL_READ_AHEAD, MQD_POOL_RUN };

struct mqd_pool_request {
    enum mqd_pool_kind kind;
    int fd;
    bool is_directory;
    uint64_t offset;
    uint32_t size_bytes;
    int (*function)(void *argument);
    void *argument;
    uint64_t token;
};

struct mqd_pool;
/* event_fd is written when completions become available */
struct mqd_pool *mqd_pool_create(int event_fd);
/* runs the queued jobs, then ends the threads */
void mqd_pool_destroy(struct mqd_pool *pool);
int mqd_pool_submit(struct mqd_pool *pool, const struct mqd_pool_request *request); /* -1 MQD_E_FULL */
int mqd_pool_collect(struct mqd_pool *pool, struct mqd_poll_event *events, int count_max);

/* ---- a backend ---- */

struct mqd_poll_calls {
    int backend;
    void (*destroy)(struct mqd_poll *poll);
    int (*add)(struct mqd_poll *poll, int fd, uint64_t token);
    int (*remove)(struct mqd_poll *poll, int fd);
    int (*sync)(struct mqd_poll *poll, int fd, bool is_directory, uint64_t token);
    int (*read_ahead)(struct mqd_poll *poll, int fd, uint64_t offset, uint32_t size_bytes, uint64_t token);
    /* Like mqd_poll_wait, but may return 0 early; the wake-up descriptor produces no event and only
     * ends the wait. */
    int (*wait)(struct mqd_poll *poll, struct mqd_poll_event *events, int count_max, int64_t timeout_ns);
};

struct mqd_poll {
    const struct mqd_poll_calls *calls;
    void *backend_state;
    struct mqd_pool *pool;
    int wake_fd; /* eventfd: pool completions and interrupts; watched edge-triggered, never read */
    uint32_t interrupted;
};

/* Both set `calls` and `backend_state`, and watch wake_fd, which must exist. -1 with the reason. */
int mqd_poll_epoll_create(struct mqd_poll *poll);
int mqd_poll_uring_create(struct mqd_poll *poll, uint32_t fd_count_max);
/* Sizes of io_uring's two queues for polls created from now on; tests make them tiny, so that they
 * overflow immediately. */
extern uint32_t mqd_poll_uring_submission_count;
extern uint32_t mqd_poll_uring_completion_count;

#endif
