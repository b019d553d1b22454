"""The runs that the tests judge: one server each, asked the same, and what came out.

A server takes long to start and needs one core, so runs go two at a time and are shared: a test
says which it needs (`pytest.mark.engine_runs`), and each is made once.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.policies import registry
from kvoffload.traces import Trace
from tests.engine.load import CONVERSATIONS, Client, Turn, crowd, plan
from tests.engine.metrics import Metrics
from tests.engine.model import token_bytes
from tests.engine.server import BLOCK_TOKENS, Answer, Server

NUM_TURNS = 210  # advise wants 200; some 9 times what the pool holds
NUM_TURNS_AT_ONCE = 60
NUM_TURNS_DISK = 60
CONCURRENCY = 8
NUM_CHUNKS = 250
CHUNK_BYTES = BLOCK_TOKENS * token_bytes()
NUM_ASKED_AGAIN = 20
AGAIN_SEED = 100  # of prompts that are not in the plan
NUM_ABANDONING = 3  # clients that hang up
ABANDONED_AFTER = 40  # tokens
IDLE_SECONDS = 300  # in which a recorder writes all that it has, by far
CROWDED_TOKENS = 240  # of each of `CONCURRENCY` answers: more blocks than the device has

NUM_CHUNKS_ABOVE_DISK = 40  # in host memory: some 1,280 tokens
NUM_SLOTS = 1500  # on the disk: all that is asked
DAMAGED_EVERY = 7  # chunks

PACKAGE = "kvoffload.integrations.vllm"
OURS = {"spec_name": "KVOffloadSpec", "spec_module_path": PACKAGE}
ORDERLY = ("--shutdown-timeout", "20")
NO_DEVICE_CACHE = ("--no-enable-prefix-caching",)


@dataclass(frozen=True)
class Setting:
    """A plan to start, ask and stop a server.

    With `ORDERLY` among the arguments for ``vllm serve`` the engine ends by itself and can say how
    it was at last; without, it is killed, which is vLLM's default.
    """

    extra: dict[str, Any] | None = None  # but for the size of the cache; None: no offloading
    arguments: tuple[str, ...] = ()
    copies: str = "now"  # how `tests.engine.worker` copies
    at_once: bool = False  # `CONCURRENCY` at a time, and others are abandoned meanwhile
    turns: int = NUM_TURNS  # of the plan
    again: bool = False  # at last some prompts twice; between, the device forgets them
    record: bool = False
    disk: bool = False  # below host memory; then the server is killed at last, not stopped
    after: str | None = None  # the run whose disk is there from the beginning
    damaged: bool = False  # a bit in some chunks of that disk has changed


@dataclass
class Run:
    """The results of a run."""

    trace: Path  # of the recording, if there is one
    disk: Path  # the folder of that tier, if there is one
    answers: list[Answer] = field(default_factory=list)  # one for each turn
    first: list[Answer] = field(default_factory=list)  # of the prompts that were asked twice
    second: list[Answer] = field(default_factory=list)
    abandoned: int = 0  # requests whose client hung up
    crowded: list[Answer] = field(default_factory=list)  # long ones; at once, if offloaded
    metrics: Metrics = field(default_factory=lambda: Metrics({}))  # at rest, after the last request
    status: int = -1  # of the server, when it was stopped
    log: str = ""
    report: dict[str, Any] | None = None  # of the scheduler's side at its end


def ours(policy: str, *arguments: str, **more: Any) -> Setting:
    """Return a run of our manager."""
    return Setting({**OURS, "eviction_policy": policy}, arguments, **more)


def tiering(host_bytes: int, tier: dict[str, Any]) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` of our tiering manager with a secondary tier."""
    return {
        "spec_name": "KVOffloadTieringSpec",
        "spec_module_path": PACKAGE,
        "cpu_bytes_to_use": host_bytes,
        "secondary_tiers": [{"module_path": PACKAGE, **tier}],
    }


def file_tier(path: Path, capacity_bytes: int) -> dict[str, Any]:
    return {"type": "KVOffloadFileTier", "path": str(path), "capacity_bytes": capacity_bytes}


def above_disk(after: str | None = None, *, damaged: bool = False) -> Setting:
    """Return a run of our tiering manager, which is asked the first of what the others are."""
    return Setting({}, turns=NUM_TURNS_DISK, disk=True, after=after, damaged=damaged)


POLICIES = tuple(name for name in registry.names() if name != "arc")  # that has a run of its own
SETTINGS = {
    "none": Setting(),
    "disk": above_disk(),
    "vllm lru": Setting({"eviction_policy": "lru"}),
    "vllm arc": Setting({"eviction_policy": "arc"}),
    "lru": ours("lru", record=True),
    "arc": ours("arc", again=True),
    "zeros": ours("lru", copies="zeros", turns=0, again=True),
    **{
        f"{name} at once": ours(
            name, *ORDERLY, copies="later", at_once=True, turns=NUM_TURNS_AT_ONCE
        )
        for name in POLICIES
    },
    "disk after kill -9": above_disk("disk"),
    "disk that is damaged": above_disk("disk", damaged=True),
}


def make_run(setting: Setting, model: Path, folder: Path, before: Run | None) -> Run:
    """Start a server, ask it, and stop it."""
    extra = None
    run = Run(folder / "requests.jsonl.gz", folder / "disk")
    if before is not None:
        shutil.copytree(before.disk, run.disk)
        if setting.damaged:
            damage(run.disk, int(before.metrics.disk("blocks_total", op="put", status="ok")))
    if setting.extra is not None:
        extra = {"cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES, **setting.extra}
        if setting.record:
            extra["kvoffload_record"] = str(run.trace)
        if setting.disk:
            tier = file_tier(run.disk, NUM_SLOTS * CHUNK_BYTES)
            extra = tiering(NUM_CHUNKS_ABOVE_DISK * CHUNK_BYTES, tier)
    with Server(model, folder, extra, arguments=setting.arguments, copies=setting.copies) as server:
        turns = plan(NUM_TURNS)[: setting.turns]
        if setting.at_once:
            ask_at_once(server, run, turns)
        else:
            run.answers = Client(server).one_by_one(turns)
        server.settle()
        run.metrics = server.metrics()
        if setting.again:
            ask_again(server, run)
        if setting.extra is None:
            run.crowded = Client(server).one_by_one(crowd(CONCURRENCY, CROWDED_TOKENS))
        if setting.record:
            wait_for_requests(run.trace, NUM_TURNS)
        if not setting.disk:  # else killed, when it is left
            run.status = server.stop()
        run.log = server.log()
        if server.report_path.exists():
            run.report = json.loads(server.report_path.read_text())
    return run


def damage(folder: Path, chunks: int) -> None:
    """Change a bit in some of the chunks that a disk has."""
    (path,) = folder.rglob("blocks.dat")
    with path.open("r+b") as file:
        for slot in range(0, chunks, DAMAGED_EVERY):
            file.seek(slot * CHUNK_BYTES + slot % CHUNK_BYTES)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1 << slot % 8]))


def wait_for_requests(trace: Path, number: int) -> None:
    """Wait until a recording that goes on holds so many requests, or does not grow in long."""
    deadline = time.monotonic() + IDLE_SECONDS
    while sum(1 for _ in Trace(trace)) < number and time.monotonic() < deadline:
        time.sleep(0.1)


def ask_again(server: Server, run: Run) -> None:
    """Ask some prompts, each twice: computed first, then loaded."""
    turns = [turn for turn in plan(NUM_TURNS, AGAIN_SEED) if turn.conversation >= CONVERSATIONS]
    for turn in turns[:NUM_ASKED_AGAIN]:
        server.forget_device()
        run.first += Client(server).one_by_one([turn])
        server.forget_device()
        run.second += Client(server).one_by_one([turn])


def ask_at_once(server: Server, run: Run, turns: list[Turn]) -> None:
    """Ask, while other clients ask for long answers and hang up."""
    done = threading.Event()

    def hang_up(seed: int) -> int:
        count = 0
        for turn in plan(NUM_TURNS, seed):
            if done.is_set():
                break
            server.abandon([("user", turn.says)], ABANDONED_AFTER)
            count += 1
        return count

    with ThreadPoolExecutor(NUM_ABANDONING) as threads:
        others = [threads.submit(hang_up, seed + 1) for seed in range(NUM_ABANDONING)]
        try:
            run.answers = Client(server).at_once(turns, CONCURRENCY)
        finally:
            done.set()
        run.abandoned = sum(other.result() for other in others)
    run.crowded = Client(server).at_once(crowd(CONCURRENCY, CROWDED_TOKENS), CONCURRENCY)
