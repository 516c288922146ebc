/* Relays: sending, receiving and timeouts. See server/relay/relay.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/big_endian.h"
#include "server/check/checks.h"
#include "server/relay/state.h"

#define KEEP_BYTES (MQD_RELAY_UNSENT_BYTES + (256u << 10)) /* the capacity that an empty buffer keeps */
#define FRAME_BYTES_MIN 8

/* ---- sending ---- */

static void release_sent(struct mqd_reactor *r, struct mqd_relay *relay)
{
    while (relay->unsent && relay->unsent->end <= relay->out_sent)
        mqd_relay_on_entry_sent(r, relay->unsent);
    uint64_t sent = relay->out_sent - relay->out_base;
    if (sent == relay->out.size_bytes) {
        relay->out_base = relay->out_sent;
        relay->out.size_bytes = 0;
        if (relay->out.capacity_bytes > KEEP_BYTES)
            mqd_buffer_free(&relay->out);
    } else if (sent > relay->out.size_bytes / 2 && sent > MQD_RELAY_UNSENT_BYTES) {
        relay->out.size_bytes -= (uint32_t)sent;
        memmove(relay->out.bytes, relay->out.bytes + sent, relay->out.size_bytes);
        relay->out_base = relay->out_sent;
    }
}

static void send_some(struct mqd_reactor *r, struct mqd_relay *relay)
{
    while (relay->socket.writable && relay->out_sent < relay->out_base + relay->out.size_bytes) {
        uint64_t at = relay->out_sent - relay->out_base;
        ssize_t sent =
            mqd_outgoing_send(r, &relay->socket, relay->out.bytes + at, (uint32_t)(relay->out.size_bytes - at));
        if (sent < 0 && errno == EAGAIN)
            break;
        if (sent < 0) {
            mqd_relay_end_with_error(r, relay);
            return;
        }
        relay->out_sent += (uint64_t)sent;
    }
    release_sent(r, relay);
}

/* ---- receiving ---- */

/* Copies the leader's record errors into `append`, so that this host's own response can pass them
 * on to the client. */
static void copy_refusal(struct mqd_reactor *r, struct mqd_append *append, const struct mqd_relay_response *response)
{
    struct mqd_refusal *refusal =
        response->message.size_bytes > 0 || response->record_error_count ? mqd_refusal_new(r, append) : NULL;
    if (!refusal)
        return;
    refusal->index_count = response->record_error_count;
    memcpy(refusal->record_indexes, response->record_errors,
           response->record_error_count * sizeof *response->record_errors);
    snprintf(refusal->message, sizeof refusal->message, "%.*s",
             response->message.size_bytes > 0 ? response->message.size_bytes : 0,
             (const char *)response->message.bytes);
    snprintf(refusal->record_message, sizeof refusal->record_message, "%.*s",
             response->record_message.size_bytes > 0 ? response->record_message.size_bytes : 0,
             (const char *)response->record_message.bytes);
}

/* Handles one complete response. Returns false if the relay has ended. */
static bool on_response(struct mqd_reactor *r, struct mqd_relay *relay, const uint8_t *frame, uint32_t size_bytes)
{
    struct mqd_relay_response response;
    struct mqd_relay_entry *entry =
        mqd_list_empty(&relay->entries) ? NULL : MQD_CONTAINER(relay->entries.next, struct mqd_relay_entry, node);
    if (!entry || entry == relay->unsent || (int32_t)mqd_get_be32(frame) != entry->correlation_id) {
        mqd_relay_end(r, relay, EPROTO, "the leader sent a response that does not belong to the oldest request");
        return false;
    }
    if (mqd_relay_parse(frame, size_bytes, entry->version, &response) < 0) {
        mqd_relay_end(r, relay, EPROTO, mqd_error_message());
        return false;
    }
    if (response.partition_index != entry->partition_index) {
        mqd_relay_end(r, relay, EPROTO, "the leader's response is for a different partition");
        return false;
    }
    struct mqd_append *append = mqd_relay_entry_take(r, relay);
    if (!append)
        return true;
    append->base_offset = response.base_offset;
    append->log_append_time_ms = response.log_append_time_ms;
    append->log_start_offset = response.log_start_offset;
    if (response.error && !append->request->no_reply)
        copy_refusal(r, append, &response);
    mqd_relay_complete_append(r, append, response.error, NULL);
    return true;
}

static bool take_responses(struct mqd_reactor *r, struct mqd_relay *relay)
{
    uint32_t at = 0;
    while (relay->in_bytes - at >= 4) {
        uint32_t size_bytes = mqd_get_be32(relay->in + at);
        if (size_bytes < FRAME_BYTES_MIN || size_bytes > MQD_RELAY_RESPONSE_BYTES_MAX - 4) {
            mqd_relay_end(r, relay, EPROTO, "the leader sent a response of an impossible size");
            return false;
        }
        if (relay->in_bytes - at - 4 < size_bytes)
            break;
        if (!on_response(r, relay, relay->in + at + 4, size_bytes))
            return false;
        at += 4 + size_bytes;
    }
    relay->in_bytes -= at;
    if (at)
        memmove(relay->in, relay->in + at, relay->in_bytes);
    return true;
}

static void receive(struct mqd_reactor *r, struct mqd_relay *relay)
{
    while (relay->socket.fd >= 0 && relay->socket.readable && mqd_outgoing_ready(&relay->socket)) {
        ssize_t got = mqd_outgoing_receive(&relay->socket, relay->in + relay->in_bytes,
                                           MQD_RELAY_RESPONSE_BYTES_MAX - relay->in_bytes);
        if (got < 0 && errno == EAGAIN)
            return;
        if (got < 0) {
            mqd_relay_end_with_error(r, relay);
            return;
        }
        if (got == 0) {
            mqd_relay_end(r, relay, ECONNRESET, "the leader closed the connection");
            return;
        }
        relay->in_bytes += (uint32_t)got;
        if (!take_responses(r, relay))
            return;
    }
}

static struct mqd_relay *relay_by_token(const struct mqd_reactor *r, uint64_t value)
{
    uint32_t index = value & 0xffff;
    struct mqd_relay *relay = r->relays && index < r->relays->count ? r->relays->relay[index] : NULL;
    return relay && relay->socket.fd >= 0 && relay->generation == (uint32_t)(value >> 16) ? relay : NULL;
}

void mqd_relay_on_event(struct mqd_reactor *r, uint64_t value, uint32_t flags)
{
    struct mqd_relay *relay = relay_by_token(r, value);
    if (relay)
        mqd_outgoing_on_event(&relay->socket, flags);
}

void mqd_relay_on_step(struct mqd_reactor *r, uint64_t value)
{
    struct mqd_relay *relay = relay_by_token(r, value);
    MQD_ASSERT(relay, "T2: a session of a relay that has ended was not released");
    if (mqd_outgoing_on_step(r, &relay->socket) < 0)
        mqd_relay_end_with_error(r, relay);
}

void mqd_relays_read(struct mqd_reactor *r)
{
    for (uint32_t i = 0; i < r->relays->count; i++)
        receive(r, r->relays->relay[i]);
}

/* ---- time ---- */

/* Returns the time at which a relay that makes no progress is ended; INT64_MAX if nothing waits. */
static int64_t due_ms(const struct mqd_relay *relay)
{
    if (mqd_list_empty(&relay->entries))
        return relay->connect_requested ? relay->connect_by_ms : INT64_MAX;
    if (relay->socket.fd < 0)
        return relay->connect_by_ms;
    return MQD_CONTAINER(relay->entries.next, struct mqd_relay_entry, node)->expected_ms + relay->timeout_ms;
}

/* Runs the TLS connection for this turn. Returns false if its handshake has not finished, or the
 * connection has ended. */
static bool run_tls(struct mqd_reactor *r, struct mqd_relay *relay)
{
    if (mqd_outgoing_run(r, &relay->socket) == 0)
        return mqd_outgoing_established(&relay->socket);
    mqd_relay_end_with_error(r, relay);
    return false;
}

void mqd_relays_run(struct mqd_reactor *r)
{
    for (uint32_t i = 0; i < r->relays->count; i++) {
        struct mqd_relay *relay = r->relays->relay[i];
        if (relay->socket.tls && !run_tls(r, relay))
            continue;
        if (r->now_ms > due_ms(relay))
            mqd_relay_end(r, relay, relay->socket.fd >= 0 ? ETIMEDOUT : -1, "the leader did not respond in time");
        else if (relay->socket.fd >= 0 && relay->out.size_bytes)
            send_some(r, relay);
    }
}

int64_t mqd_relays_next_ms(const struct mqd_reactor *r)
{
    int64_t next_ms = INT64_MAX;
    for (uint32_t i = 0; i < r->relays->count; i++) {
        const struct mqd_relay *relay = r->relays->relay[i];
        bool ready = mqd_outgoing_ready(&relay->socket);
        if (ready && relay->socket.fd >= 0 &&
            (relay->socket.readable || (relay->socket.writable && relay->out.size_bytes)))
            return 0;
        int64_t due = ready ? due_ms(relay) : relay->socket.established_by_ms;
        next_ms = due < next_ms ? due + 1 : next_ms;
    }
    return next_ms == INT64_MAX ? -1 : next_ms;
}
