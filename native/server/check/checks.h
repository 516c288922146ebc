/* Batches that wait for a response before they may be written: what the rest of the reactor calls.
 * The rules: server/check/check.c, server/check/check_records.c.
 */
#ifndef MQD_CHECKS_H
#define MQD_CHECKS_H

#include "server/reactor.h"

/* returns 0, or the error if the batch cannot belong to a transaction */
int16_t mqd_check_transaction(struct mqd_reactor *r, struct mqd_request *request, const struct mqd_batch *batch,
                              const char **message);
/* whether the append may continue now; false: its outcome was decided here, or its records are
 * being checked */
bool mqd_check_records(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_batch *batch);
/* returns a place for the record errors of a refused batch; NULL: out of memory */
struct mqd_refusal *mqd_refusal_new(struct mqd_reactor *r, struct mqd_append *append);
/* called while the append is routed: later requests of its connection must not overtake it */
void mqd_check_begin_order(struct mqd_reactor *r, struct mqd_append *append);
/* ends the ordering: the append has a fixed place in the log, or will not be written */
void mqd_check_end_order(struct mqd_reactor *r, struct mqd_append *append);
/* called when all appends of a request are routed but some are still undecided */
void mqd_check_on_routed(struct mqd_reactor *r, struct mqd_request *request);
/* the owner requires that the append's transaction is verified */
void mqd_check_verify(struct mqd_reactor *r, struct mqd_append *append, int64_t guard);
/* the append is done; removes it from its check */
void mqd_check_remove_append(struct mqd_reactor *r, struct mqd_append *append);
/* the client has disconnected: parked appends are not written. May free the request */
void mqd_check_cancel(struct mqd_reactor *r, struct mqd_request *request);
/* true: the append was parked and is refused */
bool mqd_check_expire(struct mqd_reactor *r, struct mqd_append *append);
void mqd_check_on_response(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from);
void mqd_check_send_queued(struct mqd_reactor *r);
void mqd_check_on_acceptor_died(struct mqd_reactor *r);
void mqd_check_on_job(struct mqd_reactor *r, uint64_t token); /* of MQD_TOKEN_CHECK */
void mqd_checks_destroy(struct mqd_reactor *r);
extern bool mqd_check_always_by_acceptor; /* set by tests: behaves as if no codec's library were installed */

#endif
