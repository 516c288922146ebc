/* Readers of a local client: one partition's records, straight from mapped segment files. They stand on the attachment (mqd_client.h), whose rules about errors, threads
 * and fork are theirs too.
 */
#ifndef MQD_CLIENT_READER_H
#define MQD_CLIENT_READER_H
/* MQD_CDEF_OFF */
#include <stddef.h>
#include <stdint.h>

#include "mqd_client.h"
/* MQD_CDEF_ON */

struct mqd_segment_reader; /* one partition, from an offset on, straight from mapped segment files */
struct mqd_segment_reader *mqd_segment_reader_open(struct mqd_client *client, const uint8_t topic_id[16], int32_t partition_index, int64_t offset, int8_t isolation_level);
void mqd_segment_reader_close(struct mqd_segment_reader *reader);
int64_t mqd_segment_reader_position(const struct mqd_segment_reader *reader); /* the next offset */
/* The aborted transactions below `until_offset` that overlap what comes: (producer id, first offset), by first offset. For read_committed. */
int mqd_segment_reader_set_aborted(struct mqd_segment_reader *reader, const int64_t *producer_ids, const int64_t *first_offsets, uint32_t count, int64_t until_offset);

struct mqd_record_view { /* columns over records; arrays of `capacity`, the caller's */
    uint32_t capacity, count;
    const uint8_t *base;      /* key and value positions are bytes from here: the mapping of the segment */
    uint64_t base_bytes;
    int64_t *offsets;
    int64_t *timestamps_ms;
    uint64_t *key_positions;
    int32_t *key_bytes;       /* -1 = null */
    uint64_t *value_positions;
    int32_t *value_bytes;
    uint64_t *header_positions; /* of the header section: count varint first */
    int32_t *header_bytes;
    int32_t leader_epoch;
    int8_t timestamp_type;
};
enum mqd_read_stop {
    MQD_READ_END,        /* nothing more below the high watermark (last stable offset) for now */
    MQD_READ_FULL,       /* capacity or bytes_max is */
    MQD_READ_SEGMENT,    /* the next records are in another mapping: take these first, then call again */
    MQD_READ_COMPRESSED, /* the next batch is compressed: compressed_position, compressed_bytes, codec; mqd_segment_reader_skip after it was dealt with */
    MQD_READ_ABORTED,    /* a transactional batch beyond what mqd_segment_reader_set_aborted knows: ask, then call again */
    MQD_READ_OUT_OF_RANGE, MQD_READ_CORRUPT, MQD_READ_GONE
};
struct mqd_read_state { uint32_t stop; uint32_t codec; uint64_t compressed_position; uint32_t compressed_bytes; int32_t kafka_error; };
/* Fills `out` with the next records, one mapping a call, in order. check_crc: batches are verified (once each). Returns 0, or -1 (EPIPE...). */
int mqd_segment_reader_next(struct mqd_segment_reader *reader, uint32_t bytes_max, int check_crc, struct mqd_record_view *out, struct mqd_read_state *state);
int mqd_segment_reader_skip(struct mqd_segment_reader *reader); /* the compressed batch at the position */
/* Records of a decompressed batch: `header` is its 61 bytes, `records` what was decompressed; records below the reader's position are left out. */
int mqd_segment_records(const uint8_t *header, const uint8_t *records, uint64_t records_bytes, int64_t from_offset, struct mqd_record_view *out);
int64_t mqd_segment_reader_lag_end(struct mqd_segment_reader *reader); /* high watermark, or last stable offset for read_committed; free */
int64_t mqd_segment_reader_log_start(struct mqd_segment_reader *reader);
/* Mappings stay until nobody holds them: a view's `base` is good between hold and release. */
uint64_t mqd_segment_reader_hold(struct mqd_segment_reader *reader);
void mqd_client_mapping_release(struct mqd_client *client, uint64_t mapping);

#endif
