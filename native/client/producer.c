/* The producer's batches from closing to response: order, sending, outcomes, retries. States
 * and invariants: client/producer.h; appending records: client/append.c. */
#include "client/producer.h"

#include <errno.h>
#include <string.h>

#include "base/atomic.h"
#include "base/big_endian.h"
#include "base/error.h"
#include "base/varint_put.h"
#include "wire/cursor.h"
#include "wire/kafka_errors.h"

enum {
    BATCH_LENGTH_AT = 8,
    CRC_AT = 17,
    ATTRIBUTES_AT = 21,
    LAST_OFFSET_DELTA_AT = 23,
    BASE_TIMESTAMP_AT = 27,
    MAX_TIMESTAMP_AT = 35,
    PRODUCER_ID_AT = 43,
    PRODUCER_EPOCH_AT = 51,
    BASE_SEQUENCE_AT = 53,
    RECORD_COUNT_AT = 57
};
#define CORRELATION_AT 4

#define BATCH_OF(node_) MQD_CONTAINER(node_, struct mqd_producer_batch, node)

static bool is_idempotent(const struct mqd_producer *producer)
{
    return producer->options.producer_id >= 0;
}

/* ---- memory and entries ---- */

void mqd_producer_batch_free(struct mqd_producer *producer, struct mqd_producer_batch *batch)
{
    if (batch->chunk_count) {
        mqd_client_memory_release(&producer->memory, batch->first_chunk, batch->chunk_count);
        producer->used_bytes -= (uint64_t)batch->chunk_count * producer->memory.chunk_bytes;
        batch->chunk_count = 0;
    }
    producer->active_count -= --batch->partition->batch_count == 0;
    producer->live_count--;
    if (batch->state == MQD_BATCH_DONE)
        return; /* its outcome has not been reported yet */
    batch->state = MQD_BATCH_FREE;
    mqd_list_append(&producer->free, &batch->node);
}

static uint32_t index_of(const struct mqd_producer *producer, const struct mqd_producer_batch *batch)
{
    return (uint32_t)(batch - producer->batches);
}

static struct mqd_producer_batch *find_batch(struct mqd_producer *producer, uint64_t number)
{
    uint64_t index = number & ((1u << MQD_PRODUCER_BATCH_BITS) - 1);
    struct mqd_producer_batch *batch = &producer->batches[index];
    return index < producer->used_count && batch->number == number && batch->state != MQD_BATCH_FREE ? batch : NULL;
}

/* ---- the bytes ---- */

static uint32_t head_bytes(const struct mqd_producer_batch *batch)
{
    return batch->partition->topic->prefix_bytes + 4 + mqd_unsigned_varint_bytes(batch->size_bytes + 1);
}

void mqd_producer_batch_put_head(struct mqd_producer *producer, struct mqd_producer_batch *batch)
{
    const struct mqd_producer_topic *topic = batch->partition->topic;
    uint8_t *header = mqd_producer_data(producer) + batch->header_position, *at = header - head_bytes(batch);
    memcpy(at, topic->prefix, topic->prefix_bytes);
    mqd_put_be32(at + CORRELATION_AT, MQD_CLIENT_PRODUCER_CORRELATION_MIN |
                                          (producer->serial & 0x3ff) << MQD_PRODUCER_BATCH_BITS |
                                          index_of(producer, batch));
    at = mqd_put_be32(at + topic->prefix_bytes, (uint32_t)batch->partition->index);
    mqd_put_unsigned_varint(at, batch->size_bytes + 1);
    memset(header + batch->size_bytes, 0, MQD_PRODUCER_TAIL_BYTES);
}

/* Writes all fields of the batch's header that a client sets, and the checksum. */
static void stamp(struct mqd_producer *producer, struct mqd_producer_batch *batch, int32_t base_sequence)
{
    uint8_t *header = mqd_producer_data(producer) + batch->header_position;
    bool idempotent = is_idempotent(producer);
    memset(header, 0, 8);
    mqd_put_be32(header + BATCH_LENGTH_AT, batch->size_bytes - 12);
    mqd_put_be32(header + 12, UINT32_MAX); /* leader epoch: set by the broker */
    header[16] = 2;
    mqd_put_be16(header + ATTRIBUTES_AT, batch->attributes);
    mqd_put_be32(header + LAST_OFFSET_DELTA_AT, (uint32_t)(batch->record_count - 1));
    mqd_put_be64(header + BASE_TIMESTAMP_AT, (uint64_t)batch->base_timestamp_ms);
    mqd_put_be64(header + MAX_TIMESTAMP_AT, (uint64_t)batch->max_timestamp_ms);
    mqd_put_be64(header + PRODUCER_ID_AT, (uint64_t)producer->options.producer_id);
    mqd_put_be16(header + PRODUCER_EPOCH_AT, (uint16_t)(idempotent ? producer->options.producer_epoch : -1));
    mqd_put_be32(header + BASE_SEQUENCE_AT, (uint32_t)(idempotent ? base_sequence : -1));
    mqd_put_be32(header + RECORD_COUNT_AT, (uint32_t)batch->record_count);
    mqd_put_be32(header + CRC_AT, mqd_crc32c(0, header + ATTRIBUTES_AT, batch->size_bytes - ATTRIBUTES_AT));
    batch->base_sequence = base_sequence;
    batch->stamped_identity = producer->identity;
}

/* ---- order ---- */

/* Finds the next batch to send after a failure, keeping the order. A SENT batch that was sent
 * before the retry of an earlier batch will fail too, or has been written out of order: until its
 * response has arrived, nothing is sent. */
static void find_next(struct mqd_producer_partition *partition)
{
    uint32_t sent = 0;
    uint64_t last = 0;
    struct mqd_node *node = partition->closed.next;
    for (; node != &partition->closed && BATCH_OF(node)->state == MQD_BATCH_SENT && BATCH_OF(node)->sent_serial > last;
         node = node->next, sent++)
        last = BATCH_OF(node)->sent_serial;
    bool blocked = node == &partition->closed || BATCH_OF(node)->state == MQD_BATCH_SENT;
    partition->next = blocked ? NULL : BATCH_OF(node);
    partition->reordered = sent < partition->inflight;
}

/* Called when the batch is closed, while the records are in the caches: stamps the sequence that it
 * will have if no earlier batch is dropped. */
void mqd_producer_batch_queue(struct mqd_producer *producer, struct mqd_producer_batch *batch)
{
    struct mqd_producer_partition *partition = batch->partition;
    bool follows_unsent = !mqd_list_empty(&partition->closed) &&
                          BATCH_OF(partition->closed.previous)->sequence_identity != producer->identity;
    if (!follows_unsent)
        partition->planned_sequence = partition->next_sequence;
    stamp(producer, batch, partition->planned_sequence);
    partition->planned_sequence = mqd_sequence_after(partition->planned_sequence, batch->record_count);
    mqd_producer_batch_put_head(producer, batch);
    batch->state = MQD_BATCH_QUEUED;
    mqd_list_append(&partition->closed, &batch->node);
    if (partition->reordered)
        find_next(partition);
    else if (!partition->next)
        partition->next = batch;
}

/* ---- sending ---- */

static bool send_one(struct mqd_producer *producer, struct mqd_producer_batch *batch)
{
    struct mqd_producer_partition *partition = batch->partition;
    bool first_time = batch->sequence_identity != producer->identity;
    int32_t sequence = first_time ? partition->next_sequence : batch->base_sequence;
    if (batch->stamped_identity != producer->identity || batch->base_sequence != sequence)
        stamp(producer, batch, sequence);
    uint32_t head = head_bytes(batch);
    struct mqd_submitted submitted = {.kind = producer->options.acks ? MQD_SUBMITTED_BATCH : MQD_SUBMITTED_BATCH_ACKS_0,
                                      .batch = index_of(producer, batch)};
    if (!mqd_client_push(producer->client, batch->header_position - head,
                         head + batch->size_bytes + MQD_PRODUCER_TAIL_BYTES, submitted))
        return false;
    if (first_time) {
        batch->sequence_identity = producer->identity;
        partition->next_sequence = mqd_sequence_after(sequence, batch->record_count);
    }
    batch->state = MQD_BATCH_SENT;
    batch->sent_serial = ++producer->sent_serial;
    batch->resent = !first_time;
    partition->inflight++;
    producer->sent_count++;
    return true;
}

/* An idempotent batch that is sent again is sent alone: if its response is lost again, batches sent
 * with it could have pushed it out of the five that the broker remembers. */
static bool may_send(const struct mqd_producer *producer, const struct mqd_producer_partition *partition,
                     const struct mqd_producer_batch *batch)
{
    if (batch->state != MQD_BATCH_QUEUED || partition->inflight >= producer->options.inflight_max)
        return false;
    if (!is_idempotent(producer) || partition->inflight == 0)
        return true;
    if (!producer->transactional_id && partition->acknowledged_identity != producer->identity)
        return false;
    return batch->sequence_identity != producer->identity && !BATCH_OF(partition->closed.next)->resent;
}

bool mqd_producer_partition_send(struct mqd_producer *producer, struct mqd_producer_partition *partition)
{
    struct mqd_producer_batch *batch;
    while ((batch = partition->next) && may_send(producer, partition, batch)) {
        if (!send_one(producer, batch)) {
            if (!mqd_list_linked(&partition->ready))
                mqd_list_append(&producer->ready, &partition->ready);
            return false;
        }
        if (partition->reordered)
            find_next(partition);
        else
            partition->next = batch->node.next == &partition->closed ? NULL : BATCH_OF(batch->node.next);
    }
    return true;
}

void mqd_producer_pump(struct mqd_producer *producer)
{
    struct mqd_node *node;
    while (producer->client && (node = mqd_list_pop(&producer->ready)))
        if (!mqd_producer_partition_send(producer, MQD_CONTAINER(node, struct mqd_producer_partition, ready)))
            return;
}

static void mark_ready(struct mqd_producer *producer, struct mqd_producer_partition *partition)
{
    if (!mqd_list_linked(&partition->ready))
        mqd_list_append(&producer->ready, &partition->ready);
}

int mqd_producer_send(struct mqd_producer *producer, int64_t now_us, int everything)
{
    if (!producer->client || mqd_client_check(producer->client))
        return producer->client
                   ? -1
                   : mqd_error_set_static(
                         EPIPE, "the producer's attachment is closed: attach again and move it (mqd_producer_move)");
    mqd_producer_close_all(producer, everything ? INT64_MAX : now_us - producer->options.linger_us);
    mqd_producer_pump(producer);
    mqd_client_flush(producer->client);
    return 0;
}

int64_t mqd_producer_next_send_us(const struct mqd_producer *producer)
{
    if (mqd_list_empty(&producer->open))
        return INT64_MAX;
    return MQD_CONTAINER(producer->open.next, struct mqd_producer_batch, open_node)->opened_us +
           producer->options.linger_us;
}

/* ---- responses ---- */

/* Requeues the batch if its error is a consequence of an earlier batch's error (P4); otherwise
 * records the outcome. */
static void record_outcome(struct mqd_producer *producer, struct mqd_producer_batch *batch, int16_t error,
                           int64_t base_offset, int64_t log_append_time_ms)
{
    bool is_first = batch->partition->closed.next == &batch->node;
    if (error && is_idempotent(producer) && !is_first) {
        batch->state = MQD_BATCH_QUEUED;
        return;
    }
    batch->error = error;
    batch->base_offset = error ? -1 : base_offset;
    batch->log_append_time_ms = log_append_time_ms;
    batch->state = error ? MQD_BATCH_FAILED : MQD_BATCH_DONE;
    mqd_list_append(&producer->outcomes, &batch->outcome_node);
    if (!error) {
        producer->outstanding_records -= (uint64_t)batch->record_count;
        mqd_list_remove(&batch->node);
        mqd_producer_batch_free(producer, batch);
    }
}

/* P6. OUT_OF_ORDER_SEQUENCE_NUMBER (45) shows that the batch is not in the log: otherwise the
 * response would be DUPLICATE_SEQUENCE_NUMBER. Once the broker has forgotten or fenced the
 * producer, a retry under the same identity cannot show whether the batch is in the log, so keeping
 * the identity gains nothing. */
static bool still_maybe_written(const struct mqd_producer_batch *batch, int16_t error)
{
    switch (error) {
    case MQD_KAFKA_UNKNOWN_SERVER_ERROR:
    case MQD_KAFKA_NOT_LEADER_OR_FOLLOWER: /* also when leadership ends while the leader waits for replicas */
    case MQD_KAFKA_REQUEST_TIMED_OUT:
    case MQD_KAFKA_NOT_ENOUGH_REPLICAS_AFTER_APPEND:
    case MQD_KAFKA_STORAGE_ERROR: /* also when a flush failed */
        return true;
    case MQD_KAFKA_OUT_OF_ORDER_SEQUENCE_NUMBER:
    case MQD_KAFKA_INVALID_PRODUCER_EPOCH:
    case MQD_KAFKA_INVALID_PRODUCER_ID_MAPPING:
    case MQD_KAFKA_UNKNOWN_PRODUCER_ID:
    case MQD_KAFKA_PRODUCER_FENCED:
        return false;
    default: /* this attempt was refused; an earlier one may have been written */
        return batch->maybe_written;
    }
}

static void handle_outcome(struct mqd_producer *producer, struct mqd_producer_batch *batch, int16_t error,
                           int64_t base_offset, int64_t log_append_time_ms)
{
    struct mqd_producer_partition *partition = batch->partition;
    partition->inflight--;
    producer->sent_count--;
    batch->maybe_written = still_maybe_written(batch, error);
    if (!error || error == MQD_KAFKA_DUPLICATE_SEQUENCE_NUMBER)
        partition->acknowledged_identity = batch->sequence_identity;
    mark_ready(producer, partition);
    if (batch->abandoned) {
        mqd_list_remove(&batch->node);
        mqd_producer_batch_free(producer, batch);
    } else if (error == MQD_KAFKA_DUPLICATE_SEQUENCE_NUMBER) {
        /* the batch is in the log, at an offset that the broker does not know */
        record_outcome(producer, batch, 0, -1, -1);
    } else {
        record_outcome(producer, batch, error, base_offset, log_append_time_ms);
    }
    if (error || partition->reordered)
        find_next(partition);
}

/* Parses a response of Produce v9..12 with one topic and one partition; the rest is skipped. */
static int parse_response(const uint8_t *bytes, uint32_t size_bytes, int32_t *index, int16_t *error,
                          int64_t *base_offset, int64_t *log_append_time_ms)
{
    struct mqd_byte_cursor cursor = mqd_cursor_over(bytes, size_bytes);
    int32_t correlation, count, throttle_ms, batch_index;
    int64_t log_start_offset;
    struct mqd_text text;
    if (mqd_take_i32(&cursor, "correlation id", &correlation) || mqd_skip_tags(&cursor, true) ||
        mqd_take_count(&cursor, true, "responses", 3, &count) || count != 1 ||
        mqd_take_text(&cursor, true, false, "topic name", &text) ||
        mqd_take_count(&cursor, true, "partition_responses", 4, &count) || count != 1 ||
        mqd_take_i32(&cursor, "index", index) || mqd_take_i16(&cursor, "error code", error) ||
        mqd_take_i64(&cursor, "base offset", base_offset) ||
        mqd_take_i64(&cursor, "log append time", log_append_time_ms) ||
        mqd_take_i64(&cursor, "log start offset", &log_start_offset) ||
        mqd_take_count(&cursor, true, "record errors", 6, &count))
        return -1;
    for (int32_t i = 0; i < count; i++)
        if (mqd_take_i32(&cursor, "batch index", &batch_index) ||
            mqd_take_text(&cursor, true, true, "record error", &text) || mqd_skip_tags(&cursor, true))
            return -1;
    return mqd_take_text(&cursor, true, true, "error message", &text) || mqd_skip_tags(&cursor, true) ||
                   mqd_skip_tags(&cursor, true) || mqd_take_i32(&cursor, "throttle time", &throttle_ms) ||
                   mqd_skip_tags(&cursor, true)
               ? -1
               : mqd_cursor_finished(&cursor, "Produce response");
}

int mqd_producer_on_response(struct mqd_producer *producer, const uint8_t *bytes, uint32_t size_bytes)
{
    uint32_t id = mqd_get_be32(bytes), entry = id & ((1u << MQD_PRODUCER_BATCH_BITS) - 1);
    if ((id >> MQD_PRODUCER_BATCH_BITS & 0x3ff) != (producer->serial & 0x3ff))
        return 0; /* for an earlier producer, which was closed */
    struct mqd_producer_batch *batch = &producer->batches[entry];
    if (id >= 2 * MQD_CLIENT_PRODUCER_CORRELATION_MIN || entry >= producer->used_count ||
        batch->state != MQD_BATCH_SENT)
        return -1;
    int32_t index;
    int16_t error;
    int64_t base_offset, log_append_time_ms;
    if (parse_response(bytes, size_bytes, &index, &error, &base_offset, &log_append_time_ms) ||
        index != batch->partition->index)
        return -1;
    handle_outcome(producer, batch, error, base_offset, log_append_time_ms);
    return 0;
}

void mqd_producer_on_consumed(struct mqd_producer *producer, uint32_t index)
{
    if (index < producer->used_count && producer->batches[index].state == MQD_BATCH_SENT)
        handle_outcome(producer, &producer->batches[index], 0, -1, -1);
}

/* ---- the caller's decisions ---- */

uint32_t mqd_producer_deliveries(struct mqd_producer *producer, struct mqd_delivery *out, uint32_t capacity)
{
    uint32_t count = 0;
    struct mqd_node *node;
    while (count < capacity && (node = mqd_list_pop(&producer->outcomes))) {
        struct mqd_producer_batch *batch = MQD_CONTAINER(node, struct mqd_producer_batch, outcome_node);
        out[count++] = (struct mqd_delivery){.batch = batch->number,
                                             .topic = batch->partition->topic->number,
                                             .partition = batch->partition->index,
                                             .base_offset = batch->base_offset,
                                             .timestamp_ms = batch->log_append_time_ms,
                                             .record_count = (uint32_t)batch->record_count,
                                             .error = batch->error};
        if (batch->state == MQD_BATCH_DONE) {
            batch->state = MQD_BATCH_FREE;
            mqd_list_append(&producer->free, &batch->node);
        }
    }
    return count;
}

int mqd_producer_retry(struct mqd_producer *producer, uint64_t number)
{
    struct mqd_producer_batch *batch = find_batch(producer, number);
    if (!batch || batch->state != MQD_BATCH_FAILED || mqd_list_linked(&batch->outcome_node))
        return mqd_error_set(MQD_E_INVALID, "batch %llu has not been reported as failed", (unsigned long long)number);
    batch->state = MQD_BATCH_QUEUED;
    mark_ready(producer, batch->partition);
    return 0;
}

int mqd_producer_drop(struct mqd_producer *producer, uint64_t number)
{
    struct mqd_producer_batch *batch = find_batch(producer, number);
    if (!batch || batch->state == MQD_BATCH_DONE || batch->abandoned)
        return mqd_error_set(MQD_E_INVALID, "batch %llu is neither open nor waiting for its outcome",
                             (unsigned long long)number);
    producer->outstanding_records -= (uint64_t)batch->record_count;
    if (batch->state == MQD_BATCH_SENT) {
        batch->abandoned = true;
        return 0;
    }
    if (batch->state == MQD_BATCH_OPEN) {
        batch->partition->open = NULL;
        mqd_list_remove(&batch->open_node);
        producer->open_count--;
    } else {
        mqd_list_remove(&batch->node);
        if (mqd_list_linked(&batch->outcome_node))
            mqd_list_remove(&batch->outcome_node);
        find_next(batch->partition);
        mark_ready(producer, batch->partition);
    }
    mqd_producer_batch_free(producer, batch);
    return 0;
}

int mqd_producer_set_identity(struct mqd_producer *producer, int64_t producer_id, int16_t producer_epoch)
{
    if (producer->sent_count)
        return mqd_error_set(MQD_E_INVALID,
                             "%u batches await their responses: change the identity when none is in flight",
                             producer->sent_count);
    for (uint32_t i = 0; i < producer->used_count && is_idempotent(producer) && !producer->transactional_id; i++) {
        const struct mqd_producer_batch *batch = &producer->batches[i];
        if ((batch->state == MQD_BATCH_QUEUED || batch->state == MQD_BATCH_FAILED) && batch->maybe_written)
            return mqd_error_set_static(MQD_E_INVALID,
                                        "a batch may have been written: change the identity once its outcome is known");
    }
    if (producer_id < -1 || (producer_id >= 0 && producer_epoch < 0))
        return mqd_error_set(MQD_E_INVALID, "producer id %lld with epoch %d is invalid", (long long)producer_id,
                             producer_epoch);
    producer->options.producer_id = producer_id;
    producer->options.producer_epoch = producer_epoch;
    if (is_idempotent(producer) && producer->options.inflight_max > 5)
        producer->options.inflight_max = 5;
    producer->identity++;
    for (int32_t i = 0; i < producer->topic_count; i++)
        for (int32_t j = 0; j < producer->topics[i]->partition_count; j++) {
            struct mqd_producer_partition *partition = producer->topics[i]->partitions[j];
            partition->next_sequence = partition->planned_sequence = 0;
        }
    return 0;
}

uint64_t mqd_producer_outstanding_records(const struct mqd_producer *producer)
{
    return producer->outstanding_records;
}

uint64_t mqd_producer_outstanding_bytes(const struct mqd_producer *producer)
{
    return producer->used_bytes;
}
