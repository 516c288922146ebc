/* An aborted transaction, as stored in .txnindex files and sent in Fetch responses. */
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
