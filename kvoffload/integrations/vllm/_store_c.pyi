from collections.abc import Iterable
from typing import Any

from kvoffload.integrations.vllm._base_c import ManagerBase

class StoringManager(ManagerBase):
    def prepare_store(self, keys: Iterable[bytes], req_context: Any) -> Any: ...
    def complete_store(
        self, keys: Iterable[bytes], req_context: Any, success: bool = True
    ) -> None: ...
