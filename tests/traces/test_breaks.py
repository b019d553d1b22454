"""What breaks prefixes is found, placed and named, and nothing is said where nothing does."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from kvoffload.traces import PromptOptions, Survey, Trace
from kvoffload.traces.breaks import PrefixBreaks

WORDS = [
    *("block", "cache", "prefix", "answer", "user", "server", "disk", "memory", "why", "how"),
    *("please", "explain", "code", "list"),
]
NAMES = [
    f"{first}{last}" for first in ("Al", "Bo", "Ca", "De") for last in ("ice", "ris", "ja", "us")
]


def text(rng, least, most):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def a_time(rng):
    day, hour, minute = rng.randint(1, 28), rng.randint(10, 23), rng.randint(10, 59)
    return rng.choice(
        [
            f"2026-11-{day:02d}T{hour}:{minute}:{rng.randint(10, 59)}Z",
            f"{day} November 2026, {hour}:{minute}",
            f"{hour}:{minute}",
            str(1_764_000_000 + rng.randint(0, 10**6)),
        ]
    )


def an_id(rng):
    return rng.choice([f"{rng.getrandbits(64):016x}7", f"req-{rng.randint(10**6, 10**7)}"])


KINDS = {
    "a time": a_time,
    "an id": an_id,
    "a name": lambda rng: rng.choice(NAMES) + " " + rng.choice(NAMES),
    "own text": lambda rng: text(rng, 15, 60),
    None: lambda _: "now",
}


def prompts(kind, seed, count=120):
    """Return chats of several applications, each with a kind of text early in its system prompt."""
    rng = random.Random(seed)
    applications = [
        (text(rng, 1, 12) + ": ", " and so on. " + text(rng, 150, 500)) for _ in range(3)
    ]
    found = []
    for _ in range(count):
        before, behind = rng.choice(applications)
        system = before + KINDS[kind](rng) + behind
        messages = [("system", system), ("user", text(rng, 5, 60))]
        for _ in range(rng.randint(0, 2)):
            messages += [("assistant", text(rng, 5, 40)), ("user", text(rng, 5, 40))]
        found.append(messages)
    return found, {len(before) + 1 for before, _ in applications}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_what_parts_equal_prompts_is_found(kind, seed):
    breaks = PrefixBreaks()
    given, places = prompts(kind, seed)
    for texts in given:
        assert breaks.seen(texts) == texts
    found = breaks.found()
    if kind is None:
        assert not found
        return
    assert found[0].kind in {kind, "own text" if kind == "a name" else kind}
    assert found[0].role == "system"
    assert found[0].character in places
    assert sum(each.tokens for each in found) > 0.3
    assert sum(each.requests for each in found) > 0.5
    breaks.cuts = True
    left = [breaks.seen(texts)[0][1] for texts in given]
    assert len(set(left)) <= len({texts[0][1] for texts in given}) // 4


def test_a_log_is_read_again_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr("kvoffload.traces.breaks.MOST_PROMPTS", 90)
    given, _ = prompts("a time", 5)
    given += [[("user", f"{number} is all")] for number in range(23)]
    path = tmp_path / "log.jsonl"
    rows = [
        {"ts": index, "messages": [{"role": role, "content": words} for role, words in texts]}
        for index, texts in enumerate(given)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    breaks = PrefixBreaks()
    trace = Trace(path, prompts=PromptOptions(breaks=breaks))
    before = Survey.of(trace).ideal_hit_ratio
    (found,) = breaks.found()
    assert found.place.startswith("a time at character ")
    assert found.place.endswith(" of the system message")
    breaks.cuts = True
    after = Survey.of(trace).ideal_hit_ratio
    assert before < 0.3 < 0.7 < after
    assert breaks.is_part
    assert breaks.counted == [replace(found, requests=120 / 143)] != [found]


def test_turns_of_a_session_and_different_prompts_are_none():
    rng = random.Random(1)
    breaks = PrefixBreaks()
    for _ in range(60):
        texts = [("user", text(rng, 40, 300))]
        for _ in range(4):
            breaks.seen(texts)
            texts = [*texts, ("assistant", text(rng, 9, 90)), ("user", text(rng, 9, 90))]
    assert not breaks.found()
    assert not PrefixBreaks().found()


def test_a_sample_is_bounded():
    breaks = PrefixBreaks()
    for number in range(4000):
        breaks.seen([("user", f"{number} " + "x" * 40_000)])
    held = sum(len(each.text) for each in breaks._sample)
    assert held <= 1500 * 2**14
