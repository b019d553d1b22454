"""The corpus of the fuzzer, its findings among it, and bytes that hypothesis makes up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.differential.pairs import Twins
from tests.fuzz.calls import MAX_CALLS, run_calls

CORPUS = Path(__file__).with_name("corpus")


def inputs(target: str) -> list[Path]:
    return sorted((CORPUS / target).iterdir())


@pytest.mark.parametrize("path", inputs("calls"), ids=lambda path: path.name)
def test_calls_of_the_corpus(twins: Twins, path: Path) -> None:
    run_calls(twins, path.read_bytes())


@pytest.mark.parametrize("path", inputs("traces"), ids=lambda path: path.name)
def test_traces_of_the_corpus(path: Path) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from tests.fuzz.reading import run_reading

    run_reading(path.read_bytes())


@given(st.binary(max_size=400))
def test_any_bytes_are_calls(twins: Twins, data: bytes) -> None:
    assert run_calls(twins, data) <= MAX_CALLS


@given(st.binary(max_size=400))
def test_any_bytes_are_a_trace_or_an_error(data: bytes) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from tests.fuzz.reading import run_reading

    run_reading(data)


def test_the_corpus_reaches_every_policy_and_every_form_of_trace(twins: Twins) -> None:
    from tests.fuzz.calls import POLICIES
    from tests.fuzz.reading import CHOICES, PACKINGS

    calls = [path.read_bytes() for path in inputs("calls")]
    traces = [path.read_bytes() for path in inputs("traces")]
    assert {data[0] % len(POLICIES) for data in calls if data} == set(range(len(POLICIES)))
    assert {data[0] % len(CHOICES) for data in traces if data} == set(range(len(CHOICES)))
    assert {data[1] % len(PACKINGS) for data in traces if data[1:]} == set(range(len(PACKINGS)))
