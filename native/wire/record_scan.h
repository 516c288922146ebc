/* Reads the records of one stored batch one by one, and reassembles the batch without some of them.
 *
 * The bytes came from a producer and a disk: each length is checked against the remaining bytes
 * before use. Headers are parsed only when one is requested; they are copied with their record.
 * When records are removed, a batch keeps its base offset, last offset delta, producer, sequence,
 * leader epoch, and the bytes of each remaining record. So the offset of a record is always base
 * offset + its delta. Batch length, record count, largest timestamp and CRC change.
 *
 * Delete horizon (KIP-534): attribute bit 6 means that the base timestamp is the time from which
 * tombstones of this batch may be dropped. Records keep their times, so their timestamp deltas are
 * rewritten once, when the horizon is set.
 */
#ifndef MQD_RECORD_SCAN_H
#define MQD_RECORD_SCAN_H

#include "native.h"

#define MQD_ATTRIBUTE_COMPRESSION 0x07
#define MQD_ATTRIBUTE_LOG_APPEND_TIME 0x08
#define MQD_ATTRIBUTE_TRANSACTIONAL 0x10
#define MQD_ATTRIBUTE_CONTROL 0x20
#define MQD_ATTRIBUTE_DELETE_HORIZON 0x40
/* a timestamp delta can take ten bytes instead of one; the length's varint grows by at most four */
#define MQD_RECORD_GROWTH_BYTES_MAX 13

struct mqd_record {
    const uint8_t *bytes;           /* the first byte of the record, which begins with its length */
    uint32_t size_bytes;            /* of the whole record */
    const uint8_t *body;            /* after the length: attributes */
    const uint8_t *offset_delta_at; /* after the timestamp delta */
    int64_t timestamp_delta;
    int32_t offset_delta;
    const uint8_t *key;
    int32_t key_bytes; /* -1 = null */
    bool tombstone;    /* the value is null */
    const uint8_t *headers;
};

struct mqd_records {
    const uint8_t *at, *end;
    int32_t remaining_count; /* records not read yet */
    int32_t next_delta;      /* the next record's offset delta must not be lower */
    int32_t last_delta;      /* nor higher: last_offset_delta of the batch */
    const char *reason;
};

/* `bytes`: the uncompressed records of the batch. */
void mqd_records_begin(struct mqd_records *records, const struct mqd_batch *batch, const uint8_t *bytes,
                       uint64_t size_bytes);
/* Returns 1 with the next record; 0 at the end, if no bytes follow; or -1 if the records are
 * invalid (`reason` says why). */
int mqd_records_next(struct mqd_records *records, struct mqd_record *out);

/* Whether the record has a header of this name. False, too, if the headers cannot be parsed.
 * *value: the value of the last such header, as in Kafka's lastHeader (size -1: null). */
bool mqd_record_header(const struct mqd_record *record, const char *name, uint32_t name_bytes, const uint8_t **value,
                       int32_t *value_bytes);

/* The time of a record; a sum that overflows is clamped to the range. */
int64_t mqd_record_timestamp_ms(const struct mqd_batch *batch, const struct mqd_record *record);

/* Writes `record` to `out` for another base timestamp; returns its new size, at most size_bytes +
 * MQD_RECORD_GROWTH_BYTES_MAX. */
uint32_t mqd_record_rebase(uint8_t *out, const struct mqd_batch *batch, const struct mqd_record *record,
                           int64_t base_timestamp_ms);

/* Writes the header of a batch to `out`, for the records_bytes at `records`, which are not copied.
 * `batch` provides everything except the size, and the CRC, which covers header and records. */
void mqd_batch_put_header(uint8_t *out, const struct mqd_batch *batch, const uint8_t *records, uint32_t records_bytes);

#endif
