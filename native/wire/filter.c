/* See wire/filter.h. */
#include "wire/filter.h"

#include <string.h>

#include "base/big_endian.h"

#define DIGITS_MAX 18

enum instruction {
    EXISTS = 1,
    TEXT_FIRST = 2, /* =, !=, <, <=, >, >=, begins with, does not begin with */
    TEXT_LAST = 9,
    NUMBER_FIRST = 10, /* =, !=, <, <=, >, >= */
    NUMBER_LAST = 15,
    AND = 16,
    OR = 17,
    NOT = 18
};

enum comparison { EQUAL, UNEQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, PREFIX, NO_PREFIX };

/* A decoded instruction. */
struct step {
    uint8_t instruction;
    const uint8_t *name, *value;
    uint32_t name_bytes, value_bytes;
    uint32_t next; /* position of the next instruction */
};

/* Reads the instruction at `at`. False: it is cut off, or its number is unknown. */
static bool read_step(const uint8_t *filter, uint32_t filter_bytes, uint32_t at, struct step *step)
{
    *step = (struct step){.instruction = filter[at], .next = at + 1};
    if (step->instruction >= AND)
        return step->instruction <= NOT;
    if (step->instruction < EXISTS || filter_bytes - step->next < 1)
        return false;
    step->name_bytes = filter[step->next];
    step->name = filter + step->next + 1;
    if (filter_bytes - step->next < 1 + step->name_bytes)
        return false;
    step->next += 1 + step->name_bytes;
    if (step->instruction == EXISTS)
        return true;
    uint32_t size_bytes = 8, left_bytes = filter_bytes - step->next;
    if (step->instruction <= TEXT_LAST) {
        if (left_bytes < 2)
            return false;
        size_bytes = (uint32_t)filter[step->next] << 8 | filter[step->next + 1];
        step->next += 2;
        left_bytes -= 2;
    }
    step->value = filter + step->next;
    step->value_bytes = size_bytes;
    step->next += size_bytes;
    return size_bytes <= left_bytes;
}

bool mqd_filter_check(const uint8_t *filter, uint32_t filter_bytes)
{
    struct step step;
    uint32_t depth = 0, count = 0;
    if (filter_bytes > MQD_FILTER_BYTES_MAX)
        return false;
    for (uint32_t at = 0; at < filter_bytes; at = step.next) {
        if (++count > MQD_FILTER_NODES_MAX || !read_step(filter, filter_bytes, at, &step))
            return false;
        uint32_t operand_count = step.instruction < AND ? 0 : step.instruction == NOT ? 1 : 2;
        if (depth < operand_count)
            return false;
        depth += 1 - operand_count;
    }
    return depth == 1;
}

/* `order`: less than, equal to or greater than 0, like the result of memcmp. */
static bool is_true(enum comparison comparison, int order)
{
    switch (comparison) {
    case EQUAL:
        return order == 0;
    case UNEQUAL:
        return order != 0;
    case LESS:
        return order < 0;
    case LESS_EQUAL:
        return order <= 0;
    case GREATER:
        return order > 0;
    default:
        return order >= 0;
    }
}

static bool is_true_for_text(enum comparison comparison, const uint8_t *value, uint32_t value_bytes,
                             const struct step *step)
{
    uint32_t common = value_bytes < step->value_bytes ? value_bytes : step->value_bytes;
    int order = common ? memcmp(value, step->value, common) : 0;
    if (comparison >= PREFIX)
        return (order == 0 && common == step->value_bytes) == (comparison == PREFIX);
    return is_true(comparison, order ? order : (value_bytes > common) - (step->value_bytes > common));
}

static bool parse_number(const uint8_t *text, uint32_t size_bytes, int64_t *number)
{
    bool negative = size_bytes && text[0] == '-';
    uint32_t at = negative;
    *number = 0;
    if (size_bytes == at || size_bytes - at > DIGITS_MAX)
        return false;
    for (; at < size_bytes; at++) {
        if (text[at] < '0' || text[at] > '9')
            return false;
        *number = *number * 10 + (text[at] - '0');
    }
    *number = negative ? -*number : *number;
    return true;
}

/* Evaluates EXISTS or a comparison. */
static bool evaluate(const struct mqd_record *record, const struct step *step)
{
    const uint8_t *value;
    int32_t value_bytes;
    bool has_header = mqd_record_header(record, (const char *)step->name, step->name_bytes, &value, &value_bytes);
    if (step->instruction == EXISTS)
        return has_header;
    if (!has_header || value_bytes < 0)
        return false;
    if (step->instruction <= TEXT_LAST)
        return is_true_for_text((enum comparison)(step->instruction - TEXT_FIRST), value, (uint32_t)value_bytes, step);
    int64_t number, operand = (int64_t)mqd_get_be64(step->value);
    return parse_number(value, (uint32_t)value_bytes, &number) &&
           is_true((enum comparison)(step->instruction - NUMBER_FIRST), (number > operand) - (number < operand));
}

bool mqd_filter_match(const uint8_t *filter, uint32_t filter_bytes, const struct mqd_record *record)
{
    struct step step;
    uint64_t stack = 0; /* the top is bit 0; MQD_FILTER_NODES_MAX values fit */
    for (uint32_t at = 0; at < filter_bytes && read_step(filter, filter_bytes, at, &step); at = step.next) {
        switch (step.instruction) {
        case AND:
            stack = stack >> 1 & (stack | ~1ull);
            break;
        case OR:
            stack = stack >> 1 | (stack & 1);
            break;
        case NOT:
            stack ^= 1;
            break;
        default:
            stack = stack << 1 | evaluate(record, &step);
        }
    }
    return stack & 1;
}
