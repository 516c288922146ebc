/* See server/tls/secure.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "server/authentication.h"
#include "server/tls/state.h"

#define THREAD_COUNT 2

_Atomic uint32_t mqd_secure_handshake_ms = 10000;

/* ---- the listeners ---- */

static void secure_free(struct mqd_secure *secure)
{
    mqd_tls_pool_destroy(secure->pool);
    for (uint32_t i = 0; i <= MQD_LISTENER_ID_HOSTS; i++)
        mqd_tls_context_free(secure->contexts[i]);
    if (secure->event_fd >= 0)
        close(secure->event_fd);
    free(secure->plain);
    free(secure->scratch);
    free(secure);
}

static struct mqd_secure *secure_new(void)
{
    struct mqd_secure *secure = calloc(1, sizeof *secure);
    if (!secure) {
        mqd_error_system(ENOMEM, "out of memory for TLS");
        return NULL;
    }
    secure->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    secure->plain = malloc(MQD_TLS_WRITE_BYTES_MAX);
    secure->scratch = malloc(MQD_TLS_SCRATCH_BYTES);
    if (secure->event_fd < 0 || !secure->plain || !secure->scratch)
        mqd_error_system(errno, "out of memory for TLS");
    else if ((secure->pool = mqd_tls_pool_create(secure->event_fd, THREAD_COUNT)))
        return secure;
    secure_free(secure);
    return NULL;
}

bool mqd_secure_watch(struct mqd_reactor *r)
{
    return !r->secure || mqd_poll_add(r->poll, r->secure->event_fd, mqd_token(MQD_TOKEN_SECURE, 0)) == 0;
}

void mqd_secure_on_listener_command(struct mqd_reactor *r, struct mqd_command *command)
{
    bool is_first = !r->secure;
    if (is_first)
        r->secure = secure_new();
    if (!r->secure || (is_first && r->poll && !mqd_secure_watch(r))) {
        mqd_command_done(r, command->token, mqd_error_code(), UINT32_MAX, 0, NULL, mqd_error_message());
        if (r->secure)
            secure_free(r->secure);
        r->secure = NULL;
        return;
    }
    struct mqd_tls_context *previous = r->secure->contexts[command->number];
    r->secure->contexts[command->number] = command->tls_context;
    command->tls_context = NULL;
    mqd_tls_context_free(previous); /* existing connections keep a reference */
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

void mqd_secure_destroy(struct mqd_reactor *r)
{
    if (r->secure)
        secure_free(r->secure);
    r->secure = NULL;
}

/* ---- connections ---- */

bool mqd_secure_begin(struct mqd_reactor *r, struct mqd_connection *c)
{
    bool is_host = c->peer_node >= 0;
    struct mqd_tls_context *context =
        r->secure ? r->secure->contexts[is_host ? MQD_LISTENER_ID_HOSTS : c->listener_id] : NULL;
    if (context)
        c->tls = is_host ? mqd_tls_create_between_hosts(context, c->fd, false, c->peer_node)
                         : mqd_tls_create(context, c->fd);
    if (!c->tls) {
        mqd_log(r, 3, c->id, UINT32_MAX, "connection refused: %s",
                context   ? mqd_error_message()
                : is_host ? "this host has no certificate yet for connections from other hosts"
                          : "its TLS listener has no certificate");
        mqd_connection_close(r, c, "TLS could not be started");
        return false;
    }
    c->handshake_deadline_ms = r->now_ms + mqd_secure_handshake_ms;
    mqd_tls_link(c->tls)->token = (uint64_t)c->generation << 24 | c->index;
    return true;
}

bool mqd_secure_established(const struct mqd_connection *c)
{
    return !mqd_tls_link(c->tls)->lent && mqd_tls_established(c->tls);
}

void mqd_secure_handshake(struct mqd_reactor *r, struct mqd_connection *c)
{
    /* some handshake bytes have not been sent yet; once they are sent, c becomes readable again */
    if (c->unsent_encrypted_bytes) {
        c->readable = 0;
        return;
    }
    ssize_t n = mqd_tls_receive(c->tls);
    if (n < 0) {
        mqd_connection_close(r, c, errno ? strerror(errno) : "closed by the client during the TLS handshake");
        return;
    }
    if (n == 0) {
        c->readable = 0;
        return;
    }
    c->last_active_ms = r->now_ms;
    if (mqd_tls_is_plain(c->tls)) {
        mqd_connection_fail(r, c,
                            c->peer_node >= 0
                                ? "plain text from another host, although it had agreed to use TLS"
                                : "plain text on a TLS listener: the client needs security.protocol=SSL, or SASL_SSL");
        return;
    }
    MQD_ASSERT(!c->unsent_encrypted_bytes && !mqd_tls_link(c->tls)->lent,
               "T2: connection %llu is lent with %u bytes unsent", (unsigned long long)c->id,
               c->unsent_encrypted_bytes);
    c->block_count++; /* c is not read until the pool returns the session */
    mqd_tls_pool_submit(r->secure->pool, c->tls);
}

/* Requests the principal for the name in the client's certificate. False: c is closed. */
static bool request_principal(struct mqd_reactor *r, struct mqd_connection *c)
{
    struct mqd_event event = {.kind = MQD_EVENT_TLS_NAME, .slot = c->listener_id, .token = mqd_tls_link(c->tls)->token};
    if (c->peer_node >= 0 || r->options.listener_flags[c->listener_id] & MQD_LISTENER_FLAG_SASL)
        return true;
    uint32_t length = mqd_tls_peer_name(c->tls, event.text, sizeof event.text - 1);
    if (!length)
        return true;
    if (length >= sizeof event.text || memchr(event.text, 0, length)) {
        mqd_connection_fail(r, c, "the subject of the client's certificate is too long for a principal");
        return false;
    }
    if (!mqd_reactor_emit(r, &event)) {
        mqd_connection_fail(r, c, "too many clients are waiting for their principals");
        return false;
    }
    c->awaits_principal = 1;
    c->block_count++;
    return true;
}

void mqd_secure_on_principal_command(struct mqd_reactor *r, const struct mqd_command *command)
{
    struct mqd_connection *c = mqd_connection_by_token(r, (uint64_t)command->offset);
    size_t size_bytes = strlen(command->text);
    if (c && c->tls && c->awaits_principal) {
        c->awaits_principal = 0;
        c->block_count--;
        if (!size_bytes || size_bytes > MQD_PRINCIPAL_BYTES_MAX) {
            mqd_connection_fail(r, c, "the client's certificate maps to no principal (ssl.principal.mapping.rules)");
        } else if (!mqd_authentication_set_principal(c, MQD_PRINCIPAL_TLS, command->text, (uint16_t)size_bytes)) {
            mqd_connection_fail(r, c, "out of memory for the client's principal");
        } else {
            mqd_connection_resume(r, c);
        }
    }
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

/* Called when the pool has carried out one step. */
static void on_step(struct mqd_reactor *r, struct mqd_tls *tls)
{
    struct mqd_connection *c = mqd_connection_by_token(r, mqd_tls_link(tls)->token);
    if (!c || c->tls != tls) {
        mqd_tls_free(tls);
        return;
    }
    const struct mqd_tls_link *link = mqd_tls_link(c->tls);
    int flushed = mqd_tls_flush(c->tls);
    c->block_count--;
    if (link->result < 0) {
        char reason[224];
        snprintf(reason, sizeof reason, "the TLS handshake failed: %s", link->reason);
        mqd_connection_fail(r, c, reason);
        return;
    }
    if (flushed < 0) {
        mqd_connection_close(r, c, strerror(errno));
        return;
    }
    c->writable = flushed;
    mqd_secure_account_unsent(r, c);
    if (link->result == 1 && !request_principal(r, c))
        return;
    if (link->result == 1 && mqd_load_relaxed(&r->header->log_level) >= 7) {
        char text[96];
        mqd_tls_describe(c->tls, text, sizeof text);
        mqd_log(r, 7, c->id, UINT32_MAX, "TLS established: %s", text);
    }
    c->readable = 1; /* more may have arrived, or be buffered in the session */
    mqd_connection_resume(r, c);
}

void mqd_secure_on_event(struct mqd_reactor *r)
{
    struct mqd_tls *tls;
    while ((tls = mqd_tls_pool_collect(r->secure->pool))) {
        uint64_t token = mqd_tls_link(tls)->token;
        if (mqd_tls_link(tls)->abandoned)
            mqd_tls_free(tls);
        else if (mqd_token_kind_of(token) == MQD_TOKEN_FETCHER)
            mqd_fetcher_on_step(r, mqd_token_value(token));
        else if (mqd_token_kind_of(token) == MQD_TOKEN_RELAY)
            mqd_relay_on_step(r, mqd_token_value(token));
        else
            on_step(r, tls);
    }
}

const char *mqd_secure_overdue_reason(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    if (!c->tls || r->now_ms < c->handshake_deadline_ms)
        return NULL;
    return !mqd_secure_established(c) ? "the TLS handshake did not end in time"
           : c->awaits_principal      ? "the client's certificate was not mapped to a principal in time"
                                      : NULL;
}

void mqd_secure_close(struct mqd_reactor *r, struct mqd_connection *c)
{
    struct mqd_tls *tls = c->tls;
    c->tls = NULL;
    mqd_heap_release(r, c->unsent_encrypted_bytes);
    c->unsent_encrypted_bytes = 0;
    if (mqd_tls_link(tls)->lent) {
        __atomic_store_n(&mqd_tls_link(tls)->abandoned, true, __ATOMIC_RELAXED); /* T2 */
        return;
    }
    mqd_tls_close(tls);
    mqd_tls_free(tls);
}
