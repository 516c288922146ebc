/* See server/redirect.h. */
#include <string.h>

#include "server/reactor.h"
#include "server/redirect.h"

#define VERDICT_DUPLICATE (-1)
#define USED_REPORT_MS 1000 /* interval between two reports that clients still write to a retired partition */
#define OUT_OF_ORDER_SEQUENCE_NUMBER 45
#define DUPLICATE_SEQUENCE_NUMBER 46
#define INVALID_PRODUCER_EPOCH 47
#define UNKNOWN_PRODUCER_ID 59
#define IS_SEQUENCE_ERROR(error)                                                                                       \
    ((error) == OUT_OF_ORDER_SEQUENCE_NUMBER || (error) == DUPLICATE_SEQUENCE_NUMBER || (error) == UNKNOWN_PRODUCER_ID)
/* whether the error is final, whatever the target's state */
#define IS_FINAL_ERROR(error) ((error) == INVALID_PRODUCER_EPOCH || (error) == MQD_KAFKA_INVALID_TXN_STATE)

/* ---- metadata ---- */

static void set_redirect(struct mqd_owned *owned, const struct mqd_topic *topic, uint32_t index)
{
    const struct mqd_topic_partition *partition = &topic->partitions[index];
    bool has_target = partition->redirect >= 0 && (uint32_t)partition->redirect < topic->partition_count;
    owned->redirect_index = has_target ? (uint32_t)partition->redirect : 0;
    owned->redirect_slot = has_target ? topic->slots[partition->redirect] : MQD_SLOT_NONE;
    owned->retired_epoch = partition->leader_epoch;
    owned->retiring = (uint8_t)(partition->retiring > MQD_RETIRING_HIDDEN ? MQD_RETIRING_HIDDEN : partition->retiring);
    mqd_redirect_on_epoch(owned);
}

void mqd_redirect_on_epoch(struct mqd_owned *owned)
{
    if (owned->retiring)
        owned->sealed_end = mqd_partition_staged_end(owned->partition);
}

void mqd_redirect_on_topic(struct mqd_reactor *r, const struct mqd_topic *topic)
{
    for (uint32_t i = 0; i < topic->partition_count; i++) {
        struct mqd_owned *owned = topic->slots[i] < MQD_PARTITION_SLOT_COUNT ? r->owned[topic->slots[i]] : NULL;
        if (owned && (topic->partitions[i].retiring || owned->retiring))
            set_redirect(owned, topic, i);
    }
}

void mqd_redirect_on_open(struct mqd_reactor *r, struct mqd_owned *owned)
{
    const struct mqd_partition_slot *slot = mqd_control_partition(r->options.control, owned->slot);
    uint8_t topic_id[16];
    memcpy(topic_id, (const void *)slot->topic_id, sizeof topic_id);
    const struct mqd_topic *topic = mqd_topics_find_by_id(&r->topics, topic_id);
    int32_t index = slot->partition_index;
    if (topic && index >= 0 && (uint32_t)index < topic->partition_count && topic->slots[index] == owned->slot &&
        topic->partitions[index].retiring)
        set_redirect(owned, topic, (uint32_t)index);
}

/* ---- the owner of the retired partition ---- */

/* Always returns true: the append has been handled. */
static bool refuse(struct mqd_reactor *r, struct mqd_append *append, int16_t error, const char *message)
{
    mqd_stat(r, MQD_COUNT_BATCHES_REFUSED, 1);
    append->message = message;
    mqd_append_done(r, append, error);
    return true;
}

/* D4. If the retired partition has no records of the transaction, it needs no marker, which would
 * only keep it from becoming empty. But an earlier marker in it may have ended the transaction, and
 * that marker is safe only once it is below the high watermark. So this marker is acknowledged like
 * a batch at the log's end. */
static bool take_marker(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append,
                        const struct mqd_batch *batch)
{
    if (owned->retiring < MQD_RETIRING_REDIRECTED)
        return false;
    append->marker_redirected = 1;
    append->redirect_index = owned->redirect_index;
    if (mqd_partition_in_transaction(owned->partition, batch->producer_id))
        return false;
    append->end_offset = mqd_partition_staged_end(owned->partition);
    mqd_list_append(&owned->staged, &append->node);
    if (!mqd_list_linked(&owned->write_node))
        mqd_list_append(&r->to_write, &owned->write_node);
    return true;
}

static const char sealed_message[] = "the partition is being retired: another partition takes its records";

/* Handles a client's batch in the step `sealed`. Returns false for a duplicate, which the caller
 * stages as usual. */
static bool take_sealed(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append,
                        const struct mqd_batch *batch)
{
    bool duplicate = false;
    int64_t offset;
    int16_t error =
        batch->producer_id >= 0 ? mqd_partition_check_sequence(owned->partition, batch, &duplicate, &offset) : 0;
    if (duplicate)
        return false;
    if (error == DUPLICATE_SEQUENCE_NUMBER || IS_FINAL_ERROR(error))
        return refuse(r, append, error, NULL);
    if (batch->producer_id >= 0)
        mqd_partition_note_refused(owned->partition, batch, r->wall_ms);
    return refuse(r, append, MQD_KAFKA_NOT_ENOUGH_REPLICAS, sealed_message);
}

static bool may_redirect(const struct mqd_owned *owned) /* D1 */
{
    return mqd_partition_leader_epoch(owned->partition) >= owned->retired_epoch &&
           owned->high_watermark >= owned->sealed_end;
}

int16_t mqd_redirect_verdict(const struct mqd_partition *partition, const struct mqd_batch *batch, int64_t *offset)
{
    bool duplicate;
    int16_t verdict = mqd_partition_check_sequence(partition, batch, &duplicate, offset);
    if (duplicate)
        return VERDICT_DUPLICATE;
    return !verdict && mqd_partition_refused_before(partition, batch) ? OUT_OF_ORDER_SEQUENCE_NUMBER : verdict; /* D2 */
}

/* Reports that clients still write to the retired partition, so that it is not deleted yet. A
 * client whose library never accepts a smaller number of partitions (librdkafka) keeps writing to
 * it as long as the client runs. */
static void report_used(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_event event = {.kind = MQD_EVENT_RETIRED_USED, .slot = owned->slot};
    if (owned->retiring < MQD_RETIRING_HIDDEN ||
        (owned->used_reported_ms && r->now_ms - owned->used_reported_ms < USED_REPORT_MS))
        return;
    owned->used_reported_ms = r->now_ms;
    mqd_reactor_emit(r, &event);
}

/* Handles a client's batch in the later steps: redirects or refuses it. Always returns true. */
static bool hand_over(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append,
                      const struct mqd_batch *batch)
{
    int64_t offset = -1;
    int16_t verdict = 0;
    report_used(r, owned);
    if (!may_redirect(owned) || owned->redirect_slot == MQD_SLOT_NONE) {
        if (batch->producer_id >= 0)
            mqd_partition_note_refused(owned->partition, batch, r->wall_ms);
        return refuse(r, append, MQD_KAFKA_NOT_ENOUGH_REPLICAS,
                      "the partition is retired, and the partition that takes its records cannot take them yet");
    }
    if (batch->producer_id >> MQD_REDIRECT_SHIFT > 0)
        return refuse(r, append, MQD_KAFKA_INVALID_PRODUCER_ID_MAPPING, "no broker has allocated this producer id");
    if (batch->producer_id >= 0)
        verdict = mqd_redirect_verdict(owned->partition, batch, &offset);
    if (IS_FINAL_ERROR(verdict))
        return refuse(r, append, verdict, NULL);
    mqd_stat(r, MQD_COUNT_BATCHES_REDIRECTED, 1);
    if (append->request) {
        mqd_redirect_to_target(r, append, owned->redirect_slot, verdict, offset);
        return true;
    }
    append->base_offset = offset;
    append->log_append_time_ms = verdict;
    append->home_slot = owned->redirect_slot; /* sent as `offset` in the response */
    mqd_append_done(r, append, MQD_STAGE_REDIRECT);
    return true;
}

bool mqd_redirect_take(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append,
                       const struct mqd_batch *batch)
{
    if (r->log_dirs[owned->log_dir].failed)
        return false;                               /* handled like any other partition of a failed directory */
    if (append->stage_flags & MQD_STAGE_REDIRECTED) /* D3 */
        return refuse(r, append, MQD_KAFKA_NOT_ENOUGH_REPLICAS,
                      "the partition that takes the records is being retired itself");
    if (append->stage_flags & MQD_STAGE_COORDINATOR)
        return take_marker(r, owned, append, batch);
    return owned->retiring == MQD_RETIRING_SEALED ? take_sealed(r, owned, append, batch)
                                                  : hand_over(r, owned, append, batch);
}

/* ---- the receiver ---- */

void mqd_redirect_to_target(struct mqd_reactor *r, struct mqd_append *append, uint32_t slot, int16_t verdict,
                            int64_t offset)
{
    struct mqd_batch batch;
    uint8_t *bytes = r->options.arenas[r->options.self] + append->offset;
    /* as in mqd_check_park: mqd_batch_decode could refuse a header that has the client's base
     * offset */
    memset(bytes, 0, 8);
    if (append->sent_to_target || slot >= MQD_PARTITION_SLOT_COUNT ||
        mqd_batch_decode(bytes, append->size_bytes, &batch) < 0) {
        mqd_append_done(r, append, MQD_KAFKA_CORRUPT_MESSAGE);
        return;
    }
    append->sent_to_target = 1;
    append->home_slot = append->slot;
    append->slot = slot;
    append->verdict = verdict;
    append->verdict_offset = offset;
    append->stage_flags = MQD_STAGE_REDIRECTED | (verdict ? MQD_STAGE_REQUIRE_KNOWN : 0);
    batch.producer_id = mqd_redirect_producer(batch.producer_id, append->partition_index);
    mqd_append_deliver(r, append, &batch);
}

void mqd_redirect_undo(struct mqd_append *append)
{
    append->sent_to_target = append->stage_flags = 0;
    append->slot = append->home_slot;
}

int16_t mqd_redirect_outcome(struct mqd_append *append, int16_t error)
{
    if ((error == MQD_STAGE_UNKNOWN || IS_SEQUENCE_ERROR(error)) && append->verdict == VERDICT_DUPLICATE) {
        append->base_offset = append->verdict_offset;
        return 0;
    }
    if (error == MQD_STAGE_UNKNOWN)
        return append->verdict;
    if (error != MQD_KAFKA_NOT_LEADER_OR_FOLLOWER)
        return error;
    append->message = "the partition is retired: the partition that takes its records is led elsewhere";
    return MQD_KAFKA_NOT_ENOUGH_REPLICAS; /* not the original error, because the client's partition is led here */
}
