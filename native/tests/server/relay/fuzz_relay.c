/* fuzz: -max_len=1024 */
/* Responses of a leader on another host to the batches that local clients wrote here
 * (server/relay/): any bytes, in any pieces, while clients leave, leaders change, time passes and
 * the socket is full. A model that knows only the stream and what has been sent predicts the
 * response to each client; the responses are compared with it, whole and in order.
 *
 *   byte 0     bits 0-2 number of requests - 1, bits 3-6 their version - 3 (modulo 11), bit 7 the
 *              heap is full when the responses arrive
 *   byte 1, 2  bit i: request i is about partition 1; has acks=0 (else -1 and 1 in turn). Request i
 *              is of client i % 2
 *   byte 3     bits 0-5 how much of the requests the socket takes, in 63rds; bits 4-6 all set: the
 *              last request is larger than may wait (rare, because it is slow); bit 7 correlation
 *              ids are about to wrap
 *   byte 4     seed of the pieces, 0: one piece
 *   byte 5     bits 0-2 enum incident, bits 3-4 how the stream ends (enum ending), bit 5 reads are
 *              interrupted, bit 6 the rest is frames
 *   byte 6     when the incident happens, in 256ths of the stream
 *   rest       the stream; correlation ids from 1 on, the topic is "quick" or sixteen times 7. As
 *              frames: a byte length and what follows the correlation id; the harness puts length
 *              word and correlation id before it
 *
 * Memory after the received bytes is poisoned, and each frame is parsed in a block of its own, so
 * that reading one byte too far is detected. */
#include <errno.h>
#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "base/big_endian.h"
#include "server/relay/state.h"

#define NEED(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum {
    HEAD_BYTES = 7,
    BYTES_MAX = 1024,
    REQUESTS_MAX = 8,
    CLIENTS = 2,
    ENDPOINTS = 3,
    ARENA_BYTES = 4 << 20,
    HEAP_BYTES = 32 << 20,
    FLOOD_BYTES = 70000
};
enum { HERE = 2, LEADER = 1, OTHER = 3, CLIENT_ID = 5000, BEGAN_MS = 1000000, REQUEST_MS = 100, ANSWER_MS = 1000 };
enum incident {
    NOTHING,
    CLIENT_LEAVES,
    OTHER_LEADS,
    REQUESTS_ARE_LATE,
    REST_IS_TAKEN,
    RELAY_REMOVED,
    LEADER_IS_LATE,
    OTHER_CONNECTION
};
enum ending { CLOSED, RESET, SILENT, ZEROS };

struct sent_request {
    int32_t partition;
    uint32_t client;
    int16_t acks;
    uint64_t end; /* of what is sent for it */
    bool decided; /* so far: */
    int16_t error;
    bool answered; /* by the leader: */
    struct mqd_relay_response answer;
};

static struct mqd_reactor *r;
static uint64_t token;
static const uint8_t topic_id[16] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
static struct mqd_connection clients[CLIENTS];
static uint8_t stream[BYTES_MAX * 8 + FLOOD_BYTES];

static struct {
    const uint8_t *bytes;
    uint32_t left;
    int end; /* 0, or errno, or -1: closed */
    bool interrupts, interrupted;
    uint64_t room, sent;
} wire;

/* The model. Requests below `oldest` have left the relay; stream bytes below `at` are complete
 * responses. */
static struct {
    int16_t version;
    bool heap_full, large, gone, elsewhere;
    uint32_t count, oldest, at, there, size_bytes;
    uint32_t first_id;
    bool ended;
    uint32_t ends; /* reported to Python */
    uint64_t seed;
    struct sent_request requests[REQUESTS_MAX];
    uint32_t due[CLIENTS][REQUESTS_MAX], due_count[CLIENTS], due_at[CLIENTS];
} model;

/* ---- the socket ---- */

ssize_t recv(int fd, void *buffer, size_t size_bytes, int flags)
{
    NEED(size_bytes > 0); /* its 0 would be taken for the end */
    wire.interrupted = wire.interrupts && !wire.interrupted;
    errno = wire.interrupted ? EINTR : wire.end ? wire.end : EAGAIN;
    size_t count = wire.interrupted ? 0 : wire.left < size_bytes ? wire.left : size_bytes;
    ASAN_UNPOISON_MEMORY_REGION(buffer, count);
    memcpy(buffer, wire.bytes, count);
    ASAN_POISON_MEMORY_REGION((uint8_t *)buffer + count, size_bytes - count);
    wire.bytes += count;
    wire.left -= (uint32_t)count;
    return count ? (ssize_t)count : errno == -1 ? 0 : -1;
}

ssize_t send(int fd, const void *buffer, size_t size_bytes, int flags)
{
    size_t count = size_bytes < wire.room ? size_bytes : (size_t)wire.room;
    wire.room -= count;
    wire.sent += count;
    errno = EAGAIN;
    return count ? (ssize_t)count : -1;
}

/* ---- the model ---- */

static void decide(uint32_t i, int16_t error, const struct mqd_relay_response *answer)
{
    struct sent_request *sent_request = &model.requests[i];
    if (sent_request->decided)
        return;
    sent_request->decided = true;
    sent_request->error = error;
    sent_request->answered = answer != NULL;
    if (answer)
        sent_request->answer = *answer;
    if (sent_request->acks && !(sent_request->client && model.gone))
        model.due[sent_request->client][model.due_count[sent_request->client]++] = i;
}

static void model_end(bool reported)
{
    if (model.ended)
        return;
    model.ended = true;
    model.ends += reported;
    for (; model.oldest < model.count; model.oldest++)
        decide(model.oldest,
               model.requests[model.oldest].end > wire.sent ? MQD_KAFKA_NOT_LEADER_OR_FOLLOWER
                                                            : MQD_KAFKA_REQUEST_TIMED_OUT,
               NULL);
}

static bool model_frame(const uint8_t *frame, uint32_t size_bytes)
{
    struct mqd_relay_response answer;
    uint32_t i = model.oldest;
    if (i == model.count || model.requests[i].end > wire.sent || mqd_get_be32(frame) != model.first_id + i)
        return false;
    uint8_t *alone = malloc(size_bytes);
    memcpy(alone, frame, size_bytes);
    int result = mqd_relay_parse(alone, size_bytes, model.version, &answer);
    free(alone);
    NEED(mqd_relay_parse(frame, size_bytes, model.version, &answer) == result); /* its texts stay */
    if (result < 0 || answer.partition_index != model.requests[i].partition)
        return false;
    NEED(answer.record_error_count <= MQD_RECORD_ERROR_COUNT_MAX && answer.error >= -1 &&
         (answer.error || answer.base_offset >= -1));
    model.oldest++;
    decide(i, answer.error, &answer);
    return true;
}

static void model_take(uint32_t there)
{
    while (!model.ended && there - model.at >= 4) {
        const uint8_t *frame = stream + model.at + 4;
        uint32_t size_bytes = mqd_get_be32(frame - 4);
        bool possible = size_bytes >= 8 && size_bytes <= MQD_RELAY_RESPONSE_BYTES_MAX - 4;
        if (possible && there - model.at - 4 < size_bytes)
            return;
        if (!possible || !model_frame(frame, size_bytes))
            model_end(true);
        model.at += 4 + size_bytes;
    }
}

/* ---- responses to clients ---- */

static void same_text(struct mqd_text got, struct mqd_text reported_id, size_t bytes_max)
{
    size_t size_bytes = reported_id.size_bytes < 0                   ? 0
                        : (size_t)reported_id.size_bytes < bytes_max ? (size_t)reported_id.size_bytes
                                                                     : bytes_max;
    size_bytes = size_bytes ? strnlen((const char *)reported_id.bytes, size_bytes) : 0;
    NEED(got.size_bytes == (int32_t)size_bytes &&
         (!size_bytes || memcmp(got.bytes, reported_id.bytes, size_bytes) == 0));
}

static void compare(const struct sent_request *sent_request, const struct mqd_relay_response *got)
{
    const struct mqd_relay_response *reported_id = &sent_request->answer;
    NEED(got->partition_index == sent_request->partition && got->error == sent_request->error);
    NEED(got->base_offset == (sent_request->error ? -1 : reported_id->base_offset));
    NEED(got->log_append_time_ms == (sent_request->answered ? reported_id->log_append_time_ms : -1));
    NEED(got->log_start_offset == (sent_request->answered ? reported_id->log_start_offset : -1));
    bool refused = sent_request->answered && sent_request->error &&
                   (reported_id->message.size_bytes > 0 || reported_id->record_error_count);
    NEED(got->record_error_count == (refused && !model.heap_full ? reported_id->record_error_count : 0));
    if (model.version < 8)
        return;
    if (!refused || model.heap_full) {
        NEED(sent_request->answered && !refused ? got->message.size_bytes < 0 : got->message.size_bytes > 0);
        return;
    }
    same_text(got->message, reported_id->message, sizeof((struct mqd_refusal *)0)->message - 1);
    NEED(memcmp(got->record_errors, reported_id->record_errors,
                reported_id->record_error_count * sizeof *reported_id->record_errors) == 0);
    if (reported_id->record_error_count)
        same_text(got->record_message, reported_id->record_message,
                  sizeof((struct mqd_refusal *)0)->record_message - 1);
}

static void take_answers(uint32_t client)
{
    struct mqd_connection *c = &clients[client];
    struct mqd_relay_response got;
    for (uint32_t at = 0; at < c->out.size_bytes;) {
        NEED(c->out.size_bytes - at >= 8 && model.due_at[client] < model.due_count[client]);
        const uint8_t *frame = c->out.bytes + at + 4;
        uint32_t size_bytes = mqd_get_be32(frame - 4), i = model.due[client][model.due_at[client]++];
        NEED(size_bytes <= c->out.size_bytes - at - 4 && mqd_get_be32(frame) == CLIENT_ID + i);
        NEED(mqd_relay_parse(frame, size_bytes, model.version, &got) == 0);
        compare(&model.requests[i], &got);
        at += 4 + size_bytes;
    }
    c->out_sent = c->out_base += c->out.size_bytes;
    c->out.size_bytes = 0;
    mqd_list_remove(&c->output_node);
}

static void answer_all(void)
{
    struct mqd_node *node;
    while ((node = mqd_list_pop(&r->to_respond))) {
        struct mqd_connection *c = MQD_CONTAINER(node, struct mqd_connection, response_node);
        mqd_connection_respond(r, c);
        NEED(!c->closing);
        if (!c->out.size_bytes)
            continue;
        take_answers((uint32_t)(c - clients));
        mqd_list_append(&r->to_respond, &c->response_node); /* what did not find room is answered now */
    }
}

/* After every step: nothing is late, nothing is lost, and only pending requests hold memory. */
static void check_state(void)
{
    const struct mqd_relay *relay = r->relays->relay[0];
    uint32_t entries = 0, relaying[CLIENTS] = {0};
    answer_all();
    MQD_LIST_EACH(node, next, &relay->entries)
        entries++;
    for (uint32_t i = model.oldest; i < model.count; i++)
        relaying[model.requests[i].client] += !model.requests[i].decided;
    NEED((relay->socket.fd < 0) == model.ended && entries == model.count - model.oldest);
    NEED(model.ended ? !relay->in && !relay->out.size_bytes
                     : relay->in_bytes == model.there - model.at && relay->out_sent == wire.sent);
    for (uint32_t client = 0; client < CLIENTS; client++) {
        const struct sent_request *last = &model.requests[model.count - 1];
        bool blocked = model.large && last->client == client && !last->decided && last->end > wire.sent;
        NEED(model.due_at[client] == model.due_count[client]);
        NEED((client && model.gone) ||
             (clients[client].relaying_count == relaying[client] && clients[client].inflight == relaying[client] &&
              clients[client].block_count == blocked));
    }
}

/* ---- what happens ---- */

static void turn(uint32_t there, int end)
{
    const struct mqd_relay *relay = r->relays->relay[0];
    wire.bytes = stream + model.there;
    wire.left = there - model.there;
    wire.end = end;
    model.there = there;
    model_take(there);
    if (end)
        model_end(true);
    mqd_relay_on_event(r, (uint64_t)relay->generation << 16 | relay->index, end ? MQD_POLL_HANGUP : MQD_POLL_READABLE);
    mqd_relays_read(r);
    mqd_relays_run(r);
    check_state();
}

static void receive_until(uint32_t end)
{
    while (!model.ended && model.there < end) {
        uint32_t left = end - model.there, piece = left;
        if (model.seed) {
            model.seed = model.seed * 6364136223846793005ull + 1442695040888963407ull;
            piece = 1 + (uint32_t)(model.seed >> 40) % (left > 4096 ? 16384 : 63);
        }
        turn(model.there + (piece < left ? piece : left), 0);
    }
    if (model.ended)
        model.there = end;
}

static void connect_leader(void)
{
    struct mqd_relay_options options = {
        .leader_node = LEADER, .leader_worker = 1, .lane = MQD_RELAY_LANE_PLAIN, .timeout_ms = ANSWER_MS};
    int64_t now_ms = r->now_ms;
    NEED(mqd_reactor_relay_put(r, ++token, eventfd(0, EFD_CLOEXEC), &options) == 0);
    r->now_ms = now_ms; /* a command reads the clock */
    wire.room = UINT64_MAX;
    wire.sent = 0;
    model.ended = false;
    model.at = model.there;
}

static void pass(int64_t elapsed_ms)
{
    r->now_ms += elapsed_ms;
    for (uint32_t i = model.oldest; i < model.count; i++)
        if (model.requests[i].acks == -1)
            decide(i, MQD_KAFKA_REQUEST_TIMED_OUT, NULL);
    mqd_timers_run(r);
    answer_all();
    if (model.oldest < model.count &&
        r->now_ms > BEGAN_MS + ANSWER_MS + (model.requests[model.oldest].acks == -1 ? REQUEST_MS : 0))
        model_end(true);
    mqd_relays_run(r);
    check_state();
}

static void leave(struct mqd_connection *c)
{
    struct mqd_request *request = c->head, *next;
    model.gone = true;
    for (uint32_t i = model.oldest; i < model.count; i++)
        model.requests[i].decided |= model.requests[i].client == 1;
    for (; request; request = next) { /* like mqd_connection_close */
        next = request->next;
        mqd_request_orphan(r, request);
    }
    c->head = c->tail = NULL;
    c->fd = -1;
    mqd_list_remove(&c->response_node);
}

static void place(int32_t leader)
{
    struct mqd_topic_partition places[2] = {
        {.slot = UINT32_MAX, .leader = LEADER, .leader_epoch = 5, .redirect = -1, .leader_worker = 1}};
    int64_t now_ms = r->now_ms;
    places[1] = places[0];
    places[1].leader = leader;
    NEED(mqd_reactor_topic_put_partitions(r, ++token, topic_id, "quick", places, 2) == 0);
    r->now_ms = now_ms;
}

static void cause(enum incident what)
{
    const struct mqd_relay *relay = r->relays->relay[0];
    switch (what) {
    case NOTHING:
        break;
    case CLIENT_LEAVES:
        leave(&clients[1]);
        break;
    case OTHER_LEADS:
        place(OTHER);
        for (uint32_t i = model.oldest; i < model.count; i++)
            if (model.requests[i].partition == 1)
                decide(i, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER, NULL);
        model.elsewhere = true;
        break;
    case REQUESTS_ARE_LATE:
        pass(REQUEST_MS * 5);
        break;
    case REST_IS_TAKEN:
        wire.room = UINT64_MAX;
        mqd_relay_on_event(r, (uint64_t)relay->generation << 16 | relay->index, MQD_POLL_WRITABLE);
        mqd_relays_run(r);
        break;
    case RELAY_REMOVED:
        model_end(false);
        NEED(mqd_reactor_relay_remove(r, ++token, LEADER) == 0);
        break;
    case LEADER_IS_LATE:
        pass(ANSWER_MS * 2);
        break;
    case OTHER_CONNECTION:
        model_end(false);
        connect_leader();
        break;
    }
    check_state();
}

/* ---- a world ---- */

static void *zeroed(size_t size_bytes)
{
    void *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(memory != MAP_FAILED);
    return memory;
}

/* A reactor without a thread: the harness runs its turns. */
static void open_reactor(void)
{
    static const int eventfds[ENDPOINTS] = {-1, -1, -1};
    static const uint8_t boot_id[16] = {1};
    static const struct mqd_broker_address brokers[2] = {{.node_id = LEADER, .port = 9092, .host = "one"},
                                                         {.node_id = HERE, .port = 9092, .host = "two"}};
    struct mqd_reactor_options options = {.control = zeroed(mqd_control_size_bytes()),
                                          .links = zeroed(mqd_links_size_bytes(ENDPOINTS)),
                                          .endpoint_count = ENDPOINTS,
                                          .eventfds = eventfds,
                                          .handoff_fd = -1,
                                          .cpu = -1,
                                          .connection_count_max = 16,
                                          .request_bytes_max = ARENA_BYTES / 2,
                                          .inflight_count_max = 16,
                                          .read_fd_count_max = 4};
    options.arenas[0] = zeroed(ARENA_BYTES);
    options.arena_bytes[0] = ARENA_BYTES;
    NEED(mqd_control_format(options.control, mqd_control_size_bytes(), 1, boot_id, 1, 1) == 0);
    NEED(mqd_links_format(options.links, mqd_links_size_bytes(ENDPOINTS), ENDPOINTS) == 0);
    r = mqd_reactor_create(&options);
    NEED(r && mqd_poll_create(&r->poll, MQD_BACKEND_EPOLL, 16) == 0);
    NEED(mqd_reactor_brokers_put(r, ++token, HERE, brokers, 2) == 0);
    place(LEADER);
}

static void open_client(struct mqd_connection *c)
{
    struct mqd_node *nodes[] = {&c->ready_node, &c->output_node, &c->stall_node, &c->response_node, &c->mute_node};
    memset(c, 0, sizeof *c);
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++)
        mqd_list_init(nodes[i]);
    c->run_offset = -1;
    c->peer_node = -1;
    c->readable = 1;
    c->local = (struct mqd_local *)(uintptr_t)1; /* only whether it is local counts here */
}

static void submit(uint32_t i)
{
    static uint8_t records[MQD_RELAY_UNSENT_BYTES + 1];
    struct sent_request *sent_request = &model.requests[i];
    bool large = model.large && i == model.count - 1;
    struct mqd_relay_request request = {.correlation_id = (int32_t)(CLIENT_ID + i),
                                        .version = model.version,
                                        .client_id = {(const uint8_t *)"c", 1},
                                        .transactional_id = {NULL, -1},
                                        .acks = sent_request->acks,
                                        .timeout_ms = REQUEST_MS,
                                        .topic = {(const uint8_t *)"quick", 5},
                                        .topic_id = topic_id,
                                        .partition_index = sent_request->partition,
                                        .records = records,
                                        .records_bytes = large ? sizeof records : 70};
    /* this worker refuses what is not one whole batch; everything else is checked by the leader */
    mqd_put_be32(records + 8, (uint32_t)request.records_bytes - 12);
    records[16] = 2;
    struct mqd_buffer frame = {0};
    mqd_relay_encode(&frame, &request); /* the leader gets the client's request unchanged */
    int64_t offset = mqd_arena_allocate(r->arena, frame.size_bytes);
    NEED(!frame.failed && offset >= 0);
    memcpy(r->options.arenas[0] + offset, frame.bytes, frame.size_bytes);
    mqd_dispatch_frame(r, &clients[sent_request->client], r->options.arenas[0] + offset + 4, frame.size_bytes - 4,
                       offset + 4);
    mqd_arena_release(r->arena, (uint64_t)offset);
    mqd_buffer_free(&frame);
    sent_request->end = r->relays->relay[0]->out.size_bytes;
}

static void begin(const uint8_t *data)
{
    memset(&model, 0, sizeof model);
    model.version = (int16_t)(3 + (data[0] >> 3 & 15) % 11);
    model.count = 1 + (data[0] & 7);
    model.large = (data[3] & 112) == 112;
    model.seed = data[4];
    r->now_ms = BEGAN_MS;
    r->options.heap_bytes_max = HEAP_BYTES;
    for (uint32_t client = 0; client < CLIENTS; client++)
        open_client(&clients[client]);
    connect_leader();
    struct mqd_relay *relay = r->relays->relay[0];
    if (data[3] & 128)
        relay->correlation_id = INT32_MAX - 3;
    model.first_id = relay->correlation_id + 1;
    for (uint32_t i = 0; i < model.count; i++) {
        model.requests[i] = (struct sent_request){.partition = data[1] >> i & 1,
                                                  .client = i % CLIENTS,
                                                  .acks = data[2] >> i & 1 ? 0
                                                          : i & 1          ? -1
                                                                           : 1};
        submit(i);
    }
    if ((data[3] & 63) < 63)
        wire.room = (uint64_t)relay->out.size_bytes * (data[3] & 63) / 63;
    mqd_relays_run(r);
    model.heap_full = data[0] & 128;
    if (model.heap_full)
        r->options.heap_bytes_max = 0;
    wire.interrupts = data[5] & 32;
    check_state();
}

static void write_stream(const uint8_t *bytes, uint32_t size_bytes, bool frames, bool flood)
{
    uint8_t *to = stream;
    if (!frames) {
        memcpy(to, bytes, size_bytes);
        to += size_bytes;
    }
    for (uint32_t id = model.first_id; frames && size_bytes; id++) {
        uint32_t length = *bytes < size_bytes - 1 ? *bytes : size_bytes - 1;
        mqd_store_be32(to, 4 + length);
        mqd_store_be32(to + 4, id);
        memcpy(to + 8, bytes + 1, length);
        to += 8 + length;
        bytes += 1 + length;
        size_bytes -= 1 + length;
    }
    if (flood) {
        memset(to, 0, FLOOD_BYTES);
        to += FLOOD_BYTES;
    }
    model.size_bytes = (uint32_t)(to - stream);
}

/* All memory lent for the requests has been returned. */
static void finish(void)
{
    struct mqd_event event;
    uint32_t ends = 0;
    r->options.heap_bytes_max = HEAP_BYTES;
    for (uint32_t client = 0; client < CLIENTS; client++) {
        struct mqd_connection *c = &clients[client];
        bool gone = client && model.gone;
        NEED(gone || (!c->head && !c->tail && !c->held_bytes && mqd_connection_may_read(r, c)));
        NEED(gone || client >= model.count || mqd_list_linked(&c->ready_node));
        mqd_output_clear(r, c);
        mqd_list_remove(&c->ready_node);
    }
    NEED(r->heap_bytes == 0 && r->timer_count == 0 && mqd_arena_extents_used(r->arena) == 0);
    NEED(mqd_list_empty(&r->to_send) && mqd_list_empty(&r->ready));
    while (mqd_reactor_next_event(r, &event)) {
        NEED(event.kind == MQD_EVENT_RELAY_ENDED || (event.kind == MQD_EVENT_DONE && event.error == 0));
        ends += event.kind == MQD_EVENT_RELAY_ENDED;
    }
    NEED(ends == model.ends);
    mqd_relays_destroy(r);
    if (model.elsewhere)
        place(LEADER);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < HEAD_BYTES || size > BYTES_MAX)
        return 0;
    if (!r)
        open_reactor();
    begin(data);
    enum ending ending = data[5] >> 3 & 3;
    write_stream(data + HEAD_BYTES, (uint32_t)size - HEAD_BYTES, data[5] & 64, ending == ZEROS);
    receive_until((uint32_t)((uint64_t)model.size_bytes * data[6] / 256));
    cause(data[5] & 7);
    receive_until(model.size_bytes);
    if (ending == SILENT)
        pass(ANSWER_MS * 4);
    else if (!model.ended)
        turn(model.there, ending == RESET ? ECONNRESET : -1);
    if (!model.ended)
        cause(RELAY_REMOVED); /* no relay was waited for */
    finish();
    return 0;
}
