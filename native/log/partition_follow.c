/* Appending batches from a leader: see log/partition_follow.h. Truncation:
 * log/recovery/truncation.c; high watermark: log/partition_marks.c. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "log/compaction/compact.h"
#include "log/partition_follow.h"
#include "log/partition_state.h"

#define CRC_FROM 21 /* the CRC covers the attributes and everything after them */
#define ATTRIBUTE_CONTROL 0x20

static int refuse(struct mqd_follow_result *out, int error, const char *reason)
{
    out->reason = reason;
    return error;
}

/* Checks that the batch continues the log. Before the first gap is written to the log, a file
 * records that the log has gaps, so that recovery does not mistake a gap for damage. The topic's
 * policy does not show whether gaps are possible, because the log may have been compacted under
 * another policy; but compaction leaves gaps only below the high watermark. */
static int check_continues(struct mqd_partition *partition, const struct mqd_batch *batch, int64_t gaps_below,
                           struct mqd_follow_result *out)
{
    int64_t end = partition->staged_end_offset;
    if (batch->base_offset == end)
        return MQD_FOLLOW_OK;
    if (batch->base_offset < end) {
        bool empty = partition->staged_count == 0 && partition->log_start_offset == partition->log_end_offset &&
                     partition->active.size_bytes == 0;
        if (empty && batch->base_offset == partition->active.base_offset && mqd_batch_end_offset(batch) > end)
            return MQD_FOLLOW_OK; /* the log was restarted to begin with this batch */
        out->next_offset = batch->base_offset;
        if (empty && mqd_batch_end_offset(batch) > end)
            return refuse(out, MQD_FOLLOW_BEFORE, "the leader's log start is inside a batch");
        return refuse(out, MQD_FOLLOW_OFFSET, "a batch begins below the end of the log");
    }
    if (batch->base_offset > gaps_below && !partition->has_gaps && !partition->options.compacted)
        return refuse(out, MQD_FOLLOW_OFFSET,
                      "offsets are missing before a batch, where compaction cannot have removed records");
    if (!partition->gaps_recorded && mqd_compact_note_gaps(partition->path) < 0)
        return refuse(out, MQD_FOLLOW_FAILED, "cannot record that the log has gaps");
    partition->has_gaps = partition->gaps_recorded = true;
    return MQD_FOLLOW_OK;
}

/* Decodes and checks the batch at the beginning of `bytes`. Returns 1; 0 if only the beginning of
 * the batch is there; or -1, with out->reason, if it is invalid. */
static int decode_batch(const uint8_t *bytes, uint64_t size_bytes, struct mqd_batch *batch,
                        struct mqd_follow_result *out)
{
    if (size_bytes < MQD_BATCH_HEADER_BYTES)
        return 0;
    if (mqd_batch_decode(bytes, size_bytes, batch) < 0)
        return refuse(out, -1, mqd_error_message());
    if ((uint64_t)batch->size_bytes > size_bytes)
        return 0;
    if (mqd_crc32c(0, bytes + CRC_FROM, (uint64_t)batch->size_bytes - CRC_FROM) != batch->crc)
        return refuse(out, -1, "CRC32C of a record batch does not match its bytes");
    return 1;
}

static int stage(struct mqd_partition *partition, const struct mqd_batch *batch, const uint8_t *bytes, int64_t now_ms,
                 struct mqd_follow_result *out)
{
    struct mqd_marker parsed, *marker = NULL;
    int64_t end = partition->staged_end_offset;
    if (partition->staged_count >= MQD_STAGE_COUNT_MAX)
        return MQD_FOLLOW_FULL;
    if (batch->attributes & ATTRIBUTE_CONTROL && batch->size_bytes <= MQD_MARKER_BYTES_MAX &&
        mqd_marker_parse(bytes, batch, &parsed) == 0)
        marker = &parsed;
    struct mqd_staged *staged = mqd_partition_stage_next(partition);
    if (!staged)
        return refuse(out, MQD_FOLLOW_FAILED, "no memory to stage a batch");
    partition->staged_end_offset = batch->base_offset;
    staged->undo.index = MQD_PRODUCER_NONE;
    staged->aborted.producer_id = -1;
    /* A control batch that is not a marker concerns no producer; recovery skips it in the same
     * way. */
    bool has_producer = batch->producer_id >= 0 && (!(batch->attributes & ATTRIBUTE_CONTROL) || marker);
    if (has_producer && mqd_partition_stage_producer(partition, staged, batch, marker, now_ms) < 0) {
        partition->staged_end_offset = end;
        return refuse(out, MQD_FOLLOW_FAILED, "out of memory for another producer");
    }
    if (partition->dedup && marker)
        mqd_ids_end_transaction(&partition->dedup->ids, batch->producer_id, marker->commit, batch->base_offset);
    else if (partition->dedup)
        mqd_dedup_learn(partition->dedup, batch, bytes);
    staged->rewritten = NULL;
    staged->bytes = (uint8_t *)bytes; /* never changed: header_bytes = 0 */
    staged->header_bytes = 0;
    staged->batch = *batch;
    partition->staged_end_offset = mqd_batch_end_offset(batch);
    partition->staged_count++;
    mqd_partition_check(partition);
    return MQD_FOLLOW_OK;
}

int mqd_partition_follow(struct mqd_partition *partition, const uint8_t *bytes, uint64_t size_bytes,
                         int32_t leader_epoch, int64_t gaps_below, int64_t now_ms, struct mqd_follow_result *out)
{
    struct mqd_batch batch;
    int error = partition->fenced ? MQD_FOLLOW_FAILED : MQD_FOLLOW_OK;
    *out = (struct mqd_follow_result){.next_offset = partition->staged_end_offset,
                                      .reason = error ? "the partition is fenced after an earlier failure" : NULL};
    while (error == MQD_FOLLOW_OK && out->taken_bytes < size_bytes) {
        int complete = decode_batch(bytes + out->taken_bytes, size_bytes - out->taken_bytes, &batch, out);
        if (complete == 0)
            break;
        if (complete < 0)
            error = MQD_FOLLOW_CORRUPT;
        else if (batch.partition_leader_epoch > leader_epoch || batch.partition_leader_epoch < 0)
            error = refuse(out, MQD_FOLLOW_EPOCH, "a batch's epoch is negative, or above the sending leader's");
        else
            error = check_continues(partition, &batch, gaps_below, out);
        if (error == MQD_FOLLOW_OK)
            error = stage(partition, &batch, bytes + out->taken_bytes, now_ms, out);
        if (error != MQD_FOLLOW_OK)
            break;
        out->taken_bytes += (uint64_t)batch.size_bytes;
        out->batch_count++;
        out->record_count += (uint64_t)batch.record_count;
        out->next_offset = partition->staged_end_offset;
    }
    return error;
}

/* ---- epochs and positions ---- */

const struct mqd_epoch *mqd_partition_epochs(const struct mqd_partition *partition, uint32_t *count)
{
    *count = partition->epochs.count;
    return partition->epochs.entries;
}

void mqd_partition_epoch_end(const struct mqd_partition *partition, int32_t epoch, int32_t *found_epoch,
                             int64_t *end_offset)
{
    mqd_replica_epoch_end(partition->epochs.entries, partition->epochs.count, partition->log_end_offset, epoch,
                          found_epoch, end_offset);
}

/* Walks from the index entry before `offset`, and sets *out to the end of the last batch that ends
 * at or below `offset`. */
static int walk_to(const struct mqd_partition *partition, int64_t segment, int64_t offset, struct mqd_mark *out)
{
    struct mqd_index_entry entry = {0, 0};
    struct mqd_batch batch;
    struct stat status;
    struct mqd_walk walk;
    char path[PATH_MAX];
    int64_t position;
    if (mqd_segment_path(path, sizeof path, partition->path, segment, MQD_FILE_LOG) < 0 ||
        mqd_index_lookup(partition->path, segment, offset, &entry) < 0)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) < 0) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        return mqd_error_system(error, "cannot read %s", path);
    }
    *out = (struct mqd_mark){segment + entry.relative_offset, segment, entry.position, 0};
    int walk_result =
        mqd_walk_begin(&walk, fd, segment, entry.position, segment + entry.relative_offset, status.st_size, INT64_MAX);
    walk.gaps_allowed = true;
    while (walk_result == 0 && (walk_result = mqd_walk_next(&walk, &batch, &position)) == 1 &&
           mqd_batch_end_offset(&batch) <= offset) {
        *out = (struct mqd_mark){mqd_batch_end_offset(&batch), segment, (uint32_t)(position + batch.size_bytes), 0};
        walk_result = 0;
    }
    mqd_walk_end(&walk);
    close(fd);
    return walk_result < 0 ? -1 : 0;
}

int mqd_partition_locate(const struct mqd_partition *partition, int64_t offset, struct mqd_mark *out)
{
    uint32_t i = partition->segment_count - 1;
    if (offset >= partition->log_end_offset) {
        *out = mqd_partition_end_mark(partition);
        return 0;
    }
    while (i > 0 && partition->segments[i] > offset)
        i--;
    if (offset <= partition->segments[i]) {
        *out = (struct mqd_mark){partition->segments[i], partition->segments[i], 0, 0};
        return 0;
    }
    return walk_to(partition, partition->segments[i], offset, out);
}
