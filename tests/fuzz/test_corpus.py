"""The corpus of the fuzzer, its findings among it, and bytes that hypothesis makes up."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_the_fuzzer_starts_from_the_corpus_and_adds_nothing_to_it(tmp_path: Path) -> None:
    """libFuzzer writes into the first folder that it is given."""
    (tmp_path / "atheris.py").write_text(
        "from contextlib import nullcontext\n"
        "instrument_imports = lambda include: nullcontext()\n"
        "Fuzz = lambda: None\n"
        "Setup = lambda arguments, run: print(*arguments, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "config", "-runs=1"],
        cwd=CORPUS.parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    *others, seeds = done.stdout.split()
    assert others == ["fuzz", "-runs=1"]
    assert seeds == "-seed_inputs=" + ",".join(map(str, inputs("config")))


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
    from tests.fuzz.options import READERS, run_options
    from tests.fuzz.prompts import FORMATS, run_prompts

    logs = [path.read_bytes() for path in inputs("prompts")]
    values = [path.read_bytes() for path in inputs("options")]
    assert {data[0] % len(FORMATS) for data in logs if run_prompts(data)} == set(
        range(len(FORMATS))
    )
    read = {data[0] % len(READERS) for data in values if run_options(data)}
    assert read == set(range(len(READERS)))


def test_the_corpus_reaches_every_kind_of_damage_and_every_number_of_files() -> None:
    skip_without("slab")
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from tests.fuzz.merge import files_of
    from tests.fuzz.slab import KINDS, Damage

    done: set[str] = set()

    class Watched(Damage):
        def do(self, kind: int) -> None:
            done.add(KINDS[kind % len(KINDS)].__name__)
            super().do(kind)

    for path in inputs("slab"):
        Watched(path.read_bytes()[3:]).steps()
    assert done == {kind.__name__ for kind in KINDS}
    merges = [path.read_bytes() for path in inputs("merge")]
    assert {len(list(files_of(data))) for data in merges} == {2, 3, 4}
    assert {data[0] % 2 for data in map(Path.read_bytes, inputs("config"))} == {0, 1}
