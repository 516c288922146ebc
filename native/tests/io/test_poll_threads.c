/* tsan */
/* A poll that several threads use: interrupts, users, traffic. Every test runs for both backends. */
#include "mqd_poll_test.h"

static void *interrupt_thread(void *argument)
{
    mqd_poll_interrupt(argument);
    return NULL;
}

BOTH(interrupt)
{
    struct mqd_poll_event event;
    mqd_poll_interrupt(poll);
    CHECK_EQUAL(mqd_poll_wait(poll, &event, 1, -1), 0);
    CHECK(quiet(poll));
    for (int i = 0; i < 200; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, interrupt_thread, poll);
        CHECK_EQUAL(mqd_poll_wait(poll, &event, 1, -1), 0);
        pthread_join(thread, NULL);
    }
}

/* As in the reactor: created and first filled by one thread, used by another, destroyed by the
 * first. */
struct user {
    struct mqd_poll *poll;
    int pair[2];
    int fd;
    bool good;
};

static void *use(void *argument)
{
    struct user *user = argument;
    int32_t result = -1;
    user->good = (wait_flags(user->poll, 5, MQD_POLL_READABLE) & MQD_POLL_READABLE) &&
                 mqd_poll_sync(user->poll, user->fd, false, 6) == 0 && wait_done(user->poll, 6, &result) && result == 0;
    mqd_poll_sync(user->poll, user->fd, false, 7); /* still in flight at the end */
    mqd_poll_wait(user->poll, &(struct mqd_poll_event){0}, 1, 0);
    return NULL;
}

BOTH(created_by_another_thread)
{
    struct user user = {.poll = poll, .fd = file_make(1000)};
    pair_make(user.pair);
    CHECK_EQUAL(mqd_poll_add(poll, user.pair[0], 5), 0);
    CHECK_EQUAL(write(user.pair[1], "x", 1), 1);
    pthread_t thread;
    pthread_create(&thread, NULL, use, &user);
    pthread_join(thread, NULL);
    CHECK(user.good);
    close(user.pair[0]);
    close(user.pair[1]);
    close(user.fd);
}

/* A writer thread and a reader that reads only on an event: a lost edge makes the sum too
 * small. */
enum { STREAMS = 8 };
struct traffic {
    int writer[STREAMS];
    uint64_t total;
};

static void *traffic_write(void *argument)
{
    struct traffic *traffic = argument;
    uint64_t seed = 9, sent = 0;
    char bytes[300] = {0};
    while (sent < traffic->total) {
        size_t size = 1 + test_random(&seed) % sizeof bytes;
        ssize_t written = write(traffic->writer[test_random(&seed) % STREAMS], bytes, size);
        if (written > 0)
            sent += (uint64_t)written;
        else
            sched_yield();
    }
    for (int i = 0; i < STREAMS; i++)
        shutdown(traffic->writer[i], SHUT_WR);
    traffic->total = sent;
    return NULL;
}

BOTH(no_edge_is_lost)
{
    struct traffic traffic = {.total = test_long() ? 300000000 : 3000000};
    int reader[STREAMS], open_count = STREAMS;
    uint64_t received = 0;
    for (int i = 0; i < STREAMS; i++) {
        int pair[2];
        pair_make(pair);
        reader[i] = pair[0];
        traffic.writer[i] = pair[1];
        CHECK_EQUAL(mqd_poll_add(poll, pair[0], (uint64_t)i), 0);
    }
    pthread_t thread;
    pthread_create(&thread, NULL, traffic_write, &traffic);
    while (open_count > 0) {
        struct mqd_poll_event events[3];
        int count = mqd_poll_wait(poll, events, 3, LONG_NS);
        if (count <= 0) {
            TEST_FAIL("no event after %llu bytes", (unsigned long long)received);
            exit(1);
        }
        for (int i = 0; i < count; i++) {
            char bytes[1000];
            ssize_t got = -1;
            int fd = reader[events[i].token];
            while ((events[i].flags & MQD_POLL_READABLE) && fd >= 0 && (got = read(fd, bytes, sizeof bytes)) > 0)
                received += (uint64_t)got;
            if (got == 0) {
                mqd_poll_remove(poll, fd, events[i].token);
                close(fd);
                reader[events[i].token] = -1;
                open_count--;
            }
        }
    }
    pthread_join(thread, NULL);
    CHECK_EQUAL(received, traffic.total);
    for (int i = 0; i < STREAMS; i++)
        close(traffic.writer[i]);
}
