/* Opening and closing a producer, its topics, and moving it to another attachment. */
#include "client/producer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/atomic.h"
#include "base/big_endian.h"
#include "base/error.h"
#include "base/varint_put.h"

enum { API_PRODUCE = 0, VERSION_MIN = 9, VERSION_MAX = 12, IDEMPOTENT_INFLIGHT_MAX = 5 };
#define BATCH_RECORDS_DEFAULT 10000u
#define BATCH_BYTES_MIN 128u
#define PARTITION_COUNT_MAX 1000000

static int check_options(const struct mqd_producer_options *options)
{
    if (options->acks < -1 || options->acks > 1)
        return mqd_error_set(MQD_E_INVALID, "acks is %d; it must be -1, 0 or 1", options->acks);
    if (options->produce_version < VERSION_MIN || options->produce_version > VERSION_MAX)
        return mqd_error_set(MQD_E_INVALID, "Produce version %d; it must be %d to %d", options->produce_version,
                             VERSION_MIN, VERSION_MAX);
    if (options->producer_id < -1 || (options->producer_id >= 0 && options->producer_epoch < 0))
        return mqd_error_set(MQD_E_INVALID, "producer id %lld with epoch %d is invalid",
                             (long long)options->producer_id, options->producer_epoch);
    if (options->producer_id >= 0 && options->acks != -1)
        return mqd_error_set(MQD_E_INVALID, "an idempotent producer must have acks=-1, not %d", options->acks);
    if (options->batch_bytes < BATCH_BYTES_MIN || options->batch_bytes > INT32_MAX)
        return mqd_error_set(MQD_E_INVALID, "batch_bytes is %u; it must be %u to 2147483647", options->batch_bytes,
                             BATCH_BYTES_MIN);
    if (options->inflight_max < 1 || options->linger_us < 0)
        return mqd_error_set(MQD_E_INVALID, "inflight_max must be at least 1 and linger_us at least 0, not %u and %lld",
                             options->inflight_max, (long long)options->linger_us);
    return 0;
}

/* Makes the upper part of the attachment's data the producer's memory. */
static int take_memory(struct mqd_producer *producer, struct mqd_client *client)
{
    if (client->producer)
        return mqd_error_set(MQD_E_INVALID, "the attachment already has a producer: close it first");
    if (client->head != client->tail) { /* unread submissions may occupy memory that new batches would use */
        mqd_client_flush(client);
        if (mqd_client_take_replies(client))
            return -1;
        for (uint64_t at = client->head; at != client->tail; at++)
            if (client->submitted[at & (client->submission_count - 1)].kind != MQD_SUBMITTED_REQUEST)
                return mqd_error_set(MQD_E_FULL,
                                     "batches of the previous producer are still being read: wait, then retry");
    }
    if (mqd_client_memory_open(&producer->memory, client->data_bytes - client->request_bytes))
        return -1;
    if (producer->memory.chunk_count == 0) {
        mqd_client_memory_close(&producer->memory);
        return mqd_error_set(
            MQD_E_INVALID, "the attachment's memory has no room for batches: raise data_bytes, or lower request_bytes");
    }
    producer->base = client->request_bytes;
    producer->client = client;
    producer->serial = ++client->producer_serial;
    uint64_t all = (uint64_t)producer->memory.chunk_count * producer->memory.chunk_bytes,
             configured = producer->options.buffer_bytes_max;
    producer->used_bytes_max = configured && configured < all ? configured : all;
    client->producer = producer;
    return 0;
}

static uint64_t seed(void)
{
    uint64_t value;
    if (getrandom(&value, sizeof value, GRND_NONBLOCK) == (ssize_t)sizeof value)
        return value;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec;
}

struct mqd_producer *mqd_producer_open(struct mqd_client *client, const struct mqd_producer_options *options)
{
    if (mqd_client_check(client) || check_options(options))
        return NULL;
    struct mqd_producer *producer = calloc(1, sizeof *producer);
    if (!producer || (options->transactional_id && !(producer->transactional_id = strdup(options->transactional_id)))) {
        free(producer);
        mqd_error_set_static(ENOMEM, "out of memory for a producer");
        return NULL;
    }
    producer->options = *options;
    producer->options.transactional_id = producer->transactional_id;
    producer->options.batch_records_max =
        options->batch_records_max ? options->batch_records_max : BATCH_RECORDS_DEFAULT;
    if (options->producer_id >= 0 && options->inflight_max > IDEMPOTENT_INFLIGHT_MAX)
        producer->options.inflight_max = IDEMPOTENT_INFLIGHT_MAX;
    producer->identity = 1;
    producer->random_state = seed();
    mqd_list_init(&producer->free);
    mqd_list_init(&producer->open);
    mqd_list_init(&producer->ready);
    mqd_list_init(&producer->outcomes);
    if (take_memory(producer, client)) {
        free(producer->transactional_id);
        free(producer);
        return NULL;
    }
    producer->batch_count = producer->memory.chunk_count;
    /* untouched entries do not occupy memory yet */
    producer->batches = calloc(producer->batch_count, sizeof *producer->batches);
    if (producer->batches)
        return producer;
    mqd_producer_close(producer);
    mqd_error_set_static(ENOMEM, "out of memory for a producer's batches");
    return NULL;
}

void mqd_producer_detach(struct mqd_producer *producer)
{
    producer->client->producer = NULL;
    producer->client = NULL;
}

void mqd_producer_close(struct mqd_producer *producer)
{
    if (!producer)
        return;
    if (producer->client)
        mqd_producer_detach(producer);
    mqd_client_memory_close(&producer->memory);
    for (int32_t i = 0; i < producer->topic_count; i++) {
        for (int32_t j = 0; j < producer->topics[i]->partition_count; j++)
            free(producer->topics[i]->partitions[j]);
        free(producer->topics[i]->partitions);
        free(producer->topics[i]->prefix);
        free(producer->topics[i]);
    }
    free(producer->topics);
    free(producer->batches);
    free(producer->transactional_id);
    free(producer);
}

uint64_t mqd_client_available_bytes(const struct mqd_client *client)
{
    const struct mqd_producer *producer = client->producer;
    if (!producer)
        return client->request_bytes - (client->request_tail - client->request_head);
    uint64_t free_bytes = (uint64_t)producer->memory.free_count * producer->memory.chunk_bytes,
             allowed_bytes = producer->used_bytes < producer->used_bytes_max
                                 ? producer->used_bytes_max - producer->used_bytes
                                 : 0; /* after a move to larger chunks */
    return free_bytes < allowed_bytes ? free_bytes : allowed_bytes;
}

/* ---- topics ---- */

static uint8_t *put_compact(uint8_t *at, const char *text, size_t size)
{
    at = mqd_put_unsigned_varint(at, size + 1);
    return (uint8_t *)memcpy(at, text, size) + size;
}

/* Builds the request up to the partition's index; the correlation id is set for each batch. */
static int make_prefix(const struct mqd_producer *producer, struct mqd_producer_topic *topic)
{
    const struct mqd_producer_options *options = &producer->options;
    size_t client_id_bytes = strlen(producer->client->client_id),
           id_bytes = options->transactional_id ? strlen(options->transactional_id) : 0;
    topic->prefix = malloc(64 + client_id_bytes + id_bytes + (size_t)topic->name_bytes);
    if (!topic->prefix)
        return mqd_error_set_static(ENOMEM, "out of memory for a topic");
    uint8_t *at = mqd_put_be16(topic->prefix, API_PRODUCE);
    at = mqd_put_be16(at, (uint16_t)options->produce_version);
    at = mqd_put_be32(at, 0);
    at = mqd_put_be16(at, (uint16_t)client_id_bytes);
    at = (uint8_t *)memcpy(at, producer->client->client_id, client_id_bytes) + client_id_bytes;
    *at++ = 0; /* tagged fields of the header */
    if (options->transactional_id)
        at = put_compact(at, options->transactional_id, id_bytes);
    else
        *at++ = 0;
    at = mqd_put_be16(at, (uint16_t)options->acks);
    at = mqd_put_be32(at, (uint32_t)options->request_timeout_ms);
    *at++ = 2; /* one topic */
    at = put_compact(at, topic->name, (size_t)topic->name_bytes);
    *at++ = 2; /* one partition */
    topic->prefix_bytes = (uint32_t)(at - topic->prefix);
    return 0;
}

static int grow_partitions(struct mqd_producer_topic *topic, int32_t partition_count)
{
    if (partition_count <= topic->partition_count)
        return 0;
    struct mqd_producer_partition **partitions =
        realloc(topic->partitions, (size_t)partition_count * sizeof *partitions);
    if (!partitions)
        return mqd_error_set_static(ENOMEM, "out of memory for a topic's partitions");
    topic->partitions = partitions;
    for (int32_t i = topic->partition_count; i < partition_count; i++) {
        struct mqd_producer_partition *partition = calloc(1, sizeof *partition);
        if (!partition)
            return mqd_error_set_static(ENOMEM, "out of memory for a partition");
        partition->topic = topic;
        partition->index = i;
        mqd_list_init(&partition->closed);
        mqd_list_init(&partition->ready);
        partitions[i] = partition;
        topic->partition_count = i + 1;
    }
    return 0;
}

static struct mqd_producer_topic *topic_new(struct mqd_producer *producer, const char *name, size_t name_bytes)
{
    if (producer->topic_count == producer->topic_capacity) {
        int32_t capacity = producer->topic_capacity ? 2 * producer->topic_capacity : 8;
        struct mqd_producer_topic **topics = realloc(producer->topics, (size_t)capacity * sizeof *topics);
        if (!topics) {
            mqd_error_set_static(ENOMEM, "out of memory for a topic");
            return NULL;
        }
        producer->topics = topics;
        producer->topic_capacity = capacity;
    }
    struct mqd_producer_topic *topic = calloc(1, sizeof *topic);
    if (!topic) {
        mqd_error_set_static(ENOMEM, "out of memory for a topic");
        return NULL;
    }
    topic->number = producer->topic_count;
    topic->sticky_partition = -1;
    topic->name_bytes = (int16_t)name_bytes;
    memcpy(topic->name, name, name_bytes);
    if (make_prefix(producer, topic)) {
        free(topic);
        return NULL;
    }
    producer->topics[producer->topic_count++] = topic;
    return topic;
}

int32_t mqd_producer_topic(struct mqd_producer *producer, const char *name, int32_t partition_count,
                           uint32_t partitioner)
{
    size_t name_bytes = strlen(name);
    if (!producer->client)
        return mqd_error_set_static(
            EPIPE, "the producer's attachment is closed: attach again and move it (mqd_producer_move)");
    if (name_bytes == 0 || name_bytes > MQD_TOPIC_NAME_BYTES_MAX)
        return mqd_error_set(MQD_E_INVALID, "a topic's name has 1 to %d bytes, not %zu", MQD_TOPIC_NAME_BYTES_MAX,
                             name_bytes);
    if (partition_count < 1 || partition_count > PARTITION_COUNT_MAX || partitioner > MQD_PARTITIONER_FNV1A_RANDOM)
        return mqd_error_set(MQD_E_INVALID, "topic \"%s\": partition count %d or partitioner %u is out of range", name,
                             partition_count, partitioner);
    struct mqd_producer_topic *topic = NULL;
    for (int32_t i = 0; i < producer->topic_count && !topic; i++)
        if ((size_t)producer->topics[i]->name_bytes == name_bytes &&
            memcmp(producer->topics[i]->name, name, name_bytes) == 0)
            topic = producer->topics[i];
    if (!topic && !(topic = topic_new(producer, name, name_bytes)))
        return -1;
    topic->partitioner = partitioner;
    return grow_partitions(topic, partition_count) ? -1 : topic->number;
}

/* ---- moving to another attachment ---- */

struct move {
    struct mqd_client_memory memory; /* of the new attachment */
    uint32_t *first_chunks;          /* by entry of `batches` */
    uint64_t used_bytes;
};

static bool has_bytes(const struct mqd_producer_batch *batch)
{
    return batch->chunk_count &&
           (batch->state == MQD_BATCH_OPEN || batch->state == MQD_BATCH_QUEUED || batch->state == MQD_BATCH_SENT ||
            batch->state == MQD_BATCH_FAILED) &&
           !batch->abandoned;
}

static uint32_t chunks_needed(const struct mqd_producer *producer, const struct mqd_producer_batch *batch,
                              const struct mqd_client_memory *new_memory)
{
    return mqd_client_memory_chunks_needed(new_memory, (uint64_t)batch->chunk_count * producer->memory.chunk_bytes);
}

/* Reserves a run in the new attachment for every batch; changes nothing else. In an empty area
 * first fit leaves no gaps. */
static int plan_move(const struct mqd_producer *producer, const struct mqd_client *to, struct move *move)
{
    move->used_bytes = 0;
    move->first_chunks = calloc(producer->batch_count, sizeof *move->first_chunks);
    if (!move->first_chunks)
        return mqd_error_set_static(ENOMEM, "no memory to move a producer");
    if (mqd_client_memory_open(&move->memory, to->data_bytes - to->request_bytes))
        return -1;
    for (uint32_t i = 0; i < producer->used_count; i++) {
        const struct mqd_producer_batch *batch = &producer->batches[i];
        if (!has_bytes(batch))
            continue;
        uint32_t needed = chunks_needed(producer, batch, &move->memory), got;
        move->first_chunks[i] = mqd_client_memory_take(&move->memory, needed, needed, &got);
        if (move->first_chunks[i] == UINT32_MAX)
            return mqd_error_set(MQD_E_FULL, "the new attachment has %llu bytes for batches, but %llu must be moved",
                                 (unsigned long long)(to->data_bytes - to->request_bytes),
                                 (unsigned long long)producer->used_bytes);
        move->used_bytes += (uint64_t)needed * move->memory.chunk_bytes;
    }
    return 0;
}

static void move_batch(struct mqd_producer *producer, struct mqd_producer_batch *batch, struct mqd_client *to,
                       const struct move *move, uint32_t first_chunk)
{
    uint64_t offset_in_run =
        batch->header_position - (producer->base + (uint64_t)batch->first_chunk * producer->memory.chunk_bytes);
    uint64_t header_position = to->request_bytes + (uint64_t)first_chunk * move->memory.chunk_bytes + offset_in_run;
    memcpy(to->data + header_position, producer->client->data + batch->header_position, batch->size_bytes);
    batch->chunk_count = chunks_needed(producer, batch, &move->memory);
    batch->first_chunk = first_chunk;
    batch->header_position = header_position;
}

/* Queues the SENT batches again; frees the abandoned ones, whose responses will never come. */
static void requeue_sent(struct mqd_producer *producer)
{
    for (uint32_t i = 0; i < producer->used_count; i++) {
        struct mqd_producer_batch *batch = &producer->batches[i];
        if (batch->state != MQD_BATCH_SENT)
            continue;
        batch->partition->inflight--;
        producer->sent_count--;
        batch->state = MQD_BATCH_QUEUED;
        batch->maybe_written = true;
        if (batch->abandoned) {
            mqd_list_remove(&batch->node);
            batch->chunk_count = 0; /* it was not moved (see has_bytes) and has no chunks to free */
            mqd_producer_batch_free(producer, batch);
        }
    }
    for (int32_t i = 0; i < producer->topic_count; i++)
        for (int32_t j = 0; j < producer->topics[i]->partition_count; j++) {
            struct mqd_producer_partition *partition = producer->topics[i]->partitions[j];
            partition->reordered = false;
            partition->next = mqd_list_empty(&partition->closed)
                                  ? NULL
                                  : MQD_CONTAINER(partition->closed.next, struct mqd_producer_batch, node);
            if (partition->next && !mqd_list_linked(&partition->ready))
                mqd_list_append(&producer->ready, &partition->ready);
        }
}

static int check_client_id(struct mqd_producer *producer, struct mqd_client *to)
{
    return strcmp(producer->client->client_id, to->client_id) == 0
               ? 0
               : mqd_error_set(MQD_E_INVALID, "a producer can move only to an attachment with the same client id");
}

int mqd_producer_move(struct mqd_producer *producer, struct mqd_client *to)
{
    struct mqd_client *old = producer->client;
    struct move move = {.first_chunks = NULL};
    if (!old)
        return mqd_error_set_static(MQD_E_INVALID,
                                    "the producer's attachment was closed before the move: its batches are lost");
    if (mqd_client_check(to) || check_client_id(producer, to))
        return -1;
    if (old->in_fork_child || to->producer_serial)
        return mqd_error_set_static(
            MQD_E_INVALID,
            "a producer can move only to an attachment that has never had a producer, and never in a forked child");
    mqd_client_take_replies(old); /* handles the responses that arrived before the attachment ended */
    if (plan_move(producer, to, &move)) {
        free(move.first_chunks);
        mqd_client_memory_close(&move.memory);
        return -1;
    }
    for (uint32_t i = 0; i < producer->used_count; i++)
        if (has_bytes(&producer->batches[i]))
            move_batch(producer, &producer->batches[i], to, &move, move.first_chunks[i]);
    mqd_client_memory_close(&producer->memory);
    producer->memory = move.memory;
    producer->used_bytes = move.used_bytes;
    uint64_t all = (uint64_t)move.memory.chunk_count * move.memory.chunk_bytes,
             configured = producer->options.buffer_bytes_max;
    producer->used_bytes_max = configured && configured < all ? configured : all;
    free(move.first_chunks);
    producer->base = to->request_bytes;
    producer->client = to;
    producer->serial = ++to->producer_serial;
    to->producer = producer;
    old->producer = NULL;
    requeue_sent(producer);
    for (uint32_t i = 0; i < producer->used_count; i++)
        if (has_bytes(&producer->batches[i]) && producer->batches[i].state != MQD_BATCH_OPEN)
            mqd_producer_batch_put_head(producer, &producer->batches[i]);
    mqd_client_close(old);
    mqd_producer_pump(producer);
    mqd_client_flush(to);
    return 0;
}
