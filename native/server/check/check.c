/* Checks: queries that must be answered before a batch may be written, and the batches that wait
 * for their results.
 *
 *   transaction        The owner knows of no ongoing transaction of this producer
 *                      (MQD_STAGE_VERIFY): the transaction's coordinator verifies, or adds, the
 *                      partitions (KIP-890). One CHECK covers all partitions of a request that need
 *                      it; each append is then sent again with the guard that its owner returned.
 *   records            server/check/check_records.c
 *
 * An append is `ordered` if no later batch of its producer may overtake it: it is transactional, or
 * parked for a check of its records. It is undecided until its owner has staged or refused it.
 * While a request has undecided appends, its connection is not read (others are).
 *
 * Paths of an ordered append:
 *   staged        routed -> undecided -> staged or refused -> decided
 *   verification  undecided -> awaits_verification, until no other append is undecided -> parked on
 *                 a check -> sent again with its guard -> decided
 *   records       undecided -> parked on a check of records -> delivered -> one of the above
 *
 * Parked batches must not hold the receive window, which all connections share. Batches of up to
 * MQD_CHECK_COPY_BYTES_MAX are copied into the control arena next to the payload (where an owner in
 * another worker can read them too); larger ones arrived in a run of extents of their own and stay
 * there.
 *
 * Invariants
 *   C1  connection->block_count counts its requests that still have undecided appends after
 *       routing; the connection is not read while it is not 0.
 *   C2  an append is in at most one of these lists: a check's `parked`, the owner's, forwarded_to.
 *   C3  an append that has waited for MQD_CHECK_MS_MAX, or for the client's timeout, is refused
 *       with a retriable error; no part of it is written later.
 * Bounds: those of server/check/check_table.c. Beyond them, and if the ring stays full until the
 * timeout, an append is refused as in C3. Nothing here blocks.
 */
#include <stdlib.h>
#include <string.h>

#include "server/check/check.h"
#include "server/redirect.h"

#define TRANSACTIONS_V2_SINCE_VERSION 12 /* of Produce */

/* ---- parking ---- */

uint8_t *mqd_append_payload(const struct mqd_reactor *r, const struct mqd_append *append)
{
    return r->options.arenas[r->options.self] + append->offset;
}

void mqd_check_park(struct mqd_reactor *r, struct mqd_check *check, struct mqd_append *append)
{
    /* clears the base offset, which the owner sets later: with the client's value mqd_batch_decode
     * could refuse the header when the append is resumed */
    memset(mqd_append_payload(r, append), 0, 8);
    append->check = check;
    append->check_index = check->count++;
    mqd_list_append(&check->parked, &append->node);
}

void mqd_check_move(struct mqd_reactor *r, struct mqd_append *append, uint64_t at)
{
    memcpy(r->options.arenas[r->options.self] + at, mqd_append_payload(r, append), append->size_bytes);
    mqd_arena_hold(r->control_arena, at - r->control_arena_base);
    mqd_append_unpin(r, append);
    append->offset = at;
    append->pinned = MQD_PIN_CONTROL;
}

bool mqd_check_keep_transactional_id(struct mqd_reactor *r, struct mqd_request *request)
{
    int32_t bytes = request->produce_fields.transactional_id.size_bytes;
    if (bytes <= 0 || request->transactional_id_kept)
        return true;
    uint8_t *copy = mqd_request_charge(r, request, (uint64_t)bytes) ? malloc((size_t)bytes) : NULL;
    if (!copy)
        return false;
    memcpy(copy, request->produce_fields.transactional_id.bytes, (size_t)bytes);
    request->produce_fields.transactional_id.bytes = copy;
    request->transactional_id_kept = 1;
    return true;
}

const char *const mqd_check_too_many_reason = "too many batches are waiting for a check; the client may retry";

static void refuse_all(struct mqd_reactor *r, struct mqd_node *parked, int16_t error, const char *message)
{
    struct mqd_node *node;
    while ((node = mqd_list_pop(parked))) {
        struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        append->message = message;
        mqd_append_done(r, append, error);
    }
}

/* ---- the topic of an append ---- */

struct mqd_topic *mqd_check_topic(struct mqd_reactor *r, struct mqd_request *request, struct mqd_topic_walk *walk,
                                  const struct mqd_append *append)
{
    uint32_t index = (uint32_t)(append - request->appends);
    if (walk->end == 0)
        walk->end = request->topics[0].append_count;
    while (index >= walk->end)
        walk->end += request->topics[++walk->topic].append_count;
    struct mqd_produce_topic_entry *entry = &request->topics[walk->topic];
    if (!entry->key.by_id)
        entry->key.name.bytes = entry->name;
    struct mqd_topic *topic = mqd_topics_find(&r->topics, &entry->key);
    bool still_same = topic && (uint32_t)append->partition_index < topic->partition_count &&
                      topic->slots[append->partition_index] == append->slot;
    return still_same ? topic : NULL;
}

static int16_t topic_gone_error(const struct mqd_request *request)
{
    return request->version >= 13 ? MQD_KAFKA_UNKNOWN_TOPIC_ID : MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION;
}

/* ---- ordered appends ---- */

static void copy_produce_fields(struct mqd_reactor *r, struct mqd_request *request)
{
    const struct mqd_produce_request *produce = r->producing;
    if (request->has_produce_fields)
        return;
    request->has_produce_fields = 1;
    request->produce_fields = (struct mqd_produce_fields){.timeout_ms = produce->timeout_ms,
                                                          .required_acks = produce->required_acks,
                                                          .response_by_ms = INT64_MAX,
                                                          .producer_id = -1,
                                                          .transactional_id = produce->transactional_id};
    if (produce->required_acks == -1)
        request->produce_fields.response_by_ms = r->now_ms + (produce->timeout_ms > 0 ? produce->timeout_ms : 1);
}

void mqd_check_begin_order(struct mqd_reactor *r, struct mqd_append *append)
{
    copy_produce_fields(r, append->request);
    if (!append->ordered)
        append->request->undecided_count++;
    append->ordered = 1;
}

static void submit_transaction(struct mqd_reactor *r, struct mqd_request *request);

static void maybe_submit(struct mqd_reactor *r, struct mqd_request *request)
{
    if (request->awaiting_verification_count && request->awaiting_verification_count == request->undecided_count &&
        request->connection)
        submit_transaction(r, request);
}

void mqd_check_on_routed(struct mqd_reactor *r, struct mqd_request *request)
{
    request->blocks = 1;
    request->connection->block_count++;
    maybe_submit(r, request);
}

void mqd_check_end_order(struct mqd_reactor *r, struct mqd_append *append)
{
    struct mqd_request *request = append->request;
    if (!append->ordered)
        return;
    append->ordered = 0;
    if (--request->undecided_count) {
        maybe_submit(r, request);
        return;
    }
    struct mqd_connection *c = request->connection;
    if (c && request->blocks) {
        c->block_count--;
        mqd_connection_resume(r, c);
    }
    request->blocks = 0;
}

void mqd_check_remove_append(struct mqd_reactor *r, struct mqd_append *append)
{
    struct mqd_check *check = append->check;
    append->check = NULL;
    if (append->awaits_verification)
        append->request->awaiting_verification_count--;
    append->awaits_verification = 0;
    if (check && mqd_list_empty(&check->parked) && !check->sent)
        mqd_check_end(r, check); /* the check was never sent */
    mqd_check_end_order(r, append);
}

void mqd_check_cancel(struct mqd_reactor *r, struct mqd_request *request)
{
    request->pending++; /* keeps the request from being freed during the loop */
    for (uint32_t i = 0; i < request->append_count; i++)
        if (!request->appends[i].done && (request->appends[i].check || request->appends[i].awaits_verification))
            mqd_append_done(r, &request->appends[i], MQD_KAFKA_NOT_ENOUGH_REPLICAS);
    if (--request->pending == 0)
        mqd_request_free(r, request);
}

bool mqd_check_expire(struct mqd_reactor *r, struct mqd_append *append)
{
    if (!append->check && !append->awaits_verification)
        return false;
    bool of_records = append->check && append->check->kind != MQD_CHECK_TRANSACTION;
    append->message = of_records ? "the batch's records were not checked in time; nothing was written"
                                 : "the transaction's coordinator did not answer in time; nothing was written";
    mqd_append_done(r, append, of_records ? MQD_KAFKA_REQUEST_TIMED_OUT : MQD_KAFKA_NOT_ENOUGH_REPLICAS);
    return true;
}

/* ---- transactions ---- */

/* As in Kafka: a transactional batch needs the request's transactional id (which authorises it),
 * and all batches of a request belong to one producer. */
int16_t mqd_check_transaction(struct mqd_reactor *r, struct mqd_request *request, const struct mqd_batch *batch,
                              const char **message)
{
    copy_produce_fields(r, request);
    if (request->produce_fields.transactional_id.size_bytes < 0) {
        *message = "a transactional batch in a request without a transactional id";
        return MQD_KAFKA_TRANSACTIONAL_ID_AUTHORIZATION_FAILED;
    }
    if (batch->producer_id < 0) /* without a producer there is no transaction */
        return 0;
    if (request->produce_fields.producer_id < 0) {
        request->produce_fields.producer_id = batch->producer_id;
        request->produce_fields.producer_epoch = batch->producer_epoch;
    } else if (request->produce_fields.producer_id != batch->producer_id ||
               request->produce_fields.producer_epoch != batch->producer_epoch) {
        *message = "transactional batches of more than one producer id or epoch in one request";
        return MQD_KAFKA_INVALID_PRODUCER_ID_MAPPING;
    }
    return 0;
}

void mqd_check_verify(struct mqd_reactor *r, struct mqd_append *append, int64_t guard)
{
    struct mqd_request *request = append->request;
    if (append->sent_to_target)
        /* the batch is sent again with its guard on the same path, first to the owner of the
         * retired partition */
        mqd_redirect_undo(append);
    if (append->guard || !append->ordered || !request->connection) {
        append->message = "the partition's transaction changed while it was verified; the client may retry the batch";
        mqd_append_done(r, append, MQD_KAFKA_NOT_ENOUGH_REPLICAS);
        return;
    }
    append->guard = guard;
    append->stage_flags |= request->version >= TRANSACTIONS_V2_SINCE_VERSION ? MQD_STAGE_FROM_ZERO : 0;
    append->awaits_verification = 1;
    request->awaiting_verification_count++;
    maybe_submit(r, request);
}

/* Moves the appends that await verification to `parked`, in order. Returns the sum of their
 * bytes. */
static uint64_t take_awaiting(struct mqd_request *request, struct mqd_node *parked, uint32_t *count)
{
    uint64_t bytes = 0;
    *count = request->awaiting_verification_count;
    request->awaiting_verification_count = 0;
    for (uint32_t i = 0, remaining = *count; remaining; i++) {
        struct mqd_append *append = &request->appends[i];
        if (!append->awaits_verification)
            continue;
        append->awaits_verification = 0;
        mqd_list_append(parked, &append->node);
        bytes += append->size_bytes;
        remaining--;
    }
    return bytes;
}

static void submit_transaction(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_node parked;
    uint32_t count;
    mqd_list_init(&parked);
    uint64_t batch_bytes = take_awaiting(request, &parked, &count);
    bool must_copy = batch_bytes <= MQD_CHECK_COPY_BYTES_MAX;
    uint32_t id_bytes = (uint32_t)request->produce_fields.transactional_id.size_bytes;
    uint64_t payload_bytes =
        sizeof(struct mqd_check_transaction) + (uint64_t)count * sizeof(struct mqd_check_partition) + id_bytes;
    bool large = request->arena_offset >= 0 && mqd_frame_is_large(r, (uint64_t)request->arena_offset);
    struct mqd_check *check =
        mqd_check_take(r, payload_bytes + (must_copy ? batch_bytes : 0), must_copy || large ? 0 : batch_bytes);
    if (!check) {
        refuse_all(r, &parked, MQD_KAFKA_NOT_ENOUGH_REPLICAS, mqd_check_too_many_reason);
        return;
    }
    check->kind = MQD_CHECK_TRANSACTION;
    check->size_bytes = (uint32_t)payload_bytes;
    uint8_t *at = r->options.arenas[r->options.self] + check->offset;
    struct mqd_check_transaction head = {.producer_id = request->produce_fields.producer_id,
                                         .producer_epoch = request->produce_fields.producer_epoch,
                                         .version = request->version,
                                         .acks = request->produce_fields.required_acks,
                                         .id_bytes = (uint16_t)id_bytes,
                                         .partition_count = count,
                                         .timeout_ms = request->produce_fields.timeout_ms};
    memcpy(at, &head, sizeof head);
    at += sizeof head;
    memcpy(at + (uint64_t)count * sizeof(struct mqd_check_partition), request->produce_fields.transactional_id.bytes,
           id_bytes);
    uint64_t batch_at = check->offset + payload_bytes;
    struct mqd_topic_walk walk = {0};
    struct mqd_node *node;
    while ((node = mqd_list_pop(&parked))) {
        struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        struct mqd_topic *topic = mqd_check_topic(r, request, &walk, append);
        struct mqd_check_partition partition = {.partition_index = append->partition_index, .slot = append->slot};
        /* if the topic is gone, the coordinator refuses the all-zero id, or mqd_check_resume
         * refuses the append */
        if (topic)
            memcpy(partition.topic_id, topic->topic_id, sizeof partition.topic_id);
        memcpy(at, &partition, sizeof partition);
        at += sizeof partition;
        if (must_copy) {
            mqd_check_move(r, append, batch_at);
            batch_at += append->size_bytes;
        }
        mqd_check_park(r, check, append);
    }
    mqd_check_submit(r, check, request);
}

/* ---- results ---- */

void mqd_check_resume(struct mqd_reactor *r, struct mqd_append *append, struct mqd_topic_walk *walk)
{
    struct mqd_batch batch;
    append->check = NULL;
    if (!mqd_check_topic(r, append->request, walk, append))
        mqd_append_done(r, append, topic_gone_error(append->request));
    else if (mqd_batch_decode(mqd_append_payload(r, append), append->size_bytes, &batch) < 0)
        mqd_append_done(r, append, MQD_KAFKA_CORRUPT_MESSAGE);
    else
        mqd_append_deliver(r, append, &batch);
}

static void refuse(struct mqd_reactor *r, struct mqd_append *append, int16_t error)
{
    mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
    append->message =
        error == MQD_KAFKA_INVALID_TXN_STATE ? "Partition was not added to the transaction"
        : error == MQD_KAFKA_NOT_ENOUGH_REPLICAS
            ? "Unable to verify the partition has been added to the transaction; its coordinator is not available"
            : NULL;
    mqd_append_done(r, append, error);
}

static void on_transaction(struct mqd_reactor *r, struct mqd_check *check, int32_t error, const uint8_t *payload,
                           uint32_t size_bytes)
{
    struct mqd_topic_walk walk = {0};
    struct mqd_node *node;
    if (error == 0 && size_bytes != check->count * sizeof(int16_t)) {
        mqd_log(r, 3, check->connection, UINT32_MAX, "the acceptor answered a check of %u partitions with %u bytes",
                check->count, size_bytes);
        error = MQD_KAFKA_NOT_ENOUGH_REPLICAS;
    }
    while ((node = mqd_list_pop(&check->parked))) {
        struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        int16_t partition_error = (int16_t)error;
        if (!error)
            memcpy(&partition_error, payload + append->check_index * sizeof partition_error, sizeof partition_error);
        if (partition_error)
            refuse(r, append, partition_error);
        else
            mqd_check_resume(r, append, &walk);
    }
}

void mqd_check_on_response(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    if (from != mqd_control_worker_count(r->options.control))
        return;
    struct mqd_check *check = mqd_check_by_token(r, descriptor->token);
    uint64_t arena_bytes = r->options.arena_bytes[from];
    bool is_in_arena = r->options.arenas[from] && descriptor->offset <= arena_bytes &&
                       descriptor->size_bytes <= arena_bytes - descriptor->offset;
    const uint8_t *payload =
        is_in_arena && descriptor->size_bytes ? r->options.arenas[from] + descriptor->offset : NULL;
    uint32_t size_bytes = is_in_arena ? descriptor->size_bytes : 0;
    bool more = false;
    if (check && check->sent && check->compression && !descriptor->error)
        mqd_check_take_piece(r, check, payload, size_bytes, descriptor->a);
    if (check && check->sent)
        more = descriptor->flags & MQD_CHECKED_MORE;
    if (check && check->sent && !more) {
        if (check->kind == MQD_CHECK_TRANSACTION)
            on_transaction(r, check, descriptor->error, payload, size_bytes);
        else
            mqd_check_on_records(r, check, descriptor->error, payload, size_bytes);
        mqd_check_end(r, check);
    }
    if (descriptor->size_bytes) {
        struct mqd_descriptor release = {
            .kind = MQD_LINK_RELEASE, .token = descriptor->token, .offset = descriptor->offset};
        mqd_forward_send(r, from, &release);
    }
}
