from kvoffload.policies._twin_c import CompiledPolicy
from kvoffload.policies.base import CachePolicy

class _LFU(CompiledPolicy):
    def __init__(self, cache_capacity: int) -> None: ...
    @property
    def age(self) -> int: ...

class LFUCachePolicy(_LFU, CachePolicy): ...  # type: ignore[override]
