"""The manager over the built-in pool of host memory, with a policy to choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from kvoffload._checks import check_block_size, check_bool, check_num_blocks
from kvoffload.errors import describe
from kvoffload.policies import registry
from kvoffload.policies._ownership import check_owner
from kvoffload.policies.base import CachePolicy

from ._watch_py import Watching, watch_request


class CPUConstruction:
    """Build ``CPUOffloadingManager`` from its arguments, in both twins."""

    __slots__ = ()

    _twin: Literal["py", "c"]
    _backend_class: Any
    _setup: Callable[..., None]

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

    # Python names it where an argument is missing or unknown.
    __init__.__qualname__ = "CPUOffloadingManager.__init__"


def _resolve(
    cache_policy: Any, num_blocks: int, manager: CPUConstruction
) -> tuple[CachePolicy, Callable[[], CachePolicy] | None]:
    """Return the policy, and how to build it anew where it cannot be cleared."""
    if isinstance(cache_policy, str):
        spec = registry.parse(cache_policy)
        policy_class: Any = registry.load(spec.entry, manager._twin)
        return policy_class(cache_capacity=num_blocks, **spec.options), None
    if isinstance(cache_policy, type) and issubclass(cache_policy, CachePolicy):
        policy_class = cache_policy

        def build() -> CachePolicy:
            built: CachePolicy = policy_class(cache_capacity=num_blocks)
            return built

        return build(), build if policy_class.clear is CachePolicy.clear else None
    if isinstance(cache_policy, CachePolicy):
        check_owner(cache_policy, manager)
        try:
            num_resident = len(cache_policy)
        except NotImplementedError:
            num_resident = 0
        if num_resident:
            raise ValueError(f"cache_policy must be empty, got {num_resident} blocks")
        return cache_policy, None
    raise TypeError(
        "cache_policy must be a name, a CachePolicy subclass or an instance, "
        f"got {describe(cache_policy)}"
    )
