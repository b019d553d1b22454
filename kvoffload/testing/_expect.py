"""The checks that all suites share; they hold under ``python -O``, too."""

from __future__ import annotations

from collections.abc import Callable

from kvoffload import BlockHash


def require(condition: object, message: str) -> None:
    """Raise AssertionError unless a condition holds."""
    if not condition:
        raise AssertionError(message)


def equal(found: object, expected: object, what: str) -> None:
    """Raise AssertionError unless two values are equal."""
    require(found == expected, f"{what} must be {expected!r}, got {found!r}")


def raises(kind: type[Exception], what: str, call: Callable[[], object]) -> str:
    """Raise AssertionError unless a call raises an error of a kind; return its text."""
    try:
        answer = call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{what} must raise {kind.__name__}, got {answer!r}")


def make_keys(count: int, first: int = 0) -> list[BlockHash]:
    """Return keys that differ."""
    return [BlockHash(b"block %d" % index) for index in range(first, first + count)]
