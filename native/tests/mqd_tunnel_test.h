/* A client as in the other tests of the reactor, through a thread that does TLS. Listener 0 of
 * worker 0 is plain, listener 1 has TLS. */
#ifndef MQD_TUNNEL_TEST_H
#define MQD_TUNNEL_TEST_H

#include "mqd_reactor_test.h"

#include "mqd_tls_test.h"

enum { PLAIN, SECURE };

struct tunnel {
    struct client client; /* sends plain text */
    struct tls_client tls;
    int far;              /* the other end of client.fd */
    uint32_t key_updates; /* how many to perform */
    bool one_by_one;      /* sends single bytes */
    pthread_t thread;
};

struct half {
    uint8_t bytes[65536];
    int size, at;
};

static bool wants(struct tunnel *tunnel, int n)
{
    int error = openssl.SSL_get_error(tunnel->tls.ssl, n);
    return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE;
}

/* Moves all available bytes; false: one side has ended. */
static bool move(struct tunnel *tunnel, struct half *out, struct half *in)
{
    bool single = __atomic_load_n(&tunnel->one_by_one, __ATOMIC_SEQ_CST);
    if (out->at == out->size) {
        ssize_t n = recv(tunnel->far, out->bytes, single ? 1 : sizeof out->bytes, MSG_DONTWAIT);
        if (n == 0)
            return false;
        out->size = n > 0 ? (int)n : 0;
        out->at = 0;
    }
    if (__atomic_load_n(&tunnel->key_updates, __ATOMIC_SEQ_CST)) {
        __atomic_sub_fetch(&tunnel->key_updates, 1, __ATOMIC_SEQ_CST);
        openssl.SSL_key_update(tunnel->tls.ssl, SSL_KEY_UPDATE_REQUESTED);
        openssl.SSL_do_handshake(tunnel->tls.ssl);
    }
    if (out->at < out->size) {
        int n = openssl.SSL_write(tunnel->tls.ssl, out->bytes + out->at, out->size - out->at);
        if (n <= 0 && !wants(tunnel, n))
            return false;
        out->at += n > 0 ? n : 0;
    }
    if (in->at == in->size) {
        int n = openssl.SSL_read(tunnel->tls.ssl, in->bytes, sizeof in->bytes);
        if (n <= 0 && !wants(tunnel, n))
            return false;
        in->size = n > 0 ? n : 0;
        in->at = 0;
    }
    if (in->at < in->size) {
        ssize_t n = send(tunnel->far, in->bytes + in->at, (size_t)(in->size - in->at), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN)
            return false;
        in->at += n > 0 ? (int)n : 0;
    }
    return true;
}

static void *tunnel_main(void *argument)
{
    struct tunnel *tunnel = argument;
    static _Thread_local struct half out, in;
    out.size = out.at = in.size = in.at = 0;
    while (move(tunnel, &out, &in)) {
        struct pollfd fds[2] = {
            {tunnel->far, (short)((out.at == out.size ? POLLIN : 0) | (in.at < in.size ? POLLOUT : 0)), 0},
            {tunnel->tls.fd, (short)((in.at == in.size ? POLLIN : 0) | (out.at < out.size ? POLLOUT : 0)), 0}};
        if (openssl.SSL_has_pending(tunnel->tls.ssl) && in.at == in.size)
            continue;
        poll(fds, 2, 5);
    }
    openssl.SSL_shutdown(tunnel->tls.ssl);
    openssl.ERR_clear_error();
    shutdown(tunnel->far, SHUT_RDWR);
    return NULL;
}

static struct tunnel *tunnel_open(struct bench *b, int version)
{
    struct tunnel *tunnel = calloc(1, sizeof *tunnel);
    int pair[2];
    CHECK_OR(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, abort());
    tunnel->tls = tls_client(client_open_by(b, 0, SECURE, -1).fd, version);
    setenv("MQD_TEST_LOG", "1", 0); /* shows the reason of a failure */
    CHECK_OR(tls_client_connect(&tunnel->tls), abort());
    int flags = fcntl(tunnel->tls.fd, F_GETFL);
    fcntl(tunnel->tls.fd, F_SETFL, flags | O_NONBLOCK);
    tunnel->client.fd = pair[0];
    tunnel->far = pair[1];
    struct timeval limit = {LIMIT_MS / 1000, 0};
    setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    CHECK_OR(pthread_create(&tunnel->thread, NULL, tunnel_main, tunnel) == 0, abort());
    return tunnel;
}

static void tunnel_close(struct tunnel *tunnel)
{
    client_close(&tunnel->client);
    pthread_join(tunnel->thread, NULL);
    close(tunnel->far);
    close(tunnel->tls.fd);
    tls_client_free(&tunnel->tls);
    free(tunnel);
}

#endif
