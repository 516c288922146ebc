/* tsan */
/* Threads that compute handshakes: sessions go in and come out, and the submitting thread never
 * waits for one of them. The sessions are abandoned, so that a step needs no peer. */
#include "mqd_test.h"

#include <errno.h>
#include <sys/eventfd.h>

#include "mqd_tls_test.h"
#include "tls/pool.h"

#define SESSIONS 64
#define FULL 0xfffffffffffffffe /* an eventfd's largest value: a further write blocks */

struct bench {
    struct tls_identity identity;
    struct mqd_tls_context *context;
    struct mqd_tls *session[SESSIONS];
    struct mqd_tls_pool *pool;
    int event_fd;
};

static struct bench *bench_open(uint32_t threads)
{
    struct bench *b = calloc(1, sizeof *b);
    b->identity = tls_identity("localhost");
    b->context = tls_context(&b->identity);
    for (int i = 0; i < SESSIONS; i++) {
        b->session[i] = mqd_tls_create(b->context, -1);
        mqd_tls_link(b->session[i])->abandoned = true;
        mqd_tls_link(b->session[i])->token = (uint64_t)i;
    }
    b->event_fd = eventfd(0, EFD_CLOEXEC);
    b->pool = mqd_tls_pool_create(b->event_fd, threads);
    return b;
}

static void bench_close(struct bench *b)
{
    mqd_tls_pool_destroy(b->pool);
    for (int i = 0; i < SESSIONS; i++)
        if (b->session[i])
            mqd_tls_free(b->session[i]);
    mqd_tls_context_free(b->context);
    tls_identity_free(&b->identity);
    close(b->event_fd);
    free(b);
}

static void submit(struct bench *b, int i)
{
    mqd_tls_pool_submit(b->pool, b->session[i]);
    b->session[i] = NULL; /* the pool's */
}

/* Collects one, and waits for an event if there is none. */
static struct mqd_tls *collect(struct bench *b)
{
    for (;;) {
        struct mqd_tls *tls = mqd_tls_pool_collect(b->pool);
        if (tls)
            return tls;
        eventfd_t count;
        CHECK_OR(eventfd_read(b->event_fd, &count) == 0, abort());
    }
}

TEST(each_session_is_returned_once)
{
    if (!tls_works())
        return;
    struct bench *b = bench_open(3);
    for (int round = 0; round < (test_long() ? 2000 : 100); round++) {
        for (int i = 0; i < SESSIONS; i++)
            submit(b, i);
        for (int n = 0; n < SESSIONS; n++) {
            struct mqd_tls *tls = collect(b);
            int i = (int)mqd_tls_link(tls)->token;
            CHECK(!b->session[i] && !mqd_tls_link(tls)->lent && mqd_tls_link(tls)->result == -1);
            b->session[i] = tls;
        }
        CHECK(!mqd_tls_pool_collect(b->pool));
    }
    bench_close(b);
}

TEST(one_thread_keeps_the_order)
{
    if (!tls_works())
        return;
    struct bench *b = bench_open(1);
    for (int i = 0; i < SESSIONS; i++)
        submit(b, i);
    for (int i = 0; i < SESSIONS; i++) {
        struct mqd_tls *tls = collect(b);
        CHECK_EQUAL(mqd_tls_link(tls)->token, i);
        b->session[i] = tls;
    }
    bench_close(b);
}

TEST(sessions_that_are_not_collected_are_freed)
{
    if (!tls_works())
        return;
    struct bench *b = bench_open(2);
    for (int i = 0; i < SESSIONS; i++)
        submit(b, i);
    struct mqd_tls *tls = collect(b);
    b->session[mqd_tls_link(tls)->token] = tls;
    bench_close(b);
}

/* The only thread of the pool does not proceed once it has a result: its write of the event blocks. A
 * thread of low priority that is preempted there stands as long. */
TEST(the_reactor_does_not_wait_for_a_thread_that_stands)
{
    if (!tls_works())
        return;
    struct bench *b = bench_open(1);
    CHECK_EQUAL(eventfd_write(b->event_fd, FULL), 0);
    submit(b, 0);
    struct mqd_tls *tls;
    int64_t end = test_now_ns() + 20000000000;
    while (!(tls = mqd_tls_pool_collect(b->pool)) && test_now_ns() < end)
        sched_yield();
    CHECK(tls);
    b->session[0] = tls;
    submit(b, 1);
    CHECK(!mqd_tls_pool_collect(b->pool));
    eventfd_t count;
    CHECK_EQUAL(eventfd_read(b->event_fd, &count), 0); /* it proceeds */
    tls = collect(b);
    CHECK_EQUAL(mqd_tls_link(tls)->token, 1);
    b->session[1] = tls;
    bench_close(b);
}
