/* tsan: long */
/* A follower's events to its main thread, which may read nothing for long. The test is the
 * leader. */
#include "mqd_fake_leader_test.h"

struct mqd_reactor;
bool mqd_reactor_emit(struct mqd_reactor *r, const struct mqd_event *event);

/* The leader reports it only once. */
BOTH(a_log_start_is_reported_when_there_is_room_again)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request request;
    three_records(&fake, &request, 0);
    answer(&fake, &request, (struct piece[]){{.partition = 0, .high_watermark = 3}}, 1);
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 3);
    CHECK(receive(&fake, &request));
    struct mqd_event line = {.kind = MQD_EVENT_LOG, .level = 7};
    while (mqd_reactor_emit(two->b->reactors[1], &line))
        ;
    answer(&fake, &request, (struct piece[]){{.partition = 0, .high_watermark = 3, .log_start = 2}}, 1);
    CHECK(receive(&fake, &request)); /* it has been taken */
    UNTIL(two->observed.log_start == 1);
    CHECK_EQUAL(two->observed.offset, 2);
    fake_stop(&fake);
}

/* It arrives with records, and with a high watermark that covers them: as long as they are not
 * written, the high watermark is lower here. */
BOTH(a_log_start_is_reported_after_its_records_are_written)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request request;
    uint8_t bytes[400];
    three_records(&fake, &request, 0);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).high_watermark, 0);
    uint32_t size_bytes = batch_at(bytes, (struct log_batch){.record_count = 1}, 3, 4);
    answer(&fake, &request,
           (struct piece[]){
               {.partition = 0, .high_watermark = 4, .log_start = 2, .records = bytes, .records_bytes = size_bytes}},
           1);
    UNTIL(two->observed.log_start == 1);
    CHECK_EQUAL(two->observed.offset, 2);
    CHECK_EQUAL(positions_of(two, FOLLOWED(0)).high_watermark, 4);
    fake_stop(&fake);
}

/* An unreported value is the old leader's. The new one, elected although it was behind, has
 * other records below it. */
BOTH(an_earlier_leaders_log_start_is_not_attributed_to_its_successors)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request request;
    struct role role = in_step;
    three_records(&fake, &request, 0);
    /* above the high watermark */
    answer(&fake, &request, (struct piece[]){{.partition = 0, .high_watermark = 0, .log_start = 2}}, 1);
    CHECK(receive(&fake, &request));
    role.leader = 3, role.leader_epoch = 5, role.partition_epoch = 2;
    assign_follower(two, 0, role);
    answer(&fake, &request, NULL, 0);
    CHECK(receive(&fake, &request) && request.forgotten_count == 1);
    role.leader = 1, role.leader_epoch = 6, role.partition_epoch = 3;
    assign_follower(two, 0, role);
    answer(&fake, &request, NULL, 0);
    CHECK(receive(&fake, &request) && request.one[0].there && request.one[0].epoch == 6);
    answer(&fake, &request, (struct piece[]){{.partition = 0, .high_watermark = 3}}, 1);
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 3);
    uint8_t bytes[400];
    uint32_t size_bytes = batch_at(bytes, (struct log_batch){.record_count = 3}, 0, 4);
    CHECK(receive(&fake, &request));
    answer(&fake, &request,
           (struct piece[]){
               {.partition = 2, .high_watermark = 3, .log_start = 1, .records = bytes, .records_bytes = size_bytes}},
           1);
    /* unreported log starts are handled in the order of slots: partition 0 comes before 2 */
    UNTIL(two->observed.log_start > 0);
    CHECK_EQUAL(two->observed.log_start, 1);
    CHECK_EQUAL(two->observed.offset, 1);
    fake_stop(&fake);
}

/* The new leader's log may begin below the start reported for the old one's. */
BOTH(a_log_start_is_reported_also_when_an_earlier_leaders_was_higher)
{
    struct fake fake = fake_start(backend);
    struct two *two = fake.two;
    struct request request;
    struct role role = in_step;
    three_records(&fake, &request, 0);
    answer(&fake, &request, (struct piece[]){{.partition = 0, .high_watermark = 3}}, 1);
    UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == 3);
    CHECK(receive(&fake, &request));
    answer(&fake, &request, (struct piece[]){{.partition = 0, .high_watermark = 3, .log_start = 2}}, 1);
    UNTIL(two->observed.log_start == 1);
    CHECK_EQUAL(two->observed.offset, 2);
    role.leader = 3, role.leader_epoch = 5, role.partition_epoch = 2;
    assign_follower(two, 0, role);
    CHECK(receive(&fake, &request));
    answer(&fake, &request, NULL, 0);
    CHECK(receive(&fake, &request) && request.forgotten_count == 1);
    role.leader = 1, role.leader_epoch = 6, role.partition_epoch = 3;
    assign_follower(two, 0, role);
    answer(&fake, &request, NULL, 0);
    CHECK(receive(&fake, &request) && request.one[0].there && request.one[0].epoch == 6);
    answer(&fake, &request, (struct piece[]){{.partition = 0, .high_watermark = 3, .log_start = 1}}, 1);
    UNTIL(two->observed.log_start == 2);
    CHECK_EQUAL(two->observed.offset, 1);
    fake_stop(&fake);
}
