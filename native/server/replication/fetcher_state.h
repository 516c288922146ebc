/* The inside of mqd_fetcher*.c; nobody else includes it. */
#ifndef MQD_FETCHER_STATE_H
#define MQD_FETCHER_STATE_H

#include "server/reactor.h"
#include "server/replication/fetcher_wire.h"

/* of one call: what is received is checked and written while it is in the L2 */
#define MQD_FETCHER_RECEIVE_BYTES (128u << 10)
#define MQD_FETCHER_BUFFER_BYTES (256u << 10) /* at first; a larger batch makes it grow */
#define MQD_FETCHER_TURN_BYTES (512u << 10)   /* of one fetcher in a turn; others are served too */
#define MQD_FETCHER_DISK_PAUSE_MS 1000        /* after a disk that took nothing */

/* A partition that follows. */
struct mqd_followed {
    struct mqd_node member; /* in fetcher->members or fetchers->unserved */
    struct mqd_node change; /* in fetcher->changes (the next request looks at it) or fetcher->put_off */
    struct mqd_owned *owned;
    struct mqd_fetcher *fetcher; /* NULL: there is no connection to its leader */
    struct mqd_followed *hash_next;
    struct mqd_fetch_key key;
    struct mqd_replica_fetch told; /* what the session has of it */
    int64_t put_off_ms;            /* not before */
    int64_t leader_high_watermark; /* of the answer whose records are being taken */
    int64_t leader_log_start;      /* the highest that Python was told of */
    /* the highest that could not be told: there was no room among the events, or it is above the
     * high watermark */
    int64_t untold_log_start;
    int64_t complained_ms;
    uint8_t in_session;  /* the leader has it in the session */
    uint8_t unsettled;   /* something of the last answer is not written, or not flushed */
    uint8_t putting_off; /* in fetcher->put_off */
    /* of this leader epoch, by a leader that did not know of it; until the bound of their pause is
     * reached */
    uint8_t refusals;
};

struct mqd_fetcher {
    struct mqd_fetcher_options options;
    uint64_t token;
    int fd;
    uint32_t index, generation;
    uint8_t readable, writable;
    /* the end of what comes has been told of, and is not told again: read on until it is met */
    uint8_t hangup;
    uint8_t outstanding; /* answers that are due: none, one, or two when the leader was urged */
    uint8_t urging;      /* the next answer is to the request that urged */
    uint8_t urgent;      /* something is to be asked before the leader has news of its own */
    uint8_t full;        /* the next request makes a new session */
    uint8_t in_frame;
    struct mqd_node members, changes, put_off; /* the last by time */
    uint32_t session_count, unsettled_count;
    struct mqd_fetch_key *forgotten;
    uint32_t forgotten_count, forgotten_capacity;
    int32_t session_id, session_epoch;
    uint32_t correlation_id; /* of the last request; wraps */
    struct mqd_buffer out;   /* empty when all of it was sent */
    uint32_t out_sent;
    /* received: [begin, end) is not yet taken; staged batches lie before it until they are written */
    uint8_t *in;
    uint32_t in_begin, in_end, in_capacity;
    struct mqd_answer answer;
    struct mqd_followed *filling; /* whose records come; NULL: they are skipped */
    int64_t deadline_ms;          /* of the answer */
    int64_t not_before_ms;        /* of the next request */
};

#define MQD_FOLLOWED_BUCKET_COUNT 4096
struct mqd_fetchers {
    struct mqd_fetcher *fetcher[MQD_FETCHER_COUNT_MAX]; /* [0, count) without holes */
    uint32_t count;
    uint32_t generation;
    struct mqd_node unserved;
    bool untold; /* of one or more partitions there is an untold_log_start */
    struct mqd_followed *buckets[MQD_FOLLOWED_BUCKET_COUNT];
    struct mqd_fetch_item *items; /* of the request being built */
    uint32_t item_capacity;
    int64_t rate;            /* bytes per second of all throttled lanes; 0 = no bound */
    int64_t allowance_bytes; /* what they may receive now; below 0: owed */
    int64_t allowance_parts; /* ... and so many thousandths of a byte */
    int64_t allowance_ms;    /* when it was last filled */
};

struct mqd_followed *mqd_followed_find(struct mqd_fetchers *fetchers, const struct mqd_fetch_key *key);
/* The next request looks at it. */
void mqd_followed_changed(struct mqd_followed *followed);
void mqd_followed_put_off(struct mqd_reactor *r, struct mqd_followed *followed, int64_t ms);
void mqd_followed_settle(struct mqd_followed *followed);        /* if it is */
void mqd_followed_leave_session(struct mqd_followed *followed); /* with the next request */
/* tells Python; error < 0: it need not be told */
void mqd_fetcher_end(struct mqd_reactor *r, struct mqd_fetcher *fetcher, int error, const char *text);
/* server/replication/fetcher_answer.c: takes what was received. false: the fetcher has ended. */
bool mqd_fetcher_take(struct mqd_reactor *r, struct mqd_fetcher *fetcher);

#endif
