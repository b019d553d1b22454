"""Measure the savings of offloading in a real engine: vLLM's server on a CPU, with and without it.

Prints a table: tokens of prompts that were computed, which is exact; the time to the first token,
the median and all of them together; and the server's CPU time. Times are mostly
noise on a small machine, the first more than the second. Needs an environment with an engine, which
``.ci/vllm-env --engine`` makes::

    $(.ci/vllm-env --engine) setup.py build_ext --inplace
    $(.ci/vllm-env --engine) asv_benchmarks/vllm_engine.py

There is one server per row, all started before the first request. Each is asked the same requests,
one at a time, in turn with the others, so that the machine's other work affects all alike. The
model has random weights; it is larger than the one of the tests, so that a prompt takes longer to
compute than to send. "Host memory" is memory that the tests' worker copies to and from: on this
machine the device's memory is the same memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.load import Client, plan
from tests.engine.model import make_model, token_bytes
from tests.engine.runs import NUM_CHUNKS, OURS
from tests.engine.server import (
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    SECONDS,
    Answer,
    Server,
    processes_of,
)

SIZE = {"layers": 4, "heads": 4, "head_size": 64}
ENGINES = {
    "no offloading": None,
    "vLLM's manager, lru": {"eviction_policy": "lru"},
    "kvoffload, lru": {**OURS, "eviction_policy": "lru"},
    "kvoffload, hit-density": {**OURS, "eviction_policy": "hit-density"},
}


class TimedServer(Server):
    """A server that is asked for each token as it comes, so that the time to the first is known."""

    first_token_seconds = 0.0  # of the latest answer

    def ask(self, messages: Sequence[tuple[str, str]], answer_tokens: int, **fields: Any) -> Answer:
        body = {**self.body(messages, answer_tokens), **fields}
        start, first = time.perf_counter(), None
        text, tokens, usage = "", [], None
        with self.session().post(
            f"{self.url}/v1/chat/completions",
            json={**body, "stream": True, "stream_options": {"include_usage": True}},
            timeout=SECONDS,
            stream=True,
        ) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                data = line.removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                part = json.loads(data)
                usage = part.get("usage") or usage
                for choice in part["choices"]:
                    ids = choice.get("token_ids") or []
                    if ids and first is None:
                        first = time.perf_counter() - start
                    tokens += ids
                    text += choice["delta"].get("content") or ""
        self.first_token_seconds = first
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(tuple(messages), text.strip(), tuple(tokens), usage["prompt_tokens"], cached)

    def cpu_seconds(self) -> float:
        """Return the processor's time that the server has taken so far."""
        ticks = 0
        for process in processes_of(self.process.pid):
            # pid (name), then the fields from the third on
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def measure(num_turns: int, names: list[str], folder: Path) -> list[tuple[str, ...]]:
    """Send every engine the same requests, in turn; return a row per engine."""
    model = make_model(folder / "model", **SIZE)
    memory = {"cpu_bytes_to_use": NUM_CHUNKS * BLOCK_TOKENS * token_bytes(**SIZE)}
    with contextlib.ExitStack() as running:
        clients = []
        for name in names:
            extra = ENGINES[name]
            extra = None if extra is None else {**memory, **extra}
            server = TimedServer(model, folder / "runs", extra)
            clients.append(Client(running.enter_context(server)))
        before = [client.server.cpu_seconds() for client in clients]
        seconds: list[list[float]] = [[] for _ in names]
        answers: list[list[tuple[int, ...]]] = [[] for _ in names]
        for number, turn in enumerate(plan(num_turns)):
            for step in range(len(names)):
                place = (number + step) % len(names)
                answer = clients[place].ask(turn)
                clients[place].server.settle()
                seconds[place].append(clients[place].server.first_token_seconds)
                answers[place].append(answer.token_ids)
        cpu = [
            client.server.cpu_seconds() - start
            for client, start in zip(clients, before, strict=True)
        ]
        metrics = [client.server.metrics() for client in clients]
        for client in clients:
            client.server.stop()
    assert all(one == answers[0] for one in answers), "the engines gave different answers"
    return [
        (
            name,
            f"{one.computed_tokens:,}",
            f"{one.device_tokens:,}",
            f"{one.loaded_tokens:,}",
            f"{one.value('vllm:kv_offload_store_bytes_total') / 2**20:,.0f} MiB",
            f"{1000 * statistics.median(times):.0f} ms",
            f"{sum(times) / sum(seconds[0]):.2f}",
            f"{taken / cpu[0]:.2f}",
        )
        for name, one, times, taken in zip(names, metrics, seconds, cpu, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=400, help="requests to each engine")
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="only these rows")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvoffload-engine-") as folder:
        rows = measure(arguments.turns, arguments.engine or list(ENGINES), Path(folder))
    print(
        f"{arguments.turns} requests; device {DEVICE_BLOCKS} blocks, host {NUM_CHUNKS} blocks of "
        f"{BLOCK_TOKENS} tokens\n"
    )
    header = (
        *("engine", "computed", "from device", "from host", "stored"),
        *("first token", "all of them", "processor"),
    )
    for row in (header, ("---",) * len(header), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
