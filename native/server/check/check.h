/* Shared by the files of server/check/ only. */
#ifndef MQD_CHECK_H
#define MQD_CHECK_H

#include "server/check/checks.h"

/* an append waits at most this long, even if the client's timeout is longer, because its connection
 * is not read meanwhile */
#define MQD_CHECK_MS_MAX 15000
#define MQD_CHECK_COPY_BYTES_MAX MQD_EXTENT_BYTES /* the receive window holds no larger batch */

/* Takes an entry of the table; NULL: a bound is reached. If control_bytes is not 0, the payload is
 * at `offset` in the control arena; otherwise the caller sets `offset` to where its batch is.
 * frame_bytes: size of the batches that stay in the receive arena until the check ends. */
struct mqd_check *mqd_check_take(struct mqd_reactor *r, uint64_t control_bytes, uint64_t frame_bytes);
struct mqd_check *mqd_check_by_token(struct mqd_reactor *r, uint64_t token); /* NULL: the check has ended */
uint64_t mqd_check_token(const struct mqd_reactor *r, const struct mqd_check *check);
/* starts the timer: appends wait at most MQD_CHECK_MS_MAX, and not beyond the timeout of their
 * request */
void mqd_check_arm(struct mqd_reactor *r, struct mqd_check *check, struct mqd_request *request);
/* sends the check now or when there is room, but not after the request's deadline */
void mqd_check_submit(struct mqd_reactor *r, struct mqd_check *check, struct mqd_request *request);
/* Allocates memory for the batch that the acceptor has compressed. The check owns it until the
 * batch's append takes it over or the check ends. False: out of memory. */
bool mqd_check_allocate_buffer(struct mqd_reactor *r, struct mqd_check *check, uint32_t size_bytes);
void mqd_check_end(struct mqd_reactor *r, struct mqd_check *check);

uint8_t *mqd_append_payload(const struct mqd_reactor *r, const struct mqd_append *append);
/* Adds the append to those that wait for the check's response. */
void mqd_check_park(struct mqd_reactor *r, struct mqd_check *check, struct mqd_append *append);
/* Moves the batch to `at` in the control arena; it is later sent from there. */
void mqd_check_move(struct mqd_reactor *r, struct mqd_append *append, uint64_t at);
/* Copies the id, because the frame may be released before the transaction's check is sent. Returns
 * false if out of memory. */
bool mqd_check_keep_transactional_id(struct mqd_reactor *r, struct mqd_request *request);
extern const char *const mqd_check_too_many_reason;

/* The position in a request's topics during a walk over its appends; initialized with {0}. */
struct mqd_topic_walk {
    uint32_t topic, end; /* end: index after the topic's last append */
};
/* Looks up the append's topic again, because it may no longer exist (NULL). `append` must not come
 * before that of the previous call. */
struct mqd_topic *mqd_check_topic(struct mqd_reactor *r, struct mqd_request *request, struct mqd_topic_walk *walk,
                                  const struct mqd_append *append);
/* Sends an append on after it has passed its check. */
void mqd_check_resume(struct mqd_reactor *r, struct mqd_append *append, struct mqd_topic_walk *walk);

/* server/check/check_records.c */
void mqd_check_take_piece(struct mqd_reactor *r, struct mqd_check *check, const uint8_t *payload, uint32_t size_bytes,
                          int64_t total_bytes);
void mqd_check_on_records(struct mqd_reactor *r, struct mqd_check *check, int32_t error, const uint8_t *payload,
                          uint32_t size_bytes);

#endif
