/* Following leaders on other hosts: for each connection to one worker of another host the
 * partitions that are fetched over it.
 *
 * A fetcher speaks Fetch v17 with replica_state over a connection that Python has opened and proven
 * (both sides know who the other is), one request at a time:
 *
 *   request   what changed since the last one, in an incremental session (KIP-227): positions that
 *             moved, partitions that came, those that went
 *   wait      at the leader, until it has records or a high watermark that is new
 *   answer    received whole into a buffer of bounded size, then walked: hostile until checked.
 *             Records are staged as they lie there (mqd_partition_follow), written once a turn
 *   settle    what the answer brought is written, and flushed where flush_on_ack; then the next
 *             request may say so
 *
 * What the log of a partition is to do (append, cut, begin anew, wait) is decided by
 * mqd_replica_step; truncations run on a helper thread, the partition is at rest meanwhile.
 *
 * Invariants
 *   G1  a request states a fetch offset only when the log below it is written, and with
 *       flush_on_ack flushed.
 *   G2  an answer touches a partition only if it was asked for by the request that it answers,
 *       under the leader epoch that is still in force (else it is dropped).
 *   G3  one partition is fetched by at most one fetcher; a partition at rest (truncation) or put
 *       off (an error) is in no session.
 *   G4  a partition's share of an answer is at most partition_bytes_max (one batch may be larger);
 *       those served last come last in the next request.
 *   G5  memory: one buffer of at most response_bytes_limit and 96 bytes a partition.
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

/* A partition of this worker follows, or follows no longer, or its leader or epoch changed: read
 * from owned->replica and owned->leader_*. */
void mqd_fetcher_assigned(struct mqd_reactor *r, struct mqd_owned *owned);
/* put, remove, rate; sends the MQD_EVENT_DONE */
void mqd_fetcher_command(struct mqd_reactor *r, const struct mqd_command *command);
/* It is closing, or leads, or its directory failed: it is fetched no more. */
void mqd_fetcher_leave(struct mqd_reactor *r, struct mqd_owned *owned);
/* Its staged batches were written (error 0) or could not be (errno); its flush ended. */
void mqd_fetcher_written(struct mqd_reactor *r, struct mqd_owned *owned, int error);
void mqd_fetcher_flushed(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_fetcher_on_event(struct mqd_reactor *r, uint64_t value, uint32_t flags); /* of mqd_poll: a socket */
void mqd_fetchers_read(struct mqd_reactor *r); /* once a turn: answers are received and taken in */
/* once a turn, after the flushes were started: what may be asked is asked */
void mqd_fetchers_run(struct mqd_reactor *r);
/* when there is something to do without an event (as r->now_ms); -1 = when told, 0 = at once */
int64_t mqd_fetchers_next_ms(const struct mqd_reactor *r);
/* once a second: what the main thread could not be told yet */
void mqd_fetchers_tell_again(struct mqd_reactor *r);
void mqd_fetchers_close(struct mqd_reactor *r);   /* the reactor ends: the connections */
void mqd_fetchers_destroy(struct mqd_reactor *r); /* ... and what is left */

/* its log was cut: it may be fetched again. If it was not, only after a pause: its leader would say
 * the same */
void mqd_fetcher_rested(struct mqd_reactor *r, struct mqd_owned *owned, bool cut);

/* ---- server/replication/follow_cut.c ---- */

/* The log is to be cut to `offset`; or, with batch_offset >= 0, to begin anew there
 * (mqd_partition_restart_at). Nothing of it is staged. */
void mqd_follow_rest(struct mqd_reactor *r, struct mqd_owned *owned, int64_t offset, int64_t batch_offset);
/* A partition that rests is cut as soon as nothing else is under way with it. */
void mqd_truncation_maybe(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_truncation_on_done(struct mqd_reactor *r, uint64_t slot, int result);
void mqd_truncations_retry(struct mqd_reactor *r); /* once a turn while any waits for room */

#endif
