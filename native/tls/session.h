/* One TLS connection over a TCP socket: the handshake, then bytes.
 *
 * The thread that owns the socket receives and sends. The handshake is computed elsewhere
 * (tls/pool.h) on bytes in memory: receive -> handshake -> flush, until it is established. Then the
 * owner reads and writes.
 *
 * Records are encrypted into the caller's memory, up to MQD_TLS_WRITE_BYTES_MAX of plain text at a
 * time, and sent with one system call. Bytes that the socket does not take are kept here and are
 * flushed before more is written: SSL_write never blocks and is never repeated.
 *
 * Bounds: during the handshake, the bytes of one receive. MQD_TLS_UNSENT_BYTES_MAX unsent bytes: a
 * peer that makes us send more and does not read is disconnected. MQD_TLS_READ_BYTES_MAX received
 * bytes for one read, even if they contain only key updates and no data.
 * Concurrency: one thread at a time.
 */
#ifndef MQD_TLS_SESSION_H
#define MQD_TLS_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* five records: a fetch response of 64 KiB and its headers need one send */
#define MQD_TLS_WRITE_BYTES_MAX (5 * 16384u)
#define MQD_TLS_SCRATCH_BYTES (MQD_TLS_WRITE_BYTES_MAX + 4096u)
#define MQD_TLS_UNSENT_BYTES_MAX 262144u
#define MQD_TLS_READ_BYTES_MAX 98304u
/* TLS 1.3: records encrypted with one key, far below the bound of RFC 8446, section 5.5 (2^24.5 for
 * AES-GCM); tests make it small */
extern _Atomic uint32_t mqd_tls_key_records_max;

struct mqd_tls;
struct mqd_tls_context;

/* Returns NULL and sets mqd_error on failure. The caller keeps ownership of fd. */
struct mqd_tls *mqd_tls_create(struct mqd_tls_context *context, int fd);
/* Creates a session between hosts, with a context for such sessions. `is_client`: this host opened
 * the connection. The other host's certificate must have the URI "mqd://node/N", with N = `node`,
 * among its alternative names. Otherwise the handshake fails, as it does for a certificate of
 * another CA. */
struct mqd_tls *mqd_tls_create_between_hosts(struct mqd_tls_context *context, int fd, bool is_client, int32_t node);
void mqd_tls_free(struct mqd_tls *tls);

/* ---- the handshake ---- */

/* Receives the bytes that the next step needs. Returns their number; 0 if none are available; or -1
 * on an error (errno), or if the peer has closed the connection (errno 0). */
ssize_t mqd_tls_receive(struct mqd_tls *tls);
/* whether the first bytes are not a TLS record: the peer sends plain text */
bool mqd_tls_is_plain(const struct mqd_tls *tls);
/* Computes the next step, without a system call that waits. Returns 1 if the session is
 * established, 0 if more bytes are needed, or -1 with the reason if it has failed. Call
 * mqd_tls_flush afterwards, whatever the result. */
int mqd_tls_handshake(struct mqd_tls *tls);
/* whether the handshake is complete */
bool mqd_tls_established(const struct mqd_tls *tls);
/* "TLSv1.3, TLS_AES_128_GCM_SHA256" */
void mqd_tls_describe(const struct mqd_tls *tls, char *text, uint32_t size_bytes);
/* The distinguished name of the client's verified certificate (RFC 2253, UTF-8). Returns the name's
 * length; 0: the client has no certificate; more than size_bytes: the name does not fit. Not
 * terminated. */
uint32_t mqd_tls_peer_name(const struct mqd_tls *tls, char *name, uint32_t size_bytes);

/* ---- established ---- */

/* Returns the number of bytes read; 0 if there are none now; or -1 if the peer has closed the
 * connection (errno 0), on a system error (errno), or on an invalid record (errno EPROTO, and the
 * reason). *drained: nothing is left in the socket or here; epoll reports the next byte. */
ssize_t mqd_tls_read(struct mqd_tls *tls, uint8_t *bytes, uint32_t size_bytes, bool *drained);
/* Encrypts and sends up to MQD_TLS_WRITE_BYTES_MAX bytes. May be called only while nothing is
 * unsent. Returns 0 if all bytes are taken, or -1 (errno). `scratch`: MQD_TLS_SCRATCH_BYTES, used
 * only during the call. */
int mqd_tls_write(struct mqd_tls *tls, const uint8_t *bytes, uint32_t size_bytes, uint8_t *scratch);
/* Sends the unsent bytes. Returns 1 if none are left, 0 if the socket is full, or -1 (errno). */
int mqd_tls_flush(struct mqd_tls *tls);
uint32_t mqd_tls_unsent_bytes(const struct mqd_tls *tls);
/* Sends close_notify, if that is possible without waiting. */
void mqd_tls_close(struct mqd_tls *tls);

/* ---- for the pool and the owner ---- */

struct mqd_tls_link {
    struct mqd_tls *next;
    uint64_t token; /* of the owner */
    bool lent;      /* to the pool */
    bool abandoned; /* the owner has closed the connection meanwhile */
    int result;     /* of the handshake */
    char reason[160];
};
struct mqd_tls_link *mqd_tls_link(struct mqd_tls *tls);

#endif
