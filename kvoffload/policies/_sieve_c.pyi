from collections.abc import Mapping

from kvoffload.policies._queue_policy_c import QueuePolicy
from kvoffload.policies.base import CachePolicy
from kvoffload.types import BlockHash, BlockStatus

class _Sieve(QueuePolicy):
    def __init__(self, cache_capacity: int) -> None: ...
    @property
    def blocks(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def hand(self) -> BlockHash | None: ...

class SieveCachePolicy(_Sieve, CachePolicy): ...  # type: ignore[override]
