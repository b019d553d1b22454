"""Epochs: in order, never used up, and told from nonsense."""

import time

import pytest

from kvoffload.tiers.epoch import (
    AHEAD_MS,
    RANDOM_BITS,
    epoch_text,
    is_epoch,
    new_epoch,
    parse_epoch,
)

pytestmark = pytest.mark.fast


def test_each_epoch_is_above_the_one_before() -> None:
    epoch = 0
    for _ in range(10_000):
        epoch, before = new_epoch(epoch), epoch
        assert before < epoch < 2**64
        assert is_epoch(epoch)
    assert new_epoch() != new_epoch(), "no two processes draw the same"


@pytest.mark.parametrize("ahead_ms", [1, 86_400_000, AHEAD_MS - 60_000])
def test_one_ahead_of_the_clock_has_a_next_one(ahead_ms: int) -> None:
    ahead = (time.time_ns() // 10**6 + ahead_ms) << RANDOM_BITS
    assert ahead < new_epoch(ahead)
    assert is_epoch(new_epoch(ahead))


def test_a_clock_that_was_never_set_refuses_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = new_epoch()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert is_epoch(epoch)
    assert epoch < new_epoch(epoch)


@pytest.mark.parametrize("nonsense", [0, -5, 2**64 - 1, 2**64, 2**200])
def test_what_is_none_is_passed_over(nonsense: int) -> None:
    assert not is_epoch(nonsense)
    assert is_epoch(new_epoch(nonsense))


@pytest.mark.parametrize("wrong", [-1, 2**64])
def test_one_of_more_than_64_bits_is_not_written(wrong: int) -> None:
    with pytest.raises(ValueError, match=r"epoch must be [<>]= "):
        epoch_text(wrong)


def test_it_is_read_as_it_was_written() -> None:
    epoch = new_epoch()
    assert parse_epoch(epoch_text(epoch)) == epoch
    assert len(epoch_text(1)) == 16


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"0000000000000000",
        b"ffffffffffffffff",
        b"-000000000000005",
        b"+000000000000005",
        b"0x00000000000005",
        b"0_00000000000005",
        b"             5\n\n",
        b"00000000000000A5",
        b"000000000000005",
        b"00000000000000005",
        [b"0000000000000005"],
        5,
        "0000000000000005",
    ],
    ids=str,
)
def test_nonsense_is_no_epoch(data: object) -> None:
    assert parse_epoch(data) is None
