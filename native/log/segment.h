/* One segment's files: their names, and a forward walk over the record batches of a .log.
 *
 * A batch at position p is valid (and kept by recovery) if its header of 61 bytes is there and can
 * be decoded; the whole batch is there; its base offset follows the previous batch (or is the
 * segment's base), or is higher where gaps are allowed; its last offset is within int32 of the
 * segment's base; and, if requested, its CRC32C is correct. The CRC does not cover the base offset:
 * where there are no gaps, continuity verifies it. The walk stops at the first byte where this
 * fails; an all-zero tail fails at its first byte (batch length 0).
 *
 * Memory: one buffer, at most MQD_WALK_BUFFER_BYTES; larger batches are checksummed in pieces.
 * Reads with pread only: an I/O error is a return value, never SIGBUS. Concurrency: a walk
 * belongs to one thread; several walks of one file may run in parallel.
 */
#ifndef MQD_SEGMENT_H
#define MQD_SEGMENT_H

#include "native.h"

#define MQD_WALK_BUFFER_BYTES (1 << 20)
#define MQD_SEGMENT_SUFFIX_BYTES_MAX 16

enum mqd_file_kind {
    MQD_FILE_LOG,
    MQD_FILE_INDEX,
    MQD_FILE_TIME_INDEX,
    MQD_FILE_TXN_INDEX,
    MQD_FILE_TXN_SUM,
    MQD_FILE_SNAPSHOT
};

/* Writes the path DIRECTORY/%020d.log (or another suffix) to `out`. -1 ENAMETOOLONG (mqd_error
 * set). */
int mqd_segment_path(char *out, size_t capacity, const char *directory, int64_t base_offset, enum mqd_file_kind kind);
/* The offset in a file name of this kind, or -1 for any other name. */
int64_t mqd_segment_offset_of(const char *name, enum mqd_file_kind kind);

struct mqd_walk {
    int fd;
    int64_t base_offset;     /* of the segment */
    int64_t end_position;    /* the walk never reads beyond it: the file's size */
    int64_t position;        /* of the next batch: all earlier ones were valid */
    int64_t next_offset;     /* lowest base offset that the next batch may have */
    bool gaps_allowed;       /* the log is compacted, or may be; set after mqd_walk_begin */
    int64_t crc_from_offset; /* batches with a lower base_offset are trusted by their header; INT64_MAX = never check */
    const char *reason;      /* why the walk ended before end_position; NULL = it did not */
    uint8_t *buffer;
    int64_t capacity_bytes;
    int64_t buffer_position; /* file position of buffer[0] */
    int64_t buffer_bytes;
    int64_t read_bytes; /* in total; recovery reports it */
    int64_t last_batch_bytes;
};

int mqd_walk_begin(struct mqd_walk *walk, int fd, int64_t base_offset, int64_t position, int64_t next_offset,
                   int64_t end_position, int64_t crc_from_offset);
/* Returns 1 if *batch begins at *position; walk->position is then after it. 0: the end, or the
 * first invalid byte (walk->reason). -1: disk failure (mqd_error set). */
int mqd_walk_next(struct mqd_walk *walk, struct mqd_batch *batch, int64_t *position);
/* Checks the CRC of a batch that the walk has read: 1 correct, 0 wrong, -1 disk failure. */
int mqd_walk_check(struct mqd_walk *walk, const struct mqd_batch *batch, int64_t position);
/* Called at an invalid walk->position: finds the next position at which a batch with base_offset >=
 * next_offset and a correct CRC begins, and moves the walk there. Returns 1 if there is one, 0 if
 * not, -1 on disk failure. Used for damage in bytes that are known to have been valid. */
int mqd_walk_resync(struct mqd_walk *walk);
void mqd_walk_end(struct mqd_walk *walk);

static inline int64_t mqd_batch_end_offset(const struct mqd_batch *batch)
{
    return batch->base_offset + batch->last_offset_delta + 1;
}

#endif
