/* Single producer, single consumer ring of 64-byte descriptors in shared memory.
 *
 *     0  uint64  head: descriptors before it may be overwritten; the reader stores it (release),
 *                  the writer loads it (acquire)
 *    64  uint64  tail: descriptors before it are complete; the writer stores it (release), the
 *                  reader loads it (acquire)
 *   128  struct mqd_descriptor [capacity]
 *
 * head and tail only increase; the slot of counter c is c & (capacity - 1).
 *
 * Invariants
 *   R1  head <= tail <= head + capacity. A side that finds the peer's counter outside this range
 *       stops using the ring (MQD_E_CORRUPT): a peer's counter is never trusted beyond the ring's
 *       memory.
 *   R2  a publish makes all descriptors that were put since the previous publish visible at once;
 *       if the writer dies before it, none of them becomes visible.
 *   R3  a restarted writer continues from the shared tail, a restarted reader from the shared head;
 *       the capacity comes from the opener, not from shared memory.
 *
 * Each end is used by one thread and keeps a private copy of the other end's counter, so the peer's
 * cache line is loaded only when the ring seems full (writer) or empty (reader).
 */
#ifndef MQD_RING_H
#define MQD_RING_H

#include <stddef.h>

#include "base/atomic.h"
#include "shm/layout.h"

struct mqd_ring {
    uint64_t head;
    uint8_t pad0[MQD_CACHE_LINE - 8];
    uint64_t tail;
    uint8_t pad1[MQD_CACHE_LINE - 8];
    struct mqd_descriptor descriptor[];
};
_Static_assert(offsetof(struct mqd_ring, tail) == MQD_CACHE_LINE, "reader's and writer's words on lines of their own");
_Static_assert(offsetof(struct mqd_ring, descriptor) == 2 * MQD_CACHE_LINE &&
                   sizeof(struct mqd_ring) == 2 * MQD_CACHE_LINE,
               "descriptors begin a line");
_Static_assert((MQD_LINK_DESCRIPTOR_COUNT & (MQD_LINK_DESCRIPTOR_COUNT - 1)) == 0, "capacity is a power of two");

struct mqd_ring_writer {
    struct mqd_ring *ring;
    uint32_t capacity;
    bool corrupt;
    uint64_t head; /* last value seen */
    uint64_t tail; /* including unpublished descriptors */
    uint64_t published;
};

struct mqd_ring_reader {
    struct mqd_ring *ring;
    uint32_t capacity;
    bool corrupt;
    uint64_t head;
    uint64_t tail; /* last value seen */
};

size_t mqd_ring_size_bytes(uint32_t capacity);
/* `capacity` must be a power of two. Returns 0; or -1 with MQD_E_INVALID, or with MQD_E_CORRUPT if
 * the counters that an earlier process left are inconsistent. */
int mqd_ring_writer_open(struct mqd_ring_writer *writer, struct mqd_ring *ring, uint32_t capacity);
int mqd_ring_reader_open(struct mqd_ring_reader *reader, struct mqd_ring *ring, uint32_t capacity);

/* Loads the reader's head. Sets `corrupt` permanently when the value is impossible. */
static inline uint32_t mqd_ring_free_count(struct mqd_ring_writer *writer)
{
    uint64_t head = mqd_load_acquire(&writer->ring->head);
    if (__builtin_expect(writer->tail - head > writer->capacity || head - writer->head > writer->capacity, 0))
        writer->corrupt = true;
    else
        writer->head = head;
    return writer->corrupt ? 0 : writer->capacity - (uint32_t)(writer->tail - writer->head);
}

/* Returns the slot of the next descriptor, or NULL if the ring is full or corrupt. Fill in the
 * slot, then call mqd_ring_put. */
static inline struct mqd_descriptor *mqd_ring_next(struct mqd_ring_writer *writer)
{
    if (writer->tail - writer->head >= writer->capacity && mqd_ring_free_count(writer) == 0)
        return NULL;
    return writer->corrupt ? NULL : &writer->ring->descriptor[writer->tail & (writer->capacity - 1)];
}

static inline void mqd_ring_put(struct mqd_ring_writer *writer)
{
    writer->tail++;
}

static inline void mqd_ring_publish(struct mqd_ring_writer *writer)
{
    mqd_store_release(&writer->ring->tail, writer->tail);
    writer->published = writer->tail;
}

/* The number of waiting descriptors; one load when there are none. 0 for a corrupt ring. */
static inline uint32_t mqd_ring_waiting_count(struct mqd_ring_reader *reader)
{
    if (reader->tail == reader->head) {
        uint64_t tail = mqd_load_acquire(&reader->ring->tail);
        if (__builtin_expect(tail - reader->head > reader->capacity, 0))
            reader->corrupt = true;
        else
            reader->tail = tail;
    }
    return (uint32_t)(reader->tail - reader->head);
}

/* Copies out up to max descriptors and frees their slots. Returns the count. */
static inline uint32_t mqd_ring_take(struct mqd_ring_reader *reader, struct mqd_descriptor *out, uint32_t max)
{
    uint32_t count = mqd_ring_waiting_count(reader);
    if (count > max)
        count = max;
    for (uint32_t i = 0; i < count; i++)
        out[i] = reader->ring->descriptor[(reader->head + i) & (reader->capacity - 1)];
    if (count) {
        reader->head += count;
        mqd_store_release(&reader->ring->head, reader->head);
    }
    return count;
}

/* ---- additions to the links of native.h ---- */

/* Like mqd_endpoint_send, for a descriptor that can wait until the peer is awake for another
 * reason. Wakes the peer only when at least half of the ring is used. */
int mqd_endpoint_send_quietly(struct mqd_endpoint *endpoint, uint32_t to, const struct mqd_descriptor *descriptor);

/* Returns 1 if descriptors are waiting. Uses no fences and does not announce a sleep: for
 * spinning. */
int mqd_endpoint_has_inbound(struct mqd_endpoint *endpoint);
uint64_t mqd_endpoint_wake_count(const struct mqd_endpoint *endpoint); /* eventfds written so far */

#endif
