/* fuzz: -max_len=1024 */
/* Any bytes that unauthenticated clients send to a listener with SASL, in any pieces, and any
 * response of the acceptor: a reactor without a thread, whose turns the harness runs, and one
 * connection at a time. Checked after each turn:
 *
 *   A1  before a principal was given, the acceptor sees ApiVersions, SaslHandshake, SaslAuthenticate
 *       and bare tokens only, COUNT_MAX of them, none larger than FRAME_BYTES_MAX
 *   A2  afterwards each request carries the principal, byte for byte, which never changes
 *   A3  while a request of an exchange is unanswered, no other request of the connection comes
 *   A4  the acceptor sees what the client has sent, in its order, and nothing else
 *   A5  an invalid principal, one in the response to another request, or a different user's ends
 *       the connection
 *
 * The input is a list of steps: a byte whose low bits are enum step, then what the step takes. */
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/big_endian.h"
#include "server/authentication.h"
#include "server/reactor.h"
#include "shm/layout.h"

#define NEED(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum {
    WORKER = 0,
    ACCEPTOR = 1,
    ENDPOINTS = 3,
    ARENA_BYTES = 4 << 20,
    FRAME_BYTES_MAX = 4096,
    COUNT_MAX = 10,
    STREAM_BYTES_MAX = 1 << 20,
    UNANSWERED_MAX = 16
};
enum step { BYTES, FRAME, TOKEN, LARGE, ANSWER, PRINCIPAL, INCIDENT, NOTHING };
enum incident { SESSION_ENDS, TOO_LATE, ACCEPTOR_DIES, CLIENT_LEAVES, ACCEPTOR_CLOSES, ACCEPTOR_PARKS };

static struct mqd_reactor *r;
static struct mqd_endpoint *acceptor;
static struct mqd_reactor_options options;
static int eventfds[ENDPOINTS];
static uint64_t token;

struct input {
    const uint8_t *bytes;
    size_t left;
};

/* The open connection, as the model knows it. */
static struct {
    int client; /* the client's end */
    struct mqd_connection *c;
    uint32_t generation;
    uint8_t *stream; /* what the client has sent; requests were seen up to `seen` */
    uint32_t size_bytes, seen;
    uint8_t principal[MQD_PRINCIPAL_BYTES_MAX + 2];
    uint16_t principal_bytes; /* 0: none was given */
    uint32_t count;           /* requests before that */
    struct mqd_descriptor unanswered[UNANSWERED_MAX];
    bool exchange[UNANSWERED_MAX], again;
    uint32_t unanswered_count;
} world;

static uint8_t take(struct input *input)
{
    if (!input->left)
        return 0;
    input->left--;
    return *input->bytes++;
}

static bool is_open(void)
{
    return world.c && world.c->fd >= 0 && world.c->generation == world.generation;
}

/* ---- requests to the acceptor ---- */

static bool is_exchange(int16_t api_key, uint16_t flags)
{
    return flags & MQD_REQUEST_RAW_TOKEN || api_key == 17 || api_key == 36;
}

/* A4 */
static void must_be_sent(const uint8_t *frame, uint32_t size_bytes)
{
    for (; world.seen + 4 + size_bytes <= world.size_bytes; world.seen++)
        if (mqd_get_be32(world.stream + world.seen) == size_bytes &&
            memcmp(world.stream + world.seen + 4, frame, size_bytes) == 0) {
            world.seen += 4 + size_bytes;
            return;
        }
    NEED(!"a request that its client has not sent");
}

static void see(const struct mqd_descriptor *one)
{
    const uint8_t *frame = options.arenas[WORKER] + one->offset;
    uint32_t size_bytes = one->size_bytes;
    if (one->flags & MQD_REQUEST_PRINCIPAL) { /* A2 */
        struct mqd_request_principal block;
        memcpy(&block, frame, sizeof block);
        NEED(world.principal_bytes && block.size_bytes == world.principal_bytes && !block.host_bytes &&
             memcmp(frame + sizeof block, world.principal, block.size_bytes) == 0);
        frame += sizeof block + block.size_bytes;
        size_bytes -= (uint32_t)sizeof block + block.size_bytes;
    }
    NEED((one->flags & MQD_REQUEST_RAW_TOKEN) || size_bytes >= MQD_FRAME_BYTES_MIN);
    int16_t api_key = one->flags & MQD_REQUEST_RAW_TOKEN ? -1 : (int16_t)mqd_get_be16(frame);
    bool exchange = is_exchange(api_key, one->flags);
    if (!world.again) {
        NEED(!world.principal_bytes || (one->flags & MQD_REQUEST_PRINCIPAL));
        if (!world.principal_bytes) /* A1 */
            NEED((exchange || api_key == 18) && ++world.count <= COUNT_MAX && size_bytes <= FRAME_BYTES_MAX);
        must_be_sent(frame, size_bytes);
        for (uint32_t i = 0; i < world.unanswered_count; i++)
            NEED(!world.exchange[i]); /* A3 */
    }
    NEED(world.unanswered_count < UNANSWERED_MAX);
    world.exchange[world.unanswered_count] = exchange;
    world.unanswered[world.unanswered_count++] = *one;
}

static void answer(const struct mqd_descriptor *one, uint16_t flags, const void *bytes, uint32_t size_bytes)
{
    static uint64_t at;
    at = (at + 8192) % (1 << 20);
    memcpy(options.arenas[ACCEPTOR] + at, bytes, size_bytes);
    struct mqd_descriptor descriptor = {
        .kind = MQD_LINK_RESPONSE, .flags = flags, .token = one->token, .offset = at, .size_bytes = size_bytes};
    NEED(mqd_endpoint_send(acceptor, WORKER, &descriptor) == 0);
    mqd_endpoint_flush(acceptor);
}

static void run_turns(void)
{
    struct mqd_descriptor one;
    uint8_t bytes[4096];
    for (int i = 0; i < 3; i++) {
        uint32_t from;
        if (is_open()) {
            world.c->readable = 1; /* like an event */
            mqd_connection_resume(r, world.c);
        }
        mqd_reactor_turn(r, NULL, 0);
        while (mqd_endpoint_drain(acceptor, &one, &from, 1) == 1)
            if (one.kind == MQD_LINK_REQUEST && is_open())
                see(&one);
            else if (one.kind == MQD_LINK_REQUEST) /* of one that has just been closed */
                answer(&one, 0, "12345678", 8);
        world.again = false;
        while (recv(world.client, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
            ;
    }
    if (is_open() && world.principal_bytes)
        NEED(world.c->authentication == MQD_AUTHENTICATION_DONE && world.c->principal_bytes == world.principal_bytes &&
             memcmp(world.c->principal, world.principal, world.principal_bytes) == 0);
    if (is_open() && !world.principal_bytes)
        NEED(world.c->authentication == MQD_AUTHENTICATION_PENDING && !world.c->principal);
}

/* ---- steps ---- */

static void put(const void *bytes, uint32_t size_bytes)
{
    if (world.size_bytes + size_bytes > STREAM_BYTES_MAX || !is_open())
        return;
    ssize_t sent = send(world.client, bytes, size_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0)
        return;
    memcpy(world.stream + world.size_bytes, bytes, (size_t)sent);
    world.size_bytes += (uint32_t)sent;
}

static void put_frame(struct input *input, enum step step)
{
    static const int16_t keys[] = {17, 36, 18, 3, 0, 1, 19, 36};
    uint8_t frame[4 + 2 * FRAME_BYTES_MAX], *at = frame + 4;
    uint8_t head = take(input);
    uint32_t body_bytes = take(input);
    if (step != TOKEN) {
        at = mqd_put_be16(at, (uint16_t)keys[head & 7]);
        at = mqd_put_be16(at, head >> 3 & 3);
        at = mqd_put_be32(at, world.count);
        at = mqd_put_be16(at, 0xffff); /* no client id */
    }
    if (step == LARGE)
        body_bytes = FRAME_BYTES_MAX - 20 + body_bytes;
    for (uint32_t i = 0; i < body_bytes; i++)
        *at++ = step == LARGE ? 'x' : take(input);
    mqd_put_be32(frame, (uint32_t)(at - frame - 4));
    uint32_t total = (uint32_t)(at - frame), first = head & 32 ? total / 2 : total;
    put(frame, first);
    if (first < total) {
        run_turns();
        put(frame + first, total - first);
    }
}

static bool pop(struct mqd_descriptor *one, bool *exchange)
{
    if (!world.unanswered_count)
        return false;
    *one = world.unanswered[0];
    *exchange = world.exchange[0];
    world.unanswered_count--;
    memmove(world.unanswered, world.unanswered + 1, world.unanswered_count * sizeof *world.unanswered);
    memmove(world.exchange, world.exchange + 1, world.unanswered_count * sizeof *world.exchange);
    return true;
}

static void answer_plainly(struct input *input)
{
    static const uint16_t flags[] = {0,
                                     0,
                                     0,
                                     MQD_RESPONSE_DISCONNECT,
                                     MQD_RESPONSE_NONE,
                                     MQD_RESPONSE_NONE | MQD_RESPONSE_DISCONNECT,
                                     MQD_RESPONSE_CACHEABLE,
                                     0};
    struct mqd_descriptor one;
    bool exchange;
    uint8_t how = take(input), body[16] = {0};
    if (!pop(&one, &exchange))
        return;
    mqd_put_be16(body + 4, how & 8 ? 58 : 0);
    uint16_t answer_flags = flags[how & 7];
    answer(&one, answer_flags, body, answer_flags & MQD_RESPONSE_NONE ? 0 : how & 16 ? how >> 5 : sizeof body);
}

/* A5: `how` selects whose principal, and its error. */
static void name_principal(struct input *input)
{
    static const uint8_t kinds[] = {MQD_PRINCIPAL_SASL, MQD_PRINCIPAL_TOKEN, MQD_PRINCIPAL_LOCAL, 77};
    struct mqd_descriptor one;
    bool exchange;
    uint8_t how = take(input), wrong = take(input), bytes[sizeof(struct mqd_authenticated) + 600] = {0};
    char name[512] = "User:alice";
    if (how & 1)
        memcpy(name, "User:bob", sizeof "User:bob");
    if (how & 32)
        name[5] = 'm'; /* another user, as long */
    if (how & 2)
        memset(name, 'n', MQD_PRINCIPAL_BYTES_MAX + (how & 4 ? 1 : 0));
    if (!pop(&one, &exchange))
        return;
    uint16_t name_bytes = (uint16_t)strlen(name);
    if (wrong & 1 && wrong & 64)
        name[3] = 0;
    struct mqd_authenticated block = {.size_bytes = wrong & 2 ? (uint16_t)(wrong << 8) : name_bytes,
                                      .kind = kinds[wrong & 4 ? how >> 6 : 0],
                                      .session_ms = how & 8    ? UINT64_MAX
                                                    : how & 16 ? 60000
                                                               : 0};
    memcpy(bytes, &block, sizeof block);
    memcpy(bytes + sizeof block, name, name_bytes);
    uint32_t size_bytes = (uint32_t)sizeof block + name_bytes + 10;
    if (wrong & 8)
        size_bytes = size_bytes * (wrong >> 4) / 16;
    const uint8_t *frame = options.arenas[WORKER] + one.offset;
    if (one.flags & MQD_REQUEST_PRINCIPAL)
        frame += sizeof(struct mqd_request_principal) + world.principal_bytes;
    bool token_is_due = one.flags & MQD_REQUEST_RAW_TOKEN || mqd_get_be16(frame) == 36;
    bool good = token_is_due && block.size_bytes && block.size_bytes <= MQD_PRINCIPAL_BYTES_MAX &&
                sizeof block + block.size_bytes <= size_bytes &&
                (block.kind == MQD_PRINCIPAL_SASL || block.kind == MQD_PRINCIPAL_TOKEN) &&
                !memchr(bytes + sizeof block, 0, block.size_bytes);
    if (good && world.principal_bytes)
        good = world.principal_bytes == block.size_bytes &&
               memcmp(world.principal, bytes + sizeof block, block.size_bytes) == 0;
    bool was_open = is_open();
    answer(&one, MQD_RESPONSE_AUTHENTICATED, bytes, size_bytes);
    if (good && was_open && !world.principal_bytes) {
        memcpy(world.principal, bytes + sizeof block, block.size_bytes);
        world.principal_bytes = block.size_bytes;
    }
    mqd_reactor_turn(r, NULL, 0);
    NEED(good || !is_open());
}

static void acceptor_dies(void)
{
    mqd_endpoint_set_state(options.control, ACCEPTOR, MQD_PROCESS_DEAD, 0);
    mqd_endpoint_close(acceptor);
    NEED(mqd_reactor_endpoint_died(r, ++token, ACCEPTOR) == 0);
    mqd_reactor_turn(r, NULL, 0);
    acceptor = mqd_endpoint_open(options.control, options.links, ACCEPTOR, ENDPOINTS, eventfds);
    mqd_endpoint_set_state(options.control, ACCEPTOR, MQD_PROCESS_RUNNING, getpid());
    world.unanswered_count = 0;
    world.again = true; /* pending requests are sent again, before anything else */
}

static void open_connection(void)
{
    int ends[2];
    NEED(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    uint8_t *stream = world.stream;
    memset(&world, 0, sizeof world);
    world.stream = stream;
    world.client = ends[0];
    world.c = mqd_connection_open(r, ends[1], 1);
    NEED(world.c);
    world.generation = world.c->generation;
    mqd_authentication_begin(r, world.c);
}

static void close_connection(void)
{
    if (is_open())
        mqd_connection_close(r, world.c, "the input is over");
    close(world.client);
    mqd_reactor_turn(r, NULL, 0);
    struct mqd_descriptor one;
    bool exchange;
    while (pop(&one, &exchange)) /* no pending request is left */
        answer(&one, 0, "12345678", 8);
    mqd_reactor_turn(r, NULL, 0);
    uint32_t from;
    while (mqd_endpoint_drain(acceptor, &one, &from, 1) == 1)
        if (one.kind == MQD_LINK_REQUEST)
            answer(&one, 0, "12345678", 8);
    mqd_reactor_turn(r, NULL, 0);
}

static void cause(enum incident what)
{
    struct mqd_descriptor one;
    bool exchange;
    switch (what) {
    case SESSION_ENDS:
        if (is_open() && world.principal_bytes)
            world.c->session_end_ms = 0;
        break;
    case TOO_LATE:
        if (is_open() && !world.principal_bytes)
            world.c->authenticate_by_ms = 0;
        r->housekeeping_ms = 0;
        break;
    case ACCEPTOR_DIES:
        acceptor_dies();
        break;
    case CLIENT_LEAVES:
        close_connection();
        open_connection();
        break;
    case ACCEPTOR_CLOSES:
    case ACCEPTOR_PARKS:
        if (what == ACCEPTOR_PARKS && world.unanswered_count) {
            struct mqd_descriptor parked = {.kind = MQD_LINK_PARKED, .token = world.unanswered[0].token};
            NEED(mqd_endpoint_send(acceptor, WORKER, &parked) == 0);
        } else if (pop(&one, &exchange)) {
            struct mqd_descriptor closed = {.kind = MQD_LINK_CLOSE, .token = one.token};
            NEED(mqd_endpoint_send(acceptor, WORKER, &closed) == 0);
        }
        mqd_endpoint_flush(acceptor);
        break;
    }
}

static void *zeroed(size_t size_bytes)
{
    void *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(memory != MAP_FAILED);
    return memory;
}

static void open_reactor(void)
{
    static const uint8_t boot_id[16] = {1};
    options = (struct mqd_reactor_options){.control = zeroed(mqd_control_size_bytes()),
                                           .links = zeroed(mqd_links_size_bytes(ENDPOINTS)),
                                           .endpoint_count = ENDPOINTS,
                                           .eventfds = eventfds,
                                           .handoff_fd = -1,
                                           .cpu = -1,
                                           .connection_count_max = 16,
                                           .request_bytes_max = ARENA_BYTES / 2,
                                           .heap_bytes_max = 32 << 20,
                                           .inflight_count_max = 8,
                                           .connection_idle_ms_max = 600000,
                                           .fetch_bytes_max = 1 << 20,
                                           .session_count_max = 4,
                                           .sendfile_bytes_min = 8192,
                                           .read_fd_count_max = 4,
                                           .authentication_bytes_max = FRAME_BYTES_MAX,
                                           .authentication_ms_max = 600000};
    options.listener_flags[1] = MQD_LISTENER_FLAG_SASL;
    for (int i = 0; i < ENDPOINTS; i++) {
        options.arenas[i] = zeroed(ARENA_BYTES);
        options.arena_bytes[i] = ARENA_BYTES;
        eventfds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    }
    NEED(mqd_control_format(options.control, mqd_control_size_bytes(), 1, boot_id, 1, 1) == 0);
    NEED(mqd_links_format(options.links, mqd_links_size_bytes(ENDPOINTS), ENDPOINTS) == 0);
    for (uint32_t i = 0; i < ENDPOINTS; i++)
        mqd_endpoint_set_state(options.control, i, MQD_PROCESS_RUNNING, getpid());
    acceptor = mqd_endpoint_open(options.control, options.links, ACCEPTOR, ENDPOINTS, eventfds);
    r = mqd_reactor_create(&options);
    NEED(acceptor && r && mqd_poll_create(&r->poll, MQD_BACKEND_EPOLL, 16) == 0);
    world.stream = malloc(STREAM_BYTES_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, size};
    if (!r)
        open_reactor();
    open_connection();
    run_turns();
    while (input.left) {
        uint8_t what = take(&input);
        uint32_t count = 1u + (what >> 3);
        switch ((enum step)(what & 7)) {
        case BYTES:
            count = count < input.left ? count : (uint32_t)input.left;
            put(input.bytes, count);
            input.bytes += count, input.left -= count;
            break;
        case FRAME:
        case TOKEN:
        case LARGE:
            put_frame(&input, what & 7);
            break;
        case ANSWER:
            answer_plainly(&input);
            break;
        case PRINCIPAL:
            name_principal(&input);
            break;
        case INCIDENT:
            cause((what >> 3) % 6);
            break;
        case NOTHING:
            break;
        }
        run_turns();
    }
    close_connection();
    NEED(r->connection_count == 0 && r->heap_bytes == 0);
    struct mqd_event event;
    while (mqd_reactor_next_event(r, &event))
        mqd_proposal_free(event.proposal);
    return 0;
}
