from collections import OrderedDict
from typing import Any

from kvoffload.errors import OffloadError

class RequestFinishedError(OffloadError, RuntimeError): ...

class ManagerBase:
    _num_chunks: int
    medium: Any
    events: list[Any] | None
    counts: OrderedDict[bytes, int] | None
    store_threshold: int
    max_tracker_size: int
    stores_skipped_in_current_batch: int
    allocation_sizes_in_current_batch: list[int]
    def _require_ready(self) -> None: ...
    def _setup(
        self, num_chunks: int, rules: Any, names: Any, reports_failed_stores: bool
    ) -> None: ...
