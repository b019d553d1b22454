from collections.abc import Mapping

from kvoffload.policies._twin_c import CompiledPolicy
from kvoffload.policies.base import CachePolicy
from kvoffload.types import BlockHash, BlockStatus

class _SLRU(CompiledPolicy):
    def __init__(self, cache_capacity: int, *, protected: float = 0.5) -> None: ...
    @property
    def probation(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def protected(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def protected_size(self) -> int: ...

class SLRUCachePolicy(_SLRU, CachePolicy): ...  # type: ignore[override]
