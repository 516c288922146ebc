/* Compaction of one partition's sealed segments: keeps the last value of each key. Runs off the
 * reactor, on files that no longer change.
 *
 *   map    the dirty range is read: each key's last offset goes into a bounded table. Records
 *          of aborted transactions are ignored: if there are transactions, the headers up to the
 *          high watermark are read once (scan) to find the markers
 *   copy   each group of neighbouring segments is rewritten to BASE.*.cleaned, without the records
 *          that the table shows to be outdated
 *   swap   log/compaction/swap.c: the new files replace the old ones
 *
 * What is kept
 *   K1  every record whose key has no later record in the key table; every batch that ends above
 *       `mapped_end`, byte for byte.
 *   K2  offsets: the base offset and last offset delta of a batch never change. Batches that lose
 *       no record are copied unchanged.
 *   K3  a tombstone, until a delete horizon that is set when a compaction first reads it: now +
 *       delete.retention.ms. By then all records that it deletes are gone.
 *   K4  a marker, while its transaction has batches here, then until its own delete horizon.
 *   K5  the last batch of each remembered producer, without records if all are removed, so that
 *       its sequence survives; and the last batch of the cleaned segments, so that the log's end
 *       can be determined from its files.
 *   K6  a batch that fails its CRC, or whose records cannot be read, is never copied:
 *       MQD_E_CORRUPT, and the files stay unchanged.
 *
 * Bounds: the key table; input and output buffers of MQD_COMPACT_IO_BYTES, or the largest batch; 24
 * bytes for each aborted transaction of the dirty range, and 48 for each producer. Concurrency: one
 * thread; compactions of different partitions may run in parallel.
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
#define MQD_COMPACT_SYNC_BYTES (32 << 20) /* written between two flushes, so that no flush takes long */

/* reads whole batches in order from neighbouring segments */
struct mqd_compact_input {
    const char *directory;
    const int64_t *bases;
    uint32_t number, end_number; /* the segment being read; the first segment not to read */
    uint32_t segment_count;
    int64_t end_position; /* where to stop in the last segment; -1 = at the end of its file */
    int fd;
    int64_t file_end, position, next_offset;
    uint8_t *buffer;
    int64_t capacity, buffer_position, buffer_bytes;
    int64_t read_bytes;
    bool reads_uncached; /* the kernel supports reads that leave no pages in the cache */
};

/* -1: mqd_error set. */
int mqd_compact_input_begin(struct mqd_compact_input *input, uint32_t number, uint32_t end_number);
/* Returns 1 and a batch with a valid header, 0 at the end, or -1 with mqd_error set. */
int mqd_compact_input_next(struct mqd_compact_input *input, struct mqd_batch *batch);
/* Returns all bytes of the batch that mqd_compact_input_next returned, with the CRC checked; valid
 * until the next call. NULL: mqd_error set. */
const uint8_t *mqd_compact_input_bytes(struct mqd_compact_input *input, const struct mqd_batch *batch);
int mqd_compact_report_corrupt(const struct mqd_compact_input *input, const struct mqd_batch *batch,
                               const char *reason);
void mqd_compact_input_end(struct mqd_compact_input *input);

struct mqd_compact_bytes {
    uint8_t *bytes;
    size_t size_bytes, capacity;
};
/* bytes NULL: only reserves room. -1: out of memory */
int mqd_compact_bytes_add(struct mqd_compact_bytes *target, const void *bytes, size_t size_bytes);
int mqd_compact_bytes_reserve(struct mqd_compact_bytes *target, size_t size_bytes);

/* BASE.log.cleaned and its indexes */
struct mqd_compact_output {
    const char *directory;
    int64_t base_offset;
    int fd;
    int64_t position, synced_position; /* end of the bytes written or buffered; end of the flushed bytes */
    int32_t index_interval_bytes;
    struct mqd_compact_bytes pending, index_bytes, time_index_bytes, transaction_bytes, transaction_checksums;
    struct mqd_index index;
};

int mqd_compact_output_begin(struct mqd_compact_output *output, int64_t base_offset);
/* `header` and `records` together are the bytes of one batch; either may be empty. */
int mqd_compact_output_add(struct mqd_compact_output *output, const struct mqd_batch *batch, const void *header,
                           uint32_t header_bytes, const void *records, uint32_t records_bytes);
/* Flushes the files, but not their directory entries. */
int mqd_compact_output_finish(struct mqd_compact_output *output);
/* Closes the files; deletes them with `discard`. */
void mqd_compact_output_end(struct mqd_compact_output *output, bool discard);

/* neighbouring records that are kept; `at`: position in the decompressed records */
struct mqd_compact_run {
    uint32_t at, size_bytes;
};

/* in last_batch: no data batch of this epoch is known */
#define MQD_COMPACT_ONLY_MARKERS(epoch) (-2 - (int64_t)(epoch))

enum mqd_compact_phase { MQD_PHASE_MAP, MQD_PHASE_SCAN, MQD_PHASE_MAPPED, MQD_PHASE_COPY, MQD_PHASE_COPIED };

struct mqd_compact {
    char *directory;
    int64_t *bases;
    struct mqd_compact_options options;
    enum mqd_compact_phase phase;
    /* the conversion (an enum mqd_compact_state) whose result is passed to the next
     * mqd_compact_resume; 0 = none */
    int pending_conversion;
    struct mqd_batch batch;   /* the current one */
    struct mqd_batch rebuilt; /* the rebuilt header of the current batch, while its records are compressed */
    const uint8_t *bytes;     /* of `batch` */
    struct mqd_compact_input input, scan_input;
    struct mqd_key_map map;
    uint32_t first_dirty_number;
    int64_t mapped_end;
    bool map_full;
    /* transactions */
    bool scanned;
    struct mqd_id_map ongoing;             /* scan: producer -> first offset */
    struct mqd_aborted_list aborted;       /* sorted by producer, then first offset */
    struct mqd_id_map producers_with_data; /* copy: data since their last marker */
    /* producer -> base offset of its last data batch, or MQD_COMPACT_ONLY_MARKERS; and that
     * batch's epoch */
    struct mqd_id_map last_batch, last_epoch;
    int64_t snapshot_end_offset; /* the snapshot covers batches below this offset; -1 = no snapshot */
    /* copy */
    struct mqd_compact_output output;
    uint32_t group_first, group_end, next_group_first;
    int64_t group_left_bytes; /* bytes of the source segments after the current batch */
    bool group_changed;
    struct mqd_compact_run *runs;
    size_t run_count, run_capacity;
    struct mqd_compact_bytes scratch;
    int64_t *dropped_markers; /* offsets of the markers removed from this group, ascending */
    size_t dropped_count, dropped_capacity;
    struct mqd_compact_figures figures;
};

bool mqd_compact_is_aborted(const struct mqd_compact *compact, const struct mqd_batch *batch);
/* Processes one batch. Returns 1 if there are more, 0 when done, -1 on error. */
int mqd_compact_scan_step(struct mqd_compact *compact);
int mqd_compact_scan_begin(struct mqd_compact *compact);
/* Processes one batch. Returns an enum mqd_compact_state, or -1 on error. */
int mqd_compact_copy_step(struct mqd_compact *compact);
/* after DECOMPRESS */
int mqd_compact_copy_records(struct mqd_compact *compact, const uint8_t *records, uint64_t size_bytes);
/* after COMPRESS */
int mqd_compact_copy_compressed(struct mqd_compact *compact, const uint8_t *records, uint64_t size_bytes);
/* Loads the newest batch of each producer from the snapshot at `offset`. An unreadable snapshot
 * is treated as none. -1: out of memory. */
int mqd_compact_load_producers(struct mqd_compact *compact, int64_t snapshot_offset);
/* Adds a batch that the snapshot does not cover to last_batch. -1: out of memory. */
int mqd_compact_note_producer(struct mqd_compact *compact, const struct mqd_batch *batch);
/* Builds the new segment's index of aborted transactions: the old segments' entries whose marker is
 * kept. */
int mqd_compact_build_transaction_index(struct mqd_compact *compact);

/* Completes or undoes what a crash interrupted: see log/compaction/swap.c. -1: mqd_error set. */
int mqd_compact_recover(const char *directory);
/* Whether this log was ever compacted: its offsets then have gaps, whatever its current policy. */
bool mqd_compact_has_gaps(const char *directory);
/* Records that the log was compacted; durable on return. -1: mqd_error set. */
int mqd_compact_note_gaps(const char *directory);

#endif
