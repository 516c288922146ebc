/* Shared by server/check/check.c and server/check/check_table.c only. */
#ifndef MQD_CHECK_H
#define MQD_CHECK_H

#include "server/reactor.h"

#define MQD_CHECK_MS_MAX 15000 /* applies even with a longer client time-out: its connection is not read meanwhile */

/* NULL: a bound is reached. When control_bytes is not 0 the loan is at `offset` in the control
 * arena; otherwise the caller sets an offset of its own in the receive arena. */
struct mqd_check *mqd_check_take(struct mqd_reactor *r, uint64_t control_bytes, uint64_t frame_bytes);
struct mqd_check *mqd_check_of(struct mqd_reactor *r, uint64_t token); /* NULL: it has ended */
/* sends it now or when there is room, but not after the request's deadline */
void mqd_check_ask(struct mqd_reactor *r, struct mqd_check *check, struct mqd_request *request);
/* for the batch that the acceptor has compressed; until its append takes it, or the check ends */
bool mqd_check_take_room(struct mqd_reactor *r, struct mqd_check *check, uint32_t size_bytes);
void mqd_check_end(struct mqd_reactor *r, struct mqd_check *check);

#endif
