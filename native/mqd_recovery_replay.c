/* Producer state and leader epochs after a restart; see mqd_recovery.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mqd_error.h"
#include "mqd_file.h"
#include "mqd_recovery.h"

#define SNAPSHOT_BYTES_MAX (1ll << 33)
#define SNAPSHOTS_KEPT 2

/* ---- snapshots ---------------------------------------------------------------------------------------------------- */

static uint8_t *read_whole(int fd, size_t size_bytes)
{
    uint8_t *bytes = malloc(size_bytes ? size_bytes : 1);
    size_t have = 0;
    while (bytes && have < size_bytes) {
        ssize_t got = pread(fd, bytes + have, size_bytes - have, (off_t)have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            free(bytes);
            return NULL;
        }
        have += (size_t)got;
    }
    return bytes;
}

/* A snapshot that cannot be read or is corrupt is no error: an older one, or the log itself, has the same to tell. */
static bool load_snapshot(struct mqd_partition *partition, int64_t offset)
{
    char path[PATH_MAX];
    struct stat status;
    int64_t inside = -1;
    if (mqd_segment_path(path, sizeof path, partition->path, offset, MQD_FILE_SNAPSHOT) < 0)
        return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint8_t *bytes = fd >= 0 && fstat(fd, &status) == 0 && status.st_size <= SNAPSHOT_BYTES_MAX ? read_whole(fd, (size_t)status.st_size) : NULL;
    if (fd >= 0)
        close(fd);
    bool loaded = bytes && mqd_producers_decode(&partition->producers, bytes, (size_t)status.st_size, &inside) == 0 && inside == offset;
    free(bytes);
    if (!loaded)
        mqd_producers_free(&partition->producers);
    return loaded;
}

static int delete_snapshot(const struct mqd_partition *partition, int64_t offset)
{
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, partition->path, offset, MQD_FILE_SNAPSHOT) < 0)
        return -1;
    return mqd_file_unlink(path);
}

/* Loads the newest usable one into the partition; deletes those beyond the log's end (they tell of records that are gone), corrupt and surplus ones. */
static int choose_snapshot(struct mqd_partition *partition, const struct mqd_listing *listing)
{
    uint32_t kept = 0;
    for (uint32_t i = listing->snapshot_count; i-- > 0;) {
        int64_t offset = listing->snapshots[i];
        bool useful = offset <= partition->log_end_offset && kept < SNAPSHOTS_KEPT;
        if (useful && kept == 0) {
            useful = load_snapshot(partition, offset);
            if (useful)
                partition->snapshot_offset = offset;
        } else if (useful) {
            partition->snapshot_previous = offset;
        }
        kept += useful;
        if (!useful && delete_snapshot(partition, offset) < 0)
            return -1;
    }
    return 0;
}

/* ---- replay ------------------------------------------------------------------------------------------------------- */

struct replay {
    struct mqd_partition *partition;
    int64_t producers_from; /* batches below are in the snapshot */
    int64_t now_ms;
};

static int replay_batch(const struct replay *replay, const struct mqd_batch *batch)
{
    struct mqd_producer_undo undo;
    if (mqd_epochs_add(&replay->partition->epochs, batch->partition_leader_epoch, batch->base_offset) < 0)
        return -1;
    if (batch->producer_id < 0 || batch->base_offset < replay->producers_from)
        return 0;
    /* The clock of the broker when it was appended is not in the log: as new, it is remembered for another full period. */
    if (mqd_producers_add(&replay->partition->producers, batch, batch->base_offset, replay->now_ms, &undo) < 0)
        return -1;
    if (replay->partition->producers.count > 2u * (uint32_t)replay->partition->options.producer_id_count_max)
        mqd_producers_trim(&replay->partition->producers, (uint32_t)replay->partition->options.producer_id_count_max);
    return 0;
}

/* Damage below the recovery point is stepped over, as in the walk that found the end. The length or offsets of the batch before may be what is wrong: so the
 * search begins inside that one. */
static int replay_walk(const struct replay *replay, struct mqd_walk *walk)
{
    struct mqd_batch batch;
    int64_t position = -1, last_offset = walk->next_offset;
    for (;;) {
        int more = mqd_walk_next(walk, &batch, &position);
        if (more == 0 && walk->reason) {
            if (position >= 0) {
                walk->position = position;
                walk->next_offset = last_offset;
            }
            more = mqd_walk_resync(walk) == 1 ? mqd_walk_next(walk, &batch, &position) : 0;
        }
        if (more <= 0)
            return more;
        last_offset = batch.base_offset;
        if (replay_batch(replay, &batch) < 0)
            return -1;
    }
}

/* Where the walk of a segment may begin so as to meet every batch at or above `offset`: an index entry that names a batch, or the segment's beginning. */
static struct mqd_index_entry start_of(int fd, const char *directory, int64_t base_offset, int64_t offset, int64_t size_bytes)
{
    const struct mqd_index_entry beginning = {0, 0};
    struct mqd_index_entry entry;
    struct mqd_batch batch;
    uint8_t header[MQD_BATCH_HEADER_BYTES];
    if (offset <= base_offset || mqd_index_lookup(directory, base_offset, offset, &entry) != 1 || entry.position > size_bytes - MQD_BATCH_HEADER_BYTES)
        return beginning;
    bool sound = pread(fd, header, sizeof header, entry.position) == (ssize_t)sizeof header && mqd_batch_decode(header, sizeof header, &batch) == 0 &&
                 batch.base_offset == base_offset + entry.relative_offset;
    return sound ? entry : beginning;
}

static int replay_segment(const struct replay *replay, uint32_t i, int64_t from_offset)
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
    struct mqd_index_entry start = start_of(fd, partition->path, base_offset, from_offset, status.st_size);
    int result = mqd_walk_begin(&walk, fd, base_offset, start.position, base_offset + start.relative_offset, status.st_size, INT64_MAX);
    walk.gaps_allowed = partition->options.compacted;
    if (result == 0)
        result = replay_walk(replay, &walk);
    mqd_walk_end(&walk);
    close(fd);
    return result;
}

int mqd_recovery_replay(struct mqd_partition *partition, const struct mqd_listing *listing, int64_t now_ms)
{
    if (choose_snapshot(partition, listing) < 0)
        return -1;
    bool epochs_lost = partition->epochs.count == 0;
    struct replay replay = {partition, partition->snapshot_offset, now_ms};
    int64_t from_offset = epochs_lost ? -1 : partition->snapshot_offset;
    for (uint32_t i = 0; i < partition->segment_count; i++) {
        int64_t end_offset = i + 1 < partition->segment_count ? partition->segments[i + 1] : partition->log_end_offset;
        if (end_offset > from_offset && end_offset > partition->segments[i] && replay_segment(&replay, i, from_offset) < 0)
            return -1;
    }
    mqd_producers_trim(&partition->producers, (uint32_t)partition->options.producer_id_count_max);
    if (partition->snapshot_offset == partition->log_end_offset)
        partition->snapshot_changes = partition->producers.changes;
    return 0;
}
