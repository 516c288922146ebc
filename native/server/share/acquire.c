/* Acquires records at the owner: finds the batches from the first offset that may be acquired, as
 * Fetch finds them, and passes them to the share-partition's state (struct mqd_share). See
 * server/share/share.h.
 *
 * Only headers of batches are read here, from pages that are in memory; cold pages are read ahead,
 * and requests that wait for the slot are woken when the pages are in memory. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/share/share.h"
#include "wire/record_scan.h"

#define RANGE_BYTES_MAX (4u << 20) /* searched by one acquisition */
#define LARGE_BATCH_BYTES 4096     /* after a batch of at least this size, the next header is read alone */
/* after this many ranges in which all records were skipped, other jobs are served */
#define ROUNDS_MAX 8

/* one search for records to acquire */
struct search {
    struct mqd_reactor *r;
    struct mqd_share_owned *owned;
    const struct mqd_share_owner_request *request;
    uint32_t slot;
    int64_t from_offset; /* the one that mqd_share_next_offset returned */
    struct mqd_positions positions;
    struct mqd_range range;
    struct mqd_aborted_list aborted;
    struct mqd_share_batch *batches; /* of the range */
    uint32_t *batch_positions;       /* the position of each batch, and the end of the last */
    uint32_t batch_count;
};

static void end_search(struct search *s)
{
    if (s->range.segment)
        mqd_range_release(s->r->reader, &s->range);
    free(s->aborted.entries);
    s->aborted = (struct mqd_aborted_list){NULL, 0, 0};
}

/* The reader finds the log's files by this path. */
static void ensure_log_path(struct search *s)
{
    const struct mqd_topic *topic = mqd_topics_find_by_id(&s->r->topics, s->owned->partition.id.topic_id);
    if (topic)
        mqd_fetch_ensure_path(s->r, topic, s->owned->partition.id.partition_index, s->slot);
}

/* Sets s->range to whole batches, beginning with the one that holds s->from_offset; size_bytes is 0
 * if there is nothing to read. Returns what mqd_reader_find returns, or -1 if the segments have
 * changed. */
static int16_t find_once(struct search *s, uint64_t generation, uint32_t size_max)
{
    struct mqd_reader *reader = s->r->reader;
    struct mqd_positions readable = s->positions;
    struct mqd_cursor *cursor = &s->owned->cursor;
    bool read_committed = s->owned->partition.settings.read_committed;
    int64_t end = read_committed ? s->positions.last_stable_offset : s->positions.high_watermark;
    if (s->from_offset >= end)
        return 0;
    int16_t code = mqd_reader_limit_positions(reader, s->slot, generation, end, &readable);
    if (!code)
        code =
            mqd_reader_find(reader, s->slot, &readable, generation, s->from_offset, size_max, true, cursor, &s->range);
    if (code || !read_committed || !s->range.size_bytes)
        return code;
    if (mqd_reader_is_swapping(reader, s->slot)) { /* returns nothing now; the end of the swap wakes the slot */
        cursor->valid = false;
        end_search(s);
        return 0;
    }
    code = mqd_reader_find_aborted(reader, s->slot, &s->positions, generation, s->from_offset, s->owned->cursor.offset,
                                   &s->aborted);
    if (!code &&
        mqd_load_acquire(&mqd_control_partition(s->r->options.control, s->slot)->segments_generation) == generation)
        return 0;
    end_search(s);
    return code ? code : -1;
}

static int16_t find(struct search *s)
{
    struct mqd_partition_slot *shared = mqd_control_partition(s->r->options.control, s->slot);
    uint32_t size_max = s->request->bytes_max < RANGE_BYTES_MAX ? s->request->bytes_max : RANGE_BYTES_MAX;
    int16_t code = -1;
    ensure_log_path(s);
    for (int tries = 0; tries < 4 && code == -1; tries++) {
        uint64_t generation = mqd_load_acquire(&shared->segments_generation);
        mqd_slot_positions(shared, &s->positions);
        code = find_once(s, generation, size_max);
    }
    return code == -1 ? 0 : code; /* the segments keep changing: returns nothing now */
}

/* Returns whether the pages of the range are in memory. If not, starts to read them ahead, unless a
 * read-ahead is already running. */
static bool ensure_in_memory(struct search *s)
{
    struct mqd_reactor *r = s->r;
    if (mqd_range_just_written(r->reader, s->slot, &s->positions, &s->range) || mqd_range_cached(&s->range))
        return true;
    /* if the kernel cannot report what is in memory, a range that was read ahead is assumed to be
     * in memory */
    if (s->owned->completed_read_ahead_id == s->from_offset + 1)
        return true;
    if (s->owned->read_ahead_running)
        return false;
    if (mqd_poll_read_ahead(r->poll, mqd_segment_ref_fd(s->range.segment), s->range.position, s->range.size_bytes,
                            mqd_token(MQD_TOKEN_SHARE, s->owned->index)) < 0)
        return true; /* too many file operations: this thread waits for the disk itself */
    s->owned->read_ahead_running = 1;
    s->owned->running_read_ahead_id = s->from_offset + 1;
    mqd_stat(r, MQD_COUNT_FETCH_COLD, 1);
    return false;
}

void mqd_share_on_read_ahead(struct mqd_reactor *r, uint64_t index)
{
    struct mqd_shares *shares = r->shares;
    bool is_key_read = index & MQD_SHARE_TOKEN_KEYS;
    index &= ~MQD_SHARE_TOKEN_KEYS;
    if (!shares || index >= shares->owned_capacity || !shares->owned[index])
        return;
    if (is_key_read) {
        shares->owned[index]->reading_keys = 0;
    } else {
        shares->owned[index]->read_ahead_running = 0;
        shares->owned[index]->completed_read_ahead_id = shares->owned[index]->running_read_ahead_id;
    }
    mqd_owner_wake_slot(r, shares->owned[index]->slot);
}

/* ---- batches ---- */

static bool is_aborted(const struct search *s, const struct mqd_batch *batch)
{
    for (uint32_t i = 0; i < s->aborted.count; i++) {
        const struct mqd_aborted *transaction = &s->aborted.entries[i];
        if (transaction->producer_id == batch->producer_id && batch->base_offset >= transaction->first_offset &&
            batch->base_offset <= transaction->last_offset)
            return true;
    }
    return false;
}

static void add_batch(struct search *s, const struct mqd_batch *batch, uint32_t position)
{
    bool is_control = batch->attributes & MQD_ATTRIBUTE_CONTROL,
         is_transactional = batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL;
    s->batch_positions[s->batch_count] = position;
    s->batches[s->batch_count++] =
        (struct mqd_share_batch){.first = batch->base_offset,
                                 .last = batch->base_offset + batch->last_offset_delta,
                                 .skipped = is_control || (is_transactional && is_aborted(s, batch))};
    s->batch_positions[s->batch_count] = position + (uint32_t)batch->size_bytes;
}

/* Reads the headers of the range's batches up to mqd_share_read_until, but at least one header.
 * Returns false if the file cannot be read, or is damaged. */
static bool read_headers(struct search *s)
{
    uint8_t *chunk = s->r->shares->chunk;
    int fd = mqd_segment_ref_fd(s->range.segment);
    uint64_t at = s->range.position, end = at + s->range.size_bytes, chunk_at = 0, chunk_end = 0;
    int64_t read_until = mqd_share_read_until(&s->owned->partition.state, s->request->records_max);
    uint32_t last_bytes = 0;
    struct mqd_batch batch;
    s->batch_count = 0;
    while (at + MQD_BATCH_HEADER_BYTES <= end && s->batch_count < MQD_SHARE_BATCHES_PER_RANGE &&
           (!s->batch_count || s->batches[s->batch_count - 1].last + 1 < read_until)) {
        if (at < chunk_at || at + MQD_BATCH_HEADER_BYTES > chunk_end) {
            uint64_t chunk_bytes =
                last_bytes && last_bytes < LARGE_BATCH_BYTES ? MQD_SHARE_CHUNK_BYTES : MQD_BATCH_HEADER_BYTES;
            ssize_t n = pread(fd, chunk, chunk_bytes < end - at ? chunk_bytes : end - at, (off_t)at);
            if (n < MQD_BATCH_HEADER_BYTES)
                return false;
            chunk_at = at;
            chunk_end = at + (uint64_t)n;
        }
        if (mqd_batch_decode(chunk + (at - chunk_at), MQD_BATCH_HEADER_BYTES, &batch) < 0 ||
            (uint64_t)batch.size_bytes > end - at ||
            (s->batch_count && batch.base_offset <= s->batches[s->batch_count - 1].last))
            return false;
        if (s->batch_count && batch.base_offset >= read_until)
            break;
        add_batch(s, &batch, (uint32_t)at);
        last_bytes = (uint32_t)batch.size_bytes;
        at += last_bytes;
    }
    return s->batch_count > 0;
}

/* ---- acquiring ---- */

static uint32_t batch_of(const struct search *s, int64_t offset)
{
    uint32_t index = 0;
    while (index + 1 < s->batch_count && s->batches[index].last < offset)
        index++;
    return index;
}

static void send_runs(struct search *s, uint32_t worker, const struct mqd_share_run *runs, uint32_t count,
                      struct mqd_descriptor *response)
{
    uint32_t first = batch_of(s, runs[0].first), last = batch_of(s, runs[count - 1].last);
    for (uint32_t i = 0; i < count; i++) {
        struct mqd_descriptor run = {.kind = MQD_LINK_SHARE_RESPONSE,
                                     .flags = MQD_SHARED_RUN,
                                     .token = response->token,
                                     .a = runs[i].first,
                                     .b = runs[i].last,
                                     .c = runs[i].count};
        mqd_share_respond(s->r, worker, &run);
    }
    /* the log may start within the batch: reading begins at an offset that the log has */
    response->a = runs[0].first > s->batches[first].first ? runs[0].first : s->batches[first].first;
    response->b = s->batches[last].last + 1;
    response->size_bytes = s->batch_positions[last + 1] - s->batch_positions[first];
}

/* Acquires from one range, for a job of `worker`. Returns whether the next range may be searched. */
static bool acquire_range(struct search *s, uint32_t worker, struct mqd_descriptor *response)
{
    struct mqd_share *state = &s->owned->partition.state;
    const struct mqd_share_owner_request *request = s->request;
    struct mqd_share_run runs[MQD_SHARE_RUNS_PER_PART];
    struct mqd_share_acquisition acquisition = {.member = request->member,
                                                .now_ms = s->r->now_ms,
                                                .records_max = request->records_max,
                                                .strict = request->strict};
    if (!ensure_in_memory(s))
        return false;
    errno = 0; /* stays 0 if the bytes can be read, but are not batches */
    if (!read_headers(s)) {
        mqd_log(s->r, 4, 0, s->slot, "a share group cannot read its records at offset %lld: %s",
                (long long)s->from_offset, errno ? strerror(errno) : "a batch is damaged");
        response->error = MQD_KAFKA_CORRUPT_MESSAGE;
        return false;
    }
    response->error = mqd_share_keys_read(s->r, s->owned, mqd_segment_ref_fd(s->range.segment), s->batches,
                                          s->batch_positions, s->batch_count);
    uint32_t count = response->error ? 0
                                     : mqd_share_acquire(state, &acquisition, s->from_offset, s->batches,
                                                         s->batch_count, runs, MQD_SHARE_RUNS_PER_PART);
    mqd_share_keys_done(s->r->shares);
    if (response->error) {
        mqd_log(s->r, 4, 0, s->slot, "a share group with share.fifo cannot read keys from offset %lld on: error %d",
                (long long)s->from_offset, response->error);
        return false;
    }
    if (count)
        send_runs(s, worker, runs, count, response);
    return count == 0 && !state->pool_exhausted && mqd_share_next_offset(state) > s->from_offset;
}

static int16_t response_error_of(int16_t code)
{
    /* the log's start or end has moved since the positions were read */
    return code == MQD_KAFKA_OFFSET_OUT_OF_RANGE ? 0 : code;
}

void mqd_share_acquire_now(struct mqd_reactor *r, struct mqd_share_owned *owned,
                           const struct mqd_share_owner_request *request, uint32_t worker,
                           struct mqd_descriptor *response)
{
    struct mqd_share *state = &owned->partition.state;
    struct search s = {.r = r, .owned = owned, .request = request, .slot = owned->slot};
    s.batches = r->shares->batches;
    s.batch_positions = r->shares->batch_positions;
    bool continues = true;
    for (int round = 0; continues; round++) {
        mqd_slot_positions(mqd_control_partition(r->options.control, s.slot), &s.positions);
        mqd_share_set_log_start(state, s.positions.log_start_offset);
        s.from_offset = mqd_share_next_offset(state);
        if (s.from_offset < 0)
            return;
        if (round == ROUNDS_MAX) {
            mqd_owner_wake_slot(r, s.slot);
            return;
        }
        errno = 0;
        response->error = response_error_of(find(&s));
        if (response->error || !s.range.size_bytes)
            continues = false;
        else if (request->kind == MQD_SHARE_REQUEST_MEASURE) {
            response->size_bytes = s.range.size_bytes;
            continues = false;
        } else
            continues = acquire_range(&s, worker, response);
        end_search(&s);
    }
}
