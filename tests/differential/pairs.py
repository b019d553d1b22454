"""A pair: the same thing from both twins, on which every step is done twice and compared."""

from __future__ import annotations

import difflib
import pprint
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from tests.observation import attempt, observe

Twins = tuple[ModuleType, ModuleType]


class Pair:
    """Two things that must not be told apart.

    Parameters
    ----------
    twins : (module, module)
        The Python twin and the compiled one.
    build : callable
        Builds the thing from one of them.
    """

    def __init__(self, twins: Twins, build: Callable[[ModuleType], Any]) -> None:
        self.python, self.compiled = (build(twin) for twin in twins)

    def do(self, method: str, *arguments: Any, form: Callable[[Any], Any] | None = None) -> Any:
        """Call a method on both, compare what came out, and return it.

        Where `form` is given, it makes each side's first argument, so that a generator can be
        passed to both.
        """
        first, rest = arguments[:1], arguments[1:]
        outcomes = [
            attempt(thing, method, *((form(*first),) if form else first), *rest)
            for thing in (self.python, self.compiled)
        ]
        require_equal(outcomes[0], outcomes[1], method, arguments)
        return outcomes[0]

    def agree(self) -> None:
        """Compare everything that can be seen of the two, and check the invariants of both."""
        require_equal(observe(self.python), observe(self.compiled), what="what can be seen")
        self.python._check()
        self.compiled._check()


def require_equal(python: Any, compiled: Any, what: str, context: Any = "") -> None:
    """Fail with the difference between the two, line by line, if there is one."""
    if python != compiled:
        lines = difflib.unified_diff(
            pprint.pformat(python).splitlines(),
            pprint.pformat(compiled).splitlines(),
            "python",
            "compiled",
            lineterm="",
            n=1,
        )
        raise AssertionError("\n".join([f"the twins differ in {what} {context}", *lines]))


def same_values(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Compare statuses that are held by the caller."""
    for python, compiled in pairs:
        require_equal(
            (python.ref_cnt, python.block_id),
            (compiled.ref_cnt, compiled.block_id),
            what="a status that is held",
        )
