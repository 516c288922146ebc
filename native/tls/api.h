/* TLS for Python: whether it is available, and the settings of listeners. Read by build_ffi.py like
 * native.h, under the same rules. Connections are in tls/session.h.
 */
#ifndef MQD_TLS_API_H
#define MQD_TLS_API_H
/* MQD_CDEF_OFF */
#include "native.h"
/* MQD_CDEF_ON */

/* Returns 1; or -1, with the reason and the remedy, if OpenSSL 3.0 or later cannot be used. The
 * first call loads it. */
int mqd_tls_available(void);
const char *mqd_tls_version(void); /* "OpenSSL 3.0.19 27 Jan 2026"; "" = not available */

enum mqd_tls_client_auth { MQD_TLS_CLIENT_AUTH_NONE, MQD_TLS_CLIENT_AUTH_REQUESTED, MQD_TLS_CLIENT_AUTH_REQUIRED };
/* The contents of a file, PEM or PKCS12. password: NULL = none. */
struct mqd_tls_file {
    const uint8_t *bytes;
    uint64_t size_bytes;
    const char *password;
    uint8_t pkcs12;
};
/* A private key and its certificate, with the certificates that lead to the CA. PKCS12: both are in
 * `chain`. */
struct mqd_tls_identity {
    struct mqd_tls_file chain, key;
};
#define MQD_TLS_IDENTITY_COUNT_MAX 64
#define MQD_TLS_TICKET_KEY_BYTES 80
struct mqd_tls_settings {
    /* the first identity serves clients that send no host name, or a name that no certificate has */
    const struct mqd_tls_identity *identities;
    uint32_t identity_count;
    int client_auth;              /* enum mqd_tls_client_auth */
    struct mqd_tls_file trust;    /* the CAs of clients' certificates; none: size_bytes is 0 */
    int version_min, version_max; /* 0x303 = TLS 1.2, 0x304 = TLS 1.3 */
    const char *ciphers_12;       /* OpenSSL's names, separated by colons */
    const char *ciphers_13;
    /* equal in all processes that may resume each other's sessions; all bytes zero = sessions are
     * not resumed */
    uint8_t ticket_key[80];
    /* for connections between hosts, in both roles: TLS 1.3, certificates are required of both, and
     * each must name the host that is expected (tls/session.h) */
    uint8_t between_hosts;
};
struct mqd_tls_context;
/* Returns NULL on failure, with a reason that names the file and its error. */
struct mqd_tls_context *mqd_tls_context_create(const struct mqd_tls_settings *settings);
/* existing sessions that use the context are not affected */
void mqd_tls_context_free(struct mqd_tls_context *context);

#endif
