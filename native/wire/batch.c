/* Record batches, magic 2: decoding the header and deciding whether the bytes may enter the log.
 *
 *    0  int64   base_offset: written by the broker
 *    8  int32   batch_length: counts the bytes after itself
 *   12  int32   partition_leader_epoch: written by the broker
 *   16  int8    magic: at the same position in formats 0 and 1
 *   17  uint32  crc: CRC32C of everything after it
 *   21  int16   attributes: bits 0-2 compression, 3 timestamp type, 4 transactional, 5 control, 6
 *       delete horizon
 *   23  int32   last_offset_delta
 *   27  int64   base_timestamp_ms
 *   35  int64   max_timestamp_ms
 *   43  int64   producer_id
 *   51  int16   producer_epoch
 *   53  int32   base_sequence
 *   57  int32   record_count
 *   61          records, perhaps compressed; never parsed here
 *
 * Source: Kafka's protocol guide, "Record Batch"; KIP-98. The checks refuse every batch that
 * Kafka's broker would refuse from a client because of its header. The bytes come from a peer:
 * nothing is read before its length is checked.
 */
#include "base/big_endian.h"
#include "base/error.h"

#include <string.h>

enum {
    NONE = 0,
    CORRUPT_MESSAGE = 2,
    INVALID_PRODUCER_EPOCH = 47,
    UNSUPPORTED_COMPRESSION_TYPE = 76,
    INVALID_RECORD = 87
};
enum {
    COMPRESSION_MASK = 7,
    COMPRESSION_LAST = 4 /* zstd */,
    ATTRIBUTE_TRANSACTIONAL = 1 << 4,
    ATTRIBUTE_CONTROL = 1 << 5
};
enum { LENGTH_END = 12, MAGIC_AT = 16, CRC_END = 21 };
/* length, attributes, timestamp delta, offset delta, key length, value length, header count: at
 * least one byte each */
#define RECORD_BYTES_MIN 7

/* Requires 61 bytes. size_bytes is correct only when batch_length is valid: see claimed_size. */
static void decode(const uint8_t *bytes, struct mqd_batch *out)
{
    out->base_offset = (int64_t)mqd_get_be64(bytes);
    out->size_bytes = (int32_t)(mqd_get_be32(bytes + 8) + LENGTH_END);
    out->partition_leader_epoch = (int32_t)mqd_get_be32(bytes + 12);
    out->crc = mqd_get_be32(bytes + 17);
    out->attributes = (int16_t)mqd_get_be16(bytes + 21);
    out->last_offset_delta = (int32_t)mqd_get_be32(bytes + 23);
    out->base_timestamp_ms = (int64_t)mqd_get_be64(bytes + 27);
    out->max_timestamp_ms = (int64_t)mqd_get_be64(bytes + 35);
    out->producer_id = (int64_t)mqd_get_be64(bytes + 43);
    out->producer_epoch = (int16_t)mqd_get_be16(bytes + 51);
    out->base_sequence = (int32_t)mqd_get_be32(bytes + 53);
    out->record_count = (int32_t)mqd_get_be32(bytes + 57);
}

/* The total size that batch_length implies, or -1 when it cannot hold a header or overflows. */
static int64_t claimed_size(const uint8_t *bytes)
{
    int64_t length = (int32_t)mqd_get_be32(bytes + 8);
    return length < MQD_BATCH_HEADER_BYTES - LENGTH_END || length > INT32_MAX - LENGTH_END ? -1 : length + LENGTH_END;
}

static int16_t refuse(int16_t error, const char *text, const char **reason)
{
    *reason = text;
    return error;
}

/* Requires a complete header whose sizes agree. The contents of a compressed batch are checked by
 * its reader. */
static int16_t check_counts(const struct mqd_batch *batch, const char **reason)
{
    if ((batch->attributes & COMPRESSION_MASK) > COMPRESSION_LAST)
        return refuse(UNSUPPORTED_COMPRESSION_TYPE, "compression type is not none, gzip, snappy, lz4 or zstd", reason);
    if (batch->record_count <= 0)
        return refuse(INVALID_RECORD, "record count is not positive", reason);
    if (batch->last_offset_delta < 0)
        return refuse(INVALID_RECORD, "last offset delta is negative", reason);
    if (batch->last_offset_delta != batch->record_count - 1)
        return refuse(INVALID_RECORD, "last offset delta is not record count - 1", reason);
    if (!(batch->attributes & COMPRESSION_MASK) &&
        batch->record_count > (batch->size_bytes - MQD_BATCH_HEADER_BYTES) / RECORD_BYTES_MIN)
        return refuse(INVALID_RECORD, "record count is more than the bytes of the batch can hold", reason);
    return NONE;
}

/* As in Kafka, a negative producer id means none, and the other fields of a producer are then not
 * checked: clients that are not idempotent send arbitrary numbers there. A transactional batch with
 * a negative epoch is refused here (in Kafka, by the transaction coordinator, which verifies it);
 * for other producers, the log checks the epoch. Control batches have no sequence. */
static int16_t check_producer(const struct mqd_batch *batch, const char **reason)
{
    if (batch->producer_id < 0 || batch->attributes & ATTRIBUTE_CONTROL)
        return NONE;
    if (batch->producer_epoch < 0 && batch->attributes & ATTRIBUTE_TRANSACTIONAL)
        return refuse(INVALID_PRODUCER_EPOCH, "transactional batch has a negative producer epoch", reason);
    if (batch->base_sequence < 0)
        return refuse(INVALID_RECORD, "producer id comes with a negative base sequence", reason);
    return NONE;
}

/* base_offset is not checked: the broker overwrites it, and has already done so in batches from a
 * log. */
int16_t mqd_batch_validate(const uint8_t *bytes, uint64_t size_bytes, struct mqd_batch *out, const char **reason)
{
    *reason = NULL;
    if (size_bytes == 0)
        return refuse(INVALID_RECORD, "there is no record batch", reason);
    if (size_bytes <= MAGIC_AT)
        return refuse(CORRUPT_MESSAGE, "record batch is cut off in its header", reason);
    int8_t magic = (int8_t)bytes[MAGIC_AT];
    if (magic == 0 || magic == 1)
        return refuse(INVALID_RECORD,
                      "message format 0 or 1; only record batches with magic 2 are accepted (clients since Kafka 0.11)",
                      reason);
    if (magic != 2)
        return refuse(CORRUPT_MESSAGE, "magic is not 2", reason);
    if (size_bytes < MQD_BATCH_HEADER_BYTES)
        return refuse(CORRUPT_MESSAGE, "record batch is cut off in its header", reason);
    int64_t claimed = claimed_size(bytes);
    if (claimed < 0)
        return refuse(CORRUPT_MESSAGE, "batch length is impossible", reason);
    if ((uint64_t)claimed > size_bytes)
        return refuse(CORRUPT_MESSAGE, "batch length exceeds the available bytes", reason);
    if ((uint64_t)claimed < size_bytes)
        return refuse(INVALID_RECORD,
                      "more bytes than one record batch; a partition takes exactly one batch per request", reason);
    decode(bytes, out);
    if (mqd_crc32c(0, bytes + CRC_END, size_bytes - CRC_END) != out->crc)
        return refuse(CORRUPT_MESSAGE, "CRC32C of the record batch does not match its bytes", reason);
    int16_t error = check_counts(out, reason);
    return error ? error : check_producer(out, reason);
}

/* Stored batches may have fewer records than offsets (compaction), even none. */
int mqd_batch_decode(const uint8_t *bytes, uint64_t available_bytes, struct mqd_batch *out)
{
    if (available_bytes < MQD_BATCH_HEADER_BYTES)
        return mqd_error_set_static(MQD_E_CORRUPT, "record batch is cut off in its header");
    if (bytes[MAGIC_AT] != 2)
        return mqd_error_set_static(MQD_E_CORRUPT, "magic of the record batch is not 2");
    if (claimed_size(bytes) < 0)
        return mqd_error_set_static(MQD_E_CORRUPT, "batch length is impossible");
    decode(bytes, out);
    if (out->last_offset_delta < 0 || out->base_offset < 0 || out->base_offset >= INT64_MAX - out->last_offset_delta)
        return mqd_error_set_static(MQD_E_CORRUPT, "offsets of the record batch are impossible");
    if (out->record_count < 0 || out->record_count - 1 > out->last_offset_delta)
        return mqd_error_set_static(MQD_E_CORRUPT, "record count of the batch does not fit its last offset delta");
    return 0;
}
