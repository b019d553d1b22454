"""An index: F14-style buckets from the hashes of keys to values, probed linearly.

Structure
    A value is the number of a node, a ghost or another record. The owner of the index has the keys
    and compares the key of each value that `probe_next` returns. The lower 32 bits of a key's hash
    give its *home*, the bucket where its search begins; the upper 8 its *tag*, which is not 0. The
    bits between are free: an owner need not keep them, and may choose keys by them.
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
    const uint32_t NIL "KVO_NIL"  # no value

cdef enum:
    BUCKET_ENTRIES = 12
    MOST_PER_BUCKET = 10    # values per bucket on average, at most

cdef struct Index:
    KvoBucket* buckets
    uint64_t num_buckets

# The state of a search.
cdef struct Probe:
    const Index* index
    const KvoBucket* home
    const KvoBucket* bucket # the current one
    uint32_t bits           # entries of that bucket with the key's tag that were not returned yet
    uint8_t tag

# Reserve room for `size` values, at `per_bucket` on average; False if there is no memory.
cdef bint index_open(Index* index, uint64_t size, uint64_t per_bucket) noexcept
cdef void index_close(Index* index) noexcept
# Remove all values; the memory of every bucket is touched.
cdef void index_clear(Index* index) noexcept
# Return the number of buckets that a value's key passed, `num_buckets` if it is not in the index.
cdef uint64_t index_distance(const Index* index, uint64_t hashed, uint32_t value) noexcept
# Verify the invariants of an index of `size` values, whose distances add up to `passed`; return the
# broken one, or NULL.
cdef const char* index_check(const Index* index, uint64_t size, uint64_t passed) noexcept


cdef inline uint8_t tag_of(uint64_t hashed) noexcept nogil:
    cdef uint8_t tag = <uint8_t>(hashed >> 56)
    return tag if tag else 1


cdef inline KvoBucket* home_of(const Index* index, uint64_t hashed) noexcept nogil:
    return index.buckets + ((<uint64_t><uint32_t>hashed * index.num_buckets) >> 32)


cdef inline KvoBucket* bucket_after(const Index* index, const KvoBucket* bucket) noexcept nogil:
    cdef KvoBucket* after = <KvoBucket*>bucket + 1
    return index.buckets if after == index.buckets + index.num_buckets else after


cdef inline void index_approach(const Index* index, uint64_t hashed) noexcept nogil:
    """Prefetch the home of a key."""
    kvo_prefetch(home_of(index, hashed))


cdef inline uint32_t index_first(const Index* index, uint64_t hashed) noexcept nogil:
    """Return a value in the home of a key that may be the key's, or NIL."""
    cdef const KvoBucket* bucket = home_of(index, hashed)
    cdef uint32_t bits = kvo_match(bucket, tag_of(hashed))
    return bucket.values[kvo_lowest(bits)] if bits else NIL


cdef inline Probe probe_from(const Index* index, uint64_t hashed) noexcept nogil:
    """Begin the search for a key."""
    cdef Probe probe
    probe.index = index
    probe.home = probe.bucket = home_of(index, hashed)
    probe.tag = tag_of(hashed)
    probe.bits = kvo_match(probe.home, probe.tag)
    return probe


cdef inline uint32_t probe_next(Probe* probe) noexcept nogil:
    """Return the next value that may be the key's, or NIL."""
    cdef uint32_t value
    while not probe.bits:
        if probe.bucket.overflow == 0:
            return NIL
        probe.bucket = bucket_after(probe.index, probe.bucket)
        if probe.bucket == probe.home:
            return NIL  # every bucket has overflowed
        probe.bits = kvo_match(probe.bucket, probe.tag)
    value = probe.bucket.values[kvo_lowest(probe.bits)]
    probe.bits &= probe.bits - 1
    return value


cdef inline void index_insert(Index* index, uint64_t hashed, uint32_t value) noexcept nogil:
    """Add the value of an absent key; the caller has ensured that there is room."""
    cdef KvoBucket* bucket = home_of(index, hashed)
    cdef uint32_t bits = kvo_match(bucket, 0)
    cdef uint32_t entry
    while not bits:
        bucket.overflow += 1
        bucket = bucket_after(index, bucket)
        bits = kvo_match(bucket, 0)
    entry = kvo_lowest(bits)
    bucket.tags[entry] = tag_of(hashed)
    bucket.values[entry] = value


cdef inline uint32_t entry_of(const KvoBucket* bucket, uint8_t tag, uint32_t value) noexcept nogil:
    """Return the index of a value's entry in a bucket, BUCKET_ENTRIES if it is not there."""
    cdef uint32_t bits = kvo_match(bucket, tag)
    while bits:
        if bucket.values[kvo_lowest(bits)] == value:
            return kvo_lowest(bits)
        bits &= bits - 1
    return BUCKET_ENTRIES


cdef inline void index_remove(Index* index, uint64_t hashed, uint32_t value) noexcept nogil:
    """Remove a value that is in the index."""
    cdef KvoBucket* bucket = home_of(index, hashed)
    cdef uint8_t tag = tag_of(hashed)
    cdef uint32_t entry = entry_of(bucket, tag, value)
    while entry == <uint32_t>BUCKET_ENTRIES:
        kvo_require(bucket.overflow > 0, "a removed key is in the index")
        bucket.overflow -= 1
        bucket = bucket_after(index, bucket)
        entry = entry_of(bucket, tag, value)
    bucket.tags[entry] = 0
