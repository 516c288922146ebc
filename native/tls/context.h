/* A context and its sessions (tls/context.c). Any thread. */
#ifndef MQD_TLS_CONTEXT_H
#define MQD_TLS_CONTEXT_H

#include "tls/api.h"
#include "tls/library.h"

/* adds a reference, which mqd_tls_context_free releases */
SSL_CTX *mqd_tls_context_hold(struct mqd_tls_context *context);

#endif
