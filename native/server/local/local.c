/* The lifecycle of an attachment: its memory, its descriptors, its connection. See
 * server/local/local.h. */
#include "server/local/local.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/authentication.h"
#include "server/reactor.h"
#include "server/rights/subject.h"

#define PAGE_BYTES 4096u
#define SUBMISSION_COUNT_MIN 16u
/* The kernel doubles this. There is room for only a few responses, each with a descriptor, so that
 * a client that does not receive cannot have hundreds of descriptors in flight. */
#define SOCKET_SEND_BYTES 4096
#define OVERDUE_PERIODS 2
#define UNMAP_BYTES_MAX (1u << 20) /* larger mappings are unmapped by the thread pool */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

/* The resources of an attachment that is being created. */
struct new_attachment {
    struct mqd_local *local;
    int memory_fd, pipe_read_fd; /* for the client only */
    const void *principal;
    uint16_t principal_bytes; /* 0 = none */
};

static uint64_t round_up_to_page(uint64_t bytes)
{
    return (bytes + PAGE_BYTES - 1) & ~(uint64_t)(PAGE_BYTES - 1);
}

static uint32_t clamped_power_of_two(uint32_t requested, uint32_t value_min, uint32_t value_max)
{
    uint32_t value = value_min;
    while (value < requested && value < value_max)
        value *= 2;
    return value;
}

/* ---- refusing ---- */

static void refuse(struct mqd_reactor *r, int fd, const struct mqd_local_handoff *handoff, int error,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));
static void refuse(struct mqd_reactor *r, int fd, const struct mqd_local_handoff *handoff, int error,
                   const char *format, ...)
{
    struct mqd_local_welcome welcome = {.magic = MQD_LOCAL_MAGIC, .worker = r->options.self, .error = error};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(welcome.reason, sizeof welcome.reason, format, arguments);
    va_end(arguments);
    send(fd, &welcome, sizeof welcome, MSG_DONTWAIT | MSG_NOSIGNAL);
    close(fd);
    mqd_stat(r, MQD_COUNT_LOCAL_REFUSED, 1);
    mqd_log(r, 4, 0, UINT32_MAX, "local client %.31s (pid %d, uid %u) refused: %s", handoff->client_id, handoff->pid,
            handoff->uid, welcome.reason);
}

/* ---- memory ---- */

/* Grants the sizes that the client requested, within the limits and what is left of the budget.
 * Returns false if too little is left. */
static bool choose_sizes(const struct mqd_reactor *r, struct mqd_local *local, const struct mqd_local_handoff *handoff)
{
    local->submission_count =
        clamped_power_of_two(handoff->submission_count, SUBMISSION_COUNT_MIN, MQD_LOCAL_SUBMISSION_COUNT_MAX);
    local->reply_bytes =
        clamped_power_of_two(handoff->reply_bytes, MQD_LOCAL_REPLY_BYTES_MIN, MQD_LOCAL_REPLY_BYTES_MAX);
    uint64_t requested = handoff->data_bytes > MQD_LOCAL_DATA_BYTES_MAX ? MQD_LOCAL_DATA_BYTES_MAX
                                                                        : round_up_to_page(handoff->data_bytes);
    if (requested < MQD_LOCAL_DATA_BYTES_MIN)
        requested = MQD_LOCAL_DATA_BYTES_MIN;
    uint64_t budget_bytes = mqd_load_relaxed(&r->local_bytes_max),
             available_bytes = r->local_bytes < budget_bytes ? budget_bytes - r->local_bytes : 0;
    for (;;) { /* if the budget is nearly used up, a client that wants long rings gets shorter ones */
        uint64_t overhead_bytes =
            sizeof(struct mqd_local_header) +
            round_up_to_page((uint64_t)local->submission_count * sizeof(struct mqd_local_submission)) +
            round_up_to_page(local->reply_bytes);
        if (overhead_bytes + MQD_LOCAL_DATA_BYTES_MIN <= available_bytes) {
            local->data_bytes = requested <= available_bytes - overhead_bytes
                                    ? requested
                                    : (available_bytes - overhead_bytes) & ~(uint64_t)(PAGE_BYTES - 1);
            local->total_bytes = overhead_bytes + local->data_bytes;
            return true;
        }
        if (local->submission_count == SUBMISSION_COUNT_MIN && local->reply_bytes == MQD_LOCAL_REPLY_BYTES_MIN)
            return false;
        local->submission_count =
            local->submission_count > SUBMISSION_COUNT_MIN ? local->submission_count / 2 : SUBMISSION_COUNT_MIN;
        local->reply_bytes =
            local->reply_bytes > MQD_LOCAL_REPLY_BYTES_MIN ? local->reply_bytes / 2 : MQD_LOCAL_REPLY_BYTES_MIN;
    }
}

static int memory_create(void)
{
    int fd = memfd_create("mqd-local", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    /* kernels before 6.3 do not support MFD_NOEXEC_SEAL */
    return fd < 0 && errno == EINVAL ? memfd_create("mqd-local", MFD_CLOEXEC | MFD_ALLOW_SEALING) : fd;
}

static bool memory_open(const struct mqd_reactor *r, struct new_attachment *new_attachment)
{
    struct mqd_local *local = new_attachment->local;
    new_attachment->memory_fd = memory_create();
    if (new_attachment->memory_fd < 0 || ftruncate(new_attachment->memory_fd, (off_t)local->total_bytes) < 0)
        return false;
    uint64_t replies_offset = sizeof(struct mqd_local_header) +
                              round_up_to_page((uint64_t)local->submission_count * sizeof(struct mqd_local_submission));
    uint64_t data_offset = replies_offset + round_up_to_page(local->reply_bytes);
    /* allocates the pages that the worker writes: a page that cannot be allocated is an error now
     * instead of SIGBUS later */
    if (fallocate(new_attachment->memory_fd, 0, 0, (off_t)data_offset) < 0)
        return false;
    if (fcntl(new_attachment->memory_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return false;
    void *memory = mmap(NULL, local->total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, new_attachment->memory_fd, 0);
    if (memory == MAP_FAILED)
        return false;
    struct mqd_local_header *header = local->header = memory;
    header->layout_version = MQD_LOCAL_LAYOUT_VERSION;
    header->worker = r->options.self;
    header->abi_hash = mqd_local_abi_hash();
    header->total_bytes = local->total_bytes;
    header->submissions_offset = sizeof *header;
    header->replies_offset = replies_offset;
    header->data_offset = data_offset;
    header->data_bytes = local->data_bytes;
    header->submission_count = local->submission_count;
    header->reply_bytes = local->reply_bytes;
    header->request_bytes_max = r->options.request_bytes_max;
    local->submissions = (const struct mqd_local_submission *)(header + 1);
    local->replies = (uint8_t *)memory + replies_offset;
    local->data = (const uint8_t *)memory + data_offset;
    mqd_store_release(&header->magic, MQD_LOCAL_MAGIC);
    return true;
}

/* ---- descriptors ---- */

static bool descriptors_open(struct mqd_reactor *r, struct new_attachment *new_attachment, int fd)
{
    struct mqd_local *local = new_attachment->local;
    int ends[2], one_page = PAGE_BYTES, socket_bytes = SOCKET_SEND_BYTES;
    socklen_t size_bytes = sizeof local->pidfd;
    local->to_worker_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (local->to_worker_fd < 0 || pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0)
        return false;
    new_attachment->pipe_read_fd = ends[0];
    local->to_client_fd = ends[1];
    /* Tries to shrink the pipe: the default size uses more of the user's pipe quota. */
    fcntl(local->to_client_fd, F_SETPIPE_SZ, one_page);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &socket_bytes, sizeof socket_bytes);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &local->pidfd, &size_bytes) < 0) {
        local->pidfd = -1;
        /* Kernels before 6.5 do not support this option. Any other error means that the process has
         * ended, or that no descriptor is available. */
        if (errno != ENOPROTOOPT)
            return false;
    }
    return mqd_poll_add(r->poll, local->to_worker_fd, mqd_token(MQD_TOKEN_WAKE, 0)) == 0;
}

static bool welcome_send(const struct mqd_reactor *r, const struct new_attachment *new_attachment, int fd)
{
    const struct mqd_local *local = new_attachment->local;
    struct mqd_local_welcome welcome = {
        .magic = MQD_LOCAL_MAGIC, .total_bytes = local->total_bytes, .worker = r->options.self};
    int fds[MQD_LOCAL_FD_COUNT] = {new_attachment->memory_fd, local->to_worker_fd, new_attachment->pipe_read_fd,
                                   r->options.control_fd};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof fds)];
    } control = {0};
    struct iovec iov = {&welcome, sizeof welcome};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(&control.header), fds, sizeof fds);
    return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof welcome;
}

/* ---- adopting ---- */

struct unmapping {
    void *memory;
    uint64_t size_bytes;
};

static int unmap(void *argument)
{
    struct unmapping *unmapping = argument;
    munmap(unmapping->memory, unmapping->size_bytes);
    free(unmapping);
    return 0;
}

/* If the client has ended, unmapping also frees the pages, which takes a tenth of a second for a
 * gigabyte, so another thread does it. */
static void memory_close(struct mqd_reactor *r, void *memory, uint64_t size_bytes)
{
    struct unmapping *unmapping = size_bytes > UNMAP_BYTES_MAX ? malloc(sizeof *unmapping) : NULL;
    if (unmapping) {
        *unmapping = (struct unmapping){memory, size_bytes};
        if (mqd_poll_run(r->poll, -1, unmap, unmapping, mqd_token(MQD_TOKEN_WAKE, 0)) == 0)
            return;
        free(unmapping);
    }
    munmap(memory, size_bytes);
}

static void local_free(struct mqd_reactor *r, struct mqd_local *local)
{
    if (local->to_worker_fd >= 0) {
        /* must precede close, because the client's copy keeps the eventfd open */
        mqd_poll_remove(r->poll, local->to_worker_fd, mqd_token(MQD_TOKEN_WAKE, 0));
        close(local->to_worker_fd);
    }
    if (local->pidfd >= 0) {
        if (local->connection)
            mqd_poll_remove(r->poll, local->pidfd, 0);
        close(local->pidfd);
    }
    if (local->to_client_fd >= 0)
        close(local->to_client_fd);
    if (local->header)
        memory_close(r, local->header, local->total_bytes);
    mqd_local_query_close(local);
    free(local);
}

static void update_gauges(struct mqd_reactor *r)
{
    mqd_set_gauge(r, MQD_GAUGE_LOCAL_ATTACHMENTS, r->local_count);
    mqd_set_gauge(r, MQD_GAUGE_LOCAL_BYTES, r->local_bytes);
}

static void enlist(struct mqd_reactor *r, struct mqd_connection *c, struct mqd_local *local)
{
    c->local = local;
    local->connection = c;
    local->index = r->local_count;
    r->locals[r->local_count++] = local;
    r->local_bytes += local->total_bytes;
    update_gauges(r);
    if (local->pidfd >= 0 &&
        mqd_poll_add(r->poll, local->pidfd, mqd_token(MQD_TOKEN_LOCAL_END, (uint64_t)c->generation << 24 | c->index)) <
            0) {
        close(local->pidfd);
        local->pidfd = -1; /* the socket also reports the client's end */
    }
}

static void attach(struct mqd_reactor *r, int fd, const struct mqd_local_handoff *handoff,
                   struct new_attachment *new_attachment)
{
    struct mqd_local *local = new_attachment->local;
    if (!choose_sizes(r, local, handoff)) {
        refuse(r, fd, handoff, MQD_E_FULL,
               "the memory for local clients is used up (local.memory.max.bytes): close some clients, raise the "
               "limit, or connect over TCP");
        goto discard;
    }
    if (!memory_open(r, new_attachment) || !descriptors_open(r, new_attachment, fd)) {
        refuse(r, fd, handoff, errno, "the worker cannot create the shared memory: %s; connect over TCP",
               strerror(errno));
        goto discard;
    }
    struct mqd_connection *c = mqd_connection_open(r, fd, MQD_LISTENER_LOCAL);
    if (!c) {
        refuse(r, fd, handoff, MQD_E_FULL, "the worker accepts no more connections (max.connections): %s",
               mqd_error_message());
        goto discard;
    }
    local->uid = handoff->uid;
    local->pid = handoff->pid;
    local->watched = mqd_local_memory_watch(r, new_attachment->memory_fd, local->total_bytes);
    enlist(r, c, local);
    if (new_attachment->principal_bytes &&
        !mqd_authentication_set_principal(c, MQD_PRINCIPAL_LOCAL, new_attachment->principal,
                                          new_attachment->principal_bytes)) {
        mqd_connection_close(r, c, "out of memory for its principal");
        return;
    }
    mqd_subject_attach(r, c);
    if (c->fd < 0)
        return;
    if (!welcome_send(r, new_attachment, fd)) {
        mqd_connection_close(r, c, "the local client left before it was welcomed");
        return;
    }
    mqd_stat(r, MQD_COUNT_LOCAL_ATTACHES, 1);
    mqd_log(r, 6, c->id, UINT32_MAX, "local client %.31s attached: pid %d, uid %u, %llu KiB", handoff->client_id,
            handoff->pid, handoff->uid, (unsigned long long)(local->total_bytes >> 10));
    return;
discard:
    local_free(r, local);
}

void mqd_local_adopt(struct mqd_reactor *r, int fd, const struct mqd_local_handoff *sent, const void *principal,
                     uint16_t principal_bytes)
{
    struct mqd_local_handoff handoff = *sent;
    handoff.client_id[sizeof handoff.client_id - 1] = 0;
    uint32_t count_max = mqd_load_relaxed(&r->local_count_max);
    if (r->options.control_fd <= 0 || count_max == 0) {
        refuse(r, fd, &handoff, MQD_E_INVALID,
               "this broker serves no local clients (local.attachments.max is 0); connect over TCP");
        return;
    }
    if (r->local_count >= count_max || r->local_count >= MQD_LOCAL_COUNT_MAX) {
        refuse(r, fd, &handoff, MQD_E_FULL,
               "worker %u already serves %u local clients (local.attachments.max); connect over TCP", r->options.self,
               r->local_count);
        return;
    }
    struct new_attachment new_attachment = {.local = calloc(1, sizeof *new_attachment.local),
                                            .memory_fd = -1,
                                            .pipe_read_fd = -1,
                                            .principal = principal,
                                            .principal_bytes = principal_bytes};
    if (!new_attachment.local) {
        refuse(r, fd, &handoff, ENOMEM, "the worker is out of memory; connect over TCP");
        return;
    }
    new_attachment.local->to_worker_fd = new_attachment.local->to_client_fd = new_attachment.local->pidfd =
        new_attachment.local->response_fd = -1;
    mqd_list_init(&new_attachment.local->query_node);
    attach(r, fd, &handoff, &new_attachment);
    if (new_attachment.memory_fd >= 0)
        close(new_attachment.memory_fd);
    if (new_attachment.pipe_read_fd >= 0)
        close(new_attachment.pipe_read_fd);
}

/* ---- ending ---- */

void mqd_local_return_bytes(struct mqd_reactor *r, uint64_t size_bytes)
{
    r->local_bytes -= size_bytes;
    update_gauges(r);
}

void mqd_local_close(struct mqd_reactor *r, struct mqd_connection *c)
{
    struct mqd_local *local = c->local;
    struct mqd_local *last = r->locals[--r->local_count];
    r->locals[local->index] = last;
    last->index = local->index;
    if (!local->watched)
        r->local_bytes -= local->total_bytes;
    update_gauges(r);
    mqd_list_remove(&local->query_node);
    mqd_log(r, 6, c->id, UINT32_MAX, "local client detached: pid %d, uid %u", local->pid, local->uid);
    local_free(r, local);
    c->local = NULL;
}

/* Requests submitted before the end are still taken, like bytes that TCP has received, but not more
 * bytes than the data area holds, because no more can have been submitted. */
void mqd_local_on_end(struct mqd_reactor *r, struct mqd_connection *c)
{
    struct mqd_local *local = c->local;
    if (!c->hangup || !local->drain_bytes)
        local->drain_bytes = local->data_bytes;
    c->hangup = c->readable = c->writable = 1;
    mqd_throttle_unmute(r, c);
    if ((c->chunk_count || mqd_output_pending_bytes(c)) && !mqd_list_linked(&c->output_node))
        mqd_list_append(&r->to_send, &c->output_node); /* the output is discarded (mqd_local_send) */
    mqd_connection_resume(r, c);
}

void mqd_local_on_event(struct mqd_reactor *r, struct mqd_connection *c, uint32_t flags)
{
    if (flags & (MQD_POLL_READABLE | MQD_POLL_WRITABLE))
        mqd_local_query_schedule(r, c->local);
    if (flags & MQD_POLL_HANGUP)
        mqd_local_on_end(r, c);
}

bool mqd_local_count_period(struct mqd_local *local)
{
    return local->connection->hangup && ++local->periods_since_hangup >= OVERDUE_PERIODS;
}
