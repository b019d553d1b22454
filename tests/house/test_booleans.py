"""Public names of the modules that programs import have named booleans."""

import importlib
import inspect

import pytest

pytestmark = pytest.mark.fast

MADE_BY_THE_LIBRARY = {"Advice", "Explanation", "GroupChunks"}  # only it calls their constructors


def signatures(name, value):
    """Yield the signatures of a function, or of a class and its public methods, by name."""
    if inspect.isclass(value) and issubclass(value, Exception | int):
        return
    if inspect.isclass(value):
        methods = inspect.getmembers(value, inspect.isroutine)
        public = [pair for pair in methods if not pair[0].startswith("_")]
        constructed = [] if name in MADE_BY_THE_LIBRARY else [("__init__", value)]
        pairs = [(f"{name}.{each}", member) for each, member in [*constructed, *public]]
    else:
        pairs = [(name, value)] if inspect.isroutine(value) else []
    for each, member in pairs:
        yield each, inspect.signature(member)


@pytest.mark.parametrize("module", ["traces", "replay", "advise", "watch", "tiers"])
def test_booleans_are_given_by_name(module):
    package = importlib.import_module(f"kvoffload.{module}")
    positional = [
        f"{name}({parameter.name})"
        for public in package.__all__
        for name, signature in signatures(public, getattr(package, public))
        for parameter in signature.parameters.values()
        if parameter.annotation in ("bool", bool) and parameter.kind != parameter.KEYWORD_ONLY
        if parameter.name != "success"  # of the contract's complete_store
    ]
    assert positional == []
