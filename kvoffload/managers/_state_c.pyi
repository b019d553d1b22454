from kvoffload.backends.base import Backend

class ManagerState:
    @property
    def _backend_object(self) -> Backend: ...
