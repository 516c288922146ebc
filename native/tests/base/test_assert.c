/* A broken invariant aborts the process, is named in its log, and is counted where requested. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/assert.h"
#include "mqd_test.h"

static int answer(void)
{
    return 41;
}

/* Breaks an invariant in a child; its standard error goes to `text`. */
static void broken(uint8_t *count, char *text, size_t capacity)
{
    int ends[2], status;
    CHECK_EQUAL(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        mqd_assert_set_counter(count);
        MQD_ASSERT(answer() == 41, "never said");
        MQD_ASSERT(answer() == 42, "X1: the answer is %d", answer());
        _exit(0);
    }
    close(ends[1]);
    ssize_t size = read(ends[0], text, capacity - 1);
    text[size > 0 ? size : 0] = 0;
    close(ends[0]);
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

TEST(it_aborts_and_names_the_broken_invariant)
{
    char text[1024];
    broken(NULL, text, sizeof text);
    CHECK(strstr(text, "invariant broken: X1: the answer is 41 (") != NULL);
    CHECK(strstr(text, "test_assert.c:") != NULL);
    CHECK(strstr(text, "answer() == 42") != NULL);
}

TEST(it_counts_in_memory_that_outlives_the_process)
{
    char text[1024];
    uint8_t *count = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int round = 1; round <= 2; round++) {
        broken(count, text, sizeof text);
        CHECK_EQUAL(*count, round);
    }
    *count = UINT8_MAX;
    broken(count, text, sizeof text);
    CHECK_EQUAL(*count, UINT8_MAX);
    munmap(count, 4096);
}
