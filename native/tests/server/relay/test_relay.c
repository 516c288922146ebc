/* tsan */
/* Local clients that write to partitions of other hosts: their responses, and the requests to
 * the leader. */
#include "mqd_reactor_rights_test.h"
#include "mqd_relay_test.h"

#include "mqd_tls_test.h"
#include "server/tls/secure.h"

/* Through the leader's own worker: offsets, contents, order relative to own partitions, acks,
 * several partitions in a request. */
BOTH(written_at_the_leader)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct client reader = client_open(b, 1);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct part first = one_record(1, 41, 64);
    submit(&local, 1, -1, first);
    struct mqd_event expected = relay_event(b, MQD_EVENT_RELAY_REQUESTED);
    CHECK_EQUAL(expected.node_id, LEADER);
    CHECK_EQUAL(expected.worker, 1);
    CHECK_EQUAL(expected.lane, MQD_RELAY_LANE_PLAIN);
    relay_put(b, client_open_as(b, 1, 2).fd, MQD_RELAY_LANE_PLAIN, LIMIT_MS);
    struct produced produced = outcome(&local);
    CHECK_EQUAL(produced.correlation_id, 1);
    CHECK_EQUAL(produced.error[0], 0);
    CHECK_EQUAL(produced.base_offset[0], 0);
    struct part four[] = {one_record(0, 50, 64), one_record(3, 53, 150000), one_record(2, 52, 64),
                          one_record(1, 51, 64)};
    produced = local_produce(&local, 1, four, 4);
    CHECK_EQUAL(produced.count, 4);
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(produced.error[i], 0);
        CHECK_EQUAL(produced.base_offset[i], four[i].partition == 1);
        struct fetch_position requested = {four[i].partition, four[i].partition == 1};
        client_fetch(&reader,
                     (struct fetch){.correlation_id = 5, .bytes_max = 1 << 20, .bytes_min = 1, .wait_ms = LIMIT_MS},
                     &requested, 1, fetched);
        CHECK_EQUAL(fetched->batch_count, 1);
        CHECK_EQUAL(fetched->batches[0].mark, four[i].batch.mark);
    }
    CHECK_EQUAL(local_counter(b, 0, MQD_COUNT_RELAYED_BATCHES), 3);
    CHECK(local_counter(b, 0, MQD_COUNT_RELAYED_BYTES) > 150000);
    client_close(&reader);
    local_close(&local);
    local_wait_none(b);
    free(fetched);
    local_bench_stop(b);
}

/* Many in flight: results in order for each partition, every batch once and at its offset. */
BOTH(pipelined_in_order)
{
    enum { COUNT = 1200, UNDER_WAY = 14 };
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    relay_put(b, client_open_as(b, 1, 2).fd, MQD_RELAY_LANE_PLAIN, LIMIT_MS);
    int64_t next[PARTITIONS] = {0};
    int32_t last[PARTITIONS] = {-1, -1, -1, -1, -1};
    for (int32_t i = 0; i < COUNT + UNDER_WAY; i++) {
        if (i < COUNT)
            submit(&local, i, i % 3 ? -1 : 1, one_record(i % 4, (uint64_t)i, i % 7 ? 100 : 9000));
        if (i < UNDER_WAY)
            continue;
        struct produced produced = outcome(&local);
        int32_t partition = produced.partition[0];
        CHECK_OR(produced.error[0] == 0, abort());
        CHECK_EQUAL(produced.correlation_id % 4, partition);
        CHECK(produced.correlation_id > last[partition]);
        last[partition] = produced.correlation_id;
        CHECK_EQUAL(produced.base_offset[0], next[partition]++);
    }
    CHECK_EQUAL(local_counter(b, 0, MQD_COUNT_RELAYED_BATCHES), COUNT / 2);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* An idempotent batch that is resent after its response was lost is stored once. */
BOTH(its_own_producer_id_and_sequence)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct part part = {1,
                        {.mark = 9, .producer_id = 4711, .producer_epoch = 3, .base_sequence = 0, .record_count = 5}};
    for (int round = 0; round < 2; round++) {
        /* the second takes the first one's place */
        relay_put(b, client_open_as(b, 1, 2).fd, MQD_RELAY_LANE_PLAIN, LIMIT_MS);
        struct produced produced = local_produce(&local, -1, &part, 1);
        CHECK_EQUAL(produced.error[0], 0);
        CHECK_EQUAL(produced.base_offset[0], 0);
    }
    CHECK_EQUAL(local_counter(b, 1, MQD_COUNT_DUPLICATES), 1);
    part.batch.base_sequence = 6;
    CHECK_EQUAL(local_produce(&local, -1, &part, 1).error[0], 45); /* OUT_OF_ORDER_SEQUENCE_NUMBER, the leader's */
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

BOTH(refused_while_the_host_cannot_be_reached)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct mqd_relay_options options = relay_options(MQD_RELAY_LANE_PLAIN, LIMIT_MS * 10);
    submit(&local, 1, 1, one_record(1, 1, 64));
    submit(&local, 2, 1, one_record(1, 2, 64));
    relay_event(b, MQD_EVENT_RELAY_REQUESTED);
    CHECK_EQUAL(mqd_reactor_relay_refuse(b->reactors[0], ++b->token, &options), 0);
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(outcome(&local).error[0], NOT_LEADER);
    CHECK_EQUAL(outcome((submit(&local, 3, 1, one_record(3, 3, 64)), &local)).error[0], NOT_LEADER); /* immediately */
    /* other leaders are not affected */
    CHECK_EQUAL(outcome((submit(&local, 4, 1, one_record(0, 4, 64)), &local)).error[0], 0);
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
    submit(&local, 5, 1, one_record(1, 5, 64));
    answer(&leader, (struct answer){relayed(&leader).correlation_id, 1, 0, 77});
    CHECK_EQUAL(outcome(&local).base_offset[0], 77);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

static void small_heap(struct bench *b)
{
    local_options(b);
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        b->options[worker].heap_bytes_max = 1 << 20;
}

/* Retrying would not help: not an error that clients retry forever. */
BOTH(a_batch_that_never_fits_is_too_large)
{
    struct bench *b = relay_bench_of(backend, small_heap);
    struct local local = local_open(b, 0, SIZES);
    submit(&local, 1, 1, one_record(1, 1, 1100000));
    CHECK_EQUAL(outcome(&local).error[0], 10); /* MESSAGE_TOO_LARGE */
    submit(&local, 2, 1, one_record(1, 2, 64));
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
    answer(&leader, (struct answer){relayed(&leader).correlation_id, 1, 0, 78});
    CHECK_EQUAL(outcome(&local).base_offset[0], 78);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* The connection ends: batches that were sent may have been written, others were not. */
BOTH(unsent_and_unknown_outcomes_differ_when_a_connection_ends)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 8192);
    submit(&local, 1, 1, one_record(1, 1, 64));
    relayed(&leader);
    submit(&local, 2, 1, one_record(1, 2, 200000)); /* more than the socket takes */
    submit(&local, 3, 1, one_record(1, 3, 64));
    while (local_counter(b, 0, MQD_COUNT_RELAYED_BATCHES) < 3)
        poll(NULL, 0, 1);
    client_close(&leader);
    CHECK_EQUAL(outcome(&local).error[0], TIMED_OUT);
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(outcome(&local).error[0], NOT_LEADER);
    relay_event(b, MQD_EVENT_RELAY_ENDED);
    CHECK_EQUAL(local_counter(b, 0, MQD_COUNT_RELAY_FAILURES), 3);
    submit(&local, 4, 1, one_record(1, 4, 64)); /* a connection is requested again immediately */
    relay_event(b, MQD_EVENT_RELAY_REQUESTED);
    leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
    answer(&leader, (struct answer){relayed(&leader).correlation_id, 1, 0, 5});
    CHECK_EQUAL(outcome(&local).error[0], 0);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

BOTH(a_leader_that_does_not_respond)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, 50, 0);
    submit(&local, 1, 1, one_record(1, 1, 64));
    CHECK_EQUAL(outcome(&local).error[0], TIMED_OUT);
    CHECK_EQUAL(relay_event(b, MQD_EVENT_RELAY_ENDED).error, ETIMEDOUT);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* L3: another host leads by now, or this one; a response of the old one is ignored. */
BOTH(another_leader)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
    submit(&local, 1, 1, one_record(1, 1, 64));
    int32_t id = relayed(&leader).correlation_id;
    place(b, LEADER, 6); /* the same leader in another epoch: it answers without help */
    struct pollfd none = {local.fds[2], POLLIN, 0};
    CHECK_EQUAL(poll(&none, 1, 0), 0);
    place(b, 3, 7);
    CHECK_EQUAL(outcome(&local).error[0], NOT_LEADER);
    place(b, LEADER, 8);
    submit(&local, 2, 1, one_record(1, 2, 64));
    int32_t second = relayed(&leader).correlation_id;
    answer(&leader, (struct answer){id, 1, 0, 10});
    answer(&leader, (struct answer){second, 1, 0, 20});
    CHECK_EQUAL(outcome(&local).base_offset[0], 20);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* L4: a leader that reads nothing delays the client after a bounded number of bytes; when it
 * reads again, everything continues, in order. */
BOTH(held_back_while_the_leader_takes_nothing)
{
    enum { BODY = 60000, COUNT = 120 };
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, (struct local_sizes){16 << 20, 1 << 16, 256});
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 8192);
    uint64_t mark = 0;
    for (; mark < COUNT; mark++)
        submit(&local, (int32_t)mark, 0, one_record(1, mark, BODY)); /* acks=0: no bound on those under way but bytes */
    uint64_t seen = 0;
    for (int still = 0; still < 20; still++, poll(NULL, 0, 5)) { /* until nothing moves any more */
        uint64_t now = local_counter(b, 0, MQD_COUNT_RELAYED_BYTES);
        still = now == seen ? still : 0;
        seen = now;
    }
    CHECK(seen < MQD_RELAY_UNSENT_BYTES + 4u * BODY);
    CHECK(seen >= 8u * BODY);
    for (uint64_t i = 0; i < COUNT; i++) {
        struct relayed_request request = relayed(&leader);
        CHECK_EQUAL(request.acks, 1); /* L6 */
        CHECK(request.records_bytes > (uint32_t)BODY);
        /* no producer learns of an error of acks=0 */
        answer(&leader, (struct answer){request.correlation_id, 1, i % 2 ? NOT_LEADER : 0, (int64_t)i});
    }
    submit(&local, 900, 1, one_record(1, 900, 64));
    answer(&leader, (struct answer){relayed(&leader).correlation_id, 1, 0, 5});
    CHECK_EQUAL(outcome(&local).correlation_id, 900);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* L7: a silent leader delays only producers to its own partitions. */
BOTH(a_silent_leader_holds_up_nothing_else)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    int32_t first = (submit(&local, 1, 1, one_record(1, 1, 64)), relayed(&leader).correlation_id);
    for (int32_t i = 10; i < 200; i++) { /* more than may be under way */
        submit(&local, i, i % 2 ? -1 : 1, one_record(i % 3 ? 0 : 2, (uint64_t)i, 64));
        CHECK_EQUAL(outcome(&local).correlation_id, i);
    }
    int32_t second = (submit(&local, 2, 1, one_record(3, 2, 64)), relayed(&leader).correlation_id);
    submit(&local, 3, 1, one_record(0, 3, 64));
    CHECK_EQUAL(outcome(&local).correlation_id, 3);
    answer(&leader, (struct answer){first, 1, 0, 0});
    CHECK_EQUAL(outcome(&local).correlation_id, 1);
    answer(&leader, (struct answer){second, 3, 0, 0});
    CHECK_EQUAL(outcome(&local).correlation_id, 2);
    struct fetch_position requested = {0, 0}; /* nothing is left over */
    local_fetch(&local, (struct fetch){.correlation_id = 5, .bytes_max = 1 << 20, .bytes_min = 1, .wait_ms = LIMIT_MS},
                &requested, 1, fetched);
    CHECK(fetched->batch_count >= 1);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    free(fetched);
    local_bench_stop(b);
}

/* More leaders over time than a worker has entries for: those without producers are evicted. */
BOTH(entries_are_reused)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    for (int32_t node = 100; node < 100 + MQD_RELAY_COUNT_MAX + 3; node++) {
        struct mqd_relay_options options = {.leader_node = node, .leader_worker = 1, .lane = 0, .timeout_ms = 1};
        int ends[2];
        CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, abort());
        CHECK_EQUAL(mqd_reactor_relay_put(b->reactors[0], ++b->token, ends[1], &options), 0);
        CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
        CHECK_EQUAL(mqd_reactor_relay_remove(b->reactors[0], ++b->token, node), 0);
        CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
        close(ends[0]);
    }
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
    submit(&local, 1, 1, one_record(1, 1, 64));
    answer(&leader, (struct answer){relayed(&leader).correlation_id, 1, 0, 77});
    CHECK_EQUAL(outcome(&local).base_offset[0], 77);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* A disconnected client: its batches are written, their responses are dropped. TCP clients are
 * still redirected to the leader. */
BOTH(closed_clients_and_others)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0), client = client_open(b, 0);
    submit(&local, 1, 1, one_record(1, 1, 64));
    int32_t id = relayed(&leader).correlation_id;
    local_close(&local);
    local_wait_none(b);
    answer(&leader, (struct answer){id, 1, 0, 3});
    struct part part = one_record(1, 1, 64);
    CHECK_EQUAL(client_produce(&client, 1, &part, 1).error[0], NOT_LEADER);
    local = local_open(b, 0, SIZES);
    submit(&local, 2, 1, one_record(1, 2, 64));
    relayed(&leader); /* never answered: the broker stops */
    client_close(&client);
    local_bench_stop(b);
    local_close(&local);
    client_close(&leader);
}

static void rights(struct bench *b)
{
    local_options(b);
    b->options[0].rights = MQD_RIGHTS_ON;
}

/* The leader accepts a host's requests without checking rights, and this host may have missed a
 * revocation. */
BOTH(nothing_is_sent_on_without_the_lease)
{
    struct bench *b = relay_bench_of(backend, rights);
    struct local local = local_open_as(b, 0, SIZES, "User:alice");
    CHECK_EQUAL(rights_grant(b, rights_event(b, MQD_EVENT_SUBJECT_REQUESTED).token, WRITE, 0), 0);
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
    for (int lease = 0; lease < 2; lease++) {
        mqd_control_set_broker(b->control, 1, 1, lease ? INT64_MAX : 1 /* expired long ago */);
        submit(&local, 1, 1, one_record(0, 1, 64)); /* what follows is read in a later turn */
        outcome(&local);
        submit(&local, 2, 1, one_record(1, 2, 64));
        if (lease)
            answer(&leader, (struct answer){relayed(&leader).correlation_id, 1, 0, 77});
        CHECK_EQUAL(outcome(&local).error[0], lease ? 0 : NOT_LEADER);
    }
    CHECK_EQUAL(local_counter(b, 0, MQD_COUNT_RELAYED_BATCHES), 1);
    client_close(&leader);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* ---- over TLS ---- */

static void relay_certificate(struct bench *b, uint32_t worker, const struct tls_identity *identity,
                              const struct tls_identity *ca)
{
    struct mqd_tls_context *context = tls_hosts_context(identity, ca);
    CHECK_OR(context, abort());
    CHECK_EQUAL(mqd_reactor_set_listener_tls(b->reactors[worker], ++b->token, MQD_LISTENER_ID_HOSTS, context), 0);
    CHECK_EQUAL(bench_done(b, worker, b->token).error, 0);
}

static void relay_put_secure(struct bench *b, int fd)
{
    struct mqd_relay_options options = relay_options(MQD_RELAY_LANE_PLAIN, LIMIT_MS);
    options.tls = 1;
    CHECK_EQUAL(mqd_reactor_relay_put(b->reactors[0], ++b->token, fd, &options), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
}

/* Batches wait for the handshake. From a leader that does not authenticate its node id they are
 * returned unwritten, and no other connection is requested immediately. */
BOTH(written_over_tls)
{
    enum { COUNT = 200, UNDER_WAY = 14 };
    if (!tls_works())
        return;
    mqd_secure_handshake_ms = TLS_CONNECT_MS;
    mqd_tls_key_records_max = 10;
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct tls_identity ca = tls_identity("ca"), leader = tls_node(&ca, "URI:mqd://node/1", 2),
                        other = tls_node(&ca, "URI:mqd://node/2", 2);
    relay_certificate(b, 0, &other, &ca);
    relay_certificate(b, 1, &other, &ca); /* of another node than the leader's */
    submit(&local, 1, -1, one_record(1, 1, 64));
    relay_event(b, MQD_EVENT_RELAY_REQUESTED);
    relay_put_secure(b, client_open_of(b, 1, 0, 2, true).fd);
    CHECK_EQUAL(outcome(&local).error[0], NOT_LEADER);
    struct mqd_event ended = relay_event(b, MQD_EVENT_RELAY_ENDED);
    CHECK_CONTAINS(ended.text, "it is not node 1's");
    CHECK_EQUAL(outcome((submit(&local, 2, -1, one_record(1, 2, 64)), &local)).error[0], NOT_LEADER); /* immediately */
    relay_certificate(b, 1, &leader, &ca);
    relay_put_secure(b, client_open_of(b, 1, 0, 2, true).fd);
    for (int32_t i = 0; i < COUNT + UNDER_WAY; i++) {
        if (i < COUNT)
            submit(&local, i, -1, one_record(1, (uint64_t)i, i % 7 ? 100 : 60000));
        if (i < UNDER_WAY)
            continue;
        struct produced produced = outcome(&local);
        CHECK_EQUAL(produced.error[0], 0);
        CHECK_EQUAL(produced.base_offset[0], i - UNDER_WAY);
    }
    struct client silent = {.fd = -1};
    int ends[2];
    mqd_secure_handshake_ms = 200;
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, abort());
    silent.fd = ends[0];
    relay_put_secure(b, ends[1]); /* a leader that sends nothing */
    CHECK_EQUAL(outcome((submit(&local, 3, -1, one_record(1, 3, 64)), &local)).error[0], NOT_LEADER);
    CHECK_EQUAL(relay_event(b, MQD_EVENT_RELAY_ENDED).error, ETIMEDOUT);
    client_close(&silent);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
    mqd_secure_handshake_ms = TLS_CONNECT_MS;
    mqd_tls_key_records_max = 1u << 23;
    tls_identity_free(&ca), tls_identity_free(&leader), tls_identity_free(&other);
}
