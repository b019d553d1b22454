"""The only file that allocates: address space reserved at once, and small growing arrays."""

from libc.stdint cimport uint64_t

# Return `bytes` zeroed bytes, aligned to a page, touched lazily; NULL if there is no room.
cdef void* reserve(size_t bytes) noexcept
# Release an address that `reserve` returned, or NULL.
cdef void release(void* address, size_t bytes) noexcept
# Grow or start (NULL) an array; NULL, with the old array untouched, if there is no room.
cdef void* resize(void* address, size_t bytes) noexcept
# Free an address that `resize` returned, or NULL.
cdef void discard(void* address) noexcept
# Ensure that an array from `resize` has room for `wanted` entries of `entry_bytes`; it grows to at
# least twice its room and `least`. False, with nothing changed, if there is no memory.
cdef bint grow(
    void** array, uint64_t* room, uint64_t wanted, size_t entry_bytes, uint64_t least
) noexcept
# The same for an array from `reserve`: exactly `wanted` entries, of which the first `used` are
# kept. Only their memory is touched.
cdef bint extend(
    void** array, uint64_t* room, uint64_t wanted, size_t entry_bytes, uint64_t used
) noexcept
