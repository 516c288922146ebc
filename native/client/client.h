/* The client of the shared-memory fast path: for C programs, and for Python through cffi. Stands
 * alone: it needs no broker code but the shared layout.
 *
 * An attachment (struct mqd_client) carries Kafka requests through shared memory. On it stand a
 * producer, which builds record batches in place, and readers, which walk segment files that the
 * broker has opened for us (client/reader.h).
 *
 * Errors as in native.h: -1 or NULL, mqd_error_message(), mqd_error_code(). EPIPE: the worker, or
 * the broker, has ended; close, attach again. Concurrency: one thread at a time per attachment and
 * everything on it, but mqd_client_wait and mqd_client_wake, which any thread may call at any time.
 * Fork: a child has nothing; it must attach by itself. mqd_client_open remembers the pid, every
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
    /* what the broker must say that it serves, or it refuses: a name of mqd/shm/rendezvous.py; NULL
     * or "" = any broker */
    const char *server;
    uint64_t data_bytes;       /* memory for requests, 64 KiB .. 1 GiB; 0 = 16 MiB */
    uint32_t reply_bytes;      /* 0 = 256 KiB */
    uint32_t submission_count; /* 0 = 4096 */
    uint32_t timeout_ms;       /* of attaching */
    uint32_t spin_us;          /* how long a wait spins before it sleeps */
    /* of data_bytes, for the frames of mqd_client_submit, the rest is the producer's; 0 = an
     * eighth, from 16 KiB to 8 MiB */
    uint64_t request_bytes;
};
struct mqd_client;
struct mqd_client *mqd_client_open(const struct mqd_client_options *options);
void mqd_client_close(struct mqd_client *client); /* not while a mqd_client_wait is under way: wake it first */
uint32_t mqd_client_worker(const struct mqd_client *client);
void *mqd_client_control(struct mqd_client *client); /* the control segment, read-only: for mqd_slot_view */
/* Copies a whole request frame (from the api key on, without length word) and submits it.
 * Correlation ids below 2^30 are the caller's; the producer uses the others. -1: MQD_E_FULL (wait,
 * then again), EPIPE. */
int mqd_client_submit(struct mqd_client *client, const uint8_t *frame, uint32_t size_bytes);
/* what was submitted becomes visible to the worker, which is woken if it sleeps */
void mqd_client_flush(struct mqd_client *client);
/* Takes in what has come; answers to the producer's requests are dealt with on the way. 0; -1 EPIPE
 * or MQD_E_CORRUPT (the broker broke the protocol). */
int mqd_client_poll(struct mqd_client *client);
/* The next response to a request of mqd_client_submit, from the correlation id on; valid until the
 * next call of mqd_client_poll or this. 0 = none. */
uint32_t mqd_client_response(struct mqd_client *client, const uint8_t **bytes);
/* Until something has come, there is room again after MQD_E_FULL, the timeout ends (-1 = none), or
 * mqd_client_wake was called. 1 = look (mqd_client_poll; before it has been called, the next wait
 * returns at once), 0 = time-out, -1 EPIPE. */
int mqd_client_wait(struct mqd_client *client, int64_t timeout_us);
void mqd_client_wake(struct mqd_client *client);
/* of the producer's memory, or without one of that for requests */
uint64_t mqd_client_free_bytes(const struct mqd_client *client);

/* ---- requests that every program needs ---- */

struct mqd_client_topic {
    uint8_t topic_id[16];
    int32_t partition_count;
    int32_t error; /* Kafka's: 0, 3 there is none, 5 it is being made (ask again)... */
};
/* Asks for a topic and waits for the answer; other responses stay in their queue. 0: look at
 * out->error. -1: ETIMEDOUT, EPIPE... The correlation id is the caller's, as those below. */
int mqd_client_find_topic(struct mqd_client *client, const char *name, uint32_t correlation_id, int64_t timeout_us,
                          struct mqd_client_topic *out);

struct mqd_client_wish {
    uint8_t topic_id[16];
    int32_t partition_index;
    int32_t reserved;
    int64_t offset; /* of the next record */
};
/* Asks to be told when any of the partitions has a record at its offset: a response comes then (or
 * after wait_ms, or at once when something is wrong with a partition: its reader tells what). It
 * says no more than that, and nothing needs to be read out of it; mqd_client_wait sleeps until it
 * is there. While it is out, answers to later requests on this attachment wait behind it, as on
 * every Kafka connection: who produces as well attaches twice. */
int mqd_client_park(struct mqd_client *client, const struct mqd_client_wish *wishes, uint32_t count,
                    int8_t isolation_level, int32_t wait_ms, uint32_t correlation_id);

/* ---- the producer ---- */

struct mqd_producer_options {
    int16_t acks; /* -1, 0, 1 */
    int16_t producer_epoch;
    int32_t request_timeout_ms;   /* the broker's time for acks=-1 */
    int64_t producer_id;          /* -1 = not idempotent */
    const char *transactional_id; /* NULL = none */
    uint32_t batch_bytes;         /* a batch is closed when the next record would make it larger */
    uint32_t batch_records_max;   /* 0 = 10000 */
    uint32_t inflight_max;        /* batches per partition that await an answer; at most 5 when idempotent */
    int64_t linger_us;
    /* 0 = no bound of its own; of batches that are open or unanswered; at most what the
     * attachment's memory holds */
    uint64_t buffer_bytes_max;
    int16_t produce_version; /* 9 to 12; 12: transactions v2 */
    int16_t reserved;
};
/* librdkafka's names */
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
/* The same for a column of keys, one after another (key_bytes NULL: none has one): fills what is
 * below 0 in `partitions`. without_key: where records without key go. -1: MQD_E_INVALID, a
 * partitioner that does not go by the key alone, or a wrong size or count. */
int mqd_partitions_for(uint32_t partitioner, const uint8_t *keys, const int32_t *key_bytes, uint32_t count,
                       int32_t partition_count, int32_t without_key, int32_t *partitions);

struct mqd_producer;
/* One at a time on an attachment. MQD_E_FULL: what a producer before it has sent is still being
 * read; wait, then again. */
struct mqd_producer *mqd_producer_open(struct mqd_client *client, const struct mqd_producer_options *options);
void mqd_producer_close(struct mqd_producer *producer); /* what is open or unanswered is forgotten */
/* A topic gets a number, 0.. in the order of first calls; called again it changes the partition
 * count (never down). */
int32_t mqd_producer_topic(struct mqd_producer *producer, const char *name, int32_t partition_count,
                           uint32_t partitioner);

/* `count` records. A NULL array means: the same for all, as said */
struct mqd_record_columns {
    uint32_t count;
    const uint8_t *values;      /* one after another */
    const int32_t *value_bytes; /* of each, -1 = null; NULL: every one has fixed_value_bytes */
    int32_t fixed_value_bytes;
    const uint8_t *keys;
    const int32_t *key_bytes;    /* -1 = null; NULL: none has a key */
    const uint8_t *headers;      /* encoded as in a record: count varint and all; one after another */
    const int32_t *header_bytes; /* NULL: none has headers */
    const int32_t *partitions;   /* -1 = the partitioner; NULL: `partition` for all */
    int32_t partition;
    const int64_t *timestamps_ms; /* NULL: timestamp_ms for all */
    int64_t timestamp_ms;
};
/* Appends records in order. Returns how many were taken: less than `count` when the buffer is full
 * (nothing is half taken) or at a record that is too large (MQD_E_INVALID when it is the first).
 * batch_of (NULL, or `count` numbers) tells the batch of each. -1: error. */
int64_t mqd_producer_append(struct mqd_producer *producer, int32_t topic, const struct mqd_record_columns *records,
                            uint64_t *batch_of);
/* One record: value_bytes and key_bytes -1 = null, header_bytes 0 = no headers, partition -1 = the
 * partitioner. The number of its batch (above 0), 0 = the buffer is full, -1: error. */
int64_t mqd_producer_put(struct mqd_producer *producer, int32_t topic, int32_t partition, const uint8_t *value,
                         int32_t value_bytes, const uint8_t *key, int32_t key_bytes, const uint8_t *headers,
                         int32_t header_bytes, int64_t timestamp_ms);
/* Records as an uncompressed batch in the caller's memory (`partition` columns are not looked at),
 * for compressing and mqd_producer_append_batch: at most records_max (0 = all) and what fits.
 * Returns its bytes, 0 when not even one record fits; *taken: how many records it holds. -1: error. */
int64_t mqd_records_encode(const struct mqd_record_columns *records, uint32_t records_max, uint8_t *out,
                           uint64_t out_bytes, uint32_t *taken);
/* A batch whose records are encoded and perhaps compressed already (61-byte header and all but
 * sequence, producer and CRC). */
int mqd_producer_append_batch(struct mqd_producer *producer, int32_t topic, int32_t partition, const uint8_t *batch,
                              uint32_t size_bytes, uint64_t *number);
/* Closes and sends what has lingered long enough (or everything), as far as inflight_max allows;
 * what it does not allow follows by mqd_client_poll. now_us: CLOCK_MONOTONIC. */
int mqd_producer_send(struct mqd_producer *producer, int64_t now_us, int everything);
/* when a batch will have lingered; INT64_MAX = none is open */
int64_t mqd_producer_next_send_us(const struct mqd_producer *producer);

/* what became of a batch */
struct mqd_delivery {
    uint64_t batch;
    int32_t topic, partition;
    int64_t base_offset;  /* -1 = unknown (acks=0, duplicate of unknown place) */
    int64_t timestamp_ms; /* log append time, or -1 */
    uint32_t record_count;
    int16_t error; /* Kafka's, 0 = written */
    int16_t reserved;
};
/* Outcomes, oldest first. A batch with an error stays the producer's until mqd_producer_retry or
 * mqd_producer_drop was called with its number; meanwhile nothing behind it in its partition is
 * sent. An idempotent producer tells the first error of a partition: what failed behind it is sent
 * again behind it. A broker that has the batch already (46) counts as success. */
uint32_t mqd_producer_deliveries(struct mqd_producer *producer, struct mqd_delivery *out, uint32_t capacity);
/* Again, in its old place before all later batches of its partition; those that failed behind it
 * because of it follow by themselves. */
int mqd_producer_retry(struct mqd_producer *producer, uint64_t batch);
/* Forgets a batch: open, waiting, failed, or sent (it may yet be written; nothing is told of it).
 * When one that was sent is dropped from an idempotent producer its sequences are missing: the
 * broker answers 45 to the next ones until the identity is changed. */
int mqd_producer_drop(struct mqd_producer *producer, uint64_t batch);
/* All batches to another attachment (the worker had died): copied, in order, unanswered ones are
 * sent again. The old client is closed. -1: nothing was changed; MQD_E_FULL: the new attachment has
 * less memory than the batches need. */
int mqd_producer_move(struct mqd_producer *producer, struct mqd_client *to);
/* nothing may be sent and unanswered; sequences begin at 0, also of what waits */
int mqd_producer_set_identity(struct mqd_producer *producer, int64_t producer_id, int16_t producer_epoch);
uint64_t mqd_producer_outstanding_records(const struct mqd_producer *producer);
uint64_t mqd_producer_outstanding_bytes(const struct mqd_producer *producer);

#endif
