/* A connection that this host has opened to another host's worker: plain text, or TLS with this
 * host as the client. Its owner (a fetcher, a relay) reads and writes it like a socket.
 *
 *   plain   ready immediately
 *   TLS     lent to the pool -> taken back -> ... -> established: ready; mqd_outgoing_run makes the
 *           next step
 *
 * Invariants: T1 and T2 of server/tls/secure.h; nothing is received or sent for the owner before
 * the other host has proved by its certificate that it is the expected node. An error that ends the
 * connection is in mqd_error_code and mqd_error_message.
 * Bounds: mqd_secure_handshake_ms for the handshake; MQD_TLS_UNSENT_BYTES_MAX encrypted bytes.
 * Concurrency: the reactor's thread.
 */
#ifndef MQD_OUTGOING_H
#define MQD_OUTGOING_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct mqd_reactor;
struct mqd_tls;

struct mqd_outgoing {
    int fd; /* -1 = none */
    uint8_t readable, writable;
    /* the peer has closed. This is signalled only once, so the owner must read until the end of the
     * stream */
    uint8_t hangup;
    struct mqd_tls *tls;       /* NULL: plain text */
    int64_t established_by_ms; /* deadline of the TLS handshake */
};

/* Begins TLS as the client of `node`; events of the connection have this token. Returns 0, or -1
 * with the reason. */
int mqd_outgoing_begin_tls(struct mqd_reactor *r, struct mqd_outgoing *outgoing, int32_t node, uint64_t token);
/* from now on the connection's events have this token */
void mqd_outgoing_set_token(struct mqd_outgoing *outgoing, uint64_t token);
void mqd_outgoing_on_event(struct mqd_outgoing *outgoing, uint32_t flags); /* from mqd_poll */
/* Called when the pool has carried out a step of the handshake. -1: the handshake has failed. */
int mqd_outgoing_on_step(struct mqd_reactor *r, struct mqd_outgoing *outgoing);
/* Called once a turn, only with TLS: continues the handshake, and sends encrypted bytes that the
 * socket did not take before. -1: broken, or the handshake takes too long. */
int mqd_outgoing_run(struct mqd_reactor *r, struct mqd_outgoing *outgoing);
bool mqd_outgoing_established(const struct mqd_outgoing *outgoing); /* only with TLS */
static inline bool mqd_outgoing_ready(const struct mqd_outgoing *outgoing)
{
    return !outgoing->tls || mqd_outgoing_established(outgoing);
}
/* Like recv and send, for a connection that is ready. -1 with EAGAIN: nothing can be received or
 * sent now. Both keep `readable` and `writable` up to date. */
ssize_t mqd_outgoing_receive(struct mqd_outgoing *outgoing, uint8_t *at, uint32_t capacity);
ssize_t mqd_outgoing_send(struct mqd_reactor *r, struct mqd_outgoing *outgoing, const uint8_t *bytes,
                          uint32_t size_bytes);
void mqd_outgoing_close(struct mqd_outgoing *outgoing); /* closes the socket, too */

#endif
