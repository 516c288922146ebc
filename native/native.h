/* The one public header of the native core: declarations shared by Python (through cffi) and the C
 * files.
 *
 * build_ffi.py reads this file, so it contains only plain declarations: no conditional code, no
 * inline functions, and #define only of literal numbers. Lines between MQD_CDEF_OFF and MQD_CDEF_ON
 * are for C only.
 *
 * Errors: a function that returns int returns 0 (or a count) on success and -1 on failure;
 * mqd_error_message() then returns the cause and what to do (thread-local, valid until the next
 * call on this thread) and mqd_error_code() the errno or MQD_E*. Units are in the names: *_bytes,
 * *_ms, *_ns; offsets are record offsets; positions are byte positions in a segment file.
 */
#ifndef MQD_NATIVE_H
#define MQD_NATIVE_H
/* MQD_CDEF_OFF */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
/* MQD_CDEF_ON */

#define MQD_WORKER_COUNT_MAX 64
#define MQD_ENDPOINT_COUNT_MAX 66
/* 16384 for users' topics, the rest for internal topics: mqd/cluster/metadata/rules/placement.py */
#define MQD_PARTITION_SLOT_COUNT 16640
#define MQD_OWNER_NONE 65535
#define MQD_TOPIC_NAME_BYTES_MAX 249
#define MQD_LOG_DIR_COUNT_MAX 32

/* ---- errors ---- */

#define MQD_E_LAYOUT 10001  /* the peer process was built with another layout */
#define MQD_E_CORRUPT 10002 /* stored bytes differ from what was written */
#define MQD_E_FULL 10003    /* a bounded resource is full; try again later */
#define MQD_E_INVALID 10004 /* an invalid argument */
#define MQD_E_STALE 10005   /* the data changed under the reader; read again */

const char *mqd_error_message(void);
int mqd_error_code(void);

/* ---- shared memory ---- */

enum mqd_process_state { MQD_PROCESS_ABSENT, MQD_PROCESS_STARTING, MQD_PROCESS_RUNNING, MQD_PROCESS_DEAD };
/* the role of this host's replica; a partition has one leader */
enum mqd_slot_role { MQD_ROLE_LEADS, MQD_ROLE_FOLLOWS, MQD_ROLE_NONE };
enum mqd_slot_state { MQD_SLOT_FREE, MQD_SLOT_OPENING, MQD_SLOT_ONLINE, MQD_SLOT_OFFLINE, MQD_SLOT_DELETING };

/* The positions of a partition that its owner publishes; one cache line. Offsets are record
 * offsets; end offsets are exclusive. */
struct mqd_positions {
    int64_t log_start_offset;
    int64_t high_watermark;
    int64_t log_end_offset;
    int64_t last_stable_offset;
    int64_t durable_offset;           /* everything below is on disk */
    int64_t high_watermark_segment;   /* base offset of the segment that contains high_watermark_position */
    int64_t log_end_segment;          /* base offset of the active segment */
    uint32_t high_watermark_position; /* byte position; bytes before it are readable */
    uint32_t log_end_position;
};

/* a consistent copy of a partition slot, for Python */
struct mqd_partition_view {
    struct mqd_positions positions;
    uint8_t topic_id[16];
    int32_t partition_index;
    int32_t leader_epoch;
    uint16_t owner;
    uint8_t state;
    uint8_t log_dir;
    uint8_t role;           /* enum mqd_slot_role */
    uint8_t latest_pending; /* a new leader's high watermark is below its epoch's start (KIP-207) */
    uint8_t flush_on_ack;
    uint64_t segments_generation;
    uint64_t owner_generation;
};

/* client traffic of this host's replica, since its slot was assigned */
struct mqd_partition_traffic {
    uint64_t records_in;
    uint64_t bytes_in;
    uint64_t bytes_out;
};

size_t mqd_control_size_bytes(void);
uint64_t mqd_abi_hash(void);
uint64_t mqd_local_abi_hash(void); /* of the layout shared with local clients (shm/local_layout.h) */
/* called once by the keeper, on zeroed memory */
int mqd_control_format(void *control, size_t size_bytes, uint32_t worker_count, const uint8_t boot_id[16],
                       uint64_t generation, int64_t now_ms);
/* called by all other processes; -1 MQD_E_LAYOUT when magic, version, hash or size differ */
int mqd_control_attach(void *control, size_t size_bytes);
uint32_t mqd_control_worker_count(void *control);
uint64_t mqd_control_generation(void *control);
uint64_t mqd_control_metadata_version(void *control);
void mqd_control_set_metadata_version(void *control, uint64_t version);
void mqd_control_set_broker(void *control, int64_t broker_epoch, uint64_t incarnation, int64_t lease_deadline_ns);
int64_t mqd_control_broker_epoch(void *control);        /* as last set; 0 in a new segment */
uint64_t mqd_control_broker_incarnation(void *control); /* 0 = not set yet */
int64_t mqd_control_lease_deadline_ns(void *control);   /* CLOCK_BOOTTIME; until then this host may act as a leader */
uint32_t mqd_control_log_level(void *control);
void mqd_control_set_log_level(void *control, uint32_t level);
int mqd_control_set_api_versions(void *control, uint32_t version, const uint8_t *body, uint32_t size_bytes);
/* The level of share.version. If it is above 0, workers answer ShareFetch and ShareAcknowledge. */
void mqd_control_set_share_version(void *control, uint32_t level);

/* Endpoint slots (workers, acceptor, controller). set_state increments the generation when state is DEAD. */
void mqd_endpoint_set_state(void *control, uint32_t endpoint, uint32_t state, int32_t pid);
uint32_t mqd_endpoint_state(void *control, uint32_t endpoint);
uint64_t mqd_endpoint_generation(void *control, uint32_t endpoint);
int32_t mqd_endpoint_pid(void *control, uint32_t endpoint);
uint32_t mqd_worker_connection_count(void *control, uint32_t worker);

/* Partition slots. assign/clear/set_state: called by the controller (set_state also by the owner). */
int mqd_slot_assign(void *control, uint32_t slot, const uint8_t topic_id[16], int32_t partition_index, uint16_t owner,
                    uint8_t log_dir, int32_t leader_epoch);
void mqd_slot_clear(void *control, uint32_t slot);
void mqd_slot_set_state(void *control, uint32_t slot, uint8_t state);
/* Requests one MQD_LINK_FLUSHED from the owner. Read the positions again after the call: the flush
 * may have ended before the call. -1 MQD_E_INVALID: no such slot. */
int mqd_slot_request_flush_notice(void *control, uint32_t slot);
/* The thread that opens a partition calls begin before and end after it. An assertion that fails in
 * between is counted in the slot, where the worker's successor sees it. begin returns this count
 * since the slot was assigned to the partition; -1 MQD_E_INVALID: no such slot. */
int mqd_slot_recovery_begin(void *control, uint32_t slot);
void mqd_slot_recovery_end(void);
/* -1 MQD_E_INVALID: no such slot; a free slot returns state FREE */
int mqd_slot_view(void *control, uint32_t slot, struct mqd_partition_view *out);
/* Lists in ascending order the slots in use, including those that a controller was assigning when it
 * died. `slots` has room for MQD_PARTITION_SLOT_COUNT. Returns the number of slots listed. */
uint32_t mqd_slots_list_used(void *control, uint32_t *slots);
int mqd_slot_traffic(void *control, uint32_t slot, struct mqd_partition_traffic *out);

enum mqd_counter {
    MQD_COUNT_LOOPS,
    MQD_COUNT_WAKEUPS_SENT,
    MQD_COUNT_BYTES_IN,
    MQD_COUNT_BYTES_OUT,
    MQD_COUNT_REQUESTS_PRODUCE,
    MQD_COUNT_REQUESTS_FETCH,
    MQD_COUNT_REQUESTS_LIST_OFFSETS,
    MQD_COUNT_REQUESTS_CACHED,
    MQD_COUNT_REQUESTS_FORWARDED_CONTROL,
    MQD_COUNT_BATCHES_APPENDED,
    MQD_COUNT_RECORDS_APPENDED,
    MQD_COUNT_BYTES_APPENDED,
    MQD_COUNT_BATCHES_FORWARDED,
    MQD_COUNT_BATCHES_REFUSED,
    MQD_COUNT_DUPLICATES,
    MQD_COUNT_FETCH_BYTES,
    MQD_COUNT_FETCH_SENDFILE_BYTES,
    MQD_COUNT_FETCH_PARKED,
    MQD_COUNT_FETCH_COLD,
    MQD_COUNT_SYNCS,
    MQD_COUNT_SYNC_FAILURES,
    MQD_COUNT_ROLLS,
    MQD_COUNT_CONNECTIONS_ACCEPTED,
    MQD_COUNT_CONNECTIONS_CLOSED,
    MQD_COUNT_CONNECTIONS_REFUSED,
    MQD_COUNT_PROTOCOL_ERRORS,
    MQD_GAUGE_ARENA_EXTENTS_USED,
    MQD_GAUGE_ARENA_EXTENTS_TOTAL,
    MQD_GAUGE_HEAP_BYTES,
    MQD_GAUGE_SESSIONS,
    MQD_GAUGE_PRODUCERS,
    MQD_COUNT_ARENA_STALLS,
    MQD_COUNT_LINK_STALLS,
    MQD_COUNT_THROTTLED,
    MQD_GAUGE_LOCAL_ATTACHMENTS,
    MQD_GAUGE_LOCAL_BYTES,
    MQD_COUNT_LOCAL_ATTACHES,
    MQD_COUNT_LOCAL_REFUSED,
    MQD_COUNT_LOCAL_REQUESTS,
    MQD_COUNT_LOCAL_LOOKUPS,
    MQD_COUNT_REPLICA_BYTES,
    MQD_COUNT_RELAYED_BATCHES,
    MQD_COUNT_RELAYED_BYTES,
    MQD_COUNT_RELAY_FAILURES,
    MQD_COUNT_BATCHES_REDIRECTED,
    MQD_COUNT_IN_SYNC_SHRINKS,
    MQD_COUNT_IN_SYNC_EXPANDS,
    MQD_GAUGE_LARGE_REQUEST_BYTES,
    MQD_COUNT_LARGE_STALLS,
    MQD_GAUGE_SHARE_SESSIONS,
    MQD_COUNT_RECORDS_DEDUPLICATED,
    MQD_GAUGE_SYNC_OLDEST_NS, /* CLOCK_MONOTONIC time at which the oldest running flush began; 0 = none */
    MQD_COUNT_VIEW_FILTERED_BYTES,
    MQD_COUNT_VIEW_CACHE_HITS,
    MQD_COUNT_VIEW_CACHE_EVICTIONS,
    MQD_GAUGE_VIEW_CACHE_BYTES,
    MQD_COUNTER_COUNT
};
/* copies out counters[MQD_COUNTER_COUNT] and histograms[MQD_HISTOGRAM_COUNT][128] of one worker */
void mqd_stats_read(void *control, uint32_t worker, uint64_t *counters, uint64_t *histograms);
uint64_t mqd_counter_read(void *control, uint32_t worker, uint32_t counter); /* a single counter */
/* ---- links: SPSC rings of 64-byte descriptors between the processes of one host ---- */

enum mqd_descriptor_kind {
    MQD_LINK_NONE,
    /* worker|acceptor -> owner: a validated batch in the sender's arena */
    MQD_LINK_PRODUCE,
    /* reader -> lender: lent arena bytes are no longer needed (token) */
    MQD_LINK_RELEASE,
    /* owner -> sender: outcome of MQD_LINK_PRODUCE (token, error, base_offset) */
    MQD_LINK_PRODUCED,
    /* owner -> waiting worker: slot's high watermark moved, or the slot's state changed */
    MQD_LINK_HW_CHANGED,
    /* worker -> acceptor: a complete request frame (without its length word) in the worker's
     * arena */
    MQD_LINK_REQUEST,
    /* acceptor -> worker: response bytes (correlation id first) in the acceptor's arena */
    MQD_LINK_RESPONSE,
    /* acceptor -> worker: close this connection (token) */
    MQD_LINK_CLOSE,
    /* acceptor -> worker: discard all cached responses */
    MQD_LINK_CACHE_DROP,
    /* worker -> acceptor: check these batches before they are written. See below. Sent again when
     * the acceptor restarts */
    MQD_LINK_CHECK,
    /* acceptor -> worker: the result of a CHECK; a payload is returned by RELEASE (token, offset) */
    MQD_LINK_CHECKED,
    /* acceptor -> owner: query for the producers of the slot's partition */
    MQD_LINK_DESCRIBE,
    /* owner -> acceptor: array of struct mqd_producer_view, or error; a payload is returned by
     * RELEASE (token, offset) */
    MQD_LINK_DESCRIBED,
    /* acceptor -> worker: request `token` was read and will take a long time; its bytes need not
     * stay in the arena */
    MQD_LINK_PARKED,
    /* worker -> acceptor: the client of the parked request `token` has disconnected, so the request
     * need not wait any longer; error as in REQUEST */
    MQD_LINK_CANCEL,
    /* owner -> workers and acceptor: a flush of the slot ended, or the slot is no longer served;
     * see mqd_slot_request_flush_notice */
    MQD_LINK_FLUSHED,
    /* worker -> owner: roll the slot's active segment, because a client that may no longer read the
     * partition has mapped it */
    MQD_LINK_ROLL,
    /* worker -> owner: request about a share-partition of the slot's partition; payload: struct
     * mqd_share_owner_request (server/share/share.h); c: the owner's generation */
    MQD_LINK_SHARE,
    /* owner -> worker: the response to SHARE, which needs no RELEASE */
    MQD_LINK_SHARE_RESPONSE,
    /* worker -> acceptor: the body of a ReadShareGroupState (`flags` 84) or WriteShareGroupState
     * (85); error as in REQUEST. The payload stays until SHARE_STATE_RESPONSE. Sent again when the
     * acceptor restarts */
    MQD_LINK_SHARE_STATE,
    /* acceptor -> worker: the group's settings (docs/design/share-groups.md, section 3), then the
     * response's body; the payload is returned by RELEASE (token, offset) */
    MQD_LINK_SHARE_STATE_RESPONSE
};

#define MQD_RESPONSE_MORE 1 /* flags of RESPONSE: more fragments of the same response follow */
/* while this host has its lease, the body depends only on the request bytes and the metadata
 * version (in `a`) */
#define MQD_RESPONSE_CACHEABLE 2
#define MQD_RESPONSE_NONE 4 /* no response is sent; the request is done */
/* the body begins with a struct mqd_authenticated and the principal's bytes; the response follows */
#define MQD_RESPONSE_AUTHENTICATED 8
#define MQD_RESPONSE_DISCONNECT 16 /* the connection closes when the response has been sent */
/* flags of REQUEST: the frame is preceded by a struct mqd_request_principal and the principal's
 * bytes */
#define MQD_REQUEST_PRINCIPAL 1
/* the frame, like its response, is a raw SASL token without a header (after SaslHandshake 0) */
#define MQD_REQUEST_RAW_TOKEN 2
#define MQD_PRODUCE_CONTROL 1 /* flags of PRODUCE: written by a coordinator; may hold control batches */
#define MQD_PRODUCE_ACKS_ALL 2
#define MQD_PRODUCE_ACKS_NONE 4
/* with CONTROL: a marker of transactions v2. Its producer epoch is above that of the transaction
 * that it ends (KIP-890). A marker whose epoch is not above the known one is refused, but only
 * once the existing marker is below the high watermark */
#define MQD_PRODUCE_MARKER_BUMPED 8
/* sent on from a retired partition, whose index is in `error`, to the partition that takes its
 * records: the producer id is rewritten (server/redirect.h) */
#define MQD_PRODUCE_REDIRECTED 16
/* with REDIRECTED: accepted only when the partition knows the producer (MQD_STAGE_REQUIRE_KNOWN) */
#define MQD_PRODUCE_REQUIRE_KNOWN 32
#define MQD_PRODUCE_FROM_ZERO 64 /* MQD_STAGE_FROM_ZERO */
/* flag of PRODUCED for a coordinator's batch: the partition is retired, and the same batch must be
 * written to the partition whose index is in size_bytes */
#define MQD_PRODUCED_REDIRECTED 1
/* flags of CHECK: payload is struct mqd_check_transaction, partition_count entries, the
 * transactional id's bytes */
#define MQD_CHECK_TRANSACTION 1
#define MQD_CHECK_RECORDS 2 /* payload is one compressed batch for a compacted topic: every record needs a key */
#define MQD_CHECK_PARSE 3   /* payload is one batch: its records are parsed; keys are not required */
/* payload is one batch for a topic whose records are scheduled: their headers are read too */
#define MQD_CHECK_SCHEDULES 4
#define MQD_CHECKED_MORE 1 /* flags of CHECKED: more pieces of the same batch follow */
#define MQD_RECORD_ERROR_COUNT_MAX 64

/* CHECK     slot: of the batch (all but TRANSACTION). a: Produce version in the low 16 bits; in the
 *           third byte (all but TRANSACTION) 1 + the codec to which the batch must be converted, or
 *           0. b: connection id (for logs). c: low half = the codec's level, high half = maximum
 *           size of the converted batch. error: as in REQUEST. The payload stays until CHECKED.
 * CHECKED   TRANSACTION: payload is an int16 error code for each partition, in the order queried;
 *           or no payload and one code for all in `error`. Others: `error` 0; if CHECK named a
 *           codec, the payload is the batch in that codec, in pieces whose total size is `a`. Or
 *           `error` 87 with a payload: struct mqd_check_refusal, its indexes, its message's bytes.
 *           If there is no message, the indexes name records without a key. */
struct mqd_check_transaction {
    int64_t producer_id;
    int16_t producer_epoch;
    int16_t version;
    int16_t acks;
    uint16_t id_bytes;
    uint32_t partition_count;
    int32_t timeout_ms;
};
struct mqd_check_partition {
    uint8_t topic_id[16];
    int32_t partition_index;
    uint32_t slot;
};
/* followed by index_count indexes (int32) of records within the batch, and by the message */
struct mqd_check_refusal {
    uint32_t unkeyed_count; /* all records without a key, including those not listed */
    uint16_t index_count;
    uint16_t message_bytes;
};

enum mqd_principal_kind {
    MQD_PRINCIPAL_ANONYMOUS, /* the listener does not authenticate */
    MQD_PRINCIPAL_SASL,
    MQD_PRINCIPAL_TLS,
    MQD_PRINCIPAL_LOCAL,
    MQD_PRINCIPAL_TOKEN /* SASL with a delegation token */
};
#define MQD_PRINCIPAL_BYTES_MAX 260 /* "User:" and a name of 255 bytes */
/* little-endian; the principal's bytes follow, then those of the client's address as text */
struct mqd_request_principal {
    uint16_t size_bytes; /* of the principal; 0 = the listener does not authenticate */
    uint8_t kind;        /* enum mqd_principal_kind */
    uint8_t host_bytes;  /* 0 = the address is in the descriptor */
};
struct mqd_authenticated {
    uint16_t size_bytes; /* of the principal's bytes, which follow */
    uint8_t kind;        /* MQD_PRINCIPAL_SASL or _TOKEN; it may change when the client authenticates again */
    uint8_t pad[5];
    uint64_t session_ms; /* until the client must authenticate again (KIP-368); 0 = never */
};

struct mqd_descriptor {
    uint16_t kind;
    uint16_t flags;
    /* PRODUCE, PRODUCED, HW_CHANGED, CHECK: partition slot. REQUEST: the connection's local port, or
     * a local client's pid */
    uint32_t slot;
    uint64_t token;      /* chosen by the sender to identify the operation; returned in responses */
    uint64_t offset;     /* payload: byte offset in the lender's arena */
    uint32_t size_bytes; /* payload size */
    /* PRODUCED: Kafka error code, or -2 (MQD_STAGE_VERIFY): not staged, verify and send again with
     * the guard in `a`; -3 (MQD_STAGE_REDIRECT): not staged, send it to the slot in `offset`, with
     * the verdict (server/redirect.h) in `b` and `a`; -4 (MQD_STAGE_UNKNOWN): not staged, the
     * verdict applies. PRODUCE: see REDIRECTED. REQUEST: low 31 bits of the receiving acceptor's
     * generation */
    int32_t error;
    /* PRODUCE: leader epoch that the sender expects, or -1. PRODUCED: base_offset. REQUEST:
     * listener id. RESPONSE: metadata version of a cacheable body */
    int64_t a;
    /* PRODUCE: verification guard or 0. PRODUCED: log_append_time_ms or -1. REQUEST: connection id
     * (for logs) */
    int64_t b;
    /* PRODUCED: log_start_offset. REQUEST: low half = local IPv4 address, high half = the peer's
     * (network order, 0 = not IPv4); for a local client, high half = its uid */
    int64_t c;
    uint64_t generation; /* sender's endpoint generation */
};

#define MQD_LINK_DESCRIPTOR_COUNT 1024

size_t mqd_links_size_bytes(uint32_t endpoint_count);
int mqd_links_format(void *links, size_t size_bytes, uint32_t endpoint_count);

struct mqd_endpoint; /* one process's side of all its links */
/* eventfds[i] wakes endpoint i. Opening resets nothing: descriptors in flight to a dead predecessor
 * are drained and checked by generation. */
struct mqd_endpoint *mqd_endpoint_open(void *control, void *links, uint32_t self, uint32_t endpoint_count,
                                       const int *eventfds);
void mqd_endpoint_close(struct mqd_endpoint *endpoint);
/* -1 MQD_E_FULL when the ring to `to` has no free descriptor. Invisible to the peer until
 * mqd_endpoint_flush. Sets `generation`. */
int mqd_endpoint_send(struct mqd_endpoint *endpoint, uint32_t to, const struct mqd_descriptor *descriptor);
uint32_t mqd_endpoint_free_count(struct mqd_endpoint *endpoint, uint32_t to);
/* publishes all tails; wakes each sleeping peer once, but not for what was sent quietly (shm/ring.h) */
void mqd_endpoint_flush(struct mqd_endpoint *endpoint);
/* takes up to max descriptors from all peers, fairly; from[i] is the sender; returns the count */
int mqd_endpoint_drain(struct mqd_endpoint *endpoint, struct mqd_descriptor *out, uint32_t *from, uint32_t max);
/* returns 1 when there is work (do not sleep), 0 when it is safe to block on the endpoint's
 * eventfd */
int mqd_endpoint_prepare_sleep(struct mqd_endpoint *endpoint);
void mqd_endpoint_end_sleep(struct mqd_endpoint *endpoint);

/* ---- arena: extents of one process's shared memory, lent to peers by descriptor ---- */

struct mqd_arena; /* bookkeeping is private to the owning process; the bytes are the shared mapping */
struct mqd_arena *mqd_arena_open(uint8_t *bytes, size_t size_bytes, uint32_t extent_bytes);
void mqd_arena_close(struct mqd_arena *arena);
/* allocates a contiguous run of size_bytes with reference count 1; returns its byte offset, or -1
 * MQD_E_FULL */
int64_t mqd_arena_allocate(struct mqd_arena *arena, uint64_t size_bytes);
/* adds a reference to the run that contains this offset */
void mqd_arena_hold(struct mqd_arena *arena, uint64_t offset);
int mqd_arena_release(struct mqd_arena *arena, uint64_t offset); /* returns 1 when the run was freed */
/* Length and start of the run that contains `offset`; 0: nothing is allocated there. */
uint64_t mqd_arena_find_run(struct mqd_arena *arena, uint64_t offset, uint64_t *start);
uint32_t mqd_arena_extents_used(struct mqd_arena *arena);
uint32_t mqd_arena_extents_total(struct mqd_arena *arena);

/* ---- checksums and record batches ---- */

uint32_t mqd_crc32c(uint32_t crc, const void *bytes, size_t size_bytes);

/* the header of a record batch, magic 2, decoded and validated */
struct mqd_batch {
    int64_t base_offset;
    int32_t size_bytes; /* of the whole batch, including the 12 bytes that batch_length does not count */
    int32_t partition_leader_epoch;
    uint32_t crc;
    int16_t attributes;
    int32_t last_offset_delta;
    int64_t base_timestamp_ms;
    int64_t max_timestamp_ms;
    int64_t producer_id;
    int16_t producer_epoch;
    int32_t base_sequence;
    int32_t record_count;
};
#define MQD_BATCH_HEADER_BYTES 61
/* Stateless check of size_bytes at `bytes`: exactly one complete batch, magic 2, valid counts, CRC.
 * Returns a Kafka error code: 0, 2 CORRUPT_MESSAGE, 87 INVALID_RECORD, 76
 * UNSUPPORTED_COMPRESSION_TYPE, 47 INVALID_PRODUCER_EPOCH; `reason` (static text) gives the cause. */
int16_t mqd_batch_validate(const uint8_t *bytes, uint64_t size_bytes, struct mqd_batch *out, const char **reason);
/* decodes the header only, without CRC, to scan stored batches. Returns 0, or -1 MQD_E_CORRUPT.
 * available_bytes >= 61. */
int mqd_batch_decode(const uint8_t *bytes, uint64_t available_bytes, struct mqd_batch *out);
/* Parses record_count uncompressed records that must fill size_bytes exactly. Returns how many have
 * no key; `unkeyed` then has the indexes within the batch of the first unkeyed_count_max of them.
 * Returns -1 - i if record i cannot be parsed, with `reason` (static text). */
int32_t mqd_records_validate(const uint8_t *records, uint64_t size_bytes, int32_t record_count, int32_t *unkeyed,
                             uint32_t unkeyed_count_max, const char **reason);

/* Byte positions in `data` of the key and value of one record in a plain batch (uncompressed, not
 * transactional, not control); size -1 = null. */
struct mqd_record_location {
    uint32_t key_position;
    int32_t key_bytes;
    uint32_t value_position;
    int32_t value_bytes;
};
enum mqd_walk_stop {
    MQD_WALK_END,        /* `data` contains no further complete batch */
    MQD_WALK_END_OFFSET, /* the batch at `position` begins at or after end_offset */
    MQD_WALK_FULL,       /* `out` is full; continue at `position` */
    /* the batch at `position` is valid but not plain (or has more records than `out` can hold) */
    MQD_WALK_OTHER,
    MQD_WALK_CORRUPT /* no valid successor batch at `position`, or its checksum or records are wrong */
};
struct mqd_record_walk {
    uint64_t position;     /* in: where to begin; out: where the walk stopped */
    int64_t next_offset;   /* in: the lowest valid base offset; out: the offset after the last batch taken */
    uint32_t record_count; /* out: entries of `out` that were filled */
    uint32_t stop;         /* out: enum mqd_walk_stop */
};
void mqd_records_locate(const uint8_t *data, uint64_t size_bytes, int64_t end_offset, struct mqd_record_walk *walk,
                        struct mqd_record_location *out, uint32_t capacity);

/* ---- the log ---- */

/* per partition; may change at run time (mqd_reactor_set_log_options) */
struct mqd_log_options {
    int64_t segment_bytes;
    int64_t segment_ms;
    int64_t segment_jitter_ms;
    int32_t index_interval_bytes;
    int32_t max_message_bytes;
    int64_t preallocate_bytes_min; /* initial step; doubled while writes use it up quickly */
    int64_t preallocate_bytes_max;
    int64_t stripe_bytes; /* RAID stripe width, preallocation is rounded to it; 0 = none */
    int64_t timestamp_before_max_ms, timestamp_after_max_ms;
    int64_t flush_interval_messages; /* Kafka's flush.messages */
    int64_t flush_interval_ms;       /* Kafka's flush.ms; applies to data that no acknowledgement waits for */
    /* without flush_on_ack: flush after this many unflushed bytes; 0 = the broker decides */
    int64_t queue_unflushed_bytes;
    int32_t producer_id_count_max;
    int32_t producer_id_expiration_ms;
    uint8_t log_append_time; /* message.timestamp.type is LogAppendTime */
    uint8_t flush_on_ack, compacted;
    uint8_t validation; /* enum mqd_record_validation */
    uint8_t readonly;   /* refuses Produce */
    /* compression.type: 0 = producer; otherwise 1 + the codec to which clients' batches are
     * converted */
    uint8_t compression;
    int32_t compression_level;
    uint8_t transaction_verification; /* by the coordinator, before a transaction begins here (KIP-890) */
    int64_t dedup_window_ms; /* how long a record's id (the value of a header) is remembered; 0 = no deduplication */
    uint32_t dedup_count_max;
    char dedup_header[64];  /* ends with a NUL */
    uint8_t share_priority; /* share groups deliver records of partitions with a higher priority first */
};

/* record.validation: which client batches are parsed before they are accepted; for compacted topics
 * all are. SCHEDULES: all are, and the acceptor also parses the records' headers. */
enum mqd_record_validation {
    MQD_VALIDATION_NONE,
    MQD_VALIDATION_UNCOMPRESSED,
    MQD_VALIDATION_ALL,
    MQD_VALIDATION_SCHEDULES
};

struct mqd_recovery {              /* in: what may be trusted; out: the result */
    int64_t recovery_point_offset; /* in: the log below it is trusted; -1 = nothing is */
    /* in: >= 0: the page cache is intact up to here (process crash): truncate there, no CRC scan;
     * -1 = unknown */
    int64_t trusted_end_offset;
    uint8_t clean_shutdown; /* in: the clean-shutdown marker was found: trust everything */
    /* in: a flush has failed: everything above the recovery point is rewritten before it is
     * flushed */
    uint8_t rewrite;
    /* in: the partition has several replicas, so the recovered records may be uncommitted. Until
     * its first mqd_reactor_replica_set it serves no client */
    uint8_t replicated;
    /* in: other hosts have replicas: a log that lost its end continues where its records now end,
     * not where they ended before */
    uint8_t has_other_replicas;
    /* in, when replicated: all records below are known to be committed (the checkpointed high
     * watermark; 0 = none known) */
    int64_t high_watermark;
    int64_t log_start_offset; /* in: checkpointed start (DeleteRecords), 0 if none; out: actual start */
    int64_t log_end_offset;   /* out */
    int64_t truncated_bytes;  /* out: bytes removed from the end */
    int64_t scanned_bytes;    /* out */
    int64_t corrupt_position; /* out: position of the first invalid byte in its segment, -1 = none */
    int64_t corrupt_segment;  /* out */
    /* out: first offset that is missing because a segment file is missing; -1 = none */
    int64_t missing_from;
    /* out: offset at which the log continues; if replicated, the end that the log once had */
    int64_t missing_to;
    int32_t segment_count;     /* out */
    int32_t last_leader_epoch; /* out: epoch of the last batch, -1 = empty */
};

struct mqd_partition;
/* Opens (or creates) the log in directory `path`, according to `recovery`. Called off the reactor.
 * NULL on error (EIO, ENOSPC, MQD_E_CORRUPT...). */
struct mqd_partition *mqd_partition_open(const char *path, const struct mqd_log_options *options, int32_t leader_epoch,
                                         int64_t now_ms, struct mqd_recovery *recovery);
/* Writes indexes and a producer snapshot, syncs, closes. Called off the reactor, after the reactor
 * has returned the partition. clean = 0: only closes the fds. */
int mqd_partition_close(struct mqd_partition *partition, int clean);
int64_t mqd_partition_log_end_offset(struct mqd_partition *partition);

/* a partition's state of one producer id, for DescribeProducers */
struct mqd_producer_view {
    int64_t producer_id;
    int64_t last_timestamp_ms;        /* broker's clock at its last batch */
    int64_t transaction_first_offset; /* of its ongoing transaction; -1 = none */
    int64_t last_offset;              /* of its last sequenced batch; -1 = unknown */
    int32_t last_sequence;            /* -1 = unknown */
    int32_t coordinator_epoch;        /* of its last marker; -1 = none */
    int32_t producer_epoch;
    int32_t reserved;
};
/* Copies out up to `capacity` producers; returns the total number. Call it only while the caller
 * owns the partition: before the reactor has opened it, or after the reactor has closed it. */
uint32_t mqd_partition_producers(struct mqd_partition *partition, struct mqd_producer_view *out, uint32_t capacity);

/* A walk over the batches of one segment file, for dump, verify and recovery. */
struct mqd_scan_result {
    int64_t valid_bytes; /* position of the first invalid byte */
    int64_t batch_count;
    int64_t record_count;
    int64_t next_offset; /* offset after the last valid batch; base_offset if none */
    int64_t max_timestamp_ms;
    int32_t last_leader_epoch;
    const char *reason; /* NULL when the file is valid to its end */
};
int mqd_segment_scan(const char *log_path, int64_t base_offset, int64_t from_position, int check_crc,
                     struct mqd_scan_result *out);

/* ---- files that Python keeps next to the log (checkpoints, metadata log) ---- */

/* Temporary file, write, fsync, rename, fsync of the directory: afterwards `path` has either all of
 * the new bytes or its previous content. */
int mqd_file_replace(const char *path, const uint8_t *bytes, size_t size_bytes);
/* opens for appending at `position` (truncates later bytes); returns an fd for the next three calls */
int mqd_file_open_append(const char *path, int64_t position);
int mqd_file_append(int fd, const uint8_t *bytes, size_t size_bytes, int64_t position); /* all bytes, or -1 */
int mqd_file_flush(int fd);                                                             /* fdatasync */
int mqd_file_close(int fd);
int mqd_file_unlink(const char *path);
/* of a file or directory; durable after mqd_file_sync_directory of its parent */
int mqd_file_rename(const char *from, const char *to);
int mqd_file_mkdir(const char *path, unsigned int mode);
int mqd_file_sync_directory(const char *path);

/* ---- waiting (io/poll.h) ---- */

enum mqd_backend { MQD_BACKEND_AUTO, MQD_BACKEND_IO_URING, MQD_BACKEND_EPOLL };

#endif
