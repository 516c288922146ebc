/* Walks one segment when a log is opened; see log/recovery/tail.h. */
#include "log/recovery/tail.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "log/partition_follow.h"
#include "log/planted_bugs.h"

int mqd_tail_open(struct recovery *recovery, struct tail *tail, int64_t base_offset)
{
    char path[PATH_MAX];
    struct stat status;
    *tail = (struct tail){.fd = -1, .base_offset = base_offset, .next_offset = base_offset, .first_timestamp_ms = -1};
    mqd_index_init(&tail->index);
    if (mqd_segment_path(path, sizeof path, recovery->partition->path, base_offset, MQD_FILE_LOG) < 0)
        return -1;
    tail->fd = mqd_file_open(path, O_RDWR, 0);
    if (tail->fd < 0 && errno == EROFS) {
        tail->fd = mqd_file_open(path, O_RDONLY, 0);
        recovery->read_only = true;
    }
    if (tail->fd < 0 || fstat(tail->fd, &status) < 0)
        return mqd_error_system(errno, "cannot open %s", path);
    tail->file_bytes = status.st_size;
    return 0;
}

void mqd_tail_close(struct tail *tail)
{
    mqd_index_close_files(&tail->index);
    mqd_file_close(tail->fd);
    tail->fd = -1;
}

static void note_corrupt(struct recovery *recovery, const struct tail *tail, int64_t position)
{
    if (recovery->in_out->corrupt_position < 0) {
        recovery->in_out->corrupt_position = position;
        recovery->in_out->corrupt_segment = tail->base_offset;
    }
}

/* Adds a batch that belongs to the log. Returns -1 on disk failure. */
static int add_batch(struct recovery *recovery, struct tail *tail, const struct mqd_batch *batch, int64_t position)
{
    struct mqd_partition *partition = recovery->partition;
    if (position == 0)
        tail->first_timestamp_ms = batch->max_timestamp_ms;
    tail->next_offset = mqd_batch_end_offset(batch);
    tail->valid_bytes = position + batch->size_bytes;
    if (mqd_epochs_add(&partition->epochs, batch->partition_leader_epoch, batch->base_offset) < 0)
        return -1;
    if (mqd_index_add(&tail->index, tail->base_offset, partition->options.index_interval_bytes, batch,
                      (uint32_t)position) &&
        mqd_index_flush(&tail->index, partition->path, tail->base_offset) < 0 && !is_tolerable(errno))
        return mqd_error_system(errno, "%s: cannot write the index of segment %lld", partition->path,
                                (long long)tail->base_offset);
    if (position == tail->entry_position && position > 0)
        /* re-adds the time entry that was first added with this index entry */
        mqd_index_add_time_entry(&tail->index, tail->base_offset);
    return 0;
}

/* the last batch that the walk has read; it has not been added yet */
struct held_batch {
    struct mqd_batch batch;
    int64_t position;
    bool present;
};

/* C1: below the recovery point a header is trusted without the batch's CRC. But when the walk fails
 * after the batch, or the batch extends beyond what is trusted, the header itself may be wrong.
 * Then the CRC is checked; if it does not match, the walk steps back to before this batch. Returns
 * -1 on disk failure. */
static int check_held(struct mqd_walk *walk, struct held_batch *held, int64_t trusted_below)
{
    if (!held->present || PLANTED_LOG_BUG(UNCHECKED_LAST) || held->batch.base_offset >= trusted_below ||
        (!walk->reason && mqd_batch_end_offset(&held->batch) <= trusted_below))
        return 0;
    const char *reason = walk->reason;
    int valid = mqd_walk_check(walk, &held->batch, held->position);
    if (valid < 0)
        return -1;
    walk->reason = valid ? reason : "a batch's CRC is wrong";
    if (!valid) {
        walk->position = held->position;
        walk->next_offset = held->batch.base_offset;
        held->present = false;
    }
    return 0;
}

/* Handles the end of a walk. Returns 1 if the walk continues after damage that is left in place, 0
 * if it has ended, -1 on disk failure. */
static int handle_walk_end(struct recovery *recovery, struct tail *tail, struct mqd_walk *walk, int64_t trusted_below)
{
    if (!walk->reason) {
        tail->sound = true;
        return 0;
    }
    note_corrupt(recovery, tail, walk->position);
    bool is_end = walk->next_offset >= trusted_below || PLANTED_LOG_BUG(CUT_FLUSHED);
    if (is_end && (recovery->mode != MODE_CHECKED || recovery->cutting || !recovery->in_out->replicated))
        return 0;
    int found = mqd_walk_resync(walk);
    if (is_end) {
        tail->sound_after = found == 1;
        return found < 0 ? -1 : 0;
    }
    tail->unreadable = found == 0;
    return found;
}

/* Walks to the end of the file, to cut_offset, or to the first damage at or above trusted_below. */
static int tail_walk_from(struct recovery *recovery, struct tail *tail, struct mqd_walk *walk, int64_t trusted_below,
                          int64_t cut_offset)
{
    struct mqd_batch batch;
    struct held_batch held = {.present = false};
    int64_t position;
    for (;;) {
        int walk_result = mqd_walk_next(walk, &batch, &position);
        if (walk_result < 0 || (walk_result == 0 && check_held(walk, &held, trusted_below) < 0))
            return -1;
        if (held.present && add_batch(recovery, tail, &held.batch, held.position) < 0)
            return -1;
        held.present = false;
        if (walk_result == 0 && (walk_result = handle_walk_end(recovery, tail, walk, trusted_below)) == 1)
            continue;
        if (walk_result <= 0)
            return walk_result;
        if (mqd_batch_end_offset(&batch) > cut_offset)
            return 0;
        held = (struct held_batch){batch, position, true};
    }
}

/* Begins at an index entry that points to a real batch, otherwise at the segment's beginning. */
static int begin_walk(struct tail *tail, struct mqd_walk *walk, struct mqd_index_entry *start, int64_t crc_from_offset)
{
    struct mqd_batch batch;
    uint8_t header[MQD_BATCH_HEADER_BYTES];
    bool sound = start->position == 0;
    if (!sound && start->position <= tail->file_bytes - MQD_BATCH_HEADER_BYTES &&
        pread(tail->fd, header, sizeof header, start->position) == (ssize_t)sizeof header)
        sound = mqd_batch_decode(header, sizeof header, &batch) == 0 &&
                batch.base_offset == tail->base_offset + start->relative_offset;
    if (!sound) {
        mqd_index_init(&tail->index);
        *start = (struct mqd_index_entry){0, 0};
    }
    tail->next_offset = tail->base_offset + start->relative_offset;
    tail->valid_bytes = tail->entry_position = start->position;
    if (start->position > 0 && pread(tail->fd, header, sizeof header, 0) == (ssize_t)sizeof header &&
        mqd_batch_decode(header, sizeof header, &batch) == 0)
        tail->first_timestamp_ms = batch.max_timestamp_ms;
    return mqd_walk_begin(walk, tail->fd, tail->base_offset, start->position, tail->next_offset, tail->file_bytes,
                          crc_from_offset);
}

int mqd_tail_walk(struct recovery *recovery, struct tail *tail, struct bounds bounds)
{
    struct mqd_index_entry start;
    struct mqd_walk walk;
    if (mqd_index_load(&tail->index, recovery->partition->path, tail->base_offset, tail->file_bytes, bounds.index_end,
                       bounds.indexes_intact, &start) < 0 ||
        begin_walk(tail, &walk, &start, bounds.crc_from_offset) < 0)
        return -1;
    walk.gaps_allowed = recovery->partition->has_gaps;
    int result = tail_walk_from(recovery, tail, &walk, bounds.trusted_below, bounds.cut_offset);
    recovery->in_out->scanned_bytes += walk.read_bytes;
    mqd_walk_end(&walk);
    return result;
}

int mqd_tail_finish_indexes(struct recovery *recovery, struct tail *tail)
{
    int changed = mqd_index_finish_load(&tail->index, recovery->partition->path, tail->base_offset);
    if (changed < 0 && !is_tolerable(errno))
        return mqd_error_system(errno, "%s: cannot write the index of segment %lld", recovery->partition->path,
                                (long long)tail->base_offset);
    return changed == 1 && recovery->mode != MODE_CLEAN ? mqd_index_sync(recovery->partition->path, tail->base_offset)
                                                        : 0;
}

int mqd_tail_check_sealed(struct recovery *recovery, int64_t base_offset, int64_t next_base)
{
    struct tail tail;
    int64_t corrupt_position = recovery->in_out->corrupt_position, corrupt_segment = recovery->in_out->corrupt_segment;
    int result = mqd_tail_open(recovery, &tail, base_offset);
    if (result == 0)
        result = mqd_tail_walk(recovery, &tail,
                               (struct bounds){.crc_from_offset = INT64_MAX,
                                               .trusted_below = INT64_MAX,
                                               .index_end = next_base,
                                               .cut_offset = INT64_MAX,
                                               .indexes_intact = true});
    if (result == 0 && tail.sound && tail.next_offset < next_base && !recovery->partition->has_gaps)
        mqd_recovery_note_missing(recovery->in_out, tail.next_offset, next_base);
    if (result == 0 && recovery->mode != MODE_CLEAN)
        result = mqd_tail_finish_indexes(recovery, &tail);
    mqd_tail_close(&tail);
    if (recovery->mode != MODE_CHECKED) {
        recovery->in_out->corrupt_position = corrupt_position;
        recovery->in_out->corrupt_segment = corrupt_segment;
    }
    return result;
}
