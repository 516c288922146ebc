/* See log/txn_index.h. */
#include "log/txn_index.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/big_endian.h"
#include "base/error.h"
#include "base/file.h"
#include "log/planted_bugs.h"
#include "log/segment.h"

#define CHUNK_ENTRY_COUNT 120u /* entries: about 4 KiB */

void mqd_aborted_encode(uint8_t *at, const struct mqd_aborted *entry)
{
    at = mqd_put_be16(at, 0);
    at = mqd_put_be64(at, (uint64_t)entry->producer_id);
    at = mqd_put_be64(at, (uint64_t)entry->first_offset);
    at = mqd_put_be64(at, (uint64_t)entry->last_offset);
    mqd_put_be64(at, (uint64_t)entry->last_stable_offset);
}

static struct mqd_aborted decode(const uint8_t *at)
{
    return (struct mqd_aborted){(int64_t)mqd_get_be64(at + 2), (int64_t)mqd_get_be64(at + 10),
                                (int64_t)mqd_get_be64(at + 18), (int64_t)mqd_get_be64(at + 26)};
}

int mqd_aborted_add(struct mqd_aborted_list *list, const struct mqd_aborted *entry)
{
    if (list->count == list->capacity) {
        uint32_t capacity = list->capacity ? list->capacity * 2 : 16;
        struct mqd_aborted *entries = realloc(list->entries, capacity * sizeof *entries);
        if (!entries) {
            errno = ENOMEM;
            return mqd_error_set(ENOMEM, "out of memory for %u aborted transactions", capacity);
        }
        list->entries = entries;
        list->capacity = capacity;
    }
    list->entries[list->count++] = *entry;
    return 0;
}

uint32_t mqd_txn_index_checksum(uint32_t previous, int64_t segment_base, const uint8_t *entry)
{
    uint8_t bytes[8 + MQD_TXN_INDEX_ENTRY_BYTES];
    mqd_put_be64(bytes, (uint64_t)segment_base);
    memcpy(bytes + 8, entry, MQD_TXN_INDEX_ENTRY_BYTES);
    return mqd_crc32c(previous, bytes, sizeof bytes);
}

/* ---- the active segment's files ---- */

/* Opens one of the two files. Returns -1 with errno set on failure. */
static int open_file(const char *directory, int64_t segment_base, enum mqd_file_kind kind)
{
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, directory, segment_base, kind) < 0) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return mqd_file_open(path, O_RDWR | O_CREAT, 0644);
}

static int set_size(int fd, int64_t size_bytes)
{
    struct stat status;
    return fstat(fd, &status) < 0 || (status.st_size != size_bytes && mqd_file_truncate(fd, size_bytes) < 0) ? -1 : 0;
}

/* Opens one of the two files and sets it to exactly this size. Returns -1 with errno set on
 * failure. */
static int open_sized(const char *directory, int64_t segment_base, enum mqd_file_kind kind, int64_t size_bytes)
{
    int fd = open_file(directory, segment_base, kind);
    if (fd < 0)
        return -1;
    if (set_size(fd, size_bytes) < 0) {
        int error = errno;
        mqd_file_close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static int64_t sum_bytes_of(uint32_t file_bytes)
{
    return (int64_t)file_bytes / MQD_TXN_INDEX_ENTRY_BYTES * MQD_TXN_SUM_BYTES;
}

static int open_active(struct mqd_txn_index *index, const char *directory, int64_t segment_base)
{
    uint8_t last_sum[MQD_TXN_SUM_BYTES] = {0};
    int64_t sum_bytes = sum_bytes_of(index->file_bytes);
    if (index->fd >= 0)
        return 0;
    /* the checksums are truncated before the entries */
    index->sum_fd = open_sized(directory, segment_base, MQD_FILE_TXN_SUM, sum_bytes);
    if (index->sum_fd >= 0)
        index->fd = open_sized(directory, segment_base, MQD_FILE_TXN_INDEX, index->file_bytes);
    if (index->fd >= 0 && (sum_bytes == 0 || pread(index->sum_fd, last_sum, sizeof last_sum,
                                                   sum_bytes - MQD_TXN_SUM_BYTES) == (ssize_t)sizeof last_sum)) {
        index->sum = mqd_get_be32(last_sum);
        return 0;
    }
    int error = index->fd >= 0 ? EIO : errno;
    mqd_txn_index_close(index);
    errno = error;
    return -1;
}

static int write_at(int fd, const uint8_t *bytes, size_t size_bytes, int64_t position)
{
    ssize_t written = mqd_file_pwrite(fd, bytes, size_bytes, position);
    if (written >= 0 && written != (ssize_t)size_bytes)
        errno = ENOSPC; /* a short write to a regular file: the disk filled up */
    return written == (ssize_t)size_bytes ? 0 : -1;
}

static int append_chunk(struct mqd_txn_index *index, int64_t segment_base, const struct mqd_aborted *entries,
                        uint32_t count)
{
    uint8_t bytes[CHUNK_ENTRY_COUNT * MQD_TXN_INDEX_ENTRY_BYTES], sums[CHUNK_ENTRY_COUNT * MQD_TXN_SUM_BYTES];
    uint32_t sum = index->sum;
    for (uint32_t i = 0; i < count; i++) {
        mqd_aborted_encode(bytes + i * MQD_TXN_INDEX_ENTRY_BYTES, &entries[i]);
        sum = mqd_txn_index_checksum(sum, segment_base, bytes + i * MQD_TXN_INDEX_ENTRY_BYTES);
        mqd_put_be32(sums + i * MQD_TXN_SUM_BYTES, sum);
    }
    if (write_at(index->fd, bytes, count * MQD_TXN_INDEX_ENTRY_BYTES, index->file_bytes) < 0 ||
        write_at(index->sum_fd, sums, count * MQD_TXN_SUM_BYTES, sum_bytes_of(index->file_bytes)) < 0)
        return -1;
    index->file_bytes += count * MQD_TXN_INDEX_ENTRY_BYTES;
    index->sum = sum;
    return 0;
}

static int append_all(struct mqd_txn_index *index, int64_t segment_base, const struct mqd_aborted *entries,
                      uint32_t count)
{
    while (count > 0) {
        uint32_t part = count < CHUNK_ENTRY_COUNT ? count : CHUNK_ENTRY_COUNT;
        if (append_chunk(index, segment_base, entries, part) < 0)
            return -1;
        entries += part;
        count -= part;
    }
    return 0;
}

int mqd_txn_index_append(struct mqd_txn_index *index, const char *directory, int64_t segment_base,
                         const struct mqd_aborted *entries, uint32_t count)
{
    if (open_active(index, directory, segment_base) < 0)
        return -1;
    const struct mqd_txn_index old = *index;
    if (append_all(index, segment_base, entries, count) == 0)
        return 0;
    int error = errno;
    *index = old;
    if (mqd_file_truncate(index->sum_fd, sum_bytes_of(old.file_bytes)) < 0 ||
        mqd_file_truncate(index->fd, old.file_bytes) < 0)
        error = errno;
    errno = error;
    return -1;
}

int mqd_txn_index_cut(struct mqd_txn_index *index, const char *directory, int64_t segment_base)
{
    static const enum mqd_file_kind kinds[] = {MQD_FILE_TXN_SUM, MQD_FILE_TXN_INDEX};
    char path[PATH_MAX];
    struct stat status;
    bool fits = true;
    for (int i = 0; i < 2; i++) {
        if (mqd_segment_path(path, sizeof path, directory, segment_base, kinds[i]) < 0) {
            errno = ENAMETOOLONG;
            return -1;
        }
        if (stat(path, &status) == 0)
            fits &= status.st_size == (i ? (int64_t)index->file_bytes : sum_bytes_of(index->file_bytes));
        else if (errno != ENOENT || index->file_bytes != 0)
            return -1;
    }
    if (fits)
        return 0;
    mqd_txn_index_close(index); /* reopening truncates */
    return open_active(index, directory, segment_base);
}

void mqd_txn_index_close(struct mqd_txn_index *index)
{
    mqd_file_close(index->fd);
    mqd_file_close(index->sum_fd);
    index->fd = index->sum_fd = -1;
}

/* ---- whole files ---- */

/* the files, open for reading */
struct files {
    int fd, sum_fd; /* -1 = no such file */
    int64_t segment_base;
    uint32_t checksum_count, entry_count; /* entry checksum_count and later ones have no checksum */
};

static void files_close(struct files *files)
{
    int error = errno;
    if (files->fd >= 0)
        close(files->fd);
    if (files->sum_fd >= 0)
        close(files->sum_fd);
    errno = error;
}

static int open_for_reading(const char *directory, int64_t segment_base, enum mqd_file_kind kind, uint32_t item_bytes,
                            uint32_t *count)
{
    char path[PATH_MAX];
    struct stat status;
    *count = 0;
    if (mqd_segment_path(path, sizeof path, directory, segment_base, kind) < 0) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    if (fstat(fd, &status) < 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    *count = (uint32_t)(status.st_size / item_bytes);
    return fd;
}

/* Opens the checksums first, so that if the files grow meanwhile, there are at least as many
 * entries as checksums. Returns -1 with errno set on failure. */
static int files_open(struct files *files, const char *directory, int64_t segment_base)
{
    *files = (struct files){.fd = -1, .sum_fd = -1, .segment_base = segment_base};
    files->sum_fd =
        open_for_reading(directory, segment_base, MQD_FILE_TXN_SUM, MQD_TXN_SUM_BYTES, &files->checksum_count);
    if (files->sum_fd < 0 && errno != ENOENT)
        return -1;
    files->fd =
        open_for_reading(directory, segment_base, MQD_FILE_TXN_INDEX, MQD_TXN_INDEX_ENTRY_BYTES, &files->entry_count);
    if (files->fd >= 0 || errno == ENOENT)
        return 0;
    files_close(files);
    return -1;
}

/* Reads `count` items, or fewer at the end, starting with number `first`. Returns how many, or -1
 * with errno set. Ignores a partial last item. */
static int read_items(int fd, uint32_t item_bytes, uint32_t first, uint32_t count, uint8_t *bytes)
{
    size_t have = 0, want = (size_t)count * item_bytes;
    while (have < want) {
        ssize_t got = pread(fd, bytes + have, want - have, (off_t)first * item_bytes + (off_t)have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        have += (size_t)got;
    }
    return (int)(have / item_bytes);
}

/* Reads entries into `bytes`, starting with number `first`, and verifies them. Returns how many, 0
 * at the end, or -1 with errno set (EBADMSG: an entry fails verification). */
static int read_chunk(const struct files *files, uint32_t first, uint32_t count, uint8_t *bytes)
{
    uint8_t sums[(CHUNK_ENTRY_COUNT + 1) * MQD_TXN_SUM_BYTES] = {0};
    uint32_t previous_count = first > 0; /* the checksum before that of entry `first`, if any, is read too */
    if (first >= files->checksum_count)
        return 0;
    if (count > files->checksum_count - first)
        count = files->checksum_count - first;
    int got = files->fd < 0 ? 0 : read_items(files->fd, MQD_TXN_INDEX_ENTRY_BYTES, first, count, bytes);
    int got_sums = got < 0 ? -1
                           : read_items(files->sum_fd, MQD_TXN_SUM_BYTES, first - previous_count,
                                        count + previous_count, previous_count ? sums : sums + MQD_TXN_SUM_BYTES);
    if (got_sums < 0)
        return -1;
    bool valid = got == (int)count && got_sums == (int)(count + previous_count);
    for (uint32_t i = 0; valid && i < count && !PLANTED_LOG_BUG(NO_CHECKSUM); i++)
        valid = mqd_txn_index_checksum(mqd_get_be32(sums + i * MQD_TXN_SUM_BYTES), files->segment_base,
                                       bytes + i * MQD_TXN_INDEX_ENTRY_BYTES) ==
                mqd_get_be32(sums + (i + 1) * MQD_TXN_SUM_BYTES);
    if (valid)
        return (int)count;
    errno = EBADMSG;
    return -1;
}

/* Entries without a checksum are either the beginning of an append that has not been published yet,
 * or damage. Returns 1 if they are allowed, 0 if not, -1 with errno set on failure. */
static int entries_without_checksum_allowed(const struct files *files, int64_t complete_below)
{
    uint8_t bytes[MQD_TXN_INDEX_ENTRY_BYTES];
    if (files->entry_count <= files->checksum_count)
        return files->entry_count == files->checksum_count;
    int got = read_items(files->fd, sizeof bytes, files->checksum_count, 1, bytes);
    return got < 0 ? -1 : got == 0 || decode(bytes).last_offset >= complete_below;
}

int mqd_txn_index_verify(const char *directory, int64_t segment_base, int64_t complete_below)
{
    uint8_t bytes[CHUNK_ENTRY_COUNT * MQD_TXN_INDEX_ENTRY_BYTES];
    struct files files;
    if (files_open(&files, directory, segment_base) < 0)
        return mqd_error_system(errno, "%s: cannot open the .txnindex of segment %lld", directory,
                                (long long)segment_base);
    int result = entries_without_checksum_allowed(&files, complete_below);
    for (uint32_t at = 0; result == 1 && at < files.checksum_count; at += CHUNK_ENTRY_COUNT)
        if (read_chunk(&files, at, CHUNK_ENTRY_COUNT, bytes) < 0)
            result = errno == EBADMSG ? 0 : -1;
    files_close(&files);
    return result < 0 ? mqd_error_system(errno, "%s: cannot read the .txnindex of segment %lld", directory,
                                         (long long)segment_base)
                      : result;
}

static bool is_sound(const uint8_t *at, const struct mqd_aborted *entry, const struct mqd_aborted *previous,
                     int64_t segment_base, int64_t offset_end)
{
    return at[0] == 0 && at[1] == 0 && entry->producer_id >= 0 && entry->first_offset >= 0 &&
           entry->first_offset < entry->last_offset && entry->last_offset >= segment_base &&
           entry->last_offset < offset_end && entry->last_stable_offset >= 0 &&
           entry->last_stable_offset <= entry->last_offset + 1 &&
           (!previous ||
            (entry->last_offset > previous->last_offset && entry->last_stable_offset >= previous->last_stable_offset));
}

int mqd_txn_index_load(const char *directory, int64_t segment_base, int64_t offset_end, struct mqd_aborted_list *out)
{
    uint8_t bytes[CHUNK_ENTRY_COUNT * MQD_TXN_INDEX_ENTRY_BYTES];
    struct files files;
    int count = 0, result = 0;
    out->count = 0;
    if (files_open(&files, directory, segment_base) < 0)
        return mqd_error_system(errno, "%s: cannot open the .txnindex of segment %lld", directory,
                                (long long)segment_base);
    bool more = true;
    while (result == 0 && more) {
        count = read_chunk(&files, out->count, CHUNK_ENTRY_COUNT, bytes);
        if (count < 0 && errno == EBADMSG)
            count = read_chunk(&files, out->count, 1, bytes); /* up to the first entry that fails verification */
        more = count > 0;
        for (int i = 0; i < count && result == 0 && more; i++) {
            const uint8_t *at = bytes + i * MQD_TXN_INDEX_ENTRY_BYTES;
            struct mqd_aborted entry = decode(at);
            more = is_sound(at, &entry, out->count ? &out->entries[out->count - 1] : NULL, segment_base, offset_end);
            if (more)
                result = mqd_aborted_add(out, &entry);
        }
    }
    if (result == 0 && count < 0 && errno != EBADMSG)
        result = mqd_error_system(errno, "%s: cannot read the .txnindex of segment %lld", directory,
                                  (long long)segment_base);
    files_close(&files);
    return result;
}

static int unlink_kind(const char *directory, int64_t segment_base, enum mqd_file_kind kind)
{
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, directory, segment_base, kind) < 0)
        return -1;
    return access(path, F_OK) < 0 && errno == ENOENT ? 0 : mqd_file_unlink(path);
}

int mqd_txn_index_replace(const char *directory, int64_t segment_base, const struct mqd_aborted_list *list, bool sync)
{
    char path[PATH_MAX];
    struct mqd_txn_index index = MQD_TXN_INDEX_CLOSED;
    if (mqd_segment_path(path, sizeof path, directory, segment_base, MQD_FILE_TXN_INDEX) < 0)
        return -1;
    if (list->count == 0)
        return unlink_kind(directory, segment_base, MQD_FILE_TXN_INDEX) < 0
                   ? -1
                   : unlink_kind(directory, segment_base, MQD_FILE_TXN_SUM);
    /* Overwrites the existing files, and truncates them only afterwards. There is no reader during
     * this call, and a crash or an error halfway leaves files that fail verification; empty files
     * would pass it. */
    index.sum_fd = open_file(directory, segment_base, MQD_FILE_TXN_SUM);
    if (index.sum_fd >= 0)
        index.fd = open_file(directory, segment_base, MQD_FILE_TXN_INDEX);
    if (index.fd >= 0 && PLANTED_LOG_BUG(EMPTY_FIRST) && set_size(index.sum_fd, 0) == 0)
        set_size(index.fd, 0);
    int result = index.fd < 0 ? -1 : append_all(&index, segment_base, list->entries, list->count);
    if (result == 0)
        result = set_size(index.sum_fd, sum_bytes_of(index.file_bytes));
    if (result == 0)
        result = set_size(index.fd, index.file_bytes);
    if (result == 0 && sync && (mqd_file_sync(index.fd, false) < 0 || mqd_file_sync(index.sum_fd, false) < 0))
        result = -1;
    int error = errno;
    mqd_txn_index_close(&index);
    errno = error;
    return result < 0 ? mqd_error_system(error, "cannot write %s", path) : 0;
}

static int flush_kind(const char *directory, int64_t segment_base, enum mqd_file_kind kind)
{
    char path[PATH_MAX];
    if (mqd_segment_path(path, sizeof path, directory, segment_base, kind) < 0)
        return -1;
    int fd = mqd_file_open(path, O_RDWR, 0);
    if (fd < 0 && errno == ENOENT)
        return 0;
    int error = fd < 0 || mqd_file_sync(fd, false) < 0 ? errno : 0;
    mqd_file_close(fd);
    return error ? mqd_error_system(error, "cannot flush %s", path) : 0;
}

int mqd_txn_index_flush(const char *directory, int64_t segment_base, bool rewrite)
{
    struct mqd_aborted_list entries = {NULL, 0, 0};
    if (rewrite) {
        int result = mqd_txn_index_load(directory, segment_base, INT64_MAX, &entries);
        if (result == 0)
            result = mqd_txn_index_replace(directory, segment_base, &entries, true);
        free(entries.entries);
        return result;
    }
    return flush_kind(directory, segment_base, MQD_FILE_TXN_INDEX) < 0
               ? -1
               : flush_kind(directory, segment_base, MQD_FILE_TXN_SUM);
}

/* ---- lookup ---- */

/* Returns the index of the first entry whose marker is at or after `offset`, or -1 with errno
 * set. */
static int64_t first_at_or_after(const struct files *files, int64_t offset)
{
    uint32_t low = 0, high = files->checksum_count;
    uint8_t bytes[MQD_TXN_INDEX_ENTRY_BYTES];
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (read_chunk(files, middle, 1, bytes) < 0)
            return -1;
        if (decode(bytes).last_offset < offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int collect(const struct files *files, int64_t from_offset, int64_t to_offset, struct mqd_aborted_list *out)
{
    uint8_t bytes[CHUNK_ENTRY_COUNT * MQD_TXN_INDEX_ENTRY_BYTES];
    int64_t at = first_at_or_after(files, from_offset);
    int count = at < 0 ? -1 : 1;
    for (; count > 0; at += count) {
        count = read_chunk(files, (uint32_t)at, CHUNK_ENTRY_COUNT, bytes);
        for (int i = 0; i < count; i++) {
            struct mqd_aborted entry = decode(bytes + i * MQD_TXN_INDEX_ENTRY_BYTES);
            if (entry.last_offset >= from_offset && entry.first_offset < to_offset && mqd_aborted_add(out, &entry) < 0)
                return -1;
            if (entry.last_stable_offset >= to_offset)
                return 1;
        }
    }
    return count;
}

int mqd_txn_index_collect(const char *directory, int64_t segment_base, int64_t from_offset, int64_t to_offset,
                          int64_t stable_offset, struct mqd_aborted_list *out)
{
    struct files files;
    if (files_open(&files, directory, segment_base) < 0)
        return -1;
    int result = entries_without_checksum_allowed(&files, stable_offset);
    if (result == 1)
        result = collect(&files, from_offset, to_offset, out);
    else if (result == 0) {
        errno = EBADMSG;
        result = -1;
    }
    files_close(&files);
    return result;
}
