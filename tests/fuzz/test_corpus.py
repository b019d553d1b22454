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
from tests.differential.pairs import Twins
from tests.fuzz.calls import MAX_CALLS, run_calls

CORPUS = Path(__file__).with_name("corpus")
of_tiers = pytest.mark.skipif(IMPLEMENTATION == "python", reason="tiers need the extensions")


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


@pytest.mark.parametrize("path", inputs("merge"), ids=lambda path: path.name)
def test_merges_of_the_corpus(path: Path) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from tests.fuzz.merge import run_merge

    run_merge(path.read_bytes())


@of_tiers
@pytest.mark.parametrize("path", inputs("slab"), ids=lambda path: path.name)
def test_slabs_of_the_corpus(path: Path) -> None:
    from tests.fuzz.slab import run_slab

    run_slab(path.read_bytes())


@pytest.mark.parametrize("path", inputs("config"), ids=lambda path: path.name)
def test_descriptions_of_the_corpus(path: Path) -> None:
    from tests.fuzz.config import run_config

    run_config(path.read_bytes())


@pytest.mark.parametrize("path", inputs("prompts"), ids=lambda path: path.name)
def test_prompts_of_the_corpus(path: Path) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from tests.fuzz.prompts import run_prompts

    run_prompts(path.read_bytes())


@pytest.mark.parametrize("path", inputs("options"), ids=lambda path: path.name)
def test_options_of_the_corpus(path: Path) -> None:
    pytest.importorskip("click", reason="reading options needs the cli extra")
    from tests.fuzz.options import run_options

    run_options(path.read_bytes())


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


@given(st.binary(max_size=400))
def test_any_bytes_are_calls(twins: Twins, data: bytes) -> None:
    assert run_calls(twins, data) <= MAX_CALLS


@given(st.binary(max_size=400))
def test_any_bytes_are_a_trace_or_an_error(data: bytes) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from tests.fuzz.reading import run_reading

    run_reading(data)


@given(st.binary(max_size=400))
def test_any_bytes_are_prompts_or_an_error(data: bytes) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from tests.fuzz.prompts import run_prompts

    run_prompts(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    pytest.importorskip("click", reason="reading options needs the cli extra")
    from tests.fuzz.options import run_options

    run_options(data)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_merge_or_an_error(data: bytes) -> None:
    pytest.importorskip("msgspec", reason="reading traces needs the cli extra")
    from tests.fuzz.merge import run_merge

    run_merge(data)


@of_tiers
@given(st.binary(min_size=20, max_size=120))
def test_any_bytes_are_damage_that_is_never_served(data: bytes) -> None:
    from tests.fuzz.slab import run_slab

    run_slab(data)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_shape_or_an_error(data: bytes) -> None:
    from tests.fuzz.config import run_config

    run_config(data)


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


@of_tiers
def test_the_corpus_reaches_every_kind_of_damage_and_every_number_of_files() -> None:
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
