/* TLS on accepted connections: from clients of TLS listeners, and from other hosts.
 * Connections that this host opens to other hosts: server/tls/outgoing.h.
 *
 *   opened -> bytes arrive -> lent to the pool -> taken back -> ... -> established -> closed
 *
 * A client that has authenticated by a certificate waits until the worker's Python has mapped the
 * certificate's name to a principal (`awaits_principal`), unless the listener has SASL, which
 * provides the principal.
 *
 * Invariants
 *   T1  the reactor's thread computes no public-key operation: handshakes run on the pool.
 *   T2  the reactor does not use a session while it is lent: the connection is not read
 *       (`block_count`) and has nothing to send, because a session is lent only when all its output
 *       has been sent. If the connection closes meanwhile, the session is freed when the pool
 *       returns it.
 *   T3  no byte of a frame is read before the handshake has ended and the principal is known.
 *   T4  plain text is encrypted only when everything encrypted before it has been sent. Encrypted
 *       bytes that the socket did not take (`unsent_encrypted_bytes`) count as output of the
 *       connection and are included in heap_bytes.
 * Bounds: 10 s for the handshake (checked once a second), max.connections, see
 * tls/session.h. Concurrency: the reactor's thread.
 */
#ifndef MQD_SECURE_H
#define MQD_SECURE_H

#include "native.h"
#include "server/request.h"

struct mqd_command;
struct mqd_reactor;
struct mqd_secure;
struct mqd_tls_context;

/* ---- handshake.c ---- */

extern _Atomic uint32_t mqd_secure_handshake_ms; /* tests make it short while a reactor runs */

/* MQD_COMMAND_LISTENER_TLS */
void mqd_secure_on_listener_command(struct mqd_reactor *r, struct mqd_command *command);
/* Adds the event descriptor of the TLS pool to r->poll, if there is a pool. False: failed, with the
 * reason in mqd_error. */
bool mqd_secure_watch(struct mqd_reactor *r);
/* MQD_COMMAND_TLS_PRINCIPAL */
void mqd_secure_on_principal_command(struct mqd_reactor *r, const struct mqd_command *command);
void mqd_secure_destroy(struct mqd_reactor *r);
/* Begins TLS on a new connection from a client of a TLS listener, or from another host
 * (c->peer_node). False: c is closed. */
bool mqd_secure_begin(struct mqd_reactor *r, struct mqd_connection *c);
bool mqd_secure_established(const struct mqd_connection *c);
/* Called when c is readable and its handshake has not ended. May close c. */
void mqd_secure_handshake(struct mqd_reactor *r, struct mqd_connection *c);
void mqd_secure_on_event(struct mqd_reactor *r); /* the pool has completed steps of handshakes */
/* NULL, or the reason why c must be closed */
const char *mqd_secure_overdue_reason(const struct mqd_reactor *r, const struct mqd_connection *c);
void mqd_secure_close(struct mqd_reactor *r, struct mqd_connection *c);

/* ---- transfer.c ---- */

/* Returns 1 and sets *received_bytes; 0 if there are no bytes now; or -1 if c has been closed.
 * Unlike recv, this function writes to `at` in user space, so a write there must not raise SIGBUS
 * (mqd_large_touch). */
int mqd_secure_receive(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *at, uint32_t capacity,
                       uint32_t *received_bytes);
/* Sends the encrypted bytes that are unsent; if there are none, encrypts and sends the next part of
 * the output. Returns 1 if all these bytes were sent, 0 if the socket is full, or -1 if the
 * connection is broken. */
int mqd_secure_send(struct mqd_reactor *r, struct mqd_connection *c);
/* updates the heap accounting of bytes that are encrypted but not yet sent */
void mqd_secure_account_unsent(struct mqd_reactor *r, struct mqd_connection *c);

#endif
