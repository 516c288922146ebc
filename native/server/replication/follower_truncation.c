/* Truncation of a follower's log while the reactor runs: the reactor stops using the partition, a
 * helper thread truncates it (log/recovery/truncation.c), and the reactor uses it again.
 *
 * owned->truncating is DUE while work in flight on the partition's files (flush, preallocation,
 * snapshot) ends; no more of it begins, and commands wait in owned->deferred. A compaction that is
 * replacing files (`truncation_held`) also ends first; so its commands, SEGMENTS_REPLACED and
 * SEGMENTS_HOLD, are not deferred. Then it is UNDER_WAY: only the helper thread uses the partition.
 * Readers see the partition as it was published: the
 * high watermark and the files below it do not change, except after an unclean election, when
 * committed records are removed, too.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "server/reactor.h"

struct mqd_truncation_job {
    struct mqd_partition *partition;
    int64_t offset, wall_ms;
    int64_t batch_offset; /* for mqd_partition_restart_at; -1: the log is truncated, not restarted */
    bool restart;
    struct mqd_truncation outcome;
    int error;
    char text[160];
};

static int run_truncation(void *argument)
{
    struct mqd_truncation_job *job = argument;
    int result = job->restart ? mqd_partition_restart_at(job->partition, job->offset, job->batch_offset, job->wall_ms,
                                                         &job->outcome)
                              : mqd_partition_truncate(job->partition, job->offset, job->wall_ms, &job->outcome);
    if (result < 0) {
        job->error = mqd_error_code() ? mqd_error_code() : EIO;
        snprintf(job->text, sizeof job->text, "%s", mqd_error_message());
    }
    return 0;
}

void mqd_follow_truncate(struct mqd_reactor *r, struct mqd_owned *owned, int64_t offset, int64_t batch_offset)
{
    struct mqd_truncation_job *job = owned->truncating ? NULL : calloc(1, sizeof *job);
    if (!job)
        return; /* due already, or no memory: the leader gives the same response to the next fetch */
    *job = (struct mqd_truncation_job){.partition = owned->partition,
                                       .offset = offset,
                                       .batch_offset = batch_offset,
                                       .restart = batch_offset >= 0,
                                       .wall_ms = r->wall_ms};
    owned->truncation_job = job;
    owned->truncating = MQD_TRUNCATION_DUE;
    /* the partition no longer needs a flush of its own */
    if (mqd_list_linked(&owned->sync_node) && !owned->in_syncfs) {
        mqd_list_remove(&owned->sync_node);
        r->log_dirs[owned->log_dir].to_sync_count--;
    }
    mqd_truncation_begin_if_possible(r, owned);
}

void mqd_truncation_begin_if_possible(struct mqd_reactor *r, struct mqd_owned *owned)
{
    if (owned->truncating != MQD_TRUNCATION_DUE || owned->truncation_held || owned->syncs_pending || owned->in_syncfs ||
        owned->preallocating || owned->snapshotting)
        return;
    owned->truncating = MQD_TRUNCATION_UNDER_WAY;
    owned->truncation_job->wall_ms = r->wall_ms;
    if (r->poll && mqd_poll_run(r->poll, r->log_dirs[owned->log_dir].fd, run_truncation, owned->truncation_job,
                                mqd_token(MQD_TOKEN_TRUNCATION, owned->slot)) == 0)
        return;
    if (r->poll && mqd_error_code() == MQD_E_FULL) { /* too many operations: mqd_truncations_retry tries again */
        owned->truncating = MQD_TRUNCATION_DUE;
        r->waiting_truncation_count++;
        return;
    }
    run_truncation(owned->truncation_job);
    mqd_truncation_on_done(r, owned->slot, 0);
}

/* Retries truncations for which no helper thread was free. */
void mqd_truncations_retry(struct mqd_reactor *r)
{
    r->waiting_truncation_count = 0;
    for (uint32_t slot = 0; slot < r->owned_end; slot++)
        if (r->owned[slot] && r->owned[slot]->truncating == MQD_TRUNCATION_DUE)
            mqd_truncation_begin_if_possible(r, r->owned[slot]);
}

static void report(struct mqd_reactor *r, const struct mqd_owned *owned, const struct mqd_truncation_job *job)
{
    struct mqd_event event = {.kind = MQD_EVENT_TRUNCATED,
                              .slot = owned->slot,
                              .log_dir = owned->log_dir,
                              .offset = job->outcome.log_end_offset,
                              .level = job->outcome.below_high_watermark ? 4 : 6};
    snprintf(event.text, sizeof event.text, "%s: removed %lld bytes that the leader does not have%s",
             job->restart ? "log restarted" : "log truncated", (long long)job->outcome.cut_bytes,
             job->outcome.below_high_watermark ? "; committed records were among them (unclean election?)" : "");
    mqd_reactor_emit(r, &event);
}

static void on_failure(struct mqd_reactor *r, const struct mqd_owned *owned, const struct mqd_truncation_job *job)
{
    /* true: the truncation had not begun, and the leader will give the same response again */
    bool intact = !mqd_partition_fenced(owned->partition);
    if (intact && (job->error == ENOSPC || job->error == EDQUOT)) {
        mqd_owner_report_dir_full(r, owned, job->error, job->text);
        return;
    }
    mqd_log(r, 3, 0, owned->slot, "the log cannot be truncated%s: %s", intact ? " yet" : "", job->text);
    if (!intact)
        mqd_owner_fence_dir(r, owned->log_dir, job->error, "truncation");
}

void mqd_truncation_on_done(struct mqd_reactor *r, uint64_t slot, int result)
{
    struct mqd_owned *owned = r->owned[slot];
    struct mqd_truncation_job *job = owned ? owned->truncation_job : NULL;
    if (!job || owned->truncating != MQD_TRUNCATION_UNDER_WAY)
        return;
    owned->truncation_job = NULL;
    owned->truncating = MQD_TRUNCATION_NONE;
    owned->dirty_since_ms = 0;
    if (r->log_dirs[owned->log_dir].failed)
        mqd_partition_fence(owned->partition); /* the log directory has failed in the meantime */
    bool log_changed = !job->error && (job->outcome.cut_bytes || job->restart);
    if (job->error) {
        on_failure(r, owned, job);
    } else if (log_changed) {
        owned->truncation_count++;
        struct mqd_partition_slot *shared = mqd_control_partition(r->options.control, owned->slot);
        mqd_fetch_add(&shared->segments_generation, 1); /* files that readers may have open have changed */
        mqd_fetch_add(&r->header->segments_generation, 1);
        report(r, owned, job);
    }
    if (owned->replica)
        mqd_replication_on_truncation(r, owned);
    owned->high_watermark = -1; /* forces a publish: the high watermark may have decreased */
    mqd_owner_publish(r, owned);
    if (mqd_partition_dirty(owned->partition)) /* nothing was truncated: requests the needed flush again */
        mqd_flush_request(r, owned);
    free(job);
    uint32_t index = owned->slot;
    mqd_owned_maybe_close(r, owned);
    if ((owned = r->owned[index])) {
        mqd_fetcher_on_truncation(r, owned, log_changed);
        mqd_commands_run_deferred(r, owned);
    }
}
