/* Attaching: hello, welcome, four descriptors, and mapping and checking everything before the first
 * request. The protocol: shm/local_layout.h. */
#include "client/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/error.h"
#include "shm/layout.h"

#define DATA_BYTES_DEFAULT (16ull << 20)
#define REPLY_BYTES_DEFAULT (256u << 10)
#define SUBMISSION_COUNT_DEFAULT 4096u
#define TIMEOUT_MS_DEFAULT 5000u
#define REQUEST_BYTES_MIN (16ull << 10)
#define REQUEST_BYTES_MAX (8ull << 20)
#define OTHER_BUILD "; client and broker are of different builds: install the same version of mqd for both"

/* the descriptors received with the welcome */
struct welcome_fds {
    int fds[MQD_LOCAL_FD_COUNT];
    uint32_t fd_count;
};

static void close_received(struct welcome_fds *received)
{
    for (uint32_t i = 0; i < received->fd_count; i++)
        close(received->fds[i]);
    received->fd_count = 0;
}

static int connect_to(const char *path, uint32_t timeout_ms)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || !*path || strlen(path) >= sizeof address.sun_path)
        return mqd_error_set(MQD_E_INVALID, "the path of the broker's client socket must have 1 to %zu bytes",
                             sizeof address.sun_path - 1);
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return mqd_error_system(errno, "cannot create a Unix socket");
    struct timeval timeout = {.tv_sec = timeout_ms / 1000, .tv_usec = timeout_ms % 1000 * 1000};
    /* limits how long connect waits for room in the backlog */
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    int error;
    do
        error = connect(fd, (struct sockaddr *)&address, sizeof address) ? errno : 0;
    while (error == EINTR); /* connect was still waiting for room in the backlog: nothing has begun, so repeat it */
    if (!error)
        return fd;
    close(fd);
    if (error == ENOENT || error == ECONNREFUSED)
        return mqd_error_system(error,
                                "no broker listens at %s: check that the broker is running, and that its property "
                                "local.socket.permissions admits this user",
                                path);
    if (error == EACCES || error == EPERM)
        return mqd_error_system(error, "this user may not use %s: see the broker's property local.socket.permissions",
                                path);
    return mqd_error_system(error, "%s does not accept a connection", path);
}

static int send_hello(int fd, const struct mqd_client_options *options)
{
    struct mqd_local_hello hello = {.magic = MQD_LOCAL_MAGIC,
                                    .layout_version = MQD_LOCAL_LAYOUT_VERSION,
                                    .submission_count = options->submission_count,
                                    .abi_hash = mqd_local_abi_hash(),
                                    .data_bytes = options->data_bytes,
                                    .reply_bytes = options->reply_bytes};
    if (options->server && strlen(options->server) >= sizeof hello.server)
        return mqd_error_set(MQD_E_INVALID, "the name of a server may have at most %zu bytes", sizeof hello.server - 1);
    if (options->server)
        strcpy(hello.server, options->server);
    if (options->client_id)
        strncpy(hello.client_id, options->client_id, sizeof hello.client_id - 1);
    ssize_t sent;
    do
        sent = send(fd, &hello, sizeof hello, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof hello
               ? 0
               : mqd_error_system(sent < 0 ? errno : EIO, "the hello cannot be sent to the broker");
}

static void take_descriptors(struct msghdr *message, struct welcome_fds *out)
{
    for (struct cmsghdr *control = CMSG_FIRSTHDR(message); control; control = CMSG_NXTHDR(message, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS)
            continue;
        uint32_t count = (uint32_t)((control->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (uint32_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(control) + i * sizeof fd, sizeof fd);
            if (out->fd_count < MQD_LOCAL_FD_COUNT)
                out->fds[out->fd_count++] = fd;
            else
                close(fd);
        }
    }
}

static int receive_welcome(int fd, struct mqd_local_welcome *welcome, struct welcome_fds *out)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * (MQD_LOCAL_FD_COUNT + 4))];
    } control;
    struct iovec part = {.iov_base = welcome, .iov_len = sizeof *welcome};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t size;
    do
        size = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return mqd_error_system(ETIMEDOUT, "the broker sent no welcome in time: it is starting, or has no worker");
    if (size < 0)
        return mqd_error_system(errno, "cannot receive the broker's welcome");
    take_descriptors(&message, out);
    if (size == 0)
        return mqd_error_set(EPIPE, "the broker closed the socket before its welcome: it is stopping, or its worker "
                                    "has just ended; attach again");
    if (size != (ssize_t)sizeof *welcome || welcome->magic != MQD_LOCAL_MAGIC || (message.msg_flags & MSG_TRUNC))
        return mqd_error_set(MQD_E_LAYOUT, "the broker's welcome is %zd bytes of another protocol" OTHER_BUILD, size);
    welcome->reason[sizeof welcome->reason - 1] = 0;
    if (welcome->error)
        return mqd_error_set(welcome->error, "the broker refuses this client: %s", welcome->reason);
    if (out->fd_count != MQD_LOCAL_FD_COUNT || (message.msg_flags & MSG_CTRUNC))
        return mqd_error_set(EMFILE,
                             "only %u of %d descriptors arrived with the welcome: this process has reached its limit "
                             "of open files (ulimit -n)",
                             out->fd_count, MQD_LOCAL_FD_COUNT);
    return 0;
}

/* Checks that all parts are inside the file, do not overlap, and have possible sizes, so that both
 * sides agree on the layout. */
static bool geometry_fits(const struct mqd_local_header *header, uint64_t total)
{
    uint64_t submissions = (uint64_t)header->submission_count * sizeof(struct mqd_local_submission);
    return header->total_bytes == total && header->submission_count &&
           header->submission_count <= MQD_LOCAL_SUBMISSION_COUNT_MAX &&
           (header->submission_count & (header->submission_count - 1)) == 0 &&
           header->reply_bytes >= MQD_LOCAL_REPLY_BYTES_MIN && header->reply_bytes <= MQD_LOCAL_REPLY_BYTES_MAX &&
           (header->reply_bytes & (header->reply_bytes - 1)) == 0 && header->data_bytes >= MQD_LOCAL_DATA_BYTES_MIN &&
           header->data_bytes <= MQD_LOCAL_DATA_BYTES_MAX && header->submissions_offset >= sizeof *header &&
           header->submissions_offset % 64 == 0 && header->replies_offset >= header->submissions_offset + submissions &&
           header->data_offset >= header->replies_offset + header->reply_bytes && header->submissions_offset <= total &&
           header->replies_offset <= total && header->data_offset <= total &&
           header->data_bytes <= total - header->data_offset;
}

static int map_memory(struct mqd_client *client, int fd, uint64_t total)
{
    struct stat stat;
    if (fstat(fd, &stat) || (uint64_t)stat.st_size != total || total < sizeof(struct mqd_local_header))
        return mqd_error_set(MQD_E_LAYOUT,
                             "the attachment's memory does not have the %llu bytes that the welcome states" OTHER_BUILD,
                             (unsigned long long)total);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return mqd_error_set(MQD_E_LAYOUT, "the attachment's memory is not sealed against shrinking" OTHER_BUILD);
    void *memory = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return mqd_error_system(errno, "the attachment's memory of %llu bytes cannot be mapped",
                                (unsigned long long)total);
    madvise(memory, total, MADV_DONTFORK);
    client->memory = memory;
    client->memory_bytes = total;
    struct mqd_local_header *header = client->header = memory;
    if (header->magic != MQD_LOCAL_MAGIC || header->layout_version != MQD_LOCAL_LAYOUT_VERSION ||
        header->abi_hash != mqd_local_abi_hash())
        return mqd_error_set(MQD_E_LAYOUT,
                             "the attachment's memory has layout version %u, this client knows %u" OTHER_BUILD,
                             header->layout_version, MQD_LOCAL_LAYOUT_VERSION);
    if (!geometry_fits(header, total))
        return mqd_error_set(MQD_E_LAYOUT, "the attachment's memory does not match its header" OTHER_BUILD);
    client->submissions = (struct mqd_local_submission *)(client->memory + header->submissions_offset);
    client->replies = client->memory + header->replies_offset;
    client->data = client->memory + header->data_offset;
    client->submission_count = header->submission_count;
    client->reply_bytes = header->reply_bytes;
    client->data_bytes = header->data_bytes;
    client->request_bytes_max = header->request_bytes_max;
    client->worker = header->worker;
    return 0;
}

static int map_control(struct mqd_client *client, int fd)
{
    struct stat stat;
    if (fstat(fd, &stat) || stat.st_size <= 0)
        return mqd_error_set(MQD_E_LAYOUT, "the broker's control segment is empty" OTHER_BUILD);
    void *control = mmap(NULL, (size_t)stat.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (control == MAP_FAILED)
        return mqd_error_system(errno, "the broker's control segment cannot be mapped");
    client->control = control;
    client->control_bytes = (size_t)stat.st_size;
    if (mqd_control_attach(control, client->control_bytes))
        return -1;
    if (client->worker >= mqd_control_worker_count(control))
        return mqd_error_set(MQD_E_LAYOUT, "the welcome names worker %u, but the broker has %u workers" OTHER_BUILD,
                             client->worker, mqd_control_worker_count(control));
    client->worker_slot = mqd_control_endpoint(control, client->worker);
    client->worker_generation = mqd_endpoint_generation(control, client->worker);
    return 0;
}

static int attach(struct mqd_client *client, const struct mqd_client_options *options)
{
    struct mqd_local_welcome welcome;
    struct welcome_fds received = {.fd_count = 0};
    client->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (client->wake_fd < 0)
        return mqd_error_system(errno, "cannot create an eventfd");
    client->socket_fd = connect_to(options->socket_path, options->timeout_ms);
    if (client->socket_fd < 0 || send_hello(client->socket_fd, options))
        return -1;
    int result = receive_welcome(client->socket_fd, &welcome, &received);
    if (result == 0) {
        client->to_worker_fd = received.fds[1];
        client->to_client_fd = received.fds[2];
        fcntl(client->to_client_fd, F_SETFL, fcntl(client->to_client_fd, F_GETFL) | O_NONBLOCK);
        received.fds[1] = received.fds[3]; /* memfd, control segment: closed once they are mapped */
        received.fd_count = 2;
        result =
            map_memory(client, received.fds[0], welcome.total_bytes) || map_control(client, received.fds[1]) ? -1 : 0;
    }
    close_received(&received);
    return result;
}

static uint32_t round_up_to_power_of_two(uint32_t value)
{
    return value <= 1 ? 1 : 1u << (32 - __builtin_clz(value - 1));
}

static int fill_in_options(const struct mqd_client_options *requested, struct mqd_client_options *out)
{
    *out = *requested;
    out->data_bytes = requested->data_bytes ? requested->data_bytes : DATA_BYTES_DEFAULT;
    out->reply_bytes = requested->reply_bytes ? requested->reply_bytes : REPLY_BYTES_DEFAULT;
    out->submission_count = requested->submission_count ? requested->submission_count : SUBMISSION_COUNT_DEFAULT;
    out->timeout_ms = requested->timeout_ms ? requested->timeout_ms : TIMEOUT_MS_DEFAULT;
    if (out->data_bytes < MQD_LOCAL_DATA_BYTES_MIN || out->data_bytes > MQD_LOCAL_DATA_BYTES_MAX)
        return mqd_error_set(MQD_E_INVALID, "data_bytes is %llu; it must be 64 KiB to 1 GiB",
                             (unsigned long long)out->data_bytes);
    if (out->reply_bytes < MQD_LOCAL_REPLY_BYTES_MIN || out->reply_bytes > MQD_LOCAL_REPLY_BYTES_MAX)
        return mqd_error_set(MQD_E_INVALID, "reply_bytes is %u; it must be 4 KiB to 16 MiB", out->reply_bytes);
    if (out->submission_count > MQD_LOCAL_SUBMISSION_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "submission_count is %u; it must be at most %u", out->submission_count,
                             MQD_LOCAL_SUBMISSION_COUNT_MAX);
    out->reply_bytes = round_up_to_power_of_two(out->reply_bytes);
    out->submission_count = round_up_to_power_of_two(out->submission_count);
    return 0;
}

/* The part of data_bytes for the frames of mqd_client_submit. */
static uint64_t request_share(uint64_t data_bytes, uint64_t requested)
{
    uint64_t bytes = requested ? requested : data_bytes / 8;
    if (!requested && bytes > REQUEST_BYTES_MAX)
        bytes = REQUEST_BYTES_MAX;
    if (bytes < REQUEST_BYTES_MIN)
        bytes = REQUEST_BYTES_MIN;
    return bytes < data_bytes ? bytes / 64 * 64 : data_bytes;
}

struct mqd_client *mqd_client_open(const struct mqd_client_options *requested)
{
    struct mqd_client_options options;
    if (fill_in_options(requested, &options))
        return NULL;
    struct mqd_client *client = calloc(1, sizeof *client);
    if (!client) {
        mqd_error_set_static(ENOMEM, "out of memory for an attachment");
        return NULL;
    }
    client->socket_fd = client->to_worker_fd = client->to_client_fd = client->wake_fd = -1;
    client->last_response = &client->first_response;
    client->spin_us = options.spin_us;
    if (options.client_id)
        strncpy(client->client_id, options.client_id, sizeof client->client_id - 1);
    mqd_client_enlist(client);
    if (attach(client, &options) == 0) {
        client->request_bytes = request_share(client->data_bytes, options.request_bytes);
        client->submitted = calloc(client->submission_count, sizeof *client->submitted);
        if (client->submitted)
            return client;
        mqd_error_set_static(ENOMEM, "out of memory for an attachment's submissions");
    }
    mqd_client_close(client); /* sets no error */
    return NULL;
}

void mqd_client_close(struct mqd_client *client)
{
    if (!client)
        return;
    mqd_client_delist(client);
    if (client->reader_state_close)
        client->reader_state_close(client);
    if (client->producer)
        mqd_producer_detach(client->producer);
    if (client->memory && !client->in_fork_child) /* in a forked child another mapping may have this address */
        munmap(client->memory, client->memory_bytes);
    if (client->control)
        munmap(client->control, client->control_bytes);
    const int fds[] = {client->socket_fd, client->to_worker_fd, client->to_client_fd, client->wake_fd};
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    free(client->arriving);
    free(client->returned_response);
    for (struct mqd_response *response = client->first_response, *next; response; response = next) {
        next = response->next;
        free(response);
    }
    free(client->submitted);
    free(client);
}
