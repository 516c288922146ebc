/* Large requests: those larger than half of the receive arena; their batches may be as large as
 * socket.request.max.bytes. They use a separate part at the end of the worker's mapping: their
 * bytes still have offsets that are valid in every process, but take no room from the requests of
 * other connections.
 *
 *   first bytes on the heap -> waits for its reservation, and the connection is not read ->
 *   received into its run of extents -> handled
 *
 * Invariants
 *   B1  a frame is received only after its whole declared size has been reserved, so two partly
 *       received frames never wait for each other's memory. Reservations are granted in order of
 *       arrival.
 *   B2  a reservation takes no page before bytes arrive (the segment is sparse), and returns its
 *       pages when the run is freed.
 *   B3  the first touch of a page is always by a system call. If /dev/shm is full the call fails
 *       with EFAULT and the connection ends; a store would raise SIGBUS.
 * Bounds: large.request.memory.bytes in total. A stalled client is disconnected, and sooner if
 * other connections wait (mqd_large_overdue_reason).
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/reactor.h"

#define CONTESTED_IDLE_MS 2000

bool mqd_frame_is_large(const struct mqd_reactor *r, uint64_t offset)
{
    return r->large && offset >= r->large_base;
}

void mqd_frame_hold(struct mqd_reactor *r, uint64_t offset)
{
    if (mqd_frame_is_large(r, offset))
        mqd_arena_hold(r->large, offset - r->large_base);
    else
        mqd_arena_hold(r->arena, offset);
}

void mqd_frame_release(struct mqd_reactor *r, uint64_t offset)
{
    if (!mqd_frame_is_large(r, offset)) {
        mqd_arena_release(r->arena, offset);
        return;
    }
    uint64_t start, size_bytes = mqd_arena_find_run(r->large, offset - r->large_base, &start);
    if (mqd_arena_release(r->large, offset - r->large_base) == 1)
        madvise(r->options.arenas[r->options.self] + r->large_base + start, size_bytes, MADV_REMOVE); /* B2 */
}

static bool reserve_run(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes)
{
    int64_t offset = mqd_arena_allocate(r->large, size_bytes);
    if (offset < 0)
        return false;
    c->run_offset = (int64_t)r->large_base + offset;
    c->run_bytes = size_bytes;
    c->run_filled = 0;
    c->run_began_ms = r->now_ms;
    return true;
}

bool mqd_large_begin(struct mqd_reactor *r, struct mqd_connection *c, uint32_t size_bytes)
{
    if (c->run_offset >= 0 && c->run_bytes >= size_bytes)
        return true;          /* its reservation was granted */
    if (c->run_offset >= 0) { /* a local client requests more than it waited for */
        mqd_frame_release(r, (uint64_t)c->run_offset);
        c->run_offset = -1;
    }
    if (mqd_list_empty(&r->large_waiting) && reserve_run(r, c, size_bytes))
        return true;
    mqd_stat(r, MQD_COUNT_LARGE_STALLS, 1);
    c->large_bytes = size_bytes;
    mqd_list_append(&r->large_waiting, &c->stall_node);
    return false;
}

bool mqd_large_zero(struct mqd_reactor *r, uint64_t offset, uint32_t size_bytes)
{
    uint8_t *at = r->options.arenas[r->options.self] + offset;
    while (size_bytes) {
        ssize_t got = read(r->zero_fd, at, size_bytes); /* B3 */
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        size_bytes -= (uint32_t)got;
    }
    return true;
}

bool mqd_large_touch(struct mqd_reactor *r, struct mqd_connection *c, uint32_t from, uint32_t size_bytes)
{
    bool touched = mqd_large_zero(r, (uint64_t)c->run_offset + from, size_bytes);
    if (!touched)
        mqd_connection_fail(r, c, mqd_large_full_reason);
    return touched;
}

const char *const mqd_large_full_reason =
    "no shared memory for a large request: make /dev/shm larger, or lower socket.request.max.bytes";

void mqd_large_grant(struct mqd_reactor *r)
{
    while (!mqd_list_empty(&r->large_waiting)) {
        struct mqd_connection *c = MQD_CONTAINER(r->large_waiting.next, struct mqd_connection, stall_node);
        if (!reserve_run(r, c, c->large_bytes))
            return;
        mqd_list_remove(&c->stall_node);
        mqd_connection_resume(r, c);
    }
}

const char *mqd_large_overdue_reason(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    if (c->local || c->run_offset < 0 || !mqd_frame_is_large(r, (uint64_t)c->run_offset))
        return NULL;
    bool contested = !mqd_list_empty(&r->large_waiting);
    int64_t limit_ms = r->options.large_ms_max,
            idle_limit_ms = contested && limit_ms > CONTESTED_IDLE_MS ? CONTESTED_IDLE_MS : limit_ms;
    if (!c->readable && r->now_ms - c->last_active_ms >= idle_limit_ms)
        return contested
                   ? "other connections wait for the memory reserved for its large request, but it has stopped sending"
                   : "the rest of its large request did not arrive within large.request.timeout.ms";
    if (contested && r->now_ms - c->run_began_ms >= limit_ms)
        return "other connections wait for the memory reserved for its large request, which has taken longer than"
               " large.request.timeout.ms";
    return NULL;
}
