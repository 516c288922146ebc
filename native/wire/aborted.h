/* An aborted transaction, as .txnindex files keep it and Fetch answers tell it. */
#ifndef MQD_ABORTED_H
#define MQD_ABORTED_H

#include <stdint.h>

struct mqd_aborted {
    int64_t producer_id;
    int64_t first_offset;
    int64_t last_offset;
    int64_t last_stable_offset;
};

#endif
