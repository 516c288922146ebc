/* Finds the bytes of a segment file for one partition of a fetch, and the aborted transactions that
 * overlap them. See server/fetch/fetch.c. */
#include <stdlib.h>
#include <string.h>

#include "server/reactor.h"

/* if a range overlaps more aborted transactions than this, a shorter range is returned: one batch,
 * or for a view SHORT_VIEW_BYTES of its base topic */
#define ABORTED_COUNT_MAX 4096
#define SHORT_VIEW_BYTES (1u << 20)

void mqd_fetch_ensure_path(struct mqd_reactor *r, const struct mqd_topic *topic, int32_t partition_index, uint32_t slot)
{
    uint8_t log_dir =
        mqd_load_acquire(&mqd_control_partition(r->options.control, slot)->log_dir) % MQD_LOG_DIR_COUNT_MAX;
    if (r->path_log_dir[slot] == log_dir + 1)
        return;
    struct mqd_log_directory *dir = &r->log_dirs[log_dir]; /* the partition may have moved to another directory */
    char *path = NULL;
    if (dir->path &&
        asprintf(&path, "%s/%s-%d", dir->path, topic->view ? topic->view->base : topic->name, partition_index) > 0 &&
        mqd_reader_set_path(r->reader, slot, path) == 0)
        r->path_log_dir[slot] = (uint8_t)(log_dir + 1);
    free(path);
}

static struct mqd_cached_cursor *cached_cursor_of(struct mqd_reactor *r, const struct mqd_fetch_entry *entry,
                                                  int64_t offset)
{
    uint64_t hash = ((uint64_t)(uintptr_t)entry->topic >> 4) * 0x9e3779b97f4a7c15ull +
                    (uint32_t)entry->partition_index * 0xc2b2ae3d27d4eb4full + (uint64_t)offset * 0x165667b19e3779f9ull;
    return &r->cursors[hash >> 54 & (MQD_CURSOR_CACHE_COUNT - 1)];
}

/* Continues at the cached cursor for the entry's position, if the entry has no cursor of its
 * own. */
static void recall_cursor(struct mqd_reactor *r, struct mqd_fetch_entry *entry)
{
    const struct mqd_cached_cursor *cached = cached_cursor_of(r, entry, mqd_fetch_position(entry));
    if (!entry->cursor.valid && cached->cursor.valid && cached->cursor.offset == mqd_fetch_position(entry) &&
        cached->partition_index == entry->partition_index && memcmp(cached->topic_id, entry->topic->topic_id, 16) == 0)
        entry->cursor = cached->cursor;
}

void mqd_fetch_keep_cursor(struct mqd_reactor *r, const struct mqd_fetch_entry *entry)
{
    if (entry->set->session_id || !entry->cursor.valid)
        return; /* a session keeps its cursors in its entries */
    struct mqd_cached_cursor *cached = cached_cursor_of(r, entry, entry->cursor.offset);
    memcpy(cached->topic_id, entry->topic->topic_id, 16);
    cached->partition_index = entry->partition_index;
    cached->cursor = entry->cursor;
}

/* Releases the range and its references. */
void mqd_fetch_entry_release(struct mqd_reactor *r, struct mqd_fetch_entry *entry)
{
    if (entry->range.segment)
        mqd_range_release(r->reader, &entry->range);
    free(entry->aborted.entries);
    entry->aborted = (struct mqd_aborted_list){NULL, 0, 0};
    if (__builtin_expect(entry->filtered.bytes != NULL || entry->filtered.has_empty, 0))
        mqd_filtered_free(&entry->filtered);
}

/* Charges the memory of the aborted transactions to the request. Returns false if there is no
 * room. */
static bool charge_aborted(struct mqd_reactor *r, struct mqd_request *request, const struct mqd_fetch_entry *entry)
{
    return entry->aborted.count == 0 || mqd_request_charge(r, request, mqd_fetch_aborted_bytes(entry));
}

/* Finds the range of an entry and the aborted transactions that overlap it. Returns what
 * mqd_reader_find returns: 0, an error code, or -1 if the files have changed and the caller must
 * try again. */
static int16_t find_once(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry,
                         uint32_t slot, const struct mqd_positions *positions, uint64_t generation, uint32_t size_max,
                         bool min_one_batch)
{
    struct mqd_positions readable = *positions;
    struct mqd_cursor cursor = entry->cursor;
    int16_t code =
        mqd_reader_limit_positions(r->reader, slot, generation, mqd_fetch_readable_end(request, positions), &readable);
    if (!code)
        code = mqd_reader_find(r->reader, slot, &readable, generation, mqd_fetch_position(entry), size_max,
                               min_one_batch, &entry->cursor, &entry->range);
    if (code || !request->isolation_level || !entry->range.size_bytes)
        return code;
    if (mqd_reader_is_swapping(r->reader, slot)) { /* returns nothing now; the end of the swap wakes the fetch */
        entry->cursor.valid = false;
        mqd_fetch_entry_release(r, entry);
        return 0;
    }
    code = mqd_reader_find_aborted(r->reader, slot, positions, generation, mqd_fetch_position(entry),
                                   entry->cursor.offset, &entry->aborted);
    if (code == 0 && entry->aborted.count > ABORTED_COUNT_MAX && size_max > 1) {
        mqd_fetch_entry_release(r, entry);
        entry->cursor = cursor;
        uint32_t shorter_max = entry->topic->view && size_max > SHORT_VIEW_BYTES ? SHORT_VIEW_BYTES : 1;
        return find_once(r, request, entry, slot, positions, generation, shorter_max, true);
    }
    if (code == 0 &&
        mqd_load_acquire(&mqd_control_partition(r->options.control, slot)->segments_generation) != generation)
        code = -1; /* data and transactions may come from different files: compaction or deletion ran in between */
    if (code == 0 && charge_aborted(r, request, entry))
        return 0;
    if (code == 0) /* out of memory for the transactions: returns nothing now, and the client retries */
        entry->cursor.valid = false;
    mqd_fetch_entry_release(r, entry);
    return code;
}

void mqd_fetch_find_range(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry,
                          uint32_t slot, struct mqd_positions *positions, int64_t *budget, bool *no_range_yet)
{
    mqd_fetch_ensure_path(r, entry->topic, entry->partition_index, slot);
    recall_cursor(r, entry);
    uint32_t size_max = entry->bytes_max < *budget ? (uint32_t)(entry->bytes_max < 0 ? 0 : entry->bytes_max)
                                                   : (uint32_t)(*budget < 0 ? 0 : *budget);
    bool is_view = entry->topic->view != NULL;
    if (is_view) /* bytes_max bounds the selection, not the bytes that are read */
        size_max = UINT32_MAX;
    int16_t error = -1;
    for (int tries = 0; tries < 4 && error == -1; tries++) {
        uint64_t generation = mqd_load_acquire(&mqd_control_partition(r->options.control, slot)->segments_generation);
        /* The positions are read after the generation, which the owner increments after it has
         * published a new log start. In the other order, an old log start could be combined with
         * the new list of files, and a deleted segment would look like a missing one. */
        mqd_leading_positions(r, entry->set, slot, positions);
        error = find_once(r, request, entry, slot, positions, generation, size_max, *no_range_yet || is_view);
    }
    entry->outcome.error = error == -1 ? MQD_KAFKA_NOT_LEADER_OR_FOLLOWER : error;
    if (entry->outcome.error) {
        mqd_log(r, 4, request->connection->id, slot, "fetch at offset %lld: %s", (long long)entry->fetch_offset,
                mqd_error_message());
        return;
    }
    if (entry->range.size_bytes) {
        *no_range_yet = false;
        if (is_view) { /* the number of bytes to send is known only after filtering */
            int64_t size_bytes = entry->range.size_bytes;
            *budget -= size_bytes < entry->bytes_max ? size_bytes : entry->bytes_max;
            return;
        }
        *budget -= entry->range.size_bytes;
        mqd_fetch_keep_cursor(r, entry);
        entry->outcome.records_bytes = entry->range.size_bytes;
        mqd_stat(r, MQD_COUNT_FETCH_BYTES, entry->range.size_bytes);
        if (entry->set->replica_id < 0)
            mqd_slot_count_out(mqd_control_partition(r->options.control, slot), entry->range.size_bytes);
    }
}

/* A local client reads the files itself, so the response contains only the aborted transactions. If
 * there are too many, it contains those of a shorter range, and the end of that range as the last
 * stable offset. */
void mqd_fetch_find_aborted(struct mqd_reactor *r, struct mqd_request *request, struct mqd_fetch_entry *entry,
                            uint32_t slot, struct mqd_positions *positions)
{
    mqd_fetch_ensure_path(r, entry->topic, entry->partition_index, slot);
    int64_t end_offset = positions->last_stable_offset;
    int16_t error = -1;
    for (int tries = 0; tries < 4 && error == -1; tries++) {
        uint64_t generation = mqd_load_acquire(&mqd_control_partition(r->options.control, slot)->segments_generation);
        mqd_slot_positions(mqd_control_partition(r->options.control, slot), positions);
        end_offset = positions->last_stable_offset;
        error = mqd_reader_find_aborted(r->reader, slot, positions, generation, entry->fetch_offset, end_offset,
                                        &entry->aborted);
        if (mqd_reader_is_swapping(r->reader, slot)) { /* returns nothing now */
            mqd_fetch_entry_release(r, entry);
            end_offset = entry->fetch_offset;
            error = 0;
            break;
        }
        while (error == 0 && entry->aborted.count > ABORTED_COUNT_MAX && end_offset > entry->fetch_offset + 1) {
            end_offset = entry->fetch_offset + (end_offset - entry->fetch_offset) / 2;
            error = mqd_reader_find_aborted(r->reader, slot, positions, generation, entry->fetch_offset, end_offset,
                                            &entry->aborted);
        }
        if (error == 0 &&
            mqd_load_acquire(&mqd_control_partition(r->options.control, slot)->segments_generation) != generation)
            error = -1;
    }
    if (error == 0 && !charge_aborted(r, request, entry)) {
        mqd_fetch_entry_release(r, entry);
        end_offset = entry->fetch_offset; /* out of memory for the transactions: returns nothing now */
    }
    positions->last_stable_offset = end_offset;
    entry->outcome.error = error == -1 ? MQD_KAFKA_NOT_LEADER_OR_FOLLOWER : error;
    if (!entry->outcome.error)
        return;
    mqd_fetch_entry_release(r, entry);
    mqd_log(r, 4, request->connection->id, slot, "aborted transactions from offset %lld: %s",
            (long long)entry->fetch_offset, mqd_error_message());
}
