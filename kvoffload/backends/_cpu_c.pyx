"""The built-in pool, compiled: slots of host memory, allocated by index.

See ``_cpu_py`` for the Python twin, ``_core/pool.pxd`` for the structure.
"""

from kvoffload._core.memory cimport release, reserve
from kvoffload._core.pool cimport (
    pool_close,
    pool_give,
    pool_holds,
    pool_num_free,
    pool_open,
    pool_take,
)

from kvoffload._checks import as_batch, check_block_size, check_num_blocks, check_status
from kvoffload.backends._cpu_py import CPUBackend as PythonCPUBackend, new_spec
from kvoffload.backends.base import Backend
from kvoffload.errors import backend_in_use, cannot_pickle, not_initialised
from kvoffload.types import BlockStatus


cdef size_t bit_bytes(int64_t num_blocks) noexcept:
    return <size_t>(num_blocks >> 3) + 1


cdef class PoolCore:
    def __dealloc__(self):
        self.close()

    def __reduce__(self):
        raise cannot_pickle(self)

    def _open(self, num_blocks):
        """Reserve the pool; a second call gives up the first."""
        cdef int64_t count = check_num_blocks(num_blocks)
        self._require_unused()  # again: another thread may have run since the constructor's check
        self.close()
        self.lent = <uint8_t*>reserve(bit_bytes(count))
        if self.lent == NULL or not pool_open(&self.pool, count):
            release(self.lent, bit_bytes(count))
            raise MemoryError(f"no room for a pool of {count} blocks")
        self.opened = True

    cdef void close(self) noexcept:
        if self.opened:
            self.opened = False
            release(self.lent, bit_bytes(self.pool.num_blocks))
            pool_close(&self.pool)

    def _require_unused(self):
        """Raise RuntimeError while slots are allocated: their holders would lose them."""
        if self.opened and pool_num_free(&self.pool) < self.pool.num_blocks:
            raise backend_in_use(self.pool.num_blocks - pool_num_free(&self.pool))

    cdef int require_open(self) except -1:
        if not self.opened:
            raise not_initialised("backend")
        return 0

    cdef bint is_lent(self, int64_t block_id) noexcept:
        cdef bint is_known = 0 <= block_id < self.pool.num_fresh
        return is_known and (self.lent[block_id >> 3] >> (block_id & 7) & 1) != 0

    @property
    def num_blocks(self):
        """Number of slots, free or not."""
        self.require_open()
        return self.pool.num_blocks

    def get_num_free_blocks(self):
        """Return the number of blocks that `allocate_blocks` can allocate now."""
        self.require_open()
        return pool_num_free(&self.pool)

    def allocate_blocks(self, hashes):
        """Give each hash a slot; ValueError, with nothing changed, if too few are free."""
        cdef list statuses
        cdef int64_t num_free, block_id
        self.require_open()
        # Python code may run while they are created, and change the caller's list.
        statuses = [BlockStatus(-1) for _ in as_batch(hashes)]
        num_free = pool_num_free(&self.pool)
        if len(statuses) > num_free:
            raise ValueError(
                f"hashes must not outnumber the {num_free} free blocks, got {len(statuses)}"
            )
        for status in statuses:
            block_id = pool_take(&self.pool)
            self.lent[block_id >> 3] |= <uint8_t>(1 << (block_id & 7))
            status.block_id = block_id
        return statuses

    def free(self, block):
        """Free a slot; ValueError if `allocate_blocks` did not allocate it."""
        cdef int64_t block_id
        self.require_open()
        block_id = check_status(block, "block").block_id
        if not self.is_lent(block_id):
            raise ValueError(f"block must have a slot that allocate_blocks gave, got {block_id}")
        self.lent[block_id >> 3] &= <uint8_t>(~(1 << (block_id & 7)) & 0xFF)
        pool_give(&self.pool, block_id)

    def get_load_store_spec(self, hashes, blocks):
        """Return the slots of `blocks`, in their order; `hashes` is ignored."""
        self.require_open()
        return new_spec([check_status(block, "each of blocks").block_id for block in blocks])

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        cdef int64_t index, block_id
        cdef Pool* pool = &self.pool
        self.require_open()
        if not 0 <= pool.num_fresh <= pool.num_blocks:
            raise AssertionError("0 <= fresh ids <= num_blocks")
        for index in range(pool.num_freed):
            block_id = pool.freed[index]
            if block_id >= pool.num_fresh or pool_holds(pool, block_id):
                raise AssertionError("freed ids were given out before")
            if self.is_lent(block_id):
                raise AssertionError("what is lent is not free")


class CPUBackend(PoolCore, Backend):
    __doc__ = PythonCPUBackend.__doc__

    def __init__(self, block_size, num_blocks):
        block_size = check_block_size(block_size)
        num_blocks = check_num_blocks(num_blocks)
        self._require_unused()
        Backend.__init__(self, block_size, "CPU")
        self._open(num_blocks)
