/* Faults of the file layer that change while a bench runs: bench_start(backend, watch), then
 * faults(...). */
#ifndef MQD_FAULTS_TEST_H
#define MQD_FAULTS_TEST_H

#include "mqd_reactor_test.h"

static char rules_path[128];

/* Sets the rules from now on, in the syntax of base/file_watch.h. A new inode, so that the change
 * is noticed. */
static void faults(const char *rules)
{
    char fresh[160];
    snprintf(fresh, sizeof fresh, "%s.new", rules_path);
    log_write_file(fresh, rules, strlen(rules));
    CHECK(rename(fresh, rules_path) == 0);
}

static void watch(struct bench *b)
{
    snprintf(rules_path, sizeof rules_path, "%s/faults", log_root);
    char spec[160];
    snprintf(spec, sizeof spec, "@%s", rules_path);
    faults("");
    CHECK(mqd_file_watch(NULL, spec) == 0);
}

#endif
