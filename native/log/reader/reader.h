/* The reading side of every partition, for one process: finds the bytes of a fetch in the segment
 * files.
 *
 * Any worker reads any partition: it opens the segment files itself, read-only, and the positions
 * in the partition table tell it how far each file is valid. It never reads through a mapping, only
 * with pread on the sparse index, and with sendfile or pread on the log.
 *
 * Bounds: fd_count_max descriptors (a segment takes two, .log and .index); the least recently used
 * are closed first, except those referenced by a range that is being sent, which are not counted.
 * Allocates only to open a segment or list a directory. Cost of a sequential lookup: none when the
 * high watermark is within size_bytes_max, otherwise one pread of 4 KiB of index. Data bytes are
 * read only to find an offset without a cursor (batch headers after an index entry) and where the
 * index has no entry within size_bytes_max. Concurrency: one thread.
 */
#ifndef MQD_READER_H
#define MQD_READER_H

#include "log/txn_index.h"
#include "native.h"

struct mqd_reader;
struct mqd_segment_ref; /* an open segment, reference counted */

struct mqd_cursor {  /* position of a sequential reader: makes the next lookup free. Zero-initialise. */
    int64_t offset;  /* a fetch at this offset begins with the batch at `position` */
    int64_t segment; /* base offset of its segment */
    uint32_t position;
    uint32_t index_hint; /* byte offset in the .index to search from */
    bool valid;
    /* segments_generation that the position belongs to; if it has changed, the cursor is ignored */
    uint64_t generation;
    /* inode of the file that the position belongs to, because compaction replaces files under the
     * same names; 0 if none is recorded, which is so only while `position` is 0 */
    uint64_t inode;
};

struct mqd_range {                   /* whole batches of one segment file */
    struct mqd_segment_ref *segment; /* referenced: mqd_range_release; NULL when size_bytes is 0 */
    uint32_t position;
    uint32_t size_bytes;
};

struct mqd_reader *mqd_reader_create(uint32_t fd_count_max);
void mqd_reader_destroy(struct mqd_reader *reader);
/* Sets the topic-partition directory of a slot; copies the path. NULL forgets it and closes its
 * files. */
int mqd_reader_set_path(struct mqd_reader *reader, uint32_t slot, const char *path);

/* Finds what a consumer at `offset` may read below the high watermark in `positions`, at most
 * size_bytes_max. If the first batch alone is larger, it is returned whole if min_one_batch is
 * set; otherwise nothing is returned. At most one segment per call. A returned range starts with
 * the batch that holds `offset`. Updates *cursor to the end of the range. Returns 0
 * (range.size_bytes is 0 at or above the high watermark and when nothing fits), 1
 * OFFSET_OUT_OF_RANGE (below the log start or above the log end), 2 CORRUPT_MESSAGE (the message
 * names file and position), 3 UNKNOWN_TOPIC_OR_PARTITION (no path is set), 56 KAFKA_STORAGE_ERROR,
 * or -1 MQD_E_STALE: segments changed meanwhile; read positions and generation again and retry. A
 * file that is still missing in the same generation is a KAFKA_STORAGE_ERROR. */
int16_t mqd_reader_find(struct mqd_reader *reader, uint32_t slot, const struct mqd_positions *positions,
                        uint64_t segments_generation, int64_t offset, uint32_t size_bytes_max, bool min_one_batch,
                        struct mqd_cursor *cursor, struct mqd_range *out);
/* Bytes between `offset` and the high watermark, for min_bytes. Costs nothing if the cursor is in
 * the high watermark's segment; otherwise a lookup, which also moves the cursor to `offset`.
 * UINT64_MAX when unknown (nothing was listed yet, or any error): mqd_reader_find then returns the
 * reason. */
uint64_t mqd_reader_available_bytes(struct mqd_reader *reader, uint32_t slot, const struct mqd_positions *positions,
                                    int64_t offset, struct mqd_cursor *cursor);
/* For read_committed: replaces the high watermark in `positions` with the batch boundary at
 * end_offset, the last stable offset; does nothing when end_offset is not below the high watermark.
 * The boundary is cached, so repeated calls are free. Returns codes like mqd_reader_find. */
int16_t mqd_reader_limit_positions(struct mqd_reader *reader, uint32_t slot, uint64_t segments_generation,
                                   int64_t end_offset, struct mqd_positions *positions);
/* While compaction replaces files, a .txnindex may not match the .log that was found: aborted
 * records would be returned, or committed ones left out, because the marker that an old entry
 * refers to no longer exists. Returns true while this is possible; the directory is listed again at
 * the next lookup. */
bool mqd_reader_is_swapping(struct mqd_reader *reader, uint32_t slot);
/* Finds the aborted transactions that overlap [from_offset, to_offset), in order of first_offset.
 * Pass the published `positions`, not those that mqd_reader_limit_positions has limited: a
 * transaction's marker may be after the last stable offset. Overwrites `out` and reuses its memory;
 * the caller frees out->entries. Returns codes like mqd_reader_find. */
int16_t mqd_reader_find_aborted(struct mqd_reader *reader, uint32_t slot, const struct mqd_positions *positions,
                                uint64_t segments_generation, int64_t from_offset, int64_t to_offset,
                                struct mqd_aborted_list *out);
struct mqd_segment_location {
    struct mqd_segment_ref *segment; /* referenced: mqd_segment_location_release */
    int64_t base_offset;
    /* INT64_MAX: there is no next segment, or this one is not readable to its end yet */
    int64_t next_base_offset;
    /* position of the batch that holds the offset, or of the end of the readable bytes if the
     * offset is the high watermark */
    uint32_t position;
    uint32_t readable_bytes; /* of the file */
};
/* Finds the place of `offset`, which is between log start and high watermark. Returns codes like
 * mqd_reader_find. */
int16_t mqd_reader_locate(struct mqd_reader *reader, uint32_t slot, const struct mqd_positions *positions,
                          uint64_t segments_generation, int64_t offset, struct mqd_segment_location *out);
void mqd_segment_location_release(struct mqd_reader *reader, struct mqd_segment_location *location);
int mqd_segment_ref_fd(const struct mqd_segment_ref *segment);
/* A serial number that was assigned when the file was opened; never 0, never reused. */
uint64_t mqd_segment_ref_serial(const struct mqd_segment_ref *segment);
/* Moves the cursor, which mqd_reader_find has set to the end of `range`, back to a batch of the
 * range: the one at `position`, which has the first record at or above `offset`. */
void mqd_range_move_cursor(const struct mqd_range *range, uint32_t position, int64_t offset, struct mqd_cursor *cursor);
void mqd_range_release(struct mqd_reader *reader, struct mqd_range *range);
/* log/reader/page_cache.c: whether all pages of the range are in the page cache. Returns 1; or 0 if
 * they are not, or if this is unknown: sending the range may then wait for the disk. */
int mqd_range_cached(const struct mqd_range *range);
/* A cheaper check, made before mqd_range_cached: whether the range was written after this reader
 * first used the partition, and little has been written since. Older data may be cold even near the
 * end of the log. */
bool mqd_range_just_written(struct mqd_reader *reader, uint32_t slot, const struct mqd_positions *positions,
                            const struct mqd_range *range);
/* Closes descriptors of deleted segments: called when the global segments generation has moved;
 * generation_of returns each slot's current one. */
void mqd_reader_sweep(struct mqd_reader *reader, uint64_t (*generation_of)(void *context, uint32_t slot),
                      void *context);
uint32_t mqd_reader_segment_count(const struct mqd_reader *reader); /* open now */
uint32_t mqd_reader_fd_count(const struct mqd_reader *reader);

#endif
