/* The memory that the processes of one broker share: the control segment and the links.
 *
 * The keeper formats them; every other process attaches and is refused when the layout differs.
 * Offsets only, never pointers: each process maps a segment at its own address.
 *
 * Control segment:
 *   0     struct mqd_control_header (4 KiB): written by the keeper, except single words with other
 *         owners (see below)
 *   4096  struct mqd_blob api_versions[8]: prepared ApiVersions bodies by version; written by the
 *         acceptor, read by workers
 *   ...   struct mqd_endpoint_slot[66], one for each endpoint: each cache line names its writer
 *   ...   struct mqd_worker_stats[64]: each worker writes its own; the acceptor reads them
 *         (metrics)
 *   ...   struct mqd_partition_slot[MQD_PARTITION_SLOT_COUNT]: each cache line names its writer
 *   ...   struct mqd_quota_table: rules are written by the controller, buckets by workers and
 *         acceptor (shm/quota.h)
 *   ...   struct mqd_tally_table: connections by address and listener, counted by workers
 *         (shm/tally.h)
 *
 * Links segment:
 *   struct mqd_ring x endpoint_count^2, index from * endpoint_count + to; writer `from`, reader
 *   `to`
 *
 * Endpoints: 0 .. worker_count-1 the workers, worker_count the acceptor, worker_count+1 the
 * controller.
 *
 * Invariants
 *   L1  the keeper stores magic last (release); a process that reads it (acquire) sees a complete
 *       header.
 *   L2  a partition slot's positions are published by double copy: the owner writes the inactive
 *       copy, then release-stores `version`. A writer killed half-way leaves the active copy
 *       intact, so no reader waits for a dead writer.
 *   L3  a word has one writer, unless its comment names several. Several writers use atomic
 *       operations (fetch_or, fetch_add, exchange, compare-and-swap); or they use plain stores of
 *       whole values, if it suffices that the last store wins (`log_level`, `refused_ms`).
 */
#ifndef MQD_SHM_LAYOUT_H
#define MQD_SHM_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "native.h" /* mqd_positions, mqd_partition_view, mqd_descriptor, limits */
#include "shm/api.h"

#define MQD_CONTROL_MAGIC 0x314c52544344514dull /* "MQDCTRL1" */
#define MQD_LAYOUT_VERSION 2u
#define MQD_CACHE_LINE 64
#define MQD_BLOB_BYTES_MAX 4080
#define MQD_API_VERSIONS_BLOB_COUNT 8
#define MQD_SLOT_FOLLOWER_COUNT_MAX 10

struct mqd_control_header {
    uint64_t magic; /* written by the keeper as the last store of the formatting */
    uint32_t layout_version;
    uint32_t worker_count;
    uint64_t abi_hash; /* hash of the layout: offset and size of every field in this file and in the descriptor */
    uint8_t boot_id[16];
    uint64_t generation; /* of the keeper process: a new keeper never reuses one */
    uint64_t total_bytes;
    uint32_t partition_slot_count;
    uint32_t reserved0;
    int64_t created_ms;
    uint8_t pad0[MQD_CACHE_LINE - 8];

    /* line: written by the controller, read by all */
    uint64_t metadata_version; /* version of the image that every worker has applied */
    int64_t broker_epoch;
    uint64_t incarnation;
    int64_t lease_deadline_ns; /* CLOCK_BOOTTIME; INT64_MAX while the quorum is this host alone */
    uint32_t log_level;        /* written by keeper and acceptor; syslog numbering 0..7 */
    uint32_t share_version;    /* written by the acceptor: 1 = the cluster has share groups, 0 = not */
    uint8_t pad1[MQD_CACHE_LINE - 40];

    /* line: any worker increments this word (atomic add) when one of its partitions rolls, deletes
     * or truncates a segment */
    uint64_t segments_generation;
    uint8_t pad2[MQD_CACHE_LINE - 8];

    uint8_t pad3[4096 - 4 * MQD_CACHE_LINE];
};

/* A small value with one writer, published by double copy like a partition's positions. */
struct mqd_blob {
    uint64_t version; /* even/odd selects the copy; 0 = never written */
    uint32_t size_bytes[2];
    uint8_t bytes[2][MQD_BLOB_BYTES_MAX];
    uint8_t pad[8192 + 64 - 16 - 2 * MQD_BLOB_BYTES_MAX];
};

struct mqd_endpoint_slot {
    /* line 0: written by the keeper */
    uint32_t state; /* enum mqd_process_state */
    int32_t pid;
    uint64_t generation; /* incremented when the process has died: its descriptors and buffers become invalid */
    uint8_t pad0[MQD_CACHE_LINE - 16];
    /* line 1: the endpoint itself writes `sleeping` (seq_cst); peers exchange it to 0 when they
     * wake it */
    uint32_t sleeping;
    uint8_t pad1[MQD_CACHE_LINE - 4];
    /* line 2: written by the endpoint */
    uint32_t connection_count;
    uint32_t partition_count;
    uint64_t unused;
    uint8_t pad2[MQD_CACHE_LINE - 16];
    uint8_t pad3[MQD_CACHE_LINE];
};

/* Latencies: a value v in microseconds is counted in bucket floor(log2(v|1)) * 4 + the next two
 * bits of v; 128 buckets reach 2^32 us. */
#define MQD_HISTOGRAM_BUCKET_COUNT 128
struct mqd_worker_stats {
    uint64_t counter[64];                               /* enum mqd_counter */
    uint64_t histogram[12][MQD_HISTOGRAM_BUCKET_COUNT]; /* enum mqd_histogram */
};

struct mqd_partition_slot {
    /* lines 0 and 1: the two copies; the owner writes the inactive one */
    struct mqd_positions positions[2];
    /* line 2: the owner writes `version` and `segments_generation`. The controller writes all words
     * whose comments name no writer, while the slot has no owner or when the leader changes, under
     * the seqlock `identity_version` (odd while it writes) */
    uint64_t version;
    uint64_t segments_generation;
    uint8_t topic_id[16];
    uint32_t identity_version;
    int32_t partition_index;
    int32_t leader_epoch;
    uint16_t owner;  /* worker index; MQD_OWNER_NONE = none */
    uint8_t state;   /* enum mqd_slot_state */
    uint8_t log_dir; /* index in log.dirs */
    uint64_t owner_generation;
    uint8_t compacted;      /* written by the owner: every record needs a key (cleanup.policy) */
    uint8_t role;           /* written by the owner: enum mqd_slot_role */
    uint8_t latest_pending; /* owner writes: the latest offset may not be returned yet */
    /* owner writes: this replica is a follower and not in sync; records that it lacks are read from
     * other replicas */
    uint8_t lagging;
    uint8_t validation;    /* owner writes: enum mqd_record_validation */
    uint8_t flush_on_ack;  /* owner writes: a batch is acknowledged only after a flush */
    uint8_t flush_awaited; /* any process stores 1; the owner exchanges it to 0 and notifies all by MQD_LINK_FLUSHED */
    /* incremented when the owner aborts on a broken invariant while it opens the partition */
    uint8_t recovery_aborts;
    /* line 3: workers set their bit (fetch_or seq_cst) before they park; the owner exchanges the
     * word to 0 and notifies these workers by link */
    uint64_t waiters;
    /* owner writes, each word independently: node ids of the other in-sync replicas, as many as fit
     * (server/fetch/nearest.c) */
    uint32_t in_sync_follower_count;
    int32_t in_sync_followers[MQD_SLOT_FOLLOWER_COUNT_MAX];
    /* owner writes, each word independently: how clients' batches must be compressed (struct
     * mqd_log_options), and how large a batch may be */
    int32_t compression_level;
    int32_t message_bytes_max;
    uint8_t compression;
    uint8_t share_priority; /* owner writes: priority for ShareFetch (struct mqd_log_options) */
    uint8_t pad3[MQD_CACHE_LINE - 22 - 4 * MQD_SLOT_FOLLOWER_COUNT_MAX];
    /* line 4: clients' traffic with this host's replica since the partition was put into the slot;
     * only for metrics. The owner counts what it appends, every worker adds what it sends */
    uint64_t records_in;
    uint64_t bytes_in;
    uint64_t bytes_out;
    /* any worker writes: when it last refused a batch that the producer will resend; 0 = never */
    int64_t refused_ms; /* CLOCK_MONOTONIC */
    /* owner writes, when it publishes positions: the epoch of the record at the log start; -1 = the
     * log is empty */
    int32_t log_start_epoch;
    uint8_t pad4[MQD_CACHE_LINE - 36];
};

_Static_assert(sizeof(struct mqd_control_header) == 4096, "header is one page");
_Static_assert(sizeof(struct mqd_positions) == MQD_CACHE_LINE, "one line per copy");
_Static_assert(sizeof(struct mqd_partition_slot) == 5 * MQD_CACHE_LINE, "five lines");
_Static_assert(sizeof(struct mqd_endpoint_slot) == 4 * MQD_CACHE_LINE, "four lines");
_Static_assert(sizeof(struct mqd_descriptor) == MQD_CACHE_LINE, "a descriptor is a cache line");

struct mqd_control_header *mqd_control_header(void *control);
struct mqd_blob *mqd_control_api_versions(void *control, uint32_t version);
struct mqd_endpoint_slot *mqd_control_endpoint(void *control, uint32_t endpoint);
struct mqd_worker_stats *mqd_control_stats(void *control, uint32_t worker);
struct mqd_partition_slot *mqd_control_partition(void *control, uint32_t slot);

/* Called by the owner only. Publishes `positions` (release); readers see either the old or the new
 * eight words, never a mixture. */
void mqd_slot_publish(struct mqd_partition_slot *slot, const struct mqd_positions *positions);
/* Called by the owner when it appends a client's batch. */
void mqd_slot_count_in(struct mqd_partition_slot *slot, uint64_t records, uint64_t bytes);
/* Called by any worker when it sends bytes of records to a client. */
void mqd_slot_count_out(struct mqd_partition_slot *slot, uint64_t bytes);
/* Reads the positions that were published last. Any process may call it. */
void mqd_slot_positions(const struct mqd_partition_slot *slot, struct mqd_positions *out);

/* Blobs, published by double copy. _write is called by the blob's only writer; it returns -1 if
 * size_bytes > MQD_BLOB_BYTES_MAX. _read copies at most `capacity` bytes; it returns the blob's
 * size, or -1 if the blob was never written. */
int mqd_blob_write(struct mqd_blob *blob, const void *bytes, uint32_t size_bytes);
int mqd_blob_read(const struct mqd_blob *blob, void *out, uint32_t capacity);

#endif
