/* The control segment: formatting, attaching, and the small protocols by which its words are
 * published. Layout and owners: shm/layout.h.
 *
 * Everything is copied word by word with atomic accesses (release stores, acquire loads; plain
 * moves on x86), because a reader may look while the owner writes. Two protocols:
 *
 *   double copy (positions, blobs)    version v: copy v & 1 is whole. Writer: fill copy (v + 1) &
 *                                     1, store v + 1. Reader: load v, copy, load again; the same v
 *                                     means that nobody touched this copy. A word of a later write
 *                                     cannot be read without its predecessor's version being seen
 *                                     too. A writer that dies stops nobody.
 *   bracket (identity of a slot)      identity_version odd while the controller writes. It is rare, and readers give up
 * after BRACKET_TRY_COUNT looks (MQD_E_STALE) instead of waiting for a dead controller; the next one to assign the slot
 * closes the bracket.
 */
#include "shm/layout.h"

#include <string.h>

#include "base/atomic.h"
#include "base/assert.h"
#include "base/error.h"
#include "shm/quota.h"
#include "shm/ring.h"

#define BRACKET_TRY_COUNT 2000

enum {
    BLOBS_AT = sizeof(struct mqd_control_header),
    WORKERS_AT = BLOBS_AT + MQD_API_VERSIONS_BLOB_COUNT * sizeof(struct mqd_blob),
    STATS_AT = WORKERS_AT + MQD_ENDPOINT_COUNT_MAX * sizeof(struct mqd_worker_slot),
    PARTITIONS_AT = STATS_AT + MQD_WORKER_COUNT_MAX * sizeof(struct mqd_worker_stats),
    QUOTAS_AT = PARTITIONS_AT + MQD_PARTITION_SLOT_COUNT * sizeof(struct mqd_partition_slot),
    TOTAL_BYTES = QUOTAS_AT + sizeof(struct mqd_quota_table),
};
_Static_assert(BLOBS_AT % MQD_CACHE_LINE == 0 && WORKERS_AT % MQD_CACHE_LINE == 0 && STATS_AT % MQD_CACHE_LINE == 0 &&
                   PARTITIONS_AT % MQD_CACHE_LINE == 0 && QUOTAS_AT % MQD_CACHE_LINE == 0,
               "every part begins a cache line");
_Static_assert(offsetof(struct mqd_control_header, metadata_version) == 2 * MQD_CACHE_LINE &&
                   offsetof(struct mqd_control_header, segments_generation) == 3 * MQD_CACHE_LINE,
               "words of different writers lie on different lines");
_Static_assert(offsetof(struct mqd_worker_slot, sleeping) == MQD_CACHE_LINE &&
                   offsetof(struct mqd_worker_slot, heartbeat_ns) == 2 * MQD_CACHE_LINE,
               "as above");
_Static_assert(offsetof(struct mqd_partition_slot, version) == 2 * MQD_CACHE_LINE &&
                   offsetof(struct mqd_partition_slot, waiters) == 3 * MQD_CACHE_LINE,
               "as above");
_Static_assert(offsetof(struct mqd_partition_slot, topic_id) % 8 == 0 && offsetof(struct mqd_blob, bytes) % 8 == 0 &&
                   MQD_BLOB_BYTES_MAX % 8 == 0,
               "copied by words");
_Static_assert(MQD_COUNTER_COUNT <= sizeof((struct mqd_worker_stats){0}.counter) / 8, "counters fit");
_Static_assert(MQD_HISTOGRAM_COUNT <= sizeof((struct mqd_worker_stats){0}.histogram) / (8 * MQD_HISTOGRAM_BUCKET_COUNT),
               "histograms fit");

/* ---- words ---- */

static void words_store(uint64_t *to, const void *from, size_t size_bytes)
{
    const uint8_t *bytes = from;
    for (; size_bytes >= 8; size_bytes -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        mqd_store_release(to++, word);
    }
    if (size_bytes) {
        uint64_t word = 0;
        memcpy(&word, bytes, size_bytes);
        mqd_store_release(to, word);
    }
}

static void words_load(void *to, const uint64_t *from, size_t size_bytes)
{
    uint8_t *bytes = to;
    for (; size_bytes >= 8; size_bytes -= 8, bytes += 8) {
        uint64_t word = mqd_load_acquire(from++);
        memcpy(bytes, &word, 8);
    }
    if (size_bytes) {
        uint64_t word = mqd_load_acquire(from);
        memcpy(bytes, &word, size_bytes);
    }
}

/* ---- the segment ---- */

size_t mqd_control_size_bytes(void)
{
    return TOTAL_BYTES;
}

#define FIELD(type, name) offsetof(struct type, name), sizeof(((struct type *)0)->name)

/* FNV-1a over offset and size of every shared field, and over the numbers that give the fields
 * their meaning. */
uint64_t mqd_abi_hash(void)
{
    static const uint64_t numbers[] = {
        MQD_LAYOUT_VERSION,
        BLOBS_AT,
        WORKERS_AT,
        STATS_AT,
        PARTITIONS_AT,
        TOTAL_BYTES,
        FIELD(mqd_control_header, magic),
        FIELD(mqd_control_header, layout_version),
        FIELD(mqd_control_header, worker_count),
        FIELD(mqd_control_header, abi_hash),
        FIELD(mqd_control_header, boot_id),
        FIELD(mqd_control_header, generation),
        FIELD(mqd_control_header, total_bytes),
        FIELD(mqd_control_header, partition_slot_count),
        FIELD(mqd_control_header, created_ms),
        FIELD(mqd_control_header, metadata_version),
        FIELD(mqd_control_header, broker_epoch),
        FIELD(mqd_control_header, incarnation),
        FIELD(mqd_control_header, lease_deadline_ns),
        FIELD(mqd_control_header, log_level),
        FIELD(mqd_control_header, segments_generation),
        sizeof(struct mqd_control_header),
        FIELD(mqd_blob, version),
        FIELD(mqd_blob, size_bytes),
        FIELD(mqd_blob, bytes),
        sizeof(struct mqd_blob),
        MQD_API_VERSIONS_BLOB_COUNT,
        FIELD(mqd_worker_slot, state),
        FIELD(mqd_worker_slot, pid),
        FIELD(mqd_worker_slot, generation),
        FIELD(mqd_worker_slot, sleeping),
        FIELD(mqd_worker_slot, heartbeat_ns),
        FIELD(mqd_worker_slot, connection_count),
        FIELD(mqd_worker_slot, partition_count),
        FIELD(mqd_worker_slot, accepted_generation),
        sizeof(struct mqd_worker_slot),
        MQD_ENDPOINT_COUNT_MAX,
        FIELD(mqd_worker_stats, counter),
        FIELD(mqd_worker_stats, histogram),
        sizeof(struct mqd_worker_stats),
        MQD_WORKER_COUNT_MAX,
        MQD_COUNTER_COUNT,
        MQD_HISTOGRAM_COUNT,
        FIELD(mqd_positions, log_start_offset),
        FIELD(mqd_positions, high_watermark),
        FIELD(mqd_positions, log_end_offset),
        FIELD(mqd_positions, last_stable_offset),
        FIELD(mqd_positions, durable_offset),
        FIELD(mqd_positions, high_watermark_segment),
        FIELD(mqd_positions, log_end_segment),
        FIELD(mqd_positions, high_watermark_position),
        FIELD(mqd_positions, log_end_position),
        FIELD(mqd_partition_slot, positions),
        FIELD(mqd_partition_slot, version),
        FIELD(mqd_partition_slot, segments_generation),
        FIELD(mqd_partition_slot, topic_id),
        FIELD(mqd_partition_slot, identity_version),
        FIELD(mqd_partition_slot, partition_index),
        FIELD(mqd_partition_slot, leader_epoch),
        FIELD(mqd_partition_slot, owner),
        FIELD(mqd_partition_slot, state),
        FIELD(mqd_partition_slot, log_dir),
        FIELD(mqd_partition_slot, owner_generation),
        FIELD(mqd_partition_slot, compacted),
        FIELD(mqd_partition_slot, role),
        FIELD(mqd_partition_slot, latest_pending),
        FIELD(mqd_partition_slot, lagging),
        FIELD(mqd_partition_slot, validation),
        FIELD(mqd_partition_slot, flush_on_ack),
        FIELD(mqd_partition_slot, flush_awaited),
        FIELD(mqd_partition_slot, recovery_aborts),
        FIELD(mqd_partition_slot, in_sync_follower_count),
        FIELD(mqd_partition_slot, in_sync_followers),
        FIELD(mqd_partition_slot, waiters),
        sizeof(struct mqd_partition_slot),
        MQD_PARTITION_SLOT_COUNT,
        MQD_SLOT_DELETING,
        MQD_PROCESS_DEAD,
        QUOTAS_AT,
        FIELD(mqd_quota_table, version),
        FIELD(mqd_quota_table, rules),
        FIELD(mqd_quota_table, bucket),
        FIELD(mqd_quota_rules, count),
        FIELD(mqd_quota_rules, kinds),
        FIELD(mqd_quota_rules, burst_ns),
        FIELD(mqd_quota_rules, defaults),
        FIELD(mqd_quota_rules, rule),
        FIELD(mqd_quota_rule, key),
        FIELD(mqd_quota_rule, interval),
        FIELD(mqd_quota_bucket, key),
        FIELD(mqd_quota_bucket, used_ns),
        FIELD(mqd_quota_bucket, arrival_ns),
        MQD_QUOTA_KIND_COUNT,
        MQD_QUOTA_WAY_COUNT,
        FIELD(mqd_ring, head),
        FIELD(mqd_ring, tail),
        offsetof(struct mqd_ring, descriptor),
        MQD_LINK_DESCRIPTOR_COUNT,
        FIELD(mqd_descriptor, kind),
        FIELD(mqd_descriptor, flags),
        FIELD(mqd_descriptor, slot),
        FIELD(mqd_descriptor, token),
        FIELD(mqd_descriptor, offset),
        FIELD(mqd_descriptor, size_bytes),
        FIELD(mqd_descriptor, error),
        FIELD(mqd_descriptor, a),
        FIELD(mqd_descriptor, b),
        FIELD(mqd_descriptor, c),
        FIELD(mqd_descriptor, generation),
        sizeof(struct mqd_descriptor),
        MQD_LINK_FLUSHED,
    };
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        for (int shift = 0; shift < 64; shift += 8)
            hash = (hash ^ (numbers[i] >> shift & 0xff)) * 0x100000001b3ull;
    return hash;
}

int mqd_control_format(void *control, size_t size_bytes, uint32_t worker_count, const uint8_t boot_id[16],
                       uint64_t generation, int64_t now_ms)
{
    if (worker_count < 1 || worker_count > MQD_WORKER_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "%u workers; from 1 to %d are possible", worker_count,
                             MQD_WORKER_COUNT_MAX);
    if (size_bytes < TOTAL_BYTES)
        return mqd_error_set(MQD_E_INVALID, "the control segment needs %zu bytes, got %zu", (size_t)TOTAL_BYTES,
                             size_bytes);
    struct mqd_control_header *header = control;
    header->layout_version = MQD_LAYOUT_VERSION;
    header->worker_count = worker_count;
    header->abi_hash = mqd_abi_hash();
    memcpy(header->boot_id, boot_id, sizeof header->boot_id);
    header->generation = generation;
    header->total_bytes = TOTAL_BYTES;
    header->partition_slot_count = MQD_PARTITION_SLOT_COUNT;
    header->created_ms = now_ms;
    header->lease_deadline_ns = INT64_MAX;
    header->log_level = 6;                                /* syslog's info */
    mqd_store_release(&header->magic, MQD_CONTROL_MAGIC); /* L1 */
    return 0;
}

#define OTHER_BUILD                                                                                                    \
    "; the processes of this broker are of different builds: stop it (mqd down) and start it again, so that all run "  \
    "the one that is installed"

int mqd_control_attach(void *control, size_t size_bytes)
{
    const struct mqd_control_header *header = control;
    if (size_bytes < sizeof *header)
        return mqd_error_set(MQD_E_LAYOUT,
                             "a control segment of %zu bytes has no header: the keeper has not finished, or died, "
                             "while making it; start the broker again",
                             size_bytes);
    uint64_t magic = mqd_load_acquire(&header->magic);
    if (magic == 0)
        return mqd_error_set(MQD_E_LAYOUT, "the control segment is not formatted yet: its keeper is still starting, or "
                                           "died doing it; start the broker again");
    if (magic != MQD_CONTROL_MAGIC)
        return mqd_error_set(MQD_E_LAYOUT, "this is not a control segment of mqd (magic %016llx)",
                             (unsigned long long)magic);
    if (header->layout_version != MQD_LAYOUT_VERSION)
        return mqd_error_set(MQD_E_LAYOUT,
                             "the control segment has layout version %u, this process knows %u" OTHER_BUILD,
                             header->layout_version, MQD_LAYOUT_VERSION);
    if (header->abi_hash != mqd_abi_hash())
        return mqd_error_set(MQD_E_LAYOUT,
                             "the control segment has layout hash %016llx, this process %016llx" OTHER_BUILD,
                             (unsigned long long)header->abi_hash, (unsigned long long)mqd_abi_hash());
    if (header->total_bytes != TOTAL_BYTES || size_bytes < TOTAL_BYTES)
        return mqd_error_set(MQD_E_LAYOUT,
                             "the control segment has %llu bytes (%zu mapped), this process expects %zu" OTHER_BUILD,
                             (unsigned long long)header->total_bytes, size_bytes, (size_t)TOTAL_BYTES);
    if (header->worker_count < 1 || header->worker_count > MQD_WORKER_COUNT_MAX ||
        header->partition_slot_count != MQD_PARTITION_SLOT_COUNT)
        return mqd_error_set(MQD_E_LAYOUT, "the control segment tells of %u workers and %u partition slots" OTHER_BUILD,
                             header->worker_count, header->partition_slot_count);
    return 0;
}

static void *part(void *control, size_t at, size_t size, uint32_t index, uint32_t count)
{
    return index < count ? (uint8_t *)control + at + (size_t)index * size : NULL;
}

struct mqd_control_header *mqd_control_header(void *control)
{
    return control;
}

struct mqd_blob *mqd_control_api_versions(void *control, uint32_t version)
{
    return part(control, BLOBS_AT, sizeof(struct mqd_blob), version, MQD_API_VERSIONS_BLOB_COUNT);
}

struct mqd_worker_slot *mqd_control_worker(void *control, uint32_t endpoint)
{
    return part(control, WORKERS_AT, sizeof(struct mqd_worker_slot), endpoint, MQD_ENDPOINT_COUNT_MAX);
}

struct mqd_worker_stats *mqd_control_stats(void *control, uint32_t worker)
{
    return part(control, STATS_AT, sizeof(struct mqd_worker_stats), worker, MQD_WORKER_COUNT_MAX);
}

struct mqd_partition_slot *mqd_control_partition(void *control, uint32_t slot)
{
    return part(control, PARTITIONS_AT, sizeof(struct mqd_partition_slot), slot, MQD_PARTITION_SLOT_COUNT);
}

struct mqd_quota_table *mqd_control_quotas(void *control)
{
    return (struct mqd_quota_table *)((uint8_t *)control + QUOTAS_AT);
}

/* ---- header words ---- */

uint32_t mqd_control_worker_count(void *control)
{
    return mqd_control_header(control)->worker_count;
}

uint64_t mqd_control_generation(void *control)
{
    return mqd_control_header(control)->generation;
}

uint64_t mqd_control_metadata_version(void *control)
{
    return mqd_load_acquire(&mqd_control_header(control)->metadata_version);
}

void mqd_control_set_metadata_version(void *control, uint64_t version)
{
    mqd_store_release(&mqd_control_header(control)->metadata_version, version);
}

int64_t mqd_control_broker_epoch(void *control)
{
    return mqd_load_acquire(&mqd_control_header(control)->broker_epoch);
}

uint64_t mqd_control_broker_incarnation(void *control)
{
    return mqd_load_acquire(&mqd_control_header(control)->incarnation);
}

int64_t mqd_control_lease_deadline_ns(void *control)
{
    return mqd_load_acquire(&mqd_control_header(control)->lease_deadline_ns);
}

/* The deadline last: whoever sees a later lease sees the epoch it was granted under. */
void mqd_control_set_broker(void *control, int64_t broker_epoch, uint64_t incarnation, int64_t lease_deadline_ns)
{
    struct mqd_control_header *header = control;
    mqd_store_release(&header->broker_epoch, broker_epoch);
    mqd_store_release(&header->incarnation, incarnation);
    mqd_store_release(&header->lease_deadline_ns, lease_deadline_ns);
}

uint32_t mqd_control_log_level(void *control)
{
    return mqd_load_relaxed(&mqd_control_header(control)->log_level);
}

void mqd_control_set_log_level(void *control, uint32_t level)
{
    mqd_store_relaxed(&mqd_control_header(control)->log_level, level);
}

int mqd_control_set_api_versions(void *control, uint32_t version, const uint8_t *body, uint32_t size_bytes)
{
    struct mqd_blob *blob = mqd_control_api_versions(control, version);
    if (!blob)
        return mqd_error_set(MQD_E_INVALID,
                             "ApiVersions version %u has no place in the control segment; versions below %d have",
                             version, MQD_API_VERSIONS_BLOB_COUNT);
    return mqd_blob_write(blob, body, size_bytes);
}

/* ---- endpoints ---- */

/* Generation before state: who sees DEAD sees that what the process lent or owed is void. */
void mqd_endpoint_set_state(void *control, uint32_t endpoint, uint32_t state, int32_t pid)
{
    struct mqd_worker_slot *slot = mqd_control_worker(control, endpoint);
    if (!slot)
        return;
    if (state == MQD_PROCESS_DEAD)
        mqd_store_release(&slot->generation, mqd_load_relaxed(&slot->generation) + 1);
    mqd_store_release(&slot->pid, pid);
    mqd_store_release(&slot->state, state);
}

uint32_t mqd_endpoint_state(void *control, uint32_t endpoint)
{
    struct mqd_worker_slot *slot = mqd_control_worker(control, endpoint);
    return slot ? mqd_load_acquire(&slot->state) : MQD_PROCESS_ABSENT;
}

uint64_t mqd_endpoint_generation(void *control, uint32_t endpoint)
{
    struct mqd_worker_slot *slot = mqd_control_worker(control, endpoint);
    return slot ? mqd_load_acquire(&slot->generation) : 0;
}

int32_t mqd_endpoint_pid(void *control, uint32_t endpoint)
{
    struct mqd_worker_slot *slot = mqd_control_worker(control, endpoint);
    return slot ? mqd_load_acquire(&slot->pid) : 0;
}

uint32_t mqd_worker_connection_count(void *control, uint32_t worker)
{
    struct mqd_worker_slot *slot = mqd_control_worker(control, worker);
    return slot ? mqd_load_relaxed(&slot->connection_count) : 0;
}

uint64_t mqd_counter_read(void *control, uint32_t worker, uint32_t counter)
{
    const struct mqd_worker_stats *stats = mqd_control_stats(control, worker);
    return stats && counter < MQD_COUNTER_COUNT ? mqd_load_relaxed(&stats->counter[counter]) : 0;
}

void mqd_stats_read(void *control, uint32_t worker, uint64_t *counters, uint64_t *histograms)
{
    struct mqd_worker_stats *stats = mqd_control_stats(control, worker);
    for (uint32_t i = 0; i < MQD_COUNTER_COUNT; i++)
        counters[i] = stats ? mqd_load_relaxed(&stats->counter[i]) : 0;
    for (uint32_t i = 0; i < MQD_HISTOGRAM_COUNT * MQD_HISTOGRAM_BUCKET_COUNT; i++)
        histograms[i] =
            stats ? mqd_load_relaxed(&stats->histogram[i / MQD_HISTOGRAM_BUCKET_COUNT][i % MQD_HISTOGRAM_BUCKET_COUNT])
                  : 0;
}

/* ---- double copy ---- */

void mqd_slot_publish(struct mqd_partition_slot *slot, const struct mqd_positions *positions)
{
    uint64_t next = mqd_load_relaxed(&slot->version) + 1;
    words_store((uint64_t *)&slot->positions[next & 1], positions, sizeof *positions);
    mqd_store_release(&slot->version, next);
}

void mqd_slot_positions(const struct mqd_partition_slot *slot, struct mqd_positions *out)
{
    uint64_t version = mqd_load_acquire(&slot->version);
    for (;;) {
        words_load(out, (const uint64_t *)&slot->positions[version & 1], sizeof *out);
        uint64_t again = mqd_load_acquire(&slot->version);
        if (again == version)
            return;
        version = again; /* the writer lives and moves on; it cannot stop us for longer than it writes */
    }
}

int mqd_blob_write(struct mqd_blob *blob, const void *bytes, uint32_t size_bytes)
{
    if (size_bytes > MQD_BLOB_BYTES_MAX)
        return mqd_error_set(MQD_E_INVALID, "%u bytes do not fit into a shared value of at most %d", size_bytes,
                             MQD_BLOB_BYTES_MAX);
    uint64_t next = mqd_load_relaxed(&blob->version) + 1;
    mqd_store_release(&blob->size_bytes[next & 1], size_bytes);
    words_store((uint64_t *)blob->bytes[next & 1], bytes, size_bytes);
    mqd_store_release(&blob->version, next);
    return 0;
}

int mqd_blob_read(const struct mqd_blob *blob, void *out, uint32_t capacity)
{
    uint64_t version = mqd_load_acquire(&blob->version);
    while (version != 0) {
        uint32_t size = mqd_load_acquire(&blob->size_bytes[version & 1]);
        if (size <= MQD_BLOB_BYTES_MAX)
            words_load(out, (const uint64_t *)blob->bytes[version & 1], size < capacity ? size : capacity);
        uint64_t again = mqd_load_acquire(&blob->version);
        if (again == version)
            return size <= MQD_BLOB_BYTES_MAX ? (int)size : -1;
        version = again;
    }
    return -1;
}

/* ---- partition slots ---- */

/* A dead predecessor may have left the bracket open: then it is simply ours. */
static uint32_t bracket_open(struct mqd_partition_slot *slot)
{
    uint32_t odd = mqd_load_relaxed(&slot->identity_version) | 1;
    mqd_store_release(&slot->identity_version, odd);
    return odd;
}

static void bracket_close(struct mqd_partition_slot *slot, uint32_t odd)
{
    mqd_store_release(&slot->identity_version, odd + 1);
}

static bool same_identity(const struct mqd_partition_slot *slot, const uint8_t topic_id[16], int32_t partition_index)
{
    uint8_t held[16];
    words_load(held, (const uint64_t *)slot->topic_id, sizeof held);
    return memcmp(held, topic_id, sizeof held) == 0 && mqd_load_relaxed(&slot->partition_index) == partition_index;
}

/* A free slot becomes OPENING. A slot that holds this very partition keeps its positions and,
 * unless the owner changes, its state: so a restarted controller may assign again what it finds.
 * Another partition's slot is refused: clear it first. */
int mqd_slot_assign(void *control, uint32_t index, const uint8_t topic_id[16], int32_t partition_index, uint16_t owner,
                    uint8_t log_dir, int32_t leader_epoch)
{
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot || (owner >= MQD_WORKER_COUNT_MAX && owner != MQD_OWNER_NONE) || log_dir >= MQD_LOG_DIR_COUNT_MAX ||
        partition_index < 0)
        return mqd_error_set(MQD_E_INVALID, "slot %u for partition %d of worker %u in log directory %u: out of range",
                             index, partition_index, owner, log_dir);
    bool whole = (mqd_load_acquire(&slot->identity_version) & 1) == 0; /* else nothing in it can be believed */
    bool held = mqd_load_acquire(&slot->state) != MQD_SLOT_FREE;
    if (whole && held && !same_identity(slot, topic_id, partition_index))
        return mqd_error_set(MQD_E_INVALID, "slot %u holds another partition (%d); clear it first", index,
                             mqd_load_relaxed(&slot->partition_index));
    bool keep_state = whole && held && mqd_load_relaxed(&slot->owner) == owner;
    uint32_t odd = bracket_open(slot);
    words_store((uint64_t *)slot->topic_id, topic_id, 16);
    mqd_store_release(&slot->partition_index, partition_index);
    mqd_store_release(&slot->leader_epoch, leader_epoch);
    mqd_store_release(&slot->owner, owner);
    mqd_store_release(&slot->log_dir, log_dir);
    mqd_store_release(&slot->owner_generation, mqd_endpoint_generation(control, owner));
    if (!keep_state)
        mqd_store_release(&slot->state, (uint8_t)MQD_SLOT_OPENING);
    bracket_close(slot, odd);
    return 0;
}

/* The controller writes the positions here: the slot has no owner any more. segments_generation
 * goes on, so that readers drop the file descriptors they keep for the partition that was here. */
void mqd_slot_clear(void *control, uint32_t index)
{
    static const struct mqd_positions empty;
    static const uint8_t no_topic[16];
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return;
    uint32_t odd = bracket_open(slot);
    mqd_store_release(&slot->state, (uint8_t)MQD_SLOT_FREE);
    words_store((uint64_t *)slot->topic_id, no_topic, 16);
    mqd_store_release(&slot->partition_index, 0);
    mqd_store_release(&slot->leader_epoch, 0);
    mqd_store_release(&slot->owner, (uint16_t)MQD_OWNER_NONE);
    mqd_store_release(&slot->log_dir, (uint8_t)0);
    mqd_store_release(&slot->owner_generation, 0);
    mqd_store_release(&slot->compacted, (uint8_t)0);
    mqd_store_release(&slot->role, (uint8_t)MQD_ROLE_LEADS);
    mqd_store_release(&slot->latest_pending, (uint8_t)0);
    mqd_store_release(&slot->lagging, (uint8_t)0);
    mqd_store_release(&slot->flush_on_ack, (uint8_t)0);
    mqd_store_release(&slot->recovery_aborts, (uint8_t)0);
    mqd_store_release(&slot->in_sync_follower_count, 0);
    mqd_store_release(&slot->segments_generation, mqd_load_relaxed(&slot->segments_generation) + 1);
    mqd_slot_publish(slot, &empty);
    bracket_close(slot, odd);
    mqd_fetch_add(&mqd_control_header(control)->segments_generation, 1);
}

void mqd_slot_set_state(void *control, uint32_t index, uint8_t state)
{
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (slot)
        mqd_store_release(&slot->state, state);
}

int mqd_slot_await_flush(void *control, uint32_t index)
{
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return mqd_error_set(MQD_E_INVALID, "there is no partition slot %u", index);
    mqd_store_seq_cst(&slot->flush_awaited, (uint8_t)1);
    mqd_fence_full(); /* before the caller's look at the positions */
    return 0;
}

int mqd_slot_opening(void *control, uint32_t index)
{
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return mqd_error_set(MQD_E_INVALID, "there is no partition slot %u", index);
    mqd_assert_count(&slot->recovery_aborts);
    return mqd_load_acquire(&slot->recovery_aborts);
}

void mqd_slot_opened(void)
{
    mqd_assert_count(NULL);
}

int mqd_slot_view(void *control, uint32_t index, struct mqd_partition_view *out)
{
    const struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return mqd_error_set(MQD_E_INVALID, "there is no partition slot %u", index);
    for (int attempt = 0; attempt < BRACKET_TRY_COUNT; attempt++) {
        uint32_t version = mqd_load_acquire(&slot->identity_version);
        if (version & 1) {
            mqd_cpu_relax();
            continue;
        }
        words_load(out->topic_id, (const uint64_t *)slot->topic_id, 16);
        out->partition_index = mqd_load_acquire(&slot->partition_index);
        out->leader_epoch = mqd_load_acquire(&slot->leader_epoch);
        out->owner = mqd_load_acquire(&slot->owner);
        out->state = mqd_load_acquire(&slot->state);
        out->log_dir = mqd_load_acquire(&slot->log_dir);
        out->role = mqd_load_acquire(&slot->role);
        out->latest_pending = mqd_load_acquire(&slot->latest_pending);
        out->flush_on_ack = mqd_load_acquire(&slot->flush_on_ack);
        out->segments_generation = mqd_load_acquire(&slot->segments_generation);
        out->owner_generation = mqd_load_acquire(&slot->owner_generation);
        mqd_slot_positions(slot, &out->positions);
        if (mqd_load_acquire(&slot->identity_version) == version)
            return 0;
    }
    return mqd_error_set(MQD_E_STALE,
                         "slot %u is being assigned, or the controller died doing it; the next one assigns it again",
                         index);
}
