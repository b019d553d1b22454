from kvoffload.policies._twin_c import CompiledPolicy

class RankedLRU(CompiledPolicy):
    generation: int
    def __init__(self, cache_capacity: int) -> None: ...
