/* Share sessions: epochs, names, partitions. */
#include "mqd_test.h"
#include "share/sessions.h"
#include "wire/kafka_errors.h"

static struct mqd_text text(const char *bytes)
{
    return (struct mqd_text){(const uint8_t *)bytes, (int32_t)strlen(bytes)};
}

static struct mqd_share_sessions *made(uint32_t partition_count_max, uint64_t bytes_max)
{
    struct mqd_share_sessions *sessions = calloc(1, sizeof *sessions);
    sessions->partition_count_max = partition_count_max;
    sessions->bytes_max = bytes_max;
    return sessions;
}

TEST(epochs_are_kafkas)
{
    struct mqd_share_sessions *sessions = made(10, 1 << 20);
    struct mqd_node owner;
    mqd_list_init(&owner);
    struct mqd_share_session *none = NULL, *one = mqd_share_session_open(sessions, text("g"), text("m"), &owner);
    CHECK_EQUAL(mqd_share_session_check(none, 0, MQD_SHARE_MAY_OPEN), 0);
    CHECK_EQUAL(mqd_share_session_check(none, 1, MQD_SHARE_MAY_OPEN), MQD_KAFKA_SHARE_SESSION_NOT_FOUND);
    CHECK_EQUAL(mqd_share_session_check(none, -1, MQD_SHARE_MAY_OPEN), MQD_KAFKA_SHARE_SESSION_NOT_FOUND);
    CHECK_EQUAL(mqd_share_session_check(one, 0, MQD_SHARE_MUST_EXIST), MQD_KAFKA_INVALID_SHARE_SESSION_EPOCH);
    CHECK_EQUAL(mqd_share_session_check(one, 2, MQD_SHARE_MAY_OPEN), MQD_KAFKA_INVALID_SHARE_SESSION_EPOCH);
    CHECK_EQUAL(mqd_share_session_check(one, -2, MQD_SHARE_MAY_OPEN), MQD_KAFKA_INVALID_SHARE_SESSION_EPOCH);
    CHECK_EQUAL(mqd_share_session_check(one, 1, MQD_SHARE_MUST_EXIST), 0);
    CHECK_EQUAL(mqd_share_session_check(one, -1, MQD_SHARE_MUST_EXIST), 0);
    one->epoch = INT32_MAX;
    mqd_share_session_advance_epoch(one);
    CHECK_EQUAL(one->epoch, 1);
    mqd_share_session_close(sessions, one);
    CHECK(sessions->count == 0 && sessions->bytes == 0 && mqd_list_empty(&owner));
    free(sessions);
}

TEST(a_session_is_found_by_both_names)
{
    struct mqd_share_sessions *sessions = made(10, 1 << 20);
    struct mqd_node owner;
    mqd_list_init(&owner);
    struct mqd_share_session *one = mqd_share_session_open(sessions, text("ab"), text("c"), &owner);
    CHECK(mqd_share_session_find(sessions, text("ab"), text("c")) == one);
    CHECK(!mqd_share_session_find(sessions, text("a"), text("bc")));
    CHECK(!mqd_share_session_find(sessions, text("ab"), text("d")));
    struct mqd_share_session *two = mqd_share_session_open(sessions, text("a"), text("bc"), &owner);
    CHECK(mqd_share_session_find(sessions, text("a"), text("bc")) == two);
    mqd_share_sessions_verify(sessions);
    mqd_share_session_close(sessions, one);
    mqd_share_session_close(sessions, two);
    free(sessions);
}

TEST(partitions_are_in_order_once_each_and_bounded)
{
    struct mqd_share_sessions *sessions = made(50, 1 << 20);
    struct mqd_node owner;
    mqd_list_init(&owner);
    struct mqd_share_session *one = mqd_share_session_open(sessions, text("g"), text("m"), &owner);
    uint64_t random = 88172645463325252ull;
    for (int i = 0; i < 2000; i++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        uint8_t id[16] = {(uint8_t)(random % 5)};
        int32_t index = (int32_t)(random >> 16) % 20;
        struct mqd_share_entry *entry = mqd_share_session_get(one, id, index);
        if (random >> 40 & 1 && entry) {
            mqd_share_session_remove(one, entry);
            CHECK(!mqd_share_session_get(one, id, index));
        } else {
            uint32_t before = one->entry_count;
            struct mqd_share_entry *put = mqd_share_session_put(sessions, one, id, index);
            CHECK(put ? put->partition_index == index && memcmp(put->topic_id, id, 16) == 0 : before == 50 && !entry);
            CHECK_EQUAL(one->entry_count, before + (put && !entry));
        }
        mqd_share_sessions_verify(sessions);
    }
    mqd_share_session_close(sessions, one);
    free(sessions);
}

TEST(memory_is_bounded)
{
    struct mqd_share_sessions *sessions = made(1000, 600);
    struct mqd_node owner;
    mqd_list_init(&owner);
    struct mqd_share_session *one = mqd_share_session_open(sessions, text("g"), text("m"), &owner);
    uint8_t id[16] = {1};
    int32_t index = 0;
    while (mqd_share_session_put(sessions, one, id, index))
        index++;
    CHECK(index > 0 && sessions->bytes <= 600);
    mqd_share_sessions_verify(sessions);
    while (mqd_share_session_open(sessions, text("g"), text("many"), &owner))
        CHECK(sessions->bytes <= 600);
    while (!mqd_list_empty(&owner))
        mqd_share_session_close(sessions, MQD_CONTAINER(owner.next, struct mqd_share_session, node));
    CHECK_EQUAL(sessions->bytes, 0);
    free(sessions);
}
