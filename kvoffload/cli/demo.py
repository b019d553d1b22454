"""``kvoffload demo``: a manager at work without an engine, whose watch serves metrics."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import click

from kvoffload import CPUOffloadingManager
from kvoffload._extras import require
from kvoffload.replay.requests import key_of
from kvoffload.traces import Request

from . import _options
from ._output import check_outputs
from ._sources import Generated, Reading, Source, open_or_generate
from ._terminal import note

if TYPE_CHECKING:
    from kvoffload.watch import Watch

ADDRESS = "127.0.0.1"
LABELS = {"model_name": "demo", "engine": "0"}
"""Labels of every series, as vLLM has them: rules and dashboard add up by them."""
GENERATED_CAPACITY = "2000"
TRACE_CAPACITY = "5%"
ENDLESS = 2**62
"""Requests of the generated workload, which Ctrl-C ends."""

NEXT_STEPS = """\
look at it:
  kvoffload top {target}

scrape it, with this as prometheus.yml:
  global: {{scrape_interval: 5s, evaluation_interval: 5s}}
  rule_files: [rules.yml]
  scrape_configs:
    - job_name: kvoffload
      static_configs: [{{targets: ["{target}"]}}]

rules for Prometheus, and a dashboard that Grafana imports{variable}:
  kvoffload dashboard rules{option} > rules.yml
  kvoffload dashboard grafana > kvoffload.json
"""


@click.command(
    epilog=_options.examples(
        "kvoffload demo", "kvoffload demo trace.jsonl.gz --policy arc --rate 20 --port 9500"
    )
)
@click.argument("traces", metavar="[TRACE]...", nargs=-1)
@click.option(
    "--rate",
    type=_options.NumberRange(0.01, 100_000),
    default=100.0,
    show_default=True,
    help="Requests per second.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=9400,
    show_default=True,
    help=f"Port on {ADDRESS}; 0 takes a free one.",
)
@click.option(
    "--policy",
    default="lru",
    show_default=True,
    **_options.of_text("POLICY", _options.read_policy),
    help="The manager's policy: NAME or 'NAME?OPTION=VALUE' (see kvoffload policies), or "
    "MODULE:CLASS for your own.",
)
@click.option(
    "--capacity",
    **_options.of_text("SIZE", _options.read_capacity),
    help="Memory of the manager: blocks (4096), a share of the unique blocks (5%), or a size "
    f"(64GiB, with --block-bytes).  [default: {GENERATED_CAPACITY}; {TRACE_CAPACITY} of a "
    "TRACE]",
)
@_options.block_bytes_option
@click.option(
    "--prefix",
    default="vllm:",
    show_default=True,
    help="Text before kvoffload_ in the names of the metrics.",
)
@_options.workload_seed_option
@_options.reading_options
def demo(
    traces: tuple[str, ...],
    *,
    rate: float,
    port: int,
    policy: str,
    capacity: _options.Capacity | None,
    block_bytes: int | None,
    prefix: str,
    seed: int | None,
    reading: Reading,
) -> None:
    """Serve the metrics of a manager at work, without an engine.

    Use it to try kvoffload top, Prometheus and the dashboard: a watched manager answers the
    requests of a trace at --rate until Ctrl-C. Without TRACE, requests are generated without end.

    The metrics have the names and labels that vLLM gives to those of a watch. Nothing is copied,
    and stores end at once, so no block is pending and no transfer is overdue. The watch samples
    more blocks than it would in an engine, so that estimates are ready within a minute.
    """
    _options.check_prefix(prefix)
    check_outputs(traces)
    require("prometheus_client", "kvoffload demo", "watch")
    from kvoffload.watch import Watch

    with open_or_generate(traces, ENDLESS, seed, reading) as source:
        given = TRACE_CAPACITY if traces else GENERATED_CAPACITY
        asked = capacity or _options.read_capacity(given)
        blocks = _blocks(source, asked, block_bytes)
        # Up to 16,384 blocks of memory, everything is sampled that the shadows have room for.
        watch = Watch(max_rate=1.0)
        manager = _options.manager_of(policy, blocks, "block", watch=watch)
        with _serving(watch, port, prefix) as target:
            click.echo(
                f"serving http://{target}/metrics until Ctrl-C: {source.name}, "
                f"{rate:g} requests per second; {policy}, {blocks:,} blocks of memory\n"
            )
            variable = f" (variable prefix: {prefix})" if prefix else ""
            option = f" --prefix {prefix}" if prefix else ""
            click.echo(NEXT_STEPS.format(target=target, variable=variable, option=option), nl=False)
            served = 0
            for request in _paced(source.requests, rate):
                _serve(manager, request.hash_ids)
                served += 1
            ended = f"the trace ended after {served:,} requests"
            note(f"{ended}; its metrics are served until Ctrl-C")
            while True:
                time.sleep(3600)


def _blocks(source: Source, asked: _options.Capacity, block_bytes: int | None) -> int:
    """Return a capacity in blocks; a share needs a pass over the trace."""
    unique = None
    if asked.percent is not None:
        if isinstance(source.trace, Generated):
            raise click.UsageError(
                f"--capacity must be blocks or a size without TRACE, got {asked.text!r}"
            )
        unique = source.survey("reading", None).unique_blocks
    block_bytes = block_bytes or source.trace.block_bytes
    return asked.resolve(block_bytes, unique, needs="--block-bytes")


def _serve(manager: CPUOffloadingManager, hash_ids: Sequence[int]) -> None:
    """Serve a request as an engine does."""
    request = manager.begin([*map(key_of, hash_ids)])
    hits = request.lookup()
    request.prepare_load(0, hits)
    request.complete_load(0, hits)
    request.prepare_store()
    request.finish()
    request.complete_store()


@contextmanager
def _serving(watch: Watch, port: int, prefix: str) -> Iterator[str]:
    """Serve the metrics of a watch in threads; give the host and port."""
    from prometheus_client import CollectorRegistry, generate_latest

    from kvoffload.watch.prometheus import WatchCollector

    class EngineCollector(WatchCollector):
        """A collector under the names that an engine gives to the metrics."""

        def __init__(self) -> None:
            super().__init__(watch, LABELS)
            self._prefix = prefix + self._prefix

    registry = CollectorRegistry()
    registry.register(EngineCollector())

    class Handler(BaseHTTPRequestHandler):
        """One format for all: in others, prometheus_client 0.23 to 0.26 turn : into _."""

        timeout = 10  # seconds to wait for a request

        def do_GET(self) -> None:
            body = generate_latest(registry)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise click.UsageError(
            f"--port must be free, got {port}, on which another program listens"
        ) from None
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{ADDRESS}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _paced(requests: Iterable[Request], rate: float) -> Iterator[Request]:
    """Yield requests at even intervals, without waiting for a late one."""
    start = time.monotonic()
    for index, request in enumerate(requests):
        wait = start + index / rate - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        yield request
