/* The unsent output of a connection: bytes, with ranges of segment files between them.
 *
 * Memory is one growing buffer; a chunk means "the buffer up to here, then this file range".
 * Positions are counted from the connection's first byte, so that sent bytes can be removed from
 * the front at any time.
 *
 * Invariant: chunk memory_end values never decrease; the rest of the buffer follows the last chunk.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>

#include "server/local/local.h"
#include "server/reactor.h"
#include "server/tls/secure.h"

#define OUT_KEEP_BYTES_MAX 8192 /* an idle connection keeps no larger buffer */
#define SENDFILE_STEP_BYTES (1u << 20)

uint64_t mqd_output_pending_bytes(const struct mqd_connection *c)
{
    return c->out_base + c->out.size_bytes - c->out_sent + c->unsent_encrypted_bytes;
}

bool mqd_output_has_room(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    uint64_t pending = mqd_output_pending_bytes(c);
    return pending == 0 || (pending <= MQD_OUT_BYTES_MAX && !mqd_heap_under_pressure(r));
}

void mqd_output_schedule(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (!mqd_list_linked(&c->output_node))
        mqd_list_append(&r->to_send, &c->output_node);
}

void mqd_output_close_when_sent(struct mqd_reactor *r, struct mqd_connection *c)
{
    c->closing = 1;
    mqd_output_schedule(r, c);
}

void mqd_output_append(struct mqd_reactor *r, struct mqd_connection *c, const void *bytes, uint32_t size_bytes)
{
    uint32_t old_capacity_bytes = c->out.capacity_bytes;
    mqd_buffer_reserve(&c->out, size_bytes);
    /* the response already exists, so it is counted even above the bound; requests that need room
     * wait */
    r->heap_bytes += c->out.capacity_bytes - old_capacity_bytes;
    if (c->out.failed) {
        c->closing = 1;
    } else {
        memcpy(c->out.bytes + c->out.size_bytes, bytes, size_bytes);
        c->out.size_bytes += size_bytes;
    }
    mqd_output_schedule(r, c);
}

static bool chunk_push(struct mqd_connection *c, const struct mqd_chunk *chunk)
{
    if (c->chunk_count == c->chunk_capacity) {
        uint32_t capacity = c->chunk_capacity ? c->chunk_capacity * 2 : 8;
        struct mqd_chunk *chunks = malloc(sizeof *chunks * capacity);
        if (!chunks)
            return false;
        for (uint32_t i = 0; i < c->chunk_count; i++)
            chunks[i] = c->chunks[(c->chunk_head + i) & (c->chunk_capacity - 1)];
        free(c->chunks);
        c->chunks = chunks;
        c->chunk_capacity = capacity;
        c->chunk_head = 0;
    }
    c->chunks[(c->chunk_head + c->chunk_count++) & (c->chunk_capacity - 1)] = *chunk;
    return true;
}

/* Moves the whole response to the output. On failure, closes the connection after its earlier
 * output: neither a part of the response nor anything after it may be sent. */
void mqd_output_take_scratch(struct mqd_reactor *r, struct mqd_connection *c)
{
    uint64_t base = c->out_base + c->out.size_bytes;
    uint32_t pushed = 0;
    bool failed = r->scratch.failed;
    if (!failed) {
        mqd_output_append(r, c, r->scratch.bytes, r->scratch.size_bytes);
        failed = c->out.failed;
    }
    for (; pushed < r->scratch_chunk_count && !failed; pushed++) {
        struct mqd_chunk chunk = r->scratch_chunks[pushed];
        chunk.memory_end += base;
        if (!chunk_push(c, &chunk)) {
            failed = true;
            break;
        }
    }
    if (failed) {
        c->chunk_count -= pushed; /* their ranges are released below */
        c->out.size_bytes = (uint32_t)(base - c->out_base);
        for (uint32_t i = 0; i < r->scratch_chunk_count; i++)
            mqd_range_release(r->reader, &r->scratch_chunks[i].range);
        mqd_output_close_when_sent(r, c);
    }
    r->scratch_chunk_count = 0;
    r->scratch.size_bytes = 0;
    r->scratch.failed = false;
}

static void out_free(struct mqd_reactor *r, struct mqd_connection *c)
{
    mqd_heap_release(r, c->out.capacity_bytes);
    mqd_buffer_free(&c->out);
}

/* Called when everything has been sent: resets the buffer and frees a large one. */
static void out_reset(struct mqd_reactor *r, struct mqd_connection *c)
{
    c->out_base = c->out_sent;
    c->out.size_bytes = 0;
    if (c->out.capacity_bytes > OUT_KEEP_BYTES_MAX || mqd_heap_under_pressure(r))
        out_free(r, c);
}

static void out_compact(struct mqd_connection *c)
{
    uint32_t sent = (uint32_t)(c->out_sent - c->out_base);
    if (sent < 65536 || sent < c->out.size_bytes / 2)
        return;
    memmove(c->out.bytes, c->out.bytes + sent, c->out.size_bytes - sent);
    c->out.size_bytes -= sent;
    c->out_base = c->out_sent;
}

/* Returns 1 if everything up to `end` has been sent, 0 if the socket (or the ring) is full, or -1
 * if the connection is broken. */
static int on_sent(struct mqd_reactor *r, struct mqd_connection *c, ssize_t n, uint64_t end)
{
    if (n < 0)
        return -1;
    mqd_stat(r, MQD_COUNT_BYTES_OUT, (uint64_t)n);
    c->out_sent += (uint64_t)n;
    return c->out_sent == end ? 1 : 0;
}

/* Returns what on_sent returns. */
static int send_memory(struct mqd_reactor *r, struct mqd_connection *c, uint64_t end, bool more)
{
    ssize_t n;
    if (c->local)
        return on_sent(r, c, mqd_local_send(r, c, c->out.bytes + (c->out_sent - c->out_base), end - c->out_sent), end);
    do /* EINTR is rare: this thread blocks all signals, so only a tracer can cause it */
        n = send(c->fd, c->out.bytes + (c->out_sent - c->out_base), end - c->out_sent,
                 MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    while (n < 0 && errno == EINTR);
    return n < 0 && errno == EAGAIN ? 0 : on_sent(r, c, n, end);
}

/* Like sendfile, but returns 0 if there is no room now, or at the end of the file, where it also
 * sets *file_end. */
static ssize_t send_file(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_range *range, bool *file_end)
{
    if (c->local)
        return mqd_local_send_file(r, c, range, file_end);
    off_t position = range->position;
    uint32_t step = range->size_bytes < SENDFILE_STEP_BYTES ? range->size_bytes : SENDFILE_STEP_BYTES;
    ssize_t n;
    do
        n = sendfile(c->fd, mqd_segment_ref_fd(range->segment), &position, step);
    while (n < 0 && errno == EINTR);
    *file_end = n == 0;
    return n < 0 && errno == EAGAIN ? 0 : n;
}

void mqd_output_log_short_file(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_range *range)
{
    mqd_log(r, 3, c->id, UINT32_MAX, "a segment file ended %u bytes before its published end; closing the connection",
            range->size_bytes);
}

void mqd_output_chunk_done(struct mqd_reactor *r, struct mqd_connection *c)
{
    mqd_range_release(r->reader, &c->chunks[c->chunk_head].range);
    c->chunk_head = (c->chunk_head + 1) & (c->chunk_capacity - 1);
    c->chunk_count--;
}

static int send_range(struct mqd_reactor *r, struct mqd_connection *c, struct mqd_range *range)
{
    bool file_end;
    ssize_t n = send_file(r, c, range, &file_end);
    if (n < 0)
        return -1;
    if (n == 0 && !file_end)
        return 0;
    if (n == 0) { /* the file is shorter than published, so it is damaged; the rest of the response cannot be sent */
        mqd_output_log_short_file(r, c, range);
        return -1;
    }
    mqd_stat(r, MQD_COUNT_BYTES_OUT, (uint64_t)n);
    mqd_stat(r, MQD_COUNT_FETCH_SENDFILE_BYTES, (uint64_t)n);
    range->position += (uint32_t)n;
    range->size_bytes -= (uint32_t)n;
    return 1;
}

static int send_next(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (!c->chunk_count)
        return send_memory(r, c, c->out_base + c->out.size_bytes, false);
    struct mqd_chunk *chunk = &c->chunks[c->chunk_head];
    if (c->out_sent < chunk->memory_end)
        return send_memory(r, c, chunk->memory_end, true);
    if (chunk->range.size_bytes) {
        int result = send_range(r, c, &chunk->range);
        if (result != 1 || chunk->range.size_bytes)
            return result;
    }
    mqd_output_chunk_done(r, c);
    return 1;
}

void mqd_output_send(struct mqd_reactor *r, struct mqd_connection *c)
{
    int64_t began_ns = r->quota_kinds >> MQD_QUOTA_REQUEST & 1 ? mqd_throttle_measure_begin(r, c) : 0;
    while (c->writable && (c->chunk_count || mqd_output_pending_bytes(c))) {
        int result = c->tls ? mqd_secure_send(r, c) : send_next(r, c);
        if (result < 0) {
            mqd_connection_close(r, c, "the connection failed while a response was being sent");
            return;
        }
        if (result == 0)
            c->writable = 0; /* an event reports when there is room again */
        else
            c->last_active_ms = r->now_ms;
    }
    if (c->local)
        mqd_local_publish(c->local);
    if (began_ns)
        mqd_throttle_measure_end(r, c, began_ns);
    if (!c->chunk_count && !mqd_output_pending_bytes(c)) {
        out_reset(r, c);
        if (c->closing)
            mqd_connection_close(r, c, NULL);
        else
            mqd_connection_resume(r, c);
    } else {
        out_compact(c);
        if (mqd_output_pending_bytes(c) <= MQD_OUT_BYTES_MAX)
            mqd_connection_resume(r, c);
    }
}

void mqd_output_clear(struct mqd_reactor *r, struct mqd_connection *c)
{
    for (uint32_t i = 0; i < c->chunk_count; i++)
        mqd_range_release(r->reader, &c->chunks[(c->chunk_head + i) & (c->chunk_capacity - 1)].range);
    free(c->chunks);
    c->chunks = NULL;
    c->chunk_count = c->chunk_capacity = c->chunk_head = 0;
    out_free(r, c);
    mqd_list_remove(&c->output_node);
}
