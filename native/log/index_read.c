/* Reading index files: which part recovery may trust, and lookups; see log/index.h. */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/read.h"
#include "log/index.h"
#include "log/segment.h"

static struct mqd_index_entry decode_entry(const uint8_t *bytes)
{
    uint32_t words[2];
    memcpy(words, bytes, sizeof words);
    return (struct mqd_index_entry){be32toh(words[0]), be32toh(words[1])};
}

static struct mqd_time_index_entry decode_time_entry(const uint8_t *bytes)
{
    uint64_t timestamp;
    uint32_t offset;
    memcpy(&timestamp, bytes, 8);
    memcpy(&offset, bytes + 8, 4);
    return (struct mqd_time_index_entry){(int64_t)be64toh(timestamp), be32toh(offset)};
}

static int read_entries(int fd, uint8_t *bytes, size_t size_bytes, int64_t position)
{
    return mqd_read_exactly(fd, bytes, size_bytes, position) < 0 ? mqd_error_system(errno, "cannot read an index file")
                                                                 : 0;
}

/* Opens one index file, and sets *count to the number of whole entries up to the size limit.
 * Returns the fd, -1 with *count = 0 if the file does not exist, or -2 on disk failure. */
static int open_for_reading(const char *directory, int64_t segment_base, enum mqd_file_kind kind, uint32_t entry_bytes,
                            uint32_t *count)
{
    char path[PATH_MAX];
    struct stat status;
    *count = 0;
    if (mqd_segment_path(path, sizeof path, directory, segment_base, kind) < 0)
        return -2;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? -1 : (mqd_error_system(errno, "cannot open %s", path), -2);
    if (fstat(fd, &status) < 0) {
        mqd_error_system(errno, "cannot stat %s", path);
        close(fd);
        return -2;
    }
    int64_t size_bytes = status.st_size < MQD_INDEX_FILE_BYTES_MAX ? status.st_size : MQD_INDEX_FILE_BYTES_MAX;
    *count = (uint32_t)(size_bytes / entry_bytes);
    return fd;
}

/* Reads the whole file into memory; NULL with *count = 0 if it does not exist or is empty, NULL
 * with *count = 1 on disk failure. */
static uint8_t *read_file(const char *directory, int64_t segment_base, enum mqd_file_kind kind, uint32_t entry_bytes,
                          uint32_t *count)
{
    int fd = open_for_reading(directory, segment_base, kind, entry_bytes, count);
    if (fd < 0 || *count == 0) {
        if (fd >= 0)
            close(fd);
        *count = fd == -2;
        return NULL;
    }
    size_t size_bytes = (size_t)*count * entry_bytes;
    uint8_t *bytes = malloc(size_bytes);
    if (!bytes)
        mqd_error_set(ENOMEM, "out of memory for an index of %zu bytes", size_bytes);
    else if (read_entries(fd, bytes, size_bytes, 0) < 0) {
        free(bytes);
        bytes = NULL;
    }
    close(fd);
    if (!bytes)
        *count = 1;
    return bytes;
}

static int load_offsets(struct mqd_index *index, const char *directory, int64_t segment_base, int64_t log_bytes,
                        int64_t offset_end, struct mqd_index_entry *last)
{
    uint32_t count, valid = 0;
    uint8_t *bytes = read_file(directory, segment_base, MQD_FILE_INDEX, MQD_INDEX_ENTRY_BYTES, &count);
    if (!bytes)
        return count ? -1 : 0;
    for (; valid < count; valid++) {
        struct mqd_index_entry entry = decode_entry(bytes + (size_t)valid * MQD_INDEX_ENTRY_BYTES);
        if (entry.relative_offset <= last->relative_offset || entry.position <= last->position ||
            entry.position >= log_bytes || entry.relative_offset > INT32_MAX ||
            segment_base + entry.relative_offset >= offset_end)
            break;
        *last = entry;
    }
    free(bytes);
    index->file_bytes = valid * MQD_INDEX_ENTRY_BYTES;
    return 0;
}

static int load_times(struct mqd_index *index, const char *directory, int64_t segment_base,
                      const struct mqd_index_entry *last)
{
    uint32_t count, valid = 0, offset = 0;
    uint8_t *bytes = read_file(directory, segment_base, MQD_FILE_TIME_INDEX, MQD_TIME_INDEX_ENTRY_BYTES, &count);
    if (!bytes)
        return count ? -1 : 0;
    for (; valid < count; valid++) {
        struct mqd_time_index_entry entry = decode_time_entry(bytes + (size_t)valid * MQD_TIME_INDEX_ENTRY_BYTES);
        if (entry.timestamp_ms <= index->last_time_entry_ms || entry.relative_offset < offset ||
            entry.relative_offset >= last->relative_offset)
            break;
        index->last_time_entry_ms = entry.timestamp_ms;
        offset = entry.relative_offset;
    }
    free(bytes);
    index->time_file_bytes = valid * MQD_TIME_INDEX_ENTRY_BYTES;
    index->max_timestamp_ms = index->last_time_entry_ms;
    index->max_timestamp_offset = valid ? segment_base + offset : -1;
    return 0;
}

static void reset_load(struct mqd_index *index, struct mqd_index_entry *last)
{
    mqd_index_init(index);
    *last = (struct mqd_index_entry){0, 0};
}

int mqd_index_load(struct mqd_index *index, const char *directory, int64_t segment_base, int64_t log_bytes,
                   int64_t offset_end, bool intact, struct mqd_index_entry *last)
{
    reset_load(index, last);
    if (load_offsets(index, directory, segment_base, log_bytes, offset_end, last) < 0 ||
        load_times(index, directory, segment_base, last) < 0)
        return -1;
    if (!intact && index->time_file_bytes > 0) {
        int64_t known_end = index->max_timestamp_offset + 1;
        reset_load(index, last);
        if (load_offsets(index, directory, segment_base, log_bytes, known_end < offset_end ? known_end : offset_end,
                         last) < 0 ||
            load_times(index, directory, segment_base, last) < 0)
            return -1;
    }
    /* Two offset entries imply at least one earlier time entry, unless no batch has a timestamp. If
     * there is none, the time index is lost, and only a walk over the whole segment finds the
     * largest timestamp. */
    if (index->file_bytes > (intact ? MQD_INDEX_ENTRY_BYTES : 0) && index->time_file_bytes == 0)
        reset_load(index, last);
    return 0;
}

static int64_t file_size(const char *directory, int64_t segment_base, enum mqd_file_kind kind)
{
    char path[PATH_MAX];
    struct stat status;
    if (mqd_segment_path(path, sizeof path, directory, segment_base, kind) < 0 || stat(path, &status) < 0)
        return 0;
    return status.st_size;
}

/* Returns whether the files already have the entries that `index` would write (the load ignores
 * some time entries, and the walk creates them again), or -1 on disk failure. */
static int files_match(const struct mqd_index *index, const char *directory, int64_t segment_base)
{
    int64_t time_bytes = index->time_file_bytes + index->time_pending_count * (int64_t)MQD_TIME_INDEX_ENTRY_BYTES;
    uint8_t bytes[MQD_INDEX_PENDING_MAX * MQD_TIME_INDEX_ENTRY_BYTES];
    uint32_t count;
    if (index->pending_count || file_size(directory, segment_base, MQD_FILE_INDEX) != index->file_bytes ||
        file_size(directory, segment_base, MQD_FILE_TIME_INDEX) != time_bytes)
        return 0;
    if (index->time_pending_count == 0)
        return 1;
    int fd = open_for_reading(directory, segment_base, MQD_FILE_TIME_INDEX, MQD_TIME_INDEX_ENTRY_BYTES, &count);
    if (fd < 0)
        return fd == -1 ? 0 : -1;
    int result = read_entries(fd, bytes, (size_t)index->time_pending_count * MQD_TIME_INDEX_ENTRY_BYTES,
                              index->time_file_bytes) < 0
                     ? -1
                     : 1;
    close(fd);
    for (uint16_t i = 0; i < index->time_pending_count && result == 1; i++) {
        struct mqd_time_index_entry entry = decode_time_entry(bytes + i * MQD_TIME_INDEX_ENTRY_BYTES);
        result = entry.timestamp_ms == index->time_pending[i].timestamp_ms &&
                 entry.relative_offset == index->time_pending[i].relative_offset;
    }
    return result;
}

int mqd_index_finish_load(struct mqd_index *index, const char *directory, int64_t segment_base)
{
    mqd_index_add_time_entry(index, segment_base);
    int match = files_match(index, directory, segment_base);
    if (match < 0) {
        errno = EIO;
        return -1;
    }
    if (match) {
        index->time_file_bytes += index->time_pending_count * (uint32_t)MQD_TIME_INDEX_ENTRY_BYTES;
        index->time_pending_count = 0;
        index->bytes_since_flush = 0;
        return 0;
    }
    if (mqd_index_cut_files(index, directory, segment_base) < 0 || mqd_index_flush(index, directory, segment_base) < 0)
        return -1;
    return 1;
}

/* Finds the last of `count` entries whose key is not above `key`, by bisection with pread. Returns
 * its number, -1 if there is none, or -2 on disk failure. */
static int64_t bisect(int fd, uint32_t count, uint32_t entry_bytes, int64_t key, int64_t (*key_of)(const uint8_t *),
                      uint8_t *entry)
{
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (read_entries(fd, entry, entry_bytes, middle * entry_bytes) < 0)
            return -2;
        if (key_of(entry) <= key)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0)
        return -1;
    return read_entries(fd, entry, entry_bytes, (low - 1) * entry_bytes) < 0 ? -2 : low - 1;
}

static int64_t offset_key(const uint8_t *bytes)
{
    return decode_entry(bytes).relative_offset;
}

static int64_t time_key(const uint8_t *bytes)
{
    return decode_time_entry(bytes).timestamp_ms;
}

static int lookup(const char *directory, int64_t segment_base, enum mqd_file_kind kind, uint32_t entry_bytes,
                  int64_t key, int64_t (*key_of)(const uint8_t *), uint8_t *entry)
{
    uint32_t count;
    int fd = open_for_reading(directory, segment_base, kind, entry_bytes, &count);
    if (fd < 0)
        return fd == -1 ? 0 : -1;
    int64_t number = bisect(fd, count, entry_bytes, key, key_of, entry);
    close(fd);
    return number == -2 ? -1 : number >= 0;
}

int mqd_index_lookup(const char *directory, int64_t segment_base, int64_t offset, struct mqd_index_entry *out)
{
    uint8_t entry[MQD_INDEX_ENTRY_BYTES];
    int result =
        lookup(directory, segment_base, MQD_FILE_INDEX, sizeof entry, offset - segment_base, offset_key, entry);
    if (result == 1)
        *out = decode_entry(entry);
    return result;
}

int mqd_time_index_lookup(const char *directory, int64_t segment_base, int64_t timestamp_ms,
                          struct mqd_time_index_entry *out)
{
    uint8_t entry[MQD_TIME_INDEX_ENTRY_BYTES];
    int result = lookup(directory, segment_base, MQD_FILE_TIME_INDEX, sizeof entry, timestamp_ms, time_key, entry);
    if (result == 1)
        *out = decode_time_entry(entry);
    return result;
}
