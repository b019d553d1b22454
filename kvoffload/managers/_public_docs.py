"""The docstrings of the three public managers, written once for both twins."""

CPU = """Manage blocks in a built-in pool of host memory, with a policy to choose.

Parameters
----------
block_size : int
    Tokens a block, >= 1.
num_blocks : int
    Number of slots, ``0 ... 2**31 - 1``. With 0 every store that needs a slot is refused.
cache_policy : str or type or CachePolicy
    A policy string (``"lru"``, ``"name?option=value"``), a ``CachePolicy`` subclass, built as
    ``cls(cache_capacity=num_blocks)``, or an empty instance, which keeps its own capacity. It
    belongs to this manager as long as that lives.
enable_events : bool
    Collect events for `take_events`.
watch : kvoffload.watch.Watch, optional
    Looks on and changes nothing: hit ratios at other sizes and under other policies, why blocks
    were missed, what was stored for nothing.

Raises
------
TypeError, ValueError
    If an argument breaks its rule; the message names argument, rule and value. If `cache_policy`
    is not empty, or belongs to another manager; if `watch` does.
MemoryError
    If the compiled twin cannot reserve room for `num_blocks` blocks.
"""

LRU = """Manage blocks over a pluggable backend; the least recently used leave first.

Parameters
----------
backend : Backend
    Where the blocks live: a ``CPUBackend`` or a user's own.
enable_events : bool
    Collect events for `take_events`.

Raises
------
TypeError
    If `backend` is not a ``Backend``, or `enable_events` neither True nor False.
RuntimeError
    If the constructor of `backend` has not run.
"""

ARC = """Manage blocks over a pluggable backend by adaptive replacement, as vLLM has it.

Parameters
----------
backend : Backend
    Where the blocks live. Its number of free blocks now is the ``cache_capacity``.
enable_events : bool
    Collect events for `take_events`.

Raises
------
TypeError
    If `backend` is not a ``Backend``, or `enable_events` neither True nor False.
RuntimeError
    If the constructor of `backend` has not run.

References
----------
Megiddo & Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
"""
