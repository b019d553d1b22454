"""Reports for the tests: one made from a replay, and one whose every foreign string is hostile."""

import functools
from dataclasses import replace

from kvoffload.advise import (
    Disk,
    RecordedTrace,
    Setup,
    advise,
    details,
    engine_of,
    model_shape,
)
from kvoffload.advise.comparison import Change, Comparison
from kvoffload.advise.report import report_html
from kvoffload.advise.setup import FleetTier
from kvoffload.advise.subject import Subject
from kvoffload.traces import Workload

MEMORY = 200 * 2**20
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\n&amp;{{7*7}}"


VARIANTS = ("lru", "hit-density?ghosts=1.25&guard=0", "hit-density?ghosts=1.75&guard=0")


def subject(requests=300, memory=MEMORY, name="chats.jsonl", **more):
    engine = engine_of(None, None, prefill_rate=1e4, link_bandwidth=1e9)
    setup = Setup(memory=memory, block_tokens=512, token_bytes=2048, engine=engine, **more)
    found, alone, more = replays(requests, setup)
    command = f"kvoffload advise {name}"
    return Subject(found, name, command=command, by_device=(alone, found), details=more)


@functools.cache
def replays(requests, setup):
    """Return the advice behind a cache on the accelerator and without one, and its details."""
    recorded = RecordedTrace.of(Workload(requests, seed=3))
    found = advise(recorded, replace(setup, device_memory=setup.memory // 4))
    disk = Disk(10 * setup.memory, ("lru", "hit-density"))
    return found, advise(recorded, setup), details(recorded, found, disk)


@functools.cache
def page(**arguments):
    return report_html(subject(**arguments))


def hostile_page():
    model = replace(model_shape("gpt-oss-20b"), name=HOSTILE)
    return report_html(replace(subject(name=HOSTILE), model=model, command=HOSTILE))


def fleet_subject(name="chats.jsonl", **more):
    return Subject(fleets(), name, command=f"kvoffload advise {name}", **more)


@functools.cache
def fleets():
    """Return the advice on four engines."""
    engine = engine_of(None, None, prefill_rate=1e4, link_bandwidth=1e9)
    tiers = (None, FleetTier("shared", 10 * MEMORY))
    setup = Setup(MEMORY // 20, 512, 2048, engines=4, engine=engine, tiers=tiers)
    return advise(RecordedTrace.of(Workload(200, seed=3), arrivals=True), setup)


@functools.cache
def fleet_page():
    return report_html(fleet_subject())


def hostile_fleet_page():
    model = replace(model_shape("llama-3.1-8b"), name=HOSTILE)
    subject = replace(fleet_subject(name=HOSTILE), model=model, command=HOSTILE)
    since = Comparison(HOSTILE, HOSTILE, (Change("router", HOSTILE, HOSTILE),))
    return report_html(replace(subject, since=since))


def contrast(one, other):
    """Return the contrast of two colours, red, green and blue up to 255, as WCAG 2.1 defines it."""
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    shares = [part / 255 for part in colour]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
