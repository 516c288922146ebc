/* The internal state of a partition's log, shared only by log/partition*.c, log/compaction/swap.c
 * and log/recovery/.
 *
 * Open files of one partition: the active .log always; its two index files while it is busy; sealed
 * files until a sync has covered them; never the directory.
 *
 * Invariants, in addition to those of log/partition.h
 *   S1  segments[segment_count - 1] == active.base_offset; the base offsets are strictly
 *       increasing.
 *   S2  active.size_bytes is the file's size and log_end_offset the end of its last batch, except
 *       inside mqd_partition_write.
 *   S3  sync_queue holds, in order of writing, the sealed files that no sync has covered yet; an
 *       item with a mark is queued after all files that must be flushed before the mark's position
 *       is durable.
 *   S4  with one replica: without flush_on_ack, durable <= high watermark. Both only increase.
 *   S5  the sync queue holds a descriptor of every .txnindex that was written since the running
 *       sync began.
 */
#ifndef MQD_PARTITION_STATE_H
#define MQD_PARTITION_STATE_H

#include "base/assert.h"
#include "log/dedup/dedup.h"
#include "log/epochs.h"
#include "log/index.h"
#include "log/partition.h"
#include "log/producers.h"
#include "log/segment.h"
#include "log/txn_index.h"
#include "wire/kafka_errors.h"

/* the capacity of sync_queue; when it is full, a roll flushes synchronously */
#define MQD_SYNC_QUEUE_MAX 16
#define MQD_STAGE_CHUNK_COUNT 16        /* batches; chunks are allocated on demand and freed when idle */
#define MQD_SEGMENT_BYTES_MAX INT32_MAX /* positions in .index are int32 */

/* a position in the log: offset, segment and byte position */
struct mqd_mark {
    int64_t offset;
    int64_t segment;
    uint32_t position;
    int64_t written_bytes; /* the partition's written_bytes at this position */
};

#define MQD_MARK_COUNT_MIN 8
#define MQD_MARK_COUNT_MAX 256
/* For a partition with several replicas: positions to which the high watermark may move, ascending,
 * all above the current one. When there are too many, every second one is dropped. */
struct mqd_marks {
    uint32_t head, count, capacity; /* capacity: MQD_MARK_COUNT_MIN, doubled up to MQD_MARK_COUNT_MAX */
    struct mqd_mark ring[];
};

struct mqd_staged {
    uint8_t *bytes;
    uint8_t header[MQD_BATCH_HEADER_BYTES];
    uint8_t header_bytes;   /* size of `header`, which replaces the first bytes of `bytes`; 0 = patched in place */
    struct mqd_batch batch; /* as it will be in the log */
    uint8_t *rewritten;     /* the same pointer as `bytes`, malloc'd, if the broker left records out; otherwise NULL */
    struct mqd_producer_undo undo;
    /* set for the abort marker of a transaction that has batches here; otherwise producer_id =
     * -1 */
    struct mqd_aborted aborted;
};

/* The batches of the next write; see mqd_partition_staged_at. */
struct mqd_stage {
    struct mqd_staged *chunks[MQD_STAGE_COUNT_MAX / MQD_STAGE_CHUNK_COUNT];
};

/* the segment that is appended to */
struct mqd_active {
    int fd;
    int64_t base_offset;
    int64_t size_bytes;
    int64_t allocated_bytes;    /* blocks are reserved up to this position; >= size_bytes */
    int64_t first_timestamp_ms; /* largest timestamp of the first batch; -1 = none */
    int64_t first_append_ms;    /* wall clock when the first batch was written; -1 = the segment is empty */
    struct mqd_txn_index txn_index;
    struct mqd_index index; /* must be the last field: see plan_run */
};

struct mqd_sync_item {
    int fd;
    bool has_mark;
    int64_t segment; /* -1: the file belongs to no segment */
    enum mqd_file_kind kind;
    bool is_epoch_checkpoint;
    struct mqd_mark mark;
};

struct mqd_partition {
    char *path;
    struct mqd_log_options options;
    int32_t leader_epoch;
    bool fenced;
    bool has_gaps;      /* offsets may be missing between batches: the log is, or was, compacted */
    bool gaps_recorded; /* the file that records has_gaps is on disk */
    int64_t log_start_offset, log_end_offset;
    int64_t *segments;
    uint32_t segment_count, segment_capacity;
    struct mqd_active active;
    int64_t written_bytes; /* written by this object in total; dirty bytes are a difference of two such values */
    /* written_bytes at the end of the last segment that was deleted before it was flushed */
    int64_t deleted_up_to_bytes;
    int64_t last_write_ms, last_release_ms; /* last_release_ms: when mqd_partition_release_idle last ran */

    struct mqd_stage *stage; /* NULL while the partition is idle */
    uint32_t staged_count;
    int64_t staged_end_offset;

    struct mqd_mark durable, high_watermark;
    /* several replicas: the high watermark is set from outside, not computed
     * (log/partition_marks.c) */
    bool replicated;
    /* of a replicated partition; NULL: none recorded (idle, or out of memory: the high watermark
     * then moves only to the log's end) */
    struct mqd_marks *marks;
    struct mqd_sync_item sync_queue[MQD_SYNC_QUEUE_MAX];
    uint32_t sync_queue_count;
    bool directory_dirty;
    bool syncing; /* the next three fields belong to the running sync */
    uint32_t sync_item_count;
    struct mqd_mark sync_mark;
    int sync_directory_fd;

    bool preallocating, preallocate_refused;   /* refused: the file system does not support it */
    int preallocate_fd;                        /* a duplicate descriptor, so that the job survives a roll */
    int64_t preallocate_base, preallocate_end; /* the running job's segment, and the position up to which it reserves */
    int64_t preallocate_step;                  /* size of the last job */
    int64_t preallocation_begun_ms;            /* when the last preallocation began */
    int64_t preallocate_above_bytes; /* no preallocation until written_bytes exceeds this; raised after a full disk */

    struct mqd_dedup *dedup;         /* NULL: the topic has no dedup.window.ms */
    uint32_t staged_rewritten_count; /* staged batches that have memory of their own */
    struct mqd_producers producers;
    struct mqd_verifications verifications;
    uint32_t staged_abort_count; /* abort markers among the staged batches: the write must append to the .txnindex */
    bool writing;                /* inside mqd_partition_write: the batches being written do not count yet */
    bool txn_index_created;      /* a .txnindex was created, and readers have not been notified yet */
    /* producers.change_count at the last snapshot */
    uint64_t snapshot_change_count;
    int64_t snapshot_offset;   /* of the last snapshot; -1 = none */
    int64_t snapshot_previous; /* of the previous one, kept in case the last one is damaged; -1 = none */
    struct mqd_epochs epochs;
    bool epochs_unwritten; /* the epoch checkpoint is out of date */
};

/* Checks what holds whenever no write is under way; every function that changes a partition ends
 * with this check. */
static inline void mqd_partition_check(const struct mqd_partition *partition)
{
    MQD_ASSERT(partition->segment_count > 0 &&
                   partition->segments[partition->segment_count - 1] == partition->active.base_offset,
               "S1: %s: the last of %u segments is not the active one, %lld", partition->path, partition->segment_count,
               (long long)partition->active.base_offset);
    MQD_ASSERT(partition->active.size_bytes >= 0 && partition->active.base_offset <= partition->log_end_offset,
               "S2: %s: active segment %lld of %lld bytes, log end %lld", partition->path,
               (long long)partition->active.base_offset, (long long)partition->active.size_bytes,
               (long long)partition->log_end_offset);
    MQD_ASSERT(partition->log_start_offset <= partition->log_end_offset &&
                   partition->high_watermark.offset <= partition->log_end_offset &&
                   partition->durable.offset <= partition->log_end_offset,
               "P4: %s: log start %lld, high watermark %lld, durable %lld, log end %lld", partition->path,
               (long long)partition->log_start_offset, (long long)partition->high_watermark.offset,
               (long long)partition->durable.offset, (long long)partition->log_end_offset);
    MQD_ASSERT(partition->staged_count ? partition->staged_end_offset > partition->log_end_offset
                                       : partition->staged_end_offset == partition->log_end_offset,
               "P2: %s: %u batches staged up to %lld, log end %lld", partition->path, partition->staged_count,
               (long long)partition->staged_end_offset, (long long)partition->log_end_offset);
    MQD_ASSERT(partition->sync_item_count <= partition->sync_queue_count &&
                   partition->sync_queue_count <= MQD_SYNC_QUEUE_MAX,
               "S3: %s: %u of %u queued files are being flushed", partition->path, partition->sync_item_count,
               partition->sync_queue_count);
}

/* The next free entry; NULL: out of memory. */
struct mqd_staged *mqd_partition_stage_next(struct mqd_partition *partition);
/* Updates the producer's state for this batch, which will begin at staged_end_offset. -1: out
 * of memory. */
int mqd_partition_stage_producer(struct mqd_partition *partition, struct mqd_staged *staged,
                                 const struct mqd_batch *batch, const struct mqd_marker *marker, int64_t now_ms);
static inline struct mqd_staged *mqd_partition_staged_at(const struct mqd_partition *partition, uint32_t i)
{
    return &partition->stage->chunks[i / MQD_STAGE_CHUNK_COUNT][i % MQD_STAGE_CHUNK_COUNT];
}
/* Drops the staged batches and undoes their producer changes. */
void mqd_partition_unstage(struct mqd_partition *partition);
/* Empties the staging area, after a commit or an undo. */
void mqd_partition_stage_reset(struct mqd_partition *partition);
void mqd_partition_stage_free(struct mqd_partition *partition);

/* Forgets transactions whose markers are below the high watermark, and makes their deduplication
 * ids final. */
void mqd_partition_settle_transactions(struct mqd_partition *partition);
struct mqd_mark mqd_partition_end_mark(const struct mqd_partition *partition);
/* One replica: moves the high watermark to durable_offset or log end. A mark at the end of a
 * deleted segment moves to the beginning of the next one. */
void mqd_partition_advance_marks(struct mqd_partition *partition);
/* Moves a mark at the end of a segment to the beginning of the next one, which has the same offset
 * and is deleted later. */
void mqd_partition_normalise_mark(const struct mqd_partition *partition, struct mqd_mark *mark);
/* Replicated: records the log's end as a position to which the high watermark may move. */
void mqd_partition_note_mark(struct mqd_partition *partition);
/* Frees the ring when it is empty. */
void mqd_partition_release_marks(struct mqd_partition *partition);
/* For a replicated partition that was just opened: sets the high watermark to `known`, which is
 * below the log's end, or to the log start if `known` is NULL. */
void mqd_partition_reset_high_watermark(struct mqd_partition *partition, const struct mqd_mark *known);
/* After a truncation of the log: drops the marks above its end and lowers the high watermark to its
 * end. */
void mqd_partition_truncate_marks(struct mqd_partition *partition);

/* Finds the end of the last batch at or below `offset`; reads the log. -1: mqd_error set. In
 * log/partition_follow.c. */
int mqd_partition_locate(const struct mqd_partition *partition, int64_t offset, struct mqd_mark *out);

/* Drops leader epochs without records in the log: a replica that knew one of them could never agree
 * with its leader on where their logs diverge. The next write updates the file. */
void mqd_partition_drop_epochs(struct mqd_partition *partition);

int mqd_partition_push_segment(struct mqd_partition *partition, int64_t base_offset);
/* Opens (and truncates) the .log of a new active segment. Returns its fd, or -1 with errno. */
int mqd_partition_create_log(const struct mqd_partition *partition, int64_t base_offset);
/* Takes ownership of the fd. Blocks in fdatasync when the queue is full. -1 with errno: that flush
 * failed, and the partition is fenced. */
int mqd_partition_queue_sync(struct mqd_partition *partition, int fd, const struct mqd_mark *mark);
/* Closes, without a flush, the queued files of segments that have been deleted, so that the kernel
 * drops what it has not written. Files of a running flush are closed when it is done.
 * durable_offset moves with the next flush. */
void mqd_partition_forget_syncs(struct mqd_partition *partition);
/* Frees reserved blocks after the end of the active segment; best effort. */
void mqd_partition_trim(struct mqd_partition *partition);
/* Seals the active segment and begins another at log end. -1 with errno: the old one is still
 * active and intact. */
int mqd_partition_roll_active(struct mqd_partition *partition);
/* Makes the snapshot at `offset` the last one, and keeps the one before it; deletes the next older
 * one (best effort: the next recovery does it too). */
void mqd_partition_rotate_snapshots(struct mqd_partition *partition, int64_t offset);
void mqd_partition_free(struct mqd_partition *partition);

#endif
