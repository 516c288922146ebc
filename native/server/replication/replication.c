/* Replicated partitions in the reactor: applies the metadata and the decisions of the replication
 * core (replica/rules.h) to their logs.
 *
 * owned->replica exists from the first assignment until no other replica is left. A
 * partition that was opened as replicated (mqd_partition_replicated) and has no assignment yet is
 * neither leader nor follower: it refuses Produce and is not fetched.
 *
 * assignment -> core -> role:
 *   leader     epoch of new records; high watermark from the positions of followers
 *              (mqd_replica_on_fetch)
 *   follower   waiting producers get an error; the log is fetched from the leader
 *              (server/replication/fetcher.h)
 *
 * Every publish of positions calls mqd_replication_update first, so that the core knows the log's
 * end and the log knows the core's high watermark.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/reactor.h"

/* Reports the log's positions to the core. Returns the resulting changes, without applying them. */
static int report_log(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_positions positions;
    mqd_partition_positions(owned->partition, &positions);
    return mqd_replica_set_log(owned->replica, positions.log_start_offset, positions.log_end_offset,
                               positions.durable_offset, r->now_ms);
}

void mqd_replication_update(struct mqd_reactor *r, struct mqd_owned *owned)
{
    if (report_log(r, owned) & MQD_REPLICA_CHANGED_HIGH_WATERMARK)
        mqd_partition_raise_high_watermark(owned->partition, owned->replica->high_watermark);
}

/* Applies the core's changes: passes a new high watermark to the log, the slot and the waiters; if
 * too few replicas are in sync, refuses the waiting producers. */
void mqd_replication_apply_changes(struct mqd_reactor *r, struct mqd_owned *owned, int changed)
{
    if (changed & MQD_REPLICA_CHANGED_HIGH_WATERMARK &&
        mqd_partition_raise_high_watermark(owned->partition, owned->replica->high_watermark))
        mqd_owner_publish(r, owned);
    if (changed & MQD_REPLICA_CHANGED_BELOW_MIN)
        mqd_owner_fail_all(r, owned, MQD_KAFKA_NOT_ENOUGH_REPLICAS_AFTER_APPEND);
}

static int create_replica(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_positions positions;
    owned->replica = calloc(1, sizeof *owned->replica);
    if (!owned->replica)
        return -1;
    r->replicated_count++;
    mqd_replica_init(owned->replica);
    /* Proposal numbers must be higher than those used before the partition was closed: they start
     * at the clock, or after the latest replica's numbers if that replica was created in the same
     * millisecond. */
    uint64_t clock_base = (uint64_t)r->now_ms << 12;
    r->proposal_base = clock_base > r->proposal_base ? clock_base : r->proposal_base + (1 << 12);
    mqd_replica_continue_sequence(owned->replica, r->proposal_base);
    mqd_partition_positions(owned->partition, &positions);
    mqd_replica_restore(owned->replica, positions.high_watermark);
    mqd_partition_set_replicated(owned->partition, true);
    owned->replicated = 1;
    report_log(r, owned);
    return 0;
}

/* This replica is the only one left: the high watermark follows the log again. */
static void end_replication(struct mqd_reactor *r, struct mqd_owned *owned, int32_t leader_epoch)
{
    mqd_replication_free(r, owned);
    mqd_partition_set_leader_epoch(owned->partition, leader_epoch);
    mqd_partition_set_replicated(owned->partition, false);
    mqd_leading_on_assignment(r, owned);
    if (mqd_partition_dirty(owned->partition))
        mqd_flush_request(r, owned);
}

/* Applies a new role or epoch. Producers that wait for appends of the old epoch get an error,
 * because the next leader may truncate these appends. */
static void apply_role(struct mqd_reactor *r, struct mqd_owned *owned, int changed)
{
    const struct mqd_replica *replica = owned->replica;
    if (changed & (MQD_REPLICA_CHANGED_EPOCH | MQD_REPLICA_CHANGED_ROLE)) {
        mqd_owner_fail_all(r, owned, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
        mqd_partition_set_leader_epoch(owned->partition, replica->leader_epoch);
        mqd_owner_wake_slot(r, owned->slot); /* readers and followers that wait here learn which host leads */
    }
    mqd_replication_apply_changes(r, owned, changed);
    if (replica->role == MQD_REPLICA_FOLLOWER)
        mqd_fetcher_on_assignment(r, owned);
    else
        mqd_fetcher_unfollow(r, owned);
    mqd_leading_on_assignment(r, owned);
}

static const struct mqd_replica_follower *find_member(const struct mqd_replica *replica, int32_t node_id)
{
    for (uint32_t i = 0; i < replica->replica_count; i++)
        if (replica->replicas[i].member.node_id == node_id)
            return &replica->replicas[i];
    return NULL;
}

/* Logs and counts each replica that has joined or left the in-sync set of a partition led here,
 * whether the leader or the controller decided it. */
static void log_in_sync_changes(struct mqd_reactor *r, const struct mqd_owned *owned,
                                const struct mqd_replica *old_replica)
{
    const struct mqd_replica *replica = owned->replica;
    for (uint32_t i = 0; i < replica->replica_count && replica->role == MQD_REPLICA_LEADER; i++) {
        const struct mqd_replica_follower *follower = &replica->replicas[i],
                                          *old_member = find_member(old_replica, follower->member.node_id);
        if (!old_member || old_member->member.in_sync == follower->member.in_sync)
            continue;
        bool joins = follower->member.in_sync;
        mqd_stat(r, joins ? MQD_COUNT_IN_SYNC_EXPANDS : MQD_COUNT_IN_SYNC_SHRINKS, 1);
        char lag[96] = "no fetch in this leader epoch";
        if (follower->position >= 0 && follower->caught_up_ms != INT64_MIN)
            snprintf(lag, sizeof lag, "%lld records behind, caught up %lld ms ago",
                     (long long)(replica->log_end - follower->position),
                     (long long)(r->now_ms - follower->caught_up_ms));
        else if (follower->position >= 0)
            snprintf(lag, sizeof lag, "%lld records behind", (long long)(replica->log_end - follower->position));
        mqd_log(r, joins ? 6 : 4, 0, owned->slot,
                "%s: node %d, %s; %d of %u replicas are in sync, high watermark %lld, log end %lld",
                joins ? "a replica joins the in-sync set" : "a replica leaves the in-sync set",
                follower->member.node_id, lag, replica->in_sync_count, replica->replica_count,
                (long long)replica->high_watermark, (long long)replica->log_end);
    }
}

void mqd_replication_set(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command)
{
    const struct mqd_replica_assignment *assignment = command->assignment;
    bool is_only_replica = assignment->member_count == 1 && assignment->members[0].node_id == assignment->node_id &&
                           assignment->leader == assignment->node_id;
    if (!owned->replica && !is_only_replica && create_replica(r, owned) < 0) {
        mqd_command_done(r, command->token, ENOMEM, command->slot, 0, NULL,
                         "out of memory for another replicated partition");
        return;
    }
    mqd_owner_write_all(r); /* staged batches were accepted under the old assignment */
    if (owned->replica || !is_only_replica) {
        struct mqd_replica old_replica = *owned->replica;
        int changed = mqd_replica_assign(owned->replica, assignment, r->now_ms);
        if (changed < 0) {
            mqd_command_done(r, command->token, MQD_E_INVALID, command->slot, 0, NULL,
                             "invalid assignment of a partition's replicas");
            return;
        }
        if (!(changed & MQD_REPLICA_STALE_IGNORED)) {
            owned->leader_worker = command->number;
            owned->throttled = assignment->throttled;
            apply_role(r, owned, changed);
            log_in_sync_changes(r, owned, &old_replica);
        }
        if (is_only_replica && !(changed & MQD_REPLICA_STALE_IGNORED))
            end_replication(r, owned, assignment->leader_epoch);
    } else {
        end_replication(r, owned, assignment->leader_epoch);
    }
    mqd_command_done(r, command->token, 0, command->slot, mqd_partition_log_end_offset(owned->partition), NULL, "");
}

void mqd_replication_in_sync_result(struct mqd_reactor *r, struct mqd_owned *owned, const struct mqd_command *command)
{
    if (owned->replica)
        mqd_replication_apply_changes(
            r, owned,
            mqd_replica_on_proposal_response(owned->replica, (uint64_t)command->offset, (int32_t)command->last_offset,
                                             (int)command->number, r->now_ms + MQD_IN_SYNC_RETRY_MS));
    mqd_command_done(r, command->token, 0, command->slot, 0, NULL, "");
}

void mqd_replication_on_truncation(struct mqd_reactor *r, struct mqd_owned *owned)
{
    report_log(r, owned);
}

void mqd_replication_free(struct mqd_reactor *r, struct mqd_owned *owned)
{
    mqd_fetcher_unfollow(r, owned);
    mqd_fetch_wake_followers(r, owned);
    mqd_list_remove(&owned->waiting_records_node);
    r->replicated_count -= owned->replica != NULL;
    free(owned->replica);
    owned->replica = NULL;
}

/* ---- commands ---- */

static int check_slot(uint32_t slot)
{
    return slot < MQD_PARTITION_SLOT_COUNT
               ? 0
               : mqd_error_set(MQD_E_INVALID, "partition slot %u is out of range; there are %d slots", slot,
                               MQD_PARTITION_SLOT_COUNT);
}

int mqd_reactor_replica_set(struct mqd_reactor *r, uint64_t token, uint32_t slot,
                            const struct mqd_replica_assignment *assignment, int32_t leader_worker)
{
    struct mqd_command command = {
        .kind = MQD_COMMAND_REPLICA_SET, .token = token, .slot = slot, .number = (uint32_t)leader_worker};
    if (check_slot(slot) < 0)
        return -1;
    command.assignment = malloc(sizeof *assignment);
    if (!command.assignment)
        return mqd_error_set(ENOMEM, "out of memory for an assignment");
    *command.assignment = *assignment;
    return mqd_command_post(r, &command);
}

int mqd_reactor_in_sync_response(struct mqd_reactor *r, uint64_t token, uint32_t slot, uint64_t sequence,
                                 int32_t leader_epoch, int32_t error)
{
    struct mqd_command command = {.kind = MQD_COMMAND_IN_SYNC_RESPONSE,
                                  .token = token,
                                  .slot = slot,
                                  .number = (uint32_t)error,
                                  .offset = (int64_t)sequence,
                                  .last_offset = leader_epoch};
    return check_slot(slot) < 0 ? -1 : mqd_command_post(r, &command);
}

int mqd_reactor_fetcher_put(struct mqd_reactor *r, uint64_t token, int fd, const struct mqd_fetcher_options *options)
{
    struct mqd_command command = {.kind = MQD_COMMAND_FETCHER_PUT, .token = token, .number = (uint32_t)fd};
    command.fetcher = malloc(sizeof *options);
    if (!command.fetcher) {
        close(fd);
        return mqd_error_set(ENOMEM, "out of memory for a connection to another host");
    }
    *command.fetcher = *options;
    if (mqd_command_post(r, &command) == 0)
        return 0;
    close(fd);
    return -1;
}

int mqd_reactor_fetcher_remove(struct mqd_reactor *r, uint64_t token, int32_t leader_node, uint32_t leader_worker,
                               uint32_t lane)
{
    struct mqd_command command = {.kind = MQD_COMMAND_FETCHER_REMOVE,
                                  .token = token,
                                  .number = lane,
                                  .offset = leader_node,
                                  .last_offset = leader_worker};
    return mqd_command_post(r, &command);
}

int mqd_reactor_set_fetcher_rate(struct mqd_reactor *r, uint64_t token, int64_t bytes_per_second_max)
{
    struct mqd_command command = {.kind = MQD_COMMAND_FETCHER_RATE, .token = token, .offset = bytes_per_second_max};
    return mqd_command_post(r, &command);
}

void mqd_proposal_free(struct mqd_replica_proposal *proposal)
{
    free(proposal);
}
