/* Readers of a local client: one partition's records, directly from mapped segment files. They use
 * the attachment (client/client.h), whose rules about errors and fork apply.
 *
 * A reader follows its partition without requests: the control segment states how far it may read.
 * It sends a query on the attachment's socket only to find a segment, once per segment.
 *
 * Lifetime: keys, values and headers are not copied; a view's positions count from `base`, the
 * mapping of a segment file. The mapping is valid until the reader's next call of
 * mqd_segment_reader_next, or, after mqd_segment_reader_hold, until mqd_client_mapping_release. It
 * stays valid if the segment is deleted or compacted, or if the reader, the client or the broker
 * ends. Concurrency: one thread at a time per reader. Readers may run in parallel with
 * each other and with everything else on their client; mqd_client_close waits for running calls,
 * and later ones fail with EPIPE (mqd_segment_reader_move gives the reader another client). A
 * mapping may be released on any thread.
 */
#ifndef MQD_CLIENT_READER_H
#define MQD_CLIENT_READER_H
/* MQD_CDEF_OFF */
#include <stddef.h>
#include <stdint.h>

#include "client/client.h"
/* MQD_CDEF_ON */

struct mqd_segment_reader; /* reads one partition, starting at an offset */
struct mqd_segment_reader *mqd_segment_reader_open(struct mqd_client *client, const uint8_t topic_id[16],
                                                   int32_t partition_index, int64_t offset, int8_t isolation_level);
/* Reads a single segment file, without a broker, to its end. */
struct mqd_segment_reader *mqd_segment_reader_open_file(const char *path, int64_t base_offset, int64_t offset,
                                                        int8_t isolation_level);
/* Moves the reader to another attachment, when its own has ended: its position and held views are
 * kept. */
int mqd_segment_reader_move(struct mqd_segment_reader *reader, struct mqd_client *to);
/* The next record will be the one at `offset`; known aborted transactions are discarded. Takes
 * effect at the next read. */
void mqd_segment_reader_seek(struct mqd_segment_reader *reader, int64_t offset);
void mqd_segment_reader_close(struct mqd_segment_reader *reader);
int64_t mqd_segment_reader_position(const struct mqd_segment_reader *reader); /* the next offset */
/* For read_committed: sets the aborted transactions below `until_offset` that overlap the next
 * records, as (producer id, first offset). They replace those set before. After
 * MQD_READ_ABORTED, request them by a Fetch without records at the reader's position;
 * `until_offset` is the response's last_stable_offset. If the partition's files have changed since
 * MQD_READ_ABORTED, the list is not taken, and the next read returns MQD_READ_ABORTED again. */
int mqd_segment_reader_set_aborted(struct mqd_segment_reader *reader, const int64_t *producer_ids,
                                   const int64_t *first_offsets, uint32_t count, int64_t until_offset);

/* records as columns; arrays of `capacity`, owned by the caller */
struct mqd_record_view {
    uint32_t capacity, count;
    const uint8_t *base; /* key and value positions are bytes from here: the mapping of the segment */
    uint64_t base_bytes;
    int64_t *offsets;
    int64_t *timestamps_ms;
    uint64_t *key_positions;
    int32_t *key_bytes; /* -1 = null */
    uint64_t *value_positions;
    int32_t *value_bytes;
    uint64_t *header_positions; /* of the header section: count varint first */
    int32_t *header_bytes;
    int32_t leader_epoch;
    int8_t timestamp_type;
};
/* what follows the returned records */
enum mqd_read_stop {
    /* no more records for now below the high watermark (for read_committed, the last stable
     * offset); or the partition has no leader at present, which a Fetch reports */
    MQD_READ_END,
    MQD_READ_FULL, /* capacity or bytes_max is reached */
    /* the next records are in another mapping, or have another leader epoch or timestamp type:
     * handle these first, then call again */
    MQD_READ_SEGMENT,
    /* the next batch is compressed: compressed_position (of its header), compressed_bytes
     * (including it), codec; call mqd_segment_reader_skip after handling it */
    MQD_READ_COMPRESSED,
    /* the next batch is transactional and not below the `until_offset` of the last
     * mqd_segment_reader_set_aborted: set a newer list, then call again */
    MQD_READ_ABORTED,
    MQD_READ_OUT_OF_RANGE, /* the position is below the log start or beyond the log end: seek */
    /* kafka_error is 2, and mqd_error_message() describes the damage and its position;
     * mqd_segment_reader_skip skips the batch, if its header is valid */
    MQD_READ_CORRUPT,
    MQD_READ_GONE /* kafka_error: the broker's error for the partition (3, 56, 100...) */
};
struct mqd_read_state {
    uint32_t stop;
    uint32_t codec;
    uint64_t compressed_position;
    uint32_t compressed_bytes;
    int32_t kafka_error;
};
/* Fills `out` with the next records, from one mapping per call, in order. check_crc: batches are
 * verified (once each). bytes_max: no further batch is begun when that much of the segment has been
 * walked; at least one is begun. With a capacity of 0 it only reports what follows. Returns 0, or
 * -1 (EPIPE, ETIMEDOUT, EIO...), with nothing read. */
int mqd_segment_reader_next(struct mqd_segment_reader *reader, uint32_t bytes_max, int check_crc,
                            struct mqd_record_view *out, struct mqd_read_state *state);
/* skips the compressed or corrupt batch at the reader's position */
int mqd_segment_reader_skip(struct mqd_segment_reader *reader);
/* Parses the records of a decompressed batch: `header` is its header of 61 bytes, `records` the
 * decompressed bytes; records below from_offset are skipped. Takes no more than out->capacity: a
 * batch has no more records than its header states (bytes 57 to 60). -1: MQD_E_CORRUPT; the records
 * before the damage are in `out`. */
int mqd_segment_records(const uint8_t *header, const uint8_t *records, uint64_t records_bytes, int64_t from_offset,
                        struct mqd_record_view *out);
/* The offset from which the consumer's lag is computed: the high watermark, or for read_committed
 * the last stable offset. Sends no request. -1: not known (yet) */
int64_t mqd_segment_reader_lag_end(struct mqd_segment_reader *reader);
int64_t mqd_segment_reader_log_start(struct mqd_segment_reader *reader);
/* Takes another reference on the mapping of the last view. Returns the mapping's handle, or 0 if
 * the last call returned no view. On release `client` may be NULL, or already closed. */
uint64_t mqd_segment_reader_hold(struct mqd_segment_reader *reader);
void mqd_client_mapping_release(struct mqd_client *client, uint64_t mapping);

/* ---- conversion of columns ---- */

/* Positions count from base; sizes of -1 are nulls. Positions are not checked here: those of a view
 * were checked when it was filled. */

/* Copies the blobs consecutively into `out`. `offsets` (count + 1 entries; NULL = not wanted)
 * receives the start of each blob (for a null, the start of the next blob), then the total size.
 * Returns the total size in bytes, or -1 MQD_E_FULL if it is more than `capacity`, beyond which
 * nothing is written. */
int64_t mqd_columns_gather(const uint8_t *base, const uint64_t *positions, const int32_t *sizes, uint32_t count,
                           uint8_t *out, uint64_t capacity, int64_t *offsets);
/* Writes the blobs as Arrow's BinaryView: 16 bytes per blob into `views`, which refer to a buffer
 * number 0 that begins at base + origin. `validity` (NULL = not wanted) receives a bitmap, least
 * significant bit first. Returns the number of nulls, or -1 MQD_E_INVALID when a blob is not within
 * 2^31 bytes of the origin. */
int64_t mqd_columns_arrow(const uint8_t *base, uint64_t origin, const uint64_t *positions, const int32_t *sizes,
                          uint32_t count, uint8_t *views, uint8_t *validity);

#endif
