/* Called by base/file.c instead of the plain system calls while a journal or faults are configured;
 * for base/file*.c and tests.
 *
 * Journal: PATH.PID, one record per change, in the order in which the changes took effect. Little
 * endian:
 *
 *    0  u32  0x314a514d ("MQJ1")
 *    4  u16  op, enum mqd_file_op
 *    6  u16  path_bytes
 *    8  u64  sequence number, from 1, per process
 *   16  u64  CLOCK_MONOTONIC ns, to merge the journals of several processes. Taken after the
 *       effect; for SYNC_BEGIN before it
 *   24  i64  offset. WRITE, FALLOCATE: where the range begins. TRUNCATE: the new size
 *   32  u64  length. WRITE: bytes written (fewer than requested after a short write). FALLOCATE:
 *       bytes of the range
 *   40  u64  SYNC_DONE: sequence number of its SYNC_BEGIN. CREATE: 1 = the directory entry was
 *       created, 0 = it existed
 *   48  i32  result. SYNC_DONE: 0, or -errno: the flush failed and covers nothing. Otherwise 0:
 *       failed calls are not recorded
 *   52  u32  data_bytes
 *   56  path (absolute, no NUL), then data: WRITE the bytes, RENAME the new path
 *
 * How to read the journal: a write is durable when a SYNC_DONE with result 0 of the same file
 * refers to a SYNC_BEGIN after the write (SYNCFS pairs: any file under `path`). A CREATE, RENAME,
 * UNLINK or MKDIR is durable when the same holds for the directory that contains the name. A torn
 * last record must be ignored: its change is not durable anyway. FALLOCATE never changes content or
 * size (FALLOC_FL_KEEP_SIZE).
 *
 * Faults: MQD_FILE_FAULTS = rules separated by ',' ';' or newline, or @FILE, which holds the rules
 * and is read again whenever it changes (the rules' counts then restart; a missing or empty
 * file means no faults):
 *
 *   op:fault[:path-substring][:key=value]...      '#' starts a comment
 *   op        open write sync syncfs truncate rename fallocate unlink mkdir any (pwritev and pwrite
 *             are `write`)
 *   fault     an errno name (ENOSPC EIO EDQUOT EROFS EACCES EMFILE ENFILE ENOMEM EOPNOTSUPP
 *             EFBIG), SHORT or DELAY
 *   after=N   skips the first N matching calls
 *   count=M   then applies M times (default: always)
 *   bytes=K   SHORT: only the first K bytes are written
 *   ms=T      DELAY: sleeps T ms, then continues
 *   budget=B  for `write` with an errno: the disk accepts B more bytes, then refuses; the write
 *             that crosses the limit is short
 *
 * The first rule that applies decides, except that evaluation continues after DELAY rules.
 * Thread-safe: one mutex orders effects and records; syncs run outside it. Bounds: 32 rules, 4096
 * syncs in flight, paths of 4095 bytes.
 */
#ifndef MQD_FILE_WATCH_H
#define MQD_FILE_WATCH_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

enum mqd_file_op {
    MQD_FILE_CREATE = 1,
    MQD_FILE_WRITE,
    MQD_FILE_SYNC_BEGIN,
    MQD_FILE_SYNC_DONE,
    MQD_FILE_TRUNCATE,
    MQD_FILE_RENAME,
    MQD_FILE_UNLINK,
    MQD_FILE_MKDIR,
    MQD_FILE_FALLOCATE,
    MQD_FILE_SYNCFS_BEGIN,
    MQD_FILE_SYNCFS_DONE
};

enum mqd_file_call {
    MQD_CALL_OPEN,
    MQD_CALL_WRITE,
    MQD_CALL_SYNC,
    MQD_CALL_SYNCFS,
    MQD_CALL_TRUNCATE,
    MQD_CALL_RENAME,
    MQD_CALL_FALLOCATE,
    MQD_CALL_UNLINK,
    MQD_CALL_MKDIR,
    MQD_CALL_ANY
};

/* Whether mqd_file_watch has started watching. Every call of base/file.c loads it with relaxed
 * ordering, even while a test changes it: whatever else a watched call reads is protected by the
 * mutex. */
extern bool mqd_file_watched;

/* Starts (or, with both NULL, ends) watching in this process. Returns -1 with a message when the
 * rules or the journal are unusable. */
int mqd_file_watch(const char *journal_path, const char *faults);

int mqd_watched_open(const char *path, int flags, mode_t mode);
ssize_t mqd_watched_pwritev(int fd, const struct iovec *iov, int count, int64_t offset);
int mqd_watched_sync(int fd, bool is_directory);
int mqd_watched_syncfs(int fd, const char *root);
/* Returns whether a rule may delay flushes: if so, they must run on a thread that may block. */
bool mqd_watched_sync_can_be_delayed(void);
void mqd_watched_sync_begin(int fd);
int mqd_watched_sync_end(int fd, int result);
int mqd_watched_truncate(int fd, int64_t size_bytes);
int mqd_watched_rename(const char *from, const char *to);
int mqd_watched_unlink(const char *path);
int mqd_watched_mkdir(const char *path, mode_t mode);
int mqd_watched_fallocate(int fd, int mode, int64_t offset, int64_t size_bytes);

/* base/file_faults.c; called with the mutex held. */
struct mqd_file_fault {
    int error;         /* 0 = none */
    int64_t bytes_max; /* WRITE: at most this many; -1 = all */
    uint32_t delay_ms;
};
int mqd_file_faults_configure(const char *spec);
bool mqd_file_faults_may_delay(enum mqd_file_call call);
struct mqd_file_fault mqd_file_faults_apply(enum mqd_file_call call, const char *path, uint64_t size_bytes);

#endif
