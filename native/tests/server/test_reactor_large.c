/* Requests of more than half of the receive arena: they have separate memory with one bound,
 * wait for it in order, and keep it no longer than others can wait (server/large.c). */
#include "mqd_counter_test.h"

#include "mqd_tls_test.h"

enum {
    LARGE_BYTES = 8 << 20, /* room for two requests of BODY_BYTES */
    BODY_BYTES = 3 << 20,  /* half of the arena is 2 MiB */
    DEADLINE_MS = 1500
};

static int sparse_fds[ENDPOINTS];

static void large_memory(struct bench *b)
{
    b->mapped_bytes = ARENA_BYTES + LARGE_BYTES;
    b->log_options.max_message_bytes = 16 << 20;
    b->log_options.segment_bytes = 64 << 20;
    for (uint32_t i = 0; i < ENDPOINTS; i++) {
        free(b->arenas[i]);
        sparse_fds[i] = memfd_create("arena", MFD_CLOEXEC);
        CHECK(ftruncate(sparse_fds[i], (off_t)b->mapped_bytes) == 0);
        b->arenas[i] = mmap(NULL, b->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, sparse_fds[i], 0);
        CHECK_OR(b->arenas[i] != MAP_FAILED, abort());
    }
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        for (uint32_t i = 0; i < ENDPOINTS; i++) {
            b->options[worker].arenas[i] = b->arenas[i];
            b->options[worker].arena_bytes[i] = b->mapped_bytes;
        }
        b->options[worker].large_bytes = LARGE_BYTES;
        b->options[worker].large_ms_max = DEADLINE_MS;
        b->options[worker].request_bytes_max = LARGE_BYTES - 4;
    }
}

static void large_memory_of_small_batches(struct bench *b)
{
    large_memory(b);
    b->log_options.max_message_bytes = 1 << 20;
}

/* As if /dev/shm were full: pages beyond the file's end cannot be allocated. */
static void no_memory(struct bench *b)
{
    large_memory(b);
    CHECK(ftruncate(sparse_fds[0], ARENA_BYTES + 65536) == 0);
}

/* There is memory for the first part of a request at the end of the mapping, where the first one is. */
static void no_memory_for_tls(struct bench *b)
{
    large_memory(b);
    CHECK(ftruncate(sparse_fds[0], (off_t)b->mapped_bytes - (2 << 20)) == 0);
    b->options[0].listener_flags[1] = MQD_LISTENER_FLAG_TLS;
}

static void large_memory_for_tls(struct bench *b)
{
    large_memory(b);
    b->options[0].listener_flags[1] = MQD_LISTENER_FLAG_TLS;
}

static void large_stop(struct bench *b)
{
    bench_stop(b);
    for (uint32_t i = 0; i < ENDPOINTS; i++)
        close(sparse_fds[i]);
}

static uint64_t pages_held(uint32_t worker)
{
    struct stat status;
    if (fstat(sparse_fds[worker], &status) < 0)
        abort();
    return (uint64_t)status.st_blocks * 512;
}

static struct part large_part(int32_t partition, uint64_t mark)
{
    return (struct part){partition, {.mark = mark, .record_count = 1, .body_bytes = BODY_BYTES}};
}

static struct part small_part(int32_t partition, uint64_t mark)
{
    return (struct part){partition, {.mark = mark, .record_count = 1}};
}

static void served(struct client *client, int32_t body_bytes)
{
    struct part part = {0, {.mark = 9, .record_count = 1, .body_bytes = body_bytes}};
    struct produced out = client_produce(client, -1, &part, 1);
    CHECK_EQUAL(out.count, 1);
    CHECK_EQUAL(out.error[0], 0);
}

/* The first `sent` bytes of a Produce of BODY_BYTES; `received` of them have been read. */
static struct client stalled(struct bench *b, uint32_t sent, uint32_t received)
{
    struct client client = client_open(b, 0);
    struct frame frame = {0};
    struct part part = large_part(0, 5);
    put_produce(&frame, 5, -1, LIMIT_MS, &part, 1);
    frame.size_bytes = sent;
    uint64_t in = counted(b, MQD_COUNT_BYTES_IN);
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    CHECK_OR(client_send(&client, &frame), abort());
    while (counted(b, MQD_COUNT_BYTES_IN) < in + received && test_now_ns() < end_ns)
        usleep(1000);
    frame_free(&frame);
    return client;
}

static bool open_still(struct client *client)
{
    uint8_t byte;
    return recv(client->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && errno == EAGAIN;
}

BOTH(a_large_request_is_written_and_its_memory_released)
{
    struct bench *b = bench_start(backend, large_memory);
    struct client client = client_open(b, 0);
    static struct fetched fetched;
    for (int32_t partition = 0; partition < 2; partition++) { /* its own, and worker 1's */
        for (uint64_t round = 0; round < 3; round++) {
            struct part parts[2] = {large_part(partition, round + 1), small_part(2, round)};
            struct produced out = client_produce(&client, -1, parts, 2);
            CHECK_EQUAL(out.count, 2);
            CHECK_EQUAL(out.error[0], 0);
            CHECK_EQUAL(out.base_offset[0], (int64_t)round);
            CHECK_EQUAL(out.error[1], 0);
        }
        struct fetch_position requested = {partition, 2};
        client_fetch(&client, (struct fetch){.bytes_min = 1, .bytes_max = 8 << 20, .session_epoch = -1}, &requested, 1,
                     &fetched);
        CHECK_EQUAL(fetched.batch_count, 1);
        CHECK_EQUAL(fetched.batches[0].mark, 3);
    }
    CHECK(pages_held(0) <= ARENA_BYTES);
    CHECK_EQUAL(counted(b, MQD_COUNT_LARGE_STALLS), 0);
    client_close(&client);
    large_stop(b);
}

BOTH(a_record_that_is_too_large_is_refused_on_an_open_connection)
{
    struct bench *b = bench_start(backend, large_memory_of_small_batches);
    struct client client = client_open(b, 0);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct part part = large_part(partition, 1);
        struct produced out = client_produce(&client, -1, &part, 1);
        CHECK_EQUAL(out.count, 1);
        CHECK_EQUAL(out.error[0], 10); /* MESSAGE_TOO_LARGE */
        served(&client, 0);
    }
    CHECK(pages_held(0) <= ARENA_BYTES);
    client_close(&client);
    large_stop(b);
}

BOTH(a_frame_above_the_maximum_is_not_received)
{
    struct bench *b = bench_start(backend, large_memory);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    const uint32_t length = LARGE_BYTES - 3;
    uint8_t bytes[4] = {(uint8_t)(length >> 24), (uint8_t)(length >> 16), (uint8_t)(length >> 8), (uint8_t)length};
    CHECK_EQUAL(send(client.fd, bytes, 4, MSG_NOSIGNAL), 4);
    CHECK_EQUAL(client_receive(&client), 0);
    served(&other, 0);
    client_close(&client);
    client_close(&other);
    large_stop(b);
}

/* Two use the memory and send no more. A third waits, unread; smaller requests pass. */
BOTH(a_stalled_client_is_closed_and_a_waiting_one_served)
{
    struct bench *b = bench_start(backend, large_memory);
    struct client slow[2] = {stalled(b, 1 << 20, 1 << 19), stalled(b, 1 << 20, 1 << 19)}, third = client_open(b, 0),
                  other = client_open(b, 0);
    struct frame frame = {0};
    struct part part = large_part(0, 7);
    put_produce(&frame, 7, -1, LIMIT_MS, &part, 1);
    fcntl(third.fd, F_SETFL, O_NONBLOCK);
    uint32_t sent = 0;
    for (int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
         test_now_ns() < end_ns && !counted(b, MQD_COUNT_LARGE_STALLS);) {
        ssize_t n = send(third.fd, frame.bytes + sent, frame.size_bytes - sent, MSG_NOSIGNAL);
        sent += n > 0 ? (uint32_t)n : 0;
        usleep(1000);
    }
    CHECK_EQUAL(counted(b, MQD_COUNT_LARGE_STALLS), 1);
    CHECK(pages_held(0) < ARENA_BYTES + LARGE_BYTES / 2); /* the received bytes, not the declared size */
    served(&other, 0);
    served(&other, 1 << 20); /* a run of the arena */
    CHECK(open_still(&slow[0]) && open_still(&slow[1]) && open_still(&third));
    fcntl(third.fd, F_SETFL, 0);
    struct frame rest = {frame.bytes + sent, frame.size_bytes - sent, 0};
    CHECK(client_send(&third, &rest));
    CHECK_EQUAL(client_receive(&third), 1);
    CHECK_EQUAL(take_produced(&third).error[0], 0);
    CHECK(!open_still(&slow[0]) || !open_still(&slow[1]));
    for (int i = 0; i < 2; i++) { /* the deadline also holds for those with no other request behind them */
        CHECK_EQUAL(client_receive(&slow[i]), 0);
        client_close(&slow[i]);
    }
    CHECK(pages_held(0) <= ARENA_BYTES);
    frame_free(&frame);
    client_close(&third);
    client_close(&other);
    large_stop(b);
}

/* Sending a byte now and then must not keep the memory from others. */
BOTH(a_trickling_client_is_closed_when_others_wait)
{
    struct bench *b = bench_start(backend, large_memory);
    struct client slow[2] = {stalled(b, 1 << 20, 1 << 19), stalled(b, 1 << 20, 1 << 19)},
                  third = stalled(b, 200000, 10000);
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    while (open_still(&slow[0]) && open_still(&slow[1]) && test_now_ns() < end_ns) {
        for (int i = 0; i < 2; i++)
            send(slow[i].fd, "x", 1, MSG_NOSIGNAL);
        usleep(20000);
    }
    CHECK(test_now_ns() < end_ns);
    CHECK(counted(b, MQD_COUNT_LARGE_STALLS) >= 1);
    for (int i = 0; i < 2; i++)
        client_close(&slow[i]);
    client_close(&third);
    struct client other = client_open(b, 0);
    served(&other, BODY_BYTES);
    client_close(&other);
    large_stop(b);
}

/* A client that disconnects while it waits, or holds memory, delays no other. */
BOTH(a_closed_connection_holds_no_memory)
{
    struct bench *b = bench_start(backend, large_memory);
    struct client other = client_open(b, 0);
    for (int round = 0; round < 4; round++) {
        struct client slow[2] = {stalled(b, 1 << 20, 1 << 19), stalled(b, 1 << 20, 1 << 19)},
                      third = stalled(b, 200000, 10000);
        client_close(round % 2 ? &third : &slow[0]);
        client_close(&slow[1]);
        served(&other, BODY_BYTES);
        client_close(round % 2 ? &slow[0] : &third);
    }
    served(&other, BODY_BYTES);
    CHECK(pages_held(0) <= ARENA_BYTES);
    client_close(&other);
    large_stop(b);
}

BOTH(without_shared_memory_the_connection_ends_and_the_worker_lives)
{
    struct bench *b = bench_start(backend, no_memory);
    struct client client = client_open(b, 0), other = client_open(b, 0);
    struct frame frame = {0};
    struct part part = large_part(0, 1);
    put_produce(&frame, 1, -1, LIMIT_MS, &part, 1);
    client_send(&client, &frame); /* may be refused half-way */
    CHECK_EQUAL(client_receive(&client), 0);
    served(&other, 0);
    served(&other, 1 << 20);
    frame_free(&frame);
    client_close(&client);
    client_close(&other);
    large_stop(b);
}

/* A large Produce over TLS; whether the broker has taken all of it. */
static bool send_secured(struct bench *b, struct tls_client *client)
{
    struct tls_identity broker = tls_identity("localhost");
    CHECK_OR(mqd_reactor_set_listener_tls(b->reactors[0], ++b->token, 1, tls_context(&broker)) == 0, abort());
    CHECK_OR(bench_done(b, 0, b->token).error == 0, abort());
    tls_identity_free(&broker);
    *client = tls_client(client_open_by(b, 0, 1, -1).fd, 0);
    CHECK_OR(tls_client_connect(client), abort());
    struct frame frame = {0};
    struct part part = large_part(0, 1);
    put_produce(&frame, 1, -1, LIMIT_MS, &part, 1);
    int n = openssl.SSL_write(client->ssl, frame.bytes, (int)frame.size_bytes);
    openssl.ERR_clear_error();
    bool all = n == (int)frame.size_bytes;
    frame_free(&frame);
    return all;
}

BOTH(a_large_request_over_tls_is_written)
{
    if (!tls_works())
        return;
    struct bench *b = bench_start(backend, large_memory_for_tls);
    struct tls_client client;
    CHECK(send_secured(b, &client));
    uint8_t reply[64];
    CHECK(openssl.SSL_read(client.ssl, reply, sizeof reply) > 12);
    CHECK_EQUAL(mqd_partition_log_end_offset(b->partitions[0]), 1);
    close(client.fd);
    tls_client_free(&client);
    large_stop(b);
}

/* Decrypted data is stored by the process, not by a system call: a page that cannot be allocated
 * must not raise SIGBUS. */
BOTH(without_shared_memory_a_connection_with_tls_ends_too)
{
    if (!tls_works())
        return;
    struct bench *b = bench_start(backend, no_memory_for_tls);
    struct client other = client_open(b, 0);
    struct tls_client client;
    send_secured(b, &client); /* may be refused half-way */
    uint8_t byte;
    CHECK(openssl.SSL_read(client.ssl, &byte, 1) <= 0);
    openssl.ERR_clear_error();
    served(&other, 0);
    close(client.fd);
    tls_client_free(&client);
    client_close(&other);
    large_stop(b);
}
