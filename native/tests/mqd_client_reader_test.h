/* A partition's log in memory files, a control segment and the responses about both, as in a
 * broker: for the tests of the segment reader. */
#ifndef MQD_CLIENT_READER_TEST_H
#define MQD_CLIENT_READER_TEST_H

#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"
#include "client/reader_state.h"
#include "shm/layout.h"
#include "wire/record_scan.h"
#include <errno.h>

#include "mqd_test.h"

enum { LOG_SLOT = 7, LOG_SEGMENT_MAX = 64, LOG_MAP_BYTES = 1 << 20 };
static const uint8_t log_topic_id[16] = "the topic's id..";

struct log_segment {
    int64_t base_offset;
    int fd;
    uint32_t size_bytes;
};
struct log {
    void *control;
    struct mqd_positions positions;
    struct log_segment segments[LOG_SEGMENT_MAX];
    int segment_count;
    int64_t end_offset;
    int query_count;
    int fail_errno;  /* the next query fails */
    int16_t error;   /* of the next responses */
    bool skips_gaps; /* for an offset after a segment's last batch, the following segment is returned */
    bool changing;   /* a compaction is replacing files */
    bool heap;       /* sealed segments are in memory of exactly their size */
};

static void log_publish(struct log *log)
{
    mqd_slot_publish(mqd_control_partition(log->control, LOG_SLOT), &log->positions);
}

static void log_roll(struct log *log)
{
    log->segments[log->segment_count++] =
        (struct log_segment){log->end_offset, memfd_create("segment", MFD_CLOEXEC), 0};
}

static void *spare_control; /* megabytes: reused */

__attribute__((unused)) static void *control_take(void)
{
    static const uint8_t boot_id[16] = "boot";
    void *control = spare_control;
    spare_control = NULL;
    if (!control) {
        control = aligned_alloc(4096, (mqd_control_size_bytes() + 4095) / 4096 * 4096);
        memset(control, 0, mqd_control_size_bytes());
        mqd_control_format(control, mqd_control_size_bytes(), 1, boot_id, 1, 1);
    }
    mqd_slot_clear(control, LOG_SLOT);
    return control;
}

/* With another owner's control segment: closed with control = NULL. */
static void log_open_in(struct log *log, void *control)
{
    memset(log, 0, sizeof *log);
    log->control = control;
    mqd_slot_assign(log->control, LOG_SLOT, log_topic_id, 3, 0, 0, 0);
    mqd_slot_set_state(log->control, LOG_SLOT, MQD_SLOT_ONLINE);
    log_roll(log);
    log_publish(log);
}

__attribute__((unused)) static void log_open(struct log *log)
{
    log_open_in(log, control_take());
}

__attribute__((unused)) static void log_close(struct log *log)
{
    for (int i = 0; i < log->segment_count; i++)
        close(log->segments[i].fd);
    if (spare_control)
        free(log->control);
    else
        spare_control = log->control;
}

static void log_expose(struct log *log) /* everything appended becomes readable */
{
    struct log_segment *last = &log->segments[log->segment_count - 1];
    log->positions.high_watermark = log->positions.log_end_offset = log->positions.last_stable_offset = log->end_offset;
    log->positions.high_watermark_segment = last->base_offset;
    log->positions.high_watermark_position = last->size_bytes;
    log_publish(log);
}

/* Compaction has replaced a segment by a file without batches. Later records are appended to it,
 * from base_offset + `gap` on. Returns what log_replaced needs. */
__attribute__((unused)) static struct log log_replace(struct log *log, int number, int64_t gap)
{
    struct log rest = *log;
    log->segment_count = number + 1;
    log->segments[number].fd = memfd_create("compacted", MFD_CLOEXEC);
    log->segments[number].size_bytes = 0;
    log->end_offset = log->segments[number].base_offset + gap;
    return rest;
}

/* The new file is complete. */
__attribute__((unused)) static void log_replaced(struct log *log, const struct log *rest)
{
    int number = log->segment_count - 1;
    struct log_segment replaced = log->segments[number];
    close(rest->segments[number].fd);
    *log = *rest;
    log->segments[number] = replaced;
    mqd_control_partition(log->control, LOG_SLOT)->segments_generation++;
}

static uint32_t put_varlong(uint8_t *out, int64_t number)
{
    uint64_t value = (uint64_t)number << 1 ^ (uint64_t)(number >> 63);
    uint32_t count = 0;
    for (; value > 0x7f; value >>= 7)
        out[count++] = (uint8_t)(value | 0x80);
    out[count++] = (uint8_t)value;
    return count;
}

static uint32_t put_blob(uint8_t *out, const void *bytes, int32_t size)
{
    uint32_t at = put_varlong(out, size);
    if (size > 0)
        memcpy(out + at, bytes, (size_t)size);
    return at + (uint32_t)(size > 0 ? size : 0);
}

static uint32_t put_record(uint8_t *out, int32_t delta, int64_t timestamp_delta, const void *key, int32_t key_bytes,
                           const void *value, int32_t value_bytes)
{
    uint8_t body[70000];
    uint32_t at = 1;
    body[0] = 0;
    at += put_varlong(body + at, timestamp_delta);
    at += put_varlong(body + at, delta);
    at += put_blob(body + at, key, key_bytes);
    at += put_blob(body + at, value, value_bytes);
    body[at++] = 0;
    uint32_t head = put_varlong(out, at);
    memcpy(out + head, body, at);
    return head + at;
}

static void log_append_bytes(struct log *log, const uint8_t *bytes, uint32_t size_bytes)
{
    struct log_segment *last = &log->segments[log->segment_count - 1];
    if (pwrite(last->fd, bytes, size_bytes, last->size_bytes) != (ssize_t)size_bytes)
        abort();
    last->size_bytes += size_bytes;
}

/* A batch of `count` records at the log's end: "v<offset>" by "k<offset>", every fifth without key,
 * every seventh without value. Records in `holes` (bits) are compacted away. */
static void log_append(struct log *log, int32_t count, int attributes, int64_t producer_id, int32_t leader_epoch,
                       uint64_t holes)
{
    static uint8_t out[1 << 20];
    struct mqd_batch batch = {.base_offset = log->end_offset,
                              .partition_leader_epoch = leader_epoch,
                              .attributes = (int16_t)attributes,
                              .last_offset_delta = count - 1,
                              .base_timestamp_ms = 1000 + log->end_offset,
                              .max_timestamp_ms = 5000,
                              .producer_id = producer_id,
                              .base_sequence = -1};
    uint32_t at = MQD_BATCH_HEADER_BYTES;
    for (int32_t i = 0; i < count; i++) {
        char key[32], value[32];
        int64_t offset = log->end_offset + i;
        if (i < 64 && holes >> i & 1)
            continue;
        int key_bytes = sprintf(key, "k%" PRId64, offset), value_bytes = sprintf(value, "v%" PRId64, offset);
        at += put_record(out + at, i, i, key, offset % 5 ? key_bytes : -1, value, offset % 7 ? value_bytes : -1);
        batch.record_count++;
    }
    mqd_batch_put_header(out, &batch, out + MQD_BATCH_HEADER_BYTES, at - MQD_BATCH_HEADER_BYTES);
    log_append_bytes(log, out, at);
    log->end_offset += count;
}

__attribute__((unused)) static void log_append_marker(struct log *log, int64_t producer_id, bool commit)
{
    uint8_t out[200], key[4] = {0, 0, 0, commit}, value[6] = {0};
    struct mqd_batch batch = {.base_offset = log->end_offset,
                              .attributes = MQD_ATTRIBUTE_TRANSACTIONAL | MQD_ATTRIBUTE_CONTROL,
                              .producer_id = producer_id,
                              .base_sequence = -1,
                              .record_count = 1};
    uint32_t size = put_record(out + MQD_BATCH_HEADER_BYTES, 0, 0, key, 4, value, 6);
    mqd_batch_put_header(out, &batch, out + MQD_BATCH_HEADER_BYTES, size);
    log_append_bytes(log, out, MQD_BATCH_HEADER_BYTES + size);
    log->end_offset++;
}

/* The position of the batch that contains `offset`, or of the first after it, or the end. */
static uint32_t log_position(const struct log_segment *segment, uint32_t end, int64_t offset)
{
    uint8_t header[MQD_BATCH_HEADER_BYTES];
    struct mqd_batch batch;
    uint32_t at = 0;
    while (at < end && pread(segment->fd, header, sizeof header, at) == (ssize_t)sizeof header &&
           mqd_batch_decode(header, sizeof header, &batch) == 0 && batch.base_offset + batch.last_offset_delta < offset)
        at += (uint32_t)batch.size_bytes;
    return at < end ? at : end;
}

static int log_locate(void *context, const struct mqd_local_query *query, struct mqd_segment_mapping *current,
                      struct mqd_local_segment *answer, struct mqd_segment_mapping **mapping)
{
    struct log *log = context;
    int number = log->segment_count - 1;
    log->query_count++;
    if (log->fail_errno) {
        int code = log->fail_errno;
        log->fail_errno = 0;
        return mqd_error_set_static(code, "as the test wants it");
    }
    *answer =
        (struct mqd_local_segment){.kind = query->kind, .number = query->number, .error = log->error, .slot = LOG_SLOT};
    if (log->error)
        return 0;
    while (number > 0 && log->segments[number].base_offset > query->offset)
        number--;
    if (log->skips_gaps && number < log->segment_count - 1 &&
        log_position(&log->segments[number], log->segments[number].size_bytes, query->offset) ==
            log->segments[number].size_bytes)
        number++;
    const struct log_segment *segment = &log->segments[number];
    bool active = number == log->segment_count - 1;
    uint32_t end =
        active
            ? log->positions.high_watermark_segment == segment->base_offset ? log->positions.high_watermark_position : 0
            : segment->size_bytes;
    answer->base_offset = segment->base_offset;
    answer->segments_generation =
        log->changing ? MQD_LOCAL_CHANGING : mqd_control_partition(log->control, LOG_SLOT)->segments_generation;
    answer->next_base_offset = active ? INT64_MAX : log->segments[number + 1].base_offset;
    answer->position = log_position(segment, end, query->offset);
    answer->size_bytes = end;
    answer->map_bytes = LOG_MAP_BYTES;
    if (log->heap && !active) {
        uint8_t *bytes = malloc(end);
        if (pread(segment->fd, bytes, end, 0) != (ssize_t)end)
            abort();
        *mapping = mqd_mapping_of_memory(bytes, end);
        free(bytes);
        answer->map_bytes = end;
    } else if (current && mqd_mapping_is_of_fd(current, segment->fd, LOG_MAP_BYTES)) {
        *mapping = current;
    } else {
        *mapping = mqd_mapping_of_fd(segment->fd, LOG_MAP_BYTES);
    }
    return *mapping ? 0 : -1;
}

__attribute__((unused)) static struct mqd_segment_reader *log_reader(struct log *log, int64_t offset,
                                                                     int8_t isolation_level)
{
    struct mqd_segment_source source = {.context = log, .control = log->control, .locate = log_locate};
    return mqd_segment_reader_new(&source, log_topic_id, 3, offset, isolation_level);
}

/* ---- views ---- */

enum { VIEW_CAPACITY = 4096 };
struct test_view {
    struct mqd_record_view view;
    int64_t offsets[VIEW_CAPACITY], timestamps_ms[VIEW_CAPACITY];
    uint64_t key_positions[VIEW_CAPACITY], value_positions[VIEW_CAPACITY], header_positions[VIEW_CAPACITY];
    int32_t key_bytes[VIEW_CAPACITY], value_bytes[VIEW_CAPACITY], header_bytes[VIEW_CAPACITY];
};

static struct mqd_record_view *test_view(struct test_view *v, uint32_t capacity)
{
    v->view = (struct mqd_record_view){.capacity = capacity,
                                       .offsets = v->offsets,
                                       .timestamps_ms = v->timestamps_ms,
                                       .key_positions = v->key_positions,
                                       .key_bytes = v->key_bytes,
                                       .value_positions = v->value_positions,
                                       .value_bytes = v->value_bytes,
                                       .header_positions = v->header_positions,
                                       .header_bytes = v->header_bytes};
    return &v->view;
}

/* Whether record `i` is what log_append wrote at that offset. */
__attribute__((unused)) static bool view_is_right(const struct mqd_record_view *view, uint32_t i)
{
    char key[32], value[32];
    int64_t offset = view->offsets[i];
    int key_bytes = sprintf(key, "k%" PRId64, offset), value_bytes = sprintf(value, "v%" PRId64, offset);
    if (view->key_bytes[i] != (offset % 5 ? key_bytes : -1) ||
        view->value_bytes[i] != (offset % 7 ? value_bytes : -1) || view->header_bytes[i] != 1)
        return false;
    return (offset % 5 == 0 || memcmp(view->base + view->key_positions[i], key, (size_t)key_bytes) == 0) &&
           (offset % 7 == 0 || memcmp(view->base + view->value_positions[i], value, (size_t)value_bytes) == 0);
}

__attribute__((unused)) static uint32_t next(struct mqd_segment_reader *reader, struct test_view *v, uint32_t capacity,
                                             struct mqd_read_state *state)
{
    if (mqd_segment_reader_next(reader, 1u << 30, 1, test_view(v, capacity), state) < 0)
        return UINT32_MAX;
    return v->view.count;
}

/* Reads up to the first stop with a cause other than the caller's limits; checks each record.
 * Returns the count. */
__attribute__((unused)) static int64_t drain(struct mqd_segment_reader *reader, uint32_t capacity,
                                             struct mqd_read_state *state)
{
    static struct test_view v;
    int64_t count = 0, last = -1;
    for (;;) {
        if (next(reader, &v, capacity, state) == UINT32_MAX)
            return -1;
        for (uint32_t i = 0; i < v.view.count; i++) {
            CHECK_OR(v.offsets[i] > last && view_is_right(&v.view, i), return -2);
            last = v.offsets[i];
        }
        count += v.view.count;
        if (state->stop != MQD_READ_FULL && state->stop != MQD_READ_SEGMENT)
            return count;
    }
}

#endif
