/* The cause of the last failure on this thread: a code and a message that names the cause and the
 * way out.
 *
 * Setting costs one vsnprintf; so expected outcomes of hot paths (EAGAIN, a full ring) return a
 * bare -1 or use a static text.
 */
#ifndef MQD_ERROR_H
#define MQD_ERROR_H

#include "native.h" /* MQD_E_*, mqd_error_message, mqd_error_code */

#define MQD_ERROR_MESSAGE_BYTES 512

/* No space, no descriptor, no memory: what is refused now may be given later. */
bool mqd_error_passes(int code);

/* code: errno or MQD_E_*. All return -1, so that `return mqd_error_set(...)` reads well. Longer
 * messages are cut. */
int mqd_error_set(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Like set, with ": " and the system's text for errno `code` behind. */
int mqd_error_system(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Puts context and ": " before the message there is; the code stays. */
int mqd_error_wrap(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Constant text that outlives the thread; no formatting, no copying: for outcomes that are frequent
 * (MQD_E_FULL). */
int mqd_error_set_static(int code, const char *text);

#endif
