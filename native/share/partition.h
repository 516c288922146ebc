/* One share-partition at its owner: its state (share/state.h) is read from the share coordinator,
 * every change is written to the coordinator, and responses to acknowledgements wait for that
 * write. Pure: no clock (times are arguments), no system call; the owner transports requests and
 * responses (docs/design/share-groups.md, sections 2 to 4).
 *
 *   LOADING   a READ is in flight or due
 *   NO_START  the state was read and has no start offset yet: the owner sets it (_set_start)
 *   ACTIVE    `state` is valid; a WRITE may be in flight
 *   FAILED    `error` is the reason; the state is freed. _restart loads it again
 *
 * Invariants
 *   P1  one request is in flight at a time; a WRITE is repeated, byte for byte, until its outcome
 *       is definite.
 *   P2  (S6) the response to a change is sent once WRITEs with the whole change have succeeded, or
 *       when there is nothing to write. Changes made while a WRITE is in flight are part of the
 *       next one.
 *   P3  after a definite refusal the state is no longer used; all waiters get the error.
 * Bounds: a WRITE has at most RUNS_PER_WRITE runs, the next one has the rest; the owner limits the
 * number of waiters. Concurrency: one thread.
 */
#ifndef MQD_SHARE_PARTITION_H
#define MQD_SHARE_PARTITION_H

#include "base/list.h"
#include "share/state.h"
#include "wire/share_state.h"

#define MQD_SHARE_SETTINGS_BYTES 32 /* followed by a header's name, whose size is in byte 15 */
#define MQD_SHARE_FIFO_HEADER_BYTES_MAX 63
#define MQD_SHARE_EPOCH_COUNT_MAX 64
#define MQD_SHARE_LAZY_MS 100 /* a change that no response waits for is written after this time */

enum mqd_share_phase { MQD_SHARE_LOADING, MQD_SHARE_NO_START, MQD_SHARE_ACTIVE, MQD_SHARE_FAILED };
enum mqd_share_reset { MQD_SHARE_RESET_LATEST, MQD_SHARE_RESET_EARLIEST, MQD_SHARE_RESET_BY_DURATION };

/* The part of the group's effective configuration that the owner needs. */
struct mqd_share_group_settings {
    struct mqd_share_settings state;
    uint8_t read_committed; /* share.isolation.level=read_committed */
    uint8_t reset;          /* enum mqd_share_reset */
    int64_t reset_offset;   /* for BY_DURATION: the start if a READ returns none; -1 = no record is that new */
    /* with state.fifo: size of the name of the header whose value is a record's ordering key;
     * 0: the Kafka record key is used */
    uint8_t fifo_header_bytes;
    uint8_t fifo_header[MQD_SHARE_FIFO_HEADER_BYTES_MAX];
};
/* Returns the size of the settings, or -1 if they are invalid. */
int mqd_share_settings_parse(const uint8_t *bytes, uint32_t size_bytes, struct mqd_share_group_settings *out);

/* A response that waits for persistence. */
struct mqd_share_waiter {
    struct mqd_node node;
    uint64_t token;
    uint32_t worker; /* receives the response */
    int32_t lock_ms; /* sent with the response */
};

struct mqd_share_partition {
    struct mqd_share state; /* while ACTIVE */
#ifdef MQD_PLANTED_PARTITION
    uint32_t planted_rules; /* broken rules: share/planted_bugs.h */
#endif
    struct mqd_share_partition_id id; /* the owner keeps the bytes of the group id */
    struct mqd_share_pool *pool;
    struct mqd_share_group_settings settings;
    uint8_t phase;
    uint8_t in_flight;      /* MQD_SHARE_READ, MQD_SHARE_WRITE or 0 */
    uint8_t verify_pending; /* `state` is not used before a READ, or the WRITE in flight, confirms it */
    uint8_t report_pending; /* a READ must tell the acceptor which records are Archiving */
    uint8_t write_pending;  /* `body` is a WRITE whose outcome is not known yet */
    int16_t error;
    int32_t leader_epoch, state_epoch;
    int32_t backoff_ms;
    int64_t due_ms;         /* no request before this time */
    int64_t dirty_since_ms; /* when a change without a waiter was first noticed; -1 = there is none */
    int64_t failed_ms;
    struct mqd_buffer body;
    /* lists of struct mqd_share_waiter. waiting: the changes are not in a WRITE yet; covered: they
     * are in the WRITE in `body` */
    struct mqd_node waiting, covered;
    /* sends the response; takes ownership of the waiter, which has been removed from its list */
    void (*respond)(void *context, struct mqd_share_waiter *waiter, int16_t error);
    /* For a READ: fills `out` with the newest leader epochs of the log and where they begin, at
     * most MQD_SHARE_EPOCH_COUNT_MAX, and returns their number. If this pointer is NULL, the state
     * is not compared with the log. */
    uint32_t (*get_log_epochs)(void *context, const struct mqd_share_partition *partition, struct mqd_share_epoch *out);
    void *context;
};

/* `id->group_id.bytes` and the pool must outlive the partition. */
void mqd_share_partition_init(struct mqd_share_partition *partition, struct mqd_share_pool *pool,
                              const struct mqd_share_partition_id *id, int32_t leader_epoch,
                              void (*respond)(void *context, struct mqd_share_waiter *waiter, int16_t error),
                              void *context);
/* All waiters get `error`; then the partition is FAILED. */
void mqd_share_partition_fail(struct mqd_share_partition *partition, int16_t error, int64_t now_ms);
void mqd_share_partition_restart(struct mqd_share_partition *partition, int32_t leader_epoch);
/* Fails the partition, unless it has failed already, and returns its memory to the pool. */
void mqd_share_partition_free(struct mqd_share_partition *partition);
/* NO_START -> ACTIVE; a WRITE with the start will follow. */
void mqd_share_partition_set_start(struct mqd_share_partition *partition, int64_t start);

/* Called when a session joins after a time without sessions. If the state was kept meanwhile for
 * backoffs or dead letters, an administrator may have changed the offsets, so a READ or WRITE must
 * confirm the state. Nothing may be acquired while `verify_pending` is set. */
void mqd_share_partition_request_verify(struct mqd_share_partition *partition);

/* Requests a READ that changes nothing: it tells a restarted acceptor which records are
 * Archiving. */
void mqd_share_partition_request_report(struct mqd_share_partition *partition);

/* Returns the request to send now: MQD_SHARE_READ or MQD_SHARE_WRITE, whose body stays in `body`
 * until its response; or 0 if there is none. The returned request is then in flight. */
int mqd_share_partition_next_request(struct mqd_share_partition *partition, int64_t now_ms);
/* Called when the request could not be sent, or its receiver has died: it is sent again at
 * `due_ms` or later. */
void mqd_share_partition_on_unsent(struct mqd_share_partition *partition, int64_t due_ms);
/* `bytes`: the settings, then the response's body. */
void mqd_share_partition_on_response(struct mqd_share_partition *partition, const uint8_t *bytes, uint32_t size_bytes,
                                     int64_t now_ms);

/* Called after the waiter's change was made: its response is sent once the change is persisted. */
void mqd_share_partition_await(struct mqd_share_partition *partition, struct mqd_share_waiter *waiter);
/* The time at which to call _next_request again or to expire locks; MQD_SHARE_NEVER = there is
 * nothing to do. */
int64_t mqd_share_partition_deadline(const struct mqd_share_partition *partition);
/* Whether no record is acquired, Delayed or Archiving, and no change or request is pending. */
bool mqd_share_partition_is_idle(const struct mqd_share_partition *partition);

#endif
