"""``kvoffload top``: what it shows, at two widths; several engines; faults, in one line."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

for module in ("click", "rich", "prometheus_client"):
    pytest.importorskip(module, reason="the command needs the watch extra")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from kvoffload import CPUOffloadingManager  # noqa: E402
from kvoffload.cli import main, top  # noqa: E402
from kvoffload.watch import Watch  # noqa: E402
from kvoffload.watch.prometheus import WatchCollector  # noqa: E402
from kvoffload.watch.scraped import Engine, Shadow, advise, read_engines, view  # noqa: E402
from tests.blocks import block_hash  # noqa: E402
from tests.watch.watched import SECRET, serve  # noqa: E402


@pytest.fixture(scope="module")
def exported() -> bytes:
    """Return what a watch exports after a run in which twice the memory would pay."""
    watch = Watch(max_rate=1.0, slots=2**20, policy_slots=2**20, secret=SECRET)
    manager = CPUOffloadingManager(16, 600, watch=watch)
    rng = random.Random(1)
    for _ in range(1_000):
        document = min(int(rng.expovariate(1 / 40)), 149)
        serve(manager, [block_hash(100 * document + place) for place in range(12)])
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
    """Serve it; below /empty nothing of a watch, below /broken no metrics at all."""
    bodies = {"/metrics": exported, "/empty": b"up 1\n", "/broken": b"\xff kvoffload_{{{ 12\n"}
    bodies |= {path: text.encode() for path, text in TOO_MUCH.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture
def command(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str, columns: int = 80) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        code = main(["top", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize("columns", [80, 200])
def test_one_screen(server, command, columns):
    code, out, err = command(server, "--once", columns=columns)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= columns
    assert re.match(r"hit ratio \d+\.\d % of 12,000 blocks since the start", lines[0])
    assert "policy lru, 600 blocks of memory" in lines[1]
    assert re.search(r"^lru +2× +\d+\.\d % +\d\.\d +█+", out, re.MULTILINE)
    assert re.search(r"^lru +0\.25× +- +not enough data: few sampled blocks", out, re.MULTILINE)
    assert re.search(
        r"^lru +8× +\d+\.\d % +\d\.\d +not to be relied on: memory not full", out, re.MULTILINE
    )
    assert re.search(r"^2× memory: \+\d+\.\d ± \d\.\d points of hit ratio\.", out, re.MULTILINE)
    assert re.search(r"never seen, or long ago +\d+\.\d %", out)
    assert re.search(r"overdue stores, blocks +0", out)


def test_json(server, command):
    code, out, _ = command(server, "--json")
    looked = json.loads(out)
    assert (code, looked["engines"], looked["policy"]) == (0, 1, "lru")
    assert looked["hit_ratio"] == 1 - looked["missed"] / looked["asked"]
    assert [s["hit_ratio"] for s in looked["shadows"] if s["memory"] == 0.25] == [None]
    assert 0 < len(looked["advice"]) <= 3


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
    assert view(engines, engines).asked == 0
    assert view(engines, engines).hit_ratio is None
    engines[0].values["asked_blocks"][()] += 7
    assert view(engines, read_engines("a", exported.decode())).asked == 7
    anew = Engine(engines[0].labels, {"asked_blocks": {(): 3.0}})
    assert view([anew], engines).asked == 3  # it was started again


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


def test_a_gauge_that_is_no_number_is_no_point(exported):
    """vLLM keeps the series of marks that have gone, and says NaN."""
    line = 'kvoffload_shadow_hit_ratio{engine="0",marks="in_flight",memory="2",policy="lru"} NaN\n'
    one, two = (
        view(read_engines("a", text)) for text in (exported.decode(), exported.decode() + line)
    )
    assert one.shadows == two.shadows


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
        ("/broken", ""),
    ],
)
def test_what_cannot_be_read_is_one_line(server, command, path, message):
    code, out, err = command(server + path, "--once")
    assert (code, out) == (1, "")
    assert err.startswith("kvoffload: http://")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("path", TOO_MUCH)
def test_what_is_too_much_is_said_in_a_short_line(server, command, path):
    code, out, err = command(server + path, "--once")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert len(err) < 300


def test_slow_urls_are_looked_at_side_by_side_and_left_at_the_deadline(
    server, command, monkeypatch
):
    """One answers a byte at a time, another not at all: neither read would ever time out."""
    monkeypatch.setattr(top, "TIMEOUT", 2.0)
    stop = threading.Event()

    def trickle(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while not stop.wait(0.1):
                    connection.sendall(b"#")

    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        urls = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        threads = [threading.Thread(target=trickle, args=(each,)) for each in listeners[:3]]
        for thread in threads:
            thread.start()
        start = time.monotonic()
        code, out, err = command(server, *urls, "--once")
        took = time.monotonic() - start
        stop.set()
        for thread in threads:
            thread.join()
    assert code == 0
    assert "12,000 blocks" in out
    assert len(re.findall(r"no whole answer within 2 s|timed out", err)) == 6
    assert 2 <= took < 11  # one after the other it would be 12


def test_a_url_that_does_not_answer_is_a_note_where_another_does(server, command):
    code, _, err = command(server, server + "/missing", "--once")
    assert code == 0
    assert re.fullmatch(r"note: http://.*/missing: HTTP status 404\n", err)


def test_bad_urls(command):
    for url in ("ftp://host", "http://", "http://host:port"):
        code, _, err = command(url, "--once")
        assert (code, err.count("\n")) == (2, 1)
        assert "URL must be an address of http or https" in err


def test_control_characters_are_not_printed(exported, server, command):
    text = exported.decode().replace('policy="lru"', 'policy="\x1b[31mlru"')
    found = view(read_engines("a", text))
    from rich.console import Console

    from kvoffload.cli.top import screen

    console = Console(width=80)
    with console.capture() as captured:
        console.print(screen(found, "now", ["\x1b]0;title\x07"], 80))
    assert "\x1b" not in captured.get()


def test_the_dashboard_and_the_rules_are_printed(capsys):
    assert main(["dashboard", "grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["uid"] == "kvoffload"
    assert main(["dashboard", "rules", "--prefix", "vllm:"]) == 0
    assert "rate(vllm:kvoffload_missed_blocks_total[15m])" in capsys.readouterr().out
    assert main(["dashboard", "rules", "--prefix", "{x"]) == 2
