/* A local client's readers get their segments by queries on the attachment's socket.
 *
 * Owns the attachment's `reader_state`, which all readers of a client share. It outlives the
 * client, until its last reader is closed.
 *   R1  a thread that reads the socket or the control segment holds the read lock of `entered`, and
 *       mqd_client_close takes the write lock: so neither is closed while a reader uses it.
 *   R2  one query at a time, answered in order; a response with another number is late (the reader
 *       that sent the query has stopped waiting) and is dropped with its descriptor.
 * Concurrency: any number of readers on any threads. The socket is read only here; other code may
 * poll it for POLLHUP.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"
#include "client/internal.h"
#include "client/reader_state.h"

/* a worker answers within one iteration of its loop; if it takes longer, a disk blocks it */
#define RESPONSE_TIMEOUT_MS 10000

struct reader_state {
    uint64_t references;         /* atomic: one for the client, and one for each reader */
    pthread_rwlock_t entered;    /* R1 */
    pthread_mutex_t query_mutex; /* R2 */
    struct mqd_client *client;   /* under `entered`; NULL: the client was closed */
    /* atomic: threads may no longer enter; otherwise a steady flow of readers could block closing
     * forever */
    uint32_t closing;
    uint32_t last_number; /* number of the last query; under `query_mutex` */
};

/* ---- the shared state ---- */

static void state_release(struct reader_state *state)
{
    if (mqd_fetch_add(&state->references, (uint64_t)-1) != 1)
        return;
    pthread_rwlock_destroy(&state->entered);
    pthread_mutex_destroy(&state->query_mutex);
    free(state);
}

static void on_client_close(struct mqd_client *client)
{
    struct reader_state *state = client->reader_state;
    client->reader_state = NULL;
    if (!state)
        return;
    /* in a forked child another thread's lock may never be released */
    if (mqd_client_check(client) == 0 || mqd_error_code() != MQD_E_INVALID) {
        mqd_store_release(&state->closing, 1u);
        shutdown(client->socket_fd, SHUT_RDWR); /* wakes the readers that wait for a response */
        pthread_rwlock_wrlock(&state->entered);
        state->client = NULL;
        pthread_rwlock_unlock(&state->entered);
    } else {
        state->client = NULL;
    }
    state_release(state);
}

/* Takes a reference on the client's state, which the first reader creates. Returns NULL if out of
 * memory. */
static struct reader_state *acquire_state(struct mqd_client *client)
{
    static pthread_mutex_t creation_mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&creation_mutex);
    struct reader_state *state = client->reader_state;
    if (!state && (state = calloc(1, sizeof *state))) {
        state->references = 1;
        state->client = client;
        pthread_rwlock_init(&state->entered, NULL);
        pthread_mutex_init(&state->query_mutex, NULL);
        client->reader_state = state;
        client->reader_state_close = on_client_close;
    }
    if (state)
        mqd_fetch_add(&state->references, 1);
    pthread_mutex_unlock(&creation_mutex);
    return state;
}

static int source_enter(void *context)
{
    static const char closed[] = "the attachment was closed; attach again and move the reader there";
    struct reader_state *state = context;
    if (mqd_load_acquire(&state->closing))
        return mqd_error_set_static(EPIPE, closed);
    pthread_rwlock_rdlock(&state->entered);
    if (!state->client)
        mqd_error_set_static(EPIPE, closed);
    else if (mqd_client_check(state->client) == 0)
        return 0;
    pthread_rwlock_unlock(&state->entered);
    return -1;
}

static void source_leave(void *context)
{
    struct reader_state *state = context;
    pthread_rwlock_unlock(&state->entered);
}

static void source_close(void *context)
{
    state_release(context);
}

/* ---- query and response ---- */

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Receives one packet. *fd is the descriptor that came with it, or -1. Returns its size, 0 if the
 * broker has ended the attachment, or -1 with errno. */
static ssize_t receive(int socket_fd, struct mqd_local_segment *response, int *fd)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct iovec part = {response, sizeof *response};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t size = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    *fd = -1;
    for (struct cmsghdr *cmsg = size < 0 ? NULL : CMSG_FIRSTHDR(&message); cmsg; cmsg = CMSG_NXTHDR(&message, cmsg)) {
        if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; i < (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int received_fd;
            memcpy(&received_fd, CMSG_DATA(cmsg) + i * sizeof received_fd, sizeof received_fd);
            if (*fd < 0)
                *fd = received_fd;
            else
                close(received_fd);
        }
    }
    if (size >= 0 && *fd < 0 && (message.msg_flags & MSG_CTRUNC)) {
        errno = EMFILE; /* a descriptor was sent, but this process cannot have more */
        return -1;
    }
    return size;
}

static int fail_ended(void)
{
    return mqd_error_set_static(EPIPE, "the broker has ended this attachment; attach again");
}

static int wait_for_response(int socket_fd, uint32_t number, struct mqd_local_segment *response, int *fd)
{
    int64_t deadline_ms = now_ms() + RESPONSE_TIMEOUT_MS;
    for (;;) {
        ssize_t size = receive(socket_fd, response, fd);
        if (size == 0 || (size < 0 && (errno == ECONNRESET || errno == EPIPE)))
            return fail_ended();
        if (size < 0 && errno != EAGAIN && errno != EINTR)
            return mqd_error_system(errno, "reading the broker's response about a segment");
        if (size == sizeof *response && response->kind == MQD_LOCAL_QUERY_SEGMENT && response->number == number)
            return 0;
        if (size > 0) { /* a late response, or one of a kind that only a newer broker sends */
            if (*fd >= 0)
                close(*fd);
            continue;
        }
        int64_t left_ms = deadline_ms - now_ms();
        struct pollfd wait = {socket_fd, POLLIN, 0};
        if (left_ms <= 0)
            return mqd_error_set(ETIMEDOUT,
                                 "the broker's worker has not answered a query for a segment within %d s; see its log",
                                 RESPONSE_TIMEOUT_MS / 1000);
        if (poll(&wait, 1, (int)left_ms) < 0 && errno != EINTR)
            return mqd_error_system(errno, "waiting for the broker's response about a segment");
    }
}

static int send_query(int socket_fd, const struct mqd_local_query *query)
{
    while (send(socket_fd, query, sizeof *query, MSG_NOSIGNAL) < 0) {
        if (errno == EINTR)
            continue;
        if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)
            return fail_ended();
        if (errno != EAGAIN)
            return mqd_error_system(errno, "query for a segment");
        struct pollfd wait = {socket_fd, POLLOUT, 0};
        if (poll(&wait, 1, RESPONSE_TIMEOUT_MS) == 0)
            return mqd_error_set_static(ETIMEDOUT, "the broker's worker accepts no queries; see its log");
    }
    return 0;
}

static int take_response(const struct mqd_local_segment *response, int fd, struct mqd_segment_mapping *current,
                         struct mqd_segment_mapping **mapping)
{
    if (response->error)
        return 0;
    if (fd < 0)
        return mqd_error_set_static(MQD_E_CORRUPT, "the broker answered a query for a segment without a descriptor");
    if (current && mqd_mapping_is_of_fd(current, fd, response->map_bytes))
        *mapping = current;
    else if (!(*mapping = mqd_mapping_of_fd(fd, response->map_bytes)))
        return -1;
    return 0;
}

/* The caller must have called source_enter. */
static int client_locate(void *context, const struct mqd_local_query *query, struct mqd_segment_mapping *current,
                         struct mqd_local_segment *response, struct mqd_segment_mapping **mapping)
{
    struct reader_state *state = context;
    struct mqd_local_query numbered = *query;
    int fd = -1;
    pthread_mutex_lock(&state->query_mutex);
    numbered.number = ++state->last_number;
    int result = send_query(state->client->socket_fd, &numbered);
    if (result == 0)
        result = wait_for_response(state->client->socket_fd, numbered.number, response, &fd);
    pthread_mutex_unlock(&state->query_mutex);
    if (result == 0)
        result = take_response(response, fd, current, mapping);
    if (fd >= 0)
        close(fd); /* the mapping keeps a reference to the file */
    return result;
}

static int make_source(struct mqd_client *client, struct mqd_segment_source *source)
{
    if (mqd_client_check(client) < 0)
        return -1;
    struct reader_state *state = acquire_state(client);
    if (!state)
        return mqd_error_set_static(ENOMEM, "out of memory for a reader");
    *source =
        (struct mqd_segment_source){state, client->control, client_locate, source_enter, source_leave, source_close};
    return 0;
}

struct mqd_segment_reader *mqd_segment_reader_open(struct mqd_client *client, const uint8_t topic_id[16],
                                                   int32_t partition_index, int64_t offset, int8_t isolation_level)
{
    struct mqd_segment_source source;
    return make_source(client, &source) < 0
               ? NULL
               : mqd_segment_reader_new(&source, topic_id, partition_index, offset, isolation_level);
}

int mqd_segment_reader_move(struct mqd_segment_reader *reader, struct mqd_client *to)
{
    struct mqd_segment_source source;
    if (make_source(to, &source) < 0)
        return -1;
    mqd_segment_reader_set_source(reader, &source);
    return 0;
}
