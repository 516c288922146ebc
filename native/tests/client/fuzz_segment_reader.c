/* fuzz: -max_len=1500 */
/* The segment reader of a local client over any bytes: whatever it returns is within the segment,
 * it terminates, and smaller reads return the same records.
 *
 *   byte 0   bit 0 read_committed, bit 1 CRCs are checked, bit 2 producers 1 and 2 have aborted
 *            transactions, bits 3.. where the reading begins
 *   byte 1   records a read
 *   rest     the segment; memory of exactly that size, so that the sanitizer sees one byte too many
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/reader_state.h"

enum { CAPACITY = 300, TURNS_MAX = 4000 };

struct columns {
    struct mqd_record_view view;
    int64_t offsets[CAPACITY], timestamps_ms[CAPACITY];
    uint64_t key_positions[CAPACITY], value_positions[CAPACITY], header_positions[CAPACITY];
    int32_t key_bytes[CAPACITY], value_bytes[CAPACITY], header_bytes[CAPACITY];
};
struct input {
    const uint8_t *bytes;
    size_t size;
};

static void require(int condition)
{
    if (!condition)
        abort();
}

static struct mqd_record_view *prepare(struct columns *c, uint32_t capacity)
{
    c->view = (struct mqd_record_view){.capacity = capacity,
                                       .offsets = c->offsets,
                                       .timestamps_ms = c->timestamps_ms,
                                       .key_positions = c->key_positions,
                                       .key_bytes = c->key_bytes,
                                       .value_positions = c->value_positions,
                                       .value_bytes = c->value_bytes,
                                       .header_positions = c->header_positions,
                                       .header_bytes = c->header_bytes};
    return &c->view;
}

static int locate(void *context, const struct mqd_local_query *query, struct mqd_segment_mapping *current,
                  struct mqd_local_segment *answer, struct mqd_segment_mapping **mapping)
{
    const struct input *input = context;
    (void)current;
    *answer = (struct mqd_local_segment){.kind = query->kind,
                                         .next_base_offset = INT64_MAX,
                                         .size_bytes = (uint32_t)input->size,
                                         .map_bytes = (uint32_t)input->size};
    *mapping = mqd_mapping_of_memory(input->bytes, input->size);
    return *mapping ? 0 : -1;
}

static uint64_t hash_record(const struct mqd_record_view *view, uint32_t i, uint64_t hash)
{
    const uint64_t positions[] = {view->key_positions[i], view->value_positions[i], view->header_positions[i]};
    const int32_t sizes[] = {view->key_bytes[i], view->value_bytes[i], view->header_bytes[i]};
    hash = hash * 31 + (uint64_t)view->offsets[i] + (uint64_t)view->timestamps_ms[i] * 7;
    for (int k = 0; k < 3; k++) {
        require(sizes[k] >= -1 && positions[k] <= view->base_bytes &&
                (sizes[k] < 0 || (uint64_t)sizes[k] <= view->base_bytes - positions[k]));
        for (int32_t at = 0; at < sizes[k]; at++)
            hash = hash * 31 + view->base[positions[k] + (uint64_t)at];
        hash = hash * 31 + (uint64_t)sizes[k];
    }
    return hash;
}

static void read_compressed(const struct mqd_record_view *outer, const struct mqd_read_state *state, int64_t from)
{
    struct columns inner;
    require(state->compressed_position + state->compressed_bytes <= outer->base_bytes &&
            state->compressed_bytes >= MQD_BATCH_HEADER_BYTES);
    const uint8_t *batch = outer->base + state->compressed_position;
    mqd_segment_records(batch, batch + MQD_BATCH_HEADER_BYTES, state->compressed_bytes - MQD_BATCH_HEADER_BYTES, from,
                        prepare(&inner, CAPACITY));
    for (uint32_t i = 0; i < inner.view.count; i++)
        hash_record(&inner.view, i, 0);
}

/* Reads the whole segment in steps of `capacity`. Returns a digest of the records. */
static uint64_t walk(const struct input *input, uint8_t flags, uint32_t capacity)
{
    static const int64_t producers[] = {1, 2}, firsts[] = {0, 3};
    struct mqd_segment_source source = {.context = (void *)input, .locate = locate};
    struct mqd_segment_reader *reader =
        mqd_segment_reader_new(&source, (const uint8_t[16]){0}, 0, flags >> 3, flags & 1);
    struct columns c;
    struct mqd_read_state state;
    uint64_t hash = 0;
    int64_t last = (flags >> 3) - 1;
    require(reader != NULL &&
            mqd_segment_reader_set_aborted(reader, producers, firsts, flags >> 2 & 1 ? 2 : 0, INT64_MAX) == 0);
    for (int turn = 0;; turn++) {
        require(turn < TURNS_MAX);
        if (mqd_segment_reader_next(reader, 1u << 30, flags >> 1 & 1, prepare(&c, capacity), &state) < 0)
            break;
        for (uint32_t i = 0; i < c.view.count; i++) {
            require(c.offsets[i] > last);
            last = c.offsets[i];
            hash = hash_record(&c.view, i, hash);
        }
        if (state.stop == MQD_READ_COMPRESSED || state.stop == MQD_READ_CORRUPT) {
            if (state.stop == MQD_READ_COMPRESSED)
                read_compressed(&c.view, &state, mqd_segment_reader_position(reader));
            if (mqd_segment_reader_skip(reader) < 0)
                break;
        } else if (state.stop != MQD_READ_FULL && state.stop != MQD_READ_SEGMENT) {
            break;
        }
    }
    mqd_segment_reader_close(reader);
    return hash;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3)
        return 0;
    struct input input = {data + 2, size - 2};
    uint32_t capacity = data[1] ? data[1] : 1;
    require(walk(&input, data[0], capacity) == walk(&input, data[0], CAPACITY));
    return 0;
}
