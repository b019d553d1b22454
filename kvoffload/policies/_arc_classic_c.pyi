from kvoffload.policies._arc_lists_c import ARCLists
from kvoffload.policies.base import CachePolicy

class _ARCClassic(ARCLists):
    def __init__(self, cache_capacity: int) -> None: ...

class ARCClassicCachePolicy(_ARCClassic, CachePolicy): ...  # type: ignore[override]
