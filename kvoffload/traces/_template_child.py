"""The program that renders chat templates, in a process of its own: `chat_template` starts it.

A chat template is a program of strangers. It runs in Jinja's `ImmutableSandboxedEnvironment`, and
the process around it holds nothing worth stealing: it has an empty environment and no descriptor
but its pipes, opens no file, starts no process, and has bounded memory and time. Whatever a
template does, it can at most end this process, or make a text of the messages that it was given.

It first writes an object with `ready`: whether the system bounds it. The first line of input is
an object with the template's `source`, `tool_source` and `variables`; each other one is the most
characters of the answer, a blank, and a request with `messages`, `tools` and `unix`. Each line is
answered by one of `text`, `line` (of a syntax error), `refused` or `failed` (the name of an
exception). Everything is JSON in ASCII. The program imports nothing of kvoffload; `resource` is
missing on Windows.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import time
from datetime import datetime, timezone
from typing import Any

MOST_BYTES = 2**29  # of address space, the interpreter's included
CPU_SECONDS = 1  # per line of input; up to one more, since the system counts whole ones

_GLOBALS = ("range", "dict", "namespace")
# Rendered before files can no longer be opened: the modules and codecs of most features.
_FIRST = (
    "{% macro f(x) %}{{ x | trim | tojson }}{% endmacro %}{% for x in 'ab' %}{{ f('a\\n') }}"
    "{{ strftime_now('%Y') }}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ x.y.z }}"
)
# Templates for training mark the answer; for rendering, the mark means nothing.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


class _RefusedError(Exception):
    """The template refuses the messages."""


def main() -> None:
    """Answer lines of input until they end."""
    sys.path += sys.argv[1:]  # where Jinja is installed
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    environment.filters["tojson"] = _tojson
    with contextlib.suppress(jinja2.UndefinedError):
        request: dict[str, Any] = {"messages": [], "tools": None, "unix": 0}
        _rendered(environment.from_string(_FIRST), request, 2**10)
    try:
        _limit()
    except (OSError, ValueError):  # as under macOS
        _write({"ready": False})
        return
    _write({"ready": True})
    templates: list[Any] = []
    for line in sys.stdin.buffer:
        most, _, text = line.partition(b" ")
        given = json.loads(text)
        _limit_time()
        try:
            if templates:
                answer = _rendered(templates[bool(given["tools"])], given, int(most))
            else:
                environment.globals |= given["variables"]
                sources = given["source"], given["tool_source"] or given["source"]
                templates += map(environment.from_string, map(_unmarked, sources))
                answer = {"text": ""}
        except MemoryError:
            os._exit(1)
        except jinja2.TemplateSyntaxError as error:
            answer = {"line": error.lineno}
        except _RefusedError:
            answer = {"refused": True}
        except Exception as error:  # noqa: BLE001 - a template is foreign code
            answer = {"failed": type(error).__name__}
        _write(answer)


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _limit() -> None:
    """Bound what the process may use; OSError or ValueError if the system cannot do it."""
    import resource

    _set(resource.RLIMIT_AS, MOST_BYTES)
    for kind in ("FSIZE", "NOFILE", "NPROC", "CORE"):
        _set(getattr(resource, f"RLIMIT_{kind}"), 0)


def _set(kind: int, most: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (least, least))


def _limit_time() -> None:
    """Have the system end the process if the next answer takes too long."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = int(time.process_time()) + 1 + CPU_SECONDS
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def _unmarked(source: str) -> str:
    def meaning_nothing(found: re.Match[str]) -> str:
        return found[1] + ("endif" if found[2] else "if true") + found[3]

    return _GENERATION.sub(meaning_nothing, source)


def _rendered(template: Any, given: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the answer to a request; MemoryError if its text is longer than `most`."""
    parts, left = [], most
    for part in template.generate(
        messages=given["messages"],
        tools=given["tools"],
        documents=None,
        add_generation_prompt=True,
        raise_exception=_raise,
        strftime_now=functools.partial(_strftime, given["unix"]),
    ):
        left -= len(part)
        if left < 0:
            raise MemoryError
        parts.append(part)
    return {"text": "".join(parts)}


def _raise(_message: object) -> None:
    raise _RefusedError


def _strftime(unix: float, form: str) -> str:
    return datetime.fromtimestamp(unix, timezone.utc).strftime(form)


def _tojson(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == "__main__":
    main()
