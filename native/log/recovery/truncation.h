/* Truncating a log so that no crash leaves a log with a hole, or one whose rewritten part is
 * trusted.
 *
 * Two kinds of marks beside the log:
 *   truncating        "CUT START\n": exists from before anything is changed until everything is on
 *                     disk. START >= 0: the log is emptied and begins there. The next opening of
 *                     the log completes the truncation
 *   truncated.NUMBER  "CUT\n": records beyond CUT were written after a recovery point was
 *                     checkpointed that may be higher. Recovery trusts no recovery point above the
 *                     lowest of them. The checkpoint writer removes those that existed before it
 *                     read the positions, after the checkpoint is on disk
 * Order: truncating (durable) -> delete segments from the end -> truncate -> snapshots, aborted
 * transactions, epochs -> flush all, the directory -> rename to truncated -> the directory.
 */
#ifndef MQD_TRUNCATION_H
#define MQD_TRUNCATION_H

#include "native.h"

#define MQD_TRUNCATING_FILE "truncating"
#define MQD_TRUNCATED_PREFIX "truncated."

struct mqd_truncation_marks {
    bool pending;          /* a truncation was interrupted */
    int64_t cut_offset;    /* of the interrupted truncation */
    int64_t start_offset;  /* of the interrupted truncation; -1: no restart */
    int64_t trusted_below; /* recovery points above are ignored; INT64_MAX = none is */
};
int mqd_truncation_load(const char *directory, struct mqd_truncation_marks *out); /* -1: mqd_error set */
int mqd_truncation_begin(const char *directory, int64_t cut_offset, int64_t start_offset);
/* A pending truncation, if any, is complete and on disk. now_ms: names the mark. */
int mqd_truncation_end(const char *directory, int64_t now_ms);

#endif
