from kvoffload.policies._arc_lists_c import ARCLists
from kvoffload.policies.base import CachePolicy

class _ARC(ARCLists):
    def __init__(self, cache_capacity: int) -> None: ...

class ARCCachePolicy(_ARC, CachePolicy): ...  # type: ignore[override]
