/* Tables of rights as Python compiles them. */
#ifndef MQD_RIGHTS_TEST_H
#define MQD_RIGHTS_TEST_H

#include "mqd_test.h"

#include "server/rights/rights_table.h"

enum { READ = 1 << 3, WRITE = 1 << 4, DESCRIBE = 1 << 8, EVERYTHING = 0xffff };

struct right {
    const char *name;
    uint16_t mask;
    int parent; /* of a prefix: index of the longest other prefix of it, plus 1; 0 = none */
};

struct table {
    uint8_t *bytes;
    uint32_t size_bytes;
};

static void table_put(struct table *table, uint32_t at, uint64_t value, uint32_t bytes)
{
    memcpy(table->bytes + at, &value, bytes);
}

/* Both lists in the order of their names. */
static struct table table_of(const struct right *literals, uint32_t literal_count, const struct right *prefixes,
                             uint32_t prefix_count, uint16_t otherwise)
{
    uint32_t count = literal_count + prefix_count, at = 16 + 16 * count;
    struct table table = {.size_bytes = at};
    for (uint32_t i = 0; i < count; i++)
        table.size_bytes += (uint32_t)strlen(i < literal_count ? literals[i].name : prefixes[i - literal_count].name);
    table.bytes = calloc(1, table.size_bytes);
    table_put(&table, 0, table.size_bytes, 4), table_put(&table, 4, literal_count, 4);
    table_put(&table, 8, prefix_count, 4), table_put(&table, 12, otherwise, 2);
    for (uint32_t i = 0; i < count; i++) {
        const struct right *right = i < literal_count ? &literals[i] : &prefixes[i - literal_count];
        uint32_t entry = 16 + 16 * i, bytes = (uint32_t)strlen(right->name);
        table_put(&table, entry, at, 4), table_put(&table, entry + 4, (uint32_t)right->parent - 1, 4);
        table_put(&table, entry + 8, bytes, 2), table_put(&table, entry + 10, right->mask, 2);
        memcpy(table.bytes + at, right->name, bytes);
        at += bytes;
    }
    return table;
}

#endif
