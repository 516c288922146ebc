/* Sends each line of standard input as a record to a topic, through shared memory.
 *
 *   produce DATA_DIR/run/client.sock TOPIC
 *
 * Lines are distributed like librdkafka's records without keys: each batch goes to a random
 * partition. "KEY<tab>VALUE" lines go to the partition of their key. The exit status is 0 when
 * everything was acknowledged.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/client.h"

#define RETRY_COUNT_MAX 5 /* of all batches together */

struct program {
    struct mqd_client *client;
    struct mqd_producer *producer;
    int32_t topic;
    uint64_t written_count, lost_count; /* records */
    uint64_t retry_count;
};

static void fail(const char *message)
{
    fprintf(stderr, "%s: %s\n", message, mqd_error_message());
    exit(1);
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

/* Returns whether a retry may succeed: the leader is moving or unreachable (3, 5, 6, 13), the
 * request timed out (7), replicas lag (19, 20), or the leader's disk failed (56). */
static int is_retriable(int16_t error)
{
    return error == 3 || error == 5 || error == 6 || error == 7 || error == 13 || error == 19 || error == 20 ||
           error == 56;
}

/* Handles the outcomes that have arrived. */
static void take_outcomes(struct program *p)
{
    struct mqd_delivery deliveries[64];
    uint32_t count;
    if (mqd_client_poll(p->client) < 0)
        /* EPIPE: the broker's worker has exited. A program that must continue attaches again and
         * calls mqd_producer_move */
        fail("lost the broker");
    while ((count = mqd_producer_deliveries(p->producer, deliveries, 64)) > 0)
        for (uint32_t i = 0; i < count; i++) {
            struct mqd_delivery *d = &deliveries[i];
            if (d->error == 0) {
                p->written_count += d->record_count;
                printf("partition %d: %u records from offset %" PRId64 "\n", d->partition, d->record_count,
                       d->base_offset);
            } else if (is_retriable(d->error) && p->retry_count++ < RETRY_COUNT_MAX) {
                mqd_producer_retry(p->producer, d->batch); /* the batch keeps its place ahead of all later ones */
            } else {
                fprintf(stderr, "partition %d: %u records refused with error %d\n", d->partition, d->record_count,
                        d->error);
                p->lost_count += d->record_count;
                mqd_producer_drop(p->producer, d->batch);
            }
        }
}

static void append(struct program *p, char *line, size_t size)
{
    char *tab = memchr(line, '\t', size), *value = tab ? tab + 1 : line;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (;;) {
        int64_t number = mqd_producer_put(p->producer, p->topic, -1, (uint8_t *)value, (int32_t)(line + size - value),
                                          (uint8_t *)line, tab ? (int32_t)(tab - line) : -1, NULL, 0,
                                          now.tv_sec * 1000ll + now.tv_nsec / 1000000);
        if (number > 0)
            return;
        if (number < 0)
            fail("cannot queue a line");
        if (mqd_client_wait(p->client, -1) < 0) /* the buffer is full until the broker has answered */
            fail("lost the broker");
        take_outcomes(p);
    }
}

int main(int count, char **arguments)
{
    if (count != 3) {
        fprintf(stderr, "usage: produce DATA_DIR/run/client.sock TOPIC\n");
        return 2;
    }
    struct program p = {0};
    struct mqd_client_options client_options = {.socket_path = arguments[1], .client_id = "example-produce"};
    struct mqd_client_topic topic;
    if (!(p.client = mqd_client_open(&client_options)))
        fail("cannot attach");
    if (mqd_client_find_topic(p.client, arguments[2], 1, 5000000, &topic) < 0)
        fail("cannot find the topic");
    if (topic.error) {
        fprintf(stderr, "topic %s: error %d\n", arguments[2], topic.error);
        return 1;
    }
    struct mqd_producer_options options = {.acks = -1,
                                           .producer_id = -1,
                                           .producer_epoch = -1,
                                           .request_timeout_ms = 30000,
                                           .batch_bytes = 65536,
                                           .inflight_max = 5,
                                           .linger_us = 5000,
                                           .produce_version = 11};
    if (!(p.producer = mqd_producer_open(p.client, &options)))
        fail("cannot create the producer");
    if ((p.topic = mqd_producer_topic(p.producer, arguments[2], topic.partition_count,
                                      MQD_PARTITIONER_CONSISTENT_RANDOM)) < 0)
        fail("cannot produce to the topic");
    char *line = NULL;
    size_t capacity = 0;
    for (ssize_t size; (size = getline(&line, &capacity, stdin)) > 0;) {
        append(&p, line, (size_t)(line[size - 1] == '\n' ? size - 1 : size));
        if (mqd_producer_send(p.producer, now_us(), 0) < 0) /* batches whose linger time has passed */
            fail("lost the broker");
        take_outcomes(&p);
    }
    free(line);
    if (mqd_producer_send(p.producer, now_us(), 1) < 0) /* sends all remaining batches */
        fail("lost the broker");
    while (mqd_producer_outstanding_records(p.producer)) {
        if (mqd_client_wait(p.client, -1) < 0)
            fail("lost the broker");
        take_outcomes(&p);
    }
    printf("%" PRIu64 " records written, %" PRIu64 " lost\n", p.written_count, p.lost_count);
    mqd_producer_close(p.producer);
    mqd_client_close(p.client);
    return p.lost_count != 0;
}
