/* For test_local*.c: clients through shared memory, beside those of mqd_reactor_test.h and with the
 * same frames and answers.
 *
 * It speaks shm/local_layout.h by itself. local_wait sleeps as a good client does (A4), so that a
 * wake-up that is lost shows as a timeout. */
#ifndef MQD_LOCAL_TEST_H
#define MQD_LOCAL_TEST_H

#include "mqd_reactor_test.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include "server/local/local.h"

#define LOCAL_BYTES_MAX (8u << 20) /* of each worker */
#define LOCAL_COUNT_MAX 40

struct local {
    struct client client; /* reply, for take_*; its fd is the socket */
    struct bench *b;
    struct mqd_local_welcome welcome;
    struct mqd_local_header *header;
    uint8_t *data, *replies;
    struct mqd_local_submission *submissions;
    uint64_t data_bytes, tail, head, total_bytes;
    uint32_t submission_count, reply_bytes;
    int fds[MQD_LOCAL_FD_COUNT]; /* memfd, to_worker, to_client, control */
    uint64_t data_at;
    uint64_t sleeps;
};

/* For the `change` argument of bench_start. */
__attribute__((unused)) static void local_options(struct bench *b)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        b->options[worker].control_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}
__attribute__((unused)) static void local_options_spin(struct bench *b)
{
    local_options(b);
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        b->options[worker].spin_us = 200;
}

__attribute__((unused)) static struct bench *local_bench(int backend, void (*change)(struct bench *b))
{
    struct bench *b = bench_start(backend, change ? change : local_options);
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        mqd_reactor_set_local_max(b->reactors[worker], LOCAL_COUNT_MAX, LOCAL_BYTES_MAX);
    return b;
}

static uint64_t local_counter(struct bench *b, uint32_t worker, enum mqd_counter counter)
{
    return mqd_counter_read(b->control, worker, counter);
}

/* Waits until no client is attached and no memory is accounted to them. */
__attribute__((unused)) static void local_wait_none(struct bench *b)
{
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        while (local_counter(b, worker, MQD_GAUGE_LOCAL_ATTACHMENTS) ||
               local_counter(b, worker, MQD_GAUGE_LOCAL_BYTES)) {
            CHECK_OR(test_now_ns() < end_ns, abort());
            poll(NULL, 0, 1); /* the worker sends no event */
        }
}

__attribute__((unused)) static void local_bench_stop(struct bench *b)
{
    int fds[REACTORS];
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        fds[worker] = b->options[worker].control_fd;
    bench_stop(b);
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        close(fds[worker]);
}

struct local_sizes {
    uint64_t data_bytes;
    uint32_t reply_bytes, submission_count;
};

/* Hands over one end of a socket like the acceptor; returns the other one. principal: NULL =
 * there is no authorizer. */
static int local_hand_as(struct bench *b, uint32_t worker, struct local_sizes sizes, const char *principal)
{
    int ends[2];
    struct timeval limit = {LIMIT_MS / 1000, 0};
    CHECK_OR(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, abort());
    setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    struct mqd_local_handoff handoff = {.magic = 0x31434e4fu,
                                        .listener_id = MQD_LISTENER_LOCAL,
                                        .flags = MQD_HANDOFF_LOCAL,
                                        .data_bytes = sizes.data_bytes,
                                        .reply_bytes = sizes.reply_bytes,
                                        .submission_count = sizes.submission_count,
                                        .uid = 12,
                                        .pid = 34,
                                        .client_id = "test"};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } ancillary = {0};
    size_t principal_bytes = principal ? strlen(principal) : 0;
    struct iovec iov[2] = {{&handoff, sizeof handoff}, {(void *)(uintptr_t)principal, principal_bytes}};
    struct msghdr message = {
        .msg_iov = iov, .msg_iovlen = 2, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
    ancillary.header.cmsg_level = SOL_SOCKET, ancillary.header.cmsg_type = SCM_RIGHTS,
    ancillary.header.cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(&ancillary.header), &ends[1], sizeof(int));
    CHECK_OR(sendmsg(b->handoffs[worker], &message, 0) == (ssize_t)(64 + principal_bytes), abort());
    close(ends[1]);
    return ends[0];
}

/* A packet and its descriptors; its size, 0 at the end, -1 after LIMIT_MS. */
static ssize_t local_receive_packet(int fd, void *bytes, size_t size_bytes, int *fds, uint32_t fds_max,
                                    uint32_t *fd_count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(8 * sizeof(int))];
    } ancillary = {0};
    struct iovec iov = {bytes, size_bytes};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
    ssize_t n;
    do
        n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    *fd_count = 0;
    struct cmsghdr *header = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (header && header->cmsg_type == SCM_RIGHTS) {
        *fd_count = (uint32_t)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        CHECK_OR(*fd_count <= fds_max, abort());
        memcpy(fds, CMSG_DATA(header), *fd_count * sizeof(int));
    }
    return n < 0 && errno == ECONNRESET ? 0 : n;
}

static inline int local_hand(struct bench *b, uint32_t worker, struct local_sizes sizes)
{
    return local_hand_as(b, worker, sizes, NULL);
}

/* welcome.error shows whether it was refused. */
static struct local local_open_as(struct bench *b, uint32_t worker, struct local_sizes sizes, const char *principal)
{
    struct local local = {.b = b, .client.fd = local_hand_as(b, worker, sizes, principal)};
    uint32_t fd_count;
    CHECK_OR(local_receive_packet(local.client.fd, &local.welcome, sizeof local.welcome, local.fds, MQD_LOCAL_FD_COUNT,
                                  &fd_count) == sizeof local.welcome,
             abort());
    CHECK_OR(local.welcome.magic == MQD_LOCAL_MAGIC, abort());
    if (local.welcome.error) {
        CHECK_OR(fd_count == 0, abort());
        return local;
    }
    CHECK_OR(fd_count == MQD_LOCAL_FD_COUNT, abort());
    local.total_bytes = local.welcome.total_bytes;
    local.header = mmap(NULL, local.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, local.fds[0], 0);
    CHECK_OR(local.header != MAP_FAILED, abort());
    CHECK_OR(local.header->magic == MQD_LOCAL_MAGIC && local.header->abi_hash == mqd_local_abi_hash() &&
                 local.header->total_bytes == local.total_bytes && local.header->worker == worker &&
                 local.header->data_offset + local.header->data_bytes == local.total_bytes,
             abort());
    local.data = (uint8_t *)local.header + local.header->data_offset;
    local.replies = (uint8_t *)local.header + local.header->replies_offset;
    local.submissions = (struct mqd_local_submission *)((uint8_t *)local.header + local.header->submissions_offset);
    local.data_bytes = local.header->data_bytes;
    local.submission_count = local.header->submission_count;
    local.reply_bytes = local.header->reply_bytes;
    return local;
}

static inline struct local local_open(struct bench *b, uint32_t worker, struct local_sizes sizes)
{
    return local_open_as(b, worker, sizes, NULL);
}

__attribute__((unused)) static void local_close(struct local *local)
{
    if (local->header) {
        munmap(local->header, local->total_bytes);
        for (int i = 0; i < MQD_LOCAL_FD_COUNT; i++)
            close(local->fds[i]);
    }
    local->header = NULL;
    client_close(&local->client);
}

static bool local_ended(struct local *local)
{
    struct pollfd end = {local->client.fd, POLLRDHUP, 0};
    return poll(&end, 1, 0) == 1;
}

/* ---- submitting ---- */

static void local_wake(struct local *local)
{
    mqd_fence_full(); /* A4 */
    if (mqd_load_relaxed(&mqd_control_endpoint(local->b->control, local->welcome.worker)->sleeping))
        eventfd_write(local->fds[1], 1);
}

/* Submits a request at this offset, valid or not; visible with the next local_publish. */
static void local_put(struct local *local, uint64_t offset, uint32_t size_bytes)
{
    struct mqd_local_submission *place = &local->submissions[local->tail++ & (local->submission_count - 1)];
    mqd_store_relaxed(&place->offset, offset);
    mqd_store_relaxed(&place->size_bytes, size_bytes);
}

static void local_publish(struct local *local)
{
    mqd_store_release(&local->header->submission_tail, local->tail);
    local_wake(local);
}

/* Sleeps until a reply or a taken submission (A4). False after LIMIT_MS; true also at the end. */
static bool local_wait(struct local *local, uint64_t reply_tail, uint64_t submission_head)
{
    mqd_store_seq_cst(&local->header->client_sleeping, MQD_LOCAL_SLEEP_ROOM);
    mqd_fence_full();
    bool good = true;
    if (mqd_load_acquire(&local->header->reply_tail) == reply_tail &&
        mqd_load_acquire(&local->header->submission_head) == submission_head) {
        struct pollfd wait[2] = {{local->fds[2], POLLIN, 0}, {local->client.fd, POLLRDHUP, 0}};
        local->sleeps++;
        good = poll(wait, 2, LIMIT_MS) > 0;
        uint64_t token;
        if (wait[0].revents & POLLIN)
            CHECK_OR(read(local->fds[2], &token, sizeof token) == sizeof token, abort());
    }
    mqd_store_seq_cst(&local->header->client_sleeping, 0);
    return good;
}

/* The frames of `frame` (each with its length word), one submission each. Waits for space.
 * False: the worker ended the attachment. */
static bool local_send(struct local *local, const struct frame *frame)
{
    for (uint32_t at = 0; at < frame->size_bytes;) {
        uint32_t size_bytes = (uint32_t)frame->bytes[at] << 24 | (uint32_t)frame->bytes[at + 1] << 16 |
                              (uint32_t)frame->bytes[at + 2] << 8 | frame->bytes[at + 3];
        for (;;) {
            uint64_t reply_tail = mqd_load_acquire(&local->header->reply_tail),
                     head = mqd_load_acquire(&local->header->submission_head);
            bool wraps = local->data_at + size_bytes > local->data_bytes;
            if (local->tail - head < local->submission_count && (!wraps || head == local->tail)) {
                if (wraps)
                    local->data_at = 0;
                break;
            }
            local_publish(local);
            CHECK_OR(local_wait(local, reply_tail, head), return false);
            if (local_ended(local))
                return false;
        }
        CHECK_OR(size_bytes <= local->data_bytes, abort());
        memcpy(local->data + local->data_at, frame->bytes + at + 4, size_bytes);
        local_put(local, local->data_at, size_bytes);
        local->data_at += size_bytes;
        at += 4 + size_bytes;
    }
    local_publish(local);
    return true;
}

/* ---- replies ---- */

static bool local_take(struct local *local, uint8_t *out, uint32_t size_bytes)
{
    while (size_bytes) {
        uint64_t tail = mqd_load_acquire(&local->header->reply_tail);
        if (tail == local->head) {
            if (local_ended(local) && mqd_load_acquire(&local->header->reply_tail) == tail)
                return false;
            CHECK_OR(local_wait(local, tail, mqd_load_acquire(&local->header->submission_head)), return false);
            continue;
        }
        uint64_t at = local->head & (local->reply_bytes - 1), count = tail - local->head;
        CHECK_OR(count <= local->reply_bytes, abort());
        count = count < size_bytes ? count : size_bytes;
        count = count < local->reply_bytes - at ? count : local->reply_bytes - at;
        memcpy(out, local->replies + at, count);
        local->head += count;
        mqd_store_release(&local->header->reply_head, local->head);
        mqd_fence_full(); /* A4 */
        if (mqd_load_relaxed(&local->header->worker_needs_room))
            eventfd_write(local->fds[1], 1);
        out += count;
        size_bytes -= (uint32_t)count;
    }
    return true;
}

/* Like client_receive: 1, or 0 at the end. */
static int local_receive(struct local *local)
{
    uint8_t length[4];
    struct client *client = &local->client;
    if (!local_take(local, length, 4))
        return 0;
    client->reply_bytes = (uint32_t)length[0] << 24 | (uint32_t)length[1] << 16 | (uint32_t)length[2] << 8 | length[3];
    CHECK_OR(client->reply_bytes < 64u << 20, abort());
    free(client->reply);
    client->reply = malloc(client->reply_bytes ? client->reply_bytes : 1);
    client->at = 0;
    client->broken = false;
    return local_take(local, client->reply, client->reply_bytes);
}

__attribute__((unused)) static struct produced local_produce(struct local *local, int acks, const struct part *parts,
                                                             uint32_t count)
{
    struct frame frame = {0};
    struct produced out = {.correlation_id = -1};
    put_produce(&frame, 77, acks, LIMIT_MS, parts, count);
    CHECK_OR(local_send(local, &frame), goto done);
    CHECK_OR(local_receive(local) == 1, goto done);
    out = take_produced(&local->client);
done:
    frame_free(&frame);
    return out;
}

__attribute__((unused)) static void local_fetch(struct local *local, struct fetch fetch,
                                                const struct fetch_position *requested, uint32_t count,
                                                struct fetched *out)
{
    struct frame frame = {0};
    put_fetch(&frame, fetch, requested, count);
    memset(out, 0, offsetof(struct fetched, batches));
    out->correlation_id = -1;
    bool sent = local_send(local, &frame);
    frame_free(&frame);
    CHECK(sent);
    CHECK_EQUAL(local_receive(local), 1);
    take_fetched(&local->client, out);
}

/* ---- queries ---- */

__attribute__((unused)) static bool local_query(struct local *local, int32_t partition, int64_t offset, uint32_t number)
{
    struct mqd_local_query query = {
        .kind = MQD_LOCAL_QUERY_SEGMENT, .number = number, .partition_index = partition, .offset = offset};
    memcpy(query.topic_id, local->b->topic_id, 16);
    return send(local->client.fd, &query, sizeof query, MSG_NOSIGNAL) == sizeof query;
}

/* False at the end of the attachment. *fd: the descriptor that came with it, -1 = none. */
__attribute__((unused)) static bool local_answer(struct local *local, struct mqd_local_segment *out, int *fd)
{
    uint32_t fd_count;
    ssize_t n = local_receive_packet(local->client.fd, out, sizeof *out, fd, 1, &fd_count);
    if (n == 0)
        return false;
    CHECK_OR(n == sizeof *out, abort());
    if (fd_count == 0)
        *fd = -1;
    CHECK_OR((out->error == 0) == (fd_count == 1), abort());
    return true;
}

#endif
