/* The partitions that this worker owns, and the log directories they lie in. Private to the reactor
 * thread.
 */
#ifndef MQD_OWNED_H
#define MQD_OWNED_H

#include "base/list.h"
#include "log/partition.h"
#include "log/partition_follow.h"

/* A truncation is due (what is under way with its files ends first, nothing more begins), or under
 * way on a helper thread: nobody else touches the partition. */
enum mqd_rest { MQD_REST_NONE, MQD_REST_DUE, MQD_REST_UNDER_WAY };

struct mqd_owned {
    struct mqd_partition *partition;
    uint32_t slot;
    uint32_t log_dir;
    struct mqd_node staged;                     /* appends that the next write covers */
    struct mqd_node waiting;                    /* appends written, not yet acknowledged; by end_offset */
    struct mqd_node write_node;                 /* in reactor->to_write */
    struct mqd_node publish_node;               /* in reactor->to_wake */
    struct mqd_node sync_node;                  /* in log_dir->to_sync */
    int64_t high_watermark, last_stable_offset; /* last published */
    int64_t dirty_since_ms;
    int64_t sync_started_ns;
    uint32_t syncs_pending; /* descriptors of the flush under way */
    int sync_error;
    uint8_t closing, preallocating, in_syncfs, snapshotting;
    uint8_t resting;   /* enum mqd_rest; commands for it wait in `deferred` meanwhile */
    uint8_t throttled; /* its assignment says so */
    /* as mqd_partition_replicated: has, or may have, other replicas (server/replication/leading.c) */
    uint8_t replicated;
    uint8_t retiring;      /* enum mqd_retiring; then the next four count (server/redirect.h) */
    int32_t retired_epoch; /* leader epoch of the step */
    /* of the partition that takes its records; MQD_SLOT_NONE: it is not on this host */
    uint32_t redirect_slot, redirect_index;
    int64_t sealed_end;   /* what was taken before it was sealed ends at or before it */
    int64_t used_told_ms; /* MQD_EVENT_RETIRED_USED */
    uint64_t close_token;
    struct mqd_node followers_waiting;    /* mqd_fetch_entry.waiter of followers' fetches */
    int64_t told_log_start, told_log_end; /* when these were woken last */
    struct mqd_replica *replica;          /* NULL: one replica, which leads (see server/replication/replication.c) */
    struct mqd_followed *followed;        /* while this worker follows (server/replication/fetcher.h) */
    uint32_t leader_worker;               /* of the leader's host: who owns it there */
    struct mqd_command *deferred;         /* in order, by `next` */
    struct mqd_cut_job *cut;              /* while it rests */
    uint32_t cut_count;                   /* cuts that took something, or began the log anew */
    uint8_t held;                         /* compaction puts files into the place of others: no cut begins */
};

struct mqd_log_directory {
    char *path;
    bool failed, full;
    bool full_told; /* the main thread knows that it is */
    int fd;         /* for syncfs */
    bool syncfs_running;
    struct mqd_node to_sync; /* owned partitions that want a flush */
    uint32_t to_sync_count;
    uint32_t busy_count;       /* owned partitions with MQD_BUSY_BYTES that are not flushed, when it was last looked */
    struct mqd_node in_syncfs; /* those that the running syncfs covers */
};

#endif
