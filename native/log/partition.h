/* One partition's log: staging, writing, flushing, rolling. Single-threaded: the reactor that owns
 * it, or whoever opens or closes it.
 *
 * A record batch goes  stage -> write -> (sync) :
 *   stage    checks the producer's sequence, assigns the base offset, puts base offset and leader
 *            epoch into the first 16 bytes; nothing is on disk
 *   write    one pwritev of all that is staged; afterwards log_end covers it
 *   sync     begin tells the file descriptors to flush, the backend flushes them off this thread,
 *            done moves durable_offset
 *
 * Invariants
 *   P1  bytes below the published high watermark are never rewritten.
 *   P2  a failed write leaves log end, indexes, leader epochs and producer state as before the
 *       stages that it covered (the file is cut back; its descriptor stays, a flush may use it).
 *   P3  after a failed sync the partition is fenced for ever (this process): nothing is retried.
 *   P4  durable_offset never exceeds what a completed sync that began after the write covered.
 *   P5  the last stable offset never falls while the log start stands, and every aborted
 *       transaction that it has passed is in a .txnindex.
 */
#ifndef MQD_PARTITION_H
#define MQD_PARTITION_H

#include <sys/uio.h>

#include "native.h"

#define MQD_STAGE_COUNT_MAX 448 /* batches of one write; two iovecs each stay under IOV_MAX */
#define MQD_STAGE_FULL (-1)     /* as many are staged: write first, then stage again */
/* nothing was staged: ask the transaction's coordinator, then stage again with result->guard */
#define MQD_STAGE_VERIFY (-2)

#define MQD_STAGE_REDIRECT (-3) /* of a retired partition's owner, not of the partition: server/redirect.h */
#define MQD_STAGE_UNKNOWN (-4)  /* nothing was staged: MQD_STAGE_KNOWN, and the producer is not known */

enum mqd_stage_flags {
    /* from a coordinator: control batches are allowed, sequences and verification are not asked for */
    MQD_STAGE_COORDINATOR = 1,
    /* a marker of transactions v2 (KIP-890): its producer epoch must be above the known one, not at
     * it */
    MQD_STAGE_MARKER_BUMPED = 2,
    MQD_STAGE_REDIRECTED = 4, /* batch->producer_id is not that of the bytes, and goes into the log instead of it */
    /* an idempotent producer's batch is staged only when sequences of its producer, in its epoch,
     * are known here */
    MQD_STAGE_KNOWN = 8
};

struct mqd_stage_result {
    int64_t base_offset;
    int64_t log_append_time_ms; /* -1 unless message.timestamp.type=LogAppendTime */
    bool duplicate; /* already in the log, or staged before it: base_offset is the original one, nothing was staged. At
                       or behind log end, the original's write decides the answer; with flush_on_ack, durable_offset
                       does. */
    int64_t guard;  /* with MQD_STAGE_VERIFY: what a verified sender brings back (never 0) */
};

/* `bytes` is the whole validated batch; it must stay readable until the write. patch_in_place: the
 * header may be changed where it lies (own arena); otherwise the first 16 (or 61) bytes are copied
 * and patched. Returns a Kafka error code: 0; 10 MESSAGE_TOO_LARGE; 18 RECORD_LIST_TOO_LARGE (than
 * a segment); 32 INVALID_TIMESTAMP; 44 POLICY_VIOLATION (read-only); 45
 * OUT_OF_ORDER_SEQUENCE_NUMBER; 46 DUPLICATE_SEQUENCE_NUMBER; 47 INVALID_PRODUCER_EPOCH; 19
 * NOT_ENOUGH_REPLICAS (a guard that is not, or no more, the partition's: the transaction may have
 * ended since it was verified; the client tries again); 48 INVALID_TXN_STATE (a batch outside of
 * the producer's ongoing transaction); 52 TRANSACTION_COORDINATOR_FENCED (a marker of an older
 * coordinator); 59 UNKNOWN_PRODUCER_ID (sequences of a transaction that has ended); 56
 * KAFKA_STORAGE_ERROR when fenced; 87 INVALID_RECORD (a control batch from a client, or one that is
 * no transaction marker); or MQD_STAGE_FULL, MQD_STAGE_VERIFY, MQD_STAGE_UNKNOWN. flags: enum
 * mqd_stage_flags. guard: 0 = not verified, else the result->guard that was verified for this very
 * batch. now_ms: wall clock, for LogAppendTime and timestamp limits. */
int16_t mqd_partition_stage(struct mqd_partition *partition, const struct mqd_batch *batch, uint8_t *bytes,
                            bool patch_in_place, uint32_t flags, int64_t guard, int64_t now_ms,
                            struct mqd_stage_result *result);
uint32_t mqd_partition_staged_count(const struct mqd_partition *partition);

/* Of a retired partition (server/redirect.h): what its producer state says of an idempotent
 * producer's batch. 0: it would be staged; 45, 46, 47, 48; *duplicate: it has it, at *base_offset.
 * Nothing is staged, nobody is verified. */
int16_t mqd_partition_look(const struct mqd_partition *partition, const struct mqd_batch *batch, bool *duplicate,
                           int64_t *base_offset);
/* This batch of an idempotent producer was refused for the moment; was one before it refused, so
 * that this one may not come first? Only of a producer that is not known here. Bounded: the oldest
 * is forgotten, and then any sequence is taken. */
void mqd_partition_note_refused(struct mqd_partition *partition, const struct mqd_batch *batch, int64_t now_ms);
bool mqd_partition_refused_before(const struct mqd_partition *partition, const struct mqd_batch *batch);
/* staged batches count */
bool mqd_partition_in_transaction(const struct mqd_partition *partition, int64_t producer_id);
/* the log's end when what is staged is written */
int64_t mqd_partition_staged_end(const struct mqd_partition *partition);
/* Writes what is staged; rolls first or in between where needed. 0; -1 with errno (ENOSPC, EDQUOT,
 * EMFILE, ENFILE, ENOMEM: retriable, state is as before, unless the partition is fenced; others:
 * the caller fences the log directory). *rolled is set when a new segment was started. */
int mqd_partition_write(struct mqd_partition *partition, int64_t now_ms, bool *rolled);

/* True once after a write has created a .txnindex: readers must hear of it (the slot's
 * segments_generation) before they hear of the positions. */
bool mqd_partition_take_created(struct mqd_partition *partition);

/* Fills log_start, log_end, durable and their segments; the high watermark too, for a single
 * replica: = durable (flush_on_ack) or log end; and the last stable offset: the high watermark, or
 * where the oldest transaction began that is ongoing or whose marker is not below the high
 * watermark (not below the log start). */
void mqd_partition_positions(const struct mqd_partition *partition, struct mqd_positions *out);
bool mqd_partition_dirty(const struct mqd_partition *partition); /* something written is not flushed */
int64_t mqd_partition_dirty_bytes(const struct mqd_partition *partition);

/* What a flush must cover, at most 4 descriptors: dirty segment files, then the directory when a
 * segment was created. Returns the count; 0 = clean, or the directory could not be opened: then it
 * is fenced, or still dirty when descriptors had run out (try again). One sync at a time per
 * partition. The fds stay valid until mqd_partition_sync_done. */
struct mqd_sync_fd {
    int fd;
    bool directory;
};
int mqd_partition_sync_begin(struct mqd_partition *partition, struct mqd_sync_fd out[4]);
void mqd_partition_sync_done(struct mqd_partition *partition, int error);
bool mqd_partition_syncing(const struct mqd_partition *partition);
/* Sealed segments wait for a flush that has not begun; crowded: so many files that soon a roll
 * would have to flush, and wait for it, itself. */
bool mqd_partition_sealed_waiting(const struct mqd_partition *partition);
bool mqd_partition_sync_crowded(const struct mqd_partition *partition);

/* Preallocation wanted now? fills a job for a helper thread: fallocate(fd, FALLOC_FL_KEEP_SIZE,
 * offset, size); done tells the outcome. One at a time. */
struct mqd_preallocation {
    int fd;
    int64_t offset;
    int64_t size_bytes;
};
bool mqd_partition_preallocate_begin(struct mqd_partition *partition, struct mqd_preallocation *out);
void mqd_partition_preallocate_done(struct mqd_partition *partition, int error);

/* >0: errno style on failure as for write. */
int mqd_partition_roll(struct mqd_partition *partition, int64_t now_ms);
/* New log start, at most log end; whole segments below it leave the list (files stay; names below
 * the returned base offset may be unlinked). Returns 1 when segments were dropped, else 0. */
int mqd_partition_advance_start(struct mqd_partition *partition, int64_t offset);
/* Compaction made one segment, named by `first`, of those from `first` to `last` (both inclusive):
 * the others leave the list. All of them must be sealed, and lie wholly below the high watermark
 * and what is flushed. Returns how many left it; -1 MQD_E_STALE: they are not (all) in the list any
 * more. In log/compaction/swap.c. */
int mqd_partition_replace_segments(struct mqd_partition *partition, int64_t first, int64_t last);
int mqd_partition_may_replace(const struct mqd_partition *partition, int64_t first, int64_t last);
void mqd_partition_set_options(struct mqd_partition *partition, const struct mqd_log_options *options);
const struct mqd_log_options *mqd_partition_options(const struct mqd_partition *partition);
void mqd_partition_set_leader_epoch(struct mqd_partition *partition, int32_t leader_epoch);
int32_t mqd_partition_leader_epoch(const struct mqd_partition *partition);
const char *mqd_partition_path(const struct mqd_partition *partition);
/* Called now and then (seconds): forgets producers idle longer than the limit; gives back what a
 * partition without writes holds (reserved blocks, index descriptors, staging memory). Returns how
 * many producers remain. */
uint32_t mqd_partition_expire_producers(struct mqd_partition *partition, int64_t now_ms);
/* A producer snapshot as bytes (malloc'd; caller frees) and the offset it stands for; NULL when
 * nothing changed since the last. Written by a helper thread (mqd_file_replace, %020d.snapshot).
 * Two are kept: the one before the last is deleted here. Due after each roll at least: recovery
 * reads on from the last one. */
uint8_t *mqd_partition_snapshot(struct mqd_partition *partition, size_t *size_bytes, int64_t *offset);
void mqd_partition_fence(struct mqd_partition *partition);
bool mqd_partition_fenced(const struct mqd_partition *partition);

#endif
