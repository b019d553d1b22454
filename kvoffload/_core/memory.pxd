"""The only file that allocates: address space reserved at once, and small growing arrays."""

# Return `bytes` zeroed bytes, aligned to a page, touched lazily; NULL if there is no room.
cdef void* reserve(size_t bytes) noexcept
# Give back what `reserve` gave. NULL is legal.
cdef void release(void* address, size_t bytes) noexcept
# Grow or start (NULL) an array; NULL, with the old array untouched, if there is no room.
cdef void* resize(void* address, size_t bytes) noexcept
# Free what `resize` gave. NULL is legal.
cdef void discard(void* address) noexcept
