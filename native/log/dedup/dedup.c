/* See log/dedup/dedup.h. */
#include "log/dedup/dedup.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/big_endian.h"
#include "base/error.h"
#include "log/dedup/planted_bugs.h"
#include "wire/kafka_errors.h"
#include "wire/record_scan.h"

#define AT_LENGTH 8
#define LENGTH_END 12
#define AT_RECORD_COUNT 57

struct mqd_dedup *mqd_dedup_new(const struct mqd_log_options *options)
{
    struct mqd_dedup *dedup = calloc(1, sizeof *dedup);
    if (!dedup) {
        mqd_error_set(ENOMEM, "out of memory for the ids of a partition");
        return NULL;
    }
    if (mqd_ids_open(&dedup->ids, options->dedup_count_max) < 0) {
        free(dedup);
        return NULL;
    }
    dedup->window_ms = options->dedup_window_ms;
    memcpy(dedup->header, options->dedup_header, sizeof dedup->header);
    dedup->header_bytes = (uint32_t)strnlen(dedup->header, sizeof dedup->header);
    return dedup;
}

void mqd_dedup_free(struct mqd_dedup *dedup)
{
    if (!dedup)
        return;
    mqd_ids_close(&dedup->ids);
    free(dedup);
}

bool mqd_dedup_matches(const struct mqd_dedup *dedup, const struct mqd_log_options *options)
{
    return strncmp(dedup->header, options->dedup_header, sizeof dedup->header) == 0;
}

/* The producer whose transaction the batch belongs to, or -1. */
static int64_t producer_of(const struct mqd_batch *batch)
{
    return batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL ? batch->producer_id : -1;
}

static void begin_records(const struct mqd_batch *batch, const uint8_t *bytes, struct mqd_records *records)
{
    mqd_records_begin(records, batch, bytes + MQD_BATCH_HEADER_BYTES,
                      (uint64_t)batch->size_bytes - MQD_BATCH_HEADER_BYTES);
}

static bool id_of(const struct mqd_dedup *dedup, const struct mqd_record *record, struct mqd_id_hash *hash)
{
    const uint8_t *id;
    int32_t id_bytes;
    if (!mqd_record_header(record, dedup->header, dedup->header_bytes, &id, &id_bytes) || id_bytes < 0)
        return false;
    mqd_ids_hash(&dedup->ids, id, (uint32_t)id_bytes, hash);
    return true;
}

/* While the clock is behind the latest time seen, nothing expires; if it was set back by more than
 * the window, all times are shifted back by the same amount. */
static void advance(struct mqd_dedup *dedup, int64_t now_ms)
{
    if (now_ms < dedup->last_ms - dedup->window_ms) {
        mqd_ids_shift_times(&dedup->ids, dedup->last_ms - now_ms);
        dedup->last_ms = now_ms;
    } else if (now_ms > dedup->last_ms) {
        dedup->last_ms = now_ms;
    }
    mqd_ids_expire(&dedup->ids, dedup->last_ms - dedup->window_ms);
    mqd_ids_set_time(&dedup->ids, dedup->last_ms, dedup->window_ms);
}

static int16_t refuse(struct mqd_dedup *dedup, int64_t base_offset, struct mqd_dedup_taken *taken, int16_t error,
                      const char *message)
{
    mqd_ids_cut(&dedup->ids, base_offset);
    taken->message = message;
    return error;
}

static void note_duplicate(struct mqd_dedup_taken *taken, int64_t offset)
{
    if (!taken->duplicate_count++)
        taken->first_original_offset = offset;
    if (offset >= taken->original_end_offset)
        taken->original_end_offset = offset + 1;
}

static int16_t take_record(struct mqd_dedup *dedup, const struct mqd_record *record, int64_t base_offset,
                           int64_t producer_id, struct mqd_dedup_taken *taken)
{
    struct mqd_id_hash hash;
    int64_t offset;
    if (!id_of(dedup, record, &hash))
        return refuse(dedup, base_offset, taken, MQD_KAFKA_INVALID_RECORD,
                      "a record has no id: with dedup.window.ms, every record must have the header "
                      "that the topic's dedup.header names, and its value must not be null");
    switch (mqd_ids_find(&dedup->ids, &hash, producer_id, &offset)) {
    case MQD_ID_USED:
        note_duplicate(taken, offset);
        return 0;
    case MQD_ID_UNDECIDED:
        if (PLANTED_DEDUP_BUG(UNDECIDED_FREE))
            break;
        return refuse(dedup, base_offset, taken, MQD_KAFKA_NOT_ENOUGH_REPLICAS,
                      "a record's id is already used in a transaction that has not ended; the client may retry");
    case MQD_ID_FREE:
        break;
    }
    if (mqd_ids_put(&dedup->ids, &hash, base_offset + record->offset_delta, producer_id) == 0)
        return 0;
    return refuse(dedup, base_offset, taken, MQD_KAFKA_NOT_ENOUGH_REPLICAS,
                  "the partition already has dedup.ids.max ids in its window; the client may retry");
}

/* Second pass: keeps a record if its id is stored with the record's own offset. */
static int write_without_duplicates(const struct mqd_dedup *dedup, const struct mqd_batch *batch, const uint8_t *bytes,
                                    int64_t base_offset, struct mqd_dedup_taken *taken)
{
    struct mqd_records records;
    struct mqd_record record;
    struct mqd_id_hash hash;
    int64_t offset;
    uint8_t *out = malloc((size_t)batch->size_bytes);
    if (!out)
        return -1;
    size_t at = MQD_BATCH_HEADER_BYTES;
    memcpy(out, bytes, MQD_BATCH_HEADER_BYTES);
    begin_records(batch, bytes, &records);
    while (mqd_records_next(&records, &record) == 1) {
        if (!id_of(dedup, &record, &hash) ||
            mqd_ids_find(&dedup->ids, &hash, producer_of(batch), &offset) != MQD_ID_USED ||
            offset != base_offset + record.offset_delta)
            continue;
        memcpy(out + at, record.bytes, record.size_bytes);
        at += record.size_bytes;
    }
    mqd_put_be32(out + AT_LENGTH, (uint32_t)(at - LENGTH_END));
    mqd_put_be32(out + AT_RECORD_COUNT, (uint32_t)batch->record_count - taken->duplicate_count);
    taken->bytes = out;
    taken->size_bytes = (int32_t)at;
    return 0;
}

int16_t mqd_dedup_take(struct mqd_dedup *dedup, const struct mqd_batch *batch, const uint8_t *bytes,
                       int64_t base_offset, int64_t now_ms, struct mqd_dedup_taken *taken)
{
    struct mqd_records records;
    struct mqd_record record;
    int more;
    *taken = (struct mqd_dedup_taken){.first_original_offset = -1, .original_end_offset = -1};
    if (batch->attributes & MQD_ATTRIBUTE_COMPRESSION) {
        taken->message = "a topic with dedup.window.ms accepts only uncompressed batches";
        return MQD_KAFKA_INVALID_RECORD;
    }
    advance(dedup, now_ms);
    begin_records(batch, bytes, &records);
    while ((more = mqd_records_next(&records, &record)) == 1) {
        int16_t error = take_record(dedup, &record, base_offset, producer_of(batch), taken);
        if (error)
            return error;
    }
    if (more < 0)
        return refuse(dedup, base_offset, taken, MQD_KAFKA_INVALID_RECORD, records.reason);
    /* nothing was left out, so the batch is written as it is; or all of it was left out and there
     * are no sequence numbers that the log must keep, so nothing is written */
    if (!taken->duplicate_count || (taken->duplicate_count == (uint32_t)batch->record_count && batch->producer_id < 0))
        return 0;
    if (write_without_duplicates(dedup, batch, bytes, base_offset, taken) < 0)
        return refuse(dedup, base_offset, taken, MQD_KAFKA_NOT_ENOUGH_REPLICAS,
                      "out of memory for a batch without its duplicates; the client may retry");
    return 0;
}

static inline bool is_known(const struct mqd_dedup *dedup, const struct mqd_id_hash *hash)
{
    int64_t offset;
    return mqd_ids_find(&dedup->ids, hash, -1, &offset) != MQD_ID_FREE;
}

/* The log may contain a second record with an id, if the leader no longer remembered the first. The
 * id then belongs to the second record. */
void mqd_dedup_learn(struct mqd_dedup *dedup, const struct mqd_batch *batch, const uint8_t *bytes)
{
    struct mqd_records records;
    struct mqd_record record;
    struct mqd_id_hash hash;
    if (batch->attributes & (MQD_ATTRIBUTE_COMPRESSION | MQD_ATTRIBUTE_CONTROL) ||
        !(batch->attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME) || PLANTED_DEDUP_BUG(LEARN_NOTHING))
        return;
    advance(dedup, batch->max_timestamp_ms);
    begin_records(batch, bytes, &records);
    while (mqd_records_next(&records, &record) == 1) {
        if (!id_of(dedup, &record, &hash) || (PLANTED_DEDUP_BUG(LEARN_FIRST) && is_known(dedup, &hash)))
            continue;
        while (mqd_ids_count(&dedup->ids) >= dedup->ids.count_max) /* more than one, if the limit was lowered */
            mqd_ids_drop_oldest(&dedup->ids);
        mqd_ids_put(&dedup->ids, &hash, batch->base_offset + record.offset_delta, producer_of(batch));
    }
}
