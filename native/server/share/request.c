/* Receives ShareFetch and ShareAcknowledge requests: finds their session and their partitions, and
 * takes their acknowledgements. See server/share/share.h. Errors and their order are Kafka's
 * (KafkaApis, SharePartitionManager). */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "server/rights/subject.h"
#include "server/share/share.h"
#include "wire/buffer.h"

#define SESSION_PARTITIONS_MAX 4096
#define SESSION_BYTES_MAX (64u << 20)
#define CONTROL_ARENA_DIVISOR 2 /* one request may use 1 / CONTROL_ARENA_DIVISOR of the control arena */
#define FINAL_EPOCH (-1)
#define MEMBER_ID_CHARACTERS_MAX 36

/* One partition that a request names. */
struct named_partition {
    uint8_t topic_id[16];
    int32_t partition_index;
    uint32_t order;                                  /* position in the request */
    uint32_t range_count, range_offset, range_bytes; /* its acknowledged ranges, in arrival->ranges */
    int16_t error;                                   /* error of its acknowledgements */
};
/* A request while it is being received. */
struct arrival {
    struct mqd_request *request;
    struct mqd_share_fetch_request wire; /* the parsed request */
    struct mqd_share_session *session;
    struct named_partition *named;
    uint32_t named_count;
    struct mqd_buffer ranges; /* encoded by mqd_share_range_put */
    bool acknowledges;        /* the request has acknowledgements for at least one partition */
};

/* ---- creation and destruction ---- */

bool mqd_shares_enabled(const struct mqd_reactor *r)
{
    return mqd_load_relaxed(&r->header->share_version) > 0;
}

struct mqd_shares *mqd_shares_of(struct mqd_reactor *r)
{
    if (r->shares)
        return r->shares;
    struct mqd_shares *shares = calloc(1, sizeof *shares);
    if (!shares)
        return NULL;
    shares->pool_bytes = r->options.share_bytes_max;
    shares->pool_memory =
        mmap(NULL, shares->pool_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    shares->chunk = malloc(MQD_SHARE_CHUNK_BYTES);
    shares->batches = malloc(MQD_SHARE_BATCHES_PER_RANGE * sizeof *shares->batches);
    shares->batch_positions = malloc((MQD_SHARE_BATCHES_PER_RANGE + 1) * sizeof *shares->batch_positions);
    mqd_list_init(&shares->runnable);
    mqd_list_init(&shares->unsent);
    mqd_list_init(&shares->touched);
    for (uint32_t i = 0; i < MQD_SHARE_WAIT_BUCKET_COUNT; i++)
        mqd_list_init(&shares->waiting[i]);
    shares->call_free = UINT32_MAX;
    shares->due_ms = MQD_SHARE_NEVER;
    shares->sessions.partition_count_max = SESSION_PARTITIONS_MAX;
    shares->sessions.bytes_max = SESSION_BYTES_MAX;
    r->shares = shares;
    if (shares->pool_memory == MAP_FAILED || !shares->chunk || !shares->batches || !shares->batch_positions) {
        mqd_shares_destroy(r);
        return NULL;
    }
    mqd_share_pool_init(&shares->pool, shares->pool_memory, shares->pool_bytes);
    return shares;
}

void mqd_shares_destroy(struct mqd_reactor *r)
{
    struct mqd_shares *shares = r->shares;
    if (!shares)
        return;
    shares->is_running = true; /* mqd_share_pump then runs no job */
    mqd_shares_owned_destroy(shares);
    for (uint32_t i = 0; i < shares->call_count; i++) {
        free(shares->calls[i]->payload);
        free(shares->calls[i]);
    }
    for (uint32_t i = 0; i < MQD_SHARE_SESSION_BUCKET_COUNT; i++)
        while (shares->sessions.buckets[i])
            mqd_share_session_close(&shares->sessions, shares->sessions.buckets[i]);
    if (shares->pool_memory != MAP_FAILED)
        munmap(shares->pool_memory, shares->pool_bytes);
    free(shares->calls);
    free(shares->chunk);
    free(shares->batches);
    free(shares->batch_positions);
    free(shares->keys.bytes);
    free(shares->keys.records);
    free(shares);
    r->shares = NULL;
}

/* ---- sessions ---- */

static void set_session_gauge(struct mqd_reactor *r)
{
    mqd_set_gauge(r, MQD_GAUGE_SHARE_SESSIONS, r->shares->sessions.count);
}

static bool is_session_limit_reached(const struct mqd_reactor *r)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < mqd_control_worker_count(r->options.control); i++)
        count += mqd_load_relaxed(&mqd_control_stats(r->options.control, i)->counter[MQD_GAUGE_SHARE_SESSIONS]);
    return count >= r->options.share_session_count_max;
}

/* Notifies the owner that the session no longer names the partition. */
static void leave_partition(struct mqd_reactor *r, const struct mqd_share_session *session,
                            const struct mqd_share_entry *entry, enum mqd_share_owner_request_kind kind)
{
    uint16_t owner;
    uint64_t generation;
    struct mqd_share_owner_request request = {.member = session->member,
                                              .partition_index = entry->partition_index,
                                              .group_bytes = (uint16_t)session->group_bytes,
                                              .kind = (uint8_t)kind};
    memcpy(request.topic_id, entry->topic_id, sizeof request.topic_id);
    if (entry->reported_generation && mqd_share_owner_of(r, entry->slot, &owner, &generation) == 0)
        mqd_share_call_owner(r, NULL, entry->slot, owner, generation, &request, session->text, NULL);
}

static void close_session(struct mqd_reactor *r, struct mqd_share_session *session,
                          enum mqd_share_owner_request_kind kind)
{
    for (uint32_t i = 0; i < session->entry_count; i++)
        leave_partition(r, session, &session->entries[i], kind);
    mqd_share_session_close(&r->shares->sessions, session);
    set_session_gauge(r);
}

void mqd_share_on_connection_closed(struct mqd_reactor *r, struct mqd_connection *c)
{
    while (!mqd_list_empty(&c->share_sessions))
        close_session(r, MQD_CONTAINER(c->share_sessions.next, struct mqd_share_session, node),
                      MQD_SHARE_REQUEST_RELEASE);
    mqd_share_pump(r);
}

/* ---- the partitions that a request names ---- */

void mqd_share_range_put(struct mqd_buffer *ranges, int64_t first, int64_t last, const uint8_t *types,
                         uint32_t type_count)
{
    mqd_put_bytes(ranges, &first, sizeof first);
    mqd_put_bytes(ranges, &last, sizeof last);
    mqd_put_bytes(ranges, &type_count, sizeof type_count);
    mqd_put_bytes(ranges, types, type_count);
}

/* Makes the checks that KafkaApis makes before it looks up the partition. `previous_last`: the last
 * offset of the partition's previous range. */
static bool is_valid_range(const struct mqd_share_fetch_acknowledgement *range, int64_t previous_last, bool is_renewal)
{
    if (range->first > range->last || range->first < previous_last)
        return false;
    if (range->type_count > 1 && (uint64_t)range->last - (uint64_t)range->first != (uint64_t)range->type_count - 1)
        return false;
    for (uint32_t i = 0; i < range->type_count; i++)
        if (range->types[i] >= MQD_SHARE_RENEW + (is_renewal ? 1 : 0))
            return false;
    return range->type_count > 0;
}

/* Adds the next partition of the request. Returns 0, or -1 if out of memory; the request has
 * already been parsed once, so parsing cannot fail. */
static int parse_partition(struct arrival *a, const struct mqd_share_fetch_topic *topic, uint32_t *capacity)
{
    struct mqd_share_fetch_partition partition;
    struct mqd_share_fetch_acknowledgement range;
    int64_t previous_last = -1;
    if (mqd_share_fetch_next_partition(&a->wire, &partition))
        return -1;
    if (a->named_count == *capacity) {
        uint32_t new_capacity = *capacity ? *capacity * 2 : 8;
        struct named_partition *grown = realloc(a->named, new_capacity * sizeof *grown);
        if (!grown)
            return -1;
        a->named = grown;
        *capacity = new_capacity;
    }
    struct named_partition *named = &a->named[a->named_count];
    *named = (struct named_partition){.partition_index = partition.partition_index,
                                      .order = a->named_count,
                                      .range_count = (uint32_t)partition.acknowledgement_count,
                                      .range_offset = a->ranges.size_bytes};
    memcpy(named->topic_id, topic->topic_id, sizeof named->topic_id);
    a->named_count++;
    a->acknowledges |= partition.acknowledgement_count > 0;
    for (int32_t i = 0; i < partition.acknowledgement_count; i++) {
        if (mqd_share_fetch_next_acknowledgement(&a->wire, &range))
            return -1;
        if (!is_valid_range(&range, previous_last, a->wire.is_renewal))
            named->error = MQD_KAFKA_INVALID_REQUEST;
        previous_last = range.last;
        mqd_share_range_put(&a->ranges, range.first, range.last, range.types, range.type_count);
    }
    named->range_bytes = a->ranges.size_bytes - named->range_offset;
    return a->ranges.failed ? -1 : 0;
}

static int compare_partition_ids(const uint8_t *left_id, int32_t left_index, const uint8_t *right_id,
                                 int32_t right_index)
{
    int order = memcmp(left_id, right_id, 16);
    return order ? order : left_index < right_index ? -1 : left_index > right_index;
}

static int by_partition_id(const void *left, const void *right)
{
    const struct named_partition *a = left, *b = right;
    int order = compare_partition_ids(a->topic_id, a->partition_index, b->topic_id, b->partition_index);
    return order ? order : a->order < b->order ? -1 : 1;
}

/* Sorts the named partitions. If a partition is named twice, only its last occurrence is kept. */
static void sort_partitions(struct arrival *a)
{
    uint32_t kept_count = 0;
    if (a->named_count)
        qsort(a->named, a->named_count, sizeof *a->named, by_partition_id);
    for (uint32_t i = 0; i < a->named_count; i++) {
        bool is_repeated = kept_count && compare_partition_ids(a->named[kept_count - 1].topic_id,
                                                               a->named[kept_count - 1].partition_index,
                                                               a->named[i].topic_id, a->named[i].partition_index) == 0;
        a->named[is_repeated ? kept_count - 1 : kept_count++] = a->named[i];
    }
    a->named_count = kept_count;
}

static int parse_partitions(struct arrival *a)
{
    uint32_t capacity = 0;
    for (int32_t t = 0; t < a->wire.topic_count; t++) {
        struct mqd_share_fetch_topic topic;
        if (mqd_share_fetch_next_topic(&a->wire, &topic))
            return -1;
        for (int32_t p = 0; p < topic.partition_count; p++)
            if (parse_partition(a, &topic, &capacity))
                return -1;
    }
    sort_partitions(a);
    return 0;
}

static int forget_partitions(struct mqd_reactor *r, struct arrival *a)
{
    int32_t topic_count, partition_index;
    if (mqd_share_fetch_begin_forgotten(&a->wire, &topic_count))
        return -1;
    for (int32_t t = 0; t < topic_count; t++) {
        struct mqd_share_fetch_topic topic;
        if (mqd_share_fetch_next_topic(&a->wire, &topic))
            return -1;
        for (int32_t p = 0; p < topic.partition_count; p++) {
            if (mqd_share_fetch_next_forgotten_partition(&a->wire, &partition_index))
                return -1;
            struct mqd_share_entry *entry =
                a->session ? mqd_share_session_get(a->session, topic.topic_id, partition_index) : NULL;
            if (!entry)
                continue;
            leave_partition(r, a->session, entry, MQD_SHARE_REQUEST_FORGET);
            mqd_share_session_remove(a->session, entry);
        }
    }
    return 0;
}

/* ---- the request as a whole ---- */

static bool is_member_id(struct mqd_text id)
{
    int characters = 0;
    for (int32_t i = 0; i < id.size_bytes; i++)
        characters += (id.bytes[i] & 0xc0) != 0x80; /* counts UTF-8 characters */
    return characters > 0 && characters <= MEMBER_ID_CHARACTERS_MAX;
}

/* Finds or opens the request's session. Returns 0, or the error of the whole request. */
static int16_t admit(struct mqd_reactor *r, struct arrival *a)
{
    struct mqd_connection *c = a->request->connection;
    const struct mqd_share_fetch_request *wire = &a->wire;
    bool is_fetch = wire->api_key == MQD_API_SHARE_FETCH;
    if (wire->group_id.size_bytes <= 0 || !is_member_id(wire->member_id))
        return MQD_KAFKA_INVALID_REQUEST;
    if (!mqd_subject_is_allowed_by_name(r, c, MQD_RESOURCE_GROUP, wire->group_id.bytes, wire->group_id.size_bytes,
                                        MQD_OPERATION_READ))
        return MQD_KAFKA_GROUP_AUTHORIZATION_FAILED;
    if (is_fetch && wire->is_renewal && (wire->wait_ms_max || wire->bytes_min || wire->bytes_max || wire->records_max))
        return MQD_KAFKA_INVALID_REQUEST;
    if (is_fetch && wire->session_epoch == 0 && a->acknowledges)
        return MQD_KAFKA_INVALID_REQUEST;
    struct mqd_share_sessions *sessions = &r->shares->sessions;
    a->session = mqd_share_session_find(sessions, wire->group_id, wire->member_id);
    int16_t error =
        mqd_share_session_check(a->session, wire->session_epoch, is_fetch ? MQD_SHARE_MAY_OPEN : MQD_SHARE_MUST_EXIST);
    if (error)
        return error;
    if (wire->session_epoch > 0)
        mqd_share_session_advance_epoch(a->session);
    if (wire->session_epoch)
        return 0;
    if (a->session)
        close_session(r, a->session, MQD_SHARE_REQUEST_FORGET);
    a->session = is_session_limit_reached(r)
                     ? NULL
                     : mqd_share_session_open(sessions, wire->group_id, wire->member_id, &c->share_sessions);
    set_session_gauge(r);
    return a->session ? 0 : MQD_KAFKA_SHARE_SESSION_LIMIT_REACHED;
}

static struct mqd_share_job *make_job(struct mqd_reactor *r, struct arrival *a, uint32_t part_count)
{
    const struct mqd_share_fetch_request *wire = &a->wire;
    uint32_t group_bytes = (uint32_t)wire->group_id.size_bytes;
    uint64_t bytes = sizeof(struct mqd_share_job) + part_count * sizeof(struct mqd_share_part) + group_bytes;
    struct mqd_share_job *job = mqd_request_charge(r, a->request, bytes) ? calloc(1, bytes) : NULL;
    if (!job)
        return NULL;
    mqd_list_init(&job->node);
    job->request = a->request;
    job->parts = (struct mqd_share_part *)(job + 1);
    job->group = (uint8_t *)(job->parts + part_count);
    memcpy(job->group, wire->group_id.bytes, group_bytes);
    job->group_bytes = (uint16_t)group_bytes;
    job->member = mqd_share_member_hash(wire->member_id.bytes, (uint32_t)wire->member_id.size_bytes);
    job->opens = wire->session_epoch == 0;
    job->lock_ms = a->session ? a->session->lock_ms : 0;
    job->session_hash = a->session ? a->session->hash : 0;
    job->session_number = a->session ? a->session->number : 0;
    job->records_max = wire->records_max > 0 ? (uint32_t)wire->records_max : 0;
    job->bytes_max = a->request->bytes_max > 0 ? (uint32_t)a->request->bytes_max : 0;
    job->bytes_min = wire->bytes_min > 0 ? (uint32_t)wire->bytes_min : 0;
    if (job->bytes_min > job->bytes_max)
        job->bytes_min = job->bytes_max;
    job->strict = wire->acquire_mode == 1;
    /* wire->bytes_max: if a quota sets job->bytes_max to 0, one batch is still returned */
    job->fetches = wire->api_key == MQD_API_SHARE_FETCH && wire->session_epoch != FINAL_EPOCH && !wire->is_renewal &&
                   job->records_max && wire->bytes_max;
    job->expired = wire->wait_ms_max <= 0;
    job->measures = job->bytes_min > 1 && !job->expired;
    a->request->share = job;
    return job;
}

/* Finds the topic and slot of a part. Returns 0, or the error if the part cannot be used. */
static int16_t resolve(struct mqd_reactor *r, struct mqd_share_part *part)
{
    struct mqd_topic *topic = mqd_topics_find_by_id(&r->topics, part->topic_id);
    part->slot = MQD_SLOT_NONE;
    if (!topic)
        return MQD_KAFKA_UNKNOWN_TOPIC_ID;
    topic->reference_count++;
    part->topic = topic;
    if (!mqd_subject_is_allowed(r, part->job->request->connection, topic, MQD_OPERATION_READ))
        return MQD_KAFKA_TOPIC_AUTHORIZATION_FAILED;
    if (topic->view)
        return MQD_KAFKA_INVALID_TOPIC;
    if (part->partition_index < 0 || (uint32_t)part->partition_index >= topic->partition_count)
        return MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION;
    part->slot = topic->slots[part->partition_index];
    return part->slot == MQD_SLOT_NONE || mqd_subject_is_stale(r) ? MQD_KAFKA_NOT_LEADER_OR_FOLLOWER : 0;
}

static struct mqd_share_part *add_part(struct mqd_reactor *r, struct mqd_share_job *job, const uint8_t *topic_id,
                                       int32_t partition_index)
{
    struct mqd_share_part *part = &job->parts[job->part_count++];
    part->job = job;
    part->partition_index = partition_index;
    memcpy(part->topic_id, topic_id, sizeof part->topic_id);
    mqd_list_init(&part->waiter_node);
    part->error = resolve(r, part);
    /* another host leads the partition, or no host does: the client has to find the leader */
    job->failed |= job->fetches && part->error == MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    return part;
}

/* If the partition's owner has not counted the session yet, sets part->joins, so that the next
 * request to the owner registers the session (H5). */
static void join_partition(struct mqd_reactor *r, struct mqd_share_part *part, struct mqd_share_entry *entry)
{
    uint16_t owner;
    uint64_t generation;
    if (part->error || mqd_share_owner_of(r, part->slot, &owner, &generation))
        return;
    part->joins = entry->reported_generation != generation + 1 || entry->slot != part->slot;
    entry->reported_generation = generation + 1;
    entry->slot = part->slot;
}

void mqd_share_rejoin(struct mqd_reactor *r, const struct mqd_share_part *part)
{
    const struct mqd_share_job *job = part->job;
    struct mqd_share_session *session =
        mqd_share_session_find_by_number(&r->shares->sessions, job->session_hash, job->session_number);
    struct mqd_share_entry *entry =
        session ? mqd_share_session_get(session, part->topic_id, part->partition_index) : NULL;
    if (entry)
        entry->reported_generation = 0;
}

static void acknowledge(struct mqd_reactor *r, struct arrival *a, struct mqd_share_part *part,
                        const struct named_partition *named)
{
    struct mqd_share_job *job = part->job;
    struct mqd_buffer ranges = {.bytes = a->ranges.bytes + named->range_offset, .size_bytes = named->range_bytes};
    uint16_t owner;
    uint64_t generation;
    struct mqd_share_owner_request request = {.member = job->member,
                                              .partition_index = part->partition_index,
                                              .range_count = named->range_count,
                                              .group_bytes = job->group_bytes,
                                              .kind = MQD_SHARE_REQUEST_ACKNOWLEDGE,
                                              .joins = part->joins};
    int16_t *error = a->wire.api_key == MQD_API_SHARE_FETCH ? &part->acknowledge_error : &part->error;
    part->acknowledges = named->range_count > 0;
    if (!a->acknowledges)
        return;
    *error = part->error == MQD_KAFKA_UNKNOWN_TOPIC_ID || !named->error ? part->error : named->error;
    if (!part->acknowledges)
        return;
    job->has_valid_acknowledgement |= !*error || *error == MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (!*error)
        *error = mqd_share_owner_of(r, part->slot, &owner, &generation);
    if (*error)
        return;
    memcpy(request.topic_id, part->topic_id, sizeof request.topic_id);
    part->joins = 0;
    job->pending_acknowledgements++;
    if (!mqd_share_call_owner(r, part, part->slot, owner, generation, &request, job->group, &ranges)) {
        job->pending_acknowledgements--;
        part->joins = request.joins;
        *error = MQD_KAFKA_REQUEST_TIMED_OUT;
    }
}

/* False for a ShareFetch that does not read the partition, because it ends the session or forgets
 * the partition: the response then has only the outcome of its acknowledgements. */
static bool is_read_or_acknowledged(const struct arrival *a, const struct named_partition *named)
{
    return a->wire.api_key != MQD_API_SHARE_FETCH ||
           (a->wire.session_epoch != FINAL_EPOCH &&
            mqd_share_session_get(a->session, named->topic_id, named->partition_index));
}

/* Sets each part's rank to the share priority of its partition. If fewer than
 * MQD_SHARE_RESERVE_DIVISOR records are requested, none can be reserved for lower ranks; instead,
 * one request in MQD_SHARE_RESERVE_DIVISOR begins with the lowest rank. */
static void assign_ranks(struct mqd_reactor *r, struct mqd_share_job *job, uint32_t request_number)
{
    bool lowest_first = job->records_max < MQD_SHARE_RESERVE_DIVISOR &&
                        request_number % MQD_SHARE_RESERVE_DIVISOR == MQD_SHARE_RESERVE_DIVISOR - 1;
    job->rank = -1;
    for (uint32_t i = 0; i < job->part_count && job->fetches; i++) {
        struct mqd_share_part *part = &job->parts[i];
        if (part->slot != MQD_SLOT_NONE)
            part->rank = mqd_load_relaxed(&mqd_control_partition(r->options.control, part->slot)->share_priority);
        if (lowest_first)
            part->rank = UINT8_MAX - part->rank;
        job->ranked |= part->rank != job->parts[0].rank;
    }
}

/* Creates one part for each partition of the session and for each partition that the request names;
 * both lists are sorted. */
static void make_parts(struct mqd_reactor *r, struct arrival *a, struct mqd_share_job *job)
{
    uint32_t entry_count = a->session && job->fetches ? a->session->entry_count : 0;
    for (uint32_t e = 0, n = 0; e < entry_count || n < a->named_count;) {
        struct mqd_share_entry *entry = e < entry_count ? &a->session->entries[e] : NULL;
        struct named_partition *named = n < a->named_count ? &a->named[n] : NULL;
        int order = !entry   ? 1
                    : !named ? -1
                             : compare_partition_ids(entry->topic_id, entry->partition_index, named->topic_id,
                                                     named->partition_index);
        struct mqd_share_part *part = order <= 0 ? add_part(r, job, entry->topic_id, entry->partition_index)
                                                 : add_part(r, job, named->topic_id, named->partition_index);
        if (order <= 0) {
            part->reads = part->ready = job->fetches;
            join_partition(r, part, entry);
            part->unreported = entry->unreported;
            if (job->fetches)
                entry->unreported = part->error != 0; /* the partition is reported again once it can be read */
            e++;
        }
        if (order >= 0) {
            part->named_with_acknowledgements = a->acknowledges;
            n++;
            acknowledge(r, a, part, named);
            if (!is_read_or_acknowledged(a, named))
                part->error = 0;
        }
    }
    assign_ranks(r, job, a->session ? a->session->request_number : 0);
    if (a->session && job->part_count)
        job->first_part = a->session->request_number++ % job->part_count;
}

static int accept_request(struct mqd_reactor *r, struct arrival *a)
{
    struct mqd_share_sessions *sessions = &r->shares->sessions;
    bool is_fetch = a->wire.api_key == MQD_API_SHARE_FETCH, is_final = a->wire.session_epoch == FINAL_EPOCH;
    if (parse_partitions(a))
        return mqd_error_set(MQD_E_INVALID, "out of memory for the partitions of a share group's request");
    a->request->share_error = admit(r, a);
    if (a->request->share_error)
        return 0;
    for (uint32_t i = 0; is_fetch && !is_final && i < a->named_count; i++) {
        uint32_t old_count = a->session->entry_count;
        struct mqd_share_entry *entry =
            mqd_share_session_put(sessions, a->session, a->named[i].topic_id, a->named[i].partition_index);
        if (!entry)
            return mqd_error_set(MQD_E_INVALID, "a share session has more than %d partitions, or memory ran out",
                                 SESSION_PARTITIONS_MAX);
        if (a->session->entry_count > old_count)
            entry->unreported = a->wire.session_epoch != 0;
    }
    if (is_fetch && forget_partitions(r, a))
        return -1;
    struct mqd_share_job *job = make_job(r, a, a->session->entry_count + a->named_count);
    if (!job)
        return mqd_error_set(MQD_E_INVALID, "no memory for a share group's request (queued.max.request.bytes)");
    make_parts(r, a, job);
    if (is_final)
        close_session(r, a->session, MQD_SHARE_REQUEST_RELEASE); /* H1: only after the acknowledgements are sent */
    mqd_share_schedule(r, job);
    return 0;
}

static void limit_bytes(struct mqd_reactor *r, struct arrival *a)
{
    struct mqd_connection *c = a->request->connection;
    a->request->wait_ms = a->wire.wait_ms_max;
    a->request->bytes_max = a->wire.bytes_max < 0 || (uint32_t)a->wire.bytes_max > r->options.fetch_bytes_max
                                ? (int32_t)r->options.fetch_bytes_max
                                : a->wire.bytes_max;
    if (r->quota_kinds && c->peer_node < 0)
        a->request->bytes_max = mqd_throttle_fetch_bytes_max(r, c, a->request->bytes_max);
}

void mqd_share_on_request(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                          const uint8_t *body, uint32_t size_bytes)
{
    struct arrival a = {0};
    if (size_bytes >
        (uint64_t)mqd_arena_extents_total(r->control_arena) * MQD_CONTROL_EXTENT_BYTES / CONTROL_ARENA_DIVISOR) {
        mqd_connection_fail(r, c,
                            "a ShareFetch or ShareAcknowledge request is larger than an eighth of receive.arena.bytes");
        return;
    }
    if (mqd_share_fetch_parse(body, size_bytes, header->api_key, header->api_version, &a.wire) < 0) {
        mqd_connection_fail(r, c, mqd_error_message());
        return;
    }
    a.request = mqd_shares_of(r) ? mqd_request_new(r, c, header, MQD_REQUEST_SHARE) : NULL;
    if (!a.request) {
        mqd_connection_close(r, c, "out of memory");
        return;
    }
    limit_bytes(r, &a);
    int failed = accept_request(r, &a);
    free(a.named);
    mqd_buffer_free(&a.ranges);
    if (failed) {
        mqd_connection_fail(r, c, mqd_error_message());
        return;
    }
    if (a.request->share_error)
        mqd_request_complete(r, a.request);
    mqd_share_pump(r);
}
