/* A retired partition and the one that takes its records, on three hosts, at random: idempotent
 * producers with five batches in flight, whose responses get lost and whose batches are sent again;
 * leaders that change before what they wrote is committed; followers that lag; producers that begin
 * a new epoch; every step of the retirement at any moment.
 *
 * What must hold: what was acknowledged (or reported as written before) is in the logs once; the
 * batches of a producer are in the order of its sequences, first in the retired partition, then in
 * the other, without a gap; a producer never gets an error on which its library would give up.
 *
 * The logs, producer states, verdicts and outcomes are the broker's own; replication is simulated:
 * a follower copies its leader's bytes, and a new leader's followers truncate what it lacks. */
#define LOG_TEST_IN_MEMORY
#include "mqd_log_test.h"

#include "log/partition_follow.h"
#include "server/redirect.h"
#include "server/request.h"

enum {
    HOSTS = 3,
    PRODUCERS = 3,
    BATCHES = 60,
    IN_FLIGHT = 5,
    RETIRED = 1,
    TAKER = 0,
    PARTITION = 3,
    BATCH_BYTES = 256,
    BODY = 40
};
enum { TRY_AGAIN = 19, NOT_LEADER = 6, OUT_OF_ORDER = 45, FORGOTTEN = 46, FILE_MAX = 1 << 18 };
enum fate { UNSENT, SENT, DONE };

struct sent {
    enum fate fate;
    int log;
    int64_t end_offset;
    int32_t leader_epoch;
    bool overdue;
};
/* Batch numbers: `first` is the first that is not done, `next` the next to be sent; those from
 * `tried` on were never sent; the current epoch began with `epoch_first`. */
struct producer {
    int64_t id;
    int16_t epoch;
    uint32_t first, next, tried, epoch_first;
    struct sent batch[BATCHES];
};
struct host {
    struct mqd_partition *log[2];
    int64_t sealed_end;
};
struct model {
    struct host host[HOSTS];
    int leader[2];
    int32_t epoch[2], step_epoch;
    enum mqd_retiring step;
    struct producer producer[PRODUCERS];
    uint64_t seed;
    uint32_t refused, redirected, duplicates, leader_changes, bumps;
    bool failed;
};

static uint64_t pick(struct model *m, uint64_t below)
{
    return test_random(&m->seed) % below;
}
static void path_of(char *out, size_t size_bytes, int host, int log)
{
    snprintf(out, size_bytes, "%s/host-%d-%d", log_root, host, log);
}
static int64_t end_of(const struct model *m, int host, int log)
{
    return log_positions(m->host[host].log[log]).log_end_offset;
}

static int64_t high_watermark(const struct model *m, int log)
{
    int64_t least = INT64_MAX;
    for (int host = 0; host < HOSTS; host++)
        least = end_of(m, host, log) < least ? end_of(m, host, log) : least;
    return least;
}

/* ---- simulated replication ---- */

static size_t bytes_of_log(int host, int log, uint8_t *out)
{
    char path[160], file[200];
    path_of(path, sizeof path, host, log);
    snprintf(file, sizeof file, "%s/%020d.log", path, 0);
    int fd = open(file, O_RDONLY);
    ssize_t n = pread(fd, out, FILE_MAX, 0);
    close(fd);
    CHECK_OR(n >= 0 && n < FILE_MAX, return 0);
    return (size_t)n;
}

/* Truncates what the leader lacks, and copies the rest of its log. */
static void follow(struct model *m, int host, int log)
{
    static uint8_t leaders[FILE_MAX], own[FILE_MAX];
    struct mqd_partition *partition = m->host[host].log[log];
    if (host == m->leader[log])
        return;
    size_t leader_bytes = bytes_of_log(m->leader[log], log, leaders), own_bytes = bytes_of_log(host, log, own),
           same = 0;
    struct mqd_batch batch;
    int64_t end = 0;
    while (same + MQD_BATCH_HEADER_BYTES <= leader_bytes && same + MQD_BATCH_HEADER_BYTES <= own_bytes &&
           mqd_batch_decode(leaders + same, leader_bytes - same, &batch) == 0 &&
           same + (size_t)batch.size_bytes <= own_bytes &&
           memcmp(leaders + same, own + same, (size_t)batch.size_bytes) == 0) {
        same += (size_t)batch.size_bytes;
        end = mqd_batch_end_offset(&batch);
    }
    struct mqd_truncation cut;
    struct mqd_follow_result followed;
    bool rolled;
    if (same < own_bytes)
        CHECK(mqd_partition_truncate(partition, end, NOW, &cut) == 0);
    if (same == leader_bytes)
        return;
    CHECK_EQUAL(
        mqd_partition_follow(partition, leaders + same, leader_bytes - same, m->epoch[log], false, NOW, &followed),
        MQD_FOLLOW_OK);
    CHECK_EQUAL(mqd_partition_write(partition, NOW, &rolled), 0);
}

static void led(struct model *m, int log)
{
    struct host *leader = &m->host[m->leader[log]];
    mqd_partition_set_leader_epoch(leader->log[log], m->epoch[log]);
    if (log == RETIRED && m->step)
        leader->sealed_end = mqd_partition_staged_end(leader->log[log]);
}

static void send_again_from(struct producer *producer, uint32_t number)
{
    if (number < producer->next)
        producer->next = number;
    for (uint32_t i = number; i < BATCHES; i++)
        if (producer->batch[i].fate == SENT)
            producer->batch[i].fate = UNSENT;
}

/* Batches written under the previous epoch without a response yet get none. */
static void new_epoch(struct model *m, int log, int leader)
{
    for (int p = 0; p < PRODUCERS && log == RETIRED && leader != m->leader[log]; p++)
        /* another connection: what was in flight is lost, and libraries keep their order */
        send_again_from(&m->producer[p], m->producer[p].first);
    bool moved = leader != m->leader[log];
    m->leader[log] = leader;
    m->epoch[log]++;
    led(m, log);
    for (int host = 0; host < HOSTS && moved;
         host++) /* immediately, or the next leader's log would not be a prefix of it */
        follow(m, host, log);
    m->leader_changes++;
}

static void take_step(struct model *m)
{
    if (m->step == MQD_RETIRING_HIDDEN || m->leader[RETIRED] != m->leader[TAKER])
        return;
    m->step++;
    new_epoch(m, RETIRED, m->leader[RETIRED]);
    m->step_epoch = m->epoch[RETIRED];
}

/* ---- the broker ---- */

static int16_t stage(struct model *m, int log, struct mqd_batch batch, uint8_t *bytes, uint32_t flags,
                     struct mqd_stage_result *result)
{
    bool rolled;
    struct mqd_partition *partition = m->host[m->leader[log]].log[log];
    int16_t error = mqd_partition_stage(partition, &batch, bytes, false, flags, 0, NOW, result);
    if (error == 0 && !result->duplicate)
        CHECK_OR(mqd_partition_write(partition, NOW, &rolled) == 0, return 56);
    return error;
}

/* The steps of mqd_redirect_take and mqd_owner_stage, for a partition led here. Returns the
 * error; else the batch's position: *log, *base_offset. */
static int16_t produce(struct model *m, struct mqd_batch batch, uint8_t *bytes, int *log, int64_t *base_offset)
{
    struct host *host = &m->host[m->leader[RETIRED]];
    struct mqd_partition *retired = host->log[RETIRED];
    struct mqd_stage_result result = {.base_offset = -1};
    struct mqd_append append = {.sent_to_target = 1, .base_offset = -1};
    int16_t error;
    bool duplicate;
    *log = RETIRED;
    if (m->step == MQD_RETIRING_SEALED) {
        error = mqd_partition_check_sequence(retired, &batch, &duplicate, base_offset);
        if (duplicate || error == FORGOTTEN)
            return error;
        mqd_partition_note_refused(retired, &batch, NOW);
        m->refused++;
        return TRY_AGAIN;
    }
    if (m->step == MQD_RETIRING_NONE) {
        error = stage(m, RETIRED, batch, bytes, 0, &result);
        *base_offset = result.base_offset;
        return error;
    }
    if (high_watermark(m, RETIRED) < host->sealed_end || m->leader[TAKER] != m->leader[RETIRED]) {
        mqd_partition_note_refused(retired, &batch, NOW);
        m->refused++;
        return TRY_AGAIN;
    }
    append.verdict = mqd_redirect_verdict(retired, &batch, &append.verdict_offset);
    batch.producer_id = mqd_redirect_producer(batch.producer_id, PARTITION);
    error =
        stage(m, TAKER, batch, bytes, MQD_STAGE_REDIRECTED | (append.verdict ? MQD_STAGE_REQUIRE_KNOWN : 0), &result);
    m->redirected++;
    *log = TAKER;
    *base_offset = result.base_offset;
    if (!error)
        return 0;
    error = mqd_redirect_outcome(&append, error);
    if (!error)
        *log = RETIRED, *base_offset = append.base_offset, m->duplicates++;
    return error;
}

/* ---- producers ---- */

/* Its sequence numbers restart (KIP-360, every transaction of KIP-890) when the outcomes of all
 * its batches are known. */
static void bump(struct model *m, struct producer *producer)
{
    if (producer->tried > producer->first || producer->epoch_first == producer->first)
        return;
    producer->epoch++;
    producer->epoch_first = producer->first;
    m->bumps++;
}

static void done(struct producer *producer, uint32_t number)
{
    producer->batch[number].fate = DONE;
    while (producer->first < BATCHES && producer->batch[producer->first].fate == DONE)
        producer->first++;
}

static void send(struct model *m, struct producer *producer)
{
    uint8_t bytes[BATCH_BYTES];
    struct mqd_batch batch;
    int64_t base_offset = -1;
    while (producer->next < BATCHES && producer->batch[producer->next].fate == DONE)
        producer->next++;
    uint32_t number = producer->next;
    if (number >= BATCHES || number >= producer->first + IN_FLIGHT) {
        if (producer->first < BATCHES && producer->batch[producer->first].fate == UNSENT)
            producer->next = producer->first;
        return;
    }
    log_encode(bytes, (struct log_batch){.producer_id = producer->id,
                                         .producer_epoch = producer->epoch,
                                         .base_sequence = (int32_t)(number - producer->epoch_first) * 2,
                                         .record_count = 2,
                                         .body_bytes = BODY,
                                         .mark = (uint64_t)producer->id << 32 | number});
    CHECK_OR(mqd_batch_decode(bytes, sizeof bytes, &batch) == 0, return);
    struct sent *sent = &producer->batch[number];
    int16_t error = produce(m, batch, bytes, &sent->log, &base_offset);
    producer->next++;
    producer->tried = producer->next > producer->tried ? producer->next : producer->tried;
    /* the response is lost (with the connection, those of all later batches too), or it says: try
     * again */
    if (pick(m, 8) == 0 || error == TRY_AGAIN) {
        if (pick(m, 2))
            send_again_from(producer, producer->first);
        else if (error)
            sent->fate = UNSENT; /* later ones are on their way already */
        else
            sent->fate = SENT, sent->end_offset = base_offset + 2, sent->leader_epoch = -1;
        return;
    }
    if (error == FORGOTTEN) {
        done(producer, number); /* libraries take this to mean that it was written */
        return;
    }
    if (error == OUT_OF_ORDER && number > producer->first) {
        send_again_from(producer, producer->first); /* one before it has not been taken yet */
        return;
    }
    CHECK_OR(error == 0, fprintf(stderr, "producer %lld gives up: batch %u, error %d in step %d\n",
                                 (long long)producer->id, number, error, m->step);
             m->failed = true; return);
    sent->fate = SENT;
    sent->end_offset = base_offset + 2;
    sent->leader_epoch = m->epoch[sent->log];
}

/* Sends the responses that are due; batches of an old epoch are resent. */
static void answer(struct model *m)
{
    for (int p = 0; p < PRODUCERS; p++) {
        struct producer *producer = &m->producer[p];
        for (uint32_t i = producer->first; i < BATCHES && !m->failed; i++) {
            struct sent *sent = &producer->batch[i];
            if (sent->fate == SENT && sent->leader_epoch != m->epoch[sent->log]) {
                send_again_from(producer, producer->first);
                break;
            }
            if (sent->fate == SENT && sent->end_offset <= high_watermark(m, sent->log))
                done(producer, i);
        }
    }
}

/* ---- the model ---- */

static void begin(struct model *m, uint64_t seed)
{
    struct mqd_log_options options = log_options();
    options.flush_on_ack = 0;
    options.preallocate_bytes_max = 65536;
    log_fresh();
    *m = (struct model){.seed = seed};
    for (int host = 0; host < HOSTS; host++)
        for (int log = 0; log < 2; log++) {
            char path[160];
            struct mqd_recovery recovery = log_untrusted();
            path_of(path, sizeof path, host, log);
            m->host[host].log[log] = mqd_partition_open(path, &options, 0, NOW, &recovery);
            CHECK(m->host[host].log[log]);
        }
    for (int p = 0; p < PRODUCERS; p++)
        m->producer[p].id = 7 + p;
}

static void random_step(struct model *m)
{
    switch (pick(m, 40)) {
    case 0:
        take_step(m);
        break;
    case 1:
        new_epoch(m, TAKER, (int)pick(m, HOSTS));
        break;
    case 2:
        new_epoch(m, RETIRED, m->leader[TAKER]); /* it follows the one that takes its records */
        break;
    case 3:
    case 4:
    case 5:
    case 6:
    case 7:
    case 8:
    case 9:
    case 10:
    case 11:
    case 12:
        follow(m, (int)pick(m, HOSTS), (int)pick(m, 2));
        break;
    case 13:
    case 14:
        bump(m, &m->producer[pick(m, PRODUCERS)]);
        break;
    default:
        send(m, &m->producer[pick(m, PRODUCERS)]);
    }
    answer(m);
}

/* The batches of each producer follow the ones counted before; advances next[] past them. */
static void check_log(struct model *m, int log, uint32_t *next)
{
    static uint8_t bytes[FILE_MAX];
    size_t size_bytes = bytes_of_log(m->leader[log], log, bytes);
    struct mqd_batch batch;
    const char *reason;
    for (size_t at = 0; at < size_bytes; at += (size_t)batch.size_bytes) {
        uint64_t mark;
        CHECK(mqd_batch_decode(bytes + at, size_bytes - at, &batch) == 0);
        CHECK_EQUAL(mqd_batch_validate(bytes + at, (uint64_t)batch.size_bytes, &batch, &reason), 0);
        memcpy(&mark, bytes + at + MQD_BATCH_HEADER_BYTES, sizeof mark);
        uint32_t producer = (uint32_t)(mark >> 32) - 7, number = (uint32_t)mark;
        CHECK(producer < PRODUCERS);
        CHECK_EQUAL(batch.producer_id,
                    log == RETIRED ? (int64_t)producer + 7 : mqd_redirect_producer((int64_t)producer + 7, PARTITION));
        CHECK_OR(number == next[producer], fprintf(stderr, "log %d: batch %u of producer %u, where %u was expected\n",
                                                   log, number, producer + 7, next[producer]);
                 m->failed = true; return);
        next[producer]++;
    }
}

static void run(uint64_t seed, struct model *m)
{
    begin(m, seed);
    for (int i = 0; i < 1200 && !m->failed; i++)
        random_step(m);
    new_epoch(m, TAKER, 0);
    new_epoch(m, RETIRED, 0);
    while (m->step < MQD_RETIRING_REDIRECTED)
        take_step(m);
    for (int i = 0; i < 4000 && !m->failed; i++) { /* healed: everything succeeds */
        for (int host = 0; host < HOSTS; host++)
            follow(m, host, TAKER), follow(m, host, RETIRED);
        answer(m);
        send(m, &m->producer[i % PRODUCERS]);
    }
    uint32_t next[PRODUCERS] = {0};
    check_log(m, RETIRED, next);
    check_log(m, TAKER, next);
    for (int p = 0; p < PRODUCERS && !m->failed; p++) {
        CHECK_OR(m->producer[p].first == BATCHES, m->failed = true);
        CHECK_OR(next[p] == BATCHES, m->failed = true);
    }
    for (int host = 0; host < HOSTS; host++)
        for (int log = 0; log < 2; log++)
            mqd_partition_close(m->host[host].log[log], 0);
    log_clean();
}

TEST(nothing_is_lost_duplicated_or_reordered_in_any_step)
{
    uint64_t seeds = getenv("MQD_TEST_LONG") ? 2000 : 10, refused = 0, redirected = 0, duplicates = 0, changes = 0,
             bumps = 0, first = getenv("MQD_TEST_SEED") ? strtoull(getenv("MQD_TEST_SEED"), NULL, 0) : 1;
    static struct model m;
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        run(seed, &m);
        CHECK_OR(!m.failed, fprintf(stderr, "again: MQD_TEST_SEED=%llu\n", (unsigned long long)seed); return);
        refused += m.refused, redirected += m.redirected, duplicates += m.duplicates, changes += m.leader_changes,
            bumps += m.bumps;
    }
    test_message(
        "%llu refused, %llu handed on, %llu answered by the retired partition, %llu new epochs, %llu of producers",
        (unsigned long long)refused, (unsigned long long)redirected, (unsigned long long)duplicates,
        (unsigned long long)changes, (unsigned long long)bumps);
    CHECK(refused && redirected && duplicates && changes && bumps);
}
