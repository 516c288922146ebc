/* Lookups of the reader: from an offset to a byte range. See log/reader/reader.h; files and
 * descriptors are in log/reader/files.c.
 *
 * A segment may be read up to its limit: the high watermark's position in the high watermark's
 * segment, the file's size in earlier ones.
 *
 *   locate  the batch that holds an offset: by the cursor, at no cost; otherwise by the segment
 *           list, the last index entry at or before the offset, and a walk over batch headers from
 *           there
 *   range   where to stop: the limit, else the last index entry within size_bytes_max, else the
 *           last batch that fits, found by a walk
 *
 *   F1  every range begins and ends at a batch boundary at or below the segment's limit. (An end
 *       taken from an index entry is not verified; if it is wrong, the client gets a truncated last
 *       batch, which it drops, and the cursor does not match the client's next offset.)
 *   F2  for the beginning of a lookup the index is a hint: an entry that does not point to a batch
 *       with its offset is skipped, and the previous entry or, failing that, the segment's
 *       beginning is used.
 */
#include <endian.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"
#include "log/reader/files.h"

#define INDEX_ENTRY_BYTES 8
#define HEADER_READ_BYTES 4096 /* first read of a walk; later ones read a whole chunk when batches are small */

/* a batch boundary in an open segment */
struct location {
    struct mqd_segment_ref *segment;
    uint32_t number; /* in slot->segments */
    uint32_t position;
    uint32_t limit;
    uint32_t index_hint;
};

struct entry {
    uint32_t relative_offset, position;
    uint32_t index_position; /* of the entry itself, in the .index */
};

int mqd_segment_ref_fd(const struct mqd_segment_ref *segment)
{
    return segment->fd;
}

uint64_t mqd_segment_ref_serial(const struct mqd_segment_ref *segment)
{
    return segment->serial;
}

void mqd_range_move_cursor(const struct mqd_range *range, uint32_t position, int64_t offset, struct mqd_cursor *cursor)
{
    cursor->segment = range->segment->base_offset;
    cursor->inode = range->segment->inode;
    cursor->position = position;
    cursor->offset = offset;
    cursor->index_hint = 0;
}

void mqd_range_release(struct mqd_reader *reader, struct mqd_range *range)
{
    if (!range->segment)
        return;
    mqd_reader_unreference(reader, range->segment);
    range->segment = NULL;
    range->size_bytes = 0;
}

/* ---- the index ---- */

static struct entry entry_at(const struct mqd_reader *reader, uint32_t number, uint32_t chunk_position)
{
    const uint8_t *bytes = reader->index_chunk + number * INDEX_ENTRY_BYTES;
    uint32_t words[2];
    memcpy(words, bytes, sizeof words);
    return (struct entry){.relative_offset = be32toh(words[0]),
                          .position = be32toh(words[1]),
                          .index_position = chunk_position + number * INDEX_ENTRY_BYTES};
}

/* Reads whole entries into the chunk, starting at this position of the .index. Returns their
 * number; 0 at the end. An unreadable index is treated as empty: the reader then walks the log,
 * which is slower. */
static uint32_t index_read(struct mqd_reader *reader, int fd, uint32_t index_position, uint32_t size_bytes)
{
    ssize_t n = pread(fd, reader->index_chunk, size_bytes, index_position);
    return n > 0 ? (uint32_t)n / INDEX_ENTRY_BYTES : 0;
}

/* Offsets and positions increase together, so the entries below both bounds are a prefix of the
 * file. Position 0 means that there is no entry: the first batch has none. */
static bool entry_below(struct entry entry, uint32_t relative_offset_max, uint32_t position_max)
{
    return entry.relative_offset <= relative_offset_max && entry.position <= position_max && entry.position > 0;
}

/* How many of the `count` entries in the chunk are below the bounds. */
static uint32_t count_below(const struct mqd_reader *reader, uint32_t count, uint32_t relative_offset_max,
                            uint32_t position_max)
{
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (entry_below(entry_at(reader, middle, 0), relative_offset_max, position_max))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Finds the last entry below both bounds; returns false if there is none. Reads once if the entry
 * is in the 4 KiB that begin at `hint` (2 to 16 MiB of log), otherwise bisects the index by 4 KiB
 * pages. */
static bool find_last_entry(struct mqd_reader *reader, struct mqd_segment_ref *segment, uint32_t hint,
                            uint32_t relative_offset_max, uint32_t position_max, struct entry *out)
{
    const uint32_t chunk_entries = MQD_READER_INDEX_CHUNK_BYTES / INDEX_ENTRY_BYTES;
    int fd = mqd_reader_open_index(reader, segment);
    if (fd < 0)
        return false;
    uint32_t count = index_read(reader, fd, hint, MQD_READER_INDEX_CHUNK_BYTES);
    uint32_t below = count_below(reader, count, relative_offset_max, position_max);
    if ((below > 0 && below < chunk_entries) || (below == 0 && hint == 0)) {
        if (below > 0)
            *out = entry_at(reader, below - 1, hint);
        return below > 0;
    }
    off_t size_bytes = lseek(fd, 0, SEEK_END);
    uint32_t low = 0,
             high = size_bytes > 0
                        ? (uint32_t)((size_bytes + MQD_READER_INDEX_CHUNK_BYTES - 1) / MQD_READER_INDEX_CHUNK_BYTES)
                        : 0;
    while (low < high) { /* the pages before `low` begin below the bounds; page `high` and later ones do not */
        uint32_t middle = low + (high - low) / 2;
        if (index_read(reader, fd, middle * MQD_READER_INDEX_CHUNK_BYTES, INDEX_ENTRY_BYTES) &&
            entry_below(entry_at(reader, 0, 0), relative_offset_max, position_max))
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0)
        return false;
    uint32_t page = (low - 1) * MQD_READER_INDEX_CHUNK_BYTES;
    below = count_below(reader, index_read(reader, fd, page, MQD_READER_INDEX_CHUNK_BYTES), relative_offset_max,
                        position_max);
    if (below > 0)
        *out = entry_at(reader, below - 1, page);
    return below > 0;
}

/* Replaces *entry with the one before it; returns false if there is none. */
static bool find_previous_entry(struct mqd_reader *reader, struct mqd_segment_ref *segment, struct entry *entry)
{
    if (entry->index_position < INDEX_ENTRY_BYTES ||
        !index_read(reader, segment->index_fd, entry->index_position - INDEX_ENTRY_BYTES, INDEX_ENTRY_BYTES))
        return false;
    *entry = entry_at(reader, 0, entry->index_position - INDEX_ENTRY_BYTES);
    return true;
}

/* ---- walking batch headers ---- */

static int16_t report_corrupt(const struct mqd_segment_ref *segment, uint32_t position, const char *why)
{
    mqd_error_set(MQD_E_CORRUPT,
                  "%s/%020lld.log: at position %u: %s; the records before it are still readable; "
                  "`mqd log verify` shows the extent of the damage",
                  segment->slot->path, (long long)segment->base_offset, position, why);
    return MQD_CORRUPT_MESSAGE;
}

static int16_t report_unreadable(const struct mqd_segment_ref *segment, uint32_t position, ssize_t got)
{
    if (got < 0)
        mqd_error_system(errno, "cannot read %s/%020lld.log at position %u", segment->slot->path,
                         (long long)segment->base_offset, position);
    else
        mqd_error_set(EIO,
                      "%s/%020lld.log ends before position %u, which was published as written; "
                      "another program has truncated it; restart the broker for recovery",
                      segment->slot->path, (long long)segment->base_offset, position);
    return MQD_KAFKA_STORAGE_ERROR;
}

/* Decodes the batch header at `position`, which must belong to a whole batch below `limit`. Reads
 * in chunks when batches are small. */
static int16_t header_at(struct mqd_reader *reader, struct mqd_segment_ref *segment, uint32_t position, uint32_t limit,
                         struct mqd_batch *out)
{
    if (limit - position < MQD_BATCH_HEADER_BYTES)
        return report_corrupt(segment, position, "too few bytes for a batch header");
    int64_t chunk_end = reader->chunk_position + reader->chunk_bytes;
    if (position < reader->chunk_position || position + MQD_BATCH_HEADER_BYTES > chunk_end) {
        uint32_t size_bytes =
            reader->chunk_bytes > 0 && position <= chunk_end ? MQD_READER_CHUNK_BYTES : HEADER_READ_BYTES;
        if (size_bytes > limit - position)
            size_bytes = limit - position;
        ssize_t n = pread(segment->fd, reader->chunk, size_bytes, position);
        reader->chunk_position = position;
        reader->chunk_bytes = n > 0 ? (uint32_t)n : 0;
        if (n < MQD_BATCH_HEADER_BYTES)
            return report_unreadable(segment, position, n);
    }
    if (mqd_batch_decode(reader->chunk + (position - reader->chunk_position), MQD_BATCH_HEADER_BYTES, out))
        return report_corrupt(segment, position, mqd_error_message());
    if ((uint32_t)out->size_bytes > limit - position)
        return report_corrupt(segment, position, "a batch longer than the readable part of its segment");
    return 0;
}

/* Walks from *position to the batch that ends above `offset`. next_offset: the lowest base offset
 * that is valid at *position. Returns 0 with *found false if all batches end before `offset`. */
static int16_t walk_to(struct mqd_reader *reader, struct mqd_segment_ref *segment, uint32_t *position, uint32_t limit,
                       int64_t next_offset, int64_t offset, bool *found)
{
    struct mqd_batch batch;
    *found = false;
    while (*position < limit) {
        int16_t code = header_at(reader, segment, *position, limit, &batch);
        if (code)
            return code;
        if (batch.base_offset < next_offset)
            return report_corrupt(segment, *position, "a batch's base offset is below the end of the batch before");
        next_offset = batch.base_offset + batch.last_offset_delta + 1;
        if (next_offset > offset) {
            *found = true;
            return 0;
        }
        *position += (uint32_t)batch.size_bytes;
    }
    return 0;
}

/* ---- locate ---- */

static int16_t limit_of(struct mqd_reader_slot *slot, const struct mqd_positions *positions, uint32_t number,
                        uint32_t *limit)
{
    if (slot->segments[number].base_offset == positions->high_watermark_segment) {
        *limit = positions->high_watermark_position;
        return 0;
    }
    int64_t size_bytes = mqd_reader_sealed_bytes(slot, number);
    if (size_bytes < 0)
        return mqd_error_code() == ENOENT
                   ? mqd_reader_report_missing(slot, "the segment's .log", slot->segments[number].base_offset)
                   : MQD_KAFKA_STORAGE_ERROR;
    *limit = size_bytes > UINT32_MAX ? UINT32_MAX : (uint32_t)size_bytes;
    return 0;
}

/* Whether the entry points to a batch with the entry's offset. */
static bool entry_is_exact(struct mqd_reader *reader, struct mqd_segment_ref *segment, struct entry entry,
                           uint32_t limit)
{
    struct mqd_batch batch;
    return entry.position < limit && header_at(reader, segment, entry.position, limit, &batch) == 0 &&
           batch.base_offset == segment->base_offset + entry.relative_offset;
}

/* Searches one segment for `offset`. *found is false if all its batches end before `offset`. */
static int16_t seek(struct mqd_reader *reader, struct location *location, int64_t offset, bool *found)
{
    struct mqd_segment_ref *segment = location->segment;
    int64_t relative_offset = offset - segment->base_offset;
    struct entry entry;
    location->position = location->index_hint = 0;
    reader->chunk_bytes = 0;
    if (relative_offset < 0) {
        /* the offset is in a gap before this segment: the segment's first batch is the next one */
        *found = location->limit > 0;
        return 0;
    }
    bool indexed =
        find_last_entry(reader, segment, 0, relative_offset > UINT32_MAX ? UINT32_MAX : (uint32_t)relative_offset,
                        location->limit - 1, &entry);
    if (indexed && !entry_is_exact(reader, segment, entry, location->limit))
        indexed =
            find_previous_entry(reader, segment, &entry) && entry_is_exact(reader, segment, entry, location->limit);
    if (indexed) {
        location->position = entry.position;
        location->index_hint = entry.index_position;
    }
    return walk_to(reader, segment, &location->position, location->limit,
                   segment->base_offset + (indexed ? entry.relative_offset : 0), offset, found);
}

/* Ensures that the slot's list holds the high watermark's segment; *last is its index. */
static int16_t list_segments(struct mqd_reader *reader, struct mqd_reader_slot *slot,
                             const struct mqd_positions *positions, uint64_t generation, uint32_t *last)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        if (!slot->listed || slot->generation != generation || attempt > 0) {
            int16_t code = mqd_reader_list(reader, slot, generation);
            if (code)
                return code;
        }
        int32_t number = mqd_reader_segment_at(slot, positions->high_watermark_segment);
        if (number >= 0 && slot->segments[number].base_offset == positions->high_watermark_segment) {
            *last = (uint32_t)number;
            return 0;
        }
    }
    return mqd_reader_report_missing(slot, "the segment of the high watermark", positions->high_watermark_segment);
}

static int16_t open_location(struct mqd_reader *reader, struct mqd_reader_slot *slot,
                             const struct mqd_positions *positions, uint32_t number, struct location *location)
{
    location->number = number;
    int16_t code = mqd_reader_open(reader, slot, number, &location->segment);
    return code ? code : limit_of(slot, positions, number, &location->limit);
}

/* location->segment is NULL when no batch below the high watermark ends above `offset`: compaction
 * left a gap there, which extends to the next batch that is written. */
static int16_t locate(struct mqd_reader *reader, struct mqd_reader_slot *slot, const struct mqd_positions *positions,
                      uint64_t generation, int64_t offset, const struct mqd_cursor *cursor, struct location *location)
{
    uint32_t last = 0;
    bool found = false;
    int16_t code = list_segments(reader, slot, positions, generation, &last);
    if (code)
        return code;
    reader->chunk_bytes = 0; /* the chunk is from another file, or from this one before it grew */
    if (cursor->valid && cursor->generation == generation && cursor->offset == offset) {
        int32_t number = mqd_reader_segment_at(slot, cursor->segment);
        if (number >= 0 && (uint32_t)number <= last && slot->segments[number].base_offset == cursor->segment) {
            code = open_location(reader, slot, positions, (uint32_t)number, location);
            if (code)
                return code;
            location->position = cursor->position;
            location->index_hint = cursor->index_hint;
            if (location->position < location->limit &&
                (location->position == 0 || cursor->inode == location->segment->inode))
                return 0;
        }
    }
    int32_t first = mqd_reader_segment_at(slot, offset);
    /* where compaction left a gap, the search continues in the next segment */
    for (uint32_t number = first < 0 ? 0 : (uint32_t)first; number <= last && !found; number++) {
        code = open_location(reader, slot, positions, number, location);
        if (code)
            return code;
        if (location->limit > 0 && (code = seek(reader, location, offset, &found)))
            return code;
    }
    if (!found)
        location->segment = NULL;
    return 0;
}

/* ---- range ---- */

/* Used when the index has no boundary within `requested_limit`: walks to the last batch boundary at
 * or below it; with min_one_batch, at least to the end of the first batch. */
static int16_t walk_range(struct mqd_reader *reader, const struct location *location, uint64_t requested_limit,
                          bool min_one_batch, struct mqd_cursor *end)
{
    struct mqd_batch batch;
    uint32_t position = location->position;
    while (position < location->limit) {
        int16_t code = header_at(reader, location->segment, position, location->limit, &batch);
        if (code)
            return position > location->position ? 0 : code; /* whole batches before the damage can still be read */
        if ((uint64_t)position + (uint32_t)batch.size_bytes > requested_limit &&
            !(min_one_batch && position == location->position))
            return 0;
        position += (uint32_t)batch.size_bytes;
        end->position = position;
        end->offset = batch.base_offset + batch.last_offset_delta + 1;
    }
    return 0;
}

/* Sets *end to the end of the range that begins at `location`. */
static int16_t range_end(struct mqd_reader *reader, const struct mqd_reader_slot *slot,
                         const struct mqd_positions *positions, const struct location *location,
                         uint32_t size_bytes_max, bool min_one_batch, struct mqd_cursor *end)
{
    uint64_t requested_limit = (uint64_t)location->position + size_bytes_max;
    struct entry entry;
    if (location->limit <= requested_limit) {
        end->position = location->limit;
        end->offset = positions->high_watermark;
    } else if (size_bytes_max >= MQD_BATCH_HEADER_BYTES &&
               find_last_entry(reader, location->segment, location->index_hint, UINT32_MAX,
                               requested_limit > UINT32_MAX ? UINT32_MAX : (uint32_t)requested_limit, &entry) &&
               entry.position > location->position &&
               location->segment->base_offset + entry.relative_offset > end->offset) {
        end->position = entry.position;
        end->offset = location->segment->base_offset + entry.relative_offset;
        end->index_hint = entry.index_position;
    } else if (size_bytes_max >= MQD_BATCH_HEADER_BYTES || min_one_batch) {
        int16_t code = walk_range(reader, location, requested_limit, min_one_batch, end);
        if (code)
            return code;
    }
    bool sealed = location->segment->base_offset != positions->high_watermark_segment;
    /* continue with the next segment; its base follows the last record, except for gaps */
    if (sealed && end->position == location->limit) {
        end->segment = end->offset = slot->segments[location->number + 1].base_offset;
        end->position = end->index_hint = 0;
    }
    return 0;
}

int16_t mqd_reader_find(struct mqd_reader *reader, uint32_t slot_number, const struct mqd_positions *positions,
                        uint64_t segments_generation, int64_t offset, uint32_t size_bytes_max, bool min_one_batch,
                        struct mqd_cursor *cursor, struct mqd_range *out)
{
    struct mqd_reader_slot *slot = slot_number < MQD_PARTITION_SLOT_COUNT ? reader->slots[slot_number] : NULL;
    struct location location;
    *out = (struct mqd_range){0};
    if (!slot) {
        mqd_error_set(MQD_E_INVALID, "partition slot %u has no directory here yet; retry when its topic is known",
                      slot_number);
        return MQD_UNKNOWN_TOPIC_OR_PARTITION;
    }
    if (offset < positions->log_start_offset ||
        (offset > positions->high_watermark && offset > positions->log_end_offset)) {
        mqd_error_set(MQD_E_INVALID,
                      "offset %lld is outside the log's range %lld..%lld; seek to one of its ends (auto.offset.reset)",
                      (long long)offset, (long long)positions->log_start_offset, (long long)positions->log_end_offset);
        return MQD_OFFSET_OUT_OF_RANGE;
    }
    if (offset >= positions->high_watermark)
        return 0;
    int16_t code = locate(reader, slot, positions, segments_generation, offset, cursor, &location);
    if (code || !location.segment)
        return code;
    struct mqd_cursor end = {.offset = offset,
                             .segment = location.segment->base_offset,
                             .position = location.position,
                             .index_hint = location.index_hint,
                             .valid = true,
                             .generation = segments_generation,
                             .inode = location.segment->inode};
    code = range_end(reader, slot, positions, &location, size_bytes_max, min_one_batch, &end);
    if (code)
        return code;
    uint32_t end_position = end.segment == location.segment->base_offset ? end.position : location.limit;
    *cursor = end;
    if (end_position == location.position)
        return 0;
    *out = (struct mqd_range){
        .segment = location.segment, .position = location.position, .size_bytes = end_position - location.position};
    location.segment->references++;
    return 0;
}

int16_t mqd_reader_limit_positions(struct mqd_reader *reader, uint32_t slot_number, uint64_t segments_generation,
                                   int64_t end_offset, struct mqd_positions *positions)
{
    struct mqd_reader_slot *slot = slot_number < MQD_PARTITION_SLOT_COUNT ? reader->slots[slot_number] : NULL;
    struct mqd_cursor none = {.valid = false};
    struct location location;
    if (end_offset >= positions->high_watermark)
        return 0;
    if (!slot) {
        mqd_error_set(MQD_E_INVALID, "partition slot %u has no directory here yet; retry when its topic is known",
                      slot_number);
        return MQD_UNKNOWN_TOPIC_OR_PARTITION;
    }
    if (!slot->has_limit || slot->limit_offset != end_offset || slot->limit_generation != segments_generation) {
        int16_t code = locate(reader, slot, positions, segments_generation, end_offset, &none, &location);
        if (code)
            return code;
        if (!location.segment) { /* there is no batch between the offset and the high watermark yet */
            positions->high_watermark = end_offset;
            return 0;
        }
        slot->has_limit = true;
        slot->limit_offset = end_offset;
        slot->limit_generation = segments_generation;
        slot->limit_segment = location.segment->base_offset;
        slot->limit_position = location.position;
    }
    positions->high_watermark = end_offset;
    positions->high_watermark_segment = slot->limit_segment;
    positions->high_watermark_position = slot->limit_position;
    return 0;
}

uint64_t mqd_reader_available_bytes(struct mqd_reader *reader, uint32_t slot_number,
                                    const struct mqd_positions *positions, int64_t offset, struct mqd_cursor *cursor)
{
    struct mqd_reader_slot *slot = slot_number < MQD_PARTITION_SLOT_COUNT ? reader->slots[slot_number] : NULL;
    struct location location;
    if (offset >= positions->high_watermark)
        return 0;
    /* Uses the generation of the last listing: if it is not the current one, mqd_reader_find lists
     * the directory again and ignores the cursor. */
    if (!slot || !slot->listed || offset < positions->log_start_offset ||
        locate(reader, slot, positions, slot->generation, offset, cursor, &location))
        return UINT64_MAX;
    if (!location.segment)
        return 0;
    *cursor = (struct mqd_cursor){.offset = offset,
                                  .segment = location.segment->base_offset,
                                  .position = location.position,
                                  .index_hint = location.index_hint,
                                  .valid = true,
                                  .generation = slot->generation,
                                  .inode = location.segment->inode};
    uint64_t bytes = location.limit - location.position;
    for (uint32_t number = location.number;
         slot->segments[number].base_offset != positions->high_watermark_segment && bytes < INT32_MAX;) {
        uint32_t limit = 0;
        number++;
        if (number >= slot->segment_count || limit_of(slot, positions, number, &limit))
            return UINT64_MAX;
        bytes += limit;
    }
    return bytes;
}
