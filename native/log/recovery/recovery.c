/* mqd_partition_open: finds the segments and the log's end, and ensures that everything is on disk.
 * Rules: log/recovery/recovery.h.
 *
 * Segments are handled in order. For those below the trusted boundary, only the index is completed;
 * the segment that contains the boundary is walked, and in checked mode so are all later ones. The
 * first segment whose end is damaged is truncated there and becomes the active one; later ones are
 * deleted.
 */
#include "log/recovery/recovery.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "log/compaction/compact.h"
#include "log/partition_follow.h"
#include "log/planted_bugs.h"
#include "log/recovery/tail.h"
#include "log/recovery/truncation.h"

/* ---- the active segment ---- */

/* Makes the tail the active segment, truncated to its sound part. Takes ownership of its fd, even
 * on failure. */
static int make_active(struct recovery *recovery, struct tail *tail, int64_t now_ms)
{
    struct mqd_partition *partition = recovery->partition;
    partition->active = (struct mqd_active){.fd = tail->fd,
                                            .base_offset = tail->base_offset,
                                            .size_bytes = tail->valid_bytes,
                                            .allocated_bytes = tail->valid_bytes,
                                            .first_timestamp_ms = tail->first_timestamp_ms,
                                            .first_append_ms = tail->valid_bytes == 0 ? -1 : now_ms,
                                            .index = tail->index,
                                            .txn_index = MQD_TXN_INDEX_CLOSED};
    /* The append time of the first batch is not stored; its timestamp is the best estimate that is
     * not in the future. */
    if (tail->valid_bytes > 0 && tail->first_timestamp_ms >= 0 && tail->first_timestamp_ms < now_ms)
        partition->active.first_append_ms = tail->first_timestamp_ms;
    partition->log_end_offset = tail->next_offset;
    partition->fenced = recovery->read_only;
    if (tail->file_bytes > tail->valid_bytes) {
        if (recovery->read_only)
            return mqd_error_set(
                EROFS, "%s: %lld bytes must be truncated, but the file system is read-only; remount it writable",
                partition->path, (long long)(tail->file_bytes - tail->valid_bytes));
        if (mqd_file_truncate(tail->fd, tail->valid_bytes) < 0)
            return mqd_error_system(errno, "%s: cannot truncate segment %lld", partition->path,
                                    (long long)tail->base_offset);
        recovery->in_out->truncated_bytes += tail->file_bytes - tail->valid_bytes;
        recovery->changed = true;
    }
    int changed = mqd_index_finish_load(&partition->active.index, partition->path, tail->base_offset);
    if (changed < 0 && !is_tolerable(errno))
        return mqd_error_system(errno, "%s: cannot write the index of segment %lld", partition->path,
                                (long long)tail->base_offset);
    recovery->changed |= changed == 1 && recovery->mode != MODE_CLEAN;
    mqd_index_close_files(&partition->active.index);
    return 0;
}

static int create_active(struct recovery *recovery, int64_t base_offset)
{
    struct mqd_partition *partition = recovery->partition;
    int fd = mqd_partition_create_log(partition, base_offset);
    if (fd < 0 || mqd_partition_push_segment(partition, base_offset) < 0) {
        int error = errno;
        mqd_file_close(fd);
        return mqd_error_system(error, "%s: cannot create segment %lld", partition->path, (long long)base_offset);
    }
    partition->active = (struct mqd_active){.fd = fd,
                                            .base_offset = base_offset,
                                            .first_timestamp_ms = -1,
                                            .first_append_ms = -1,
                                            .txn_index = MQD_TXN_INDEX_CLOSED};
    mqd_index_init(&partition->active.index);
    partition->log_end_offset = base_offset;
    partition->directory_dirty = true;
    return 0;
}

static int delete_from(struct recovery *recovery, uint32_t first)
{
    if (PLANTED_LOG_BUG(KEEP_LATER))
        return 0;
    /* from the end, so that the remaining segments never have a gap */
    for (uint32_t i = recovery->listing.log_count; i-- > first;) {
        if (mqd_segment_delete(recovery->partition->path, recovery->listing.logs[i],
                               &recovery->in_out->truncated_bytes) < 0)
            return -1;
        recovery->changed = true;
    }
    recovery->listing.log_count = recovery->listing.log_count < first ? recovery->listing.log_count : first;
    return 0;
}

/* ---- all segments ---- */

static struct bounds bounds_of(const struct recovery *recovery)
{
    int64_t recovery_point = recovery->in_out->recovery_point_offset;
    if (recovery->mode == MODE_CLEAN)
        return (struct bounds){.crc_from_offset = INT64_MAX,
                               .trusted_below = 0,
                               .index_end = INT64_MAX,
                               .cut_offset = INT64_MAX,
                               .indexes_intact = true};
    if (recovery->mode == MODE_TRUSTED)
        return (struct bounds){.crc_from_offset = INT64_MAX,
                               .trusted_below = 0,
                               .index_end = recovery->in_out->trusted_end_offset,
                               .cut_offset = recovery->in_out->trusted_end_offset,
                               .indexes_intact = true};
    if (recovery_point < 0)
        recovery_point = 0;
    return (struct bounds){.crc_from_offset = PLANTED_LOG_BUG(NO_SCAN) ? INT64_MAX : recovery_point,
                           .trusted_below = recovery_point,
                           .index_end = recovery_point,
                           .cut_offset = recovery->cut_offset,
                           .indexes_intact = false};
}

/* Whether segment i is sealed and wholly below the trusted boundary. */
static bool below_boundary(const struct recovery *recovery, uint32_t i)
{
    if (i + 1 == recovery->listing.log_count)
        return false;
    int64_t boundary = recovery->mode == MODE_CLEAN     ? INT64_MAX
                       : recovery->mode == MODE_TRUSTED ? recovery->in_out->trusted_end_offset
                                                        : recovery->in_out->recovery_point_offset;
    return recovery->listing.logs[i + 1] <= boundary;
}

/* Whether the log continues in segment i + 1 after a tail that ends at next_offset. Only compaction
 * leaves gaps. */
static bool log_continues(const struct recovery *recovery, const struct tail *tail, uint32_t i)
{
    if (!tail->sound || i + 1 == recovery->listing.log_count)
        return false;
    int64_t next_base = recovery->listing.logs[i + 1];
    return tail->next_offset == next_base || (recovery->partition->has_gaps && tail->next_offset < next_base);
}

/* C5: records that whole batches after the damage are about to be removed. */
static int note_shortened(const struct recovery *recovery, const struct tail *tail, uint32_t i)
{
    bool has_later_segments = i + 1 < recovery->listing.log_count;
    if (recovery->mode != MODE_CHECKED || recovery->cutting || !recovery->in_out->replicated ||
        PLANTED_LOG_BUG(NOT_SHORTENED) || !(tail->sound_after || has_later_segments))
        return 0;
    return mqd_recovery_note_shortened(recovery->partition->path);
}

/* C6: whether data that had been flushed is missing. */
static bool ends_too_early(const struct recovery *recovery, int64_t end_offset)
{
    return !recovery->cutting && !recovery->was_cut && !PLANTED_LOG_BUG(NOT_MISSING) &&
           end_offset < recovery->in_out->recovery_point_offset;
}

/* The log ends in the tail, which is segment i of the listing. Returns 1 when done; 0 if the data
 * that the mode relies on is not sound; -1 on error. Takes ownership of the tail's fd unless it
 * returns 0. */
static int finish_log(struct recovery *recovery, struct tail *tail, uint32_t i, int64_t now_ms)
{
    if (recovery->mode == MODE_CLEAN && !tail->sound)
        return 0;
    if (recovery->mode == MODE_TRUSTED &&
        (recovery->cutting ? recovery->in_out->corrupt_position >= 0
                           : tail->next_offset != recovery->in_out->trusted_end_offset))
        return 0;
    if (note_shortened(recovery, tail, i) < 0 || delete_from(recovery, i + 1) < 0) {
        mqd_tail_close(tail);
        return -1;
    }
    bool data_lost = ends_too_early(recovery, tail->next_offset);
    if (data_lost)
        mqd_recovery_note_missing(recovery->in_out, tail->next_offset, recovery->in_out->recovery_point_offset);
    if (!tail->unreadable && (!data_lost || recovery->in_out->has_other_replicas))
        return make_active(recovery, tail, now_ms) < 0 ? -1 : 1;
    int result = mqd_tail_finish_indexes(recovery, tail);
    mqd_tail_close(tail);
    return result < 0 || create_active(recovery, recovery->in_out->recovery_point_offset) < 0 ? -1 : 1;
}

/* Returns the same values as `finish_log`: 1, 0, or -1 for an error. */
static int recover_segments(struct recovery *recovery, int64_t now_ms)
{
    const struct mqd_listing *listing = &recovery->listing;
    struct mqd_partition *partition = recovery->partition;
    uint32_t first = 0;
    while (first + 1 < listing->log_count && listing->logs[first + 1] <= recovery->in_out->log_start_offset)
        first++; /* deleted by DeleteRecords or retention; only the files still exist */
    for (uint32_t i = first; i < listing->log_count; i++) {
        struct tail tail;
        if (mqd_partition_push_segment(partition, listing->logs[i]) < 0)
            return mqd_error_set(ENOMEM, "out of memory for a segment list");
        if (below_boundary(recovery, i)) {
            if (!recovery->cutting && mqd_tail_check_sealed(recovery, listing->logs[i], listing->logs[i + 1]) < 0)
                return -1;
            continue;
        }
        if (mqd_tail_open(recovery, &tail, listing->logs[i]) < 0 ||
            mqd_tail_walk(recovery, &tail, bounds_of(recovery)) < 0) {
            mqd_tail_close(&tail);
            return -1;
        }
        if (recovery->mode != MODE_CHECKED || !log_continues(recovery, &tail, i)) {
            int outcome = finish_log(recovery, &tail, i, now_ms);
            if (outcome == 0)
                mqd_tail_close(&tail);
            return outcome;
        }
        int result = mqd_tail_finish_indexes(recovery, &tail);
        mqd_tail_close(&tail);
        if (result < 0)
            return -1;
    }
    int64_t begin_offset = recovery->in_out->log_start_offset;
    if (ends_too_early(recovery, begin_offset)) {
        mqd_recovery_note_missing(recovery->in_out, begin_offset, recovery->in_out->recovery_point_offset);
        if (!recovery->in_out->has_other_replicas)
            begin_offset = recovery->in_out->recovery_point_offset;
    }
    return create_active(recovery, begin_offset) < 0 ? -1 : 1;
}

static int recover_log(struct recovery *recovery, int64_t now_ms)
{
    struct mqd_partition *partition = recovery->partition;
    recovery->mode = recovery->in_out->clean_shutdown            ? MODE_CLEAN
                     : recovery->in_out->trusted_end_offset >= 0 ? MODE_TRUSTED
                                                                 : MODE_CHECKED;
    int outcome = recover_segments(recovery, now_ms);
    if (outcome == 0 && recovery->cutting)
        return mqd_error_set(MQD_E_CORRUPT, "%s: damage at position %lld of segment %lld, below the truncation offset",
                             partition->path, (long long)recovery->in_out->corrupt_position,
                             (long long)recovery->in_out->corrupt_segment);
    if (outcome == 0) {
        recovery->mode = MODE_CHECKED;
        recovery->in_out->corrupt_position = recovery->in_out->corrupt_segment = recovery->in_out->missing_from = -1;
        partition->segment_count = 0;
        outcome = recover_segments(recovery, now_ms);
    }
    if (outcome < 0)
        return -1;
    /* C3: power failed after records had been deleted up to a log end that was not yet on disk. */
    if (recovery->in_out->log_start_offset > partition->log_end_offset && !PLANTED_LOG_BUG(REUSE_OFFSETS)) {
        mqd_file_close(partition->active.fd);
        partition->active.fd = -1;
        partition->segment_count = 0;
        recovery->changed = true;
        return create_active(recovery, recovery->in_out->log_start_offset);
    }
    return 0;
}

/* ---- opening ---- */

/* Called when the log start and log end are known and the log has been replayed: makes the
 * leader-epoch checkpoint agree with the log. */
static int update_epochs(struct recovery *recovery, bool changed)
{
    struct mqd_partition *partition = recovery->partition;
    if (!(mqd_epochs_cut(&partition->epochs, partition->log_start_offset, partition->log_end_offset) | changed))
        return 0;
    int fd = mqd_epochs_write_open(&partition->epochs, partition->path);
    if (fd < 0) {
        partition->epochs_unwritten = true;
        return is_tolerable(errno) ? 0 : mqd_error_system(errno, "%s: cannot write the leader epochs", partition->path);
    }
    recovery->changed = true;
    int error = mqd_file_sync(fd, false) < 0 ? errno : 0;
    mqd_file_close(fd);
    return error ? mqd_error_system(error, "%s: cannot flush the leader epochs", partition->path) : 0;
}

static bool same_epochs(const struct mqd_epochs *epochs, uint32_t count, int32_t last)
{
    return epochs->count == count && mqd_epochs_last(epochs) == last;
}

/* Restores the high watermark of a log with several replicas to the offset known to be committed;
 * the leader provides later ones. */
static int restore_high_watermark(struct mqd_partition *partition, int64_t offset)
{
    struct mqd_mark mark;
    if (mqd_partition_locate(partition, offset < partition->log_start_offset ? partition->log_start_offset : offset,
                             &mark) < 0)
        return -1;
    mqd_partition_set_replicated(partition, true);
    mqd_partition_reset_high_watermark(partition, &mark);
    return 0;
}

static int open_recovered(struct recovery *recovery, int64_t now_ms)
{
    struct mqd_partition *partition = recovery->partition;
    struct mqd_recovery *in_out = recovery->in_out;
    if (mqd_epochs_load(&partition->epochs, partition->path) < 0)
        return -1;
    uint32_t epoch_count = partition->epochs.count;
    int32_t epoch_last = mqd_epochs_last(&partition->epochs);
    if (recover_log(recovery, now_ms) < 0)
        return -1;
    partition->log_start_offset =
        in_out->log_start_offset > partition->segments[0] ? in_out->log_start_offset : partition->segments[0];
    partition->staged_end_offset = partition->log_end_offset;
    int64_t decided_below = in_out->replicated ? in_out->high_watermark : INT64_MAX;
    int replayed = mqd_recovery_replay(partition, &recovery->listing,
                                       recovery->mode == MODE_CHECKED ? bounds_of(recovery).trusted_below : INT64_MAX,
                                       decided_below, now_ms);
    recovery->changed |= replayed == 1;
    if (replayed < 0 || update_epochs(recovery, !same_epochs(&partition->epochs, epoch_count, epoch_last)) < 0)
        return -1;
    if (recovery->mode != MODE_CLEAN && !recovery->read_only && !PLANTED_LOG_BUG(NO_FLUSH) &&
        mqd_recovery_flush(partition, in_out, recovery->changed) < 0)
        return -1;
    partition->durable = partition->high_watermark = mqd_partition_end_mark(partition);
    if (mqd_recovery_load_dedup_ids(partition, decided_below, now_ms) < 0)
        return -1;
    if (in_out->replicated && !recovery->cutting && restore_high_watermark(partition, in_out->high_watermark) < 0)
        return -1;
    if (!recovery->cutting) /* otherwise take_over in truncation.c does this, after it has set the high watermark */
        mqd_partition_settle_transactions(partition);
    in_out->log_start_offset = partition->log_start_offset;
    in_out->log_end_offset = partition->log_end_offset;
    in_out->segment_count = (int32_t)partition->segment_count;
    in_out->last_leader_epoch = mqd_epochs_last(&partition->epochs);
    mqd_partition_check(partition);
    return 0;
}

/* Completes an interrupted truncation. Lowers the recovery point to the lowest offset to which the
 * log has been truncated since a checkpoint (log/recovery/truncation.h). */
static int resume_truncation(struct recovery *recovery)
{
    struct mqd_truncation_marks marks;
    struct mqd_recovery *in_out = recovery->in_out;
    uint32_t first = 0;
    if (mqd_truncation_load(recovery->partition->path, &marks) < 0)
        return -1;
    recovery->was_cut = marks.trusted_below != INT64_MAX;
    if (in_out->recovery_point_offset > marks.trusted_below && !PLANTED_LOG_BUG(OLD_POINT))
        in_out->recovery_point_offset = marks.trusted_below;
    if (!marks.pending)
        return 0;
    in_out->clean_shutdown = 0;
    if (marks.start_offset >= 0) {
        in_out->log_start_offset = marks.start_offset;
    } else {
        recovery->cut_offset = marks.cut_offset;
        while (first < recovery->listing.log_count && recovery->listing.logs[first] <= marks.cut_offset)
            first++;
    }
    if (in_out->trusted_end_offset > marks.cut_offset)
        in_out->trusted_end_offset = marks.cut_offset;
    return delete_from(recovery, first);
}

static struct mqd_partition *partition_new(const char *path, const struct mqd_log_options *options,
                                           int32_t leader_epoch, int64_t now_ms)
{
    struct mqd_partition *partition = calloc(1, sizeof *partition);
    if (!partition || !(partition->path = strdup(path))) {
        free(partition);
        mqd_error_set(ENOMEM, "out of memory for a partition");
        return NULL;
    }
    partition->active.fd = partition->active.index.fd = partition->active.index.time_fd =
        partition->active.txn_index.fd = partition->active.txn_index.sum_fd = -1;
    partition->preallocate_fd = partition->sync_directory_fd = -1;
    partition->snapshot_offset = partition->snapshot_previous = -1;
    partition->leader_epoch = leader_epoch;
    partition->last_write_ms = now_ms;
    mqd_partition_set_options(partition, options);
    return partition;
}

static void reset_results(struct mqd_recovery *in_out)
{
    in_out->log_start_offset = in_out->log_start_offset < 0 ? 0 : in_out->log_start_offset;
    in_out->truncated_bytes = in_out->scanned_bytes = 0;
    in_out->corrupt_position = in_out->corrupt_segment = in_out->missing_from = in_out->missing_to = -1;
}

struct mqd_partition *mqd_partition_open(const char *path, const struct mqd_log_options *options, int32_t leader_epoch,
                                         int64_t now_ms, struct mqd_recovery *in_out)
{
    struct mqd_partition *partition = partition_new(path, options, leader_epoch, now_ms);
    struct recovery recovery = {.partition = partition, .in_out = in_out, .cut_offset = INT64_MAX};
    if (!partition)
        return NULL;
    reset_results(in_out);
    int result = mqd_recovery_make_directory(path);
    partition->has_gaps = options->compacted || mqd_compact_has_gaps(path);
    if (result == 0)
        result = mqd_compact_recover(path);
    if (result == 0)
        result = mqd_listing_clean_and_read(&recovery.listing, path);
    if (result == 0)
        result = resume_truncation(&recovery);
    if (result == 0)
        result = open_recovered(&recovery, now_ms);
    if (result == 0)
        result = mqd_truncation_end(path, now_ms);
    mqd_listing_free(&recovery.listing);
    if (result == 0)
        return partition;
    mqd_partition_free(partition);
    return NULL;
}

struct mqd_partition *mqd_recovery_cut(const struct mqd_partition *old, struct mqd_listing *listing, int64_t cut_offset,
                                       int64_t now_ms, struct mqd_recovery *in_out)
{
    struct mqd_partition *partition = partition_new(old->path, &old->options, old->leader_epoch, now_ms);
    struct recovery recovery = {.partition = partition,
                                .in_out = in_out,
                                .listing = *listing,
                                .mode = MODE_TRUSTED,
                                .cut_offset = cut_offset,
                                .cutting = true};
    uint32_t first = 0;
    if (!partition)
        return NULL;
    reset_results(in_out);
    partition->has_gaps = old->has_gaps;
    while (first < listing->log_count && listing->logs[first] <= cut_offset)
        first++;
    int result = delete_from(&recovery, first);
    if (result == 0)
        result = open_recovered(&recovery, now_ms);
    listing->log_count = recovery.listing.log_count;
    if (result == 0)
        return partition;
    mqd_partition_free(partition);
    return NULL;
}
