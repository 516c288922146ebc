/* What Python sees of the reactor; read by build_ffi.py like native.h, under the same rules. What it
 * does: server/reactor.h.
 */
#ifndef MQD_SERVER_API_H
#define MQD_SERVER_API_H
/* MQD_CDEF_OFF */
#include "native.h"
/* MQD_CDEF_ON */

struct mqd_reactor_options {
    void *control;
    void *links;
    uint32_t self; /* worker index */
    uint32_t endpoint_count;
    const int *eventfds; /* one per endpoint */
    uint8_t *arenas[66]; /* every endpoint's arena, the own one writable; NULL = none */
    uint64_t arena_bytes[66];
    int handoff_fd;   /* Unix seqpacket socket: accepted connections arrive by SCM_RIGHTS */
    int backend;      /* enum mqd_backend */
    int cpu;          /* pin to this CPU; -1 = no */
    uint32_t spin_us; /* how long to spin before sleeping; 0 = not at all */
    uint32_t connection_count_max;
    uint32_t request_bytes_max; /* socket.request.max.bytes */
    /* the end of the own arena, for requests of more than half of the rest; its pages are taken when
     * they are needed */
    uint64_t large_bytes;
    uint32_t large_ms_max; /* large.request.timeout.ms */
    /* bound of everything the reactor keeps per request and connection (queued.max.request.bytes) */
    uint64_t heap_bytes_max;
    uint32_t inflight_count_max; /* requests of one connection that await an answer */
    uint32_t connection_idle_ms_max;
    uint32_t fetch_bytes_max;   /* fetch.max.bytes of the broker */
    uint32_t session_count_max; /* max.incremental.fetch.session.cache.slots */
    /* wait this long for more before a flush starts; 0 = flush as soon as the last one ended */
    uint32_t group_commit_us;
    uint32_t sendfile_bytes_min; /* smaller ranges are copied */
    uint32_t read_fd_count_max;  /* LRU of open segments for reading */
    /* the control segment, opened read-only, for local clients; 0 or less = none are served */
    int control_fd;
};
struct mqd_reactor;
struct mqd_reactor *mqd_reactor_create(const struct mqd_reactor_options *options);
int mqd_reactor_start(struct mqd_reactor *reactor); /* its own thread, which never touches Python */
int mqd_reactor_stop(struct mqd_reactor *reactor);  /* stops reading, flushes, answers what it can, joins the thread */
void mqd_reactor_destroy(struct mqd_reactor *reactor);
int mqd_reactor_backend(struct mqd_reactor *reactor); /* the one in use */

/* Commands from the main thread of the worker; each returns at once and is answered by one event
 * with the same token. -1 MQD_E_FULL when 4096 commands are under way, each until its event has
 * been taken. */
int mqd_reactor_log_dir(struct mqd_reactor *reactor, uint64_t token, uint32_t log_dir, const char *path);
/* full: Produce is refused with KAFKA_STORAGE_ERROR */
int mqd_reactor_log_dir_full(struct mqd_reactor *reactor, uint64_t token, uint32_t log_dir, int full);
int mqd_reactor_topic_put(struct mqd_reactor *reactor, uint64_t token, const uint8_t topic_id[16], const char *name,
                          const uint32_t *slots, uint32_t partition_count);
int mqd_reactor_topic_remove(struct mqd_reactor *reactor, uint64_t token, const uint8_t topic_id[16]);
/* As topic_put (all of whose partitions are led here), for a cluster: where each partition is. */
#define MQD_LEADER_HERE -2147483647
struct mqd_topic_partition {
    uint32_t slot;  /* of this host's replica; UINT32_MAX = none here */
    int32_t leader; /* node id, -1 = none; MQD_LEADER_HERE = this host, whose number is not known */
    int32_t leader_epoch;
    int32_t redirect;       /* a retired one: the partition that takes its records; -1 = none */
    uint32_t retiring;      /* 0; 1 = refuses new records; 2 and more = redirects them */
    uint32_t leader_worker; /* of the leader's host: who owns it there. Any other passes it on */
};
int mqd_reactor_topic_place(struct mqd_reactor *reactor, uint64_t token, const uint8_t topic_id[16], const char *name,
                            const struct mqd_topic_partition *partitions, uint32_t partition_count);
struct mqd_broker_address {
    int32_t node_id;
    int32_t port;
    uint8_t has_rack;
    char host[256];
    char rack[256];
};
/* This host's node id and all brokers that clients may be sent to (KIP-951); the whole list. */
int mqd_reactor_brokers_put(struct mqd_reactor *reactor, uint64_t token, int32_t node_id,
                            const struct mqd_broker_address *brokers, uint32_t broker_count);
/* gives the partition to the reactor, which publishes its positions and sets the slot ONLINE */
int mqd_reactor_partition_open(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, uint32_t log_dir,
                               struct mqd_partition *partition);
/* takes it back: waits for its flush, answers its waiters; the event's `partition` may then be
 * closed and deleted */
int mqd_reactor_partition_close(struct mqd_reactor *reactor, uint64_t token, uint32_t slot);
int mqd_reactor_set_options(struct mqd_reactor *reactor, uint64_t token, uint32_t slot,
                            const struct mqd_log_options *options);
/* DeleteRecords and retention: moves the log start to min(offset, high watermark) (offset -1 = high
 * watermark), drops whole segments below it from the table; event.offset = new start. The caller
 * unlinks the files after the event. */
int mqd_reactor_advance_start(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, int64_t offset);
/* by age: rolls when the active segment is not empty */
int mqd_reactor_roll(struct mqd_reactor *reactor, uint64_t token, uint32_t slot);
int mqd_reactor_set_leader_epoch(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, int32_t leader_epoch);
/* keeper's proof of death: loans and waits on it end */
int mqd_reactor_endpoint_died(struct mqd_reactor *reactor, uint64_t token, uint32_t endpoint);
/* The most connections this worker may hold (what it has leased of the broker's budget); those
 * above it stay, new ones are refused. No event, in force at once. */
int mqd_reactor_set_connection_max(struct mqd_reactor *reactor, uint32_t count);
/* The same for attachments by shared memory (0 at first): how many, and how much memory for all of
 * them. */
int mqd_reactor_set_local_max(struct mqd_reactor *reactor, uint32_t count, uint64_t size_bytes);

/* Replication. A partition of several replicas has an assignment (replica/rules.h), which metadata
 * bring; without one it is led here and alone. A follower refuses Produce with
 * NOT_LEADER_OR_FOLLOWER; its positions are in the slot as ever. event.offset = the log end. */
struct mqd_replica_assignment;
int mqd_reactor_replica_set(struct mqd_reactor *reactor, uint64_t token, uint32_t slot,
                            const struct mqd_replica_assignment *assignment, int32_t leader_worker);
/* The controller's answer to MQD_EVENT_PROPOSE_IN_SYNC: mqd_replica_answered. */
int mqd_reactor_in_sync_answer(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, uint64_t sequence,
                               int32_t leader_epoch, int32_t error);
#define MQD_FETCHER_COUNT_MAX 2048
enum mqd_fetcher_lane {
    MQD_LANE_IN_SYNC,  /* partitions whose in-sync set has this node */
    MQD_LANE_CATCH_UP, /* those that it has not; without such a connection they use the first */
    /* of these, those whose assignment says `throttled`: fetched at a bounded rate; without such a
     * connection they use the first */
    MQD_LANE_THROTTLED,
    MQD_LANE_COUNT
};
struct mqd_fetcher_options {
    int32_t leader_node;
    uint32_t leader_worker;
    uint32_t lane;    /* enum mqd_fetcher_lane */
    int32_t node_id;  /* this node */
    uint32_t wait_ms; /* replica.fetch.wait.max.ms */
    /* replica.fetch.response.max.bytes: asked for; one batch may make an answer larger */
    uint32_t response_bytes_max;
    uint32_t response_bytes_limit; /* an answer beyond it ends the connection */
    uint32_t partition_bytes_max;  /* replica.fetch.max.bytes */
    /* without an answer for so long beyond wait_ms the connection is taken for dead
     * (replica.socket.timeout.ms) */
    uint32_t timeout_ms;
    /* replica.fetch.backoff.ms: a partition that the leader refused is asked for again after this;
     * sooner where it may not know yet that it leads */
    uint32_t backoff_ms;
    int64_t bytes_per_second_max; /* follower.replication.throttled.rate, of the throttled lane; 0 = no bound */
};
/* A connection to a worker of another host, both sides proven. The reactor takes the socket
 * (non-blocking or not), also when the command fails. It replaces one of the same (leader_node,
 * leader_worker, lane). The connection's `token` comes back in MQD_EVENT_FETCHER_ENDED. The
 * command's own answer is MQD_EVENT_DONE, as ever. */
int mqd_reactor_fetcher_put(struct mqd_reactor *reactor, uint64_t token, int fd,
                            const struct mqd_fetcher_options *options);
/* Ends it; no MQD_EVENT_FETCHER_ENDED then. */
int mqd_reactor_fetcher_remove(struct mqd_reactor *reactor, uint64_t token, int32_t leader_node, uint32_t leader_worker,
                               uint32_t lane);
/* of every throttled lane, in all */
int mqd_reactor_fetcher_rate(struct mqd_reactor *reactor, uint64_t token, int64_t bytes_per_second_max);

/* Produce of local clients for partitions that other hosts lead (server/relay/relay.h).
 * MQD_EVENT_RELAY_WANTED asks for a connection: offset = the leader's node id, log_dir = which of
 * its workers, level = enum mqd_relay_lane; it is answered by relay_put or relay_refuse. */
#define MQD_RELAY_COUNT_MAX 4096
enum mqd_relay_lane { MQD_RELAY_LANE_PLAIN, MQD_RELAY_LANE_TRANSACTIONS, MQD_RELAY_LANE_COUNT };
struct mqd_relay_options {
    int32_t leader_node;
    uint32_t leader_worker;
    uint32_t lane;
    /* put: an answer that is late by so much ends the connection. refuse: for so long batches are
     * refused at once, and nobody is asked again */
    uint32_t timeout_ms;
};
/* A connection to a worker of another host, both sides proven. The reactor takes the socket, also
 * when the command fails. It replaces one of the same (leader_node, leader_worker, lane). `token`
 * comes back in MQD_EVENT_RELAY_ENDED. */
int mqd_reactor_relay_put(struct mqd_reactor *reactor, uint64_t token, int fd, const struct mqd_relay_options *options);
/* There is none: what waits for it is refused. */
int mqd_reactor_relay_refuse(struct mqd_reactor *reactor, uint64_t token, const struct mqd_relay_options *options);
/* Ends all to that host; no event. */
int mqd_reactor_relay_remove(struct mqd_reactor *reactor, uint64_t token, int32_t leader_node);

struct mqd_replica_proposal;
void mqd_proposal_free(struct mqd_replica_proposal *proposal);

enum mqd_event_kind {
    MQD_EVENT_NONE,
    MQD_EVENT_DONE,            /* command `token` ended; error 0 or errno/MQD_E*; text says why */
    MQD_EVENT_ROLLED,          /* slot got a new active segment; offset = its base */
    MQD_EVENT_LOG_DIR_FAILED,  /* a write or flush failed: log_dir is fenced, its partitions are OFFLINE */
    MQD_EVENT_LOG_DIR_FULL,    /* a write met ENOSPC */
    MQD_EVENT_LOG,             /* a line for the log: level, connection, slot, text */
    MQD_EVENT_PROPOSE_IN_SYNC, /* the leader of slot proposes an in-sync set: event.proposal, which the taker frees */
    MQD_EVENT_FETCHER_ENDED,   /* the connection put with `token` is over: error, text */
    /* slot's log was cut (a follower's): offset = its end now; level 4: below the high watermark.
     * The checkpoint is due */
    MQD_EVENT_TRUNCATED,
    /* slot's leader has deleted its log below offset: so shall this follower
     * (mqd_reactor_advance_start) */
    MQD_EVENT_LOG_START,
    /* producers still write to the retired partition in slot, which this worker leads; once it is
     * hidden, at most once a second */
    MQD_EVENT_RETIRED_USED,
    MQD_EVENT_RELAY_WANTED, /* a connection to the leader at node `offset`, worker `log_dir`, lane `level` */
    MQD_EVENT_RELAY_ENDED   /* the relay put with `token` is over: error, text */
};
struct mqd_event {
    uint32_t kind;
    uint32_t slot; /* UINT32_MAX = none */
    uint64_t token;
    int32_t error;
    uint32_t log_dir;
    int64_t offset;
    uint64_t connection; /* 0 = none */
    uint32_t level;      /* syslog numbers: 3 error, 4 warning, 6 info, 7 debug */
    struct mqd_partition *partition;
    struct mqd_replica_proposal *proposal; /* PROPOSE_IN_SYNC; else NULL */
    char text[184];
};
int mqd_reactor_event_fd(struct mqd_reactor *reactor);                          /* readable when events wait */
int mqd_reactor_next_event(struct mqd_reactor *reactor, struct mqd_event *out); /* 1 = got one, 0 = none */

/* The files of the segments from `first` to `last` became those of `first` (swap_install): the
 * owner's list is shortened, readers look anew. With first == last they look anew alone. One event
 * with this token: MQD_E_STALE when these are not, or not all, segments of the partition that may
 * go. */
int mqd_reactor_segments_replaced(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, int64_t first,
                                  int64_t last);
/* hold 1: no cut of the log (a follower's, to where it agrees with its leader) begins until 0 is
 * said; -1: only asked. The event's offset is how often the log was cut since it was opened: what
 * was read before another count must not take the place of anything. A cut reaches below the high
 * watermark, and so into what is compacted, after an unclean election alone. */
int mqd_reactor_segments_hold(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, int32_t hold);

#endif
