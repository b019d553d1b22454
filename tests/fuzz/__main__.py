"""The fuzzer: ``python -m tests.fuzz TARGET [libFuzzer options] [FOLDER…]``.

TARGET is calls, traces, prompts, merge, slab, config or options. Needs `atheris <https://github.com/google/atheris>`_.
It starts from the committed corpus, to which it adds nothing: new inputs go into the first FOLDER,
if there is one. What guides the fuzzer is, for calls, the extensions, if clang built them with
``KVOFFLOAD_SANITIZE=address,fuzzer-no-link``; for the others, the bytecode of what reads the bytes.
``nox -s fuzz`` does all that.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import atheris

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")


class Counted:
    """The function that is fuzzed, counting; what it returns is the steps that it made."""

    def __init__(self, run: Callable[[bytes], int], unit: str) -> None:
        self.run, self.unit = run, unit
        self.runs = self.bytes = self.steps = 0

    def __call__(self, data: bytes) -> None:
        self.runs += 1
        self.bytes += len(data)
        self.steps += self.run(data)
        if self.runs % TELL_EVERY == 0:  # libFuzzer leaves without a word to Python
            runs, size, steps = f"{self.runs:,}", f"{self.bytes:,}", f"{self.steps:,}"
            print(f"fuzzed: {runs} runs, {size} bytes, {steps} {self.unit}", flush=True)


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's options or a finding end it."""
    target, *options = arguments or [""]
    if target not in TARGETS:
        raise SystemExit(__doc__)
    chosen = TARGETS[target]
    with atheris.instrument_imports(include=list(chosen.reads)) if chosen.reads else nullcontext():
        run = Counted(chosen.function(), chosen.unit)
    if target == "slab":
        logging.disable()  # what is found damaged is logged
    warnings.simplefilter("error")  # as under pytest
    seeds = ",".join(map(str, sorted((CORPUS / target).iterdir())))
    atheris.Setup(["fuzz", *options, f"-seed_inputs={seeds}"], run)
    atheris.Fuzz()


TELL_EVERY = 1_000

main(sys.argv[1:])
