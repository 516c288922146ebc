/* Internal to the producer's files: batches, partitions, and the states of a batch. Public
 * interface: client/client.h.
 *
 *   OPEN -> QUEUED -> SENT -> done or FAILED
 *   FAILED -> QUEUED (retry) or dropped
 *
 *   P1  a partition's batches are in one list in the order of their records; only the last may be
 *       OPEN. They are sent in that order. No batch is sent while an earlier one is QUEUED or
 *       FAILED, or while the order of two SENT batches is reversed because the earlier one was sent
 *       again after the later one. So a batch that is sent again keeps its place.
 *   P2  a SENT batch's bytes are not changed, because the worker may be copying them. Its
 *       header is stamped before it becomes SENT.
 *   P3  an idempotent batch gets its sequence when it is sent for the first time under an identity,
 *       and keeps it. So dropping a batch that was never sent leaves no gap. A batch that is sent
 *       again is sent alone: no other batch of its partition is in flight. The first batch of an
 *       identity is sent alone too: a leader takes any sequence from a producer that it does not
 *       know, so if the first batch is refused and the next one is not, the first is out of order
 *       forever. (A transaction is aborted then.)
 *   P4  a response for a SENT batch that is not the first of its list means that an earlier one has
 *       failed. If the producer is idempotent, an error of this batch is a consequence, or will
 *       occur again: the batch goes back to QUEUED unreported.
 *   P5  a batch's memory is one run (client/memory.h): room for the frame's head, batch header,
 *       records, three closing bytes. The head's length is known only when the batch is closed,
 *       because the head ends with the batch's size as a varint. The head is then written directly
 *       before the batch.
 *   P6  an idempotent batch that may be in the log keeps its identity and sequence until a broker
 *       has reported its outcome: with a new identity or sequence, no broker could recognize the
 *       batch, and it would be written twice. So the identity changes only when there is no such
 *       batch. A producer with a transactional id drops such batches with their transaction.
 *
 * Bounds: `batches` has as many entries as there are chunks. A finished batch keeps its entry until
 * mqd_producer_deliveries has returned its outcome: a caller that never calls it fills the table
 * and must wait.
 */
#ifndef MQD_CLIENT_PRODUCER_H
#define MQD_CLIENT_PRODUCER_H

#include "base/list.h"
#include "client/internal.h"
#include "client/memory.h"

#define MQD_PRODUCER_BATCH_BITS 20    /* a batch's number is serial << 20 | index in the table */
#define MQD_PRODUCER_HEAD_BYTES_MAX 9 /* after the topic's prefix: partition index, varint */
#define MQD_PRODUCER_TAIL_BYTES 3     /* empty tagged fields: partition, topic, request */
#define MQD_RECORD_HEADERS_NONE 1

enum mqd_batch_state {
    MQD_BATCH_FREE,
    MQD_BATCH_OPEN,
    MQD_BATCH_QUEUED,
    MQD_BATCH_SENT,
    MQD_BATCH_FAILED,
    MQD_BATCH_DONE
};

struct mqd_producer_batch {
    struct mqd_node node;         /* in its partition's `closed`; free list */
    struct mqd_node outcome_node; /* in the producer's `outcomes` */
    struct mqd_node open_node;    /* in the producer's `open` */
    struct mqd_producer_partition *partition;
    uint64_t number;
    uint64_t header_position; /* position of the batch's header in `data` */
    uint32_t first_chunk, chunk_count;
    uint32_t size_bytes;  /* of the batch's header and records */
    uint32_t limit_bytes; /* limit of size_bytes */
    int32_t record_count;
    uint16_t attributes;
    uint64_t sent_serial; /* order of sending */
    uint8_t state;
    bool resent;    /* was sent before under this identity */
    bool abandoned; /* SENT, but its caller has dropped it */
    /* sent, and no response has reported yet whether it is in the log: P6 */
    bool maybe_written;
    int64_t base_timestamp_ms, max_timestamp_ms;
    int64_t opened_us;
    int32_t base_sequence;      /* as stamped */
    uint32_t stamped_identity;  /* 0 = not stamped */
    uint32_t sequence_identity; /* the identity under which its sequence is fixed: P3 */
    int16_t error;
    int64_t base_offset, log_append_time_ms;
};

struct mqd_producer_partition {
    struct mqd_producer_topic *topic;
    int32_t index;
    uint32_t inflight;
    uint32_t batch_count; /* open and closed */
    struct mqd_producer_batch *open;
    struct mqd_node closed;          /* QUEUED, SENT, FAILED */
    struct mqd_producer_batch *next; /* the first that is not SENT; NULL also while it must wait (P1) */
    bool reordered;                  /* a SENT batch follows one that is not SENT, or that was sent later */
    struct mqd_node ready;           /* in the producer's `ready` when a batch may be sent */
    uint32_t acknowledged_identity;  /* a batch of this identity is in the log: the leader knows the producer */
    int32_t next_sequence;           /* of the next batch that is sent for the first time */
    int32_t planned_sequence;        /* of the next batch to be closed, if all earlier ones are sent */
};

struct mqd_producer_topic {
    int32_t number;
    int32_t partition_count;
    uint32_t partitioner;
    /* the partition for records without a key, until its open batch is closed; -1 = none yet */
    int32_t sticky_partition;
    struct mqd_producer_partition **partitions;
    uint8_t *prefix; /* the request from the api key up to the partition count */
    uint32_t prefix_bytes;
    int16_t name_bytes;
    char name[MQD_TOPIC_NAME_BYTES_MAX + 1];
};

struct mqd_producer {
    struct mqd_client *client; /* NULL: its attachment was closed */
    struct mqd_producer_options options;
    char *transactional_id;
    uint32_t serial;   /* number of the producer on this attachment, part of correlation ids */
    uint32_t identity; /* incremented by mqd_producer_set_identity; from 1 */
    uint64_t base;     /* where the producer's part of `data` begins */
    struct mqd_client_memory memory;
    uint64_t used_bytes, used_bytes_max; /* in whole chunks */
    uint64_t outstanding_records;
    uint64_t random_state;
    uint64_t batch_serial, sent_serial;
    struct mqd_producer_batch *batches;
    uint32_t batch_count; /* entries of `batches` */
    uint32_t used_count;  /* entries that have ever been used; those beyond are untouched memory */
    uint32_t sent_count;
    uint32_t active_count;           /* partitions that have batches */
    uint32_t open_count, live_count; /* batches that are OPEN; batches that have memory */
    struct mqd_node free, open, ready, outcomes;
    struct mqd_producer_topic **topics;
    int32_t topic_count, topic_capacity;
};

/* client/producer.c */
/* sends the partition's batches that may be sent; returns false if the submission ring is full */
bool mqd_producer_partition_send(struct mqd_producer *producer, struct mqd_producer_partition *partition);
/* frees the batch's memory and, unless its outcome has yet to be reported, its entry */
void mqd_producer_batch_free(struct mqd_producer *producer, struct mqd_producer_batch *batch);
/* writes the frame's head (P5) and the closing bytes */
void mqd_producer_batch_put_head(struct mqd_producer *producer, struct mqd_producer_batch *batch);

/* queues a closed batch after the others of its partition */
void mqd_producer_batch_queue(struct mqd_producer *producer, struct mqd_producer_batch *batch);

/* client/append.c */
void mqd_producer_batch_close(struct mqd_producer *producer, struct mqd_producer_batch *batch);
void mqd_producer_close_all(struct mqd_producer *producer, int64_t opened_before_us);

static inline uint8_t *mqd_producer_data(const struct mqd_producer *producer)
{
    return producer->client->data;
}

/* Sequences wrap to 0 after INT32_MAX. */
static inline int32_t mqd_sequence_after(int32_t sequence, int32_t record_count)
{
    return (int32_t)(((uint32_t)sequence + (uint32_t)record_count) & INT32_MAX);
}

#endif
