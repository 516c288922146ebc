/* State of idempotent producers in one partition, so that a retry is not written twice.
 *
 * Per producer id: its epoch and its last five batches (the most a producer may have in flight).
 * Rules, as in Kafka's ProducerStateManager (KIP-98, KIP-360):
 *
 *   - same sequence range as one of the five, same epoch: a duplicate, answered with the original
 *     base offset.
 *   - wholly before the oldest of the five: 46 DUPLICATE_SEQUENCE_NUMBER. It was written, but its
 *     offset is forgotten; clients treat this as success.
 *   - not the successor of the last sequence: 45 OUT_OF_ORDER_SEQUENCE_NUMBER. This includes a
 *     batch before the oldest if fewer than five are remembered. Such a batch was never written:
 *     the producer's first batch may have been refused temporarily, and its second one accepted.
 *   - lower epoch: 47 INVALID_PRODUCER_EPOCH.
 *   - higher epoch: must begin with sequence 0, otherwise 45; also after a marker that has bumped
 *     the epoch (KIP-890).
 *   - unknown producer id: any sequence is accepted. Its state may have expired or been deleted
 *     with old segments, which the client cannot know (Kafka since 2.x). See also may_overtake in
 *     server/owner.c.
 *
 * Sequences wrap from 2^31-1 to 0. Batches of a coordinator (committed offsets) have no sequences;
 * only their epochs are checked.
 *
 * Transactions (KIP-98, KIP-890): a producer has at most one ongoing here, from its first
 * transactional batch to its marker.
 *
 *   - batch outside the ongoing transaction (not transactional): 48 INVALID_TXN_STATE.
 *   - marker of a lower producer epoch: 47; of the same epoch too, when the marker is known to bump
 *     it.
 *   - marker of a lower coordinator epoch: 52 TRANSACTION_COORDINATOR_FENCED.
 *   - marker without an ongoing transaction: accepted, because its epochs fence older senders.
 *   - sequences of a transaction that has ended: 59 UNKNOWN_PRODUCER_ID, neither a duplicate nor
 *     46. A client that gave up records it had sent may reuse their sequences for the next ones
 *     (librdkafka after an abort); as duplicates, the new records would be answered with the
 *     offsets of the old ones. After 59 the client aborts and continues in a new epoch; 45 would
 *     be fatal to it.
 *
 * Invariants
 *   R1  undo is the inverse of add: after adds are undone in reverse order, every check returns the
 *       same as before them.
 *   R2  at most count_max producers without an ongoing transaction after mqd_producers_trim; the
 *       least recently used are removed first, so only an idle producer loses its state.
 *   R3  a producer with an ongoing transaction is not in the use list: it is never trimmed or
 *       expired.
 *   R4  a batch without records begins no transaction: compaction has kept it only for its
 *       sequence, its transaction has ended, and the marker may be gone.
 * Bounds: 40 + 5 * 16 + 4 bytes a producer, in two arrays that double. Concurrency: the partition's
 * owner alone.
 *
 * Snapshot, big endian:
 *   0   u32  0x4d514450 "MQDP"
 *   4   u16  version 2
 *   6   u16  0
 *   8   u32  CRC32C of bytes 12..end
 *   12  u32  producer count
 *   16  i64  offset: the state after all records below it
 *   24  producers, those without an ongoing transaction first, least recently used first
 *
 * Each producer: i64 producer_id, i64 last_append_ms, i16 epoch, u8 batch count (0..5), u8 flags
 * (1: any sequence may come next, 2: `ended`), i32 coordinator_epoch (-1: none), i64 first offset
 * of the ongoing transaction (-1: none); then per batch, oldest first: i32 first_sequence, i32
 * last_sequence, i64 base_offset. Version 1, which is still read, has zeros for flags and
 * coordinator epoch, and no transaction field.
 */
#ifndef MQD_PRODUCERS_H
#define MQD_PRODUCERS_H

#include "log/transactions.h"
#include "native.h"

#define MQD_PRODUCER_BATCH_COUNT 5
#define MQD_PRODUCER_NONE UINT32_MAX

struct mqd_producer_batch {
    int32_t first_sequence, last_sequence;
    int64_t base_offset;
};

struct mqd_producer_state {
    int64_t producer_id;
    int64_t last_append_ms;    /* wall clock of the broker, not of the records */
    uint32_t hash_next;        /* also links the free list */
    uint32_t newer, older;     /* in order of use; in no list while a transaction is ongoing */
    uint32_t transaction;      /* link of the ongoing transaction in producers->transactions; 0 = none */
    int32_t coordinator_epoch; /* of the last marker; -1 = none */
    int16_t epoch;
    uint8_t count;            /* of the batches remembered */
    uint8_t head : 4;         /* batches[head] is overwritten next */
    uint8_t any_sequence : 1; /* known only by a marker or a coordinator's batch: any sequence may come next */
    /* the remembered batches precede the producer's last marker: the last batch determines the next
     * sequence, but a batch with the sequences of one of them is no duplicate */
    uint8_t ended : 1;
    struct mqd_producer_batch batches[MQD_PRODUCER_BATCH_COUNT];
};

/* zeroed = empty */
struct mqd_producers {
    struct mqd_producer_state *entries;
    uint32_t *buckets;
    uint32_t capacity;                  /* entries and buckets; a power of two, or 0 */
    uint32_t used;                      /* entries that have ever been used, those in the free list included */
    uint32_t count;                     /* producers */
    uint32_t free_list, newest, oldest; /* index + 1; 0 = none */
    uint64_t change_count;              /* incremented by every change, for snapshots */
    struct mqd_transactions transactions;
};

enum mqd_transaction_change { MQD_TRANSACTION_KEPT, MQD_TRANSACTION_BEGUN, MQD_TRANSACTION_ENDED };
struct mqd_producer_undo {
    uint32_t index; /* MQD_PRODUCER_NONE = nothing to undo */
    uint32_t transaction;
    int32_t coordinator_epoch;
    int16_t epoch;
    uint8_t count;
    uint8_t head : 4, any_sequence : 1, ended : 1, created : 1;
    uint8_t change; /* enum mqd_transaction_change */
    int64_t last_append_ms;
    struct mqd_producer_batch overwritten;
};

void mqd_producers_free(struct mqd_producers *producers);
struct mqd_producer_batch_kind {     /* facts that the header of a batch does not contain */
    const struct mqd_marker *marker; /* NULL: a data batch */
    bool from_coordinator;           /* not from a client: the batch has no sequence */
    bool bumps_epoch;                /* the marker bumps the producer's epoch */
    bool require_known;              /* MQD_STAGE_REQUIRE_KNOWN; not used by mqd_producers_check */
    bool from_zero;                  /* MQD_STAGE_FROM_ZERO; not used by mqd_producers_check */
};
/* Returns 0, 45, 46, 47, 48, 52 or 59. For a duplicate, returns 0 and sets *duplicate and the
 * original base offset. Must not be called for batches without a producer id. */
int16_t mqd_producers_check(const struct mqd_producers *producers, const struct mqd_batch *batch,
                            struct mqd_producer_batch_kind kind, bool *duplicate, int64_t *base_offset);
/* Whether this batch belongs to a transaction that its producer has already begun here. */
bool mqd_producers_continues_transaction(const struct mqd_producers *producers, const struct mqd_batch *batch);
/* Whether sequences of the batch's producer in the batch's epoch are known. */
bool mqd_producers_has_sequences(const struct mqd_producers *producers, const struct mqd_batch *batch);
bool mqd_producers_in_transaction(const struct mqd_producers *producers, int64_t producer_id);
/* Adds a batch that passed the check (or that is already in the log). Returns -1 if there is no
 * memory; nothing is changed then. */
int mqd_producers_add(struct mqd_producers *producers, const struct mqd_batch *batch, const struct mqd_marker *marker,
                      int64_t base_offset, int64_t now_ms, struct mqd_producer_undo *undo);
void mqd_producers_undo(struct mqd_producers *producers, const struct mqd_producer_undo *undo);
void mqd_producers_trim(struct mqd_producers *producers, uint32_t count_max);
/* Forgets producers whose last append was before this time. */
void mqd_producers_expire(struct mqd_producers *producers, int64_t before_ms);

/* malloc'd; NULL: out of memory. */
uint8_t *mqd_producers_encode(const struct mqd_producers *producers, int64_t offset, size_t *size_bytes);
/* Like mqd_partition_producers: copies out up to `capacity` producers, returns the total number. */
uint32_t mqd_producers_view(const struct mqd_producers *producers, struct mqd_producer_view *out, uint32_t capacity);

/* Only for log/producers_snapshot.c: insert adds an entry and returns its index (MQD_PRODUCER_NONE:
 * out of memory); begin_transaction gives an entry an ongoing transaction. */
uint32_t mqd_producers_insert(struct mqd_producers *producers, int64_t producer_id);
int mqd_producers_begin_transaction(struct mqd_producers *producers, uint32_t index, int64_t first_offset);
/* The index of the producer's entry; MQD_PRODUCER_NONE: unknown. */
uint32_t mqd_producers_find(const struct mqd_producers *producers, int64_t producer_id);

/* Decodes into an empty table. -1 MQD_E_CORRUPT (or ENOMEM): the table is empty. */
int mqd_producers_decode(struct mqd_producers *producers, const uint8_t *bytes, size_t size_bytes, int64_t *offset);

#endif
