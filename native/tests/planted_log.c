/* For the programs of build/planted: the bits in the environment's MQD_PLANTED_LOG choose the bugs
 * of log/planted_bugs.h. */
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "log/planted_bugs.h"

uint32_t mqd_log_planted;

__attribute__((constructor)) static void plant(void)
{
    const char *bits = getenv("MQD_PLANTED_LOG");
    mqd_log_planted = bits ? (uint32_t)strtoul(bits, NULL, 10) : 0;
    signal(SIGABRT, exit); /* a broken invariant: what the test has on the disk is deleted */
}
