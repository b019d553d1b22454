"""The corpus of the fuzzer, its findings among it, and bytes that hypothesis makes up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import IMPLEMENTATION
from tests.conftest import AVAILABLE, TWINS
from tests.differential.pairs import Twins
from tests.fuzz.calls import MAX_CALLS
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
LONGEST = {"options": 60, "slab": 120}
"""Bytes of a generated input; 400 for others."""


def inputs(target: str) -> list[Path]:
    return sorted((CORPUS / target).iterdir())


def skip_without(target: str) -> None:
    """Skip where what the target needs is not installed, or not built."""
    if TARGETS[target].needs:
        pytest.importorskip(TARGETS[target].needs, reason="needs the extra cli")
    if target == "slab" and IMPLEMENTATION == "python":
        pytest.skip("tiers need the extensions")
    if target == "calls" and list(TWINS) != AVAILABLE:
        pytest.skip("the compiled twins are not built")


@pytest.mark.parametrize(
    ("target", "path"),
    [(target, path) for target in TARGETS for path in inputs(target)],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_corpus(target: str, path: Path) -> None:
    skip_without(target)
    TARGETS[target].function()(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
@given(st.data())
def test_any_bytes(target: str, data: st.DataObject) -> None:
    """They are calls, requests, damage that is never served, a shape, a value, or an error."""
    skip_without(target)
    least = 20 if target == "slab" else 0
    drawn = data.draw(st.binary(min_size=least, max_size=LONGEST.get(target, 400)))
    steps = TARGETS[target].function()(drawn)
    assert steps <= MAX_CALLS or target != "calls"


def test_the_corpus_reaches_every_policy_and_every_form_of_trace(twins: Twins) -> None:
    from tests.fuzz.calls import POLICIES
    from tests.fuzz.reading import CHOICES, PACKINGS

    calls = [path.read_bytes() for path in inputs("calls")]
    traces = [path.read_bytes() for path in inputs("traces")]
    assert {data[0] % len(POLICIES) for data in calls if data} == set(range(len(POLICIES)))
    assert {data[0] % len(CHOICES) for data in traces if data} == set(range(len(CHOICES)))
    assert {data[1] % len(PACKINGS) for data in traces if data[1:]} == set(range(len(PACKINGS)))


def test_the_corpus_reaches_every_log_and_every_option() -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from kvoffload.traces.formats import LOG_FORMATS
    from tests.fuzz.options import READERS, run_options
    from tests.fuzz.prompts import FORMATS, run_prompts

    logs = [path.read_bytes() for path in inputs("prompts")]
    values = [path.read_bytes() for path in inputs("options")]
    assert {*FORMATS} == {*LOG_FORMATS, "csv", None}
    assert {data[0] % len(FORMATS) for data in logs if run_prompts(data)} == {*range(len(FORMATS))}
    read = {data[0] % len(READERS) for data in values if run_options(data)}
    assert read == set(range(len(READERS)))
