"""The index: F14-style buckets from a part of a key's hash to values, probed linearly.

Structure
    A value is the id of a node or the position of a ghost. The caller has the keys and compares the
    key of each value that `probe_next` returns. A *tag* is 8 bits of the hash, not 0; the *home* is
    the bucket where a key's search begins.
Invariants
    A bucket's ``overflow`` counts the keys that passed it on their way from their home.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "bucket.h" nogil:
    ctypedef struct KvoBucket:
        uint8_t tags[12]
        uint32_t overflow
        uint32_t values[12]
    uint32_t kvo_match(const KvoBucket* bucket, uint8_t tag)
    uint32_t kvo_lowest(uint32_t bits)
    void kvo_prefetch(const void* address)

cdef extern from "require.h" nogil:
    void kvo_require(bint holds, const char* invariant)

cdef extern from *:
    """
    #define KVO_NIL UINT32_MAX
    """
    const uint32_t NIL "KVO_NIL"  # no node, no ghost

cdef enum:
    BUCKET_ENTRIES = 12

# The state of a search.
cdef struct Probe:
    KvoBucket* buckets
    uint64_t num_buckets
    uint64_t home
    uint64_t bucket_index   # the current bucket
    uint32_t bits           # entries of that bucket with the key's tag that were not returned yet
    uint8_t tag


cdef inline uint64_t next_bucket(uint64_t bucket_index, uint64_t num_buckets) noexcept nogil:
    return 0 if bucket_index + 1 == num_buckets else bucket_index + 1


cdef inline Probe probe_from(
    KvoBucket* buckets, uint64_t num_buckets, uint64_t home, uint8_t tag
) noexcept nogil:
    """Begin the search for a key."""
    cdef Probe probe
    probe.buckets = buckets
    probe.num_buckets = num_buckets
    probe.home = home
    probe.bucket_index = home
    probe.bits = kvo_match(buckets + home, tag)
    probe.tag = tag
    return probe


cdef inline uint32_t probe_next(Probe* probe) noexcept nogil:
    """Return the next value that may be the key's, or NIL."""
    cdef uint32_t value
    while not probe.bits:
        if probe.buckets[probe.bucket_index].overflow == 0:
            return NIL
        probe.bucket_index = next_bucket(probe.bucket_index, probe.num_buckets)
        if probe.bucket_index == probe.home:
            return NIL  # every bucket has overflowed
        probe.bits = kvo_match(probe.buckets + probe.bucket_index, probe.tag)
    value = probe.buckets[probe.bucket_index].values[kvo_lowest(probe.bits)]
    probe.bits &= probe.bits - 1
    return value


cdef inline void buckets_insert(
    KvoBucket* buckets, uint64_t num_buckets, uint64_t home, uint8_t tag, uint32_t value
) noexcept nogil:
    """Add the value of an absent key; the caller has ensured that there is room."""
    cdef uint64_t bucket_index = home
    cdef uint32_t bits = kvo_match(buckets + bucket_index, 0)
    cdef uint32_t entry
    while not bits:
        buckets[bucket_index].overflow += 1
        bucket_index = next_bucket(bucket_index, num_buckets)
        bits = kvo_match(buckets + bucket_index, 0)
    entry = kvo_lowest(bits)
    buckets[bucket_index].tags[entry] = tag
    buckets[bucket_index].values[entry] = value


cdef inline uint32_t entry_of(const KvoBucket* bucket, uint8_t tag, uint32_t value) noexcept nogil:
    """Return the index of a value's entry in a bucket, BUCKET_ENTRIES if it is not there."""
    cdef uint32_t bits = kvo_match(bucket, tag)
    while bits:
        if bucket.values[kvo_lowest(bits)] == value:
            return kvo_lowest(bits)
        bits &= bits - 1
    return BUCKET_ENTRIES


cdef inline void buckets_remove(
    KvoBucket* buckets, uint64_t num_buckets, uint64_t home, uint8_t tag, uint32_t value
) noexcept nogil:
    """Remove a value that is in the index."""
    cdef uint64_t bucket_index = home
    cdef uint32_t entry = entry_of(buckets + bucket_index, tag, value)
    while entry == <uint32_t>BUCKET_ENTRIES:
        kvo_require(buckets[bucket_index].overflow > 0, "a removed key is in the index")
        buckets[bucket_index].overflow -= 1
        bucket_index = next_bucket(bucket_index, num_buckets)
        entry = entry_of(buckets + bucket_index, tag, value)
    buckets[bucket_index].tags[entry] = 0


cdef inline void buckets_replace(
    KvoBucket* buckets,
    uint64_t num_buckets,
    uint64_t home,
    uint8_t tag,
    uint32_t value,
    uint32_t successor,
) noexcept nogil:
    """Replace `value` with `successor`, which has the same key."""
    cdef uint64_t bucket_index = home
    cdef uint32_t entry = entry_of(buckets + bucket_index, tag, value)
    while entry == <uint32_t>BUCKET_ENTRIES:
        bucket_index = next_bucket(bucket_index, num_buckets)
        entry = entry_of(buckets + bucket_index, tag, value)
    buckets[bucket_index].values[entry] = successor
