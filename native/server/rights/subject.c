/* Subjects: see server/rights/subject.h. */
#include "server/rights/subject.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "server/authentication.h"
#include "server/rights/rights_table.h"

#define UNUSED_COUNT_MAX 256
#define UNUSED_BYTES_MAX (16u << 20)
#define ANONYMOUS "User:ANONYMOUS"
#define NAME_BYTES_MAX (INET6_ADDRSTRLEN + 1 + MQD_PRINCIPAL_BYTES_MAX)

bool mqd_subjects_create(struct mqd_reactor *r)
{
    r->subjects = calloc(1, sizeof *r->subjects);
    if (!r->subjects)
        return false;
    mqd_list_init(&r->subjects->unused);
    memset(r->subjects->mapped_by_clients, r->options.control_fd > 0, sizeof r->subjects->mapped_by_clients);
    return true;
}

/* ---- one subject ---- */

static struct mqd_subject **bucket_of(struct mqd_reactor *r, uint64_t hash)
{
    return &r->subjects->bucket[hash % MQD_SUBJECT_BUCKET_COUNT];
}

static uint64_t hash_of(const void *bytes, uint64_t size_bytes)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (uint64_t i = 0; i < size_bytes; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3ull;
    return hash ^ hash >> 32;
}

/* Writes "HOST PRINCIPAL" to `name`; returns its length. */
static uint32_t write_name(const struct mqd_connection *c, char name[NAME_BYTES_MAX + 1])
{
    static const uint8_t ipv4_mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    if (c->local)
        strcpy(name, "127.0.0.1");
    else if (memcmp(c->peer_ip, ipv4_mapped, sizeof ipv4_mapped) == 0)
        inet_ntop(AF_INET, c->peer_ip + 12, name, INET6_ADDRSTRLEN);
    else
        inet_ntop(AF_INET6, c->peer_ip, name, INET6_ADDRSTRLEN);
    uint32_t at = (uint32_t)strlen(name), bytes = c->principal ? c->principal_bytes : (uint32_t)strlen(ANONYMOUS);
    name[at++] = ' ';
    memcpy(name + at, c->principal ? c->principal : ANONYMOUS, bytes);
    name[at + bytes] = 0;
    return at + bytes;
}

static void request_rights(struct mqd_reactor *r, struct mqd_subject *subject)
{
    struct mqd_event event = {.kind = MQD_EVENT_SUBJECT_REQUESTED, .slot = UINT32_MAX, .token = subject->id};
    _Static_assert(sizeof event.text > NAME_BYTES_MAX, "no principal is cut off");
    memcpy(event.text, subject->name, subject->name_bytes + 1);
    subject->requested = mqd_reactor_emit(r, &event);
}

static struct mqd_subject *find_or_create(struct mqd_reactor *r, const char *name, uint32_t name_bytes)
{
    uint64_t hash = hash_of(name, name_bytes);
    struct mqd_subject **bucket = bucket_of(r, hash), *subject = *bucket;
    while (subject && (subject->name_bytes != name_bytes || memcmp(subject->name, name, name_bytes) != 0))
        subject = subject->next;
    if (subject)
        return subject;
    if (!(subject = calloc(1, sizeof *subject + name_bytes + 1)))
        return NULL;
    subject->id = ++r->subjects->next_id * MQD_SUBJECT_BUCKET_COUNT + hash % MQD_SUBJECT_BUCKET_COUNT;
    subject->size_bytes = (uint32_t)sizeof *subject + name_bytes + 1;
    subject->name_bytes = name_bytes;
    memcpy(subject->name, name, name_bytes);
    mqd_list_init(&subject->connections);
    mqd_list_init(&subject->unused_node);
    subject->next = *bucket;
    *bucket = subject;
    return subject;
}

static void remove_from_unused(struct mqd_reactor *r, struct mqd_subject *subject)
{
    if (!mqd_list_linked(&subject->unused_node))
        return;
    mqd_list_remove(&subject->unused_node);
    r->subjects->unused_count--;
    r->subjects->unused_bytes -= subject->size_bytes;
}

static void subject_free(struct mqd_reactor *r, struct mqd_subject *subject)
{
    struct mqd_subject **link = bucket_of(r, subject->id);
    while (*link != subject)
        link = &(*link)->next;
    *link = subject->next;
    remove_from_unused(r, subject);
    free(subject->tables);
    free(subject);
}

static void drop_subject(struct mqd_reactor *r, struct mqd_subject *subject)
{
    struct mqd_event event = {.kind = MQD_EVENT_SUBJECT_GONE, .slot = UINT32_MAX, .token = subject->id};
    if (subject->requested)
        mqd_reactor_emit(r, &event);
    subject_free(r, subject);
}

/* Keeps a subject that has no connections for later connections, unless its rights have not arrived
 * yet. If there are too many unused subjects, drops those that have been unused for longest. */
static void keep_unused(struct mqd_reactor *r, struct mqd_subject *subject)
{
    struct mqd_subjects *subjects = r->subjects;
    if (!subject->topics) {
        drop_subject(r, subject);
        return;
    }
    mqd_list_append(&subjects->unused, &subject->unused_node);
    subjects->unused_count++;
    subjects->unused_bytes += subject->size_bytes;
    while (subjects->unused_count > UNUSED_COUNT_MAX || subjects->unused_bytes > UNUSED_BYTES_MAX)
        drop_subject(r, MQD_CONTAINER(subjects->unused.next, struct mqd_subject, unused_node));
}

void mqd_subjects_tick(struct mqd_reactor *r)
{
    for (uint32_t i = 0; r->options.rights && i < MQD_SUBJECT_BUCKET_COUNT; i++)
        for (struct mqd_subject *subject = r->subjects->bucket[i]; subject; subject = subject->next)
            if (!subject->requested)
                request_rights(r, subject);
}

void mqd_subjects_destroy(struct mqd_reactor *r)
{
    for (uint32_t i = 0; r->subjects && i < MQD_SUBJECT_BUCKET_COUNT; i++)
        while (r->subjects->bucket[i])
            subject_free(r, r->subjects->bucket[i]);
    free(r->subjects);
    r->subjects = NULL;
}

/* ---- connections ---- */

bool mqd_subject_attach(struct mqd_reactor *r, struct mqd_connection *c)
{
    char name[NAME_BYTES_MAX + 1];
    if (r->options.rights == MQD_RIGHTS_OFF || c->peer_node >= 0 || c->subject ||
        c->authentication == MQD_AUTHENTICATION_PENDING)
        return true;
    struct mqd_subject *subject = find_or_create(r, name, write_name(c, name));
    if (!subject) {
        mqd_connection_fail(r, c, "out of memory for its principal's rights");
        return false;
    }
    remove_from_unused(r, subject);
    c->subject = subject;
    subject->connection_count++;
    mqd_list_append(&subject->connections, &c->subject_node);
    if (!subject->topics) {
        c->awaits_subject = 1;
        c->block_count++;
    }
    if (!subject->requested)
        request_rights(r, subject);
    return !c->awaits_subject;
}

void mqd_subject_detach(struct mqd_reactor *r, struct mqd_connection *c)
{
    struct mqd_subject *subject = c->subject;
    if (!subject)
        return;
    c->subject = NULL;
    mqd_list_remove(&c->subject_node);
    if (--subject->connection_count == 0)
        keep_unused(r, subject);
}

/* S3: resumes the connection if it was waiting for its rights, and evaluates its fetches again. */
static void apply_tables(struct mqd_reactor *r, struct mqd_connection *c)
{
    if (c->awaits_subject) {
        c->awaits_subject = 0;
        c->block_count--;
        mqd_connection_resume(r, c);
        if (c->local)
            mqd_local_query_schedule(r, c->local);
    }
    for (struct mqd_request *request = c->head; request; request = request->next)
        if (request->kind == MQD_REQUEST_FETCH && request->set && request->set->request == request &&
            !request->evaluated)
            mqd_fetch_wake_set(r, request->set);
}

/* ---- tables ---- */

/* Takes ownership of the tables. */
static void replace_tables(struct mqd_reactor *r, struct mqd_subject *subject, uint8_t *tables, const uint32_t sizes[3])
{
    free(subject->tables);
    remove_from_unused(r, subject);
    subject->tables = tables;
    subject->topics = tables;
    subject->transactional_ids = tables + sizes[0];
    subject->groups = tables + sizes[0] + sizes[1];
    subject->size_bytes = (uint32_t)sizeof *subject + subject->name_bytes + 1 + sizes[0] + sizes[1] + sizes[2];
    subject->version = ++r->subjects->next_version;
    memset(subject->masks, 0, sizeof subject->masks); /* S2 */
    if (!subject->connection_count) {
        keep_unused(r, subject);
        return;
    }
    const struct mqd_connection *any_connection =
        MQD_CONTAINER(subject->connections.next, struct mqd_connection, subject_node);
    MQD_LIST_EACH(node, next, &r->sessions) {
        /* also for sessions without a fetch in flight: a partition that is read to its end is
         * otherwise evaluated only when a record arrives */
        struct mqd_fetch_set *set = MQD_CONTAINER(node, struct mqd_fetch_set, session_node);
        if (set->replica_id < 0 && mqd_session_is_usable_by(set, any_connection))
            mqd_fetch_wake_set(r, set);
    }
    MQD_LIST_EACH(node, next, &subject->connections)
        apply_tables(r, MQD_CONTAINER(node, struct mqd_connection, subject_node));
}

void mqd_subject_command(struct mqd_reactor *r, const struct mqd_command *command)
{
    uint64_t id = command->subject_id;
    const uint32_t *sizes = command->list; /* the tables follow the three sizes */
    uint32_t tables_bytes = sizes[0] + sizes[1] + sizes[2];
    struct mqd_subject *subject = *bucket_of(r, id);
    while (subject && subject->id != id)
        subject = subject->next;
    if (!subject) {
        mqd_command_done(r, command->token, MQD_E_STALE, UINT32_MAX, 0, NULL, "the subject no longer exists");
        return;
    }
    uint8_t *tables = malloc(tables_bytes);
    if (!tables) {
        mqd_command_done(r, command->token, ENOMEM, UINT32_MAX, 0, NULL, "out of memory for a principal's rights");
        return;
    }
    memcpy(tables, sizes + 3, tables_bytes);
    replace_tables(r, subject, tables, sizes);
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

void mqd_subjects_revoke_mappings(struct mqd_reactor *r, const struct mqd_command *command)
{
    const uint32_t *slots = command->list;
    for (uint32_t i = 0; i < command->number; i++) {
        uint16_t owner = mqd_load_relaxed(&mqd_control_partition(r->options.control, slots[i])->owner);
        if (!r->subjects->mapped_by_clients[slots[i]])
            continue;
        r->subjects->mapped_by_clients[slots[i]] = 0;
        struct mqd_descriptor notification = {.kind = MQD_LINK_ROLL, .slot = slots[i]};
        if (owner == r->options.self)
            mqd_owner_on_roll(r, slots[i]);
        else if (owner < mqd_control_worker_count(r->options.control))
            mqd_forward_send(r, owner, &notification);
    }
    mqd_command_done(r, command->token, 0, UINT32_MAX, 0, NULL, "");
}

int mqd_reactor_revoke(struct mqd_reactor *r, uint64_t token, const uint32_t *slots, uint32_t count)
{
    struct mqd_command command = {.kind = MQD_COMMAND_REVOKE, .token = token, .number = count};
    for (uint32_t i = 0; i < count; i++)
        if (slots[i] >= MQD_PARTITION_SLOT_COUNT)
            return mqd_error_set(MQD_E_INVALID, "partition slot %u is out of range; there are %d slots", slots[i],
                                 MQD_PARTITION_SLOT_COUNT);
    uint32_t *copy = malloc(sizeof *copy * (count ? count : 1));
    if (!copy)
        return mqd_error_set(ENOMEM, "out of memory for a command");
    memcpy(copy, slots, sizeof *copy * count);
    command.list = copy;
    return mqd_command_post(r, &command);
}

int mqd_reactor_subject_put(struct mqd_reactor *r, uint64_t token, uint64_t subject_id,
                            const struct mqd_rights_tables *tables)
{
    const uint32_t *sizes = tables->size_bytes;
    uint64_t total_bytes = (uint64_t)sizes[0] + sizes[1] + sizes[2];
    for (int i = 0; i < 3; i++)
        if (!mqd_rights_table_valid(tables->table[i], sizes[i]) || total_bytes > INT32_MAX)
            return mqd_error_set(MQD_E_INVALID, "the tables of a principal's rights are not well-formed");
    struct mqd_command command = {.kind = MQD_COMMAND_SUBJECT_PUT, .token = token, .subject_id = subject_id};
    uint32_t *list = malloc(sizeof tables->size_bytes + total_bytes);
    if (!list)
        return mqd_error_set(ENOMEM, "out of memory for a principal's rights");
    memcpy(list, sizes, sizeof tables->size_bytes);
    uint8_t *at = (uint8_t *)(list + 3);
    for (int i = 0; i < 3; at += sizes[i++])
        memcpy(at, tables->table[i], sizes[i]);
    command.list = list;
    return mqd_command_post(r, &command);
}

/* ---- decisions ---- */

/* Reports a denial; equal denials (same resource and operation) are counted and reported once per
 * denied_interval_ms. A different denial that falls into the same entry is reported immediately and
 * replaces the earlier one. */
static void report_denial(struct mqd_reactor *r, const struct mqd_connection *c, enum mqd_resource type,
                          const void *name, uint32_t name_bytes, enum mqd_operation operation)
{
    struct mqd_subject *subject = c->subject;
    if (!subject)
        return;
    uint64_t hash = (hash_of(name, name_bytes) * 31 + (uint64_t)type) * 31 + (uint64_t)operation;
    uint32_t entry = hash % MQD_SUBJECT_DENIED_COUNT;
    bool is_repeated = subject->denied_hash[entry] == hash;
    if (is_repeated && r->now_ms - subject->denied_ms[entry] < r->options.denied_interval_ms) {
        subject->denied_unreported[entry]++;
        return;
    }
    struct mqd_event event = {.kind = MQD_EVENT_DENIED,
                              .slot = UINT32_MAX,
                              .token = subject->id,
                              .connection = c->id,
                              .resource_type = type,
                              .operation = operation,
                              .count = 1 + (is_repeated ? subject->denied_unreported[entry] : 0)};
    memcpy(event.text, name, name_bytes < sizeof event.text ? name_bytes : sizeof event.text - 1);
    if (!mqd_reactor_emit(r, &event)) {
        subject->denied_unreported[entry] += is_repeated;
        return;
    }
    subject->denied_hash[entry] = hash;
    subject->denied_ms[entry] = r->now_ms;
    subject->denied_unreported[entry] = 0;
}

static bool allow_or_report(struct mqd_reactor *r, const struct mqd_connection *c, enum mqd_resource type,
                            const void *name, uint32_t name_bytes, enum mqd_operation operation, uint16_t mask)
{
    if (mask >> operation & 1)
        return true;
    report_denial(r, c, type, name, name_bytes, operation);
    return r->options.rights == MQD_RIGHTS_LOG_ONLY;
}

bool mqd_subject_is_allowed_slow(struct mqd_reactor *r, const struct mqd_connection *c, const struct mqd_topic *topic,
                                 enum mqd_operation operation)
{
    struct mqd_subject *subject = c->subject;
    if (c->peer_node >= 0) /* S5 */
        return true;
    if (!subject || !subject->topics) /* S1 */
        return false;
    uint64_t *word = &subject->masks[topic->serial % MQD_SUBJECT_MASK_COUNT];
    if (*word >> 16 != topic->serial)
        *word = topic->serial << 16 | mqd_rights_table_mask(subject->topics, topic->name, topic->name_bytes);
    return allow_or_report(r, c, MQD_RESOURCE_TOPIC, topic->name, topic->name_bytes, operation, (uint16_t)*word);
}

bool mqd_subject_is_allowed_by_name_slow(struct mqd_reactor *r, const struct mqd_connection *c, enum mqd_resource type,
                                         const void *name, int32_t name_bytes, enum mqd_operation operation)
{
    const struct mqd_subject *subject = c->subject;
    uint32_t bytes = name_bytes > 0 ? (uint32_t)name_bytes : 0;
    if (c->peer_node >= 0)
        return true;
    if (!subject || !subject->topics)
        return false;
    const uint8_t *table = type == MQD_RESOURCE_TOPIC   ? subject->topics
                           : type == MQD_RESOURCE_GROUP ? subject->groups
                                                        : subject->transactional_ids;
    return allow_or_report(r, c, type, bytes ? name : "", bytes, operation,
                           mqd_rights_table_mask(table, bytes ? name : "", bytes));
}
