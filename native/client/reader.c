/* Walks one partition's segment files for a local client. Interface: client/reader.h; invariants:
 * client/reader_state.h.
 *
 *   next:  read the slot -> (no mapping: query the segment of the position) -> batch by batch:
 *          decode, CRC, transactions, records into columns -> stop
 *
 * The active segment grows during the walk, up to the published high watermark; a sealed one ends
 * at its size, and the reader queries the next. The broker is also queried when the slot no longer
 * belongs to the partition: only the broker, not the slot, can report that a partition is gone.
 */
#include "client/reader_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "wire/record_scan.h" /* attribute bits */

#define KAFKA_OFFSET_OUT_OF_RANGE 1
#define KAFKA_CORRUPT_MESSAGE 2
#define CRC_END 21
#define SEGMENT_BYTES_MAX (1u << 31) /* positions in a segment are below this */
#define QUERY_COUNT_MAX 8            /* per read; then the read returns, because the caller may have other work */
#define STOP_NONE UINT32_MAX

struct mqd_segment_reader *mqd_segment_reader_new(const struct mqd_segment_source *source, const uint8_t topic_id[16],
                                                  int32_t partition_index, int64_t offset, int8_t isolation_level)
{
    struct mqd_segment_reader *reader = calloc(1, sizeof *reader);
    if (!reader || offset < 0) {
        free(reader);
        if (source->close)
            source->close(source->context);
        if (offset < 0)
            mqd_error_set(
                MQD_E_INVALID,
                "a reader cannot begin at offset %lld; ListOffsets returns the earliest and the latest offset",
                (long long)offset);
        else
            mqd_error_set_static(ENOMEM, "out of memory for a reader");
        return NULL;
    }
    reader->source = *source;
    memcpy(reader->topic_id, topic_id, 16);
    reader->partition_index = partition_index;
    reader->isolation_level = isolation_level;
    mqd_segment_reader_seek(reader, offset);
    return reader;
}

static void release_mapping(struct mqd_segment_reader *reader)
{
    mqd_mapping_release(reader->mapping);
    reader->mapping = NULL;
    reader->in_batch = reader->sealed = false;
    reader->checked_at = reader->decoded_at = MQD_NO_POSITION;
}

static void release_view(struct mqd_segment_reader *reader)
{
    mqd_mapping_release(reader->view_mapping);
    reader->view_mapping = NULL;
}

void mqd_segment_reader_close(struct mqd_segment_reader *reader)
{
    if (!reader)
        return;
    release_mapping(reader);
    release_view(reader);
    mqd_aborted_filter_free(&reader->aborted);
    if (reader->source.close)
        reader->source.close(reader->source.context);
    free(reader);
}

static void forget_aborted(struct mqd_segment_reader *reader)
{
    mqd_aborted_filter_free(&reader->aborted);
    reader->aborted.until_offset = 0;
}

void mqd_segment_reader_seek(struct mqd_segment_reader *reader, int64_t offset)
{
    release_mapping(reader);
    reader->position = offset < 0 ? 0 : offset;
    forget_aborted(reader);
}

void mqd_segment_reader_set_source(struct mqd_segment_reader *reader, const struct mqd_segment_source *source)
{
    if (reader->source.close)
        reader->source.close(reader->source.context);
    release_mapping(reader);
    if (reader->source.control || source->control)
        forget_aborted(reader); /* generations of two attachments cannot be compared */
    reader->slot_known = false;
    reader->source = *source;
}

int64_t mqd_segment_reader_position(const struct mqd_segment_reader *reader)
{
    return reader->position;
}

uint64_t mqd_segment_reader_hold(struct mqd_segment_reader *reader)
{
    if (!reader->view_mapping)
        return 0;
    mqd_mapping_hold(reader->view_mapping);
    return (uint64_t)(uintptr_t)reader->view_mapping;
}

void mqd_client_mapping_release(struct mqd_client *client, uint64_t mapping)
{
    (void)client;
    mqd_mapping_release((struct mqd_segment_mapping *)(uintptr_t)mapping);
}

static int enter(struct mqd_segment_reader *reader)
{
    return reader->source.enter ? reader->source.enter(reader->source.context) : 0;
}

static void leave(struct mqd_segment_reader *reader)
{
    if (reader->source.leave)
        reader->source.leave(reader->source.context);
}

/* ---- the readable range ---- */

struct bounds {
    int64_t end_offset; /* high watermark, or last stable offset */
    int64_t high_watermark_segment;
    uint32_t high_watermark_position;
};

static bool is_same_partition(const struct mqd_segment_reader *reader, const struct mqd_partition_view *view)
{
    return view->state != MQD_SLOT_FREE && view->state != MQD_SLOT_DELETING &&
           view->partition_index == reader->partition_index && memcmp(view->topic_id, reader->topic_id, 16) == 0;
}

static int64_t readable_end(const struct mqd_segment_reader *reader, const struct mqd_positions *positions)
{
    return reader->isolation_level && positions->last_stable_offset < positions->high_watermark
               ? positions->last_stable_offset
               : positions->high_watermark;
}

enum { SLOT_OURS, SLOT_UNKNOWN, SLOT_CHANGING };

static int read_slot(struct mqd_segment_reader *reader, struct mqd_partition_view *view)
{
    if (!reader->slot_known)
        return SLOT_UNKNOWN;
    if (mqd_slot_view(reader->source.control, reader->slot, view) < 0)
        return mqd_error_code() == MQD_E_STALE ? SLOT_CHANGING : SLOT_UNKNOWN;
    return is_same_partition(reader, view) ? SLOT_OURS : SLOT_UNKNOWN;
}

/* Whether the partition's files are unchanged since the query for aborted transactions (S5). */
static bool same_files_since_query(struct mqd_segment_reader *reader)
{
    struct mqd_partition_view view;
    if (!reader->source.control)
        return true;
    if (enter(reader) < 0)
        return false;
    bool same = read_slot(reader, &view) == SLOT_OURS && view.segments_generation == reader->aborted_generation;
    leave(reader);
    return same;
}

int mqd_segment_reader_set_aborted(struct mqd_segment_reader *reader, const int64_t *producer_ids,
                                   const int64_t *first_offsets, uint32_t count, int64_t until_offset)
{
    if (!same_files_since_query(reader)) {
        forget_aborted(reader);
        return 0;
    }
    return mqd_aborted_filter_set(&reader->aborted, producer_ids, first_offsets, count, until_offset);
}

/* Sets `bounds` and returns STOP_NONE, or returns why nothing can be read. */
static uint32_t find_bounds(struct mqd_segment_reader *reader, struct bounds *bounds, struct mqd_read_state *state)
{
    struct mqd_partition_view view;
    *bounds = (struct bounds){.end_offset = INT64_MAX, .high_watermark_segment = INT64_MAX};
    if (!reader->source.control)
        return STOP_NONE;
    int slot = read_slot(reader, &view);
    if (slot == SLOT_UNKNOWN) { /* the next step queries the broker, which reports the partition's state */
        release_mapping(reader);
        reader->slot_known = false;
        return STOP_NONE;
    }
    if (slot == SLOT_CHANGING || view.state != MQD_SLOT_ONLINE)
        return MQD_READ_END;
    if (reader->position < view.positions.log_start_offset || reader->position > view.positions.log_end_offset) {
        state->kafka_error = KAFKA_OFFSET_OUT_OF_RANGE;
        return MQD_READ_OUT_OF_RANGE;
    }
    reader->slot_generation = view.segments_generation;
    bounds->end_offset = readable_end(reader, &view.positions);
    bounds->high_watermark_segment = view.positions.high_watermark_segment;
    bounds->high_watermark_position = view.positions.high_watermark_position;
    return reader->position >= bounds->end_offset ? MQD_READ_END : STOP_NONE;
}

/* Returns the end of the readable bytes of the mapped segment (S1). Sets *rolled if the segment no
 * longer grows, but its final size is not known here. */
static uint32_t readable_bytes(const struct mqd_segment_reader *reader, const struct bounds *bounds, bool *rolled)
{
    *rolled = false;
    if (bounds->high_watermark_segment == reader->base_offset) {
        uint32_t limit = reader->sealed ? reader->size_bytes : reader->map_bytes;
        return bounds->high_watermark_position < limit ? bounds->high_watermark_position : limit;
    }
    if (bounds->high_watermark_segment < reader->base_offset)
        return 0;
    *rolled = !reader->sealed;
    return reader->size_bytes;
}

/* ---- querying the segment of the position ---- */

static int set_response_error(const char *problem)
{
    return mqd_error_set(MQD_E_CORRUPT, "the broker's response about a segment is invalid: %s", problem);
}

/* The base offset may be above the position: the records in between were compacted away. */
static int check_response(const struct mqd_segment_reader *reader, const struct mqd_local_segment *response)
{
    if (response->base_offset < 0)
        return set_response_error("its base offset");
    if (response->position > response->size_bytes || response->size_bytes > response->map_bytes ||
        response->map_bytes == 0 || response->map_bytes > SEGMENT_BYTES_MAX)
        return set_response_error("its sizes");
    if (response->next_base_offset != INT64_MAX && response->next_base_offset <= reader->position)
        return set_response_error("the next segment begins before the offset");
    return 0;
}

/* Returns 0, even if it sets state->stop, or -1 with the attachment's error. */
static int query_segment(struct mqd_segment_reader *reader, struct mqd_read_state *state)
{
    struct mqd_local_query query = {.kind = MQD_LOCAL_QUERY_SEGMENT,
                                    .number = ++reader->query_number,
                                    .partition_index = reader->partition_index,
                                    .offset = reader->position};
    struct mqd_local_segment response;
    struct mqd_segment_mapping *mapping = NULL;
    memcpy(query.topic_id, reader->topic_id, 16);
    if (reader->source.locate(reader->source.context, &query, reader->mapping, &response, &mapping) < 0)
        return -1;
    if (response.error) {
        release_mapping(reader);
        state->kafka_error = response.error;
        state->stop = response.error == KAFKA_OFFSET_OUT_OF_RANGE ? MQD_READ_OUT_OF_RANGE : MQD_READ_GONE;
        return 0;
    }
    if (mapping != reader->mapping) {
        release_mapping(reader);
        reader->mapping = mapping;
    }
    if (check_response(reader, &response) < 0) {
        release_mapping(reader);
        return -1;
    }
    reader->slot = response.slot;
    reader->slot_known = true;
    reader->sealed = response.next_base_offset != INT64_MAX || !reader->source.control;
    reader->file_generation = response.segments_generation;
    reader->base_offset = response.base_offset;
    reader->next_base_offset = response.next_base_offset;
    reader->size_bytes = response.size_bytes;
    reader->map_bytes = response.map_bytes;
    reader->at = response.position;
    reader->in_batch = false;
    reader->checked_at = reader->decoded_at = MQD_NO_POSITION;
    return 0;
}

/* ---- the walk ---- */

/* state of one read */
struct walk {
    struct mqd_segment_reader *reader;
    struct mqd_record_view *out;
    struct mqd_read_state *state;
    struct bounds bounds;
    uint64_t bytes_left; /* remaining part of bytes_max */
    bool check_crc;
    uint32_t query_count;
};

static uint32_t stop_corrupt(struct walk *walk, const char *reason)
{
    const struct mqd_segment_reader *reader = walk->reader;
    mqd_error_set(MQD_E_CORRUPT, "partition %d, segment %lld, byte %u: %s", reader->partition_index,
                  (long long)reader->base_offset, reader->at, reason);
    walk->state->kafka_error = KAFKA_CORRUPT_MESSAGE;
    return MQD_READ_CORRUPT;
}

static void skip_batch(struct mqd_segment_reader *reader)
{
    int64_t next = reader->batch.base_offset + reader->batch.last_offset_delta + 1;
    reader->at += (uint32_t)reader->batch.size_bytes;
    reader->position = next > reader->position ? next : reader->position;
    reader->in_batch = false;
    reader->checked_at = reader->decoded_at = MQD_NO_POSITION;
}

/* Decodes the header of the batch at `at`, and checks that the whole batch may be read. Returns
 * STOP_NONE or MQD_READ_CORRUPT. *failed: the file could not be read. */
static uint32_t batch_decode(struct walk *walk, uint32_t limit, bool *failed)
{
    struct mqd_segment_reader *reader = walk->reader;
    const uint8_t *bytes = reader->mapping->bytes + reader->at;
    if (reader->decoded_at == reader->at)
        return STOP_NONE;
    if (limit - reader->at < MQD_BATCH_HEADER_BYTES)
        return stop_corrupt(walk, "a record batch is cut off in its header");
    if ((*failed = mqd_mapping_populate(reader->mapping, reader->at, (uint64_t)reader->at + MQD_BATCH_HEADER_BYTES,
                                        limit) < 0))
        return STOP_NONE;
    if (mqd_batch_decode(bytes, limit - reader->at, &reader->batch) < 0)
        return stop_corrupt(walk, mqd_error_message());
    if ((uint32_t)reader->batch.size_bytes > limit - reader->at)
        return stop_corrupt(walk, "a record batch is longer than the readable part");
    if (reader->batch.base_offset < reader->base_offset)
        return stop_corrupt(walk, "a record batch begins before its segment");
    if ((*failed = mqd_mapping_populate(reader->mapping, reader->at,
                                        (uint64_t)reader->at + (uint32_t)reader->batch.size_bytes, limit) < 0))
        return STOP_NONE;
    reader->decoded_at = reader->at;
    return STOP_NONE;
}

/* Counts the current batch against bytes_max and moves to the next one. */
static uint32_t batch_done(struct walk *walk)
{
    uint32_t size_bytes = (uint32_t)walk->reader->batch.size_bytes;
    skip_batch(walk->reader);
    walk->bytes_left -= walk->bytes_left < size_bytes ? walk->bytes_left : size_bytes;
    return walk->bytes_left == 0 ? MQD_READ_FULL : STOP_NONE;
}

static bool has_same_kind(const struct mqd_record_view *out, const struct mqd_batch *batch)
{
    return out->leader_epoch == batch->partition_leader_epoch &&
           out->timestamp_type == (batch->attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME ? 1 : 0);
}

/* Called when the batch at `at` has been decoded: begins its records, or skips it. Returns
 * STOP_NONE, or why neither is possible. */
static uint32_t batch_begin(struct walk *walk)
{
    struct mqd_segment_reader *reader = walk->reader;
    struct mqd_record_view *out = walk->out;
    const struct mqd_batch *batch = &reader->batch;
    const uint8_t *bytes = reader->mapping->bytes + reader->at;
    /* happens only after a query: the broker may return the position of an earlier batch */
    if (batch->base_offset + batch->last_offset_delta < reader->position) {
        skip_batch(reader);
        return STOP_NONE;
    }
    if (batch->base_offset >= walk->bounds.end_offset)
        return MQD_READ_END;
    if (walk->check_crc && reader->checked_at != reader->at) {
        if (mqd_crc32c(0, bytes + CRC_END, (uint64_t)batch->size_bytes - CRC_END) != batch->crc)
            return stop_corrupt(walk, "the checksum of a record batch does not match its bytes");
        reader->checked_at = reader->at;
    }
    if (reader->isolation_level) {
        if (reader->source.control && reader->aborted_generation != reader->file_generation)
            forget_aborted(reader);
        enum mqd_aborted_verdict verdict = mqd_aborted_filter_classify(&reader->aborted, batch, bytes);
        if (verdict == MQD_BATCH_NEEDS_LIST)
            return MQD_READ_ABORTED;
        if (verdict == MQD_BATCH_SKIP)
            return batch_done(walk);
    }
    if (batch->attributes & MQD_ATTRIBUTE_CONTROL)
        return batch_done(walk);
    if (batch->attributes & MQD_ATTRIBUTE_COMPRESSION) {
        *walk->state = (struct mqd_read_state){.codec = (uint32_t)batch->attributes & MQD_ATTRIBUTE_COMPRESSION,
                                               .compressed_position = reader->at,
                                               .compressed_bytes = (uint32_t)batch->size_bytes};
        return MQD_READ_COMPRESSED;
    }
    if (out->count > 0 && !has_same_kind(out, batch))
        return MQD_READ_SEGMENT;
    if (out->count == out->capacity)
        return MQD_READ_FULL;
    out->leader_epoch = batch->partition_leader_epoch;
    out->timestamp_type = batch->attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME ? 1 : 0;
    mqd_batch_walk_begin(&reader->walk, batch, bytes + MQD_BATCH_HEADER_BYTES,
                         (uint32_t)batch->size_bytes - MQD_BATCH_HEADER_BYTES);
    reader->in_batch = true;
    return STOP_NONE;
}

/* Takes records of the current batch. */
static uint32_t batch_take(struct walk *walk)
{
    struct mqd_segment_reader *reader = walk->reader;
    struct mqd_record_view *out = walk->out;
    if (out->count > 0 && !has_same_kind(out, &reader->batch))
        return MQD_READ_SEGMENT;
    if (reader->walk.reason)
        return stop_corrupt(walk, reader->walk.reason);
    out->leader_epoch = reader->batch.partition_leader_epoch;
    out->timestamp_type = reader->batch.attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME ? 1 : 0;
    uint32_t before = out->count;
    int result = mqd_batch_walk_fill(&reader->walk, reader->position, out);
    if (out->count > before)
        reader->position = out->offsets[out->count - 1] + 1;
    if (result < 0)
        return stop_corrupt(walk, reader->walk.reason);
    if (reader->walk.records_left > 0)
        return MQD_READ_FULL;
    uint32_t stop = batch_done(walk);
    return out->count == out->capacity ? MQD_READ_FULL : stop;
}

/* Queries the segment of the position, or sets *stop if this read should return first. Returns -1
 * on failure. */
static int query_or_stop(struct walk *walk, uint32_t *stop)
{
    *stop = MQD_READ_SEGMENT;
    if (walk->out->count > 0 || walk->query_count++ == QUERY_COUNT_MAX)
        return 0;
    walk->state->stop = STOP_NONE;
    int result = query_segment(walk->reader, walk->state);
    *stop = walk->state->stop;
    if (result == 0 && *stop == STOP_NONE)
        *stop = find_bounds(walk->reader, &walk->bounds, walk->state);
    return result;
}

/* Called when all readable bytes of the mapping have been walked. */
static int handle_segment_end(struct walk *walk, bool rolled, uint32_t *stop)
{
    struct mqd_segment_reader *reader = walk->reader;
    *stop = MQD_READ_END;
    if (!reader->source.control || (!rolled && (!reader->sealed || reader->at < reader->size_bytes)))
        return 0;
    if (rolled) /* the segment stays mapped: if the response has the same file, no new mapping is needed */
        return query_or_stop(walk, stop);
    reader->position = reader->next_base_offset > reader->position ? reader->next_base_offset : reader->position;
    release_mapping(reader);
    return reader->position >= walk->bounds.end_offset ? 0 : query_or_stop(walk, stop);
}

/* Called before the aborted transactions are queried. They must belong to the version of the file
 * that is read (S5), so this maps the newest version. */
static int map_newest(struct walk *walk, uint32_t *stop)
{
    struct mqd_segment_reader *reader = walk->reader;
    if (!reader->source.control || reader->file_generation == reader->slot_generation) {
        reader->aborted_generation = reader->slot_generation;
        return 0;
    }
    int result = query_or_stop(walk, stop);
    if (result == 0 && *stop == STOP_NONE && reader->file_generation == MQD_LOCAL_CHANGING)
        *stop = MQD_READ_ABORTED; /* a list would not be accepted: the caller retries until the swap is over */
    return result;
}

/* Handles one batch, a part of it, or the step to the next segment. Returns -1 on failure. */
static int step(struct walk *walk, uint32_t *stop)
{
    struct mqd_segment_reader *reader = walk->reader;
    bool rolled, failed = false;
    if (reader->in_batch) {
        *stop = walk->out->count == walk->out->capacity ? MQD_READ_FULL : batch_take(walk);
        return 0;
    }
    if (!reader->mapping)
        return query_or_stop(walk, stop);
    uint32_t limit = readable_bytes(reader, &walk->bounds, &rolled);
    if (reader->at >= limit)
        return handle_segment_end(walk, rolled, stop);
    *stop = batch_decode(walk, limit, &failed);
    if (*stop == STOP_NONE && !failed)
        *stop = batch_begin(walk);
    if (*stop == MQD_READ_ABORTED && !failed)
        return map_newest(walk, stop);
    return failed ? -1 : 0;
}

static int run(struct walk *walk)
{
    struct mqd_segment_reader *reader = walk->reader;
    uint32_t stop = find_bounds(reader, &walk->bounds, walk->state);
    struct mqd_segment_mapping *mapping = NULL;
    while (stop == STOP_NONE) {
        mapping = reader->mapping;
        walk->out->base = mapping ? mapping->bytes : NULL;
        walk->out->base_bytes = mapping ? mapping->map_bytes : 0;
        uint32_t count = walk->out->count;
        if (mapping && mapping != reader->view_mapping) {
            release_view(reader);
            mqd_mapping_hold(mapping);
            reader->view_mapping = mapping;
        }
        if (step(walk, &stop) < 0) {
            if (count == 0)
                return -1;
            stop = MQD_READ_SEGMENT; /* returns the records decoded so far; the next call hits the error again */
        }
    }
    walk->state->stop = stop;
    return 0;
}

int mqd_segment_reader_next(struct mqd_segment_reader *reader, uint32_t bytes_max, int check_crc,
                            struct mqd_record_view *out, struct mqd_read_state *state)
{
    struct walk walk = {
        .reader = reader, .out = out, .state = state, .bytes_left = bytes_max ? bytes_max : 1, .check_crc = check_crc};
    *state = (struct mqd_read_state){0};
    out->count = 0;
    out->base = NULL;
    out->base_bytes = 0;
    release_view(reader);
    if (enter(reader) < 0)
        return -1;
    int result = run(&walk);
    leave(reader);
    return result;
}

int mqd_segment_reader_skip(struct mqd_segment_reader *reader)
{
    if (!reader->mapping || reader->decoded_at != reader->at)
        return mqd_error_set(MQD_E_INVALID, "there is no batch with a valid header at offset %lld to skip",
                             (long long)reader->position);
    skip_batch(reader);
    return 0;
}

int64_t mqd_segment_reader_lag_end(struct mqd_segment_reader *reader)
{
    struct mqd_partition_view view;
    int64_t end = -1;
    if (!reader->source.control || enter(reader) < 0)
        return -1;
    if (read_slot(reader, &view) == SLOT_OURS)
        end = readable_end(reader, &view.positions);
    leave(reader);
    return end;
}

int64_t mqd_segment_reader_log_start(struct mqd_segment_reader *reader)
{
    struct mqd_partition_view view;
    int64_t start = -1;
    if (!reader->source.control || enter(reader) < 0)
        return -1;
    if (read_slot(reader, &view) == SLOT_OURS)
        start = view.positions.log_start_offset;
    leave(reader);
    return start;
}
