/* See mqd_fetcher.h. */
#define _GNU_SOURCE
#include <errno.h>

#include "mqd_reactor.h"

void mqd_fetcher_assigned(struct mqd_reactor *r, struct mqd_owned *owned)
{
}

void mqd_fetcher_leave(struct mqd_reactor *r, struct mqd_owned *owned)
{
}

void mqd_fetcher_command(struct mqd_reactor *r, const struct mqd_command *command)
{
    if (command->kind == MQD_COMMAND_FETCHER_PUT)
        mqd_file_close((int)command->number);
    mqd_command_done(r, command->token, ENOSYS, UINT32_MAX, 0, NULL, "this build does not follow other hosts");
}

void mqd_fetcher_written(struct mqd_reactor *r, struct mqd_owned *owned, int error)
{
}

void mqd_fetcher_flushed(struct mqd_reactor *r, struct mqd_owned *owned)
{
}

void mqd_fetcher_rested(struct mqd_reactor *r, struct mqd_owned *owned)
{
}

void mqd_fetcher_on_event(struct mqd_reactor *r, uint64_t value, uint32_t flags)
{
}

void mqd_fetchers_read(struct mqd_reactor *r)
{
}

void mqd_fetchers_run(struct mqd_reactor *r)
{
}

int64_t mqd_fetchers_next_ms(const struct mqd_reactor *r)
{
    return -1;
}

void mqd_fetchers_close(struct mqd_reactor *r)
{
}

void mqd_fetchers_destroy(struct mqd_reactor *r)
{
}
