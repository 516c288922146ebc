/* tsan: long */
/* Responses to queries of local clients: those that the kernel does not accept immediately, and
 * those of a host without its lease. */
#include "mqd_local_test.h"

#include <sys/syscall.h>

static int refusals; /* by __atomic */

/* As when the user has too many descriptors in flight: space for another one causes no edge on
 * this socket. */
ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    if (message->msg_iov->iov_len == sizeof(struct mqd_local_segment) && message->msg_controllen &&
        __atomic_load_n(&refusals, __ATOMIC_SEQ_CST) > 0) {
        errno = __atomic_fetch_sub(&refusals, 1, __ATOMIC_SEQ_CST) % 2 ? ETOOMANYREFS : ENOBUFS;
        return -1;
    }
    return syscall(SYS_sendmsg, fd, message, flags);
}

BOTH(a_response_that_the_kernel_refuses_is_sent_again)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, (struct local_sizes){1 << 20, 1 << 16, 256}),
                 leaves = local_open(b, 0, (struct local_sizes){1 << 20, 1 << 16, 256});
    struct mqd_local_segment answer;
    int fd;
    for (int round = 0; round < 3; round++) {
        __atomic_store_n(&refusals, round, __ATOMIC_SEQ_CST);
        CHECK(local_query(&local, 0, 0, 1));
        CHECK(local_answer(&local, &answer, &fd));
        CHECK_EQUAL(answer.error, 0);
        CHECK(fd >= 0);
        close(fd);
    }
    __atomic_store_n(&refusals, 1 << 20, __ATOMIC_SEQ_CST);
    CHECK(local_query(&leaves, 0, 0, 1));
    CHECK(local_query(&local, 0, 0, 1));
    for (int64_t end_ns = test_now_ns() + LIMIT_MS * 1000000ll;
         __atomic_load_n(&refusals, __ATOMIC_SEQ_CST) > (1 << 20) - 4; usleep(1000))
        CHECK(test_now_ns() < end_ns);
    local_close(&leaves); /* while its response waits */
    __atomic_store_n(&refusals, 0, __ATOMIC_SEQ_CST);
    CHECK(local_answer(&local, &answer, &fd));
    close(fd);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

BOTH(queries_beyond_the_end_without_the_lease)
{
    /* CLOCK_BOOTTIME has passed the first: another host may lead by now, with more records */
    static const struct {
        int64_t deadline_ns;
        int32_t error;
    } sent[] = {{1, 6}, {INT64_MAX, 1}};
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, (struct local_sizes){1 << 20, 1 << 16, 256});
    struct client client = client_open(b, 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    struct fetch_position requested = {0, 0};
    struct mqd_local_segment answer;
    int fd;
    for (int i = 0; i < 2; i++) {
        mqd_control_set_broker(b->control, 1, 1, sent[i].deadline_ns);
        /* what comes after it meets this deadline */
        client_fetch(&client, (struct fetch){.wait_ms = 0, .bytes_min = 1, .bytes_max = 1 << 20, .session_epoch = -1},
                     &requested, 1, fetched);
        CHECK(local_query(&local, 0, 50, 1));
        CHECK(local_answer(&local, &answer, &fd));
        CHECK_EQUAL(answer.error, sent[i].error);
        CHECK(local_query(&local, 0, 0, 1));
        CHECK(local_answer(&local, &answer, &fd));
        CHECK_EQUAL(answer.error, 0); /* committed records may be read */
        close(fd);
    }
    free(fetched);
    client_close(&client);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}
