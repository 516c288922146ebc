/* See tls/session.h. OpenSSL reads and writes through our own BIO, `transport`: it takes received
 * bytes from memory, then (only when established) from the socket, and puts encrypted bytes into
 * memory. */
#include "tls/session.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/assert.h"
#include "base/error.h"
#include "tls/context.h"

#define openssl mqd_tls_library
#define RECEIVE_BYTES 16384
#define RECORD_BYTES_MAX 16384
#define BIO_CTRL_EOF 2
#define BIO_FLAGS_RETRY (BIO_FLAGS_READ | BIO_FLAGS_WRITE | BIO_FLAGS_SHOULD_RETRY)
#define X509_V_OK 0

_Atomic uint32_t mqd_tls_key_records_max = 1u << 23;

struct mqd_tls {
    struct mqd_tls_link link;
    SSL *ssl;
    struct mqd_tls_context *context;
    int fd;
    bool established;
    int32_t node;              /* the host that must be at the other end; -1: a client */
    bool node_proved;          /* the certificate has the name of that host */
    uint32_t key_record_count; /* records encrypted with the current key */
    bool drained;              /* the last recv drained the socket */
    bool end_of_stream;
    bool ended;                  /* the connection has ended, with ended_errno and ended_reason */
    int socket_errno;            /* of the recv that failed */
    uint32_t receive_bytes_left; /* of MQD_TLS_READ_BYTES_MAX, for the current read */
    uint8_t *in;                 /* received during the handshake; OpenSSL has taken the first in_taken bytes */
    uint32_t in_bytes, in_taken;
    bool may_be_record; /* the first bytes may be a TLS record */
    bool has_received;  /* at least one byte of the handshake */
    uint8_t *out;       /* encrypted bytes; during a call of mqd_tls_write, in the caller's memory */
    uint32_t out_bytes, out_sent, out_capacity;
    bool out_is_borrowed;
    int ended_errno;
    char ended_reason[176];
};

struct mqd_tls_link *mqd_tls_link(struct mqd_tls *tls)
{
    return &tls->link;
}

/* ---- the transport ---- */

static int retry(BIO *bio, int flag)
{
    openssl.BIO_set_flags(bio, flag | BIO_FLAGS_SHOULD_RETRY);
    return -1;
}

static int transport_read(BIO *bio, char *bytes, int size)
{
    struct mqd_tls *tls = openssl.BIO_get_data(bio);
    openssl.BIO_clear_flags(bio, BIO_FLAGS_RETRY);
    if (size <= 0)
        return 0;
    uint32_t untaken = tls->in_bytes - tls->in_taken;
    if (untaken) {
        uint32_t count = untaken < (uint32_t)size ? untaken : (uint32_t)size;
        memcpy(bytes, tls->in + tls->in_taken, count);
        tls->in_taken += count;
        return (int)count;
    }
    if (!tls->established || tls->receive_bytes_left == 0)
        return retry(bio, BIO_FLAGS_READ);
    uint32_t capacity = tls->receive_bytes_left < (uint32_t)size ? tls->receive_bytes_left : (uint32_t)size;
    ssize_t n = recv(tls->fd, bytes, capacity, MSG_DONTWAIT);
    if (n > 0) {
        tls->receive_bytes_left -= (uint32_t)n;
        tls->drained = (uint32_t)n < capacity;
        return (int)n;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        tls->drained = errno == EAGAIN;
        return retry(bio, BIO_FLAGS_READ);
    }
    tls->end_of_stream = n == 0;
    tls->socket_errno = n == 0 ? 0 : errno;
    return n == 0 ? 0 : -1;
}

static bool out_reserve(struct mqd_tls *tls, uint32_t added_bytes)
{
    uint32_t needed = tls->out_bytes + added_bytes, capacity = tls->out_capacity ? tls->out_capacity : 1024;
    if (needed <= tls->out_capacity)
        return true;
    if (needed > MQD_TLS_UNSENT_BYTES_MAX)
        return false;
    while (capacity < needed)
        capacity *= 2;
    uint8_t *grown = tls->out_is_borrowed ? malloc(capacity) : realloc(tls->out, capacity);
    if (!grown)
        return false;
    if (tls->out_is_borrowed)
        memcpy(grown, tls->out, tls->out_bytes);
    tls->out = grown;
    tls->out_capacity = capacity;
    tls->out_is_borrowed = false;
    return true;
}

static int transport_write(BIO *bio, const char *bytes, int size)
{
    struct mqd_tls *tls = openssl.BIO_get_data(bio);
    openssl.BIO_clear_flags(bio, BIO_FLAGS_RETRY);
    if (size <= 0)
        return 0;
    if (!out_reserve(tls, (uint32_t)size)) {
        tls->socket_errno = ENOBUFS;
        return -1;
    }
    memcpy(tls->out + tls->out_bytes, bytes, (size_t)size);
    tls->out_bytes += (uint32_t)size;
    return size;
}

static long transport_control(BIO *bio, int command, long number, void *pointer)
{
    const struct mqd_tls *tls = openssl.BIO_get_data(bio);
    (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH || (command == BIO_CTRL_EOF && tls && tls->end_of_stream);
}

BIO_METHOD *mqd_tls_transport_create(void)
{
    int type = openssl.BIO_get_new_index();
    BIO_METHOD *method = type < 0 ? NULL : openssl.BIO_meth_new(type | BIO_TYPE_SOURCE_SINK, "mqd");
    if (!method || openssl.BIO_meth_set_read(method, transport_read) != 1 ||
        openssl.BIO_meth_set_write(method, transport_write) != 1 ||
        openssl.BIO_meth_set_ctrl(method, transport_control) != 1)
        return NULL;
    return method;
}

/* ---- creating and freeing ---- */

static struct mqd_tls *create(struct mqd_tls_context *context, int fd, int32_t node)
{
    struct mqd_tls *tls = calloc(1, sizeof *tls);
    BIO *bio = tls ? openssl.BIO_new(openssl.transport) : NULL;
    if (!bio) {
        free(tls);
        mqd_error_system(ENOMEM, "out of memory for a TLS connection");
        return NULL;
    }
    openssl.BIO_set_data(bio, tls);
    openssl.BIO_set_init(bio, 1);
    tls->fd = fd;
    tls->node = node;
    tls->context = context;
    tls->ssl = openssl.SSL_new(mqd_tls_context_hold(context));
    if (!tls->ssl) {
        openssl.BIO_free(bio);
        mqd_tls_context_free(context);
        free(tls);
        openssl.ERR_clear_error();
        mqd_error_system(ENOMEM, "out of memory for a TLS connection");
        return NULL;
    }
    openssl.SSL_set_bio(tls->ssl, bio, bio);
    openssl.SSL_set_accept_state(tls->ssl);
    return tls;
}

struct mqd_tls *mqd_tls_create(struct mqd_tls_context *context, int fd)
{
    return create(context, fd, -1);
}

struct mqd_tls *mqd_tls_create_between_hosts(struct mqd_tls_context *context, int fd, bool is_client, int32_t node)
{
    struct mqd_tls *tls = create(context, fd, node);
    if (tls && is_client)
        openssl.SSL_set_connect_state(tls->ssl);
    return tls;
}

void mqd_tls_free(struct mqd_tls *tls)
{
    if (!tls)
        return;
    openssl.SSL_free(tls->ssl); /* frees the BIO too */
    mqd_tls_context_free(tls->context);
    free(tls->in);
    free(tls->out);
    free(tls);
}

/* ---- the handshake ---- */

ssize_t mqd_tls_receive(struct mqd_tls *tls)
{
    if (tls->in_taken < tls->in_bytes)
        return tls->in_bytes - tls->in_taken;
    if (!tls->in && !(tls->in = malloc(RECEIVE_BYTES))) {
        errno = ENOMEM;
        return -1;
    }
    ssize_t n = recv(tls->fd, tls->in, RECEIVE_BYTES, MSG_DONTWAIT);
    tls->in_taken = 0;
    tls->in_bytes = n > 0 ? (uint32_t)n : 0;
    if (n > 0) {
        if (!tls->has_received)
            /* a handshake record of any version: 22, 3 */
            tls->may_be_record = tls->in[0] == 22 && (n == 1 || tls->in[1] == 3);
        tls->has_received = true;
        return n;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n == 0)
        errno = 0;
    return -1;
}

bool mqd_tls_is_plain(const struct mqd_tls *tls)
{
    return tls->has_received && !tls->may_be_record;
}

static bool has_name(X509 *certificate, const char *name)
{
    STACK *names = openssl.X509_get_ext_d2i(certificate, NID_subject_alt_name, NULL, NULL);
    size_t size_bytes = strlen(name);
    bool found = false;
    for (int i = 0; names && i < openssl.OPENSSL_sk_num(names) && !found; i++) {
        int type;
        const ASN1_STRING *value = openssl.GENERAL_NAME_get0_value(openssl.OPENSSL_sk_value(names, i), &type);
        found = type == GEN_URI && (size_t)openssl.ASN1_STRING_length(value) == size_bytes &&
                memcmp(openssl.ASN1_STRING_get0_data(value), name, size_bytes) == 0;
    }
    openssl.GENERAL_NAMES_free(names);
    return found;
}

/* Checks the name after the chain: a failure here is sent as an alert, so both hosts can report
 * it. */
int mqd_tls_verify_host(int chain_verified, X509_STORE_CTX *verification)
{
    if (chain_verified != 1 || openssl.X509_STORE_CTX_get_error_depth(verification) > 0)
        return chain_verified;
    const SSL *ssl = openssl.X509_STORE_CTX_get_ex_data(verification, openssl.SSL_get_ex_data_X509_STORE_CTX_idx());
    struct mqd_tls *tls = openssl.BIO_get_data(openssl.SSL_get_rbio(ssl));
    char name[32];
    snprintf(name, sizeof name, "mqd://node/%d", tls->node);
    tls->node_proved = has_name(openssl.X509_STORE_CTX_get_current_cert(verification), name);
    if (!tls->node_proved)
        openssl.X509_STORE_CTX_set_error(verification, X509_V_ERR_HOSTNAME_MISMATCH);
    return tls->node_proved;
}

/* Sets ended_reason. */
static void store_reason(struct mqd_tls *tls, int ssl_error)
{
    char reason[128];
    const char *peer = tls->node < 0 ? "client" : "other host";
    mqd_tls_error_take(reason, sizeof reason);
    long verify_result = openssl.SSL_get_verify_result(tls->ssl);
    if (verify_result == X509_V_ERR_HOSTNAME_MISMATCH)
        snprintf(tls->ended_reason, sizeof tls->ended_reason,
                 "the other host's certificate is refused: it is not node %d's, which has the name mqd://node/%d",
                 tls->node, tls->node);
    else if (verify_result != X509_V_OK)
        snprintf(tls->ended_reason, sizeof tls->ended_reason, "the %s's certificate is refused: %s", peer,
                 openssl.X509_verify_cert_error_string(verify_result));
    else if (strstr(reason, " alert "))
        snprintf(tls->ended_reason, sizeof tls->ended_reason, "the %s refuses the connection: %s", peer, reason);
    else
        snprintf(tls->ended_reason, sizeof tls->ended_reason, "%s",
                 reason[0]                        ? reason
                 : ssl_error == SSL_ERROR_SYSCALL ? "too many unsent bytes"
                                                  : "protocol error");
}

int mqd_tls_handshake(struct mqd_tls *tls)
{
    openssl.ERR_clear_error();
    int n = openssl.SSL_do_handshake(tls->ssl);
    if (n == 1 && (tls->node < 0 || tls->node_proved)) {
        tls->established = true;
        return 1;
    }
    if (n == 1)
        return mqd_error_set(EPROTO, "the other host has no certificate that proves that it is node %d", tls->node);
    int error = openssl.SSL_get_error(tls->ssl, n);
    if (error == SSL_ERROR_WANT_READ) {
        free(tls->in); /* so that a client that never continues uses little memory */
        tls->in = NULL;
        tls->in_bytes = tls->in_taken = 0;
        return 0;
    }
    store_reason(tls, error);
    return mqd_error_set(EPROTO, "%s", tls->ended_reason);
}

bool mqd_tls_established(const struct mqd_tls *tls)
{
    return tls->established;
}

void mqd_tls_describe(const struct mqd_tls *tls, char *text, uint32_t size_bytes)
{
    const SSL_CIPHER *cipher = openssl.SSL_get_current_cipher(tls->ssl);
    snprintf(text, size_bytes, "%s, %s%s", openssl.SSL_get_version(tls->ssl),
             cipher ? openssl.SSL_CIPHER_get_name(cipher) : "no cipher",
             openssl.SSL_session_reused(tls->ssl) ? ", resumed" : "");
}

uint32_t mqd_tls_peer_name(const struct mqd_tls *tls, char *name, uint32_t size_bytes)
{
    X509 *certificate = openssl.SSL_get1_peer_certificate(tls->ssl);
    BIO *bio = certificate ? openssl.BIO_new(openssl.BIO_s_mem()) : NULL;
    int length = 0;
    if (bio && openssl.X509_NAME_print_ex(bio, openssl.X509_get_subject_name(certificate), 0, XN_FLAG_RFC2253_UTF8) > 0)
        length = openssl.BIO_read(bio, name, (int)size_bytes);
    char next_byte;
    if (length == (int)size_bytes && openssl.BIO_read(bio, &next_byte, 1) == 1)
        length++;
    openssl.BIO_free(bio);
    openssl.X509_free(certificate);
    openssl.ERR_clear_error();
    return length > 0 ? (uint32_t)length : 0;
}

/* ---- established connections ---- */

/* Sets the error with which the connection has ended, and returns -1. */
static ssize_t fail_ended(struct mqd_tls *tls)
{
    if (tls->ended_reason[0])
        mqd_error_set(tls->ended_errno, "%s", tls->ended_reason);
    errno = tls->ended_errno;
    return -1;
}

/* Called when SSL_read has returned no bytes, and calling it again would not help. */
static void on_end(struct mqd_tls *tls, int error)
{
    tls->ended = true;
    if (error == SSL_ERROR_ZERO_RETURN || (error == SSL_ERROR_SYSCALL && tls->end_of_stream)) {
        tls->ended_errno = 0;
    } else if (tls->socket_errno) {
        tls->ended_errno = tls->socket_errno;
    } else {
        tls->ended_errno = EPROTO;
        store_reason(tls, error);
    }
    openssl.ERR_clear_error();
}

/* Returns the number of bytes from SSL_read, 0 if it needs more input, or -1 if the connection has
 * ended. */
static int read_once(struct mqd_tls *tls, uint8_t *bytes, uint32_t size_bytes)
{
    openssl.ERR_clear_error();
    int n = openssl.SSL_read(tls->ssl, bytes, (int)size_bytes);
    if (n > 0)
        return n;
    int error = openssl.SSL_get_error(tls->ssl, n);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE)
        return 0;
    on_end(tls, error);
    return -1;
}

ssize_t mqd_tls_read(struct mqd_tls *tls, uint8_t *bytes, uint32_t size_bytes, bool *drained)
{
    uint32_t total = 0;
    *drained = false;
    if (tls->ended)
        return fail_ended(tls);
    tls->receive_bytes_left = MQD_TLS_READ_BYTES_MAX;
    tls->drained = false;
    while (total < size_bytes) {
        int n = read_once(tls, bytes + total, size_bytes - total);
        if (n < 0)
            return total ? total : fail_ended(tls);
        total += (uint32_t)n;
        /* SSL_has_pending is 1 even for an incomplete record: the next round then receives, and
         * drains the socket */
        if (tls->drained && (n == 0 || !openssl.SSL_has_pending(tls->ssl))) {
            *drained = true;
            break;
        }
        if (tls->receive_bytes_left == 0)
            break;
    }
    if (tls->in && tls->in_taken == tls->in_bytes) {
        free(tls->in);
        tls->in = NULL;
        tls->in_bytes = tls->in_taken = 0;
    }
    return total;
}

uint32_t mqd_tls_unsent_bytes(const struct mqd_tls *tls)
{
    return tls->out_bytes - tls->out_sent;
}

static void out_drop(struct mqd_tls *tls)
{
    if (!tls->out_is_borrowed)
        free(tls->out);
    tls->out = NULL;
    tls->out_bytes = tls->out_sent = tls->out_capacity = 0;
    tls->out_is_borrowed = false;
}

int mqd_tls_flush(struct mqd_tls *tls)
{
    while (mqd_tls_unsent_bytes(tls)) {
        ssize_t n = send(tls->fd, tls->out + tls->out_sent, mqd_tls_unsent_bytes(tls), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : -1;
        tls->out_sent += (uint32_t)n;
    }
    out_drop(tls);
    return 1;
}

/* Moves the bytes that the socket did not take from the caller's memory to the session's. */
static int out_keep_unsent(struct mqd_tls *tls)
{
    uint32_t unsent = mqd_tls_unsent_bytes(tls);
    if (!tls->out_is_borrowed)
        return 0;
    uint8_t *kept_bytes = unsent ? malloc(unsent) : NULL;
    if (kept_bytes)
        memcpy(kept_bytes, tls->out + tls->out_sent, unsent);
    out_drop(tls);
    if (!unsent)
        return 0;
    if (!kept_bytes) {
        errno = ENOMEM;
        return -1;
    }
    tls->out = kept_bytes;
    tls->out_bytes = tls->out_capacity = unsent;
    return 0;
}

static void out_borrow(struct mqd_tls *tls, uint8_t *scratch, uint32_t size_bytes)
{
    tls->out = scratch;
    tls->out_capacity = size_bytes;
    tls->out_bytes = tls->out_sent = 0;
    tls->out_is_borrowed = true;
}

/* Renews the key when it has encrypted enough records: the next SSL_write begins with the message
 * that announces the new key. */
static void renew_key(struct mqd_tls *tls, uint32_t record_count)
{
    tls->key_record_count += record_count;
    if (tls->key_record_count <= mqd_tls_key_records_max)
        return;
    tls->key_record_count = 0;
    openssl.SSL_key_update(tls->ssl, SSL_KEY_UPDATE_NOT_REQUESTED); /* fails in TLS 1.2, which has no such message */
    openssl.ERR_clear_error();
}

int mqd_tls_write(struct mqd_tls *tls, const uint8_t *bytes, uint32_t size_bytes, uint8_t *scratch)
{
    MQD_ASSERT(!mqd_tls_unsent_bytes(tls), "bytes are still unsent when more must be encrypted");
    out_borrow(tls, scratch, MQD_TLS_SCRATCH_BYTES);
    renew_key(tls, (size_bytes + RECORD_BYTES_MAX - 1) / RECORD_BYTES_MAX);
    openssl.ERR_clear_error();
    /* `transport` takes all bytes, so the result is never WANT and the call is never repeated */
    int n = openssl.SSL_write(tls->ssl, bytes, (int)size_bytes);
    if (n != (int)size_bytes) {
        out_drop(tls);
        openssl.ERR_clear_error();
        errno = EPROTO;
        return -1;
    }
    int flushed = mqd_tls_flush(tls), error = errno;
    int kept = out_keep_unsent(tls);
    if (flushed < 0)
        errno = error;
    return flushed < 0 || kept < 0 ? -1 : 0;
}

void mqd_tls_close(struct mqd_tls *tls)
{
    uint8_t scratch[256];
    if (!tls->established)
        return;
    if (mqd_tls_unsent_bytes(tls)) /* for example an alert, which tells the peer the cause */
        mqd_tls_flush(tls);
    if (tls->ended || mqd_tls_unsent_bytes(tls))
        return;
    out_drop(tls);
    out_borrow(tls, scratch, sizeof scratch);
    openssl.SSL_shutdown(tls->ssl);
    openssl.ERR_clear_error();
    if (mqd_tls_flush(tls) != 1)
        out_drop(tls);
}
