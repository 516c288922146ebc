/* See log/segment.h. */
#include "log/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "log/planted_bugs.h"

/* The size of one read in a walk that checks only headers. After a batch of at most
 * SMALL_BATCH_BYTES it is SPAN_READ_BYTES, because reading ahead costs less than a call for each
 * small batch; after a larger one it is HEADER_READ_BYTES. */
#define SMALL_BATCH_BYTES 8192
#define HEADER_READ_BYTES 4096
#define SPAN_READ_BYTES (256 * 1024)
#define CRC_FROM 21 /* the CRC covers the attributes and everything after them */

static const char *const suffixes[] = {".log", ".index", ".timeindex", ".txnindex", ".txnsum", ".snapshot"};

int mqd_segment_path(char *out, size_t capacity, const char *directory, int64_t base_offset, enum mqd_file_kind kind)
{
    int length = snprintf(out, capacity, "%s/%020lld%s", directory, (long long)base_offset, suffixes[kind]);
    return length < 0 || (size_t)length >= capacity ? mqd_error_set(ENAMETOOLONG, "path too long: %s", directory) : 0;
}

int64_t mqd_segment_offset_of(const char *name, enum mqd_file_kind kind)
{
    int64_t offset = 0;
    for (int i = 0; i < 20; i++) {
        if (name[i] < '0' || name[i] > '9' || __builtin_mul_overflow(offset, 10, &offset) ||
            __builtin_add_overflow(offset, name[i] - '0', &offset))
            return -1;
    }
    return strcmp(name + 20, suffixes[kind]) == 0 ? offset : -1;
}

int mqd_walk_begin(struct mqd_walk *walk, int fd, int64_t base_offset, int64_t position, int64_t next_offset,
                   int64_t end_position, int64_t crc_from_offset)
{
    *walk = (struct mqd_walk){.fd = fd,
                              .base_offset = base_offset,
                              .end_position = end_position,
                              .position = position,
                              .next_offset = next_offset,
                              .crc_from_offset = crc_from_offset};
    int64_t bytes_max = crc_from_offset == INT64_MAX ? SPAN_READ_BYTES : MQD_WALK_BUFFER_BYTES,
            remaining = end_position - position;
    walk->capacity_bytes = remaining > bytes_max           ? bytes_max
                           : remaining > HEADER_READ_BYTES ? remaining
                                                           : HEADER_READ_BYTES;
    walk->buffer = malloc((size_t)walk->capacity_bytes);
    return walk->buffer ? 0 : mqd_error_set(ENOMEM, "no memory to read a segment");
}

void mqd_walk_end(struct mqd_walk *walk)
{
    free(walk->buffer);
    walk->buffer = NULL;
}

/* Ensures that the buffer holds [position, position + need) of the file; if it must read, it reads
 * up to `want` bytes. Returns the bytes, or NULL (mqd_error set). */
static const uint8_t *walk_read(struct mqd_walk *walk, int64_t position, int64_t need, int64_t want)
{
    if (position >= walk->buffer_position && position + need <= walk->buffer_position + walk->buffer_bytes)
        return walk->buffer + (position - walk->buffer_position);
    if (want > walk->capacity_bytes)
        want = walk->capacity_bytes;
    if (want > walk->end_position - position)
        want = walk->end_position - position;
    if (want < need)
        want = need;
    walk->buffer_position = position;
    walk->buffer_bytes = 0;
    while (walk->buffer_bytes < need) {
        ssize_t got = pread(walk->fd, walk->buffer + walk->buffer_bytes, (size_t)(want - walk->buffer_bytes),
                            position + walk->buffer_bytes);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            mqd_error_system(got < 0 ? errno : EIO, "cannot read segment %lld at position %lld",
                             (long long)walk->base_offset, (long long)(position + walk->buffer_bytes));
            return NULL;
        }
        walk->buffer_bytes += got;
        walk->read_bytes += got;
    }
    return walk->buffer + (position - walk->buffer_position);
}

/* Batches that do not fit into the buffer are read and checksummed in pieces. */
int mqd_walk_check(struct mqd_walk *walk, const struct mqd_batch *batch, int64_t position)
{
    int64_t at = position + CRC_FROM, end = position + batch->size_bytes;
    uint32_t crc = 0;
    if (batch->size_bytes <= walk->capacity_bytes) {
        const uint8_t *bytes = walk_read(walk, position, batch->size_bytes, walk->capacity_bytes);
        return bytes ? mqd_crc32c(0, bytes + CRC_FROM, (size_t)batch->size_bytes - CRC_FROM) == batch->crc : -1;
    }
    while (at < end) {
        int64_t part = end - at < walk->capacity_bytes ? end - at : walk->capacity_bytes;
        const uint8_t *bytes = walk_read(walk, at, part, part);
        if (!bytes)
            return -1;
        crc = mqd_crc32c(crc, bytes, (size_t)part);
        at += part;
    }
    return crc == batch->crc;
}

static int walk_stop(struct mqd_walk *walk, const char *reason)
{
    walk->reason = reason;
    return 0;
}

int mqd_walk_next(struct mqd_walk *walk, struct mqd_batch *batch, int64_t *position)
{
    int64_t at = walk->position, left = walk->end_position - at;
    walk->reason = NULL;
    if (left <= 0)
        return 0;
    if (left < MQD_BATCH_HEADER_BYTES)
        return walk_stop(walk, "the file ends inside a batch header");
    bool checks_crc = walk->crc_from_offset != INT64_MAX;
    int64_t span = checks_crc                                   ? MQD_WALK_BUFFER_BYTES
                   : walk->last_batch_bytes > SMALL_BATCH_BYTES ? HEADER_READ_BYTES
                                                                : SPAN_READ_BYTES;
    const uint8_t *bytes = walk_read(walk, at, MQD_BATCH_HEADER_BYTES, span);
    if (!bytes)
        return -1;
    if (mqd_batch_decode(bytes, MQD_BATCH_HEADER_BYTES, batch) < 0 || batch->size_bytes < MQD_BATCH_HEADER_BYTES ||
        batch->last_offset_delta < 0)
        return walk_stop(walk, "not a record batch header with magic 2");
    if (batch->size_bytes > left)
        return walk_stop(walk, "the file ends inside a batch");
    if (batch->base_offset < walk->next_offset && !PLANTED_LOG_BUG(OLD_BATCH))
        return walk_stop(walk, "a batch's base offset is lower than the end of the previous batch");
    if (batch->base_offset > walk->next_offset && !walk->gaps_allowed)
        return walk_stop(walk, "a batch's base offset is higher than the end of the previous batch");
    if (batch->base_offset - walk->base_offset > INT32_MAX - (int64_t)batch->last_offset_delta)
        return walk_stop(walk, "a batch's offset is out of the segment's range");
    if (batch->base_offset >= walk->crc_from_offset) {
        int valid = mqd_walk_check(walk, batch, at);
        if (valid <= 0)
            return valid < 0 ? -1 : walk_stop(walk, "a batch's CRC is wrong");
    }
    *position = at;
    walk->position = at + batch->size_bytes;
    walk->next_offset = mqd_batch_end_offset(batch);
    walk->last_batch_bytes = batch->size_bytes;
    return 1;
}

/* Whether a valid batch begins at `at`; if so, the walk continues there. */
static int walk_try(struct mqd_walk *walk, int64_t at)
{
    struct mqd_batch batch;
    int64_t position, next_offset = walk->next_offset;
    walk->position = at;
    int found = mqd_walk_next(walk, &batch, &position);
    walk->position = at;
    walk->next_offset = found == 1 ? batch.base_offset : next_offset;
    return found;
}

/* Tries each position at which a batch with magic 2 could begin; the CRC decides. */
int mqd_walk_resync(struct mqd_walk *walk)
{
    int64_t crc_from_offset = walk->crc_from_offset, start = walk->position;
    bool gaps_allowed = walk->gaps_allowed;
    int found = 0;
    walk->crc_from_offset = 0;
    walk->gaps_allowed = true;
    for (int64_t at = start + 1; found == 0 && at + MQD_BATCH_HEADER_BYTES <= walk->end_position; at++) {
        const uint8_t *bytes = walk_read(walk, at, MQD_BATCH_HEADER_BYTES, walk->capacity_bytes);
        if (!bytes)
            found = -1;
        else if (bytes[16] == 2)
            found = walk_try(walk, at);
    }
    if (found == 1)
        walk->reason = NULL;
    else
        walk->position = start;
    walk->crc_from_offset = crc_from_offset;
    walk->gaps_allowed = gaps_allowed;
    return found;
}

static int scan_walk(struct mqd_walk *walk, struct mqd_scan_result *out)
{
    struct mqd_batch batch;
    int64_t position;
    int walk_result;
    while ((walk_result = mqd_walk_next(walk, &batch, &position)) == 1) {
        out->batch_count++;
        out->record_count += batch.record_count;
        if (batch.max_timestamp_ms > out->max_timestamp_ms)
            out->max_timestamp_ms = batch.max_timestamp_ms;
        out->last_leader_epoch = batch.partition_leader_epoch;
    }
    out->valid_bytes = walk->position;
    out->next_offset = walk->next_offset;
    out->reason = walk->reason;
    return walk_result;
}

int mqd_segment_scan(const char *log_path, int64_t base_offset, int64_t from_position, int check_crc,
                     struct mqd_scan_result *out)
{
    *out = (struct mqd_scan_result){.next_offset = base_offset, .max_timestamp_ms = -1, .last_leader_epoch = -1};
    int fd = open(log_path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return mqd_error_system(errno, "cannot open %s", log_path);
    struct stat status;
    struct mqd_walk walk;
    int result = -1;
    if (fstat(fd, &status) < 0)
        mqd_error_system(errno, "cannot stat %s", log_path);
    else if (from_position < 0 || from_position > status.st_size)
        mqd_error_set(MQD_E_INVALID, "%s holds %lld bytes; a scan cannot begin at %lld", log_path,
                      (long long)status.st_size, (long long)from_position);
    else if (mqd_walk_begin(&walk, fd, base_offset, from_position, base_offset, status.st_size,
                            check_crc ? 0 : INT64_MAX) == 0) {
        walk.gaps_allowed = true;
        result = scan_walk(&walk, out);
        mqd_walk_end(&walk);
    }
    close(fd);
    return result;
}
