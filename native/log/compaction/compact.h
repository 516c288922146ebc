/* Compaction of one partition's sealed segments: the last value of each key stays. Runs off the
 * reactor, on files that nobody changes any more.
 *
 *   map    the dirty range is read: each key's last offset goes into a bounded table. Where
 *          transactions are met, the headers up to the high watermark are read once (scan) for the
 *          markers: records of aborted transactions count for nothing
 *   copy   group after group of neighbouring segments is written anew to BASE.*.cleaned, without
 *          what the table says is outdated
 *   swap   log/compaction/swap.c: the new files take the place of the old ones
 *
 * What stays
 *   K1  every record whose key has no later one below `map_end`; above it everything, byte for
 *       byte.
 *   K2  offsets: base offset and last offset delta of a batch never change. Batches of which
 *       nothing is lost are copied as they are.
 *   K3  a tombstone stays until a delete horizon that is set when a compaction first meets it:
 *       now + delete.retention.ms. By then all that it deletes is gone.
 *   K4  a marker stays while its transaction has batches here, then until its own delete horizon.
 *   K5  the last batch of each producer that is remembered, without records if they all go, so that
 *       its sequence survives; the last batch of all, so that the log's end can be told from its
 *       files.
 *   K6  nothing is copied that fails its CRC, or whose records cannot be read: MQD_E_CORRUPT, and
 *       the files stay as they are.
 *
 * Bounds: the key table; input and output buffers of IO_BYTES, or the largest batch; 24 bytes for
 * each aborted transaction of the dirty range, each producer. Concurrency: one thread; several
 * compactions of different partitions may run at once.
 */
#ifndef MQD_COMPACT_H
#define MQD_COMPACT_H

#include "log/compaction/api.h"
#include "log/compaction/map.h"
#include "log/index.h"
#include "log/segment.h"
#include "log/txn_index.h"
#include "wire/record_scan.h"

#define MQD_COMPACT_IO_BYTES (1 << 20)
#define MQD_COMPACT_SYNC_BYTES (32 << 20) /* written between two flushes: none of them takes long */

/* whole batches, one after the other, of neighbouring segments */
struct mqd_compact_input {
    const char *directory;
    const int64_t *bases;
    uint32_t number, end_number; /* the segment that is read; the first that is not */
    uint32_t segment_count;
    int64_t end_position; /* in the last of all; -1 = its file's end */
    int fd;
    int64_t file_end, position, next_offset;
    uint8_t *buffer;
    int64_t capacity, buffer_position, buffer_bytes;
    int64_t read_bytes;
    bool uncached; /* the kernel can read without leaving pages in the cache */
};

/* -1: mqd_error. */
int mqd_compact_input_begin(struct mqd_compact_input *input, uint32_t number, uint32_t end_number);
/* 1: a batch whose header is sound; 0: no more; -1. */
int mqd_compact_input_next(struct mqd_compact_input *input, struct mqd_batch *batch);
/* All bytes of the batch that `next` gave, CRC checked; valid until the next call. NULL: mqd_error. */
const uint8_t *mqd_compact_input_bytes(struct mqd_compact_input *input, const struct mqd_batch *batch);
int mqd_compact_input_corrupt(const struct mqd_compact_input *input, const struct mqd_batch *batch, const char *reason);
void mqd_compact_input_end(struct mqd_compact_input *input);

struct mqd_compact_bytes {
    uint8_t *bytes;
    size_t size_bytes, capacity;
};
/* bytes NULL: room alone. -1: no memory */
int mqd_compact_bytes_add(struct mqd_compact_bytes *target, const void *bytes, size_t size_bytes);
int mqd_compact_bytes_room(struct mqd_compact_bytes *target, size_t size_bytes);

/* BASE.log.cleaned and its indexes */
struct mqd_compact_output {
    const char *directory;
    int64_t base_offset;
    int fd;
    int64_t position, synced; /* written or buffered so far; flushed so far */
    int32_t index_interval_bytes;
    struct mqd_compact_bytes pending, index_bytes, time_index_bytes, transaction_bytes, transaction_sums;
    struct mqd_index index;
};

int mqd_compact_output_begin(struct mqd_compact_output *output, int64_t base_offset);
/* header_bytes and records_bytes are one batch; either may be 0. */
int mqd_compact_output_add(struct mqd_compact_output *output, const struct mqd_batch *batch, const void *header,
                           uint32_t header_bytes, const void *records, uint32_t records_bytes);
/* Everything on disk, but for the names. */
int mqd_compact_output_finish(struct mqd_compact_output *output);
/* Closes; the files stay unless `discard`. */
void mqd_compact_output_end(struct mqd_compact_output *output, bool discard);

struct mqd_compact_run {
    uint32_t at, size_bytes;
};

enum mqd_compact_phase { MQD_PHASE_MAP, MQD_PHASE_SCAN, MQD_PHASE_MAPPED, MQD_PHASE_COPY, MQD_PHASE_COPIED };

struct mqd_compact {
    char *directory;
    int64_t *bases;
    struct mqd_compact_options options;
    enum mqd_compact_phase phase;
    int waiting;              /* enum mqd_compact_state that mqd_compact_give answers; 0 = none */
    struct mqd_batch batch;   /* the one in hand, and */
    struct mqd_batch rebuilt; /* ... its header as it will be, while it is compressed */
    const uint8_t *bytes;
    struct mqd_compact_input input, scan_input;
    struct mqd_key_map map;
    uint32_t first_dirty_number;
    int64_t mapped_end;
    bool map_full;
    /* transactions */
    bool scanned;
    struct mqd_id_map ongoing;       /* scan: producer -> first offset */
    struct mqd_aborted_list aborted; /* by producer, then first offset */
    struct mqd_id_map seen;          /* copy: producers with data since their last marker */
    /* producer -> base offset of its last batch; -2 - epoch: it is known by markers of that epoch
     * alone */
    struct mqd_id_map last_batch;
    int64_t producers_from; /* batches below are in the snapshot; -1 = there is none */
    /* copy */
    struct mqd_compact_output output;
    uint32_t group_first, group_end, group_expected;
    int64_t group_left_bytes; /* of the sources, behind the batch in hand */
    bool group_changed;
    struct mqd_compact_run *runs;
    size_t run_count, run_capacity;
    struct mqd_compact_bytes scratch;
    int64_t *dropped_markers; /* abort markers of this group that went, ascending */
    size_t dropped_count, dropped_capacity;
    struct mqd_compact_figures figures;
};

bool mqd_compact_is_aborted(const struct mqd_compact *compact, const struct mqd_batch *batch);
int mqd_compact_scan_step(struct mqd_compact *compact); /* one batch: 1 more, 0 done, -1 */
int mqd_compact_scan_begin(struct mqd_compact *compact);
int mqd_compact_copy_step(struct mqd_compact *compact); /* one batch: enum mqd_compact_state, or -1 */
/* after DECOMPRESS */
int mqd_compact_copy_records(struct mqd_compact *compact, const uint8_t *records, uint64_t size_bytes);
/* after COMPRESS */
int mqd_compact_copy_compressed(struct mqd_compact *compact, const uint8_t *records, uint64_t size_bytes);
/* The newest of producers that the snapshot at `offset` knows. A snapshot that cannot be read is
 * none. -1: no memory. */
int mqd_compact_load_producers(struct mqd_compact *compact, int64_t snapshot_offset);
/* Which of the segments' aborted transactions are still told of: those whose marker stays. */
int mqd_compact_transaction_index(struct mqd_compact *compact);

/* Finishes what a crash interrupted: see log/compaction/swap.c. -1: mqd_error. */
int mqd_compact_recover(const char *directory);
/* Was this log ever compacted? Then its offsets have gaps, whatever its policy is now. */
bool mqd_compact_has_gaps(const char *directory);
int mqd_compact_note_gaps(const char *directory); /* from now on it has; durable. -1: mqd_error set */

#endif
