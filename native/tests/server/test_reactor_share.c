/* tsan */
/* Share groups over real sockets and files, with both I/O backends: two workers, either of which may
 * own the partition, and a share coordinator that the test plays. Single rules of states and epochs are
 * in tests/share. */
#include <pthread.h>

#include "mqd_reactor_test.h"

#include "share/partition.h"
#include "wire/buffer.h"
#include "wire/kafka_errors.h"

#define FETCH 78
#define ACKNOWLEDGE 79

/* ---- the share coordinator, in a thread of its own ---- */

struct coordinator {
    struct bench *b;
    pthread_t thread;
    pthread_mutex_t mutex;
    bool stop, holds_writes;
    int32_t lock_ms, backoff_ms;
    int16_t read_error;
    int reads, writes, held;
    struct mqd_descriptor held_write;
    uint32_t held_from;
    uint64_t at;
};

static void answer_put(struct coordinator *k, const struct mqd_descriptor *asked, uint32_t from)
{
    struct bench *b = k->b;
    struct mqd_buffer out = {0};
    int32_t words[3] = {k->lock_ms, 5, 2000};
    uint8_t rest[12] = {0, 1}; /* earliest */
    int32_t backoffs[2] = {k->backoff_ms, 60000};
    mqd_put_bytes(&out, words, sizeof words);
    mqd_put_bytes(&out, rest, sizeof rest);
    mqd_put_bytes(&out, backoffs, sizeof backoffs);
    mqd_put_count(&out, true, 1);
    mqd_put_bytes(&out, b->topic_id, 16);
    mqd_put_count(&out, true, 1);
    mqd_put_i32(&out, (int32_t)asked->slot); /* slot n is partition n */
    mqd_put_i16(&out, asked->flags == 84 ? k->read_error : 0);
    mqd_put_message(&out, true, NULL);
    if (asked->flags == 84) {
        mqd_put_i32(&out, 1);
        mqd_put_i64(&out, -1);
        mqd_put_count(&out, true, 0);
    }
    for (int level = 0; level < 3; level++)
        mqd_put_no_tags(&out, true);
    k->at = (k->at + 4096) % (1u << 20);
    memcpy(b->arenas[ACCEPTOR] + k->at, out.bytes, out.size_bytes);
    bench_put(b, ACCEPTOR, from,
              (struct mqd_descriptor){
                  .kind = MQD_LINK_SHARE_STATED, .token = asked->token, .offset = k->at, .size_bytes = out.size_bytes});
    mqd_buffer_free(&out);
}

static void *coordinate(void *argument)
{
    struct coordinator *k = argument;
    for (;;) {
        struct mqd_descriptor asked;
        uint32_t from;
        bool any = bench_take(k->b, ACCEPTOR, &asked, &from, 5);
        pthread_mutex_lock(&k->mutex);
        bool stop = k->stop;
        if (k->held && !k->holds_writes) {
            k->held = 0;
            answer_put(k, &k->held_write, k->held_from);
        }
        if (any && asked.kind == MQD_LINK_SHARE_STATE) {
            k->reads += asked.flags == 84;
            k->writes += asked.flags == 85;
            if (asked.flags == 85 && k->holds_writes)
                k->held = 1, k->held_write = asked, k->held_from = from;
            else
                answer_put(k, &asked, from);
        }
        pthread_mutex_unlock(&k->mutex);
        if (stop)
            return NULL;
    }
}

static int look(struct coordinator *k, const int *what)
{
    pthread_mutex_lock(&k->mutex);
    int found = *what;
    pthread_mutex_unlock(&k->mutex);
    return found;
}

static void set_hold(struct coordinator *k, bool holds)
{
    pthread_mutex_lock(&k->mutex);
    k->holds_writes = holds;
    pthread_mutex_unlock(&k->mutex);
}

static void sparse_index(struct bench *b)
{
    b->log_options.index_interval_bytes = 4096;
}

static struct coordinator *start(int backend)
{
    struct coordinator *k = calloc(1, sizeof *k);
    k->b = bench_start(backend, sparse_index);
    k->lock_ms = 30000;
    mqd_control_set_share_version(k->b->control, 1);
    pthread_mutex_init(&k->mutex, NULL);
    CHECK_OR(pthread_create(&k->thread, NULL, coordinate, k) == 0, abort());
    return k;
}

static void stop(struct coordinator *k)
{
    pthread_mutex_lock(&k->mutex);
    k->stop = true;
    pthread_mutex_unlock(&k->mutex);
    pthread_join(k->thread, NULL);
    bench_stop(k->b);
    free(k);
}

/* ---- requests ---- */

struct asks { /* one partition */
    const char *member;
    int32_t epoch, partition, wait_ms, records_max, bytes_min;
    int64_t first, last; /* acknowledged with `type`, unless that is -1 */
    int type;
    bool strict, renews, forgets, again; /* again: the range is named twice */
    int16_t version;                     /* 0 = 2 */
};

static void put_name(struct mqd_buffer *body, const char *name)
{
    mqd_put_text(body, true, (struct mqd_text){(const uint8_t *)name, (int32_t)strlen(name)});
}

static void send_asks(struct coordinator *k, struct client *client, int16_t api_key, struct asks asks)
{
    struct frame frame = {0};
    struct mqd_buffer body = {0};
    int16_t version = asks.version ? asks.version : 2;
    int ranges = asks.type < 0 ? 0 : asks.again ? 2 : 1;
    uint8_t type = (uint8_t)asks.type, strict = asks.strict, renews = asks.renews;
    mqd_put_no_tags(&body, true); /* of the header */
    put_name(&body, "jobs");
    put_name(&body, asks.member);
    mqd_put_i32(&body, asks.epoch);
    if (api_key == FETCH) {
        mqd_put_i32(&body, asks.wait_ms);
        mqd_put_i32(&body, asks.renews ? 0 : asks.bytes_min ? asks.bytes_min : 1);
        mqd_put_i32(&body, asks.renews ? 0 : 1 << 20);
        mqd_put_i32(&body, asks.renews ? 0 : asks.records_max ? asks.records_max : 500);
        mqd_put_i32(&body, 500);
        if (version >= 2)
            mqd_put_bytes(&body, &strict, 1);
    }
    if (version >= 2)
        mqd_put_bytes(&body, &renews, 1);
    mqd_put_count(&body, true, 1);
    mqd_put_bytes(&body, k->b->topic_id, 16);
    mqd_put_count(&body, true, asks.partition < 0 ? 0 : 1);
    if (asks.partition >= 0) {
        mqd_put_i32(&body, asks.partition);
        mqd_put_count(&body, true, ranges);
        for (int i = 0; i < ranges; i++) {
            mqd_put_i64(&body, asks.first);
            mqd_put_i64(&body, asks.last);
            mqd_put_count(&body, true, 1);
            mqd_put_bytes(&body, &type, 1);
            mqd_put_no_tags(&body, true);
        }
        mqd_put_no_tags(&body, true);
    }
    mqd_put_no_tags(&body, true); /* of the topic */
    if (api_key == FETCH)
        mqd_put_count(&body, true, 0);
    mqd_put_no_tags(&body, true);
    uint32_t begin = frame_begin(&frame, api_key, version, 1);
    put_bytes(&frame, body.bytes, body.size_bytes);
    frame_end(&frame, begin);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
    mqd_buffer_free(&body);
}

struct answered {
    int16_t error, partition_error, acknowledge_error;
    int32_t lock_ms;
    int partition_count, run_count;
    uint32_t records_bytes;
    struct mqd_share_run runs[8];
};

static uint32_t take_varint(struct client *client)
{
    uint32_t value = 0;
    for (int shift = 0;; shift += 7) {
        uint8_t byte = (uint8_t)take(client, 1);
        value |= (uint32_t)(byte & 0x7f) << shift;
        if (byte < 0x80)
            return value;
    }
}

static void take_message(struct client *client)
{
    uint32_t length = take_varint(client);
    if (length > 1)
        take_bytes(client, length - 1);
}

static struct answered take_answer(struct client *client, int16_t api_key)
{
    struct answered out = {.partition_error = -99};
    CHECK_OR(client_receive(client) == 1, return out);
    take(client, 4), take_varint(client); /* correlation id, tags */
    take(client, 4);
    out.error = (int16_t)take(client, 2);
    take_message(client);
    out.lock_ms = (int32_t)take(client, 4);
    for (uint32_t topics = take_varint(client); topics > 1; topics--) {
        take_bytes(client, 16);
        for (uint32_t partitions = take_varint(client); partitions > 1; partitions--) {
            take(client, 4);
            out.partition_count++;
            out.partition_error = (int16_t)take(client, 2);
            take_message(client);
            if (api_key == FETCH) {
                out.acknowledge_error = (int16_t)take(client, 2);
                take_message(client);
            }
            take(client, 4), take(client, 4), take_varint(client); /* leader */
            if (api_key == FETCH) {
                uint32_t bytes = take_varint(client);
                out.records_bytes = bytes ? bytes - 1 : 0;
                take_bytes(client, out.records_bytes);
                for (uint32_t runs = take_varint(client); runs > 1; runs--) {
                    struct mqd_share_run run = {.first = (int64_t)take(client, 8), .last = (int64_t)take(client, 8)};
                    run.count = (int16_t)take(client, 2);
                    take_varint(client);
                    if (out.run_count < 8)
                        out.runs[out.run_count++] = run;
                }
            }
            take_varint(client);
        }
        take_varint(client);
    }
    CHECK_OR(take_varint(client) == 1, return out); /* no node endpoints */
    take_varint(client);
    CHECK_OR(!client->broken && client->at == client->reply_bytes, return out);
    return out;
}

static struct answered fetch(struct coordinator *k, struct client *client, struct asks asks)
{
    send_asks(k, client, FETCH, asks);
    return take_answer(client, FETCH);
}

static struct answered acknowledge(struct coordinator *k, struct client *client, struct asks asks)
{
    send_asks(k, client, ACKNOWLEDGE, asks);
    return take_answer(client, ACKNOWLEDGE);
}

static void produce_batch(struct coordinator *k, int32_t partition, int32_t records, uint32_t body_bytes)
{
    struct client writer = client_open(k->b, (uint32_t)partition % 2);
    struct part part = {partition, {.mark = 1, .body_bytes = body_bytes, .record_count = records}};
    CHECK_EQUAL(client_produce(&writer, -1, &part, 1).error[0], 0);
    client_close(&writer);
}

static void produce(struct coordinator *k, int32_t partition, int32_t records)
{
    produce_batch(k, partition, records, 300);
}

static void check_run(const struct answered *answered, int64_t first, int64_t last, int16_t count)
{
    CHECK_EQUAL(answered->error, 0);
    CHECK_EQUAL(answered->partition_error, 0);
    CHECK_EQUAL(answered->run_count, 1);
    CHECK_EQUAL(answered->runs[0].first, first);
    CHECK_EQUAL(answered->runs[0].last, last);
    CHECK_EQUAL(answered->runs[0].count, count);
    CHECK(answered->records_bytes >= 61);
}

/* ---- tests ---- */

/* Partition 0 is owned by worker 0, partition 1 by worker 1; the clients are with worker 0. */
static void one_lot(struct coordinator *k, int32_t partition)
{
    struct client one = client_open(k->b, 0), two = client_open(k->b, 0);
    produce(k, partition, 10);
    struct asks a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS},
                c = {.member = "c", .partition = partition, .type = -1, .wait_ms = 1};
    struct answered answered = fetch(k, &one, a);
    check_run(&answered, 0, 9, 1);
    CHECK_EQUAL(answered.lock_ms, 30000);
    answered = fetch(k, &two, c); /* S1 */
    CHECK_EQUAL(answered.run_count, 0);
    CHECK_EQUAL(answered.partition_count, 1);
    c.epoch = 1, c.type = MQD_SHARE_ACCEPT, c.last = 3;
    CHECK_EQUAL(acknowledge(k, &two, c).partition_error, MQD_KAFKA_INVALID_RECORD_STATE);
    /* accepted, released and rejected; the released are given out at once */
    a.epoch = 1, a.type = MQD_SHARE_ACCEPT, a.first = 0, a.last = 3;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, 0);
    c.epoch = 2, c.type = -1, c.wait_ms = LIMIT_MS;
    send_asks(k, &two, FETCH, c);
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
    struct asks e = {.member = "e", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .records_max = 100};
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
    one_lot(k, 0);
    one_lot(k, 1);
    CHECK(look(k, &k->reads) >= 2);
    stop(k);
}

BOTH(an_answer_waits_for_persistence)
{
    struct coordinator *k = start(backend);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0), two = client_open(k->b, 0);
        produce(k, partition, 4);
        struct asks a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS},
                    c = {.member = "c", .partition = partition, .type = -1, .wait_ms = 20};
        struct answered answered = fetch(k, &one, a);
        check_run(&answered, 0, 3, 1);
        set_hold(k, true);
        a.epoch = 1, a.type = MQD_SHARE_ACCEPT, a.last = 3;
        send_asks(k, &one, ACKNOWLEDGE, a);
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

BOTH(a_lock_that_ends_gives_the_record_to_who_waits)
{
    struct coordinator *k = start(backend);
    pthread_mutex_lock(&k->mutex);
    k->lock_ms = 100;
    pthread_mutex_unlock(&k->mutex);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0), two = client_open(k->b, 1);
        produce(k, partition, 4);
        struct asks a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS},
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

/* Released, by its member or with its session, a record waits; a parked fetch gets it then. The
 * reactor counts whole milliseconds. */
BOTH(a_backoff_delays_what_is_released)
{
    struct coordinator *k = start(backend);
    pthread_mutex_lock(&k->mutex);
    k->backoff_ms = 60;
    pthread_mutex_unlock(&k->mutex);
    for (int32_t partition = 0; partition < 2; partition++) {
        struct client one = client_open(k->b, 0), two = client_open(k->b, 1);
        produce(k, partition, 4);
        struct asks a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS},
                    c = {.member = "c", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        check_run((struct answered[]){fetch(k, &one, a)}, 0, 3, 1);
        a.epoch = 1, a.type = MQD_SHARE_RELEASE, a.first = 2, a.last = 2;
        int64_t released_ns = test_now_ns();
        CHECK_EQUAL(acknowledge(k, &one, a).partition_error, 0);
        check_run((struct answered[]){fetch(k, &two, c)}, 2, 2, 2);
        CHECK(test_now_ns() - released_ns > 59 * 1000000);
        c.epoch = 1;
        send_asks(k, &two, FETCH, c);
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
        struct asks a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS};
        for (int64_t round = 0; round < 20; round++) {
            a.epoch = (int32_t)round;
            send_asks(k, &one, FETCH, a);
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
    struct asks a = {.member = "a", .type = -1, .wait_ms = LIMIT_MS};
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
    a.epoch = 2, a.type = MQD_SHARE_RENEW; /* not said to be a renewal */
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_REQUEST);
    a.epoch = 3, a.type = MQD_SHARE_ACCEPT, a.again = true; /* twice the same range */
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_RECORD_STATE);
    a.epoch = 4, a.again = false, a.first = 1, a.last = 0;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_REQUEST);
    a.epoch = 5, a.first = 0, a.last = INT64_MAX;
    CHECK_EQUAL(acknowledge(k, &one, a).partition_error, MQD_KAFKA_INVALID_RECORD_STATE);
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
    a.epoch = 8, a.type = MQD_SHARE_ACCEPT, a.first = 1, a.last = 0; /* judged before the partition */
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

BOTH(sessions_are_bounded_and_end_with_their_connection)
{
    struct coordinator *k = start(backend);
    struct client clients[9];
    char name[2] = "0";
    for (int i = 0; i < 9; i++, name[0]++) { /* 8 for both workers */
        clients[i] = client_open(k->b, (uint32_t)i % 2);
        struct asks a = {.member = name, .type = -1};
        CHECK_EQUAL(fetch(k, &clients[i], a).error, i < 8 ? 0 : MQD_KAFKA_SHARE_SESSION_LIMIT_REACHED);
    }
    client_close(&clients[1]);
    struct asks a = {.member = "late", .type = -1};
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

BOTH(a_state_that_cannot_be_read_is_an_error)
{
    struct coordinator *k = start(backend);
    struct client one = client_open(k->b, 0);
    pthread_mutex_lock(&k->mutex);
    k->read_error = MQD_KAFKA_GROUP_ID_NOT_FOUND;
    pthread_mutex_unlock(&k->mutex);
    struct asks a = {.member = "a", .partition = 1, .type = -1, .wait_ms = LIMIT_MS};
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
        struct asks a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .bytes_min = 500};
        send_asks(k, &one, FETCH, a);
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
        struct asks a = {.member = "a", .partition = partition, .type = -1, .wait_ms = LIMIT_MS, .records_max = 19};
        for (int64_t first = 0; first < 76; first += 19, a.epoch++) {
            struct answered answered = fetch(k, &one, a);
            check_run(&answered, first, first + 18, 1);
        }
        client_close(&one);
    }
    stop(k);
}

/* The feature is off: the acceptor answers. */
BOTH(without_share_version_the_acceptor_answers)
{
    struct bench *b = bench_start(backend, NULL);
    struct coordinator k = {.b = b};
    struct client one = client_open(b, 0);
    struct asks a = {.member = "a", .type = -1};
    send_asks(&k, &one, FETCH, a);
    bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    client_close(&one);
    bench_stop(b);
}
