/* The time that the loop's turns spend on each cause: one histogram per cause, of the turns in
 * which it occurred. Measured while options.profile_turns is set: five system calls a turn, and
 * four more for each part (mqd_turn_part_begin). */
#ifndef MQD_TURN_H
#define MQD_TURN_H

#include "server/reactor.h"

static inline bool mqd_turn_measured(const struct mqd_reactor *r)
{
    return __builtin_expect(r->options.profile_turns, 0);
}

/* Called on the reactor's thread, before its first turn and after its last. */
void mqd_turn_open(struct mqd_reactor *r);
void mqd_turn_close(struct mqd_reactor *r);

void mqd_turn_begin(struct mqd_reactor *r);
void mqd_turn_end(struct mqd_reactor *r);

/* Called around a part of the turn that may wait for a disk, so that its waits are not attributed
 * to locks. Parts are not nested. */
void mqd_turn_part_begin(struct mqd_reactor *r);
void mqd_turn_part_end(struct mqd_reactor *r);

int64_t mqd_turn_now_ns(void);
/* `cause`: MQD_TIME_LOOP_WRITE, MQD_TIME_LOOP_ALLOCATION or MQD_TIME_LOOP_FLUSH */
void mqd_turn_add_time(struct mqd_reactor *r, enum mqd_histogram cause, int64_t since_ns);

#endif
