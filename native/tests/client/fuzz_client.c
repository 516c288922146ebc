/* fuzz: -max_len=600 */
/* A local client with any bytes in the reply ring, as a worker that dies at any moment may leave
 * them: nothing is read outside the ring, nothing is reported twice, no memory is lost.
 *
 *   byte 0   bits 0-2 batches that are sent, bit 3 idempotent, bits 4-7 how large the pieces are in
 *            which the replies come
 *   rest     what the worker writes into the reply ring; correlation ids of the batches are
 *            0x40100000 + index; of the topic lookup 7
 */
#include <stdlib.h>
#include <string.h>

#include "client/internal.h"
#include "shm/layout.h"

enum { REPLY_BYTES = 256, DATA_BYTES = 64 << 10, REQUEST_BYTES = 16 << 10, SUBMISSIONS = 16 };

static void require(int condition)
{
    if (!condition)
        abort();
}

/* An attachment without a broker: memory of exactly the sizes it has, so that the sanitizer sees
 * one byte too many. */
static struct mqd_client *attach(void)
{
    struct mqd_client *client = calloc(1, sizeof *client);
    client->socket_fd = client->to_worker_fd = client->to_client_fd = client->wake_fd = -1;
    client->header = calloc(1, sizeof *client->header);
    client->submissions = calloc(SUBMISSIONS, sizeof *client->submissions);
    client->replies = calloc(1, REPLY_BYTES);
    client->data = calloc(1, DATA_BYTES);
    client->worker_slot = calloc(1, sizeof *client->worker_slot);
    client->submitted = calloc(SUBMISSIONS, sizeof *client->submitted);
    client->submission_count = SUBMISSIONS;
    client->reply_bytes = REPLY_BYTES;
    client->data_bytes = DATA_BYTES;
    client->request_bytes = REQUEST_BYTES;
    client->last_response = &client->first_response;
    return client;
}

static void detach(struct mqd_client *client)
{
    const uint8_t *bytes;
    while (mqd_client_response(client, &bytes))
        ;
    mqd_client_response(client, &bytes); /* frees the last one */
    free(client->arriving);
    free(client->header);
    free(client->submissions);
    free(client->replies);
    free(client->data);
    free((void *)(uintptr_t)client->worker_slot);
    free(client->submitted);
    free(client);
}

static uint32_t reported; /* one bit per batch: its outcome was reported and it was freed */

static void take_outcomes(struct mqd_producer *producer, const uint64_t *numbers, uint32_t count)
{
    struct mqd_delivery d;
    while (mqd_producer_deliveries(producer, &d, 1)) {
        uint32_t i = 0;
        while (i < count && numbers[i] != d.batch)
            i++;
        require(i < count && !(reported & 1u << i) && d.record_count == 1 && d.partition == (int32_t)(i % 2));
        if (d.error && d.error % 2) {
            require(mqd_producer_retry(producer, d.batch) == 0);
        } else {
            reported |= 1u << i;
            require(!d.error || mqd_producer_drop(producer, d.batch) == 0);
        }
    }
}

static void feed(struct mqd_client *client, struct mqd_producer *producer, const uint64_t *numbers, uint32_t count,
                 const uint8_t *data, size_t size, size_t piece)
{
    uint64_t tail = 0;
    for (size_t at = 0; at < size;) {
        size_t room = REPLY_BYTES - (size_t)(tail - client->header->reply_head),
               n = piece < size - at ? piece : size - at;
        n = n < room ? n : room;
        for (size_t i = 0; i < n; i++)
            client->replies[(tail + i) % REPLY_BYTES] = data[at + i];
        tail += n;
        at += n;
        client->header->reply_tail = tail;
        if (mqd_client_poll(client))
            return;
        require(client->header->reply_head == tail); /* all received data was consumed */
        take_outcomes(producer, numbers, count);
        client->header->submission_head = client->header->submission_tail;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    struct mqd_client *client = attach();
    bool idempotent = data[0] & 8;
    struct mqd_producer_options options = {.acks = -1,
                                           .producer_id = idempotent ? 1 : -1,
                                           .producer_epoch = idempotent ? 0 : -1,
                                           .batch_bytes = 200,
                                           .inflight_max = 4,
                                           .produce_version = 12};
    struct mqd_producer *producer = mqd_producer_open(client, &options);
    require(producer != NULL);
    uint64_t numbers[8], free_bytes = mqd_client_available_bytes(client);
    uint32_t count = data[0] & 7, left = 0;
    int32_t topic = mqd_producer_topic(producer, "t", 2, MQD_PARTITIONER_RANDOM);
    struct mqd_client_topic found;
    reported = 0;
    for (uint32_t i = 0; i < count; i++) {
        numbers[i] = (uint64_t)mqd_producer_put(producer, topic, (int32_t)(i % 2), data, 1, NULL, -1, NULL, 0, 1);
        mqd_producer_send(producer, 0, 1);
    }
    feed(client, producer, numbers, count, data + 1, size - 1, 1 + (size_t)(data[0] >> 4) * 17);
    mqd_client_find_topic(client, "t", 7, 0, &found);
    for (uint32_t i = 0; i < count; i++) {
        left += !(reported & 1u << i);
        mqd_producer_drop(producer, numbers[i]); /* refused for freed ones */
    }
    require(mqd_producer_outstanding_records(producer) == 0);
    require(left || mqd_client_available_bytes(client) == free_bytes);
    mqd_producer_close(producer);
    detach(client);
    return 0;
}
