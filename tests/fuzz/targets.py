"""What is fuzzed: the function that takes the bytes, and what its steps are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

TWINS = ("tests._python", "tests._compiled")


@dataclass(frozen=True)
class Target:
    """A function that takes bytes, ``run_X`` of a module ``X``."""

    name: str  # of the corpus
    unit: str  # of the steps whose number the function returns
    reads: tuple[str, ...] = ()  # packages whose bytecode guides the fuzzer; none: the extensions
    needs: str = ""  # the package that an extra brings
    place: str = ""  # the name of the module, where it is not that of the corpus

    def function(self) -> Callable[[bytes], int]:
        """Return the function; that of calls compares the twins."""
        place = self.place or self.name
        module = importlib.import_module(f"tests.fuzz.{place}")
        run: Callable[..., int] = getattr(module, f"run_{place}")
        if self.reads:
            return run
        return partial(run, tuple(map(importlib.import_module, TWINS)))


TARGETS = {
    target.name: target
    for target in (
        Target("calls", "calls"),
        Target("traces", "requests", ("kvoffload.traces",), "msgspec", "reading"),
        Target("prompts", "requests", ("kvoffload.traces",), "msgspec"),
        Target("merge", "requests", ("kvoffload.traces",), "msgspec"),
        Target("slab", "blocks", ("kvoffload.tiers",)),
        Target("config", "shapes", ("kvoffload.advise", "json")),
        Target("options", "values", ("kvoffload.cli", "kvoffload.replay"), "click"),
    )
}
