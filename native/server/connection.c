/* Connections: reading frames and closing. How connections arrive: server/handoff.c.
 *
 * Receiving. Bytes are received into the receive window, one extent of the arena that all
 * connections share within a turn and that stays in the CPU cache; complete frames are handled in
 * place. The bytes of an incomplete frame wait on the heap (small frame) or in a run of extents of
 * its own (large frame), so that an idle client holds no extent. A frame larger than half of the
 * arena uses other memory: server/large.c.
 *
 * Bounds: inflight_count_max requests; MQD_HELD_BYTES_MAX for them and their completed replies
 * (frames beyond it stay unparsed); MQD_OUT_BYTES_MAX unsent bytes; heap_bytes_max for everything
 * on the heap. A connection that has reached a bound is not read.
 */
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/authentication.h"
#include "server/local/local.h"
#include "server/reactor.h"
#include "server/share/share.h"
#include "server/rights/subject.h"
#include "server/tls/secure.h"
#include "shm/tally.h"

#define LARGE_FRAME_BYTES 32768
#define READ_BYTES_MIN 16384
/* bytes of a large frame that are read in one turn; then other connections are served */
#define RUN_STEP_BYTES (256u << 10)
#define PARTIAL_BYTES_MIN 64
#define EVICT_MS 200  /* an incomplete frame loses its memory after this time, if other connections need it */
#define COMPACT_MS 10 /* compact_arena does nothing if it last ran less than this time ago */
#define PROBE_S 5
#define PROBE_COUNT 6
#define HANGUP_PROBED 2         /* value of connection->hangup after probe_client */
#define GONE_MS 2000            /* see is_gone; longer than a short stall of the threads that send responses */
#define WINDOW_DIVISOR 16       /* 1 / WINDOW_DIVISOR of the arena is reserved for receive windows */
#define TLS_RECORD_BEGIN 0x1603 /* first bytes of a TLS handshake; in a Kafka frame the upper half of the length */

/* ---- closing ---- */

static void partial_drop(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (c->partial) {
        mqd_heap_release(r, c->partial_capacity);
        r->partial_bytes -= c->partial_capacity;
        free(c->partial);
    }
    c->partial = NULL;
    c->partial_bytes = c->partial_capacity = 0;
}

void mqd_connection_close(struct mqd_reactor *r, struct mqd_connection *c, const char *reason)
{
    if (c->fd < 0)
        return;
    mqd_log(r, 7, c->id, UINT32_MAX, "connection closed: %s", reason ? reason : "done");
    if (c->local)
        mqd_local_close(r, c);
    if (c->tls)
        mqd_secure_close(r, c);
    mqd_poll_remove(r->poll, c->fd, mqd_token(MQD_TOKEN_CONNECTION, (uint64_t)c->generation << 24 | c->index));
    close(c->fd);
    c->fd = -1;
    mqd_list_remove(&c->ready_node);
    mqd_list_remove(&c->stall_node);
    mqd_list_remove(&c->response_node);
    mqd_list_remove(&c->control_turn);
    mqd_throttle_unmute(r, c);
    mqd_authentication_close(c);
    mqd_subject_detach(r, c);
    mqd_output_clear(r, c);
    partial_drop(r, c);
    if (c->run_offset >= 0)
        mqd_frame_release(r, (uint64_t)c->run_offset);
    c->run_offset = -1;
    if (r->run_waiter == c)
        r->run_waiter = NULL;
    for (struct mqd_request *request = c->head, *next; request; request = next) {
        next = request->next;
        mqd_request_orphan(r, request);
    }
    c->head = c->tail = NULL;
    mqd_share_on_connection_closed(r, c);
    mqd_tally_leave(r->options.control, c->address_tally, r->options.self);
    mqd_tally_leave(r->options.control, c->listener_tally, r->options.self);
    c->address_tally = c->listener_tally = MQD_TALLY_NONE;
    r->free_indexes[r->free_index_count++] = c->index;
    r->connection_count--;
    mqd_store_relaxed(&r->slot->connection_count, r->connection_count);
    mqd_stat(r, MQD_COUNT_CONNECTIONS_CLOSED, 1);
}

/* ---- when to read ---- */

bool mqd_connection_may_read(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    if (c->fd < 0 || c->closing || c->block_count || c->muted || c->inflight >= r->options.inflight_count_max ||
        !mqd_output_has_room(r, c) || (c->control_count && mqd_control_under_pressure(r)))
        return false;
    /* the connection becomes readable again when its responses are sent */
    return c->held_bytes == 0 || (c->held_bytes <= MQD_HELD_BYTES_MAX && !mqd_heap_under_pressure(r));
}

void mqd_connection_resume(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (c->readable && !mqd_list_linked(&c->ready_node) && !mqd_list_linked(&c->stall_node) &&
        mqd_connection_may_read(r, c))
        mqd_list_append(&r->ready, &c->ready_node);
}

static void stall(struct mqd_reactor *r, struct mqd_connection *c)
{
    mqd_stat(r, MQD_COUNT_ARENA_STALLS, 1);
    if (!mqd_list_linked(&c->stall_node))
        mqd_list_append(&r->stalled, &c->stall_node);
}

/* ---- frames ---- */

static uint32_t read_length(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static bool validate_length(struct mqd_reactor *r, struct mqd_connection *c, uint32_t length)
{
    if (length >= c->frame_bytes_min && length <= c->frame_bytes_max)
        return true;
    char reason[160];
    if ((int32_t)length < 0 || length < c->frame_bytes_min)
        snprintf(reason, sizeof reason, "a frame announces %d bytes: not the Kafka protocol", (int32_t)length);
    else if (length >> 16 == TLS_RECORD_BEGIN)
        snprintf(reason, sizeof reason,
                 "TLS on a plain-text listener: the client needs security.protocol=PLAINTEXT, or SASL_PLAINTEXT");
    else
        snprintf(reason, sizeof reason, "a frame of %u bytes is larger than %s=%u", length,
                 c->authentication == MQD_AUTHENTICATION_PENDING ? "sasl.server.max.receive.size"
                                                                 : "socket.request.max.bytes",
                 c->frame_bytes_max);
    mqd_connection_fail(r, c, reason);
    return false;
}

/* Incomplete requests may take three quarters of the heap; the rest is for complete ones. Clients
 * that never finish their requests must not take the memory that the responses of others need. */
static bool partials_have_room(const struct mqd_reactor *r, uint32_t capacity)
{
    return r->partial_bytes + capacity <= r->options.heap_bytes_max - r->options.heap_bytes_max / 4;
}

/* Returns how long the connection has waited for the rest of an incomplete request; 0 if it is not
 * being read, or if its socket has more bytes, which may be the rest. */
static int64_t waited_ms(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    return c && c->fd >= 0 && c->partial_capacity && !c->readable && !mqd_list_linked(&c->stall_node)
               ? r->now_ms - c->last_active_ms
               : 0;
}

/* Called when the incomplete requests use their whole share of the heap and another one arrives.
 * Closes the connections that have waited longest, but none that has sent bytes within EVICT_MS. */
static void evict_partial_frames(struct mqd_reactor *r, uint32_t capacity)
{
    int64_t age_ms = 0;
    for (uint32_t i = 0; i < r->connection_end; i++) {
        int64_t connection_ms = waited_ms(r, r->connections[i]);
        age_ms = connection_ms > age_ms ? connection_ms : age_ms;
    }
    for (; age_ms >= EVICT_MS; age_ms /= 2)
        for (uint32_t i = 0; i < r->connection_end; i++) {
            if (partials_have_room(r, capacity))
                return;
            if (waited_ms(r, r->connections[i]) >= age_ms)
                mqd_connection_fail(r, r->connections[i],
                                    "other requests need the memory of its incomplete request "
                                    "(queued.max.request.bytes)");
        }
}

static bool partial_keep(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *bytes, uint32_t size_bytes,
                         uint32_t capacity)
{
    if (c->partial_capacity < capacity) {
        partial_drop(r, c);
        if (!partials_have_room(r, capacity) || !mqd_heap_take(r, capacity)) {
            mqd_connection_fail(r, c, "no memory for another incomplete request (queued.max.request.bytes)");
            return false;
        }
        if (!(c->partial = malloc(capacity))) {
            mqd_heap_release(r, capacity);
            mqd_connection_fail(r, c, "out of memory for another incomplete request");
            return false;
        }
        r->partial_bytes += capacity;
        c->partial_capacity = capacity;
    }
    memcpy(c->partial, bytes, size_bytes);
    c->partial_bytes = size_bytes;
    return true;
}

/* Allocates extents for a large frame. Some extents are reserved for receive windows, so that large
 * frames that never end cannot stop small ones. Returns -1 if too few are free now. */
static int64_t run_allocate(struct mqd_reactor *r, const struct mqd_connection *c, uint32_t total)
{
    if (r->run_waiter && r->run_waiter != c)
        return -1; /* a short run now would delay the long run that another connection waits for */
    uint32_t extents = mqd_arena_extents_total(r->arena), needed = (total + MQD_EXTENT_BYTES - 1) / MQD_EXTENT_BYTES;
    if (mqd_arena_extents_used(r->arena) + needed > extents - extents / WINDOW_DIVISOR)
        return -1;
    return mqd_arena_allocate(r->arena, total);
}

/* Allocates a run of extents for one whole frame of `total` bytes (with its length word) and moves
 * the bytes received so far into it. */
static bool run_begin(struct mqd_reactor *r, struct mqd_connection *c, uint32_t total, const uint8_t *bytes,
                      uint32_t size_bytes)
{
    int64_t offset = run_allocate(r, c, total);
    if (offset < 0)
        return false;
    memcpy(r->options.arenas[r->options.self] + offset, bytes, size_bytes);
    c->run_offset = offset;
    c->run_bytes = total;
    c->run_filled = size_bytes;
    c->run_began_ms = r->now_ms;
    r->run_waiter = NULL;
    return true;
}

/* Called when other connections wait for room: moves the received bytes of large frames that have
 * been in the arena for EVICT_MS to the heap. The age of the run decides, because a
 * client that sends single bytes is never idle. If the heap is full too, idle connections are
 * closed and active ones keep their runs. */
static void evict_runs(struct mqd_reactor *r)
{
    for (uint32_t i = 0; i < r->connection_end; i++) {
        struct mqd_connection *c = r->connections[i];
        if (!c || c->fd < 0 || c->run_offset < 0 || mqd_frame_is_large(r, (uint64_t)c->run_offset) ||
            r->now_ms - c->run_began_ms < EVICT_MS)
            continue;
        if (r->now_ms - c->last_active_ms < EVICT_MS &&
            (!partials_have_room(r, c->run_filled) || r->heap_bytes + c->run_filled > r->options.heap_bytes_max))
            continue;
        int64_t offset = c->run_offset;
        c->run_offset = -1;
        if (partial_keep(r, c, r->options.arenas[r->options.self] + offset, c->run_filled, c->run_filled))
            mqd_log(r, 7, c->id, UINT32_MAX, "an incomplete frame of %u bytes moved to the heap", c->run_bytes);
        mqd_arena_release(r->arena, (uint64_t)offset);
    }
}

/* Makes room for stalled connections: moves old runs out of the arena, and releases the window, so
 * that the next one is at the arena's low end. Anywhere else a window could split the free extents,
 * and the largest frame needs nearly all of them as one run. */
static void compact_arena(struct mqd_reactor *r)
{
    if (r->now_ms - r->compacted_ms < COMPACT_MS)
        return;
    r->compacted_ms = r->now_ms;
    evict_runs(r);
    if (r->window_offset >= 0)
        mqd_arena_release(r->arena, (uint64_t)r->window_offset);
    r->window_offset = -1;
    mqd_arena_sort_free_extents(r->arena);
}

void mqd_connections_resume_stalled(struct mqd_reactor *r)
{
    compact_arena(r);
    if (mqd_arena_extents_used(r->arena) == mqd_arena_extents_total(r->arena))
        return;
    struct mqd_node stalled;
    mqd_list_init(&stalled);
    mqd_list_move_all(&stalled, &r->stalled);
    struct mqd_node *node;
    while ((node = mqd_list_pop(&stalled))) {
        struct mqd_connection *c = MQD_CONTAINER(node, struct mqd_connection, stall_node);
        mqd_connection_resume(r, c);
        if (r->run_waiter == c && !mqd_list_linked(&c->ready_node))
            r->run_waiter = NULL; /* the connection is not read until its replies are sent */
    }
}

static bool ensure_window(struct mqd_reactor *r, uint32_t need)
{
    if (r->window_offset >= 0 && MQD_EXTENT_BYTES - r->window_used >= need)
        return true;
    if (r->window_offset >= 0)
        mqd_arena_release(r->arena, (uint64_t)r->window_offset);
    r->window_offset = mqd_arena_allocate(r->arena, MQD_EXTENT_BYTES);
    r->window_used = 0;
    return r->window_offset >= 0;
}

bool mqd_connection_ensure_window(struct mqd_reactor *r, struct mqd_connection *c, uint32_t need)
{
    if (ensure_window(r, need))
        return true;
    stall(r, c);
    return false;
}

int64_t mqd_connection_allocate_run(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes)
{
    int64_t offset = run_allocate(r, c, size_bytes);
    if (offset < 0) {
        if (!r->run_waiter)
            r->run_waiter = c;
        stall(r, c);
    } else if (r->run_waiter == c) {
        r->run_waiter = NULL;
    }
    return offset;
}

/* Returns 1 if bytes were received, 0 if there are none now, -1 if the connection is closed. */
static int receive(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *at, uint32_t capacity, uint32_t *got)
{
    if (c->tls)
        return mqd_secure_receive(r, c, at, capacity, got);
    ssize_t n = recv(c->fd, at, capacity, MSG_DONTWAIT);
    if (n > 0) {
        *got = (uint32_t)n;
        if (*got < capacity && !c->hangup)
            c->readable = 0; /* drained: the next byte triggers an edge */
        c->last_active_ms = r->now_ms;
        mqd_stat(r, MQD_COUNT_BYTES_IN, (uint64_t)n);
        r->turn_bytes += *got;
        return 1;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        c->readable = errno == EINTR;
        return 0;
    }
    if (n < 0 && errno == EFAULT)
        mqd_connection_fail(r, c, mqd_large_full_reason);
    else
        mqd_connection_close(r, c, n == 0 ? "closed by the client" : strerror(errno));
    return -1;
}

void mqd_connection_on_frame(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                             int64_t arena_offset)
{
    if (r->quota_kinds)
        mqd_throttle_dispatch_frame(r, c, frame, size_bytes, arena_offset);
    else
        mqd_dispatch_frame(r, c, frame, size_bytes, arena_offset);
}

static void read_run(struct mqd_reactor *r, struct mqd_connection *c)
{
    uint8_t *frame = r->options.arenas[r->options.self] + c->run_offset;
    uint32_t got, room = c->run_bytes - c->run_filled;
    room = room < RUN_STEP_BYTES ? room : RUN_STEP_BYTES;
    if (c->tls &&
        mqd_frame_is_large(r, (uint64_t)c->run_offset) && /* TLS stores the bytes itself: B3 of server/large.c */
        !mqd_large_touch(r, c, c->run_filled, room))
        return;
    if (receive(r, c, frame + c->run_filled, room, &got) != 1)
        return;
    if (got == room)
        c->readable = 1; /* the frame or the step limited the read, so more may be in the socket */
    c->run_filled += got;
    if (c->run_filled < c->run_bytes)
        return;
    int64_t offset = c->run_offset;
    c->run_offset = -1;
    mqd_connection_on_frame(r, c, frame + 4, c->run_bytes - 4, offset + 4);
    mqd_frame_release(r, (uint64_t)offset);
}

/* Returns the capacity for the received part of a small frame: the next power of two, because a
 * length word alone must not cause the allocation of a whole frame. */
static uint32_t capacity_for(uint32_t size_bytes, uint32_t total)
{
    uint32_t capacity = PARTIAL_BYTES_MIN;
    while (capacity < size_bytes)
        capacity *= 2;
    return capacity < total ? capacity : total;
}

static bool keep_bytes(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *bytes, uint32_t size_bytes,
                       uint32_t capacity)
{
    uint32_t added_bytes = capacity > c->partial_capacity ? capacity - c->partial_capacity : 0;
    if (added_bytes && !partials_have_room(r, added_bytes))
        evict_partial_frames(r, added_bytes);
    return partial_keep(r, c, bytes, size_bytes, capacity);
}

/* Keeps what remains after the complete frames of a window. */
static void keep_rest(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *rest, uint32_t rest_bytes)
{
    if (rest_bytes < 4) {
        if (rest_bytes)
            keep_bytes(r, c, rest, rest_bytes, PARTIAL_BYTES_MIN);
        return;
    }
    uint32_t total = 4 + read_length(rest);
    if (total > LARGE_FRAME_BYTES && total <= r->run_bytes_max && run_begin(r, c, total, rest, rest_bytes)) {
        c->expects_large = 1;
        return;
    }
    /* If the arena is full, the bytes of a large frame that have been received are kept, and the
     * rest stays in the socket. A frame that belongs in the memory for large requests gets its run
     * when more bytes arrive. */
    keep_bytes(r, c, rest, rest_bytes, total > LARGE_FRAME_BYTES ? rest_bytes : capacity_for(rest_bytes, total));
}

/* Complete frames beyond the connection's bounds are kept until it may be read again. */
static void keep_frames(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frames, uint32_t size_bytes)
{
    if (keep_bytes(r, c, frames, size_bytes, size_bytes))
        c->readable = 1; /* there are bytes to handle, in `partial` if not in the socket */
}

static void handle_window(struct mqd_reactor *r, struct mqd_connection *c, uint32_t begin, uint32_t size_bytes)
{
    uint8_t *arena = r->options.arenas[r->options.self] + r->window_offset;
    int64_t window = r->window_offset;
    uint32_t at = begin, end = begin + size_bytes;
    c->partial_bytes = 0;
    while (end - at >= 4) {
        uint32_t length = read_length(arena + at);
        if (!validate_length(r, c, length))
            return;
        if (end - at - 4 < length)
            break;
        if (!mqd_connection_may_read(r, c) || !mqd_throttle_admit(r, c, arena + at + 4, length)) {
            keep_frames(r, c, arena + at, end - at);
            return;
        }
        c->expects_large = length + 4 > LARGE_FRAME_BYTES;
        /* the frame's bytes stay used even if the connection closes, because a staged batch stays
         * in the window until it is written */
        r->window_used = at + 4 + length;
        mqd_connection_on_frame(r, c, arena + at + 4, length, window + at + 4);
        if (c->fd < 0)
            return;
        at += 4 + length;
    }
    keep_rest(r, c, arena + at, end - at);
    if (c->fd >= 0 && c->partial_bytes == 0 && c->partial_capacity)
        partial_drop(r, c);
}

/* The frame in `partial` is known to be large but has no run yet: tries to allocate one. */
static bool resume_large(struct mqd_reactor *r, struct mqd_connection *c, uint32_t total)
{
    if (total > r->run_bytes_max) {
        if (!mqd_large_begin(r, c, total) || !mqd_large_touch(r, c, 0, c->partial_bytes))
            return false;
        memcpy(r->options.arenas[r->options.self] + c->run_offset, c->partial, c->partial_bytes);
        c->run_filled = c->partial_bytes;
        c->expects_large = 1;
    } else if (!run_begin(r, c, total, c->partial, c->partial_bytes)) {
        if (!r->run_waiter)
            r->run_waiter = c;
        stall(r, c);
        return false;
    }
    partial_drop(r, c);
    return true;
}

/* Handles complete frames that were kept in `partial`. */
static void handle_kept(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (!ensure_window(r, c->partial_bytes)) {
        stall(r, c);
        return;
    }
    c->last_active_ms = r->now_ms;
    memcpy(r->options.arenas[r->options.self] + r->window_offset + r->window_used, c->partial, c->partial_bytes);
    handle_window(r, c, r->window_used, c->partial_bytes);
}

void mqd_connection_read(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (!c->readable || !mqd_connection_may_read(r, c) || !mqd_throttle_admit(r, c, NULL, 0)) {
        if (r->run_waiter == c)
            r->run_waiter = NULL; /* the connection may be muted for minutes: others must not wait for it */
        return;
    }
    if (c->tls && !mqd_secure_established(c)) {
        mqd_secure_handshake(r, c);
        return;
    }
    if (r->options.rights && !mqd_subject_attach(r, c))
        return;
    if (c->local) {
        mqd_local_read(r, c);
        if (r->run_waiter == c && !mqd_list_linked(&c->stall_node))
            r->run_waiter = NULL; /* its client has sent a smaller frame instead */
        return;
    }
    uint32_t total = 0;
    if (c->partial_bytes >= 4) {
        total = 4 + read_length(c->partial);
        if (c->partial_bytes >= total) {
            handle_kept(r, c);
            return;
        }
        if (total > LARGE_FRAME_BYTES && !resume_large(r, c, total))
            return;
    }
    if (c->run_offset >= 0) {
        read_run(r, c);
        return;
    }
    uint32_t need = c->partial_bytes + READ_BYTES_MIN > total ? c->partial_bytes + READ_BYTES_MIN : total;
    if (!ensure_window(r, need)) {
        stall(r, c);
        return;
    }
    uint32_t begin = r->window_used, got;
    uint8_t *at = r->options.arenas[r->options.self] + r->window_offset + begin;
    if (c->partial_bytes)
        memcpy(at, c->partial, c->partial_bytes);
    uint32_t room = MQD_EXTENT_BYTES - begin - c->partial_bytes;
    uint32_t limit = c->expects_large && c->partial_bytes < 4 ? 4 - c->partial_bytes : room;
    if (receive(r, c, at + c->partial_bytes, limit, &got) != 1)
        return;
    if (c->expects_large && limit < room)
        c->readable = 1;
    handle_window(r, c, begin, c->partial_bytes + got);
}

static bool has_unfinished_produce(const struct mqd_connection *c)
{
    for (const struct mqd_request *request = c->head; request; request = request->next)
        if (request->kind == MQD_REQUEST_PRODUCE && !request->complete)
            return true;
    return false;
}

/* True when both directions are closed and no bytes have moved for GONE_MS: pending responses may
 * take minutes and could not be delivered. False while the connection may be read, because requests
 * sent with acks=0 must be handled. False with a Produce in flight, which ends by its own time
 * limit: closing now would drop received requests that have not been handled yet. */
static bool is_gone(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    return c->broken && !c->local && r->now_ms - c->last_active_ms >= GONE_MS && !mqd_connection_may_read(r, c) &&
           !has_unfinished_produce(c);
}

/* Called when the client has shut down its sending side and its responses take a long time. If the
 * client still waits, its host answers the kernel's keepalive probes; if it has closed the socket,
 * the connection becomes `broken` within a minute. */
static void probe_client(struct mqd_connection *c)
{
    int on = 1, seconds = PROBE_S, count = PROBE_COUNT;
    setsockopt(c->fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
    setsockopt(c->fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
    setsockopt(c->fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(c->fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    c->hangup = HANGUP_PROBED;
}

/* Called once a second for each open connection. */
static void check_connection(struct mqd_reactor *r, struct mqd_connection *c)
{
    const char *overdue = mqd_large_overdue_reason(r, c);
    if (overdue || (overdue = mqd_secure_overdue_reason(r, c)) || (overdue = mqd_authentication_overdue_reason(r, c))) {
        mqd_connection_fail(r, c, overdue);
        return;
    }
    if (c->hangup && c->hangup != HANGUP_PROBED && !c->local && !mqd_connection_may_read(r, c))
        probe_client(c);
    if (is_gone(r, c))
        mqd_connection_close(r, c, "the client has disconnected");
    else
        /* it may have stalled on a full heap, and nothing signals when there is room again */
        mqd_connection_resume(r, c);
}

void mqd_connections_sweep(struct mqd_reactor *r)
{
    int64_t oldest = r->now_ms - r->options.connection_idle_ms_max;
    for (uint32_t i = r->local_count; i-- > 0;) /* closing an attachment moves the last one to this index */
        if (mqd_local_count_period(r->locals[i]))
            mqd_connection_close(r, r->locals[i]->connection, "the local client has ended");
    for (uint32_t i = 0; i < r->connection_end; i++)
        if (r->connections[i] && r->connections[i]->fd >= 0)
            check_connection(r, r->connections[i]);
    if (!r->options.connection_idle_ms_max)
        return;
    for (uint32_t i = 0; i < r->connection_end; i++) {
        struct mqd_connection *c = r->connections[i];
        /* its client has hung up or reads no responses, so the connection could stay forever */
        if (c && c->fd >= 0 && !c->muted && c->last_active_ms < oldest && (!c->local || mqd_output_pending_bytes(c)) &&
            (!c->inflight || c->hangup || c->closing || c->chunk_count || mqd_output_pending_bytes(c)))
            mqd_connection_close(r, c, "idle longer than connections.max.idle.ms");
    }
}
