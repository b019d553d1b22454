"""An engine without a server: `vllm.LLM`, as a program that a test runs.

``python -m tests.engine.offline MODEL EXTRA OUTCOME``: answers some batches of prompts with each of
two engines, one after the other, and ends as a user's script does, without a word to the last. Both
are asked the same. OUTCOME is a file for what came out; vLLM itself writes to the standard output.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.model import NUM_WORDS, SPECIAL
from tests.engine.server import engine_arguments, engine_environment

BATCHES, BATCH, ENGINES = 3, 10, 2
SECONDS = 900


class Outcome(NamedTuple):
    """What a run has left."""

    lengths: list[int]  # tokens of the prompts that the last engine answered
    answers: list[list[list[int]]]  # by engine and prompt, the tokens
    metrics: list[dict[str, float]]  # by engine: counters and gauges, summed over their labels


def run_offline(model: Path, folder: Path, extra: Mapping[str, Any]) -> Outcome:
    """Run the program."""
    outcome = folder / "outcome.json"
    arguments = [str(model), json.dumps(dict(extra)), str(outcome)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        env=engine_environment(folder, VLLM_CACHE_ROOT=str(model.parent / "vllm-cache")),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return Outcome(**json.loads(outcome.read_text()))


def main(model: str, extra: str, path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter, Gauge

    answer = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    outcome = Outcome([], [], [])
    for number in range(ENGINES):
        rng = random.Random(0)
        # In process, vLLM has metrics only where it is told so.
        arguments = engine_arguments(Path(model), json.loads(extra), f"offline-{number}")
        engine = LLM(**arguments, disable_log_stats=False)
        outcome.lengths.clear()
        outcome.answers.append([])
        for _ in range(BATCHES):
            prompts = [
                [len(SPECIAL) + rng.randrange(NUM_WORDS) for _ in range(rng.randint(40, 300))]
                for _ in range(BATCH)
            ]
            outputs = engine.generate([{"prompt_token_ids": one} for one in prompts], answer)
            assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
            outcome.lengths.extend(map(len, prompts))
            outcome.answers[-1] += [list(output.outputs[0].token_ids) for output in outputs]
        outcome.metrics.append({})
        for metric in engine.get_metrics():
            if isinstance(metric, Counter | Gauge):
                found = outcome.metrics[-1]
                found[metric.name] = found.get(metric.name, 0) + metric.value
        if number + 1 < ENGINES:
            engine.llm_engine.engine_core.shutdown()
    Path(path).write_text(json.dumps(outcome._asdict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
