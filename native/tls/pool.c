/* See tls/pool.h.
 *
 * The reactor takes no lock here: a thread of lower priority that held one might not get a CPU for
 * many milliseconds, and all connections of the reactor would wait. Sessions are passed in both
 * directions by stacks that are taken as a whole, so the ABA problem cannot occur. Only the threads
 * use the mutex.
 */
#include "tls/pool.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"

#define THREAD_COUNT_MAX 8
#define STACK_BYTES (512u << 10)
/* priority below the reactor's: many new clients must not delay established connections */
#define NICE 10

struct mqd_tls_pool {
    struct mqd_tls *submitted, *done; /* stacks (last in, first out), written with atomic operations */
    sem_t untaken; /* counts sessions not yet taken by a thread; also posted once per thread to stop it */
    bool stopping;
    int event_fd;
    struct mqd_tls *collected; /* a list, the oldest first, used only by the reactor */
    pthread_mutex_t mutex;     /* used only by the threads, for the list `taken` */
    struct mqd_tls *taken;
    uint32_t thread_count;
    pthread_t thread[THREAD_COUNT_MAX];
};

/* Returns true if the stack was empty. */
static bool push(struct mqd_tls **stack, struct mqd_tls *tls)
{
    struct mqd_tls *first = mqd_load_relaxed(stack);
    do
        mqd_tls_link(tls)->next = first;
    while (!mqd_compare_exchange(stack, &first, tls));
    return !first;
}

/* Removes the first session of the list, which is refilled from the stack when it is empty. NULL:
 * there is none. */
static struct mqd_tls *pop_oldest(struct mqd_tls **list, struct mqd_tls **stack)
{
    if (!*list) {
        struct mqd_tls *tls = mqd_exchange(stack, NULL);
        while (tls) {
            struct mqd_tls *older = mqd_tls_link(tls)->next;
            mqd_tls_link(tls)->next = *list;
            *list = tls;
            tls = older;
        }
    }
    struct mqd_tls *first = *list;
    if (first)
        *list = mqd_tls_link(first)->next;
    return first;
}

static struct mqd_tls *take_submitted(struct mqd_tls_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    struct mqd_tls *tls = pop_oldest(&pool->taken, &pool->submitted);
    pthread_mutex_unlock(&pool->mutex);
    return tls;
}

static void run_step(struct mqd_tls *tls)
{
    struct mqd_tls_link *link = mqd_tls_link(tls);
    if (__atomic_load_n(&link->abandoned, __ATOMIC_RELAXED)) {
        link->result = -1; /* the client has disconnected */
        return;
    }
    link->result = mqd_tls_handshake(tls);
    if (link->result < 0)
        snprintf(link->reason, sizeof link->reason, "%s", mqd_error_message());
}

static void *thread_main(void *argument)
{
    struct mqd_tls_pool *pool = argument;
    /* the thread names itself: another thread could do so only through a file, which the sandbox
     * denies */
    pthread_setname_np(pthread_self(), "mqd-tls");
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICE);
    for (;;) {
        while (sem_wait(&pool->untaken) != 0)
            ; /* interrupted by a debugger; signals are blocked */
        if (mqd_load_acquire(&pool->stopping))
            return NULL;
        struct mqd_tls *tls = take_submitted(pool);
        run_step(tls);
        if (push(&pool->done, tls))
            eventfd_write(pool->event_fd, 1);
    }
}

static int start_thread(struct mqd_tls_pool *pool)
{
    pthread_attr_t attributes;
    sigset_t all_signals, old_mask;
    sigfillset(&all_signals);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all_signals, &old_mask); /* the main thread handles signals */
    int error = pthread_create(&pool->thread[pool->thread_count], &attributes, thread_main, pool);
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
    pthread_attr_destroy(&attributes);
    if (error)
        return error;
    pool->thread_count++;
    return 0;
}

struct mqd_tls_pool *mqd_tls_pool_create(int event_fd, uint32_t thread_count)
{
    struct mqd_tls_pool *pool = calloc(1, sizeof *pool);
    if (!pool) {
        mqd_error_system(ENOMEM, "out of memory for the threads of TLS handshakes");
        return NULL;
    }
    pthread_mutex_init(&pool->mutex, NULL);
    sem_init(&pool->untaken, 0, 0);
    pool->event_fd = event_fd;
    int error = 0;
    while (pool->thread_count < thread_count && pool->thread_count < THREAD_COUNT_MAX && !error)
        error = start_thread(pool);
    if (pool->thread_count)
        return pool; /* one thread is sufficient; more only improve speed */
    mqd_tls_pool_destroy(pool);
    mqd_error_system(error, "cannot start a thread for TLS handshakes");
    return NULL;
}

void mqd_tls_pool_destroy(struct mqd_tls_pool *pool)
{
    if (!pool)
        return;
    mqd_store_release(&pool->stopping, true);
    for (uint32_t i = 0; i < pool->thread_count; i++)
        sem_post(&pool->untaken);
    for (uint32_t i = 0; i < pool->thread_count; i++)
        pthread_join(pool->thread[i], NULL);
    struct mqd_tls *tls;
    while ((tls = take_submitted(pool)) || (tls = pop_oldest(&pool->collected, &pool->done)))
        mqd_tls_free(tls);
    sem_destroy(&pool->untaken);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

void mqd_tls_pool_submit(struct mqd_tls_pool *pool, struct mqd_tls *tls)
{
    mqd_tls_link(tls)->lent = true;
    push(&pool->submitted, tls);
    sem_post(&pool->untaken);
}

struct mqd_tls *mqd_tls_pool_collect(struct mqd_tls_pool *pool)
{
    struct mqd_tls *tls = pop_oldest(&pool->collected, &pool->done);
    if (tls)
        mqd_tls_link(tls)->lent = false;
    return tls;
}
