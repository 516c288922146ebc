/* fuzz: -max_len=700 */
/* All code that walks records or the state of producers, over any bytes: the walks agree with
 * each other, markers and snapshots are read or refused. */
#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "log/producers.h"
#include "wire/record_scan.h"

#define PLACE_COUNT 64

static void require(int condition)
{
    if (!condition)
        abort();
}

/* The check of a batch for a compacted topic, the compaction, and the reading of a coordinator's
 * log. */
static void walk_records(const uint8_t *data, size_t size)
{
    struct mqd_batch batch = {.record_count = data[0] % PLACE_COUNT,
                              .last_offset_delta = data[0] % PLACE_COUNT - 1,
                              .base_offset = 10,
                              .producer_id = -1,
                              .producer_epoch = -1,
                              .base_sequence = -1};
    if (batch.record_count == 0)
        batch.record_count = 1, batch.last_offset_delta = 0;
    size_t length = size - 1;
    uint8_t *bytes = malloc(MQD_BATCH_HEADER_BYTES + length);
    memcpy(bytes + MQD_BATCH_HEADER_BYTES, data + 1, length);
    mqd_batch_put_header(bytes, &batch, bytes + MQD_BATCH_HEADER_BYTES, (uint32_t)length);
    int32_t unkeyed[4], unkeyed_count = 0, walked = 0;
    const char *reason;
    struct mqd_records records;
    struct mqd_record record[PLACE_COUNT + 1];
    int more;
    mqd_records_begin(&records, &batch, bytes + MQD_BATCH_HEADER_BYTES, length);
    while ((more = mqd_records_next(&records, &record[walked])) == 1) {
        unkeyed_count += record[walked].key_bytes < 0;
        const uint8_t *value = NULL, *end = record[walked].bytes + record[walked].size_bytes;
        int32_t value_bytes = 0;
        bool found = mqd_record_header(&record[walked], "h", 1, &value, &value_bytes);
        require(!found || (value > record[walked].body && value <= end && value_bytes <= end - value));
        walked++;
    }
    int32_t admitted =
        mqd_records_validate(bytes + MQD_BATCH_HEADER_BYTES, length, batch.record_count, unkeyed, 4, &reason);
    /* what was let in can be compacted */
    require(admitted < 0 ? reason != NULL : more == 0 && unkeyed_count == admitted);
    struct mqd_record_location places[PLACE_COUNT];
    struct mqd_record_walk walk = {0};
    mqd_records_locate(bytes, MQD_BATCH_HEADER_BYTES + length, INT64_MAX, &walk, places, PLACE_COUNT);
    require(admitted < 0 || (walk.stop == MQD_WALK_END && (int32_t)walk.record_count == batch.record_count));
    for (uint32_t i = 0; i < walk.record_count; i++) {
        const struct mqd_record_location *place = &places[i];
        uint64_t end = MQD_BATCH_HEADER_BYTES + length;
        require(place->key_position <= end &&
                (place->key_bytes < 0 || end - place->key_position >= (uint32_t)place->key_bytes));
        require(place->value_position <= end &&
                (place->value_bytes < 0 || end - place->value_position >= (uint32_t)place->value_bytes));
        if (more == 0)
            require(place->key_bytes == record[i].key_bytes && bytes + place->key_position == record[i].key &&
                    (place->value_bytes < 0) == record[i].tombstone);
    }
    free(bytes);
}

static void read_marker(const uint8_t *data, size_t size)
{
    struct mqd_batch batch = {
        .record_count = 1, .attributes = 0x30, .size_bytes = (int32_t)(MQD_BATCH_HEADER_BYTES + size)};
    struct mqd_marker marker;
    uint8_t *bytes = malloc(MQD_BATCH_HEADER_BYTES + size);
    memset(bytes, 0, MQD_BATCH_HEADER_BYTES);
    memcpy(bytes + MQD_BATCH_HEADER_BYTES, data, size);
    if (mqd_marker_parse(bytes, &batch, &marker) == 0)
        require(size >= 16 && batch.size_bytes <= MQD_MARKER_BYTES_MAX);
    free(bytes);
}

/* With a valid checksum. A decoded snapshot is equal when it is encoded and decoded again. */
static void read_snapshot(const uint8_t *data, size_t size)
{
    uint8_t *bytes = malloc(size + 16), *again;
    size_t again_bytes;
    struct mqd_producers producers = {0}, copy = {0};
    int64_t offset, copied;
    memcpy(bytes, (const uint8_t[]){0x4d, 0x51, 0x44, 0x50, 0, 1 + data[0] % 2, 0, 0, 0, 0, 0, 0}, 12);
    memcpy(bytes + 12, data + 1, size - 1);
    size_t bytes_count = 12 + size - 1;
    uint32_t crc = htobe32(mqd_crc32c(0, bytes + 12, bytes_count - 12));
    memcpy(bytes + 8, &crc, sizeof crc);
    if (mqd_producers_decode(&producers, bytes, bytes_count, &offset) == 0) {
        require((again = mqd_producers_encode(&producers, offset, &again_bytes)) != NULL);
        require(mqd_producers_decode(&copy, again, again_bytes, &copied) == 0 && copied == offset &&
                copy.count == producers.count);
        require(mqd_transactions_first_ongoing(&copy.transactions) ==
                mqd_transactions_first_ongoing(&producers.transactions));
        free(again);
        mqd_producers_expire(&producers, INT64_MAX);
    } else {
        require(producers.count == 0);
    }
    mqd_producers_free(&producers);
    mqd_producers_free(&copy);
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    if (data[0] % 3 == 0)
        walk_records(data + 1, size - 1);
    else if (data[0] % 3 == 1)
        read_marker(data + 1, size - 1);
    else
        read_snapshot(data + 1, size - 1);
    return 0;
}
