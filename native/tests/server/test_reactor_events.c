/* tsan */
/* The reactor's events to the main thread, which may read nothing for long. */
#include "mqd_counter_test.h"

#include "base/file_watch.h"

enum { FLOOD = 20000 }; /* more than MQD_EVENT_COUNT_MAX */

bool mqd_reactor_emit(struct mqd_reactor *r, const struct mqd_event *event);

static void flood(struct bench *b, enum mqd_event_kind kind, int32_t count)
{
    struct mqd_event event = {.kind = kind, .slot = 0, .level = 7};
    for (int32_t i = 0; i < count; i++)
        mqd_reactor_emit(b->reactors[0], &event);
}

BOTH(there_is_always_room_for_command_responses)
{
    struct bench *b = bench_start(backend, NULL);
    static const enum mqd_event_kind kinds[] = {MQD_EVENT_LOG, MQD_EVENT_LOG_START, MQD_EVENT_TRUNCATED,
                                                MQD_EVENT_RELAY_REQUESTED, MQD_EVENT_FETCHER_ENDED};
    uint32_t left[MQD_EVENT_RELAY_ENDED + 1] = {0};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        flood(b, kinds[i], i < 2 ? FLOOD : 100);
        if (i == 3)
            flood(b, MQD_EVENT_TRUNCATED, FLOOD);
    }
    enum { COMMANDS = 1000 };
    uint64_t first = b->token + 1;
    for (int i = 0; i < COMMANDS; i++)
        CHECK_EQUAL(mqd_reactor_add_log_dir(b->reactors[0], ++b->token, 0, log_root), 0);
    for (uint64_t token = first; token <= b->token;) {
        struct mqd_event event;
        struct pollfd wait = {mqd_reactor_event_fd(b->reactors[0]), POLLIN, 0};
        CHECK(poll(&wait, 1, LIMIT_MS) == 1); /* else a response is lost */
        while (mqd_reactor_next_event(b->reactors[0], &event)) {
            left[event.kind]++;
            if (event.kind == MQD_EVENT_DONE)
                CHECK_EQUAL(event.token, token++);
        }
    }
    CHECK(left[MQD_EVENT_LOG] >= 1000);
    CHECK_EQUAL(left[MQD_EVENT_FETCHER_ENDED], 100); /* it is not repeated: other events are dropped for it */
    CHECK_EQUAL(left[MQD_EVENT_RELAY_REQUESTED], 100);
    bench_stop(b);
}

/* Until their results are read: otherwise there would be more than fit. */
BOTH(no_more_commands_are_accepted_than_there_is_room_for_responses)
{
    enum { COUNT_MAX = 4096, TRIES_AFTER = 50 };
    struct bench *b = bench_start(backend, NULL);
    uint32_t taken = 0, refused = 0, answered = 0;
    while (taken <= 2 * COUNT_MAX && refused < TRIES_AFTER) /* the reactor carries them out meanwhile */
        if (mqd_reactor_add_log_dir(b->reactors[0], ++b->token, 0, log_root) == 0)
            taken++;
        else
            refused++, usleep(10000);
    CHECK_EQUAL(taken, COUNT_MAX);
    while (answered < COUNT_MAX) {
        struct mqd_event event;
        struct pollfd wait = {mqd_reactor_event_fd(b->reactors[0]), POLLIN, 0};
        CHECK(poll(&wait, 1, LIMIT_MS) == 1);
        while (mqd_reactor_next_event(b->reactors[0], &event))
            answered += event.kind == MQD_EVENT_DONE;
    }
    CHECK_EQUAL(mqd_reactor_add_log_dir(b->reactors[0], ++b->token, 0, log_root), 0);
    CHECK_EQUAL(bench_done(b, 0, b->token).error, 0);
    bench_stop(b);
}

/* The main thread sleeps until the event. */
BOTH(the_end_of_idleness_is_reported)
{
    struct bench *b = bench_start(backend, NULL);
    for (int i = 0; i < LIMIT_MS / 10 && !mqd_reactor_is_idle(b->reactors[0]); i++)
        usleep(10000);
    CHECK(mqd_reactor_is_idle(b->reactors[0]));
    struct client client = client_open(b, 0);
    struct mqd_event event = {.kind = MQD_EVENT_NONE};
    while (event.kind != MQD_EVENT_RESUMED) {
        struct pollfd wait = {mqd_reactor_event_fd(b->reactors[0]), POLLIN, 0};
        CHECK(poll(&wait, 1, LIMIT_MS) == 1);
        mqd_reactor_next_event(b->reactors[0], &event);
    }
    usleep(2500000); /* two housekeeping periods: a connection alone keeps it awake */
    CHECK(!mqd_reactor_is_idle(b->reactors[0]));
    client_close(&client);
    bench_stop(b);
}

/* It is reported once; and nothing is written there until it has been acknowledged. */
BOTH(a_full_disk_is_reported_after_thousands_of_events)
{
    struct bench *b = bench_start(backend, NULL);
    struct client client = client_open(b, 0);
    struct part part = {0, {.mark = 1, .record_count = 1}};
    struct mqd_event event;
    uint32_t reported = 0;
    flood(b, MQD_EVENT_TRUNCATED, FLOOD);
    CHECK_EQUAL(mqd_file_watch(NULL, "write:ENOSPC:.log"), 0);
    CHECK_EQUAL(client_produce(&client, -1, &part, 1).error[0], 56);
    CHECK_EQUAL(mqd_file_watch(NULL, NULL), 0);
    while (mqd_reactor_next_event(b->reactors[0], &event))
        reported += event.kind == MQD_EVENT_LOG_DIR_FULL;
    CHECK_EQUAL(reported, 1);
    client_close(&client);
    bench_stop(b);
}
