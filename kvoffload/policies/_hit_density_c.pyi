from collections.abc import Iterable, Mapping

from kvoffload.policies._records_c import Records
from kvoffload.policies.base import CachePolicy
from kvoffload.types import BlockHash, BlockStatus

class _HitDensity(Records):
    def __init__(self, cache_capacity: int, *, ghosts: float = 3.5) -> None: ...
    @property
    def ghosts(self) -> float: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def rings(self) -> tuple[Mapping[BlockHash, BlockStatus], ...]: ...
    @property
    def densities(self) -> tuple[tuple[float, ...], ...]: ...
    def make_room(
        self, hashes: Iterable[bytes], num_free: int, protected: Iterable[bytes]
    ) -> tuple[int, list[tuple[BlockHash, BlockStatus]]]: ...

class HitDensityCachePolicy(_HitDensity, CachePolicy): ...  # type: ignore[override]
