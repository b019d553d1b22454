from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from kvoffload.policies._queue_policy_c import QueuePolicy
from kvoffload.policies.base import CachePolicy
from kvoffload.types import BlockHash, BlockStatus

class _S3FIFO(QueuePolicy):
    def __init__(self, cache_capacity: int, *, small: float = 0.1) -> None: ...
    @property
    def small(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def main(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def ghosts(self) -> AbstractSet[BlockHash]: ...
    @property
    def small_size(self) -> int: ...

class S3FIFOCachePolicy(_S3FIFO, CachePolicy): ...  # type: ignore[override]
