/* Transactions of one partition: the ongoing ones, those whose end is not yet below the high
 * watermark, and the producers being verified.
 *
 * A transaction begins with its first batch here and ends with a marker, the control batch that its
 * coordinator writes (KIP-98). Until the marker is below the high watermark, the transaction's
 * first offset bounds the last stable offset. Before the transaction may begin, its coordinator
 * must have confirmed that the transaction includes the partition (KIP-890). Before a process asks
 * the coordinator, it gets a guard from here; it passes the guard back with the batch. A marker in
 * between removes the guard: otherwise a batch that was verified before the marker could begin a
 * transaction that never ends.
 *
 * Invariants
 *   T1  `oldest`..`newest` links all transactions in order of first_offset;
 *       `ended_first`..`ended_last` those that have a marker, in order of last_offset.
 *   T2  remove undoes begin, and resume undoes end, in reverse order.
 *   T3  at most MQD_VERIFICATION_COUNT_MAX guards; the oldest is dropped first, and its sender must
 *       retry. A guard is never 0 and never used twice.
 * Bounds: 40 bytes a transaction; at most one ongoing transaction per producer, so the
 * coordinators' limits on producers bound their number. 48 KiB of guards, allocated while there are
 * any. Concurrency: the partition's owner alone.
 */
#ifndef MQD_TRANSACTIONS_H
#define MQD_TRANSACTIONS_H

#include "native.h"

#define MQD_VERIFICATION_COUNT_MAX 1024
/* a longer batch is not accepted as a marker, either when written or when read from a log */
#define MQD_MARKER_BYTES_MAX 512

struct mqd_marker {
    bool commit;
    int32_t coordinator_epoch;
};

/* Reads the single record of a control batch whose header is `batch`. Returns 0, or -1 if the
 * record is not a transaction marker (another control record, or an incomplete one). */
int mqd_marker_parse(const uint8_t *bytes, const struct mqd_batch *batch, struct mqd_marker *out);

struct mqd_transaction {
    int64_t producer_id;
    int64_t first_offset;
    int64_t last_offset;   /* of its marker; -1 = ongoing */
    uint32_t older, newer; /* links are index + 1, 0 = none; `newer` also links the free list */
    uint32_t ended_previous, ended_next;
};

/* zeroed = empty */
struct mqd_transactions {
    struct mqd_transaction *entries;
    uint32_t capacity, used, free_list;
    uint32_t oldest, newest, ended_first, ended_last;
};

void mqd_transactions_free(struct mqd_transactions *transactions);
/* Returns the transaction's link; 0: out of memory (mqd_error set). */
uint32_t mqd_transactions_begin(struct mqd_transactions *transactions, int64_t producer_id, int64_t first_offset);
void mqd_transactions_end(struct mqd_transactions *transactions, uint32_t link, int64_t last_offset);
/* resume undoes end; remove undoes begin. */
void mqd_transactions_resume(struct mqd_transactions *transactions, uint32_t link);
void mqd_transactions_remove(struct mqd_transactions *transactions, uint32_t link);
/* Forgets transactions whose marker is below the high watermark: they are decided. */
void mqd_transactions_forget_decided(struct mqd_transactions *transactions, int64_t high_watermark);
/* INT64_MAX = none. first_unstable includes transactions that have ended but are not decided. */
int64_t mqd_transactions_first_unstable(const struct mqd_transactions *transactions);
int64_t mqd_transactions_first_ongoing(const struct mqd_transactions *transactions);
static inline int64_t mqd_transaction_first_offset(const struct mqd_transactions *transactions, uint32_t link)
{
    return link ? transactions->entries[link - 1].first_offset : -1;
}

struct mqd_verification {
    int64_t producer_id;
    int64_t guard; /* 0 = free */
    int64_t begun_ms;
    /* of the batches that requested verification: no batch with a higher sequence may come first */
    int32_t lowest_sequence;
    int16_t epoch;
    uint32_t hash_next; /* index + 1 */
};

struct mqd_verifications {            /* zeroed = empty */
    struct mqd_verification *entries; /* a ring by age, followed by the buckets; NULL = none */
    uint32_t *buckets;
    uint32_t next, count;
    uint64_t seed;
};

void mqd_verifications_free(struct mqd_verifications *verifications);
/* The guard that the sender of this batch must pass back; 0: out of memory. */
int64_t mqd_verifications_begin(struct mqd_verifications *verifications, const struct mqd_batch *batch, int64_t now_ms);
/* The entry of the batch's producer and epoch, if `guard` is still its guard; otherwise NULL. */
const struct mqd_verification *mqd_verifications_find(const struct mqd_verifications *verifications,
                                                      const struct mqd_batch *batch, int64_t guard);
/* The entry of the batch's producer and epoch, whatever its guard; or NULL. */
const struct mqd_verification *mqd_verifications_find_producer(const struct mqd_verifications *verifications,
                                                               const struct mqd_batch *batch);
void mqd_verifications_revoke(struct mqd_verifications *verifications, int64_t producer_id);
void mqd_verifications_expire(struct mqd_verifications *verifications, int64_t before_ms);

#endif
