"""The exceptions: what they are, and what their messages say."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload import (
    BackendError,
    BlockNotFoundError,
    BlockNotPinnedError,
    BlockNotReadyError,
    OffloadError,
    PolicyError,
    RefCountOverflowError,
)
from tests.blocks import block_hash
from tests.contract.conftest import Build

pytestmark = pytest.mark.fast

KINDS = {
    BlockNotFoundError: KeyError,
    BlockNotReadyError: RuntimeError,
    BlockNotPinnedError: RuntimeError,
    RefCountOverflowError: OverflowError,
    BackendError: RuntimeError,
    PolicyError: RuntimeError,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_is_one_of_ours_and_one_of_pythons(kind: type[Exception]) -> None:
    assert issubclass(kind, OffloadError)
    assert issubclass(kind, KINDS[kind])


def test_the_root_is_a_plain_exception() -> None:
    assert OffloadError.__bases__ == (Exception,)


@pytest.mark.parametrize("kind", [OffloadError, *KINDS])
def test_the_text_is_the_bare_message(kind: type[Exception]) -> None:
    assert str(kind("what went wrong")) == "what went wrong"
    assert str(kind()) == ""


def raised(build: Build, key: bytes) -> list[tuple[type[Exception], str]]:
    """Return kind and text of each error that names `key`."""
    found = []

    def catch(kind: type[Exception], call: Any, *arguments: Any) -> None:
        with pytest.raises(kind) as caught:
            call(*arguments)
        found.append((kind, str(caught.value)))

    manager = build(4)
    catch(BlockNotFoundError, manager.prepare_load, [key])
    catch(BlockNotFoundError, manager.complete_load, [key])
    manager.prepare_store([key])
    catch(BlockNotReadyError, manager.prepare_load, [key])
    catch(BlockNotPinnedError, manager.complete_load, [key])
    manager.complete_store([key])
    catch(BlockNotPinnedError, manager.complete_load, [key])
    return found


@pytest.mark.parametrize("length", [1, 8, 31, 32])
def test_a_message_names_the_call_and_shows_the_hash_in_hex(build: Build, length: int) -> None:
    key = block_hash(3, length)
    calls = ["prepare_load", "complete_load", "prepare_load", "complete_load", "complete_load"]
    for call, (_, text) in zip(calls, raised(build, key), strict=True):
        assert text.startswith(f"{call}: ")
        assert key.hex() in text
        assert repr(key) not in text


@pytest.mark.parametrize("length", [33, 36, 37, 300, 5000])
def test_a_long_hash_is_cut_after_32_bytes_with_its_length(build: Build, length: int) -> None:
    key = block_hash(3, length)
    for _, text in raised(build, key):
        assert key[:32].hex() in text
        assert key[:33].hex() not in text
        assert str(length) in text.replace(key[:32].hex(), "")
        assert len(text) < 200
