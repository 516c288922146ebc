/* tsan: long */
/* Share groups over real sockets and files, with both I/O backends: two workers, either of which
 * may own the partition, and a share coordinator played by the test. Rules of states and epochs are
 * in tests/share. */
#include "mqd_reactor_share_test.h"

#include "server/share/share.h"

static void sparse_index(struct bench *b)
{
    b->log_options.index_interval_bytes = 4096;
}

static struct coordinator *start(int backend)
{
    return start_with(backend, sparse_index);
}

/* Partition 0 is owned by worker 0, partition 1 by worker 1; the clients are with worker 0. */
static void exercise_partition(struct coordinator *k, int32_t partition)
{
    struct client one = client_open(k->b, 0), two = client_open(k->b, 0);
    produce(k, partition, 10);
    struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS},
                         c = {.member = "c", .partition = partition, .type = -1, .wait_ms = 1};
    struct answered answered = fetch(k, &one, a);
    check_run(&answered, 0, 9, 1);
    CHECK_EQUAL(answered.lock_ms, 30000);
    answered = fetch(k, &two, c); /* S1 */
    CHECK_EQUAL(answered.run_count, 0);
    CHECK_EQUAL(answered.partition_count, 1);
    c.epoch = 1, c.type = MQD_SHARE_ACCEPT, c.last = 3;
    CHECK_EQUAL(acknowledge(k, &two, c).partition_error, MQD_KAFKA_INVALID_RECORD_STATE);
    /* accepted, released and rejected; released records are delivered again immediately */
    a.epoch = 1, a.type = MQD_SHARE_ACCEPT, a.first = 0, a.last = 3;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, 0);
    c.epoch = 2, c.type = -1, c.wait_ms = LIMIT_MS;
    send_share_request(k, &two, FETCH, c);
    a.epoch = 2, a.type = MQD_SHARE_RELEASE, a.first = 4, a.last = 6;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, 0);
    answered = take_answer(&two, FETCH);
    check_run(&answered, 4, 6, 2);
    /* the rest is released with the session, and its connection */
    a.epoch = -1, a.type = -1, a.partition = -1;
    answered = acknowledge(k, &one, a);
    CHECK_EQUAL(answered.error, 0);
    a.epoch = 3;
    CHECK_EQUAL(acknowledge(k, &one, a).error, MQD_KAFKA_SHARE_SESSION_NOT_FOUND);
    client_close(&two);
    struct client three = client_open(k->b, 0);
    struct share_request e = {
        .member = "e", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .records_max = 100};
    int64_t seen = 0;
    for (int tries = 0; tries < 10 && seen < 6; tries++, e.epoch++) { /* 4 to 6 may come later than 7 to 9 */
        answered = fetch(k, &three, e);
        CHECK_EQUAL(answered.error, 0);
        for (int i = 0; i < answered.run_count; i++)
            seen += answered.runs[i].last - answered.runs[i].first + 1;
    }
    CHECK_EQUAL(seen, 6);
    client_close(&one);
    client_close(&three);
}

BOTH(members_hold_acknowledge_and_release)
{
    struct coordinator *k = start(backend);
    exercise_partition(k, 0);
    exercise_partition(k, 1);
    CHECK(read_locked(k, &k->reads) >= 2);
    stop(k);
}

BOTH(a_response_waits_for_persistence)
{
    struct coordinator *k = start(backend);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0), two = client_open(k->b, 0);
        produce(k, partition, 4);
        struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS},
                             c = {.member = "c", .partition = partition, .type = -1, .wait_ms = 20};
        struct answered answered = fetch(k, &one, a);
        check_run(&answered, 0, 3, 1);
        set_hold(k, true);
        a.epoch = 1, a.type = MQD_SHARE_ACCEPT, a.last = 3;
        send_share_request(k, &one, ACKNOWLEDGE, a);
        CHECK_EQUAL(fetch(k, &two, c).run_count, 0); /* done in memory: no other member gets them */
        struct pollfd early = {one.fd, POLLIN, 0};
        CHECK_EQUAL(poll(&early, 1, 50), 0); /* S6 */
        set_hold(k, false);
        CHECK_EQUAL(take_answer(&one, ACKNOWLEDGE).partition_error, 0);
        client_close(&one);
        client_close(&two);
    }
    stop(k);
}

BOTH(a_lock_that_ends_gives_the_record_to_a_parked_fetch)
{
    struct coordinator *k = start(backend);
    pthread_mutex_lock(&k->mutex);
    k->lock_ms = 100;
    pthread_mutex_unlock(&k->mutex);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0), two = client_open(k->b, 1);
        produce(k, partition, 4);
        struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS},
                             c = {.member = "c", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        struct answered answered = fetch(k, &one, a);
        check_run(&answered, 0, 3, 1);
        answered = fetch(k, &two, c);
        check_run(&answered, 0, 3, 2);
        a.epoch = 1, a.type = MQD_SHARE_ACCEPT, a.last = 3;
        CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_RECORD_STATE);
        client_close(&one);
        client_close(&two);
    }
    stop(k);
}

/* A record that was released, by its member or with its session, waits; then a parked fetch gets
 * it. The reactor counts in whole milliseconds. */
BOTH(a_backoff_delays_what_is_released)
{
    struct coordinator *k = start(backend);
    pthread_mutex_lock(&k->mutex);
    k->backoff_ms = 60;
    pthread_mutex_unlock(&k->mutex);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0), two = client_open(k->b, 1);
        produce(k, partition, 4);
        struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS},
                             c = {.member = "c", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        check_run((struct answered[]){fetch(k, &one, a)}, 0, 3, 1);
        a.epoch = 1, a.type = MQD_SHARE_RELEASE, a.first = 2, a.last = 2;
        int64_t released_ns = test_now_ns();
        CHECK_EQUAL(acknowledge(k, &one, a).partition_error, 0);
        check_run((struct answered[]){fetch(k, &two, c)}, 2, 2, 2);
        CHECK(test_now_ns() - released_ns > 59 * 1000000);
        c.epoch = 1;
        send_share_request(k, &two, FETCH, c);
        released_ns = test_now_ns();
        client_close(&one); /* releases the others */
        struct answered answered = take_answer(&two, FETCH);
        CHECK_EQUAL(answered.runs[0].count, 2);
        CHECK(test_now_ns() - released_ns > 59 * 1000000);
        client_close(&two);
    }
    stop(k);
}

BOTH(a_parked_fetch_wakes_for_new_records)
{
    struct coordinator *k = start(backend);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0);
        struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        for (int64_t round = 0; round < 20; round++) {
            a.epoch = (int32_t)round;
            send_share_request(k, &one, FETCH, a);
            produce(k, partition, 1);
            struct answered answered = take_answer(&one, FETCH);
            check_run(&answered, round, round, 1);
            a.partition = partition, a.type = MQD_SHARE_ACCEPT, a.first = a.last = round;
        }
        client_close(&one);
    }
    stop(k);
}

BOTH(requests_are_refused_as_in_kafka)
{
    struct coordinator *k = start(backend);
    struct client one = client_open(k->b, 0);
    produce(k, 0, 4);
    struct share_request a = {.member = "a", .type = -1, .wait_ms = LIMIT_MS};
    a.epoch = 1;
    CHECK_EQUAL(fetch(k, &one, a).error, MQD_KAFKA_SHARE_SESSION_NOT_FOUND);
    a.epoch = 0;
    CHECK_EQUAL(acknowledge(k, &one, a).error, MQD_KAFKA_INVALID_SHARE_SESSION_EPOCH);
    a.type = MQD_SHARE_ACCEPT;
    CHECK_EQUAL(fetch(k, &one, a).error, MQD_KAFKA_INVALID_REQUEST);
    a.type = -1, a.member = "";
    CHECK_EQUAL(fetch(k, &one, a).error, MQD_KAFKA_INVALID_REQUEST);
    a.member = "a", a.records_max = 2, a.strict = true;
    struct answered answered = fetch(k, &one, a);
    check_run(&answered, 0, 1, 1);
    a.epoch = 2;
    CHECK_EQUAL(fetch(k, &one, a).error, MQD_KAFKA_INVALID_SHARE_SESSION_EPOCH);
    a.epoch = 1, a.type = 5, a.first = 0, a.last = 0;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_REQUEST);
    a.epoch = 2, a.type = MQD_SHARE_RENEW; /* not declared as a renewal */
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_REQUEST);
    a.epoch = 3, a.type = MQD_SHARE_ACCEPT, a.again = true; /* twice the same range */
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_RECORD_STATE);
    a.epoch = 4, a.again = false, a.first = 1, a.last = 0;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_REQUEST);
    a.epoch = 5, a.first = 0, a.last = INT64_MAX; /* past what was acquired */
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_REQUEST);
    a.epoch = 6, a.last = 0, a.renews = true, a.type = MQD_SHARE_RENEW, a.wait_ms = 0;
    answered = fetch(k, &one, a);
    CHECK_EQUAL(answered.error, 0);
    CHECK_EQUAL(answered.acknowledge_error, 0);
    CHECK_EQUAL(answered.run_count, 0);
    a.epoch = 7, a.wait_ms = 100;
    CHECK_EQUAL(fetch(k, &one, a).error, MQD_KAFKA_INVALID_REQUEST);
    a.renews = false, a.type = -1, a.partition = 9;
    answered = fetch(k, &one, a);
    CHECK_EQUAL(answered.partition_error, MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION);
    a.epoch = 8, a.type = MQD_SHARE_ACCEPT, a.first = 1, a.last = 0; /* checked before the partition */
    CHECK_EQUAL(fetch(k, &one, a).acknowledge_error, MQD_KAFKA_INVALID_REQUEST);
    a.epoch = 9;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_REQUEST);
    a.epoch = 10, a.type = -1, a.member = "a member id of thirty-seven characters";
    CHECK_EQUAL(fetch(k, &one, a).error, MQD_KAFKA_INVALID_REQUEST);
    a.member = "a", a.epoch = -1, a.partition = 0; /* without acknowledgements there is nothing to report */
    answered = fetch(k, &one, a);
    CHECK_EQUAL(answered.error, 0);
    CHECK_EQUAL(answered.partition_count, 0);
    client_close(&one);
    stop(k);
}

BOTH(a_partition_is_reported_where_kafka_has_something_to_report)
{
    struct coordinator *k = start(backend);
    struct client one = client_open(k->b, 0);
    struct share_request a = {.member = "a", .type = -1, .wait_ms = 1};
    CHECK_EQUAL(fetch(k, &one, a).partition_count, 1); /* it opens the session */
    a.epoch = 1;
    CHECK_EQUAL(fetch(k, &one, a).partition_count, 0); /* named again */
    a.epoch = 2, a.partition = 1;
    CHECK_EQUAL(fetch(k, &one, a).partition_count, 1); /* added to the session */
    a.epoch = 3;
    CHECK_EQUAL(fetch(k, &one, a).partition_count, 0);
    a.epoch = 4, a.partition = 0;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_count, 0); /* nothing is acknowledged */
    produce(k, 0, 4);
    a.epoch = 5, a.wait_ms = LIMIT_MS;
    struct answered answered = fetch(k, &one, a);
    check_run(&answered, 0, 3, 1);
    CHECK_EQUAL(answered.partition_count, 1);
    a.wait_ms = 1, a.beside = true, a.type = MQD_SHARE_ACCEPT;
    a.epoch = 6, a.first = 1, a.last = 0; /* malformed: it alone has an outcome */
    CHECK_EQUAL(acknowledge(k, &one, a).partition_count, 1);
    a.epoch = 7;
    CHECK_EQUAL(fetch(k, &one, a).partition_count, 1);
    a.epoch = 8, a.first = 0;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_count, 2);
    a.epoch = 9, a.first = a.last = 1;
    CHECK_EQUAL(fetch(k, &one, a).partition_count, 2);
    a.beside = false, a.partition = 9;
    for (int last = 0; last < 2; last++) { /* forgotten, and when the session ends: it is not read */
        a.epoch = last ? -1 : 10, a.forgets = !last;
        answered = fetch(k, &one, a);
        CHECK_EQUAL(answered.partition_error, 0);
        CHECK_EQUAL(answered.acknowledge_error, MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION);
    }
    client_close(&one);
    stop(k);
}

BOTH(sessions_are_bounded_and_end_with_their_connection)
{
    struct coordinator *k = start(backend);
    struct client clients[9];
    char name[2] = "0";
    for (int i = 0; i < 9; i++, name[0]++) { /* 8 for both workers */
        clients[i] = client_open(k->b, (uint32_t)i % 2);
        struct share_request a = {.member = name, .type = -1};
        CHECK_EQUAL(fetch(k, &clients[i], a).error, i < 8 ? 0 : MQD_KAFKA_SHARE_SESSION_LIMIT_REACHED);
    }
    client_close(&clients[1]);
    struct share_request a = {.member = "late", .type = -1};
    int16_t error = -1;
    for (int tries = 0; tries < 1000 && error; tries++) {
        error = fetch(k, &clients[8], a).error;
        CHECK(error == 0 || error == MQD_KAFKA_SHARE_SESSION_LIMIT_REACHED);
    }
    CHECK_EQUAL(error, 0);
    for (int i = 0; i < 9; i++)
        if (i != 1)
            client_close(&clients[i]);
    stop(k);
}

/* H5: an owner that starts has the partition's slot before it leads. The test is the owner of partition 4. */
BOTH(a_session_joins_again_where_it_was_not_counted)
{
    struct coordinator *k = start(backend);
    struct client one = client_open(k->b, 0);
    static const struct {
        int16_t error;
        uint16_t flags;
        uint8_t joins;
    } steps[] = {{MQD_KAFKA_NOT_LEADER_OR_FOLLOWER, MQD_SHARED_REFUSED, 1},
                 {0, 0, 1},
                 {MQD_KAFKA_FENCED_STATE_EPOCH, 0, 0}, /* of its state: it counts the session */
                 {0, 0, 0}};
    for (int32_t step = 0; step < 4; step++) {
        struct share_request a = {.member = "a", .epoch = step, .partition = 4, .type = -1, .wait_ms = 1};
        struct mqd_share_owner_request asked;
        uint32_t from;
        send_share_request(k, &one, FETCH, a);
        struct mqd_descriptor request = bench_expect(k->b, FAKE, MQD_LINK_SHARE, &from);
        memcpy(&asked, k->b->arenas[from] + request.offset, sizeof asked);
        CHECK_EQUAL(asked.joins, steps[step].joins);
        bench_put(k->b, FAKE, from,
                  (struct mqd_descriptor){.kind = MQD_LINK_SHARE_RESPONSE,
                                          .token = request.token,
                                          .error = steps[step].error,
                                          .flags = steps[step].flags});
        CHECK_EQUAL(take_answer(&one, FETCH).error, 0);
    }
    client_close(&one);
    stop(k);
}

BOTH(an_owner_that_does_not_lead_counts_no_session)
{
    struct coordinator *k = start(backend);
    struct mqd_share_owner_request request = {.kind = MQD_SHARE_REQUEST_ACQUIRE, .joins = 1};
    memcpy(request.topic_id, k->b->topic_id, sizeof request.topic_id);
    memcpy(k->b->arenas[FAKE], &request, sizeof request);
    bench_put(k->b, FAKE, 1, /* partition 0 is worker 0's */
              (struct mqd_descriptor){.kind = MQD_LINK_SHARE,
                                      .token = 5,
                                      .size_bytes = sizeof request,
                                      .c = (int64_t)mqd_endpoint_generation(k->b->control, 1)});
    struct mqd_descriptor response = bench_expect(k->b, FAKE, MQD_LINK_SHARE_RESPONSE, NULL);
    CHECK_EQUAL(response.error, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
    CHECK_EQUAL(response.flags, MQD_SHARED_REFUSED);
    stop(k);
}

BOTH(a_state_that_cannot_be_read_is_an_error)
{
    struct coordinator *k = start(backend);
    struct client one = client_open(k->b, 0);
    pthread_mutex_lock(&k->mutex);
    k->read_error = MQD_KAFKA_GROUP_ID_NOT_FOUND;
    pthread_mutex_unlock(&k->mutex);
    struct share_request a = {.member = "a", .partition = 1, .type = -1, .wait_ms = LIMIT_MS};
    CHECK_EQUAL(fetch(k, &one, a).partition_error, MQD_KAFKA_GROUP_ID_NOT_FOUND);
    client_close(&one);
    stop(k);
}

BOTH(min_bytes_are_waited_for)
{
    struct coordinator *k = start(backend);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0);
        produce(k, partition, 1);
        struct share_request a = {
            .member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .bytes_min = 500};
        send_share_request(k, &one, FETCH, a);
        struct pollfd early = {one.fd, POLLIN, 0};
        CHECK_EQUAL(poll(&early, 1, 30), 0);
        produce(k, partition, 1);
        struct answered answered = take_answer(&one, FETCH);
        check_run(&answered, 0, 1, 1);
        a.epoch = 1, a.wait_ms = 30, a.bytes_min = 1 << 20, a.partition = -1;
        produce(k, partition, 1);
        answered = fetch(k, &one, a); /* less, when the time is up */
        check_run(&answered, 2, 2, 1);
        client_close(&one);
    }
    stop(k);
}

/* Where an acquisition ends, the sparse index has no entry. */
BOTH(a_backlog_is_acquired_in_parts)
{
    struct coordinator *k = start(backend);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0);
        for (int i = 0; i < 80; i++) /* enough for the index to be written */
            produce_batch(k, partition, 1, 3000);
        struct share_request a = {
            .member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .records_max = 19};
        for (int64_t first = 0; first < 76; first += 19, a.epoch++) {
            struct answered answered = fetch(k, &one, a);
            check_run(&answered, first, first + 18, 1);
        }
        client_close(&one);
    }
    stop(k);
}

/* DeleteRecords may leave a part of a batch. */
BOTH(the_log_may_start_within_a_batch)
{
    struct coordinator *k = start(backend);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0);
        produce(k, partition, 4);
        struct share_request a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        check_run((struct answered[]){fetch(k, &one, a)}, 0, 3, 1);
        a.epoch = 1, a.type = MQD_SHARE_ACCEPT, a.last = 2;
        CHECK_EQUAL(acknowledge(k, &one, a).partition_error, 0);
        a.epoch = 2, a.type = MQD_SHARE_RELEASE, a.first = a.last = 3;
        CHECK_EQUAL(acknowledge(k, &one, a).partition_error, 0);
        uint32_t owner = bench_owner((uint32_t)partition);
        CHECK_EQUAL(mqd_reactor_advance_start(k->b->reactors[owner], ++k->b->token, (uint32_t)partition, 3), 0);
        CHECK_EQUAL(bench_done(k->b, owner, k->b->token).offset, 3);
        a.epoch = 3, a.type = -1;
        check_run((struct answered[]){fetch(k, &one, a)}, 3, 3, 2);
        client_close(&one);
    }
    stop(k);
}

/* The feature is off: the acceptor responds. */
BOTH(without_share_version_the_acceptor_answers)
{
    struct bench *b = bench_start(backend, NULL);
    struct coordinator k = {.b = b};
    struct client one = client_open(b, 0);
    struct share_request a = {.member = "a", .type = -1};
    send_share_request(&k, &one, FETCH, a);
    bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    client_close(&one);
    bench_stop(b);
}
