/* Checks that the records of a batch can be parsed; otherwise the batch would stop every consumer
 * at its offset. The parsed records are not kept. Also finds the records without a key, for topics
 * whose records must have one (cleanup.policy=compact).
 *
 *   record  length varint (bytes after it) | attributes int8 | timestamp_delta varlong |
 *           offset_delta varint | key, value (varint size, -1 = null, bytes) | header count varint
 *           | headers (varint size and key; varint size, -1 = null, and value). Varints are zigzag.
 *
 * The bytes come from a peer: before use, a length is checked against the remaining bytes, and a
 * count against the minimum size of its elements, so no loop exceeds the bytes. Offset deltas must
 * count up from 0, because compaction relies on them. Source: Kafka's protocol guide, "Record".
 * This parser refuses the records that Kafka's LogValidator refuses, and those with deltas out of
 * order (Kafka rewrites such batches).
 */
#include "base/varint.h"
#include "native.h"

#define RECORD_BYTES_MIN 7 /* including its length: see wire/batch.c */

struct walk {
    const uint8_t *at;
    const uint8_t *end;
};

/* Advances to `next`, unless that is NULL (a parse failure). */
static inline bool move(struct walk *walk, const uint8_t *next)
{
    if (next)
        walk->at = next;
    return next != NULL;
}

/* Skips a key or value; size -1 = null, where allowed. */
static inline bool skip_blob(struct walk *walk, bool nullable, int64_t *size_bytes)
{
    if (!move(walk, mqd_varint_size(walk->at, walk->end, size_bytes)) || *size_bytes < (nullable ? -1 : 0))
        return false;
    if (*size_bytes >= 0)
        walk->at += *size_bytes;
    return true;
}

static const char *skip_headers(struct walk *walk)
{
    int64_t count, size_bytes;
    if (!move(walk, mqd_varint_size(walk->at, walk->end, &count)) || count < 0 || 2 * count > walk->end - walk->at)
        return "a record's header count is impossible";
    while (count-- > 0)
        if (!skip_blob(walk, false, &size_bytes) || !skip_blob(walk, true, &size_bytes))
            return "a record's header is cut off or has an impossible length";
    return NULL;
}

/* Skips one record. Returns NULL, or the reason why the record is invalid. */
static const char *skip_record(struct walk *walk, int32_t index, bool *has_key)
{
    int64_t size_bytes, number;
    if (!move(walk, mqd_varint_size(walk->at, walk->end, &size_bytes)) || size_bytes < RECORD_BYTES_MIN - 1)
        return "a record's length is impossible";
    struct walk record = {walk->at + 1, walk->at + size_bytes}; /* + 1: attributes, all unused */
    if (!move(&record, mqd_varlong_skip(record.at, record.end)))
        return "a record's timestamp is cut off";
    if (!move(&record, mqd_varint(record.at, record.end, &number)) || number != index)
        return "a record's offset delta is not its position in the batch";
    if (!skip_blob(&record, true, &size_bytes))
        return "a record's key is cut off or has an impossible length";
    *has_key = size_bytes >= 0;
    if (!skip_blob(&record, true, &size_bytes))
        return "a record's value is cut off or has an impossible length";
    const char *reason = skip_headers(&record);
    if (reason)
        return reason;
    if (record.at != record.end)
        return "a record's length field is wrong";
    walk->at = record.end;
    return NULL;
}

int32_t mqd_records_validate(const uint8_t *records, uint64_t size_bytes, int32_t record_count, int32_t *unkeyed,
                             uint32_t unkeyed_count_max, const char **reason)
{
    struct walk walk = {records, records + size_bytes};
    int32_t count = 0;
    *reason = NULL;
    for (int32_t i = 0; i < record_count; i++) {
        bool has_key;
        if ((*reason = skip_record(&walk, i, &has_key)))
            return -1 - i;
        if (has_key)
            continue;
        if ((uint32_t)count < unkeyed_count_max)
            unkeyed[count] = i;
        count++;
    }
    if (walk.at != walk.end) {
        *reason = "bytes follow the last record";
        return -1 - record_count;
    }
    return count;
}
