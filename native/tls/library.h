/* The part of OpenSSL's interface that mqd uses, declared here, and the table of its functions. The
 * library is loaded at run time (mqd_tls_available); before that no function may be called.
 *
 * Source: the man pages of OpenSSL 3.0; numbers are those of its headers, which are part of the ABI
 * of libssl.so.3.
 */
#ifndef MQD_TLS_LIBRARY_H
#define MQD_TLS_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

typedef struct bio_st BIO;
typedef struct bio_method_st BIO_METHOD;
typedef struct evp_pkey_st EVP_PKEY;
typedef struct PKCS12_st PKCS12;
typedef struct ssl_st SSL;
typedef struct ssl_cipher_st SSL_CIPHER;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_method_st SSL_METHOD;
typedef struct stack_st STACK;
typedef struct x509_st X509;
typedef struct X509_name_st X509_NAME;
typedef struct x509_store_st X509_STORE;
typedef struct x509_store_ctx_st X509_STORE_CTX;
typedef struct GENERAL_NAME_st GENERAL_NAME;
typedef struct asn1_string_st ASN1_STRING;

#define MQD_TLS_LIBRARY_VERSION_MIN 0x30000000ul

enum {
    BIO_TYPE_SOURCE_SINK = 0x0400,
    BIO_CTRL_FLUSH = 11,
    BIO_FLAGS_READ = 1,
    BIO_FLAGS_WRITE = 2,
    BIO_FLAGS_SHOULD_RETRY = 8,
    GEN_URI = 6,
    NID_subject_alt_name = 85,
    PEM_R_NO_START_LINE = 108,
    SSL_CTRL_MODE = 33,
    SSL_CTRL_SET_READ_AHEAD = 41,
    SSL_CTRL_SET_SESS_CACHE_MODE = 44,
    SSL_CTRL_SET_MAX_CERT_LIST = 51,
    SSL_CTRL_SET_TLSEXT_SERVERNAME_CB = 53,
    SSL_CTRL_SET_TLSEXT_SERVERNAME_ARG = 54,
    SSL_CTRL_SET_TLSEXT_HOSTNAME = 55,
    SSL_CTRL_SET_TLSEXT_TICKET_KEYS = 59,
    SSL_CTRL_CHAIN_CERT = 89,
    SSL_CTRL_SET_GROUPS_LIST = 92,
    SSL_CTRL_SET_MIN_PROTO_VERSION = 123,
    SSL_CTRL_SET_MAX_PROTO_VERSION = 124,
    SSL_ERROR_SSL = 1,
    SSL_ERROR_WANT_READ = 2,
    SSL_ERROR_WANT_WRITE = 3,
    SSL_ERROR_SYSCALL = 5,
    SSL_ERROR_ZERO_RETURN = 6,
    SSL_KEY_UPDATE_NOT_REQUESTED = 0,
    SSL_KEY_UPDATE_REQUESTED = 1,
    SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER = 2,
    SSL_MODE_AUTO_RETRY = 4,
    SSL_MODE_RELEASE_BUFFERS = 0x10,
    SSL_SESS_CACHE_OFF = 0,
    SSL_TLSEXT_ERR_OK = 0,
    SSL_TLSEXT_ERR_NOACK = 3,
    SSL_VERIFY_PEER = 1,
    SSL_VERIFY_FAIL_IF_NO_PEER_CERT = 2,
    TLSEXT_NAMETYPE_host_name = 0,
    X509_V_ERR_HOSTNAME_MISMATCH = 62,
    XN_FLAG_RFC2253_UTF8 = 0x1110313, /* XN_FLAG_RFC2253, but non-ASCII characters are not escaped */
};
#define SSL_OP_IGNORE_UNEXPECTED_EOF (1ull << 7)
#define SSL_OP_NO_TICKET (1ull << 14)
#define SSL_OP_NO_COMPRESSION (1ull << 17)
#define SSL_OP_CIPHER_SERVER_PREFERENCE (1ull << 22)
#define SSL_OP_NO_RENEGOTIATION (1ull << 30)

/* FUNCTION(result, name, parameters) */
#define MQD_TLS_FUNCTIONS(FUNCTION)                                                                                    \
    FUNCTION(const unsigned char *, ASN1_STRING_get0_data, (const ASN1_STRING *))                                      \
    FUNCTION(int, ASN1_STRING_length, (const ASN1_STRING *))                                                           \
    FUNCTION(int, BIO_free, (BIO *))                                                                                   \
    FUNCTION(void *, BIO_get_data, (BIO *))                                                                            \
    FUNCTION(int, BIO_get_new_index, (void))                                                                           \
    FUNCTION(BIO_METHOD *, BIO_meth_new, (int, const char *))                                                          \
    FUNCTION(int, BIO_meth_set_ctrl, (BIO_METHOD *, long (*)(BIO *, int, long, void *)))                               \
    FUNCTION(int, BIO_meth_set_read, (BIO_METHOD *, int (*)(BIO *, char *, int)))                                      \
    FUNCTION(int, BIO_meth_set_write, (BIO_METHOD *, int (*)(BIO *, const char *, int)))                               \
    FUNCTION(BIO *, BIO_new, (const BIO_METHOD *))                                                                     \
    FUNCTION(BIO *, BIO_new_mem_buf, (const void *, int))                                                              \
    FUNCTION(int, BIO_read, (BIO *, void *, int))                                                                      \
    FUNCTION(const BIO_METHOD *, BIO_s_mem, (void))                                                                    \
    FUNCTION(void, BIO_clear_flags, (BIO *, int))                                                                      \
    FUNCTION(void, BIO_set_data, (BIO *, void *))                                                                      \
    FUNCTION(void, BIO_set_flags, (BIO *, int))                                                                        \
    FUNCTION(void, BIO_set_init, (BIO *, int))                                                                         \
    FUNCTION(void, ERR_clear_error, (void))                                                                            \
    FUNCTION(unsigned long, ERR_get_error, (void))                                                                     \
    FUNCTION(unsigned long, ERR_peek_last_error, (void))                                                               \
    FUNCTION(const char *, ERR_reason_error_string, (unsigned long))                                                   \
    FUNCTION(void, EVP_PKEY_free, (EVP_PKEY *))                                                                        \
    FUNCTION(void, GENERAL_NAMES_free, (STACK *))                                                                      \
    FUNCTION(void *, GENERAL_NAME_get0_value, (const GENERAL_NAME *, int *))                                           \
    FUNCTION(int, OPENSSL_sk_num, (const STACK *))                                                                     \
    FUNCTION(void, OPENSSL_sk_free, (STACK *))                                                                         \
    FUNCTION(void *, OPENSSL_sk_value, (const STACK *, int))                                                           \
    FUNCTION(const char *, OpenSSL_version, (int))                                                                     \
    FUNCTION(unsigned long, OpenSSL_version_num, (void))                                                               \
    FUNCTION(EVP_PKEY *, PEM_read_bio_PrivateKey, (BIO *, EVP_PKEY **, int (*)(char *, int, int, void *), void *))     \
    FUNCTION(X509 *, PEM_read_bio_X509, (BIO *, X509 **, int (*)(char *, int, int, void *), void *))                   \
    FUNCTION(void, PKCS12_free, (PKCS12 *))                                                                            \
    FUNCTION(int, PKCS12_parse, (PKCS12 *, const char *, EVP_PKEY **, X509 **, STACK **))                              \
    FUNCTION(PKCS12 *, d2i_PKCS12_bio, (BIO *, PKCS12 **))                                                             \
    FUNCTION(const char *, SSL_CIPHER_get_name, (const SSL_CIPHER *))                                                  \
    FUNCTION(int, SSL_CTX_add_client_CA, (SSL_CTX *, X509 *))                                                          \
    FUNCTION(long, SSL_CTX_callback_ctrl, (SSL_CTX *, int, void (*)(void)))                                            \
    FUNCTION(int, SSL_CTX_check_private_key, (const SSL_CTX *))                                                        \
    FUNCTION(long, SSL_CTX_ctrl, (SSL_CTX *, int, long, void *))                                                       \
    FUNCTION(void, SSL_CTX_free, (SSL_CTX *))                                                                          \
    FUNCTION(X509_STORE *, SSL_CTX_get_cert_store, (const SSL_CTX *))                                                  \
    FUNCTION(SSL_CTX *, SSL_CTX_new, (const SSL_METHOD *))                                                             \
    FUNCTION(int, SSL_CTX_set_cipher_list, (SSL_CTX *, const char *))                                                  \
    FUNCTION(int, SSL_CTX_set_ciphersuites, (SSL_CTX *, const char *))                                                 \
    FUNCTION(void, SSL_CTX_set_default_read_buffer_len, (SSL_CTX *, size_t))                                           \
    FUNCTION(int, SSL_CTX_set_num_tickets, (SSL_CTX *, size_t))                                                        \
    FUNCTION(uint64_t, SSL_CTX_set_options, (SSL_CTX *, uint64_t))                                                     \
    FUNCTION(int, SSL_CTX_set_session_id_context, (SSL_CTX *, const unsigned char *, unsigned int))                    \
    FUNCTION(void, SSL_CTX_set_verify, (SSL_CTX *, int, int (*)(int, X509_STORE_CTX *)))                               \
    FUNCTION(int, SSL_CTX_use_PrivateKey, (SSL_CTX *, EVP_PKEY *))                                                     \
    FUNCTION(int, SSL_CTX_use_certificate, (SSL_CTX *, X509 *))                                                        \
    FUNCTION(long, SSL_ctrl, (SSL *, int, long, void *))                                                               \
    FUNCTION(int, SSL_do_handshake, (SSL *))                                                                           \
    FUNCTION(void, SSL_free, (SSL *))                                                                                  \
    FUNCTION(X509 *, SSL_get1_peer_certificate, (const SSL *))                                                         \
    FUNCTION(const SSL_CIPHER *, SSL_get_current_cipher, (const SSL *))                                                \
    FUNCTION(int, SSL_get_error, (const SSL *, int))                                                                   \
    FUNCTION(int, SSL_get_ex_data_X509_STORE_CTX_idx, (void))                                                          \
    FUNCTION(BIO *, SSL_get_rbio, (const SSL *))                                                                       \
    FUNCTION(const char *, SSL_get_servername, (const SSL *, int))                                                     \
    FUNCTION(long, SSL_get_verify_result, (const SSL *))                                                               \
    FUNCTION(const char *, SSL_get_version, (const SSL *))                                                             \
    FUNCTION(int, SSL_has_pending, (const SSL *))                                                                      \
    FUNCTION(int, SSL_key_update, (SSL *, int))                                                                        \
    FUNCTION(SSL *, SSL_new, (SSL_CTX *))                                                                              \
    FUNCTION(int, SSL_read, (SSL *, void *, int))                                                                      \
    FUNCTION(int, SSL_session_reused, (const SSL *))                                                                   \
    FUNCTION(void, SSL_set_accept_state, (SSL *))                                                                      \
    FUNCTION(void, SSL_set_bio, (SSL *, BIO *, BIO *))                                                                 \
    FUNCTION(void, SSL_set_connect_state, (SSL *))                                                                     \
    FUNCTION(SSL_CTX *, SSL_set_SSL_CTX, (SSL *, SSL_CTX *))                                                           \
    FUNCTION(int, SSL_shutdown, (SSL *))                                                                               \
    FUNCTION(int, SSL_write, (SSL *, const void *, int))                                                               \
    FUNCTION(const SSL_METHOD *, TLS_method, (void))                                                                   \
    FUNCTION(const SSL_METHOD *, TLS_server_method, (void))                                                            \
    FUNCTION(int, X509_NAME_print_ex, (BIO *, const X509_NAME *, int, unsigned long))                                  \
    FUNCTION(X509 *, X509_STORE_CTX_get_current_cert, (const X509_STORE_CTX *))                                        \
    FUNCTION(int, X509_STORE_CTX_get_error_depth, (const X509_STORE_CTX *))                                            \
    FUNCTION(void *, X509_STORE_CTX_get_ex_data, (const X509_STORE_CTX *, int))                                        \
    FUNCTION(void, X509_STORE_CTX_set_error, (X509_STORE_CTX *, int))                                                  \
    FUNCTION(int, X509_STORE_add_cert, (X509_STORE *, X509 *))                                                         \
    FUNCTION(int, X509_check_host, (X509 *, const char *, size_t, unsigned int, char **))                              \
    FUNCTION(void, X509_free, (X509 *))                                                                                \
    FUNCTION(void *, X509_get_ext_d2i, (const X509 *, int, int *, int *))                                              \
    FUNCTION(X509_NAME *, X509_get_subject_name, (const X509 *))                                                       \
    FUNCTION(const char *, X509_verify_cert_error_string, (long))

struct mqd_tls_library {
#define MQD_TLS_MEMBER(result, name, parameters) result(*name) parameters;
    MQD_TLS_FUNCTIONS(MQD_TLS_MEMBER)
#undef MQD_TLS_MEMBER
    BIO_METHOD *transport; /* tls/session.c */
};
/* written once, before mqd_tls_available first returns 1 */
extern struct mqd_tls_library mqd_tls_library;

/* tls/session.c: the BIO of sessions; NULL: out of memory */
BIO_METHOD *mqd_tls_transport_create(void);
/* tls/session.c: the verify callback (SSL_CTX_set_verify) of the contexts for connections between
 * hosts */
int mqd_tls_verify_host(int chain_verified, X509_STORE_CTX *verification);
/* OpenSSL's most recent error on this thread as text; clears the error queue; "" = no error */
void mqd_tls_error_take(char *text, size_t size_bytes);

#endif
