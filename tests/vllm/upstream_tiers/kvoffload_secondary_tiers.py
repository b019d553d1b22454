"""A plugin for pytest: in vLLM's own tests of tiers, the library's take the place of vLLM's.

vLLM's file tier is a slab, its example tier a tier in memory whose jobs are done when they have
been submitted. The tests look at a few parts of vLLM's classes, which are given here.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from queue import SimpleQueue
from runpy import run_path
from types import SimpleNamespace
from unittest.mock import MagicMock

from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs

from kvoffload.integrations.vllm import KVOffloadFileTier, KVOffloadTier
from kvoffload.tiers import State

# By its path: in these runs `tests` is vLLM's package.
configuration = run_path(str(Path(__file__).parents[1] / "configuration.py"))["configuration"]


class Slab(KVOffloadFileTier):
    """The options of vLLM's file tier, and what its tests read of it."""

    def __init__(self, *arguments, root_dir, n_read_threads=16, n_write_threads=16, **options):
        view = arguments[1] if len(arguments) > 1 else options["primary_kv_view"]
        super().__init__(
            *arguments,
            path=root_dir,
            capacity_bytes=16 * view.strides[0],
            on_reset="keep",  # the tests wait for jobs as a reset does
            **{"locality": None, **options},
        )
        answered = SimpleQueue()
        answered.put(None)  # at once
        self._lookup_manager = SimpleNamespace(_pending_results=answered)
        blocks = self.tier.folder / "blocks.dat"
        self.file_mapper = SimpleNamespace(
            get_file_name=lambda key: str(blocks), base_path=str(self.tier.folder)
        )
        self.events = [] if self._emits else None
        self._store_job_keys = {}


class Chunks(MutableMapping):
    """The blocks of a tier by key, as a mapping that can be written."""

    def __init__(self, adapter):
        self.adapter, self.tier = adapter, adapter.tier

    def __setitem__(self, key, value):
        self.adapter._collect()
        assert self.tier.wait([self.tier.put([key], [0])], 60)
        assert len(self.tier.poll()) == 1

    def __getitem__(self, key):
        if self.tier.state(key) != State.HIT:
            raise KeyError(key)
        return True

    def __delitem__(self, key):
        self.tier.discard([key])

    def __len__(self):
        return self.tier.stats()["blocks"]

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self.tier._index.blocks()))


class Example(KVOffloadTier):
    """The example tier's constructor, and its way to be done at once."""

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec,
        primary_kv_view,
        tier_type,
        custom_param=0,
        backpressure_detector=None,
    ):
        if isinstance(offloading_spec, MagicMock):
            offloading_spec = SimpleNamespace(config=configuration(4), kv_events_config=MagicMock())
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            url=f"memory:?capacity={64 * primary_kv_view.strides[0]}",
            on_reset="keep",
            backpressure_detector=backpressure_detector,
        )
        self.chunks = Chunks(self)
        self._custom_param = custom_param

    @property
    def completed_jobs(self):
        self._collect()
        return self._finished

    def get_num_chunks(self):
        return len(self.chunks)

    @classmethod
    def config_info_keys(cls, tier_config):
        return example.ExampleTierInfo.config_info_keys()

    def config_info(self):
        return example.ExampleTierInfo(example_info=self._custom_param).as_config_info()

    def submit_store(self, job_metadata):
        super().submit_store(job_metadata)
        assert self.tier.wait(list(self._transfers), 60)

    def submit_load(self, job_metadata):
        super().submit_load(job_metadata)
        assert self.tier.wait(list(self._transfers), 60)

    def get_stats(self):
        return None  # as the example


fs.FileSystemTierManager = Slab
example.ExampleSecondaryTierManager = Example
