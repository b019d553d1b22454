"""The index: F14-style buckets from a part of a key's hash to slots, probed linearly.

Structure
    The caller has the keys, and says of each slot that `probe_next` gives whether it is the one. A
    *tag* is 8 bits of the hash, not 0; the *home* is the bucket where a key's search begins.
Invariants
    A bucket's ``overflow`` counts the keys that passed it on their way from their home.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "bucket.h" nogil:
    ctypedef struct KvoBucket:
        uint8_t tags[12]
        uint32_t overflow
        uint32_t slots[12]
    uint32_t kvo_match(const KvoBucket* bucket, uint8_t tag)
    uint32_t kvo_lowest(uint32_t bits)
    void kvo_prefetch(const void* address)

cdef extern from "require.h" nogil:
    void kvo_require(bint holds, const char* invariant)

cdef extern from *:
    """
    #define KVO_NIL UINT32_MAX
    """
    const uint32_t NIL "KVO_NIL"  # no slot

cdef enum:
    BUCKET_ENTRIES = 12

# A search at work.
cdef struct Probe:
    KvoBucket* buckets
    uint64_t num_buckets
    uint64_t home
    uint64_t number         # of the bucket that it is at
    uint32_t bits           # entries of that bucket whose tag is the key's, not given yet
    uint8_t tag


cdef inline uint64_t next_bucket(uint64_t number, uint64_t num_buckets) noexcept nogil:
    return 0 if number + 1 == num_buckets else number + 1


cdef inline Probe probe_from(
    KvoBucket* buckets, uint64_t num_buckets, uint64_t home, uint8_t tag
) noexcept nogil:
    """Begin the search for a key."""
    cdef Probe probe
    probe.buckets = buckets
    probe.num_buckets = num_buckets
    probe.home = home
    probe.number = home
    probe.bits = kvo_match(buckets + home, tag)
    probe.tag = tag
    return probe


cdef inline uint32_t probe_next(Probe* probe) noexcept nogil:
    """Return the next slot that may hold the key, or NIL."""
    cdef uint32_t slot
    while not probe.bits:
        if probe.buckets[probe.number].overflow == 0:
            return NIL
        probe.number = next_bucket(probe.number, probe.num_buckets)
        if probe.number == probe.home:
            return NIL  # every bucket overflowed at some time
        probe.bits = kvo_match(probe.buckets + probe.number, probe.tag)
    slot = probe.buckets[probe.number].slots[kvo_lowest(probe.bits)]
    probe.bits &= probe.bits - 1
    return slot


cdef inline void buckets_insert(
    KvoBucket* buckets, uint64_t num_buckets, uint64_t home, uint8_t tag, uint32_t slot
) noexcept nogil:
    """Add a slot whose key is absent; the caller has made sure of room."""
    cdef uint64_t number = home
    cdef uint32_t bits = kvo_match(buckets + number, 0)
    cdef uint32_t entry
    while not bits:
        buckets[number].overflow += 1
        number = next_bucket(number, num_buckets)
        bits = kvo_match(buckets + number, 0)
    entry = kvo_lowest(bits)
    buckets[number].tags[entry] = tag
    buckets[number].slots[entry] = slot


cdef inline uint32_t entry_of(const KvoBucket* bucket, uint8_t tag, uint32_t slot) noexcept nogil:
    """Return the number of a slot's entry in a bucket, BUCKET_ENTRIES if it is not there."""
    cdef uint32_t bits = kvo_match(bucket, tag)
    while bits:
        if bucket.slots[kvo_lowest(bits)] == slot:
            return kvo_lowest(bits)
        bits &= bits - 1
    return BUCKET_ENTRIES


cdef inline void buckets_remove(
    KvoBucket* buckets, uint64_t num_buckets, uint64_t home, uint8_t tag, uint32_t slot
) noexcept nogil:
    """Remove a slot that is in the index."""
    cdef uint64_t number = home
    cdef uint32_t entry = entry_of(buckets + number, tag, slot)
    while entry == <uint32_t>BUCKET_ENTRIES:
        kvo_require(buckets[number].overflow > 0, "a removed key is in the index")
        buckets[number].overflow -= 1
        number = next_bucket(number, num_buckets)
        entry = entry_of(buckets + number, tag, slot)
    buckets[number].tags[entry] = 0


cdef inline void buckets_replace(
    KvoBucket* buckets,
    uint64_t num_buckets,
    uint64_t home,
    uint8_t tag,
    uint32_t slot,
    uint32_t successor,
) noexcept nogil:
    """Let the entry of `slot` name `successor`, which holds the same key."""
    cdef uint64_t number = home
    cdef uint32_t entry = entry_of(buckets + number, tag, slot)
    while entry == <uint32_t>BUCKET_ENTRIES:
        number = next_bucket(number, num_buckets)
        entry = entry_of(buckets + number, tag, slot)
    buckets[number].slots[entry] = successor
