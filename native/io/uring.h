/* A minimal io_uring: the two queues and three system calls. Numbers and structures are the
 * kernel's (io_uring(7), io_uring_setup(2), io_uring_enter(2)); they are defined here because the
 * headers of the build machine may be older than the kernel that the program runs on.
 *
 * Only the first thread that enters the ring may submit and wait; before that, another thread may
 * open the ring and fill its queue.
 */
#ifndef MQD_URING_H
#define MQD_URING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MQD_URING_OP_READV = 1,
    MQD_URING_OP_FSYNC = 3,
    MQD_URING_OP_POLL_ADD = 6,
    MQD_URING_OP_ASYNC_CANCEL = 14,
};
enum { MQD_URING_SQE_ASYNC = 1u << 4, MQD_URING_SQE_CQE_SKIP_SUCCESS = 1u << 6 };
enum { MQD_URING_POLL_MULTISHOT = 1u << 0, MQD_URING_FSYNC_DATASYNC = 1u << 0, MQD_URING_CQE_MORE = 1u << 1 };

struct mqd_uring_submission {
    uint8_t opcode;
    uint8_t flags;
    uint16_t io_priority;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t length;
    uint32_t operation_flags;
    uint64_t user_data;
    uint16_t buffer;
    uint16_t personality;
    int32_t file_index;
    uint64_t reserved[2];
};
struct mqd_uring_completion {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};
_Static_assert(sizeof(struct mqd_uring_submission) == 64 && sizeof(struct mqd_uring_completion) == 16,
               "must equal the sizes in the kernel");

struct mqd_uring {
    int fd;
    uint32_t features;
    bool enabled;
    bool has_taskrun_flag; /* the kernel reports in sq_flags when completions are ready to be posted */
    uint32_t submission_mask;
    uint32_t submission_capacity;
    uint32_t submission_tail; /* including entries not submitted yet */
    uint32_t completion_mask;
    uint32_t *submission_head_word;
    uint32_t *submission_tail_word;
    uint32_t *submission_flags_word;
    uint32_t *completion_head_word;
    uint32_t *completion_tail_word;
    struct mqd_uring_submission *submissions;
    struct mqd_uring_completion *completions;
    void *rings;
    size_t rings_bytes;
    size_t submissions_bytes;
};

/* Returns -1 if the kernel lacks or forbids a required feature; the error message gives the reason
 * and the remedy. */
int mqd_uring_open(struct mqd_uring *ring, uint32_t submission_count, uint32_t completion_count);
void mqd_uring_close(struct mqd_uring *ring);
/* Tests the required features once: a multishot poll, a wait with a time limit. Returns -1 if one
 * is missing; the error message gives the reason. */
int mqd_uring_probe(void);

/* Returns a zeroed entry to fill; NULL when the queue is full and the kernel takes no entry. */
struct mqd_uring_submission *mqd_uring_next(struct mqd_uring *ring);
/* Submits queued entries, lets the kernel post completions, waits for wait_count of them.
 * timeout_ns < 0: no limit. Returns 0 or -errno (-ETIME, -EINTR...). */
int mqd_uring_enter(struct mqd_uring *ring, uint32_t wait_count, int64_t timeout_ns);
/* Whether to enter the kernel even without waiting: entries are queued, or completions may be ready
 * to be posted. */
bool mqd_uring_needs_enter(const struct mqd_uring *ring);
/* The oldest completion, NULL when there is none; mqd_uring_pop frees its entry. */
const struct mqd_uring_completion *mqd_uring_peek(struct mqd_uring *ring);
void mqd_uring_pop(struct mqd_uring *ring);

#endif
