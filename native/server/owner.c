/* The owner of a partition: its single writer. Stages appends in arrival order, writes them once a
 * turn, publishes the new positions, and acknowledges the appends.
 *
 *   staged   in the order of their offsets; included in the next mqd_partition_write
 *   waiting  written and visible in the log, not yet below the high watermark; ordered by
 *            end_offset
 *
 * Order within a turn: each partition is written, then published; after all partitions come one
 * fence and the check for waiters. So either a reader that parks sees the new high watermark, or
 * the check sees the reader.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "log/planted_bugs.h"
#include "server/check/checks.h"
#include "server/reactor.h"
#include "server/redirect.h"
#include "server/slow/slow.h"
#include "server/slow/turn.h"
#include "wire/record_scan.h"

/* batches that their producer sent before it learned of a refusal arrive within this time */
#define OVERTAKING_MS 5000

static struct mqd_owned *owned_of(struct mqd_reactor *r, uint32_t slot)
{
    struct mqd_owned *owned = slot < MQD_PARTITION_SLOT_COUNT ? r->owned[slot] : NULL;
    return owned && !owned->closing ? owned : NULL;
}

static void release_peer_bytes(struct mqd_reactor *r, struct mqd_append *append)
{
    struct mqd_descriptor release = {.kind = MQD_LINK_RELEASE, .slot = append->slot, .token = append->peer_token};
    mqd_forward_send(r, append->peer, &release);
}

/* The append has been written, so its bytes are no longer needed: acknowledges it, or lets it wait
 * for the high watermark. */
static void on_append_written(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append,
                              const struct mqd_positions *positions)
{
    append->log_start_offset = positions->log_start_offset;
    mqd_list_remove(&append->node);
    if (!append->acks_all || append->end_offset <= positions->high_watermark) {
        mqd_append_done(r, append, append->error);
        return;
    }
    if (append->request)
        mqd_append_unpin(r, append);
    else
        release_peer_bytes(r, append);
    /* `append` nearly always comes last; only a duplicate batch has an older offset */
    struct mqd_node *previous = owned->waiting.previous;
    while (previous != &owned->waiting &&
           MQD_CONTAINER(previous, struct mqd_append, node)->end_offset > append->end_offset)
        previous = previous->previous;
    mqd_list_append(previous->next, &append->node); /* appending to a node inserts before it */
}

static void await_write(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append)
{
    mqd_list_append(&owned->staged, &append->node);
    if (!mqd_list_linked(&owned->write_node))
        mqd_list_append(&r->to_write, &owned->write_node);
}

/* Handles a marker that this log already has. To the coordinator, the refusal means that the
 * transaction has ended here. The next leader may not have the records above the high watermark, so
 * the refusal, like an acknowledgement, is sent only when all records now in the log are below
 * it. */
static void refuse_when_replicated(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append)
{
    mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
    append->error = MQD_KAFKA_INVALID_PRODUCER_EPOCH;
    append->end_offset = mqd_partition_staged_end(owned->partition);
    await_write(r, owned, append);
}

/* A client may send several batches without waiting for responses. If the first one arrives while
 * the partition has no owner, it is refused; a later batch may arrive when there is an owner again.
 * A log that does not know the producer accepts any sequence; the first batch, sent again, would
 * then always be out of order. So for a while after a refusal, an unknown producer's later batches
 * are refused too. (A Kafka broker closes its connections when it restarts, so that clients send
 * all batches again.) */
static bool may_overtake(struct mqd_reactor *r, const struct mqd_owned *owned, const struct mqd_append *append,
                         const struct mqd_batch *batch)
{
    if (batch->base_sequence <= 0 || append->stage_flags || batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL)
        return false;
    int64_t refused_ms = mqd_load_relaxed(&mqd_control_partition(r->options.control, append->slot)->refused_ms);
    return refused_ms && r->now_ms - refused_ms < OVERTAKING_MS &&
           mqd_partition_may_overtake(owned->partition, batch, r->wall_ms);
}

void mqd_owner_stage(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch, uint8_t *bytes,
                     bool patch_in_place)
{
    struct mqd_owned *owned = owned_of(r, append->slot);
    struct mqd_stage_result result;
    if (!owned) {
        mqd_append_done(r, append, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
        return;
    }
    int16_t error = 0;
    if (__builtin_expect(owned->replicated | owned->retiring | r->lease_lost, 0)) {
        error = mqd_leading_check_append(r, owned, append);
        if (!error && owned->retiring && mqd_redirect_take(r, owned, append, batch))
            return;
    }
    if (error) {
        mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
        mqd_append_done(r, append, error);
        return;
    }
    struct mqd_log_directory *dir = &r->log_dirs[owned->log_dir];
    if (dir->failed || dir->full) {
        append->message = dir->failed
                              ? "a log directory has failed"
                              : "the disk is full; space must be freed (retention, DeleteRecords, DeleteTopics)";
        mqd_append_done(r, append, MQD_KAFKA_STORAGE_ERROR);
        return;
    }
    if (may_overtake(r, owned, append, batch)) {
        mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
        append->message = "an earlier batch of the producer may have been refused: send it first";
        mqd_append_done(r, append, MQD_KAFKA_NOT_ENOUGH_REPLICAS);
        return;
    }
    error = mqd_partition_stage(owned->partition, batch, bytes, patch_in_place, append->stage_flags, append->guard,
                                r->wall_ms, &result);
    if (error == MQD_STAGE_FULL) { /* one write takes no more: writes what is staged, then stages again */
        mqd_owner_write_all(r);
        owned = owned_of(r, append->slot);
        error = owned ? mqd_partition_stage(owned->partition, batch, bytes, patch_in_place, append->stage_flags,
                                            append->guard, r->wall_ms, &result)
                      : MQD_KAFKA_STORAGE_ERROR;
    }
    if (error == MQD_STAGE_VERIFY) {
        if (append->request) {
            mqd_check_verify(r, append, result.guard);
        } else { /* the sender must verify the transaction */
            append->base_offset = result.guard;
            mqd_append_done(r, append, MQD_STAGE_VERIFY);
        }
        return;
    }
    if (error == MQD_KAFKA_INVALID_PRODUCER_EPOCH && append->stage_flags & MQD_STAGE_MARKER_BUMPED) {
        refuse_when_replicated(r, owned, append);
        return;
    }
    if (error) {
        mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
        append->message = result.message;
        mqd_append_done(r, append, error > 0 || error == MQD_STAGE_UNKNOWN ? error : MQD_KAFKA_STORAGE_ERROR);
        return;
    }
    if (append->request)
        mqd_slow_begin(r, append->request);
    append->base_offset = result.base_offset;
    append->log_append_time_ms = result.log_append_time_ms;
    append->end_offset = result.end_offset;
    if (result.duplicate && !result.left_out_count)
        mqd_stat(r, MQD_COUNT_DUPLICATES, 1);
    mqd_stat(r, MQD_COUNT_BATCHES_APPENDED, !result.duplicate);
    uint64_t written_count = (uint64_t)batch->record_count - result.left_out_count;
    mqd_stat(r, MQD_COUNT_RECORDS_APPENDED, result.duplicate ? 0 : written_count);
    mqd_stat(r, MQD_COUNT_RECORDS_DEDUPLICATED, result.left_out_count);
    mqd_stat(r, MQD_COUNT_BYTES_APPENDED, result.duplicate ? 0 : (uint64_t)batch->size_bytes);
    if (!result.duplicate)
        mqd_slot_count_in(mqd_control_partition(r->options.control, append->slot), written_count,
                          (uint64_t)batch->size_bytes);
    await_write(r, owned, append); /* also for a duplicate, because the original may be staged in this turn */
    if (append->ordered)
        mqd_check_end_order(r, append);
}

/* If a sender dies while its bytes are being written, its successor may overwrite them. No part of
 * this write is published yet, so the owner's process aborts, and its successor truncates the log
 * to the published end. */
static void abort_if_sender_died(struct mqd_reactor *r, const struct mqd_owned *owned)
{
    for (struct mqd_node *node = owned->staged.next; node != &owned->staged; node = node->next) {
        const struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        if (!append->request && mqd_load_acquire(&mqd_control_endpoint(r->options.control, append->peer)->generation) !=
                                    append->peer_generation) {
            fprintf(stderr,
                    "mqd-worker-%u: endpoint %u died while its batch was being written; restarting to truncate the "
                    "unpublished end\n",
                    r->options.self, append->peer);
            abort();
        }
    }
}

/* Whether the error is a shortage of file descriptors or memory: not a disk failure, and it may end
 * at any time. */
static bool is_shortage(const struct mqd_owned *owned, int error)
{
    return (error == EMFILE || error == ENFILE || error == ENOMEM) && !mqd_partition_fenced(owned->partition);
}

void mqd_owner_report_dir_full(struct mqd_reactor *r, const struct mqd_owned *owned, int error, const char *text)
{
    struct mqd_event event = {
        .kind = MQD_EVENT_LOG_DIR_FULL, .slot = owned->slot, .error = error, .log_dir = owned->log_dir};
    snprintf(event.text, sizeof event.text, "%.180s", text);
    struct mqd_log_directory *dir = &r->log_dirs[owned->log_dir];
    dir->full = true;
    if (!dir->full_reported)
        dir->full_reported = mqd_reactor_emit(r, &event);
}

static void on_write_failed(struct mqd_reactor *r, struct mqd_owned *owned, int error)
{
    /* if the partition is fenced, a partial write could not be removed, which more free space would
     * not repair */
    bool full = (error == ENOSPC || error == EDQUOT) && !mqd_partition_fenced(owned->partition);
    if (owned->followed)
        mqd_fetcher_on_written(r, owned, error);
    MQD_LIST_EACH(node, next, &owned->staged) {
        struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        append->message = full ? "the disk is full" : "writing to the log failed";
        append->base_offset = -1;
        mqd_append_done(r, append, MQD_KAFKA_STORAGE_ERROR);
    }
    if (full) {
        mqd_owner_report_dir_full(r, owned, error, mqd_error_message());
    } else if (is_shortage(owned, error)) {
        mqd_log(r, 3, 0, owned->slot, "a batch could not be written; its producer must retry: %s%s",
                mqd_error_message(), error == ENOMEM ? "" : "; raise the limit of open files (ulimit -n)");
    } else {
        mqd_owner_fence_dir(r, owned->log_dir, error, "write");
    }
}

/* A roll that fails and fences the partition may have created the new segment already, so readers
 * list the segments again. Called between mqd_turn_part_begin and mqd_turn_part_end. */
static int roll_in_part(struct mqd_reactor *r, struct mqd_owned *owned)
{
    int64_t began_ns = mqd_turn_now_ns();
    bool was_fenced = mqd_partition_fenced(owned->partition);
    int error = mqd_partition_roll(owned->partition, r->wall_ms) < 0 ? mqd_error_code() : 0;
    mqd_turn_add_time(r, MQD_TIME_LOOP_ALLOCATION, began_ns);
    bool fenced = error && !was_fenced && mqd_partition_fenced(owned->partition);
    if (!error || fenced) {
        mqd_fetch_add(&mqd_control_partition(r->options.control, owned->slot)->segments_generation, 1);
        mqd_fetch_add(&r->header->segments_generation, 1);
    }
    if (fenced)
        mqd_owner_fence_dir(r, owned->log_dir, error, "roll");
    if (!error) {
        mqd_stat(r, MQD_COUNT_ROLLS, 1);
        mqd_owner_publish(r, owned);
        if (mqd_partition_dirty(owned->partition))
            mqd_flush_request(r, owned);
        mqd_snapshot_begin_if_possible(r, owned);
    }
    return error;
}

int mqd_owner_roll(struct mqd_reactor *r, struct mqd_owned *owned)
{
    mqd_turn_part_begin(r);
    int error = roll_in_part(r, owned);
    mqd_turn_part_end(r);
    return error;
}

void mqd_owner_on_roll(struct mqd_reactor *r, uint32_t slot)
{
    struct mqd_owned *owned = slot < MQD_PARTITION_SLOT_COUNT ? r->owned[slot] : NULL;
    struct mqd_positions positions;
    if (!owned || owned->closing)
        return;
    mqd_partition_positions(owned->partition, &positions);
    if (owned->truncating || positions.log_end_segment == positions.log_end_offset ||
        !mqd_list_empty(&owned->staged)) /* staged batches are written first, in this turn */
        owned->roll_due = 1;
    else
        mqd_owner_roll(r, owned);
}

static int write_staged(struct mqd_reactor *r, struct mqd_partition *partition, bool *rolled)
{
    if (!mqd_turn_measured(r))
        return mqd_partition_write(partition, r->wall_ms, rolled);
    int64_t began_ns = mqd_turn_now_ns(), allocated_bytes = mqd_partition_allocated_bytes(partition);
    int result = mqd_partition_write(partition, r->wall_ms, rolled);
    bool allocates = *rolled || mqd_partition_allocated_bytes(partition) != allocated_bytes;
    mqd_turn_add_time(r, allocates ? MQD_TIME_LOOP_ALLOCATION : MQD_TIME_LOOP_WRITE, began_ns);
    return result;
}

static void write_partition(struct mqd_reactor *r, struct mqd_owned *owned)
{
    bool rolled = false;
    if (mqd_partition_staged_count(owned->partition) && write_staged(r, owned->partition, &rolled) < 0) {
        on_write_failed(r, owned, mqd_error_code());
        return;
    }
    if (r->log_dirs[owned->log_dir].failed) { /* only duplicates can be staged now, and no flush will complete them */
        on_write_failed(r, owned, EIO);
        return;
    }
    abort_if_sender_died(r, owned);
    bool created = mqd_partition_take_txn_index_created(owned->partition);
    /* must precede the publication of the positions, because readers that read up to them open the
     * new files */
    if (rolled || created) {
        mqd_fetch_add(&mqd_control_partition(r->options.control, owned->slot)->segments_generation, 1);
        mqd_fetch_add(&r->header->segments_generation, 1);
    }
    if (rolled) {
        mqd_stat(r, MQD_COUNT_ROLLS, 1);
        struct mqd_positions positions;
        mqd_partition_positions(owned->partition, &positions);
        struct mqd_event event = {.kind = MQD_EVENT_ROLLED,
                                  .slot = owned->slot,
                                  .log_dir = owned->log_dir,
                                  .offset = positions.log_end_segment};
        mqd_reactor_emit(r, &event);
        mqd_snapshot_begin_if_possible(r, owned);
    }
    if (owned->followed)
        mqd_fetcher_on_written(r, owned, 0);
    mqd_owner_publish(r, owned);
    struct mqd_positions positions;
    mqd_partition_positions(owned->partition, &positions);
    struct mqd_node staged;
    mqd_list_init(&staged);
    mqd_list_move_all(&staged, &owned->staged);
    MQD_LIST_EACH(node, next, &staged)
        on_append_written(r, owned, MQD_CONTAINER(node, struct mqd_append, node), &positions);
    if (mqd_partition_dirty(owned->partition))
        mqd_flush_request(r, owned);
    if (owned->roll_due) {
        owned->roll_due = 0;
        roll_in_part(r, owned);
    }
    mqd_preallocate_begin_if_possible(r, owned);
}

void mqd_owner_write_all(struct mqd_reactor *r)
{
    struct mqd_node *node;
    if (mqd_list_empty(&r->to_write))
        return;
    mqd_turn_part_begin(r);
    while ((node = mqd_list_pop(&r->to_write)))
        write_partition(r, MQD_CONTAINER(node, struct mqd_owned, write_node));
    mqd_turn_part_end(r);
}

/* Makes the partition's positions visible and acknowledges the appends that the high watermark has
 * passed. */
void mqd_owner_publish(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_positions positions;
    if (owned->truncating == MQD_TRUNCATION_UNDER_WAY)
        return; /* the positions are published when the truncation has ended */
    if (owned->replica)
        mqd_replication_update(r, owned);
    mqd_partition_positions(owned->partition, &positions);
    MQD_ASSERT(positions.last_stable_offset <= positions.high_watermark &&
                   positions.high_watermark <= positions.log_end_offset,
               "P5: slot %u: last stable offset %lld, high watermark %lld, log end %lld", owned->slot,
               (long long)positions.last_stable_offset, (long long)positions.high_watermark,
               (long long)positions.log_end_offset);
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, owned->slot);
    int32_t log_start_epoch = mqd_partition_log_start_epoch(owned->partition);
    if (mqd_load_relaxed(&slot->log_start_epoch) != log_start_epoch)
        mqd_store_relaxed(&slot->log_start_epoch, log_start_epoch);
    mqd_slot_publish(slot, &positions);
    if (owned->replicated)
        mqd_leading_on_publish(r, owned, &positions);
    if (positions.high_watermark == owned->high_watermark && positions.last_stable_offset == owned->last_stable_offset)
        return;
    owned->high_watermark = positions.high_watermark;
    owned->last_stable_offset = positions.last_stable_offset;
    if (!mqd_list_linked(&owned->publish_node))
        mqd_list_append(&r->to_wake, &owned->publish_node);
    MQD_LIST_EACH(node, next, &owned->waiting) {
        struct mqd_append *append = MQD_CONTAINER(node, struct mqd_append, node);
        if (append->end_offset > positions.high_watermark)
            break;
        __builtin_prefetch(next, 1); /* has waited so long that it is no longer in the cache */
        __builtin_prefetch(&MQD_CONTAINER(next, struct mqd_append, node)->end_offset, 1);
        mqd_append_done(r, append, r->lease_lost ? MQD_KAFKA_NOT_LEADER_OR_FOLLOWER : append->error);
    }
}

static void wake_slot(struct mqd_reactor *r, uint32_t slot)
{
    struct mqd_partition_slot *shared = mqd_control_partition(r->options.control, slot);
    if (mqd_load_relaxed(&shared->waiters) == 0)
        return;
    uint64_t waiters = mqd_exchange(&shared->waiters, 0);
    for (; waiters; waiters &= waiters - 1) {
        uint32_t worker = (uint32_t)__builtin_ctzll(waiters);
        if (worker == r->options.self) {
            mqd_fetch_wake_slot(r, slot);
        } else {
            struct mqd_descriptor notification = {.kind = MQD_LINK_HW_CHANGED, .slot = slot};
            mqd_forward_send(r, worker, &notification);
        }
    }
}

void mqd_owner_wake_slot(struct mqd_reactor *r, uint32_t slot)
{
    mqd_fence_full(); /* orders the stores that waiters must see before the check for waiters */
    wake_slot(r, slot);
}

void mqd_owner_wake_all(struct mqd_reactor *r)
{
    if (mqd_list_empty(&r->to_wake))
        return;
    mqd_fence_full(); /* orders all publishes before any check for waiters */
    struct mqd_node *node;
    while ((node = mqd_list_pop(&r->to_wake)))
        wake_slot(r, MQD_CONTAINER(node, struct mqd_owned, publish_node)->slot);
}

void mqd_owner_fail_all(struct mqd_reactor *r, struct mqd_owned *owned, int16_t error)
{
    MQD_LIST_EACH(node, next, &owned->waiting)
        mqd_append_done(r, MQD_CONTAINER(node, struct mqd_append, node), error);
}

/* A write or flush failed permanently: fences the directory, whose data can no longer be trusted.
 * Records below the high watermark can still be read. */
void mqd_owner_fence_dir(struct mqd_reactor *r, uint32_t log_dir, int error, const char *operation)
{
    struct mqd_log_directory *dir = &r->log_dirs[log_dir];
    if (dir->failed)
        return;
    dir->failed = !PLANTED_LOG_BUG(DIRECTORY_USED);
    struct mqd_event event = {.kind = MQD_EVENT_LOG_DIR_FAILED, .slot = UINT32_MAX, .error = error, .log_dir = log_dir};
    snprintf(event.text, sizeof event.text,
             "%s failed in %s: %s; its partitions are offline until the broker is restarted on a working disk",
             operation, dir->path ? dir->path : "?", strerror(error));
    mqd_reactor_emit(r, &event);
    for (uint32_t slot = 0; slot < r->owned_end; slot++) {
        struct mqd_owned *owned = r->owned[slot];
        if (!owned || owned->log_dir != log_dir ||
            (PLANTED_LOG_BUG(DIRECTORY_USED) && !mqd_partition_fenced(owned->partition)))
            continue;
        mqd_fetcher_unfollow(r, owned);
        if (owned->truncating != MQD_TRUNCATION_UNDER_WAY) /* otherwise this is done when the truncation has ended */
            mqd_partition_fence(owned->partition);
        mqd_store_release(&mqd_control_partition(r->options.control, slot)->state, (uint8_t)MQD_SLOT_OFFLINE);
        mqd_owner_fail_all(r, owned, MQD_KAFKA_STORAGE_ERROR);
        mqd_owner_wake_slot(r, slot);
        mqd_lookups_notify(r, slot);
        mqd_fetch_wake_followers(r, owned);
    }
}
