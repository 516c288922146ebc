/* Takes requests from the memory of an attachment, and puts responses into it. See
 * server/local/local.h, and shm/local_layout.h for which values may be trusted.
 *
 * A request is copied once, from the client's memory into the receive window (or a run of extents
 * when it is larger): later writes by the client have no effect. Each shared word is loaded once
 * and checked before use.
 */
#include "server/local/local.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "server/reactor.h"

#define FRAME_BYTES_MIN 8          /* api key, version, correlation id */
#define TAKE_BYTES_MAX (64u << 10) /* bytes taken from one attachment before the next one is served */
#define TAKE_COUNT_MAX 64
#define FRAME_ALIGN 64u
#define FILE_STEP_BYTES (256u << 10)

/* ---- polling ---- */

static bool has_submitted(const struct mqd_local *local)
{
    return !local->connection->readable && mqd_load_acquire(&local->header->submission_tail) != local->submission_head;
}

static bool has_new_room(const struct mqd_local *local)
{
    return !local->connection->writable && mqd_load_acquire(&local->header->reply_head) != local->reply_head_seen;
}

bool mqd_locals_waiting(const struct mqd_reactor *r)
{
    for (uint32_t i = 0; i < r->local_count; i++)
        if (has_submitted(r->locals[i]) || has_new_room(r->locals[i]))
            return true;
    return false;
}

void mqd_locals_poll(struct mqd_reactor *r)
{
    mqd_list_move_all(&r->queries, &r->query_later);
    for (uint32_t i = 0; i < r->local_count; i++) {
        struct mqd_local *local = r->locals[i];
        struct mqd_connection *c = local->connection;
        if (has_submitted(local)) {
            c->readable = 1;
            mqd_connection_resume(r, c);
        }
        if (has_new_room(local)) {
            c->writable = 1;
            if (!mqd_list_linked(&c->output_node))
                mqd_list_append(&r->to_send, &c->output_node);
        }
    }
}

/* ---- waking ---- */

static void wake(struct mqd_local *local)
{
    static const uint64_t token = 1;
    ssize_t written;
    if (!mqd_exchange(&local->header->client_sleeping, 0u))
        return;
    do /* EAGAIN: enough unread wake-ups are in the pipe; EPIPE: the client has ended */
        written = write(local->to_client_fd, &token, sizeof token);
    while (written < 0 && errno == EINTR);
}

static void publish_submission_head(struct mqd_local *local)
{
    mqd_store_release(&local->header->submission_head, local->submission_head);
    mqd_fence_full(); /* A4 */
    if (mqd_load_relaxed(&local->header->client_sleeping) == MQD_LOCAL_SLEEP_ROOM)
        wake(local);
}

void mqd_local_publish(struct mqd_local *local)
{
    if (local->reply_tail == local->reply_tail_published)
        return;
    local->reply_tail_published = local->reply_tail;
    mqd_store_release(&local->header->reply_tail, local->reply_tail);
    mqd_fence_full(); /* A4 */
    if (mqd_load_relaxed(&local->header->client_sleeping))
        wake(local);
}

/* ---- taking requests ---- */

/* Returns the arena offset to which a request of size_bytes is copied, or -1 if the connection is
 * stalled until there is room. *has_run: whether the request has a run of its own. */
static int64_t find_room(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes, bool *has_run)
{
    uint32_t at = (r->window_used + FRAME_ALIGN - 1) & ~(FRAME_ALIGN - 1);
    *has_run = size_bytes > MQD_EXTENT_BYTES;
    if (size_bytes > r->run_bytes_max) {
        if (!mqd_large_begin(r, c, size_bytes) || !mqd_large_touch(r, c, 0, size_bytes))
            return -1;
        int64_t offset = c->run_offset;
        c->run_offset = -1;
        return offset;
    }
    if (c->run_offset >= 0) { /* the client has replaced the large request that waited for this reservation */
        mqd_frame_release(r, (uint64_t)c->run_offset);
        c->run_offset = -1;
    }
    if (*has_run)
        return mqd_connection_allocate_run(r, c, size_bytes);
    if (!mqd_connection_ensure_window(r, c,
                                      (at - r->window_used) + size_bytes > MQD_EXTENT_BYTES
                                          ? MQD_EXTENT_BYTES
                                          : (at - r->window_used) + size_bytes))
        return -1;
    at = (r->window_used + FRAME_ALIGN - 1) & ~(FRAME_ALIGN - 1); /* the window may have been replaced */
    return r->window_offset + at;
}

/* Takes the request at the head. Returns the number of bytes taken; 0 if it must wait; -1 if the
 * connection is closed. */
static int64_t take_request(struct mqd_reactor *r, struct mqd_connection *c)
{
    struct mqd_local *local = c->local;
    const struct mqd_local_submission *submission =
        &local->submissions[local->submission_head & (local->submission_count - 1)];
    uint64_t offset = mqd_load_relaxed(&submission->offset);
    uint32_t size_bytes = mqd_load_relaxed(&submission->size_bytes);
    if (size_bytes < FRAME_BYTES_MIN || size_bytes > r->options.request_bytes_max || size_bytes > local->data_bytes ||
        offset > local->data_bytes - size_bytes) {
        char reason[192];
        snprintf(reason, sizeof reason,
                 "the local client (pid %d) submitted a request of %u bytes at %llu: outside its memory, or larger "
                 "than socket.request.max.bytes=%u",
                 local->pid, size_bytes, (unsigned long long)offset, r->options.request_bytes_max);
        mqd_connection_fail(r, c, reason);
        return -1;
    }
    bool has_run;
    int64_t at = find_room(r, c, size_bytes, &has_run);
    if (at < 0)
        return c->fd >= 0 ? 0 : -1;
    uint8_t *frame = r->options.arenas[r->options.self] + at;
    memcpy(frame, local->data + offset, size_bytes);
    if (!mqd_throttle_admit(r, c, frame, size_bytes)) {
        if (has_run)
            mqd_frame_release(r, (uint64_t)at);
        return 0; /* the request stays submitted */
    }
    if (!has_run)
        r->window_used = (uint32_t)(at - r->window_offset) + size_bytes;
    local->submission_head++;
    mqd_connection_on_frame(r, c, frame, size_bytes, at); /* may close the connection */
    if (has_run)
        mqd_frame_release(r, (uint64_t)at);
    mqd_stat(r, MQD_COUNT_LOCAL_REQUESTS, 1);
    mqd_stat(r, MQD_COUNT_BYTES_IN, size_bytes);
    r->turn_bytes += size_bytes;
    return c->fd >= 0 ? (int64_t)size_bytes : -1;
}

void mqd_local_read(struct mqd_reactor *r, struct mqd_connection *c)
{
    struct mqd_local *local = c->local;
    uint64_t tail = mqd_load_acquire(&local->header->submission_tail), taken_bytes = 0;
    uint32_t taken_count = 0;
    if (tail - local->submission_head > local->submission_count) {
        mqd_connection_fail(r, c, "a local client's submission counter exceeds its ring");
        return;
    }
    while (local->submission_head != tail && taken_bytes < TAKE_BYTES_MAX && taken_count < TAKE_COUNT_MAX) {
        int64_t bytes = mqd_connection_may_read(r, c) ? take_request(r, c) : 0;
        if (bytes < 0)
            return;
        if (bytes == 0)
            break;
        taken_count++;
        taken_bytes += (uint64_t)bytes;
    }
    if (taken_count) {
        publish_submission_head(local);
        c->last_active_ms = r->now_ms;
    }
    if (c->hangup && (local->submission_head == tail || taken_bytes >= local->drain_bytes))
        mqd_connection_close(r, c, "closed by the local client");
    else if (c->hangup)
        local->drain_bytes -= taken_bytes;
    else if (local->submission_head == tail)
        c->readable = 0;
}

/* ---- writing responses ---- */

/* Returns the free bytes in the reply ring, or -1 if the client's counter is invalid. Updates
 * reply_head_seen. */
static int64_t reply_room(struct mqd_reactor *r, struct mqd_local *local)
{
    uint64_t head = mqd_load_acquire(&local->header->reply_head), used = local->reply_tail - head;
    if (used > local->reply_bytes) {
        mqd_log(r, 4, local->connection->id, UINT32_MAX,
                "closing the connection: the local client (pid %d) has a read counter beyond the written responses",
                local->pid);
        mqd_stat(r, MQD_COUNT_PROTOCOL_ERRORS, 1);
        return -1;
    }
    local->reply_head_seen = head;
    return local->reply_bytes - (int64_t)used;
}

static void set_needs_room(struct mqd_local *local, bool needed)
{
    if (local->needs_room == needed)
        return;
    local->needs_room = needed;
    mqd_store_release(&local->header->worker_needs_room, (uint32_t)needed);
}

/* Like reply_room, but before it returns 0, it asks the client to wake the worker when there is
 * room. */
static int64_t room_or_wait(struct mqd_reactor *r, struct mqd_local *local)
{
    int64_t room = reply_room(r, local);
    if (room)
        return room;
    mqd_local_publish(local);
    set_needs_room(local, true);
    /* A4: the client moves reply_head, then reads worker_needs_room; the worker stores
     * worker_needs_room, then reads reply_head */
    mqd_fence_full();
    return reply_room(r, local);
}

int64_t mqd_local_send(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *bytes, uint64_t size_bytes)
{
    struct mqd_local *local = c->local;
    if (c->hangup)
        return (int64_t)size_bytes;
    for (uint64_t sent = 0;;) {
        int64_t room = room_or_wait(r, local);
        if (room <= 0)
            return room < 0 ? -1 : (int64_t)sent;
        set_needs_room(local, false);
        uint64_t remaining = size_bytes - sent, count = remaining < (uint64_t)room ? remaining : (uint64_t)room;
        uint64_t at = local->reply_tail & (local->reply_bytes - 1),
                 first_part = local->reply_bytes - at < count ? local->reply_bytes - at : count;
        memcpy(local->replies + at, bytes + sent, first_part);
        memcpy(local->replies, bytes + sent + first_part, count - first_part);
        local->reply_tail += count;
        sent += count;
        if (sent == size_bytes)
            return (int64_t)sent;
    }
}

int64_t mqd_local_send_file(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_range *range,
                            bool *file_end)
{
    struct mqd_local *local = c->local;
    *file_end = false;
    if (c->hangup)
        return range->size_bytes;
    int64_t room = room_or_wait(r, local);
    if (room <= 0)
        return room;
    set_needs_room(local, false);
    uint64_t at = local->reply_tail & (local->reply_bytes - 1),
             count = range->size_bytes < FILE_STEP_BYTES ? range->size_bytes : FILE_STEP_BYTES;
    count = count < (uint64_t)room ? count : (uint64_t)room;
    count = count < local->reply_bytes - at ? count : local->reply_bytes - at;
    ssize_t got;
    do
        got = pread(mqd_segment_ref_fd(range->segment), local->replies + at, count, range->position);
    while (got < 0 && errno == EINTR);
    *file_end = got == 0;
    if (got <= 0)
        return got;
    local->reply_tail += (uint64_t)got;
    return got;
}
