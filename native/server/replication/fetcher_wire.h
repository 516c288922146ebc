/* Fetch v17 on the follower's side: encodes requests and parses responses as a stream. Pure: no
 * I/O, no state except the parser's; for server/replication/fetcher*.c, tests and the fuzzer.
 *
 *   request   header v2: 1, 17, correlation id, null client id, no tags | wait_ms_max | bytes_min |
 *             bytes_max | isolation_level 0 | session_id | session_epoch | topics[ topic_id |
 *             partitions[ index | current_leader_epoch | fetch_offset | last_fetched_epoch |
 *             log_start_offset | bytes_max ] ] | forgotten[ topic_id | partitions[] ] | rack_id
 *             "" | tags: 1 replica_state { replica_id, replica_epoch }
 *   response  as wire/fetch.c writes it
 *
 * The response is parsed while it arrives: records are returned as far as they have been received,
 * so that they are checked and written while they are in the cache, and no buffer has to hold a
 * whole response. Everything except records is small: a step that is incomplete after
 * MQD_PARSED_STEP_BYTES_MAX is refused.
 *
 * Invariants
 *   A1  nothing beyond the frame is read; counts and lengths are checked against the rest of the
 *       frame before use.
 *   A2  a step is returned completely or not at all: MORE consumes nothing of an incomplete step.
 */
#ifndef MQD_FETCHER_WIRE_H
#define MQD_FETCHER_WIRE_H

#include "wire/wire.h"

#define MQD_FETCHER_VERSION 17
#define MQD_PARSED_STEP_BYTES_MAX 16384

struct mqd_fetch_key {
    uint8_t topic_id[16];
    int32_t index;
};

/* the head of a request */
struct mqd_fetch_request_head {
    int32_t correlation_id, wait_ms, bytes_max, session_id, session_epoch;
    int32_t node_id;
    int64_t broker_epoch;
};
struct mqd_fetch_item {
    struct mqd_fetch_key key;
    int32_t current_leader_epoch, last_fetched_epoch, bytes_max;
    int64_t fetch_offset, log_start_offset;
};
/* Appends a complete frame with its length word to `out`. Adjacent items of one topic become one
 * entry. out->failed: out of memory. */
void mqd_fetch_request_encode(struct mqd_buffer *out, const struct mqd_fetch_request_head *head,
                              const struct mqd_fetch_item *items, uint32_t item_count,
                              const struct mqd_fetch_key *forgotten, uint32_t forgotten_count);

struct mqd_parsed_partition {
    struct mqd_fetch_key key;
    int16_t error;
    int64_t high_watermark, last_stable_offset, log_start_offset;
    uint32_t records_bytes;
    /* known at the end of the partition */
    int32_t diverging_epoch; /* -1 = none */
    int64_t diverging_end;
    int32_t leader_id, leader_epoch; /* -1 = not given */
};

enum mqd_parsed_step {
    MQD_PARSED_MORE,      /* the next step, after *taken bytes, is incomplete: call again with more bytes */
    MQD_PARSED_HEAD,      /* correlation_id, error, session_id, throttle_ms are known */
    MQD_PARSED_PARTITION, /* partition is known except for the fields after the records */
    MQD_PARSED_RECORDS,   /* the partition's records begin or continue here */
    MQD_PARSED_PARTITION_END,
    MQD_PARSED_END,    /* the frame ends after *taken bytes */
    MQD_PARSED_INVALID /* the reason is in mqd_error_message */
};
struct mqd_response_parser {
    uint8_t phase;
    uint32_t frame_left; /* bytes of the frame not consumed yet */
    uint32_t topics_left, partitions_left, records_left;
    int32_t correlation_id, throttle_ms, session_id;
    int16_t error;
    struct mqd_parsed_partition partition;
};
/* frame_bytes: from the length word, which does not count itself */
void mqd_response_parser_begin(struct mqd_response_parser *parser, uint32_t frame_bytes);
/* Parses the next step at `bytes` and consumes *taken of them. After RECORDS, the caller processes
 * up to min(available, parser->records_left) bytes after *taken and reports how many it consumed
 * with mqd_response_parser_records_taken. The next calls return RECORDS again until records_left
 * is 0. */
enum mqd_parsed_step mqd_response_parser_next(struct mqd_response_parser *parser, const uint8_t *bytes,
                                              uint32_t size_bytes, uint32_t *taken);
void mqd_response_parser_records_taken(struct mqd_response_parser *parser, uint32_t count);

#endif
