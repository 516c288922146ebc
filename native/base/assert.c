#include "base/assert.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/atomic.h"

static _Thread_local uint8_t *failure_counter;

void mqd_assert_set_counter(uint8_t *counter)
{
    failure_counter = counter;
}

_Noreturn void mqd_assert_failed(const char *file, int line, const char *condition, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "mqd: invariant broken: %s (%s:%d: %s); the process aborts and is restarted\n", text, file, line,
            condition);
    fflush(stderr);
    if (failure_counter && mqd_load_relaxed(failure_counter) < UINT8_MAX)
        mqd_store_release(failure_counter, (uint8_t)(mqd_load_relaxed(failure_counter) + 1));
    abort();
}
