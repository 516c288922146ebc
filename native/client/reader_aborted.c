/* The batches that read_committed skips: those of aborted transactions. See client/reader_state.h.
 *
 * The broker reports the aborted transactions of a range (producer id, first offset). A transaction
 * extends from its first offset to its producer's ABORT marker; the producer's transactional
 * batches between them are skipped. A producer has one transaction at a time, so its id is
 * sufficient. Source: KIP-98 ("Reading committed messages").
 */
#include "client/reader_state.h"

#include <errno.h>
#include <stdlib.h>

#include "base/error.h"
#include "log/producers.h"
#include "wire/record_scan.h"

static int by_first_offset(const void *left, const void *right)
{
    const struct mqd_aborted_entry *a = left, *b = right;
    return a->first_offset < b->first_offset ? -1 : a->first_offset > b->first_offset;
}

int mqd_aborted_filter_set(struct mqd_aborted_filter *filter, const int64_t *producer_ids, const int64_t *first_offsets,
                           uint32_t count, int64_t until_offset)
{
    struct mqd_aborted_entry *entries = malloc(count ? count * sizeof *entries : 1);
    int64_t *open_producers = malloc(count ? count * sizeof *open_producers : 1);
    if (!entries || !open_producers) {
        free(entries);
        free(open_producers);
        return mqd_error_set_static(ENOMEM, "out of memory for the aborted transactions");
    }
    for (uint32_t i = 0; i < count; i++)
        entries[i] = (struct mqd_aborted_entry){producer_ids[i], first_offsets[i]};
    qsort(entries, count, sizeof *entries, by_first_offset);
    mqd_aborted_filter_free(filter);
    *filter = (struct mqd_aborted_filter){
        .entries = entries, .count = count, .open_producers = open_producers, .until_offset = until_offset};
    return 0;
}

void mqd_aborted_filter_free(struct mqd_aborted_filter *filter)
{
    free(filter->entries);
    free(filter->open_producers);
    *filter = (struct mqd_aborted_filter){.until_offset = filter->until_offset};
}

static uint32_t find_open(const struct mqd_aborted_filter *filter, int64_t producer_id)
{
    uint32_t i = 0;
    while (i < filter->open_count && filter->open_producers[i] != producer_id)
        i++;
    return i;
}

enum mqd_aborted_verdict mqd_aborted_filter_classify(struct mqd_aborted_filter *filter, const struct mqd_batch *batch,
                                                     const uint8_t *bytes)
{
    if (!(batch->attributes & MQD_ATTRIBUTE_TRANSACTIONAL))
        return MQD_BATCH_READ;
    bool is_control = batch->attributes & MQD_ATTRIBUTE_CONTROL;
    if (!is_control && batch->base_offset >= filter->until_offset)
        return MQD_BATCH_NEEDS_LIST;
    for (; filter->next < filter->count &&
           filter->entries[filter->next].first_offset <= batch->base_offset + batch->last_offset_delta;
         filter->next++)
        if (find_open(filter, filter->entries[filter->next].producer_id) == filter->open_count)
            filter->open_producers[filter->open_count++] = filter->entries[filter->next].producer_id;
    if (filter->open_count == 0)
        return MQD_BATCH_READ;
    uint32_t at = find_open(filter, batch->producer_id);
    if (at == filter->open_count)
        return MQD_BATCH_READ;
    struct mqd_marker marker;
    if (!is_control)
        return MQD_BATCH_SKIP;
    if (mqd_marker_parse(bytes, batch, &marker) == 0 && !marker.commit)
        filter->open_producers[at] = filter->open_producers[--filter->open_count];
    return MQD_BATCH_READ;
}
