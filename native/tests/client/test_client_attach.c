/* tsan: long */
/* The attachment: welcome and refusal, requests and responses of all sizes over tiny rings,
 * sleeping and waking, the other end's death, fork. */
#include "mqd_test.h"

#include <errno.h>
#include <sys/wait.h>

#include "mqd_client_test.h"

static struct mqd_client_options small(void)
{
    return (struct mqd_client_options){
        .client_id = "test", .data_bytes = 64 << 10, .reply_bytes = 4096, .submission_count = 16, .timeout_ms = 5000};
}

static void request_fill(uint8_t *frame, uint32_t size_bytes, uint32_t correlation_id)
{
    for (uint32_t i = 0; i < size_bytes; i++)
        frame[i] = (uint8_t)(i * 7 + correlation_id);
    mqd_put_be16(frame, 18);
    mqd_put_be16(frame + 2, 3);
    mqd_put_be32(frame + 4, correlation_id);
}

TEST(welcome_has_the_requested_sizes)
{
    struct fake fake;
    struct mqd_client_options options = small();
    options.server = "127.0.0.1@9092.net-f0000000-00000000";
    fake_open(&fake, "attach");
    struct mqd_client *client = fake_attach(&fake, &options);
    CHECK(client);
    CHECK_TEXT(fake.hello.client_id, "test");
    CHECK_TEXT(fake.hello.server, "127.0.0.1@9092.net-f0000000-00000000");
    CHECK_EQUAL(fake.hello.abi_hash, mqd_local_abi_hash());
    CHECK_EQUAL(mqd_client_worker(client), 0);
    CHECK_EQUAL(mqd_control_worker_count(mqd_client_control(client)), 1);
    CHECK_EQUAL(mqd_client_available_bytes(client), 16 << 10);
    CHECK_EQUAL(mqd_client_wait(client, 1000), 0);
    mqd_client_close(client);
    fake_close(&fake);
}

static void refused(struct fake *fake, int code, const char *part)
{
    struct mqd_client_options options = small();
    options.timeout_ms = 200;
    struct mqd_client *client = fake_attach(fake, &options);
    CHECK(!client);
    CHECK_EQUAL(mqd_error_code(), code);
    CHECK_CONTAINS(mqd_error_message(), part);
    fake_forget(fake);
}

TEST(refusals_name_the_cause_and_what_to_do)
{
    struct fake fake;
    fake_open(&fake, "refuse");
    fake.welcome.error = MQD_E_FULL;
    strcpy(fake.welcome.reason, "no memory for local clients; raise local.memory.max.bytes");
    refused(&fake, MQD_E_FULL, "local.memory.max.bytes");
    fake.welcome = (struct mqd_local_welcome){.magic = 12345};
    refused(&fake, MQD_E_LAYOUT, "same version of mqd");
    fake.welcome = (struct mqd_local_welcome){.total_bytes = 1 << 20};
    refused(&fake, MQD_E_LAYOUT, "same version of mqd");
    fake.welcome.total_bytes = 0;
    fake.abi_hash++;
    refused(&fake, MQD_E_LAYOUT, "same version of mqd");
    fake.abi_hash--;
    fake.fd_count = 3;
    refused(&fake, EMFILE, "ulimit");
    fake.fd_count = 4;
    fake.mute = true;
    refused(&fake, ETIMEDOUT, "in time");
    fake_close(&fake);
    struct mqd_client_options options = small();
    options.socket_path = "/tmp/mqd-no-such.sock";
    CHECK(!mqd_client_open(&options));
    CHECK_EQUAL(mqd_error_code(), ENOENT);
    CHECK_CONTAINS(mqd_error_message(), "check that the broker is running");
    options.data_bytes = 1000;
    CHECK(!mqd_client_open(&options));
    CHECK_EQUAL(mqd_error_code(), MQD_E_INVALID);
}

/* Requests of every size are transferred complete and in order, at any position in the ring; so
 * are responses, even those larger than their ring. */
TEST(requests_and_responses_of_all_sizes)
{
    struct fake fake;
    struct mqd_client_options options = small();
    uint64_t seed = 7, sent = 0, answered = 0, taken = 0, full = 0;
    static uint8_t frame[32 << 10], reply[64 << 10];
    uint32_t reply_bytes = 0, reply_done = 0;
    fake_open(&fake, "sizes");
    struct mqd_client *client = fake_attach(&fake, &options);
    CHECK(client);
    uint64_t total = test_long() ? 20000 : 2000;
    for (uint64_t step = 0; taken < total && step < 100 * total; step++) {
        if (sent < total && test_random(&seed) % 2) {
            uint32_t size_bytes = 8 + (uint32_t)(test_random(&seed) % (test_random(&seed) % 8 ? 200 : 16000));
            request_fill(frame, size_bytes, (uint32_t)sent);
            int result = mqd_client_submit(client, frame, size_bytes);
            if (result)
                CHECK_EQUAL(mqd_error_code(), MQD_E_FULL);
            full += result != 0;
            sent += result == 0;
            if (test_random(&seed) % 3 == 0)
                mqd_client_flush(client);
        }
        /* answers with its own bytes, many times */
        if (test_random(&seed) % 2 && reply_done == reply_bytes && fake_peek(&fake)) {
            fake_pass(&fake);
            CHECK_EQUAL(mqd_get_be32(fake.frame + 4), answered);
            request_fill(frame, fake.frame_bytes, (uint32_t)answered);
            CHECK(memcmp(frame, fake.frame, fake.frame_bytes) == 0);
            reply_bytes = 4 + 4 + (uint32_t)(test_random(&seed) % (test_random(&seed) % 8 ? 300 : 20000));
            request_fill(reply + 4, reply_bytes - 4, (uint32_t)answered);
            mqd_put_be32(reply, reply_bytes - 4);
            mqd_put_be32(reply + 4, (uint32_t)answered++);
            reply_done = 0;
        }
        if (reply_done < reply_bytes) {
            uint32_t piece = 1 + (uint32_t)(test_random(&seed) % 3000);
            reply_done += fake_put(&fake, reply + reply_done,
                                   piece < reply_bytes - reply_done ? piece : reply_bytes - reply_done);
        }
        CHECK_EQUAL(mqd_client_poll(client), 0);
        const uint8_t *bytes;
        for (uint32_t size; (size = mqd_client_response(client, &bytes)); taken++) {
            CHECK_EQUAL(mqd_get_be32(bytes), taken);
            request_fill(frame, size < 8 ? 8 : size, (uint32_t)taken);
            CHECK(memcmp(frame + 8, bytes + 8, size > 8 ? size - 8 : 0) == 0);
        }
    }
    CHECK_EQUAL(taken, total);
    CHECK(full > 0);
    CHECK_EQUAL(mqd_client_available_bytes(client), 16 << 10);
    mqd_client_close(client);
    fake_close(&fake);
}

TEST(wrong_requests_are_refused)
{
    struct fake fake;
    struct mqd_client_options options = small();
    static uint8_t frame[20 << 10];
    fake_open(&fake, "wrong");
    struct mqd_client *client = fake_attach(&fake, &options);
    request_fill(frame, sizeof frame, 1);
    CHECK(mqd_client_submit(client, frame, 7) < 0 && mqd_error_code() == MQD_E_INVALID);
    CHECK(mqd_client_submit(client, frame, (16 << 10) + 1) < 0 && mqd_error_code() == MQD_E_INVALID);
    CHECK_EQUAL(mqd_client_submit(client, frame, 16 << 10), 0);
    request_fill(frame, 100, 1u << 30);
    CHECK(mqd_client_submit(client, frame, 100) < 0 && mqd_error_code() == MQD_E_INVALID);
    mqd_client_close(client);
    fake_close(&fake);
}

/* States that a dying broker may leave in shared memory: each ends the attachment, none the
 * process. */
TEST(impossible_words_end_the_attachment)
{
    struct fake fake;
    struct mqd_client_options options = small();
    fake_open(&fake, "words");
    for (int kind = 0; kind < 5; kind++) {
        static const uint8_t long_reply[] = {0x7f, 0, 0, 0, 0}, short_reply[] = {0, 0, 0, 3, 1, 2, 3},
                             negative[] = {0xff, 0xff, 0xff, 0xff};
        struct mqd_client *client = fake_attach(&fake, &options);
        CHECK(client);
        switch (kind) {
        case 0:
            mqd_store_release(&fake.header->submission_head, 5);
            break;
        case 1:
            mqd_store_release(&fake.header->reply_tail, 4097);
            break;
        case 2:
            fake_put(&fake, long_reply, sizeof long_reply);
            break;
        case 3:
            fake_put(&fake, short_reply, sizeof short_reply);
            break;
        case 4:
            fake_put(&fake, negative, sizeof negative);
            break;
        }
        CHECK(mqd_client_poll(client) < 0);
        CHECK_EQUAL(mqd_error_code(), MQD_E_CORRUPT);
        CHECK(mqd_client_poll(client) < 0);
        CHECK_CONTAINS(mqd_error_message(), "attach again");
        CHECK(mqd_client_wait(client, -1) < 0);
        mqd_client_close(client);
        fake_forget(&fake);
    }
    fake_close(&fake);
}

static void *answer_later(void *argument)
{
    struct fake *fake = argument;
    static const uint8_t reply[] = {0, 0, 0, 5, 0, 0, 0, 9, 1};
    while (!mqd_load_acquire(&fake->header->client_sleeping))
        usleep(100);
    fake_put(fake, reply, sizeof reply);
    return NULL;
}

static void *die_later(void *argument)
{
    struct fake *fake = argument;
    while (!mqd_load_acquire(&fake->header->client_sleeping))
        usleep(100);
    close(fake->socket);
    fake->socket = -1;
    return NULL;
}

static void *pass_later(void *argument)
{
    struct fake *fake = argument;
    while (mqd_load_acquire(&fake->header->client_sleeping) != MQD_LOCAL_SLEEP_ROOM)
        usleep(100);
    fake_peek(fake);
    fake_pass(fake);
    return NULL;
}

static void *wake_later(void *argument)
{
    usleep(2000);
    mqd_client_wake(argument);
    return NULL;
}

TEST(a_wait_ends_on_replies_wakes_and_death)
{
    struct fake fake;
    struct mqd_client_options options = small();
    pthread_t thread;
    const uint8_t *bytes;
    fake_open(&fake, "wait");
    struct mqd_client *client = fake_attach(&fake, &options);
    CHECK(client);
    for (int round = 0; round < 20; round++) {
        pthread_create(&thread, NULL, answer_later, &fake);
        while (!mqd_client_response(client, &bytes)) {
            CHECK_EQUAL(mqd_client_wait(client, 20000000), 1);
            CHECK_EQUAL(mqd_client_poll(client), 0);
        }
        CHECK_EQUAL(mqd_get_be32(bytes), 9);
        pthread_join(thread, NULL);
        pthread_create(&thread, NULL, wake_later, client);
        CHECK_EQUAL(mqd_client_wait(client, 20000000), 1);
        CHECK_EQUAL(mqd_client_wait(client, 20000000), 1); /* until it is polled */
        pthread_join(thread, NULL);
        CHECK_EQUAL(mqd_client_poll(client), 0);
        CHECK_EQUAL(mqd_client_wait(client, 0), 0);
        CHECK_EQUAL(mqd_client_wait(client, 500), 0);
    }
    pthread_create(&thread, NULL, die_later, &fake);
    CHECK(mqd_client_wait(client, -1) < 0);
    CHECK_EQUAL(mqd_error_code(), EPIPE);
    pthread_join(thread, NULL);
    CHECK(mqd_client_poll(client) < 0 && mqd_error_code() == EPIPE);
    mqd_client_close(client);
    fake_close(&fake);
}

TEST(a_wait_ends_when_there_is_room)
{
    struct fake fake;
    struct mqd_client_options options = small();
    uint8_t frame[64];
    pthread_t thread;
    fake_open(&fake, "room");
    struct mqd_client *client = fake_attach(&fake, &options);
    request_fill(frame, sizeof frame, 1);
    int count = 0;
    while (mqd_client_submit(client, frame, sizeof frame) == 0)
        count++;
    CHECK_EQUAL(mqd_error_code(), MQD_E_FULL);
    CHECK_EQUAL(count, 16);
    for (int round = 0; round < 20; round++) {
        pthread_create(&thread, NULL, pass_later, &fake);
        CHECK_EQUAL(mqd_client_wait(client, 20000000), 1);
        pthread_join(thread, NULL);
        CHECK_EQUAL(mqd_client_poll(client), 0);
        CHECK_EQUAL(mqd_client_submit(client, frame, sizeof frame), 0);
        CHECK(mqd_client_submit(client, frame, sizeof frame) < 0 && mqd_error_code() == MQD_E_FULL);
        fake.header->client_sleeping = 0;
    }
    mqd_client_close(client);
    fake_close(&fake);
}

/* Data received before the end is not lost; the end is also detected without a wait. */
TEST(death_is_seen_after_the_last_reply)
{
    struct fake fake;
    struct mqd_client_options options = small();
    const uint8_t *bytes;
    static const uint8_t reply[] = {0, 0, 0, 5, 0, 0, 0, 9, 1};
    fake_open(&fake, "death");
    struct mqd_client *client = fake_attach(&fake, &options);
    fake_put(&fake, reply, sizeof reply);
    fake_die(&fake);
    CHECK_EQUAL(mqd_client_wait(client, -1), 1);
    CHECK_EQUAL(mqd_client_poll(client), 0);
    CHECK_EQUAL(mqd_client_response(client, &bytes), 5);
    int polls = 0;
    while (mqd_client_poll(client) == 0 && polls < 10000)
        polls++;
    CHECK(polls < 10000);
    CHECK_EQUAL(mqd_error_code(), EPIPE);
    mqd_client_close(client);
    /* the keeper's proof of death needs no system call */
    client = fake_attach(&fake, &options);
    CHECK_EQUAL(mqd_client_poll(client), 0);
    mqd_endpoint_set_state(fake.control, 0, MQD_PROCESS_DEAD, 0);
    CHECK(mqd_client_poll(client) < 0 && mqd_error_code() == EPIPE);
    mqd_client_close(client);
    fake_close(&fake);
}

/* A worker that died in the middle of a length word: those bytes never become a response. */
TEST(death_within_a_length_word)
{
    struct fake fake;
    struct mqd_client_options options = small();
    static const uint8_t begun[] = {0, 0};
    fake_open(&fake, "word");
    struct mqd_client *client = fake_attach(&fake, &options);
    fake_put(&fake, begun, sizeof begun);
    CHECK_EQUAL(mqd_client_wait(client, -1), 1);
    CHECK_EQUAL(mqd_client_poll(client), 0);
    CHECK_EQUAL(mqd_client_wait(client, 1000), 0);
    fake_die(&fake);
    CHECK(mqd_client_wait(client, -1) < 0 && mqd_error_code() == EPIPE);
    mqd_client_close(client);
    fake_close(&fake);
}

TEST(a_sleeping_worker_is_woken)
{
    struct fake fake;
    struct mqd_client_options options = small();
    uint8_t frame[64];
    uint64_t count;
    fake_open(&fake, "wake");
    struct mqd_client *client = fake_attach(&fake, &options);
    request_fill(frame, sizeof frame, 1);
    CHECK_EQUAL(mqd_client_submit(client, frame, sizeof frame), 0);
    CHECK(!fake_peek(&fake)); /* not before the flush */
    mqd_client_flush(client);
    CHECK(fake_peek(&fake));
    CHECK(read(fake.to_worker, &count, sizeof count) < 0);
    mqd_store_seq_cst(&mqd_control_endpoint(fake.control, 0)->sleeping, 1);
    CHECK_EQUAL(mqd_client_submit(client, frame, sizeof frame), 0);
    mqd_client_flush(client);
    CHECK_EQUAL(read(fake.to_worker, &count, sizeof count), 8);
    static const uint8_t reply[] = {0, 0, 0, 5, 0, 0, 0, 9, 1};
    mqd_store_seq_cst(&fake.header->worker_needs_room, 1);
    fake_put(&fake, reply, sizeof reply);
    CHECK_EQUAL(mqd_client_poll(client), 0);
    CHECK_EQUAL(read(fake.to_worker, &count, sizeof count), 8);
    mqd_client_close(client);
    fake_close(&fake);
}

/* The child has no attachment, the parent loses nothing, and the worker detects the parent's end
 * while the child lives. */
TEST(fork_detaches_the_child)
{
    struct fake fake;
    struct mqd_client_options options = small();
    uint8_t frame[64];
    fake_open(&fake, "fork");
    struct mqd_client *client = fake_attach(&fake, &options);
    request_fill(frame, sizeof frame, 1);
    int ready[2], go[2];
    CHECK(pipe(ready) == 0 && pipe(go) == 0);
    pid_t child = fork();
    if (child == 0) {
        bool good = mqd_client_submit(client, frame, sizeof frame) < 0 && mqd_error_code() == MQD_E_INVALID &&
                    strstr(mqd_error_message(), "fork") && mqd_client_poll(client) < 0 &&
                    mqd_client_wait(client, 1000) < 0;
        mqd_client_flush(client);
        mqd_client_wake(client);
        char byte = good;
        (void)!write(ready[1], &byte, 1);
        (void)!read(go[0], &byte, 1);
        mqd_client_close(client);
        _exit(good ? 0 : 1);
    }
    char byte = 0;
    int status;
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK_EQUAL(byte, 1);
    CHECK_EQUAL(mqd_client_submit(client, frame, sizeof frame), 0);
    mqd_client_flush(client);
    CHECK(fake_peek(&fake));
    mqd_client_close(client);
    CHECK_EQUAL(recv(fake.socket, frame, sizeof frame, 0), 0); /* the end, though the child lives */
    CHECK(write(go[1], &byte, 1) == 1);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0);
    for (int i = 0; i < 2; i++) {
        close(ready[i]);
        close(go[i]);
    }
    fake_close(&fake);
}

/* A worker thread that responds to everything, and a client that works while another thread
 * waits: for ThreadSanitizer. */
struct echo {
    struct fake *fake;
    uint64_t total;
};
static void *echo(void *argument)
{
    struct echo *echo = argument;
    struct fake *fake = echo->fake;
    uint8_t reply[12] = {0, 0, 0, 8};
    for (uint64_t done = 0; done < echo->total;) {
        if (!fake_peek(fake)) {
            mqd_cpu_relax();
            continue;
        }
        fake_pass(fake);
        memcpy(reply + 4, fake->frame + 4, 4);
        for (uint32_t at = 0; at < sizeof reply;)
            at += fake_put(fake, reply + at, sizeof reply - at);
        done++;
    }
    return NULL;
}

struct sleeper {
    struct mqd_client *client;
    int result;
};

static void *sleep_once(void *argument)
{
    struct sleeper *sleeper = argument;
    sleeper->result = mqd_client_wait(sleeper->client, 5000000);
    return NULL;
}

static void *answer_soon(void *argument)
{
    static const uint8_t reply[] = {0, 0, 0, 5, 0, 0, 0, 9, 1};
    usleep(500);
    fake_put(argument, reply, sizeof reply);
    return NULL;
}

/* replied: this thread waits, too. Otherwise the other thread is woken by mqd_client_wake. Returns
 * whether it returned 1. */
static bool poll_while_a_thread_sleeps(struct fake *fake, struct mqd_client *client, bool replied)
{
    struct sleeper sleeper = {client, -2};
    const uint8_t *bytes;
    pthread_t thread, worker;
    fake->header->client_sleeping = 0;
    pthread_create(&thread, NULL, sleep_once, &sleeper);
    while (!mqd_load_acquire(&fake->header->client_sleeping))
        usleep(50);
    usleep(200); /* the thread is in ppoll now, or soon: it must return in both cases */
    if (replied) {
        pthread_create(&worker, NULL, answer_soon, fake);
        mqd_client_wait(client, 5000000);
    } else {
        mqd_client_wake(client);
    }
    bool right = mqd_client_poll(client) == 0 && mqd_client_response(client, &bytes) == (replied ? 5 : 0);
    pthread_join(thread, NULL);
    if (replied)
        pthread_join(worker, NULL);
    right = right && mqd_client_poll(client) == 0 && mqd_client_wait(client, 0) == 0; /* passed on only once */
    return right && sleeper.result == 1;
}

/* The poll takes what woke the other thread before that thread runs. */
TEST(a_poll_wakes_the_threads_that_sleep)
{
    struct fake fake;
    struct mqd_client_options options = small();
    fake_open(&fake, "sleeper");
    struct mqd_client *client = fake_attach(&fake, &options);
    bool right = true;
    for (int round = 0; right && round < (test_long() ? 2000 : 200); round++)
        right = poll_while_a_thread_sleeps(&fake, client, round % 2);
    CHECK(right);
    mqd_client_close(client);
    fake_close(&fake);
}

static void *move_head_soon(void *argument)
{
    struct fake *fake = argument;
    usleep(500);
    fake_peek(fake);
    fake_pass(fake);
    return NULL;
}

/* A thread that sleeps on must not keep another one's waits from sleeping. */
TEST(a_wait_sleeps_though_another_thread_does)
{
    struct fake fake;
    struct mqd_client_options options = small();
    struct sleeper sleeper;
    uint8_t frame[64];
    pthread_t thread, worker;
    fake_open(&fake, "two");
    struct mqd_client *client = fake_attach(&fake, &options);
    request_fill(frame, sizeof frame, 1);
    for (int round = 0; round < 10; round++) {
        sleeper = (struct sleeper){client, -2};
        fake.header->client_sleeping = 0;
        pthread_create(&thread, NULL, sleep_once, &sleeper);
        while (!mqd_load_acquire(&fake.header->client_sleeping))
            usleep(50);
        CHECK_EQUAL(mqd_client_submit(client, frame, sizeof frame), 0);
        CHECK_EQUAL(mqd_client_poll(client), 0);
        pthread_create(&worker, NULL, move_head_soon, &fake);
        pthread_join(worker, NULL);
        int64_t began_ns = test_now_ns();
        do
            CHECK_EQUAL(mqd_client_poll(client), 0);
        while (mqd_client_wait(client, 1000) == 1);
        CHECK(test_now_ns() - began_ns < 2000000000); /* the other thread gives up after 5 s */
        mqd_client_wake(client);
        pthread_join(thread, NULL);
        CHECK_EQUAL(sleeper.result, 1);
        CHECK_EQUAL(mqd_client_poll(client), 0);
    }
    mqd_client_close(client);
    fake_close(&fake);
}

static int stop;
static void *wait_on(void *argument)
{
    while (!mqd_load_acquire(&stop))
        mqd_client_wait(argument, 2000);
    return NULL;
}

TEST(working_while_another_thread_waits)
{
    struct fake fake;
    struct mqd_client_options options = small();
    uint8_t frame[64];
    const uint8_t *bytes;
    pthread_t worker, waiter;
    fake_open(&fake, "threads");
    struct mqd_client *client = fake_attach(&fake, &options);
    struct echo all = {&fake, test_long() ? 100000 : 10000};
    stop = 0;
    pthread_create(&worker, NULL, echo, &all);
    pthread_create(&waiter, NULL, wait_on, client);
    uint64_t sent = 0, got = 0;
    while (got < all.total) {
        request_fill(frame, sizeof frame, (uint32_t)sent);
        bool full = sent == all.total || mqd_client_submit(client, frame, sizeof frame) < 0;
        sent += !full;
        mqd_client_flush(client);
        if (full)
            CHECK(mqd_client_wait(client, 20000000) == 1);
        CHECK_EQUAL(mqd_client_poll(client), 0);
        while (mqd_client_response(client, &bytes))
            CHECK_EQUAL(mqd_get_be32(bytes), got++);
    }
    mqd_store_release(&stop, 1);
    mqd_client_wake(client);
    pthread_join(waiter, NULL);
    pthread_join(worker, NULL);
    mqd_client_close(client);
    fake_close(&fake);
}
