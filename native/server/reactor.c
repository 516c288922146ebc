/* The reactor's start, loop and stop. See server/reactor.h for the order of a turn and the
 * invariants.
 *
 * Start: descriptors that are already in the inbound links were sent to a predecessor; they have
 * its tokens and generations, so they are dropped when they are read. Stop: connections are no
 * longer read; staged appends are written, dirty partitions are flushed, requests are answered
 * where possible, then the connections are closed. The caller still has to close the partitions
 * with mqd_reactor_partition_close.
 */
#include "log/planted_bugs.h"
#include "server/check/checks.h"
#include "server/reactor.h"
#include "server/share/share.h"
#include "server/slow/turn.h"
#include "server/rights/subject.h"

#include "server/tls/secure.h"
#include "shm/quota.h"
#include "shm/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define EVENTS_PER_WAIT 256
/* after this many bytes have been read, staged batches are written immediately, while they are in
 * the L2 cache, instead of at the end of the turn */
#define WRITE_EARLY_BYTES (96u << 10)
/* polling interval while the process is not ready yet, and after a connection could not be
 * accepted */
#define SERVE_POLL_NS 2000000
#define HOUSEKEEPING_MS 1000
#define IDLE_HOUSEKEEPING_MS 60000 /* so that the state of idle producers still expires */
#define STOP_MS_MAX 10000
#define STOP_RESPONSE_MS_MAX 1000
#define SCRATCH_KEEP_BYTES (1u << 20)

void mqd_observe_time(struct mqd_reactor *r, enum mqd_histogram histogram, int64_t elapsed_ns)
{
    uint64_t us = elapsed_ns > 0 ? (uint64_t)elapsed_ns / 1000 : 0;
    if (us > UINT32_MAX)
        us = UINT32_MAX;
    uint32_t log2 = 63 - (uint32_t)__builtin_clzll(us | 1);
    uint32_t quarter = log2 >= 2 ? (uint32_t)(us >> (log2 - 2)) & 3 : (uint32_t)(us << (2 - log2)) & 3;
    mqd_counter_add(&r->stats->histogram[histogram][log2 * 4 + quarter], 1);
}

void mqd_reactor_refresh_clock(struct mqd_reactor *r)
{
    struct timespec monotonic, wall;
    clock_gettime(CLOCK_MONOTONIC, &monotonic);
    clock_gettime(CLOCK_REALTIME_COARSE, &wall);
    r->now_ns = (int64_t)monotonic.tv_sec * 1000000000 + monotonic.tv_nsec;
    r->now_ms = r->now_ns / 1000000;
    r->wall_ms = (int64_t)wall.tv_sec * 1000 + wall.tv_nsec / 1000000;
    if (mqd_load_relaxed(&r->header->lease_deadline_ns) != INT64_MAX)
        mqd_leading_check_lease(r);
    else
        r->lease_lost = false;
}

void mqd_log(struct mqd_reactor *r, uint32_t level, uint64_t connection, uint32_t slot, const char *format, ...)
{
    if (level > mqd_load_relaxed(&r->header->log_level))
        return;
    struct mqd_event event = {.kind = MQD_EVENT_LOG, .slot = slot, .connection = connection, .level = level};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(event.text, sizeof event.text, format, arguments);
    va_end(arguments);
    mqd_reactor_emit(r, &event);
}

/* ---- the loop ---- */

static void on_event(struct mqd_reactor *r, const struct mqd_poll_event *event)
{
    uint64_t value = mqd_token_value(event->token);
    switch (mqd_token_kind_of(event->token)) {
    case MQD_TOKEN_CONNECTION: {
        struct mqd_connection *c = mqd_connection_by_token(r, value);
        if (!c)
            return;
        if (event->flags & MQD_POLL_HANGUP) {
            c->hangup = 1;
            c->broken |= (event->flags & MQD_POLL_BROKEN) != 0;
            mqd_throttle_unmute(r, c);
            if (c->head && c->head->kind == MQD_REQUEST_FETCH && c->head->set && c->head->set->request == c->head)
                mqd_fetch_evaluate(r, c->head, true);
        }
        if (c->local) {
            mqd_local_on_event(r, c, event->flags);
            return;
        }
        if (event->flags & (MQD_POLL_READABLE | MQD_POLL_HANGUP))
            c->readable = 1;
        if (event->flags & MQD_POLL_WRITABLE) {
            c->writable = 1;
            if ((c->chunk_count || mqd_output_pending_bytes(c)) && !mqd_list_linked(&c->output_node))
                mqd_list_append(&r->to_send, &c->output_node);
        }
        mqd_connection_resume(r, c);
        return;
    }
    case MQD_TOKEN_LOCAL_END: {
        struct mqd_connection *c = mqd_connection_by_token(r, value);
        if (c && c->local)
            mqd_local_on_end(r, c);
        return;
    }
    case MQD_TOKEN_LOCAL_MEMORY:
        mqd_local_memory_on_event(r);
        return;
    /* links, attachments and commands are checked every turn; the eventfds are edge-triggered and
     * need not be read */
    case MQD_TOKEN_WAKE:
    case MQD_TOKEN_COMMAND:
        return;
    case MQD_TOKEN_HANDOFF:
        mqd_handoff_accept(r);
        return;
    case MQD_TOKEN_SYNC:
        mqd_flush_on_done(r, value, event->result);
        return;
    case MQD_TOKEN_SYNCFS:
        mqd_flush_on_syncfs_done(r, value, event->result);
        return;
    case MQD_TOKEN_PREALLOCATE:
        mqd_preallocate_on_done(r, value, event->result);
        return;
    case MQD_TOKEN_SNAPSHOT:
        mqd_snapshot_on_done(r, value, event->result);
        return;
    case MQD_TOKEN_FETCHER:
        mqd_fetcher_on_event(r, value, event->flags);
        return;
    case MQD_TOKEN_RELAY:
        mqd_relay_on_event(r, value, event->flags);
        return;
    case MQD_TOKEN_TRUNCATION:
        mqd_truncation_on_done(r, value, event->result);
        return;
    case MQD_TOKEN_SECURE:
        mqd_secure_on_event(r);
        return;
    case MQD_TOKEN_CHECK:
        mqd_check_on_job(r, value);
        return;
    case MQD_TOKEN_SHARE:
        mqd_share_on_read_ahead(r, value);
        return;
    case MQD_TOKEN_VIEW:
        mqd_view_on_done(r, value);
        return;
    case MQD_TOKEN_READ_AHEAD:
        mqd_fetch_on_read_ahead(r, value, event->result);
        return;
    }
}

static void read_ready(struct mqd_reactor *r)
{
    struct mqd_node *node;
    uint32_t written_bytes = 0; /* turn_bytes at the last early write */
    for (int i = 0; i < MQD_READS_PER_TURN && r->turn_bytes < MQD_BYTES_PER_TURN && (node = mqd_list_pop(&r->ready));
         i++) {
        struct mqd_connection *c = MQD_CONTAINER(node, struct mqd_connection, ready_node);
        mqd_connection_read(r, c);
        mqd_connection_resume(r, c);
        if (r->turn_bytes - written_bytes > WRITE_EARLY_BYTES) {
            mqd_owner_write_all(r);
            written_bytes = r->turn_bytes;
        }
    }
}

static void respond_and_send(struct mqd_reactor *r)
{
    struct mqd_node *node;
    while ((node = mqd_list_pop(&r->to_respond)))
        mqd_connection_respond(r, MQD_CONTAINER(node, struct mqd_connection, response_node));
    while ((node = mqd_list_pop(&r->to_send))) {
        struct mqd_connection *c = MQD_CONTAINER(node, struct mqd_connection, output_node);
        mqd_output_send(r, c);
        /* responses may have been waiting for room in the output */
        if (c->fd >= 0 && c->head && (c->head->complete || c->relaying_count) && mqd_output_has_room(r, c) &&
            !mqd_list_linked(&c->response_node))
            mqd_list_append(&r->to_respond, &c->response_node);
    }
}

/* Makes the next turn begin with an empty window, in the same extent if nothing else holds it. */
static void window_renew(struct mqd_reactor *r)
{
    if (r->window_offset >= 0 && r->window_used) {
        mqd_arena_release(r->arena, (uint64_t)r->window_offset);
        r->window_offset = mqd_arena_allocate(r->arena, MQD_EXTENT_BYTES);
        r->window_used = 0;
    }
}

static uint64_t load_segments_generation(void *context, uint32_t slot)
{
    struct mqd_reactor *r = context;
    return mqd_load_acquire(&mqd_control_partition(r->options.control, slot)->segments_generation);
}

static void sweep_segments(struct mqd_reactor *r)
{
    uint64_t generation = mqd_load_acquire(&r->header->segments_generation);
    if (generation == r->swept_segments_generation)
        return;
    r->swept_segments_generation = generation;
    mqd_reader_sweep(r->reader, load_segments_generation, r);
}

/* Whether housekeeping would have nothing to do in the next second, if no event arrives. */
static bool no_housekeeping_due(const struct mqd_reactor *r)
{
    if (r->connection_count || r->local_count || r->local_memory_count || r->replicated_count || r->fetchers ||
        r->relays)
        return false;
    for (uint32_t slot = 0; slot < r->owned_end && r->owned_count; slot++)
        if (r->owned[slot] && (r->owned[slot]->retiring || (mqd_partition_dirty(r->owned[slot]->partition) &&
                                                            !r->log_dirs[r->owned[slot]->log_dir].failed)))
            return false;
    return true;
}

static int64_t housekeeping_due_ms(const struct mqd_reactor *r)
{
    return r->housekeeping_ms + (r->idle ? IDLE_HOUSEKEEPING_MS : HOUSEKEEPING_MS);
}

/* A turn with any cause other than housekeeping ends the idle state, and the main thread is
 * notified. */
static void note_activity(struct mqd_reactor *r, int event_count)
{
    if (event_count == 0 && r->now_ms >= housekeeping_due_ms(r))
        return;
    r->active = true;
    struct mqd_event event = {.kind = MQD_EVENT_RESUMED, .slot = UINT32_MAX};
    if (r->idle && mqd_reactor_emit(r, &event)) /* if the event queue is full, the next turn tries again */
        mqd_store_release(&r->idle, 0u);
}

/* Runs the periodic work of each partition, and queues idle partitions whose resources can be
 * released. */
static void do_periodic_work(struct mqd_reactor *r)
{
    uint64_t producers = 0;
    for (uint32_t slot = 0; slot < r->owned_end && r->owned_count; slot++) {
        struct mqd_owned *owned = r->owned[slot];
        if (!owned || owned->truncating == MQD_TRUNCATION_UNDER_WAY)
            continue;
        producers += mqd_partition_do_periodic_work(owned->partition, r->wall_ms);
        if (!mqd_list_linked(&owned->release_node) && mqd_partition_release_due(owned->partition, r->wall_ms))
            mqd_list_append(&r->to_release, &owned->release_node);
    }
    mqd_set_gauge(r, MQD_GAUGE_PRODUCERS, producers);
}

/* Releases only one partition in each turn: a release may block on the file system, and after a
 * burst of traffic thousands of partitions become idle at the same time. */
static void release_one_idle(struct mqd_reactor *r)
{
    struct mqd_node *node = mqd_list_pop(&r->to_release);
    struct mqd_owned *owned = node ? MQD_CONTAINER(node, struct mqd_owned, release_node) : NULL;
    bool is_idle = owned && owned->truncating != MQD_TRUNCATION_UNDER_WAY &&
                   mqd_partition_release_due(owned->partition, r->wall_ms);
    if (!is_idle && !(owned && PLANTED_LOG_BUG(CUT_UNCHECKED)))
        return;
    mqd_turn_part_begin(r);
    mqd_partition_release_idle(owned->partition, r->wall_ms);
    mqd_turn_add_time(r, MQD_TIME_LOOP_ALLOCATION, r->turn.part_start.now_ns);
    mqd_turn_part_end(r);
}

static void housekeeping(struct mqd_reactor *r, int event_count)
{
    note_activity(r, event_count);
    if (r->now_ms < housekeeping_due_ms(r))
        return;
    r->housekeeping_ms = r->now_ms;
    mqd_flush_background(r);
    mqd_connections_sweep(r);
    mqd_subjects_tick(r);
    if (r->fetchers)
        mqd_fetchers_report_log_starts(r);
    mqd_set_gauge(r, MQD_GAUGE_ARENA_EXTENTS_USED, mqd_arena_extents_used(r->arena));
    mqd_set_gauge(r, MQD_GAUGE_ARENA_EXTENTS_TOTAL, mqd_arena_extents_total(r->arena));
    mqd_set_gauge(r, MQD_GAUGE_HEAP_BYTES, r->heap_bytes);
    mqd_set_gauge(r, MQD_GAUGE_LARGE_REQUEST_BYTES,
                  r->large ? (uint64_t)mqd_arena_extents_used(r->large) * MQD_EXTENT_BYTES : 0);
    mqd_set_gauge(r, MQD_COUNT_WAKEUPS_SENT, mqd_endpoint_wake_count(r->endpoint));
    if (r->scratch.capacity_bytes > SCRATCH_KEEP_BYTES)
        mqd_buffer_free(&r->scratch);
    do_periodic_work(r);
    mqd_store_release(&r->idle, (uint32_t)(!r->active && no_housekeeping_due(r)));
    r->active = false;
}

int mqd_reactor_is_idle(const struct mqd_reactor *r)
{
    return (int)mqd_load_acquire(&r->idle);
}

void mqd_reactor_turn(struct mqd_reactor *r, const struct mqd_poll_event *events, int count)
{
    mqd_reactor_refresh_clock(r);
    int64_t began_ns = r->now_ns;
    mqd_turn_begin(r);
    r->turn_bytes = 0;
    mqd_stat(r, MQD_COUNT_LOOPS, 1);
    for (int i = 0; i < count; i++)
        on_event(r, &events[i]);
    if (mqd_quota_version(r->options.control) != r->quota_version)
        mqd_throttle_refresh(r);
    if (r->muted_count)
        mqd_throttle_run(r);
    mqd_links_drain(r);
    mqd_commands_run(r);
    if (!r->serving && r->options.handoff_fd >= 0)
        mqd_handoff_accept(r); /* takes connections that were handed over before the process was ready */
    sweep_segments(r);
    if (!mqd_list_empty(&r->stalled))
        mqd_connections_resume_stalled(r);
    if (!mqd_list_empty(&r->large_waiting))
        mqd_large_grant(r);
    if (r->local_count)
        mqd_locals_poll(r);
    if (!r->stop) {
        read_ready(r);
        if (r->fetchers)
            mqd_fetchers_read(r);
    }
    if (r->relays)
        mqd_relays_read(r);
    if (!mqd_list_empty(&r->queries))
        mqd_locals_respond(r);
    /* a fetch that was just read must see records that were acknowledged before it was sent, and
     * whose notification may have arrived by now */
    mqd_links_drain(r);
    mqd_owner_write_all(r);
    mqd_owner_wake_all(r);
    mqd_fetch_run_woken(r);
    mqd_timers_run(r);
    mqd_share_pump(r);
    mqd_leading_tick(r);
    mqd_flush_start_all(r);
    if (r->waiting_truncation_count)
        mqd_truncations_retry(r);
    if (r->fetchers)
        mqd_fetchers_run(r);
    if (r->relays)
        mqd_relays_run(r);
    mqd_reactor_refresh_clock(r);
    mqd_forward_flush(r); /* readers are notified of a record before its producer gets the acknowledgement */
    respond_and_send(r);
    mqd_control_send_queued(r);
    mqd_check_send_queued(r);
    mqd_forward_flush(r);
    window_renew(r);
    release_one_idle(r);
    housekeeping(r, count);
    mqd_turn_end(r);
    if (count || r->now_ns - began_ns > 1000000)
        mqd_observe_time(r, MQD_TIME_LOOP, r->now_ns - began_ns);
}

static int64_t sleep_ns(struct mqd_reactor *r)
{
    if (!mqd_list_empty(&r->ready) || !mqd_list_empty(&r->to_respond) || !mqd_list_empty(&r->to_send) ||
        !mqd_list_empty(&r->woken) || !mqd_list_empty(&r->to_write) || !mqd_list_empty(&r->to_wake) ||
        !mqd_list_empty(&r->queries) || !mqd_list_empty(&r->to_release) || mqd_load_acquire(&r->command_waiting))
        return r->stop ? 1000000 : 0;
    int64_t until_ns = housekeeping_due_ms(r) * 1000000;
    int64_t timer_ms = mqd_timers_next_ms(r);
    if (timer_ms >= 0 && timer_ms * 1000000 < until_ns)
        until_ns = timer_ms * 1000000;
    if (r->group_commit_deadline_ns && (int64_t)r->group_commit_deadline_ns < until_ns)
        until_ns = (int64_t)r->group_commit_deadline_ns;
    if (r->muted_count && r->mute_due_tick * MQD_MUTE_TICK_MS * 1000000 < until_ns)
        until_ns = r->mute_due_tick * MQD_MUTE_TICK_MS * 1000000;
    int64_t fetcher_ms = r->fetchers ? mqd_fetchers_next_ms(r) : -1;
    if (fetcher_ms >= 0 && fetcher_ms * 1000000 < until_ns)
        until_ns = fetcher_ms * 1000000;
    int64_t share_ms = r->shares ? mqd_shares_next_ms(r) : MQD_SHARE_NEVER;
    if (share_ms < until_ns / 1000000)
        until_ns = share_ms * 1000000;
    int64_t leading_ms = mqd_leading_next_ms(r);
    if (leading_ms >= 0 && leading_ms * 1000000 < until_ns)
        until_ns = leading_ms * 1000000;
    int64_t relay_ms = r->relays ? mqd_relays_next_ms(r) : -1;
    if (relay_ms >= 0 && relay_ms * 1000000 < until_ns)
        until_ns = relay_ms * 1000000;
    int64_t limit_ns = r->stop                                     ? 1000000
                       : mqd_forward_pending(r)                    ? 100000
                       : !r->serving && r->options.handoff_fd >= 0 ? SERVE_POLL_NS
                       : !mqd_list_empty(&r->stalled) || !mqd_list_empty(&r->large_waiting) ||
                               !mqd_list_empty(&r->query_later) || !mqd_list_empty(&r->control_turns) ||
                               !mqd_list_empty(&r->check_queue)
                           ? 20000000
                           : INT64_MAX;
    int64_t ns = until_ns - r->now_ns;
    return ns < 0 ? 0 : ns < limit_ns ? ns : limit_ns;
}

static int wait_events(struct mqd_reactor *r, struct mqd_poll_event *events)
{
    int64_t timeout_ns = sleep_ns(r);
    if (timeout_ns == 0)
        return mqd_poll_wait(r->poll, events, EVENTS_PER_WAIT, 0);
    if (r->options.spin_us) {
        int64_t end_ns = r->now_ns + (int64_t)r->options.spin_us * 1000;
        while (r->now_ns < end_ns) {
            int count = mqd_poll_wait(r->poll, events, EVENTS_PER_WAIT, 0);
            if (count || mqd_endpoint_has_inbound(r->endpoint) || mqd_locals_waiting(r))
                return count;
            mqd_reactor_refresh_clock(r);
        }
    }
    if (mqd_endpoint_prepare_sleep(r->endpoint) || mqd_locals_waiting(r))
        timeout_ns = 0;
    int count = mqd_poll_wait(r->poll, events, EVENTS_PER_WAIT, timeout_ns);
    mqd_endpoint_end_sleep(r->endpoint);
    return count;
}

/* Queues the flushes that are still needed. Returns true when everything submitted to mqd_poll has
 * ended and everything written is on disk. */
static bool finish_file_work(struct mqd_reactor *r)
{
    for (uint32_t slot = 0; slot < r->owned_end && r->owned_count; slot++) {
        struct mqd_owned *owned = r->owned[slot];
        if (!owned)
            continue;
        if (owned->truncating)
            return false;
        bool dirty = mqd_partition_dirty(owned->partition) && !r->log_dirs[owned->log_dir].failed;
        if (dirty && !owned->syncs_pending && !owned->in_syncfs && !mqd_list_linked(&owned->sync_node)) {
            mqd_list_append(&r->log_dirs[owned->log_dir].to_sync, &owned->sync_node);
            r->log_dirs[owned->log_dir].to_sync_count++;
        }
        if (dirty || owned->syncs_pending || owned->in_syncfs || owned->preallocating || owned->snapshotting)
            return false;
    }
    return true;
}

static bool all_answered(const struct mqd_reactor *r)
{
    for (uint32_t i = 0; i < r->connection_end && r->connection_count; i++) {
        const struct mqd_connection *c = r->connections[i];
        if (c && c->fd >= 0 && (mqd_output_pending_bytes(c) || (c->head && c->head->kind == MQD_REQUEST_PRODUCE)))
            return false;
    }
    return true;
}

static void drain(struct mqd_reactor *r, struct mqd_poll_event *events)
{
    int64_t began_ms = r->now_ms;
    for (;;) {
        mqd_reactor_turn(r, events, wait_events(r, events));
        int64_t waited_ms = r->now_ms - began_ms;
        if (waited_ms > STOP_MS_MAX || (finish_file_work(r) && (all_answered(r) || waited_ms > STOP_RESPONSE_MS_MAX)))
            break;
    }
    for (uint32_t i = 0; i < r->connection_end; i++)
        if (r->connections[i] && r->connections[i]->fd >= 0)
            mqd_connection_close(r, r->connections[i], "the broker is stopping");
    while (r->cold_read_count && r->now_ms - began_ms <= STOP_MS_MAX)
        mqd_reactor_turn(r, events, wait_events(r, events));
    mqd_forward_flush(r);
}

/* Called after mqd_poll_destroy, which drops the events of work still in flight: a flush with an
 * unknown outcome is treated as failed. */
static void abandon_file_work(struct mqd_reactor *r)
{
    for (uint32_t slot = 0; slot < r->owned_end && r->owned_count; slot++) {
        struct mqd_owned *owned = r->owned[slot];
        if (!owned)
            continue;
        if (owned->syncs_pending || owned->in_syncfs) {
            mqd_list_remove(&owned->sync_node);
            owned->syncs_pending = owned->in_syncfs = 0;
            mqd_partition_sync_done(owned->partition, EIO);
        }
        if (owned->preallocating)
            mqd_partition_preallocate_done(owned->partition, EAGAIN);
        owned->preallocating = owned->snapshotting = 0;
        if (owned->truncating == MQD_TRUNCATION_UNDER_WAY)
            mqd_truncation_on_done(r, slot, 0); /* the thread pool, and so the truncation, has ended */
        else
            mqd_owned_maybe_close(r, owned);
    }
}

static void pin_to_cpu(struct mqd_reactor *r)
{
    cpu_set_t cpus;
    if (r->options.cpu < 0)
        return;
    CPU_ZERO(&cpus);
    CPU_SET(r->options.cpu, &cpus);
    if (pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus))
        mqd_log(r, 4, 0, UINT32_MAX, "worker.cpus names CPU %d, which this process may not use; running unpinned",
                r->options.cpu);
}

/* Called on the reactor's own thread: io_uring accepts submissions only from the thread that
 * created the ring. */
static bool open_poll(struct mqd_reactor *r)
{
    const struct mqd_reactor_options *o = &r->options;
    if (mqd_poll_create(&r->poll, o->backend, r->connection_capacity) < 0)
        return false;
    r->backend = mqd_poll_backend(r->poll);
    return mqd_poll_add(r->poll, o->eventfds[o->self], mqd_token(MQD_TOKEN_WAKE, 0)) == 0 &&
           mqd_poll_add(r->poll, r->command_fd, mqd_token(MQD_TOKEN_COMMAND, 0)) == 0 && mqd_secure_watch(r) &&
           (o->handoff_fd < 0 || mqd_poll_add(r->poll, o->handoff_fd, mqd_token(MQD_TOKEN_HANDOFF, 0)) == 0);
}

static void *run(void *argument)
{
    struct mqd_reactor *r = argument;
    struct mqd_poll_event events[EVENTS_PER_WAIT];
    char name[16];
    snprintf(name, sizeof name, "mqd-reactor-%u", r->options.self);
    pthread_setname_np(pthread_self(), name);
    pin_to_cpu(r);
    mqd_turn_open(r);
    if (!open_poll(r)) {
        r->start_error = mqd_error_code() ? mqd_error_code() : EIO;
        snprintf(r->start_message, sizeof r->start_message, "%s", mqd_error_message());
    }
    bool opened = r->start_error == 0;
    sem_post(&r->start_done);
    if (opened) {
        while (!r->stop) {
            int count = wait_events(r, events);
            mqd_reactor_turn(r, events, count < 0 ? 0 : count);
        }
        drain(r, events);
    }
    mqd_fetchers_close(r);
    mqd_relays_close(r);
    if (r->poll)
        mqd_poll_destroy(r->poll);
    r->poll = NULL;
    abandon_file_work(r);
    mqd_turn_close(r);
    return NULL;
}

int mqd_reactor_start(struct mqd_reactor *r)
{
    sigset_t all_signals, old_mask;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_BLOCK, &all_signals, &old_mask); /* the main thread handles signals */
    pthread_mutex_lock(&r->mutex);
    int error = pthread_create(&r->thread, NULL, run, r);
    r->started = error == 0;
    pthread_mutex_unlock(&r->mutex);
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
    if (error)
        return mqd_error_system(error, "the reactor thread could not be started");
    while (sem_wait(&r->start_done) < 0 && errno == EINTR)
        ;
    if (r->start_error == 0)
        return 0;
    pthread_join(r->thread, NULL);
    r->started = false;
    return mqd_error_set(r->start_error, "%s", r->start_message);
}

int mqd_reactor_stop(struct mqd_reactor *r)
{
    if (!r->started || r->stopped)
        return 0;
    r->stop = true;
    eventfd_write(r->command_fd, 1);
    pthread_join(r->thread, NULL);
    pthread_mutex_lock(&r->mutex);
    r->stopped = true;
    pthread_mutex_unlock(&r->mutex);
    mqd_commands_run(r);
    return 0;
}
