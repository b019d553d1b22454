"""What clients say of their sessions, over HTTP, to a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from tests.engine.model import NUM_WORDS, word
from tests.engine.runs import CHUNK_BYTES, OURS
from tests.engine.server import BLOCK_TOKENS, SHORT, Answer, Server

pytestmark = pytest.mark.every_release

SESSION_CHUNKS = 14
NUM_CHUNKS = 3 * SESSION_CHUNKS + 3  # three sessions, and of a fourth a part
ANSWER_TOKENS = 2
IGNORED = "vllm:kvoffload:hints_ignored_total"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server whose host memory has room for three sessions."""
    extra = {**OURS, "cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES}
    with Server(model, tmp_path_factory.mktemp("hints"), extra) as server:
        yield server
        assert server.stop() == 0, server.log()[-4000:]


def ask(server: Server, session: int, **fields: Any) -> Answer:
    """Ask the first request of a session, of which the device has nothing."""
    server.forget_device()
    # The template adds some tokens, whose chunk is not full and so is not stored.
    numbers = range(SESSION_CHUNKS * BLOCK_TOKENS)
    words = [word((session * 77 + number) % NUM_WORDS) for number in numbers]
    return server.ask([("user", " ".join(words))], ANSWER_TOKENS, **fields)


def fill(server: Server, first: int, **fields: Any) -> None:
    """Ask for three sessions, the last with more fields, and then for a fourth."""
    for session in range(first, first + 2):
        ask(server, session)
    ask(server, first + 2, **fields)
    ask(server, first + 3)


def chunks(answer: Answer) -> int:
    return answer.cached_tokens // BLOCK_TOKENS


def test_the_chunks_of_a_session_that_ends_leave_first(server: Server) -> None:
    fill(server, 0, kv_transfer_params={"kvoffload": {"ends": True}})
    assert [chunks(ask(server, session)) for session in (0, 1)] == [SESSION_CHUNKS] * 2
    assert chunks(ask(server, 2)) < SESSION_CHUNKS / 2


def test_without_a_word_the_oldest_leave_first(server: Server) -> None:
    """The control."""
    fill(server, 10)
    assert chunks(ask(server, 10)) < SESSION_CHUNKS / 2


def test_a_malformed_hint_is_counted_and_the_request_is_answered(server: Server) -> None:
    before = server.metrics().value(IGNORED)
    hints = {"kvoffload": {"ends": "yes", "expect_s": -1, "source": "s" * 65}, "agent_hint": 7}
    (choice,) = server.post(
        "/v1/completions",
        model=server.name,
        prompt=word(1),
        max_tokens=ANSWER_TOKENS,
        kv_transfer_params=hints,
    ).json()["choices"]
    assert choice["text"]
    server.ask(SHORT, 1, kv_transfer_params={"kvoffload": {"expect_s": 2.5, "source": "tests"}})
    server.settle()
    assert server.metrics().value(IGNORED) - before == 4
