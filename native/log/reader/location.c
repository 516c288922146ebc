/* Finds the place of an offset for clients that read the files themselves: the segment, its
 * readable bytes, the next segment. See log/reader/reader.h. */
#include "base/error.h"
#include "log/reader/files.h"

/* Finds the place of the high watermark itself: the end of the readable bytes, in the newest
 * segment that contains it. */
static int16_t locate_end(struct mqd_reader *reader, struct mqd_reader_slot *slot,
                          const struct mqd_positions *positions, struct mqd_segment_location *out)
{
    int32_t number = mqd_reader_segment_at(slot, positions->high_watermark_segment);
    out->position = positions->high_watermark_position;
    if (number < 0 || slot->segments[number].base_offset != positions->high_watermark_segment)
        return mqd_reader_report_missing(slot, "the segment", positions->high_watermark_segment);
    if ((uint32_t)number + 1 < slot->segment_count &&
        slot->segments[number + 1].base_offset == positions->high_watermark) {
        number++; /* the log was rolled exactly at the high watermark */
        out->position = 0;
    }
    return mqd_reader_open(reader, slot, (uint32_t)number, &out->segment);
}

static int16_t fill_extent(struct mqd_reader_slot *slot, const struct mqd_positions *positions,
                           struct mqd_segment_location *out)
{
    out->base_offset = out->segment->base_offset;
    int32_t number = mqd_reader_segment_at(slot, out->base_offset);
    if (number < 0 || slot->segments[number].base_offset != out->base_offset)
        return mqd_reader_report_missing(slot, "the segment", out->base_offset);
    bool is_last = (uint32_t)number + 1 == slot->segment_count;
    out->next_base_offset = is_last ? INT64_MAX : slot->segments[number + 1].base_offset;
    if (out->base_offset >= positions->high_watermark_segment) {
        if (out->next_base_offset > positions->high_watermark)
            /* rolled, but not readable to its end: a client that mistook readable_bytes for the
             * segment's size would skip records */
            out->next_base_offset = INT64_MAX;
        out->readable_bytes =
            out->base_offset == positions->high_watermark_segment ? positions->high_watermark_position : 0;
        return 0;
    }
    int64_t sealed_bytes = mqd_reader_sealed_bytes(slot, (uint32_t)number);
    if (sealed_bytes < 0 || sealed_bytes > UINT32_MAX)
        return MQD_KAFKA_STORAGE_ERROR;
    out->readable_bytes = (uint32_t)sealed_bytes;
    return 0;
}

int16_t mqd_reader_locate(struct mqd_reader *reader, uint32_t slot_number, const struct mqd_positions *positions,
                          uint64_t segments_generation, int64_t offset, struct mqd_segment_location *out)
{
    struct mqd_cursor cursor = {.valid = false};
    struct mqd_range range;
    *out = (struct mqd_segment_location){0};
    int16_t code =
        mqd_reader_find(reader, slot_number, positions, segments_generation, offset, 1, true, &cursor, &range);
    struct mqd_reader_slot *slot = slot_number < MQD_PARTITION_SLOT_COUNT ? reader->slots[slot_number] : NULL;
    if (code == 0 && (!slot->listed || slot->generation != segments_generation))
        code = mqd_reader_list(reader, slot, segments_generation);
    if (code)
        return code;
    if (!range.size_bytes) {
        code = locate_end(reader, slot, positions, out);
        if (code)
            return code;
        out->segment->references++;
    } else {
        out->segment = range.segment; /* takes over its reference */
        out->position = range.position;
    }
    code = fill_extent(slot, positions, out);
    if (code)
        mqd_reader_unreference(reader, out->segment);
    return code;
}

void mqd_segment_location_release(struct mqd_reader *reader, struct mqd_segment_location *location)
{
    mqd_reader_unreference(reader, location->segment);
}
