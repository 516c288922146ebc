/* The file layer; see base/file.h. Tests can record changes in a journal and inject faults
 * (base/file_watch.h); here this costs one predictable branch.
 *
 * Every call that fails sets mqd_error; those used only from C (open, pwritev, sync, ...) also
 * leave errno as the system set it.
 */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"
#include "base/file_watch.h"

#define WATCHED __builtin_expect(mqd_load_relaxed(&mqd_file_watched), 0)

/* Sets both errno and mqd_error: a caller that checks only one of them still sees the failure.
 * `subject` is the path, or the name of the operation. */
static ssize_t report(ssize_t result, const char *subject)
{
    if (result < 0) {
        int error = errno;
        mqd_error_system(error, "%s", subject);
        errno = error;
    }
    return result;
}

int mqd_file_open(const char *path, int flags, mode_t mode)
{
    int fd;
    flags |= O_CLOEXEC;
    do
        fd = WATCHED ? mqd_watched_open(path, flags, mode) : open(path, flags, mode);
    while (fd < 0 && errno == EINTR);
    return (int)report(fd, path);
}

ssize_t mqd_file_pwritev(int fd, const struct iovec *iov, int count, int64_t offset)
{
    ssize_t written;
    do
        written = WATCHED ? mqd_watched_pwritev(fd, iov, count, offset) : pwritev(fd, iov, count, offset);
    while (written < 0 && errno == EINTR);
    return report(written, "write");
}

ssize_t mqd_file_pwrite(int fd, const void *bytes, size_t size_bytes, int64_t offset)
{
    struct iovec iov = {(void *)bytes, size_bytes};
    return mqd_file_pwritev(fd, &iov, 1, offset);
}

int mqd_file_sync(int fd, bool is_directory)
{
    return (int)report(WATCHED        ? mqd_watched_sync(fd, is_directory)
                       : is_directory ? fsync(fd)
                                      : fdatasync(fd),
                       "flush");
}

int mqd_file_syncfs(int fd, const char *root)
{
    return (int)report(WATCHED ? mqd_watched_syncfs(fd, root) : syncfs(fd), "flush of the file system");
}

bool mqd_file_sync_can_be_delayed(void)
{
    return WATCHED && mqd_watched_sync_can_be_delayed();
}

void mqd_file_sync_begin(int fd)
{
    if (WATCHED)
        mqd_watched_sync_begin(fd);
}

int mqd_file_sync_end(int fd, bool is_directory, int result)
{
    return WATCHED ? mqd_watched_sync_end(fd, result) : result;
}

int mqd_file_truncate(int fd, int64_t size_bytes)
{
    int result;
    do
        result = WATCHED ? mqd_watched_truncate(fd, size_bytes) : ftruncate(fd, size_bytes);
    while (result < 0 && errno == EINTR);
    return (int)report(result, "truncate");
}

int mqd_file_rename(const char *from, const char *to)
{
    return (int)report(WATCHED ? mqd_watched_rename(from, to) : rename(from, to), from);
}

int mqd_file_fallocate(int fd, int mode, int64_t offset, int64_t size_bytes)
{
    int result;
    do
        result =
            WATCHED ? mqd_watched_fallocate(fd, mode, offset, size_bytes) : fallocate(fd, mode, offset, size_bytes);
    while (result < 0 && errno == EINTR);
    return (int)report(result, "fallocate");
}

int mqd_file_close(int fd)
{
    return fd >= 0 && close(fd) < 0 && errno != EINTR ? mqd_error_system(errno, "close") : 0;
}

int mqd_file_unlink(const char *path)
{
    int result = WATCHED ? mqd_watched_unlink(path) : unlink(path);
    return result < 0 ? mqd_error_system(errno, "cannot delete %s", path) : 0;
}

int mqd_file_mkdir(const char *path, unsigned int mode)
{
    int result = WATCHED ? mqd_watched_mkdir(path, mode) : mkdir(path, mode);
    return result < 0 ? mqd_error_system(errno, "cannot create directory %s", path) : 0;
}

int mqd_file_sync_directory(const char *path)
{
    int fd = mqd_file_open(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0)
        return mqd_error_system(errno, "cannot open directory %s", path);
    int error = mqd_file_sync(fd, true) < 0 ? errno : 0;
    close(fd);
    return error ? mqd_error_system(error, "cannot flush directory %s", path) : 0;
}

/* On failure sets errno; the caller adds the file's name to the error. */
static int write_fully(int fd, const uint8_t *bytes, size_t size_bytes, int64_t position)
{
    while (size_bytes > 0) {
        ssize_t written = mqd_file_pwrite(fd, bytes, size_bytes, position);
        if (written <= 0) {
            if (written == 0)
                errno = EIO;
            return -1;
        }
        bytes += written;
        size_bytes -= (size_t)written;
        position += written;
    }
    return 0;
}

static int directory_of(const char *path, char out[PATH_MAX])
{
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) : 1;
    if (length >= PATH_MAX)
        return mqd_error_set(ENAMETOOLONG, "path too long: %s", path);
    memcpy(out, slash ? path : ".", length);
    if (slash == path)
        out[length++] = '/';
    out[length] = 0;
    return 0;
}

static int write_temporary(const char *temporary, const uint8_t *bytes, size_t size_bytes)
{
    int fd = mqd_file_open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0)
        return mqd_error_system(errno, "cannot create %s", temporary);
    int error = write_fully(fd, bytes, size_bytes, 0) < 0 || mqd_file_sync(fd, false) < 0 ? errno : 0;
    close(fd);
    if (error) {
        mqd_file_unlink(temporary);
        return mqd_error_system(error, "cannot write %s", temporary);
    }
    return 0;
}

int mqd_file_replace(const char *path, const uint8_t *bytes, size_t size_bytes)
{
    char temporary[PATH_MAX], directory[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.tmp", path) >= (int)sizeof temporary)
        return mqd_error_set(ENAMETOOLONG, "path too long: %s", path);
    if (directory_of(path, directory) < 0 || write_temporary(temporary, bytes, size_bytes) < 0)
        return -1;
    if (mqd_file_rename(temporary, path) < 0) {
        int error = errno;
        mqd_file_unlink(temporary);
        return mqd_error_system(error, "cannot rename %s to %s", temporary, path);
    }
    return mqd_file_sync_directory(directory);
}

int mqd_file_open_append(const char *path, int64_t position)
{
    int fd = mqd_file_open(path, O_RDWR | O_CREAT, 0644);
    if (fd < 0)
        return mqd_error_system(errno, "cannot open %s", path);
    struct stat status;
    int error = 0;
    if (fstat(fd, &status) < 0)
        error = errno;
    else if (position < 0 || status.st_size < position) {
        close(fd);
        return mqd_error_set(MQD_E_INVALID, "%s holds %lld bytes; appending at %lld would leave a hole", path,
                             (long long)status.st_size, (long long)position);
    } else if (status.st_size > position && mqd_file_truncate(fd, position) < 0)
        error = errno;
    if (!error)
        return fd;
    close(fd);
    return mqd_error_system(error, "cannot open %s for appending", path);
}

/* On failure the file is truncated to `position`, so that a later append at the same place starts
 * clean. */
int mqd_file_append(int fd, const uint8_t *bytes, size_t size_bytes, int64_t position)
{
    if (write_fully(fd, bytes, size_bytes, position) == 0)
        return 0;
    int error = errno;
    if (mqd_file_truncate(fd, position) < 0)
        return mqd_error_system(errno, "append of %zu bytes at %lld failed (errno %d), and so did truncating the file",
                                size_bytes, (long long)position, error);
    return mqd_error_system(error, "cannot append %zu bytes at %lld", size_bytes, (long long)position);
}

int mqd_file_flush(int fd)
{
    return mqd_file_sync(fd, false) < 0 ? mqd_error_system(errno, "cannot flush") : 0;
}
