/* See server/tls/outgoing.h. */
#include "server/tls/outgoing.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "server/tls/state.h"

int mqd_outgoing_begin_tls(struct mqd_reactor *r, struct mqd_outgoing *outgoing, int32_t node, uint64_t token)
{
    struct mqd_tls_context *context = r->secure ? r->secure->contexts[MQD_LISTENER_ID_HOSTS] : NULL;
    if (!context)
        return mqd_error_set(MQD_E_INVALID, "this host has no certificate yet for connections to other hosts");
    if (!(outgoing->tls = mqd_tls_create_between_hosts(context, outgoing->fd, true, node)))
        return -1;
    outgoing->established_by_ms = r->now_ms + mqd_secure_handshake_ms;
    mqd_tls_link(outgoing->tls)->token = token;
    mqd_tls_pool_submit(r->secure->pool, outgoing->tls); /* in TLS the client sends first */
    return 0;
}

void mqd_outgoing_set_token(struct mqd_outgoing *outgoing, uint64_t token)
{
    outgoing->readable = outgoing->writable = 1;
    if (outgoing->tls)
        /* allowed even while the session is lent, because the pool does not use the token */
        mqd_tls_link(outgoing->tls)->token = token;
}

void mqd_outgoing_on_event(struct mqd_outgoing *outgoing, uint32_t flags)
{
    if (flags & (MQD_POLL_READABLE | MQD_POLL_HANGUP))
        outgoing->readable = 1;
    if (flags & MQD_POLL_HANGUP)
        outgoing->hangup = 1;
    if (flags & MQD_POLL_WRITABLE)
        outgoing->writable = 1;
}

/* ---- the handshake ---- */

bool mqd_outgoing_established(const struct mqd_outgoing *outgoing)
{
    return !mqd_tls_link(outgoing->tls)->lent && mqd_tls_established(outgoing->tls);
}

int mqd_outgoing_on_step(struct mqd_reactor *r, struct mqd_outgoing *outgoing)
{
    const struct mqd_tls_link *link = mqd_tls_link(outgoing->tls);
    int flushed = mqd_tls_flush(outgoing->tls);
    if (link->result < 0)
        return mqd_error_set(EPROTO, "the TLS handshake failed: %s", link->reason);
    if (flushed < 0)
        return mqd_error_system(errno, "the TLS handshake failed");
    outgoing->writable = flushed;
    outgoing->readable = 1; /* more may have arrived, or be buffered in the session */
    if (link->result == 1 && mqd_load_relaxed(&r->header->log_level) >= 7) {
        char text[96];
        mqd_tls_describe(outgoing->tls, text, sizeof text);
        mqd_log(r, 7, 0, UINT32_MAX, "TLS with another host established: %s", text);
    }
    return 0;
}

static int handshake(struct mqd_reactor *r, struct mqd_outgoing *outgoing)
{
    if (r->now_ms > outgoing->established_by_ms)
        return mqd_error_set(ETIMEDOUT, "the TLS handshake did not end in time");
    if (!outgoing->readable || mqd_tls_unsent_bytes(outgoing->tls))
        return 0;
    ssize_t n = mqd_tls_receive(outgoing->tls);
    if (n < 0 && errno == 0)
        return mqd_error_set(ECONNRESET, "the other host closed the connection during the TLS handshake");
    if (n < 0)
        return mqd_error_system(errno, "the TLS handshake failed");
    if (mqd_tls_is_plain(outgoing->tls))
        return mqd_error_set(EPROTO, "plain text from the other host, although it had agreed to use TLS");
    if (n == 0) {
        outgoing->readable = 0;
        return 0;
    }
    MQD_ASSERT(!mqd_tls_unsent_bytes(outgoing->tls), "T2: a session is lent with %u bytes unsent",
               mqd_tls_unsent_bytes(outgoing->tls));
    mqd_tls_pool_submit(r->secure->pool, outgoing->tls);
    return 0;
}

int mqd_outgoing_run(struct mqd_reactor *r, struct mqd_outgoing *outgoing)
{
    if (mqd_tls_link(outgoing->tls)->lent)
        return r->now_ms > outgoing->established_by_ms
                   ? mqd_error_set(ETIMEDOUT, "the TLS handshake did not end in time")
                   : 0;
    if (mqd_tls_unsent_bytes(outgoing->tls) && outgoing->writable) {
        int flushed = mqd_tls_flush(outgoing->tls);
        if (flushed < 0)
            return mqd_error_system(errno, "sending over TLS");
        outgoing->writable = flushed;
    }
    return mqd_tls_established(outgoing->tls) ? 0 : handshake(r, outgoing);
}

/* ---- established connections ---- */

/* Sets mqd_error and errno to `error`. Returns -1. */
static ssize_t fail_with(int error, const char *action)
{
    mqd_error_system(error, "%s", action);
    errno = error; /* mqd_error_system may have changed it */
    return -1;
}

static ssize_t receive_encrypted(struct mqd_outgoing *outgoing, uint8_t *at, uint32_t capacity)
{
    bool drained;
    ssize_t n = mqd_tls_read(outgoing->tls, at, capacity, &drained);
    if (n < 0) {
        if (errno == 0)
            return 0;
        if (errno != EPROTO)
            return fail_with(errno, "receiving over TLS");
        mqd_error_wrap("TLS");
        errno = EPROTO;
        return -1;
    }
    if (!drained)
        outgoing->readable = 1;
    else if (n == 0 || !outgoing->hangup)
        outgoing->readable = 0; /* the next byte triggers an edge */
    if (n)
        return n;
    errno = EAGAIN;
    return -1;
}

ssize_t mqd_outgoing_receive(struct mqd_outgoing *outgoing, uint8_t *at, uint32_t capacity)
{
    if (outgoing->tls)
        return receive_encrypted(outgoing, at, capacity);
    ssize_t n;
    do
        n = recv(outgoing->fd, at, capacity, 0);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno != EAGAIN)
        return fail_with(errno, "receiving");
    if (n < 0 || (n < (ssize_t)capacity && !outgoing->hangup))
        outgoing->readable = 0; /* drained: the next byte triggers an edge */
    return n;
}

static ssize_t send_encrypted(struct mqd_reactor *r, struct mqd_outgoing *outgoing, const uint8_t *bytes,
                              uint32_t size_bytes)
{
    uint32_t count = size_bytes < MQD_TLS_WRITE_BYTES_MAX ? size_bytes : MQD_TLS_WRITE_BYTES_MAX;
    int flushed = mqd_tls_flush(outgoing->tls);
    if (flushed < 0 || (flushed && mqd_tls_write(outgoing->tls, bytes, count, r->secure->scratch) < 0))
        return fail_with(errno, "sending over TLS");
    outgoing->writable = flushed && !mqd_tls_unsent_bytes(outgoing->tls);
    if (flushed)
        return count;
    errno = EAGAIN;
    return -1;
}

ssize_t mqd_outgoing_send(struct mqd_reactor *r, struct mqd_outgoing *outgoing, const uint8_t *bytes,
                          uint32_t size_bytes)
{
    if (outgoing->tls)
        return send_encrypted(r, outgoing, bytes, size_bytes);
    ssize_t n;
    do
        n = send(outgoing->fd, bytes, size_bytes, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno != EAGAIN)
        return fail_with(errno, "sending");
    if (n < 0)
        outgoing->writable = 0;
    return n;
}

void mqd_outgoing_close(struct mqd_outgoing *outgoing)
{
    struct mqd_tls *tls = outgoing->tls;
    if (tls && mqd_tls_link(tls)->lent) {
        __atomic_store_n(&mqd_tls_link(tls)->abandoned, true, __ATOMIC_RELAXED); /* T2 */
    } else if (tls) {
        mqd_tls_close(tls);
        mqd_tls_free(tls);
    }
    close(outgoing->fd);
    *outgoing = (struct mqd_outgoing){.fd = -1};
}
