/* One process's side of all its links: rings to and from every endpoint, and the sleep protocol.
 *
 * Links segment: rings of MQD_LINK_DESCRIPTOR_COUNT, index from * endpoint_count + to.
 *
 * Sleeping (Dekker's pattern; native/tests/shm/test_sleep_model.c checks every interleaving):
 *   consumer  S1 sleeping = 1; S2 full fence; S3 check all inbound rings; S4 block on the eventfd
 *             if they are empty
 *   producer  P1 publish tails; P2 full fence; P3 if sleeping, and exchange(sleeping, 0) was 1:
 *             write the eventfd
 *
 * With the fences it is impossible that both S3 misses the tail and P3 misses the flag. Several
 * producers may exchange; one of them writes. An unnecessary wake-up only costs another check. An
 * eventfd is never reset here: a level-triggered caller reads it before mqd_endpoint_drain;
 * edge-triggered waiting needs no read.
 *
 * Invariants
 *   K1  no staged descriptor waits during a sleep: prepare_sleep flushes first. Descriptors that
 *       were sent quietly may wait in their ring while the consumer sleeps.
 *   K2  descriptors of one link are taken in the order in which they were sent; no link waits for
 *       more than one round of the others.
 *   K3  drain treats a corrupt link (R1 of shm/ring.h) as empty, and send treats it as full; the
 *       other links continue.
 *   K4  if a producer dies between P1 and the end of P3, a consumer may stay asleep although its
 *       ring has descriptors. Its flag may already show it as awake, so that no other process wakes
 *       it either. (The ring may also be empty: the consumer took the descriptors and slept again
 *       before the flag was exchanged.) So the producer's successor writes all eventfds (wake_all),
 *       and a consumer that sleeps without a time limit checks its rings when it is notified of the
 *       death.
 * Concurrency: one thread per endpoint.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "shm/ring.h"

#define ROUND_DESCRIPTOR_COUNT 32u /* drain takes at most this many from a link before it continues with the next */

struct mqd_endpoint {
    uint32_t self;
    uint32_t endpoint_count;
    uint32_t first_peer; /* the peer whose link mqd_endpoint_drain reads first */
    uint64_t generation;
    uint64_t wake_count;
    uint32_t *sleeping; /* this endpoint's word */
    uint64_t staged[2]; /* one bit per link: it has descriptors that are not published yet */
    uint64_t wakes[2];  /* one bit per link: the flush must wake the peer */
    int eventfd[MQD_ENDPOINT_COUNT_MAX];
    uint32_t *peer_sleeping[MQD_ENDPOINT_COUNT_MAX];
    struct mqd_ring_writer out[MQD_ENDPOINT_COUNT_MAX];
    struct mqd_ring_reader in[MQD_ENDPOINT_COUNT_MAX];
};
_Static_assert(MQD_ENDPOINT_COUNT_MAX <= 128, "two words of bits");

size_t mqd_links_size_bytes(uint32_t endpoint_count)
{
    return (size_t)endpoint_count * endpoint_count * mqd_ring_size_bytes(MQD_LINK_DESCRIPTOR_COUNT);
}

static struct mqd_ring *ring_at(void *links, uint32_t endpoint_count, uint32_t from, uint32_t to)
{
    return (struct mqd_ring *)((uint8_t *)links +
                               ((size_t)from * endpoint_count + to) * mqd_ring_size_bytes(MQD_LINK_DESCRIPTOR_COUNT));
}

int mqd_links_format(void *links, size_t size_bytes, uint32_t endpoint_count)
{
    if (endpoint_count < 1 || endpoint_count > MQD_ENDPOINT_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "%u endpoints; there must be 1 to %d", endpoint_count,
                             MQD_ENDPOINT_COUNT_MAX);
    if (size_bytes < mqd_links_size_bytes(endpoint_count))
        return mqd_error_set(MQD_E_INVALID, "links of %u endpoints need %zu bytes, the segment has %zu", endpoint_count,
                             mqd_links_size_bytes(endpoint_count), size_bytes);
    for (uint32_t from = 0; from < endpoint_count; from++)
        for (uint32_t to = 0; to < endpoint_count; to++) {
            struct mqd_ring *ring = ring_at(links, endpoint_count, from, to);
            mqd_store_relaxed(&ring->head, 0);
            mqd_store_release(&ring->tail, 0);
        }
    return 0;
}

static int open_rings(struct mqd_endpoint *endpoint, void *links)
{
    for (uint32_t peer = 0; peer < endpoint->endpoint_count; peer++) {
        struct mqd_ring *out = ring_at(links, endpoint->endpoint_count, endpoint->self, peer);
        struct mqd_ring *in = ring_at(links, endpoint->endpoint_count, peer, endpoint->self);
        if (mqd_ring_writer_open(&endpoint->out[peer], out, MQD_LINK_DESCRIPTOR_COUNT) != 0 ||
            mqd_ring_reader_open(&endpoint->in[peer], in, MQD_LINK_DESCRIPTOR_COUNT) != 0)
            return mqd_error_wrap("link between endpoints %u and %u", endpoint->self, peer);
    }
    return 0;
}

static void notify(struct mqd_endpoint *endpoint, uint32_t to)
{
    const uint64_t one = 1;
    ssize_t written;
    endpoint->wake_count++;
    do /* EAGAIN means that the counter is full, so the consumer is already awake */
        written = endpoint->eventfd[to] < 0 ? 0 : write(endpoint->eventfd[to], &one, sizeof one);
    while (written < 0 && errno == EINTR);
}

static void wake(struct mqd_endpoint *endpoint, uint32_t to)
{
    if (mqd_load_relaxed(endpoint->peer_sleeping[to]) && mqd_exchange(endpoint->peer_sleeping[to], 0))
        notify(endpoint, to);
}

/* K4: writes all eventfds, regardless of flags and rings. */
static void wake_all(struct mqd_endpoint *endpoint)
{
    for (uint32_t peer = 0; peer < endpoint->endpoint_count; peer++)
        if (peer != endpoint->self)
            notify(endpoint, peer);
}

struct mqd_endpoint *mqd_endpoint_open(void *control, void *links, uint32_t self, uint32_t endpoint_count,
                                       const int *eventfds)
{
    if (endpoint_count < 1 || endpoint_count > MQD_ENDPOINT_COUNT_MAX || self >= endpoint_count) {
        mqd_error_set(MQD_E_INVALID, "invalid endpoint %u of %u; there must be 1 to %d endpoints", self, endpoint_count,
                      MQD_ENDPOINT_COUNT_MAX);
        return NULL;
    }
    struct mqd_endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (!endpoint) {
        mqd_error_system(ENOMEM, "out of memory for an endpoint's links");
        return NULL;
    }
    endpoint->self = self;
    endpoint->endpoint_count = endpoint_count;
    for (uint32_t peer = 0; peer < endpoint_count; peer++) {
        endpoint->eventfd[peer] = eventfds ? eventfds[peer] : -1;
        endpoint->peer_sleeping[peer] = &mqd_control_endpoint(control, peer)->sleeping;
    }
    endpoint->sleeping = endpoint->peer_sleeping[self];
    endpoint->generation = mqd_load_acquire(&mqd_control_endpoint(control, self)->generation);
    if (open_rings(endpoint, links) != 0) {
        free(endpoint);
        return NULL;
    }
    mqd_store_seq_cst(endpoint->sleeping, 0); /* a predecessor may have died while it slept */
    wake_all(endpoint);
    return endpoint;
}

void mqd_endpoint_close(struct mqd_endpoint *endpoint)
{
    if (!endpoint)
        return;
    mqd_endpoint_flush(endpoint);
    free(endpoint);
}

static int stage(struct mqd_endpoint *endpoint, uint32_t to, const struct mqd_descriptor *descriptor)
{
    if (to >= endpoint->endpoint_count)
        return mqd_error_set(MQD_E_INVALID, "there is no endpoint %u", to);
    struct mqd_ring_writer *writer = &endpoint->out[to];
    struct mqd_descriptor *descriptor_out = mqd_ring_next(writer);
    if (!descriptor_out)
        return writer->corrupt
                   ? mqd_error_set(MQD_E_CORRUPT,
                                   "link to endpoint %u: ring counters are impossible; restart the whole broker", to)
                   : mqd_error_set_static(MQD_E_FULL, "the link has no free descriptor; its reader is behind");
    *descriptor_out = *descriptor;
    descriptor_out->generation = endpoint->generation;
    mqd_ring_put(writer);
    endpoint->staged[to >> 6] |= 1ull << (to & 63);
    return 0;
}

int mqd_endpoint_send(struct mqd_endpoint *endpoint, uint32_t to, const struct mqd_descriptor *descriptor)
{
    int result = stage(endpoint, to, descriptor);
    if (result == 0)
        endpoint->wakes[to >> 6] |= 1ull << (to & 63);
    return result;
}

int mqd_endpoint_send_quietly(struct mqd_endpoint *endpoint, uint32_t to, const struct mqd_descriptor *descriptor)
{
    if (mqd_endpoint_free_count(endpoint, to) <= MQD_LINK_DESCRIPTOR_COUNT / 2)
        return mqd_endpoint_send(endpoint, to, descriptor);
    return stage(endpoint, to, descriptor);
}

uint32_t mqd_endpoint_free_count(struct mqd_endpoint *endpoint, uint32_t to)
{
    return to < endpoint->endpoint_count ? mqd_ring_free_count(&endpoint->out[to]) : 0;
}

void mqd_endpoint_flush(struct mqd_endpoint *endpoint)
{
    uint64_t staged[2] = {endpoint->staged[0], endpoint->staged[1]};
    if (!(staged[0] | staged[1]))
        return;
    for (int word = 0; word < 2; word++)
        for (uint64_t bits = staged[word]; bits; bits &= bits - 1)
            mqd_ring_publish(&endpoint->out[word * 64 + __builtin_ctzll(bits)]);
    mqd_fence_full(); /* P2 */
    for (int word = 0; word < 2; word++)
        for (uint64_t bits = endpoint->wakes[word]; bits; bits &= bits - 1)
            wake(endpoint, (uint32_t)(word * 64 + __builtin_ctzll(bits)));
    for (int word = 0; word < 2; word++)
        endpoint->staged[word] = endpoint->wakes[word] = 0;
}

int mqd_endpoint_drain(struct mqd_endpoint *endpoint, struct mqd_descriptor *out, uint32_t *from, uint32_t max)
{
    uint32_t total = 0;
    uint32_t idle = 0; /* consecutive links found empty */
    uint32_t peer = endpoint->first_peer;
    while (total < max && idle < endpoint->endpoint_count) {
        uint32_t limit = max - total < ROUND_DESCRIPTOR_COUNT ? max - total : ROUND_DESCRIPTOR_COUNT;
        uint32_t count = mqd_ring_take(&endpoint->in[peer], out + total, limit);
        for (uint32_t i = 0; i < count; i++)
            from[total + i] = peer;
        total += count;
        idle = count ? 0 : idle + 1;
        peer = peer + 1 == endpoint->endpoint_count ? 0 : peer + 1;
    }
    endpoint->first_peer = peer;
    return (int)total;
}

int mqd_endpoint_has_inbound(struct mqd_endpoint *endpoint)
{
    for (uint32_t peer = 0; peer < endpoint->endpoint_count; peer++)
        if (mqd_ring_waiting_count(&endpoint->in[peer]))
            return 1;
    return 0;
}

int mqd_endpoint_prepare_sleep(struct mqd_endpoint *endpoint)
{
    mqd_endpoint_flush(endpoint);
    mqd_store_seq_cst(endpoint->sleeping, 1); /* S1 */
    mqd_fence_full();                         /* S2 */
    if (!mqd_endpoint_has_inbound(endpoint))  /* S3 */
        return 0;
    mqd_endpoint_end_sleep(endpoint);
    return 1;
}

void mqd_endpoint_end_sleep(struct mqd_endpoint *endpoint)
{
    mqd_store_relaxed(endpoint->sleeping, 0);
}

uint64_t mqd_endpoint_wake_count(const struct mqd_endpoint *endpoint)
{
    return endpoint->wake_count;
}
