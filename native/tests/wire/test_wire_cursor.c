/* Cases that the differential test cannot reach: edges of the primitives, the caller's mistakes,
 * the growing buffer. The schemas themselves are compared with independent codecs in
 * tests/property/test_wire_oracle.py. */
#include <errno.h>

#include "base/error.h"
#include "mqd_test.h"
#include "wire/buffer.h"
#include "wire/cursor.h"
#include "wire/wire.h"

static int varint(const char *bytes, uint32_t size_bytes, uint32_t *out)
{
    uint8_t *copy = malloc(size_bytes ? size_bytes : 1); /* exact size, for ASan */
    memcpy(copy, bytes, size_bytes);
    struct mqd_byte_cursor cursor = mqd_cursor_over(copy, size_bytes);
    int result = mqd_take_varint(&cursor, "number", out);
    if (result == 0 && cursor.at != cursor.end)
        result = 1; /* left something over */
    free(copy);
    return result;
}

TEST(varints_have_five_bytes_and_32_bits_at_most)
{
    uint32_t value;
    CHECK(varint("\x00", 1, &value) == 0 && value == 0);
    CHECK(varint("\x7f", 1, &value) == 0 && value == 127);
    CHECK(varint("\x80\x01", 2, &value) == 0 && value == 128);
    CHECK(varint("\xff\xff\xff\xff\x0f", 5, &value) == 0 && value == UINT32_MAX);
    CHECK(varint("\x81\x80\x00", 3, &value) == 0 && value == 1); /* longer than needed is legal */
    CHECK(varint("\xff\xff\xff\xff\x1f", 5, &value) == -1);
    CHECK_CONTAINS(mqd_error_message(), "above 32 bits");
    CHECK(varint("\x80\x80\x80\x80\x80\x00", 6, &value) == -1);
    CHECK(varint("", 0, &value) == -1);
    CHECK(varint("\x80", 1, &value) == -1);
    CHECK(varint("\xff\xff\xff\xff", 4, &value) == -1);
    CHECK_EQUAL(mqd_error_code(), EBADMSG);
}

TEST(varints_of_the_encoder_are_decoded)
{
    for (uint64_t value = 0; value <= UINT32_MAX; value = value * 3 + 1) {
        struct mqd_buffer buffer = {0};
        uint32_t back = 0;
        mqd_put_varint(&buffer, (uint32_t)value);
        CHECK_OR(varint((char *)buffer.bytes, buffer.size_bytes, &back) == 0 && back == value, );
        mqd_buffer_free(&buffer);
    }
}

static int text(bool compact, bool nullable, const void *bytes, uint32_t size_bytes, struct mqd_text *out)
{
    struct mqd_byte_cursor cursor = mqd_cursor_over(bytes, size_bytes);
    return mqd_take_text(&cursor, compact, nullable, "name", out);
}

TEST(strings_null_negative_and_too_long)
{
    struct mqd_text out;
    CHECK(text(false, true, "\xff\xff", 2, &out) == 0 && out.size_bytes == -1 && !out.bytes);
    CHECK(text(true, true, "\x00", 1, &out) == 0 && out.size_bytes == -1);
    CHECK(text(true, false, "\x01", 1, &out) == 0 && out.size_bytes == 0 && out.bytes);
    CHECK(text(false, false, "\xff\xff", 2, &out) == -1);
    CHECK_CONTAINS(mqd_error_message(), "name before byte 2 is a string that must not be null");
    CHECK(text(false, true, "\xff\xfe", 2, &out) == -1);
    CHECK_CONTAINS(mqd_error_message(), "negative length, -2");
    CHECK(text(false, true, "\x00\x02x", 3, &out) == -1);
    CHECK_CONTAINS(mqd_error_message(), "name at byte 2 needs 2 more bytes, 1 remain");
    uint8_t *large = calloc(1, 40000);
    memcpy(large, "\x80\x80\x02", 3); /* 32768: length 32767, the longest */
    CHECK_OR(text(true, false, large, 40000, &out) == 0 && out.size_bytes == 32767, );
    memcpy(large, "\x81\x80\x02", 3);
    CHECK_OR(text(true, false, large, 40000, &out) == -1, );
    CHECK_CONTAINS(mqd_error_message(), "above 32767 bytes");
    memcpy(large, "\xff\xff\xff\xff\x0f", 5);
    CHECK_OR(text(true, false, large, 40000, &out) == -1, );
    free(large);
}

TEST(records_may_fill_the_frame_and_no_more)
{
    struct mqd_byte_cursor cursor = mqd_cursor_over((const uint8_t *)"\x7f\xff\xff\xff....", 8);
    int32_t length;
    CHECK_EQUAL(mqd_take_length(&cursor, false, false, "records", &length), -1);
    cursor = mqd_cursor_over((const uint8_t *)"\xff\xff\xff\xff\x0f...", 8);
    CHECK_EQUAL(mqd_take_length(&cursor, true, false, "records", &length), -1);
    CHECK_CONTAINS(mqd_error_message(), "records at byte 5 needs 4294967294 more bytes, 3 remain");
    cursor = mqd_cursor_over((const uint8_t *)"\xff\xff\xff\xff", 4);
    CHECK(mqd_take_length(&cursor, false, false, "records", &length) == 0 && length == -1);
}

TEST(reading_beyond_the_counts_is_an_error)
{
    /* Produce v3: null transactional id, acks 1, timeout 100, one topic "t" with one partition 5 of
     * null records */
    const uint8_t body[] =
        "\xff\xff\x00\x01\x00\x00\x00\x64\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x01\x00\x00\x00\x05\xff\xff\xff\xff";
    struct mqd_produce_request request;
    struct mqd_produce_topic topic;
    struct mqd_produce_partition partition;
    CHECK_EQUAL(mqd_produce_parse(body, sizeof body - 1, 3, &request), 0);
    CHECK_EQUAL(mqd_produce_next_partition(&request, &partition), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
    CHECK_EQUAL(mqd_produce_end(&request), -1);
    CHECK_EQUAL(mqd_produce_next_topic(&request, &topic), 0);
    CHECK_EQUAL(mqd_produce_next_topic(&request, &topic), -1);
    CHECK_EQUAL(mqd_produce_end(&request), -1);
    CHECK_EQUAL(mqd_produce_next_partition(&request, &partition), 0);
    CHECK(partition.partition_index == 5 && partition.size_bytes == -1 && !partition.records);
    CHECK_EQUAL(mqd_produce_next_partition(&request, &partition), -1);
    CHECK_EQUAL(mqd_produce_next_topic(&request, &topic), -1);
    CHECK_EQUAL(mqd_produce_end(&request), 0);
}

TEST(an_error_in_the_last_byte_refuses_the_request)
{
    uint8_t body[] =
        "\xff\xff\x00\x01\x00\x00\x00\x64\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x01\x00\x00\x00\x05\x00\x00\x00\x01";
    struct mqd_produce_request request;
    /* one byte of records is announced, none is there */
    CHECK_EQUAL(mqd_produce_parse(body, sizeof body - 1, 3, &request), -1);
    CHECK_CONTAINS(mqd_error_message(), "records at byte 27 needs 1 more bytes, 0 remain");
}

TEST(forgotten_topics_may_be_skipped_when_there_are_none)
{
    /* Fetch v7: replica -1, wait 0, min 1, max 1000, isolation 0, session 0, epoch 0, no topics, no
     * forgotten ones */
    uint8_t body[] = "\xff\xff\xff\xff\0\0\0\0\0\0\0\1\0\0\3\xe8\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    struct mqd_fetch_request request;
    int32_t count;
    CHECK_EQUAL(mqd_fetch_parse(body, sizeof body - 1, 7, &request), 0);
    CHECK_EQUAL(mqd_fetch_end(&request), 0);
    CHECK_EQUAL(mqd_fetch_parse(body, sizeof body - 1, 7, &request), 0);
    CHECK_EQUAL(mqd_fetch_begin_forgotten(&request, &count), 0);
    CHECK_EQUAL(mqd_fetch_begin_forgotten(&request, &count), -1);
}

TEST(frames_in_one_buffer_have_their_own_lengths)
{
    struct mqd_buffer buffer = {0};
    for (int32_t i = 0; i < 200; i++) { /* grows several times on the way */
        mqd_response_begin(&buffer, 2, 11, i);
        mqd_list_offsets_response_begin(&buffer, 11, 0, 0);
        mqd_list_offsets_response_end(&buffer, 11);
        mqd_response_finish(&buffer, (uint64_t)i);
    }
    CHECK(!buffer.failed);
    const uint8_t *at = buffer.bytes;
    for (int32_t i = 0; i < 200; i++, at += 4 + 4 + 1 + 4 + 1 + 1) {
        /* extra_bytes (here `i`) are counted though they are sent separately */
        CHECK_OR(mqd_get_be32(at) == 11u + (uint32_t)i, );
        CHECK_OR(mqd_get_be32(at + 4) == (uint32_t)i, );
    }
    CHECK_EQUAL(at - buffer.bytes, buffer.size_bytes);
    mqd_buffer_free(&buffer);
}

TEST(api_versions_answers_with_the_old_header)
{
    struct mqd_buffer buffer = {0};
    mqd_response_begin(&buffer, 18, 4, 9);
    CHECK_EQUAL(buffer.size_bytes, 8);
    mqd_buffer_free(&buffer);
    mqd_response_begin(&buffer, 3, 12, 9);
    CHECK_EQUAL(buffer.size_bytes, 9);
    mqd_buffer_free(&buffer);
}

TEST(failure_is_sticky_and_writes_nothing)
{
    struct mqd_buffer buffer = {0};
    mqd_response_begin(&buffer, 1, 12, 9);
    struct mqd_fetch_outcome outcome = {.records_bytes = UINT32_MAX};
    mqd_fetch_response_partition(&buffer, 12, &outcome);
    CHECK(buffer.failed);
    uint32_t size_bytes = buffer.size_bytes;
    mqd_fetch_response_partition_end(&buffer, 12);
    mqd_put_bytes(&buffer, "abc", 3);
    mqd_response_finish(&buffer, 0);
    CHECK_EQUAL(buffer.size_bytes, size_bytes);
    mqd_buffer_free(&buffer);
    CHECK(!buffer.failed && !buffer.bytes && !buffer.capacity_bytes);
    mqd_response_begin(&buffer, 1, 12, 9);
    mqd_response_finish(&buffer, INT32_MAX); /* more than the length word can say */
    CHECK(buffer.failed);
    mqd_buffer_free(&buffer);
    mqd_put_i32(&buffer, 1);
    mqd_buffer_reserve(&buffer, MQD_BUFFER_BYTES_MAX);
    CHECK(buffer.failed);
    CHECK_CONTAINS(mqd_error_message(), "larger than 1 GiB");
    mqd_buffer_free(&buffer);
}
