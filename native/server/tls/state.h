/* The reactor's state for all its TLS connections; private to this folder. */
#ifndef MQD_SECURE_STATE_H
#define MQD_SECURE_STATE_H

#include "server/reactor.h"
#include "server/tls/secure.h"
#include "tls/context.h"
#include "tls/pool.h"
#include "tls/session.h"

struct mqd_secure {
    struct mqd_tls_context *contexts[MQD_LISTENER_ID_HOSTS + 1]; /* by listener id; NULL = none yet */
    struct mqd_tls_pool *pool;
    int event_fd;
    uint8_t *plain;   /* MQD_TLS_WRITE_BYTES_MAX: gathered output, used within a call */
    uint8_t *scratch; /* MQD_TLS_SCRATCH_BYTES: the same bytes, encrypted */
};

#endif
