/* Restores producers, transactions, aborted transactions and leader epochs after a restart; see
 * log/recovery/recovery.h.
 *
 * The walk also encounters abort markers between txn_index_complete_below and the snapshot (if
 * power failed soon after the snapshot was written). The snapshot no longer says where their
 * transactions began, so their entries must already be in the .txnindex files. If an entry is
 * missing, everything is replayed from an earlier snapshot, or from the log's beginning.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/read.h"
#include "base/file.h"
#include "log/recovery/recovery.h"

#define CONTROL_BIT 0x20
#define SNAPSHOT_BYTES_MAX (1ll << 33)
#define SNAPSHOTS_KEPT 2

/* ---- snapshots ---- */

static uint8_t *read_whole(int fd, size_t size_bytes)
{
    uint8_t *bytes = malloc(size_bytes ? size_bytes : 1);
    if (!bytes || mqd_read_exactly(fd, bytes, size_bytes, 0) == 0)
        return bytes;
    free(bytes);
    return NULL;
}

/* Returns 1 if the snapshot was loaded; 0 if it cannot be read or is corrupt, which is not an
 * error: an older snapshot or the log holds the same information, unless retention has deleted it;
 * -1 (mqd_error set) if out of memory or file descriptors: the snapshot may be sound. */
static int load_snapshot(struct mqd_partition *partition, int64_t offset)
{
    char path[PATH_MAX];
    struct stat status;
    int64_t stored_offset = -1;
    if (mqd_segment_path(path, sizeof path, partition->path, offset, MQD_FILE_SNAPSHOT) < 0)
        return 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC), error = fd < 0 ? errno : 0;
    uint8_t *bytes = NULL;
    if (fd >= 0 && fstat(fd, &status) == 0 && status.st_size <= SNAPSHOT_BYTES_MAX) {
        errno = 0;
        bytes = read_whole(fd, (size_t)status.st_size);
        error = bytes ? 0 : errno;
    }
    if (fd >= 0)
        close(fd);
    int loaded = 0;
    if (error == ENOMEM || error == EMFILE || error == ENFILE)
        loaded = mqd_error_system(error, "cannot read %s", path);
    else if (bytes && mqd_producers_decode(&partition->producers, bytes, (size_t)status.st_size, &stored_offset) < 0)
        loaded = mqd_error_code() == ENOMEM ? -1 : 0;
    else
        loaded = bytes && stored_offset == offset;
    free(bytes);
    if (loaded <= 0)
        mqd_producers_free(&partition->producers);
    return loaded;
}

static int delete_snapshot(const struct mqd_partition *partition, int64_t offset)
{
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, partition->path, offset, MQD_FILE_SNAPSHOT) < 0)
        return -1;
    return mqd_file_unlink(path) == 0 || mqd_error_code() == ENOENT ? 0 : -1; /* ENOENT: an earlier call deleted it */
}

/* Loads the newest usable snapshot at or below `limit` into the partition. Deletes snapshots beyond
 * the limit (they contain removed records), corrupt and surplus ones, and those below the first
 * segment: the events that followed them, such as the end of a transaction, were deleted with older
 * segments. */
static int load_newest_snapshot(struct mqd_partition *partition, const struct mqd_listing *listing, int64_t limit)
{
    uint32_t kept_count = 0;
    partition->snapshot_offset = partition->snapshot_previous = -1;
    for (uint32_t i = listing->snapshot_count; i-- > 0;) {
        int64_t offset = listing->snapshots[i];
        bool useful = offset <= limit && offset >= partition->segments[0] && kept_count < SNAPSHOTS_KEPT;
        if (useful && kept_count == 0) {
            int loaded = load_snapshot(partition, offset);
            if (loaded < 0)
                return -1;
            useful = loaded;
            if (useful)
                partition->snapshot_offset = offset;
        } else if (useful) {
            partition->snapshot_previous = offset;
        }
        kept_count += useful;
        if (!useful && delete_snapshot(partition, offset) < 0)
            return -1;
    }
    return 0;
}

/* ---- replay ---- */

struct replay {
    struct mqd_partition *partition;
    int64_t snapshot_end_offset; /* the snapshot covers batches below this offset */
    int64_t indexed_below;       /* the .txnindex files have the entries of markers below this offset */
    int64_t decided_below;       /* transactions that ended below this no longer matter */
    int64_t now_ms;
    struct mqd_aborted_list indexed; /* the entries in the current segment's .txnindex */
    struct mqd_aborted_list rebuilt; /* the entries that the walk made, for markers at or after indexed_below */
    bool entry_lost;                 /* a marker below snapshot_end_offset has no entry */
    bool changed;
    bool rebuilding; /* only the .txnindex files that fail verification are rebuilt */
    /* entries of markers at or after this offset need no verification: they are rebuilt from the
     * log anyway */
    int64_t verify_below;
};

/* Returns the entry for this marker that is already in the file, or NULL. */
static const struct mqd_aborted *indexed_entry(const struct replay *replay, int64_t producer_id, int64_t last_offset)
{
    uint32_t low = 0, high = replay->indexed.count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (replay->indexed.entries[middle].last_offset < last_offset)
            low = middle + 1;
        else
            high = middle;
    }
    const struct mqd_aborted *entry = low < replay->indexed.count ? &replay->indexed.entries[low] : NULL;
    return entry && entry->last_offset == last_offset && entry->producer_id == producer_id ? entry : NULL;
}

static int add_rebuilt(struct replay *replay, struct mqd_aborted entry)
{
    const struct mqd_aborted *previous =
        replay->rebuilt.count ? &replay->rebuilt.entries[replay->rebuilt.count - 1] : NULL;
    if (previous && previous->last_offset >= entry.last_offset)
        return 0; /* after damage, the walk may encounter a marker twice */
    if (previous && previous->last_stable_offset > entry.last_stable_offset)
        entry.last_stable_offset = previous->last_stable_offset;
    return mqd_aborted_add(&replay->rebuilt, &entry);
}

/* Handles an abort marker that ended a transaction. first_offset: where the transaction began; -1
 * if the marker is covered by the snapshot, so that only the file has this offset. */
static int replay_abort(struct replay *replay, const struct mqd_batch *batch, int64_t first_offset)
{
    const struct mqd_aborted *indexed = indexed_entry(replay, batch->producer_id, batch->base_offset);
    /* the beginning of the transaction may have been deleted from the log since */
    if (indexed && (first_offset < 0 || indexed->first_offset <= first_offset))
        return add_rebuilt(replay, *indexed);
    if (first_offset < 0) {
        replay->entry_lost = true;
        return 0;
    }
    int64_t ongoing = mqd_transactions_first_ongoing(&replay->partition->producers.transactions);
    return add_rebuilt(replay, (struct mqd_aborted){batch->producer_id, first_offset, batch->base_offset,
                                                    ongoing <= batch->base_offset ? ongoing : batch->base_offset + 1});
}

static int add_producer(struct replay *replay, const struct mqd_batch *batch, const struct mqd_marker *marker,
                        int64_t *ended_first_offset)
{
    struct mqd_partition *partition = replay->partition;
    struct mqd_producer_undo undo;
    /* The append time on the broker's clock is not in the log: the producer is remembered for
     * another full period. */
    if (mqd_producers_add(&partition->producers, batch, marker, batch->base_offset, replay->now_ms, &undo) < 0)
        return -1;
    *ended_first_offset = undo.change == MQD_TRANSACTION_ENDED
                              ? mqd_transaction_first_offset(&partition->producers.transactions, undo.transaction)
                              : -1;
    mqd_transactions_forget_decided(&partition->producers.transactions, replay->decided_below);
    if (partition->producers.count > 2u * (uint32_t)partition->options.producer_id_count_max)
        mqd_producers_trim(&partition->producers, (uint32_t)partition->options.producer_id_count_max);
    return 0;
}

static int replay_marker(struct replay *replay, const struct mqd_batch *batch, int fd, int64_t position)
{
    uint8_t bytes[MQD_MARKER_BYTES_MAX];
    struct mqd_marker marker;
    int64_t first_offset = -1;
    if (batch->size_bytes > MQD_MARKER_BYTES_MAX)
        return 0;
    ssize_t got = pread(fd, bytes, (size_t)batch->size_bytes, position);
    if (got < 0)
        return mqd_error_system(errno, "%s: cannot read a control batch", replay->partition->path);
    if (got != batch->size_bytes || mqd_marker_parse(bytes, batch, &marker) < 0)
        return 0;
    bool in_snapshot = batch->base_offset < replay->snapshot_end_offset;
    if (!in_snapshot && add_producer(replay, batch, &marker, &first_offset) < 0)
        return -1;
    if (marker.commit || batch->base_offset < replay->indexed_below || (!in_snapshot && first_offset < 0))
        return 0;
    return replay_abort(replay, batch, first_offset);
}

static int replay_batch(struct replay *replay, const struct mqd_batch *batch, int fd, int64_t position)
{
    int64_t unused;
    if (!replay->rebuilding &&
        mqd_epochs_add(&replay->partition->epochs, batch->partition_leader_epoch, batch->base_offset) < 0)
        return -1;
    if (batch->producer_id < 0)
        return 0;
    if (batch->attributes & CONTROL_BIT)
        return replay_marker(replay, batch, fd, position);
    return batch->base_offset < replay->snapshot_end_offset ? 0 : add_producer(replay, batch, NULL, &unused);
}

/* Damage below the recovery point is skipped, as in the walk that found the log's end. The length
 * or offsets of the previous batch may be wrong, so the search for the next valid batch begins
 * inside it. */
static int replay_walk(struct replay *replay, struct mqd_walk *walk)
{
    struct mqd_batch batch;
    int64_t position = -1, last_offset = walk->next_offset;
    for (;;) {
        int walk_result = mqd_walk_next(walk, &batch, &position);
        if (walk_result == 0 && walk->reason) {
            if (position >= 0) {
                walk->position = position;
                walk->next_offset = last_offset;
            }
            walk_result = mqd_walk_resync(walk);
            if (walk_result == 1)
                walk_result = mqd_walk_next(walk, &batch, &position);
        }
        if (walk_result <= 0)
            return walk_result;
        last_offset = batch.base_offset;
        if (replay_batch(replay, &batch, walk->fd, position) < 0)
            return -1;
    }
}

struct mqd_index_entry mqd_recovery_walk_start(int fd, const char *directory, int64_t base_offset, int64_t offset,
                                               int64_t size_bytes)
{
    const struct mqd_index_entry beginning = {0, 0};
    struct mqd_index_entry entry;
    struct mqd_batch batch;
    uint8_t header[MQD_BATCH_HEADER_BYTES];
    if (offset <= base_offset || mqd_index_lookup(directory, base_offset, offset, &entry) != 1 ||
        entry.position > size_bytes - MQD_BATCH_HEADER_BYTES)
        return beginning;
    bool sound = pread(fd, header, sizeof header, entry.position) == (ssize_t)sizeof header &&
                 mqd_batch_decode(header, sizeof header, &batch) == 0 &&
                 batch.base_offset == base_offset + entry.relative_offset;
    return sound ? entry : beginning;
}

static int walk_segment(struct replay *replay, uint32_t i, int64_t from_offset)
{
    const struct mqd_partition *partition = replay->partition;
    int64_t base_offset = partition->segments[i];
    char path[PATH_MAX];
    struct stat status;
    if (mqd_segment_path(path, sizeof path, partition->path, base_offset, MQD_FILE_LOG) < 0)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) < 0) {
        mqd_error_system(errno, "cannot read %s", path);
        if (fd >= 0)
            close(fd);
        return -1;
    }
    struct mqd_walk walk;
    struct mqd_index_entry start =
        mqd_recovery_walk_start(fd, partition->path, base_offset, from_offset, status.st_size);
    int result = mqd_walk_begin(&walk, fd, base_offset, start.position, base_offset + start.relative_offset,
                                status.st_size, INT64_MAX);
    walk.gaps_allowed = partition->has_gaps;
    if (result == 0)
        result = replay_walk(replay, &walk);
    mqd_walk_end(&walk);
    close(fd);
    return result;
}

static bool same_entries(const struct mqd_aborted *left, const struct mqd_aborted *right, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (left[i].producer_id != right[i].producer_id || left[i].first_offset != right[i].first_offset ||
            left[i].last_offset != right[i].last_offset)
            return false;
    return true;
}

/* Makes the segment's .txnindex match the walk: first the entries that were trusted, then the
 * rebuilt ones. Stores the size of the file in *file_bytes. */
static int write_aborted(struct replay *replay, int64_t base_offset, uint32_t *file_bytes)
{
    char path[PATH_MAX];
    struct stat status;
    uint32_t trusted_count = 0;
    while (trusted_count < replay->indexed.count &&
           replay->indexed.entries[trusted_count].last_offset < replay->indexed_below)
        trusted_count++;
    uint32_t count = trusted_count + replay->rebuilt.count;
    *file_bytes = count * MQD_TXN_INDEX_ENTRY_BYTES;
    if (mqd_segment_path(path, sizeof path, replay->partition->path, base_offset, MQD_FILE_TXN_INDEX) < 0)
        return -1;
    int64_t size_bytes = stat(path, &status) == 0 ? status.st_size : 0;
    if (mqd_segment_path(path, sizeof path, replay->partition->path, base_offset, MQD_FILE_TXN_SUM) < 0)
        return -1;
    int64_t sum_bytes = stat(path, &status) == 0 ? status.st_size : 0;
    if (sum_bytes == (int64_t)count * MQD_TXN_SUM_BYTES && count == replay->indexed.count &&
        size_bytes == *file_bytes &&
        same_entries(replay->indexed.entries + trusted_count, replay->rebuilt.entries, replay->rebuilt.count))
        return 0;
    replay->indexed.count = trusted_count;
    for (uint32_t i = 0; i < replay->rebuilt.count; i++)
        if (mqd_aborted_add(&replay->indexed, &replay->rebuilt.entries[i]) < 0)
            return -1;
    replay->changed = true;
    return mqd_txn_index_replace(replay->partition->path, base_offset, &replay->indexed, true);
}

static int replay_segment(struct replay *replay, uint32_t i, int64_t from_offset)
{
    struct mqd_partition *partition = replay->partition;
    bool is_last = i + 1 == partition->segment_count;
    int64_t base_offset = partition->segments[i],
            end_offset = is_last ? partition->log_end_offset : partition->segments[i + 1];
    bool must_walk = end_offset > from_offset && end_offset > base_offset;
    uint32_t file_bytes;
    if (!must_walk && !is_last)
        return 0;
    replay->rebuilt.count = 0;
    if (mqd_txn_index_load(partition->path, base_offset, end_offset, &replay->indexed) < 0 ||
        (must_walk && walk_segment(replay, i, from_offset) < 0))
        return -1;
    if (replay->entry_lost)
        return 0;
    if (write_aborted(replay, base_offset, &file_bytes) < 0)
        return mqd_error_code() == EROFS ? 0 : -1;
    if (is_last)
        partition->active.txn_index.file_bytes = file_bytes;
    return 0;
}

/* Returns 1 if entries were lost that cannot be rebuilt from this snapshot. */
static int replay_all(struct replay *replay, const struct mqd_listing *listing, int64_t limit,
                      int64_t txn_index_complete_below)
{
    struct mqd_partition *partition = replay->partition;
    mqd_producers_free(&partition->producers);
    if (load_newest_snapshot(partition, listing, limit) < 0)
        return -1;
    replay->entry_lost = false;
    replay->snapshot_end_offset = partition->snapshot_offset;
    replay->indexed_below =
        txn_index_complete_below < partition->snapshot_offset ? txn_index_complete_below : partition->snapshot_offset;
    int64_t from_offset = partition->epochs.count == 0 ? -1 : replay->indexed_below;
    for (uint32_t i = 0; i < partition->segment_count && !replay->entry_lost; i++)
        if (replay_segment(replay, i, from_offset) < 0)
            return -1;
    return replay->entry_lost;
}

/* ---- .txnindex files that fail verification ---- */

/* Starts from the newest snapshot at or below `offset`, or else from the log's beginning. Returns
 * -1 if out of file descriptors or memory for a snapshot, without which the .txnindex files must
 * not be rebuilt. */
static int start_rebuild(struct replay *replay, const struct mqd_listing *listing, int64_t offset)
{
    struct mqd_partition *partition = replay->partition;
    mqd_producers_free(&partition->producers);
    replay->snapshot_end_offset = replay->indexed_below = partition->segments[0];
    for (uint32_t i = listing->snapshot_count; i-- > 0;) {
        if (listing->snapshots[i] > offset || listing->snapshots[i] < partition->segments[0])
            continue;
        int loaded = load_snapshot(partition, listing->snapshots[i]);
        if (loaded < 0)
            return -1;
        if (loaded) {
            replay->snapshot_end_offset = replay->indexed_below = listing->snapshots[i];
            break;
        }
    }
    return 0;
}

static int rebuild_segment(struct replay *replay, uint32_t i)
{
    int64_t base_offset = replay->partition->segments[i];
    uint32_t file_bytes;
    int verified = mqd_txn_index_verify(replay->partition->path, base_offset, replay->verify_below);
    replay->rebuilt.count = replay->indexed.count = 0; /* no entry of the file is trusted */
    if (verified < 0 || walk_segment(replay, i, replay->indexed_below) < 0)
        return -1;
    if (verified)
        return 0;
    return write_aborted(replay, base_offset, &file_bytes) < 0 && mqd_error_code() != EROFS ? -1 : 0;
}

/* Rebuilds the .txnindex files that fail verification. The walk begins at the snapshot below the
 * first of their segments, so that it sees the beginning of every transaction, and ends with the
 * last of these segments. The producer state of this walk is discarded. */
static int rebuild_unverified(struct replay *replay, const struct mqd_listing *listing)
{
    struct mqd_partition *partition = replay->partition;
    uint32_t first = UINT32_MAX, last = 0;
    for (uint32_t i = 0; i < partition->segment_count; i++) {
        int verified = mqd_txn_index_verify(partition->path, partition->segments[i], replay->verify_below);
        if (verified < 0)
            return -1;
        if (verified)
            continue;
        first = first == UINT32_MAX ? i : first;
        last = i;
    }
    if (first == UINT32_MAX)
        return 0;
    if (start_rebuild(replay, listing, partition->segments[first]) < 0)
        return -1;
    replay->rebuilding = true;
    int result = 0;
    for (uint32_t i = 0; i <= last && result == 0; i++)
        if (i >= first || partition->segments[i + 1] > replay->indexed_below)
            result = rebuild_segment(replay, i);
    replay->rebuilding = false;
    return result;
}

int mqd_recovery_replay(struct mqd_partition *partition, const struct mqd_listing *listing,
                        int64_t txn_index_complete_below, int64_t decided_below, int64_t now_ms)
{
    struct replay replay = {.partition = partition, .decided_below = decided_below, .now_ms = now_ms};
    replay.verify_below =
        txn_index_complete_below < partition->log_end_offset ? txn_index_complete_below : partition->log_end_offset;
    int result = rebuild_unverified(&replay, listing);
    if (result == 0)
        result = replay_all(&replay, listing, partition->log_end_offset, txn_index_complete_below);
    if (result == 1)
        result = replay_all(&replay, listing, txn_index_complete_below, txn_index_complete_below);
    free(replay.indexed.entries);
    free(replay.rebuilt.entries);
    if (result < 0)
        return -1;
    mqd_producers_trim(&partition->producers, (uint32_t)partition->options.producer_id_count_max);
    if (partition->snapshot_offset == partition->log_end_offset)
        partition->snapshot_change_count = partition->producers.change_count;
    return replay.changed;
}
