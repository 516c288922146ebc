/* The protocols by which partition slots and blobs of the control segment are published.
 *
 * Everything is copied word by word with atomic accesses (release stores, acquire loads; plain
 * moves on x86), because a reader may read while the owner writes. Two protocols:
 *
 *   double copy (positions, blobs)  version v: copy v & 1 is complete. Writer: fill copy (v + 1) &
 *                                   1, store v + 1. Reader: load v, copy, load again; the same v
 *                                   means that this copy was not changed. A reader that loads a
 *                                   word of a later write also sees the version stored before it,
 *                                   and retries. A writer that dies blocks no reader.
 *   seqlock (identity of a slot)    identity_version is odd while the controller writes. Such writes
 *                                   are rare. Readers give up after SEQLOCK_TRY_COUNT attempts
 *                                   (MQD_E_STALE) instead of waiting for a dead controller. The
 *                                   next assignment of the slot makes the version even again.
 */
#include "shm/layout.h"

#include <string.h>

#include "base/assert.h"
#include "base/atomic.h"
#include "base/error.h"

#define SEQLOCK_TRY_COUNT 2000

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
        uint64_t new_version = mqd_load_acquire(&slot->version);
        if (new_version == version)
            return;
        version = new_version; /* the writer is alive and advancing, so this loop ends */
    }
}

void mqd_slot_count_in(struct mqd_partition_slot *slot, uint64_t records, uint64_t bytes)
{
    mqd_counter_add(&slot->records_in, records);
    mqd_counter_add(&slot->bytes_in, bytes);
}

void mqd_slot_count_out(struct mqd_partition_slot *slot, uint64_t bytes)
{
    mqd_fetch_add(&slot->bytes_out, bytes);
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
        uint64_t new_version = mqd_load_acquire(&blob->version);
        if (new_version == version)
            return size <= MQD_BLOB_BYTES_MAX ? (int)size : -1;
        version = new_version;
    }
    return -1;
}

/* ---- partition slots ---- */

/* Makes the version odd; a predecessor that died while writing may have left it odd already. */
static uint32_t identity_write_begin(struct mqd_partition_slot *slot)
{
    uint32_t odd = mqd_load_relaxed(&slot->identity_version) | 1;
    mqd_store_release(&slot->identity_version, odd);
    return odd;
}

static void identity_write_end(struct mqd_partition_slot *slot, uint32_t odd)
{
    mqd_store_release(&slot->identity_version, odd + 1);
}

static bool has_identity(const struct mqd_partition_slot *slot, const uint8_t topic_id[16], int32_t partition_index)
{
    uint8_t slot_topic_id[16];
    words_load(slot_topic_id, (const uint64_t *)slot->topic_id, sizeof slot_topic_id);
    return memcmp(slot_topic_id, topic_id, sizeof slot_topic_id) == 0 &&
           mqd_load_relaxed(&slot->partition_index) == partition_index;
}

/* A free slot becomes OPENING. A slot that already holds this partition keeps its positions and,
 * unless the owner changes, its state, so a restarted controller may assign existing slots again. A
 * slot that holds another partition is refused: clear it first. */
int mqd_slot_assign(void *control, uint32_t index, const uint8_t topic_id[16], int32_t partition_index, uint16_t owner,
                    uint8_t log_dir, int32_t leader_epoch)
{
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot || (owner >= MQD_WORKER_COUNT_MAX && owner != MQD_OWNER_NONE) || log_dir >= MQD_LOG_DIR_COUNT_MAX ||
        partition_index < 0)
        return mqd_error_set(MQD_E_INVALID, "slot %u for partition %d of worker %u in log directory %u: out of range",
                             index, partition_index, owner, log_dir);
    /* false: a controller died while it wrote the slot, so its contents cannot be trusted */
    bool is_complete = (mqd_load_acquire(&slot->identity_version) & 1) == 0;
    bool is_held = mqd_load_acquire(&slot->state) != MQD_SLOT_FREE;
    if (is_complete && is_held && !has_identity(slot, topic_id, partition_index))
        return mqd_error_set(MQD_E_INVALID, "slot %u holds another partition (%d); clear it first", index,
                             mqd_load_relaxed(&slot->partition_index));
    bool keep_state = is_complete && is_held && mqd_load_relaxed(&slot->owner) == owner;
    uint32_t odd = identity_write_begin(slot);
    words_store((uint64_t *)slot->topic_id, topic_id, 16);
    mqd_store_release(&slot->partition_index, partition_index);
    mqd_store_release(&slot->leader_epoch, leader_epoch);
    mqd_store_release(&slot->owner, owner);
    mqd_store_release(&slot->log_dir, log_dir);
    mqd_store_release(&slot->owner_generation, mqd_endpoint_generation(control, owner));
    if (!keep_state)
        mqd_store_release(&slot->state, (uint8_t)MQD_SLOT_OPENING);
    identity_write_end(slot, odd);
    return 0;
}

/* The controller writes the positions, because the slot no longer has an owner. segments_generation
 * increases, so that readers drop the file descriptors that they keep for the former partition. */
void mqd_slot_clear(void *control, uint32_t index)
{
    static const struct mqd_positions empty;
    static const uint8_t no_topic[16];
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return;
    uint32_t odd = identity_write_begin(slot);
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
    mqd_store_release(&slot->records_in, 0);
    mqd_store_release(&slot->bytes_in, 0);
    mqd_store_release(&slot->bytes_out, 0);
    mqd_store_release(&slot->refused_ms, 0);
    mqd_store_release(&slot->log_start_epoch, -1);
    mqd_store_release(&slot->segments_generation, mqd_load_relaxed(&slot->segments_generation) + 1);
    mqd_slot_publish(slot, &empty);
    identity_write_end(slot, odd);
    mqd_fetch_add(&mqd_control_header(control)->segments_generation, 1);
}

void mqd_slot_set_state(void *control, uint32_t index, uint8_t state)
{
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (slot)
        mqd_store_release(&slot->state, state);
}

int mqd_slot_request_flush_notice(void *control, uint32_t index)
{
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return mqd_error_set(MQD_E_INVALID, "there is no partition slot %u", index);
    mqd_store_seq_cst(&slot->flush_awaited, (uint8_t)1);
    mqd_fence_full(); /* orders the request before the caller reads the positions */
    return 0;
}

int mqd_slot_recovery_begin(void *control, uint32_t index)
{
    struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return mqd_error_set(MQD_E_INVALID, "there is no partition slot %u", index);
    mqd_assert_set_counter(&slot->recovery_aborts);
    return mqd_load_acquire(&slot->recovery_aborts);
}

void mqd_slot_recovery_end(void)
{
    mqd_assert_set_counter(NULL);
}

int mqd_slot_traffic(void *control, uint32_t index, struct mqd_partition_traffic *out)
{
    const struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return mqd_error_set(MQD_E_INVALID, "there is no partition slot %u", index);
    out->records_in = mqd_load_relaxed(&slot->records_in);
    out->bytes_in = mqd_load_relaxed(&slot->bytes_in);
    out->bytes_out = mqd_load_relaxed(&slot->bytes_out);
    return 0;
}

int mqd_slot_view(void *control, uint32_t index, struct mqd_partition_view *out)
{
    const struct mqd_partition_slot *slot = mqd_control_partition(control, index);
    if (!slot)
        return mqd_error_set(MQD_E_INVALID, "there is no partition slot %u", index);
    for (int attempt = 0; attempt < SEQLOCK_TRY_COUNT; attempt++) {
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
    return mqd_error_set(
        MQD_E_STALE,
        "slot %u is being assigned, or the controller died while assigning it; its successor assigns it again", index);
}

uint32_t mqd_slots_list_used(void *control, uint32_t *slots)
{
    uint32_t count = 0;
    for (uint32_t index = 0; index < MQD_PARTITION_SLOT_COUNT; index++) {
        const struct mqd_partition_slot *slot = mqd_control_partition(control, index);
        if (mqd_load_acquire(&slot->state) != MQD_SLOT_FREE || mqd_load_acquire(&slot->identity_version) & 1)
            slots[count++] = index;
    }
    return count;
}
