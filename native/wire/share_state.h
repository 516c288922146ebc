/* Requests of a share-partition's owner to its share coordinator, encoded as Kafka request bodies
 * without headers: ReadShareGroupState (84) version 0, WriteShareGroupState (85) version 1. Each
 * names one group, topic and partition.
 *
 *   READ    group_id | topics[ topic_id | partitions[ index | leader_epoch | mqd's own tag 9100:
 *             epochs[ epoch | start ] ] ]
 *   WRITE   group_id | topics[ topic_id | partitions[ index | state_epoch | leader_epoch | start |
 *             complete_count | runs[ first | last | state | count ] ] ]
 *   response results[ topic_id | partitions[ index | error | message |
 *             (READ: state_epoch | start | runs[ first | last | state | count ]) ] ]
 *
 * A response that names another share-partition, is truncated, or is followed by more bytes is
 * refused. Concurrency: there is no shared state.
 */
#ifndef MQD_SHARE_STATE_WIRE_H
#define MQD_SHARE_STATE_WIRE_H

#include "wire/wire.h"

#define MQD_SHARE_READ 84
#define MQD_SHARE_WRITE 85

struct mqd_share_partition_id {
    struct mqd_text group_id;
    uint8_t topic_id[16];
    int32_t partition_index;
};
struct mqd_share_state_run {
    int64_t first, last;
    int16_t state, count;
};

/* The start of a leader epoch in the log. In a READ the epochs ascend; the last entry has
 * MQD_SHARE_EPOCH_LOG_END, and the log's end as its start. */
struct mqd_share_epoch {
    int32_t epoch;
    int64_t start;
};
#define MQD_SHARE_EPOCH_LOG_END INT32_MAX
#define MQD_SHARE_EPOCHS_TAG 9100

/* Appends a READ request. Without epochs the state is not compared with the log. */
void mqd_share_encode_read(struct mqd_buffer *buffer, const struct mqd_share_partition_id *id, int32_t leader_epoch,
                           const struct mqd_share_epoch *epochs, uint32_t epoch_count);

struct mqd_share_write {
    int32_t state_epoch, leader_epoch;
    int64_t start;
    int32_t complete_count; /* finished offsets at or above the start (KIP-1226) */
    uint32_t run_count;
};
/* Appends a WRITE request: _begin, then _run for each run, then _end. */
void mqd_share_write_begin(struct mqd_buffer *buffer, const struct mqd_share_partition_id *id,
                           const struct mqd_share_write *write);
void mqd_share_write_run(struct mqd_buffer *buffer, const struct mqd_share_state_run *run);
void mqd_share_write_end(struct mqd_buffer *buffer);

struct mqd_share_response {
    struct mqd_byte_cursor cursor;
    int16_t error;
    int32_t state_epoch; /* READ only, like start and the runs */
    int64_t start;
    int32_t run_count; /* runs that mqd_share_response_run has not taken yet */
};
/* -1: the body or one of its runs is malformed, or it names another share-partition. */
int mqd_share_response_parse(const uint8_t *body, uint32_t size_bytes, int api_key,
                             const struct mqd_share_partition_id *id, struct mqd_share_response *out);
int mqd_share_response_run(struct mqd_share_response *response, struct mqd_share_state_run *out);

#endif
