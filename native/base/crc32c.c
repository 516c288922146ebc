/* CRC32C as Kafka, iSCSI (RFC 3720, appendix B.4) and ext4 use it: polynomial 0x1EDC6F41, bits
 * reflected, inverted at both ends.
 *
 * mqd_crc32c(0, a ++ b) == mqd_crc32c(mqd_crc32c(0, a), b).
 *
 * On x86-64 the crc32 instruction takes three cycles, but one can start every cycle, so one stream
 * uses a third of its throughput. Long input is cut into three equal parts whose checksums are
 * computed in parallel and then combined: shifting a checksum over n bytes is a multiplication by
 * x^(8n) modulo the polynomial. That takes one carry-less multiplication by x^(8n-33), reduced by a
 * crc32 step (which multiplies by x^32; the reflected product has one more factor x). The method is
 * Gopal et al., "Fast CRC computation for iSCSI polynomial using CRC32 instruction", Intel 2011. Up
 * to SHORT_BYTES_MAX bytes, combining costs more than it saves. ARM's instructions are the same
 * except for their names.
 *
 * Tables and constants are computed when the library is loaded, before any thread can call it;
 * afterwards everything is read-only.
 */
#include "base/crc32c.h"

#include <string.h>

#define POLYNOMIAL 0x82f63b78u /* 0x1EDC6F41 reflected */
#define SHORT_BYTES_MAX 255

static uint32_t table[8][256];

static uint32_t crc_bitwise(uint32_t crc, const uint8_t *bytes, size_t size)
{
    while (size--) {
        crc ^= *bytes++;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (POLYNOMIAL & (0u - (crc & 1)));
    }
    return crc;
}

static void fill_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        table[0][i] = crc_bitwise(0, &byte, 1);
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t i = 0; i < 256; i++)
            table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 0xff];
}

static uint32_t load_le_32(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint32_t crc_table(uint32_t crc, const uint8_t *bytes, size_t size)
{
    for (; size >= 8; bytes += 8, size -= 8) {
        uint32_t low = load_le_32(bytes) ^ crc;
        uint32_t high = load_le_32(bytes + 4);
        crc = table[7][low & 0xff] ^ table[6][(low >> 8) & 0xff] ^ table[5][(low >> 16) & 0xff] ^ table[4][low >> 24] ^
              table[3][high & 0xff] ^ table[2][(high >> 8) & 0xff] ^ table[1][(high >> 16) & 0xff] ^
              table[0][high >> 24];
    }
    while (size--)
        crc = (crc >> 8) ^ table[0][(crc ^ *bytes++) & 0xff];
    return crc;
}

typedef uint32_t crc_function(uint32_t crc, const uint8_t *bytes, size_t size);

#if defined(__x86_64__) || defined(__aarch64__)
#define HARDWARE 1
#endif

#if HARDWARE
/* Possible lengths of each of the three parts in bytes; multiples of 8. Longest first, so that
 * little is left for the shorter ones. */
static const uint32_t part_bytes[] = {1024, 256, 64};
#define PART_KIND_COUNT (sizeof part_bytes / sizeof part_bytes[0])
static uint32_t one_part_shift[PART_KIND_COUNT];  /* x^(8 * part - 33) */
static uint32_t two_parts_shift[PART_KIND_COUNT]; /* x^(16 * part - 33) */

/* x^exponent modulo the polynomial, reflected: bit 31 is x^0 */
static uint32_t power_of_x(uint32_t exponent)
{
    uint32_t value = 0x80000000u;
    while (exponent--)
        value = (value >> 1) ^ (POLYNOMIAL & (0u - (value & 1)));
    return value;
}

static void fill_shifts(void)
{
    for (size_t i = 0; i < PART_KIND_COUNT; i++) {
        one_part_shift[i] = power_of_x(8 * part_bytes[i] - 33);
        two_parts_shift[i] = power_of_x(16 * part_bytes[i] - 33);
    }
}

static inline uint64_t load_64(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

/* One name for each instruction on both architectures. Whether this machine has them is checked at
 * run time, so that one build serves every machine. */
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* crc32 is named explicitly, because not every compiler includes it in sse4.2. */
#define WITH_CRC __attribute__((target("sse4.2,crc32")))
#define WITH_CRC_AND_MULTIPLY __attribute__((target("sse4.2,crc32,pclmul")))
#define crc_8 _mm_crc32_u8
#define crc_16 _mm_crc32_u16
#define crc_32 _mm_crc32_u32
#define crc_64 _mm_crc32_u64
/* the width of the instruction's operand, which avoids truncation to 32 bits in every step */
typedef uint64_t crc_state;
#define multiply(a, b)                                                                                                 \
    ((uint64_t)_mm_cvtsi128_si64(                                                                                      \
        _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)(a)), _mm_cvtsi64_si128((int64_t)(b)), 0)))

/* Executes cpuid itself: __builtin_cpu_supports depends on the compiler's runtime library, and
 * zig's always returns false. */
static bool has_feature(unsigned bit)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit);
}

static bool has_crc(void)
{
    return has_feature(bit_SSE4_2);
}

static bool has_multiply(void)
{
    return has_feature(bit_PCLMUL);
}
#else
#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>

#define WITH_CRC __attribute__((target("+crc")))
#define WITH_CRC_AND_MULTIPLY __attribute__((target("+crc+aes")))
#define crc_8 __crc32cb
#define crc_16 __crc32ch
#define crc_32 __crc32cw
#define crc_64 __crc32cd
typedef uint32_t crc_state;
#define multiply(a, b) ((uint64_t)vmull_p64(a, b))

/* asm/hwcap.h */
#define CAPABILITY_PMULL (1ul << 4)
#define CAPABILITY_CRC32 (1ul << 7)

static bool has_crc(void)
{
    return (getauxval(AT_HWCAP) & CAPABILITY_CRC32) != 0;
}

static bool has_multiply(void)
{
    return (getauxval(AT_HWCAP) & CAPABILITY_PMULL) != 0;
}
#endif

WITH_CRC static uint32_t crc_one_stream(uint32_t crc, const uint8_t *bytes, size_t size)
{
    crc_state state = crc;
    for (; size >= 8; bytes += 8, size -= 8)
        state = crc_64(state, load_64(bytes));
    crc = (uint32_t)state;
    if (size & 4) {
        crc = crc_32(crc, load_le_32(bytes));
        bytes += 4;
    }
    if (size & 2) {
        uint16_t half;
        memcpy(&half, bytes, 2);
        crc = crc_16(crc, half);
        bytes += 2;
    }
    return size & 1 ? crc_8(crc, *bytes) : crc;
}

/* Three parts of `part` bytes each. */
WITH_CRC_AND_MULTIPLY static inline uint32_t crc_three_parts(uint32_t crc, const uint8_t *bytes, size_t part,
                                                             uint32_t shift_one, uint32_t shift_two)
{
    crc_state first = crc, second = 0, third = 0;
    for (const uint8_t *end = bytes + part; bytes < end; bytes += 8) {
        first = crc_64(first, load_64(bytes));
        second = crc_64(second, load_64(bytes + part));
        third = crc_64(third, load_64(bytes + 2 * part));
    }
    return (uint32_t)(third ^ crc_64(0, multiply(first, shift_two) ^ multiply(second, shift_one)));
}

WITH_CRC_AND_MULTIPLY static uint32_t crc_3way(uint32_t crc, const uint8_t *bytes, size_t size)
{
    if (size > SHORT_BYTES_MAX)
        for (size_t i = 0; i < PART_KIND_COUNT; i++)
            for (size_t part = part_bytes[i]; size >= 3 * part; bytes += 3 * part, size -= 3 * part)
                crc = crc_three_parts(crc, bytes, part, one_part_shift[i], two_parts_shift[i]);
    return crc_one_stream(crc, bytes, size);
}

static crc_function *const functions[MQD_CRC32C_KIND_COUNT] = {crc_bitwise, crc_table, crc_one_stream, crc_3way};

bool mqd_crc32c_available(enum mqd_crc32c_kind kind)
{
    switch (kind) {
    case MQD_CRC32C_ONE_STREAM:
        return has_crc();
    case MQD_CRC32C_3WAY:
        return has_crc() && has_multiply();
    default:
        return kind < MQD_CRC32C_KIND_COUNT;
    }
}
#else
static crc_function *const functions[MQD_CRC32C_KIND_COUNT] = {crc_bitwise, crc_table};

static void fill_shifts(void)
{
}

bool mqd_crc32c_available(enum mqd_crc32c_kind kind)
{
    return kind <= MQD_CRC32C_TABLE;
}
#endif

/* slow but correct, in case another constructor computes a checksum before ours has run */
static crc_function *best_function = crc_bitwise;

__attribute__((constructor)) static void choose_implementation(void)
{
    fill_table();
    fill_shifts();
    for (int kind = 0; kind < MQD_CRC32C_KIND_COUNT; kind++)
        if (mqd_crc32c_available((enum mqd_crc32c_kind)kind))
            best_function = functions[kind];
}

uint32_t mqd_crc32c(uint32_t crc, const void *bytes, size_t size_bytes)
{
    return ~best_function(~crc, bytes, size_bytes);
}

uint32_t mqd_crc32c_using(enum mqd_crc32c_kind kind, uint32_t crc, const void *bytes, size_t size_bytes)
{
    return ~functions[kind](~crc, bytes, size_bytes);
}
