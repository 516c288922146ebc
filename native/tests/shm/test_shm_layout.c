/* tsan */
#include <pthread.h>

#include "base/atomic.h"
#include "base/error.h"
#include "mqd_test.h"
#include "shm/layout.h"
#include "shm/tally.h"
#include "shm/quota.h"

static const uint8_t boot_id[16] = {1, 2, 3};
static const uint8_t topic_a[16] = {0xa}, topic_b[16] = {0xb};

static void *control_make(void)
{
    void *control = aligned_alloc(64, mqd_control_size_bytes());
    memset(control, 0, mqd_control_size_bytes());
    mqd_control_format(control, mqd_control_size_bytes(), 4, boot_id, 77, 1000);
    return control;
}

TEST(format_then_attach)
{
    size_t size = mqd_control_size_bytes();
    void *control = aligned_alloc(64, size);
    memset(control, 0, size);
    CHECK_EQUAL(mqd_control_attach(control, size), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_LAYOUT);
    CHECK_CONTAINS(mqd_error_message(), "not formatted");
    CHECK_EQUAL(mqd_control_format(control, size, 0, boot_id, 1, 0), -1);
    CHECK_EQUAL(mqd_control_format(control, size, 65, boot_id, 1, 0), -1);
    CHECK_EQUAL(mqd_control_format(control, size - 1, 4, boot_id, 1, 0), -1);
    CHECK_EQUAL(mqd_control_format(control, size, 4, boot_id, 77, 1000), 0);
    CHECK_EQUAL(mqd_control_attach(control, size), 0);
    CHECK_EQUAL(mqd_control_worker_count(control), 4);
    CHECK_EQUAL(mqd_control_generation(control), 77);
    CHECK_EQUAL(mqd_control_log_level(control), 6);
    free(control);
}

TEST(every_difference_is_refused_with_what_to_do)
{
    size_t size = mqd_control_size_bytes();
    void *control = control_make();
    struct mqd_control_header *header = mqd_control_header(control), good = *header;
    CHECK_EQUAL(mqd_control_attach(control, 100), -1);
    CHECK_EQUAL(mqd_control_attach(control, size - 1), -1);
    CHECK_CONTAINS(mqd_error_message(), "mqd down");
    header->magic ^= 1;
    CHECK_EQUAL(mqd_control_attach(control, size), -1);
    CHECK_CONTAINS(mqd_error_message(), "not a control segment");
    *header = good;
    header->layout_version++;
    CHECK_EQUAL(mqd_control_attach(control, size), -1);
    CHECK_CONTAINS(mqd_error_message(), "layout version 3");
    *header = good;
    header->abi_hash ^= 1ull << 63;
    CHECK_EQUAL(mqd_control_attach(control, size), -1);
    CHECK_CONTAINS(mqd_error_message(), "layout hash");
    CHECK_CONTAINS(mqd_error_message(), "mqd down");
    *header = good;
    header->total_bytes++;
    CHECK_EQUAL(mqd_control_attach(control, size), -1);
    *header = good;
    header->worker_count = 65;
    CHECK_EQUAL(mqd_control_attach(control, size), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_LAYOUT);
    free(control);
}

TEST(parts_do_not_overlap_and_bounds_hold)
{
    uint8_t *control = control_make();
    uint8_t *end = control + mqd_control_size_bytes();
    CHECK((uint8_t *)mqd_control_api_versions(control, 0) == control + 4096);
    CHECK((uint8_t *)(mqd_control_api_versions(control, 7) + 1) == (uint8_t *)mqd_control_endpoint(control, 0));
    CHECK((uint8_t *)(mqd_control_endpoint(control, 65) + 1) == (uint8_t *)mqd_control_stats(control, 0));
    CHECK((uint8_t *)(mqd_control_stats(control, 63) + 1) == (uint8_t *)mqd_control_partition(control, 0));
    CHECK((uint8_t *)(mqd_control_partition(control, MQD_PARTITION_SLOT_COUNT - 1) + 1) ==
          (uint8_t *)mqd_control_quotas(control));
    CHECK((uint8_t *)(mqd_control_quotas(control) + 1) == (uint8_t *)mqd_control_tallies(control));
    CHECK((uint8_t *)(mqd_control_tallies(control) + 1) == end);
    CHECK(!mqd_control_api_versions(control, 8) && !mqd_control_endpoint(control, 66) &&
          !mqd_control_stats(control, 64) && !mqd_control_partition(control, MQD_PARTITION_SLOT_COUNT));
    for (uint32_t i = 0; i < 66; i++)
        CHECK((uintptr_t)mqd_control_endpoint(control, i) % 64 == 0);
    CHECK((uintptr_t)mqd_control_partition(control, 1) % 64 == 0);
    free(control);
}

TEST(endpoint_states)
{
    void *control = control_make();
    mqd_endpoint_set_state(control, 65, MQD_PROCESS_RUNNING, 1234);
    CHECK_EQUAL(mqd_endpoint_state(control, 65), MQD_PROCESS_RUNNING);
    CHECK_EQUAL(mqd_endpoint_pid(control, 65), 1234);
    CHECK_EQUAL(mqd_endpoint_generation(control, 65), 0);
    mqd_endpoint_set_state(control, 65, MQD_PROCESS_DEAD, 0);
    CHECK_EQUAL(mqd_endpoint_generation(control, 65), 1);
    mqd_endpoint_set_state(control, 65, MQD_PROCESS_STARTING, 1235);
    CHECK_EQUAL(mqd_endpoint_generation(control, 65), 1);
    mqd_endpoint_set_state(control, 66, MQD_PROCESS_RUNNING, 1);
    CHECK_EQUAL(mqd_endpoint_state(control, 66), MQD_PROCESS_ABSENT);
    free(control);
}

TEST(header_words)
{
    void *control = control_make();
    mqd_control_set_metadata_version(control, 9);
    CHECK_EQUAL(mqd_control_metadata_version(control), 9);
    mqd_control_set_log_level(control, 7);
    CHECK_EQUAL(mqd_control_log_level(control), 7);
    CHECK_EQUAL(mqd_control_header(control)->lease_deadline_ns, INT64_MAX);
    mqd_control_set_broker(control, 3, 4, 5);
    CHECK(mqd_control_header(control)->broker_epoch == 3 && mqd_control_header(control)->incarnation == 4 &&
          mqd_control_header(control)->lease_deadline_ns == 5);
    free(control);
}

TEST(slots_are_assigned_viewed_and_cleared)
{
    void *control = control_make();
    struct mqd_partition_view view;
    struct mqd_positions positions = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    CHECK_EQUAL(mqd_slot_view(control, MQD_PARTITION_SLOT_COUNT, &view), -1);
    CHECK_EQUAL(mqd_slot_view(control, 5, &view), 0);
    CHECK_EQUAL(view.state, MQD_SLOT_FREE);
    mqd_endpoint_set_state(control, 3, MQD_PROCESS_DEAD, 0);
    CHECK_EQUAL(mqd_slot_assign(control, 5, topic_a, 2, 3, 1, 6), 0);
    mqd_slot_publish(mqd_control_partition(control, 5), &positions);
    CHECK_EQUAL(mqd_slot_view(control, 5, &view), 0);
    CHECK(memcmp(view.topic_id, topic_a, 16) == 0 && memcmp(&view.positions, &positions, sizeof positions) == 0);
    CHECK(view.partition_index == 2 && view.leader_epoch == 6 && view.owner == 3 && view.state == MQD_SLOT_OPENING &&
          view.log_dir == 1 && view.owner_generation == 1);
    mqd_slot_set_state(control, 5, MQD_SLOT_ONLINE);
    /* again by a restarted controller: nothing is lost */
    CHECK_EQUAL(mqd_slot_assign(control, 5, topic_a, 2, 3, 1, 7), 0);
    mqd_slot_view(control, 5, &view);
    CHECK(view.state == MQD_SLOT_ONLINE && view.leader_epoch == 7 && view.positions.log_end_offset == 3);
    /* another owner has to open it first */
    CHECK_EQUAL(mqd_slot_assign(control, 5, topic_a, 2, 2, 1, 8), 0);
    mqd_slot_view(control, 5, &view);
    CHECK(view.state == MQD_SLOT_OPENING && view.owner == 2 && view.positions.log_end_offset == 3);
    /* another partition's assignment is refused */
    CHECK_EQUAL(mqd_slot_assign(control, 5, topic_b, 2, 2, 1, 8), -1);
    CHECK_CONTAINS(mqd_error_message(), "clear it first");
    CHECK_EQUAL(mqd_slot_assign(control, 5, topic_a, 3, 2, 1, 8), -1);
    uint64_t generation = mqd_control_header(control)->segments_generation;
    uint64_t slot_generation = view.segments_generation;
    struct mqd_partition_traffic traffic;
    mqd_slot_count_in(mqd_control_partition(control, 5), 3, 300);
    mqd_slot_count_in(mqd_control_partition(control, 5), 1, 100);
    mqd_slot_count_out(mqd_control_partition(control, 5), 800);
    CHECK_EQUAL(mqd_slot_traffic(control, 5, &traffic), 0);
    CHECK(traffic.records_in == 4 && traffic.bytes_in == 400 && traffic.bytes_out == 800);
    CHECK_EQUAL(mqd_slot_traffic(control, MQD_PARTITION_SLOT_COUNT, &traffic), -1);
    mqd_slot_clear(control, 5);
    CHECK_EQUAL(mqd_slot_traffic(control, 5, &traffic), 0);
    CHECK(traffic.records_in == 0 && traffic.bytes_in == 0 && traffic.bytes_out == 0);
    mqd_slot_view(control, 5, &view);
    CHECK(view.state == MQD_SLOT_FREE && view.owner == MQD_OWNER_NONE && view.positions.log_end_offset == 0 &&
          view.segments_generation == slot_generation + 1);
    CHECK_EQUAL(mqd_control_header(control)->segments_generation, generation + 1);
    CHECK_EQUAL(mqd_slot_assign(control, 5, topic_b, 0, 0, 0, 0), 0);
    CHECK_EQUAL(mqd_slot_assign(control, MQD_PARTITION_SLOT_COUNT, topic_b, 0, 0, 0, 0), -1);
    CHECK_EQUAL(mqd_slot_assign(control, 6, topic_b, 0, 64, 0, 0), -1);
    CHECK_EQUAL(mqd_slot_assign(control, 6, topic_b, 0, 0, MQD_LOG_DIR_COUNT_MAX, 0), -1);
    CHECK_EQUAL(mqd_slot_assign(control, 6, topic_b, -1, 0, 0, 0), -1);
    CHECK_EQUAL(mqd_slot_assign(control, 6, topic_b, 0, MQD_OWNER_NONE, 0, 0), 0);
    free(control);
}

TEST(used_slots_are_found)
{
    void *control = control_make();
    static uint32_t slots[MQD_PARTITION_SLOT_COUNT];
    const uint32_t last = MQD_PARTITION_SLOT_COUNT - 1;
    CHECK_EQUAL(mqd_slots_list_used(control, slots), 0);
    mqd_slot_assign(control, 2, topic_a, 1, 0, 0, 1);
    mqd_slot_assign(control, 3, topic_a, 2, 0, 0, 1);
    mqd_slot_assign(control, last, topic_b, 0, 0, 0, 1);
    mqd_slot_clear(control, 2);
    mqd_control_partition(control, 5)->identity_version |= 1; /* died while assigning a free one */
    CHECK_EQUAL(mqd_slots_list_used(control, slots), 3);
    CHECK(slots[0] == 3 && slots[1] == 5 && slots[2] == last);
    free(control);
}

TEST(a_controller_that_dies_in_the_middle_stops_no_reader)
{
    void *control = control_make();
    struct mqd_partition_view view;
    struct mqd_partition_slot *slot = mqd_control_partition(control, 0);
    mqd_slot_assign(control, 0, topic_a, 1, 0, 0, 1);
    slot->identity_version |= 1; /* died here */
    slot->topic_id[0] = 0x55;
    CHECK_EQUAL(mqd_slot_view(control, 0, &view), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_STALE);
    CHECK_EQUAL(mqd_slot_assign(control, 0, topic_a, 1, 0, 0, 1), 0);
    CHECK_EQUAL(mqd_slot_view(control, 0, &view), 0);
    CHECK(view.topic_id[0] == 0xa && view.state == MQD_SLOT_OPENING);
    free(control);
}

/* L2: killed anywhere in mqd_slot_publish, the old positions stay intact. */
TEST(an_owner_that_dies_in_the_middle_leaves_the_old_positions)
{
    void *control = control_make();
    struct mqd_partition_slot *slot = mqd_control_partition(control, 0);
    struct mqd_positions old = {1, 2, 3, 4, 5, 6, 7, 8, 9}, got, next = {11, 12, 13, 14, 15, 16, 17, 18, 19};
    mqd_slot_publish(slot, &old);
    for (size_t words = 0; words <= 8; words++) {
        memcpy(&slot->positions[(slot->version + 1) & 1], &next, 8 * words);
        mqd_slot_positions(slot, &got);
        CHECK(memcmp(&got, &old, sizeof old) == 0);
    }
    mqd_slot_publish(slot, &next);
    mqd_slot_positions(slot, &got);
    CHECK(memcmp(&got, &next, sizeof next) == 0);
    free(control);
}

TEST(blobs)
{
    void *control = control_make();
    uint8_t body[MQD_BLOB_BYTES_MAX + 8], got[MQD_BLOB_BYTES_MAX + 8];
    for (size_t i = 0; i < sizeof body; i++)
        body[i] = (uint8_t)(i * 7 + 1);
    struct mqd_blob *blob = mqd_control_api_versions(control, 7);
    CHECK_EQUAL(mqd_blob_read(blob, got, sizeof got), -1);
    for (uint32_t size = 0; size <= MQD_BLOB_BYTES_MAX; size += size < 40 ? 1 : 505) {
        memset(got, 0xee, sizeof got);
        CHECK_EQUAL(mqd_control_set_api_versions(control, 7, body, size), 0);
        CHECK_EQUAL(mqd_blob_read(blob, got, sizeof got), size);
        CHECK(memcmp(got, body, size) == 0 && got[size] == 0xee);
        memset(got, 0xee, sizeof got);
        CHECK_EQUAL(mqd_blob_read(blob, got, 13), size);
        CHECK(memcmp(got, body, size < 13 ? size : 13) == 0 && got[13] == 0xee);
    }
    CHECK_EQUAL(mqd_control_set_api_versions(control, 7, body, MQD_BLOB_BYTES_MAX), 0);
    CHECK_EQUAL(mqd_blob_read(blob, got, sizeof got), MQD_BLOB_BYTES_MAX);
    CHECK_EQUAL(mqd_control_set_api_versions(control, 7, body, MQD_BLOB_BYTES_MAX + 1), -1);
    CHECK_EQUAL(mqd_control_set_api_versions(control, 8, body, 1), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
    blob->size_bytes[blob->version & 1] = UINT32_MAX; /* overwritten memory is not followed */
    CHECK_EQUAL(mqd_blob_read(blob, got, sizeof got), -1);
    free(control);
}

TEST(stats)
{
    void *control = control_make();
    static uint64_t counters[MQD_COUNTER_COUNT], histograms[MQD_HISTOGRAM_COUNT * MQD_HISTOGRAM_BUCKET_COUNT];
    struct mqd_worker_stats *stats = mqd_control_stats(control, 63);
    mqd_counter_add(&stats->counter[MQD_COUNT_LINK_STALLS], 5);
    mqd_counter_add(&stats->histogram[MQD_TIME_CONTROL][127], 6);
    mqd_counter_add(&stats->histogram[MQD_TIME_FETCH][0], 7);
    mqd_stats_read(control, 63, counters, histograms);
    CHECK_EQUAL(counters[MQD_COUNT_LINK_STALLS], 5);
    CHECK_EQUAL(histograms[MQD_TIME_CONTROL * 128 + 127], 6);
    CHECK_EQUAL(histograms[MQD_TIME_FETCH * 128], 7);
    mqd_stats_read(control, 64, counters, histograms);
    CHECK_EQUAL(counters[MQD_COUNT_LINK_STALLS], 0);
    free(control);
}

/* ---- threads over one mapping: a mixture of two publications is a failure ---- */

struct shared {
    void *control;
    int done;
    int rounds;
};

static void *publisher(void *argument)
{
    struct shared *shared = argument;
    uint8_t body[256];
    for (int64_t i = 1; i <= shared->rounds; i++) {
        struct mqd_positions positions = {i, i, i, i, i, i, i, (uint32_t)i, (uint32_t)i};
        mqd_slot_publish(mqd_control_partition(shared->control, 1), &positions);
        uint32_t size = 8 + (uint32_t)(i % 200);
        memset(body, (int)size, size);
        mqd_control_set_api_versions(shared->control, 0, body, size);
        uint8_t topic[16];
        memset(topic, (int)(i & 0x7f), sizeof topic);
        mqd_slot_clear(shared->control, 2);
        mqd_slot_assign(shared->control, 2, topic, (int32_t)(i & 0x7f), (uint16_t)(i & 0x3f), (uint8_t)(i & 0x1f),
                        (int32_t)(i & 0x7f));
    }
    mqd_store_release(&shared->done, 1);
    return NULL;
}

static void *watcher(void *argument)
{
    struct shared *shared = argument;
    struct mqd_partition_view view;
    int64_t last = 0;
    uint8_t body[256];
    while (!mqd_load_acquire(&shared->done)) {
        struct mqd_positions p;
        mqd_slot_positions(mqd_control_partition(shared->control, 1), &p);
        CHECK_OR(p.log_start_offset >= last, return NULL);
        last = p.log_start_offset;
        CHECK_OR(p.high_watermark == last && p.log_end_offset == last && p.last_stable_offset == last &&
                     p.durable_offset == last && p.high_watermark_segment == last && p.log_end_segment == last &&
                     p.high_watermark_position == (uint32_t)last && p.log_end_position == (uint32_t)last,
                 return NULL);
        int size = mqd_blob_read(mqd_control_api_versions(shared->control, 0), body, sizeof body);
        for (int i = 0; i < size; i++)
            CHECK_OR(body[i] == (uint8_t)size, return NULL);
        if (mqd_slot_view(shared->control, 2, &view) == 0 && view.state != MQD_SLOT_FREE) {
            int n = view.topic_id[0];
            for (int i = 0; i < 16; i++)
                CHECK_OR(view.topic_id[i] == n, return NULL);
            CHECK_OR(view.partition_index == n && view.leader_epoch == n && view.owner == (n & 0x3f) &&
                         view.log_dir == (n & 0x1f),
                     return NULL);
        }
    }
    return NULL;
}

TEST(threads_never_see_half_a_publication)
{
    struct shared shared = {.control = control_make(), .rounds = test_long() ? 3000000 : 30000};
    pthread_t thread[3];
    pthread_create(&thread[1], NULL, watcher, &shared);
    pthread_create(&thread[2], NULL, watcher, &shared);
    pthread_create(&thread[0], NULL, publisher, &shared);
    for (int i = 0; i < 3; i++)
        pthread_join(thread[i], NULL);
    free(shared.control);
}
