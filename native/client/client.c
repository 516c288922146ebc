/* Uses an attachment: sends requests, takes replies, sleeps and wakes. Shared layout:
 * shm/local_layout.h; invariants: client/internal.h.
 *
 * How a waiter and other threads avoid missed wake-ups:
 *   worker -> waiter   the waiter stores client_sleeping, issues a full fence, checks again (for
 *                      replies, and for room if a thread waits for it), then blocks in ppoll on
 *                      to_client. A4.
 *   others -> waiter   a thread that begins to wait for room raises client_sleeping from REPLY to
 *                      ROOM after a full fence; the waiter reads needs_room after its own fence. At
 *                      least one side sees the other.
 *   appends -> waiter  replies that an append or a submit takes, outside mqd_client_poll, must wake
 *                      a waiter too, because they add outcomes and responses. Once the counters
 *                      have advanced, the waiter no longer notices these replies: so `signalled`
 *                      is set before that, and the waiter reads the counters first and
 *                      `signalled` last.
 *   poll -> waiter     to_client, and wake_fd (written by mqd_client_wake), are drained only by
 *                      mqd_client_poll, never by a waiter, so they are level-triggered for all
 *                      waiters. But a poll in another thread can drain them, or take replies,
 *                      before a waiter has run: ppoll would find nothing readable and sleep on. So
 *                      a poll that has taken anything while threads wait wakes them itself.
 */
#include "client/internal.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/big_endian.h"
#include "base/error.h"
#include "shm/layout.h"

#define RESPONSE_BYTES_MAX (128u << 20) /* larger than any broker's response: a length above it is invalid */
/* after this many polls that found nothing, the socket is checked for a hang-up */
#define IDLE_POLLS_MAX 256u

enum {
    SIGNAL_READABLE = 1, /* to_client or wake_fd must be drained */
    SIGNAL_TAKEN = 2,    /* replies were taken outside mqd_client_poll */
};

int mqd_client_check(const struct mqd_client *client)
{
    int failure = mqd_load_relaxed(&client->failure);
    if (__builtin_expect(failure == 0, 1))
        return 0;
    if (failure == MQD_E_INVALID)
        return mqd_error_set_static(failure,
                                    "this process is a fork of the attached process: it needs its own attachment");
    if (failure == EPIPE)
        return mqd_error_set_static(failure, "the broker's worker at the other end has ended: attach again; a producer "
                                             "moves over with mqd_producer_move");
    return mqd_error_set(failure, "%s; attach again", client->failure_message);
}

int mqd_client_fail(struct mqd_client *client, int code, const char *message)
{
    if (!mqd_load_relaxed(&client->failure)) {
        if (message)
            /* the message is written only by the attachment's thread; a waiter only reports EPIPE,
             * which needs no message */
            client->failure_message = message;
        mqd_store_release(&client->failure, code);
    }
    return mqd_client_check(client);
}

uint32_t mqd_client_worker(const struct mqd_client *client)
{
    return client->worker;
}

void *mqd_client_control(struct mqd_client *client)
{
    return client->control;
}

static void wake(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* ---- sending requests ---- */

void mqd_client_flush(struct mqd_client *client)
{
    if (client->published == client->tail || mqd_load_relaxed(&client->failure))
        return;
    mqd_store_release(&client->header->submission_tail, client->tail);
    client->published = client->tail;
    mqd_fence_full();
    if (mqd_load_relaxed(&client->worker_slot->sleeping))
        wake(client->to_worker_fd);
}

/* "appends -> waiter" above. Must be called before the counters advance. */
static void signal_taken(struct mqd_client *client)
{
    if (!client->polling && !(mqd_load_relaxed(&client->signalled) & SIGNAL_TAKEN))
        mqd_fetch_or(&client->signalled, SIGNAL_TAKEN);
}

/* Handles the submissions before submission_head: the worker has copied them (A3). */
static int handle_consumed(struct mqd_client *client)
{
    uint64_t head = mqd_load_acquire(&client->header->submission_head);
    if (head == client->head)
        return 0;
    if (head - client->head > client->published - client->head)
        return mqd_client_fail(client, MQD_E_CORRUPT, "the broker has read requests that were not sent");
    for (uint64_t at = client->head; at != head; at++) {
        struct mqd_submitted submitted = client->submitted[at & (client->submission_count - 1)];
        if (submitted.kind == MQD_SUBMITTED_REQUEST) {
            client->request_head += submitted.bytes;
        } else if (submitted.kind == MQD_SUBMITTED_BATCH_ACKS_0) {
            client->unread_acks_0_count--;
            if (client->producer)
                mqd_producer_on_consumed(client->producer, submitted.batch);
        }
    }
    signal_taken(client);
    mqd_store_release(&client->head, head);
    mqd_store_relaxed(&client->needs_room, client->unread_acks_0_count > 0);
    return 0;
}

/* From now on a waiter returns when submission_head moves. */
static void set_needs_room(struct mqd_client *client)
{
    if (client->needs_room)
        return;
    mqd_store_relaxed(&client->needs_room, 1);
    mqd_fence_full();
    uint32_t reply = MQD_LOCAL_SLEEP_REPLY;
    if (mqd_load_relaxed(&client->header->client_sleeping) == MQD_LOCAL_SLEEP_REPLY)
        mqd_compare_exchange(&client->header->client_sleeping, &reply, MQD_LOCAL_SLEEP_ROOM);
}

bool mqd_client_push(struct mqd_client *client, uint64_t offset, uint32_t size_bytes, struct mqd_submitted submitted)
{
    if (client->tail - client->head >= client->submission_count) {
        mqd_client_flush(client);
        set_needs_room(client);
        if (handle_consumed(client) || client->tail - client->head >= client->submission_count)
            return false;
    }
    uint64_t index = client->tail & (client->submission_count - 1);
    client->submissions[index] = (struct mqd_local_submission){.offset = offset, .size_bytes = size_bytes};
    client->submitted[index] = submitted;
    client->tail++;
    if (submitted.kind == MQD_SUBMITTED_BATCH_ACKS_0) {
        client->unread_acks_0_count++;
        set_needs_room(client);
    }
    return true;
}

/* Finds a contiguous place for size_bytes in the ring of requests. If the place is at the ring's
 * beginning, *skipped is the number of bytes at its end that stay unused; otherwise 0. */
static bool find_room(struct mqd_client *client, uint32_t size_bytes, uint32_t *skipped)
{
    if (client->request_tail == client->request_head)
        client->request_tail = client->request_head = 0; /* empty: any valid size fits */
    uint64_t at = client->request_tail % client->request_bytes, rest = client->request_bytes - at;
    *skipped = rest < size_bytes ? (uint32_t)rest : 0;
    return client->request_tail + *skipped + size_bytes - client->request_head <= client->request_bytes;
}

int mqd_client_submit(struct mqd_client *client, const uint8_t *frame, uint32_t size_bytes)
{
    if (mqd_client_check(client))
        return -1;
    if (size_bytes < 8 || size_bytes > client->request_bytes)
        return mqd_error_set(MQD_E_INVALID, "a request of %u bytes: this attachment allows 8 to %llu (request_bytes)",
                             size_bytes, (unsigned long long)client->request_bytes);
    if (mqd_get_be32(frame + 4) >= MQD_CLIENT_PRODUCER_CORRELATION_MIN)
        return mqd_error_set(MQD_E_INVALID, "correlation id %u: a caller's ids must be below 2^30",
                             mqd_get_be32(frame + 4));
    uint32_t skipped;
    if (!find_room(client, size_bytes, &skipped)) {
        mqd_client_flush(client);
        set_needs_room(client);
        if (handle_consumed(client))
            return -1;
        if (!find_room(client, size_bytes, &skipped))
            return mqd_error_set_static(MQD_E_FULL, "the attachment's memory for requests is full: wait, then retry");
    }
    uint64_t offset = (client->request_tail + skipped) % client->request_bytes;
    memcpy(client->data + offset, frame, size_bytes);
    struct mqd_submitted submitted = {.kind = MQD_SUBMITTED_REQUEST, .bytes = skipped + size_bytes};
    if (!mqd_client_push(client, offset, size_bytes, submitted))
        return mqd_client_check(client)
                   ? -1
                   : mqd_error_set_static(MQD_E_FULL, "the attachment's submissions are full: wait, then retry");
    client->request_tail += skipped + size_bytes;
    return 0;
}

/* ---- receiving replies ---- */

static void copy_out(const struct mqd_client *client, uint64_t from, uint8_t *to, uint32_t size_bytes)
{
    uint32_t at = (uint32_t)from & (client->reply_bytes - 1), rest = client->reply_bytes - at;
    uint32_t first = size_bytes < rest ? size_bytes : rest;
    memcpy(to, client->replies + at, first);
    memcpy(to + first, client->replies, size_bytes - first);
}

static int on_producer_response(struct mqd_client *client, const uint8_t *bytes, uint32_t size_bytes)
{
    if (!client->producer || mqd_producer_on_response(client->producer, bytes, size_bytes) == 0)
        return 0;
    return mqd_client_fail(client, MQD_E_CORRUPT, "the broker sent an unexpected or invalid Produce response");
}

/* Handles a complete response: the producer's immediately; the caller's are queued. */
static int on_response_complete(struct mqd_client *client)
{
    struct mqd_response *response = client->arriving;
    client->arriving = NULL;
    if (mqd_get_be32(response->bytes) >= MQD_CLIENT_PRODUCER_CORRELATION_MIN) {
        int result = on_producer_response(client, response->bytes, response->size_bytes);
        free(response);
        return result;
    }
    response->next = NULL;
    *client->last_response = response;
    client->last_response = &response->next;
    return 0;
}

static int begin_response(struct mqd_client *client, uint32_t size_bytes)
{
    client->arriving = malloc(sizeof *client->arriving + size_bytes);
    if (!client->arriving)
        return mqd_client_fail(client, ENOMEM, "out of memory for a response");
    client->arriving->size_bytes = size_bytes;
    client->arrived = 0;
    return 0;
}

/* Handles a response to the producer in place, if all of it has arrived. Returns 1 if it was
 * handled, 0 if it is incomplete or not for the producer, -1 on error. */
static int take_producer_response(struct mqd_client *client, uint64_t available_bytes)
{
    uint8_t word[4];
    if (available_bytes < 2 * sizeof word)
        return 0;
    copy_out(client, client->reply_head, word, sizeof word);
    uint32_t size_bytes = mqd_get_be32(word),
             at = (uint32_t)(client->reply_head + sizeof word) & (client->reply_bytes - 1);
    const uint8_t *bytes = client->replies + at;
    if (size_bytes < 4 || size_bytes > available_bytes - sizeof word || size_bytes > client->reply_bytes - at ||
        mqd_get_be32(bytes) < MQD_CLIENT_PRODUCER_CORRELATION_MIN)
        return 0;
    /* the worker writes here only after reply_head is published: see the end of read_reply_ring */
    client->reply_head += sizeof word + size_bytes;
    return on_producer_response(client, bytes, size_bytes) ? -1 : 1;
}

/* Takes the available bytes of the length word, even if fewer than four, so that a non-empty ring
 * always means new data. Returns 1 when the word is complete. */
static int take_length(struct mqd_client *client, uint64_t available_bytes)
{
    uint32_t missing = (uint32_t)sizeof client->length - client->length_arrived,
             piece = available_bytes < missing ? (uint32_t)available_bytes : missing;
    copy_out(client, client->reply_head, client->length + client->length_arrived, piece);
    client->reply_head += piece;
    client->length_arrived += piece;
    if (client->length_arrived < sizeof client->length)
        return 0;
    client->length_arrived = 0;
    uint32_t size_bytes = mqd_get_be32(client->length);
    if (size_bytes < 4 || size_bytes > RESPONSE_BYTES_MAX)
        return mqd_client_fail(client, MQD_E_CORRUPT, "the broker sent a response of an impossible length");
    return begin_response(client, size_bytes) ? -1 : 1;
}

/* Takes one step through the bytes between reply_head and `tail`. Returns 1 on progress, 0 if there
 * is nothing more to take, -1 on error. */
static int take_reply(struct mqd_client *client, uint64_t tail)
{
    uint64_t available_bytes = tail - client->reply_head;
    if (!client->arriving) {
        int result = client->length_arrived ? 0 : take_producer_response(client, available_bytes);
        return result ? result : available_bytes ? take_length(client, available_bytes) : 0;
    }
    uint32_t missing = client->arriving->size_bytes - client->arrived,
             piece = available_bytes < missing ? (uint32_t)available_bytes : missing;
    copy_out(client, client->reply_head, client->arriving->bytes + client->arrived, piece);
    client->reply_head += piece;
    client->arrived += piece;
    if (client->arrived < client->arriving->size_bytes)
        return 0;
    return on_response_complete(client) ? -1 : 1;
}

static int read_reply_ring(struct mqd_client *client)
{
    uint64_t tail = mqd_load_acquire(&client->header->reply_tail), before = client->reply_head;
    if (tail == before)
        return 0;
    if (tail - before > client->reply_bytes)
        return mqd_client_fail(client, MQD_E_CORRUPT, "the broker's replies overrun their ring");
    int result;
    while ((result = take_reply(client, tail)) > 0)
        ;
    if (client->reply_head != before) {
        signal_taken(client);
        mqd_store_release(&client->header->reply_head, client->reply_head);
        mqd_fence_full();
        if (mqd_load_relaxed(&client->header->worker_needs_room))
            wake(client->to_worker_fd);
    }
    return result;
}

int mqd_client_take_replies(struct mqd_client *client)
{
    return read_reply_ring(client) || handle_consumed(client) ? -1 : 0;
}

static bool peer_has_exited(const struct mqd_client *client)
{
    struct pollfd socket = {.fd = client->socket_fd, .events = POLLRDHUP};
    return poll(&socket, 1, 0) == 1 && (socket.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL));
}

/* The worker's generation changes when the keeper has established that the worker is dead; reading
 * it costs one load. The socket is checked only after IDLE_POLLS_MAX polls. Bytes that have arrived
 * are handled first. */
static int check_peer_alive(struct mqd_client *client, bool found_data)
{
    if (found_data) {
        client->idle_polls = 0;
        return 0;
    }
    bool dead = mqd_load_relaxed(&client->worker_slot->generation) != client->worker_generation;
    if (!dead && ++client->idle_polls >= IDLE_POLLS_MAX) {
        client->idle_polls = 0;
        dead = peer_has_exited(client);
    }
    if (!dead || mqd_load_acquire(&client->header->reply_tail) != client->reply_head)
        return 0;
    return mqd_client_fail(client, EPIPE, NULL);
}

/* Returns whether there was anything to drain. */
static bool drain(struct mqd_client *client)
{
    char bytes[512]; /* the worker writes 8 bytes for each time we sleep */
    if (!mqd_load_relaxed(&client->signalled) || !(mqd_exchange(&client->signalled, 0u) & SIGNAL_READABLE))
        return false;
    while (read(client->to_client_fd, bytes, sizeof bytes) == (ssize_t)sizeof bytes)
        ;
    (void)!read(client->wake_fd, bytes, 8);
    return true;
}

/* "poll -> waiter" above. */
static void wake_other_waiters(struct mqd_client *client)
{
    mqd_fence_full();
    if (!mqd_load_relaxed(&client->waiting))
        return;
    mqd_fetch_or(&client->signalled, SIGNAL_READABLE);
    wake(client->wake_fd);
}

static void free_returned_response(struct mqd_client *client)
{
    free(client->returned_response);
    client->returned_response = NULL;
}

int mqd_client_poll(struct mqd_client *client)
{
    if (mqd_client_check(client))
        return -1;
    free_returned_response(client);
    bool drained = drain(client);
    uint64_t reply_head = client->reply_head, head = client->head;
    client->polling = true;
    int result = mqd_client_take_replies(client);
    if (result == 0 && client->producer)
        mqd_producer_pump(client->producer);
    client->polling = false;
    bool took_any = reply_head != client->reply_head || head != client->head;
    if (drained || took_any || result)
        wake_other_waiters(client);
    if (result)
        return -1;
    mqd_client_flush(client);
    return check_peer_alive(client, took_any);
}

uint32_t mqd_client_response(struct mqd_client *client, const uint8_t **bytes)
{
    free_returned_response(client);
    struct mqd_response *response = client->first_response;
    if (!response)
        return 0;
    client->first_response = response->next;
    if (!client->first_response)
        client->last_response = &client->first_response;
    client->returned_response = response;
    *bytes = response->bytes;
    return response->size_bytes;
}

/* ---- waiting: any thread ---- */

static bool has_changes(struct mqd_client *client)
{
    uint64_t reply_head = mqd_load_acquire(&client->header->reply_head), head = mqd_load_acquire(&client->head);
    if (mqd_load_acquire(&client->header->reply_tail) != reply_head)
        return true;
    if (mqd_load_relaxed(&client->needs_room) && mqd_load_acquire(&client->header->submission_head) != head)
        return true;
    return mqd_load_relaxed(&client->signalled);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static bool spin(struct mqd_client *client, int64_t until_ns)
{
    do {
        for (int i = 0; i < 32; i++) {
            if (has_changes(client))
                return true;
            mqd_cpu_relax();
        }
    } while (now_ns() < until_ns);
    return false;
}

/* Announces that this thread will sleep, then checks again. Returns true if there are changes, so
 * that it must not sleep. */
static bool announce_sleep(struct mqd_client *client)
{
    uint32_t needs_room;
    do {
        needs_room = mqd_load_relaxed(&client->needs_room);
        mqd_store_seq_cst(&client->header->client_sleeping, needs_room ? MQD_LOCAL_SLEEP_ROOM : MQD_LOCAL_SLEEP_REPLY);
        mqd_fence_full();
    } while (!needs_room && mqd_load_relaxed(&client->needs_room));
    return has_changes(client);
}

/* Returns 1 if the caller must poll the attachment, 0 on timeout, -1 on error. */
static int sleep_until(struct mqd_client *client, int64_t deadline_ns)
{
    struct pollfd fds[3] = {{.fd = client->to_client_fd, .events = POLLIN},
                            {.fd = client->wake_fd, .events = POLLIN},
                            {.fd = client->socket_fd, .events = POLLRDHUP}};
    int64_t left_ns = deadline_ns == INT64_MAX ? 0 : deadline_ns - now_ns();
    struct timespec timeout = {.tv_sec = left_ns > 0 ? left_ns / 1000000000 : 0,
                               .tv_nsec = left_ns > 0 ? left_ns % 1000000000 : 0};
    int count = ppoll(fds, 3, deadline_ns == INT64_MAX ? NULL : &timeout, NULL);
    if (count < 0 && errno == EINTR)
        return 1; /* a signal handler may need to run */
    if (count < 0)
        return mqd_error_system(errno, "waiting for the broker");
    if ((fds[0].revents | fds[1].revents) & POLLIN) {
        mqd_fetch_or(&client->signalled, SIGNAL_READABLE);
        return 1;
    }
    /* the other ends of the pipe and the socket were only the worker's: it has exited */
    if ((fds[0].revents || fds[2].revents) && !has_changes(client))
        return mqd_client_fail(client, EPIPE, NULL);
    return count > 0 || has_changes(client);
}

static int wait_until_changes(struct mqd_client *client, int64_t timeout_us)
{
    int64_t start = now_ns(), spin_end = start + client->spin_us * 1000ll;
    int64_t deadline =
        timeout_us < 0 || timeout_us > (INT64_MAX - start) / 1000 ? INT64_MAX : start + timeout_us * 1000;
    if (client->spin_us && spin(client, spin_end < deadline ? spin_end : deadline))
        return 1;
    return announce_sleep(client) ? 1 : sleep_until(client, deadline);
}

int mqd_client_wait(struct mqd_client *client, int64_t timeout_us)
{
    if (mqd_client_check(client))
        return -1;
    if (has_changes(client))
        return 1;
    if (timeout_us == 0)
        return 0;
    mqd_fetch_add(&client->waiting, 1u);
    int result = wait_until_changes(client, timeout_us);
    mqd_fetch_add(&client->waiting, UINT32_MAX);
    return result;
}

void mqd_client_wake(struct mqd_client *client)
{
    if (mqd_load_relaxed(&client->failure))
        return;
    mqd_fetch_or(&client->signalled, SIGNAL_READABLE);
    wake(client->wake_fd);
}
