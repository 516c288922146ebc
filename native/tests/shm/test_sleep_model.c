/* The sleep protocol of shm/link.c, step by step, through every interleaving there is.
 *
 * One consumer, one or two producers, each a little program of atomic steps; S1..S4 and P1..P3 as
 * at the head of shm/link.c. A state is all program counters, registers, shared words and store
 * buffers; all reachable states are visited. Two machines: sequential consistency, and total store
 * order, where each thread's stores wait in a buffer of its own and reach memory at any later time,
 * as on x86 (and where a fence or an exchange waits until the own buffer is empty).
 *
 * A state in which no thread can continue while the consumer has not got every message is a lost
 * wake-up. To prove that the model detects errors, it is also run with each fence left out, without
 * the second check, and with the flag read before the publication.
 */
#include "mqd_test.h"

enum { PRODUCERS_MAX = 2, MESSAGES_MAX = 3, BUFFER_MAX = 4, STEPS_MAX = 40 };
enum { CONSUMER, FIRST_PRODUCER, THREADS_MAX = FIRST_PRODUCER + PRODUCERS_MAX };
enum { WORD_SLEEPING, WORD_TAIL /* and one more per producer */, WORD_COUNT = WORD_TAIL + PRODUCERS_MAX };

enum operation {
    STORE, /* word = value */
    FENCE,
    LOAD,     /* register = word */
    EXCHANGE, /* register = word, word = value, atomically and in order */
    IF_ZERO,  /* jump when the register is 0 */
    EVENT_WRITE,
    EVENT_WAIT, /* blocks until the eventfd was written; takes that */
    TAKE,       /* consumer reads the tail of producer `value`; what is new is received, and the register is set */
    PEEK,       /* the same without receiving */
    CLEAR,      /* register = 0 */
    IF_SET,
    IF_ALL, /* jump when every message of everyone was received */
    JUMP,
    END
};
struct step {
    uint8_t operation, word, value, target;
};

struct state {
    uint8_t counter[THREADS_MAX];
    uint8_t held[THREADS_MAX]; /* the register */
    uint8_t received[PRODUCERS_MAX];
    uint8_t memory[WORD_COUNT];
    uint8_t event;
    uint8_t buffered[THREADS_MAX];
    uint8_t buffer[THREADS_MAX][BUFFER_MAX][2];
};

struct model {
    bool store_buffers;
    int producers, messages;
    bool no_consumer_fence, no_producer_fence, no_second_check, flag_before_publish;
    struct step program[THREADS_MAX][STEPS_MAX];
    /* result */
    uint64_t state_count;
    uint64_t lost_count;
    bool blocked_seen, woken_seen;
};

/* ---- the programs ---- */

static int emit(struct step *program, int at, enum operation operation, int word, int value, int target)
{
    program[at] = (struct step){(uint8_t)operation, (uint8_t)word, (uint8_t)value, (uint8_t)target};
    return at + 1;
}

static void write_consumer(struct model *model)
{
    struct step *program = model->program[CONSUMER];
    int at = emit(program, 0, CLEAR, 0, 0, 0);
    for (int producer = 0; producer < model->producers; producer++)
        at = emit(program, at, TAKE, 0, producer, 0); /* drain */
    int if_all = at++;
    at = emit(program, at, IF_SET, 0, 0, 0);
    at = emit(program, at, STORE, WORD_SLEEPING, 1, 0); /* S1 */
    if (!model->no_consumer_fence)
        at = emit(program, at, FENCE, 0, 0, 0); /* S2 */
    at = emit(program, at, CLEAR, 0, 0, 0);
    for (int producer = 0; producer < model->producers && !model->no_second_check; producer++)
        at = emit(program, at, PEEK, 0, producer, 0); /* S3 */
    emit(program, at, IF_SET, 0, 0, at + 2);
    at = emit(program, at + 1, EVENT_WAIT, 0, 0, 0);    /* S4 */
    at = emit(program, at, STORE, WORD_SLEEPING, 0, 0); /* awake */
    at = emit(program, at, JUMP, 0, 0, 0);
    emit(program, if_all, IF_ALL, 0, 0, at);
    emit(program, at, END, 0, 0, 0);
}

static void write_producer(struct model *model, int producer)
{
    struct step *program = model->program[FIRST_PRODUCER + producer];
    int at = 0;
    for (int message = 1; message <= model->messages; message++) {
        if (model->flag_before_publish)
            at = emit(program, at, LOAD, WORD_SLEEPING, 0, 0);
        at = emit(program, at, STORE, WORD_TAIL + producer, message, 0); /* P1 */
        if (!model->no_producer_fence)
            at = emit(program, at, FENCE, 0, 0, 0); /* P2 */
        if (!model->flag_before_publish)
            at = emit(program, at, LOAD, WORD_SLEEPING, 0, 0); /* P3 */
        int next = at + 4;
        at = emit(program, at, IF_ZERO, 0, 0, next);
        at = emit(program, at, EXCHANGE, WORD_SLEEPING, 0, 0);
        at = emit(program, at, IF_ZERO, 0, 0, next);
        at = emit(program, at, EVENT_WRITE, 0, 0, 0);
    }
    emit(program, at, END, 0, 0, 0);
}

/* ---- the machine ---- */

static uint8_t load(const struct state *state, int thread, int word)
{
    for (int i = state->buffered[thread]; i-- > 0;)
        if (state->buffer[thread][i][0] == word)
            return state->buffer[thread][i][1]; /* a thread sees its own stores */
    return state->memory[word];
}

static bool drain_one(struct state *state, int thread)
{
    if (!state->buffered[thread])
        return false;
    state->memory[state->buffer[thread][0][0]] = state->buffer[thread][0][1];
    memmove(state->buffer[thread][0], state->buffer[thread][1], (BUFFER_MAX - 1) * 2);
    memset(state->buffer[thread][--state->buffered[thread]], 0, 2); /* equal states look equal */
    return true;
}

static bool read_tail(struct state *state, int thread, int producer, bool receive)
{
    uint8_t tail = load(state, thread, WORD_TAIL + producer);
    if (tail != state->received[producer])
        state->held[thread] = 1;
    if (receive)
        state->received[producer] = tail;
    return true;
}

static bool all_received(const struct model *model, const struct state *state)
{
    for (int producer = 0; producer < model->producers; producer++)
        if (state->received[producer] != model->messages)
            return false;
    return true;
}

/* Lets a thread do its next step; false when it cannot. */
static bool advance(struct model *model, struct state *state, int thread)
{
    const struct step *step = &model->program[thread][state->counter[thread]];
    int next = state->counter[thread] + 1;
    switch ((enum operation)step->operation) {
    case STORE:
        if (!model->store_buffers)
            state->memory[step->word] = step->value;
        else if (state->buffered[thread] == BUFFER_MAX)
            return false;
        else {
            state->buffer[thread][state->buffered[thread]][0] = step->word;
            state->buffer[thread][state->buffered[thread]++][1] = step->value;
        }
        break;
    case FENCE:
        if (state->buffered[thread])
            return false;
        break;
    case LOAD:
        state->held[thread] = load(state, thread, step->word);
        break;
    case EXCHANGE:
        if (state->buffered[thread])
            return false;
        state->held[thread] = state->memory[step->word];
        state->memory[step->word] = step->value;
        break;
    case EVENT_WRITE:
        state->event = 1;
        break;
    case EVENT_WAIT:
        model->blocked_seen |= !state->event;
        if (!state->event)
            return false;
        model->woken_seen = true;
        state->event = 0;
        break;
    case TAKE:
        read_tail(state, thread, step->value, true);
        break;
    case PEEK:
        read_tail(state, thread, step->value, false);
        break;
    case CLEAR:
        state->held[thread] = 0;
        break;
    case IF_ZERO:
        next = state->held[thread] ? next : step->target;
        break;
    case IF_SET:
        next = state->held[thread] ? step->target : next;
        break;
    case IF_ALL:
        next = all_received(model, state) ? step->target : next;
        break;
    case JUMP:
        next = step->target;
        break;
    case END:
        return false;
    }
    state->counter[thread] = (uint8_t)next;
    return true;
}

/* ---- all states ---- */

struct visited {
    struct state *table;
    uint64_t capacity, count;
};

static uint64_t hash(const struct state *state)
{
    const uint8_t *bytes = (const uint8_t *)state;
    uint64_t value = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof *state; i++)
        value = (value ^ bytes[i]) * 0x100000001b3ull;
    return value ^ value >> 29;
}

/* The counters of a real state are never all 0xff. */
static bool is_empty(const struct state *state)
{
    return state->counter[0] == 0xff;
}

static bool visit(struct visited *visited, const struct state *state)
{
    if (2 * visited->count >= visited->capacity) {
        struct visited bigger = {malloc(visited->capacity * 2 * sizeof *state), visited->capacity * 2, 0};
        memset(bigger.table, 0xff, bigger.capacity * sizeof *state);
        for (uint64_t i = 0; i < visited->capacity; i++)
            if (!is_empty(&visited->table[i]))
                visit(&bigger, &visited->table[i]);
        free(visited->table);
        *visited = bigger;
    }
    uint64_t at = hash(state) & (visited->capacity - 1);
    for (; !is_empty(&visited->table[at]); at = (at + 1) & (visited->capacity - 1))
        if (memcmp(&visited->table[at], state, sizeof *state) == 0)
            return false;
    visited->table[at] = *state;
    visited->count++;
    return true;
}

static void explore(struct model *model)
{
    write_consumer(model);
    for (int producer = 0; producer < model->producers; producer++)
        write_producer(model, producer);
    struct visited visited = {malloc(1024 * sizeof(struct state)), 1024, 0};
    memset(visited.table, 0xff, 1024 * sizeof(struct state));
    size_t room = 1024, open = 0;
    struct state *stack = malloc(room * sizeof *stack), start;
    memset(&start, 0, sizeof start);
    visit(&visited, &start);
    stack[open++] = start;
    while (open > 0) {
        struct state state = stack[--open];
        bool moved = false;
        for (int choice = 0; choice < 2 * (FIRST_PRODUCER + model->producers); choice++) {
            struct state next = state;
            if (!(choice & 1 ? drain_one(&next, choice / 2) : advance(model, &next, choice / 2)))
                continue;
            moved = true;
            if (!visit(&visited, &next))
                continue;
            if (open == room)
                stack = realloc(stack, (room *= 2) * sizeof *stack);
            stack[open++] = next;
        }
        if (!moved && !all_received(model, &state))
            model->lost_count++;
    }
    model->state_count = visited.count;
    free(visited.table);
    free(stack);
}

/* ---- what must hold ---- */

TEST(no_wakeup_is_lost)
{
    for (int producers = 1; producers <= PRODUCERS_MAX; producers++)
        for (int messages = 1; messages <= MESSAGES_MAX; messages++)
            for (int buffers = 0; buffers <= 1; buffers++) {
                struct model model = {.store_buffers = buffers, .producers = producers, .messages = messages};
                explore(&model);
                test_message("%d producer(s), %d message(s) each, %s: %llu states", producers, messages,
                             buffers ? "store buffers" : "in order", (unsigned long long)model.state_count);
                CHECK_EQUAL(model.lost_count, 0);
                CHECK(model.blocked_seen && model.woken_seen && model.state_count > 50);
            }
}

/* Fences only matter with store buffering; the order of steps matters everywhere. */
#define PLANTED(name, mistake, in_order_too)                                                                           \
    TEST(name)                                                                                                         \
    {                                                                                                                  \
        struct model buffered = {.store_buffers = true, .producers = 1, .messages = 1, mistake};                       \
        struct model in_order = {.store_buffers = false, .producers = 1, .messages = 1, mistake};                      \
        explore(&buffered);                                                                                            \
        explore(&in_order);                                                                                            \
        CHECK(buffered.lost_count > 0);                                                                                \
        CHECK_EQUAL(in_order.lost_count > 0, in_order_too);                                                            \
    }
PLANTED(a_missing_consumer_fence_is_seen, .no_consumer_fence = true, false)
PLANTED(a_missing_producer_fence_is_seen, .no_producer_fence = true, false)
PLANTED(a_missing_second_check_is_seen, .no_second_check = true, true)
PLANTED(a_flag_read_too_early_is_seen, .flag_before_publish = true, true)
