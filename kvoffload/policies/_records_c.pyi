from kvoffload.policies._twin_c import CompiledPolicy

class Records(CompiledPolicy):
    def _ghost_records(self) -> list[list[tuple[int, int, bool, bool] | None]]: ...
