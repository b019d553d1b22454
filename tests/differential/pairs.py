"""A pair: the same thing from both twins, on which every step is done twice and compared."""

from __future__ import annotations

import difflib
import pprint
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from kvoffload import Hints
from kvoffload.testing.policies import check_invariants
from tests.blocks import once
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

    @property
    def both(self) -> tuple[Any, Any]:
        """The Python one and the compiled one."""
        return self.python, self.compiled

    def do(self, method: str, *arguments: Any, form: Callable[[Any], Any] | None = None) -> Any:
        """Call a method on both, compare what came out, and return it.

        Where `form` is given, it makes each side's first argument, so that a generator can be
        passed to both.
        """
        outcomes = [attempt(thing, method, *arguments, form=form) for thing in self.both]
        require_equal(outcomes[0], outcomes[1], method, arguments)
        return outcomes[0]

    def refuse(self, method: str, *arguments: Any, form: Callable[[Any], Any] | None = None) -> Any:
        """Make a call that must be refused; compare the errors, and return one."""
        outcome, error = self.do(method, *arguments, form=form)
        assert outcome == "raised", f"{method} {arguments} gave {error}"
        return error

    def begin(self, keys: list[bytes], hints: Hints | None = None) -> OpenPair:
        """Begin a request on a manager of each twin."""
        return OpenPair(self, keys, hints)

    def agree(self) -> None:
        """Compare everything that can be seen of the two, and check the invariants of both."""
        require_equal(observe(self.python), observe(self.compiled), what="what can be seen")
        check_invariants(self.python)
        check_invariants(self.compiled)


class OpenPair:
    """A request of each twin's manager, driven by the same calls."""

    def __init__(
        self, pair: Pair, keys: list[bytes], hints: Hints | None = None, now: float | None = None
    ) -> None:
        self.both = [
            pair.python.begin(keys, hints=hints, now=now),
            pair.compiled.begin(once(keys), hints=hints, now=now),
        ]

    @property
    def size(self) -> int:
        """Number of blocks of the request."""
        return len(self.both[0])

    def finish(self, hints: Hints | None = None, now: float | None = None) -> None:
        """Finish both, with what the client says of its session."""
        for request in self.both:
            request.finish(hints=hints, now=now)
        self.do("finish")  # a second time, to compare them

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a method on both, and compare the outcomes and the requests."""
        outcomes = [attempt(request, method, *arguments) for request in self.both]
        require_equal(outcomes[0], outcomes[1], method, arguments)
        seen = [
            (request.hashes, len(request), request.is_finished, repr(request))
            for request in self.both
        ]
        require_equal(seen[0], seen[1], f"a request after {method}", arguments)
        return outcomes[0][1]


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
