/* Flushing, preallocation, and releasing the resources of an idle partition; see log/partition.h,
 * invariants P3 and P4.
 *
 * A sync covers up to three files in this order: waiting sealed files (S3), then the active .log;
 * and the directory when it has a new entry. It advances durable_offset to the last mark that it
 * covered. If more files wait, the partition stays dirty and the caller begins another sync.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "log/partition_state.h"
#include "log/planted_bugs.h"

/* after this time without a write, reserved blocks and index descriptors are released */
#define IDLE_MS 10000
#define PREALLOCATE_FAST_MS 1000  /* if a step is used up within this time, the next one is twice as large */
#define PREALLOCATE_SLOW_MS 10000 /* ... if not within this time, half as large */
/* after a full disk, the next attempt is made when this many more bytes have been written */
#define PREALLOCATE_PAUSE_BYTES (1 << 20)
#define BLOCK_BYTES 4096
#define VERIFICATION_MS 60000 /* coordinators answer within this time */

/* ---- sync ---- */

int mqd_partition_queue_sync(struct mqd_partition *partition, int fd, const struct mqd_mark *mark)
{
    if (partition->sync_queue_count < MQD_SYNC_QUEUE_MAX) {
        struct mqd_sync_item *item = &partition->sync_queue[partition->sync_queue_count++];
        *item = (struct mqd_sync_item){.fd = fd, .has_mark = mark != NULL, .segment = -1};
        if (mark)
            item->mark = *mark;
        return 0;
    }
    /* Segments are sealed faster than they are synced: this segment is flushed synchronously, and
     * its mark becomes valid once the marks before it are durable. The last item is never part of
     * the running sync, which covers at most three. */
    int error = mqd_file_sync(fd, false) < 0 ? errno : 0;
    mqd_file_close(fd);
    struct mqd_sync_item *last = &partition->sync_queue[MQD_SYNC_QUEUE_MAX - 1];
    if (!error && mark) {
        last->has_mark = true;
        last->mark = *mark;
    }
    if (error)
        mqd_partition_fence(partition);
    errno = error;
    return error ? -1 : 0;
}

bool mqd_partition_dirty(const struct mqd_partition *partition)
{
    return !partition->fenced &&
           (partition->sync_queue_count > 0 || partition->durable.offset < partition->log_end_offset);
}

int64_t mqd_partition_dirty_bytes(const struct mqd_partition *partition)
{
    int64_t clean_bytes = partition->durable.written_bytes > partition->deleted_up_to_bytes
                              ? partition->durable.written_bytes
                              : partition->deleted_up_to_bytes;
    return partition->written_bytes - clean_bytes;
}

void mqd_partition_forget_syncs(struct mqd_partition *partition)
{
    uint32_t kept_count = 0;
    if (partition->syncing)
        /* a running sync may cover these files: the file that was active when it began may be
         * sealed now */
        return;
    for (uint32_t i = 0; i < partition->sync_queue_count; i++) {
        const struct mqd_sync_item *item = &partition->sync_queue[i];
        if (item->segment < 0 || item->segment >= partition->segments[0]) {
            partition->sync_queue[kept_count++] = *item;
            continue;
        }
        mqd_file_close(item->fd);
        if (item->has_mark)
            partition->deleted_up_to_bytes = item->mark.written_bytes;
    }
    partition->sync_queue_count = kept_count;
}

bool mqd_partition_syncing(const struct mqd_partition *partition)
{
    return partition->syncing;
}

bool mqd_partition_has_waiting_segments(const struct mqd_partition *partition)
{
    for (uint32_t i = partition->sync_item_count; i < partition->sync_queue_count; i++)
        if (partition->sync_queue[i].has_mark)
            return true;
    return false;
}

bool mqd_partition_sync_queue_nearly_full(const struct mqd_partition *partition)
{
    return partition->sync_queue_count >= MQD_SYNC_QUEUE_MAX / 2;
}

int mqd_partition_sync_begin(struct mqd_partition *partition, struct mqd_sync_fd out[4])
{
    int count = 0;
    if (partition->syncing || !mqd_partition_dirty(partition))
        return 0;
    partition->sync_directory_fd = -1;
    if (partition->directory_dirty && !PLANTED_LOG_BUG(NO_ENTRY)) {
        partition->sync_directory_fd = mqd_file_open(partition->path, O_RDONLY | O_DIRECTORY, 0);
        if (partition->sync_directory_fd < 0) {
            int error = errno;
            mqd_error_system(error, "%s: cannot open the directory to flush it", partition->path);
            /* transient: still dirty, the next call tries again */
            if (error != EMFILE && error != ENFILE && error != ENOMEM)
                mqd_partition_fence(partition);
            return 0;
        }
    }
    partition->sync_mark = partition->durable;
    partition->sync_item_count = 0;
    while (count < 3 && partition->sync_item_count < partition->sync_queue_count) {
        const struct mqd_sync_item *item = &partition->sync_queue[partition->sync_item_count++];
        if (item->has_mark)
            partition->sync_mark = item->mark;
        out[count++] = (struct mqd_sync_fd){item->fd, false};
    }
    if (count < 3 && partition->sync_item_count == partition->sync_queue_count) {
        partition->sync_mark = mqd_partition_end_mark(partition);
        out[count++] = (struct mqd_sync_fd){partition->active.fd, false};
    }
    if (partition->sync_directory_fd >= 0) {
        out[count++] = (struct mqd_sync_fd){partition->sync_directory_fd, true};
        partition->directory_dirty = false;
    }
    partition->syncing = true;
    return count;
}

void mqd_partition_sync_done(struct mqd_partition *partition, int error)
{
    if (!partition->syncing)
        return;
    partition->syncing = false;
    mqd_file_close(partition->sync_directory_fd);
    partition->sync_directory_fd = -1;
    if (error && !PLANTED_LOG_BUG(FAILED_FLUSH)) {
        mqd_partition_fence(partition);
        return;
    }
    for (uint32_t i = 0; i < partition->sync_item_count; i++)
        mqd_file_close(partition->sync_queue[i].fd);
    partition->sync_queue_count -= partition->sync_item_count;
    memmove(partition->sync_queue, partition->sync_queue + partition->sync_item_count,
            partition->sync_queue_count * sizeof partition->sync_queue[0]);
    partition->sync_item_count = 0;
    if (PLANTED_LOG_BUG(COVER_LATER) && partition->sync_queue_count == 0)
        partition->sync_mark = mqd_partition_end_mark(partition);
    if (partition->sync_mark.offset > partition->durable.offset)
        partition->durable = partition->sync_mark;
    mqd_partition_forget_syncs(partition);
    mqd_partition_advance_marks(partition);
    mqd_partition_check(partition);
}

/* ---- preallocation ---- */

static int64_t round_up(int64_t value, int64_t unit)
{
    return unit <= 1 ? value : (value + unit - 1) / unit * unit;
}

/* An idle partition gets its first blocks only on its next write; for a busy partition,
 * preallocation stays half a step ahead. */
static bool preallocation_due(const struct mqd_partition *partition)
{
    const struct mqd_active *active = &partition->active;
    return !partition->preallocating && !partition->preallocate_refused && !partition->fenced &&
           partition->options.preallocate_bytes_max > 0 && active->size_bytes > 0 &&
           partition->written_bytes > partition->preallocate_above_bytes &&
           active->allocated_bytes < partition->options.segment_bytes &&
           active->allocated_bytes - active->size_bytes <= partition->preallocate_step / 2;
}

static int64_t next_step(const struct mqd_partition *partition)
{
    const struct mqd_log_options *options = &partition->options;
    int64_t step = partition->preallocate_step,
            elapsed_ms = partition->last_write_ms - partition->preallocation_begun_ms;
    if (step == 0)
        step = options->preallocate_bytes_min;
    else if (elapsed_ms < PREALLOCATE_FAST_MS)
        step *= 2;
    else if (elapsed_ms > PREALLOCATE_SLOW_MS)
        step /= 2;
    if (step < options->preallocate_bytes_min)
        step = options->preallocate_bytes_min;
    return step > options->preallocate_bytes_max ? options->preallocate_bytes_max : step;
}

bool mqd_partition_preallocate_begin(struct mqd_partition *partition, struct mqd_preallocation *out)
{
    if (!preallocation_due(partition))
        return false;
    struct mqd_active *active = &partition->active;
    int64_t step = next_step(partition),
            unit = partition->options.stripe_bytes > BLOCK_BYTES ? partition->options.stripe_bytes : BLOCK_BYTES;
    int64_t limit = round_up(partition->options.segment_bytes, BLOCK_BYTES),
            end = round_up(active->allocated_bytes + step, unit);
    if (end > limit)
        end = limit;
    if (end <= active->allocated_bytes)
        return false;
    int fd = fcntl(active->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return false;
    partition->preallocating = true;
    partition->preallocate_fd = fd;
    partition->preallocate_base = active->base_offset;
    partition->preallocate_end = end;
    partition->preallocate_step = step;
    partition->preallocation_begun_ms = partition->last_write_ms;
    *out = (struct mqd_preallocation){fd, active->allocated_bytes, end - active->allocated_bytes};
    return true;
}

/* If the segment has been sealed in the meantime, its reserved blocks are released here. A failure
 * costs only speed: the next write allocates blocks itself. */
void mqd_partition_preallocate_done(struct mqd_partition *partition, int error)
{
    if (!partition->preallocating)
        return;
    partition->preallocating = false;
    off_t size_bytes;
    if (partition->preallocate_base != partition->active.base_offset) {
        if ((size_bytes = lseek(partition->preallocate_fd, 0, SEEK_END)) >= 0)
            mqd_file_truncate(partition->preallocate_fd, size_bytes);
    } else if (error == 0) {
        if (partition->active.allocated_bytes < partition->preallocate_end)
            partition->active.allocated_bytes = partition->preallocate_end;
    } else if (error == EOPNOTSUPP || error == ENOSYS) {
        partition->preallocate_refused = true;
    } else {
        partition->preallocate_step = partition->options.preallocate_bytes_min;
        partition->preallocate_above_bytes = partition->written_bytes + PREALLOCATE_PAUSE_BYTES;
    }
    mqd_file_close(partition->preallocate_fd);
    partition->preallocate_fd = -1;
}

void mqd_partition_trim(struct mqd_partition *partition)
{
    struct mqd_active *active = &partition->active;
    bool allocating = partition->preallocating && partition->preallocate_base == active->base_offset;
    if (active->allocated_bytes > active->size_bytes && !allocating && !PLANTED_LOG_BUG(KEEP_RESERVED) &&
        mqd_file_truncate(active->fd, active->size_bytes) == 0)
        active->allocated_bytes = active->size_bytes;
}

/* ---- periodic work ---- */

bool mqd_partition_release_due(const struct mqd_partition *partition, int64_t now_ms)
{
    bool holds_resources = partition->active.allocated_bytes > partition->active.size_bytes ||
                           partition->active.index.fd >= 0 || partition->active.index.time_fd >= 0 ||
                           partition->active.txn_index.fd >= 0 || partition->stage;
    return holds_resources && partition->staged_count == 0 && !partition->fenced &&
           (!partition->preallocating || PLANTED_LOG_BUG(CUT_RESERVING)) &&
           now_ms - partition->last_write_ms > IDLE_MS && now_ms - partition->last_release_ms > IDLE_MS;
}

void mqd_partition_release_idle(struct mqd_partition *partition, int64_t now_ms)
{
    partition->last_release_ms = now_ms;
    mqd_partition_trim(partition);
    partition->preallocate_step = 0;
    partition->preallocate_above_bytes = partition->written_bytes;
    if (mqd_index_flush(&partition->active.index, partition->path, partition->active.base_offset) == 0)
        mqd_index_close_files(&partition->active.index);
    mqd_txn_index_close(&partition->active.txn_index);
    mqd_partition_stage_free(partition);
}

uint32_t mqd_partition_do_periodic_work(struct mqd_partition *partition, int64_t now_ms)
{
    if (partition->staged_count == 0 && partition->options.producer_id_expiration_ms > 0)
        mqd_producers_expire(&partition->producers, now_ms - partition->options.producer_id_expiration_ms);
    if (partition->verifications.entries)
        mqd_verifications_expire(&partition->verifications, now_ms - VERIFICATION_MS);
    mqd_partition_release_marks(partition);
    return partition->producers.count;
}
