/* A test program: TEST(name) { ... CHECK(condition); ... }, any number of them, and this header
 * once; it defines main().
 *
 *   CHECK(c)  CHECK_EQUAL(a, b)  CHECK_TEXT(a, b)  CHECK_CONTAINS(text, part)
 *                        end the test (not the program) when they fail
 *   test_long()          true under check-long: more seeds, more rounds
 *   test_random(&s)      64 random bits from a seed; the same seed gives the same run
 *   test_message(...)    a line beside the result, e.g. a seed
 *
 * A failing check returns from its function; in a helper use CHECK too and continue, the failure is
 * remembered. Checks may run in any thread.
 */
#ifndef MQD_TEST_H
#define MQD_TEST_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct test_case {
    const char *name;
    void (*run)(void);
    struct test_case *next;
};
static struct test_case *test_first, **test_end = &test_first;
static int test_failed; /* of the running test; any thread sets it */

#define TEST(function)                                                                                                 \
    static void function(void);                                                                                        \
    __attribute__((constructor)) static void register_##function(void)                                                 \
    {                                                                                                                  \
        static struct test_case test = {#function, function, NULL};                                                    \
        *test_end = &test;                                                                                             \
        test_end = &test.next;                                                                                         \
    }                                                                                                                  \
    static void function(void)

#define TEST_FAIL(...)                                                                                                 \
    do {                                                                                                               \
        __atomic_store_n(&test_failed, 1, __ATOMIC_SEQ_CST);                                                           \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                                \
        fprintf(stderr, __VA_ARGS__);                                                                                  \
        fprintf(stderr, "\n");                                                                                         \
    } while (0)

/* CHECK_OR: what to do after a failure where a bare return does not fit, e.g. CHECK_OR(x, return
 * NULL). */
#define CHECK_OR(condition, action)                                                                                    \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            TEST_FAIL("not true: %s", #condition);                                                                     \
            action;                                                                                                    \
        }                                                                                                              \
    } while (0)
#define CHECK(condition) CHECK_OR(condition, return)
#define CHECK_EQUAL(left, right)                                                                                       \
    do {                                                                                                               \
        long long left_ = (long long)(left), right_ = (long long)(right);                                              \
        if (left_ != right_) {                                                                                         \
            TEST_FAIL("%s is %lld, %s is %lld", #left, left_, #right, right_);                                         \
            return;                                                                                                    \
        }                                                                                                              \
    } while (0)
#define CHECK_TEXT(left, right)                                                                                        \
    do {                                                                                                               \
        const char *left_ = (left), *right_ = (right);                                                                 \
        if (strcmp(left_, right_) != 0) {                                                                              \
            TEST_FAIL("%s is \"%s\", not \"%s\"", #left, left_, right_);                                               \
            return;                                                                                                    \
        }                                                                                                              \
    } while (0)
#define CHECK_CONTAINS(text, part)                                                                                     \
    do {                                                                                                               \
        const char *text_ = (text), *part_ = (part);                                                                   \
        if (!strstr(text_, part_)) {                                                                                   \
            TEST_FAIL("%s is \"%s\", without \"%s\"", #text, text_, part_);                                            \
            return;                                                                                                    \
        }                                                                                                              \
    } while (0)
#define test_message(...) (printf("  "), printf(__VA_ARGS__), printf("\n"))

__attribute__((unused)) static bool test_long(void)
{
    const char *value = getenv("MQD_TEST_LONG");
    return value && *value && strcmp(value, "0") != 0;
}

/* splitmix64 */
__attribute__((unused)) static uint64_t test_random(uint64_t *seed)
{
    uint64_t z = (*seed += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__attribute__((unused)) static int64_t test_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

int main(int argc, char **argv)
{
    int passed = 0, failed = 0;
    for (struct test_case *test = test_first; test; test = test->next) {
        if (argc > 1 && !strstr(test->name, argv[1]))
            continue;
        test_failed = 0;
        int64_t begin = test_now_ns();
        test->run();
        bool bad = __atomic_load_n(&test_failed, __ATOMIC_SEQ_CST);
        printf("%s %s (%lld ms)\n", bad ? "FAILED" : "ok    ", test->name,
               (long long)(test_now_ns() - begin) / 1000000);
        fflush(stdout);
        passed += !bad;
        failed += bad;
    }
    const char *name = strrchr(argv[0], '/');
    printf("%s: %d passed, %d failed\n", name ? name + 1 : argv[0], passed, failed);
    return failed ? 1 : 0;
}

#endif
