/* Prints the values of a topic's records, one per line, from the beginning; waits for more without
 * polling. Reads mapped segment files: no record is copied before it is printed.
 *
 *   consume DATA_DIR/run/client.sock TOPIC [COUNT]
 *
 * With COUNT it ends after that many records. Order is kept within a partition. Compressed batches
 * are reported and skipped: a program can decompress them with a library of its choice (and parse
 * the records with mqd_segment_records).
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/reader.h"

#define VIEW_CAPACITY 512

static void fail(const char *message)
{
    fprintf(stderr, "%s: %s\n", message, mqd_error_message());
    exit(1);
}

/* Prints the records that one partition has now, at most records_max; returns their number. */
static uint64_t drain(struct mqd_segment_reader *reader, struct mqd_record_view *view, uint64_t records_max)
{
    struct mqd_read_state state;
    uint64_t printed_count = 0;
    do {
        if (mqd_segment_reader_next(reader, 1 << 20, 1, view, &state) < 0)
            fail("cannot read");
        for (uint32_t i = 0; i < view->count && printed_count < records_max; i++, printed_count++)
            printf("%.*s\n", view->value_bytes[i] > 0 ? view->value_bytes[i] : 0,
                   (const char *)view->base + view->value_positions[i]);
        if (state.stop == MQD_READ_COMPRESSED) {
            fprintf(stderr, "a batch compressed with codec %u at offset %" PRId64 " is skipped\n", state.codec,
                    mqd_segment_reader_position(reader));
            if (mqd_segment_reader_skip(reader) < 0)
                fail("cannot read");
        } else if (state.stop == MQD_READ_OUT_OF_RANGE) {
            /* older records have been deleted in the meantime */
            mqd_segment_reader_seek(reader, mqd_segment_reader_log_start(reader));
        } else if (state.stop == MQD_READ_CORRUPT || state.stop == MQD_READ_GONE) {
            fprintf(stderr, "offset %" PRId64 ": Kafka error %d %s\n", mqd_segment_reader_position(reader),
                    state.kafka_error, mqd_error_message());
            exit(1);
        }
    } while (state.stop != MQD_READ_END && printed_count < records_max);
    return printed_count;
}

static void view_open(struct mqd_record_view *view)
{
    *view = (struct mqd_record_view){.capacity = VIEW_CAPACITY,
                                     .offsets = calloc(VIEW_CAPACITY, 8),
                                     .timestamps_ms = calloc(VIEW_CAPACITY, 8),
                                     .key_positions = calloc(VIEW_CAPACITY, 8),
                                     .key_bytes = calloc(VIEW_CAPACITY, 4),
                                     .value_positions = calloc(VIEW_CAPACITY, 8),
                                     .value_bytes = calloc(VIEW_CAPACITY, 4),
                                     .header_positions = calloc(VIEW_CAPACITY, 8),
                                     .header_bytes = calloc(VIEW_CAPACITY, 4)};
}

static void view_close(struct mqd_record_view *view)
{
    void *const columns[] = {view->offsets,         view->timestamps_ms, view->key_positions,    view->key_bytes,
                             view->value_positions, view->value_bytes,   view->header_positions, view->header_bytes};
    for (size_t i = 0; i < sizeof columns / sizeof columns[0]; i++)
        free(columns[i]);
}

/* Sleeps until one of the partitions has new records, or for a minute. */
static void park(struct mqd_client *client, const struct mqd_client_topic *topic, struct mqd_segment_reader **readers,
                 uint32_t correlation_id)
{
    struct mqd_client_position *positions = calloc((size_t)topic->partition_count, sizeof *positions);
    const uint8_t *bytes;
    for (int32_t i = 0; i < topic->partition_count; i++) {
        memcpy(positions[i].topic_id, topic->topic_id, sizeof positions[i].topic_id);
        positions[i].partition_index = i;
        positions[i].offset = mqd_segment_reader_position(readers[i]);
    }
    if (mqd_client_park(client, positions, (uint32_t)topic->partition_count, 0, 60000, correlation_id) < 0)
        fail("lost the broker");
    free(positions);
    while (!mqd_client_response(client, &bytes))
        if (mqd_client_wait(client, -1) < 0 || mqd_client_poll(client) < 0)
            fail("lost the broker");
}

int main(int count, char **arguments)
{
    if (count < 3 || count > 4) {
        fprintf(stderr, "usage: consume DATA_DIR/run/client.sock TOPIC [COUNT]\n");
        return 2;
    }
    uint64_t records_left = count == 4 ? strtoull(arguments[3], NULL, 10) : UINT64_MAX;
    /* a consumer sends no batches: it asks for the least memory and uses all of it for requests */
    struct mqd_client_options options = {
        .socket_path = arguments[1], .client_id = "example-consume", .data_bytes = 65536, .request_bytes = 65536};
    struct mqd_client *client = mqd_client_open(&options);
    struct mqd_client_topic topic;
    if (!client)
        fail("cannot attach");
    if (mqd_client_find_topic(client, arguments[2], 1, 5000000, &topic) < 0)
        fail("cannot find the topic");
    if (topic.error) {
        fprintf(stderr, "topic %s: error %d\n", arguments[2], topic.error);
        return 1;
    }
    struct mqd_segment_reader **readers = calloc((size_t)topic.partition_count, sizeof *readers);
    struct mqd_record_view view;
    view_open(&view);
    for (int32_t i = 0; i < topic.partition_count; i++)
        if (!(readers[i] = mqd_segment_reader_open(client, topic.topic_id, i, 0, 0)))
            fail("cannot read the partition");
    for (uint32_t correlation_id = 2; records_left;) {
        uint64_t printed_count = 0;
        for (int32_t i = 0; i < topic.partition_count && printed_count < records_left; i++)
            printed_count += drain(readers[i], &view, records_left - printed_count);
        records_left -= printed_count;
        fflush(stdout);
        if (records_left && !printed_count)
            park(client, &topic, readers, correlation_id++);
    }
    for (int32_t i = 0; i < topic.partition_count; i++)
        mqd_segment_reader_close(readers[i]);
    free(readers);
    view_close(&view);
    mqd_client_close(client);
    return 0;
}
