/* Kafka's hot requests as bytes: parses Produce, Fetch and ListOffsets in every version in
 * docs/protocol.md, and encodes their responses. No allocation, no copies: iterators over the
 * frame; encoders append to the caller's growing buffer.
 *
 * Every length is checked against the remaining bytes before use; unknown tagged fields are
 * skipped. Errors: -1, and mqd_error_message names the field and the position in the frame.
 * mqd_*_parse checks the whole body once: when it succeeds, the calls that iterate over the same
 * bytes cannot fail (unless a caller exceeds the counts), so a frame that is malformed only in its
 * last byte has no effect. Sources: the public protocol guide, KIP-482 (flexible versions), KIP-227
 * (fetch sessions), KIP-516 (topic ids), KIP-951 (leader hints).
 */
#ifndef MQD_WIRE_H
#define MQD_WIRE_H

#include "native.h"
#include "wire/aborted.h"

struct mqd_byte_cursor {
    const uint8_t *at;
    const uint8_t *end;
    const uint8_t *begin;
};

struct mqd_request_header {
    int16_t api_key;
    int16_t api_version;
    int32_t correlation_id;
    const uint8_t *client_id; /* NULL = null */
    int32_t client_id_bytes;
    uint32_t header_bytes; /* position of the body */
};
/* Decodes the header (v1 or v2 by api and version). An unknown api_key is not an error here:
 * *is_known is false, and only the first 8 bytes are decoded. */
int mqd_request_header_parse(const uint8_t *frame, uint32_t size_bytes, struct mqd_request_header *out, bool *is_known);
/* Whether this version is flexible: its request header has tags, and so has its response header,
 * except for ApiVersions. */
bool mqd_api_flexible(int16_t api_key, int16_t api_version);

struct mqd_text {
    const uint8_t *bytes;
    int32_t size_bytes;
}; /* size -1 = null */

struct mqd_topic_key {
    struct mqd_text name;
    uint8_t topic_id[16];
    bool by_id;
};

/* -- Produce 0..13; 0..2 contain message sets older than magic 2, parsed so that each partition can
 * be answered (43 UNSUPPORTED_FOR_MESSAGE_FORMAT) -- */
struct mqd_produce_request {
    struct mqd_byte_cursor cursor;
    int16_t version;
    struct mqd_text transactional_id;
    int16_t required_acks;
    int32_t timeout_ms;
    int32_t topic_count;
    uint32_t partition_count; /* of all topics */
    bool plain;               /* each partition's batch is of format 2, and not transactional */
    /* private: state of the iteration */
    int32_t topics_left;
    int32_t partitions_left;
};
struct mqd_produce_topic {
    struct mqd_topic_key key;
    int32_t partition_count;
};
struct mqd_produce_partition {
    int32_t partition_index;
    uint8_t *records;
    int32_t size_bytes; /* -1 = null */
};
/* Positions in a batch: the end of the length field (which counts the bytes after it) and of the
 * magic byte, in any format; the end of the attributes, in format 2. MQD_BATCH_LENGTH_MIN is the
 * minimum value of the length field in any format. */
enum { MQD_BATCH_LENGTH_END = 12, MQD_BATCH_LENGTH_MIN = 14, MQD_BATCH_MAGIC_END = 17, MQD_BATCH_ATTRIBUTES_END = 23 };
int mqd_produce_parse(const uint8_t *body, uint32_t size_bytes, int16_t version, struct mqd_produce_request *out);
/* call topic_count times */
int mqd_produce_next_topic(struct mqd_produce_request *request, struct mqd_produce_topic *out);
/* call partition_count times per topic */
int mqd_produce_next_partition(struct mqd_produce_request *request, struct mqd_produce_partition *out);
int mqd_produce_end(struct mqd_produce_request *request); /* reads the tags; bytes after them are ignored */

/* -- Fetch 4..18 -- */
struct mqd_fetch_request {
    struct mqd_byte_cursor cursor;
    int16_t version;
    int32_t replica_id;
    int64_t replica_epoch;
    int32_t wait_ms_max;
    int32_t bytes_min;
    int32_t bytes_max;
    int8_t isolation_level;
    int32_t session_id;
    int32_t session_epoch;
    int32_t topic_count;
    /* replica_id, replica_epoch and rack_id are known after mqd_fetch_parse */
    const uint8_t *rack_id;
    int32_t rack_id_bytes;
    /* private: state of the iteration */
    int32_t topics_left;
    int32_t partitions_left;
    bool forgotten_taken;
};
struct mqd_fetch_topic {
    struct mqd_topic_key key;
    int32_t partition_count;
};
struct mqd_fetch_partition {
    int32_t partition_index;
    int32_t current_leader_epoch;
    int64_t fetch_offset;
    int32_t last_fetched_epoch;
    int64_t log_start_offset;
    int32_t bytes_max;
    int64_t high_watermark;
};
int mqd_fetch_parse(const uint8_t *body, uint32_t size_bytes, int16_t version, struct mqd_fetch_request *out);
int mqd_fetch_next_topic(struct mqd_fetch_request *request, struct mqd_fetch_topic *out);
int mqd_fetch_next_partition(struct mqd_fetch_request *request, struct mqd_fetch_partition *out);
/* Called after all topics; sets *forgotten_count to the number of forgotten topics. Then call
 * _next_forgotten_topic and _next_forgotten_partition for each of them, then _end. */
int mqd_fetch_begin_forgotten(struct mqd_fetch_request *request, int32_t *forgotten_count);
int mqd_fetch_next_forgotten_topic(struct mqd_fetch_request *request, struct mqd_fetch_topic *out);
int mqd_fetch_next_forgotten_partition(struct mqd_fetch_request *request, int32_t *partition_index);
int mqd_fetch_end(struct mqd_fetch_request *request);

/* -- ListOffsets 1..11 -- */
struct mqd_list_offsets_request {
    struct mqd_byte_cursor cursor;
    int16_t version;
    int32_t replica_id;
    int8_t isolation_level;
    int32_t topic_count;
    int32_t timeout_ms; /* -1 before v10 */
    /* private: state of the iteration */
    int32_t topics_left;
    int32_t partitions_left;
};
struct mqd_list_offsets_topic {
    struct mqd_text name;
    int32_t partition_count;
};
struct mqd_list_offsets_partition {
    int32_t partition_index;
    int32_t current_leader_epoch;
    int64_t timestamp;
};
int mqd_list_offsets_parse(const uint8_t *body, uint32_t size_bytes, int16_t version,
                           struct mqd_list_offsets_request *out);
int mqd_list_offsets_next_topic(struct mqd_list_offsets_request *request, struct mqd_list_offsets_topic *out);
int mqd_list_offsets_next_partition(struct mqd_list_offsets_request *request, struct mqd_list_offsets_partition *out);
int mqd_list_offsets_end(struct mqd_list_offsets_request *request);

/* -- ShareFetch (78) and ShareAcknowledge (79), 1..2 -- */
/* ShareAcknowledge has no field between the epoch and is_renewal, and no forgotten topics. */
struct mqd_share_fetch_request {
    struct mqd_byte_cursor cursor;
    int16_t api_key;
    int16_t version;
    struct mqd_text group_id; /* size -1 = null */
    struct mqd_text member_id;
    int32_t session_epoch;
    int32_t wait_ms_max;
    int32_t bytes_min;
    int32_t bytes_max;
    int32_t records_max;
    int32_t batch_size;
    int8_t acquire_mode;
    bool is_renewal;
    int32_t topic_count;
    /* private: state of the iteration */
    int32_t topics_left;
    int32_t partitions_left;
    int32_t acknowledgements_left;
    bool forgotten_taken;
};
struct mqd_share_fetch_topic {
    uint8_t topic_id[16];
    int32_t partition_count;
};
struct mqd_share_fetch_partition {
    int32_t partition_index;
    int32_t acknowledgement_count;
};
/* The acknowledgement as the peer sent it: neither range nor types are checked here. */
struct mqd_share_fetch_acknowledgement {
    int64_t first;
    int64_t last;
    const uint8_t *types;
    uint32_t type_count;
};
int mqd_share_fetch_parse(const uint8_t *body, uint32_t size_bytes, int16_t api_key, int16_t version,
                          struct mqd_share_fetch_request *out);
/* also for forgotten topics, after mqd_share_fetch_begin_forgotten */
int mqd_share_fetch_next_topic(struct mqd_share_fetch_request *request, struct mqd_share_fetch_topic *out);
int mqd_share_fetch_next_partition(struct mqd_share_fetch_request *request, struct mqd_share_fetch_partition *out);
int mqd_share_fetch_next_acknowledgement(struct mqd_share_fetch_request *request,
                                         struct mqd_share_fetch_acknowledgement *out);
int mqd_share_fetch_begin_forgotten(struct mqd_share_fetch_request *request, int32_t *forgotten_count);
int mqd_share_fetch_next_forgotten_partition(struct mqd_share_fetch_request *request, int32_t *partition_index);
int mqd_share_fetch_end(struct mqd_share_fetch_request *request);

/* -- encoding -- a growing buffer; `failed` (out of memory) is sticky, checked once at the end */
struct mqd_buffer {
    uint8_t *bytes;
    uint32_t size_bytes;
    uint32_t capacity_bytes;
    bool failed;
    uint32_t response_at; /* where the current response begins */
};
void mqd_buffer_reserve(struct mqd_buffer *buffer, uint32_t more_bytes);
void mqd_buffer_free(struct mqd_buffer *buffer);

/* Response frame, appended to the buffer: length word (patched by mqd_response_finish), correlation
 * id, header tags. `extra_bytes` = record bytes that are sent from files between parts of the
 * buffer. */
void mqd_response_begin(struct mqd_buffer *buffer, int16_t api_key, int16_t version, int32_t correlation_id);
void mqd_response_finish(struct mqd_buffer *buffer, uint64_t extra_bytes);

/* Sent to a client with an error: the partition's leader and its address (KIP-951). */
struct mqd_current_leader {
    int32_t leader;
    int32_t leader_epoch;
};
struct mqd_node_endpoint {
    int32_t node_id;
    int32_t port;
    const char *host;
    const char *rack; /* NULL = none */
};

void mqd_produce_response_topics(struct mqd_buffer *buffer, int16_t version, int32_t topic_count);
void mqd_produce_response_topic(struct mqd_buffer *buffer, int16_t version, const struct mqd_topic_key *key,
                                int32_t partition_count);
struct mqd_produce_outcome {
    int32_t partition_index;
    int16_t error;
    int64_t base_offset;
    int64_t log_append_time_ms;
    int64_t log_start_offset;
    const char *message;
    /* v8+: indexes of the refused records in the batch; record_message is the text for each of them
     * (KIP-467) */
    const int32_t *record_errors;
    uint32_t record_error_count;
    const char *record_message;
    const struct mqd_current_leader *current_leader; /* v10+, NULL = none */
};
void mqd_produce_response_partition(struct mqd_buffer *buffer, int16_t version,
                                    const struct mqd_produce_outcome *outcome);
void mqd_produce_response_topic_end(struct mqd_buffer *buffer, int16_t version);
void mqd_produce_response_end(struct mqd_buffer *buffer, int16_t version, int32_t throttle_ms);
void mqd_produce_response_end_nodes(struct mqd_buffer *buffer, int16_t version, int32_t throttle_ms,
                                    const struct mqd_node_endpoint *nodes, uint32_t node_count);

void mqd_fetch_response_begin(struct mqd_buffer *buffer, int16_t version, int32_t throttle_ms, int16_t error,
                              int32_t session_id, int32_t topic_count);
void mqd_fetch_response_topic(struct mqd_buffer *buffer, int16_t version, const struct mqd_topic_key *key,
                              int32_t partition_count);
struct mqd_fetch_outcome {
    int32_t partition_index;
    int16_t error;
    int64_t high_watermark;
    int64_t last_stable_offset;
    int64_t log_start_offset;
    uint32_t records_bytes;
    bool read_committed; /* false: aborted_transactions are null */
    const struct mqd_aborted *aborted;
    uint32_t aborted_count;
    bool has_preferred;
    int32_t preferred_read_replica; /* v11+ (KIP-392) */
    bool has_diverging_epoch;
    int32_t diverging_epoch;
    int64_t diverging_end;                           /* v12+, to a follower (KIP-595) */
    const struct mqd_current_leader *current_leader; /* v12+, NULL = none */
};
/* Appends everything up to and including the length of the records. The caller sends the
 * records_bytes themselves from elsewhere, then calls _partition_end. */
void mqd_fetch_response_partition(struct mqd_buffer *buffer, int16_t version, const struct mqd_fetch_outcome *outcome);
void mqd_fetch_response_partition_end(struct mqd_buffer *buffer, int16_t version);
/* Called instead of _partition_end: appends the tagged fields from the outcome. */
void mqd_fetch_response_partition_tags(struct mqd_buffer *buffer, int16_t version,
                                       const struct mqd_fetch_outcome *outcome);
void mqd_fetch_response_topic_end(struct mqd_buffer *buffer, int16_t version);
void mqd_fetch_response_end(struct mqd_buffer *buffer, int16_t version);
void mqd_fetch_response_end_nodes(struct mqd_buffer *buffer, int16_t version, const struct mqd_node_endpoint *nodes,
                                  uint32_t node_count);

void mqd_share_fetch_response_begin(struct mqd_buffer *buffer, int16_t api_key, int16_t version, int32_t throttle_ms,
                                    int16_t error, const char *message, int32_t lock_ms, int32_t topic_count);
void mqd_share_fetch_response_topic(struct mqd_buffer *buffer, const uint8_t *topic_id, int32_t partition_count);
struct mqd_share_fetch_outcome {
    int32_t partition_index;
    int16_t error;
    int16_t acknowledge_error; /* ShareFetch only, like acknowledge_message and the records */
    const char *message;       /* NULL = none */
    const char *acknowledge_message;
    struct mqd_current_leader current_leader;
    uint32_t records_bytes;
};
/* ShareFetch: appends everything up to and including the length of the records. The caller sends
 * the records_bytes themselves from elsewhere, then calls _acquired, _run for each run, and
 * _partition_end. ShareAcknowledge: the caller then calls _partition_end. */
void mqd_share_fetch_response_partition(struct mqd_buffer *buffer, int16_t api_key,
                                        const struct mqd_share_fetch_outcome *outcome);
void mqd_share_fetch_response_acquired(struct mqd_buffer *buffer, int32_t run_count);
void mqd_share_fetch_response_run(struct mqd_buffer *buffer, int64_t first, int64_t last, int16_t delivery_count);
void mqd_share_fetch_response_partition_end(struct mqd_buffer *buffer);
void mqd_share_fetch_response_topic_end(struct mqd_buffer *buffer);
void mqd_share_fetch_response_end(struct mqd_buffer *buffer, const struct mqd_node_endpoint *nodes,
                                  uint32_t node_count);

void mqd_list_offsets_response_begin(struct mqd_buffer *buffer, int16_t version, int32_t throttle_ms,
                                     int32_t topic_count);
void mqd_list_offsets_response_topic(struct mqd_buffer *buffer, int16_t version, struct mqd_text name,
                                     int32_t partition_count);
void mqd_list_offsets_response_partition(struct mqd_buffer *buffer, int16_t version, int32_t partition_index,
                                         int16_t error, int64_t timestamp, int64_t offset, int32_t leader_epoch);
void mqd_list_offsets_response_topic_end(struct mqd_buffer *buffer, int16_t version);
void mqd_list_offsets_response_end(struct mqd_buffer *buffer, int16_t version);

#endif
