/* See log/index.h. */
#include "log/index.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "log/segment.h"

void mqd_index_init(struct mqd_index *index)
{
    memset(index, 0, offsetof(struct mqd_index, pending));
    index->fd = index->time_fd = -1;
    index->max_timestamp_ms = index->max_timestamp_offset = index->last_time_entry_ms = -1;
}

/* Makes room while the disk is full: drops every second pending entry, but never the newest. */
static void thin_out(struct mqd_index *index)
{
    uint16_t kept = 0;
    for (uint16_t i = (index->pending_count + 1) % 2; i < index->pending_count; i += 2)
        index->pending[kept++] = index->pending[i];
    index->pending_count = kept;
    kept = 0;
    for (uint16_t i = (index->time_pending_count + 1) % 2; i < index->time_pending_count; i += 2)
        index->time_pending[kept++] = index->time_pending[i];
    index->time_pending_count = kept;
}

static bool pending_full(const struct mqd_index *index)
{
    return index->pending_count == MQD_INDEX_PENDING_MAX || index->time_pending_count == MQD_INDEX_PENDING_MAX;
}

void mqd_index_add_time_entry(struct mqd_index *index, int64_t segment_base)
{
    if (index->max_timestamp_ms <= index->last_time_entry_ms)
        return;
    if (index->time_pending_count == MQD_INDEX_PENDING_MAX)
        thin_out(index);
    index->time_pending[index->time_pending_count++] =
        (struct mqd_time_index_entry){index->max_timestamp_ms, (uint32_t)(index->max_timestamp_offset - segment_base)};
    index->last_time_entry_ms = index->max_timestamp_ms;
}

int mqd_index_add(struct mqd_index *index, int64_t segment_base, int32_t interval_bytes, const struct mqd_batch *batch,
                  uint32_t position)
{
    if (batch->max_timestamp_ms > index->max_timestamp_ms) {
        index->max_timestamp_ms = batch->max_timestamp_ms;
        index->max_timestamp_offset = mqd_batch_end_offset(batch) - 1;
    }
    if (index->bytes_since_entry > interval_bytes) {
        if (pending_full(index))
            thin_out(index);
        index->pending[index->pending_count++] =
            (struct mqd_index_entry){(uint32_t)(batch->base_offset - segment_base), position};
        mqd_index_add_time_entry(index, segment_base);
        index->bytes_since_entry = 0;
    }
    index->bytes_since_entry += batch->size_bytes;
    index->bytes_since_flush += batch->size_bytes;
    return pending_full(index) || (index->pending_count > 0 && index->bytes_since_flush >= MQD_INDEX_PENDING_LOG_BYTES);
}

bool mqd_index_full(const struct mqd_index *index, uint32_t more_count)
{
    return index->file_bytes + (index->pending_count + more_count) * MQD_INDEX_ENTRY_BYTES > MQD_INDEX_FILE_BYTES_MAX ||
           index->time_file_bytes + (index->time_pending_count + more_count + 1) * MQD_TIME_INDEX_ENTRY_BYTES >
               MQD_INDEX_FILE_BYTES_MAX;
}

/* Opens one index file and truncates it to size_bytes, so that it has only the entries that `index`
 * counts. */
static int open_file(const char *directory, int64_t segment_base, enum mqd_file_kind kind, uint32_t size_bytes)
{
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, directory, segment_base, kind) < 0) {
        errno = ENAMETOOLONG;
        return -1;
    }
    struct stat status;
    int fd = mqd_file_open(path, O_RDWR | O_CREAT, 0644);
    if (fd < 0)
        return -1;
    if (fstat(fd, &status) < 0 || (status.st_size != size_bytes && mqd_file_truncate(fd, size_bytes) < 0)) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

/* Appends all bytes or none: after a short write the file is truncated (I3). */
static int append_fully(int fd, const uint8_t *bytes, uint32_t size_bytes, uint32_t position)
{
    ssize_t written = mqd_file_pwrite(fd, bytes, size_bytes, position);
    if (written == (ssize_t)size_bytes)
        return 0;
    int error = written < 0 ? errno : ENOSPC; /* a short write to a regular file: the disk filled up */
    if (written > 0 && mqd_file_truncate(fd, position) < 0)
        error = errno;
    errno = error;
    return -1;
}

static int flush_offsets(struct mqd_index *index, const char *directory, int64_t segment_base)
{
    uint8_t bytes[MQD_INDEX_PENDING_MAX * MQD_INDEX_ENTRY_BYTES];
    uint32_t size_bytes = index->pending_count * (uint32_t)MQD_INDEX_ENTRY_BYTES;
    if (size_bytes == 0)
        return 0;
    uint8_t *at = bytes;
    for (uint16_t i = 0; i < index->pending_count; i++)
        at = mqd_index_entry_put(at, &index->pending[i]);
    if (index->fd < 0 && (index->fd = open_file(directory, segment_base, MQD_FILE_INDEX, index->file_bytes)) < 0)
        return -1;
    if (append_fully(index->fd, bytes, size_bytes, index->file_bytes) < 0)
        return -1;
    index->file_bytes += size_bytes;
    index->pending_count = 0;
    return 0;
}

static int flush_times(struct mqd_index *index, const char *directory, int64_t segment_base)
{
    uint8_t bytes[MQD_INDEX_PENDING_MAX * MQD_TIME_INDEX_ENTRY_BYTES];
    uint32_t size_bytes = index->time_pending_count * (uint32_t)MQD_TIME_INDEX_ENTRY_BYTES;
    if (size_bytes == 0)
        return 0;
    uint8_t *at = bytes;
    for (uint16_t i = 0; i < index->time_pending_count; i++)
        at = mqd_time_index_entry_put(at, &index->time_pending[i]);
    if (index->time_fd < 0 &&
        (index->time_fd = open_file(directory, segment_base, MQD_FILE_TIME_INDEX, index->time_file_bytes)) < 0)
        return -1;
    if (append_fully(index->time_fd, bytes, size_bytes, index->time_file_bytes) < 0)
        return -1;
    index->time_file_bytes += size_bytes;
    index->time_pending_count = 0;
    return 0;
}

int mqd_index_flush(struct mqd_index *index, const char *directory, int64_t segment_base)
{
    /* Writes the times first: a process killed in between leaves a .timeindex that is ahead, and
     * mqd_index_load ignores its last entries; one that lags could not be detected. */
    if (flush_times(index, directory, segment_base) == 0 && flush_offsets(index, directory, segment_base) == 0) {
        index->bytes_since_flush = 0;
        return 0;
    }
    if (pending_full(index))
        thin_out(index);
    index->bytes_since_flush = 0; /* so that the very next batch does not retry */
    return -1;
}

int mqd_index_seal(struct mqd_index *index, const char *directory, int64_t segment_base)
{
    if (index->time_pending_count == MQD_INDEX_PENDING_MAX && mqd_index_flush(index, directory, segment_base) < 0)
        return -1;
    mqd_index_add_time_entry(index, segment_base);
    return mqd_index_flush(index, directory, segment_base);
}

/* Calls `action` for both files if `sizes` is NULL, otherwise only for those whose size differs
 * from `sizes`. Does not open the rest, because there may be no descriptors left. */
static int for_each_file(const char *directory, int64_t segment_base, int (*action)(int fd, int64_t size_bytes),
                         const int64_t *sizes)
{
    for (int i = 0; i < 2; i++) {
        char path[PATH_MAX];
        struct stat status;
        if (mqd_segment_path(path, sizeof path, directory, segment_base, i ? MQD_FILE_TIME_INDEX : MQD_FILE_INDEX) < 0)
            return -1;
        int result = stat(path, &status);
        if ((result < 0 && errno == ENOENT) || (result == 0 && sizes && status.st_size == sizes[i]))
            continue;
        int fd = mqd_file_open(path, O_RDWR, 0);
        int error = fd < 0 || action(fd, sizes ? sizes[i] : 0) < 0 ? errno : 0;
        if (fd >= 0)
            close(fd);
        if (error) {
            mqd_error_system(error, "%s", path);
            errno = error;
            return -1;
        }
    }
    return 0;
}

int mqd_index_cut_files(struct mqd_index *index, const char *directory, int64_t segment_base)
{
    const int64_t sizes[] = {index->file_bytes, index->time_file_bytes};
    if ((index->fd >= 0 && mqd_file_truncate(index->fd, sizes[0]) < 0) ||
        (index->time_fd >= 0 && mqd_file_truncate(index->time_fd, sizes[1]) < 0))
        return -1;
    return for_each_file(directory, segment_base, mqd_file_truncate, sizes);
}

static int sync_file(int fd, int64_t size_bytes)
{
    return mqd_file_sync(fd, false);
}

int mqd_index_sync(const char *directory, int64_t segment_base)
{
    return for_each_file(directory, segment_base, sync_file, NULL);
}

void mqd_index_close_files(struct mqd_index *index)
{
    mqd_file_close(index->fd);
    mqd_file_close(index->time_fd);
    index->fd = index->time_fd = -1;
}
