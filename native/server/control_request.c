/* Requests that the acceptor (Python) answers. They are sent to it over the link and kept until the
 * response arrives; responses that can be reused are cached.
 *
 * A frame waits in the control arena (the last quarter of this worker's mapping), separate from the
 * receive window: a request that Python answers slowly must not hold bytes that the hot path needs.
 * It stays there until it is answered, so that it can be sent to a restarted acceptor. When a
 * request takes a long time (MQD_LINK_PARKED: a JoinGroup waits for other members), the bytes that
 * must be kept move back to the heap.
 *
 * Connections are served in turn, and a connection's requests keep their order. A turn ends after
 * TURN_BYTES, and the acceptor has at most SENT_COUNT_MAX unanswered requests of one connection
 * (not counting those that it reported with MQD_LINK_PARKED). So a request waits for a bounded
 * number of requests of each other connection, however many a client pipelines. While the request
 * whose turn it is waits for room in the arena, small requests of other connections may pass it;
 * they use at most a part of the arena (PASS_DIVISOR). A request that would not fit even into an
 * empty arena would wait forever, so it is refused.
 *
 * When the acceptor dies, queries (requests that change nothing, or that change nothing more when
 * they are repeated) are sent again. A connection with any other pending request is closed, because
 * it is unknown whether the change was made.
 *
 * A request whose client has disconnected is dropped as soon as the acceptor no longer reads its
 * frame (MQD_LINK_CANCEL).
 *
 * A token consists of an entry's index in `control_entries` and its sequence number: a late
 * response to a request that has ended finds another sequence number and is dropped.
 */
#include <stdlib.h>
#include <string.h>

#include "server/authentication.h"
#include "server/check/checks.h"
#include "server/local/local.h"
#include "server/reactor.h"
#include "server/rights/subject.h"
#include "server/share/share.h"
#include "server/slow/slow.h"

#define CONTROL_ARENA_DIVISOR 2 /* one request may use 1 / CONTROL_ARENA_DIVISOR of the control arena */
#define SENT_COUNT_MAX 16
#define TURN_BYTES 65536
#define PASS_BYTES_MAX 4096 /* largest request that may pass another one waiting for room */
#define PASS_DIVISOR 8      /* requests that passed may use 1 / PASS_DIVISOR of the control arena */
#define JOIN_GROUP 11
#define SYNC_GROUP 14
#define SASL_HANDSHAKE 17
#define SASL_AUTHENTICATE 36

/* Whether the request only reads, or may be repeated. */
static bool is_replayable(int16_t api_key)
{
    switch (api_key) {
    case 2:  /* ListOffsets */
    case 3:  /* Metadata */
    case 8:  /* OffsetCommit */
    case 9:  /* OffsetFetch */
    case 10: /* FindCoordinator */
    case 12: /* Heartbeat */
    case 14: /* SyncGroup */
    case 15: /* DescribeGroups */
    case 16: /* ListGroups */
    case 17: /* SaslHandshake */
    case 18: /* ApiVersions */
    case 23: /* OffsetForLeaderEpoch */
    case 29: /* DescribeAcls */
    case 32: /* DescribeConfigs */
    case 35: /* DescribeLogDirs */
    case 36: /* SaslAuthenticate: the successor does not know the exchange and refuses it */
    case 41: /* DescribeDelegationToken */
    case 46: /* ListPartitionReassignments */
    case 48: /* DescribeClientQuotas */
    case 50: /* DescribeUserScramCredentials */
    case 55: /* DescribeQuorum */
    case 60: /* DescribeCluster */
    case 61: /* DescribeProducers */
    case 65: /* DescribeTransactions */
    case 66: /* ListTransactions */
    case 69: /* ConsumerGroupDescribe */
    case 74: /* ListConfigResources */
    case 75: /* DescribeTopicPartitions */
    case 77: /* ShareGroupDescribe */
    case 89: /* StreamsGroupDescribe */
    case 90: /* DescribeShareGroupOffsets */
        return true;
    default:
        return false;
    }
}

/* Whether the frame stays in memory while the request is parked. Not for SASL requests:
 * unauthenticated clients could fill the heap with refused tokens, whose responses are delayed by
 * seconds. */
static bool is_kept_when_parked(int16_t api_key)
{
    return is_replayable(api_key) && api_key != SASL_HANDSHAKE && api_key != SASL_AUTHENTICATE;
}

static bool has_frame(const struct mqd_request *request)
{
    return request->frame || request->control_offset >= 0;
}

/* ---- the table of requests in flight ---- */

static struct mqd_request *request_of(struct mqd_reactor *r, uint64_t token)
{
    uint32_t index = (uint32_t)token & 0xffff;
    if (index >= MQD_CONTROL_REQUEST_COUNT_MAX || r->control_entries[index].sequence != (uint32_t)(token >> 16))
        return NULL;
    return r->control_entries[index].request;
}

static uint64_t token_of(const struct mqd_reactor *r, const struct mqd_request *request)
{
    return (uint64_t)r->control_entries[request->control_index].sequence << 16 | request->control_index;
}

static bool entry_take(struct mqd_reactor *r, struct mqd_request *request)
{
    if (r->control_free == UINT32_MAX)
        return false;
    uint32_t index = r->control_free;
    r->control_free = r->control_entries[index].next_free;
    r->control_entries[index].request = request;
    request->control_index = index;
    r->control_used_count++;
    request->connection->control_count++;
    return true;
}

static void queue_for_turn(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (!mqd_list_empty(&c->control_waiting) && c->control_sent < SENT_COUNT_MAX && !mqd_list_linked(&c->control_turn))
        mqd_list_append(&r->control_turns, &c->control_turn);
}

/* Called when the acceptor has answered or parked the request, or died. */
static void uncount_sent(struct mqd_reactor *r, struct mqd_request *request)
{
    struct mqd_connection *c = request->connection;
    if (c && request->control_counted) {
        c->control_sent--;
        queue_for_turn(r, c);
    }
    request->control_counted = 0;
}

static uint64_t extents_of(const struct mqd_request *request)
{
    return (request->frame_bytes + MQD_CONTROL_EXTENT_BYTES - 1) / MQD_CONTROL_EXTENT_BYTES;
}

static void release_frame(struct mqd_reactor *r, struct mqd_request *request)
{
    if (request->control_offset < 0)
        return;
    mqd_arena_release(r->control_arena, (uint64_t)request->control_offset);
    request->control_offset = -1;
    if (request->control_passed)
        r->control_passed_extents -= extents_of(request);
    request->control_passed = 0;
}

void mqd_control_untrack(struct mqd_reactor *r, struct mqd_request *request)
{
    mqd_list_remove(&request->control_node);
    uncount_sent(r, request);
    release_frame(r, request);
    if (request->control_index == UINT32_MAX)
        return;
    struct mqd_control_entry *entry = &r->control_entries[request->control_index];
    free(entry->key);
    entry->key = NULL;
    entry->request = NULL;
    entry->sequence++;
    entry->next_free = r->control_free;
    r->control_free = request->control_index;
    request->control_index = UINT32_MAX;
    r->control_used_count--;
    if (request->connection)
        request->connection->control_count--;
}

/* Whether only the last quarter of the table is free, which is reserved for connections without an
 * entry, so that one client cannot use all entries. */
bool mqd_control_under_pressure(const struct mqd_reactor *r)
{
    return r->control_used_count >= MQD_CONTROL_REQUEST_COUNT_MAX - MQD_CONTROL_REQUEST_COUNT_MAX / 4;
}

/* ---- sending ---- */

static bool acceptor_accepts(const struct mqd_reactor *r, uint32_t acceptor, const struct mqd_endpoint_slot *slot)
{
    return mqd_load_acquire(&slot->state) == MQD_PROCESS_RUNNING &&
           mqd_endpoint_free_count(r->endpoint, acceptor) != 0 &&
           /* what waits in the overflow when the acceptor dies goes to its successor */
           r->overflow_head[acceptor] == r->overflow_tail[acceptor];
}

/* Moves the request's frame into the arena. */
static bool move_to_arena(struct mqd_reactor *r, struct mqd_request *request)
{
    if (request->control_offset >= 0)
        return true;
    int64_t offset = mqd_arena_allocate(r->control_arena, request->frame_bytes);
    if (offset < 0)
        return false;
    request->control_offset = offset;
    memcpy(r->options.arenas[r->options.self] + r->control_arena_base + offset, request->frame, request->frame_bytes);
    mqd_heap_release(r, request->frame_bytes);
    free(request->frame);
    request->frame = NULL;
    return true;
}

static void send_one(struct mqd_reactor *r, uint32_t acceptor, uint64_t generation, struct mqd_request *request)
{
    struct mqd_connection *c = request->connection;
    struct mqd_descriptor descriptor = {.kind = MQD_LINK_REQUEST,
                                        .flags = request->control_flags,
                                        .slot = c->local_port,
                                        .token = token_of(r, request),
                                        .offset = r->control_arena_base + (uint64_t)request->control_offset,
                                        .size_bytes = request->frame_bytes,
                                        .error = (int32_t)(generation & 0x7fffffff),
                                        .a = c->listener_id,
                                        .b = (int64_t)c->id,
                                        .c = (int64_t)((uint64_t)c->peer_ipv4 << 32 | c->local_ipv4)};
    if (c->local) { /* listener MQD_LISTENER_LOCAL: the user's identity instead of an address */
        descriptor.slot = (uint32_t)c->local->pid;
        descriptor.c = (int64_t)((uint64_t)c->local->uid << 32);
    }
    mqd_forward_send(r, acceptor, &descriptor);
    request->sent = 1;
    mqd_slow_begin(r, request);
    request->control_generation = generation;
    request->control_counted = 1;
    c->control_sent++;
    mqd_list_remove(&request->control_node);
    mqd_list_append(&r->control_sent, &request->control_node);
}

static bool may_pass(const struct mqd_reactor *r, const struct mqd_request *request)
{
    return request->control_offset >= 0 ||
           (request->frame_bytes <= PASS_BYTES_MAX && r->control_passed_extents + extents_of(request) <=
                                                          mqd_arena_extents_total(r->control_arena) / PASS_DIVISOR);
}

void mqd_control_send_queued(struct mqd_reactor *r)
{
    uint32_t acceptor = mqd_control_worker_count(r->options.control);
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(r->options.control, acceptor);
    /* read before the state: if the acceptor restarts in between, its successor sees the old
     * generation in the descriptor and drops it */
    uint64_t generation = mqd_load_acquire(&slot->generation);
    struct mqd_node without_room; /* connections whose request found no room; they are first next time, in this order */
    mqd_list_init(&without_room);
    struct mqd_node *node;
    bool accepts = true;
    while (accepts && (node = mqd_list_pop(&r->control_turns))) {
        struct mqd_connection *c = MQD_CONTAINER(node, struct mqd_connection, control_turn);
        uint32_t bytes = 0;
        bool has_room = true;
        while (!mqd_list_empty(&c->control_waiting) && c->control_sent < SENT_COUNT_MAX && bytes < TURN_BYTES) {
            struct mqd_request *request = MQD_CONTAINER(c->control_waiting.next, struct mqd_request, control_node);
            bool is_passing = !mqd_list_empty(&without_room) && request->control_offset < 0;
            if (!(accepts = acceptor_accepts(r, acceptor, slot)) ||
                !(has_room = (!is_passing || may_pass(r, request)) && move_to_arena(r, request)))
                break;
            if (is_passing) {
                request->control_passed = 1;
                r->control_passed_extents += extents_of(request);
            }
            bytes += request->frame_bytes;
            send_one(r, acceptor, generation, request);
        }
        if (!has_room || !accepts)
            mqd_list_append(&without_room, node);
        else
            queue_for_turn(r, c);
    }
    mqd_list_move_all(&without_room, &r->control_turns);
    mqd_list_move_all(&r->control_turns, &without_room);
}

void mqd_control_on_request(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                            const uint8_t *frame, uint32_t size_bytes)
{
    struct mqd_request *request = mqd_request_new(r, c, header, MQD_REQUEST_CONTROL);
    uint32_t block_bytes = mqd_principal_block_bytes(c), total_bytes = size_bytes + block_bytes;
    if (!request || !entry_take(r, request)) {
        mqd_connection_fail(r, c, "too many control requests are in flight on this worker; the client may reconnect");
        return;
    }
    if (total_bytes >
        (uint64_t)mqd_arena_extents_total(r->control_arena) * MQD_CONTROL_EXTENT_BYTES / CONTROL_ARENA_DIVISOR) {
        mqd_connection_fail(r, c, "a request of this kind may be at most an eighth of receive.arena.bytes");
        return;
    }
    if (!mqd_heap_take(r, total_bytes)) {
        mqd_connection_fail(r, c, "no memory for another control request (queued.max.request.bytes)");
        return;
    }
    request->frame_bytes = total_bytes;
    if (!(request->frame = malloc(total_bytes ? total_bytes : 1))) {
        mqd_heap_release(r, total_bytes);
        mqd_connection_fail(r, c, "out of memory for another control request");
        return;
    }
    if (block_bytes) {
        mqd_principal_block_put(c, request->frame);
        request->control_flags |= MQD_REQUEST_PRINCIPAL;
    }
    memcpy(request->frame + block_bytes, frame, size_bytes);
    if (c->raw_tokens)
        request->control_flags |= MQD_REQUEST_RAW_TOKEN;
    mqd_authentication_on_request(request);
    mqd_stat(r, MQD_COUNT_REQUESTS_FORWARDED_CONTROL, 1);
    if (header->api_key == MQD_API_METADATA && mqd_request_charge(r, request, size_bytes)) {
        struct mqd_control_entry *entry = &r->control_entries[request->control_index];
        entry->key_hash = mqd_reply_key(c, header, frame, size_bytes, &entry->key, &entry->key_bytes);
    }
    mqd_list_append(&c->control_waiting, &request->control_node);
    queue_for_turn(r, c);
    mqd_control_send_queued(r);
}

/* ---- responses ---- */

static void finish(struct mqd_reactor *r, struct mqd_request *request, const struct mqd_descriptor *descriptor)
{
    struct mqd_control_entry *entry = &r->control_entries[request->control_index];
    if ((descriptor->flags & MQD_RESPONSE_CACHEABLE) && entry->key && request->reply.size_bytes >= 4) {
        mqd_reply_cache_put(r, entry->key, entry->key_bytes, entry->key_hash, (uint64_t)descriptor->a,
                            request->reply.bytes, request->reply.size_bytes);
        entry->key = NULL;
    }
    request->no_reply = (descriptor->flags & MQD_RESPONSE_NONE) != 0;
    mqd_control_untrack(r, request);
    if (!request->connection)
        mqd_request_free(r, request);
    else if (!(request->blocks || descriptor->flags & (MQD_RESPONSE_AUTHENTICATED | MQD_RESPONSE_DISCONNECT)) ||
             mqd_authentication_on_response(r, request, descriptor->flags))
        mqd_request_complete(r, request);
}

void mqd_control_on_response(struct mqd_reactor *r, const struct mqd_descriptor *descriptor, uint32_t from)
{
    struct mqd_request *request = request_of(r, descriptor->token);
    uint64_t arena_bytes = r->options.arena_bytes[from];
    bool is_in_arena = r->options.arenas[from] && descriptor->offset <= arena_bytes &&
                       descriptor->size_bytes <= arena_bytes - descriptor->offset;
    bool is_copied =
        is_in_arena && (!request || mqd_request_reply_append(r, request, r->options.arenas[from] + descriptor->offset,
                                                             descriptor->size_bytes));
    struct mqd_descriptor release = {
        .kind = MQD_LINK_RELEASE, .token = descriptor->token, .offset = descriptor->offset};
    if (!(descriptor->flags & MQD_RESPONSE_NONE))
        mqd_forward_send(r, from, &release);
    if (!request)
        return;
    if (!is_copied && request->connection) {
        mqd_connection_fail(r, request->connection, "the acceptor's response could not be copied");
        if (!request_of(r, descriptor->token))
            /* a parked request was freed with its connection; any other request that was sent is
             * kept */
            return;
    }
    if (!(descriptor->flags & MQD_RESPONSE_MORE))
        finish(r, request, descriptor);
}

void mqd_control_on_close(struct mqd_reactor *r, const struct mqd_descriptor *descriptor)
{
    struct mqd_request *request = request_of(r, descriptor->token);
    if (!request)
        return;
    struct mqd_connection *c = request->connection;
    request->sent = 0; /* the request is answered, so mqd_request_orphan frees it */
    if (c)
        mqd_connection_close(r, c, "closed by the acceptor");
    else
        mqd_request_free(r, request);
}

/* The client has disconnected and the acceptor has read the frame: frees the entry, because clients
 * that connect, send and disconnect repeatedly must not use up the table. Later responses to the
 * request find another sequence number. A request that waits for other members may wait for
 * minutes, so the acceptor is notified to stop waiting. */
static void cancel(struct mqd_reactor *r, struct mqd_request *request)
{
    if (request->api_key == JOIN_GROUP || request->api_key == SYNC_GROUP) {
        struct mqd_descriptor cancellation = {.kind = MQD_LINK_CANCEL,
                                              .token = token_of(r, request),
                                              .error = (int32_t)(request->control_generation & 0x7fffffff)};
        mqd_forward_send(r, mqd_control_worker_count(r->options.control), &cancellation);
    }
    mqd_request_free(r, request);
}

void mqd_control_orphan(struct mqd_reactor *r, struct mqd_request *request)
{
    if (request->control_offset < 0)
        cancel(r, request);
    /* otherwise the acceptor may still read the frame, until it answers or parks the request */
}

/* Ten thousand members of a group may wait for one late member: their requests must not fill the
 * arena, which other requests need. */
void mqd_control_on_parked(struct mqd_reactor *r, const struct mqd_descriptor *descriptor)
{
    struct mqd_request *request = request_of(r, descriptor->token);
    if (!request || !request->sent || request->control_offset < 0)
        return;
    uncount_sent(r, request);
    if (request->connection && is_kept_when_parked(request->api_key)) {
        if (!mqd_heap_take(r, request->frame_bytes))
            return; /* the frame stays in the arena */
        if (!(request->frame = malloc(request->frame_bytes))) {
            mqd_heap_release(r, request->frame_bytes);
            return;
        }
        memcpy(request->frame, r->options.arenas[r->options.self] + r->control_arena_base + request->control_offset,
               request->frame_bytes);
    }
    release_frame(r, request);
    if (!request->connection)
        cancel(r, request);
    mqd_control_send_queued(r);
}

/* A connection's requests keep their order: those that are sent again come in their original order,
 * before requests that were never sent. Otherwise an older OffsetCommit could overwrite a newer
 * one. */
void mqd_control_on_acceptor_died(struct mqd_reactor *r)
{
    uint64_t generation = mqd_load_acquire(
        &mqd_control_endpoint(r->options.control, mqd_control_worker_count(r->options.control))->generation);
    struct mqd_node resent, dropped;
    mqd_list_init(&resent);
    mqd_list_init(&dropped);
    MQD_LIST_EACH(node, next, &r->control_sent) {
        struct mqd_request *request = MQD_CONTAINER(node, struct mqd_request, control_node);
        if (request->control_generation == generation)
            continue;
        request->sent = 0;
        uncount_sent(r, request);
        /* a late response from the dead acceptor finds another sequence number */
        r->control_entries[request->control_index].sequence++;
        request->reply.size_bytes = 0;
        mqd_list_remove(node);
        bool is_sent_again = request->connection && is_replayable(request->api_key) && has_frame(request);
        mqd_list_append(is_sent_again ? &resent : &dropped, node);
    }
    while (!mqd_list_empty(&dropped)) { /* closing a connection frees its other requests too, also those in `resent` */
        struct mqd_request *request = MQD_CONTAINER(dropped.next, struct mqd_request, control_node);
        if (!request->connection) {
            mqd_request_free(r, request);
        } else {
            mqd_log(r, 4, request->connection->id, UINT32_MAX,
                    "closing the connection: the acceptor restarted while a request (API key %d) was in flight",
                    request->api_key);
            mqd_connection_close(r, request->connection, "acceptor restarted");
        }
    }
    /* puts each, from the newest to the oldest, before the connection's waiting requests */
    while (!mqd_list_empty(&resent)) {
        struct mqd_request *request = MQD_CONTAINER(resent.previous, struct mqd_request, control_node);
        struct mqd_node *waiting = &request->connection->control_waiting;
        mqd_list_remove(&request->control_node);
        mqd_list_append(waiting->next, &request->control_node);
        queue_for_turn(r, request->connection);
    }
    mqd_control_send_queued(r);
    mqd_check_on_acceptor_died(r);
    mqd_describe_on_acceptor_died(r);
    mqd_share_on_acceptor_died(r);
}

/* ---- cache ---- */

/* The key: the local address of the connection (advertised addresses depend on it), the rights of
 * its principal, the API and version, and the body. The client id is not part of the key. */
uint64_t mqd_reply_key(struct mqd_connection *c, const struct mqd_request_header *header, const uint8_t *frame,
                       uint32_t size_bytes, uint8_t **key, uint32_t *key_bytes)
{
    uint32_t body_bytes = size_bytes - header->header_bytes;
    uint64_t subject = mqd_subject_version(c);
    *key_bytes = 20 + body_bytes;
    *key = malloc(*key_bytes);
    if (!*key)
        return 0;
    uint16_t api[2] = {(uint16_t)header->api_key, (uint16_t)header->api_version};
    memcpy(*key, api, 4);
    memcpy(*key + 4, &c->local_ipv4, 4);
    memcpy(*key + 8, &c->local_port, 2);
    memcpy(*key + 10, &c->listener_id, 2);
    memcpy(*key + 12, &subject, 8);
    memcpy(*key + 20, frame + header->header_bytes, body_bytes);
    uint64_t hash = 0xcbf29ce484222325ull;
    for (uint32_t i = 0; i < *key_bytes; i++)
        hash = (hash ^ (*key)[i]) * 0x100000001b3ull;
    return hash ? hash : 1;
}

static void cached_drop(struct mqd_reactor *r, struct mqd_cached_reply *cached)
{
    r->cached_bytes -= cached->key_bytes + cached->size_bytes;
    free(cached->key);
    free(cached->bytes);
    memset(cached, 0, sizeof *cached);
}

void mqd_reply_cache_clear(struct mqd_reactor *r)
{
    for (uint32_t i = 0; i < MQD_REPLY_CACHE_COUNT; i++)
        if (r->cached_replies[i].bytes)
            cached_drop(r, &r->cached_replies[i]);
}

/* The cache is not used while this host has lost its lease: the acceptor must answer, and report to
 * clients that this host leads no partition. Cached replies stay: while the lease is lost, a
 * response that depends on it contains an error and is not cached. So all cached replies, including
 * those that arrived in the meantime, are correct again when the lease is regained and the version
 * is the same. */
bool mqd_reply_cache_find(struct mqd_reactor *r, struct mqd_connection *c, const struct mqd_request_header *header,
                          const uint8_t *frame, uint32_t size_bytes)
{
    uint8_t *key;
    uint32_t key_bytes;
    if (!r->cached_bytes || r->lease_lost)
        return false;
    uint64_t hash = mqd_reply_key(c, header, frame, size_bytes, &key, &key_bytes);
    uint64_t version = mqd_load_acquire(&r->header->metadata_version);
    struct mqd_cached_reply *match = NULL;
    for (uint32_t i = 0; key && i < MQD_REPLY_CACHE_COUNT && !match; i++) {
        struct mqd_cached_reply *cached = &r->cached_replies[i];
        if (cached->bytes && cached->hash == hash && cached->version == version && cached->key_bytes == key_bytes &&
            memcmp(cached->key, key, key_bytes) == 0)
            match = cached;
    }
    free(key);
    struct mqd_request *request;
    if (!match || !(request = mqd_request_new(r, c, header, MQD_REQUEST_READY)))
        return false;
    if (!mqd_request_reply_append(r, request, match->bytes, match->size_bytes)) {
        mqd_connection_fail(r, c, "no memory for another response (queued.max.request.bytes)");
        return true;
    }
    uint32_t id = (uint32_t)header->correlation_id;
    request->reply.bytes[0] = (uint8_t)(id >> 24);
    request->reply.bytes[1] = (uint8_t)(id >> 16);
    request->reply.bytes[2] = (uint8_t)(id >> 8);
    request->reply.bytes[3] = (uint8_t)id;
    match->last_used = ++r->cache_clock;
    mqd_stat(r, MQD_COUNT_REQUESTS_CACHED, 1);
    mqd_request_complete(r, request);
    return true;
}

/* Takes ownership of the key. */
void mqd_reply_cache_put(struct mqd_reactor *r, uint8_t *key, uint32_t key_bytes, uint64_t hash, uint64_t version,
                         const uint8_t *bytes, uint32_t size_bytes)
{
    struct mqd_cached_reply *victim = &r->cached_replies[0];
    for (uint32_t i = 0; i < MQD_REPLY_CACHE_COUNT; i++) {
        struct mqd_cached_reply *cached = &r->cached_replies[i];
        if (cached->bytes && cached->version != version)
            cached_drop(r, cached);
        if (!cached->bytes || (victim->bytes && cached->last_used < victim->last_used))
            victim = cached;
    }
    if (victim->bytes)
        cached_drop(r, victim);
    uint8_t *copy = r->cached_bytes + key_bytes + size_bytes > MQD_REPLY_CACHE_BYTES_MAX ? NULL : malloc(size_bytes);
    if (!copy) {
        free(key);
        return;
    }
    memcpy(copy, bytes, size_bytes);
    *victim = (struct mqd_cached_reply){version, hash, key, key_bytes, copy, size_bytes, ++r->cache_clock};
    r->cached_bytes += key_bytes + size_bytes;
}
