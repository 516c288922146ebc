/* Ensures that all data found by a recovery is on disk: see log/recovery/recovery.h, C2. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "log/planted_bugs.h"
#include "log/recovery/recovery.h"

#define REWRITE_CHUNK_BYTES (1 << 20)

void mqd_recovery_note_missing(struct mqd_recovery *recovery, int64_t from_offset, int64_t to_offset)
{
    if (recovery->missing_from >= 0)
        return;
    recovery->missing_from = from_offset;
    recovery->missing_to = to_offset;
}

int mqd_recovery_make_directory(const char *path)
{
    struct stat status;
    if (stat(path, &status) == 0)
        return S_ISDIR(status.st_mode) ? 0 : mqd_error_set(ENOTDIR, "%s is not a directory", path);
    char parent[PATH_MAX];
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] != '/')
        length--;
    if (mqd_file_mkdir(path, 0755) < 0)
        return -1;
    if (length <= 1 || length >= sizeof parent)
        return mqd_file_sync_directory(path[0] == '/' ? "/" : ".");
    memcpy(parent, path, length);
    parent[length] = 0;
    return mqd_file_sync_directory(parent);
}

int mqd_recovery_note_shortened(const char *directory)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/" MQD_RECOVERY_SHORTENED, directory) >= (int)sizeof path)
        return mqd_error_set(ENAMETOOLONG, "path too long: %s", directory);
    return mqd_file_replace(path, (const uint8_t *)"1\n", 2);
}

/* Rewrites the same bytes in place, which makes the cached pages dirty again. */
static int rewrite_file(int fd, const char *path)
{
    uint8_t *chunk = malloc(REWRITE_CHUNK_BYTES);
    ssize_t size = chunk ? 1 : 0;
    int result = chunk ? 0 : mqd_error_set(ENOMEM, "no memory to rewrite a segment");
    for (int64_t position = 0; result == 0 && size > 0;) {
        size = pread(fd, chunk, REWRITE_CHUNK_BYTES, position);
        if (size < 0 && errno == EINTR) {
            size = 1;
            continue;
        }
        ssize_t written = size > 0 ? mqd_file_pwrite(fd, chunk, (size_t)size, position) : size;
        if (size < 0 || (size > 0 && written <= 0))
            result = mqd_error_system(written < 0 ? errno : EIO, "cannot rewrite %s after a failed flush", path);
        position += written;
    }
    free(chunk);
    return result;
}

static int flush_segment(const struct mqd_partition *partition, int64_t base_offset, bool rewrite)
{
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, partition->path, base_offset, MQD_FILE_LOG) < 0)
        return -1;
    int fd = mqd_file_open(path, O_RDWR, 0);
    int result = fd < 0 ? mqd_error_system(errno, "cannot open %s", path) : 0;
    if (result == 0 && rewrite && !PLANTED_LOG_BUG(NO_REWRITE))
        result = rewrite_file(fd, path);
    if (result == 0 && mqd_file_sync(fd, false) < 0)
        result = mqd_error_system(errno, "cannot flush %s", path);
    mqd_file_close(fd);
    if (result == 0)
        result = mqd_txn_index_flush(partition->path, base_offset, rewrite);
    return result < 0 ? -1 : mqd_index_sync(partition->path, base_offset);
}

/* A caller that has already flushed the whole file system passes the end of the trusted data as
 * the recovery point, so that no segment is flushed. */
int mqd_recovery_flush(struct mqd_partition *partition, const struct mqd_recovery *recovery, bool changed)
{
    bool flushed = false;
    for (uint32_t i = 0; i < partition->segment_count; i++) {
        bool is_last = i + 1 == partition->segment_count;
        int64_t end_offset = is_last ? partition->log_end_offset : partition->segments[i + 1];
        if (end_offset <= recovery->recovery_point_offset && !(is_last && changed))
            continue;
        if (end_offset == partition->segments[i] && !changed)
            continue;
        if (flush_segment(partition, partition->segments[i], recovery->rewrite) < 0)
            return -1;
        flushed = true;
    }
    if (!flushed && !changed)
        return 0;
    partition->directory_dirty = false;
    return mqd_file_sync_directory(partition->path);
}
