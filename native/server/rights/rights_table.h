/* The rights of one principal on the resources of one type, compiled by Python
 * (mqd/security/rights_table.py, which describes the bytes and the lookup). A mask has a bit for
 * each allowed operation. */
#ifndef MQD_RIGHTS_TABLE_H
#define MQD_RIGHTS_TABLE_H

#include <stdbool.h>
#include <stdint.h>

/* Whether every lookup stays inside the table and ends, for any name. */
bool mqd_rights_table_valid(const uint8_t *table, uint64_t size_bytes);
/* The mask for the name. The table must be valid. */
uint16_t mqd_rights_table_mask(const uint8_t *table, const void *name, uint32_t name_bytes);

#endif
