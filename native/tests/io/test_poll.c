/* tsan */
/* Sockets, files and the pool. Every test runs with both implementations. */
#include "io/uring.h"
#include "mqd_poll_test.h"

/* ---- sockets ---- */

BOTH(edges)
{
    int pair[2];
    pair_make(pair);
    CHECK_EQUAL(mqd_poll_add(poll, pair[0], 7), 0);
    CHECK_EQUAL(wait_flags(poll, 7, MQD_POLL_WRITABLE), MQD_POLL_WRITABLE);
    CHECK(quiet(poll));
    CHECK_EQUAL(write(pair[1], "x", 1), 1);
    CHECK(wait_flags(poll, 7, MQD_POLL_READABLE) & MQD_POLL_READABLE);
    CHECK(quiet(poll)); /* nothing was read, but nothing new arrived */
    CHECK_EQUAL(write(pair[1], "y", 1), 1);
    CHECK(wait_flags(poll, 7, MQD_POLL_READABLE) & MQD_POLL_READABLE);
    char bytes[8];
    CHECK_EQUAL(read(pair[0], bytes, 8), 2);
    CHECK(quiet(poll));
    CHECK_EQUAL(shutdown(pair[1], SHUT_WR), 0);
    CHECK(wait_flags(poll, 7, MQD_POLL_READABLE | MQD_POLL_HANGUP) & MQD_POLL_HANGUP);
    CHECK_EQUAL(mqd_poll_remove(poll, pair[0], 7), 0);
    close(pair[0]);
    close(pair[1]);
}

BOTH(write_space)
{
    int pair[2];
    static char bytes[65536];
    pair_make(pair);
    CHECK_EQUAL(mqd_poll_add(poll, pair[0], 3), 0);
    wait_flags(poll, 3, MQD_POLL_WRITABLE);
    while (write(pair[0], bytes, sizeof bytes) > 0) {
    }
    CHECK(quiet(poll));
    while (read(pair[1], bytes, sizeof bytes) > 0) {
    }
    CHECK(wait_flags(poll, 3, MQD_POLL_WRITABLE) & MQD_POLL_WRITABLE);
    mqd_poll_remove(poll, pair[0], 3);
    close(pair[0]);
    close(pair[1]);
}

BOTH(a_removed_descriptor_reports_nothing_and_is_really_closed)
{
    int pair[2], next[2];
    char byte;
    for (int round = 0; round < 50; round++) {
        pair_make(pair);
        CHECK_EQUAL(mqd_poll_add(poll, pair[0], 1), 0);
        if (round % 3 == 1)
            wait_flags(poll, 1, MQD_POLL_WRITABLE);
        if (round % 2)
            CHECK_EQUAL(write(pair[1], "x", 1), 1); /* its event is pending */
        CHECK_EQUAL(mqd_poll_remove(poll, pair[0], 1), 0);
        close(pair[0]);
        ssize_t got = read(pair[1], &byte, 1); /* the other end sees it now, not later */
        CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
        pair_make(next); /* reuses the number */
        CHECK_EQUAL(next[0], pair[0]);
        CHECK_EQUAL(mqd_poll_add(poll, next[0], 2), 0);
        struct mqd_poll_event events[8];
        int count = mqd_poll_wait(poll, events, 8, LONG_NS);
        CHECK_EQUAL(count, 1);
        CHECK_EQUAL(events[0].token, 2);
        CHECK_EQUAL(events[0].flags, MQD_POLL_WRITABLE);
        CHECK_EQUAL(mqd_poll_remove(poll, next[0], 2), 0);
        close(next[0]);
        close(next[1]);
        close(pair[1]);
    }
    CHECK(quiet(poll));
    CHECK_EQUAL(mqd_poll_remove(poll, 12345, 2), -1);
}

BOTH(refusals)
{
    int pair[2];
    pair_make(pair);
    CHECK_EQUAL(mqd_poll_add(poll, -1, 1), -1);
    CHECK_EQUAL(mqd_poll_add(poll, pair[0], 1ull << 63), -1);
    CHECK_EQUAL(mqd_poll_add(poll, pair[0], 1), 0);
    CHECK_EQUAL(mqd_poll_add(poll, pair[0], 1), -1);
    struct mqd_poll_event event;
    CHECK_EQUAL(mqd_poll_wait(poll, &event, 0, 0), -1);
    mqd_poll_remove(poll, pair[0], 1);
    close(pair[0]);
    close(pair[1]);
}

BOTH(time_limits)
{
    struct mqd_poll_event event;
    int64_t begin = test_now_ns();
    CHECK_EQUAL(mqd_poll_wait(poll, &event, 1, 0), 0);
    CHECK_EQUAL(mqd_poll_wait(poll, &event, 1, 3000000), 0);
    CHECK(test_now_ns() - begin >= 3000000);
    CHECK_EQUAL(mqd_poll_wait(poll, &event, 1, 200), 0);
}

/* More sockets than entries in the kernel's queues and in the caller's array. */
static void many_sockets(struct mqd_poll *poll, int count_max)
{
    enum { PAIRS = 40 };
    int pair[PAIRS][2];
    for (int i = 0; i < PAIRS; i++) {
        pair_make(pair[i]);
        CHECK_EQUAL(mqd_poll_add(poll, pair[i][0], (uint64_t)i), 0);
    }
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < PAIRS; i++)
            CHECK_EQUAL(write(pair[i][1], "x", 1), 1);
        uint64_t seen = 0;
        int64_t limit = test_now_ns() + LONG_NS;
        while (seen != (1ull << PAIRS) - 1 && test_now_ns() < limit) {
            struct mqd_poll_event events[8];
            int count = mqd_poll_wait(poll, events, count_max, LONG_NS);
            for (int i = 0; i < count; i++) {
                char byte;
                if ((events[i].flags & MQD_POLL_READABLE) && read(pair[events[i].token][0], &byte, 1) == 1)
                    seen |= 1ull << events[i].token;
            }
        }
        CHECK_EQUAL(seen, (1ull << PAIRS) - 1);
    }
    for (int i = 0; i < PAIRS; i++) {
        mqd_poll_remove(poll, pair[i][0], (uint64_t)i);
        close(pair[i][0]);
        close(pair[i][1]);
    }
    CHECK(quiet(poll));
}

BOTH(small_event_array)
{
    many_sockets(poll, 1);
    many_sockets(poll, 3);
}

TEST(uring_tiny_queues_lose_nothing)
{
    uint32_t submissions = mqd_poll_uring_submission_count, completions = mqd_poll_uring_completion_count;
    mqd_poll_uring_submission_count = 1;
    mqd_poll_uring_completion_count = 2;
    struct mqd_poll *poll = poll_open(MQD_BACKEND_IO_URING);
    mqd_poll_uring_submission_count = submissions;
    mqd_poll_uring_completion_count = completions;
    if (!poll)
        return;
    many_sockets(poll, 1);
    many_sockets(poll, 8);
    int fd = file_make(10000);
    for (uint64_t i = 0; i < 100; i++)
        CHECK_EQUAL(mqd_poll_sync(poll, fd, false, i), 0);
    uint64_t done = 0;
    for (struct mqd_poll_event event; done < 100 && mqd_poll_wait(poll, &event, 1, LONG_NS) == 1;)
        done += event.flags == MQD_POLL_DONE && event.result == 0;
    CHECK_EQUAL(done, 100);
    close(fd);
    mqd_poll_destroy(poll);
}

/* ---- files ---- */

BOTH(flushes_report_through_the_file_layer)
{
    bool uring = mqd_poll_backend(poll) == MQD_BACKEND_IO_URING;
    int fd = file_make(100), directory = open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int32_t result;
    sync_calls = begin_calls = synced_calls = 0;
    CHECK_EQUAL(mqd_poll_sync(poll, fd, false, 1), 0);
    CHECK(wait_done(poll, 1, &result));
    CHECK_EQUAL(result, 0);
    CHECK_EQUAL(mqd_poll_sync(poll, directory, true, 2), 0);
    CHECK(wait_done(poll, 2, &result));
    CHECK_EQUAL(result, 0);
    CHECK_EQUAL(mqd_load_relaxed(&sync_calls), uring ? 0 : 2);
    CHECK_EQUAL(begin_calls, uring ? 2 : 0);
    CHECK_EQUAL(synced_calls, uring ? 2 : 0);
    mqd_store_relaxed(&fault, EIO);
    CHECK_EQUAL(mqd_poll_sync(poll, fd, false, 3), 0);
    CHECK(wait_done(poll, 3, &result));
    mqd_store_relaxed(&fault, 0);
    CHECK_EQUAL(result, -EIO);
    int gone = dup(fd);
    close(gone);
    CHECK_EQUAL(mqd_poll_sync(poll, gone, false, 4), 0);
    CHECK(wait_done(poll, 4, &result));
    CHECK_EQUAL(result, -EBADF);
    CHECK_EQUAL(mqd_poll_syncfs(poll, directory, 5), 0);
    CHECK(wait_done(poll, 5, &result));
    CHECK_EQUAL(result, 0);
    CHECK_EQUAL(mqd_load_seq_cst(&syncfs_calls) > 0, 1);
    CHECK_TEXT(syncfs_root, "/tmp");
    close(fd);
    close(directory);
}

BOTH(many_flushes_then_full)
{
    int fd = file_make(100);
    static uint8_t seen[4096];
    uint64_t count = 0, done = 0;
    memset(seen, 0, sizeof seen);
    while (count < sizeof seen && mqd_poll_sync(poll, fd, false, count) == 0)
        count++;
    CHECK(count >= 256 && count < sizeof seen);
    CHECK_EQUAL(mqd_error_code(), MQD_E_FULL);
    struct mqd_poll_event events[7];
    for (int got; done < count && (got = mqd_poll_wait(poll, events, 7, LONG_NS)) > 0;)
        for (int i = 0; i < got; i++, done++) {
            CHECK(events[i].flags == MQD_POLL_DONE && events[i].result == 0 && events[i].token < count);
            CHECK_EQUAL(seen[events[i].token]++, 0);
        }
    CHECK_EQUAL(done, count);
    CHECK_EQUAL(mqd_poll_sync(poll, fd, false, 1), 0); /* entries are free again */
    int32_t result;
    CHECK(wait_done(poll, 1, &result));
    close(fd);
}

BOTH(read_ahead)
{
    enum { SIZE = 2500000 };
    int fd = file_make(SIZE);
    static const struct {
        uint64_t offset;
        uint32_t size;
        int32_t result;
    } cases[] = {{0, 1, 1},
                 {0, 65536, 65536},
                 {100, 65537, 65537},
                 {0, SIZE, SIZE},
                 {1, UINT32_MAX, SIZE - 1},
                 {SIZE - 5, 100, 5},
                 {SIZE, 100, 0},
                 {0, 0, 0}};
    for (uint64_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t result = -1;
        CHECK_EQUAL(mqd_poll_read_ahead(poll, fd, cases[i].offset, cases[i].size, i), 0);
        CHECK(wait_done(poll, i, &result));
        CHECK_EQUAL(result, cases[i].result);
    }
    close(fd);
    int32_t result;
    CHECK_EQUAL(mqd_poll_read_ahead(poll, fd, 0, 10, 99), 0);
    CHECK(wait_done(poll, 99, &result));
    CHECK_EQUAL(result, -EBADF);
}

/* ---- the pool ---- */

static int answer(void *argument)
{
    return *(int *)argument;
}

BOTH(run)
{
    static int values[200];
    uint64_t submitted = 0, done = 0;
    for (; submitted < 200; submitted++) {
        values[submitted] = (int)submitted * 3 - 7;
        CHECK_EQUAL(mqd_poll_run(poll, -1, answer, &values[submitted], submitted), 0);
    }
    struct mqd_poll_event event;
    for (; done < submitted && mqd_poll_wait(poll, &event, 1, LONG_NS) == 1; done++)
        CHECK(event.flags == MQD_POLL_DONE && event.result == (int)event.token * 3 - 7);
    CHECK_EQUAL(done, submitted);
}

static sem_t gate;

static int blocked(void *unused)
{
    (void)unused;
    while (sem_wait(&gate) != 0) {
    }
    return 0;
}

/* W3: jobs that stall take no more than their share of the threads. */
BOTH(a_stalled_device_leaves_threads_for_others)
{
    static int zero;
    int fd = file_make(100), stalled = eventfd(0, EFD_CLOEXEC); /* of another device than a file */
    sem_init(&gate, 0, 0);
    for (uint64_t i = 0; i < 50; i++)
        CHECK_EQUAL(mqd_poll_run(poll, stalled, blocked, NULL, 1000 + i), 0);
    for (uint64_t i = 0; i < 20; i++) {
        CHECK_EQUAL(mqd_poll_sync(poll, fd, false, i), 0);
        CHECK_EQUAL(mqd_poll_syncfs(poll, fd, 100 + i), 0);
        CHECK_EQUAL(mqd_poll_run(poll, fd, answer, &zero, 200 + i), 0);
    }
    struct mqd_poll_event event;
    int done = 0;
    for (; done < 60 && mqd_poll_wait(poll, &event, 1, LONG_NS) == 1; done++)
        CHECK(event.token < 1000);
    for (int i = 0; i < 50; i++)
        sem_post(&gate);
    CHECK_EQUAL(done, 60);
    for (done = 0; done < 50 && mqd_poll_wait(poll, &event, 1, LONG_NS) == 1; done++)
        CHECK(event.token >= 1000 && event.result == 0);
    CHECK_EQUAL(done, 50);
    close(stalled);
    close(fd);
}

static uint32_t destroyed_runs;
static int count_run(void *unused)
{
    (void)unused;
    mqd_fetch_add(&destroyed_runs, 1);
    return 0;
}

TEST(destroy_waits_for_running_operations)
{
    for (int backend = MQD_BACKEND_IO_URING; backend <= MQD_BACKEND_EPOLL; backend++) {
        struct mqd_poll *poll = poll_open(backend);
        if (!poll)
            continue;
        int fd = file_make(100000);
        destroyed_runs = synced_calls = sync_calls = 0;
        for (uint64_t i = 0; i < 100; i++) {
            mqd_poll_run(poll, (int)i % 3 ? fd : -1, count_run, NULL, i);
            mqd_poll_sync(poll, fd, false, i);
            mqd_poll_read_ahead(poll, fd, 0, 100000, i);
        }
        mqd_poll_destroy(poll);
        CHECK_EQUAL(destroyed_runs, 100);
        CHECK_EQUAL(synced_calls + sync_calls, 100);
        close(fd);
    }
    mqd_poll_destroy(NULL);
}

/* Seccomp filters do not see operations of a ring. */
TEST(a_ring_allows_only_the_operations_in_use)
{
    enum { OP_NOP = 0, OP_OPENAT = 18, OP_CONNECT = 16, SQE_LINK = 1 << 2 };
    static const struct {
        uint8_t opcode, flags;
        int result;
    } operations[] = {{OP_NOP, 0, -EACCES},
                      {OP_OPENAT, 0, -EACCES},
                      {OP_CONNECT, 0, -EACCES},
                      {MQD_URING_OP_FSYNC, SQE_LINK, -EACCES},
                      {MQD_URING_OP_FSYNC, 0, -EBADF}};
    struct mqd_uring ring;
    if (mqd_uring_open(&ring, 4, 8) != 0) {
        test_message("there is no io_uring here");
        return;
    }
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        struct mqd_uring_submission *submission = mqd_uring_next(&ring);
        submission->opcode = operations[i].opcode;
        submission->flags = operations[i].flags;
        submission->fd = -1;
        CHECK_EQUAL(mqd_uring_enter(&ring, 1, LONG_NS), 0);
        const struct mqd_uring_completion *completion = mqd_uring_peek(&ring);
        CHECK(completion != NULL);
        CHECK_EQUAL(completion->result, operations[i].result);
        mqd_uring_pop(&ring);
    }
    mqd_uring_close(&ring);
}

TEST(choosing)
{
    struct mqd_poll *poll;
    CHECK_EQUAL(mqd_poll_create(&poll, MQD_BACKEND_AUTO, 0), 0);
    test_message("auto chose %s", mqd_poll_backend(poll) == MQD_BACKEND_IO_URING ? "io_uring" : "epoll");
    mqd_poll_destroy(poll);
    CHECK_EQUAL(mqd_poll_create(&poll, 17, 0), -1);
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
}
