/* The reactor's interface for Python; read by build_ffi.py like native.h, under the same rules. How
 * the reactor works: server/reactor.h.
 */
#ifndef MQD_SERVER_API_H
#define MQD_SERVER_API_H
/* MQD_CDEF_OFF */
#include "native.h"
/* MQD_CDEF_ON */

enum mqd_rights {
    MQD_RIGHTS_OFF, /* every client may do everything */
    MQD_RIGHTS_ON,
    MQD_RIGHTS_LOG_ONLY /* what would be denied is reported, but allowed */
};
#define MQD_LISTENER_COUNT_MAX 64
/* the listener id of connections between hosts, in both directions (mqd_reactor_set_listener_tls) */
#define MQD_LISTENER_ID_HOSTS 64
#define MQD_LISTENER_FLAG_TLS 1
#define MQD_LISTENER_FLAG_SASL 2

struct mqd_reactor_options {
    void *control;
    void *links;
    uint32_t self; /* worker index */
    uint32_t endpoint_count;
    const int *eventfds; /* one per endpoint */
    uint8_t *arenas[66]; /* every endpoint's arena; only our own is writable; NULL = none */
    uint64_t arena_bytes[66];
    int handoff_fd;        /* Unix seqpacket socket: accepted connections arrive by SCM_RIGHTS */
    int backend;           /* enum mqd_backend */
    int cpu;               /* the thread is pinned to this CPU; -1 = not pinned */
    uint32_t spin_us;      /* how long to spin before sleeping; 0 = not at all */
    uint8_t profile_turns; /* measure what the turns spend their time on (worker.loop.profile) */
    uint32_t connection_count_max;
    uint32_t request_bytes_max; /* socket.request.max.bytes */
    /* bytes at the end of our own arena that are reserved for large requests: those that need more
     * than half of the arena's other bytes; the reserved pages are allocated on use */
    uint64_t large_bytes;
    uint32_t large_ms_max; /* large.request.timeout.ms */
    /* bound on all memory that the reactor keeps for requests and connections
     * (queued.max.request.bytes) */
    uint64_t heap_bytes_max;
    uint32_t inflight_count_max; /* unanswered requests per connection */
    uint32_t connection_idle_ms_max;
    uint32_t fetch_bytes_max;   /* fetch.max.bytes of the broker */
    uint32_t session_count_max; /* max.incremental.fetch.session.cache.slots */
    /* wait this long for more appends before a flush starts; 0 = flush as soon as the previous one
     * ends */
    uint32_t group_commit_us;
    uint32_t sendfile_bytes_min; /* smaller ranges are copied instead */
    uint32_t read_fd_count_max;  /* open segment files kept for reading (LRU) */
    /* the control segment, opened read-only, passed to local clients; 0 or less = local clients are
     * not served */
    int control_fd;
    uint8_t listener_flags[64]; /* by listener id: MQD_LISTENER_FLAG_TLS, MQD_LISTENER_FLAG_SASL */
    /* limits for a connection that has not authenticated yet: on the size of a frame
     * (sasl.server.max.receive.size plus a header), and on the time */
    uint32_t authentication_bytes_max, authentication_ms_max;
    uint8_t rights;                   /* enum mqd_rights */
    uint64_t share_bytes_max;         /* share.memory.max.bytes */
    uint32_t share_session_count_max; /* group.share.max.share.sessions, of all workers */
    int32_t slow_ms;                  /* slow.request.ms: longer requests are reported (MQD_EVENT_SLOW); 0 = none */
    int32_t denied_interval_ms;       /* identical denials are reported together, this often (MQD_EVENT_DENIED) */
};
struct mqd_reactor;
struct mqd_reactor *mqd_reactor_create(const struct mqd_reactor_options *options);
int mqd_reactor_start(struct mqd_reactor *reactor); /* starts the reactor's own thread, which never touches Python */
int mqd_reactor_stop(struct mqd_reactor *reactor);  /* stops reading, flushes, answers what it can, joins the thread */
void mqd_reactor_destroy(struct mqd_reactor *reactor);
int mqd_reactor_backend(struct mqd_reactor *reactor); /* the backend in use */

/* Commands from the main thread of the worker. Each returns immediately and is answered by one
 * event with the same token. -1 MQD_E_FULL when 4096 commands are outstanding; a command is
 * outstanding until its event has been taken. */
int mqd_reactor_add_log_dir(struct mqd_reactor *reactor, uint64_t token, uint32_t log_dir, const char *path);
/* full = 1: Produce is refused with KAFKA_STORAGE_ERROR */
int mqd_reactor_set_log_dir_full(struct mqd_reactor *reactor, uint64_t token, uint32_t log_dir, int full);
int mqd_reactor_topic_put(struct mqd_reactor *reactor, uint64_t token, const uint8_t topic_id[16], const char *name,
                          const uint32_t *slots, uint32_t partition_count);
int mqd_reactor_topic_remove(struct mqd_reactor *reactor, uint64_t token, const uint8_t topic_id[16]);
/* Like topic_put (where this host leads every partition), but for a cluster: also gives the
 * location of each partition. */
#define MQD_LEADER_HERE -2147483647
struct mqd_topic_partition {
    uint32_t slot;  /* of this host's replica; UINT32_MAX = no replica here */
    int32_t leader; /* node id, -1 = none; MQD_LEADER_HERE = this host (node id unknown) */
    int32_t leader_epoch;
    int32_t redirect;  /* of a retired partition: the partition that takes its records; -1 = none */
    uint32_t retiring; /* 0 = no; 1 = refuses new records; 2 or more = redirects them */
    /* the worker that owns the partition on the leader's host; any other worker there forwards
     * requests to it */
    uint32_t leader_worker;
};
int mqd_reactor_topic_put_partitions(struct mqd_reactor *reactor, uint64_t token, const uint8_t topic_id[16],
                                     const char *name, const struct mqd_topic_partition *partitions,
                                     uint32_t partition_count);
/* The same for a view: it has the partitions of the topic `base`, but only the records that the
 * filter selects. */
int mqd_reactor_view_put(struct mqd_reactor *reactor, uint64_t token, const uint8_t topic_id[16], const char *name,
                         const struct mqd_topic_partition *partitions, uint32_t partition_count, const char *base,
                         const uint8_t *filter, uint32_t filter_bytes);
struct mqd_broker_address {
    int32_t node_id;
    int32_t port;
    uint8_t has_rack;
    char host[256];
    char rack[256];
};
/* This host's node id and all brokers that clients may be sent to (KIP-951). Replaces the whole
 * list. */
int mqd_reactor_brokers_put(struct mqd_reactor *reactor, uint64_t token, int32_t node_id,
                            const struct mqd_broker_address *brokers, uint32_t broker_count);
/* gives the partition to the reactor, which publishes its positions and sets the slot ONLINE */
int mqd_reactor_partition_open(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, uint32_t log_dir,
                               struct mqd_partition *partition);
/* takes the partition back: waits for its flush and answers its waiters; the event's `partition`
 * may then be closed and deleted */
int mqd_reactor_partition_close(struct mqd_reactor *reactor, uint64_t token, uint32_t slot);
int mqd_reactor_set_log_options(struct mqd_reactor *reactor, uint64_t token, uint32_t slot,
                                const struct mqd_log_options *options);
/* DeleteRecords and retention: moves the log start to min(offset, high watermark) (offset -1 = high
 * watermark) and drops whole segments below it from the table. event.offset = the new start. The
 * caller unlinks the files after the event. */
int mqd_reactor_advance_start(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, int64_t offset);
/* roll by age: does nothing when the active segment is empty */
int mqd_reactor_roll(struct mqd_reactor *reactor, uint64_t token, uint32_t slot);
int mqd_reactor_set_leader_epoch(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, int32_t leader_epoch);
/* the keeper has proved that the endpoint died: releases the memory lent to it and ends requests
 * that wait for it */
int mqd_reactor_endpoint_died(struct mqd_reactor *reactor, uint64_t token, uint32_t endpoint);
/* The most connections that this worker may hold (its share of the broker's budget), and that all
 * workers together may hold (max.connections). Connections above a lowered limit stay open; new
 * ones are refused. No event; takes effect immediately. */
int mqd_reactor_set_connection_max(struct mqd_reactor *reactor, uint32_t worker_max, uint32_t broker_max);
/* The same limits for shared-memory attachments (initially 0): their number, and the memory that
 * they may use together. */
int mqd_reactor_set_local_max(struct mqd_reactor *reactor, uint32_t count, uint64_t size_bytes);

/* Sets the certificates and settings of a TLS listener (tls/api.h), or of MQD_LISTENER_ID_HOSTS.
 * Existing connections keep their context. The reactor takes ownership of the context, even if
 * the command fails. */
struct mqd_tls_context;
int mqd_reactor_set_listener_tls(struct mqd_reactor *reactor, uint64_t token, uint32_t listener_id,
                                 struct mqd_tls_context *context);
/* Answers MQD_EVENT_TLS_NAME for `connection` with the client's principal, such as "User:alice"; ""
 * refuses the client. Does nothing if the connection has been closed. */
int mqd_reactor_tls_principal(struct mqd_reactor *reactor, uint64_t token, uint64_t connection, const char *principal);

/* Replication. A partition with several replicas has an assignment (replica/rules.h) from the
 * metadata; without one, this host leads it and is its only replica. A follower refuses Produce
 * with NOT_LEADER_OR_FOLLOWER and publishes its positions in the slot as usual. event.offset = the
 * log end. */
struct mqd_replica_assignment;
int mqd_reactor_replica_set(struct mqd_reactor *reactor, uint64_t token, uint32_t slot,
                            const struct mqd_replica_assignment *assignment, int32_t leader_worker);
/* The controller's response to MQD_EVENT_PROPOSE_IN_SYNC: mqd_replica_on_proposal_response. */
int mqd_reactor_in_sync_response(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, uint64_t sequence,
                                 int32_t leader_epoch, int32_t error);
#define MQD_FETCHER_COUNT_MAX 2048
enum mqd_fetcher_lane {
    MQD_LANE_IN_SYNC,  /* partitions whose in-sync set includes this node */
    MQD_LANE_CATCH_UP, /* all others; without such a connection they use the first lane */
    /* catching-up partitions whose assignment says `throttled`: fetched at a bounded rate; without
     * such a connection they use the first lane */
    MQD_LANE_THROTTLED,
    MQD_LANE_COUNT
};
struct mqd_fetcher_options {
    int32_t leader_node;
    uint32_t leader_worker;
    uint32_t lane;    /* enum mqd_fetcher_lane */
    int32_t node_id;  /* this node */
    uint32_t wait_ms; /* replica.fetch.wait.max.ms */
    /* replica.fetch.response.max.bytes: the size requested; one batch may make a response larger */
    uint32_t response_bytes_max;
    uint32_t response_bytes_limit; /* the connection is closed after a larger response */
    uint32_t partition_bytes_max;  /* replica.fetch.max.bytes */
    /* the connection is considered dead if a response takes this long beyond wait_ms
     * (replica.socket.timeout.ms) */
    uint32_t timeout_ms;
    /* replica.fetch.backoff.ms: delay before a refused partition is fetched again; shorter while
     * the leader may not have learned yet that it leads */
    uint32_t backoff_ms;
    int64_t bytes_per_second_max; /* follower.replication.throttled.rate, for the throttled lane; 0 = unbounded */
    uint8_t tls;                  /* 1: TLS begins with the socket's next byte; this host is the TLS client */
};
/* Adds a mutually authenticated connection to a worker of another host, or replaces the one with the
 * same (leader_node, leader_worker, lane). The reactor takes ownership of the socket (non-blocking
 * or not), even if the command fails. The command is answered by MQD_EVENT_DONE, as usual; a later
 * MQD_EVENT_FETCHER_ENDED has the same `token`. */
int mqd_reactor_fetcher_put(struct mqd_reactor *reactor, uint64_t token, int fd,
                            const struct mqd_fetcher_options *options);
/* Closes the connection, without MQD_EVENT_FETCHER_ENDED. */
int mqd_reactor_fetcher_remove(struct mqd_reactor *reactor, uint64_t token, int32_t leader_node, uint32_t leader_worker,
                               uint32_t lane);
/* for all throttled lanes together */
int mqd_reactor_set_fetcher_rate(struct mqd_reactor *reactor, uint64_t token, int64_t bytes_per_second_max);

/* Produce requests of local clients for partitions that other hosts lead (server/relay/relay.h).
 * MQD_EVENT_RELAY_REQUESTED requests a connection: node_id = the leader's, worker = which of its
 * workers, lane = enum mqd_relay_lane. Answer it with relay_put or relay_refuse. */
#define MQD_RELAY_COUNT_MAX 4096
enum mqd_relay_lane { MQD_RELAY_LANE_PLAIN, MQD_RELAY_LANE_TRANSACTIONS, MQD_RELAY_LANE_COUNT };
struct mqd_relay_options {
    int32_t leader_node;
    uint32_t leader_worker;
    uint32_t lane;
    /* put: the connection is closed if a response takes longer. refuse: how long batches are refused
     * immediately, without requesting a connection */
    uint32_t timeout_ms;
    uint8_t tls; /* as in mqd_fetcher_options */
};
/* Adds a mutually authenticated connection to a worker of another host, or replaces the one with the
 * same (leader_node, leader_worker, lane). The reactor takes ownership of the socket, even if the
 * command fails. A later MQD_EVENT_RELAY_ENDED has the command's `token`. */
int mqd_reactor_relay_put(struct mqd_reactor *reactor, uint64_t token, int fd, const struct mqd_relay_options *options);
/* No connection is available: batches that wait for one are refused. */
int mqd_reactor_relay_refuse(struct mqd_reactor *reactor, uint64_t token, const struct mqd_relay_options *options);
/* Closes all connections to that host, without events. */
int mqd_reactor_relay_remove(struct mqd_reactor *reactor, uint64_t token, int32_t leader_node);

/* Sets the rights that MQD_EVENT_SUBJECT_REQUESTED (with the token `subject_id`) requested, or new
 * ones for an existing subject. MQD_E_STALE: the subject no longer exists. */
struct mqd_rights_tables { /* of mqd/security/rights_table.py: topics, transactional ids, groups */
    const uint8_t *table[3];
    uint32_t size_bytes[3];
};
int mqd_reactor_subject_put(struct mqd_reactor *reactor, uint64_t token, uint64_t subject_id,
                            const struct mqd_rights_tables *tables);

/* Rights on the partitions in these slots have been revoked: active segments that local clients of
 * this worker have mapped are rolled. An empty segment is rolled after the next write. */
int mqd_reactor_revoke(struct mqd_reactor *reactor, uint64_t token, const uint32_t *slots, uint32_t count);

struct mqd_replica_proposal;
void mqd_proposal_free(struct mqd_replica_proposal *proposal);

enum mqd_event_kind {
    MQD_EVENT_NONE,
    MQD_EVENT_DONE,           /* command `token` ended; error = 0 or errno/MQD_E*, text = the reason */
    MQD_EVENT_ROLLED,         /* slot got a new active segment; offset = its base */
    MQD_EVENT_LOG_DIR_FAILED, /* a write or flush failed: log_dir is fenced and its partitions are OFFLINE */
    MQD_EVENT_LOG_DIR_FULL,   /* a write failed with ENOSPC */
    MQD_EVENT_LOG,            /* a line for the log: level, connection, slot, text */
    /* the leader of slot proposes an in-sync set: event.proposal, which the receiver of the event
     * frees */
    MQD_EVENT_PROPOSE_IN_SYNC,
    MQD_EVENT_FETCHER_ENDED, /* the connection put with `token` has ended: error, text */
    /* the log of slot (a follower's) was truncated: offset = its new end; level = 4 if that is below
     * the high watermark. A checkpoint is due */
    MQD_EVENT_TRUNCATED,
    /* the leader of slot has deleted its log below offset; this follower must do the same
     * (mqd_reactor_advance_start) */
    MQD_EVENT_LOG_START,
    /* producers still write to the retired partition in slot, which this worker leads; sent once
     * the partition is hidden from clients, at most once a second */
    MQD_EVENT_RETIRED_USED,
    /* request for a connection to the leader node_id: worker = the index of its worker, and the
     * lane */
    MQD_EVENT_RELAY_REQUESTED,
    MQD_EVENT_RELAY_ENDED, /* the relay connection put with `token` has ended: error, text */
    /* a client of listener `slot` has authenticated by its certificate as `text`, a distinguished
     * name. Its connection, `token`, waits for mqd_reactor_tls_principal */
    MQD_EVENT_TLS_NAME,
    /* request for the rights of subject `token`: text is its host, a space, its principal. Its
     * connections wait */
    MQD_EVENT_SUBJECT_REQUESTED,
    MQD_EVENT_SUBJECT_GONE, /* subject `token` is no longer used */
    /* subject `token` was denied `operation` on a resource of resource_type: text = the resource's
     * name, count = the number of such denials */
    MQD_EVENT_DENIED,
    /* a slow request was answered: api_key, api_version, total_us = how long it took (spent_us: on
     * what), text = the client id followed by the principal, client_id_bytes, count = the number of
     * slow requests before it that were not reported */
    MQD_EVENT_SLOW,
    MQD_EVENT_RESUMED /* the reactor was idle (mqd_reactor_is_idle) and no longer is */
};
/* the parts of a slow request's time; server/slow/slow.c */
enum mqd_spent {
    MQD_SPENT_QUEUE,
    MQD_SPENT_WAIT,
    MQD_SPENT_DISK,
    MQD_SPENT_OWNER,
    MQD_SPENT_REPLICAS,
    MQD_SPENT_ACCEPTOR,
    MQD_SPENT_TURN,
    MQD_SPENT_THROTTLE
};
struct mqd_event {
    uint32_t kind;
    uint32_t slot; /* UINT32_MAX = none */
    union {
        uint64_t token;
        uint64_t total_us; /* for SLOW */
    };
    union {
        int32_t error;
        int32_t client_id_bytes; /* for SLOW */
    };
    union {
        uint32_t log_dir;
        uint32_t worker; /* for RELAY_REQUESTED */
    };
    union {
        int64_t offset;
        int64_t node_id;       /* for RELAY_REQUESTED */
        int64_t resource_type; /* for DENIED */
        int64_t api_key;       /* for SLOW */
    };
    uint64_t connection; /* 0 = none */
    union {
        uint32_t level;       /* syslog numbers: 3 error, 4 warning, 6 info, 7 debug */
        uint32_t lane;        /* for RELAY_REQUESTED */
        uint32_t operation;   /* for DENIED */
        uint32_t api_version; /* for SLOW */
    };
    uint32_t count; /* for DENIED and SLOW */
    struct mqd_partition *partition;
    struct mqd_replica_proposal *proposal; /* for PROPOSE_IN_SYNC; otherwise NULL */
    uint64_t spent_us[8];                  /* for SLOW: by enum mqd_spent */
    char text[320];
};
int mqd_reactor_event_fd(struct mqd_reactor *reactor);                          /* readable while events wait */
int mqd_reactor_next_event(struct mqd_reactor *reactor, struct mqd_event *out); /* 1 = *out is set, 0 = no event */
/* Returns 1 if nothing is connected, nothing waits to be flushed, and nothing has happened for a
 * second. MQD_EVENT_RESUMED is sent when this is no longer so. May be called by any thread. */
int mqd_reactor_is_idle(const struct mqd_reactor *reactor);

/* The segments from `first` to `last` were replaced by a single segment with the base offset
 * `first` (swap_install): the owner shortens its segment list and readers list the segments again.
 * With first == last the owner's list does not change. One event with this token: MQD_E_STALE when
 * the range includes segments that may not be replaced. */
int mqd_reactor_segments_replaced(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, int64_t first,
                                  int64_t last);
/* hold = 1: until a call with hold = 0, no truncation of the log starts (a follower truncates its
 * log to where it agrees with its leader's). hold = -1: query only. The event's offset counts the
 * truncations since the log was opened: data read under a different count must not replace
 * anything. A truncation reaches below the high watermark, and so into compacted data, only after
 * an unclean election. */
int mqd_reactor_segments_hold(struct mqd_reactor *reactor, uint64_t token, uint32_t slot, int32_t hold);

#endif
