"""Chat templates: whatever one does, it reaches nothing and ends only its own process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the tokenizer extra")

from kvoffload.traces import TraceError, chat_template
from kvoffload.traces.chat_template import ChatTemplate
from kvoffload.traces.errors import BadLineError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs bounds of the system")

SECRET = "qZx7secret"
MESSAGES = [{"role": "user", "content": SECRET}]
TOO_LONG = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def turned(step):
    """Return a template that repeats a step, with a namespace n."""
    loop = "{% for i in range(60) %}" + step + "{% endfor %}"
    return "{% set n = namespace(x='a') %}" + loop


BEYOND = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ('{0.__globals__[json]}'|safe).format(raise_exception) }}",
    "{{ messages.append(1) }}",
    "{{ '%999999999d' % 1 }}",
    "{% set x = ('a'|safe).center(600000000) %}",
    "{% set x = (0).to_bytes(900000000, 'big') %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    (
        "{% set n = namespace(x=[]) %}{% for i in range(5000) %}"
        "{% set n.x = [n.x, range(99999)|list] %}{% endfor %}"
    ),
    pytest.param(TOO_LONG, marks=pytest.mark.thorough),
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    turned("{% set n.x = n.x ~ n.x %}"),
    "{% include 'x' %}",
    "{{ raise_exception(messages[0].content) }}",
    "{{ messages[0].content.nothing[messages[0].content].nothing }}",
]


@pytest.mark.parametrize("template", BEYOND)
def test_a_template_that_leaves_its_bounds_is_one_line_without_text(template):
    made = ChatTemplate("model", template, None, {})
    with pytest.raises(BadLineError) as caught:
        made.render(MESSAGES, None, 0.0)
    text = "".join(traceback.format_exception(caught.value))
    assert str(caught.value).startswith("the chat template must ")
    assert "\n" not in str(caught.value)
    assert SECRET not in text


def test_the_process_has_no_environment_no_descriptor_and_bounds(monkeypatch):
    monkeypatch.setenv("A_SECRET", SECRET)
    inherited, other = os.pipe()
    os.set_inheritable(inherited, True)
    try:
        pid = ChatTemplate("model", "x", None, {})._child._process.pid
        made = ChatTemplate("model", "x", None, {})
        process = Path("/proc", str(made._child._process.pid))
        assert pid != int(process.name)
        assert (process / "environ").read_bytes() == b""
        assert {link.name for link in (process / "fd").iterdir()} == {"0", "1", "2"}
        limits = {
            line[:26].strip(): line[26:].split()[:2]
            for line in (process / "limits").read_text().splitlines()
        }
    finally:
        os.close(inherited)
        os.close(other)
    assert limits["Max address space"] == [str(2**29)] * 2
    assert (
        limits["Max open files"] == limits["Max processes"] == limits["Max file size"] == ["0"] * 2
    )


def test_one_process_renders_all_requests_and_ends_with_the_template():
    made = ChatTemplate("model", "{{ messages[0].content }}{{ bos }}", "tools", {"bos": "b"})
    pid = made._child._process.pid
    assert [made.render(MESSAGES, None, 0.0) for _ in range(3)] == [SECRET + "b"] * 3
    assert made.render(MESSAGES, [{"name": "f"}], 0.0) == "tools"
    assert made._child._process.pid == pid
    del made
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_after_a_bomb_others_are_rendered_until_there_are_too_many():
    made = ChatTemplate("model", "{{ messages[0].content * messages[0].times }}", None, {})
    bomb = [{"content": "x", "times": 10**10}]
    for _ in range(chat_template.MOST_ENDED - 1):
        with pytest.raises(BadLineError, match=r"must stay within its bounds .*got more: model$"):
            made.render(bomb, None, 0.0)
        assert made.render([{"content": "x", "times": 2}], None, 0.0) == "xx"
    with pytest.raises(TraceError, match="model: the chat template must stay within its bounds"):
        made.render(bomb, None, 0.0)


def test_a_process_that_does_not_answer_is_ended(monkeypatch):
    made = ChatTemplate("model", "x", None, {})
    process = made._child._process
    monkeypatch.setattr(chat_template, "SECONDS", 0.05)
    os.kill(process.pid, signal.SIGSTOP)
    large = [{"content": "x" * 2**20}]  # more than a pipe holds
    with pytest.raises(BadLineError, match="must stay within its bounds"):
        made.render(large, None, 0.0)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "answer", [b"", b"x\n", b"[]\n", b"[" * 10**5 + b"\n", b'{"text": 1', b"{}\n{}\n"]
)
def test_an_answer_that_is_none_ends_the_process(monkeypatch, answer):
    made = ChatTemplate("model", "x", None, {})
    monkeypatch.setattr(type(made._child), "_received", lambda *_: answer)
    process = made._child._process
    with pytest.raises(BadLineError, match="must stay within its bounds"):
        made.render(MESSAGES, None, 0.0)
    assert process.returncode is not None


def test_texts_of_any_characters_come_back():
    made = ChatTemplate("model", "{{ messages[0].content }}", None, {})
    for text in ("é\N{GRINNING FACE}\0\n", "\ud83d alone", "x" * 2**21):
        assert made.render([{"role": "user", "content": text}], None, 0.0) == text


def test_a_template_without_bounds_is_refused_with_a_way_on(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(TraceError, match=r"model: .* as Linux does: give the tokenizer.json"):
        ChatTemplate("model", "x", None, {})
