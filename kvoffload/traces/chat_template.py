"""A Hugging Face chat template, rendered in Jinja's sandbox by a process with limits.

A template is a program that comes with a model, from strangers. `_template_child` is the process:
one for all requests, with an empty environment and bounds on memory and time. A template that
exceeds them ends that process only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import IO, Any, cast

from kvoffload._printable import printable

from ._template_child import MOST_BYTES
from .errors import BadLineError, TraceError

SECONDS = 3.0  # of time on the wall, per request
START_SECONDS = 60.0  # until the process is ready: a busy machine starts one slowly
LEAST_OUTPUT = 2**20  # characters of the longest text, however short the request
OUTPUT_PER_CHARACTER = 16  # of the request, in addition
MOST_ENDED = 3  # processes that templates may end before no other is started

_BOUNDS = (
    f"the chat template must stay within its bounds of {SECONDS:.0f} s and {MOST_BYTES >> 20} MiB"
)
_UNBOUNDED = (
    "a chat template needs a system that bounds the memory of a process, as Linux does: give the "
    "tokenizer.json instead of its folder"
)
_CHILD = Path(__file__).with_name("_template_child.py")
_ESCAPED = 6  # bytes of a character in JSON of ASCII; a pair of surrogates has two of them
_MORE_BYTES = 2**10  # of an answer besides its text
_PIECE = 2**16


class ChatTemplate:
    """A chat template.

    Parameters
    ----------
    origin : str
        The file, for messages.
    source : str
        The template.
    tool_source : str or None
        The template for requests with tools, if it is a separate one.
    variables : dict of str to str
        Texts of the special tokens, by name.

    Raises
    ------
    TraceError
        If it is not a Jinja template, exceeds its bounds when compiled, or this system cannot bound
        the memory of a process.
    """

    def __init__(
        self, origin: str, source: str, tool_source: str | None, variables: dict[str, str]
    ) -> None:
        self._origin = origin
        self._setup = {"source": source, "tool_source": tool_source, "variables": variables}
        self._ended = 0
        self._child: _Child | None = self._started()

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, unix: float) -> str:
        """Return the text of messages, up to the start of the answer.

        `unix` is the Unix time of the request, seconds, which a template may mention. BadLineError,
        without any text of the request, if the template fails or exceeds its bounds; TraceError if
        it has exceeded them `MOST_ENDED` times.
        """
        if self._child is None:
            self._child = self._started()
        request = {"messages": messages, "tools": tools, "unix": unix}
        try:
            answer = self._child.answer(request, SECONDS)
        except (RecursionError, ValueError) as error:  # nested too deeply, or a very long integer
            kind = type(error).__name__
            raise BadLineError(f"the chat template must render messages, got {kind}") from None
        except _EndedError:
            self._child = None
            self._ended += 1
            if self._ended < MOST_ENDED:
                raise BadLineError(f"{_BOUNDS}, got more: {printable(self._origin)}") from None
            raise TraceError(self._origin, None, f"{_BOUNDS}, got more again") from None
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise BadLineError("the chat template must accept the messages, got a refusal")
        raise BadLineError(f"the chat template must render messages, got {_kind(answer)}")

    def _started(self) -> _Child:
        """Start a process and give it the template."""
        if importlib.util.find_spec("resource") is None:
            raise TraceError(self._origin, None, _UNBOUNDED)
        try:
            child = _Child()
        except (_EndedError, OSError):
            rule = "a chat template needs a process of Python, which did not start"
            raise TraceError(self._origin, None, rule) from None
        if not child.is_bounded:
            raise TraceError(self._origin, None, _UNBOUNDED)
        try:
            answer = child.answer(self._setup, SECONDS)
        except _EndedError:
            raise TraceError(self._origin, None, f"{_BOUNDS}, got more") from None
        if "text" not in answer:
            found = f"an error in line {answer['line']}" if "line" in answer else _kind(answer)
            raise TraceError(self._origin, None, f"must be a Jinja chat template, got {found}")
        return child


class _EndedError(Exception):
    """The process has ended, or has been ended, without a whole answer."""


class _Child:
    """A process that renders templates; it ends with this object.

    Attributes
    ----------
    is_bounded : bool
        Whether the system bounds it.
    """

    def __init__(self) -> None:
        modules = [importlib.import_module(name) for name in ("jinja2", "markupsafe")]
        places = {str(Path(module.__file__ or "").absolute().parents[1]) for module in modules}
        self._process = subprocess.Popen(  # noqa: S603 - its arguments are ours
            [sys.executable, "-I", "-S", "-B", str(_CHILD), *sorted(places)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=os.sep,
            env={},
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self._process)
        stdin, stdout = cast("IO[bytes]", self._process.stdin), self._process.stdout
        self._stdin, self._stdout = stdin.fileno(), cast("IO[bytes]", stdout).fileno()
        os.set_blocking(self._stdin, False)
        self.is_bounded = self._exchanged(b"", _MORE_BYTES, START_SECONDS).get("ready") is True

    def answer(self, given: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to an object; _EndedError if there is none within that time."""
        data = json.dumps(given).encode()
        most = LEAST_OUTPUT + OUTPUT_PER_CHARACTER * len(data)
        return self._exchanged(b"%d %b\n" % (most, data), _ESCAPED * most + _MORE_BYTES, seconds)

    def _exchanged(self, line: bytes, most: int, seconds: float) -> dict[str, Any]:
        """Send a line, if it is not empty, and return the answer of at most that many bytes."""
        try:
            answer = json.loads(self._received(memoryview(line), most, seconds))
        except (OSError, ValueError, RecursionError):
            answer = None
        except BaseException:  # an interrupt: what has been sent and received is not known
            self._end()
            raise
        if not isinstance(answer, dict):
            self._end()
            raise _EndedError
        return answer

    def _received(self, unsent: memoryview, most: int, seconds: float) -> bytes:
        """Send and receive; what is received is no whole line if the process ends or is late."""
        stdin, stdout = self._stdin, self._stdout
        until = time.monotonic() + seconds
        received = bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            if unsent:
                ready.register(stdin, selectors.EVENT_WRITE)
            while not received.endswith(b"\n") and len(received) <= most:
                found = ready.select(max(0.0, until - time.monotonic()))
                if not found:
                    return b""
                for key, _ in found:
                    if key.fd == stdout:
                        piece = os.read(stdout, _PIECE)
                        received += piece
                        if not piece:
                            return b""
                    else:
                        unsent = unsent[os.write(stdin, unsent[:_PIECE]) :]
                        if not unsent:
                            ready.unregister(stdin)
        return bytes(received)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and wait for it."""
    with process:
        process.kill()


def _kind(answer: dict[str, Any]) -> str:
    """Return the name of the exception in an answer."""
    name = answer.get("failed")
    return name if isinstance(name, str) and name.isidentifier() else "another error"
