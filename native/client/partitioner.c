/* Chooses the partition of a key as librdkafka's partitioners do; murmur2 is also the Java client's
 * partitioner. A key must go to the same partition as with other clients: the results must not
 * change.
 *
 *   consistent         CRC-32 (zlib's) of the key; a missing key is treated as an empty key
 *   consistent_random  like consistent; no key or an empty key: any partition
 *   murmur2            Java's murmur2, sign bit cleared; a missing key is treated as an empty key
 *   murmur2_random     like murmur2; no key: any partition
 *   fnv1a              Sarama's FNV-1a (absolute value); a missing key is treated as an empty key
 *   fnv1a_random       like fnv1a; no key: any partition
 *
 * Source: librdkafka's CONFIGURATION.md (`partitioner`), Austin Appleby's MurmurHash2, RFC 1952
 * (CRC-32), the FNV draft by Fowler, Noll and Vo.
 */
#include "client/client.h"

#include <string.h>

#include "base/error.h"

static uint32_t crc32_table[256];

__attribute__((constructor)) static void fill_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = value >> 1 ^ (0xedb88320u & (0u - (value & 1)));
        crc32_table[i] = value;
    }
}

static uint32_t crc32(const uint8_t *bytes, uint32_t size)
{
    uint32_t crc = UINT32_MAX;
    for (uint32_t i = 0; i < size; i++)
        crc = crc >> 8 ^ crc32_table[(crc ^ bytes[i]) & 0xff];
    return ~crc;
}

static uint32_t murmur2(const uint8_t *bytes, uint32_t size)
{
    const uint32_t m = 0x5bd1e995;
    uint32_t hash = 0x9747b28c ^ size;
    for (; size >= 4; bytes += 4, size -= 4) {
        uint32_t k;
        memcpy(&k, bytes, 4); /* little endian */
        k *= m;
        k ^= k >> 24;
        hash = hash * m ^ k * m;
    }
    if (size > 2)
        hash ^= (uint32_t)bytes[2] << 16;
    if (size > 1)
        hash ^= (uint32_t)bytes[1] << 8;
    if (size > 0)
        hash = (hash ^ bytes[0]) * m;
    hash ^= hash >> 13;
    hash *= m;
    return hash ^ hash >> 15;
}

static uint32_t fnv1a(const uint8_t *bytes, uint32_t size)
{
    uint32_t hash = 0x811c9dc5;
    for (uint32_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * 0x01000193;
    return hash & 0x80000000 ? 0u - hash : hash;
}

/* splitmix64; takes the high half of a product instead of a remainder. */
static int32_t random_partition(int32_t partition_count, uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (int32_t)(((z ^ (z >> 31)) >> 32) * (uint32_t)partition_count >> 32);
}

int32_t mqd_partition_for(uint32_t partitioner, const uint8_t *key, int32_t key_bytes, int32_t partition_count,
                          uint64_t *random_state)
{
    if (partition_count < 1)
        return -1;
    uint32_t count = (uint32_t)partition_count, size = key_bytes > 0 ? (uint32_t)key_bytes : 0;
    switch (partitioner) {
    case MQD_PARTITIONER_CONSISTENT_RANDOM:
        if (size == 0)
            return random_partition(partition_count, random_state);
        return (int32_t)(crc32(key, size) % count);
    case MQD_PARTITIONER_CONSISTENT:
        return (int32_t)(crc32(key, size) % count);
    case MQD_PARTITIONER_MURMUR2_RANDOM:
        if (key_bytes < 0)
            return random_partition(partition_count, random_state);
        return (int32_t)((murmur2(key, size) & INT32_MAX) % count);
    case MQD_PARTITIONER_MURMUR2:
        return (int32_t)((murmur2(key, size) & INT32_MAX) % count);
    case MQD_PARTITIONER_FNV1A_RANDOM:
        if (key_bytes < 0)
            return random_partition(partition_count, random_state);
        return (int32_t)(fnv1a(key, size) % count);
    case MQD_PARTITIONER_FNV1A:
        return (int32_t)(fnv1a(key, size) % count);
    default:
        return random_partition(partition_count, random_state);
    }
}

int mqd_partitions_for(uint32_t partitioner, const uint8_t *keys, const int32_t *key_bytes, uint32_t count,
                       int32_t partition_count, int32_t keyless_partition, int32_t *partitions)
{
    bool by_key = partitioner == MQD_PARTITIONER_MURMUR2_RANDOM || partitioner == MQD_PARTITIONER_FNV1A_RANDOM;
    if (!by_key || partition_count < 1 || keyless_partition < 0 || keyless_partition >= partition_count)
        return mqd_error_set(MQD_E_INVALID,
                             "invalid partitioner %u, partition count %d, or partition %d for records without a key",
                             partitioner, partition_count, keyless_partition);
    for (uint32_t i = 0; i < count; i++) {
        int32_t size_bytes = key_bytes ? key_bytes[i] : -1;
        if (size_bytes < -1)
            return mqd_error_set(MQD_E_INVALID, "invalid size of a key: %d bytes", size_bytes);
        if (partitions[i] < 0)
            partitions[i] = size_bytes < 0 ? keyless_partition
                                           : mqd_partition_for(partitioner, keys, size_bytes, partition_count, NULL);
        if (size_bytes > 0)
            keys += size_bytes;
    }
    return 0;
}
