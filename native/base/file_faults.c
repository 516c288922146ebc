/* Deterministic fault injection for the file layer; the rule syntax is in base/file_watch.h.
 * All functions are called with the watch mutex held. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file_watch.h"

#define RULE_COUNT_MAX 32
#define SPEC_BYTES_MAX 8192

enum { FAULT_ERRNO, FAULT_SHORT, FAULT_DELAY };

struct rule {
    enum mqd_file_call call;
    int fault_kind;
    int error;
    char path[160];
    int64_t after, count, bytes, delay_ms, budget; /* count -1 = unlimited, budget -1 = no budget was set */
};

static struct {
    char control_path[4096];    /* of the control file (after '@'); "" = rules are fixed */
    struct stat control_status; /* when the control file was last read */
    struct rule rules[RULE_COUNT_MAX];
    int rule_count;
} faults;

static const struct {
    const char *name;
    int value;
} calls[] = {{"open", MQD_CALL_OPEN},         {"write", MQD_CALL_WRITE},   {"pwritev", MQD_CALL_WRITE},
             {"pwrite", MQD_CALL_WRITE},      {"sync", MQD_CALL_SYNC},     {"syncfs", MQD_CALL_SYNCFS},
             {"truncate", MQD_CALL_TRUNCATE}, {"rename", MQD_CALL_RENAME}, {"fallocate", MQD_CALL_FALLOCATE},
             {"unlink", MQD_CALL_UNLINK},     {"mkdir", MQD_CALL_MKDIR},   {"any", MQD_CALL_ANY}};
static const struct {
    const char *name;
    int value;
} errors[] = {{"ENOSPC", ENOSPC},         {"EIO", EIO},       {"EDQUOT", EDQUOT}, {"EROFS", EROFS},
              {"EACCES", EACCES},         {"EMFILE", EMFILE}, {"ENFILE", ENFILE}, {"ENOMEM", ENOMEM},
              {"EOPNOTSUPP", EOPNOTSUPP}, {"EFBIG", EFBIG}};

static int parse_fault_kind(struct rule *rule, const char *text)
{
    if (strcmp(text, "SHORT") == 0 || strcmp(text, "DELAY") == 0) {
        rule->fault_kind = text[0] == 'S' ? FAULT_SHORT : FAULT_DELAY;
        return 0;
    }
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (strcmp(errors[i].name, text) == 0) {
            rule->error = errors[i].value;
            return 0;
        }
    return -1;
}

static int parse_field(struct rule *rule, const char *text)
{
    static const char *const names[] = {"after=", "count=", "bytes=", "ms=", "budget="};
    int64_t *const values[] = {&rule->after, &rule->count, &rule->bytes, &rule->delay_ms, &rule->budget};
    for (size_t i = 0; i < 5; i++)
        if (strncmp(text, names[i], strlen(names[i])) == 0) {
            char *end;
            *values[i] = strtoll(text + strlen(names[i]), &end, 10);
            return *end || *values[i] < 0 ? -1 : 0;
        }
    if (rule->path[0] || strlen(text) >= sizeof rule->path)
        return -1;
    strcpy(rule->path, text);
    return 0;
}

static int parse_rule(char *text)
{
    char *state, rule_text[SPEC_BYTES_MAX];
    snprintf(rule_text, sizeof rule_text, "%s", text);
    char *part = strtok_r(text, ":", &state);
    if (faults.rule_count == RULE_COUNT_MAX)
        return mqd_error_set(MQD_E_INVALID, "more than %d file fault rules", RULE_COUNT_MAX);
    struct rule rule = {.call = (enum mqd_file_call)(-1), .count = -1, .budget = -1};
    for (size_t i = 0; part && i < sizeof calls / sizeof calls[0]; i++)
        if (strcmp(calls[i].name, part) == 0)
            rule.call = (enum mqd_file_call)calls[i].value;
    part = strtok_r(NULL, ":", &state);
    if ((int)rule.call < 0 || !part || parse_fault_kind(&rule, part) < 0)
        return mqd_error_set(MQD_E_INVALID, "file fault rule '%s' is not op:fault[:path][:key=value]...", rule_text);
    while ((part = strtok_r(NULL, ":", &state)))
        if (parse_field(&rule, part) < 0)
            return mqd_error_set(MQD_E_INVALID, "file fault rule '%s': cannot read '%s'", rule_text, part);
    faults.rules[faults.rule_count++] = rule;
    return 0;
}

static int parse_rules(const char *spec)
{
    char text[SPEC_BYTES_MAX], *line_state, *rule_state;
    faults.rule_count = 0;
    if (strlen(spec) >= sizeof text)
        return mqd_error_set(MQD_E_INVALID, "file fault rules are longer than %d bytes", SPEC_BYTES_MAX);
    strcpy(text, spec);
    for (char *line = strtok_r(text, "\n", &line_state); line; line = strtok_r(NULL, "\n", &line_state)) {
        line[strcspn(line, "#")] = 0;
        for (char *rule = strtok_r(line, ",; \t\r", &rule_state); rule; rule = strtok_r(NULL, ",; \t\r", &rule_state))
            if (parse_rule(rule) < 0)
                return -1;
    }
    return 0;
}

static bool is_same_version(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* Reads the control file again if it has changed. If it cannot be parsed, for example because it is
 * being written, this writes a line to stderr, and no faults are injected until the file changes
 * again. */
static void update_rules(void)
{
    struct stat now;
    if (stat(faults.control_path, &now) < 0)
        memset(&now, 0, sizeof now);
    if (is_same_version(&now, &faults.control_status))
        return;
    faults.control_status = now;
    faults.rule_count = 0;
    char text[SPEC_BYTES_MAX];
    int fd = open(faults.control_path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[size > 0 ? size : 0] = 0;
    if (parse_rules(text) < 0) {
        fprintf(stderr, "mqd: %s: %s\n", faults.control_path, mqd_error_message());
        faults.rule_count = 0;
    }
}

int mqd_file_faults_configure(const char *spec)
{
    memset(&faults, 0, sizeof faults);
    if (!spec)
        return 0;
    if (spec[0] != '@')
        return parse_rules(spec);
    if (strlen(spec + 1) >= sizeof faults.control_path)
        return mqd_error_set(MQD_E_INVALID, "path of the fault control file is too long");
    strcpy(faults.control_path, spec + 1);
    return 0;
}

/* Counts the call, and returns whether the rule applies to it; if so, sets `fault`. */
static bool apply_rule(struct rule *rule, uint64_t size_bytes, struct mqd_file_fault *fault)
{
    if (rule->after > 0) {
        rule->after--;
        return false;
    }
    if (rule->budget >= 0) { /* simulates a disk that fills up */
        if ((uint64_t)rule->budget >= size_bytes) {
            rule->budget -= (int64_t)size_bytes;
            return false;
        }
        if (rule->budget > 0) {
            fault->bytes_max = rule->budget;
            rule->budget = 0;
            return true;
        }
    }
    if (rule->count == 0)
        return false;
    if (rule->count > 0)
        rule->count--;
    if (rule->fault_kind == FAULT_SHORT)
        fault->bytes_max = rule->bytes;
    else if (rule->fault_kind == FAULT_ERRNO)
        fault->error = rule->error;
    return true;
}

bool mqd_file_faults_may_delay(enum mqd_file_call call)
{
    if (faults.control_path[0])
        update_rules();
    for (int i = 0; i < faults.rule_count; i++)
        if (faults.rules[i].fault_kind == FAULT_DELAY &&
            (faults.rules[i].call == call || faults.rules[i].call == MQD_CALL_ANY))
            return true;
    return false;
}

struct mqd_file_fault mqd_file_faults_apply(enum mqd_file_call call, const char *path, uint64_t size_bytes)
{
    struct mqd_file_fault fault = {.bytes_max = -1};
    if (faults.control_path[0])
        update_rules();
    for (int i = 0; i < faults.rule_count; i++) {
        struct rule *rule = &faults.rules[i];
        if ((rule->call != call && rule->call != MQD_CALL_ANY) || (rule->path[0] && !strstr(path, rule->path)))
            continue;
        if (!apply_rule(rule, size_bytes, &fault))
            continue;
        if (rule->fault_kind != FAULT_DELAY)
            break;
        fault.delay_ms += (uint32_t)rule->delay_ms;
    }
    return fault;
}
