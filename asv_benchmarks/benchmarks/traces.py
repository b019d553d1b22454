"""Traces in files: written, read, surveyed and recorded."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

from .common import LENGTH, block_hashes, new_manager, public

GROUP = 32
"""Requests per call: few enough for the recorder's queue, enough to measure."""


class Files:
    """A trace of 1,000 generated requests in a file."""

    repeat = 5

    def setup(self) -> None:
        """Write the trace."""
        self.write, workload, self.trace, self.survey = public(
            "kvoffload.traces", "write_trace", "Workload", "Trace", "Survey"
        )
        self.requests = list(workload(1_000))
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "trace.jsonl"
        self.write(self.requests, self.path)
        self.numbers = itertools.count()

    def teardown(self) -> None:
        """Delete the trace."""
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def time_write(self) -> None:
        self.write(self.requests, self.path.with_name(f"{next(self.numbers)}.jsonl"))

    def time_read(self) -> None:
        for _ in self.trace(self.path):
            pass

    def time_survey(self) -> None:
        self.survey.of(self.trace(self.path))


class Logs:
    """A log of 500 chats, 3 kB each, read: decoded, hashed in blocks; and 100,000 objects."""

    repeat = 5

    def setup(self) -> None:
        """Write them."""
        self.trace = public("kvoffload.traces", "Trace")
        self.folder = tempfile.TemporaryDirectory()
        self.log, self.objects = (Path(self.folder.name) / name for name in ("log", "objects"))
        words = [f"word{number} " for number in range(99)]
        with self.log.open("w") as file:
            for number in range(500):
                messages = [
                    {"role": "system", "content": "".join(words)},
                    *({"role": "user", "content": f"{number} {''.join(words[::5])}"},) * 15,
                ]
                file.write(json.dumps({"ts": number, "messages": messages}) + "\n")
        rows = (f"{number},{number * 7919 % 4999},1\n" for number in range(100_000))
        self.objects.write_text("".join(rows))
        next(iter(self.trace(self.log)))
        next(iter(self.trace(self.objects)))

    def teardown(self) -> None:
        """Delete them."""
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def time_read_log(self) -> None:
        for _ in self.trace(self.log):
            pass

    def time_read_objects(self) -> None:
        for _ in self.trace(self.objects).batches():
            pass


class Recording:
    """Lookups of 32 requests of 128 blocks with a recorder and without."""

    params = [False, True]
    param_names = ("recorder",)
    number = 2
    repeat = 5
    warmup_time = 0

    def setup(self, recorder: bool) -> None:
        """Make the manager, and new keys for each call."""
        self.folder = tempfile.TemporaryDirectory()
        self.manager = new_manager("lru", GROUP * LENGTH)
        if recorder:
            create = public("kvoffload.traces", "TraceRecorder")
            self.manager = create(self.manager, f"{self.folder.name}/trace.jsonl.gz")
        keys = block_hashes(0, self.number * GROUP * LENGTH)
        requests = [keys[start : start + LENGTH] for start in range(0, len(keys), LENGTH)]
        self.groups = [requests[start : start + GROUP] for start in range(0, len(requests), GROUP)]

    def teardown(self, recorder: bool) -> None:
        """Write the queued requests."""
        if hasattr(self.manager, "close"):
            self.manager.close()
        self.folder.cleanup()

    def time_lookups(self, recorder: bool) -> None:
        for request in self.groups.pop():
            self.manager.lookup(request)
