/* tsan: long */
/* Rights on the data path (server/rights/subject.h). The test is the worker's main thread. */
#include "mqd_leading_test.h"
#include "mqd_reactor_rights_test.h"

enum { SASL_LISTENER = 1, DENIED = 29, DENIED_ID = 53 };

static void rights(struct bench *b)
{
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        b->options[worker].rights = MQD_RIGHTS_ON, b->options[worker].denied_interval_ms = 10000;
        b->options[worker].listener_flags[SASL_LISTENER] = MQD_LISTENER_FLAG_SASL;
        b->options[worker].authentication_bytes_max = 4096;
        b->options[worker].authentication_ms_max = 600000;
    }
}

static void only_logged(struct bench *b)
{
    rights(b);
    b->options[0].rights = MQD_RIGHTS_LOG_ONLY;
}

/* A client of that principal; its subject may not be known yet. */
static struct client client_of(struct bench *b, const char *principal)
{
    static uint64_t at = 1 << 20;
    struct client client = client_open_by(b, 0, SASL_LISTENER, -1);
    struct frame frame = {0};
    uint32_t begin = frame_begin(&frame, 36, 1, 7);
    frame_end(&frame, begin);
    CHECK_OR(client_send(&client, &frame), abort());
    frame_free(&frame);
    struct mqd_descriptor request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    uint8_t *bytes = b->arenas[ACCEPTOR] + (at += 512);
    uint32_t block_bytes = authenticated_put(bytes, principal, MQD_PRINCIPAL_SASL, 0);
    memcpy(bytes + block_bytes, "\0\0\0\7", 4);
    bench_put(b, ACCEPTOR, 0,
              (struct mqd_descriptor){.kind = MQD_LINK_RESPONSE,
                                      .flags = MQD_RESPONSE_AUTHENTICATED,
                                      .token = request.token,
                                      .offset = at,
                                      .size_bytes = block_bytes + 4});
    CHECK_OR(client_receive(&client) == 1, abort());
    return client;
}

/* The same, with these rights; *subject is new. */
static struct client client_with(struct bench *b, const char *principal, uint16_t quick, uint64_t *subject)
{
    struct client client = client_of(b, principal);
    struct mqd_event event = rights_event(b, MQD_EVENT_SUBJECT_REQUESTED);
    CHECK_OR(strcmp(strchr(event.text, ' ') + 1, principal) == 0, abort());
    *subject = event.token;
    CHECK_OR(rights_grant(b, *subject, quick, 0) == 0, abort());
    return client;
}

static int16_t produce_error(struct client *client)
{
    struct part parts[2] = {{0, {.mark = 3, .record_count = 1}}, {1, {.mark = 4, .record_count = 1}}};
    struct produced out = client_produce(client, -1, parts, 2);
    CHECK_OR(out.count == 2 && out.error[0] == out.error[1], return -99);
    return out.error[0];
}

static int16_t fetch_error(struct client *client, struct fetched *out)
{
    struct fetch_position requested = {0, 0};
    client_fetch(client, (struct fetch){.bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1}, &requested, 1, out);
    CHECK_OR(out->partition_count == 1, return -99);
    return out->error[0];
}

BOTH(each_operation_needs_its_own_right)
{
    static struct fetched fetched;
    struct bench *b = bench_start(backend, rights);
    const uint16_t masks[] = {0, READ, WRITE, DESCRIBE, EVERYTHING, (uint16_t)~READ, (uint16_t)~WRITE};
    uint64_t subject;
    struct client writer = client_with(b, "User:writer", WRITE, &subject);
    CHECK_EQUAL(produce_error(&writer), 0);
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        char principal[16];
        int64_t offset = -9;
        snprintf(principal, sizeof principal, "User:%zu", i);
        struct client client = client_with(b, principal, masks[i], &subject);
        CHECK_EQUAL(produce_error(&client), masks[i] & WRITE ? 0 : DENIED);
        CHECK_EQUAL(fetch_error(&client, &fetched), masks[i] & READ ? 0 : DENIED);
        CHECK_EQUAL(fetched.batch_count > 0, (masks[i] & READ) != 0);
        if (!(masks[i] & READ)) {
            CHECK_EQUAL(fetched.high_watermark[0], -1);
            CHECK_EQUAL(fetched.last_stable_offset[0], -1);
        }
        CHECK_EQUAL(list_offset(&client, -1, &offset), masks[i] & DESCRIBE ? 0 : DENIED);
        CHECK_EQUAL(offset >= 0, (masks[i] & DESCRIBE) != 0);
        client_close(&client);
    }
    client_close(&writer);
    bench_stop(b);
}

/* Names do not reveal whether a topic exists; ids do, as in Kafka. */
BOTH(missing_topics_are_denied_like_existing_ones)
{
    static struct fetched fetched;
    struct bench *b = bench_start(backend, rights);
    uint64_t subject;
    struct client client = client_with(b, "User:alice", EVERYTHING, &subject);
    struct fetch_position requested = {0, 0};
    struct fetch fetch = {.bytes_max = 1 << 20, .session_epoch = -1, .topic = "nowhere"};
    client_fetch(&client, fetch, &requested, 1, &fetched);
    CHECK_EQUAL(fetched.error[0], DENIED);
    CHECK_EQUAL(rights_grant(b, subject, EVERYTHING, READ), 0);
    client_fetch(&client, fetch, &requested, 1, &fetched);
    CHECK_EQUAL(fetched.error[0], 3);
    client_close(&client);
    bench_stop(b);
}

/* Without a subject there is no service; one query for all connections of a principal. */
BOTH(connections_wait_for_their_rights)
{
    struct bench *b = bench_start(backend, rights);
    struct client first = client_of(b, "User:alice"), second = client_of(b, "User:alice"), plain = client_open(b, 0);
    struct frame frame = {0};
    struct part part = {0, {.mark = 3, .record_count = 1}};
    put_produce(&frame, 5, -1, LIMIT_MS, &part, 1);
    CHECK(client_send(&first, &frame) && client_send(&second, &frame) && client_send(&plain, &frame));
    struct mqd_event alice = rights_event(b, MQD_EVENT_SUBJECT_REQUESTED),
                     anonymous = rights_event(b, MQD_EVENT_SUBJECT_REQUESTED);
    CHECK(strcmp(strchr(alice.text, ' '), " User:alice") == 0);
    CHECK(strcmp(strchr(anonymous.text, ' '), " User:ANONYMOUS") == 0);
    usleep(50000);
    for (int i = 0; i < 3; i++) {
        uint8_t byte;
        CHECK(recv((i == 0 ? first : i == 1 ? second : plain).fd, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
    }
    CHECK_EQUAL(rights_grant(b, alice.token, WRITE, 0), 0);
    CHECK_EQUAL(client_receive(&first), 1);
    CHECK_EQUAL(take_produced(&first).error[0], 0);
    CHECK_EQUAL(client_receive(&second), 1);
    CHECK_EQUAL(take_produced(&second).error[0], 0);
    struct client third = client_of(b, "User:alice"); /* known already */
    CHECK_EQUAL(produce_error(&third), 0);
    CHECK_EQUAL(rights_grant(b, anonymous.token, READ, 0), 0);
    CHECK_EQUAL(client_receive(&plain), 1);
    CHECK_EQUAL(take_produced(&plain).error[0], DENIED);
    frame_free(&frame);
    client_close(&first), client_close(&second), client_close(&third), client_close(&plain);
    bench_stop(b);
}

BOTH(connections_that_leave_before_their_rights_arrive)
{
    struct bench *b = bench_start(backend, rights);
    struct client client = client_of(b, "User:alice");
    struct frame frame = {0};
    struct part part = {0, {.mark = 3, .record_count = 1}};
    put_produce(&frame, 5, -1, LIMIT_MS, &part, 1);
    CHECK(client_send(&client, &frame));
    uint64_t subject = rights_event(b, MQD_EVENT_SUBJECT_REQUESTED).token;
    client_close(&client);
    /* its socket is not read yet: its end is noticed when it is */
    CHECK_EQUAL(rights_grant(b, subject, WRITE, 0), 0);
    client = client_of(b, "User:bob");
    uint64_t other = rights_event(b, MQD_EVENT_SUBJECT_REQUESTED).token;
    CHECK(other != subject);
    CHECK_EQUAL(rights_grant(b, other + 1024, WRITE, 0), MQD_E_STALE);
    CHECK_EQUAL(rights_grant(b, other, WRITE, 0), 0);
    CHECK_EQUAL(produce_error(&client), 0);
    frame_free(&frame);
    client_close(&client);
    bench_stop(b);
}

/* A waiting fetch gets a response when its right is revoked, and its session never returns later
 * records. */
BOTH(a_revoked_right_ends_waiting_requests)
{
    static struct fetched fetched;
    struct bench *b = bench_start(backend, rights);
    uint64_t reader, writer;
    struct client waits = client_with(b, "User:reader", READ, &reader),
                  writes = client_with(b, "User:w", WRITE, &writer);
    struct fetch_position requested = {0, 0};
    struct fetch fetch = {.bytes_max = 1 << 20, .bytes_min = 1, .session_epoch = 0};
    client_fetch(&waits, fetch, &requested, 1, &fetched); /* a session, read to its end */
    CHECK_EQUAL(fetched.error[0], 0);
    struct frame frame = {0};
    fetch.session_id = fetched.session_id, fetch.session_epoch = 1, fetch.wait_ms = LIMIT_MS;
    put_fetch(&frame, fetch, NULL, 0);
    CHECK(client_send(&waits, &frame));
    frame_free(&frame);
    usleep(30000); /* it is parked; if it is not yet, it is denied when it arrives */
    CHECK_EQUAL(rights_grant(b, reader, DESCRIBE, 0), 0);
    CHECK_EQUAL(client_receive(&waits), 1);
    take_fetched(&waits, &fetched);
    CHECK_EQUAL(fetched.partition_count, 1);
    CHECK_EQUAL(fetched.error[0], DENIED);
    CHECK_EQUAL(produce_error(&writes), 0);
    fetch.session_epoch = 2;
    client_fetch(&waits, fetch, NULL, 0, &fetched);
    CHECK_EQUAL(fetched.error[0], DENIED);
    CHECK_EQUAL(fetched.batch_count, 0);
    CHECK_EQUAL(rights_grant(b, reader, READ, 0), 0); /* and returned */
    fetch.session_epoch = 3;
    client_fetch(&waits, fetch, NULL, 0, &fetched);
    CHECK_EQUAL(fetched.error[0], 0);
    CHECK_EQUAL(fetched.batch_count, 1);
    /* revoked while no fetch is in progress and the session has no partition to evaluate */
    fetch.session_epoch = 4, fetch.wait_ms = 0;
    requested.offset = 1;
    client_fetch(&waits, fetch, &requested, 1, &fetched);
    CHECK_EQUAL(rights_grant(b, reader, 0, 0), 0);
    fetch.session_epoch = 5;
    client_fetch(&waits, fetch, NULL, 0, &fetched);
    CHECK_EQUAL(fetched.partition_count, 1);
    CHECK_EQUAL(fetched.error[0], DENIED);
    client_close(&waits), client_close(&writes);
    bench_stop(b);
}

BOTH(a_fetch_without_a_session_that_waits_ends_too)
{
    static struct fetched fetched;
    struct bench *b = bench_start(backend, rights);
    uint64_t reader;
    struct client waits = client_with(b, "User:reader", READ, &reader);
    struct fetch_position requested = {0, 0};
    struct frame frame = {0};
    put_fetch(&frame, (struct fetch){.bytes_max = 1 << 20, .bytes_min = 1, .session_epoch = -1, .wait_ms = LIMIT_MS},
              &requested, 1);
    CHECK(client_send(&waits, &frame));
    frame_free(&frame);
    usleep(30000); /* as above */
    int64_t began_ns = test_now_ns();
    CHECK_EQUAL(rights_grant(b, reader, 0, 0), 0);
    CHECK_EQUAL(client_receive(&waits), 1);
    take_fetched(&waits, &fetched);
    CHECK_EQUAL(fetched.error[0], DENIED);
    CHECK(test_now_ns() - began_ns < LIMIT_MS / 2 * 1000000ll); /* not by its own time limit */
    client_close(&waits);
    bench_stop(b);
}

BOTH(a_session_is_its_principals)
{
    static struct fetched fetched;
    struct bench *b = bench_start(backend, rights);
    uint64_t alice, bob;
    struct client owner = client_with(b, "User:alice", READ, &alice), other = client_with(b, "User:bob", READ, &bob),
                  again = client_of(b, "User:alice"), plain = client_open(b, 0);
    CHECK_EQUAL(rights_grant(b, rights_event(b, MQD_EVENT_SUBJECT_REQUESTED).token, READ, 0), 0);
    struct fetch_position requested = {0, 0};
    struct fetch fetch = {.bytes_max = 1 << 20, .session_epoch = 0};
    client_fetch(&owner, fetch, &requested, 1, &fetched);
    fetch.session_id = fetched.session_id, fetch.session_epoch = 1;
    CHECK(fetched.session_id > 0);
    client_fetch(&other, fetch, NULL, 0, &fetched);
    CHECK_EQUAL(fetched.top_error, 70);
    client_fetch(&plain, fetch, NULL, 0, &fetched);
    CHECK_EQUAL(fetched.top_error, 70);
    fetch.session_epoch = -1; /* nor can they end it */
    client_fetch(&other, fetch, &requested, 1, &fetched);
    CHECK_EQUAL(fetched.top_error, 0);
    fetch.session_epoch = 1;
    client_fetch(&again, fetch, NULL, 0, &fetched); /* the same principal, by another connection */
    CHECK_EQUAL(fetched.top_error, 0);
    client_close(&owner), client_close(&other), client_close(&again), client_close(&plain);
    bench_stop(b);
}

/* A topic that is deleted and another one that is created in its place: no mask of the first
 * remains, whatever they have in common. */
BOTH(a_topic_that_replaces_another_has_its_own_rights)
{
    struct bench *b = bench_start(backend, rights);
    uint64_t subject;
    struct client client = client_with(b, "User:alice", WRITE, &subject);
    CHECK_EQUAL(produce_error(&client), 0);
    struct part part = {0, {.mark = 3, .record_count = 1}};
    for (int round = 0; round < 600; round++) { /* more than a subject caches */
        bool ours = round % 2;
        bench_topic_remove(b, b->topic_id);
        bench_topic_put(b, b->topic_id, ours ? "quick" : "secret", bench_slots, PARTITIONS);
        struct frame frame = {0};
        struct produced out;
        /* Produce 13 names topics by id: the same one for both */
        uint32_t begin = frame_begin(&frame, 0, 13, 9);
        uint8_t batch[256];
        uint32_t size_bytes = log_encode(batch, part.batch);
        put(&frame, 1, 0), put(&frame, 1, 0), put(&frame, 2, 0xffff), put(&frame, 4, LIMIT_MS), put(&frame, 1, 2);
        put_bytes(&frame, b->topic_id, 16), put(&frame, 1, 2), put(&frame, 4, 0);
        for (uint32_t left = size_bytes + 1; left; left >>= 7)
            put(&frame, 1, left >> 7 ? (left & 0x7f) | 0x80 : left);
        put_bytes(&frame, batch, size_bytes), put(&frame, 3, 0);
        frame_end(&frame, begin);
        CHECK(client_send(&client, &frame));
        frame_free(&frame);
        CHECK_EQUAL(client_receive(&client), 1);
        /* correlation id, tags, one topic: its id, one partition: index, error */
        out.correlation_id = (int32_t)take(&client, 4), take(&client, 1), take(&client, 1), take_bytes(&client, 16);
        take(&client, 1), take(&client, 4);
        CHECK_EQUAL(out.correlation_id, 9);
        CHECK_EQUAL((int16_t)take(&client, 2), ours ? 0 : DENIED);
    }
    client_close(&client);
    bench_stop(b);
}

static void request_metadata(struct client *client)
{
    struct frame frame = {0};
    uint32_t begin = frame_begin(&frame, 3, 1, 5);
    put(&frame, 4, UINT32_MAX);
    frame_end(&frame, begin);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
}

static bool metadata_are(struct client *client, const char *body)
{
    return client_receive(client) == 1 && client->reply_bytes == 4 + strlen(body) &&
           memcmp(client->reply + 4, body, strlen(body)) == 0;
}

BOTH(a_cached_answer_is_reused_only_for_the_same_rights)
{
    struct bench *b = bench_start(backend, rights);
    uint64_t alice, bob;
    struct client first = client_with(b, "User:alice", EVERYTHING, &alice), again = client_of(b, "User:alice"),
                  other = client_with(b, "User:bob", 0, &bob);
    request_metadata(&first);
    struct mqd_descriptor request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    uint64_t at = 4096; /* the frame follows the block with the principal */
    memcpy(b->arenas[ACCEPTOR] + at, "\0\0\0\5all topics", 14);
    struct mqd_descriptor answer = {.kind = MQD_LINK_RESPONSE,
                                    .flags = MQD_RESPONSE_CACHEABLE,
                                    .token = request.token,
                                    .offset = at,
                                    .size_bytes = 14,
                                    .a = (int64_t)mqd_control_metadata_version(b->control)};
    bench_put(b, ACCEPTOR, 0, answer);
    CHECK(metadata_are(&first, "all topics"));
    request_metadata(&again);
    CHECK(metadata_are(&again, "all topics")); /* from the cache */
    request_metadata(&other);
    request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    memcpy(b->arenas[ACCEPTOR] + at + 64, "\0\0\0\5none", 8);
    answer.token = request.token, answer.offset = at + 64, answer.size_bytes = 8;
    bench_put(b, ACCEPTOR, 0, answer);
    CHECK(metadata_are(&other, "none"));
    CHECK_EQUAL(rights_grant(b, alice, 0, 0), 0);
    request_metadata(&again); /* with other rights there is another response */
    request = bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    answer.token = request.token;
    bench_put(b, ACCEPTOR, 0, answer);
    CHECK(metadata_are(&again, "none"));
    client_close(&first), client_close(&again), client_close(&other);
    bench_stop(b);
}

/* A transactional id that the principal may not use refuses the whole request, before the topic
 * is checked. */
BOTH(a_transactional_id_needs_a_right)
{
    struct bench *b = bench_start(backend, rights);
    struct client client = client_of(b, "User:alice");
    uint64_t subject = rights_event(b, MQD_EVENT_SUBJECT_REQUESTED).token;
    for (int may = 0; may < 2; may++) {
        struct right topic = {"quick", EVERYTHING, 0}, id = {"mine", may ? WRITE : READ, 0};
        struct table topics = table_of(&topic, 1, NULL, 0, 0), ids = table_of(&id, 1, NULL, 0, 0);
        struct mqd_rights_tables tables = rights_tables(&topics, &ids, &ids);
        CHECK_EQUAL(mqd_reactor_subject_put(b->reactors[0], ++b->token, subject, &tables), 0);
        CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
        free(topics.bytes), free(ids.bytes);
        for (int transactional = 0; transactional < 2; transactional++) {
            struct frame frame = {0};
            uint8_t batch[256];
            struct log_batch one = {.mark = 3,
                                    .record_count = 1,
                                    .producer_id = transactional ? 8 : 0,
                                    .attributes = transactional ? 0x10 : 0};
            uint32_t size_bytes = log_encode(batch, one), begin = frame_begin(&frame, 0, 7, 9);
            put_text(&frame, "mine"), put(&frame, 2, 0xffff), put(&frame, 4, 2000), put(&frame, 4, 1);
            put_text(&frame, "quick"), put(&frame, 4, 1), put(&frame, 4, 0), put(&frame, 4, size_bytes);
            put_bytes(&frame, batch, size_bytes), frame_end(&frame, begin);
            CHECK(client_send(&client, &frame));
            frame_free(&frame);
            CHECK_EQUAL(client_receive(&client), 1);
            CHECK_EQUAL(take_produced(&client).error[0], transactional && !may ? DENIED_ID : 0);
        }
    }
    client_close(&client);
    bench_stop(b);
}

BOTH(denials_are_reported_once_and_allowed_where_they_are_only_logged)
{
    for (int on = 0; on < 2; on++) {
        struct bench *b = bench_start(backend, on ? rights : only_logged);
        uint64_t subject;
        struct client client = client_with(b, "User:alice", 0, &subject);
        for (int i = 0; i < 3; i++)
            CHECK_EQUAL(produce_error(&client), on ? DENIED : 0);
        struct mqd_event event = rights_event(b, MQD_EVENT_DENIED);
        CHECK_EQUAL(event.token, subject);
        CHECK_EQUAL(event.operation, 4);
        CHECK_EQUAL(event.resource_type, 2);
        CHECK(strcmp(event.text, "quick") == 0);
        CHECK_EQUAL(event.count, 1);
        bench_topic_put(b, b->topic_id, "quick", bench_slots, PARTITIONS);
        while (mqd_reactor_next_event(b->reactors[0], &event))
            CHECK(event.kind != MQD_EVENT_DENIED);
        client_close(&client);
        bench_stop(b);
    }
}

static void rights_repeated(struct bench *b)
{
    rights(b);
    b->options[0].denied_interval_ms = 20;
}

BOTH(denials_between_two_reports_are_counted)
{
    struct bench *b = bench_start(backend, rights_repeated);
    uint64_t subject, denied = 1;
    struct client client = client_with(b, "User:alice", 0, &subject);
    struct mqd_event event;
    CHECK_EQUAL(produce_error(&client), DENIED);
    CHECK_EQUAL(rights_event(b, MQD_EVENT_DENIED).count, 1);
    for (uint32_t reported = 1; reported < 30;) {
        CHECK_EQUAL(produce_error(&client), DENIED);
        denied++;
        while (mqd_reactor_next_event(b->reactors[0], &event))
            if (event.kind == MQD_EVENT_DENIED) {
                reported += event.count;
                CHECK_EQUAL(reported, denied);
            }
    }
    client_close(&client);
    bench_stop(b);
}

/* A host without its lease may have missed that a right was revoked. */
BOTH(without_the_lease_nothing_is_read)
{
    static struct fetched fetched;
    struct bench *b = bench_start(backend, rights);
    uint64_t subject;
    int64_t offset;
    struct client client = client_with(b, "User:alice", EVERYTHING, &subject);
    CHECK_EQUAL(fetch_error(&client, &fetched), 0);
    mqd_control_set_broker(b->control, EPOCH_OF(1), 1, 1); /* expired long ago */
    CHECK_EQUAL(list_offset(&client, -2, &offset), 0);     /* what follows is read in a later turn */
    CHECK_EQUAL(fetch_error(&client, &fetched), 6);
    mqd_control_set_broker(b->control, EPOCH_OF(1), 1, INT64_MAX);
    CHECK_EQUAL(list_offset(&client, -2, &offset), 0);
    CHECK_EQUAL(fetch_error(&client, &fetched), 0);
    client_close(&client);
    bench_stop(b);
}

/* Hosts of the cluster have no principal here; their requests were checked where they
 * entered. */
BOTH(hosts_of_the_cluster_need_no_rights)
{
    static struct fetched fetched;
    struct bench *b = bench_start(backend, rights);
    struct client host = client_open_by(b, 0, SASL_LISTENER, 3);
    CHECK_EQUAL(produce_error(&host), 0);
    CHECK_EQUAL(fetch_error(&host, &fetched), 0);
    client_close(&host);
    bench_stop(b);
}

/* More principals than are cached connect and disconnect; evicted ones are reported. */
BOTH(principals_are_added_and_removed)
{
    enum { PRINCIPALS = 300, KEPT = 256 };
    struct bench *b = bench_start(backend, rights);
    uint64_t first = 0;
    for (int i = 0; i < PRINCIPALS; i++) {
        char principal[16];
        uint64_t subject;
        snprintf(principal, sizeof principal, "User:%d", i);
        struct client client = client_with(b, principal, WRITE, &subject);
        first = i ? first : subject;
        CHECK_EQUAL(produce_error(&client), 0);
        client_close(&client);
    }
    uint64_t gone = rights_event(b, MQD_EVENT_SUBJECT_GONE).token; /* earlier ones were passed over */
    CHECK_EQUAL(rights_grant(b, gone, WRITE, 0), MQD_E_STALE);
    CHECK_EQUAL(rights_grant(b, first, WRITE, 0), MQD_E_STALE);
    bench_stop(b);
}
