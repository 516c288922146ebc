/* For server/share/test_*.c: a share coordinator played by the test, members' requests, and the
 * responses to them. */
#ifndef MQD_REACTOR_SHARE_TEST_H
#define MQD_REACTOR_SHARE_TEST_H

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
    bool stop, holds_writes, committed, fifo;
    int32_t lock_ms, backoff_ms;
    int16_t read_error;
    int reads, writes, held;
    const struct log_batch *marker; /* to be written to `marker_slot`; then `marked` is 1 plus the error */
    uint32_t marker_slot;
    int marked;
    struct mqd_descriptor held_write;
    uint32_t held_from;
    uint64_t at;
};

static void answer_put(struct coordinator *k, const struct mqd_descriptor *asked, uint32_t from)
{
    struct bench *b = k->b;
    struct mqd_buffer out = {0};
    int32_t words[3] = {k->lock_ms, 5, 2000};
    uint8_t rest[12] = {k->committed, 1, k->fifo ? 2 : 0}; /* earliest */
    int32_t backoffs[2] = {k->backoff_ms, 60000};
    mqd_put_bytes(&out, words, sizeof words);
    mqd_put_bytes(&out, rest, sizeof rest);
    mqd_put_bytes(&out, backoffs, sizeof backoffs);
    mqd_put_count(&out, true, 1);
    mqd_put_bytes(&out, b->topic_id, 16);
    mqd_put_count(&out, true, 1);
    mqd_put_i32(&out, (int32_t)asked->slot); /* slot n is partition n */
    mqd_put_i16(&out, asked->flags == 84 ? k->read_error : 0);
    mqd_put_c_string(&out, true, NULL);
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
              (struct mqd_descriptor){.kind = MQD_LINK_SHARE_STATE_RESPONSE,
                                      .token = asked->token,
                                      .offset = k->at,
                                      .size_bytes = out.size_bytes});
    mqd_buffer_free(&out);
}

/* As written by a transaction coordinator, which is in the acceptor too. */
static void marker_put(struct coordinator *k)
{
    uint32_t owner = bench_owner(k->marker_slot);
    uint64_t at = 2u << 20;
    uint32_t size_bytes = log_encode(k->b->arenas[ACCEPTOR] + at, *k->marker);
    bench_put(k->b, ACCEPTOR, owner,
              (struct mqd_descriptor){.kind = MQD_LINK_PRODUCE,
                                      .flags = MQD_PRODUCE_CONTROL | MQD_PRODUCE_ACKS_ALL,
                                      .slot = k->marker_slot,
                                      .offset = at,
                                      .size_bytes = size_bytes,
                                      .a = -1,
                                      .c = (int64_t)mqd_endpoint_generation(k->b->control, owner)});
    k->marker = NULL;
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
        if (k->marker)
            marker_put(k);
        if (any && asked.kind == MQD_LINK_PRODUCED)
            k->marked = 1 + asked.error;
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

__attribute__((unused)) static int read_locked(struct coordinator *k, const int *what)
{
    pthread_mutex_lock(&k->mutex);
    int found = *what;
    pthread_mutex_unlock(&k->mutex);
    return found;
}

__attribute__((unused)) static void set_hold(struct coordinator *k, bool holds)
{
    pthread_mutex_lock(&k->mutex);
    k->holds_writes = holds;
    pthread_mutex_unlock(&k->mutex);
}

static struct coordinator *start_with(int backend, void (*change)(struct bench *b))
{
    struct coordinator *k = calloc(1, sizeof *k);
    k->b = bench_start(backend, change);
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

struct share_request { /* one partition */
    const char *member;
    int32_t epoch, partition, wait_ms, records_max, bytes_min;
    int64_t first, last; /* acknowledged with `type`, unless that is -1 */
    int type;
    bool strict, renews, forgets, again; /* again: the range is named twice */
    bool beside;           /* the other one of partitions 0 and 1 is named too, without acknowledgements */
    int16_t version;       /* 0 = 2 */
    const char *client_id; /* NULL = none */
};

static void put_name(struct mqd_buffer *body, const char *name)
{
    mqd_put_text(body, true, (struct mqd_text){(const uint8_t *)name, (int32_t)strlen(name)});
}

static void send_share_request(struct coordinator *k, struct client *client, int16_t api_key, struct share_request asks)
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
    mqd_put_count(&body, true, asks.partition < 0 ? 0 : 1 + asks.beside);
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
    if (asks.beside) {
        mqd_put_i32(&body, 1 - asks.partition);
        mqd_put_count(&body, true, 0);
        mqd_put_no_tags(&body, true);
    }
    mqd_put_no_tags(&body, true); /* of the topic */
    if (api_key == FETCH)
        mqd_put_count(&body, true, asks.forgets);
    if (asks.forgets) {
        mqd_put_bytes(&body, k->b->topic_id, 16);
        mqd_put_count(&body, true, 1);
        mqd_put_i32(&body, asks.partition);
        mqd_put_no_tags(&body, true);
    }
    mqd_put_no_tags(&body, true);
    uint32_t begin = frame_begin(&frame, api_key, version, 1);
    if (asks.client_id) {
        frame.size_bytes -= 2;
        put_text(&frame, asks.client_id);
    }
    put_bytes(&frame, body.bytes, body.size_bytes);
    frame_end(&frame, begin);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
    mqd_buffer_free(&body);
}

struct answered {
    int16_t error, partition_error, acknowledge_error;
    int32_t lock_ms, throttle_ms;
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

static void skip_message(struct client *client)
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
    out.throttle_ms = (int32_t)take(client, 4);
    out.error = (int16_t)take(client, 2);
    skip_message(client);
    out.lock_ms = (int32_t)take(client, 4);
    for (uint32_t topics = take_varint(client); topics > 1; topics--) {
        take_bytes(client, 16);
        for (uint32_t partitions = take_varint(client); partitions > 1; partitions--) {
            take(client, 4);
            out.partition_count++;
            out.partition_error = (int16_t)take(client, 2);
            skip_message(client);
            if (api_key == FETCH) {
                out.acknowledge_error = (int16_t)take(client, 2);
                skip_message(client);
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

static struct answered fetch(struct coordinator *k, struct client *client, struct share_request asks)
{
    send_share_request(k, client, FETCH, asks);
    return take_answer(client, FETCH);
}

__attribute__((unused)) static struct answered acknowledge(struct coordinator *k, struct client *client,
                                                           struct share_request asks)
{
    send_share_request(k, client, ACKNOWLEDGE, asks);
    return take_answer(client, ACKNOWLEDGE);
}

static void produce_batch(struct coordinator *k, int32_t partition, int32_t records, uint32_t body_bytes)
{
    struct client writer = client_open(k->b, (uint32_t)partition % 2);
    struct part part = {partition, {.mark = 1, .body_bytes = (int32_t)body_bytes, .record_count = records}};
    CHECK_EQUAL(client_produce(&writer, -1, &part, 1).error[0], 0);
    client_close(&writer);
}

__attribute__((unused)) static void produce(struct coordinator *k, int32_t partition, int32_t records)
{
    produce_batch(k, partition, records, 300);
}

__attribute__((unused)) static void check_run(const struct answered *answered, int64_t first, int64_t last,
                                              int16_t count)
{
    CHECK_EQUAL(answered->error, 0);
    CHECK_EQUAL(answered->partition_error, 0);
    CHECK_EQUAL(answered->run_count, 1);
    CHECK_EQUAL(answered->runs[0].first, first);
    CHECK_EQUAL(answered->runs[0].last, last);
    CHECK_EQUAL(answered->runs[0].count, count);
    CHECK(answered->records_bytes >= 61);
}

#endif
