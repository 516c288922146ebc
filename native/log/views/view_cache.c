/* See log/views/view_cache.h. */
#include "log/views/view_cache.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/big_endian.h"
#include "log/views/planted_bugs.h"
#include "wire/filter.h"
#include "wire/kafka_errors.h"

#ifdef MQD_PLANTED
uint32_t mqd_view_planted;
#endif

#define BUCKET_COUNT 16384u
#define SELECTION_DIVISOR 8 /* a selection is cached if it is at most 1 / SELECTION_DIVISOR of its piece */
#define BATCH_LENGTH_AT 8   /* position of the length field in a batch */
#define BATCH_LENGTH_END (BATCH_LENGTH_AT + 4)
#define NOT_CACHED 2
#define STOPPED 3 /* no room for more, as when `take_piece` returns 0; *position is after the last batch taken */

struct piece {
    struct piece *next;
    uint64_t file, view;
    uint32_t number;           /* index in the file */
    uint32_t begin, last, end; /* positions of its first and its last batch, and of the last batch's end */
    int64_t first_offset, next_offset;
    bool has_empty; /* as in struct mqd_filtered */
    uint8_t empty[MQD_BATCH_HEADER_BYTES];
    uint8_t last_header[MQD_BATCH_HEADER_BYTES];
    uint32_t size_bytes;
    uint8_t bytes[];
};

struct buffer { /* bytes of the file, starting at `position` */
    uint32_t capacity_bytes, size_bytes, position;
    uint8_t bytes[];
};

struct mqd_view_cache {
    pthread_mutex_t mutex;
    uint64_t bytes_max;
    uint32_t piece_bytes, selected_bytes_max; /* of a piece; a larger selection is not cached */
    struct mqd_view_cache_stats stats;
    uint32_t hand;          /* the next bucket to evict from */
    struct buffer *spare;   /* the buffer of the last read, reused by the next one */
    struct piece **buckets; /* NULL: nothing has been cached yet */
};

/* ---- the table ---- */

struct mqd_view_cache *mqd_view_cache_create(uint64_t bytes_max, uint32_t piece_bytes)
{
    struct mqd_view_cache *cache = calloc(1, sizeof *cache);
    if (!cache)
        return NULL;
    cache->bytes_max = bytes_max;
    cache->piece_bytes = piece_bytes;
    cache->selected_bytes_max = piece_bytes / SELECTION_DIVISOR;
    pthread_mutex_init(&cache->mutex, NULL);
    return cache;
}

static uint64_t size_of(const struct piece *piece)
{
    return sizeof *piece + piece->size_bytes;
}

static struct piece **place_of(const struct mqd_view_cache *cache, uint64_t file, uint64_t view, uint32_t number)
{
    file *= !PLANTED_VIEW_BUG(FILE);
    view *= !PLANTED_VIEW_BUG(FILTER);
    uint64_t hash = file * 0x9e3779b97f4a7c15ull + view * 0xc2b2ae3d27d4eb4full + number * 0x165667b19e3779f9ull;
    hash ^= hash >> 32;
    struct piece **at = &cache->buckets[hash * 0x9e3779b97f4a7c15ull >> 50];
    while (*at && (((*at)->file != file && !PLANTED_VIEW_BUG(FILE)) ||
                   ((*at)->view != view && !PLANTED_VIEW_BUG(FILTER)) || (*at)->number != number))
        at = &(*at)->next;
    return at;
}

static void drop(struct mqd_view_cache *cache, struct piece **at)
{
    struct piece *piece = *at;
    *at = piece->next;
    cache->stats.pieces--;
    cache->stats.bytes -= size_of(piece);
    free(piece);
}

static void make_room(struct mqd_view_cache *cache, uint64_t size_bytes)
{
    while (cache->stats.pieces && cache->stats.bytes + size_bytes > cache->bytes_max) {
        struct piece **at = &cache->buckets[cache->hand++ & (BUCKET_COUNT - 1)];
        while (*at) {
            drop(cache, at);
            cache->stats.evicted++;
        }
    }
}

void mqd_view_cache_stats(struct mqd_view_cache *cache, struct mqd_view_cache_stats *out)
{
    pthread_mutex_lock(&cache->mutex);
    *out = cache->stats;
    pthread_mutex_unlock(&cache->mutex);
}

/* ---- pieces ---- */

/* X2. The mutex is held during the read: the header comes from the page cache, or within
 * milliseconds from the disk. */
static bool is_current(const struct mqd_view_read *read, const struct piece *piece)
{
    uint8_t header[MQD_BATCH_HEADER_BYTES];
    return pread(read->fd, header, sizeof header, piece->last) == (ssize_t)sizeof header &&
           memcmp(header, piece->last_header, sizeof header) == 0;
}

/* X1 */
static bool is_generation_unchanged(const struct mqd_view_read *read)
{
    return PLANTED_VIEW_BUG(MIXED) || !read->generation_at || mqd_load_acquire(read->generation_at) == read->generation;
}

static bool append(struct mqd_filtered *out, const uint8_t *bytes, uint64_t size_bytes)
{
    if (out->size_bytes + size_bytes > out->capacity_bytes) {
        uint64_t capacity = 2 * (out->size_bytes + size_bytes);
        uint8_t *grown = realloc(out->bytes, capacity);
        if (!grown)
            return false;
        out->bytes = grown;
        out->capacity_bytes = capacity;
    }
    if (size_bytes)
        memcpy(out->bytes + out->size_bytes, bytes, size_bytes);
    out->size_bytes += size_bytes;
    return true;
}

static uint64_t room_left(const struct mqd_view_read *read)
{
    return read->output_bytes_max > read->selection.size_bytes ? read->output_bytes_max - read->selection.size_bytes
                                                               : 0;
}

/* Appends the selected batches of a piece. Returns 1 if there was room for all of them, 0 if not,
 * or a negative Kafka error code. */
static int take_piece(struct mqd_view_read *read, const struct piece *piece)
{
    struct mqd_filtered *out = &read->selection;
    if (read->from_offset <= piece->first_offset && piece->size_bytes <= room_left(read)) {
        if (!append(out, piece->bytes, piece->size_bytes))
            return -MQD_KAFKA_STORAGE_ERROR;
    } else {
        uint64_t consumed_bytes;
        int16_t error = mqd_filter_append(read->filter, read->filter_bytes, piece->bytes, piece->size_bytes,
                                          read->from_offset, room_left(read), out, &consumed_bytes);
        if (error || consumed_bytes < piece->size_bytes)
            return -error;
        if (out->next_offset >= piece->next_offset)
            return 1; /* the filter took the last batch and set the fields, or all batches are below from_offset */
    }
    out->next_offset = piece->next_offset;
    out->has_empty = piece->has_empty;
    memcpy(out->empty, piece->empty, sizeof out->empty);
    return 1;
}

/* Takes the cached selection of the piece that contains *position, and moves *position to the
 * piece's end. Returns what `take_piece` returns, or NOT_CACHED. */
static int take_cached(struct mqd_view_cache *cache, struct mqd_view_read *read, uint32_t *position)
{
    int result = NOT_CACHED;
    pthread_mutex_lock(&cache->mutex);
    if (cache->buckets) {
        struct piece **at = place_of(cache, read->file, read->view, *position / cache->piece_bytes), *piece = *at;
        if (piece && *position >= piece->begin && *position < piece->end &&
            (piece->end <= read->limit || PLANTED_VIEW_BUG(LIMIT))) {
            if (PLANTED_VIEW_BUG(STALE) || is_current(read, piece)) {
                cache->stats.hits++;
                result = take_piece(read, piece);
                *position = piece->end;
            } else {
                cache->stats.stale++;
                drop(cache, at);
            }
        }
    }
    pthread_mutex_unlock(&cache->mutex);
    return result;
}

/* Returns a new piece that consists of `before` and `piece`, which begins where `before` ends.
 * NULL: too large to be cached, or out of memory. Frees neither. */
static struct piece *join_pieces(const struct mqd_view_cache *cache, const struct piece *before,
                                 const struct piece *piece)
{
    uint32_t size_bytes = before->size_bytes + piece->size_bytes;
    struct piece *joined = size_bytes > cache->selected_bytes_max ? NULL : malloc(sizeof *joined + size_bytes);
    if (!joined)
        return NULL;
    *joined = *piece;
    joined->begin = before->begin;
    joined->first_offset = before->first_offset;
    joined->size_bytes = size_bytes;
    memcpy(joined->bytes, before->bytes, before->size_bytes);
    memcpy(joined->bytes + before->size_bytes, piece->bytes, piece->size_bytes);
    return joined;
}

/* Caches the piece, joined with the cached one that directly precedes it, if any. Frees the piece
 * if it is not cached. */
static void cache_piece(struct mqd_view_cache *cache, const struct mqd_view_read *read, struct piece *piece)
{
    pthread_mutex_lock(&cache->mutex);
    if (!cache->buckets)
        cache->buckets = calloc(BUCKET_COUNT, sizeof *cache->buckets);
    if (cache->buckets && is_generation_unchanged(read)) {
        struct piece **at = place_of(cache, read->file, read->view, piece->number), *cached = *at;
        if (cached && (cached->end == piece->begin || (PLANTED_VIEW_BUG(GAP) && cached->end < piece->begin)) &&
            (PLANTED_VIEW_BUG(JOIN) || is_current(read, cached)) && is_generation_unchanged(read)) {
            struct piece *joined = join_pieces(cache, cached, piece);
            free(piece);
            piece = joined;
        } else if (cached && cached->begin <= piece->begin && cached->end >= piece->end) {
            free(piece); /* another reader has cached this piece already, or a longer one */
            piece = NULL;
        }
        if (piece && size_of(piece) <= cache->bytes_max) {
            if (cached)
                drop(cache, at);
            make_room(cache, size_of(piece));
            at = place_of(cache, read->file, read->view, piece->number);
            piece->next = *at;
            *at = piece;
            cache->stats.pieces++;
            cache->stats.added++;
            cache->stats.bytes += size_of(piece);
            piece = NULL;
        }
    }
    pthread_mutex_unlock(&cache->mutex);
    free(piece);
}

/* ---- the file ---- */

static int64_t first_offset(const struct buffer *buffer)
{
    return (int64_t)mqd_get_be64(buffer->bytes);
}

static void put_buffer(struct mqd_view_cache *cache, struct buffer *buffer)
{
    pthread_mutex_lock(&cache->mutex);
    if (buffer && !cache->spare && buffer->capacity_bytes <= 2 * cache->piece_bytes) {
        cache->spare = buffer;
        buffer = NULL;
    }
    pthread_mutex_unlock(&cache->mutex);
    free(buffer);
}

static struct buffer *get_buffer(struct mqd_view_cache *cache)
{
    pthread_mutex_lock(&cache->mutex);
    struct buffer *buffer = cache->spare;
    cache->spare = NULL;
    pthread_mutex_unlock(&cache->mutex);
    if (!buffer && (buffer = malloc(sizeof *buffer + cache->piece_bytes + 65536)))
        buffer->capacity_bytes = cache->piece_bytes + 65536;
    return buffer;
}

/* Reads more of the file until the buffer has size_bytes. */
static bool fill(const struct mqd_view_read *read, struct buffer **buffer, uint32_t size_bytes)
{
    struct buffer *current = *buffer;
    if (size_bytes <= current->size_bytes)
        return true;
    if (size_bytes > current->capacity_bytes) {
        struct buffer *grown = realloc(current, sizeof *current + size_bytes);
        if (!grown)
            return false;
        *buffer = current = grown;
        current->capacity_bytes = size_bytes;
    }
    uint32_t missing_bytes = size_bytes - current->size_bytes;
    if (pread(read->fd, current->bytes + current->size_bytes, missing_bytes,
              (off_t)current->position + current->size_bytes) != (ssize_t)missing_bytes)
        return false;
    current->size_bytes = size_bytes;
    return true;
}

/* Reads the batch at `position` and all following ones that begin in the same piece and end at or
 * below the limit. *last: the position of the last batch in the buffer. */
static int16_t read_piece(const struct mqd_view_cache *cache, const struct mqd_view_read *read, uint32_t position,
                          struct buffer **buffer, uint32_t *last, uint32_t *size_bytes)
{
    uint64_t border = ((uint64_t)position / cache->piece_bytes + 1) * cache->piece_bytes;
    uint32_t begins_below = (uint32_t)(border < read->limit ? border : read->limit) - position;
    uint32_t limit = read->limit - position, at = 0;
    (*buffer)->position = position;
    (*buffer)->size_bytes = 0;
    if (!fill(read, buffer, begins_below))
        return MQD_KAFKA_STORAGE_ERROR;
    while (at < begins_below) {
        if (limit - at < MQD_BATCH_HEADER_BYTES)
            break;
        if (!fill(read, buffer, at + BATCH_LENGTH_END))
            return MQD_KAFKA_STORAGE_ERROR;
        uint64_t batch_bytes = (uint64_t)mqd_get_be32((*buffer)->bytes + at + BATCH_LENGTH_AT) + BATCH_LENGTH_END;
        if (batch_bytes < MQD_BATCH_HEADER_BYTES || batch_bytes > limit - at)
            break;
        if (!fill(read, buffer, at + (uint32_t)batch_bytes))
            return MQD_KAFKA_STORAGE_ERROR;
        *last = at;
        at += (uint32_t)batch_bytes;
    }
    *size_bytes = at;
    return at ? 0 : MQD_KAFKA_CORRUPT_MESSAGE;
}

/* Creates a piece for the batches in the buffer; what was selected from them is in selection.bytes,
 * starting at selection_begin. Returns NULL if out of memory. */
static struct piece *piece_new(const struct mqd_view_cache *cache, const struct mqd_view_read *read,
                               const struct buffer *buffer, uint32_t last, uint32_t end, uint64_t selection_begin)
{
    const struct mqd_filtered *selection = &read->selection;
    uint32_t selected_bytes = (uint32_t)(selection->size_bytes - selection_begin);
    struct piece *piece = malloc(sizeof *piece + selected_bytes);
    if (!piece)
        return NULL;
    *piece = (struct piece){.file = read->file,
                            .view = read->view,
                            .number = buffer->position / cache->piece_bytes,
                            .begin = buffer->position,
                            .last = buffer->position + last,
                            .end = end,
                            .first_offset = first_offset(buffer),
                            .next_offset = selection->next_offset,
                            .has_empty = selection->has_empty,
                            .size_bytes = selected_bytes};
    memcpy(piece->empty, selection->empty, sizeof piece->empty);
    memcpy(piece->last_header, buffer->bytes + last, sizeof piece->last_header);
    if (selected_bytes)
        memcpy(piece->bytes, selection->bytes + selection_begin, selected_bytes);
    return piece;
}

/* Of the batches in selection.bytes that start at or after selection_begin, drops those that exceed
 * output_bytes_max. Returns what `take_piece` returns. */
static int trim_selection(struct mqd_view_read *read, uint64_t selection_begin)
{
    struct mqd_filtered *out = &read->selection, all = *out;
    uint64_t consumed_bytes, size_bytes = all.size_bytes - selection_begin;
    uint8_t *copy = malloc(size_bytes);
    if (!copy)
        return -MQD_KAFKA_STORAGE_ERROR;
    memcpy(copy, all.bytes + selection_begin, size_bytes);
    out->size_bytes = selection_begin;
    int16_t error = mqd_filter_append(read->filter, read->filter_bytes, copy, size_bytes, read->from_offset,
                                      room_left(read), out, &consumed_bytes);
    free(copy);
    if (error || (consumed_bytes < size_bytes && !PLANTED_VIEW_BUG(TRIM)))
        return -error;
    out->next_offset = all.next_offset;
    out->has_empty = all.has_empty;
    return 1;
}

/* Reads the piece, starting at *position, selects from it, and caches the selection if it is small.
 * Returns what `take_piece` returns, or STOPPED. */
static int take_uncached(struct mqd_view_cache *cache, struct mqd_view_read *read, uint32_t *position,
                         struct buffer **buffer)
{
    struct mqd_filtered *out = &read->selection;
    uint32_t last = 0, size_bytes = 0;
    uint64_t consumed_bytes = 0, selection_begin = out->size_bytes, room = room_left(read);
    int16_t error = read_piece(cache, read, *position, buffer, &last, &size_bytes);
    *position += size_bytes;
    if (PLANTED_VIEW_BUG(BORDER) && last &&
        (*position - 1) / cache->piece_bytes > (*buffer)->position / cache->piece_bytes)
        size_bytes = last;
    if (!error) /* may exceed output_bytes_max: the cache needs the whole selection */
        error = mqd_filter_append(read->filter, read->filter_bytes, (*buffer)->bytes, size_bytes, read->from_offset,
                                  room > cache->selected_bytes_max ? room : cache->selected_bytes_max, out,
                                  &consumed_bytes);
    if (error)
        return -error;
    read->filtered_bytes += consumed_bytes;
    uint64_t selected_bytes = out->size_bytes - selection_begin;
    bool all_consumed = consumed_bytes == size_bytes;
    if (all_consumed && selected_bytes <= cache->selected_bytes_max &&
        (PLANTED_VIEW_BUG(WITHIN) || read->from_offset <= first_offset(*buffer))) {
        struct piece *piece = piece_new(cache, read, *buffer, last, *position, selection_begin);
        if (piece)
            cache_piece(cache, read, piece);
    }
    if (selected_bytes > room) {
        int result = trim_selection(read, selection_begin);
        return result == 1 ? all_consumed : result;
    }
    if (!all_consumed)
        *position = (*buffer)->position + (uint32_t)consumed_bytes;
    return all_consumed ? 1 : STOPPED;
}

int16_t mqd_view_read(struct mqd_view_cache *cache, struct mqd_view_read *read)
{
    struct buffer *buffer = NULL;
    uint32_t position = read->position;
    int result = 1;
    read->selection = (struct mqd_filtered){.next_offset = read->from_offset};
    read->filtered_bytes = 0;
    while (result == 1 && position < read->limit && room_left(read)) {
        result = take_cached(cache, read, &position);
        if (result != NOT_CACHED)
            continue;
        result = 1;
        if (read->filtered_bytes >= read->filtered_bytes_max)
            break;
        if (!buffer && !(buffer = get_buffer(cache)))
            result = -MQD_KAFKA_STORAGE_ERROR;
        else
            result = take_uncached(cache, read, &position, &buffer);
    }
    put_buffer(cache, buffer);
    read->end_position = result == 1 || result == STOPPED ? position : 0;
    return result < 0 && !read->selection.size_bytes ? (int16_t)-result : 0;
}

void mqd_view_cache_destroy(struct mqd_view_cache *cache)
{
    if (!cache)
        return;
    for (uint32_t i = 0; cache->buckets && i < BUCKET_COUNT; i++)
        while (cache->buckets[i])
            drop(cache, &cache->buckets[i]);
    pthread_mutex_destroy(&cache->mutex);
    free(cache->buckets);
    free(cache->spare);
    free(cache);
}
