/* Handles Produce on the worker that received it: parses the request, checks each batch while it is
 * in the cache, passes it to its partition's owner, and responds.
 *
 * Stateless checks (framing, CRC) happen here, where the bytes are in the cache. Checks that need
 * the partition's state happen only in its owner, in arrival order (server/owner.c); the owner may
 * be this worker or another (server/forward.c).
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/big_endian.h"
#include "server/check/checks.h"
#include "server/reactor.h"
#include "server/redirect.h"
#include "server/rights/subject.h"
#include "server/slow/slow.h"
#include "wire/record_scan.h"

#define ZSTD_VERSION_MIN 7 /* KIP-110 */

static bool allocate_appends(struct mqd_reactor *r, struct mqd_request *request, uint32_t topic_count,
                             uint32_t append_count)
{
    uint64_t bytes = (append_count > 1 ? sizeof *request->appends * append_count : 0) +
                     (topic_count > 1 ? sizeof *request->topics * topic_count : 0);
    request->appends = &request->inline_append;
    request->topics = &request->inline_topic;
    if (bytes && !mqd_request_charge(r, request, bytes))
        return false;
    if (append_count > 1 && !(request->appends = malloc(sizeof *request->appends * append_count)))
        return false;
    if (topic_count > 1 && !(request->topics = malloc(sizeof *request->topics * topic_count))) {
        if (append_count > 1)
            free(request->appends);
        request->appends = &request->inline_append;
        return false;
    }
    return true;
}

/* As in Kafka, the first batch of each partition is checked before any partition is handled, to
 * find out whether it is transactional. If an invalid batch is found before a transactional one,
 * the whole request is refused. */
static int16_t request_error_of(const struct mqd_produce_request *produce,
                                const struct mqd_produce_partition *partition, bool *transactional)
{
    const uint8_t *batch = partition->records;
    if (*transactional || partition->size_bytes < MQD_BATCH_MAGIC_END)
        return 0;
    int32_t length = (int32_t)mqd_get_be32(batch + 8);
    if (length < MQD_BATCH_LENGTH_MIN || batch[16] > 2)
        return MQD_KAFKA_CORRUPT_MESSAGE;
    if (batch[16] < 2 || length > partition->size_bytes - MQD_BATCH_LENGTH_END ||
        partition->size_bytes < MQD_BATCH_ATTRIBUTES_END)
        return 0;
    *transactional = batch[22] & MQD_ATTRIBUTE_TRANSACTIONAL;
    return *transactional && produce->transactional_id.size_bytes < 0 ? MQD_KAFKA_TRANSACTIONAL_ID_AUTHORIZATION_FAILED
                                                                      : 0;
}

/* Called before anything is appended: parses the frame and checks that all of it is well-formed.
 * *request_error: the error for all batches, or 0. *transactional: whether one of them is
 * transactional. */
static int parse_whole_request(const uint8_t *body, uint32_t size_bytes, int16_t version,
                               struct mqd_produce_request *produce, int16_t *request_error, bool *transactional)
{
    *transactional = false;
    *request_error = 0;
    if (mqd_produce_parse(body, size_bytes, version, produce) < 0)
        return -1;
    if (produce->topic_count > MQD_PARTITION_SLOT_COUNT || produce->partition_count > MQD_PARTITION_SLOT_COUNT)
        return mqd_error_set(MQD_E_INVALID,
                             "a Produce of %d topics and %u partitions: a broker can have no more than %d partitions",
                             produce->topic_count, produce->partition_count, MQD_PARTITION_SLOT_COUNT);
    struct mqd_produce_request parser = *produce;
    for (int32_t t = 0; !produce->plain && t < produce->topic_count; t++) {
        struct mqd_produce_topic topic;
        mqd_produce_next_topic(&parser, &topic);
        for (int32_t p = 0; p < topic.partition_count; p++) {
            struct mqd_produce_partition partition;
            mqd_produce_next_partition(&parser, &partition);
            if (!*request_error)
                *request_error = request_error_of(produce, &partition, transactional);
        }
    }
    return 0;
}

/* Whether `records` begins with a complete batch. */
static bool is_complete(const uint8_t *records, int32_t size_bytes)
{
    return size_bytes >= MQD_BATCH_MAGIC_END && (int32_t)mqd_get_be32(records + 8) <= size_bytes - MQD_BATCH_LENGTH_END;
}

/* Makes the checks that Kafka makes before it checks acks and the log: there is exactly one
 * complete batch, in a format that the request's version allows. */
static int16_t check_format(const struct mqd_produce_partition *partition, int16_t version, const char **message)
{
    const uint8_t *records = partition->records;
    if (!is_complete(records, partition->size_bytes)) {
        *message = "the partition's data is not a whole record batch";
        return MQD_KAFKA_INVALID_RECORD;
    }
    if (records[16] < 2) {
        struct mqd_batch unused;
        return mqd_batch_validate(records, (uint64_t)partition->size_bytes, &unused, message);
    }
    if (version < ZSTD_VERSION_MIN && partition->size_bytes >= MQD_BATCH_ATTRIBUTES_END && (records[22] & 7) == 4) {
        *message = "zstd needs Produce version 7 or newer";
        return MQD_KAFKA_UNSUPPORTED_COMPRESSION_TYPE;
    }
    int32_t batch_bytes = (int32_t)mqd_get_be32(records + 8) + MQD_BATCH_LENGTH_END;
    if (batch_bytes > 0 && is_complete(records + batch_bytes, partition->size_bytes - batch_bytes)) {
        *message = "a partition takes exactly one record batch per request";
        return MQD_KAFKA_INVALID_RECORD;
    }
    return 0;
}

static void refuse(struct mqd_reactor *r, struct mqd_append *append, uint32_t slot, int16_t error, const char *message)
{
    struct mqd_request *request = append->request;
    append->message = message;
    mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
    mqd_log(r, 4, request->connection ? request->connection->id : 0, slot, "batch refused: %s",
            message ? message : "invalid");
    mqd_append_done(r, append, error);
}

static int16_t check_batch(struct mqd_reactor *r, const struct mqd_produce_partition *partition,
                           struct mqd_request *request, struct mqd_batch *batch, const char **message)
{
    int16_t error = mqd_batch_validate(partition->records, (uint64_t)partition->size_bytes, batch, message);
    if (error == 0 && batch->base_offset != 0) {
        *message = "the base offset of a client's batch must be 0, because the broker assigns the offsets";
        return MQD_KAFKA_INVALID_RECORD;
    }
    if (error == 0 && (batch->attributes & MQD_ATTRIBUTE_CONTROL)) {
        *message = "clients may not write control batches";
        return MQD_KAFKA_INVALID_RECORD;
    }
    if (error == 0 && (batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL))
        error = mqd_check_transaction(r, request, batch, message);
    return error;
}

/* Routes one partition's batch: refuses it immediately, parks it for a check of its records, or
 * passes it to the partition's owner. */
static void route(struct mqd_reactor *r, struct mqd_request *request, struct mqd_append *append,
                  struct mqd_topic *topic, struct mqd_produce_partition *partition, bool by_id, bool acks_valid)
{
    struct mqd_batch batch;
    if (!topic || partition->partition_index < 0 || (uint32_t)partition->partition_index >= topic->partition_count) {
        mqd_append_done(r, append, !topic && by_id ? MQD_KAFKA_UNKNOWN_TOPIC_ID : MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION);
        return;
    }
    uint32_t slot = topic->slots[partition->partition_index];
    const char *message = NULL;
    if (topic->view) {
        refuse(r, append, slot, MQD_KAFKA_POLICY_VIOLATION, "the topic is a view (view.of): write to its base topic");
        return;
    }
    int16_t error = check_format(partition, request->version, &message);
    if (error) {
        refuse(r, append, slot, error, message);
        return;
    }
    if (!acks_valid) {
        mqd_append_done(r, append, MQD_KAFKA_INVALID_REQUIRED_ACKS);
        return;
    }
    /* a client that could write to an internal topic could change the offsets and transactions of
     * other clients */
    if (mqd_topic_is_internal(topic)) {
        append->message = "only this broker's coordinators write to its internal topics";
        mqd_append_done(r, append, MQD_KAFKA_INVALID_TOPIC);
        return;
    }
    if (__builtin_expect(request->connection->local != NULL && r->topics.broker_count, 0) &&
        mqd_relay_append(r, append, topic, partition))
        return;
    if (slot == MQD_SLOT_NONE) { /* no replica on this host */
        mqd_append_done(r, append, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
        return;
    }
    append->slot = slot;
    error = check_batch(r, partition, request, &batch, &message);
    if (error) {
        refuse(r, append, slot, error, message);
        return;
    }
    append->offset = (uint64_t)(partition->records - r->options.arenas[r->options.self]);
    append->size_bytes = (uint32_t)partition->size_bytes;
    append->pinned = MQD_PIN_FRAME;
    request->arena_pins++;
    if (batch.attributes & MQD_ATTRIBUTE_TRANSACTIONAL)
        mqd_check_begin_order(r, append);
    if (!mqd_check_records(r, append, &batch))
        return;
    mqd_append_deliver(r, append, &batch);
}

void mqd_append_deliver(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch)
{
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, append->slot);
    uint16_t owner = mqd_load_relaxed(&slot->owner);
    if (owner == r->options.self) {
        mqd_owner_stage(r, append, batch, r->options.arenas[r->options.self] + append->offset, true);
        return;
    }
    uint64_t owner_generation = mqd_load_acquire(&slot->owner_generation);
    uint8_t state = mqd_load_acquire(&slot->state);
    bool serving = owner < r->options.endpoint_count && state == MQD_SLOT_ONLINE &&
                   owner_generation == mqd_load_acquire(&mqd_control_endpoint(r->options.control, owner)->generation);
    /* the same errors as the owner itself would return: a fenced directory is no reason for the
     * client to look for another leader */
    if (!serving) {
        mqd_append_done(r, append,
                        state == MQD_SLOT_OFFLINE ? MQD_KAFKA_STORAGE_ERROR : MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
        return;
    }
    mqd_slow_forward(r, append->request);
    mqd_forward_append(r, append, owner, owner_generation, append->offset, append->size_bytes, -1);
}

static void copy_topic(struct mqd_produce_topic_entry *entry, const struct mqd_produce_topic *topic)
{
    entry->key = topic->key;
    entry->append_count = (uint32_t)topic->partition_count;
    if (!topic->key.by_id) { /* the frame may be gone when the response is written */
        uint32_t bytes = topic->key.name.size_bytes > 0 ? (uint32_t)topic->key.name.size_bytes : 0;
        if (bytes > MQD_TOPIC_NAME_BYTES_MAX)
            bytes = MQD_TOPIC_NAME_BYTES_MAX;
        if (bytes)
            memcpy(entry->name, topic->key.name.bytes, bytes);
        entry->key.name.size_bytes = (int32_t)bytes;
    }
}

/* Returns 0, or the error if the principal may not write with the request's transactional id. */
static int16_t transactional_id_error(struct mqd_reactor *r, const struct mqd_connection *c,
                                      const struct mqd_produce_request *produce)
{
    const struct mqd_text *id = &produce->transactional_id;
    return mqd_subject_is_allowed_by_name(r, c, MQD_RESOURCE_TRANSACTIONAL_ID, id->bytes, id->size_bytes,
                                          MQD_OPERATION_WRITE)
               ? 0
               : MQD_KAFKA_TRANSACTIONAL_ID_AUTHORIZATION_FAILED;
}

/* Returns 0, or the error if the principal may not write to the topic. An unknown name is refused
 * like a known one; an unknown id gets UNKNOWN_TOPIC_ID. */
static int16_t topic_error_of(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_topic *topic,
                              const struct mqd_topic_key *key)
{
    bool is_allowed = topic ? mqd_subject_is_allowed(r, c, topic, MQD_OPERATION_WRITE)
                            : key->by_id || mqd_subject_is_allowed_by_name(r, c, MQD_RESOURCE_TOPIC, key->name.bytes,
                                                                           key->name.size_bytes, MQD_OPERATION_WRITE);
    return is_allowed ? 0 : MQD_KAFKA_TOPIC_AUTHORIZATION_FAILED;
}

/* Returns NULL if the error code needs no explanation. */
static const char *message_of(int16_t error, const struct mqd_produce_request *produce)
{
    if (error == MQD_KAFKA_CORRUPT_MESSAGE)
        return "a partition of the request has an invalid record batch";
    if (error == MQD_KAFKA_TRANSACTIONAL_ID_AUTHORIZATION_FAILED && produce->transactional_id.size_bytes < 0)
        return "a transactional batch in a request without a transactional id";
    return NULL;
}

static void produce_topics(struct mqd_reactor *r, struct mqd_request *request, struct mqd_produce_request *produce,
                           int16_t request_error)
{
    bool acks_valid = produce->required_acks >= -1 && produce->required_acks <= 1;
    for (int32_t t = 0; t < produce->topic_count; t++) {
        struct mqd_produce_topic topic_header;
        mqd_produce_next_topic(produce, &topic_header);
        copy_topic(&request->topics[request->topic_count++], &topic_header);
        struct mqd_topic *topic = mqd_topics_find(&r->topics, &topic_header.key);
        int16_t error =
            request_error ? request_error : topic_error_of(r, request->connection, topic, &topic_header.key);
        for (int32_t p = 0; p < topic_header.partition_count; p++) {
            struct mqd_produce_partition partition;
            mqd_produce_next_partition(produce, &partition);
            struct mqd_append *append = &request->appends[request->append_count++];
            memset(append, 0, sizeof *append);
            mqd_list_init(&append->node);
            append->request = request;
            append->slot = append->forward_index = UINT32_MAX;
            append->partition_index = partition.partition_index;
            append->acks_all = produce->required_acks == -1;
            append->base_offset = append->log_append_time_ms = append->log_start_offset = -1;
            if (error) {
                append->message = message_of(error, produce);
                mqd_append_done(r, append, error);
            } else {
                route(r, request, append, topic, &partition, topic_header.key.by_id, acks_valid);
            }
        }
    }
}

static int64_t response_deadline_ms(const struct mqd_reactor *r, const struct mqd_produce_request *produce)
{
    return r->now_ms + (produce->timeout_ms > 0 ? produce->timeout_ms : 1);
}

/* Arms the timer, unless a check has armed it for an earlier time. */
static void arm_if_earlier(struct mqd_reactor *r, struct mqd_request *request, int64_t deadline_ms)
{
    if (!request->timer_armed || deadline_ms < request->deadline_ms)
        mqd_timer_arm(r, request, deadline_ms);
}

void mqd_produce_on_request(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                            uint8_t *frame, uint32_t size_bytes, int64_t arena_offset)
{
    struct mqd_produce_request produce;
    int16_t request_error;
    bool transactional;
    if (parse_whole_request(frame + header->header_bytes, size_bytes - header->header_bytes, header->api_version,
                            &produce, &request_error, &transactional) < 0) {
        mqd_connection_fail(r, c, mqd_error_message());
        return;
    }
    struct mqd_request *request = mqd_request_new(r, c, header, MQD_REQUEST_PRODUCE);
    if (!request || !allocate_appends(r, request, (uint32_t)produce.topic_count, produce.partition_count)) {
        mqd_connection_fail(r, c, "no memory for another Produce (queued.max.request.bytes)");
        return;
    }
    if (transactional && !request_error)
        request_error = transactional_id_error(r, c, &produce);
    request->no_reply = produce.required_acks == 0;
    request->undecided_count = 1; /* one extra until all appends are routed, as in `pending` below */
    mqd_throttle_charge(r, c, MQD_QUOTA_PRODUCE, size_bytes);
    mqd_frame_hold(r, (uint64_t)arena_offset);
    request->arena_offset = arena_offset;
    /* one extra, so that the request cannot complete before all appends are routed */
    request->pending = produce.partition_count + 1;
    /* an append that is refused immediately must not release the bytes of later appends */
    request->arena_pins = 1;
    r->producing = &produce;
    r->producing_client = (struct mqd_text){header->client_id, header->client_id ? header->client_id_bytes : -1};
    produce_topics(r, request, &produce, request_error);
    r->producing = NULL;
    if (--request->arena_pins == 0) {
        mqd_frame_release(r, (uint64_t)request->arena_offset);
        request->arena_offset = -1;
    }
    if (--request->pending == 0)
        mqd_request_complete(r, request);
    else if (produce.required_acks == -1)
        arm_if_earlier(r, request, response_deadline_ms(r, &produce));
    if (--request->undecided_count)
        mqd_check_on_routed(r, request);
}

void mqd_append_unpin(struct mqd_reactor *r, struct mqd_append *append)
{
    uint8_t pinned = append->pinned;
    append->pinned = MQD_PIN_NONE;
    if (pinned == MQD_PIN_CONTROL)
        mqd_arena_release(r->control_arena, append->offset - r->control_arena_base);
    if (pinned == MQD_PIN_RUN)
        mqd_frame_release(r, append->offset);
    if (pinned != MQD_PIN_FRAME)
        return;
    struct mqd_request *request = append->request;
    if (--request->arena_pins == 0 && request->arena_offset >= 0) {
        mqd_frame_release(r, (uint64_t)request->arena_offset);
        request->arena_offset = -1;
    }
}

/* Notes the time of the refusal for may_overtake in server/owner.c. */
static void note_refused(struct mqd_reactor *r, uint32_t slot, int16_t error)
{
    if (slot < MQD_PARTITION_SLOT_COUNT && (error == MQD_KAFKA_NOT_LEADER_OR_FOLLOWER ||
                                            error == MQD_KAFKA_STORAGE_ERROR || error == MQD_KAFKA_NOT_ENOUGH_REPLICAS))
        mqd_store_relaxed(&mqd_control_partition(r->options.control, slot)->refused_ms, r->now_ms);
}

void mqd_append_done(struct mqd_reactor *r, struct mqd_append *append, int16_t error)
{
    if (append->done)
        return;
    append->done = 1;
    if (__builtin_expect(error != 0, 0))
        note_refused(r, append->slot, error);
    append->error = __builtin_expect(append->sent_to_target && error, 0) ? mqd_redirect_outcome(append, error) : error;
    mqd_list_remove(&append->node);
    struct mqd_request *request = append->request;
    if (!request) { /* a peer's append: report the outcome; the sender may release the bytes */
        struct mqd_descriptor response = {.kind = MQD_LINK_PRODUCED,
                                          .flags = append->marker_redirected ? MQD_PRODUCED_REDIRECTED : 0,
                                          .slot = append->slot,
                                          .token = append->peer_token,
                                          .offset = append->home_slot,
                                          .size_bytes = append->redirect_index,
                                          .error = error,
                                          .a = append->base_offset,
                                          .b = append->log_append_time_ms,
                                          .c = append->log_start_offset};
        mqd_forward_send(r, append->peer, &response);
        append->node.next = (struct mqd_node *)r->free_appends;
        r->free_appends = append;
        return;
    }
    mqd_forward_untrack(r, append);
    if (append->relay_entry)
        mqd_relay_untrack(r, append);
    if (append->ordered)
        mqd_check_remove_append(r, append);
    mqd_append_unpin(r, append);
    MQD_ASSERT(request->pending > 0, "a Produce (id %llu) of %u batches has more outcomes than batches",
               (unsigned long long)request->id, request->append_count);
    if (mqd_slow_enabled(r))
        request->times.slot = append->slot;
    if (--request->pending)
        return;
    if (request->connection)
        mqd_request_complete(r, request);
    else
        mqd_request_free(r, request);
}

/* Called when a check has taken too long, or the client's time limit has passed. Batches that have
 * been written may still become durable: REQUEST_TIMED_OUT says that their outcome is unknown. */
void mqd_produce_timeout(struct mqd_reactor *r, struct mqd_request *request)
{
    int64_t next_check_ms = INT64_MAX,
            response_by_ms = request->has_produce_fields ? request->produce_fields.response_by_ms : r->now_ms;
    for (uint32_t i = 0; i < request->append_count && request->complete == 0; i++) {
        struct mqd_append *append = &request->appends[i];
        if (append->done || mqd_check_expire(r, append))
            continue;
        if (r->now_ms < response_by_ms) {
            next_check_ms = response_by_ms < next_check_ms ? response_by_ms : next_check_ms;
        } else if (append->pinned) { /* not written yet, so its bytes are still needed: checks again soon */
            next_check_ms = r->now_ms + 10;
        } else {
            append->message = append->relay_entry
                                  ? "the partition's leader, another host, has not answered within timeout.ms"
                                  : "the disks or the in-sync replicas did not acknowledge the batch within timeout.ms";
            mqd_append_done(r, append, MQD_KAFKA_REQUEST_TIMED_OUT);
        }
    }
    if (next_check_ms != INT64_MAX && !request->complete)
        mqd_timer_arm(r, request, next_check_ms);
}

bool mqd_produce_failed(const struct mqd_request *request)
{
    for (uint32_t i = 0; i < request->append_count; i++)
        if (request->appends[i].error)
            return true;
    return false;
}

/* Returns the leader to report for a partition that is led elsewhere; NULL if it is not known. */
static const struct mqd_current_leader *current_leader(struct mqd_reactor *r,
                                                       const struct mqd_produce_topic_entry *topic,
                                                       const struct mqd_append *append, struct mqd_current_leader *out,
                                                       struct mqd_response_nodes *nodes)
{
    bool is_known = mqd_topics_current_leader(&r->topics, mqd_topics_find(&r->topics, &topic->key),
                                              append->partition_index, out, nodes);
    return is_known ? out : NULL;
}

/* Whether Kafka returns the log start offset with this error: it does if the log or its validator
 * raises the error. */
static bool returns_log_start(int16_t error)
{
    return error == MQD_KAFKA_INVALID_RECORD || error == MQD_KAFKA_INVALID_TIMESTAMP ||
           error == MQD_KAFKA_OUT_OF_ORDER_SEQUENCE_NUMBER || error == MQD_KAFKA_DUPLICATE_SEQUENCE_NUMBER ||
           error == MQD_KAFKA_INVALID_PRODUCER_EPOCH || error == MQD_KAFKA_UNKNOWN_PRODUCER_ID;
}

static int64_t log_start_offset(const struct mqd_reactor *r, const struct mqd_append *append)
{
    struct mqd_positions positions;
    if (!append->error || append->slot >= MQD_PARTITION_SLOT_COUNT || !returns_log_start(append->error))
        return append->log_start_offset;
    mqd_slot_positions(mqd_control_partition(r->options.control, append->slot), &positions);
    return positions.log_start_offset;
}

void mqd_produce_encode(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_buffer *out = &r->scratch;
    int16_t version = request->version;
    out->size_bytes = 0;
    r->scratch_chunk_count = 0;
    mqd_response_begin(out, MQD_API_PRODUCE, version, request->correlation_id);
    mqd_produce_response_topics(out, version, (int32_t)request->topic_count);
    struct mqd_append *append = request->appends;
    struct mqd_response_nodes nodes;
    nodes.count = 0;
    for (uint32_t t = 0; t < request->topic_count; t++) {
        struct mqd_produce_topic_entry *topic = &request->topics[t];
        if (!topic->key.by_id)
            topic->key.name.bytes = topic->name;
        mqd_produce_response_topic(out, version, &topic->key, (int32_t)topic->append_count);
        for (uint32_t p = 0; p < topic->append_count; p++, append++) {
            struct mqd_produce_outcome outcome = {.partition_index = append->partition_index,
                                                  .error = append->error,
                                                  .base_offset = append->error ? -1 : append->base_offset,
                                                  .log_append_time_ms = append->log_append_time_ms,
                                                  .log_start_offset = log_start_offset(r, append),
                                                  .message = append->error ? append->message : NULL};
            if (append->error && append->refusal) {
                outcome.record_errors = append->refusal->record_indexes;
                outcome.record_error_count = append->refusal->index_count;
                outcome.record_message = append->refusal->record_message;
            }
            struct mqd_current_leader leader;
            if (append->error == MQD_KAFKA_NOT_LEADER_OR_FOLLOWER && version >= 10)
                outcome.current_leader = current_leader(r, topic, append, &leader, &nodes);
            mqd_produce_response_partition(out, version, &outcome);
        }
        mqd_produce_response_topic_end(out, version);
    }
    mqd_produce_response_end_nodes(out, version, mqd_throttle_time_ms(r, request->connection), nodes.nodes,
                                   mqd_connection_can_use_node_addresses(request->connection) ? nodes.count : 0);
    mqd_response_finish(out, 0);
    mqd_output_take_scratch(r, request->connection);
}
