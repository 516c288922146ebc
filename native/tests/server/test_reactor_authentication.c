/* tsan: long */
/* Listeners with SASL: requests allowed before authentication, and the principal of later ones
 * (server/authentication.h). The test is the acceptor. */
#include "base/big_endian.h"
#include "mqd_reactor_test.h"

enum { FIND_COORDINATOR = 10, SASL_HANDSHAKE = 17, API_VERSIONS = 18, CREATE_TOPICS = 19, SASL_AUTHENTICATE = 36 };
enum { PLAIN_LISTENER = 0, SASL_LISTENER = 1, FRAME_BYTES_MAX = 4096, NEVER_MS = 600000, SOON_MS = 300 };

static void sasl(struct bench *b)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        b->options[worker].listener_flags[SASL_LISTENER] = MQD_LISTENER_FLAG_SASL;
        b->options[worker].authentication_bytes_max = FRAME_BYTES_MAX;
        b->options[worker].authentication_ms_max = NEVER_MS;
    }
}

static void sasl_in_a_hurry(struct bench *b)
{
    sasl(b);
    b->options[0].authentication_ms_max = SOON_MS;
}

static struct client sasl_open(struct bench *b)
{
    return client_open_by(b, 0, SASL_LISTENER, -1);
}

static void put_request(struct frame *frame, int16_t api_key, int16_t version, int32_t correlation_id, const char *body)
{
    uint32_t begin = frame_begin(frame, api_key, version, correlation_id);
    put_bytes(frame, body, (uint32_t)strlen(body));
    frame_end(frame, begin);
}

static bool post(struct client *client, int16_t api_key, int16_t version, int32_t correlation_id, const char *body)
{
    struct frame frame = {0};
    put_request(&frame, api_key, version, correlation_id, body);
    bool sent = client_send(client, &frame);
    frame_free(&frame);
    return sent;
}

static bool send_raw(struct client *client, const char *token)
{
    struct frame frame = {0};
    put(&frame, 4, strlen(token));
    put_bytes(&frame, token, (uint32_t)strlen(token));
    bool sent = client_send(client, &frame);
    frame_free(&frame);
    return sent;
}

static struct mqd_descriptor next_auth(struct bench *b)
{
    struct mqd_descriptor one;
    do /* a dead acceptor's requests name its generation */
        one = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    while (one.error != (int32_t)mqd_endpoint_generation(b->control, ACCEPTOR));
    return one;
}

/* Answers with exactly `bytes`, in memory of their own. */
static void answer(struct bench *b, const struct mqd_descriptor *to, uint16_t flags, const void *bytes,
                   uint32_t size_bytes)
{
    static uint64_t at;
    at = (at + 8192) % (1 << 20);
    memcpy(b->arenas[ACCEPTOR] + at, bytes, size_bytes);
    bench_put(
        b, ACCEPTOR, 0,
        (struct mqd_descriptor){
            .kind = MQD_LINK_RESPONSE, .flags = flags, .token = to->token, .offset = at, .size_bytes = size_bytes});
}

/* The response of a Kafka request: correlation id, error, `body`. */
static uint32_t response(uint8_t *at, int32_t correlation_id, int16_t error, const char *body)
{
    uint8_t *end = mqd_put_be16(mqd_put_be32(at, (uint32_t)correlation_id), (uint16_t)error);
    memcpy(end, body, strlen(body));
    return (uint32_t)(end - at) + (uint32_t)strlen(body);
}

static void respond(struct bench *b, const struct mqd_descriptor *request, uint16_t flags, int32_t correlation_id,
                    int16_t error)
{
    uint8_t bytes[64];
    answer(b, request, flags, bytes, response(bytes, correlation_id, error, "body"));
}

static uint8_t proven_by = MQD_PRINCIPAL_SASL; /* the acceptor's result */

static void authenticated(struct bench *b, const struct mqd_descriptor *request, int32_t correlation_id,
                          const char *principal, uint64_t session_ms)
{
    uint8_t bytes[512];
    uint32_t block_bytes = authenticated_put(bytes, principal, proven_by, session_ms);
    answer(b, request, MQD_RESPONSE_AUTHENTICATED, bytes,
           block_bytes + response(bytes + block_bytes, correlation_id, 0, "body"));
}

static bool is_answered(struct client *client, int32_t correlation_id, int16_t error)
{
    return client_receive(client) == 1 && client->reply_bytes == 10 && (int32_t)take(client, 4) == correlation_id &&
           (int16_t)take(client, 2) == error && memcmp(client->reply + 6, "body", 4) == 0;
}

static bool is_raw(struct client *client, const char *token)
{
    return client_receive(client) == 1 && client->reply_bytes == strlen(token) &&
           memcmp(client->reply, token, strlen(token)) == 0;
}

static bool served(struct client *client)
{
    struct part part = {0, {.mark = 1, .record_count = 1}};
    return client_produce(client, -1, &part, 1).count == 1;
}

/* The broker closes instead of answering a Produce. */
static bool refused(struct client *client)
{
    struct part part = {0, {.mark = 5, .record_count = 1}};
    struct frame frame = {0};
    put_produce(&frame, 1, -1, LIMIT_MS, &part, 1);
    CHECK_OR(client_send(client, &frame), return false);
    frame_free(&frame);
    return client_receive(client) == 0;
}

/* The acceptor gets one more request: from `client`, with `principal` (NULL = none). */
static bool carries(struct bench *b, struct client *client, int32_t number, const char *principal)
{
    CHECK_OR(post(client, FIND_COORDINATOR, 1, number, "frame"), return false);
    struct mqd_descriptor one = next_auth(b);
    const uint8_t *frame = b->arenas[0] + one.offset;
    struct mqd_request_principal block = {0};
    bool same = !(one.flags & MQD_REQUEST_PRINCIPAL) == !principal;
    if (principal && same) {
        memcpy(&block, frame, sizeof block);
        same = block.size_bytes == strlen(principal) && block.kind == proven_by &&
               memcmp(frame + sizeof block, principal, block.size_bytes) == 0;
        frame += sizeof block + block.size_bytes;
    }
    same = same && (int16_t)mqd_get_be16(frame) == FIND_COORDINATOR && (int32_t)mqd_get_be32(frame + 4) == number &&
           frame + 15 == b->arenas[0] + one.offset + one.size_bytes;
    respond(b, &one, 0, number, 0);
    return is_answered(client, number, 0) && same;
}

/* The same for an unauthenticated client, after requests of disconnected clients. */
static bool carries_soon(struct bench *b, struct client *client, int32_t number)
{
    CHECK_OR(post(client, FIND_COORDINATOR, 1, number, "frame"), return false);
    for (;;) {
        struct mqd_descriptor one = next_auth(b);
        const uint8_t *frame = b->arenas[0] + one.offset;
        bool same = !one.flags && (int16_t)mqd_get_be16(frame) == FIND_COORDINATOR && one.a == PLAIN_LISTENER &&
                    (int32_t)mqd_get_be32(frame + 4) == number;
        respond(b, &one, 0, number, 0);
        if (same)
            return is_answered(client, number, 0);
    }
}

static struct client authenticate(struct bench *b, const char *principal, uint64_t session_ms)
{
    struct client client = sasl_open(b);
    CHECK_OR(post(&client, SASL_AUTHENTICATE, 1, 7, "token"), abort());
    struct mqd_descriptor one = next_auth(b);
    authenticated(b, &one, 7, principal, session_ms);
    CHECK_OR(is_answered(&client, 7, 0), abort());
    return client;
}

static void acceptor_dies_and_comes_back(struct bench *b)
{
    mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_DEAD, 0);
    mqd_endpoint_close(b->endpoints[ACCEPTOR]);
    CHECK_EQUAL(mqd_reactor_endpoint_died(b->reactors[0], ++b->token, ACCEPTOR), 0);
    bench_done(b, 0, b->token);
    b->endpoints[ACCEPTOR] = mqd_endpoint_open(b->control, b->links, ACCEPTOR, ENDPOINTS, b->eventfds);
    mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_RUNNING, getpid());
}

BOTH(nothing_but_the_exchange_passes_before_a_principal_is_proven)
{
    struct bench *b = bench_start(backend, sasl);
    for (int16_t api_key = 0; api_key < 100; api_key++) {
        if (api_key == API_VERSIONS || api_key == SASL_HANDSHAKE || api_key == SASL_AUTHENTICATE)
            continue;
        struct client client = sasl_open(b);
        CHECK(post(&client, api_key, 3, 1, "................................"));
        CHECK_EQUAL(client_receive(&client), 0);
        client_close(&client);
    }
    struct client produces = sasl_open(b), plain = client_open(b, 0), host = client_open_by(b, 0, SASL_LISTENER, 3);
    CHECK(refused(&produces));
    CHECK(carries(b, &plain, 50, NULL)); /* and the acceptor has seen none of the others */
    CHECK(served(&plain));
    CHECK(served(&host)); /* it has proven itself to the acceptor */
    client_close(&produces), client_close(&plain), client_close(&host);
    bench_stop(b);
}

BOTH(a_proven_principal_goes_with_every_request)
{
    struct bench *b = bench_start(backend, sasl);
    struct client client = sasl_open(b);
    CHECK(post(&client, SASL_HANDSHAKE, 1, 1, "SCRAM"));
    struct mqd_descriptor one = next_auth(b);
    CHECK_EQUAL(one.flags, 0);
    CHECK_EQUAL(one.a, SASL_LISTENER);
    respond(b, &one, 0, 1, 0);
    CHECK(is_answered(&client, 1, 0));
    CHECK(post(&client, SASL_AUTHENTICATE, 1, 2, "first"));
    one = next_auth(b);
    respond(b, &one, 0, 2, 0);
    CHECK(is_answered(&client, 2, 0));
    CHECK(post(&client, SASL_AUTHENTICATE, 1, 3, "second"));
    one = next_auth(b);
    CHECK_EQUAL(one.flags, 0);
    authenticated(b, &one, 3, "User:alice", 0);
    CHECK(is_answered(&client, 3, 0));
    for (int32_t i = 0; i < 30; i++) /* more than an exchange may take */
        CHECK(carries(b, &client, 100 + i, "User:alice"));
    CHECK(served(&client));
    struct client other = authenticate(b, "User:bob", 0);
    CHECK(carries(b, &other, 1, "User:bob"));
    CHECK(carries(b, &client, 2, "User:alice"));
    proven_by = MQD_PRINCIPAL_TOKEN;
    struct client token = authenticate(b, "User:bob", 0);
    CHECK(carries(b, &token, 1, "User:bob"));
    proven_by = MQD_PRINCIPAL_SASL;
    CHECK(carries(b, &other, 2, "User:bob"));
    client_close(&token), client_close(&other), client_close(&client);
    client = sasl_open(b); /* in the place of one of them */
    CHECK(post(&client, FIND_COORDINATOR, 1, 1, "frame"));
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);
    bench_stop(b);
}

/* A client that does not wait for responses: a frame depends on the result of the previous one. */
BOTH(requests_pipelined_after_an_exchange_wait)
{
    struct bench *b = bench_start(backend, sasl);
    for (int proven = 0; proven < 2; proven++) {
        struct client client = sasl_open(b);
        struct part part = {0, {.mark = 5, .record_count = 1}};
        struct frame frame = {0};
        put_request(&frame, SASL_HANDSHAKE, 1, 1, "SCRAM");
        put_request(&frame, SASL_AUTHENTICATE, 1, 2, "token");
        put_produce(&frame, 3, -1, LIMIT_MS, &part, 1);
        CHECK(client_send(&client, &frame));
        frame_free(&frame);
        struct mqd_descriptor one = next_auth(b);
        respond(b, &one, 0, 1, 0);
        CHECK(is_answered(&client, 1, 0));
        one = next_auth(b);
        if (proven)
            authenticated(b, &one, 2, "User:alice", 0);
        else
            respond(b, &one, MQD_RESPONSE_DISCONNECT, 2, 58);
        CHECK(is_answered(&client, 2, proven ? 0 : 58));
        CHECK_EQUAL(client_receive(&client), proven);
        if (proven) {
            struct produced out = take_produced(&client);
            CHECK_EQUAL(out.correlation_id, 3);
            CHECK_EQUAL(out.base_offset[0], 0); /* nothing of the refused client was written */
        }
        client_close(&client);
    }
    bench_stop(b);
}

BOTH(bare_tokens_follow_the_old_handshake)
{
    struct bench *b = bench_start(backend, sasl);
    struct client client = sasl_open(b);
    const char *tokens[] = {"first", "", "abc"};
    CHECK(post(&client, SASL_HANDSHAKE, 0, 1, "PLAIN"));
    struct mqd_descriptor one = next_auth(b);
    respond(b, &one, 0, 1, 0);
    CHECK(is_answered(&client, 1, 0));
    for (int i = 0; i < 3; i++) {
        CHECK(send_raw(&client, tokens[i]));
        one = next_auth(b);
        CHECK_EQUAL(one.flags, MQD_REQUEST_RAW_TOKEN);
        CHECK_EQUAL(one.size_bytes, strlen(tokens[i]));
        CHECK(memcmp(b->arenas[0] + one.offset, tokens[i], one.size_bytes) == 0);
        if (i < 2) {
            answer(b, &one, 0, tokens[1 - i], (uint32_t)strlen(tokens[1 - i]));
            CHECK(is_raw(&client, tokens[1 - i]));
        }
    }
    uint8_t bytes[64];
    answer(b, &one, MQD_RESPONSE_AUTHENTICATED, bytes, authenticated_put(bytes, "User:carol", proven_by, 0));
    CHECK(is_raw(&client, ""));
    CHECK(carries(b, &client, 9, "User:carol"));
    CHECK(served(&client));
    client_close(&client);

    client = sasl_open(b); /* refused: no token follows */
    CHECK(post(&client, SASL_HANDSHAKE, 0, 1, "NONE"));
    one = next_auth(b);
    respond(b, &one, 0, 1, 33);
    CHECK(is_answered(&client, 1, 33));
    CHECK(send_raw(&client, "abc"));
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);

    client = sasl_open(b); /* a wrong token has no response */
    CHECK(post(&client, SASL_HANDSHAKE, 0, 1, "PLAIN"));
    one = next_auth(b);
    respond(b, &one, 0, 1, 0);
    CHECK(is_answered(&client, 1, 0));
    CHECK(send_raw(&client, "wrong"));
    one = next_auth(b);
    bench_put(b, ACCEPTOR, 0,
              (struct mqd_descriptor){
                  .kind = MQD_LINK_RESPONSE, .flags = MQD_RESPONSE_NONE | MQD_RESPONSE_DISCONNECT, .token = one.token});
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);
    bench_stop(b);
}

BOTH(an_exchange_is_bounded_in_number_and_size)
{
    struct bench *b = bench_start(backend, sasl);
    struct client client = sasl_open(b);
    for (int32_t i = 0; i < 10; i++) {
        CHECK(post(&client, SASL_AUTHENTICATE, 1, i, "token"));
        struct mqd_descriptor one = next_auth(b);
        respond(b, &one, 0, i, 0);
        CHECK(is_answered(&client, i, 0));
    }
    CHECK(post(&client, API_VERSIONS, 0, 10, ""));
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);
    char *body = calloc(1, FRAME_BYTES_MAX + 1);
    memset(body, 'x', FRAME_BYTES_MAX - 10); /* what a header has */
    for (int more = 0; more < 2; more++) {
        client = sasl_open(b);
        body[FRAME_BYTES_MAX - 10] = more ? 'x' : 0;
        CHECK(post(&client, SASL_AUTHENTICATE, 1, 5, body));
        if (!more) {
            struct mqd_descriptor one = next_auth(b);
            CHECK_EQUAL(one.size_bytes, FRAME_BYTES_MAX);
            authenticated(b, &one, 5, "User:alice", 0);
            CHECK(is_answered(&client, 5, 0));
            CHECK(post(&client, CREATE_TOPICS, 1, 6, body));
            CHECK(post(&client, CREATE_TOPICS, 1, 7, body));
            one = next_auth(b);
        } else {
            CHECK_EQUAL(client_receive(&client), 0);
        }
        client_close(&client);
    }
    free(body);
    bench_stop(b);
}

BOTH(an_exchange_that_takes_too_long_ends)
{
    struct bench *b = bench_start(backend, sasl_in_a_hurry);
    struct client proven = authenticate(b, "User:alice", 0), silent = sasl_open(b), slow = sasl_open(b);
    CHECK(post(&slow, SASL_AUTHENTICATE, 1, 1, "token"));
    CHECK_EQUAL(client_receive(&silent), 0);
    CHECK_EQUAL(client_receive(&slow), 0); /* also while the acceptor has not responded */
    struct mqd_descriptor late = next_auth(b);
    authenticated(b, &late, 1, "User:mallory", 0);
    CHECK(carries(b, &proven, 1, "User:alice"));
    client_close(&proven), client_close(&silent), client_close(&slow);
    bench_stop(b);
}

BOTH(a_session_ends_unless_its_client_authenticates_again)
{
    struct bench *b = bench_start(backend, sasl);
    struct client client = authenticate(b, "User:alice", SOON_MS);
    CHECK(carries(b, &client, 1, "User:alice"));
    CHECK(post(&client, SASL_HANDSHAKE, 1, 2, "SCRAM"));
    struct mqd_descriptor one = next_auth(b);
    CHECK_EQUAL(one.flags, MQD_REQUEST_PRINCIPAL);
    respond(b, &one, 0, 2, 0);
    CHECK(is_answered(&client, 2, 0));
    usleep((SOON_MS + 50) * 1000); /* it is over */
    CHECK(post(&client, SASL_AUTHENTICATE, 1, 3, "token"));
    one = next_auth(b);
    authenticated(b, &one, 3, "User:alice", SOON_MS);
    CHECK(is_answered(&client, 3, 0));
    CHECK(carries(b, &client, 4, "User:alice"));
    usleep((SOON_MS + 50) * 1000);
    CHECK(refused(&client));
    client_close(&client);

    client = authenticate(b, "User:alice", NEVER_MS); /* as another one */
    CHECK(post(&client, SASL_AUTHENTICATE, 1, 3, "token"));
    one = next_auth(b);
    authenticated(b, &one, 3, "User:alicia", NEVER_MS);
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);

    client = authenticate(b, "User:alice", NEVER_MS); /* bare tokens would be taken for requests */
    CHECK(post(&client, SASL_HANDSHAKE, 0, 3, "PLAIN"));
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);

    client = authenticate(b, "User:alice", UINT64_MAX); /* beyond the clock */
    CHECK(carries(b, &client, 1, "User:alice"));
    client_close(&client);
    bench_stop(b);
}

BOTH(the_acceptor_dies_and_its_successor_learns_the_principals)
{
    struct bench *b = bench_start(backend, sasl);
    struct client proven = authenticate(b, "User:alice", 0), halfway = sasl_open(b), raw = sasl_open(b);
    CHECK(post(&raw, SASL_HANDSHAKE, 0, 1, "PLAIN"));
    struct mqd_descriptor one = next_auth(b);
    respond(b, &one, 0, 1, 0);
    CHECK(is_answered(&raw, 1, 0));
    CHECK(post(&proven, FIND_COORDINATOR, 1, 5, "frame"));
    next_auth(b);
    CHECK(post(&halfway, SASL_AUTHENTICATE, 1, 6, "second"));
    struct mqd_descriptor lost = next_auth(b);
    CHECK(send_raw(&raw, "abc"));
    next_auth(b);
    acceptor_dies_and_comes_back(b);
    struct mqd_descriptor again[3] = {0}; /* by their flags: connections take turns */
    for (int i = 0; i < 3; i++) {
        one = next_auth(b);
        CHECK(one.flags < 3 && again[one.flags].kind == 0);
        again[one.flags] = one;
    }
    one = again[MQD_REQUEST_PRINCIPAL];
    CHECK(memcmp(b->arenas[0] + one.offset + sizeof(struct mqd_request_principal), "User:alice", 10) == 0);
    respond(b, &one, 0, 5, 0);
    CHECK(is_answered(&proven, 5, 0));
    one = again[0];
    CHECK_EQUAL((int32_t)mqd_get_be32(b->arenas[0] + one.offset + 4), 6);
    authenticated(b, &lost, 6, "User:mallory", 0); /* the dead one's */
    respond(b, &one, MQD_RESPONSE_DISCONNECT, 6, 34);
    CHECK(is_answered(&halfway, 6, 34));
    CHECK_EQUAL(client_receive(&halfway), 0);
    one = again[MQD_REQUEST_RAW_TOKEN];
    uint8_t bytes[64];
    answer(b, &one, MQD_RESPONSE_AUTHENTICATED, bytes, authenticated_put(bytes, "User:bob", proven_by, 0));
    CHECK(is_raw(&raw, ""));
    CHECK(carries(b, &raw, 1, "User:bob"));
    client_close(&proven), client_close(&halfway), client_close(&raw);
    bench_stop(b);
}

/* Refused tokens get delayed responses; their bytes are not kept meanwhile: nothing is resent. */
BOTH(a_token_that_waits_for_its_response_is_not_kept)
{
    struct bench *b = bench_start(backend, sasl);
    struct client client = sasl_open(b), other = sasl_open(b);
    CHECK(post(&client, SASL_HANDSHAKE, 1, 1, "PLAIN"));
    struct mqd_descriptor one = next_auth(b);
    respond(b, &one, 0, 1, 0);
    CHECK(is_answered(&client, 1, 0));
    CHECK(post(&client, SASL_AUTHENTICATE, 1, 2, "token"));
    one = next_auth(b);
    bench_put(b, ACCEPTOR, 0, (struct mqd_descriptor){.kind = MQD_LINK_PARKED, .token = one.token});
    CHECK(post(&other, SASL_HANDSHAKE, 1, 3, "PLAIN")); /* everything sent before has arrived */
    struct mqd_descriptor next = next_auth(b);
    respond(b, &next, 0, 3, 0);
    CHECK(is_answered(&other, 3, 0));
    acceptor_dies_and_comes_back(b); /* there is nothing that could be sent again */
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client), client_close(&other);
    bench_stop(b);
}

/* The acceptor is trusted, but its messages are checked: an invalid principal opens nothing. */
BOTH(a_response_with_an_impossible_principal_ends_the_connection)
{
    struct bench *b = bench_start(backend, sasl);
    char longest[MQD_PRINCIPAL_BYTES_MAX + 2] = {0};
    memset(longest, 'x', MQD_PRINCIPAL_BYTES_MAX);
    struct client client = authenticate(b, longest, 0);
    CHECK(carries(b, &client, 1, longest));
    client_close(&client);
    longest[MQD_PRINCIPAL_BYTES_MAX] = 'x';
    const char *principals[] = {"", longest, "User:alice", "User:alice", "User:alice"};
    for (int i = 0; i < 5; i++) {
        uint8_t bytes[512] = {0};
        client = sasl_open(b);
        CHECK(post(&client, i == 3 ? SASL_HANDSHAKE : SASL_AUTHENTICATE, 1, 7, "token"));
        struct mqd_descriptor one = next_auth(b);
        proven_by = i == 4 ? MQD_PRINCIPAL_LOCAL : MQD_PRINCIPAL_SASL; /* a client of SASL cannot have the former */
        uint32_t block_bytes = authenticated_put(bytes, principals[i], proven_by, 0);
        proven_by = MQD_PRINCIPAL_SASL;
        answer(b, &one, MQD_RESPONSE_AUTHENTICATED, bytes, i == 2 ? block_bytes - 1 : block_bytes + 10);
        CHECK_EQUAL(client_receive(&client), 0);
        client_close(&client);
    }
    client = sasl_open(b); /* shorter than the block itself */
    CHECK(post(&client, SASL_AUTHENTICATE, 1, 7, "token"));
    struct mqd_descriptor one = next_auth(b);
    answer(b, &one, MQD_RESPONSE_AUTHENTICATED, "12345678", 8);
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);
    client = client_open(b, 0); /* where nothing is to be proven */
    CHECK(post(&client, SASL_AUTHENTICATE, 1, 7, "token"));
    one = next_auth(b);
    authenticated(b, &one, 7, "User:alice", 0);
    CHECK_EQUAL(client_receive(&client), 0);
    client_close(&client);
    bench_stop(b);
}

BOTH(a_listener_that_the_worker_does_not_know_is_refused)
{
    struct bench *b = bench_start(backend, sasl);
    struct client client = client_open_by(b, 0, MQD_LISTENER_COUNT_MAX, -1), last = client_open_by(b, 0, 63, -1);
    CHECK_EQUAL(client_receive(&client), 0);
    CHECK(served(&last));
    client_close(&client), client_close(&last);
    bench_stop(b);
}

/* ---- random ---- */

/* A frame that starts like one of the exchange, or like any other; or random bytes. */
static void put_random(struct frame *frame, uint64_t *seed)
{
    static const int16_t keys[] = {SASL_HANDSHAKE, SASL_AUTHENTICATE, API_VERSIONS, 0, 1, FIND_COORDINATOR, -1};
    uint32_t size_bytes = (uint32_t)(test_random(seed) % 60), begin = frame->size_bytes;
    if (test_random(seed) % 4) {
        put(frame, 4, test_random(seed) % 8 ? size_bytes : test_random(seed));
        if (size_bytes >= 10)
            put(frame, 2, (uint16_t)keys[test_random(seed) % 7]), put(frame, 2, test_random(seed) % 3),
                put(frame, 4, test_random(seed)), put(frame, 2, 0xffff);
    }
    while (frame->size_bytes < begin + size_bytes + 4)
        put(frame, 1, test_random(seed));
}

/* Responses of the acceptor, including impossible ones: a principal for the wrong request,
 * truncated blocks, success and the end in one response. */
static void answer_at_random(struct bench *b, const struct mqd_descriptor *one, uint64_t *seed)
{
    uint8_t bytes[128];
    uint32_t block_bytes = authenticated_put(bytes, "User:alice", proven_by, test_random(seed) % 3);
    uint32_t size_bytes = block_bytes + response(bytes + block_bytes, 1, test_random(seed) % 2 ? 0 : 58, "body");
    uint16_t flags = test_random(seed) % 3
                         ? 0
                         : (uint16_t)(test_random(seed) &
                                      (MQD_RESPONSE_AUTHENTICATED | MQD_RESPONSE_DISCONNECT | MQD_RESPONSE_NONE));
    uint32_t from = flags & MQD_RESPONSE_AUTHENTICATED ? 0 : block_bytes;
    if (test_random(seed) % 8 == 0)
        size_bytes = from + (uint32_t)(test_random(seed) % (size_bytes - from));
    answer(b, one, flags, bytes + from, flags & MQD_RESPONSE_NONE ? 0 : size_bytes - from);
}

/* Any bytes in any pieces: the others are served, and before authentication the acceptor gets
 * only the exchange. */
BOTH(random_bytes_open_nothing)
{
    struct bench *b = bench_start(backend, sasl);
    struct client other = client_open(b, 0);
    uint64_t seed = (uint64_t)backend + 5;
    for (int round = 0; round < (test_long() ? 20000 : 400); round++) {
        struct client client = sasl_open(b);
        struct frame frame = {0};
        bool proven = false;
        for (uint64_t count = 1 + test_random(&seed) % 4; count; count--)
            put_random(&frame, &seed);
        for (uint32_t at = 0; at < frame.size_bytes;) {
            uint32_t part = 1 + (uint32_t)(test_random(&seed) % frame.size_bytes);
            part = part < frame.size_bytes - at ? part : frame.size_bytes - at;
            if (send(client.fd, frame.bytes + at, part, MSG_NOSIGNAL) < 0)
                break;
            at += part;
            struct mqd_descriptor one;
            uint32_t from;
            while (bench_take(b, ACCEPTOR, &one, &from, 2)) {
                if (one.kind != MQD_LINK_REQUEST)
                    continue;
                int16_t api_key = (int16_t)mqd_get_be16(b->arenas[0] + one.offset);
                proven = proven || one.flags & MQD_REQUEST_PRINCIPAL;
                CHECK(proven || one.flags & MQD_REQUEST_RAW_TOKEN || api_key == SASL_HANDSHAKE ||
                      api_key == SASL_AUTHENTICATE || api_key == API_VERSIONS);
                answer_at_random(b, &one, &seed);
            }
        }
        frame_free(&frame);
        client_close(&client);
        if (round % 50 == 0)
            CHECK(carries_soon(b, &other, round));
    }
    client_close(&other);
    bench_stop(b);
}
