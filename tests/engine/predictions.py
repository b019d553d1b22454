"""Chats and agents, asked of an engine 16 at once, and the hits that kvoffload predicts of them.

The trace is that of the requests in the order in which they were sent. So a prediction knows what
was asked, and nothing of what the engine did.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvoffload.traces import Request, Workload, write_trace
from kvoffload.traces.prompts import prompt_of
from tests.engine.model import MAX_TOKENS, token_bytes
from tests.engine.runs import file_tier, tiering
from tests.engine.server import BLOCK_TOKENS, Server

CONCURRENCY = 16
STEP_TOKENS = 2048
POLICY = "hit-density"
SHORTER = 32  # times that a request is shorter than a generated one
TRACE_BLOCK = SHORTER * BLOCK_TOKENS
LONGEST_ANSWER = 4  # tokens
AGENT = "agent"
SEEDS = {"chat": 1, AGENT: 2}
FASTER = 25  # times that an engine serves the requests faster than they were generated, about
WINDOW = 4 * BLOCK_TOKENS


def of_kind(kind: str, longest_answer: int) -> Iterator[Request]:
    """Yield generated requests of one kind, without end, as far as they fit the model."""
    too_long: set[str | None] = set()
    for request in Workload(2**31, seed=SEEDS[kind], block_tokens=TRACE_BLOCK):
        if not (request.session or "").startswith(kind) or request.session in too_long:
            continue
        length = -(-request.input_length // SHORTER)
        length -= length % BLOCK_TOKENS == 0  # the engine computes the last token of each prompt
        answer = min(1 + request.output_length // SHORTER, longest_answer)
        if length + answer > MAX_TOKENS:
            too_long.add(request.session)
            continue
        yield replace(request, input_length=length, output_length=answer)


def workload(number: int, longest_answer: int = LONGEST_ANSWER) -> list[Request]:
    """Return as many requests of chats as of agents; agents say when they return, or that they end.

    Agents start as often as it takes: a session that was generated later than the chats starts
    among them.
    """
    chats = [
        replace(one, session=f"c{one.session}")
        for one in islice(of_kind("chat", longest_answer), number // 2)
    ]
    span = chats[-1].timestamp + 1
    agents = list(islice(of_kind(AGENT, longest_answer), number - len(chats)))
    start: dict[str | None, float] = {}
    placed = []
    ids = 1 + max(max(one.hash_ids) for one in chats)
    for one in agents:
        begun = start.setdefault(one.session, one.timestamp)
        at = begun % span + one.timestamp - begun
        hash_ids = tuple(ids + block for block in one.hash_ids)
        placed.append(replace(one, timestamp=at, hash_ids=hash_ids))
    following: dict[str | None, float] = {}
    agents = []
    for one in reversed(placed):
        after = following.get(one.session)
        following[one.session] = one.timestamp
        expect = None if after is None else (after - one.timestamp) / FASTER
        agents.append(replace(one, ends=after is None, expect=expect))
    return sorted(chats + agents, key=lambda one: one.timestamp)


@dataclass
class Sent:
    """The requests as they were sent, first one first, and what came back."""

    trace: list[Request]
    cached_tokens: list[int]
    seconds: float


def send(server: Server, requests: Sequence[Request]) -> Sent:
    """Make `CONCURRENCY` requests at a time: each that is next and whose session is not waiting."""
    waiting = list(reversed(requests))
    busy: set[str | None] = set()
    free = threading.Condition()
    start = time.monotonic()
    trace: list[Request] = []
    cached: list[int] = []

    def take() -> tuple[int, Request] | None:
        with free:
            while waiting:
                for place in range(len(waiting) - 1, -1, -1):
                    if waiting[place].session not in busy:
                        request = waiting.pop(place)
                        busy.add(request.session)
                        at = round(1000 * (time.monotonic() - start), 3)
                        # A chat says nothing of its session; the recording does not know it.
                        known = request.session if (request.ends or request.expect) else None
                        trace.append(replace(request, timestamp=at, session=known))
                        cached.append(0)
                        return len(trace) - 1, request
                free.wait()
            return None

    def lane(_: int) -> None:
        while (taken := take()) is not None:
            number, request = taken
            cached[number] = ask(server, request)
            with free:
                busy.remove(request.session)
                free.notify_all()

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        list(threads.map(lane, range(CONCURRENCY)))
    return Sent(trace, cached, time.monotonic() - start)


def ask(server: Server, request: Request) -> int:
    """Ask as `vllm bench serve` does; return the tokens of the prompt that were not computed."""
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    if request.ends:
        body["kv_transfer_params"] = {"kvoffload": {"ends": True}}
    elif request.expect:
        body["kv_transfer_params"] = {"kvoffload": {"expect_s": request.expect / 1000}}
    usage = server.post(
        "/v1/completions",
        model=server.name,
        prompt=prompt_of(request, BLOCK_TOKENS),
        max_tokens=request.output_length,
        **body,
    ).json()["usage"]
    assert usage["prompt_tokens"] == request.input_length
    return usage["prompt_tokens_details"]["cached_tokens"]


@dataclass(frozen=True)
class Setting:
    """A model, and the sizes of its caches in blocks."""

    layers: dict[str, Any]  # of the model's configuration, where not all keep every token
    layers_per_slot: int  # of each group
    device: int
    host: int
    disk: int

    @property
    def chunk_bytes(self) -> int:
        return BLOCK_TOKENS * token_bytes(layers=self.layers_per_slot)

    @property
    def predicted_device(self) -> int:
        """Blocks of the device's cache that can hold what a later request hits.

        vLLM keeps one for itself, and of each running request the last block of each group is not
        full.
        """
        return self.device - 1 - CONCURRENCY * (2 if self.layers else 1)

    def extra(self, folder: Path) -> dict[str, Any]:
        """Return ``kv_connector_extra_config``."""
        tier = file_tier(folder / "disk", self.disk * self.chunk_bytes)
        return {**tiering(self.host * self.chunk_bytes, tier), "eviction_policy": POLICY}

    def arguments(self) -> tuple[str, ...]:
        """Return more arguments for ``vllm serve``."""
        found = (
            *("--max-num-seqs", str(CONCURRENCY)),
            *("--num-gpu-blocks-override", str(self.device)),
            *("--max-num-batched-tokens", str(STEP_TOKENS)),
        )
        return (*found, "--hf-overrides", json.dumps(self.layers)) if self.layers else found


SETTINGS = {
    "dense": Setting({}, 2, 500, 1000, 2000),
    "windowed": Setting(
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW},
        *(1, 800, 1000, 2000),
    ),
}


@dataclass(frozen=True)
class Shares:
    """Shares of the prompts' tokens, in percent, by the tier that they came from."""

    device: float
    host: float
    disk: float


@dataclass(frozen=True)
class Compared:
    """A run: what the engine counted and what was predicted."""

    requests: int  # that were sent
    seconds: float  # until all were answered
    engine: Shares  # by its metrics
    predicted: Shares  # by ``kvoffload advise``

    @property
    def points(self) -> Shares:
        """Points of the prediction above the engine's share."""
        ours, theirs = self.predicted, self.engine
        return Shares(ours.device - theirs.device, ours.host - theirs.host, ours.disk - theirs.disk)


def compare(setting: Setting, requests: Sequence[Request], model: Path, folder: Path) -> Compared:
    """Send the requests to an engine, then predict its hits from the requests."""
    arguments = setting.arguments()
    with Server(model, folder, setting.extra(folder), arguments=arguments) as server:
        sent = send(server, requests)
        server.settle()
        metrics = server.metrics()
    tokens = sum(request.input_length for request in sent.trace)

    def share(source: str) -> float:
        cached = metrics.value("vllm:prompt_tokens_cached_by_source_total", source=source)
        return 100 * cached / tokens

    engine = Shares(share("device"), share("host"), share("disk"))
    return Compared(len(sent.trace), sent.seconds, engine, predict(setting, sent, model, folder))


def predict(setting: Setting, sent: Sent, model: Path, folder: Path) -> Shares:
    """Return what ``kvoffload advise`` says of them."""
    trace, config = folder / "requests.jsonl", folder / "config.json"
    write_trace(sent.trace, trace)
    fields = json.loads((model / "config.json").read_text()) | setting.layers
    config.write_text(json.dumps(fields))
    said = kvoffload(
        *("advise", trace, "--block-tokens", BLOCK_TOKENS, "--hints", "both", "--json"),
        *("--model", config, "--policy", POLICY, "--capacity", setting.host),
        *("--device-memory", setting.predicted_device),
        # for advise an element has two bytes, in the engine four
        *("--disk", f"{setting.disk * setting.chunk_bytes // 2}B", "--disk-policy", "lru"),
    )
    advice = json.loads(said)
    (counts,) = [
        cell["counts"]
        for cell in advice["details"]["disk_cells"]
        if cell["host_policy"] == POLICY and cell["memory"] == advice["memory"]
    ]
    # With a window, hits are tokens.
    whole, unit = advice["blocks"], BLOCK_TOKENS
    if setting.layers:
        whole, unit = advice["input_tokens"], 1
    hits = (whole - counts["asked"], counts["host_hits"], counts["tier_hits"])
    return Shares(*(100 * unit * hit / advice["input_tokens"] for hit in hits))


def kvoffload(*arguments: object) -> str:
    """Run a command; return what it prints."""
    command = [sys.executable, "-W", "error", "-m", "kvoffload", *map(str, arguments), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
