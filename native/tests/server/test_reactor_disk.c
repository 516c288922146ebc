/* tsan */
/* The reactor with a disk that is slow, fails or is full, by the faults of the file layer; with
 * both I/O backends. */
#include "mqd_counter_test.h"
#include "mqd_faults_test.h"

static struct part part(int32_t partition, uint64_t mark)
{
    return (struct part){partition, {.mark = mark}};
}

static void send_produce(struct client *client, int32_t partition, uint64_t mark, int acks, int32_t timeout_ms)
{
    struct frame frame = {0};
    struct part lone = part(partition, mark);
    put_produce(&frame, (int32_t)mark, acks, timeout_ms, &lone, 1);
    CHECK(client_send(client, &frame));
    frame_free(&frame);
}

static int16_t error_of(struct client *client)
{
    CHECK_OR(client_receive(client) == 1, return -2);
    return take_produced(client).error[0];
}

BOTH(a_slow_flush_is_awaited_until_the_request_times_out)
{
    struct bench *b = bench_start(backend, watch);
    struct client client = client_open(b, 0), through = client_open(b, 1), other = client_open(b, 0);
    faults("sync:DELAY:.log:ms=250");
    int64_t began_ns = test_now_ns();
    send_produce(&client, 0, 1, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&client), 0);
    CHECK(test_now_ns() - began_ns > 200000000);
    send_produce(&client, 0, 2, -1, LIMIT_MS); /* its flush is under way when the others come */
    send_produce(&through, 0, 3, -1, 30);
    send_produce(&other, 0, 4, -1, 30);
    CHECK_EQUAL(error_of(&other), 7);
    CHECK_EQUAL(error_of(&through), 7);
    send_produce(&other, 2, 5, 1, LIMIT_MS); /* no other request waits for that disk */
    began_ns = test_now_ns();
    CHECK_EQUAL(error_of(&other), 0);
    CHECK(test_now_ns() - began_ns < 200000000);
    CHECK_EQUAL(error_of(&client), 0);
    client_close(&client);
    client_close(&through);
    client_close(&other);
    bench_stop(b);
}

BOTH(a_flush_under_way_is_shown_until_it_ends)
{
    int64_t began_ns = test_now_ns();
    struct bench *b = bench_start(backend, watch);
    struct client client = client_open(b, 0);
    faults("sync:DELAY:.log:ms=2500"); /* housekeeping runs once a second */
    send_produce(&client, 0, 1, -1, LIMIT_MS);
    wait_for_count(b, MQD_GAUGE_SYNC_OLDEST_NS, 1);
    int64_t shown_ns = (int64_t)counted(b, MQD_GAUGE_SYNC_OLDEST_NS);
    CHECK(shown_ns >= began_ns && shown_ns <= test_now_ns());
    CHECK_EQUAL(error_of(&client), 0);
    faults("");
    for (int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
         test_now_ns() < end_ns && counted(b, MQD_GAUGE_SYNC_OLDEST_NS);)
        usleep(1000);
    CHECK_EQUAL(counted(b, MQD_GAUGE_SYNC_OLDEST_NS), 0);
    client_close(&client);
    bench_stop(b);
}

/* The partition is closed while producers, here and elsewhere, wait for its flush and a reader
 * for its records; some of them disconnect. */
BOTH(a_partition_closes_while_requests_wait)
{
    struct bench *b = bench_start(backend, watch);
    for (int round = 0; round < 8; round++) {
        struct client clients[4], reader = client_open(b, 1);
        struct frame frame = {0};
        struct fetched *fetched = calloc(1, sizeof *fetched);
        for (uint32_t i = 0; i < 4; i++)
            clients[i] = client_open(b, i % 2);
        faults(round % 2 ? "sync:DELAY:.log:ms=60" : "");
        for (uint32_t i = 0; i < 4; i++)
            send_produce(&clients[i], 0, (uint64_t)round * 4 + i + 1, -1, LIMIT_MS);
        if (round % 4 < 2)
            client_close(&clients[3]), client_close(&clients[2]);
        bench_partition_close(b, 0);
        bench_partition_open(b, 0, 0);
        struct mqd_partition_view view;
        for (uint32_t i = 0; i < (round % 4 < 2 ? 2 : 4); i++) {
            int16_t error = error_of(&clients[i]);
            if (error != 0 && error != 6 && error != 56 && error != 7)
                TEST_FAIL("error %d", error);
            client_close(&clients[i]);
        }
        CHECK_EQUAL(mqd_slot_view(b->control, 0, &view), 0);
        struct fetch_position requested = {0, view.positions.high_watermark};
        put_fetch(&frame,
                  (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                  &requested, 1);
        CHECK(client_send(&reader, &frame)); /* parks, is woken by the next owner's first record */
        bench_partition_close(b, 0);
        bench_partition_open(b, 0, 0);
        struct client writer = client_open(b, 0);
        send_produce(&writer, 0, 1000, 1, LIMIT_MS);
        CHECK_EQUAL(error_of(&writer), 0);
        CHECK_EQUAL(client_receive(&reader), 1);
        take_fetched(&reader, fetched);
        CHECK(fetched->batch_count > 0);
        client_close(&reader);
        client_close(&writer);
        frame_free(&frame);
        free(fetched);
    }
    bench_stop(b);
}

BOTH(a_failed_flush_fences_and_every_request_gets_an_error)
{
    struct bench *b = bench_start(backend, watch);
    struct client client = client_open(b, 0), through = client_open(b, 1), reader = client_open(b, 1);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    send_produce(&client, 0, 1, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&client), 0);
    faults("sync:EIO:.log");
    send_produce(&through, 0, 2, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&through), 56);
    send_produce(&client, 2, 3, 1, LIMIT_MS); /* the other partition of that directory and worker */
    CHECK_EQUAL(error_of(&client), 56);
    struct fetch_position requested = {0, 0};
    client_fetch(&reader,
                 (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                 &requested, 1, fetched);
    CHECK_EQUAL(fetched->batch_count, 1); /* what was acknowledged stays readable, what was not stays hidden */
    CHECK_EQUAL(fetched->batches[0].mark, 1);
    faults("");
    for (uint32_t slot = 0; slot < 4; slot += 2) { /* returned anyway; a fenced log does not close cleanly */
        CHECK_EQUAL(mqd_reactor_partition_close(b->reactors[0], ++b->token, slot), 0);
        struct mqd_event event = bench_done(b, 0, b->token);
        CHECK(event.partition == b->partitions[slot]);
        CHECK_EQUAL(mqd_partition_close(event.partition, 1), -1);
        b->partitions[slot] = NULL;
    }
    free(fetched);
    client_close(&client);
    client_close(&through);
    client_close(&reader);
    bench_stop(b);
}

BOTH(a_full_disk_refuses_until_there_is_room)
{
    struct bench *b = bench_start(backend, watch);
    struct client client = client_open(b, 0), through = client_open(b, 1);
    send_produce(&client, 0, 1, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&client), 0);
    faults("write:ENOSPC:.log");
    send_produce(&through, 0, 2, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&through), 56);
    send_produce(&client, 2, 3, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&client), 56);
    faults("");
    CHECK_EQUAL(mqd_reactor_set_log_dir_full(b->reactors[0], ++b->token, 0, 0), 0);
    bench_done(b, 0, b->token);
    struct part lone = part(0, 4);
    struct produced out = client_produce(&through, -1, &lone, 1);
    CHECK_EQUAL(out.error[0], 0);
    CHECK_EQUAL(out.base_offset[0], 1); /* nothing of the refused one remains */
    client_close(&client);
    client_close(&through);
    bench_stop(b);
}

/* The event of this command, and how often one of `kind` came before it. */
static struct mqd_event done_counting(struct bench *b, uint64_t token, enum mqd_event_kind kind, uint32_t *kind_count)
{
    struct mqd_event event;
    for (;;) {
        while (mqd_reactor_next_event(b->reactors[0], &event)) {
            if (event.kind == MQD_EVENT_DONE && event.token == token)
                return event;
            *kind_count += event.kind == kind;
        }
        struct pollfd wait = {mqd_reactor_event_fd(b->reactors[0]), POLLIN, 0};
        CHECK_OR(poll(&wait, 1, LIMIT_MS) == 1, abort());
    }
}

static void close_fenced(struct bench *b, uint32_t slot)
{
    CHECK_EQUAL(mqd_reactor_partition_close(b->reactors[0], ++b->token, slot), 0);
    struct mqd_event event = bench_done(b, 0, b->token);
    CHECK_EQUAL(mqd_partition_close(event.partition, 1), -1);
    b->partitions[slot] = NULL;
}

/* A partial write could not be truncated either: more space does not repair it. */
BOTH(a_full_disk_is_reported_once_until_there_is_room)
{
    struct bench *b = bench_start(backend, watch);
    struct client client = client_open(b, 0);
    for (int round = 0; round < 2; round++) {
        struct part both[] = {part(0, 4), part(2, 4)};
        uint32_t reported = 0;
        faults("write:ENOSPC:.log");
        struct produced out = client_produce(&client, -1, both, 2);
        CHECK(out.error[0] == 56 && out.error[1] == 56);
        faults("");
        CHECK_EQUAL(mqd_reactor_set_log_dir_full(b->reactors[0], ++b->token, 0, 0), 0);
        done_counting(b, b->token, MQD_EVENT_LOG_DIR_FULL, &reported);
        CHECK_EQUAL(reported, 1);
    }
    client_close(&client);
    bench_stop(b);
}

BOTH(a_disk_too_full_to_undo_a_write_has_failed)
{
    struct bench *b = bench_start(backend, watch);
    struct client client = client_open(b, 0);
    struct mqd_partition_view view;
    uint32_t failed_count = 0;
    send_produce(&client, 0, 1, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&client), 0);
    faults("write:ENOSPC:quick-0\ntruncate:ENOSPC:quick-0");
    send_produce(&client, 0, 2, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&client), 56);
    faults("");
    CHECK_EQUAL(mqd_reactor_set_log_dir_full(b->reactors[0], ++b->token, 0, 0), 0); /* there is room again */
    done_counting(b, b->token, MQD_EVENT_LOG_DIR_FAILED, &failed_count);
    CHECK_EQUAL(failed_count, 1);
    for (uint32_t slot = 0; slot < 4; slot += 2) {
        CHECK_EQUAL(mqd_slot_view(b->control, slot, &view), 0);
        CHECK_EQUAL(view.state, MQD_SLOT_OFFLINE);
        send_produce(&client, (int32_t)slot, 3, 1, LIMIT_MS);
        CHECK_EQUAL(error_of(&client), 56);
        close_fenced(b, slot);
    }
    client_close(&client);
    bench_stop(b);
}

static void never_flushed(struct bench *b)
{
    watch(b);
    b->log_options.flush_on_ack = 0;
    b->log_options.flush_interval_ms = 3600000;
    b->options[0].group_commit_us = 3600000000u;
}

/* More sealed segments than wait for a flush: one more is flushed by the roll itself. */
BOTH(a_roll_that_fails_to_flush_fences)
{
    struct bench *b = bench_start(backend, never_flushed);
    struct client client = client_open(b, 0);
    struct mqd_partition_view view;
    uint32_t failed_count = 0;
    faults("sync:EIO:quick-0");
    for (uint64_t i = 1; failed_count == 0; i++) {
        CHECK_OR(i < 100, abort());
        uint64_t generation = mqd_load_acquire(&mqd_control_partition(b->control, 0)->segments_generation);
        send_produce(&client, 0, i, 1, LIMIT_MS);
        CHECK_EQUAL(error_of(&client), 0);
        CHECK_EQUAL(mqd_reactor_roll(b->reactors[0], ++b->token, 0), 0);
        struct mqd_event event = done_counting(b, b->token, MQD_EVENT_LOG_DIR_FAILED, &failed_count);
        CHECK(mqd_load_acquire(&mqd_control_partition(b->control, 0)->segments_generation) > generation);
        CHECK_EQUAL(event.error, failed_count ? EIO : 0);
        if (event.error)
            break;
    }
    CHECK_EQUAL(failed_count, 1);
    CHECK_EQUAL(mqd_slot_view(b->control, 0, &view), 0);
    CHECK_EQUAL(view.state, MQD_SLOT_OFFLINE);
    faults("");
    close_fenced(b, 0);
    close_fenced(b, 2);
    client_close(&client);
    bench_stop(b);
}

BOTH(a_stop_answers_requests_that_wait_for_a_flush)
{
    struct bench *b = bench_start(backend, watch);
    struct client clients[8], reader = client_open(b, 0);
    struct frame frame = {0};
    struct fetch_position requested = {1, 0};
    put_fetch(&frame,
              (struct fetch){.wait_ms = LIMIT_MS, .bytes_min = 1 << 20, .bytes_max = 1 << 20, .session_epoch = -1},
              &requested, 1);
    CHECK(client_send(&reader, &frame));
    for (uint32_t i = 0; i < 8; i++)
        clients[i] = client_open(b, 0);
    faults("sync:DELAY:.log:ms=150");
    for (uint32_t i = 0; i < 8; i++)
        send_produce(&clients[i], i % 4 < 2 ? 0 : 2, i + 1, -1, LIMIT_MS);
    struct mqd_partition_view view;
    do
        mqd_slot_view(b->control, 0, &view);
    while (view.positions.log_end_offset < 1); /* something is written and not yet flushed */
    CHECK_EQUAL(mqd_reactor_stop(b->reactors[0]), 0);
    uint32_t answered = 0;
    for (uint32_t i = 0; i < 8; i++) {
        int got = client_receive(&clients[i]); /* 0: it was not read any more */
        if (got == 1)
            CHECK_EQUAL(take_produced(&clients[i]).error[0], 0);
        answered += got == 1;
        client_close(&clients[i]);
    }
    CHECK(answered > 0);
    CHECK_EQUAL(client_receive(&reader), 0);
    client_close(&reader);
    frame_free(&frame);
    bench_stop(b);
}

static void many_segments(struct bench *b)
{
    watch(b);
    b->log_options.segment_bytes = 200;
    b->log_options.flush_on_ack = 0;
    b->log_options.flush_interval_ms = 3600000;
}

/* What compaction waits for. */
BOTH(sealed_segments_are_flushed_without_a_pause_between)
{
    struct bench *b = bench_start(backend, many_segments);
    struct client client = client_open(b, 0);
    struct mqd_partition_view view;
    int64_t end_ns = test_now_ns() + 15000000000ll;
    for (uint64_t i = 1; i <= 60; i++) {
        send_produce(&client, 0, i, 1, LIMIT_MS);
        CHECK_EQUAL(error_of(&client), 0);
    }
    do
        CHECK_EQUAL(mqd_slot_view(b->control, 0, &view), 0);
    while (view.positions.durable_offset < 40 && test_now_ns() < end_ns);
    CHECK_OR(view.positions.durable_offset >= 40,
             fprintf(stderr, "durable: %lld\n", (long long)view.positions.durable_offset));
    client_close(&client);
    bench_stop(b);
}

static void in_memory_at_first(struct bench *b)
{
    b->log_options.flush_on_ack = 0;
    b->log_options.flush_interval_ms = 3600000;
}

/* Records acknowledged before the setting changed count as flushed from then on (R9): the flush
 * does not wait for the next record. */
BOTH(dirty_data_is_flushed_when_flush_on_ack_is_enabled)
{
    struct bench *b = bench_start(backend, in_memory_at_first);
    struct client client = client_open(b, 0);
    struct mqd_partition_view view;
    send_produce(&client, 0, 1, 1, LIMIT_MS);
    CHECK_EQUAL(error_of(&client), 0);
    CHECK_EQUAL(mqd_slot_view(b->control, 0, &view), 0);
    CHECK_EQUAL(view.positions.durable_offset, 0);
    b->log_options.flush_on_ack = 1;
    CHECK_EQUAL(mqd_reactor_set_log_options(b->reactors[0], ++b->token, 0, &b->log_options), 0);
    bench_done(b, 0, b->token);
    int64_t began_ns = test_now_ns();
    do
        CHECK_EQUAL(mqd_slot_view(b->control, 0, &view), 0);
    /* sooner than it would be in the background */
    while (view.positions.durable_offset < 1 && test_now_ns() - began_ns < 4000000000ll);
    CHECK_EQUAL(view.positions.durable_offset, 1);
    client_close(&client);
    bench_stop(b);
}

static void in_one_segment(struct bench *b)
{
    in_memory_at_first(b);
    b->log_options.segment_bytes = 1 << 30;
}

static uint64_t flushes_begun(struct bench *b)
{
    return mqd_load_relaxed(&mqd_control_stats(b->control, 0)->counter[MQD_COUNT_SYNCS]);
}

/* So that dirty bytes stay bounded, and no flush takes long. */
BOTH(without_waiters_a_flush_starts_at_8_MiB)
{
    struct bench *b = bench_start(backend, in_one_segment);
    struct client client = client_open(b, 0);
    struct mqd_partition_view view;
    int64_t began_ns = test_now_ns(), by_clock_ns = began_ns + 4000000000ll;
    for (uint64_t i = 1; i <= 90; i++) {
        struct part lone = {0, {.mark = i, .body_bytes = 100000}};
        CHECK_EQUAL(client_produce(&client, 1, &lone, 1).error[0], 0);
        uint64_t begun = flushes_begun(b);
        if (test_now_ns() < by_clock_ns)
            CHECK_OR(i > 80 ? i < 90 || begun > 0 : begun == 0,
                     fprintf(stderr, "%d: %d flushes\n", (int)i, (int)begun));
    }
    do
        CHECK_EQUAL(mqd_slot_view(b->control, 0, &view), 0);
    while (view.positions.durable_offset < 80 && test_now_ns() < began_ns + 30000000000ll);
    CHECK_OR(view.positions.durable_offset >= 80,
             fprintf(stderr, "durable: %lld\n", (long long)view.positions.durable_offset));
    client_close(&client);
    bench_stop(b);
}

/* Where many partitions are written, their small flushes would coincide: they are large then, by
 * the timer and the 64 MiB limit. */
BOTH(many_partitions_are_not_flushed_for_8_MiB)
{
    enum { MANY = SLOTS_MAX }; /* 14 of this worker */
    struct bench *b = bench_start(backend, in_one_segment);
    uint32_t slots[MANY];
    for (uint32_t slot = 0; slot < MANY; slot++) {
        slots[slot] = slot;
        if (slot >= SLOTS)
            mqd_slot_assign(b->control, slot, b->topic_id, (int32_t)slot, (uint16_t)bench_owner(slot), 0, 0);
        if (slot >= PARTITIONS && bench_owner(slot) == 0)
            bench_partition_open(b, slot, slot);
    }
    bench_topic_put(b, b->topic_id, "quick", slots, MANY);
    struct client client = client_open(b, 0);
    int64_t began_ns = test_now_ns(), by_clock_ns = began_ns + 4000000000ll;
    uint64_t mark = 0;
    for (int round = 0; round < 11; round++)
        for (uint32_t slot = 0; slot < MANY; slot += 2) {
            struct part lone = {(int32_t)slot, {.mark = ++mark, .body_bytes = 100000}};
            if (slot != 4)
                CHECK_EQUAL(client_produce(&client, 1, &lone, 1).error[0], 0);
        }
    usleep(2000000); /* it runs once a second */
    for (int i = 0; i < 90; i++) {
        struct part lone = {0, {.mark = ++mark, .body_bytes = 100000}};
        CHECK_EQUAL(client_produce(&client, 1, &lone, 1).error[0], 0);
    }
    CHECK_OR(flushes_begun(b) == 0 || test_now_ns() > by_clock_ns,
             fprintf(stderr, "%d flushes\n", (int)flushes_begun(b)));
    client_close(&client);
    bench_stop(b);
}

BOTH(running_out_of_descriptors_refuses_the_batch_but_keeps_the_disk)
{
    struct bench *b = bench_start(backend, many_segments);
    struct client client = client_open(b, 0);
    send_produce(&client, 0, 1, 1, LIMIT_MS);
    CHECK_EQUAL(error_of(&client), 0);
    faults("open:EMFILE");
    for (uint64_t i = 2; i <= 4; i++) { /* each would begin a segment */
        send_produce(&client, 0, i, 1, LIMIT_MS);
        CHECK_EQUAL(error_of(&client), 56);
    }
    faults("");
    struct part lone = part(0, 5);
    struct produced out = client_produce(&client, 1, &lone, 1);
    CHECK_EQUAL(out.error[0], 0);
    CHECK_EQUAL(out.base_offset[0], 1);
    client_close(&client);
    bench_stop(b);
}

static void one_batch_segments(struct bench *b)
{
    watch(b);
    b->log_options.segment_bytes = 200;
}

/* The write that seals the file whose flush is in progress finds the disk full. A lower
 * descriptor number is free, and the next file opened reuses it. */
BOTH(a_roll_that_is_undone_leaves_the_flush_under_way_its_file)
{
    int low = dup(0);
    struct bench *b = bench_start(backend, one_batch_segments);
    struct client client = client_open(b, 0), second = client_open(b, 0);
    struct mqd_partition_view view;
    uint32_t failed_count = 0;
    int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
    faults("sync:DELAY:quick-0:ms=300\nwrite:ENOSPC:001.log");
    send_produce(&client, 0, 1, -1, LIMIT_MS);
    while (mqd_load_relaxed(&mqd_control_stats(b->control, 0)->counter[MQD_COUNT_SYNCS]) == 0)
        CHECK_OR(test_now_ns() < end_ns, abort());
    close(low);
    send_produce(&second, 0, 2, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&second), 56);
    CHECK_EQUAL(error_of(&client), 0);
    CHECK_EQUAL(mqd_slot_view(b->control, 0, &view), 0);
    CHECK_EQUAL(view.positions.durable_offset, 1);
    faults("");
    CHECK_EQUAL(mqd_reactor_set_log_dir_full(b->reactors[0], ++b->token, 0, 0), 0);
    done_counting(b, b->token, MQD_EVENT_LOG_DIR_FAILED, &failed_count);
    CHECK_EQUAL(failed_count, 0);
    send_produce(&second, 0, 3, -1, LIMIT_MS);
    CHECK_EQUAL(error_of(&second), 0);
    client_close(&client);
    client_close(&second);
    bench_stop(b);
}
