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
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.load import Client, plan
from tests.engine.model import make_model, token_bytes
from tests.engine.runs import NUM_CHUNKS, OURS
from tests.engine.server import BLOCK_TOKENS, DEVICE_BLOCKS, Server

SIZE = {"layers": 4, "heads": 4, "head_size": 64}
ENGINES = {
    "no offloading": None,
    "vLLM's manager, lru": {"eviction_policy": "lru"},
    "kvoffload, lru": {**OURS, "eviction_policy": "lru"},
    "kvoffload, hit-density": {**OURS, "eviction_policy": "hit-density"},
}


def measure(num_turns: int, names: list[str], folder: Path) -> list[tuple[str, ...]]:
    """Send every engine the same requests, in turn; return a row per engine."""
    model = make_model(folder / "model", **SIZE)
    memory = {"cpu_bytes_to_use": NUM_CHUNKS * BLOCK_TOKENS * token_bytes(**SIZE)}
    with contextlib.ExitStack() as running:
        clients = []
        for name in names:
            extra = ENGINES[name]
            server = Server(model, folder / "runs", None if extra is None else {**memory, **extra})
            clients.append(Client(running.enter_context(server), stream=True))
        before = [client.server.cpu_seconds() for client in clients]
        seconds: list[list[float]] = [[] for _ in names]
        answers: list[list[tuple[int, ...]]] = [[] for _ in names]
        for number, turn in enumerate(plan(num_turns)):
            for step in range(len(names)):
                place = (number + step) % len(names)
                answer = clients[place].ask(turn)
                clients[place].server.settle()
                seconds[place].append(answer.first_token_seconds)
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
