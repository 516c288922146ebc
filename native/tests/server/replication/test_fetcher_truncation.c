/* tsan: long */
/* A follower's partition at rest: its log is being truncated, and other commands for it wait.
 * The test is the leader. */
#include "mqd_fake_leader_test.h"
#include "mqd_faults_test.h"

static void room_again(struct two *two)
{
    faults("");
    CHECK_EQUAL(mqd_reactor_set_log_dir_full(two->b->reactors[1], ++two->b->token, 0, 0), 0);
    CHECK_EQUAL(done(two, two->b->token).error, 0);
}

/* Closing, truncating and commands at the same time: commands that wait for a partition at rest run
 * in order. */
BOTH(commands_wait_for_a_partition_at_rest)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request request;
    uint8_t bytes[400];
    CHECK(receive(&fake, &request));
    uint32_t size_bytes = batch_at(bytes, (struct log_batch){.record_count = 3}, 0, 4);
    answer(&fake, &request, (struct piece[]){{.partition = 0, .records = bytes, .records_bytes = size_bytes}}, 1);
    CHECK(receive(&fake, &request));
    for (int round = 0; round < 5; round++) {
        answer(&fake, &request, (struct piece[]){{.partition = 0, .diverging_epoch = 2, .diverging_end = 0}}, 1);
        uint64_t tokens[4];
        for (int i = 0; i < 4; i++) {
            tokens[i] = ++two->b->token;
            int result = i == 0   ? mqd_reactor_roll(two->b->reactors[1], tokens[i], FOLLOWED(0))
                         : i == 1 ? mqd_reactor_set_log_options(two->b->reactors[1], tokens[i], FOLLOWED(0),
                                                                &two->b->log_options)
                         : i == 2 ? mqd_reactor_advance_start(two->b->reactors[1], tokens[i], FOLLOWED(0), 0)
                                  : mqd_reactor_partition_close(two->b->reactors[1], tokens[i], FOLLOWED(0));
            CHECK_EQUAL(result, 0);
        }
        struct mqd_event event = {0};
        for (int i = 0; i < 4; i++) {
            event = done(two, tokens[i]);
            CHECK_EQUAL(event.error, 0);
        }
        CHECK(event.partition == two->followed[0]);
        CHECK_EQUAL(mqd_partition_close(event.partition, 1), 0);
        follower_open(two, 0);
        assign_follower(two, 0, in_step);
        CHECK(log_end(&fake, 0) == 0 || log_end(&fake, 0) == 3);
        bool caught_up = false; /* that it has them */
        for (;;) {
            CHECK(receive(&fake, &request));
            caught_up |= request.one[0].there && request.one[0].offset == 3;
            if (caught_up)
                break;
            bool fill = request.one[0].there && request.one[0].offset == 0;
            answer(&fake, &request,
                   (struct piece[]){{.partition = 0, .records = bytes, .records_bytes = fill ? size_bytes : 0}}, fill);
        }
        CHECK_EQUAL(log_end(&fake, 0), 3);
    }
    fake_stop(&fake);
}

static void in_memory(struct bench *b)
{
    b->log_options.flush_on_ack = 0;
    b->log_options.flush_interval_ms = 1000;
}

/* There was nothing to truncate. A record that was waiting for its flush is still flushed,
 * without another record. */
BOTH(a_truncation_that_removes_nothing_keeps_the_pending_flush)
{
    struct fake fake = fake_start_with(backend, in_memory);
    struct two *two = fake.two;
    struct request request;
    three_records(&fake, &request, 0);
    answer(&fake, &request, (struct piece[]){{.partition = 0, .diverging_epoch = 4, .diverging_end = 3}}, 1);
    CHECK(receive(&fake, &request));
    answer(&fake, &request, NULL, 0);
    UNTIL(positions_of(two, FOLLOWED(0)).durable_offset == 3);
    CHECK_EQUAL(log_end(&fake, 0), 3);
    CHECK_EQUAL(two->observed.truncated, 0);
    fake_stop(&fake);
}

/* A leader that finds diverging logs where there is nothing to truncate is not queried without a
 * pause. */
BOTH(a_truncation_that_removes_nothing_pauses)
{
    struct fake fake = fake_start(backend);
    struct request request;
    three_records(&fake, &request, 3);
    int64_t began_ns = test_now_ns();
    for (int caught_up = 0; caught_up < 10;) {
        bool requested = request.one[0].there;
        answer(&fake, &request, (struct piece[]){{.partition = 0, .diverging_epoch = 4, .diverging_end = 3}},
               requested);
        caught_up += requested;
        CHECK(receive(&fake, &request));
    }
    CHECK(test_now_ns() - began_ns > 8 * (int64_t)quick_options().backoff_ms * 1000000);
    CHECK_EQUAL(log_end(&fake, 0), 3);
    CHECK_EQUAL(fake.two->observed.truncated, 0);
    fake_stop(&fake);
}

/* The small mark before a truncation meets a full disk, or no free descriptor. Nothing has been
 * changed: the log is truncated when the leader repeats it. */
static void cut_refused(int backend, const char *rules, bool full)
{
    struct fake fake = fake_start_with(backend, watch);
    struct two *two = fake.two;
    struct request request;
    struct mqd_partition_view view;
    three_records(&fake, &request, 3);
    faults(rules);
    answer(&fake, &request, (struct piece[]){{.partition = 0, .diverging_epoch = 2, .diverging_end = 0}}, 1);
    if (full)
        UNTIL(two->observed.full > 0 || two->observed.failed > 0);
    else
        UNTIL(strstr(two->observed.text, "cannot be truncated yet") || two->observed.failed > 0);
    CHECK_EQUAL(two->observed.failed, 0);
    CHECK_EQUAL(log_end(&fake, 0), 3);
    room_again(two);
    while (two->observed.truncated == 0) {
        CHECK(receive(&fake, &request));
        bool requested = request.one[0].there && request.one[0].offset == 3;
        answer(&fake, &request, (struct piece[]){{.partition = 0, .diverging_epoch = 2, .diverging_end = 0}},
               requested);
        listen_to(two);
    }
    UNTIL(log_end(&fake, 0) == 0);
    CHECK_EQUAL(two->observed.failed, 0);
    for (int32_t partition = 0; partition <= 2; partition += 2) {
        CHECK_EQUAL(mqd_slot_view(two->b->control, FOLLOWED(partition), &view), 0);
        CHECK_EQUAL(view.state, MQD_SLOT_ONLINE);
    }
    fake_stop(&fake);
}

BOTH(a_truncation_on_a_full_disk_waits_for_space)
{
    cut_refused(backend, "write:ENOSPC:truncating", true);
}
BOTH(a_truncation_waits_for_descriptors)
{
    cut_refused(backend, "open:EMFILE:truncating", false);
}

/* The first batch of epoch 5 meets a full disk. The next leader does not know that epoch: it is
 * not used in fetches. */
BOTH(an_epoch_without_records_is_not_used_in_a_fetch)
{
    struct fake fake = fake_start_with(backend, watch);
    struct two *two = fake.two;
    struct request request;
    struct role role = in_step;
    uint8_t bytes[400];
    three_records(&fake, &request, 3);
    role.leader_epoch = 5, role.partition_epoch = 2;
    assign_follower(two, 0, role);
    do {
        answer(&fake, &request, NULL, 0);
        CHECK(receive(&fake, &request));
    } while (!(request.one[0].there && request.one[0].epoch == 5));
    CHECK_EQUAL(request.one[0].last_epoch, 4);
    faults("write:ENOSPC:.log");
    uint32_t size_bytes = batch_at(bytes, (struct log_batch){.record_count = 1}, 3, 5);
    answer(&fake, &request,
           (struct piece[]){{.partition = 0, .high_watermark = 3, .records = bytes, .records_bytes = size_bytes}}, 1);
    UNTIL(two->observed.full > 0);
    room_again(two);
    role.leader_epoch = 6, role.partition_epoch = 3;
    assign_follower(two, 0, role);
    while (receive(&fake, &request) && !(request.one[0].there && request.one[0].epoch == 6))
        answer(&fake, &request, NULL, 0);
    CHECK_EQUAL(request.one[0].offset, 3);
    CHECK_EQUAL(request.one[0].last_epoch, 4);
    fake_stop(&fake);
}
