/* Commands from the worker's main thread to the reactor, and events in the other direction. Their
 * queues are the only state of the reactor that two threads touch; one mutex guards them and is held
 * for a few stores.
 *
 * Each command is answered by exactly one MQD_EVENT_DONE with its token, even after the reactor has
 * been stopped: the caller's thread then executes the command.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "log/compaction/api.h"
#include "server/reactor.h"
#include "server/redirect.h"
#include "server/rights/subject.h"
#include "server/tls/secure.h"
#include "tls/api.h"

/* ---- events ---- */

#define UNSOLICITED_COUNT_MAX (MQD_EVENT_COUNT_MAX - MQD_COMMAND_COUNT_MAX) /* events that do not answer a command */
/* of these, reserved for events that are neither sent again nor discovered otherwise */
#define RESERVED_COUNT 1024

/* The number of events that may wait before this one is dropped. A command's response is never
 * dropped: at most MQD_COMMAND_COUNT_MAX commands are accepted before their responses are taken.
 * Dropped first: log lines, changes that retention finds by itself, and events that are sent again
 * (proposals, a leader's log start). Dropped last: ends of connections to other hosts, because
 * these would never be reopened, and failures of log directories; both are rare. */
static uint32_t queue_limit_of(const struct mqd_event *event)
{
    switch (event->kind) {
    case MQD_EVENT_DONE:
        return MQD_EVENT_COUNT_MAX;
    case MQD_EVENT_LOG:
    case MQD_EVENT_DENIED:
    case MQD_EVENT_ROLLED:
    case MQD_EVENT_PROPOSE_IN_SYNC:
    case MQD_EVENT_LOG_START:
        return UNSOLICITED_COUNT_MAX / 4;
    case MQD_EVENT_FETCHER_ENDED:
    case MQD_EVENT_RELAY_ENDED:
    case MQD_EVENT_LOG_DIR_FAILED:
    case MQD_EVENT_LOG_DIR_FULL:
    case MQD_EVENT_SUBJECT_GONE:
        return UNSOLICITED_COUNT_MAX;
    default:
        return UNSOLICITED_COUNT_MAX - RESERVED_COUNT;
    }
}

bool mqd_reactor_emit(struct mqd_reactor *r, const struct mqd_event *event)
{
    pthread_mutex_lock(&r->mutex);
    bool fits = r->event_count < queue_limit_of(event);
    if (!fits) {
        r->events_dropped++;
        mqd_proposal_free(event->proposal);
    } else {
        r->events[(r->event_head + r->event_count++) % MQD_EVENT_COUNT_MAX] = *event;
        if (r->event_count == 1)
            eventfd_write(r->event_fd, 1);
    }
    pthread_mutex_unlock(&r->mutex);
    return fits;
}

int mqd_reactor_event_fd(struct mqd_reactor *r)
{
    return r->event_fd;
}

int mqd_reactor_next_event(struct mqd_reactor *r, struct mqd_event *out)
{
    pthread_mutex_lock(&r->mutex);
    int got = r->event_count > 0;
    if (got) {
        *out = r->events[r->event_head];
        r->event_head = (r->event_head + 1) % MQD_EVENT_COUNT_MAX;
        r->event_count--;
        r->unanswered_count -= out->kind == MQD_EVENT_DONE;
    } else {
        eventfd_t value;
        eventfd_read(r->event_fd, &value);
    }
    pthread_mutex_unlock(&r->mutex);
    return got;
}

void mqd_command_done(struct mqd_reactor *r, uint64_t token, int error, uint32_t slot, int64_t offset,
                      struct mqd_partition *partition, const char *text)
{
    struct mqd_event event = {
        .kind = MQD_EVENT_DONE, .slot = slot, .token = token, .error = error, .offset = offset, .partition = partition};
    snprintf(event.text, sizeof event.text, "%s", text ? text : "");
    mqd_reactor_emit(r, &event);
}

/* ---- executing commands ---- */

static void set_log_dir(struct mqd_reactor *r, const struct mqd_command *command)
{
    struct mqd_log_directory *dir = &r->log_dirs[command->number];
    free(dir->path);
    dir->path = strdup(command->text);
    if (dir->fd >= 0)
        close(dir->fd);
    dir->fd = open(command->text, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = dir->fd < 0 ? errno : 0;
    mqd_command_done(r, command->token, error, UINT32_MAX, 0, NULL, error ? strerror(error) : "");
}

/* Publishes the options that workers need when they receive batches for the partition. */
static void publish_options(struct mqd_partition_slot *slot, const struct mqd_log_options *options)
{
    mqd_store_relaxed(&slot->compression_level, options->compression_level);
    mqd_store_relaxed(&slot->message_bytes_max, options->max_message_bytes);
    mqd_store_release(&slot->compression, options->compression);
    mqd_store_release(&slot->compacted, options->compacted);
    mqd_store_release(&slot->validation, options->validation);
    mqd_store_release(&slot->flush_on_ack, options->flush_on_ack);
    mqd_store_relaxed(&slot->share_priority, options->share_priority);
}

static void partition_open(struct mqd_reactor *r, const struct mqd_command *command)
{
    bool is_served = r->owned[command->slot] != NULL;
    struct mqd_owned *owned = is_served ? NULL : calloc(1, sizeof *owned);
    if (!owned) {
        mqd_command_done(r, command->token, is_served ? EEXIST : ENOMEM, command->slot, 0, command->partition,
                         is_served ? "the slot is already served by this worker" : "out of memory for a partition");
        return;
    }
    owned->partition = command->partition;
    owned->slot = command->slot;
    owned->log_dir = command->number;
    owned->high_watermark = -1;
    mqd_list_init(&owned->staged);
    mqd_list_init(&owned->waiting);
    mqd_list_init(&owned->write_node);
    mqd_list_init(&owned->publish_node);
    mqd_list_init(&owned->sync_node);
    mqd_list_init(&owned->release_node);
    mqd_leading_on_open(r, owned);
    r->owned[command->slot] = owned;
    r->owned_count++;
    if (command->slot >= r->owned_end)
        r->owned_end = command->slot + 1;
    mqd_store_relaxed(&r->slot->partition_count, r->owned_count);
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, command->slot);
    mqd_fetch_add(&slot->segments_generation, 1);
    mqd_store_release(&slot->owner_generation, r->generation);
    mqd_partition_set_leader_epoch(owned->partition, mqd_load_relaxed(&slot->leader_epoch));
    publish_options(slot, mqd_partition_options(owned->partition));
    mqd_redirect_on_open(r, owned);
    mqd_owner_publish(r, owned);
    mqd_store_release(&slot->state, (uint8_t)MQD_SLOT_ONLINE);
    if (mqd_partition_dirty(owned->partition))
        mqd_flush_request(r, owned);
    mqd_command_done(r, command->token, 0, command->slot, mqd_partition_log_end_offset(owned->partition), NULL, "");
}

static void partition_close(struct mqd_reactor *r, const struct mqd_command *command)
{
    struct mqd_owned *owned = r->owned[command->slot];
    if (!owned || owned->closing) {
        mqd_command_done(r, command->token, ENOENT, command->slot, 0, NULL, "the slot is not served by this worker");
        return;
    }
    mqd_owner_write_all(r);
    owned->closing = 1;
    owned->close_token = command->token;
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, command->slot);
    mqd_store_release(&slot->state, (uint8_t)MQD_SLOT_OFFLINE);
    mqd_fetch_add(&slot->segments_generation, 1);
    mqd_fetch_add(&r->header->segments_generation, 1);
    mqd_owner_wake_slot(r, command->slot);
    mqd_owned_maybe_close(r, owned);
}

/* Makes readers of all workers list the partition's segments again and close deleted files. */
static void reload_segments(struct mqd_reactor *r, uint32_t slot_index)
{
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, slot_index);
    mqd_fetch_add(&slot->segments_generation, 1);
    mqd_fetch_add(&r->header->segments_generation, 1);
    for (uint32_t worker = 0; worker < mqd_control_worker_count(r->options.control); worker++) {
        /* wakes the other workers, which close descriptors of deleted segments */
        struct mqd_descriptor notification = {.kind = MQD_LINK_HW_CHANGED, .slot = slot_index};
        if (worker != r->options.self)
            mqd_forward_send(r, worker, &notification);
    }
    mqd_owner_wake_slot(r, slot_index); /* wakes fetches that wait for the end of a swap */
}

/* Called after compaction has installed the new files. offset == last_offset: the files of the
 * replaced segments are already deleted. */
static void segments_replaced(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command)
{
    int removed = mqd_partition_replace_segments(owned->partition, command->offset, command->last_offset);
    if (removed >= 0)
        reload_segments(r, command->slot);
    mqd_command_done(r, command->token, removed < 0 ? MQD_E_STALE : 0, command->slot, removed, NULL,
                     removed < 0 ? mqd_error_message() : "");
}

/* For compaction: forbids or allows truncations. No truncation is running now, because commands
 * wait for the end of a truncation. */
static void segments_hold(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command)
{
    if (command->offset >= 0)
        owned->truncation_held = command->offset > 0;
    mqd_command_done(r, command->token, 0, command->slot, owned->truncation_count, NULL, "");
    if (!owned->truncation_held)
        mqd_truncation_begin_if_possible(r, owned);
}

static void advance_start(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command)
{
    struct mqd_positions positions;
    mqd_partition_positions(owned->partition, &positions);
    int64_t offset =
        command->offset < 0 || command->offset > positions.high_watermark ? positions.high_watermark : command->offset;
    /* a second call with the same offset says that the files are now deleted: readers must close
     * the descriptors that they kept or opened in the meantime */
    bool is_repeated = offset == positions.log_start_offset;
    int dropped = mqd_partition_advance_start(owned->partition, offset);
    mqd_owner_publish(r, owned);
    if (dropped > 0 || is_repeated)
        reload_segments(r, command->slot);
    mqd_partition_positions(owned->partition, &positions);
    mqd_command_done(r, command->token, 0, command->slot, positions.log_start_offset, NULL, "");
}

static void roll(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command)
{
    mqd_owner_write_all(r);
    int error = mqd_owner_roll(r, owned);
    struct mqd_positions positions;
    mqd_partition_positions(owned->partition, &positions);
    mqd_command_done(r, command->token, error, command->slot, positions.log_end_segment, NULL,
                     error ? strerror(error) : "");
}

static void on_endpoint_died(struct mqd_reactor *r, const struct mqd_command *command)
{
    if (command->number == mqd_control_worker_count(r->options.control))
        mqd_control_on_acceptor_died(r);
    else if (command->number < mqd_control_worker_count(r->options.control) && command->number != r->options.self)
        mqd_forward_on_endpoint_died(r, command->number);
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

static void run_on_owned(struct mqd_reactor *r, const struct mqd_command *command)
{
    struct mqd_owned *owned = r->owned[command->slot];
    if (!owned || owned->closing) {
        mqd_command_done(r, command->token, ENOENT, command->slot, 0, NULL, "the slot is not served by this worker");
        return;
    }
    switch (command->kind) {
    case MQD_COMMAND_ADVANCE_START:
        advance_start(r, owned, command);
        return;
    case MQD_COMMAND_ROLL:
        roll(r, owned, command);
        return;
    case MQD_COMMAND_SEGMENTS_REPLACED:
        segments_replaced(r, owned, command);
        return;
    case MQD_COMMAND_SEGMENTS_HOLD:
        segments_hold(r, owned, command);
        return;
    case MQD_COMMAND_REPLICA_SET:
        mqd_replication_set(r, owned, command);
        return;
    case MQD_COMMAND_IN_SYNC_RESPONSE:
        mqd_replication_in_sync_result(r, owned, command);
        return;
    case MQD_COMMAND_SET_OPTIONS:
        mqd_partition_set_options(owned->partition, &command->options);
        publish_options(mqd_control_partition(r->options.control, command->slot), &command->options);
        mqd_owner_publish(r, owned); /* flush.on.ack moves the high watermark */
        mqd_lookups_notify(r, command->slot);
        if (mqd_partition_dirty(owned->partition))
            mqd_flush_request(r, owned);
        break;
    default:
        mqd_partition_set_leader_epoch(owned->partition, (int32_t)command->offset);
    }
    mqd_command_done(r, command->token, 0, command->slot, 0, NULL, "");
}

static void run_one(struct mqd_reactor *r, struct mqd_command *command)
{
    switch (command->kind) {
    case MQD_COMMAND_LOG_DIR:
        set_log_dir(r, command);
        break;
    case MQD_COMMAND_LOG_DIR_FULL:
        r->log_dirs[command->number].full = r->log_dirs[command->number].full_reported = command->offset != 0;
        mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
        break;
    case MQD_COMMAND_TOPIC_PUT:
        mqd_topic_command_put(r, command);
        break;
    case MQD_COMMAND_TOPIC_REMOVE:
        mqd_topic_command_remove(r, command);
        break;
    case MQD_COMMAND_BROKERS_PUT:
        mqd_topic_command_brokers(r, command);
        break;
    case MQD_COMMAND_PARTITION_OPEN:
        partition_open(r, command);
        break;
    case MQD_COMMAND_PARTITION_CLOSE:
        partition_close(r, command);
        break;
    case MQD_COMMAND_ENDPOINT_DIED:
        on_endpoint_died(r, command);
        break;
    case MQD_COMMAND_FETCHER_PUT:
    case MQD_COMMAND_FETCHER_REMOVE:
    case MQD_COMMAND_FETCHER_RATE:
        mqd_fetcher_command(r, command);
        break;
    case MQD_COMMAND_RELAY_PUT:
    case MQD_COMMAND_RELAY_REFUSE:
    case MQD_COMMAND_RELAY_REMOVE:
        mqd_relay_command(r, command);
        break;
    case MQD_COMMAND_LISTENER_TLS:
        mqd_secure_on_listener_command(r, command);
        break;
    case MQD_COMMAND_TLS_PRINCIPAL:
        mqd_secure_on_principal_command(r, command);
        break;
    case MQD_COMMAND_SUBJECT_PUT:
        mqd_subject_command(r, command);
        break;
    case MQD_COMMAND_REVOKE:
        mqd_subjects_revoke_mappings(r, command);
        break;
    default:
        run_on_owned(r, command);
    }
}

/* While a partition is being truncated nothing else may use it, so commands for it are deferred, in
 * order. Returns whether this one was. */
static bool defer(struct mqd_reactor *r, const struct mqd_command *command)
{
    bool concerns_partition = command->kind != MQD_COMMAND_LOG_DIR && command->kind != MQD_COMMAND_LOG_DIR_FULL &&
                              command->kind != MQD_COMMAND_TOPIC_PUT && command->kind != MQD_COMMAND_TOPIC_REMOVE &&
                              command->kind != MQD_COMMAND_BROKERS_PUT && command->kind != MQD_COMMAND_ENDPOINT_DIED &&
                              command->kind < MQD_COMMAND_FETCHER_PUT;
    struct mqd_owned *owned = concerns_partition ? r->owned[command->slot] : NULL;
    if (owned && owned->truncation_held && owned->truncating == MQD_TRUNCATION_DUE &&
        (command->kind == MQD_COMMAND_SEGMENTS_REPLACED || command->kind == MQD_COMMAND_SEGMENTS_HOLD))
        return false; /* the truncation waits for these */
    struct mqd_command *copy = owned && owned->truncating ? malloc(sizeof *copy) : NULL;
    if (!copy) {
        if (owned && owned->truncating)
            abort(); /* out of memory for a small allocation: the reactor cannot continue */
        return false;
    }
    *copy = *command;
    copy->next = NULL;
    struct mqd_command **link = &owned->deferred;
    while (*link)
        link = &(*link)->next;
    *link = copy;
    return true;
}

void mqd_command_free(struct mqd_command *command)
{
    free(command->text);
    free(command->list);
    free(command->assignment);
    free(command->fetcher);
    free(command->relay);
    free(command->view);
    mqd_tls_context_free(command->tls_context);
}

void mqd_commands_run_deferred(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_command *command = owned->deferred;
    owned->deferred = NULL;
    while (command) {
        struct mqd_command *next = command->next;
        if (!defer(r, command)) { /* a deferred command may begin another truncation */
            run_one(r, command);
            mqd_command_free(command);
        }
        free(command);
        command = next;
    }
}

void mqd_commands_free_deferred(struct mqd_owned *owned)
{
    while (owned->deferred) {
        struct mqd_command *command = owned->deferred;
        owned->deferred = command->next;
        mqd_command_free(command);
        free(command);
    }
}

void mqd_commands_run(struct mqd_reactor *r)
{
    while (mqd_load_acquire(&r->command_waiting)) {
        struct mqd_command command;
        pthread_mutex_lock(&r->mutex);
        command = r->commands[r->command_head];
        r->command_head = (r->command_head + 1) % MQD_COMMAND_COUNT_MAX;
        r->command_count--;
        mqd_store_release(&r->command_waiting, r->command_count);
        pthread_mutex_unlock(&r->mutex);
        if (defer(r, &command))
            continue;
        run_one(r, &command);
        mqd_command_free(&command);
    }
}

/* ---- posting ---- */

int mqd_command_post(struct mqd_reactor *r, struct mqd_command *command)
{
    pthread_mutex_lock(&r->mutex);
    bool run_here = r->stopped || !r->started;
    bool fits = r->unanswered_count < MQD_COMMAND_COUNT_MAX;
    r->unanswered_count += fits;
    if (!run_here && fits) {
        r->commands[(r->command_head + r->command_count++) % MQD_COMMAND_COUNT_MAX] = *command;
        mqd_store_release(&r->command_waiting, r->command_count);
    }
    pthread_mutex_unlock(&r->mutex);
    if (!fits) {
        mqd_command_free(command);
        return mqd_error_set(MQD_E_FULL, "%d commands are in flight; wait for their events", MQD_COMMAND_COUNT_MAX);
    }
    if (run_here) {
        mqd_reactor_refresh_clock(r);
        run_one(r, command);
        mqd_command_free(command);
        return 0;
    }
    eventfd_write(r->command_fd, 1);
    return 0;
}

static int check_slot(uint32_t slot)
{
    return slot < MQD_PARTITION_SLOT_COUNT
               ? 0
               : mqd_error_set(MQD_E_INVALID, "partition slot %u is out of range; there are %d slots", slot,
                               MQD_PARTITION_SLOT_COUNT);
}

static int post_slot(struct mqd_reactor *r, uint32_t kind, uint64_t token, uint32_t slot, int64_t offset)
{
    struct mqd_command command = {.kind = kind, .token = token, .slot = slot, .offset = offset};
    return check_slot(slot) < 0 ? -1 : mqd_command_post(r, &command);
}

int mqd_reactor_add_log_dir(struct mqd_reactor *r, uint64_t token, uint32_t log_dir, const char *path)
{
    if (log_dir >= MQD_LOG_DIR_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "log directory %u is out of range: there are at most %d", log_dir,
                             MQD_LOG_DIR_COUNT_MAX);
    struct mqd_command command = {.kind = MQD_COMMAND_LOG_DIR, .token = token, .number = log_dir, .text = strdup(path)};
    return command.text ? mqd_command_post(r, &command)
                        : mqd_error_set(ENOMEM, "out of memory for a log directory's path");
}

int mqd_reactor_set_log_dir_full(struct mqd_reactor *r, uint64_t token, uint32_t log_dir, int full)
{
    if (log_dir >= MQD_LOG_DIR_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "log directory %u is out of range: there are at most %d", log_dir,
                             MQD_LOG_DIR_COUNT_MAX);
    struct mqd_command command = {.kind = MQD_COMMAND_LOG_DIR_FULL, .token = token, .number = log_dir, .offset = full};
    return mqd_command_post(r, &command);
}

int mqd_reactor_partition_open(struct mqd_reactor *r, uint64_t token, uint32_t slot, uint32_t log_dir,
                               struct mqd_partition *partition)
{
    struct mqd_command command = {
        .kind = MQD_COMMAND_PARTITION_OPEN, .token = token, .slot = slot, .number = log_dir, .partition = partition};
    if (log_dir >= MQD_LOG_DIR_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "log directory %u is out of range: there are at most %d", log_dir,
                             MQD_LOG_DIR_COUNT_MAX);
    return check_slot(slot) < 0 ? -1 : mqd_command_post(r, &command);
}

int mqd_reactor_partition_close(struct mqd_reactor *r, uint64_t token, uint32_t slot)
{
    return post_slot(r, MQD_COMMAND_PARTITION_CLOSE, token, slot, 0);
}

int mqd_reactor_set_log_options(struct mqd_reactor *r, uint64_t token, uint32_t slot,
                                const struct mqd_log_options *options)
{
    struct mqd_command command = {.kind = MQD_COMMAND_SET_OPTIONS, .token = token, .slot = slot, .options = *options};
    return check_slot(slot) < 0 ? -1 : mqd_command_post(r, &command);
}

int mqd_reactor_advance_start(struct mqd_reactor *r, uint64_t token, uint32_t slot, int64_t offset)
{
    return post_slot(r, MQD_COMMAND_ADVANCE_START, token, slot, offset);
}

int mqd_reactor_roll(struct mqd_reactor *r, uint64_t token, uint32_t slot)
{
    return post_slot(r, MQD_COMMAND_ROLL, token, slot, 0);
}

int mqd_reactor_segments_replaced(struct mqd_reactor *r, uint64_t token, uint32_t slot, int64_t first, int64_t last)
{
    struct mqd_command command = {
        .kind = MQD_COMMAND_SEGMENTS_REPLACED, .token = token, .slot = slot, .offset = first, .last_offset = last};
    return check_slot(slot) < 0 ? -1 : mqd_command_post(r, &command);
}

int mqd_reactor_segments_hold(struct mqd_reactor *r, uint64_t token, uint32_t slot, int32_t hold)
{
    return post_slot(r, MQD_COMMAND_SEGMENTS_HOLD, token, slot, hold);
}

int mqd_reactor_set_leader_epoch(struct mqd_reactor *r, uint64_t token, uint32_t slot, int32_t leader_epoch)
{
    return post_slot(r, MQD_COMMAND_SET_LEADER_EPOCH, token, slot, leader_epoch);
}

int mqd_reactor_endpoint_died(struct mqd_reactor *r, uint64_t token, uint32_t endpoint)
{
    struct mqd_command command = {.kind = MQD_COMMAND_ENDPOINT_DIED, .token = token, .number = endpoint};
    return mqd_command_post(r, &command);
}

/* mqd_reactor_set_local_max and mqd_reactor_set_connection_max only store the limits; they post no
 * command. Connections above a lowered limit stay open; new ones are refused. */
int mqd_reactor_set_local_max(struct mqd_reactor *r, uint32_t count, uint64_t size_bytes)
{
    mqd_store_relaxed(&r->local_count_max, count < MQD_LOCAL_COUNT_MAX ? count : MQD_LOCAL_COUNT_MAX);
    mqd_store_relaxed(&r->local_bytes_max, size_bytes);
    return 0;
}

int mqd_reactor_set_connection_max(struct mqd_reactor *r, uint32_t worker_max, uint32_t broker_max)
{
    mqd_store_relaxed(&r->broker_connection_count_max, broker_max);
    mqd_store_relaxed(&r->connection_count_max,
                      worker_max < r->connection_capacity ? worker_max : r->connection_capacity);
    return 0;
}

int mqd_reactor_set_listener_tls(struct mqd_reactor *r, uint64_t token, uint32_t listener_id,
                                 struct mqd_tls_context *context)
{
    struct mqd_command command = {
        .kind = MQD_COMMAND_LISTENER_TLS, .token = token, .number = listener_id, .tls_context = context};
    if (listener_id > MQD_LISTENER_ID_HOSTS) {
        mqd_command_free(&command);
        return mqd_error_set(MQD_E_INVALID, "there is no listener %u; a broker has at most %d", listener_id,
                             MQD_LISTENER_COUNT_MAX);
    }
    return mqd_command_post(r, &command);
}

int mqd_reactor_tls_principal(struct mqd_reactor *r, uint64_t token, uint64_t connection, const char *principal)
{
    struct mqd_command command = {
        .kind = MQD_COMMAND_TLS_PRINCIPAL, .token = token, .offset = (int64_t)connection, .text = strdup(principal)};
    if (!command.text)
        return mqd_error_set_static(ENOMEM, "out of memory for a principal");
    return mqd_command_post(r, &command);
}
