/* Views: a filter over the headers of records, and batches that contain only the records it
 * selects.
 *
 * A filter is a program in postfix order, compiled by mqd/base/views/conditions.py: each
 * instruction is a byte, followed by its operands; it pushes a truth value on the stack, or
 * replaces the values on top with their combination.
 *
 *   comparison with text     name (uint8 size, bytes), value (uint16 size, bytes): the header's
 *                            bytes
 *   comparison with number   name, value (int64): the header as a decimal number of at most 18
 *                            digits
 *   EXISTS                   name
 *   AND, OR, NOT             nothing
 *
 * Numbers are big-endian. A comparison, even !=, is false for a record that lacks the header, or
 * whose header has no value, or (in a comparison with a number) is not a number. If several headers
 * have the same name, the last one is used.
 *
 * A filtered batch keeps what compaction keeps (wire/record_scan.h): base offset, last offset
 * delta, producer, sequence, leader epoch, and the bytes of each remaining record. A batch whose
 * records are all selected is copied as it is; selected records of a compressed batch are not
 * compressed again. Control batches are kept, because readers need them to know where transactions
 * end.
 */
#ifndef MQD_FILTER_H
#define MQD_FILTER_H

#include "wire/api.h"
#include "wire/record_scan.h"

/* Whether the filter, which mqd_filter_check has accepted, selects the record. */
bool mqd_filter_match(const uint8_t *filter, uint32_t filter_bytes, const struct mqd_record *record);
/* Like mqd_filter_batches, but appends to `out`: at most output_bytes_max, which only the last
 * batch may exceed. *consumed_bytes: the size of the whole batches that were read. After an error,
 * `out` has the records that were selected before the invalid batch. */
int16_t mqd_filter_append(const uint8_t *filter, uint32_t filter_bytes, const uint8_t *bytes, uint64_t size_bytes,
                          int64_t from_offset, uint64_t output_bytes_max, struct mqd_filtered *out,
                          uint64_t *consumed_bytes);

#endif
