/* Share sessions. See share/sessions.h. */
#include "share/sessions.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "wire/kafka_errors.h"

#define FINAL_EPOCH (-1)
#define DEFAULT_LOCK_MS 30000 /* Kafka's default, until an owner reports the group's value */

static uint64_t hash_append(uint64_t hash, const void *bytes, uint32_t size_bytes)
{
    for (const uint8_t *at = bytes, *end = at + size_bytes; at < end; at++)
        hash = (hash ^ *at) * 0x100000001b3ull;
    return hash;
}

static uint64_t hash_finish(uint64_t hash)
{
    hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93ull;
    return hash ^ hash >> 32;
}

uint64_t mqd_share_member_hash(const void *bytes, uint32_t size_bytes)
{
    return hash_finish(hash_append(0xcbf29ce484222325ull, bytes, size_bytes));
}

static uint32_t size_of(struct mqd_text text)
{
    return text.size_bytes > 0 ? (uint32_t)text.size_bytes : 0;
}

static uint64_t hash_of(struct mqd_text group, struct mqd_text member)
{
    uint32_t group_bytes = size_of(group);
    uint64_t hash = hash_append(0xcbf29ce484222325ull, &group_bytes, sizeof group_bytes);
    return hash_finish(hash_append(hash_append(hash, group.bytes, size_of(group)), member.bytes, size_of(member)));
}

struct mqd_share_session *mqd_share_session_find(const struct mqd_share_sessions *sessions, struct mqd_text group,
                                                 struct mqd_text member)
{
    uint64_t hash = hash_of(group, member);
    struct mqd_share_session *session = sessions->buckets[hash % MQD_SHARE_SESSION_BUCKET_COUNT];
    while (session &&
           (session->hash != hash || session->group_bytes != size_of(group) ||
            session->member_bytes != size_of(member) || memcmp(session->text, group.bytes, session->group_bytes) != 0 ||
            memcmp(session->text + session->group_bytes, member.bytes, session->member_bytes) != 0))
        session = session->next;
    return session;
}

struct mqd_share_session *mqd_share_session_find_by_number(const struct mqd_share_sessions *sessions, uint64_t hash,
                                                           uint64_t number)
{
    struct mqd_share_session *session = sessions->buckets[hash % MQD_SHARE_SESSION_BUCKET_COUNT];
    while (session && session->number != number)
        session = session->next;
    return session;
}

int16_t mqd_share_session_check(const struct mqd_share_session *session, int32_t epoch,
                                enum mqd_share_session_need need)
{
    if (epoch == 0)
        return need == MQD_SHARE_MAY_OPEN ? 0 : MQD_KAFKA_INVALID_SHARE_SESSION_EPOCH;
    if (!session)
        return MQD_KAFKA_SHARE_SESSION_NOT_FOUND;
    return epoch == FINAL_EPOCH || epoch == session->epoch ? 0 : MQD_KAFKA_INVALID_SHARE_SESSION_EPOCH;
}

void mqd_share_session_advance_epoch(struct mqd_share_session *session)
{
    session->epoch = session->epoch == INT32_MAX ? 1 : session->epoch + 1;
}

static uint64_t bytes_of(const struct mqd_share_session *session)
{
    return sizeof *session + session->group_bytes + session->member_bytes +
           (uint64_t)session->entry_capacity * sizeof *session->entries;
}

struct mqd_share_session *mqd_share_session_open(struct mqd_share_sessions *sessions, struct mqd_text group,
                                                 struct mqd_text member, struct mqd_node *connection_sessions)
{
    uint32_t text_bytes = size_of(group) + size_of(member);
    if (sessions->bytes + sizeof(struct mqd_share_session) + text_bytes > sessions->bytes_max)
        return NULL;
    struct mqd_share_session *session = calloc(1, sizeof *session + text_bytes);
    if (!session)
        return NULL;
    session->hash = hash_of(group, member);
    session->member = mqd_share_member_hash(member.bytes, size_of(member));
    session->number = ++sessions->opened_count;
    session->epoch = 1;
    session->lock_ms = DEFAULT_LOCK_MS;
    session->group_bytes = size_of(group);
    session->member_bytes = size_of(member);
    memcpy(session->text, group.bytes, session->group_bytes);
    memcpy(session->text + session->group_bytes, member.bytes, session->member_bytes);
    struct mqd_share_session **bucket = &sessions->buckets[session->hash % MQD_SHARE_SESSION_BUCKET_COUNT];
    session->next = *bucket;
    *bucket = session;
    mqd_list_init(&session->node);
    mqd_list_append(connection_sessions, &session->node);
    sessions->count++;
    sessions->bytes += bytes_of(session);
    return session;
}

void mqd_share_session_close(struct mqd_share_sessions *sessions, struct mqd_share_session *session)
{
    struct mqd_share_session **link = &sessions->buckets[session->hash % MQD_SHARE_SESSION_BUCKET_COUNT];
    while (*link != session)
        link = &(*link)->next;
    *link = session->next;
    mqd_list_remove(&session->node);
    sessions->count--;
    sessions->bytes -= bytes_of(session);
    free(session->entries);
    free(session);
}

/* ---- partitions ---- */

static int compare_entry(const struct mqd_share_entry *entry, const uint8_t topic_id[16], int32_t partition_index)
{
    int order = memcmp(entry->topic_id, topic_id, sizeof entry->topic_id);
    return order ? order : entry->partition_index < partition_index ? -1 : entry->partition_index > partition_index;
}

/* Returns the index of the first entry that does not precede this partition. */
static uint32_t lower_bound(const struct mqd_share_session *session, const uint8_t topic_id[16],
                            int32_t partition_index)
{
    uint32_t low = 0, high = session->entry_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (compare_entry(&session->entries[middle], topic_id, partition_index) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct mqd_share_entry *mqd_share_session_get(const struct mqd_share_session *session, const uint8_t topic_id[16],
                                              int32_t partition_index)
{
    uint32_t index = lower_bound(session, topic_id, partition_index);
    bool exists = index < session->entry_count && !compare_entry(&session->entries[index], topic_id, partition_index);
    return exists ? &session->entries[index] : NULL;
}

static bool grow_entries(struct mqd_share_sessions *sessions, struct mqd_share_session *session)
{
    uint32_t capacity = session->entry_capacity ? session->entry_capacity * 2 : 4;
    uint64_t added_bytes = (uint64_t)(capacity - session->entry_capacity) * sizeof *session->entries;
    if (sessions->bytes + added_bytes > sessions->bytes_max)
        return false;
    struct mqd_share_entry *entries = realloc(session->entries, capacity * sizeof *entries);
    if (!entries)
        return false;
    session->entries = entries;
    session->entry_capacity = capacity;
    sessions->bytes += added_bytes;
    return true;
}

struct mqd_share_entry *mqd_share_session_put(struct mqd_share_sessions *sessions, struct mqd_share_session *session,
                                              const uint8_t topic_id[16], int32_t partition_index)
{
    uint32_t index = lower_bound(session, topic_id, partition_index);
    struct mqd_share_entry *entry = session->entries + index;
    if (index < session->entry_count && !compare_entry(entry, topic_id, partition_index))
        return entry;
    if (session->entry_count >= sessions->partition_count_max ||
        (session->entry_count == session->entry_capacity && !grow_entries(sessions, session)))
        return NULL;
    entry = session->entries + index;
    memmove(entry + 1, entry, (session->entry_count - index) * sizeof *entry);
    session->entry_count++;
    *entry = (struct mqd_share_entry){.partition_index = partition_index};
    memcpy(entry->topic_id, topic_id, sizeof entry->topic_id);
    return entry;
}

void mqd_share_session_remove(struct mqd_share_session *session, struct mqd_share_entry *entry)
{
    uint32_t index = (uint32_t)(entry - session->entries);
    memmove(entry, entry + 1, (--session->entry_count - index) * sizeof *entry);
}

void mqd_share_sessions_verify(const struct mqd_share_sessions *sessions)
{
    uint32_t count = 0;
    uint64_t bytes = 0;
    for (uint32_t bucket = 0; bucket < MQD_SHARE_SESSION_BUCKET_COUNT; bucket++)
        for (const struct mqd_share_session *session = sessions->buckets[bucket]; session; session = session->next) {
            count++;
            bytes += bytes_of(session);
            MQD_ASSERT(session->epoch >= 1, "E2: a session waits for epoch %d", session->epoch);
            for (uint32_t i = 1; i < session->entry_count; i++)
                MQD_ASSERT(compare_entry(&session->entries[i - 1], session->entries[i].topic_id,
                                         session->entries[i].partition_index) < 0,
                           "E1: entry %u of a session does not follow the previous entry", i);
        }
    MQD_ASSERT(count == sessions->count && bytes == sessions->bytes,
               "%u sessions, %llu bytes; the counters say %u and %llu", count, (unsigned long long)bytes,
               sessions->count, (unsigned long long)sessions->bytes);
}
