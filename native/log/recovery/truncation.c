/* Truncation mark files, and the truncation itself (mqd_partition_truncate,
 * mqd_partition_restart_at); see log/recovery/truncation.h.
 *
 * The log is closed and reopened by recovery's own functions, truncated at its new end, so that the
 * code for indexes, producers, transactions and epochs is not duplicated.
 */
#include "log/recovery/truncation.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "log/partition_follow.h"
#include "log/planted_bugs.h"
#include "log/recovery/recovery.h"

#define MARK_BYTES_MAX 64

/* ---- mark files ---- */

static int mark_file_path(char out[PATH_MAX], const char *directory, const char *name)
{
    return snprintf(out, PATH_MAX, "%s/%s", directory, name) < PATH_MAX
               ? 0
               : mqd_error_set(ENAMETOOLONG, "path too long: %s", directory);
}

/* Returns 1 if the mark was read, 0 if there is none, -1 if it cannot be read or is malformed. */
static int read_mark_file(const char *directory, const char *name, int64_t *cut_offset, int64_t *start_offset)
{
    char path[PATH_MAX], text[MARK_BYTES_MAX + 1];
    if (mark_file_path(path, directory, name) < 0)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? 0 : mqd_error_system(errno, "cannot open %s", path);
    ssize_t got = read(fd, text, MARK_BYTES_MAX);
    int error = errno;
    close(fd);
    if (got < 0)
        return mqd_error_system(error, "cannot read %s", path);
    text[got] = 0;
    char *end = text, *after = NULL;
    long long cut = strtoll(text, &end, 10), start = strtoll(end, &after, 10);
    if (got == 0 || text[got - 1] != '\n' || end == text)
        return mqd_error_set(MQD_E_CORRUPT,
                             "%s has no truncation offset; delete the partition's directory: its records are then "
                             "copied from the leader again",
                             path);
    *cut_offset = cut;
    *start_offset = after == end ? -1 : start; /* marks of older versions have no start offset */
    return 1;
}

static int load_truncated(const char *directory, struct mqd_truncation_marks *out)
{
    DIR *stream = opendir(directory);
    struct dirent *entry;
    int64_t cut, ignored;
    int result = 0;
    if (!stream)
        return mqd_error_system(errno, "cannot list %s", directory);
    while (result >= 0 && (entry = readdir(stream)))
        if (strncmp(entry->d_name, MQD_TRUNCATED_PREFIX, sizeof MQD_TRUNCATED_PREFIX - 1) == 0 &&
            (result = read_mark_file(directory, entry->d_name, &cut, &ignored)) == 1 && cut < out->trusted_below)
            out->trusted_below = cut;
    closedir(stream);
    return result < 0 ? -1 : 0;
}

int mqd_truncation_load(const char *directory, struct mqd_truncation_marks *out)
{
    *out = (struct mqd_truncation_marks){.cut_offset = -1, .start_offset = -1, .trusted_below = INT64_MAX};
    int pending = read_mark_file(directory, MQD_TRUNCATING_FILE, &out->cut_offset, &out->start_offset);
    if (pending < 0 || load_truncated(directory, out) < 0)
        return -1;
    out->pending = pending == 1;
    if (out->pending && out->cut_offset < out->trusted_below)
        out->trusted_below = out->cut_offset;
    return 0;
}

int mqd_truncation_begin(const char *directory, int64_t cut_offset, int64_t start_offset)
{
    char path[PATH_MAX], text[MARK_BYTES_MAX];
    int size = snprintf(text, sizeof text, "%lld %lld\n", (long long)cut_offset, (long long)start_offset);
    if (PLANTED_LOG_BUG(NO_MARK))
        return 0;
    return mark_file_path(path, directory, MQD_TRUNCATING_FILE) < 0
               ? -1
               : mqd_file_replace(path, (const uint8_t *)text, (size_t)size);
}

int mqd_truncation_end(const char *directory, int64_t now_ms)
{
    char from[PATH_MAX], to[PATH_MAX], name[MARK_BYTES_MAX];
    if (mark_file_path(from, directory, MQD_TRUNCATING_FILE) < 0)
        return -1;
    if (access(from, F_OK) < 0)
        return errno == ENOENT ? 0 : mqd_error_system(errno, "cannot access %s", from);
    do /* finds an unused name, because marks are removed by name */
        snprintf(name, sizeof name, MQD_TRUNCATED_PREFIX "%lld", (long long)now_ms++);
    while (mark_file_path(to, directory, name) == 0 && access(to, F_OK) == 0);
    if (!PLANTED_LOG_BUG(MARK_EARLY) &&
        mqd_file_sync_directory(directory) < 0) /* deletions must be durable before the mark records them */
        return -1;
    return mqd_file_rename(from, to) < 0 ? -1 : mqd_file_sync_directory(directory);
}

/* ---- the truncation ---- */

/* Builds the listing from the known segments, so that the files of a running compaction are left
 * alone. */
static int listing_of(const struct mqd_partition *partition, struct mqd_listing *out)
{
    *out = (struct mqd_listing){.log_count = partition->segment_count};
    out->logs = malloc(partition->segment_count * sizeof *out->logs);
    out->snapshots = malloc(2 * sizeof *out->snapshots);
    if (!out->logs || !out->snapshots) {
        mqd_listing_free(out);
        return mqd_error_set(ENOMEM, "out of memory for a list of segments");
    }
    memcpy(out->logs, partition->segments, partition->segment_count * sizeof *out->logs);
    if (partition->snapshot_previous >= 0)
        out->snapshots[out->snapshot_count++] = partition->snapshot_previous;
    if (partition->snapshot_offset >= 0)
        out->snapshots[out->snapshot_count++] = partition->snapshot_offset;
    return 0;
}

/* Flushes the files that wait for a flush, including those of epochs and aborted transactions,
 * which recovery may leave unflushed when it does not change them. Closes the descriptors. */
static int close_files(struct mqd_partition *partition)
{
    int error = 0;
    for (uint32_t i = 0; i < partition->sync_queue_count; i++) {
        if (mqd_file_sync(partition->sync_queue[i].fd, false) < 0)
            error = errno;
        mqd_file_close(partition->sync_queue[i].fd);
    }
    partition->sync_queue_count = 0;
    /* entries that cannot be written are rebuilt by recovery's walk over the log */
    mqd_index_seal(&partition->active.index, partition->path, partition->active.base_offset);
    mqd_index_close_files(&partition->active.index);
    mqd_txn_index_close(&partition->active.txn_index);
    mqd_file_close(partition->active.fd);
    partition->active.fd = -1;
    return error ? mqd_error_system(error, "%s: cannot flush before the truncation", partition->path) : 0;
}

/* Moves `fresh` into `partition`, which keeps its identity, its role and its high watermark. */
static void take_over(struct mqd_partition *partition, struct mqd_partition *fresh, struct mqd_truncation *out)
{
    struct mqd_partition old = *partition;
    fresh->replicated = old.replicated;
    fresh->marks = old.marks;
    old.marks = NULL;
    fresh->txn_index_created = old.txn_index_created;
    fresh->gaps_recorded = old.gaps_recorded;
    fresh->high_watermark = old.high_watermark;
    out->below_high_watermark = old.high_watermark.offset > fresh->log_end_offset;
    out->log_end_offset = fresh->log_end_offset;
    *partition = *fresh;
    *fresh = old;
    mqd_partition_free(fresh);
    mqd_partition_truncate_marks(partition); /* of the log (log/partition_marks.c), not mark files */
    mqd_partition_advance_marks(partition);
    mqd_partition_check(partition);
}

/* Whether nothing was changed: the mark could not be written and does not exist. */
static bool is_untouched(const struct mqd_partition *partition)
{
    char path[PATH_MAX];
    return mqd_error_is_transient(mqd_error_code()) &&
           mark_file_path(path, partition->path, MQD_TRUNCATING_FILE) == 0 && access(path, F_OK) < 0 && errno == ENOENT;
}

static int cut(struct mqd_partition *partition, int64_t cut_offset, int64_t start_offset, int64_t now_ms,
               struct mqd_truncation *out)
{
    struct mqd_listing listing;
    int64_t durable = partition->durable.offset;
    struct mqd_recovery recovery = {.recovery_point_offset = durable < cut_offset ? durable : cut_offset,
                                    .trusted_end_offset = cut_offset,
                                    .replicated = partition->replicated,
                                    .high_watermark = partition->high_watermark.offset,
                                    .log_start_offset = start_offset >= 0 ? start_offset : partition->log_start_offset};
    if (listing_of(partition, &listing) < 0)
        return -1;
    struct mqd_partition *fresh = NULL;
    int begun = mqd_truncation_begin(partition->path, cut_offset, start_offset);
    if (begun < 0 && is_untouched(partition)) {
        mqd_listing_free(&listing);
        return -1;
    }
    if (begun == 0 && close_files(partition) == 0)
        fresh = mqd_recovery_cut(partition, &listing, start_offset >= 0 ? -1 : cut_offset, now_ms, &recovery);
    mqd_listing_free(&listing);
    if (fresh && mqd_truncation_end(partition->path, now_ms) < 0) {
        mqd_partition_free(fresh);
        fresh = NULL;
    }
    if (!fresh) {
        mqd_partition_fence(partition);
        return -1;
    }
    out->cut_bytes = recovery.truncated_bytes;
    take_over(partition, fresh, out);
    return 0;
}

int mqd_partition_truncate(struct mqd_partition *partition, int64_t offset, int64_t now_ms, struct mqd_truncation *out)
{
    *out = (struct mqd_truncation){.log_end_offset = partition->log_end_offset};
    if (partition->fenced)
        return mqd_error_set(EIO, "%s: fenced after an earlier failure", partition->path);
    if (offset >= partition->log_end_offset) {
        mqd_partition_drop_epochs(partition);
        return 0;
    }
    if (offset < partition->segments[0] || offset < partition->log_start_offset)
        return cut(partition, 0, offset < 0 ? 0 : offset, now_ms, out);
    return cut(partition, offset, -1, now_ms, out);
}

int mqd_partition_restart_at(struct mqd_partition *partition, int64_t offset, int64_t batch_offset, int64_t now_ms,
                             struct mqd_truncation *out)
{
    *out = (struct mqd_truncation){.log_end_offset = partition->log_end_offset};
    if (partition->fenced)
        return mqd_error_set(EIO, "%s: fenced after an earlier failure", partition->path);
    if (cut(partition, 0, batch_offset, now_ms, out) < 0)
        return -1;
    /* The segment is named by the batch's base offset; records below `offset` are not part of the
     * log. */
    partition->log_start_offset = partition->log_end_offset = partition->staged_end_offset = out->log_end_offset =
        offset;
    partition->durable = partition->high_watermark = mqd_partition_end_mark(partition);
    mqd_partition_check(partition);
    return 0;
}
