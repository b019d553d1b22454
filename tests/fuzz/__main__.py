"""The fuzzer: ``python -m tests.fuzz calls|traces [libFuzzer options] [FOLDER…]``.

Needs `atheris <https://github.com/google/atheris>`_. What guides the fuzzer is, for traces, the
bytecode of the readers; for calls, the extensions, if clang built them with
``KVOFFLOAD_SANITIZE=address,fuzzer-no-link``. ``nox -s fuzz`` does all that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

CORPUS = Path(__file__).with_name("corpus")


class Counted:
    """The function that is fuzzed, counting; what it returns is the calls or requests it made."""

    def __init__(self, run: Callable[[bytes], int]) -> None:
        self.run = run
        self.runs = self.bytes = self.steps = 0

    def __call__(self, data: bytes) -> None:
        self.runs += 1
        self.bytes += len(data)
        self.steps += self.run(data)
        if self.runs % TELL_EVERY == 0:  # libFuzzer leaves without a word to Python
            runs, size, steps = f"{self.runs:,}", f"{self.bytes:,}", f"{self.steps:,}"
            print(f"fuzzed: {runs} runs, {size} bytes, {steps} calls or requests", flush=True)


def calls() -> Callable[[bytes], int]:
    """Return the function that compares the twins."""
    from .calls import run_calls

    python, compiled = (importlib.import_module(f"tests.{name}") for name in TWINS)
    return lambda data: run_calls((python, compiled), data)


def traces() -> Callable[[bytes], int]:
    """Return the function that reads traces, the readers instrumented."""
    with atheris.instrument_imports(include=["kvoffload.traces"]):
        importlib.import_module("kvoffload.traces")
    from .reading import run_reading

    return run_reading


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's options or a finding end it."""
    target, *options = arguments or [""]
    if target not in TARGETS:
        raise SystemExit(__doc__)
    atheris.Setup(["fuzz", *options, str(CORPUS / target)], Counted(TARGETS[target]()))
    atheris.Fuzz()


TARGETS = {"calls": calls, "traces": traces}
TWINS = ("_python", "_compiled")
TELL_EVERY = 1_000

main(sys.argv[1:])
