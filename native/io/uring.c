/* io_uring by raw system calls; see io/uring.h.
 *
 * The ring is created disabled; the first thread that enters it enables it: SINGLE_ISSUER binds it
 * to that thread, not to the caller of mqd_uring_open. With DEFER_TASKRUN completions are
 * posted only while that thread waits, so the reactor is not interrupted. On older kernels
 * setup() tries again with fewer flags.
 */
#include "io/uring.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"

#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

enum {
    SETUP_CQSIZE = 1u << 3,
    SETUP_CLAMP = 1u << 4,
    SETUP_R_DISABLED = 1u << 6,
    SETUP_COOP_TASKRUN = 1u << 8,
    SETUP_TASKRUN_FLAG = 1u << 9,
    SETUP_SINGLE_ISSUER = 1u << 12,
    SETUP_DEFER_TASKRUN = 1u << 13,
};
enum {
    FEATURE_SINGLE_MMAP = 1u << 0,
    FEATURE_NODROP = 1u << 1,
    FEATURE_SUBMIT_STABLE = 1u << 2,
    FEATURE_EXT_ARG = 1u << 8,
    FEATURE_RSRC_TAGS = 1u << 10, /* 5.13, the release that introduced multishot poll */
    FEATURE_CQE_SKIP = 1u << 11,
    FEATURE_NO_IOWAIT = 1u << 17,
};
enum { ENTER_GETEVENTS = 1u << 0, ENTER_EXT_ARG = 1u << 3, ENTER_NO_IOWAIT = 1u << 7 };
enum { SQ_CQ_OVERFLOW = 1u << 1, SQ_TASKRUN = 1u << 2 };
enum { REGISTER_PROBE = 8, REGISTER_RESTRICTIONS = 11, REGISTER_ENABLE_RINGS = 12, REGISTER_IOWQ_MAX_WORKERS = 19 };
enum { RESTRICT_REGISTRATION = 0, RESTRICT_OPERATION = 1, RESTRICT_FLAGS = 2 };
enum { OFFSET_RINGS = 0, OFFSET_SUBMISSIONS = 0x10000000 };
#define FEATURES_NEEDED                                                                                                \
    ((uint32_t)(FEATURE_SINGLE_MMAP | FEATURE_NODROP | FEATURE_SUBMIT_STABLE | FEATURE_EXT_ARG | FEATURE_RSRC_TAGS |   \
                FEATURE_CQE_SKIP))
/* kernel threads for one reactor's flushes and reads: enough that some stay free when a disk
 * stalls */
#define BOUNDED_WORKER_COUNT 32

struct submission_offsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    uint64_t user_address;
};
struct completion_offsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, completions, flags, reserved;
    uint64_t user_address;
};
struct parameters {
    uint32_t submission_entries, completion_entries, flags, thread_cpu, thread_idle, features, work_queue_fd,
        reserved[3];
    struct submission_offsets submission;
    struct completion_offsets completion;
};
_Static_assert(sizeof(struct parameters) == 120, "must equal the size in the kernel");
struct probe {
    uint8_t last_op, op_count;
    uint16_t reserved;
    uint32_t reserved2[3];
    struct {
        uint8_t op, reserved;
        uint16_t flags;
        uint32_t reserved2;
    } op[64];
};
struct restriction {
    uint16_t kind;
    uint8_t allowed;
    uint8_t reserved;
    uint32_t reserved2[3];
};
_Static_assert(sizeof(struct restriction) == 16, "must equal the size in the kernel");
struct enter_argument {
    uint64_t signal_mask;
    uint32_t signal_mask_bytes;
    uint32_t min_wait_us;
    uint64_t timeout;
};
struct timespec_64 {
    int64_t seconds, nanoseconds;
};

#define REMEDY                                                                                                         \
    "; set io.backend=auto, or allow io_uring (sysctl kernel.io_uring_disabled=0, a seccomp profile that "             \
    "permits it, Linux 5.17 or newer)"

static int setup(struct parameters *parameters, uint32_t submission_count, uint32_t completion_count)
{
    static const uint32_t flag_sets[] = {
        SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN | SETUP_COOP_TASKRUN | SETUP_TASKRUN_FLAG, /* 6.1 */
        SETUP_COOP_TASKRUN | SETUP_TASKRUN_FLAG,                                             /* 5.19 */
        0,
    };
    int fd = -1;
    for (size_t i = 0; i < sizeof flag_sets / sizeof flag_sets[0]; i++) {
        *parameters = (struct parameters){.completion_entries = completion_count,
                                          .flags = SETUP_CQSIZE | SETUP_CLAMP | SETUP_R_DISABLED | flag_sets[i]};
        fd = (int)syscall(SYS_io_uring_setup, submission_count, parameters);
        if (fd >= 0 || errno != EINVAL)
            break;
    }
    return fd;
}

static const uint8_t operations_needed[] = {MQD_URING_OP_READV, MQD_URING_OP_FSYNC, MQD_URING_OP_POLL_ADD,
                                            MQD_URING_OP_ASYNC_CANCEL};

static int check_support(int fd, uint32_t features)
{
    if ((features & FEATURES_NEEDED) != FEATURES_NEEDED)
        return mqd_error_set(ENOSYS, "this kernel's io_uring is too old (features %x of %x)" REMEDY,
                             features & FEATURES_NEEDED, FEATURES_NEEDED);
    struct probe probe;
    memset(&probe, 0, sizeof probe);
    if (syscall(SYS_io_uring_register, fd, REGISTER_PROBE, &probe, 64) != 0)
        return mqd_error_system(errno, "the features of io_uring cannot be queried" REMEDY);
    for (size_t i = 0; i < sizeof operations_needed; i++)
        if (operations_needed[i] > probe.last_op || !(probe.op[operations_needed[i]].flags & 1))
            return mqd_error_set(ENOSYS, "this kernel's io_uring lacks operation %u" REMEDY, operations_needed[i]);
    return 0;
}

static int map_queues(struct mqd_uring *ring, const struct parameters *p)
{
    size_t submission_bytes = p->submission.array + p->submission_entries * sizeof(uint32_t);
    size_t completion_bytes = p->completion.completions + p->completion_entries * sizeof(struct mqd_uring_completion);
    ring->rings_bytes = submission_bytes > completion_bytes ? submission_bytes : completion_bytes;
    ring->submissions_bytes = p->submission_entries * sizeof(struct mqd_uring_submission);
    ring->rings =
        mmap(NULL, ring->rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, OFFSET_RINGS);
    ring->submissions = mmap(NULL, ring->submissions_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd,
                             OFFSET_SUBMISSIONS);
    if (ring->rings == MAP_FAILED || ring->submissions == MAP_FAILED)
        return mqd_error_system(errno, "cannot map the queues of io_uring" REMEDY);
    uint8_t *base = ring->rings;
    ring->submission_head_word = (uint32_t *)(base + p->submission.head);
    ring->submission_tail_word = (uint32_t *)(base + p->submission.tail);
    ring->submission_flags_word = (uint32_t *)(base + p->submission.flags);
    ring->submission_mask = *(uint32_t *)(base + p->submission.ring_mask);
    ring->submission_capacity = p->submission_entries;
    ring->completion_head_word = (uint32_t *)(base + p->completion.head);
    ring->completion_tail_word = (uint32_t *)(base + p->completion.tail);
    ring->completion_mask = *(uint32_t *)(base + p->completion.ring_mask);
    ring->completions = (struct mqd_uring_completion *)(base + p->completion.completions);
    uint32_t *array = (uint32_t *)(base + p->submission.array);
    for (uint32_t i = 0; i < p->submission_entries; i++) /* entry i is always at index i */
        array[i] = i;
    return 0;
}

/* Restricts the ring to the operations used here: seccomp filters cannot do that, because they do
 * not see io_uring's operations. */
static int restrict_operations(int fd)
{
    struct restriction allowed[sizeof operations_needed / sizeof operations_needed[0] + 3] = {
        {.kind = RESTRICT_REGISTRATION, .allowed = REGISTER_ENABLE_RINGS},
        {.kind = RESTRICT_REGISTRATION, .allowed = REGISTER_IOWQ_MAX_WORKERS},
        {.kind = RESTRICT_FLAGS, .allowed = MQD_URING_SQE_ASYNC | MQD_URING_SQE_CQE_SKIP_SUCCESS},
    };
    for (size_t i = 0; i < sizeof operations_needed / sizeof operations_needed[0]; i++)
        allowed[i + 3] = (struct restriction){.kind = RESTRICT_OPERATION, .allowed = operations_needed[i]};
    if (syscall(SYS_io_uring_register, fd, REGISTER_RESTRICTIONS, allowed, sizeof allowed / sizeof allowed[0]) != 0)
        return mqd_error_system(errno, "io_uring cannot be restricted to the operations used" REMEDY);
    return 0;
}

int mqd_uring_open(struct mqd_uring *ring, uint32_t submission_count, uint32_t completion_count)
{
    struct parameters parameters;
    memset(ring, 0, sizeof *ring);
    ring->rings = ring->submissions = MAP_FAILED;
    ring->fd = setup(&parameters, submission_count, completion_count);
    if (ring->fd < 0) {
        const char *hint = errno == ENOMEM ? "; the limit of locked memory (ulimit -l) may be too low" : "";
        return mqd_error_system(errno, "io_uring is not available%s" REMEDY, hint);
    }
    ring->features = parameters.features;
    ring->has_taskrun_flag = parameters.flags & SETUP_TASKRUN_FLAG;
    if (check_support(ring->fd, parameters.features) == 0 && map_queues(ring, &parameters) == 0 &&
        restrict_operations(ring->fd) == 0)
        return 0;
    mqd_uring_close(ring);
    return -1;
}

void mqd_uring_close(struct mqd_uring *ring)
{
    if (ring->submissions != MAP_FAILED)
        munmap(ring->submissions, ring->submissions_bytes);
    if (ring->rings != MAP_FAILED)
        munmap(ring->rings, ring->rings_bytes);
    close(ring->fd);
}

struct mqd_uring_submission *mqd_uring_next(struct mqd_uring *ring)
{
    if (ring->submission_tail - mqd_load_acquire(ring->submission_head_word) >= ring->submission_capacity) {
        mqd_uring_enter(ring, 0, 0);
        if (ring->submission_tail - mqd_load_acquire(ring->submission_head_word) >= ring->submission_capacity)
            return NULL;
    }
    struct mqd_uring_submission *submission = &ring->submissions[ring->submission_tail++ & ring->submission_mask];
    memset(submission, 0, sizeof *submission);
    return submission;
}

static void enable(struct mqd_uring *ring)
{
    uint32_t workers[2] = {BOUNDED_WORKER_COUNT, 0}; /* 0: unchanged */
    ring->enabled = true;
    if (syscall(SYS_io_uring_register, ring->fd, REGISTER_ENABLE_RINGS, NULL, 0) == 0)
        /* needs Linux 5.15; if this call fails, the kernel's default limit applies */
        syscall(SYS_io_uring_register, ring->fd, REGISTER_IOWQ_MAX_WORKERS, workers, 2);
}

int mqd_uring_enter(struct mqd_uring *ring, uint32_t wait_count, int64_t timeout_ns)
{
    if (!ring->enabled)
        enable(ring);
    mqd_store_release(ring->submission_tail_word, ring->submission_tail);
    uint32_t queued = ring->submission_tail - mqd_load_acquire(ring->submission_head_word);
    struct timespec_64 timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    struct enter_argument argument = {.signal_mask_bytes = 8,
                                      .timeout = wait_count && timeout_ns >= 0 ? (uintptr_t)&timeout : 0};
    uint32_t flags = ENTER_GETEVENTS | ENTER_EXT_ARG | (ring->features & FEATURE_NO_IOWAIT ? ENTER_NO_IOWAIT : 0u);
    long result = syscall(SYS_io_uring_enter, ring->fd, queued, wait_count, flags, &argument, sizeof argument);
    return result < 0 ? -errno : 0;
}

bool mqd_uring_needs_enter(const struct mqd_uring *ring)
{
    return !ring->has_taskrun_flag || ring->submission_tail != mqd_load_acquire(ring->submission_head_word) ||
           (mqd_load_acquire(ring->submission_flags_word) & (SQ_CQ_OVERFLOW | SQ_TASKRUN));
}

const struct mqd_uring_completion *mqd_uring_peek(struct mqd_uring *ring)
{
    uint32_t head = mqd_load_relaxed(ring->completion_head_word); /* only this thread writes it */
    return head == mqd_load_acquire(ring->completion_tail_word) ? NULL
                                                                : &ring->completions[head & ring->completion_mask];
}

void mqd_uring_pop(struct mqd_uring *ring)
{
    mqd_store_release(ring->completion_head_word, mqd_load_relaxed(ring->completion_head_word) + 1);
}

/* Two writes to the eventfd must produce two completions of one poll. */
static int try_poll(struct mqd_uring *ring, int fd)
{
    const uint64_t one = 1;
    struct mqd_uring_submission *submission = mqd_uring_next(ring);
    if (!submission)
        return -EAGAIN;
    submission->opcode = MQD_URING_OP_POLL_ADD;
    submission->fd = fd;
    submission->length = MQD_URING_POLL_MULTISHOT;
    submission->operation_flags = POLLIN;
    for (int round = 0; round < 2; round++) {
        if (write(fd, &one, sizeof one) != sizeof one)
            return -errno;
        int result = mqd_uring_enter(ring, 1, 1000000000);
        const struct mqd_uring_completion *completion = mqd_uring_peek(ring);
        if (!completion)
            return result ? result : -ENOSYS;
        if (completion->result < 0 || !(completion->flags & MQD_URING_CQE_MORE))
            return completion->result < 0 ? completion->result : -ENOSYS;
        mqd_uring_pop(ring);
    }
    return 0;
}

int mqd_uring_probe(void)
{
    struct mqd_uring ring;
    if (mqd_uring_open(&ring, 4, 8) != 0)
        return -1;
    int fd = eventfd(0, EFD_CLOEXEC);
    int result = fd < 0 ? -errno : try_poll(&ring, fd);
    if (fd >= 0)
        close(fd);
    mqd_uring_close(&ring);
    return result == 0
               ? 0
               : mqd_error_system(-result,
                                  "io_uring is available, but lacks multishot polls or waits with a time limit" REMEDY);
}
