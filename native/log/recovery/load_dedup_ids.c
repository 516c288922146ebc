/* Restores the ids of the latest records after a restart or a truncation; see
 * log/recovery/recovery.h. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/read.h"
#include "log/recovery/recovery.h"
#include "wire/record_scan.h"

struct loader {
    struct mqd_partition *partition;
    int64_t decided_below; /* transactions that end below this offset can no longer be truncated */
    uint8_t *bytes;
    size_t capacity_bytes;
};

static int read_batch(struct loader *loader, const struct mqd_batch *batch, int fd, int64_t position)
{
    size_t size_bytes = (size_t)batch->size_bytes;
    if (size_bytes > loader->capacity_bytes) {
        free(loader->bytes);
        loader->capacity_bytes = 0;
        loader->bytes = malloc(size_bytes);
        if (!loader->bytes)
            return mqd_error_set(ENOMEM, "out of memory for a batch of %zu bytes", size_bytes);
        loader->capacity_bytes = size_bytes;
    }
    if (mqd_read_exactly(fd, loader->bytes, size_bytes, position) < 0)
        return mqd_error_system(errno, "%s: cannot read a batch", loader->partition->path);
    return 0;
}

static int load_batch(struct loader *loader, const struct mqd_batch *batch, int fd, int64_t position)
{
    struct mqd_dedup *dedup = loader->partition->dedup;
    struct mqd_marker marker;
    if (batch->attributes & MQD_ATTRIBUTE_COMPRESSION)
        return 0;
    if (read_batch(loader, batch, fd, position) < 0)
        return -1;
    if (!(batch->attributes & MQD_ATTRIBUTE_CONTROL))
        mqd_dedup_learn(dedup, batch, loader->bytes);
    else if (batch->size_bytes <= MQD_MARKER_BYTES_MAX && mqd_marker_parse(loader->bytes, batch, &marker) == 0) {
        mqd_ids_end_transaction(&dedup->ids, batch->producer_id, marker.commit, batch->base_offset);
        /* keeps the list of undecided ids short, so that lookups in it stay fast */
        mqd_ids_decide_transactions(&dedup->ids, loader->decided_below);
    }
    return 0;
}

/* A damaged batch below the recovery point has no readable ids; the walk continues after it. */
static int walk_batches(struct loader *loader, struct mqd_walk *walk)
{
    struct mqd_batch batch;
    int64_t position;
    for (;;) {
        int walk_result = mqd_walk_next(walk, &batch, &position);
        if (walk_result == 0 && walk->reason)
            walk_result = mqd_walk_resync(walk) == 1 ? mqd_walk_next(walk, &batch, &position) : 0;
        if (walk_result <= 0)
            return walk_result;
        if (load_batch(loader, &batch, walk->fd, position) < 0)
            return -1;
    }
}

static int load_segment(struct loader *loader, int64_t base_offset, int64_t from_offset)
{
    const struct mqd_partition *partition = loader->partition;
    char path[PATH_MAX];
    struct stat status;
    struct mqd_walk walk = {.fd = -1};
    if (mqd_segment_path(path, sizeof path, partition->path, base_offset, MQD_FILE_LOG) < 0)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return mqd_error_system(errno, "cannot read %s", path);
    int result = fstat(fd, &status) < 0 ? mqd_error_system(errno, "cannot read %s", path) : 0;
    if (result == 0) {
        struct mqd_index_entry start =
            mqd_recovery_walk_start(fd, partition->path, base_offset, from_offset, status.st_size);
        result = mqd_walk_begin(&walk, fd, base_offset, start.position, base_offset + start.relative_offset,
                                status.st_size, INT64_MAX);
        walk.gaps_allowed = partition->has_gaps;
        if (result == 0)
            result = walk_batches(loader, &walk);
        mqd_walk_end(&walk);
    }
    close(fd);
    return result;
}

int mqd_recovery_load_dedup_ids(struct mqd_partition *partition, int64_t decided_below, int64_t now_ms)
{
    if (!partition->dedup)
        return 0;
    struct loader loader = {.partition = partition, .decided_below = decided_below};
    struct mqd_time_index_entry time_entry;
    uint32_t first = partition->segment_count - 1;
    int64_t from_offset = -1;
    /* begins at the last time entry from before the window, in the last segment that has one */
    for (;; first--) {
        int lookup_result = mqd_time_index_lookup(partition->path, partition->segments[first],
                                                  now_ms - partition->dedup->window_ms, &time_entry);
        if (lookup_result < 0)
            return -1;
        if (lookup_result)
            from_offset = partition->segments[first] + time_entry.relative_offset;
        if (lookup_result || first == 0)
            break;
    }
    int result = 0;
    for (uint32_t i = first; i < partition->segment_count && result == 0; i++)
        result = load_segment(&loader, partition->segments[i], from_offset);
    free(loader.bytes);
    return result;
}
