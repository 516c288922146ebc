/* tsan: long */
/* Invalid responses of a leader: the connection ends, no request waits forever, nothing is
 * trusted. */
#include "mqd_relay_test.h"

#define UNDER_WAY 3

/* `bytes` instead of the first response; their correlation id counts from the first request,
 * which is 1. Returns the responses to the clients of the three batches; the relay has ended
 * afterwards. */
static void answered_with(struct bench *b, struct local *local, const uint8_t *given, uint32_t size_bytes,
                          int16_t first_error)
{
    uint8_t bytes[512];
    CHECK_OR(size_bytes <= sizeof bytes, abort());
    memcpy(bytes, given, size_bytes);
    struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
    for (int32_t i = 0; i < UNDER_WAY; i++) {
        submit(local, i, 1, one_record(1, (uint64_t)i, 64));
        uint32_t id = (uint32_t)relayed(&leader).correlation_id, sent;
        if (i || size_bytes < 8)
            continue;
        memcpy(&sent, bytes + 4, 4);
        sent = htobe32(be32toh(sent) + id - 1);
        memcpy(bytes + 4, &sent, 4);
    }
    CHECK_OR(send(leader.fd, bytes, size_bytes, MSG_NOSIGNAL) == (ssize_t)size_bytes, abort());
    shutdown(leader.fd, SHUT_WR);
    for (int32_t i = 0; i < UNDER_WAY; i++) {
        struct produced produced = outcome(local);
        CHECK_EQUAL(produced.correlation_id, i);
        CHECK_EQUAL(produced.error[0], i ? TIMED_OUT : first_error);
    }
    relay_event(b, MQD_EVENT_RELAY_ENDED);
    client_close(&leader);
}

static void complete_answer(struct frame *frame, struct answer reported)
{
    frame->size_bytes = 0;
    put_answer(frame, reported);
}

BOTH(malformed_responses_end_the_connection)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct frame frame = {0};
    struct answer wrong[] = {{2, 1, 0, 0} /* of the second before the first */,
                             {0, 1, 0, 0},
                             {-1, 1, 0, 0},
                             {1, 3, 0, 0} /* about another partition */,
                             {1, -1, 0, 0},
                             {1, 1, -2, 0} /* the reactor's own codes */,
                             {1, 1, -4, 0},
                             {1, 1, 0, -7}};
    for (uint32_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        complete_answer(&frame, wrong[i]);
        answered_with(b, &local, frame.bytes, frame.size_bytes, TIMED_OUT);
    }
    for (uint32_t size = 0; size < 12; size++) { /* impossible sizes, and the beginning of a frame that is too large */
        static const uint32_t sent[12] = {0,
                                          1,
                                          7,
                                          0x7fffffff,
                                          0x80000000,
                                          0xffffffff,
                                          MQD_RELAY_RESPONSE_BYTES_MAX,
                                          MQD_RELAY_RESPONSE_BYTES_MAX - 3,
                                          8,
                                          9,
                                          12,
                                          20};
        uint8_t bytes[64] = {(uint8_t)(sent[size] >> 24),
                             (uint8_t)(sent[size] >> 16),
                             (uint8_t)(sent[size] >> 8),
                             (uint8_t)sent[size],
                             0,
                             0,
                             0,
                             1};
        answered_with(b, &local, bytes, sizeof bytes, TIMED_OUT);
    }
    complete_answer(&frame, (struct answer){1, 1, 0, 9});
    for (uint32_t cut = 0; cut < frame.size_bytes; cut++) { /* cut off: by the connection, and by its own length */
        answered_with(b, &local, frame.bytes, cut, TIMED_OUT);
        if (cut < 12)
            continue;
        uint8_t *shorter = malloc(cut);
        memcpy(shorter, frame.bytes, cut);
        shorter[3] = (uint8_t)(cut - 4);
        answered_with(b, &local, shorter, cut, TIMED_OUT);
        free(shorter);
    }
    answered_with(b, &local, frame.bytes, frame.size_bytes, 0); /* and a good one */
    frame_free(&frame);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* Bytes changed at random: responses, if any, are in order. */
BOTH(responses_with_bytes_changed)
{
    struct bench *b = relay_bench(backend);
    struct local local = local_open(b, 0, SIZES);
    struct frame frame = {0};
    uint64_t seed = 7;
    for (int round = 0; round < (test_long() ? 3000 : 150); round++) {
        struct client leader = fake_leader(b, MQD_RELAY_LANE_PLAIN, LIMIT_MS, 0);
        frame.size_bytes = 0;
        for (int32_t i = 0; i < UNDER_WAY; i++) {
            submit(&local, i, 1, one_record(1, (uint64_t)i, 64));
            put_answer(&frame, (struct answer){relayed(&leader).correlation_id, 1, 0, i});
        }
        for (uint64_t changes = test_random(&seed) % 4; changes; changes--)
            frame.bytes[test_random(&seed) % frame.size_bytes] = (uint8_t)test_random(&seed);
        CHECK_OR(send(leader.fd, frame.bytes, frame.size_bytes, MSG_NOSIGNAL) == (ssize_t)frame.size_bytes, abort());
        shutdown(leader.fd, SHUT_WR);
        for (int32_t i = 0; i < UNDER_WAY; i++)
            CHECK_EQUAL(outcome(&local).correlation_id, i);
        relay_event(b, MQD_EVENT_RELAY_ENDED);
        client_close(&leader);
    }
    frame_free(&frame);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* The parser alone, over every version: a valid response with record errors is read, any other
 * never beyond its end. */
static void put_versioned(struct frame *frame, int version, uint32_t errors)
{
    bool flexible = version >= 9;
    put(frame, 4, 77);
    if (flexible)
        put(frame, 1, 0);
    flexible ? put(frame, 1, 2) : put(frame, 4, 1);
    if (version >= 13)
        put(frame, 8, 1), put(frame, 8, 2);
    else if (flexible)
        put(frame, 1, 6), put_bytes(frame, "quick", 5);
    else
        put_text(frame, "quick");
    flexible ? put(frame, 1, 2) : put(frame, 4, 1);
    put(frame, 4, 3), put(frame, 2, 87), put(frame, 8, UINT64_MAX), put(frame, 8, UINT64_MAX);
    if (version >= 5)
        put(frame, 8, 0);
    if (version >= 8) {
        flexible ? put(frame, 1, errors + 1) : put(frame, 4, errors);
        for (uint32_t i = 0; i < errors; i++) {
            put(frame, 4, i);
            flexible ? put(frame, 1, 4) : put(frame, 2, 3);
            put_bytes(frame, "key", 3);
            if (flexible)
                put(frame, 1, 0);
        }
        flexible ? put(frame, 1, 8) : put(frame, 2, 7);
        put_bytes(frame, "refused", 7);
    }
    if (flexible)
        put(frame, 1, 0), put(frame, 1, 0);
    put(frame, 4, 0);
    if (flexible)
        put(frame, 1, 0);
}

TEST(every_version_is_read_to_its_end)
{
    uint64_t seed = 3;
    for (int16_t version = 3; version <= 13; version++) {
        struct frame frame = {0};
        struct mqd_relay_response out;
        put_versioned(&frame, version, 70);
        CHECK_EQUAL(mqd_relay_parse(frame.bytes, frame.size_bytes, version, &out), 0);
        CHECK_EQUAL(out.partition_index, 3);
        CHECK_EQUAL(out.error, 87);
        CHECK_EQUAL(out.record_error_count, version >= 8 ? MQD_RECORD_ERROR_COUNT_MAX : 0);
        CHECK_EQUAL(out.message.size_bytes, version >= 8 ? 7 : -1);
        for (uint32_t cut = 0; cut < frame.size_bytes; cut++) {
            uint8_t *exact = malloc(cut ? cut : 1); /* so that the sanitizer sees a byte too far */
            memcpy(exact, frame.bytes, cut);
            CHECK_EQUAL(mqd_relay_parse(exact, cut, version, &out), -1);
            free(exact);
        }
        for (int round = 0; round < 20000; round++) {
            uint32_t at = (uint32_t)(test_random(&seed) % frame.size_bytes);
            uint8_t before = frame.bytes[at];
            frame.bytes[at] = (uint8_t)test_random(&seed);
            if (mqd_relay_parse(frame.bytes, frame.size_bytes, version, &out) == 0)
                CHECK(out.record_error_count <= MQD_RECORD_ERROR_COUNT_MAX);
            frame.bytes[at] = before;
        }
        frame_free(&frame);
    }
}
