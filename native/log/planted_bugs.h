/* Planted bugs: each bit breaks one of the rules by which a log survives crashes, to verify that the
 * native tests detect it. tests/unit/native/test_log_planted.py says which test detects which bug.
 * Only its own build has them (MQD_PLANTED_LOG); in the broker PLANTED_LOG_BUG() is false and costs
 * nothing. */
#ifndef MQD_LOG_PLANTED_H
#define MQD_LOG_PLANTED_H

#ifdef MQD_PLANTED_LOG
enum mqd_log_planted {
    MQD_PLANTED_NO_SCAN = 1,           /* bytes above the recovery point are trusted without their CRCs */
    MQD_PLANTED_CUT_FLUSHED = 2,       /* C1: damage below the recovery point ends the log */
    MQD_PLANTED_KEEP_LATER = 4,        /* segments after the one in which the log ends stay */
    MQD_PLANTED_OLD_BATCH = 8,         /* a batch whose offset is lower than the next one continues the log */
    MQD_PLANTED_NO_FLUSH = 16,         /* C2: what recovery has found is not flushed */
    MQD_PLANTED_REUSE_OFFSETS = 32,    /* C3: a log that ends before its start stays so */
    MQD_PLANTED_EMPTY_FIRST = 64,      /* C4: a .txnindex is emptied before it is written again */
    MQD_PLANTED_NO_CHECKSUM = 128,     /* C4: entries of a .txnindex are not compared with their checksums */
    MQD_PLANTED_NO_MARK = 256,         /* a truncation begins without its mark */
    MQD_PLANTED_COVER_LATER = 512,     /* P4: a flush covers what was written while it was running */
    MQD_PLANTED_FAILED_FLUSH = 1024,   /* a failed flush counts as done */
    MQD_PLANTED_DIRECTORY_USED = 2048, /* a failed write or flush takes only its own partition offline */
    MQD_PLANTED_KEEP_RESERVED = 4096,  /* a sealed segment keeps its reserved blocks */
    MQD_PLANTED_OLD_INDEX = 8192,      /* compaction replaces the .log while the old indexes still exist */
    MQD_PLANTED_LOG_LAST = 16384,      /* compaction deletes a segment's .log after its .txnindex */
    MQD_PLANTED_OVERTAKE = 32768       /* a producer's later batch is accepted after its first one was refused */
};
extern uint32_t mqd_log_planted;
#define PLANTED_LOG_BUG(rule) ((mqd_log_planted & MQD_PLANTED_##rule) != 0)
#else
#define PLANTED_LOG_BUG(rule) false
#endif

#endif
