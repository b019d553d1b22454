"""The parts of the slot pool that are not on the fast path; see ``pool.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport release, reserve


cdef size_t stack_bytes(const Pool* pool) noexcept:
    return <size_t>pool.num_blocks * sizeof(uint32_t)


cdef size_t bit_bytes(const Pool* pool) noexcept:
    return <size_t>(pool.num_blocks >> 3) + 1


cdef bint pool_open(Pool* pool, int64_t num_blocks) noexcept:
    memset(pool, 0, sizeof(Pool))
    pool.num_blocks = num_blocks
    pool.freed = <uint32_t*>reserve(stack_bytes(pool))
    pool.bits = <uint8_t*>reserve(bit_bytes(pool))
    if pool.freed == NULL or pool.bits == NULL:
        pool_close(pool)
        return False
    return True


cdef void pool_close(Pool* pool) noexcept:
    release(pool.freed, stack_bytes(pool))
    release(pool.bits, bit_bytes(pool))
    memset(pool, 0, sizeof(Pool))


cdef void pool_reset(Pool* pool) noexcept:
    cdef int64_t index
    for index in range(pool.num_freed):
        pool.bits[pool.freed[index] >> 3] = 0
    pool.num_fresh = 0
    pool.num_freed = 0
