/* The partitions of a fetch: a set for one request, or one that persists as an incremental session
 * (KIP-227).
 *
 * A set has all its partitions in `entries`, in the order in which the client named them; those
 * that must be evaluated are also in the list `ready`. An entry that has been read to the high
 * watermark leaves `ready` and waits on its slot, so in a session of thousands of idle partitions
 * only the changed ones cost time.
 *
 * Entries are keyed by the topic name or id in the request, not by the topic that it resolves to:
 * the topic may appear later, or be deleted and created again under its name. A client that names
 * an unknown partition in every request adds only one entry.
 *
 * Bounds: MQD_PARTITION_SLOT_COUNT partitions in a set, because a broker cannot have more;
 * session_count_max sessions, which may use half of heap_bytes_max. When these are exhausted, a
 * session that has been idle for MQD_SESSION_IDLE_MS is removed; if there is none, the client gets
 * session id 0 (full fetches).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "server/reactor.h"

#define MQD_SESSION_IDLE_MS 120000
#define ENTRY_SHARE_BYTES (6 * sizeof(void *)) /* the entry's share of `entries` and the buckets */

static uint32_t bucket_index_of(const struct mqd_topic_key *key, int32_t partition_index, uint32_t bucket_count)
{
    const uint8_t *bytes = key->by_id ? key->topic_id : key->name.bytes;
    int32_t size_bytes = key->by_id ? 16 : key->name.size_bytes;
    uint64_t hash = 0xcbf29ce484222325ull ^ (uint32_t)partition_index * 0xc2b2ae3d27d4eb4full;
    for (int32_t i = 0; i < size_bytes; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return (uint32_t)(hash >> 32) & (bucket_count - 1);
}

static bool same_key(const struct mqd_topic_key *a, const struct mqd_topic_key *b)
{
    if (a->by_id != b->by_id)
        return false;
    if (a->by_id)
        return memcmp(a->topic_id, b->topic_id, 16) == 0;
    return a->name.size_bytes == b->name.size_bytes &&
           (a->name.size_bytes <= 0 || memcmp(a->name.bytes, b->name.bytes, (size_t)a->name.size_bytes) == 0);
}

struct mqd_fetch_set *mqd_fetch_set_new(struct mqd_reactor *r)
{
    struct mqd_fetch_set *set = calloc(1, sizeof *set);
    if (!set)
        return NULL;
    mqd_list_init(&set->ready);
    mqd_list_init(&set->woken);
    mqd_list_init(&set->session_node);
    set->replica_id = -1;
    set->last_used_ms = r->now_ms;
    return set;
}

/* Adds `bytes`, which may be negative, to the heap bytes that the set accounts for. */
static void account_set_bytes(struct mqd_reactor *r, struct mqd_fetch_set *set, int64_t bytes)
{
    set->heap_bytes += (uint64_t)bytes;
    if (set->session_id)
        r->session_heap_bytes += (uint64_t)bytes;
}

static void entry_free(struct mqd_reactor *r, struct mqd_fetch_entry *entry)
{
    mqd_heap_release(r, entry->heap_bytes);
    account_set_bytes(r, entry->set, -(int64_t)entry->heap_bytes);
    mqd_list_remove(&entry->waiter);
    mqd_list_remove(&entry->ready);
    if (entry->range.segment)
        mqd_range_release(r->reader, &entry->range);
    mqd_topic_release(entry->topic);
    free(entry);
}

void mqd_fetch_set_free(struct mqd_reactor *r, struct mqd_fetch_set *set)
{
    for (uint32_t i = 0; i < set->entry_count; i++)
        entry_free(r, set->entries[i]);
    mqd_list_remove(&set->woken);
    mqd_list_remove(&set->session_node);
    free(set->entries);
    free(set->buckets);
    free(set->included);
    free(set->principal);
    free(set);
}

static void rehash(struct mqd_fetch_set *set)
{
    uint32_t count = 16;
    while (count < set->entry_count * 2)
        count *= 2;
    struct mqd_fetch_entry **buckets = calloc(count, sizeof *buckets);
    /* freed even if new buckets cannot be allocated, because the old ones may refer to freed
     * entries */
    free(set->buckets);
    set->buckets = buckets;
    set->bucket_count = buckets ? count : 0;
    if (!buckets)
        return;
    for (uint32_t i = 0; i < set->entry_count; i++) {
        struct mqd_fetch_entry *entry = set->entries[i];
        if (entry->forgotten)
            continue;
        uint32_t bucket = bucket_index_of(&entry->key, entry->partition_index, count);
        entry->hash_next = buckets[bucket];
        buckets[bucket] = entry;
    }
}

static struct mqd_fetch_entry *lookup(struct mqd_fetch_set *set, const struct mqd_topic_key *key,
                                      int32_t partition_index)
{
    if (!set->bucket_count)
        return NULL;
    struct mqd_fetch_entry *entry = set->buckets[bucket_index_of(key, partition_index, set->bucket_count)];
    while (entry && (entry->partition_index != partition_index || entry->forgotten || !same_key(&entry->key, key)))
        entry = entry->hash_next;
    return entry;
}

/* Called if the entry has no topic or a deleted one: looks the topic up by name or id, and resets
 * what the entry remembers about the old topic. Returns false if there is no such topic. */
bool mqd_fetch_entry_resolve(struct mqd_reactor *r, struct mqd_fetch_entry *entry)
{
    struct mqd_topic *topic = mqd_topics_find(&r->topics, &entry->key);
    if (!topic)
        return false;
    topic->reference_count++;
    entry->key.name = (struct mqd_text){(const uint8_t *)topic->name, (int32_t)topic->name_bytes};
    mqd_topic_release(entry->topic);
    entry->topic = topic;
    entry->cursor = (struct mqd_cursor){0};
    entry->skipped = entry->has_skipped_batch = 0;
    entry->sent_once = 0;
    mqd_list_remove(&entry->waiter);
    return true;
}

static struct mqd_fetch_entry *entry_new(struct mqd_reactor *r, struct mqd_fetch_set *set,
                                         const struct mqd_topic_key *key, struct mqd_topic *topic)
{
    if (set->entry_count >= MQD_PARTITION_SLOT_COUNT) {
        mqd_error_set(MQD_E_INVALID, "a fetch of more than %d partitions, which is more than a broker can have",
                      MQD_PARTITION_SLOT_COUNT);
        return NULL;
    }
    if (set->entry_count == set->entry_capacity) {
        uint32_t capacity = set->entry_capacity ? set->entry_capacity * 2 : 8;
        struct mqd_fetch_entry **entries = realloc(set->entries, sizeof *entries * capacity);
        if (!entries) {
            mqd_error_set(ENOMEM, "out of memory for another fetched partition");
            return NULL;
        }
        set->entries = entries;
        set->entry_capacity = capacity;
    }
    /* The name of an unknown topic is stored after the entry, for the response. */
    uint32_t name_bytes = topic || key->by_id || key->name.size_bytes < 0 ? 0 : (uint32_t)key->name.size_bytes;
    uint32_t heap_bytes = (uint32_t)sizeof(struct mqd_fetch_entry) + name_bytes + ENTRY_SHARE_BYTES;
    bool taken = mqd_heap_take(r, heap_bytes);
    struct mqd_fetch_entry *entry = taken ? calloc(1, sizeof *entry + name_bytes) : NULL;
    if (!entry) {
        if (taken)
            mqd_heap_release(r, heap_bytes);
        mqd_error_set(ENOMEM, "no memory for another fetched partition (queued.max.request.bytes)");
        return NULL;
    }
    entry->heap_bytes = heap_bytes;
    account_set_bytes(r, set, heap_bytes);
    mqd_list_init(&entry->waiter);
    mqd_list_init(&entry->ready);
    entry->set = set;
    entry->key = *key;
    entry->topic = topic;
    if (topic) {
        topic->reference_count++;
        entry->key.name = (struct mqd_text){(const uint8_t *)topic->name, (int32_t)topic->name_bytes};
    } else if (!key->by_id) {
        memcpy(entry + 1, key->name.bytes, name_bytes);
        entry->key.name = (struct mqd_text){(const uint8_t *)(entry + 1), (int32_t)name_bytes};
    }
    entry->order = set->entry_count;
    set->entries[set->entry_count++] = entry;
    return entry;
}

struct mqd_fetch_entry *mqd_fetch_set_put(struct mqd_reactor *r, struct mqd_fetch_set *set,
                                          const struct mqd_topic_key *key, const struct mqd_fetch_partition *partition)
{
    struct mqd_fetch_entry *entry = set->session_id ? lookup(set, key, partition->partition_index) : NULL;
    if (!entry) {
        entry = entry_new(r, set, key, mqd_topics_find(&r->topics, key));
        if (!entry)
            return NULL;
        entry->partition_index = partition->partition_index;
        if (set->bucket_count && set->entry_count * 2 > set->bucket_count) {
            rehash(set);
        } else if (set->bucket_count) {
            uint32_t bucket = bucket_index_of(&entry->key, entry->partition_index, set->bucket_count);
            entry->hash_next = set->buckets[bucket];
            set->buckets[bucket] = entry;
        }
    }
    if (entry->fetch_offset != partition->fetch_offset)
        entry->skipped = entry->has_skipped_batch = 0;
    entry->fetch_offset = partition->fetch_offset;
    entry->bytes_max = partition->bytes_max;
    entry->current_leader_epoch = partition->current_leader_epoch;
    entry->last_fetched_epoch = partition->last_fetched_epoch;
    if (!mqd_list_linked(&entry->ready))
        mqd_list_append(&set->ready, &entry->ready);
    return entry;
}

void mqd_fetch_set_remove(struct mqd_fetch_set *set, const struct mqd_topic_key *key, int32_t partition_index)
{
    struct mqd_fetch_entry *entry;
    while ((entry = lookup(set, key, partition_index))) /* a request may have named it twice */
        entry->forgotten = 1;
}

void mqd_fetch_set_compact(struct mqd_reactor *r, struct mqd_fetch_set *set)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < set->entry_count; i++) {
        struct mqd_fetch_entry *entry = set->entries[i];
        if (entry->forgotten) {
            entry_free(r, entry);
        } else {
            entry->order = kept;
            set->entries[kept++] = entry;
        }
    }
    if (kept != set->entry_count) {
        set->entry_count = kept;
        rehash(set);
    }
}

/* ---- the session cache ---- */

static struct mqd_fetch_set *session_by_id(struct mqd_reactor *r, int32_t session_id)
{
    struct mqd_fetch_set *set = r->session_table[(uint32_t)session_id % MQD_SESSION_TABLE_COUNT];
    return set && set->session_id == session_id ? set : NULL;
}

static uint64_t next_random(struct mqd_reactor *r)
{
    r->random_state ^= r->random_state << 13;
    r->random_state ^= r->random_state >> 7;
    return r->random_state ^= r->random_state << 17;
}

void mqd_session_remove(struct mqd_reactor *r, struct mqd_fetch_set *set)
{
    if (!set->session_id)
        return;
    r->session_table[(uint32_t)set->session_id % MQD_SESSION_TABLE_COUNT] = NULL;
    mqd_list_remove(&set->session_node);
    set->session_id = 0;
    r->session_heap_bytes -= set->heap_bytes;
    r->session_count--;
    mqd_set_gauge(r, MQD_GAUGE_SESSIONS, r->session_count);
    if (set->request_count)
        return; /* mqd_fetch_detach frees the set when its request ends */
    mqd_fetch_set_free(r, set);
}

bool mqd_session_is_usable_by(const struct mqd_fetch_set *set, const struct mqd_connection *c)
{
    return !set->principal == !c->principal &&
           (!set->principal || (set->principal_bytes == c->principal_bytes &&
                                memcmp(set->principal, c->principal, set->principal_bytes) == 0));
}

static bool copy_principal(struct mqd_fetch_set *set, const struct mqd_connection *c)
{
    if (!c->principal)
        return true;
    if (!(set->principal = malloc(c->principal_bytes)))
        return false;
    memcpy(set->principal, c->principal, c->principal_bytes);
    set->principal_bytes = c->principal_bytes;
    return true;
}

void mqd_session_create(struct mqd_reactor *r, const struct mqd_connection *c, struct mqd_fetch_set *set)
{
    bool full = r->session_count >= r->options.session_count_max ||
                r->session_heap_bytes + set->heap_bytes > r->options.heap_bytes_max / 2;
    if (full && !mqd_list_empty(&r->sessions)) {
        struct mqd_fetch_set *oldest = MQD_CONTAINER(r->sessions.next, struct mqd_fetch_set, session_node);
        if (!oldest->request_count && r->now_ms - oldest->last_used_ms > MQD_SESSION_IDLE_MS)
            mqd_session_remove(r, oldest);
    }
    if (r->session_count >= r->options.session_count_max ||
        r->session_heap_bytes + set->heap_bytes > r->options.heap_bytes_max / 2 || !copy_principal(set, c))
        return;
    for (int tries = 0; tries < 64; tries++) {
        int32_t id = (int32_t)(next_random(r) & 0x7fffffff);
        if (!id || r->session_table[(uint32_t)id % MQD_SESSION_TABLE_COUNT])
            continue;
        r->session_table[(uint32_t)id % MQD_SESSION_TABLE_COUNT] = set;
        set->session_id = id;
        set->session_epoch = 1;
        r->session_heap_bytes += set->heap_bytes;
        r->session_count++;
        mqd_set_gauge(r, MQD_GAUGE_SESSIONS, r->session_count);
        mqd_list_append(&r->sessions, &set->session_node);
        rehash(set);
        return;
    }
}

int16_t mqd_session_begin_request(struct mqd_reactor *r, const struct mqd_connection *c,
                                  const struct mqd_fetch_request *fetch, struct mqd_fetch_set **set, bool *full,
                                  bool *create)
{
    *set = NULL;
    *full = true;
    *create = fetch->session_epoch == 0;
    struct mqd_fetch_set *session = fetch->session_id ? session_by_id(r, fetch->session_id) : NULL;
    if (session && (session->replica_id != fetch->replica_id || !mqd_session_is_usable_by(session, c)))
        session = NULL; /* the session belongs to another client */
    /* 0 opens a new session, -1 does not: in both cases the old session ends */
    if (fetch->session_epoch <= 0) {
        if (session)
            mqd_session_remove(r, session);
        return 0;
    }
    if (!session)
        return MQD_KAFKA_FETCH_SESSION_ID_NOT_FOUND;
    if (session->session_epoch != fetch->session_epoch || session->request_count)
        return MQD_KAFKA_INVALID_FETCH_SESSION_EPOCH;
    if (session->by_id != (fetch->version >= 13))
        return MQD_KAFKA_FETCH_SESSION_TOPIC_ID_ERROR;
    session->session_epoch = session->session_epoch == INT32_MAX ? 1 : session->session_epoch + 1;
    session->last_used_ms = r->now_ms;
    mqd_list_remove(&session->session_node);
    mqd_list_append(&r->sessions, &session->session_node);
    *set = session;
    *full = false;
    return 0;
}
