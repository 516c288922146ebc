/* The share-partitions of the partitions that this worker owns: handles requests about them, reads
 * and writes their state through the acceptor, and checks expiry and leadership. See
 * server/share/share.h and share/partition.h. */
#include <stdlib.h>
#include <string.h>

#include "server/share/share.h"

#define OWNED_COUNT_MAX 65536 /* 16 bits of a token */
#define SWEEP_MS 50
#define RETRY_MS 10                 /* pause when there is no room for a request to the acceptor */
#define FAILED_MS 1000              /* an error is returned for this long before the state is read again */
#define EXPIRE_COUNT_MAX 100000     /* offsets expired in one pass */
#define RANGE_BYTES_MIN (8 + 8 + 4) /* first, last, type count */

/* ---- the table ---- */

static uint64_t hash_of(uint32_t slot, const uint8_t *group, uint32_t group_bytes)
{
    return mqd_share_member_hash(group, group_bytes) ^ slot * 0x9e3779b97f4a7c15ull;
}

static struct mqd_share_owned *find(const struct mqd_shares *shares, const struct mqd_share_owner_request *request,
                                    uint32_t slot, const uint8_t *group)
{
    uint64_t hash = hash_of(slot, group, request->group_bytes);
    struct mqd_share_owned *owned = shares->buckets[hash % MQD_SHARE_OWNED_BUCKET_COUNT];
    while (owned && (owned->hash != hash || owned->slot != slot ||
                     owned->partition.id.group_id.size_bytes != request->group_bytes ||
                     memcmp(owned->group, group, request->group_bytes) != 0 ||
                     memcmp(owned->partition.id.topic_id, request->topic_id, 16) != 0))
        owned = owned->next;
    return owned;
}

static bool grow(struct mqd_shares *shares)
{
    uint32_t capacity = shares->owned_capacity ? shares->owned_capacity * 2 : 64;
    struct mqd_share_owned **grown =
        capacity > OWNED_COUNT_MAX ? NULL : realloc(shares->owned, capacity * sizeof *grown);
    if (!grown)
        return false;
    memset(grown + shares->owned_capacity, 0, (capacity - shares->owned_capacity) * sizeof *grown);
    shares->owned_free_from = shares->owned_capacity;
    shares->owned = grown;
    shares->owned_capacity = capacity;
    return true;
}

static void on_persisted(void *context, struct mqd_share_waiter *waiter, int16_t error)
{
    struct mqd_descriptor response = {
        .kind = MQD_LINK_SHARE_RESPONSE, .token = waiter->token, .error = error, .slot = (uint32_t)waiter->lock_ms};
    mqd_share_respond(context, waiter->worker, &response);
    free(waiter);
}

/* callback of struct mqd_share_partition */
static uint32_t get_log_epochs(void *context, const struct mqd_share_partition *partition, struct mqd_share_epoch *out)
{
    const struct mqd_reactor *r = context;
    const struct mqd_owned *led = r->owned[MQD_CONTAINER(partition, struct mqd_share_owned, partition)->slot];
    struct mqd_positions positions;
    uint32_t count = 0, out_count = 0;
    if (!led) /* check_leadership will notice this soon */
        return 0;
    const struct mqd_epoch *epochs = mqd_partition_epochs(led->partition, &count);
    for (uint32_t i = count < MQD_SHARE_EPOCH_COUNT_MAX ? 0 : count - MQD_SHARE_EPOCH_COUNT_MAX + 1; i < count; i++)
        out[out_count++] = (struct mqd_share_epoch){epochs[i].epoch, epochs[i].start_offset};
    mqd_partition_positions(led->partition, &positions);
    out[out_count++] = (struct mqd_share_epoch){MQD_SHARE_EPOCH_LOG_END, positions.log_end_offset};
    return out_count;
}

static struct mqd_share_owned *create(struct mqd_reactor *r, const struct mqd_share_owner_request *request,
                                      uint32_t slot, const uint8_t *group)
{
    struct mqd_shares *shares = r->shares;
    if (shares->owned_count == shares->owned_capacity && !grow(shares))
        return NULL;
    struct mqd_share_owned *owned = calloc(1, sizeof *owned + request->group_bytes);
    if (!owned)
        return NULL;
    while (shares->owned[shares->owned_free_from])
        shares->owned_free_from = (shares->owned_free_from + 1) % shares->owned_capacity;
    memcpy(owned->group, group, request->group_bytes);
    owned->hash = hash_of(slot, group, request->group_bytes);
    owned->slot = slot;
    owned->body_offset = -1;
    owned->index = shares->owned_free_from;
    struct mqd_share_partition_id id = {.group_id = {owned->group, request->group_bytes},
                                        .partition_index = request->partition_index};
    memcpy(id.topic_id, request->topic_id, sizeof id.topic_id);
    mqd_share_partition_init(&owned->partition, &shares->pool, &id,
                             mqd_partition_leader_epoch(r->owned[slot]->partition), on_persisted, r);
    owned->partition.get_log_epochs = get_log_epochs;
    mqd_list_init(&owned->touched_node);
    shares->owned[owned->index] = owned;
    shares->owned_count++;
    struct mqd_share_owned **bucket = &shares->buckets[owned->hash % MQD_SHARE_OWNED_BUCKET_COUNT];
    owned->next = *bucket;
    *bucket = owned;
    return owned;
}

static void release(struct mqd_shares *shares, struct mqd_share_owned *owned)
{
    struct mqd_share_owned **link = &shares->buckets[owned->hash % MQD_SHARE_OWNED_BUCKET_COUNT];
    while (*link != owned)
        link = &(*link)->next;
    *link = owned->next;
    shares->owned[owned->index] = NULL;
    shares->owned_count--;
    mqd_list_remove(&owned->touched_node);
    mqd_share_partition_free(&owned->partition);
    mqd_share_keys_forget(owned);
    free(owned);
}

static bool has_sessions(const struct mqd_share_owned *owned)
{
    for (uint32_t i = 0; i < MQD_ENDPOINT_COUNT_MAX; i++)
        if (owned->session_counts[i])
            return true;
    return false;
}

static void touch(struct mqd_shares *shares, struct mqd_share_owned *owned)
{
    if (!mqd_list_linked(&owned->touched_node))
        mqd_list_append(&shares->touched, &owned->touched_node);
}

/* ---- leadership ---- */

/* Returns the partition in the slot if it has this id and index and this worker leads it with a
 * lease (H3); otherwise NULL. */
static struct mqd_owned *led_partition(const struct mqd_reactor *r, uint32_t slot, const uint8_t topic_id[16],
                                       int32_t partition_index)
{
    struct mqd_owned *owned = slot < MQD_PARTITION_SLOT_COUNT ? r->owned[slot] : NULL;
    if (!owned || owned->closing || owned->truncating || r->lease_lost || !mqd_owned_leads(owned))
        return NULL;
    const struct mqd_partition_slot *shared = mqd_control_partition(r->options.control, slot);
    bool matches = shared->partition_index == partition_index && memcmp(shared->topic_id, topic_id, 16) == 0;
    return matches ? owned : NULL;
}

/* Discards the state, which is then obsolete, if the leader or the leader epoch has changed. */
static void check_leadership(struct mqd_reactor *r, struct mqd_share_owned *owned)
{
    struct mqd_share_partition *partition = &owned->partition;
    const struct mqd_owned *led_here =
        led_partition(r, owned->slot, partition->id.topic_id, partition->id.partition_index);
    int32_t epoch = led_here ? mqd_partition_leader_epoch(led_here->partition) : -1;
    if (led_here && epoch == partition->leader_epoch)
        return;
    bool was_failed = partition->phase == MQD_SHARE_FAILED;
    if (!was_failed)
        mqd_share_partition_fail(partition, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER, r->now_ms);
    if (led_here)
        mqd_share_partition_restart(partition, epoch);
    if (led_here || !was_failed)
        mqd_owner_wake_slot(r, owned->slot);
}

/* ---- persistence ---- */

static bool send_to_acceptor(struct mqd_reactor *r, struct mqd_share_owned *owned, int api_key)
{
    uint32_t acceptor = mqd_control_worker_count(r->options.control);
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(r->options.control, acceptor);
    /* read before slot->state: if the acceptor then dies, its successor drops the descriptor */
    uint64_t generation = mqd_load_acquire(&slot->generation);
    const struct mqd_buffer *body = &owned->partition.body;
    if (mqd_load_acquire(&slot->state) != MQD_PROCESS_RUNNING || mqd_endpoint_free_count(r->endpoint, acceptor) == 0 ||
        r->overflow_head[acceptor] != r->overflow_tail[acceptor] ||
        (owned->body_offset = mqd_arena_allocate(r->control_arena, body->size_bytes)) < 0)
        return false;
    memcpy(r->options.arenas[r->options.self] + r->control_arena_base + owned->body_offset, body->bytes,
           body->size_bytes);
    owned->sequence = (uint32_t)++r->shares->next_sequence;
    owned->acceptor_generation = generation;
    struct mqd_descriptor request = {.kind = MQD_LINK_SHARE_STATE,
                                     .flags = (uint16_t)api_key,
                                     .slot = owned->slot,
                                     .token = (uint64_t)owned->sequence << 16 | owned->index,
                                     .offset = r->control_arena_base + (uint64_t)owned->body_offset,
                                     .size_bytes = body->size_bytes,
                                     .error = (int32_t)(generation & 0x7fffffff)};
    mqd_forward_send(r, acceptor, &request);
    return true;
}

static void release_body(struct mqd_reactor *r, struct mqd_share_owned *owned)
{
    mqd_arena_release(r->control_arena, (uint64_t)owned->body_offset);
    owned->body_offset = -1;
}

/* MQD_LINK_SHARE_STATE_RESPONSE */
void mqd_share_on_state_response(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    struct mqd_shares *shares = r->shares;
    uint32_t index = descriptor->token & 0xffff;
    struct mqd_share_owned *owned = shares && index < shares->owned_capacity ? shares->owned[index] : NULL;
    uint64_t arena_bytes = r->options.arena_bytes[from];
    bool in_arena = r->options.arenas[from] && descriptor->offset <= arena_bytes &&
                    descriptor->size_bytes <= arena_bytes - descriptor->offset;
    if (from != mqd_control_worker_count(r->options.control))
        return;
    if (owned && owned->body_offset >= 0 && owned->sequence == (uint32_t)(descriptor->token >> 16)) {
        struct mqd_share_partition *partition = &owned->partition;
        uint8_t phase = partition->phase, verify_pending = partition->verify_pending;
        release_body(r, owned);
        mqd_share_partition_on_response(partition, in_arena ? r->options.arenas[from] + descriptor->offset : NULL,
                                        in_arena ? descriptor->size_bytes : 0, r->now_ms);
        if (partition->phase == MQD_SHARE_FAILED && phase != MQD_SHARE_FAILED)
            mqd_log(r, 4, 0, owned->slot, "the state of share group %.*s was refused by its coordinator: error %d",
                    (int)partition->id.group_id.size_bytes, (const char *)owned->group, partition->error);
        if (partition->phase != phase || partition->verify_pending != verify_pending)
            mqd_owner_wake_slot(r, owned->slot);
        touch(shares, owned);
    }
    if (descriptor->size_bytes) {
        struct mqd_descriptor release = {
            .kind = MQD_LINK_RELEASE, .token = descriptor->token, .offset = descriptor->offset};
        mqd_forward_send(r, from, &release);
    }
    mqd_share_pump(r);
}

void mqd_share_on_acceptor_died(struct mqd_reactor *r)
{
    struct mqd_shares *shares = r->shares;
    uint64_t generation = mqd_load_acquire(
        &mqd_control_endpoint(r->options.control, mqd_control_worker_count(r->options.control))->generation);
    for (uint32_t i = 0; shares && i < shares->owned_capacity; i++) {
        struct mqd_share_owned *owned = shares->owned[i];
        if (owned && owned->partition.state.archiving_count && owned->partition.phase == MQD_SHARE_ACTIVE) {
            mqd_share_partition_request_report(&owned->partition);
            touch(shares, owned);
        }
        if (!owned || owned->body_offset < 0 || owned->acceptor_generation == generation)
            continue;
        release_body(r, owned);
        if (owned->partition.in_flight)
            mqd_share_partition_on_unsent(&owned->partition, r->now_ms);
        touch(shares, owned);
    }
    mqd_share_pump(r);
}

/* ---- due work ---- */

static void expire(struct mqd_reactor *r, struct mqd_share_owned *owned)
{
    struct mqd_share *state = &owned->partition.state;
    uint32_t released = 0;
    if (owned->partition.phase != MQD_SHARE_ACTIVE)
        return;
    while (mqd_share_deadline(state) <= r->now_ms)
        released += mqd_share_expire(state, r->now_ms, EXPIRE_COUNT_MAX);
    if (released)
        mqd_owner_wake_slot(r, owned->slot);
}

static void run_owned(struct mqd_reactor *r, struct mqd_share_owned *owned)
{
    struct mqd_shares *shares = r->shares;
    struct mqd_share_partition *partition = &owned->partition;
    expire(r, owned);
    int api_key = owned->body_offset < 0 ? mqd_share_partition_next_request(partition, r->now_ms) : 0;
    if (api_key && !send_to_acceptor(r, owned, api_key))
        mqd_share_partition_on_unsent(partition, r->now_ms + RETRY_MS);
    bool is_used = owned->body_offset >= 0 || owned->read_ahead_running || owned->reading_keys || has_sessions(owned);
    if (!is_used && mqd_share_partition_is_idle(partition)) {
        release(shares, owned);
        return;
    }
    int64_t due_ms = mqd_share_partition_deadline(partition);
    if (owned->body_offset >= 0 && due_ms <= r->now_ms)
        return; /* this runs again when the response has arrived */
    if (due_ms < shares->due_ms)
        shares->due_ms = due_ms;
}

void mqd_share_owners_run(struct mqd_reactor *r)
{
    struct mqd_shares *shares = r->shares;
    bool is_sweep_due = shares->owned_count && r->now_ms - shares->last_sweep_ms >= SWEEP_MS;
    if (is_sweep_due || r->now_ms >= shares->due_ms) {
        shares->due_ms = MQD_SHARE_NEVER;
        for (uint32_t i = 0; i < shares->owned_capacity; i++) {
            if (!shares->owned[i])
                continue;
            if (is_sweep_due)
                check_leadership(r, shares->owned[i]);
            mqd_list_remove(&shares->owned[i]->touched_node);
            run_owned(r, shares->owned[i]);
        }
        if (is_sweep_due)
            shares->last_sweep_ms = r->now_ms;
    }
    struct mqd_node *node;
    while ((node = mqd_list_pop(&shares->touched)))
        run_owned(r, MQD_CONTAINER(node, struct mqd_share_owned, touched_node));
}

int64_t mqd_shares_next_ms(const struct mqd_reactor *r)
{
    const struct mqd_shares *shares = r->shares;
    if (!mqd_list_empty(&shares->touched) || !mqd_list_empty(&shares->runnable))
        return r->now_ms;
    int64_t next_ms = shares->owned_count ? shares->last_sweep_ms + SWEEP_MS : MQD_SHARE_NEVER;
    return shares->due_ms < next_ms ? shares->due_ms : next_ms;
}

/* ---- requests ---- */

/* Decodes the ranges in a payload. Returns NULL if the payload is malformed or memory runs out. */
static struct mqd_share_acknowledgement *take_ranges(const struct mqd_share_owner_request *request, const uint8_t *at,
                                                     uint32_t left)
{
    if (request->range_count > left / RANGE_BYTES_MIN)
        return NULL;
    struct mqd_share_acknowledgement *list = malloc((request->range_count + 1) * sizeof *list);
    for (uint32_t i = 0; list && i < request->range_count; i++) {
        bool is_short = left < RANGE_BYTES_MIN;
        if (!is_short) {
            memcpy(&list[i].first, at, 8);
            memcpy(&list[i].last, at + 8, 8);
            memcpy(&list[i].type_count, at + 16, 4);
            list[i].types = at + RANGE_BYTES_MIN;
            is_short = list[i].type_count > left - RANGE_BYTES_MIN;
        }
        if (is_short) {
            free(list);
            return NULL;
        }
        at += RANGE_BYTES_MIN + list[i].type_count;
        left -= RANGE_BYTES_MIN + list[i].type_count;
    }
    return list;
}

static int16_t acknowledge(struct mqd_reactor *r, struct mqd_share_owned *owned, uint32_t worker, uint64_t token,
                           const struct mqd_share_owner_request *request, const uint8_t *ranges, uint32_t range_bytes)
{
    struct mqd_share_partition *partition = &owned->partition;
    struct mqd_positions positions;
    if (partition->phase != MQD_SHARE_ACTIVE) /* nothing is acquired */
        return partition->phase == MQD_SHARE_FAILED ? partition->error : MQD_KAFKA_INVALID_RECORD_STATE;
    struct mqd_share_acknowledgement *list = take_ranges(request, ranges, range_bytes);
    struct mqd_share_waiter *waiter = list ? malloc(sizeof *waiter) : NULL;
    if (!waiter) {
        free(list);
        return MQD_KAFKA_REQUEST_TIMED_OUT;
    }
    mqd_slot_positions(mqd_control_partition(r->options.control, owned->slot), &positions);
    mqd_share_set_log_start(&partition->state, positions.log_start_offset);
    int error = mqd_share_acknowledge(&partition->state, request->member, list, request->range_count, r->now_ms);
    free(list);
    if (error) {
        free(waiter);
        return (int16_t)error;
    }
    *waiter = (struct mqd_share_waiter){
        .token = token, .worker = worker, .lock_ms = (int32_t)partition->settings.state.lock_ms};
    mqd_list_init(&waiter->node);
    mqd_share_partition_await(partition, waiter); /* S6 */
    mqd_owner_wake_slot(r, owned->slot);
    return 0;
}

static int64_t first_offset(const struct mqd_share_partition *partition, const struct mqd_positions *positions)
{
    int64_t duration_offset = partition->settings.reset_offset;
    switch (partition->settings.reset) {
    case MQD_SHARE_RESET_EARLIEST:
        return positions->log_start_offset;
    case MQD_SHARE_RESET_BY_DURATION:
        if (duration_offset >= 0 && duration_offset < positions->high_watermark)
            return duration_offset > positions->log_start_offset ? duration_offset : positions->log_start_offset;
    }
    return positions->high_watermark;
}

static void acquire(struct mqd_reactor *r, struct mqd_share_owned *owned, uint32_t worker,
                    const struct mqd_share_owner_request *request, struct mqd_descriptor *response)
{
    struct mqd_share_partition *partition = &owned->partition;
    struct mqd_positions positions;
    if (partition->phase == MQD_SHARE_FAILED && r->now_ms - partition->failed_ms >= FAILED_MS)
        mqd_share_partition_restart(partition, partition->leader_epoch);
    if (partition->phase == MQD_SHARE_FAILED)
        response->error = partition->error;
    if (partition->phase == MQD_SHARE_FAILED || partition->phase == MQD_SHARE_LOADING || partition->verify_pending)
        return;
    mqd_slot_positions(mqd_control_partition(r->options.control, owned->slot), &positions);
    if (partition->phase == MQD_SHARE_NO_START)
        mqd_share_partition_set_start(partition, first_offset(partition, &positions));
    expire(r, owned);
    response->slot = (uint32_t)partition->settings.state.lock_ms;
    mqd_share_acquire_now(r, owned, request, worker, response);
}

void mqd_share_owner_on_request(struct mqd_reactor *r, uint32_t worker, uint64_t token, uint32_t slot,
                                const uint8_t *payload, uint32_t size_bytes)
{
    struct mqd_shares *shares = r->shares;
    struct mqd_share_owner_request request;
    struct mqd_descriptor response = {.kind = MQD_LINK_SHARE_RESPONSE, .token = token};
    if (size_bytes < sizeof request)
        return;
    memcpy(&request, payload, sizeof request);
    const uint8_t *group = payload + sizeof request;
    if (request.group_bytes > size_bytes - sizeof request || worker >= MQD_ENDPOINT_COUNT_MAX)
        return;
    bool is_leaving = request.kind == MQD_SHARE_REQUEST_FORGET || request.kind == MQD_SHARE_REQUEST_RELEASE;
    struct mqd_share_owned *owned = find(shares, &request, slot, group);
    if (owned)
        check_leadership(r, owned);
    if (!is_leaving && !led_partition(r, slot, request.topic_id, request.partition_index))
        response.error = MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    else if (!is_leaving && !owned && !(owned = create(r, &request, slot, group)))
        response.error = MQD_KAFKA_REQUEST_TIMED_OUT;
    if (!owned || response.error) {
        response.flags = MQD_SHARED_REFUSED;
        mqd_share_respond(r, worker, &response);
        return;
    }
    if (request.joins && !has_sessions(owned))
        mqd_share_partition_request_verify(&owned->partition);
    owned->session_counts[worker] += request.joins;
    touch(shares, owned);
    switch (request.kind) {
    case MQD_SHARE_REQUEST_ACQUIRE:
    case MQD_SHARE_REQUEST_MEASURE:
        acquire(r, owned, worker, &request, &response);
        break;
    case MQD_SHARE_REQUEST_ACKNOWLEDGE:
        response.error = acknowledge(r, owned, worker, token, &request, group + request.group_bytes,
                                     size_bytes - (uint32_t)sizeof request - request.group_bytes);
        if (!response.error)
            return; /* the response is sent when the change is persisted */
        break;
    case MQD_SHARE_REQUEST_RELEASE:
        if (owned->partition.phase == MQD_SHARE_ACTIVE &&
            mqd_share_release_member(&owned->partition.state, request.member, r->now_ms))
            mqd_owner_wake_slot(r, slot);
        /* fall through */
    default:
        owned->session_counts[worker] -= owned->session_counts[worker] > 0;
    }
    mqd_share_respond(r, worker, &response);
}

void mqd_share_on_archive(struct mqd_reactor *r, uint32_t slot, const uint8_t *payload, uint32_t size_bytes)
{
    struct mqd_share_owner_request request;
    if (size_bytes < sizeof request)
        return;
    memcpy(&request, payload, sizeof request);
    uint32_t remaining_bytes = size_bytes - (uint32_t)sizeof request;
    if (request.kind != MQD_SHARE_REQUEST_ARCHIVE || request.group_bytes > remaining_bytes)
        return;
    const uint8_t *group = payload + sizeof request;
    struct mqd_share_owned *owned = find(r->shares, &request, slot, group);
    if (!owned)
        return; /* the share-partition will find its Archiving records when its state is loaded again */
    check_leadership(r, owned);
    struct mqd_share_partition *partition = &owned->partition;
    uint64_t epochs = (uint64_t)(uint32_t)partition->state_epoch << 32 | (uint32_t)partition->leader_epoch;
    if (partition->phase != MQD_SHARE_ACTIVE || epochs != request.member)
        return;
    struct mqd_share_acknowledgement *list =
        take_ranges(&request, group + request.group_bytes, remaining_bytes - request.group_bytes);
    uint32_t archived = 0;
    for (uint32_t i = 0; list && i < request.range_count; i++)
        archived += mqd_share_archive(&partition->state, list[i].first, list[i].last);
    free(list);
    touch(r->shares, owned);
    if (archived)
        mqd_owner_wake_slot(r, slot); /* there may be room for more open records */
}

void mqd_shares_owned_destroy(struct mqd_shares *shares)
{
    for (uint32_t i = 0; i < shares->owned_capacity; i++)
        if (shares->owned[i])
            release(shares, shares->owned[i]);
    free(shares->owned);
}
