/* Kernels without a system call, for tests: a seccomp filter in a forked child, like those of
 * container runtimes. */
#ifndef MQD_SECCOMP_TEST_H
#define MQD_SECCOMP_TEST_H

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mqd_test.h"

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

/* From now on for this thread and its children. error 0: the call is allowed. */
static bool calls_refused(unsigned first, int first_error, unsigned second, int second_error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, first, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, first_error ? SECCOMP_RET_ERRNO | (unsigned)first_error : SECCOMP_RET_ALLOW),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, second, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, second_error ? SECCOMP_RET_ERRNO | (unsigned)second_error : SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* Runs `test` in a child where the two calls are refused; its failures count. */
static void where_calls_refused(unsigned first, int first_error, unsigned second, int second_error,
                                void (*test)(int argument), int argument)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        CHECK_OR(calls_refused(first, first_error, second, second_error), _exit(2));
        test(argument);
        fflush(NULL);
        _exit(test_failed ? 1 : 0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_EQUAL(status, 0);
}

__attribute__((unused)) static void where_refused(int cachestat_error, int mincore_error, void (*test)(int argument),
                                                  int argument)
{
    where_calls_refused(SYS_cachestat, cachestat_error, SYS_mincore, mincore_error, test, argument);
}

#endif
