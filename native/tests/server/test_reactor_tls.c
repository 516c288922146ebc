/* tsan: long */
/* Clients over TLS with both backends: requests and responses, and that invalid clients do not
 * harm others. Listener 0 is plain, listener 1 has TLS. */
#include "mqd_counter_test.h"

#include "mqd_tunnel_test.h"
#include "server/tls/secure.h"

static struct tls_identity broker;

static void set_context(struct bench *b, struct mqd_tls_context *context)
{
    CHECK_OR(context, fprintf(stderr, "%s\n", mqd_error_message()); abort());
    CHECK_EQUAL(mqd_reactor_set_listener_tls(b->reactors[0], ++b->token, SECURE, context), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
}

static void with_tls(struct bench *b)
{
    b->options[0].listener_flags[SECURE] = MQD_LISTENER_FLAG_TLS;
    b->log_options.max_message_bytes = 4 << 20;
    b->log_options.segment_bytes = 64 << 20;
}

static struct bench *secure_start(int backend)
{
    mqd_secure_handshake_ms = TLS_CONNECT_MS; /* a busy machine takes its time */
    struct bench *b = bench_start(backend, with_tls);
    broker = tls_identity("localhost");
    set_context(b, tls_context(&broker));
    return b;
}

static void secure_stop(struct bench *b)
{
    tls_identity_free(&broker);
    bench_stop(b);
}

static void wait_for_log(struct bench *b, const char *part)
{
    struct mqd_event event;
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    while (test_now_ns() < end_ns) {
        while (mqd_reactor_next_event(b->reactors[0], &event))
            if (event.kind == MQD_EVENT_LOG && strstr(event.text, part))
                return;
        usleep(500);
    }
    TEST_FAIL("no line in the log with: %s", part);
}

static void produce(struct client *client, int32_t partition, uint64_t mark, int32_t body_bytes)
{
    struct part part = {partition, {.mark = mark, .record_count = 1, .body_bytes = body_bytes}};
    struct produced out = client_produce(client, -1, &part, 1);
    CHECK_EQUAL(out.count, 1);
    CHECK_EQUAL(out.error[0], 0);
}

static void fetch_all(struct client *client, int32_t partition, uint32_t count)
{
    static struct fetched fetched;
    uint32_t seen = 0;
    while (seen < count) {
        struct fetch_position requested = {partition, seen};
        client_fetch(client, (struct fetch){.bytes_min = 1, .bytes_max = 8 << 20, .session_epoch = -1}, &requested, 1,
                     &fetched);
        CHECK(fetched.batch_count > 0);
        for (uint32_t i = 0; i < fetched.batch_count; i++, seen++)
            CHECK_EQUAL(fetched.batches[i].mark, seen + 1);
    }
}

static void served(struct bench *b)
{
    struct tunnel *tunnel = tunnel_open(b, 0);
    produce(&tunnel->client, 1, 1, 0); /* a partition of worker 1, which nothing else reads */
    tunnel_close(tunnel);
}

/* ---- tests ---- */

BOTH(records_are_produced_and_fetched)
{
    if (!tls_works())
        return;
    static const int32_t bodies[] = {0, 20, 5000, 16000, 16384, 70000, 300000, 1500000};
    for (int version = 0x303; version <= 0x304; version++) {
        struct bench *b = secure_start(backend);
        struct tunnel *tunnel = tunnel_open(b, version);
        uint32_t count = sizeof bodies / sizeof *bodies;
        for (uint32_t i = 0; i < count; i++)
            produce(&tunnel->client, 0, i + 1, bodies[i]);
        fetch_all(&tunnel->client, 0, count);
        tunnel_close(tunnel);
        CHECK(connections_left(b, 0));
        secure_stop(b);
    }
}

BOTH(single_bytes)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tunnel *tunnel = tunnel_open(b, 0);
    __atomic_store_n(&tunnel->one_by_one, true, __ATOMIC_SEQ_CST); /* a record for each byte */
    produce(&tunnel->client, 0, 1, 3000);
    fetch_all(&tunnel->client, 0, 1);
    tunnel_close(tunnel);
    secure_stop(b);
}

BOTH(a_long_poll_is_answered)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tunnel *waiting = tunnel_open(b, 0), *producer = tunnel_open(b, 0);
    struct frame frame = {0};
    struct fetch_position requested = {0, 0};
    put_fetch(&frame,
              (struct fetch){
                  .correlation_id = 1, .wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
              &requested, 1);
    CHECK(client_send(&waiting->client, &frame));
    frame_free(&frame);
    produce(&producer->client, 0, 1, 100000);
    static struct fetched fetched;
    CHECK_EQUAL(client_receive(&waiting->client), 1);
    take_fetched(&waiting->client, &fetched);
    CHECK_EQUAL(fetched.batch_count, 1);
    tunnel_close(waiting);
    tunnel_close(producer);
    secure_stop(b);
}

BOTH(a_slow_reader_gets_everything_and_delays_no_other)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tunnel *slow = tunnel_open(b, 0);
    static struct fetched fetched;
    for (uint32_t i = 0; i < 4; i++)
        produce(&slow->client, 0, i + 1, 900000);
    struct frame frame = {0};
    struct fetch_position requested = {0, 0};
    for (int32_t i = 0; i < 8; i++)
        put_fetch(&frame,
                  (struct fetch){.correlation_id = i, .bytes_min = 1, .bytes_max = 8 << 20, .session_epoch = -1},
                  &requested, 1);
    CHECK(client_send(&slow->client, &frame));
    frame_free(&frame);
    wait_for_count(b, MQD_COUNT_BYTES_OUT, 1 << 20);
    served(b);
    for (int32_t i = 0; i < 8; i++) { /* 29 MB, more than sockets hold */
        CHECK_EQUAL(client_receive(&slow->client), 1);
        take_fetched(&slow->client, &fetched);
        CHECK_EQUAL(fetched.correlation_id, i);
        CHECK_EQUAL(fetched.batch_count, 4);
    }
    tunnel_close(slow);
    CHECK(connections_left(b, 0));
    secure_stop(b);
}

BOTH(key_updates_under_load)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tunnel *tunnel = tunnel_open(b, 0x304);
    for (uint32_t i = 0; i < 30; i++) {
        __atomic_add_fetch(&tunnel->key_updates, 3, __ATOMIC_SEQ_CST);
        produce(&tunnel->client, 0, i + 1, (int32_t)(i * 7000));
    }
    __atomic_add_fetch(&tunnel->key_updates, 1000, __ATOMIC_SEQ_CST);
    fetch_all(&tunnel->client, 0, 30);
    tunnel_close(tunnel);
    secure_stop(b);
}

BOTH(a_client_that_renegotiates_harms_itself_alone)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tls_client client = tls_client(client_open_by(b, 0, SECURE, -1).fd, 0x303);
    CHECK(tls_client_connect(&client));
    for (int i = 0; i < 100; i++) {
        TLS_CALL(int, SSL_renegotiate, (SSL *), client.ssl);
        if (openssl.SSL_do_handshake(client.ssl) != 1)
            break;
    }
    openssl.ERR_clear_error();
    served(b);
    close(client.fd);
    tls_client_free(&client);
    CHECK(connections_left(b, 0));
    secure_stop(b);
}

BOTH(plain_text_on_a_tls_listener_is_named)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct client client = client_open_by(b, 0, SECURE, -1);
    struct part part = {0, {.mark = 1, .record_count = 1}};
    struct frame frame = {0};
    put_produce(&frame, 1, -1, 1000, &part, 1);
    CHECK(client_send(&client, &frame));
    CHECK_EQUAL(client_receive(&client), 0);
    wait_for_log(b, "plain text on a TLS listener");
    CHECK_EQUAL(mqd_partition_log_end_offset(b->partitions[0]), 0);
    frame_free(&frame);
    client_close(&client);
    served(b);
    secure_stop(b);
}

BOTH(tls_on_a_plain_listener_is_named)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tls_client client = tls_client(client_open_by(b, 0, PLAIN, -1).fd, 0);
    CHECK(!tls_client_connect(&client));
    wait_for_log(b, "TLS on a plain-text listener");
    close(client.fd);
    tls_client_free(&client);
    secure_stop(b);
}

BOTH(half_open_handshakes_end_and_delay_no_other)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    mqd_secure_handshake_ms = 1500;
    static const uint8_t hello[] = {22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3};
    struct client half[300];
    for (int i = 0; i < 300; i++) {
        half[i] = client_open_by(b, 0, SECURE, -1);
        CHECK(send(half[i].fd, hello, (size_t)i % (sizeof hello + 1), MSG_NOSIGNAL) >= 0);
    }
    wait_for_count(b, MQD_COUNT_CONNECTIONS_ACCEPTED, 300);
    mqd_secure_handshake_ms = TLS_CONNECT_MS; /* for the one that is served beside them */
    served(b);
    wait_for_log(b, "the TLS handshake did not end in time");
    CHECK(connections_left(b, 0));
    for (int i = 0; i < 300; i++)
        client_close(&half[i]);
    secure_stop(b);
}

BOTH(garbage_and_clients_that_leave)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    uint64_t seed = 7;
    for (int i = 0; i < 300; i++) {
        struct client client = client_open_by(b, 0, SECURE, -1);
        uint8_t bytes[600];
        for (uint32_t at = 0; at < sizeof bytes; at++)
            bytes[at] = (uint8_t)test_random(&seed);
        bytes[0] = 22, bytes[1] = 3, bytes[2] = (uint8_t)(i % 5); /* looks like a handshake */
        if (i % 2)
            bytes[3] = 2, bytes[4] = 0, bytes[5] = 1;
        CHECK(send(client.fd, bytes, 1 + (size_t)(test_random(&seed) % sizeof bytes), MSG_NOSIGNAL) > 0);
        client_close(&client);
    }
    for (int i = 0; i < 100; i++) { /* leave while the pool computes */
        struct tls_client client = tls_client(client_open_by(b, 0, SECURE, -1).fd, 0);
        int flags = fcntl(client.fd, F_GETFL);
        fcntl(client.fd, F_SETFL, flags | O_NONBLOCK);
        TLS_CALL(int, SSL_connect, (SSL *), client.ssl);
        openssl.ERR_clear_error();
        close(client.fd);
        tls_client_free(&client);
    }
    served(b);
    CHECK(connections_left(b, 0));
    secure_stop(b);
}

BOTH(a_broker_that_stops_during_handshakes)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tls_client clients[40];
    for (int i = 0; i < 40; i++) {
        clients[i] = tls_client(client_open_by(b, 0, SECURE, -1).fd, 0);
        int flags = fcntl(clients[i].fd, F_GETFL);
        fcntl(clients[i].fd, F_SETFL, flags | O_NONBLOCK);
        TLS_CALL(int, SSL_connect, (SSL *), clients[i].ssl);
    }
    openssl.ERR_clear_error();
    secure_stop(b);
    for (int i = 0; i < 40; i++) {
        close(clients[i].fd);
        tls_client_free(&clients[i]);
    }
}

BOTH(a_new_certificate_serves_new_clients)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tunnel *before = tunnel_open(b, 0);
    struct tls_identity next = tls_identity("next.example");
    set_context(b, tls_context(&next));
    produce(&before->client, 0, 1, 100000);
    struct tls_client client = tls_client(client_open_by(b, 0, SECURE, -1).fd, 0);
    CHECK(tls_client_connect(&client));
    X509 *seen = openssl.SSL_get1_peer_certificate(client.ssl);
    CHECK_EQUAL(TLS_CALL(int, X509_cmp, (const X509 *, const X509 *), seen, next.certificate), 0);
    openssl.X509_free(seen);
    close(client.fd);
    tls_client_free(&client);
    fetch_all(&before->client, 0, 1);
    tunnel_close(before);
    tls_identity_free(&next);
    secure_stop(b);
}

BOTH(without_a_certificate_nothing_is_served_in_clear_text)
{
    if (!tls_works())
        return;
    struct bench *b = bench_start(backend, with_tls);
    struct client client = client_open_by(b, 0, SECURE, -1);
    struct part part = {0, {.mark = 1, .record_count = 1}};
    struct frame frame = {0};
    put_produce(&frame, 1, -1, 1000, &part, 1);
    client_send(&client, &frame);
    CHECK_EQUAL(client_receive(&client), 0);
    wait_for_log(b, "its TLS listener has no certificate");
    frame_free(&frame);
    client_close(&client);
    bench_stop(b);
}

/* A listener that requires certificates, whose names the worker's main thread maps: here the
 * test. */
static struct tls_client named_client(struct bench *b, const struct tls_identity *ca, const struct tls_identity *alice)
{
    struct mqd_tls_identity pair = {.chain = tls_file(broker.certificate_pem), .key = tls_file(broker.key_pem)};
    struct mqd_tls_settings settings = tls_settings(&pair, 1);
    settings.client_auth = MQD_TLS_CLIENT_AUTH_REQUIRED;
    settings.trust = tls_file(ca->certificate_pem);
    set_context(b, mqd_tls_context_create(&settings));
    struct tls_client client = tls_client(client_open_by(b, 0, SECURE, -1).fd, 0);
    tls_client_use(&client, alice);
    CHECK_OR(tls_client_connect(&client), abort());
    return client;
}

static struct mqd_event wait_for_name(struct bench *b)
{
    struct mqd_event event = {0};
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    while (event.kind != MQD_EVENT_TLS_NAME && test_now_ns() < end_ns)
        if (!mqd_reactor_next_event(b->reactors[0], &event))
            usleep(500);
    CHECK_OR(event.kind == MQD_EVENT_TLS_NAME, abort());
    return event;
}

static void answer_name(struct bench *b, uint64_t connection, const char *principal)
{
    CHECK_EQUAL(mqd_reactor_tls_principal(b->reactors[0], ++b->token, connection, principal), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
}

BOTH(a_certificate_names_its_client_before_anything_is_read)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    struct tls_identity ca = tls_identity("ca"), alice = tls_identity_signed("alice", &ca, 1);
    struct tls_client client = named_client(b, &ca, &alice);
    struct frame frame = {0};
    frame_end(&frame, frame_begin(&frame, 10, 1, 77)); /* FindCoordinator: the acceptor's */
    CHECK_EQUAL(openssl.SSL_write(client.ssl, frame.bytes, (int)frame.size_bytes), (int)frame.size_bytes);
    struct mqd_event event = wait_for_name(b);
    CHECK_TEXT(event.text, "CN=alice,O=mqd\\, tests");
    CHECK_EQUAL(event.slot, SECURE);
    struct mqd_descriptor descriptor;
    uint32_t from;
    CHECK(!bench_take(b, ACCEPTOR, &descriptor, &from, 50)); /* it waits for its principal */
    answer_name(b, event.token + 1, "User:mallory");         /* of no connection */
    CHECK(!bench_take(b, ACCEPTOR, &descriptor, &from, 50));
    answer_name(b, event.token, "User:alice");
    descriptor = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    CHECK(descriptor.flags & MQD_REQUEST_PRINCIPAL);
    struct mqd_request_principal block;
    const uint8_t *bytes = b->arenas[0] + descriptor.offset;
    memcpy(&block, bytes, sizeof block);
    CHECK_EQUAL(block.kind, MQD_PRINCIPAL_TLS);
    CHECK_EQUAL(block.size_bytes, 10);
    CHECK(memcmp(bytes + sizeof block, "User:alice", 10) == 0);
    answer_name(b, event.token, "User:mallory"); /* once is enough */
    openssl.SSL_write(client.ssl, frame.bytes, (int)frame.size_bytes);
    close(client.fd);
    tls_client_free(&client);

    client = named_client(b, &ca, &alice);
    CHECK_EQUAL(mqd_reactor_tls_principal(b->reactors[0], ++b->token, wait_for_name(b).token, ""), 0);
    wait_for_log(b, "maps to no principal");
    CHECK(connections_left(b, 0));
    close(client.fd);
    tls_client_free(&client);
    frame_free(&frame);
    tls_identity_free(&ca);
    tls_identity_free(&alice);
    secure_stop(b);
}

/* A chain of certificates that fills the client's receive window more than once. */
static char *long_chain(const struct tls_identity *leaf)
{
    static char comment[2100], text[300000];
    memset(comment, 'c', sizeof comment - 1);
    size_t at = (size_t)snprintf(text, sizeof text, "%s", leaf->certificate_pem);
    for (int i = 0; i < 60; i++) {
        struct tls_identity other = tls_identity_noted("other", comment);
        at += (size_t)snprintf(text + at, sizeof text - at, "%s", other.certificate_pem);
        tls_identity_free(&other);
    }
    return text;
}

BOTH(a_client_that_does_not_read_the_certificates_delays_only_itself)
{
    if (!tls_works())
        return;
    struct bench *b = secure_start(backend);
    int small = 4096;
    setsockopt(b->listener, SOL_SOCKET, SO_SNDBUF, &small, sizeof small); /* accepted sockets inherit it */
    struct mqd_tls_identity pair = {.chain = tls_file(long_chain(&broker)), .key = tls_file(broker.key_pem)};
    struct mqd_tls_settings settings = tls_settings(&pair, 1);
    set_context(b, mqd_tls_context_create(&settings));
    struct tls_client client = tls_client(client_open_by(b, 0, SECURE, -1).fd, 0);
    openssl.SSL_ctrl(client.ssl, SSL_CTRL_SET_MAX_CERT_LIST, 1 << 20, NULL);
    int flags = fcntl(client.fd, F_GETFL);
    fcntl(client.fd, F_SETFL, flags | O_NONBLOCK);
    /* sends ClientHello and reads nothing, however quick the response is */
    int silent[2];
    CHECK(pipe2(silent, O_NONBLOCK | O_CLOEXEC) == 0);
    TLS_CALL(int, SSL_set_rfd, (SSL *, int), client.ssl, silent[0]);
    TLS_CALL(int, SSL_connect, (SSL *), client.ssl);
    TLS_CALL(int, SSL_set_rfd, (SSL *, int), client.ssl, client.fd);
    static const uint8_t change_cipher_spec[] = {20, 3, 3, 0, 1, 1};
    for (int i = 0; i < 20; i++) {
        CHECK(send(client.fd, change_cipher_spec, sizeof change_cipher_spec, MSG_NOSIGNAL) > 0);
        usleep(10000);
    }
    struct client other = client_open(b, 0);
    produce(&other, 1, 1, 0);
    client_close(&other);
    fcntl(client.fd, F_SETFL, flags);
    openssl.ERR_clear_error();
    bool connected = tls_client_connect(&client);
    CHECK(connected);
    close(client.fd);
    close(silent[0]);
    close(silent[1]);
    tls_client_free(&client);
    CHECK(connections_left(b, 0));
    secure_stop(b);
}
