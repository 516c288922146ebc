/* Load through shared memory, by the C client (native/client/client.h). Arguments are NAME=VALUE; one
 * JSON object is printed.
 *
 *   local produce socket topic record batch
 *       [partitions acks inflight data milliseconds count chunk linger]
 *       At full speed, until all records are acknowledged.
 *
 *   local latency socket topic record count [acks spin pause_us]
 *       One record at a time: from put to its acknowledgement.
 *
 *   local pace socket topic record rate
 *       [partitions acks batch linger inflight data milliseconds spin]
 *       Open loop: records are due at even intervals; latency runs from when a record was due,
 *       whether or not it could be sent.
 *
 * Bytes and microseconds. One thread, one attachment.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "client/client.h"
#include "base/error.h"

#define DELIVERIES 1024
#define CHUNK_MAX 65536
#define PENDING (1u << 16) /* batches of a paced load under way, a power of two */

struct arguments {
    int count;
    char **word;
};

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, mqd_error_message());
    exit(1);
}

static const char *text_of(const struct arguments *arguments, const char *name, const char *otherwise)
{
    size_t size = strlen(name);
    for (int i = 0; i < arguments->count; i++)
        if (!strncmp(arguments->word[i], name, size) && arguments->word[i][size] == '=')
            return arguments->word[i] + size + 1;
    if (!otherwise) {
        fprintf(stderr, "%s= is missing\n", name);
        exit(2);
    }
    return otherwise;
}

static int64_t number_of(const struct arguments *arguments, const char *name, int64_t otherwise)
{
    const char *text = text_of(arguments, name, otherwise == INT64_MIN ? NULL : "");
    char *end;
    long long number = strtoll(text, &end, 10);
    if (!*text)
        return otherwise;
    if (*end || number < 0) {
        fprintf(stderr, "%s=%s is not a number\n", name, text);
        exit(2);
    }
    return number;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static double cpu_seconds(void)
{
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    return (double)cpu.tv_sec + (double)cpu.tv_nsec / 1e9;
}

struct load {
    struct mqd_client *client;
    struct mqd_producer *producer;
    int32_t topic;
    uint64_t acknowledged, batches, errors;
    struct mqd_delivery delivery[DELIVERIES];
};

static void load_open(struct load *load, const struct arguments *arguments, int64_t batch, int64_t linger_us,
                      int64_t spin_us)
{
    struct mqd_client_options client = {
        .socket_path = text_of(arguments, "socket", NULL),
        .client_id = "perf-local",
        .timeout_ms = 5000,
        .data_bytes = (uint64_t)number_of(arguments, "data", 64 << 20),
        .spin_us = (uint32_t)spin_us,
    };
    struct mqd_producer_options producer = {
        .acks = (int16_t)number_of(arguments, "acks", 1),
        .producer_epoch = -1,
        .request_timeout_ms = 30000,
        .producer_id = -1,
        .batch_bytes = (uint32_t)batch,
        .inflight_max = (uint32_t)number_of(arguments, "inflight", 64),
        .linger_us = linger_us,
        .produce_version = 12,
    };
    *load = (struct load){.client = mqd_client_open(&client)};
    if (!load->client)
        fail("attach");
    if (!(load->producer = mqd_producer_open(load->client, &producer)))
        fail("producer");
    load->topic = mqd_producer_topic(load->producer, text_of(arguments, "topic", NULL),
                                     (int32_t)number_of(arguments, "partitions", 1), MQD_PARTITIONER_CONSISTENT_RANDOM);
    if (load->topic < 0)
        fail("topic");
}

/* Takes all deliveries and calls `on_delivery` for each. Returns how many batches. */
static uint32_t load_deliveries(struct load *load, void (*on_delivery)(void *context, const struct mqd_delivery *),
                                void *context)
{
    if (mqd_client_poll(load->client) < 0)
        fail("poll");
    uint32_t found = 0, count;
    while ((count = mqd_producer_deliveries(load->producer, load->delivery, DELIVERIES)) > 0) {
        for (uint32_t i = 0; i < count; i++) {
            if (load->delivery[i].error) {
                load->errors++;
                mqd_producer_drop(load->producer, load->delivery[i].batch);
            }
            load->acknowledged += load->delivery[i].record_count;
            if (on_delivery)
                on_delivery(context, &load->delivery[i]);
        }
        found += count;
    }
    load->batches += found;
    return found;
}

static void load_wait(struct load *load, int64_t timeout_us)
{
    if (mqd_client_wait(load->client, timeout_us) < 0)
        fail("wait");
}

static void load_close(struct load *load)
{
    mqd_producer_close(load->producer);
    mqd_client_close(load->client);
}

static uint8_t *values_make(int64_t record, int64_t count)
{
    uint8_t *values = malloc((size_t)(record * count));
    if (!values)
        exit(1);
    for (int64_t i = 0; i < record * count; i++) /* letters: neither all equal nor random */
        values[i] = (uint8_t)('A' + (i * 2654435761u >> 7) % 26);
    return values;
}

/* ---- at full speed ---- */

static int produce_main(const struct arguments *arguments)
{
    int64_t record = number_of(arguments, "record", INT64_MIN), batch = number_of(arguments, "batch", INT64_MIN),
            chunk = number_of(arguments, "chunk", 0);
    int64_t count_max = number_of(arguments, "count", INT64_MAX), partitions = number_of(arguments, "partitions", 1);
    if (!chunk)
        chunk = 4 * (batch / (record + 10) + 1);
    chunk = chunk < CHUNK_MAX ? chunk : CHUNK_MAX;
    struct load load;
    /* the end of a chunk is not the end of a batch */
    load_open(&load, arguments, batch, number_of(arguments, "linger", 1000), number_of(arguments, "spin", 50));
    uint8_t *values = values_make(record, chunk);
    int64_t begin = now_ns(), end = begin + number_of(arguments, "milliseconds", 10000) * 1000000;
    int64_t sent = 0;
    int32_t partition = 0;
    double cpu_before = cpu_seconds();
    while (sent < count_max && now_ns() < end) {
        int64_t wanted = chunk < count_max - sent ? chunk : count_max - sent;
        struct mqd_record_columns columns = {.count = (uint32_t)wanted,
                                             .values = values,
                                             .fixed_value_bytes = (int32_t)record,
                                             .partition = partition,
                                             .timestamp_ms = 1700000000000};
        int64_t taken = mqd_producer_append(load.producer, load.topic, &columns, NULL);
        if (taken < 0)
            fail("append");
        sent += taken;
        partition = (partition + 1) % (int32_t)partitions;
        if (mqd_producer_send(load.producer, now_ns() / 1000, 0) < 0)
            fail("send");
        if (!load_deliveries(&load, NULL, NULL) && taken < wanted)
            load_wait(&load, 1000000);
    }
    if (mqd_producer_send(load.producer, now_ns() / 1000, 1) < 0)
        fail("send");
    int64_t deadline = now_ns() + 60ll * 1000000000;
    while (mqd_producer_outstanding_records(load.producer) && now_ns() < deadline)
        if (!load_deliveries(&load, NULL, NULL))
            load_wait(&load, 1000000);
    double seconds = (double)(now_ns() - begin) / 1e9, cpu = cpu_seconds() - cpu_before;
    printf("{\"what\": \"local produce\", \"count\": %llu, \"bytes\": %llu, \"batches\": %llu, \"errors\": %llu, "
           "\"lost\": %lld, \"seconds\": %.6f, \"client_cpu_seconds\": %.6f, \"worker\": %u}\n",
           (unsigned long long)load.acknowledged, (unsigned long long)load.acknowledged * (unsigned long long)record,
           (unsigned long long)load.batches, (unsigned long long)load.errors,
           (long long)(sent - (int64_t)load.acknowledged), seconds, cpu, mqd_client_worker(load.client));
    load_close(&load);
    return load.errors || (uint64_t)sent != load.acknowledged;
}

/* ---- one at a time ---- */

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int latency_main(const struct arguments *arguments)
{
    int64_t record = number_of(arguments, "record", INT64_MIN), count = number_of(arguments, "count", INT64_MIN),
            pause_us = number_of(arguments, "pause_us", 0);
    int64_t warm = count / 10 + 10;
    struct load load;
    load_open(&load, arguments, 16384, 0, number_of(arguments, "spin", 1000));
    uint8_t *value = values_make(record, 1);
    int64_t *took = malloc(sizeof *took * (size_t)count);
    double cpu_before = cpu_seconds();
    int64_t begin_all = now_ns();
    for (int64_t i = -warm; i < count; i++) {
        int64_t begin = now_ns();
        if (mqd_producer_put(load.producer, load.topic, 0, value, (int32_t)record, NULL, -1, NULL, 0, 1700000000000) <=
                0 ||
            mqd_producer_send(load.producer, begin / 1000, 1) < 0)
            fail("put");
        while (!load_deliveries(&load, NULL, NULL))
            load_wait(&load, 5000000);
        int64_t end = now_ns();
        if (i >= 0)
            took[i] = end - begin;
        while (pause_us && now_ns() < end + pause_us * 1000)
            ;
    }
    double seconds = (double)(now_ns() - begin_all) / 1e9, cpu = cpu_seconds() - cpu_before;
    qsort(took, (size_t)count, sizeof *took, by_value);
    printf("{\"what\": \"local latency\", \"count\": %lld, \"errors\": %llu, \"p50_us\": %.2f, \"p90_us\": %.2f, "
           "\"p99_us\": %.2f, \"p999_us\": %.2f, \"max_us\": %.2f, \"seconds\": %.6f, \"client_cpu_seconds\": %.6f}\n",
           (long long)count, (unsigned long long)load.errors, (double)took[count / 2] / 1e3,
           (double)took[count * 90 / 100] / 1e3, (double)took[count * 99 / 100] / 1e3,
           (double)took[count * 999 / 1000] / 1e3, (double)took[count - 1] / 1e3, seconds, cpu);
    load_close(&load);
    return load.errors != 0;
}

/* ---- at a pace ---- */

struct weighted_sample {
    int64_t ns;
    uint32_t records;
};
struct pace {
    struct {
        uint64_t batch;
        int64_t due_ns;
    } pending[PENDING]; /* by batch number; when its oldest record was due */
    struct weighted_sample *took;
    uint64_t took_count, took_capacity;
};

static void pace_on_delivery(void *context, const struct mqd_delivery *delivery)
{
    struct pace *pace = context;
    uint64_t at = delivery->batch & (PENDING - 1);
    if (pace->pending[at].batch != delivery->batch) {
        fprintf(stderr, "an acknowledgement of batch %llu, which was not sent\n", (unsigned long long)delivery->batch);
        exit(1);
    }
    if (pace->took_count == pace->took_capacity) {
        pace->took_capacity = pace->took_capacity ? 2 * pace->took_capacity : 1 << 16;
        if (!(pace->took = realloc(pace->took, sizeof *pace->took * pace->took_capacity)))
            exit(1);
    }
    /* every record of the batch counts with the age of its oldest */
    pace->took[pace->took_count++] =
        (struct weighted_sample){now_ns() - pace->pending[at].due_ns, delivery->record_count};
}

static int by_ns(const void *a, const void *b)
{
    int64_t x = ((const struct weighted_sample *)a)->ns, y = ((const struct weighted_sample *)b)->ns;
    return (x > y) - (x < y);
}

static double pace_quantile(const struct pace *pace, uint64_t records, double share)
{
    uint64_t seen = 0;
    for (uint64_t i = 0; i < pace->took_count; i++)
        if ((double)(seen += pace->took[i].records) >= share * (double)records)
            return (double)pace->took[i].ns / 1e3;
    return 0;
}

static int pace_main(const struct arguments *arguments)
{
    int64_t record = number_of(arguments, "record", INT64_MIN), rate = number_of(arguments, "rate", INT64_MIN),
            partitions = number_of(arguments, "partitions", 1);
    int64_t milliseconds = number_of(arguments, "milliseconds", 5000), total = rate * milliseconds / 1000, sent = 0,
            behind_most = 0, full = 0;
    struct load load;
    load_open(&load, arguments, number_of(arguments, "batch", 65536), number_of(arguments, "linger", 200),
              number_of(arguments, "spin", 0));
    struct pace *pace = calloc(1, sizeof *pace);
    uint8_t *values = values_make(record, 1024);
    uint64_t *batch_of = malloc(sizeof *batch_of * 1024);
    int32_t partition = 0;
    double cpu_before = cpu_seconds();
    int64_t begin = now_ns();
    while (sent < total) {
        int64_t now = now_ns(), due = (int64_t)((double)(now - begin) * (double)rate / 1e9);
        due = due < total ? due : total;
        if (due > sent) {
            int64_t wanted = due - sent < 1024 ? due - sent : 1024;
            struct mqd_record_columns columns = {.count = (uint32_t)wanted,
                                                 .values = values,
                                                 .fixed_value_bytes = (int32_t)record,
                                                 .partition = partition,
                                                 .timestamp_ms = 1700000000000};
            int64_t taken = mqd_producer_append(load.producer, load.topic, &columns, batch_of);
            if (taken < 0)
                fail("append");
            for (int64_t i = 0; i < taken; i++) {
                uint64_t at = batch_of[i] & (PENDING - 1);
                if (pace->pending[at].batch != batch_of[i]) {
                    pace->pending[at].batch = batch_of[i];
                    pace->pending[at].due_ns = begin + (int64_t)((double)(sent + i) * 1e9 / (double)rate);
                }
            }
            sent += taken;
            full += taken < wanted;
            behind_most = due - sent > behind_most ? due - sent : behind_most;
            if (taken == wanted && wanted < 1024)
                partition = (partition + 1) % (int32_t)partitions;
        }
        if (mqd_producer_send(load.producer, now / 1000, 0) < 0)
            fail("send");
        if (!load_deliveries(&load, pace_on_delivery, pace))
            load_wait(&load, 100); /* at 800,000 a second 80 records become due meanwhile */
    }
    if (mqd_producer_send(load.producer, now_ns() / 1000, 1) < 0)
        fail("send");
    int64_t deadline = now_ns() + 60ll * 1000000000;
    while (mqd_producer_outstanding_records(load.producer) && now_ns() < deadline)
        if (!load_deliveries(&load, pace_on_delivery, pace))
            load_wait(&load, 1000000);
    double seconds = (double)(now_ns() - begin) / 1e9, cpu = cpu_seconds() - cpu_before;
    qsort(pace->took, pace->took_count, sizeof *pace->took, by_ns);
    uint64_t records = load.acknowledged;
    printf("{\"what\": \"local pace\", \"count\": %llu, \"batches\": %llu, \"errors\": %llu, \"behind_most\": %lld, "
           "\"full\": %lld, \"p50_us\": %.1f, \"p99_us\": %.1f, \"p999_us\": %.1f, "
           "\"max_us\": %.1f, \"seconds\": %.6f, \"client_cpu_seconds\": %.6f}\n",
           (unsigned long long)records, (unsigned long long)load.batches, (unsigned long long)load.errors,
           (long long)behind_most, (long long)full, pace_quantile(pace, records, 0.5),
           pace_quantile(pace, records, 0.99), pace_quantile(pace, records, 0.999),
           pace->took_count ? (double)pace->took[pace->took_count - 1].ns / 1e3 : 0.0, seconds, cpu);
    load_close(&load);
    return load.errors || (int64_t)records != total;
}

int main(int count, char **words)
{
    struct arguments arguments = {count - 2, words + 2};
    if (count >= 2 && !strcmp(words[1], "produce"))
        return produce_main(&arguments);
    if (count >= 2 && !strcmp(words[1], "latency"))
        return latency_main(&arguments);
    if (count >= 2 && !strcmp(words[1], "pace"))
        return pace_main(&arguments);
    fprintf(stderr, "local produce, latency or pace; see the head of perf/native/local/local_load.c\n");
    return 2;
}
