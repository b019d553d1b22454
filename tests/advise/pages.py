"""Reports for the tests: one made from a replay, and one whose every foreign string is hostile."""

from dataclasses import replace

from kvoffload.advise import Setup, advise, model_shape
from kvoffload.advise.report import report_html
from kvoffload.advise.subject import Subject
from kvoffload.traces import Workload

MEMORY = 200 * 2**20
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\n&amp;{{7*7}}"


def subject(requests=300, memory=MEMORY, name="chats.jsonl"):
    setup = Setup(memory=memory, block_tokens=512, token_bytes=2048)
    found = advise(Workload(requests, seed=3), setup)
    return Subject(name, found, None, "bfloat16", f"kvoffload advise {name}")


def page(**arguments):
    return report_html(subject(**arguments))


def hostile_page():
    model = replace(model_shape("gpt-oss-20b"), name=HOSTILE, remark=HOSTILE)
    return report_html(replace(subject(name=HOSTILE), model=model, command=HOSTILE))
