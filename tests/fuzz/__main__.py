"""The fuzzer: ``python -m tests.fuzz TARGET [libFuzzer options] [FOLDER…]``.

TARGET is calls, traces, prompts, merge, slab, config or options. Needs `atheris <https://github.com/google/atheris>`_.
It starts from the committed corpus, to which it adds nothing: new inputs go into the first FOLDER,
if there is one. What guides the fuzzer is, for calls, the extensions, if clang built them with
``KVOFFLOAD_SANITIZE=address,fuzzer-no-link``; for the others, the bytecode of what reads the bytes.
``nox -s fuzz`` does all that.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

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


def prompts() -> Callable[[bytes], int]:
    """Return the function that reads logs of prompts, the readers instrumented."""
    traces()
    from .prompts import run_prompts

    return run_prompts


def merge() -> Callable[[bytes], int]:
    """Return the function that reads several traces as one, the readers instrumented."""
    traces()
    from .merge import run_merge

    return run_merge


def slab() -> Callable[[bytes], int]:
    """Return the function that opens damaged slabs, what reads them instrumented."""
    with atheris.instrument_imports(include=["kvoffload.tiers"]):
        importlib.import_module("kvoffload.tiers")
    from .slab import run_slab

    logging.disable()  # what is found damaged is logged
    return run_slab


def config() -> Callable[[bytes], int]:
    """Return the function that reads descriptions of models, the reader and JSON instrumented."""
    with atheris.instrument_imports(include=["json", "kvoffload.advise"]):
        importlib.import_module("kvoffload.advise")
    from .config import run_config

    return run_config


def options() -> Callable[[bytes], int]:
    """Return the function that reads values of options, their readers instrumented."""
    with atheris.instrument_imports(include=["kvoffload.cli", "kvoffload.replay"]):
        importlib.import_module("kvoffload.cli._fleet_options")
    from .options import run_options

    return run_options


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's options or a finding end it."""
    target, *options = arguments or [""]
    if target not in TARGETS:
        raise SystemExit(__doc__)
    make, unit = TARGETS[target]
    run = Counted(make(), unit)
    warnings.simplefilter("error")  # as under pytest
    seeds = ",".join(map(str, sorted((CORPUS / target).iterdir())))
    atheris.Setup(["fuzz", *options, f"-seed_inputs={seeds}"], run)
    atheris.Fuzz()


TARGETS = {
    "calls": (calls, "calls"),
    "traces": (traces, "requests"),
    "prompts": (prompts, "requests"),
    "merge": (merge, "requests"),
    "slab": (slab, "blocks"),
    "config": (config, "shapes"),
    "options": (options, "values"),
}
TWINS = ("_python", "_compiled")
TELL_EVERY = 1_000

main(sys.argv[1:])
