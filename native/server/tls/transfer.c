/* See server/tls/secure.h. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "server/tls/state.h"

void mqd_secure_account_unsent(struct mqd_reactor *r, struct mqd_connection *c)
{
    uint32_t unsent = mqd_tls_unsent_bytes(c->tls);
    if (unsent == c->unsent_encrypted_bytes)
        return;
    mqd_heap_release(r, c->unsent_encrypted_bytes);
    r->heap_bytes += unsent; /* the bytes already exist, so they are counted even above the bound, like responses */
    c->unsent_encrypted_bytes = unsent;
}

int mqd_secure_receive(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *at, uint32_t capacity,
                       uint32_t *received_bytes)
{
    bool drained;
    ssize_t n = mqd_tls_read(c->tls, at, capacity, &drained);
    int error = errno;
    if (n < 0) {
        char reason[224];
        snprintf(reason, sizeof reason, "TLS: %s", error == EPROTO ? mqd_error_message() : strerror(error));
        if (error == EPROTO)
            mqd_connection_fail(r, c, reason);
        else
            mqd_connection_close(r, c, error ? reason : "closed by the client");
        return -1;
    }
    if (mqd_tls_unsent_bytes(c->tls) != c->unsent_encrypted_bytes) { /* an alert, or another message of TLS itself */
        mqd_secure_account_unsent(r, c);
        mqd_output_schedule(r, c);
    }
    if (!drained)
        c->readable = 1;
    else if (n == 0 || !c->hangup)
        c->readable = 0; /* the next byte triggers an edge */
    if (n == 0)
        return 0;
    *received_bytes = (uint32_t)n;
    c->last_active_ms = r->now_ms;
    mqd_stat(r, MQD_COUNT_BYTES_IN, (uint64_t)n);
    r->turn_bytes += *received_bytes;
    return 1;
}

/* Reads from the segment file, whose cold pages have already been read ahead. -1: the connection is
 * broken. */
static ssize_t read_range(struct mqd_reactor *r, struct mqd_connection *c, struct mqd_range *range, uint8_t *at,
                          uint32_t capacity)
{
    uint32_t count = range->size_bytes < capacity ? range->size_bytes : capacity;
    ssize_t n;
    do
        n = pread(mqd_segment_ref_fd(range->segment), at, count, (off_t)range->position);
    while (n < 0 && errno == EINTR);
    if (n == 0) {
        mqd_output_log_short_file(r, c, range);
        return -1;
    }
    if (n < 0)
        return -1;
    range->position += (uint32_t)n;
    range->size_bytes -= (uint32_t)n;
    return n;
}

/* Copies output that is in memory, up to position `end` of the output. Returns the number of
 * bytes. */
static uint32_t copy_memory(struct mqd_connection *c, uint64_t end, uint8_t *at, uint32_t capacity)
{
    uint64_t unsent = end - c->out_sent;
    uint32_t count = unsent < capacity ? (uint32_t)unsent : capacity;
    memcpy(at, c->out.bytes + (c->out_sent - c->out_base), count);
    c->out_sent += count;
    return count;
}

/* Copies the next bytes of the output, from memory and file ranges, into one buffer. -1: the
 * connection is broken. */
static ssize_t gather(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *at)
{
    uint32_t size_bytes = 0, capacity = MQD_TLS_WRITE_BYTES_MAX;
    while (size_bytes < capacity && c->chunk_count) {
        struct mqd_chunk *chunk = &c->chunks[c->chunk_head];
        size_bytes += copy_memory(c, chunk->memory_end, at + size_bytes, capacity - size_bytes);
        if (size_bytes < capacity && chunk->range.size_bytes) {
            ssize_t n = read_range(r, c, &chunk->range, at + size_bytes, capacity - size_bytes);
            if (n < 0)
                return -1;
            size_bytes += (uint32_t)n;
        }
        if (c->out_sent == chunk->memory_end && !chunk->range.size_bytes)
            mqd_output_chunk_done(r, c);
    }
    if (!c->chunk_count)
        size_bytes += copy_memory(c, c->out_base + c->out.size_bytes, at + size_bytes, capacity - size_bytes);
    return size_bytes;
}

int mqd_secure_send(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (c->unsent_encrypted_bytes) {
        int flushed = mqd_tls_flush(c->tls);
        mqd_secure_account_unsent(r, c);
        if (flushed == 1 && !mqd_tls_established(c->tls))
            c->readable = 1; /* the handshake continues */
        return flushed;
    }
    ssize_t n = gather(r, c, r->secure->plain);
    if (n < 0 || mqd_tls_write(c->tls, r->secure->plain, (uint32_t)n, r->secure->scratch) < 0)
        return -1;
    mqd_stat(r, MQD_COUNT_BYTES_OUT, (uint64_t)n);
    mqd_secure_account_unsent(r, c);
    return c->unsent_encrypted_bytes ? 0 : 1;
}
