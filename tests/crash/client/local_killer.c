/* Shared-memory producers that die, or stop, after a counted number of instructions. A tool of
 * test_local_clients.py, built against the client library of native/examples.
 *
 *   local_killer DATA_DIR/run/client.sock TOPIC
 *
 * Reads rounds from standard input, a line each, and answers each with a line:
 *
 *   NAME WINDOW STEPS ACTION PRODUCER_ID EPOCH WARM BATCHES RECORDS
 *   end NAME HOW STEPS WORKER OPENED batch:base_offset ...        what was acknowledged
 *
 * A round is a forked child: attach, find the topic, WARM batches, then BATCHES in one go, their
 * acknowledgements, reading the log, closing. One part of that is the WINDOW; in it the child is
 * single-stepped by ptrace, so that every instruction between any two stores of ours is a place to
 * end at.
 *
 *   ACTION kill    SIGKILL after STEPS instructions of the window; HOW is `killed`, or `through`
 *                  when the window has fewer (the child then ends by itself)
 *          pause   stopped there: says `paused PID`, waits for a line, and lets it go on to its
 *                  end: HOW `ended`
 *          time    not traced: produces without end, SIGKILL after STEPS microseconds
 *          nap     as time, but SIGSTOP, `paused PID`, a line, SIGCONT, and SIGKILL as long again
 *                  later
 *
 * HOW `failed CODE` is a child that could not do its work, which nothing here excuses; it has said
 * why on standard error. Records are those of checker.py: name:counter:, a filling, and their own
 * CRC-32. An attachment that has ended is replaced by another, as an application would.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/client.h"
#include "client/reader.h"

#define ACKNOWLEDGED_MAX 65536
#define RECORDS_MAX 64
#define VALUE_BYTES_MAX 700
#define PATIENCE_S 60
#define RECONNECT_US 20000

enum window { OPEN, FIND, PRODUCE, ANSWER, READ, CLOSE, NONE = -1 };

struct round {
    char name[32], action[8];
    int window;
    int64_t steps, producer_id;
    int epoch, warm, batches, records;
};

struct told { /* by the child, in memory shared with its parent: what it knew when it died */
    volatile uint32_t count;
    volatile int32_t worker;
    volatile uint32_t opened;
    volatile uint32_t edges; /* of its window, passed or being passed */
    struct {
        uint32_t batch;
        int64_t base_offset;
    } acknowledged[ACKNOWLEDGED_MAX];
};

struct child {
    const struct round *round;
    struct told *told;
    const char *socket_path, *topic_name;
    struct mqd_client *client;
    struct mqd_producer *producer;
    struct mqd_client_topic topic;
    int32_t topic_number;
    uint64_t numbers[ACKNOWLEDGED_MAX]; /* of a batch, by its order */
    uint32_t sent, answered;
};

static void fail(const struct child *c, const char *what)
{
    fprintf(stderr, "%s: %s: %s\n", c->round->name, what, mqd_error_message());
    _exit(3);
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

static bool is_timed(const struct round *round)
{
    return strcmp(round->action, "time") == 0 || strcmp(round->action, "nap") == 0;
}

static void edge(const struct child *c, enum window window)
{
    if (c->round->window == (int)window) {
        c->told->edges++;
        raise(SIGTRAP);
    }
}

/* ---- what the child does ---- */

static uint32_t crc32_of(const uint8_t *bytes, size_t size)
{
    uint32_t crc = ~0u;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xedb88320u & -(crc & 1));
    }
    return ~crc;
}

static int32_t make_value(const char *name, uint32_t counter, uint8_t *out)
{
    int size = sprintf((char *)out, "%s:%u:", name, counter);
    int filling = (int)(counter * 2654435761u % (VALUE_BYTES_MAX - 100));
    memset(out + size, 'a' + (int)(counter % 26), (size_t)filling);
    size += filling;
    uint32_t crc = __builtin_bswap32(crc32_of(out, (size_t)size));
    memcpy(out + size, &crc, 4);
    return size + 4;
}

static struct mqd_client *attach(struct child *c)
{
    /* the least there is: rings and memory are gone round many times in a round */
    struct mqd_client_options options = {.socket_path = c->socket_path,
                                         .client_id = c->round->name,
                                         .data_bytes = is_timed(c->round) ? 1 << 20 : 65536,
                                         .reply_bytes = 4096,
                                         .submission_count = 16,
                                         .timeout_ms = 10000,
                                         .request_bytes = 16384};
    int64_t deadline = now_us() + PATIENCE_S * 1000000ll;
    for (;;) {
        struct mqd_client *client = mqd_client_open(&options);
        if (client) {
            c->told->worker = (int32_t)mqd_client_worker(client);
            c->told->opened++;
            return client;
        }
        if (now_us() > deadline)
            fail(c, "attaching");
        usleep(RECONNECT_US); /* the broker is being started: nothing to wait on */
    }
}

/* After EPIPE: another attachment for what we have. */
static void reattach(struct child *c)
{
    struct mqd_client *old = c->client;
    if (mqd_error_code() != EPIPE)
        fail(c, "the attachment");
    c->client = attach(c);
    if (!c->producer)
        mqd_client_close(old);
    else if (mqd_producer_move(c->producer, c->client) < 0)
        fail(c, "moving");
}

static void find(struct child *c)
{
    for (uint32_t id = 1;; id++) {
        edge(c, FIND);
        int result = mqd_client_find_topic(c->client, c->topic_name, id, PATIENCE_S * 1000000ll, &c->topic);
        edge(c, FIND);
        if (result < 0)
            reattach(c);
        else if (c->topic.error == 0)
            return;
        else
            usleep(RECONNECT_US);
    }
}

static void open_producer(struct child *c)
{
    struct mqd_producer_options options = {.acks = -1,
                                           .producer_id = c->round->producer_id,
                                           .producer_epoch = (int16_t)c->round->epoch,
                                           .request_timeout_ms = 30000,
                                           .batch_bytes = 16384,
                                           .inflight_max = 5,
                                           .linger_us = 1000000,
                                           .produce_version = 11};
    while (!(c->producer = mqd_producer_open(c->client, &options)))
        reattach(c);
    c->topic_number =
        mqd_producer_topic(c->producer, c->topic_name, c->topic.partition_count, MQD_PARTITIONER_CONSISTENT_RANDOM);
    if (c->topic_number < 0)
        fail(c, "the topic");
}

static int retriable(int16_t error)
{
    return error == 3 || error == 5 || error == 6 || error == 7 || error == 13 || error == 19 || error == 20 ||
           error == 56;
}

static void take_outcomes(struct child *c)
{
    struct mqd_delivery deliveries[16];
    uint32_t count;
    while ((count = mqd_producer_deliveries(c->producer, deliveries, 16)) > 0)
        for (uint32_t i = 0; i < count; i++) {
            uint32_t batch = 0;
            if (retriable(deliveries[i].error)) {
                usleep(1000);
                mqd_producer_retry(c->producer, deliveries[i].batch);
                continue;
            }
            while (batch < c->sent && c->numbers[batch] != deliveries[i].batch)
                batch++;
            if (deliveries[i].error || batch == c->sent) {
                fprintf(stderr, "%s: batch %u of %u: Kafka error %d\n", c->round->name, batch, c->sent,
                        deliveries[i].error);
                _exit(4);
            }
            uint32_t at = c->told->count;
            c->told->acknowledged[at].batch = batch;
            c->told->acknowledged[at].base_offset = deliveries[i].base_offset;
            __atomic_store_n(&c->told->count, at + 1, __ATOMIC_RELEASE);
            c->answered++;
        }
}

/* Waits for something, then takes it in. */
static void take_in(struct child *c)
{
    int result = mqd_client_wait(c->client, PATIENCE_S * 1000000ll);
    edge(c, ANSWER);
    if (result >= 0)
        result = mqd_client_poll(c->client);
    take_outcomes(c);
    edge(c, ANSWER);
    if (result < 0)
        reattach(c);
}

/* One batch of the partition; all its records or, when the memory is full, none yet. */
static void append_batch(struct child *c, const uint8_t *values, const int32_t *sizes, int32_t partition)
{
    uint64_t numbers[RECORDS_MAX] = {0};
    const uint32_t records = (uint32_t)c->round->records;
    for (uint32_t done = 0; done < records;) {
        struct mqd_record_columns columns = {.count = records - done,
                                             .values = values,
                                             .value_bytes = sizes + done,
                                             .partition = partition,
                                             .timestamp_ms = 1600000000000};
        int64_t taken = mqd_producer_append(c->producer, c->topic_number, &columns, numbers + done);
        if (taken < 0)
            reattach(c);
        for (int64_t i = 0; i < taken; i++)
            values += sizes[done++];
        if (done < records && taken == 0)
            take_in(c);
    }
    for (uint32_t i = 1; i < records; i++)
        if (numbers[i] != numbers[0])
            fail(c, "a batch was divided");
    c->numbers[c->sent++] = numbers[0];
}

static void produce(struct child *c, int batches, bool stepped)
{
    static uint8_t values[8][RECORDS_MAX * VALUE_BYTES_MAX];
    static int32_t sizes[8][RECORDS_MAX];
    if (c->sent + (uint32_t)batches > ACKNOWLEDGED_MAX)
        fail(c, "more batches than a round may have");
    for (int b = 0; b < batches; b++) { /* made before the window: these instructions are not the client's */
        uint8_t *at = values[b];
        for (int i = 0; i < c->round->records; i++)
            at += sizes[b][i] =
                make_value(c->round->name, (c->sent + (uint32_t)b) * (uint32_t)c->round->records + (uint32_t)i, at);
    }
    if (stepped)
        edge(c, PRODUCE);
    for (int b = 0; b < batches; b++) {
        append_batch(c, values[b], sizes[b], 0);
        while (mqd_producer_send(c->producer, now_us(), 1) < 0)
            reattach(c);
    }
    if (stepped)
        edge(c, PRODUCE);
}

static void read_some(struct child *c)
{
    static int64_t offsets[64], timestamps[64];
    static uint64_t keys[64], positions[64], headers[64];
    static int32_t key_bytes[64], value_bytes[64], header_bytes[64];
    struct mqd_record_view view = {.capacity = 64,
                                   .offsets = offsets,
                                   .timestamps_ms = timestamps,
                                   .key_positions = keys,
                                   .key_bytes = key_bytes,
                                   .value_positions = positions,
                                   .value_bytes = value_bytes,
                                   .header_positions = headers,
                                   .header_bytes = header_bytes};
    struct mqd_read_state state;
    int64_t from = c->told->count ? c->told->acknowledged[c->told->count - 1].base_offset : 0;
    edge(c, READ);
    struct mqd_segment_reader *reader =
        mqd_segment_reader_open(c->client, c->topic.topic_id, 0, from > 0 ? from : 0, 0);
    int result = reader ? mqd_segment_reader_next(reader, 65536, 1, &view, &state) : -1;
    if (reader)
        mqd_segment_reader_close(reader);
    edge(c, READ);
    if (result == 0 && state.stop == MQD_READ_CORRUPT)
        fail(c, "a torn record");
    if (result < 0)
        reattach(c);
}

static void child_main(struct child *c)
{
    const struct round *round = c->round;
    edge(c, OPEN);
    c->client = attach(c);
    edge(c, OPEN);
    find(c);
    open_producer(c);
    for (int i = 0; i < round->warm; i++) {
        produce(c, 1, false);
        while (c->answered < c->sent) { /* `take_in` without its edges */
            if (mqd_client_wait(c->client, PATIENCE_S * 1000000ll) < 0 || mqd_client_poll(c->client) < 0)
                reattach(c);
            take_outcomes(c);
        }
    }
    if (is_timed(round))
        for (;;) {
            produce(c, 1 + (int)(c->sent % 4), false);
            if (c->sent - c->answered > 8)
                take_in(c);
        }
    produce(c, round->batches, true);
    while (c->answered < c->sent)
        take_in(c);
    read_some(c);
    edge(c, CLOSE);
    mqd_producer_close(c->producer);
    mqd_client_close(c->client);
    edge(c, CLOSE);
}

/* ---- what its parent does ---- */

static bool wait_for_line(void)
{
    char line[64];
    return fgets(line, sizeof line, stdin) != NULL;
}

static void pause_here(pid_t pid)
{
    printf("paused %d\n", pid);
    fflush(stdout);
    if (!wait_for_line())
        kill(pid, SIGKILL);
}

/* Until STEPS instructions of the window are done: true; or the window is, or the child. */
static bool step(pid_t pid, const struct round *round, const struct told *told, int64_t *steps, int *status)
{
    while (*steps < round->steps) {
        if (ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) < 0 || waitpid(pid, status, 0) < 0 || !WIFSTOPPED(*status) ||
            told->edges > 1)
            return false;
        ++*steps;
    }
    return true;
}

static const char *traced(pid_t pid, const struct round *round, const struct told *told, int64_t *steps)
{
    int status = 0;
    if (waitpid(pid, &status, 0) < 0 || !WIFSTOPPED(status))
        return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "missed" : "failed";
    ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_EXITKILL);
    const char *how = "through";
    if (step(pid, round, told, steps, &status)) {
        if (strcmp(round->action, "kill") == 0) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return "killed";
        }
        pause_here(pid);
        how = "ended";
    }
    while (WIFSTOPPED(status)) { /* on to its end; later edges of the same window (another response) do not count */
        int signal_number = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
        if (ptrace(PTRACE_CONT, pid, NULL, (void *)(intptr_t)signal_number) < 0 || waitpid(pid, &status, 0) < 0)
            return "failed";
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? how : "failed";
}

static const char *timed(pid_t pid, const struct round *round)
{
    int status;
    usleep((useconds_t)round->steps);
    if (strcmp(round->action, "nap") == 0) {
        kill(pid, SIGSTOP);
        pause_here(pid);
        kill(pid, SIGCONT);
        usleep((useconds_t)round->steps);
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? "killed" : "failed";
}

static void run(const struct round *round, struct told *told, char **words)
{
    static struct child child;
    int64_t steps = 0;
    told->count = told->opened = told->edges = 0;
    told->worker = -1;
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(2 * PATIENCE_S);
        if (!is_timed(round))
            ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        child = (struct child){.round = round, .told = told, .socket_path = words[1], .topic_name = words[2]};
        child_main(&child);
        _exit(0);
    }
    const char *how = !is_timed(round) ? traced(pid, round, told, &steps) : timed(pid, round);
    printf("end %s %s %" PRId64 " %d %u", round->name, how, steps, told->worker, told->opened);
    for (uint32_t i = 0; i < told->count; i++)
        printf(" %u:%" PRId64, told->acknowledged[i].batch, told->acknowledged[i].base_offset);
    printf("\n");
    fflush(stdout);
}

int main(int count, char **words)
{
    struct round round;
    struct told *told = mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char line[256];
    if (count != 3 || told == MAP_FAILED) {
        fprintf(stderr, "usage: local_killer DATA_DIR/run/client.sock TOPIC\n");
        return 2;
    }
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%31s %d %" SCNd64 " %7s %" SCNd64 " %d %d %d %d", round.name, &round.window, &round.steps,
                   round.action, &round.producer_id, &round.epoch, &round.warm, &round.batches, &round.records) != 9 ||
            round.batches < 1 || round.batches > 4 || round.records < 1 || round.records > RECORDS_MAX) {
            fprintf(stderr, "not a round: %s", line);
            return 2;
        }
        run(&round, told, words);
    }
    return 0;
}
