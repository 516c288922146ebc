/* A small pool of threads for jobs that may block: flushes, reads of cold ranges, preallocation,
 * snapshots.
 *
 * Jobs are in a fixed array. Only the caller's thread takes entries from the free list and returns
 * them; the `queue` and `done` lists are protected by the mutex. An entry is freed when its event
 * is collected (W2), so nothing can overflow.
 *
 * Fairness: jobs are grouped by the device of their file. Jobs that run a caller's function
 * (mqd_poll_run) form a second group per device, and all jobs without a device form one more. A
 * group uses at most MQD_POOL_THREADS_PER_GROUP_MAX threads, and the last idle thread is reserved
 * for a group that has no thread. So when a disk stalls, the jobs of other disks continue, even if
 * jobs of both groups of the stalled disk hang and many more are queued. The jobs of a group start
 * in the order of their submission.
 *
 * A thread is started when more jobs are queued than threads are idle. Threads end with the pool.
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"
#include "base/file.h"
#include "io/poll_internal.h"

#define NO_JOB UINT32_MAX
#define NO_GROUP UINT64_MAX
#define NO_DEVICE_GROUP (UINT64_MAX - 1)
/* device numbers leave this bit free, and are too small to collide with the two values above */
#define RUN_GROUP_BIT (1ull << 63)
#define STACK_BYTES (1u << 20)

struct job {
    struct mqd_pool_request request;
    uint64_t group;
    uint32_t next;
    int32_t result;
};

struct list {
    uint32_t first;
    uint32_t last;
};

struct mqd_pool {
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* a job was queued, a thread became idle, or the pool is ending */
    int event_fd;
    bool stopping;
    uint32_t thread_count;
    uint32_t idle_count; /* threads that wait, including those signalled but not running yet */
    uint32_t queue_count;
    uint32_t done_count; /* also read without the mutex */
    struct list queue;
    struct list done;
    pthread_t thread[MQD_POOL_THREAD_COUNT_MAX];
    uint64_t thread_groups[MQD_POOL_THREAD_COUNT_MAX]; /* the group that each thread is working for */
    uint32_t first_free_job;                           /* caller's thread only */
    struct job job[MQD_POOL_JOB_COUNT_MAX];
};

static void list_append(struct mqd_pool *pool, struct list *list, uint32_t index)
{
    pool->job[index].next = NO_JOB;
    if (list->first == NO_JOB)
        list->first = index;
    else
        pool->job[list->last].next = index;
    list->last = index;
}

static void list_unlink(struct mqd_pool *pool, struct list *list, uint32_t previous, uint32_t index)
{
    if (previous == NO_JOB)
        list->first = pool->job[index].next;
    else
        pool->job[previous].next = pool->job[index].next;
    if (list->last == index)
        list->last = previous;
}

/* ---- the jobs ---- */

static int32_t read_ahead(const struct mqd_pool_request *request)
{
    uint8_t scratch[MQD_READ_AHEAD_STEP_BYTES];
    uint32_t total = 0;
    while (total < request->size_bytes) {
        uint32_t bytes_left = request->size_bytes - total;
        ssize_t count = pread(request->fd, scratch, bytes_left < sizeof scratch ? bytes_left : sizeof scratch,
                              (off_t)(request->offset + total));
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return total ? (int32_t)total : -errno;
        if (count == 0)
            break;
        total += (uint32_t)count;
    }
    return total > INT32_MAX ? INT32_MAX : (int32_t)total;
}

/* fd is an open log directory. The journal of the file layer (base/file.c) needs the directory's
 * path, to record which files a syncfs covers. */
static int32_t sync_file_system(int fd)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return mqd_file_syncfs(fd, path) == 0 ? 0 : -errno;
}

static int32_t perform(const struct mqd_pool_request *request)
{
    switch (request->kind) {
    case MQD_POOL_SYNC:
        return mqd_file_sync(request->fd, request->is_directory) == 0 ? 0 : -errno;
    case MQD_POOL_SYNCFS:
        return sync_file_system(request->fd);
    case MQD_POOL_READ_AHEAD:
        return read_ahead(request);
    default:
        return request->function(request->argument);
    }
}

/* ---- the threads ---- */

static bool may_start(const struct mqd_pool *pool, uint64_t group)
{
    uint32_t busy_thread_count = 0, group_thread_count = 0;
    for (uint32_t i = 0; i < MQD_POOL_THREAD_COUNT_MAX; i++) {
        busy_thread_count += pool->thread_groups[i] != NO_GROUP;
        group_thread_count += pool->thread_groups[i] == group;
    }
    return group_thread_count == 0 ||
           (group_thread_count < MQD_POOL_THREADS_PER_GROUP_MAX && busy_thread_count + 1 < MQD_POOL_THREAD_COUNT_MAX);
}

/* Takes the first queued job whose group may use one more thread; returns NO_JOB if there is
 * none. */
static uint32_t take_job(struct mqd_pool *pool)
{
    uint32_t previous = NO_JOB;
    for (uint32_t index = pool->queue.first; index != NO_JOB; previous = index, index = pool->job[index].next)
        if (may_start(pool, pool->job[index].group)) {
            list_unlink(pool, &pool->queue, previous, index);
            pool->queue_count--;
            return index;
        }
    return NO_JOB;
}

static void finish(struct mqd_pool *pool, uint32_t index)
{
    const uint64_t one = 1;
    bool was_empty = pool->done.first == NO_JOB;
    list_append(pool, &pool->done, index);
    mqd_store_release(&pool->done_count, pool->done_count + 1);
    if (!was_empty)
        return;
    ssize_t written;
    do
        written = write(pool->event_fd, &one, sizeof one);
    while (written < 0 && errno == EINTR);
}

struct thread_start {
    struct mqd_pool *pool;
    uint32_t index;
};

static void *thread_main(void *argument)
{
    struct thread_start start = *(struct thread_start *)argument;
    free(argument);
    struct mqd_pool *pool = start.pool;
    /* the thread names itself: another thread could do so only through a file, which the sandbox
     * denies */
    pthread_setname_np(pthread_self(), "mqd-file");
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        uint32_t index = take_job(pool);
        if (index == NO_JOB) {
            if (pool->stopping && pool->queue.first == NO_JOB)
                break;
            pool->idle_count++;
            pthread_cond_wait(&pool->changed, &pool->mutex);
            pool->idle_count--;
            continue;
        }
        struct job *job = &pool->job[index];
        pool->thread_groups[start.index] = job->group;
        pthread_mutex_unlock(&pool->mutex);
        job->result = perform(&job->request);
        pthread_mutex_lock(&pool->mutex);
        pool->thread_groups[start.index] = NO_GROUP;
        finish(pool, index);
        if (pool->queue.first != NO_JOB || pool->stopping)
            pthread_cond_broadcast(&pool->changed); /* this group may use another thread now */
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* Called under the mutex. Blocks all signals in the new thread: the main thread handles them. */
static int start_thread(struct mqd_pool *pool)
{
    struct thread_start *start = malloc(sizeof *start);
    if (!start)
        return ENOMEM;
    *start = (struct thread_start){pool, pool->thread_count};
    pthread_attr_t attributes;
    sigset_t all, previous;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    int error = pthread_create(&pool->thread[pool->thread_count], &attributes, thread_main, start);
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
    pthread_attr_destroy(&attributes);
    if (error) {
        free(start);
        return error;
    }
    pool->thread_count++;
    return 0;
}

struct mqd_pool *mqd_pool_create(int event_fd)
{
    struct mqd_pool *pool = calloc(1, sizeof *pool);
    if (!pool) {
        mqd_error_system(ENOMEM, "out of memory for the pool of file threads");
        return NULL;
    }
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
    pool->event_fd = event_fd;
    pool->queue.first = pool->done.first = NO_JOB;
    for (uint32_t i = 0; i < MQD_POOL_THREAD_COUNT_MAX; i++)
        pool->thread_groups[i] = NO_GROUP;
    for (uint32_t i = 0; i < MQD_POOL_JOB_COUNT_MAX; i++)
        pool->job[i].next = i + 1 < MQD_POOL_JOB_COUNT_MAX ? i + 1 : NO_JOB;
    pthread_mutex_lock(&pool->mutex);
    int error = start_thread(pool); /* one thread must exist; more only improve speed */
    pthread_mutex_unlock(&pool->mutex);
    if (error) {
        mqd_pool_destroy(pool);
        mqd_error_system(error, "cannot start a file thread");
        return NULL;
    }
    return pool;
}

void mqd_pool_destroy(struct mqd_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 0; i < pool->thread_count; i++)
        pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

/* ---- the caller's side ---- */

static uint64_t group_of(const struct mqd_pool_request *request)
{
    struct stat status;
    if (request->fd < 0 || fstat(request->fd, &status) != 0)
        return NO_DEVICE_GROUP;
    return (uint64_t)status.st_dev | (request->kind == MQD_POOL_RUN ? RUN_GROUP_BIT : 0);
}

int mqd_pool_submit(struct mqd_pool *pool, const struct mqd_pool_request *request)
{
    uint32_t index = pool->first_free_job;
    if (index == NO_JOB)
        return mqd_error_set_static(MQD_E_FULL, "too many file operations are in progress");
    struct job *job = &pool->job[index];
    pool->first_free_job = job->next;
    job->request = *request;
    job->group = group_of(request);
    pthread_mutex_lock(&pool->mutex);
    list_append(pool, &pool->queue, index);
    if (++pool->queue_count > pool->idle_count && pool->thread_count < MQD_POOL_THREAD_COUNT_MAX)
        start_thread(pool); /* on failure the running threads will take the job */
    pthread_cond_signal(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    return 0;
}

int mqd_pool_collect(struct mqd_pool *pool, struct mqd_poll_event *events, int count_max)
{
    if (mqd_load_acquire(&pool->done_count) == 0)
        return 0;
    int count = 0;
    pthread_mutex_lock(&pool->mutex);
    while (count < count_max && pool->done.first != NO_JOB) {
        uint32_t index = pool->done.first;
        struct job *job = &pool->job[index];
        list_unlink(pool, &pool->done, NO_JOB, index);
        events[count++] =
            (struct mqd_poll_event){.token = job->request.token, .flags = MQD_POLL_DONE, .result = job->result};
        job->next = pool->first_free_job;
        pool->first_free_job = index;
    }
    mqd_store_release(&pool->done_count, pool->done_count - (uint32_t)count);
    pthread_mutex_unlock(&pool->mutex);
    return count;
}
