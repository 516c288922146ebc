/* The cause of the last failure on this thread: a code and a message that says what failed and what
 * to do.
 *
 * Setting an error costs one vsnprintf, so expected outcomes on hot paths (EAGAIN, a full ring)
 * return a bare -1 or use a static text.
 */
#ifndef MQD_ERROR_H
#define MQD_ERROR_H

#include "native.h" /* MQD_E_*, mqd_error_message, mqd_error_code */

#define MQD_ERROR_MESSAGE_BYTES 512

/* Whether the cause is a lack of disk space, descriptors or memory: a later attempt may succeed. */
bool mqd_error_is_transient(int code);

/* code: errno or MQD_E_*. All return -1, so that `return mqd_error_set(...)` is possible.
 * Messages are truncated to MQD_ERROR_MESSAGE_BYTES. */
int mqd_error_set(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Like mqd_error_set, and appends ": " and the system's text for errno `code`. */
int mqd_error_system(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prefixes the current message with context and ": "; the code is unchanged. */
int mqd_error_wrap(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* For frequent outcomes (MQD_E_FULL): neither formats nor copies `text`, a constant that outlives
 * the thread. */
int mqd_error_set_static(int code, const char *text);

#endif
