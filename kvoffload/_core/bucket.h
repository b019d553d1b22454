/* One bucket of the index: a cache line of 12 one-byte tags and 12 values, after F14.
 *
 * A tag is 0 where the entry is empty, else 8 bits of the key's hash. `overflow` counts the keys
 * whose home is this bucket or an earlier one and that live in a later one: a search may stop at
 * the first bucket whose `overflow` is 0.
 *
 * KVOFFLOAD_PORTABLE forces the plain C path that processors other than x86-64 take.
 */
#ifndef KVOFFLOAD_BUCKET_H
#define KVOFFLOAD_BUCKET_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__) && !defined(KVOFFLOAD_PORTABLE)
#include <emmintrin.h>
#define KVO_SSE2 1
#endif

#define KVO_BUCKET_ENTRIES 12

typedef struct {
    uint8_t tags[KVO_BUCKET_ENTRIES];
    uint32_t overflow;
    uint32_t values[KVO_BUCKET_ENTRIES];
} KvoBucket;

/* Return a mask of the entries whose tag equals `tag`. */
static inline uint32_t kvo_match(const KvoBucket *bucket, uint8_t tag) {
#ifdef KVO_SSE2
    __m128i tags = _mm_load_si128((const __m128i *)bucket);
    /* _mm_set1_epi8 may write the byte to memory and read four of them back, which waits. */
    __m128i wanted = _mm_set1_epi32((int)(tag * 0x01010101u));
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(tags, wanted)) & 0xFFFu;
#else
    uint32_t bits = 0;
    for (int entry = 0; entry < KVO_BUCKET_ENTRIES; entry++)
        bits |= (uint32_t)(bucket->tags[entry] == tag) << entry;
    return bits;
#endif
}

/* Return the index of the lowest set bit; `bits` is not 0. */
static inline uint32_t kvo_lowest(uint32_t bits) {
#if defined(__GNUC__) || defined(__clang__)
    return (uint32_t)__builtin_ctz(bits);
#else
    uint32_t index = 0;
    while (!(bits & 1u)) {
        bits >>= 1;
        index++;
    }
    return index;
#endif
}

static inline void kvo_prefetch(const void *address) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(address);
    // Otherwise GCC treats a function that only prefetches as free of effects and removes its
    // calls.
    __asm__ volatile("");
#else
    (void)address;
#endif
}

#endif
