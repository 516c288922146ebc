/* tsan: long */
/* Connections that the acceptor hands over, where the kernel refuses them. */
#include "mqd_counter_test.h"

#include <sys/resource.h>
#include <sys/syscall.h>

static void hand_over(struct bench *b, int fd)
{
    uint8_t bytes[64] = {'O', 'N', 'C', '1'};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } ancillary = {0};
    struct iovec iov = {bytes, sizeof bytes};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary};
    ancillary.header.cmsg_level = SOL_SOCKET, ancillary.header.cmsg_type = SCM_RIGHTS,
    ancillary.header.cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(&ancillary.header), &fd, sizeof fd);
    CHECK_EQUAL(sendmsg(b->handoffs[0], &message, 0), 64);
}

BOTH(a_connection_that_meets_a_full_descriptor_table_is_counted)
{
    struct bench *b = bench_start(backend, NULL);
    int ends[2];
    struct rlimit limit, none;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    none = limit;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    hand_over(b, ends[1]);
    wait_for_count(b, MQD_COUNT_CONNECTIONS_REFUSED, 1);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    hand_over(b, ends[1]);
    CHECK(connections_left(b, 1));
    close(ends[0]);
    close(ends[1]);
    CHECK(connections_left(b, 0));
    bench_stop(b);
}

/* The channel is edge-triggered: messages after the failed one cause no edge. */
static int failures; /* by __atomic */

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    if (message->msg_iovlen == 1 && message->msg_iov->iov_len == 64 &&
        __atomic_load_n(&failures, __ATOMIC_SEQ_CST) > 0) {
        errno = __atomic_fetch_sub(&failures, 1, __ATOMIC_SEQ_CST) % 2 ? ENOMEM : EINTR;
        return -1;
    }
    return syscall(SYS_recvmsg, fd, message, flags);
}

BOTH(a_handoff_is_taken_after_the_kernel_ran_out_of_memory)
{
    struct bench *b = bench_start(backend, NULL);
    struct client early = client_open(b, 0);
    CHECK(connections_left(b, 1));
    __atomic_store_n(&failures, 4, __ATOMIC_SEQ_CST);
    struct client late = client_open(b, 0);
    struct part part = {0, {.mark = 1, .record_count = 1}};
    CHECK_EQUAL(client_produce(&late, -1, &part, 1).count, 1);
    client_close(&early);
    client_close(&late);
    bench_stop(b);
}
