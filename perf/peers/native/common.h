/* Code shared by the load generators: arguments NAME=VALUE, the clock, the records to send, exact
 * percentiles.
 *
 * Latency is measured by an open loop: record i is due at start + i / rate whether or not the ones
 * before it were acknowledged, and its latency runs from when it was due, not from when it was sent.
 * A broker (or a client) that stalls is charged for every record that had to wait: no coordinated
 * omission.
 */
#ifndef MQD_PEERS_COMMON_H
#define MQD_PEERS_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct arguments {
    int count;
    char **word;
};
/* otherwise NULL: the argument is required */
const char *argument_text(const struct arguments *arguments, const char *name, const char *otherwise);
/* otherwise INT64_MIN: the argument is required */
int64_t argument_number(const struct arguments *arguments, const char *name, int64_t otherwise);

void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
void *allocate(size_t size);
int64_t now_ns(void);
double client_cpu_seconds(void);

/* Records are letters A to Z, like those of Kafka's ProducerPerformance: about 4.7 bits a byte. Records
 * near each other share no text, so that a codec compresses a batch no better than a single record. */
#define POOL_BYTES ((size_t)64 << 20)
#define RECORD_BYTES_MAX ((size_t)1 << 20)
struct pool {
    uint8_t *bytes;
    size_t at;
};
void pool_make(struct pool *pool);
uint8_t *pool_next(struct pool *pool, size_t size); /* valid, and not returned again, for the next POOL_BYTES */

/* The first eight bytes of a record: when it was due. */
void stamp_write(uint8_t *record, int64_t due_ns);
int64_t stamp_read(const uint8_t *record);

/* Single writer. Keeps every latency: percentiles are exact. */
struct samples {
    int64_t *ns;
    size_t count, capacity;
};
void samples_make(struct samples *samples, size_t capacity);
/* drops samples beyond the capacity: callers make it as large as the count of records */
void samples_add(struct samples *samples, int64_t ns);
void samples_print(const char *name, struct samples *samples,
                   const char *after); /* "name": {"count": .., "p50_us": ..}; sorts */

/* Sleeps until `when`; returns immediately when it has passed. */
void sleep_until_ns(int64_t when);

#endif
