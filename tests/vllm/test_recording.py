"""``kvoffload_record``: what is written, that decisions stay, and what it says of bad values."""

from __future__ import annotations

import dataclasses
import gc
import gzip
import logging
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from kvoffload import CPUBackend, LRUOffloadingManager
from kvoffload.errors import MissingExtraError
from kvoffload.integrations.vllm import KVOffloadManager
from kvoffload.integrations.vllm._upstream import installed_release
from kvoffload.integrations.vllm.recording import Recording, RequestRecorder
from kvoffload.replay import Configuration, replay
from kvoffload.testing.policies import check_invariants
from kvoffload.traces import Trace
from tests.vllm.configuration import PACKAGE, configuration
from tests.vllm.configuration import create as create_spec
from tests.vllm.conftest import SEED
from tests.vllm.engine import BLOCK_TOKENS, SPECS, Engine, Talk
from tests.vllm.requests import WithoutHints, key
from tests.vllm.requests import context as context_of
from tests.vllm.watched import Request

ROOT = Path(__file__).parents[2]
SPEC = {"spec_name": "KVOffloadSpec", "spec_module_path": PACKAGE}
ANSWERS = {"offload_prompt_only": False}


def create(num_chunks=8, **extra):
    return create_spec(num_chunks, **{**SPEC, **extra})


def context(numbers):
    return context_of([key(number) for number in numbers])


def chains(path):
    """The recorded requests; ids numbered as they first appear, since they are salted."""
    numbers: dict[int, int] = {}
    return [
        [numbers.setdefault(one, len(numbers)) for one in request.hash_ids]
        for request in Trace(str(path))
    ]


def numbered(requests):
    numbers: dict[object, int] = {}
    return [[numbers.setdefault(one, len(numbers)) for one in request] for request in requests]


def run(manager, numbers):
    """Run one request, which stores in steps of three chunks."""
    request = Request(manager, [key(number) for number in numbers])
    if request.hits:
        request.load()
    for start in range(len(request.hits), len(numbers), 3):
        request.store(request.keys[start : start + 3])
    request.finish()
    return request


def recorder_of(path, *groups, **options):
    """Return a recorder of a model with such groups, or with one."""
    config = configuration(8, **options)
    if groups:
        config = dataclasses.replace(config, groups=groups)
    return RequestRecorder(Recording(path, 2**20), config)


def recorded_by(recorder, path, made):
    """Record a request; return the number of its chunks, and its tokens."""
    recorder.record(made)
    recorder.log.close()
    (request,) = Trace(str(path))
    return len(request.hash_ids), request.input_length


def test_a_recorded_run_replays_to_the_same_hits(tmp_path):
    rng = random.Random(SEED)
    path = tmp_path / "trace.jsonl.zst"
    manager = create(60, kvoffload_record=str(path)).get_manager()
    hits = 0
    talks = [[rng.randrange(10**6) for _ in range(rng.randint(1, 8))] for _ in range(15)]
    requests = []
    for _ in range(300):
        talk = rng.choice(talks)
        talk += [rng.randrange(10**6) for _ in range(rng.randint(0, 3))]
        del talk[25:]
        requests.append(list(dict.fromkeys(talk)))
        hits += len(run(manager, requests[-1]).hits)
    manager.shutdown()
    assert chains(path) == numbered(requests)
    assert all(one.input_length == 16 * len(one.hash_ids) for one in Trace(str(path)))
    manager = LRUOffloadingManager(CPUBackend(16, 60))
    result = replay(Trace(str(path)), Configuration(host=60), manager=manager)
    assert hits > 100
    if installed_release().provisional_ranks:
        assert result.hits == hits
    else:  # what a request loads, and stores in parts, becomes recent only when it finishes
        assert abs(result.hits - hits) <= 0.3 * hits


@pytest.mark.parametrize("num_groups", [1, 2])
def test_through_the_real_scheduler(tmp_path, host_platform, num_groups):
    """Requests of many turns, prefilled in parts, preempted, found on the accelerator, reset."""
    path = tmp_path / "trace.jsonl.gz"
    engines = [
        Engine(tmp_path, SPECS["vllm"], num_groups),
        Engine(tmp_path, {**SPECS["kvoffload"], "kvoffload_record": str(path)}, num_groups),
    ]
    talk = Talk(engines, random.Random(SEED))
    for _ in range(40):
        talk.turn()
    talk.drain()
    engines[1].connector.manager.shutdown()
    check_invariants(engines[1].connector.manager)
    # A chunk's identity is all that comes before it; requests end in another order than they came.
    expected = [
        [tuple(prompt[:end]) for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)]
        for prompt in talk.prompts
    ]
    recorded = chains(path)
    assert len(recorded) == len(expected)
    assert sorted(map(len, recorded)) == sorted(map(len, expected))
    assert len({one for ids in recorded for one in ids}) == len(
        {one for ids in expected for one in ids}
    )
    for ids in recorded:  # a chain, each chunk once
        assert len(set(ids)) == len(ids)
    # Of what windows are kept for: whether the prompt's last token is in the last chunk.
    tells_tails = num_groups == 2 and installed_release().group_kinds
    lengths = sorted(
        len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        + bool(tells_tails and len(prompt) % BLOCK_TOKENS)
        for prompt in talk.prompts
    )
    # A request that has never offered the last chunk of its window is recorded one token shorter.
    found = sorted(one.input_length for one in Trace(str(path)))
    shorter = [length - own for length, own in zip(lengths, found, strict=True)]
    assert set(shorter) <= {0, 1}
    assert sum(shorter) <= 2


def said(path):
    return [(request.expect, request.ends) for request in Trace(str(path))]


@pytest.mark.parametrize(
    ("params", "payload", "expected"),
    [
        (None, None, (None, False)),
        ({"kvoffload": {"ends": True, "source": "somebody"}}, None, (None, True)),
        ({"kvoffload": {"expect_s": 2.5}}, None, (2500, False)),
        ({"kvoffload": {"expect_s": 2.5}}, {"ends": True}, (None, True)),  # the last word
    ],
)
def test_a_row_has_what_the_client_said(tmp_path, params, payload, expected):
    path = tmp_path / "trace.jsonl.gz"
    manager = create(8, kvoffload_record=str(path)).get_manager()
    made = context([1, 2, 3])
    made.kv_transfer_params = params
    if payload is not None:
        action = KvHintAction("a1", "kvoffload.hint", "1", payload)
        made.kv_hints = KvHintsEnvelope("1", "m1", [action])
    manager.on_new_request(made)
    manager.prepare_store([key(1), key(2)], made)
    manager.on_request_finished(made)
    run(manager, [1, 2, 3])
    manager.shutdown()
    assert said(path) == [expected, (None, False)]
    assert chains(path) == [[0, 1], [0, 1, 2]]
    assert b"somebody" not in gzip.decompress(path.read_bytes())


def test_hints_that_cannot_be_read_do_not_stop_the_recording(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    manager = create(8, kvoffload_record=str(path)).get_manager()
    made = WithoutHints("odd")
    made.set_offload_key_position(key(1), 16)
    manager.on_new_request(made)
    manager.prepare_store([key(1)], made)
    manager.on_request_finished(made)
    manager.shutdown()
    assert said(path) == [(None, False)]


def test_one_of_several_groups_stands_for_all(tmp_path):
    path = tmp_path / "trace.jsonl.zst"
    groups = ((32, ("wide",), 0), (16, ("narrow",), 1), (16, ("another",), 2))
    recorder = recorder_of(path, *(OffloadingGroupConfig(*group) for group in groups))
    made = ReqContext("r")
    for group, tokens in ((0, 32), (1, 16), (2, 16)):
        for place in range(64 // tokens):
            made.set_offload_key_position(key(place + 100 * tokens, group), (place + 1) * tokens)
    made.set_offload_key_position(key(999, 1), 40)  # inside a chunk
    recorder.reach([key(3201, 0)], made)
    assert recorded_by(recorder, path, made) == (4, 64)


@pytest.mark.skipif(not installed_release().group_kinds, reason="vLLM tells no kinds of groups")
@pytest.mark.parametrize(
    ("options", "full_until", "window_until", "chunks", "more"),
    [
        (ANSWERS, 64, 64, 4, 1),  # the prompt goes on behind the last chunk
        (ANSWERS, 64, 48, 4, 0),  # ends with it
        (ANSWERS, 96, 64, 5, 0),  # what comes behind is of an answer
        (ANSWERS, 96, 0, 1, 0),  # of one that ended before its window was kept, it cannot be told
        (ANSWERS, 0, 64, 4, 1),
        ({}, 64, 64, 4, 1),
        ({}, 96, 64, 6, 0),  # without answers everything is of the prompt
        ({}, 96, 0, 6, 0),
        ({"offload_prompt_only": 1}, 96, 0, 6, 0),
    ],
)
def test_the_length_tells_where_windows_are_of_use(
    tmp_path, options, full_until, window_until, chunks, more
):
    path = tmp_path / "trace.jsonl.gz"
    groups = OffloadingGroupConfig(8, ("window",), 0, 4), OffloadingGroupConfig(16, ("full",), 1)
    recorder = recorder_of(path, *groups, **options)
    made = ReqContext("r")
    keys = {}
    for group, tokens in ((0, 8), (1, 16)):
        for end in range(tokens, 129, tokens):
            keys[group, end] = key(end, group)
            made.set_offload_key_position(keys[group, end], end)
    for group, until in ((1, full_until), (0, window_until)):
        if until:
            recorder.reach([keys[group, until]], made)
    assert recorded_by(recorder, path, made) == (chunks, 16 * chunks + more)


@pytest.mark.skipif(not installed_release().group_kinds, reason="vLLM tells no kinds of groups")
def test_a_model_of_windows_alone_is_recorded_by_one_of_them(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    recorder = recorder_of(path, OffloadingGroupConfig(16, ("window",), 0, 2))
    made = context(range(6))
    recorder.reach([key(2), key(3)], made)
    assert recorded_by(recorder, path, made) == (4, 4 * 16 + 1)


def test_what_counts_is_what_was_loaded_or_offered(tmp_path):
    """Neither an answer that is not offered, nor what an aborted request never reached."""
    path = tmp_path / "trace.jsonl.gz"
    manager = create(8, kvoffload_record=str(path)).get_manager()
    manager.on_request_finished(context([1, 2, 3]))  # aborted while it waited
    made = context([1, 2, 3, 4])
    manager.on_new_request(made)
    manager.prepare_store([key(2), key(3)], made)  # out of order, the first found on the device
    manager.prepare_store([key(1)], made)
    manager.complete_store([key(1), key(2), key(3)], made)
    manager.on_request_finished(made)
    manager.on_request_finished(made)  # told twice, recorded once
    manager.reset_cache()
    manager.on_request_finished(made)
    manager.shutdown()
    assert chains(path) == [[0, 1, 2]]


def test_what_has_not_finished_is_recorded_at_the_end(tmp_path):
    """In the order in which it came, as far as it came; a request that finished only once."""
    path = tmp_path / "trace.jsonl.gz"
    manager = create(16, kvoffload_record=str(path)).get_manager()
    first, second, never = context([1, 2, 3]), context([4, 5]), context([6])
    for made in (first, second, never):
        manager.on_new_request(made)
    manager.prepare_store([key(1), key(2)], first)
    run(manager, [7, 8, 9])
    manager.prepare_store([key(4), key(5)], second)
    manager.shutdown()
    manager.shutdown()
    assert chains(path) == [[0, 1, 2], [3, 4], [5, 6]]


def test_what_has_not_finished_is_recorded_when_the_interpreter_ends(tmp_path):
    """`vllm.LLM` shuts its engine down then, if at all."""
    path = tmp_path / "trace.jsonl.gz"
    code = f"""
from tests.vllm.test_recording import context, create, key
manager = create(8, kvoffload_record={str(path)!r}).get_manager()
made = context([1, 2, 3])
manager.on_new_request(made)
manager.prepare_store([key(1), key(2)], made)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
    assert chains(path) == [[0, 1]]


def test_a_request_that_finished_is_not_held(tmp_path):
    manager = create(8, kvoffload_record=str(tmp_path / "trace.jsonl.gz")).get_manager()
    made = weakref.ref(run(manager, [1, 2, 3]).context)
    gc.collect()
    assert made() is None
    manager.shutdown()


def test_trouble_with_the_recording_stays_out_of_the_engine(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    manager = create(8, kvoffload_record=str(tmp_path / "trace.gz")).get_manager()
    made = context([1, 2])
    made._offload_key_positions = None  # no longer what it was
    other = ReqContext("other")
    with caplog.at_level(logging.WARNING, logger="vllm.kvoffload"):
        output = manager.prepare_store([key(5)], other)
        manager.complete_store([key(5)], other)
        del other._offload_key_positions
        manager.on_request_finished(context([1]))
        manager.prepare_load([key(5)], context([5]))
        broken = ReqContext("broken")
        monkeypatch.setattr(RequestRecorder, "chain", None)
        manager.prepare_store([key(6)], broken)
        manager.on_request_finished(broken)
        manager.on_request_finished(context([1]))
    assert output.keys_to_store == [key(5)]
    assert caplog.text.count("recording stopped") == 1
    manager.shutdown()


def test_a_manager_that_is_dropped_leaves_no_thread(tmp_path):
    path = tmp_path / "trace.gz"
    manager = KVOffloadManager(8, "lru")
    recorder = recorder_of(path)
    recorder.attach(manager)
    thread = recorder.log._thread
    recorder.log.add([key(1)])
    del manager, recorder
    gc.collect()
    thread.join(300)
    assert not thread.is_alive()
    assert chains(path) == [[0]]


def test_each_replica_has_a_file(tmp_path):
    config = configuration(8)
    parallel = dataclasses.replace(config.parallel, data_parallel_index=1, data_parallel_size=2)
    recording = Recording(tmp_path / "trace.jsonl.gz", 2**20)
    recorder = RequestRecorder(recording, dataclasses.replace(config, parallel=parallel))
    assert recorder.log.path == tmp_path / "trace-replica1.jsonl.gz"
    recorder.log.close()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (KVOffloadManager, {"store_threshold": 3}),
        (TieringOffloadingManager, {"spec_name": "KVOffloadTieringSpec"}),
        (
            CPUOffloadingManager,
            {"eviction_policy": "Someones", "cache_policy_module_path": "tests.vllm.test_spec"},
        ),
    ],
)
def test_what_the_threshold_hides_and_other_managers_are_recorded_too(tmp_path, kind, options):
    path = tmp_path / "trace.gz"
    if kind is TieringOffloadingManager:
        options |= {"secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "tier")}]}
    manager = create(8, kvoffload_record=str(path), **options).get_manager()
    assert type(manager) is kind
    run(manager, [1, 2, 3, 4])
    manager.shutdown()
    assert chains(path) == [[0, 1, 2, 3]]


def test_the_size_needs_the_path_of_a_recording():
    with pytest.raises(ValueError, match="kvoffload_record_max_bytes needs kvoffload_record"):
        create(kvoffload_record_max_bytes=2**20)


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    spec = create(kvoffload_record=str(tmp_path / "no" / "trace.gz"))
    with pytest.raises(ValueError, match=r"kvoffload_record: cannot write .*No such file"):
        spec.get_manager()


def test_zstandard_needs_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    spec = create(kvoffload_record=str(tmp_path / "trace.zst"))
    with pytest.raises(MissingExtraError, match=r"needs backports\.zstd: .*\[cli\]'"):
        spec.get_manager()
