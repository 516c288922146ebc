/* What the files of the reactor share: its state, connections, requests and appends. Private to the
 * reactor thread but for the command and event queues.
 *
 * One turn of the loop, in this order (mqd_reactor_turn):
 *   wait -> links in -> commands -> read ready sockets -> links in -> write staged batches ->
 *   publish -> wake readers -> flush -> links out -> answer -> send -> links out
 * so that everything that arrived in a turn costs one pwritev per partition, one flush, one send
 * per connection and one wake-up per peer.
 *
 * Invariants
 *   R1  replies of a connection leave in the order of its requests (but for those of local clients
 *       that wait for leaders on other hosts, server/relay/relay.h); a request is answered once.
 *   R2  a batch is acknowledged only after mqd_slot_publish made it visible, and with acks=all and
 *       flush.on.ack only after its flush.
 *   R3  arena bytes are held from the receive until the last pwritev that reads them, no longer.
 *   R4  nothing here blocks on a disk: flushes, preallocation, read-ahead and snapshots run behind
 *       mqd_poll.
 *   R5  every list, queue and buffer has a bound; at the bound the connection that wants more is no
 *       longer read.
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
/* checks under way; beyond, a Produce that needs one is refused with an error that its client tries
 * again */
#define MQD_CHECK_COUNT_MAX 4096
#define MQD_OUT_BYTES_MAX (1u << 20) /* a connection that does not take its replies is not read beyond this */
/* nor one whose requests and finished replies, waiting for an earlier one, take more than this */
#define MQD_HELD_BYTES_MAX (1u << 20)
#define MQD_READS_PER_TURN 64 /* fairness: a turn ends after so many reads, the rest stays ready */
#define MQD_COMMAND_COUNT_MAX 4096
#define MQD_EVENT_COUNT_MAX (3 * MQD_COMMAND_COUNT_MAX)
/* more dirty partitions than this on one file system: one syncfs instead of many fdatasync */
#define MQD_SYNCFS_PARTITION_COUNT 24
/* A flush takes CPU for each page, beside the reactor: 64 MiB held up acknowledgements for 20 ms.
 * Where more partitions of a directory than FEW are written to, their small flushes would come
 * together, and hold them up for longer than the few large ones (measured: 12 partitions gain, 24
 * lose). */
#define MQD_BACKGROUND_FLUSH_BYTES (8ll << 20)
#define MQD_BACKGROUND_FLUSH_BYTES_OF_MANY (64ll << 20)
#define MQD_BUSY_FEW 12
/* not flushed yet: a partition that is written to, not one with a record now and then */
#define MQD_BUSY_BYTES (1ll << 20)
#define MQD_BACKGROUND_FLUSH_MS 5000
#define MQD_LOOK_UP_BUCKET_COUNT 64
#define MQD_MUTE_TICK_COUNT 256
#define MQD_MUTE_TICK_MS 4
#define MQD_IN_SYNC_REPEAT_MS 1000 /* a proposal without an answer is told again */
#define MQD_IN_SYNC_RETRY_MS 100   /* a refused in-sync proposal is made again after this */

enum mqd_api {
    MQD_API_PRODUCE = 0,
    MQD_API_FETCH = 1,
    MQD_API_LIST_OFFSETS = 2,
    MQD_API_METADATA = 3,
    MQD_API_API_VERSIONS = 18
};

/* ---- descriptions of producers for the acceptor (server/describe.c) ---- */

#define MQD_DESCRIPTION_COUNT_MAX 16
/* lent to the acceptor of that generation; offset in the control arena */
struct mqd_description {
    uint64_t offset, generation;
    uint8_t used;
};

/* ---- reply cache: answers that depend on the request bytes and the metadata version alone ---- */

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

struct mqd_reactor {
    struct mqd_reactor_options options;
    uint64_t generation; /* of our endpoint */
    struct mqd_worker_slot *slot;
    struct mqd_worker_stats *stats;
    struct mqd_control_header *header;
    struct mqd_poll *poll;
    struct mqd_endpoint *endpoint;
    struct mqd_arena *arena;         /* receive */
    struct mqd_arena *control_arena; /* the last quarter of the same mapping: frames for the acceptor */
    uint64_t control_arena_base;
    struct mqd_arena *large; /* the end of the mapping, NULL = none (server/large.c) */
    uint64_t large_base;
    uint32_t run_bytes_max;        /* a larger frame lies in `large`, not in `arena` */
    struct mqd_node large_waiting; /* connections, by stall_node: who came first is next */
    int zero_fd;                   /* /dev/zero */
    struct mqd_reader *reader;
    int64_t window_offset; /* receive window: one extent; -1 = arena full */
    uint32_t window_used;
    int64_t relieved_ms; /* when stalled connections were last helped */
    /* stalled for a run of extents longer than any other, or NULL: no other takes one before it */
    struct mqd_connection *run_first;
    int64_t now_ns, now_ms, wall_ms;
    int64_t housekeeping_ms;
    uint32_t turn_bytes; /* received since the last write: more than the L2 keeps is written at once */

    struct mqd_topics topics;
    struct mqd_log_directory log_dirs[MQD_LOG_DIR_COUNT_MAX];
    struct mqd_owned *owned[MQD_PARTITION_SLOT_COUNT];
    struct mqd_node waiting[MQD_PARTITION_SLOT_COUNT]; /* fetch entries by slot */
    uint8_t path_known[MQD_PARTITION_SLOT_COUNT];      /* the log directory it lies in + 1; 0 = not known */
    uint32_t owned_count;

    struct mqd_connection **connections; /* by index */
    uint32_t connection_capacity, connection_count;
    uint32_t *free_indexes;
    uint32_t free_index_count;
    uint32_t connection_count_max; /* main thread writes */
    uint64_t next_connection_id;
    struct mqd_node ready, stalled, to_send, to_answer;

    struct mqd_local *locals[MQD_LOCAL_COUNT_MAX]; /* attachments, in no order */
    uint32_t local_count, local_count_max;         /* the latter and local_bytes_max: main thread writes */
    uint64_t local_bytes, local_bytes_max;
    struct mqd_local_memory *local_memories; /* that are not gone yet, in no order */
    uint32_t local_memory_count, local_memory_capacity;
    int local_watch_fd;      /* inotify; 0 = not needed yet */
    bool local_watch_failed; /* the log has said so */
    struct mqd_node asking;  /* attachments with questions */
    /* those whose answer the kernel has refused: tried again in the next turn, within 20 ms */
    struct mqd_node asking_later;

    uint8_t quota_kinds; /* what any quota limits; 0 = there are none */
    struct mqd_quota_limits *quota_limits;
    uint64_t quota_version; /* of quota_limits */
    int64_t quota_burst_ns;
    struct mqd_node mute_wheel[MQD_MUTE_TICK_COUNT];
    /* the last one that was looked at; the first one that holds somebody, INT64_MAX = none */
    int64_t mute_tick, mute_due_tick;
    uint32_t muted_count;

    struct mqd_request *free_requests;
    uint64_t next_request_id;
    struct mqd_request **timers; /* heap by deadline_ms */
    uint32_t timer_count, timer_capacity;
    uint64_t heap_bytes;
    uint64_t partial_bytes; /* of these: half-received requests */

    const struct mqd_produce_request *producing; /* while its appends are routed */
    struct mqd_text producing_client;            /* its client id */
    struct mqd_node to_write, to_wake;
    struct mqd_fetchers *fetchers; /* NULL until the first partition follows */
    struct mqd_relays *relays;     /* NULL until a local client writes to a partition led elsewhere */
    uint32_t truncations_waiting;  /* for a helper thread */
    bool lease_lost;               /* this host may not lead any more; as of this turn */
    int64_t leading_tick_ms;
    uint32_t replicated_count; /* owned partitions with a replication core */
    uint64_t proposals_from;   /* what the proposals of the last replica that began are numbered from */
    uint64_t group_commit_deadline_ns;
    struct mqd_append *free_appends;
    struct mqd_node forwarded_to[MQD_ENDPOINT_COUNT_MAX]; /* sent, unanswered */
    struct mqd_forward_entry *forwards; /* what a token names; an answer that comes too late finds another sequence */
    uint32_t forward_capacity, forward_free;
    struct mqd_descriptor *overflow[MQD_ENDPOINT_COUNT_MAX]; /* descriptors that met a full ring, in order */
    uint32_t overflow_count[MQD_ENDPOINT_COUNT_MAX], overflow_capacity[MQD_ENDPOINT_COUNT_MAX],
        overflow_head[MQD_ENDPOINT_COUNT_MAX];

    struct mqd_node sessions, woken;
    struct mqd_node look_ups[MQD_LOOK_UP_BUCKET_COUNT]; /* by slot */
    struct mqd_cached_cursor cursors[MQD_CURSOR_CACHE_COUNT];
    struct mqd_fetch_set **session_table;
    uint32_t session_count;
    uint64_t session_heap_bytes;
    uint32_t cold_read_count; /* read-aheads under way */
    uint64_t seen_segments_generation;
    uint64_t random_state;

    struct mqd_control_entry control[MQD_CONTROL_REQUEST_COUNT_MAX];
    uint32_t control_free;
    struct mqd_node control_queue; /* requests for the acceptor, not sent yet */
    struct mqd_node control_sent;  /* sent and not answered, in the order in which they were sent */
    struct mqd_check checks[MQD_CHECK_COUNT_MAX];
    uint32_t check_free, check_used; /* free list; how many entries were ever used */
    struct mqd_node check_queue;
    uint64_t check_control_bytes, check_frame_bytes; /* held by all checks */
    struct mqd_description descriptions[MQD_DESCRIPTION_COUNT_MAX];
    struct mqd_cached_reply cached[MQD_REPLY_CACHE_COUNT];
    uint64_t cached_bytes, cache_clock;

    struct mqd_buffer scratch;
    struct mqd_chunk *scratch_chunks;
    uint32_t scratch_chunk_count, scratch_chunk_capacity;

    /* shared with the main thread, under `mutex` */
    pthread_mutex_t mutex;
    struct mqd_command *commands; /* ring */
    uint32_t command_head, command_count;
    uint32_t unanswered_count; /* commands whose MQD_EVENT_DONE was not taken yet; those in the ring among them */
    uint32_t command_waiting;  /* by base/atomic.h */
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
    /* connections are taken over; false also while the channel holds some that the kernel had no
     * memory for */
    bool serving;
    _Atomic bool stop;
    bool stopped;
};

/* tokens of mqd_poll: kind in bits 56..62, the rest is the kind's own */
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
    MQD_TOKEN_LOCAL_MEMORY
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

/* single writer; the acceptor reads at any time */
static inline void mqd_stat(struct mqd_reactor *r, enum mqd_counter counter, uint64_t amount)
{
    mqd_count(&r->stats->counter[counter], amount);
}
static inline void mqd_gauge(struct mqd_reactor *r, enum mqd_counter counter, uint64_t value)
{
    mqd_store_relaxed(&r->stats->counter[counter], value);
}
void mqd_time(struct mqd_reactor *r, enum mqd_histogram histogram, int64_t elapsed_ns);

/* server/reactor.c */
void mqd_reactor_refresh_clock(struct mqd_reactor *r);
void mqd_log(struct mqd_reactor *r, uint32_t level, uint64_t connection, uint32_t slot, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
bool mqd_reactor_emit(struct mqd_reactor *r, const struct mqd_event *event); /* false: too many wait */

/* server/command.c */
void mqd_commands_run(struct mqd_reactor *r);
void mqd_command_done(struct mqd_reactor *r, uint64_t token, int error, uint32_t slot, int64_t offset,
                      struct mqd_partition *partition, const char *text);

/* takes what it points to, also when it fails */
int mqd_command_post(struct mqd_reactor *r, struct mqd_command *command);
void mqd_command_free(struct mqd_command *command);
/* it rests no more: what waited is carried out */
void mqd_commands_deferred(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_commands_deferred_free(struct mqd_owned *owned); /* the end of the reactor: nobody waits for their events */

/* server/topic_command.c */
void mqd_topic_command_put(struct mqd_reactor *r, const struct mqd_command *command);
void mqd_topic_command_remove(struct mqd_reactor *r, const struct mqd_command *command);
void mqd_topic_command_brokers(struct mqd_reactor *r, struct mqd_command *command);

/* server/replication/replication.c: partitions of several replicas */
void mqd_replication_set(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command);
void mqd_replication_in_sync_answer(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command);
/* before its positions are published: what the core makes of them */
void mqd_replication_log(struct mqd_reactor *r, struct mqd_owned *owned);
/* bits of enum mqd_replica_change */
void mqd_replication_changed(struct mqd_reactor *r, struct mqd_owned *owned, int changed);
/* its log was cut: the core's high watermark is not above its end */
void mqd_replication_cut(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_replication_free(struct mqd_reactor *r, struct mqd_owned *owned);

/* server/replication/leading.c: the leader's side of them */
void mqd_leading_opened(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_leading_look_at_lease(struct mqd_reactor *r);
int16_t mqd_leading_may_append(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append);
void mqd_leading_published(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_positions *positions);
void mqd_leading_assigned(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_leading_propose(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_leading_tick(struct mqd_reactor *r);
/* A follower's fetch of one partition: notes where it stands. The entry's error or 0; positions up
 * to which it may read; entry->high_watermark and what diverges. */
int16_t mqd_leading_fetch(struct mqd_reactor *r, struct mqd_fetch_entry *entry, uint32_t slot,
                          struct mqd_positions *positions);
void mqd_leading_note(struct mqd_reactor *r, struct mqd_fetch_set *set);
/* for whom the set is */
void mqd_leading_positions(struct mqd_reactor *r, const struct mqd_fetch_set *set, uint32_t slot,
                           struct mqd_positions *positions);

/* server/fetch/nearest.c */
void mqd_nearest_tell(struct mqd_reactor *r, const struct mqd_owned *owned);
/* where the consumer is; 0: it did not say, or here */
uint64_t mqd_nearest_rack(const struct mqd_reactor *r, const struct mqd_fetch_request *fetch);
/* the node in set->rack that it is to read from; -1 = here */
int32_t mqd_nearest_replica(struct mqd_reactor *r, const struct mqd_fetch_set *set, uint32_t slot);
/* a replicated one leads when its metadata have said so */
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
/* it is whole; may close c */
void mqd_connection_frame(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                          int64_t arena_offset);
/* `need` bytes fit at window_used; false: c is stalled */
bool mqd_connection_window(struct mqd_reactor *r, struct mqd_connection *c, uint32_t need);
/* a run of extents, held once; -1: c is stalled */
int64_t mqd_connection_run(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes);
void mqd_connection_close(struct mqd_reactor *r, struct mqd_connection *c, const char *reason);
/* the peer broke the protocol: logs, closes */
void mqd_connection_fail(struct mqd_reactor *r, struct mqd_connection *c, const char *reason);
void mqd_connection_resume(struct mqd_reactor *r, struct mqd_connection *c); /* reading may go on */
bool mqd_connection_may_read(const struct mqd_reactor *r, const struct mqd_connection *c);
void mqd_connections_sweep(struct mqd_reactor *r); /* idle ones */
/* at the beginning of a turn, while nothing lies in the window */
void mqd_connections_resume_stalled(struct mqd_reactor *r);

/* server/large.c. Bytes of a frame, in the receive arena or in the memory of large requests. */
bool mqd_frame_is_large(const struct mqd_reactor *r, uint64_t offset);
void mqd_frame_hold(struct mqd_reactor *r, uint64_t offset);
void mqd_frame_release(struct mqd_reactor *r, uint64_t offset);
/* A run of at least so many bytes is in c->run_offset; false: c waits, unread */
bool mqd_large_begin(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes);
/* the first bytes of its run may be stored to; false: there is no memory, c is closed */
bool mqd_large_touch(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes);
void mqd_large_grant(struct mqd_reactor *r); /* to those that wait, in their order */
/* why c may hold its run no longer; NULL: it may */
const char *mqd_large_overdue(const struct mqd_reactor *r, const struct mqd_connection *c);
extern const char *const mqd_large_full;

/* base/arena.c: single extents come from the low end again */
void mqd_arena_settle(struct mqd_arena *arena);

/* server/output.c */
void mqd_output_append(struct mqd_reactor *r, struct mqd_connection *c, const void *bytes, uint32_t size_bytes);
void mqd_output_scratch(struct mqd_reactor *r, struct mqd_connection *c); /* takes r->scratch and its chunks */
void mqd_output_send(struct mqd_reactor *r, struct mqd_connection *c);
uint64_t mqd_output_pending_bytes(const struct mqd_connection *c);
bool mqd_output_has_room(const struct mqd_reactor *r, const struct mqd_connection *c); /* another answer may be added */
void mqd_output_close_after(struct mqd_reactor *r, struct mqd_connection *c); /* closes when what is pending has left */
void mqd_output_clear(struct mqd_reactor *r, struct mqd_connection *c);

/* server/request.c */
struct mqd_request *mqd_request_new(struct mqd_reactor *r, struct mqd_connection *c,
                                    const struct mqd_request_header *header, enum mqd_request_kind kind);
/* its answer may go when its turn comes */
void mqd_request_complete(struct mqd_reactor *r, struct mqd_request *request);
void mqd_request_free(struct mqd_reactor *r, struct mqd_request *request);
void mqd_request_orphan(struct mqd_reactor *r, struct mqd_request *request); /* its connection is gone */
/* encodes what is complete at the head of the queue */
void mqd_connection_answer(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_timer_arm(struct mqd_reactor *r, struct mqd_request *request, int64_t deadline_ms);
void mqd_timer_disarm(struct mqd_reactor *r, struct mqd_request *request);
void mqd_timers_run(struct mqd_reactor *r);
int64_t mqd_timers_next_ms(const struct mqd_reactor *r); /* -1 = none */
bool mqd_heap_take(struct mqd_reactor *r, uint64_t bytes);
void mqd_heap_give(struct mqd_reactor *r, uint64_t bytes);
bool mqd_heap_pressed(const struct mqd_reactor *r); /* little is left: who holds some gets no more */
bool mqd_request_hold(struct mqd_reactor *r, struct mqd_request *request, uint64_t bytes); /* false: no room */
/* appends to `reply`; false: no room */
bool mqd_request_reply(struct mqd_reactor *r, struct mqd_request *request, const void *bytes, uint32_t size_bytes);

/* server/dispatch.c */
void mqd_frame_on(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                  int64_t arena_offset);

/* server/throttle.c. The _slow ones are for when there are quotas. */
void mqd_throttle_refresh(struct mqd_reactor *r);
void mqd_throttle_run(struct mqd_reactor *r); /* connections whose debt is paid are read again */
void mqd_throttle_forget(struct mqd_reactor *r, struct mqd_connection *c); /* it closes, or has hung up */
void mqd_throttle_charge_slow(struct mqd_reactor *r, struct mqd_connection *c, uint32_t kind, uint64_t units);
bool mqd_throttle_admit_slow(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame,
                             uint32_t size_bytes);
/* for an answer that leaves now */
int32_t mqd_throttle_time_ms(const struct mqd_reactor *r, const struct mqd_connection *c);
int32_t mqd_throttle_fetch_bytes_max(const struct mqd_reactor *r, const struct mqd_connection *c, int32_t bytes_max);
void mqd_throttle_frame_on(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                           int64_t arena_offset);
int64_t mqd_throttle_work_begin(const struct mqd_reactor *r, const struct mqd_connection *c);
void mqd_throttle_work_end(struct mqd_reactor *r, struct mqd_connection *c, int64_t began_ns);
void mqd_throttle_stamp(struct mqd_reactor *r, struct mqd_request *request);
static inline void mqd_throttle_charge(struct mqd_reactor *r, struct mqd_connection *c, enum mqd_quota_kind kind,
                                       uint64_t units)
{
    if (r->quota_kinds >> kind & 1)
        mqd_throttle_charge_slow(r, c, kind, units);
}
/* May this frame (NULL: the next one) be served now? Otherwise the connection is muted. */
static inline bool mqd_throttle_admit(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame,
                                      uint32_t size_bytes)
{
    return !r->quota_kinds || mqd_throttle_admit_slow(r, c, frame, size_bytes);
}

/* server/produce.c */
void mqd_produce_on(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                    uint8_t *frame, uint32_t size_bytes, int64_t arena_offset);
void mqd_produce_encode(struct mqd_reactor *r, struct mqd_request *request);
bool mqd_produce_failed(const struct mqd_request *request);
void mqd_produce_timeout(struct mqd_reactor *r, struct mqd_request *request);
/* outcome is final: tells the request or the peer */
void mqd_append_done(struct mqd_reactor *r, struct mqd_append *append, int16_t error);
void mqd_append_unpin(struct mqd_reactor *r, struct mqd_append *append);
/* to its owner; the outcome arrives through mqd_append_done */
void mqd_append_deliver(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch);

/* server/describe.c */
void mqd_describe_on(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_describe_release(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
void mqd_describe_acceptor_died(struct mqd_reactor *r);

/* server/check/check.c */
/* 0, or why the batch cannot be of a transaction */
int16_t mqd_check_transaction(struct mqd_reactor *r, struct mqd_request *request, const struct mqd_batch *batch,
                              const char **message);
/* false: it is done, or the acceptor looks */
bool mqd_check_records(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch);
/* for what is said of its records; NULL: no memory */
struct mqd_refusal *mqd_refusal_new(struct mqd_reactor *r, struct mqd_append *append);
/* while it is routed: later requests of its connection may not overtake it */
void mqd_check_order(struct mqd_reactor *r, struct mqd_append *append);
/* it is ordered no more: its place in the log is sure, or it has none */
void mqd_check_decided(struct mqd_reactor *r, struct mqd_append *append);
/* all of a request are on their way, some undecided */
void mqd_check_routed(struct mqd_reactor *r, struct mqd_request *request);
/* the owner wants to know of its transaction */
void mqd_check_verify(struct mqd_reactor *r, struct mqd_append *append, int64_t guard);
void mqd_check_leave(struct mqd_reactor *r, struct mqd_append *append); /* it is done and waits for nothing */
/* its client is gone: what is parked is not written. May free the request */
void mqd_check_abandon(struct mqd_reactor *r, struct mqd_request *request);
bool mqd_check_expire(struct mqd_reactor *r, struct mqd_append *append); /* true: it was parked and is refused */
void mqd_check_on_answer(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_check_send_queued(struct mqd_reactor *r);
void mqd_check_acceptor_died(struct mqd_reactor *r);

/* server/owner.c: what the owner of a partition does with appends */
void mqd_owner_stage(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch, uint8_t *bytes,
                     bool patch_in_place);
void mqd_owner_write_all(struct mqd_reactor *r);
void mqd_owner_publish(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_owner_wake_all(struct mqd_reactor *r);
void mqd_owner_fail_all(struct mqd_reactor *r, struct mqd_owned *owned, int16_t error);
/* tells every waiter to look again at what has been stored before the call */
void mqd_owner_wake_slot(struct mqd_reactor *r, uint32_t slot);
/* the one of `owned`, until Python says that there is room */
void mqd_owner_dir_full(struct mqd_reactor *r, const struct mqd_owned *owned, int error, const char *text);
void mqd_owner_fence_dir(struct mqd_reactor *r, uint32_t log_dir, int error, const char *what);

/* server/flush.c */
void mqd_flush_want(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_flush_start_all(struct mqd_reactor *r);
void mqd_flush_on_done(struct mqd_reactor *r, uint64_t slot, int result);
void mqd_flush_on_syncfs_done(struct mqd_reactor *r, uint64_t log_dir, int result);
void mqd_flush_background(struct mqd_reactor *r);
void mqd_preallocate_maybe(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_preallocate_on_done(struct mqd_reactor *r, uint64_t slot, int result);
void mqd_snapshot_maybe(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_snapshot_on_done(struct mqd_reactor *r, uint64_t slot, int result);
void mqd_owned_maybe_close(struct mqd_reactor *r, struct mqd_owned *owned);

/* server/forward.c */
void mqd_forward_append(struct mqd_reactor *r, struct mqd_append *append, uint16_t owner, uint64_t owner_generation,
                        uint64_t offset, uint32_t size_bytes, int32_t leader_epoch);
/* never loses, never overtakes */
void mqd_forward_send(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *descriptor);
void mqd_forward_flush(struct mqd_reactor *r);
bool mqd_forward_pending(const struct mqd_reactor *r);
void mqd_forward_forget(struct mqd_reactor *r, struct mqd_append *append);
void mqd_links_drain(struct mqd_reactor *r);
void mqd_forward_endpoint_died(struct mqd_reactor *r, uint32_t endpoint);

/* server/fetch/list_offsets.c */
/* false: not for us */
bool mqd_list_offsets_on(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                         const uint8_t *body, uint32_t size_bytes);

void mqd_list_offsets_answer(struct mqd_reactor *r, struct mqd_request *request, const uint8_t *body,
                             uint32_t size_bytes);

/* server/look_up.c */
/* whether a flush is to be waited for until `end_offset` may be told */
bool mqd_look_up_unflushed(struct mqd_reactor *r, uint32_t slot, int64_t end_offset);
/* NULL: no memory */
struct mqd_look_up *mqd_look_up_new(struct mqd_reactor *r, struct mqd_request *request, uint32_t awaited_count,
                                    const uint8_t *body, uint32_t body_bytes);
/* `awaited` is filled; may close the connection */
void mqd_look_up_begin(struct mqd_reactor *r, struct mqd_look_up *look_up);
void mqd_look_up_free(struct mqd_request *request);
void mqd_look_up_expire(struct mqd_reactor *r, struct mqd_request *request);
void mqd_look_ups_wake(struct mqd_reactor *r, uint32_t slot);
void mqd_look_ups_tell(struct mqd_reactor *r, uint32_t slot);

/* server/control_request.c */
void mqd_control_on(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                    const uint8_t *frame, uint32_t size_bytes);
void mqd_control_on_response(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_control_on_close(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
void mqd_control_on_parked(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
/* sent, not answered, and its client has gone */
void mqd_control_orphan(struct mqd_reactor *r, struct mqd_request *request);
void mqd_control_forget(struct mqd_reactor *r, struct mqd_request *request);
void mqd_control_send_queued(struct mqd_reactor *r);
void mqd_control_acceptor_died(struct mqd_reactor *r);
bool mqd_reply_cache_find(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                          const uint8_t *frame, uint32_t size_bytes);
void mqd_reply_cache_put(struct mqd_reactor *r, uint8_t *key, uint32_t key_bytes, uint64_t hash, uint64_t version,
                         const uint8_t *bytes, uint32_t size_bytes);
void mqd_reply_cache_clear(struct mqd_reactor *r);
uint64_t mqd_reply_key(struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *frame,
                       uint32_t size_bytes, uint8_t **key, uint32_t *key_bytes);

#endif
