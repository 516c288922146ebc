/* Assertions that are checked in production too.
 *
 * A broken invariant is a bug in this code: the process logs it and aborts, and its successor
 * recovers from disk. Input from outside (a frame, a file, another host, a local client) is never
 * asserted; it gets an error.
 */
#ifndef MQD_ASSERT_H
#define MQD_ASSERT_H

#include <stdint.h>

/* The text begins with the invariant's number as listed at the top of its file (P4, S1, A2 ...) and
 * includes the values that matter. */
#define MQD_ASSERT(condition, ...)                                                                                     \
    (__builtin_expect(!!(condition), 1) ? (void)0 : mqd_assert_failed(__FILE__, __LINE__, #condition, __VA_ARGS__))

/* Writes one line to standard error, which is the process's log, and aborts. */
_Noreturn void mqd_assert_failed(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((cold, format(printf, 4, 5)));

/* Sets the counter that a failing assertion on this thread increments before the process aborts;
 * NULL: none. The counter is in memory that outlives the process; the successor reads it. */
void mqd_assert_set_counter(uint8_t *counter);

#endif
