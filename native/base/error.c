/* Thread-local error state; see base/error.h. No locks, no allocation. */
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct error_state {
    int code;
    const char *text; /* `buffer` or a constant */
    char buffer[MQD_ERROR_MESSAGE_BYTES];
};

static _Thread_local struct error_state state;

const char *mqd_error_message(void)
{
    return state.text ? state.text : "";
}

int mqd_error_code(void)
{
    return state.code;
}

bool mqd_error_is_transient(int code)
{
    return code == ENOSPC || code == EDQUOT || code == EMFILE || code == ENFILE || code == ENOMEM;
}

int mqd_error_set_static(int code, const char *text)
{
    state.code = code;
    state.text = text;
    return -1;
}

/* Formats into a separate buffer first, because an argument may be the old message itself. */
static void set_message(int code, const char *format, va_list arguments, const char *suffix)
{
    char message[MQD_ERROR_MESSAGE_BYTES];
    int length = vsnprintf(message, sizeof message, format, arguments);
    if (length < 0) {
        length = 0;
        message[0] = 0;
    }
    if (suffix && (size_t)length < sizeof message - 1)
        snprintf(message + length, sizeof message - (size_t)length, ": %s", suffix);
    memcpy(state.buffer, message, sizeof state.buffer);
    state.text = state.buffer;
    state.code = code;
}

int mqd_error_set(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    set_message(code, format, arguments, NULL);
    va_end(arguments);
    return -1;
}

int mqd_error_system(int code, const char *format, ...)
{
    char buffer[128];
    const char *suffix = strerror_r(code, buffer, sizeof buffer); /* GNU: never fails, may return a constant */
    va_list arguments;
    va_start(arguments, format);
    set_message(code, format, arguments, suffix);
    va_end(arguments);
    return -1;
}

int mqd_error_wrap(const char *format, ...)
{
    char cause[MQD_ERROR_MESSAGE_BYTES];
    snprintf(cause, sizeof cause, "%s", mqd_error_message());
    va_list arguments;
    va_start(arguments, format);
    set_message(state.code, format, arguments, cause);
    va_end(arguments);
    return -1;
}
