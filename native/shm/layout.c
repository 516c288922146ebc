/* The control segment: formatting, attaching, and access to its words. Layout and owners:
 * shm/layout.h; protocols for data larger than a word: shm/slot.c.
 */
#include "shm/layout.h"

#include <string.h>

#include "base/atomic.h"
#include "base/error.h"
#include "shm/quota.h"
#include "shm/ring.h"
#include "shm/tally.h"

enum {
    BLOBS_AT = sizeof(struct mqd_control_header),
    ENDPOINTS_AT = BLOBS_AT + MQD_API_VERSIONS_BLOB_COUNT * sizeof(struct mqd_blob),
    STATS_AT = ENDPOINTS_AT + MQD_ENDPOINT_COUNT_MAX * sizeof(struct mqd_endpoint_slot),
    PARTITIONS_AT = STATS_AT + MQD_WORKER_COUNT_MAX * sizeof(struct mqd_worker_stats),
    QUOTAS_AT = PARTITIONS_AT + MQD_PARTITION_SLOT_COUNT * sizeof(struct mqd_partition_slot),
    TALLIES_AT = QUOTAS_AT + sizeof(struct mqd_quota_table),
    TOTAL_BYTES = TALLIES_AT + sizeof(struct mqd_tally_table),
};
_Static_assert(BLOBS_AT % MQD_CACHE_LINE == 0 && ENDPOINTS_AT % MQD_CACHE_LINE == 0 && STATS_AT % MQD_CACHE_LINE == 0 &&
                   PARTITIONS_AT % MQD_CACHE_LINE == 0 && QUOTAS_AT % MQD_CACHE_LINE == 0 &&
                   TALLIES_AT % MQD_CACHE_LINE == 0,
               "every part begins at a cache line");
_Static_assert(offsetof(struct mqd_control_header, metadata_version) == 2 * MQD_CACHE_LINE &&
                   offsetof(struct mqd_control_header, segments_generation) == 3 * MQD_CACHE_LINE,
               "words of different writers are on different lines");
_Static_assert(offsetof(struct mqd_endpoint_slot, sleeping) == MQD_CACHE_LINE &&
                   offsetof(struct mqd_endpoint_slot, connection_count) == 2 * MQD_CACHE_LINE,
               "words of different writers are on different lines");
_Static_assert(offsetof(struct mqd_partition_slot, version) == 2 * MQD_CACHE_LINE &&
                   offsetof(struct mqd_partition_slot, waiters) == 3 * MQD_CACHE_LINE,
               "words of different writers are on different lines");
_Static_assert(offsetof(struct mqd_partition_slot, topic_id) % 8 == 0 && offsetof(struct mqd_blob, bytes) % 8 == 0 &&
                   MQD_BLOB_BYTES_MAX % 8 == 0,
               "what is copied word by word is aligned to words");
_Static_assert(MQD_COUNTER_COUNT <= sizeof((struct mqd_worker_stats){0}.counter) / 8, "counters fit");
_Static_assert(MQD_HISTOGRAM_COUNT <= sizeof((struct mqd_worker_stats){0}.histogram) / (8 * MQD_HISTOGRAM_BUCKET_COUNT),
               "histograms fit");

/* ---- the segment ---- */

size_t mqd_control_size_bytes(void)
{
    return TOTAL_BYTES;
}

#define FIELD(type, name) offsetof(struct type, name), sizeof(((struct type *)0)->name)

/* FNV-1a over the offset and size of every shared field, and over the constants that determine
 * their meaning. */
uint64_t mqd_abi_hash(void)
{
    static const uint64_t numbers[] = {
        MQD_LAYOUT_VERSION,
        BLOBS_AT,
        ENDPOINTS_AT,
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
        FIELD(mqd_control_header, share_version),
        FIELD(mqd_control_header, segments_generation),
        sizeof(struct mqd_control_header),
        FIELD(mqd_blob, version),
        FIELD(mqd_blob, size_bytes),
        FIELD(mqd_blob, bytes),
        sizeof(struct mqd_blob),
        MQD_API_VERSIONS_BLOB_COUNT,
        FIELD(mqd_endpoint_slot, state),
        FIELD(mqd_endpoint_slot, pid),
        FIELD(mqd_endpoint_slot, generation),
        FIELD(mqd_endpoint_slot, sleeping),
        FIELD(mqd_endpoint_slot, connection_count),
        FIELD(mqd_endpoint_slot, partition_count),
        FIELD(mqd_endpoint_slot, unused),
        sizeof(struct mqd_endpoint_slot),
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
        FIELD(mqd_partition_slot, compression_level),
        FIELD(mqd_partition_slot, message_bytes_max),
        FIELD(mqd_partition_slot, compression),
        FIELD(mqd_partition_slot, share_priority),
        FIELD(mqd_partition_slot, waiters),
        FIELD(mqd_partition_slot, records_in),
        FIELD(mqd_partition_slot, bytes_in),
        FIELD(mqd_partition_slot, bytes_out),
        FIELD(mqd_partition_slot, refused_ms),
        FIELD(mqd_partition_slot, log_start_epoch),
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
        FIELD(mqd_quota_rules, levels),
        FIELD(mqd_quota_rules, rule),
        FIELD(mqd_quota_rule, key),
        FIELD(mqd_quota_rule, interval),
        FIELD(mqd_quota_rule, level),
        FIELD(mqd_quota_bucket, key),
        FIELD(mqd_quota_bucket, used_ns),
        FIELD(mqd_quota_bucket, arrival_ns),
        MQD_QUOTA_KIND_COUNT,
        MQD_QUOTA_WAY_COUNT,
        TALLIES_AT,
        FIELD(mqd_tally_table, touched),
        FIELD(mqd_tally_table, tally),
        FIELD(mqd_tally, key),
        FIELD(mqd_tally, count),
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
        return mqd_error_set(MQD_E_INVALID, "%u workers; there must be 1 to %d", worker_count, MQD_WORKER_COUNT_MAX);
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
    header->log_level = 6;                                /* info in syslog numbering */
    mqd_store_release(&header->magic, MQD_CONTROL_MAGIC); /* L1 */
    return 0;
}

#define RESTART_REMEDY                                                                                                 \
    "; the processes of this broker run different builds: stop it (mqd down) and start it again, so that all run "     \
    "the installed build"

int mqd_control_attach(void *control, size_t size_bytes)
{
    const struct mqd_control_header *header = control;
    if (size_bytes < sizeof *header)
        return mqd_error_set(MQD_E_LAYOUT,
                             "a control segment of %zu bytes has no header: the keeper has not finished creating "
                             "it, or died while doing so; restart the broker",
                             size_bytes);
    uint64_t magic = mqd_load_acquire(&header->magic);
    if (magic == 0)
        return mqd_error_set(MQD_E_LAYOUT, "the control segment is not formatted yet: its keeper is still starting, or "
                                           "died while formatting it; restart the broker");
    if (magic != MQD_CONTROL_MAGIC)
        return mqd_error_set(MQD_E_LAYOUT, "this is not a control segment of mqd (magic %016llx)",
                             (unsigned long long)magic);
    if (header->layout_version != MQD_LAYOUT_VERSION)
        return mqd_error_set(MQD_E_LAYOUT,
                             "the control segment has layout version %u, this process knows %u" RESTART_REMEDY,
                             header->layout_version, MQD_LAYOUT_VERSION);
    if (header->abi_hash != mqd_abi_hash())
        return mqd_error_set(MQD_E_LAYOUT,
                             "the control segment has layout hash %016llx, this process %016llx" RESTART_REMEDY,
                             (unsigned long long)header->abi_hash, (unsigned long long)mqd_abi_hash());
    if (header->total_bytes != TOTAL_BYTES || size_bytes < TOTAL_BYTES)
        return mqd_error_set(MQD_E_LAYOUT,
                             "the control segment has %llu bytes (%zu mapped), this process expects %zu" RESTART_REMEDY,
                             (unsigned long long)header->total_bytes, size_bytes, (size_t)TOTAL_BYTES);
    if (header->worker_count < 1 || header->worker_count > MQD_WORKER_COUNT_MAX ||
        header->partition_slot_count != MQD_PARTITION_SLOT_COUNT)
        return mqd_error_set(MQD_E_LAYOUT, "the control segment has %u workers and %u partition slots" RESTART_REMEDY,
                             header->worker_count, header->partition_slot_count);
    return 0;
}

static void *part_at(void *control, size_t offset, size_t size, uint32_t index, uint32_t count)
{
    return index < count ? (uint8_t *)control + offset + (size_t)index * size : NULL;
}

struct mqd_control_header *mqd_control_header(void *control)
{
    return control;
}

struct mqd_blob *mqd_control_api_versions(void *control, uint32_t version)
{
    return part_at(control, BLOBS_AT, sizeof(struct mqd_blob), version, MQD_API_VERSIONS_BLOB_COUNT);
}

struct mqd_endpoint_slot *mqd_control_endpoint(void *control, uint32_t endpoint)
{
    return part_at(control, ENDPOINTS_AT, sizeof(struct mqd_endpoint_slot), endpoint, MQD_ENDPOINT_COUNT_MAX);
}

struct mqd_worker_stats *mqd_control_stats(void *control, uint32_t worker)
{
    return part_at(control, STATS_AT, sizeof(struct mqd_worker_stats), worker, MQD_WORKER_COUNT_MAX);
}

struct mqd_partition_slot *mqd_control_partition(void *control, uint32_t slot)
{
    return part_at(control, PARTITIONS_AT, sizeof(struct mqd_partition_slot), slot, MQD_PARTITION_SLOT_COUNT);
}

struct mqd_quota_table *mqd_control_quotas(void *control)
{
    return (struct mqd_quota_table *)((uint8_t *)control + QUOTAS_AT);
}

struct mqd_tally_table *mqd_control_tallies(void *control)
{
    return (struct mqd_tally_table *)((uint8_t *)control + TALLIES_AT);
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

/* The deadline is stored last: a reader that sees a new lease also sees the epoch for which it was
 * granted. */
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

void mqd_control_set_share_version(void *control, uint32_t level)
{
    mqd_store_relaxed(&mqd_control_header(control)->share_version, level);
}

int mqd_control_set_api_versions(void *control, uint32_t version, const uint8_t *body, uint32_t size_bytes)
{
    struct mqd_blob *blob = mqd_control_api_versions(control, version);
    if (!blob)
        return mqd_error_set(MQD_E_INVALID,
                             "ApiVersions version %u is not stored in the control segment, which has versions below %d",
                             version, MQD_API_VERSIONS_BLOB_COUNT);
    return mqd_blob_write(blob, body, size_bytes);
}

/* ---- endpoints ---- */

/* The generation is stored before the state: a reader that sees DEAD also sees the new generation,
 * so it knows that the buffers lent by the process are invalid and that its outstanding responses
 * will not arrive. */
void mqd_endpoint_set_state(void *control, uint32_t endpoint, uint32_t state, int32_t pid)
{
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(control, endpoint);
    if (!slot)
        return;
    if (state == MQD_PROCESS_DEAD)
        mqd_store_release(&slot->generation, mqd_load_relaxed(&slot->generation) + 1);
    mqd_store_release(&slot->pid, pid);
    mqd_store_release(&slot->state, state);
}

uint32_t mqd_endpoint_state(void *control, uint32_t endpoint)
{
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(control, endpoint);
    return slot ? mqd_load_acquire(&slot->state) : MQD_PROCESS_ABSENT;
}

uint64_t mqd_endpoint_generation(void *control, uint32_t endpoint)
{
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(control, endpoint);
    return slot ? mqd_load_acquire(&slot->generation) : 0;
}

int32_t mqd_endpoint_pid(void *control, uint32_t endpoint)
{
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(control, endpoint);
    return slot ? mqd_load_acquire(&slot->pid) : 0;
}

uint32_t mqd_worker_connection_count(void *control, uint32_t worker)
{
    struct mqd_endpoint_slot *slot = mqd_control_endpoint(control, worker);
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
