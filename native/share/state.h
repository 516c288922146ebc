/* The state of one share-partition (KIP-932): a group's acquisitions of the records of a partition.
 * Pure: no system call, no clock (times are arguments), memory only from the pool that its owner
 * provides. The broker links this code, and tests load the same code with cffi.
 *
 * This code does not read the log. The owner reads the log, passes a list of record batches, and
 * marks the batches that must not be delivered.
 *
 * Terms: the start (Kafka's SPSO) is the first offset that is not finished, the end (SPEO) follows
 * the last offset that was ever acquired or skipped. Finished: Acknowledged or Archived. Open: at
 * or above the start, below the end, not finished. A difference lists what has changed since the
 * previous one, for the share coordinator.
 *
 * Layout: pages of 1,024 offsets. A page whose cells are all equal stores one cell; any other page
 * has a cell of 8 bytes for each offset:
 *
 *   bits 0-2 state, 3 changed since the last difference, 4-19 delivery count, 32-63 its row
 *
 * An acquisition is a row: its range, member, deadline. All locks have the same duration, so the
 * rows form a queue in the order of their deadlines.
 *
 * A released record waits for its backoff (Delayed, persisted as Available), also in a row.
 * Backoffs of equal delivery counts have the same duration, so each count has a queue. A new
 * leader does not know the backoffs: a failover loses the delay, nothing else.
 *
 * With FIFO the records of a key, which is represented by its hash, are delivered one after the
 * other: a record is Waiting (persisted as Available) while an earlier record of its key is open.
 * The records of a key are linked in the order of their offsets (share/fifo.c). A new leader knows
 * no keys: it reads them in the order of offsets (mqd_share_next_key_offset), and acquires a record
 * only when it knows the keys of all earlier open records.
 *
 * Invariants: those of the protocol that this module ensures (docs/design/share-groups.md, same
 * numbers)
 *   S1  an offset is acquired by at most one member: its cell names one row.
 *   S2  a finished offset is never acquired again.
 *   S3  a delivery count never decreases (except by MQD_SHARE_RETURN: there was no delivery), and an
 *       offset whose count has reached the limit is not acquired.
 *   S4  the start never decreases; every offset below it is finished or no longer in the log.
 *   S5  each acquired offset belongs to a row in the queue, deadlines in the queue never decrease;
 *       a row without acquired offsets is freed immediately.
 *   S6  a change stays pending until a difference has listed it, or the start has passed it.
 *   S7  at most open_max offsets are open, end - start is at most MQD_SHARE_SPAN_MAX, and nothing
 *       new is acquired while there are MQD_SHARE_RUN_COUNT_MAX runs. Finishing, releasing and
 *       expiring need no memory, so they cannot fail for lack of it.
 *   S8  records that the owner marks as not to be delivered are archived, never acquired.
 *   L1  with dead letters, a record that is rejected, or may not be delivered again, is Archiving
 *       until mqd_share_archive, or until it is no longer in the log. It is open, counts for S7,
 *       and is never acquired.
 *   S9  a released offset is not acquired before its backoff has ended, not even for lack of
 *       memory: a row is reserved for each queue of backoffs that is empty.
 *   F1  with FIFO, nothing is acquired while an earlier record of its key is open. A released
 *       record keeps its place. Different keys with equal hashes are treated as one key.
 * Concurrency: one thread at a time; the partition's owner.
 */
#ifndef MQD_SHARE_STATE_H
#define MQD_SHARE_STATE_H
/* MQD_CDEF_OFF */
#include <stdbool.h>
#include <stdint.h>

#include "share/pool.h"
/* MQD_CDEF_ON */

#define MQD_SHARE_PAGE_OFFSETS 1024
#define MQD_SHARE_SPAN_MAX 1048576
/* runs of equal state and count, as persisted: a snapshot of about 200 KB */
#define MQD_SHARE_RUN_COUNT_MAX 10000
#define MQD_SHARE_NEVER 0x7fffffffffffffff
/* queues of rows: one for locks, then one for the backoffs of each delivery count; the last queue
 * is for all larger counts */
#define MQD_SHARE_QUEUE_COUNT 33

/* 0 to 4: Kafka's numbers */
enum mqd_share_record_state {
    MQD_SHARE_AVAILABLE = 0,
    MQD_SHARE_ACQUIRED = 1,
    MQD_SHARE_ACKNOWLEDGED = 2,
    MQD_SHARE_ARCHIVING = 3, /* a dead letter must be written for it */
    MQD_SHARE_ARCHIVED = 4,
    /* mqd's own: Kafka's clients and the persisted state see both as Available */
    MQD_SHARE_DELAYED = 5,
    MQD_SHARE_WAITING = 6 /* with FIFO: an earlier record of its key is open */
};
enum mqd_share_type {
    MQD_SHARE_GAP,
    MQD_SHARE_ACCEPT,
    MQD_SHARE_RELEASE,
    MQD_SHARE_REJECT,
    MQD_SHARE_RENEW,
    /* mqd's own, never sent by a client: the records could not be sent, so the delivery does not
     * count */
    MQD_SHARE_RETURN
};
enum mqd_share_error { MQD_SHARE_INVALID_REQUEST = 42, MQD_SHARE_INVALID_RECORD_STATE = 121 };

/* the group's settings, which may change at any time */
struct mqd_share_settings {
    int64_t lock_ms;        /* how long an acquisition lasts */
    int32_t delivery_limit; /* deliveries of one record, 1 to 32,767 */
    uint32_t open_max;      /* open offsets, at most MQD_SHARE_SPAN_MAX */
    /* backoff before the second delivery, doubled for each further delivery; 0: no backoff */
    int32_t backoff_ms, backoff_ms_max;
    /* a record that is rejected, or not accepted in its last delivery, gets a dead letter before it
     * is archived */
    uint8_t dead_letters;
    uint32_t fifo; /* identifies what the owner uses as a record's key (fifo_id in share/partition.c); 0: no FIFO */
};

/* Offsets of equal state and delivery count; for acquired offsets, `count` includes the current
 * delivery. */
struct mqd_share_run {
    int64_t first, last;
    int16_t state; /* enum mqd_share_record_state */
    int16_t count;
};

struct mqd_share;
struct mqd_share_page;
struct mqd_share_queue {
    uint32_t head, tail;
};

struct mqd_share {
/* MQD_CDEF_OFF */
#ifdef MQD_PLANTED
    uint32_t planted; /* broken rules: share/planted_bugs.h */
#endif
    /* MQD_CDEF_ON */
    struct mqd_share_pool *pool;
    struct mqd_share_settings settings;
    int64_t start, end;
    int64_t log_start;                   /* the last value passed to mqd_share_set_log_start */
    int64_t available_from;              /* no offset below it is Available */
    int64_t changed_first, changed_last; /* range of the changes since the last difference; first > last: none */
    uint32_t open_count, acquired_count, delayed_count, archiving_count, waiting_count;
    uint32_t boundary_count;             /* neighbouring offsets from start to end whose persisted states differ */
    uint8_t start_moved;                 /* since the last difference */
    uint8_t pool_exhausted;              /* the last acquire ended early because the pool was exhausted */
    uint16_t used_page_counts[8];        /* pages in use in each block of pages */
    struct mqd_share_page *directory[8]; /* 256 pages a block; a page's place is its number modulo 2048 */
    uint32_t row_count, used_row_count;  /* rows for which memory is allocated; rows in use */
    uint32_t first_free_row;             /* of the list of unused rows */
    uint32_t backoff_queue_count;        /* queues of backoffs that are not empty */
    void **row_directory[8];             /* 1,024 blocks each, of 128 rows each */
    struct mqd_share_queue queues[MQD_SHARE_QUEUE_COUNT]; /* in the order of deadlines */
    struct mqd_share_fifo *fifo;                          /* NULL: no FIFO */
};

void mqd_share_init(struct mqd_share *share, struct mqd_share_pool *pool, const struct mqd_share_settings *settings,
                    int64_t start);
/* Returns all memory to the pool. */
void mqd_share_destroy(struct mqd_share *share);
/* Aborts if an invariant is broken. Slow: for tests. */
void mqd_share_check(const struct mqd_share *share);

/* ---- acquiring ---- */

/* The first offset that may be acquired, from which the owner reads next. -1: none now. */
int64_t mqd_share_next_offset(struct mqd_share *share);

/* With FIFO: the offset from which keys are needed next; the keys of all open records below it are
 * known. Without FIFO: MQD_SHARE_NEVER. */
int64_t mqd_share_next_key_offset(const struct mqd_share *share);

/* Batches that begin at or above this offset need not be read to acquire `records_max` records now:
 * there are enough new offsets below it, or as many as may be opened (S7). */
int64_t mqd_share_read_until(const struct mqd_share *share, uint32_t records_max);

struct mqd_share_record {
    int32_t delta; /* its offset minus the batch's `first` */
    uint32_t hash; /* of its key; 0: it has no key, so its order does not matter */
};
/* a record batch in the log */
struct mqd_share_batch {
    int64_t first, last;
    uint8_t skipped; /* control records, or an aborted transaction under read_committed: archived */
    /* With FIFO: the batch's records at or above mqd_share_next_key_offset. NULL: not known yet, so
     * the batch is not acquired now. */
    const struct mqd_share_record *records;
    uint32_t record_count;
};
struct mqd_share_acquisition {
    uint64_t member;
    int64_t now_ms;
    uint32_t records_max;
    /* ShareAcquireMode record_limit (KIP-1206): records_max is exact. Otherwise the last batch is
     * acquired whole. */
    uint8_t strict;
};
/* Acquires for a member the Available records of `batches`, which must be all batches of the log
 * from `next_offset` (the result of mqd_share_next_offset) to the end of the last one. Offsets
 * between batches are archived, because they are not in the log. Fills `out` with the acquired
 * runs, at most out_max, and returns their number.
 *
 * A record that was delivered max(2, limit / 2) times or more is acquired with fewer neighbours
 * each time, and alone the last time, so that neighbours of a bad record are not archived. */
uint32_t mqd_share_acquire(struct mqd_share *share, const struct mqd_share_acquisition *acquisition,
                           int64_t next_offset, const struct mqd_share_batch *batches, uint32_t batch_count,
                           struct mqd_share_run *out, uint32_t out_max);

/* ---- ending acquisitions ---- */

struct mqd_share_acknowledgement {
    int64_t first, last;
    const uint8_t *types; /* enum mqd_share_type, for each offset, or one for all */
    uint32_t type_count;
};
/* Acknowledges all ranges or none. Returns 0; MQD_SHARE_INVALID_REQUEST if the ranges do not
 * ascend, or have unknown types or a wrong number of them; or MQD_SHARE_INVALID_RECORD_STATE if an
 * offset is not acquired by this member, or its lock has expired. Offsets below the log's start are
 * ignored. */
int mqd_share_acknowledge(struct mqd_share *share, uint64_t member, const struct mqd_share_acknowledgement *list,
                          uint32_t count, int64_t now_ms);
/* Called when the dead letters of the Archiving records from first to last have been written, or
 * are not wanted. Returns the number of offsets that were archived. */
uint32_t mqd_share_archive(struct mqd_share *share, int64_t first, int64_t last);
/* Releases all records that the member has acquired; returns their number. Walks all rows. */
uint32_t mqd_share_release_member(struct mqd_share *share, uint64_t member, int64_t now_ms);
/* When the next lock or backoff ends, or MQD_SHARE_NEVER. */
int64_t mqd_share_deadline(const struct mqd_share *share);
/* Ends the locks and backoffs that are due, row by row, until `offsets_max` offsets are reached.
 * Returns the number of offsets; call it again while mqd_share_deadline is due. */
uint32_t mqd_share_expire(struct mqd_share *share, int64_t now_ms, uint32_t offsets_max);
/* Called when the log begins at log_start (retention, DeleteRecords): records below it are dropped,
 * acquired or not. */
void mqd_share_set_log_start(struct mqd_share *share, int64_t log_start);

/* ---- persistence ---- */

struct mqd_share_difference {
    int64_t start;           /* -1: as in the last difference */
    uint32_t run_count;      /* in `out` */
    uint32_t finished_count; /* offsets at or above the start that are finished (KIP-1226) */
    uint8_t is_whole;        /* all changes are listed; otherwise the next difference continues */
    uint8_t is_empty;        /* nothing to write */
};
/* Lists the changes since the last difference, and marks them as listed. Acquired offsets are
 * listed as they were before their acquisition. */
void mqd_share_take_difference(struct mqd_share *share, struct mqd_share_run *out, uint32_t out_max,
                               struct mqd_share_difference *difference);
/* Fills `out` with the runs at or above `first` that a snapshot persists: those that are finished
 * or were delivered before. Returns their number; *next is where to continue, or -1. */
uint32_t mqd_share_snapshot(const struct mqd_share *share, int64_t first, struct mqd_share_run *out, uint32_t out_max,
                            int64_t *next);
/* Loads the persisted runs into a state that mqd_share_init has just initialized with the persisted
 * start. Runs below the start are ignored. Returns 0; or -1 if the runs do not ascend, have a state
 * other than 0, 2, 3 and 4 or a negative count, or span more than MQD_SHARE_SPAN_MAX, or if the
 * pool is exhausted (pool_exhausted). After -1 only mqd_share_destroy may be called. */
int mqd_share_load(struct mqd_share *share, const struct mqd_share_run *runs, uint32_t count);

/* The number of runs of equal state and count from start to end. */
uint32_t mqd_share_run_count(const struct mqd_share *share);
/* An offset's state and delivery count; if it is acquired, the count includes the current delivery.
 * For tests. */
struct mqd_share_run mqd_share_state_at(const struct mqd_share *share, int64_t offset);

#endif
