/* Runs a job from its arrival to its response. See server/share/share.h.
 *
 *   pass over the parts, one after the other -> records were acquired | an owner refused | time is up
 *     -> ended -> (acknowledgements are persisted) -> (cold ranges: read ahead) -> complete
 *   otherwise the job waits; an event that wakes one of its parts begins the next pass
 *
 * With bytes_min above 1 the passes first measure how many bytes can be acquired. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "server/rights/subject.h"
#include "server/share/share.h"

#define COLD_READ_COUNT_MAX 128 /* as in server/fetch/fetch.c */

void mqd_share_schedule(struct mqd_reactor *r, struct mqd_share_job *job)
{
    if (!mqd_list_linked(&job->node))
        mqd_list_append(&r->shares->runnable, &job->node);
}

/* ---- waiting ---- */

static void await_slot(struct mqd_reactor *r, struct mqd_share_part *part) /* H2 */
{
    if (!mqd_list_linked(&part->waiter_node))
        mqd_list_append(&r->shares->waiting[part->slot % MQD_SHARE_WAIT_BUCKET_COUNT], &part->waiter_node);
    mqd_fetch_or(&mqd_control_partition(r->options.control, part->slot)->waiters, 1ull << r->options.self);
}

void mqd_share_wake_slot(struct mqd_reactor *r, uint32_t slot)
{
    MQD_LIST_EACH(node, next, &r->shares->waiting[slot % MQD_SHARE_WAIT_BUCKET_COUNT]) {
        struct mqd_share_part *part = MQD_CONTAINER(node, struct mqd_share_part, waiter_node);
        if (part->slot != slot)
            continue;
        part->ready = 1;
        mqd_share_schedule(r, part->job);
    }
}

void mqd_share_expire_wait(struct mqd_reactor *r, struct mqd_request *request)
{
    request->share->expired = 1;
    mqd_share_schedule(r, request->share);
}

/* ---- requests to owners ---- */

static void fail_part(struct mqd_share_part *part, int16_t error)
{
    part->error = error;
    part->job->failed = 1;
}

static void request_records(struct mqd_reactor *r, struct mqd_share_part *part)
{
    struct mqd_share_job *job = part->job;
    uint16_t owner;
    uint64_t generation;
    part->ready = 0;
    if (part->topic->removed) {
        fail_part(part, MQD_KAFKA_UNKNOWN_TOPIC_ID);
        return;
    }
    if (!mqd_subject_is_allowed(r, job->request->connection, part->topic, MQD_OPERATION_READ)) {
        fail_part(part, MQD_KAFKA_TOPIC_AUTHORIZATION_FAILED); /* the right was revoked while the job waited */
        return;
    }
    await_slot(r, part);
    int16_t error = mqd_share_owner_of(r, part->slot, &owner, &generation);
    if (error) {
        fail_part(part, error);
        return;
    }
    struct mqd_share_owner_request request = {.member = job->member,
                                              .partition_index = part->partition_index,
                                              .records_max = job->records_max,
                                              .bytes_max = job->bytes_max,
                                              .group_bytes = job->group_bytes,
                                              .kind =
                                                  job->measures ? MQD_SHARE_REQUEST_MEASURE : MQD_SHARE_REQUEST_ACQUIRE,
                                              .strict = job->strict,
                                              .joins = part->joins};
    memcpy(request.topic_id, part->topic_id, sizeof request.topic_id);
    part->joins = 0;
    job->awaits_owner = 1;
    if (!mqd_share_call_owner(r, part, part->slot, owner, generation, &request, job->group, NULL)) {
        job->awaits_owner = 0;
        part->joins = request.joins;
        fail_part(part, MQD_KAFKA_REQUEST_TIMED_OUT);
    }
}

/* ---- acquired records ---- */

static void forget_runs(struct mqd_share_part *part)
{
    part->run_count = 0;
    part->read_bytes = 0;
}

/* Gives back records that cannot be read now, so that any member may acquire them again. */
static void return_acquired(struct mqd_reactor *r, struct mqd_share_part *part)
{
    struct mqd_share_job *job = part->job;
    struct mqd_buffer ranges = {0};
    uint16_t owner;
    uint64_t generation;
    struct mqd_share_owner_request request = {.member = job->member,
                                              .partition_index = part->partition_index,
                                              .range_count = part->run_count,
                                              .group_bytes = job->group_bytes,
                                              .kind = MQD_SHARE_REQUEST_ACKNOWLEDGE};
    memcpy(request.topic_id, part->topic_id, sizeof request.topic_id);
    for (uint32_t i = 0; i < part->run_count; i++)
        mqd_share_range_put(&ranges, part->runs[i].first, part->runs[i].last, &(uint8_t){MQD_SHARE_RETURN}, 1);
    if (!ranges.failed && mqd_share_owner_of(r, part->slot, &owner, &generation) == 0)
        mqd_share_call_owner(r, NULL, part->slot, owner, generation, &request, job->group, &ranges);
    mqd_buffer_free(&ranges);
    forget_runs(part);
}

/* Sets part->range to the bytes from read_first to read_end. The reader ends a range at an entry of
 * its sparse index; from there on the batches are added one by one. Returns 0, an error code, or -1
 * if the bytes do not exist or cannot be read now. */
static int16_t find_bytes(struct mqd_reactor *r, struct mqd_share_part *part, const struct mqd_positions *positions,
                          uint64_t generation)
{
    struct mqd_cursor cursor = {.offset = part->read_first};
    struct mqd_range *range = &part->range, next;
    while (range->size_bytes < part->read_bytes) {
        int16_t code = mqd_reader_find(r->reader, part->slot, positions, generation, cursor.offset,
                                       part->read_bytes - range->size_bytes, !range->segment, &cursor, &next);
        if (code || !next.size_bytes)
            return code ? code : -1;
        if (!range->segment) {
            *range = next;
            continue;
        }
        bool adjoins = next.segment == range->segment && next.position == range->position + range->size_bytes;
        range->size_bytes += adjoins ? next.size_bytes : 0;
        mqd_range_release(r->reader, &next);
        if (!adjoins)
            return -1;
    }
    /* compaction may have left a gap at read_end; the range then ends at a higher offset */
    return range->size_bytes == part->read_bytes && cursor.offset >= part->read_end ? 0 : -1;
}

/* Finds the bytes of the acquired records, exactly as their owner found them. Returns codes like
 * find_bytes. */
static int16_t find_range(struct mqd_reactor *r, struct mqd_share_part *part)
{
    struct mqd_partition_slot *shared = mqd_control_partition(r->options.control, part->slot);
    int16_t code = -1;
    mqd_fetch_ensure_path(r, part->topic, part->partition_index, part->slot);
    for (int tries = 0; tries < 4 && code == -1; tries++) {
        struct mqd_positions positions;
        uint64_t generation = mqd_load_acquire(&shared->segments_generation);
        mqd_slot_positions(shared, &positions);
        code = find_bytes(r, part, &positions, generation);
        if (code)
            mqd_range_release(r->reader, &part->range);
    }
    return code;
}

static void take_run(struct mqd_reactor *r, struct mqd_share_part *part, const struct mqd_descriptor *response)
{
    uint64_t bytes = MQD_SHARE_RUNS_PER_PART * sizeof *part->runs;
    if (!part->runs) {
        part->runs = malloc(bytes);
        if (!part->runs)
            return; /* no memory: the records are available again when their locks expire */
        r->heap_bytes += bytes;
        part->job->request->heap_bytes += bytes;
        if (part->job->request->connection)
            part->job->request->connection->held_bytes += bytes;
    }
    if (part->run_count < MQD_SHARE_RUNS_PER_PART)
        part->runs[part->run_count++] =
            (struct mqd_share_run){response->a, response->b, MQD_SHARE_ACQUIRED, (int16_t)response->c};
}

static void take_records(struct mqd_reactor *r, struct mqd_share_part *part, const struct mqd_descriptor *response)
{
    struct mqd_share_job *job = part->job;
    part->read_first = response->a;
    part->read_end = response->b;
    part->read_bytes = response->size_bytes;
    int16_t code = find_range(r, part);
    if (code) {
        mqd_log(r, 4, job->request->connection ? job->request->connection->id : 0, part->slot,
                "records from offset %lld, acquired for a share group, cannot be read; they are returned",
                (long long)part->read_first);
        return_acquired(r, part);
        fail_part(part, code > 0 ? code : MQD_KAFKA_STORAGE_ERROR); /* otherwise this job would acquire them again */
        return;
    }
    for (uint32_t i = 0; i < part->run_count; i++) {
        uint64_t records = (uint64_t)(part->runs[i].last - part->runs[i].first) + 1;
        job->records_max -= records < job->records_max ? (uint32_t)records : job->records_max;
    }
    job->bytes_max -= part->read_bytes < job->bytes_max ? part->read_bytes : job->bytes_max;
    job->acquired = 1;
    mqd_stat(r, MQD_COUNT_FETCH_BYTES, part->read_bytes);
    mqd_slot_count_out(mqd_control_partition(r->options.control, part->slot), part->read_bytes);
}

void mqd_share_on_acquired(struct mqd_reactor *r, struct mqd_share_part *part, uint8_t kind,
                           const struct mqd_descriptor *response)
{
    struct mqd_share_job *job = part->job;
    if (response->flags & MQD_SHARED_RUN) {
        take_run(r, part, response);
        return;
    }
    job->awaits_owner = 0;
    if (response->slot)
        job->lock_ms = (int32_t)response->slot;
    if (response->error)
        fail_part(part, (int16_t)response->error);
    else if (kind == MQD_SHARE_REQUEST_MEASURE)
        part->available = response->size_bytes;
    else if (part->run_count)
        take_records(r, part, response);
    mqd_share_schedule(r, job);
}

void mqd_share_on_acknowledged(struct mqd_reactor *r, struct mqd_share_part *part,
                               const struct mqd_descriptor *response)
{
    struct mqd_share_job *job = part->job;
    if (job->request->api_key == MQD_API_SHARE_FETCH)
        part->acknowledge_error = (int16_t)response->error;
    else
        part->error = (int16_t)response->error;
    if (response->slot)
        job->lock_ms = (int32_t)response->slot;
    job->pending_acknowledgements--;
    mqd_share_schedule(r, job);
}

/* ---- completion ---- */

static void read_cold(struct mqd_reactor *r, struct mqd_share_job *job)
{
    struct mqd_request *request = job->request;
    for (uint32_t i = 0; i < job->part_count; i++) {
        struct mqd_share_part *part = &job->parts[i];
        struct mqd_positions positions;
        if (!part->range.size_bytes || r->cold_read_count >= COLD_READ_COUNT_MAX)
            continue;
        mqd_slot_positions(mqd_control_partition(r->options.control, part->slot), &positions);
        if (mqd_range_just_written(r->reader, part->slot, &positions, &part->range) || mqd_range_cached(&part->range))
            continue;
        if (mqd_poll_read_ahead(r->poll, mqd_segment_ref_fd(part->range.segment), part->range.position,
                                part->range.size_bytes,
                                mqd_token(MQD_TOKEN_READ_AHEAD, (uint64_t)(uintptr_t)request)) == 0) {
            request->pending++;
            r->cold_read_count++;
            mqd_stat(r, MQD_COUNT_FETCH_COLD, 1);
        }
    }
}

static void end_job(struct mqd_reactor *r, struct mqd_share_job *job)
{
    mqd_timer_disarm(r, job->request);
    for (uint32_t i = 0; i < job->part_count; i++)
        mqd_list_remove(&job->parts[i].waiter_node);
    job->ended = 1;
    if (job->fetches)
        read_cold(r, job);
}

/* ---- passes ---- */

static bool has_budget(const struct mqd_share_job *job)
{
    return job->records_max > 0 && (job->bytes_max > 0 || !job->acquired);
}

/* Returns the highest rank below `rank` with a part to read from, or -1 if there is none. */
static int32_t rank_below(const struct mqd_share_job *job, int32_t rank)
{
    int32_t highest = -1;
    for (uint32_t i = 0; i < job->part_count; i++) {
        const struct mqd_share_part *part = &job->parts[i];
        if (part->reads && !part->error && part->rank < rank && part->rank > highest)
            highest = part->rank;
    }
    return highest;
}

/* Begins a rank: the records and bytes reserved for it can now be used, except for a fraction,
 * which is reserved for lower ranks. */
static void begin_rank(struct mqd_share_job *job, int32_t rank)
{
    job->rank = rank;
    job->handled_count = 0;
    job->records_max += job->records_reserved;
    job->bytes_max += job->bytes_reserved;
    bool is_last = rank_below(job, rank) < 0;
    job->records_reserved = is_last ? 0 : job->records_max / MQD_SHARE_RESERVE_DIVISOR;
    job->bytes_reserved = is_last ? 0 : job->bytes_max / MQD_SHARE_RESERVE_DIVISOR;
    job->records_max -= job->records_reserved;
    job->bytes_max -= job->bytes_reserved;
}

/* Requests records from the remaining parts of this pass, by rank. Returns false if a response is
 * awaited. */
static bool run_pass(struct mqd_reactor *r, struct mqd_share_job *job)
{
    if (job->ranked && job->rank < 0)
        begin_rank(job, rank_below(job, INT32_MAX));
    do {
        while (job->handled_count < job->part_count && (has_budget(job) || job->measures)) {
            struct mqd_share_part *part = &job->parts[(job->first_part + job->handled_count++) % job->part_count];
            if (part->reads && part->ready && !part->error && !part->run_count &&
                (!job->ranked || part->rank == job->rank))
                request_records(r, part);
            if (job->awaits_owner)
                return false;
        }
        job->handled_count = 0;
        if (job->ranked)
            begin_rank(job, rank_below(job, job->rank));
    } while (job->rank >= 0);
    return true;
}

/* Called after a pass that measured the available bytes: if bytes_min is reached, or waiting longer
 * is useless, ends measuring and returns true. */
static bool end_measuring_if_enough(struct mqd_share_job *job)
{
    uint64_t available = 0;
    for (uint32_t i = 0; i < job->part_count; i++)
        available += job->parts[i].available;
    if (available < job->bytes_min && !job->expired && !job->failed)
        return false;
    for (uint32_t i = 0; i < job->part_count; i++)
        job->parts[i].ready |= job->parts[i].available > 0;
    job->measures = 0;
    return true;
}

static bool any_ready(const struct mqd_share_job *job)
{
    for (uint32_t i = 0; i < job->part_count; i++)
        if (job->parts[i].ready && job->parts[i].reads && !job->parts[i].error)
            return true;
    return false;
}

static bool any_reads(const struct mqd_share_job *job)
{
    for (uint32_t i = 0; i < job->part_count; i++)
        if (job->parts[i].reads && !job->parts[i].error)
            return true;
    return false;
}

/* Continues acquiring. Returns true if nothing more will be acquired. */
static bool continue_acquiring(struct mqd_reactor *r, struct mqd_share_job *job)
{
    if (job->awaits_owner)
        return false;
    for (;;) {
        if (!run_pass(r, job))
            return false;
        if (job->measures && end_measuring_if_enough(job))
            continue;
        if (job->acquired || job->failed || job->expired || !any_reads(job))
            return true;
        if (any_ready(job))
            continue;
        if (!job->request->timer_armed) {
            mqd_stat(r, MQD_COUNT_FETCH_PARKED, 1);
            mqd_timer_arm(r, job->request, job->request->started_ns / 1000000 + job->request->wait_ms);
        }
        return false;
    }
}

static void advance(struct mqd_reactor *r, struct mqd_share_job *job)
{
    if (job->request->complete)
        return;
    if (!job->ended && (!job->fetches || continue_acquiring(r, job)))
        end_job(r, job);
    if (job->ended && !job->pending_acknowledgements && !job->request->pending)
        mqd_request_complete(r, job->request);
}

void mqd_share_pump(struct mqd_reactor *r)
{
    struct mqd_shares *shares = r->shares;
    if (!shares || shares->is_running)
        return;
    shares->is_running = true;
    do {
        struct mqd_node *node;
        while ((node = mqd_list_pop(&shares->runnable)))
            advance(r, MQD_CONTAINER(node, struct mqd_share_job, node));
        mqd_share_send_unsent(r);
        mqd_share_owners_run(r);
    } while (!mqd_list_empty(&shares->runnable));
    shares->is_running = false;
}

void mqd_share_job_free(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_share_job *job = request->share;
    request->share = NULL;
    for (uint32_t i = 0; i < job->part_count; i++) {
        struct mqd_share_part *part = &job->parts[i];
        mqd_list_remove(&part->waiter_node);
        if (part->joins)
            mqd_share_rejoin(r, part);
        if (part->acquire_call)
            part->acquire_call->part = NULL;
        if (part->acknowledge_call)
            part->acknowledge_call->part = NULL;
        if (part->range.segment)
            mqd_range_release(r->reader, &part->range);
        mqd_topic_release(part->topic);
        free(part->runs);
    }
    mqd_list_remove(&job->node);
    free(job);
}
