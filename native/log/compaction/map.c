/* See log/compaction/map.h. */
#include "log/compaction/map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "base/error.h"

/* ---- SipHash-2-4-128 ---- */

struct sip {
    uint64_t v0, v1, v2, v3;
};

static inline uint64_t rotate(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

static inline void sip_rounds(struct sip *s, int count)
{
    while (count-- > 0) {
        s->v0 += s->v1, s->v1 = rotate(s->v1, 13), s->v1 ^= s->v0, s->v0 = rotate(s->v0, 32);
        s->v2 += s->v3, s->v3 = rotate(s->v3, 16), s->v3 ^= s->v2;
        s->v0 += s->v3, s->v3 = rotate(s->v3, 21), s->v3 ^= s->v0;
        s->v2 += s->v1, s->v1 = rotate(s->v1, 17), s->v1 ^= s->v2, s->v2 = rotate(s->v2, 32);
    }
}

static inline void sip_absorb(struct sip *s, uint64_t word)
{
    s->v3 ^= word;
    sip_rounds(s, 2);
    s->v0 ^= word;
}

void mqd_siphash(const uint64_t seed[2], const void *bytes, size_t size_bytes, uint64_t out[2])
{
    struct sip s = {seed[0] ^ 0x736f6d6570736575ull, seed[1] ^ 0x646f72616e646f6dull ^ 0xee,
                    seed[0] ^ 0x6c7967656e657261ull, seed[1] ^ 0x7465646279746573ull};
    const uint8_t *at = bytes;
    uint64_t word, last = (uint64_t)size_bytes << 56;
    for (size_t left = size_bytes; left >= 8; left -= 8, at += 8) {
        memcpy(&word, at, 8);
        sip_absorb(&s, word);
    }
    for (size_t i = 0; i < (size_bytes & 7); i++)
        last |= (uint64_t)at[i] << (8 * i);
    sip_absorb(&s, last);
    s.v2 ^= 0xee;
    sip_rounds(&s, 4);
    out[0] = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    s.v1 ^= 0xdd;
    sip_rounds(&s, 4);
    out[1] = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}

/* ---- keys ---- */

int mqd_key_map_open(struct mqd_key_map *map, uint64_t size_bytes, uint32_t load_percent, const uint64_t *seed)
{
    *map = (struct mqd_key_map){.capacity = size_bytes / sizeof *map->entries};
    if (map->capacity < 16)
        map->capacity = 16;
    map->count_max = map->capacity / 100 * load_percent + map->capacity % 100 * load_percent / 100;
    if (map->count_max >= map->capacity)
        map->count_max = map->capacity - 1; /* a probe ends at a free entry */
    void *memory = mmap(NULL, map->capacity * sizeof *map->entries, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return mqd_error_system(errno, "out of memory for a map of %llu keys; lower log.cleaner.dedupe.buffer.size",
                                (unsigned long long)map->count_max);
    map->entries = memory;
    if (seed)
        memcpy(map->seed, seed, sizeof map->seed);
    else if (getrandom(map->seed, sizeof map->seed, 0) != (ssize_t)sizeof map->seed) {
        int error = errno;
        mqd_key_map_close(map);
        return mqd_error_system(error, "cannot get random bytes for a hash seed");
    }
    return 0;
}

void mqd_key_map_close(struct mqd_key_map *map)
{
    if (map->entries)
        munmap(map->entries, map->capacity * sizeof *map->entries);
    map->entries = NULL;
    map->count = 0;
}

/* Finds the entry of a hash, or the free entry where it belongs. */
static struct mqd_key_entry *find(const struct mqd_key_map *map, const uint64_t hash[2])
{
    uint64_t i = (uint64_t)(((unsigned __int128)hash[0] * map->capacity) >> 64);
    while (map->entries[i].offset_plus_1 && (map->entries[i].hash[0] != hash[0] || map->entries[i].hash[1] != hash[1]))
        i = i + 1 == map->capacity ? 0 : i + 1;
    return &map->entries[i];
}

bool mqd_key_map_put(struct mqd_key_map *map, const uint8_t *key, uint32_t key_bytes, int64_t offset)
{
    uint64_t hash[2];
    mqd_siphash(map->seed, key, key_bytes, hash);
    struct mqd_key_entry *entry = find(map, hash);
    if (!entry->offset_plus_1) {
        if (map->count >= map->count_max)
            return false;
        map->count++;
        memcpy(entry->hash, hash, sizeof hash);
    }
    if (entry->offset_plus_1 < offset + 1)
        entry->offset_plus_1 = offset + 1;
    return true;
}

int64_t mqd_key_map_get(const struct mqd_key_map *map, const uint8_t *key, uint32_t key_bytes)
{
    uint64_t hash[2];
    mqd_siphash(map->seed, key, key_bytes, hash);
    return find(map, hash)->offset_plus_1 - 1;
}

/* ---- ids ---- */

/* The slot where the search for an id begins. */
static uint32_t home(const struct mqd_id_map *map, int64_t id)
{
    return (uint32_t)(((uint64_t)id * 0x9e3779b97f4a7c15ull) >> 32) & (map->capacity - 1);
}

static struct mqd_id_entry *id_find(const struct mqd_id_map *map, int64_t id)
{
    uint32_t i = home(map, id);
    while (map->entries[i].used && map->entries[i].id != id)
        i = (i + 1) & (map->capacity - 1);
    return &map->entries[i];
}

static int id_grow(struct mqd_id_map *map)
{
    struct mqd_id_map grown = {.capacity = map->capacity ? map->capacity * 2 : 64, .count = map->count};
    grown.entries = calloc(grown.capacity, sizeof *grown.entries);
    if (!grown.entries)
        return mqd_error_set(ENOMEM, "out of memory for the producers of a log");
    for (uint32_t i = 0; i < map->capacity; i++)
        if (map->entries[i].used)
            *id_find(&grown, map->entries[i].id) = map->entries[i];
    free(map->entries);
    *map = grown;
    return 0;
}

int mqd_id_map_put(struct mqd_id_map *map, int64_t id, int64_t value)
{
    if (map->count * 2 >= map->capacity && id_grow(map) < 0)
        return -1;
    struct mqd_id_entry *entry = id_find(map, id);
    map->count += !entry->used;
    *entry = (struct mqd_id_entry){id, value, true};
    return 0;
}

bool mqd_id_map_get(const struct mqd_id_map *map, int64_t id, int64_t *value)
{
    const struct mqd_id_entry *entry = map->capacity ? id_find(map, id) : NULL;
    if (!entry || !entry->used)
        return false;
    *value = entry->value;
    return true;
}

bool mqd_id_map_remove(struct mqd_id_map *map, int64_t id)
{
    struct mqd_id_entry *entry = map->capacity ? id_find(map, id) : NULL;
    if (!entry || !entry->used)
        return false;
    entry->used = false;
    map->count--;
    uint32_t mask = map->capacity - 1, hole = (uint32_t)(entry - map->entries);
    /* moves later entries back into the hole if that brings them closer to their home slot */
    for (uint32_t i = (hole + 1) & mask; map->entries[i].used; i = (i + 1) & mask) {
        if (((i - home(map, map->entries[i].id)) & mask) >= ((i - hole) & mask)) {
            map->entries[hole] = map->entries[i];
            map->entries[i].used = false;
            hole = i;
        }
    }
    return true;
}

void mqd_id_map_free(struct mqd_id_map *map)
{
    free(map->entries);
    *map = (struct mqd_id_map){0};
}
