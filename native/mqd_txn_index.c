/* See mqd_txn_index.h. */
#define _GNU_SOURCE
#include "mqd_txn_index.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mqd_big_endian.h"
#include "mqd_error.h"
#include "mqd_file.h"
#include "mqd_segment.h"

#define CHUNK_COUNT 120u /* entries: about 4 KiB */

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
    return (struct mqd_aborted){(int64_t)mqd_get_be64(at + 2), (int64_t)mqd_get_be64(at + 10), (int64_t)mqd_get_be64(at + 18), (int64_t)mqd_get_be64(at + 26)};
}

int mqd_aborted_add(struct mqd_aborted_list *list, const struct mqd_aborted *entry)
{
    if (list->count == list->capacity) {
        uint32_t capacity = list->capacity ? list->capacity * 2 : 16;
        struct mqd_aborted *entries = realloc(list->entries, capacity * sizeof *entries);
        if (!entries) {
            errno = ENOMEM;
            return mqd_error_set(ENOMEM, "no memory for %u aborted transactions", capacity);
        }
        list->entries = entries;
        list->capacity = capacity;
    }
    list->entries[list->count++] = *entry;
    return 0;
}

/* ---- the active segment's ----------------------------------------------------------------------------------------- */

static int open_active(struct mqd_txn_index *index, const char *directory, int64_t segment_base)
{
    char path[PATH_MAX];
    struct stat status;
    if (index->fd >= 0)
        return 0;
    if (mqd_segment_path(path, sizeof path, directory, segment_base, MQD_FILE_TXN_INDEX) < 0) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = mqd_file_open(path, O_RDWR | O_CREAT, 0644);
    if (fd < 0)
        return -1;
    if (fstat(fd, &status) < 0 || (status.st_size != index->file_bytes && mqd_file_truncate(fd, index->file_bytes) < 0)) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    index->fd = fd;
    return 0;
}

int mqd_txn_index_append(struct mqd_txn_index *index, const char *directory, int64_t segment_base, const struct mqd_aborted *entries, uint32_t count)
{
    uint8_t bytes[CHUNK_COUNT * MQD_TXN_INDEX_ENTRY_BYTES];
    uint32_t old_bytes = index->file_bytes;
    if (open_active(index, directory, segment_base) < 0)
        return -1;
    while (count > 0) {
        uint32_t part = count < CHUNK_COUNT ? count : CHUNK_COUNT, size_bytes = part * MQD_TXN_INDEX_ENTRY_BYTES;
        for (uint32_t i = 0; i < part; i++)
            mqd_aborted_encode(bytes + i * MQD_TXN_INDEX_ENTRY_BYTES, &entries[i]);
        ssize_t written = mqd_file_pwrite(index->fd, bytes, size_bytes, index->file_bytes);
        if (written != (ssize_t)size_bytes) {
            int error = written < 0 ? errno : ENOSPC; /* a short write to a regular file: the disk filled up */
            index->file_bytes = old_bytes;
            if (mqd_file_truncate(index->fd, old_bytes) < 0)
                error = errno;
            errno = error;
            return -1;
        }
        index->file_bytes += size_bytes;
        entries += part;
        count -= part;
    }
    return 0;
}

int mqd_txn_index_cut(struct mqd_txn_index *index, const char *directory, int64_t segment_base)
{
    char path[PATH_MAX];
    struct stat status;
    if (mqd_segment_path(path, sizeof path, directory, segment_base, MQD_FILE_TXN_INDEX) < 0) {
        errno = ENAMETOOLONG;
        return -1;
    }
    if (stat(path, &status) < 0)
        return errno == ENOENT && index->file_bytes == 0 ? 0 : -1;
    if (status.st_size == index->file_bytes)
        return 0;
    return open_active(index, directory, segment_base) < 0 || mqd_file_truncate(index->fd, index->file_bytes) < 0 ? -1 : 0;
}

void mqd_txn_index_close(struct mqd_txn_index *index)
{
    mqd_file_close(index->fd);
    index->fd = -1;
}

/* ---- whole files -------------------------------------------------------------------------------------------------- */

/* Entries from number `first` on into the chunk; how many, -1 with errno. A torn end counts as none. */
static int read_chunk(int fd, uint32_t first, uint32_t count, uint8_t *bytes)
{
    size_t have = 0, want = (size_t)count * MQD_TXN_INDEX_ENTRY_BYTES;
    while (have < want) {
        ssize_t got = pread(fd, bytes + have, want - have, (off_t)first * MQD_TXN_INDEX_ENTRY_BYTES + (off_t)have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        have += (size_t)got;
    }
    return (int)(have / MQD_TXN_INDEX_ENTRY_BYTES);
}

static bool sound(const uint8_t *at, const struct mqd_aborted *entry, const struct mqd_aborted *before, int64_t segment_base, int64_t offset_end)
{
    return at[0] == 0 && at[1] == 0 && entry->producer_id >= 0 && entry->first_offset >= 0 && entry->first_offset < entry->last_offset &&
           entry->last_offset >= segment_base && entry->last_offset < offset_end && entry->last_stable_offset >= 0 &&
           entry->last_stable_offset <= entry->last_offset + 1 &&
           (!before || (entry->last_offset > before->last_offset && entry->last_stable_offset >= before->last_stable_offset));
}

int mqd_txn_index_load(const char *directory, int64_t segment_base, int64_t offset_end, struct mqd_aborted_list *out)
{
    char path[PATH_MAX];
    uint8_t bytes[CHUNK_COUNT * MQD_TXN_INDEX_ENTRY_BYTES];
    out->count = 0;
    if (mqd_segment_path(path, sizeof path, directory, segment_base, MQD_FILE_TXN_INDEX) < 0)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC), count;
    if (fd < 0)
        return errno == ENOENT ? 0 : mqd_error_system(errno, "cannot open %s", path);
    do {
        count = read_chunk(fd, out->count, CHUNK_COUNT, bytes);
        for (int i = 0; i < count; i++) {
            struct mqd_aborted entry = decode(bytes + i * MQD_TXN_INDEX_ENTRY_BYTES);
            if (!sound(bytes + i * MQD_TXN_INDEX_ENTRY_BYTES, &entry, out->count ? &out->entries[out->count - 1] : NULL, segment_base, offset_end)) {
                close(fd);
                return 0;
            }
            if (mqd_aborted_add(out, &entry) < 0) {
                close(fd);
                return -1;
            }
        }
    } while (count == (int)CHUNK_COUNT);
    int error = errno;
    close(fd);
    return count < 0 ? mqd_error_system(error, "cannot read %s", path) : 0;
}

int mqd_txn_index_replace(const char *directory, int64_t segment_base, const struct mqd_aborted_list *list, bool sync)
{
    char path[PATH_MAX];
    struct mqd_txn_index index = {.fd = -1};
    if (mqd_segment_path(path, sizeof path, directory, segment_base, MQD_FILE_TXN_INDEX) < 0)
        return -1;
    if (list->count == 0)
        return access(path, F_OK) < 0 && errno == ENOENT ? 0 : mqd_file_unlink(path);
    /* The same inode: nobody reads while this is called, and a crash half-way is a torn end. */
    int result = open_active(&index, directory, segment_base);
    if (result == 0 && mqd_file_truncate(index.fd, 0) < 0)
        result = -1;
    if (result == 0)
        result = mqd_txn_index_append(&index, directory, segment_base, list->entries, list->count);
    if (result == 0 && sync && mqd_file_sync(index.fd, false) < 0)
        result = -1;
    int error = errno;
    mqd_txn_index_close(&index);
    errno = error;
    return result < 0 ? mqd_error_system(error, "cannot write %s", path) : 0;
}

int mqd_txn_index_flush(const char *directory, int64_t segment_base, bool rewrite)
{
    char path[PATH_MAX];
    struct mqd_aborted_list entries = {NULL, 0, 0};
    if (mqd_segment_path(path, sizeof path, directory, segment_base, MQD_FILE_TXN_INDEX) < 0)
        return -1;
    if (rewrite) {
        int result = mqd_txn_index_load(directory, segment_base, INT64_MAX, &entries);
        if (result == 0)
            result = mqd_txn_index_replace(directory, segment_base, &entries, true);
        free(entries.entries);
        return result;
    }
    int fd = mqd_file_open(path, O_RDWR, 0);
    if (fd < 0 && errno == ENOENT)
        return 0;
    int error = fd < 0 || mqd_file_sync(fd, false) < 0 ? errno : 0;
    mqd_file_close(fd);
    return error ? mqd_error_system(error, "cannot flush %s", path) : 0;
}

/* ---- look-up ------------------------------------------------------------------------------------------------------ */

/* Number of the first entry whose marker is at or behind `offset`; -1 with errno. */
static int64_t first_behind(int fd, uint32_t count, int64_t offset)
{
    uint32_t low = 0, high = count;
    uint8_t bytes[MQD_TXN_INDEX_ENTRY_BYTES];
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int got = read_chunk(fd, middle, 1, bytes);
        if (got < 0)
            return -1;
        if (got == 1 && decode(bytes).last_offset < offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int mqd_txn_index_collect(int fd, int64_t from_offset, int64_t to_offset, struct mqd_aborted_list *out)
{
    struct stat status;
    uint8_t bytes[CHUNK_COUNT * MQD_TXN_INDEX_ENTRY_BYTES];
    if (fstat(fd, &status) < 0)
        return -1;
    int64_t at = first_behind(fd, (uint32_t)(status.st_size / MQD_TXN_INDEX_ENTRY_BYTES), from_offset);
    if (at < 0)
        return -1;
    for (;;) {
        int count = read_chunk(fd, (uint32_t)at, CHUNK_COUNT, bytes);
        if (count < 0)
            return -1;
        for (int i = 0; i < count; i++) {
            struct mqd_aborted entry = decode(bytes + i * MQD_TXN_INDEX_ENTRY_BYTES);
            if (entry.last_offset >= from_offset && entry.first_offset < to_offset && mqd_aborted_add(out, &entry) < 0)
                return -1;
            if (entry.last_stable_offset >= to_offset)
                return 1;
        }
        if (count < (int)CHUNK_COUNT)
            return 0;
        at += count;
    }
}
