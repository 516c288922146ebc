/* See tls/pool.h. */
#include "tls/pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"

#define THREAD_COUNT_MAX 8
#define STACK_BYTES (512u << 10)
/* lower than the reactor's: many new clients must not delay the established ones */
#define NICE 10

struct queue {
    struct mqd_tls *first, *last;
};

struct mqd_tls_pool {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int event_fd;
    bool stopping;
    uint32_t thread_count;
    pthread_t thread[THREAD_COUNT_MAX];
    struct queue waiting, done;
};

static void append(struct queue *queue, struct mqd_tls *tls)
{
    mqd_tls_link(tls)->next = NULL;
    if (queue->first)
        mqd_tls_link(queue->last)->next = tls;
    else
        queue->first = tls;
    queue->last = tls;
}

static struct mqd_tls *pop(struct queue *queue)
{
    struct mqd_tls *tls = queue->first;
    if (tls)
        queue->first = mqd_tls_link(tls)->next;
    return tls;
}

static void step(struct mqd_tls *tls)
{
    struct mqd_tls_link *link = mqd_tls_link(tls);
    if (__atomic_load_n(&link->abandoned, __ATOMIC_RELAXED)) {
        link->result = -1; /* its client has disconnected */
        return;
    }
    link->result = mqd_tls_handshake(tls);
    if (link->result < 0)
        snprintf(link->reason, sizeof link->reason, "%s", mqd_error_message());
}

static void *thread_main(void *argument)
{
    struct mqd_tls_pool *pool = argument;
    pthread_setname_np(
        pthread_self(),
        "mqd-tls"); /* its own name: the name of another thread is set through a file, which the sandbox denies */
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICE);
    pthread_mutex_lock(&pool->mutex);
    while (!pool->stopping) {
        struct mqd_tls *tls = pop(&pool->waiting);
        if (!tls) {
            pthread_cond_wait(&pool->changed, &pool->mutex);
            continue;
        }
        pthread_mutex_unlock(&pool->mutex);
        step(tls);
        pthread_mutex_lock(&pool->mutex);
        if (!pool->done.first)
            eventfd_write(pool->event_fd, 1);
        append(&pool->done, tls);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static int start_thread(struct mqd_tls_pool *pool)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the main thread handles signals */
    int error = pthread_create(&pool->thread[pool->thread_count], &attributes, thread_main, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
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
        mqd_error_system(ENOMEM, "no memory for the threads of TLS handshakes");
        return NULL;
    }
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
    pool->event_fd = event_fd;
    int error = 0;
    while (pool->thread_count < thread_count && pool->thread_count < THREAD_COUNT_MAX && !error)
        error = start_thread(pool);
    if (pool->thread_count)
        return pool; /* more than one only improve speed */
    mqd_tls_pool_destroy(pool);
    mqd_error_system(error, "cannot start a thread for TLS handshakes");
    return NULL;
}

void mqd_tls_pool_destroy(struct mqd_tls_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 0; i < pool->thread_count; i++)
        pthread_join(pool->thread[i], NULL);
    struct mqd_tls *tls;
    while ((tls = pop(&pool->waiting)) || (tls = pop(&pool->done)))
        mqd_tls_free(tls);
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

void mqd_tls_pool_submit(struct mqd_tls_pool *pool, struct mqd_tls *tls)
{
    mqd_tls_link(tls)->lent = true;
    pthread_mutex_lock(&pool->mutex);
    append(&pool->waiting, tls);
    pthread_cond_signal(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
}

struct mqd_tls *mqd_tls_pool_collect(struct mqd_tls_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    struct mqd_tls *tls = pop(&pool->done);
    pthread_mutex_unlock(&pool->mutex);
    if (tls)
        mqd_tls_link(tls)->lent = false;
    return tls;
}
