/* Group-commit flushes, preallocation and snapshots: slow file work that the reactor starts but
 * never waits for; an event reports its end.
 *
 * Appends that arrive while a partition is being flushed join its next flush. A few dirty
 * partitions are flushed in parallel; with more than MQD_SYNCFS_PARTITION_COUNT in one directory a
 * single syncfs covers all of them (measured: 64 partitions cost 3.1 ms of CPU time one by one, 0.6
 * ms together). A failed flush fences the directory and is never retried, because the kernel has
 * dropped the pages that it could not write.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "server/reactor.h"
#include "server/slow/slow.h"
#include "server/slow/turn.h"

static void enqueue(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_log_directory *dir = &r->log_dirs[owned->log_dir];
    if (owned->truncating || dir->failed || mqd_list_linked(&owned->sync_node) ||
        mqd_partition_syncing(owned->partition))
        return;
    if (!dir->to_sync_count && r->options.group_commit_us && !r->group_commit_deadline_ns)
        r->group_commit_deadline_ns = r->now_ns + (int64_t)r->options.group_commit_us * 1000;
    mqd_list_append(&dir->to_sync, &owned->sync_node);
    dir->to_sync_count++;
}

static int64_t background_flush_bytes(const struct mqd_log_directory *dir, const struct mqd_log_options *options)
{
    if (options->queue_unflushed_bytes)
        return options->queue_unflushed_bytes;
    return dir->busy_count > MQD_BUSY_COUNT_FEW ? MQD_BACKGROUND_FLUSH_BYTES_BUSY : MQD_BACKGROUND_FLUSH_BYTES;
}

void mqd_flush_request(struct mqd_reactor *r, struct mqd_owned *owned)
{
    if (owned->truncating)
        return; /* the truncation flushes */
    if (!owned->dirty_since_ms)
        owned->dirty_since_ms = r->now_ms;
    const struct mqd_log_options *options = mqd_partition_options(owned->partition);
    if (!options->flush_on_ack &&
        mqd_partition_dirty_bytes(owned->partition) < background_flush_bytes(&r->log_dirs[owned->log_dir], options) &&
        !mqd_partition_sync_queue_nearly_full(owned->partition))
        return; /* mqd_flush_background flushes it later */
    enqueue(r, owned);
}

static void finish_flush(struct mqd_reactor *r, struct mqd_owned *owned, int error)
{
    mqd_observe_time(r, MQD_TIME_SYNC, r->now_ns - owned->sync_started_ns);
    mqd_partition_sync_done(owned->partition, error);
    if (error) {
        mqd_stat(r, MQD_COUNT_SYNC_FAILURES, 1);
        mqd_owner_fence_dir(r, owned->log_dir, error, "flush");
    } else {
        if (mqd_slow_enabled(r) && owned->replicated)
            mqd_slow_on_flush(r, owned);
        mqd_owner_publish(r, owned);
        owned->dirty_since_ms = 0;
        if (mqd_partition_dirty(owned->partition))
            mqd_flush_request(r, owned);
        /* a flush covers only a few files: keep flushing until every sealed file is flushed,
         * because compaction waits for that */
        if (mqd_partition_has_waiting_segments(owned->partition))
            enqueue(r, owned);
        mqd_fetcher_on_flush(r, owned);
    }
    mqd_lookups_notify(r, owned->slot);
    mqd_owned_maybe_close(r, owned);
}

/* Called when no flush was started, because the log is clean or the flush failed to start. Fences
 * the directory after a failure, so that requests do not wait for a flush until they time out. */
static void finish_without_flush(struct mqd_reactor *r, struct mqd_owned *owned)
{
    if (mqd_partition_fenced(owned->partition))
        mqd_owner_fence_dir(r, owned->log_dir, mqd_error_code() ? mqd_error_code() : EIO, "flush");
    mqd_owned_maybe_close(r, owned);
}

static void start_flush(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_sync_fd fds[4];
    int count = mqd_partition_sync_begin(owned->partition, fds);
    if (count == 0) {
        finish_without_flush(r, owned);
        return;
    }
    owned->sync_started_ns = r->now_ns;
    owned->sync_error = 0;
    owned->syncs_pending = (uint32_t)count;
    for (int i = 0; i < count; i++) {
        mqd_stat(r, MQD_COUNT_SYNCS, 1);
        if (mqd_poll_sync(r->poll, fds[i].fd, fds[i].is_directory, mqd_token(MQD_TOKEN_SYNC, owned->slot)) < 0)
            /* the queue of file operations is full: flush synchronously, which is slow but
             * correct */
            mqd_flush_on_done(r, owned->slot,
                              mqd_file_sync(fds[i].fd, fds[i].is_directory) < 0 ? -mqd_error_code() : 0);
    }
}

static void start_syncfs(struct mqd_reactor *r, struct mqd_log_directory *dir, uint32_t log_dir)
{
    struct mqd_node *node;
    while ((node = mqd_list_pop(&dir->to_sync))) {
        struct mqd_owned *owned = MQD_CONTAINER(node, struct mqd_owned, sync_node);
        struct mqd_sync_fd fds[4];
        dir->to_sync_count--;
        if (mqd_partition_sync_begin(owned->partition, fds) == 0) {
            finish_without_flush(r, owned);
            continue;
        }
        owned->sync_started_ns = r->now_ns;
        owned->in_syncfs = 1;
        mqd_list_append(&dir->in_syncfs, &owned->sync_node);
    }
    dir->syncfs_running = true;
    mqd_stat(r, MQD_COUNT_SYNCS, 1);
    if (mqd_poll_syncfs(r->poll, dir->fd, mqd_token(MQD_TOKEN_SYNCFS, log_dir)) < 0)
        mqd_flush_on_syncfs_done(r, log_dir, mqd_file_syncfs(dir->fd, dir->path) < 0 ? -mqd_error_code() : 0);
}

static void start_directory_flushes(struct mqd_reactor *r, struct mqd_log_directory *dir, uint32_t log_dir)
{
    if (dir->to_sync_count > MQD_SYNCFS_PARTITION_COUNT && dir->fd >= 0) {
        if (!dir->syncfs_running)
            start_syncfs(r, dir, log_dir); /* otherwise the partitions wait until the running syncfs ends */
        return;
    }
    struct mqd_node *node;
    while ((node = mqd_list_pop(&dir->to_sync))) {
        dir->to_sync_count--;
        start_flush(r, MQD_CONTAINER(node, struct mqd_owned, sync_node));
    }
}

void mqd_flush_start_all(struct mqd_reactor *r)
{
    if (r->group_commit_deadline_ns && r->now_ns < (int64_t)r->group_commit_deadline_ns)
        return;
    r->group_commit_deadline_ns = 0;
    for (uint32_t i = 0; i < MQD_LOG_DIR_COUNT_MAX; i++) {
        if (!r->log_dirs[i].to_sync_count)
            continue;
        mqd_turn_part_begin(r);
        start_directory_flushes(r, &r->log_dirs[i], i);
        mqd_turn_add_time(r, MQD_TIME_LOOP_FLUSH, r->turn.part_start.now_ns);
        mqd_turn_part_end(r);
    }
}

void mqd_flush_on_done(struct mqd_reactor *r, uint64_t slot, int result)
{
    struct mqd_owned *owned = r->owned[slot];
    if (!owned || !owned->syncs_pending)
        return;
    if (result < 0 && !owned->sync_error)
        owned->sync_error = -result;
    if (--owned->syncs_pending == 0)
        finish_flush(r, owned, owned->sync_error);
}

void mqd_flush_on_syncfs_done(struct mqd_reactor *r, uint64_t log_dir, int result)
{
    struct mqd_log_directory *dir = &r->log_dirs[log_dir];
    struct mqd_node covered;
    mqd_list_init(&covered);
    mqd_list_move_all(&covered, &dir->in_syncfs);
    dir->syncfs_running = false;
    struct mqd_node *node;
    while ((node = mqd_list_pop(&covered))) {
        struct mqd_owned *owned = MQD_CONTAINER(node, struct mqd_owned, sync_node);
        owned->in_syncfs = 0;
        finish_flush(r, owned, result < 0 ? -result : 0);
    }
}

static int64_t background_flush_ms(const struct mqd_log_options *options)
{
    bool in_memory = options->queue_unflushed_bytes && !options->flush_on_ack;
    if (in_memory || options->flush_interval_ms < MQD_BACKGROUND_FLUSH_MS)
        return options->flush_interval_ms;
    return MQD_BACKGROUND_FLUSH_MS;
}

/* Called once a second: flushes data that no acknowledgement waits for, so that dirty bytes stay
 * bounded. */
void mqd_flush_background(struct mqd_reactor *r)
{
    uint32_t busy_count[MQD_LOG_DIR_COUNT_MAX] = {0};
    int64_t oldest_ns = 0;
    for (uint32_t slot = 0; slot < r->owned_end && r->owned_count; slot++) {
        struct mqd_owned *owned = r->owned[slot];
        if (!owned || owned->truncating)
            continue;
        if ((owned->syncs_pending || owned->in_syncfs) && (!oldest_ns || owned->sync_started_ns < oldest_ns))
            oldest_ns = owned->sync_started_ns;
        mqd_preallocate_begin_if_possible(r, owned);
        busy_count[owned->log_dir] += mqd_partition_dirty_bytes(owned->partition) >= MQD_BUSY_BYTES;
        if (!owned->dirty_since_ms || mqd_list_linked(&owned->sync_node) || owned->in_syncfs ||
            !mqd_partition_dirty(owned->partition) || mqd_partition_syncing(owned->partition) ||
            r->log_dirs[owned->log_dir].failed)
            continue;
        if (r->now_ms - owned->dirty_since_ms < background_flush_ms(mqd_partition_options(owned->partition)))
            continue;
        mqd_list_append(&r->log_dirs[owned->log_dir].to_sync, &owned->sync_node);
        r->log_dirs[owned->log_dir].to_sync_count++;
    }
    for (uint32_t i = 0; i < MQD_LOG_DIR_COUNT_MAX; i++)
        r->log_dirs[i].busy_count = busy_count[i];
    mqd_set_gauge(r, MQD_GAUGE_SYNC_OLDEST_NS, (uint64_t)oldest_ns);
}

/* ---- preallocation ---- */

struct preallocate_job {
    struct mqd_preallocation preallocation;
};

static int preallocate(void *argument)
{
    struct mqd_preallocation range = ((struct preallocate_job *)argument)->preallocation;
    free(argument);
    int result = mqd_file_fallocate(range.fd, FALLOC_FL_KEEP_SIZE, range.offset, range.size_bytes);
    return result < 0 ? -mqd_error_code() : 0;
}

void mqd_preallocate_begin_if_possible(struct mqd_reactor *r, struct mqd_owned *owned)
{
    struct mqd_preallocation preallocation;
    if (owned->preallocating || owned->closing || owned->truncating || !r->poll ||
        !mqd_partition_preallocate_begin(owned->partition, &preallocation))
        return;
    struct preallocate_job *job = malloc(sizeof *job);
    if (job) {
        job->preallocation = preallocation;
        if (mqd_poll_run(r->poll, preallocation.fd, preallocate, job, mqd_token(MQD_TOKEN_PREALLOCATE, owned->slot)) ==
            0) {
            owned->preallocating = 1;
            return;
        }
        free(job);
    }
    mqd_partition_preallocate_done(owned->partition, EAGAIN);
}

void mqd_preallocate_on_done(struct mqd_reactor *r, uint64_t slot, int result)
{
    struct mqd_owned *owned = r->owned[slot];
    owned->preallocating = 0;
    mqd_turn_part_begin(r);
    int64_t began_ns = mqd_turn_now_ns();
    mqd_partition_preallocate_done(owned->partition, result < 0 ? -result : 0);
    mqd_turn_add_time(r, MQD_TIME_LOOP_ALLOCATION, began_ns);
    mqd_turn_part_end(r);
    mqd_owned_maybe_close(r, owned);
}

/* ---- producer snapshots ---- */

struct snapshot_job {
    char *path;
    uint8_t *bytes;
    size_t size_bytes;
};

static int write_snapshot(void *argument)
{
    struct snapshot_job *job = argument;
    int result = mqd_file_replace(job->path, job->bytes, job->size_bytes) < 0 ? -mqd_error_code() : 0;
    free(job->path);
    free(job->bytes);
    free(job);
    return result;
}

void mqd_snapshot_begin_if_possible(struct mqd_reactor *r, struct mqd_owned *owned)
{
    int64_t offset;
    struct snapshot_job *job;
    /* if r->poll is NULL, the reactor has not been started, or has stopped; closing the partition
     * writes a snapshot */
    if (owned->snapshotting || owned->closing || owned->truncating || !r->poll || !(job = calloc(1, sizeof *job)))
        return;
    job->bytes = mqd_partition_snapshot(owned->partition, &job->size_bytes, &offset);
    if (job->bytes &&
        asprintf(&job->path, "%s/%020lld.snapshot", mqd_partition_path(owned->partition), (long long)offset) > 0 &&
        mqd_poll_run(r->poll, r->log_dirs[owned->log_dir].fd, write_snapshot, job,
                     mqd_token(MQD_TOKEN_SNAPSHOT, owned->slot)) == 0) {
        owned->snapshotting = 1;
        return;
    }
    free(job->path);
    free(job->bytes);
    free(job);
}

void mqd_snapshot_on_done(struct mqd_reactor *r, uint64_t slot, int result)
{
    struct mqd_owned *owned = r->owned[slot];
    owned->snapshotting = 0;
    if (result < 0)
        mqd_log(r, 4, 0, (uint32_t)slot, "producer snapshot was not written: %s; recovery will read more of the log",
                strerror(-result));
    mqd_owned_maybe_close(r, owned);
}

/* Once no work in flight refers to the partition: truncates it if a truncation is due, or, if the
 * partition is being closed, hands it back to the caller that requested the close. */
void mqd_owned_maybe_close(struct mqd_reactor *r, struct mqd_owned *owned)
{
    if (owned->syncs_pending || owned->in_syncfs || owned->preallocating || owned->snapshotting)
        return;
    if (owned->truncating)
        mqd_truncation_begin_if_possible(r, owned);
    if (!owned->closing || owned->truncating)
        return;
    mqd_replication_free(r, owned);
    if (mqd_list_linked(&owned->sync_node))
        r->log_dirs[owned->log_dir].to_sync_count--;
    mqd_list_remove(&owned->sync_node);
    /* the last flush moved the high watermark, but the waiters have not been woken yet */
    if (mqd_list_linked(&owned->publish_node)) {
        mqd_list_remove(&owned->publish_node);
        mqd_owner_wake_slot(r, owned->slot);
    }
    mqd_list_remove(&owned->write_node);
    mqd_list_remove(&owned->release_node);
    mqd_owner_fail_all(r, owned, MQD_KAFKA_NOT_LEADER_OR_FOLLOWER);
    mqd_lookups_notify(r, owned->slot);
    r->owned[owned->slot] = NULL;
    r->owned_count--;
    mqd_store_relaxed(&r->slot->partition_count, r->owned_count);
    mqd_command_done(r, owned->close_token, 0, owned->slot, mqd_partition_log_end_offset(owned->partition),
                     owned->partition, "");
    free(owned);
}
