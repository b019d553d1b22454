/* XXH3-64, the checksum of every stored block.
 *
 * Written from the public specification of the algorithm (xxHash, doc/xxhash_spec.md, "XXH3
 * algorithm description"); its names are kept: secret, stripe, block, accumulate, scramble,
 * avalanche. Only the 64-bit result with a seed and the default secret is here, in one call over
 * one buffer.
 *
 * Structure
 *     Inputs of up to 16, up to 240 and more bytes take three paths, as specified. The longest go
 *     through `kvo_xxh3_long`, whose loop exists in plain C and for SSE2, AVX2 and NEON; on
 *     x86-64 the processor's features decide which loop runs.
 * Cost
 *     That of reading the input from memory.
 *
 * KVOFFLOAD_PORTABLE forces the plain C loop.
 */
#ifndef KVOFFLOAD_XXH3_H
#define KVOFFLOAD_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#if !defined(KVOFFLOAD_PORTABLE) && defined(__x86_64__) && defined(__GNUC__)
#define KVO_XXH3_X86 1
#include <immintrin.h>
#elif !defined(KVOFFLOAD_PORTABLE) && defined(__aarch64__) && defined(__ARM_NEON)
#define KVO_XXH3_NEON 1
#include <arm_neon.h>
#endif

#define KVO_XXH3_SECRET 192                                 /* bytes of the default secret */
#define KVO_XXH3_STRIPE 64                                  /* bytes */
#define KVO_XXH3_STRIPES ((KVO_XXH3_SECRET - 64) / 8)       /* stripes per block */
#define KVO_XXH3_BLOCK (KVO_XXH3_STRIPES * KVO_XXH3_STRIPE) /* bytes */

#define KVO_PRIME32_1 0x9E3779B1u
#define KVO_PRIME32_2 0x85EBCA77u
#define KVO_PRIME32_3 0xC2B2AE3Du
#define KVO_PRIME64_1 0x9E3779B185EBCA87u
#define KVO_PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define KVO_PRIME64_3 0x165667B19E3779F9u
#define KVO_PRIME64_4 0x85EBCA77C2B2AE63u
#define KVO_PRIME64_5 0x27D4EB2F165667C5u
#define KVO_PRIME_MX1 0x165667919E3779F9u
#define KVO_PRIME_MX2 0x9FB21C651E98DF25u

static const uint8_t kvo_xxh3_secret[KVO_XXH3_SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* -- words ------------------------------------------------------------------------------------- */

static inline uint32_t kvo_little32(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

static inline uint64_t kvo_little64(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline void kvo_put_little64(uint8_t *p, uint64_t word) {
    int index;
    for (index = 0; index < 8; index++)
        p[index] = (uint8_t)(word >> (8 * index));
}

static inline uint64_t kvo_rotate64(uint64_t word, int bits) {
    return (word << bits) | (word >> (64 - bits));
}

static inline uint64_t kvo_swap64(uint64_t word) {
    word = ((word & 0x00ff00ff00ff00ffu) << 8) | ((word >> 8) & 0x00ff00ff00ff00ffu);
    word = ((word & 0x0000ffff0000ffffu) << 16) | ((word >> 16) & 0x0000ffff0000ffffu);
    return (word << 32) | (word >> 32);
}

/* Xor the two halves of the 128-bit product of a and b. */
static inline uint64_t kvo_xxh3_fold(uint64_t a, uint64_t b) {
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

static inline uint64_t kvo_avalanche(uint64_t word) {
    word ^= word >> 37;
    word *= KVO_PRIME_MX1;
    return word ^ (word >> 32);
}

static inline uint64_t kvo_avalanche_xxh64(uint64_t word) {
    word ^= word >> 33;
    word *= KVO_PRIME64_2;
    word ^= word >> 29;
    word *= KVO_PRIME64_3;
    return word ^ (word >> 32);
}

/* -- inputs of 0 to 16 bytes ------------------------------------------------------------------- */

static inline uint64_t kvo_xxh3_small(const uint8_t *input, size_t length, uint64_t seed) {
    const uint8_t *secret = kvo_xxh3_secret;
    if (length > 8) {
        uint64_t low = (kvo_little64(secret + 24) ^ kvo_little64(secret + 32)) + seed;
        uint64_t high = (kvo_little64(secret + 40) ^ kvo_little64(secret + 48)) - seed;
        low ^= kvo_little64(input);
        high ^= kvo_little64(input + length - 8);
        return kvo_avalanche(length + kvo_swap64(low) + high + kvo_xxh3_fold(low, high));
    }
    if (length >= 4) {
        uint64_t first = kvo_little32(input), last = kvo_little32(input + length - 4);
        uint64_t word = kvo_little64(secret + 8) ^ kvo_little64(secret + 16);
        seed ^= kvo_swap64((uint32_t)seed); /* its low half, bytes reversed, in the high half */
        word = (word - seed) ^ (last | (first << 32));
        word ^= kvo_rotate64(word, 49) ^ kvo_rotate64(word, 24);
        word *= KVO_PRIME_MX2;
        word ^= (word >> 35) + length;
        word *= KVO_PRIME_MX2;
        return word ^ (word >> 28);
    }
    if (length) {
        uint32_t combined = (uint32_t)input[length - 1] | ((uint32_t)length << 8) |
                            ((uint32_t)input[0] << 16) | ((uint32_t)input[length >> 1] << 24);
        uint64_t word = kvo_little32(secret) ^ kvo_little32(secret + 4);
        return kvo_avalanche_xxh64((word + seed) ^ combined);
    }
    return kvo_avalanche_xxh64(seed ^ kvo_little64(secret + 56) ^ kvo_little64(secret + 64));
}

/* -- inputs of 17 to 240 bytes ----------------------------------------------------------------- */

static inline uint64_t kvo_xxh3_mix(const uint8_t *data, size_t offset, uint64_t seed) {
    const uint8_t *secret = kvo_xxh3_secret + offset;
    return kvo_xxh3_fold(kvo_little64(data) ^ (kvo_little64(secret) + seed),
                         kvo_little64(data + 8) ^ (kvo_little64(secret + 8) - seed));
}

static inline uint64_t kvo_xxh3_medium(const uint8_t *input, size_t length, uint64_t seed) {
    uint64_t sum = length * KVO_PRIME64_1;
    size_t chunk, chunks;
    if (length <= 128) {
        for (chunk = (length - 1) / 32 + 1; chunk-- > 0;) {
            sum += kvo_xxh3_mix(input + 16 * chunk, 32 * chunk, seed);
            sum += kvo_xxh3_mix(input + length - 16 * chunk - 16, 32 * chunk + 16, seed);
        }
        return kvo_avalanche(sum);
    }
    chunks = length / 16;
    for (chunk = 0; chunk < 8; chunk++)
        sum += kvo_xxh3_mix(input + 16 * chunk, 16 * chunk, seed);
    sum = kvo_avalanche(sum);
    for (chunk = 8; chunk < chunks; chunk++)
        sum += kvo_xxh3_mix(input + 16 * chunk, 16 * (chunk - 8) + 3, seed);
    sum += kvo_xxh3_mix(input + length - 16, 119, seed);
    return kvo_avalanche(sum);
}

/* -- inputs of 241 bytes and more -------------------------------------------------------------- */

/* Accumulate `blocks` times `stripes` stripes; `secret`, a place in the `whole` one, moves on by 8
 * bytes with each stripe and back with each block. With `scramble`, the sums are scrambled after
 * each block. All variants keep the sums in registers over the blocks: a vector read just after its
 * lanes were written one by one would wait for the store. */
typedef void (*kvo_rounds_function)(uint64_t *sums, const uint8_t *input, const uint8_t *secret,
                                    const uint8_t *whole, size_t stripes, size_t blocks,
                                    int scramble);

static inline void kvo_rounds_plain(uint64_t *sums, const uint8_t *input, const uint8_t *secret,
                                    const uint8_t *whole, size_t stripes, size_t blocks,
                                    int scramble) {
    const uint8_t *last = whole + KVO_XXH3_SECRET - 64;
    size_t block, stripe;
    int lane;
    for (block = 0; block < blocks; block++) {
        for (stripe = 0; stripe < stripes; stripe++) {
            for (lane = 0; lane < 8; lane++) {
                uint64_t data = kvo_little64(input + 8 * lane);
                uint64_t value = data ^ kvo_little64(secret + 8 * stripe + 8 * lane);
                sums[lane ^ 1] += data;
                sums[lane] += (uint64_t)(uint32_t)value * (value >> 32);
            }
            input += KVO_XXH3_STRIPE;
        }
        for (lane = 0; scramble && lane < 8; lane++) {
            uint64_t sum = sums[lane] ^ (sums[lane] >> 47);
            sums[lane] = (sum ^ kvo_little64(last + 8 * lane)) * KVO_PRIME32_1;
        }
    }
}

#if KVO_XXH3_X86
/* One body for vectors of two widths; a stripe has several of them. A product takes the low
 * halves of two vectors' lanes; a shuffle brings the high halves there. A lane times a 32-bit prime
 * is two such products. */
#define KVO_ROUNDS_X86(name, target_, vector, load, store, xor_, add, multiply, shuffle,           \
                       shift_right, shift_left, fill)                                              \
    __attribute__((target(target_))) static inline void name(                                      \
        uint64_t *sums, const uint8_t *input, const uint8_t *secret, const uint8_t *whole,         \
        size_t stripes, size_t blocks, int scramble) {                                             \
        enum { PARTS = KVO_XXH3_STRIPE / sizeof(vector), WIDTH = sizeof(vector) };                 \
        const uint8_t *last = whole + KVO_XXH3_SECRET - 64;                                        \
        const vector prime = fill((int)KVO_PRIME32_1);                                             \
        vector sum[PARTS];                                                                         \
        size_t block, stripe;                                                                      \
        int part;                                                                                  \
        for (part = 0; part < PARTS; part++)                                                       \
            sum[part] = load((const uint8_t *)sums + WIDTH * part);                                \
        for (block = 0; block < blocks; block++) {                                                 \
            for (stripe = 0; stripe < stripes; stripe++) {                                         \
                for (part = 0; part < PARTS; part++) {                                             \
                    vector data = load(input + WIDTH * part);                                      \
                    vector value = xor_(data, load(secret + 8 * stripe + WIDTH * part));           \
                    vector product = multiply(value, shuffle(value, 0x31));                        \
                    sum[part] = add(sum[part], add(shuffle(data, 0x4e), product));                 \
                }                                                                                  \
                _mm_prefetch((const char *)input + KVO_XXH3_AHEAD, _MM_HINT_T0);                   \
                input += KVO_XXH3_STRIPE;                                                          \
            }                                                                                      \
            for (part = 0; scramble && part < PARTS; part++) {                                     \
                vector value = xor_(sum[part], shift_right(sum[part], 47));                        \
                value = xor_(value, load(last + WIDTH * part));                                    \
                sum[part] = add(multiply(value, prime),                                            \
                                shift_left(multiply(shuffle(value, 0x31), prime), 32));            \
            }                                                                                      \
        }                                                                                          \
        for (part = 0; part < PARTS; part++)                                                       \
            store((uint8_t *)sums + WIDTH * part, sum[part]);                                      \
    }

#define KVO_XXH3_AHEAD 768 /* bytes to prefetch ahead; beyond the end that has no effect */
#define KVO_LOAD128(p) _mm_loadu_si128((const __m128i *)(p))
#define KVO_STORE128(p, v) _mm_storeu_si128((__m128i *)(p), v)
#define KVO_LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))
#define KVO_STORE256(p, v) _mm256_storeu_si256((__m256i *)(p), v)

KVO_ROUNDS_X86(kvo_rounds_sse2, "sse2", __m128i, KVO_LOAD128, KVO_STORE128, _mm_xor_si128,
               _mm_add_epi64, _mm_mul_epu32, _mm_shuffle_epi32, _mm_srli_epi64, _mm_slli_epi64,
               _mm_set1_epi32)
KVO_ROUNDS_X86(kvo_rounds_avx2, "avx2", __m256i, KVO_LOAD256, KVO_STORE256, _mm256_xor_si256,
               _mm256_add_epi64, _mm256_mul_epu32, _mm256_shuffle_epi32, _mm256_srli_epi64,
               _mm256_slli_epi64, _mm256_set1_epi32)
#endif

#if KVO_XXH3_NEON
static inline void kvo_rounds_neon(uint64_t *sums, const uint8_t *input, const uint8_t *secret,
                                   const uint8_t *whole, size_t stripes, size_t blocks,
                                   int scramble) {
    const uint8_t *last = whole + KVO_XXH3_SECRET - 64;
    const uint32x2_t prime = vdup_n_u32(KVO_PRIME32_1);
    uint64x2_t sum[4];
    size_t block, stripe;
    int part;
    for (part = 0; part < 4; part++)
        sum[part] = vld1q_u64(sums + 2 * part);
    for (block = 0; block < blocks; block++) {
        for (stripe = 0; stripe < stripes; stripe++) {
            for (part = 0; part < 4; part++) {
                const uint8_t *words = secret + 8 * stripe + 16 * part;
                uint64x2_t data = vreinterpretq_u64_u8(vld1q_u8(input + 16 * part));
                uint64x2_t value = veorq_u64(data, vreinterpretq_u64_u8(vld1q_u8(words)));
                sum[part] = vaddq_u64(sum[part], vextq_u64(data, data, 1));
                sum[part] = vmlal_u32(sum[part], vmovn_u64(value), vshrn_n_u64(value, 32));
            }
            input += KVO_XXH3_STRIPE;
        }
        for (part = 0; scramble && part < 4; part++) {
            uint64x2_t value = veorq_u64(sum[part], vshrq_n_u64(sum[part], 47));
            value = veorq_u64(value, vreinterpretq_u64_u8(vld1q_u8(last + 16 * part)));
            sum[part] = vmlal_u32(vshlq_n_u64(vmull_u32(vshrn_n_u64(value, 32), prime), 32),
                                  vmovn_u64(value), prime);
        }
    }
    for (part = 0; part < 4; part++)
        vst1q_u64(sums + 2 * part, sum[part]);
}
#endif

static inline kvo_rounds_function kvo_rounds_choice(void) {
#if KVO_XXH3_X86
    return __builtin_cpu_supports("avx2") ? kvo_rounds_avx2 : kvo_rounds_sse2;
#elif KVO_XXH3_NEON
    return kvo_rounds_neon;
#else
    return kvo_rounds_plain;
#endif
}

typedef struct {
    uint64_t sums[8];
    uint8_t secret[KVO_XXH3_SECRET]; /* the default secret, seeded */
} kvo_xxh3_state;

static inline void kvo_xxh3_start(kvo_xxh3_state *state, uint64_t seed) {
    static const uint64_t sums[8] = {KVO_PRIME32_3, KVO_PRIME64_1, KVO_PRIME64_2, KVO_PRIME64_3,
                                     KVO_PRIME64_4, KVO_PRIME32_2, KVO_PRIME64_5, KVO_PRIME32_1};
    int offset;
    memcpy(state->sums, sums, sizeof sums);
    for (offset = 0; offset < KVO_XXH3_SECRET; offset += 16) {
        kvo_put_little64(state->secret + offset, kvo_little64(kvo_xxh3_secret + offset) + seed);
        kvo_put_little64(state->secret + offset + 8,
                         kvo_little64(kvo_xxh3_secret + offset + 8) - seed);
    }
}

/* Accumulate `count` stripes of one block, from its stripe number `first` on. */
static inline void kvo_xxh3_take(kvo_xxh3_state *state, const uint8_t *input, size_t first,
                                 size_t count, kvo_rounds_function rounds) {
    const uint8_t *secret = state->secret + 8 * first;
    rounds(state->sums, input, secret, state->secret, count, 1, first + count == KVO_XXH3_STRIPES);
}

/* Accumulate the last 64 bytes and return the sum of all `length` bytes. */
static inline uint64_t kvo_xxh3_end(kvo_xxh3_state *state, const uint8_t *last_stripe,
                                    size_t length, kvo_rounds_function rounds) {
    const uint8_t *secret = state->secret;
    uint64_t *sums = state->sums, result = (uint64_t)length * KVO_PRIME64_1;
    int pair;
    rounds(sums, last_stripe, secret + KVO_XXH3_SECRET - 71, secret, 1, 1, 0);
    for (pair = 0; pair < 4; pair++)
        result += kvo_xxh3_fold(sums[2 * pair] ^ kvo_little64(secret + 11 + 16 * pair),
                                sums[2 * pair + 1] ^ kvo_little64(secret + 19 + 16 * pair));
    return kvo_avalanche(result);
}

static inline uint64_t kvo_xxh3_long(const uint8_t *input, size_t length, uint64_t seed,
                                     kvo_rounds_function rounds) {
    size_t blocks = (length - 1) / KVO_XXH3_BLOCK;
    size_t left = length - blocks * KVO_XXH3_BLOCK; /* 1 ... KVO_XXH3_BLOCK bytes */
    kvo_xxh3_state state;
    kvo_xxh3_start(&state, seed);
    rounds(state.sums, input, state.secret, state.secret, KVO_XXH3_STRIPES, blocks, 1);
    kvo_xxh3_take(&state, input + length - left, 0, (left - 1) / KVO_XXH3_STRIPE, rounds);
    return kvo_xxh3_end(&state, input + length - KVO_XXH3_STRIPE, length, rounds);
}

/* -- any input --------------------------------------------------------------------------------- */

/* Return the XXH3-64 of a buffer; `input` may be null if `length` is 0. */
static inline uint64_t kvo_xxh3_64(const uint8_t *input, size_t length, uint64_t seed) {
    if (length <= 16)
        return kvo_xxh3_small(input, length, seed);
    if (length <= 240)
        return kvo_xxh3_medium(input, length, seed);
    return kvo_xxh3_long(input, length, seed, kvo_rounds_choice());
}

/* Copy `length` bytes from `offset` on, counted over all pieces, which are long enough. */
static inline void kvo_gather(uint8_t *target, const struct iovec *pieces, size_t offset,
                              size_t length) {
    for (; length; pieces++) {
        size_t count = pieces->iov_len;
        if (offset >= count) {
            offset -= count;
            continue;
        }
        count = count - offset < length ? count - offset : length;
        memcpy(target, (const uint8_t *)pieces->iov_base + offset, count);
        target += count;
        length -= count;
        offset = 0;
    }
}

/* Return the XXH3-64 of a buffer in `num_pieces` pieces, none of them empty, as if joined. */
static inline uint64_t kvo_xxh3_pieces(const struct iovec *pieces, size_t num_pieces,
                                       uint64_t seed) {
    kvo_rounds_function rounds = kvo_rounds_choice();
    kvo_xxh3_state state;
    uint8_t stripe[240];
    size_t length = 0, piece, offset = 0, done, stripes, count;
    for (piece = 0; piece < num_pieces; piece++)
        length += pieces[piece].iov_len;
    if (num_pieces == 1)
        return kvo_xxh3_64(pieces->iov_base, length, seed);
    if (length <= sizeof stripe) {
        kvo_gather(stripe, pieces, 0, length);
        return kvo_xxh3_64(stripe, length, seed);
    }
    kvo_xxh3_start(&state, seed);
    stripes = (length - 1) / KVO_XXH3_STRIPE; /* all except the last, which may overlap */
    for (piece = 0, done = 0; done < stripes; done += count) {
        size_t first = done % KVO_XXH3_STRIPES;
        while (offset >= pieces[piece].iov_len)
            offset -= pieces[piece++].iov_len;
        count = (pieces[piece].iov_len - offset) / KVO_XXH3_STRIPE;
        if (count == 0) { /* a stripe that crosses a border */
            kvo_gather(stripe, pieces + piece, offset, KVO_XXH3_STRIPE);
            count = 1;
            kvo_xxh3_take(&state, stripe, first, count, rounds);
        } else {
            count = count < stripes - done ? count : stripes - done;
            count = count < KVO_XXH3_STRIPES - first ? count : KVO_XXH3_STRIPES - first;
            kvo_xxh3_take(&state, (const uint8_t *)pieces[piece].iov_base + offset, first, count,
                          rounds);
        }
        offset += count * KVO_XXH3_STRIPE;
    }
    kvo_gather(stripe, pieces, length - KVO_XXH3_STRIPE, KVO_XXH3_STRIPE);
    return kvo_xxh3_end(&state, stripe, length, rounds);
}

#endif
