"""The only file that allocates: address space reserved at once, and small growing arrays."""

from libc.stdint cimport uint64_t

# Return `bytes` zeroed bytes, aligned to a page, touched lazily; NULL if there is no room.
cdef void* reserve(size_t bytes) noexcept
# Give back what `reserve` gave. NULL is legal.
cdef void release(void* address, size_t bytes) noexcept
# Grow or start (NULL) an array; NULL, with the old array untouched, if there is no room.
cdef void* resize(void* address, size_t bytes) noexcept
# Free what `resize` gave. NULL is legal.
cdef void discard(void* address) noexcept
# Make sure that an array that `resize` gave has room for `wanted` entries of `entry_bytes`: twice
# as many as before, and `least`; False, with nothing changed, if there is no memory.
cdef bint grow(
    void** array, uint64_t* room, uint64_t wanted, size_t entry_bytes, uint64_t least
) noexcept
# The same of an array that `reserve` gave: exactly `wanted` entries, the first `used` kept. No
# memory is touched but theirs.
cdef bint extend(
    void** array, uint64_t* room, uint64_t wanted, size_t entry_bytes, uint64_t used
) noexcept
