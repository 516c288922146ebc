/* tsan: long */
/* A replicated partition on its leader, one property each. test_reactor_leading_mix.c tests all of
 * them together. */
#include "mqd_leading_test.h"

BOTH(an_acknowledgement_waits_for_every_member)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 1), second = client_open_as(b, 0, 2),
                  third = client_open_as(b, 0, 3);
    assign(b, all_in_sync);
    CHECK_EQUAL(view(b).role, MQD_ROLE_LEADS);
    produce_send(&client, -1, 1, 3);
    produce_send(&other, -1, 2, 2); /* by way of another worker */
    struct fetch_response response = follow(
        b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    CHECK_EQUAL(response.error, 0);
    int64_t end = response.next_offset;
    CHECK(end == 2 || end == 3 || end == 5);
    while (end < 5) {
        response = follow(
            b, &second,
            (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .wait_ms = LIMIT_MS, .offset = end});
        CHECK_EQUAL(response.error, 0);
        end = response.next_offset;
    }
    /* node 2 has everything */
    response = follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 5});
    CHECK_EQUAL(response.batch_count, 0);
    CHECK_EQUAL(high_watermark(b), 0);
    CHECK(!readable(&client) && !readable(&other));
    response =
        follow(b, &third, (struct follower_fetch){.node = 3, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    CHECK_EQUAL(response.batch_count, 2);
    CHECK_EQUAL(high_watermark(b), 0);
    follow(b, &third, (struct follower_fetch){.node = 3, .leader_epoch = 1, .last_epoch = 1, .offset = 5});
    CHECK_EQUAL(produce_take(&client).error[0], 0); /* when the leader's own disk has it too */
    CHECK_EQUAL(produce_take(&other).error[0], 0);
    response = follow(b, &third, (struct follower_fetch){.node = 3, .leader_epoch = 1, .last_epoch = 1, .offset = 5});
    CHECK_EQUAL(response.high_watermark, 5);
    CHECK_EQUAL(high_watermark(b), 5);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 0};
    client_fetch(&other, (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 2);
    free(fetched);
    client_close(&client), client_close(&other), client_close(&second), client_close(&third);
    bench_stop(b);
}

/* A bumped marker through the acceptor. */
static void send_marker(struct bench *b, uint64_t token, int64_t leader_epoch)
{
    uint32_t owner = bench_owner(SLOT), place = (uint32_t)token * 256;
    uint32_t size_bytes =
        log_encode(b->arenas[ACCEPTOR] + place, (struct log_batch){.marker = 2, .producer_id = 7, .producer_epoch = 1});
    struct mqd_descriptor produce = {.kind = MQD_LINK_PRODUCE,
                                     .flags = MQD_PRODUCE_CONTROL | MQD_PRODUCE_ACKS_ALL | MQD_PRODUCE_MARKER_BUMPED,
                                     .slot = SLOT,
                                     .token = token,
                                     .offset = place,
                                     .size_bytes = size_bytes,
                                     .a = leader_epoch,
                                     .c = (int64_t)mqd_endpoint_generation(b->control, owner)};
    CHECK_EQUAL(mqd_endpoint_send(b->endpoints[ACCEPTOR], owner, &produce), 0);
    mqd_endpoint_flush(b->endpoints[ACCEPTOR]);
}

static void expect_produced(struct bench *b, uint64_t token, int32_t error)
{
    uint32_t from;
    struct mqd_descriptor answer = bench_expect(b, ACCEPTOR, MQD_LINK_PRODUCED, &from);
    CHECK_EQUAL(answer.token, token);
    CHECK_EQUAL(answer.error, error);
}

/* Its coordinator takes this error for the end of the transaction: the next leader must have the
 * marker too. */
BOTH(a_marker_that_is_already_in_the_log_is_refused_when_it_is_replicated)
{
    struct bench *b = bench_start(backend, NULL);
    struct client second = client_open_as(b, 0, 2), third = client_open_as(b, 0, 3);
    assign(b, all_in_sync);
    send_marker(b, 1, -1);
    send_marker(b, 2, -1); /* the same again */
    send_marker(b, 3, 99); /* a marker that is refused immediately overtakes both */
    expect_produced(b, 3, 6);
    for (int round = 0; round < 2; round++) {
        struct follower_fetch request = {.node = 2,
                                         .leader_epoch = 1,
                                         .last_epoch = round ? 1 : -1,
                                         .wait_ms = round ? 0 : LIMIT_MS,
                                         .offset = round};
        follow(b, &second, request);
        request.node = 3;
        follow(b, &third, request);
    }
    expect_produced(b, 1, 0);
    expect_produced(b, 2, 47);
    send_marker(b, 4, -1); /* nothing is above the high watermark any more */
    expect_produced(b, 4, 47);
    client_close(&second), client_close(&third);
    bench_stop(b);
}

BOTH(a_consumer_sees_nothing_that_is_not_replicated)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), consumer = client_open(b, 1), second = client_open_as(b, 0, 2);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 0};
    struct target_replicas two = all_in_sync;
    two.in_sync = 1 << 1 | 1 << 2;
    assign(b, two);
    CHECK_EQUAL(produce(&client, 1, 1), 0);
    client_fetch(&consumer, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 0);
    CHECK_EQUAL(fetched->high_watermark[0], 0);
    struct frame frame = {0};
    /* parked until the follower has it */
    put_fetch(&frame, (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
              &requested, 1);
    CHECK(client_send(&consumer, &frame));
    CHECK_EQUAL(
        follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS})
            .batch_count,
        1);
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1});
    CHECK_EQUAL(client_receive(&consumer), 1);
    take_fetched(&consumer, fetched);
    CHECK_EQUAL(fetched->batch_count, 1);
    frame_free(&frame);
    free(fetched);
    client_close(&client), client_close(&consumer), client_close(&second);
    bench_stop(b);
}

BOTH(only_followers_may_fetch_as_followers)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2), elsewhere = client_open_as(b, 1, 2),
                  stranger = client_open_as(b, 0, 9);
    assign(b, all_in_sync);
    CHECK_EQUAL(produce(&client, 1, 1), 0);
    struct follower_fetch good = {.node = 2, .leader_epoch = 1, .last_epoch = -1}, request = good;
    CHECK_EQUAL(follow(b, &client, request).top_error, 31); /* on a listener of clients */
    request.node = 3;
    CHECK_EQUAL(follow(b, &second, request).top_error, 31); /* in another's name */
    request = (struct follower_fetch){.node = 9, .leader_epoch = 1, .last_epoch = -1};
    CHECK_EQUAL(follow(b, &stranger, request).error, 9); /* a host that has no replica */
    CHECK_EQUAL(follow(b, &elsewhere, good).error, 6);   /* a worker that does not own it */
    request = good, request.leader_epoch = 0;
    CHECK_EQUAL(follow(b, &second, request).error, 74);
    request = good, request.leader_epoch = 2;
    CHECK_EQUAL(follow(b, &second, request).error, 75);
    request = good, request.broker_epoch = EPOCH_OF(2) - 1;
    CHECK_EQUAL(follow(b, &second, request).error, 77); /* an earlier incarnation of its process */
    request = good, request.offset = 7;
    CHECK_EQUAL(follow(b, &second, request).error, 1);
    CHECK_EQUAL(follow(b, &second, good).error, 0);
    CHECK_EQUAL(high_watermark(b), 0);
    client_close(&client), client_close(&second), client_close(&elsewhere), client_close(&stranger);
    bench_stop(b);
}

/* Nothing of the leader's log is committed. With only the stable offset, which is 0, the
 * follower would truncate the common part, and one whose log begins there would wait forever. */
BOTH(a_follower_beyond_the_end_learns_the_end)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    assign(b, all_in_sync);
    produce_send(&client, 1, 1, 3);
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    struct fetch_response response =
        follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1, .offset = 7});
    CHECK_EQUAL(response.error, 1);
    CHECK_EQUAL(response.high_watermark, 0);
    CHECK_EQUAL(response.last_stable, 3);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

BOTH(a_diverging_log_is_told_where_it_diverges)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    struct target_replicas target = all_in_sync;
    assign(b, target);
    produce_send(&client, 1, 1, 3); /* epoch 1: offsets 0..2 */
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    target.leader_epoch = 4, target.partition_epoch = 2;
    assign(b, target);
    /* it has records of epoch 3 that this log never had */
    struct fetch_response response =
        follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 4, .last_epoch = 3, .offset = 5});
    CHECK_EQUAL(response.error, 0);
    CHECK_EQUAL(response.diverging_epoch, 1);
    CHECK_EQUAL(response.diverging_end, 3);
    CHECK_EQUAL(response.bytes, 0);
    produce_send(&client, 1, 2, 2); /* epoch 4: 3..4 */
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    /* more of epoch 1 than there is */
    response = follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 4, .last_epoch = 1, .offset = 4});
    CHECK_EQUAL(response.diverging_epoch, 1);
    CHECK_EQUAL(response.diverging_end, 3);
    response = follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 4, .last_epoch = 1, .offset = 3});
    CHECK_EQUAL(response.diverging_epoch, -1);
    CHECK_EQUAL(response.next_offset, 5);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

BOTH(too_few_replicas)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 1);
    struct target_replicas target = all_in_sync;
    assign(b, target);
    produce_send(&client, -1, 1, 1); /* taken, then the set shrinks */
    while (view(b).positions.log_end_offset < 1)
        usleep(1000);
    CHECK(!readable(&client));
    target.in_sync = 1 << 1, target.partition_epoch = 2;
    assign(b, target);
    CHECK_EQUAL(produce_take(&client).error[0], 20);
    CHECK_EQUAL(produce(&client, -1, 2), 19);
    CHECK_EQUAL(produce(&other, -1, 3), 19);
    CHECK_EQUAL(produce(&client, 1, 4), 0);
    CHECK_EQUAL(high_watermark(b), 0);
    target.min_insync = 1, target.partition_epoch = 3;
    assign(b, target);
    CHECK_EQUAL(produce(&client, -1, 5), 0);
    CHECK_EQUAL(high_watermark(b), 3);
    client_close(&client), client_close(&other);
    bench_stop(b);
}

/* The next one; the previous may have been repeated meanwhile, since it had no response yet. */
static uint64_t next_proposed(struct bench *b, uint64_t before)
{
    uint64_t sequence = before;
    for (int i = 0; i < 20 && sequence == before; i++)
        sequence = proposed(b).sequence;
    return sequence;
}

BOTH(a_follower_that_has_caught_up_is_proposed_and_counts)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2), third = client_open_as(b, 0, 3);
    struct target_replicas target = all_in_sync;
    target.in_sync = 1 << 1 | 1 << 2;
    assign(b, target);
    follow(b, &third, (struct follower_fetch){.node = 3, .leader_epoch = 1, .last_epoch = -1});
    struct mqd_replica_proposal proposal = proposed(b);
    CHECK_EQUAL(proposal.member_count, 3);
    CHECK_EQUAL(proposal.partition_epoch, 1);
    CHECK_EQUAL(proposal.leader_epoch, 1);
    CHECK_EQUAL(proposal.member_broker_epoch[2], EPOCH_OF(3));
    produce_send(&client, -1, 1, 1);
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1});
    CHECK_EQUAL(high_watermark(b), 0); /* node 3 counts since it was proposed */
    CHECK(!readable(&client));
    struct mqd_replica_proposal again = proposed(b); /* it was not answered */
    CHECK_EQUAL(again.sequence, proposal.sequence);
    answer_proposal(b, proposal.sequence, 1, 41); /* NOT_CONTROLLER: the outcome is unknown */
    CHECK_EQUAL(high_watermark(b), 0);
    again = proposed(b);
    CHECK_EQUAL(again.sequence, proposal.sequence);
    answer_proposal(b, proposal.sequence, 1, 107); /* refused permanently */
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    CHECK_EQUAL(high_watermark(b), 1);
    follow(b, &third, (struct follower_fetch){.node = 3, .leader_epoch = 1, .last_epoch = 1, .offset = 1});
    CHECK_EQUAL(next_proposed(b, proposal.sequence), proposal.sequence + 1);
    target.in_sync |= 1 << 3, target.partition_epoch = 2;
    assign(b, target);
    produce_send(&client, -1, 2, 1);
    follow(b, &second,
           (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1, .wait_ms = LIMIT_MS});
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 2});
    CHECK(!readable(&client));
    follow(b, &third, (struct follower_fetch){.node = 3, .leader_epoch = 1, .last_epoch = 1, .offset = 2});
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    client_close(&client), client_close(&second), client_close(&third);
    bench_stop(b);
}

BOTH(a_follower_that_lags_is_proposed_for_removal)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    struct target_replicas target = all_in_sync;
    target.lag_ms_max = 300;
    assign(b, target);
    produce_send(&client, -1, 1, 1);
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1});
    struct mqd_replica_proposal proposal = proposed(b);
    CHECK_EQUAL(proposal.member_count, 2);
    CHECK_EQUAL(proposal.node_id[1], 2);
    CHECK(!readable(&client)); /* until it is committed, node 3 counts */
    target.in_sync = 1 << 1 | 1 << 2, target.partition_epoch = 2;
    assign(b, target);
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

BOTH(leadership_that_ends)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), other = client_open(b, 1), second = client_open_as(b, 0, 2);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 0};
    struct target_replicas target = all_in_sync;
    int64_t offset;
    assign(b, target);
    produce_send(&client, -1, 1, 1);
    CHECK_EQUAL(
        follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS})
            .batch_count,
        1);
    /* parked */
    follower_send(
        b, &second,
        (struct follower_fetch){
            .node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1, .wait_ms = LIMIT_MS, .session_epoch = -1},
        1);
    target.leader = 2, target.leader_epoch = 2, target.partition_epoch = 2;
    assign(b, target);
    CHECK_EQUAL(produce_take(&client).error[0], 6);
    CHECK_EQUAL(take_fetch_response(&second).error, 6);
    CHECK_EQUAL(view(b).role, MQD_ROLE_FOLLOWS);
    CHECK_EQUAL(produce(&client, 1, 2), 6);
    CHECK_EQUAL(produce(&other, -1, 3), 6);
    CHECK_EQUAL(list_offset(&other, -1, &offset), 6);
    client_fetch(&other, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 0); /* KIP-392: a consumer may read from a follower */
    CHECK_EQUAL(fetched->batch_count, 0);
    requested.offset = 50;
    client_fetch(&other, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 0); /* it may be behind */
    target.leader = -1, target.leader_epoch = 3, target.partition_epoch = 3;
    assign(b, target);
    CHECK_EQUAL(view(b).role, MQD_ROLE_NONE);
    client_fetch(&other, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 6);
    free(fetched);
    client_close(&client), client_close(&other), client_close(&second);
    bench_stop(b);
}

BOTH(a_new_leader_does_not_report_its_end_immediately)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 1), second = client_open_as(b, 0, 2);
    struct target_replicas target = all_in_sync;
    int64_t offset;
    target.in_sync = 1 << 1 | 1 << 2;
    assign(b, target);
    CHECK_EQUAL(list_offset(&client, -1, &offset), 0);
    CHECK_EQUAL(offset, 0);
    CHECK_EQUAL(produce(&client, 1, 1), 0);
    target.leader_epoch = 2, target.partition_epoch = 2;
    assign(b, target);
    CHECK_EQUAL(list_offset(&client, -1, &offset), 78);
    CHECK_EQUAL(list_offset(&client, -2, &offset), 0);
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 2, .last_epoch = -1});
    CHECK_EQUAL(list_offset(&client, -1, &offset), 78);
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 2, .last_epoch = 1, .offset = 1});
    int16_t error = list_offset(&client, -1, &offset);
    for (int i = 0; i < LIMIT_MS && error == 78; i++, error = list_offset(&client, -1, &offset))
        /* requested from the other worker, which sees the high watermark when the owner has
         * published it: at the end of its turn */
        usleep(1000);
    CHECK_EQUAL(error, 0);
    CHECK_EQUAL(offset, 1);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

BOTH(a_lost_lease)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 0};
    int64_t offset;
    CHECK_EQUAL(produce(&client, -1, 1), 0);
    mqd_control_set_broker(b->control, EPOCH_OF(1), 1, 1); /* CLOCK_BOOTTIME has passed it */
    for (int acks = -1; acks <= 1; acks += 2)
        CHECK_EQUAL(produce(&client, acks, 2), 6);
    CHECK_EQUAL(list_offset(&client, -1, &offset), 6);
    client_fetch(&client,
                 (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 1); /* what is committed may be read */
    requested.offset = 50;
    client_fetch(&client, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 6); /* another leader may have records up to there */
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    mqd_control_set_broker(b->control, EPOCH_OF(1), 1, (now.tv_sec + 3600) * INT64_C(1000000000));
    CHECK_EQUAL(produce(&client, -1, 3), 0);
    CHECK_EQUAL(list_offset(&client, -1, &offset), 0);
    CHECK_EQUAL(offset, 2);
    client_fetch(&client, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->error[0], 1);
    free(fetched);
    client_close(&client);
    bench_stop(b);
}

BOTH(a_session_of_a_follower)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    struct target_replicas target = all_in_sync;
    target.in_sync = 1 << 1 | 1 << 2;
    assign(b, target);
    follower_send(b, &second,
                  (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1, .session_epoch = 0}, 1);
    struct fetch_response response = take_fetch_response(&second);
    CHECK_EQUAL(response.top_error, 0);
    CHECK_EQUAL(response.partition_count, 1);
    int32_t session = response.session_id;
    CHECK(session);
    /* nothing has changed: parked */
    follower_send(b, &second,
                  (struct follower_fetch){.node = 2, .session_id = session, .session_epoch = 1, .wait_ms = LIMIT_MS},
                  0);
    produce_send(&client, -1, 1, 2);
    response = take_fetch_response(&second);
    CHECK_EQUAL(response.next_offset, 2);
    follower_send(b, &second,
                  (struct follower_fetch){.node = 2,
                                          .leader_epoch = 1,
                                          .last_epoch = 1,
                                          .offset = 2,
                                          .session_id = session,
                                          .session_epoch = 2,
                                          .wait_ms = LIMIT_MS},
                  1);
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    /* no records, but a high watermark that it does not know: sent soon, not after wait_ms */
    response = take_fetch_response(&second);
    CHECK_EQUAL(response.partition_count, 1);
    CHECK_EQUAL(response.high_watermark, 2);
    CHECK_EQUAL(response.bytes, 0);
    struct client thief = client_open_as(b, 0, 3);
    follower_send(b, &thief, (struct follower_fetch){.node = 3, .session_id = session, .session_epoch = 3}, 0);
    CHECK_EQUAL(take_fetch_response(&thief).top_error, 70);
    follower_send(b, &second,
                  (struct follower_fetch){.node = 2, .session_id = session, .session_epoch = 3, .wait_ms = 1}, 0);
    response = take_fetch_response(&second);
    CHECK_EQUAL(response.top_error, 0);
    CHECK_EQUAL(response.partition_count, 0);
    client_close(&client), client_close(&second), client_close(&thief);
    bench_stop(b);
}

BOTH(from_one_replica_to_three_and_back)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2);
    struct target_replicas target = all_in_sync;
    CHECK_EQUAL(produce(&client, -1, 1), 0);
    target.in_sync = 1 << 1, target.min_insync = 1;
    assign(b, target);
    CHECK_EQUAL(high_watermark(b), 1); /* it stays */
    CHECK_EQUAL(produce(&client, -1, 2), 0);
    struct fetch_response response =
        follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1});
    CHECK_EQUAL(response.next_offset, 2);
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 2});
    CHECK_EQUAL(proposed(b).member_count, 2);
    target.in_sync |= 1 << 2, target.min_insync = 2, target.partition_epoch = 2;
    assign(b, target);
    produce_send(&client, -1, 3, 1);
    follow(b, &second,
           (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 2, .wait_ms = LIMIT_MS});
    CHECK(!readable(&client));
    target = (struct target_replicas){
        .leader = 1, .leader_epoch = 2, .partition_epoch = 3, .min_insync = 1, .in_sync = 1 << 1, .replica_count = 1};
    assign(b, target);
    CHECK_EQUAL(produce_take(&client).error[0], 6); /* of another leader epoch */
    CHECK_EQUAL(produce(&client, -1, 4), 0);
    CHECK_EQUAL(high_watermark(b), 4);
    CHECK_EQUAL(
        follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 2, .last_epoch = 1, .offset = 2}).error,
        6);
    client_close(&client), client_close(&second);
    bench_stop(b);
}

/* Writes of the acceptor's coordinators name the leader epoch in which they have read the
 * partition. */
BOTH(a_coordinator_of_another_leader_epoch_writes_nothing)
{
    struct bench *b = bench_start(backend, NULL);
    struct target_replicas target = all_in_sync;
    target.in_sync = 1 << 1, target.min_insync = 1, target.leader_epoch = 3;
    assign(b, target);
    uint32_t from, size_bytes = log_encode(b->arenas[ACCEPTOR], (struct log_batch){.mark = 1});
    int64_t generation = (int64_t)mqd_endpoint_generation(b->control, 0);
    for (int64_t epoch = 2; epoch <= 4; epoch++) {
        bench_put(b, ACCEPTOR, 0,
                  (struct mqd_descriptor){.kind = MQD_LINK_PRODUCE,
                                          .flags = MQD_PRODUCE_ACKS_ALL,
                                          .slot = SLOT,
                                          .token = (uint64_t)epoch,
                                          .size_bytes = size_bytes,
                                          .a = epoch,
                                          .c = generation});
        struct mqd_descriptor out = bench_expect(b, ACCEPTOR, MQD_LINK_PRODUCED, &from);
        CHECK_EQUAL(out.token, epoch);
        CHECK_EQUAL(out.error, epoch == 3 ? 0 : 6);
    }
    CHECK_EQUAL(high_watermark(b), 1);
    bench_stop(b);
}

/* It moves to another log directory: closed and opened, in the same leader epoch. Its followers'
 * state is unknown then, and its proposals are numbered above the earlier ones. */
BOTH(closed_and_opened_in_one_leader_epoch)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0), second = client_open_as(b, 0, 2), third = client_open_as(b, 0, 3);
    struct target_replicas target = all_in_sync;
    target.in_sync = 1 << 1 | 1 << 2;
    assign(b, target);
    follow(b, &third, (struct follower_fetch){.node = 3, .leader_epoch = 1, .last_epoch = -1});
    uint64_t sequence = proposed(b).sequence;
    produce_send(&client, -1, 1, 1);
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = -1, .wait_ms = LIMIT_MS});
    follower_send(
        b, &second,
        (struct follower_fetch){
            .node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1, .wait_ms = LIMIT_MS, .session_epoch = -1},
        1);
    bench_partition_close(b, SLOT);
    CHECK_EQUAL(take_fetch_response(&second).error, 6);
    CHECK_EQUAL(produce_take(&client).error[0], 6);
    bench_partition_open(b, SLOT, 0);
    target.partition_epoch++;
    assign(b, target);
    produce_send(&client, -1, 2, 1);
    CHECK_EQUAL(
        follow(b, &second,
               (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 1, .wait_ms = LIMIT_MS})
            .next_offset,
        2);
    follow(b, &second, (struct follower_fetch){.node = 2, .leader_epoch = 1, .last_epoch = 1, .offset = 2});
    CHECK_EQUAL(produce_take(&client).error[0], 0);
    follow(b, &third, (struct follower_fetch){.node = 3, .leader_epoch = 1, .last_epoch = 1, .offset = 2});
    CHECK(next_proposed(b, sequence) > sequence);
    client_close(&client), client_close(&second), client_close(&third);
    bench_stop(b);
}
