"""``kvoffload top``: the findings of watches, on one screen."""

from __future__ import annotations

import dataclasses
import http.client
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvoffload._printable import printable
from kvoffload.advise.units import change_text, count_text, percent_text

from ._options import NumberRange, examples, json_option
from ._terminal import note, print_json

if TYPE_CHECKING:
    from kvoffload.watch.scraped import Engine, HintTrials, View

TIMEOUT = 10.0
"""Seconds allowed for the whole answer of a URL."""
MOST_BYTES = 2**24
_LATE = "no whole answer within {:g} s"
MOST_OF_FAULT = 200
"""Longest message about a URL, in characters."""
WIDEST_BAR = 100

CAUSES = {
    "broken_prefix": "present, but behind a gap",
    "pending": "still being stored",
    "evicted": "evicted",
    "declined": "not admitted",
    "refused": "no room: store refused",
    "failed": "store failed",
    "reset": "cache was reset",
    "never_or_long_ago": "never seen, or long ago",
}
MARKS = {
    "biased": "miniatures of this policy are inaccurate",
    "filling": "memory not full yet",
    "hints": "many sessions say that they end",
    "in_flight": "stores overlap",
    "learning": "still learning",
    "long_requests": "requests longer than memory",
    "tails": "windows or states missed",
}
REASONS = {
    "few_misses": "few misses",
    "few_slots": "few sampled blocks",
    "no_full_group": "no full KV group",
    "own_policy": "a policy of your own",
    "wide": "error too large",
}


@click.command(epilog=examples("kvoffload top http://localhost:8000/metrics --once"))
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@click.option("--once", is_flag=True, help="Scrape once, print, and exit.")
@json_option
@click.option(
    "--interval",
    type=NumberRange(0.1, 3600),
    default=5.0,
    show_default=True,
    help="Seconds between two scrapes.",
)
def top(urls: tuple[str, ...], *, once: bool, as_json: bool, interval: float) -> None:
    """Show whether offloading pays, and what would pay more.

    Each URL is the address of an exporter, such as localhost:8000 or http://host:8000/metrics.
    Counters cover the time since the last scrape, with --once and --json since the start; the hit
    ratios of other sizes and policies cover the watches' own window. Several engines are added up.
    """
    fleet = _Fleet([_address(url) for url in urls])
    engines, faults = fleet.look()
    if not engines:
        raise OSError(": ".join(next(iter(faults.items()))))
    for fault in faults.items():
        note(": ".join(fault))
    from kvoffload.watch.scraped import view

    if as_json:
        print_json({**_as_object(view(engines)), "faults": faults})
        return
    console = Console(highlight=False)
    if once:
        with console.capture() as captured:
            console.print(screen(view(engines), "since the start", {}, console.width))
        click.echo(captured.get(), nl=False)
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        since, before = "since the start", engines
        shown = view(engines)
        while True:
            live.update(screen(shown, since, faults, console.width), refresh=True)
            time.sleep(interval)
            engines, faults = fleet.look()
            shown = view(engines, before)
            since, before = f"in the last {interval:g} s", engines


def _address(url: str) -> str:
    """Complete a URL; raise a usage error if it is not a URL."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(whole)
        if "@" in parts.netloc:  # urllib would not send them
            raise click.UsageError("URL must be without a user and a password, got it with one")
        _ = parts.port
    except ValueError as error:
        rule = "must be an address of http or https, with a port of at most 65535"
        raise click.UsageError(f"URL {rule}, got {url!r}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"URL must be an address of http or https, got {url!r}")
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    return urllib.parse.urlunsplit(parts._replace(path=path))


class _Fleet:
    """The URLs, scraped side by side, and their scrapes that have not ended."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(dict.fromkeys(urls))
        self._open: dict[str, _Look] = {}

    def look(self) -> tuple[list[Engine], dict[str, str]]:
        """Scrape all URLs; return the watches, and the reason for each URL without one.

        A scrape that is late, such as one that waits for a name server, is not repeated while it
        lasts.
        """
        engines: list[Engine] = []
        faults = {}
        late = {url: look for url, look in self._open.items() if look.is_alive()}
        self._open = {url: late.get(url) or _Look(url) for url in self._urls}
        deadline = time.monotonic() + TIMEOUT
        for url, look in self._open.items():
            if url not in late:
                look.join(max(0.0, deadline - time.monotonic()))
            if look.is_alive():
                faults[url] = _LATE.format(TIMEOUT)
            elif look.fault is not None:
                faults[url] = _cut(look.fault)
            else:
                engines += look.engines
        return engines, faults


class _Look(threading.Thread):
    """A scrape of one URL, at the same time as the others."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.engines: list[Engine] = []
        self.fault: str | None = None
        self.start()

    def run(self) -> None:
        """Scrape and read; a failure goes into `fault`."""
        from kvoffload.watch.scraped import read_engines

        try:
            self.engines = read_engines(self.url, _scraped(self.url).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            error.close()
            self.fault = f"HTTP status {error.code}"
        except (OSError, http.client.HTTPException) as error:
            self.fault = str(getattr(error, "reason", None) or error)
        except ValueError as error:
            self.fault = str(error)
        else:
            self.fault = None if self.engines else "no metrics of a watch"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A handler of redirects to HTTP that does not read their bodies, which may have no end."""

    def redirect_request(self, req: Any, fp: IO[bytes], *answer: Any) -> Any:
        """Return the next request; urllib would follow a redirect to FTP."""
        fp.close()
        url = answer[-1]
        if not url.startswith(("http:", "https:")):
            raise urllib.error.URLError(f"redirect to {url}, which is not HTTP")
        return super().redirect_request(req, fp, *answer)


def _scraped(url: str) -> bytes:
    """Return the answer of a URL; ValueError if it is too long."""
    deadline = time.monotonic() + TIMEOUT
    body = bytearray()
    with urllib.request.build_opener(_Redirects).open(url, timeout=TIMEOUT) as answer:
        while part := answer.read1(2**16):
            body += part
            if len(body) > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(_LATE.format(TIMEOUT))
        if answer.length:
            raise http.client.IncompleteRead(bytes(body), answer.length)
    return bytes(body)


def _cut(text: str) -> str:
    """Return a text from outside, cut to the length of a line."""
    return text if len(text) <= MOST_OF_FAULT else f"{text[:MOST_OF_FAULT]}…"


def screen(view: View, since: str, faults: Mapping[str, str], width: int) -> RenderableType:
    """Draw one scrape: sums, the span of the counters, and the URLs that did not answer."""
    parts: list[RenderableType] = [_headline(view, since), Text()]
    parts.append(_curve(view, width))
    parts.append(Text())
    sides = Table.grid(padding=(0, 4))
    sides.add_row(_misses(view), _waste(view))
    parts.append(sides)
    if view.hints:
        parts += [Text(), _hints(view)]
    if view.hint_trials is not None:
        parts.append(_trials(view.hint_trials))
    if view.advice:
        parts += [Text(), *(Text(printable(line), style="bold green") for line in view.advice)]
    parts += [Text(printable(": ".join(fault)), style="red") for fault in faults.items()]
    return Group(*parts)


def _table(first: str, *others: str) -> Table:
    """Return a table without lines, whose columns but the first are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _headline(view: View, since: str) -> Text:
    text = Text("hit ratio ")
    text.append(percent_text(view.hit_ratio), style="bold")
    text.append(f" of {count_text(view.asked)} blocks {since}\n")
    text.append(f"policy {printable(view.policy) or '-'}, {view.capacity:,.0f} blocks of memory")
    if view.engines > 1:
        text.append(f" in {view.engines} engines")
    return text


def _curve(view: View, width: int) -> Table:
    """Draw the points: bars as long as the hit ratio, lighter in the error interval."""
    room = max(0, min(WIDEST_BAR, width - 50))
    table = _table("policy", "memory", "hit ratio", "±")
    table.add_column("")
    live = view.policy
    for each in sorted(
        view.shadows, key=lambda each: (each.policy != live, each.policy, each.memory)
    ):
        present = each.policy == live and each.memory == 1
        name = Text(printable(each.policy), style="bold" if present else "")
        size = f"{each.memory:g}×"
        if each.hit_ratio is None:
            reasons = _in_words(each.reasons, REASONS)
            withheld = f"not enough data: {reasons}" if reasons else "not enough data"
            table.add_row(name, size, "-", "", Text(withheld, style="dim"))
            continue
        # The present hit ratio is counted, so no mark applies to it.
        if each.marks and not present:
            ratio, half = percent_text(each.hit_ratio), f"{100 * (each.error or 0.0):.1f}"
            why = f"unreliable: {_in_words(each.marks, MARKS)}"
            table.add_row(name, size, Text(ratio, "dim"), Text(half, "dim"), Text(why, "yellow"))
            continue
        error = each.error or 0.0
        low = round(room * max(0.0, each.hit_ratio - error))
        high = round(room * min(1.0, each.hit_ratio + error))
        bar = Text("█" * low, style="cyan" if each.policy == live else "blue")
        bar.append("░" * (high - low))
        table.add_row(name, size, percent_text(each.hit_ratio), f"{100 * error:.1f}", bar)
    return table


def _in_words(names: Sequence[str], words: dict[str, str]) -> str:
    """Return marks or reasons as text; unknown ones, of later versions, unchanged."""
    return printable(", ".join(words.get(name, name) for name in names))


def _misses(view: View) -> Table:
    table = _table("why blocks were missed", "")
    for cause, share in view.causes.items():
        table.add_row(Text(printable(CAUSES.get(cause, cause))), percent_text(share))
    return table


def _waste(view: View) -> Table:
    table = _table("stores", "")
    hits = view.asked - view.missed
    table.add_row("blocks stored per hit", f"{view.stored / hits:.2f}" if hits > 0 else "-")
    table.add_row("evicted without a hit", percent_text(view.waste))
    table.add_row("not admitted", count_text(view.declined))
    table.add_row("stores refused", count_text(view.refused))
    if view.resets:
        table.add_row("resets of the cache", count_text(view.resets))
    if view.tail_missed_tokens:
        kept = count_text(view.tail_missed_tokens)
        table.add_row("tokens not loaded: no window or state", kept)
    for kind, blocks in view.overdue.items():
        style = "bold red" if blocks else ""
        table.add_row(Text(f"overdue {kind}s, blocks"), Text(f"{blocks:,.0f}", style=style))
    return table


def _hints(view: View) -> Table:
    table = _table("hints of", "ends", "returns in", "came back", "factor")
    for each in view.hints:
        table.add_row(
            Text(printable(each.source)) if each.source else Text("(no name)", "dim"),
            count_text(each.ends),
            count_text(each.expects),
            "-" if each.returns is None else count_text(each.returns),
            "-" if each.factor is None else f"× {each.factor:.2g}",
        )
    return table


def _trials(trials: HintTrials) -> Text:
    """Return the gain from hints of returns in two small caches, and whether it is realised."""
    gain = change_text(trials.hit_ratio - trials.plain)
    text = Text("hints of returns gain ")
    text.append(f"{gain} ± {100 * trials.error:.1f}", style="bold")
    text.append(
        f" points: {percent_text(trials.hit_ratio)} of a sample with them, "
        f"{percent_text(trials.plain)} without"
    )
    if trials.followed <= 0:
        text.append("; another rule is in use now", style="yellow")
    elif trials.followed < 1:
        share = percent_text(trials.followed)
        text.append(f"; for {share} of the blocks asked for, the others use another rule now")
    return text


def _as_object(view: View) -> dict[str, object]:
    """Return a scrape as the object of ``--json``."""
    return {**dataclasses.asdict(view), "hit_ratio": view.hit_ratio}
