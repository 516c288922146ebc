/* Which principal a connection has, and what it may send before it has one. The acceptor performs
 * the SASL exchange (SaslHandshake and SaslAuthenticate are control requests); the worker accepts
 * nothing else until a response contains a principal.
 *
 *   not required  the listener does not authenticate, or the connection belongs to another host of
 *                 the cluster or to a local client: one predictable branch per frame
 *   pending       not done yet: only ApiVersions, SaslHandshake and SaslAuthenticate, in bounded
 *                 number, size and time; after SaslHandshake 0, raw tokens
 *   done          everything, until the session ends (KIP-368); then only a new exchange
 *
 * Invariants
 *   U1  `principal` never changes on an open connection; an exchange that yields another principal
 *       closes the connection.
 *   U2  while a request of an exchange is unanswered the connection is not read, so no frame is
 *       checked before the response to its predecessor has changed the state.
 *   U3  a control request carries the principal that its connection had when it arrived, even if it
 *       is sent again to the acceptor's successor.
 * Bounds: UNAUTHENTICATED_REQUEST_COUNT_MAX requests, authentication_bytes_max per frame,
 * authentication_ms_max (checked once a second). Concurrency: the reactor's thread.
 */
#ifndef MQD_AUTHENTICATION_H
#define MQD_AUTHENTICATION_H

#include "server/request.h"

struct mqd_reactor;

enum mqd_authentication { MQD_AUTHENTICATION_NOT_REQUIRED, MQD_AUTHENTICATION_PENDING, MQD_AUTHENTICATION_DONE };

/* a connection of a client on a listener with SASL has been opened */
void mqd_authentication_begin(struct mqd_reactor *r, struct mqd_connection *c);
/* Called in states other than NOT_REQUIRED. Returns whether the caller must handle the frame. If
 * not, the frame was handled here, or c is closed. */
bool mqd_authentication_admit(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame,
                              uint32_t size_bytes);
/* called when a control request has been created */
void mqd_authentication_on_request(struct mqd_request *request);
/* the acceptor has answered a control request, with `flags` of RESPONSE; false: c is closed */
bool mqd_authentication_on_response(struct mqd_reactor *r, struct mqd_request *request, uint16_t flags);
/* NULL, or the reason why c must be closed */
const char *mqd_authentication_overdue_reason(const struct mqd_reactor *r, const struct mqd_connection *c);
void mqd_authentication_close(struct mqd_connection *c);

/* gives c its principal, once; false: out of memory */
bool mqd_authentication_set_principal(struct mqd_connection *c, enum mqd_principal_kind kind, const void *principal,
                                      uint16_t size_bytes);

/* the block that precedes the frame of a control request: a struct mqd_request_principal, the
 * principal and the client's IPv6 address; 0 bytes if the client has neither */
uint32_t mqd_principal_block_bytes(const struct mqd_connection *c);
void mqd_principal_block_put(const struct mqd_connection *c, uint8_t *at);

#endif
