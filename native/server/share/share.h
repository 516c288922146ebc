/* Share groups in the reactor: ShareFetch and ShareAcknowledge of this worker's connections, and
 * the share-partitions of the partitions that it owns (docs/design/share-groups.md).
 *
 *   request.c   turns a frame into a struct mqd_share_job ("job"), with one part for each partition
 *               of the request and of its session
 *   job.c       the steps of a job: acknowledgements, acquiring part by part, waiting, reading,
 *               completion
 *   response.c  encodes the response
 *   owner_requests.c
 *               calls from a job to the owners: MQD_LINK_SHARE out, MQD_LINK_SHARE_RESPONSE in;
 *               within one worker the same functions are called without the link
 *   owner.c     the owner's side: requests, persistence, leadership, expiry
 *   acquire.c   which record batches an acquisition may take
 *   keys.c      with FIFO: the keys of their records
 *
 * Invariants
 *   H1  requests to one owner arrive in the order in which they were made, so that the end of a
 *       session also releases what the session's last request acquired, even if the response to
 *       that request never arrives.
 *   H2  a part that waits for records is in `waiting`, with this worker's bit set in the
 *       partition's slot, before the request to its owner is sent, so that every later
 *       change wakes it.
 *   H3  only a leader that holds its lease serves requests (S1 in share/state.h); a
 *       share-partition's state belongs to one leader epoch.
 *   H4  a request's payload is lent to the owner until its response arrives or the owner has died.
 *   H5  an owner counts each session once. If it could not count a session, it does so at that
 *       session's next request. A share-partition without sessions is unloaded.
 * Bounds: jobs are bounded by their connections and held on the heap; sessions by
 * group.share.max.share.sessions and SESSION_BYTES_MAX; states by share.memory.max.bytes and
 * OWNED_COUNT_MAX. Concurrency: the reactor's thread.
 */
#ifndef MQD_SHARE_H
#define MQD_SHARE_H

#include "server/reactor.h"
#include "share/partition.h"
#include "share/sessions.h"

#define MQD_SHARE_WAIT_BUCKET_COUNT 256
#define MQD_SHARE_OWNED_BUCKET_COUNT 4096
#define MQD_SHARE_RUNS_PER_PART 64   /* maximum number of runs that an acquisition returns */
#define MQD_SHARE_RESERVE_DIVISOR 10 /* one record in this many is reserved for partitions of lower priority */

/* ---- requests to owners ---- */

enum mqd_share_owner_request_kind {
    MQD_SHARE_REQUEST_ACQUIRE,
    MQD_SHARE_REQUEST_MEASURE, /* how many bytes can be acquired */
    MQD_SHARE_REQUEST_ACKNOWLEDGE,
    MQD_SHARE_REQUEST_FORGET,  /* the session no longer names the partition */
    MQD_SHARE_REQUEST_RELEASE, /* the same, and the records that its member has acquired are released */
    /* from the acceptor, without a response: the dead letters of the ranges have been written, or
     * are not wanted. The next write of the share state includes the resulting states. */
    MQD_SHARE_REQUEST_ARCHIVE
};
/* The head of a request. The bytes of the group id follow, then range_count ranges: first, last
 * (i64), type_count (u32), types. */
struct mqd_share_owner_request {
    uint8_t topic_id[16];
    uint64_t member; /* with ARCHIVE: state epoch << 32 | leader epoch of the state referred to */
    int32_t partition_index;
    uint32_t records_max, bytes_max;
    uint32_t range_count;
    uint16_t group_bytes;
    uint8_t kind;
    uint8_t strict; /* share.acquire.mode=record_limit (KIP-1206): records_max is a hard limit */
    uint8_t joins;  /* this is the session's first request about the partition */
};
/* Response: MQD_LINK_SHARE_RESPONSE. With MQD_SHARED_RUN: an acquired run, with its first offset in
 * a, its last in b and its delivery count in c. The final response has no MQD_SHARED_RUN. Its
 * fields: `error`; a, b = the range of offsets to read; size_bytes = the size of that range
 * (MEASURE: the bytes available); slot = the lock duration in ms, 0 = not known. With
 * MQD_SHARED_REFUSED the owner does not serve the partition now and, if `joins` was set, has not
 * counted the session. */
#define MQD_SHARED_RUN 1
#define MQD_SHARED_REFUSED 2

struct mqd_share_part;
struct mqd_share_job;

/* A request to the owner of a part's partition, until the response has arrived. */
struct mqd_share_call {
    struct mqd_node node;        /* in shares->unsent */
    struct mqd_share_part *part; /* NULL: its response is ignored */
    uint8_t *payload;            /* while unsent */
    uint32_t size_bytes, slot;
    int64_t payload_offset; /* in the control arena; -1 = none */
    uint64_t owner_generation;
    uint32_t index, sequence, next_free;
    uint16_t owner;
    uint8_t kind, used, joins;
};

/* ---- jobs ---- */

struct mqd_share_part {
    struct mqd_node waiter_node; /* in shares->waiting */
    struct mqd_share_job *job;
    struct mqd_share_call *acquire_call, *acknowledge_call; /* in flight; NULL = none */
    struct mqd_topic *topic;                                /* referenced; NULL: unknown */
    uint8_t topic_id[16];
    int32_t partition_index;
    uint32_t slot;
    /* the request names it, and has acknowledgements for this or another partition */
    uint8_t named_with_acknowledgements;
    uint8_t acknowledges; /* the request has acknowledgements for it */
    uint8_t unreported;   /* the session has not reported it yet: it is in the response even without records */
    uint8_t reads;        /* records are acquired from it */
    uint8_t ready;        /* the owner may have records for it */
    uint8_t joins;        /* the next request to its owner is the session's first */
    uint8_t rank;         /* records are requested from parts of a higher rank first (share.priority) */
    int16_t error, acknowledge_error;
    uint32_t available; /* bytes that can be acquired */
    uint32_t run_count;
    struct mqd_share_run *runs; /* room for MQD_SHARE_RUNS_PER_PART; NULL = not allocated yet */
    int64_t read_first, read_end;
    uint32_t read_bytes;
    struct mqd_range range;
};

struct mqd_share_job {
    struct mqd_node node; /* in shares->runnable */
    struct mqd_request *request;
    uint8_t *group; /* stored after the parts */
    uint64_t member;
    uint64_t session_hash, session_number; /* 0 = none */
    struct mqd_share_part *parts;          /* in order of topic id and index */
    uint32_t part_count;
    uint32_t first_part, handled_count; /* a pass begins with part `first_part` and has handled this many parts */
    uint32_t awaits_owner;              /* a request for records to a part's owner is in flight: 0 or 1 */
    uint32_t pending_acknowledgements;  /* acknowledgements whose outcome is awaited */
    uint32_t records_max, bytes_max;    /* the unused remainder of the request's limits */
    uint32_t records_reserved, bytes_reserved; /* reserved for ranks below that of this pass */
    int32_t rank;                              /* of this pass; -1: between passes */
    uint8_t ranked;                            /* the parts have different ranks */
    uint32_t bytes_min;
    int32_t lock_ms;
    uint16_t group_bytes;
    uint8_t strict; /* share.acquire.mode=record_limit (KIP-1206): records_max is a hard limit */
    uint8_t opens;  /* opens a session: its partitions are reported even without records */
    /* at least one acknowledgement is well-formed and for a partition that the client may read */
    uint8_t has_valid_acknowledgement;
    uint8_t fetches;  /* the request asks for records */
    uint8_t measures; /* still measuring: fewer than bytes_min bytes are known to be available */
    uint8_t acquired; /* records were acquired */
    uint8_t failed;   /* an owner refused: the response is sent immediately */
    uint8_t expired;  /* the job's wait time has passed */
    uint8_t ended;    /* nothing more is acquired; acknowledgements may still be awaited */
};

/* ---- the owner's side ---- */

/* Keys of records, read from one larger batch (owned->keys) or from all small batches of an
 * acquisition (shares->keys); see keys.c. */
struct mqd_share_keys {
    int64_t first, last; /* offsets of the batch */
    int32_t leader_epoch;
    uint32_t fifo; /* mqd_share_settings.fifo when the keys were read */
    int16_t error; /* the error if the keys cannot be read */
    uint8_t header_bytes, codec;
    uint8_t header[MQD_SHARE_FIFO_HEADER_BYTES_MAX];
    uint8_t *bytes; /* of the batch */
    uint32_t size_bytes, capacity_bytes;
    struct mqd_share_record *records;
    uint32_t count, capacity;
};

/* A share-partition of a partition that this worker owns. */
struct mqd_share_owned {
    struct mqd_share_partition partition;
    struct mqd_share_owned *next; /* in its bucket */
    struct mqd_node touched_node; /* in shares->touched, to be handled in this turn */
    struct mqd_cursor cursor;
    uint64_t hash;
    uint32_t index, slot;
    uint32_t session_counts[MQD_ENDPOINT_COUNT_MAX]; /* number of sessions of each worker that read the partition */
    int64_t body_offset; /* body of its request to the acceptor, in the control arena; -1 = none */
    uint64_t acceptor_generation;
    uint32_t sequence;
    uint8_t read_ahead_running;
    /* 1 + the offset at which the running or the last completed read-ahead begins; 0 = none */
    int64_t running_read_ahead_id, completed_read_ahead_id;
    struct mqd_share_keys *keys; /* of a large batch; NULL: none */
    uint8_t reading_keys;        /* a thread is reading keys */
    uint8_t group[];
};

struct mqd_shares {
    struct mqd_share_sessions sessions;
    struct mqd_share_pool pool;
    void *pool_memory;
    uint64_t pool_bytes;
    struct mqd_node waiting[MQD_SHARE_WAIT_BUCKET_COUNT]; /* parts, by slot */
    struct mqd_node runnable;                             /* jobs with something to do */
    bool is_running;                                      /* mqd_share_pump is running: a nested call returns at once */
    struct mqd_share_call **calls;                        /* pointers to calls, each allocated once */
    uint32_t call_count, call_capacity, call_free;
    struct mqd_node unsent;
    struct mqd_share_owned **owned;                        /* by index */
    uint32_t owned_capacity, owned_count, owned_free_from; /* the search for a free index begins at owned_free_from */
    struct mqd_node touched;
    struct mqd_share_owned *buckets[MQD_SHARE_OWNED_BUCKET_COUNT];
    uint64_t next_sequence;
    int64_t due_ms;        /* no owned share-partition has anything to do before this time */
    int64_t last_sweep_ms; /* when leadership was last verified */
    uint8_t *chunk;        /* for headers of batches */
    struct mqd_share_batch *batches;
    uint32_t *batch_positions;
    struct mqd_share_keys keys; /* of the batches of the current acquisition */
};

#define MQD_SHARE_CHUNK_BYTES 65536
#define MQD_SHARE_BATCHES_PER_RANGE 4096
/* flag in a token (the low 32 bits are the share-partition's index): a thread has read the
 * share-partition's keys */
#define MQD_SHARE_TOKEN_KEYS (1ull << 32)

/* ---- the interface for the reactor ---- */

bool mqd_shares_enabled(const struct mqd_reactor *r); /* share.version is 1 */
void mqd_share_on_request(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                          const uint8_t *body, uint32_t size_bytes);
void mqd_share_encode(struct mqd_reactor *r, struct mqd_request *request);
void mqd_share_job_free(struct mqd_reactor *r, struct mqd_request *request);
void mqd_share_expire_wait(struct mqd_reactor *r, struct mqd_request *request); /* the request's wait time has passed */
void mqd_share_wake_slot(struct mqd_reactor *r, uint32_t slot);                 /* only if r->shares exists */
void mqd_share_on_connection_closed(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_share_on_link(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_share_on_state_response(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_share_on_endpoint_died(struct mqd_reactor *r, uint32_t endpoint);
void mqd_share_on_acceptor_died(struct mqd_reactor *r);
void mqd_share_on_read_ahead(struct mqd_reactor *r, uint64_t index);
/* called once a turn, and after every call that gives jobs or owners something to do */
void mqd_share_pump(struct mqd_reactor *r);
int64_t mqd_shares_next_ms(const struct mqd_reactor *r);
void mqd_shares_destroy(struct mqd_reactor *r);

/* ---- request.c ---- */
struct mqd_shares *mqd_shares_of(struct mqd_reactor *r); /* created by the first call; NULL: out of memory */
/* The owner has not counted the session: the session's next request about the partition joins again
 * (H5). */
void mqd_share_rejoin(struct mqd_reactor *r, const struct mqd_share_part *part);
/* Appends one range to the ranges of a request to an owner. */
void mqd_share_range_put(struct mqd_buffer *ranges, int64_t first, int64_t last, const uint8_t *types,
                         uint32_t type_count);

/* ---- job.c ---- */
/* Queues a job that has something to do. */
void mqd_share_schedule(struct mqd_reactor *r, struct mqd_share_job *job);
void mqd_share_on_acquired(struct mqd_reactor *r, struct mqd_share_part *part, uint8_t kind,
                           const struct mqd_descriptor *response);
void mqd_share_on_acknowledged(struct mqd_reactor *r, struct mqd_share_part *part,
                               const struct mqd_descriptor *response);

/* ---- owner_requests.c ---- */
/* Finds the owner that serves this slot now. Returns 0 or the error. */
int16_t mqd_share_owner_of(struct mqd_reactor *r, uint32_t slot, uint16_t *owner, uint64_t *generation);
/* `ranges`: as in the payload. False: out of memory, and nothing was sent. */
bool mqd_share_call_owner(struct mqd_reactor *r, struct mqd_share_part *part, uint32_t slot, uint16_t owner,
                          uint64_t generation, const struct mqd_share_owner_request *request, const uint8_t *group,
                          const struct mqd_buffer *ranges);
void mqd_share_respond(struct mqd_reactor *r, uint32_t to, const struct mqd_descriptor *response);
void mqd_share_send_unsent(struct mqd_reactor *r);

/* ---- owner.c ---- */
void mqd_share_owner_on_request(struct mqd_reactor *r, uint32_t worker, uint64_t token, uint32_t slot,
                                const uint8_t *payload, uint32_t size_bytes);
/* MQD_SHARE_REQUEST_ARCHIVE */
void mqd_share_on_archive(struct mqd_reactor *r, uint32_t slot, const uint8_t *payload, uint32_t size_bytes);
void mqd_share_owners_run(struct mqd_reactor *r);
void mqd_shares_owned_destroy(struct mqd_shares *shares);

/* ---- keys.c ---- */
/* Reads the keys that the state needs from `count` batches, and sets the records of these batches.
 * The keys of larger compressed batches are read by a thread of the pool; their records remain NULL
 * for now, and the slot is woken later. `batch_positions`: where the batches begin in the file, and
 * where the last one ends. The records are valid until mqd_share_keys_done. Returns 0, or an error
 * if a batch cannot be read. */
int16_t mqd_share_keys_read(struct mqd_reactor *r, struct mqd_share_owned *owned, int fd,
                            struct mqd_share_batch *batches, const uint32_t *batch_positions, uint32_t count);
void mqd_share_keys_done(struct mqd_shares *shares);
void mqd_share_keys_forget(struct mqd_share_owned *owned); /* no thread may be reading them */

/* ---- acquire.c ---- */
/* Fills in the response; its runs are sent first. */
void mqd_share_acquire_now(struct mqd_reactor *r, struct mqd_share_owned *owned,
                           const struct mqd_share_owner_request *request, uint32_t worker,
                           struct mqd_descriptor *response);

#endif
