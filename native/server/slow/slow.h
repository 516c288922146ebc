/* Time stamps of requests for the slow-request log. All are r->now_ns, the time at which a turn of
 * the loop began. */
#ifndef MQD_SLOW_H
#define MQD_SLOW_H

#include "server/reactor.h"

static inline bool mqd_slow_enabled(const struct mqd_reactor *r)
{
    return __builtin_expect(r->options.slow_ms > 0, 0);
}

/* Work on the request begins: a batch is staged, a fetch is evaluated, or a frame is sent to the
 * acceptor. If it is called more than once, the last call determines the time. */
static inline void mqd_slow_begin(const struct mqd_reactor *r, struct mqd_request *request)
{
    if (mqd_slow_enabled(r))
        request->times.begun_ns = r->now_ns;
}

/* The same for a fetch; the report names the first partition of the response that is on this
 * host. */
void mqd_slow_begin_fetch(const struct mqd_reactor *r, struct mqd_request *request);

/* A batch is passed to the worker that owns its partition. */
static inline void mqd_slow_forward(const struct mqd_reactor *r, struct mqd_request *request)
{
    if (mqd_slow_enabled(r)) {
        request->times.begun_ns = r->now_ns;
        request->times.forwarded = 1;
    }
}

static inline void mqd_slow_complete(const struct mqd_reactor *r, struct mqd_request *request)
{
    if (mqd_slow_enabled(r))
        request->times.completed_ns = r->now_ns;
}

/* Stamps the requests whose records are below the partition's durable offset: they no longer wait
 * for this host's disk. */
void mqd_slow_on_flush(struct mqd_reactor *r, const struct mqd_owned *owned);

/* Copies the client id of the frame, which may be freed before the request is answered. */
void mqd_slow_copy_client(struct mqd_connection *c, const struct mqd_request_header *header);

/* Called at the response: emits MQD_EVENT_SLOW if the request was slow, at most REPORTS_PER_SECOND_MAX
 * events a second. The next event has the number of slow requests that were omitted. */
void mqd_slow_report(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_request *request);

#endif
