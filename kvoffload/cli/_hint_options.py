"""Options for the hints that clients of a replayed trace give about their sessions."""

from __future__ import annotations

from dataclasses import asdict

import click

from kvoffload.advise.units import percent_text
from kvoffload.replay import HintOptions
from kvoffload.replay.hints import HINT_KINDS, TraceHints

from ._options import bundled
from ._sources import refuse_given

_NONE = "none"


def _read(
    hints: str,
    hints_noise: float | None,
    hints_share: float | None,
    hints_liars: float | None,
    hints_seed: int | None,
) -> HintOptions | None:
    """Return the options; refuse bad ones, and those that would have no effect."""
    given = {"noise": hints_noise, "share": hints_share, "liars": hints_liars, "seed": hints_seed}
    options = {name: value for name, value in given.items() if value is not None}
    if hints == _NONE:
        refuse_given("must go with --hints, got it without", *(f"hints_{name}" for name in given))
        return None
    try:
        return HintOptions(told=hints, **options)  # type: ignore[arg-type]
    except ValueError as error:
        raise click.UsageError(f"--hints-{error}") from None


_HOW = (
    ("seed", click.IntRange(min=0), None, "Seed of the draws for hints.  [default: 0]"),
    ("liars", float, "SHARE", "Share of all sessions that always say 1 s.  [default: 0]"),
    ("share", float, "SHARE", "Share of the other sessions that give hints.  [default: 1]"),
    (
        *("noise", float, "FACTOR"),
        "Factor by which expected times are off, one standard deviation.  [default: 1]",
    ),
)
hint_options = bundled(
    "hints",
    _read,
    *(
        click.option(f"--hints-{name}", type=kind, metavar=metavar, help=text)
        for name, kind, metavar, text in _HOW
    ),
    click.option(
        "--hints",
        type=click.Choice([_NONE, *HINT_KINDS]),
        default=_NONE,
        show_default=True,
        help="Hints that clients give, as recorded: the session ends (ends), when its next "
        "request is expected (expect), or both.",
    ),
)
"""The options of hints: ``hints``, None for none."""


def hints_object(options: HintOptions | None, hints: TraceHints | None) -> dict[str, object] | None:
    """Return the hints as the object that ``--json`` prints."""
    if options is None or hints is None:
        return None
    return {
        **asdict(options),
        "expecting_requests": hints.num_expecting,
        "ending_requests": hints.num_ending,
    }


def hints_text(options: HintOptions | None, hints: TraceHints | None) -> str | None:
    """Return the hints in words; None without hints."""
    if options is None or hints is None:
        return None
    said = []
    if options.told != "ends":
        within = f" (within a factor of {options.noise:g})" if options.noise > 1 else ""
        said.append(f"expected returns: {hints.num_expecting:,}{within}")
    if options.told != "expect":
        said.append(f"ends of sessions: {hints.num_ending:,}")
    who = "all sessions" if options.share == 1 else f"{percent_text(options.share)} of the sessions"
    if options.liars:
        who += f", but {percent_text(options.liars)} always say 1 s"
    return f"hints of {who}: {', '.join(said)}"
