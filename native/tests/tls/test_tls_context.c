/* A listener's settings: accepted ones, and refusals with their messages. */
#include "mqd_test.h"

#include "mqd_tls_test.h"

static struct mqd_tls_context *context_of(const char *chain, const char *key, const char *password)
{
    struct mqd_tls_identity pair = {.chain = tls_file(chain), .key = tls_file(key)};
    pair.key.password = password;
    struct mqd_tls_settings settings = tls_settings(&pair, 1);
    return mqd_tls_context_create(&settings);
}

TEST(a_certificate_chain_and_its_key)
{
    if (!tls_works())
        return;
    CHECK_CONTAINS(mqd_tls_version(), "OpenSSL 3");
    struct tls_identity ca = tls_identity("ca"), leaf = tls_identity_signed("localhost", &ca, 1);
    char chain[3 * sizeof ca.certificate_pem];
    snprintf(chain, sizeof chain, "some words before\n%s\n%s", leaf.certificate_pem, ca.certificate_pem);
    struct mqd_tls_context *context = context_of(chain, leaf.key_pem, NULL);
    CHECK_OR(context, fprintf(stderr, "%s\n", mqd_error_message()));
    mqd_tls_context_free(context);
    tls_identity_free(&leaf);
    tls_identity_free(&ca);
}

TEST(what_does_not_fit_is_named)
{
    if (!tls_works())
        return;
    struct tls_identity one = tls_identity("one"), other = tls_identity("other");
    CHECK(!context_of(one.certificate_pem, other.key_pem, NULL));
    CHECK_CONTAINS(mqd_error_message(), "does not belong to the first certificate");
    CHECK(!context_of("nothing", one.key_pem, NULL));
    CHECK_CONTAINS(mqd_error_message(), "the certificate chain: it has no PEM certificate");
    CHECK(!context_of(one.certificate_pem, "nothing", NULL));
    CHECK_CONTAINS(mqd_error_message(), "the private key: no private key");
    CHECK(!context_of("", one.key_pem, NULL));
    CHECK_CONTAINS(mqd_error_message(), "it has no PEM certificate");
    char damaged[sizeof one.certificate_pem];
    snprintf(damaged, sizeof damaged, "%s", one.certificate_pem);
    memset(strchr(damaged, '\n') + 70, '!', 8);
    CHECK(!context_of(damaged, one.key_pem, NULL));
    CHECK_CONTAINS(mqd_error_message(), "a certificate is damaged");

    struct mqd_tls_identity pair = {.chain = tls_file(one.certificate_pem), .key = tls_file(one.key_pem)};
    struct mqd_tls_settings settings = tls_settings(&pair, 1);
    settings.client_auth = MQD_TLS_CLIENT_AUTH_REQUIRED;
    settings.trust = tls_file("nothing");
    CHECK(!mqd_tls_context_create(&settings));
    CHECK_CONTAINS(mqd_error_message(), "the trust store: it has no PEM certificate");
    settings.client_auth = MQD_TLS_CLIENT_AUTH_NONE;
    settings.ciphers_12 = "no-such-cipher";
    CHECK(!mqd_tls_context_create(&settings));
    CHECK_CONTAINS(mqd_error_message(), "cipher suites");
    settings.identity_count = 0;
    CHECK(!mqd_tls_context_create(&settings));
    tls_identity_free(&one);
    tls_identity_free(&other);
}

TEST(pkcs12)
{
    if (!tls_works())
        return;
    struct tls_identity ca = tls_identity("ca"), identity = tls_identity_signed("localhost", &ca, 1);
    void *others = TLS_CALL(void *, OPENSSL_sk_new_null, (void));
    TLS_CALL(int, OPENSSL_sk_push, (void *, X509 *), others, ca.certificate);
    void *store = TLS_CALL(void *, PKCS12_create,
                           (const char *, const char *, EVP_PKEY *, X509 *, void *, int, int, int, int, int), "secret",
                           "name", identity.key, identity.certificate, others, 0, 0, 0, 0, 0);
    BIO *bio = openssl.BIO_new(openssl.BIO_s_mem());
    CHECK_EQUAL(TLS_CALL(int, i2d_PKCS12_bio, (BIO *, void *), bio, store), 1);
    uint8_t bytes[8192];
    int size = openssl.BIO_read(bio, bytes, sizeof bytes);
    openssl.BIO_free(bio);
    openssl.PKCS12_free(store);
    openssl.OPENSSL_sk_free(others);
    struct mqd_tls_identity pair = {
        .chain = {.bytes = bytes, .size_bytes = (uint64_t)size, .password = "secret", .pkcs12 = 1}};
    struct mqd_tls_settings settings = tls_settings(&pair, 1);
    struct mqd_tls_context *context = mqd_tls_context_create(&settings);
    CHECK_OR(context, fprintf(stderr, "%s\n", mqd_error_message()));
    mqd_tls_context_free(context);
    pair.chain.password = "wrong";
    CHECK(!mqd_tls_context_create(&settings));
    CHECK_CONTAINS(mqd_error_message(), "cannot be opened with the password");
    for (int cut = 0; cut < size; cut += 7) { /* half a file, of any length */
        pair.chain.size_bytes = (uint64_t)cut;
        CHECK(!mqd_tls_context_create(&settings));
    }
    tls_identity_free(&identity);
    tls_identity_free(&ca);
}
