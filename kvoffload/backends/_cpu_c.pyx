"""The built-in pool, compiled: slots of host memory, given out by index.

See ``_cpu_py`` for the Python twin, ``_core/pool.pxd`` for the structure.
"""

from libc.stdint cimport int64_t

from kvoffload._core.pool cimport (
    Pool,
    pool_close,
    pool_give,
    pool_holds,
    pool_num_free,
    pool_open,
    pool_take,
)

import numpy as np

from kvoffload._checks import as_batch, check_num_blocks, check_status
from kvoffload.backends.base import Backend
from kvoffload.errors import cannot_pickle
from kvoffload.types import BlockStatus, CPULoadStoreSpec


cdef class PoolCore:
    def __dealloc__(self):
        if self.opened:
            pool_close(&self.pool)

    def __reduce__(self):
        raise cannot_pickle(self)

    def _open(self, num_blocks):
        """Reserve the pool; a second call gives up the first."""
        cdef int64_t number = check_num_blocks(num_blocks)
        cdef Pool pool
        if not pool_open(&pool, number):
            raise MemoryError(f"no room for a pool of {number} blocks")
        if self.opened:
            pool_close(&self.pool)
        self.pool = pool
        self.opened = True

    @property
    def num_blocks(self):
        """Number of slots, free or not."""
        return self.pool.num_blocks

    def get_num_free_blocks(self):
        """Return how many blocks `allocate_blocks` can give now."""
        return pool_num_free(&self.pool)

    def allocate_blocks(self, hashes):
        """Give each hash a slot; ValueError, with nothing changed, if too few are free."""
        cdef list batch = as_batch(hashes)
        cdef list statuses = [BlockStatus(-1) for _ in batch]
        cdef int64_t num_free = pool_num_free(&self.pool)
        if len(batch) > num_free:
            raise ValueError(
                f"hashes must not outnumber the {num_free} free blocks, got {len(batch)}"
            )
        for status in statuses:
            status.block_id = pool_take(&self.pool)
        return statuses

    def free(self, block):
        """Take back a slot; ValueError if it is not given out."""
        cdef int64_t block_id = check_status(block).block_id
        if not pool_holds(&self.pool, block_id):
            raise ValueError(f"block must have a slot that is given out, got {block_id}")
        pool_give(&self.pool, block_id)

    def get_load_store_spec(self, hashes, blocks):
        """Return the slots of `blocks`, in their order; `hashes` is not looked at."""
        spec = CPULoadStoreSpec.__new__(CPULoadStoreSpec)
        spec.block_ids = np.array([check_status(block).block_id for block in blocks], np.int64)
        return spec

    def _check(self):
        """Verify every invariant; raise AssertionError with the broken one."""
        cdef int64_t place, block_id
        cdef Pool* pool = &self.pool
        if not 0 <= pool.num_fresh <= pool.num_blocks:
            raise AssertionError("0 <= fresh ids <= num_blocks")
        for place in range(pool.num_freed):
            block_id = pool.freed[place]
            if block_id >= pool.num_fresh or pool_holds(pool, block_id):
                raise AssertionError("freed ids were given out before")


class CPUBackend(PoolCore, Backend):
    """Give out the slots of a host memory pool of fixed size.

    Fresh ids first, counting up from 0, even when blocks were freed; then the freed ids, last
    freed first.

    Parameters
    ----------
    block_size : int
        Tokens a block, >= 1.
    num_blocks : int
        Number of slots, ``0 ... 2**31 - 1``.
    """

    def __init__(self, block_size, num_blocks):
        Backend.__init__(self, block_size, "CPU")
        self._open(num_blocks)
