"""An engine without a server: `vllm.LLM`, as a program that a test runs.

``python -m tests.engine.offline MODEL EXTRA BATCHES LENGTHS``: answers some batches of prompts and
ends as a user's script does, without a word to the engine. LENGTHS is a file for the lengths of the
prompts; vLLM itself writes to the standard output.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engine.model import NUM_WORDS, SPECIAL
from tests.engine.server import engine_arguments, engine_environment

BATCH = 10
SECONDS = 300


def run_offline(
    model: Path, folder: Path, extra: Mapping[str, Any], batches: int, **variables: str
) -> list[int]:
    """Run the program; return the lengths of the prompts that it answered."""
    lengths = folder / "lengths.json"
    lengths.unlink(missing_ok=True)
    variables.setdefault("VLLM_CACHE_ROOT", str(model.parent / "vllm-cache"))
    arguments = [str(model), json.dumps(dict(extra)), str(batches), str(lengths)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        env=engine_environment(folder, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(lengths.read_text())


def main(model: str, extra: str, batches: str, path: str) -> None:
    from vllm import LLM, SamplingParams

    rng = random.Random(0)
    engine = LLM(**engine_arguments(Path(model), json.loads(extra)))
    answer = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    lengths: list[int] = []
    for _ in range(int(batches)):
        prompts = [
            [len(SPECIAL) + rng.randrange(NUM_WORDS) for _ in range(rng.randint(40, 300))]
            for _ in range(BATCH)
        ]
        outputs = engine.generate([{"prompt_token_ids": one} for one in prompts], answer)
        assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
        lengths += map(len, prompts)
    Path(path).write_text(json.dumps(lengths))


if __name__ == "__main__":
    main(*sys.argv[1:])
