/* When a reactor with fetchers must be awake. */
#include "mqd_test.h"

#include "server/replication/fetcher_state.h"

/* During shutdown, responses of leaders are no longer read: they must not keep it awake. */
TEST(unread_bytes_do_not_keep_a_stopping_reactor_awake)
{
    struct mqd_reactor *r = calloc(1, sizeof *r);
    struct mqd_fetcher fetcher = {.socket.readable = 1};
    r->fetchers = calloc(1, sizeof *r->fetchers);
    r->fetchers->fetcher[r->fetchers->count++] = &fetcher;
    mqd_list_init(&fetcher.put_off);
    CHECK_EQUAL(mqd_fetchers_next_ms(r), 0);
    r->stop = true;
    CHECK_EQUAL(mqd_fetchers_next_ms(r), -1);
    free(r->fetchers);
    free(r);
}

/* A reactor with one fetcher of a throttled lane without requests. */
static struct mqd_reactor *throttled(struct mqd_fetcher *fetcher, int64_t rate)
{
    struct mqd_reactor *r = calloc(1, sizeof *r);
    r->fetchers = calloc(1, sizeof *r->fetchers);
    r->fetchers->fetcher[r->fetchers->count++] = fetcher;
    *fetcher = (struct mqd_fetcher){.options.lane = MQD_LANE_THROTTLED};
    mqd_list_init(&fetcher->members);
    mqd_list_init(&fetcher->changes);
    mqd_list_init(&fetcher->put_off);
    r->fetchers->bytes_per_second_max = rate;
    r->fetchers->refilled_ms = r->now_ms = 1000000;
    return r;
}

static void throttled_free(struct mqd_reactor *r)
{
    free(r->events);
    free(r->fetchers->items);
    free(r->fetchers);
    free(r);
}

static const int64_t rates[] = {1, 3, 100, 500, 900, 1500, 20000, 1000000};

/* Also less than a byte per millisecond. */
TEST(the_catch_up_rate_holds_however_often_the_reactor_turns)
{
    for (uint32_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        struct mqd_fetcher fetcher;
        struct mqd_reactor *r = throttled(&fetcher, rates[i]);
        int64_t granted = 0;
        for (int turn = 0; turn < 10000; turn++) {
            r->now_ms++;
            mqd_fetchers_run(r);
            granted += r->fetchers->allowance_bytes;
            r->fetchers->allowance_bytes = 0;
        }
        CHECK_EQUAL(granted, rates[i] * 10);
        throttled_free(r);
    }
}

TEST(a_throttled_fetcher_sleeps_until_it_may_fetch)
{
    for (uint32_t i = 0; i < sizeof rates / sizeof *rates; i++)
        /* a reactor sleeps no longer than some seconds */
        for (int64_t owed = 0; owed < 5000 && owed < rates[i] * 8; owed += 37) {
            struct mqd_fetcher fetcher;
            struct mqd_reactor *r = throttled(&fetcher, rates[i]);
            int64_t began_ms = r->now_ms;
            int turns = 0;
            r->fetchers->allowance_bytes = -owed;
            for (; turns < 10; turns++) {
                mqd_fetchers_run(r);
                int64_t next_ms = mqd_fetchers_next_ms(r);
                if (next_ms < 0)
                    break;
                CHECK(next_ms > r->now_ms && r->fetchers->allowance_bytes <= 0);
                r->now_ms = next_ms;
            }
            CHECK(turns <= 2);
            CHECK(r->now_ms - began_ms <= (owed + 1) * 1000 / rates[i] + 2);
            throttled_free(r);
        }
}

static void set_rate(struct mqd_reactor *r, int64_t rate)
{
    mqd_fetcher_command(r, &(struct mqd_command){.kind = MQD_COMMAND_FETCHER_RATE, .offset = rate});
}

TEST(debt_is_cancelled_by_a_new_rate_not_by_the_same_rate)
{
    struct mqd_fetcher fetcher;
    struct mqd_reactor *r = throttled(&fetcher, 2000);
    r->events = calloc(MQD_EVENT_COUNT_MAX, sizeof *r->events); /* commands are answered there */
    r->event_fd = -1;
    r->fetchers->allowance_bytes = -10000;
    mqd_fetchers_run(r);
    CHECK(fetcher.not_before_ms > r->now_ms + 5000);
    set_rate(r, 2000);
    CHECK(fetcher.not_before_ms > r->now_ms + 5000);
    CHECK_EQUAL(r->fetchers->allowance_bytes, -10000);
    set_rate(r, 1000);
    CHECK_EQUAL(fetcher.not_before_ms, 0);
    CHECK_EQUAL(r->fetchers->allowance_bytes, 0);
    throttled_free(r);
}
