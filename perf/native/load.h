/* Declarations shared by the files of the load generator. It uses almost no CPU: frames are encoded
 * once, replies are only counted, so that it measures the broker and not a client library. One thread;
 * loopback only; every run is bounded by seconds or by a count.
 */
#ifndef MQD_LOAD_H
#define MQD_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* ---- arguments: NAME=VALUE words ---- */

struct arguments {
    int count;
    char **word;
};
/* otherwise NULL: the argument is required */
const char *argument_text(const struct arguments *arguments, const char *name, const char *otherwise);
/* otherwise INT64_MIN: the argument is required */
int64_t argument_number(const struct arguments *arguments, const char *name, int64_t otherwise);

/* ---- bytes ---- */

struct bytes {
    uint8_t *at;
    size_t size;
};
void die(const char *what);
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
int64_t now_ns(void);
uint32_t get32(const uint8_t *p);
uint64_t get64(const uint8_t *p);
void set64(uint8_t *p, uint64_t v);
void *allocate(size_t size);
/* prints a JSON member and `more`; sorts ns */
void percentiles(const char *what, int64_t *ns, int count, const char *more);

/* ---- frames, with their length word ---- */

/* v8; batch_bytes is met exactly where possible */
struct bytes produce_frame(const char *topic, int partition, size_t batch_bytes, int records, int acks);
/* v11; the offset is set by fetch_frame_offset */
struct bytes fetch_frame(const char *topic, int partition, int bytes_max, int bytes_min, int wait_ms);
void fetch_frame_offset(struct bytes *frame, int64_t offset);
struct bytes log_end_frame(const char *topic);

/* For a reply without its length word, with a single partition. */
int produce_reply_error(const uint8_t *reply, size_t size, size_t topic_bytes);
struct fetched {
    int error;
    uint32_t records_bytes;
    const uint8_t *records;
};
struct fetched fetch_reply(const uint8_t *reply, size_t size, size_t topic_bytes);
int64_t next_offset(const uint8_t *records, uint32_t size, int64_t offset); /* after the last whole batch */

/* ---- sockets ---- */

int dial(int port);
void not_blocking(int fd);
void send_all(int fd, const uint8_t *bytes, size_t size);
void receive_all(int fd, uint8_t *bytes, size_t size);
struct room {
    uint8_t *at;
    size_t capacity;
    uint32_t size;
};
void receive_frame(int fd, struct room *room); /* blocking; grows the room */

/* ---- TLS (load_secure.c) ---- */

void *secure_open(int fd); /* a session; fd blocks during this call */
/* like send and recv on a non-blocking socket */
ssize_t secure_send(void *session, const uint8_t *bytes, size_t size);
ssize_t secure_receive(void *session, uint8_t *bytes, size_t size);

/* ---- commands ---- */

int produce_main(const struct arguments *arguments);
int fetch_main(const struct arguments *arguments);
int parked_main(const struct arguments *arguments);
int latency_main(const struct arguments *arguments);
int paced_main(const struct arguments *arguments);
int end_to_end_main(const struct arguments *arguments);
int sync_main(const struct arguments *arguments);
int files_main(const struct arguments *arguments);

#endif
