/* tsan: long */
/* The readers' queries on an attachment's socket, against a worker that responds late, wrongly,
 * or not at all; attachments that end under their readers. */
#include "mqd_client_reader_test.h"

#include <sys/wait.h>

#include "mqd_client_test.h"

enum behaviour { ANSWER, LATE_FIRST, NO_DESCRIPTOR, NO_FILE, NONSENSE, HANG_UP, SILENT };
struct worker {
    struct fake fake;
    struct log log;
    struct mqd_client *client;
    enum behaviour behaviour;
    pthread_t thread;
    int pipe[2]; /* open all the time, so that other descriptors are the reader's */
};

static void send_answer(int socket_fd, const struct mqd_local_segment *answer, int fd)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)answer, sizeof *answer};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        control.header =
            (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    }
    sendmsg(socket_fd, &message, MSG_NOSIGNAL);
}

static void answer_one(struct worker *worker, const struct mqd_local_query *query)
{
    struct log *log = &worker->log;
    int number = log->segment_count - 1;
    while (number > 0 && log->segments[number].base_offset > query->offset)
        number--;
    const struct log_segment *segment = &log->segments[number];
    bool active = number == log->segment_count - 1;
    struct mqd_local_segment answer = {.kind = query->kind,
                                       .number = query->number,
                                       .slot = LOG_SLOT,
                                       .base_offset = segment->base_offset,
                                       .next_base_offset = active ? INT64_MAX : log->segments[number + 1].base_offset,
                                       .position = log_position(segment, segment->size_bytes, query->offset),
                                       .size_bytes = segment->size_bytes,
                                       .map_bytes = active ? 1u << 31 : segment->size_bytes};
    switch (worker->behaviour) {
    case LATE_FIRST: /* to an abandoned query, and of an unknown kind */
        answer.number--;
        send_answer(worker->fake.socket, &answer, segment->fd);
        answer.number++;
        answer.kind = 99;
        send_answer(worker->fake.socket, &answer, segment->fd);
        answer.kind = query->kind;
        send_answer(worker->fake.socket, &answer, segment->fd);
        return;
    case NO_DESCRIPTOR:
        send_answer(worker->fake.socket, &answer, -1);
        return;
    case NO_FILE:
        send_answer(worker->fake.socket, &answer, worker->pipe[0]);
        return;
    case NONSENSE:
        answer.position = answer.size_bytes + 1;
        break;
    case HANG_UP:
        shutdown(worker->fake.socket, SHUT_RDWR);
        return;
    case SILENT:
        return;
    case ANSWER:
        break;
    }
    send_answer(worker->fake.socket, &answer, segment->fd);
}

static void *answer_all(void *argument)
{
    struct worker *worker = argument;
    struct mqd_local_query query;
    while (recv(worker->fake.socket, &query, sizeof query, 0) == (ssize_t)sizeof query)
        answer_one(worker, &query);
    return NULL;
}

static void worker_attach(struct worker *worker, enum behaviour behaviour)
{
    struct mqd_client_options options = {.data_bytes = 1 << 16, .client_id = "reader", .timeout_ms = 5000};
    worker->behaviour = behaviour;
    CHECK_OR((worker->client = fake_attach(&worker->fake, &options)) != NULL, abort());
    pthread_create(&worker->thread, NULL, answer_all, worker);
}

/* Three segments of ten records. */
static void worker_start(struct worker *worker, enum behaviour behaviour)
{
    memset(worker, 0, sizeof *worker);
    CHECK_OR(pipe2(worker->pipe, O_CLOEXEC) == 0, abort());
    fake_open(&worker->fake, "reader");
    log_open_in(&worker->log, worker->fake.control);
    for (int i = 0; i < 3; i++) {
        if (i)
            log_roll(&worker->log);
        log_append(&worker->log, 10, 0, -1, 0, 0);
    }
    log_expose(&worker->log);
    worker_attach(worker, behaviour);
}

static void worker_detach(struct worker *worker)
{
    mqd_client_close(worker->client);
    pthread_join(worker->thread, NULL);
    fake_die(&worker->fake);
}

static void worker_stop(struct worker *worker)
{
    if (worker->client)
        worker_detach(worker);
    worker->log.control = NULL;
    free(spare_control);
    spare_control = NULL;
    for (int i = 0; i < worker->log.segment_count; i++)
        close(worker->log.segments[i].fd);
    close(worker->pipe[0]);
    close(worker->pipe[1]);
    fake_close(&worker->fake);
}

static int open_files(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* Reads records up to the end; -1: an error. */
static int64_t drain_all(struct mqd_segment_reader *reader)
{
    struct test_view *v = malloc(sizeof *v);
    struct mqd_read_state state;
    int64_t count = 0;
    do {
        if (mqd_segment_reader_next(reader, 1u << 30, 1, test_view(v, 100), &state) < 0) {
            count = -1;
            break;
        }
        for (uint32_t i = 0; i < v->view.count; i++)
            CHECK_OR(view_is_right(&v->view, i), break);
        count += v->view.count;
    } while (state.stop == MQD_READ_SEGMENT);
    free(v);
    return count;
}

static struct mqd_segment_reader *open_reader(struct worker *worker)
{
    return mqd_segment_reader_open(worker->client, log_topic_id, 3, 0, 0);
}

TEST(queries_once_a_segment_and_leaks_nothing)
{
    static const enum behaviour moods[] = {ANSWER, LATE_FIRST};
    for (int i = 0; i < 2; i++) {
        struct worker worker;
        worker_start(&worker, moods[i]);
        struct mqd_segment_reader *reader = open_reader(&worker);
        int before = open_files();
        CHECK_EQUAL(drain_all(reader), 30);
        mqd_segment_reader_seek(reader, 0);
        CHECK_EQUAL(drain_all(reader), 30);
        CHECK_EQUAL(mqd_segment_reader_lag_end(reader), 30);
        CHECK_EQUAL(open_files(), before);
        mqd_segment_reader_close(reader);
        worker_stop(&worker);
    }
}

TEST(responses_that_make_no_sense)
{
    static const enum behaviour moods[] = {NO_DESCRIPTOR, NO_FILE, NONSENSE};
    for (int i = 0; i < 3; i++) {
        struct worker worker;
        worker_start(&worker, moods[i]);
        struct mqd_segment_reader *reader = open_reader(&worker);
        int before = open_files();
        CHECK_EQUAL(drain_all(reader), -1);
        CHECK_EQUAL(mqd_error_code(), MQD_E_CORRUPT);
        CHECK_EQUAL(open_files(), before);
        mqd_segment_reader_close(reader);
        worker_stop(&worker);
    }
}

TEST(the_worker_ends_and_the_reader_moves)
{
    struct worker worker;
    worker_start(&worker, HANG_UP);
    struct mqd_segment_reader *reader = open_reader(&worker);
    CHECK_EQUAL(drain_all(reader), -1);
    CHECK_EQUAL(mqd_error_code(), EPIPE);
    CHECK_EQUAL(drain_all(reader), -1);
    worker_detach(&worker);
    CHECK_EQUAL(drain_all(reader), -1);
    CHECK_EQUAL(mqd_error_code(), EPIPE);
    CHECK_CONTAINS(mqd_error_message(), "attach again");
    CHECK_EQUAL(mqd_segment_reader_lag_end(reader), -1);
    worker_attach(&worker, ANSWER);
    CHECK_EQUAL(mqd_segment_reader_move(reader, worker.client), 0);
    CHECK_EQUAL(drain_all(reader), 30);
    worker_detach(&worker);
    worker.client = NULL;
    mqd_segment_reader_close(reader); /* after its client */
    worker_stop(&worker);
}

static void *drain_until_the_end(void *argument)
{
    struct mqd_segment_reader *reader = argument;
    while (drain_all(reader) >= 0)
        mqd_segment_reader_seek(reader, 0);
    return mqd_error_code() == EPIPE ? argument : NULL;
}

TEST(close_ends_waiting_and_reading_threads)
{
    static const enum behaviour moods[] = {SILENT, ANSWER};
    for (int i = 0; i < 2; i++) {
        struct worker worker;
        struct mqd_segment_reader *readers[3];
        pthread_t threads[3];
        worker_start(&worker, moods[i]);
        for (int k = 0; k < 3; k++)
            readers[k] = open_reader(&worker);
        for (int k = 0; k < 3; k++)
            pthread_create(&threads[k], NULL, drain_until_the_end, readers[k]);
        struct timespec while_they_read = {0, 20000000};
        nanosleep(&while_they_read, NULL);
        int64_t begin = test_now_ns();
        worker_detach(&worker);
        worker.client = NULL;
        for (int k = 0; k < 3; k++) {
            void *outcome;
            pthread_join(threads[k], &outcome);
            CHECK(outcome == readers[k]);
            mqd_segment_reader_close(readers[k]);
        }
        CHECK(test_now_ns() - begin < 5000000000ll); /* the timeout of a response is longer */
        worker_stop(&worker);
    }
}

#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if !defined(__SANITIZE_THREAD__) && !__has_feature(thread_sanitizer) /* which does not support fork with threads */
TEST(a_child_has_no_readers)
{
    struct worker worker;
    static struct test_view v;
    struct mqd_read_state state;
    worker_start(&worker, ANSWER);
    struct mqd_segment_reader *reader = open_reader(&worker);
    CHECK_EQUAL(mqd_segment_reader_next(reader, 1, 1, test_view(&v, 5), &state), 0);
    uint64_t held = mqd_segment_reader_hold(reader);
    pid_t child = fork();
    if (child == 0) {
        bool good = mqd_segment_reader_next(reader, 1, 1, test_view(&v, 5), &state) < 0 &&
                    mqd_error_code() == MQD_E_INVALID && !open_reader(&worker);
        mqd_segment_reader_close(reader);
        mqd_client_mapping_release(worker.client, held);
        mqd_client_close(worker.client);
        _exit(good ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(view_is_right(&v.view, 0));
    CHECK_EQUAL(drain_all(reader), 25);
    mqd_client_mapping_release(NULL, held);
    mqd_segment_reader_close(reader);
    worker_stop(&worker);
}
#endif
