/* The partitions that this worker owns and the log directories that hold them. Private to the
 * reactor thread.
 */
#ifndef MQD_OWNED_H
#define MQD_OWNED_H

#include "base/list.h"
#include "log/partition.h"
#include "log/partition_follow.h"

/* DUE: work in flight on the files must end first, and no new work begins. UNDER_WAY: a helper
 * thread truncates the log, and no other thread uses the partition. */
enum mqd_truncation_state { MQD_TRUNCATION_NONE, MQD_TRUNCATION_DUE, MQD_TRUNCATION_UNDER_WAY };

struct mqd_owned {
    struct mqd_partition *partition;
    uint32_t slot;
    uint32_t log_dir;
    struct mqd_node staged;                     /* appends that the next write includes */
    struct mqd_node waiting;                    /* appends written but not yet acknowledged; ordered by end_offset */
    struct mqd_node write_node;                 /* in reactor->to_write */
    struct mqd_node publish_node;               /* in reactor->to_wake */
    struct mqd_node sync_node;                  /* in log_dir->to_sync */
    struct mqd_node release_node;               /* in reactor->to_release */
    struct mqd_node waiting_records_node;       /* in reactor->with_waiting_records */
    int64_t high_watermark, last_stable_offset; /* last published */
    int64_t dirty_since_ms;
    int64_t sync_started_ns;
    uint32_t syncs_pending; /* fsync calls of the flush that is running */
    int sync_error;
    uint8_t closing, preallocating, in_syncfs, snapshotting;
    uint8_t truncating; /* enum mqd_truncation_state; meanwhile commands for the partition wait in `deferred` */
    uint8_t throttled;  /* copied from the replica assignment */
    /* a roll was requested while the active segment was empty or the log was busy: the log rolls
     * after the next write */
    uint8_t roll_due;
    /* like mqd_partition_replicated: the partition has, or may have, other replicas
     * (server/replication/leading.c) */
    uint8_t replicated;
    uint8_t retiring;      /* enum mqd_retiring; when set, the next four fields are valid (server/redirect.h) */
    int32_t retired_epoch; /* the leader epoch in the metadata that set `retiring` */
    /* slot of the partition that takes its records; MQD_SLOT_NONE: that partition is not on this
     * host */
    uint32_t redirect_slot, redirect_index;
    int64_t sealed_end;       /* records appended before the partition was sealed have offsets below this */
    int64_t used_reported_ms; /* when MQD_EVENT_RETIRED_USED was last sent */
    uint64_t close_token;
    struct mqd_node followers_waiting;      /* mqd_fetch_entry.waiter of followers' fetches */
    int64_t woken_log_start, woken_log_end; /* log start and end when these fetches were last woken */
    /* NULL: this is the only replica, and it leads (server/replication/replication.c) */
    struct mqd_replica *replica;
    struct mqd_followed *followed;             /* while this worker follows (server/replication/fetcher.h) */
    uint32_t leader_worker;                    /* the worker that owns the partition on the leader's host */
    struct mqd_command *deferred;              /* in order, by `next` */
    struct mqd_truncation_job *truncation_job; /* while the log is truncated */
    uint32_t truncation_count;                 /* truncations that removed something or restarted the log */
    uint8_t truncation_held;                   /* compaction is replacing files: no truncation begins */
};

struct mqd_log_directory {
    char *path;
    bool failed, full;
    bool full_reported; /* MQD_EVENT_LOG_DIR_FULL was sent */
    int fd;             /* for syncfs */
    bool syncfs_running;
    struct mqd_node to_sync; /* owned partitions waiting for a flush */
    uint32_t to_sync_count;
    uint32_t busy_count;       /* owned partitions with at least MQD_BUSY_BYTES unflushed, at the last check */
    struct mqd_node in_syncfs; /* partitions that the running syncfs covers */
};

struct mqd_reactor;
/* server/owner.c */
int mqd_owner_roll(struct mqd_reactor *r, struct mqd_owned *owned); /* 0 or errno */
void mqd_owner_on_roll(struct mqd_reactor *r, uint32_t slot);       /* MQD_LINK_ROLL */
/* server/replication/leading.c: when to check next for slow in-sync members; -1 = never */
int64_t mqd_leading_next_ms(const struct mqd_reactor *r);

#endif
