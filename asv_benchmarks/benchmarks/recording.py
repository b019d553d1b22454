"""The cost of recording for a lookup and in the recorder's thread, for short and long requests."""

import importlib
import tempfile
import time
from typing import Any

from .common import block_hashes, new_manager

LENGTHS = [8, 24, 128, 1_024]
GROUP = 4_096  # blocks of the requests of one call: their keys are in the caches, as in an engine


def new_recorder(manager: Any, folder: str) -> Any:
    """Wrap a manager; asv skips commits that cannot record."""
    try:
        recorder: Any = importlib.import_module("kvoffload.traces").TraceRecorder
        return recorder(manager, f"{folder}/trace.jsonl.zst")
    except (ImportError, AttributeError) as cause:
        raise NotImplementedError("no recorder") from cause


def new_requests(first: int, length: int, width: int) -> list[list[bytes]]:
    """Make requests of keys whose hashes are not cached yet, GROUP blocks in all."""
    keys = [key[:width] for key in block_hashes(first, GROUP)]
    return [keys[start : start + length] for start in range(0, GROUP, length)]


class Recording:
    """Lookups of GROUP blocks with the recorder and without; the difference is its cost."""

    params = (["off", "on"], LENGTHS, [32, 36])
    param_names = ("recorder", "request_length", "key_bytes")
    number = 8  # of calls, few enough for all to find room on the recorder's queue
    repeat = 9
    warmup_time = 0
    rounds = 1

    def setup(self, recorder: str, length: int, width: int) -> None:
        """Make the manager, and new requests for each call."""
        self.folder = tempfile.TemporaryDirectory()
        manager = new_manager("compiled", "lru", GROUP)
        self.manager = manager if recorder == "off" else new_recorder(manager, self.folder.name)
        self.groups = [new_requests(n * GROUP, length, width) for n in range(self.number)]

    def teardown(self, recorder: str, length: int, width: int) -> None:
        """Write what waits."""
        if recorder == "on":
            self.manager.close()
        self.folder.cleanup()

    def time_lookups(self, recorder: str, length: int, width: int) -> None:
        for request in self.groups.pop():
            self.manager.lookup(request)


class Writing:
    """CPU time of the recorder's own thread."""

    params = (LENGTHS,)
    param_names = ("request_length",)

    def track_thread_ns_a_block(self, length: int) -> float:
        """Return the CPU time of the process less that of this thread, ns per block."""
        groups = 16
        manager = new_manager("compiled", "lru", GROUP)
        with tempfile.TemporaryDirectory() as folder:
            before = time.process_time_ns() - time.thread_time_ns()
            recorder = new_recorder(manager, folder)
            for number in range(groups):
                for request in new_requests(number * GROUP, length, 36):
                    recorder.lookup(request)
            recorder.close()
            return (time.process_time_ns() - time.thread_time_ns() - before) / (groups * GROUP)


Writing.track_thread_ns_a_block.unit = "ns"  # type: ignore[attr-defined]
