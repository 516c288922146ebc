/* tsan: long */
/* Common properties of ShareFetch, ShareAcknowledge and other requests, over real sockets and
 * files: transactions, rights, quotas, records that are not in memory, TLS. */
#include "mqd_check_test.h"
#include "mqd_counter_test.h"
#include "mqd_reactor_rights_test.h"
#include "mqd_seccomp_test.h"
#include "mqd_tunnel_test.h"

#include "mqd_reactor_share_test.h"
#include "server/tls/secure.h"
#include "shm/quota.h"

/* ---- transactions ---- */

static void end_transaction(struct coordinator *k, uint32_t slot, int64_t producer_id, bool commit)
{
    struct log_batch marker = {.marker = commit ? 2 : 1, .producer_id = producer_id};
    pthread_mutex_lock(&k->mutex);
    k->marker = &marker, k->marker_slot = slot, k->marked = 0;
    pthread_mutex_unlock(&k->mutex);
    for (int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll; !read_locked(k, &k->marked) && test_now_ns() < end_ns;)
        usleep(500);
    CHECK_EQUAL(read_locked(k, &k->marked), 1);
}

static void write_transactional(struct coordinator *k, int32_t partition, int64_t producer_id)
{
    struct client writer = client_open(k->b, 0);
    CHECK(client_produce_one(&writer, 1, "t", -1, LIMIT_MS, partition, raw_transactional(producer_id, 0, 0, 64)));
    CHECK_EQUAL(client_take(&writer).of[0].error, 0);
    client_close(&writer);
}

static void check_offsets(const struct answered *answered, int count, const int64_t *offsets)
{
    CHECK_EQUAL(answered->error, 0);
    CHECK_EQUAL(answered->partition_count, count ? 1 : 0);
    CHECK_EQUAL(answered->run_count, count);
    for (int i = 0; i < count; i++) {
        CHECK_EQUAL(answered->runs[i].first, offsets[i]);
        CHECK_EQUAL(answered->runs[i].last, offsets[i]);
    }
}

/* 0 and 3 are plain, 1 was aborted by 2, 4 is open until it commits; 5 is plain. */
BOTH(aborted_records_are_never_acquired)
{
    struct coordinator *k = start_with(backend, NULL);
    k->committed = true; /* read_committed: no request has been made yet */
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0);
        struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        produce(k, partition, 1);
        write_transactional(k, partition, 7);
        end_transaction(k, (uint32_t)partition, 7, false);
        produce(k, partition, 1);
        write_transactional(k, partition, 8);
        produce(k, partition, 1);
        struct answered answered = fetch(k, &one, a);
        check_offsets(&answered, 2, (const int64_t[]){0, 3});
        a.epoch = 1, a.wait_ms = 20;
        answered = fetch(k, &one, a); /* what is open, and what follows it, is not there yet */
        check_offsets(&answered, 0, NULL);
        a.epoch = 2, a.type = MQD_SHARE_ACCEPT, a.first = a.last = 1;
        CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_RECORD_STATE);
        a.epoch = 3, a.type = -1, a.wait_ms = LIMIT_MS;
        send_share_request(k, &one, FETCH, a); /* waits for the end of the transaction */
        end_transaction(k, (uint32_t)partition, 8, true);
        answered = take_answer(&one, FETCH);
        check_run(&answered, 4, 5, 1);
        client_close(&one);
        struct client two = client_open(k->b, 0); /* all that was acquired comes again, and no more */
        struct share_request c = {.member = "c", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        int64_t seen = 0;
        for (int tries = 0; tries < 10 && seen < 0 + 3 + 4 + 5; tries++, c.epoch++) {
            answered = fetch(k, &two, c);
            for (int i = 0; i < answered.run_count; i++)
                for (int64_t offset = answered.runs[i].first; offset <= answered.runs[i].last; offset++)
                    seen += offset;
        }
        CHECK_EQUAL(seen, 0 + 3 + 4 + 5);
        client_close(&two);
    }
    stop(k);
}

/* ---- rights ---- */

static void with_rights(struct bench *b)
{
    b->options[0].rights = MQD_RIGHTS_ON, b->options[0].denied_interval_ms = 10000;
}

static void grant(struct coordinator *k, uint64_t subject, uint16_t topic, uint16_t group)
{
    struct right topics_right = {.name = "quick", .mask = topic}, groups_right = {.name = "jobs", .mask = group};
    struct table topics = table_of(&topics_right, 1, NULL, 0, 0), ids = table_of(NULL, 0, NULL, 0, 0),
                 groups = table_of(&groups_right, 1, NULL, 0, 0);
    struct mqd_rights_tables tables = rights_tables(&topics, &ids, &groups);
    CHECK_OR(mqd_reactor_subject_put(k->b->reactors[0], ++k->b->token, subject, &tables) == 0, abort());
    CHECK_EQUAL(bench_done(k->b, 0, k->b->token).error, 0);
    free(topics.bytes), free(ids.bytes), free(groups.bytes);
}

/* READ of the group and READ of the topic, in both requests, and again after they were
 * revoked. */
BOTH(both_rights_are_needed)
{
    struct coordinator *k = start_with(backend, with_rights);
    struct client one = client_open(k->b, 0);
    struct share_request first = {.member = "first", .type = -1};
    send_share_request(k, &one, FETCH, first);
    uint64_t subject = rights_event(k->b, MQD_EVENT_SUBJECT_REQUESTED).token;
    grant(k, subject, 0, 0);
    CHECK_EQUAL(take_answer(&one, FETCH).error, MQD_KAFKA_GROUP_AUTHORIZATION_FAILED);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct share_request a = {
            .member = partition ? "b" : "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        grant(k, subject, EVERYTHING, (uint16_t)~READ);
        struct answered answered = fetch(k, &one, a);
        CHECK_EQUAL(answered.error, MQD_KAFKA_GROUP_AUTHORIZATION_FAILED);
        CHECK_EQUAL(answered.partition_count, 0);
        grant(k, subject, (uint16_t)~READ, READ);
        answered = fetch(k, &one, a);
        CHECK_EQUAL(answered.error, 0);
        CHECK_EQUAL(answered.partition_error, MQD_KAFKA_TOPIC_AUTHORIZATION_FAILED);
        CHECK_EQUAL(answered.run_count, 0);
        CHECK_EQUAL(answered.records_bytes, 0);
        grant(k, subject, READ | WRITE, READ);
        produce(k, partition, 4);
        a.epoch = 1;
        answered = fetch(k, &one, a);
        check_run(&answered, 0, 3, 1);
        a.epoch = 2, a.type = MQD_SHARE_ACCEPT, a.last = 3;
        grant(k, subject, (uint16_t)~READ, READ);
        CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_TOPIC_AUTHORIZATION_FAILED);
        a.epoch = 3;
        grant(k, subject, READ, (uint16_t)~READ);
        CHECK_EQUAL(acknowledge(k, &one, a).error, MQD_KAFKA_GROUP_AUTHORIZATION_FAILED);
        grant(k, subject, READ, READ);
        CHECK_EQUAL(acknowledge(k, &one, a).partition_error, 0); /* what was refused has changed nothing */
    }
    client_close(&one);
    stop(k);
}

/* ---- quotas ---- */

BOTH(bytes_count_against_the_quota_of_fetches)
{
    struct coordinator *k = start_with(backend, NULL);
    uint64_t client = mqd_quota_key(k->b->control, (const uint8_t *)"slow", 4);
    struct mqd_quota_rule rule = {.key = mqd_quota_rule_key(MQD_QUOTA_CLIENT, 0, client), .level = MQD_QUOTA_CLIENT};
    rule.interval[MQD_QUOTA_FETCH] = (uint64_t)(((unsigned __int128)1000000000 << 32) / 10000); /* 10 KB/s */
    const int64_t bursts_ns[MQD_QUOTA_KIND_COUNT] = {0};
    CHECK_EQUAL(mqd_quota_publish(k->b->control, &rule, 1, bursts_ns), 0);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client slow = client_open(k->b, 0), other = client_open(k->b, 0);
        struct share_request
            a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .client_id = "slow"},
            c = {.member = "c", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .client_id = "other"};
        produce_batch(k, partition, 4, 3000);
        struct answered answered = fetch(k, &slow, a);
        int64_t answered_ns = test_now_ns();
        check_run(&answered, 0, 3, 1);
        CHECK(answered.throttle_ms >= 250 && answered.throttle_ms <= 320); /* 3 KB and what is around them */
        a.epoch = 1, a.type = MQD_SHARE_ACCEPT, a.last = 3;
        send_share_request(k, &slow, ACKNOWLEDGE, a); /* waits in its socket */
        produce_batch(k, partition, 4, 3000);
        answered = fetch(k, &other, c);
        check_run(&answered, 4, 7, 1);
        CHECK_EQUAL(answered.throttle_ms, 0);
        answered = take_answer(&slow, ACKNOWLEDGE);
        CHECK_EQUAL(answered.partition_error, 0);
        CHECK((test_now_ns() - answered_ns) / 1000000 >= 250 - 8); /* clocks of the two sides */
        client_close(&slow);
        client_close(&other);
    }
    stop(k);
}

/* ---- records that are not in memory ---- */

#define BATCHES 6

static void one_batch_segments(struct bench *b)
{
    b->log_options.segment_bytes = 300;
}

static bool reads_ahead; /* what is expected of fetch_all, in a child */

static void fetch_all(int backend)
{
    struct coordinator *k = start_with(backend, one_batch_segments);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0);
        struct share_request a = {
            .member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .records_max = 1};
        for (int i = 0; i < BATCHES; i++)
            produce_batch(k, partition, 1, 100);
        for (int64_t offset = 0; offset < BATCHES; offset++, a.epoch++) {
            struct answered answered = fetch(k, &one, a);
            check_run(&answered, offset, offset, 1);
        }
        client_close(&one);
        if (reads_ahead)
            CHECK(counted(k->b, MQD_COUNT_FETCH_COLD) >=
                  (uint64_t)(partition + 2) * BATCHES); /* by the owner, and for the response */
        else
            CHECK_EQUAL(counted(k->b, MQD_COUNT_FETCH_COLD), 0);
    }
    stop(k);
}

BOTH(unknown_pages_are_read_ahead)
{
    reads_ahead = true;
    where_refused(ENOSYS, EPERM, fetch_all, backend);
    reads_ahead = false;
    where_refused(ENOSYS, 0, fetch_all, backend); /* known to be in memory */
}

/* Worker 1, which owns the partition, has the segment open; worker 0, which has the member's
 * connection, cannot open it. */
BOTH(records_that_cannot_be_read_cost_no_delivery)
{
    struct coordinator *k = start_with(backend, NULL);
    char path[160], hidden[170];
    struct client two = client_open(k->b, 1), one = client_open(k->b, 0);
    struct share_request b = {.member = "b", .partition = 1, .type = -1, .wait_ms = LIMIT_MS};
    struct share_request a = {.member = "a", .partition = 1, .type = -1, .wait_ms = LIMIT_MS};
    snprintf(path, sizeof path, "%s/quick-1/%020d.log", log_root, 0);
    snprintf(hidden, sizeof hidden, "%s.hidden", path);
    produce(k, 1, 1);
    struct answered answered = fetch(k, &two, b);
    check_run(&answered, 0, 0, 1);
    b.epoch = 1, b.type = MQD_SHARE_RELEASE, b.first = b.last = 0;
    CHECK_EQUAL(acknowledge(k, &two, b).partition_error, 0);
    CHECK_EQUAL(rename(path, hidden), 0);
    for (int tries = 0; tries < 8; tries++, a.epoch++)
        CHECK_EQUAL(fetch(k, &one, a).partition_error, MQD_KAFKA_STORAGE_ERROR);
    CHECK_EQUAL(rename(hidden, path), 0);
    answered = fetch(k, &one, a);
    check_run(&answered, 0, 0, 2);
    client_close(&one);
    client_close(&two);
    stop(k);
}

/* ---- TLS ---- */

static struct tls_identity broker;

static void with_tls(struct bench *b)
{
    b->options[0].listener_flags[SECURE] = MQD_LISTENER_FLAG_TLS;
    b->log_options.max_message_bytes = 4 << 20;
    b->log_options.segment_bytes = 64 << 20;
}

BOTH(records_are_sealed)
{
    static const uint32_t bodies[] = {100, 9000, 300000}; /* copied; file ranges of one and of several TLS records */
    if (!tls_works())
        return;
    mqd_secure_handshake_ms = TLS_CONNECT_MS;
    struct coordinator *k = start_with(backend, with_tls);
    broker = tls_identity("localhost");
    struct mqd_tls_context *context = tls_context(&broker);
    CHECK_OR(context, fprintf(stderr, "%s\n", mqd_error_message()); abort());
    CHECK_EQUAL(mqd_reactor_set_listener_tls(k->b->reactors[0], ++k->b->token, SECURE, context), 0);
    CHECK_EQUAL(bench_done(k->b, 0, k->b->token).error, 0);
    struct tunnel *tunnel = tunnel_open(k->b, 0);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        a.epoch = partition * 2 * 3;
        for (int64_t i = 0; i < 3; i++) {
            produce_batch(k, partition, 1, bodies[i]);
            struct answered answered = fetch(k, &tunnel->client, a);
            check_run(&answered, i, i, 1);
            CHECK_EQUAL(answered.records_bytes, bodies[i] + MQD_BATCH_HEADER_BYTES);
            a.epoch++, a.type = MQD_SHARE_ACCEPT, a.first = a.last = i;
            CHECK_EQUAL(acknowledge(k, &tunnel->client, a).partition_error, 0);
            a.epoch++, a.type = -1;
        }
    }
    tunnel_close(tunnel);
    CHECK(connections_left(k->b, 0));
    tls_identity_free(&broker);
    stop(k);
}
