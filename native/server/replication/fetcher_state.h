/* Internal to server/replication/fetcher*.c. */
#ifndef MQD_FETCHER_STATE_H
#define MQD_FETCHER_STATE_H

#include "server/reactor.h"
#include "server/replication/fetcher_wire.h"
#include "server/tls/outgoing.h"

/* received per call: records are checked and written while they are in the L2 cache */
#define MQD_FETCHER_RECEIVE_BYTES (128u << 10)
#define MQD_FETCHER_BUFFER_BYTES (256u << 10) /* initial size; grows for a larger batch */
#define MQD_FETCHER_TURN_BYTES (512u << 10)   /* per fetcher and turn, so that others are served too */
#define MQD_FETCHER_DISK_PAUSE_MS 1000        /* after the disk refused a write */

/* A partition whose replica here follows a leader. */
struct mqd_followed {
    struct mqd_node member_node; /* in fetcher->members or fetchers->unserved */
    struct mqd_node change_node; /* in fetcher->changes (the next request handles it) or fetcher->put_off */
    struct mqd_owned *owned;
    struct mqd_fetcher *fetcher; /* NULL: no connection to its leader */
    struct mqd_followed *hash_next;
    struct mqd_fetch_key key;
    struct mqd_replica_fetch sent; /* the partition's state in the fetch session */
    int64_t put_off_until_ms;      /* not fetched before this time */
    int64_t leader_high_watermark; /* of the response whose records are being taken */
    int64_t reported_log_start;    /* the leader's highest log start that was reported to Python */
    /* the highest log start that could not be reported because the event queue was full, or because
     * it is above the high watermark */
    int64_t pending_log_start;
    int64_t warned_ms;
    uint8_t in_session; /* the leader has it in the session */
    uint8_t storing;    /* records of the last response are not written or not flushed yet */
    uint8_t is_put_off; /* in fetcher->put_off */
    /* refusals by a leader that did not know this leader epoch yet; counted until the
     * maximum pause is reached */
    uint8_t refusal_count;
};

struct mqd_fetcher {
    struct mqd_fetcher_options options;
    uint64_t token;
    struct mqd_outgoing socket;
    uint32_t index, generation;
    /* responses that are due: 2 if an urgent request was sent while one response was due */
    uint8_t outstanding;
    uint8_t awaits_urgent;  /* the next response is for the urgent request */
    uint8_t urgent;         /* a request must not wait for the leader's delayed response */
    uint8_t starts_session; /* the next request creates a new session */
    uint8_t in_frame;
    struct mqd_node members, changes, put_off; /* put_off is ordered by time */
    uint32_t session_count, storing_count;
    struct mqd_fetch_key *forgotten;
    uint32_t forgotten_count, forgotten_capacity;
    int32_t session_id, session_epoch;
    uint32_t correlation_id; /* of the last request; wraps */
    struct mqd_buffer out;   /* empty when everything was sent */
    uint32_t out_sent;
    /* received bytes: [in_begin, in_end) are not parsed yet; staged batches are before in_begin
     * until they are written */
    uint8_t *in;
    uint32_t in_begin, in_end, in_capacity;
    struct mqd_response_parser parser;
    struct mqd_followed *receiving; /* the partition whose records are arriving; NULL: the records are skipped */
    int64_t deadline_ms;            /* of the response */
    int64_t not_before_ms;          /* of the next request */
};

#define MQD_FOLLOWED_BUCKET_COUNT 4096
struct mqd_fetchers {
    struct mqd_fetcher *fetcher[MQD_FETCHER_COUNT_MAX]; /* [0, count) without gaps */
    uint32_t count;
    uint32_t generation;
    struct mqd_node unserved;
    bool has_pending_log_start; /* some partition has a pending_log_start */
    struct mqd_followed *buckets[MQD_FOLLOWED_BUCKET_COUNT];
    struct mqd_fetch_item *items; /* of the request being built */
    uint32_t item_capacity;
    int64_t bytes_per_second_max;  /* of all throttled fetchers together; 0 = no bound */
    int64_t allowance_bytes;       /* bytes that the throttled fetchers may receive now; negative: debt */
    int64_t allowance_thousandths; /* the fractional part of allowance_bytes, in thousandths of a byte */
    int64_t refilled_ms;           /* when the allowance was last refilled */
};

struct mqd_followed *mqd_followed_find(struct mqd_fetchers *fetchers, const struct mqd_fetch_key *key);
/* Adds the partition to the next request. */
void mqd_followed_queue_change(struct mqd_followed *followed);
void mqd_followed_put_off(struct mqd_reactor *r, struct mqd_followed *followed, int64_t delay_ms);
void mqd_followed_update_storing(struct mqd_followed *followed); /* computes `storing` again */
void mqd_followed_leave_session(struct mqd_followed *followed);  /* the next request removes it from the session */
/* ends the connection and notifies Python; error < 0: no notification */
void mqd_fetcher_end(struct mqd_reactor *r, struct mqd_fetcher *fetcher, int error, const char *text);
/* the same, with mqd_error_code and mqd_error_message as the reason */
void mqd_fetcher_end_with_error(struct mqd_reactor *r, struct mqd_fetcher *fetcher);
/* server/replication/fetcher_response.c: handles received bytes. false: the fetcher has ended. */
bool mqd_fetcher_process_received(struct mqd_reactor *r, struct mqd_fetcher *fetcher);

#endif
