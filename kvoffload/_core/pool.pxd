"""The slots of a medium: fresh ids first, counting up, then the freed ones, last freed first.

Invariants
    Every freed id is below ``num_fresh``; ``bits`` has a 1 for exactly the freed ids.
Cost
    O(1) per slot; 4 bytes and a bit per freed slot, touched lazily.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t

cdef struct Pool:
    int64_t num_blocks      # slots in all
    int64_t num_fresh       # ids that were given out at least once
    int64_t num_freed       # ids on the stack
    uint32_t* freed         # the stack, reserved for all
    uint8_t* bits           # one bit per id: whether it is on the stack

cdef bint pool_open(Pool* pool, int64_t num_blocks) noexcept
cdef void pool_close(Pool* pool) noexcept
# Start again at id 0; no id may be in use.
cdef void pool_reset(Pool* pool) noexcept


cdef inline int64_t pool_num_free(const Pool* pool) noexcept nogil:
    return pool.num_blocks - pool.num_fresh + pool.num_freed


cdef inline int64_t pool_take(Pool* pool) noexcept nogil:
    """Give out an id; the caller has checked that one is free.

    Return -1 if the caller is wrong, so that no memory beyond the stack is read.
    """
    cdef int64_t block_id
    if pool.num_fresh < pool.num_blocks:
        block_id = pool.num_fresh
        pool.num_fresh += 1
        return block_id
    if pool.num_freed == 0:
        return -1
    pool.num_freed -= 1
    block_id = pool.freed[pool.num_freed]
    pool.bits[block_id >> 3] &= <uint8_t>(~(1 << (block_id & 7)) & 0xFF)
    return block_id


cdef inline bint pool_holds(const Pool* pool, int64_t block_id) noexcept nogil:
    """Return whether an id is in use."""
    if block_id < 0 or block_id >= pool.num_fresh:
        return False
    return (pool.bits[block_id >> 3] >> (block_id & 7) & 1) == 0


cdef inline void pool_give(Pool* pool, int64_t block_id) noexcept nogil:
    """Take back an id; ignore one that is not in use, so that the stack never overflows."""
    if not pool_holds(pool, block_id):
        return
    pool.freed[pool.num_freed] = <uint32_t>block_id
    pool.num_freed += 1
    pool.bits[block_id >> 3] |= <uint8_t>(1 << (block_id & 7))
