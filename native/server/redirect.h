/* Partitions of a topic that gets fewer of them: docs/decisions/2026-11-21-retired-partitions.md.
 * What their owner does with batches.
 *
 *   step         a client's batch for the retired partition p                                          a coordinator's
 * marker for p sealed       what p has is answered, what is new is refused: NOT_ENOUGH_REPLICAS, clients try again  is
 * written redirected   goes to the partition that takes p's records (the target), with p's verdict              is
 * written where p has records of the transaction, and hidden       the same in the target, under the rewritten producer
 * id, always
 *
 * Three may have a part in it: the worker that received the batch, the owner of p, the owner of the
 * target.
 *
 *   receiver --PRODUCE--> owner of p --PRODUCED (MQD_STAGE_REDIRECT: slot, verdict)--> receiver --PRODUCE
 * (REDIRECTED)--> owner of the target --PRODUCED--> receiver
 *
 * All of it keeps the order of the batches of a connection, for the links do, and the bytes stay in
 * the receiver's arena. Where two of them are one worker it is a call.
 *
 * The verdict is what p's producer state says: 0 (the batch may be its producer's first in the
 * target: p does not know the producer, or it is the next after what p has), that p has it
 * (VERDICT_DUPLICATE, and where), or an error. With any but 0 the target stages only what it knows
 * to be the next, or has (MQD_STAGE_KNOWN); what it does not know is answered with p's verdict. So
 * the target's word comes first: p's state stands still, and sequences wrap.
 *
 * Invariants
 *   D1  nothing is handed on before everything that p took is below its high watermark
 *       (sealed_end), and this owner leads p in the epoch of the step or a later one: p's data
 *       stand still from then on, so a verdict holds for ever, whoever leads p or the target
 *       afterwards.
 *   D2  the batch that a producer has in the target first is the next after its last one in p.
 *       Where p does not know the producer, none comes first that is behind one which was refused
 *       here (mqd_partition_refused_before).
 *   D3  a handed on batch is never handed on again, and never staged by an owner that does not lead
 *       the target.
 *   D4  whoever writes a marker for p is told to write it to the target too, whatever came of it in
 *       p: by the owner of p, who alone decides when handing on begins.
 * Concurrency: each reactor's thread alone.
 */
#ifndef MQD_REDIRECT_H
#define MQD_REDIRECT_H

#include "native.h"

struct mqd_append;
struct mqd_owned;
struct mqd_topic;

enum mqd_retiring { MQD_RETIRING_NOT, MQD_RETIRING_SEALED, MQD_RETIRING_REDIRECTED, MQD_RETIRING_HIDDEN };

#define MQD_REDIRECT_SHIFT 40 /* producer ids are given out from 0 upwards, and stay below 1 << 40 */

/* The number of a producer in the partition that takes the records of retired partition
 * `partition_index`. -1, no producer, stays. */
static inline int64_t mqd_redirect_producer(int64_t producer_id, int32_t partition_index)
{
    return producer_id < 0 ? producer_id : producer_id + (((int64_t)partition_index + 1) << MQD_REDIRECT_SHIFT);
}

/* Metadata have told of the topic, or the partition was opened, or has another leader epoch. */
void mqd_redirect_topic(struct mqd_reactor *r, const struct mqd_topic *topic);
void mqd_redirect_opened(struct mqd_reactor *r, struct mqd_owned *owned);
void mqd_redirect_led(struct mqd_owned *owned);

/* A batch for `owned`, which is being retired and led here. True: it is dealt with. False: it is to
 * be staged there. */
bool mqd_redirect_take(struct mqd_reactor *r, struct mqd_owned *owned, struct mqd_append *append,
                       const struct mqd_batch *batch);

/* The verdict on an idempotent producer's batch; *offset: of what it is a duplicate of. */
int16_t mqd_redirect_verdict(const struct mqd_partition *partition, const struct mqd_batch *batch, int64_t *offset);

/* Receiver: the owner of p has given the batch on. */
void mqd_redirect_hand_on(struct mqd_reactor *r, struct mqd_append *append, uint32_t slot, int16_t verdict,
                          int64_t offset);
/* ... it has not been staged, and will be delivered again: to the owner of p. */
void mqd_redirect_take_back(struct mqd_append *append);
/* ... the outcome for the client, of what the owner of the target says; may set base_offset. */
int16_t mqd_redirect_outcome(struct mqd_append *append, int16_t error);

#endif
