/* Fetch: finds what a consumer may read, parks the request while there are too few bytes (without
 * polling), and answers with ranges of segment files.
 *
 * Any worker serves any partition: positions come from the partition table, bytes from the files. A
 * parked fetch sets this worker's bit in each slot it waits on, then reads the high watermark
 * again; the owner publishes it, then checks the bits. At least one of them sees the other's store.
 *
 *   request -> (its turn on the connection) evaluate -> parked | ranges found
 *   (server/fetch/range.c) -> (cold ranges: read ahead) -> encode (server/fetch/response.c)
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/reactor.h"
#include "server/rights/subject.h"
#include "server/share/share.h"
#include "server/slow/slow.h"

#define CONSUMER_REPLICA_ID (-1)
#define DEBUGGING_REPLICA_ID (-2)

#define CLUSTER_AUTHORIZATION_FAILED 31
/* at most this many of the 256 parallel file operations may be cold reads; beyond that, only the
 * first cold read of each request is started */
#define COLD_READ_COUNT_MAX 128
/* a parked follower receives a new high watermark after this delay, or earlier together with new
 * records; consumers that read from followers need it (KIP-392) */
#define HW_PUSH_MS 10
#define LEADER_ONLY_VERSION_MAX 10 /* in later versions clients may read from followers (KIP-392) */

/* ---- arrival ---- */

static int take_partitions(struct mqd_reactor *r, struct mqd_fetch_request *fetch, struct mqd_fetch_set *set)
{
    for (int32_t t = 0; t < fetch->topic_count; t++) {
        struct mqd_fetch_topic topic;
        if (mqd_fetch_next_topic(fetch, &topic) < 0)
            return -1;
        for (int32_t p = 0; p < topic.partition_count; p++) {
            struct mqd_fetch_partition partition;
            if (mqd_fetch_next_partition(fetch, &partition) < 0)
                return -1;
            if (!mqd_fetch_set_put(r, set, &topic.key, &partition))
                return -1;
        }
    }
    int32_t forgotten_count;
    if (mqd_fetch_begin_forgotten(fetch, &forgotten_count) < 0)
        return -1;
    for (int32_t t = 0; t < forgotten_count; t++) {
        struct mqd_fetch_topic topic;
        if (mqd_fetch_next_forgotten_topic(fetch, &topic) < 0)
            return -1;
        for (int32_t p = 0; p < topic.partition_count; p++) {
            int32_t partition_index;
            if (mqd_fetch_next_forgotten_partition(fetch, &partition_index) < 0)
                return -1;
            mqd_fetch_set_remove(set, &topic.key, partition_index);
        }
    }
    if (mqd_fetch_end(fetch) < 0)
        return -1;
    if (forgotten_count)
        mqd_fetch_set_compact(r, set);
    return 0;
}

/* A follower's replica id must be that of the host that its connection has authenticated as; no
 * other client may fetch as a replica. kafka-replica-verification is a consumer that uses
 * DEBUGGING_REPLICA_ID. */
static bool may_fetch_as(const struct mqd_connection *c, int32_t replica_id)
{
    return replica_id == CONSUMER_REPLICA_ID || replica_id == DEBUGGING_REPLICA_ID ||
           (replica_id >= 0 && c->peer_node == replica_id);
}

static int fetch_accept(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_request *fetch)
{
    struct mqd_fetch_set *set;
    bool full, create;
    request->fetch_error = may_fetch_as(request->connection, fetch->replica_id)
                               ? mqd_session_begin_request(r, request->connection, fetch, &set, &full, &create)
                               : CLUSTER_AUTHORIZATION_FAILED;
    if (request->fetch_error)
        return 0;
    if (!set && !(set = mqd_fetch_set_new(r)))
        return mqd_error_set(ENOMEM, "out of memory for a fetch");
    request->set = set;
    set->request_count++;
    request->lists_all = full;
    set->by_id = fetch->version >= 13;
    set->leader_only = fetch->version <= LEADER_ONLY_VERSION_MAX;
    set->is_local = request->connection->local != NULL;
    set->replica_id = fetch->replica_id;
    set->replica_epoch = fetch->replica_epoch;
    set->rack_hash = request->connection->local ? 0 : mqd_nearest_rack_hash(r, fetch);
    if (take_partitions(r, fetch, set) < 0)
        return -1;
    if (create)
        mqd_session_create(r, request->connection, set);
    if (set->replica_id >= 0) {
        request->isolation_level = 0;
        mqd_leading_record_positions(r, set);
    }
    return 0;
}

void mqd_fetch_on_request(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                          const uint8_t *body, uint32_t size_bytes)
{
    struct mqd_fetch_request fetch;
    if (mqd_fetch_parse(body, size_bytes, header->api_version, &fetch) < 0) {
        mqd_connection_fail(r, c, mqd_error_message());
        return;
    }
    struct mqd_request *request = mqd_request_new(r, c, header, MQD_REQUEST_FETCH);
    if (!request) {
        mqd_connection_close(r, c, "out of memory");
        return;
    }
    request->wait_ms = fetch.wait_ms_max;
    request->bytes_min = fetch.bytes_min;
    /* a negative limit is treated as 0: at most one batch is returned */
    request->bytes_max = fetch.bytes_max < 0                                      ? 0
                         : (uint32_t)fetch.bytes_max > r->options.fetch_bytes_max ? (int32_t)r->options.fetch_bytes_max
                                                                                  : fetch.bytes_max;
    request->positions_only = c->local && fetch.bytes_max == 0;
    if (r->quota_kinds && !request->positions_only && c->peer_node < 0) {
        request->bytes_max = mqd_throttle_fetch_bytes_max(r, c, request->bytes_max);
        request->bytes_min = request->bytes_min < request->bytes_max ? request->bytes_min
                             : request->bytes_max > 0                ? request->bytes_max
                                                                     : 1;
    }
    request->isolation_level = fetch.replica_id == CONSUMER_REPLICA_ID ? fetch.isolation_level : 0;
    if (fetch_accept(r, request, &fetch) < 0) {
        mqd_connection_fail(r, c, mqd_error_message());
        return;
    }
    if (request->fetch_error)
        mqd_request_complete(r, request);
    if (c->peer_node >= 0 && c->head != request && c->head->kind == MQD_REQUEST_FETCH)
        /* a follower that sends another request needs the response to its previous one now */
        mqd_fetch_evaluate(r, c->head, true);
    /* evaluated when the connection's responses are sent, in this turn */
    if (c->head == request && !mqd_list_linked(&c->response_node))
        mqd_list_append(&r->to_respond, &c->response_node);
}

/* ---- one entry ---- */

/* Checked at every evaluation, because rights may have changed. An unknown name is refused
 * like a known one; an unknown id gets UNKNOWN_TOPIC_ID. */
static bool may_read(struct mqd_reactor *r, const struct mqd_fetch_entry *entry)
{
    const struct mqd_request *request = entry->set->request;
    if (r->options.rights == MQD_RIGHTS_OFF || entry->set->replica_id >= 0)
        return true;
    if (!request || !request->connection)
        return false;
    if (entry->topic)
        return mqd_subject_is_allowed(r, request->connection, entry->topic, MQD_OPERATION_READ);
    return entry->key.by_id ||
           mqd_subject_is_allowed_by_name(r, request->connection, MQD_RESOURCE_TOPIC, entry->key.name.bytes,
                                          entry->key.name.size_bytes, MQD_OPERATION_READ);
}

int16_t mqd_fetch_entry_check_and_record(struct mqd_reactor *r, struct mqd_fetch_entry *entry, uint32_t *slot_index,
                                         struct mqd_positions *positions)
{
    memset(positions, 0xff, sizeof *positions);
    bool known = (entry->topic && !entry->topic->removed) || mqd_fetch_entry_resolve(r, entry);
    if (__builtin_expect(r->options.rights != MQD_RIGHTS_OFF, 0) && !may_read(r, entry))
        return MQD_KAFKA_TOPIC_AUTHORIZATION_FAILED;
    if (__builtin_expect(mqd_subject_is_stale(r), 0) && entry->set->replica_id < 0)
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (!known)
        return entry->key.by_id ? MQD_KAFKA_UNKNOWN_TOPIC_ID : MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION;
    const struct mqd_topic *topic = entry->topic;
    if (entry->partition_index < 0 || (uint32_t)entry->partition_index >= topic->partition_count)
        return MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION;
    *slot_index = topic->slots[entry->partition_index];
    if (topic->view && entry->set->replica_id >= 0)
        return MQD_KAFKA_UNKNOWN_TOPIC_ID; /* a view has no log to replicate */
    if (topic->view && entry->set->is_local)
        /* a local client would read the base topic's files; after this error it fetches over TCP */
        return MQD_KAFKA_REPLICA_NOT_AVAILABLE;
    bool led_elsewhere =
        entry->set->is_local && mqd_topics_is_led_elsewhere(&r->topics, &topic->partitions[entry->partition_index]);
    if (*slot_index == MQD_SLOT_NONE)
        return led_elsewhere ? MQD_KAFKA_REPLICA_NOT_AVAILABLE : MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (entry->set->replica_id >= 0)
        return mqd_leading_fetch(r, entry, *slot_index, positions);
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, *slot_index);
    uint8_t state = mqd_load_acquire(&slot->state);
    if (state == MQD_SLOT_OFFLINE && led_elsewhere)
        return MQD_KAFKA_REPLICA_NOT_AVAILABLE;
    if (state != MQD_SLOT_ONLINE && state != MQD_SLOT_OFFLINE)
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (mqd_load_acquire(&slot->version) == 0)
        return MQD_KAFKA_STORAGE_ERROR; /* the log could not be opened */
    uint8_t role = mqd_load_acquire(&slot->role);
    if (role != MQD_ROLE_LEADS && (role == MQD_ROLE_NONE || entry->set->leader_only))
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    int32_t leader_epoch = mqd_load_relaxed(&slot->leader_epoch);
    if (entry->current_leader_epoch >= 0 && entry->current_leader_epoch != leader_epoch)
        return entry->current_leader_epoch < leader_epoch ? MQD_KAFKA_FENCED_LEADER_EPOCH
                                                          : MQD_KAFKA_UNKNOWN_LEADER_EPOCH;
    mqd_slot_positions(slot, positions);
    if (led_elsewhere && mqd_load_acquire(&slot->lagging) &&
        (entry->fetch_offset < positions->log_start_offset || entry->fetch_offset >= positions->high_watermark))
        return MQD_KAFKA_REPLICA_NOT_AVAILABLE;
    if (__builtin_expect(topic->view != NULL, 0))
        mqd_view_restore_skipped(r, entry, leader_epoch);
    /* a follower may lag, so a client that reads from it waits */
    bool beyond = entry->fetch_offset > positions->log_end_offset && role == MQD_ROLE_LEADS;
    if (beyond && r->lease_lost)
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER; /* this host may lag too: another host may be the leader by now */
    if (beyond || mqd_fetch_position(entry) < positions->log_start_offset)
        return MQD_KAFKA_OFFSET_OUT_OF_RANGE;
    return 0;
}

/* Makes the entry wait on the slot. Returns false if the readable end, or the right to read, has
 * changed since `surveyed`: the caller must evaluate the entry again. */
static bool entry_wait(struct mqd_reactor *r, const struct mqd_request *request, struct mqd_fetch_entry *entry,
                       uint32_t slot_index, const struct mqd_positions *surveyed)
{
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, slot_index);
    /* a follower's fetch waits on the partition's owner, which is this worker, so nothing can
     * change */
    if (entry->set->replica_id >= 0) {
        if (!mqd_list_linked(&entry->waiter))
            mqd_list_append(&r->owned[slot_index]->followers_waiting, &entry->waiter);
        return true;
    }
    if (!mqd_list_linked(&entry->waiter))
        mqd_list_append(&r->waiting[slot_index], &entry->waiter);
    mqd_fetch_or(&slot->waiters, 1ull << r->options.self);
    struct mqd_positions positions;
    uint32_t slot_now;
    if (mqd_fetch_entry_check_and_record(r, entry, &slot_now, &positions) || slot_now != slot_index)
        return false;
    return mqd_fetch_readable_end(request, &positions) == mqd_fetch_readable_end(request, surveyed);
}

static void make_ready(struct mqd_fetch_entry *entry)
{
    mqd_list_remove(&entry->waiter);
    if (!mqd_list_linked(&entry->ready))
        mqd_list_append(&entry->set->ready, &entry->ready);
}

/* ---- evaluation ---- */

/* Returns the number of bytes that an entry contributes to bytes_min. Segments that this worker has
 * not listed yet, or that were rolled since, are listed first: an estimate would end the wait too
 * early. */
static int64_t entry_available(struct mqd_reactor *r, const struct mqd_request *request, struct mqd_fetch_entry *entry,
                               uint32_t slot, const struct mqd_positions *published)
{
    struct mqd_positions positions = *published;
    int64_t end_offset = mqd_fetch_readable_end(request, published);
    uint64_t generation = mqd_load_acquire(&mqd_control_partition(r->options.control, slot)->segments_generation);
    const struct mqd_counted_bytes *counted = &entry->counted;
    int64_t offset = mqd_fetch_position(entry);
    if (counted->bytes && counted->offset == offset && counted->end_offset == end_offset &&
        counted->generation == generation && counted->slot == slot)
        return counted->bytes > (uint64_t)entry->bytes_max ? entry->bytes_max : (int64_t)counted->bytes;
    if (end_offset < positions.high_watermark) {
        mqd_fetch_ensure_path(r, entry->topic, entry->partition_index, slot);
        if (mqd_reader_limit_positions(r->reader, slot, generation, end_offset, &positions))
            return entry->bytes_max; /* mqd_fetch_find_range will report the error */
    }
    uint64_t bytes = mqd_reader_available_bytes(r->reader, slot, &positions, offset, &entry->cursor);
    if (bytes == UINT64_MAX) {
        struct mqd_range none; /* of zero bytes, so it references no segment */
        mqd_fetch_ensure_path(r, entry->topic, entry->partition_index, slot);
        if (mqd_reader_find(r->reader, slot, &positions, generation, offset, 0, false, &entry->cursor, &none) == 0)
            bytes = mqd_reader_available_bytes(r->reader, slot, &positions, offset, &entry->cursor);
    }
    entry->counted = (struct mqd_counted_bytes){.offset = offset,
                                                .end_offset = end_offset,
                                                .generation = generation,
                                                .bytes = bytes == UINT64_MAX ? 0 : bytes,
                                                .slot = slot};
    return bytes > (uint64_t)entry->bytes_max ? entry->bytes_max : (int64_t)bytes;
}

/* Whether these values differ from the last response that named the partition, if any. After an
 * error they always differ, because the error's high watermark was -1. */
static bool has_changed(const struct mqd_fetch_entry *entry, int16_t error, int64_t high_watermark, int64_t last_stable,
                        int64_t log_start)
{
    return !entry->sent_once || error != entry->sent_error || high_watermark != entry->sent_high_watermark ||
           last_stable != entry->sent_last_stable || log_start != entry->sent_log_start;
}

/* Makes one entry wait on its slot; returns what it contributes to bytes_min. If the high watermark
 * has moved, the owner may have checked before the bit was set, so the entry is evaluated again. An
 * error is reported immediately, other changes with the next records or when the wait ends. */
static int64_t entry_survey(struct mqd_reactor *r, const struct mqd_request *request, struct mqd_fetch_entry *entry,
                            int64_t bytes_min)
{
    for (int tries = 0; tries < 4; tries++) {
        struct mqd_positions positions;
        uint32_t slot;
        if (mqd_fetch_entry_check_and_record(r, entry, &slot, &positions))
            return bytes_min;
        bool at_end = mqd_fetch_position(entry) >= mqd_fetch_readable_end(request, &positions);
        if (entry->set->rack_hash && mqd_nearest_replica(r, entry->set, slot) >= 0)
            return bytes_min; /* to be reported immediately */
        if (!at_end && bytes_min == 1)
            return 1;
        int64_t bytes = at_end ? 0 : entry_available(r, request, entry, slot, &positions);
        if (entry_wait(r, request, entry, slot, &positions)) {
            if (at_end && !has_changed(entry, 0, positions.high_watermark, positions.last_stable_offset,
                                       positions.log_start_offset))
                mqd_list_remove(&entry->ready);
            return bytes;
        }
    }
    return bytes_min; /* records arrive faster than they are counted */
}

/* Like entry_survey, for a follower, which waits for any record. If only its watermarks have
 * changed, the entry stays ready, and the request waits at most HW_PUSH_MS longer. */
static int64_t follower_survey(struct mqd_reactor *r, const struct mqd_request *request, struct mqd_fetch_entry *entry)
{
    struct mqd_positions positions;
    uint32_t slot;
    if (mqd_fetch_entry_check_and_record(r, entry, &slot, &positions) || entry->outcome.has_diverging_epoch ||
        entry->fetch_offset < positions.high_watermark)
        return 1;
    bool watermarks_changed = !entry->sent_once || entry->high_watermark != entry->sent_high_watermark ||
                              positions.log_start_offset != entry->sent_log_start;
    entry_wait(r, request, entry, slot, &positions);
    if (watermarks_changed)
        entry->set->watermarks_changed = true;
    else
        mqd_list_remove(&entry->ready);
    return 0;
}

/* Evaluates the ready entries; those that have been read to the end wait on their slots. Returns
 * how many bytes can be sent. */
static int64_t survey(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_fetch_set *set = request->set;
    int64_t bytes_min = request->bytes_min > 0 ? request->bytes_min : 1, available = 0;
    set->watermarks_changed = false;
    MQD_LIST_EACH(node, next, &set->ready) {
        struct mqd_fetch_entry *entry = MQD_CONTAINER(node, struct mqd_fetch_entry, ready);
        available +=
            set->replica_id >= 0 ? follower_survey(r, request, entry) : entry_survey(r, request, entry, bytes_min);
    }
    return available;
}

static bool include(struct mqd_fetch_set *set, struct mqd_fetch_entry *entry)
{
    if (set->included_count == set->included_capacity) {
        uint32_t capacity = set->included_capacity ? set->included_capacity * 2 : 16;
        struct mqd_fetch_entry **included = realloc(set->included, sizeof *included * capacity);
        if (!included)
            return false;
        set->included = included;
        set->included_capacity = capacity;
    }
    set->included[set->included_count++] = entry;
    return true;
}

static void collect_entry(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry,
                          int64_t *budget, bool *no_range_yet)
{
    struct mqd_positions positions;
    uint32_t slot = UINT32_MAX;
    entry->outcome = (struct mqd_fetch_outcome){.partition_index = entry->partition_index};
    entry->range = (struct mqd_range){0};
    entry->outcome.read_committed = request->isolation_level != 0;
    entry->outcome.error = mqd_fetch_entry_check_and_record(r, entry, &slot, &positions);
    int32_t nearest =
        entry->outcome.error == 0 && request->set->rack_hash ? mqd_nearest_replica(r, request->set, slot) : -1;
    if (nearest >= 0) {
        entry->outcome.has_preferred = true;
        entry->outcome.preferred_read_replica = nearest;
    }
    bool has_data = entry->outcome.error == 0 && nearest < 0 && !entry->outcome.has_diverging_epoch &&
                    mqd_fetch_position(entry) < mqd_fetch_readable_end(request, &positions);
    if (has_data && request->positions_only && request->isolation_level)
        mqd_fetch_find_aborted(r, request, entry, slot, &positions);
    else if (has_data && !request->positions_only && (*budget > 0 || *no_range_yet))
        mqd_fetch_find_range(r, request, entry, slot, &positions, budget, no_range_yet);
    if (__builtin_expect(entry->skipped > 0, 0) && !entry->outcome.error && !entry->range.size_bytes)
        mqd_view_add_empty(request, entry);
    bool no_positions = entry->outcome.error && entry->outcome.error != MQD_KAFKA_OFFSET_OUT_OF_RANGE;
    entry->outcome.high_watermark = no_positions                    ? -1
                                    : request->set->replica_id >= 0 ? entry->high_watermark
                                                                    : positions.high_watermark;
    entry->outcome.last_stable_offset = no_positions ? -1 : positions.last_stable_offset;
    entry->outcome.log_start_offset = no_positions ? -1 : positions.log_start_offset;
    bool changed = has_changed(entry, entry->outcome.error, entry->outcome.high_watermark,
                               entry->outcome.last_stable_offset, entry->outcome.log_start_offset);
    bool must_report = request->lists_all || entry->outcome.has_diverging_epoch || entry->outcome.has_preferred ||
                       entry->range.size_bytes || entry->outcome.records_bytes || entry->outcome.error || changed ||
                       (request->positions_only && has_data);
    if (must_report && !include(request->set, entry))
        mqd_fetch_entry_release(r, entry);
    if (request->set->session_id && !has_data && !entry->outcome.error && mqd_list_linked(&entry->ready) &&
        entry_wait(r, request, entry, slot, &positions))
        mqd_list_remove(&entry->ready);
}

static int by_topic(const void *left, const void *right)
{
    const struct mqd_fetch_entry *a = *(struct mqd_fetch_entry *const *)left,
                                 *b = *(struct mqd_fetch_entry *const *)right;
    if (a->topic != b->topic)
        return (uintptr_t)a->topic < (uintptr_t)b->topic ? -1 : 1;
    return a->order < b->order ? -1 : a->order > b->order;
}

static void collect(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_fetch_set *set = request->set;
    int64_t budget = request->bytes_max;
    bool no_range_yet = true;
    set->included_count = 0;
    if (request->lists_all) {
        for (uint32_t i = 0; i < set->entry_count; i++)
            collect_entry(r, request, set->entries[i], &budget, &no_range_yet);
        return;
    }
    struct mqd_node remaining;
    mqd_list_init(&remaining);
    mqd_list_move_all(&remaining, &set->ready);
    struct mqd_node *node;
    /* examined entries move to the list's end: the next fetch begins with those not reached */
    while ((node = mqd_list_pop(&remaining))) {
        struct mqd_fetch_entry *entry = MQD_CONTAINER(node, struct mqd_fetch_entry, ready);
        mqd_list_append(&set->ready, &entry->ready);
        collect_entry(r, request, entry, &budget, &no_range_yet);
        if (budget <= 0 && !no_range_yet)
            break;
    }
    struct mqd_node examined;
    mqd_list_init(&examined);
    mqd_list_move_all(&examined, &set->ready);
    mqd_list_move_all(&set->ready, &remaining);
    mqd_list_move_all(&set->ready, &examined);
    if (set->included_count > 1)
        qsort(set->included, set->included_count, sizeof *set->included, by_topic);
}

static void drop_records(struct mqd_reactor *r, struct mqd_fetch_entry *entry)
{
    entry->outcome.records_bytes = 0;
    entry->cursor.valid = false;
    mqd_fetch_entry_release(r, entry);
}

/* Pages that are not in memory are read ahead first: sendfile would wait for them and stall every
 * connection of this worker. Views are read and filtered by the pool. */
static void read_cold(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_fetch_set *set = request->set;
    for (uint32_t i = 0; i < set->included_count; i++) {
        struct mqd_fetch_entry *entry = set->included[i];
        if (!entry->range.size_bytes)
            continue;
        if (__builtin_expect(entry->topic->view != NULL, 0)) {
            if (!mqd_view_begin(r, request, entry))
                drop_records(r, entry);
            continue;
        }
        struct mqd_positions positions;
        mqd_leading_positions(r, set, entry->topic->slots[entry->partition_index], &positions);
        if (mqd_range_just_written(r->reader, entry->topic->slots[entry->partition_index], &positions, &entry->range) ||
            mqd_range_cached(&entry->range))
            continue;
        /* leaves operations free for flushes; the client requests this partition again */
        if (r->cold_read_count >= COLD_READ_COUNT_MAX && request->pending) {
            drop_records(r, entry);
            continue;
        }
        if (mqd_poll_read_ahead(r->poll, mqd_segment_ref_fd(entry->range.segment), entry->range.position,
                                entry->range.size_bytes,
                                mqd_token(MQD_TOKEN_READ_AHEAD, (uint64_t)(uintptr_t)request)) == 0) {
            request->pending++;
            r->cold_read_count++;
            mqd_stat(r, MQD_COUNT_FETCH_COLD, 1);
        }
    }
}

static void park(struct mqd_reactor *r, struct mqd_request *request)
{
    int64_t deadline_ms = request->started_ns / 1000000 + request->wait_ms;
    if (!request->timer_armed)
        mqd_stat(r, MQD_COUNT_FETCH_PARKED, 1);
    if (request->set->watermarks_changed && r->now_ms + HW_PUSH_MS < deadline_ms)
        deadline_ms = r->now_ms + HW_PUSH_MS;
    if (!request->timer_armed || deadline_ms < request->deadline_ms)
        mqd_timer_arm(r, request, deadline_ms);
}

void mqd_fetch_evaluate(struct mqd_reactor *r, struct mqd_request *request, bool expired)
{
    struct mqd_fetch_set *set = request->set;
    if (!set || request->complete || request->evaluated)
        return;
    if (set->request != request) { /* not its turn yet; it will not wait when its turn comes */
        request->wait_ms = 0;
        return;
    }
    int64_t bytes_min = request->bytes_min > 0 && set->replica_id < 0 ? request->bytes_min : 1;
    /* without partitions there is nothing to wait for, and a client may be closing its session */
    bool may_wait = !expired && set->entry_count && request->wait_ms > 0 && request->bytes_min > 0;
    if (may_wait && survey(r, request) < bytes_min) {
        park(r, request);
        return;
    }
    mqd_timer_disarm(r, request);
    collect(r, request);
    request->evaluated = 1;
    mqd_slow_begin_fetch(r, request);
    read_cold(r, request);
    if (!request->pending)
        mqd_request_complete(r, request);
}

void mqd_fetch_on_read_ahead(struct mqd_reactor *r, uint64_t id, int result)
{
    struct mqd_request *request = (struct mqd_request *)(uintptr_t)id;
    if (result < 0)
        mqd_log(r, 4, request->connection ? request->connection->id : 0, UINT32_MAX, "reading ahead failed: %s",
                strerror(-result));
    r->cold_read_count--;
    if (--request->pending)
        return;
    if (!request->connection)
        mqd_request_free(r, request);
    else if (request->share)
        mqd_share_schedule(r, request->share);
    else
        mqd_request_complete(r, request);
}

static void wake_entry(struct mqd_reactor *r, struct mqd_fetch_entry *entry)
{
    make_ready(entry);
    if (entry->set->request && !mqd_list_linked(&entry->set->woken))
        mqd_list_append(&r->woken, &entry->set->woken);
}

void mqd_fetch_wake_slot(struct mqd_reactor *r, uint32_t slot)
{
    MQD_LIST_EACH(node, next, &r->waiting[slot])
        wake_entry(r, MQD_CONTAINER(node, struct mqd_fetch_entry, waiter));
    if (__builtin_expect(r->shares != NULL, 0))
        mqd_share_wake_slot(r, slot);
}

void mqd_fetch_wake_set(struct mqd_reactor *r, struct mqd_fetch_set *set)
{
    for (uint32_t i = 0; i < set->entry_count; i++)
        wake_entry(r, set->entries[i]);
}

void mqd_fetch_wake_followers(struct mqd_reactor *r, struct mqd_owned *owned)
{
    MQD_LIST_EACH(node, next, &owned->followers_waiting)
        wake_entry(r, MQD_CONTAINER(node, struct mqd_fetch_entry, waiter));
}

void mqd_fetch_run_woken(struct mqd_reactor *r)
{
    struct mqd_node *node;
    while ((node = mqd_list_pop(&r->woken))) {
        struct mqd_fetch_set *set = MQD_CONTAINER(node, struct mqd_fetch_set, woken);
        if (set->request)
            mqd_fetch_evaluate(r, set->request, false);
    }
}

/* Called when the request ends, because it has been answered or its client has disconnected. The
 * set of a session stays; a set for a single request is freed. */
void mqd_fetch_detach(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_fetch_set *set = request->set;
    request->set = NULL;
    for (uint32_t i = 0; request->evaluated && i < set->included_count; i++)
        mqd_fetch_entry_release(r, set->included[i]);
    if (set->request == request)
        set->request = NULL;
    if (--set->request_count == 0 && !set->session_id)
        mqd_fetch_set_free(r, set);
}
