/* See server/rights/rights_table.h. Nothing here allocates; a lookup is two binary searches. */
#include "server/rights/rights_table.h"

#include <string.h>

#define NO_PARENT UINT32_MAX

struct header {
    uint32_t size_bytes, literal_count, prefix_count;
    uint16_t default_mask, pad;
};
struct entry {
    uint32_t name_offset, parent;
    uint16_t name_bytes, mask;
    uint32_t pad;
};
_Static_assert(sizeof(struct header) == 16 && sizeof(struct entry) == 16, "the layout of rights_table.py");

static struct header read_header(const uint8_t *table)
{
    struct header header;
    memcpy(&header, table, sizeof header);
    return header;
}

static struct entry read_entry(const uint8_t *table, uint64_t index)
{
    struct entry entry;
    memcpy(&entry, table + sizeof(struct header) + index * sizeof entry, sizeof entry);
    return entry;
}

bool mqd_rights_table_valid(const uint8_t *table, uint64_t size_bytes)
{
    if (size_bytes < sizeof(struct header))
        return false;
    struct header header = read_header(table);
    uint64_t count = (uint64_t)header.literal_count + header.prefix_count;
    if (header.size_bytes != size_bytes || count > (size_bytes - sizeof header) / sizeof(struct entry))
        return false;
    for (uint64_t i = 0; i < count; i++) {
        struct entry entry = read_entry(table, i);
        if ((uint64_t)entry.name_offset + entry.name_bytes > size_bytes)
            return false;
        /* a parent comes before its children, so that every chain of parents ends */
        if (i >= header.literal_count && entry.parent != NO_PARENT && entry.parent >= i - header.literal_count)
            return false;
    }
    return true;
}

/* Compares the entry's name with `name`, like memcmp; an entry that is a proper prefix is less. */
static int compare(const uint8_t *table, struct entry entry, const void *name, uint32_t name_bytes)
{
    uint32_t common = entry.name_bytes < name_bytes ? entry.name_bytes : name_bytes;
    int order = memcmp(table + entry.name_offset, name, common);
    return order ? order : (entry.name_bytes > name_bytes) - (entry.name_bytes < name_bytes);
}

/* How many of the `count` entries that start at `first` are not greater than the name. */
static uint32_t count_not_greater(const uint8_t *table, uint32_t first, uint32_t count, const void *name,
                                  uint32_t name_bytes)
{
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (compare(table, read_entry(table, (uint64_t)first + middle), name, name_bytes) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

uint16_t mqd_rights_table_mask(const uint8_t *table, const void *name, uint32_t name_bytes)
{
    struct header header = read_header(table);
    uint32_t literal = count_not_greater(table, 0, header.literal_count, name, name_bytes);
    if (literal) {
        struct entry entry = read_entry(table, literal - 1);
        if (compare(table, entry, name, name_bytes) == 0)
            return entry.mask;
    }
    /* if every prefix is greater than the name, this is 0 - 1, and so NO_PARENT */
    uint32_t prefix = count_not_greater(table, header.literal_count, header.prefix_count, name, name_bytes) - 1;
    while (prefix != NO_PARENT) {
        struct entry entry = read_entry(table, (uint64_t)header.literal_count + prefix);
        if (entry.name_bytes <= name_bytes && memcmp(table + entry.name_offset, name, entry.name_bytes) == 0)
            return entry.mask;
        prefix = entry.parent;
    }
    return header.default_mask;
}
