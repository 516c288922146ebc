/* Staging, positions, options, log start; see log/partition.h. Writing and rolling:
 * log/partition_write.c; flushing and preallocation: log/partition_sync.c. */
#include <endian.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "log/partition_state.h"
#include "log/planted_bugs.h"

#define ATTRIBUTE_LOG_APPEND_TIME 0x08
#define ATTRIBUTE_TRANSACTIONAL 0x10
#define ATTRIBUTE_CONTROL 0x20
/* Positions of the header fields that the broker sets. */
#define AT_LEADER_EPOCH 12
#define AT_CRC 17
#define AT_ATTRIBUTES 21
#define AT_MAX_TIMESTAMP 35
#define AT_PRODUCER_ID 43

/* ---- staging area ---- */

struct mqd_staged *mqd_partition_stage_next(struct mqd_partition *partition)
{
    uint32_t i = partition->staged_count;
    if (!partition->stage && !(partition->stage = calloc(1, sizeof *partition->stage)))
        return NULL;
    struct mqd_staged **chunk = &partition->stage->chunks[i / MQD_STAGE_CHUNK_COUNT];
    if (!*chunk && !(*chunk = malloc(MQD_STAGE_CHUNK_COUNT * sizeof **chunk)))
        return NULL;
    return mqd_partition_staged_at(partition, i);
}

void mqd_partition_stage_reset(struct mqd_partition *partition)
{
    for (uint32_t i = 0; partition->staged_rewritten_count && i < partition->staged_count; i++)
        free(mqd_partition_staged_at(partition, i)->rewritten);
    partition->staged_rewritten_count = 0;
    partition->staged_count = partition->staged_abort_count = 0;
    partition->staged_end_offset = partition->log_end_offset;
}

void mqd_partition_unstage(struct mqd_partition *partition)
{
    for (uint32_t i = partition->staged_count; i-- > 0;)
        mqd_producers_undo(&partition->producers, &mqd_partition_staged_at(partition, i)->undo);
    if (partition->dedup)
        mqd_ids_cut(&partition->dedup->ids, partition->log_end_offset);
    mqd_partition_stage_reset(partition);
}

void mqd_partition_stage_free(struct mqd_partition *partition)
{
    struct mqd_stage *stage = partition->stage;
    for (uint32_t i = 0; stage && i < MQD_STAGE_COUNT_MAX / MQD_STAGE_CHUNK_COUNT; i++)
        free(stage->chunks[i]);
    free(stage);
    partition->stage = NULL;
}

/* ---- staging ---- */

/* Whether later_ms is after earlier_ms by more than limit_ms. A difference that overflows counts as
 * more. */
static bool too_far(int64_t later_ms, int64_t earlier_ms, int64_t limit_ms)
{
    int64_t difference;
    if (limit_ms == INT64_MAX || limit_ms < 0)
        return false;
    return __builtin_sub_overflow(later_ms, earlier_ms, &difference) ? later_ms > earlier_ms : difference > limit_ms;
}

/* Checks the first and the largest timestamp, which are in the header (-1 = the batch has none),
 * against the limits for CreateTime. The limits apply to client batches only: a coordinator may use
 * the clock of another host, and its batches (transaction markers, committed offsets) must always
 * be accepted. */
static bool timestamps_allowed(const struct mqd_log_options *options, const struct mqd_batch *batch, int64_t now_ms)
{
    const int64_t timestamps[2] = {batch->base_timestamp_ms, batch->max_timestamp_ms};
    for (int i = 0; i < 2; i++)
        if (timestamps[i] != -1 && (too_far(now_ms, timestamps[i], options->timestamp_before_max_ms) ||
                                    too_far(timestamps[i], now_ms, options->timestamp_after_max_ms)))
            return false;
    return true;
}

static int16_t stage_check(const struct mqd_partition *partition, const struct mqd_batch *batch, bool from_coordinator,
                           int64_t now_ms)
{
    const struct mqd_log_options *options = &partition->options;
    int64_t end_offset;
    if (partition->fenced)
        return MQD_KAFKA_STORAGE_ERROR;
    if (options->readonly && !from_coordinator)
        return MQD_KAFKA_POLICY_VIOLATION;
    if (options->max_message_bytes > 0 && batch->size_bytes > options->max_message_bytes)
        return MQD_KAFKA_MESSAGE_TOO_LARGE;
    if (batch->size_bytes > options->segment_bytes)
        return MQD_KAFKA_RECORD_LIST_TOO_LARGE;
    if ((batch->attributes & ATTRIBUTE_CONTROL) && !from_coordinator)
        return MQD_KAFKA_INVALID_RECORD;
    if ((batch->attributes & ATTRIBUTE_CONTROL) && batch->producer_id < 0)
        return MQD_KAFKA_INVALID_RECORD;
    if (batch->last_offset_delta < 0 ||
        __builtin_add_overflow(partition->staged_end_offset, (int64_t)batch->last_offset_delta + 1, &end_offset))
        return MQD_KAFKA_INVALID_RECORD;
    if (batch->producer_id >= 0 && batch->base_sequence < 0 && !from_coordinator)
        return MQD_KAFKA_INVALID_RECORD;
    if (!options->log_append_time && !from_coordinator && !timestamps_allowed(options, batch, now_ms))
        return MQD_KAFKA_INVALID_TIMESTAMP;
    return 0;
}

/* Sets the fields that the CRC covers, then the CRC, which covers everything after itself. The
 * records are read from `bytes`, because `header` may be a copy of the header alone. */
static void patch_crc_fields(uint8_t *header, const uint8_t *bytes, const struct mqd_batch *batch)
{
    uint16_t attributes = htobe16((uint16_t)batch->attributes);
    uint64_t timestamp = htobe64((uint64_t)batch->max_timestamp_ms),
             producer_id = htobe64((uint64_t)batch->producer_id);
    memcpy(header + AT_ATTRIBUTES, &attributes, sizeof attributes);
    memcpy(header + AT_MAX_TIMESTAMP, &timestamp, sizeof timestamp);
    memcpy(header + AT_PRODUCER_ID, &producer_id, sizeof producer_id);
    uint32_t crc = mqd_crc32c(0, header + AT_ATTRIBUTES, MQD_BATCH_HEADER_BYTES - AT_ATTRIBUTES);
    crc = htobe32(mqd_crc32c(crc, bytes + MQD_BATCH_HEADER_BYTES, (size_t)batch->size_bytes - MQD_BATCH_HEADER_BYTES));
    memcpy(header + AT_CRC, &crc, sizeof crc);
}

/* changes_crc: the CRC covers some of the changed bytes. */
static void stage_patch(struct mqd_staged *staged, bool patch_in_place, bool changes_crc)
{
    uint8_t *header = staged->bytes;
    staged->header_bytes = 0;
    if (!patch_in_place) {
        header = staged->header;
        staged->header_bytes = changes_crc ? MQD_BATCH_HEADER_BYTES : 16;
        memcpy(header, staged->bytes, staged->header_bytes);
    }
    uint64_t base_offset = htobe64((uint64_t)staged->batch.base_offset);
    uint32_t leader_epoch = htobe32((uint32_t)staged->batch.partition_leader_epoch);
    memcpy(header, &base_offset, sizeof base_offset);
    memcpy(header + AT_LEADER_EPOCH, &leader_epoch, sizeof leader_epoch);
    if (changes_crc)
        patch_crc_fields(header, staged->bytes, &staged->batch);
}

/* Called for a transactional batch that would begin a transaction: checks that the coordinator has
 * verified it (KIP-890). */
static int16_t check_verified(struct mqd_partition *partition, const struct mqd_batch *batch,
                              struct mqd_producer_batch_kind kind, int64_t guard, int64_t now_ms,
                              struct mqd_stage_result *result)
{
    if (guard == 0) {
        result->guard = mqd_verifications_begin(&partition->verifications, batch, now_ms);
        return result->guard ? MQD_STAGE_VERIFY : MQD_KAFKA_STORAGE_ERROR;
    }
    const struct mqd_verification *verification = mqd_verifications_find(&partition->verifications, batch, guard);
    if (!verification)
        return MQD_KAFKA_NOT_ENOUGH_REPLICAS;
    if (kind.from_zero && batch->base_sequence != 0 && !mqd_producers_has_sequences(&partition->producers, batch))
        return MQD_KAFKA_OUT_OF_ORDER_SEQUENCE_NUMBER;
    return batch->base_sequence > verification->lowest_sequence ? MQD_KAFKA_OUT_OF_ORDER_SEQUENCE_NUMBER : 0;
}

static int16_t check_producer(struct mqd_partition *partition, const struct mqd_batch *batch,
                              struct mqd_producer_batch_kind kind, int64_t guard, int64_t now_ms,
                              struct mqd_stage_result *result)
{
    int16_t error = mqd_producers_check(&partition->producers, batch, kind, &result->duplicate, &result->base_offset);
    if (__builtin_expect(kind.require_known, 0) && !error && !result->duplicate &&
        !mqd_producers_has_sequences(&partition->producers, batch))
        return MQD_STAGE_UNKNOWN;
    if (error || result->duplicate || kind.from_coordinator || !(batch->attributes & ATTRIBUTE_TRANSACTIONAL) ||
        !partition->options.transaction_verification ||
        mqd_producers_continues_transaction(&partition->producers, batch))
        return error;
    return check_verified(partition, batch, kind, guard, now_ms, result);
}

int mqd_partition_stage_producer(struct mqd_partition *partition, struct mqd_staged *staged,
                                 const struct mqd_batch *batch, const struct mqd_marker *marker, int64_t now_ms)
{
    staged->undo.index = MQD_PRODUCER_NONE;
    staged->aborted.producer_id = -1;
    if (batch->producer_id < 0)
        return 0;
    int64_t offset = partition->staged_end_offset;
    struct mqd_transactions *transactions = &partition->producers.transactions;
    if (mqd_producers_add(&partition->producers, batch, marker, offset, now_ms, &staged->undo) < 0)
        return -1;
    if (batch->attributes & ATTRIBUTE_TRANSACTIONAL)
        mqd_verifications_revoke(&partition->verifications, batch->producer_id);
    if (marker && !marker->commit && staged->undo.change == MQD_TRANSACTION_ENDED) {
        int64_t ongoing = mqd_transactions_first_ongoing(transactions);
        staged->aborted = (struct mqd_aborted){batch->producer_id,
                                               mqd_transaction_first_offset(transactions, staged->undo.transaction),
                                               offset, ongoing <= offset ? ongoing : offset + 1};
        partition->staged_abort_count++;
    }
    return 0;
}

/* Leaves out the records whose ids are known (log/dedup/dedup.h). If the batch is written without
 * them, *rewritten gets its new bytes, and `batch` is adjusted to them. The batch is a duplicate if
 * all records are left out and it has no sequence numbers to keep. */
static int16_t stage_dedup(struct mqd_partition *partition, struct mqd_batch *batch, const uint8_t *bytes,
                           int64_t now_ms, uint8_t **rewritten, struct mqd_stage_result *result)
{
    struct mqd_dedup_taken taken;
    if (!partition->dedup) { /* set_dedup ran out of memory */
        result->message = "out of memory for the ids of dedup.window.ms; the client may retry";
        return MQD_KAFKA_STORAGE_ERROR;
    }
    int16_t error = mqd_dedup_take(partition->dedup, batch, bytes, partition->staged_end_offset, now_ms, &taken);
    result->message = taken.message;
    if (error)
        return error;
    result->left_out_count = taken.duplicate_count;
    result->base_offset = taken.first_original_offset;
    result->end_offset = taken.original_end_offset;
    result->duplicate = taken.duplicate_count && !taken.bytes;
    if (taken.bytes) {
        batch->record_count -= (int32_t)taken.duplicate_count;
        batch->size_bytes = taken.size_bytes;
        *rewritten = taken.bytes;
    }
    return 0;
}

static void undo_dedup(struct mqd_partition *partition, uint8_t *rewritten)
{
    free(rewritten);
    if (partition->dedup)
        mqd_ids_cut(&partition->dedup->ids, partition->staged_end_offset);
}

int16_t mqd_partition_stage(struct mqd_partition *partition, const struct mqd_batch *sent, uint8_t *bytes,
                            bool patch_in_place, uint32_t flags, int64_t guard, int64_t now_ms,
                            struct mqd_stage_result *result)
{
    struct mqd_batch deduplicated;
    const struct mqd_batch *batch = sent;
    uint8_t *rewritten = NULL;
    bool from_coordinator = (flags & MQD_STAGE_COORDINATOR) != 0;
    struct mqd_marker parsed, *marker = NULL;
    *result = (struct mqd_stage_result){.base_offset = -1, .log_append_time_ms = -1};
    if (partition->staged_count >= MQD_STAGE_COUNT_MAX)
        return MQD_STAGE_FULL;
    int16_t error = stage_check(partition, batch, from_coordinator, now_ms);
    if (error == 0 && (batch->attributes & ATTRIBUTE_CONTROL)) {
        marker = &parsed;
        error = mqd_marker_parse(bytes, batch, marker) < 0 ? MQD_KAFKA_INVALID_RECORD : 0;
    }
    if (error == 0 && batch->producer_id >= 0)
        error = check_producer(partition, batch,
                               (struct mqd_producer_batch_kind){
                                   marker, from_coordinator, (flags & MQD_STAGE_MARKER_BUMPED) != 0,
                                   (flags & MQD_STAGE_REQUIRE_KNOWN) != 0, (flags & MQD_STAGE_FROM_ZERO) != 0},
                               guard, now_ms, result);
    if (error == 0 && !result->duplicate && partition->options.dedup_window_ms > 0 && !from_coordinator) {
        deduplicated = *sent;
        error = stage_dedup(partition, &deduplicated, bytes, now_ms, &rewritten, result);
        if (rewritten) {
            batch = &deduplicated;
            bytes = rewritten;
            patch_in_place = true;
        }
    }
    if (error || result->duplicate) {
        if (!result->left_out_count)
            result->end_offset = result->base_offset + batch->last_offset_delta + 1;
        return error;
    }
    struct mqd_staged *staged = mqd_partition_stage_next(partition);
    if (!staged || mqd_partition_stage_producer(partition, staged, batch, marker, now_ms) < 0) {
        undo_dedup(partition, rewritten);
        return MQD_KAFKA_STORAGE_ERROR;
    }
    staged->rewritten = rewritten;
    partition->staged_rewritten_count += rewritten != NULL;
    staged->bytes = bytes;
    staged->batch = *batch;
    staged->batch.base_offset = partition->staged_end_offset;
    staged->batch.partition_leader_epoch = partition->leader_epoch;
    /* The topic determines the timestamp type, not the producer: as in Kafka, the attribute is
     * overwritten. */
    staged->batch.attributes &= ~ATTRIBUTE_LOG_APPEND_TIME;
    if (partition->options.log_append_time) {
        staged->batch.attributes |= ATTRIBUTE_LOG_APPEND_TIME;
        staged->batch.max_timestamp_ms = result->log_append_time_ms = now_ms;
    }
    stage_patch(staged, patch_in_place,
                partition->options.log_append_time || staged->batch.attributes != batch->attributes ||
                    (flags & MQD_STAGE_REDIRECTED));
    if (partition->dedup && marker)
        mqd_ids_end_transaction(&partition->dedup->ids, batch->producer_id, marker->commit,
                                partition->staged_end_offset);
    /* a batch that lost all of its records gets the offset of an earlier record with the same id */
    if (!rewritten || batch->record_count)
        result->base_offset = partition->staged_end_offset;
    partition->staged_end_offset = result->end_offset = mqd_batch_end_offset(&staged->batch);
    partition->staged_count++;
    mqd_partition_check(partition);
    return 0;
}

uint32_t mqd_partition_staged_count(const struct mqd_partition *partition)
{
    return partition->staged_count;
}

/* ---- retired partitions (server/redirect.h) ---- */

int16_t mqd_partition_check_sequence(const struct mqd_partition *partition, const struct mqd_batch *batch,
                                     bool *duplicate, int64_t *base_offset)
{
    return mqd_producers_check(&partition->producers, batch, (struct mqd_producer_batch_kind){0}, duplicate,
                               base_offset);
}

void mqd_partition_note_refused(struct mqd_partition *partition, const struct mqd_batch *batch, int64_t now_ms)
{
    mqd_verifications_begin(&partition->verifications, batch, now_ms);
}

bool mqd_partition_refused_before(const struct mqd_partition *partition, const struct mqd_batch *batch)
{
    const struct mqd_verification *refused = mqd_verifications_find_producer(&partition->verifications, batch);
    /* a known producer's state determines the next sequence */
    return refused && batch->base_sequence > refused->lowest_sequence &&
           !mqd_producers_has_sequences(&partition->producers, batch);
}

bool mqd_partition_may_overtake(struct mqd_partition *partition, const struct mqd_batch *batch, int64_t now_ms)
{
    if (mqd_producers_has_sequences(&partition->producers, batch) || PLANTED_LOG_BUG(OVERTAKE))
        return false;
    const struct mqd_verification *refused = mqd_verifications_find_producer(&partition->verifications, batch);
    if (!refused)
        mqd_partition_note_refused(partition, batch, now_ms);
    return !refused || batch->base_sequence > refused->lowest_sequence;
}

bool mqd_partition_in_transaction(const struct mqd_partition *partition, int64_t producer_id)
{
    return mqd_producers_in_transaction(&partition->producers, producer_id);
}

int64_t mqd_partition_staged_end(const struct mqd_partition *partition)
{
    return partition->staged_end_offset;
}

/* ---- positions ---- */

struct mqd_mark mqd_partition_end_mark(const struct mqd_partition *partition)
{
    return (struct mqd_mark){partition->log_end_offset, partition->active.base_offset,
                             (uint32_t)partition->active.size_bytes, partition->written_bytes};
}

void mqd_partition_normalise_mark(const struct mqd_partition *partition, struct mqd_mark *mark)
{
    if (mark->offset == partition->active.base_offset) {
        mark->segment = partition->active.base_offset;
        mark->position = 0;
    } else if (mark->segment < partition->segments[0]) {
        mark->segment = partition->segments[0];
        mark->position = 0;
    }
}

void mqd_partition_advance_marks(struct mqd_partition *partition)
{
    struct mqd_mark candidate =
        partition->options.flush_on_ack ? partition->durable : mqd_partition_end_mark(partition);
    if (partition->replicated)
        mqd_partition_note_mark(partition);
    else if (candidate.offset > partition->high_watermark.offset)
        partition->high_watermark = candidate;
    mqd_partition_normalise_mark(partition, &partition->durable);
    mqd_partition_normalise_mark(partition, &partition->high_watermark);
    if (!partition->writing) /* a write that may be undone has not ended any transaction */
        mqd_partition_settle_transactions(partition);
}

void mqd_partition_settle_transactions(struct mqd_partition *partition)
{
    mqd_transactions_forget_decided(&partition->producers.transactions, partition->high_watermark.offset);
    if (partition->dedup)
        mqd_ids_decide_transactions(&partition->dedup->ids, partition->high_watermark.offset);
}

/* A transaction that began below the log start still limits the last stable offset. */
static int64_t last_stable_offset(const struct mqd_partition *partition)
{
    int64_t unstable = mqd_transactions_first_unstable(&partition->producers.transactions);
    if (unstable >= partition->high_watermark.offset)
        return partition->high_watermark.offset;
    return unstable > partition->log_start_offset ? unstable : partition->log_start_offset;
}

void mqd_partition_positions(const struct mqd_partition *partition, struct mqd_positions *out)
{
    *out = (struct mqd_positions){
        .log_start_offset = partition->log_start_offset,
        .high_watermark = partition->high_watermark.offset,
        .log_end_offset = partition->log_end_offset,
        .last_stable_offset = last_stable_offset(partition),
        .durable_offset = partition->durable.offset,
        .high_watermark_segment = partition->high_watermark.segment,
        .log_end_segment = partition->active.base_offset,
        .high_watermark_position = partition->high_watermark.position,
        .log_end_position = (uint32_t)partition->active.size_bytes,
    };
}

int64_t mqd_partition_log_end_offset(struct mqd_partition *partition)
{
    return partition->log_end_offset;
}

int32_t mqd_partition_log_start_epoch(const struct mqd_partition *partition)
{
    const struct mqd_epochs *epochs = &partition->epochs;
    uint32_t i = 0;
    if (epochs->count == 0 || partition->log_start_offset == partition->log_end_offset)
        return -1;
    while (i + 1 < epochs->count && epochs->entries[i + 1].start_offset <= partition->log_start_offset)
        i++;
    return epochs->entries[i].epoch;
}

uint32_t mqd_partition_producers(struct mqd_partition *partition, struct mqd_producer_view *out, uint32_t capacity)
{
    return mqd_producers_view(&partition->producers, out, capacity);
}

int64_t mqd_partition_allocated_bytes(const struct mqd_partition *partition)
{
    return partition->active.allocated_bytes;
}

bool mqd_partition_take_txn_index_created(struct mqd_partition *partition)
{
    bool created = partition->txn_index_created;
    partition->txn_index_created = false;
    return created;
}

/* ---- segments and log start ---- */

int mqd_partition_push_segment(struct mqd_partition *partition, int64_t base_offset)
{
    if (partition->segment_count == partition->segment_capacity) {
        uint32_t capacity = partition->segment_capacity ? partition->segment_capacity * 2 : 4;
        int64_t *segments = realloc(partition->segments, capacity * sizeof *segments);
        if (!segments) {
            errno = ENOMEM;
            return -1;
        }
        partition->segments = segments;
        partition->segment_capacity = capacity;
    }
    partition->segments[partition->segment_count++] = base_offset;
    return 0;
}

int mqd_partition_advance_start(struct mqd_partition *partition, int64_t offset)
{
    if (offset > partition->log_end_offset)
        offset = partition->log_end_offset;
    if (offset > partition->log_start_offset)
        partition->log_start_offset = offset;
    uint32_t dropped_count = 0;
    while (dropped_count + 1 < partition->segment_count &&
           partition->segments[dropped_count + 1] <= partition->log_start_offset)
        dropped_count++;
    if (dropped_count == 0)
        return 0;
    partition->segment_count -= dropped_count;
    memmove(partition->segments, partition->segments + dropped_count,
            partition->segment_count * sizeof partition->segments[0]);
    mqd_partition_forget_syncs(partition);
    mqd_partition_advance_marks(partition);
    mqd_partition_check(partition);
    return 1;
}

/* ---- options, fencing, snapshots ---- */

static int64_t at_least(int64_t value, int64_t least)
{
    return value < least ? least : value;
}

/* If dedup.window.ms is set while the log is open, only the ids of later records are known; when a
 * log is opened with this setting, its ids are read from the log. If memory for the ids runs out,
 * batches are refused until the settings are applied again. */
static void set_dedup(struct mqd_partition *partition)
{
    const struct mqd_log_options *options = &partition->options;
    if (partition->dedup && (options->dedup_window_ms <= 0 || !mqd_dedup_matches(partition->dedup, options))) {
        mqd_dedup_free(partition->dedup);
        partition->dedup = NULL;
    }
    if (options->dedup_window_ms <= 0)
        return;
    if (!partition->dedup)
        partition->dedup = mqd_dedup_new(options);
    if (partition->dedup) {
        partition->dedup->window_ms = options->dedup_window_ms;
        partition->dedup->ids.count_max = options->dedup_count_max;
    }
}

/* Clamps values that would break the arithmetic elsewhere; whether they are sensible is up to the
 * configuration. */
void mqd_partition_set_options(struct mqd_partition *partition, const struct mqd_log_options *options)
{
    struct mqd_log_options *clamped = &partition->options;
    *clamped = *options;
    if (clamped->segment_bytes <= 0 || clamped->segment_bytes > MQD_SEGMENT_BYTES_MAX)
        clamped->segment_bytes = MQD_SEGMENT_BYTES_MAX;
    clamped->segment_ms = clamped->segment_ms <= 0 ? INT64_MAX : clamped->segment_ms;
    clamped->segment_jitter_ms = clamped->segment_jitter_ms >= clamped->segment_ms
                                     ? clamped->segment_ms - 1
                                     : at_least(clamped->segment_jitter_ms, 0);
    clamped->index_interval_bytes = (int32_t)at_least(clamped->index_interval_bytes, 0);
    clamped->preallocate_bytes_max = at_least(clamped->preallocate_bytes_max, 0);
    clamped->preallocate_bytes_min = at_least(clamped->preallocate_bytes_min, 4096);
    clamped->stripe_bytes = at_least(clamped->stripe_bytes, 0);
    clamped->producer_id_count_max = (int32_t)at_least(clamped->producer_id_count_max, 1);
    set_dedup(partition);
    if (partition->segment_count)
        mqd_partition_advance_marks(partition);
}

const struct mqd_log_options *mqd_partition_options(const struct mqd_partition *partition)
{
    return &partition->options;
}

void mqd_partition_set_leader_epoch(struct mqd_partition *partition, int32_t leader_epoch)
{
    partition->leader_epoch = leader_epoch;
}

int32_t mqd_partition_leader_epoch(const struct mqd_partition *partition)
{
    return partition->leader_epoch;
}

const char *mqd_partition_path(const struct mqd_partition *partition)
{
    return partition->path;
}

bool mqd_partition_fenced(const struct mqd_partition *partition)
{
    return partition->fenced;
}

void mqd_partition_fence(struct mqd_partition *partition)
{
    partition->fenced = true;
}

void mqd_partition_rotate_snapshots(struct mqd_partition *partition, int64_t offset)
{
    char path[PATH_MAX];
    if (partition->snapshot_previous >= 0 &&
        mqd_segment_path(path, sizeof path, partition->path, partition->snapshot_previous, MQD_FILE_SNAPSHOT) == 0)
        mqd_file_unlink(path);
    partition->snapshot_previous = partition->snapshot_offset;
    partition->snapshot_offset = offset;
}

/* A snapshot is due when producers changed, or when a segment was sealed since the last one: even
 * an empty snapshot saves recovery from walking the log before it. */
uint8_t *mqd_partition_snapshot(struct mqd_partition *partition, size_t *size_bytes, int64_t *offset)
{
    bool changed = partition->producers.change_count != partition->snapshot_change_count;
    if (partition->staged_count > 0 || partition->log_end_offset == partition->snapshot_offset ||
        (!changed && partition->snapshot_offset >= partition->active.base_offset) || partition->log_end_offset == 0)
        return NULL;
    uint8_t *bytes = mqd_producers_encode(&partition->producers, partition->log_end_offset, size_bytes);
    if (!bytes)
        return NULL;
    partition->snapshot_change_count = partition->producers.change_count;
    *offset = partition->log_end_offset;
    mqd_partition_rotate_snapshots(partition, *offset);
    return bytes;
}
