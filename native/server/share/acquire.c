/* Acquires records at the owner: finds the batches from the first offset that may be acquired, as
 * Fetch finds them, and passes them to the share partition's state (struct mqd_share). See
 * server/share/share.h.
 *
 * Only headers of batches are read here, from pages that are in memory; cold pages are read ahead,
 * and requests that wait for the slot are woken when they are in memory. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/share/share.h"
#include "wire/record_scan.h"

#define RANGE_BYTES_MAX (4u << 20)  /* searched by one acquisition */
#define HEADERS_SEPARATE_BYTES 4096 /* the headers of larger batches are read one by one */
/* after this many ranges in which all records were skipped, other jobs are served */
#define ROUNDS_MAX 8

struct walk {
    struct mqd_reactor *r;
    struct mqd_share_owned *owned;
    const struct mqd_share_owner_request *request;
    uint32_t slot;
    int64_t from; /* the offset that mqd_share_next_offset returned */
    struct mqd_positions positions;
    struct mqd_range range;
    struct mqd_aborted_list aborted;
    struct mqd_share_batch *batches; /* of the range */
    uint32_t *batch_positions;       /* the position of each batch, and the end of the last */
    uint32_t batch_count;
};

static void walk_end(struct walk *w)
{
    if (w->range.segment)
        mqd_range_release(w->r->reader, &w->range);
    free(w->aborted.entries);
    w->aborted = (struct mqd_aborted_list){NULL, 0, 0};
}

/* The reader finds the log's files by this path. */
static void ensure_log_path(struct walk *w)
{
    const struct mqd_topic *topic = mqd_topics_find_id(&w->r->topics, w->owned->partition.name.topic_id);
    if (topic)
        mqd_fetch_ensure_path(w->r, topic, w->owned->partition.name.partition_index, w->slot);
}

/* Sets w->range to whole batches from w->from on; its size_bytes is 0 if there is nothing to read.
 * Returns a code like mqd_reader_find, or -1: the segments have changed. */
static int16_t find_once(struct walk *w, uint64_t generation, uint32_t size_max)
{
    struct mqd_reader *reader = w->r->reader;
    struct mqd_positions readable = w->positions;
    struct mqd_cursor *cursor = &w->owned->cursor;
    bool committed = w->owned->partition.settings.read_committed;
    int64_t end = committed ? w->positions.last_stable_offset : w->positions.high_watermark;
    if (w->from >= end)
        return 0;
    int16_t code = mqd_reader_limit_positions(reader, w->slot, generation, end, &readable);
    if (!code)
        code = mqd_reader_find(reader, w->slot, &readable, generation, w->from, size_max, true, cursor, &w->range);
    if (code || !committed || !w->range.size_bytes)
        return code;
    if (mqd_reader_is_swapping(reader, w->slot)) { /* returns nothing now; the end of the swap wakes the slot */
        cursor->valid = false;
        walk_end(w);
        return 0;
    }
    code = mqd_reader_find_aborted(reader, w->slot, &w->positions, generation, w->from, w->owned->cursor.offset,
                                   &w->aborted);
    if (!code &&
        mqd_load_acquire(&mqd_control_partition(w->r->options.control, w->slot)->segments_generation) == generation)
        return 0;
    walk_end(w);
    return code ? code : -1;
}

static int16_t find(struct walk *w)
{
    struct mqd_partition_slot *shared = mqd_control_partition(w->r->options.control, w->slot);
    uint32_t size_max = w->request->bytes_max < RANGE_BYTES_MAX ? w->request->bytes_max : RANGE_BYTES_MAX;
    int16_t code = -1;
    ensure_log_path(w);
    for (int tries = 0; tries < 4 && code == -1; tries++) {
        uint64_t generation = mqd_load_acquire(&shared->segments_generation);
        mqd_slot_positions(shared, &w->positions);
        code = find_once(w, generation, size_max);
    }
    return code == -1 ? 0 : code; /* the segments keep changing: returns nothing now */
}

/* Whether the pages of the range are in memory. If not, begins to read them ahead, unless a
 * read-ahead is already running. */
static bool is_warm(struct walk *w)
{
    struct mqd_reactor *r = w->r;
    if (mqd_range_just_written(r->reader, w->slot, &w->positions, &w->range) || mqd_range_cached(&w->range))
        return true;
    /* if the kernel cannot report what is in memory, a range that was read ahead counts as in
     * memory */
    if (w->owned->completed_read_ahead_id == w->from + 1)
        return true;
    if (w->owned->read_ahead_running)
        return false;
    if (mqd_poll_read_ahead(r->poll, mqd_segment_ref_fd(w->range.segment), w->range.position, w->range.size_bytes,
                            mqd_token(MQD_TOKEN_SHARE, w->owned->index)) < 0)
        return true; /* too many file operations: this thread waits for the disk itself */
    w->owned->read_ahead_running = 1;
    w->owned->running_read_ahead_id = w->from + 1;
    mqd_stat(r, MQD_COUNT_FETCH_COLD, 1);
    return false;
}

void mqd_share_on_read_ahead(struct mqd_reactor *r, uint64_t index)
{
    struct mqd_shares *shares = r->shares;
    bool of_keys = index & MQD_SHARE_TOKEN_KEYS;
    index &= ~MQD_SHARE_TOKEN_KEYS;
    if (!shares || index >= shares->owned_capacity || !shares->owned[index])
        return;
    if (of_keys) {
        shares->owned[index]->reading_keys = 0;
    } else {
        shares->owned[index]->read_ahead_running = 0;
        shares->owned[index]->completed_read_ahead_id = shares->owned[index]->running_read_ahead_id;
    }
    mqd_owner_wake_slot(r, shares->owned[index]->slot);
}

/* ---- batches ---- */

static bool is_aborted(const struct walk *w, const struct mqd_batch *batch)
{
    for (uint32_t i = 0; i < w->aborted.count; i++) {
        const struct mqd_aborted *one = &w->aborted.entries[i];
        if (one->producer_id == batch->producer_id && batch->base_offset >= one->first_offset &&
            batch->base_offset <= one->last_offset)
            return true;
    }
    return false;
}

static void add(struct walk *w, const struct mqd_batch *batch, uint32_t position)
{
    bool is_control = batch->attributes & MQD_ATTRIBUTE_CONTROL,
         is_transactional = batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL;
    w->batch_positions[w->batch_count] = position;
    w->batches[w->batch_count++] =
        (struct mqd_share_batch){.first = batch->base_offset,
                                 .last = batch->base_offset + batch->last_offset_delta,
                                 .skipped = is_control || (is_transactional && is_aborted(w, batch))};
    w->batch_positions[w->batch_count] = position + (uint32_t)batch->size_bytes;
}

/* Reads the headers of the range's batches up to the last record that may be acquired and is
 * wanted, but at least one header. false: the file cannot be read, or is damaged. */
static bool read_headers(struct walk *w)
{
    uint8_t *chunk = w->r->shares->chunk;
    int fd = mqd_segment_ref_fd(w->range.segment);
    uint64_t at = w->range.position, end = at + w->range.size_bytes, chunk_at = 0, chunk_end = 0;
    int64_t reach = mqd_share_acquire_end(&w->owned->partition.state, w->request->records_max);
    uint32_t last_bytes = 0;
    struct mqd_batch batch;
    w->batch_count = 0;
    while (at + MQD_BATCH_HEADER_BYTES <= end && w->batch_count < MQD_SHARE_BATCHES_PER_RANGE &&
           (!w->batch_count || w->batches[w->batch_count - 1].last + 1 < reach)) {
        if (at < chunk_at || at + MQD_BATCH_HEADER_BYTES > chunk_end) {
            uint64_t chunk_bytes =
                last_bytes && last_bytes < HEADERS_SEPARATE_BYTES ? MQD_SHARE_CHUNK_BYTES : MQD_BATCH_HEADER_BYTES;
            ssize_t n = pread(fd, chunk, chunk_bytes < end - at ? chunk_bytes : end - at, (off_t)at);
            if (n < MQD_BATCH_HEADER_BYTES)
                return false;
            chunk_at = at;
            chunk_end = at + (uint64_t)n;
        }
        if (mqd_batch_decode(chunk + (at - chunk_at), MQD_BATCH_HEADER_BYTES, &batch) < 0 ||
            (uint64_t)batch.size_bytes > end - at ||
            (w->batch_count && batch.base_offset <= w->batches[w->batch_count - 1].last))
            return false;
        if (w->batch_count && batch.base_offset >= reach)
            break;
        add(w, &batch, (uint32_t)at);
        last_bytes = (uint32_t)batch.size_bytes;
        at += last_bytes;
    }
    return w->batch_count > 0;
}

/* ---- acquiring ---- */

static uint32_t batch_of(const struct walk *w, int64_t offset)
{
    uint32_t index = 0;
    while (index + 1 < w->batch_count && w->batches[index].last < offset)
        index++;
    return index;
}

static void send_runs(struct walk *w, uint32_t from, const struct mqd_share_run *runs, uint32_t count,
                      struct mqd_descriptor *response)
{
    uint32_t first = batch_of(w, runs[0].first), last = batch_of(w, runs[count - 1].last);
    for (uint32_t i = 0; i < count; i++) {
        struct mqd_descriptor run = {.kind = MQD_LINK_SHARE_RESPONSE,
                                     .flags = MQD_SHARED_RUN,
                                     .token = response->token,
                                     .a = runs[i].first,
                                     .b = runs[i].last,
                                     .c = runs[i].count};
        mqd_share_respond(w->r, from, &run);
    }
    /* the log may start within the batch: reading begins at an offset that the log has */
    response->a = runs[0].first > w->batches[first].first ? runs[0].first : w->batches[first].first;
    response->b = w->batches[last].last + 1;
    response->size_bytes = w->batch_positions[last + 1] - w->batch_positions[first];
}

/* Acquires from one range. Returns whether the next range may be searched. */
static bool acquire_range(struct walk *w, uint32_t from, struct mqd_descriptor *response)
{
    struct mqd_share *state = &w->owned->partition.state;
    const struct mqd_share_owner_request *request = w->request;
    struct mqd_share_run runs[MQD_SHARE_RUNS_PER_PART];
    struct mqd_share_acquisition acquisition = {.member = request->member,
                                                .now_ms = w->r->now_ms,
                                                .records_max = request->records_max,
                                                .strict = request->strict};
    if (!is_warm(w))
        return false;
    errno = 0; /* stays 0 if the bytes can be read, but are no batches */
    if (!read_headers(w)) {
        mqd_log(w->r, 4, 0, w->slot, "a share group cannot read its records at offset %lld: %s", (long long)w->from,
                errno ? strerror(errno) : "a batch is damaged");
        response->error = MQD_KAFKA_CORRUPT_MESSAGE;
        return false;
    }
    response->error = mqd_share_keys_read(w->r, w->owned, mqd_segment_ref_fd(w->range.segment), w->batches,
                                          w->batch_positions, w->batch_count);
    uint32_t count = response->error ? 0
                                     : mqd_share_acquire(state, &acquisition, w->from, w->batches, w->batch_count, runs,
                                                         MQD_SHARE_RUNS_PER_PART);
    mqd_share_keys_done(w->r->shares);
    if (response->error) {
        mqd_log(w->r, 4, 0, w->slot, "a share group with share.fifo cannot read keys from offset %lld on: error %d",
                (long long)w->from, response->error);
        return false;
    }
    if (count)
        send_runs(w, from, runs, count, response);
    return count == 0 && !state->pool_exhausted && mqd_share_next_offset(state) > w->from;
}

static int16_t error_of(int16_t code)
{
    /* below the log's start or above its end, which has moved since the positions were read */
    return code == MQD_KAFKA_OFFSET_OUT_OF_RANGE ? 0 : code;
}

void mqd_share_acquire_now(struct mqd_reactor *r, struct mqd_share_owned *owned,
                           const struct mqd_share_owner_request *request, uint32_t from,
                           struct mqd_descriptor *response)
{
    struct mqd_share *state = &owned->partition.state;
    struct walk w = {.r = r, .owned = owned, .request = request, .slot = owned->slot};
    w.batches = r->shares->batches;
    w.batch_positions = r->shares->batch_positions;
    bool more = true;
    for (int round = 0; more; round++) {
        mqd_slot_positions(mqd_control_partition(r->options.control, w.slot), &w.positions);
        mqd_share_set_log_start(state, w.positions.log_start_offset);
        w.from = mqd_share_next_offset(state);
        if (w.from < 0)
            return;
        if (round == ROUNDS_MAX) {
            mqd_owner_wake_slot(r, w.slot);
            return;
        }
        errno = 0;
        response->error = error_of(find(&w));
        if (response->error || !w.range.size_bytes)
            more = false;
        else if (request->kind == MQD_SHARE_REQUEST_MEASURE) {
            response->size_bytes = w.range.size_bytes;
            more = false;
        } else
            more = acquire_range(&w, from, response);
        walk_end(&w);
    }
}
