/* tsan */
#include <errno.h>
#include <pthread.h>

#include "base/error.h"
#include "mqd_test.h"

TEST(set_formats_and_returns_minus_one)
{
    CHECK_EQUAL(mqd_error_set(MQD_E_CORRUPT, "segment %d is cut at %s", 7, "byte 12"), -1);
    CHECK_TEXT(mqd_error_message(), "segment 7 is cut at byte 12");
    CHECK_EQUAL(mqd_error_code(), MQD_E_CORRUPT);
}

TEST(system_adds_the_errno_text)
{
    CHECK_EQUAL(mqd_error_system(ENOSPC, "cannot grow %s", "x.log"), -1);
    CHECK_TEXT(mqd_error_message(), "cannot grow x.log: No space left on device");
    CHECK_EQUAL(mqd_error_code(), ENOSPC);
}

TEST(wrap_puts_context_before_and_keeps_the_code)
{
    mqd_error_set(EIO, "read failed");
    CHECK_EQUAL(mqd_error_wrap("partition %s-%d", "orders", 3), -1);
    mqd_error_wrap("recovery");
    CHECK_TEXT(mqd_error_message(), "recovery: partition orders-3: read failed");
    CHECK_EQUAL(mqd_error_code(), EIO);
}

TEST(wrap_after_static_text)
{
    CHECK_EQUAL(mqd_error_set_static(MQD_E_FULL, "the ring is full"), -1);
    CHECK_TEXT(mqd_error_message(), "the ring is full");
    mqd_error_wrap("link 3");
    CHECK_TEXT(mqd_error_message(), "link 3: the ring is full");
    CHECK_EQUAL(mqd_error_code(), MQD_E_FULL);
}

TEST(long_messages_are_cut_not_overrun)
{
    char long_text[2 * MQD_ERROR_MESSAGE_BYTES];
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = 0;
    mqd_error_system(EIO, "%s", long_text);
    CHECK_EQUAL(strlen(mqd_error_message()), MQD_ERROR_MESSAGE_BYTES - 1);
    mqd_error_wrap("%s", long_text);
    CHECK_EQUAL(strlen(mqd_error_message()), MQD_ERROR_MESSAGE_BYTES - 1);
}

TEST(the_old_message_may_be_an_argument)
{
    mqd_error_set(EIO, "inner");
    mqd_error_set(EIO, "outer (%s)", mqd_error_message());
    CHECK_TEXT(mqd_error_message(), "outer (inner)");
}

static void *other_thread(void *unused)
{
    CHECK_OR(mqd_error_code() == 0 && mqd_error_message()[0] == 0, return NULL);
    mqd_error_set(ENOENT, "other");
    return unused;
}

TEST(state_is_per_thread)
{
    pthread_t thread;
    mqd_error_set(EIO, "mine");
    pthread_create(&thread, NULL, other_thread, NULL);
    pthread_join(thread, NULL);
    CHECK_TEXT(mqd_error_message(), "mine");
    CHECK_EQUAL(mqd_error_code(), EIO);
}
