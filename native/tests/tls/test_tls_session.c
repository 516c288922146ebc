/* One connection without a reactor: the broker's side is stepped here, the client's is OpenSSL
 * in the same thread. */
#include "mqd_test.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>

#include "mqd_tls_test.h"
#include "tls/session.h"

struct session {
    struct mqd_tls *tls;
    struct tls_client client;
    int fds[2];
    int broker, peer; /* of the handshakes: 1 established, -1 failed */
    uint8_t scratch[MQD_TLS_SCRATCH_BYTES];
};

static struct session *session_open(struct mqd_tls_context *context, int version)
{
    struct session *s = calloc(1, sizeof *s);
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, s->fds) == 0, abort());
    s->tls = mqd_tls_create(context, s->fds[0]);
    s->client = tls_client(s->fds[1], version);
    return s;
}

static void session_close(struct session *s)
{
    mqd_tls_free(s->tls);
    tls_client_free(&s->client);
    close(s->fds[0]);
    close(s->fds[1]);
    free(s);
}

static void shake_hands(struct session *s)
{
    for (int i = 0; i < 100 && (s->broker == 0 || s->peer == 0); i++) {
        if (s->peer == 0) {
            int n = TLS_CALL(int, SSL_connect, (SSL *), s->client.ssl);
            int error = n == 1 ? 0 : openssl.SSL_get_error(s->client.ssl, n);
            s->peer = n == 1 ? 1 : error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? 0 : -1;
            openssl.ERR_clear_error();
        }
        ssize_t got = s->broker == 0 ? mqd_tls_receive(s->tls) : 0;
        if (got > 0) {
            s->broker = mqd_tls_handshake(s->tls);
            mqd_tls_flush(s->tls);
        } else if (got < 0) {
            s->broker = -1;
        }
    }
}

/* TLS 1.3: a client learns that it is refused when it reads. */
static int client_read(struct session *s, void *bytes, int size_bytes)
{
    int n = openssl.SSL_read(s->client.ssl, bytes, size_bytes);
    openssl.ERR_clear_error();
    return n;
}

static bool echoes(struct session *s)
{
    uint8_t bytes[64];
    bool drained;
    if (openssl.SSL_write(s->client.ssl, "ping", 4) != 4 || mqd_tls_read(s->tls, bytes, 64, &drained) != 4 || !drained)
        return false;
    if (memcmp(bytes, "ping", 4) || mqd_tls_flush(s->tls) != 1 ||
        mqd_tls_write(s->tls, (const uint8_t *)"pong", 4, s->scratch) != 0)
        return false;
    return client_read(s, bytes, 64) == 4 && memcmp(bytes, "pong", 4) == 0;
}

static struct mqd_tls_context *context_with(const struct tls_identity *identities, uint32_t count, int client_auth,
                                            const struct tls_identity *ca, const uint8_t *ticket_key)
{
    struct mqd_tls_identity pairs[4] = {0};
    for (uint32_t i = 0; i < count; i++)
        pairs[i] = (struct mqd_tls_identity){.chain = tls_file(identities[i].certificate_pem),
                                             .key = tls_file(identities[i].key_pem)};
    struct mqd_tls_settings settings = tls_settings(pairs, count);
    settings.client_auth = client_auth;
    if (ca)
        settings.trust = tls_file(ca->certificate_pem);
    if (ticket_key)
        memcpy(settings.ticket_key, ticket_key, sizeof settings.ticket_key);
    struct mqd_tls_context *context = mqd_tls_context_create(&settings);
    CHECK_OR(context, fprintf(stderr, "%s\n", mqd_error_message()); abort());
    return context;
}

TEST(the_named_host_selects_the_certificate)
{
    if (!tls_works())
        return;
    struct tls_identity both[2] = {tls_identity("one.example"), tls_identity("two.example")};
    struct mqd_tls_context *context = context_with(both, 2, 0, NULL, NULL);
    static const struct {
        const char *name;
        int identity;
    } cases[] = {{"one.example", 0}, {"two.example", 1}, {"TWO.example", 1}, {"three.example", 0}, {NULL, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct session *s = session_open(context, 0);
        if (cases[i].name)
            openssl.SSL_ctrl(s->client.ssl, SSL_CTRL_SET_TLSEXT_HOSTNAME, 0, (void *)cases[i].name);
        shake_hands(s);
        CHECK_EQUAL(s->broker, 1);
        X509 *seen = openssl.SSL_get1_peer_certificate(s->client.ssl);
        CHECK_EQUAL(TLS_CALL(int, X509_cmp, (const X509 *, const X509 *), seen, both[cases[i].identity].certificate),
                    0);
        openssl.X509_free(seen);
        CHECK(echoes(s));
        session_close(s);
    }
    mqd_tls_context_free(context);
    tls_identity_free(&both[0]);
    tls_identity_free(&both[1]);
}

static struct session *with_certificate(struct mqd_tls_context *context, const struct tls_identity *identity,
                                        int version)
{
    struct session *s = session_open(context, version);
    if (identity)
        tls_client_use(&s->client, identity);
    shake_hands(s);
    return s;
}

TEST(certificates_of_clients)
{
    if (!tls_works())
        return;
    struct tls_identity ca = tls_identity("ca"), other_ca = tls_identity("ca"), broker = tls_identity("localhost");
    struct tls_identity good = tls_identity_signed("alice", &ca, 1), late = tls_identity_signed("late", &ca, -1),
                        foreign = tls_identity_signed("mallory", &other_ca, 1);
    for (int version = 0x303; version <= 0x304; version++) {
        struct mqd_tls_context *required = context_with(&broker, 1, MQD_TLS_CLIENT_AUTH_REQUIRED, &ca, NULL);
        char name[64];
        struct session *s = with_certificate(required, &good, version);
        CHECK_EQUAL(s->broker, 1);
        uint32_t length = mqd_tls_peer_name(s->tls, name, sizeof name);
        CHECK(length < sizeof name);
        name[length] = 0;
        CHECK_TEXT(name, "CN=alice,O=mqd\\, tests");
        CHECK_EQUAL(mqd_tls_peer_name(s->tls, name, 5), 6); /* more than fits */
        CHECK(echoes(s));
        session_close(s);
        s = with_certificate(required, NULL, version);
        CHECK_EQUAL(s->broker, -1);
        CHECK_CONTAINS(mqd_error_message(), "peer did not return a certificate");
        session_close(s);
        s = with_certificate(required, &late, version);
        CHECK_EQUAL(s->broker, -1);
        CHECK_CONTAINS(mqd_error_message(), "certificate has expired");
        session_close(s);
        s = with_certificate(required, &foreign, version);
        CHECK_EQUAL(s->broker, -1);
        CHECK_CONTAINS(mqd_error_message(), "the client's certificate is refused");
        session_close(s);
        mqd_tls_context_free(required);

        struct mqd_tls_context *requested = context_with(&broker, 1, MQD_TLS_CLIENT_AUTH_REQUESTED, &ca, NULL);
        s = with_certificate(requested, NULL, version);
        CHECK_EQUAL(s->broker, 1);
        CHECK_EQUAL(mqd_tls_peer_name(s->tls, name, sizeof name), 0);
        session_close(s);
        s = with_certificate(requested, &foreign, version); /* none is fine, a bad one is not */
        CHECK_EQUAL(s->broker, -1);
        session_close(s);
        mqd_tls_context_free(requested);
    }
    struct tls_identity *all[] = {&ca, &other_ca, &broker, &good, &late, &foreign};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        tls_identity_free(all[i]);
}

/* The session that a client got from `first`, offered to `second`. */
static bool resumes(struct mqd_tls_context *first, struct mqd_tls_context *second, int version)
{
    struct session *s = session_open(first, version);
    shake_hands(s);
    CHECK_OR(s->broker == 1 && echoes(s), return false);
    void *kept = TLS_CALL(void *, SSL_get1_session, (SSL *), s->client.ssl);
    openssl.SSL_shutdown(s->client.ssl);
    session_close(s);
    s = session_open(second, version);
    TLS_CALL(int, SSL_set_session, (SSL *, void *), s->client.ssl, kept);
    shake_hands(s);
    CHECK_OR(s->broker == 1 && echoes(s), return false);
    bool reused = openssl.SSL_session_reused(s->client.ssl);
    TLS_CALL(void, SSL_SESSION_free, (void *), kept);
    session_close(s);
    return reused;
}

TEST(sessions_resume_where_the_key_is_the_same)
{
    if (!tls_works())
        return;
    struct tls_identity broker = tls_identity("localhost");
    uint8_t one[MQD_TLS_TICKET_KEY_BYTES], other[MQD_TLS_TICKET_KEY_BYTES];
    memset(one, 1, sizeof one);
    memset(other, 2, sizeof other);
    struct mqd_tls_context *here = context_with(&broker, 1, 0, NULL, one),
                           *there = context_with(&broker, 1, 0, NULL, one),
                           *elsewhere = context_with(&broker, 1, 0, NULL, other),
                           *never = context_with(&broker, 1, 0, NULL, NULL),
                           *verified = context_with(&broker, 1, MQD_TLS_CLIENT_AUTH_REQUESTED, &broker, one);
    for (int version = 0x303; version <= 0x304; version++) {
        CHECK(resumes(here, here, version));
        CHECK(resumes(here, there, version)); /* another worker */
        CHECK(!resumes(here, elsewhere, version));
        CHECK(!resumes(never, never, version));
        CHECK(!resumes(here, verified, version));
        CHECK(!resumes(verified, verified, version));
    }
    struct mqd_tls_context *all[] = {here, there, elsewhere, never, verified};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        mqd_tls_context_free(all[i]);
    tls_identity_free(&broker);
}

TEST(bytes_the_socket_refuses_wait)
{
    if (!tls_works())
        return;
    struct tls_identity broker = tls_identity("localhost");
    struct mqd_tls_context *context = tls_context(&broker);
    for (int version = 0x303; version <= 0x304; version++) {
        struct session *s = session_open(context, version);
        shake_hands(s);
        static uint8_t bytes[MQD_TLS_WRITE_BYTES_MAX], seen[MQD_TLS_WRITE_BYTES_MAX];
        for (uint32_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)(i * 7);
        uint32_t writes = 0;
        while (!mqd_tls_unsent_bytes(s->tls) && writes < 1000) {
            CHECK_EQUAL(mqd_tls_write(s->tls, bytes, sizeof bytes, s->scratch), 0);
            memset(s->scratch, 0xee, sizeof s->scratch); /* it is the caller's again */
            writes++;
        }
        CHECK(writes > 1 && writes < 1000);
        CHECK_EQUAL(mqd_tls_flush(s->tls), 0);
        for (uint32_t i = 0; i < writes; i++) {
            int64_t end_ns = test_now_ns() + 10000000000ll;
            for (uint32_t got = 0; got < sizeof seen;) {
                CHECK(test_now_ns() < end_ns);
                int n = client_read(s, seen + got, (int)(sizeof seen - got));
                CHECK_OR(n > 0 || mqd_tls_flush(s->tls) >= 0, return);
                got += n > 0 ? (uint32_t)n : 0;
            }
            CHECK(memcmp(seen, bytes, sizeof seen) == 0);
        }
        CHECK_EQUAL(mqd_tls_unsent_bytes(s->tls), 0);
        session_close(s);
    }
    mqd_tls_context_free(context);
    tls_identity_free(&broker);
}

TEST(a_flood_of_key_updates_is_survived)
{
    if (!tls_works())
        return;
    struct tls_identity broker = tls_identity("localhost");
    struct mqd_tls_context *context = tls_context(&broker);
    struct session *s = session_open(context, 0x304);
    shake_hands(s);
    for (int i = 0; i < 1000; i++) {
        openssl.SSL_key_update(s->client.ssl, SSL_KEY_UPDATE_REQUESTED);
        if (openssl.SSL_do_handshake(s->client.ssl) != 1)
            break;
    }
    openssl.ERR_clear_error();
    uint8_t byte;
    bool drained = false;
    uint32_t calls = 0;
    while (!drained && calls++ < 1000)
        CHECK_EQUAL(mqd_tls_read(s->tls, &byte, 1, &drained), 0);
    CHECK(drained);
    CHECK(mqd_tls_unsent_bytes(s->tls) > 0); /* each is answered */
    while (mqd_tls_flush(s->tls) == 0)
        CHECK(client_read(s, &byte, 1) <= 0);
    CHECK(echoes(s));
    session_close(s);
    mqd_tls_context_free(context);
    tls_identity_free(&broker);
}

TEST(ends_of_connections)
{
    if (!tls_works())
        return;
    struct tls_identity broker = tls_identity("localhost");
    struct mqd_tls_context *context = tls_context(&broker);
    uint8_t bytes[16];
    bool drained;
    for (int how = 0; how < 3; how++) {
        struct session *s = session_open(context, 0);
        shake_hands(s);
        CHECK(echoes(s));
        openssl.SSL_write(s->client.ssl, "last", 4);
        if (how == 0) { /* close_notify, then the end of the stream */
            openssl.SSL_shutdown(s->client.ssl);
            shutdown(s->fds[1], SHUT_WR);
        } else if (how == 1) { /* the end of the stream alone */
            shutdown(s->fds[1], SHUT_WR);
        } else { /* no record */
            CHECK(write(s->fds[1], "0123456789", 10) == 10);
        }
        CHECK_EQUAL(mqd_tls_read(s->tls, bytes, sizeof bytes, &drained), 4);
        CHECK(!drained || how == 1); /* the end of the stream is announced by itself */
        CHECK_EQUAL(mqd_tls_read(s->tls, bytes, sizeof bytes, &drained), -1);
        CHECK_EQUAL(errno, how == 2 ? EPROTO : 0);
        CHECK_EQUAL(mqd_tls_read(s->tls, bytes, sizeof bytes, &drained), -1); /* and stays so */
        if (how < 2)                                                          /* the broker may still answer */
            CHECK_EQUAL(mqd_tls_write(s->tls, (const uint8_t *)"answer", 6, s->scratch), 0);
        mqd_tls_close(s->tls);
        session_close(s);
    }
    mqd_tls_context_free(context);
    tls_identity_free(&broker);
}

TEST(the_broker_sends_close_notify)
{
    if (!tls_works())
        return;
    struct tls_identity broker = tls_identity("localhost");
    struct mqd_tls_context *context = tls_context(&broker);
    struct session *s = session_open(context, 0);
    shake_hands(s);
    CHECK(echoes(s));
    mqd_tls_close(s->tls);
    uint8_t byte;
    int n = client_read(s, &byte, 1);
    CHECK_EQUAL(openssl.SSL_get_error(s->client.ssl, n), SSL_ERROR_ZERO_RETURN);
    session_close(s);
    mqd_tls_context_free(context);
    tls_identity_free(&broker);
}

TEST(damaged_records_end_the_connection)
{
    if (!tls_works())
        return;
    struct tls_identity broker = tls_identity("localhost");
    struct mqd_tls_context *context = tls_context(&broker);
    uint64_t seed = 3;
    for (int i = 0; i < 200; i++) {
        struct session *s = session_open(context, i % 2 ? 0x303 : 0x304);
        shake_hands(s);
        uint8_t record[600] = {23, 3, 3, 0, (uint8_t)(test_random(&seed) % 200 + 17)};
        for (uint32_t at = 5; at < sizeof record; at++)
            record[at] = (uint8_t)test_random(&seed);
        if (i % 3 == 0)
            record[0] = (uint8_t)test_random(&seed), record[3] = (uint8_t)test_random(&seed);
        CHECK(write(s->fds[1], record, sizeof record) == sizeof record);
        shutdown(s->fds[1], SHUT_WR);
        uint8_t bytes[64];
        bool drained;
        ssize_t n;
        for (int calls = 0; calls < 100 && (n = mqd_tls_read(s->tls, bytes, sizeof bytes, &drained)) == 0; calls++)
            ;
        CHECK_EQUAL(n, -1);
        mqd_tls_close(s->tls);
        int got = openssl.SSL_read(s->client.ssl, bytes, sizeof bytes);
        if (i % 3) /* bad_record_mac: the client learns what was wrong */
            CHECK_EQUAL(openssl.SSL_get_error(s->client.ssl, got), SSL_ERROR_SSL);
        openssl.ERR_clear_error();
        session_close(s);
    }
    mqd_tls_context_free(context);
    tls_identity_free(&broker);
}

/* ---- between hosts: both sides are ours ---- */

struct hosts {
    struct mqd_tls_context *contexts[2];
    struct mqd_tls *side[2]; /* the client, the server */
    int fds[2];
    int result[2];
    char reason[2][160];
    uint8_t scratch[MQD_TLS_SCRATCH_BYTES];
};

/* Node 1 is the client, node 2 the server, unless `client` or `server` is another node's. */
static struct hosts *hosts_open(const struct tls_identity *ca, const struct tls_identity *client,
                                const struct tls_identity *server, const struct tls_identity *server_ca)
{
    struct hosts *h = calloc(1, sizeof *h);
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, h->fds) == 0, abort());
    h->contexts[0] = tls_hosts_context(client, ca);
    h->contexts[1] = tls_hosts_context(server, server_ca);
    CHECK_OR(h->contexts[0] && h->contexts[1], fprintf(stderr, "%s\n", mqd_error_message()); abort());
    h->side[0] = mqd_tls_create_between_hosts(h->contexts[0], h->fds[0], true, 2);
    h->side[1] = mqd_tls_create_between_hosts(h->contexts[1], h->fds[1], false, 1);
    bool first = true;
    for (int i = 0; i < 20; i++) {
        int side = i % 2;
        if (h->result[side] || (!first && mqd_tls_receive(h->side[side]) <= 0))
            continue;
        first = false;
        h->result[side] = mqd_tls_handshake(h->side[side]);
        if (h->result[side] < 0)
            snprintf(h->reason[side], sizeof h->reason[side], "%s", mqd_error_message());
        mqd_tls_flush(h->side[side]);
    }
    return h;
}

static void hosts_close(struct hosts *h)
{
    for (int side = 0; side < 2; side++) {
        mqd_tls_free(h->side[side]);
        mqd_tls_context_free(h->contexts[side]);
        close(h->fds[side]);
    }
    free(h);
}

TEST(hosts_prove_their_node_ids)
{
    if (!tls_works())
        return;
    struct tls_identity ca = tls_identity("ca"), one = tls_node(&ca, "URI:mqd://node/1", 2),
                        two = tls_node(&ca, "DNS:two.example,URI:spiffe://x/y,URI:mqd://node/2", 2);
    struct hosts *h = hosts_open(&ca, &one, &two, &ca);
    CHECK_EQUAL(h->result[0], 1);
    CHECK_EQUAL(h->result[1], 1);
    char text[96];
    mqd_tls_describe(h->side[0], text, sizeof text);
    CHECK_CONTAINS(text, "TLSv1.3");
    mqd_tls_key_records_max = 10; /* new keys under way, in both directions */
    int small = 0, large = 0, size_bytes;
    for (int i = 0; i < 50; i++) {
        CHECK_EQUAL(mqd_tls_write(h->side[i % 2], (const uint8_t *)"ping", 4, h->scratch), 0);
        CHECK_EQUAL(ioctl(h->fds[!(i % 2)], FIONREAD, &size_bytes), 0);
        small += size_bytes == 26; /* header, text, type, tag */
        large += size_bytes > 26;  /* and the message that announces the key */
        uint8_t bytes[8];
        bool drained;
        CHECK_EQUAL(mqd_tls_read(h->side[!(i % 2)], bytes, sizeof bytes, &drained), 4);
    }
    CHECK_EQUAL(large, 4); /* after 10 records each */
    CHECK_EQUAL(small, 46);
    mqd_tls_key_records_max = 1u << 23;
    hosts_close(h);
    tls_identity_free(&ca), tls_identity_free(&one), tls_identity_free(&two);
}

TEST(hosts_that_cannot_prove_their_node_ids)
{
    if (!tls_works())
        return;
    struct tls_identity ca = tls_identity("ca"), other_ca = tls_identity("ca");
    struct tls_identity good[2] = {tls_node(&ca, "URI:mqd://node/1", 2), tls_node(&ca, "URI:mqd://node/2", 2)};
    const struct {
        const char *names;
        int days;
        const struct tls_identity *issuer;
        const char *reason;
    } cases[] = {
        {"URI:mqd://node/3", 2, &ca, "which has the name mqd://node/"},
        {"URI:mqd://node/12", 2, &ca, "which has the name mqd://node/"},
        {"URI:mqd://node/21", 2, &ca, "which has the name mqd://node/"},
        {"DNS:mqd.node,email:mqd://node/1@x", 2, &ca, "which has the name mqd://node/"},
        {NULL, 2, &ca, "which has the name mqd://node/"},
        {"URI:mqd://node/%d", 0, &ca, "certificate has expired"},
        {"URI:mqd://node/%d", 2, &other_ca, "certificate is refused"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int bad = 0; bad < 2; bad++) {
            char names[64] = "";
            if (cases[i].names)
                snprintf(names, sizeof names, cases[i].names, bad + 1);
            struct tls_identity stranger = tls_node(cases[i].issuer, names[0] ? names : NULL, cases[i].days);
            struct hosts *h = hosts_open(&ca, bad ? &good[0] : &stranger, bad ? &stranger : &good[1], &ca);
            CHECK_EQUAL(h->result[!bad], -1);
            CHECK_CONTAINS(h->reason[!bad], cases[i].reason);
            uint8_t byte;
            bool drained;
            if (bad) { /* the refused server knows it from the handshake, the refused client when it reads */
                CHECK_EQUAL(h->result[1], -1);
                CHECK_CONTAINS(h->reason[1], "the other host refuses");
            } else {
                CHECK_EQUAL(mqd_tls_read(h->side[0], &byte, 1, &drained), -1);
                CHECK_CONTAINS(mqd_error_message(), "the other host refuses");
            }
            hosts_close(h);
            tls_identity_free(&stranger);
        }
    tls_identity_free(&ca), tls_identity_free(&other_ca);
    tls_identity_free(&good[0]), tls_identity_free(&good[1]);
}

/* A listener's context authenticates no node; one between hosts serves no client. */
TEST(contexts_are_not_mixed_up)
{
    if (!tls_works())
        return;
    struct tls_identity ca = tls_identity("ca"), one = tls_node(&ca, "URI:mqd://node/1", 2);
    struct mqd_tls_context *listener = context_with(&one, 1, MQD_TLS_CLIENT_AUTH_REQUIRED, &ca, NULL),
                           *hosts = tls_hosts_context(&one, &ca);
    struct session *s = calloc(1, sizeof *s);
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, s->fds) == 0, abort());
    s->tls = mqd_tls_create_between_hosts(listener, s->fds[0], false, 1);
    s->client = tls_client(s->fds[1], 0);
    tls_client_use(&s->client, &one);
    shake_hands(s);
    CHECK_EQUAL(s->broker, -1);
    session_close(s);
    for (int version = 0x303; version <= 0x304; version++) {
        s = session_open(hosts, version);
        tls_client_use(&s->client, &one);
        shake_hands(s);
        CHECK_EQUAL(s->broker, -1);
        session_close(s);
    }
    mqd_tls_context_free(listener), mqd_tls_context_free(hosts);
    struct mqd_tls_identity pair = {.chain = tls_file(one.certificate_pem), .key = tls_file(one.key_pem)};
    struct mqd_tls_settings settings = tls_settings(&pair, 1);
    settings.between_hosts = 1;
    CHECK(!mqd_tls_context_create(&settings));
    CHECK_CONTAINS(mqd_error_message(), "TLS 1.3");
    tls_identity_free(&ca), tls_identity_free(&one);
}
