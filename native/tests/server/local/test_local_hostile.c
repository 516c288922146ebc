/* tsan: long */
/* Clients through shared memory that do not behave: they scribble over every word, lie about places
 * and lengths, overlap, change bytes while they are copied, never read, flood, punch holes, leave
 * in the middle and keep descriptors. From a seed, though threads make no two runs alike.
 *
 * Checked: the worker lives, others are served all the while (through shared memory and over TCP), every
 * record they read is right; in the end no attachment, no memory, no descriptor is left. (What ASan
 * and UBSan see besides.) */
#include "mqd_local_test.h"

#include <dirent.h>
#include <linux/falloc.h>

#define HOSTILE 8

struct hostile {
    struct local local;
    bool open;
    int kept[4];
    uint32_t kept_count;
};

/* Except log files, which are kept open for reading. */
static uint32_t descriptors(void)
{
    uint32_t count = 0;
    DIR *directory = opendir("/proc/self/fd");
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char target[64] = {0};
        ssize_t n = readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1);
        count += n > 0 && (target[0] != '/' || strncmp(target, "/memfd", 6) == 0);
    }
    closedir(directory);
    return count;
}

static uint64_t some_number(uint64_t *seed)
{
    static const uint64_t edges[] = {
        0,     1,       7,         8,          63,         4095,      4096,       65535,         65536,
        65537, 1 << 20, INT32_MAX, UINT32_MAX, 1ull << 32, INT64_MAX, UINT64_MAX, UINT64_MAX - 7};
    uint64_t random = test_random(seed);
    return random % 3 ? edges[random / 3 % (sizeof edges / sizeof *edges)] : random;
}

/* ---- hostile actions ---- */

static void send_wrong_position(struct hostile *h, uint64_t *seed)
{
    struct local *local = &h->local;
    bool inside = test_random(seed) % 2;
    uint64_t offset = inside ? test_random(seed) % local->data_bytes : some_number(seed);
    uint32_t size_bytes = inside ? (uint32_t)(test_random(seed) % 200 + 4) : (uint32_t)some_number(seed);
    local_put(local, offset, size_bytes);
    local_publish(local);
}

/* A frame that starts like a real one: known keys and versions, then random bytes; sometimes
 * valid and truncated. */
static void send_rubbish(struct hostile *h, uint64_t *seed)
{
    struct local *local = &h->local;
    struct frame frame = {0};
    struct part part = {(int32_t)(test_random(seed) % 6),
                        {.mark = test_random(seed), .body_bytes = (int32_t)(test_random(seed) % 20000 + 64)}};
    struct fetch_position requested = {(int32_t)(test_random(seed) % 6), (int64_t)(test_random(seed) % 100)};
    if (test_random(seed) % 2)
        put_produce(&frame, 1, (int)(test_random(seed) % 3) - 1, 1000, &part, 1);
    else
        put_fetch(&frame,
                  (struct fetch){.correlation_id = 2,
                                 .wait_ms = (int32_t)(test_random(seed) % 50),
                                 .bytes_min = 1,
                                 .bytes_max = (int32_t)(test_random(seed) % 2 * (1 << 20))},
                  &requested, 1);
    uint32_t size_bytes = frame.size_bytes - 4;
    for (uint32_t i = 0; i < test_random(seed) % 3; i++)
        frame.bytes[4 + test_random(seed) % size_bytes] = (uint8_t)test_random(seed);
    if (test_random(seed) % 4 == 0)
        size_bytes = (uint32_t)(test_random(seed) % size_bytes) + 1;
    uint64_t at = test_random(seed) % (local->data_bytes - size_bytes);
    memcpy(local->data + at, frame.bytes + 4, size_bytes);
    for (uint32_t i = 0; i < test_random(seed) % 4 + 1; i++) /* overlapping: the same bytes again */
        local_put(local, at, size_bytes);
    local_publish(local);
    frame_free(&frame);
}

static void scribble(struct hostile *h, uint64_t *seed)
{
    struct mqd_local_header *header = h->local.header;
    uint64_t small = test_random(seed) % 4096, words = sizeof *header / 8;
    switch (test_random(seed) % 6) {
    case 0:
        mqd_store_release(&header->submission_tail, test_random(seed) % 2 ? h->local.tail + small : some_number(seed));
        break;
    case 1:
        mqd_store_release(&header->reply_head, test_random(seed) % 2 ? h->local.head + small : some_number(seed));
        break;
    case 2:
        mqd_store_release(&header->client_sleeping, (uint32_t)some_number(seed));
        break;
    case 3: /* what is the worker's: it keeps its own */
        mqd_store_release(&header->submission_head, some_number(seed));
        mqd_store_release(&header->reply_tail, some_number(seed));
        mqd_store_release(&header->worker_needs_room, (uint32_t)some_number(seed));
        break;
    case 4:
        for (uint64_t i = 0; i < 16; i++) /* the sizes and places above all */
            mqd_store_relaxed((uint64_t *)header + i, test_random(seed));
        break;
    default:
        for (uint64_t i = 0; i < 40; i++)
            mqd_store_relaxed((uint64_t *)header + test_random(seed) % words, test_random(seed));
    }
    eventfd_write(h->local.fds[1], 1);
}

static void talk(struct hostile *h, uint64_t *seed)
{
    uint8_t bytes[512] = {0};
    int fd = h->local.client.fd;
    switch (test_random(seed) % 4) {
    /* of 0 bytes too: looks like the end */
    case 0:
        send(fd, bytes, test_random(seed) % sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
    case 1:
        for (uint32_t i = 0; i < 100; i++) { /* no client takes the responses */
            struct mqd_local_query query = {
                .kind = MQD_LOCAL_QUERY_SEGMENT, .partition_index = (int32_t)(i % 5), .offset = (int64_t)(i % 3)};
            memcpy(query.topic_id, h->local.b->topic_id, 16);
            if (send(fd, &query, sizeof query, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
                break;
        }
        break;
    case 2:
        for (uint32_t i = 0; i < 200; i++)
            eventfd_write(h->local.fds[1], i);
        break;
    default:
        shutdown(fd, test_random(seed) % 2 ? SHUT_RD : SHUT_WR);
    }
}

static void damage_memory(struct hostile *h, uint64_t *seed)
{
    int memory = h->local.fds[0];
    CHECK(ftruncate(memory, (off_t)some_number(seed) & 0xfffff) < 0);
    CHECK(fcntl(memory, F_ADD_SEALS, F_SEAL_WRITE) < 0);
    CHECK_EQUAL(fallocate(memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)h->local.total_bytes), 0);
    /* full: further writes would block, but the worker only polls it for readability */
    eventfd_write(h->local.fds[1], UINT64_MAX - 1);
    fcntl(h->local.fds[2], F_SETFL,
          0); /* blocking, if the flag were shared: the worker must not block when no process reads it */
    mqd_store_release(&h->local.header->client_sleeping, 1u);
}

static void leave(struct hostile *h, uint64_t *seed)
{
    if (!h->open)
        return;
    for (int i = 0; i < MQD_LOCAL_FD_COUNT && h->kept_count < 4; i++) /* some stay open in another process */
        if (test_random(seed) % 4 == 0)
            h->kept[h->kept_count++] = dup(h->local.fds[i]);
    local_close(&h->local);
    h->open = false;
}

static void forget(struct hostile *h)
{
    while (h->kept_count)
        close(h->kept[--h->kept_count]);
}

static void act(struct bench *b, struct hostile *h, uint64_t *seed)
{
    if (!h->open) {
        forget(h);
        h->local = local_open(b, (uint32_t)(test_random(seed) % 2),
                              (struct local_sizes){some_number(seed) & 0xfffff, (uint32_t)some_number(seed) & 0xffff,
                                                   (uint32_t)some_number(seed) & 0xfff});
        h->open = h->local.welcome.error == 0;
        if (!h->open)
            local_close(&h->local);
        return;
    }
    switch (test_random(seed) % 16) {
    case 0:
    case 1:
        send_wrong_position(h, seed);
        break;
    case 2:
        scribble(h, seed);
        break;
    case 3:
        talk(h, seed);
        break;
    case 4:
        damage_memory(h, seed);
        break;
    case 5:
        leave(h, seed);
        break;
    default:
        send_rubbish(h, seed);
    }
    if (local_ended(&h->local))
        leave(h, seed);
}

/* ---- well-behaved clients meanwhile ---- */

struct scene {
    struct bench *b;
    _Atomic bool stop;
    struct hostile *victims;
    uint64_t seed;
};

static void *change_bytes(void *argument)
{
    struct scene *scene = argument;
    struct local local = local_open(scene->b, 0, (struct local_sizes){1 << 17, 1 << 12, 64});
    uint64_t seed = scene->seed;
    struct frame frame = {0};
    struct part part = {1, {.mark = 3, .body_bytes = 30000}};
    put_produce(&frame, 1, 1, 1000, &part, 1);
    while (!scene->stop && !local_ended(&local)) { /* a request that is never twice the same, copied all the while */
        memcpy(local.data, frame.bytes + 4, frame.size_bytes - 4);
        for (uint32_t i = 0;
             i < 20 && local.tail - mqd_load_acquire(&local.header->submission_head) < local.submission_count; i++)
            local_put(&local, 0, frame.size_bytes - 4);
        local_publish(&local);
        for (uint32_t i = 0; i < 200; i++)
            __atomic_store_n(&local.data[20 + test_random(&seed) % 30000], (uint8_t)test_random(&seed),
                             __ATOMIC_RELAXED);
        mqd_store_release(&local.header->reply_head, mqd_load_acquire(&local.header->reply_tail));
    }
    frame_free(&frame);
    local_close(&local);
    return NULL;
}

/* Random bytes may be a valid request to the acceptor: it closes the connection. */
static void serve_acceptor(struct bench *b)
{
    struct mqd_descriptor descriptor;
    uint32_t from;
    while (bench_take(b, ACCEPTOR, &descriptor, &from, 0))
        if (descriptor.kind == MQD_LINK_REQUEST)
            bench_put(b, ACCEPTOR, from, (struct mqd_descriptor){.kind = MQD_LINK_CLOSE, .token = descriptor.token});
}

static void serve_fake(struct bench *b)
{
    struct mqd_descriptor descriptor;
    uint32_t from;
    while (bench_take(b, FAKE, &descriptor, &from, 0))
        if (descriptor.kind == MQD_LINK_PRODUCE)
            bench_put(
                b, FAKE, from,
                (struct mqd_descriptor){
                    .kind = MQD_LINK_PRODUCED, .token = descriptor.token, .offset = descriptor.offset, .error = 6});
}

static void others_are_served(struct bench *b, struct local *good, struct client *tcp, uint64_t mark,
                              struct fetched *fetched)
{
    struct part part = {(int32_t)(mark % 4), {.mark = mark}};
    struct produced produced = local_produce(good, 1, &part, 1);
    CHECK_EQUAL(produced.error[0], 0);
    struct fetch_position requested = {part.partition, produced.base_offset[0]};
    client_fetch(tcp, (struct fetch){.correlation_id = 1, .bytes_max = 1 << 20, .bytes_min = 1, .wait_ms = LIMIT_MS},
                 &requested, 1, fetched);
    CHECK(fetched->batch_count >= 1);
    CHECK_EQUAL(fetched->batches[0].mark, mark);
}

static void run(struct bench *b, uint64_t seed, uint32_t rounds, struct fetched *fetched)
{
    struct hostile hostile[HOSTILE] = {0};
    struct scene scene = {.b = b, .seed = seed};
    struct local good = local_open(b, (uint32_t)(seed % 2), (struct local_sizes){1 << 17, 1 << 12, 64});
    struct client tcp = client_open(b, (uint32_t)(seed / 2 % 2));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, change_bytes, &scene) == 0);
    for (uint32_t round = 0; round < rounds; round++) {
        act(b, &hostile[test_random(&seed) % HOSTILE], &seed);
        serve_acceptor(b);
        serve_fake(b);
        if (round % 64 == 0)
            others_are_served(b, &good, &tcp, seed, fetched);
    }
    scene.stop = true;
    pthread_join(thread, NULL);
    for (uint32_t i = 0; i < HOSTILE; i++) {
        leave(&hostile[i], &seed);
        forget(&hostile[i]);
    }
    others_are_served(b, &good, &tcp, seed, fetched);
    local_close(&good);
    client_close(&tcp);
    serve_acceptor(b);
    local_wait_none(b);
    for (uint32_t worker = 0; worker < REACTORS; worker++)
        while (mqd_load_relaxed(&mqd_control_endpoint(b->control, worker)->connection_count)) /* the one over TCP */
            poll(NULL, 0, 1);
}

BOTH(hostile_clients)
{
    struct bench *b = local_bench(backend, NULL);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    mqd_control_set_log_level(b->control, 2);
    uint32_t before = 0;
    for (uint64_t seed = 1; seed <= (test_long() ? 60 : 2); seed++) {
        run(b, seed * 7919, 1500, fetched);
        if (seed == 2)
            before = descriptors();
    }
    uint64_t attached = 0, ended = 0, requests = 0;
    for (uint32_t worker = 0; worker < REACTORS; worker++) {
        attached += local_counter(b, worker, MQD_COUNT_LOCAL_ATTACHES);
        ended += local_counter(b, worker, MQD_COUNT_PROTOCOL_ERRORS);
        requests += local_counter(b, worker, MQD_COUNT_LOCAL_REQUESTS);
    }
    test_message("%llu attached, %llu broke the protocol, %llu requests", (unsigned long long)attached,
                 (unsigned long long)ended, (unsigned long long)requests);
    CHECK(ended > 20 && requests > 500); /* else this tests nothing */
    free(fetched);
    CHECK_EQUAL(descriptors(), before);
    local_bench_stop(b);
}

/* The client is gone, its socket with it, but its last request waits for a response that does
 * not arrive: the memory is freed nevertheless. */
BOTH(a_closed_client_is_freed_despite_its_requests)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, (struct local_sizes){1 << 17, 1 << 12, 1024});
    struct frame frame = {0};
    for (int32_t i = 0; i < 40; i++) { /* more than inflight_count_max: it is not even read to its end */
        uint32_t begin = frame_begin(&frame, 12, 0, i);
        put_text(&frame, "no API answers this");
        frame_end(&frame, begin);
    }
    CHECK_EQUAL(local_send(&local, &frame), 1);
    frame_free(&frame);
    bench_expect(b, ACCEPTOR, MQD_LINK_REQUEST, NULL);
    local_close(&local);
    local_wait_none(b);
    local_bench_stop(b);
}

/* Responses that a client does not read: others are not affected, and when they are read at last
 * they are in order. */
BOTH(a_client_that_never_reads)
{
    struct bench *b = local_bench(backend, NULL);
    struct local local = local_open(b, 0, (struct local_sizes){1 << 20, 1 << 12, 4096});
    struct part part = {0, {.mark = 1, .body_bytes = 100000}};
    CHECK_EQUAL(local_produce(&local, 1, &part, 1).error[0], 0);
    struct frame frame = {0};
    struct fetch_position requested = {0, 0};
    for (int32_t i = 0; i < 3000; i++)
        put_fetch(&frame, (struct fetch){.correlation_id = i, .bytes_max = 1 << 20}, &requested, 1);
    CHECK_EQUAL(local_send(&local, &frame), 1);
    frame_free(&frame);
    struct local other = local_open(b, 0, (struct local_sizes){1 << 20, 1 << 12, 16});
    for (int i = 0; i < 50; i++)
        CHECK_EQUAL(local_produce(&other, 1, &part, 1).error[0], 0);
    struct fetched *fetched = calloc(1, sizeof *fetched);
    for (int32_t i = 0; i < 30; i++) { /* and when it reads at last, all is there in order */
        CHECK_EQUAL(local_receive(&local), 1);
        take_fetched(&local.client, fetched);
        CHECK_EQUAL(fetched->correlation_id, i);
    }
    free(fetched);
    local_close(&local);
    local_close(&other);
    local_wait_none(b);
    local_bench_stop(b);
}
