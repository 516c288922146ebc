/* The ids of a partition's latest records and these records' offsets, for topics with
 * dedup.window.ms.
 *
 * Two structures: a queue of (hash, offset) in the order of the log, whose head expires, and a
 * table from hash to place in the queue (open addressing, linear probing). The hash is SipHash with
 * a random key, truncated to 80 bits: among three million ids, one lookup in 4 * 10^17 mistakes a
 * new id for one of them.
 *
 * Transactions: the ids of a transaction are undecided while it is open, and then until its marker
 * is below the high watermark, because until then the marker itself can be truncated. After an
 * abort the ids are free.
 *
 * Invariants
 *   I1  offsets in the queue increase; an id that is not free is in the queue once.
 *   I2  every entry of the queue that is not free has exactly one slot of the table, and no other
 *       slot is used.
 *   I3  mqd_ids_cut(offset) restores the state before the first id at or above `offset` was added,
 *       except for expired ids.
 *
 * Memory: 14 bytes an id, in chunks that are freed as ids expire, and 4 bytes for each slot of the
 * table, which is at most three quarters full. When the table grows, one call moves all its slots.
 * Concurrency: one thread.
 */
#ifndef MQD_IDS_H
#define MQD_IDS_H

#include "native.h"

struct mqd_ids_chunk;
struct mqd_ids_mark;
struct mqd_ids_transaction;

struct mqd_id_hash {
    uint64_t low; /* not 0 */
    uint16_t high;
};

struct mqd_ids {
    uint32_t count_max; /* of entries in the queue, free ones included */
    uint64_t seed[2];
    uint64_t head, tail; /* sequence numbers of the queue's entries: [head, tail) */
    struct mqd_ids_chunk **chunks;
    uint32_t chunk_count, chunk_capacity;
    uint64_t chunks_head; /* sequence number of the first entry of chunks[0] */
    uint32_t *slots;      /* 0 = unused */
    uint32_t slot_count;  /* a power of two */
    uint32_t used_slot_count;
    struct mqd_ids_mark *marks;
    uint32_t mark_count, mark_capacity, mark_head;
    struct mqd_ids_transaction *transactions;
    uint32_t transaction_count, transaction_capacity;
};

enum mqd_id_state {
    MQD_ID_FREE, /* no record has the id */
    MQD_ID_USED, /* a record has the id: a committed one, or one of this producer's open transaction */
    /* a record of any other undecided transaction has the id */
    MQD_ID_UNDECIDED
};

/* Returns 0, or -1 if there are no random bytes (mqd_error set). */
int mqd_ids_open(struct mqd_ids *ids, uint32_t count_max);
void mqd_ids_close(struct mqd_ids *ids);

void mqd_ids_hash(const struct mqd_ids *ids, const uint8_t *id, uint32_t id_bytes, struct mqd_id_hash *hash);
/* producer_id: the producer of a transactional batch; -1 for any other batch. Unless the id is
 * free, *offset is the offset of the record that has it. */
enum mqd_id_state mqd_ids_find(const struct mqd_ids *ids, const struct mqd_id_hash *hash, int64_t producer_id,
                               int64_t *offset);
/* Adds an id; an older entry with this id becomes free. Offsets must increase. producer_id: as for
 * mqd_ids_find. Returns 0, or -1 if the queue is full or memory runs out (nothing changes). */
int mqd_ids_put(struct mqd_ids *ids, const struct mqd_id_hash *hash, int64_t offset, int64_t producer_id);
/* Ids added from now on have this time. Times are stored with a resolution of a thousandth of the
 * window: an id never expires too early, and at most that much too late (later still if memory for
 * the marks runs out). */
void mqd_ids_set_time(struct mqd_ids *ids, int64_t now_ms, int64_t window_ms);
/* Forgets ids added at or before this time. */
void mqd_ids_expire(struct mqd_ids *ids, int64_t before_ms);
/* The clock was set back by this much: moves the times of all ids back with it. */
void mqd_ids_shift_times(struct mqd_ids *ids, int64_t back_ms);
/* Forgets the oldest entry; the queue must not be empty. */
void mqd_ids_drop_oldest(struct mqd_ids *ids);

/* Records that a marker at this offset ends the producer's transaction. */
void mqd_ids_end_transaction(struct mqd_ids *ids, int64_t producer_id, bool commit, int64_t offset);
/* Decides the transactions whose markers are below the high watermark: these markers stay in the
 * log. */
void mqd_ids_decide_transactions(struct mqd_ids *ids, int64_t high_watermark);
/* Drops the ids at and above `offset`, because their batches were not written: see I3. */
void mqd_ids_cut(struct mqd_ids *ids, int64_t offset);

/* The number of entries in the queue, free ones included. */
static inline uint64_t mqd_ids_count(const struct mqd_ids *ids)
{
    return ids->tail - ids->head;
}
/* The memory used, in bytes. */
uint64_t mqd_ids_bytes(const struct mqd_ids *ids);
/* Checks I1 and I2 entry by entry; for tests. Returns NULL, or the text of the violated
 * invariant. */
const char *mqd_ids_check(const struct mqd_ids *ids);

#endif
