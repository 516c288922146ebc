/* Creates OpenSSL contexts from the settings of a listener, one for each identity: TLS 1.2 and 1.3,
 * forward secrecy and authenticated ciphers only. No renegotiation, compression or early data. For
 * connections between hosts: one context for both roles, TLS 1.3 only.
 *
 * A client names a host (SNI) and gets the first identity with a certificate for that host,
 * otherwise the listener's first identity. Sessions are resumed with tickets; no process stores
 * sessions. Clients with certificates cannot resume, because OpenSSL would not verify the
 * certificate again.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/atomic.h"
#include "base/error.h"
#include "tls/api.h"
#include "tls/context.h"
#include "tls/library.h"

#define openssl mqd_tls_library
#define TLS_1_3 0x304
#define READ_BUFFER_BYTES 32768 /* holds several records from one recv; freed while it is empty */

struct loaded_identity {
    SSL_CTX *context;
    X509 *leaf;
};
struct mqd_tls_context {
    uint32_t holder_count;
    uint32_t identity_count;
    struct loaded_identity identities[];
};

/* ---- files ---- */

/* The contents of a file: a key and certificates, the leaf first. */
struct content {
    EVP_PKEY *key;
    X509 *certificate[64];
    uint32_t count;
};

static void content_free(struct content *content)
{
    openssl.EVP_PKEY_free(content->key);
    for (uint32_t i = 0; i < content->count; i++)
        openssl.X509_free(content->certificate[i]);
    *content = (struct content){0};
}

static int fail(const char *what)
{
    char reason[128];
    mqd_tls_error_take(reason, sizeof reason);
    return mqd_error_set(MQD_E_INVALID, "%s%s%s", what, reason[0] ? ": " : "", reason);
}

static int add_certificate(struct content *content, X509 *certificate)
{
    if (content->count < sizeof content->certificate / sizeof *content->certificate) {
        content->certificate[content->count++] = certificate;
        return 0;
    }
    openssl.X509_free(certificate);
    return mqd_error_set(MQD_E_INVALID, "more than 64 certificates in one file");
}

static BIO *open_file(const struct mqd_tls_file *file)
{
    openssl.ERR_clear_error();
    return file->size_bytes > 16 << 20 ? NULL : openssl.BIO_new_mem_buf(file->bytes, (int)file->size_bytes);
}

static int password_of(char *target, int size, int writing, void *password)
{
    if (!password) /* fails here, because otherwise OpenSSL would prompt on the terminal */
        return -1;
    int length = (int)strlen(password);
    if (length > size)
        return -1;
    memcpy(target, password, (size_t)length);
    return length;
}

static int read_pem_certificates(const struct mqd_tls_file *file, struct content *content)
{
    BIO *bio = open_file(file);
    if (!bio)
        return fail("the file cannot be read");
    int result = 0;
    for (;;) {
        X509 *certificate = openssl.PEM_read_bio_X509(bio, NULL, password_of, NULL);
        if (!certificate)
            break;
        if ((result = add_certificate(content, certificate)) < 0)
            break;
    }
    unsigned long error = openssl.ERR_peek_last_error();
    bool is_at_end = (error & 0x7fffff) == PEM_R_NO_START_LINE;
    openssl.BIO_free(bio);
    if (result == 0 && !is_at_end)
        return fail("a certificate is damaged");
    openssl.ERR_clear_error();
    return result < 0 || content->count ? result : mqd_error_set(MQD_E_INVALID, "it has no PEM certificate");
}

static int read_pem_key(const struct mqd_tls_file *file, struct content *content)
{
    BIO *bio = open_file(file);
    if (!bio)
        return fail("the file cannot be read");
    content->key = openssl.PEM_read_bio_PrivateKey(bio, NULL, password_of, (void *)file->password);
    openssl.BIO_free(bio);
    if (!content->key)
        return fail(file->password ? "no private key can be read with the password"
                                   : "no private key can be read without a password");
    return 0;
}

static int read_pkcs12(const struct mqd_tls_file *file, struct content *content)
{
    BIO *bio = open_file(file);
    PKCS12 *store = bio ? openssl.d2i_PKCS12_bio(bio, NULL) : NULL;
    openssl.BIO_free(bio);
    if (!store)
        return fail("it is not a PKCS12 file");
    X509 *leaf = NULL;
    STACK *others = NULL;
    int is_open = openssl.PKCS12_parse(store, file->password ? file->password : "", &content->key, &leaf, &others);
    openssl.PKCS12_free(store);
    if (!is_open)
        return fail("the PKCS12 file cannot be opened with the password");
    int result = leaf ? add_certificate(content, leaf) : 0;
    for (int i = 0; others && i < openssl.OPENSSL_sk_num(others); i++) {
        X509 *certificate = openssl.OPENSSL_sk_value(others, i);
        result = result == 0 ? add_certificate(content, certificate) : (openssl.X509_free(certificate), result);
    }
    openssl.OPENSSL_sk_free(others);
    return result < 0 || content->count ? result : mqd_error_set(MQD_E_INVALID, "the PKCS12 file has no certificate");
}

static int read_identity(const struct mqd_tls_identity *identity, struct content *content)
{
    if (identity->chain.pkcs12) {
        if (read_pkcs12(&identity->chain, content) < 0)
            return -1;
        return content->key ? 0 : mqd_error_set(MQD_E_INVALID, "the PKCS12 file has no private key");
    }
    if (read_pem_certificates(&identity->chain, content) < 0)
        return mqd_error_wrap("the certificate chain");
    if (read_pem_key(&identity->key, content) < 0)
        return mqd_error_wrap("the private key");
    return 0;
}

/* ---- one OpenSSL context ---- */

static int use_identity(struct loaded_identity *loaded, struct content *content)
{
    SSL_CTX *context = loaded->context;
    if (openssl.SSL_CTX_use_certificate(context, content->certificate[0]) != 1)
        return fail("the certificate cannot be used");
    if (openssl.SSL_CTX_use_PrivateKey(context, content->key) != 1 || openssl.SSL_CTX_check_private_key(context) != 1)
        return fail("the private key does not belong to the first certificate of the chain");
    for (uint32_t i = 1; i < content->count; i++)
        if (openssl.SSL_CTX_ctrl(context, SSL_CTRL_CHAIN_CERT, 1, content->certificate[i]) != 1)
            return fail("the certificate chain cannot be used");
    loaded->leaf = content->certificate[0];
    content->certificate[0] = NULL; /* X509_free takes NULL */
    return 0;
}

static int set_trust(SSL_CTX *context, const struct mqd_tls_settings *settings)
{
    if (settings->client_auth == MQD_TLS_CLIENT_AUTH_NONE)
        return 0;
    struct content content = {0};
    int result = settings->trust.pkcs12 ? read_pkcs12(&settings->trust, &content)
                                        : read_pem_certificates(&settings->trust, &content);
    X509_STORE *store = openssl.SSL_CTX_get_cert_store(context);
    for (uint32_t i = 0; i < content.count && result == 0; i++)
        if (openssl.X509_STORE_add_cert(store, content.certificate[i]) != 1 ||
            openssl.SSL_CTX_add_client_CA(context, content.certificate[i]) != 1)
            result = fail("a CA cannot be used");
    content_free(&content);
    if (result < 0)
        return mqd_error_wrap("the trust store");
    bool is_required = settings->client_auth == MQD_TLS_CLIENT_AUTH_REQUIRED;
    openssl.SSL_CTX_set_verify(context, SSL_VERIFY_PEER | (is_required ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0),
                               settings->between_hosts ? mqd_tls_verify_host : NULL);
    return 0;
}

static void set_tickets(SSL_CTX *context, const struct mqd_tls_settings *settings)
{
    static const uint8_t no_key[MQD_TLS_TICKET_KEY_BYTES];
    openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, NULL);
    if (settings->client_auth != MQD_TLS_CLIENT_AUTH_NONE || memcmp(settings->ticket_key, no_key, sizeof no_key) == 0) {
        openssl.SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
        openssl.SSL_CTX_set_num_tickets(context, 0);
        return;
    }
    openssl.SSL_CTX_set_num_tickets(context, 1);
    openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_TLSEXT_TICKET_KEYS, MQD_TLS_TICKET_KEY_BYTES,
                         (void *)settings->ticket_key);
    /* the first 16 bytes are the key's public name, which differs by listener */
    openssl.SSL_CTX_set_session_id_context(context, settings->ticket_key, 16);
}

/* Elliptic curves, and the hybrid group with ML-KEM if OpenSSL has it (3.5). OpenSSL's own list
 * also has finite fields: a handshake with ffdhe8192 costs a server fifty times as much as one with
 * a curve, and a client can send arbitrary bytes as its key share (CVE-2002-20001). */
static int set_groups(SSL_CTX *context)
{
    static const char *const lists[] = {"X25519MLKEM768:X25519:P-256:P-384:P-521", "X25519:P-256:P-384:P-521"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if (openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_GROUPS_LIST, 0, (void *)lists[i]) == 1) {
            openssl.ERR_clear_error(); /* clears the error of an earlier list */
            return 0;
        }
    return fail("this OpenSSL does not offer the required groups for key exchange");
}

static int configure(SSL_CTX *context, const struct mqd_tls_settings *settings)
{
    openssl.SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                             SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_CIPHER_SERVER_PREFERENCE);
    openssl.SSL_CTX_ctrl(context, SSL_CTRL_MODE, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER, NULL);
    openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_READ_AHEAD, 1, NULL);
    openssl.SSL_CTX_set_default_read_buffer_len(context, READ_BUFFER_BYTES);
    if (openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_MIN_PROTO_VERSION, settings->version_min, NULL) != 1 ||
        openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_MAX_PROTO_VERSION, settings->version_max, NULL) != 1)
        return fail("this OpenSSL does not offer the protocol versions");
    if ((settings->version_min < TLS_1_3 && openssl.SSL_CTX_set_cipher_list(context, settings->ciphers_12) != 1) ||
        openssl.SSL_CTX_set_ciphersuites(context, settings->ciphers_13) != 1)
        return fail("this OpenSSL does not offer the cipher suites");
    if (set_groups(context) < 0)
        return -1;
    set_tickets(context, settings);
    return set_trust(context, settings);
}

/* ---- SNI ---- */

static int on_server_name(SSL *ssl, int *alert, void *argument)
{
    const struct mqd_tls_context *context = argument;
    const char *name = openssl.SSL_get_servername(ssl, TLSEXT_NAMETYPE_host_name);
    for (uint32_t i = 0; name && i < context->identity_count; i++)
        if (openssl.X509_check_host(context->identities[i].leaf, name, strlen(name), 0, NULL) == 1) {
            openssl.SSL_set_SSL_CTX(ssl, context->identities[i].context);
            return SSL_TLSEXT_ERR_OK;
        }
    return SSL_TLSEXT_ERR_NOACK; /* the first identity, as in Kafka */
}

/* ---- a context with its identities ---- */

static int add_identity(struct mqd_tls_context *context, const struct mqd_tls_settings *settings, uint32_t index)
{
    struct loaded_identity *loaded = &context->identities[index];
    struct content content = {0};
    loaded->context = openssl.SSL_CTX_new(settings->between_hosts ? openssl.TLS_method() : openssl.TLS_server_method());
    if (!loaded->context)
        return fail("out of memory for a TLS context");
    context->identity_count++;
    int result = configure(loaded->context, settings) == 0 && read_identity(&settings->identities[index], &content) == 0
                     ? use_identity(loaded, &content)
                     : -1;
    content_free(&content);
    return result;
}

struct mqd_tls_context *mqd_tls_context_create(const struct mqd_tls_settings *settings)
{
    if (mqd_tls_available() < 0)
        return NULL;
    if (!settings->identity_count || settings->identity_count > MQD_TLS_IDENTITY_COUNT_MAX) {
        mqd_error_set(MQD_E_INVALID, "a listener must have 1 to %d certificates, not %u", MQD_TLS_IDENTITY_COUNT_MAX,
                      settings->identity_count);
        return NULL;
    }
    if (settings->between_hosts &&
        (settings->client_auth != MQD_TLS_CLIENT_AUTH_REQUIRED || settings->version_min != TLS_1_3)) {
        mqd_error_set(MQD_E_INVALID, "connections between hosts must use TLS 1.3 and require certificates");
        return NULL;
    }
    struct mqd_tls_context *context =
        calloc(1, sizeof *context + settings->identity_count * sizeof *context->identities);
    if (!context) {
        mqd_error_system(ENOMEM, "out of memory for a TLS context");
        return NULL;
    }
    context->holder_count = 1;
    for (uint32_t i = 0; i < settings->identity_count; i++)
        if (add_identity(context, settings, i) < 0) {
            mqd_tls_context_free(context);
            return NULL;
        }
    if (context->identity_count > 1) {
        SSL_CTX *first = context->identities[0].context;
        openssl.SSL_CTX_callback_ctrl(first, SSL_CTRL_SET_TLSEXT_SERVERNAME_CB, (void (*)(void))on_server_name);
        openssl.SSL_CTX_ctrl(first, SSL_CTRL_SET_TLSEXT_SERVERNAME_ARG, 0, context);
    }
    return context;
}

void mqd_tls_context_free(struct mqd_tls_context *context)
{
    if (!context || mqd_fetch_add(&context->holder_count, UINT32_MAX) > 1)
        return;
    for (uint32_t i = 0; i < context->identity_count; i++) {
        openssl.SSL_CTX_free(context->identities[i].context);
        openssl.X509_free(context->identities[i].leaf);
    }
    free(context);
}

SSL_CTX *mqd_tls_context_hold(struct mqd_tls_context *context)
{
    mqd_fetch_add(&context->holder_count, 1);
    return context->identities[0].context;
}
