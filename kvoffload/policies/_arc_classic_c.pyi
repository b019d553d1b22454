from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from kvoffload.policies._twin_c import CompiledPolicy
from kvoffload.policies.base import CachePolicy
from kvoffload.types import BlockHash, BlockStatus

class _ARCClassic(CompiledPolicy):
    def __init__(self, cache_capacity: int) -> None: ...
    @property
    def t1(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def t2(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def b1(self) -> AbstractSet[BlockHash]: ...
    @property
    def b2(self) -> AbstractSet[BlockHash]: ...
    @property
    def target_t1_size(self) -> float: ...

class ARCClassicCachePolicy(_ARCClassic, CachePolicy): ...  # type: ignore[override]
