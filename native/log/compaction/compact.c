/* Opening a compaction, and its first half: finding the last offset of each key. See
 * log/compaction/compact.h; the second half is in log/compaction/copy.c. */
#include "log/compaction/compact.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

/* ---- opening and closing ---- */

static void input_init(struct mqd_compact *compact, struct mqd_compact_input *input)
{
    *input = (struct mqd_compact_input){.directory = compact->directory,
                                        .bases = compact->bases,
                                        .segment_count = compact->options.segment_count,
                                        .end_position = compact->options.end_position,
                                        .fd = -1};
}

static int check_options(const int64_t *bases, const struct mqd_compact_options *options)
{
    bool valid = options->to_clean_count > 0 && options->to_clean_count <= options->segment_count &&
                 options->map_load_percent > 0 && options->map_load_percent <= 100;
    for (uint32_t i = 0; valid && i < options->segment_count; i++)
        valid = bases[i] >= 0 && (i == 0 || bases[i] > bases[i - 1]);
    return valid ? 0
                 : mqd_error_set_static(MQD_E_INVALID, "a compaction needs ascending segments, at least one "
                                                       "to clean, and a load factor of 1 to 100 %");
}

/* Returns the number of the last segment to clean that begins at or below the offset, or 0. */
static uint32_t find_segment(const struct mqd_compact *compact, int64_t offset)
{
    uint32_t number = 0;
    while (number + 1 < compact->options.to_clean_count && compact->bases[number + 1] <= offset)
        number++;
    return number;
}

/* Begins reading in the first dirty segment, or in an earlier, clean segment if the producer
 * snapshot does not cover all batches from there on. */
static int begin_map(struct mqd_compact *compact)
{
    bool begins_in_clean_segment =
        compact->snapshot_end_offset >= 0 && compact->snapshot_end_offset < compact->options.first_dirty_offset;
    uint32_t number =
        begins_in_clean_segment ? find_segment(compact, compact->snapshot_end_offset) : compact->first_dirty_number;
    return mqd_compact_input_begin(&compact->input, number, compact->options.to_clean_count);
}

struct mqd_compact *mqd_compact_open(const char *directory, const int64_t *bases,
                                     const struct mqd_compact_options *options)
{
    if (check_options(bases, options) < 0)
        return NULL;
    struct mqd_compact *compact = calloc(1, sizeof *compact);
    if (compact) {
        compact->options = *options;
        compact->input.fd = compact->scan_input.fd = compact->output.fd = -1;
        compact->snapshot_end_offset = -1;
        compact->directory = strdup(directory);
        compact->bases = malloc(options->segment_count * sizeof *bases);
    }
    if (!compact || !compact->directory || !compact->bases) {
        mqd_compact_close(compact);
        mqd_error_set(ENOMEM, "out of memory for a compaction");
        return NULL;
    }
    memcpy(compact->bases, bases, options->segment_count * sizeof *bases);
    input_init(compact, &compact->input);
    input_init(compact, &compact->scan_input);
    compact->output.directory = compact->directory;
    compact->output.index_interval_bytes = options->index_interval_bytes;
    compact->first_dirty_number = find_segment(compact, options->first_dirty_offset);
    compact->mapped_end = options->first_dirty_offset;
    compact->figures.to_clean_count = options->to_clean_count;
    if (mqd_key_map_open(&compact->map, options->map_bytes, options->map_load_percent, NULL) < 0 ||
        mqd_compact_load_producers(compact, options->snapshot_offset) < 0 || begin_map(compact) < 0) {
        mqd_compact_close(compact);
        return NULL;
    }
    return compact;
}

void mqd_compact_close(struct mqd_compact *compact)
{
    if (!compact)
        return;
    mqd_compact_output_end(&compact->output, true);
    mqd_compact_input_end(&compact->input);
    mqd_compact_input_end(&compact->scan_input);
    mqd_key_map_close(&compact->map);
    mqd_id_map_free(&compact->ongoing);
    mqd_id_map_free(&compact->producers_with_data);
    mqd_id_map_free(&compact->last_batch);
    mqd_id_map_free(&compact->last_epoch);
    free(compact->input.buffer);
    free(compact->scan_input.buffer);
    free(compact->output.pending.bytes);
    free(compact->output.index_bytes.bytes);
    free(compact->output.time_index_bytes.bytes);
    free(compact->output.transaction_bytes.bytes);
    free(compact->output.transaction_checksums.bytes);
    free(compact->scratch.bytes);
    free(compact->aborted.entries);
    free(compact->dropped_markers);
    free(compact->runs);
    free(compact->bases);
    free(compact->directory);
    free(compact);
}

void mqd_compact_read_figures(const struct mqd_compact *compact, struct mqd_compact_figures *out)
{
    *out = compact->figures;
    out->read_bytes = compact->input.read_bytes + compact->scan_input.read_bytes;
    out->mapped_keys = (int64_t)compact->map.count;
    out->mapped_end = compact->mapped_end;
    out->map_full = compact->map_full;
}

/* ---- scan: finds aborted transactions ---- */

int mqd_compact_scan_begin(struct mqd_compact *compact)
{
    compact->phase = MQD_PHASE_SCAN;
    return mqd_compact_input_begin(&compact->scan_input, compact->first_dirty_number, compact->options.segment_count);
}

/* Returns 0 for an abort, 1 for a commit, -1 for another control record, or -2 (with mqd_error set)
 * if it cannot be read. */
static int marker_type(struct mqd_compact_input *input, const struct mqd_batch *batch)
{
    struct mqd_records records;
    struct mqd_record record;
    const uint8_t *bytes = mqd_compact_input_bytes(input, batch);
    if (!bytes)
        return -2;
    mqd_records_begin(&records, batch, bytes + MQD_BATCH_HEADER_BYTES,
                      (uint64_t)batch->size_bytes - MQD_BATCH_HEADER_BYTES);
    int result = batch->attributes & MQD_ATTRIBUTE_COMPRESSION ? 0 : mqd_records_next(&records, &record);
    if (result < 0) {
        mqd_compact_report_corrupt(input, batch, records.reason);
        return -2;
    }
    if (result == 0 || record.key_bytes < 4 || record.key[2] != 0 || record.key[3] > 1)
        return -1;
    return record.key[3];
}

static int scan_batch(struct mqd_compact *compact, const struct mqd_batch *batch, int64_t clean_end)
{
    int64_t first_offset;
    if (batch->producer_id < 0)
        return 0;
    if (!(batch->attributes & MQD_ATTRIBUTE_CONTROL)) {
        /* an emptied batch (no records) belongs to a transaction that has ended */
        bool begins = (batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL) && batch->record_count > 0 &&
                      batch->base_offset < clean_end &&
                      !mqd_id_map_get(&compact->ongoing, batch->producer_id, &first_offset);
        return begins ? mqd_id_map_put(&compact->ongoing, batch->producer_id, batch->base_offset) : 0;
    }
    if (!mqd_id_map_get(&compact->ongoing, batch->producer_id, &first_offset))
        return 0;
    int type = marker_type(&compact->scan_input, batch);
    if (type < 0)
        return type == -1 ? 0 : -1;
    mqd_id_map_remove(&compact->ongoing, batch->producer_id);
    return type == 0 ? mqd_aborted_add(&compact->aborted, &(struct mqd_aborted){.producer_id = batch->producer_id,
                                                                                .first_offset = first_offset,
                                                                                .last_offset = batch->base_offset})
                     : 0;
}

static int by_producer(const void *a, const void *b)
{
    const struct mqd_aborted *left = a, *right = b;
    if (left->producer_id != right->producer_id)
        return left->producer_id < right->producer_id ? -1 : 1;
    return (left->first_offset > right->first_offset) - (left->first_offset < right->first_offset);
}

static int64_t clean_end_of(const struct mqd_compact *compact)
{
    uint32_t count = compact->options.to_clean_count;
    return count < compact->options.segment_count ? compact->bases[count] : INT64_MAX;
}

int mqd_compact_scan_step(struct mqd_compact *compact)
{
    struct mqd_batch batch;
    int64_t clean_end = clean_end_of(compact);
    int more = mqd_compact_input_next(&compact->scan_input, &batch);
    if (more < 0)
        return -1;
    bool in_range = more && (batch.base_offset < clean_end || compact->ongoing.count > 0);
    if (in_range)
        return scan_batch(compact, &batch, clean_end) < 0 ? -1 : 1;
    if (compact->ongoing.count > 0)
        return mqd_error_set(MQD_E_STALE, "%s: a transaction in the segments to compact has no end yet",
                             compact->directory);
    mqd_compact_input_end(&compact->scan_input);
    if (compact->aborted.count)
        qsort(compact->aborted.entries, compact->aborted.count, sizeof *compact->aborted.entries, by_producer);
    compact->scanned = true;
    return 0;
}

bool mqd_compact_is_aborted(const struct mqd_compact *compact, const struct mqd_batch *batch)
{
    if (!(batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL) || batch->producer_id < 0)
        return false;
    struct mqd_aborted key = {.producer_id = batch->producer_id, .first_offset = batch->base_offset};
    uint32_t low = 0, high = compact->aborted.count;
    while (low < high) { /* finds the last entry that is not after `key` */
        uint32_t middle = low + (high - low) / 2;
        if (by_producer(&compact->aborted.entries[middle], &key) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    const struct mqd_aborted *transaction = low ? &compact->aborted.entries[low - 1] : NULL;
    return transaction && transaction->producer_id == batch->producer_id &&
           batch->base_offset < transaction->last_offset;
}

/* ---- map: the last offset of each key ---- */

static int finish_map(struct mqd_compact *compact)
{
    mqd_compact_input_end(&compact->input);
    compact->phase = MQD_PHASE_MAPPED;
    return MQD_COMPACT_DONE;
}

/* Called when the table is full at this offset, which is in the segment being read. If there are
 * earlier dirty segments, cleaning ends before this segment; otherwise this segment is cleaned up
 * to the offset. */
static int on_map_full(struct mqd_compact *compact, int64_t offset)
{
    uint32_t number = compact->input.number;
    compact->map_full = true;
    if (number > compact->first_dirty_number) {
        compact->figures.to_clean_count = number;
        compact->mapped_end = compact->bases[number];
    } else {
        compact->figures.to_clean_count = number + 1;
        compact->mapped_end = offset;
    }
    if (compact->mapped_end <= compact->options.first_dirty_offset)
        return mqd_error_set(MQD_E_FULL,
                             "%s: the key table has no room for even one key; raise log.cleaner.dedupe.buffer.size",
                             compact->directory);
    return finish_map(compact);
}

static int map_records(struct mqd_compact *compact, const uint8_t *bytes, uint64_t size_bytes)
{
    const struct mqd_batch *batch = &compact->batch;
    struct mqd_records records;
    struct mqd_record record;
    int more;
    mqd_records_begin(&records, batch, bytes, size_bytes);
    while ((more = mqd_records_next(&records, &record)) == 1) {
        int64_t offset = batch->base_offset + record.offset_delta;
        if (record.key_bytes < 0 || offset < compact->options.first_dirty_offset)
            continue;
        if (!mqd_key_map_put(&compact->map, record.key, (uint32_t)record.key_bytes, offset))
            return on_map_full(compact, offset);
    }
    if (more < 0)
        return mqd_compact_report_corrupt(&compact->input, batch, records.reason);
    compact->mapped_end = mqd_batch_end_offset(batch);
    return MQD_COMPACT_MORE;
}

/* Handles the current batch. A transactional batch waits until the scan has found the aborted
 * transactions. */
static int map_batch(struct mqd_compact *compact)
{
    const struct mqd_batch *batch = &compact->batch;
    if ((batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL) && !compact->scanned)
        return mqd_compact_scan_begin(compact) < 0 ? -1 : MQD_COMPACT_MORE;
    if (batch->attributes & MQD_ATTRIBUTE_CONTROL || mqd_compact_is_aborted(compact, batch) || batch->record_count == 0)
        return MQD_COMPACT_MORE;
    const uint8_t *bytes = mqd_compact_input_bytes(&compact->input, batch);
    if (!bytes)
        return -1;
    compact->bytes = bytes;
    if (batch->attributes & MQD_ATTRIBUTE_COMPRESSION)
        return MQD_COMPACT_DECOMPRESS;
    return map_records(compact, bytes + MQD_BATCH_HEADER_BYTES, (uint64_t)batch->size_bytes - MQD_BATCH_HEADER_BYTES);
}

static int map_step(struct mqd_compact *compact)
{
    int more = mqd_compact_input_next(&compact->input, &compact->batch);
    if (more < 0)
        return -1;
    if (more == 0) {
        if (clean_end_of(compact) != INT64_MAX)
            compact->mapped_end = clean_end_of(compact);
        return finish_map(compact);
    }
    const struct mqd_batch *batch = &compact->batch;
    if (mqd_compact_note_producer(compact, batch) < 0)
        return -1;
    return mqd_batch_end_offset(batch) > compact->options.first_dirty_offset ? map_batch(compact) : MQD_COMPACT_MORE;
}

/* ---- steps ---- */

static int one_step(struct mqd_compact *compact)
{
    int more;
    switch (compact->phase) {
    case MQD_PHASE_MAP:
        return map_step(compact);
    case MQD_PHASE_SCAN:
        more = mqd_compact_scan_step(compact);
        if (more != 0)
            return more < 0 ? -1 : MQD_COMPACT_MORE;
        compact->phase = MQD_PHASE_MAP;
        return map_batch(compact); /* the batch that had to wait */
    case MQD_PHASE_COPY:
        return mqd_compact_copy_step(compact);
    default:
        return MQD_COMPACT_DONE;
    }
}

/* The bytes read and written so far. */
static uint64_t moved_bytes(const struct mqd_compact *compact)
{
    return (uint64_t)(compact->input.read_bytes + compact->scan_input.read_bytes + compact->figures.written_bytes);
}

/* Fills `result`: the bytes that this call read and wrote, and what the caller must decompress or
 * compress. */
static int report(struct mqd_compact *compact, int state, uint64_t before, struct mqd_compact_step_result *result)
{
    *result = (struct mqd_compact_step_result){.done_bytes = moved_bytes(compact) - before};
    compact->pending_conversion = state == MQD_COMPACT_DECOMPRESS || state == MQD_COMPACT_COMPRESS ? state : 0;
    if (compact->pending_conversion) {
        result->codec = (uint32_t)(compact->batch.attributes & MQD_ATTRIBUTE_COMPRESSION);
        result->bytes =
            state == MQD_COMPACT_DECOMPRESS ? compact->bytes + MQD_BATCH_HEADER_BYTES : compact->scratch.bytes;
        result->size_bytes = state == MQD_COMPACT_DECOMPRESS
                                 ? (uint64_t)compact->batch.size_bytes - MQD_BATCH_HEADER_BYTES
                                 : compact->scratch.size_bytes;
    }
    return state;
}

int mqd_compact_step(struct mqd_compact *compact, uint64_t bytes_max, struct mqd_compact_step_result *result)
{
    uint64_t before = moved_bytes(compact);
    int state = MQD_COMPACT_MORE;
    if (compact->pending_conversion)
        return mqd_error_set_static(MQD_E_INVALID, "mqd_compact_resume must be called before the next step");
    while (state == MQD_COMPACT_MORE && moved_bytes(compact) - before < bytes_max)
        state = one_step(compact);
    return report(compact, state, before, result);
}

int mqd_compact_resume(struct mqd_compact *compact, const uint8_t *bytes, uint64_t size_bytes,
                       struct mqd_compact_step_result *result)
{
    uint64_t before = moved_bytes(compact);
    int conversion = compact->pending_conversion, state;
    if (!conversion)
        return mqd_error_set_static(MQD_E_INVALID, "no step is waiting for these bytes");
    if (compact->phase == MQD_PHASE_MAP)
        state = map_records(compact, bytes, size_bytes);
    else if (conversion == MQD_COMPACT_DECOMPRESS)
        state = mqd_compact_copy_records(compact, bytes, size_bytes);
    else
        state = mqd_compact_copy_compressed(compact, bytes, size_bytes);
    return report(compact, state, before, result);
}
