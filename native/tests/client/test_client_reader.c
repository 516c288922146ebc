/* The segment reader of a local client, over a log in memory files: follows growth and rolls,
 * skips what it must, keeps data in use, and trusts no byte. */
#include "mqd_client_reader_test.h"

TEST(follows_a_log_that_grows)
{
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 0);
    CHECK_EQUAL(drain(reader, 10, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    for (int round = 0; round < 50; round++) {
        log_append(&log, 1 + round, 0, -1, 0, 0);
        CHECK_EQUAL(drain(reader, 10, &state), 0); /* not readable yet */
        log_expose(&log);
        CHECK_EQUAL(drain(reader, 10, &state), 1 + round);
        CHECK_EQUAL(mqd_segment_reader_position(reader), log.end_offset);
    }
    CHECK_EQUAL(log.query_count, 1);
    CHECK_EQUAL(mqd_segment_reader_lag_end(reader), log.end_offset);
    CHECK_EQUAL(mqd_segment_reader_log_start(reader), 0);
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(times_epochs_and_headers)
{
    static struct test_view v;
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    log_append(&log, 3, 0, -1, 4, 0);
    log_append(&log, 2, MQD_ATTRIBUTE_LOG_APPEND_TIME, -1, 4, 0);
    log_append(&log, 2, MQD_ATTRIBUTE_LOG_APPEND_TIME, -1, 5, 0);
    log_expose(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 1, 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), 2);
    CHECK_EQUAL(state.stop, MQD_READ_SEGMENT);
    CHECK_EQUAL(v.timestamps_ms[0], 1001);
    CHECK_EQUAL(v.view.leader_epoch, 4);
    CHECK_EQUAL(v.view.timestamp_type, 0);
    CHECK_EQUAL(v.view.base[v.header_positions[0]], 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), 2);
    CHECK_EQUAL(v.timestamps_ms[1], 5000);
    CHECK_EQUAL(v.view.timestamp_type, 1);
    CHECK_EQUAL(next(reader, &v, 100, &state), 2);
    CHECK_EQUAL(v.view.leader_epoch, 5);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(rolls)
{
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    log_append(&log, 10, 0, -1, 0, 0);
    log_expose(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 5, 0);
    CHECK_EQUAL(drain(reader, 100, &state), 5);
    log_append(&log, 10, 0, -1, 0, 0); /* written after the last view, then rolled */
    log_roll(&log);
    log_append(&log, 10, 0, -1, 0, 0);
    log_roll(&log);
    log_roll(&log); /* an empty one: useless, and harmless */
    log_append(&log, 1, 0, -1, 0, 0);
    log_expose(&log);
    CHECK_EQUAL(drain(reader, 100, &state), 21);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    mqd_segment_reader_seek(reader, 0);
    CHECK_EQUAL(drain(reader, 7, &state), 31);
    log_roll(&log); /* the high watermark is at the end of a sealed segment */
    log_publish(&log);
    CHECK_EQUAL(drain(reader, 7, &state), 0);
    log_append(&log, 4, 0, -1, 0, 0);
    log_expose(&log);
    CHECK_EQUAL(drain(reader, 7, &state), 4);
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(a_view_that_is_held_outlives_everything)
{
    static struct test_view v;
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    log_append(&log, 10, 0, -1, 0, 0);
    log_roll(&log);
    log_append(&log, 10, 0, -1, 0, 0);
    log_expose(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 0);
    CHECK_EQUAL(mqd_segment_reader_hold(reader), 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), 10);
    uint64_t held = mqd_segment_reader_hold(reader), again = mqd_segment_reader_hold(reader);
    struct mqd_record_view kept = v.view;
    static struct test_view other;
    CHECK_EQUAL(next(reader, &other, 100, &state), 10);
    CHECK(other.view.base != kept.base);
    mqd_segment_reader_close(reader);
    log_close(&log);
    mqd_client_mapping_release(NULL, held);
    for (uint32_t i = 0; i < kept.count; i++)
        CHECK(view_is_right(&kept, i));
    mqd_client_mapping_release(NULL, again);
}

TEST(control_and_compressed_batches)
{
    static struct test_view v;
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    log_append(&log, 2, 0, -1, 0, 0);
    log_append_marker(&log, 9, true);
    log_append(&log, 3, 4 /* declared as zstd */, -1, 0, 0);
    log_append(&log, 2, 0, -1, 0, 0);
    log_append_marker(&log, 9, false);
    log_expose(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), 2);
    CHECK_EQUAL(state.stop, MQD_READ_COMPRESSED);
    CHECK_EQUAL(state.codec, 4);
    CHECK_EQUAL(next(reader, &v, 100, &state), 0); /* until it is skipped */
    CHECK_EQUAL(state.stop, MQD_READ_COMPRESSED);
    CHECK_EQUAL(mqd_segment_reader_position(reader), 3);
    static struct test_view inside;
    const uint8_t *batch = v.view.base + state.compressed_position;
    CHECK_EQUAL(mqd_segment_records(batch, batch + MQD_BATCH_HEADER_BYTES,
                                    state.compressed_bytes - MQD_BATCH_HEADER_BYTES, 4, test_view(&inside, 10)),
                0);
    CHECK_EQUAL(inside.view.count, 2);
    CHECK_EQUAL(inside.offsets[0], 4);
    CHECK(view_is_right(&inside.view, 0));
    CHECK(mqd_segment_records(batch, batch + MQD_BATCH_HEADER_BYTES,
                              state.compressed_bytes - MQD_BATCH_HEADER_BYTES - 1, 0, test_view(&inside, 10)) < 0);
    CHECK_EQUAL(inside.view.count, 2);
    CHECK_EQUAL(mqd_segment_reader_skip(reader), 0);
    CHECK(mqd_segment_reader_skip(reader) < 0); /* nothing to skip any more */
    CHECK_EQUAL(next(reader, &v, 100, &state), 2);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    CHECK_EQUAL(mqd_segment_reader_position(reader), log.end_offset);
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(aborted_transactions)
{
    enum { TRANSACTIONAL = MQD_ATTRIBUTE_TRANSACTIONAL };
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    log_append(&log, 2, TRANSACTIONAL, 1, 0, 0); /* 0, 1: aborted */
    log_append(&log, 2, TRANSACTIONAL, 2, 0, 0); /* 2, 3: committed */
    log_append(&log, 2, 0, -1, 0, 0);            /* 4, 5 */
    log_append(&log, 1, TRANSACTIONAL, 1, 0, 0); /* 6: aborted */
    log_append_marker(&log, 1, false);
    log_append(&log, 1, TRANSACTIONAL, 1, 0, 0); /* 8: the next one, committed */
    log_append_marker(&log, 2, true);
    log_append_marker(&log, 1, true);
    log_append(&log, 2, TRANSACTIONAL, 3, 0, 0); /* 11, 12: open */
    log_expose(&log);
    log.positions.last_stable_offset = 11;
    log_publish(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 1);
    CHECK_EQUAL(drain(reader, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_ABORTED);
    int64_t producers[] = {1}, firsts[] = {0};
    CHECK_EQUAL(mqd_segment_reader_set_aborted(reader, producers, firsts, 1, 11), 0);
    static struct test_view v;
    CHECK_EQUAL(next(reader, &v, 100, &state), 5);
    CHECK_EQUAL(v.offsets[0], 2);
    CHECK_EQUAL(v.offsets[4], 8);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    CHECK_EQUAL(mqd_segment_reader_position(reader), 11);
    CHECK_EQUAL(mqd_segment_reader_lag_end(reader), 11);
    log_append_marker(&log, 3, false);
    log_expose(&log);
    CHECK_EQUAL(drain(reader, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_ABORTED); /* the outcome of 3 is not known */
    producers[0] = 3, firsts[0] = 11;
    CHECK_EQUAL(mqd_segment_reader_set_aborted(reader, producers, firsts, 1, 14), 0);
    CHECK_EQUAL(drain(reader, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    CHECK_EQUAL(mqd_segment_reader_position(reader), 14);
    mqd_segment_reader_seek(reader, 6); /* into the middle of the aborted one */
    producers[0] = 1, firsts[0] = 0;
    CHECK_EQUAL(mqd_segment_reader_set_aborted(reader, producers, firsts, 1, 11), 0);
    CHECK_EQUAL(next(reader, &v, 1, &state), 1);
    CHECK_EQUAL(v.offsets[0], 8);
    struct mqd_segment_reader *uncommitted = log_reader(&log, 0, 0);
    CHECK_EQUAL(drain(uncommitted, 3, &state), 10);
    mqd_segment_reader_close(uncommitted);
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(compacted)
{
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    log_append(&log, 10, 0, -1, 0, 0x2aa);
    log.end_offset += 5;                /* deleted batches */
    log_append(&log, 4, 0, -1, 0, 0xf); /* an empty one: it keeps the producer's sequence */
    log_append(&log, 4, 0, -1, 0, 0x8);
    log.end_offset += 7; /* the rest of the segment */
    log_roll(&log);
    log.end_offset += 3;
    log_append(&log, 2, 0, -1, 0, 0);
    log_expose(&log);
    for (int64_t from = 0; from < log.end_offset; from++) {
        log.skips_gaps = from % 2;
        struct mqd_segment_reader *reader = log_reader(&log, from, 0);
        int64_t visible = 0;
        for (int64_t offset = from; offset < log.end_offset; offset++)
            visible += offset < 10                   ? !(0x2aa >> offset & 1)
                       : offset >= 19 && offset < 22 ? 1
                                                     : offset >= log.end_offset - 2;
        CHECK_EQUAL(drain(reader, 3, &state), visible);
        CHECK_EQUAL(state.stop, MQD_READ_END);
        CHECK_EQUAL(mqd_segment_reader_position(reader), log.end_offset);
        mqd_segment_reader_close(reader);
    }
    log_close(&log);
}

TEST(out_of_range_and_moved_partitions)
{
    struct log log, other;
    struct mqd_read_state state;
    log_open(&log);
    log_open(&other);
    log_append(&log, 10, 0, -1, 0, 0);
    log_append(&other, 12, 0, -1, 0, 0);
    log_expose(&log);
    log_expose(&other);
    struct mqd_segment_reader *reader = log_reader(&log, 2, 0);
    static struct test_view v;
    CHECK_EQUAL(next(reader, &v, 4, &state), 4);
    log.positions.log_start_offset = 7; /* DeleteRecords */
    log_publish(&log);
    CHECK_EQUAL(next(reader, &v, 4, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_OUT_OF_RANGE);
    CHECK_EQUAL(state.kafka_error, 1);
    mqd_segment_reader_seek(reader, 11);
    CHECK_EQUAL(next(reader, &v, 4, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_OUT_OF_RANGE);
    mqd_segment_reader_seek(reader, 8);
    CHECK_EQUAL(next(reader, &v, 1, &state), 1);
    mqd_slot_set_state(log.control, LOG_SLOT, MQD_SLOT_OPENING); /* its worker has died */
    CHECK_EQUAL(next(reader, &v, 1, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    mqd_slot_set_state(log.control, LOG_SLOT, MQD_SLOT_DELETING);
    log.error = 100;
    CHECK_EQUAL(next(reader, &v, 1, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_GONE);
    CHECK_EQUAL(state.kafka_error, 100);
    CHECK_EQUAL(mqd_segment_reader_lag_end(reader), -1);
    struct mqd_segment_source source = {.context = &other, .control = other.control, .locate = log_locate};
    mqd_segment_reader_set_source(reader, &source);
    CHECK_EQUAL(drain(reader, 100, &state), 3); /* 9, 10, 11 */
    other.fail_errno = EPIPE;
    mqd_segment_reader_seek(reader, 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), UINT32_MAX);
    CHECK_EQUAL(mqd_error_code(), EPIPE);
    CHECK_EQUAL(drain(reader, 100, &state), 12);
    static const uint8_t another[16] = "another topic";
    mqd_slot_clear(other.control, LOG_SLOT);
    /* the slot belongs to another partition now, and the broker does not know it yet */
    mqd_slot_assign(other.control, LOG_SLOT, another, 3, 0, 0, 0);
    mqd_slot_set_state(other.control, LOG_SLOT, MQD_SLOT_ONLINE);
    mqd_segment_reader_seek(reader, 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_SEGMENT);
    mqd_segment_reader_close(reader);
    CHECK(!log_reader(&log, -1, 0));
    log_close(&log);
    log_close(&other);
}

TEST(damage_is_reported_and_can_be_skipped)
{
    static struct test_view v;
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    log_append(&log, 3, 0, -1, 0, 0);
    uint32_t second = log.segments[0].size_bytes;
    log_append(&log, 3, 0, -1, 0, 0);
    log_append(&log, 3, 0, -1, 0, 0);
    log_expose(&log);
    uint8_t byte = 0x55;
    CHECK_EQUAL(pwrite(log.segments[0].fd, &byte, 1, second + MQD_BATCH_HEADER_BYTES), 1);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), 3);
    CHECK_EQUAL(state.stop, MQD_READ_CORRUPT);
    CHECK_EQUAL(state.kafka_error, 2);
    CHECK_EQUAL(next(reader, &v, 100, &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_CORRUPT);
    CHECK_CONTAINS(mqd_error_message(), "checksum");
    CHECK_EQUAL(mqd_segment_reader_skip(reader), 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), 3);
    CHECK_EQUAL(v.offsets[0], 6);
    mqd_segment_reader_seek(reader, 3);
    /* unchecked: the record itself is invalid */
    CHECK_EQUAL(mqd_segment_reader_next(reader, 1u << 30, 0, test_view(&v, 100), &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_CORRUPT);
    CHECK_EQUAL(mqd_segment_reader_next(reader, 1u << 30, 0, test_view(&v, 100), &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_CORRUPT);
    CHECK_EQUAL(mqd_segment_reader_skip(reader), 0);
    CHECK_EQUAL(mqd_segment_reader_position(reader), 6);
    byte = 1; /* magic */
    CHECK_EQUAL(pwrite(log.segments[0].fd, &byte, 1, second + 16), 1);
    mqd_segment_reader_seek(reader, 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), 3);
    CHECK_EQUAL(state.stop, MQD_READ_CORRUPT);
    CHECK(mqd_segment_reader_skip(reader) < 0);
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(bytes_max_and_a_file_alone)
{
    static struct test_view v;
    struct log log;
    struct mqd_read_state state;
    char path[64];
    log_open(&log);
    for (int i = 0; i < 10; i++)
        log_append(&log, 10, 0, -1, 0, 0);
    log_expose(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 0);
    CHECK_EQUAL(mqd_segment_reader_next(reader, 0, 1, test_view(&v, 100), &state), 0);
    CHECK_EQUAL(v.view.count, 10);
    CHECK_EQUAL(state.stop, MQD_READ_FULL);
    CHECK_EQUAL(mqd_segment_reader_next(reader, 300, 1, test_view(&v, 100), &state), 0);
    CHECK_EQUAL(v.view.count, 20);
    mqd_segment_reader_close(reader);
    struct log left_out;
    log_open(&left_out);
    for (int i = 0; i < 4; i++)
        log_append_marker(&left_out, 9, true);
    log_append(&left_out, 1, 0, -1, 0, 0);
    log_expose(&left_out);
    reader = log_reader(&left_out, 0, 0);
    CHECK_EQUAL(mqd_segment_reader_next(reader, 1, 1, test_view(&v, 100), &state), 0);
    CHECK_EQUAL(state.stop, MQD_READ_FULL); /* batches without records count, too */
    CHECK_EQUAL(v.view.count, 0);
    CHECK_EQUAL(mqd_segment_reader_position(reader), 1);
    CHECK_EQUAL(drain(reader, 100, &state), 1);
    mqd_segment_reader_close(reader);
    log_close(&left_out);
    sprintf(path, "/proc/self/fd/%d", log.segments[0].fd);
    CHECK((reader = mqd_segment_reader_open_file(path, 0, 37, 0)) != NULL);
    CHECK_EQUAL(drain(reader, 8, &state), 63);
    CHECK_EQUAL(state.stop, MQD_READ_END);
    CHECK_EQUAL(drain(reader, 8, &state), 0);
    mqd_segment_reader_close(reader);
    CHECK((reader = mqd_segment_reader_open_file("/nowhere/at.all", 0, 0, 0)) != NULL);
    CHECK_EQUAL(next(reader, &v, 8, &state), UINT32_MAX);
    CHECK_CONTAINS(mqd_error_message(), "/nowhere/at.all");
    mqd_segment_reader_close(reader);
    log_close(&log);
}

/* Truncated during the read: data beyond the file's end cannot be read, which is reported instead
 * of killing the process. */
TEST(a_truncated_file)
{
    static struct test_view v;
    struct log log;
    struct mqd_read_state state;
    log_open(&log);
    for (int i = 0; i < 100; i++)
        log_append(&log, 100, 0, -1, 0, 0);
    log_expose(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 0);
    CHECK_EQUAL(ftruncate(log.segments[0].fd, 0), 0);
    CHECK_EQUAL(next(reader, &v, 100, &state), UINT32_MAX);
    CHECK_EQUAL(mqd_error_code(), EIO);
    CHECK_CONTAINS(mqd_error_message(), "reading a segment file");
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(columns_into_other_shapes)
{
    const uint8_t base[] = "....abcdefghijklmnop....xy";
    uint64_t positions[] = {4, 24, 0, 4};
    int32_t sizes[] = {16, 2, -1, 0};
    uint8_t out[32], views[64], validity[1];
    int64_t offsets[5];
    CHECK_EQUAL(mqd_columns_gather(base, positions, sizes, 4, out, 18, offsets), 18);
    CHECK(memcmp(out, "abcdefghijklmnopxy", 18) == 0);
    CHECK(offsets[1] == 16 && offsets[2] == 18 && offsets[3] == 18 && offsets[4] == 18);
    CHECK_EQUAL(mqd_columns_gather(base, positions, sizes, 4, out, 17, NULL), -1);
    CHECK_EQUAL(mqd_columns_arrow(base, 2, positions, sizes, 4, views, validity), 1);
    CHECK_EQUAL(validity[0] & 15, 0xb);
    CHECK(memcmp(views, "\x10\0\0\0abcd\0\0\0\0\x02\0\0\0", 16) == 0);
    CHECK(memcmp(views + 16, "\x02\0\0\0xy\0\0\0\0\0\0\0\0\0\0", 16) == 0);
    CHECK_EQUAL(mqd_columns_arrow(base, 5, positions, sizes, 4, views, validity), -1);
}

/* A random log, read at random, compared with what was written. */
static void history(uint64_t seed)
{
    struct log log;
    struct mqd_read_state state;
    static struct test_view v;
    static uint8_t visible[100000];
    log_open(&log);
    log.heap = test_random(&seed) % 2;
    memset(visible, 0, sizeof visible);
    struct mqd_segment_reader *reader = log_reader(&log, 0, 0);
    int64_t expected = 0;
    for (int round = 0; round < 60; round++) {
        for (uint64_t batches = test_random(&seed) % 4; batches; batches--) {
            uint64_t dice = test_random(&seed), holes = dice % 3 ? 0 : test_random(&seed);
            int32_t count = 1 + (int32_t)(test_random(&seed) % 200);
            if (dice % 11 == 0)
                log_append_marker(&log, 1, dice % 2);
            else {
                for (int32_t i = 0; i < count; i++)
                    visible[log.end_offset + i] = !(i < 64 && holes >> i & 1);
                log_append(&log, count, 0, -1, (int32_t)(log.end_offset / 2000), holes);
            }
            if (dice % 13 == 0 && log.segment_count < LOG_SEGMENT_MAX)
                log_roll(&log);
        }
        if (test_random(&seed) % 3)
            log_expose(&log);
        for (uint64_t reads = test_random(&seed) % 6; reads; reads--) {
            uint32_t bytes_max = (uint32_t)(test_random(&seed) % 5000);
            CHECK_EQUAL(mqd_segment_reader_next(reader, bytes_max, 1,
                                                test_view(&v, 1 + (uint32_t)(test_random(&seed) % 300)), &state),
                        0);
            for (uint32_t i = 0; i < v.view.count; i++) {
                while (!visible[expected])
                    expected++;
                CHECK_EQUAL(v.offsets[i], expected);
                CHECK(view_is_right(&v.view, i));
                expected++;
            }
            CHECK(state.stop <= MQD_READ_SEGMENT);
            if (state.stop == MQD_READ_END)
                CHECK(mqd_segment_reader_position(reader) == log.positions.high_watermark);
        }
        if (test_random(&seed) % 10 == 0) {
            expected = (int64_t)(test_random(&seed) % (uint64_t)(log.positions.high_watermark + 1));
            mqd_segment_reader_seek(reader, expected);
        }
    }
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(histories)
{
    for (uint64_t seed = 1; seed <= (test_long() ? 3000 : 60) && !test_failed; seed++) {
        history(seed);
        if (test_failed)
            test_message("seed %llu", (unsigned long long)seed);
    }
}

/* Bytes are changed under valid checksums; reads must stay within the segment (the sanitizer
 * watches), and the reader must terminate. */
static void damage(uint64_t seed)
{
    struct log log;
    struct mqd_read_state state;
    static struct test_view v;
    static uint8_t bytes[1 << 20];
    log_open(&log);
    log.heap = true;
    for (int i = 0; i < 5; i++)
        log_append(&log, 1 + (int32_t)(test_random(&seed) % 20), i % 2 ? MQD_ATTRIBUTE_TRANSACTIONAL : 0,
                   i % 2 ? 5 : -1, 0, 0);
    log_append_marker(&log, 5, false);
    uint32_t size = log.segments[0].size_bytes;
    CHECK(pread(log.segments[0].fd, bytes, size, 0) == (ssize_t)size);
    for (uint64_t flips = 1 + test_random(&seed) % 4; flips; flips--)
        bytes[test_random(&seed) % size] = (uint8_t)test_random(&seed);
    CHECK(pwrite(log.segments[0].fd, bytes, size, 0) == (ssize_t)size);
    log_roll(&log);
    log_expose(&log);
    struct mqd_segment_reader *reader = log_reader(&log, 0, (int8_t)(seed % 2));
    int64_t producers[] = {5}, firsts[] = {0};
    mqd_segment_reader_set_aborted(reader, producers, firsts, 1, INT64_MAX);
    for (int i = 0; i < 1000; i++) {
        CHECK_EQUAL(mqd_segment_reader_next(reader, 1000, 0, test_view(&v, 1 + (uint32_t)(seed % 30)), &state), 0);
        for (uint32_t k = 0; k < v.view.count; k++) {
            CHECK(v.key_bytes[k] <= 0 || v.key_positions[k] + (uint32_t)v.key_bytes[k] <= v.view.base_bytes);
            CHECK(v.value_bytes[k] <= 0 || v.value_positions[k] + (uint32_t)v.value_bytes[k] <= v.view.base_bytes);
            CHECK(v.header_positions[k] + (uint32_t)v.header_bytes[k] <= v.view.base_bytes);
        }
        if (state.stop == MQD_READ_CORRUPT || state.stop == MQD_READ_COMPRESSED) {
            if (mqd_segment_reader_skip(reader) < 0)
                break;
        } else if (state.stop != MQD_READ_FULL && state.stop != MQD_READ_SEGMENT) {
            break;
        }
        CHECK(i < 999);
    }
    mqd_segment_reader_close(reader);
    log_close(&log);
}

TEST(damage_under_right_checksums)
{
    for (uint64_t seed = 1; seed <= (test_long() ? 100000 : 3000) && !test_failed; seed++) {
        damage(seed);
        if (test_failed)
            test_message("seed %llu", (unsigned long long)seed);
    }
}
