/* Following leaders on other hosts: the connections to their workers, and the partitions that are
 * fetched over each.
 *
 * A fetcher speaks Fetch v17 with replica_state over a mutually authenticated connection that
 * Python has opened (plain text, or TLS), one request at a time:
 *
 *   request   the changes since the last one, in an incremental session (KIP-227): positions that
 *             moved, partitions added and removed
 *   wait      at the leader, until it has records or a new high watermark
 *   response  received into a buffer of bounded size and parsed as it arrives; untrusted until
 *             checked. Records are staged in place (mqd_partition_follow) and written once a turn
 *   storing   the records of the response are written and, with flush_on_ack, flushed; only then
 *             does the next request state the new position
 *
 * mqd_replica_next_step decides what the log of a partition must do (append, truncate, restart,
 * wait). Truncations run on a helper thread; meanwhile the partition is not fetched.
 *
 * Invariants
 *   G1  a request states a fetch offset only when the log below it is written and, with
 *       flush_on_ack, flushed.
 *   G2  a response affects a partition only if the request that it answers named the partition
 *       under the leader epoch that is still current (otherwise it is dropped).
 *   G3  a partition is fetched by at most one fetcher; while it is truncated, or put off after an
 *       error, it is in no session.
 *   G4  a partition's share of a response is at most partition_bytes_max (one batch may be larger);
 *       partitions that the response served come last in the next request.
 *   G5  memory of a fetcher: one buffer of about twice response_bytes_limit at most, and less than
 *       512 bytes for each partition; over TLS also MQD_TLS_UNSENT_BYTES_MAX.
 * Concurrency: the reactor's thread.
 */
#ifndef MQD_FETCHER_H
#define MQD_FETCHER_H

#include "base/list.h"
#include "native.h"
#include "replica/rules.h"

struct mqd_command;
struct mqd_fetcher;
struct mqd_owned;
struct mqd_reactor;

/* ---- for the reactor's other files ---- */

/* The role, leader or leader epoch of `owned` has changed (owned->replica, owned->leader_*). */
void mqd_fetcher_on_assignment(struct mqd_reactor *r, struct mqd_owned *owned);
/* Handles the commands put, remove and rate; emits MQD_EVENT_DONE. */
void mqd_fetcher_command(struct mqd_reactor *r, const struct mqd_command *command);
/* Stops fetching `owned`: it is closing, or this host leads it, or its log directory failed. */
void mqd_fetcher_unfollow(struct mqd_reactor *r, struct mqd_owned *owned);
/* The staged batches of `owned` were written (error 0) or could not be written (errno). */
void mqd_fetcher_on_written(struct mqd_reactor *r, struct mqd_owned *owned, int error);
void mqd_fetcher_on_flush(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_fetcher_on_event(struct mqd_reactor *r, uint64_t value, uint32_t flags); /* from mqd_poll: a socket */
void mqd_fetcher_on_step(struct mqd_reactor *r, uint64_t value); /* from the pool: a step of the TLS handshake */
void mqd_fetchers_read(struct mqd_reactor *r);                   /* once a turn: receives and applies responses */
/* once a turn, after the flushes were started: sends requests that are due */
void mqd_fetchers_run(struct mqd_reactor *r);
/* returns the time, on the clock of r->now_ms, at which work falls due even if no event arrives;
 * -1 = only on events, 0 = immediately */
int64_t mqd_fetchers_next_ms(const struct mqd_reactor *r);
/* called once a second: reports the leaders' log starts that could not be reported before */
void mqd_fetchers_report_log_starts(struct mqd_reactor *r);
void mqd_fetchers_close(struct mqd_reactor *r);   /* when the reactor stops: closes the connections */
void mqd_fetchers_destroy(struct mqd_reactor *r); /* frees the rest */

/* the truncation of the log has ended and the partition may be fetched again; if the log is
 * unchanged, only after a pause, because its leader would give the same response */
void mqd_fetcher_on_truncation(struct mqd_reactor *r, struct mqd_owned *owned, bool log_changed);

/* ---- server/replication/follower_truncation.c ---- */

/* Requests that the log be truncated to `offset` or, with batch_offset >= 0, restarted at `offset`
 * (mqd_partition_restart_at describes both arguments). No batch of the partition may be staged. */
void mqd_follow_truncate(struct mqd_reactor *r, struct mqd_owned *owned, int64_t offset, int64_t batch_offset);
/* Begins the requested truncation if no other work on the partition is in flight. */
void mqd_truncation_begin_if_possible(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_truncation_on_done(struct mqd_reactor *r, uint64_t slot, int result);
void mqd_truncations_retry(struct mqd_reactor *r); /* once a turn while any waits for a helper thread */

#endif
