"""All that `kvoffload advise` prints, in cases that reach each of its sentences and tables.

The texts are in the folder ``advice``. ``python -m tests.cli.test_advice_text`` writes them again,
to be read before they are kept.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.cli import main
from kvoffload.traces import Request, Workload, write_trace

pytestmark = pytest.mark.thorough

FOLDER = Path(__file__).with_name("advice")
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


def sessions(**more: float) -> Iterable[Request]:
    """Return sessions whose prompts grow."""
    return (
        Request(
            1000 * n + 37 * one,
            16 * (n + 2),
            5,
            (0, *range(100 * one + 1, 100 * one + n + 2)),
            f"{one}",
            **more,
        )
        for n in range(12)
        for one in range(20)
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
    "sessions": sessions,
    "waiting": lambda: sessions(think=500),
    "once": lambda: (Request(n, 512, 1, (n,)) for n in range(500)),
}
MIB = "--kv-bytes-per-token=2048"  # a block is a mebibyte
RATES = "--prefill-tokens-per-second=1e4 --link-bandwidth=1GB"
FOUR = "--policy=lru,sieve,arc,hit-density"
LINK = "--link-bandwidth=100MB --prefill-tokens-per-second"
SLOW = f"{FOUR} {LINK}"
NONE, DEVICE = "--device-memory=0", "--device-memory=1GiB"
DISK = f"--disk=20GiB {DEVICE}"
SEES_TIER = "--shared=1GiB --router=cost?sees=tier"
PRICE = "--price=host=4,tier=0.1"
FLEET = "--kv-bytes-per-token=65536 --engines"
CASES = {
    "takes": f"chats {MIB} --capacity=200MiB",
    "pays": f"chats {MIB} --capacity=100MiB {RATES} --disk=1GiB",
    "of-many": f"more {MIB} --capacity=200MiB,150MiB {FOUR} {RATES}",
    "others": f"more {MIB} --capacity=200MiB --policy=sieve,arc {RATES} --disk=60",
    "one-policy": f"more {MIB} --capacity=200MiB --policy=lru",
    "some-pay": f"more {MIB} --capacity=200MiB {SLOW}=18500",
    "most-pay": f"more {MIB} --capacity=200MiB {SLOW}=16500",
    "more-pays": f"more {MIB} --capacity=200MiB --policy=lru {LINK}=15000",
    "less-never-pays": f"more {MIB} --capacity=400MiB,100MiB --policy=lru {LINK}=15000",
    "never-pays": f"chats {MIB} --capacity=200MiB {SLOW}=1e6",
    "ahead": f"hot {MIB} --capacity=60MiB --policy=lru,arc-classic,sieve {RATES}",
    "not-ahead": f"hot {MIB} --capacity=60MiB {FOUR},arc-classic {RATES}",
    "hits-more": f"more {MIB} --capacity=300MiB --policy=lru,s3fifo,hit-density {LINK}=21500",
    "auto": f"chats {MIB}",
    "short": f"short {MIB} --capacity=200MiB",
    "timeless": f"timeless {MIB} --capacity=100MiB {RATES} --disk=1GiB",
    "once": f"once {MIB} --capacity=10MiB",
    "hits-nothing": f"in-turn {MIB} --capacity=100MiB --policy=lru",
    "never-full": f"chats {MIB} --capacity=10GiB",
    "served": "repeated --model=llama-3.1-8b --capacity=2GiB",
    "served-short": f"repeated --model=llama-3.1-8b --capacity=2GiB {DEVICE} --limit=100",
    "depends": "in-turn --model=llama-3.1-70b --capacity=40GiB",
    "assumed": "chats --model=llama-3.1-70b --capacity=30GiB",
    "measured": f"chats --model=llama-3.1-8b --capacity=20GiB --device-memory=4GiB {RATES}",
    "link": f"chats --model=qwen3-8b --accelerator=l4 --capacity=8GiB --link-bandwidth=9GB {NONE}",
    "unknown": "chats --model=deepseek-v3.2 --accelerator=h200 --capacity=8GiB",
    "windows": f"shared --block-tokens=16 --model=gpt-oss-20b --capacity=2GiB {NONE}",
    "states": f"chats --model=qwen3-next-80b-a3b --capacity=8GiB --retention=none {DEVICE}",
    "slots": f"chats --model=gpt-oss-20b --capacity=2GiB --retention=none {NONE}",
    "slots-behind": f"chats --model=gpt-oss-20b --capacity=4GiB --retention=512 {DISK}",
    "liars": f"chats {MIB} --capacity=200MiB --hints=both --hints-liars=0.2",
    "engines": f"sessions {FLEET}=4 --capacity=40MiB {RATES} --shared=128MiB --disk=100MiB",
    "sees-tier": f"sessions {FLEET}=2 --capacity=20MiB {RATES} {SEES_TIER}",
    "priced": f"sessions {FLEET}=4 --capacity=20MiB {RATES} --shared=200MiB {PRICE}",
    "no-rate": f"sessions {FLEET}=3 --capacity=20MiB --policy=lru,sieve --device-memory=10MiB",
    "waiting": f"waiting {FLEET}=2 --capacity=20MiB {RATES} --router=session,prefix",
    "on-device": f"sessions {FLEET}=2 --capacity=4MiB {RATES} {DEVICE}",
    "busy": f"sessions {FLEET}=2 --capacity=20MiB --prefill-tokens-per-second=90 --router=cost",
    "engines-short": f"short {FLEET}=2 --capacity=320MiB {RATES}",
    "engines-once": f"once {FLEET}=2 --capacity=320MiB {RATES}",
    "engines-auto": f"sessions {FLEET}=2 --router=session {RATES} --device-memory=8MiB",
    "engines-model": "chats --model=llama-3.1-70b --engines=2 --capacity=4GiB --router=session",
}


def text_of(case: str) -> str:
    """Return what is printed of a trace in this folder, which is made first."""
    name, *options = CASES[case].split()
    write_trace(TRACES[name](), f"{name}.jsonl")
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(printed):
        assert main(["advise", f"{name}.jsonl", *options, "--jobs=1", "--quiet"]) == 0
    lines = printed.buffer.getvalue().decode().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_text(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    expected = (FOLDER / f"{case}.txt").read_text(encoding="utf-8")
    assert text_of(case) == expected


def test_each_text_is_that_of_a_case() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*CASES}


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for each in CASES:
            (FOLDER / f"{each}.txt").write_text(text_of(each), encoding="utf-8")
