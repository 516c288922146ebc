/* Quotas in the reactor: charges clients, and does not read from connections whose client is over
 * its quota (KIP-13, KIP-124, KIP-219).
 *
 * The reactor never refuses a request or delays a response because of a quota: it charges the
 * request, answers it immediately with throttle_time_ms, and then mutes (does not read) the
 * connection until the debt is paid. Until then the client's requests stay in its socket. Clients
 * that know KIP-219 wait by themselves; older clients are slowed down by their own full sockets.
 * Memory is bounded as for any other connection.
 *
 * All connections of the clients that a rule counts together (shm/quota.h) share the rule's
 * buckets, on all workers. The debt is checked before a connection is read and before each frame,
 * so a new connection does not avoid the quota, except for one large frame (the client id is not
 * known before the frame has been received). The user is the connection's principal, or ANONYMOUS
 * if the listener does not authenticate; requests before authentication are bounded by
 * server/authentication.h and not charged. A connection whose client has hung up is not muted: the
 * debt may last for minutes, the connection would stay open for that time, and a client that
 * repeatedly gives up and reconnects would accumulate connections. Requests still in its socket are
 * served and charged as usual.
 *
 * The produce and fetch kinds count bytes. The request kind counts nanoseconds of this thread spent
 * on a request (the acceptor charges its own time). Internal writes of brokers (coordinators,
 * followers) are not charged.
 *
 * Muted connections are in a timer wheel of 256 ticks of 4 ms. A longer wait is checked again about
 * once a second, so that a raised quota releases the connection. Without quotas the cost is one
 * relaxed load per turn and one test of a byte per charge.
 */
#include <string.h>
#include <time.h>

#include "base/big_endian.h"
#include "server/authentication.h"
#include "server/reactor.h"
#include "shm/quota.h"

#define RECHECK_TICKS (MQD_MUTE_TICK_COUNT - 2)
#define CREATE_TOPICS 19
#define DELETE_TOPICS 20
#define CREATE_PARTITIONS 37

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void mqd_throttle_refresh(struct mqd_reactor *r)
{
    r->quota_kinds = (uint8_t)mqd_quota_refresh(r->options.control, r->quota_limits);
    r->quota_version = mqd_quota_limits_version(r->quota_limits);
}

/* The key of the principal's name, whatever the principal's type (KIP-55). */
static uint64_t user_key(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    static const char anonymous[] = "ANONYMOUS";
    const char *colon = c->principal ? memchr(c->principal, ':', c->principal_bytes) : NULL;
    if (!colon)
        return mqd_quota_key(r->options.control, (const uint8_t *)anonymous, sizeof anonymous - 1);
    return mqd_quota_key(r->options.control, (const uint8_t *)colon + 1,
                         (uint32_t)(c->principal + c->principal_bytes - colon - 1));
}

/* The kinds that a request of this API is charged for. When a client is over its mutation quota,
 * the acceptor refuses its requests to create or delete topics and partitions. Older versions of
 * these requests have no error code for that, so the connection is muted instead (KIP-599). */
static uint32_t kinds_of(int16_t api_key, int16_t version)
{
    uint32_t kinds = 1u << MQD_QUOTA_REQUEST;
    switch (api_key) {
    case MQD_API_PRODUCE:
        return kinds | 1u << MQD_QUOTA_PRODUCE;
    case MQD_API_FETCH:
    case MQD_API_SHARE_FETCH:
        return kinds | 1u << MQD_QUOTA_FETCH;
    case CREATE_TOPICS:
        return kinds | (version < 6) << MQD_QUOTA_MUTATION;
    case DELETE_TOPICS:
        return kinds | (version < 5) << MQD_QUOTA_MUTATION;
    case CREATE_PARTITIONS:
        return kinds | (version < 3) << MQD_QUOTA_MUTATION;
    default:
        return kinds;
    }
}

/* Finds the limits that apply to the connection: those of its user and of the client id in this
 * request's header. False: the connection is not charged, or the header is invalid (the parser
 * reports that later). */
static bool find_limits(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame, uint32_t size_bytes)
{
    /* If c belongs to another host, that host has charged the client, and a debt of c would delay
     * all clients whose requests arrive on c. */
    if (size_bytes < 10 || c->peer_node >= 0 || c->authentication == MQD_AUTHENTICATION_PENDING)
        return false;
    int16_t length = (int16_t)mqd_get_be16(frame + 8);
    if (length > 0 && (uint32_t)length > size_bytes - 10)
        return false;
    uint64_t client_key = mqd_quota_key(r->options.control, frame + 10, length > 0 ? (uint32_t)length : 0);
    if (client_key != c->quota_client || r->quota_version != c->quota_version) {
        mqd_quota_match(r->quota_limits, user_key(r, c), client_key, &c->quota);
        c->quota_client = client_key;
        c->quota_version = r->quota_version;
        c->quota_kinds = 0;
    }
    c->quota_kinds |= kinds_of((int16_t)mqd_get_be16(frame), (int16_t)mqd_get_be16(frame + 2));
    return true;
}

/* ---- muting ---- */

static void enter_wheel(struct mqd_reactor *r, struct mqd_connection *c, int64_t until_ns)
{
    if (!r->muted_count++)
        r->mute_tick = r->now_ms / MQD_MUTE_TICK_MS;
    c->muted = 1;
    c->muted_until_ns = until_ns;
    int64_t tick = c->muted_until_ns / 1000000 / MQD_MUTE_TICK_MS + 1, last_tick = r->mute_tick + RECHECK_TICKS;
    if (tick > last_tick)
        tick = last_tick;
    if (tick <= r->mute_tick)
        tick = r->mute_tick + 1;
    mqd_list_append(&r->mute_wheel[tick % MQD_MUTE_TICK_COUNT], &c->mute_node);
    if (tick < r->mute_due_tick)
        r->mute_due_tick = tick;
}

static void mute(struct mqd_reactor *r, struct mqd_connection *c, int64_t delay_ns)
{
    int64_t until_ns = r->now_ns + delay_ns;
    if (delay_ns <= 0 || c->fd < 0 || c->hangup)
        return;
    if (c->muted) {
        if (until_ns > c->muted_until_ns)
            c->muted_until_ns = until_ns; /* the connection is checked again at its tick */
        return;
    }
    mqd_stat(r, MQD_COUNT_THROTTLED, 1);
    mqd_list_remove(&c->ready_node);
    if (r->run_waiter == c)
        r->run_waiter = NULL;
    enter_wheel(r, c, until_ns);
}

void mqd_throttle_unmute(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (!c->muted)
        return;
    c->muted = 0;
    mqd_list_remove(&c->mute_node);
    if (!--r->muted_count)
        r->mute_due_tick = INT64_MAX;
}

/* Returns the client's largest debt among the kinds that this connection has used; the client's
 * other connections may have added to it. */
static int64_t debt_ns(struct mqd_reactor *r, struct mqd_connection *c)
{
    int64_t largest_ns = 0;
    if (c->quota_version != r->quota_version)
        return 0; /* the limits changed: the old debt is dropped, and the next request identifies the client again */
    for (uint32_t kind = 0; kind < MQD_QUOTA_KIND_COUNT; kind++) {
        if (!(c->quota_kinds >> kind & 1) || !c->quota.interval[kind])
            continue;
        int64_t kind_ns = mqd_quota_debt_ns(r->options.control, c->quota.bucket_key[kind], (enum mqd_quota_kind)kind,
                                            mqd_quota_limits_burst_ns(r->quota_limits, kind), r->now_ns);
        largest_ns = kind_ns > largest_ns ? kind_ns : largest_ns;
    }
    return largest_ns;
}

static void check_muted(struct mqd_reactor *r, struct mqd_connection *c)
{
    int64_t delay_ns = debt_ns(r, c);
    mqd_throttle_unmute(r, c);
    if (delay_ns > 0) {
        enter_wheel(r, c, r->now_ns + delay_ns);
        return;
    }
    c->last_active_ms = r->now_ms; /* the connection was muted, not idle */
    mqd_connection_resume(r, c);
}

void mqd_throttle_run(struct mqd_reactor *r)
{
    int64_t now_tick = r->now_ms / MQD_MUTE_TICK_MS;
    if (now_tick < r->mute_due_tick)
        return;
    struct mqd_node due;
    mqd_list_init(&due);
    for (int64_t tick = r->mute_tick + 1; tick <= now_tick && tick <= r->mute_tick + MQD_MUTE_TICK_COUNT; tick++)
        mqd_list_move_all(&due, &r->mute_wheel[tick % MQD_MUTE_TICK_COUNT]);
    r->mute_tick = now_tick;
    r->mute_due_tick = INT64_MAX;
    while (!mqd_list_empty(&due))
        check_muted(r, MQD_CONTAINER(due.next, struct mqd_connection, mute_node));
    for (int64_t tick = now_tick + 1;
         r->muted_count && tick < now_tick + MQD_MUTE_TICK_COUNT && tick < r->mute_due_tick; tick++)
        if (!mqd_list_empty(&r->mute_wheel[tick % MQD_MUTE_TICK_COUNT]))
            r->mute_due_tick = tick;
}

/* ---- charging ---- */

void mqd_throttle_charge_slow(struct mqd_reactor *r, struct mqd_connection *c, uint32_t kind, uint64_t units)
{
    if (!c || c->fd < 0 || !c->quota.interval[kind] || c->quota_version != r->quota_version)
        return;
    mute(r, c,
         mqd_quota_charge(r->options.control, c->quota.bucket_key[kind], (enum mqd_quota_kind)kind,
                          c->quota.interval[kind], units, mqd_quota_limits_burst_ns(r->quota_limits, kind), r->now_ns));
}

bool mqd_throttle_admit_slow(struct mqd_reactor *r, struct mqd_connection *c, const uint8_t *frame, uint32_t size_bytes)
{
    if (frame && !find_limits(r, c, frame, size_bytes))
        return true;
    if (!c->quota_kinds)
        return true;
    mute(r, c, debt_ns(r, c));
    return !c->muted;
}

int32_t mqd_throttle_time_ms(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    if (!c || !c->muted || c->muted_until_ns <= r->now_ns)
        return 0;
    int64_t ms = (c->muted_until_ns - r->now_ns + 999999) / 1000000;
    return ms > INT32_MAX ? INT32_MAX : (int32_t)ms;
}

/* One response should not be charged more than the burst, as in Kafka. The first batch of a
 * response is always sent whole. */
int32_t mqd_throttle_fetch_bytes_max(const struct mqd_reactor *r, const struct mqd_connection *c, int32_t bytes_max)
{
    uint64_t interval = c->quota.interval[MQD_QUOTA_FETCH];
    if (!(r->quota_kinds >> MQD_QUOTA_FETCH & 1) || !interval || c->quota_version != r->quota_version)
        return bytes_max;
    uint64_t burst_ns = (uint64_t)mqd_quota_limits_burst_ns(r->quota_limits, MQD_QUOTA_FETCH);
    unsigned __int128 bytes = ((unsigned __int128)burst_ns << 32) / interval;
    return bytes < (unsigned __int128)(uint32_t)bytes_max ? (int32_t)bytes : bytes_max;
}

void mqd_throttle_dispatch_frame(struct mqd_reactor *r, struct mqd_connection *c, uint8_t *frame, uint32_t size_bytes,
                                 int64_t arena_offset)
{
    uint64_t id = c->id;
    if (!find_limits(r, c, frame, size_bytes) || !c->quota.interval[MQD_QUOTA_REQUEST]) {
        mqd_dispatch_frame(r, c, frame, size_bytes, arena_offset);
        return;
    }
    int64_t began_ns = clock_ns();
    mqd_dispatch_frame(r, c, frame, size_bytes, arena_offset);
    if (c->id == id)
        mqd_throttle_charge_slow(r, c, MQD_QUOTA_REQUEST, (uint64_t)(clock_ns() - began_ns));
}

/* Measures and charges the time spent for a connection outside frame handling: encoding and sending
 * responses. */
int64_t mqd_throttle_measure_begin(const struct mqd_reactor *r, const struct mqd_connection *c)
{
    return c->quota.interval[MQD_QUOTA_REQUEST] && c->quota_version == r->quota_version ? clock_ns() : 0;
}

void mqd_throttle_measure_end(struct mqd_reactor *r, struct mqd_connection *c, int64_t began_ns)
{
    if (began_ns)
        mqd_throttle_charge_slow(r, c, MQD_QUOTA_REQUEST, (uint64_t)(clock_ns() - began_ns));
}

/* Writes throttle_time_ms into a response that was built before its cost was known, in versions
 * with that field: Metadata and ListOffsets begin with it. Responses from the acceptor already have
 * the time that the acceptor charged. */
void mqd_throttle_write_time(struct mqd_reactor *r, struct mqd_request *request)
{
    int32_t ms = mqd_throttle_time_ms(r, request->connection);
    bool is_metadata = request->api_key == MQD_API_METADATA && request->version >= 3,
         is_list_offsets = request->api_key == MQD_API_LIST_OFFSETS && request->version >= 2;
    if (!ms || request->kind != MQD_REQUEST_READY || !(is_metadata || is_list_offsets))
        return;
    /* the field follows the correlation id and, in a flexible header, the tagged fields */
    uint32_t field_offset = 4 + (request->version >= (is_metadata ? 9 : 6));
    if (request->reply.size_bytes < field_offset + 4)
        return;
    uint8_t *field = request->reply.bytes + field_offset;
    field[0] = (uint8_t)(ms >> 24);
    field[1] = (uint8_t)(ms >> 16);
    field[2] = (uint8_t)(ms >> 8);
    field[3] = (uint8_t)ms;
}
