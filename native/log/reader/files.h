/* The segment files of a partition, and which of them this process has open. The lower layer of
 * mqd_reader; the lookups are in log/reader/reader.c.
 *
 * Owns: per slot the directory's path and a sorted list of segment base offsets (from a directory
 * listing), and a least-recently-used list of open segments.
 *
 *   R1  an open segment is in `recent` or, if its file left the directory while a range was being
 *       sent, in `detached`; never in both.
 *   R2  a referenced segment is never closed; a detached one is closed with its last reference.
 *   R3  at most fd_count_max descriptors, not counting those of referenced segments: the least
 *       recently used without a reference are closed first.
 *   R4  a slot's list and its open files belong to `generation`: when that changes, the directory
 *       is read again and open files are compared by inode, so that a file that was removed, or
 *       replaced under the same name (compaction), is released.
 * Concurrency: one thread.
 */
#ifndef MQD_READER_FILES_H
#define MQD_READER_FILES_H

#include "base/list.h"
#include "log/reader/reader.h"

#define MQD_READER_CHUNK_BYTES (64 * 1024)
#define MQD_READER_INDEX_CHUNK_BYTES 4096
#define MQD_READER_FD_COUNT_MIN 4

#define MQD_OFFSET_OUT_OF_RANGE 1
#define MQD_CORRUPT_MESSAGE 2
#define MQD_UNKNOWN_TOPIC_OR_PARTITION 3
#define MQD_KAFKA_STORAGE_ERROR 56
#define MQD_READER_STALE (-1) /* mqd_error_code() is MQD_E_STALE */

struct mqd_segment_ref {
    struct mqd_node node;         /* in reader->recent or reader->detached */
    struct mqd_reader_slot *slot; /* NULL once detached */
    int64_t base_offset;
    int fd;
    int index_fd; /* -1: not opened yet, or no index file (a segment shorter than one index interval has none) */
    uint64_t inode;
    uint64_t serial; /* number of this open file, from 1; unlike the inode it is never reused */
    uint32_t references;
};

struct mqd_reader_segment {
    int64_t base_offset;
    int64_t sealed_bytes;        /* size, if the high watermark is in a later segment; -1 = not read yet */
    struct mqd_segment_ref *ref; /* NULL = not open */
    /* true also if only the .txnsum of a lost .txnindex exists. If a .txnindex is created later,
     * the generation changes. */
    bool has_txn_index;
};

struct mqd_reader_slot {
    struct mqd_node node; /* in reader->slot_list */
    char *path;
    uint32_t number;
    uint32_t segment_count;
    uint32_t open_count;
    bool listed;
    /* the high watermark's segment and position when mqd_range_just_written was first called */
    bool has_first_use;
    int64_t first_use_segment;
    uint32_t first_use_position;
    /* compaction is replacing files: mqd_reader_is_swapping */
    bool swapping;
    /* the file of missing_offset was missing in missing_generation. If it is missing a second time
     * in the same generation, this is an error, not a race */
    bool was_missing;
    int64_t missing_offset;
    uint64_t missing_generation;
    uint64_t generation;
    bool has_limit; /* the next four fields are the last result of mqd_reader_limit_positions */
    int64_t limit_offset, limit_segment;
    uint64_t limit_generation;
    uint32_t limit_position;
    struct mqd_reader_segment *segments; /* by base offset */
};

struct mqd_reader {
    uint32_t fd_count_max;
    uint32_t fd_count;
    uint32_t open_count; /* segments, including detached ones */
    uint64_t last_serial;
    struct mqd_node recent; /* least recently used first */
    struct mqd_node detached;
    struct mqd_node slot_list; /* slots with a path */
    struct mqd_reader_slot *slots[MQD_PARTITION_SLOT_COUNT];
    int64_t chunk_position; /* the part of a .log in `chunk`, for the current lookup */
    uint32_t chunk_bytes;
    uint8_t chunk[MQD_READER_CHUNK_BYTES];
    uint8_t index_chunk[MQD_READER_INDEX_CHUNK_BYTES];
};

/* Reads the directory. 0, MQD_READER_STALE or MQD_KAFKA_STORAGE_ERROR. */
int16_t mqd_reader_list(struct mqd_reader *reader, struct mqd_reader_slot *slot, uint64_t generation);
/* Index in slot->segments of the last one with a base offset <= offset, or -1. */
int32_t mqd_reader_segment_at(const struct mqd_reader_slot *slot, int64_t offset);
/* Opens segment `number` (or finds it open) and makes it the most recently used. Returns codes like
 * mqd_reader_list. */
int16_t mqd_reader_open(struct mqd_reader *reader, struct mqd_reader_slot *slot, uint32_t number,
                        struct mqd_segment_ref **out);
/* The fd of the segment's .index, opened now if needed; -1 if it has none. Never closes
 * `segment`. */
int mqd_reader_open_index(struct mqd_reader *reader, struct mqd_segment_ref *segment);
/* Size of a sealed segment, read from its inode the first time; -1 with the message set. */
int64_t mqd_reader_sealed_bytes(struct mqd_reader_slot *slot, uint32_t number);
/* The error for a file that the table names but the directory lacks: MQD_READER_STALE the first
 * time in this generation, then MQD_KAFKA_STORAGE_ERROR. */
int16_t mqd_reader_report_missing(struct mqd_reader_slot *slot, const char *missing_file, int64_t base_offset);
void mqd_reader_unreference(struct mqd_reader *reader, struct mqd_segment_ref *segment);

#endif
