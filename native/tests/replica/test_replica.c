/* The replication core by itself: single rules, and traces that random histories rarely reach.
 * Against the model in Python: tests/unit/native/test_replica_model.py. */
#include "mqd_test.h"
#include "replica/rules.h"

#define EPOCH_OF(node) (100 + (node))

/* Nodes 1..3; node 1 is this one and leads. in_sync: bit per node. */
static struct mqd_replica_assignment led(int32_t leader_epoch, int32_t partition_epoch, uint32_t in_sync)
{
    struct mqd_replica_assignment out = {.node_id = 1,
                                         .broker_epoch = EPOCH_OF(1),
                                         .leader = 1,
                                         .leader_epoch = leader_epoch,
                                         .partition_epoch = partition_epoch,
                                         .min_insync = 2,
                                         .lag_ms_max = 100,
                                         .lag_records_max = MQD_REPLICA_NO_RECORD_BOUND,
                                         .flush_on_ack = 1,
                                         .member_count = 3};
    for (int32_t node = 1; node <= 3; node++)
        out.members[node - 1] = (struct mqd_replica_member){node, in_sync >> node & 1, 1, EPOCH_OF(node)};
    return out;
}

static struct mqd_replica_response fetch(struct mqd_replica *replica, int32_t node, int64_t offset, int64_t now_ms)
{
    static const struct mqd_epoch epochs[1] = {{0, 0}};
    struct mqd_replica_fetch requested = {.node_id = node,
                                          .broker_epoch = EPOCH_OF(node),
                                          .current_leader_epoch = replica->leader_epoch,
                                          .last_fetched_epoch = offset ? 0 : -1,
                                          .fetch_offset = offset};
    struct mqd_replica_response answer;
    mqd_replica_on_fetch(replica, &requested, epochs, 1, now_ms, &answer);
    return answer;
}

static struct mqd_replica leader(int64_t log_end, uint32_t in_sync)
{
    struct mqd_replica replica;
    struct mqd_replica_assignment assignment = led(1, 1, in_sync);
    mqd_replica_init(&replica);
    mqd_replica_set_log(&replica, 0, log_end, log_end, 0);
    CHECK_OR(mqd_replica_assign(&replica, &assignment, 0) == (MQD_REPLICA_CHANGED_EPOCH | MQD_REPLICA_CHANGED_ROLE),
             abort());
    return replica;
}

TEST(the_high_watermark_is_the_least_of_all_members)
{
    struct mqd_replica replica = leader(10, 1 << 1 | 1 << 2 | 1 << 3);
    CHECK_EQUAL(fetch(&replica, 2, 10, 1).changed, 0);
    CHECK_EQUAL(replica.high_watermark, 0);
    CHECK_EQUAL(fetch(&replica, 3, 4, 1).changed, MQD_REPLICA_CHANGED_HIGH_WATERMARK);
    CHECK_EQUAL(replica.high_watermark, 4);
    CHECK_EQUAL(fetch(&replica, 3, 2, 2).changed, 0); /* it never decreases */
    CHECK_EQUAL(replica.high_watermark, 4);
    CHECK_EQUAL(fetch(&replica, 3, 10, 3).changed, MQD_REPLICA_CHANGED_HIGH_WATERMARK);
    mqd_replica_set_log(&replica, 0, 12, 11, 4); /* written, the last one not flushed */
    fetch(&replica, 2, 12, 5);
    fetch(&replica, 3, 12, 5);
    CHECK_EQUAL(replica.high_watermark, 11); /* the leader's own position is its flushed end */
    CHECK_EQUAL(mqd_replica_set_log(&replica, 0, 12, 12, 6), MQD_REPLICA_CHANGED_HIGH_WATERMARK);
    CHECK_EQUAL(replica.high_watermark, 12);
}

TEST(a_new_epoch_begins_empty)
{
    struct mqd_replica replica = leader(10, 1 << 1 | 1 << 2);
    fetch(&replica, 2, 10, 1);
    CHECK_EQUAL(replica.high_watermark, 10);
    mqd_replica_set_log(&replica, 0, 15, 15, 2);
    struct mqd_replica_assignment next = led(2, 2, 1 << 1 | 1 << 2);
    CHECK_EQUAL(mqd_replica_assign(&replica, &next, 3), MQD_REPLICA_CHANGED_EPOCH);
    CHECK_EQUAL(replica.epoch_start, 15);
    CHECK_EQUAL(mqd_replica_check_latest(&replica), 78);
    CHECK_EQUAL(replica.high_watermark, 10);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQUAL(replica.replicas[i].position, -1);
    next.partition_epoch = 1;
    CHECK_EQUAL(mqd_replica_assign(&replica, &next, 3), MQD_REPLICA_STALE_IGNORED);
    fetch(&replica, 2, 15, 4);
    CHECK_EQUAL(mqd_replica_check_latest(&replica), 0);
}

/* The late copy of an expansion: while it may be accepted, its member counts, whatever other
 * responses arrive. */
TEST(a_proposal_counts_until_it_cannot_be_accepted)
{
    struct mqd_replica replica = leader(5, 1 << 1 | 1 << 2);
    struct mqd_replica_proposal first, second;
    fetch(&replica, 2, 5, 1);
    fetch(&replica, 3, 5, 1);
    CHECK_EQUAL(mqd_replica_propose(&replica, 1, 50, &first), 1);
    CHECK_EQUAL(first.member_count, 3);
    CHECK_EQUAL(mqd_replica_propose(&replica, 50, 50, &second), 0);
    CHECK_EQUAL(mqd_replica_propose(&replica, 51, 50, &second), 1);
    CHECK_EQUAL(second.sequence, first.sequence);
    mqd_replica_set_log(&replica, 0, 8, 8, 60);
    fetch(&replica, 2, 8, 60);
    CHECK_EQUAL(replica.high_watermark, 5);
    /* INVALID_UPDATE_VERSION: there is a newer state */
    CHECK_EQUAL(mqd_replica_on_proposal_response(&replica, first.sequence, 1, 95, 70), 0);
    CHECK_EQUAL(mqd_replica_on_proposal_response(&replica, first.sequence - 1, 1, 107, 70), 0);
    CHECK_EQUAL(mqd_replica_on_proposal_response(&replica, first.sequence, 0, 107, 70), 0);
    CHECK(replica.proposing);
    CHECK_EQUAL(replica.high_watermark, 5);
    /* the same partition epoch: it was not decided */
    struct mqd_replica_assignment refreshed = led(1, 1, 1 << 1 | 1 << 2);
    refreshed.members[2].eligible = 0;
    CHECK_EQUAL(mqd_replica_assign(&replica, &refreshed, 61), 0);
    CHECK(replica.proposing);
    CHECK_EQUAL(mqd_replica_on_proposal_response(&replica, first.sequence, 1, 107, 70),
                MQD_REPLICA_CHANGED_HIGH_WATERMARK);
    CHECK_EQUAL(replica.high_watermark, 8);
    fetch(&replica, 3, 8, 80);
    CHECK_EQUAL(mqd_replica_propose(&replica, 80, 50, &second), 0); /* it is not eligible */
    refreshed.members[2].eligible = 1;
    mqd_replica_assign(&replica, &refreshed, 81);
    CHECK_EQUAL(mqd_replica_propose(&replica, 81, 50, &second), 1);
    CHECK_EQUAL(second.sequence, first.sequence + 1);
    struct mqd_replica_assignment other = led(1, 2, 1 << 1 | 1 << 2);
    mqd_replica_assign(&replica, &other, 82);
    CHECK(!replica.proposing); /* another change of the partition was made: compare-and-set refuses this one forever */
}

TEST(a_lagging_follower_leaves_only_when_committed)
{
    struct mqd_replica replica = leader(5, 1 << 1 | 1 << 2 | 1 << 3);
    struct mqd_replica_proposal out;
    fetch(&replica, 2, 5, 10);
    fetch(&replica, 3, 5, 10);
    mqd_replica_set_log(&replica, 0, 9, 9, 1000); /* until now both had everything, however long ago they fetched */
    fetch(&replica, 2, 9, 1001);
    CHECK_EQUAL(mqd_replica_propose(&replica, 1100, 50, &out), 0);
    CHECK_EQUAL(mqd_replica_propose(&replica, 1101, 50, &out), 1);
    CHECK_EQUAL(out.member_count, 2);
    CHECK_EQUAL(out.node_id[1], 2);
    CHECK_EQUAL(replica.high_watermark, 5);
    struct mqd_replica_assignment next = led(1, 2, 1 << 1 | 1 << 2);
    CHECK_EQUAL(mqd_replica_assign(&replica, &next, 1102), MQD_REPLICA_CHANGED_HIGH_WATERMARK);
    CHECK_EQUAL(replica.high_watermark, 9);
}

/* Below min_insync the high watermark does not advance while acks=1 continues. A follower at it,
 * far behind the end, would be removed as soon as it had joined. */
TEST(a_follower_joins_when_it_would_not_be_dropped_immediately)
{
    struct mqd_replica replica = leader(5, 1 << 1 | 1 << 2);
    struct mqd_replica_assignment alone = led(1, 2, 1 << 1);
    struct mqd_replica_proposal out;
    fetch(&replica, 2, 5, 0);
    CHECK_EQUAL(mqd_replica_assign(&replica, &alone, 1), MQD_REPLICA_CHANGED_BELOW_MIN);
    mqd_replica_set_log(&replica, 0, 1000, 1000, 10);
    CHECK_EQUAL(replica.high_watermark, 5);
    fetch(&replica, 2, 5, 1000);
    CHECK_EQUAL(mqd_replica_propose(&replica, 1000, 50, &out), 0);
    mqd_replica_set_log(&replica, 0, 2000, 2000, 1010);
    fetch(&replica, 2, 500, 1010); /* it has less than the end at its previous fetch */
    CHECK_EQUAL(mqd_replica_propose(&replica, 1010, 50, &out), 0);
    fetch(&replica, 2, 1000, 1020);
    CHECK_EQUAL(mqd_replica_propose(&replica, 1020, 50, &out), 0);
    mqd_replica_set_log(&replica, 0, 3000, 3000, 1030);
    fetch(&replica, 2, 2000, 1060);                                /* everything there was at 1020 */
    CHECK_EQUAL(mqd_replica_propose(&replica, 1071, 50, &out), 0); /* more than half of lag_ms_max ago */
    CHECK_EQUAL(mqd_replica_propose(&replica, 1070, 50, &out), 1);
    CHECK_EQUAL(out.member_count, 2);
    struct mqd_replica_assignment next = led(1, 3, 1 << 1 | 1 << 2);
    mqd_replica_assign(&replica, &next, 1075);
    CHECK_EQUAL(mqd_replica_propose(&replica, 1120, 50, &out), 0); /* it stays for the rest of its time */
}

/* The log grows continuously and the follower is never at its end, but each fetch begins at the
 * log's end of the previous one. */
TEST(a_follower_at_full_speed_stays)
{
    struct mqd_replica replica = leader(0, 1 << 1 | 1 << 2);
    struct mqd_replica_proposal out;
    for (int64_t now_ms = 0, end = 0; now_ms < 10000; now_ms += 40, end += 500) {
        mqd_replica_set_log(&replica, 0, end + 500, end + 500, now_ms);
        fetch(&replica, 2, end, now_ms);
        CHECK_EQUAL(mqd_replica_propose(&replica, now_ms + 39, 50, &out), 0);
    }
}

TEST(a_bound_of_records)
{
    struct mqd_replica replica = leader(5, 1 << 1 | 1 << 2);
    struct mqd_replica_assignment bounded = led(1, 1, 1 << 1 | 1 << 2);
    struct mqd_replica_proposal out;
    bounded.lag_records_max = 10;
    bounded.lag_ms_max = 1000000;
    mqd_replica_assign(&replica, &bounded, 0);
    fetch(&replica, 2, 5, 0);
    mqd_replica_set_log(&replica, 0, 100, 100, 10); /* a burst */
    CHECK_EQUAL(mqd_replica_propose(&replica, 400, 50, &out), 0);
    fetch(&replica, 2, 90, 400);
    mqd_replica_set_log(&replica, 0, 101, 101, 500);
    CHECK_EQUAL(mqd_replica_propose(&replica, 999, 50, &out), 0);
    CHECK_EQUAL(mqd_replica_propose(&replica, 1000, 50, &out), 1);
    CHECK_EQUAL(out.member_count, 1);
}

TEST(a_bound_of_records_counts_as_soon_as_it_is_set_and_until_it_is_dropped)
{
    struct mqd_replica replica = leader(5, 1 << 1 | 1 << 2);
    struct mqd_replica_assignment given = led(1, 1, 1 << 1 | 1 << 2);
    struct mqd_replica_proposal out;
    given.lag_ms_max = 1000000;
    mqd_replica_assign(&replica, &given, 0);
    fetch(&replica, 2, 5, 0);
    mqd_replica_set_log(&replica, 0, 100, 100, 10); /* the last record, and 2 fetches no more */
    given.lag_records_max = 10;
    mqd_replica_assign(&replica, &given, 20);
    CHECK_EQUAL(mqd_replica_propose(&replica, 519, 50, &out), 0);
    given.lag_records_max = 95; /* it is not further behind */
    mqd_replica_assign(&replica, &given, 519);
    CHECK_EQUAL(mqd_replica_propose(&replica, 5000, 50, &out), 0);
    given.lag_records_max = 94;
    mqd_replica_assign(&replica, &given, 5000);
    mqd_replica_assign(&replica, &given, 5400); /* assigned again, its time does not restart */
    CHECK_EQUAL(mqd_replica_propose(&replica, 5499, 50, &out), 0);
    CHECK_EQUAL(mqd_replica_propose(&replica, 5500, 50, &out), 1);
    CHECK_EQUAL(out.member_count, 1);
}

TEST(a_follower_unseen_in_this_epoch_has_no_known_lag)
{
    struct mqd_replica replica = leader(100, 1 << 1 | 1 << 2);
    struct mqd_replica_assignment given = led(2, 2, 1 << 1 | 1 << 2);
    struct mqd_replica_proposal out;
    given.lag_records_max = 10;
    given.lag_ms_max = 2000;
    mqd_replica_assign(&replica, &given, 0);
    mqd_replica_set_log(&replica, 0, 101, 101, 10);
    CHECK_EQUAL(mqd_replica_propose(&replica, 2000, 50, &out), 0);
    CHECK_EQUAL(mqd_replica_propose(&replica, 2001, 50, &out), 1); /* its time counts */
    CHECK_EQUAL(out.member_count, 1);
}

TEST(appends_are_bounded_by_the_replica_rules)
{
    struct mqd_replica replica = leader(0, 1 << 1 | 1 << 2);
    CHECK_EQUAL(mqd_replica_check_append(&replica, 1, 100, 99), 0);
    CHECK_EQUAL(mqd_replica_check_append(&replica, 0, 100, 100), 6);
    struct mqd_replica_assignment next = led(1, 2, 1 << 1);
    CHECK_EQUAL(mqd_replica_assign(&replica, &next, 0), MQD_REPLICA_CHANGED_BELOW_MIN);
    CHECK_EQUAL(mqd_replica_check_append(&replica, 1, 100, 99), 19);
    CHECK_EQUAL(mqd_replica_check_append(&replica, 0, 100, 99), 0);
    /* more than there are: all of them */
    next.min_insync = 7, next.partition_epoch = 3, next.members[1].in_sync = next.members[2].in_sync = 1;
    mqd_replica_assign(&replica, &next, 0);
    CHECK_EQUAL(mqd_replica_check_append(&replica, 1, 100, 99), 0);
    next.partition_epoch = 4, next.broker_epoch = EPOCH_OF(1) + 50; /* registered again; not in the metadata yet */
    mqd_replica_assign(&replica, &next, 0);
    CHECK_EQUAL(replica.role, MQD_REPLICA_NONE);
    CHECK_EQUAL(mqd_replica_check_append(&replica, 0, 100, 99), 6);
    CHECK_EQUAL(fetch(&replica, 2, 0, 1).error, 6);
}

TEST(the_maximum_number_of_replicas)
{
    struct mqd_replica replica;
    struct mqd_replica_assignment assignment = {.node_id = 0,
                                                .leader = 0,
                                                .min_insync = 2,
                                                .lag_ms_max = 100,
                                                .lag_records_max = -1,
                                                .member_count = MQD_REPLICA_COUNT_MAX};
    struct mqd_replica_proposal out;
    for (int32_t node = 0; node < MQD_REPLICA_COUNT_MAX; node++)
        assignment.members[node] = (struct mqd_replica_member){node, node < 2, 1, node ? EPOCH_OF(node) : 0};
    mqd_replica_init(&replica);
    mqd_replica_assign(&replica, &assignment, 0);
    for (int32_t node = 1; node < MQD_REPLICA_COUNT_MAX; node++)
        CHECK_EQUAL(fetch(&replica, node, 0, 1).error, 0);
    CHECK_EQUAL(mqd_replica_propose(&replica, 2, 10, &out), 1);
    CHECK_EQUAL(out.member_count, MQD_REPLICA_COUNT_MAX);
    assignment.member_count++;
    CHECK_EQUAL(mqd_replica_assign(&replica, &assignment, 0), -1);
}
