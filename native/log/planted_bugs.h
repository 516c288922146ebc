/* Planted bugs: each bit breaks one of the rules by which a log survives crashes, to verify that the
 * native tests detect it. tests/unit/native/test_log_planted.py says which test detects which bug.
 * They exist only in a build of their own (MQD_PLANTED_LOG); in the broker PLANTED_LOG_BUG() is
 * false and costs nothing. */
#ifndef MQD_LOG_PLANTED_H
#define MQD_LOG_PLANTED_H

#ifdef MQD_PLANTED_LOG
#include <stdint.h>

enum mqd_log_planted {
    MQD_PLANTED_NO_SCAN = 1,               /* bytes above the recovery point are trusted without their CRCs */
    MQD_PLANTED_OLD_BATCH = 2,             /* a batch is accepted although its offset is below the previous one's end */
    MQD_PLANTED_KEEP_LATER = 4,            /* segments after the one in which the log ends stay */
    MQD_PLANTED_CUT_FLUSHED = 8,           /* C1: damage below the recovery point ends the log */
    MQD_PLANTED_UNCHECKED_LAST = 16,       /* C1: a header before damage is trusted without its batch's CRC */
    MQD_PLANTED_NO_FLUSH = 32,             /* C2: what recovery has found is not flushed */
    MQD_PLANTED_NO_REWRITE = 64,           /* C2: after a failed flush the bytes are only flushed again */
    MQD_PLANTED_REUSE_OFFSETS = 128,       /* C3: a log that ends before its start stays so */
    MQD_PLANTED_EMPTY_FIRST = 256,         /* C4: a .txnindex is emptied before it is written again */
    MQD_PLANTED_NO_CHECKSUM = 512,         /* C4: entries of a .txnindex are not compared with their checksums */
    MQD_PLANTED_NOT_SHORTENED = 1024,      /* C5: whole batches found after the damage are not recorded */
    MQD_PLANTED_NOT_MISSING = 2048,        /* C6: a log that ends below the recovery point continues there */
    MQD_PLANTED_NO_MARK = 4096,            /* a truncation begins without its mark */
    MQD_PLANTED_MARK_EARLY = 8192,         /* a truncation ends before its deletions are durable */
    MQD_PLANTED_OLD_POINT = 16384,         /* a recovery point from before a truncation is trusted as it is */
    MQD_PLANTED_NO_ENTRY = 32768,          /* a flush leaves out the directory entry of a new file */
    MQD_PLANTED_NO_ABORTED = 65536,        /* S5: a flush leaves out the .txnindex */
    MQD_PLANTED_COVER_LATER = 131072,      /* P4: a flush covers what was written while it was running */
    MQD_PLANTED_FAILED_FLUSH = 262144,     /* a failed flush counts as done */
    MQD_PLANTED_DIRECTORY_USED = 524288,   /* a failed write or flush takes only its own partition offline */
    MQD_PLANTED_NO_CLOSE = 1048576,        /* a clean shutdown does not flush */
    MQD_PLANTED_KEEP_TORN = 2097152,       /* a write that fails halfway leaves its bytes after the log's end */
    MQD_PLANTED_KEEP_RESERVED = 4194304,   /* a sealed segment keeps its reserved blocks */
    MQD_PLANTED_OVERTAKE = 8388608,        /* a producer's later batch is accepted after its first one was refused */
    MQD_PLANTED_NO_OUTPUT = 16777216,      /* a compacted segment is not flushed before the swap */
    MQD_PLANTED_OLD_INDEX = 33554432,      /* compaction replaces the .log while the old indexes still exist */
    MQD_PLANTED_LOG_LAST = 67108864,       /* compaction deletes a segment's .txnindex before its .log */
    MQD_PLANTED_SWAP_EARLY = 134217728,    /* a swap ends before its deletions are durable */
    MQD_PLANTED_UNDO_EARLY = 268435456,    /* undoing a swap deletes its files before the list's deletion is durable */
    MQD_PLANTED_CUT_RESERVING = 536870912, /* an idle segment is cut while a helper thread reserves its blocks */
    MQD_PLANTED_CUT_UNCHECKED = 1073741824 /* an idle partition is released although it has changed meanwhile */
};
extern uint32_t mqd_log_planted;
#define PLANTED_LOG_BUG(rule) ((mqd_log_planted & MQD_PLANTED_##rule) != 0)
#else
#define PLANTED_LOG_BUG(rule) false
#endif

#endif
