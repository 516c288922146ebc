/* The file layer: every change to a log directory's files goes through these calls, so that a test
 * can record them, make them fail, or discard their effects.
 *
 * In production: thin wrappers over the system calls (one predictable branch). With
 * MQD_FILE_JOURNAL=PATH in the environment every call is also appended to PATH (one file per
 * process: PATH.PID) in the order it took effect, with its data; tests/crash reconstructs from it
 * the possible contents of a disk after a power failure. With MQD_FILE_FAULTS=SPEC calls fail as
 * specified (both: base/file_watch.h). The asynchronous fdatasync of io_uring reports through
 * mqd_file_sync_end() when it has completed.
 */
#ifndef MQD_FILE_H
#define MQD_FILE_H

#include <sys/types.h>
#include <sys/uio.h>

#include "native.h"

/* The largest single write to a segment. For larger writes ext4 uses folios of 128 KiB and more,
 * in memory that a virtual machine has mostly not touched before: 1 to 3.7 CPU-us per KiB instead
 * of 0.15 (measured on Linux 6.18). Compared with that, an additional system call per 64 KiB costs
 * nothing. */
#define MQD_WRITE_BYTES_MAX ((size_t)64 << 10)

/* On failure all of these return -1 with both errno and mqd_error set. */

/* adds O_CLOEXEC */
int mqd_file_open(const char *path, int flags, mode_t mode);
ssize_t mqd_file_pwritev(int fd, const struct iovec *iov, int count, int64_t offset);
ssize_t mqd_file_pwrite(int fd, const void *bytes, size_t size_bytes, int64_t offset);
int mqd_file_sync(int fd, bool is_directory); /* fdatasync, or fsync for a directory */
int mqd_file_syncfs(int fd, const char *root);
/* Returns whether a fault rule may delay flushes: if so, do not flush on a thread that must not
 * block. */
bool mqd_file_sync_can_be_delayed(void);
/* Call before starting an asynchronous flush of fd, which covers what was written before this
 * call. */
void mqd_file_sync_begin(int fd);
/* Call when the flush has completed with `result` (0 or -errno). Returns the result, which a fault
 * may have replaced. */
int mqd_file_sync_end(int fd, bool is_directory, int result);
int mqd_file_truncate(int fd, int64_t size_bytes);
int mqd_file_rename(const char *from, const char *to);
int mqd_file_fallocate(int fd, int mode, int64_t offset, int64_t size_bytes);

#endif
