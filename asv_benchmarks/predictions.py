"""Compare predicted hits with those that vLLM's server counts on a CPU.

Prints, per model and tier, the share of the prompts' tokens that came from the tier: by the
engine's own metrics, by ``kvoffload advise --disk``, and the difference in points. The models are
one whose layers keep every token, and one with a window. Needs an environment with an engine, which
``.ci/vllm-env --engine`` makes::

    $(.ci/vllm-env --engine) setup.py build_ext --inplace
    $(.ci/vllm-env --engine) asv_benchmarks/predictions.py

Half of the requests are chats and half are agents that say when they return. They are made 16 at a
time, and a session's next request is made when the previous one has been answered.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.model import make_model
from tests.engine.predictions import CONCURRENCY, LONGEST_ANSWER, SETTINGS, compare, workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="requests to each engine")
    parser.add_argument("--model", action="append", choices=list(SETTINGS), help="only this one")
    parser.add_argument(
        "--answer-tokens", type=int, default=LONGEST_ANSWER, help="of the longest answer"
    )
    parser.add_argument("--device-blocks", type=int, help="of the device, instead of each model's")
    arguments = parser.parse_args()
    requests = workload(arguments.requests, arguments.answer_tokens)
    rows, seconds = [], []
    with tempfile.TemporaryDirectory(prefix="kvoffload-engine-") as folder:
        model = make_model(Path(folder) / "model")
        for name in arguments.model or SETTINGS:
            setting, own = SETTINGS[name], Path(folder) / name
            if arguments.device_blocks:
                setting = replace(setting, device=arguments.device_blocks)
            found = compare(setting, requests, model, own)
            seconds.append(f"{name} {found.seconds:.0f} s")
            for tier in ("device", "host", "disk"):
                engine, predicted, points = (
                    getattr(shares, tier)
                    for shares in (found.engine, found.predicted, found.points)
                )
                size = f"{getattr(setting, tier):,}"
                shares = (f"{engine:.2f} %", f"{predicted:.2f} %", f"{points:+.2f}")
                rows.append((name, tier, size, *shares))
    print(f"{len(requests):,} requests, {CONCURRENCY} at once; {', '.join(seconds)}\n")
    header = ("model", "tier", "blocks", "engine", "predicted", "difference")
    for row in (header, ("---",) * len(header), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
