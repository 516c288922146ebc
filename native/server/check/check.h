/* What server/check/check.c and server/check/check_table.c share; nobody else includes it. */
#ifndef MQD_CHECK_H
#define MQD_CHECK_H

#include "server/reactor.h"

#define MQD_CHECK_MS_MAX 15000 /* however patient the client is: its connection is not read meanwhile */

/* NULL: a bound is reached. The loan is at `offset`, in the control arena, when control_bytes is
 * not 0; else the caller names its own, held in the receive arena. */
struct mqd_check *mqd_check_take(struct mqd_reactor *r, uint64_t control_bytes, uint64_t frame_bytes);
struct mqd_check *mqd_check_of(struct mqd_reactor *r, uint64_t token); /* NULL: it has ended */
/* at once, or when there is room; not for longer than the request's time */
void mqd_check_ask(struct mqd_reactor *r, struct mqd_check *check, struct mqd_request *request);
void mqd_check_end(struct mqd_reactor *r, struct mqd_check *check);

#endif
