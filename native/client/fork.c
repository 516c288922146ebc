/* The attachments of this process, so that a forked child can be detached from them: see C5 of
 * client/internal.h.
 *
 * If a child kept the socket open, the worker would not notice that the parent has ended. The
 * handlers run inside fork(): the list's lock is held across it, and the child only does a few
 * stores and close().
 */
#include "client/internal.h"

#include <pthread.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct mqd_client *first_client;

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    for (struct mqd_client *client = first_client; client; client = client->next) {
        client->in_fork_child = true;
        mqd_store_release(&client->failure, MQD_E_INVALID);
        close(client->socket_fd);
        close(client->to_worker_fd);
        close(client->to_client_fd);
        close(client->wake_fd);
        client->socket_fd = client->to_worker_fd = client->to_client_fd = client->wake_fd = -1;
    }
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}

void mqd_client_enlist(struct mqd_client *client)
{
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    client->next = first_client;
    client->link = &first_client;
    if (first_client)
        first_client->link = &client->next;
    first_client = client;
    pthread_mutex_unlock(&lock);
}

void mqd_client_delist(struct mqd_client *client)
{
    pthread_mutex_lock(&lock);
    *client->link = client->next;
    if (client->next)
        client->next->link = client->link;
    pthread_mutex_unlock(&lock);
}
