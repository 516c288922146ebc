/* One partition's log: staging, writing, flushing, rolling. Single-threaded: used by the reactor
 * that owns it, or by the thread that opens or closes it.
 *
 * A record batch goes through stage -> write -> (sync):
 *   stage    checks the producer's sequence, assigns the base offset, puts the base offset and the
 *            leader epoch into the first 16 bytes; nothing is on disk
 *   write    one pwritev of all staged batches; afterwards they are below log_end
 *   sync     sync_begin returns the file descriptors to flush, the backend flushes them off this
 *            thread, and sync_done advances durable_offset
 *
 * Invariants
 *   P1  bytes below the published high watermark are never rewritten.
 *   P2  a failed write leaves log end, indexes, leader epochs and producer state as they were
 *       before its batches were staged (the file is truncated; its descriptor stays open, because a
 *       flush may use it).
 *   P3  after a failed sync the partition is fenced permanently (in this process): nothing is
 *       retried.
 *   P4  durable_offset never exceeds what was covered by a completed sync that began after the
 *       write.
 *   P5  the last stable offset never decreases while the log start is unchanged, and every aborted
 *       transaction below it is in a .txnindex.
 */
#ifndef MQD_PARTITION_H
#define MQD_PARTITION_H

#include <sys/uio.h>

#include "native.h"

#define MQD_STAGE_COUNT_MAX 448 /* batches of one write; two iovecs each stay under IOV_MAX */
#define MQD_STAGE_FULL (-1)     /* too many batches are staged: write, then stage again */
/* nothing was staged: the transaction's coordinator must verify the batch; then stage again with
 * result->guard */
#define MQD_STAGE_VERIFY (-2)

#define MQD_STAGE_REDIRECT (-3) /* returned by a retired partition's owner, not by the partition: server/redirect.h */
/* nothing was staged: MQD_STAGE_REQUIRE_KNOWN was set, and the producer is not known here */
#define MQD_STAGE_UNKNOWN (-4)

enum mqd_stage_flags {
    /* from a coordinator: control batches are allowed; sequences and verification are not
     * checked */
    MQD_STAGE_COORDINATOR = 1,
    /* a marker of transactions v2 (KIP-890): its producer epoch must be above the known one, not
     * equal to it */
    MQD_STAGE_MARKER_BUMPED = 2,
    MQD_STAGE_REDIRECTED = 4, /* batch->producer_id is not the one in `bytes`, and is written instead of it */
    /* an idempotent producer's batch is staged only if sequences of the producer, in its epoch, are
     * known here */
    MQD_STAGE_REQUIRE_KNOWN = 8,
    /* a batch of transactions v2, where every transaction has its own epoch: if no sequence of the
     * producer is known, the first batch must have sequence 0 */
    MQD_STAGE_FROM_ZERO = 16
};

struct mqd_stage_result {
    int64_t base_offset;
    int64_t log_append_time_ms; /* -1 unless message.timestamp.type=LogAppendTime */
    /* already in the log, or already staged: nothing was staged, and base_offset is that of the
     * original. The response waits until the original is written and, with flush_on_ack, until
     * durable_offset has passed it. */
    bool duplicate;
    int64_t end_offset; /* after the batch, or after what it duplicates */
    /* records not written because earlier ones have the same ids (log/dedup/dedup.h). If all
     * records were left out, base_offset is that of an earlier record with one of their ids. */
    uint32_t left_out_count;
    const char *message; /* static; set with an error, if there is more to say */
    int64_t guard;       /* with MQD_STAGE_VERIFY: to be passed when the verified batch is staged again; never 0 */
};

/* `bytes` is the whole validated batch; it must stay readable until the write. patch_in_place: the
 * header may be changed in place, because the batch is in this process's own arena; otherwise the
 * first 16 (or 61) bytes are copied and patched. Returns a Kafka error code:
 *
 *   0   staged
 *   10  MESSAGE_TOO_LARGE
 *   18  RECORD_LIST_TOO_LARGE (larger than a segment)
 *   19  NOT_ENOUGH_REPLICAS (the guard is not known here: the transaction may have ended since it
 *       was verified; or a record's id belongs to an undecided transaction. The client retries)
 *   32  INVALID_TIMESTAMP
 *   44  POLICY_VIOLATION (read-only)
 *   45  OUT_OF_ORDER_SEQUENCE_NUMBER
 *   46  DUPLICATE_SEQUENCE_NUMBER
 *   47  INVALID_PRODUCER_EPOCH
 *   48  INVALID_TXN_STATE (a batch outside the producer's ongoing transaction)
 *   52  TRANSACTION_COORDINATOR_FENCED (a marker of an older coordinator)
 *   56  KAFKA_STORAGE_ERROR (the partition is fenced)
 *   59  UNKNOWN_PRODUCER_ID (sequences of a transaction that has ended)
 *   87  INVALID_RECORD (a control batch from a client, or one that is not a transaction marker; a
 *       record without the id that the topic requires)
 *
 * or MQD_STAGE_FULL, MQD_STAGE_VERIFY, MQD_STAGE_UNKNOWN. flags: enum mqd_stage_flags. guard: 0 =
 * not verified, otherwise the result->guard that was verified for this batch. now_ms: wall clock,
 * for LogAppendTime and timestamp limits. */
int16_t mqd_partition_stage(struct mqd_partition *partition, const struct mqd_batch *batch, uint8_t *bytes,
                            bool patch_in_place, uint32_t flags, int64_t guard, int64_t now_ms,
                            struct mqd_stage_result *result);
uint32_t mqd_partition_staged_count(const struct mqd_partition *partition);

/* For a retired partition (server/redirect.h): checks an idempotent producer's batch against the
 * partition's producer state. Returns 0 if the batch would be staged, otherwise 45, 46, 47, 48 or
 * 59. *duplicate: the batch is already in the log, at *base_offset. Stages nothing and verifies
 * nothing. */
int16_t mqd_partition_check_sequence(const struct mqd_partition *partition, const struct mqd_batch *batch,
                                     bool *duplicate, int64_t *base_offset);
/* note_refused records that this batch of an idempotent producer was refused temporarily.
 * refused_before returns whether an earlier one was refused, so that this one must not become the
 * producer's first batch. Both are only for a producer that is unknown here. If there are too many
 * entries, the oldest is dropped, and any sequence of its producer is then accepted. */
void mqd_partition_note_refused(struct mqd_partition *partition, const struct mqd_batch *batch, int64_t now_ms);
bool mqd_partition_refused_before(const struct mqd_partition *partition, const struct mqd_batch *batch);
/* Whether this batch of an idempotent producer, whose sequence is not 0, must be refused because an
 * earlier one may have been refused before it reached this log. Only for a producer that is unknown
 * here: the first of its batches to arrive is noted as refused. If the producer sends that same
 * batch again, it has nothing earlier to send, and the batch may be its first. */
bool mqd_partition_may_overtake(struct mqd_partition *partition, const struct mqd_batch *batch, int64_t now_ms);
/* whether the producer has an ongoing transaction; staged batches count */
bool mqd_partition_in_transaction(const struct mqd_partition *partition, int64_t producer_id);
/* the log's end once the staged batches are written */
int64_t mqd_partition_staged_end(const struct mqd_partition *partition);
/* Writes the staged batches; rolls before or between them where needed. Returns 0, or -1 with
 * errno. ENOSPC, EDQUOT, EMFILE, ENFILE and ENOMEM are retriable: the state is as before, unless
 * the partition is fenced. After other errors the caller fences the log directory. *rolled is set
 * when a new segment was started. */
int mqd_partition_write(struct mqd_partition *partition, int64_t now_ms, bool *rolled);

/* True once after a write has created a .txnindex: readers must be notified of it (the slot's
 * segments_generation) before the positions are published. */
bool mqd_partition_take_txn_index_created(struct mqd_partition *partition);

/* The position up to which the active segment has disk blocks, reserved ahead or written. */
int64_t mqd_partition_allocated_bytes(const struct mqd_partition *partition);

/* The high watermark of a single replica is durable_offset (flush_on_ack) or log end; with several
 * replicas it is set from outside (log/partition_follow.h). The last stable offset is the high
 * watermark, or, if lower, the first offset of the oldest transaction that is ongoing or whose
 * marker is not below the high watermark (but not below the log start). */
void mqd_partition_positions(const struct mqd_partition *partition, struct mqd_positions *out);
/* the leader epoch of the record at the log start; -1 = the log is empty */
int32_t mqd_partition_log_start_epoch(const struct mqd_partition *partition);
bool mqd_partition_dirty(const struct mqd_partition *partition); /* written data is not flushed yet */
int64_t mqd_partition_dirty_bytes(const struct mqd_partition *partition);

/* Fills in the descriptors that a flush must cover, at most 4: dirty segment files, then the
 * directory when a segment was created. Returns the count. 0 = clean, or the directory could not be
 * opened: the partition is then fenced, or still dirty when no descriptors were left (try again).
 * One sync at a time per partition. The fds stay valid until mqd_partition_sync_done. */
struct mqd_sync_fd {
    int fd;
    bool is_directory;
};
int mqd_partition_sync_begin(struct mqd_partition *partition, struct mqd_sync_fd out[4]);
void mqd_partition_sync_done(struct mqd_partition *partition, int error);
bool mqd_partition_syncing(const struct mqd_partition *partition);
/* has_waiting_segments: sealed segments wait for a flush that has not begun. sync_queue_nearly_full:
 * so many files wait that the next roll may have to flush synchronously. */
bool mqd_partition_has_waiting_segments(const struct mqd_partition *partition);
bool mqd_partition_sync_queue_nearly_full(const struct mqd_partition *partition);

/* Returns whether preallocation is due, and if so fills in a job for a helper thread: fallocate(fd,
 * FALLOC_FL_KEEP_SIZE, offset, size). preallocate_done reports its outcome. One job at a time. */
struct mqd_preallocation {
    int fd;
    int64_t offset;
    int64_t size_bytes;
};
bool mqd_partition_preallocate_begin(struct mqd_partition *partition, struct mqd_preallocation *out);
void mqd_partition_preallocate_done(struct mqd_partition *partition, int error);

/* Returns 0, or -1 with errno as mqd_partition_write does. */
int mqd_partition_roll(struct mqd_partition *partition, int64_t now_ms);
/* Sets a new log start, at most log end. Whole segments below it are removed from the list; their
 * files stay, and the caller may unlink them. Returns 1 when segments were removed, otherwise 0. */
int mqd_partition_advance_start(struct mqd_partition *partition, int64_t offset);
/* Compaction merged the segments from `first` to `last` (both inclusive) into one, named by
 * `first`: the others are removed from the list. All of them must be sealed and wholly below the
 * high watermark and the flushed end. Returns how many were removed; -1 MQD_E_STALE: some of them
 * are no longer in the list. In log/compaction/swap.c. */
int mqd_partition_replace_segments(struct mqd_partition *partition, int64_t first, int64_t last);
/* Returns how many segments mqd_partition_replace_segments would remove; -1 MQD_E_STALE. */
int mqd_partition_count_replaceable(const struct mqd_partition *partition, int64_t first, int64_t last);
void mqd_partition_set_options(struct mqd_partition *partition, const struct mqd_log_options *options);
const struct mqd_log_options *mqd_partition_options(const struct mqd_partition *partition);
void mqd_partition_set_leader_epoch(struct mqd_partition *partition, int32_t leader_epoch);
int32_t mqd_partition_leader_epoch(const struct mqd_partition *partition);
const char *mqd_partition_path(const struct mqd_partition *partition);
/* Called every few seconds: forgets producers idle longer than the limit. Returns how many producers
 * remain. */
uint32_t mqd_partition_do_periodic_work(struct mqd_partition *partition, int64_t now_ms);
/* release_due: the partition has not been written to for 10 s and holds resources (reserved blocks,
 * index descriptors, staging memory). release_idle releases them, with several system calls that
 * change its files; what the disk refuses to release is due again 10 s later. */
bool mqd_partition_release_due(const struct mqd_partition *partition, int64_t now_ms);
void mqd_partition_release_idle(struct mqd_partition *partition, int64_t now_ms);
/* Returns the bytes of a producer snapshot (malloc'd; the caller frees) and sets *offset; returns
 * NULL when nothing changed since the last snapshot. A helper thread writes the file
 * (mqd_file_replace, %020d.snapshot). The two newest files are kept; the next older one is deleted
 * here. Call it at least after each roll: recovery starts from the last snapshot. */
uint8_t *mqd_partition_snapshot(struct mqd_partition *partition, size_t *size_bytes, int64_t *offset);
void mqd_partition_fence(struct mqd_partition *partition);
bool mqd_partition_fenced(const struct mqd_partition *partition);

#endif
