from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

__all__ = ["FileStore", "MemoryStore", "Pool", "valid_records", "xxh3_64"]

def xxh3_64(data: Any, seed: int = 0) -> int: ...
def valid_records(
    table: Any, block_bytes: int, epoch: int
) -> tuple[npt.NDArray[np.int64], list[bytes], npt.NDArray[np.uint64], int]: ...

class MemoryStore:
    def __new__(cls, region: Any, fingerprint: bytes, sums: npt.NDArray[np.uint64]) -> Self: ...

class FileStore:
    def __new__(
        cls,
        data_fd: int,
        table_fd: int,
        *,
        direct: bool,
        block_bytes: int,
        slot_bytes: int,
        records_offset: int,
        fingerprint: bytes,
        sums: npt.NDArray[np.uint64],
        written: npt.NDArray[np.uint8],
    ) -> Self: ...

class Pool:
    def __new__(
        cls,
        region: Any,
        store: FileStore | MemoryStore,
        threads: int,
        staging_bytes: int = 0,
        *,
        ack_copied: bool = True,
    ) -> Self: ...
    def submit(
        self,
        job: int,
        op: int,
        keys: list[bytes],
        slots: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        *,
        timeout_s: float,
        epoch: int,
    ) -> None: ...
    def chore(self, job: int, offset: int, data: bytes, *, sync: bool) -> None: ...
    def cancel(self, job: int) -> bool: ...
    def poll(self) -> deque[tuple[int, int, npt.NDArray[np.int8]]]: ...
    def wait(self, timeout_s: float) -> bool: ...
    def notify(self) -> None: ...
    def fileno(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def close(self, timeout_s: float) -> bool: ...
    def abandon(self) -> None: ...
