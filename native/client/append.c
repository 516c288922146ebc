/* Appends records to open batches, and decides when a batch is closed. Batches and their states:
 * client/producer.h.
 *
 *   record    length varint | attributes 0 | timestamp delta varlong | offset delta varint | key
 *             size varint, key | value size varint, value | header count varint, headers
 *
 * A full batch is closed, stamped and sent immediately, while its bytes are in the caches, and
 * responses that have arrived are handled. So one call can append more records than the memory
 * holds, as long as the worker keeps up.
 */
#include "client/producer.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/atomic.h"
#include "base/big_endian.h"
#include "base/error.h"
#include "base/varint_put.h"

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

/* ---- one record ---- */

struct record {
    const uint8_t *value, *key, *headers; /* headers NULL: none */
    int32_t value_bytes, key_bytes, header_bytes;
    int64_t timestamp_ms;
};

/* The size of the fields after the length. */
static inline uint64_t body_bytes(const struct record *record, uint64_t timestamp_delta, uint64_t offset_delta)
{
    return 1 + mqd_unsigned_varint_bytes(timestamp_delta) + mqd_unsigned_varint_bytes(offset_delta) +
           mqd_unsigned_varint_bytes(mqd_zigzag(record->key_bytes)) +
           (uint64_t)(record->key_bytes > 0 ? record->key_bytes : 0) +
           mqd_unsigned_varint_bytes(mqd_zigzag(record->value_bytes)) +
           (uint64_t)(record->value_bytes > 0 ? record->value_bytes : 0) +
           (uint64_t)(record->headers ? record->header_bytes : MQD_RECORD_HEADERS_NONE);
}

static inline uint8_t *put_record(uint8_t *at, const struct record *record, uint64_t body_size,
                                  uint64_t timestamp_delta, uint64_t offset_delta)
{
    at = mqd_put_unsigned_varint(at, mqd_zigzag((int64_t)body_size));
    *at++ = 0;
    at = mqd_put_unsigned_varint(at, timestamp_delta);
    at = mqd_put_unsigned_varint(at, offset_delta);
    at = mqd_put_unsigned_varint(at, mqd_zigzag(record->key_bytes));
    if (record->key_bytes > 0)
        at = (uint8_t *)memcpy(at, record->key, (size_t)record->key_bytes) + record->key_bytes;
    at = mqd_put_unsigned_varint(at, mqd_zigzag(record->value_bytes));
    if (record->value_bytes > 0)
        at = (uint8_t *)memcpy(at, record->value, (size_t)record->value_bytes) + record->value_bytes;
    if (record->headers)
        return (uint8_t *)memcpy(at, record->headers, (size_t)record->header_bytes) + record->header_bytes;
    *at++ = 0;
    return at;
}

/* ---- batches ---- */

/* Removes the batch from the linger queue, frees the unused end of its run, and queues it for
 * sending. */
void mqd_producer_batch_close(struct mqd_producer *producer, struct mqd_producer_batch *batch)
{
    uint64_t begin = producer->base + (uint64_t)batch->first_chunk * producer->memory.chunk_bytes;
    uint32_t needed = mqd_client_memory_chunks_needed(
        &producer->memory, batch->header_position - begin + batch->size_bytes + MQD_PRODUCER_TAIL_BYTES);
    batch->partition->open = NULL;
    mqd_list_remove(&batch->open_node);
    producer->open_count--;
    if (needed < batch->chunk_count) {
        mqd_client_memory_release(&producer->memory, batch->first_chunk + needed, batch->chunk_count - needed);
        producer->used_bytes -= (uint64_t)(batch->chunk_count - needed) * producer->memory.chunk_bytes;
        batch->chunk_count = needed;
    }
    mqd_producer_batch_queue(producer, batch);
    mqd_producer_partition_send(producer, batch->partition);
}

void mqd_producer_close_all(struct mqd_producer *producer, int64_t opened_before_us)
{
    MQD_LIST_EACH(node, next, &producer->open) {
        struct mqd_producer_batch *batch = MQD_CONTAINER(node, struct mqd_producer_batch, open_node);
        if (batch->opened_us > opened_before_us)
            return;
        mqd_producer_batch_close(producer, batch);
    }
}

/* Takes a free entry of `batches`; returns NULL if there is none. */
static struct mqd_producer_batch *take_entry(struct mqd_producer *producer)
{
    struct mqd_node *node = mqd_list_pop(&producer->free);
    if (node)
        return MQD_CONTAINER(node, struct mqd_producer_batch, node);
    if (producer->used_count == producer->batch_count)
        return NULL;
    struct mqd_producer_batch *batch = &producer->batches[producer->used_count++];
    mqd_list_init(&batch->node);
    mqd_list_init(&batch->outcome_node);
    mqd_list_init(&batch->open_node);
    return batch;
}

static void return_entry(struct mqd_producer *producer, struct mqd_producer_batch *batch)
{
    mqd_list_append(&producer->free, &batch->node);
}

/* Takes memory for a new batch: preferred_bytes, but at most half of its partition's share of
 * the memory, so that every active partition can have one batch open and one in flight. Fails if no
 * run of at least half of this size is free: otherwise many small batches would fill the memory,
 * whereas full batches are soon sent and acknowledged. Returns the first chunk and sets
 * *chunk_count, or returns UINT32_MAX. */
static uint32_t take_run(struct mqd_producer *producer, uint64_t needed_bytes, uint64_t preferred_bytes,
                         uint32_t *chunk_count)
{
    struct mqd_client_memory *memory = &producer->memory;
    uint64_t allowed = producer->used_bytes_max > producer->used_bytes
                           ? (producer->used_bytes_max - producer->used_bytes) / memory->chunk_bytes
                           : 0;
    uint64_t half_share = producer->used_bytes_max / memory->chunk_bytes / (2 * ((uint64_t)producer->active_count + 1));
    uint32_t needed = mqd_client_memory_chunks_needed(memory, needed_bytes),
             preferred = mqd_client_memory_chunks_needed(memory, preferred_bytes);
    if (preferred > half_share)
        preferred = (uint32_t)half_share;
    if (needed < (preferred + 1) / 2)
        needed = (preferred + 1) / 2;
    if (preferred > allowed)
        preferred = (uint32_t)allowed;
    return needed > allowed
               ? UINT32_MAX
               : mqd_client_memory_take(memory, preferred > needed ? preferred : needed, needed, chunk_count);
}

static uint64_t frame_bytes(const struct mqd_producer_topic *topic, uint64_t batch_bytes)
{
    return topic->prefix_bytes + MQD_PRODUCER_HEAD_BYTES_MAX + batch_bytes + MQD_PRODUCER_TAIL_BYTES;
}

/* Begins a batch with room for `needed_bytes` and, if there is memory, up to `preferred_bytes`.
 * Returns NULL if no memory is free now. */
static struct mqd_producer_batch *batch_begin(struct mqd_producer *producer, struct mqd_producer_partition *partition,
                                              uint64_t needed_bytes, uint64_t preferred_bytes)
{
    struct mqd_producer_topic *topic = partition->topic;
    struct mqd_producer_batch *batch = take_entry(producer);
    uint32_t chunk_count, first_chunk = UINT32_MAX;
    if (batch)
        first_chunk =
            take_run(producer, frame_bytes(topic, needed_bytes), frame_bytes(topic, preferred_bytes), &chunk_count);
    if (first_chunk == UINT32_MAX) {
        if (batch)
            return_entry(producer, batch);
        return NULL;
    }
    uint64_t limit = (uint64_t)chunk_count * producer->memory.chunk_bytes - frame_bytes(topic, 0),
             wanted_bytes = needed_bytes > preferred_bytes ? needed_bytes : preferred_bytes;
    /* not negative: see can_ever_fit */
    uint64_t request_limit = producer->client->request_bytes_max - frame_bytes(topic, 0);
    wanted_bytes = wanted_bytes < request_limit ? wanted_bytes : request_limit;
    producer->used_bytes += (uint64_t)chunk_count * producer->memory.chunk_bytes;
    producer->active_count += partition->batch_count++ == 0;
    producer->live_count++;
    batch->partition = partition;
    batch->number = ++producer->batch_serial << MQD_PRODUCER_BATCH_BITS | (uint64_t)(batch - producer->batches);
    batch->first_chunk = first_chunk;
    batch->chunk_count = chunk_count;
    batch->header_position = producer->base + (uint64_t)first_chunk * producer->memory.chunk_bytes +
                             topic->prefix_bytes + MQD_PRODUCER_HEAD_BYTES_MAX;
    batch->size_bytes = MQD_BATCH_HEADER_BYTES;
    batch->limit_bytes = (uint32_t)(limit < wanted_bytes ? limit : wanted_bytes);
    batch->record_count = 0;
    batch->attributes = producer->options.transactional_id ? 1 << 4 : 0;
    batch->abandoned = batch->maybe_written = false;
    batch->stamped_identity = batch->sequence_identity = 0;
    return batch;
}

static void batch_open(struct mqd_producer *producer, struct mqd_producer_batch *batch, int64_t timestamp_ms)
{
    batch->state = MQD_BATCH_OPEN;
    batch->base_timestamp_ms = batch->max_timestamp_ms = timestamp_ms;
    batch->opened_us = now_us();
    batch->partition->open = batch;
    mqd_list_append(&producer->open, &batch->open_node);
    producer->open_count++;
}

/* Called when no memory is free for a new batch. Handles the responses that have arrived. Open
 * batches are closed only when nothing else holds memory: otherwise they would be closed half empty
 * although the next response would free memory. Returns true if memory was freed: then try
 * again. */
static bool make_room(struct mqd_producer *producer)
{
    uint64_t before = producer->used_bytes;
    mqd_client_flush(producer->client);
    mqd_client_take_replies(producer->client); /* an error stays recorded in the attachment */
    mqd_producer_pump(producer);
    if (producer->used_bytes == before && producer->open_count == producer->live_count)
        mqd_producer_close_all(producer, INT64_MAX);
    mqd_client_flush(producer->client);
    return producer->used_bytes < before;
}

static void send_full_batch(struct mqd_producer *producer, struct mqd_producer_batch *batch)
{
    mqd_producer_batch_close(producer, batch);
    mqd_client_flush(producer->client);
    mqd_client_take_replies(producer->client);
    mqd_producer_pump(producer);
}

/* ---- the partition of a record ---- */

/* Records without a key that may go to any partition stay on one until its batch is closed
 * (KIP-480), so that batches fill. */
static int32_t choose_partition(struct mqd_producer *producer, struct mqd_producer_topic *topic, const uint8_t *key,
                                int32_t key_bytes)
{
    bool may_be_any =
        topic->partitioner == MQD_PARTITIONER_RANDOM ||
        (topic->partitioner == MQD_PARTITIONER_CONSISTENT_RANDOM && key_bytes <= 0) ||
        ((topic->partitioner == MQD_PARTITIONER_MURMUR2_RANDOM || topic->partitioner == MQD_PARTITIONER_FNV1A_RANDOM) &&
         key_bytes < 0);
    if (!may_be_any || topic->partition_count == 1)
        return mqd_partition_for(topic->partitioner, key, key_bytes, topic->partition_count, &producer->random_state);
    if (topic->sticky_partition < 0 || !topic->partitions[topic->sticky_partition]->open)
        topic->sticky_partition =
            mqd_partition_for(MQD_PARTITIONER_RANDOM, NULL, -1, topic->partition_count, &producer->random_state);
    return topic->sticky_partition;
}

enum put_result { PUT_OK, PUT_FULL, PUT_INVALID };

/* Returns false, with the error set, if a batch of this size never fits, however much memory
 * becomes free. */
static bool can_ever_fit(const struct mqd_producer *producer, const struct mqd_producer_topic *topic,
                         uint64_t batch_bytes)
{
    if (frame_bytes(topic, batch_bytes) > producer->client->request_bytes_max) {
        mqd_error_set(MQD_E_INVALID,
                      "Local: a batch of %llu bytes is too large for a request to this broker: "
                      "socket.request.max.bytes=%u",
                      (unsigned long long)batch_bytes, producer->client->request_bytes_max);
        return false;
    }
    uint64_t needed = (uint64_t)mqd_client_memory_chunks_needed(&producer->memory, frame_bytes(topic, batch_bytes)) *
                      producer->memory.chunk_bytes;
    if (needed <= producer->used_bytes_max && batch_bytes <= INT32_MAX)
        return true;
    mqd_error_set(MQD_E_INVALID, "Local: a batch of %llu bytes is larger than the producer's memory of %llu",
                  (unsigned long long)batch_bytes, (unsigned long long)producer->used_bytes_max);
    return false;
}

static inline bool has_room(const struct mqd_producer *producer, const struct mqd_producer_batch *batch,
                            const struct record *record, uint64_t *body_size)
{
    *body_size = body_bytes(record, mqd_zigzag(record->timestamp_ms - batch->base_timestamp_ms),
                            mqd_zigzag(batch->record_count));
    return batch->size_bytes + mqd_unsigned_varint_bytes(mqd_zigzag((int64_t)*body_size)) + *body_size <=
               batch->limit_bytes &&
           (uint32_t)batch->record_count < producer->options.batch_records_max;
}

/* Finds an open batch with room for the record, or begins one. Also computes the record's size. */
static enum put_result find_or_begin_batch(struct mqd_producer *producer, struct mqd_producer_topic *topic,
                                           const struct record *record, int32_t requested_partition,
                                           struct mqd_producer_batch **out, uint64_t *body_size)
{
    for (;;) {
        int32_t index = requested_partition != -1 ? requested_partition
                                                  : choose_partition(producer, topic, record->key, record->key_bytes);
        if (index < 0 || index >= topic->partition_count) {
            mqd_error_set(MQD_E_INVALID, "there is no partition %d: \"%s\" has %d partitions", index, topic->name,
                          topic->partition_count);
            return PUT_INVALID;
        }
        struct mqd_producer_batch *batch = topic->partitions[index]->open;
        if (batch) {
            if (has_room(producer, batch, record, body_size)) {
                *out = batch;
                return PUT_OK;
            }
            send_full_batch(producer, batch);
            continue;
        }
        *body_size = body_bytes(record, 0, 0);
        uint64_t needed =
            MQD_BATCH_HEADER_BYTES + mqd_unsigned_varint_bytes(mqd_zigzag((int64_t)*body_size)) + *body_size;
        if (!can_ever_fit(producer, topic, needed))
            return PUT_INVALID;
        batch = batch_begin(producer, topic->partitions[index], needed, producer->options.batch_bytes);
        if (batch) {
            batch_open(producer, batch, record->timestamp_ms);
            *out = batch;
            return PUT_OK;
        }
        if (!make_room(producer))
            return PUT_FULL;
    }
}

static inline void append_record(struct mqd_producer *producer, struct mqd_producer_batch *batch,
                                 const struct record *record, uint64_t body_size)
{
    uint8_t *begin = mqd_producer_data(producer) + batch->header_position + batch->size_bytes;
    uint8_t *end = put_record(begin, record, body_size, mqd_zigzag(record->timestamp_ms - batch->base_timestamp_ms),
                              mqd_zigzag(batch->record_count));
    batch->size_bytes += (uint32_t)(end - begin);
    batch->record_count++;
    if (record->timestamp_ms > batch->max_timestamp_ms)
        batch->max_timestamp_ms = record->timestamp_ms;
    producer->outstanding_records++;
}

/* ---- columns ---- */

static int check_usable(const struct mqd_producer *producer, int32_t topic)
{
    if (!producer->client)
        return mqd_error_set_static(
            EPIPE, "the producer's attachment is closed: attach again and move it (mqd_producer_move)");
    if (mqd_client_check(producer->client))
        return -1;
    if (topic < 0 || topic >= producer->topic_count)
        return mqd_error_set(MQD_E_INVALID, "topic number %d is invalid: mqd_producer_topic has assigned %d", topic,
                             producer->topic_count);
    return 0;
}

static int invalid_size(const char *what, int32_t size_bytes)
{
    return mqd_error_set(MQD_E_INVALID, "invalid size of %s: %d bytes", what, size_bytes);
}

/* Sets the sizes and the timestamp of `record`, the i-th of the columns. Its pointers already point
 * just past the previous record's bytes. */
static inline int load_record(const struct mqd_record_columns *columns, uint32_t i, struct record *record)
{
    record->value_bytes = columns->value_bytes ? columns->value_bytes[i] : columns->fixed_value_bytes;
    record->key_bytes = columns->key_bytes ? columns->key_bytes[i] : -1;
    record->timestamp_ms = columns->timestamps_ms ? columns->timestamps_ms[i] : columns->timestamp_ms;
    if (columns->header_bytes) {
        record->header_bytes = columns->header_bytes[i];
        if (__builtin_expect(record->header_bytes < 1, 0))
            return invalid_size("a header section", record->header_bytes);
    }
    if (__builtin_expect(record->value_bytes < -1, 0))
        return invalid_size("a value", record->value_bytes);
    return __builtin_expect(record->key_bytes < -1, 0) ? invalid_size("a key", record->key_bytes) : 0;
}

static inline void advance_record(const struct mqd_record_columns *columns, struct record *record)
{
    if (record->value_bytes > 0)
        record->value += record->value_bytes;
    if (record->key_bytes > 0)
        record->key += record->key_bytes;
    if (columns->header_bytes)
        record->headers += record->header_bytes;
}

/* Appends records with values of one size and one timestamp, without keys and headers. Only their
 * offset deltas differ, so the bytes before a value are built once for all records whose delta has
 * the same length. Returns how many were appended: as many as the open batch has room for. */
static uint32_t append_uniform(struct mqd_producer *producer, struct mqd_producer_batch *batch,
                               const struct record *first, uint32_t count)
{
    uint64_t timestamp_delta = mqd_zigzag(first->timestamp_ms - batch->base_timestamp_ms),
             offset_delta = mqd_zigzag(batch->record_count), body_size;
    uint32_t delta_bytes = mqd_unsigned_varint_bytes(offset_delta),
             records_left = producer->options.batch_records_max - (uint32_t)batch->record_count,
             n = count < records_left ? count : records_left;
    /* the number of records whose deltas have the same length */
    uint64_t same_length_count = (1ull << (7 * delta_bytes - 1)) - (uint64_t)batch->record_count;
    uint8_t head[32] = {0}, *at = mqd_producer_data(producer) + batch->header_position + batch->size_bytes;
    body_size = body_bytes(first, timestamp_delta, offset_delta);
    uint64_t size_bytes = mqd_unsigned_varint_bytes(mqd_zigzag((int64_t)body_size)) + body_size,
             fitting_count = (batch->limit_bytes - batch->size_bytes) / size_bytes;
    n = n < same_length_count ? n : (uint32_t)same_length_count;
    n = n < fitting_count ? n : (uint32_t)fitting_count;
    uint8_t *delta =
        mqd_put_unsigned_varint(mqd_put_unsigned_varint(head, mqd_zigzag((int64_t)body_size)) + 1, timestamp_delta);
    size_t value_bytes = (size_t)first->value_bytes, delta_at = (size_t)(delta - head);
    delta[delta_bytes] = 1; /* no key */
    size_t head_bytes =
        (size_t)(mqd_put_unsigned_varint(delta + delta_bytes + 1, mqd_zigzag(first->value_bytes)) - head);
    const uint8_t *value = first->value;
    bool copies_16_bytes = head_bytes <= 16 && head_bytes + value_bytes >= 16;
    for (uint32_t i = 0; i < n; i++, value += value_bytes, offset_delta += 2) {
        if (copies_16_bytes)
            memcpy(at, head, 16); /* the value overwrites the excess bytes */
        else
            memcpy(at, head, head_bytes);
        mqd_put_unsigned_varint_sized(at + delta_at, offset_delta, delta_bytes);
        at = (uint8_t *)memcpy(at + head_bytes, value, value_bytes) + value_bytes;
        *at++ = 0;
    }
    batch->size_bytes += (uint32_t)(n * size_bytes);
    batch->record_count += (int32_t)n;
    if (first->timestamp_ms > batch->max_timestamp_ms)
        batch->max_timestamp_ms = first->timestamp_ms;
    producer->outstanding_records += n;
    return n;
}

int64_t mqd_producer_append(struct mqd_producer *producer, int32_t topic_number,
                            const struct mqd_record_columns *columns, uint64_t *batch_numbers)
{
    if (check_usable(producer, topic_number))
        return -1;
    struct mqd_producer_topic *topic = producer->topics[topic_number];
    struct record record = {
        .value = columns->values, .key = columns->keys, .headers = columns->header_bytes ? columns->headers : NULL};
    bool has_one_partition =
        !columns->partitions && columns->partition >= 0 && columns->partition < topic->partition_count;
    bool is_uniform = !columns->partitions && !columns->value_bytes && !columns->key_bytes && !columns->header_bytes &&
                      !columns->timestamps_ms && columns->fixed_value_bytes > 0;
    enum put_result result = PUT_OK;
    uint32_t i = 0;
    while (i < columns->count) {
        struct mqd_producer_batch *batch = has_one_partition ? topic->partitions[columns->partition]->open : NULL;
        uint64_t body_size;
        uint32_t n = 1;
        result = load_record(columns, i, &record) ? PUT_INVALID : PUT_OK;
        if (result == PUT_OK && !(batch && has_room(producer, batch, &record, &body_size)))
            result = find_or_begin_batch(producer, topic, &record,
                                         columns->partitions ? columns->partitions[i] : columns->partition, &batch,
                                         &body_size);
        if (result != PUT_OK)
            break;
        if (is_uniform)
            n = append_uniform(producer, batch, &record, columns->count - i);
        else
            append_record(producer, batch, &record, body_size);
        for (uint32_t j = 0; batch_numbers && j < n; j++)
            batch_numbers[i + j] = batch->number;
        if (is_uniform)
            record.value += (uint64_t)n * (uint32_t)record.value_bytes;
        else
            advance_record(columns, &record);
        i += n;
    }
    mqd_client_flush(producer->client);
    return result == PUT_INVALID && i == 0 ? -1 : (int64_t)i;
}

int64_t mqd_producer_put(struct mqd_producer *producer, int32_t topic_number, int32_t partition, const uint8_t *value,
                         int32_t value_bytes, const uint8_t *key, int32_t key_bytes, const uint8_t *headers,
                         int32_t header_bytes, int64_t timestamp_ms)
{
    if (check_usable(producer, topic_number))
        return -1;
    if (value_bytes < -1 || key_bytes < -1 || header_bytes < 0)
        return invalid_size("a value, key or header section", value_bytes < -1 ? value_bytes
                                                              : key_bytes < -1 ? key_bytes
                                                                               : header_bytes);
    struct record record = {.value = value,
                            .key = key,
                            .headers = header_bytes ? headers : NULL,
                            .value_bytes = value_bytes,
                            .key_bytes = key_bytes,
                            .header_bytes = header_bytes,
                            .timestamp_ms = timestamp_ms};
    struct mqd_producer_batch *batch;
    uint64_t body_size;
    switch (find_or_begin_batch(producer, producer->topics[topic_number], &record, partition, &batch, &body_size)) {
    case PUT_OK:
        append_record(producer, batch, &record, body_size);
        return (int64_t)batch->number;
    case PUT_FULL:
        return 0;
    default:
        return -1;
    }
}

/* ---- encoded batches ---- */

static int check_batch(const uint8_t *bytes, uint32_t size_bytes, struct mqd_batch *header)
{
    if (size_bytes < MQD_BATCH_HEADER_BYTES || mqd_batch_decode(bytes, size_bytes, header))
        return mqd_error_set(MQD_E_INVALID, "the %u bytes are not a record batch with magic 2", size_bytes);
    if ((uint32_t)header->size_bytes != size_bytes || header->record_count < 1 ||
        header->last_offset_delta != header->record_count - 1)
        return mqd_error_set(MQD_E_INVALID,
                             "the batch has %u bytes, but its header states %d bytes and %d records, the last with "
                             "offset delta %d",
                             size_bytes, header->size_bytes, header->record_count, header->last_offset_delta);
    return 0;
}

int mqd_producer_append_batch(struct mqd_producer *producer, int32_t topic_number, int32_t index, const uint8_t *bytes,
                              uint32_t size_bytes, uint64_t *number)
{
    struct mqd_batch header;
    if (check_usable(producer, topic_number) || check_batch(bytes, size_bytes, &header))
        return -1;
    struct mqd_producer_topic *topic = producer->topics[topic_number];
    if (index < 0 || index >= topic->partition_count)
        return mqd_error_set(MQD_E_INVALID, "there is no partition %d: \"%s\" has %d partitions", index, topic->name,
                             topic->partition_count);
    if (!can_ever_fit(producer, topic, size_bytes))
        return -1;
    struct mqd_producer_partition *partition = topic->partitions[index];
    struct mqd_producer_batch *batch = batch_begin(producer, partition, size_bytes, size_bytes);
    if (!batch && make_room(producer))
        batch = batch_begin(producer, partition, size_bytes, size_bytes);
    if (!batch)
        return mqd_error_set_static(MQD_E_FULL, "the producer's memory is full: wait, then retry");
    if (partition->open)
        mqd_producer_batch_close(producer, partition->open);
    memcpy(mqd_producer_data(producer) + batch->header_position, bytes, size_bytes);
    batch->size_bytes = size_bytes;
    batch->record_count = header.record_count;
    batch->attributes |= (uint16_t)header.attributes & 7; /* compression */
    batch->base_timestamp_ms = header.base_timestamp_ms;
    batch->max_timestamp_ms = header.max_timestamp_ms;
    producer->outstanding_records += (uint64_t)header.record_count;
    mqd_producer_batch_queue(producer, batch);
    mqd_producer_partition_send(producer, partition);
    mqd_client_flush(producer->client);
    if (number)
        *number = batch->number;
    return 0;
}

int64_t mqd_records_encode(const struct mqd_record_columns *columns, uint32_t records_max, uint8_t *out,
                           uint64_t out_bytes, uint32_t *taken)
{
    struct record record = {
        .value = columns->values, .key = columns->keys, .headers = columns->header_bytes ? columns->headers : NULL};
    int64_t base_timestamp_ms =
                columns->timestamps_ms && columns->count ? columns->timestamps_ms[0] : columns->timestamp_ms,
            max_timestamp_ms = base_timestamp_ms;
    uint8_t *at = out + MQD_BATCH_HEADER_BYTES, *end = out + (out_bytes < INT32_MAX ? out_bytes : INT32_MAX);
    uint32_t i = 0, limit = records_max && records_max < columns->count ? records_max : columns->count;
    if (out_bytes < MQD_BATCH_HEADER_BYTES)
        return mqd_error_set(MQD_E_INVALID, "%llu bytes cannot hold a batch's header", (unsigned long long)out_bytes);
    for (; i < limit; i++) {
        if (load_record(columns, i, &record))
            return -1;
        uint64_t timestamp_delta = mqd_zigzag(record.timestamp_ms - base_timestamp_ms), offset_delta = mqd_zigzag(i);
        uint64_t body_size = body_bytes(&record, timestamp_delta, offset_delta);
        if ((uint64_t)(end - at) < mqd_unsigned_varint_bytes(mqd_zigzag((int64_t)body_size)) + body_size)
            break;
        at = put_record(at, &record, body_size, timestamp_delta, offset_delta);
        if (record.timestamp_ms > max_timestamp_ms)
            max_timestamp_ms = record.timestamp_ms;
        advance_record(columns, &record);
    }
    *taken = i;
    if (i == 0)
        return 0;
    memset(out, 0, MQD_BATCH_HEADER_BYTES);
    mqd_put_be32(out + 8, (uint32_t)(at - out) - 12); /* batch length */
    mqd_put_be32(out + 12, UINT32_MAX);               /* leader epoch: set by the broker */
    out[16] = 2;                                      /* magic */
    mqd_put_be32(out + 23, i - 1);                    /* last offset delta */
    mqd_put_be64(out + 27, (uint64_t)base_timestamp_ms);
    mqd_put_be64(out + 35, (uint64_t)max_timestamp_ms);
    memset(out + 43, 0xff, 14); /* no producer id, epoch and sequence */
    mqd_put_be32(out + 57, i);
    mqd_put_be32(out + 17, mqd_crc32c(0, out + 21, (size_t)(at - out) - 21));
    return at - out;
}
