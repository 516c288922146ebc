/* Counts the connections of each address and of each listener, over all workers. In the control
 * segment.
 *
 * struct mqd_tally_table:
 *   touched[]    a bit for each set that was ever used: a restarted worker resets only these sets
 *   mqd_tally[]  8192 in sets of 8: a key, and one count per worker, written only by that worker
 *
 * A worker counts first and then reads the sum, so the limit is never exceeded; but if two
 * connections reach two workers at the same time, both may be refused.
 *
 * Invariants
 *   T1  a tally keeps its key for as long as any of its counts is not 0. After incrementing its
 *       count, a worker reads the key again; a worker that changes the key locks it first and then
 *       reads the counts again. (So a key in use may be locked for a moment.) If two workers begin
 *       to count a new key at the same moment, the key may get two tallies; each is then limited
 *       separately.
 *   T2  a worker's counts are those of its open connections; a restarted worker begins with none.
 * Bounds: when all eight tallies of a set are in use, another key is not counted (and not limited).
 * A process that dies while it changes a key leaves that tally locked until the broker is
 * restarted.
 */
#ifndef MQD_TALLY_H
#define MQD_TALLY_H

#include "native.h"

#define MQD_TALLY_WAY_COUNT 8
#define MQD_TALLY_SET_COUNT 1024
#define MQD_TALLY_NONE (-1)

struct mqd_tally {
    uint64_t key; /* 0 = free, 1 = locked */
    uint16_t count[MQD_WORKER_COUNT_MAX];
    uint8_t pad[56];
};

struct mqd_tally_table {
    uint64_t touched[MQD_TALLY_SET_COUNT / 64];
    struct mqd_tally tally[MQD_TALLY_SET_COUNT * MQD_TALLY_WAY_COUNT];
};

_Static_assert(sizeof(struct mqd_tally) == 192, "whole cache lines");

struct mqd_tally_table *mqd_control_tallies(void *control); /* shm/layout.c */

/* Counts one more connection for this worker. Returns the argument for mqd_tally_leave, and sets
 * *sum to the total of all workers. MQD_TALLY_NONE: there is no room, and *sum is 0. */
int32_t mqd_tally_enter(void *control, uint64_t key, uint32_t worker, uint32_t *sum);
void mqd_tally_leave(void *control, int32_t tally, uint32_t worker);
void mqd_tally_reset(void *control, uint32_t worker); /* T2 */

#endif
