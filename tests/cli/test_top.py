"""``kvoffload top``: what it shows, at two widths; several engines; faults, in one line."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from http.server import BaseHTTPRequestHandler

import pytest
from hypothesis import given
from hypothesis import strategies as st

for module in ("click", "rich", "prometheus_client"):
    pytest.importorskip(module, reason="the command needs the watch extra")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from kvoffload import IMPLEMENTATION, CPUOffloadingManager  # noqa: E402
from kvoffload.cli import main, top  # noqa: E402
from kvoffload.watch import Watch, scraped  # noqa: E402
from kvoffload.watch.prometheus import WatchCollector  # noqa: E402
from kvoffload.watch.scraped import Engine, Shadow, advise, read_engines, view  # noqa: E402
from tests.blocks import block_hash  # noqa: E402
from tests.watch.watched import SECRET, serve, serving  # noqa: E402

from .conftest import run_here  # noqa: E402

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(IMPLEMENTATION == "python", reason="a watch needs the extensions"),
]


ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n", r"\x": r"\x"}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(top, "TIMEOUT", 300.0)


@pytest.fixture(scope="module")
def exported() -> bytes:
    """Return what a watch exports after a run in which twice the memory would pay."""
    watch = Watch(max_rate=1.0, slots=2**20, policy_slots=2**20, secret=SECRET)
    manager = CPUOffloadingManager(16, 600, watch=watch)
    rng = random.Random(1)
    for _ in range(1_000):
        document = min(int(rng.expovariate(1 / 40)), 149)
        serve(manager, [block_hash(100 * document + position) for position in range(12)])
    manager.prepare_store([block_hash(-1)])
    registry = CollectorRegistry()
    registry.register(WatchCollector(watch, {"engine": "0"}))
    return generate_latest(registry)


TOO_MUCH = {
    "/bytes": "#" * (top.MOST_BYTES + 1),
    "/line": "kvoffload_asked_blocks_total " + "9" * 2**20 + "x\n",
    "/error": "kvoffload_asked_blocks_total{" + "a" * 8_000 + "\n",
    "/lines": "kvoffload_asked_blocks_total 1\n" * 140_000,
    "/engines": "".join(f'kvoffload_asked_blocks_total{{e="{n}"}} 1\n' for n in range(5_000)),
}


@pytest.fixture
def server(exported: bytes) -> Iterator[str]:
    """Serve it; below /empty nothing of a watch, below /broken no metrics at all, /cut a part."""
    bodies = {"/metrics": exported, "/empty": b"up 1\n", "/broken": b"\xff kvoffload_{{{ 12\n"}
    bodies["/cut"] = exported[:-100]
    bodies |= {path: text.encode() for path, text in TOO_MUCH.items()}

    def answer(client: BaseHTTPRequestHandler) -> None:
        body = bodies.get(client.path)
        client.send_response(404 if body is None else 200)
        if client.path == "/cut":
            client.send_header("Content-Length", str(len(exported)))
        client.end_headers()
        client.wfile.write(body or b"")

    with serving(answer) as address:
        yield address


def command(*arguments: str) -> tuple[int, str, str]:
    return astuple(run_here("top", *arguments))


@pytest.mark.parametrize("columns", [80, 200])
def test_one_screen(server, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = command(server, "--once")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= columns
    assert re.match(r"hit ratio \d+\.\d % of 12,000 blocks since the start", lines[0])
    assert "policy lru, 600 blocks of memory" in lines[1]
    assert re.search(r"^lru +2× +\d+\.\d % +\d\.\d +█+", out, re.MULTILINE)
    assert re.search(r"^lru +0\.25× +- +not enough data: few sampled blocks", out, re.MULTILINE)
    assert re.search(r"^lru +8× +\d+\.\d % +\d\.\d +unreliable: memory not full", out, re.MULTILINE)
    assert re.search(r"^2× memory: \+\d+\.\d ± \d\.\d points of hit ratio\.", out, re.MULTILINE)
    assert re.search(r"never seen, or long ago +\d+\.\d %", out)
    assert re.search(r"overdue stores, blocks +0", out)


def test_json(server):
    code, out, _ = command(server, "--json")
    looked = json.loads(out)
    assert (code, looked["engines"], looked["policy"]) == (0, 1, "lru")
    assert looked["hit_ratio"] == 1 - looked["missed"] / looked["asked"]
    assert [s["hit_ratio"] for s in looked["shadows"] if s["memory"] == 0.25] == [None]
    assert 0 < len(looked["advice"]) <= 3
    assert looked["faults"] == {}
    code, out, err = command(server, server + "/missing", "--json")
    looked = json.loads(out)
    assert (code, looked["engines"]) == (0, 1)
    assert looked["faults"] == {f"http://{server}/missing": "HTTP status 404"}
    assert err == f"note: http://{server}/missing: HTTP status 404\n"


def test_engines_add_up(exported):
    engines = read_engines("a", exported.decode()) + read_engines("b", exported.decode())
    one, two = view(engines[:1]), view(engines)
    assert (two.engines, two.asked, two.capacity) == (2, 2 * one.asked, 2 * one.capacity)
    assert two.hit_ratio == one.hit_ratio
    ratios = {(s.policy, s.memory): s for s in one.shadows if s.hit_ratio is not None}
    for shadow in two.shadows:
        if shadow.hit_ratio is not None:
            alone = ratios[shadow.policy, shadow.memory]
            assert shadow.hit_ratio == pytest.approx(alone.hit_ratio)
            assert shadow.error == pytest.approx(alone.error / 2**0.5)


def test_counters_are_since_the_last_look(exported):
    engines = read_engines("a", exported.decode())
    for before in (engines, []):  # the last look may have failed
        assert (view(engines, before).asked, view(engines, before).hit_ratio) == (0, None)
    engines[0].values["asked_blocks"][()] += 7
    assert view(engines, read_engines("a", exported.decode())).asked == 7
    anew = Engine(engines[0].labels, {"asked_blocks": {(): 2e4}, "missed_blocks": {(): 1.0}})
    assert view([anew], engines).asked == 2e4  # it was started again


def test_the_names_of_engines_are_read(exported):
    for prefix in ("vllm:", "ray_vllm_"):
        text = exported.decode().replace("kvoffload_", f"{prefix}kvoffload_")
        assert view(read_engines("a", text)).asked == 12_000


def test_advice_is_given_from_a_point_on():
    marked = [Shadow("lru", 1.0, 0.3, 0.0, ("in_flight",)), Shadow("lru", 2.0, 0.9, 0.0)]
    assert advise(["lru"], marked) == ["2× memory: +60.0 ± 0.0 points of hit ratio."]

    def points(more: float, error: float, policy: float = 0.3) -> list[Shadow]:
        return [
            Shadow("lru", 1.0, 0.3, 0.0),
            Shadow("lru", 2.0, more, error),
            Shadow("lru", 8.0, more, error),
            Shadow("arc", 1.0, policy, 0.001),
        ]

    assert advise(["lru"], points(0.319, 0.01)) == []
    assert advise(["lru"], points(0.383, 0.004)) == ["2× memory: +8.3 ± 0.4 points of hit ratio."]
    assert advise(["lru"], points(0.2, 0.0, 0.32)) == [
        "Policy arc at this memory: +2.0 ± 0.1 points of hit ratio."
    ]
    assert advise(["lru", "arc"], points(0.9, 0.0)) == []
    assert advise(["arc"], points(0.9, 0.0)) == []


def test_nothing_is_advised_on_a_point_with_a_mark(exported):
    """The marks leave the process, and those of one engine are those of the fleet."""
    text = exported.decode()
    clean = re.sub(r'marks="[^"]*"', 'marks="none"', text)
    marked = re.sub(
        r'(memory="(?:2|4|8)",policy="lru",marks|marks)="[^"]*"', r'\1="in_flight"', text
    )
    assert view(read_engines("a", clean)).advice
    assert view(read_engines("a", marked)).advice == ()
    fleet = read_engines("a", clean) + read_engines("b", marked)
    assert view(fleet).advice == ()
    (twice,) = [s for s in view(fleet).shadows if (s.policy, s.memory) == ("lru", 2.0)]
    assert (twice.marks, twice.hit_ratio is None) == (("in_flight",), False)
    # Of an exporter that tells no marks nothing is known.
    assert view(read_engines("a", re.sub(r',marks="[^"]*"', "", text))).advice == ()
    filling = [s.memory for s in view(read_engines("a", text)).shadows if "filling" in s.marks]
    assert 8.0 in filling


def test_gauges_that_vllm_has_besides_change_nothing(exported):
    """Those of marks that have gone are NaN, and each API server of 0.31 has its own, by pid."""
    text = exported.decode()
    line = 'kvoffload_shadow_hit_ratio{engine="0",marks="in_flight",memory="2",policy="lru"} NaN\n'
    told = re.sub(r"(?m)^(\w+(?<!_total)){(.*)$", r'\1{pid="7",\2\n\1{pid="8",\2', text)
    assert told.count("pid") > 40
    for more in (text + line, told):
        assert view(read_engines("a", more)) == view(read_engines("a", text))


def test_an_engine_that_was_not_asked_has_no_say(exported):
    one = read_engines("a", exported.decode())
    idle = [Engine((("url", "b"),), {"window_asked_blocks": {(): 0.0}, "watch_info": {}})]
    assert view(one).shadows == view(one + idle).shadows


def test_a_point_that_one_engine_lacks_is_not_given(exported):
    engines = read_engines("a", exported.decode()) + read_engines("b", exported.decode())
    del engines[1].values["shadow_hit_ratio"]["lru", "2", "none"]
    found = {(s.policy, s.memory): s.hit_ratio for s in view(engines).shadows}
    assert found["lru", 2.0] is None
    assert found["lru", 4.0] is not None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/empty", "no metrics of a watch"),
        ("/missing", "HTTP status 404"),
        ("/cut", "bytes read, 100 more expected"),
        *((path, "") for path in ("/broken", *TOO_MUCH)),
    ],
)
def test_what_cannot_be_read_or_is_too_much_is_one_short_line(server, path, message):
    code, out, err = command(server + path, "--once")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("kvoffload: http://")
    assert message in err
    assert len(err) < 300


def drip(*pieces: bytes, then: bytes = b"#", pause: float = 0.05) -> Callable[..., None]:
    """Return a server's part: it sends pieces, then the same again and again."""

    def serve(connection: socket.socket, stop: threading.Event) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(b"".join(pieces))
            while not stop.wait(pause):
                connection.sendall(then)

    return serve


HOSTILE = {
    "silent": drip(then=b""),
    "status": drip(b"HTTP/1.0 2", then=b"0"),
    "head": drip(b"HTTP/1.0 200 OK\r\nX: "),
    "continue": drip(then=b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.001),
    "body": drip(b"HTTP/1.0 200 OK\r\n\r\n"),
    "chunk": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "trailers": drip(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", then=b"a: b\r\n", pause=0.001
    ),
    "error": drip(b"HTTP/1.0 500 No\r\nX: "),
    # the head of a record of 16 KiB: the handshake is never whole
    "https": drip(b"\x16\x03\x03\x40\x00"),
}


@pytest.fixture
def hostile() -> Iterator[tuple[dict[str, str], dict[str, threading.Thread], threading.Event]]:
    """Serve each until the last event, in a thread that ends when its client is gone."""
    stop = threading.Event()

    def serve(name: str, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        threading.Thread(target=HOSTILE[name], args=(connection, stop)).start()
        with contextlib.suppress(ConnectionError), connection:
            while connection.recv(2**12):
                pass

    with contextlib.ExitStack() as stack:
        urls, threads = {}, {}
        for name in HOSTILE:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            scheme = "https" if name == "https" else "http"
            urls[name] = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/metrics"
            threads[name] = threading.Thread(target=serve, args=(name, listener), daemon=True)
            threads[name].start()
        yield urls, threads, stop
        stop.set()


def test_slow_urls_are_looked_at_side_by_side_and_not_again(monkeypatch, hostile):
    """None of their reads would ever time out; each ends once its server does."""
    monkeypatch.setattr(top, "TIMEOUT", 2.0)
    urls, threads, stop = hostile
    fleet = top._Fleet(list(urls.values()))
    # Newer Pythons give up a server that says to continue, or sends trailers, without an end.
    fault = r"(no whole answer within 2 s|.*timed out|got more than \d+ (interim resp|trail).*)"
    start = time.monotonic()
    engines, faults = fleet.look()
    assert time.monotonic() - start < 2 * len(urls), "one is not looked at before the other"
    assert engines == []
    assert list(faults) == list(urls.values())
    for name, url in urls.items():
        assert re.fullmatch(fault, faults[url]), name
    late = [each for each in threading.enumerate() if isinstance(each, top._Look)]
    assert len(late) > 1
    fleet.look()
    again = [each for each in threading.enumerate() if isinstance(each, top._Look)]
    assert {each for each in late if each.is_alive()} <= set(again)
    assert len({each.url for each in again}) == len(again)
    stop.set()
    for each in (*threads.values(), *again):
        each.join(300)
        assert not each.is_alive()


def test_a_look_that_cannot_be_ended_is_not_repeated(monkeypatch):
    """As one that waits for a name server."""
    monkeypatch.setattr(top, "TIMEOUT", 0.2)
    release = threading.Event()
    asked = []

    def connect(address: object, *_: object) -> socket.socket:
        asked.append(address)
        release.wait(300)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "create_connection", connect)
    fleet = top._Fleet(["http://localhost:1/metrics"])
    for _ in range(3):
        engines, faults = fleet.look()
        assert engines == []
        assert faults == {"http://localhost:1/metrics": "no whole answer within 0.2 s"}
    assert len(asked) == 1
    release.set()


def test_redirects_are_followed_and_their_bodies_are_not_read(exported):
    """vLLM's server redirects to a path with a slash; another sends a body without an end."""
    sent = 0

    def answer(client: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        elsewhere = {"/metrics": "/metrics/", "/ftp": "ftp://127.0.0.1/", "/round": "/round"}
        to = elsewhere.get(client.path)
        client.send_response(200 if to is None else 307)
        if to is not None:
            client.send_header("Location", to)
        client.end_headers()
        with contextlib.suppress(OSError):
            while to == "/metrics/" and sent < 2**26:
                sent += client.wfile.write(bytes(2**16)) or 0
            client.wfile.write(exported if to is None else b"")

    with serving(answer) as url:
        assert command(url, "--once")[0] == 0
        assert sent < 2**24
        for path in ("/ftp", "/round"):
            code, out, err = command(url + path, "--once")
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert ("not HTTP" in err) == (path == "/ftp")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("shadow_hit_ratio", ("1e6", "1e300", "-0.5")),
        ("shadow_error", ("1e300",)),
        ("asked_blocks_total", ("-5.0", "1e300")),
        ("missed_blocks_total", ("NaN",)),
        ("window_asked_blocks", ("1e308",)),
    ],
)
def test_a_value_that_no_watch_has_is_refused(exported, name, values):
    for value in values:
        line = rf"(?m)^(kvoffload_{name}\S*) \S+\n"
        text = re.sub(line, rf"\1 {value}\n", exported.decode())
        assert text != exported.decode()
        with pytest.raises(ValueError, match=rf"kvoffload_{name} must be 0 \.\.\. \S+, got"):
            read_engines("a", text)


def test_causes_that_cancel_are_refused_or_no_share_of_anything():
    line = 'kvoffload_sampled_missed_blocks_total{{cause="{}"}} {}\n'
    with pytest.raises(ValueError, match="must be 0"):
        read_engines("a", line.format("evicted", 5) + line.format("pending", -5))
    for value in ("0", "5e-324", "9e18"):
        text = "".join(line.format(cause, value) for cause in ("evicted", "pending"))
        causes = view(read_engines("a", text + "kvoffload_asked_blocks_total 1\n")).causes
        assert sum(causes.values()) in (0, pytest.approx(1))


def num_lines(function: Callable[..., object], *arguments: object) -> int:
    """Return how many lines of Python a call runs."""
    count = 0

    def trace(_frame: object, event: str, _argument: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(former)
    return count


def parsed_by_prometheus(line: str) -> tuple[dict[str, str], float] | None:
    """Return the labels and the value of a line as prometheus_client reads it."""
    with contextlib.suppress(ValueError, IndexError):
        for family in text_string_to_metric_families(f"{line}\n"):
            for sample in family.samples:
                return sample.labels, sample.value
    return None


@given(
    label=st.lists(st.sampled_from([*ESCAPES, " ", ",", "=", "{", "}", '"', "#", "é"]), max_size=6),
    ends=st.sampled_from(["", "}", ",}", " }", ',b="c"}', ', b = "c" }', ',e="c"}', ',1="c"}']),
    value=st.sampled_from(["1", " 1", "\t1 ", " +Inf", " 1e3 5", " -5", " x", " 1_0", "", " 1 x"]),
)
def test_lines_are_read_as_prometheus_reads_them(label, ends, value):
    line = f'kvoffload_hint_factor{{e="{"".join(label)}"{ends}{value}'
    start = scraped._NAME.match(line)
    try:
        found = scraped._sample(line, start.end(), has_labels=True)
    except ValueError:
        found = None
    assert found == parsed_by_prometheus(line)


@pytest.mark.parametrize("escaped", ESCAPES)
def test_a_label_of_escapes_is_read_in_linear_time(escaped):
    """No expression tries a character twice; with a copy per escape it would be minutes."""
    line = f'kvoffload_asked_blocks{{e="{escaped * 2**20}"}} 1'
    start = scraped._NAME.match(line)
    labels, value = scraped._sample(line, start.end(), has_labels=True)
    assert labels == {"e": ESCAPES[escaped] * 2**20}
    assert value == 1


@pytest.mark.parametrize("label", ["cause", "policy"])
def test_labels_are_bounded_and_their_sums_take_no_time(exported, label):
    metric, rest = {
        "cause": ("sampled_missed_blocks_total", ""),
        "policy": ("shadow_withheld", ',memory="2",reason="x"'),
    }[label]
    line = f'kvoffload_{metric}{{{{engine="{{}}",{label}="{{}}"{rest}}}}} 1\n'
    many = "".join(line.format(0, index) for index in range(2000))
    with pytest.raises(ValueError, match="more than 1,024 values of labels"):
        read_engines("a", many)
    at_most = "".join(line.format(index % 4000, index % 1000) for index in range(120_000))
    asked = "".join(f'kvoffload_window_asked_blocks{{engine="{n}"}} 1\n' for n in range(4000))
    engines = read_engines("a", at_most + asked)
    assert 0 < num_lines(view, engines, engines) < 4000 * 1000  # as in a loop over both


def test_control_characters_are_not_printed(exported):
    text = exported.decode().replace('policy="lru"', 'policy="\x1b[31mlru"')
    found = view(read_engines("a", text))
    console = top.Console(width=80)
    with console.capture() as captured:
        console.print(top.screen(found, "now", {"url": "\x1b]0;title\x07"}, 80))
    assert "\x1b" not in captured.get()


def test_the_dashboard_and_the_rules_are_printed(capsys):
    assert main(["dashboard", "grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["uid"] == "kvoffload"
    assert main(["dashboard", "rules", "--prefix", "vllm:"]) == 0
    assert "rate(vllm:kvoffload_missed_blocks_total[15m])" in capsys.readouterr().out
    assert main(["dashboard", "rules", "--prefix", "{x"]) == 2
