/* tsan */
/* The file layer: replace, append, faults, and a journal from which files can be rebuilt. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/error.h"
#include "base/file.h"
#include "base/file_watch.h"
#include "mqd_test.h"

static char root[64];

static char *in_root(const char *name)
{
    static char path[8][128];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(path[turn], sizeof path[turn], "%s/%s", root, name);
    return path[turn];
}

static void fresh(void)
{
    mqd_file_watch(NULL, NULL);
    strcpy(root, "/tmp/mqd-file-XXXXXX");
    CHECK(mkdtemp(root));
}

static void clean(void)
{
    char command[128];
    mqd_file_watch(NULL, NULL);
    snprintf(command, sizeof command, "rm -rf %s", root);
    CHECK_EQUAL(system(command), 0);
}

static char *text_of(const char *path)
{
    static char text[4][4096];
    static int turn;
    turn = (turn + 1) % 4;
    int fd = open(path, O_RDONLY);
    ssize_t got = fd < 0 ? 0 : read(fd, text[turn], sizeof text[turn] - 1);
    if (fd >= 0)
        close(fd);
    text[turn][got > 0 ? got : 0] = 0;
    return text[turn];
}

TEST(replace_is_all_or_nothing)
{
    fresh();
    CHECK_EQUAL(mqd_file_replace(in_root("a"), (const uint8_t *)"one", 3), 0);
    CHECK_TEXT(text_of(in_root("a")), "one");
    static const char *const rules[] = {"open:ENOSPC:a.tmp", "write:ENOSPC", "write:ENOSPC::budget=2", "sync:EIO:a.tmp",
                                        "rename:EIO"};
    for (int i = 0; i < 5; i++) {
        CHECK_EQUAL(mqd_file_watch(NULL, rules[i]), 0);
        CHECK_EQUAL(mqd_file_replace(in_root("a"), (const uint8_t *)"two", 3), -1);
        CHECK_CONTAINS(mqd_error_message(), "a.tmp");
        mqd_file_watch(NULL, NULL);
        CHECK_TEXT(text_of(in_root("a")), "one");
        CHECK(access(in_root("a.tmp"), F_OK) < 0);
    }
    CHECK_EQUAL(mqd_file_watch(NULL, "write:SHORT::bytes=1"), 0);
    CHECK_EQUAL(mqd_file_replace(in_root("a"), (const uint8_t *)"three", 5), 0);
    CHECK_TEXT(text_of(in_root("a")), "three");
    CHECK_EQUAL(mqd_file_replace(in_root("none/a"), (const uint8_t *)"x", 1), -1);
    CHECK_EQUAL(mqd_error_code(), ENOENT);
    clean();
}

TEST(append_truncates_at_the_position_and_again_after_a_failure)
{
    fresh();
    CHECK_EQUAL(mqd_file_replace(in_root("log"), (const uint8_t *)"0123456789", 10), 0);
    CHECK_EQUAL(mqd_file_open_append(in_root("log"), 11), -1);
    CHECK_CONTAINS(mqd_error_message(), "hole");
    int fd = mqd_file_open_append(in_root("log"), 4);
    CHECK(fd >= 0);
    CHECK_EQUAL(mqd_file_append(fd, (const uint8_t *)"ab", 2, 4), 0);
    CHECK_EQUAL(mqd_file_watch(NULL, "write:ENOSPC::budget=1"), 0);
    CHECK_EQUAL(mqd_file_append(fd, (const uint8_t *)"cd", 2, 6), -1);
    CHECK_EQUAL(mqd_error_code(), ENOSPC);
    mqd_file_watch(NULL, NULL);
    CHECK_EQUAL(mqd_file_flush(fd), 0);
    CHECK_EQUAL(mqd_file_close(fd), 0);
    CHECK_TEXT(text_of(in_root("log")), "0123ab");
    CHECK_EQUAL(mqd_file_mkdir(in_root("d"), 0755), 0);
    CHECK_EQUAL(mqd_file_mkdir(in_root("d"), 0755), -1);
    CHECK_EQUAL(mqd_error_code(), EEXIST);
    CHECK_EQUAL(mqd_file_unlink(in_root("log")), 0);
    CHECK_EQUAL(mqd_file_unlink(in_root("log")), -1);
    CHECK_EQUAL(mqd_file_sync_directory(root), 0);
    clean();
}

TEST(rules_count_and_select)
{
    fresh();
    int a = open(in_root("a"), O_RDWR | O_CREAT, 0644), b = open(in_root("b"), O_RDWR | O_CREAT, 0644);
    CHECK_EQUAL(mqd_file_watch(NULL, "# a comment\npwritev:ENOSPC:/a:after=2:count=2 ; sync:EIO:/b"), 0);
    const int expected[] = {0, 0, ENOSPC, ENOSPC, 0};
    for (int i = 0; i < 5; i++) {
        ssize_t written = mqd_file_pwrite(a, "x", 1, i);
        CHECK_EQUAL(written < 0 ? errno : 0, expected[i]);
        CHECK_EQUAL(mqd_file_pwrite(b, "x", 1, i), 1);
    }
    CHECK_EQUAL(mqd_file_sync(a, false), 0);
    CHECK_EQUAL(mqd_file_sync(b, false), -1);
    CHECK_EQUAL(errno, EIO);
    mqd_file_sync_begin(b);
    CHECK_EQUAL(mqd_file_sync_end(b, false, 0), -EIO);
    static const char *const wrong[] = {"write",         "write:WHAT",        "fly:EIO",
                                        "write:EIO:a:b", "write:EIO:after=x", "write:EIO:after=-1"};
    for (int i = 0; i < 6; i++)
        CHECK_EQUAL(mqd_file_watch(NULL, wrong[i]), -1);
    close(a);
    close(b);
    clean();
}

static void control(const char *rules)
{
    char name[128];
    snprintf(name, sizeof name, "%s", in_root("rules.new"));
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(write(fd, rules, strlen(rules)) == (ssize_t)strlen(rules));
    close(fd);
    CHECK_EQUAL(rename(name, in_root("rules")), 0);
}

TEST(a_control_file_switches_faults)
{
    fresh();
    char spec[128];
    snprintf(spec, sizeof spec, "@%s", in_root("rules"));
    CHECK_EQUAL(mqd_file_watch(NULL, spec), 0);
    int fd = mqd_file_open(in_root("a"), O_RDWR | O_CREAT, 0644);
    CHECK_EQUAL(mqd_file_pwrite(fd, "x", 1, 0), 1); /* no control file: no faults */
    for (int i = 0; i < 3; i++) {
        control("write:ENOSPC");
        CHECK_EQUAL(mqd_file_pwrite(fd, "x", 1, 0), -1);
        CHECK_EQUAL(errno, ENOSPC);
        control("");
        CHECK_EQUAL(mqd_file_pwrite(fd, "x", 1, 0), 1);
    }
    close(fd);
    clean();
}

TEST(a_delay_holds_up_only_its_own_call)
{
    fresh();
    int a = open(in_root("slow"), O_RDWR | O_CREAT, 0644);
    CHECK_EQUAL(mqd_file_watch(NULL, "sync:DELAY:slow:ms=60"), 0);
    int64_t begin = test_now_ns();
    CHECK_EQUAL(mqd_file_pwrite(a, "x", 1, 0), 1);
    CHECK_EQUAL(mqd_file_sync(a, false), 0);
    CHECK(test_now_ns() - begin >= 60000000);
    close(a);
    clean();
}

/* ---- journal ---- */

struct entry {
    uint32_t magic;
    uint16_t op, path_bytes;
    uint64_t sequence, time_ns;
    int64_t offset;
    uint64_t length, reference;
    int32_t result;
    uint32_t data_bytes;
};

static struct entry entries[20000];
static char paths[20000][128];
static uint8_t *data[20000];
static int entry_count;

static void read_journal(const char *prefix)
{
    char path[160];
    snprintf(path, sizeof path, "%s.%d", prefix, (int)getpid());
    FILE *file = fopen(path, "rb");
    CHECK(file);
    for (int i = 0; i < entry_count; i++)
        free(data[i]);
    entry_count = 0;
    while (entry_count < 20000 && fread(&entries[entry_count], 56, 1, file) == 1) {
        struct entry *entry = &entries[entry_count];
        CHECK_EQUAL(entry->magic, 0x314a514d);
        CHECK_EQUAL(entry->sequence, (uint64_t)entry_count + 1);
        CHECK(entry->path_bytes < 128 && fread(paths[entry_count], 1, entry->path_bytes, file) == entry->path_bytes);
        paths[entry_count][entry->path_bytes] = 0;
        data[entry_count] = calloc(1, entry->data_bytes + 1u);
        CHECK(fread(data[entry_count], 1, entry->data_bytes, file) == entry->data_bytes);
        entry_count++;
    }
    fclose(file);
}

static int count_of(enum mqd_file_op op, const char *name)
{
    int count = 0;
    for (int i = 0; i < entry_count; i++)
        count += entries[i].op == op && strstr(paths[i], name) != NULL;
    return count;
}

/* The file's content if every write so far had reached the disk. */
static void rebuild(const char *path, uint8_t *out, int64_t *size_bytes)
{
    *size_bytes = 0;
    for (int i = 0; i < entry_count; i++) {
        if (strcmp(paths[i], path) != 0)
            continue;
        if (entries[i].op == MQD_FILE_TRUNCATE) {
            if (entries[i].offset > *size_bytes)
                memset(out + *size_bytes, 0, (size_t)(entries[i].offset - *size_bytes));
            *size_bytes = entries[i].offset;
        }
        if (entries[i].op == MQD_FILE_WRITE) {
            if (entries[i].offset > *size_bytes)
                memset(out + *size_bytes, 0, (size_t)(entries[i].offset - *size_bytes));
            memcpy(out + entries[i].offset, data[i], entries[i].length);
            if (entries[i].offset + (int64_t)entries[i].length > *size_bytes)
                *size_bytes = entries[i].offset + (int64_t)entries[i].length;
        }
    }
}

TEST(the_journal_rebuilds_files)
{
    fresh();
    char *journal = in_root("journal"), *log = in_root("log");
    CHECK_EQUAL(mqd_file_watch(journal, "write:SHORT:log:bytes=3:after=5:count=9"), 0);
    uint64_t seed = 7;
    int fd = mqd_file_open(log, O_RDWR | O_CREAT, 0644);
    for (int i = 0; i < 300; i++) {
        uint8_t bytes[64];
        for (int k = 0; k < 64; k++)
            bytes[k] = (uint8_t)test_random(&seed);
        struct iovec iov[3] = {{bytes, test_random(&seed) % 20},
                               {bytes + 20, test_random(&seed) % 20},
                               {bytes + 40, 1 + test_random(&seed) % 20}};
        if (test_random(&seed) % 10 == 0)
            CHECK_EQUAL(mqd_file_truncate(fd, (int64_t)(test_random(&seed) % 2000)), 0);
        else
            CHECK(mqd_file_pwritev(fd, iov, 3, (int64_t)(test_random(&seed) % 2000)) > 0);
    }
    mqd_file_watch(NULL, NULL);
    read_journal(journal);
    static uint8_t rebuilt[1 << 16], real[1 << 16];
    int64_t size_bytes;
    rebuild(log, rebuilt, &size_bytes);
    CHECK_EQUAL(pread(fd, real, sizeof real, 0), size_bytes);
    CHECK(memcmp(real, rebuilt, (size_t)size_bytes) == 0);
    close(fd);
    clean();
}

TEST(the_journal_has_names_and_the_coverage_of_syncs)
{
    fresh();
    char *journal = in_root("journal"), *log = in_root("log"), *moved = in_root("moved");
    CHECK_EQUAL(mqd_file_watch(journal, "sync:EIO:moved"), 0);
    int fd = mqd_file_open(log, O_RDWR | O_CREAT, 0644);
    CHECK_EQUAL(mqd_file_pwrite(fd, "abc", 3, 0), 3);
    mqd_file_sync_begin(fd);
    CHECK_EQUAL(mqd_file_pwrite(fd, "def", 3, 3), 3);
    mqd_file_sync_begin(fd);
    CHECK_EQUAL(mqd_file_sync_end(fd, false, 0), 0);
    CHECK_EQUAL(mqd_file_sync_end(fd, false, 0), 0);
    CHECK_EQUAL(mqd_file_sync_end(fd, false, 0), 0); /* its start was never recorded */
    CHECK_EQUAL(mqd_file_rename(log, moved), 0);
    CHECK_EQUAL(mqd_file_sync(fd, false), -1); /* known by its new name */
    CHECK_EQUAL(mqd_file_fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
    CHECK_EQUAL(mqd_file_mkdir(in_root("d"), 0755), 0);
    CHECK_EQUAL(mqd_file_sync_directory(root), 0);
    CHECK_EQUAL(mqd_file_unlink(moved), 0);
    CHECK_EQUAL(mqd_file_syncfs(fd, root), 0);
    close(fd);
    mqd_file_watch(NULL, NULL);
    read_journal(journal);
    CHECK_EQUAL(entries[0].op, MQD_FILE_CREATE);
    CHECK_EQUAL(entries[0].reference, 1);
    CHECK_TEXT(paths[0], log);
    const int ops[] = {MQD_FILE_CREATE,       MQD_FILE_WRITE,      MQD_FILE_SYNC_BEGIN, MQD_FILE_WRITE,
                       MQD_FILE_SYNC_BEGIN,   MQD_FILE_SYNC_DONE,  MQD_FILE_SYNC_DONE,  MQD_FILE_SYNC_DONE,
                       MQD_FILE_RENAME,       MQD_FILE_SYNC_BEGIN, MQD_FILE_SYNC_DONE,  MQD_FILE_FALLOCATE,
                       MQD_FILE_MKDIR,        MQD_FILE_SYNC_BEGIN, MQD_FILE_SYNC_DONE,  MQD_FILE_UNLINK,
                       MQD_FILE_SYNCFS_BEGIN, MQD_FILE_SYNCFS_DONE};
    CHECK_EQUAL(entry_count, (int)(sizeof ops / sizeof ops[0]));
    for (int i = 0; i < entry_count; i++)
        CHECK_EQUAL(entries[i].op, ops[i]);
    CHECK_EQUAL(entries[5].reference, 3); /* the first completion covers only the first start */
    CHECK_EQUAL(entries[6].reference, 5);
    CHECK_EQUAL(entries[7].reference, 0);
    CHECK_TEXT((char *)data[8], moved);
    CHECK_EQUAL(entries[10].result, -EIO);
    CHECK_EQUAL(count_of(MQD_FILE_SYNC_DONE, "moved"), 1);
    for (int i = 1; i < entry_count; i++)
        CHECK(entries[i].time_ns >= entries[i - 1].time_ns);
    clean();
}

static void *hammer(void *argument)
{
    int fd = mqd_file_open(argument, O_RDWR | O_CREAT, 0644);
    for (int i = 0; i < 300; i++) {
        uint32_t word = (uint32_t)i;
        if (mqd_file_pwrite(fd, &word, 4, i * 4) != 4 || (i % 50 == 0 && mqd_file_sync(fd, false) < 0))
            TEST_FAIL("a write failed");
        if (i % 70 == 0) {
            mqd_file_sync_begin(fd);
            if (mqd_file_sync_end(fd, false, 0) != 0)
                TEST_FAIL("synced failed");
        }
    }
    close(fd);
    return NULL;
}

TEST(threads_share_one_journal)
{
    fresh();
    char *journal = in_root("journal"), names[4][128];
    CHECK_EQUAL(mqd_file_watch(journal, NULL), 0);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        snprintf(names[i], sizeof names[i], "%s/thread-%d", root, i);
        CHECK_EQUAL(pthread_create(&threads[i], NULL, hammer, names[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    mqd_file_watch(NULL, NULL);
    read_journal(journal);
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(count_of(MQD_FILE_WRITE, strrchr(names[i], '/')), 300);
        CHECK_EQUAL(count_of(MQD_FILE_SYNC_DONE, strrchr(names[i], '/')), 11);
    }
    clean();
}

struct writing {
    int fd;
    uint32_t stop;
};

static void *write_until_stopped(void *argument)
{
    struct writing *writing = argument;
    while (!mqd_load_relaxed(&writing->stop))
        mqd_file_pwrite(writing->fd, "x", 1, 0);
    return NULL;
}

/* Leftovers of a failed test may still write when the next one begins. */
TEST(watching_begins_and_ends_while_others_write)
{
    fresh();
    struct writing writing = {.fd = open(in_root("written"), O_RDWR | O_CREAT, 0644)};
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, write_until_stopped, &writing), 0);
    for (int i = 0; i < 200; i++)
        CHECK_EQUAL(mqd_file_watch(NULL, i % 2 ? NULL : "write:EIO:written"), 0);
    mqd_store_relaxed(&writing.stop, 1);
    pthread_join(thread, NULL);
    CHECK_EQUAL(mqd_file_pwrite(writing.fd, "x", 1, 0), 1);
    close(writing.fd);
    clean();
}

/* The environment is read when the library is loaded; invalid values end the process, since the
 * test would prove nothing. A forked child writes its own journal. */
TEST(the_environment_and_forks)
{
    fresh();
    char *journal = in_root("journal"), path[160];
    CHECK_EQUAL(mqd_file_watch(journal, NULL), 0);
    pid_t child = fork();
    if (child == 0) {
        int fd = mqd_file_open(in_root("by-child"), O_RDWR | O_CREAT, 0644);
        _exit(fd < 0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK_EQUAL(status, 0);
    snprintf(path, sizeof path, "%s.%d", journal, (int)child);
    struct stat found;
    CHECK_EQUAL(stat(path, &found), 0);
    CHECK(found.st_size > 56);
    mqd_file_watch(NULL, NULL);
    child = fork();
    if (child == 0) {
        setenv("MQD_FILE_FAULTS", "nonsense", 1);
        int null = open("/dev/null", O_WRONLY);
        dup2(null, 2);
        dup2(null, 1);
        execl("/proc/self/exe", "test_file", "no such test", NULL);
        _exit(0);
    }
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 78);
    clean();
}
