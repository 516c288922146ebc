/* tsan: long */
/* queued.max.request.bytes is shared by all clients of a worker: a client that sends incomplete
 * requests gets no more than its share. */
#include "mqd_counter_test.h"

/* incomplete requests of 32764 bytes each: more than there is */
enum { HEAP_BYTES = 8 << 20, COUNT = 320, CRUMB_COUNT = 20, HALF_BYTES_MAX = 32000 };

static void set_heap(struct bench *b, uint64_t bytes)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        b->options[worker].heap_bytes_max = bytes;
}

static void small_heap(struct bench *b)
{
    set_heap(b, HEAP_BYTES);
}

static void close_all(struct client *clients, int count)
{
    for (int i = 0; i < count; i++)
        client_close(&clients[i]);
}

static void others_are_served(struct bench *b, struct client *other)
{
    struct part part = {0, {.mark = 1, .record_count = 1}};
    struct client fresh = client_open(b, 0);
    for (int i = 0; i < 2; i++) {
        struct produced out = client_produce(i ? &fresh : other, -1, &part, 1);
        CHECK_EQUAL(out.count, 1);
        CHECK_EQUAL(out.error[0], 0);
    }
    client_close(&fresh);
}

/* Waits until what was sent is read, or the connection is closed. */
static void send_half(struct bench *b, struct client *client, const void *bytes, uint32_t size_bytes)
{
    uint64_t bytes_in = counted(b, MQD_COUNT_BYTES_IN) + size_bytes;
    struct pollfd wait = {client->fd, POLLIN, 0};
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    CHECK_EQUAL(send(client->fd, bytes, size_bytes, MSG_NOSIGNAL), size_bytes);
    while (counted(b, MQD_COUNT_BYTES_IN) < bytes_in && poll(&wait, 1, 0) == 0 && test_now_ns() < end_ns)
        usleep(100);
}

/* The last `crumb_count` send only half a length word: they take the rest. */
static void send_halves(struct bench *b, struct client *halves, int count, int crumb_count, uint32_t size_bytes)
{
    static const uint8_t bytes[HALF_BYTES_MAX] = {0, 0, 0x7f, 0xf8};
    for (int i = 0; i < count; i++) {
        halves[i] = client_open(b, 0);
        send_half(b, &halves[i], bytes, i < count - crumb_count ? size_bytes : 2);
    }
}

BOTH(a_length_prefix_alone_allocates_nothing)
{
    struct bench *b = bench_start(backend, small_heap);
    struct client other = client_open(b, 0), halves[COUNT];
    send_halves(b, halves, COUNT, CRUMB_COUNT, 4);
    others_are_served(b, &other);
    struct frame rest = {0}; /* in pieces that grow: the last ones are in larger memory than the first */
    struct part part = {0, {.mark = 2, .body_bytes = 30000}};
    put_produce(&rest, 5, -1, LIMIT_MS, &part, 1);
    uint64_t bytes_in = counted(b, MQD_COUNT_BYTES_IN);
    for (uint32_t sent = 0, piece = 3; sent < rest.size_bytes; sent += piece, piece += piece / 2) {
        piece = piece < rest.size_bytes - sent ? piece : rest.size_bytes - sent;
        CHECK_EQUAL(send(other.fd, rest.bytes + sent, piece, MSG_NOSIGNAL), piece);
        wait_for_count(b, MQD_COUNT_BYTES_IN, bytes_in + sent + piece);
    }
    CHECK_EQUAL(client_receive(&other), 1);
    CHECK_EQUAL(take_produced(&other).error[0], 0);
    frame_free(&rest);
    close_all(halves, COUNT);
    client_close(&other);
    bench_stop(b);
}

BOTH(partial_frames_are_evicted_for_complete_ones)
{
    struct bench *b = bench_start(backend, small_heap);
    struct client other = client_open(b, 0), halves[COUNT];
    send_halves(b, halves, COUNT, CRUMB_COUNT, HALF_BYTES_MAX);
    others_are_served(b, &other);
    CHECK(counted(b, MQD_COUNT_PROTOCOL_ERRORS) > 0 &&
          mqd_worker_connection_count(b->control, 0) > HEAP_BYTES / 2 / 32768);
    close_all(halves, COUNT);
    CHECK(connections_left(b, 1));
    others_are_served(b, &other);
    client_close(&other);
    bench_stop(b);
}

/* It disconnected while the heap was nearly used up, and waits for a response of the acceptor:
 * this is detected when there is space again. */
BOTH(a_disconnect_without_room_is_noticed_later)
{
    struct bench *b = bench_start(backend, small_heap);
    /* all memory for incomplete requests, and no more */
    enum {
        SHARE_BYTES = HEAP_BYTES / 4 * 3,
        TAKEN_BYTES = 32764,
        HALF_COUNT = SHARE_BYTES / TAKEN_BYTES,
        REST_COUNT = SHARE_BYTES % TAKEN_BYTES / 64
    };
    struct client requests = client_open(b, 0), halves[HALF_COUNT + REST_COUNT];
    struct frame frame = {0};
    frame_end(&frame, frame_begin(&frame, 10, 1, 5)); /* FindCoordinator */
    CHECK(client_send(&requests, &frame));
    bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    send_halves(b, halves, HALF_COUNT + REST_COUNT, REST_COUNT, HALF_BYTES_MAX);
    uint64_t bytes_in = counted(b, MQD_COUNT_BYTES_IN);
    CHECK(client_send(&requests, &frame));
    client_close(&requests);
    usleep(20000); /* not read, as far as that can be seen */
    CHECK_EQUAL(counted(b, MQD_COUNT_BYTES_IN), bytes_in);
    close_all(halves, HALF_COUNT + REST_COUNT);
    CHECK(connections_left(b, 0));
    frame_free(&frame);
    bench_stop(b);
}

/* Like most requests from remote clients: the rest follows when the first piece has been
 * read. */
static void produce_in_two_pieces(struct bench *b)
{
    struct client client = client_open(b, 0);
    struct frame frame = {0};
    struct part part = {0, {.mark = 2, .body_bytes = 30000}};
    put_produce(&frame, 5, -1, LIMIT_MS, &part, 1);
    uint32_t first_bytes = frame.size_bytes - 1000;
    send_half(b, &client, frame.bytes, first_bytes);
    CHECK_EQUAL(send(client.fd, frame.bytes + first_bytes, frame.size_bytes - first_bytes, MSG_NOSIGNAL),
                frame.size_bytes - first_bytes);
    CHECK_EQUAL(client_receive(&client), 1);
    CHECK_EQUAL(take_produced(&client).error[0], 0);
    frame_free(&frame);
    client_close(&client);
}

/* Partial requests whose rest does not arrive are evicted. */
BOTH(a_request_in_two_pieces_has_room_beside_partial_requests)
{
    struct bench *b = bench_start(backend, small_heap);
    struct client halves[COUNT];
    send_halves(b, halves, COUNT, CRUMB_COUNT, HALF_BYTES_MAX);
    usleep(500000); /* from now on they are idle */
    produce_in_two_pieces(b);
    CHECK(mqd_worker_connection_count(b->control, 0) >
          HEAP_BYTES / 2 / 32768); /* no more of them were closed than necessary */
    close_all(halves, COUNT);
    bench_stop(b);
}

/* Sends a long poll and half a request after it. False: not read, since there is no space for
 * it. */
static bool send_poll_and_half(struct bench *b, struct client *client, uint32_t half_bytes)
{
    static const uint8_t rest[HALF_BYTES_MAX];
    struct frame frame = {0};
    struct fetch_position requested = {0, 0};
    put_fetch(
        &frame,
        (struct fetch){
            .correlation_id = 1, .wait_ms = 10 * LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
        &requested, 1);
    uint8_t length[4] = {0, 0, (uint8_t)((half_bytes + 4) >> 8), (uint8_t)(half_bytes + 4)};
    put_bytes(&frame, length, 4);
    put_bytes(&frame, rest, half_bytes);
    uint64_t bytes_in = counted(b, MQD_COUNT_BYTES_IN) + frame.size_bytes;
    CHECK_OR(client_send(client, &frame), return false);
    frame_free(&frame);
    for (int ms = 0; ms < 300 && counted(b, MQD_COUNT_BYTES_IN) < bytes_in; ms++)
        usleep(1000);
    return counted(b, MQD_COUNT_BYTES_IN) >= bytes_in;
}

/* No connection with a pending request is read while the heap is nearly used up, but no more data
 * of these connections has arrived either. */
BOTH(partial_requests_after_a_long_poll_make_room_too)
{
    struct bench *b = bench_start(backend, small_heap);
    struct client halves[COUNT];
    int count = 0;
    for (uint32_t bytes = HALF_BYTES_MAX; bytes > 500; bytes /= 4) {
        do
            halves[count] = client_open(b, 0);
        while (send_poll_and_half(b, &halves[count++], bytes) && count < COUNT - 4);
    }
    usleep(500000); /* from now on they are idle */
    produce_in_two_pieces(b);
    close_all(halves, count);
    bench_stop(b);
}

static int open_count(struct client *clients, int count)
{
    int found = 0;
    for (int i = 0; i < count; i++) {
        char byte;
        found += recv(clients[i].fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
    }
    return found;
}

static void heap_of_2_mb(struct bench *b)
{
    set_heap(b, 2 << 20);
}

/* A half-received large request is moved out of the arena and exceeds the bound of partial
 * requests: it alone is evicted. */
BOTH(a_large_partial_request_without_room_closes_no_other)
{
    enum { SLOW_COUNT = 20, LARGE_BYTES = 2 << 20, SENT_BYTES = LARGE_BYTES - 100000 };
    struct bench *b = bench_start(backend, heap_of_2_mb);
    struct client slow[SLOW_COUNT], large = client_open(b, 0), second = client_open(b, 0);
    static uint8_t bytes[LARGE_BYTES] = {0, 0, 0x7f, 0xf8};
    for (int i = 0; i < SLOW_COUNT; i++) {
        slow[i] = client_open(b, 0);
        send_half(b, &slow[i], bytes, 8000);
    }
    const uint32_t total = LARGE_BYTES - 8;
    bytes[0] = (uint8_t)(total >> 24), bytes[1] = (uint8_t)(total >> 16), bytes[2] = (uint8_t)(total >> 8),
    bytes[3] = (uint8_t)total;
    for (uint32_t sent = 0; sent < SENT_BYTES;) {
        ssize_t n = send(large.fd, bytes + sent, SENT_BYTES - sent, MSG_NOSIGNAL);
        CHECK_OR(n > 0, break);
        sent += (uint32_t)n;
    }
    usleep(500000); /* all of them are quiet */
    CHECK_EQUAL(open_count(&large, 1), 1);
    for (uint32_t sent = 0; sent < 90000; sent += 30000) /* needs a run as long */
        CHECK_EQUAL(send(second.fd, bytes, 30000, MSG_NOSIGNAL), 30000);
    struct pollfd gone = {large.fd, POLLIN, 0};
    CHECK_EQUAL(poll(&gone, 1, LIMIT_MS), 1);
    CHECK_EQUAL(open_count(slow, SLOW_COUNT), SLOW_COUNT);
    close_all(slow, SLOW_COUNT);
    client_close(&large);
    client_close(&second);
    bench_stop(b);
}
