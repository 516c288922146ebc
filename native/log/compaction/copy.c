/* The second half of a compaction: rewrites segments without the records that the key table shows
 * to be outdated. See log/compaction/compact.h. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "log/compaction/compact.h"

/* ---- writing a batch to the new segment ---- */

static int write_batch(struct mqd_compact *compact, const struct mqd_batch *batch, const void *header,
                       uint32_t header_bytes, const void *records, uint32_t records_bytes)
{
    compact->figures.written_bytes += (int64_t)header_bytes + records_bytes;
    compact->figures.records_kept += batch->record_count;
    return mqd_compact_output_add(&compact->output, batch, header, header_bytes, records, records_bytes) < 0
               ? -1
               : MQD_COMPACT_MORE;
}

static int copy_unchanged(struct mqd_compact *compact)
{
    compact->figures.batches_unchanged++;
    return write_batch(compact, &compact->batch, compact->bytes, (uint32_t)compact->batch.size_bytes, NULL, 0);
}

/* Positions are int32, and a rebuilt batch may be larger than the old one (delete horizon, another
 * compression result). If the rebuilt batch would leave no room for the batches after it, the old
 * one is copied. */
static bool fits(const struct mqd_compact *compact, uint64_t size_bytes)
{
    return (uint64_t)compact->output.position + size_bytes + (uint64_t)compact->group_left_bytes <= INT32_MAX;
}

static int write_rebuilt(struct mqd_compact *compact, const struct mqd_batch *batch, const uint8_t *records,
                         uint64_t size_bytes)
{
    uint8_t header[MQD_BATCH_HEADER_BYTES];
    if (!fits(compact, size_bytes + sizeof header))
        return copy_unchanged(compact);
    mqd_batch_put_header(header, batch, records, (uint32_t)size_bytes);
    compact->group_changed = true;
    compact->figures.batches_rebuilt++;
    return write_batch(compact, batch, header, sizeof header, records, (uint32_t)size_bytes);
}

/* Returns whether the batch is its producer's last, which K5 keeps. */
static bool is_last_of_producer(const struct mqd_compact *compact, const struct mqd_batch *batch)
{
    int64_t last;
    if (batch->producer_id < 0)
        return false;
    if (!mqd_id_map_get(&compact->last_batch, batch->producer_id, &last))
        return compact->snapshot_end_offset < 0; /* without a snapshot any batch may be the last */
    return batch->attributes & MQD_ATTRIBUTE_CONTROL ? last == MQD_COMPACT_ONLY_MARKERS(batch->producer_epoch)
                                                     : last == batch->base_offset;
}

/* Returns whether the current batch is the last of the cleaned segments, which K5 keeps. */
static bool is_last_cleaned_batch(const struct mqd_compact *compact)
{
    return compact->input.number + 1 == compact->figures.to_clean_count &&
           compact->input.position >= compact->input.file_end;
}

/* Removes the batch, except for its header where K5 requires it. */
static int drop_batch(struct mqd_compact *compact)
{
    const struct mqd_batch *batch = &compact->batch;
    bool keeps_header = is_last_of_producer(compact, batch) || is_last_cleaned_batch(compact);
    if (batch->record_count == 0 && keeps_header)
        return copy_unchanged(compact);
    compact->group_changed = true;
    if (!keeps_header) {
        compact->figures.batches_dropped++;
        return MQD_COMPACT_MORE;
    }
    struct mqd_batch empty = *batch;
    uint8_t header[MQD_BATCH_HEADER_BYTES];
    empty.record_count = 0;
    empty.attributes &= ~(MQD_ATTRIBUTE_COMPRESSION | MQD_ATTRIBUTE_DELETE_HORIZON);
    empty.base_timestamp_ms = empty.max_timestamp_ms = -1; /* no record is left */
    mqd_batch_put_header(header, &empty, NULL, 0);
    compact->figures.batches_emptied++;
    return write_batch(compact, &empty, header, sizeof header, NULL, 0);
}

/* ---- markers ---- */

static int64_t new_horizon(const struct mqd_compact *compact)
{
    int64_t horizon_ms;
    return __builtin_add_overflow(compact->options.now_ms, compact->options.delete_retention_ms, &horizon_ms)
               ? INT64_MAX
               : horizon_ms;
}

static int note_dropped_marker(struct mqd_compact *compact, int64_t offset)
{
    if (compact->dropped_count == compact->dropped_capacity) {
        size_t capacity = compact->dropped_capacity ? compact->dropped_capacity * 2 : 64;
        int64_t *grown = realloc(compact->dropped_markers, capacity * sizeof *grown);
        if (!grown)
            return mqd_error_set(ENOMEM, "out of memory for the markers of a segment");
        compact->dropped_markers = grown;
        compact->dropped_capacity = capacity;
    }
    compact->dropped_markers[compact->dropped_count++] = offset;
    return 0;
}

static int set_marker_horizon(struct mqd_compact *compact)
{
    struct mqd_batch marker = compact->batch;
    struct mqd_records records;
    struct mqd_record record;
    mqd_records_begin(&records, &marker, compact->bytes + MQD_BATCH_HEADER_BYTES,
                      (uint64_t)marker.size_bytes - MQD_BATCH_HEADER_BYTES);
    if ((marker.attributes & MQD_ATTRIBUTE_COMPRESSION) || marker.record_count != 1 ||
        mqd_records_next(&records, &record) != 1)
        return copy_unchanged(compact); /* unknown control record: keep it */
    compact->scratch.size_bytes = 0;
    if (mqd_compact_bytes_reserve(&compact->scratch, record.size_bytes + MQD_RECORD_GROWTH_BYTES_MAX) < 0)
        return -1;
    int64_t horizon_ms = new_horizon(compact);
    uint32_t size_bytes = mqd_record_rebase(compact->scratch.bytes, &marker, &record, horizon_ms);
    marker.base_timestamp_ms = horizon_ms;
    marker.attributes |= MQD_ATTRIBUTE_DELETE_HORIZON;
    return write_rebuilt(compact, &marker, compact->scratch.bytes, size_bytes);
}

/* Keeps the marker, sets its delete horizon, or removes it: K4. */
static int copy_control(struct mqd_compact *compact)
{
    const struct mqd_batch *marker = &compact->batch;
    if (marker->producer_id < 0)
        return copy_unchanged(compact);
    bool has_batches = mqd_id_map_remove(&compact->producers_with_data, marker->producer_id);
    if (has_batches || mqd_batch_end_offset(marker) > compact->mapped_end || is_last_of_producer(compact, marker) ||
        is_last_cleaned_batch(compact))
        return copy_unchanged(compact);
    if (!(marker->attributes & MQD_ATTRIBUTE_DELETE_HORIZON))
        return set_marker_horizon(compact);
    if (compact->options.now_ms < marker->base_timestamp_ms)
        return copy_unchanged(compact);
    compact->group_changed = true;
    compact->figures.batches_dropped++;
    return note_dropped_marker(compact, marker->base_offset) < 0 ? -1 : MQD_COMPACT_MORE;
}

/* ---- records ---- */

static int add_run(struct mqd_compact *compact, uint32_t at, uint32_t size_bytes)
{
    struct mqd_compact_run *last = compact->run_count ? &compact->runs[compact->run_count - 1] : NULL;
    if (last && last->at + last->size_bytes == at) {
        last->size_bytes += size_bytes;
        return 0;
    }
    if (compact->run_count == compact->run_capacity) {
        size_t capacity = compact->run_capacity ? compact->run_capacity * 2 : 1024;
        struct mqd_compact_run *grown = realloc(compact->runs, capacity * sizeof *grown);
        if (!grown)
            return mqd_error_set(ENOMEM, "out of memory for the records of a batch");
        compact->runs = grown;
        compact->run_capacity = capacity;
    }
    compact->runs[compact->run_count++] = (struct mqd_compact_run){at, size_bytes};
    return 0;
}

struct kept_records {
    int32_t count;
    uint64_t size_bytes;
    int64_t max_timestamp_ms;
    bool has_tombstones;
};

/* K1, K3: selects the records to keep, as runs of bytes. */
static int choose_records(struct mqd_compact *compact, const uint8_t *bytes, uint64_t size_bytes,
                          struct kept_records *kept)
{
    const struct mqd_batch *batch = &compact->batch;
    bool horizon_passed =
        (batch->attributes & MQD_ATTRIBUTE_DELETE_HORIZON) && compact->options.now_ms >= batch->base_timestamp_ms;
    struct mqd_records records;
    struct mqd_record record;
    int more;
    *kept = (struct kept_records){.max_timestamp_ms = -1};
    compact->run_count = 0;
    mqd_records_begin(&records, batch, bytes, size_bytes);
    while ((more = mqd_records_next(&records, &record)) == 1) {
        if (record.key_bytes < 0) {
            compact->figures.records_without_key++;
            continue;
        }
        if (batch->base_offset + record.offset_delta <
                mqd_key_map_get(&compact->map, record.key, (uint32_t)record.key_bytes) ||
            (record.tombstone && horizon_passed))
            continue;
        int64_t timestamp_ms = mqd_record_timestamp_ms(batch, &record);
        if (timestamp_ms > kept->max_timestamp_ms)
            kept->max_timestamp_ms = timestamp_ms;
        kept->count++;
        kept->size_bytes += record.size_bytes;
        kept->has_tombstones |= record.tombstone;
        if (add_run(compact, (uint32_t)(record.bytes - bytes), record.size_bytes) < 0)
            return -1;
    }
    return more < 0 ? mqd_compact_report_corrupt(&compact->input, batch, records.reason) : 0;
}

/* Rewrites the chosen runs, record by record, with another base timestamp. They were parsed before,
 * so they are valid. */
static int rebase_runs(struct mqd_compact *compact, const uint8_t *bytes, int64_t base_timestamp_ms)
{
    struct mqd_records records;
    struct mqd_record record;
    for (size_t i = 0; i < compact->run_count; i++) {
        struct mqd_batch unlimited = compact->batch;
        unlimited.record_count = INT32_MAX;
        mqd_records_begin(&records, &unlimited, bytes + compact->runs[i].at, compact->runs[i].size_bytes);
        while (records.at < records.end && mqd_records_next(&records, &record) == 1) {
            if (mqd_compact_bytes_reserve(&compact->scratch, (size_t)record.size_bytes + MQD_RECORD_GROWTH_BYTES_MAX) <
                0)
                return -1;
            compact->scratch.size_bytes += mqd_record_rebase(compact->scratch.bytes + compact->scratch.size_bytes,
                                                             &compact->batch, &record, base_timestamp_ms);
        }
    }
    return 0;
}

static int gather_runs(struct mqd_compact *compact, const uint8_t *bytes)
{
    for (size_t i = 0; i < compact->run_count; i++)
        if (mqd_compact_bytes_add(&compact->scratch, bytes + compact->runs[i].at, compact->runs[i].size_bytes) < 0)
            return -1;
    return 0;
}

/* Returns the new header, without size and CRC. */
static struct mqd_batch new_header(const struct mqd_compact *compact, const struct kept_records *kept,
                                   bool sets_horizon)
{
    struct mqd_batch header = compact->batch;
    header.record_count = kept->count;
    if (!(header.attributes & MQD_ATTRIBUTE_LOG_APPEND_TIME))
        header.max_timestamp_ms = kept->max_timestamp_ms;
    if (sets_horizon) {
        header.attributes |= MQD_ATTRIBUTE_DELETE_HORIZON;
        header.base_timestamp_ms = new_horizon(compact);
    }
    return header;
}

int mqd_compact_copy_records(struct mqd_compact *compact, const uint8_t *bytes, uint64_t size_bytes)
{
    struct mqd_batch *batch = &compact->batch;
    struct kept_records kept;
    if (size_bytes > UINT32_MAX)
        return mqd_compact_report_corrupt(&compact->input, batch, "its records decompress to more than 4 GiB");
    if (choose_records(compact, bytes, size_bytes, &kept) < 0)
        return -1;
    if (kept.count == 0)
        return drop_batch(compact);
    bool sets_horizon =
        kept.has_tombstones && !(batch->attributes & MQD_ATTRIBUTE_DELETE_HORIZON) &&
        fits(compact, MQD_BATCH_HEADER_BYTES + kept.size_bytes + (uint64_t)kept.count * MQD_RECORD_GROWTH_BYTES_MAX);
    if (kept.count == batch->record_count && !sets_horizon)
        return copy_unchanged(compact);
    compact->scratch.size_bytes = 0;
    struct mqd_batch header = new_header(compact, &kept, sets_horizon);
    if ((sets_horizon ? rebase_runs(compact, bytes, header.base_timestamp_ms) : gather_runs(compact, bytes)) < 0)
        return -1;
    if (!(batch->attributes & MQD_ATTRIBUTE_COMPRESSION))
        return write_rebuilt(compact, &header, compact->scratch.bytes, compact->scratch.size_bytes);
    compact->rebuilt = header;
    return MQD_COMPACT_COMPRESS;
}

int mqd_compact_copy_compressed(struct mqd_compact *compact, const uint8_t *bytes, uint64_t size_bytes)
{
    return write_rebuilt(compact, &compact->rebuilt, bytes, size_bytes);
}

int mqd_compact_copy_step(struct mqd_compact *compact)
{
    struct mqd_batch *batch = &compact->batch;
    int more = mqd_compact_input_next(&compact->input, batch);
    if (more <= 0) {
        if (more == 0)
            compact->phase = MQD_PHASE_COPIED;
        return more < 0 ? -1 : MQD_COMPACT_DONE;
    }
    compact->bytes = mqd_compact_input_bytes(&compact->input, batch);
    if (!compact->bytes)
        return -1;
    compact->group_left_bytes -= batch->size_bytes;
    compact->figures.batches_read++;
    compact->figures.records_read += batch->record_count;
    if (batch->attributes & MQD_ATTRIBUTE_CONTROL)
        return copy_control(compact);
    if ((batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL) && batch->producer_id >= 0 &&
        mqd_id_map_put(&compact->producers_with_data, batch->producer_id, 1) < 0)
        return -1;
    if (mqd_batch_end_offset(batch) > compact->mapped_end)
        return copy_unchanged(compact);
    if (mqd_compact_is_aborted(compact, batch) || batch->record_count == 0)
        return drop_batch(compact);
    if (batch->attributes & MQD_ATTRIBUTE_COMPRESSION)
        return MQD_COMPACT_DECOMPRESS;
    return mqd_compact_copy_records(compact, compact->bytes + MQD_BATCH_HEADER_BYTES,
                                    (uint64_t)batch->size_bytes - MQD_BATCH_HEADER_BYTES);
}

/* ---- groups ---- */

/* Sets group_left_bytes, and checks that the group fits into one segment. */
static int measure_group(struct mqd_compact *compact, uint32_t first, uint32_t count)
{
    char path[PATH_MAX];
    struct stat status;
    compact->group_left_bytes = 0;
    for (uint32_t i = first; i < first + count; i++) {
        if (mqd_segment_path(path, sizeof path, compact->directory, compact->bases[i], MQD_FILE_LOG) < 0)
            return -1;
        if (stat(path, &status) < 0)
            return mqd_error_system(errno, "cannot stat %s", path);
        compact->group_left_bytes += status.st_size;
    }
    int64_t end_offset = first + count < compact->options.segment_count ? compact->bases[first + count]
                                                                        : compact->bases[first + count - 1] + 1;
    if (compact->group_left_bytes > INT32_MAX || end_offset - compact->bases[first] > INT32_MAX)
        return mqd_error_set(MQD_E_INVALID, "%u segments, the first with base offset %lld, do not fit into one", count,
                             (long long)compact->bases[first]);
    return 0;
}

int mqd_compact_group_begin(struct mqd_compact *compact, uint32_t first, uint32_t count)
{
    if ((compact->phase != MQD_PHASE_MAPPED && compact->phase != MQD_PHASE_COPIED) ||
        first != compact->next_group_first || count == 0 || first + count > compact->figures.to_clean_count)
        return mqd_error_set_static(MQD_E_INVALID, "groups are copied in order, after the keys are known");
    compact->group_first = first;
    compact->group_end = first + count;
    compact->group_changed = count > 1;
    compact->dropped_count = 0;
    if (measure_group(compact, first, count) < 0 ||
        mqd_compact_output_begin(&compact->output, compact->bases[first]) < 0 ||
        mqd_compact_input_begin(&compact->input, first, first + count) < 0)
        return -1;
    compact->phase = MQD_PHASE_COPY;
    return 0;
}

int mqd_compact_group_end(struct mqd_compact *compact, struct mqd_compact_group *out)
{
    if (compact->phase != MQD_PHASE_COPIED || compact->output.fd < 0)
        return mqd_error_set_static(MQD_E_INVALID, "the group has not been copied completely");
    *out = (struct mqd_compact_group){.size_bytes = compact->output.position, .changed = compact->group_changed};
    if (compact->group_changed &&
        (mqd_compact_build_transaction_index(compact) < 0 || mqd_compact_output_finish(&compact->output) < 0))
        return -1;
    out->has_transactions = compact->output.transaction_bytes.size_bytes > 0;
    mqd_compact_output_end(&compact->output, !compact->group_changed);
    compact->next_group_first = compact->group_end;
    return 0;
}
