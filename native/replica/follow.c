/* The follower's side of the replication core, and leader epochs. See replica/rules.h. */
#include "replica/planted_bugs.h"
#include "replica/rules.h"

#define OFFSET_OUT_OF_RANGE 1

static int64_t minimum(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- leader epochs ---- */

/* The number of epochs that are at most `epoch`. */
static uint32_t count_up_to(const struct mqd_epoch *epochs, uint32_t epoch_count, int32_t epoch)
{
    uint32_t low = 0, high = epoch_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (epochs[middle].epoch <= epoch)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void mqd_replica_epoch_end(const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t log_end, int32_t epoch,
                           int32_t *found_epoch, int64_t *end_offset)
{
    uint32_t count = epoch < 0 ? 0 : count_up_to(epochs, epoch_count, epoch);
    *found_epoch = -1;
    *end_offset = -1;
    if (epoch < 0 || (count == epoch_count && (count == 0 || epochs[count - 1].epoch != epoch)))
        return;
    *found_epoch = count ? epochs[count - 1].epoch : epoch;
    *end_offset = count == epoch_count ? log_end : epochs[count].start_offset;
}

int64_t mqd_replica_truncation(const struct mqd_epoch *epochs, uint32_t epoch_count, int64_t log_end,
                               int32_t diverging_epoch, int64_t diverging_end)
{
    int32_t found_epoch;
    int64_t end_offset;
    mqd_replica_epoch_end(epochs, epoch_count, log_end, diverging_epoch, &found_epoch, &end_offset);
    if (found_epoch < 0) /* all local epochs are earlier than the diverging one */
        return minimum(diverging_end, log_end);
    /* this log does not have that epoch: truncate to the end of the previous one; the next response
     * refines this */
    if (found_epoch != diverging_epoch)
        return minimum(end_offset, log_end);
    return minimum(minimum(end_offset, diverging_end), log_end);
}

/* ---- fetching ---- */

int mqd_replica_next_fetch(const struct mqd_replica *replica, const struct mqd_epoch *epochs, uint32_t epoch_count,
                           struct mqd_replica_fetch *out)
{
    if (replica->role != MQD_REPLICA_FOLLOWER)
        return 0;
    if (replica->flush_on_ack && replica->durable < replica->log_end && !PLANTED_BUG(replica, COUNT_UNFLUSHED))
        return 0;
    *out = (struct mqd_replica_fetch){.node_id = replica->node_id,
                                      .broker_epoch = replica->broker_epoch,
                                      .current_leader_epoch = replica->leader_epoch,
                                      .last_fetched_epoch = epoch_count ? epochs[epoch_count - 1].epoch : -1,
                                      .fetch_offset = replica->log_end};
    return 1;
}

static struct mqd_replica_step out_of_range(const struct mqd_replica *replica,
                                            const struct mqd_replica_response *response)
{
    if (response->log_start > replica->log_end)
        return (struct mqd_replica_step){MQD_REPLICA_RESTART, response->log_start};
    if (response->read_end >= 0 && response->read_end < replica->log_end)
        return (struct mqd_replica_step){MQD_REPLICA_TRUNCATE, response->read_end};
    return (struct mqd_replica_step){MQD_REPLICA_LATER, -1};
}

void mqd_replica_next_step(const struct mqd_replica *replica, const struct mqd_replica_fetch *fetch,
                           const struct mqd_replica_response *response, const struct mqd_epoch *epochs,
                           uint32_t epoch_count, struct mqd_replica_step *out)
{
    bool current = fetch->current_leader_epoch == replica->leader_epoch || PLANTED_BUG(replica, FETCH_EPOCH);
    if (replica->role != MQD_REPLICA_FOLLOWER || !current || fetch->fetch_offset != replica->log_end)
        *out = (struct mqd_replica_step){MQD_REPLICA_IGNORE, -1};
    else if (response->error == OFFSET_OUT_OF_RANGE)
        *out = out_of_range(replica, response);
    else if (response->error)
        *out = (struct mqd_replica_step){MQD_REPLICA_LATER, -1};
    else if (response->diverging_epoch >= 0)
        *out = (struct mqd_replica_step){MQD_REPLICA_TRUNCATE,
                                         mqd_replica_truncation(epochs, epoch_count, replica->log_end,
                                                                response->diverging_epoch, response->diverging_end)};
    else
        *out = (struct mqd_replica_step){MQD_REPLICA_APPEND, fetch->fetch_offset};
}

int mqd_replica_adopt_high_watermark(struct mqd_replica *replica, int32_t leader_epoch, int64_t high_watermark)
{
    int64_t adopted = minimum(high_watermark, replica->log_end);
    if (replica->role != MQD_REPLICA_FOLLOWER || leader_epoch != replica->leader_epoch ||
        adopted <= replica->high_watermark)
        return 0;
    replica->high_watermark = adopted;
    return MQD_REPLICA_CHANGED_HIGH_WATERMARK;
}
