/* See log/dedup/ids.h. */
#include "log/dedup/ids.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/assert.h"
#include "base/error.h"
#include "log/compaction/map.h"
#include "log/dedup/planted_bugs.h"

#define CHUNK_ENTRIES 4096u
#define SLOT_COUNT_MIN 64u
#define MARKS_PER_WINDOW 1000
#define FREE 0ull                /* the `low` of an entry that has no id */
#define PLACE_MASK 0x7fffffffull /* larger than the length of any queue */

struct mqd_ids_chunk {
    int64_t base_offset;
    uint64_t low[CHUNK_ENTRIES];
    uint16_t high[CHUNK_ENTRIES];
    uint32_t relative_offset[CHUNK_ENTRIES];
};

/* the entries from first_entry up to the next mark's first_entry were added between first_ms and
 * last_ms */
struct mqd_ids_mark {
    int64_t first_ms, last_ms;
    uint64_t first_entry;
};

struct mqd_ids_transaction {
    int64_t producer_id;
    int64_t marker_offset; /* -1: open */
    bool commit;
    uint64_t *entries; /* increasing; those before the head have expired */
    uint32_t count, capacity;
};

int mqd_ids_open(struct mqd_ids *ids, uint32_t count_max)
{
    *ids = (struct mqd_ids){.count_max = count_max < PLACE_MASK / 2 ? count_max : (uint32_t)(PLACE_MASK / 2)};
    if (getrandom(ids->seed, sizeof ids->seed, 0) != (ssize_t)sizeof ids->seed)
        return mqd_error_system(errno, "cannot get random bytes for a hash seed");
    return 0;
}

void mqd_ids_close(struct mqd_ids *ids)
{
    for (uint32_t i = 0; i < ids->chunk_count; i++)
        free(ids->chunks[i]);
    for (uint32_t i = 0; i < ids->transaction_count; i++)
        free(ids->transactions[i].entries);
    free(ids->chunks);
    free(ids->slots);
    free(ids->marks);
    free(ids->transactions);
    *ids = (struct mqd_ids){0};
}

void mqd_ids_hash(const struct mqd_ids *ids, const uint8_t *id, uint32_t id_bytes, struct mqd_id_hash *hash)
{
    uint64_t words[2];
    mqd_siphash(ids->seed, id, id_bytes, words);
    *hash = (struct mqd_id_hash){.low = words[0] == FREE ? 1 : words[0], .high = (uint16_t)words[1]};
}

static bool reserve(void **array, uint32_t *capacity, uint32_t count, size_t entry_bytes)
{
    if (count < *capacity)
        return true;
    uint32_t new_capacity = *capacity ? *capacity * 2 : 4;
    void *grown = realloc(*array, new_capacity * entry_bytes);
    if (!grown)
        return false;
    *array = grown;
    *capacity = new_capacity;
    return true;
}

/* ---- the queue ---- */

static struct mqd_ids_chunk *chunk_of(const struct mqd_ids *ids, uint64_t entry)
{
    return ids->chunks[(entry - ids->chunks_head) / CHUNK_ENTRIES];
}

static uint64_t *low_of(const struct mqd_ids *ids, uint64_t entry)
{
    return &chunk_of(ids, entry)->low[entry % CHUNK_ENTRIES];
}

static int64_t offset_of(const struct mqd_ids *ids, uint64_t entry)
{
    const struct mqd_ids_chunk *chunk = chunk_of(ids, entry);
    return chunk->base_offset + chunk->relative_offset[entry % CHUNK_ENTRIES];
}

/* Makes room for an entry at the tail. An offset too far above the last chunk's base offset begins
 * a new chunk; the skipped entries stay free. */
static bool reserve_entry(struct mqd_ids *ids, int64_t offset)
{
    if (ids->tail % CHUNK_ENTRIES && offset - chunk_of(ids, ids->tail)->base_offset <= (int64_t)UINT32_MAX)
        return true;
    if (!reserve((void **)&ids->chunks, &ids->chunk_capacity, ids->chunk_count, sizeof *ids->chunks))
        return false;
    struct mqd_ids_chunk *chunk = malloc(sizeof *chunk);
    if (!chunk)
        return false;
    for (; ids->tail % CHUNK_ENTRIES; ids->tail++) {
        *low_of(ids, ids->tail) = FREE;
        chunk_of(ids, ids->tail)->relative_offset[ids->tail % CHUNK_ENTRIES] = UINT32_MAX;
    }
    if (!ids->chunk_count)
        ids->chunks_head = ids->tail;
    chunk->base_offset = offset;
    ids->chunks[ids->chunk_count++] = chunk;
    return true;
}

/* The chunk at the tail is kept while it has room. */
static void release_chunks(struct mqd_ids *ids)
{
    uint32_t drop_count = 0;
    while (drop_count < ids->chunk_count && ids->chunks_head + (uint64_t)(drop_count + 1) * CHUNK_ENTRIES <= ids->head)
        free(ids->chunks[drop_count++]);
    if (!drop_count)
        return;
    ids->chunk_count -= drop_count;
    ids->chunks_head += (uint64_t)drop_count * CHUNK_ENTRIES;
    memmove(ids->chunks, ids->chunks + drop_count, ids->chunk_count * sizeof *ids->chunks);
}

/* ---- the table: a used slot contains its entry's sequence number modulo 2^31, plus one ---- */

static uint64_t entry_in_slot(const struct mqd_ids *ids, uint32_t i)
{
    return ids->head + ((ids->slots[i] - 1 - ids->head) & PLACE_MASK);
}

/* The slot where the search for a hash begins. */
static uint32_t home(const struct mqd_ids *ids, uint64_t low)
{
    return (uint32_t)low & (ids->slot_count - 1);
}

static void set_slot(struct mqd_ids *ids, uint64_t low, uint64_t entry)
{
    uint32_t i = home(ids, low);
    while (ids->slots[i])
        i = (i + 1) & (ids->slot_count - 1);
    ids->slots[i] = (uint32_t)(entry & PLACE_MASK) + 1;
    ids->used_slot_count++;
}

static bool reserve_slot(struct mqd_ids *ids)
{
    if (ids->slot_count && ids->used_slot_count < ids->slot_count / 4 * 3)
        return true;
    uint32_t count = ids->slot_count ? ids->slot_count * 2 : SLOT_COUNT_MIN;
    uint32_t *slots = calloc(count, sizeof *slots);
    if (!slots)
        return false;
    free(ids->slots);
    ids->slots = slots;
    ids->slot_count = count;
    ids->used_slot_count = 0;
    for (uint64_t entry = ids->head; entry < ids->tail; entry++)
        if (*low_of(ids, entry) != FREE)
            set_slot(ids, *low_of(ids, entry), entry);
    return true;
}

/* Moves later entries of the probe sequence into the hole, so that no unused slot separates an
 * entry from its home slot. */
static void clear_slot(struct mqd_ids *ids, uint32_t i)
{
    uint32_t mask = ids->slot_count - 1;
    for (uint32_t j = (i + 1) & mask; ids->slots[j] && !PLANTED_DEDUP_BUG(HOLES); j = (j + 1) & mask) {
        uint32_t home_slot = home(ids, *low_of(ids, entry_in_slot(ids, j)));
        if (((j - home_slot) & mask) >= ((j - i) & mask)) {
            ids->slots[i] = ids->slots[j];
            i = j;
        }
    }
    ids->slots[i] = 0;
    ids->used_slot_count--;
}

static void forget(struct mqd_ids *ids, uint64_t entry)
{
    uint64_t low = *low_of(ids, entry);
    if (low == FREE)
        return;
    uint32_t i = home(ids, low);
    while (entry_in_slot(ids, i) != entry)
        i = (i + 1) & (ids->slot_count - 1);
    clear_slot(ids, i);
    *low_of(ids, entry) = FREE;
}

static bool look_up(const struct mqd_ids *ids, const struct mqd_id_hash *hash, uint64_t *entry)
{
    if (!ids->used_slot_count)
        return false;
    for (uint32_t i = home(ids, hash->low); ids->slots[i]; i = (i + 1) & (ids->slot_count - 1)) {
        *entry = entry_in_slot(ids, i);
        if (*low_of(ids, *entry) == hash->low && chunk_of(ids, *entry)->high[*entry % CHUNK_ENTRIES] == hash->high)
            return true;
    }
    return false;
}

/* ---- transactions ---- */

static bool contains(const struct mqd_ids_transaction *transaction, uint64_t entry)
{
    uint32_t low = 0, high = transaction->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (transaction->entries[middle] < entry)
            low = middle + 1;
        else
            high = middle;
    }
    return low < transaction->count && transaction->entries[low] == entry;
}

static struct mqd_ids_transaction *find_open_transaction(const struct mqd_ids *ids, int64_t producer_id)
{
    for (uint32_t i = 0; i < ids->transaction_count; i++)
        if (ids->transactions[i].producer_id == producer_id && ids->transactions[i].marker_offset < 0)
            return &ids->transactions[i];
    return NULL;
}

/* Returns NULL if out of memory. */
static struct mqd_ids_transaction *reserve_transaction(struct mqd_ids *ids, int64_t producer_id)
{
    struct mqd_ids_transaction *transaction = find_open_transaction(ids, producer_id);
    if (!transaction) {
        if (!reserve((void **)&ids->transactions, &ids->transaction_capacity, ids->transaction_count,
                     sizeof *ids->transactions))
            return NULL;
        transaction = &ids->transactions[ids->transaction_count++];
        *transaction = (struct mqd_ids_transaction){.producer_id = producer_id, .marker_offset = -1};
    }
    return reserve((void **)&transaction->entries, &transaction->capacity, transaction->count,
                   sizeof *transaction->entries)
               ? transaction
               : NULL;
}

static void remove_transaction(struct mqd_ids *ids, uint32_t i)
{
    free(ids->transactions[i].entries);
    ids->transactions[i] = ids->transactions[--ids->transaction_count];
}

void mqd_ids_end_transaction(struct mqd_ids *ids, int64_t producer_id, bool commit, int64_t offset)
{
    struct mqd_ids_transaction *transaction = find_open_transaction(ids, producer_id);
    if (!transaction)
        return;
    transaction->marker_offset = offset;
    transaction->commit = commit;
}

void mqd_ids_decide_transactions(struct mqd_ids *ids, int64_t high_watermark)
{
    for (uint32_t i = ids->transaction_count; i-- > 0;) {
        const struct mqd_ids_transaction *transaction = &ids->transactions[i];
        if (transaction->marker_offset < 0 ||
            (transaction->marker_offset >= high_watermark && !PLANTED_DEDUP_BUG(DECIDE_EARLY)))
            continue;
        for (uint32_t j = 0; !transaction->commit && !PLANTED_DEDUP_BUG(ABORTED_USED) && j < transaction->count; j++)
            if (transaction->entries[j] >= ids->head)
                forget(ids, transaction->entries[j]);
        remove_transaction(ids, i);
    }
}

/* ---- operations on queue, table and transactions ---- */

enum mqd_id_state mqd_ids_find(const struct mqd_ids *ids, const struct mqd_id_hash *hash, int64_t producer_id,
                               int64_t *offset)
{
    uint64_t entry;
    if (!look_up(ids, hash, &entry))
        return MQD_ID_FREE;
    *offset = offset_of(ids, entry);
    for (uint32_t i = 0; i < ids->transaction_count && !PLANTED_DEDUP_BUG(UNDECIDED_USED); i++)
        if (contains(&ids->transactions[i], entry))
            return ids->transactions[i].producer_id == producer_id && ids->transactions[i].marker_offset < 0
                       ? MQD_ID_USED
                       : MQD_ID_UNDECIDED;
    return MQD_ID_USED;
}

int mqd_ids_put(struct mqd_ids *ids, const struct mqd_id_hash *hash, int64_t offset, int64_t producer_id)
{
    struct mqd_ids_transaction *transaction = NULL;
    uint64_t before;
    /* reserve_entry comes last: if it begins a chunk, the entry must be added */
    if (mqd_ids_count(ids) >= ids->count_max || !reserve_slot(ids) ||
        (producer_id >= 0 && !(transaction = reserve_transaction(ids, producer_id))) || !reserve_entry(ids, offset))
        return -1;
    if (look_up(ids, hash, &before))
        forget(ids, before);
    uint64_t entry = ids->tail++;
    struct mqd_ids_chunk *chunk = chunk_of(ids, entry);
    MQD_ASSERT(entry == ids->head || offset > offset_of(ids, entry - 1) || *low_of(ids, entry - 1) == FREE,
               "I1: an id at offset %lld after one at %lld", (long long)offset, (long long)offset_of(ids, entry - 1));
    chunk->low[entry % CHUNK_ENTRIES] = hash->low;
    chunk->high[entry % CHUNK_ENTRIES] = hash->high;
    chunk->relative_offset[entry % CHUNK_ENTRIES] = (uint32_t)(offset - chunk->base_offset);
    set_slot(ids, hash->low, entry);
    if (transaction)
        transaction->entries[transaction->count++] = entry;
    return 0;
}

static struct mqd_ids_mark *mark_at(const struct mqd_ids *ids, uint32_t i)
{
    return &ids->marks[(ids->mark_head + i) % ids->mark_capacity];
}

void mqd_ids_set_time(struct mqd_ids *ids, int64_t now_ms, int64_t window_ms)
{
    struct mqd_ids_mark *last = ids->mark_count ? mark_at(ids, ids->mark_count - 1) : NULL;
    if (last && now_ms - last->first_ms <= window_ms / MARKS_PER_WINDOW) {
        last->last_ms = now_ms > last->last_ms ? now_ms : last->last_ms;
        return;
    }
    if (ids->mark_count == ids->mark_capacity) {
        uint32_t capacity = ids->mark_capacity ? ids->mark_capacity * 2 : 16;
        struct mqd_ids_mark *marks = malloc(capacity * sizeof *marks);
        if (!marks) { /* the last mark also covers later entries */
            if (last)
                last->last_ms = now_ms;
            return;
        }
        for (uint32_t i = 0; i < ids->mark_count; i++)
            marks[i] = *mark_at(ids, i);
        free(ids->marks);
        ids->marks = marks;
        ids->mark_capacity = capacity;
        ids->mark_head = 0;
    }
    ids->mark_count++;
    *mark_at(ids, ids->mark_count - 1) = (struct mqd_ids_mark){now_ms, now_ms, ids->tail};
}

void mqd_ids_shift_times(struct mqd_ids *ids, int64_t back_ms)
{
    for (uint32_t i = 0; i < ids->mark_count; i++) {
        mark_at(ids, i)->first_ms -= back_ms;
        mark_at(ids, i)->last_ms -= back_ms;
    }
}

void mqd_ids_drop_oldest(struct mqd_ids *ids)
{
    forget(ids, ids->head);
    ids->head++;
    release_chunks(ids);
}

void mqd_ids_expire(struct mqd_ids *ids, int64_t before_ms)
{
    while (ids->mark_count && mark_at(ids, 0)->last_ms <= before_ms + (PLANTED_DEDUP_BUG(EARLY) ? 100 : 0)) {
        uint64_t until = ids->mark_count > 1 ? mark_at(ids, 1)->first_entry : ids->tail;
        while (ids->head < until)
            mqd_ids_drop_oldest(ids);
        ids->mark_head = (ids->mark_head + 1) % ids->mark_capacity;
        ids->mark_count--;
    }
}

void mqd_ids_cut(struct mqd_ids *ids, int64_t offset)
{
    if (PLANTED_DEDUP_BUG(CUT_NOTHING))
        return;
    while (ids->tail > ids->head && offset_of(ids, ids->tail - 1) >= offset) {
        forget(ids, ids->tail - 1);
        ids->tail--;
        if (ids->tail % CHUNK_ENTRIES == 0)
            free(ids->chunks[--ids->chunk_count]);
    }
    while (ids->mark_count && mark_at(ids, ids->mark_count - 1)->first_entry > ids->tail)
        ids->mark_count--;
    for (uint32_t i = ids->transaction_count; i-- > 0;) {
        struct mqd_ids_transaction *transaction = &ids->transactions[i];
        while (transaction->count && transaction->entries[transaction->count - 1] >= ids->tail)
            transaction->count--;
        if (transaction->marker_offset >= offset && !PLANTED_DEDUP_BUG(CUT_ENTRIES))
            transaction->marker_offset = -1;
        if (!transaction->count)
            remove_transaction(ids, i);
    }
}

uint64_t mqd_ids_bytes(const struct mqd_ids *ids)
{
    uint64_t bytes = (uint64_t)ids->chunk_count * sizeof **ids->chunks + (uint64_t)ids->slot_count * sizeof *ids->slots;
    for (uint32_t i = 0; i < ids->transaction_count; i++)
        bytes += (uint64_t)ids->transactions[i].capacity * sizeof *ids->transactions[i].entries;
    return bytes;
}

const char *mqd_ids_check(const struct mqd_ids *ids)
{
    uint32_t used = 0;
    int64_t last_offset = -1;
    for (uint64_t entry = ids->head; entry < ids->tail; entry++) {
        uint64_t same_id_entry;
        if (*low_of(ids, entry) == FREE)
            continue;
        struct mqd_id_hash hash = {*low_of(ids, entry), chunk_of(ids, entry)->high[entry % CHUNK_ENTRIES]};
        if (!look_up(ids, &hash, &same_id_entry) || same_id_entry != entry)
            return "I2: an entry is not found by its hash, or exists twice";
        if (offset_of(ids, entry) <= last_offset)
            return "I1: offsets do not increase";
        last_offset = offset_of(ids, entry);
        used++;
    }
    for (uint32_t i = 0; i < ids->slot_count; i++)
        used -= ids->slots[i] != 0;
    return used ? "I2: the table has other entries than the queue" : NULL;
}
