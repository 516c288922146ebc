/* Closing a partition's log; see native.h. Runs off the reactor; may block. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/file.h"
#include "log/partition_state.h"
#include "log/planted_bugs.h"

void mqd_partition_free(struct mqd_partition *partition)
{
    for (uint32_t i = 0; i < partition->sync_queue_count; i++)
        mqd_file_close(partition->sync_queue[i].fd);
    mqd_index_close_files(&partition->active.index);
    mqd_txn_index_close(&partition->active.txn_index);
    mqd_file_close(partition->active.fd);
    mqd_file_close(partition->preallocate_fd);
    mqd_file_close(partition->sync_directory_fd);
    mqd_partition_stage_reset(partition); /* rewritten batches have memory of their own */
    mqd_partition_stage_free(partition);
    mqd_dedup_free(partition->dedup);
    mqd_producers_free(&partition->producers);
    mqd_verifications_free(&partition->verifications);
    mqd_epochs_free(&partition->epochs);
    free(partition->marks);
    free(partition->segments);
    free(partition->path);
    free(partition);
}

/* Flushes the files that wait for a flush, the active segment and its index, and the directory. */
static int flush_all(struct mqd_partition *partition)
{
    for (uint32_t i = 0; i < partition->sync_queue_count; i++)
        if (mqd_file_sync(partition->sync_queue[i].fd, false) < 0)
            return mqd_error_system(errno, "%s: cannot flush a sealed segment", partition->path);
    if (mqd_file_sync(partition->active.fd, false) < 0)
        return mqd_error_system(errno, "%s: cannot flush segment %lld", partition->path,
                                (long long)partition->active.base_offset);
    if (mqd_index_sync(partition->path, partition->active.base_offset) < 0)
        return -1;
    return partition->directory_dirty ? mqd_file_sync_directory(partition->path) : 0;
}

static int write_snapshot(struct mqd_partition *partition)
{
    char path[PATH_MAX];
    size_t size_bytes;
    if (partition->snapshot_offset == partition->log_end_offset || partition->log_end_offset == 0)
        return 0;
    if (mqd_segment_path(path, sizeof path, partition->path, partition->log_end_offset, MQD_FILE_SNAPSHOT) < 0)
        return -1;
    uint8_t *bytes = mqd_producers_encode(&partition->producers, partition->log_end_offset, &size_bytes);
    if (!bytes)
        return -1;
    int result = mqd_file_replace(path, bytes, size_bytes);
    free(bytes);
    if (result == 0)
        mqd_partition_rotate_snapshots(partition, partition->log_end_offset);
    return result;
}

static int close_clean(struct mqd_partition *partition)
{
    if (partition->fenced)
        return mqd_error_set(EIO, "%s: fenced after an earlier failure; it will be checked when it is opened again",
                             partition->path);
    mqd_partition_unstage(partition);
    mqd_partition_trim(partition);
    if (mqd_index_seal(&partition->active.index, partition->path, partition->active.base_offset) < 0)
        return mqd_error_system(errno, "%s: cannot write the index of segment %lld", partition->path,
                                (long long)partition->active.base_offset);
    if (partition->written_bytes > 0 && !PLANTED_LOG_BUG(NO_CLOSE) && flush_all(partition) < 0)
        return -1;
    return write_snapshot(partition);
}

int mqd_partition_close(struct mqd_partition *partition, int clean)
{
    int result = clean ? close_clean(partition) : 0;
    mqd_partition_free(partition);
    return result;
}
