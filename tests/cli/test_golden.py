"""What the commands print, to the letter: ``golden.txt``, and all advice in the folder ``advice``.

A command stands behind ``$``, its exit code behind it if that is not 0, and lines of standard error
behind ``!``. Small files that they read are in the folder ``inputs``, others are made.
``python -m tests.cli.test_golden`` writes the texts anew, from the commands in them, to be read
before they are kept.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload import IMPLEMENTATION
from kvoffload.traces import Request, Workload, write_trace
from kvoffload.traces.oracle_general import write_oracle_general
from tests.advise.model_configs import FAMILIES

from .conftest import growing, run_here
from .test_vocabulary import OWN

HERE = Path(__file__).parent
WIDTHS = {HERE / "golden.txt": None} | dict.fromkeys(sorted((HERE / "advice").iterdir()), "100")
"""Files of commands, and the columns that their texts have, if they are not those by default."""

CASES = [
    (*case, file)
    for file in WIDTHS
    for case in re.findall(
        r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", file.read_text(encoding="utf-8"), re.MULTILINE
    )
]


# -- what advice is given on ---------------------------------------------------------------------

WORKLOAD = Workload(300, seed=3)


def repeated() -> Iterable[Request]:
    """Return prompts that come twice in a row."""
    return (Request(n, 5120, 1, tuple(range(n // 2 * 10, n // 2 * 10 + 10))) for n in range(400))


def in_turn() -> Iterable[Request]:
    """Return 30 prompts of 20 blocks in turn."""
    return (
        Request(1000 * n, 10_240, 1, tuple(range(n % 30 * 20, n % 30 * 20 + 20)))
        for n in range(600)
    )


def hot() -> Iterable[Request]:
    """Return prompts of which half are one of 60, and the others nearly never come again."""
    dice = random.Random(1)
    for n in range(2000):
        yield Request(100 * n, 512, 1, (dice.randrange(60 if dice.random() < 0.5 else 40_000),))


def shared() -> Iterable[Request]:
    """Return prompts that share only a beginning."""
    return (
        Request(1000 * n, 4464, 1, (*range(256), *range(1000 + 23 * n, 1023 + 23 * n)))
        for n in range(200)
    )


TRACES: dict[str, Callable[[], Iterable[Request]]] = {
    "chats": lambda: WORKLOAD,
    "more": lambda: Workload(800, seed=5),
    "short": lambda: Workload(20, seed=3),
    "timeless": lambda: (replace(one, timestamp=0) for one in WORKLOAD),
    "repeated": repeated,
    "in-turn": in_turn,
    "hot": hot,
    "shared": shared,
    "sessions": lambda: growing(12, 20),
    "waiting": lambda: growing(12, 20, think=500),
    "once": lambda: (Request(n, 512, 1, (n,)) for n in range(500)),
}


def prepare_advice(folder: Path) -> None:
    """Write the traces that advice is given on."""
    for name, requests in TRACES.items():
        write_trace(requests(), folder / f"{name}.jsonl")


# -- what all other commands read ----------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Write the traces, tables and results that the commands read."""
    shutil.copytree(HERE / "inputs", folder, dirs_exist_ok=True)
    write_trace(Workload(60), folder / "t.jsonl")
    write_trace(Workload(40, seed=5), folder / "u.jsonl")
    write_trace(Workload(30, block_tokens=100), folder / "hundred.jsonl")
    longer = [Request(0, 1024 + n, 1, (1, 2, 100 + n)) for n in range(1, 30)]
    write_trace(longer, folder / "range.jsonl")
    chance = random.Random(7)  # documents in any order, with a hash of each block's content alone
    pool = [[chance.getrandbits(60) for _ in range(8)] for _ in range(40)]
    chained = (itertools.chain(*chance.choices(pool, k=4)) for _ in range(400))
    mixed = (Request(50 * n, 512, 4, tuple(ids)) for n, ids in enumerate(chained))
    write_trace(mixed, folder / "unchained.jsonl")
    write_trace([*Workload(30), Request(10**6, 1, 1, (1, 2, 3))], folder / "most.jsonl")
    seconds = (Request(n / 2, 1536, 200, (0, 1, n + 2)) for n in range(99))
    write_trace(seconds, folder / "seconds.jsonl")
    rows = [
        {"ts": n, "messages": [{"role": "user", "content": f"At 1{n % 10}:{10 + n}. {'s' * 900}"}]}
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fresh = iter(range(3, 10**6))  # sessions whose rows list only what is new
    turns = [(320, {"hash_ids": [0, 1, 2]}), *[(178, {"hash_ids": [], "delay": 500.5})] * 6]
    deltas = [
        {"session_id": f"s{session}", "input_length": tokens, "output_length": 20}
        | ({"timestamp": 1000 * session} if not number else {})
        | more
        | {"hash_ids": [*more["hash_ids"], *[next(fresh) for _ in range(2 + (number > 0))]]}
        for session in range(20)
        for number, (tokens, more) in enumerate(turns)
    ]
    (folder / "deltas.jsonl").write_text("\n".join(map(json.dumps, deltas)))
    (folder / "bad.jsonl").write_bytes(b"bad\n" + (folder / "t.jsonl").read_bytes())
    (folder / "link.svg").symlink_to("t.jsonl")
    (folder / "hard.jsonl").hardlink_to(folder / "t.jsonl")
    os.mkfifo(folder / "pipe")
    (folder / "folder.svg").mkdir()
    (folder / "cut.jsonl").write_bytes(gzip.compress((folder / "one.jsonl").read_bytes())[:-4])
    (folder / "deep.json").write_text("[" * 9999)
    with (folder / "o.oracleGeneral").open("wb") as file:
        write_oracle_general([Request(0, 0, 0, (1, 2)), Request(0, 0, 0, (1,))], file)
    (folder / "mine.py").write_text(OWN)
    (folder / "broken.py").write_text("1 / 0")
    (folder / "package").mkdir()
    (folder / "package" / "policies.py").write_text("from mine import Fifo\n")
    (folder / "package" / "broken.py").write_text("1 / 0")
    shutil.copy(FAMILIES / "llama4.json", folder)


def printed(line: str) -> str:
    """Return what the file has for a command."""
    done = run_here(*shlex.split(line))
    lines = [f"[{done.code}]"] if done.code else []
    lines += [one.rstrip() for one in done.out.splitlines()]
    lines += [f"! {one}" for one in done.err.splitlines()]
    return "".join(f"{one}\n" for one in lines)


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return what is in a folder; modules that are imported may leave more."""
    found = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.read_bytes() if path.is_file() else None for path in found}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Give the folder of the commands, and that of advice."""
    made = (tmp_path_factory.mktemp("golden"), tmp_path_factory.mktemp("advice"))
    prepare(made[0])
    prepare_advice(made[1])
    yield made
    for module in ("mine", "package", "package.policies"):
        sys.modules.pop(module, None)


@pytest.mark.thorough
@pytest.mark.parametrize(("line", "wanted", "file"), CASES, ids=[line for line, *_ in CASES])
def test_it_prints_what_it_printed(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, line: str, wanted: str, file: Path
) -> None:
    if line.startswith(("demo ", "tier ")) and IMPLEMENTATION == "python":
        pytest.skip("a watch and a tier need the extensions")
    folder = folders[WIDTHS[file] is not None]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns := WIDTHS[file]:
        monkeypatch.setenv("COLUMNS", columns)
    before = contents(folder)
    assert printed(line) == wanted
    if wanted.startswith("["):
        assert contents(folder) == before, "a command that fails changes nothing"


if __name__ == "__main__":
    for one, columns in WIDTHS.items():
        with tempfile.TemporaryDirectory() as name:
            (prepare if columns is None else prepare_advice)(Path(name))
            os.chdir(name)
            os.environ.pop("COLUMNS", None)
            os.environ.update({"COLUMNS": columns} if columns else {})
            lines = [line for line, _, file in CASES if file == one]
            text = "".join(f"$ {line}\n{printed(line)}" for line in lines)
        one.write_text(text, encoding="utf-8")
