/* State shared by the files of the reactor: connections, requests and appends. Private to the
 * reactor thread except for the command and event queues.
 *
 * One turn of the loop, in this order (mqd_reactor_turn):
 *   wait -> links in -> commands -> read ready sockets -> links in -> write staged batches ->
 *   publish -> wake readers -> flush -> links out -> answer -> send -> links out
 * so that everything that arrived in a turn costs one pwritev per partition, one flush, one send
 * per connection and one wake-up per peer.
 *
 * Invariants
 *   R1  replies leave a connection in the order of its requests (but a local client's requests that
 *       wait for leaders on other hosts may be overtaken, see server/relay/relay.h); a request is
 *       answered once.
 *   R2  a batch is acknowledged only after mqd_slot_publish made it visible, and with acks=all and
 *       flush.on.ack only after its flush.
 *   R3  arena bytes are held from the receive until the last pwritev that reads them, and no
 *       longer.
 *   R4  nothing here blocks on a disk: flushes, preallocation, read-ahead and snapshots go through
 *       mqd_poll.
 *   R5  every list, queue and buffer has a bound; a connection that reaches a bound is not read
 *       until there is room.
 */
#ifndef MQD_REACTOR_H
#define MQD_REACTOR_H

#include <netinet/in.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>

#include "base/atomic.h"
#include "base/error.h"
#include "base/list.h"
#include "io/poll.h"
#include "log/partition.h"
#include "log/partition_follow.h"
#include "log/reader/reader.h"
#include "server/api.h"
#include "server/commands.h"
#include "server/fetch/fetch.h"
#include "server/local/local.h"
#include "server/owned.h"
#include "server/relay/relay.h"
#include "server/replication/fetcher.h"
#include "server/request.h"
#include "server/topics.h"
#include "shm/layout.h"
#include "wire/kafka_errors.h"
#include "wire/wire.h"

#define MQD_EXTENT_BYTES 65536
#define MQD_CONTROL_EXTENT_BYTES 1024
#define MQD_CONTROL_REQUEST_COUNT_MAX 16384 /* below 65536: the index is 16 bits of a token */
/* while this many checks are running, a Produce that needs one gets a retriable error */
#define MQD_CHECK_COUNT_MAX 4096
#define MQD_OUT_BYTES_MAX (1u << 20) /* a connection with more unsent reply bytes than this is not read */
/* a connection whose requests and waiting replies take more than this is not read either */
#define MQD_HELD_BYTES_MAX (1u << 20)
/* Fairness: one turn reads at most this much; the rest waits for the next turn. Responses are sent
 * at the end of a turn, so without these bounds a client that sends more than the reactor can
 * handle would delay all other clients' responses until its socket is empty. */
#define MQD_READS_PER_TURN 64
#define MQD_BYTES_PER_TURN (512u << 10)
#define MQD_COMMAND_COUNT_MAX 4096
#define MQD_EVENT_COUNT_MAX (3 * MQD_COMMAND_COUNT_MAX)
/* with more dirty partitions than this in a directory, one syncfs replaces the fdatasync calls */
#define MQD_SYNCFS_PARTITION_COUNT 24
/* When to flush data that no acknowledgement waits for. Writing back pages costs CPU that the
 * reactor needs too: a flush of 64 MiB delayed acknowledgements by 20 ms, so flushes are small. But
 * when more than MQD_BUSY_COUNT_FEW partitions of a directory are busy, small flushes coincide and
 * delay acknowledgements longer than a few large ones (measured: small flushes are better with 12
 * partitions and worse with 24). */
#define MQD_BACKGROUND_FLUSH_BYTES (8ll << 20)
#define MQD_BACKGROUND_FLUSH_BYTES_BUSY (64ll << 20)
#define MQD_BUSY_COUNT_FEW 12
/* a partition with at least this much unflushed data is busy */
#define MQD_BUSY_BYTES (1ll << 20)
#define MQD_BACKGROUND_FLUSH_MS 5000
#define MQD_LOOKUP_BUCKET_COUNT 64
#define MQD_MUTE_TICK_COUNT 256
#define MQD_MUTE_TICK_MS 4
#define MQD_IN_SYNC_REPEAT_MS 1000 /* an unanswered proposal is sent again after this */
#define MQD_IN_SYNC_RETRY_MS 100   /* a refused in-sync proposal is retried after this */

enum mqd_api {
    MQD_API_PRODUCE = 0,
    MQD_API_FETCH = 1,
    MQD_API_LIST_OFFSETS = 2,
    MQD_API_METADATA = 3,
    MQD_API_API_VERSIONS = 18,
    MQD_API_SHARE_FETCH = 78,
    MQD_API_SHARE_ACKNOWLEDGE = 79
};

/* ---- descriptions of producers for the acceptor (server/describe.c) ---- */

#define MQD_DESCRIPTION_COUNT_MAX 16
/* lent to the acceptor that has this generation; `offset` is in the control arena */
struct mqd_description {
    uint64_t offset, generation;
    uint8_t used;
};

/* ---- reply cache: responses that depend only on request bytes and metadata version ---- */

#define MQD_REPLY_CACHE_COUNT 128
#define MQD_REPLY_CACHE_BYTES_MAX (8u << 20)
struct mqd_cached_reply {
    uint64_t version;
    uint64_t hash;
    uint8_t *key;
    uint32_t key_bytes;
    uint8_t *bytes;
    uint32_t size_bytes;
    uint64_t last_used;
};

struct mqd_control_entry {
    struct mqd_request *request;
    uint32_t sequence;
    uint32_t next_free;
    uint8_t *key;
    uint32_t key_bytes;
    uint64_t key_hash;
};

struct mqd_secure;
struct mqd_shares;

/* server/slow/turn.c */
struct mqd_turn_clock {
    int64_t now_ns;
    int64_t ran_ns, waited_ns; /* the thread's total time running, and waiting for a CPU */
};
struct mqd_turn {
    int schedstat_fd; /* 0 = not open */
    long disk_faults; /* disk_faults and waited_ns: the totals at the end of the last turn */
    int64_t waited_ns;
    struct mqd_turn_clock start, part_start;
    int64_t blocked_in_parts_ns, spent_ns[MQD_HISTOGRAM_COUNT];
};

struct mqd_reactor {
    struct mqd_reactor_options options;
    uint64_t generation; /* of our endpoint */
    struct mqd_endpoint_slot *slot;
    struct mqd_worker_stats *stats;
    struct mqd_control_header *header;
    struct mqd_poll *poll;
    struct mqd_endpoint *endpoint;
    struct mqd_arena *arena;         /* for receiving */
    struct mqd_arena *control_arena; /* the last quarter of the same mapping: frames for the acceptor */
    uint64_t control_arena_base;
    struct mqd_arena *large; /* at the end of the mapping, NULL = none (server/large.c) */
    uint64_t large_base;
    uint32_t run_bytes_max;        /* a frame larger than this is placed in `large`, not in `arena` */
    struct mqd_node large_waiting; /* connections in order of arrival, by stall_node */
    int zero_fd;                   /* /dev/zero */
    struct mqd_reader *reader;
    int64_t window_offset; /* receive window: one extent; -1 = arena full */
    uint32_t window_used;
    int64_t compacted_ms; /* when compact_arena last ran */
    /* the first connection that is stalled for a run of extents, or NULL; it must get one before
     * others */
    struct mqd_connection *run_waiter;
    int64_t now_ns, now_ms, wall_ms;
    int64_t housekeeping_ms;
    bool active;         /* a turn since the last housekeeping had a cause other than housekeeping */
    uint32_t idle;       /* nothing is connected or due, so housekeeping runs less often. Read by the main thread */
    uint32_t turn_bytes; /* received in this turn */

    struct mqd_topics topics;
    struct mqd_subjects *subjects; /* server/rights/subject.h */
    struct mqd_log_directory log_dirs[MQD_LOG_DIR_COUNT_MAX];
    struct mqd_owned *owned[MQD_PARTITION_SLOT_COUNT]; /* NULL from owned_end on */
    struct mqd_node waiting[MQD_PARTITION_SLOT_COUNT]; /* fetch entries by slot */
    /* 1 + the index of the log directory in the path that `reader` has for the slot; 0 = no path */
    uint8_t path_log_dir[MQD_PARTITION_SLOT_COUNT];
    uint32_t owned_count, owned_end;

    struct mqd_connection **connections; /* by index; NULL from connection_end on */
    uint32_t connection_capacity, connection_count, connection_end;
    uint32_t *free_indexes;
    uint32_t free_index_count;
    uint32_t connection_count_max, broker_connection_count_max; /* written by the main thread */
    uint64_t next_connection_id;
    struct mqd_node ready, stalled, to_send, to_respond;

    struct mqd_local *locals[MQD_LOCAL_COUNT_MAX]; /* attachments, in no order */
    uint32_t local_count, local_count_max;         /* *_max: written by the main thread */
    uint64_t local_bytes, local_bytes_max;
    struct mqd_local_memory *local_memories; /* memory not released yet, in no order */
    uint32_t local_memory_count, local_memory_capacity;
    int local_watch_fd;      /* inotify; 0 = not created yet */
    bool local_watch_failed; /* the failure has been logged */
    struct mqd_node queries; /* attachments with pending queries */
    /* attachments whose response the kernel refused: retried in the next turn, within 20 ms */
    struct mqd_node query_later;

    uint8_t quota_kinds; /* the kinds that any quota limits; 0 = no quotas */
    struct mqd_quota_limits *quota_limits;
    uint64_t quota_version; /* of quota_limits */
    struct mqd_node mute_wheel[MQD_MUTE_TICK_COUNT];
    /* the last tick processed; the first tick that holds a connection, INT64_MAX = none */
    int64_t mute_tick, mute_due_tick;
    uint32_t muted_count;

    struct mqd_request *free_requests;
    uint64_t next_request_id;
    struct mqd_request **timers; /* min-heap by deadline_ms */
    uint32_t timer_count, timer_capacity;
    uint64_t heap_bytes;
    uint64_t partial_bytes; /* the part of heap_bytes held by partly received requests */

    const struct mqd_produce_request *producing; /* the Produce whose appends are being routed, or NULL */
    struct mqd_text producing_client;            /* its client id */
    /* with_waiting_records: partitions with acks.replicas that are led here and have a record that
     * waits for replicas */
    struct mqd_node to_write, to_wake, to_release, with_waiting_records;
    struct mqd_fetchers *fetchers;     /* NULL until the first partition follows */
    struct mqd_secure *secure;         /* NULL until a listener has TLS */
    struct mqd_shares *shares;         /* NULL until a client reads as a member of a share group */
    struct mqd_relays *relays;         /* NULL until a local client writes to a partition led elsewhere */
    uint32_t waiting_truncation_count; /* truncations that wait for a helper thread */
    bool lease_lost;                   /* this host may no longer lead; evaluated every turn */
    int64_t leading_tick_ms, slow_checked_ms;
    uint32_t replicated_count; /* owned partitions with a replication core */
    uint64_t proposal_base;    /* base of the proposal numbers of the most recently created replica */
    uint64_t group_commit_deadline_ns;
    struct mqd_append *free_appends;
    struct mqd_node forwarded_to[MQD_ENDPOINT_COUNT_MAX]; /* appends that each endpoint has not answered yet */
    /* by the index in a token; a late response is dropped: its sequence number no longer matches */
    struct mqd_forward_entry *forwards;
    uint32_t forward_capacity, forward_free;
    /* descriptors that did not fit into a full ring, in order */
    struct mqd_descriptor *overflow[MQD_ENDPOINT_COUNT_MAX];
    uint32_t overflow_tail[MQD_ENDPOINT_COUNT_MAX], overflow_capacity[MQD_ENDPOINT_COUNT_MAX],
        overflow_head[MQD_ENDPOINT_COUNT_MAX];

    struct mqd_node sessions, woken;
    struct mqd_node lookups[MQD_LOOKUP_BUCKET_COUNT]; /* by slot */
    struct mqd_cached_cursor cursors[MQD_CURSOR_CACHE_COUNT];
    struct mqd_views views;
    struct mqd_fetch_set **session_table;
    uint32_t session_count;
    uint64_t session_heap_bytes;
    uint32_t cold_read_count; /* read-aheads in flight */
    struct mqd_turn turn;
    int64_t slow_second; /* the second in which slow_count slow requests were reported */
    uint32_t slow_count, slow_omitted_count;
    uint64_t swept_segments_generation;
    uint64_t random_state;

    struct mqd_control_entry control_entries[MQD_CONTROL_REQUEST_COUNT_MAX];
    uint32_t control_free, control_used_count;
    struct mqd_node control_turns; /* connections with requests for the acceptor that may be sent, in turn */
    /* extents of the control arena taken by frames that were sent ahead of a frame without room */
    uint64_t control_passed_extents;
    struct mqd_node control_sent; /* sent but unanswered, in the order of sending */
    struct mqd_check checks[MQD_CHECK_COUNT_MAX];
    uint32_t check_free, check_used_count; /* free list; how many entries were ever used */
    struct mqd_node check_queue;
    uint64_t check_control_bytes, check_frame_bytes; /* held by all checks together */
    uint8_t codecs_missing; /* a bit for each codec whose library is missing, once that was logged */
    struct mqd_description descriptions[MQD_DESCRIPTION_COUNT_MAX];
    struct mqd_cached_reply cached_replies[MQD_REPLY_CACHE_COUNT];
    uint64_t cached_bytes, cache_clock;

    struct mqd_buffer scratch;
    struct mqd_chunk *scratch_chunks;
    uint32_t scratch_chunk_count, scratch_chunk_capacity;

    /* shared with the main thread, under `mutex` */
    pthread_mutex_t mutex;
    struct mqd_command *commands; /* ring */
    uint32_t command_head, command_count;
    /* commands whose MQD_EVENT_DONE has not been taken yet, including those still in the ring */
    uint32_t unanswered_count;
    uint32_t command_waiting; /* accessed atomically (base/atomic.h) */
    int command_fd;
    struct mqd_event *events; /* ring */
    uint32_t event_head, event_count;
    uint64_t events_dropped;
    int event_fd;
    pthread_t thread;
    sem_t start_done;
    int start_error;
    char start_message[256];
    int backend;
    bool started;
    bool serving; /* accepts connections; false after a failure to accept one, until the next turn tries again */
    _Atomic bool stop;
    bool stopped;
};

/* tokens of mqd_poll: kind in bits 56..62, the rest depends on the kind */
enum mqd_token_kind {
    MQD_TOKEN_CONNECTION = 1,
    MQD_TOKEN_WAKE,
    MQD_TOKEN_COMMAND,
    MQD_TOKEN_HANDOFF,
    MQD_TOKEN_SYNC,
    MQD_TOKEN_SYNCFS,
    MQD_TOKEN_PREALLOCATE,
    MQD_TOKEN_READ_AHEAD,
    MQD_TOKEN_SNAPSHOT,
    MQD_TOKEN_LOCAL_END,
    MQD_TOKEN_FETCHER,
    MQD_TOKEN_TRUNCATION,
    MQD_TOKEN_RELAY,
    MQD_TOKEN_LOCAL_MEMORY,
    MQD_TOKEN_SECURE,
    MQD_TOKEN_CHECK,
    MQD_TOKEN_SHARE,
    MQD_TOKEN_VIEW
};
static inline uint64_t mqd_token(enum mqd_token_kind kind, uint64_t value)
{
    return (uint64_t)kind << 56 | (value & 0xffffffffffffffull);
}
static inline enum mqd_token_kind mqd_token_kind_of(uint64_t token)
{
    return (enum mqd_token_kind)(token >> 56);
}
static inline uint64_t mqd_token_value(uint64_t token)
{
    return token & 0xffffffffffffffull;
}

/* single writer; the acceptor may read at any time */
static inline void mqd_stat(struct mqd_reactor *r, enum mqd_counter counter, uint64_t amount)
{
    mqd_counter_add(&r->stats->counter[counter], amount);
}
static inline void mqd_set_gauge(struct mqd_reactor *r, enum mqd_counter counter, uint64_t value)
{
    mqd_store_relaxed(&r->stats->counter[counter], value);
}
void mqd_observe_time(struct mqd_reactor *r, enum mqd_histogram histogram, int64_t elapsed_ns);

/* server/reactor.c */
void mqd_reactor_refresh_clock(struct mqd_reactor *r);
/* called by the reactor's thread, or by a test whose reactor has no thread */
void mqd_reactor_turn(struct mqd_reactor *r, const struct mqd_poll_event *events, int count);
void mqd_log(struct mqd_reactor *r, uint32_t level, uint64_t connection, uint32_t slot, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
bool mqd_reactor_emit(struct mqd_reactor *r, const struct mqd_event *event); /* false: the queue is full */

/* server/command.c */
void mqd_commands_run(struct mqd_reactor *r);
void mqd_command_done(struct mqd_reactor *r, uint64_t token, int error, uint32_t slot, int64_t offset,
                      struct mqd_partition *partition, const char *text);

/* takes ownership of everything that `command` points to, even on failure */
int mqd_command_post(struct mqd_reactor *r, struct mqd_command *command);
void mqd_command_free(struct mqd_command *command);
/* the partition is no longer truncating: runs the deferred commands */
void mqd_commands_run_deferred(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_commands_free_deferred(struct mqd_owned *owned); /* when the reactor ends; no events are sent for them */

/* server/topic_command.c */
void mqd_topic_command_put(struct mqd_reactor *r, struct mqd_command *command);
void mqd_topic_command_remove(struct mqd_reactor *r, const struct mqd_command *command);
void mqd_topic_command_brokers(struct mqd_reactor *r, struct mqd_command *command);

/* server/replication/replication.c: partitions of several replicas */
void mqd_replication_set(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command);
void mqd_replication_in_sync_result(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command);
/* updates the core before the positions are published */
void mqd_replication_update(struct mqd_reactor *r, struct mqd_owned *owned);
/* `changed`: bits of enum mqd_replica_change */
void mqd_replication_apply_changes(struct mqd_reactor *r, struct mqd_owned *owned, int changed);
/* the log was truncated: lowers the core's high watermark to the log end if it is above */
void mqd_replication_on_truncation(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_replication_free(struct mqd_reactor *r, struct mqd_owned *owned);

/* server/replication/leading.c: the leader's side of replication */
void mqd_leading_on_open(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_leading_check_lease(struct mqd_reactor *r);
int16_t mqd_leading_check_append(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append);
void mqd_leading_on_publish(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_positions *positions);
void mqd_leading_on_assignment(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_leading_propose(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_leading_tick(struct mqd_reactor *r);
/* A follower's fetch of one partition: records the follower's position. Returns the entry's error
 * or 0, the positions up to which the follower may read, entry->high_watermark and the point of
 * divergence. */
int16_t mqd_leading_fetch(struct mqd_reactor *r, struct mqd_fetch_entry *entry, uint32_t slot,
                          struct mqd_positions *positions);
void mqd_leading_record_positions(struct mqd_reactor *r, struct mqd_fetch_set *set);
/* the positions that the client or follower that owns the set may see */
void mqd_leading_positions(struct mqd_reactor *r, const struct mqd_fetch_set *set, uint32_t slot,
                           struct mqd_positions *positions);

/* server/fetch/nearest.c */
/* stores the other in-sync replicas in the slot; called by the owner after an assignment */
void mqd_nearest_publish_followers(struct mqd_reactor *r, const struct mqd_owned *owned);
/* the hash of the consumer's rack; 0: not given, or the rack of this host */
uint64_t mqd_nearest_rack_hash(const struct mqd_reactor *r, const struct mqd_fetch_request *fetch);
/* the node in the consumer's rack that the consumer should read from; -1 = this host */
int32_t mqd_nearest_replica(struct mqd_reactor *r, const struct mqd_fetch_set *set, uint32_t slot);
/* a replicated partition is led here only once an assignment from the metadata says so */
static inline bool mqd_owned_leads(const struct mqd_owned *owned)
{
    return owned->replica ? owned->replica->role == MQD_REPLICA_LEADER : !mqd_partition_replicated(owned->partition);
}

/* server/handoff.c */
void mqd_handoff_accept(struct mqd_reactor *r);
struct mqd_connection *mqd_connection_by_token(struct mqd_reactor *r, uint64_t value);
struct mqd_connection *mqd_connection_open(struct mqd_reactor *r, int fd, uint16_t listener_id);

/* server/connection.c */
void mqd_connection_read(struct mqd_reactor *r, struct mqd_connection *c);
/* the frame is complete; may close c */
void mqd_connection_on_frame(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                             int64_t arena_offset);
/* ensures that the receive window has room for needed_bytes; false: c is stalled */
bool mqd_connection_ensure_window(struct mqd_reactor *r, struct mqd_connection *c, uint32_t needed_bytes);
/* allocates a run of extents, with one reference; -1: c is stalled */
int64_t mqd_connection_allocate_run(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes);
void mqd_connection_close(struct mqd_reactor *r, struct mqd_connection *c, const char *reason);
/* counts a protocol error, logs the reason and closes c */
void mqd_connection_fail(struct mqd_reactor *r, struct mqd_connection *c, const char *reason);
/* queues the connection to be read again, if mqd_connection_may_read */
void mqd_connection_resume(struct mqd_reactor *r, struct mqd_connection *c);
bool mqd_connection_may_read(const struct mqd_reactor *r, const struct mqd_connection *c);
void mqd_connections_sweep(struct mqd_reactor *r); /* closes idle connections */
/* called at the beginning of a turn, while the window is empty */
void mqd_connections_resume_stalled(struct mqd_reactor *r);

/* server/large.c. mqd_frame_is_large: the frame's bytes are in the memory for large requests, not
 * in the receive arena. */
bool mqd_frame_is_large(const struct mqd_reactor *r, uint64_t offset);
void mqd_frame_hold(struct mqd_reactor *r, uint64_t offset);
void mqd_frame_release(struct mqd_reactor *r, uint64_t offset);
/* reserves a run of at least size_bytes and sets c->run_offset; false: c waits and is not read */
bool mqd_large_begin(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes);
/* zeroes large memory by system calls, because no store may touch a page first (B3 in
 * server/large.c); false: /dev/shm is full */
bool mqd_large_zero(struct mqd_reactor *r, uint64_t offset, uint32_t size_bytes);
/* zeroes bytes of c's run, which are then safe to store to; false: out of memory, c is closed */
bool mqd_large_touch(struct mqd_reactor *r, struct mqd_connection *c, uint32_t from, uint32_t size_bytes);
void mqd_large_grant(struct mqd_reactor *r); /* grants memory to waiting connections, in their order */
/* the reason why c may not hold its run any longer; NULL: it may */
const char *mqd_large_overdue_reason(const struct mqd_reactor *r, const struct mqd_connection *c);
extern const char *const mqd_large_full_reason;

/* base/arena.c: sorts the free extents, so that single extents come from the low end again */
void mqd_arena_sort_free_extents(struct mqd_arena *arena);

/* server/output.c */
void mqd_output_append(struct mqd_reactor *r, struct mqd_connection *c, const void *bytes, uint32_t size_bytes);
/* moves r->scratch and its chunks into the output */
void mqd_output_take_scratch(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_output_send(struct mqd_reactor *r, struct mqd_connection *c);
uint64_t mqd_output_pending_bytes(const struct mqd_connection *c);
/* whether another response may be queued */
bool mqd_output_has_room(const struct mqd_reactor *r, const struct mqd_connection *c);
/* closes c once the pending output is sent */
void mqd_output_close_when_sent(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_output_clear(struct mqd_reactor *r, struct mqd_connection *c);
/* c has output to send */
void mqd_output_schedule(struct mqd_reactor *r, struct mqd_connection *c);
/* the first chunk has been sent */
void mqd_output_chunk_done(struct mqd_reactor *r, struct mqd_connection *c);
/* reports that a segment file ends before the rest of `range` */
void mqd_output_log_short_file(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_range *range);

/* server/dispatch.c */
void mqd_dispatch_frame(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                        int64_t arena_offset);

/* server/throttle.c. The _slow variants are called only when quotas exist. */
void mqd_throttle_refresh(struct mqd_reactor *r);
void mqd_throttle_run(struct mqd_reactor *r); /* resumes reading connections whose debt is paid */
/* called when the connection closes or its client has hung up */
void mqd_throttle_unmute(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_throttle_charge_slow(struct mqd_reactor *r, struct mqd_connection *c, uint32_t kind, uint64_t units);
bool mqd_throttle_admit_slow(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame,
                             uint32_t size_bytes);
/* the throttle time to report in a response that is sent now */
int32_t mqd_throttle_time_ms(const struct mqd_reactor *r, const struct mqd_connection *c);
int32_t mqd_throttle_fetch_bytes_max(const struct mqd_reactor *r, const struct mqd_connection *c, int32_t bytes_max);
void mqd_throttle_dispatch_frame(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                                 int64_t arena_offset);
int64_t mqd_throttle_measure_begin(const struct mqd_reactor *r, const struct mqd_connection *c);
void mqd_throttle_measure_end(struct mqd_reactor *r, struct mqd_connection *c, int64_t began_ns);
void mqd_throttle_write_time(struct mqd_reactor *r, struct mqd_request *request);
static inline void mqd_throttle_charge(struct mqd_reactor *r, struct mqd_connection *c, enum mqd_quota_kind kind,
                                       uint64_t units)
{
    if (r->quota_kinds >> kind & 1)
        mqd_throttle_charge_slow(r, c, kind, units);
}
/* Whether this frame (NULL: the next one) may be served now. If not, the connection is muted. */
static inline bool mqd_throttle_admit(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame,
                                      uint32_t size_bytes)
{
    return !r->quota_kinds || mqd_throttle_admit_slow(r, c, frame, size_bytes);
}

/* server/produce.c */
void mqd_produce_on_request(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                            uint8_t *frame, uint32_t size_bytes, int64_t arena_offset);
void mqd_produce_encode(struct mqd_reactor *r, struct mqd_request *request);
bool mqd_produce_failed(const struct mqd_request *request);
void mqd_produce_timeout(struct mqd_reactor *r, struct mqd_request *request);
/* the outcome is final: completes the append in its request, or reports the outcome to the peer */
void mqd_append_done(struct mqd_reactor *r, struct mqd_append *append, int16_t error);
void mqd_append_unpin(struct mqd_reactor *r, struct mqd_append *append);
/* passes the append to the partition's owner; the outcome arrives by mqd_append_done */
void mqd_append_deliver(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch);

/* server/describe.c */
void mqd_describe_on_request(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_describe_release(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
void mqd_describe_on_acceptor_died(struct mqd_reactor *r);

/* server/owner.c: how the owner of a partition handles appends */
void mqd_owner_stage(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch, uint8_t *bytes,
                     bool patch_in_place);
void mqd_owner_write_all(struct mqd_reactor *r);
void mqd_owner_publish(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_owner_wake_all(struct mqd_reactor *r);
void mqd_owner_fail_all(struct mqd_reactor *r, struct mqd_owned *owned, int16_t error);
/* wakes every waiter; waiters see what was stored before the call */
void mqd_owner_wake_slot(struct mqd_reactor *r, uint32_t slot);
/* the log directory of `owned` is treated as full until Python reports that it has room */
void mqd_owner_report_dir_full(struct mqd_reactor *r, const struct mqd_owned *owned, int error, const char *text);
void mqd_owner_fence_dir(struct mqd_reactor *r, uint32_t log_dir, int error, const char *operation);

/* server/flush.c */
void mqd_flush_request(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_flush_start_all(struct mqd_reactor *r);
void mqd_flush_on_done(struct mqd_reactor *r, uint64_t slot, int result);
void mqd_flush_on_syncfs_done(struct mqd_reactor *r, uint64_t log_dir, int result);
void mqd_flush_background(struct mqd_reactor *r);
void mqd_preallocate_begin_if_possible(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_preallocate_on_done(struct mqd_reactor *r, uint64_t slot, int result);
void mqd_snapshot_begin_if_possible(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_snapshot_on_done(struct mqd_reactor *r, uint64_t slot, int result);
void mqd_owned_maybe_close(struct mqd_reactor *r, struct mqd_owned *owned);

/* server/forward.c */
void mqd_forward_append(struct mqd_reactor *r, struct mqd_append *append, uint16_t owner, uint64_t owner_generation,
                        uint64_t offset, uint32_t size_bytes, int32_t leader_epoch);
/* never drops a descriptor; descriptors to one endpoint keep their order */
void mqd_forward_send(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *descriptor);
void mqd_forward_flush(struct mqd_reactor *r);
bool mqd_forward_pending(const struct mqd_reactor *r);
void mqd_forward_untrack(struct mqd_reactor *r, struct mqd_append *append);
void mqd_links_drain(struct mqd_reactor *r);
void mqd_forward_on_endpoint_died(struct mqd_reactor *r, uint32_t endpoint);

/* server/fetch/list_offsets.c */
/* false: the acceptor must answer the request */
bool mqd_list_offsets_on_request(struct mqd_reactor *r, struct mqd_connection *c,
                                 const struct mqd_request_header *header, const uint8_t *body, uint32_t size_bytes);
void mqd_list_offsets_respond(struct mqd_reactor *r, struct mqd_request *request, const uint8_t *body,
                              uint32_t size_bytes);

/* server/lookup.c */
/* whether `end_offset` may be returned only after a flush */
bool mqd_lookup_must_wait(struct mqd_reactor *r, uint32_t slot, int64_t end_offset);
/* NULL: out of memory */
struct mqd_lookup *mqd_lookup_new(struct mqd_reactor *r, struct mqd_request *request, uint32_t awaited_count_max,
                                  const uint8_t *body, uint32_t body_bytes);
/* lookup->awaited must be filled in; may close the connection */
void mqd_lookup_begin(struct mqd_reactor *r, struct mqd_lookup *lookup);
void mqd_lookup_free(struct mqd_request *request);
void mqd_lookup_expire(struct mqd_reactor *r, struct mqd_request *request);
/* continues this worker's lookups that wait for the slot; _notify: the lookups of all workers */
void mqd_lookups_wake(struct mqd_reactor *r, uint32_t slot);
void mqd_lookups_notify(struct mqd_reactor *r, uint32_t slot);

/* server/control_request.c */
void mqd_control_on_request(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                            const uint8_t *frame, uint32_t size_bytes);
void mqd_control_on_response(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_control_on_close(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
void mqd_control_on_parked(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
/* the client of a request that was sent but is unanswered has disconnected */
void mqd_control_orphan(struct mqd_reactor *r, struct mqd_request *request);
void mqd_control_untrack(struct mqd_reactor *r, struct mqd_request *request);
bool mqd_control_under_pressure(const struct mqd_reactor *r);
void mqd_control_send_queued(struct mqd_reactor *r);
void mqd_control_on_acceptor_died(struct mqd_reactor *r);
bool mqd_reply_cache_find(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                          const uint8_t *frame, uint32_t size_bytes);
void mqd_reply_cache_put(struct mqd_reactor *r, uint8_t *key, uint32_t key_bytes, uint64_t hash, uint64_t version,
                         const uint8_t *bytes, uint32_t size_bytes);
void mqd_reply_cache_clear(struct mqd_reactor *r);
/* allocates *key, which identifies the response to this request; returns the key's hash */
uint64_t mqd_reply_key(struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *frame,
                       uint32_t size_bytes, uint8_t **key, uint32_t *key_bytes);

#endif
