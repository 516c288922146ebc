/* Reads a range of a file in full. */
#ifndef MQD_READ_H
#define MQD_READ_H

#include <errno.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

/* Returns 0, or -1 with errno; EIO: the file ends too early. */
static inline int mqd_read_exactly(int fd, void *bytes, size_t size_bytes, int64_t position)
{
    for (size_t have = 0; have < size_bytes;) {
        ssize_t got = pread(fd, (uint8_t *)bytes + have, size_bytes - have, (off_t)(position + (int64_t)have));
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0)
            errno = EIO;
        if (got <= 0)
            return -1;
        have += (size_t)got;
    }
    return 0;
}

#endif
