/* What exists while a request waits for its response: the request, the appends of a Produce, the
 * checks that they wait for, and the connection. Private to the reactor's thread. */
#ifndef MQD_REQUEST_H
#define MQD_REQUEST_H

#include "base/list.h"
#include "log/reader/reader.h"
#include "native.h"
#include "shm/layout.h"
#include "shm/quota.h"
#include "wire/wire.h"

#define MQD_FRAME_BYTES_MIN 8 /* api key, version, correlation id */

struct mqd_check;
struct mqd_connection;
struct mqd_fetch_set;
struct mqd_local;
struct mqd_lookup;
struct mqd_request;
struct mqd_share_job;
struct mqd_subject;
struct mqd_tls;

/* ---- appends: one batch for one partition, for our own request or forwarded by a peer ---- */

struct mqd_append {
    struct mqd_node node;        /* in the owner's `staged`, then `waiting`; at the sender in `forwarded_to` */
    struct mqd_request *request; /* NULL: forwarded to us by a peer */
    uint32_t slot;
    uint16_t peer; /* forwarded: the sender (on the owner's side) or the owner (on the sender's side) */
    /* while the append is not done: the error with which it completes once the high watermark
     * reaches end_offset */
    int16_t error;
    uint8_t acks_all;
    uint8_t pinned; /* enum mqd_pin */
    uint8_t done;
    uint8_t stage_flags; /* enum mqd_stage_flags */
    /* counted in request->undecided_count: the connection's later requests wait for it
     * (server/check/check.c) */
    uint8_t ordered;
    uint8_t awaits_verification; /* counted in request->awaiting_verification_count */
    uint32_t check_index;        /* its index in the check's payload */
    uint32_t size_bytes;
    int32_t partition_index;
    uint64_t offset;                     /* of the batch in our own mapping; not set for a peer's batch */
    int64_t guard;                       /* of the transaction's verification; 0 = not verified */
    struct mqd_check *check;             /* the check whose response it waits for */
    struct mqd_refusal *refusal;         /* record errors for the client */
    struct mqd_relay_entry *relay_entry; /* while it is on its way to a leader on another host (server/relay/relay.h) */
    int64_t base_offset;
    int64_t end_offset; /* acknowledged when the high watermark reaches this */
    int64_t log_append_time_ms;
    int64_t log_start_offset;
    uint64_t peer_token;    /* returned to the peer */
    uint32_t forward_index; /* in reactor->forwards while a peer has it; UINT32_MAX = not forwarded */
    uint64_t peer_generation;
    const char *message; /* static text for the client, NULL = none */
    /* the batch was for a retired partition and was redirected to the partition in `slot`
     * (server/redirect.h) */
    uint8_t sent_to_target;
    /* owner's side: the coordinator must write the same marker to partition redirect_index */
    uint8_t marker_redirected;
    int16_t verdict; /* with sent_to_target: verdict of the retired partition's owner, with verdict_offset */
    /* at the sender: slot of the retired partition; at that partition's owner: slot of the target,
     * for the response */
    uint32_t home_slot;
    uint32_t redirect_index;
    int64_t verdict_offset;
};

struct mqd_forward_entry {
    struct mqd_append *append;
    uint32_t sequence, next_free;
};

/* the memory that an append pins: the request's frame (request->arena_offset), its own bytes in the
 * control arena, or its own run of extents */
enum mqd_pin { MQD_PIN_NONE, MQD_PIN_FRAME, MQD_PIN_CONTROL, MQD_PIN_RUN };

/* ---- checks: queries to the acceptor before a batch may be written (server/check/check.c) ---- */

struct mqd_check {
    struct mqd_node node; /* in reactor->check_queue while not sent */
    /* appends that wait for the response, in the payload's order; even when the list is
     * empty, the acceptor may read the payload until it has responded */
    struct mqd_node parked;
    uint64_t acceptor_generation; /* generation of the acceptor that was queried */
    struct mqd_check_job *job;    /* a job of the thread pool, which decides instead of the acceptor; NULL = none */
    uint64_t offset;              /* of the payload in our mapping */
    uint64_t connection;          /* id, for logs */
    uint32_t size_bytes;
    uint32_t control_bytes, frame_bytes; /* counted in reactor->check_control_bytes and check_frame_bytes */
    uint32_t count;                      /* number of entries in the payload */
    uint32_t slot;
    uint32_t sequence, next_free;
    int16_t version;
    uint16_t kind; /* MQD_CHECK_* */
    uint8_t used, sent;
    uint8_t compression;                          /* 1 + the codec that the batch must have, or 0 */
    uint8_t buffer_pin;                           /* enum mqd_pin */
    int32_t compression_level, message_bytes_max; /* message_bytes_max: the largest batch allowed */
    /* memory for the compressed batch: its size (0 = none yet), and how much of the batch has
     * arrived */
    uint32_t buffer_bytes, buffer_filled;
    uint64_t buffer; /* its offset in our mapping */
};

/* why single records were refused; counted in its request's heap_bytes */
struct mqd_refusal {
    uint32_t index_count;
    int32_t record_indexes[MQD_RECORD_ERROR_COUNT_MAX]; /* in the batch; Kafka's batch_index */
    char record_message[352];                           /* one message for all these records */
    char message[200];
};

/* ---- requests ---- */

enum mqd_request_kind {
    MQD_REQUEST_READY, /* answered on arrival: `reply` already has the response */
    MQD_REQUEST_PRODUCE,
    MQD_REQUEST_FETCH,
    MQD_REQUEST_CONTROL,
    MQD_REQUEST_LIST_OFFSETS,
    MQD_REQUEST_SHARE
};

struct mqd_produce_topic_entry {
    struct mqd_topic_key key;
    uint32_t append_count;
    uint8_t name[MQD_TOPIC_NAME_BYTES_MAX + 3];
};

/* fields for a Produce that waits for a check and must not be overtaken by later requests of its
 * connection; most requests do not need them */
struct mqd_produce_fields {
    int32_t timeout_ms;
    int16_t required_acks, producer_epoch;
    int64_t response_by_ms;           /* deadline for the response; INT64_MAX: no time limit */
    int64_t producer_id;              /* producer id of its transactional batches, with producer_epoch; -1 = none yet */
    struct mqd_text transactional_id; /* in the frame, while an append pins it */
};

/* a request's time stamps for server/slow, while it is enabled; 0 = not reached */
struct mqd_request_times {
    int64_t begun_ns, flushed_ns, completed_ns;
    uint32_t slot;     /* of the partition that was done last; UINT32_MAX = none */
    uint8_t forwarded; /* a batch went to another worker */
};

struct mqd_request {
    struct mqd_request *next;          /* the connection's next request in order; or next in the free list */
    struct mqd_connection *connection; /* NULL: the client has disconnected and the request finishes without it */
    int32_t correlation_id;
    int16_t api_key, version;
    uint8_t kind, complete, timer_armed, no_reply;
    int64_t started_ns;
    int64_t deadline_ms; /* CLOCK_MONOTONIC */
    uint32_t timer_index;
    uint32_t pending; /* appends not done; or cold reads not done */
    uint64_t id;
    uint64_t heap_bytes; /* charged to heap_bytes_max until the request is freed */
    /* produce */
    int64_t arena_offset; /* -1 = none */
    uint32_t arena_pins;
    /* appends that hold back later requests of the connection and are neither staged nor refused
     * yet; see server/check/check.c */
    uint32_t undecided_count;
    uint32_t awaiting_verification_count; /* the undecided appends that the next check will query */
    uint32_t relaying_count;              /* its appends that wait for leaders on other hosts */
    uint8_t blocks;                       /* counted in connection->block_count */
    uint8_t has_produce_fields;           /* `produce_fields` is filled in */
    uint8_t transactional_id_kept;        /* copied to the heap, because the frame is gone */
    uint8_t refused;                      /* at least one append has a refusal */
    uint32_t topic_count, append_count;
    struct mqd_produce_topic_entry *topics;
    struct mqd_append *appends;
    struct mqd_append inline_append;
    struct mqd_produce_topic_entry inline_topic;
    struct mqd_produce_fields produce_fields; /* if has_produce_fields */
    struct mqd_request_times times;           /* while slow requests are logged */
    /* Fetch; this field and all below are not used by a Produce */
    struct mqd_fetch_set *set;
    int32_t wait_ms, bytes_min, bytes_max;
    int8_t isolation_level;
    uint8_t positions_only; /* from a local client that reads the files itself */
    uint8_t evaluated;      /* ranges are determined; only cold reads are awaited */
    uint8_t lists_all;      /* the response includes every partition */
    int16_t fetch_error;
    /* ShareFetch, ShareAcknowledge; these also use some fields of Fetch */
    int16_t share_error; /* error of the whole request */
    struct mqd_share_job *share;
    /* control */
    uint32_t control_index;
    int64_t control_offset; /* in the control arena, -1 = none */
    uint32_t frame_bytes;
    uint8_t *frame;               /* heap copy while the control arena is full */
    struct mqd_node control_node; /* in connection->control_waiting; in reactor->control_sent once sent */
    uint64_t control_generation;  /* of the acceptor that it was sent to */
    uint32_t reply_key_hash;
    uint8_t sent;
    uint16_t control_flags;    /* MQD_REQUEST_PRINCIPAL, MQD_REQUEST_RAW_TOKEN */
    uint8_t disconnect;        /* the connection closes once the request is answered */
    uint8_t control_counted;   /* counted in connection->control_sent */
    uint8_t control_passed;    /* counted in reactor->control_passed_extents, while its frame is in the arena */
    struct mqd_buffer reply;   /* READY, CONTROL, LIST_OFFSETS: the response without its length word */
    struct mqd_lookup *lookup; /* a LIST_OFFSETS that waits for flushes */
};

struct mqd_awaited_flush {
    uint32_t slot;
    int64_t end_offset;
};

struct mqd_lookup {       /* counted in its request's heap_bytes */
    struct mqd_node node; /* in reactor->lookups while it waits */
    struct mqd_request *request;
    uint8_t *body; /* follows the list */
    uint32_t body_bytes;
    uint32_t count, awaited_index; /* currently waits for awaited[awaited_index] */
    struct mqd_awaited_flush awaited[];
};

/* Prefetches a request into the CPU cache: when thousands of requests wait for followers, the
 * cache cannot hold them all. NULL is allowed. */
static inline void mqd_request_prefetch(const struct mqd_request *request)
{
    uintptr_t at = (uintptr_t)request;
    for (uintptr_t line = 0; line < offsetof(struct mqd_request, inline_topic) + 2 * MQD_CACHE_LINE;
         line += MQD_CACHE_LINE)
        __builtin_prefetch((const void *)(at + line), 1);
}

/* ---- connections ---- */

/* bytes of `out` up to memory_end, then the file range (if any) */
struct mqd_chunk {
    uint64_t memory_end;
    struct mqd_range range;
};

struct mqd_connection {
    int fd; /* of a local client: its Unix socket */
    uint32_t index;
    uint32_t generation;
    uint64_t id;
    struct mqd_node ready_node;    /* in reactor->ready */
    struct mqd_node output_node;   /* in reactor->to_send */
    struct mqd_node stall_node;    /* in reactor->stalled: waits for arena space or memory */
    struct mqd_node response_node; /* in reactor->to_respond */
    uint8_t readable, writable, hangup, closing;
    uint8_t broken; /* both directions are closed: its responses cannot be delivered */
    /* the last frame was large: read the next length first, so that the rest goes directly into a
     * run of its own */
    uint8_t expects_large;
    uint8_t skips_empty_batches;           /* its client advances over batches without records (dispatch.c) */
    uint32_t local_ipv4;                   /* network order, 0 = not IPv4 */
    uint32_t peer_ipv4;                    /* like local_ipv4; used to describe group members */
    uint8_t peer_ip[16];                   /* IPv4 as ::ffff:a.b.c.d */
    uint16_t local_port, peer_port;        /* host order; peer_port 0: over shared memory */
    int32_t address_tally, listener_tally; /* tallies in which the connection is counted (shm/tally.h) */
    uint16_t listener_id;
    int32_t peer_node;               /* the authenticated host at the other end; -1 = a client */
    struct mqd_local *local;         /* transfers bytes through shared memory (server/local/local.h); NULL = TCP */
    struct mqd_tls *tls;             /* encrypts what is sent (server/tls/secure.h); NULL = plain */
    uint32_t unsent_encrypted_bytes; /* encrypted and not sent */
    int64_t handshake_deadline_ms;   /* with tls: when its handshake must have ended */
    uint8_t awaits_principal;        /* with tls: waits until the name in its certificate is mapped to a principal */
    int64_t last_active_ms;
    /* authentication (server/authentication.h) */
    uint8_t authentication; /* enum mqd_authentication */
    uint8_t raw_tokens;     /* frames are raw tokens, after SaslHandshake 0 */
    uint8_t unauthenticated_request_count;
    uint8_t principal_kind; /* enum mqd_principal_kind */
    uint16_t principal_bytes;
    uint32_t frame_bytes_min, frame_bytes_max;
    char *principal; /* "User:alice"; not terminated; NULL = the listener does not authenticate */
    /* rights (server/rights/subject.h) */
    struct mqd_subject *subject; /* NULL = the connection needs no rights, or has not authenticated yet */
    struct mqd_node subject_node;
    uint8_t awaits_subject;                     /* counted in `block_count` */
    int64_t authenticate_by_ms, session_end_ms; /* INT64_MAX = no limit */
    /* receiving: an incomplete frame is kept on the heap (small) or in a run of arena extents
     * (large) */
    uint8_t *partial;
    uint32_t partial_bytes, partial_capacity;
    int64_t run_offset; /* -1 = none */
    int64_t run_began_ms;
    uint32_t run_bytes, run_filled;
    uint32_t large_bytes; /* bytes that it waits for, while in reactor->large_waiting */
    /* requests, oldest first */
    struct mqd_request *head, *tail;
    uint32_t inflight;
    /* of a local client: number of batches that wait for a leader on another host; other responses
     * overtake theirs (mqd_connection_respond) */
    uint32_t relaying_count;
    /* requests that later ones may not overtake; the connection is not read while there are any */
    uint32_t block_count;
    uint64_t held_bytes; /* sum of its requests' heap_bytes */
    /* requests for the acceptor (server/control_request.c) */
    struct mqd_node control_waiting; /* not sent yet, in order */
    struct mqd_node control_turn;    /* in reactor->control_turns */
    uint32_t control_sent;           /* sent and unanswered, except those that take long */
    uint32_t control_count;          /* in the table of requests in flight */
    struct mqd_node share_sessions;  /* share sessions that the connection has opened (server/share/share.h) */
    /* quotas, while any are configured (server/throttle.c) */
    uint8_t muted;             /* not read until muted_until_ns */
    uint8_t quota_kinds;       /* quota kinds this connection has used, as bits of enum mqd_quota_kind */
    struct mqd_node mute_node; /* in reactor->mute_wheel */
    int64_t muted_until_ns;
    /* `quota` was found for the client id with this key, in this version of the rules */
    uint64_t quota_client, quota_version;
    struct mqd_quota_match quota;
    /* sending */
    struct mqd_buffer out;
    uint64_t out_base;        /* stream position of out.bytes[0] */
    uint64_t out_sent;        /* stream position sent so far (memory only) */
    struct mqd_chunk *chunks; /* ring of chunk_capacity, power of two */
    uint32_t chunk_head, chunk_count, chunk_capacity;
    /* client id of the newest frame, truncated, while slow requests are reported */
    uint8_t slow_client_bytes;
    char slow_client[64];
};

/* Whether the client can use the broker addresses that the reactor knows: those of each broker's
 * first listener. Clients of other listeners must request the metadata. */
static inline bool mqd_connection_can_use_node_addresses(const struct mqd_connection *c)
{
    return c->listener_id == 0 || c->local;
}

/* server/request.c */
struct mqd_reactor;
struct mqd_request *mqd_request_new(struct mqd_reactor *r, struct mqd_connection *c,
                                    const struct mqd_request_header *header, enum mqd_request_kind kind);
/* marks the request complete; its response is sent after those of earlier requests */
void mqd_request_complete(struct mqd_reactor *r, struct mqd_request *request);
void mqd_request_free(struct mqd_reactor *r, struct mqd_request *request);
void mqd_request_orphan(struct mqd_reactor *r, struct mqd_request *request); /* the request's connection is closed */
/* encodes the complete requests at the head of the queue */
void mqd_connection_respond(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_timer_arm(struct mqd_reactor *r, struct mqd_request *request, int64_t deadline_ms);
void mqd_timer_disarm(struct mqd_reactor *r, struct mqd_request *request);
void mqd_timers_run(struct mqd_reactor *r);
int64_t mqd_timers_next_ms(const struct mqd_reactor *r); /* -1 = none */
bool mqd_heap_take(struct mqd_reactor *r, uint64_t bytes);
void mqd_heap_release(struct mqd_reactor *r, uint64_t bytes);
/* whether the heap is nearly full: connections that hold memory get no more */
bool mqd_heap_under_pressure(const struct mqd_reactor *r);
/* takes memory from the heap and counts it as held by the request; false: no room */
bool mqd_request_charge(struct mqd_reactor *r, struct mqd_request *request, uint64_t bytes);
/* gives back memory charged to the request, before the request ends */
void mqd_request_uncharge(struct mqd_reactor *r, struct mqd_request *request, uint64_t bytes);
/* appends to `reply`; false: no room */
bool mqd_request_reply_append(struct mqd_reactor *r, struct mqd_request *request, const void *bytes,
                              uint32_t size_bytes);

#endif
