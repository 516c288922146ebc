/* For tests that play the leader: node 1 is a socket's end, node 2 follows its partitions 0 and
 * 2 (mqd_fetcher_test.h). */
#ifndef MQD_FAKE_LEADER_TEST_H
#define MQD_FAKE_LEADER_TEST_H

#include "mqd_fetcher_test.h"

#include "wire/wire.h"

#define SESSION 77

/* `link`: the leader's end; requests are received into its reply */
struct fake {
    struct two *two;
    struct client link;
    uint64_t token;
};

static const struct role in_step = {
    .leader = 1, .leader_epoch = 4, .partition_epoch = 1, .min_insync = 1, .in_sync = 6};

__attribute__((unused)) static struct mqd_fetcher_options quick_options(void)
{
    struct mqd_fetcher_options options = fetcher_options();
    options.backoff_ms = 60;
    return options;
}

__attribute__((unused)) static void fake_connect(struct fake *fake)
{
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    struct timeval limit = {LIMIT_MS / 1000, 0};
    setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    fake->link.fd = ends[0];
    fake->token = fetcher_put(fake->two, ends[1], quick_options());
}

__attribute__((unused)) static struct fake fake_start_with(int backend, void (*change)(struct bench *b))
{
    struct fake fake = {.two = two_start(backend, change)};
    for (int32_t partition = 0; partition <= 2; partition += 2) {
        follower_open(fake.two, partition);
        assign_follower(fake.two, partition, in_step);
    }
    fake_connect(&fake);
    return fake;
}

static struct fake fake_start(int backend)
{
    return fake_start_with(backend, NULL);
}

__attribute__((unused)) static void fake_stop(struct fake *fake)
{
    if (fake->link.fd >= 0)
        client_close(&fake->link);
    two_stop(fake->two);
}

/* ---- requests ---- */

struct requested_one {
    int32_t epoch, last_epoch;
    int64_t offset;
    bool there;
};
struct request {
    int32_t correlation_id, session_id, session_epoch, forgotten[4];
    struct requested_one one[4];
    uint32_t count, forgotten_count;
};

/* The next request, checked by the leader's own parser. false: the connection has ended. */
__attribute__((unused)) static bool receive_any(struct fake *fake, struct request *out)
{
    struct mqd_request_header header;
    struct mqd_fetch_request fetch;
    struct mqd_fetch_topic topic;
    struct mqd_fetch_partition partition;
    bool known;
    *out = (struct request){0};
    if (client_receive(&fake->link) != 1)
        return false;
    CHECK_OR(mqd_request_header_parse(fake->link.reply, fake->link.reply_bytes, &header, &known) == 0 && known,
             return false);
    CHECK_OR(header.api_key == 1 && header.api_version == 17, return false);
    CHECK_OR(mqd_fetch_parse(fake->link.reply + header.header_bytes, fake->link.reply_bytes - header.header_bytes, 17,
                             &fetch) == 0,
             fprintf(stderr, "%s\n", mqd_error_message());
             return false);
    CHECK_OR(fetch.replica_id == 2 && fetch.replica_epoch == EPOCH_OF(2) && fetch.isolation_level == 0 &&
                 fetch.bytes_min == 1,
             return false);
    out->correlation_id = header.correlation_id, out->session_id = fetch.session_id,
    out->session_epoch = fetch.session_epoch;
    for (int32_t i = 0; i < fetch.topic_count; i++) {
        CHECK_OR(mqd_fetch_next_topic(&fetch, &topic) == 0 &&
                     memcmp(topic.key.topic_id, fake->two->b->topic_id, 16) == 0,
                 return false);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            CHECK_OR(mqd_fetch_next_partition(&fetch, &partition) == 0 && partition.partition_index < 4, return false);
            CHECK_OR(!out->one[partition.partition_index].there, return false);
            out->one[partition.partition_index] = (struct requested_one){
                partition.current_leader_epoch, partition.last_fetched_epoch, partition.fetch_offset, true};
            out->count++;
        }
    }
    int32_t topics, index;
    CHECK_OR(mqd_fetch_begin_forgotten(&fetch, &topics) == 0, return false);
    for (int32_t i = 0; i < topics; i++) {
        CHECK_OR(mqd_fetch_next_forgotten_topic(&fetch, &topic) == 0, return false);
        for (int32_t j = 0; j < topic.partition_count; j++) {
            CHECK_OR(mqd_fetch_next_forgotten_partition(&fetch, &index) == 0 && out->forgotten_count < 4, return false);
            out->forgotten[out->forgotten_count++] = index;
        }
    }
    return true;
}

/* ---- responses ---- */

struct piece {
    int32_t partition;
    int16_t error;
    int64_t high_watermark, log_start;
    const uint8_t *records;
    uint32_t records_bytes;
    int32_t diverging_epoch; /* 0 = none */
    int64_t diverging_end, leader_end;
};

__attribute__((unused)) static void put_varint(struct frame *frame, uint32_t value)
{
    for (; value >= 0x80; value >>= 7)
        put(frame, 1, (value & 0x7f) | 0x80);
    put(frame, 1, value);
}

__attribute__((unused)) static uint32_t answer_begin(struct frame *frame, int32_t correlation_id, int16_t error,
                                                     int32_t session_id)
{
    uint32_t begin = frame->size_bytes;
    put(frame, 4, 0), put(frame, 4, (uint32_t)correlation_id), put(frame, 1, 0), put(frame, 4, 0),
        put(frame, 2, (uint16_t)error), put(frame, 4, (uint32_t)session_id);
    return begin;
}

__attribute__((unused)) static void put_piece(struct frame *frame, struct piece piece)
{
    put(frame, 4, (uint32_t)piece.partition), put(frame, 2, (uint16_t)piece.error),
        put(frame, 8, (uint64_t)piece.high_watermark), put(frame, 8, (uint64_t)piece.leader_end);
    put(frame, 8, (uint64_t)piece.log_start), put(frame, 1, 0), put(frame, 4, 0xffffffff);
    put_varint(frame, piece.records_bytes + 1), put_bytes(frame, piece.records, piece.records_bytes);
    if (piece.diverging_epoch)
        put(frame, 1, 1), put(frame, 1, 0), put(frame, 1, 13), put(frame, 4, (uint32_t)piece.diverging_epoch),
            put(frame, 8, (uint64_t)piece.diverging_end), put(frame, 1, 0);
    else
        put(frame, 1, 0);
}

__attribute__((unused)) static struct frame answer_of(struct fake *fake, const struct request *request,
                                                      const struct piece *pieces, uint32_t count)
{
    struct frame frame = {0};
    uint32_t begin = answer_begin(&frame, request->correlation_id, 0, SESSION);
    put_varint(&frame, count ? 2 : 1);
    if (count) {
        put_bytes(&frame, fake->two->b->topic_id, 16);
        put_varint(&frame, count + 1);
        for (uint32_t i = 0; i < count; i++)
            put_piece(&frame, pieces[i]);
        put(&frame, 1, 0);
    }
    put(&frame, 1, 0);
    frame_end(&frame, begin);
    return frame;
}

__attribute__((unused)) static void answer(struct fake *fake, const struct request *request, const struct piece *pieces,
                                           uint32_t count)
{
    struct frame frame = answer_of(fake, request, pieces, count);
    client_send(&fake->link, &frame);
    frame_free(&frame);
}

__attribute__((unused)) static uint32_t batch_at(uint8_t *out, struct log_batch want, int64_t base_offset,
                                                 int32_t epoch)
{
    uint32_t size_bytes = log_encode(out, want), word = htobe32((uint32_t)epoch);
    uint64_t offset = htobe64((uint64_t)base_offset);
    memcpy(out, &offset, 8);
    memcpy(out + 12, &word, 4);
    return size_bytes;
}

__attribute__((unused)) static int64_t log_end(struct fake *fake, int32_t partition)
{
    return positions_of(fake->two, FOLLOWED(partition)).log_end_offset;
}

/* Like receive_any, but skips requests that only urge: the request before them already has its
 * response. */
__attribute__((unused)) static bool receive(struct fake *fake, struct request *out)
{
    bool more;
    while ((more = receive_any(fake, out)) && out->session_epoch == -1)
        answer(fake, out, NULL, 0);
    return more;
}

/* Partition 0 gets [0, 3) of epoch 4, with this high watermark. Returns at the request from
 * offset 3 on. */
__attribute__((unused)) static void three_records(struct fake *fake, struct request *request, int64_t high_watermark)
{
    uint8_t bytes[400];
    uint32_t size_bytes = batch_at(bytes, (struct log_batch){.record_count = 3}, 0, 4);
    CHECK(receive(fake, request));
    answer(fake, request,
           (struct piece[]){
               {.partition = 0, .high_watermark = high_watermark, .records = bytes, .records_bytes = size_bytes}},
           1);
    while (receive(fake, request) && !(request->one[0].there && request->one[0].offset == 3))
        answer(fake, request, NULL, 0);
}

#endif
