/* Single producer, single consumer ring of 64-byte descriptors in shared memory.
 *
 *     0  uint64  head   reader writes (release): descriptors before it may be overwritten; writer reads (acquire)
 *    64  uint64  tail   writer writes (release): descriptors before it are complete;       reader reads (acquire)
 *   128  struct mqd_descriptor [capacity]
 *
 * head and tail only ever grow; slot of counter c is c & (capacity - 1).
 *
 * Invariants
 *   R1  head <= tail <= head + capacity. Whoever finds the peer's counter outside refuses to go on
 *       with this ring (MQD_E_CORRUPT): a peer's counter is never believed further than the memory
 *       it points at.
 *   R2  what was put becomes visible all at once by publish, or, when the writer dies before,
 *       never.
 *   R3  a restarted writer goes on from the shared tail, a restarted reader from the shared head;
 *       capacity is told by the opener, not by shared memory.
 *
 * Each end is used by one thread and keeps its private copy of what the other end last said, so the
 * peer's line is loaded only when the ring seems full (writer) or empty (reader).
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
    uint64_t head; /* as last seen */
    uint64_t tail; /* with what is not published yet */
    uint64_t published;
};

struct mqd_ring_reader {
    struct mqd_ring *ring;
    uint32_t capacity;
    bool corrupt;
    uint64_t head;
    uint64_t tail; /* as last seen */
};

size_t mqd_ring_size_bytes(uint32_t capacity);
/* capacity: power of two. -1 MQD_E_INVALID, MQD_E_CORRUPT (counters of a former life do not fit). */
int mqd_ring_writer_open(struct mqd_ring_writer *writer, struct mqd_ring *ring, uint32_t capacity);
int mqd_ring_reader_open(struct mqd_ring_reader *reader, struct mqd_ring *ring, uint32_t capacity);

/* Loads the reader's head. Sets `corrupt` for good when it cannot be. */
static inline uint32_t mqd_ring_free_count(struct mqd_ring_writer *writer)
{
    uint64_t head = mqd_load_acquire(&writer->ring->head);
    if (__builtin_expect(writer->tail - head > writer->capacity || head - writer->head > writer->capacity, 0))
        writer->corrupt = true;
    else
        writer->head = head;
    return writer->corrupt ? 0 : writer->capacity - (uint32_t)(writer->tail - writer->head);
}

/* Where the next descriptor goes, NULL when the ring is full or corrupt. Fill it, then
 * mqd_ring_put. */
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

/* How many descriptors wait; one load when none do. 0 for a corrupt ring. */
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

/* Copies out up to max descriptors and gives their slots back. Returns the count. */
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

/* ---- beside the links of native.h ---- */

/* 1 when something is to be drained: a look without fences and without going to sleep, for
 * spinning. */
int mqd_endpoint_waiting(struct mqd_endpoint *endpoint);
uint64_t mqd_endpoint_wake_count(const struct mqd_endpoint *endpoint); /* eventfds written so far */

#endif
