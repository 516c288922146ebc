/* What the files of the reactor share: its state, connections, requests and appends. Private to the reactor thread but for the command and event queues.
 *
 * One turn of the loop, in this order (mqd_reactor_turn):
 *   wait -> links in -> commands -> read ready sockets -> links in -> write staged batches -> publish -> wake readers -> flush -> links out -> answer -> send
 *   -> links out
 * so that everything that arrived in a turn costs one pwritev per partition, one flush, one send per connection and one wake-up per peer.
 *
 * Invariants
 *   R1  replies of a connection leave in the order of its requests; a request is answered once.
 *   R2  a batch is acknowledged only after mqd_slot_publish made it visible, and with acks=all and flush.on.ack only after its flush.
 *   R3  arena bytes are held from the receive until the last pwritev that reads them, no longer.
 *   R4  nothing here blocks on a disk: flushes, preallocation, read-ahead and snapshots run behind mqd_poll.
 *   R5  every list, queue and buffer has a bound; at the bound the connection that wants more is no longer read.
 */
#ifndef MQD_REACTOR_H
#define MQD_REACTOR_H

#include <netinet/in.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>

#include "mqd_atomic.h"
#include "mqd_error.h"
#include "mqd_list.h"
#include "mqd_native.h"
#include "mqd_partition.h"
#include "mqd_poll.h"
#include "mqd_reader.h"
#include "mqd_shm_layout.h"
#include "mqd_wire.h"

#define MQD_EXTENT_BYTES 65536
#define MQD_CONTROL_EXTENT_BYTES 1024
#define MQD_CONTROL_REQUEST_COUNT_MAX 16384 /* below 65536: the index is 16 bits of a token */
#define MQD_CHECK_COUNT_MAX 4096      /* checks under way; beyond, a Produce that needs one is refused with an error that its client tries again */
#define MQD_OUT_BYTES_MAX (1u << 20)  /* a connection that does not take its replies is not read beyond this */
#define MQD_HELD_BYTES_MAX (1u << 20) /* nor one whose requests and finished replies, waiting for an earlier one, take more than this */
#define MQD_READS_PER_TURN 64         /* fairness: a turn ends after so many reads, the rest stays ready */
#define MQD_COMMAND_COUNT_MAX 4096
#define MQD_EVENT_COUNT_MAX 8192
#define MQD_SYNCFS_PARTITION_COUNT 24 /* more dirty partitions than this on one file system: one syncfs instead of many fdatasync */
#define MQD_BACKGROUND_FLUSH_BYTES (64ll << 20)
#define MQD_BACKGROUND_FLUSH_MS 5000
#define MQD_MUTE_TICK_COUNT 256
#define MQD_MUTE_TICK_MS 4

enum mqd_kafka_error {
    MQD_KAFKA_OFFSET_OUT_OF_RANGE = 1,
    MQD_KAFKA_CORRUPT_MESSAGE = 2,
    MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION = 3,
    MQD_KAFKA_NOT_LEADER_OR_FOLLOWER = 6,
    MQD_KAFKA_REQUEST_TIMED_OUT = 7,
    MQD_KAFKA_MESSAGE_TOO_LARGE = 10,
    MQD_KAFKA_INVALID_TOPIC = 17,
    MQD_KAFKA_NOT_ENOUGH_REPLICAS = 19,
    MQD_KAFKA_INVALID_REQUIRED_ACKS = 21,
    MQD_KAFKA_UNSUPPORTED_VERSION = 35,
    MQD_KAFKA_POLICY_VIOLATION = 44,
    MQD_KAFKA_INVALID_TXN_STATE = 48,
    MQD_KAFKA_INVALID_PRODUCER_ID_MAPPING = 49,
    MQD_KAFKA_TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53,
    MQD_KAFKA_STORAGE_ERROR = 56,
    MQD_KAFKA_FETCH_SESSION_ID_NOT_FOUND = 70,
    MQD_KAFKA_INVALID_FETCH_SESSION_EPOCH = 71,
    MQD_KAFKA_FENCED_LEADER_EPOCH = 74,
    MQD_KAFKA_UNKNOWN_LEADER_EPOCH = 75,
    MQD_KAFKA_UNSUPPORTED_COMPRESSION_TYPE = 76,
    MQD_KAFKA_INVALID_RECORD = 87,
    MQD_KAFKA_UNKNOWN_TOPIC_ID = 100,
    MQD_KAFKA_FETCH_SESSION_TOPIC_ID_ERROR = 106,
    MQD_KAFKA_INCONSISTENT_TOPIC_ID = 103
};

enum mqd_api { MQD_API_PRODUCE = 0, MQD_API_FETCH = 1, MQD_API_LIST_OFFSETS = 2, MQD_API_METADATA = 3, MQD_API_API_VERSIONS = 18 };

struct mqd_reactor;
struct mqd_request;
struct mqd_fetch_set;
struct mqd_check;

/* ---- topics ---- */

struct mqd_topic {
    struct mqd_topic *next_by_name, *next_by_id;
    uint32_t reference_count; /* one for the table, one for each fetch entry */
    bool removed;
    uint8_t topic_id[16];
    uint32_t partition_count;
    uint32_t *slots;
    uint32_t name_bytes;
    char name[MQD_TOPIC_NAME_BYTES_MAX + 1];
};

#define MQD_TOPIC_BUCKET_COUNT 4096
struct mqd_topics {
    struct mqd_topic *by_name[MQD_TOPIC_BUCKET_COUNT];
    struct mqd_topic *by_id[MQD_TOPIC_BUCKET_COUNT];
};
struct mqd_topic *mqd_topics_find(struct mqd_topics *topics, const struct mqd_topic_key *key);
struct mqd_topic *mqd_topics_find_id(struct mqd_topics *topics, const uint8_t topic_id[16]);
struct mqd_topic *mqd_topics_put(struct mqd_topics *topics, const uint8_t topic_id[16], const char *name, const uint32_t *slots, uint32_t partition_count);
void mqd_topics_remove(struct mqd_topics *topics, struct mqd_topic *topic);
void mqd_topic_release(struct mqd_topic *topic);
void mqd_topics_clear(struct mqd_topics *topics);
bool mqd_topic_is_internal(const struct mqd_topic *topic); /* written by coordinators alone */

/* ---- appends: one batch on its way into a partition, for a request of ours or for a peer that forwarded it ---- */

struct mqd_append {
    struct mqd_node node;        /* in the owner's `staged`, then `waiting`; at the sender in `forwarded_to` */
    struct mqd_request *request; /* NULL: forwarded to us by a peer */
    uint32_t slot;
    uint16_t peer;               /* forwarded: who sent it (owner's side) or who owns it (sender's side) */
    int16_t error;
    uint8_t acks_all;
    uint8_t pinned;              /* enum mqd_pin */
    uint8_t done;
    uint8_t control;             /* enum mqd_stage_flags */
    uint8_t ordered;             /* counts in request->undecided: the connection's later requests wait for it (mqd_check.c) */
    uint8_t awaits_verification; /* counts in request->awaiting */
    uint32_t check_index;        /* its place in check's payload */
    uint32_t size_bytes;
    int32_t partition_index;
    uint64_t offset;             /* of the batch in our own mapping; not for a peer's */
    int64_t guard;               /* 0 = not verified */
    struct mqd_check *check;     /* whose answer it waits for */
    struct mqd_refusal *refusal; /* record errors for the client */
    int64_t base_offset;
    int64_t end_offset;          /* acknowledged when the high watermark reaches it */
    int64_t log_append_time_ms;
    int64_t log_start_offset;
    uint64_t peer_token;         /* echoed to the peer */
    uint32_t forward_index;      /* in reactor->forwards while a peer has it; UINT32_MAX = not forwarded */
    uint64_t peer_generation;
    const char *message;         /* static text for the client, NULL = none */
};

struct mqd_forward_entry { struct mqd_append *append; uint32_t sequence, next_free; };

enum mqd_pin { MQD_PIN_NONE, MQD_PIN_FRAME, MQD_PIN_CONTROL }; /* what an append holds: request->arena_offset, or its own bytes in the control arena */

/* ---- checks: what the acceptor is asked before a batch may be written (mqd_check.c) ---- */

struct mqd_check {
    struct mqd_node node;      /* in reactor->check_queue while not sent */
    struct mqd_node parked;    /* appends that wait for the answer, in the payload's order; empty: nobody does any more, but the payload is lent */
    uint64_t acceptor_generation; /* asked */
    uint64_t offset;           /* of the payload in our mapping */
    uint64_t connection;       /* id, for logs */
    uint32_t size_bytes;
    uint32_t control_bytes, frame_bytes; /* what it holds of the bounds on both arenas */
    uint32_t count;            /* entries of the payload */
    uint32_t slot;
    uint32_t sequence, next_free;
    int16_t version;
    uint16_t kind;             /* MQD_CHECK_* */
    uint8_t used, sent;
};

#define MQD_DESCRIPTION_COUNT_MAX 16
struct mqd_description { uint64_t offset, generation; uint8_t used; }; /* lent to the acceptor of that generation; offset in the control arena */

struct mqd_refusal { /* why single records were refused; of its request's heap_bytes */
    uint32_t index_count;
    int32_t index[MQD_RECORD_ERROR_COUNT_MAX]; /* places in the batch; Kafka's batch_index */
    char record_message[352];                  /* for each of them */
    char message[200];
};

/* ---- partitions this worker owns ---- */

struct mqd_owned {
    struct mqd_partition *partition;
    uint32_t slot;
    uint32_t log_dir;
    struct mqd_node staged;       /* appends that the next write covers */
    struct mqd_node waiting;      /* appends written, not yet acknowledged; by end_offset */
    struct mqd_node write_node;   /* in reactor->to_write */
    struct mqd_node publish_node; /* in reactor->to_wake */
    struct mqd_node sync_node;    /* in log_dir->to_sync */
    int64_t high_watermark, last_stable_offset; /* last published */
    int64_t dirty_since_ms;
    int64_t sync_started_ns;
    uint32_t syncs_pending;       /* descriptors of the flush under way */
    int sync_error;
    uint8_t closing, preallocating, in_syncfs, snapshotting;
    uint64_t close_token;
};

struct mqd_log_directory {
    char *path;
    bool failed, full;
    int fd; /* for syncfs */
    bool syncfs_running;
    struct mqd_node to_sync;   /* owned partitions that want a flush */
    uint32_t to_sync_count;
    struct mqd_node in_syncfs; /* those that the running syncfs covers */
};

/* ---- requests ---- */

enum mqd_request_kind { MQD_REQUEST_READY, MQD_REQUEST_PRODUCE, MQD_REQUEST_FETCH, MQD_REQUEST_CONTROL };

struct mqd_produce_topic_entry { struct mqd_topic_key key; uint32_t append_count; uint8_t name[MQD_TOPIC_NAME_BYTES_MAX + 3]; };

struct mqd_request_order { /* what is kept of a Produce whose appends order their connection; most need none of it */
    int32_t timeout_ms;
    int16_t required_acks, producer_epoch;
    int64_t answer_by_ms;                 /* INT64_MAX: no acknowledgement is waited for by the clock */
    int64_t producer_id;                  /* of its transactional batches, with producer_epoch; -1 = none yet */
    struct mqd_text transactional_id;     /* in the frame, as long as an append pins it */
};

struct mqd_request {
    struct mqd_request *next;             /* of the connection, in order; or of the free list */
    struct mqd_connection *connection;    /* NULL: the client is gone, the work ends by itself */
    int32_t correlation_id;
    int16_t api_key, version;
    uint8_t kind, complete, timer_armed, no_reply;
    int64_t started_ns;
    int64_t deadline_ms;                  /* CLOCK_MONOTONIC */
    uint32_t timer_index;
    uint32_t pending;                     /* appends not done; cold reads not done */
    uint64_t id;
    uint64_t heap_bytes;                  /* taken of heap_bytes_max, given back with the request */
    /* produce */
    int64_t arena_offset;                 /* -1 = none */
    uint32_t arena_pins;
    uint32_t undecided;                   /* appends that order the connection and are neither staged nor refused; see mqd_check.c */
    uint32_t awaiting;                    /* of these: those that the next check asks for */
    uint8_t blocks;                       /* counts in connection->blocked */
    uint8_t order_known;                  /* `order` is filled */
    uint8_t transactional_id_kept;        /* on the heap: the frame is gone */
    uint8_t refused;                      /* an append has a refusal */
    uint32_t topic_count, append_count;
    struct mqd_produce_topic_entry *topics;
    struct mqd_append *appends;
    struct mqd_append inline_append;
    struct mqd_produce_topic_entry inline_topic;
    struct mqd_request_order order;       /* when order_known */
    /* fetch */
    struct mqd_fetch_set *set;
    int32_t wait_ms, bytes_min, bytes_max;
    int8_t isolation_level;
    uint8_t evaluated;                    /* ranges are found; only cold reads are awaited */
    uint8_t full;                         /* answer names every partition */
    int16_t fetch_error;
    /* control */
    uint32_t control_index;
    int64_t control_offset;               /* in the control arena, -1 = none */
    uint32_t frame_bytes;
    uint8_t *frame;                       /* heap copy while the control arena is full */
    struct mqd_node control_node;         /* in reactor->control_queue while not sent */
    uint64_t control_generation;          /* of the acceptor it was sent to */
    uint32_t reply_key_hash;
    uint8_t sent;
    struct mqd_buffer reply;              /* READY, CONTROL: from the correlation id on */
};

/* ---- connections ---- */

struct mqd_chunk { /* bytes of `out` up to memory_end, then the file range (if any) */
    uint64_t memory_end;
    struct mqd_range range;
};

struct mqd_connection {
    int fd;
    uint32_t index;
    uint32_t generation;
    uint64_t id;
    struct mqd_node ready_node;  /* in reactor->ready */
    struct mqd_node output_node; /* in reactor->to_send */
    struct mqd_node stall_node;  /* in reactor->stalled: waits for arena or memory */
    struct mqd_node answer_node; /* in reactor->to_answer */
    uint8_t readable, writable, hangup, closing;
    uint8_t expects_large;       /* the last frame was large: read its length first, so that the rest lands in a run of its own */
    uint32_t local_ipv4;         /* network order, 0 = not IPv4 */
    uint32_t peer_ipv4;          /* the same; for those who describe members */
    uint16_t local_port;         /* host order */
    uint16_t listener_id;
    int64_t last_active_ms;
    /* receiving: a frame that is not whole yet is on the heap (small) or in a run of arena extents (large) */
    uint8_t *partial;
    uint32_t partial_bytes, partial_capacity;
    int64_t run_offset;          /* -1 = none */
    int64_t run_began_ms;
    uint32_t run_bytes, run_filled;
    /* requests, oldest first */
    struct mqd_request *head, *tail;
    uint32_t inflight;
    uint32_t blocked;            /* requests that later ones may not overtake: nothing is read meanwhile */
    uint64_t held_bytes;         /* heap_bytes of these requests */
    /* quotas, while there are any (mqd_throttle.c) */
    uint8_t muted;               /* not read until muted_until_ns */
    uint8_t quota_kinds;         /* kinds this connection has used, bit by enum mqd_quota_kind */
    struct mqd_node mute_node;   /* in reactor->mute_wheel */
    int64_t muted_until_ns;
    uint64_t quota_key, quota_version;
    uint64_t quota_intervals[MQD_QUOTA_KIND_COUNT];
    /* sending */
    struct mqd_buffer out;
    uint64_t out_base;           /* stream position of out.bytes[0] */
    uint64_t out_sent;           /* stream position sent so far (memory only) */
    struct mqd_chunk *chunks;    /* ring of chunk_capacity, power of two */
    uint32_t chunk_head, chunk_count, chunk_capacity;
};

/* ---- fetch ---- */

struct mqd_fetch_entry {
    struct mqd_node waiter;     /* in reactor->waiting[slot] */
    struct mqd_node ready;      /* in set->ready */
    struct mqd_fetch_set *set;
    struct mqd_topic *topic;    /* referenced; NULL: unknown topic, `name` or id of the request is echoed */
    struct mqd_fetch_entry *hash_next;
    uint32_t order;
    int32_t partition_index;
    int64_t fetch_offset;
    int32_t bytes_max;
    int32_t current_leader_epoch;
    int32_t last_fetched_epoch;
    struct mqd_cursor cursor;
    int64_t sent_high_watermark, sent_log_start, sent_last_stable;
    int16_t sent_error;
    uint8_t sent_once, forgotten;
    uint32_t heap_bytes;
    /* outcome of the evaluation under way */
    struct mqd_fetch_outcome outcome;
    struct mqd_range range;
    struct mqd_aborted_list aborted; /* read_committed: transactions that overlap the range */
    struct mqd_topic_key key;   /* as the client named it; name bytes in `set->names` or the topic */
};

/* Where sequential readers without a session stand: their next request finds its place without a search. Direct-mapped; a collision costs a look-up. */
#define MQD_CURSOR_CACHE_COUNT 1024
struct mqd_cached_cursor { uint8_t topic_id[16]; int32_t partition_index; struct mqd_cursor cursor; };

struct mqd_fetch_set {
    struct mqd_node ready;
    struct mqd_node woken;          /* in reactor->woken */
    struct mqd_node session_node;   /* in reactor->sessions, least recently used first */
    struct mqd_fetch_entry **entries;
    uint32_t entry_count, entry_capacity;
    struct mqd_fetch_entry **buckets; /* sessions: by (topic, partition) */
    uint32_t bucket_count;
    struct mqd_request *request;    /* the fetch that is being evaluated or waits on this set, or NULL */
    uint32_t request_count;         /* requests that name it: it is not freed before they end */
    struct mqd_fetch_entry **included;
    uint32_t included_count, included_capacity;
    uint64_t heap_bytes;            /* of its entries */
    int32_t session_id;             /* 0 = one request only */
    int32_t session_epoch;
    bool by_id;
    int64_t last_used_ms;
};

/* ---- reply cache: answers that depend on the request bytes and the metadata version alone ---- */

#define MQD_REPLY_CACHE_COUNT 128
#define MQD_REPLY_CACHE_BYTES_MAX (8u << 20)
struct mqd_cached_reply { uint64_t version; uint64_t hash; uint8_t *key; uint32_t key_bytes; uint8_t *bytes; uint32_t size_bytes; uint64_t last_used; };

struct mqd_control_entry { struct mqd_request *request; uint32_t sequence; uint32_t next_free; uint8_t *key; uint32_t key_bytes; uint64_t key_hash; };

/* ---- commands and events, the only shared part ---- */

enum mqd_command_kind {
    MQD_COMMAND_LOG_DIR, MQD_COMMAND_LOG_DIR_FULL, MQD_COMMAND_TOPIC_PUT, MQD_COMMAND_TOPIC_REMOVE, MQD_COMMAND_PARTITION_OPEN, MQD_COMMAND_PARTITION_CLOSE,
    MQD_COMMAND_SET_OPTIONS, MQD_COMMAND_ADVANCE_START, MQD_COMMAND_ROLL, MQD_COMMAND_SET_LEADER_EPOCH, MQD_COMMAND_ENDPOINT_DIED,
    MQD_COMMAND_SEGMENTS_REPLACED
};
struct mqd_command {
    uint32_t kind;
    uint64_t token;
    uint32_t slot, number;
    int64_t offset, last_offset;
    uint8_t topic_id[16];
    char *text;
    uint32_t *slots;
    struct mqd_partition *partition;
    struct mqd_log_options options;
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
    struct mqd_reader *reader;
    int64_t window_offset;           /* receive window: one extent; -1 = arena full */
    uint32_t window_used;
    int64_t relieved_ms;             /* when stalled connections were last helped */
    struct mqd_connection *run_first; /* stalled for a run of extents longer than any other, or NULL: no other takes one before it */
    int64_t now_ns, now_ms, wall_ms;
    int64_t housekeeping_ms;
    uint32_t turn_bytes;             /* received since the last write: more than the L2 keeps is written at once */

    struct mqd_topics topics;
    struct mqd_log_directory log_dirs[MQD_LOG_DIR_COUNT_MAX];
    struct mqd_owned *owned[MQD_PARTITION_SLOT_COUNT];
    struct mqd_node waiting[MQD_PARTITION_SLOT_COUNT]; /* fetch entries by slot */
    uint8_t path_known[MQD_PARTITION_SLOT_COUNT]; /* the log directory it lies in + 1; 0 = not known */
    uint32_t owned_count;

    struct mqd_connection **connections; /* by index */
    uint32_t connection_capacity, connection_count;
    uint32_t *free_indexes;
    uint32_t free_index_count;
    uint32_t connection_count_max; /* main thread writes */
    uint64_t next_connection_id;
    struct mqd_node ready, stalled, to_send, to_answer;

    uint8_t quota_kinds;             /* what any quota limits; 0 = there are none */
    struct mqd_quota_limits *quota_limits;
    uint64_t quota_version;          /* of quota_limits */
    int64_t quota_burst_ns;
    struct mqd_node mute_wheel[MQD_MUTE_TICK_COUNT];
    int64_t mute_tick, mute_due_tick; /* the last one that was looked at; the first one that holds somebody, INT64_MAX = none */
    uint32_t muted_count;

    struct mqd_request *free_requests;
    uint64_t next_request_id;
    struct mqd_request **timers; /* heap by deadline_ms */
    uint32_t timer_count, timer_capacity;
    uint64_t heap_bytes;

    const struct mqd_produce_request *producing; /* while its appends are routed */
    struct mqd_node to_write, to_wake;
    uint64_t group_commit_deadline_ns;
    struct mqd_append *free_appends;
    struct mqd_node forwarded_to[MQD_ENDPOINT_COUNT_MAX];  /* sent, unanswered */
    struct mqd_forward_entry *forwards; /* what a token names; an answer that comes too late finds another sequence */
    uint32_t forward_capacity, forward_free;
    struct mqd_descriptor *overflow[MQD_ENDPOINT_COUNT_MAX]; /* descriptors that met a full ring, in order */
    uint32_t overflow_count[MQD_ENDPOINT_COUNT_MAX], overflow_capacity[MQD_ENDPOINT_COUNT_MAX], overflow_head[MQD_ENDPOINT_COUNT_MAX];

    struct mqd_node sessions, woken;
    struct mqd_cached_cursor cursors[MQD_CURSOR_CACHE_COUNT];
    struct mqd_fetch_set **session_table;
    uint32_t session_count;
    uint64_t session_heap_bytes;
    uint32_t cold_read_count; /* read-aheads under way */
    uint64_t seen_segments_generation;
    uint64_t random_state;

    struct mqd_control_entry control[MQD_CONTROL_REQUEST_COUNT_MAX];
    uint32_t control_free;
    struct mqd_node control_queue;
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
    uint32_t command_waiting; /* by mqd_atomic.h */
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
    bool serving; /* connections are taken over */
    _Atomic bool stop;
    bool stopped;
};

/* tokens of mqd_poll: kind in bits 56..62, the rest is the kind's own */
enum mqd_token_kind { MQD_TOKEN_CONNECTION = 1, MQD_TOKEN_WAKE, MQD_TOKEN_COMMAND, MQD_TOKEN_HANDOFF, MQD_TOKEN_SYNC, MQD_TOKEN_SYNCFS, MQD_TOKEN_PREALLOCATE,
                      MQD_TOKEN_READ_AHEAD, MQD_TOKEN_SNAPSHOT };
static inline uint64_t mqd_token(enum mqd_token_kind kind, uint64_t value) { return (uint64_t)kind << 56 | (value & 0xffffffffffffffull); }
static inline enum mqd_token_kind mqd_token_kind_of(uint64_t token) { return (enum mqd_token_kind)(token >> 56); }
static inline uint64_t mqd_token_value(uint64_t token) { return token & 0xffffffffffffffull; }

/* single writer; the acceptor reads at any time */
static inline void mqd_stat(struct mqd_reactor *r, enum mqd_counter counter, uint64_t amount) { mqd_count(&r->stats->counter[counter], amount); }
static inline void mqd_gauge(struct mqd_reactor *r, enum mqd_counter counter, uint64_t value) { mqd_store_relaxed(&r->stats->counter[counter], value); }
void mqd_time(struct mqd_reactor *r, enum mqd_histogram histogram, int64_t elapsed_ns);

/* mqd_reactor.c */
void mqd_reactor_refresh_clock(struct mqd_reactor *r);
void mqd_log(struct mqd_reactor *r, uint32_t level, uint64_t connection, uint32_t slot, const char *format, ...) __attribute__((format(printf, 5, 6)));
void mqd_reactor_emit(struct mqd_reactor *r, const struct mqd_event *event);

/* mqd_command.c */
void mqd_commands_run(struct mqd_reactor *r);
void mqd_command_done(struct mqd_reactor *r, uint64_t token, int error, uint32_t slot, int64_t offset, struct mqd_partition *partition, const char *text);

/* mqd_connection.c */
void mqd_handoff_accept(struct mqd_reactor *r);
struct mqd_connection *mqd_connection_by_token(struct mqd_reactor *r, uint64_t value);
void mqd_connection_read(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_connection_close(struct mqd_reactor *r, struct mqd_connection *c, const char *reason);
void mqd_connection_fail(struct mqd_reactor *r, struct mqd_connection *c, const char *reason); /* the peer broke the protocol: logs, closes */
void mqd_connection_resume(struct mqd_reactor *r, struct mqd_connection *c); /* reading may go on */
bool mqd_connection_may_read(const struct mqd_reactor *r, const struct mqd_connection *c);
void mqd_connections_sweep(struct mqd_reactor *r); /* idle ones */
void mqd_connections_resume_stalled(struct mqd_reactor *r); /* at the beginning of a turn, while nothing lies in the window */
void mqd_arena_settle(struct mqd_arena *arena);             /* mqd_arena.c: single extents come from the low end again */

/* mqd_output.c */
void mqd_output_append(struct mqd_reactor *r, struct mqd_connection *c, const void *bytes, uint32_t size_bytes);
void mqd_output_scratch(struct mqd_reactor *r, struct mqd_connection *c); /* takes r->scratch and its chunks */
void mqd_output_send(struct mqd_reactor *r, struct mqd_connection *c);
uint64_t mqd_output_pending_bytes(const struct mqd_connection *c);
bool mqd_output_has_room(const struct mqd_reactor *r, const struct mqd_connection *c); /* another answer may be added */
void mqd_output_close_after(struct mqd_reactor *r, struct mqd_connection *c); /* closes when what is pending has left */
void mqd_output_clear(struct mqd_reactor *r, struct mqd_connection *c);

/* mqd_request.c */
struct mqd_request *mqd_request_new(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header, enum mqd_request_kind kind);
void mqd_request_complete(struct mqd_reactor *r, struct mqd_request *request); /* its answer may go when its turn comes */
void mqd_request_free(struct mqd_reactor *r, struct mqd_request *request);
void mqd_request_orphan(struct mqd_reactor *r, struct mqd_request *request);   /* its connection is gone */
void mqd_connection_answer(struct mqd_reactor *r, struct mqd_connection *c);   /* encodes what is complete at the head of the queue */
void mqd_timer_arm(struct mqd_reactor *r, struct mqd_request *request, int64_t deadline_ms);
void mqd_timer_disarm(struct mqd_reactor *r, struct mqd_request *request);
void mqd_timers_run(struct mqd_reactor *r);
int64_t mqd_timers_next_ms(const struct mqd_reactor *r); /* -1 = none */
bool mqd_heap_take(struct mqd_reactor *r, uint64_t bytes);
void mqd_heap_give(struct mqd_reactor *r, uint64_t bytes);
bool mqd_heap_pressed(const struct mqd_reactor *r); /* little is left: who holds some gets no more */
bool mqd_request_hold(struct mqd_reactor *r, struct mqd_request *request, uint64_t bytes); /* false: no room */
bool mqd_request_reply(struct mqd_reactor *r, struct mqd_request *request, const void *bytes, uint32_t size_bytes); /* appends to `reply`; false: no room */

/* mqd_dispatch.c */
void mqd_frame_on(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes, int64_t arena_offset);

/* mqd_throttle.c. The _slow ones are for when there are quotas. */
void mqd_throttle_refresh(struct mqd_reactor *r);
void mqd_throttle_run(struct mqd_reactor *r);   /* connections whose debt is paid are read again */
void mqd_throttle_forget(struct mqd_reactor *r, struct mqd_connection *c); /* it closes */
void mqd_throttle_charge_slow(struct mqd_reactor *r, struct mqd_connection *c, uint32_t kind, uint64_t units);
bool mqd_throttle_admit_slow(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame, uint32_t size_bytes);
int32_t mqd_throttle_time_ms(const struct mqd_reactor *r, const struct mqd_connection *c); /* for an answer that leaves now */
int32_t mqd_throttle_fetch_bytes_max(const struct mqd_reactor *r, const struct mqd_connection *c, int32_t bytes_max);
void mqd_throttle_frame_on(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes, int64_t arena_offset);
int64_t mqd_throttle_work_begin(const struct mqd_reactor *r, const struct mqd_connection *c);
void mqd_throttle_work_end(struct mqd_reactor *r, struct mqd_connection *c, int64_t began_ns);
void mqd_throttle_stamp(struct mqd_reactor *r, struct mqd_request *request);
static inline void mqd_throttle_charge(struct mqd_reactor *r, struct mqd_connection *c, enum mqd_quota_kind kind, uint64_t units)
{
    if (r->quota_kinds >> kind & 1)
        mqd_throttle_charge_slow(r, c, kind, units);
}
/* May this frame (NULL: the next one) be served now? Otherwise the connection is muted. */
static inline bool mqd_throttle_admit(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame, uint32_t size_bytes)
{
    return !r->quota_kinds || mqd_throttle_admit_slow(r, c, frame, size_bytes);
}

/* mqd_produce.c */
void mqd_produce_on(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header, uint8_t *frame, uint32_t size_bytes, int64_t arena_offset);
void mqd_produce_encode(struct mqd_reactor *r, struct mqd_request *request);
bool mqd_produce_failed(const struct mqd_request *request);
void mqd_produce_timeout(struct mqd_reactor *r, struct mqd_request *request);
void mqd_append_done(struct mqd_reactor *r, struct mqd_append *append, int16_t error); /* outcome is final: tells the request or the peer */
void mqd_append_unpin(struct mqd_reactor *r, struct mqd_append *append);
void mqd_append_deliver(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch); /* to its owner; the outcome arrives through mqd_append_done */

/* mqd_describe.c */
void mqd_describe_on(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_describe_release(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
void mqd_describe_acceptor_died(struct mqd_reactor *r);

/* mqd_check.c */
int16_t mqd_check_transaction(struct mqd_reactor *r, struct mqd_request *request, const struct mqd_batch *batch, const char **message); /* 0, or why the batch cannot be of a transaction */
bool mqd_check_keys(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch); /* of a compacted topic; false: it is done, or the acceptor looks */
void mqd_check_order(struct mqd_reactor *r, struct mqd_append *append);      /* while it is routed: later requests of its connection may not overtake it */
void mqd_check_decided(struct mqd_reactor *r, struct mqd_append *append);    /* it is ordered no more: its place in the log is sure, or it has none */
void mqd_check_routed(struct mqd_reactor *r, struct mqd_request *request);   /* all of a request are on their way, some undecided */
void mqd_check_verify(struct mqd_reactor *r, struct mqd_append *append, int64_t guard); /* the owner wants to know of its transaction */
void mqd_check_leave(struct mqd_reactor *r, struct mqd_append *append);      /* it is done and waits for nothing */
void mqd_check_abandon(struct mqd_reactor *r, struct mqd_request *request);  /* its client is gone: what is parked is not written. May free the request */
bool mqd_check_expire(struct mqd_reactor *r, struct mqd_append *append);     /* true: it was parked and is refused */
void mqd_check_on_answer(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_check_send_queued(struct mqd_reactor *r);
void mqd_check_acceptor_died(struct mqd_reactor *r);

/* mqd_owner.c: what the owner of a partition does with appends */
void mqd_owner_stage(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch, uint8_t *bytes, bool patch_in_place);
void mqd_owner_write_all(struct mqd_reactor *r);
void mqd_owner_publish(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_owner_wake_all(struct mqd_reactor *r);
void mqd_owner_fail_all(struct mqd_reactor *r, struct mqd_owned *owned, int16_t error);
void mqd_owner_wake_slot(struct mqd_reactor *r, uint32_t slot); /* tells every waiter to look again */
void mqd_owner_fence_dir(struct mqd_reactor *r, uint32_t log_dir, int error, const char *what);

/* mqd_flush.c */
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

/* mqd_forward.c */
void mqd_forward_append(struct mqd_reactor *r, struct mqd_append *append, uint16_t owner, uint64_t owner_generation, uint64_t offset, uint32_t size_bytes, int32_t leader_epoch);
void mqd_forward_send(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *descriptor); /* never loses, never overtakes */
void mqd_forward_flush(struct mqd_reactor *r);
bool mqd_forward_pending(const struct mqd_reactor *r);
void mqd_forward_forget(struct mqd_reactor *r, struct mqd_append *append);
void mqd_links_drain(struct mqd_reactor *r);
void mqd_forward_endpoint_died(struct mqd_reactor *r, uint32_t endpoint);

/* mqd_fetch.c, mqd_fetch_session.c */
void mqd_fetch_on(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *body, uint32_t size_bytes);
void mqd_fetch_evaluate(struct mqd_reactor *r, struct mqd_request *request, bool expired); /* request is at the head of its connection */
void mqd_fetch_encode(struct mqd_reactor *r, struct mqd_request *request);
void mqd_fetch_abandon(struct mqd_reactor *r, struct mqd_request *request);
void mqd_fetch_wake_slot(struct mqd_reactor *r, uint32_t slot);
void mqd_fetch_run_woken(struct mqd_reactor *r);
void mqd_fetch_on_read_ahead(struct mqd_reactor *r, uint64_t id, int result);
struct mqd_fetch_set *mqd_fetch_set_new(struct mqd_reactor *r);
void mqd_fetch_set_free(struct mqd_reactor *r, struct mqd_fetch_set *set);
struct mqd_fetch_entry *mqd_fetch_set_put(struct mqd_reactor *r, struct mqd_fetch_set *set, const struct mqd_topic_key *key, const struct mqd_fetch_partition *partition);
bool mqd_fetch_entry_resolve(struct mqd_reactor *r, struct mqd_fetch_entry *entry);
void mqd_fetch_set_forget(struct mqd_fetch_set *set, const struct mqd_topic_key *key, int32_t partition_index);
void mqd_fetch_set_compact(struct mqd_reactor *r, struct mqd_fetch_set *set);
/* Which set serves this request: the session it names, a new one, or one of its own. Returns a Kafka error code. */
int16_t mqd_session_find(struct mqd_reactor *r, const struct mqd_fetch_request *fetch, struct mqd_fetch_set **set, bool *full, bool *create);
void mqd_session_create(struct mqd_reactor *r, struct mqd_fetch_set *set);
void mqd_session_remove(struct mqd_reactor *r, struct mqd_fetch_set *set);

/* mqd_list_offsets.c */
bool mqd_list_offsets_on(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *body, uint32_t size_bytes); /* false: not for us */

/* mqd_control_request.c */
void mqd_control_on(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *frame, uint32_t size_bytes);
void mqd_control_on_response(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_control_on_close(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
void mqd_control_on_parked(struct mqd_reactor *r, const struct mqd_descriptor *descriptor);
void mqd_control_orphan(struct mqd_reactor *r, struct mqd_request *request); /* sent, not answered, and its client has gone */
void mqd_control_forget(struct mqd_reactor *r, struct mqd_request *request);
void mqd_control_send_queued(struct mqd_reactor *r);
void mqd_control_acceptor_died(struct mqd_reactor *r);
bool mqd_reply_cache_find(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *frame, uint32_t size_bytes);
void mqd_reply_cache_put(struct mqd_reactor *r, uint8_t *key, uint32_t key_bytes, uint64_t hash, uint64_t version, const uint8_t *bytes, uint32_t size_bytes);
void mqd_reply_cache_clear(struct mqd_reactor *r);
uint64_t mqd_reply_key(struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *frame, uint32_t size_bytes, uint8_t **key, uint32_t *key_bytes);

#endif
