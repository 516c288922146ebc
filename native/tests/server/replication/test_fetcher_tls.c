/* tsan: long */
/* A host that follows another over TLS: both reactors are real, and a thread between them is the
 * network, which records the traffic. */
#include "mqd_fetcher_test.h"

#include "mqd_tls_test.h"
#include "server/tls/secure.h"

static const struct role in_step = {
    .leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 2, .in_sync = 6};
static struct tls_identity authority, nodes[3]; /* by node id */

static void use_certificate(struct two *two, uint32_t worker, const struct tls_identity *identity,
                            const struct tls_identity *ca)
{
    struct mqd_tls_context *context = tls_hosts_context(identity, ca);
    CHECK_OR(context, abort());
    CHECK_EQUAL(mqd_reactor_set_listener_tls(two->b->reactors[worker], ++two->b->token, MQD_LISTENER_ID_HOSTS, context),
                0);
    CHECK_EQUAL((worker ? done(two, two->b->token) : bench_done(two->b, 0, two->b->token)).error, 0);
}

static struct two *hosts_start(int backend)
{
    mqd_secure_handshake_ms = TLS_CONNECT_MS;
    struct two *two = two_start(backend, NULL);
    authority = tls_identity("ca");
    nodes[1] = tls_node(&authority, "URI:mqd://node/1", 2);
    nodes[2] = tls_node(&authority, "URI:mqd://node/2", 2);
    use_certificate(two, 0, &nodes[1], &authority);
    use_certificate(two, 1, &nodes[2], &authority);
    follower_open(two, 0);
    assign_follower(two, 0, in_step);
    assign_leader(two, 0, in_step);
    return two;
}

static void hosts_stop(struct two *two)
{
    two_stop(two);
    tls_identity_free(&authority), tls_identity_free(&nodes[1]), tls_identity_free(&nodes[2]);
}

static struct mqd_fetcher_options secure_options(uint32_t lane)
{
    struct mqd_fetcher_options options = fetcher_options();
    options.tls = 1;
    options.lane = lane;
    return options;
}

static uint64_t connect_secure(struct two *two)
{
    return fetcher_put(two, client_open_of(two->b, 0, 0, 2, true).fd, secure_options(MQD_LANE_IN_SYNC));
}

static void replicated(struct two *two, int count, int32_t body_bytes)
{
    struct client client = client_open(two->b, 0);
    for (int i = 0; i < count; i++) {
        struct part part = {0, {.mark = (uint64_t)i, .record_count = 1, .body_bytes = body_bytes}};
        CHECK_OR(client_produce(&client, -1, &part, 1).error[0] == 0, break);
    }
    client_close(&client);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).log_end_offset, positions_of(two, 0).log_end_offset);
}

static void check_same_files(void)
{
    char command[400], path[128];
    follower_path(path, 0);
    snprintf(command, sizeof command, "for f in %s/*.log; do cmp $f %s/quick-0/$(basename $f) || exit 1; done", path,
             log_root);
    CHECK_EQUAL(system(command), 0);
}

/* ---- the network ---- */

struct network {
    int ends[2];           /* to the follower, to the leader */
    int64_t cut_after;     /* bytes from the leader, then the end; -1 = never */
    int64_t damage_at;     /* a byte from the leader that arrives changed; -1 = none */
    uint64_t bytes, clear; /* bytes passed; records that were not TLS, which begin with 20 to 23 */
    pthread_t thread;
};

/* Counts the record headers of TLS in one direction. */
struct framing {
    uint8_t header[5];
    uint32_t header_bytes, left;
};

static void count_records(struct network *network, struct framing *framing, const uint8_t *bytes, ssize_t count)
{
    for (ssize_t i = 0; i < count;) {
        if (framing->left) {
            uint32_t step = framing->left < (uint32_t)(count - i) ? framing->left : (uint32_t)(count - i);
            framing->left -= step;
            i += step;
            continue;
        }
        framing->header[framing->header_bytes++] = bytes[i++];
        if (framing->header_bytes < 5)
            continue;
        framing->header_bytes = 0;
        framing->left = (uint32_t)framing->header[3] << 8 | framing->header[4];
        if (framing->header[0] < 20 || framing->header[0] > 23 || framing->header[1] != 3)
            __atomic_add_fetch(&network->clear, 1, __ATOMIC_SEQ_CST);
    }
}

static void *network_main(void *argument)
{
    struct network *network = argument;
    struct framing framing[2] = {0};
    static _Thread_local uint8_t bytes[65536];
    int64_t from_leader = 0;
    for (;;) {
        struct pollfd fds[2] = {{network->ends[0], POLLIN, 0}, {network->ends[1], POLLIN, 0}};
        poll(fds, 2, -1);
        for (int from = 0; from < 2; from++) {
            if (!fds[from].revents)
                continue;
            ssize_t n = recv(network->ends[from], bytes, sizeof bytes, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN)
                continue;
            bool last = n > 0 && from == 1 && network->cut_after >= 0 && from_leader + n > network->cut_after;
            n = last ? network->cut_after - from_leader : n;
            if (n > 0 && from == 1 && network->damage_at >= from_leader && network->damage_at < from_leader + n)
                bytes[network->damage_at - from_leader] ^= 0x10;
            if (n <= 0 || send(network->ends[!from], bytes, (size_t)n, MSG_NOSIGNAL) != n || last) {
                shutdown(network->ends[0], SHUT_RDWR);
                shutdown(network->ends[1], SHUT_RDWR);
                return NULL;
            }
            from_leader += from ? n : 0;
            count_records(network, &framing[from], bytes, n);
            __atomic_add_fetch(&network->bytes, (uint64_t)n, __ATOMIC_SEQ_CST);
        }
    }
}

static struct network *network_open(struct two *two, int64_t cut_after, int64_t damage_at)
{
    struct network *network = calloc(1, sizeof *network);
    int pair[2];
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, abort());
    network->ends[0] = pair[0];
    network->ends[1] = client_open_of(two->b, 0, 0, 2, true).fd;
    network->cut_after = cut_after;
    network->damage_at = damage_at;
    CHECK_OR(pthread_create(&network->thread, NULL, network_main, network) == 0, abort());
    fetcher_put(two, pair[1], secure_options(MQD_LANE_IN_SYNC));
    return network;
}

static void network_close(struct network *network)
{
    shutdown(network->ends[0], SHUT_RDWR);
    pthread_join(network->thread, NULL);
    close(network->ends[0]);
    close(network->ends[1]);
    free(network);
}

/* ---- tests ---- */

BOTH(records_are_replicated_and_not_in_clear_text)
{
    if (!tls_works())
        return;
    struct two *two = hosts_start(backend);
    mqd_tls_key_records_max = 20; /* with new keys under way */
    struct network *network = network_open(two, -1, -1);
    static const int32_t bodies[] = {10, 5000, 16384, 70000, 900000};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++)
        replicated(two, 8, bodies[i]);
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 40);
    check_same_files();
    CHECK(__atomic_load_n(&network->bytes, __ATOMIC_SEQ_CST) > 8 * 900000);
    CHECK_EQUAL(__atomic_load_n(&network->clear, __ATOMIC_SEQ_CST), 0);
    CHECK_EQUAL(two->observed.ended, 0);
    hosts_stop(two);
    mqd_tls_key_records_max = 1u << 23;
    network_close(network);
}

/* A connection that is cut or damaged at any byte ends; the next one continues from there. */
BOTH(cut_and_damaged)
{
    if (!tls_works())
        return;
    struct two *two = hosts_start(backend);
    struct client client = client_open(two->b, 0);
    struct part part = {0, {.mark = 1, .record_count = 1, .body_bytes = 30000}};
    for (int i = 0; i < 4; i++)
        CHECK_EQUAL(client_produce(&client, 1, &part, 1).error[0], 0);
    static const int64_t at[] = {0, 100, 700, 1000, 20000, 60000};
    for (uint32_t i = 0; i < 2 * sizeof at / sizeof *at; i++) {
        uint32_t ended = two->observed.ended;
        struct network *network = network_open(two, i % 2 ? -1 : at[i / 2], i % 2 ? at[i / 2] : -1);
        UNTIL(two->observed.ended > ended);
        CHECK(two->observed.error == ECONNRESET || two->observed.error == EPROTO || two->observed.error == EPIPE);
        network_close(network);
    }
    connect_secure(two);
    replicated(two, 1, 100);
    check_same_files();
    client_close(&client);
    hosts_stop(two);
}

/* An invalid certificate ends the connection with the reason; with a valid one it catches up. */
static void refused(struct two *two, uint32_t worker, struct tls_identity bad, const char *here, const char *there)
{
    struct client client = client_open(two->b, 0);
    struct part part = {0, {.mark = 1, .record_count = 1}};
    uint32_t ended = two->observed.ended;
    CHECK_EQUAL(mqd_reactor_fetcher_remove(two->b->reactors[1], ++two->b->token, 1, 0, MQD_LANE_IN_SYNC), 0);
    CHECK_EQUAL(done(two, two->b->token).error, 0);
    int64_t before = positions_of(two, FOLLOWED(0)).log_end_offset;
    CHECK_EQUAL(client_produce(&client, 1, &part, 1).error[0], 0);
    use_certificate(two, worker, &bad, &authority);
    connect_secure(two);
    UNTIL(two->observed.ended > ended);
    CHECK_EQUAL(two->observed.error, EPROTO);
    CHECK_CONTAINS(two->observed.text, worker ? there : here); /* the follower's words */
    struct mqd_event event;
    int64_t limit_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    bool logged = false; /* the leader's */
    while (!logged && test_now_ns() < limit_ns)
        if (mqd_reactor_next_event(two->b->reactors[0], &event))
            logged = event.kind == MQD_EVENT_LOG && strstr(event.text, worker ? here : there);
        else
            usleep(500);
    CHECK(logged);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).log_end_offset, before);
    use_certificate(two, worker, &nodes[worker + 1], &authority);
    connect_secure(two);
    UNTIL(positions_of(two, FOLLOWED(0)).log_end_offset == before + 1);
    client_close(&client);
    tls_identity_free(&bad);
}

BOTH(certificates_that_prove_nothing)
{
    if (!tls_works())
        return;
    struct two *two = hosts_start(backend);
    struct tls_identity foreign = tls_identity("ca");
    for (uint32_t worker = 0; worker < 2; worker++) {
        char own[32];
        snprintf(own, sizeof own, "URI:mqd://node/%u", worker + 1);
        refused(two, worker, tls_node(&authority, "URI:mqd://node/7", 2), "it is not node", "the other host refuses");
        refused(two, worker, tls_node(&authority, own, 0), "certificate has expired", "the other host refuses");
        refused(two, worker, tls_node(&foreign, own, 2), "certificate is refused", "the other host refuses");
    }
    tls_identity_free(&foreign);
    hosts_stop(two);
}

/* Both hosts change to another CA while they are connected. */
BOTH(new_certificates_for_new_connections)
{
    if (!tls_works())
        return;
    struct two *two = hosts_start(backend);
    connect_secure(two);
    replicated(two, 1, 100);
    struct tls_identity next = tls_identity("next"), one = tls_node(&next, "URI:mqd://node/1", 2),
                        other = tls_node(&next, "URI:mqd://node/2", 2);
    use_certificate(two, 0, &one, &next);
    replicated(two, 1, 100000);
    use_certificate(two, 1, &other, &next);
    replicated(two, 1, 100);
    CHECK_EQUAL(two->observed.ended, 0);
    connect_secure(two); /* replaces the first one */
    replicated(two, 3, 100000);
    tls_identity_free(&next), tls_identity_free(&one), tls_identity_free(&other);
    hosts_stop(two);
}

BOTH(without_a_certificate_nothing_is_sent_in_clear_text)
{
    if (!tls_works())
        return;
    struct two *two = two_start(backend, NULL);
    struct mqd_fetcher_options options = secure_options(MQD_LANE_IN_SYNC);
    CHECK_EQUAL(mqd_reactor_fetcher_put(two->b->reactors[1], ++two->b->token, client_open_of(two->b, 0, 0, 2, true).fd,
                                        &options),
                0);
    struct mqd_event event = done(two, two->b->token);
    CHECK_EQUAL(event.error, MQD_E_INVALID);
    CHECK_CONTAINS(event.text, "has no certificate yet");
    authority = tls_identity("ca");
    nodes[1] = (struct tls_identity){0};
    nodes[2] = tls_node(&authority, "URI:mqd://node/2", 2);
    use_certificate(two, 1, &nodes[2], &authority);
    connect_secure(two); /* the leader has none */
    UNTIL(two->observed.ended == 1);
    CHECK_CONTAINS(two->observed.text, "the TLS handshake");
    fetcher_put(two, client_open_as(two->b, 0, 2).fd, options); /* the leader speaks plain text */
    UNTIL(two->observed.ended == 2);
    hosts_stop(two);
}

/* A leader that sends nothing, or plain text, in the handshake. */
BOTH(a_leader_that_does_not_shake_hands)
{
    if (!tls_works())
        return;
    struct two *two = hosts_start(backend);
    mqd_secure_handshake_ms = 200;
    int pair[2];
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, abort());
    fetcher_put(two, pair[1], secure_options(MQD_LANE_IN_SYNC));
    uint64_t turns = mqd_counter_read(two->b->control, 1, MQD_COUNT_LOOPS);
    UNTIL(two->observed.ended == 1);
    CHECK_EQUAL(two->observed.error, ETIMEDOUT);
    CHECK_CONTAINS(two->observed.text, "did not end in time");
    CHECK(mqd_counter_read(two->b->control, 1, MQD_COUNT_LOOPS) - turns < 1000); /* it sleeps meanwhile */
    close(pair[0]);
    mqd_secure_handshake_ms = TLS_CONNECT_MS;
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, abort());
    fetcher_put(two, pair[1], secure_options(MQD_LANE_IN_SYNC));
    CHECK(write(pair[0], "\0\0\0\x10plain text it is", 20) == 20);
    UNTIL(two->observed.ended == 2);
    CHECK_CONTAINS(two->observed.text, "plain text from the other host");
    close(pair[0]);
    hosts_stop(two);
}

/* Connections that are replaced and removed while their handshakes are computed, so that others
 * reuse their entries. */
BOTH(replaced_during_handshakes)
{
    if (!tls_works())
        return;
    struct two *two = hosts_start(backend);
    uint64_t seed = 11;
    for (int i = 0; i < 120; i++) {
        uint32_t lane = (uint32_t)(test_random(&seed) % MQD_LANE_COUNT);
        if (test_random(&seed) % 3 == 0) {
            CHECK_EQUAL(mqd_reactor_fetcher_remove(two->b->reactors[1], ++two->b->token, 1, 0, lane), 0);
            CHECK_EQUAL(done(two, two->b->token).error, 0);
        } else {
            fetcher_put(two, client_open_of(two->b, 0, 0, 2, true).fd, secure_options(lane));
        }
        if (test_random(&seed) % 4 == 0)
            usleep((useconds_t)(test_random(&seed) % 3000));
    }
    CHECK_EQUAL(two->observed.ended, 0);
    connect_secure(two);
    replicated(two, 3, 50000);
    for (int i = 0; i < 3; i++) /* and the end comes during some */
        fetcher_put(two, client_open_of(two->b, 0, 0, 2, true).fd, secure_options((uint32_t)i));
    hosts_stop(two);
}
