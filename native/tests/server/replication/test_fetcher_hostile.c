/* tsan: long */
/* The test is the leader: the requests it gets, and a follower's handling of responses that are
 * wrong, late, torn or duplicated. */
#include "mqd_fake_leader_test.h"

/* ---- requests and sessions ---- */

/* A leader that holds back its response is urged to send it when another request is pending. */
BOTH(a_leader_is_urged)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request first, urging, next;
    CHECK(receive_any(&fake, &first));
    answer(&fake, &first, (struct piece[]){{.partition = 0}, {.partition = 2}}, 2);
    CHECK(receive_any(&fake, &first));
    CHECK_EQUAL(first.count, 0);
    struct role role = in_step;
    role.leader_epoch = 5, role.partition_epoch = 2;
    assign_follower(two, 2, role);
    CHECK(receive_any(&fake, &urging)); /* while the first waits */
    CHECK(urging.session_epoch == -1 && urging.session_id == 0 && urging.count == 0 &&
          urging.correlation_id == first.correlation_id + 1);
    role.leader_epoch = 6, role.partition_epoch = 3;
    assign_follower(two, 2, role); /* urged once is enough */
    /* of the old epoch: nothing to be put off for */
    answer(&fake, &first, (struct piece[]){{.partition = 2, .error = 74}}, 1);
    answer(&fake, &urging, NULL, 0);
    CHECK(receive_any(&fake, &next));
    CHECK_EQUAL(next.session_epoch, 2);
    CHECK_EQUAL(next.count, 1);
    CHECK_EQUAL(next.one[2].epoch, 6);
    fake_stop(&fake);
}

BOTH(only_changed_partitions_are_sent_again)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request request;
    uint8_t bytes[400];
    CHECK(receive(&fake, &request));
    CHECK_EQUAL(request.count, 2);
    CHECK_EQUAL(request.session_epoch, 0);
    CHECK(request.one[0].offset == 0 && request.one[0].epoch == 4 && request.one[0].last_epoch == -1);
    uint32_t size_bytes = batch_at(bytes, (struct log_batch){.record_count = 3}, 0, 2);
    size_bytes += batch_at(bytes + size_bytes, (struct log_batch){.record_count = 2}, 3, 4);
    answer(&fake, &request,
           (struct piece[]){{.partition = 0, .high_watermark = 4, .records = bytes, .records_bytes = size_bytes},
                            {.partition = 2}},
           2);
    CHECK(receive(&fake, &request));
    CHECK(request.session_id == SESSION && request.session_epoch == 1);
    CHECK_EQUAL(request.count, 1);
    CHECK(request.one[0].offset == 5 && request.one[0].last_epoch == 4);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).durable_offset, 5);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).high_watermark, 0); /* 4 is inside of what one write contained */
    answer(&fake, &request, (struct piece[]){{.partition = 0, .high_watermark = 5}}, 1);
    CHECK(receive(&fake, &request));
    CHECK(request.session_epoch == 2 && request.count == 0 && request.forgotten_count == 0);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).high_watermark, 5);
    struct role elsewhere = in_step; /* partition 2 is led by another host now */
    elsewhere.leader = 3, elsewhere.leader_epoch = 5, elsewhere.partition_epoch = 2;
    assign_follower(two, 2, elsewhere);
    answer(&fake, &request, NULL, 0);
    CHECK(receive(&fake, &request));
    CHECK(request.session_epoch == 3 && request.count == 0 && request.forgotten_count == 1 &&
          request.forgotten[0] == 2);
    /* and back, before the leader answers */
    elsewhere.leader = 1, elsewhere.leader_epoch = 6, elsewhere.partition_epoch = 3;
    assign_follower(two, 2, elsewhere);
    answer(&fake, &request, NULL, 0);
    CHECK(receive(&fake, &request));
    CHECK(request.count == 1 && request.one[2].epoch == 6);
    /* away and back before the leader learns of either: it must not forget it */
    elsewhere.leader = 3, elsewhere.leader_epoch = 7, elsewhere.partition_epoch = 4;
    assign_follower(two, 2, elsewhere);
    elsewhere.leader = 1, elsewhere.leader_epoch = 8, elsewhere.partition_epoch = 5;
    assign_follower(two, 2, elsewhere);
    answer(&fake, &request, NULL, 0);
    CHECK(receive(&fake, &request));
    CHECK(request.count == 1 && request.one[2].epoch == 8 && request.forgotten_count == 0);
    CHECK_EQUAL(mqd_reactor_replica_set(two->b->reactors[1], ++two->b->token, FOLLOWED(2),
                                        &(struct mqd_replica_assignment){.member_count = 17}, 0),
                0);
    CHECK_EQUAL(done(two, two->b->token).error, MQD_E_INVALID);
    fake_stop(&fake);
}

BOTH(a_lost_session_is_started_again)
{
    struct fake fake = fake_start(backend);
    struct request request;
    const int16_t errors[] = {70, 71, 106};
    CHECK(receive(&fake, &request));
    answer(&fake, &request, (struct piece[]){{.partition = 0}, {.partition = 2}}, 2);
    for (uint32_t i = 0; i < 3; i++) {
        struct frame frame = {0};
        CHECK(receive(&fake, &request));
        CHECK_EQUAL(request.session_epoch, 1);
        uint32_t begin = answer_begin(&frame, request.correlation_id, errors[i], 0);
        put_varint(&frame, 1), put(&frame, 1, 0);
        frame_end(&frame, begin);
        client_send(&fake.link, &frame);
        frame_free(&frame);
        CHECK(receive(&fake, &request));
        CHECK(request.session_epoch == 0 && request.count == 2);
        answer(&fake, &request, (struct piece[]){{.partition = 0}, {.partition = 2}}, 2);
    }
    for (int i = 0; i < 3; i++) { /* a leader without room for sessions gets everything each time */
        struct frame frame = {0};
        CHECK(receive(&fake, &request));
        CHECK(i == 0 || (request.session_epoch == 0 && request.count == 2));
        uint32_t begin = answer_begin(&frame, request.correlation_id, 0, 0);
        put_varint(&frame, 1), put(&frame, 1, 0);
        frame_end(&frame, begin);
        client_send(&fake.link, &frame);
        frame_free(&frame);
    }
    CHECK_EQUAL(fake.two->observed.ended, 0);
    fake_stop(&fake);
}

/* A refused partition leaves the session for a while; the other continues. */
BOTH(a_refused_partition_is_put_off)
{
    struct fake fake = fake_start(backend);
    struct request request;
    const int16_t errors[] = {74, 56, 3, 100, 77, 9};
    CHECK(receive(&fake, &request));
    for (uint32_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        int64_t began_ns = test_now_ns();
        answer(&fake, &request,
               (struct piece[]){{.partition = 0, .error = errors[i], .high_watermark = -1, .log_start = -1},
                                {.partition = 2}},
               2);
        CHECK(receive(&fake, &request));
        CHECK(request.forgotten_count == 1 && request.forgotten[0] == 0);
        while (!request.one[0].there) {
            CHECK(test_now_ns() - began_ns < LIMIT_MS * 1000000ll);
            usleep(5000);
            answer(&fake, &request, NULL, 0);
            CHECK(receive(&fake, &request));
        }
        CHECK((test_now_ns() - began_ns) / 1000000 >= 59);
        CHECK_EQUAL(request.forgotten_count, 0);
    }
    CHECK_EQUAL(log_end(&fake, 0), 0);
    fake_stop(&fake);
}

/* A leader that may not know yet that it leads: retried immediately, and then less and less
 * often. */
BOTH(a_leader_that_does_not_know_the_partition_yet_is_retried_soon)
{
    struct fake fake = fake_start(backend);
    struct request request;
    const int16_t errors[] = {75, 6, 75, 6, 6, 6};
    const int64_t pauses_ms[] = {5, 10, 20, 40, 60, 60}; /* at most the back-off, which is 60 here */
    int64_t least_ms = INT64_MAX;
    CHECK(receive(&fake, &request));
    for (uint32_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        int64_t began_ns = test_now_ns();
        answer(&fake, &request,
               (struct piece[]){{.partition = 0, .error = errors[i], .high_watermark = -1, .log_start = -1},
                                {.partition = 2}},
               2);
        CHECK(receive(&fake, &request));
        while (!request.one[0].there) {
            CHECK(test_now_ns() - began_ns < LIMIT_MS * 1000000ll);
            usleep(1000);
            answer(&fake, &request, NULL, 0);
            CHECK(receive(&fake, &request));
        }
        int64_t taken_ms = (test_now_ns() - began_ns) / 1000000;
        CHECK(taken_ms >= pauses_ms[i] - 1);
        if (pauses_ms[i] < 40 && taken_ms < least_ms)
            least_ms = taken_ms;
    }
    CHECK(least_ms < 60);
    fake_stop(&fake);
}

/* ---- wrong responses ---- */

/* Whatever is wrong with one partition's records, the other's are accepted; it is requested
 * again from its position. */
BOTH(wrong_records_harm_no_other_partition)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request request;
    CHECK(receive(&fake, &request));
    for (int kind = 0; kind < 6; kind++) {
        uint8_t good[200], bad[600];
        int64_t end = log_end(&fake, 0), other_end = log_end(&fake, 2);
        uint32_t good_bytes = batch_at(good, (struct log_batch){.mark = 5}, other_end, 4),
                 first_bytes = batch_at(bad, (struct log_batch){.record_count = 2}, end, 4);
        uint32_t bad_bytes =
            first_bytes + batch_at(bad + first_bytes, (struct log_batch){.record_count = 2}, end + 2, 4);
        uint8_t *second = bad + first_bytes;
        uint64_t offset = htobe64((uint64_t)(end + (kind == 1 ? 5 : -1)));
        if (kind == 0)
            second[100] ^= 1;
        else if (kind == 1 || kind == 2)
            memcpy(second, &offset, 8); /* a gap; an overlap */
        else if (kind == 3)
            second[15] = 5; /* of an epoch that this leader does not have */
        else if (kind == 4)
            second[16] = 1; /* magic */
        else
            memset(second + 8, 0, 4);                        /* length 0 */
        int64_t high_watermark = kind == 1 ? end + 2 : 1000; /* below it a gap is what compaction left */
        int64_t began_ns = test_now_ns();
        answer(&fake, &request,
               (struct piece[]){
                   {.partition = 0, .high_watermark = high_watermark, .records = bad, .records_bytes = bad_bytes},
                   {.partition = 2, .records = good, .records_bytes = good_bytes}},
               2);
        CHECK(receive(&fake, &request));
        CHECK_EQUAL(log_end(&fake, 0), end + 2);
        CHECK_EQUAL(log_end(&fake, 2), other_end + 1);
        CHECK_EQUAL(positions_of(two, FOLLOWED(0)).high_watermark, end + 2); /* at most the log's end */
        CHECK_EQUAL(request.one[2].offset, other_end + 1);
        /* unless the machine paused for as long as the partition is put off */
        if (test_now_ns() - began_ns < (int64_t)quick_options().backoff_ms * 1000000)
            CHECK(request.forgotten_count == 1 && request.forgotten[0] == 0);
        while (!request.one[0].there) {
            usleep(5000);
            answer(&fake, &request, NULL, 0);
            CHECK(receive(&fake, &request));
        }
        CHECK_EQUAL(request.one[0].offset, end + 2);
    }
    CHECK_EQUAL(two->observed.ended, 0);
    fake_stop(&fake);
}

/* Unrequested, of another epoch, duplicate, below the follower's end: nothing is accepted. */
BOTH(unrequested_partitions_are_refused)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request request;
    uint8_t bytes[400], other[400];
    CHECK(receive(&fake, &request));
    uint32_t size_bytes = batch_at(bytes, (struct log_batch){.record_count = 2}, 0, 4),
             other_bytes = batch_at(other, (struct log_batch){.record_count = 2}, 2, 4);
    struct piece twice[] = {{.partition = 0, .records = bytes, .records_bytes = size_bytes},
                            {.partition = 0, .records = other, .records_bytes = other_bytes},
                            {.partition = 0, .diverging_epoch = 1},
                            {.partition = 3, .records = bytes, .records_bytes = size_bytes},
                            {.partition = -5, .records = bytes, .records_bytes = size_bytes},
                            {.partition = 0, .error = 1, .log_start = 100}};
    answer(&fake, &request, twice, 6);
    CHECK(receive(&fake, &request));
    CHECK_EQUAL(log_end(&fake, 0), 2);
    struct role next = in_step;
    next.leader_epoch = 5, next.partition_epoch = 2;
    assign_follower(two, 0, next); /* the response below is to a request of epoch 4 */
    answer(&fake, &request, (struct piece[]){{.partition = 0, .records = other, .records_bytes = other_bytes}}, 1);
    CHECK(receive(&fake, &request));
    CHECK_EQUAL(log_end(&fake, 0), 2);
    CHECK(request.one[0].epoch == 5 && request.one[0].offset == 2);
    /* records that it has already */
    answer(&fake, &request, (struct piece[]){{.partition = 0, .records = bytes, .records_bytes = size_bytes}}, 1);
    CHECK(receive(&fake, &request));
    CHECK_EQUAL(log_end(&fake, 0), 2);
    CHECK_EQUAL(two->observed.ended, 0);
    CHECK_EQUAL(two->observed.truncated, 0);
    fake_stop(&fake);
}

/* A response byte by byte, with a batch that is truncated at its end. */
BOTH(a_response_may_come_in_any_pieces)
{
    struct fake fake = fake_start(backend);
    struct request request;
    uint8_t bytes[1000];
    CHECK(receive(&fake, &request));
    uint32_t size_bytes = 0, whole = 0;
    for (int i = 0; i < 5; i++) {
        whole = size_bytes;
        size_bytes += batch_at(bytes + size_bytes, (struct log_batch){.mark = (uint64_t)i, .record_count = i + 1},
                               i * (i + 1) / 2, 4);
    }
    for (uint32_t cut = whole; cut <= size_bytes; cut += 31) {
        struct frame frame =
            answer_of(&fake, &request,
                      (struct piece[]){{.partition = 0, .high_watermark = 3, .records = bytes, .records_bytes = cut},
                                       {.partition = 2, .high_watermark = 0}},
                      2);
        for (uint32_t i = 0; i < frame.size_bytes; i++)
            CHECK(send(fake.link.fd, frame.bytes + i, 1, MSG_NOSIGNAL) == 1);
        frame_free(&frame);
        CHECK(receive(&fake, &request));
        CHECK_EQUAL(log_end(&fake, 0), 10);
        /* nothing of it is left */
        answer(&fake, &request, (struct piece[]){{.partition = 0, .diverging_epoch = 2, .diverging_end = 0}}, 1);
        CHECK(receive(&fake, &request));
        while (!request.one[0].there) {
            usleep(2000);
            answer(&fake, &request, NULL, 0);
            CHECK(receive(&fake, &request));
        }
        CHECK_EQUAL(log_end(&fake, 0), 0);
    }
    fake_stop(&fake);
}

static void damage(struct frame *frame, int kind)
{
    switch (kind) {
    case 0:
        frame->bytes[7] ^= 1;
        break; /* correlation id */
    case 1:
        frame->bytes[0] = 0x7f;
        break; /* a length beyond the limit */
    case 2:
        memset(frame->bytes, 0, 4);
        break; /* ... of nothing */
    case 3:
        put(frame, 4, 20);
        break; /* bytes after the response */
    case 4:
        frame->bytes[14] = 1;
        break; /* the leader refuses as a whole */
    case 5:
        frame->bytes[19] = 0;
        break; /* no topics: null */
    case 6:
        frame->bytes[19] = 0x7f;
        break; /* more topics than there is room for */
    case 7:
        frame->bytes[36] = 0x7e;
        break; /* more partitions */
    case 8:
        frame->bytes[8] = 0x7f;
        break; /* tagged fields of the header that are not there */
    case 9:
        frame->bytes[3]--, frame->size_bytes--;
        break; /* the frame ends in its last byte */
    case 10:
        put(frame, 1, 0), frame->bytes[3]++;
        break; /* ... and after it */
    }
}

/* The connection ends, Python is notified, the logs are unchanged, and the next connection
 * works. */
BOTH(an_invalid_response_ends_the_connection)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    for (int kind = 0; kind < 12; kind++) {
        struct request request;
        uint8_t bytes[200];
        CHECK(receive(&fake, &request));
        CHECK(request.session_epoch == 0 && request.count == 2);
        uint32_t size_bytes = batch_at(bytes, (struct log_batch){.mark = 1}, log_end(&fake, 0), 4);
        struct piece pieces[] = {{.partition = 2},
                                 {.partition = 0,
                                  .records = bytes,
                                  .records_bytes = kind == 11 ? size_bytes : 0,
                                  .diverging_epoch = kind == 11 ? 3 : 0}};
        struct frame frame = answer_of(&fake, &request, pieces, 2);
        damage(&frame, kind);
        client_send(&fake.link, &frame);
        frame_free(&frame);
        UNTIL(two->observed.ended == (uint32_t)kind + 1);
        CHECK(two->observed.error != 0);
        client_close(&fake.link);
        fake_connect(&fake);
    }
    CHECK_EQUAL(log_end(&fake, 2), 0);
    CHECK(log_end(&fake, 0) <= 1); /* kind 11: its records were right */
    fake_stop(&fake);
}

static void slow_writes(struct bench *b)
{
    b->log_options.flush_on_ack = 0; /* it retries when it has written */
    CHECK_EQUAL(mqd_file_watch(NULL, "write:DELAY:follower-0:ms=150"), 0);
}

/* Half a response and the end of the connection arrive while the follower writes: one event
 * reports both, and there is no other. */
BOTH(an_end_of_stream_after_a_response_is_noticed)
{
    struct fake fake = fake_start_with(backend, slow_writes);
    struct two *two = fake.two;
    struct request request;
    uint8_t bytes[200];
    int unread;
    CHECK(receive(&fake, &request));
    struct piece piece = {
        .partition = 0, .records = bytes, .records_bytes = batch_at(bytes, (struct log_batch){.mark = 1}, 0, 4)};
    answer(&fake, &request, &piece, 1);
    UNTIL(ioctl(fake.link.fd, SIOCOUTQ, &unread) == 0 && unread == 0);
    request.correlation_id++;
    struct frame half = answer_of(&fake, &request, &piece, 1);
    half.size_bytes /= 2;
    client_send(&fake.link, &half);
    frame_free(&half);
    shutdown(fake.link.fd, SHUT_WR);
    UNTIL(two->observed.ended == 1);
    CHECK_EQUAL(two->observed.error, ECONNRESET);
    CHECK_EQUAL(log_end(&fake, 0), 1);
    fake_stop(&fake);
}

/* A leader that sends nothing more times out. */
TEST(a_silent_leader_times_out)
{
    struct fake fake = {.two = two_start(MQD_BACKEND_AUTO, NULL)};
    struct two *two = fake.two;
    int ends[2];
    follower_open(two, 0);
    assign_follower(two, 0, in_step);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    fake.link.fd = ends[0];
    struct mqd_fetcher_options options = quick_options();
    options.wait_ms = 50, options.timeout_ms = 100;
    fetcher_put(two, ends[1], options);
    struct request request;
    CHECK(receive(&fake, &request));
    UNTIL(two->observed.ended == 1);
    CHECK_EQUAL(two->observed.error, ETIMEDOUT);
    fake_stop(&fake);
}

TEST(impossible_options_are_refused)
{
    struct fake fake = {.two = two_start(MQD_BACKEND_AUTO, NULL)};
    struct two *two = fake.two;
    for (int kind = 0; kind < 5; kind++) {
        struct mqd_fetcher_options options = quick_options();
        int ends[2];
        uint8_t byte;
        if (kind == 0)
            options.lane = MQD_LANE_COUNT;
        else if (kind == 1)
            options.leader_node = options.node_id;
        else if (kind == 2)
            options.response_bytes_limit = 1;
        else if (kind == 3)
            options.partition_bytes_max = 0;
        else
            options.response_bytes_max = 3u << 30;
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        CHECK_EQUAL(mqd_reactor_fetcher_put(two->b->reactors[1], ++two->b->token, ends[1], &options), 0);
        CHECK_EQUAL(done(two, two->b->token).error, MQD_E_INVALID);
        CHECK_EQUAL(recv(ends[0], &byte, 1, 0), 0); /* it was closed */
        close(ends[0]);
    }
    fake.link.fd = -1;
    fake_stop(&fake);
}
