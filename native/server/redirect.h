/* Retired partitions: how their owner handles batches after the partition count of a topic was
 * reduced (docs/decisions/cluster/2026-11-21-retired-partitions.md).
 *
 *   step        client's batch for the retired partition p
 *   sealed      appends that p has accepted are completed, new ones are refused with the retriable
 *               NOT_ENOUGH_REPLICAS
 *   redirected  goes to the partition that takes p's records (the target), with p's verdict
 *
 *   step        coordinator's marker for p
 *   sealed      is written
 *   redirected  is written in p only if p has records of the transaction; is always written in the
 *               target too, under the rewritten producer id
 *
 * For this module, the last step, hidden, is the same as redirected.
 *
 * Up to three workers take part: the receiver of the batch, the owner of p and the owner of the
 * target.
 *
 *   receiver --PRODUCE--> owner of p
 *   owner of p --PRODUCED (MQD_STAGE_REDIRECT: slot, verdict)--> receiver
 *   receiver --PRODUCE (REDIRECTED)--> owner of the target
 *   owner of the target --PRODUCED--> receiver
 *
 * All steps keep the order of the batches of a connection, because the links do. The bytes stay in
 * the receiver's arena. Where two of the three are the same worker, the message is a function call.
 *
 * The verdict comes from p's producer state. It is 0 (the batch may be its producer's first in the
 * target: p does not know the producer, or the batch is the next after the last one in p),
 * VERDICT_DUPLICATE with the offset (p already has the batch), or an error. With a verdict other
 * than 0 the target accepts a batch only if it knows the producer and so can tell that the batch is
 * the next one, or a duplicate of one that it has (MQD_STAGE_REQUIRE_KNOWN); otherwise the answer
 * is p's verdict. The target's state takes precedence because p's state no longer changes, and
 * sequences wrap.
 *
 * Invariants
 *   D1  no batch is redirected before everything that p appended (up to sealed_end) is below its
 *       high watermark and this owner leads p in the epoch of the step or a later one. From then on
 *       p's data does not change, so a verdict stays valid permanently, whichever replica leads p
 *       or the target afterwards.
 *   D2  a producer's first batch in the target is the next after its last one in p. Where p does
 *       not know the producer, a batch is not accepted as the producer's first if an earlier one
 *       was refused here (mqd_partition_refused_before).
 *   D3  a redirected batch is never redirected again, and never staged by an owner that does not
 *       lead the target.
 *   D4  a coordinator that writes a marker for p is instructed to write it to the target too,
 *       whatever its outcome in p. The owner of p sends this instruction; it alone decides when
 *       redirection begins.
 * Concurrency: private to each reactor's thread.
 */
#ifndef MQD_REDIRECT_H
#define MQD_REDIRECT_H

#include "native.h"

struct mqd_append;
struct mqd_owned;
struct mqd_reactor;
struct mqd_topic;

enum mqd_retiring { MQD_RETIRING_NONE, MQD_RETIRING_SEALED, MQD_RETIRING_REDIRECTED, MQD_RETIRING_HIDDEN };

#define MQD_REDIRECT_SHIFT 40 /* producer ids are allocated from 0 upwards and stay below 1 << 40 */

/* The producer id used in the partition that takes the records of retired partition
 * `partition_index`. -1 (no producer) is unchanged. */
static inline int64_t mqd_redirect_producer(int64_t producer_id, int32_t partition_index)
{
    return producer_id < 0 ? producer_id : producer_id + (((int64_t)partition_index + 1) << MQD_REDIRECT_SHIFT);
}

/* Called when the topic's metadata changed, the partition was opened, or its leader epoch
 * changed. */
void mqd_redirect_on_topic(struct mqd_reactor *r, const struct mqd_topic *topic);
void mqd_redirect_on_open(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_redirect_on_epoch(struct mqd_owned *owned);

/* Handles a batch for `owned`, a partition that is being retired and is led here. False: the caller
 * must stage the batch in `owned`. */
bool mqd_redirect_take(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append,
                       const struct mqd_batch *batch);

/* The verdict on an idempotent producer's batch; *offset: the offset of the batch it duplicates. */
int16_t mqd_redirect_verdict(const struct mqd_partition *partition, const struct mqd_batch *batch, int64_t *offset);

/* Receiver: the owner of p has redirected the batch. */
void mqd_redirect_to_target(struct mqd_reactor *r, struct mqd_append *append, uint32_t slot, int16_t verdict,
                            int64_t offset);
/* Receiver: the batch was not staged and will be delivered again to the owner of p. */
void mqd_redirect_undo(struct mqd_append *append);
/* Receiver: the outcome for the client, from the response of the target's owner; may set
 * base_offset. */
int16_t mqd_redirect_outcome(struct mqd_append *append, int16_t error);

#endif
