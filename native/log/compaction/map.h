/* The tables of a compaction: the last offset of each key, in bounded memory, and an integer per
 * producer id.
 *
 * mqd_key_map: maps a 128-bit hash of the key to the offset of its last record; 24 bytes per entry,
 * linear probing, like Kafka's SkimpyOffsetMap. The hash is SipHash-2-4-128 with a random seed: of
 * two keys with the same hash, one would lose its value, and such a pair cannot be found without
 * knowing the seed.
 *
 *   M1  at most count_max entries (capacity times the load factor): a put without room changes
 *       nothing and returns false.
 *   M2  an offset never decreases.
 *
 * mqd_id_map: maps an int64 (a producer id) to an int64; grows by doubling. A deletion moves later
 * entries back; there are no tombstones. The number of producers in the log bounds its size.
 *
 * Concurrency: one thread.
 */
#ifndef MQD_COMPACT_MAP_H
#define MQD_COMPACT_MAP_H

#include "native.h"

struct mqd_key_entry {
    uint64_t hash[2];
    int64_t offset_plus_1; /* 0 = free */
};

struct mqd_key_map {
    struct mqd_key_entry *entries;
    uint64_t capacity, count, count_max;
    uint64_t seed[2];
};

/* SipHash-2-4 with a 128-bit result. Source: Aumasson and Bernstein's reference. */
void mqd_siphash(const uint64_t seed[2], const void *bytes, size_t size_bytes, uint64_t out[2]);

/* Reserves size_bytes of entries; pages are touched only as they fill. seed NULL: random. -1: out
 * of memory (mqd_error set). */
int mqd_key_map_open(struct mqd_key_map *map, uint64_t size_bytes, uint32_t load_percent, const uint64_t *seed);
void mqd_key_map_close(struct mqd_key_map *map);
/* Returns false if there is no room (M1). */
bool mqd_key_map_put(struct mqd_key_map *map, const uint8_t *key, uint32_t key_bytes, int64_t offset);
/* Returns the offset, or -1 if the key is not present. */
int64_t mqd_key_map_get(const struct mqd_key_map *map, const uint8_t *key, uint32_t key_bytes);

struct mqd_id_entry {
    int64_t id, value;
    bool used;
};
/* zeroed = empty */
struct mqd_id_map {
    struct mqd_id_entry *entries;
    uint32_t capacity, count;
};
int mqd_id_map_put(struct mqd_id_map *map, int64_t id, int64_t value); /* -1: out of memory (mqd_error set) */
bool mqd_id_map_get(const struct mqd_id_map *map, int64_t id, int64_t *value);
bool mqd_id_map_remove(struct mqd_id_map *map, int64_t id);
void mqd_id_map_free(struct mqd_id_map *map);

#endif
