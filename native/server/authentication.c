/* Connections that must authenticate: see server/authentication.h. */
#include "server/authentication.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "base/big_endian.h"
#include "server/reactor.h"
#include "server/rights/subject.h"

#define SASL_HANDSHAKE 17
#define SASL_AUTHENTICATE 36
/* Maximum number of requests before a connection is authenticated. An authentication takes five:
 * ApiVersions twice, SaslHandshake, SaslAuthenticate twice. */
#define UNAUTHENTICATED_REQUEST_COUNT_MAX 10

static bool is_sasl_exchange(int16_t api_key)
{
    return api_key == SASL_HANDSHAKE || api_key == SASL_AUTHENTICATE;
}

void mqd_authentication_begin(struct mqd_reactor *r, struct mqd_connection *c)
{
    c->authentication = MQD_AUTHENTICATION_PENDING;
    c->authenticate_by_ms = r->now_ms + r->options.authentication_ms_max;
    c->frame_bytes_max = r->options.authentication_bytes_max;
}

/* ---- frames ---- */

/* Always returns false. */
static bool refuse(struct mqd_reactor *r, struct mqd_connection *c, const char *reason)
{
    mqd_connection_fail(r, c, reason);
    return false;
}

static bool admit_unauthenticated(struct mqd_reactor *r, struct mqd_connection *c, int16_t api_key)
{
    char reason[160];
    if (++c->unauthenticated_request_count > UNAUTHENTICATED_REQUEST_COUNT_MAX)
        return refuse(r, c, "it has sent more requests than an authentication needs");
    if (is_sasl_exchange(api_key) || api_key == MQD_API_API_VERSIONS)
        return true;
    snprintf(reason, sizeof reason,
             "a request with API key %d came before authentication; the client must use SASL on this listener "
             "(security.protocol)",
             api_key);
    return refuse(r, c, reason);
}

bool mqd_authentication_admit(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame,
                              uint32_t size_bytes)
{
    static const struct mqd_request_header raw_token_header = {.api_key = SASL_AUTHENTICATE};
    int16_t api_key = c->raw_tokens ? SASL_AUTHENTICATE : (int16_t)mqd_get_be16(frame);
    if (c->authentication == MQD_AUTHENTICATION_PENDING) {
        if (!admit_unauthenticated(r, c, api_key))
            return false;
    } else if (c->session_end_ms <= r->now_ms && !is_sasl_exchange(api_key)) {
        return refuse(r, c, "its session has ended, and the client did not authenticate again (KIP-368)");
    } else if (api_key == SASL_HANDSHAKE && mqd_get_be16(frame + 2) == 0) {
        return refuse(r, c, "a client that uses SaslHandshake 0 cannot reauthenticate; it needs a later version");
    }
    if (!c->raw_tokens)
        return true;
    mqd_control_on_request(r, c, &raw_token_header, frame, size_bytes);
    return false;
}

/* ---- responses ---- */

void mqd_authentication_on_request(struct mqd_request *request)
{
    struct mqd_connection *c = request->connection;
    if (c->authentication == MQD_AUTHENTICATION_NOT_REQUIRED || !is_sasl_exchange(request->api_key))
        return;
    request->blocks = 1; /* U2 */
    c->block_count++;
}

bool mqd_authentication_set_principal(struct mqd_connection *c, enum mqd_principal_kind kind, const void *principal,
                                      uint16_t size_bytes)
{
    if (!(c->principal = malloc(size_bytes)))
        return false;
    memcpy(c->principal, principal, size_bytes);
    c->principal_bytes = size_bytes;
    c->principal_kind = (uint8_t)kind;
    c->quota_version = 0; /* other quotas apply to this principal */
    return true;
}

/* Removes the principal from the response and assigns it to the connection. Returns NULL, or the
 * reason why the connection must be closed. */
static const char *take_principal(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_connection *c = request->connection;
    struct mqd_buffer *reply = &request->reply;
    struct mqd_authenticated granted;
    const uint8_t *principal;
    if (!request->blocks || request->api_key != SASL_AUTHENTICATE)
        return "the acceptor returned a principal for a request that does not authenticate";
    if (reply->size_bytes < sizeof granted)
        return "the acceptor's response ends before its principal";
    memcpy(&granted, reply->bytes, sizeof granted);
    principal = reply->bytes + sizeof granted;
    uint32_t block_bytes = (uint32_t)sizeof granted + granted.size_bytes;
    if (!granted.size_bytes || granted.size_bytes > MQD_PRINCIPAL_BYTES_MAX || block_bytes > reply->size_bytes)
        return "the acceptor returned a principal of an impossible length";
    if (granted.kind != MQD_PRINCIPAL_SASL && granted.kind != MQD_PRINCIPAL_TOKEN)
        return "the acceptor returned a principal that was not authenticated by SASL";
    if (memchr(principal, 0, granted.size_bytes))
        return "the acceptor returned a principal that contains a NUL";
    if (c->principal &&
        (c->principal_bytes != granted.size_bytes || memcmp(c->principal, principal, granted.size_bytes) != 0))
        return "it has authenticated again, as another principal"; /* U1 */
    if (!c->principal && !mqd_authentication_set_principal(c, MQD_PRINCIPAL_SASL, principal, granted.size_bytes))
        return "out of memory for its principal";
    c->principal_kind = granted.kind;
    reply->size_bytes -= block_bytes;
    memmove(reply->bytes, reply->bytes + block_bytes, reply->size_bytes);
    bool session_ends = granted.session_ms && granted.session_ms < (uint64_t)(INT64_MAX - r->now_ms);
    c->session_end_ms = session_ends ? r->now_ms + (int64_t)granted.session_ms : INT64_MAX;
    c->authentication = MQD_AUTHENTICATION_DONE;
    c->authenticate_by_ms = INT64_MAX;
    c->raw_tokens = 0;
    c->frame_bytes_min = MQD_FRAME_BYTES_MIN;
    c->frame_bytes_max = r->options.request_bytes_max;
    return NULL;
}

static bool begins_raw_tokens(const struct mqd_request *request)
{
    return request->blocks && request->api_key == SASL_HANDSHAKE && request->version == 0 &&
           request->reply.size_bytes >= 6 && mqd_get_be16(request->reply.bytes + 4) == 0;
}

bool mqd_authentication_on_response(struct mqd_reactor *r, struct mqd_request *request, uint16_t flags)
{
    struct mqd_connection *c = request->connection;
    const char *failure = flags & MQD_RESPONSE_AUTHENTICATED ? take_principal(r, request) : NULL;
    if (failure) {
        request->sent = 0; /* the request is answered, so mqd_request_orphan frees it */
        return refuse(r, c, failure);
    }
    if (flags & MQD_RESPONSE_DISCONNECT) {
        request->disconnect = 1;
        return true; /* still blocked: no later frame is read */
    }
    if (begins_raw_tokens(request)) {
        c->raw_tokens = 1;
        c->frame_bytes_min = 0; /* a raw token, which has no header, may be empty */
    }
    c->block_count -= request->blocks;
    request->blocks = 0;
    if (flags & MQD_RESPONSE_AUTHENTICATED)
        mqd_subject_attach(r, c); /* may close c */
    return c->fd >= 0;
}

/* ---- closing, and the principal of control requests ---- */

const char *mqd_authentication_overdue_reason(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    return r->now_ms >= c->authenticate_by_ms ? "it has not authenticated in time" : NULL;
}

void mqd_authentication_close(struct mqd_connection *c)
{
    free(c->principal);
    c->principal = NULL;
    c->principal_bytes = 0;
}

/* Writes the client's IPv6 address, for which the descriptor has no room, to `host`; "" if the
 * address is IPv4 or there is none. Returns its length. */
static uint32_t write_ipv6(const struct mqd_connection *c, char host[INET6_ADDRSTRLEN])
{
    static const uint8_t no_address[16];
    host[0] = 0;
    if (!c->peer_ipv4 && memcmp(c->peer_ip, no_address, sizeof no_address) != 0)
        inet_ntop(AF_INET6, c->peer_ip, host, INET6_ADDRSTRLEN);
    return (uint32_t)strlen(host);
}

uint32_t mqd_principal_block_bytes(const struct mqd_connection *c)
{
    char host[INET6_ADDRSTRLEN];
    uint32_t bytes = c->principal_bytes + write_ipv6(c, host);
    return bytes ? (uint32_t)sizeof(struct mqd_request_principal) + bytes : 0;
}

void mqd_principal_block_put(const struct mqd_connection *c, uint8_t *at)
{
    char host[INET6_ADDRSTRLEN];
    struct mqd_request_principal block = {
        .size_bytes = c->principal_bytes, .kind = c->principal_kind, .host_bytes = (uint8_t)write_ipv6(c, host)};
    memcpy(at, &block, sizeof block);
    if (c->principal)
        memcpy(at + sizeof block, c->principal, c->principal_bytes);
    memcpy(at + sizeof block + c->principal_bytes, host, block.host_bytes);
}
