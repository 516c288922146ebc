/* Fetches of views: batches of the base topic are read and filtered by a thread of the worker's
 * pool, or their selections are taken from the cache (log/views/view_cache.h). The response
 * contains the selected records.
 *
 *   collect -> range of the base found -> job
 *     something selected, or the fetch expires -> response
 *     nothing selected -> `skipped` grows, and the fetch is evaluated again
 *
 * Offsets at which nothing is selected are skipped without a response: entry->skipped is the number
 * of offsets above the client's offset that have been read without a selection. It is stored in the
 * session, or by topic, partition and offset, so that the next fetch at the same offset continues
 * there. A client that skips batches without records (connection->skips_empty_batches) receives
 * such a batch, so that its position advances too; other clients would stop at it.
 *
 * Invariants
 *   F1  from the client's offset up to offset + skipped, nothing is selected and there is no
 *       control batch. This holds only in the leader epoch in which these offsets were read: after
 *       an unclean election, other records may have the same offsets.
 *   F2  a job owns all that it uses (range, filter), because its set and entry may be freed before
 *       it ends. */
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"
#include "log/views/view_cache.h"
#include "server/reactor.h"
#include "wire/buffer.h"
#include "wire/filter.h"

#define CACHE_BYTES_MAX (64ull << 20) /* per worker */
#define PIECE_BYTES (1u << 20)
#define FILTERED_BYTES_MAX (4u << 20) /* bytes of the base that are filtered for one response */
#define OUTPUT_BYTES_MAX (1 << 20)    /* bytes selected from a partition for one response */

struct mqd_view_job {
    struct mqd_request *request;
    struct mqd_fetch_entry *entry; /* may be dangling, so it is only compared with the entries of the request's set */
    struct mqd_range range;
    struct mqd_view_cache *cache;
    struct mqd_view_read read;
    int16_t error;
    uint8_t filter[];
};

/* ---- skipped offsets ---- */

static struct mqd_view_skip *skip_slot_of(struct mqd_reactor *r, const struct mqd_fetch_entry *entry)
{
    uint64_t hash = entry->topic->serial * 0x9e3779b97f4a7c15ull +
                    (uint32_t)entry->partition_index * 0xc2b2ae3d27d4eb4full +
                    (uint64_t)entry->fetch_offset * 0x165667b19e3779f9ull;
    return &r->views.skips[hash >> 48 & (MQD_VIEW_SKIP_COUNT - 1)];
}

void mqd_view_restore_skipped(struct mqd_reactor *r, struct mqd_fetch_entry *entry, int32_t leader_epoch)
{
    const struct mqd_view_skip *remembered = skip_slot_of(r, entry);
    if (entry->skipped && entry->skipped_epoch != leader_epoch)
        entry->skipped = entry->has_skipped_batch = 0;
    if (!entry->skipped && remembered->topic_serial == entry->topic->serial &&
        remembered->partition_index == entry->partition_index && remembered->offset == entry->fetch_offset &&
        remembered->leader_epoch == leader_epoch) {
        entry->skipped = remembered->skipped;
        entry->has_skipped_batch = remembered->has_batch;
        memcpy(entry->skipped_batch, remembered->batch, sizeof entry->skipped_batch);
    }
    entry->skipped_epoch = leader_epoch;
}

static void store_skipped(struct mqd_reactor *r, struct mqd_fetch_entry *entry, const struct mqd_filtered *selection)
{
    entry->skipped = selection->next_offset - entry->fetch_offset;
    entry->has_skipped_batch = selection->has_empty;
    memcpy(entry->skipped_batch, selection->empty, sizeof entry->skipped_batch);
    struct mqd_view_skip *remembered = skip_slot_of(r, entry);
    *remembered = (struct mqd_view_skip){.topic_serial = entry->topic->serial,
                                         .partition_index = entry->partition_index,
                                         .offset = entry->fetch_offset,
                                         .leader_epoch = entry->skipped_epoch,
                                         .skipped = entry->skipped,
                                         .has_batch = selection->has_empty};
    memcpy(remembered->batch, selection->empty, sizeof remembered->batch);
}

void mqd_view_add_empty(const struct mqd_request *request, struct mqd_fetch_entry *entry)
{
    if (!entry->has_skipped_batch || !request->connection || !request->connection->skips_empty_batches)
        return;
    entry->filtered.has_empty = true;
    memcpy(entry->filtered.empty, entry->skipped_batch, sizeof entry->filtered.empty);
    entry->outcome.records_bytes = sizeof entry->filtered.empty;
}

/* ---- the job ---- */

/* Runs on a thread of the pool. */
static int run_job(void *argument)
{
    struct mqd_view_job *job = argument;
    job->error = mqd_view_read(job->cache, &job->read);
    mqd_decompress_trim();
    return 0;
}

static uint64_t output_bytes_max_of(const struct mqd_request *request, const struct mqd_fetch_entry *entry)
{
    int32_t room = entry->bytes_max < request->bytes_max ? entry->bytes_max : request->bytes_max;
    room = room < OUTPUT_BYTES_MAX ? room : OUTPUT_BYTES_MAX;
    return room > 0 ? (uint64_t)room : 1;
}

bool mqd_view_begin(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry)
{
    const struct mqd_view *view = entry->topic->view;
    if (!r->views.cache && !(r->views.cache = mqd_view_cache_create(CACHE_BYTES_MAX, PIECE_BYTES)))
        return false;
    struct mqd_view_job *job = calloc(1, sizeof *job + view->filter_bytes);
    if (!job)
        return false;
    struct mqd_partition_slot *slot =
        mqd_control_partition(r->options.control, entry->topic->slots[entry->partition_index]);
    job->request = request;
    job->entry = entry;
    job->range = entry->range;
    job->cache = r->views.cache;
    memcpy(job->filter, view->filter, view->filter_bytes);
    job->read = (struct mqd_view_read){.fd = mqd_segment_ref_fd(entry->range.segment),
                                       .file = mqd_segment_ref_serial(entry->range.segment),
                                       .view = entry->topic->serial,
                                       .filter = job->filter,
                                       .filter_bytes = view->filter_bytes,
                                       .position = entry->range.position,
                                       .limit = entry->range.position + entry->range.size_bytes,
                                       .filtered_bytes_max = FILTERED_BYTES_MAX,
                                       .from_offset = mqd_fetch_position(entry),
                                       .output_bytes_max = output_bytes_max_of(request, entry),
                                       .generation_at = &slot->segments_generation,
                                       .generation = entry->cursor.generation};
    if (mqd_poll_run(r->poll, job->read.fd, run_job, job, mqd_token(MQD_TOKEN_VIEW, (uint64_t)(uintptr_t)job)) < 0) {
        free(job);
        return false;
    }
    entry->range = (struct mqd_range){0};
    request->pending++;
    return true;
}

/* ---- the outcome of a job ---- */

static void fail(struct mqd_reactor *r, const struct mqd_request *request, struct mqd_fetch_entry *entry, int16_t error)
{
    entry->outcome.error = error;
    entry->outcome.high_watermark = entry->outcome.last_stable_offset = entry->outcome.log_start_offset = -1;
    mqd_log(r, 4, request->connection ? request->connection->id : 0, UINT32_MAX,
            "fetch of the view %s at offset %lld: error %d: %s", entry->topic->name, (long long)entry->fetch_offset,
            error,
            error == MQD_KAFKA_UNSUPPORTED_COMPRESSION_TYPE
                ? "the library of the batches' codec is not installed on this host"
            : error == MQD_KAFKA_CORRUPT_MESSAGE ? "a batch of the base topic cannot be read"
                                                 : "no memory, or the file cannot be read");
}

static void take_selection(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry,
                           struct mqd_view_job *job)
{
    struct mqd_filtered *selection = &job->read.selection;
    if (job->error) {
        fail(r, request, entry, job->error);
        return;
    }
    entry->cursor.valid &= job->read.end_position > 0;
    if (entry->cursor.valid && job->read.end_position < job->read.limit)
        mqd_range_move_cursor(&job->range, job->read.end_position, selection->next_offset, &entry->cursor);
    mqd_fetch_keep_cursor(r, entry);
    if (!selection->size_bytes) {
        store_skipped(r, entry, selection);
        mqd_view_add_empty(request, entry);
        return;
    }
    if (!mqd_request_charge(r, request, selection->capacity_bytes))
        return; /* no memory: the partition is empty in this response */
    entry->filtered = *selection;
    selection->bytes = NULL;
    entry->filtered.has_empty &= request->connection && request->connection->skips_empty_batches;
    entry->outcome.records_bytes =
        (uint32_t)selection->size_bytes + (entry->filtered.has_empty ? (uint32_t)sizeof selection->empty : 0);
    mqd_stat(r, MQD_COUNT_FETCH_BYTES, entry->outcome.records_bytes);
}

static struct mqd_fetch_entry *entry_of(const struct mqd_request *request, const struct mqd_view_job *job)
{
    const struct mqd_fetch_set *set = request->set;
    for (uint32_t i = 0; set && i < set->included_count; i++)
        if (set->included[i] == job->entry)
            return job->entry;
    return NULL;
}

/* Whether the response would still be empty, and the request has time left. */
static bool must_continue(const struct mqd_reactor *r, const struct mqd_request *request)
{
    const struct mqd_fetch_set *set = request->set;
    if (!set || set->request != request || r->now_ms >= request->started_ns / 1000000 + request->wait_ms)
        return false;
    for (uint32_t i = 0; i < set->included_count; i++) {
        const struct mqd_fetch_entry *entry = set->included[i];
        if (entry->outcome.error || entry->outcome.has_preferred || entry->filtered.size_bytes ||
            entry->range.size_bytes)
            return false;
    }
    return true;
}

static void update_counters(struct mqd_reactor *r, const struct mqd_view_job *job)
{
    struct mqd_view_cache_stats stats, *counted = &r->views.counted;
    mqd_view_cache_stats(job->cache, &stats);
    mqd_stat(r, MQD_COUNT_VIEW_FILTERED_BYTES, job->read.filtered_bytes);
    mqd_stat(r, MQD_COUNT_VIEW_CACHE_HITS, stats.hits - counted->hits);
    mqd_stat(r, MQD_COUNT_VIEW_CACHE_EVICTIONS, stats.evicted - counted->evicted);
    mqd_set_gauge(r, MQD_GAUGE_VIEW_CACHE_BYTES, stats.bytes);
    *counted = stats;
}

void mqd_view_on_done(struct mqd_reactor *r, uint64_t id)
{
    struct mqd_view_job *job = (struct mqd_view_job *)(uintptr_t)id;
    struct mqd_request *request = job->request;
    struct mqd_fetch_entry *entry = entry_of(request, job);
    if (entry)
        take_selection(r, request, entry, job);
    update_counters(r, job);
    mqd_range_release(r->reader, &job->range);
    mqd_filtered_free(&job->read.selection);
    free(job);
    if (--request->pending)
        return;
    if (!request->connection) {
        mqd_request_free(r, request);
    } else if (must_continue(r, request)) {
        for (uint32_t i = 0; i < request->set->included_count; i++) {
            mqd_request_uncharge(r, request, mqd_fetch_aborted_bytes(request->set->included[i]));
            mqd_fetch_entry_release(r, request->set->included[i]);
        }
        request->set->included_count = 0;
        request->evaluated = 0;
        mqd_fetch_evaluate(r, request, false);
    } else {
        mqd_request_complete(r, request);
    }
}

void mqd_view_put(struct mqd_reactor *r, struct mqd_fetch_entry *entry)
{
    struct mqd_filtered *filtered = &entry->filtered;
    mqd_put_bytes(&r->scratch, filtered->bytes, (uint32_t)filtered->size_bytes);
    if (filtered->has_empty)
        mqd_put_bytes(&r->scratch, filtered->empty, sizeof filtered->empty);
}
