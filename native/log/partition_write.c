/* Writing the staged batches, rolling, and undoing both when the disk refuses a write; see
 * log/partition.h, invariant P2.
 *
 * mqd_partition_write, in order:
 *   1  the new leader epoch, if any, into the file leader-epoch-checkpoint
 *   2  per segment: roll, one pwritev, aborted transactions into the .txnindex, index entries in
 *      memory
 *   3  commit
 *
 * Either all staged batches are written or none is: when a later step fails, segments begun by this
 * write are deleted, the old one is truncated and its state restored.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "log/partition_state.h"
#include "log/planted_bugs.h"

#define GATHER_BYTES (64 * 1024)
#define GATHER_BATCH_BYTES 4096

/* The state before a write that takes several steps, so that the steps can be undone. */
struct saved_state {
    bool saved;
    struct mqd_active active;
    uint32_t segment_count, sync_queue_count;
    struct mqd_sync_item sync_queue_last; /* if the queue is full, the write may change the mark of this item */
    int64_t log_end_offset, written_bytes;
    struct mqd_mark durable, high_watermark;
};

/* ---- rolling ---- */

int mqd_partition_create_log(const struct mqd_partition *partition, int64_t base_offset)
{
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, partition->path, base_offset, MQD_FILE_LOG) < 0) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return mqd_file_open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
}

/* Takes the index file's descriptor, to flush it; reopens the file if it was closed since its last
 * write. Returns -1 if there is no such file or it cannot be opened. It is then not flushed, and
 * recovery after a power failure, which checks every index, recreates the missing entries. */
static int take_index_fd(struct mqd_partition *partition, int *fd, uint32_t file_bytes, enum mqd_file_kind kind)
{
    char path[PATH_MAX];
    int open_fd = *fd;
    *fd = -1;
    if (open_fd >= 0 || file_bytes == 0)
        return open_fd;
    if (mqd_segment_path(path, sizeof path, partition->path, partition->active.base_offset, kind) < 0)
        return -1;
    return mqd_file_open(path, O_RDWR, 0);
}

/* Queues a file of the active segment for the next sync. */
static int queue_file(struct mqd_partition *partition, int fd, enum mqd_file_kind kind, const struct mqd_mark *mark)
{
    uint32_t count = partition->sync_queue_count;
    int result = mqd_partition_queue_sync(partition, fd, mark);
    if (partition->sync_queue_count > count) {
        partition->sync_queue[count].segment = partition->active.base_offset;
        partition->sync_queue[count].kind = kind;
    }
    return result;
}

/* Queues the files of the sealed segment for the next sync; the indexes first, so that a durable
 * segment has durable indexes (S3). */
static int queue_sealed(struct mqd_partition *partition)
{
    struct mqd_active *active = &partition->active;
    struct mqd_mark end = mqd_partition_end_mark(partition);
    int fd = take_index_fd(partition, &active->index.fd, active->index.file_bytes, MQD_FILE_INDEX);
    if (fd >= 0 && queue_file(partition, fd, MQD_FILE_INDEX, NULL) < 0)
        return -1;
    fd = take_index_fd(partition, &active->index.time_fd, active->index.time_file_bytes, MQD_FILE_TIME_INDEX);
    if (fd >= 0 && queue_file(partition, fd, MQD_FILE_TIME_INDEX, NULL) < 0)
        return -1;
    fd = active->fd;
    active->fd = -1;
    return queue_file(partition, fd, MQD_FILE_LOG, &end);
}

int mqd_partition_roll_active(struct mqd_partition *partition)
{
    struct mqd_active *active = &partition->active;
    if (active->size_bytes == 0)
        return 0;
    if (mqd_index_seal(&active->index, partition->path, active->base_offset) < 0)
        return -1;
    mqd_partition_trim(partition);
    int fd = mqd_partition_create_log(partition, partition->log_end_offset);
    if (fd < 0)
        return -1;
    if (mqd_partition_push_segment(partition, partition->log_end_offset) < 0) {
        close(fd);
        return -1;
    }
    partition->directory_dirty = true;
    int error = queue_sealed(partition) < 0 ? errno : 0;
    mqd_txn_index_close(&active->txn_index); /* S5: its unflushed part is in the queue */
    /* the index files are still open if a flush failed before they were queued */
    mqd_index_close_files(&active->index);
    mqd_file_close(active->fd);
    *active = (struct mqd_active){.fd = fd,
                                  .base_offset = partition->log_end_offset,
                                  .first_timestamp_ms = -1,
                                  .first_append_ms = -1,
                                  .txn_index = MQD_TXN_INDEX_CLOSED};
    mqd_index_init(&active->index);
    mqd_partition_advance_marks(partition);
    errno = error;
    return error ? -1 : 0;
}

int mqd_partition_roll(struct mqd_partition *partition, int64_t now_ms)
{
    if (partition->fenced) {
        errno = EIO;
        return mqd_error_set(EIO, "%s: fenced after an earlier failure; restart the worker once the disk is repaired",
                             partition->path);
    }
    if (mqd_partition_roll_active(partition) == 0)
        return 0;
    int error = errno;
    mqd_error_system(error, "%s: cannot start a new segment", partition->path);
    errno = error;
    return -1;
}

/* Differs between partitions, and is always the same for one segment. */
static int64_t jitter_of(const struct mqd_partition *partition, int64_t base_offset)
{
    if (partition->options.segment_jitter_ms <= 0)
        return 0;
    uint64_t hash = (uint64_t)base_offset + 0x9e3779b97f4a7c15ull;
    for (const char *at = partition->path; *at; at++)
        hash = (hash ^ (uint8_t)*at) * 0x100000001b3ull;
    return (int64_t)((hash >> 17) % (uint64_t)partition->options.segment_jitter_ms);
}

/* Whether the segment is too old. As in Kafka, its age is measured by the timestamps of the records
 * if they have any, and by the clock, so that old records do not keep a segment open. */
static bool too_old(const struct mqd_partition *partition, const struct mqd_active *segment, int64_t timestamp_ms,
                    int64_t now_ms)
{
    int64_t age;
    int64_t limit = partition->options.segment_ms;
    if (limit == INT64_MAX)
        return false;
    limit -= jitter_of(partition, segment->base_offset);
    if (segment->first_append_ms >= 0 && now_ms - segment->first_append_ms > limit)
        return true;
    if (segment->first_timestamp_ms < 0 || timestamp_ms < segment->first_timestamp_ms)
        return false;
    return __builtin_sub_overflow(timestamp_ms, segment->first_timestamp_ms, &age) || age > limit;
}

static bool must_roll(const struct mqd_partition *partition, const struct mqd_active *segment,
                      const struct mqd_batch *batch, int64_t now_ms)
{
    return segment->size_bytes > 0 && (segment->size_bytes + batch->size_bytes > partition->options.segment_bytes ||
                                       mqd_batch_end_offset(batch) - 1 - segment->base_offset > INT32_MAX ||
                                       too_old(partition, segment, batch->max_timestamp_ms, now_ms));
}

/* ---- writing to one segment ---- */

/* Returns how many staged batches, starting with number `first`, go into one segment; sets *roll to
 * whether that must be a new segment. `shadow` simulates the segment's growth (its index is not
 * used). */
static uint32_t plan_run(struct mqd_partition *partition, uint32_t first, int64_t now_ms, bool *roll)
{
    struct mqd_active shadow;
    memcpy(&shadow, &partition->active, offsetof(struct mqd_active, index));
    const struct mqd_batch *batch = &mqd_partition_staged_at(partition, first)->batch;
    *roll = must_roll(partition, &shadow, batch, now_ms) ||
            (shadow.size_bytes > 0 && mqd_index_full(&partition->active.index, MQD_STAGE_COUNT_MAX));
    if (*roll)
        shadow =
            (struct mqd_active){.base_offset = batch->base_offset, .first_timestamp_ms = -1, .first_append_ms = -1};
    uint32_t count = 0;
    for (; first + count < partition->staged_count; count++) {
        batch = &mqd_partition_staged_at(partition, first + count)->batch;
        if (must_roll(partition, &shadow, batch, now_ms))
            break;
        if (shadow.size_bytes == 0) {
            shadow.first_timestamp_ms = batch->max_timestamp_ms;
            shadow.first_append_ms = now_ms;
        }
        shadow.size_bytes += batch->size_bytes;
    }
    return count;
}

/* One system call, of at most MQD_WRITE_BYTES_MAX. */
static ssize_t write_some(int fd, struct iovec *iov, int count, int64_t position)
{
    size_t room_bytes = MQD_WRITE_BYTES_MAX, cut_bytes = 0;
    int used_count = 0;
    while (used_count < count && iov[used_count].iov_len <= room_bytes)
        room_bytes -= iov[used_count++].iov_len;
    if (used_count < count && room_bytes) {
        cut_bytes = iov[used_count].iov_len - room_bytes;
        iov[used_count++].iov_len = room_bytes;
    }
    ssize_t written = mqd_file_pwritev(fd, iov, used_count, position);
    iov[used_count - 1].iov_len += cut_bytes;
    return written;
}

/* Returns 0, or -1 with errno after truncating the file; if the truncation fails, the partition is
 * fenced. */
static int write_all(struct mqd_partition *partition, struct iovec *iov, int count)
{
    int64_t position = partition->active.size_bytes;
    int error = 0;
    while (count > 0 && !error) {
        ssize_t written = write_some(partition->active.fd, iov, count, position);
        if (written <= 0)
            error = written < 0 ? errno : EIO;
        for (position += written > 0 ? written : 0; written > 0 && count > 0;) {
            size_t part = (size_t)written < iov->iov_len ? (size_t)written : iov->iov_len;
            iov->iov_base = (char *)iov->iov_base + part;
            iov->iov_len -= part;
            written -= (ssize_t)part;
            if (iov->iov_len == 0)
                iov++, count--;
        }
    }
    if (!error)
        return 0;
    partition->active.allocated_bytes = partition->active.size_bytes;
    if (!PLANTED_LOG_BUG(KEEP_TORN) && mqd_file_truncate(partition->active.fd, partition->active.size_bytes) < 0) {
        error = errno;
        mqd_partition_fence(partition);
    }
    errno = error;
    return -1;
}

/* The iovecs of one write. An iovec costs the kernel about half a microsecond, more than copying a
 * small batch, so neighbouring batches of up to GATHER_BATCH_BYTES are joined in a buffer on the
 * stack while it has room. Batches that are contiguous in memory, as they are in the file (a
 * follower's), share one iovec without copying. */
struct gather {
    struct iovec iov[2 * MQD_STAGE_COUNT_MAX];
    int count;
    uint32_t used_bytes;
    uint8_t bytes[GATHER_BYTES];
};

static void gather_add(struct gather *gather, const void *bytes, size_t size_bytes, bool copy)
{
    if (size_bytes == 0)
        return;
    struct iovec *last = gather->count ? &gather->iov[gather->count - 1] : NULL;
    const uint8_t *source = bytes;
    if (copy) {
        source = gather->bytes + gather->used_bytes;
        memcpy(gather->bytes + gather->used_bytes, bytes, size_bytes);
        gather->used_bytes += (uint32_t)size_bytes;
    }
    if (last && (uint8_t *)last->iov_base + last->iov_len == source)
        last->iov_len += size_bytes;
    else
        gather->iov[gather->count++] = (struct iovec){(void *)source, size_bytes};
}

/* Whether `staged` and its predecessor or successor are contiguous in memory. */
static bool adjoins(struct mqd_partition *partition, const struct gather *gather, const struct mqd_staged *staged,
                    uint32_t i, uint32_t end)
{
    const struct iovec *last = gather->count ? &gather->iov[gather->count - 1] : NULL;
    if (staged->header_bytes)
        return false;
    if (last && (uint8_t *)last->iov_base + last->iov_len == staged->bytes)
        return true;
    if (i + 1 == end)
        return false;
    const struct mqd_staged *next = mqd_partition_staged_at(partition, i + 1);
    return next->header_bytes == 0 && next->bytes == staged->bytes + staged->batch.size_bytes;
}

static int write_run(struct mqd_partition *partition, uint32_t first, uint32_t count)
{
    struct gather gather;
    gather.count = 0;
    gather.used_bytes = 0;
    for (uint32_t i = first; i < first + count; i++) {
        struct mqd_staged *staged = mqd_partition_staged_at(partition, i);
        uint32_t size_bytes = (uint32_t)staged->batch.size_bytes;
        bool copy = size_bytes <= GATHER_BATCH_BYTES && size_bytes <= GATHER_BYTES - gather.used_bytes &&
                    !adjoins(partition, &gather, staged, i, first + count);
        gather_add(&gather, staged->header, staged->header_bytes, copy);
        gather_add(&gather, staged->bytes + staged->header_bytes, size_bytes - staged->header_bytes, copy);
    }
    return write_all(partition, gather.iov, gather.count);
}

/* See S5. Does nothing when a descriptor of this segment's index is already queued. */
static int queue_txn_index(struct mqd_partition *partition)
{
    const struct mqd_active *active = &partition->active;
    for (uint32_t i = partition->sync_item_count; i < partition->sync_queue_count; i++)
        if (partition->sync_queue[i].kind == MQD_FILE_TXN_INDEX &&
            partition->sync_queue[i].segment == active->base_offset)
            return 0;
    int fd = fcntl(active->txn_index.fd, F_DUPFD_CLOEXEC, 0);
    return fd < 0 ? -1 : queue_file(partition, fd, MQD_FILE_TXN_INDEX, NULL);
}

/* Writes the aborted transactions whose markers are among these batches. The markers let the last
 * stable offset advance, and readers below it must find these transactions in the file. */
static int write_aborted(struct mqd_partition *partition, uint32_t first, uint32_t count)
{
    struct mqd_active *active = &partition->active;
    struct mqd_aborted aborted[MQD_STAGE_COUNT_MAX];
    uint32_t aborted_count = 0;
    bool created = active->txn_index.file_bytes == 0;
    for (uint32_t i = first; i < first + count; i++) {
        const struct mqd_staged *staged = mqd_partition_staged_at(partition, i);
        if (staged->aborted.producer_id >= 0)
            aborted[aborted_count++] = staged->aborted;
    }
    if (aborted_count == 0)
        return 0;
    if (mqd_txn_index_append(&active->txn_index, partition->path, active->base_offset, aborted, aborted_count) < 0)
        return -1;
    partition->directory_dirty |= created;
    partition->txn_index_created |= created;
    return PLANTED_LOG_BUG(NO_ABORTED) ? 0 : queue_txn_index(partition);
}

/* Called when the bytes are in the file: updates positions and index entries. Returns -1 with errno
 * if an index file cannot be written for a reason that is not transient. */
static int account_run(struct mqd_partition *partition, uint32_t first, uint32_t count, int64_t now_ms)
{
    struct mqd_active *active = &partition->active;
    int error = 0;
    for (uint32_t i = first; i < first + count; i++) {
        const struct mqd_batch *batch = &mqd_partition_staged_at(partition, i)->batch;
        if (active->size_bytes == 0) {
            active->first_timestamp_ms = batch->max_timestamp_ms;
            active->first_append_ms = now_ms;
        }
        if (mqd_index_add(&active->index, active->base_offset, partition->options.index_interval_bytes, batch,
                          (uint32_t)active->size_bytes) &&
            mqd_index_flush(&active->index, partition->path, active->base_offset) < 0 && !mqd_error_is_transient(errno))
            error = errno;
        active->size_bytes += batch->size_bytes;
        partition->written_bytes += batch->size_bytes;
        partition->log_end_offset = mqd_batch_end_offset(batch);
    }
    if (active->allocated_bytes < active->size_bytes)
        active->allocated_bytes = active->size_bytes;
    errno = error;
    return error ? -1 : 0;
}

/* ---- undo ---- */

static void save_state(const struct mqd_partition *partition, struct saved_state *out)
{
    *out = (struct saved_state){.saved = true,
                                .active = partition->active,
                                .segment_count = partition->segment_count,
                                .sync_queue_count = partition->sync_queue_count,
                                .log_end_offset = partition->log_end_offset,
                                .written_bytes = partition->written_bytes,
                                .durable = partition->durable,
                                .high_watermark = partition->high_watermark};
    if (partition->sync_queue_count)
        out->sync_queue_last = partition->sync_queue[partition->sync_queue_count - 1];
}

/* Returns 0, or an errno value if one of the segment's files still exists. */
static int delete_segment(const struct mqd_partition *partition, int64_t base_offset)
{
    char path[PATH_MAX];
    int error = 0;
    for (int kind = MQD_FILE_LOG; kind <= MQD_FILE_TXN_SUM; kind++)
        if (mqd_segment_path(path, sizeof path, partition->path, base_offset, (enum mqd_file_kind)kind) == 0 &&
            mqd_file_unlink(path) < 0 && mqd_error_code() != ENOENT)
            error = mqd_error_code();
    return error;
}

/* Closes the descriptors that this write queued. Those of the old segment's files stay open: a
 * flush of its .log may be running, so the descriptor's number must not be reused for another
 * file; and after a full disk the next write must not need new descriptors, because there may be
 * none left. */
static void restore_queue(struct mqd_partition *partition, const struct saved_state *old, struct mqd_active *active)
{
    while (partition->sync_queue_count > old->sync_queue_count) {
        const struct mqd_sync_item *item = &partition->sync_queue[--partition->sync_queue_count];
        bool of_old_segment = item->segment == active->base_offset;
        if (of_old_segment && item->kind == MQD_FILE_LOG)
            active->fd = item->fd;
        else if (of_old_segment && item->kind == MQD_FILE_INDEX)
            active->index.fd = item->fd;
        else if (of_old_segment && item->kind == MQD_FILE_TIME_INDEX)
            active->index.time_fd = item->fd;
        else
            mqd_file_close(item->fd);
    }
    if (old->sync_queue_count)
        partition->sync_queue[old->sync_queue_count - 1] = old->sync_queue_last;
}

/* Needed only when the queue was full, because the roll has then flushed and closed the .log. */
static int reopen_log(struct mqd_partition *partition)
{
    struct mqd_active *active = &partition->active;
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, partition->path, active->base_offset, MQD_FILE_LOG) == 0)
        active->fd = mqd_file_open(path, O_RDWR, 0);
    return active->fd < 0 ? -1 : 0;
}

/* Restores the saved state. Returns -1 with errno if the old segment could not be restored, or if a
 * segment begun by this write could not be deleted (the next clean start would regard the old
 * segment as sealed and end the log at the beginning of the leftover one). The caller then fences
 * the partition. */
static int restore_state(struct mqd_partition *partition, const struct saved_state *old)
{
    struct mqd_active *active = &partition->active;
    struct mqd_active restored = old->active;
    int delete_error = 0;
    mqd_txn_index_close(&active->txn_index);
    restored.txn_index.fd = restored.txn_index.sum_fd = -1;
    if (partition->segment_count > old->segment_count) {
        mqd_index_close_files(&active->index);
        mqd_file_close(active->fd);
        while (partition->segment_count > old->segment_count) {
            int error = delete_segment(partition, partition->segments[--partition->segment_count]);
            delete_error = error ? error : delete_error;
        }
        restored.fd = restored.index.fd = restored.index.time_fd = -1;
        restore_queue(partition, old, &restored);
    } else {
        restored.index.fd = active->index.fd;
        restored.index.time_fd = active->index.time_fd;
    }
    *active = restored;
    active->allocated_bytes = active->size_bytes;
    partition->log_end_offset = old->log_end_offset;
    partition->written_bytes = old->written_bytes;
    partition->durable = old->durable;
    partition->high_watermark = old->high_watermark;
    if ((active->fd < 0 && reopen_log(partition) < 0) || mqd_file_truncate(active->fd, active->size_bytes) < 0 ||
        mqd_txn_index_cut(&active->txn_index, partition->path, active->base_offset) < 0)
        return -1;
    if (mqd_index_cut_files(&active->index, partition->path, active->base_offset) < 0)
        return -1;
    errno = delete_error;
    return delete_error ? -1 : 0;
}

void mqd_partition_drop_epochs(struct mqd_partition *partition)
{
    partition->epochs_unwritten |= mqd_epochs_cut(&partition->epochs, 0, partition->log_end_offset);
}

/* Undoes the write. Returns -1 with `error` in errno, or with another one if the undo fails too. */
static int fail_write(struct mqd_partition *partition, const struct saved_state *old, int error)
{
    if (old->saved && restore_state(partition, old) < 0) {
        error = errno ? errno : EIO;
        mqd_partition_fence(partition);
    }
    mqd_partition_drop_epochs(partition);
    mqd_partition_unstage(partition);
    mqd_partition_check(partition);
    mqd_error_system(error, "%s: cannot append to segment %lld", partition->path,
                     (long long)partition->active.base_offset);
    errno = error;
    return -1;
}

/* ---- the write ---- */

/* Queues the new epoch checkpoint. It replaces an older one that still waits for its sync, so that
 * the queue does not fill up while the disk repeatedly refuses the following batches. */
static int queue_epochs(struct mqd_partition *partition, int fd)
{
    uint32_t count = partition->sync_queue_count;
    for (uint32_t i = partition->sync_item_count; i < count; i++)
        if (partition->sync_queue[i].is_epoch_checkpoint) {
            mqd_file_close(partition->sync_queue[i].fd);
            partition->sync_queue[i].fd = fd;
            return 0;
        }
    int result = mqd_partition_queue_sync(partition, fd, NULL);
    if (partition->sync_queue_count > count)
        partition->sync_queue[count].is_epoch_checkpoint = true;
    return result;
}

/* Called before the batches are written: a reader that finds the first record of an epoch finds the
 * epoch in the checkpoint. */
static int write_epochs(struct mqd_partition *partition)
{
    for (uint32_t i = 0; i < partition->staged_count; i++) {
        const struct mqd_batch *batch = &mqd_partition_staged_at(partition, i)->batch;
        int changed = mqd_epochs_add(&partition->epochs, batch->partition_leader_epoch, batch->base_offset);
        if (changed < 0) {
            errno = ENOMEM;
            return -1;
        }
        partition->epochs_unwritten |= changed == 1;
    }
    if (!partition->epochs_unwritten)
        return 0;
    int fd = mqd_epochs_write_open(&partition->epochs, partition->path);
    if (fd < 0)
        return -1;
    partition->epochs_unwritten = false;
    partition->directory_dirty = true;
    return queue_epochs(partition, fd);
}

static int write_staged(struct mqd_partition *partition, int64_t now_ms, struct saved_state *old, int *index_error)
{
    uint32_t first = 0;
    while (first < partition->staged_count) {
        bool roll;
        uint32_t count = plan_run(partition, first, now_ms, &roll);
        if (!old->saved && (roll || count < partition->staged_count || partition->staged_abort_count))
            save_state(partition, old);
        if ((roll && mqd_partition_roll_active(partition) < 0) || write_run(partition, first, count) < 0 ||
            (partition->staged_abort_count && write_aborted(partition, first, count) < 0))
            return -1;
        if (account_run(partition, first, count, now_ms) < 0)
            *index_error = errno;
        first += count;
    }
    return 0;
}

int mqd_partition_write(struct mqd_partition *partition, int64_t now_ms, bool *rolled)
{
    struct saved_state old; /* not initialized as a whole, because it is large: save_state sets the other fields */
    int64_t base_offset = partition->active.base_offset;
    int index_error = 0;
    old.saved = false;
    *rolled = false;
    if (partition->staged_count == 0)
        return 0;
    if (partition->fenced)
        return fail_write(partition, &old, EIO);
    partition->writing = true;
    bool written = write_epochs(partition) == 0 && write_staged(partition, now_ms, &old, &index_error) == 0;
    partition->writing = false;
    if (!written)
        return fail_write(partition, &old, errno);
    *rolled = partition->active.base_offset != base_offset;
    partition->last_write_ms = now_ms;
    mqd_partition_stage_reset(partition);
    mqd_producers_trim(&partition->producers, (uint32_t)partition->options.producer_id_count_max);
    mqd_partition_advance_marks(partition);
    mqd_partition_check(partition);
    if (!index_error)
        return 0;
    /* The batches are in the log, but the disk is failing: the partition is fenced. */
    mqd_partition_fence(partition);
    mqd_error_system(index_error, "%s: cannot write the index of segment %lld", partition->path,
                     (long long)partition->active.base_offset);
    errno = index_error;
    return -1;
}
