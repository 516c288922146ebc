/* tsan: long */
/* Two reactors over loopback at full speed: every byte arrives, and the cost in each side's
 * thread. MQD_TEST_LONG=1 runs long enough for figures (build with -O3, not here). */
#include <dirent.h>

#include "mqd_fetcher_test.h"
#include "shm/api.h"

#include "mqd_tls_test.h"

#define BODY_BYTES (16 * 1024)
#define IN_FLIGHT 12

static void not_flushed(struct bench *b)
{
    b->log_options.flush_on_ack = 0;
    b->log_options.segment_bytes = 256 << 20;
}

/* CPU of the thread of this name, in microseconds. */
static int64_t cpu_us(const char *name)
{
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *entry;
    int64_t found = -1;
    while (tasks && found < 0 && (entry = readdir(tasks))) {
        char path[320], comm[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "r");
        bool it = file && fgets(comm, sizeof comm, file) && strncmp(comm, name, strlen(name)) == 0;
        if (file)
            fclose(file);
        if (!it)
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", entry->d_name);
        long long ns;
        if ((file = fopen(path, "r"))) {
            if (fscanf(file, "%lld", &ns) == 1)
                found = ns / 1000;
            fclose(file);
        }
    }
    if (tasks)
        closedir(tasks);
    return found;
}

/* `count` batches with acks=all, IN_FLIGHT at a time. */
static void produce(struct client *client, int count)
{
    struct frame frame = {0};
    struct part part = {0, {.mark = 7, .record_count = 16, .body_bytes = BODY_BYTES}};
    put_produce(&frame, 77, -1, LIMIT_MS, &part, 1);
    for (int sent = 0, answered = 0; answered < count;) {
        if (sent < count && sent - answered < IN_FLIGHT) {
            CHECK(client_send(client, &frame));
            sent++;
            continue;
        }
        CHECK_EQUAL(client_receive(client), 1);
        CHECK_EQUAL(take_produced(client).error[0], 0);
        answered++;
    }
    frame_free(&frame);
}

enum how { ALONE, PLAIN, SECURE };
static const char *const names[] = {"alone", "replicated", "replicated over TLS"};

static void connect_secure(struct two *two)
{
    struct tls_identity ca = tls_identity("ca");
    for (uint32_t worker = 0; worker < 2; worker++) {
        struct tls_identity host = tls_node(&ca, worker ? "URI:mqd://node/2" : "URI:mqd://node/1", 2);
        struct mqd_tls_context *context = tls_hosts_context(&host, &ca);
        CHECK_OR(context, abort());
        CHECK_EQUAL(
            mqd_reactor_set_listener_tls(two->b->reactors[worker], ++two->b->token, MQD_LISTENER_ID_HOSTS, context), 0);
        CHECK_EQUAL(bench_done(two->b, worker, two->b->token).error, 0);
        tls_identity_free(&host);
    }
    tls_identity_free(&ca);
    struct mqd_fetcher_options options = fetcher_options();
    options.tls = 1;
    fetcher_put(two, client_open_of(two->b, 0, 0, 2, true).fd, options);
}

static void measure(int backend, enum how how)
{
    struct two *two = two_start(backend, not_flushed);
    int count = test_long() ? 40000 : 1500;
    struct client client = client_open(two->b, 0);
    if (how != ALONE) {
        struct role role = {.leader = 1, .leader_epoch = 1, .partition_epoch = 1, .min_insync = 2, .in_sync = 6};
        follower_open(two, 0);
        assign_follower(two, 0, role);
        assign_leader(two, 0, role);
        if (how == SECURE)
            connect_secure(two);
        else
            connect_to_leader(two);
    }
    produce(&client, 200);
    uint64_t before[2][MQD_COUNTER_COUNT], after[2][MQD_COUNTER_COUNT], histograms[MQD_HISTOGRAM_COUNT * 128];
    for (uint32_t worker = 0; worker < 2; worker++)
        mqd_stats_read(two->b->control, worker, before[worker], histograms);
    int64_t leader_us = cpu_us("mqd-reactor-0"), follower_us = cpu_us("mqd-reactor-1"), began_ns = test_now_ns();
    produce(&client, count);
    int64_t took_ns = test_now_ns() - began_ns;
    double mb = count * (double)BODY_BYTES / 1e6;
    leader_us = cpu_us("mqd-reactor-0") - leader_us, follower_us = cpu_us("mqd-reactor-1") - follower_us;
    test_message("%s: %.0f MB/s; CPU-us per KiB record: leader %.3f, follower %.3f", names[how], mb / (took_ns / 1e9),
                 leader_us / (count * 16.0), follower_us / (count * 16.0));
    for (uint32_t worker = 0; worker < 2; worker++)
        mqd_stats_read(two->b->control, worker, after[worker], histograms);
    test_message("  per MB: leader %.2f turns, %.2f fetches; follower %.2f turns",
                 (after[0][MQD_COUNT_LOOPS] - before[0][MQD_COUNT_LOOPS]) / mb,
                 (after[0][MQD_COUNT_REQUESTS_FETCH] - before[0][MQD_COUNT_REQUESTS_FETCH]) / mb,
                 (after[1][MQD_COUNT_LOOPS] - before[1][MQD_COUNT_LOOPS]) / mb);
    if (how != ALONE) {
        UNTIL(positions_of(two, FOLLOWED(0)).high_watermark == (count + 200) * 16);
        char command[400];
        snprintf(command, sizeof command,
                 "cmp %s/quick-0/00000000000000000000.log %s/follower-0/00000000000000000000.log", log_root, log_root);
        CHECK_EQUAL(system(command), 0);
    }
    client_close(&client);
    two_stop(two);
}

BOTH(alone)
{
    measure(backend, ALONE);
}
BOTH(replicated)
{
    measure(backend, PLAIN);
}

/* For figures: both, alternately. Correctness is tested in test_fetcher_tls.c. */
BOTH(replicated_over_tls)
{
    for (int turn = 0; turn < 5 && test_long() && tls_works(); turn++) {
        measure(backend, PLAIN);
        measure(backend, SECURE);
    }
}
