/* The sparse indexes of one segment, written by the partition's owner.
 *
 *   .index      8 bytes per entry, big endian: i32 base offset of a batch, i32 position of the
 *               batch's first byte
 *   .timeindex  12 bytes per entry, big endian: i64 largest timestamp so far (ms), i32 last offset
 *               of the batch that has it
 *
 * Both offsets are relative to the segment's base offset.
 *
 * Entries are collected in memory and written when 32 of them, or 256 KiB of log, are pending, and
 * when the segment is sealed or closed. A lookup must therefore be prepared to walk 256 KiB or
 * more of batch headers after the last entry. The two files are opened on first use.
 *
 * Invariants
 *   I1  offsets and positions of .index strictly increase; timestamps of .timeindex strictly
 *       increase, and its offsets never decrease.
 *   I2  a record with a later timestamp than a .timeindex entry has a higher offset than the entry;
 *       the first batch of a segment (position 0) has no .index entry.
 *   I3  a file's size is a whole number of entries once a write has returned, even if it has
 *       failed.
 *   I4  a full disk costs entries (every second pending one), never correctness: a coarser index
 *       finds the same batches.
 * Concurrency: the partition's owner alone.
 */
#ifndef MQD_INDEX_H
#define MQD_INDEX_H

#include "base/big_endian.h"
#include "native.h"

#define MQD_INDEX_ENTRY_BYTES 8
#define MQD_TIME_INDEX_ENTRY_BYTES 12
#define MQD_INDEX_PENDING_MAX 32
#define MQD_INDEX_PENDING_LOG_BYTES (256 * 1024)
#define MQD_INDEX_FILE_BYTES_MAX (10 << 20) /* Kafka's segment.index.bytes; a full one rolls the segment */

struct mqd_index_entry {
    uint32_t relative_offset, position;
};
struct mqd_time_index_entry {
    int64_t timestamp_ms;
    uint32_t relative_offset;
};

struct mqd_index {
    int fd, time_fd;     /* -1 = not open */
    uint32_t file_bytes; /* .index on disk, whole entries */
    uint32_t time_file_bytes;
    uint16_t pending_count, time_pending_count;
    int64_t bytes_since_entry; /* log bytes after the last entry */
    int64_t bytes_since_flush;
    int64_t max_timestamp_ms; /* of the segment so far; -1 = none */
    int64_t max_timestamp_offset;
    int64_t last_time_entry_ms; /* timestamp of the last .timeindex entry; -1 = none */
    struct mqd_index_entry pending[MQD_INDEX_PENDING_MAX];
    struct mqd_time_index_entry time_pending[MQD_INDEX_PENDING_MAX];
};

/* Writes an entry in its file format; returns the position after it. */
static inline uint8_t *mqd_index_entry_put(uint8_t *at, const struct mqd_index_entry *entry)
{
    return mqd_put_be32(mqd_put_be32(at, entry->relative_offset), entry->position);
}

static inline uint8_t *mqd_time_index_entry_put(uint8_t *at, const struct mqd_time_index_entry *entry)
{
    return mqd_put_be32(mqd_put_be64(at, (uint64_t)entry->timestamp_ms), entry->relative_offset);
}

void mqd_index_init(struct mqd_index *index);
/* Adds a batch at `position`. Returns 1 when the pending entries should be flushed. Never fails. */
int mqd_index_add(struct mqd_index *index, int64_t segment_base, int32_t interval_bytes, const struct mqd_batch *batch,
                  uint32_t position);
/* Whether the files could exceed their size limit with more_count further entries. */
bool mqd_index_full(const struct mqd_index *index, uint32_t more_count);
/* Adds a time entry for the largest timestamp so far, unless it exists. */
void mqd_index_add_time_entry(struct mqd_index *index, int64_t segment_base);
/* Writes the pending entries. Returns 0, or -1 with errno; after ENOSPC and EDQUOT the entries are
 * kept for a later flush (thinned out if there is no room for more). */
int mqd_index_flush(struct mqd_index *index, const char *directory, int64_t segment_base);
/* Adds the last entries (with the segment's largest timestamp), then flushes; the index stays
 * usable. */
int mqd_index_seal(struct mqd_index *index, const char *directory, int64_t segment_base);
/* Truncates both files to the sizes in `index`. */
int mqd_index_cut_files(struct mqd_index *index, const char *directory, int64_t segment_base);
/* fdatasync of both files, if they exist. */
int mqd_index_sync(const char *directory, int64_t segment_base);
void mqd_index_close_files(struct mqd_index *index);

/* Loads the trustworthy part of the index files of a segment whose log has log_bytes. Sets the
 * sizes and timestamps in *index. *last is the batch to continue the walk from: the caller adds it
 * and the later ones with mqd_index_add (position 0, offset 0: all batches). Ignores entries at or
 * after `offset_end`, the first entry that violates I1 with everything after it, and time entries
 * at or after *last, which the walk creates again. Does not change the files; see
 * mqd_index_cut_files.
 * intact: everything written to the files is in them (no power failure since, or they were
 * flushed). Otherwise the .timeindex may have lost more of its end than the .index; *last is then
 * the batch after which no timestamp is known. -1: disk failure. */
int mqd_index_load(struct mqd_index *index, const char *directory, int64_t segment_base, int64_t log_bytes,
                   int64_t offset_end, bool intact, struct mqd_index_entry *last);

/* Called after a load and the following walk: adds the last entries like mqd_index_seal, but writes
 * the files only if they differ. Returns 1 if they were changed, 0 if not, or -1 with errno. */
int mqd_index_finish_load(struct mqd_index *index, const char *directory, int64_t segment_base);

/* Lookups in the files only: the last entry with offset <= `offset`; the last with timestamp <=
 * `timestamp_ms`. Return 1 if there is one, 0 if there is none, -1 on disk failure. */
int mqd_index_lookup(const char *directory, int64_t segment_base, int64_t offset, struct mqd_index_entry *out);
int mqd_time_index_lookup(const char *directory, int64_t segment_base, int64_t timestamp_ms,
                          struct mqd_time_index_entry *out);

#endif
