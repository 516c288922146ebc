/* Atomic access to plain words in shared memory or between threads, and the guarantees of each
 * operation.
 *
 * The shared structs hold plain integers (their layout is a contract between processes, and C11
 * _Atomic may change it); every access to a word that another thread or process uses goes through
 * these macros. All of them are lock-free on words up to 8 bytes.
 *
 *   load_acquire / store_release  a reader that loads the stored value sees everything that the
 *                                 writer did before the store
 *   load_relaxed / store_relaxed  no tearing, no ordering
 *   store_seq_cst                 release, and no later load_seq_cst of this thread happens before
 *                                 it (x86: a locked exchange, which orders every later load)
 *   exchange, fetch_add,          seq_cst read-modify-write
 *   fetch_or, fetch_and
 *   fence_full                    a store that precedes it is never delayed beyond a load that
 *                                 follows it (Dekker's pattern: sleep protocol, waiters)
 */
#ifndef MQD_ATOMIC_H
#define MQD_ATOMIC_H

#include <stdbool.h>
#include <stdint.h>

#define mqd_load_relaxed(word) __atomic_load_n((word), __ATOMIC_RELAXED)
#define mqd_load_acquire(word) __atomic_load_n((word), __ATOMIC_ACQUIRE)
#define mqd_load_seq_cst(word) __atomic_load_n((word), __ATOMIC_SEQ_CST)
#define mqd_store_relaxed(word, value) __atomic_store_n((word), (value), __ATOMIC_RELAXED)
#define mqd_store_release(word, value) __atomic_store_n((word), (value), __ATOMIC_RELEASE)
#define mqd_store_seq_cst(word, value) __atomic_store_n((word), (value), __ATOMIC_SEQ_CST)
#define mqd_exchange(word, value) __atomic_exchange_n((word), (value), __ATOMIC_SEQ_CST)
#define mqd_fetch_add(word, value) __atomic_fetch_add((word), (value), __ATOMIC_SEQ_CST)
#define mqd_fetch_or(word, value) __atomic_fetch_or((word), (value), __ATOMIC_SEQ_CST)
#define mqd_fetch_and(word, value) __atomic_fetch_and((word), (value), __ATOMIC_SEQ_CST)

/* For counters with a single writer; other processes may read them at any time. No locked
 * instruction. */
#define mqd_counter_add(word, value) mqd_store_relaxed((word), mqd_load_relaxed(word) + (value))

/* Stores `desired` if the word has the value *expected, and returns true. Otherwise sets *expected
 * to the word's value, and returns false. seq_cst. */
#define mqd_compare_exchange(word, expected, desired)                                                                  \
    __atomic_compare_exchange_n((word), (expected), (desired), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)

static inline void mqd_fence_full(void)
{
#if defined(__SANITIZE_THREAD__) && !defined(__clang__)
    /* gcc refuses fences under TSan, which does not model them; a locked operation on a private
     * word is the same barrier. */
    uint32_t private_word = 0;
    (void)__atomic_exchange_n(&private_word, 1u, __ATOMIC_SEQ_CST);
    __asm__ volatile("" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* For spin loops: frees the pipeline for the sibling hyperthread. */
static inline void mqd_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

#endif
