"""Three watched engines, with counts known whenever their metrics are read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from kvoffload import CPUOffloadingManager, Hints
from kvoffload.watch import Watch, WatchReport
from kvoffload.watch.prometheus import WatchCollector
from tests.blocks import block_hash
from tests.policies.steps import request as serve_request

from .watched import SECRET, serve

LABELS = {"model_name": "model"}
HINTED = 1
"""The engine whose clients say when they return."""
SOURCES = ("agent", "chat")


class Fleet:
    """An LRU engine, one of hit density with other traffic, and one that has become idle."""

    def __init__(self) -> None:
        self.scrapes: list[list[dict[str, Any]]] = []
        self._rng = random.Random(1)
        self._served = 0
        self._registries: list[CollectorRegistry] = []
        self.managers = []
        for capacity, policy, others in (
            (1_200, "lru", ("hit-density", "arc")),
            (800, "hit-density", ("arc",)),
            (1_000, "lru", ("hit-density",)),
        ):
            watch = Watch(
                max_rate=1.0,
                slots=2**20,
                policy_slots=2**20,
                policies=others,
                deadline=0.5,
                secret=SECRET,
                clock=lambda: self._served / 50,
            )
            self.managers.append(CPUOffloadingManager(16, capacity, policy, watch=watch))
            registry = CollectorRegistry()
            registry.register(
                WatchCollector(watch, {**LABELS, "engine": str(len(self._registries))})
            )
            self._registries.append(registry)
        self.managers[0].prepare_store([block_hash(-position) for position in (1, 2, 3)])
        self._serve((700, 2_500, 400))

    def _serve(self, counts: tuple[int, ...]) -> None:
        for engine, count in enumerate(counts):
            for _ in range(count):
                document = min(int(self._rng.expovariate(1 / (40 + 50 * engine))), 400)
                length = self._rng.randrange(1, 40 - 10 * engine)
                self._served += 1
                hashes = [block_hash(1000 * document + position) for position in range(length)]
                if engine == HINTED:
                    hints = Hints(
                        ends=document % 50 == 0,
                        expect_s=0.5 + document / 10,
                        source=SOURCES[document % 2],
                    )
                    serve_request(self.managers[engine], hashes, hints, self._served / 50)
                else:
                    serve(self.managers[engine], hashes)

    def scrape(self, second: int) -> Iterator[str]:
        """Serve more requests, and yield the metrics of a second as lines of OpenMetrics."""
        self._serve((100, 60, 0))
        self.scrapes.append([manager.watch.counters() for manager in self.managers])
        for registry in self._registries:
            for family in registry.collect():
                for name, labels, value, *_ in family.samples:
                    pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
                    is_told_twice = family.type == "gauge" and labels["engine"] == "1"
                    for pid in (',pid="7"', ',pid="8"') if is_told_twice else ("",):  # by servers
                        yield f"{name}{{{pairs}{pid}}} {value} {second}\n"

    def reports(self) -> list[WatchReport]:
        """Return the report of each engine."""
        return [manager.watch.report() for manager in self.managers]
