/* The file layer while a journal or faults are configured; see base/file_watch.h. Nothing here runs
 * in production. */
#include "base/file_watch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"

#define RECORD_MAGIC 0x314a514du
#define SYNC_COUNT_MAX 4096

struct record {
    uint32_t magic;
    uint16_t op, path_bytes;
    uint64_t sequence, time_ns;
    int64_t offset;
    uint64_t length;
    union {
        uint64_t begin_sequence; /* SYNC_DONE, SYNCFS_DONE */
        uint64_t created;        /* CREATE: 1 = the directory entry is new */
    };
    int32_t result;
    uint32_t data_bytes;
};
_Static_assert(sizeof(struct record) == 56, "documented in base/file_watch.h");

bool mqd_file_watched;

static struct {
    pthread_mutex_t mutex;
    char journal_path[PATH_MAX - 16]; /* without the ".PID" at its end; "" = no journal */
    int fd;
    pid_t pid; /* owner of the journal fd; a forked child starts its own */
    uint64_t sequence;
    struct {
        int fd;
        uint64_t sequence;
    } syncs[SYNC_COUNT_MAX]; /* asynchronous flushes in flight, oldest first */
    int sync_count;
} watch = {.mutex = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

static int journal_open(void)
{
    char path[PATH_MAX];
    if (watch.fd >= 0)
        close(watch.fd);
    watch.pid = getpid();
    watch.sequence = 0;
    watch.sync_count = 0;
    snprintf(path, sizeof path, "%s.%d", watch.journal_path, (int)watch.pid);
    watch.fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    return watch.fd < 0 ? mqd_error_system(errno, "cannot open the file journal %s", path) : 0;
}

int mqd_file_watch(const char *journal_path, const char *faults)
{
    pthread_mutex_lock(&watch.mutex);
    int result = mqd_file_faults_configure(faults);
    snprintf(watch.journal_path, sizeof watch.journal_path, "%s", journal_path ? journal_path : "");
    if (result == 0 && journal_path)
        result = journal_open();
    mqd_store_relaxed(&mqd_file_watched, result == 0 && (journal_path || faults));
    pthread_mutex_unlock(&watch.mutex);
    return result;
}

/* A test that requested faults but runs without them would prove nothing, so an invalid
 * specification ends the process. */
__attribute__((constructor)) static void watch_from_environment(void)
{
    const char *journal_path = getenv("MQD_FILE_JOURNAL"), *faults = getenv("MQD_FILE_FAULTS");
    journal_path = journal_path && *journal_path ? journal_path : NULL;
    faults = faults && *faults ? faults : NULL;
    if ((journal_path || faults) && mqd_file_watch(journal_path, faults) < 0) {
        fprintf(stderr, "mqd: %s\n", mqd_error_message());
        _exit(78);
    }
}

/* ---- names ---- */

/* Stores the file's current path in `out`. The file may have been renamed since it was opened, and
 * may have been opened by code outside of this layer. */
static void path_of(int fd, char out[PATH_MAX])
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length > 0 ? length : 0] = 0;
    static const char deleted[] = " (deleted)";
    if (length > (ssize_t)sizeof deleted && strcmp(out + length - (sizeof deleted - 1), deleted) == 0)
        out[length - (ssize_t)(sizeof deleted - 1)] = 0;
}

/* Stores the absolute path in `out`. Only its directory part is resolved: the last component may
 * not exist. */
static void make_absolute(const char *path, char out[PATH_MAX])
{
    char copy[PATH_MAX], resolved[PATH_MAX];
    snprintf(copy, sizeof copy, "%s", path);
    size_t length = strlen(copy);
    while (length > 1 && copy[length - 1] == '/')
        copy[--length] = 0;
    char *slash = strrchr(copy, '/');
    const char *name = slash ? slash + 1 : copy;
    if (slash)
        *slash = 0;
    if (!realpath(slash ? (copy[0] ? copy : "/") : ".", resolved))
        snprintf(resolved, sizeof resolved, "%s", slash ? copy : ".");
    if (snprintf(out, PATH_MAX, "%s/%s", strcmp(resolved, "/") ? resolved : "", name) >= PATH_MAX)
        out[PATH_MAX - 1] = 0;
}

/* ---- records ---- */

static void write_record(struct iovec *iov, int count)
{
    while (count > 0) {
        ssize_t written = writev(watch.fd, iov, count > IOV_MAX ? IOV_MAX : count);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0) { /* a journal with a gap could make a test accept lost data */
            fprintf(stderr, "mqd: file journal: %s\n", strerror(errno));
            abort();
        }
        while (count > 0 && (size_t)written >= iov->iov_len) {
            written -= (ssize_t)iov->iov_len;
            iov++, count--;
        }
        if (count > 0) {
            iov->iov_base = (char *)iov->iov_base + written;
            iov->iov_len -= (size_t)written;
        }
    }
}

/* The mutex is held. The record's data are the first record.data_bytes bytes of the `count` iovecs
 * in `data`. Returns the sequence number (0 without a journal). Preserves errno. */
static uint64_t journal_add(struct record record, const char *path, const struct iovec *data, int count)
{
    int saved_errno = errno;
    if (!watch.journal_path[0])
        return 0;
    if (watch.pid != getpid() && journal_open() < 0)
        abort();
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    record.magic = RECORD_MAGIC;
    record.sequence = ++watch.sequence;
    record.time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    record.path_bytes = (uint16_t)strlen(path);
    struct iovec iov[IOV_MAX + 2] = {{&record, sizeof record}, {(void *)path, record.path_bytes}};
    int iov_count = 2;
    size_t bytes_left = record.data_bytes;
    for (int i = 0; i < count && bytes_left > 0; i++) {
        iov[iov_count] = data[i];
        if (iov[iov_count].iov_len > bytes_left)
            iov[iov_count].iov_len = bytes_left;
        bytes_left -= iov[iov_count++].iov_len;
    }
    write_record(iov, iov_count);
    errno = saved_errno;
    return record.sequence;
}

/* The mutex is held on entry and return, and released while a DELAY sleeps. Returns -1 with errno
 * when the call must fail. */
static int apply_faults(enum mqd_file_call call, const char *path, uint64_t size_bytes, int64_t *bytes_max)
{
    struct mqd_file_fault fault = mqd_file_faults_apply(call, path, size_bytes);
    if (fault.delay_ms) {
        pthread_mutex_unlock(&watch.mutex);
        struct timespec pause = {fault.delay_ms / 1000, (long)(fault.delay_ms % 1000) * 1000000};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&watch.mutex);
    }
    if (bytes_max)
        *bytes_max = fault.bytes_max;
    errno = fault.error;
    return fault.error ? -1 : 0;
}

/* ---- the calls ---- */

int mqd_watched_open(const char *path, int flags, mode_t mode)
{
    char name[PATH_MAX];
    make_absolute(path, name);
    pthread_mutex_lock(&watch.mutex);
    int fd = -1;
    struct stat before;
    bool existed = stat(path, &before) == 0;
    if (apply_faults(MQD_CALL_OPEN, name, 0, NULL) == 0)
        fd = open(path, flags, mode);
    if (fd >= 0 && (flags & O_CREAT))
        journal_add((struct record){.op = MQD_FILE_CREATE, .created = !existed}, name, NULL, 0);
    if (fd >= 0 && (flags & O_TRUNC) && existed && before.st_size > 0)
        journal_add((struct record){.op = MQD_FILE_TRUNCATE}, name, NULL, 0);
    pthread_mutex_unlock(&watch.mutex);
    return fd;
}

static uint64_t iovec_bytes(const struct iovec *iov, int count)
{
    uint64_t total = 0;
    for (int i = 0; i < count; i++)
        total += iov[i].iov_len;
    return total;
}

/* pwritev of at most bytes_max bytes; bytes_max -1: no limit. */
static ssize_t write_some(int fd, const struct iovec *iov, int count, int64_t offset, int64_t bytes_max)
{
    if (bytes_max < 0)
        return pwritev(fd, iov, count, offset);
    ssize_t total = 0;
    for (int i = 0; i < count && bytes_max > 0; i++) {
        size_t part = iov[i].iov_len < (size_t)bytes_max ? iov[i].iov_len : (size_t)bytes_max;
        ssize_t written = pwrite(fd, iov[i].iov_base, part, offset + total);
        if (written < 0)
            return total > 0 ? total : -1;
        total += written;
        bytes_max -= written;
        if ((size_t)written < part)
            break;
    }
    return total;
}

ssize_t mqd_watched_pwritev(int fd, const struct iovec *iov, int count, int64_t offset)
{
    char name[PATH_MAX];
    path_of(fd, name);
    int64_t bytes_max;
    ssize_t written = -1;
    pthread_mutex_lock(&watch.mutex);
    if (apply_faults(MQD_CALL_WRITE, name, iovec_bytes(iov, count), &bytes_max) == 0)
        written = write_some(fd, iov, count, offset, bytes_max);
    if (written > 0)
        journal_add(
            (struct record){
                .op = MQD_FILE_WRITE, .offset = offset, .length = (uint64_t)written, .data_bytes = (uint32_t)written},
            name, iov, count);
    pthread_mutex_unlock(&watch.mutex);
    return written;
}

static int journaled_sync(enum mqd_file_call call, enum mqd_file_op begin, enum mqd_file_op done, const char *name,
                          int fd, int (*flush)(int))
{
    pthread_mutex_lock(&watch.mutex);
    uint64_t sequence = journal_add((struct record){.op = begin}, name, NULL, 0);
    int result = apply_faults(call, name, 0, NULL);
    pthread_mutex_unlock(&watch.mutex);
    if (result == 0)
        result = flush(fd);
    int error = result < 0 ? errno : 0;
    pthread_mutex_lock(&watch.mutex);
    journal_add((struct record){.op = done, .begin_sequence = sequence, .result = -error}, name, NULL, 0);
    pthread_mutex_unlock(&watch.mutex);
    errno = error;
    return result;
}

int mqd_watched_sync(int fd, bool is_directory)
{
    char name[PATH_MAX];
    path_of(fd, name);
    return journaled_sync(MQD_CALL_SYNC, MQD_FILE_SYNC_BEGIN, MQD_FILE_SYNC_DONE, name, fd,
                          is_directory ? fsync : fdatasync);
}

int mqd_watched_syncfs(int fd, const char *root)
{
    char name[PATH_MAX];
    make_absolute(root, name);
    return journaled_sync(MQD_CALL_SYNCFS, MQD_FILE_SYNCFS_BEGIN, MQD_FILE_SYNCFS_DONE, name, fd, syncfs);
}

bool mqd_watched_sync_can_be_delayed(void)
{
    pthread_mutex_lock(&watch.mutex);
    bool may_delay = mqd_file_faults_may_delay(MQD_CALL_SYNC);
    pthread_mutex_unlock(&watch.mutex);
    return may_delay;
}

void mqd_watched_sync_begin(int fd)
{
    char name[PATH_MAX];
    path_of(fd, name);
    pthread_mutex_lock(&watch.mutex);
    uint64_t sequence = journal_add((struct record){.op = MQD_FILE_SYNC_BEGIN}, name, NULL, 0);
    if (watch.sync_count < SYNC_COUNT_MAX) {
        watch.syncs[watch.sync_count].fd = fd;
        watch.syncs[watch.sync_count++].sequence = sequence;
    }
    pthread_mutex_unlock(&watch.mutex);
}

/* Several flushes of one fd may be running: a completion is attributed to the oldest SYNC_BEGIN,
 * so it never covers more writes than the flush did. A completion without a recorded SYNC_BEGIN
 * refers to sequence number 0 and covers nothing. */
int mqd_watched_sync_end(int fd, int result)
{
    char name[PATH_MAX];
    path_of(fd, name);
    pthread_mutex_lock(&watch.mutex);
    uint64_t sequence = 0;
    for (int i = 0; i < watch.sync_count; i++)
        if (watch.syncs[i].fd == fd) {
            sequence = watch.syncs[i].sequence;
            memmove(&watch.syncs[i], &watch.syncs[i + 1], (size_t)(--watch.sync_count - i) * sizeof watch.syncs[0]);
            break;
        }
    if (apply_faults(MQD_CALL_SYNC, name, 0, NULL) < 0)
        result = -errno;
    journal_add((struct record){.op = MQD_FILE_SYNC_DONE, .begin_sequence = sequence, .result = result}, name, NULL, 0);
    pthread_mutex_unlock(&watch.mutex);
    return result;
}

int mqd_watched_truncate(int fd, int64_t size_bytes)
{
    char name[PATH_MAX];
    path_of(fd, name);
    pthread_mutex_lock(&watch.mutex);
    int result = apply_faults(MQD_CALL_TRUNCATE, name, 0, NULL);
    if (result == 0)
        result = ftruncate(fd, size_bytes);
    if (result == 0)
        journal_add((struct record){.op = MQD_FILE_TRUNCATE, .offset = size_bytes}, name, NULL, 0);
    pthread_mutex_unlock(&watch.mutex);
    return result;
}

int mqd_watched_rename(const char *from, const char *to)
{
    char old_name[PATH_MAX], new_name[PATH_MAX];
    make_absolute(from, old_name);
    make_absolute(to, new_name);
    pthread_mutex_lock(&watch.mutex);
    int result = apply_faults(MQD_CALL_RENAME, old_name, 0, NULL);
    if (result == 0)
        result = rename(from, to);
    struct iovec target = {new_name, strlen(new_name)};
    if (result == 0)
        journal_add((struct record){.op = MQD_FILE_RENAME, .data_bytes = (uint32_t)target.iov_len}, old_name, &target,
                    1);
    pthread_mutex_unlock(&watch.mutex);
    return result;
}

int mqd_watched_unlink(const char *path)
{
    char name[PATH_MAX];
    make_absolute(path, name);
    pthread_mutex_lock(&watch.mutex);
    int result = apply_faults(MQD_CALL_UNLINK, name, 0, NULL);
    if (result == 0)
        result = unlink(path);
    if (result == 0)
        journal_add((struct record){.op = MQD_FILE_UNLINK}, name, NULL, 0);
    pthread_mutex_unlock(&watch.mutex);
    return result;
}

int mqd_watched_mkdir(const char *path, mode_t mode)
{
    char name[PATH_MAX];
    make_absolute(path, name);
    pthread_mutex_lock(&watch.mutex);
    int result = apply_faults(MQD_CALL_MKDIR, name, 0, NULL);
    if (result == 0)
        result = mkdir(path, mode);
    if (result == 0)
        journal_add((struct record){.op = MQD_FILE_MKDIR}, name, NULL, 0);
    pthread_mutex_unlock(&watch.mutex);
    return result;
}

int mqd_watched_fallocate(int fd, int mode, int64_t offset, int64_t size_bytes)
{
    char name[PATH_MAX];
    path_of(fd, name);
    pthread_mutex_lock(&watch.mutex);
    int result = apply_faults(MQD_CALL_FALLOCATE, name, (uint64_t)size_bytes, NULL);
    if (result == 0)
        result = fallocate(fd, mode, offset, size_bytes);
    if (result == 0)
        journal_add((struct record){.op = MQD_FILE_FALLOCATE, .offset = offset, .length = (uint64_t)size_bytes}, name,
                    NULL, 0);
    pthread_mutex_unlock(&watch.mutex);
    return result;
}
