/* For test_client*.c and the benchmark: a worker's end of one attachment, driven by the test. It
 * implements shm/local_layout.h, checks submissions like a broker, and sends the responses that the
 * test chooses, so that rare states of a real worker can be produced.
 *
 *   struct fake fake;
 *   fake_open(&fake, "name")           listens; its control segment has one worker, which does not
 *                                      sleep
 *   struct mqd_client *client = fake_attach(&fake, &options)
 *                                      mqd_client_open against it
 *   fake_next(&fake)                   the next request, copied: fake.frame, fake.frame_bytes,
 *                                      fake.request, fake.batch; false = none
 *   fake_answer(&fake, error, base_offset)
 *                                      the Produce response to it, into the reply ring
 *   fake_die(&fake)                    the socket ends; fake_attach attaches again
 */
#ifndef MQD_CLIENT_TEST_H
#define MQD_CLIENT_TEST_H

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/big_endian.h"
#include "client/client.h"
#include "shm/layout.h"
#include "shm/local_layout.h"
#include "wire/wire.h"

#define FAKE_FRAME_BYTES (4u << 20)

struct fake {
    char path[64];
    int listener, socket, memory_fd, to_worker, to_client, client_end, control_fd;
    void *control;
    struct mqd_local_hello hello;
    /* contents of the welcome; changed by tests before fake_attach */
    struct mqd_local_welcome welcome;
    uint64_t abi_hash;
    uint32_t fd_count;
    bool mute;           /* accepts the hello and does not respond */
    uint64_t data_bytes; /* 0 = as requested */
    uint32_t request_bytes_max;
    /* the attachment */
    struct mqd_local_header *header;
    uint64_t total_bytes;
    uint64_t head, reply_tail;
    /* the request last taken */
    uint8_t *frame;
    uint32_t frame_bytes;
    struct mqd_request_header request;
    struct mqd_produce_request produce;
    struct mqd_produce_partition partition;
    char topic[256];
    struct mqd_batch batch;
    struct mqd_buffer reply;
    pthread_t thread;
};

static int fake_memfd(const char *name, uint64_t size_bytes, void **memory)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK_OR(fd >= 0 && ftruncate(fd, (off_t)size_bytes) == 0 &&
                 fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0,
             abort());
    *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK_OR(*memory != MAP_FAILED, abort());
    return fd;
}

static void fake_open(struct fake *fake, const char *name)
{
    memset(fake, 0, sizeof *fake);
    fake->socket = fake->memory_fd = -1;
    fake->abi_hash = mqd_local_abi_hash();
    fake->fd_count = MQD_LOCAL_FD_COUNT;
    fake->request_bytes_max = 100 << 20;
    fake->frame = malloc(FAKE_FRAME_BYTES);
    snprintf(fake->path, sizeof fake->path, "/tmp/mqd-%s-%d.sock", name, (int)getpid());
    unlink(fake->path);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", fake->path);
    fake->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK_OR(bind(fake->listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(fake->listener, 4) == 0,
             abort());
    uint8_t boot_id[16] = {1};
    fake->control_fd = fake_memfd("control", mqd_control_size_bytes(), &fake->control);
    CHECK_OR(mqd_control_format(fake->control, mqd_control_size_bytes(), 1, boot_id, 1, 0) == 0, abort());
    mqd_endpoint_set_state(fake->control, 0, MQD_PROCESS_RUNNING, getpid());
}

static void fake_make_memory(struct fake *fake)
{
    uint64_t data_bytes = fake->data_bytes ? fake->data_bytes : fake->hello.data_bytes;
    uint64_t submissions = sizeof(struct mqd_local_header),
             replies = submissions + (uint64_t)fake->hello.submission_count * sizeof(struct mqd_local_submission);
    uint64_t data = (replies + fake->hello.reply_bytes + 4095) / 4096 * 4096;
    void *memory;
    fake->total_bytes = data + data_bytes;
    fake->memory_fd = fake_memfd("local", fake->total_bytes, &memory);
    struct mqd_local_header *header = fake->header = memory;
    *header = (struct mqd_local_header){.magic = MQD_LOCAL_MAGIC,
                                        .layout_version = MQD_LOCAL_LAYOUT_VERSION,
                                        .abi_hash = fake->abi_hash,
                                        .total_bytes = fake->total_bytes,
                                        .submissions_offset = submissions,
                                        .replies_offset = replies,
                                        .data_offset = data,
                                        .data_bytes = data_bytes,
                                        .submission_count = fake->hello.submission_count,
                                        .reply_bytes = fake->hello.reply_bytes,
                                        .request_bytes_max = fake->request_bytes_max};
    fake->head = fake->reply_tail = 0;
    int ends[2];
    CHECK_OR(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, abort());
    fake->client_end = ends[0];
    fake->to_client = ends[1];
    fake->to_worker = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

/* The broker's half of attaching, in a thread, because mqd_client_open waits for it. */
static void *fake_accept(void *argument)
{
    struct fake *fake = argument;
    fake->socket = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK_OR(fake->socket >= 0 &&
                 recv(fake->socket, &fake->hello, sizeof fake->hello, 0) == (ssize_t)sizeof fake->hello,
             return NULL);
    if (fake->mute)
        return NULL;
    struct mqd_local_welcome welcome = fake->welcome;
    if (!welcome.magic)
        welcome.magic = MQD_LOCAL_MAGIC;
    if (!welcome.error)
        fake_make_memory(fake);
    if (!welcome.total_bytes)
        welcome.total_bytes = fake->total_bytes;
    int fds[MQD_LOCAL_FD_COUNT] = {fake->memory_fd, fake->to_worker, fake->client_end, fake->control_fd};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof fds)];
    } control = {0};
    struct iovec part = {&welcome, sizeof welcome};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (!welcome.error && fake->fd_count) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fake->fd_count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fake->fd_count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * fake->fd_count);
    }
    CHECK_OR(sendmsg(fake->socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof welcome, return NULL);
    if (!welcome.error)
        close(fake->client_end);
    return NULL;
}

__attribute__((unused)) static struct mqd_client *fake_attach(struct fake *fake, struct mqd_client_options *options)
{
    options->socket_path = fake->path;
    CHECK_OR(pthread_create(&fake->thread, NULL, fake_accept, fake) == 0, abort());
    struct mqd_client *client = mqd_client_open(options);
    pthread_join(fake->thread, NULL);
    return client;
}

static void fake_forget(struct fake *fake)
{
    if (fake->header) {
        munmap(fake->header, fake->total_bytes);
        close(fake->memory_fd);
        close(fake->to_worker);
        close(fake->to_client);
    }
    if (fake->socket >= 0)
        close(fake->socket);
    fake->header = NULL;
    fake->socket = fake->memory_fd = -1;
}

/* Like the end of a killed worker: its memory and descriptors are closed, without a message. */
__attribute__((unused)) static void fake_die(struct fake *fake)
{
    fake_forget(fake);
}

static void fake_close(struct fake *fake)
{
    fake_forget(fake);
    close(fake->listener);
    unlink(fake->path);
    munmap(fake->control, mqd_control_size_bytes());
    close(fake->control_fd);
    free(fake->frame);
    mqd_buffer_free(&fake->reply);
}

static void fake_wake(struct fake *fake, bool moved_head_only)
{
    mqd_fence_full();
    uint32_t sleeping = mqd_load_relaxed(&fake->header->client_sleeping);
    if ((moved_head_only ? sleeping == MQD_LOCAL_SLEEP_ROOM : sleeping != 0) &&
        mqd_exchange(&fake->header->client_sleeping, 0u)) {
        uint64_t one = 1;
        CHECK(write(fake->to_client, &one, sizeof one) == (ssize_t)sizeof one);
    }
}

/* Parses a Produce frame of one topic and one partition, with a batch that a broker would
 * accept. */
static void fake_parse_produce(struct fake *fake)
{
    struct mqd_produce_topic topic;
    const char *reason = NULL;
    CHECK(mqd_produce_parse(fake->frame + fake->request.header_bytes, fake->frame_bytes - fake->request.header_bytes,
                            fake->request.api_version, &fake->produce) == 0);
    CHECK_EQUAL(fake->produce.topic_count, 1);
    CHECK(mqd_produce_next_topic(&fake->produce, &topic) == 0);
    CHECK_EQUAL(topic.partition_count, 1);
    snprintf(fake->topic, sizeof fake->topic, "%.*s", topic.key.name.size_bytes, (const char *)topic.key.name.bytes);
    CHECK(mqd_produce_next_partition(&fake->produce, &fake->partition) == 0);
    int16_t error =
        mqd_batch_validate(fake->partition.records, (uint64_t)fake->partition.size_bytes, &fake->batch, &reason);
    CHECK_OR(error == 0, TEST_FAIL("batch refused with %d: %s", error, reason));
}

/* The next request, without moving submission_head: fake_pass does. */
static bool fake_peek(struct fake *fake)
{
    uint64_t tail = mqd_load_acquire(&fake->header->submission_tail);
    if (tail == fake->head)
        return false;
    CHECK_OR(tail - fake->head <= fake->header->submission_count, return false);
    const struct mqd_local_submission *submission =
        (const struct mqd_local_submission *)((uint8_t *)fake->header + fake->header->submissions_offset) +
        (fake->head & (fake->header->submission_count - 1));
    CHECK_OR(submission->reserved == 0 && submission->offset <= fake->header->data_bytes &&
                 submission->size_bytes <= fake->header->data_bytes - submission->offset,
             return false);
    CHECK_OR(submission->size_bytes <= FAKE_FRAME_BYTES, return false);
    fake->frame_bytes = submission->size_bytes;
    memcpy(fake->frame, (uint8_t *)fake->header + fake->header->data_offset + submission->offset,
           submission->size_bytes);
    return true;
}

static void fake_pass(struct fake *fake)
{
    mqd_store_release(&fake->header->submission_head, ++fake->head);
    fake_wake(fake, true);
}

__attribute__((unused)) static bool fake_next(struct fake *fake)
{
    bool known;
    if (!fake_peek(fake))
        return false;
    fake_pass(fake);
    CHECK_OR(mqd_request_header_parse(fake->frame, fake->frame_bytes, &fake->request, &known) == 0 && known,
             return false);
    if (fake->request.api_key == 0)
        fake_parse_produce(fake);
    return true;
}

/* Writes as much as the ring has room for; returns the number of bytes written. */
static uint32_t fake_put(struct fake *fake, const uint8_t *bytes, uint32_t size_bytes)
{
    uint64_t head = mqd_load_acquire(&fake->header->reply_head);
    uint32_t room = fake->header->reply_bytes - (uint32_t)(fake->reply_tail - head),
             count = size_bytes < room ? size_bytes : room;
    uint8_t *ring = (uint8_t *)fake->header + fake->header->replies_offset;
    for (uint32_t done = 0; done < count;) {
        uint32_t at = (uint32_t)(fake->reply_tail + done) & (fake->header->reply_bytes - 1),
                 piece = fake->header->reply_bytes - at;
        piece = piece < count - done ? piece : count - done;
        memcpy(ring + at, bytes + done, piece);
        done += piece;
    }
    fake->reply_tail += count;
    mqd_store_release(&fake->header->reply_tail, fake->reply_tail);
    if (count)
        fake_wake(fake, false);
    return count;
}

static void fake_answer_to(struct fake *fake, int32_t correlation_id, int16_t version, const char *topic,
                           int32_t partition, int16_t error, int64_t base_offset)
{
    struct mqd_topic_key key = {.name = {(const uint8_t *)topic, (int32_t)strlen(topic)}};
    static const int32_t wrong[] = {0, 2};
    struct mqd_produce_outcome outcome = {.partition_index = partition,
                                          .error = error,
                                          .base_offset = error ? -1 : base_offset,
                                          .log_append_time_ms = -1,
                                          .message = error ? "no" : NULL,
                                          .record_errors = wrong,
                                          .record_error_count = error ? 2 : 0,
                                          .record_message = "this one"};
    fake->reply.size_bytes = 0;
    mqd_response_begin(&fake->reply, 0, version, correlation_id);
    mqd_produce_response_topics(&fake->reply, version, 1);
    mqd_produce_response_topic(&fake->reply, version, &key, 1);
    mqd_produce_response_partition(&fake->reply, version, &outcome);
    mqd_produce_response_topic_end(&fake->reply, version);
    mqd_produce_response_end(&fake->reply, version, 0);
    mqd_response_finish(&fake->reply, 0);
    for (uint32_t done = 0; done < fake->reply.size_bytes;)
        done += fake_put(fake, fake->reply.bytes + done, fake->reply.size_bytes - done);
}

__attribute__((unused)) static void fake_answer(struct fake *fake, int16_t error, int64_t base_offset)
{
    fake_answer_to(fake, fake->request.correlation_id, fake->request.api_version, fake->topic,
                   fake->partition.partition_index, error, base_offset);
}

#endif
