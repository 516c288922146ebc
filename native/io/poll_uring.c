/* Waiting by io_uring: sockets by multishot polls, flushes and reads as operations; one system call
 * submits, waits and collects.
 *
 * A multishot poll reports like EPOLLET: once when it is armed, then at each wake-up of the socket.
 * It ends when the kernel cannot post a completion (the completion queue has overflowed); it is
 * then armed again, which reports the current state, so nothing is lost. After an error it is not
 * armed again.
 *
 * Each watched descriptor has an entry, indexed by the descriptor's number. user_data = kind (8
 * bits) | generation (24) | index (32); the generation distinguishes late completions of a removed
 * descriptor from those of the next one with the same number.
 *
 * When a poll cannot be armed because the submission queue is full, `arm_pending` is set, and
 * arming is retried at the next wait.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "io/poll_internal.h"
#include "io/uring.h"

#define OPERATION_COUNT_MAX 1024
/* One operation reads up to this many steps into one scratch buffer: the data is discarded, only
 * the page cache matters. */
#define READ_PIECE_COUNT 16
#define GENERATION_MASK 0xffffffu
#define NO_OPERATION UINT32_MAX
#define READ_CONTINUES INT32_MIN /* as a result: the read was queued again */
#define WATCHED_EVENTS ((uint32_t)(POLLIN | POLLOUT | POLLRDHUP | POLLERR | POLLHUP))

uint32_t mqd_poll_uring_submission_count = 256;
uint32_t mqd_poll_uring_completion_count = 4096;

enum kind { KIND_IGNORE, KIND_WAKE, KIND_POLL, KIND_SYNC, KIND_READ };

struct watched_fd {
    uint64_t token;
    uint32_t generation; /* of the descriptor's current use, or of the next one */
    bool is_watched;
    bool arm_pending; /* not armed yet: the submission queue was full */
};

struct operation {
    uint64_t token;
    uint64_t offset;
    uint32_t remaining_bytes;
    uint32_t done_bytes;
    uint32_t next; /* free list */
    int fd;
    bool is_directory;
};

struct uring_poll {
    struct mqd_uring ring;
    int wake_fd;
    struct watched_fd *watched; /* by fd */
    uint32_t watched_capacity;
    uint32_t arm_pending_count;
    bool wake_arm_pending;
    uint32_t running_count;
    uint32_t first_free_operation;
    struct operation operation[OPERATION_COUNT_MAX];
    struct iovec pieces[READ_PIECE_COUNT];
    uint8_t *scratch;
};

static uint64_t user_data(enum kind kind, uint32_t generation, uint32_t index)
{
    return (uint64_t)kind << 56 | (uint64_t)(generation & GENERATION_MASK) << 32 | index;
}

/* ---- sockets ---- */

static bool arm(struct uring_poll *uring, int fd, uint32_t events, uint64_t data)
{
    struct mqd_uring_submission *submission = mqd_uring_next(&uring->ring);
    if (!submission)
        return false;
    submission->opcode = MQD_URING_OP_POLL_ADD;
    submission->fd = fd;
    submission->length = MQD_URING_POLL_MULTISHOT;
    /* the kernel swaps the halves on big-endian machines, which are not supported */
    submission->operation_flags = events;
    submission->user_data = data;
    return true;
}

static void arm_watched(struct uring_poll *uring, uint32_t fd)
{
    struct watched_fd *watched = &uring->watched[fd];
    bool armed = arm(uring, (int)fd, WATCHED_EVENTS, user_data(KIND_POLL, watched->generation, fd));
    uring->arm_pending_count -= watched->arm_pending;
    watched->arm_pending = !armed;
    uring->arm_pending_count += watched->arm_pending;
}

static void arm_wake(struct uring_poll *uring)
{
    uring->wake_arm_pending = !arm(uring, uring->wake_fd, POLLIN, user_data(KIND_WAKE, 0, 0));
}

static void arm_pending_fds(struct uring_poll *uring)
{
    if (uring->wake_arm_pending)
        arm_wake(uring);
    for (uint32_t fd = 0; uring->arm_pending_count && fd < uring->watched_capacity; fd++)
        if (uring->watched[fd].arm_pending)
            arm_watched(uring, fd);
}

static int grow_watched(struct uring_poll *uring, uint32_t fd)
{
    uint32_t count = uring->watched_capacity ? uring->watched_capacity : 64;
    while (count <= fd)
        count *= 2;
    struct watched_fd *bigger = realloc(uring->watched, count * sizeof *bigger);
    if (!bigger)
        return mqd_error_system(ENOMEM, "no memory to watch file descriptor %u", fd);
    for (uint32_t i = uring->watched_capacity; i < count; i++)
        bigger[i] = (struct watched_fd){0};
    uring->watched = bigger;
    uring->watched_capacity = count;
    return 0;
}

static int add(struct mqd_poll *poll, int fd, uint64_t token)
{
    struct uring_poll *uring = poll->backend_state;
    uint32_t index = (uint32_t)fd;
    if (index >= uring->watched_capacity && grow_watched(uring, index) != 0)
        return -1;
    struct watched_fd *watched = &uring->watched[index];
    if (watched->is_watched)
        return mqd_error_set(EEXIST, "file descriptor %d is already watched", fd);
    watched->is_watched = true;
    watched->token = token;
    arm_watched(uring, index);
    return 0;
}

/* ASYNC_CANCEL rather than POLL_REMOVE: POLL_REMOVE refuses a poll whose event is just being
 * delivered, and that poll would keep the file open forever. Submitted immediately, so that the
 * caller's close() releases the file. */
static int remove_fd(struct mqd_poll *poll, int fd)
{
    struct uring_poll *uring = poll->backend_state;
    if (fd < 0 || (uint32_t)fd >= uring->watched_capacity || !uring->watched[fd].is_watched)
        return mqd_error_set(ENOENT, "file descriptor %d is not watched", fd);
    struct watched_fd *watched = &uring->watched[fd];
    uint64_t data = user_data(KIND_POLL, watched->generation, (uint32_t)fd);
    bool armed = !watched->arm_pending;
    uring->arm_pending_count -= watched->arm_pending;
    *watched = (struct watched_fd){.generation = (watched->generation + 1) & GENERATION_MASK};
    if (!armed)
        return 0;
    struct mqd_uring_submission *submission = mqd_uring_next(&uring->ring);
    if (!submission)
        return mqd_error_set(ENOMEM, "file descriptor %d stays open in the kernel: io_uring accepts no more requests",
                             fd);
    submission->opcode = MQD_URING_OP_ASYNC_CANCEL;
    submission->flags = MQD_URING_SQE_CQE_SKIP_SUCCESS;
    submission->fd = -1;
    submission->address = data;
    submission->user_data = user_data(KIND_IGNORE, 0, 0);
    mqd_uring_enter(&uring->ring, 0, 0);
    return 0;
}

static uint32_t flags_of(uint32_t events)
{
    uint32_t flags = 0;
    if (events & (POLLIN | POLLERR | POLLHUP | POLLRDHUP | POLLNVAL)) /* a read reports what has happened */
        flags |= MQD_POLL_READABLE;
    if (events & (POLLOUT | POLLERR | POLLHUP | POLLNVAL))
        flags |= MQD_POLL_WRITABLE;
    if (events & (POLLERR | POLLHUP | POLLRDHUP | POLLNVAL))
        flags |= MQD_POLL_HANGUP;
    if (events & (POLLERR | POLLHUP | POLLNVAL))
        flags |= MQD_POLL_BROKEN;
    return flags;
}

static int on_poll(struct uring_poll *uring, const struct mqd_uring_completion *completion,
                   struct mqd_poll_event *event)
{
    uint32_t fd = (uint32_t)completion->user_data;
    uint32_t generation = (uint32_t)(completion->user_data >> 32) & GENERATION_MASK;
    struct watched_fd *watched = fd < uring->watched_capacity ? &uring->watched[fd] : NULL;
    if (!watched || !watched->is_watched || watched->generation != generation)
        return 0; /* removed in the meantime */
    /* not pollable, or out of memory: arming again would not help; the owner will close the
     * descriptor */
    if (completion->result < 0) {
        *event =
            (struct mqd_poll_event){.token = watched->token,
                                    .flags = MQD_POLL_READABLE | MQD_POLL_WRITABLE | MQD_POLL_HANGUP | MQD_POLL_BROKEN,
                                    .result = completion->result};
        return 1;
    }
    if (!(completion->flags & MQD_URING_CQE_MORE))
        arm_watched(uring, fd);
    *event = (struct mqd_poll_event){.token = watched->token, .flags = flags_of((uint32_t)completion->result)};
    return 1;
}

/* ---- files ---- */

static struct operation *take_operation(struct uring_poll *uring, int fd, uint64_t token)
{
    uint32_t index = uring->first_free_operation;
    if (index == NO_OPERATION) {
        mqd_error_set_static(MQD_E_FULL, "too many file operations are in progress");
        return NULL;
    }
    struct operation *operation = &uring->operation[index];
    uring->first_free_operation = operation->next;
    *operation = (struct operation){.fd = fd, .token = token};
    return operation;
}

static void free_operation(struct uring_poll *uring, struct operation *operation)
{
    operation->next = uring->first_free_operation;
    uring->first_free_operation = (uint32_t)(operation - uring->operation);
}

static uint64_t operation_data(const struct uring_poll *uring, enum kind kind, const struct operation *operation)
{
    return user_data(kind, 0, (uint32_t)(operation - uring->operation));
}

static int refuse_operation(struct uring_poll *uring, struct operation *operation)
{
    free_operation(uring, operation);
    return mqd_error_set_static(MQD_E_FULL, "io_uring accepts no more requests now");
}

static int sync_fd(struct mqd_poll *poll, int fd, bool is_directory, uint64_t token)
{
    struct uring_poll *uring = poll->backend_state;
    if (mqd_file_sync_can_be_delayed())
        return mqd_pool_submit(
            poll->pool,
            &(struct mqd_pool_request){.kind = MQD_POOL_SYNC, .fd = fd, .is_directory = is_directory, .token = token});
    struct operation *operation = take_operation(uring, fd, token);
    if (!operation)
        return -1;
    struct mqd_uring_submission *submission = mqd_uring_next(&uring->ring);
    if (!submission)
        return refuse_operation(uring, operation);
    operation->is_directory = is_directory;
    submission->opcode = MQD_URING_OP_FSYNC;
    submission->fd = fd;
    submission->operation_flags = is_directory ? 0 : MQD_URING_FSYNC_DATASYNC;
    submission->user_data = operation_data(uring, KIND_SYNC, operation);
    /* recorded before the kernel starts, so that later writes are not considered covered */
    mqd_file_sync_begin(fd);
    uring->running_count++;
    return 0;
}

/* Always asynchronous: a read that has to start I/O may block in the block layer even with a
 * non-blocking request. */
static bool queue_read(struct uring_poll *uring, struct operation *operation)
{
    struct mqd_uring_submission *submission = mqd_uring_next(&uring->ring);
    if (!submission)
        return false;
    uint32_t piece_count = operation->remaining_bytes / MQD_READ_AHEAD_STEP_BYTES +
                           (operation->remaining_bytes % MQD_READ_AHEAD_STEP_BYTES != 0);
    submission->opcode = MQD_URING_OP_READV;
    submission->flags = MQD_URING_SQE_ASYNC;
    submission->fd = operation->fd;
    submission->offset = operation->offset;
    submission->address = (uintptr_t)uring->pieces;
    submission->length = piece_count < READ_PIECE_COUNT ? piece_count : READ_PIECE_COUNT;
    submission->user_data = operation_data(uring, KIND_READ, operation);
    return true;
}

static int read_ahead(struct mqd_poll *poll, int fd, uint64_t offset, uint32_t size_bytes, uint64_t token)
{
    struct uring_poll *uring = poll->backend_state;
    struct operation *operation = take_operation(uring, fd, token);
    if (!operation)
        return -1;
    operation->offset = offset;
    operation->remaining_bytes = size_bytes;
    if (!queue_read(uring, operation))
        return refuse_operation(uring, operation);
    uring->running_count++;
    return 0;
}

static int complete(struct uring_poll *uring, struct operation *operation, int32_t result, struct mqd_poll_event *event)
{
    *event = (struct mqd_poll_event){.token = operation->token, .flags = MQD_POLL_DONE, .result = result};
    free_operation(uring, operation);
    uring->running_count--;
    return 1;
}

/* Pieces are whole steps, so more than requested may be read. Reading stops at the end of the range
 * or of the file, or at an error. */
static int on_read(struct uring_poll *uring, struct operation *operation, int32_t result, struct mqd_poll_event *event)
{
    if (result == -EINTR || result == -EAGAIN)
        result = queue_read(uring, operation) ? READ_CONTINUES : result;
    else if (result > 0) {
        uint32_t count = (uint32_t)result < operation->remaining_bytes ? (uint32_t)result : operation->remaining_bytes;
        operation->done_bytes += count;
        operation->remaining_bytes -= count;
        operation->offset += count;
        if (operation->remaining_bytes && queue_read(uring, operation))
            result = READ_CONTINUES;
    }
    if (result == READ_CONTINUES)
        return 0;
    if (operation->done_bytes)
        result = operation->done_bytes > INT32_MAX ? INT32_MAX : (int32_t)operation->done_bytes;
    return complete(uring, operation, result, event);
}

/* ---- waiting ---- */

static int on_completion(struct uring_poll *uring, const struct mqd_uring_completion *completion,
                         struct mqd_poll_event *event, bool *woken)
{
    uint32_t index = (uint32_t)completion->user_data;
    switch ((enum kind)(completion->user_data >> 56)) {
    case KIND_POLL:
        return on_poll(uring, completion, event);
    case KIND_WAKE:
        *woken = true;
        if (!(completion->flags & MQD_URING_CQE_MORE))
            arm_wake(uring);
        return 0;
    case KIND_SYNC: {
        struct operation *operation = &uring->operation[index];
        return complete(uring, operation, mqd_file_sync_end(operation->fd, operation->is_directory, completion->result),
                        event);
    }
    case KIND_READ:
        return on_read(uring, &uring->operation[index], completion->result, event);
    default:
        return 0;
    }
}

/* A completion is copied and popped first: handling it may queue requests, which may enter the
 * kernel. */
static int reap(struct uring_poll *uring, struct mqd_poll_event *events, int count_max, bool *woken)
{
    int count = 0;
    const struct mqd_uring_completion *next;
    while (count < count_max && (next = mqd_uring_peek(&uring->ring))) {
        struct mqd_uring_completion completion = *next;
        mqd_uring_pop(&uring->ring);
        count += on_completion(uring, &completion, &events[count], woken);
    }
    return count;
}

static int wait_events(struct mqd_poll *poll, struct mqd_poll_event *events, int count_max, int64_t timeout_ns)
{
    struct uring_poll *uring = poll->backend_state;
    bool woken = false;
    if (uring->arm_pending_count || uring->wake_arm_pending)
        arm_pending_fds(uring);
    int count = reap(uring, events, count_max, &woken);
    bool should_block =
        count == 0 && !woken && timeout_ns != 0 && !uring->arm_pending_count && !uring->wake_arm_pending;
    if (!should_block && !mqd_uring_needs_enter(&uring->ring))
        return count;
    int result = mqd_uring_enter(&uring->ring, should_block ? 1 : 0, timeout_ns);
    count += reap(uring, events + count, count_max - count, &woken);
    /* ETIME, EINTR: expected. EAGAIN, EBUSY: out of memory, or completions must be taken first; all
     * are retried */
    if (result == 0 || result == -ETIME || result == -EINTR || result == -EAGAIN || result == -EBUSY || count)
        return count;
    return mqd_error_system(-result, result == -EEXIST ? "io_uring is used by two threads" : "io_uring_enter failed");
}

static int create_parts(struct uring_poll *uring, uint32_t fd_count_max)
{
    uring->scratch = malloc(MQD_READ_AHEAD_STEP_BYTES);
    if (!uring->scratch)
        return mqd_error_system(ENOMEM, "out of memory for reading ahead");
    for (uint32_t i = 0; i < READ_PIECE_COUNT; i++)
        uring->pieces[i] = (struct iovec){uring->scratch, MQD_READ_AHEAD_STEP_BYTES};
    for (uint32_t i = 0; i < OPERATION_COUNT_MAX; i++)
        uring->operation[i].next = i + 1 < OPERATION_COUNT_MAX ? i + 1 : NO_OPERATION;
    if (grow_watched(uring, fd_count_max < 1u << 20 ? fd_count_max : 1u << 20) != 0 || mqd_uring_probe() != 0)
        return -1;
    return mqd_uring_open(&uring->ring, mqd_poll_uring_submission_count, mqd_poll_uring_completion_count);
}

/* The thread that waited may have ended; the kernel has then finished or cancelled its requests,
 * and refuses further calls. */
static void destroy(struct mqd_poll *poll)
{
    struct uring_poll *uring = poll->backend_state;
    struct mqd_poll_event events[64];
    bool woken;
    for (int result = 0;
         uring->running_count && (result == 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY);) {
        while (reap(uring, events, 64, &woken) > 0) {
        }
        result = uring->running_count ? mqd_uring_enter(&uring->ring, 1, -1) : 0;
    }
    while (reap(uring, events, 64, &woken) > 0) {
    }
    mqd_uring_close(&uring->ring);
    free(uring->scratch);
    free(uring->watched);
    free(uring);
}

static const struct mqd_poll_calls calls = {.backend = MQD_BACKEND_IO_URING,
                                            .destroy = destroy,
                                            .add = add,
                                            .remove = remove_fd,
                                            .sync = sync_fd,
                                            .read_ahead = read_ahead,
                                            .wait = wait_events};

int mqd_poll_uring_create(struct mqd_poll *poll, uint32_t fd_count_max)
{
    struct uring_poll *uring = calloc(1, sizeof *uring);
    if (!uring)
        return mqd_error_system(ENOMEM, "out of memory for io_uring");
    uring->wake_fd = poll->wake_fd;
    if (create_parts(uring, fd_count_max) != 0) {
        free(uring->scratch);
        free(uring->watched);
        free(uring);
        return -1;
    }
    arm_wake(uring);
    poll->backend_state = uring;
    poll->calls = &calls;
    return 0;
}
