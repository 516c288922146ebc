/* Handles the queries that local clients send on their sockets: which segment contains this offset?
 * The response carries a descriptor of the segment's file, which the client maps and reads itself.
 *
 * The client's descriptor has an open file description of its own, opened read-only, so the client
 * cannot affect this process's descriptor by changing flags, locks or the position. The client's
 * descriptor stays valid when the file is unlinked, so a client may continue to read data that
 * retention or compaction has replaced.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/local/local.h"
#include "server/reactor.h"
#include "server/rights/subject.h"

#define QUERIES_PER_TURN 16
#define TRY_COUNT_MAX 4
#define SEGMENT_BYTES_MAX (1u << 31) /* positions in a segment are below this; nothing beyond is mapped */

/* ---- one query ---- */

static int16_t find_slot(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_local_query *query,
                         struct mqd_topic **topic, uint32_t *slot_index)
{
    struct mqd_topic_key key = {.by_id = true};
    memcpy(key.topic_id, query->topic_id, sizeof key.topic_id);
    *topic = mqd_topics_find(&r->topics, &key);
    if (!*topic)
        return MQD_KAFKA_UNKNOWN_TOPIC_ID;
    if (!mqd_subject_is_allowed(r, c, *topic, MQD_OPERATION_READ))
        return MQD_KAFKA_TOPIC_AUTHORIZATION_FAILED;
    if (mqd_subject_is_stale(r))
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    if (query->partition_index < 0 || (uint32_t)query->partition_index >= (*topic)->partition_count)
        return MQD_KAFKA_UNKNOWN_TOPIC_OR_PARTITION;
    if ((*topic)->view)
        return MQD_KAFKA_REPLICA_NOT_AVAILABLE; /* the base topic's files have records that the view must not return */
    *slot_index = (*topic)->slots[query->partition_index];
    bool led_elsewhere = mqd_topics_is_led_elsewhere(&r->topics, &(*topic)->partitions[query->partition_index]);
    if (*slot_index == MQD_SLOT_NONE)
        return led_elsewhere ? MQD_KAFKA_REPLICA_NOT_AVAILABLE : MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, *slot_index);
    uint8_t state = mqd_load_acquire(&slot->state);
    if (state == MQD_SLOT_OFFLINE && led_elsewhere)
        return MQD_KAFKA_REPLICA_NOT_AVAILABLE; /* this host's log directory has failed; the leader may have the file */
    if (state != MQD_SLOT_ONLINE && state != MQD_SLOT_OFFLINE)
        return MQD_KAFKA_NOT_LEADER_OR_FOLLOWER;
    return mqd_load_acquire(&slot->version) == 0 ? MQD_KAFKA_STORAGE_ERROR : 0;
}

static int reopen_read_only(int fd)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

/* Fills in the response from `location`. Returns a descriptor of the segment's file, or -1. */
static int fill_response(struct mqd_local_segment *response, const struct mqd_segment_location *location,
                         uint64_t generation)
{
    response->base_offset = location->base_offset;
    response->next_base_offset = location->next_base_offset;
    response->segments_generation = generation;
    response->position = location->position;
    response->size_bytes = location->readable_bytes;
    response->map_bytes = location->next_base_offset == INT64_MAX ? SEGMENT_BYTES_MAX
                          : location->readable_bytes              ? location->readable_bytes
                                                                  : 1;
    return reopen_read_only(mqd_segment_ref_fd(location->segment));
}

static int respond_segment(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_local_query *query,
                           struct mqd_local_segment *response)
{
    struct mqd_topic *topic;
    int16_t code = find_slot(r, c, query, &topic, &response->slot);
    int fd = -1;
    if (code == 0) {
        mqd_fetch_ensure_path(r, topic, query->partition_index, response->slot);
        code = -1; /* not located yet: try, or try again */
    }
    for (int tries = 0; tries < TRY_COUNT_MAX && code == -1; tries++) {
        struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, response->slot);
        struct mqd_positions positions;
        struct mqd_segment_location location;
        uint64_t generation = mqd_load_acquire(&slot->segments_generation);
        mqd_slot_positions(slot, &positions);
        if (mqd_load_acquire(&slot->lagging) &&
            (query->offset < positions.log_start_offset || query->offset >= positions.high_watermark)) {
            code = MQD_KAFKA_REPLICA_NOT_AVAILABLE;
            break;
        }
        if (query->offset < positions.log_start_offset || query->offset > positions.high_watermark) {
            /* if this replica may lag, the client retries */
            bool may_lag = r->lease_lost || mqd_load_acquire(&slot->role) != MQD_ROLE_LEADS ||
                           mqd_load_acquire(&slot->latest_pending);
            code = may_lag && query->offset > positions.high_watermark ? MQD_KAFKA_NOT_LEADER_OR_FOLLOWER
                                                                       : MQD_KAFKA_OFFSET_OUT_OF_RANGE;
            break;
        }
        code = mqd_reader_locate(r->reader, response->slot, &positions, generation, query->offset, &location);
        if (code)
            continue;
        if (mqd_reader_is_swapping(r->reader, response->slot))
            fd = fill_response(response, &location, MQD_LOCAL_CHANGING);
        else
            fd = fill_response(response, &location, generation);
        if (location.next_base_offset == INT64_MAX)
            r->subjects->mapped_by_clients[response->slot] = 1;
        if (fd < 0) {
            code = MQD_KAFKA_STORAGE_ERROR;
            mqd_error_system(errno, "cannot open a segment again through /proc");
        }
        mqd_segment_location_release(r->reader, &location);
    }
    if (code == MQD_KAFKA_STORAGE_ERROR)
        mqd_log(r, 4, 0, response->slot, "a local client's query for offset %lld failed: %s", (long long)query->offset,
                mqd_error_message());
    /* -1: the segments keep changing; the client retries */
    response->error = code == -1 ? MQD_KAFKA_NOT_LEADER_OR_FOLLOWER : code;
    return fd;
}

/* ---- the socket ---- */

/* Returns false if the socket has no room now. */
static bool send_response(struct mqd_local *local)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec iov = {&local->response, sizeof local->response};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (local->response_fd >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.header), &local->response_fd, sizeof(int));
    }
    ssize_t sent;
    do
        sent = sendmsg(local->connection->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    /* the kernel has no memory, or the user has too many descriptors in flight to other
     * processes */
    local->response_refused = sent < 0 && (errno == ENOBUFS || errno == ETOOMANYREFS);
    if (sent < 0 && (errno == EAGAIN || local->response_refused))
        return false;
    mqd_local_query_close(local); /* sent; or the connection is broken, which an event reports */
    return true;
}

void mqd_local_query_close(struct mqd_local *local)
{
    if (local->response_fd >= 0)
        close(local->response_fd);
    local->response_fd = -1;
    local->response_waits = false;
}

/* Handles one query. Returns false if no more can be handled now, or if the connection is closed
 * (*closed). */
static bool respond_one(struct mqd_reactor *r, struct mqd_local *local, bool *closed)
{
    struct mqd_connection *c = local->connection;
    struct mqd_local_query query;
    *closed = false;
    if (c->awaits_subject)
        return false; /* the query is handled when the client's rights are known */
    if (local->response_waits && !send_response(local))
        return false;
    ssize_t n;
    do
        n = recv(c->fd, &query, sizeof query, MSG_DONTWAIT | MSG_TRUNC);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN)
        return false;
    if (n <= 0) {
        mqd_local_on_end(r, c);
        return false;
    }
    if (n != sizeof query || query.kind != MQD_LOCAL_QUERY_SEGMENT) {
        *closed = true;
        mqd_connection_fail(r, c, "a local client sent a query that this version does not know");
        return false;
    }
    mqd_stat(r, MQD_COUNT_LOCAL_LOOKUPS, 1);
    c->last_active_ms = r->now_ms;
    local->response = (struct mqd_local_segment){.kind = query.kind, .number = query.number, .slot = UINT32_MAX};
    local->response_fd = respond_segment(r, c, &query, &local->response);
    local->response_waits = true;
    return send_response(local);
}

void mqd_local_query_schedule(struct mqd_reactor *r, struct mqd_local *local)
{
    if (!mqd_list_linked(&local->query_node))
        mqd_list_append(&r->queries, &local->query_node);
}

void mqd_locals_respond(struct mqd_reactor *r)
{
    struct mqd_node queries, *node;
    mqd_list_init(&queries);
    mqd_list_move_all(&queries, &r->queries);
    while ((node = mqd_list_pop(&queries))) {
        struct mqd_local *local = MQD_CONTAINER(node, struct mqd_local, query_node);
        bool closed = false, more = true;
        for (int i = 0; i < QUERIES_PER_TURN && more; i++)
            more = respond_one(r, local, &closed);
        if (!closed && more)
            /* further queries are handled in the next turn, because other clients wait too */
            mqd_local_query_schedule(r, local);
        else if (!closed && local->response_waits && local->response_refused)
            mqd_list_append(&r->query_later, &local->query_node);
    }
}
