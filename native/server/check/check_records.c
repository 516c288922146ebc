/* Checks of records: a batch whose records cannot be parsed would stop every consumer at its
 * offset, and a compacted topic needs a key in every record.
 *
 *   uncompressed   walked here, while the bytes are in the CPU cache
 *   compressed     decompressed here if it is small both compressed and decompressed; otherwise on
 *                  a thread of the worker's pool, while the append is parked. If the codec's
 *                  library is missing, the acceptor decompresses the batch
 *   scheduled      the acceptor reads the headers that specify when each record is due
 *   recompressed   compression.type names a codec other than the batch's: the acceptor returns the
 *                  batch in that codec, and this version is delivered to the owner
 *
 * The topic's record.validation selects the batches that are checked; in a compacted topic all are.
 *
 * Invariants: T1 to T3 of server/check/check_table.c. A job's payload is lent to its thread until
 * the job ends, just as other payloads are lent to the acceptor. Bounds: MQD_RECORDS_BYTES_MAX for
 * each of the pool's threads; INLINE_* for what the reactor does itself (about 30 us).
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "codec/codec.h"
#include "server/check/check.h"

#define INLINE_BYTES_MAX (8u << 10)
#define INLINE_RECORDS_BYTES_MAX (32u << 10)

bool mqd_check_always_by_acceptor;

struct check_result {
    int32_t count; /* what mqd_records_validate returned */
    int32_t unkeyed[MQD_RECORD_ERROR_COUNT_MAX];
    int32_t error; /* enum mqd_codec_error, or 0 */
    const char *reason;
};

struct mqd_check_job {
    uint8_t codec;
    int32_t record_count;
    const uint8_t *records;
    uint32_t size_bytes;
    struct check_result result;
};

/* ---- refusals ---- */

struct mqd_refusal *mqd_refusal_new(struct mqd_reactor *r, struct mqd_append *append)
{
    struct mqd_refusal *refusal =
        mqd_request_charge(r, append->request, sizeof *refusal) ? calloc(1, sizeof *refusal) : NULL;
    append->refusal = refusal;
    append->message = "records were refused";
    if (refusal) {
        append->message = refusal->message;
        append->request->refused = 1;
    }
    return refusal;
}

static void refuse_unkeyed(struct mqd_reactor *r, struct mqd_append *append, const int32_t *unkeyed,
                           uint32_t index_count, uint32_t unkeyed_count)
{
    struct mqd_refusal *refusal = mqd_refusal_new(r, append);
    struct mqd_topic_walk walk = {0};
    if (refusal) {
        const struct mqd_topic *topic = mqd_check_topic(r, append->request, &walk, append);
        refusal->index_count = index_count;
        memcpy(refusal->record_indexes, unkeyed, index_count * sizeof *unkeyed);
        snprintf(refusal->message, sizeof refusal->message,
                 "%u records of the batch have no key; a compacted topic (cleanup.policy) needs one in every record",
                 unkeyed_count);
        snprintf(refusal->record_message, sizeof refusal->record_message,
                 "Compacted topic cannot accept message without key in topic partition %s-%d.",
                 topic ? topic->name : "?", append->partition_index);
    }
    mqd_append_done(r, append, MQD_KAFKA_INVALID_RECORD);
}

static void refuse_malformed(struct mqd_reactor *r, struct mqd_append *append, int32_t index, const char *reason)
{
    struct mqd_refusal *refusal = mqd_refusal_new(r, append);
    append->message = reason;
    if (refusal) {
        refusal->index_count = 1;
        refusal->record_indexes[0] = index;
        snprintf(refusal->message, sizeof refusal->message, "record %d of the batch cannot be parsed: %s", index,
                 reason);
        snprintf(refusal->record_message, sizeof refusal->record_message, "%s", reason);
        append->message = refusal->message;
    }
    mqd_append_done(r, append, MQD_KAFKA_INVALID_RECORD);
}

static void refuse_codec_error(struct mqd_reactor *r, struct mqd_append *append, const struct check_result *result)
{
    if (result->error == MQD_CODEC_NO_MEMORY) {
        append->message = "out of memory to check the batch's records; the client may retry";
        mqd_append_done(r, append, MQD_KAFKA_REQUEST_TIMED_OUT);
        return;
    }
    struct mqd_refusal *refusal = mqd_refusal_new(r, append);
    if (refusal && result->error == MQD_CODEC_TOO_LARGE)
        snprintf(refusal->message, sizeof refusal->message, "the batch's records decompress to more than %u bytes",
                 MQD_RECORDS_BYTES_MAX);
    else if (refusal)
        snprintf(refusal->message, sizeof refusal->message, "the batch's compressed records are damaged: %s",
                 result->reason);
    mqd_append_done(r, append, MQD_KAFKA_INVALID_RECORD);
}

/* Returns whether the append may continue; if not, refuses it. */
static bool pass_or_refuse(struct mqd_reactor *r, struct mqd_append *append, bool needs_keys,
                           const struct check_result *result)
{
    int32_t count = result->count;
    if (!result->error && (count == 0 || (count > 0 && !needs_keys)))
        return true;
    mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
    if (result->error)
        refuse_codec_error(r, append, result);
    else if (count < 0)
        refuse_malformed(r, append, -1 - count, result->reason);
    else
        refuse_unkeyed(r, append, result->unkeyed,
                       count < MQD_RECORD_ERROR_COUNT_MAX ? (uint32_t)count : MQD_RECORD_ERROR_COUNT_MAX,
                       (uint32_t)count);
    return false;
}

/* ---- checking ---- */

static void decompress_and_check(uint8_t codec, const uint8_t *bytes, uint32_t size_bytes, uint32_t size_max,
                                 int32_t record_count, struct check_result *result)
{
    int64_t records_bytes = size_bytes;
    result->error = 0;
    if (codec) {
        records_bytes = mqd_decompress(codec, bytes, size_bytes, size_max, &bytes, &result->reason);
        if (records_bytes < 0) {
            result->error = (int32_t)records_bytes;
            return;
        }
    }
    result->count = mqd_records_validate(bytes, (uint64_t)records_bytes, record_count, result->unkeyed,
                                         MQD_RECORD_ERROR_COUNT_MAX, &result->reason);
}

/* Runs on a thread of the pool. */
static int run_job(void *argument)
{
    struct mqd_check_job *job = argument;
    decompress_and_check(job->codec, job->records, job->size_bytes, MQD_RECORDS_BYTES_MAX, job->record_count,
                         &job->result);
    mqd_decompress_trim();
    return 0;
}

static bool can_decompress(struct mqd_reactor *r, uint8_t codec)
{
    if (mqd_check_always_by_acceptor)
        return false;
    if (mqd_codec_available(codec))
        return true;
    if (!(r->codecs_missing >> codec & 1))
        mqd_log(r, 4, 0, UINT32_MAX,
                "%s is not installed: the acceptor decompresses batches of its codec, which is slower",
                mqd_codec_library(codec));
    r->codecs_missing |= (uint8_t)(1u << codec);
    return false;
}

/* Returns NULL if there is no room; the append is then refused. */
static struct mqd_check *park(struct mqd_reactor *r, struct mqd_append *append, uint16_t kind, uint8_t compression)
{
    const struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, append->slot);
    bool must_copy = append->size_bytes <= MQD_CHECK_COPY_BYTES_MAX,
         counts_frame = !must_copy && !mqd_frame_is_large(r, append->offset);
    struct mqd_check *check =
        mqd_check_keep_transactional_id(r, append->request)
            ? mqd_check_take(r, must_copy ? append->size_bytes : 0, counts_frame ? append->size_bytes : 0)
            : NULL;
    if (!check) {
        append->message = mqd_check_too_many_reason;
        mqd_append_done(r, append, MQD_KAFKA_NOT_ENOUGH_REPLICAS);
        return NULL;
    }
    if (must_copy)
        mqd_check_move(r, append, check->offset);
    else
        mqd_frame_hold(r, append->offset);
    check->kind = kind;
    check->slot = append->slot;
    check->compression = compression;
    check->compression_level = mqd_load_relaxed(&slot->compression_level);
    check->message_bytes_max = mqd_load_relaxed(&slot->message_bytes_max);
    check->offset = append->offset;
    check->size_bytes = append->size_bytes;
    mqd_check_park(r, check, append);
    return check;
}

static bool start_job(struct mqd_reactor *r, struct mqd_check *check, const struct mqd_batch *batch)
{
    struct mqd_check_job *job = malloc(sizeof *job);
    if (!job)
        return false;
    job->codec = batch->attributes & 7;
    job->record_count = batch->record_count;
    job->records = r->options.arenas[r->options.self] + check->offset + MQD_BATCH_HEADER_BYTES;
    job->size_bytes = check->size_bytes - MQD_BATCH_HEADER_BYTES;
    if (mqd_poll_run(r->poll, -1, run_job, job, mqd_token(MQD_TOKEN_CHECK, mqd_check_token(r, check)))) {
        free(job);
        return false;
    }
    check->job = job;
    check->sent = 1;
    return true;
}

static void submit(struct mqd_reactor *r, struct mqd_append *append, uint16_t kind, uint8_t compression,
                   const struct mqd_batch *batch, bool by_acceptor)
{
    struct mqd_request *request = append->request;
    mqd_check_begin_order(r, append);
    struct mqd_check *check = park(r, append, kind, compression);
    if (check && !by_acceptor && start_job(r, check, batch))
        mqd_check_arm(r, check, request);
    else if (check)
        mqd_check_submit(r, check, request);
}

bool mqd_check_records(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch)
{
    const struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, append->slot);
    bool needs_keys = mqd_load_relaxed(&slot->compacted);
    uint8_t codec = batch->attributes & 7;
    uint8_t validation = mqd_load_relaxed(&slot->validation), compression = mqd_load_relaxed(&slot->compression);
    int32_t size_bytes_max = mqd_load_relaxed(&slot->message_bytes_max);
    bool scheduled = validation == MQD_VALIDATION_SCHEDULES;
    uint16_t kind = scheduled ? MQD_CHECK_SCHEDULES : needs_keys ? MQD_CHECK_RECORDS : MQD_CHECK_PARSE;
    struct check_result result;
    if (compression && codec == compression - 1)
        compression = 0; /* as in Kafka, a batch that already has the codec is stored unchanged, whatever its level */
    if (compression && size_bytes_max > 0 && batch->size_bytes > size_bytes_max)
        return true; /* the owner refuses the batch */
    if (!needs_keys && !compression && validation < (codec ? MQD_VALIDATION_ALL : MQD_VALIDATION_UNCOMPRESSED))
        return true;
    bool by_acceptor = scheduled || (codec && (compression || !can_decompress(r, codec)));
    if (!by_acceptor && (!codec || append->size_bytes <= INLINE_BYTES_MAX)) {
        decompress_and_check(codec, mqd_append_payload(r, append) + MQD_BATCH_HEADER_BYTES,
                             append->size_bytes - MQD_BATCH_HEADER_BYTES, INLINE_RECORDS_BYTES_MAX, batch->record_count,
                             &result);
        if (result.error != MQD_CODEC_TOO_LARGE) {
            if (!pass_or_refuse(r, append, needs_keys, &result))
                return false;
            if (!compression)
                return true;
            kind = MQD_CHECK_PARSE; /* the keys were checked above */
            by_acceptor = true;
        }
    }
    submit(r, append, kind, compression, batch, by_acceptor);
    return false;
}

void mqd_check_on_job(struct mqd_reactor *r, uint64_t token)
{
    struct mqd_check *check = mqd_check_by_token(r, token);
    struct mqd_check_job *job = check ? check->job : NULL;
    MQD_ASSERT(job, "T1: check %llx ended before its job", (unsigned long long)token);
    check->job = NULL;
    struct mqd_node *node = mqd_list_pop(&check->parked);
    if (node) {
        struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        struct mqd_topic_walk walk = {0};
        if (pass_or_refuse(r, append, check->kind == MQD_CHECK_RECORDS, &job->result))
            mqd_check_resume(r, append, &walk);
    }
    free(job);
    mqd_check_end(r, check);
}

/* ---- responses of the acceptor ---- */

/* Takes a piece of the batch that the acceptor has compressed. `total_bytes`: the batch's size; only
 * the first piece has it. */
static bool take_piece(struct mqd_reactor *r, struct mqd_check *check, const uint8_t *payload, uint32_t size_bytes,
                       int64_t total_bytes)
{
    if (check->buffer_bytes == 0 && (total_bytes <= MQD_BATCH_HEADER_BYTES || total_bytes > INT32_MAX ||
                                     !mqd_check_allocate_buffer(r, check, (uint32_t)total_bytes)))
        return false;
    if (!payload || size_bytes > check->buffer_bytes - check->buffer_filled)
        return false;
    memcpy(r->options.arenas[r->options.self] + check->buffer + check->buffer_filled, payload, size_bytes);
    check->buffer_filled += size_bytes;
    return true;
}

/* Replaces the append's bytes with those in the check's buffer, which the append then owns. */
static void take_over_buffer(struct mqd_reactor *r, struct mqd_check *check, struct mqd_append *append)
{
    mqd_append_unpin(r, append);
    append->offset = check->buffer;
    append->size_bytes = check->buffer_bytes;
    append->pinned = check->buffer_pin;
    check->buffer_bytes = 0;
}

static void on_compressed(struct mqd_reactor *r, struct mqd_check *check, struct mqd_append *append)
{
    struct mqd_topic_walk walk = {0};
    if (check->buffer_bytes == 0 || check->buffer_filled != check->buffer_bytes) {
        append->message = mqd_check_too_many_reason;
        mqd_append_done(r, append, MQD_KAFKA_NOT_ENOUGH_REPLICAS);
        return;
    }
    take_over_buffer(r, check, append);
    mqd_check_resume(r, append, &walk);
}

static void on_records(struct mqd_reactor *r, struct mqd_append *append, int32_t error, const uint8_t *payload,
                       uint32_t size_bytes)
{
    struct mqd_topic_walk walk = {0};
    struct mqd_check_refusal head;
    int32_t unkeyed[MQD_RECORD_ERROR_COUNT_MAX];
    if (!error) {
        mqd_check_resume(r, append, &walk);
        return;
    }
    mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
    bool complete = size_bytes >= sizeof head;
    if (complete)
        memcpy(&head, payload, sizeof head);
    complete = complete && head.index_count <= MQD_RECORD_ERROR_COUNT_MAX &&
               size_bytes == sizeof head + head.index_count * sizeof *unkeyed + head.message_bytes;
    if (!complete) {
        append->message = error == MQD_KAFKA_MESSAGE_TOO_LARGE
                              ? "the batch, converted to the topic's compression.type, is larger than max.message.bytes"
                              : "the batch's records could not be checked";
        mqd_append_done(r, append, (int16_t)error);
    } else if (head.index_count && !head.message_bytes) {
        memcpy(unkeyed, payload + sizeof head, head.index_count * sizeof *unkeyed);
        refuse_unkeyed(r, append, unkeyed, head.index_count, head.unkeyed_count);
    } else {
        struct mqd_refusal *refusal = mqd_refusal_new(r, append);
        const uint8_t *message = payload + sizeof head + head.index_count * sizeof *unkeyed;
        if (refusal) {
            refusal->index_count = head.index_count;
            memcpy(refusal->record_indexes, payload + sizeof head, head.index_count * sizeof *unkeyed);
            memcpy(refusal->message, message,
                   head.message_bytes < sizeof refusal->message ? head.message_bytes : sizeof refusal->message - 1);
            if (head.index_count)
                snprintf(refusal->record_message, sizeof refusal->record_message, "%s", refusal->message);
        }
        mqd_append_done(r, append, (int16_t)error);
    }
}

void mqd_check_take_piece(struct mqd_reactor *r, struct mqd_check *check, const uint8_t *payload, uint32_t size_bytes,
                          int64_t total_bytes)
{
    if (!mqd_list_empty(&check->parked))
        /* if there is out of memory for a piece, the batch stays incomplete */
        take_piece(r, check, payload, size_bytes, total_bytes);
}

void mqd_check_on_records(struct mqd_reactor *r, struct mqd_check *check, int32_t error, const uint8_t *payload,
                          uint32_t size_bytes)
{
    struct mqd_node *node = mqd_list_pop(&check->parked);
    if (!node)
        return;
    struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
    if (check->compression && !error)
        on_compressed(r, check, append);
    else
        on_records(r, append, error, payload, size_bytes);
}
