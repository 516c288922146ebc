/* TLS in the load generator, by the system's libssl.so.3, loaded at run time: the generator builds
 * without OpenSSL. No certificate is verified. */
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/types.h>

#include "load.h"

#define MODE_OF_A_MOVING_BUFFER 3 /* PARTIAL_WRITE, ACCEPT_MOVING_WRITE_BUFFER */
#define CTRL_MODE 33
#define CTRL_READ_AHEAD 41
enum { ERROR_WANT_READ = 2, ERROR_WANT_WRITE = 3 };

static int (*ssl_get_error)(const void *, int), (*ssl_read)(void *, void *, int),
    (*ssl_write)(void *, const void *, int), (*ssl_connect)(void *), (*ssl_set_fd)(void *, int);
static void *(*ssl_new)(void *), *(*context_new)(const void *);
static long (*context_control)(void *, int, long, void *);
static const void *(*client_method)(void);
static void (*clear_error)(void);
static void *context;

static void find(void *library, const char *name, void *target)
{
    void *found = dlsym(library, name);
    if (!found)
        fail("libssl.so.3 has no %s", name);
    memcpy(target, &found, sizeof found);
}

static void open_library(void)
{
    void *library = dlopen("libssl.so.3", RTLD_NOW);
    if (!library)
        fail("%s", dlerror());
    find(library, "SSL_get_error", &ssl_get_error);
    find(library, "SSL_read", &ssl_read);
    find(library, "SSL_write", &ssl_write);
    find(library, "SSL_connect", &ssl_connect);
    find(library, "SSL_set_fd", &ssl_set_fd);
    find(library, "SSL_new", &ssl_new);
    find(library, "SSL_CTX_new", &context_new);
    find(library, "SSL_CTX_ctrl", &context_control);
    find(library, "TLS_client_method", &client_method);
    find(library, "ERR_clear_error", &clear_error);
    context = context_new(client_method());
    context_control(context, CTRL_MODE, MODE_OF_A_MOVING_BUFFER, NULL);
    context_control(context, CTRL_READ_AHEAD, 1, NULL);
}

void *secure_open(int fd)
{
    if (!context)
        open_library();
    void *session = ssl_new(context);
    ssl_set_fd(session, fd);
    if (ssl_connect(session) != 1)
        fail("the TLS handshake failed");
    return session;
}

static ssize_t outcome(void *session, int n)
{
    if (n > 0)
        return n;
    int error = ssl_get_error(session, n);
    clear_error();
    if (error != ERROR_WANT_READ && error != ERROR_WANT_WRITE)
        fail("the TLS connection has ended");
    errno = EAGAIN;
    return -1;
}

ssize_t secure_send(void *session, const uint8_t *bytes, size_t size)
{
    return outcome(session, ssl_write(session, bytes, (int)size));
}

ssize_t secure_receive(void *session, uint8_t *bytes, size_t size)
{
    return outcome(session, ssl_read(session, bytes, (int)size));
}
