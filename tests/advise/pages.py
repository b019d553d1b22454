"""Reports for the tests: one made from a replay, and one whose every foreign string is hostile."""

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
from kvoffload.advise.report import report_html
from kvoffload.advise.subject import Subject
from kvoffload.traces import Workload

MEMORY = 200 * 2**20
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\n&amp;{{7*7}}"


VARIANTS = ("lru", "hit-density?ghosts=1.25&guard=0", "hit-density?ghosts=1.75&guard=0")


def subject(requests=300, memory=MEMORY, name="chats.jsonl", **more):
    engine = engine_of(None, None, prefill_rate=1e4, link_bandwidth=1e9)
    setup = Setup(memory=memory, block_tokens=512, token_bytes=2048, engine=engine, **more)
    recorded = RecordedTrace.of(Workload(requests, seed=3))
    behind = replace(setup, device_memory=memory // 4)
    found = advise(recorded, behind)
    return Subject(
        name,
        found,
        None,
        "bfloat16",
        f"kvoffload advise {name}",
        alone=advise(recorded, setup),
        details=details(recorded, found, Disk(10 * memory, ("lru", "hit-density"))),
    )


def page(**arguments):
    return report_html(subject(**arguments))


def hostile_page():
    model = replace(model_shape("gpt-oss-20b"), name=HOSTILE)
    return report_html(replace(subject(name=HOSTILE), model=model, command=HOSTILE))
