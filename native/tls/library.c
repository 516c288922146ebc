/* Loads libssl.so.3 and fills the table of its functions. dlsym on libssl also finds the functions
 * of libcrypto, on which libssl depends. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "tls/api.h"
#include "tls/library.h"

struct mqd_tls_library mqd_tls_library;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char version[96], problem[224];

static bool find_functions(void *handle)
{
    const char *missing = NULL;
#define FIND(result, name, parameters)                                                                                 \
    {                                                                                                                  \
        void *function = dlsym(handle, #name);                                                                         \
        memcpy(&mqd_tls_library.name, &function, sizeof function);                                                     \
        if (!function)                                                                                                 \
            missing = #name;                                                                                           \
    }
    MQD_TLS_FUNCTIONS(FIND)
#undef FIND
    if (missing)
        snprintf(problem, sizeof problem, "libssl.so.3 lacks %s: install OpenSSL 3.0 or later", missing);
    return !missing;
}

/* The library stays loaded until the process ends. */
static void load_library(void)
{
    const char *name = getenv("MQD_TEST_LIBSSL"); /* tests set it to a missing library */
    void *handle = dlopen(name ? name : "libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(problem, sizeof problem, "%s: TLS needs OpenSSL 3.0 or later (Debian, Ubuntu: apt install libssl3)",
                 dlerror());
        return;
    }
    if (!find_functions(handle))
        return;
    unsigned long number = mqd_tls_library.OpenSSL_version_num();
    snprintf(version, sizeof version, "%s", mqd_tls_library.OpenSSL_version(0));
    if (number < MQD_TLS_LIBRARY_VERSION_MIN)
        snprintf(problem, sizeof problem, "%s is too old for TLS: install OpenSSL 3.0 or later", version);
    else if (!(mqd_tls_library.transport = mqd_tls_transport_create()))
        snprintf(problem, sizeof problem, "out of memory for OpenSSL");
}

int mqd_tls_available(void)
{
    pthread_once(&once, load_library);
    return problem[0] ? mqd_error_set(ENOENT, "%s", problem) : 1;
}

const char *mqd_tls_version(void)
{
    pthread_once(&once, load_library);
    return problem[0] ? "" : version;
}

void mqd_tls_error_take(char *text, size_t size_bytes)
{
    unsigned long error = mqd_tls_library.ERR_peek_last_error();
    const char *reason = error ? mqd_tls_library.ERR_reason_error_string(error) : NULL;
    snprintf(text, size_bytes, "%s", reason ? reason : error ? "unknown error" : "");
    mqd_tls_library.ERR_clear_error();
}
