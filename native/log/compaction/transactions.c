/* The producer state that a compaction needs, and the index of aborted transactions that it writes
 * for readers; see log/compaction/compact.h (K4, K5). */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/big_endian.h"
#include "base/error.h"
#include "base/read.h"
#include "log/compaction/compact.h"
#include "log/producers.h"

#define SNAPSHOT_BYTES_MAX (1ll << 30)

/* Returns the contents of the file, or NULL with *size_bytes 0 on failure. */
static uint8_t *read_file(const char *path, size_t *size_bytes)
{
    struct stat status;
    uint8_t *bytes = NULL;
    *size_bytes = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &status) == 0 && status.st_size > 0 && status.st_size <= SNAPSHOT_BYTES_MAX)
        bytes = malloc((size_t)status.st_size);
    if (bytes && mqd_read_exactly(fd, bytes, (size_t)status.st_size, 0) == 0) {
        *size_bytes = (size_t)status.st_size;
    } else {
        free(bytes);
        bytes = NULL;
    }
    if (fd >= 0)
        close(fd);
    return bytes;
}

static int set_last(struct mqd_compact *compact, int64_t producer_id, int16_t epoch, int64_t last)
{
    return mqd_id_map_put(&compact->last_batch, producer_id, last) < 0
               ? -1
               : mqd_id_map_put(&compact->last_epoch, producer_id, epoch);
}

static int load_producer(struct mqd_compact *compact, const struct mqd_producer_state *producer)
{
    uint32_t newest = (producer->head + MQD_PRODUCER_BATCH_COUNT - 1u) % MQD_PRODUCER_BATCH_COUNT;
    return set_last(compact, producer->producer_id, producer->epoch,
                    producer->count ? producer->batches[newest].base_offset
                                    : MQD_COMPACT_ONLY_MARKERS(producer->epoch));
}

int mqd_compact_load_producers(struct mqd_compact *compact, int64_t snapshot_offset)
{
    char path[PATH_MAX];
    size_t size_bytes;
    int64_t stored_offset = -1;
    struct mqd_producers producers = {0};
    if (snapshot_offset < 0 ||
        mqd_segment_path(path, sizeof path, compact->directory, snapshot_offset, MQD_FILE_SNAPSHOT) < 0)
        return 0;
    uint8_t *bytes = read_file(path, &size_bytes);
    int result = 0;
    if (bytes && mqd_producers_decode(&producers, bytes, size_bytes, &stored_offset) == 0 &&
        stored_offset == snapshot_offset) {
        compact->snapshot_end_offset = snapshot_offset;
        for (uint32_t link = producers.newest; link && result == 0; link = producers.entries[link - 1].older)
            result = load_producer(compact, &producers.entries[link - 1]);
        for (uint32_t link = producers.transactions.oldest; link && result == 0;
             link = producers.transactions.entries[link - 1].newer) {
            /* the list walked above does not contain producers with an ongoing transaction */
            uint32_t index = mqd_producers_find(&producers, producers.transactions.entries[link - 1].producer_id);
            if (index != MQD_PRODUCER_NONE)
                result = load_producer(compact, &producers.entries[index]);
        }
    }
    mqd_producers_free(&producers);
    free(bytes);
    return result;
}

/* As in Kafka, a marker does not replace the producer's last data batch of the same epoch, because
 * that batch has the sequence numbers that K5 keeps. */
int mqd_compact_note_producer(struct mqd_compact *compact, const struct mqd_batch *batch)
{
    int64_t last, epoch;
    if (batch->producer_id < 0 || batch->base_offset < compact->snapshot_end_offset)
        return 0;
    if (!(batch->attributes & MQD_ATTRIBUTE_CONTROL))
        return set_last(compact, batch->producer_id, batch->producer_epoch, batch->base_offset);
    bool is_known = mqd_id_map_get(&compact->last_batch, batch->producer_id, &last);
    if (!is_known && compact->snapshot_end_offset < 0)
        return 0; /* the producer's last data batch may be in a segment that is not read: all its batches stay */
    if (is_known && mqd_id_map_get(&compact->last_epoch, batch->producer_id, &epoch) && epoch == batch->producer_epoch)
        return 0;
    return set_last(compact, batch->producer_id, batch->producer_epoch,
                    MQD_COMPACT_ONLY_MARKERS(batch->producer_epoch));
}

static bool was_dropped(const struct mqd_compact *compact, int64_t offset)
{
    size_t low = 0, high = compact->dropped_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compact->dropped_markers[middle] < offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low < compact->dropped_count && compact->dropped_markers[low] == offset;
}

/* An entry makes readers drop the producer's records up to the entry's marker, so it must not
 * outlive that marker. Nor may the entry be removed earlier, because the old segment may still be
 * read. */
int mqd_compact_build_transaction_index(struct mqd_compact *compact)
{
    int result = 0;
    uint32_t sum = 0;
    for (uint32_t i = compact->group_first; i < compact->group_end && result == 0; i++) {
        struct mqd_aborted_list list = {0};
        int64_t end_offset = i + 1 < compact->options.segment_count ? compact->bases[i + 1] : INT64_MAX;
        int verified = mqd_txn_index_verify(compact->directory, compact->bases[i], INT64_MAX);
        if (verified == 0)
            result = mqd_error_set(MQD_E_CORRUPT,
                                   "%s: the .txnindex of segment %lld is damaged or lost; restart the broker, which "
                                   "rebuilds it from the log",
                                   compact->directory, (long long)compact->bases[i]);
        else if (verified < 0 || mqd_txn_index_load(compact->directory, compact->bases[i], end_offset, &list) < 0)
            result = mqd_error_system(errno, "%s: cannot read the aborted transactions of segment %lld",
                                      compact->directory, (long long)compact->bases[i]);
        for (uint32_t k = 0; k < list.count && result == 0; k++) {
            uint8_t bytes[MQD_TXN_INDEX_ENTRY_BYTES];
            mqd_aborted_encode(bytes, &list.entries[k]);
            if (was_dropped(compact, list.entries[k].last_offset))
                continue;
            uint8_t sum_bytes[MQD_TXN_SUM_BYTES];
            sum = mqd_txn_index_checksum(sum, compact->output.base_offset, bytes);
            mqd_put_be32(sum_bytes, sum);
            result = mqd_compact_bytes_add(&compact->output.transaction_bytes, bytes, sizeof bytes);
            if (result == 0)
                result = mqd_compact_bytes_add(&compact->output.transaction_checksums, sum_bytes, sizeof sum_bytes);
        }
        free(list.entries);
    }
    return result;
}
