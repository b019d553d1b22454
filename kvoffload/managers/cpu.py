"""The manager over the built-in pool of host memory, with a policy of choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffload._checks import check_block_size, check_bool, check_num_blocks
from kvoffload._printable import plural
from kvoffload.errors import describe
from kvoffload.policies import registry
from kvoffload.policies._ownership import check_owner
from kvoffload.policies.base import CachePolicy
from kvoffload.types import CPULoadStoreSpec

from ._manager import Manager
from ._watching import Watching, watch_request


class CPUOffloadingManager(Manager[CPULoadStoreSpec]):
    """A manager over a built-in pool of host memory, with a policy of choice.

    Parameters
    ----------
    block_size : int
        Tokens per block, >= 1.
    num_blocks : int
        Number of slots, ``0 ... 2**31 - 1``. With 0, no block is stored.
    cache_policy : str or type or CachePolicy
        A policy string (``"lru"``, ``"name?option=value"``), a ``CachePolicy`` subclass, built as
        ``cls(cache_capacity=num_blocks)``, or an empty instance, which keeps its own capacity. It
        belongs to this manager during the manager's lifetime.
    enable_events : bool
        Collect events for `take_events`.
    watch : kvoffload.watch.Watch, optional
        Observes the manager without changing it: hit ratios at other sizes and under other
        policies, causes of misses, and stores that were never used.

    Raises
    ------
    TypeError, ValueError
        If an argument breaks its rule, `cache_policy` is not empty, or `cache_policy` or `watch`
        belongs to another manager; the message names argument, rule and value.
    MemoryError
        If the compiled twin cannot reserve room for `num_blocks` blocks.
    """

    __module__ = "kvoffload"

    _owns_pool = True

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        cache_policy: str | type[CachePolicy] | CachePolicy = "lru",
        enable_events: bool = False,
        *,
        watch: Watching | None = None,
    ) -> None:
        block_size = check_block_size(block_size)
        num_blocks = check_num_blocks(num_blocks)
        enable_events = check_bool("enable_events", enable_events)
        policy, rebuild = _resolve(cache_policy, num_blocks, self)
        backend = self._backend_class(block_size, num_blocks)
        self._setup(
            policy, backend, enable_events, rebuild, watch=watch_request(watch, cache_policy)
        )


def _resolve(
    cache_policy: Any, num_blocks: int, manager: CPUOffloadingManager
) -> tuple[CachePolicy, Callable[[], CachePolicy] | None]:
    """Return the policy, and a function that builds a new one if it cannot be cleared."""
    if isinstance(cache_policy, str):
        return registry.parse(cache_policy).build(manager._twin, num_blocks), None
    if isinstance(cache_policy, type) and issubclass(cache_policy, CachePolicy):
        policy_class: type[CachePolicy] = cache_policy

        def build() -> CachePolicy:
            return policy_class(cache_capacity=num_blocks)

        return build(), build if policy_class.clear is CachePolicy.clear else None
    if isinstance(cache_policy, CachePolicy):
        check_owner(cache_policy, manager)
        try:
            num_resident = len(cache_policy)
        except NotImplementedError:
            num_resident = 0
        if num_resident:
            raise ValueError(f"cache_policy must be empty, got {plural(num_resident, 'block')}")
        return cache_policy, None
    raise TypeError(
        "cache_policy must be a name, a CachePolicy subclass or an instance, "
        f"got {describe(cache_policy)}"
    )
