/* For test_reactor_check*.c: Produce with a transactional id or with batches of real records;
 * responses with record errors; the acceptor's side of checks. */
#ifndef MQD_CHECK_TEST_H
#define MQD_CHECK_TEST_H

#include "mqd_reactor_test.h"

#include "codec/codec.h"

extern bool mqd_check_always_by_acceptor; /* server/reactor.h */

#define VERIFY (-2) /* an owner's response */

static inline void verifying(struct bench *b)
{
    b->log_options.transaction_verification = 1;
}
static inline void compacted(struct bench *b)
{
    b->log_options.compacted = 1;
}

/* ---- batches ---- */

struct raw {
    uint8_t *bytes;
    uint32_t size_bytes;
};
struct partition_batch {
    int32_t partition;
    struct raw raw;
};

/* Sets the checksum of a batch whose header was written by log_encode. */
static void raw_finish(struct raw *raw)
{
    uint32_t length = htobe32(raw->size_bytes - 12), crc;
    memcpy(raw->bytes + 8, &length, 4);
    crc = htobe32(mqd_crc32c(0, raw->bytes + 21, raw->size_bytes - 21));
    memcpy(raw->bytes + 17, &crc, 4);
}

/* A batch of `producer_id` whose body is noise. */
static struct raw raw_noise(struct log_batch want)
{
    struct raw raw = {malloc(MQD_BATCH_HEADER_BYTES + (size_t)(want.body_bytes ? want.body_bytes : 64)), 0};
    raw.size_bytes = log_encode(raw.bytes, want);
    return raw;
}

__attribute__((unused)) static struct raw raw_transactional(int64_t producer_id, int16_t epoch, int32_t sequence,
                                                            int32_t body_bytes)
{
    return raw_noise((struct log_batch){.producer_id = producer_id,
                                        .producer_epoch = epoch,
                                        .base_sequence = sequence,
                                        .attributes = 0x10,
                                        .body_bytes = body_bytes,
                                        .mark = (uint64_t)producer_id << 32 | (uint32_t)sequence});
}

/* A batch of `count` uncompressed records of `value_bytes`; bit i of `unkeyed`: record i has no
 * key. */
__attribute__((unused)) static struct raw raw_records(uint32_t count, uint64_t unkeyed, uint32_t value_bytes)
{
    struct frame body = {0};
    for (uint32_t i = 0; i < count; i++) {
        struct frame record = {0};
        bool keyed = !(unkeyed >> (i & 63) & 1);
        put(&record, 1, 0), put(&record, 1, 0);
        for (uint32_t delta = i << 1; put(&record, 1, (delta & 0x7f) | (delta > 0x7f ? 0x80 : 0)), delta > 0x7f;
             delta >>= 7)
            ;
        put(&record, 1, keyed ? 2 : 1);
        if (keyed)
            put(&record, 1, 'k');
        put(&record, 1, value_bytes * 2 & 0x7f);
        for (uint32_t j = 0; j < value_bytes; j++)
            put(&record, 1, 'v');
        put(&record, 1, 0);
        put(&body, 1, record.size_bytes * 2), put_bytes(&body, record.bytes, record.size_bytes);
        frame_free(&record);
    }
    struct raw raw = {malloc(MQD_BATCH_HEADER_BYTES + body.size_bytes), MQD_BATCH_HEADER_BYTES + body.size_bytes};
    uint8_t header[MQD_BATCH_HEADER_BYTES + 64];
    log_encode(header, (struct log_batch){.record_count = (int32_t)count});
    memcpy(raw.bytes, header, MQD_BATCH_HEADER_BYTES);
    memcpy(raw.bytes + MQD_BATCH_HEADER_BYTES, body.bytes, body.size_bytes);
    raw_finish(&raw);
    frame_free(&body);
    return raw;
}

/* ---- zstd, with frames written here ---- */

#define BLOCK_BYTES (128u << 10)

__attribute__((unused)) static bool has_zstd(void)
{
    bool here = mqd_codec_available(MQD_CODEC_ZSTD);
    if (!here)
        test_message("%s is not installed", mqd_codec_library(MQD_CODEC_ZSTD));
    return here;
}

static void put_little(struct frame *frame, int bytes, uint32_t value)
{
    for (int i = 0; i < bytes; i++, value >>= 8)
        put(frame, 1, value & 0xff);
}

/* `raw` with `body`, a zstd frame, instead of its records. */
static struct raw with_body(struct raw raw, const struct frame *body)
{
    raw.bytes = realloc(raw.bytes, MQD_BATCH_HEADER_BYTES + body->size_bytes);
    raw.size_bytes = MQD_BATCH_HEADER_BYTES + body->size_bytes;
    memcpy(raw.bytes + MQD_BATCH_HEADER_BYTES, body->bytes, body->size_bytes);
    raw.bytes[22] |= MQD_CODEC_ZSTD; /* the attributes' low byte */
    raw_finish(&raw);
    return raw;
}

static void put_header(struct frame *frame, uint32_t content_bytes)
{
    put_little(frame, 4, 0xfd2fb528);
    put(frame, 1, 0xa0); /* a content size of four bytes, which is the window too */
    put_little(frame, 4, content_bytes);
}

/* The records in stored blocks. */
__attribute__((unused)) static struct raw in_zstd(struct raw raw)
{
    struct frame frame = {0};
    uint32_t left = raw.size_bytes - MQD_BATCH_HEADER_BYTES;
    put_header(&frame, left);
    for (const uint8_t *at = raw.bytes + MQD_BATCH_HEADER_BYTES; left;) {
        uint32_t size = left < BLOCK_BYTES ? left : BLOCK_BYTES;
        left -= size;
        put_little(&frame, 3, (left == 0) | size << 3);
        put_bytes(&frame, at, size);
        at += size;
    }
    raw = with_body(raw, &frame);
    frame_free(&frame);
    return raw;
}

/* ---- Produce v8: with a transactional id (NULL = none); frees the batches ---- */

static void put_batches(struct frame *frame, int32_t correlation_id, const char *transactional_id, int acks,
                        int32_t timeout_ms, const struct partition_batch *batches, uint32_t count)
{
    uint32_t begin = frame_begin(frame, 0, 8, correlation_id);
    if (transactional_id)
        put_text(frame, transactional_id);
    else
        put(frame, 2, 0xffff);
    put(frame, 2, (uint16_t)acks), put(frame, 4, (uint32_t)timeout_ms), put(frame, 4, 1), put_text(frame, "quick"),
        put(frame, 4, count);
    for (uint32_t i = 0; i < count; i++) {
        put(frame, 4, (uint32_t)batches[i].partition), put(frame, 4, batches[i].raw.size_bytes),
            put_bytes(frame, batches[i].raw.bytes, batches[i].raw.size_bytes);
        free(batches[i].raw.bytes);
    }
    frame_end(frame, begin);
}

static bool client_produce_batches(struct client *client, int32_t correlation_id, const char *transactional_id,
                                   int acks, int32_t timeout_ms, const struct partition_batch *batches, uint32_t count)
{
    struct frame frame = {0};
    put_batches(&frame, correlation_id, transactional_id, acks, timeout_ms, batches, count);
    bool sent = client_send(client, &frame);
    frame_free(&frame);
    return sent;
}

__attribute__((unused)) static bool client_produce_one(struct client *client, int32_t correlation_id,
                                                       const char *transactional_id, int acks, int32_t timeout_ms,
                                                       int32_t partition, struct raw raw)
{
    struct partition_batch batch = {partition, raw};
    return client_produce_batches(client, correlation_id, transactional_id, acks, timeout_ms, &batch, 1);
}

struct outcome {
    int16_t error;
    int64_t base_offset;
    uint32_t record_errors;
    int32_t first_index;
    char record_message[300], message[300];
};
struct outcomes {
    int32_t correlation_id;
    uint32_t count;
    struct outcome of[16];
};

static void take_message(struct client *client, char *out, size_t capacity)
{
    int16_t size_bytes = (int16_t)take(client, 2);
    for (int16_t i = 0; i < size_bytes; i++) {
        char byte = (char)take(client, 1);
        if ((size_t)i + 1 < capacity)
            out[i] = byte, out[i + 1] = 0;
    }
}

/* The response to a Produce v8 of one topic. correlation_id -1: none arrived. */
static struct outcomes client_take(struct client *client)
{
    struct outcomes out = {.correlation_id = -1};
    CHECK_OR(client_receive(client) == 1, return out);
    out.correlation_id = (int32_t)take(client, 4);
    CHECK_OR(take(client, 4) == 1, return out);
    take_bytes(client, (uint32_t)take(client, 2));
    out.count = (uint32_t)take(client, 4);
    CHECK_OR(out.count <= 16, return out);
    for (uint32_t i = 0; i < out.count; i++) {
        struct outcome *of = &out.of[i];
        take(client, 4), of->error = (int16_t)take(client, 2), of->base_offset = (int64_t)take(client, 8),
                         take(client, 8), take(client, 8);
        of->record_errors = (uint32_t)take(client, 4);
        for (uint32_t j = 0; j < of->record_errors && !client->broken; j++) {
            int32_t index = (int32_t)take(client, 4);
            of->first_index = j == 0 ? index : of->first_index;
            take_message(client, of->record_message, sizeof of->record_message);
        }
        take_message(client, of->message, sizeof of->message);
    }
    take(client, 4);
    CHECK_OR(!client->broken && client->at == client->reply_bytes, return out);
    return out;
}

/* ---- the acceptor ---- */

static uint64_t check_answer_at; /* in its arena, used cyclically: a worker takes it over long before it is reused */

/* One code for each partition of the check. */
__attribute__((unused)) static void check_answer(struct bench *b, uint32_t to, const struct mqd_descriptor *check,
                                                 const int16_t *codes, uint32_t count)
{
    check_answer_at = (check_answer_at + 1024) % (ARENA_BYTES / 2);
    memcpy(b->arenas[ACCEPTOR] + check_answer_at, codes, count * sizeof *codes);
    bench_put(b, ACCEPTOR, to,
              (struct mqd_descriptor){.kind = MQD_LINK_CHECKED,
                                      .token = check->token,
                                      .offset = check_answer_at,
                                      .size_bytes = count * (uint32_t)sizeof *codes});
}

__attribute__((unused)) static void check_answer_all(struct bench *b, uint32_t to, const struct mqd_descriptor *check,
                                                     int16_t error)
{
    int16_t codes[64];
    struct mqd_check_transaction head;
    memcpy(&head, b->arenas[to] + check->offset, sizeof head);
    for (uint32_t i = 0; i < 64; i++)
        codes[i] = error;
    check_answer(b, to, check, codes, head.partition_count < 64 ? head.partition_count : 64);
}

__attribute__((unused)) static void acceptor_restarts(struct bench *b)
{
    mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_DEAD, 0);
    mqd_endpoint_close(b->endpoints[ACCEPTOR]);
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        CHECK_EQUAL(mqd_reactor_endpoint_died(b->reactors[worker], ++b->token, ACCEPTOR), 0);
        bench_done(b, worker, b->token);
    }
    b->endpoints[ACCEPTOR] = mqd_endpoint_open(b->control, b->links, ACCEPTOR, ENDPOINTS, b->eventfds);
    mqd_endpoint_set_state(b->control, ACCEPTOR, MQD_PROCESS_RUNNING, getpid());
}

/* Whether a worker's own memory is as before: all parked requests have been freed. */
__attribute__((unused)) static bool serves(struct client *client, uint64_t mark)
{
    struct part lone = {3, {.mark = mark, .body_bytes = 20000}};
    return client_produce(client, 1, &lone, 1).error[0] == 0;
}

#endif
