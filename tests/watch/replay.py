"""Serve the metrics of a replay that does not end: ``python replay.py PORT``."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server

from kvoffload import CPUOffloadingManager
from kvoffload.watch import Watch
from kvoffload.watch.prometheus import WatchCollector

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.blocks import block_hash
from tests.watch.watched import serve


def main() -> None:
    watch = Watch(max_rate=1.0, slots=2_000, policy_slots=1_000, deadline=0.5)
    manager = CPUOffloadingManager(16, 2_000, watch=watch)
    rng = random.Random(1)
    keys = [[block_hash(1000 * n + place) for place in range(40)] for n in range(600)]
    registry = CollectorRegistry()
    registry.register(WatchCollector(watch))
    manager.prepare_store(keys[0][:3])  # never completed
    started = False
    while True:
        for _ in range(200):
            serve(manager, keys[min(int(rng.expovariate(1 / 120)), 599)][: rng.randrange(1, 40)])
        if not started:
            start_http_server(int(sys.argv[1]), addr="127.0.0.1", registry=registry)
            started = True
        time.sleep(0.2)


if __name__ == "__main__":
    main()
