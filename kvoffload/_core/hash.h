/* Keyed hash of block hashes, for the index.
 *
 * Keys can be chosen by a client of the engine, so the hash is keyed with secret words drawn from
 * the operating system: folded 64x64 -> 128 bit products of key words xor secret words (the
 * construction of wyhash and of aHash's fallback). It only places keys in buckets; equality is
 * always decided on the whole key.
 *
 * KVOFFLOAD_PORTABLE forces the plain C path that compilers without 128-bit integers take.
 */
#ifndef KVOFFLOAD_HASH_H
#define KVOFFLOAD_HASH_H

#include <stdint.h>
#include <string.h>

#define KVO_SECRET_WORDS 8

static inline uint64_t kvo_read64(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

static inline uint64_t kvo_read32(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

/* Fold the 128-bit product of a and b to 64 bits. */
static inline uint64_t kvo_fold(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__) && !defined(KVOFFLOAD_PORTABLE)
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t a_low = (uint32_t)a, a_high = a >> 32, b_low = (uint32_t)b, b_high = b >> 32;
    uint64_t low = a_low * b_low, mid1 = a_high * b_low, mid2 = a_low * b_high;
    uint64_t carry = ((low >> 32) + (uint32_t)mid1 + (uint32_t)mid2) >> 32;
    return (low + (mid1 << 32) + (mid2 << 32)) ^
           (a_high * b_high + (mid1 >> 32) + (mid2 >> 32) + carry);
#endif
}

/* Hash a key of any length from 1; `secret` has KVO_SECRET_WORDS random words.
 *
 * Always inline: where the compiler made a call of it, a store under hit density took 4 % more. */
static inline __attribute__((always_inline)) uint64_t kvo_hash(const uint8_t *key, uint64_t length,
                                                               const uint64_t *secret) {
    uint64_t state = secret[0] ^ length;
    uint64_t first, second;
    if (length == 32 || length == 36) { /* a digest, with or without a group suffix */
        uint64_t left = kvo_fold(kvo_read64(key) ^ secret[1], kvo_read64(key + 8) ^ secret[2]);
        uint64_t right =
            kvo_fold(kvo_read64(key + 16) ^ secret[3], kvo_read64(key + 24) ^ secret[4]);
        uint64_t tail = length == 36 ? kvo_read32(key + 32) : 0;
        return kvo_fold(left ^ tail ^ secret[5], right ^ state ^ secret[6]);
    }
    while (length > 16) {
        state = kvo_fold(kvo_read64(key) ^ secret[1] ^ state, kvo_read64(key + 8) ^ secret[2]);
        key += 16;
        length -= 16;
    }
    if (length >= 8) {
        first = kvo_read64(key);
        second = kvo_read64(key + length - 8);
    } else if (length >= 4) {
        first = kvo_read32(key);
        second = kvo_read32(key + length - 4);
    } else {
        first = ((uint64_t)key[0] << 16) | ((uint64_t)key[length >> 1] << 8) | key[length - 1];
        second = 0;
    }
    return kvo_fold(kvo_fold(first ^ secret[3], second ^ secret[4] ^ state) ^ secret[5],
                    state ^ secret[6]);
}

/* Return whether two keys of the same length are equal. */
static inline int kvo_equal(const uint8_t *left, const uint8_t *right, uint64_t length) {
    if (length == 32 || length == 36) {
        uint64_t differing = (kvo_read64(left) ^ kvo_read64(right)) |
                             (kvo_read64(left + 8) ^ kvo_read64(right + 8)) |
                             (kvo_read64(left + 16) ^ kvo_read64(right + 16)) |
                             (kvo_read64(left + 24) ^ kvo_read64(right + 24));
        if (length == 36)
            differing |= kvo_read32(left + 32) ^ kvo_read32(right + 32);
        return differing == 0;
    }
    return memcmp(left, right, length) == 0;
}

#endif
