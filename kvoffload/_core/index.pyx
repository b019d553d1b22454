"""The parts of an index that are not on the fast path; see ``index.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport release, reserve


cdef bint index_open(Index* index, uint64_t size, uint64_t per_bucket) noexcept:
    index.num_buckets = size // per_bucket + 1
    index.buckets = <KvoBucket*>reserve(index.num_buckets * sizeof(KvoBucket))
    return index.buckets != NULL


cdef void index_close(Index* index) noexcept:
    release(index.buckets, index.num_buckets * sizeof(KvoBucket))
    index.buckets = NULL


cdef void index_clear(Index* index) noexcept:
    memset(index.buckets, 0, index.num_buckets * sizeof(KvoBucket))


cdef uint64_t index_distance(const Index* index, uint64_t hashed, uint32_t value) noexcept:
    cdef const KvoBucket* bucket = home_of(index, hashed)
    cdef uint64_t distance
    for distance in range(index.num_buckets):
        if entry_of(bucket, tag_of(hashed), value) < <uint32_t>BUCKET_ENTRIES:
            return distance
        bucket = bucket_after(index, bucket)
    return index.num_buckets


cdef const char* index_check(const Index* index, uint64_t size, uint64_t passed) noexcept:
    cdef uint64_t entries = 0, overflow = 0, bucket_index
    cdef uint32_t entry
    for bucket_index in range(index.num_buckets):
        for entry in range(<uint32_t>BUCKET_ENTRIES):
            entries += index.buckets[bucket_index].tags[entry] != 0
        overflow += index.buckets[bucket_index].overflow
    if entries != size:
        return b"the index holds every key once"
    if overflow != passed:
        return b"a bucket counts the keys that passed it"
    return NULL
