/* The client of the shared-memory fast path: for C programs, and for Python through cffi.
 * Independent: it needs no broker code except the shared layout.
 *
 * An attachment (struct mqd_client) carries Kafka requests through shared memory. It is used by a
 * producer, which builds record batches in place, and by readers, which walk segment files that the
 * broker has opened for the client (client/reader.h).
 *
 * Errors as in native.h: -1 or NULL, mqd_error_message(), mqd_error_code(). EPIPE: the worker or
 * the broker has exited; close and attach again. Concurrency: one thread at a time per attachment
 * and everything on it, except mqd_client_wait and mqd_client_wake, which any thread may call at
 * any time. Fork: a child must make its own attachment. mqd_client_open records the pid, and every
 * call in a child fails with MQD_E_INVALID.
 */
#ifndef MQD_CLIENT_H
#define MQD_CLIENT_H
/* MQD_CDEF_OFF */
#include <stddef.h>
#include <stdint.h>

#include "native.h"
/* MQD_CDEF_ON */

/* ---- the attachment ---- */

struct mqd_client_options {
    const char *socket_path;
    const char *client_id;
    /* the name of a server (mqd/shm/rendezvous.py); a broker that does not serve it refuses the
     * client. NULL or "" = any broker */
    const char *server;
    uint64_t data_bytes;       /* memory for requests, 64 KiB .. 1 GiB; 0 = 16 MiB */
    uint32_t reply_bytes;      /* 0 = 256 KiB */
    uint32_t submission_count; /* 0 = 4096 */
    uint32_t timeout_ms;       /* limit for attaching */
    uint32_t spin_us;          /* how long a wait spins before it sleeps */
    /* part of data_bytes for the frames of mqd_client_submit; the rest is the producer's; 0 = an
     * eighth, from 16 KiB to 8 MiB */
    uint64_t request_bytes;
};
struct mqd_client;
struct mqd_client *mqd_client_open(const struct mqd_client_options *options);
void mqd_client_close(struct mqd_client *client);            /* not while a thread waits: mqd_client_wake first */
uint32_t mqd_client_worker(const struct mqd_client *client); /* index of the worker at the other end */
void *mqd_client_control(struct mqd_client *client);         /* the control segment, read-only: for mqd_slot_view */
/* Copies a complete request frame (from the api key on, without the length prefix) and submits it.
 * Correlation ids below 2^30 are the caller's; the producer uses the others. -1: MQD_E_FULL (wait,
 * then retry), EPIPE. */
int mqd_client_submit(struct mqd_client *client, const uint8_t *frame, uint32_t size_bytes);
/* makes submitted requests visible to the worker and wakes it if it sleeps */
void mqd_client_flush(struct mqd_client *client);
/* Handles replies that have arrived, including responses to the producer's requests. Returns 0, or
 * -1: EPIPE, or MQD_E_CORRUPT (the broker broke the protocol). */
int mqd_client_poll(struct mqd_client *client);
/* The next response to a request of mqd_client_submit, from the correlation id on; valid until the
 * next call of this function or mqd_client_poll. 0 = none. */
uint32_t mqd_client_response(struct mqd_client *client, const uint8_t **bytes);
/* Waits until something arrives, there is room again after MQD_E_FULL, the timeout expires (-1 =
 * none), or mqd_client_wake is called. 1 = call mqd_client_poll (until then the next wait returns
 * immediately), 0 = timeout, -1 EPIPE. The wait also ends when another thread's mqd_client_poll
 * takes what has arrived, but not if that was taken before the wait began. */
int mqd_client_wait(struct mqd_client *client, int64_t timeout_us);
void mqd_client_wake(struct mqd_client *client);
/* free bytes of the producer's memory; without a producer, of the memory for requests */
uint64_t mqd_client_available_bytes(const struct mqd_client *client);

/* ---- requests that most programs need ---- */

struct mqd_client_topic {
    uint8_t topic_id[16];
    int32_t partition_count;
    int32_t error; /* Kafka's error code: 0, 3 no such topic, 5 being created (retry)... */
};
/* Looks up a topic and waits for the response; other responses stay queued. Returns 0: check
 * out->error, or -1: ETIMEDOUT, EPIPE... The caller chooses the correlation id, as for the calls
 * below. */
int mqd_client_find_topic(struct mqd_client *client, const char *name, uint32_t correlation_id, int64_t timeout_us,
                          struct mqd_client_topic *out);

struct mqd_client_position {
    uint8_t topic_id[16];
    int32_t partition_index;
    int32_t reserved;
    int64_t offset; /* of the next record */
};
/* Requests a notification when any of the partitions has a record at its offset. The response
 * arrives then, or after wait_ms, or immediately if a partition has an error, which its reader
 * reports. The response contains nothing else and need not be parsed; mqd_client_wait sleeps until
 * it arrives. Until then, responses to later requests on this attachment queue behind it, as on
 * every Kafka connection: a program that also produces should attach twice. */
int mqd_client_park(struct mqd_client *client, const struct mqd_client_position *positions, uint32_t count,
                    int8_t isolation_level, int32_t wait_ms, uint32_t correlation_id);

/* ---- the producer ---- */

struct mqd_producer_options {
    int16_t acks; /* -1, 0, 1 */
    int16_t producer_epoch;
    int32_t request_timeout_ms;   /* the broker's timeout for acks=-1 */
    int64_t producer_id;          /* -1 = not idempotent */
    const char *transactional_id; /* NULL = none */
    uint32_t batch_bytes;         /* a batch is closed when the next record would exceed this */
    uint32_t batch_records_max;   /* 0 = 10000 */
    uint32_t inflight_max;        /* unanswered batches per partition; at most 5 when idempotent */
    int64_t linger_us;
    /* bound on open and unanswered batches, at most what the attachment's memory holds; 0 = no
     * separate bound */
    uint64_t buffer_bytes_max;
    int16_t produce_version; /* 9 to 12; 12: transactions v2 */
    int16_t reserved;
};
/* named as in librdkafka */
enum mqd_partitioner {
    MQD_PARTITIONER_RANDOM,
    MQD_PARTITIONER_CONSISTENT,
    MQD_PARTITIONER_CONSISTENT_RANDOM,
    MQD_PARTITIONER_MURMUR2,
    MQD_PARTITIONER_MURMUR2_RANDOM,
    MQD_PARTITIONER_FNV1A,
    MQD_PARTITIONER_FNV1A_RANDOM
};
/* key_bytes -1 = no key */
int32_t mqd_partition_for(uint32_t partitioner, const uint8_t *key, int32_t key_bytes, int32_t partition_count,
                          uint64_t *random_state);
/* The same for a column of keys, stored consecutively (key_bytes NULL: no record has one): fills in
 * the negative entries of `partitions`. keyless_partition: for records without a key. -1
 * MQD_E_INVALID: a partitioner other than MURMUR2_RANDOM and FNV1A_RANDOM, or a wrong size or
 * count. */
int mqd_partitions_for(uint32_t partitioner, const uint8_t *keys, const int32_t *key_bytes, uint32_t count,
                       int32_t partition_count, int32_t keyless_partition, int32_t *partitions);

struct mqd_producer;
/* Only one producer at a time per attachment. MQD_E_FULL: batches of an earlier producer are still
 * being read; wait, then retry. */
struct mqd_producer *mqd_producer_open(struct mqd_client *client, const struct mqd_producer_options *options);
void mqd_producer_close(struct mqd_producer *producer); /* open and unanswered batches are dropped */
/* Returns the topic's number. The first call for a topic assigns the next number, starting at 0; a
 * repeated call can only raise the partition count. */
int32_t mqd_producer_topic(struct mqd_producer *producer, const char *name, int32_t partition_count,
                           uint32_t partitioner);

/* `count` records. A NULL array means that all records have the value that its comment states. */
struct mqd_record_columns {
    uint32_t count;
    const uint8_t *values;      /* stored consecutively */
    const int32_t *value_bytes; /* of each value, -1 = null; NULL: all have fixed_value_bytes */
    int32_t fixed_value_bytes;
    const uint8_t *keys;
    const int32_t *key_bytes;    /* -1 = null; NULL: no record has a key */
    const uint8_t *headers;      /* encoded as in a record, including the count varint; stored consecutively */
    const int32_t *header_bytes; /* NULL: no record has headers */
    const int32_t *partitions;   /* -1 = use the partitioner; NULL: `partition` for all */
    int32_t partition;
    const int64_t *timestamps_ms; /* NULL: timestamp_ms for all */
    int64_t timestamp_ms;
};
/* Appends records in order. Returns how many were taken: fewer than `count` when the buffer is full
 * (no record is taken partially) or at a record that is too large (MQD_E_INVALID when it is the
 * first). batch_numbers (NULL, or room for `count`) receives the number of each record's batch. -1:
 * error. */
int64_t mqd_producer_append(struct mqd_producer *producer, int32_t topic, const struct mqd_record_columns *records,
                            uint64_t *batch_numbers);
/* Appends one record: value_bytes and key_bytes -1 = null, header_bytes 0 = no headers, partition
 * -1 = use the partitioner. Returns the number of its batch (above 0), 0 if the buffer is full, -1
 * on error. */
int64_t mqd_producer_put(struct mqd_producer *producer, int32_t topic, int32_t partition, const uint8_t *value,
                         int32_t value_bytes, const uint8_t *key, int32_t key_bytes, const uint8_t *headers,
                         int32_t header_bytes, int64_t timestamp_ms);
/* Encodes the first records as an uncompressed batch in the caller's memory: as many as fit, but at
 * most records_max (0 = no limit). The caller compresses the batch and passes it to
 * mqd_producer_append_batch. `partition` and `partitions` are ignored. Returns the batch's size in
 * bytes, 0 when not even one record fits; *taken: the number of records in it. -1: error. */
int64_t mqd_records_encode(const struct mqd_record_columns *records, uint32_t records_max, uint8_t *out,
                           uint64_t out_bytes, uint32_t *taken);
/* Appends a batch whose records are already encoded and perhaps compressed (61-byte header,
 * complete except for sequence, producer and CRC). */
int mqd_producer_append_batch(struct mqd_producer *producer, int32_t topic, int32_t partition, const uint8_t *batch,
                              uint32_t size_bytes, uint64_t *number);
/* Closes the batches whose linger time has passed (or all), and sends as many as inflight_max
 * allows; mqd_client_poll sends the rest later. now_us: CLOCK_MONOTONIC. */
int mqd_producer_send(struct mqd_producer *producer, int64_t now_us, int everything);
/* when the next linger time ends; INT64_MAX = no batch is open */
int64_t mqd_producer_next_send_us(const struct mqd_producer *producer);

/* the outcome of a batch */
struct mqd_delivery {
    uint64_t batch;
    int32_t topic, partition;
    int64_t base_offset;  /* -1 = unknown (acks=0, duplicate of unknown offset) */
    int64_t timestamp_ms; /* log append time, or -1 */
    uint32_t record_count;
    int16_t error; /* Kafka's error code; 0 = written */
    int16_t reserved;
};
/* Stores the next outcomes in `out`, oldest first, and returns how many. A batch with an error
 * stays with the producer until mqd_producer_retry or mqd_producer_drop is called with its number;
 * meanwhile no later batch of its partition is sent. An idempotent producer reports only the first
 * error of a partition: later batches that failed are resent once the first has been retried. Error
 * 46, the broker already has the batch, counts as success. */
uint32_t mqd_producer_deliveries(struct mqd_producer *producer, struct mqd_delivery *out, uint32_t capacity);
/* Sends the batch again, in its original order before all later batches of its partition; later
 * batches that failed because of it follow automatically. */
int mqd_producer_retry(struct mqd_producer *producer, uint64_t batch);
/* Drops a batch that is open, waiting, failed or sent (a sent one may still be written; its outcome
 * is not reported). If a sent batch is dropped from an idempotent producer, its sequences are
 * missing: the broker answers the next batches with error 45 until the identity is changed. */
int mqd_producer_drop(struct mqd_producer *producer, uint64_t batch);
/* Moves all batches to another attachment (after the worker has died): they are copied in order,
 * and unanswered ones are sent again. The old client is closed. -1: nothing was changed;
 * MQD_E_FULL: the new attachment has less memory than the batches need. */
int mqd_producer_move(struct mqd_producer *producer, struct mqd_client *to);
/* Allowed only when every sent batch has been answered and no waiting or failed batch may already
 * be in the log. Sequences restart at 0, including for waiting batches. */
int mqd_producer_set_identity(struct mqd_producer *producer, int64_t producer_id, int16_t producer_epoch);
uint64_t mqd_producer_outstanding_records(const struct mqd_producer *producer);
uint64_t mqd_producer_outstanding_bytes(const struct mqd_producer *producer);

#endif
