"""The balance of offloading: rates estimated or given, and the sentences on it."""

import dataclasses

import pytest

from kvoffload.advise import Setup, accelerator, advise, engine_of
from kvoffload.advise.accelerators import accelerator_names
from kvoffload.advise.economy import workers_for
from kvoffload.advise.models import model_shape
from kvoffload.advise.remarks import remarks
from kvoffload.advise.subject import Subject
from kvoffload.policies import registry
from kvoffload.traces import Workload

pytestmark = pytest.mark.fast

MIB = 2**20
SETUP = Setup(200 * MIB, 512, 2048, policies=registry.names(), step_tokens=None)
WORKLOAD = list(Workload(300, seed=3))


@pytest.fixture(scope="module")
def advice():
    return advise(WORKLOAD, SETUP)


def test_accelerators_are_known_by_name_and_have_a_source():
    for name in accelerator_names():
        found = accelerator(name.upper())
        assert found.name == name
        assert found.source.startswith("https://")
        assert 0 < found.link_bandwidth < found.link
    with pytest.raises(ValueError, match="got 'h1000'; did you mean 'h100'"):
        accelerator("h1000")


def test_the_fewest_workers_that_hold_the_model_are_taken():
    h100 = accelerator("h100")
    assert workers_for(model_shape("llama-3.1-8b"), h100) == 1
    assert workers_for(model_shape("llama-3.1-70b"), h100) == 4
    assert workers_for(model_shape("deepseek-v3"), h100) == 16
    huge = dataclasses.replace(model_shape("llama-3.1-8b"), weights=1e15)
    assert workers_for(huge, h100) == 0


def test_rates_are_estimated_from_the_model_and_the_accelerator():
    model, h100 = model_shape("qwen3-30b-a3b"), accelerator("h100")
    engine = engine_of(model, h100, workers=2)
    assert engine.prefill_rate == pytest.approx(2 * 0.5 * h100.flops / (2 * 3.3e9))
    assert engine.link_bandwidth == 2 * h100.link_bandwidth
    assert engine.device_memory == pytest.approx(2 * 80e9 * 0.92 - 2 * 30.5e9, abs=1)
    assert engine.name == "2 × h100"
    assert engine.is_known


def test_blocks_of_one_worker_where_several_hold_the_model_are_said(advice):
    model = model_shape("qwen3-235b-a22b")
    engine = engine_of(model, accelerator("h100"))
    assert engine.workers == 8 > model.kinds[0].kv_heads
    setup = dataclasses.replace(advice.setup, token_bytes=model.bytes_per_token(), engine=engine)
    once = Subject(dataclasses.replace(advice, setup=setup), model=model)
    assert any("those of one worker, not of the 8" in text for text in remarks(once))
    setup = dataclasses.replace(setup, token_bytes=model.bytes_per_token(tensor_parallel=8))
    right = dataclasses.replace(once, advice=dataclasses.replace(advice, setup=setup))
    assert not any("of one worker" in text for text in remarks(right))
    kinds = (dataclasses.replace(model.kinds[0], kv_heads=10),)
    uneven = dataclasses.replace(once, model=dataclasses.replace(model, kinds=kinds))
    setup = dataclasses.replace(setup, token_bytes=uneven.model.bytes_per_token())
    uneven = dataclasses.replace(uneven, advice=dataclasses.replace(advice, setup=setup))
    (remark,) = [text for text in remarks(uneven) if "of one worker" in text]
    assert "must divide the 10 KV heads" in remark
