/* Tables of rights: the lookup against a search through all entries, and invalid tables. */
#include "mqd_rights_test.h"

/* Literal name, otherwise longest prefix, otherwise the default. */
static uint16_t searched(const struct right *literals, uint32_t literal_count, const struct right *prefixes,
                         uint32_t prefix_count, uint16_t otherwise, const char *name)
{
    size_t longest = 0;
    uint16_t mask = otherwise;
    for (uint32_t i = 0; i < literal_count; i++)
        if (strcmp(literals[i].name, name) == 0)
            return literals[i].mask;
    for (uint32_t i = 0; i < prefix_count; i++) {
        size_t bytes = strlen(prefixes[i].name);
        if (bytes > longest && strncmp(prefixes[i].name, name, bytes) == 0) {
            longest = bytes;
            mask = prefixes[i].mask;
        }
    }
    return mask;
}

/* One to five characters of a two-letter alphabet, so that many names are prefixes of others. */
static void random_name(uint64_t *seed, char name[8])
{
    uint32_t bytes = 1 + (uint32_t)(test_random(seed) % 5);
    for (uint32_t i = 0; i < bytes; i++)
        name[i] = "ab"[test_random(seed) % 2];
    name[bytes] = 0;
}

static int by_name(const void *left, const void *right)
{
    return strcmp(((const struct right *)left)->name, ((const struct right *)right)->name);
}

/* Sorted by name, without duplicates, each with the index of its parent. */
static uint32_t random_rights(uint64_t *seed, struct right *rights, char names[][8], uint32_t count)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        random_name(seed, names[i]);
        rights[i] = (struct right){names[i], (uint16_t)test_random(seed), 0};
    }
    qsort(rights, count, sizeof *rights, by_name);
    for (uint32_t i = 0; i < count; i++)
        if (!kept || strcmp(rights[kept - 1].name, rights[i].name) != 0)
            rights[kept++] = rights[i];
    for (uint32_t i = 0; i < kept; i++)
        for (uint32_t j = 0; j < i; j++) /* the longest comes last */
            if (strncmp(rights[j].name, rights[i].name, strlen(rights[j].name)) == 0)
                rights[i].parent = (int)j + 1;
    return kept;
}

TEST(the_lookup_matches_a_linear_search)
{
    uint64_t seed = 11;
    for (int round = 0; round < 2000; round++) {
        struct right literals[12], prefixes[12];
        char names[12][8], prefix_names[12][8], name[8];
        uint32_t literal_count = random_rights(&seed, literals, names, (uint32_t)(test_random(&seed) % 12));
        uint32_t prefix_count = random_rights(&seed, prefixes, prefix_names, (uint32_t)(test_random(&seed) % 12));
        uint16_t otherwise = (uint16_t)test_random(&seed);
        struct table table = table_of(literals, literal_count, prefixes, prefix_count, otherwise);
        CHECK(mqd_rights_table_valid(table.bytes, table.size_bytes));
        for (int i = 0; i < 20; i++) {
            random_name(&seed, name);
            CHECK_EQUAL(mqd_rights_table_mask(table.bytes, name, (uint32_t)strlen(name)),
                        searched(literals, literal_count, prefixes, prefix_count, otherwise, name));
        }
        CHECK_EQUAL(mqd_rights_table_mask(table.bytes, "", 0), otherwise);
        free(table.bytes);
    }
}

TEST(ten_thousand_rules_are_decided_by_two_searches)
{
    enum { COUNT = 10000 };
    static char names[COUNT][24];
    struct right *rights = calloc(COUNT, sizeof *rights);
    for (int i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "topic-%05d", i);
        rights[i] = (struct right){names[i], (uint16_t)(i + 1), 0};
    }
    struct table table = table_of(rights, COUNT, rights, COUNT, 0);
    CHECK(mqd_rights_table_valid(table.bytes, table.size_bytes));
    int64_t began_ns = test_now_ns();
    for (int i = 0; i < COUNT; i++)
        CHECK_EQUAL(mqd_rights_table_mask(table.bytes, names[i], (uint32_t)strlen(names[i])), (uint16_t)(i + 1));
    int64_t each_ns = (test_now_ns() - began_ns) / COUNT;
    char name[40];
    snprintf(name, sizeof name, "%s.suffix", names[4321]);
    CHECK_EQUAL(mqd_rights_table_mask(table.bytes, name, (uint32_t)strlen(name)), 4322);
    CHECK_EQUAL(mqd_rights_table_mask(table.bytes, "topic-", 6), 0);
    CHECK_OR(each_ns < 100000, test_message("a decision takes %lld ns", (long long)each_ns));
    free(table.bytes);
    free(rights);
}

/* Every byte of a table changed: refused, or the lookup ends inside it (ASan sees the rest). */
TEST(a_damaged_table_is_refused_or_read_within_its_bounds)
{
    struct right literals[] = {{"ab", 1, 0}, {"b", 2, 0}}, prefixes[] = {{"a", 4, 0}, {"ab", 8, 1}, {"abb", 16, 2}};
    struct table table = table_of(literals, 2, prefixes, 3, 32);
    const char *names[] = {"", "a", "ab", "abbb", "zzz"};
    for (uint32_t at = 0; at < table.size_bytes; at++)
        for (int value = 0; value < 256; value += 15) {
            uint8_t *copy = malloc(table.size_bytes);
            memcpy(copy, table.bytes, table.size_bytes);
            copy[at] = (uint8_t)value;
            for (size_t i = 0; mqd_rights_table_valid(copy, table.size_bytes) && i < sizeof names / sizeof *names; i++)
                mqd_rights_table_mask(copy, names[i], (uint32_t)strlen(names[i]));
            free(copy);
        }
    for (uint32_t size_bytes = 0; size_bytes < table.size_bytes; size_bytes++)
        CHECK(!mqd_rights_table_valid(table.bytes, size_bytes));
    free(table.bytes);
}
