/* The leader's side of the replication core: the state of its followers, the high watermark, and
 * proposals of in-sync sets. See replica/rules.h. */
#include <string.h>

#include "base/assert.h"
#include "replica/planted_bugs.h"
#include "replica/rules.h"

#define OFFSET_OUT_OF_RANGE 1
#define NOT_LEADER_OR_FOLLOWER 6
#define REPLICA_NOT_AVAILABLE 9
#define NOT_ENOUGH_REPLICAS 19
#define OPERATION_NOT_ATTEMPTED 55
#define FENCED_LEADER_EPOCH 74
#define UNKNOWN_LEADER_EPOCH 75
#define STALE_BROKER_EPOCH 77
#define OFFSET_NOT_AVAILABLE 78
#define INELIGIBLE_REPLICA 107

#define NEVER INT64_MIN
/* a follower that lags by more records than allowed is removed only after this time, because its
 * next fetch may catch up with a burst */
#define BEHIND_MS 500

static bool counts_only_durable(const struct mqd_replica *replica)
{
    return replica->flush_on_ack && !PLANTED_BUG(replica, COUNT_UNFLUSHED);
}

void mqd_replica_init(struct mqd_replica *replica)
{
    memset(replica, 0, sizeof *replica);
    replica->node_id = replica->leader = replica->leader_epoch = replica->partition_epoch = -1;
    replica->broker_epoch = -1;
    replica->next_proposal_ms = replica->swapped_ms = NEVER;
}

void mqd_replica_restore(struct mqd_replica *replica, int64_t high_watermark)
{
    replica->high_watermark = high_watermark; /* mqd_replica_set_log then clamps it to the log's range */
}

void mqd_replica_continue_sequence(struct mqd_replica *replica, uint64_t sequence)
{
    if (sequence > replica->proposal_sequence)
        replica->proposal_sequence = sequence;
}

/* Invariants that hold after every change. */
static void check_invariants(const struct mqd_replica *replica)
{
    MQD_ASSERT(replica->log_start <= replica->log_end && replica->high_watermark <= replica->log_end,
               "R-2: node %d, leader epoch %d: log start %lld, high watermark %lld, log end %lld", replica->node_id,
               replica->leader_epoch, (long long)replica->log_start, (long long)replica->high_watermark,
               (long long)replica->log_end);
    MQD_ASSERT(replica->replica_count <= MQD_REPLICA_COUNT_MAX && replica->in_sync_count >= 0 &&
                   replica->in_sync_count <= (int32_t)replica->replica_count,
               "R-3: node %d, leader epoch %d: %d of %u replicas are in sync", replica->node_id, replica->leader_epoch,
               replica->in_sync_count, replica->replica_count);
    MQD_ASSERT(!replica->proposing || replica->role == MQD_REPLICA_LEADER,
               "R-3: node %d, leader epoch %d: a replica that does not lead proposes a set", replica->node_id,
               replica->leader_epoch);
}

/* ---- the high watermark ---- */

/* */
static bool in_maximal_set(const struct mqd_replica *replica, const struct mqd_replica_follower *follower)
{
    return follower->member.in_sync ||
           (replica->proposing && follower->proposed && !PLANTED_BUG(replica, COMMITTED_ONLY));
}

#ifdef MQD_PLANTED
static bool counts_spare_for(const struct mqd_replica *replica, const struct mqd_replica_follower *member)
{
    for (uint32_t i = 0; i < replica->replica_count && PLANTED_BUG(replica, COUNT_SPARES) && replica->in_sync_max; i++)
        if (!in_maximal_set(replica, &replica->replicas[i]) && replica->replicas[i].position > member->position)
            return true;
    return false;
}
#define COUNTS_SPARE_FOR(replica, member) counts_spare_for(replica, member)
#else
#define COUNTS_SPARE_FOR(replica, member) false
#endif

/* */
static int raise_high_watermark(struct mqd_replica *replica)
{
    if (replica->role != MQD_REPLICA_LEADER ||
        (replica->in_sync_count < replica->min_insync && !PLANTED_BUG(replica, HW_BELOW_MIN)))
        return 0;
    int64_t lowest = counts_only_durable(replica) ? replica->durable : replica->log_end;
    for (uint32_t i = 0; i < replica->replica_count; i++) {
        const struct mqd_replica_follower *follower = &replica->replicas[i];
        if (follower->member.node_id != replica->node_id && in_maximal_set(replica, follower) &&
            !COUNTS_SPARE_FOR(replica, follower) && follower->position < lowest)
            lowest = follower->position; /* -1: it has not fetched in this epoch */
    }
    if (lowest <= replica->high_watermark)
        return 0;
    replica->high_watermark = lowest;
    return MQD_REPLICA_CHANGED_HIGH_WATERMARK;
}

/* ---- the log ---- */

/* A follower that has not fetched in this epoch may have all records, so only the lag time applies
 * to it. */
static void note_behind(const struct mqd_replica *replica, struct mqd_replica_follower *follower, int64_t now_ms)
{
    bool behind = replica->lag_records_max >= 0 && follower->position >= 0 &&
                  replica->log_end - follower->position > replica->lag_records_max;
    if (!behind || now_ms < follower->behind_since_ms)
        follower->behind_since_ms = behind ? now_ms : INT64_MAX;
}

int mqd_replica_set_log(struct mqd_replica *replica, int64_t log_start, int64_t log_end, int64_t durable,
                        int64_t now_ms)
{
    int64_t old_log_end = replica->log_end;
    int changed = 0;
    replica->log_start = log_start;
    replica->log_end = log_end;
    replica->durable = durable;
    if (replica->high_watermark > log_end || replica->high_watermark < log_start) {
        replica->high_watermark = replica->high_watermark > log_end ? log_end : log_start;
        changed = MQD_REPLICA_CHANGED_HIGH_WATERMARK;
    }
    check_invariants(replica);
    if (replica->role != MQD_REPLICA_LEADER)
        return changed;
    for (uint32_t i = 0; i < replica->replica_count && log_end != old_log_end; i++) {
        struct mqd_replica_follower *follower = &replica->replicas[i];
        if (follower->position == old_log_end && follower->caught_up_ms < now_ms)
            follower->caught_up_ms = now_ms; /* it had all records until now */
        note_behind(replica, follower, now_ms);
    }
    return changed | raise_high_watermark(replica);
}

/* ---- metadata ---- */

static const struct mqd_replica_member *member_of(const struct mqd_replica_assignment *assignment, int32_t node_id)
{
    for (uint32_t i = 0; i < assignment->member_count; i++)
        if (assignment->members[i].node_id == node_id)
            return &assignment->members[i];
    return NULL;
}

static struct mqd_replica_follower *follower_of(struct mqd_replica *replica, int32_t node_id)
{
    for (uint32_t i = 0; i < replica->replica_count; i++)
        if (replica->replicas[i].member.node_id == node_id)
            return &replica->replicas[i];
    return NULL;
}

static bool is_valid(const struct mqd_replica_assignment *assignment)
{
    if (assignment->member_count > MQD_REPLICA_COUNT_MAX || assignment->leader_epoch < 0 ||
        assignment->partition_epoch < 0)
        return false;
    for (uint32_t i = 0; i < assignment->member_count; i++)
        if (assignment->members[i].node_id < 0 ||
            member_of(assignment, assignment->members[i].node_id) != &assignment->members[i])
            return false;
    return true;
}

/* */
static uint8_t role_in(const struct mqd_replica *replica, const struct mqd_replica_assignment *assignment)
{
    const struct mqd_replica_member *self = member_of(assignment, assignment->node_id);
    if (!self || assignment->leader < 0)
        return MQD_REPLICA_NONE;
    if (self->broker_epoch != assignment->broker_epoch && !PLANTED_BUG(replica, SERVE_UNREGISTERED))
        return MQD_REPLICA_NONE;
    return assignment->leader == assignment->node_id ? MQD_REPLICA_LEADER : MQD_REPLICA_FOLLOWER;
}

/* `previous`: the follower's state so far in this leader epoch, or NULL. */
static struct mqd_replica_follower make_follower(const struct mqd_replica_member *member,
                                                 const struct mqd_replica_follower *previous, int64_t now_ms)
{
    struct mqd_replica_follower follower = {.position = -1,
                                            .fetched_broker_epoch = -1,
                                            .caught_up_ms = NEVER,
                                            .fetched_ms = NEVER,
                                            .behind_since_ms = INT64_MAX,
                                            .proposed_broker_epoch = -1};
    if (previous)
        follower = *previous;
    follower.member = *member;
    if (member->in_sync && follower.caught_up_ms == NEVER)
        follower.caught_up_ms = now_ms; /* the lag time begins now */
    return follower;
}

static void set_members(struct mqd_replica *replica, const struct mqd_replica_assignment *assignment, bool keep_state,
                        int64_t now_ms)
{
    struct mqd_replica_follower replicas[MQD_REPLICA_COUNT_MAX];
    replica->in_sync_count = 0;
    for (uint32_t i = 0; i < assignment->member_count; i++) {
        replicas[i] = make_follower(&assignment->members[i],
                                    keep_state ? follower_of(replica, assignment->members[i].node_id) : NULL, now_ms);
        replica->in_sync_count += replicas[i].member.in_sync != 0;
    }
    memcpy(replica->replicas, replicas, sizeof *replicas * assignment->member_count);
    replica->replica_count = assignment->member_count;
}

static int32_t in_sync_or_eligible_count(const struct mqd_replica *replica)
{
    int32_t count = 0;
    for (uint32_t i = 0; i < replica->replica_count; i++)
        count += replica->replicas[i].member.eligible || replica->replicas[i].member.in_sync;
    return count;
}

int mqd_replica_assign(struct mqd_replica *replica, const struct mqd_replica_assignment *assignment, int64_t now_ms)
{
    if (!is_valid(assignment))
        return -1;
    if (assignment->leader_epoch < replica->leader_epoch || assignment->partition_epoch < replica->partition_epoch ||
        assignment->broker_epoch < replica->broker_epoch)
        return MQD_REPLICA_STALE_IGNORED;
    bool new_epoch = assignment->leader_epoch > replica->leader_epoch;
    uint8_t role = role_in(replica, assignment);
    bool starts_fresh = new_epoch || role != replica->role; /* the state of the followers is dropped: R-1 */
    int changed = (new_epoch ? MQD_REPLICA_CHANGED_EPOCH : 0) | (role != replica->role ? MQD_REPLICA_CHANGED_ROLE : 0);
    bool was_below = replica->in_sync_count < replica->min_insync && !starts_fresh;
    if (starts_fresh || assignment->partition_epoch > replica->partition_epoch) {
        replica->proposing = 0;
        replica->next_proposal_ms = NEVER;
    }
    if (starts_fresh)
        replica->swapped_ms = NEVER;
    replica->node_id = assignment->node_id;
    replica->broker_epoch = assignment->broker_epoch;
    replica->leader = assignment->leader;
    replica->leader_epoch = assignment->leader_epoch;
    replica->partition_epoch = assignment->partition_epoch;
    replica->lag_ms_max = assignment->lag_ms_max;
    replica->lag_records_max = assignment->lag_records_max;
    replica->flush_on_ack = assignment->flush_on_ack;
    replica->min_insync = assignment->min_insync < (int32_t)assignment->member_count
                              ? assignment->min_insync
                              : (int32_t)assignment->member_count;
    replica->in_sync_max = assignment->acks_replicas <= 0                    ? 0
                           : assignment->acks_replicas > replica->min_insync ? assignment->acks_replicas
                                                                             : replica->min_insync;
    replica->role = role;
    set_members(replica, assignment, !starts_fresh || PLANTED_BUG(replica, KEEP_STATE), now_ms);
    for (uint32_t i = 0; i < replica->replica_count && role == MQD_REPLICA_LEADER; i++)
        note_behind(replica, &replica->replicas[i], now_ms); /* lag_records_max may have changed */
    if (replica->high_watermark > replica->log_end)
        replica->high_watermark = replica->log_end;
    if (starts_fresh && role == MQD_REPLICA_LEADER)
        replica->epoch_start = replica->log_end;
    if (new_epoch && role == MQD_REPLICA_FOLLOWER && PLANTED_BUG(replica, TRUNCATE_TO_HW))
        changed |= PLANTED_CUT;
    if (starts_fresh || replica->in_sync_count >= replica->min_insync)
        replica->holding = 0;
    if (role == MQD_REPLICA_LEADER && replica->in_sync_count < replica->min_insync && !was_below) {
        replica->holding = replica->in_sync_max && in_sync_or_eligible_count(replica) >= replica->min_insync;
        replica->hold_until_ms = now_ms + MQD_REPLICA_HOLD_MS;
        changed |= replica->holding ? 0 : MQD_REPLICA_CHANGED_BELOW_MIN;
    }
    check_invariants(replica);
    return changed | raise_high_watermark(replica);
}

/* ---- client requests ---- */

int mqd_replica_check_append(const struct mqd_replica *replica, int acks_all, int64_t lease_deadline_ns, int64_t now_ns)
{
    if (replica->role != MQD_REPLICA_LEADER || (now_ns >= lease_deadline_ns && !PLANTED_BUG(replica, LEASE)))
        return NOT_LEADER_OR_FOLLOWER;
    if (acks_all && replica->in_sync_count < replica->min_insync && !replica->holding &&
        !PLANTED_BUG(replica, ACK_BELOW_MIN))
        return NOT_ENOUGH_REPLICAS;
    return 0;
}

int mqd_replica_tick(struct mqd_replica *replica, int64_t now_ms)
{
    if (!replica->holding || now_ms < replica->hold_until_ms)
        return 0;
    replica->holding = 0;
    return MQD_REPLICA_CHANGED_BELOW_MIN;
}

int mqd_replica_check_latest(const struct mqd_replica *replica)
{
    if (replica->role != MQD_REPLICA_LEADER)
        return NOT_LEADER_OR_FOLLOWER;
    return replica->high_watermark < replica->epoch_start && !PLANTED_BUG(replica, LATEST_EARLY) ? OFFSET_NOT_AVAILABLE
                                                                                                 : 0;
}

/* ---- fetches of followers ---- */

/* Checks the sender and its leader epoch. */
static int32_t fetch_error(const struct mqd_replica *replica, const struct mqd_replica_fetch *fetch,
                           const struct mqd_replica_follower *follower)
{
    if (replica->role != MQD_REPLICA_LEADER)
        return NOT_LEADER_OR_FOLLOWER;
    if (!follower || fetch->node_id == replica->node_id)
        return REPLICA_NOT_AVAILABLE;
    if (fetch->current_leader_epoch != replica->leader_epoch && !PLANTED_BUG(replica, FETCH_EPOCH))
        return fetch->current_leader_epoch < replica->leader_epoch ? FENCED_LEADER_EPOCH : UNKNOWN_LEADER_EPOCH;
    if ((fetch->broker_epoch < follower->fetched_broker_epoch || fetch->broker_epoch < follower->member.broker_epoch) &&
        !PLANTED_BUG(replica, BROKER_EPOCH))
        return STALE_BROKER_EPOCH;
    return 0;
}

/* R2: sets the response's diverging_* if the follower's log is not a prefix of this one. This leader
 * epoch begins at epoch_start, even if it has no records yet. */
static void compare_logs(const struct mqd_replica *replica, const struct mqd_replica_fetch *fetch,
                         const struct mqd_epoch *epochs, uint32_t epoch_count, struct mqd_replica_response *response)
{
    int32_t found_epoch;
    int64_t end_offset;
    if (fetch->last_fetched_epoch < 0 || PLANTED_BUG(replica, TRUNCATE_TO_HW))
        return;
    mqd_replica_epoch_end(epochs, epoch_count, replica->log_end, fetch->last_fetched_epoch, &found_epoch, &end_offset);
    if (found_epoch < 0) { /* above all epochs with records */
        found_epoch = epoch_count ? epochs[epoch_count - 1].epoch : fetch->last_fetched_epoch;
        end_offset = replica->log_end < replica->epoch_start ? replica->log_end : replica->epoch_start;
    }
    if (found_epoch < fetch->last_fetched_epoch || end_offset < fetch->fetch_offset) {
        response->diverging_epoch = found_epoch;
        response->diverging_end = end_offset;
    }
}

static void note_position(struct mqd_replica *replica, struct mqd_replica_follower *follower,
                          const struct mqd_replica_fetch *fetch, int64_t now_ms)
{
    if (fetch->fetch_offset >= replica->log_end && follower->caught_up_ms < now_ms)
        follower->caught_up_ms = now_ms;
    else if (follower->fetched_ms != NEVER && fetch->fetch_offset >= follower->fetched_log_end &&
             follower->caught_up_ms < follower->fetched_ms)
        follower->caught_up_ms = follower->fetched_ms; /* it has all records up to the log end at that time */
    follower->position = fetch->fetch_offset;
    follower->fetched_broker_epoch = fetch->broker_epoch;
    follower->fetched_ms = now_ms;
    follower->fetched_log_end = replica->log_end;
    note_behind(replica, follower, now_ms);
}

void mqd_replica_on_fetch(struct mqd_replica *replica, const struct mqd_replica_fetch *fetch,
                          const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t now_ms,
                          struct mqd_replica_response *response)
{
    struct mqd_replica_follower *follower = follower_of(replica, fetch->node_id);
    *response = (struct mqd_replica_response){.error = fetch_error(replica, fetch, follower),
                                              .leader_epoch = replica->leader_epoch,
                                              .diverging_epoch = -1,
                                              .diverging_end = -1,
                                              .read_end = -1,
                                              .high_watermark = -1,
                                              .log_start = -1};
    if (response->error)
        return;
    response->read_end = replica->log_end;
    response->log_start = replica->log_start;
    if (fetch->fetch_offset < replica->log_start)
        response->error = OFFSET_OUT_OF_RANGE;
    else
        compare_logs(replica, fetch, epochs, epoch_count, response);
    if (!response->error && response->diverging_epoch < 0 && fetch->fetch_offset > replica->log_end)
        response->error = OFFSET_OUT_OF_RANGE;
    if (!response->error && response->diverging_epoch < 0) {
        note_position(replica, follower, fetch, now_ms);
        response->changed = raise_high_watermark(replica);
    }
    response->high_watermark = replica->high_watermark;
    check_invariants(replica);
}

/* ---- proposals ---- */

/* Kafka's rule: a follower had caught up at the time of a fetch if its next fetch begins at or after
 * what was then the log end. So a follower that reads a burst at full speed stays in the set. */
static bool caught_up_within(const struct mqd_replica *replica, const struct mqd_replica_follower *follower,
                             int64_t now_ms, int64_t ms)
{
    return follower->position == replica->log_end ||
           (follower->caught_up_ms != NEVER && now_ms - follower->caught_up_ms <= ms);
}

static bool lags(const struct mqd_replica *replica, const struct mqd_replica_follower *follower, int64_t now_ms)
{
    if (follower->behind_since_ms != INT64_MAX && now_ms - follower->behind_since_ms >= BEHIND_MS)
        return true;
    return !caught_up_within(replica, follower, now_ms, replica->lag_ms_max);
}

/* While the set is below min_insync, the high watermark does not move, so a follower can have
 * reached it and still lag far behind the log's end. If it joined, it would be removed immediately.
 * Requiring half of the allowed lag time keeps the set from flapping. */
static bool may_join(const struct mqd_replica *replica, const struct mqd_replica_follower *follower, int64_t now_ms)
{
    if (!follower->member.eligible || follower->position < 0 || follower->position < replica->high_watermark ||
        follower->behind_since_ms != INT64_MAX)
        return false;
    if (follower->fetched_broker_epoch != follower->member.broker_epoch && !PLANTED_BUG(replica, BROKER_EPOCH))
        return false;
    return (follower->position >= replica->epoch_start &&
            caught_up_within(replica, follower, now_ms, replica->lag_ms_max / 2)) ||
           PLANTED_BUG(replica, EXPAND_EARLY);
}

/* ---- spares: R-6 ---- */

/* False for a member that leaves when a spare has joined: it is shutting down or being removed. */
static bool counts_in_set(const struct mqd_replica_follower *follower)
{
    return !follower->member.moving && follower->member.eligible;
}

static bool is_slow(const struct mqd_replica *replica, const struct mqd_replica_follower *follower, int64_t now_ms)
{
    return !caught_up_within(replica, follower, now_ms, MQD_REPLICA_SLOW_MS) || PLANTED_BUG(replica, SWAP_OFTEN);
}

/* Whether `candidate` is a better member than `other`. In order of importance: it is not slow; it
 * is the preferred replica; its log is longer; it is earlier in the list. */
static bool is_better(const struct mqd_replica *replica, const struct mqd_replica_follower *candidate,
                      const struct mqd_replica_follower *other, int64_t now_ms)
{
    bool candidate_slow = is_slow(replica, candidate, now_ms), other_slow = is_slow(replica, other, now_ms);
    if (candidate_slow != other_slow)
        return other_slow;
    if (candidate == replica->replicas || other == replica->replicas)
        return candidate == replica->replicas;
    return candidate->position != other->position ? candidate->position > other->position : candidate < other;
}

/* `within_ms`: the replica must have had all records within this time. */
static bool is_spare(const struct mqd_replica *replica, const struct mqd_replica_follower *follower, int64_t now_ms,
                     int64_t within_ms)
{
    if (follower->member.node_id == replica->node_id || !counts_in_set(follower) || follower->member.in_sync ||
        follower->proposed)
        return false;
    return (may_join(replica, follower, now_ms) && caught_up_within(replica, follower, now_ms, within_ms)) ||
           (PLANTED_BUG(replica, SWAP_UNCHECKED) && follower->member.eligible && follower->position >= 0);
}

static struct mqd_replica_follower *best_spare(struct mqd_replica *replica, int64_t now_ms, int64_t within_ms)
{
    struct mqd_replica_follower *best = NULL;
    for (uint32_t i = 0; i < replica->replica_count; i++)
        if (is_spare(replica, &replica->replicas[i], now_ms, within_ms) &&
            (!best || is_better(replica, &replica->replicas[i], best, now_ms)))
            best = &replica->replicas[i];
    return best;
}

/* The worst of the replicas chosen for the set; never this node. */
static struct mqd_replica_follower *worst_member(struct mqd_replica *replica, int64_t now_ms)
{
    struct mqd_replica_follower *worst = NULL;
    for (uint32_t i = 0; i < replica->replica_count; i++) {
        struct mqd_replica_follower *follower = &replica->replicas[i];
        if (follower->proposed && counts_in_set(follower) && follower->member.node_id != replica->node_id &&
            (!worst || is_better(replica, worst, follower, now_ms)))
            worst = follower;
    }
    return worst;
}

/* Swaps slow members that a record waits for with spares that are ahead of them. If it swaps none,
 * it may swap a member with the preferred replica, which can become the leader only as a member of
 * the set. */
static bool swap_members(struct mqd_replica *replica, int64_t now_ms)
{
    bool record_waits = replica->high_watermark < replica->log_end, swapped = false;
    int64_t since_swap_ms = replica->swapped_ms == NEVER ? INT64_MAX : now_ms - replica->swapped_ms;
    if (since_swap_ms < MQD_REPLICA_SWAP_MS && !PLANTED_BUG(replica, SWAP_OFTEN))
        return false;
    struct mqd_replica_follower *member, *spare;
    while (record_waits && (member = worst_member(replica, now_ms)) != NULL && is_slow(replica, member, now_ms) &&
           (spare = best_spare(replica, now_ms, MQD_REPLICA_SLOW_MS / 2)) != NULL &&
           (spare->position > member->position || PLANTED_BUG(replica, SWAP_UNCHECKED))) {
        member->proposed = 0;
        spare->proposed = !PLANTED_BUG(replica, SWAP_IN_TWO);
        swapped = true;
        if (PLANTED_BUG(replica, SWAP_UNCHECKED))
            break;
    }
    spare = replica->replicas;
    if (!swapped && since_swap_ms >= MQD_REPLICA_PREFER_MS &&
        is_spare(replica, spare, now_ms, MQD_REPLICA_SLOW_MS / 2) && (member = worst_member(replica, now_ms)) != NULL) {
        member->proposed = 0;
        spare->proposed = 1;
        swapped = true;
    }
    return swapped;
}

/* Adds or removes members up to in_sync_max; otherwise may swap some. Returns whether it swapped. */
static bool limit_set(struct mqd_replica *replica, int64_t now_ms)
{
    struct mqd_replica_follower *follower;
    int32_t count = 0;
    bool differs = false;
    for (uint32_t i = 0; i < replica->replica_count; i++) {
        follower = &replica->replicas[i];
        if (!counts_in_set(follower))
            continue;
        follower->proposed =
            follower->proposed && (follower->member.in_sync || follower->member.node_id == replica->node_id);
        count += follower->proposed;
        differs |= follower->proposed != follower->member.in_sync;
    }
    for (; count < replica->in_sync_max && (follower = best_spare(replica, now_ms, INT64_MAX)) != NULL; count++)
        follower->proposed = differs = true;
    for (; count > replica->in_sync_max && (follower = worst_member(replica, now_ms)) != NULL; count--) {
        follower->proposed = false;
        differs = true;
    }
    return !differs && swap_members(replica, now_ms);
}

/* Marks the replicas that should be in sync as proposed. Returns false if they are the committed
 * set, or a set that would be refused. */
static bool choose_members(struct mqd_replica *replica, int64_t now_ms)
{
    bool differs = false, refused = false, swapped;
    for (uint32_t i = 0; i < replica->replica_count; i++) {
        struct mqd_replica_follower *follower = &replica->replicas[i];
        bool self = follower->member.node_id == replica->node_id, in_sync = follower->member.in_sync;
        follower->proposed = self || (in_sync ? !lags(replica, follower, now_ms) : may_join(replica, follower, now_ms));
        follower->proposed_broker_epoch = self                                  ? replica->broker_epoch
                                          : follower->fetched_broker_epoch >= 0 ? follower->fetched_broker_epoch
                                                                                : follower->member.broker_epoch;
    }
    swapped = replica->in_sync_max && limit_set(replica, now_ms);
    for (uint32_t i = 0; i < replica->replica_count; i++) {
        const struct mqd_replica_follower *follower = &replica->replicas[i];
        differs |= follower->proposed != follower->member.in_sync;
        refused |=
            follower->proposed && !follower->member.eligible && !(replica->in_sync_max && follower->member.in_sync);
    }
    if (swapped && !refused)
        replica->swapped_ms = now_ms;
    return differs && !refused;
}

static void fill_proposal(const struct mqd_replica *replica, struct mqd_replica_proposal *out)
{
    *out = (struct mqd_replica_proposal){.sequence = replica->proposal_sequence,
                                         .broker_epoch = replica->broker_epoch,
                                         .leader_epoch = replica->leader_epoch,
                                         .partition_epoch = replica->partition_epoch};
    for (uint32_t i = 0; i < replica->replica_count; i++) {
        const struct mqd_replica_follower *follower = &replica->replicas[i];
        if (!follower->proposed)
            continue;
        out->node_id[out->member_count] = follower->member.node_id;
        out->member_broker_epoch[out->member_count++] = follower->proposed_broker_epoch;
    }
}

int mqd_replica_propose(struct mqd_replica *replica, int64_t now_ms, int64_t repeat_ms,
                        struct mqd_replica_proposal *out)
{
    if (replica->role != MQD_REPLICA_LEADER || now_ms < replica->next_proposal_ms)
        return 0;
    if (!replica->proposing) {
        if (!choose_members(replica, now_ms))
            return 0;
        replica->proposing = 1;
        replica->proposal_sequence++;
    }
    replica->next_proposal_ms = now_ms + repeat_ms;
    fill_proposal(replica, out);
    return 1;
}

int mqd_replica_on_proposal_response(struct mqd_replica *replica, uint64_t sequence, int32_t leader_epoch, int error,
                                     int64_t next_proposal_ms)
{
    if (!replica->proposing || sequence != replica->proposal_sequence || leader_epoch != replica->leader_epoch)
        return 0;
    replica->next_proposal_ms = next_proposal_ms;
    if (error != OPERATION_NOT_ATTEMPTED && error != INELIGIBLE_REPLICA)
        return 0;
    replica->proposing = 0;
    return raise_high_watermark(replica);
}
