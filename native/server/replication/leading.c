/* Replicated partitions that are led here: checks whether clients may be served, answers followers,
 * sends proposals to the controller.
 *
 * Followers fetch only over connections between hosts (connection->peer_node), which the acceptor
 * passes on after mutual authentication. Their fetches go to the worker that owns the partition:
 * only it has the partition's replication core, and other workers respond with
 * NOT_LEADER_OR_FOLLOWER.
 *
 *   positions    a follower's position -> mqd_replica_on_fetch -> high watermark -> published,
 *                acknowledged (mqd_owner_publish)
 *   waiting      parked followers wait on the partition itself (owned->followers_waiting): they
 *                wait for the log's end, not the high watermark
 *   in-sync set  a proposal is installed in the core, then sent as an event, and sent again if there
 *                is no response after MQD_IN_SYNC_REPEAT_MS
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/reactor.h"
#include "server/redirect.h"

#define TICK_MS 250
#define SLOW_CHECK_MS 25 /* while a record waits for a possibly slow member (MQD_REPLICA_SLOW_MS) */

void mqd_leading_on_open(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, owned->slot);
    mqd_list_init(&owned->followers_waiting);
    mqd_list_init(&owned->waiting_records_node);
    owned->replicated = mqd_partition_replicated(owned->partition);
    mqd_store_release(&slot->role, (uint8_t)(owned->replicated ? MQD_ROLE_NONE : MQD_ROLE_LEADS));
    mqd_store_release(&slot->latest_pending, (uint8_t)0);
    mqd_store_release(&slot->lagging, (uint8_t)0);
    mqd_nearest_publish_followers(r, owned);
}

/* ---- clients ---- */

/* Sets lease_lost: whether the controller may have given this host's partitions to other hosts.
 * Called every turn, unless this host alone is the quorum. */
void mqd_leading_check_lease(struct mqd_reactor *r)
{
    int64_t deadline_ns = mqd_load_acquire(&r->header->lease_deadline_ns);
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    r->lease_lost = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec >= deadline_ns;
}

int16_t mqd_leading_check_append(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append)
{
    if (r->lease_lost) {
        append->message = "this broker has not reached the controller for the length of its lease";
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    }
    if (!owned->replicated)
        return 0;
    int16_t error = owned->replica ? (int16_t)mqd_replica_check_append(owned->replica, append->acks_all, INT64_MAX, 0)
                                   : MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (error == MQD_KAFKA_NOT_ENOUGH_REPLICAS)
        append->message = "fewer replicas are in sync than min.insync.replicas";
    return error;
}

/* ---- the published role ---- */

static uint8_t role_of(const struct mqd_owned *owned)
{
    if (!owned->replica)
        return owned->replicated ? MQD_ROLE_NONE : MQD_ROLE_LEADS;
    return owned->replica->role == MQD_REPLICA_LEADER     ? MQD_ROLE_LEADS
           : owned->replica->role == MQD_REPLICA_FOLLOWER ? MQD_ROLE_FOLLOWS
                                                          : MQD_ROLE_NONE;
}

static bool is_out_of_sync(const struct mqd_replica *replica)
{
    for (uint32_t i = 0; i < replica->replica_count; i++)
        if (replica->replicas[i].member.node_id == replica->node_id)
            return !replica->replicas[i].member.in_sync;
    return true;
}

static void publish_role(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, owned->slot);
    uint8_t role = role_of(owned),
            pending = owned->replica && mqd_replica_check_latest(owned->replica) == MQD_KAFKA_OFFSET_NOT_AVAILABLE;
    if (mqd_load_relaxed(&slot->latest_pending) != pending)
        mqd_store_release(&slot->latest_pending, pending);
    uint8_t lagging = role == MQD_ROLE_FOLLOWS && is_out_of_sync(owned->replica);
    if (mqd_load_relaxed(&slot->role) == role && mqd_load_relaxed(&slot->lagging) == lagging)
        return;
    mqd_store_release(&slot->lagging, lagging);
    mqd_store_release(&slot->role, role);
    mqd_lookups_notify(r, owned->slot);
    if (!mqd_list_linked(&owned->publish_node)) /* readers that wait here are evaluated again and redirected */
        mqd_list_append(&r->to_wake, &owned->publish_node);
}

/* Whether a record of the partition waits for in-sync members; only with acks.replicas. */
static bool waits_for_member(const struct mqd_owned *owned)
{
    const struct mqd_replica *replica = owned->replica;
    return replica && replica->in_sync_max && replica->role == MQD_REPLICA_LEADER &&
           replica->high_watermark < replica->log_end;
}

/* Called after the partition's positions were published in the slot. */
void mqd_leading_on_publish(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_positions *positions)
{
    publish_role(r, owned);
    if (waits_for_member(owned) && !mqd_list_linked(&owned->waiting_records_node)) {
        if (mqd_list_empty(&r->with_waiting_records))
            r->slow_checked_ms = r->now_ms;
        mqd_list_append(&r->with_waiting_records, &owned->waiting_records_node);
    }
    if (positions->log_end_offset == owned->woken_log_end && positions->log_start_offset == owned->woken_log_start &&
        positions->high_watermark == owned->high_watermark)
        return;
    owned->woken_log_end = positions->log_end_offset;
    owned->woken_log_start = positions->log_start_offset;
    mqd_fetch_wake_followers(r, owned);
}

/* Called when a new assignment was applied, or when the partition has only one replica left. */
void mqd_leading_on_assignment(struct mqd_reactor *r, struct mqd_owned *owned)
{
    owned->replicated = mqd_partition_replicated(owned->partition);
    mqd_redirect_on_epoch(owned);
    mqd_fetch_wake_followers(r, owned); /* requests with another epoch are refused */
    mqd_owner_publish(r, owned);
    publish_role(r, owned);
    mqd_nearest_publish_followers(r, owned);
    mqd_leading_propose(r, owned);
}

/* ---- followers ---- */

/* A follower reads beyond the high watermark and the last stable offset, up to the log's end. A
 * follower whose log is longer gets OFFSET_OUT_OF_RANGE and truncates its log to the leader's
 * log end. */
static void extend_to_log_end(struct mqd_positions *positions)
{
    positions->high_watermark = positions->last_stable_offset = positions->log_end_offset;
    positions->high_watermark_segment = positions->log_end_segment;
    positions->high_watermark_position = positions->log_end_position;
}

void mqd_leading_positions(struct mqd_reactor *r, const struct mqd_fetch_set *set, uint32_t slot,
                           struct mqd_positions *positions)
{
    mqd_slot_positions(mqd_control_partition(r->options.control, slot), positions);
    if (set->replica_id >= 0)
        extend_to_log_end(positions);
}

static bool may_join(const struct mqd_replica *replica, int32_t node_id)
{
    for (uint32_t i = 0; i < replica->replica_count; i++)
        if (replica->replicas[i].member.node_id == node_id)
            return !replica->replicas[i].member.in_sync;
    return false;
}

int16_t mqd_leading_fetch(struct mqd_reactor *r, struct mqd_fetch_entry *entry, uint32_t slot,
                          struct mqd_positions *positions)
{
    struct mqd_owned *owned = r->owned[slot];
    struct mqd_replica_response response;
    entry->outcome.has_diverging_epoch = false;
    if (!owned || owned->closing || !owned->replica || owned->truncating)
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (r->log_dirs[owned->log_dir].failed)
        return MQD_KAFKA_STORAGE_ERROR;
    struct mqd_replica_fetch fetch = {.node_id = entry->set->replica_id,
                                      .broker_epoch = entry->set->replica_epoch,
                                      .current_leader_epoch = entry->current_leader_epoch,
                                      .last_fetched_epoch = entry->last_fetched_epoch,
                                      .fetch_offset = entry->fetch_offset};
    uint32_t epoch_count;
    const struct mqd_epoch *epochs = mqd_partition_epochs(owned->partition, &epoch_count);
    mqd_replica_on_fetch(owned->replica, &fetch, epochs, epoch_count, r->now_ms, &response);
    if (response.changed)
        mqd_replication_apply_changes(r, owned, response.changed);
    if (response.error == 0 && response.diverging_epoch < 0 && may_join(owned->replica, fetch.node_id))
        mqd_leading_propose(r, owned);
    if (response.error && response.error != MQD_KAFKA_OFFSET_OUT_OF_RANGE)
        return (int16_t)response.error;
    mqd_slot_positions(mqd_control_partition(r->options.control, slot), positions);
    extend_to_log_end(positions);
    entry->high_watermark = response.high_watermark;
    if (response.diverging_epoch >= 0) {
        entry->outcome.has_diverging_epoch = true;
        entry->outcome.diverging_epoch = response.diverging_epoch;
        entry->outcome.diverging_end = response.diverging_end;
    }
    return (int16_t)response.error;
}

/* Called when a follower's request arrives: the positions that it reports take effect immediately,
 * before it is the request's turn to be answered. */
void mqd_leading_record_positions(struct mqd_reactor *r, struct mqd_fetch_set *set)
{
    MQD_LIST_EACH(node, next, &set->ready) {
        struct mqd_fetch_entry *entry = MQD_CONTAINER(node, struct mqd_fetch_entry, ready);
        struct mqd_positions positions;
        uint32_t slot;
        mqd_fetch_entry_check_and_record(r, entry, &slot, &positions);
    }
}

/* ---- proposals ---- */

void mqd_leading_propose(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_replica_proposal proposal;
    if (!owned->replica || owned->closing ||
        !mqd_replica_propose(owned->replica, r->now_ms, MQD_IN_SYNC_REPEAT_MS, &proposal))
        return;
    struct mqd_event event = {
        .kind = MQD_EVENT_PROPOSE_IN_SYNC, .slot = owned->slot, .proposal = malloc(sizeof proposal)};
    if (!event.proposal)
        return; /* the proposal still counts and is sent again */
    *event.proposal = proposal;
    mqd_reactor_emit(r, &event);
}

int64_t mqd_leading_next_ms(const struct mqd_reactor *r)
{
    return mqd_list_empty(&r->with_waiting_records) ? -1 : r->slow_checked_ms + SLOW_CHECK_MS;
}

/* Checks for slow members only in partitions where a record waits. */
static void check_slow_members(struct mqd_reactor *r)
{
    r->slow_checked_ms = r->now_ms;
    MQD_LIST_EACH(node, next, &r->with_waiting_records) {
        struct mqd_owned *owned = MQD_CONTAINER(node, struct mqd_owned, waiting_records_node);
        if (waits_for_member(owned))
            mqd_leading_propose(r, owned);
        else
            mqd_list_remove(node);
    }
}

/* Removes lagging followers from the in-sync set; repeats unanswered proposals. */
void mqd_leading_tick(struct mqd_reactor *r)
{
    if (!mqd_list_empty(&r->with_waiting_records) && r->now_ms - r->slow_checked_ms >= SLOW_CHECK_MS)
        check_slow_members(r);
    if (!r->replicated_count || r->now_ms - r->leading_tick_ms < TICK_MS)
        return;
    r->leading_tick_ms = r->now_ms;
    for (uint32_t slot = 0; slot < r->owned_end && r->owned_count; slot++)
        if (r->owned[slot] && r->owned[slot]->replica) {
            mqd_replication_apply_changes(r, r->owned[slot], mqd_replica_tick(r->owned[slot]->replica, r->now_ms));
            mqd_leading_propose(r, r->owned[slot]);
        }
}
