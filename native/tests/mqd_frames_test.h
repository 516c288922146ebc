/* For mqd_reactor_test.h, which includes it: clients over loopback TCP, their frames, and the
 * responses to them. */
#ifndef MQD_FRAMES_TEST_H
#define MQD_FRAMES_TEST_H

/* ---- clients ---- */

struct client {
    int fd;
    uint8_t *reply;
    uint32_t reply_bytes, at;
    bool broken;
};

/* Passes `peer` to a worker, as the acceptor does. peer_node -1: from a client; else from a host, and
 * `tls`: over TLS from here on. */
static void client_hand_off(struct bench *b, uint32_t worker, int peer, uint16_t listener_id, int32_t peer_node,
                            bool tls)
{
    uint8_t bytes[64] = {0};
    uint32_t magic = 0x31434e4fu;
    memcpy(bytes, &magic, 4);
    memcpy(bytes + 4, &listener_id, 2);
    memcpy(bytes + 48, &b->address_count_max, 4);
    memcpy(bytes + 52, &b->listener_count_max, 4);
    if (peer_node >= 0) {
        bytes[6] = tls ? 2 | 4 : 2; /* MQD_HANDOFF_PEER, MQD_HANDOFF_TLS */
        memcpy(bytes + 44, &peer_node, 4);
    }
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } ancillary = {0};
    struct iovec iov = {bytes, sizeof bytes};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &peer, sizeof peer);
    CHECK_OR(sendmsg(b->handoffs[worker], &message, 0) == 64, abort());
    close(peer);
}

static void client_limit(const struct client *client)
{
    struct timeval limit = {LIMIT_MS / 1000, 0};
    setsockopt(client->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(client->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

/* The broker's end of `fd`. The kernel may have given the listener's port to another process before, whose clients
 * still try to reconnect: their connections are closed. */
static int client_accept(const struct bench *b, int fd)
{
    struct sockaddr_in own, peer;
    socklen_t size_bytes = sizeof own, peer_bytes = sizeof peer;
    CHECK_OR(getsockname(fd, (struct sockaddr *)&own, &size_bytes) == 0, abort());
    for (;;) {
        int accepted = accept(b->listener, (struct sockaddr *)&peer, &peer_bytes);
        CHECK_OR(accepted >= 0, abort());
        if (peer.sin_port == own.sin_port)
            return accepted;
        close(accepted);
    }
}

static struct client client_open_of(struct bench *b, uint32_t worker, uint16_t listener_id, int32_t peer_node, bool tls)
{
    struct sockaddr_in address;
    socklen_t size_bytes = sizeof address;
    struct client client = {.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    int one = 1;
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER; /* or one thread would close what another waits for */
    getsockname(b->listener, (struct sockaddr *)&address, &size_bytes);
    pthread_mutex_lock(&opening);
    CHECK_OR(connect(client.fd, (struct sockaddr *)&address, sizeof address) == 0, abort());
    int peer = client_accept(b, client.fd);
    pthread_mutex_unlock(&opening);
    client_limit(&client);
    setsockopt(client.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    client_hand_off(b, worker, peer, listener_id, peer_node, tls);
    return client;
}

static inline struct client client_open_by(struct bench *b, uint32_t worker, uint16_t listener_id, int32_t peer_node)
{
    return client_open_of(b, worker, listener_id, peer_node, false);
}

static inline struct client client_open_as(struct bench *b, uint32_t worker, int32_t peer_node)
{
    return client_open_by(b, worker, 0, peer_node);
}

static inline struct client client_open(struct bench *b, uint32_t worker)
{
    return client_open_by(b, worker, 0, -1);
}

__attribute__((unused)) static void client_close(struct client *client)
{
    close(client->fd);
    free(client->reply);
    client->reply = NULL;
    client->fd = -1;
}

/* recv with a timeout (SO_RCVTIMEO) is not restarted after an interruption, and io_uring
 * interrupts the thread that created the ring when it has completions. */
static ssize_t client_recv(struct client *client, uint8_t *bytes, size_t size_bytes)
{
    ssize_t n;
    do
        n = recv(client->fd, bytes, size_bytes, 0);
    while (n < 0 && errno == EINTR);
    return n;
}

/* 1: a complete response is in client->reply, from the correlation id on; 0: the broker closed;
 * -1: nothing arrived in time. */
static int client_receive(struct client *client)
{
    uint8_t length[4];
    uint32_t size_bytes = 0;
    ssize_t n = 0;
    for (uint32_t got = 0; got < 4; got += (uint32_t)n)
        if ((n = client_recv(client, length + got, 4 - got)) <= 0)
            return n == 0 || errno == ECONNRESET || errno == EPIPE ? 0 : -1;
    for (int i = 0; i < 4; i++)
        size_bytes = size_bytes << 8 | length[i];
    CHECK_OR(size_bytes < 64u << 20, return -1);
    free(client->reply);
    client->reply = malloc(size_bytes ? size_bytes : 1);
    client->reply_bytes = size_bytes;
    client->at = 0;
    client->broken = false;
    for (uint32_t got = 0; got < size_bytes; got += (uint32_t)n)
        if ((n = client_recv(client, client->reply + got, size_bytes - got)) <= 0)
            return n == 0 || errno == ECONNRESET ? 0 : -1;
    return 1;
}

static uint64_t take(struct client *client, int bytes)
{
    uint64_t value = 0;
    if (client->at + (uint32_t)bytes > client->reply_bytes) {
        client->broken = true;
        return 0;
    }
    for (int i = 0; i < bytes; i++)
        value = value << 8 | client->reply[client->at++];
    return value;
}
static void take_bytes(struct client *client, uint32_t bytes)
{
    if (bytes > client->reply_bytes - client->at)
        client->broken = true;
    else
        client->at += bytes;
}

/* ---- frames ---- */

struct frame {
    uint8_t *bytes;
    uint32_t size_bytes, capacity;
};

static void put_bytes(struct frame *frame, const void *bytes, uint32_t size_bytes)
{
    while (frame->size_bytes + size_bytes > frame->capacity) {
        frame->capacity = frame->capacity ? frame->capacity * 2 : 256;
        frame->bytes = realloc(frame->bytes, frame->capacity);
    }
    if (size_bytes)
        memcpy(frame->bytes + frame->size_bytes, bytes, size_bytes);
    frame->size_bytes += size_bytes;
}
static void put(struct frame *frame, int bytes, uint64_t value)
{
    uint8_t out[8];
    for (int i = 0; i < bytes; i++)
        out[i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
    put_bytes(frame, out, (uint32_t)bytes);
}
static void put_text(struct frame *frame, const char *text)
{
    put(frame, 2, strlen(text));
    put_bytes(frame, text, (uint32_t)strlen(text));
}
static uint32_t frame_begin(struct frame *frame, int16_t api_key, int16_t version, int32_t correlation_id)
{
    uint32_t begin = frame->size_bytes;
    put(frame, 4, 0), put(frame, 2, (uint16_t)api_key), put(frame, 2, (uint16_t)version),
        put(frame, 4, (uint32_t)correlation_id), put(frame, 2, 0xffff);
    return begin;
}
static void frame_end(struct frame *frame, uint32_t begin)
{
    uint32_t size_bytes = frame->size_bytes - begin - 4;
    for (int i = 0; i < 4; i++)
        frame->bytes[begin + (uint32_t)i] = (uint8_t)(size_bytes >> (24 - 8 * i));
}
static void frame_free(struct frame *frame)
{
    free(frame->bytes);
    *frame = (struct frame){0};
}

struct part {
    int32_t partition;
    struct log_batch batch;
};

/* Produce v7 of one batch for each part, all of topic "quick". */
static void put_produce(struct frame *frame, int32_t correlation_id, int acks, int32_t timeout_ms,
                        const struct part *parts, uint32_t count)
{
    uint32_t begin = frame_begin(frame, 0, 7, correlation_id);
    put(frame, 2, 0xffff), put(frame, 2, (uint16_t)acks), put(frame, 4, (uint32_t)timeout_ms), put(frame, 4, 1),
        put_text(frame, "quick"), put(frame, 4, count);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *batch =
            malloc(MQD_BATCH_HEADER_BYTES + (size_t)(parts[i].batch.body_bytes ? parts[i].batch.body_bytes : 64));
        uint32_t size_bytes = log_encode(batch, parts[i].batch);
        put(frame, 4, (uint32_t)parts[i].partition), put(frame, 4, size_bytes), put_bytes(frame, batch, size_bytes);
        free(batch);
    }
    frame_end(frame, begin);
}

struct fetch_position {
    int32_t partition;
    int64_t offset;
};
struct fetch {
    int32_t correlation_id, wait_ms, bytes_min, bytes_max, session_id, session_epoch;
    const char *topic;
    int32_t forget; /* partition + 1; 0 = none */
    uint8_t committed;
    const char *rack;
};

/* Fetch v11 */
static void put_fetch(struct frame *frame, struct fetch fetch, const struct fetch_position *requested, uint32_t count)
{
    const char *topic = fetch.topic ? fetch.topic : "quick";
    uint32_t begin = frame_begin(frame, 1, 11, fetch.correlation_id);
    put(frame, 4, 0xffffffff), put(frame, 4, (uint32_t)fetch.wait_ms), put(frame, 4, (uint32_t)fetch.bytes_min),
        put(frame, 4, (uint32_t)fetch.bytes_max), put(frame, 1, fetch.committed);
    put(frame, 4, (uint32_t)fetch.session_id), put(frame, 4, (uint32_t)fetch.session_epoch), put(frame, 4, count != 0);
    if (count)
        put_text(frame, topic), put(frame, 4, count);
    for (uint32_t i = 0; i < count; i++)
        put(frame, 4, (uint32_t)requested[i].partition), put(frame, 4, 0xffffffff),
            put(frame, 8, (uint64_t)requested[i].offset), put(frame, 8, UINT64_MAX), put(frame, 4, 4 << 20);
    put(frame, 4, fetch.forget != 0);
    if (fetch.forget)
        put_text(frame, topic), put(frame, 4, 1), put(frame, 4, (uint32_t)fetch.forget - 1);
    put_text(frame, fetch.rack ? fetch.rack : "");
    frame_end(frame, begin);
}

static bool client_send(struct client *client, const struct frame *frame)
{
    for (uint32_t sent = 0; sent < frame->size_bytes;) {
        ssize_t n = send(client->fd, frame->bytes + sent, frame->size_bytes - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        sent += (uint32_t)n;
    }
    return true;
}

/* ---- answers ---- */

struct produced {
    int32_t correlation_id, partition[8];
    int16_t error[8];
    int64_t base_offset[8];
    uint32_t count;
};

static struct produced take_produced(struct client *client)
{
    struct produced out = {.correlation_id = (int32_t)take(client, 4)};
    CHECK_OR(take(client, 4) == 1, return out);
    take_bytes(client, (uint32_t)take(client, 2));
    out.count = (uint32_t)take(client, 4);
    CHECK_OR(out.count <= 8, return out);
    for (uint32_t i = 0; i < out.count; i++) {
        out.partition[i] = (int32_t)take(client, 4), out.error[i] = (int16_t)take(client, 2),
        out.base_offset[i] = (int64_t)take(client, 8);
        take(client, 8), take(client, 8);
    }
    take(client, 4);
    CHECK_OR(!client->broken && client->at == client->reply_bytes, return out);
    return out;
}

struct seen {
    int64_t offset;
    uint64_t mark;
    int32_t partition;
};
struct fetched {
    int32_t correlation_id, session_id, partition_count, error[8], partition[8];
    int16_t top_error;
    int64_t high_watermark[8], last_stable_offset[8];
    int32_t preferred[8];
    int32_t aborted_count; /* of all partitions; -1 = null */
    int64_t aborted_producer[8192], aborted_first[8192];
    uint32_t batch_count;
    struct seen batches[4096];
};

static void take_batches(struct client *client, struct fetched *out, int32_t partition, uint32_t size_bytes)
{
    CHECK(size_bytes <= client->reply_bytes - client->at);
    const uint8_t *at = client->reply + client->at, *end = at + size_bytes;
    client->at += size_bytes;
    while ((size_t)(end - at) > MQD_BATCH_HEADER_BYTES) {
        struct mqd_batch batch;
        const char *reason;
        CHECK_EQUAL(mqd_batch_decode(at, (uint64_t)(end - at), &batch), 0);
        CHECK(batch.size_bytes <= end - at);
        CHECK_EQUAL(mqd_batch_validate(at, (uint64_t)batch.size_bytes, &batch, &reason), 0);
        CHECK(out->batch_count < 4096);
        struct seen *seen = &out->batches[out->batch_count++];
        *seen = (struct seen){.offset = batch.base_offset, .partition = partition};
        memcpy(&seen->mark, at + MQD_BATCH_HEADER_BYTES, 8);
        for (int32_t i = 8; i < batch.size_bytes - MQD_BATCH_HEADER_BYTES && !(batch.attributes & 0x20); i += 97)
            CHECK_EQUAL(at[MQD_BATCH_HEADER_BYTES + i], (uint8_t)((uint64_t)i * 31 + seen->mark));
        at += batch.size_bytes;
    }
    CHECK(at == end);
}

static void take_fetched(struct client *client, struct fetched *out)
{
    out->batch_count = 0;
    out->partition_count = 0;
    out->correlation_id = (int32_t)take(client, 4);
    take(client, 4);
    out->top_error = (int16_t)take(client, 2), out->session_id = (int32_t)take(client, 4);
    for (uint32_t topics = (uint32_t)take(client, 4); topics && !client->broken; topics--) {
        take_bytes(client, (uint32_t)take(client, 2));
        for (uint32_t count = (uint32_t)take(client, 4); count && !client->broken; count--) {
            int32_t partition = (int32_t)take(client, 4), at = out->partition_count++;
            CHECK(at < 8);
            out->partition[at] = partition, out->error[at] = (int16_t)take(client, 2),
            out->high_watermark[at] = (int64_t)take(client, 8);
            out->last_stable_offset[at] = (int64_t)take(client, 8), take(client, 8);
            int32_t aborted = (int32_t)take(client, 4);
            CHECK(aborted <= 8192);
            out->aborted_count = aborted;
            for (int32_t i = 0; i < aborted; i++)
                out->aborted_producer[i] = (int64_t)take(client, 8), out->aborted_first[i] = (int64_t)take(client, 8);
            out->preferred[at] = (int32_t)take(client, 4);
            uint32_t records = (uint32_t)take(client, 4);
            if (records != UINT32_MAX)
                take_batches(client, out, partition, records);
        }
    }
    CHECK(!client->broken && client->at == client->reply_bytes);
}

/* Sends and takes one response. */
__attribute__((unused)) static struct produced client_produce(struct client *client, int acks, const struct part *parts,
                                                              uint32_t count)
{
    struct frame frame = {0};
    struct produced out = {.correlation_id = -1};
    put_produce(&frame, 77, acks, LIMIT_MS, parts, count);
    CHECK_OR(client_send(client, &frame), goto done);
    CHECK_OR(client_receive(client) == 1, goto done);
    out = take_produced(client);
done:
    frame_free(&frame);
    return out;
}

__attribute__((unused)) static void client_fetch(struct client *client, struct fetch fetch,
                                                 const struct fetch_position *requested, uint32_t count,
                                                 struct fetched *out)
{
    struct frame frame = {0};
    put_fetch(&frame, fetch, requested, count);
    memset(out, 0, offsetof(struct fetched, batches));
    out->correlation_id = -1;
    bool sent = client_send(client, &frame);
    frame_free(&frame);
    CHECK(sent);
    CHECK_EQUAL(client_receive(client), 1);
    take_fetched(client, out);
}

#endif
