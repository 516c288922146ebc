/* Creates and destroys a reactor (mqd_reactor_create, mqd_reactor_destroy). Its thread and loop:
 * server/reactor.c. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "log/views/view_cache.h"
#include "server/check/checks.h"
#include "server/reactor.h"
#include "server/rights/subject.h"
#include "server/share/share.h"
#include "server/tls/secure.h"
#include "shm/quota.h"
#include "shm/tally.h"
#include "shm/ring.h"

static void init_lists(struct mqd_reactor *r)
{
    struct mqd_node *lists[] = {
        &r->ready,   &r->stalled,     &r->to_send,       &r->to_respond,    &r->to_write,     &r->with_waiting_records,
        &r->to_wake, &r->sessions,    &r->woken,         &r->control_turns, &r->control_sent, &r->check_queue,
        &r->queries, &r->query_later, &r->large_waiting, &r->to_release};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        mqd_list_init(lists[i]);
    for (uint32_t i = 0; i < MQD_PARTITION_SLOT_COUNT; i++)
        mqd_list_init(&r->waiting[i]);
    for (uint32_t i = 0; i < MQD_LOOKUP_BUCKET_COUNT; i++)
        mqd_list_init(&r->lookups[i]);
    for (uint32_t i = 0; i < MQD_ENDPOINT_COUNT_MAX; i++)
        mqd_list_init(&r->forwarded_to[i]);
    for (uint32_t i = 0; i < MQD_LOG_DIR_COUNT_MAX; i++) {
        mqd_list_init(&r->log_dirs[i].to_sync);
        mqd_list_init(&r->log_dirs[i].in_syncfs);
        r->log_dirs[i].fd = -1;
    }
    for (uint32_t i = 0; i < MQD_CONTROL_REQUEST_COUNT_MAX; i++) {
        r->control_entries[i].sequence = (uint32_t)(r->generation << 20);
        r->control_entries[i].next_free = i + 1 < MQD_CONTROL_REQUEST_COUNT_MAX ? i + 1 : UINT32_MAX;
    }
    r->forward_free = r->check_free = UINT32_MAX;
    for (uint32_t i = 0; i < MQD_MUTE_TICK_COUNT; i++)
        mqd_list_init(&r->mute_wheel[i]);
    r->mute_due_tick = INT64_MAX;
}

static bool init_memory(struct mqd_reactor *r)
{
    const struct mqd_reactor_options *o = &r->options;
    uint64_t bytes = o->arena_bytes[o->self] - o->large_bytes;
    r->control_arena_base = bytes / 4 * 3 / MQD_EXTENT_BYTES * MQD_EXTENT_BYTES;
    r->arena = mqd_arena_open(o->arenas[o->self], r->control_arena_base, MQD_EXTENT_BYTES);
    r->control_arena = mqd_arena_open(o->arenas[o->self] + r->control_arena_base, bytes - r->control_arena_base,
                                      MQD_CONTROL_EXTENT_BYTES);
    r->large_base = bytes;
    /* + 4, because the limit includes the frame's length word */
    r->run_bytes_max = bytes / 2 + 4 < UINT32_MAX ? (uint32_t)(bytes / 2 + 4) : UINT32_MAX;
    if (o->large_bytes && !(r->large = mqd_arena_open(o->arenas[o->self] + bytes, o->large_bytes, MQD_EXTENT_BYTES)))
        return false;
    r->reader = mqd_reader_create(o->read_fd_count_max);
    r->connection_capacity = o->connection_count_max < 65536 ? 65536 : o->connection_count_max;
    r->connections = calloc(r->connection_capacity, sizeof *r->connections);
    r->free_indexes = malloc(sizeof *r->free_indexes * r->connection_capacity);
    r->commands = calloc(MQD_COMMAND_COUNT_MAX, sizeof *r->commands);
    r->events = calloc(MQD_EVENT_COUNT_MAX, sizeof *r->events);
    r->session_table = calloc(MQD_SESSION_TABLE_COUNT, sizeof *r->session_table);
    r->quota_limits = mqd_quota_limits_open();
    if (!r->arena || !r->control_arena || !r->reader || !r->connections || !r->free_indexes || !r->commands ||
        !r->events || !r->session_table || !r->quota_limits || !mqd_subjects_create(r))
        return false;
    /* lowest index first: the few connections of an idle broker share cache lines */
    for (uint32_t i = 0; i < r->connection_capacity; i++)
        r->free_indexes[i] = r->connection_capacity - 1 - i;
    r->free_index_count = r->connection_capacity;
    return true;
}

struct mqd_reactor *mqd_reactor_create(const struct mqd_reactor_options *options)
{
    uint64_t arena_bytes = options->arena_bytes[options->self] - options->large_bytes;
    if (!options->arenas[options->self] || options->large_bytes > options->arena_bytes[options->self] ||
        arena_bytes < 1 << 20 || arena_bytes % MQD_EXTENT_BYTES ||
        (options->request_bytes_max > arena_bytes / 2 && options->request_bytes_max + 4ull > options->large_bytes)) {
        mqd_error_set(
            MQD_E_INVALID,
            "socket.request.max.bytes=%u fits neither in half of the %llu-byte receive arena nor in the %llu bytes "
            "of memory for large requests",
            options->request_bytes_max, (unsigned long long)arena_bytes, (unsigned long long)options->large_bytes);
        return NULL;
    }
    struct mqd_reactor *r = calloc(1, sizeof *r);
    if (!r) {
        mqd_error_set(ENOMEM, "out of memory for the reactor");
        return NULL;
    }
    r->options = *options;
    r->header = mqd_control_header(options->control);
    r->slot = mqd_control_endpoint(options->control, options->self);
    r->stats = mqd_control_stats(options->control, options->self);
    r->generation = mqd_load_acquire(&r->slot->generation);
    r->window_offset = -1;
    r->connection_count_max = options->connection_count_max;
    r->broker_connection_count_max = UINT32_MAX;
    r->command_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    r->zero_fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    r->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&r->mutex, NULL);
    sem_init(&r->start_done, 0, 0);
    init_lists(r);
    mqd_reactor_refresh_clock(r);
    r->random_state = (uint64_t)r->now_ns * 0x9e3779b97f4a7c15ull | 1;
    bool ok = r->command_fd >= 0 && r->event_fd >= 0 && r->zero_fd >= 0 && init_memory(r);
    if (ok)
        r->endpoint = mqd_endpoint_open(options->control, options->links, options->self, options->endpoint_count,
                                        options->eventfds);
    else
        mqd_error_set(ENOMEM, "out of memory or file descriptors for the reactor");
    if (!ok || !r->endpoint) {
        mqd_reactor_destroy(r);
        return NULL;
    }
    mqd_store_relaxed(&r->slot->connection_count, 0u);
    mqd_tally_reset(options->control, options->self);
    mqd_set_gauge(r, MQD_GAUGE_LOCAL_ATTACHMENTS, 0); /* clears the value of a predecessor */
    mqd_set_gauge(r, MQD_GAUGE_LOCAL_BYTES, 0);
    mqd_set_gauge(r, MQD_GAUGE_SHARE_SESSIONS, 0);
    mqd_set_gauge(r, MQD_GAUGE_VIEW_CACHE_BYTES, 0);
    mqd_store_relaxed(&r->slot->partition_count, 0u);
    return r;
}

int mqd_reactor_backend(struct mqd_reactor *r)
{
    return r->backend;
}

/* Frees the requests that are left after all clients have disconnected: those whose appends still
 * wait, here or at another worker, and those that the acceptor has not answered. */
static void destroy_requests(struct mqd_reactor *r)
{
    for (uint32_t i = 0; i < MQD_PARTITION_SLOT_COUNT; i++)
        if (r->owned[i])
            mqd_owner_fail_all(r, r->owned[i], MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
    for (uint32_t i = 0; i < MQD_ENDPOINT_COUNT_MAX; i++)
        while (!mqd_list_empty(&r->forwarded_to[i]))
            mqd_append_done(r, MQD_CONTAINER(r->forwarded_to[i].next, struct mqd_append, node),
                            MQD_KAFKA_REQUEST_TIMED_OUT);
    for (uint32_t i = 0; i < MQD_CONTROL_REQUEST_COUNT_MAX; i++)
        if (r->control_entries[i].request)
            mqd_request_free(r, r->control_entries[i].request);
}

void mqd_reactor_destroy(struct mqd_reactor *r)
{
    if (!r)
        return;
    if (r->started && !r->stopped)
        mqd_reactor_stop(r);
    while (!mqd_list_empty(&r->sessions))
        mqd_session_remove(r, MQD_CONTAINER(r->sessions.next, struct mqd_fetch_set, session_node));
    mqd_shares_destroy(r);
    mqd_topics_clear(&r->topics);
    mqd_reply_cache_clear(r);
    mqd_subjects_destroy(r);
    for (uint32_t i = 0; i < MQD_LOG_DIR_COUNT_MAX; i++) {
        free(r->log_dirs[i].path);
        if (r->log_dirs[i].fd >= 0)
            close(r->log_dirs[i].fd);
    }
    mqd_relays_destroy(r);
    mqd_secure_destroy(r);
    mqd_checks_destroy(r);
    destroy_requests(r);
    for (uint32_t i = 0; i < MQD_PARTITION_SLOT_COUNT; i++) {
        struct mqd_owned *owned = r->owned[i];
        if (!owned)
            continue;
        mqd_replication_free(r, owned);
        mqd_commands_free_deferred(owned);
        free(owned->truncation_job);
        free(owned); /* the caller owns the partition itself */
    }
    mqd_fetchers_destroy(r);
    mqd_local_memory_destroy(r);
    for (uint32_t i = 0; i < MQD_ENDPOINT_COUNT_MAX; i++)
        free(r->overflow[i]);
    while (r->free_requests) {
        struct mqd_request *request = r->free_requests;
        r->free_requests = request->next;
        free(request);
    }
    while (r->free_appends) {
        struct mqd_append *append = r->free_appends;
        r->free_appends = (struct mqd_append *)append->node.next;
        free(append);
    }
    for (uint32_t i = 0; r->connections && i < r->connection_capacity; i++)
        free(r->connections[i]);
    if (r->endpoint)
        mqd_endpoint_close(r->endpoint);
    if (r->reader)
        mqd_reader_destroy(r->reader);
    mqd_view_cache_destroy(r->views.cache);
    if (r->arena)
        mqd_arena_close(r->arena);
    if (r->control_arena)
        mqd_arena_close(r->control_arena);
    if (r->large)
        mqd_arena_close(r->large);
    mqd_buffer_free(&r->scratch);
    free(r->scratch_chunks);
    free(r->connections);
    free(r->free_indexes);
    free(r->commands);
    for (uint32_t i = 0; r->events && i < r->event_count; i++)
        mqd_proposal_free(r->events[(r->event_head + i) % MQD_EVENT_COUNT_MAX].proposal);
    free(r->events);
    free(r->session_table);
    mqd_quota_limits_close(r->quota_limits);
    free(r->timers);
    free(r->forwards);
    close(r->command_fd);
    close(r->event_fd);
    close(r->zero_fd);
    pthread_mutex_destroy(&r->mutex);
    sem_destroy(&r->start_done);
    free(r);
}
