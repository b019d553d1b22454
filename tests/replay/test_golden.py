"""Exact counts on public traces, which are read from a folder beside the project.

``tests/policies/test_golden.py`` has those of each policy, by the calls of a manager.

The sources: the conversation trace that Mooncake published with its FAST'25 paper, and the agent
trace of LMCache, its text hashed to ids. ``KVOFFLOAD_TRACES`` names the folder.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.replay import Configuration, replay
from kvoffload.traces import Trace

pytestmark = pytest.mark.fast

FOLDER = Path(os.environ.get("KVOFFLOAD_TRACES") or os.devnull)


def trace(name: str) -> Trace:
    path = FOLDER / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path.name} in the folder that KVOFFLOAD_TRACES names")
    return Trace(path)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", (74_376, 75_004, 74_522, 101)), ("arc", (69_257, 75_737, 75_255, 101))],
)
def test_counts_over_a_backend(twin, policy, expected):
    managers = {"lru": twin.LRUOffloadingManager, "arc": twin.ARCOffloadingManager}
    manager = managers[policy](twin.CPUBackend(16, 482))
    configuration = Configuration(policy=policy, host=482)
    found = replay(trace("lmcache_agents_64c"), configuration, manager=manager)
    assert (found.hits, found.stored, found.evicted, found.refused) == expected
    assert (found.requests, found.blocks) == (1_095, 242_819)
