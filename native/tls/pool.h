/* Threads of low priority that compute handshakes. A session that was submitted belongs to the pool
 * until it is collected.
 *
 * Bounds: a session is queued at most once, so the owner's limit on connections bounds the queue.
 * Concurrency: one thread submits and collects.
 */
#ifndef MQD_TLS_POOL_H
#define MQD_TLS_POOL_H

#include "tls/session.h"

struct mqd_tls_pool;
/* event_fd becomes readable when a session may be collected. NULL with the reason. */
struct mqd_tls_pool *mqd_tls_pool_create(int event_fd, uint32_t thread_count);
/* Ends the threads; sessions that were not collected are freed. */
void mqd_tls_pool_destroy(struct mqd_tls_pool *pool);
void mqd_tls_pool_submit(struct mqd_tls_pool *pool, struct mqd_tls *tls);
/* the next session whose step is done; mqd_tls_link(tls) has its result and reason; NULL: none */
struct mqd_tls *mqd_tls_pool_collect(struct mqd_tls_pool *pool);

#endif
