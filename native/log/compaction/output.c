/* The writing side of a compaction: BASE.log.cleaned, its two indexes, and .txnindex.cleaned and
 * .txnsum.cleaned if there are aborted transactions; see log/compaction/compact.h. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "log/compaction/compact.h"
#include "log/planted_bugs.h"

enum { KIND_LOG, KIND_INDEX, KIND_TIME_INDEX, KIND_TRANSACTIONS, KIND_TRANSACTION_CHECKSUMS, KIND_COUNT };
static const char *const suffixes[KIND_COUNT] = {".log", ".index", ".timeindex", ".txnindex", ".txnsum"};

int mqd_compact_bytes_reserve(struct mqd_compact_bytes *target, size_t size_bytes)
{
    if (target->capacity - target->size_bytes >= size_bytes)
        return 0;
    size_t capacity = target->capacity ? target->capacity : 4096;
    while (capacity - target->size_bytes < size_bytes)
        capacity *= 2;
    uint8_t *grown = realloc(target->bytes, capacity);
    if (!grown)
        return mqd_error_set(ENOMEM, "no memory to compact a batch of %zu bytes", target->size_bytes + size_bytes);
    target->bytes = grown;
    target->capacity = capacity;
    return 0;
}

int mqd_compact_bytes_add(struct mqd_compact_bytes *target, const void *bytes, size_t size_bytes)
{
    if (mqd_compact_bytes_reserve(target, size_bytes) < 0)
        return -1;
    if (bytes && size_bytes)
        memcpy(target->bytes + target->size_bytes, bytes, size_bytes);
    target->size_bytes += size_bytes;
    return 0;
}

static int cleaned_path(char path[PATH_MAX], const struct mqd_compact_output *output, int kind)
{
    int length = snprintf(path, PATH_MAX, "%s/%020lld%s.cleaned", output->directory, (long long)output->base_offset,
                          suffixes[kind]);
    return length < PATH_MAX ? 0 : mqd_error_set(ENAMETOOLONG, "path too long: %s", output->directory);
}

int mqd_compact_output_begin(struct mqd_compact_output *output, int64_t base_offset)
{
    char path[PATH_MAX];
    output->base_offset = base_offset;
    output->position = output->synced_position = 0;
    output->pending.size_bytes = output->index_bytes.size_bytes = output->time_index_bytes.size_bytes =
        output->transaction_bytes.size_bytes = output->transaction_checksums.size_bytes = 0;
    mqd_index_init(&output->index);
    if (cleaned_path(path, output, KIND_LOG) < 0)
        return -1;
    output->fd = mqd_file_open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    return output->fd < 0 ? mqd_error_system(errno, "cannot create %s", path) : 0;
}

static int write_fully(int fd, const uint8_t *bytes, size_t size_bytes, int64_t position)
{
    while (size_bytes > 0) {
        ssize_t written =
            mqd_file_pwrite(fd, bytes, size_bytes < MQD_WRITE_BYTES_MAX ? size_bytes : MQD_WRITE_BYTES_MAX, position);
        if (written <= 0)
            return mqd_error_system(written < 0 ? errno : EIO, "cannot write a compacted segment");
        bytes += written;
        position += written;
        size_bytes -= (size_t)written;
    }
    return 0;
}

static int write_pending(struct mqd_compact_output *output)
{
    int64_t start = output->position - (int64_t)output->pending.size_bytes;
    if (write_fully(output->fd, output->pending.bytes, output->pending.size_bytes, start) < 0)
        return -1;
    output->pending.size_bytes = 0;
    if (output->position - output->synced_position < MQD_COMPACT_SYNC_BYTES)
        return 0;
    output->synced_position = output->position;
    return mqd_file_sync(output->fd, false) < 0 ? mqd_error_system(errno, "cannot flush a compacted segment") : 0;
}

/* Moves the index's pending entries, in their file format, to the output's buffers. */
static int take_entries(struct mqd_compact_output *output)
{
    struct mqd_index *index = &output->index;
    for (uint16_t i = 0; i < index->pending_count; i++) {
        uint8_t entry[MQD_INDEX_ENTRY_BYTES];
        mqd_index_entry_put(entry, &index->pending[i]);
        if (mqd_compact_bytes_add(&output->index_bytes, entry, sizeof entry) < 0)
            return -1;
    }
    for (uint16_t i = 0; i < index->time_pending_count; i++) {
        uint8_t entry[MQD_TIME_INDEX_ENTRY_BYTES];
        mqd_time_index_entry_put(entry, &index->time_pending[i]);
        if (mqd_compact_bytes_add(&output->time_index_bytes, entry, sizeof entry) < 0)
            return -1;
    }
    index->pending_count = index->time_pending_count = 0;
    return 0;
}

int mqd_compact_output_add(struct mqd_compact_output *output, const struct mqd_batch *batch, const void *header,
                           uint32_t header_bytes, const void *records, uint32_t records_bytes)
{
    struct mqd_batch written = *batch;
    written.size_bytes = (int32_t)(header_bytes + records_bytes);
    mqd_index_add(&output->index, output->base_offset, output->index_interval_bytes, &written,
                  (uint32_t)output->position);
    if (take_entries(output) < 0 || mqd_compact_bytes_add(&output->pending, header, header_bytes) < 0 ||
        mqd_compact_bytes_add(&output->pending, records, records_bytes) < 0)
        return -1;
    output->position += written.size_bytes;
    return output->pending.size_bytes >= MQD_COMPACT_IO_BYTES ? write_pending(output) : 0;
}

static int write_file(const struct mqd_compact_output *output, int kind, const struct mqd_compact_bytes *content)
{
    char path[PATH_MAX];
    if (cleaned_path(path, output, kind) < 0)
        return -1;
    int fd = mqd_file_open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0)
        return mqd_error_system(errno, "cannot create %s", path);
    int result = write_fully(fd, content->bytes, content->size_bytes, 0);
    if (result == 0 && mqd_file_sync(fd, false) < 0)
        result = mqd_error_system(errno, "cannot flush %s", path);
    mqd_file_close(fd);
    return result;
}

int mqd_compact_output_finish(struct mqd_compact_output *output)
{
    mqd_index_add_time_entry(&output->index, output->base_offset);
    if (take_entries(output) < 0 || write_pending(output) < 0)
        return -1;
    if (!PLANTED_LOG_BUG(NO_OUTPUT) && mqd_file_sync(output->fd, false) < 0)
        return mqd_error_system(errno, "cannot flush a compacted segment");
    if (write_file(output, KIND_INDEX, &output->index_bytes) < 0 ||
        write_file(output, KIND_TIME_INDEX, &output->time_index_bytes) < 0)
        return -1;
    if (output->transaction_bytes.size_bytes == 0)
        return 0;
    return write_file(output, KIND_TRANSACTIONS, &output->transaction_bytes) < 0
               ? -1
               : write_file(output, KIND_TRANSACTION_CHECKSUMS, &output->transaction_checksums);
}

void mqd_compact_output_end(struct mqd_compact_output *output, bool discard)
{
    char path[PATH_MAX];
    if (output->fd < 0)
        return;
    mqd_file_close(output->fd);
    output->fd = -1;
    for (int kind = 0; discard && kind < KIND_COUNT; kind++)
        if (cleaned_path(path, output, kind) == 0 && access(path, F_OK) == 0)
            mqd_file_unlink(path);
}
