/* tsan: long */
/* A producer under random conditions, from a seed: many partitions, all kinds of records, some
 * error responses, retries and drops, workers that die before or after they have written, moves to
 * another attachment. The other side applies a broker's rules about sequence numbers. In the end
 * each record that was not dropped is in its partition's log, in order, once if the producer is
 * idempotent, at least once if not; and all memory is free again. MQD_TEST_SEED=N begins with that
 * seed. */
#include "mqd_test.h"

#include <errno.h>

#include "base/varint.h"
#include "mqd_client_test.h"

enum { PARTITIONS = 5, LOG_MAX = 1 << 15, RECORDS = 3000, BATCHES_MAX = 1 << 14 };
enum { NOT_LEADER_OR_FOLLOWER = 6, REQUEST_TIMED_OUT = 7, OUT_OF_ORDER_SEQUENCE_NUMBER = 45 };

/* one partition as in the broker: the values are numbers */
struct log {
    uint32_t values[LOG_MAX], count;
    int32_t next_sequence;
    struct {
        int32_t base_sequence, record_count;
        int64_t base_offset;
    } last[5];
    uint32_t last_count;
};

struct world {
    struct fake fake;
    struct mqd_client_options client_options;
    struct mqd_producer_options options;
    struct mqd_client *client;
    struct mqd_producer *producer;
    uint64_t seed, free_bytes;
    struct log logs[PARTITIONS];
    int32_t topic;
    uint32_t appended;
    uint64_t batch_of[RECORDS];
    uint8_t partition_of[RECORDS];
    struct {
        uint64_t number;
        bool dropped, done, failed;
    } batches[BATCHES_MAX];
    uint32_t batch_count, failures, drops, deaths, retries;
    bool idempotent, epoch_spoilt;
};

static uint32_t random_below(struct world *w, uint32_t end)
{
    return (uint32_t)(test_random(&w->seed) % end);
}

/* ---- the broker ---- */

static void log_append(struct log *log, const struct fake *fake)
{
    const uint8_t *at = fake->partition.records + MQD_BATCH_HEADER_BYTES,
                  *end = fake->partition.records + fake->partition.size_bytes;
    for (int32_t i = 0; i < fake->batch.record_count; i++) {
        int64_t size, skip, value_size;
        at = mqd_varint(at, end, &size);
        const uint8_t *next = at + size, *field = at + 1;
        field = mqd_varlong(field, next, &skip);
        field = mqd_varint(field, next, &skip);
        field = mqd_varint_size(field, next, &skip);
        field += skip > 0 ? skip : 0;
        field = mqd_varint_size(field, next, &value_size);
        CHECK(field && value_size >= 4);
        CHECK_OR(log->count < LOG_MAX, abort());
        memcpy(&log->values[log->count++], field, 4);
        at = next;
    }
}

/* Kafka's rules: the next sequence number, or a repetition of one of the last five batches.
 * Returns the error, and the batch's offset in *base_offset. */
static int16_t log_produce(struct world *w, int64_t *base_offset)
{
    const struct mqd_batch *batch = &w->fake.batch;
    struct log *log = &w->logs[w->fake.partition.partition_index];
    *base_offset = log->count;
    if (!w->idempotent) {
        log_append(log, &w->fake);
        return 0;
    }
    for (uint32_t i = 0; i < log->last_count; i++)
        if (log->last[i].base_sequence == batch->base_sequence && log->last[i].record_count == batch->record_count) {
            *base_offset = log->last[i].base_offset;
            return 0;
        }
    if (batch->base_sequence != log->next_sequence)
        return OUT_OF_ORDER_SEQUENCE_NUMBER;
    log->next_sequence = (int32_t)((uint32_t)log->next_sequence + (uint32_t)batch->record_count);
    if (log->last_count == 5)
        memmove(log->last, log->last + 1, 4 * sizeof log->last[0]);
    else
        log->last_count++;
    log->last[log->last_count - 1].base_sequence = batch->base_sequence;
    log->last[log->last_count - 1].record_count = batch->record_count;
    log->last[log->last_count - 1].base_offset = *base_offset;
    log_append(log, &w->fake);
    return 0;
}

static void serve(struct world *w, uint32_t most)
{
    for (uint32_t i = 0; i < most && fake_next(&w->fake); i++) {
        uint32_t luck = random_below(w, 20);
        int64_t base_offset = -1;
        int16_t error = luck == 0 ? NOT_LEADER_OR_FOLLOWER : log_produce(w, &base_offset);
        if (luck == 1 && !error)
            error = REQUEST_TIMED_OUT; /* written, but reported otherwise */
        fake_answer(&w->fake, error, base_offset);
    }
}

/* ---- the application ---- */

static uint32_t known(struct world *w, uint64_t number)
{
    for (uint32_t i = w->batch_count; i-- > 0;)
        if (w->batches[i].number == number)
            return i;
    CHECK_OR(w->batch_count < BATCHES_MAX, abort());
    w->batches[w->batch_count].number = number;
    return w->batch_count++;
}

static void append(struct world *w)
{
    static uint8_t values[64 * 400];
    static int32_t sizes[64], partitions[64];
    uint64_t batch_of[64];
    uint32_t count = 1 + random_below(w, 40), bytes = 0;
    count = count < RECORDS - w->appended ? count : RECORDS - w->appended;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = w->appended + i;
        sizes[i] = 4 + (int32_t)random_below(w, 300);
        memcpy(values + bytes, &number, 4);
        bytes += (uint32_t)sizes[i];
        partitions[i] = (int32_t)random_below(w, PARTITIONS);
        w->partition_of[number] = (uint8_t)partitions[i];
    }
    struct mqd_record_columns columns = {
        .count = count, .values = values, .value_bytes = sizes, .partitions = partitions, .timestamp_ms = 5};
    int64_t taken = mqd_producer_append(w->producer, w->topic, &columns, batch_of);
    CHECK(taken >= 0);
    for (int64_t i = 0; i < taken; i++) {
        w->batch_of[w->appended + i] = batch_of[i];
        known(w, batch_of[i]);
    }
    w->appended += (uint32_t)taken;
}

static void take_outcomes(struct world *w)
{
    struct mqd_delivery d[16];
    uint32_t count = mqd_producer_deliveries(w->producer, d, 1 + random_below(w, 16));
    for (uint32_t i = 0; i < count; i++) {
        uint32_t batch = known(w, d[i].batch);
        CHECK(!w->batches[batch].done && !w->batches[batch].dropped && !w->batches[batch].failed);
        w->batches[batch].done = d[i].error == 0;
        w->batches[batch].failed = d[i].error != 0;
        w->failures += d[i].error != 0;
        if (d[i].error == OUT_OF_ORDER_SEQUENCE_NUMBER)
            w->epoch_spoilt = true; /* only after a drop, see below */
    }
}

static void decide(struct world *w)
{
    for (uint32_t i = 0; i < w->batch_count; i++) {
        if (!w->batches[i].failed || random_below(w, 3) == 0)
            continue;
        w->batches[i].failed = false;
        if (!w->idempotent && random_below(w, 4) == 0) {
            CHECK_EQUAL(mqd_producer_drop(w->producer, w->batches[i].number), 0);
            w->batches[i].dropped = true;
            w->drops++;
        } else {
            CHECK_EQUAL(mqd_producer_retry(w->producer, w->batches[i].number), 0);
            w->retries++;
        }
    }
}

/* The worker ends at any moment; what it had written stays written. */
static void die(struct world *w)
{
    while (random_below(w, 3) && fake_next(&w->fake)) {
        int64_t base_offset;
        if (log_produce(w, &base_offset) == 0 && random_below(w, 2))
            fake_answer(&w->fake, 0, base_offset);
    }
    fake_die(&w->fake);
    w->deaths++;
    struct mqd_client *to = fake_attach(&w->fake, &w->client_options);
    CHECK(to);
    CHECK_EQUAL(mqd_producer_move(w->producer, to), 0);
    w->client = to;
}

/* Records in a log: those of a partition that were not dropped, in order. */
static void check_logs(struct world *w)
{
    for (uint32_t p = 0; p < PARTITIONS; p++) {
        const struct log *log = &w->logs[p];
        uint32_t at = 0, seen_end = 0;
        static bool seen[RECORDS];
        memset(seen, 0, sizeof seen);
        for (uint32_t i = 0; i < log->count; i++) {
            uint32_t value = log->values[i];
            CHECK(value < RECORDS && w->partition_of[value] == p);
            if (w->idempotent)
                CHECK(!seen[value] && value >= seen_end);
            seen[value] = true;
            seen_end = value + 1;
        }
        for (uint32_t i = 0; i < w->appended; i++)
            if (w->partition_of[i] == p && !w->batches[known(w, w->batch_of[i])].dropped) {
                CHECK(seen[i]);
                at++;
            }
        CHECK(at <= log->count);
    }
}

static void mix(uint64_t seed)
{
    static struct world world;
    struct world *w = &world;
    memset(w, 0, sizeof *w);
    w->seed = seed;
    w->idempotent = random_below(w, 2);
    w->client_options = (struct mqd_client_options){.client_id = "mix",
                                                    .data_bytes = (64u + random_below(w, 100)) << 10,
                                                    .reply_bytes = 4096,
                                                    .submission_count = 8u << random_below(w, 4),
                                                    .timeout_ms = 5000};
    w->options = (struct mqd_producer_options){.acks = -1,
                                               .producer_epoch = w->idempotent ? 0 : -1,
                                               .producer_id = w->idempotent ? 5 : -1,
                                               .batch_bytes = 400 + random_below(w, 4000),
                                               .batch_records_max = random_below(w, 3) ? 0 : 7,
                                               .inflight_max = 1 + random_below(w, 6),
                                               .produce_version = (int16_t)(9 + random_below(w, 4))};
    fake_open(&w->fake, "mix");
    w->client = fake_attach(&w->fake, &w->client_options);
    CHECK(w->client);
    w->producer = mqd_producer_open(w->client, &w->options);
    CHECK(w->producer);
    w->free_bytes = mqd_client_available_bytes(w->client);
    w->topic = mqd_producer_topic(w->producer, "t", PARTITIONS, MQD_PARTITIONER_RANDOM);
    for (uint32_t step = 0; w->appended < RECORDS || mqd_producer_outstanding_records(w->producer); step++) {
        CHECK(step < 200000 && !test_failed);
        uint32_t luck = random_below(w, 100);
        if (luck < 30 && w->appended < RECORDS)
            append(w);
        else if (luck < 45)
            CHECK_EQUAL(
                mqd_producer_send(w->producer, test_now_ns() / 1000, random_below(w, 2) || w->appended == RECORDS), 0);
        else if (luck < 65)
            serve(w, 1 + random_below(w, 6));
        else if (luck < 80)
            CHECK_EQUAL(mqd_client_poll(w->client), 0);
        else if (luck < 90)
            take_outcomes(w);
        else if (luck < 99)
            decide(w);
        else if (random_below(w, 3) == 0)
            die(w);
    }
    while (!test_failed && mqd_producer_deliveries(w->producer, (struct mqd_delivery[1]){{0}}, 1))
        ;
    CHECK(!w->epoch_spoilt);
    CHECK_EQUAL(mqd_client_available_bytes(w->client), w->free_bytes);
    CHECK_EQUAL(mqd_producer_outstanding_bytes(w->producer), 0);
    check_logs(w);
    mqd_producer_close(w->producer);
    mqd_client_close(w->client);
    fake_close(&w->fake);
}

TEST(random_operations_in_any_order)
{
    uint64_t first = getenv("MQD_TEST_SEED") ? strtoull(getenv("MQD_TEST_SEED"), NULL, 10) : 1,
             count = test_long() ? 300 : 12;
    for (uint64_t seed = first; seed < first + count && !test_failed; seed++) {
        mix(seed);
        if (test_failed)
            test_message("MQD_TEST_SEED=%llu", (unsigned long long)seed);
    }
}

/* ---- two threads ---- */

/* A worker that serves in its own thread, sleeping like real ones, while the client works in
 * another and a third waits. */
struct serving {
    struct fake *fake;
    uint64_t records, batches;
    int stop;
};

static void *serve_on(void *argument)
{
    struct serving *s = argument;
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(s->fake->control, 0);
    while (!mqd_load_acquire(&s->stop)) {
        if (fake_next(s->fake)) {
            s->records += (uint64_t)s->fake->batch.record_count;
            fake_answer(s->fake, 0, (int64_t)s->batches++);
            continue;
        }
        mqd_store_seq_cst(&slot->sleeping, 1u);
        mqd_fence_full();
        if (mqd_load_acquire(&s->fake->header->submission_tail) == s->fake->head) {
            uint64_t count;
            struct timespec moment = {0, 20000};
            if (read(s->fake->to_worker, &count, sizeof count) < 0)
                nanosleep(&moment, NULL);
        }
        mqd_store_seq_cst(&slot->sleeping, 0u);
    }
    return NULL;
}

static int waiting_stop;
static void *wait_on(void *argument)
{
    while (!mqd_load_acquire(&waiting_stop))
        mqd_client_wait(argument, 1000);
    return NULL;
}

TEST(a_worker_a_client_and_a_waiter)
{
    struct fake fake;
    struct mqd_client_options client_options = {.client_id = "threads",
                                                .data_bytes = 256 << 10,
                                                .reply_bytes = 4096,
                                                .submission_count = 64,
                                                .timeout_ms = 5000,
                                                .spin_us = 20};
    struct mqd_producer_options options = {.acks = -1,
                                           .producer_epoch = -1,
                                           .producer_id = -1,
                                           .batch_bytes = 3000,
                                           .inflight_max = 20,
                                           .linger_us = 100,
                                           .produce_version = 12};
    static uint8_t values[100 * 50];
    static struct serving serving;
    pthread_t worker, waiter;
    fake_open(&fake, "three");
    struct mqd_client *client = fake_attach(&fake, &client_options);
    CHECK(client);
    struct mqd_producer *producer = mqd_producer_open(client, &options);
    CHECK(producer);
    int32_t topic = mqd_producer_topic(producer, "t", 4, MQD_PARTITIONER_RANDOM);
    serving = (struct serving){.fake = &fake};
    waiting_stop = 0;
    pthread_create(&worker, NULL, serve_on, &serving);
    pthread_create(&waiter, NULL, wait_on, client);
    uint64_t total = test_long() ? 2000000 : 100000, sent = 0, acknowledged = 0;
    struct mqd_delivery d[64];
    while (acknowledged < total && !test_failed) {
        struct mqd_record_columns columns = {.count = total - sent < 100 ? (uint32_t)(total - sent) : 100,
                                             .values = values,
                                             .fixed_value_bytes = 50,
                                             .partition = -1,
                                             .timestamp_ms = 5};
        int64_t taken = mqd_producer_append(producer, topic, &columns, NULL);
        CHECK_OR(taken >= 0, break);
        sent += (uint64_t)taken;
        CHECK_OR(mqd_producer_send(producer, test_now_ns() / 1000, sent == total) == 0, break);
        if (taken < (int64_t)columns.count || sent == total)
            CHECK_OR(mqd_client_wait(client, 10000000) == 1 || acknowledged == total, break);
        CHECK_OR(mqd_client_poll(client) == 0, break);
        for (uint32_t count; (count = mqd_producer_deliveries(producer, d, 64));)
            for (uint32_t i = 0; i < count; i++)
                acknowledged += d[i].record_count;
    }
    mqd_store_release(&serving.stop, 1);
    mqd_store_release(&waiting_stop, 1);
    mqd_client_wake(client);
    pthread_join(worker, NULL);
    pthread_join(waiter, NULL);
    CHECK_EQUAL(acknowledged, total);
    CHECK_EQUAL(serving.records, total);
    mqd_producer_close(producer);
    mqd_client_close(client);
    fake_close(&fake);
}
