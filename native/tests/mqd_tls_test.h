/* For tests of TLS: certificates created here, and clients over OpenSSL's own client side.
 * OpenSSL functions that only tests need are looked up by name, like the others. */
#ifndef MQD_TLS_TEST_H
#define MQD_TLS_TEST_H

#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "tls/api.h"
#include "tls/library.h"
#include "tls/session.h"

#define openssl mqd_tls_library

/* A function of OpenSSL: its result and parameters as the call needs them. */
#define TLS_CALL(result, name, parameters, ...) ((result(*) parameters)tls_symbol(#name))(__VA_ARGS__)
static void *tls_symbol(const char *name)
{
    static void *handle;
    if (!handle)
        handle = dlopen("libssl.so.3", RTLD_NOW);
    void *found = handle ? dlsym(handle, name) : NULL;
    if (!found) {
        fprintf(stderr, "OpenSSL has no %s\n", name);
        abort();
    }
    return found;
}

/* false: the tests are skipped, with the reason */
static bool tls_works(void)
{
    if (mqd_tls_available() == 1)
        return true;
    test_message("left out: %s", mqd_error_message());
    return false;
}

struct tls_identity {
    EVP_PKEY *key;
    X509 *certificate;
    char key_pem[4096], certificate_pem[4096];
};

static void tls_pem(BIO *bio, char *text, size_t size_bytes)
{
    int length = openssl.BIO_read(bio, text, (int)size_bytes - 1);
    text[length > 0 ? length : 0] = 0;
    openssl.BIO_free(bio);
}

/* P-256, signed by itself, or by `issuer`; valid from a day ago for `days`. With an extension (its
 * number and value), or none (NULL). */
static struct tls_identity tls_identity_made(const char *common_name, const struct tls_identity *issuer, int days,
                                             int extension, const char *value)
{
    struct tls_identity identity = {0};
    identity.key =
        TLS_CALL(EVP_PKEY *, EVP_PKEY_Q_keygen, (void *, const char *, const char *, ...), NULL, NULL, "EC", "P-256");
    X509 *x = identity.certificate = TLS_CALL(X509 *, X509_new, (void));
    TLS_CALL(int, X509_set_version, (X509 *, long), x, 2);
    TLS_CALL(int, ASN1_INTEGER_set, (void *, long), TLS_CALL(void *, X509_get_serialNumber, (X509 *), x), 7);
    TLS_CALL(void *, X509_gmtime_adj, (void *, long), TLS_CALL(void *, X509_getm_notBefore, (X509 *), x), -86400);
    TLS_CALL(void *, X509_gmtime_adj, (void *, long), TLS_CALL(void *, X509_getm_notAfter, (X509 *), x), 86400l * days);
    X509_NAME *name = openssl.X509_get_subject_name(x);
    TLS_CALL(int, X509_NAME_add_entry_by_txt, (X509_NAME *, const char *, int, const unsigned char *, int, int, int),
             name, "O", 0x1000, (const unsigned char *)"mqd, tests", -1, -1, 0);
    TLS_CALL(int, X509_NAME_add_entry_by_txt, (X509_NAME *, const char *, int, const unsigned char *, int, int, int),
             name, "CN", 0x1000, (const unsigned char *)common_name, -1, -1, 0);
    TLS_CALL(int, X509_set_issuer_name, (X509 *, X509_NAME *), x,
             issuer ? openssl.X509_get_subject_name(issuer->certificate) : name);
    TLS_CALL(int, X509_set_pubkey, (X509 *, EVP_PKEY *), x, identity.key);
    if (!issuer) { /* it may sign others */
        void *ca = TLS_CALL(void *, X509V3_EXT_conf_nid, (void *, void *, int, const char *), NULL, NULL, 87,
                            "critical,CA:TRUE");
        TLS_CALL(int, X509_add_ext, (X509 *, void *, int), x, ca, -1);
        TLS_CALL(void, X509_EXTENSION_free, (void *), ca);
    }
    if (value) {
        void *note =
            TLS_CALL(void *, X509V3_EXT_conf_nid, (void *, void *, int, const char *), NULL, NULL, extension, value);
        TLS_CALL(int, X509_add_ext, (X509 *, void *, int), x, note, -1);
        TLS_CALL(void, X509_EXTENSION_free, (void *), note);
    }
    int size = TLS_CALL(int, X509_sign, (X509 *, EVP_PKEY *, const void *), x, issuer ? issuer->key : identity.key,
                        TLS_CALL(const void *, EVP_sha256, (void)));
    if (size <= 0)
        abort();
    BIO *bio = openssl.BIO_new(openssl.BIO_s_mem());
    TLS_CALL(int, PEM_write_bio_X509, (BIO *, X509 *), bio, x);
    tls_pem(bio, identity.certificate_pem, sizeof identity.certificate_pem);
    bio = openssl.BIO_new(openssl.BIO_s_mem());
    TLS_CALL(int, PEM_write_bio_PrivateKey, (BIO *, EVP_PKEY *, const void *, void *, int, void *, void *), bio,
             identity.key, NULL, NULL, 0, NULL, NULL);
    tls_pem(bio, identity.key_pem, sizeof identity.key_pem);
    return identity;
}

__attribute__((unused)) static struct tls_identity tls_identity_signed(const char *common_name,
                                                                       const struct tls_identity *issuer, int days)
{
    return tls_identity_made(common_name, issuer, days, 0, NULL);
}

/* with a comment of any length in its certificate */
__attribute__((unused)) static struct tls_identity tls_identity_noted(const char *common_name, const char *comment)
{
    return tls_identity_made(common_name, NULL, 1, 78, comment);
}

/* of a host of a cluster */
__attribute__((unused)) static struct tls_identity tls_node(const struct tls_identity *ca, const char *names, int days)
{
    return tls_identity_made("host", ca, days, NID_subject_alt_name, names);
}

static inline struct tls_identity tls_identity(const char *common_name)
{
    return tls_identity_signed(common_name, NULL, 1);
}

static void tls_identity_free(struct tls_identity *identity)
{
    openssl.EVP_PKEY_free(identity->key);
    openssl.X509_free(identity->certificate);
}

static struct mqd_tls_file tls_file(const char *text)
{
    return (struct mqd_tls_file){.bytes = (const uint8_t *)text, .size_bytes = strlen(text)};
}

/* settings of a listener, whose `identities` the caller sets */
static struct mqd_tls_settings tls_settings(const struct mqd_tls_identity *identities, uint32_t count)
{
    return (struct mqd_tls_settings){.identities = identities,
                                     .identity_count = count,
                                     .version_min = 0x303,
                                     .version_max = 0x304,
                                     .ciphers_12 = "ECDHE+AESGCM:ECDHE+CHACHA20",
                                     .ciphers_13 = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384"};
}

/* for connections between hosts */
__attribute__((unused)) static struct mqd_tls_context *tls_hosts_context(const struct tls_identity *identity,
                                                                         const struct tls_identity *ca)
{
    struct mqd_tls_identity pair = {.chain = tls_file(identity->certificate_pem), .key = tls_file(identity->key_pem)};
    struct mqd_tls_settings settings = tls_settings(&pair, 1);
    settings.between_hosts = 1;
    settings.version_min = 0x304;
    settings.client_auth = MQD_TLS_CLIENT_AUTH_REQUIRED;
    settings.trust = tls_file(ca->certificate_pem);
    return mqd_tls_context_create(&settings);
}

/* one identity, nothing else */
__attribute__((unused)) static struct mqd_tls_context *tls_context(const struct tls_identity *identity)
{
    struct mqd_tls_identity pair = {.chain = tls_file(identity->certificate_pem), .key = tls_file(identity->key_pem)};
    struct mqd_tls_settings settings = tls_settings(&pair, 1);
    return mqd_tls_context_create(&settings);
}

/* ---- clients ---- */

#define TLS_CONNECT_MS 30000

struct tls_client {
    SSL_CTX *context;
    SSL *ssl;
    int fd;
};

/* A client on `fd`, before its handshake. version: 0x303, 0x304; 0 = any. */
__attribute__((unused)) static struct tls_client tls_client(int fd, int version)
{
    struct tls_client client = {.fd = fd};
    client.context = openssl.SSL_CTX_new(TLS_CALL(const SSL_METHOD *, TLS_client_method, (void)));
    if (version) {
        openssl.SSL_CTX_ctrl(client.context, SSL_CTRL_SET_MIN_PROTO_VERSION, version, NULL);
        openssl.SSL_CTX_ctrl(client.context, SSL_CTRL_SET_MAX_PROTO_VERSION, version, NULL);
    }
    client.ssl = openssl.SSL_new(client.context);
    TLS_CALL(int, SSL_set_fd, (SSL *, int), client.ssl, fd);
    return client;
}

/* On a blocking socket. A recv with a timeout is interrupted when an io_uring ring created by
 * this thread has completions, and OpenSSL then reports that it wants to read. */
__attribute__((unused)) static bool tls_client_connect(struct tls_client *client)
{
    int64_t end_ns = test_now_ns() + TLS_CONNECT_MS * 1000000ll;
    int n, error;
    do {
        n = TLS_CALL(int, SSL_connect, (SSL *), client->ssl);
        error = openssl.SSL_get_error(client->ssl, n);
    } while ((error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) && test_now_ns() < end_ns);
    if (n != 1 && getenv("MQD_TEST_LOG")) {
        char reason[128];
        mqd_tls_error_take(reason, sizeof reason);
        fprintf(stderr, "SSL_connect: %s\n", reason);
    }
    openssl.ERR_clear_error();
    return n == 1;
}

/* the certificate that the client shows */
__attribute__((unused)) static void tls_client_use(struct tls_client *client, const struct tls_identity *identity)
{
    TLS_CALL(int, SSL_use_certificate, (SSL *, X509 *), client->ssl, identity->certificate);
    TLS_CALL(int, SSL_use_PrivateKey, (SSL *, EVP_PKEY *), client->ssl, identity->key);
}

__attribute__((unused)) static void tls_client_free(struct tls_client *client)
{
    openssl.SSL_free(client->ssl);
    openssl.SSL_CTX_free(client->context);
}

#endif
