/* Planted bugs: each bit breaks one rule of share/state.h, so that tests can verify that the bug is
 * detected. Only the tests' own build has them (MQD_PLANTED); in the broker PLANTED_BUG() is false
 * and costs nothing. */
#ifndef MQD_SHARE_PLANTED_H
#define MQD_SHARE_PLANTED_H

#ifdef MQD_PLANTED
/* MQD_PLANTED_CDEF_ON */
enum mqd_share_planted {
    MQD_PLANTED_ANY_MEMBER = 1, /* S1: acknowledgements of another member are accepted */
    /* S2: expiry releases the whole range of a row, including other members' offsets */
    MQD_PLANTED_ANY_ROW = 2,
    MQD_PLANTED_UNLIMITED = 4,           /* S3: releasing does not compare the count with the limit */
    MQD_PLANTED_UNCOUNT = 8,             /* S3: releasing decrements the delivery count */
    MQD_PLANTED_PASS_ACQUIRED = 16,      /* S4: the start moves over acquired records */
    MQD_PLANTED_KEEP_PLACE = 32,         /* S5: a renewed row keeps its place in the queue */
    MQD_PLANTED_LATE = 64,               /* S5: records whose lock has expired can be acknowledged */
    MQD_PLANTED_LOSE_CHANGES = 128,      /* S6: changes that do not fit into a difference count as listed in it */
    MQD_PLANTED_OMIT_ACQUIRED = 256,     /* S6: a change of a record that is acquired again is not listed */
    MQD_PLANTED_WINDOW = 512,            /* S7: open offsets are not counted */
    MQD_PLANTED_DELIVER_SKIPPED = 1024,  /* S8: skipped batches are delivered */
    MQD_PLANTED_PARTLY = 2048,           /* ranges before an invalid one take effect */
    MQD_PLANTED_NOT_ALONE = 4096,        /* a record's last delivery includes other records */
    MQD_PLANTED_EARLY_RETRY = 8192,      /* S9: a backoff ends when anything is due */
    MQD_PLANTED_SAME_BACKOFF = 16384,    /* S9: the backoff is not doubled */
    MQD_PLANTED_ONE_QUEUE = 32768,       /* backoffs of different lengths are in one queue */
    MQD_PLANTED_NO_LETTER = 65536,       /* L1: rejected records are archived immediately */
    MQD_PLANTED_GAP_LETTER = 131072,     /* L1: a gap gets a dead letter */
    MQD_PLANTED_LETTER_RETRIED = 262144, /* L1: records in state Archiving become Available after a failover */
    MQD_PLANTED_UNSEEN = 524288,         /* F1: after a failover, earlier records are ignored */
    MQD_PLANTED_OVERTAKE = 1048576,      /* F1: after a release the next record of the key is delivered first */
    MQD_PLANTED_LETTER_PASSED = 2097152, /* F1: the next record of the key is delivered while this one is Archiving */
    MQD_PLANTED_NOT_LAST = 4194304,      /* F1: a record is linked after the first one of its key, not the last */
    MQD_PLANTED_LATER_FREED = 8388608,   /* F1: a released record is Available, though it is not the first of its key */
    MQD_PLANTED_LOST_KEY = 16777216,     /* F1: keys are not found after their bucket was split */
    MQD_PLANTED_OLD_KEYS = 33554432,     /* F1: the old keys stay when the setting changes */
    MQD_PLANTED_FORGOTTEN = 67108864     /* the next record of a key is not made Available */
};
/* MQD_PLANTED_CDEF_OFF */
#define PLANTED_BUG(share, rule) (((share)->planted & MQD_PLANTED_##rule) != 0)
#define PLANTED_ANY_BUG(share) ((share)->planted != 0)
#else
#define PLANTED_BUG(share, rule) false
#define PLANTED_ANY_BUG(share) false
#endif

#ifdef MQD_PLANTED_PARTITION /* not MQD_PLANTED, so that share/state.h keeps its usual layout */
enum mqd_share_partition_planted {
    MQD_PLANTED_EARLY_RESPONSE = 1,  /* P2: responses do not wait for the WRITE that has their changes */
    MQD_PLANTED_RESPOND_WAITING = 2, /* P2: changes made during a WRITE are confirmed with it */
    MQD_PLANTED_LOST_WRITE = 4       /* P1: a WRITE whose outcome is unknown is not repeated */
};
#define PLANTED_PARTITION_BUG(partition, rule) (((partition)->planted_rules & MQD_PLANTED_##rule) != 0)
#else
#define PLANTED_PARTITION_BUG(partition, rule) false
#endif

#endif
