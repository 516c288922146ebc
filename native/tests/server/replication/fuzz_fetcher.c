/* fuzz: -max_len=2048 */
/* A leader's response to a follower, parsed whole and in pieces: both give the same steps, read
 * nothing beyond the available bytes, and end.
 *
 * Input: 2 bytes seed of the pieces; 1 byte, bit 0: the frame's length is that of the rest of the
 * input; 4 bytes: otherwise its claimed length; then the frame. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/big_endian.h"
#include "base/error.h"
#include "native.h"
#include "server/replication/fetcher_wire.h"

#define STEPS_MAX 4096
#define NEED(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

struct steps {
    uint32_t count;
    uint64_t hash;
    enum mqd_parsed_step last;
    uint64_t records_bytes;
};

static void note(struct steps *steps, uint64_t value)
{
    steps->hash = (steps->hash ^ value) * 0x100000001b3ull;
}

static void note_step(struct steps *steps, enum mqd_parsed_step step, const struct mqd_response_parser *answer)
{
    const struct mqd_parsed_partition *partition = &answer->partition;
    steps->last = step;
    steps->count++;
    note(steps, step);
    if (step == MQD_PARSED_HEAD)
        note(steps, (uint64_t)answer->correlation_id << 32 ^ (uint64_t)answer->session_id ^ (uint64_t)answer->error);
    if (step == MQD_PARSED_PARTITION || step == MQD_PARSED_PARTITION_END) {
        for (int i = 0; i < 16; i++)
            note(steps, partition->key.topic_id[i]);
        note(steps, (uint64_t)partition->key.index), note(steps, (uint64_t)partition->error),
            note(steps, (uint64_t)partition->high_watermark);
        note(steps, (uint64_t)partition->log_start_offset), note(steps, partition->records_bytes);
    }
    if (step == MQD_PARSED_PARTITION_END)
        note(steps, (uint64_t)partition->diverging_epoch), note(steps, (uint64_t)partition->diverging_end),
            note(steps, (uint64_t)partition->leader_epoch);
}

/* seed 0: in one piece; otherwise in pieces of 1..63 bytes. Each piece is in memory of its own. */
static struct steps walk(const uint8_t *frame, uint32_t size_bytes, uint32_t frame_bytes, uint64_t seed)
{
    struct steps steps = {.hash = 14695981039346656037ull};
    struct mqd_response_parser answer;
    uint32_t at = 0, there = seed ? 0 : size_bytes;
    mqd_response_parser_begin(&answer, frame_bytes);
    for (;;) {
        uint8_t *copy = malloc(there - at ? there - at : 1);
        uint32_t taken, left = answer.frame_left;
        memcpy(copy, frame + at, there - at);
        enum mqd_parsed_step step = mqd_response_parser_next(&answer, copy, there - at, &taken);
        NEED(taken <= there - at && answer.frame_left == left - taken);
        at += taken;
        if (step == MQD_PARSED_RECORDS) {
            uint32_t records = there - at < answer.records_left ? there - at : answer.records_left;
            NEED(records > 0 && answer.records_left <= answer.frame_left);
            steps.records_bytes += records;
            mqd_response_parser_records_taken(&answer, records);
            at += records;
        } else if (step == MQD_PARSED_MORE) {
            NEED(at < frame_bytes || frame_bytes == 0);
            if (there == size_bytes) {
                free(copy);
                steps.last = step;
                return steps;
            }
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            uint32_t more = 1 + (uint32_t)(seed >> 40) % 63;
            there = more < size_bytes - there ? there + more : size_bytes;
        } else {
            note_step(&steps, step, &answer);
        }
        free(copy);
        if (step == MQD_PARSED_END || step == MQD_PARSED_INVALID) {
            NEED(step == MQD_PARSED_INVALID || at == frame_bytes);
            return steps;
        }
        NEED(steps.count < STEPS_MAX);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 8)
        return 0;
    uint64_t seed = (uint64_t)data[0] << 8 | data[1] | 1;
    uint32_t claimed = mqd_get_be32(data + 3), size_bytes = (uint32_t)size - 7;
    uint32_t frame_bytes = data[2] & 1 ? size_bytes : claimed % (4 * size_bytes + 1);
    uint32_t there = frame_bytes < size_bytes ? frame_bytes : size_bytes;
    struct steps whole = walk(data + 7, there, frame_bytes, 0), pieces = walk(data + 7, there, frame_bytes, seed);
    /* A step that can no longer be complete is refused as soon as it is detected; with pieces
     * that may be later, but never different. */
    NEED(whole.last == pieces.last);
    NEED(whole.hash == pieces.hash && whole.count == pieces.count);
    NEED(whole.records_bytes == pieces.records_bytes);
    return 0;
}
