"""Parsers of formats: what they keep and what they compute; ``golden.txt`` has what they read."""

import json
from hashlib import blake2b

import pytest

from kvoffload.traces import Trace
from kvoffload.traces.formats.bailian import BailianParser
from tests.traces.samples import BAILIAN, LMCACHE


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="format must be one of mooncake, lmcache, "):
        Trace("x", format="arrow")


def test_bailian_remembers_a_bounded_number_of_chats(monkeypatch):
    monkeypatch.setattr(BailianParser, "REMEMBERED", 3)
    parse = BailianParser()
    for chat in range(50):
        parse(json.dumps(BAILIAN | {"chat_id": chat, "parent_chat_id": chat - 1}).encode())
        assert len(parse._sessions) <= 3
    assert set(parse._sessions.values()) == {"0"}


def test_lmcache_hashes_a_long_model_name_once_a_line(tmp_path, monkeypatch):
    """Not with each chunk: a line may hold a million."""
    hashed = 0

    def counted(data, **options):
        nonlocal hashed
        hashed += len(data)
        return blake2b(data, **options)

    monkeypatch.setattr("kvoffload.traces.formats.base.blake2b", counted)
    name = "m" * 100_000
    rows = [LMCACHE | {"model_name": name + end, "chunk_hashes": ["0xab"] * 999} for end in "ab"]
    path = tmp_path / "trace"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = Trace(path)
    assert hashed < 4 * len(name)
    assert set(first.hash_ids).isdisjoint(second.hash_ids)
