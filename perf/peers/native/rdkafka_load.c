/* Kafka-protocol load through librdkafka: the neutral client, the same for every broker that speaks
 * the protocol.
 *
 *   produce  at full speed: RECORDS or MILLISECONDS, whichever is reached first; READING=1: with a
 *            concurrent consumer, until it has the last record
 *   consume  from the beginning: RECORDS
 *   latency  open loop at RATE for MILLISECONDS after WARM_MILLISECONDS: due to acknowledged, and
 *            due to consumed by a second client in the same process
 *
 * librdkafka's defaults apply except for the arguments (linger_ms, acks, compression) and the settings
 * in consumer(). One producer, one consumer. Prints one JSON object. Exits 1 with a reason when a
 * record was refused or did not arrive.
 */
#define _GNU_SOURCE
#include "common.h"
#include "rdkafka_abi.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define CONSUME_BATCH 1000
#define STALL_NS ((int64_t)20 * 1000000000) /* gives up, with a reason, after this long without progress */
#define CONNECT_NS ((int64_t)300000000)     /* the consumer has connected and is waiting by then */
/* the sender sleeps at least this long: records that become due meanwhile are sent together */
#define OPEN_LOOP_SLICE_NS 100000

static const char *topic;
static int64_t record_bytes, partitions, warm_until_ns;
static _Atomic int64_t delivered, failed, last_delivery_ns;
static int first_error;
static struct samples acknowledged, consumed;
static bool measure_latency;

static void set(rd_kafka_conf_t *conf, const char *name, const char *value)
{
    char error[256];
    if (rd_kafka_conf_set(conf, name, value, error, sizeof error) != RD_KAFKA_CONF_OK)
        fail("%s=%s: %s", name, value, error);
}

static rd_kafka_t *make(int type, rd_kafka_conf_t *conf)
{
    char error[256];
    rd_kafka_t *rk = rd_kafka_new(type, conf, error, sizeof error);
    if (!rk)
        fail("cannot make a client: %s", error);
    return rk;
}

static rd_kafka_conf_t *common_conf(const struct arguments *arguments)
{
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", argument_text(arguments, "bootstrap", NULL));
    set(conf, "log_level", "3"); /* errors */
    return conf;
}

/* ---- producing ---- */

static void on_delivery(rd_kafka_t *rk, const rd_kafka_message_t *message, void *opaque)
{
    (void)rk, (void)opaque;
    int64_t now = now_ns();
    if (message->err) {
        if (!atomic_fetch_add(&failed, 1))
            first_error = message->err;
        return;
    }
    if (measure_latency) {
        int64_t due = (int64_t)(intptr_t)message->_private;
        if (due >= warm_until_ns)
            samples_add(&acknowledged, now - due);
    }
    atomic_store_explicit(&last_delivery_ns, now, memory_order_relaxed);
    atomic_fetch_add_explicit(&delivered, 1, memory_order_relaxed);
}

static rd_kafka_t *producer(const struct arguments *arguments, rd_kafka_topic_t **topic_handle)
{
    rd_kafka_conf_t *conf = common_conf(arguments);
    set(conf, "acks", argument_text(arguments, "acks", NULL));
    set(conf, "compression.type", argument_text(arguments, "compression", "none"));
    const char *linger = argument_text(arguments, "linger_ms", "");
    if (*linger)
        set(conf, "linger.ms", linger);
    rd_kafka_conf_set_dr_msg_cb(conf, on_delivery);
    rd_kafka_t *rk = make(RD_KAFKA_PRODUCER, conf);
    *topic_handle = rd_kafka_topic_new(rk, topic, NULL);
    if (!*topic_handle)
        fail("topic %s: %s", topic, rd_kafka_err2str(rd_kafka_last_error()));
    return rk;
}

static void refuse_failures(void)
{
    if (atomic_load(&failed))
        fail("%lld records were refused, the first with: %s", (long long)atomic_load(&failed),
             rd_kafka_err2str(first_error));
}

static void flush_all(rd_kafka_t *rk)
{
    if (rd_kafka_flush(rk, (int)(STALL_NS / 1000000)))
        fail("not acknowledged after %lld s: some of the records", (long long)(STALL_NS / 1000000000));
    refuse_failures();
}

static void produce_one(rd_kafka_t *rk, rd_kafka_topic_t *handle, int flags, void *record, void *opaque)
{
    while (rd_kafka_produce(handle, RD_KAFKA_PARTITION_UA, flags, record, (size_t)record_bytes, NULL, 0, opaque)) {
        int error = rd_kafka_last_error();
        if (error != RD_KAFKA_RESP_ERR__QUEUE_FULL)
            fail("produce: %s", rd_kafka_err2str(error));
        if (measure_latency) /* its own thread polls */
            sleep_until_ns(now_ns() + OPEN_LOOP_SLICE_NS);
        else
            rd_kafka_poll(rk, 5);
        refuse_failures();
    }
}

static int64_t records_in_topic(rd_kafka_t *rk)
{
    int64_t sum = 0;
    for (int32_t partition = 0; partition < partitions; partition++) {
        int64_t low, high;
        int error = rd_kafka_query_watermark_offsets(rk, topic, partition, &low, &high, 10000);
        if (error)
            fail("end of %s-%d: %s", topic, partition, rd_kafka_err2str(error));
        sum += high;
    }
    return sum;
}

/* With acks=0 there is no response: the time runs until the broker's offsets show all records. */
static void wait_stored(rd_kafka_t *rk, int64_t wanted)
{
    int64_t deadline = now_ns() + STALL_NS;
    while (records_in_topic(rk) < wanted) {
        if (now_ns() > deadline)
            fail("%lld of %lld records arrived: with acks=0 they may be lost, and were",
                 (long long)records_in_topic(rk), (long long)wanted);
        sleep_until_ns(now_ns() + 1000000);
    }
}

/* ---- consuming ---- */

static rd_kafka_t *consumer(const struct arguments *arguments, rd_kafka_queue_t **queue)
{
    rd_kafka_conf_t *conf = common_conf(arguments);
    set(conf, "group.id", "peers");
    set(conf, "enable.auto.commit", "false");
    set(conf, "auto.offset.reset", "earliest");
    /* 1000 by default: it would sleep that long whenever a broker filled its queue, and the sleep would
     * be measured */
    set(conf, "fetch.queue.backoff.ms", "10");
    rd_kafka_t *rk = make(RD_KAFKA_CONSUMER, conf);
    rd_kafka_poll_set_consumer(rk);
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new((int)partitions);
    for (int32_t partition = 0; partition < partitions; partition++) {
        rd_kafka_topic_partition_list_add(list, topic, partition);
        rd_kafka_topic_partition_list_set_offset(list, topic, partition, RD_KAFKA_OFFSET_BEGINNING);
    }
    int error = rd_kafka_assign(rk, list);
    if (error)
        fail("assign: %s", rd_kafka_err2str(error));
    *queue = rd_kafka_queue_get_consumer(rk);
    return rk;
}

/* A batch call waits until its batch is full or its time is over: so only the first record is waited
 * for, and records that have arrived by then are taken with it. */
static ssize_t take(rd_kafka_queue_t *queue, rd_kafka_message_t **messages)
{
    ssize_t first = rd_kafka_consume_batch_queue(queue, 100, messages, 1);
    if (first <= 0)
        return first;
    ssize_t more = rd_kafka_consume_batch_queue(queue, 0, messages + 1, CONSUME_BATCH - 1);
    return more > 0 ? more + 1 : 1;
}

/* wanted: may decrease while reading */
struct reading {
    rd_kafka_queue_t *queue;
    _Atomic int64_t wanted;
    int64_t last_ns;
};

/* Calls `each` for every record until `wanted` are read. Returns when the first arrived. */
static int64_t consume_until(struct reading *reading, void (*each)(const rd_kafka_message_t *, int64_t now))
{
    static rd_kafka_message_t *messages[CONSUME_BATCH];
    rd_kafka_queue_t *queue = reading->queue;
    int64_t read = 0, first = 0, last = now_ns(), wanted;
    while (read < (wanted = atomic_load(&reading->wanted))) {
        ssize_t count = take(queue, messages);
        int64_t now = now_ns();
        if (count <= 0 && now - last > STALL_NS)
            fail("%lld of %lld records could be read; then nothing came for %lld s", (long long)read, (long long)wanted,
                 (long long)(STALL_NS / 1000000000));
        for (ssize_t index = 0; index < count; index++) {
            if (messages[index]->err && messages[index]->err != RD_KAFKA_RESP_ERR__PARTITION_EOF)
                fail("consume: %s", rd_kafka_err2str(messages[index]->err));
            if (!messages[index]->err) {
                read++;
                if (each)
                    each(messages[index], now);
            }
            rd_kafka_message_destroy(messages[index]);
        }
        if (count > 0) {
            last = now;
            first = first ? first : now;
        }
    }
    reading->last_ns = last;
    return first;
}

static int consume_main(const struct arguments *arguments)
{
    int64_t records = argument_number(arguments, "records", INT64_MIN);
    struct reading reading = {.wanted = records};
    consumer(arguments, &reading.queue);
    double cpu = client_cpu_seconds();
    int64_t first = consume_until(&reading, NULL);
    printf("{\"records\": %lld, \"seconds\": %.6f, \"client_cpu_seconds\": %.3f}\n", (long long)records,
           (double)(reading.last_ns - first) / 1e9, client_cpu_seconds() - cpu);
    return 0;
}

/* ---- producing at full speed ---- */

static void on_consumed(const rd_kafka_message_t *message, int64_t now)
{
    int64_t due = message->len >= sizeof due ? stamp_read(message->payload) : 0;
    if (due >= warm_until_ns)
        samples_add(&consumed, now - due);
}

static void *read_all(void *reading_)
{
    prctl(PR_SET_NAME, "reading");
    consume_until(reading_, on_consumed);
    return NULL;
}

static int produce_main(const struct arguments *arguments)
{
    int64_t records = argument_number(arguments, "records", INT64_MAX);
    int64_t nanoseconds = argument_number(arguments, "milliseconds", INT64_MIN) * 1000000;
    bool unanswered = !strcmp(argument_text(arguments, "acks", NULL), "0");
    struct pool pool;
    pool_make(&pool);
    rd_kafka_topic_t *handle;
    rd_kafka_t *rk = producer(arguments, &handle);
    for (int64_t index = 0; index < partitions; index++) /* connections, metadata, the partitions' first segments */
        if (rd_kafka_produce(handle, (int32_t)index, 0, pool_next(&pool, (size_t)record_bytes), (size_t)record_bytes,
                             NULL, 0, NULL))
            fail("produce: %s", rd_kafka_err2str(rd_kafka_last_error()));
    flush_all(rk);
    int64_t warm = unanswered ? partitions : atomic_load(&delivered), sent = 0;
    if (unanswered)
        wait_stored(rk, warm);
    struct reading reading = {.wanted = INT64_MAX};
    pthread_t reader;
    bool reading_along = argument_number(arguments, "reading", 0);
    if (reading_along) {
        warm_until_ns = INT64_MAX;
        consumer(arguments, &reading.queue);
        sleep_until_ns(now_ns() + CONNECT_NS);
        if (pthread_create(&reader, NULL, read_all, &reading))
            fail("cannot make a thread");
    }
    double cpu = client_cpu_seconds();
    int64_t began = now_ns();
    for (; sent < records; sent++) {
        produce_one(rk, handle, 0, pool_next(&pool, (size_t)record_bytes), NULL);
        if (sent % 256 == 255) {
            rd_kafka_poll(rk, 0);
            if (now_ns() - began > nanoseconds) {
                sent++;
                break;
            }
        }
    }
    flush_all(rk);
    int64_t ended = atomic_load(&last_delivery_ns);
    if (unanswered) {
        wait_stored(rk, warm + sent);
        ended = now_ns();
    }
    if (reading_along) { /* the time runs until the last one is read */
        atomic_store(&reading.wanted, warm + sent);
        pthread_join(reader, NULL);
        ended = reading.last_ns > ended ? reading.last_ns : ended;
    }
    printf("{\"records\": %lld, \"stored\": %lld, \"seconds\": %.6f, \"client_cpu_seconds\": %.3f}\n", (long long)sent,
           (long long)(sent + warm), (double)(ended - began) / 1e9, client_cpu_seconds() - cpu);
    return 0;
}

/* ---- latency ---- */

static _Atomic bool polling = true;

static void *poll_deliveries(void *rk)
{
    prctl(PR_SET_NAME, "deliveries");
    while (atomic_load_explicit(&polling, memory_order_relaxed))
        rd_kafka_poll(rk, 50);
    return NULL;
}

static int latency_main(const struct arguments *arguments)
{
    int64_t rate = argument_number(arguments, "rate", INT64_MIN),
            milliseconds = argument_number(arguments, "milliseconds", INT64_MIN);
    int64_t warm_ms = argument_number(arguments, "warm_milliseconds", 1000);
    int64_t count = rate * (warm_ms + milliseconds) / 1000;
    if (rate <= 0 || count <= 0)
        fail("rate and milliseconds must be above 0");
    prctl(PR_SET_TIMERSLACK, 1000);
    struct pool pool;
    pool_make(&pool);
    samples_make(&acknowledged, (size_t)count);
    samples_make(&consumed, (size_t)count);
    struct samples late;
    samples_make(&late, (size_t)count);
    rd_kafka_topic_t *handle;
    rd_kafka_t *rk = producer(arguments, &handle);
    warm_until_ns = INT64_MAX; /* until the clock starts, nothing counts */
    for (int64_t index = 0; index < partitions; index++) {
        uint8_t *record = pool_next(&pool, (size_t)record_bytes);
        stamp_write(record, 0);
        if (rd_kafka_produce(handle, (int32_t)index, RD_KAFKA_MSG_F_COPY, record, (size_t)record_bytes, NULL, 0, NULL))
            fail("produce: %s", rd_kafka_err2str(rd_kafka_last_error()));
    }
    flush_all(rk);
    struct reading reading = {.wanted = count + partitions};
    consumer(arguments, &reading.queue);
    measure_latency = true;
    int64_t began = now_ns() + CONNECT_NS;
    warm_until_ns = began + warm_ms * 1000000;
    pthread_t deliveries, reader;
    if (pthread_create(&deliveries, NULL, poll_deliveries, rk) || pthread_create(&reader, NULL, read_all, &reading))
        fail("cannot make a thread");
    double cpu = client_cpu_seconds();
    for (int64_t sent = 0; sent < count; sent++) {
        int64_t due = began + (int64_t)((double)sent * 1e9 / (double)rate), now = now_ns();
        if (due > now) {
            sleep_until_ns(due > now + OPEN_LOOP_SLICE_NS ? due : now + OPEN_LOOP_SLICE_NS);
            now = now_ns();
            if (now < due) {
                sent--;
                continue;
            }
        }
        if (due >= warm_until_ns)
            samples_add(&late, now - due);
        uint8_t *record = pool_next(&pool, (size_t)record_bytes);
        stamp_write(record, due);
        produce_one(rk, handle, RD_KAFKA_MSG_F_COPY, record, (void *)(intptr_t)due);
    }
    int64_t ended = now_ns();
    flush_all(rk);
    pthread_join(reader, NULL);
    atomic_store(&polling, false);
    pthread_join(deliveries, NULL);
    refuse_failures();
    printf("{\"records\": %lld, \"rate\": %lld, \"seconds\": %.6f, \"reached\": %.1f, \"client_cpu_seconds\": %.3f, ",
           (long long)count, (long long)rate, (double)(now_ns() - began) / 1e9,
           (double)count / ((double)(ended - began) / 1e9), client_cpu_seconds() - cpu);
    samples_print("acknowledged", &acknowledged, ", ");
    samples_print("consumed", &consumed, ", ");
    samples_print("late", &late, "}\n");
    return 0;
}

int main(int count, char **words)
{
    struct arguments arguments = {.count = count - 2, .word = words + 2};
    if (count < 2)
        fail("rdkafka_load produce|consume|latency|version NAME=VALUE...");
    if (!strcmp(words[1], "version"))
        return printf("%s\n", rd_kafka_version_str()) < 0;
    topic = argument_text(&arguments, "topic", NULL);
    partitions = argument_number(&arguments, "partitions", 1);
    record_bytes = argument_number(&arguments, "record_bytes", 1024);
    if (record_bytes < 8 || record_bytes > (int64_t)RECORD_BYTES_MAX || partitions < 1)
        fail("record_bytes is 8 to %zu, partitions 1 or more", RECORD_BYTES_MAX);
    if (!strcmp(words[1], "produce"))
        return produce_main(&arguments);
    if (!strcmp(words[1], "consume"))
        return consume_main(&arguments);
    if (!strcmp(words[1], "latency"))
        return latency_main(&arguments);
    fail("rdkafka_load cannot %s", words[1]);
}
